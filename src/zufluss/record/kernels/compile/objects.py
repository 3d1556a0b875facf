"""Makes object files of the kernels that numba compiled, and the table that describes them.

`python -m zufluss.record.kernels.compile.objects DIRECTORY` loads all kernels and writes into the
directory, for each kernel, `kernel-N.o` with a function `kernel_N` that `library.c` can call, and
for all of them `table.h`.

A kernel's own function takes numbers and arrays as numba lays them out. `_entry` generates a
function around it that takes one array of 64-bit slots (see `library.c`). Everything else in the
object file is private, so that object files made by several processes cannot disagree about it.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

from llvmlite import binding, ir  # type: ignore[import-untyped]
from numba.core import types

from zufluss.record.kernels import library
from zufluss.record.kernels.cache import COMPILED, Kernel
from zufluss.record.kernels.compile.target import Target, target
from zufluss.record.kernels.intrinsics import cgutils
from zufluss.record.kernels.types import Array, Scalar, UniTuple

_SLOT = ir.IntType(64)
_STATUS = ir.IntType(32)


def write_objects(compiled: Sequence[Kernel], processor: Target, directory: Path) -> None:
    """Write the object files of kernels and their table."""
    machine = target_machine(processor)
    for number, kernel in enumerate(compiled):
        code = object_code(kernel, f"kernel_{number}", machine)
        (directory / f"kernel-{number}.o").write_bytes(code)
    (directory / "table.h").write_text(table(compiled))


def target_machine(processor: Target) -> Any:
    """Return LLVM's description of a processor, for code that a linker can place anywhere."""
    features = ",".join(f"+{name}" for name in processor.features)
    triple = binding.Target.from_triple(binding.get_process_triple())
    return triple.create_target_machine(
        cpu=processor.cpu, features=features, opt=3, reloc="pic", codemodel="default"
    )


def object_code(kernel: Kernel, name: str, machine: Any) -> bytes:
    """Return the object file of a kernel, with one public function of the given name."""
    (compiled,) = kernel.dispatcher.overloads.values()
    entry = _entry(kernel.dispatcher.targetctx, compiled.fndesc, name)
    entry.triple = machine.triple
    entry.data_layout = str(machine.target_data)
    module = binding.parse_assembly(str(entry))
    module.link_in(compiled.library._get_module_for_linking(), preserve=True)
    for value in (*module.functions, *module.global_variables):
        if not value.is_declaration and value.name != name:
            value.linkage = "internal"
    passes = binding.create_new_module_pass_manager()
    passes.add_global_dead_code_eliminate_pass()
    options = binding.create_pipeline_tuning_options(speed_level=3)
    passes.run(module, binding.create_pass_builder(machine, options))
    code: bytes = machine.emit_object(module)
    return code


def _entry(context: Any, description: Any, name: str) -> Any:
    """Generate a function that takes slots, calls the function that numba compiled, and answers."""
    module = ir.Module(name)
    function = ir.Function(module, ir.FunctionType(_STATUS, [_SLOT.as_pointer()]), name)
    builder = ir.IRBuilder(function.append_basic_block())
    slots = function.args[0]
    used = 0

    def take() -> Any:
        nonlocal used
        used += 1
        return builder.load(builder.gep(slots, [_SLOT(used - 1)]))

    def put(position: int, value: Any) -> None:
        wide = value if value.type == _SLOT else builder.zext(value, _SLOT)
        builder.store(wide, builder.gep(slots, [_SLOT(position)]))

    arguments = []
    for kind in description.argtypes:
        if isinstance(kind, types.Array):
            address, shape = take(), [take() for _ in range(kind.ndim)]
            arguments.append(_array(context, builder, kind, address, shape))
        elif kind == types.boolean:
            arguments.append(builder.icmp_signed("!=", take(), _SLOT(0)))
        else:
            arguments.append(_narrowed(builder, take(), context.get_value_type(kind)))
    status, answer = context.call_conv.call_function(
        builder,
        context.declare_function(module, description),
        description.restype,
        description.argtypes,
        arguments,
    )
    with builder.if_then(status.is_error, likely=False):
        put(0, builder.ptrtoint(status.excinfoptr, _SLOT))
        builder.ret(status.code)
    if isinstance(description.restype, types.UniTuple):
        for position in range(description.restype.count):
            put(position, builder.extract_value(answer, position))
    elif description.restype != types.none:
        put(0, answer)
    builder.ret(_STATUS(0))
    return module


