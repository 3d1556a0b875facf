"""One call that checks one log batch: header, statistics, change types, the whole Arrow message.

`check_batch(buf, start, end, program, changelog)` takes the receive buffer and the schema's program
(`arrow/layout.py`) and returns twelve integers: fault (`fault.py`; 0 accepted, 1 accepted but the
content of compressed buffers is still to be checked, 2 accepted but the rows are still to be
checked), node, two figures for the message, then CRC, end, magic, schema id, record count, last
offset delta, writer id and batch sequence. The caller computes the CRC with the `crc32c` package,
which is faster than a kernel.

The rules stand in plain Python in `tests/record/batch/plain_check.py`, which is this kernel's twin.
Here they are arranged so that a right batch is passed over once. Parts return a fault and leave
node and figures in `note` (`message_read.py`); those that return a position return −fault instead.
`arrow_values.py` and `batch_statistics.py` have the parts that look at values and at statistics.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from zufluss.record.fault import BatchFault
from zufluss.record.kernels import types
from zufluss.record.kernels.arrow_values import (
    check_offsets,
    check_strings,
    count_ones,
    find_wrong_decimal,
    find_wrong_time,
    has_unmasked_null,
)
from zufluss.record.kernels.batch_header import (
    ATTRIBUTES,
    CHANGE_TYPE_MAX,
    HEADER_BYTES_MIN,
    LAST_OFFSET_DELTA,
    LENGTH_AT,
    LENGTH_OVERHEAD,
    MAGIC_AT,
    MAGIC_MAX,
    RECORD_COUNT,
    SCHEMA_ID,
    SEQUENCE,
    STATISTICS_LENGTH,
    WRITER_ID,
    crc_at,
)
from zufluss.record.kernels.batch_statistics import check_statistics
from zufluss.record.kernels.cache import kernel
from zufluss.record.kernels.memory import (
    BYTES,
    load_i16,
    load_i32,
    load_i64,
    load_u8,
    load_u32,
)
from zufluss.record.kernels.message_read import (
    BODY,
    BUFFERS,
    CODEC,
    CURSOR,
    FIGURE_1,
    FIGURE_2,
    LENGTH,
    NODE,
    NODES,
    NOTES,
    SIZE,
    TOTAL,
    read_metadata,
    refuse,
)

MAX_UNCOMPRESSED_BYTES = 256 * 1024 * 1024
"""Most bytes of all buffers of one compressed batch together, uncompressed."""

MAX_VALUES = 2**31 - 1
"""Most values of one node: offsets are 32 bits wide."""

FIXED, BOOL, STRING, BINARY, LIST, STRUCT, TIME, DECIMAL = range(8)
"""Kinds of nodes, as in `arrow/layout.py`."""
NULLABLE, NOT_NULL, MASKED = range(3)
"""Rules for NULLs, as in `arrow/layout.py`."""

PROGRAM_SCHEMA, PROGRAM_NODES, PROGRAM_BUFFERS, PROGRAM_COLUMNS, PROGRAM_ROWS = range(5)
PROGRAM_HEAD = PROGRAM_STRIDE = 8
"""Numbers before the first node, and numbers of a node."""
KIND, WIDTH, PARENT, _, NULL_RULE, LIMIT_LOW, LIMIT_HIGH = range(7)
"""Numbers of a node."""


@kernel()
def _place_buffer(buf: Any, index: Any, end: Any, node: Any, most: Any, note: Any) -> Any:
    """Return the position of a buffer, or −fault; its uncompressed size goes to note[SIZE].

    Buffers lie within the body, at multiples of 8, in order and without overlap. `most` bounds the
    size that a compressed buffer may claim.
    """
    entry = note[BUFFERS] + 4 + 16 * index
    offset, size = load_i64(buf, entry), load_i64(buf, entry + 8)
    body = note[BODY]
    room = end - body
    if offset < 0 or offset & 7 or size < 0 or offset > room or size > room - offset:
        return -refuse(note, BatchFault.BUFFER_PLACE, node, size, offset)
    if size > 0:
        if offset < note[CURSOR]:
            return -refuse(note, BatchFault.BUFFER_ORDER, node, offset, note[CURSOR])
        note[CURSOR] = offset + size
    # A compressed buffer begins with its uncompressed size, −1 if it is stored as it is.
    if note[CODEC] >= 0 and size > 0:
        if size < 8:
            return -refuse(note, BatchFault.COMPRESSED_SIZE, node, size, 8)
        claimed = load_i64(buf, body + offset)
        size = size - 8 if claimed == -1 else claimed
        if size < 0 or size > most:
            return -refuse(note, BatchFault.UNCOMPRESSED_SIZE, node, size, most)
        note[TOTAL] += size
        if note[TOTAL] > MAX_UNCOMPRESSED_BYTES:
            limit = MAX_UNCOMPRESSED_BYTES
            return -refuse(note, BatchFault.UNCOMPRESSED_TOTAL, node, note[TOTAL], limit)
    note[SIZE] = size
    return body + offset


@kernel()
def _round64(size: Any) -> Any:
    return (size + 63) & ~63


@kernel()
def _check_validity(
    buf: Any, index: Any, end: Any, count: Any, nulls: Any, node: Any, note: Any
) -> Any:
    """Check a validity buffer; returns its position, or −fault."""
    needed = (count + 7) >> 3
    validity = _place_buffer(buf, index, end, node, _round64(needed), note)
    if validity < 0 or count == 0:
        return validity
    size = note[SIZE]
    if size < needed and (size > 0 or nulls > 0):
        return -refuse(note, BatchFault.VALIDITY_SIZE, node, size, needed)
    if size > 0 and note[CODEC] < 0:
        zero_bits = count - count_ones(buf, validity, count)
        if zero_bits != nulls:
            return -refuse(note, BatchFault.VALIDITY_BITS, node, zero_bits, nulls)
    return validity


@kernel()
def _check_values(
    buf: Any, index: Any, end: Any, count: Any, validity: Any, program: Any, entry: Any, note: Any
) -> Any:
    """Check the values of a FIXED, BOOL, TIME or DECIMAL node at `entry` of the program."""
    node = (entry - PROGRAM_HEAD) // PROGRAM_STRIDE
    kind, width = program[entry + KIND], program[entry + WIDTH]
    needed = (count + 7) >> 3 if kind == BOOL else count * width
    values = _place_buffer(buf, index, end, node, _round64(needed), note)
    if values < 0:
        return -values
    if note[SIZE] < needed:
        return refuse(note, BatchFault.VALUES_SIZE, node, note[SIZE], needed)
    if note[CODEC] >= 0 or (kind != TIME and kind != DECIMAL):
        return np.int64(0)
    low, high = program[entry + LIMIT_LOW], program[entry + LIMIT_HIGH]
    if kind == TIME:
        wrong = find_wrong_time(buf, values, width, count, validity, low)
    else:
        wrong = find_wrong_decimal(buf, values, count, validity, low, high)
    if wrong < count:
        return refuse(note, BatchFault.VALUE_RANGE, node, wrong, 0)
    return np.int64(0)


@kernel()
def _place_offsets(buf: Any, index: Any, end: Any, count: Any, node: Any, note: Any) -> Any:
    """Return the position of an offsets buffer that is large enough, or −fault."""
    needed = 4 * (count + 1)
    offsets = _place_buffer(buf, index, end, node, _round64(needed), note)
    if offsets >= 0 and note[SIZE] < needed and (count > 0 or note[SIZE] > 0):
        return -refuse(note, BatchFault.OFFSETS_SIZE, node, note[SIZE], needed)
    return offsets


@kernel()
def _check_text(
    buf: Any, index: Any, end: Any, count: Any, validity: Any, kind: Any, node: Any, note: Any
) -> Any:
    """Check offsets and data of a STRING or BINARY node."""
    offsets = _place_offsets(buf, index, end, count, node, note)
    if offsets < 0:
        return -offsets
    has_offsets = note[SIZE] > 0
    data = _place_buffer(buf, index + 1, end, node, MAX_VALUES, note)
    if data < 0:
        return -data
    if note[CODEC] >= 0 or not has_offsets:
        return np.int64(0)
    fault = check_offsets(buf, offsets, count, note[SIZE], node, note)
    if fault != 0 or kind == BINARY:
        return fault
    return check_strings(buf, offsets, data, count, validity, node, note)


@kernel()
def _check_list(
    buf: Any, index: Any, end: Any, count: Any, node: Any, note: Any, needs: Any
) -> Any:
    """Check the offsets of a LIST node; needs[node] becomes the length that its child must have."""
    offsets = _place_offsets(buf, index, end, count, node, note)
    if offsets < 0:
        return -offsets
    needs[node] = 0
    if note[CODEC] >= 0 or note[SIZE] == 0:
        return np.int64(0)
    needs[node] = load_i32(buf, offsets + 4 * count)
    return check_offsets(buf, offsets, count, MAX_VALUES, node, note)


@kernel()
def _check_length(
    program: Any, entry: Any, count: Any, nulls: Any, record_count: Any, note: Any, needs: Any
) -> Any:
    """Check length and null count of a node against the record count or its parent."""
    node, parent = (entry - PROGRAM_HEAD) // PROGRAM_STRIDE, program[entry + PARENT]
    if count < 0 or count > MAX_VALUES or (parent < 0 and count != record_count):
        return refuse(note, BatchFault.NODE_LENGTH, node, count, record_count)
    if parent >= 0:
        needed = needs[parent]
        exact = program[PROGRAM_HEAD + PROGRAM_STRIDE * parent + KIND] == STRUCT
        if count < needed or (exact and count != needed):
            return refuse(note, BatchFault.CHILD_LENGTH, node, count, needed)
    if nulls < 0 or nulls > count:
        return refuse(note, BatchFault.NULL_COUNT, node, nulls, count)
    if program[entry + NULL_RULE] == NOT_NULL and nulls > 0:
        return refuse(note, BatchFault.NULL_FORBIDDEN, node, nulls, 0)
    return np.int64(0)


@kernel()
def _check_counts(buf: Any, record_count: Any, program: Any, note: Any) -> Any:
    """Compare the metadata of a message with record count and schema."""
    if note[LENGTH] != record_count:
        return refuse(note, BatchFault.ARROW_LENGTH, -1, note[LENGTH], record_count)
    nodes = load_u32(buf, note[NODES])
    if nodes != program[PROGRAM_NODES]:
        return refuse(note, BatchFault.NODE_COUNT, -1, nodes, program[PROGRAM_NODES])
    buffers = load_u32(buf, note[BUFFERS])
    if buffers != program[PROGRAM_BUFFERS]:
        return refuse(note, BatchFault.BUFFER_COUNT, -1, buffers, program[PROGRAM_BUFFERS])
    return np.int64(0)


@kernel()
def _check_message(
    buf: Any, start: Any, end: Any, record_count: Any, program: Any, note: Any
) -> Any:
    """Check the Arrow message in [start, end)."""
    fault = read_metadata(buf, start, end, note)
    if fault == 0:
        fault = _check_counts(buf, record_count, program, note)
    if fault != 0:
        return fault
    # Nodes come depth first, so what a child must satisfy is known from its parent: `needs` has the
    # length of its values, `places` the position of its validity bits (−1 = no NULL).
    node_count = program[PROGRAM_NODES]
    note[CURSOR] = note[TOTAL] = 0
    needs = note[NOTES : NOTES + node_count]
    places = note[NOTES + node_count :]
    index = 0
    for node in range(node_count):
        entry, place = PROGRAM_HEAD + PROGRAM_STRIDE * node, note[NODES] + 4 + 16 * node
        kind = program[entry + KIND]
        count, nulls = load_i64(buf, place), load_i64(buf, place + 8)
        fault = _check_length(program, entry, count, nulls, record_count, note, needs)
        if fault != 0:
            return fault
        validity = _check_validity(buf, index, end, count, nulls, node, note)
        if validity < 0:
            return -validity
        if nulls == 0:
            validity = np.int64(-1)
        elif (
            program[entry + NULL_RULE] == MASKED
            and note[CODEC] < 0
            and has_unmasked_null(buf, validity, places[program[entry + PARENT]], count)
        ):
            return refuse(note, BatchFault.NULL_FORBIDDEN, node, nulls, 0)
        places[node] = validity
        # The buffers behind the validity, by kind.
        if kind in (STRING, BINARY):
            fault = _check_text(buf, index + 1, end, count, validity, kind, node, note)
            index += 3
        elif kind == LIST:
            fault = _check_list(buf, index + 1, end, count, node, note, needs)
            index += 2
        elif kind == STRUCT:
            needs[node] = count
            index += 1
        else:
            fault = _check_values(buf, index + 1, end, count, validity, program, entry, note)
            index += 2
        if fault != 0:
            return fault
    return np.int64(BatchFault.COMPRESSED if note[CODEC] >= 0 else BatchFault.NONE)


@kernel()
def _check_header(
    buf: Any,
    crc: Any,
    size: Any,
    header_size: Any,
    count: Any,
    statistics: Any,
    changelog: Any,
    note: Any,
) -> Any:
    """Check the header's fields against each other; `crc` is the position of the CRC."""
    attributes, delta = load_u8(buf, crc + ATTRIBUTES), load_i32(buf, crc + LAST_OFFSET_DELTA)
    writer, sequence = load_i64(buf, crc + WRITER_ID), load_i32(buf, crc + SEQUENCE)
    if attributes > 1:
        return refuse(note, BatchFault.ATTRIBUTES, -1, attributes, 1)
    if attributes == 0 and not changelog:
        return refuse(note, BatchFault.CHANGE_TYPES_UNEXPECTED, -1, 0, 0)
    if count < 0:
        return refuse(note, BatchFault.RECORD_COUNT, -1, count, 0)
    if count == 0 and not changelog:
        return refuse(note, BatchFault.EMPTY, -1, 0, 0)
    if delta != (count - 1 if count > 0 else 0):
        return refuse(note, BatchFault.LAST_OFFSET_DELTA, -1, delta, count)
    if writer < -1 or sequence < -1 or (writer >= 0 and sequence < 0):
        return refuse(note, BatchFault.WRITER, -1, writer, sequence)
    if count == 0 and size != header_size:
        return refuse(note, BatchFault.EMPTY_WITH_BODY, -1, size - header_size, 0)
    change_types = count if attributes == 0 else 0
    room = size - header_size - change_types
    if statistics < 0 or statistics > room:
        return refuse(note, BatchFault.STATISTICS_LENGTH, -1, statistics, max(room, 0))
    return np.int64(0)


