"""Rows to cells: one walk over each row that checks every byte and writes Arrow-ready values.

`locate` goes through all rows once. A field's `program` line says where its value stands in the row
(source), what to make of it (sink) and where it goes. Numbers go straight into Arrow buffers; of
texts, bytes and nested values only the place is kept, `gather` copies them when they are wanted.

| program line | content |
|---|---|
| SOURCE, SINK | below |
| PARAM | time unit 0 s, 1 ms, 2 us, 3 ns; or the length of CHAR and BINARY |
| SLOT | number of the field's first cell column |
| NOT_NULL | 1 = refuse NULL |
| LIMIT_HIGH, LIMIT_LOW | 10 ** precision of a decimal, 128 bits |
| LENGTHS | indexed rows: entries of the length area before this field |
| FLOATING | 1 = a FLOAT or DOUBLE, bytes as they are in every format |

There is one line more than fields; its SLOT is the number of cell columns, its LENGTHS the number
of all entries. Of n rows, cell column s is `cells[8 · n · s :]`; a value takes its Arrow width
there, a place two columns (starts, −1 = NULL; ends), a decimal two. Behind the cell columns stand
the validity bitmaps, one per field, each padded to 8 bytes. `facts` has a line per field: the
number of NULLs, of bytes in places, and 1 + the first row whose timestamp Arrow cannot hold.

The layouts of rows stand in `zufluss.record.rows.formats`, the plain-Python twin.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from zufluss.record.kernels.cache import kernel
from zufluss.record.kernels.memory import BYTES, types
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
from zufluss.record.kernels.varint import CUT, read_varint, utf8_fault

SOURCE, SINK, PARAM, SLOT, NOT_NULL, LIMIT_HIGH, LIMIT_LOW, LENGTHS, FLOATING = range(9)
LINE = 9
"""Numbers in a program line."""
FIXED_1, FIXED_2, FIXED_4, FIXED_8, VARINT_32, VARINT_64 = range(6)
PREFIXED, IN_AREA, EXACT = range(6, 9)
KEEP_1, KEEP_2, KEEP_4, KEEP_8, FLAG, TIME, MOMENT, FINE_MOMENT, NUMBER, BIG_NUMBER = range(10)
TEXT, RAW, PADDED, NESTED = range(10, 14)
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
"""What to say of a fault and its detail; those from `F_CUT` on are about one field."""

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
    """Clear the bitmaps and facts; all values are valid. Answers where the bitmaps begin."""
    bitmaps = cells + 8 * count * peek_i64(program + _LINE_BYTES * fields + 8 * SLOT)
    stride = (count + 63) // 64 * 8
    for field in range(fields):
        for fact in range(FACTS):
            poke_i64(facts + _FACT_BYTES * field + 8 * fact, 0)
        at = bitmaps + field * stride
        for k in range(0, stride, 8):
            poke_i64(at + k, -1)
        if count % 64:
            poke_i64(at + stride - 8, (np.int64(1) << (count % 64)) - 1)
        line = program + _LINE_BYTES * field
        if peek_i64(line + 8 * SINK) == FLAG:
            at = cells + 8 * count * peek_i64(line + 8 * SLOT)
            for k in range(0, stride, 8):
                poke_i64(at + k, 0)
    return bitmaps


@kernel()
def keep_null(line: Any, fact: Any, valid: Any, column: Any, count: Any, i: Any) -> Any:
    """Make value `i` of a field NULL; what stands below it is zero."""
    poke_i64(fact + 8 * NULLS, peek_i64(fact + 8 * NULLS) + 1)
    poke_u8(valid + (i >> 3), peek_u8(valid + (i >> 3)) & ~(np.int64(1) << (i & 7)))
    sink = peek_i64(line + 8 * SINK)
    if sink >= TEXT:
        poke_i64(column + 8 * i, -1)
        poke_i64(column + 8 * (count + i), -1)
    elif sink == KEEP_1:
        poke_u8(column + i, 0)
    elif sink == KEEP_2:
        poke_i16(column + 2 * i, 0)
    elif sink == KEEP_4 or (sink == TIME and peek_i64(line + 8 * PARAM) < 2):
        poke_i32(column + 4 * i, 0)
    elif sink in (NUMBER, BIG_NUMBER):
        poke_i64(column + 16 * i, 0)
        poke_i64(column + 16 * i + 8, 0)
    elif sink != FLAG:
        poke_i64(column + 8 * i, 0)


@kernel(inline=True)
def keep_number(line: Any, sink: Any, column: Any, i: Any, value: Any) -> Any:
    """Check a number and write it as value `i` of a cell column; answers a fault or 0."""
    if sink == KEEP_8:
        poke_i64(column + 8 * i, value)
    elif sink == KEEP_4:
        poke_i32(column + 4 * i, value)
    elif sink == KEEP_1:
        poke_u8(column + i, value)
    elif sink == KEEP_2:
        poke_i16(column + 2 * i, value)
    elif sink == FLAG:
        if value < 0 or value > 1:
            return np.int64(F_FLAG)
        poke_u8(column + (i >> 3), peek_u8(column + (i >> 3)) | value << (i & 7))
    elif sink == NUMBER:
        limit = peek_i64(line + 8 * LIMIT_LOW)
        if value >= limit or value <= -limit:
            return np.int64(F_DIGITS)
        poke_i64(column + 16 * i, value)
        poke_i64(column + 16 * i + 8, value >> 63)
    elif sink == MOMENT:
        poke_i64(column + 8 * i, value // 1000)
    else:
        return _keep_time(peek_i64(line + 8 * PARAM), value, column, i)
    return np.int64(0)


@kernel(inline=True)
def _keep_time(unit: Any, value: Any, column: Any, i: Any) -> Any:
    if value < 0 or value >= _DAY_MS:
        return np.int64(F_TIME)
    if unit == 0:
        poke_i32(column + 4 * i, value // 1000)
    elif unit == 1:
        poke_i32(column + 4 * i, value)
    else:
        poke_i64(column + 8 * i, value * (1000 if unit == 2 else _MILLI_NS))
    return np.int64(0)


@kernel(inline=True)
def _scaled(millis: Any, rest: Any, per_milli: Any) -> Any:
    """Whether `millis · per_milli + rest` is beyond 64 bits, and the sum (0 then).

    Compared before it is computed: the compiler takes it for granted that sums do not overflow.
    """
    most, most_rest = _I64_MAX // per_milli, _I64_MAX % per_milli
    least_rest = per_milli - most_rest - 1
    if millis > most or (millis == most and rest > most_rest):
        return True, np.int64(0)
    if millis < -most - 1 or (millis == -most - 1 and rest < least_rest):
        return True, np.int64(0)
    if millis < 0:
        return False, (millis + 1) * per_milli + (rest - per_milli)
    return False, millis * per_milli + rest


@kernel()
def keep_moment(line: Any, fact: Any, column: Any, i: Any, millis: Any, nano: Any) -> Any:
    """Write a timestamp finer than milliseconds as value `i`; answers a fault or 0."""
    if nano < 0 or nano >= _MILLI_NS:
        return np.int64(F_NANO)
    if peek_i64(line + 8 * PARAM) == 2:
        beyond, value = _scaled(millis, nano // 1000, 1000)
    else:
        beyond, value = _scaled(millis, nano, _MILLI_NS)
    if beyond and peek_i64(fact + 8 * BEYOND) == 0:
        poke_i64(fact + 8 * BEYOND, i + 1)
    poke_i64(column + 8 * i, value)
    return np.int64(0)


@kernel()
def _keep_big_number(line: Any, column: Any, i: Any, start: Any, size: Any) -> Any:
    if size < 1 or size > 16:
        return np.int64(F_DECIMAL_BYTES), size
    fill = np.uint64(0)
    if peek_u8(start) & 0x80:
        fill = ~fill
    high, low = fill, fill
    for k in range(size):
        high = (high << np.uint64(8)) | (low >> np.uint64(56))
        low = (low << np.uint64(8)) | np.uint64(peek_u8(start + k))
    size_high, size_low = high, low
    if fill != np.uint64(0):
        size_low = ~low + np.uint64(1)
        size_high = ~high + (np.uint64(1) if size_low == np.uint64(0) else np.uint64(0))
    limit_high = np.uint64(peek_i64(line + 8 * LIMIT_HIGH))
    limit_low = np.uint64(peek_i64(line + 8 * LIMIT_LOW))
    if size_high > limit_high or (size_high == limit_high and size_low >= limit_low):
        return np.int64(F_DIGITS), np.int64(0)
    poke_i64(column + 16 * i, np.int64(low))
    poke_i64(column + 16 * i + 8, np.int64(high))
    return np.int64(0), np.int64(0)


@kernel(inline=True)
def keep_place(
    line: Any, fact: Any, column: Any, count: Any, i: Any, data: Any, start: Any, end: Any
) -> Any:
    """Check what lies between two places and keep it as value `i`; answers fault and detail."""
    sink = peek_i64(line + 8 * SINK)
    if sink == BIG_NUMBER:
        return _keep_big_number(line, column, i, data + start, end - start)
    if sink == TEXT:
        bad = utf8_fault(data, start, end)
        if bad >= 0:
            return np.int64(F_TEXT), bad - start
    elif sink == PADDED and end - start > peek_i64(line + 8 * PARAM):
        return np.int64(F_PADDED), end - start
    poke_i64(column + 8 * i, start)
    poke_i64(column + 8 * (count + i), end)
    poke_i64(fact + 8 * PLACED, peek_i64(fact + 8 * PLACED) + end - start)
    return np.int64(0), np.int64(0)


@kernel(inline=True)
def read_number(data: Any, pos: Any, end: Any, source: Any) -> Any:
    """The number at `pos` and the position behind it, negative if there is none."""
    if source == VARINT_32:
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
    """Where the bytes at `pos` begin and end; the end is negative if they are not there."""
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
    """The end of a padded text without its zeros."""
    while last > first and peek_u8(data + last - 1) == 0:
        last -= 1
    return last


@kernel(inline=True)
def _read_field(
    data: Any, pos: Any, end: Any, area: Any, line: Any, fact: Any, column: Any, count: Any, i: Any
) -> Any:
    """Read a field that is not NULL; answers fault, detail, position behind it, length area."""
    source, sink = peek_i64(line + 8 * SOURCE), peek_i64(line + 8 * SINK)
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
        fault, detail = keep_place(line, fact, column, count, i, data, first, last)
        return fault, detail, pos, area
    value, after = read_number(data, pos, end, source)
    if after >= 0 and sink == FINE_MOMENT:
        fine = VARINT_32 if source == VARINT_64 else FIXED_4
        nano, after = read_number(data, after, end, fine)
        if after >= 0:
            return keep_moment(line, fact, column, i, value, nano), nano, after, area
    if after < 0:
        fault, detail = _varint_fault(after, end - pos)
        return fault, detail, pos, area
    return keep_number(line, sink, column, i, value), value, after, area


@kernel(inline=True)
def _walk(
    data: Any,
    start: Any,
    end: Any,
    own: Any,
    program: Any,
    fields: Any,
    count: Any,
    i: Any,
    cells: Any,
    bitmaps: Any,
    facts: Any,
) -> Any:
    """Walk over row `i`, which has `own` fields; answers fault, field, detail."""
    area = start + ((own + 7) >> 3)
    pos = area + 4 * peek_i64(program + _LINE_BYTES * own + 8 * LENGTHS)
    zero, stride = np.int64(0), (count + 63) // 64 * 8
    if pos > end:
        return np.int64(ALL_CUT), zero, end - start
    line, fact, nulls = program, facts, zero
    for field in range(fields):
        if field & 7 == 0:
            nulls = peek_u8(data + start + (field >> 3)) if field < own else zero
        column = cells + 8 * count * peek_i64(line + 8 * SLOT)
        if nulls & 1 or field >= own:
            if peek_i64(line + 8 * NOT_NULL):
                return np.int64(F_NULL), field, zero
            keep_null(line, fact, bitmaps + field * stride, column, count, i)
        else:
            fault, detail, pos, area = _read_field(
                data, pos, end, area, line, fact, column, count, i
            )
            if fault:
                return fault, field, detail
        nulls >>= 1
        line += _LINE_BYTES
        fact += _FACT_BYTES
    if pos != end:
        return np.int64(ALL_LEFT), zero, end - pos
    return zero, zero, zero


@kernel()
def _all_null(
    program: Any, fields: Any, count: Any, i: Any, cells: Any, bitmaps: Any, facts: Any
) -> Any:
    stride = (count + 63) // 64 * 8
    for field in range(fields):
        line = program + _LINE_BYTES * field
        column = cells + 8 * count * peek_i64(line + 8 * SLOT)
        fact = facts + _FACT_BYTES * field
        keep_null(line, fact, bitmaps + field * stride, column, count, i)


@kernel(_RESULT(BYTES, _I64, _I64, _I32, _LINES, _OUT, _FACTS))
def locate(
    data: Any, starts: Any, ends: Any, fields: Any, program: Any, cells: Any, facts: Any
) -> Any:
    """Check every row and fill `cells` and `facts`; answers fault, row, field, detail.

    `fields` has the number of fields of each row, or nothing if all have the schema's. A row that
    is absent (start −1) has NULLs only, also where the schema forbids them.
    """
    count, width, size, zero = len(starts), len(program) - 1, len(data), np.int64(0)
    of, lines = address_of(data), address_of(program)
    to, notes = address_of(cells), address_of(facts)
    bitmaps = begin_cells(lines, width, count, to, notes)
    for i in range(count):
        start, end = starts[i], ends[i]
        if start == -1:
            _all_null(lines, width, count, i, to, bitmaps, notes)
            continue
        if start < 0 or start > end or end > size:
            return np.int64(ALL_BOUNDS), i, zero, np.int64(size)
        own = np.int64(fields[i]) if len(fields) else np.int64(width)
        if own < 0 or own > width:
            return np.int64(ALL_COUNT), i, zero, own
        fault, field, detail = _walk(
            of, start, end, own, lines, width, count, i, to, bitmaps, notes
        )
        if fault:
            return fault, i, field, detail
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
    """As `locate`, to cells of `count` rows, where these become the rows `at`.

    They are all there and have all fields. The other rows are left to be written.
    """
    width, size, zero = len(program) - 1, len(data), np.int64(0)
    of, lines = address_of(data), address_of(program)
    to, notes = address_of(cells), address_of(facts)
    bitmaps = begin_cells(lines, width, count, to, notes)
    for k in range(min(len(starts), len(at))):
        start, end, i = starts[k], ends[k], at[k]
        if start < 0 or start > end or end > size or i < 0 or i >= count:
            return np.int64(ALL_BOUNDS), k, zero, np.int64(size)
        fault, field, detail = _walk(
            of, start, end, width, lines, width, count, i, to, bitmaps, notes
        )
        if fault:
            return fault, k, field, detail
    return zero, zero, zero, zero


@kernel(types.void(BYTES, BYTES, types.int64, types.int64, _OUT, types.int64), short=True)
def gather(data: Any, cells: Any, slot: Any, count: Any, out: Any, body: Any) -> Any:
    """Copy placed values behind their Arrow offsets: int32 offsets at 0, bytes from `body` on."""
    column, of, to = address_of(cells) + 8 * count * slot, address_of(data), address_of(out)
    pos, size_in, size_out = body, len(data), len(out)
    for i in range(count):
        poke_i32(to + 4 * i, pos - body)
        start, end = peek_i64(column + 8 * i), peek_i64(column + 8 * (count + i))
        size = end - start
        if size <= 16 and start >= 0 and start + 16 <= size_in and pos + 16 <= size_out:
            poke_i64(to + pos, peek_i64(of + start))
            poke_i64(to + pos + 8, peek_i64(of + start + 8))
        elif size > 0:
            copy_bytes(to + pos, of + start, size)
        pos += size
    poke_i32(to + 4 * count, pos - body)


@kernel(types.void(BYTES, BYTES, types.int64, types.int64, types.int64, _OUT))
def gather_padded(data: Any, cells: Any, slot: Any, count: Any, width: Any, out: Any) -> Any:
    """Copy placed values to equal widths, padded with zeros; `out` is zero before."""
    column, of, to = address_of(cells) + 8 * count * slot, address_of(data), address_of(out)
    for i in range(count):
        start, end = peek_i64(column + 8 * i), peek_i64(column + 8 * (count + i))
        if end > start:
            copy_bytes(to + width * i, of + start, end - start)
