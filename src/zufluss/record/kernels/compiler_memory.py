"""Gives back the memory of the compiler once the kernels are loaded.

Loading compiled kernels from the cache runs a large part of LLVM, some 50 MB of code that is not
needed afterwards. Its pages are clean copies of the library's file, so dropping them costs nothing,
and the kernel loads them again if a function is compiled later.
"""

from __future__ import annotations

import ctypes
from pathlib import Path

from zufluss.system import LINUX

LIBRARY = "libllvmlite"
_DONTNEED = 4


def release_compiler() -> None:
    """Drop LLVM's code from resident memory; does nothing on other systems than Linux."""
    if not LINUX:
        return
    libc = ctypes.CDLL(None)
    libc.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    for start, end in code_of(Path("/proc/self/maps").read_text(), LIBRARY):
        libc.madvise(start, end - start, _DONTNEED)  # a hint: pages that cannot be dropped stay


def code_of(maps: str, library: str) -> list[tuple[int, int]]:
    """Return the address ranges of a library's code, from the text of a process's `maps`.

    Only pages of code are never written to; a page with relocations would be lost if it were
    dropped.
    """
    ranges = []
    for line in maps.splitlines():
        addresses, rights, _, _, _, *path = line.split(maxsplit=5)
        if rights == "r-xp" and path and Path(path[0]).name.startswith(library):
            start, end = addresses.split("-")
            ranges.append((int(start, 16), int(end, 16)))
    return ranges
