"""Fetched log batches into Arrow batches of what the scan asked for, for the threads of a scan.

A scan reads columns of the table's current schema. Batches may have been written under an older one
(or a newer one, if the table was altered meanwhile), so columns are matched by their id and one
that a batch lacks is null. With projection pushed down the server sends only columns at the given
positions; positions are the same in every schema of a table, because columns are only ever added
at the end.

`LogDecoder.decode` takes what a fetch returned for one bucket: it drops records outside the wanted
range, applies the filter exactly, puts the columns in the order asked for, adds the columns about
the record, and joins batches that are too small to be handed out one by one.

| columns about the record | what | where they stand |
|---|---|---|
| `__offset`, `__timestamp`, `__bucket` | with offsets | behind the others |
| `_change_type`, `_log_offset`, `_commit_timestamp` | a changelog | before the others |

A change type is `+I` (new row), `-U` and `+U` (a row before and after its change), `-D` (a row that
was deleted), or `+A` in the log of a table without primary key.
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
from zufluss.record.rows.formats import decode_body

JOIN_ROWS: Final = 8_192
"""Batches of a fetch with fewer rows than this on average are joined into one."""

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
"""The texts of change types by their number."""
_CHANGELOG_FIELDS: Final = (
    pa.field(CHANGE_TYPE, pa.dictionary(pa.int8(), pa.string()), nullable=False),
    pa.field(LOG_OFFSET, pa.int64(), nullable=False),
    pa.field(COMMIT_TIMESTAMP, pa.timestamp("ms", tz="UTC"), nullable=False),
)

ChangeTypes: TypeAlias = npt.NDArray[np.uint8] | None
"""The change types of rows, None if all of them are appends."""


@dataclass(frozen=True, slots=True)
class FetchedChunk:
    """Whole log batches of one bucket, as fetched."""

    bucket: TableBucket
    """Where they come from."""
    records: memoryview
    """The bytes they lie in."""
    batches: Sequence[tuple[int, BatchHeader]]
    """Position and header of each."""
    start: int
    """Records before this offset are not wanted."""
    stop: int | None
    """Nor are records from this offset on."""
    projected: bool
    """The server was asked to project."""
    source: str = ""
    """The remote file they come from; then their checksums are always verified."""


class DecodedRows(NamedTuple):
    """Rows to hand out, and where to go on after them."""

    rows: pa.RecordBatch
    """In the scan's schema."""
    next_offset: int
    """The offset after the last record these rows come from."""
    offsets: pa.Array | None
    """The offset of each row, None unless the scan may cut the rows."""


class LogDecoder:
    """What a scan reads, and how; `decode` may run in several threads at a time."""

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
        """Positions of the columns that are read, ascending."""
        self._read = pa.schema([schema.arrow.field(i) for i in self.projection])
        self._filter = None if filter is None else filter.to_arrow(schema)
        _check_collisions(needed, self._metadata, info)
        fields = [schema.arrow.field(name) for name in self._names]
        self.schema = pa.schema([*before, *fields, *behind])
        """The Arrow schema of the rows."""
        self._aligns = info.log_format == "ARROW" and not info.has_primary_key

    @property
    def reads_all(self) -> bool:
        """Every column is read, so that a projection would change nothing."""
        return len(self.projection) == len(self._info.schema.columns)

    def add_schema(self, schema_id: int, schema: Schema) -> None:
        """Make another schema of the table known."""
        self._schemas[schema_id] = schema

    def unknown_schemas(self, batches: Sequence[tuple[int, BatchHeader]]) -> set[int]:
        """Schema ids that must be made known before these batches can be decoded."""
        return {header.schema_id for _, header in batches} - self._schemas.keys()

    def decode(self, chunk: FetchedChunk) -> list[DecodedRows]:
        """The rows of a chunk, in order; the last `next_offset` is the end of the chunk."""
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
        """The columns that are read, of all records of one batch, and their change types."""
        check = bool(chunk.source) or (self._check_crc and not chunk.projected)
        if check and not verify_crc(chunk.records, position, header):
            where = f" of {chunk.source}" if chunk.source else ""
            raise CorruptRecordError(
                f"{chunk.bucket}: the batch at offset {header.base_offset}{where} fails its "
                "checksum"
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
        """Rows have their change types themselves; none stand before them."""
        start = position + header.body_offset - header.change_types_size
        end = position + header.size
        schema = self._schemas[header.schema_id]
        log_format = self._info.log_format
        return decode_body(chunk.records, start, end, header.record_count, schema, log_format)

    def _align(self, batch: pa.RecordBatch, schema_id: int) -> pa.RecordBatch:
        """The columns that are read, by id, null where the batch's schema has none."""
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
        """The rows within the wanted range, with their metadata columns where needed."""
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
    """A metadata column of `count` records from offset `base` on."""
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
    """The one batch of a table whose chunks are joined."""
    batches = table.combine_chunks().to_batches()
    return batches[0] if batches else pa.RecordBatch.from_pylist([], schema=table.schema)


def _aligned(records: memoryview) -> memoryview:
    """The records at an address that Arrow's consumers like; columns not packed point there.

    Most batches are as long as a multiple of 8, so one copy serves all of them.
    """
    array = np.frombuffer(records, dtype=np.uint8)
    if array.ctypes.data % 8 == 0:
        return records
    return array.copy().data


def _aligned_body(
    records: memoryview, position: int, header: BatchHeader
) -> tuple[memoryview, int]:
    """The batch at a place where its body is aligned: what stands before it has any length."""
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
