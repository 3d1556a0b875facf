"""Arrays and maps from Arrow columns: the counterpart of `array_read.py`.

All arrays of a column are written in one pass over its elements. The elements come as a table of
one column (`row_write.py`) whose buffers `measure` has checked; nested elements were encoded to
bytes before. The caller provides `out`, filled with zeros: the bytes that `measure` returned for
the elements, one more byte per element, and `ARRAY_MAX` bytes per array. The layouts stand in
`zufluss.record.rows.slots`, which names the plain-Python twin.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from zufluss.record.kernels import row_read as k
from zufluss.record.kernels import types
from zufluss.record.kernels.cache import kernel
from zufluss.record.kernels.memory import BYTES
from zufluss.record.kernels.raw import (
    address_of,
    copy_bytes,
    peek_i64,
    peek_u8,
    poke_i16,
    poke_i32,
    poke_i64,
    poke_u8,
)
from zufluss.record.kernels.row_write import (
    BAD_DECIMAL,
    BAD_OFFSETS,
    LINES,
    OFFSETS,
    OUT,
    bytes_of,
    decimal_fits,
    decimal_size,
    is_null,
    moment_of,
    number_of,
    put_decimal,
)

ARRAY_MAX = 24
"""Bytes that an array needs besides its elements."""

_I32 = types.Array(types.int32, 1, "C", readonly=True)
_I64 = types.Array(types.int64, 1, "C", readonly=True)
_SOURCE, _SINK, _FINE_MOMENT = k.SOURCE, k.SINK, k.FINE_MOMENT
_NUMBER, _BIG_NUMBER, _TEXT, _NESTED = k.NUMBER, k.BIG_NUMBER, k.TEXT, k.NESTED


@kernel(inline=True)
def _put_fixed(value: Any, source: Any, slot: Any) -> Any:
    """Write a number to the slot at an address."""
    if source == 3:
        poke_i64(slot, value)
    elif source == 2:
        poke_i32(slot, value)
    elif source == 1:
        poke_i16(slot, value)
    else:
        poke_u8(slot, value)


@kernel(inline=True)
def _put_bytes(
    line: Any, column: Any, row: Any, out: Any, most: Any, base: Any, slot: Any, after: Any
) -> Any:
    """Write an element that is bytes; returns a fault and the end of the variable part.

    `base` is the position of the array, `after` the end of its variable part before.
    """
    sink, zero = peek_i64(line + 8 * _SINK), np.int64(0)
    is_decimal, address = sink == _BIG_NUMBER, zero
    if is_decimal:
        size = decimal_size(column, row)
    else:
        address, size = bytes_of(line, column, row)
    padded = np.int64(16) if is_decimal else (size + 7) // 8 * 8
    if size < 0 or padded > most - after:
        return np.int64(BAD_OFFSETS), after
    # Up to 7 bytes stand in the slot, marked by its top bit; more stand in the variable part, and
    # the slot holds their size and their offset in the array.
    if size <= 7 and not is_decimal and sink != _NESTED:
        copy_bytes(out + slot, address, size)
        poke_u8(out + slot + 7, 0x80 | size)
        return zero, after
    poke_i32(out + slot, size)
    poke_i32(out + slot + 4, after - base)
    if is_decimal:
        put_decimal(column, row, size, out, after)
    else:
        copy_bytes(out + after, address, size)
    return zero, after + padded


@kernel(inline=True)
def _put_element(
    line: Any, column: Any, row: Any, out: Any, most: Any, base: Any, slot: Any, after: Any
) -> Any:
    """Write an element that is not NULL; returns a fault and the end of the variable part."""
    sink, zero = peek_i64(line + 8 * _SINK), np.int64(0)
    if sink in (_NUMBER, _BIG_NUMBER) and not decimal_fits(line, column, row):
        return np.int64(BAD_DECIMAL), after
    if sink >= _TEXT or sink == _BIG_NUMBER:
        return _put_bytes(line, column, row, out, most, base, slot, after)
    if sink == _FINE_MOMENT:
        millis, nano = moment_of(line, column, row)
        poke_i32(out + slot, nano)
        poke_i32(out + slot + 4, after - base)
        poke_i64(out + after, millis)
        return zero, after + 8
    _put_fixed(number_of(line, column, row), peek_i64(line + 8 * _SOURCE), out + slot)
    return zero, after


@kernel(types.int64(LINES, _I32, types.int64, LINES, LINES, OUT, OFFSETS))
def put_arrays(
    parent: Any, lists: Any, elements: Any, program: Any, table: Any, out: Any, offsets: Any
) -> Any:
    """Write an array for every list that is not NULL; returns a fault or 0.

    `lists` are the Arrow offsets; `lists[0]` stands for the first of the `elements`. `offsets` gets
    where each array begins, and where the last one ends.
    """
    pos, source, most, to = np.int64(0), program[0, _SOURCE], len(out), address_of(out)
    line, column, outer = address_of(program), address_of(table), address_of(parent)
    for array in range(len(lists) - 1):
        offsets[array] = pos
        first, last = np.int64(lists[array]) - lists[0], np.int64(lists[array + 1]) - lists[0]
        if first < 0 or last < first or last > elements:
            return np.int64(BAD_OFFSETS)
        if is_null(outer, array):
            continue
        # Count, null bits, slots, then the variable part at a multiple of 8 from the array's start.
        base, count = pos, last - first
        slots = base + 4 + (count + 31) // 32 * 4
        pos = base + (slots + (count << source) - base + 7) // 8 * 8
        if pos > most:
            return np.int64(BAD_OFFSETS)
        poke_i32(to + base, count)
        for element in range(count):
            if is_null(column, first + element):
                byte = to + base + 4 + (element >> 3)
                poke_u8(byte, peek_u8(byte) | np.int64(1) << (element & 7))
                continue
            slot = slots + (element << source)
            fault, pos = _put_element(line, column, first + element, to, most, base, slot, pos)
            if fault:
                return fault
    offsets[len(lists) - 1] = pos
    return np.int64(0)


@kernel(types.void(LINES, BYTES, _I64, BYTES, _I64, OUT, OFFSETS))
def put_maps(
    parent: Any,
    keys: Any,
    key_offsets: Any,
    values: Any,
    value_offsets: Any,
    out: Any,
    offsets: Any,
) -> Any:
    """Join the key arrays and value arrays of maps that are not NULL, as `put_arrays` made them."""
    pos, outer, to = np.int64(0), address_of(parent), address_of(out)
    for number in range(len(offsets) - 1):
        offsets[number] = pos
        if is_null(outer, number):
            continue
        # A map is the size of its key array, the key array, then the value array.
        key_size = key_offsets[number + 1] - key_offsets[number]
        value_size = value_offsets[number + 1] - value_offsets[number]
        poke_i32(to + pos, key_size)
        copy_bytes(to + pos + 4, address_of(keys) + key_offsets[number], key_size)
        value_array = address_of(values) + value_offsets[number]
        copy_bytes(to + pos + 4 + key_size, value_array, value_size)
        pos += 4 + key_size + value_size
    offsets[len(offsets) - 1] = pos
