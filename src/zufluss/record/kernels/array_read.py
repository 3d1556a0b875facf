"""Arrays and maps inside rows, whole columns of them at once.

Reading takes two steps. `open_arrays` counts the elements of every array, which gives the Arrow
offsets; `read_arrays` then writes all elements as one column of cells, as `row_read.locate` does
with fields. `open_maps` splits a map into its key array and its value array first. Nested elements
become places, which the caller reads in turn.

The layouts and the plain-Python twin stand in `zufluss.record.rows.slots`, cells and program in
`row_read.py`. The program of an element has one line; its SOURCE is the binary logarithm of the
slot size (0 to 3).
"""

from __future__ import annotations

from typing import Any

import numpy as np

from zufluss.record.kernels import row_read as k
from zufluss.record.kernels.cache import kernel
from zufluss.record.kernels.memory import BYTES, types
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
    """Count the elements of every array; answers fault, array, detail. Places lie in the data."""
    total, zero, of = np.int64(0), np.int64(0), address_of(data)
    for i in range(len(starts)):
        offsets[i] = total
        if starts[i] < 0:
            continue
        size = ends[i] - starts[i]
        if size < 4:
            return np.int64(_CUT), i, size
        count = peek_i32(of + starts[i])
        if count < 0 or total + count > _ELEMENTS_MAX:
            return np.int64(_COUNT), i, count
        if 4 + (count + 31) // 32 * 4 + (count << source) > size:
            return np.int64(_CUT), i, size
        total += count
    offsets[len(starts)] = total
    return zero, zero, zero


@kernel(inline=True)
def _number(at: Any, source: Any) -> Any:
    if source == 3:
        return peek_i64(at)
    if source == 2:
        return peek_i32(at)
    if source == 1:
        return peek_i16(at)
    return peek_u8(at)


@kernel(inline=True)
def _piece(base: Any, end: Any, used: Any, offset: Any, size: Any) -> Any:
    """Where a piece of the variable part starts, −1 if it may not lie there."""
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
    i: Any,
) -> Any:
    """Read the element in a slot; answers fault, detail and how much is used then."""
    sink = peek_i64(line + 8 * _SINK)
    if sink < _TEXT and sink != _BIG_NUMBER and sink != _FINE_MOMENT:
        value = _number(of + slot, peek_i64(line + 8 * _SOURCE))
        return keep_number(line, sink, column, i, value), value, used
    low, high = peek_i32(of + slot), peek_i32(of + slot + 4)
    if sink == _FINE_MOMENT:
        start = _piece(base, end, used, high, 8)
        if start < 0:
            return np.int64(_PIECE), high, used
        millis = peek_i64(of + start)
        return keep_moment(line, fact, column, i, millis, low), low, start + 8
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
    fault, detail = keep_place(line, fact, column, count, i, of, start, start + low)
    return fault, detail, used


@kernel(_RESULT(BYTES, _I64, _I64, _I32, _LINES, _OUT, _TABLE))
def read_arrays(
    data: Any, starts: Any, ends: Any, offsets: Any, program: Any, cells: Any, facts: Any
) -> Any:
    """Read the elements of arrays that `open_arrays` has measured; fault, array, detail."""
    total, zero, of = np.int64(offsets[len(starts)]), np.int64(0), address_of(data)
    line, fact, column = address_of(program), address_of(facts), address_of(cells)
    valid = begin_cells(line, 1, total, column, fact)
    source, sink = program[0, _SOURCE], program[0, _SINK]
    reserved = 8 if sink == _FINE_MOMENT else (16 if sink == _BIG_NUMBER else 0)
    for a in range(len(starts)):
        if starts[a] < 0:
            continue
        base, end, first = starts[a], ends[a], np.int64(offsets[a])
        count = np.int64(offsets[a + 1]) - first
        slots = base + 4 + (count + 31) // 32 * 4
        used = min(base + (slots + (count << source) - base + 7) // 8 * 8, end)
        for i in range(count):
            if peek_u8(of + base + 4 + (i >> 3)) >> (i & 7) & 1:
                if program[0, _NOT_NULL]:
                    return np.int64(_NULL), a, zero
                keep_null(line, fact, valid, column, total, first + i)
                continue
            slot = slots + (i << source)
            fault, detail, used = _read_slot(
                of, base, end, used, slot, line, fact, column, total, first + i
            )
            if fault:
                return fault, a, detail
        if end - base > (used - base + 7) // 8 * 8 + reserved * count:
            return np.int64(_LEFT), a, end - used
    return zero, zero, zero


@kernel(_RESULT(BYTES, _I64, _I64, _TABLE))
def open_maps(data: Any, starts: Any, ends: Any, keys: Any) -> Any:
    """Find where the key array of every map starts and ends; answers fault, map, detail."""
    zero, of = np.int64(0), address_of(data)
    for i in range(len(starts)):
        keys[0, i] = keys[1, i] = -1
        if starts[i] < 0:
            continue
        left = ends[i] - starts[i] - 4
        if left < 0:
            return np.int64(_CUT), i, left + 4
        size = peek_i32(of + starts[i])
        if size < 0 or size > left:
            return np.int64(_CUT), i, left
        keys[0, i] = starts[i] + 4
        keys[1, i] = starts[i] + 4 + size
    return zero, zero, zero
