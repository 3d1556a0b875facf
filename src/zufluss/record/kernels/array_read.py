"""Arrays and maps inside rows, whole columns of them at once.

Reading takes two steps. `open_arrays` counts the elements of every array, which gives the Arrow
offsets; `read_arrays` then writes all elements as one column of cells, as `row_read.locate` does
with fields. `open_maps` splits a map into its key array and its value array first. Nested elements
become places, which the caller reads in turn.

The layouts stand in `zufluss.record.rows.slots`, which names the twin; cells and program in
`row_read.py`. The program of an element has one line; its SOURCE is the binary logarithm of the
slot size (0 to 3).
"""

from __future__ import annotations

from typing import Any

import numpy as np

from zufluss.record.kernels import row_read as k
from zufluss.record.kernels import types
from zufluss.record.kernels.cache import kernel
from zufluss.record.kernels.memory import BYTES
from zufluss.record.kernels.raw import address_of, peek_i16, peek_i32, peek_i64, peek_u8
from zufluss.record.kernels.row_read import (
    begin_cells,
    keep_moment,
    keep_null,
    keep_number,
    keep_place,
)

_I64 = types.Array(types.int64, 1, "C", readonly=True)
_LINES = types.Array(types.int64, 2, "C", readonly=True)
_I32 = types.Array(types.int32, 1, "C", readonly=True)
_OFFSETS = types.Array(types.int32, 1, "C")
_TABLE = types.Array(types.int64, 2, "C")
_OUT = types.Array(types.uint8, 1, "C")
_RESULT = types.UniTuple(types.int64, 3)
_ELEMENTS_MAX = 2**31 - 1
_SOURCE, _SINK, _NOT_NULL = k.SOURCE, k.SINK, k.NOT_NULL
_FINE_MOMENT, _BIG_NUMBER, _NESTED = k.FINE_MOMENT, k.BIG_NUMBER, k.NESTED
_TEXT, _CUT, _COUNT, _PIECE, _SLOT = k.TEXT, k.F_CUT, k.F_COUNT, k.F_PIECE, k.F_SLOT
_LEFT, _NULL = k.F_LEFT, k.F_NULL


@kernel(_RESULT(BYTES, _I64, _I64, types.int64, _OFFSETS))
def open_arrays(data: Any, starts: Any, ends: Any, source: Any, offsets: Any) -> Any:
    """Write the Arrow offsets of the arrays at these places; returns fault, array, detail.

    The places lie within the data; −1 is a NULL.
    """
    total, zero, of = np.int64(0), np.int64(0), address_of(data)
    for array in range(len(starts)):
        offsets[array] = total
        if starts[array] < 0:
            continue
        # An array begins with its count, null bits in 4-byte steps, and one slot per element.
        size = ends[array] - starts[array]
        if size < 4:
            return np.int64(_CUT), array, size
        count = peek_i32(of + starts[array])
        if count < 0 or total + count > _ELEMENTS_MAX:
            return np.int64(_COUNT), array, count
        if 4 + (count + 31) // 32 * 4 + (count << source) > size:
            return np.int64(_CUT), array, size
        total += count
    offsets[len(starts)] = total
    return zero, zero, zero


@kernel(inline=True)
def _number(slot: Any, source: Any) -> Any:
    """The number in the slot at an address."""
    if source == 3:
        return peek_i64(slot)
    if source == 2:
        return peek_i32(slot)
    if source == 1:
        return peek_i16(slot)
    return peek_u8(slot)


@kernel(inline=True)
def _piece(base: Any, end: Any, used: Any, offset: Any, size: Any) -> Any:
    """Position of a value in the variable part; −1 if it leaves the array.

    Values stand in the order of their elements, so one that begins before `used`, the end of the
    last one, would give its bytes a second meaning.
    """
    start = base + offset
    if offset < 0 or size < 0 or start < used or start + size > end:
        return np.int64(-1)
    return start


