"""Compiled loops over buffers.

Each kernel is a numba function with explicit signatures, `nogil` and an on-disk cache, and checks
every bound itself: a malformed batch is an error number, never an out-of-range read. Each has a
twin in plain Python that the tests hold it to. Importing a kernel module loads or compiles it, so
servers call `warm()` once at start and everybody else pays when a kernel is first needed.
"""

from __future__ import annotations

import importlib
import pkgutil
import time


def is_cold() -> bool:
    """Nothing is compiled yet: `warm` will take some seconds."""
    from zufluss.record.kernels.cache import cache_directory

    return not any(cache_directory().iterdir())


def warm() -> float:
    """Load (or, the first time, compile) every kernel; return the seconds it took."""
    begin = time.perf_counter()
    for module in pkgutil.iter_modules(__path__):
        if module.name == "__main__":
            continue
        importlib.import_module(f"{__name__}.{module.name}")
    return time.perf_counter() - begin
