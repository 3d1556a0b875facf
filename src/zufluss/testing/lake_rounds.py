"""Rounds of tiering played by hand: what the service does with a lake format, without a service.

`LakeRounds` is one table and its lake side. It cuts rows into buckets and offsets as a server
would, gives each bucket to a writer of its own, sends every result through its serde, commits, and
remembers what the lake must hold now. Tests compare that with what readers find:

    lake = LakeRounds(factory, lake_table("iceberg", "id INT, name STRING"), properties)
    lake.prepare()
    lake.commit(lake.write(pa.table({"id": [1], "name": ["a"]})))
    assert plain_rows(found) == lake.contents()

Nothing here knows a format. Memory and time follow the number of rows, which tests keep small.
"""

from __future__ import annotations

import datetime as dt
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, TypeAlias

import numpy as np
import pyarrow as pa

from zufluss.lake.base import (
    COMMIT_USER,
    COMMIT_USER_KEY,
    EPOCH_KEY,
    OFFSETS_KEY,
    OFFSETS_PATH_KEY,
    ROUND_KEY,
    CommitResult,
    CommittedSnapshot,
    CommitterContext,
    LakeCommitter,
    LakeMaintenance,
    LakeReader,
    LakeTieringFactory,
    WriterContext,
    offsets_to_json,
    table_identity,
)
from zufluss.model.lake import (
    BUCKET_COLUMN,
    OFFSET_COLUMN,
    SYSTEM_COLUMNS,
    TIMESTAMP_COLUMN,
)
from zufluss.model.partition import spec_of
from zufluss.model.schema import Schema
from zufluss.model.table import TableBucket, TableDescriptor, TableInfo, TablePath
from zufluss.record.keys.encoding import bucket_assign

CREATED_MS = 1_700_000_000_000
"""When tables of the suite were created, and the timestamp of offset 0."""
NEWEST = -1
"""The newest snapshot of ours, as the expectation of a commit."""
SYSTEM_FIELDS = (
    pa.field(BUCKET_COLUMN, pa.int32(), nullable=False),
    pa.field(OFFSET_COLUMN, pa.int64(), nullable=False),
    pa.field(TIMESTAMP_COLUMN, pa.timestamp("ms", tz="UTC"), nullable=False),
)
"""System columns as the tiering service hands them to a writer."""

Row: TypeAlias = dict[str, Any]
AnyFactory: TypeAlias = LakeTieringFactory[Any, Any]


def lake_table(
    format: str,
    columns: str,
    *,
    name: str = "t",
    table_id: int = 1,
    created_time: int = CREATED_MS,
    buckets: int = 2,
    bucket_keys: Sequence[str] | None = None,
    partition_keys: Sequence[str] = (),
    custom_properties: Mapping[str, str] | None = None,
) -> TableInfo:
    """A table with tiering enabled; `columns` as in SQL, `PRIMARY KEY (…)` included."""
    descriptor = TableDescriptor(
        schema=Schema.of(columns),
        partition_keys=tuple(partition_keys),
        bucket_keys=() if bucket_keys is None else tuple(bucket_keys),
        bucket_count=buckets,
        properties={"table.datalake.enabled": "true", "table.datalake.format": format},
        custom_properties=custom_properties or {},
    )
    if bucket_keys is None:
        descriptor = replace(descriptor, bucket_keys=descriptor.physical_primary_key)
    path = TablePath("conformance", name)
    return TableInfo(path, table_id, 1, descriptor, created_time, created_time)


def plain_rows(rows: pa.Table) -> list[Row]:
    """Rows as Python values that compare equal whatever reader they came through, in one order."""
    return sorted(({k: _plain(v) for k, v in row.items()} for row in rows.to_pylist()), key=_order)


