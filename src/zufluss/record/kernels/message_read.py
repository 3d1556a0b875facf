"""Reading the metadata of an Arrow RecordBatch message inside kernels.

The metadata is a flatbuffer: tables find their fields by a vtable, a list of distances. The layout
is explained in `zufluss.record.arrow.message`, whose `parse_message` is the plain-Python twin. The
parts return a fault (`fault.py`) and leave the numbers that they read, or the figures of the fault,
in `note`, an int64 array whose cells are named below. Positions are absolute; `low` and `high`
bound the metadata, and nothing outside of them is read.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from zufluss.record.fault import BatchFault
from zufluss.record.kernels import types
from zufluss.record.kernels.cache import kernel
from zufluss.record.kernels.memory import (
    BYTES,
    load_i16,
    load_i32,
    load_i64,
    load_u8,
    load_u16,
    load_u32,
)

NODE, FIGURE_1, FIGURE_2 = range(3)
"""Cells of `note` for a fault: the node, and two figures for the message."""
LENGTH, NODES, BUFFERS, CODEC, BODY = range(3, 8)
"""Cells of `note` for metadata: record count, positions of the vectors of nodes and of buffers,
codec (−1 = not compressed), position of the body."""
CURSOR, TOTAL, SIZE = range(8, 11)
"""Cells of `note` for the walk over buffers: end of the last one, their uncompressed sum, and the
uncompressed size of the current one."""
NOTES = 11
"""Number of cells."""

_MESSAGE_VERSION, _MESSAGE_KIND, _MESSAGE_HEADER, _MESSAGE_BODY_LENGTH, _MESSAGE_METADATA = range(5)
"""Fields of the table Message."""
_BATCH_LENGTH, _BATCH_NODES, _BATCH_BUFFERS, _BATCH_COMPRESSION, _BATCH_VARIADIC = range(5)
"""Fields of the table RecordBatch."""
_COMPRESSION_CODEC, _COMPRESSION_METHOD = range(2)
"""Fields of the table BodyCompression."""
_VERSION_MIN, _VERSION_MAX = 3, 4
_KIND_RECORD_BATCH = 3
_MARKER = 0xFFFFFFFF
_MESSAGE_BYTES_MIN = 16


@kernel()
def refuse(note: Any, fault: Any, node: Any, figure_1: Any, figure_2: Any) -> Any:
    """Leave node and figures of a fault in `note` and return the fault."""
    note[NODE], note[FIGURE_1], note[FIGURE_2] = node, figure_1, figure_2
    return np.int64(fault)


@kernel()
def _vtable(buf: Any, low: Any, high: Any, table: Any) -> Any:
    """Position of the vtable of a table, −1 if table or vtable lie outside of the metadata."""
    if table < low or table + 4 > high or (table - low) & 3:
        return np.int64(-1)
    vtable = table - load_i32(buf, table)
    if vtable < low or vtable + 4 > high or (vtable - low) & 1:
        return np.int64(-1)
    size = load_u16(buf, vtable)
    if size < 4 or size & 1 or vtable + size > high:
        return np.int64(-1)
    return np.int64(vtable)


@kernel()
def _field(buf: Any, low: Any, high: Any, table: Any, vtable: Any, field: Any, size: Any) -> Any:
    """Position of a field of `size` bytes, 0 if it is absent, −1 if it lies outside."""
    entry = 4 + 2 * field
    if entry >= load_u16(buf, vtable):
        return np.int64(0)
    offset = load_u16(buf, vtable + entry)
    if offset == 0:
        return np.int64(0)
    position = table + offset
    if position + size > high or (position - low) & (size - 1):
        return np.int64(-1)
    return np.int64(position)


@kernel()
def _follow(buf: Any, low: Any, high: Any, table: Any, vtable: Any, field: Any) -> Any:
    """Where an offset field points (4 bytes are there), 0 if it is absent, −1 if outside."""
    position = _field(buf, low, high, table, vtable, field, 4)
    if position <= 0:
        return position
    offset = load_i32(buf, position)
    target = position + offset
    if offset <= 0 or target + 4 > high or (target - low) & 3:
        return np.int64(-1)
    return np.int64(target)


@kernel()
def _structs(buf: Any, low: Any, high: Any, table: Any, vtable: Any, field: Any, note: Any) -> Any:
    """Position of the length of a vector of 16-byte structs, or minus a fault."""
    vector = _follow(buf, low, high, table, vtable, field)
    if vector <= 0:
        return -refuse(note, BatchFault.METADATA_FIELD, -1, table - low, field)
    count = load_u32(buf, vector)
    if count * 16 > high - vector - 4:
        return -refuse(note, BatchFault.METADATA_VECTOR, -1, vector - low, count)
    return vector


@kernel()
def _absent(buf: Any, low: Any, high: Any, table: Any, vtable: Any, field: Any) -> Any:
    """Whether a vector field is absent or empty."""
    vector = _follow(buf, low, high, table, vtable, field)
    return vector == 0 or (vector > 0 and load_u32(buf, vector) == 0)


@kernel()
def _compression(buf: Any, low: Any, high: Any, table: Any, vtable: Any, note: Any) -> Any:
    """Read the BodyCompression table of a RecordBatch into note[CODEC]."""
    note[CODEC] = -1
    target = _follow(buf, low, high, table, vtable, _BATCH_COMPRESSION)
    if target == 0:
        return np.int64(0)
    inner = np.int64(-1) if target < 0 else _vtable(buf, low, high, target)
    if inner < 0:
        return refuse(note, BatchFault.METADATA_TABLE, -1, max(target, low) - low, 0)
    codec_at = _field(buf, low, high, target, inner, _COMPRESSION_CODEC, 1)
    method_at = _field(buf, low, high, target, inner, _COMPRESSION_METHOD, 1)
    if codec_at < 0 or method_at < 0:
        return refuse(note, BatchFault.METADATA_FIELD, -1, target - low, 0 if codec_at < 0 else 1)
    codec = load_u8(buf, codec_at) if codec_at > 0 else np.int64(0)
    method = load_u8(buf, method_at) if method_at > 0 else np.int64(0)
    if codec > 1 or method != 0:
        return refuse(note, BatchFault.COMPRESSION, -1, codec, method)
    note[CODEC] = codec
    return np.int64(0)


@kernel()
def _record_batch(buf: Any, low: Any, high: Any, table: Any, note: Any) -> Any:
    """Read the RecordBatch table: length, nodes, buffers, codec."""
    vtable = _vtable(buf, low, high, table)
    if vtable < 0:
        return refuse(note, BatchFault.METADATA_TABLE, -1, table - low, 0)
    length_at = _field(buf, low, high, table, vtable, _BATCH_LENGTH, 8)
    if length_at <= 0:
        return refuse(note, BatchFault.METADATA_FIELD, -1, table - low, 0)
    note[LENGTH] = load_i64(buf, length_at)
    nodes = _structs(buf, low, high, table, vtable, _BATCH_NODES, note)
    if nodes < 0:
        return -nodes
    buffers = _structs(buf, low, high, table, vtable, _BATCH_BUFFERS, note)
    if buffers < 0:
        return -buffers
    note[NODES], note[BUFFERS] = nodes, buffers
    if not _absent(buf, low, high, table, vtable, _BATCH_VARIADIC):
        return refuse(note, BatchFault.MESSAGE_EXTRAS, -1, 0, 0)
    return _compression(buf, low, high, table, vtable, note)


@kernel()
def read_metadata(buf: Any, start: Any, end: Any, note: Any) -> Any:
    """Read the metadata of the encapsulated message in [start, end) into `note`.

    The body is not read and need not lie within `buf`.
    """
    # An encapsulated message: a marker, the size of the metadata, the metadata, then the body.
    if min(end, buf.size) - start < _MESSAGE_BYTES_MIN:
        return refuse(note, BatchFault.MESSAGE_CUT, -1, end - start, _MESSAGE_BYTES_MIN)
    marker = load_u32(buf, start)
    if marker != _MARKER:
        return refuse(note, BatchFault.MESSAGE_MARKER, -1, marker, 0)
    size = load_i32(buf, start + 4)
    low = start + 8
    room = min(end, buf.size) - low
    if size < 8 or size & 7 or size > room:
        return refuse(note, BatchFault.METADATA_LENGTH, -1, size, room)
    high = low + size
    # The root table Message, which must announce a RecordBatch and the body that follows.
    table = low + load_u32(buf, low)
    vtable = _vtable(buf, low, high, table)
    if vtable < 0:
        return refuse(note, BatchFault.METADATA_TABLE, -1, table - low, 0)
    version_at = _field(buf, low, high, table, vtable, _MESSAGE_VERSION, 2)
    kind_at = _field(buf, low, high, table, vtable, _MESSAGE_KIND, 1)
    body_at = _field(buf, low, high, table, vtable, _MESSAGE_BODY_LENGTH, 8)
    version = load_i16(buf, version_at) if version_at > 0 else np.int64(0)
    if version_at < 0 or not _VERSION_MIN <= version <= _VERSION_MAX:
        return refuse(note, BatchFault.MESSAGE_VERSION, -1, version, 0)
    kind = load_u8(buf, kind_at) if kind_at > 0 else np.int64(0)
    if kind != _KIND_RECORD_BATCH:
        return refuse(note, BatchFault.MESSAGE_KIND, -1, kind, 0)
    body = load_i64(buf, body_at) if body_at > 0 else np.int64(0)
    if body_at < 0 or body != end - high:
        return refuse(note, BatchFault.BODY_LENGTH, -1, body, end - high)
    note[BODY] = high
    if not _absent(buf, low, high, table, vtable, _MESSAGE_METADATA):
        return refuse(note, BatchFault.MESSAGE_EXTRAS, -1, 0, 0)
    header = _follow(buf, low, high, table, vtable, _MESSAGE_HEADER)
    if header <= 0:
        return refuse(note, BatchFault.METADATA_FIELD, -1, table - low, _MESSAGE_HEADER)
    return _record_batch(buf, low, high, header, note)


@kernel(types.UniTuple(types.int64, 11)(BYTES, types.int64, types.int64), allocates=True)
def read_message(buf: Any, start: Any, end: Any) -> Any:
    """Read the metadata of the Arrow message in [start, end); the body need not be in `buf`.

    Returns fault, two figures, length, position and count of the nodes, the same of the buffers,
    codec (−1 none), body start, body length.
    """
    note = np.zeros(NOTES, dtype=np.int64)
    if start < 0:
        fault = refuse(note, BatchFault.MESSAGE_CUT, -1, 0, 16)
    else:
        fault = read_metadata(buf, start, end, note)
    nodes, buffers, body = note[NODES], note[BUFFERS], note[BODY]
    node_count, buffer_count = np.int64(0), np.int64(0)
    if fault == 0:
        node_count, buffer_count = load_u32(buf, nodes), load_u32(buf, buffers)
    return (
        fault,
        note[FIGURE_1],
        note[FIGURE_2],
        note[LENGTH],
        nodes + 4,
        node_count,
        buffers + 4,
        buffer_count,
        note[CODEC],
        body,
        end - body,
    )
