"""The memory of the compiler that is dropped; it still compiles afterwards."""

from __future__ import annotations

import numba

from zufluss.record.kernels.compiler_memory import LIBRARY, code_of, release_compiler

MAPS = """\
7f00-7f10 r--p 00000000 fe:00 1 /venv/llvmlite/binding/libllvmlite.so
7f10-7f90 r-xp 00010000 fe:00 1 /venv/llvmlite/binding/libllvmlite.so
7f90-7fa0 rw-p 00090000 fe:00 1 /venv/llvmlite/binding/libllvmlite.so
7fa0-7fb0 r-xp 00000000 fe:00 2 /venv/some directory/libarrow.so
7fb0-7fc0 rw-p 00000000 00:00 0
7fc0-7fd0 r-xp 00000000 00:00 0 [vdso]
"""


def test_only_code_of_the_library_is_dropped() -> None:
    """Pages with relocations would come back without them."""
    assert code_of(MAPS, LIBRARY) == [(0x7F10, 0x7F90)]
    assert code_of(MAPS, "libarrow") == [(0x7FA0, 0x7FB0)]


def test_kernels_compile_after_the_compiler_was_dropped() -> None:
    release_compiler()
    assert numba.njit(lambda x: x + 1)(1) == 2