def _order(row: Row) -> str:
    return repr(sorted(row.items()))


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _plain(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(_plain(inner) for inner in value)
    if isinstance(value, dt.datetime):
        plain = value.to_pydatetime() if hasattr(value, "to_pydatetime") else value
        return plain if plain.tzinfo is None else plain.astimezone(dt.UTC)
    if isinstance(value, float) and math.isnan(value):
        return "NaN"
    return value


@dataclass(frozen=True)
class Written:
    """Results of writers, and the rows they stand for."""

    results: tuple[Any, ...]
    """Write results, one per bucket, as they came through their serde."""
    rows: pa.Table
    """Rows appended or upserted, with system columns."""
    deletes: pa.Table | None = None
    """Keys deleted."""
    stops: Mapping[TableBucket, int] = field(default_factory=dict)
    """The offset after each bucket's range."""

    def __add__(self, other: Written) -> Written:
        deletes = [d for d in (self.deletes, other.deletes) if d is not None]
        return Written(
            self.results + other.results,
            pa.concat_tables([self.rows, other.rows]),
            pa.concat_tables(deletes) if deletes else None,
            {**self.stops, **other.stops},
        )


class LakeRounds:
    """One table, its lake side, and what that must hold."""

    def __init__(
        self, factory: AnyFactory, table: TableInfo, properties: Mapping[str, str]
    ) -> None:
        self.factory = factory
        self.table = table
        self.properties = dict(properties)
        self.offsets: dict[TableBucket, int] = {}
        self.rounds = 0
        self._log: list[Row] = []
        self._keyed: dict[tuple[Any, ...], Row] = {}
        self._partition_ids: dict[str, int] = {}
        self._fresh: set[str] = set()

    def contents(self) -> list[Row]:
        """What the lake must hold after the commits so far, in the order of `plain_rows`."""
        return sorted([*self._log, *self._keyed.values()], key=_order)

    @property
    def context(self) -> CommitterContext:
        """The context of committers, readers and maintenance."""
        return CommitterContext(self.table, self.properties)

    @contextmanager
    def committer(self) -> Iterator[LakeCommitter[Any, Any]]:
        """A committer, closed afterwards."""
        with closing(self.factory.create_committer(self.context)) as committer:
            yield committer

    @contextmanager
    def reader(self) -> Iterator[LakeReader]:
        """A reader, closed afterwards."""
        with closing(self.factory.create_reader(self.context)) as reader:
            yield reader

    @contextmanager
    def maintenance(self) -> Iterator[LakeMaintenance]:
        """Housekeeping, closed afterwards."""
        with closing(self.factory.create_maintenance(self.context)) as maintenance:
            yield maintenance

    def prepare(self) -> bytes:
        """Make the lake table fit; the handle for writers."""
        with self.committer() as committer:
            committer.prepare_table()
            return committer.writer_handle(self._fresh)

    def newest(self) -> CommittedSnapshot | None:
        """The newest snapshot of ours."""
        with self.committer() as committer:
            return committer.newest()

    def newest_id(self) -> int | None:
        """Its id."""
        newest = self.newest()
        return None if newest is None else newest.snapshot_id

    def write(
        self,
        rows: pa.Table,
        *,
        partition: str | None = None,
        handle: bytes | None = None,
        attempt: str = "a0",
    ) -> Written:
        """Rows of a log table into files, a writer per bucket; nothing is committed."""
        results, parts, stops = [], [self.with_system_columns(rows.slice(0, 0), 0, 0)], {}
        for bucket, part in self._by_bucket(rows, partition):
            context = self.writer_context(bucket, partition, part.num_rows, handle, attempt)
            part = self.with_system_columns(part, bucket.bucket_id, context.start_offset)
            writer = self.factory.create_writer(context)
            for batch in part.to_batches(max_chunksize=max(1, part.num_rows // 2)):
                writer.append(batch)
            results.append(self._travelled(writer.complete()))
            parts.append(part)
            stops[bucket] = context.stop_offset
        return Written(tuple(results), pa.concat_tables(parts), stops=stops)

    def change(
        self,
        upserts: pa.Table,
        deletes: pa.Table | None = None,
        *,
        partition: str | None = None,
        handle: bytes | None = None,
        attempt: str = "a0",
    ) -> Written:
        """Upserts (all columns) and deletes (key columns) of a primary-key table into files."""
        keys = list(self.table.schema.primary_key)
        gone = deletes.select(keys) if deletes is not None else upserts.select(keys).slice(0, 0)
        new_parts = dict(self._by_bucket(upserts, partition))
        gone_parts = dict(self._by_bucket(gone, partition))
        results, parts, stops = [], [self.with_system_columns(upserts.slice(0, 0), 0, 0)], {}
        for bucket in sorted({*new_parts, *gone_parts}, key=str):
            part = new_parts.get(bucket, upserts.slice(0, 0))
            dead = gone_parts.get(bucket, gone.slice(0, 0))
            size = part.num_rows + dead.num_rows
            context = self.writer_context(bucket, partition, size, handle, attempt)
            part = self.with_system_columns(part, bucket.bucket_id, context.start_offset)
            at = np.arange(dead.num_rows) + context.start_offset + part.num_rows
            writer = self.factory.create_writer(context)
            writer.apply(part, dead.append_column(SYSTEM_FIELDS[1], pa.array(at)))
            results.append(self._travelled(writer.complete()))
            parts.append(part)
            stops[bucket] = context.stop_offset
        return Written(tuple(results), pa.concat_tables(parts), gone, stops)

    def commit(self, written: Written, expected: int | None = NEWEST) -> CommitResult:
        """One snapshot of what was written; `expected` is the newest of ours unless given."""
        if expected == NEWEST:
            expected = self.newest_id()
        properties = self.round_properties({**self.offsets, **written.stops})
        with self.committer() as committer:
            committable = committer.to_committable(written.results)
            serde = self.factory.committable_serde
            committable = serde.loads(serde.dumps(committable))
            result = committer.commit(committable, properties, expected, self._fresh)
        self._forget(self._fresh)
        self._remember(written)
        return result

    def recreate(self, partition: str) -> None:
        """The partition is dropped and created again, and written by the next commit."""
        self._partition_ids[partition] = max(self._partition_ids.values()) + 1
        self._fresh.add(partition)

    def round_properties(self, offsets: Mapping[TableBucket, int]) -> dict[str, str]:
        """The properties of the next commit, as the service gives them."""
        return {
            COMMIT_USER_KEY: COMMIT_USER,
            OFFSETS_PATH_KEY: f"file:///offsets/{self.rounds}.json",
            OFFSETS_KEY: json.dumps(offsets_to_json(offsets)),
            EPOCH_KEY: "1",
            ROUND_KEY: f"round-{self.rounds}",
            **table_identity(self.table),
        }

    def writer_context(
        self, bucket: TableBucket, partition: str | None, rows: int, handle: bytes | None, name: str
    ) -> WriterContext:
        """The context of one writer, for a range of this many offsets."""
        start = self.offsets.get(bucket, 0)
        return WriterContext(
            table=self.table,
            handle=self.prepare() if handle is None else handle,
            bucket=bucket,
            partition=partition,
            start_offset=start,
            stop_offset=start + rows,
            tiering_epoch=1,
            round_id=f"round-{self.rounds}",
            attempt=f"{self.rounds}{name}",
        )

    def with_system_columns(self, rows: pa.Table, bucket: int, start: int) -> pa.Table:
        """The rows as a writer gets them."""
        offsets = np.arange(rows.num_rows, dtype=np.int64) + start
        values = [np.full(rows.num_rows, bucket, np.int32), offsets, offsets + CREATED_MS]
        columns = [pa.array(v).cast(f.type) for v, f in zip(values, SYSTEM_FIELDS, strict=True)]
        schema = pa.schema([*self.table.schema.arrow, *SYSTEM_FIELDS])
        own = [rows[field.name].cast(field.type) for field in self.table.schema.arrow]
        return pa.Table.from_arrays([*own, *columns], schema=schema)

    def _by_bucket(
        self, rows: pa.Table, partition: str | None
    ) -> Iterator[tuple[TableBucket, pa.Table]]:
        """The rows of each bucket that has some: by its key, else in turn."""
        if self.table.bucket_keys:
            key_rows = rows.select(list(self.table.bucket_keys)).combine_chunks()
            batches = key_rows.to_batches() or [pa.RecordBatch.from_pylist([], key_rows.schema)]
            buckets = bucket_assign(batches[0], self.table)
        else:
            buckets = np.arange(rows.num_rows) % self.table.bucket_count
        ids = self._partition_ids
        partition_id = None if partition is None else ids.setdefault(partition, len(ids) + 10)
        for bucket in np.unique(buckets):
            where = TableBucket(self.table.table_id, partition_id, int(bucket))
            yield where, rows.filter(pa.array(buckets == bucket))

    def _travelled(self, result: Any) -> Any:
        serde = self.factory.write_result_serde
        return serde.loads(serde.dumps(result))

    def _forget(self, partitions: set[str]) -> None:
        """The rows of these partitions are gone from the newest snapshot."""
        keys = self.table.partition_keys
        gone = [{key: spec_of(keys, name)[key] for key in keys} for name in partitions]

        def lives(row: Row) -> bool:
            return {key: row[key] for key in keys} not in gone

        self._log = [row for row in self._log if lives(row)]
        self._keyed = {key: row for key, row in self._keyed.items() if lives(row)}
        self._fresh = set()

    def _remember(self, written: Written) -> None:
        self.rounds += 1
        self.offsets.update(written.stops)
        rows = plain_rows(written.rows)
        if not self.table.has_primary_key:
            self._log += rows
            return
        keys = self.table.schema.primary_key
        for row in [] if written.deletes is None else plain_rows(written.deletes):
            self._keyed.pop(tuple(row[key] for key in keys), None)
        self._keyed.update({tuple(row[key] for key in keys): row for row in rows})

    def own_rows(self, snapshot_id: int | None = None, **pruning: Any) -> list[Row]:
        """All columns of a snapshot, the newest unless given, by the format's own reader."""
        names = [*self.table.schema.names, *SYSTEM_COLUMNS]
        snapshot = self.newest_id() if snapshot_id is None else snapshot_id
        assert snapshot is not None
        with self.reader() as reader:
            batches = list(reader.read(reader.plan(snapshot, **pruning), names))
        own = self.table.schema.arrow
        for batch in batches:
            assert [f.type for f in batch.schema][: len(own)] == own.types
        return plain_rows(pa.Table.from_batches(batches)) if batches else []

    def evolved(self, table: TableInfo) -> None:
        """The table has another schema now: rows so far get NULL in the columns that are new."""
        for row in [*self._log, *self._keyed.values()]:
            row.update({name: row.get(name) for name in table.schema.names})
        self.table = table
