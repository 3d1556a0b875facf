"""Giving back the memory of the compiler once the kernels are loaded.

Loading compiled kernels from the cache runs a good part of LLVM, some 50 MB of code that nothing
needs afterwards. Its pages are clean copies of the library's file: dropping them from this process
costs nothing, and should a kernel be compiled later after all, they come back by themselves.
"""

from __future__ import annotations

import ctypes
import sys
from pathlib import Path

LIBRARY = "libllvmlite"
_DONTNEED = 4


def release_compiler() -> None:
    """Drop LLVM's code from resident memory; does nothing but on Linux."""
    if not sys.platform.startswith("linux"):
        return
    libc = ctypes.CDLL(None)
    libc.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    for start, end in code_of(Path("/proc/self/maps").read_text(), LIBRARY):
        libc.madvise(start, end - start, _DONTNEED)  # a hint: what it cannot drop stays


def code_of(maps: str, library: str) -> list[tuple[int, int]]:
    """Where the code of a library lies, by the text of a process's `maps`.

    Only code: it is never written to. A page with relocations would be lost if it were dropped.
    """
    found = []
    for line in maps.splitlines():
        addresses, rights, _, _, _, *path = line.split(maxsplit=5)
        if rights == "r-xp" and path and Path(path[0]).name.startswith(library):
            start, end = addresses.split("-")
            found.append((int(start, 16), int(end, 16)))
    return found