@kernel()
def _check_batch(
    buf: Any,
    start: Any,
    size: Any,
    header_size: Any,
    crc: Any,
    program: Any,
    changelog: Any,
    note: Any,
) -> Any:
    """Check the batch in [start, start + size); note[FIGURE_1] becomes where its records begin."""
    count = load_i32(buf, crc + RECORD_COUNT)
    has_statistics = header_size > HEADER_BYTES_MIN
    statistics = load_i32(buf, crc + STATISTICS_LENGTH) if has_statistics else np.int64(0)
    fault = _check_header(buf, crc, size, header_size, count, statistics, changelog, note)
    if fault != 0 or count == 0:
        return fault
    # The body: statistics, change types if the batch is a changelog, then rows or one message.
    body = start + header_size
    if statistics > 0:
        slots = program[PROGRAM_HEAD + PROGRAM_STRIDE * program[PROGRAM_NODES] :]
        columns = program[PROGRAM_COLUMNS]
        fault = check_statistics(buf, body, statistics, count, columns, slots, note)
        if fault != 0:
            return fault
        body += statistics
    if program[PROGRAM_ROWS] != 0:
        note[FIGURE_1] = body
        return np.int64(BatchFault.ROWS)
    if load_u8(buf, crc + ATTRIBUTES) == 0:
        for record in range(count):
            change_type = load_u8(buf, body + record)
            if change_type > CHANGE_TYPE_MAX:
                return refuse(note, BatchFault.CHANGE_TYPE, -1, change_type, record)
        body += count
    note[FIGURE_1] = body
    fault = _check_message(buf, body, start + size, count, program, note)
    if fault == BatchFault.COMPRESSED:
        note[FIGURE_1], note[FIGURE_2] = body, note[TOTAL]
    return fault


