"""Refuses every batch that a reader could not read, before a byte of it is written.

A `BatchChecker` belongs to one table and checks the batches of a produce request for one bucket.
One kernel call checks an uncompressed Arrow batch. Of a compressed one the kernel checks the
structure and the claimed sizes, then pyarrow decompresses and validates the content.
`batch/row_body.py` checks the rows of INDEXED and COMPACTED tables.
`tests/record/batch/plain_check.py` has the rules. An unknown schema id raises
`SchemaNotExistError`, everything else a `CorruptRecordError` that names the batch, the column and
the fault. One bad batch refuses all batches of its bucket.

NOT NULL is enforced here too: Arrow readers in other languages fail on a NULL in a column that
their schema declares non-nullable, and would never get past that batch.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt
import pyarrow as pa
from crc32c import crc32c

from zufluss.errors import CorruptRecordError, RecordTooLargeError, SchemaNotExistError
from zufluss.model.schema import Schema
from zufluss.record.arrow.layout import MASKED, Layout
from zufluss.record.arrow.message import LZ4_FRAME, parse_message
from zufluss.record.batch.row_body import check_body
from zufluss.record.fault import BatchFault, RefusedBatchError
from zufluss.record.header import CRC_OFFSETS
from zufluss.record.kernels.batch_check import check_batch
from zufluss.record.kernels.lz4 import frame_fault
from zufluss.record.kernels.produce import check_produce
from zufluss.record.rows.codec import RowCodec

ByteArray: TypeAlias = Any
"""A numpy array of uint8, writable or not."""

BATCHES_MAX = 1000
"""Batches that one bucket entry of a request may have; clients send one."""
INLINE_BYTES_MAX = 64 * 1024
"""Compressed messages up to this size are decompressed without pyarrow's threads."""

_ONE_THREAD = pa.ipc.IpcReadOptions(use_threads=False)
_COVERED = tuple(offset + 4 for offset in CRC_OFFSETS)
_FRAMELESS = (
    BatchFault.HEADER_CUT,
    BatchFault.MAGIC,
    BatchFault.LENGTH_TOO_SMALL,
    BatchFault.LENGTH_TOO_LARGE,
)
_NO_PROGRAM = np.full(8, -(2**31), dtype=np.int64)
"""The program of no schema: schema ids have 16 bits, so the first batch looks up its schema."""


class CheckedBatch(NamedTuple):
    """A batch that may be written."""

    start: int
    """Position of the batch in the buffer."""
    end: int
    """Position after the batch."""
    magic: int
    """Header version."""
    schema_id: int
    """Schema of its records."""
    record_count: int
    """Number of records."""
    last_offset_delta: int
    """Last offset minus base offset."""
    writer_id: int
    """Idempotent writer, −1 for none."""
    batch_sequence: int
    """Sequence within the writer, −1 for none."""


class ContentCheck(NamedTuple):
    """The compressed content of a batch, which is still to be decompressed and validated."""

    start: int
    """Position of the Arrow message in the buffer."""
    end: int
    """Position after it."""
    layout: Layout
    """Layout of its schema."""
    where: str
    """The batch, for errors."""

    def run(self, buf: ByteArray) -> None:
        """Decompress and validate; raises `CorruptRecordError`. For any thread."""
        _check_content(buf[self.start : self.end], self.layout, self.where)


class LaterChecks:
    """Checks of compressed content that the caller does later, because they take long."""

    def __init__(self, bytes_max: int) -> None:
        """Content of up to `bytes_max` bytes together is checked at once."""
        self._bytes_left = bytes_max
        self.checks: list[ContentCheck] = []
        """The checks that are left to do."""

    def add(self, check: ContentCheck, size: int) -> bool:
        """Whether a check of `size` uncompressed bytes was left to be done later."""
        self._bytes_left -= size
        if self._bytes_left >= 0:
            return False
        self.checks.append(check)
        return True


class _Known(NamedTuple):
    """A schema in the forms that the checker needs."""

    layout: Layout
    program: npt.NDArray[np.int64]
    rows: RowCodec | None


