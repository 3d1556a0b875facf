"""Writes the files of one bucket and round: rows, and position deletes of replaced rows.

Batches are collected into row groups (`ROW_GROUP_ROWS` or `write.parquet.row-group-size-bytes`,
whichever is reached first), however small they arrive; a file is closed when it has reached
`write.target-file-size-bytes`. Columns change to the lake's types on the way, a row group at a
time. A file that `complete` reports is durable.

    <data location>/<partition>/<table id>-<epoch>-<bucket>-<start>-<stop>-<attempt>-<n>.parquet

The name of an orphan tells its writer, and no two attempts share a name. Files with deleted
positions have `-deletes` at the end.
"""

from __future__ import annotations

import datetime as dt
import json
from collections.abc import Mapping
from contextlib import suppress
from typing import Any, Final, NamedTuple
from urllib.parse import quote_plus

import pyarrow as pa

from zufluss.lake.base import LakeTableError, WriterContext
from zufluss.lake.iceberg.deletes import DELETE_SCHEMA, KeyLookup, delete_table
from zufluss.lake.iceberg.files import LakeFiles
from zufluss.lake.iceberg.handle import (
    DATA,
    POSITION_DELETES,
    FileKind,
    FileWritten,
    IcebergWriteResult,
    PartitionValues,
    WriterHandle,
)
from zufluss.lake.iceberg.parquet import arrow_schema, convert_table, field_id, open_writer
from zufluss.lake.iceberg.schema import partition_values
from zufluss.lake.iceberg.statistics import FileStatistics, file_statistics
from zufluss.model.table import TableInfo

ROW_GROUP_ROWS: Final = 1_000_000
"""Rows of a row group, at most."""
_ROW_GROUP_BYTES: Final = ("write.parquet.row-group-size-bytes", 128 << 20)
_FILE_BYTES: Final = ("write.target-file-size-bytes", 512 << 20)
_EPOCH: Final = dt.date(1970, 1, 1)


def create_writer(context: WriterContext) -> IcebergWriter:
    """The writer of one bucket and round."""
    partition = partition_values(context.table, context.partition, context.bucket.bucket_id)
    return IcebergWriter(context, WriterHandle.from_bytes(context.handle), partition)


class IcebergWriter:
    """The `LakeWriter` of one bucket and round."""

    def __init__(
        self, context: WriterContext, handle: WriterHandle, partition: PartitionValues
    ) -> None:
        self._handle = handle
        self._partition = partition
        self._files = LakeFiles(handle.io, handle.location)
        self._schema = arrow_schema(handle.schema)
        _check_columns(context.table, self._schema)
        self._key = context.table.descriptor.physical_primary_key
        self._rows = RollingWriter(
            self._files, self._schema, handle.properties, _base_path(context, handle, partition)
        )
        self._deletes = RollingWriter(
            self._files,
            DELETE_SCHEMA,
            {**handle.properties, "write.metadata.metrics.default": "full"},
            _base_path(context, handle, partition),
            "-deletes",
        )
        self._about: list[str] = []

    def append(self, batch: pa.RecordBatch) -> None:
        """Rows of a log table in offset order."""
        self._rows.add(batch)

    def apply(self, upserts: pa.Table, deletes: pa.Table) -> None:
        """Folded changes of a primary-key table."""
        keys = pa.schema([self._schema.field(name) for name in self._key])
        lookup = KeyLookup(self._files, keys)
        new = convert_table(upserts.select(list(self._key)), keys)
        gone = convert_table(deletes.select(list(self._key)), keys)
        touched = pa.concat_tables([new, gone])
        for hit in lookup.find(touched, self._handle.live(self._partition)):
            self._deletes.add_table(delete_table(hit))
            self._deletes.close()
            self._about.append(hit.file.path)
        for batch in upserts.to_batches():
            self._rows.add(batch)
        self._rows.close()
        start = 0
        for path, _, statistics in self._rows.closed:
            lookup.remember(path, new.slice(start, statistics["records"]))
            start += statistics["records"]

    def complete(self) -> IcebergWriteResult:
        """Close the files and make them durable; returns a description of them."""
        self._rows.close()
        files = [self._written(DATA, closed) for closed in self._rows.closed]
        for closed, about in zip(self._deletes.closed, self._about, strict=True):
            files.append(self._written(POSITION_DELETES, closed, about))
        self._files.sync_all([file.path for file in files])
        return IcebergWriteResult(tuple(files), self._handle.base_snapshot_id)

    def abort(self) -> None:
        """Remove all written files."""
        self._rows.abort()
        self._deletes.abort()

    def _written(self, kind: FileKind, file: ClosedFile, about: str | None = None) -> FileWritten:
        return FileWritten(
            kind=kind,
            path=file.path,
            size=file.size,
            partition=self._partition,
            referenced_data_file=about,
            **file.statistics,
        )


class ClosedFile(NamedTuple):
    """A file that is finished."""

    path: str
    """Its location."""
    size: int
    """Bytes."""
    statistics: FileStatistics
    """The statistics of its footer."""


