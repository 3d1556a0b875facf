"""Projection of a run of Arrow batches in one call.

`project_batches` reads whole batches from `buf[start:end]` and writes them to `out` with fewer
columns, in the form that `zufluss.record.arrow.project` describes; its Python code is the twin and
gives the same bytes. The plan (int64) says where each node and buffer of the result comes from:

| at          | content                                                                      |
|-------------|------------------------------------------------------------------------------|
| 0           | schema id                                                                    |
| 1 / 2       | nodes / buffers of a batch of this schema                                    |
| 3 / 4       | nodes / buffers of the result                                                |
| 8 + 2·i     | node i: source node or −1 (the column is missing), its rows: 1 all, 0 none   |
| then 4 each | buffer: source buffer or −1, zeros it needs (see `zeros`), width, rows: 1, 0 |

A column that is missing in the source becomes NULLs. Projection stops at a batch of another schema,
at one that does not fit into `out`, and at one that is damaged.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from zufluss.record.fault import BatchFault
from zufluss.record.kernels import types
from zufluss.record.kernels.batch_header import (
    ATTRIBUTES,
    HEADER_BYTES_MIN,
    LENGTH_OVERHEAD,
    MAGIC_AT,
    MAGIC_MAX,
    RECORD_COUNT,
    SCHEMA_ID,
    STATISTICS_LENGTH,
    crc_at,
)
from zufluss.record.kernels.batch_header import LENGTH_AT as LENGTH_FIELD_AT
from zufluss.record.kernels.cache import kernel
from zufluss.record.kernels.memory import (
    BYTES,
    copy,
    load_i16,
    load_i32,
    load_i64,
    load_u8,
    load_u32,
    store_i32,
    store_i64,
    store_u8,
)
from zufluss.record.kernels.message_read import (
    BODY,
    BUFFERS,
    CODEC,
    FIGURE_1,
    FIGURE_2,
    LENGTH,
    NODES,
    NOTES,
    read_metadata,
    refuse,
)

DONE, OTHER_SCHEMA, FULL, DAMAGED = range(4)
"""Why projection stopped."""

PLAN_SCHEMA, SOURCE_NODES, SOURCE_BUFFERS, RESULT_NODES, RESULT_BUFFERS = range(5)
PLAN_HEAD = 8
"""Numbers of the plan before its nodes."""
BATCH_BYTES_MAX = 2**31 - 1

BODY_LENGTH_AT, LENGTH_AT, CODEC_AT, NODES_AT, CODED_NODES_AT = 24, 64, 92, 88, 104
"""Positions in the metadata of a template (`arrow/template.py`) that differ from batch to batch."""


@kernel()
def zeros(need: Any, width: Any, rows: Any) -> Any:
    """Bytes of a buffer of NULLs: 0 none, 1 bits, 2 values of `width` bytes, 3 offsets."""
    if need == 1:
        return (rows + 7) >> 3
    if need == 2:
        return rows * width
    if need == 3:
        return 4 * (rows + 1)
    return np.int64(0)


@kernel()
def _clear(out: Any, at: Any, size: Any) -> Any:
    for position in range(at, at + size):
        store_u8(out, position, 0)


@kernel()
def _buffer_size(buf: Any, plan: Any, entry: Any, count: Any, end: Any, note: Any) -> Any:
    """Bytes of one buffer of the result, −fault if the source buffer leaves its body."""
    source = plan[entry]
    if source < 0:
        size = zeros(plan[entry + 1], plan[entry + 2], count * plan[entry + 3])
        return size + 8 if size > 0 and note[CODEC] >= 0 else size
    place = note[BUFFERS] + 4 + 16 * source
    offset, size = load_i64(buf, place), load_i64(buf, place + 8)
    room = end - note[BODY]
    if offset < 0 or size < 0 or offset > room or size > room - offset:
        return -refuse(note, BatchFault.BUFFER_PLACE, -1, size, offset)
    return size


@kernel()
def _body_size(buf: Any, plan: Any, count: Any, end: Any, note: Any) -> Any:
    """Bytes of the result's body, −fault if a source buffer leaves its body."""
    entry = PLAN_HEAD + 2 * plan[RESULT_NODES]
    total = np.int64(0)
    for _ in range(plan[RESULT_BUFFERS]):
        size = _buffer_size(buf, plan, entry, count, end, note)
        if size < 0:
            return size
        total += (size + 7) & ~7
        entry += 4
    return total


