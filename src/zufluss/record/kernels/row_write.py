"""Arrow columns to rows: one pass over a batch that writes row after row.

The columns come as `table`, one line per column, with the addresses of their buffers: a kernel
cannot take an unknown number of arrays. `measure` compares the size of every buffer with the rows
and returns the largest size that the rows can have; only then may `put_rows` run. The caller keeps
the buffers alive.

| table line | content |
|---|---|
| VALID, VALID_SIZE | validity bitmap, 0 if no value is NULL |
| VALUES, VALUES_SIZE | values or offsets |
| BODY, BODY_SIZE | the bytes that offsets point into |
| OFFSET | index of the array's first value in its buffers |
| WIDE | 1 = offsets of 8 bytes, as encoded nested values have |

`line` and `column` are the addresses of a program line (`row_read.py`) and of a table line. The
layouts of rows stand in `zufluss.record.rows.codec`.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from zufluss.record.kernels import row_read as k
from zufluss.record.kernels import types
from zufluss.record.kernels.cache import kernel
from zufluss.record.kernels.raw import (
    address_of,
    copy_bytes,
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
from zufluss.record.kernels.varint import put_varint_fast

VALID, VALID_SIZE, VALUES, VALUES_SIZE, BODY, BODY_SIZE, OFFSET, WIDE = range(8)
COLUMN = 8
"""Numbers in a table line."""
BAD_BUFFER, BAD_OFFSETS, BAD_DECIMAL, BAD_LENGTH = range(1, 5)
FAULTS = {
    BAD_BUFFER: "its Arrow buffers are too small",
    BAD_OFFSETS: "its Arrow offsets leave its bytes",
    BAD_DECIMAL: "a decimal has more digits than the type",
    BAD_LENGTH: "a value has {0} bytes, more than the type holds",
}
"""Messages of faults; {0} is their detail."""

LINES = types.Array(types.int64, 2, "C", readonly=True)
OUT = types.Array(types.uint8, 1, "C")
OFFSETS = types.Array(types.int64, 1, "C")
_SOURCE, _SINK, _PARAM, _LENGTHS = k.SOURCE, k.SINK, k.PARAM, k.LENGTHS
_HIGH, _LOW = k.LIMIT_HIGH, k.LIMIT_LOW
_FIXED_2, _FIXED_4, _FIXED_8 = k.FIXED_2, k.FIXED_4, k.FIXED_8
_VARINT_32, _VARINT_64, _PREFIXED = k.VARINT_32, k.VARINT_64, k.PREFIXED
_IN_AREA, _EXACT = k.IN_AREA, k.EXACT
_KEEP_1, _KEEP_2, _KEEP_4, _KEEP_8, _FLAG = k.KEEP_1, k.KEEP_2, k.KEEP_4, k.KEEP_8, k.FLAG
_TIME, _MOMENT, _FINE_MOMENT = k.TIME, k.MOMENT, k.FINE_MOMENT
_NUMBER, _BIG_NUMBER = k.NUMBER, k.BIG_NUMBER
_TEXT, _PADDED, _LINE = k.TEXT, k.PADDED, 8 * k.LINE
_FIELD_MAX = 24
"""Largest size of a field, without the bytes of texts and nested values and without PARAM."""


@kernel(inline=True)
def is_null(column: Any, row: Any) -> Any:
    """Whether a value of a column is NULL."""
    valid = peek_i64(column + 8 * VALID)
    if valid == 0:
        return False
    index = peek_i64(column + 8 * OFFSET) + row
    return peek_u8(valid + (index >> 3)) >> (index & 7) & 1 == 0


@kernel(inline=True)
def offset_of(column: Any, row: Any) -> Any:
    """The offset of a value in the column's body."""
    index = peek_i64(column + 8 * OFFSET) + row
    values = peek_i64(column + 8 * VALUES)
    if peek_i64(column + 8 * WIDE):
        return peek_i64(values + 8 * index)
    return peek_i32(values + 4 * index)


@kernel()
def _bits(line: Any, column: Any) -> Any:
    """Bits of one value, or of one offset, in the values buffer."""
    sink = peek_i64(line + 8 * _SINK)
    if sink == _FLAG:
        return np.int64(1)
    if sink == _PADDED:
        return 8 * peek_i64(line + 8 * _PARAM)
    if sink >= _TEXT:
        return np.int64(64 if peek_i64(column + 8 * WIDE) else 32)
    if sink in (_NUMBER, _BIG_NUMBER):
        return np.int64(128)
    if sink == _KEEP_1:
        return np.int64(8)
    if sink == _KEEP_2:
        return np.int64(16)
    if sink == _KEEP_4 or (sink == _TIME and peek_i64(line + 8 * _PARAM) < 2):
        return np.int64(32)
    return np.int64(64)