class RollingWriter:
    """Parquet files one after the other: `<base>-<n><suffix>.parquet`.

    `closed` are the finished files, in the order of their rows.
    """

    def __init__(
        self,
        files: LakeFiles,
        schema: pa.Schema,
        properties: Mapping[str, str],
        base: str,
        suffix: str = "",
    ) -> None:
        self.closed: list[ClosedFile] = []
        self._files = files
        self._schema = schema
        self._properties = properties
        self._base, self._suffix = base, suffix
        self._group_bytes = _number(properties, _ROW_GROUP_BYTES)
        self._file_bytes = _number(properties, _FILE_BYTES)
        self._waiting: list[pa.RecordBatch] = []
        self._rows = self._bytes = 0
        self._open: tuple[str, Any, Any] | None = None

    def add(self, batch: pa.RecordBatch) -> None:
        """The next rows; columns by name, in the table's or the lake's types."""
        while self._rows + batch.num_rows > ROW_GROUP_ROWS:
            room = ROW_GROUP_ROWS - self._rows
            self._take(batch.slice(0, room))
            self._flush()
            batch = batch.slice(room)
        self._take(batch)
        if self._bytes >= self._group_bytes:
            self._flush()

    def add_table(self, table: pa.Table) -> None:
        """The next rows, as a table."""
        for batch in table.to_batches():
            self.add(batch)

    def close(self) -> None:
        """Finish the file that is open; the next rows begin another."""
        self._flush()
        if self._open is None:
            return
        path, sink, writer = self._open
        writer.close()
        size = sink.tell()
        sink.close()
        self._open = None
        statistics = file_statistics(writer.writer.metadata, self._schema, self._properties)
        self.closed.append(ClosedFile(path, size, statistics))

    def abort(self) -> None:
        """Remove all files."""
        self._waiting, self._rows, self._bytes = [], 0, 0
        paths = [file.path for file in self.closed]
        if self._open is not None:
            path, sink, writer = self._open
            with suppress(OSError, pa.ArrowException):  # the error that broke it was raised already
                writer.close()
                sink.close()
            paths.append(path)
        self._open, self.closed = None, []
        for path in paths:
            self._files.remove(path)

    def _take(self, batch: pa.RecordBatch) -> None:
        if batch.num_rows:
            self._waiting.append(batch)
            self._rows += batch.num_rows
            self._bytes += batch.nbytes

    def _flush(self) -> None:
        """Write the waiting rows as a row group."""
        if not self._rows:
            return
        table = convert_table(pa.Table.from_batches(self._waiting), self._schema)
        self._waiting, rows = [], self._rows
        self._rows = self._bytes = 0
        _, sink, writer = self._opened()
        writer.write_table(table, row_group_size=rows)
        if sink.tell() >= self._file_bytes:
            self.close()

    def _opened(self) -> tuple[str, Any, Any]:
        if self._open is None:
            path = f"{self._base}-{len(self.closed)}{self._suffix}.parquet"
            sink = self._files.create(path)
            self._open = (path, sink, open_writer(sink, self._schema, self._properties))
        return self._open


def _check_columns(table: TableInfo, schema: pa.Schema) -> None:
    missing = [name for name in table.schema.names if name not in schema.names]
    if missing:
        raise LakeTableError(
            f"lake table {table.path} has no column {missing[0]!r}, which the table has; the lake "
            "table must follow the table before rows are written, start a new round"
        )


def _number(properties: Mapping[str, str], option: tuple[str, int]) -> int:
    key, default = option
    text = properties.get(key, str(default))
    if not text.isdecimal() or int(text) == 0:
        raise LakeTableError(
            f"property {key} of the lake table is {text!r}; it must be a number of bytes above 0"
        )
    return int(text)


def _base_path(context: WriterContext, handle: WriterHandle, partition: PartitionValues) -> str:
    name = (
        f"{context.table.table_id}-{context.tiering_epoch}-{context.bucket.bucket_id}-"
        f"{context.start_offset}-{context.stop_offset}-{context.attempt}"
    )
    return "/".join([handle.data_location.rstrip("/"), *_directories(handle, partition), name])


def _directories(handle: WriterHandle, partition: PartitionValues) -> list[str]:
    """`name=value` per field of the partition spec, as Iceberg writes them."""
    schema = arrow_schema(handle.schema)
    types = {field_id(field): field.type for field in schema}
    out = []
    for field, value in zip(json.loads(handle.spec)["fields"], partition, strict=True):
        kind = types[field["source-id"]] if field["transform"] == "identity" else pa.int32()
        out.append(f"{quote_plus(field['name'])}={quote_plus(_text(value, kind))}")
    return out


def _text(value: Any, kind: pa.DataType) -> str:
    if value is None:
        return "null"
    if isinstance(value, bool):
        return str(value).lower()
    if pa.types.is_date(kind):
        return (_EPOCH + dt.timedelta(days=value)).isoformat()
    return str(value)