@kernel()
def _write_body(
    buf: Any, plan: Any, count: Any, end: Any, note: Any, out: Any, places: Any, body: Any
) -> Any:
    """Write the buffers from `body` on, and their offsets and sizes from `places` on."""
    entry = PLAN_HEAD + 2 * plan[RESULT_NODES]
    offset = np.int64(0)
    for buffer in range(plan[RESULT_BUFFERS]):
        size = _buffer_size(buf, plan, entry, count, end, note)
        padded = (size + 7) & ~7
        at = body + offset
        store_i64(out, places + 16 * buffer, offset)
        store_i64(out, places + 16 * buffer + 8, size)
        if plan[entry] >= 0:
            # The padding is copied too, as far as the source has one.
            source = note[BODY] + load_i64(buf, note[BUFFERS] + 4 + 16 * plan[entry])
            available = min(padded, end - source)
            copy(out, at, buf, source, available)
            _clear(out, at + available, padded - available)
        else:
            # In a compressed message the prefix −1 says that a buffer is stored as it is.
            _clear(out, at, padded)
            if note[CODEC] >= 0 and size > 0:
                store_i64(out, at, -1)
        offset += padded
        entry += 4


@kernel()
def _write_nodes(buf: Any, plan: Any, count: Any, note: Any, out: Any, at: Any) -> Any:
    """Write length and null count of every node of the result."""
    for node in range(plan[RESULT_NODES]):
        source, rows = plan[PLAN_HEAD + 2 * node], plan[PLAN_HEAD + 2 * node + 1] * count
        length, nulls = rows, rows
        if source >= 0:
            place = note[NODES] + 4 + 16 * source
            length, nulls = load_i64(buf, place), load_i64(buf, place + 8)
        store_i64(out, at + 16 * node, length)
        store_i64(out, at + 16 * node + 8, nulls)


@kernel()
def _write_message(
    buf: Any, batch: Any, plan: Any, template: Any, body_size: Any, out: Any, at: Any, note: Any
) -> Any:
    """Write the Arrow message of a batch: the template, what differs from it, nodes, buffers."""
    compressed = note[CODEC] >= 0
    copy(out, at, template, 0, template.size)
    metadata = at + 8
    if compressed:
        store_u8(out, metadata + CODEC_AT, note[CODEC])
    store_i64(out, metadata + BODY_LENGTH_AT, body_size)
    store_i64(out, metadata + LENGTH_AT, note[LENGTH])
    nodes = metadata + (CODED_NODES_AT if compressed else NODES_AT)
    _write_nodes(buf, plan, batch.count, note, out, nodes)
    places, body = nodes + 16 * plan[RESULT_NODES] + 8, at + template.size
    _write_body(buf, plan, batch.count, batch.end, note, out, places, body)


@kernel()
def _project(
    buf: Any, batch: Any, plan: Any, plain: Any, coded: Any, out: Any, at: Any, note: Any
) -> Any:
    """Write one batch to `out` at `at`: its size there, 0 if it does not fit, or −fault."""
    fault = read_metadata(buf, batch.records, batch.end, note)
    if fault != 0:
        return -fault
    nodes = load_u32(buf, note[NODES])
    if nodes != plan[SOURCE_NODES]:
        return -refuse(note, BatchFault.NODE_COUNT, -1, nodes, plan[SOURCE_NODES])
    buffers = load_u32(buf, note[BUFFERS])
    if buffers != plan[SOURCE_BUFFERS]:
        return -refuse(note, BatchFault.BUFFER_COUNT, -1, buffers, plan[SOURCE_BUFFERS])
    body_size = _body_size(buf, plan, batch.count, batch.end, note)
    if body_size < 0:
        return body_size
    # The result: the header without statistics, the change types, the message.
    template_size = coded.size if note[CODEC] >= 0 else plain.size
    total = batch.header + batch.changes + template_size + body_size
    if total > out.size - at or total > BATCH_BYTES_MAX:
        return np.int64(0)
    copy(out, at, buf, batch.start, batch.header)
    store_i32(out, at + LENGTH_FIELD_AT, total - LENGTH_OVERHEAD)
    if batch.header > HEADER_BYTES_MIN:
        store_i32(out, at + batch.header - 4, 0)
    copy(out, at + batch.header, buf, batch.records - batch.changes, batch.changes)
    message = at + batch.header + batch.changes
    if note[CODEC] >= 0:
        _write_message(buf, batch, plan, coded, body_size, out, message, note)
    else:
        _write_message(buf, batch, plan, plain, body_size, out, message, note)
    return total


