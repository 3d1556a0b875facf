"""Whether keys belong to their rows, compiled with numba.

A compacted key is the key columns of its row in key order, without null bits, each number in its
shortest form. A key in any other form would be a second key of the same row, so the kernel compares
with the form the value ought to have, not with the bytes of the row. The twin is
`compacted_field` of `tests/record/rows/plain_rows.py`.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from zufluss.record.kernels import row_read as k
from zufluss.record.kernels import types
from zufluss.record.kernels.cache import kernel
from zufluss.record.kernels.memory import BYTES
from zufluss.record.kernels.raw import address_of, peek_i64, peek_u8, poke_i64
from zufluss.record.kernels.row_read import extent, read_number, stripped
from zufluss.record.kernels.varint import read_varint, varint_size

_I64 = types.Array(types.int64, 1, "C", readonly=True)
_LINES = types.Array(types.int64, 2, "C", readonly=True)
_I32 = types.Array(types.int32, 1, "C", readonly=True)
_PLACES = types.Array(types.int64, 2, "C")
_SOURCE, _SINK, _PARAM, _LENGTHS = k.SOURCE, k.SINK, k.PARAM, k.LENGTHS
_PREFIXED, _IN_AREA, _EXACT = k.PREFIXED, k.IN_AREA, k.EXACT
_VARINT_32, _VARINT_64, _FIXED_4 = k.VARINT_32, k.VARINT_64, k.FIXED_4
_KEEP_4, _TIME, _FINE_MOMENT = k.KEEP_4, k.TIME, k.FINE_MOMENT
_BIG_NUMBER, _TEXT = k.BIG_NUMBER, k.TEXT
_FIXED_1, _FIXED_2, _FLOATING, _LINE = k.FIXED_1, k.FIXED_2, k.FLOATING, 8 * k.LINE


@kernel(inline=True)
def _find(
    rows: Any, start: Any, end: Any, fields: Any, program: Any, last: Any, places: Any
) -> Any:
    """Write where the fields up to `last` of a checked row begin and end to `places`; −1 = NULL.

    A row is its null bits, the length area (indexed rows only), then its fields in order.
    """
    area = start + ((fields + 7) >> 3)
    pos = area + 4 * peek_i64(program + _LINE * fields + 8 * _LENGTHS)
    for field in range(last + 1):
        poke_i64(places + 16 * field, -1)
        if field >= fields or peek_u8(rows + start + (field >> 3)) >> (field & 7) & 1:
            continue
        line = program + _LINE * field
        source, first = peek_i64(line + 8 * _SOURCE), pos
        if source >= _PREFIXED:
            first, pos = extent(rows, pos, end, source, peek_i64(line + 8 * _PARAM), area)
            if source == _IN_AREA:
                area += 4
        else:
            _, pos = read_number(rows, pos, end, source)
            if peek_i64(line + 8 * _SINK) == _FINE_MOMENT:
                fine = _VARINT_32 if source == _VARINT_64 else _FIXED_4
                _, pos = read_number(rows, pos, end, fine)
        poke_i64(places + 16 * field, first)
        poke_i64(places + 16 * field + 8, pos)


@kernel(inline=True)
def _same_varint(value: Any, keys: Any, pos: Any, end: Any) -> Any:
    """The position after the shortest varint of `value`; −1 if the key has other bytes there."""
    key_value, after = read_varint(keys, pos, end, 64)
    shortest = pos + varint_size(value)
    return after if key_value == value and after == shortest else np.int64(-1)


@kernel(inline=True)
def _same_bytes(rows: Any, first: Any, last: Any, keys: Any, pos: Any, end: Any) -> Any:
    """The position in the key after the bytes of a field; −1 if the key has other bytes there."""
    if last - first > end - pos:
        return np.int64(-1)
    for offset in range(last - first):
        if peek_u8(rows + first + offset) != peek_u8(keys + pos + offset):
            return np.int64(-1)
    return pos + last - first


@kernel(inline=True)
def _same_field(rows: Any, first: Any, last: Any, line: Any, keys: Any, pos: Any, end: Any) -> Any:
    """The position in the key after a field of the row; −1 if the key has another value there."""
    source, sink = peek_i64(line + 8 * _SOURCE), peek_i64(line + 8 * _SINK)
    # Bytes: the shortest length, then the bytes; without the padding of CHAR, and without bytes of
    # a decimal that only repeat its sign.
    if source >= _PREFIXED:
        if source == _EXACT and sink == _TEXT:
            last = stripped(rows, first, last)
        if sink == _BIG_NUMBER:
            while last - first > 1 and peek_u8(rows + first) == (
                0xFF if peek_u8(rows + first + 1) & 0x80 else 0
            ):
                first += 1
        pos = _same_varint(last - first, keys, pos, end)
        return pos if pos < 0 else _same_bytes(rows, first, last, keys, pos, end)
    # Numbers: small ones and floats as they are, the others as the shortest varint.
    if source in (_FIXED_1, _FIXED_2) or peek_i64(line + 8 * _FLOATING):
        return _same_bytes(rows, first, last, keys, pos, end)
    value, after = read_number(rows, first, last, source)
    short = sink in (_KEEP_4, _TIME)
    pos = _same_varint(value & 0xFFFFFFFF if short else value, keys, pos, end)
    if pos >= 0 and sink == _FINE_MOMENT:
        fine = _VARINT_32 if source == _VARINT_64 else _FIXED_4
        nano, after = read_number(rows, after, last, fine)
        pos = _same_varint(nano, keys, pos, end)
    return pos


@kernel(types.int64(BYTES, _I64, _I64, BYTES, _I64, _I64, _I32, _LINES, _I64, _PLACES), short=True)
def match_keys(
    keys: Any,
    key_starts: Any,
    key_ends: Any,
    rows: Any,
    starts: Any,
    ends: Any,
    fields: Any,
    program: Any,
    columns: Any,
    places: Any,
) -> Any:
    """Index of the first row whose key is not its own, −1 if there is none.

    `row_read.locate` has checked the rows. `fields` and `program` are its arguments; `columns` are
    the key columns in key order. `places` has a line per field and is overwritten.
    """
    last, width = np.int64(-1), len(program) - 1
    for column in columns:
        if column < 0 or column >= width:
            return np.int64(0)
        last = max(last, column)
    of, key = address_of(rows), address_of(keys)
    lines, at = address_of(program), address_of(places)
    for row in range(len(starts)):
        if starts[row] < 0:
            continue
        # Find the fields once, then compare them in key order, which may differ from row order.
        own = np.int64(fields[row]) if len(fields) else np.int64(width)
        _find(of, starts[row], ends[row], own, lines, last, at)
        pos, end = key_starts[row], key_ends[row]
        if pos < 0 or end > len(keys):
            return np.int64(row)
        for column in columns:
            first, behind = places[column, 0], places[column, 1]
            if first >= 0:
                pos = _same_field(of, first, behind, lines + _LINE * column, key, pos, end)
            if first < 0 or pos < 0:
                return np.int64(row)
        if pos != end:
            return np.int64(row)
    return np.int64(-1)
