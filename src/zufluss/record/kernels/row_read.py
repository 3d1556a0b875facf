"""Rows to cells: one walk over each row that checks every byte and writes Arrow-ready values.

`locate` walks over all rows once. Numbers go straight into Arrow buffers. Of texts, bytes and
nested values only the place is kept; `gather` copies them when an Arrow column needs them. What to
do with a field stands in its line of the *program* (`rows/plan.py` writes it):

| program line | content |
|---|---|
| SOURCE | how the row stores the value: FIXED_1 … EXACT |
| SINK | what becomes of the value: KEEP_1 … NESTED |
| PARAM | time unit 0 s, 1 ms, 2 us, 3 ns; or the length of CHAR and BINARY |
| SLOT | number of the field's first cell column |
| NOT_NULL | 1 = refuse NULL |
| LIMIT_HIGH, LIMIT_LOW | 10 ** precision of a decimal, 128 bits |
| LENGTHS | indexed rows: entries of the length area before this field |
| FLOATING | 1 = a FLOAT or DOUBLE, which has the same bytes in every format |

The program has one line more than fields; its SLOT is the number of cell columns, its LENGTHS the
number of all entries.

*Cells* are one buffer. With n rows, cell column s begins at byte 8 · n · s. A value takes its Arrow
width there; a place takes two cell columns (starts, −1 = NULL; then ends), and so does a decimal.
Behind the cell columns stand the validity bitmaps, one per field, each padded to 8 bytes. *Facts*
have one line per field: the number of NULLs, the number of bytes in places, and 1 + the first row
whose timestamp Arrow cannot hold.

Kernels work on addresses (`raw.py`): `line`, `fact`, `valid` and `column` are the addresses of a
field's program line, its facts, its validity bitmap and its first cell column. The layouts of
rows stand in `zufluss.record.rows.codec`.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from zufluss.record.kernels import types
from zufluss.record.kernels.cache import kernel
from zufluss.record.kernels.memory import BYTES
from zufluss.record.kernels.raw import (
    address_of,
    copy_bytes,
    peek_i16,
    peek_i32,
    peek_i64,
    peek_u8,
    poke_i16,
    poke_i32,
    poke_i64,
    poke_u8,
)
from zufluss.record.kernels.utf8 import utf8_fault
from zufluss.record.kernels.varint import CUT, read_varint

SOURCE, SINK, PARAM, SLOT, NOT_NULL, LIMIT_HIGH, LIMIT_LOW, LENGTHS, FLOATING = range(9)
LINE = 9
"""Numbers in a program line."""

FIXED_1, FIXED_2, FIXED_4, FIXED_8, VARINT_32, VARINT_64 = range(6)
"""Sources of numbers: little-endian bytes, or a varint."""
PREFIXED, IN_AREA, EXACT = range(6, 9)
"""Sources of bytes: the length is a varint before them, is in the length area, or is PARAM."""

KEEP_1, KEEP_2, KEEP_4, KEEP_8, FLAG, TIME, MOMENT, FINE_MOMENT, NUMBER, BIG_NUMBER = range(10)
"""Sinks of numbers: as they are, a bit, a time of day, a timestamp of milliseconds or finer, a
decimal of up to 64 bits or more."""
TEXT, RAW, PADDED, NESTED = range(10, 14)
"""Sinks of bytes, kept as places: UTF-8, any bytes, bytes to pad with zeros, nested values."""

NULLS, PLACED, BEYOND = range(3)
FACTS = 4
"""Numbers in a line of facts."""

ALL_CUT, ALL_LEFT, ALL_COUNT, ALL_BOUNDS = range(1, 5)
(
    F_CUT,
    F_VARINT,
    F_NULL,
    F_FLAG,
    F_TIME,
    F_NANO,
    F_DIGITS,
    F_DECIMAL_BYTES,
    F_TEXT,
    F_PADDED,
    F_SLOT,
    F_PIECE,
    F_LEFT,
    F_COUNT,
    F_MAP_COUNTS,
    F_MAP_KEY,
) = range(10, 26)
FAULTS = {
    ALL_CUT: "{0} bytes are too few for its null bits and lengths",
    ALL_LEFT: "{0} bytes are left over after the last field",
    ALL_COUNT: "{0} fields are claimed, the schema has fewer",
    ALL_BOUNDS: "it does not lie within its buffer of {0} bytes",
    F_CUT: "it runs past the end; {0} bytes are left",
    F_VARINT: "a number has more bytes or bits than its type",
    F_NULL: "it is NOT NULL and has a NULL",
    F_FLAG: "a BOOLEAN is {0}, neither 0 nor 1",
    F_TIME: "a TIME is {0} ms, outside the day",
    F_NANO: "nano of the millisecond {0} is not 0 to 999999",
    F_DIGITS: "a decimal has too many digits",
    F_DECIMAL_BYTES: "a decimal has {0} bytes, 1 to 16 are allowed",
    F_TEXT: "text is not UTF-8 at its byte {0}",
    F_PADDED: "{0} bytes are too many",
    F_SLOT: "a slot claims {0} bytes, it holds 7",
    F_PIECE: "a value at offset {0} is not within the variable part",
    F_LEFT: "{0} bytes are left over after an array",
    F_COUNT: "an array has {0} elements",
    F_MAP_COUNTS: "a map has {0} keys and another number of values",
    F_MAP_KEY: "a map has a NULL key",
}
"""Messages of faults; {0} is their detail. Those from `F_CUT` on are about one field."""

_I64 = types.Array(types.int64, 1, "C", readonly=True)
_LINES = types.Array(types.int64, 2, "C", readonly=True)
_I32 = types.Array(types.int32, 1, "C", readonly=True)
_FACTS = types.Array(types.int64, 2, "C")
_OUT = types.Array(types.uint8, 1, "C")
_RESULT = types.UniTuple(types.int64, 4)
_DAY_MS = 86_400_000
_MILLI_NS = 1_000_000
_I64_MAX = 2**63 - 1


_LINE_BYTES = 8 * LINE
_FACT_BYTES = 8 * FACTS


@kernel()
def begin_cells(program: Any, fields: Any, count: Any, cells: Any, facts: Any) -> Any:
    """Prepare cells of `count` rows: no facts, all values valid. Returns where bitmaps begin."""
    bitmaps = cells + 8 * count * peek_i64(program + _LINE_BYTES * fields + 8 * SLOT)
    stride = (count + 63) // 64 * 8
    for field in range(fields):
        for fact in range(FACTS):
            poke_i64(facts + _FACT_BYTES * field + 8 * fact, 0)
        # One bits for the rows, zero bits behind the last row: Arrow readers may count them all.
        valid = bitmaps + field * stride
        for offset in range(0, stride, 8):
            poke_i64(valid + offset, -1)
        if count % 64:
            poke_i64(valid + stride - 8, (np.int64(1) << (count % 64)) - 1)
        # BOOLEANs are bits too, and setting one only ever adds it.
        line = program + _LINE_BYTES * field
        if peek_i64(line + 8 * SINK) == FLAG:
            column = cells + 8 * count * peek_i64(line + 8 * SLOT)
            for offset in range(0, stride, 8):
                poke_i64(column + offset, 0)
    return bitmaps


@kernel()
def keep_null(line: Any, fact: Any, valid: Any, column: Any, count: Any, row: Any) -> Any:
    """Make a value NULL."""
    poke_i64(fact + 8 * NULLS, peek_i64(fact + 8 * NULLS) + 1)
    poke_u8(valid + (row >> 3), peek_u8(valid + (row >> 3)) & ~(np.int64(1) << (row & 7)))
    # Cells below a NULL are zero, so that equal rows have equal Arrow buffers; places are −1.
    sink = peek_i64(line + 8 * SINK)
    if sink >= TEXT:
        poke_i64(column + 8 * row, -1)
        poke_i64(column + 8 * (count + row), -1)
    elif sink == KEEP_1:
        poke_u8(column + row, 0)
    elif sink == KEEP_2:
        poke_i16(column + 2 * row, 0)
    elif sink == KEEP_4 or (sink == TIME and peek_i64(line + 8 * PARAM) < 2):
        poke_i32(column + 4 * row, 0)
    elif sink in (NUMBER, BIG_NUMBER):
        poke_i64(column + 16 * row, 0)
        poke_i64(column + 16 * row + 8, 0)
    elif sink != FLAG:
        poke_i64(column + 8 * row, 0)


@kernel(inline=True)
def keep_number(line: Any, sink: Any, column: Any, row: Any, value: Any) -> Any:
    """Check a number and write it to a cell; returns a fault or 0."""
    # The most frequent sinks come first: this runs once per value.
    if sink == KEEP_8:
        poke_i64(column + 8 * row, value)
    elif sink == KEEP_4:
        poke_i32(column + 4 * row, value)
    elif sink == KEEP_1:
        poke_u8(column + row, value)
    elif sink == KEEP_2:
        poke_i16(column + 2 * row, value)
    elif sink == FLAG:
        if value < 0 or value > 1:
            return np.int64(F_FLAG)
        byte = column + (row >> 3)
        poke_u8(byte, peek_u8(byte) | value << (row & 7))
    elif sink == NUMBER:
        # A decimal of up to 18 digits: 64 bits in the row, 128 bits in Arrow.
        limit = peek_i64(line + 8 * LIMIT_LOW)
        if value >= limit or value <= -limit:
            return np.int64(F_DIGITS)
        poke_i64(column + 16 * row, value)
        poke_i64(column + 16 * row + 8, value >> 63)
    elif sink == MOMENT:
        # Rows hold milliseconds, the Arrow column seconds.
        poke_i64(column + 8 * row, value // 1000)
    else:
        return _keep_time(peek_i64(line + 8 * PARAM), value, column, row)
    return np.int64(0)


@kernel(inline=True)
def _keep_time(unit: Any, value: Any, column: Any, row: Any) -> Any:
    """Check a time of day in milliseconds and write it in its Arrow unit; returns a fault or 0."""
    if value < 0 or value >= _DAY_MS:
        return np.int64(F_TIME)
    if unit == 0:
        poke_i32(column + 4 * row, value // 1000)
    elif unit == 1:
        poke_i32(column + 4 * row, value)
    else:
        poke_i64(column + 8 * row, value * (1000 if unit == 2 else _MILLI_NS))
    return np.int64(0)


@kernel(inline=True)
def _scaled(millis: Any, rest: Any, per_milli: Any) -> Any:
    """Whether `millis · per_milli + rest` does not fit 64 bits, and that sum (0 if not).

    The operands are compared first: the compiler assumes that sums do not overflow.
    """
    most, most_rest = _I64_MAX // per_milli, _I64_MAX % per_milli
    least_rest = per_milli - most_rest - 1
    if millis > most or (millis == most and rest > most_rest):
        return True, np.int64(0)
    if millis < -most - 1 or (millis == -most - 1 and rest < least_rest):
        return True, np.int64(0)
    # For negative milliseconds the product alone may be below 64 bits although the sum is not.
    if millis < 0:
        return False, (millis + 1) * per_milli + (rest - per_milli)
    return False, millis * per_milli + rest


@kernel()
def keep_moment(line: Any, fact: Any, column: Any, row: Any, millis: Any, nano: Any) -> Any:
    """Write a timestamp finer than milliseconds to a cell; returns a fault or 0."""
    if nano < 0 or nano >= _MILLI_NS:
        return np.int64(F_NANO)
    if peek_i64(line + 8 * PARAM) == 2:
        beyond, value = _scaled(millis, nano // 1000, 1000)
    else:
        beyond, value = _scaled(millis, nano, _MILLI_NS)
    # A row may hold a timestamp that Arrow cannot: only a reader of the column refuses it.
    if beyond and peek_i64(fact + 8 * BEYOND) == 0:
        poke_i64(fact + 8 * BEYOND, row + 1)
    poke_i64(column + 8 * row, value)
    return np.int64(0)


@kernel()
def _keep_big_number(line: Any, column: Any, row: Any, start: Any, size: Any) -> Any:
    """Check a decimal of more than 18 digits and write it to a cell; returns fault and detail."""
    if size < 1 or size > 16:
        return np.int64(F_DECIMAL_BYTES), size
    # Big-endian two's complement of any length in the row, two words with its sign in Arrow.
    sign = np.uint64(0)
    if peek_u8(start) & 0x80:
        sign = ~sign
    high, low = sign, sign
    for offset in range(size):
        high = (high << np.uint64(8)) | (low >> np.uint64(56))
        low = (low << np.uint64(8)) | np.uint64(peek_u8(start + offset))
    # The precision limits the magnitude.
    magnitude_high, magnitude_low = high, low
    if sign != np.uint64(0):
        magnitude_low = ~low + np.uint64(1)
        carry = np.uint64(1) if magnitude_low == np.uint64(0) else np.uint64(0)
        magnitude_high = ~high + carry
    limit_high = np.uint64(peek_i64(line + 8 * LIMIT_HIGH))
    limit_low = np.uint64(peek_i64(line + 8 * LIMIT_LOW))
    if magnitude_high > limit_high or (magnitude_high == limit_high and magnitude_low >= limit_low):
        return np.int64(F_DIGITS), np.int64(0)
    poke_i64(column + 16 * row, np.int64(low))
    poke_i64(column + 16 * row + 8, np.int64(high))
    return np.int64(0), np.int64(0)


@kernel(inline=True)
def keep_place(
    line: Any, fact: Any, column: Any, count: Any, row: Any, data: Any, start: Any, end: Any
) -> Any:
    """Check the bytes data[start:end] and keep their place as a value; returns fault and detail."""
    sink = peek_i64(line + 8 * SINK)
    if sink == BIG_NUMBER:
        return _keep_big_number(line, column, row, data + start, end - start)
    if sink == TEXT:
        bad = utf8_fault(data, start, end)
        if bad >= 0:
            return np.int64(F_TEXT), bad - start
    elif sink == PADDED and end - start > peek_i64(line + 8 * PARAM):
        return np.int64(F_PADDED), end - start
    poke_i64(column + 8 * row, start)
    poke_i64(column + 8 * (count + row), end)
    poke_i64(fact + 8 * PLACED, peek_i64(fact + 8 * PLACED) + end - start)
    return np.int64(0), np.int64(0)


@kernel(inline=True)
def read_number(data: Any, pos: Any, end: Any, source: Any) -> Any:
    """The number at `pos` and the position after it, which is negative if there is no number."""
    if source == VARINT_32:
        # Its 32 bits are a signed number: −1 is 0xFFFFFFFF, not a varint of ten bytes.
        value, pos = read_varint(data, pos, end, 32)
        return np.int64(np.int32(value)), pos
    if source == VARINT_64:
        return read_varint(data, pos, end, 64)
    left = end - pos
    if source == FIXED_8 and left >= 8:
        return peek_i64(data + pos), pos + 8
    if source == FIXED_4 and left >= 4:
        return peek_i32(data + pos), pos + 4
    if source == FIXED_1 and left >= 1:
        return peek_u8(data + pos), pos + 1
    if source == FIXED_2 and left >= 2:
        return peek_i16(data + pos), pos + 2
    return np.int64(0), np.int64(CUT)


@kernel(inline=True)
def _varint_fault(at: Any, left: Any) -> Any:
    return (np.int64(F_CUT), left) if at == CUT else (np.int64(F_VARINT), np.int64(0))


@kernel(inline=True)
def extent(data: Any, pos: Any, end: Any, source: Any, length: Any, area: Any) -> Any:
    """Where the bytes at `pos` begin and end; the end is negative if they leave the row.

    `length` is the size of an EXACT source, `area` the position of the next entry of the length
    area.
    """
    if source == PREFIXED:
        size, pos = read_varint(data, pos, end, 32)
        if pos < 0:
            return np.int64(0), pos
    elif source == IN_AREA:
        size = peek_i32(data + area)
    else:
        size = length
    if size < 0 or size > end - pos:
        return np.int64(0), np.int64(CUT)
    return pos, pos + size


@kernel()
def stripped(data: Any, first: Any, last: Any) -> Any:
    """The end of a padded CHAR without its zeros."""
    while last > first and peek_u8(data + last - 1) == 0:
        last -= 1
    return last


@kernel(inline=True)
def _read_field(
    data: Any,
    pos: Any,
    end: Any,
    area: Any,
    line: Any,
    fact: Any,
    column: Any,
    count: Any,
    row: Any,
) -> Any:
    """Read a field that is not NULL; returns fault, detail, position after it, length area."""
    source, sink = peek_i64(line + 8 * SOURCE), peek_i64(line + 8 * SINK)
    # Texts, bytes, decimals of many digits and nested values: length, then bytes.
    if source >= PREFIXED:
        first, last = extent(data, pos, end, source, peek_i64(line + 8 * PARAM), area)
        if last < 0:
            fault, detail = _varint_fault(last, end - pos)
            return fault, detail, pos, area
        pos = last
        if source == IN_AREA:
            area += 4
        elif source == EXACT and sink == TEXT:
            last = stripped(data, first, last)
        fault, detail = keep_place(line, fact, column, count, row, data, first, last)
        return fault, detail, pos, area
    # Numbers; a timestamp finer than milliseconds has a second one, the nano of the millisecond.
    value, after = read_number(data, pos, end, source)
    if after >= 0 and sink == FINE_MOMENT:
        fine = VARINT_32 if source == VARINT_64 else FIXED_4
        nano, after = read_number(data, after, end, fine)
        if after >= 0:
            return keep_moment(line, fact, column, row, value, nano), nano, after, area
    if after < 0:
        fault, detail = _varint_fault(after, end - pos)
        return fault, detail, pos, area
    return keep_number(line, sink, column, row, value), value, after, area


# The order of these parameters is measured: another order, or a tuple of them, made `locate` 5 %
# slower, since the compiler then keeps other values in registers.


@kernel(inline=True)
def _walk(
    data: Any,
    start: Any,
    end: Any,
    own: Any,
    program: Any,
    fields: Any,
    count: Any,
    row: Any,
    cells: Any,
    bitmaps: Any,
    facts: Any,
) -> Any:
    """Walk over a row that has `own` fields; returns fault, field, detail.

    A row is its null bits, the length area (indexed rows only), then its fields in order.
    """
    area = start + ((own + 7) >> 3)
    pos = area + 4 * peek_i64(program + _LINE_BYTES * own + 8 * LENGTHS)
    zero, stride = np.int64(0), (count + 63) // 64 * 8
    if pos > end:
        return np.int64(ALL_CUT), zero, end - start
    line, fact, null_bits = program, facts, zero
    for field in range(fields):
        # Null bits are loaded a byte at a time; fields that an older schema lacks are NULL.
        if field & 7 == 0:
            null_bits = peek_u8(data + start + (field >> 3)) if field < own else zero
        column = cells + 8 * count * peek_i64(line + 8 * SLOT)
        if null_bits & 1 or field >= own:
            if peek_i64(line + 8 * NOT_NULL):
                return np.int64(F_NULL), field, zero
            keep_null(line, fact, bitmaps + field * stride, column, count, row)
        else:
            fault, detail, pos, area = _read_field(
                data, pos, end, area, line, fact, column, count, row
            )
            if fault:
                return fault, field, detail
        null_bits >>= 1
        line += _LINE_BYTES
        fact += _FACT_BYTES
    if pos != end:
        return np.int64(ALL_LEFT), zero, end - pos
    return zero, zero, zero


@kernel()
def _put_absent(
    program: Any, fields: Any, count: Any, row: Any, cells: Any, bitmaps: Any, facts: Any
) -> Any:
    """Make all fields of a row NULL."""
    stride = (count + 63) // 64 * 8
    for field in range(fields):
        line, fact = program + _LINE_BYTES * field, facts + _FACT_BYTES * field
        column = cells + 8 * count * peek_i64(line + 8 * SLOT)
        keep_null(line, fact, bitmaps + field * stride, column, count, row)


@kernel(_RESULT(BYTES, _I64, _I64, _I32, _LINES, _OUT, _FACTS))
def locate(
    data: Any, starts: Any, ends: Any, fields: Any, program: Any, cells: Any, facts: Any
) -> Any:
    """Check every row and fill `cells` and `facts`; returns fault, row, field, detail.

    `fields` has the number of fields of each row, or nothing if all have the schema's. A row that
    is absent (start −1) gets only NULLs, even where the schema forbids them.
    """
    count, width, size, zero = len(starts), len(program) - 1, len(data), np.int64(0)
    of, lines = address_of(data), address_of(program)
    to, notes = address_of(cells), address_of(facts)
    bitmaps = begin_cells(lines, width, count, to, notes)
    for row in range(count):
        start, end = starts[row], ends[row]
        if start == -1:
            _put_absent(lines, width, count, row, to, bitmaps, notes)
            continue
        if start < 0 or start > end or end > size:
            return np.int64(ALL_BOUNDS), row, zero, np.int64(size)
        own = np.int64(fields[row]) if len(fields) else np.int64(width)
        if own < 0 or own > width:
            return np.int64(ALL_COUNT), row, zero, own
        fault, field, detail = _walk(
            of, start, end, own, lines, width, count, row, to, bitmaps, notes
        )
        if fault:
            return fault, row, field, detail
    return zero, zero, zero, zero


@kernel(_RESULT(BYTES, _I64, _I64, _LINES, _OUT, _FACTS, _I64, types.int64))
def locate_among(
    data: Any,
    starts: Any,
    ends: Any,
    program: Any,
    cells: Any,
    facts: Any,
    at: Any,
    count: Any,
) -> Any:
    """Check rows as `locate` does, into the rows `at` of cells for `count` rows.

    No row is absent and all have the schema's fields. The other rows of the cells are not written.
    """
    width, size, zero = len(program) - 1, len(data), np.int64(0)
    of, lines = address_of(data), address_of(program)
    to, notes = address_of(cells), address_of(facts)
    bitmaps = begin_cells(lines, width, count, to, notes)
    for index in range(min(len(starts), len(at))):
        start, end, row = starts[index], ends[index], at[index]
        if start < 0 or start > end or end > size or row < 0 or row >= count:
            return np.int64(ALL_BOUNDS), index, zero, np.int64(size)
        fault, field, detail = _walk(
            of, start, end, width, lines, width, count, row, to, bitmaps, notes
        )
        if fault:
            return fault, index, field, detail
    return zero, zero, zero, zero


@kernel(types.void(BYTES, BYTES, types.int64, types.int64, _OUT, types.int64), short=True)
def gather(data: Any, cells: Any, slot: Any, count: Any, out: Any, body: Any) -> Any:
    """Copy the placed values of a column to Arrow buffers: int32 offsets at 0, bytes at `body`."""
    column, of, to = address_of(cells) + 8 * count * slot, address_of(data), address_of(out)
    pos, data_size, out_size = body, len(data), len(out)
    for row in range(count):
        poke_i32(to + 4 * row, pos - body)
        start, end = peek_i64(column + 8 * row), peek_i64(column + 8 * (count + row))
        size = end - start
        # Most texts are short: two words cost less than a call of memcpy, if both buffers have
        # 16 bytes. The bytes too many are overwritten by the next value.
        if size <= 16 and start >= 0 and start + 16 <= data_size and pos + 16 <= out_size:
            poke_i64(to + pos, peek_i64(of + start))
            poke_i64(to + pos + 8, peek_i64(of + start + 8))
        elif size > 0:
            copy_bytes(to + pos, of + start, size)
        pos += size
    poke_i32(to + 4 * count, pos - body)


@kernel(types.void(BYTES, BYTES, types.int64, types.int64, types.int64, _OUT))
def gather_padded(data: Any, cells: Any, slot: Any, count: Any, width: Any, out: Any) -> Any:
    """Copy the placed values of a column to `width` bytes each; `out` holds zeros before."""
    column, of, to = address_of(cells) + 8 * count * slot, address_of(data), address_of(out)
    for row in range(count):
        start, end = peek_i64(column + 8 * row), peek_i64(column + 8 * (count + row))
        if end > start:
            copy_bytes(to + width * row, of + start, end - start)
