"""`python -m tests.record.kernels.small_library DIRECTORY`: a compiled library of a few kernels."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np

from zufluss.record.kernels import library, types

library.ignore()

from zufluss.record.kernels.cache import COMPILED, kernel  # noqa: E402
from zufluss.record.kernels.compile.link import link, publish  # noqa: E402
from zufluss.record.kernels.compile.objects import write_objects  # noqa: E402
from zufluss.record.kernels.compile.target import target  # noqa: E402

I64, U32 = types.int64, types.uint32
BYTES = types.Array(types.uint8, 1, "C", readonly=True)
TABLE = types.Array(types.int64, 2, "C")
SWITCHES = types.Array(types.boolean, 1, "C", readonly=True)


@kernel()
def doubled(value: Any) -> Any:
    """Part of a kernel."""
    return 2 * value


@kernel(I64(BYTES, I64), boundscheck=True)
def byte_at(data: Any, position: Any) -> Any:
    """Returns a number, raises for a position outside."""
    return np.int64(data[position])


@kernel(types.UniTuple(I64, 3)(TABLE, I64, types.boolean), short=True)
def fill(table: Any, value: Any, twice: Any) -> Any:
    """Writes to an array of two dimensions, returns a tuple."""
    number = doubled(value) if twice else value
    for i in range(table.shape[0]):
        for j in range(table.shape[1]):
            table[i, j] = 10 * number + i + j
    return table.shape[0], table.shape[1], number


@kernel(types.void(SWITCHES, TABLE), allocates=True)
def count(switches: Any, table: Any) -> Any:
    """Creates an array, returns nothing."""
    seen = np.zeros(2 * switches.size, dtype=np.int64)
    for i in range(switches.size):
        seen[i] = switches[i]
    table[0, 0] = seen.sum()


@kernel(U32(U32, types.uint64))
def folded(word: Any, more: Any) -> Any:
    """Takes and returns unsigned numbers."""
    return np.uint32(word ^ np.uint32(more >> np.uint64(32)))


@kernel(types.boolean(I64))
def is_even(number: Any) -> Any:
    """Returns a truth value."""
    return number % 2 == 0


def main(directory: Path) -> None:
    processor = target()
    assert processor is not None
    write_objects(COMPILED, processor, directory)
    publish(link(directory), processor, directory)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
