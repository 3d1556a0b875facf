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
    from zufluss.record.kernels.cache import MODULES_OUTSIDE

    begin = time.perf_counter()
    inside = (f"{__name__}.{m.name}" for m in pkgutil.iter_modules(__path__))
    for name in (*inside, *MODULES_OUTSIDE):
        if not name.endswith("__main__"):
            importlib.import_module(name)
    return time.perf_counter() - begin
