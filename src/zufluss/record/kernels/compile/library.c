/* The frame of the compiled library: a Python module that calls kernels.
 *
 * `table.h` is generated with the machine code (objects.py). It lists the kernels: name, address,
 * result and arguments. The machine code of a kernel takes one array of 64-bit slots. On the way
 * in, a number takes one slot, an array takes its address and then its shape. On the way out the
 * slots hold the results, or, if the kernel returns another number than 0, the address of the
 * exception.
 *
 * Only this file may run on every processor: `features()` says what the kernels may use.
 */
#define Py_LIMITED_API 0x030B0000
#define PY_SSIZE_T_CLEAN
#define NPY_NO_DEPRECATED_API NPY_2_0_API_VERSION
#define NPY_TARGET_VERSION NPY_2_0_API_VERSION
#include <Python.h>
#include <numpy/arrayobject.h>
#include <stdint.h>
#include <stdlib.h>

typedef struct {
    char form;       /* 'a' array, 'i' int64, 'u' unsigned integer, 'b' truth value */
    int type;        /* of an array: numpy's number of the element type */
    const char *of;  /* of an array: the name of the element type */
    int dimensions;  /* of an array */
    int writable;    /* of an array: whether the kernel writes to it */
} argument;

typedef struct {
    const char *name;
    int32_t (*run)(int64_t *slots);
    int keeps_gil;
    char form;    /* of the result: 'n' none, 'i' integer, 'u' unsigned integer, 'b', 't' tuple */
    int results;  /* length of the tuple */
    int count;    /* of the arguments */
    const argument *arguments;
} kernel;

#include "table.h"

/* -- what numba's code calls for arrays that a kernel creates ----------------------------------- */

typedef struct {
    size_t references;
    void *destructor, *destructor_info, *data;
    size_t size;
    void *allocator;
} allocation;

__attribute__((visibility("hidden")))
void *NRT_MemInfo_alloc_aligned(size_t size, unsigned align)
{
    char *block = malloc(sizeof(allocation) + size + align);
    allocation *made = (allocation *)block;
    if (block == NULL)
        return NULL;
    uintptr_t data = (uintptr_t)(block + sizeof(allocation)) + align - 1;
    *made = (allocation){.references = 1, .data = (void *)(data - data % align), .size = size};
    return made;
}

__attribute__((visibility("hidden")))
void NRT_MemInfo_call_dtor(void *made)
{
    free(made);
}

/* -- arguments ----------------------------------------------------------------------------------- */

static int same_type(PyArrayObject *array, int type)
{
    int number = PyArray_TYPE(array);
    if (number == type)
        return 1;
    /* two of C's types may have 64 bits */
    return type == NPY_INT64 ? number == NPY_LONGLONG && sizeof(long long) == 8
         : type == NPY_UINT64 ? number == NPY_ULONGLONG && sizeof(long long) == 8
         : 0;
}

/* Arrays need no alignment, as for numba: columns in a log file begin at any byte. */
static int fits(PyObject *given, const argument *wanted)
{
    PyArrayObject *array = (PyArrayObject *)given;
    int flags = NPY_ARRAY_C_CONTIGUOUS;
    if (wanted->writable)
        flags |= NPY_ARRAY_WRITEABLE;
    return PyArray_Check(given) && same_type(array, wanted->type) && PyArray_ISNOTSWAPPED(array)
        && PyArray_NDIM(array) == wanted->dimensions && PyArray_CHKFLAGS(array, flags);
}

static int take_array(const kernel *k, int number, PyObject *given, int64_t **slots)
{
    const argument *wanted = &k->arguments[number];
    if (!fits(given, wanted)) {
        PyErr_Format(PyExc_TypeError,
                     "%s: argument %d must be a contiguous%s array of %s with %d dimension(s)",
                     k->name, number + 1, wanted->writable ? " writable" : "", wanted->of,
                     wanted->dimensions);
        return 0;
    }
    PyArrayObject *array = (PyArrayObject *)given;
    *(*slots)++ = (int64_t)(intptr_t)PyArray_DATA(array);
    for (int i = 0; i < wanted->dimensions; i++)
        *(*slots)++ = PyArray_DIM(array, i);
    return 1;
}

static int take_integer(PyObject *given, char form, int64_t *slot)
{
    PyObject *number = PyNumber_Index(given);
    if (number == NULL)
        return 0;
    if (form == 'u') /* takes the lowest bits, as a conversion in C does */
        *slot = (int64_t)PyLong_AsUnsignedLongLongMask(number);
    else
        *slot = PyLong_AsLongLong(number);
    Py_DECREF(number);
    return !(*slot == -1 && PyErr_Occurred());
}

static int take(const kernel *k, PyObject *const *given, int64_t *slots)
{
    for (int i = 0; i < k->count; i++) {
        switch (k->arguments[i].form) {
        case 'a':
            if (!take_array(k, i, given[i], &slots))
                return 0;
            break;
        case 'b': {
            int truth = PyObject_IsTrue(given[i]);
            if (truth < 0)
                return 0;
            *slots++ = truth;
            break;
        }
        default:
            if (!take_integer(given[i], k->arguments[i].form, slots++))
                return 0;
        }
    }
    return 1;
}

/* -- results ------------------------------------------------------------------------------------- */

static PyObject *give(const kernel *k, const int64_t *slots)
{
    switch (k->form) {
    case 'i':
        return PyLong_FromLongLong(slots[0]);
    case 'u':
        return PyLong_FromUnsignedLongLong((uint64_t)slots[0]);
    case 'b':
        return PyBool_FromLong(slots[0] != 0);
    case 't': {
        PyObject *tuple = PyTuple_New(k->results);
        for (int i = 0; tuple != NULL && i < k->results; i++) {
            PyObject *number = PyLong_FromLongLong(slots[i]);
            if (number == NULL || PyTuple_SetItem(tuple, i, number) < 0)
                Py_CLEAR(tuple);
        }
        return tuple;
    }
    }
    Py_RETURN_NONE;
}

