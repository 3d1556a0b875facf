"""One call that checks one log batch: header, statistics, change types, the whole Arrow message.

`check_batch(buf, start, end, program, changelog)` takes the receive buffer and the schema's
program (`arrow/layout.py`) and returns twelve integers: fault (`fault.py`; 0 accepted, 1 accepted
but the compressed buffers' content is still to be checked, 2 accepted but the rows are), node, two
figures for the message, then CRC, end, magic, schema id, record count, last offset delta, writer id
and batch sequence. The CRC itself is computed by the caller with the `crc32c` package, which is
faster than anything possible here.

The rules stand in plain Python in `zufluss.record.arrow.message`, which is this kernel's twin; here
they are arranged so that a batch that is right is passed over once, with vector loops where it
counts (validity bits, offsets, ASCII). Parts return a fault and leave node and figures in `note`.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from zufluss.record.fault import Fault
from zufluss.record.kernels.cache import kernel
from zufluss.record.kernels.memory import (
    BYTES,
    load_i16,
    load_i32,
    load_i64,
    load_u8,
    load_u32,
    popcount,
    types,
)
from zufluss.record.kernels.message_read import (
    BODY,
    BUFFERS,
    CODEC,
    CURSOR,
    LENGTH,
    NODE,
    NODES,
    NOTES,
    SIZE,
    TOTAL,
    A,
    B,
    read_metadata,
    refuse,
)

MAX_UNCOMPRESSED_BYTES = 256 * 1024 * 1024
"""What all buffers of one compressed batch may take uncompressed."""

MAX_VALUES = 2**31 - 1
"""Values of one node: offsets are 32 bits wide."""

HIGH_BITS = -0x7F7F7F7F7F7F7F80
"""The top bit of each of eight bytes."""

FIXED, BOOL, STRING, BINARY, LIST, STRUCT, TIME, DECIMAL = range(8)
NULLABLE, NOT_NULL, MASKED = range(3)


# --- values ------------------------------------------------------------------------------------


@kernel()
def _valid(buf: Any, bits: Any, index: Any) -> Any:
    """Whether value `index` is not null; bits −1 means that none is."""
    return bits < 0 or (load_u8(buf, bits + (index >> 3)) >> (index & 7)) & 1 != 0


@kernel()
def _unmasked(buf: Any, bits: Any, parent: Any, n: Any, note: Any) -> Any:
    """Whether a value is null although its parent is not; not known while compressed."""
    found = False
    if note[CODEC] >= 0:
        return found
    for i in range(n):
        found |= not _valid(buf, bits, i) and _valid(buf, parent, i)
    return found


@kernel()
def _ones(buf: Any, bits: Any, n: Any) -> Any:
    """Count the set ones of the first n bits."""
    total = np.int64(0)
    words = n >> 6
    for i in range(words):
        total += popcount(load_i64(buf, bits + 8 * i))
    for i in range(words << 6, n & ~7, 8):
        total += popcount(load_u8(buf, bits + (i >> 3)))
    if n & 7:
        total += popcount(load_u8(buf, bits + (n >> 3)) & ((1 << (n & 7)) - 1))
    return total


@kernel()
def _ascii(buf: Any, lo: Any, hi: Any) -> Any:
    """Whether no byte of [lo, hi) has its top bit set."""
    seen = np.int64(0)
    words = (hi - lo) >> 3
    for i in range(words):
        seen |= load_i64(buf, lo + 8 * i)
    rest = np.int64(0)
    for i in range(lo + 8 * words, hi):
        rest |= load_u8(buf, i)
    return seen & HIGH_BITS == 0 and rest < 128


@kernel()
def _utf8_end(buf: Any, lo: Any, hi: Any) -> Any:
    """Position of the first byte in [lo, hi) that is not UTF-8, or hi."""
    i = lo
    while i < hi:
        while i + 8 <= hi and load_i64(buf, i) & HIGH_BITS == 0:
            i += 8
        if i >= hi:
            break
        first = load_u8(buf, i)
        if first < 0x80:
            i += 1
            continue
        low, high = np.int64(0x80), np.int64(0xBF)
        if 0xC2 <= first <= 0xDF:
            more = 1
        elif first & 0xF0 == 0xE0:
            more = 2
            if first == 0xE0:
                low = np.int64(0xA0)
            elif first == 0xED:
                high = np.int64(0x9F)
        elif 0xF0 <= first <= 0xF4:
            more = 3
            if first == 0xF0:
                low = np.int64(0x90)
            elif first == 0xF4:
                high = np.int64(0x8F)
        else:
            return i
        if i + more >= hi or not low <= load_u8(buf, i + 1) <= high:
            return i
        for k in range(2, more + 1):
            if load_u8(buf, i + k) & 0xC0 != 0x80:
                return i
        i += more + 1
    return hi


@kernel()
def _strings(buf: Any, offsets: Any, data: Any, n: Any, bits: Any, node: Any, note: Any) -> Any:
    """Check that every value is UTF-8: at best all bytes at once, else value by value."""
    lo = data + load_i32(buf, offsets)
    hi = data + load_i32(buf, offsets + 4 * n)
    if _ascii(buf, lo, hi):
        return np.int64(0)
    if _utf8_end(buf, lo, hi) == hi:
        cut = False
        for i in range(1, n):
            position = data + load_i32(buf, offsets + 4 * i)
            cut |= position < hi and load_u8(buf, position) & 0xC0 == 0x80
        if not cut:
            return np.int64(0)
    for i in range(n):
        if _valid(buf, bits, i):
            end = data + load_i32(buf, offsets + 4 * i + 4)
            bad = _utf8_end(buf, data + load_i32(buf, offsets + 4 * i), end)
            if bad < end:
                return refuse(note, Fault.UTF8, node, i, bad - data)
    return np.int64(0)


@kernel()
def _times(buf: Any, at: Any, width: Any, n: Any, bits: Any, limit: Any) -> Any:
    """Index of the first time of day outside [0, limit), or n."""
    for i in range(n):
        value = load_i32(buf, at + 4 * i) if width == 4 else load_i64(buf, at + 8 * i)
        if (value < 0 or value >= limit) and _valid(buf, bits, i):
            return i
    return n


@kernel()
def _decimals(buf: Any, at: Any, n: Any, bits: Any, limit_low: Any, limit_high: Any) -> Any:
    """Index of the first decimal whose magnitude is not below the limit, or n."""
    for i in range(n):
        low = load_i64(buf, at + 16 * i)
        high = load_i64(buf, at + 16 * i + 8)
        if high < 0:
            low = -low
            high = ~high if low != 0 else -high
        # unsigned comparison of the low words by flipping their sign bits
        below = (low ^ np.int64(-(2**63))) < (limit_low ^ np.int64(-(2**63)))
        fits = high >= 0 and (high < limit_high or (high == limit_high and below))
        if not fits and _valid(buf, bits, i):
            return i
    return n


@kernel()
def _offsets(buf: Any, at: Any, n: Any, limit: Any, node: Any, note: Any) -> Any:
    """Check n + 1 offsets: not negative, not falling, the last at most `limit`."""
    first, last = load_i32(buf, at), load_i32(buf, at + 4 * n)
    falling = False
    for i in range(n):
        falling |= load_i32(buf, at + 4 * i + 4) < load_i32(buf, at + 4 * i)
    if falling:
        for i in range(n):
            if load_i32(buf, at + 4 * i + 4) < load_i32(buf, at + 4 * i):
                value = load_i32(buf, at + 4 * i + 4)
                return refuse(note, Fault.OFFSETS_ORDER, node, i + 1, value)
    if first < 0 or last > limit:
        return refuse(note, Fault.OFFSETS_RANGE, node, first if first < 0 else last, limit)
    return np.int64(0)


# --- nodes -------------------------------------------------------------------------------------


@kernel()
def _buffer(buf: Any, index: Any, end: Any, node: Any, most: Any, note: Any) -> Any:
    """Place buffer `index`: returns its position, its (uncompressed) size in note[SIZE].

    −fault if it does not lie in order within the body; `most` bounds what it may claim
    uncompressed.
    """
    entry = note[BUFFERS] + 4 + 16 * index
    offset, size = load_i64(buf, entry), load_i64(buf, entry + 8)
    body = note[BODY]
    room = end - body
    if offset < 0 or offset & 7 or size < 0 or offset > room or size > room - offset:
        return -refuse(note, Fault.BUFFER_PLACE, node, size, offset)
    if size > 0:
        if offset < note[CURSOR]:
            return -refuse(note, Fault.BUFFER_ORDER, node, offset, note[CURSOR])
        note[CURSOR] = offset + size
    if note[CODEC] >= 0 and size > 0:
        if size < 8:
            return -refuse(note, Fault.COMPRESSED_SIZE, node, size, 8)
        claimed = load_i64(buf, body + offset)
        size = size - 8 if claimed == -1 else claimed
        if size < 0 or size > most:
            return -refuse(note, Fault.UNCOMPRESSED_SIZE, node, size, most)
        note[TOTAL] += size
        if note[TOTAL] > MAX_UNCOMPRESSED_BYTES:
            return -refuse(
                note, Fault.UNCOMPRESSED_TOTAL, node, note[TOTAL], MAX_UNCOMPRESSED_BYTES
            )
    note[SIZE] = size
    return body + offset


@kernel()
def _round64(size: Any) -> Any:
    return (size + 63) & ~63


@kernel()
def _validity(buf: Any, index: Any, end: Any, n: Any, nulls: Any, node: Any, note: Any) -> Any:
    """Check a validity buffer; returns its position, or −fault."""
    needed = (n + 7) >> 3
    bits = _buffer(buf, index, end, node, _round64(needed), note)
    if bits < 0 or n == 0:
        return bits
    size = note[SIZE]
    if size < needed and (size > 0 or nulls > 0):
        return -refuse(note, Fault.VALIDITY_SIZE, node, size, needed)
    if size > 0 and note[CODEC] < 0:
        found = n - _ones(buf, bits, n)
        if found != nulls:
            return -refuse(note, Fault.VALIDITY_BITS, node, found, nulls)
    return bits


@kernel()
def _values(
    buf: Any, index: Any, end: Any, n: Any, bits: Any, program: Any, at: Any, note: Any
) -> Any:
    """Check the values of a FIXED, BOOL, TIME or DECIMAL node."""
    node = (at - 8) // 8
    kind, width = program[at], program[at + 1]
    needed = (n + 7) >> 3 if kind == BOOL else n * width
    position = _buffer(buf, index, end, node, _round64(needed), note)
    if position < 0:
        return -position
    if note[SIZE] < needed:
        return refuse(note, Fault.VALUES_SIZE, node, note[SIZE], needed)
    if note[CODEC] >= 0 or (kind != TIME and kind != DECIMAL):
        return np.int64(0)
    if kind == TIME:
        bad = _times(buf, position, width, n, bits, program[at + 5])
    else:
        bad = _decimals(buf, position, n, bits, program[at + 5], program[at + 6])
    if bad < n:
        return refuse(note, Fault.VALUE_RANGE, node, bad, 0)
    return np.int64(0)


@kernel()
def _offset_buffer(buf: Any, index: Any, end: Any, n: Any, node: Any, note: Any) -> Any:
    """Place and measure an offsets buffer; returns its position, or −fault."""
    needed = 4 * (n + 1)
    position = _buffer(buf, index, end, node, _round64(needed), note)
    if position >= 0 and note[SIZE] < needed and (n > 0 or note[SIZE] > 0):
        return -refuse(note, Fault.OFFSETS_SIZE, node, note[SIZE], needed)
    return position


@kernel()
def _text(
    buf: Any, index: Any, end: Any, n: Any, bits: Any, kind: Any, node: Any, note: Any
) -> Any:
    """Check offsets and data of a STRING or BINARY node."""
    offsets = _offset_buffer(buf, index, end, n, node, note)
    if offsets < 0:
        return -offsets
    has_offsets = note[SIZE] > 0
    data = _buffer(buf, index + 1, end, node, MAX_VALUES, note)
    if data < 0:
        return -data
    if note[CODEC] >= 0 or not has_offsets:
        return np.int64(0)
    fault = _offsets(buf, offsets, n, note[SIZE], node, note)
    if fault != 0 or kind == BINARY:
        return fault
    return _strings(buf, offsets, data, n, bits, node, note)


@kernel()
def _list(buf: Any, index: Any, end: Any, n: Any, node: Any, note: Any, needs: Any) -> Any:
    """Check the offsets of a LIST node; what its child must have goes to needs[node]."""
    offsets = _offset_buffer(buf, index, end, n, node, note)
    if offsets < 0:
        return -offsets
    needs[node] = 0
    if note[CODEC] >= 0 or note[SIZE] == 0:
        return np.int64(0)
    needs[node] = load_i32(buf, offsets + 4 * n)
    return _offsets(buf, offsets, n, MAX_VALUES, node, note)


@kernel()
def _length(program: Any, at: Any, n: Any, nulls: Any, count: Any, note: Any, needs: Any) -> Any:
    """Check length and null count of a node against the record count or its parent."""
    node, parent = (at - 8) // 8, program[at + 2]
    if n < 0 or n > MAX_VALUES or (parent < 0 and n != count):
        return refuse(note, Fault.NODE_LENGTH, node, n, count)
    if parent >= 0:
        needed = needs[parent]
        exact = program[8 + 8 * parent] == STRUCT
        if n < needed or (exact and n != needed):
            return refuse(note, Fault.CHILD_LENGTH, node, n, needed)
    if nulls < 0 or nulls > n:
        return refuse(note, Fault.NULL_COUNT, node, nulls, n)
    if program[at + 4] == NOT_NULL and nulls > 0:
        return refuse(note, Fault.NULL_FORBIDDEN, node, nulls, 0)
    return np.int64(0)


@kernel()
def _body(buf: Any, start: Any, end: Any, count: Any, program: Any, note: Any) -> Any:
    """Check the Arrow message in [start, end)."""
    fault = read_metadata(buf, start, end, note)
    if fault != 0:
        return fault
    if note[LENGTH] != count:
        return refuse(note, Fault.ARROW_LENGTH, -1, note[LENGTH], count)
    nodes, node_count = note[NODES], load_u32(buf, note[NODES])
    if node_count != program[1]:
        return refuse(note, Fault.NODE_COUNT, -1, node_count, program[1])
    buffer_count = load_u32(buf, note[BUFFERS])
    if buffer_count != program[2]:
        return refuse(note, Fault.BUFFER_COUNT, -1, buffer_count, program[2])
    note[CURSOR] = note[TOTAL] = 0
    needs = note[NOTES : NOTES + node_count]
    places = note[NOTES + node_count :]
    index = 0
    for node in range(node_count):
        at = 8 + 8 * node
        kind = program[at]
        n, nulls = load_i64(buf, nodes + 4 + 16 * node), load_i64(buf, nodes + 12 + 16 * node)
        fault = _length(program, at, n, nulls, count, note, needs)
        if fault != 0:
            return fault
        bits = _validity(buf, index, end, n, nulls, node, note)
        if bits < 0:
            return -bits
        if nulls == 0:
            bits = np.int64(-1)
        elif program[at + 4] == MASKED and _unmasked(buf, bits, places[program[at + 2]], n, note):
            return refuse(note, Fault.NULL_FORBIDDEN, node, nulls, 0)
        places[node] = bits
        if kind in (STRING, BINARY):
            fault = _text(buf, index + 1, end, n, bits, kind, node, note)
            index += 3
        elif kind == LIST:
            fault = _list(buf, index + 1, end, n, node, note, needs)
            index += 2
        elif kind == STRUCT:
            needs[node] = n
            index += 1
        else:
            fault = _values(buf, index + 1, end, n, bits, program, at, note)
            index += 2
        if fault != 0:
            return fault
    return np.int64(Fault.COMPRESSED if note[CODEC] >= 0 else Fault.NONE)


# --- statistics and header ---------------------------------------------------------------------


@kernel()
def _statistics_row(
    buf: Any, row: Any, size: Any, indexes: Any, n: Any, slots: Any, note: Any
) -> Any:
    """Check that every value of a minimum or maximum row lies inside it."""
    if size == 0:
        return np.int64(0)
    nulls = ((n + 71) // 64) * 8
    if size < nulls + 8 * n:
        return refuse(note, Fault.STATISTICS_ROW, -1, -1, size)
    for i in range(n):
        column = load_i16(buf, indexes + 2 * i)
        kind = slots[column]
        if kind == 1 or (load_u8(buf, row + ((i + 8) >> 3)) >> (i & 7)) & 1:
            continue
        slot = load_i64(buf, row + nulls + 8 * i)
        offset = slot >> 32
        length = slot & 0xFFFFFFFF
        if kind == 3:
            length = np.int64(8)
        elif slot < 0:
            offset, length = np.int64(0), (slot >> 56) & 0x7F
            if length <= 7:
                continue
            length = size + 1
        if offset < 0 or offset + length > size or (kind == 4 and length > 16):
            return refuse(note, Fault.STATISTICS_ROW, -1, column, size)
    return np.int64(0)


@kernel()
def _statistics(buf: Any, start: Any, size: Any, count: Any, program: Any, note: Any) -> Any:
    """Check the statistics block of `size` bytes."""
    if size < 11:
        return refuse(note, Fault.STATISTICS_LENGTH, -1, size, 11)
    if load_u8(buf, start) != 1:
        return refuse(note, Fault.STATISTICS_VERSION, -1, load_u8(buf, start), 1)
    columns, n = program[3], load_i16(buf, start + 1)
    if n < 0 or 11 + 6 * n > size:
        return refuse(note, Fault.STATISTICS_LENGTH, -1, 11 + 6 * n, size)
    slots = program[8 + 8 * program[1] :]
    for i in range(n):
        column = load_i16(buf, start + 3 + 2 * i)
        if column < 0 or column >= columns or slots[column] == 0:
            return refuse(note, Fault.STATISTICS_COLUMN, -1, column, columns)
        nulls = load_i32(buf, start + 3 + 2 * n + 4 * i)
        if nulls < 0 or nulls > count:
            return refuse(note, Fault.STATISTICS_NULL_COUNT, -1, nulls, count)
    low = start + 3 + 6 * n
    low_size = load_i32(buf, low)
    if low_size < 0 or low_size > size - 11 - 6 * n:
        return refuse(note, Fault.STATISTICS_LENGTH, -1, low_size, size)
    high = low + 4 + low_size
    high_size = load_i32(buf, high)
    if high_size != size - 11 - 6 * n - low_size:
        return refuse(note, Fault.STATISTICS_LENGTH, -1, high_size, size)
    fault = _statistics_row(buf, low + 4, low_size, start + 3, n, slots, note)
    if fault == 0:
        fault = _statistics_row(buf, high + 4, high_size, start + 3, n, slots, note)
    return fault


@kernel()
def _header(
    buf: Any,
    p: Any,
    size: Any,
    header_size: Any,
    count: Any,
    statistics: Any,
    changelog: Any,
    note: Any,
) -> Any:
    """Check the header's fields against each other; p is the position of the CRC."""
    attributes, delta = load_u8(buf, p + 6), load_i32(buf, p + 7)
    writer, sequence = load_i64(buf, p + 11), load_i32(buf, p + 19)
    if attributes > 1:
        return refuse(note, Fault.ATTRIBUTES, -1, attributes, 1)
    if attributes == 0 and not changelog:
        return refuse(note, Fault.CHANGE_TYPES_UNEXPECTED, -1, 0, 0)
    if count < 0:
        return refuse(note, Fault.RECORD_COUNT, -1, count, 0)
    if count == 0 and not changelog:
        return refuse(note, Fault.EMPTY, -1, 0, 0)
    if delta != (count - 1 if count > 0 else 0):
        return refuse(note, Fault.LAST_OFFSET_DELTA, -1, delta, count)
    if writer < -1 or sequence < -1 or (writer >= 0 and sequence < 0):
        return refuse(note, Fault.WRITER, -1, writer, sequence)
    if count == 0 and size != header_size:
        return refuse(note, Fault.EMPTY_WITH_BODY, -1, size - header_size, 0)
    change_types = count if attributes == 0 else 0
    room = size - header_size - change_types
    if statistics < 0 or statistics > room:
        return refuse(note, Fault.STATISTICS_LENGTH, -1, statistics, max(room, 0))
    return np.int64(0)


