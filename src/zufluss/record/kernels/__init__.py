"""Compiled loops over buffers.

Each kernel is a function with an explicit signature that checks every bound itself: a malformed
batch gives a fault number, never an out-of-range read. Each kernel has a twin in plain Python, and
tests compare the two. Kernels come from the compiled library (`library.py`); where there is none,
importing a kernel's module compiles it with numba, or loads it from numba's cache (`cache.py`).
Servers call `warm()` once at start; other processes pay when they first need a kernel.
"""

from __future__ import annotations

import importlib
import os
from pathlib import Path


def warm() -> None:
    """Load every kernel; the first time without a compiled library, compile them all."""
    from zufluss.record.kernels import library

    compiled = are_compiled()
    if not compiled:
        _compile_all()
    for name in library.kernel_modules():
        importlib.import_module(name)
    if not compiled:
        _complete().touch()


def are_compiled() -> bool:
    """Return whether `warm` finds all kernels compiled, in the library or in numba's cache."""
    from zufluss.record.kernels import library

    return library.functions() is not None or _complete().exists()


def _complete() -> Path:
    """Return the file that exists once numba's cache has all kernels."""
    from zufluss.record.kernels.cache import cache_directory

    return cache_directory() / "complete"


def _compile_all() -> None:
    """Compile all kernels into numba's cache."""
    from zufluss.record.kernels.compile.workers import compile_in_parallel

    compile_in_parallel({**os.environ, "NUMBA_CACHE_DIR": str(_complete().parents[1])})