_RESULT = types.UniTuple(types.int64, 12)
_PROGRAM = types.Array(types.int64, 1, "C", readonly=True)


@kernel(_RESULT(BYTES, types.int64, types.int64, _PROGRAM, types.boolean), allocates=True)
def check_batch(buf: Any, start: Any, end: Any, program: Any, changelog: Any) -> Any:
    """Check the batch that begins at `start`; the module's docstring lists the twelve results."""
    zero = np.int64(0)
    room = end - start
    if start < 0 or end > buf.size or room < HEADER_BYTES_MIN:
        cut, least = np.int64(BatchFault.HEADER_CUT), np.int64(HEADER_BYTES_MIN)
        return cut, zero, room, least, zero, end, zero, zero, zero, zero, zero, zero
    # The size of the header depends on the magic, and the batch must hold it.
    size, magic = load_i32(buf, start + LENGTH_AT) + LENGTH_OVERHEAD, load_u8(buf, start + MAGIC_AT)
    header_size = HEADER_BYTES_MIN + 4 * magic
    fault, figure_1, figure_2 = zero, zero, zero
    if magic > MAGIC_MAX:
        fault, figure_1, figure_2 = np.int64(BatchFault.MAGIC), magic, np.int64(MAGIC_MAX)
    elif size < header_size:
        fault, figure_1, figure_2 = np.int64(BatchFault.LENGTH_TOO_SMALL), size, header_size
    elif size > room:
        fault, figure_1, figure_2 = np.int64(BatchFault.LENGTH_TOO_LARGE), size, room
    if fault != 0:
        return fault, zero, figure_1, figure_2, zero, end, magic, zero, zero, zero, zero, zero
    crc = crc_at(start, magic)
    schema_id = load_i16(buf, crc + SCHEMA_ID)
    node = np.int64(-1)
    if schema_id != program[PROGRAM_SCHEMA]:
        fault = np.int64(BatchFault.OTHER_SCHEMA)
    else:
        note = np.empty(NOTES + 2 * program[PROGRAM_NODES], dtype=np.int64)
        note[:3] = 0
        fault = _check_batch(buf, start, size, header_size, crc, program, changelog, note)
        node, figure_1, figure_2 = note[NODE], note[FIGURE_1], note[FIGURE_2]
    return (
        fault,
        node,
        figure_1,
        figure_2,
        load_u32(buf, crc),
        start + size,
        magic,
        schema_id,
        load_i32(buf, crc + RECORD_COUNT),
        load_i32(buf, crc + LAST_OFFSET_DELTA),
        load_i64(buf, crc + WRITER_ID),
        load_i32(buf, crc + SEQUENCE),
    )