class BatchChecker:
    """Checks batches before they are appended to the log of one table.

    `schemas` returns the table's schema of an id, or None. `changelog` allows change types and
    empty batches, which only the server itself writes, to the log of a primary-key table.
    """

    def __init__(
        self, schemas: Callable[[int], Schema | None], log_format: str, *, changelog: bool = False
    ) -> None:
        self._schemas = schemas
        self._log_format = log_format
        self._changelog = changelog
        self._known: dict[int, _Known] = {}
        self._program: npt.NDArray[np.int64] = _NO_PROGRAM

    def __repr__(self) -> str:
        return f"BatchChecker({self._log_format}, schemas {sorted(self._known)})"

    def check(
        self, buf: ByteArray, start: int, end: int, later: LaterChecks | None = None
    ) -> tuple[CheckedBatch, ...]:
        """Check the batches that fill buf[start:end] exactly; raises if there is none.

        Compressed content that takes long to check goes to `later`, if that is given: the batches
        come from a request then, and their number has a limit.
        """
        result = check_batch(buf, start, end, self._program, self._changelog)
        if (
            result[0] == 0
            and result[5] == end
            and crc32c(buf[start + _COVERED[result[6]] : end]) == result[4]
        ):
            return (CheckedBatch._make((start, *result[5:])),)
        return self._check_all(buf, start, end, result, later)

    def check_produce(
        self, buf: ByteArray, view: memoryview, start: int, end: int, table_id: int
    ) -> tuple[int, ...] | None:
        """Scan a usual small PRODUCE_LOG request of this table and check its batch.

        Returns the fields of a `CheckedBatch`, its CRC, partition id (-1 for none), bucket id and
        timeout_ms. Returns None for a request that is not usual or has a fault: the caller scans it
        and calls `check`, which raises the fault.
        """
        result: tuple[int, ...] = check_produce(buf, start, end, table_id, self._program)
        at = result[0]
        if at < 0 or crc32c(view[at + _COVERED[result[2]] : end]) != result[8]:
            return None
        return result

    def _check_all(
        self,
        buf: ByteArray,
        start: int,
        end: int,
        result: tuple[int, ...],
        later: LaterChecks | None,
    ) -> tuple[CheckedBatch, ...]:
        """Check batch after batch; `result` is the kernel's result for the first."""
        checked: list[CheckedBatch] = []
        while True:
            batch = self._settle(buf, start, end, result, len(checked), later)
            checked.append(batch)
            start = batch.end
            if start == end:
                return tuple(checked)
            if later is not None and len(checked) >= BATCHES_MAX:
                raise RecordTooLargeError(
                    f"a bucket entry has more than {BATCHES_MAX} batches; send larger batches, or "
                    "several requests"
                )
            result = check_batch(buf, start, end, self._program, self._changelog)

    def _settle(
        self,
        buf: ByteArray,
        start: int,
        end: int,
        result: tuple[int, ...],
        index: int,
        later: LaterChecks | None,
    ) -> CheckedBatch:
        """Complete the check of one batch after the kernel; raises its fault."""
        where = f"batch {index} of the bucket entry"
        fault = BatchFault(result[0])
        if fault not in _FRAMELESS:
            _check_crc(buf, start, result, where)
        if fault == BatchFault.OTHER_SCHEMA:
            self._program = self._look_up(result[7], where).program
            result = check_batch(buf, start, end, self._program, self._changelog)
            fault = BatchFault(result[0])
        if fault > BatchFault.ROWS:
            raise RefusedBatchError(where, fault, result[2], result[3], self._name(result))
        batch = CheckedBatch._make((start, *result[5:]))
        if fault == BatchFault.COMPRESSED:
            layout = self._known[batch.schema_id].layout
            content = ContentCheck(result[2], batch.end, layout, where)
            if later is None or not later.add(content, result[3]):
                content.run(buf)
        elif fault == BatchFault.ROWS:
            self._check_rows(buf, result[2], batch, where)
        return batch

    def _check_rows(self, buf: ByteArray, body: int, batch: CheckedBatch, where: str) -> None:
        codec = self._known[batch.schema_id].rows
        assert codec is not None  # only a program of rows lets the kernel answer ROWS
        try:
            check_body(buf, body, batch.end, batch.record_count, codec)
        except CorruptRecordError as error:
            raise CorruptRecordError(f"{where}: {error.message}") from error

    def _look_up(self, schema_id: int, where: str) -> _Known:
        """Return the schema of an id in the kernel's form."""
        known = self._known.get(schema_id)
        if known is None:
            schema = self._schemas(schema_id)
            if schema is None:
                raise SchemaNotExistError(
                    f"{where}: the table has no schema {schema_id}; refresh the table's metadata"
                )
            layout = Layout.of(schema.arrow)
            codec = _row_codec(schema, self._log_format)
            program = layout.program(schema_id, rows=codec is not None)
            known = self._known[schema_id] = _Known(layout, program, codec)
        return known

    def _name(self, result: tuple[int, ...]) -> str:
        """Return the column of a fault, empty if it concerns none."""
        known = self._known.get(result[7])
        return known.layout.nodes[result[1]].path if known and result[1] >= 0 else ""


