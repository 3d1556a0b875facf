"""Compiled loops over buffers.

Each kernel is a numba function with explicit signatures and an on-disk cache (`cache.py`) that
checks every bound itself: a malformed batch gives a fault number, never an out-of-range read. Each
kernel has a twin in plain Python, and tests compare the two. Importing a kernel module loads or
compiles its kernels, so servers call `warm()` once at start; other processes pay when they first
need a kernel.
"""

from __future__ import annotations

import importlib
import pkgutil
import time


def is_cold() -> bool:
    """Return whether no kernel is compiled yet; then `warm` takes about a minute."""
    from zufluss.record.kernels.cache import cache_directory

    return not any(cache_directory().iterdir())


def warm() -> float:
    """Load every kernel, or compile it the first time; return the seconds this took."""
    from zufluss.record.kernels.cache import MODULES_OUTSIDE

    begin = time.perf_counter()
    inside = (f"{__name__}.{m.name}" for m in pkgutil.iter_modules(__path__))
    for name in (*inside, *MODULES_OUTSIDE):
        if not name.endswith("__main__"):
            importlib.import_module(name)
    return time.perf_counter() - begin
