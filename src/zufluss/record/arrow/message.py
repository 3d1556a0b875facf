"""The Arrow body of a batch: reading its message, and decoding it for clients.

The body is one encapsulated RecordBatch message without the schema, which the batch's schema id
names instead:

| bytes                     | content                                                             |
|---------------------------|---------------------------------------------------------------------|
| 4                         | ff ff ff ff                                                         |
| 4                         | metadata length, i32, a multiple of 8                               |
| metadata length           | flatbuffer `Message`: version, header type (3), header, body length |
| body length               | buffers, each at a multiple of 8                                    |

The header is a `RecordBatch` table: length, a vector of nodes (i64 length, i64 null count), a
vector of buffers (i64 offset in the body, i64 length), and optionally the compression (codec 0 LZ4
frame, 1 ZSTD; each buffer then starts with its i64 uncompressed length, −1 for "stored as is").

`parse_message` is the plain-Python twin of `kernels/message_read.py`: every step is bounded by the
metadata, and it demands what the flatbuffer verifiers of Arrow's own readers demand (alignment,
forward offsets). `decode` passes the bytes to pyarrow without a copy.
"""

from __future__ import annotations

import struct
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from zufluss.errors import CorruptRecordError
from zufluss.record.fault import BatchFault, RefusedBatchError
from zufluss.record.header import BatchHeader, Buffer

CONTINUATION = 0xFFFFFFFF
RECORD_BATCH = 3
CODECS = ("lz4_frame", "zstd")
"""Codec names by number, as Arrow spells them."""
LZ4_FRAME, ZSTD = range(2)
"""Their numbers."""

_FIELD_FORMATS = {1: "<B", 2: "<h", 8: "<q"}


class ArrowMessage(NamedTuple):
    """The metadata of a RecordBatch message; positions are absolute in the buffer."""

    length: int
    """Number of records."""
    nodes_pos: int
    """Position of the nodes, 16 bytes each."""
    node_count: int
    """Number of nodes."""
    buffers_pos: int
    """Position of the buffers' places, 16 bytes each."""
    buffer_count: int
    """Number of buffers."""
    codec: int | None
    """0 LZ4 frame, 1 ZSTD, None uncompressed."""
    body_start: int
    """Position of the body."""
    body_length: int
    """Bytes of the body."""


