"""The compiled library: the machine code of all kernels, made when the wheel is built.

Compiling the kernels takes more than a minute, and loading numba with its compiler longer than
everything else a server does at its start. So a wheel brings `_library.abi3.so`, made by `compile`
for a processor that is common enough (`compile/target.py`), and a process that uses it imports no
numba. In a clone, `make kernels` makes the same file.

Beside the library stands `_library.json`, its label:

| field      | meaning                                                          |
|------------|------------------------------------------------------------------|
| `sources`  | digest of the source files that the library was compiled from    |
| `sha256`   | digest of the library itself                                     |
| `features` | names of the processor features that the machine code uses       |

The library is loaded only if both digests are right and this processor has the features. If it is
not used, the kernels are compiled by numba (`cache.py`).
"""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Callable, Mapping
from functools import cache
from importlib.machinery import ExtensionFileLoader
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
LIBRARY = "_library.abi3.so"
LABEL = "_library.json"

MODULES_OUTSIDE = (
    "zufluss.kv.hot.entries",
    "zufluss.kv.hot.index",
    "zufluss.kv.hot.segments",
    "zufluss.kv.hot.sorting",
    "zufluss.kv.hot.words",
    "zufluss.kv.hot.answer",
    "zufluss.kv.merge.gather",
    "zufluss.kv.merge.base",
    "zufluss.kv.merge.last_row",
    "zufluss.kv.merge.first_row",
    "zufluss.kv.merge.versioned",
    "zufluss.kv.merge.partial",
    "zufluss.record.fault",
    "zufluss.record.slices",
    "zufluss.record.aggregate.arithmetic",
    "zufluss.record.aggregate.cells",
    "zufluss.record.aggregate.column_fold",
    "zufluss.record.aggregate.compute",
    "zufluss.record.aggregate.opcodes",
    "zufluss.record.aggregate.script",
    "zufluss.record.aggregate.value_write",
)
"""Modules outside this package that define kernels, or that kernels take constants from.

The list is written down because finding these modules takes longer than loading them.
`tests/record/kernels/test_sources.py` fails if a module is missing or superfluous.
"""

_NO_KERNELS = frozenset({"compiler_memory", "library", "progress"})
"""Modules of this package that no machine code depends on."""

Kernels = Mapping[str, Callable[..., Any]]

_ignored = False


class LibraryError(Exception):
    """The compiled library cannot be used; the message says why."""


def path_of(module: str) -> Path:
    """Return the source file of a module."""
    return HERE.parents[2] / f"{module.replace('.', '/')}.py"


def kernel_modules() -> tuple[str, ...]:
    """Return the names of all modules that kernels are made of."""
    inside = sorted({path.stem for path in HERE.glob("[a-z]*.py")} - _NO_KERNELS)
    return (*(f"{__package__}.{name}" for name in inside), *MODULES_OUTSIDE)


@cache
def source_digest() -> str:
    """Return the digest of every source file that determines the machine code of kernels."""
    digest = hashlib.sha256()
    makers = (HERE / "compile" / name for name in ("library.c", "objects.py", "target.py"))
    for path in (*map(path_of, kernel_modules()), *makers):
        digest.update(path.name.encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()[:16]


@cache
def functions() -> Kernels | None:
    """Return the kernels of the compiled library by name, or None if it cannot be used."""
    if _ignored or not (HERE / LABEL).exists():
        return None
    try:
        return load(HERE)
    except LibraryError as problem:
        logging.getLogger(__name__).warning(
            "the compiled kernels are not used: %s; kernels are compiled instead, once", problem
        )
        return None


def load(directory: Path) -> Kernels:
    """Check the library in a directory and load it; raises `LibraryError` if it must not run."""
    label, path = directory / LABEL, directory / LIBRARY
    try:
        told = json.loads(label.read_text())
        sources, sha256, features = told["sources"], told["sha256"], frozenset(told["features"])
        content = path.read_bytes()
    except (OSError, ValueError, KeyError, TypeError) as problem:
        raise LibraryError(f"{label.name} or {path.name} cannot be read ({problem!r})") from None
    try:
        current = source_digest()
    except OSError as problem:
        raise LibraryError(f"the sources of {path.name} cannot be read ({problem})") from None
    if sources != current:
        raise LibraryError(f"{path} was compiled from other sources")
    if sha256 != hashlib.sha256(content).hexdigest():
        raise LibraryError(f"{path} is damaged")
    try:
        module = _imported(path)
    except (ImportError, OSError) as problem:
        raise LibraryError(f"{path} cannot be loaded ({problem})") from None
    if missing := features - set(module.features()):
        raise LibraryError(f"this processor lacks {', '.join(sorted(missing))}")
    kernels: Kernels = module.kernels()
    return kernels


def _imported(path: Path) -> Any:
    """Import the extension module in a file."""
    name = f"{__package__}._library"
    spec = spec_from_file_location(name, path, loader=ExtensionFileLoader(name, str(path)))
    if spec is None or spec.loader is None:
        raise ImportError(f"no loader for {path}")
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def ignore() -> None:
    """Compile the kernels in this process instead of using the library."""
    global _ignored
    _ignored = True
    functions.cache_clear()