def _narrowed(builder: Any, value: Any, kind: Any) -> Any:
    return value if kind == _SLOT else builder.trunc(value, kind)


def _array(context: Any, builder: Any, kind: Any, address: Any, shape: list[Any]) -> Any:
    """Generate numba's form of a contiguous array that somebody else keeps alive."""
    array = context.make_array(kind)(context, builder)
    size = _SLOT(context.get_abi_sizeof(context.get_data_type(kind.dtype)))
    strides: list[Any] = []
    stride, count = size, _SLOT(1)
    for length in reversed(shape):
        strides.insert(0, stride)
        stride, count = builder.mul(stride, length), builder.mul(count, length)
    array.data = builder.inttoptr(address, array.data.type)
    array.shape = cgutils.pack_array(builder, shape)
    array.strides = cgutils.pack_array(builder, strides)
    array.itemsize = size
    array.nitems = count
    array.meminfo = cgutils.get_null_value(array.meminfo.type)
    array.parent = cgutils.get_null_value(array.parent.type)
    return array._getvalue()


# -- the table ----------------------------------------------------------------------------------


def table(compiled: Sequence[Kernel]) -> str:
    """Return the C text of the table of kernels."""
    lines = [f"#define KERNELS {len(compiled)}"]
    slots = max(max(_slots_taken(kernel), _slots_put(kernel)) for kernel in compiled)
    lines.append(f"#define SLOTS_MAX {slots}")
    for number, kernel in enumerate(compiled):
        taken = ", ".join(map(_argument, kernel.signature.arguments))
        lines.append(f"extern int32_t kernel_{number}(int64_t *slots);")
        lines.append(f"static const argument ARGUMENTS_{number}[] = {{{taken}}};")
    lines.append("static const kernel TABLE[] = {")
    for number, kernel in enumerate(compiled):
        form, results = _result(kernel.signature.returns)
        count = len(kernel.signature.arguments)
        lines.append(
            f"    {{\"{kernel.name}\", kernel_{number}, {int(kernel.short)}, '{form}', {results}, "
            f"{count}, ARGUMENTS_{number}}},"
        )
    return "\n".join([*lines, "};", ""])


def _slots_taken(kernel: Kernel) -> int:
    return sum(
        1 + kind.dimensions if isinstance(kind, Array) else 1 for kind in kernel.signature.arguments
    )


def _slots_put(kernel: Kernel) -> int:
    return max(1, _result(kernel.signature.returns)[1])


def _result(kind: Scalar | UniTuple) -> tuple[str, int]:
    """Return the letter of a result in `library.c`, and the length of a tuple."""
    if isinstance(kind, UniTuple):
        return "t", kind.count
    letters = {"void": "n", "int64": "i", "uint32": "u", "boolean": "b"}
    return letters[kind.name], 0


def _argument(kind: Scalar | Array) -> str:
    """Return the C text of an argument."""
    if isinstance(kind, Array):
        element = {"boolean": "bool"}.get(kind.element.name, kind.element.name)
        number = f"NPY_{element.upper()}"
        return f"{{'a', {number}, \"{element}\", {kind.dimensions}, {int(not kind.readonly)}}}"
    letters = {"int64": "i", "uint32": "u", "uint64": "u", "boolean": "b"}
    return f"{{'{letters[kind.name]}', 0, 0, 0, 0}}"


if __name__ == "__main__":
    library.ignore()
    for name in library.kernel_modules():
        import_module(name)
    processor = target()
    assert processor is not None, "the caller knows that there is a target"
    write_objects(COMPILED, processor, Path(sys.argv[1]))