def _row_codec(schema: Schema, log_format: str) -> RowCodec | None:
    """Return the codec of a log of rows, None for a log of Arrow batches."""
    if log_format == "INDEXED":
        return RowCodec(schema, "INDEXED")
    return RowCodec(schema, "COMPACTED") if log_format == "COMPACTED" else None


def _check_crc(buf: ByteArray, start: int, result: tuple[int, ...], where: str) -> None:
    computed = crc32c(buf[start + _COVERED[result[6]] : result[5]])
    if computed != result[4]:
        raise RefusedBatchError(where, BatchFault.CRC, result[4], computed)


def _decompress(message: ByteArray, layout: Layout) -> pa.RecordBatch:
    """Decompress a message with pyarrow, small ones without its threads, which cost more there."""
    if len(message) > INLINE_BYTES_MAX:
        return pa.ipc.read_record_batch(pa.py_buffer(message), layout.schema)
    stream = pa.py_buffer(layout.schema_message + message.tobytes())
    return pa.ipc.open_stream(stream, options=_ONE_THREAD).read_next_batch()


def _check_content(message: ByteArray, layout: Layout, where: str) -> None:
    """Decompress an Arrow message whose claimed sizes have been checked, and validate it."""
    try:
        batch = _decompress(message, layout)
        batch.validate(full=True)
    except (pa.ArrowException, OSError) as error:
        raise CorruptRecordError(f"{where}: its compressed Arrow body is bad: {error}") from error
    _check_frames(message, where)
    if any(node.nulls == MASKED for node in layout.nodes):
        for name, column in zip(batch.schema.names, batch.columns, strict=True):
            _check_masked(column, name, where)


def _check_frames(message: ByteArray, where: str) -> None:
    """Refuse LZ4 frames that pyarrow accepts and other readers do not (`kernels/lz4.py`)."""
    parsed = parse_message(memoryview(message), 0, len(message), where)
    if parsed.codec != LZ4_FRAME:
        return
    places = struct.iter_unpack("<qq", _structs(message, parsed.buffers_pos, parsed.buffer_count))
    for index, (offset, length) in enumerate(places):
        start = parsed.body_start + offset
        if length <= 8 or int.from_bytes(message[start : start + 8], "little", signed=True) <= 0:
            continue  # empty, or stored as it is
        fault = frame_fault(message, start + 8, start + length)
        if fault >= 0:
            raise CorruptRecordError(
                f"{where}: the LZ4 frame of buffer {index} is malformed at its byte "
                f"{fault - start - 8}; some readers could not decompress it"
            )


def _structs(message: ByteArray, pos: int, count: int) -> memoryview:
    return memoryview(message)[pos : pos + 16 * count]


def _check_masked(array: Any, path: str, where: str) -> None:
    """Refuse a null in a NOT NULL field of a row that is not null itself."""
    dtype = array.type
    if pa.types.is_struct(dtype):
        present = array.is_valid()
        for i, child in enumerate(dtype):
            values = array.field(i)
            nulls = pa.compute.and_(present, values.is_null()).true_count
            if nulls and not child.nullable:
                name = f"{path}.{child.name}"
                raise RefusedBatchError(where, BatchFault.NULL_FORBIDDEN, nulls, name=name)
            _check_masked(values, f"{path}.{child.name}", where)
    elif pa.types.is_map(dtype):
        _check_masked(array.keys, f"{path}.key", where)
        _check_masked(array.items, f"{path}.value", where)
    elif pa.types.is_list(dtype):
        _check_masked(array.values, f"{path}.element", where)
