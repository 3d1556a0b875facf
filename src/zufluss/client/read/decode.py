"""Decodes fetched log batches to Arrow batches of the scan's columns, in the threads of a scan.

A scan reads columns of the table's current schema. Batches may have been written under an older
schema, or a newer one if the table was altered meanwhile, so columns are matched by their id; a
column that a batch lacks is null. With projection pushed down, the server sends only columns at
given positions. Positions are the same in every schema of a table, because columns are only added
at the end.

`LogDecoder.decode` takes the batches that a fetch returned for one bucket. It drops records outside
the range of the scan, applies the filter exactly, orders the columns, adds the columns about the
record, and joins small batches.

| columns about the record | added | position |
|---|---|---|
| `__offset`, `__timestamp`, `__bucket` | with offsets | last |
| `_change_type`, `_log_offset`, `_commit_timestamp` | to a changelog | first |

A change type is `+I` (new row), `-U` and `+U` (a row before and after its change), `-D` (deleted
row), or `+A` in the log of a table without primary key.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Final, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from zufluss.errors import CorruptRecordError, InvalidColumnProjectionError
from zufluss.model.expression import Expression
from zufluss.model.schema import Schema
from zufluss.model.table import TableBucket, TableInfo
from zufluss.record.arrow.message import decode
from zufluss.record.header import BatchHeader, verify_crc

JOIN_ROWS: Final = 8_192
"""Batches of a fetch with fewer rows on average are joined into one."""

OFFSET: Final = "__offset"
TIMESTAMP: Final = "__timestamp"
BUCKET: Final = "__bucket"
_METADATA_FIELDS: Final = (
    pa.field(OFFSET, pa.int64(), nullable=False),
    pa.field(TIMESTAMP, pa.timestamp("ms", tz="UTC"), nullable=False),
    pa.field(BUCKET, pa.int32(), nullable=False),
)
CHANGE_TYPE: Final = "_change_type"
LOG_OFFSET: Final = "_log_offset"
COMMIT_TIMESTAMP: Final = "_commit_timestamp"
CHANGE_TYPES: Final = ("+A", "+I", "-U", "+U", "-D")
"""Texts of the change types, by number."""
_CHANGELOG_FIELDS: Final = (
    pa.field(CHANGE_TYPE, pa.dictionary(pa.int8(), pa.string()), nullable=False),
    pa.field(LOG_OFFSET, pa.int64(), nullable=False),
    pa.field(COMMIT_TIMESTAMP, pa.timestamp("ms", tz="UTC"), nullable=False),
)

ChangeTypes: TypeAlias = npt.NDArray[np.uint8] | None
"""The change types of rows; None if all rows are appends."""


@dataclass(frozen=True, slots=True)
class FetchedChunk:
    """Whole log batches of one bucket, not decoded yet."""

    bucket: TableBucket
    """The bucket."""
    records: memoryview
    """The bytes of the batches."""
    batches: Sequence[tuple[int, BatchHeader]]
    """Position and header of each batch."""
    start: int
    """Records before this offset are dropped."""
    stop: int | None
    """Records from this offset on are dropped; None keeps all."""
    projected: bool
    """True if the server projected the columns."""
    source: str = ""
    """The remote file of the batches, whose checksums are always verified; else empty."""


class DecodedRows(NamedTuple):
    """Decoded rows, and the offset after them."""

    rows: pa.RecordBatch
    """The rows in the scan's schema."""
    next_offset: int
    """The offset after the last record of these rows."""
    offsets: pa.Array | None
    """The offset of each row; None unless the scan has a limit."""