class _Metadata:
    """Reads a flatbuffer within [lo, hi) of a view."""

    def __init__(self, view: Buffer, lo: int, hi: int, where: str) -> None:
        self.view, self.lo, self.hi, self.where = view, lo, hi, where

    def refuse(self, fault: BatchFault, a: int = 0, b: int = 0) -> RefusedBatchError:
        return RefusedBatchError(self.where, fault, a, b)

    def read(self, fmt: str, pos: int) -> int:
        value: int = struct.unpack_from(fmt, self.view, pos)[0]
        return value

    def vtable(self, table: int) -> int:
        """Return the position of the vtable of a table."""
        lo, hi = self.lo, self.hi
        if lo <= table <= hi - 4 and (table - lo) % 4 == 0:
            vtable = table - self.read("<i", table)
            if lo <= vtable <= hi - 4 and (vtable - lo) % 2 == 0:
                size = self.read("<H", vtable)
                if size >= 4 and size % 2 == 0 and vtable + size <= hi:
                    return vtable
        raise self.refuse(BatchFault.METADATA_TABLE, table - lo)

    def place(self, table: int, vtable: int, field: int, size: int) -> int | None:
        """Return the position of a field, None if it is absent, −1 if it lies outside."""
        entry = 4 + 2 * field
        if entry >= self.read("<H", vtable):
            return None
        offset = self.read("<H", vtable + entry)
        if offset == 0:
            return None
        pos = table + offset
        return pos if pos + size <= self.hi and (pos - self.lo) % size == 0 else -1

    def scalar(self, table: int, vtable: int, field: int, size: int, fault: BatchFault) -> int:
        """Return the value of a field, 0 if it is absent."""
        pos = self.place(table, vtable, field, size)
        if pos is None:
            return 0
        if pos < 0:
            raise self.refuse(fault, table - self.lo, field)
        return self.read(_FIELD_FORMATS[size], pos)

    def follow(self, table: int, vtable: int, field: int) -> int | None:
        """Return the target of an offset field, None if it is absent, −1 if it lies outside."""
        pos = self.place(table, vtable, field, 4)
        if pos is None or pos < 0:
            return pos
        offset = self.read("<i", pos)
        target = pos + offset
        inside = offset > 0 and target + 4 <= self.hi and (target - self.lo) % 4 == 0
        return target if inside else -1

    def structs(self, table: int, vtable: int, field: int) -> tuple[int, int]:
        """Return position and count of a vector of 16-byte structs; raises if it is absent."""
        vector = self.follow(table, vtable, field)
        if vector is None or vector < 0:
            raise self.refuse(BatchFault.METADATA_FIELD, table - self.lo, field)
        count = self.read("<I", vector)
        if count * 16 > self.hi - vector - 4:
            raise self.refuse(BatchFault.METADATA_VECTOR, vector - self.lo, count)
        return vector + 4, count

    def must_be_absent(self, table: int, vtable: int, field: int) -> None:
        """Raise if a vector field is not absent or empty."""
        vector = self.follow(table, vtable, field)
        if vector is not None and (vector < 0 or self.read("<I", vector) != 0):
            raise self.refuse(BatchFault.MESSAGE_EXTRAS)

    def codec(self, table: int, vtable: int) -> int | None:
        """Return the codec of a RecordBatch table, None if it is not compressed."""
        target = self.follow(table, vtable, 3)
        if target is None:
            return None
        if target < 0:
            raise self.refuse(BatchFault.METADATA_TABLE)
        inner = self.vtable(target)
        codec = self.scalar(target, inner, 0, 1, BatchFault.METADATA_FIELD)
        method = self.scalar(target, inner, 1, 1, BatchFault.METADATA_FIELD)
        if codec >= len(CODECS) or method != 0:
            raise self.refuse(BatchFault.COMPRESSION, codec, method)
        return codec

    def record_batch(self, body_end: int) -> ArrowMessage:
        """Read the Message table, then its RecordBatch."""
        table = self.lo + self.read("<I", self.lo)
        vtable = self.vtable(table)
        version = self.scalar(table, vtable, 0, 2, BatchFault.MESSAGE_VERSION)
        if version not in (3, 4):
            raise self.refuse(BatchFault.MESSAGE_VERSION, version)
        kind = self.scalar(table, vtable, 1, 1, BatchFault.MESSAGE_KIND)
        if kind != RECORD_BATCH:
            raise self.refuse(BatchFault.MESSAGE_KIND, kind)
        body_length = self.scalar(table, vtable, 3, 8, BatchFault.BODY_LENGTH)
        if body_length != body_end - self.hi:
            raise self.refuse(BatchFault.BODY_LENGTH, body_length, body_end - self.hi)
        self.must_be_absent(table, vtable, 4)
        header = self.follow(table, vtable, 2)
        if header is None or header < 0:
            raise self.refuse(BatchFault.METADATA_FIELD, table - self.lo, 2)
        vtable = self.vtable(header)
        if not (self.place(header, vtable, 0, 8) or -1) > 0:
            raise self.refuse(BatchFault.METADATA_FIELD, header - self.lo, 0)
        length = self.scalar(header, vtable, 0, 8, BatchFault.METADATA_FIELD)
        nodes = self.structs(header, vtable, 1)
        buffers = self.structs(header, vtable, 2)
        self.must_be_absent(header, vtable, 4)
        codec = self.codec(header, vtable)
        return ArrowMessage(length, *nodes, *buffers, codec, self.hi, body_length)


def parse_message(view: Buffer, start: int, end: int, where: str = "Arrow message") -> ArrowMessage:
    """Read the metadata of the message in [start, end); the body need not be in `view`."""
    available = min(end, len(view))
    if available - start < 16:
        raise RefusedBatchError(where, BatchFault.MESSAGE_CUT, available - start, 16)
    marker, size = struct.unpack_from("<Ii", view, start)
    if marker != CONTINUATION:
        raise RefusedBatchError(where, BatchFault.MESSAGE_MARKER, marker)
    lo = start + 8
    if size < 8 or size % 8 or size > available - lo:
        raise RefusedBatchError(where, BatchFault.METADATA_LENGTH, size, available - lo)
    return _Metadata(view, lo, lo + size, where).record_batch(end)


def decode(
    view: Buffer, pos: int, header: BatchHeader, schema: pa.Schema
) -> tuple[pa.RecordBatch, npt.NDArray[np.uint8] | None]:
    """Return the Arrow batch at `pos` and its change types (None: all are appends).

    The arrays of an uncompressed body point into `view`, which must not change while they live.
    `schema` is that of the batch's schema id, or of its projection.
    """
    data = memoryview(view)
    change_types = None
    if not header.append_only:
        begin = pos + header.header_size + header.statistics_length
        change_types = np.frombuffer(data[begin : begin + header.record_count], dtype=np.uint8)
    if header.record_count == 0:
        return pa.RecordBatch.from_pylist([], schema=schema), change_types
    message = pa.py_buffer(data[pos + header.body_offset : pos + header.size])
    try:
        batch = pa.ipc.read_record_batch(message, schema)
    except (pa.ArrowException, OSError) as error:
        raise CorruptRecordError(
            f"batch at offset {header.base_offset}: its Arrow message cannot be read: {error}"
        ) from error
    if batch.num_rows != header.record_count:
        raise CorruptRecordError(
            f"batch at offset {header.base_offset}: its Arrow message has {batch.num_rows} "
            f"records, its header says {header.record_count}"
        )
    return batch, change_types
