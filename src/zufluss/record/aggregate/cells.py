"""Single values in cells: parts of kernels that load, store, copy and compare them.

`record/kernels/row_read.py` describes cells. A value is named by its column and its row; `width` is
the number of bytes of a value in its column (1 to 16), or `BITS`, or `PLACES` if the column holds
only where its bytes start and end. **Nothing is checked here.**
"""

from __future__ import annotations

from typing import Any, NamedTuple

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
    LINE,
    NUMBER,
    PARAM,
    SINK,
    SLOT,
    TEXT,
    TIME,
)

BITS, PLACES = 0, -1
"""Widths of BOOLEANs, and of values whose bytes are not in the cells."""
DECIMAL_BYTES = 16
"""The width of decimals, whatever their precision."""
_LINE_BYTES = 8 * LINE


class CellColumn(NamedTuple):
    """One column of cells, as kernels see it."""

    values: Any
    """Address of its first value."""
    valid: Any
    """Address of its validity bitmap."""
    rows: Any
    """Number of rows of the cells."""


@kernel(inline=True)
def column_of(program: Any, fields: Any, cells: Any, rows: Any, index: Any) -> Any:
    """Column `index` of the cells at an address, which have `rows` rows and `fields` columns."""
    slot = peek_i64(program + _LINE_BYTES * index + 8 * SLOT)
    slots = peek_i64(program + _LINE_BYTES * fields + 8 * SLOT)
    bitmaps, stride = cells + 8 * rows * slots, (rows + 63) // 64 * 8
    return CellColumn(cells + 8 * rows * slot, bitmaps + index * stride, rows)


@kernel()
def width_of(line: Any) -> Any:
    """Width of the values of a program line."""
    sink = peek_i64(line + 8 * SINK)
    if sink >= TEXT:
        return np.int64(PLACES)
    if sink == FLAG:
        return np.int64(BITS)
    if sink in (NUMBER, BIG_NUMBER):
        return np.int64(DECIMAL_BYTES)
    if sink == KEEP_1:
        return np.int64(1)
    if sink == KEEP_2:
        return np.int64(2)
    if sink == KEEP_4 or (sink == TIME and peek_i64(line + 8 * PARAM) < 2):
        return np.int64(4)
    return np.int64(8)


@kernel(inline=True)
def is_valid(bits: Any, row: Any) -> Any:
    """Whether a value is not NULL, by the validity bitmap at an address."""
    return peek_u8(bits + (row >> 3)) >> (row & 7) & 1 != 0


@kernel(inline=True)
def load(width: Any, column: Any, row: Any) -> Any:
    """A value of at most 8 bytes as an integer; of a float its bits."""
    if width == 8:
        return peek_i64(column.values + 8 * row)
    if width == 4:
        return peek_i32(column.values + 4 * row)
    if width == 1:
        return peek_i8(column.values + row)
    if width == 2:
        return peek_i16(column.values + 2 * row)
    return peek_u8(column.values + (row >> 3)) >> (row & 7) & 1


@kernel(inline=True)
def store(width: Any, column: Any, row: Any, value: Any) -> Any:
    """Write a value of at most 8 bytes; the bit of a BOOLEAN must be 0 before."""
    if width == 8:
        poke_i64(column.values + 8 * row, value)
    elif width == 4:
        poke_i32(column.values + 4 * row, value)
    elif width == 1:
        poke_u8(column.values + row, value)
    elif width == 2:
        poke_i16(column.values + 2 * row, value)
    else:
        byte = column.values + (row >> 3)
        poke_u8(byte, peek_u8(byte) | value << (row & 7))


@kernel(inline=True)
def store_decimal(column: Any, row: Any, low: Any, high: Any) -> Any:
    """Write the two words of a decimal."""
    poke_i64(column.values + 16 * row, low)
    poke_i64(column.values + 16 * row + 8, high)


@kernel(inline=True)
def place_of(column: Any, row: Any) -> Any:
    """Where the bytes of a value start and end; starts stand before ends in a column of places."""
    return (
        peek_i64(column.values + 8 * row),
        peek_i64(column.values + 8 * (column.rows + row)),
    )


@kernel(inline=True)
def copy_value(width: Any, source: Any, row: Any, target: Any, target_row: Any) -> Any:
    """Copy a value that is not NULL; returns the bytes it has outside of the cells."""
    if width == PLACES:
        start, end = place_of(source, row)
        poke_i64(target.values + 8 * target_row, start)
        poke_i64(target.values + 8 * (target.rows + target_row), end)
        return end - start
    if width == DECIMAL_BYTES:
        low, high = peek_i64(source.values + 16 * row), peek_i64(source.values + 16 * row + 8)
        store_decimal(target, target_row, low, high)
    else:
        store(width, target, target_row, load(width, source, row))
    return np.int64(0)


@kernel()
def compare_bytes(one: Any, size: Any, other: Any, other_size: Any) -> Any:
    """−1, 0 or 1 as a byte string sorts before, equal to or after another, by unsigned bytes."""
    shorter = min(size, other_size)
    pos = np.int64(0)
    while pos + 8 <= shorter and peek_i64(one + pos) == peek_i64(other + pos):
        pos += 8
    while pos < shorter:
        byte, other_byte = peek_u8(one + pos), peek_u8(other + pos)
        if byte != other_byte:
            return np.int64(-1 if byte < other_byte else 1)
        pos += 1
    return np.int64(0 if size == other_size else -1 if size < other_size else 1)


@kernel(inline=True)
def is_same(width: Any, data: Any, one: Any, row: Any, other: Any, other_row: Any) -> Any:
    """Whether two values that are not NULL have the same bits."""
    if width == PLACES:
        start, end = place_of(one, row)
        other_start, other_end = place_of(other, other_row)
        size = end - start
        if size != other_end - other_start:
            return False
        if start == other_start:
            return True
        return compare_bytes(data + start, size, data + other_start, size) == 0
    if width == DECIMAL_BYTES:
        words, other_words = one.values + 16 * row, other.values + 16 * other_row
        if peek_i64(words) != peek_i64(other_words):
            return False
        return peek_i64(words + 8) == peek_i64(other_words + 8)
    return load(width, one, row) == load(width, other, other_row)


@kernel(inline=True)
def compare(
    width: Any, line: Any, data: Any, one: Any, row: Any, other: Any, other_row: Any
) -> Any:
    """−1, 0 or 1 as a value is less than, equal to or greater than another; neither is NULL."""
    if width == PLACES:
        start, end = place_of(one, row)
        other_start, other_end = place_of(other, other_row)
        size, other_size = end - start, other_end - other_start
        return compare_bytes(data + start, size, data + other_start, other_size)
    if width == DECIMAL_BYTES:
        words, other_words = one.values + 16 * row, other.values + 16 * other_row
        value, other_value = peek_i64(words + 8), peek_i64(other_words + 8)
        if value == other_value:
            # Equal high words: the low words decide, unsigned, hence with their sign bits flipped.
            sign = np.int64(-(2**63))
            value, other_value = peek_i64(words) ^ sign, peek_i64(other_words) ^ sign
    else:
        value, other_value = load(width, one, row), load(width, other, other_row)
        if peek_i64(line + 8 * FLOATING):
            value, other_value = rank(value, width == 4), rank(other_value, width == 4)
    return np.int64(-1 if value < other_value else 1 if value > other_value else 0)
