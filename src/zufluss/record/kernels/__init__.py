"""Compiled loops over buffers.

Each kernel is a numba function with explicit signatures, `nogil` and an on-disk cache, and checks
every bound itself: a malformed batch is an error number, never an out-of-range read. Each has a
twin in plain Python that the tests hold it to. Importing a kernel module loads or compiles it, so
servers call `warm()` once at start and everybody else pays when a kernel is first needed.
"""

from __future__ import annotations

import importlib
import time

KERNEL_MODULES = ("arrow", "project", "walk", "hash", "rows")
"""Modules of this package that compile on import."""


def warm() -> float:
    """Load (or, the first time, compile) every kernel; return the seconds it took."""
    begin = time.perf_counter()
    for name in KERNEL_MODULES:
        importlib.import_module(f"{__name__}.{name}")
    return time.perf_counter() - begin
