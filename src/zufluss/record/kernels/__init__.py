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


def warm() -> None:
    """Load every kernel; the first time without a compiled library, compile them all."""
    from zufluss.record.kernels import library

    if library.functions() is None:
        _compile_once()
    for name in library.kernel_modules():
        importlib.import_module(name)


def _compile_once() -> None:
    """Compile all kernels into numba's cache, unless that was done."""
    from zufluss.record.kernels.cache import cache_directory
    from zufluss.record.kernels.compile.workers import compile_in_parallel

    done = cache_directory() / "complete"
    if done.exists():
        return
    compile_in_parallel({**os.environ, "NUMBA_CACHE_DIR": str(cache_directory().parent)})
    done.touch()