@kernel()
def _batch(
    buf: Any,
    start: Any,
    size: Any,
    header_size: Any,
    p: Any,
    program: Any,
    changelog: Any,
    note: Any,
) -> Any:
    """Check the batch in [start, start + size)."""
    count = load_i32(buf, p + 23)
    statistics = load_i32(buf, p + 27) if header_size > 48 else np.int64(0)
    fault = _header(buf, p, size, header_size, count, statistics, changelog, note)
    if fault != 0 or count == 0:
        return fault
    body = start + header_size
    if statistics > 0:
        fault = _statistics(buf, body, statistics, count, program, note)
        if fault != 0:
            return fault
        body += statistics
    if program[4] != 0:
        note[A] = body
        return np.int64(Fault.ROWS)
    if load_u8(buf, p + 6) == 0:
        for i in range(count):
            if load_u8(buf, body + i) > 4:
                return refuse(note, Fault.CHANGE_TYPE, -1, load_u8(buf, body + i), i)
        body += count
    note[A] = body
    fault = _body(buf, body, start + size, count, program, note)
    if fault == Fault.COMPRESSED:
        note[A] = body
    return fault


_RESULT = types.UniTuple(types.int64, 12)
_PROGRAM = types.Array(types.int64, 1, "C", readonly=True)