class LogDecoder:
    """Decodes the batches of one scan. Threads may call `decode` concurrently."""

    def __init__(
        self,
        info: TableInfo,
        columns: Sequence[str] | None,
        filter: Expression | None,
        *,
        changelog: bool = False,
        with_offsets: bool = False,
        with_cuts: bool = False,
        check_crc: bool = True,
    ) -> None:
        schema = info.schema
        self._info = info
        self._names = list(schema.names) if columns is None else list(columns)
        _check_columns(self._names, schema)
        before = _CHANGELOG_FIELDS if changelog else ()
        behind = _METADATA_FIELDS if with_offsets else ()
        cuts = _METADATA_FIELDS[:1] if with_cuts and not with_offsets else ()
        self._metadata = (*before, *behind, *cuts)
        self._with_cuts = with_cuts
        self._check_crc = check_crc
        self._schemas: dict[int, Schema] = {info.schema_id: schema}
        needed = set(self._names) | (filter.columns if filter is not None else frozenset())
        self.projection = sorted(schema.indexes_of(needed))
        """Positions of the columns to read, ascending."""
        self._read = pa.schema([schema.arrow.field(i) for i in self.projection])
        self._filter = None if filter is None else filter.to_arrow(schema)
        _check_collisions(needed, self._metadata, info)
        fields = [schema.arrow.field(name) for name in self._names]
        self.schema = pa.schema([*before, *fields, *behind])
        """The Arrow schema of the rows."""
        self._aligns = info.log_format == "ARROW" and not info.has_primary_key

    @property
    def reads_all(self) -> bool:
        """Whether every column is read, so that a projection would change nothing."""
        return len(self.projection) == len(self._info.schema.columns)

    def add_schema(self, schema_id: int, schema: Schema) -> None:
        """Add another schema of the table."""
        self._schemas[schema_id] = schema

    def unknown_schemas(self, batches: Sequence[tuple[int, BatchHeader]]) -> set[int]:
        """Schema ids that must be added before these batches can be decoded."""
        return {header.schema_id for _, header in batches} - self._schemas.keys()

    def decode(self, chunk: FetchedChunk) -> list[DecodedRows]:
        """Decode a chunk in order; the last `next_offset` is the end of the chunk."""
        if self._aligns:
            chunk = replace(chunk, records=_aligned(chunk.records))
        parts = []
        for position, header in chunk.batches:
            rows, changes = self._rows(chunk, position, header)
            parts.append((self._clip(chunk, header, rows, changes), header.next_offset))
        if len(parts) > 1 and sum(rows.num_rows for rows, _ in parts) < JOIN_ROWS * len(parts):
            joined = pa.Table.from_batches([rows for rows, _ in parts]).combine_chunks()
            parts = [(_single(joined), parts[-1][1])]
        return [self._finish(rows, next_offset) for rows, next_offset in parts]

    def _rows(
        self, chunk: FetchedChunk, position: int, header: BatchHeader
    ) -> tuple[pa.RecordBatch, ChangeTypes]:
        """Decode all records of one batch: the columns to read, and the change types."""
        check = bool(chunk.source) or (self._check_crc and not chunk.projected)
        if check and not verify_crc(chunk.records, position, header):
            where = f" of {chunk.source}" if chunk.source else ""
            raise CorruptRecordError(
                f"{chunk.bucket.named(self._info.path)}: the batch at offset "
                f"{header.base_offset}{where} fails its checksum"
            )
        if header.record_count == 0:
            return pa.RecordBatch.from_pylist([], schema=self._read), None
        if self._info.log_format != "ARROW":
            rows, changes = self._decode_rows(chunk, position, header)
            return self._align(rows, header.schema_id), changes
        records = chunk.records
        if not self._aligns or (position + header.body_offset) % 8:
            records, position = _aligned_body(records, position, header)
        if chunk.projected:
            return decode(records, position, header, self._read)
        schema = self._schemas[header.schema_id].arrow
        rows, changes = decode(records, position, header, schema)
        return self._align(rows, header.schema_id), changes

    def _decode_rows(
        self, chunk: FetchedChunk, position: int, header: BatchHeader
    ) -> tuple[pa.RecordBatch, ChangeTypes]:
        """Decode a batch of INDEXED or COMPACTED rows, which contain their change types."""
        from zufluss.record.batch.row_body import decode_body  # loads the compiled kernels

        start = position + header.body_offset - header.change_types_size
        end = position + header.size
        schema = self._schemas[header.schema_id]
        log_format = self._info.log_format
        return decode_body(chunk.records, start, end, header.record_count, schema, log_format)

    def _align(self, batch: pa.RecordBatch, schema_id: int) -> pa.RecordBatch:
        """The columns to read, matched by id; null if the batch lacks them."""
        if schema_id == self._info.schema_id:
            return batch if self.reads_all else batch.select(self.projection)
        positions = {c.id: i for i, c in enumerate(self._schemas[schema_id].columns)}
        columns = []
        for index, field in zip(self.projection, self._read, strict=True):
            at = positions.get(self._info.schema.columns[index].id)
            columns.append(pa.nulls(batch.num_rows, field.type) if at is None else batch.column(at))
        return pa.RecordBatch.from_arrays(columns, schema=self._read)

    def _clip(
        self, chunk: FetchedChunk, header: BatchHeader, rows: pa.RecordBatch, changes: ChangeTypes
    ) -> pa.RecordBatch:
        """Cut rows to the range of the chunk and add the columns about the record."""
        first = max(chunk.start - header.base_offset, 0)
        stop = header.next_offset if chunk.stop is None else chunk.stop
        last = max(min(rows.num_rows, stop - header.base_offset), first)
        if first or last < rows.num_rows:
            rows = rows.slice(first, last - first)
        if not self._metadata:
            return rows
        base = header.base_offset + first
        kinds = None if changes is None else changes[first:last]
        arrays = [
            _about(field, rows.num_rows, base, header.timestamp, chunk.bucket.bucket_id, kinds)
            for field in self._metadata
        ]
        return pa.RecordBatch.from_arrays(
            [*rows.columns, *arrays], schema=pa.schema([*self._read, *self._metadata])
        )

    def _finish(self, rows: pa.RecordBatch, next_offset: int) -> DecodedRows:
        if self._filter is not None and rows.num_rows:
            rows = _single(pa.Table.from_batches([rows]).filter(self._filter))
        offsets = rows.column(OFFSET) if self._with_cuts else None
        if rows.schema.names != self.schema.names:
            rows = rows.select(self.schema.names)
        return DecodedRows(rows, next_offset, offsets)