@kernel(inline=True)
def _read_slot(
    of: Any,
    base: Any,
    end: Any,
    used: Any,
    slot: Any,
    line: Any,
    fact: Any,
    column: Any,
    count: Any,
    index: Any,
) -> Any:
    """Read the element in a slot; returns fault, detail, and the end of the last value then.

    `base` and `end` bound the array; `count` and `index` are those of all elements of the column.
    """
    sink = peek_i64(line + 8 * _SINK)
    if sink < _TEXT and sink != _BIG_NUMBER and sink != _FINE_MOMENT:
        value = _number(of + slot, peek_i64(line + 8 * _SOURCE))
        return keep_number(line, sink, column, index, value), value, used
    # Larger values: the slot holds size (or nano of the millisecond) and offset in the array.
    low, high = peek_i32(of + slot), peek_i32(of + slot + 4)
    if sink == _FINE_MOMENT:
        start = _piece(base, end, used, high, 8)
        if start < 0:
            return np.int64(_PIECE), high, used
        millis = peek_i64(of + start)
        return keep_moment(line, fact, column, index, millis, low), low, start + 8
    # Up to 7 bytes stand in the slot itself, marked by its top bit.
    mark = peek_u8(of + slot + 7)
    if sink != _NESTED and mark & 0x80:
        start, low = slot, mark & 0x7F
        if low > 7:
            return np.int64(_SLOT), low, used
    else:
        start = _piece(base, end, used, high, low)
        if start < 0:
            return np.int64(_PIECE), high, used
        used = start + low
    fault, detail = keep_place(line, fact, column, count, index, of, start, start + low)
    return fault, detail, used


@kernel(_RESULT(BYTES, _I64, _I64, _I32, _LINES, _OUT, _TABLE))
def read_arrays(
    data: Any, starts: Any, ends: Any, offsets: Any, program: Any, cells: Any, facts: Any
) -> Any:
    """Read the elements of arrays that `open_arrays` measured; returns fault, array, detail."""
    total, zero, of = np.int64(offsets[len(starts)]), np.int64(0), address_of(data)
    line, fact, column = address_of(program), address_of(facts), address_of(cells)
    valid = begin_cells(line, 1, total, column, fact)
    source, sink = program[0, _SOURCE], program[0, _SINK]
    # Writers may reserve the room of these types for NULLs too.
    reserved = 8 if sink == _FINE_MOMENT else (16 if sink == _BIG_NUMBER else 0)
    for array in range(len(starts)):
        if starts[array] < 0:
            continue
        # Count, null bits, slots, then the variable part at a multiple of 8 from the array's start.
        base, end, first = starts[array], ends[array], np.int64(offsets[array])
        count = np.int64(offsets[array + 1]) - first
        slots = base + 4 + (count + 31) // 32 * 4
        used = min(base + (slots + (count << source) - base + 7) // 8 * 8, end)
        for element in range(count):
            if peek_u8(of + base + 4 + (element >> 3)) >> (element & 7) & 1:
                if program[0, _NOT_NULL]:
                    return np.int64(_NULL), array, zero
                keep_null(line, fact, valid, column, total, first + element)
                continue
            slot = slots + (element << source)
            fault, detail, used = _read_slot(
                of, base, end, used, slot, line, fact, column, total, first + element
            )
            if fault:
                return fault, array, detail
        if end - base > (used - base + 7) // 8 * 8 + reserved * count:
            return np.int64(_LEFT), array, end - used
    return zero, zero, zero


@kernel(_RESULT(BYTES, _I64, _I64, _TABLE))
def open_maps(data: Any, starts: Any, ends: Any, keys: Any) -> Any:
    """Find the key array of every map: starts and ends go to `keys`; returns fault, map, detail."""
    zero, of = np.int64(0), address_of(data)
    for number in range(len(starts)):
        keys[0, number] = keys[1, number] = -1
        if starts[number] < 0:
            continue
        # A map is the size of its key array, the key array, then the value array.
        left = ends[number] - starts[number] - 4
        if left < 0:
            return np.int64(_CUT), number, left + 4
        size = peek_i32(of + starts[number])
        if size < 0 or size > left:
            return np.int64(_CUT), number, left
        keys[0, number] = starts[number] + 4
        keys[1, number] = starts[number] + 4 + size
    return zero, zero, zero
