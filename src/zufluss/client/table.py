"""One table: where writers, scans and lookups begin."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, Final, Literal, get_args, overload

import pyarrow as pa

from zufluss.client.core.catalog import Partition
from zufluss.client.core.cluster import ClusterConnection
from zufluss.client.core.durations import Duration
from zufluss.client.keyed.head import head_of_keys
from zufluss.client.keyed.lookup import AsyncLookup, KeyForm, Missing, Row, SingleKey
from zufluss.client.keyed.scan import AsyncKvScan
from zufluss.client.keyed.snapshot_reader import AsyncKvSnapshotReader, open_snapshot
from zufluss.client.lease.lease import AsyncKvSnapshotLease
from zufluss.client.producer.exactly_once import (
    AsyncExactlyOnceWriter,
    AsyncTaskWriter,
    UndoBy,
    open_append_producer,
    open_exactly_once,
    task_writer,
)
from zufluss.client.producer.handle import ProducerHandle
from zufluss.client.producer.state import States
from zufluss.client.producer.undo import OnUndo
from zufluss.client.read.log_scan import AsyncLogScan
from zufluss.client.read.scan import Offsets, Source, Start, Stop
from zufluss.client.read.union_scan import AsyncUnionScan
from zufluss.client.write.append import AsyncAppendWriter
from zufluss.client.write.upsert import AsyncUpsertWriter, MergeModeName
from zufluss.errors import InvalidTableError
from zufluss.model.expression import Expression
from zufluss.model.schema import Schema
from zufluss.model.table import TableBucket, TableInfo, TablePath

LAKE_SUFFIX: Final = "$lake"
"""Appended to the name of a table, it selects the rows that its lake table has."""


class AsyncTable:
    """A table as it was when it was opened; open it again to see later changes of its schema.

    Opened as `"db.table$lake"` it is what the lake has of the table, to be scanned only.
    """

    def __init__(
        self, connection: ClusterConnection, info: TableInfo, *, lake_only: bool = False
    ) -> None:
        self._connection = connection
        self.info = info
        """Ids, schema, keys, buckets, properties."""
        self.lake_only = lake_only
        """It was opened as `$lake`."""
        self._lookups: AsyncLookup | None = None

    @property
    def path(self) -> TablePath:
        """Its name."""
        return self.info.path

    @property
    def schema(self) -> Schema:
        """Its columns; `schema.arrow` is the Arrow schema."""
        return self.info.schema

    def append(self) -> AsyncAppendWriter:
        """A writer that appends to a log table.

        >>> async with table.append() as writer:  # doctest: +SKIP
        ...     await writer.write({"id": [1, 2], "name": ["a", "b"]})
        """
        self._check_live("append")
        return AsyncAppendWriter(self._connection, self.info)

    def upsert(
        self,
        columns: Sequence[str] | None = None,
        *,
        merge_mode: MergeModeName = "aggregate",
        pre_aggregate: bool = False,
    ) -> AsyncUpsertWriter:
        """A writer for a primary-key table: upserts and deletes.

        With `columns`, which must have the primary key, only these are changed. `merge_mode` says
        what the rows are to the stored ones: `"aggregate"`, inputs for the table's merge engine;
        `"overwrite"`, rows as they are to be, past the engine; and of aggregation tables
        `"retract"`, inputs that are taken back, and `"merge_state"`, states. With `pre_aggregate`
        inputs are aggregated here, batch by batch, and sent as states: fewer rows where keys
        repeat.

        >>> async with table.upsert() as writer:  # doctest: +SKIP
        ...     await writer.write({"id": [1, 2], "name": ["a", "b"]})
        ...     await writer.delete({"id": [2]})
        >>> async with table.upsert(["id", "name"]) as writer:  # doctest: +SKIP
        ...     await writer.write({"id": 1, "name": "new"})
        """
        self._check_live("upsert")
        place = (self._connection, self.info, columns)
        return AsyncUpsertWriter(*place, merge_mode, pre_aggregate=pre_aggregate)

    async def exactly_once_writer(
        self,
        producer_id: str | None = None,
        columns: Sequence[str] | None = None,
        *,
        state: States | None = None,
        ttl: Duration | None = None,
        pre_aggregate: bool = False,
        undo: UndoBy = "server",
        on_undo: OnUndo | None = None,
    ) -> AsyncExactlyOnceWriter:
        """A writer whose rows count once, also when it is killed and starts again.

        It begins when this returns: earlier starts under the same `producer_id` can write nothing
        any more, what they wrote behind the checkpoint in `state` is undone, and the `columns` (the
        primary key and what is written; all, unless told) are nobody else's. Without an id it makes
        one up, which its checkpoints remember. `state` is what `checkpoint()` gave, or its bytes;
        without one everything since the very first start is undone.

        Others may take the columns when it gave no sign of life for `ttl`
        (`client.column-lock.ttl`). `pre_aggregate` is as for `upsert`. The servers undo by
        themselves, and `on_undo` is told how far they are; `undo="client"` reads the changelogs
        and does it from here.

        >>> writer = await table.exactly_once_writer("views", state=kept)  # doctest: +SKIP
        >>> await writer.write(rows)  # doctest: +SKIP
        >>> kept = await writer.checkpoint()  # doctest: +SKIP
        """
        self._check_live("exactly_once_writer")
        place = (self._connection, self.info, producer_id, columns)
        return await open_exactly_once(*place, state, ttl, pre_aggregate, undo, on_undo)

    def producer_writer(
        self, handle: ProducerHandle, task: int, *, pre_aggregate: bool = False
    ) -> AsyncTaskWriter:
        """A writer of task number `task` of a job, as the producer of a `handle`.

        The handle comes from the `exactly_once_writer` of the job's driver, or from
        `append_producer`, and may have been sent here. Under one handle a number stands for one
        stream of rows: a task that is run again writes the same rows in the same order, and what
        the table has of them already is dropped. `finish` ends it and says where its buckets stand.

        >>> async with table.producer_writer(handle, task=3) as writer:  # doctest: +SKIP
        ...     await writer.write(rows)
        ...     offsets = await writer.finish()
        """
        self._check_live("producer_writer")
        place = (self._connection, self.info, handle, task)
        return task_writer(*place, pre_aggregate=pre_aggregate)

    async def append_producer(self, producer_id: str | None = None) -> ProducerHandle:
        """A producer of a log table, for tasks that may be run again: see `producer_writer`.

        A `producer_id` has the same number whenever it is asked for; without one it is a new one.
        """
        self._check_live("append_producer")
        return await open_append_producer(self._connection, self.info, producer_id)

    def scan(
        self,
        columns: Sequence[str] | None = None,
        filter: Expression | None = None,
        *,
        start: Start = "earliest",
        stop: Stop = "latest",
        limit: int | None = None,
        partitions: Iterable[Partition] | None = None,
        buckets: Iterable[int] | None = None,
        with_offsets: bool = False,
        source: Source | None = None,
        at: Offsets | None = None,
        prefetch: int = 1,
        resume: bool = True,
    ) -> AsyncLogScan | AsyncUnionScan | AsyncKvScan:
        """What to read of a table; nothing is read until the scan is used.

        `source` says where from. Of a log table `"log"`, unless told otherwise. Of a primary-key
        table `"live"`, its rows at the moment the run is opened, or `"snapshot"`, its newest
        key-value snapshots. Of both `"union"`, lake and log together, and `"lake"`.

        `columns`, `filter` and `limit` are pushed to the server, and the filter is applied exactly
        here. `stop=None` follows a log. `with_offsets` adds `__offset`, `__timestamp`, `__bucket`.
        Rows of a primary-key table can be read as they were at offsets of its changelog (`at`, as
        far as the server can make them again), without reading ahead (`prefetch=0`), and without
        opening the state again where the server lost it (`resume=False`).

        >>> await table.scan(["id"], col("id") > 5).to_arrow()  # doctest: +SKIP
        >>> await orders.scan(source="union").to_pandas()  # doctest: +SKIP
        """
        names = None if columns is None else tuple(columns)
        parts = None if partitions is None else tuple(partitions)
        numbers = None if buckets is None else tuple(buckets)
        place = (self._connection, self.info, names, filter)
        origin = self._source(source)
        if origin == "live" or origin == "snapshot":
            _check_state(self.info, start, stop, with_offsets)
            return AsyncKvScan(*place, limit, parts, numbers, origin, at, prefetch, resume)
        if at is not None:
            raise ValueError(f"at is for the rows of a primary-key table, not for a {origin}")
        if origin == "log":
            return AsyncLogScan(*place, start, stop, limit, parts, numbers, with_offsets)
        lake_only = origin == "lake"
        end = _union_end(start, stop)
        return AsyncUnionScan(*place, end, limit, parts, numbers, with_offsets, lake_only)

    def _source(self, source: Source | None) -> Source:
        if source is None:
            if self.lake_only:
                return "lake"
            return "live" if self.info.has_primary_key else "log"
        if source not in get_args(Source):
            raise ValueError(f"source {source!r} is none of {', '.join(get_args(Source))}")
        if source != "lake":
            self._check_live(f"scan(source={source!r})")
        return source

    def _check_live(self, what: str) -> None:
        if self.lake_only:
            raise InvalidTableError(
                f"{self.path}{LAKE_SUFFIX} is what the lake has of a table, and can only be "
                f"scanned; {what} goes through {self.path}"
            )

    @overload
    async def lookup(self, keys: SingleKey) -> Row | None: ...

    @overload
    async def lookup(self, keys: Any, *, missing: Missing = "null") -> pa.Table: ...

    async def lookup(self, keys: Any, *, missing: Missing = "null") -> Row | pa.Table | None:
        """Rows of a primary-key table by key: one as a dict, several as an Arrow table.

        One key is a value, a tuple of values in key order, or a dict. Several are a list of those,
        or columns in any form that writers take. With `missing="null"` the result has one row per
        key, all null where the key is not there; with `missing="drop"` only the rows there are.
        Keys have the partition columns too; in a partition that does not exist there is no row.

        >>> await table.lookup(7)  # doctest: +SKIP
        {'id': 7, 'name': 'seven'}
        >>> await table.lookup([7, 8, 9], missing="drop")  # doctest: +SKIP
        """
        form = KeyForm.whole(self.info)
        key = form.single(keys)
        if key is not None:
            return await self._lookup.one(key)
        return await self.lookup_batches(form.batches(keys), missing=missing)

    async def lookup_batches(
        self, keys: Iterable[pa.RecordBatch], *, missing: Missing = "null"
    ) -> pa.Table:
        """`lookup` of keys that are batches of the primary key's columns already."""
        return await self._lookup.many(keys, missing)

    async def prefix_lookup(self, prefix: Any) -> pa.Table:
        """The rows whose primary key begins with the bucket key `prefix`, or with one of several.

        The table's bucket key must be the first part of its primary key. On a partitioned table
        the partition columns come first: `prefix` has these, then the bucket key.

        >>> await orders.prefix_lookup(4711)  # all orders of a customer  # doctest: +SKIP
        """
        form = KeyForm.prefix(self.info)
        key = form.single(prefix)
        batches = form.batches(prefix if key is None else [key])
        return await self.prefix_batches(batches)

    async def prefix_batches(self, prefixes: Iterable[pa.RecordBatch]) -> pa.Table:
        """`prefix_lookup` of prefixes that are batches of their columns already."""
        return await self._lookup.prefix(prefixes)

    def changelog(
        self,
        columns: Sequence[str] | None = None,
        filter: Expression | None = None,
        *,
        start: Start = "earliest",
        stop: Stop = "latest",
        limit: int | None = None,
        partitions: Iterable[Partition] | None = None,
        buckets: Iterable[int] | None = None,
    ) -> AsyncLogScan:
        """The changes of a primary-key table; nothing is read until the scan is used.

        Before the columns stand `_change_type` (`+I`, `-U`, `+U`, `-D`), `_log_offset` and
        `_commit_timestamp`. `filter` is applied to each change by itself. `stop=None` follows.

        >>> async for batch in table.changelog(["id"], stop=None):  # doctest: +SKIP
        ...     print(batch["_change_type"])
        """
        self._check_live("changelog")
        return AsyncLogScan(
            self._connection,
            self.info,
            None if columns is None else tuple(columns),
            filter,
            start,
            stop,
            limit,
            None if partitions is None else tuple(partitions),
            None if buckets is None else tuple(buckets),
            changelog=True,
        )

    async def kv_snapshot(
        self,
        bucket: TableBucket,
        snapshot_id: int | None = None,
        columns: Sequence[str] | None = None,
        *,
        after: bytes | None = None,
        lease: AsyncKvSnapshotLease | None = None,
    ) -> AsyncKvSnapshotReader:
        """Open a key-value snapshot: the rows of a bucket as they were at an offset.

        `admin.latest_kv_snapshots` says which there are. With a `lease` it is the one that the
        lease holds, and losing the lease is what the reader raises. `after` goes on behind the
        `last_key` of an earlier reader of the same snapshot.

        >>> async with await table.kv_snapshot(bucket, lease=lease) as reader:  # doctest: +SKIP
        ...     rows = [batch async for batch in reader]
        """
        self._check_live("kv_snapshot")
        place = (self._connection, self.info, bucket)
        return await open_snapshot(*place, snapshot_id, columns, after, lease)

    async def head(self, count: int = 10) -> pa.Table:
        """Some rows, at most `count`: of a log table the first, of a primary-key table any.

        >>> await table.head(5)  # doctest: +SKIP
        """
        if count < 0:
            raise ValueError(f"count {count} is negative")
        if self.lake_only or not self.info.has_primary_key:
            return await self.scan(limit=count).to_arrow()
        return await head_of_keys(self._connection, self.info, count)

    @property
    def _lookup(self) -> AsyncLookup:
        self._check_live("lookup")
        if self._lookups is None:
            self._lookups = AsyncLookup(self._connection, self.info)
        return self._lookups

    def __repr__(self) -> str:
        name = f"{self.path}{LAKE_SUFFIX if self.lake_only else ''}"
        return f"<AsyncTable {name}, id {self.info.table_id}, {self.info.bucket_count} buckets>"


def _check_state(info: TableInfo, start: Start, stop: Stop, with_offsets: bool) -> None:
    """Rows of a primary-key table have no place in a log."""
    if start != "earliest" or stop != "latest" or with_offsets:
        raise InvalidTableError(
            f"table {info.path} has a primary key: a scan reads its rows, which have no offsets, "
            "start or stop; at={bucket: offset} reads them as they were there, "
            "table.changelog(start=…, stop=…) the changes, also of the log"
        )


def _union_end(start: Start, stop: Stop) -> Literal["latest"] | None:
    if start == "earliest" and (stop is None or stop == "latest"):
        return None if stop is None else "latest"
    raise ValueError(
        "a scan of lake and log reads everything up to 'latest', or follows with stop=None; other "
        'starts and stops are for source="log"'
    )