@kernel(_RESULT(BYTES, types.int64, types.int64, _PROGRAM, types.boolean), allocates=True)
def check_batch(buf: Any, start: Any, end: Any, program: Any, changelog: Any) -> Any:
    """Check the batch that begins at `start`; see the module for what comes back."""
    zero = np.int64(0)
    room = end - start
    if start < 0 or end > buf.size or room < 48:
        cut = np.int64(Fault.HEADER_CUT)
        return cut, zero, room, np.int64(48), zero, end, zero, zero, zero, zero, zero, zero
    length, magic = load_i32(buf, start + 8), load_u8(buf, start + 12)
    header_size = 48 + 4 * magic
    size = length + 12
    fault, a, b = zero, zero, zero
    if magic > 2:
        fault, a, b = np.int64(Fault.MAGIC), magic, np.int64(2)
    elif size < header_size:
        fault, a, b = np.int64(Fault.LENGTH_TOO_SMALL), size, header_size
    elif size > room:
        fault, a, b = np.int64(Fault.LENGTH_TOO_LARGE), size, room
    if fault != 0:
        return fault, zero, a, b, zero, end, magic, zero, zero, zero, zero, zero
    p = start + (25 if magic == 2 else 21)
    schema_id = load_i16(buf, p + 4)
    node = np.int64(-1)
    if schema_id != program[0]:
        fault = np.int64(Fault.OTHER_SCHEMA)
    else:
        note = np.empty(NOTES + 2 * program[1], dtype=np.int64)
        note[:3] = 0
        fault = _batch(buf, start, size, header_size, p, program, changelog, note)
        node, a, b = note[NODE], note[A], note[B]
    return (
        fault,
        node,
        a,
        b,
        load_u32(buf, p),
        start + size,
        magic,
        schema_id,
        load_i32(buf, p + 23),
        load_i32(buf, p + 7),
        load_i64(buf, p + 11),
        load_i32(buf, p + 19),
    )