class Batch(NamedTuple):
    """The parts of a batch, as positions and sizes."""

    start: Any
    end: Any
    header: Any
    """Bytes of the header."""
    count: Any
    """Number of records."""
    statistics: Any
    """Bytes of the statistics."""
    changes: Any
    """Bytes of the change types."""
    records: Any
    """Position of the Arrow message."""


@kernel(inline=True)
def _parts_of(buf: Any, start: Any, size: Any, magic: Any) -> Any:
    """Find the parts of a batch by its header; nothing is checked yet."""
    crc, header = crc_at(start, magic), np.int64(HEADER_BYTES_MIN + 4 * magic)
    count = load_i32(buf, crc + RECORD_COUNT)
    statistics = load_i32(buf, crc + STATISTICS_LENGTH) if magic > 0 else np.int64(0)
    changes = count if load_u8(buf, crc + ATTRIBUTES) & 1 == 0 else np.int64(0)
    records = start + header + statistics + changes
    return Batch(start, start + size, header, count, statistics, changes, records)


_PLAN = types.Array(types.int64, 1, "C", readonly=True)
_OUT = types.Array(types.uint8, 1, "C")


@kernel(
    types.UniTuple(types.int64, 6)(
        BYTES, types.int64, types.int64, _PLAN, BYTES, BYTES, _OUT, types.int64
    ),
    allocates=True,
)
def project_batches(
    buf: Any, start: Any, end: Any, plan: Any, plain: Any, coded: Any, out: Any, at: Any
) -> Any:
    """Project batches until one of another schema, damaged, or without room in `out`.

    Returns why it stopped (DONE, OTHER_SCHEMA, FULL, DAMAGED), the position of the first batch
    that was not projected, where `out` is filled to, and fault and figures of the damage.
    """
    note = np.zeros(NOTES, dtype=np.int64)
    pos = start
    stop = DAMAGED if start < 0 or at < 0 or end > buf.size else DONE
    fault = np.int64(BatchFault.LENGTH_TOO_LARGE)
    while stop == DONE and end - pos >= HEADER_BYTES_MIN:
        size = load_i32(buf, pos + LENGTH_FIELD_AT) + LENGTH_OVERHEAD
        magic = load_u8(buf, pos + MAGIC_AT)
        if magic > MAGIC_MAX or size < HEADER_BYTES_MIN + 4 * magic or size > end - pos:
            fault = refuse(note, BatchFault.LENGTH_TOO_LARGE, -1, size, end - pos)
            stop = DAMAGED
            break
        batch = _parts_of(buf, pos, size, magic)
        # A batch without records is the same with any columns; the others are projected.
        written = np.int64(0)
        if load_i16(buf, crc_at(pos, magic) + SCHEMA_ID) != plan[PLAN_SCHEMA]:
            stop = OTHER_SCHEMA
        elif batch.count < 0:
            written = -refuse(note, BatchFault.RECORD_COUNT, -1, batch.count, 0)
        elif batch.statistics < 0 or batch.records > batch.end:
            written = -refuse(note, BatchFault.STATISTICS_LENGTH, -1, batch.statistics, size)
        elif batch.count == 0:
            if size <= out.size - at:
                copy(out, at, buf, pos, size)
                written = np.int64(size)
        else:
            written = _project(buf, batch, plan, plain, coded, out, at, note)
        if written > 0:
            at += written
            pos += size
        elif written < 0:
            fault = -written
            stop = DAMAGED
        elif stop == DONE:
            stop = FULL
    if stop == DONE and pos != end:
        fault = refuse(note, BatchFault.HEADER_CUT, -1, end - pos, HEADER_BYTES_MIN)
        stop = DAMAGED
    return np.int64(stop), pos, at, fault, note[FIGURE_1], note[FIGURE_2]