def _about(
    field: pa.Field, count: int, base: int, timestamp: int, bucket: int, changes: ChangeTypes
) -> pa.Array:
    """A column about `count` records from offset `base` on."""
    if field.name in (OFFSET, LOG_OFFSET):
        return pa.array(np.arange(base, base + count, dtype=np.int64))
    if field.name in (TIMESTAMP, COMMIT_TIMESTAMP):
        return pa.array(np.full(count, timestamp, dtype=np.int64)).cast(field.type)
    if field.name == BUCKET:
        return pa.array(np.full(count, bucket, dtype=np.int32))
    kinds = np.zeros(count, np.int8) if changes is None else changes.astype(np.int8)
    if count and kinds.max() >= len(CHANGE_TYPES):
        raise CorruptRecordError(f"change type {kinds.max()} is unknown, 0 to 4 are allowed")
    return pa.DictionaryArray.from_arrays(kinds, pa.array(CHANGE_TYPES))


def _single(table: pa.Table) -> pa.RecordBatch:
    """Join the chunks of a table to one batch."""
    batches = table.combine_chunks().to_batches()
    return batches[0] if batches else pa.RecordBatch.from_pylist([], schema=table.schema)


def _aligned(records: memoryview) -> memoryview:
    """Copy the records to an address divisible by 8, which consumers of Arrow expect.

    The length of most batches is a multiple of 8, so one copy aligns all of them.
    """
    array = np.frombuffer(records, dtype=np.uint8)
    if array.ctypes.data % 8 == 0:
        return records
    return array.copy().data


def _aligned_body(
    records: memoryview, position: int, header: BatchHeader
) -> tuple[memoryview, int]:
    """Copy one batch so that its body is aligned; the header before it has any length."""
    batch = np.frombuffer(records, dtype=np.uint8)[position : position + header.size]
    if (batch.ctypes.data + header.body_offset) % 8 == 0:
        return records, position
    copy = np.empty(header.size + 8, dtype=np.uint8)
    start = -(copy.ctypes.data + header.body_offset) % 8
    copy[start : start + header.size] = batch
    return copy.data, start


def _check_columns(names: Sequence[str], schema: Schema) -> None:
    if not names:
        raise InvalidColumnProjectionError("a scan reads at least one column; none is given")
    unknown = [name for name in names if name not in schema]
    if unknown or len(set(names)) < len(names):
        raise InvalidColumnProjectionError(
            f"columns {', '.join(names)} must be different columns of the table; it has "
            f"{', '.join(schema.names)}"
        )


def _check_collisions(names: Iterable[str], added: Iterable[pa.Field], info: TableInfo) -> None:
    taken = sorted(set(names) & {field.name for field in added})
    if taken:
        raise InvalidColumnProjectionError(
            f"table {info.path} has a column {taken[0]!r} of its own, which this scan adds; give "
            "columns without it"
        )
