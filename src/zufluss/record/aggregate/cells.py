"""Single values in cells: parts of kernels that load, store, copy and compare them.

`record/kernels/row_read.py` describes cells. A value is named by the address of its column, the
number of rows of the cells, and its row. `width` is the number of bytes of a value in its column
(1 to 16), or `BITS`, or `PLACES` if the column holds only where its bytes start and end. **Nothing
is checked here.**
"""

from __future__ import annotations

from typing import Any

import numpy as np

from zufluss.record.aggregate.arithmetic import rank
from zufluss.record.kernels.cache import kernel
from zufluss.record.kernels.raw import (
    peek_i8,
    peek_i16,
    peek_i32,
    peek_i64,
    peek_u8,
    poke_i16,
    poke_i32,
    poke_i64,
    poke_u8,
)
from zufluss.record.kernels.row_read import (
    BIG_NUMBER,
    FLAG,
    FLOATING,
    KEEP_1,
    KEEP_2,
    KEEP_4,
    NUMBER,
    PARAM,
    SINK,
    TEXT,
    TIME,
)

BITS, PLACES = 0, -1
"""Widths of values that are not whole bytes, or that are somewhere else."""
WIDE = 16
"""The width of decimals, whatever their precision."""


@kernel()
def width_of(line: Any) -> Any:
    """The width of the values of a program line."""
    sink = peek_i64(line + 8 * SINK)
    if sink >= TEXT:
        return np.int64(PLACES)
    if sink == FLAG:
        return np.int64(BITS)
    if sink in (NUMBER, BIG_NUMBER):
        return np.int64(WIDE)
    if sink == KEEP_1:
        return np.int64(1)
    if sink == KEEP_2:
        return np.int64(2)
    if sink == KEEP_4 or (sink == TIME and peek_i64(line + 8 * PARAM) < 2):
        return np.int64(4)
    return np.int64(8)


@kernel(inline=True)
def is_valid(bits: Any, row: Any) -> Any:
    """Whether a value is not NULL."""
    return peek_u8(bits + (row >> 3)) >> (row & 7) & 1 != 0


@kernel(inline=True)
def load(width: Any, column: Any, row: Any) -> Any:
    """A value of at most 8 bytes as a number; of a float its bits."""
    if width == 8:
        return peek_i64(column + 8 * row)
    if width == 4:
        return peek_i32(column + 4 * row)
    if width == 1:
        return peek_i8(column + row)
    if width == 2:
        return peek_i16(column + 2 * row)
    return peek_u8(column + (row >> 3)) >> (row & 7) & 1


@kernel(inline=True)
def store(width: Any, column: Any, row: Any, value: Any) -> Any:
    """Write a value of at most 8 bytes; bits are 0 before."""
    if width == 8:
        poke_i64(column + 8 * row, value)
    elif width == 4:
        poke_i32(column + 4 * row, value)
    elif width == 1:
        poke_u8(column + row, value)
    elif width == 2:
        poke_i16(column + 2 * row, value)
    else:
        at = column + (row >> 3)
        poke_u8(at, peek_u8(at) | value << (row & 7))


@kernel(inline=True)
def copy_value(
    width: Any, column: Any, count: Any, row: Any, to: Any, to_count: Any, to_row: Any
) -> Any:
    """Copy a value that is not NULL; answers how many bytes it has elsewhere."""
    if width == PLACES:
        start, end = peek_i64(column + 8 * row), peek_i64(column + 8 * (count + row))
        poke_i64(to + 8 * to_row, start)
        poke_i64(to + 8 * (to_count + to_row), end)
        return end - start
    if width == WIDE:
        poke_i64(to + 16 * to_row, peek_i64(column + 16 * row))
        poke_i64(to + 16 * to_row + 8, peek_i64(column + 16 * row + 8))
    else:
        store(width, to, to_row, load(width, column, row))
    return np.int64(0)


@kernel()
def compare_bytes(one: Any, size: Any, other: Any, other_size: Any) -> Any:
    """−1, 0 or 1 as a byte string sorts before, as, or behind another, by unsigned bytes."""
    least = min(size, other_size)
    at = np.int64(0)
    while at + 8 <= least and peek_i64(one + at) == peek_i64(other + at):
        at += 8
    while at < least:
        a, b = peek_u8(one + at), peek_u8(other + at)
        if a != b:
            return np.int64(-1 if a < b else 1)
        at += 1
    return np.int64(0 if size == other_size else -1 if size < other_size else 1)


@kernel(inline=True)
def same(
    width: Any,
    data: Any,
    column: Any,
    count: Any,
    row: Any,
    other: Any,
    other_count: Any,
    other_row: Any,
) -> Any:
    """Whether two values are the same, bit by bit; neither is NULL."""
    if width == PLACES:
        start, at = peek_i64(column + 8 * row), peek_i64(other + 8 * other_row)
        size = peek_i64(column + 8 * (count + row)) - start
        if size != peek_i64(other + 8 * (other_count + other_row)) - at:
            return False
        return start == at or compare_bytes(data + start, size, data + at, size) == 0
    if width == WIDE:
        one, two = column + 16 * row, other + 16 * other_row
        return peek_i64(one) == peek_i64(two) and peek_i64(one + 8) == peek_i64(two + 8)
    return load(width, column, row) == load(width, other, other_row)


@kernel(inline=True)
def compare(
    width: Any,
    line: Any,
    data: Any,
    column: Any,
    count: Any,
    row: Any,
    other: Any,
    other_count: Any,
    other_row: Any,
) -> Any:
    """−1, 0 or 1 as a value is less than, equal to or greater than another; neither is NULL."""
    if width == PLACES:
        start, at = peek_i64(column + 8 * row), peek_i64(other + 8 * other_row)
        size = peek_i64(column + 8 * (count + row)) - start
        other_size = peek_i64(other + 8 * (other_count + other_row)) - at
        return compare_bytes(data + start, size, data + at, other_size)
    if width == WIDE:
        a, b = peek_i64(column + 16 * row + 8), peek_i64(other + 16 * other_row + 8)
        if a == b:
            low, other_low = peek_i64(column + 16 * row), peek_i64(other + 16 * other_row)
            a, b = low ^ np.int64(-(2**63)), other_low ^ np.int64(-(2**63))
    else:
        a, b = load(width, column, row), load(width, other, other_row)
        if peek_i64(line + 8 * FLOATING):
            a, b = rank(a, width == 4), rank(b, width == 4)
    return np.int64(-1 if a < b else 1 if a > b else 0)