@kernel(types.UniTuple(types.int64, 3)(LINES, LINES, types.int64))
def measure(program: Any, table: Any, count: Any) -> Any:
    """Check the buffers of `count` rows; returns fault, column and the largest size of the rows."""
    zero, columns = np.int64(0), len(program) - 1
    # Every row begins with its null bits and its length area.
    most = count * ((columns + 7) // 8 + 4 * program[columns, _LENGTHS])
    for number in range(columns if count else 0):
        line = address_of(program) + _LINE * number
        column = address_of(table) + 8 * COLUMN * number
        # The buffers must hold all values up to the last row; offsets are one more.
        end, sink = peek_i64(column + 8 * OFFSET) + count, peek_i64(line + 8 * _SINK)
        has_offsets = sink >= _TEXT and sink != _PADDED
        need = (end + (1 if has_offsets else 0)) * _bits(line, column)
        if 8 * peek_i64(column + 8 * VALUES_SIZE) < need:
            return np.int64(BAD_BUFFER), number, zero
        if peek_i64(column + 8 * VALID) and 8 * peek_i64(column + 8 * VALID_SIZE) < end:
            return np.int64(BAD_BUFFER), number, zero
        # Only the outer offsets: `bytes_of` compares those in between when it reads them.
        if has_offsets:
            first, last = offset_of(column, zero), offset_of(column, count)
            if first < 0 or last < first or last > peek_i64(column + 8 * BODY_SIZE):
                return np.int64(BAD_OFFSETS), number, zero
            most += last - first
        if sink == _PADDED or peek_i64(line + 8 * _SOURCE) == _EXACT:
            most += count * peek_i64(line + 8 * _PARAM)
        most += count * _FIELD_MAX
    return zero, zero, most


@kernel(inline=True)
def number_of(line: Any, column: Any, row: Any) -> Any:
    """A number of a column, in the unit that rows have it in."""
    sink, index = peek_i64(line + 8 * _SINK), peek_i64(column + 8 * OFFSET) + row
    values = peek_i64(column + 8 * VALUES)
    if sink == _KEEP_8:
        return peek_i64(values + 8 * index)
    if sink == _KEEP_4:
        return peek_i32(values + 4 * index)
    if sink == _KEEP_1:
        return peek_i8(values + index)
    if sink == _KEEP_2:
        return peek_i16(values + 2 * index)
    if sink == _FLAG:
        return peek_u8(values + (index >> 3)) >> (index & 7) & 1
    if sink == _MOMENT:
        return peek_i64(values + 8 * index) * 1000
    if sink == _NUMBER:
        return peek_i64(values + 16 * index)
    # A time of day: rows hold milliseconds, the Arrow column its own unit.
    unit = peek_i64(line + 8 * _PARAM)
    if unit == 0:
        return peek_i32(values + 4 * index) * 1000
    if unit == 1:
        return peek_i32(values + 4 * index)
    return peek_i64(values + 8 * index) // (1000 if unit == 2 else 1_000_000)


@kernel(inline=True)
def moment_of(line: Any, column: Any, row: Any) -> Any:
    """Milliseconds and nano of the millisecond of a timestamp."""
    value = peek_i64(peek_i64(column + 8 * VALUES) + 8 * (peek_i64(column + 8 * OFFSET) + row))
    per_milli = 1000 if peek_i64(line + 8 * _PARAM) == 2 else 1_000_000
    millis = value // per_milli
    return millis, (value - millis * per_milli) * (1_000_000 // per_milli)


@kernel(inline=True)
def _decimal_at(column: Any, row: Any) -> Any:
    """Address of a decimal: 16 bytes, little-endian two's complement."""
    return peek_i64(column + 8 * VALUES) + 16 * (peek_i64(column + 8 * OFFSET) + row)


@kernel(inline=True)
def decimal_fits(line: Any, column: Any, row: Any) -> Any:
    """Whether a decimal has no more digits than its type."""
    address = _decimal_at(column, row)
    low, high = np.uint64(peek_i64(address)), np.uint64(peek_i64(address + 8))
    if peek_i64(address + 8) < 0:
        low = ~low + np.uint64(1)
        high = ~high + (np.uint64(1) if low == np.uint64(0) else np.uint64(0))
    limit_high = np.uint64(peek_i64(line + 8 * _HIGH))
    limit_low = np.uint64(peek_i64(line + 8 * _LOW))
    return high < limit_high or (high == limit_high and low < limit_low)


@kernel()
def decimal_size(column: Any, row: Any) -> Any:
    """Bytes of the shortest two's complement of a decimal."""
    address = _decimal_at(column, row)
    sign = 0xFF if peek_u8(address + 15) & 0x80 else 0
    size = np.int64(16)
    # A byte of sign bits is superfluous if the byte below it has the same top bit.
    while size > 1 and peek_u8(address + size - 1) == sign:
        if (peek_u8(address + size - 2) ^ sign) & 0x80:
            break
        size -= 1
    return size


@kernel()
def put_decimal(column: Any, row: Any, size: Any, out: Any, pos: Any) -> Any:
    """Write a decimal big-endian in `size` bytes."""
    address = _decimal_at(column, row)
    for offset in range(size):
        poke_u8(out + pos + offset, peek_u8(address + size - 1 - offset))


@kernel(inline=True)
def bytes_of(line: Any, column: Any, row: Any) -> Any:
    """Address and size of a text, bytes or nested value; size −1 if its offsets are wrong."""
    if peek_i64(line + 8 * _SINK) == _PADDED:
        width = peek_i64(line + 8 * _PARAM)
        return peek_i64(column + 8 * VALUES) + width * (peek_i64(column + 8 * OFFSET) + row), width
    start, end = offset_of(column, row), offset_of(column, row + 1)
    if start < 0 or end < start or end > peek_i64(column + 8 * BODY_SIZE):
        return np.int64(0), np.int64(-1)
    return peek_i64(column + 8 * BODY) + start, end - start


@kernel(inline=True)
def put_number(value: Any, source: Any, out: Any, pos: Any) -> Any:
    """Write a number as its source says; returns the position after it."""
    if source == _VARINT_32:
        return put_varint_fast(value & 0xFFFFFFFF, out, pos)
    if source == _VARINT_64:
        return put_varint_fast(value, out, pos)
    if source == _FIXED_8:
        poke_i64(out + pos, value)
        return pos + 8
    if source == _FIXED_4:
        poke_i32(out + pos, value)
        return pos + 4
    if source == _FIXED_2:
        poke_i16(out + pos, value)
        return pos + 2
    poke_u8(out + pos, value)
    return pos + 1


@kernel(inline=True)
def _put_bytes(line: Any, column: Any, row: Any, out: Any, pos: Any, area: Any, most: Any) -> Any:
    """Write a value that has a length; returns fault, detail and the position after it."""
    source, is_decimal = peek_i64(line + 8 * _SOURCE), peek_i64(line + 8 * _SINK) == _BIG_NUMBER
    address, zero = np.int64(0), np.int64(0)
    if is_decimal:
        size = decimal_size(column, row)
    else:
        address, size = bytes_of(line, column, row)
    # Offsets that fall and rise again could claim more bytes than `measure` counted.
    width = peek_i64(line + 8 * _PARAM) if source == _EXACT else size
    if size < 0 or width + 5 > most - pos:
        return np.int64(BAD_OFFSETS), zero, pos
    if size > width:
        return np.int64(BAD_LENGTH), size, pos
    # The length: before the bytes, in the length area, or none if it is the type's.
    if source == _PREFIXED:
        pos = put_varint_fast(size, out, pos)
    elif source == _IN_AREA:
        poke_i32(out + area, size)
    if is_decimal:
        put_decimal(column, row, size, out, pos)
    else:
        copy_bytes(out + pos, address, size)
    for padding in range(pos + size, pos + width):
        poke_u8(out + padding, 0)
    return zero, zero, pos + width


@kernel(inline=True)
def _put_field(line: Any, column: Any, row: Any, out: Any, pos: Any, area: Any, most: Any) -> Any:
    """Write a value that is not NULL; returns fault, detail and the position after it."""
    source, sink, zero = peek_i64(line + 8 * _SOURCE), peek_i64(line + 8 * _SINK), np.int64(0)
    if sink in (_NUMBER, _BIG_NUMBER) and not decimal_fits(line, column, row):
        return np.int64(BAD_DECIMAL), zero, pos
    if source >= _PREFIXED:
        return _put_bytes(line, column, row, out, pos, area, most)
    if sink == _FINE_MOMENT:
        millis, nano = moment_of(line, column, row)
        pos = put_number(millis, source, out, pos)
        fine = _VARINT_32 if source == _VARINT_64 else _FIXED_4
        return zero, zero, put_number(nano, fine, out, pos)
    return zero, zero, put_number(number_of(line, column, row), source, out, pos)


@kernel(types.UniTuple(types.int64, 3)(LINES, LINES, OUT, OFFSETS))
def put_rows(program: Any, table: Any, out: Any, offsets: Any) -> Any:
    """Write the rows of measured columns; returns fault, column, detail.

    `offsets` gets where each row begins, and where the last one ends.
    """
    zero, pos, columns, to = np.int64(0), np.int64(0), len(program) - 1, address_of(out)
    null_bytes = (columns + 7) // 8
    head = null_bytes + 4 * program[columns, _LENGTHS]
    for row in range(len(offsets) - 1):
        # A row begins with null bits and length area, both zero until a field sets them.
        offsets[row] = start = pos
        area, pos = start + null_bytes, start + head
        for byte in range(start, pos):
            poke_u8(to + byte, 0)
        line, column = address_of(program), address_of(table)
        for number in range(columns):
            if is_null(column, row):
                byte = to + start + (number >> 3)
                poke_u8(byte, peek_u8(byte) | np.int64(1) << (number & 7))
            else:
                fault, detail, pos = _put_field(line, column, row, to, pos, area, len(out))
                if fault:
                    return fault, np.int64(number), detail
                area += 4 if peek_i64(line + 8 * _SOURCE) == _IN_AREA else 0
            line += _LINE
            column += 8 * COLUMN
    offsets[len(offsets) - 1] = pos
    return zero, zero, zero