/* Raise what numba pickled: a tuple of class, arguments and place. */
static PyObject *fail(const kernel *k, int64_t info)
{
    const struct { const char *pickle; int32_t size; } *told = (const void *)(intptr_t)info;
    PyObject *pickle = told == NULL ? NULL : PyImport_ImportModule("pickle");
    PyObject *known =
        pickle == NULL ? NULL
                       : PyObject_CallMethod(pickle, "loads", "y#", told->pickle,
                                             (Py_ssize_t)told->size);
    PyObject *class = known == NULL ? NULL : PySequence_GetItem(known, 0);
    PyObject *given = known == NULL ? NULL : PySequence_GetItem(known, 1);
    if (class != NULL && given != NULL)
        PyErr_SetObject(class, given);
    else if (!PyErr_Occurred())
        PyErr_Format(PyExc_SystemError, "%s failed without an exception", k->name);
    Py_XDECREF(pickle);
    Py_XDECREF(known);
    Py_XDECREF(class);
    Py_XDECREF(given);
    return NULL;
}

static PyObject *call(PyObject *self, PyObject *const *given, Py_ssize_t count)
{
    const kernel *k = PyCapsule_GetPointer(self, NULL);
    int64_t slots[SLOTS_MAX];
    int32_t failed;
    if (k == NULL)
        return NULL;
    if (count != k->count)
        return PyErr_Format(PyExc_TypeError, "%s takes %d arguments, not %zd", k->name, k->count,
                            count);
    if (!take(k, given, slots))
        return NULL;
    if (k->keeps_gil) {
        failed = k->run(slots);
    } else {
        PyThreadState *thread = PyEval_SaveThread();
        failed = k->run(slots);
        PyEval_RestoreThread(thread);
    }
    return failed ? fail(k, slots[0]) : give(k, slots);
}

/* -- the module ---------------------------------------------------------------------------------- */

static PyMethodDef methods[KERNELS];

static PyObject *kernels(PyObject *module, PyObject *unused)
{
    PyObject *all = PyDict_New();
    for (int i = 0; all != NULL && i < KERNELS; i++) {
        methods[i] = (PyMethodDef){TABLE[i].name, (PyCFunction)(void (*)(void))call, METH_FASTCALL,
                                   NULL};
        PyObject *self = PyCapsule_New((void *)&TABLE[i], NULL, NULL);
        PyObject *function = self == NULL ? NULL : PyCFunction_NewEx(&methods[i], self, NULL);
        if (function == NULL || PyDict_SetItemString(all, TABLE[i].name, function) < 0)
            Py_CLEAR(all);
        Py_XDECREF(self);
        Py_XDECREF(function);
    }
    return all;
}

#if defined(__x86_64__)
#include <cpuid.h>

static PyObject *features(PyObject *module, PyObject *unused)
{
    unsigned a, b, c = 0, d, basic = 0, extended = 0, more = 0, saved = 0;
    if (__get_cpuid(1, &a, &b, &c, &d))
        basic = c;
    if (__get_cpuid_count(7, 0, &a, &b, &c, &d))
        extended = b;
    if (__get_cpuid(0x80000001, &a, &b, &c, &d))
        more = c;
    if (basic & (1u << 27)) /* the system saves the registers of AVX when it switches threads */
        __asm__("xgetbv" : "=a"(saved), "=d"(d) : "c"(0));
    int wide = (saved & 6) == 6;
    const struct { const char *name; int present; } all[] = {
        {"sse3", basic >> 0 & 1},         {"ssse3", basic >> 9 & 1},
        {"fma", wide && basic >> 12 & 1}, {"cx16", basic >> 13 & 1},
        {"sse4.1", basic >> 19 & 1},      {"sse4.2", basic >> 20 & 1},
        {"movbe", basic >> 22 & 1},       {"popcnt", basic >> 23 & 1},
        {"avx", wide && basic >> 28 & 1}, {"f16c", wide && basic >> 29 & 1},
        {"bmi", extended >> 3 & 1},       {"avx2", wide && extended >> 5 & 1},
        {"bmi2", extended >> 8 & 1},      {"sahf", more >> 0 & 1},
        {"lzcnt", more >> 5 & 1},
    };
    PyObject *names = PyList_New(0);
    for (size_t i = 0; names != NULL && i < sizeof all / sizeof *all; i++) {
        PyObject *name = all[i].present ? PyUnicode_FromString(all[i].name) : NULL;
        if (name != NULL && PyList_Append(names, name) < 0)
            Py_CLEAR(names);
        Py_XDECREF(name);
    }
    return names;
}
#else
static PyObject *features(PyObject *module, PyObject *unused)
{
    return PyList_New(0);
}
#endif

static int execute(PyObject *module)
{
    import_array1(-1);
    return 0;
}

static PyMethodDef module_methods[] = {
    {"kernels", kernels, METH_NOARGS, "Return the kernels by name."},
    {"features", features, METH_NOARGS, "Return the features of this processor by name."},
    {NULL, NULL, 0, NULL},
};

static PyModuleDef_Slot slots[] = {{Py_mod_exec, execute}, {0, NULL}};

static struct PyModuleDef definition = {
    PyModuleDef_HEAD_INIT, "_library", "Kernels as machine code.", 0, module_methods, slots,
    NULL, NULL, NULL,
};

PyMODINIT_FUNC PyInit__library(void)
{
    return PyModuleDef_Init(&definition);
}
