"""Reading the metadata of an Arrow RecordBatch message inside kernels.

The twin is `zufluss.record.arrow.message.parse_message`, where the layout is explained. The parts
return a fault (`fault.py`) and leave what they read, or the figures of the fault, in `note`, an
int64 array whose cells are named below. Positions are absolute; `lo` and `hi` bound the metadata,
and nothing outside is read.
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
    load_u16,
    load_u32,
    types,
)

NODE, A, B, LENGTH, NODES, BUFFERS, CODEC, BODY, CURSOR, TOTAL, SIZE, NOTES = range(12)
"""Cells of `note`: node and figures of a fault; record count, positions of the vectors of nodes
and buffers, codec, body start; what the walk over the buffers keeps; the number of cells."""


@kernel()
def refuse(note: Any, fault: Any, node: Any, a: Any, b: Any) -> Any:
    """Leave node and figures of a fault in `note` and return the fault."""
    note[NODE], note[A], note[B] = node, a, b
    return np.int64(fault)


@kernel()
def _vtable(buf: Any, lo: Any, hi: Any, table: Any) -> Any:
    """Position of the vtable of `table`, or −1."""
    if table < lo or table + 4 > hi or (table - lo) & 3:
        return np.int64(-1)
    vtable = table - load_i32(buf, table)
    if vtable < lo or vtable + 4 > hi or (vtable - lo) & 1:
        return np.int64(-1)
    size = load_u16(buf, vtable)
    if size < 4 or size & 1 or vtable + size > hi:
        return np.int64(-1)
    return np.int64(vtable)


@kernel()
def _field(buf: Any, lo: Any, hi: Any, table: Any, vtable: Any, field: Any, size: Any) -> Any:
    """Position of a field of `size` bytes, 0 if it is absent, −1 if it lies outside."""
    entry = 4 + 2 * field
    if entry >= load_u16(buf, vtable):
        return np.int64(0)
    offset = load_u16(buf, vtable + entry)
    if offset == 0:
        return np.int64(0)
    position = table + offset
    if position + size > hi or (position - lo) & (size - 1):
        return np.int64(-1)
    return np.int64(position)


@kernel()
def _follow(buf: Any, lo: Any, hi: Any, table: Any, vtable: Any, field: Any) -> Any:
    """Where an offset field points (4 bytes are there), 0 if it is absent, −1 if outside."""
    position = _field(buf, lo, hi, table, vtable, field, 4)
    if position <= 0:
        return position
    offset = load_i32(buf, position)
    target = position + offset
    if offset <= 0 or target + 4 > hi or (target - lo) & 3:
        return np.int64(-1)
    return np.int64(target)


@kernel()
def _structs(buf: Any, lo: Any, hi: Any, table: Any, vtable: Any, field: Any, note: Any) -> Any:
    """Position of the length of a vector of 16-byte structs, or minus a fault."""
    vector = _follow(buf, lo, hi, table, vtable, field)
    if vector <= 0:
        return -refuse(note, Fault.METADATA_FIELD, -1, table - lo, field)
    count = load_u32(buf, vector)
    if count * 16 > hi - vector - 4:
        return -refuse(note, Fault.METADATA_VECTOR, -1, vector - lo, count)
    return vector


@kernel()
def _absent(buf: Any, lo: Any, hi: Any, table: Any, vtable: Any, field: Any) -> Any:
    """Whether a vector field is absent or empty."""
    vector = _follow(buf, lo, hi, table, vtable, field)
    return vector == 0 or (vector > 0 and load_u32(buf, vector) == 0)


@kernel()
def _compression(buf: Any, lo: Any, hi: Any, table: Any, vtable: Any, note: Any) -> Any:
    """Read the BodyCompression table of a RecordBatch into note[CODEC]."""
    note[CODEC] = -1
    target = _follow(buf, lo, hi, table, vtable, 3)
    if target == 0:
        return np.int64(0)
    inner = np.int64(-1) if target < 0 else _vtable(buf, lo, hi, target)
    if inner < 0:
        return refuse(note, Fault.METADATA_TABLE, -1, max(target, lo) - lo, 0)
    codec_at = _field(buf, lo, hi, target, inner, 0, 1)
    method_at = _field(buf, lo, hi, target, inner, 1, 1)
    if codec_at < 0 or method_at < 0:
        return refuse(note, Fault.METADATA_FIELD, -1, target - lo, 0 if codec_at < 0 else 1)
    codec = load_u8(buf, codec_at) if codec_at > 0 else np.int64(0)
    method = load_u8(buf, method_at) if method_at > 0 else np.int64(0)
    if codec > 1 or method != 0:
        return refuse(note, Fault.COMPRESSION, -1, codec, method)
    note[CODEC] = codec
    return np.int64(0)


@kernel()
def _record_batch(buf: Any, lo: Any, hi: Any, table: Any, note: Any) -> Any:
    """Read the RecordBatch table: length, nodes, buffers, codec."""
    vtable = _vtable(buf, lo, hi, table)
    if vtable < 0:
        return refuse(note, Fault.METADATA_TABLE, -1, table - lo, 0)
    length_at = _field(buf, lo, hi, table, vtable, 0, 8)
    if length_at <= 0:
        return refuse(note, Fault.METADATA_FIELD, -1, table - lo, 0)
    note[LENGTH] = load_i64(buf, length_at)
    nodes = _structs(buf, lo, hi, table, vtable, 1, note)
    if nodes < 0:
        return -nodes
    buffers = _structs(buf, lo, hi, table, vtable, 2, note)
    if buffers < 0:
        return -buffers
    note[NODES], note[BUFFERS] = nodes, buffers
    if not _absent(buf, lo, hi, table, vtable, 4):
        return refuse(note, Fault.MESSAGE_EXTRAS, -1, 0, 0)
    return _compression(buf, lo, hi, table, vtable, note)


@kernel()
def read_metadata(buf: Any, start: Any, end: Any, note: Any) -> Any:
    """Read the encapsulated message in [start, end) into `note`, body start included.

    Only the metadata is read, and only as far as `buf` reaches.
    """
    if min(end, buf.size) - start < 16:
        return refuse(note, Fault.MESSAGE_CUT, -1, end - start, 16)
    marker = load_u32(buf, start)
    if marker != 0xFFFFFFFF:
        return refuse(note, Fault.MESSAGE_MARKER, -1, marker, 0)
    size = load_i32(buf, start + 4)
    lo = start + 8
    room = min(end, buf.size) - lo
    if size < 8 or size & 7 or size > room:
        return refuse(note, Fault.METADATA_LENGTH, -1, size, room)
    hi = lo + size
    table = lo + load_u32(buf, lo)
    vtable = _vtable(buf, lo, hi, table)
    if vtable < 0:
        return refuse(note, Fault.METADATA_TABLE, -1, table - lo, 0)
    version_at = _field(buf, lo, hi, table, vtable, 0, 2)
    kind_at = _field(buf, lo, hi, table, vtable, 1, 1)
    body_at = _field(buf, lo, hi, table, vtable, 3, 8)
    version = load_i16(buf, version_at) if version_at > 0 else np.int64(0)
    if version_at < 0 or not 3 <= version <= 4:
        return refuse(note, Fault.MESSAGE_VERSION, -1, version, 0)
    kind = load_u8(buf, kind_at) if kind_at > 0 else np.int64(0)
    if kind != 3:
        return refuse(note, Fault.MESSAGE_KIND, -1, kind, 0)
    body = load_i64(buf, body_at) if body_at > 0 else np.int64(0)
    if body_at < 0 or body != end - hi:
        return refuse(note, Fault.BODY_LENGTH, -1, body, end - hi)
    note[BODY] = hi
    if not _absent(buf, lo, hi, table, vtable, 4):
        return refuse(note, Fault.MESSAGE_EXTRAS, -1, 0, 0)
    header = _follow(buf, lo, hi, table, vtable, 2)
    if header <= 0:
        return refuse(note, Fault.METADATA_FIELD, -1, table - lo, 2)
    return _record_batch(buf, lo, hi, header, note)


@kernel(types.UniTuple(types.int64, 11)(BYTES, types.int64, types.int64), allocates=True)
def read_message(buf: Any, start: Any, end: Any) -> Any:
    """Read the metadata of the Arrow message in [start, end); the body need not be in `buf`.

    Returns fault, two figures, length, position and count of the nodes, the same of the buffers,
    codec (−1 none), body start, body length.
    """
    note = np.zeros(NOTES, dtype=np.int64)
    if start < 0:
        fault = refuse(note, Fault.MESSAGE_CUT, -1, 0, 16)
    else:
        fault = read_metadata(buf, start, end, note)
    nodes, buffers, body = note[NODES], note[BUFFERS], note[BODY]
    node_count, buffer_count = np.int64(0), np.int64(0)
    if fault == 0:
        node_count, buffer_count = load_u32(buf, nodes), load_u32(buf, buffers)
    return (
        fault,
        note[A],
        note[B],
        note[LENGTH],
        nodes + 4,
        node_count,
        buffers + 4,
        buffer_count,
        note[CODEC],
        body,
        end - body,
    )
