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

It stops at a batch of another schema, or that does not fit into `out`, or that is damaged.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from zufluss.record.fault import Fault
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
    types,
)
from zufluss.record.kernels.message_read import (
    BODY,
    BUFFERS,
    CODEC,
    LENGTH,
    NODES,
    NOTES,
    A,
    B,
    read_metadata,
    refuse,
)

DONE, OTHER_SCHEMA, FULL, DAMAGED = range(4)

BODY_LENGTH_AT, LENGTH_AT, CODEC_AT, NODES_AT, CODED_NODES_AT = 24, 64, 92, 88, 104
"""Where a template of `zufluss.record.arrow.project` holds what differs from batch to batch."""


@kernel()
def zeros(need: Any, width: Any, n: Any) -> Any:
    """Bytes of a buffer of n nulls: 0 none, 1 bits, 2 values of `width` bytes, 3 offsets."""
    if need == 1:
        return (n + 7) >> 3
    if need == 2:
        return n * width
    if need == 3:
        return 4 * (n + 1)
    return np.int64(0)


@kernel()
def _clear(out: Any, at: Any, size: Any) -> Any:
    for i in range(at, at + size):
        store_u8(out, i, 0)


@kernel()
def _buffer_size(buf: Any, plan: Any, entry: Any, count: Any, end: Any, note: Any) -> Any:
    """Bytes of one buffer of the result, −fault if the source's place is damaged."""
    source = plan[entry]
    if source < 0:
        size = zeros(plan[entry + 1], plan[entry + 2], count * plan[entry + 3])
        return size + 8 if size > 0 and note[CODEC] >= 0 else size
    place = note[BUFFERS] + 4 + 16 * source
    offset, size = load_i64(buf, place), load_i64(buf, place + 8)
    room = end - note[BODY]
    if offset < 0 or size < 0 or offset > room or size > room - offset:
        return -refuse(note, Fault.BUFFER_PLACE, -1, size, offset)
    return size


@kernel()
def _body_size(buf: Any, plan: Any, count: Any, end: Any, note: Any) -> Any:
    """Bytes of the result's body, −fault if a source's place is damaged."""
    entry = 8 + 2 * plan[3]
    total = np.int64(0)
    for _ in range(plan[4]):
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
    """Write the buffers, and their places to `places`."""
    entry = 8 + 2 * plan[3]
    offset = np.int64(0)
    for i in range(plan[4]):
        size = _buffer_size(buf, plan, entry, count, end, note)
        padded = (size + 7) & ~7
        at = body + offset
        store_i64(out, places + 16 * i, offset)
        store_i64(out, places + 16 * i + 8, size)
        if plan[entry] >= 0:
            source = note[BODY] + load_i64(buf, note[BUFFERS] + 4 + 16 * plan[entry])
            available = min(padded, end - source)
            copy(out, at, buf, source, available)
            _clear(out, at + available, padded - available)
        else:
            _clear(out, at, padded)
            if note[CODEC] >= 0 and size > 0:
                store_i64(out, at, -1)
        offset += padded
        entry += 4


@kernel()
def _write_nodes(buf: Any, plan: Any, count: Any, note: Any, out: Any, at: Any) -> Any:
    for i in range(plan[3]):
        source, rows = plan[8 + 2 * i], plan[9 + 2 * i] * count
        length, nulls = rows, rows
        if source >= 0:
            place = note[NODES] + 4 + 16 * source
            length, nulls = load_i64(buf, place), load_i64(buf, place + 8)
        store_i64(out, at + 16 * i, length)
        store_i64(out, at + 16 * i + 8, nulls)


@kernel()
def _project(
    buf: Any, pos: Any, size: Any, header: Any, records: Any, count: Any, plan: Any, plain: Any,
    coded: Any, out: Any, at: Any, note: Any,
) -> Any:  # fmt: skip
    """Write one batch to `out` at `at`: its size there, 0 if it does not fit, or −fault."""
    end = pos + size
    fault = read_metadata(buf, records, end, note)
    if fault != 0:
        return -fault
    found = load_u32(buf, note[NODES])
    if found != plan[1]:
        return -refuse(note, Fault.NODE_COUNT, -1, found, plan[1])
    found = load_u32(buf, note[BUFFERS])
    if found != plan[2]:
        return -refuse(note, Fault.BUFFER_COUNT, -1, found, plan[2])
    body_size = _body_size(buf, plan, count, end, note)
    if body_size < 0:
        return body_size
    compressed = note[CODEC] >= 0
    template_size = coded.size if compressed else plain.size
    changes = count if load_u8(buf, pos + (31 if header == 56 else 27)) & 1 == 0 else 0
    total = header + changes + template_size + body_size
    if total > out.size - at or total > 2**31 - 1:
        return np.int64(0)
    copy(out, at, buf, pos, header)
    store_i32(out, at + 8, total - 12)
    if header > 48:
        store_i32(out, at + header - 4, 0)
    copy(out, at + header, buf, records - changes, changes)
    message = at + header + changes
    metadata = message + 8
    if compressed:
        copy(out, message, coded, 0, template_size)
        store_u8(out, metadata + CODEC_AT, note[CODEC])
    else:
        copy(out, message, plain, 0, template_size)
    store_i64(out, metadata + BODY_LENGTH_AT, body_size)
    store_i64(out, metadata + LENGTH_AT, note[LENGTH])
    nodes = metadata + (CODED_NODES_AT if compressed else NODES_AT)
    _write_nodes(buf, plan, count, note, out, nodes)
    body = message + template_size
    _write_body(buf, plan, count, end, note, out, nodes + 16 * plan[3] + 8, body)
    return total


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
    fault = np.int64(Fault.LENGTH_TOO_LARGE)
    while stop == DONE and end - pos >= 48:
        size, magic = load_i32(buf, pos + 8) + 12, load_u8(buf, pos + 12)
        header = 48 + 4 * magic
        if magic > 2 or size < header or size > end - pos:
            fault = refuse(note, Fault.LENGTH_TOO_LARGE, -1, size, end - pos)
            stop = DAMAGED
            break
        p = pos + (29 if magic == 2 else 25)
        count = load_i32(buf, p + 19)
        statistics = load_i32(buf, p + 23) if magic > 0 else np.int64(0)
        changes = count if load_u8(buf, p + 2) & 1 == 0 else np.int64(0)
        records = pos + header + statistics + changes
        if load_i16(buf, p) != plan[0]:
            stop = OTHER_SCHEMA
        elif count < 0:
            fault = refuse(note, Fault.RECORD_COUNT, -1, count, 0)
            stop = DAMAGED
        elif statistics < 0 or records > pos + size:
            fault = refuse(note, Fault.STATISTICS_LENGTH, -1, statistics, size)
            stop = DAMAGED
        elif count == 0:
            if size > out.size - at:
                stop = FULL
            else:
                copy(out, at, buf, pos, size)
                at += size
        else:
            written = _project(
                buf, pos, size, header, records, count, plan, plain, coded, out, at, note
            )
            if written > 0:
                at += written
            elif written == 0:
                stop = FULL
            else:
                fault = -written
                stop = DAMAGED
        if stop == DONE:
            pos += size
    if stop == DONE and pos != end:
        fault = refuse(note, Fault.HEADER_CUT, -1, end - pos, 48)
        stop = DAMAGED
    return np.int64(stop), pos, at, fault, note[A], note[B]
