"""`AsyncTable`, one table: the entry point of writers, scans and lookups."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape
from typing import Any, Final, Literal, get_args, overload

import pyarrow as pa

from zufluss.client.core.catalog import Partition
from zufluss.client.core.cluster import ClusterConnection
from zufluss.client.core.durations import Duration
from zufluss.client.core.row_counts import counted_rows
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
from zufluss.client.read.arguments import (
    buckets_of,
    check_at,
    check_offsets,
    columns_of,
    filter_of,
    limit_of,
    partitions_of,
)
from zufluss.client.read.log_scan import AsyncLogScan
from zufluss.client.read.scan import Offsets, Source, Start, Stop
from zufluss.client.read.union_scan import AsyncUnionScan
from zufluss.client.write.append import AsyncAppendWriter
from zufluss.client.write.upsert import AsyncUpsertWriter, MergeModeName
from zufluss.errors import InvalidTableError
from zufluss.model.expression import Expression
from zufluss.model.schema import Schema
from zufluss.model.table import TableBucket, TableInfo, TablePath

ScanChoice = tuple[
    ClusterConnection,
    TableInfo,
    tuple[str, ...] | None,
    Expression | None,
    int | None,
    tuple[Partition, ...] | None,
    tuple[int, ...] | None,
]
"""The first options of every scan."""
LAKE_SUFFIX: Final = "$lake"
"""Appended to the name of a table, it selects the rows that its lake table has."""


class AsyncTable:
    """A table as it was when it was opened; `await connection.table(…)` opens it.

    Open it again to see later changes of its schema. Opened as `"db.table$lake"` it shows only the
    rows that the lake has, and can only be scanned.
    """

    def __init__(
        self, connection: ClusterConnection, info: TableInfo, *, lake_only: bool = False
    ) -> None:
        self._connection = connection
        self.info = info
        """Ids, schema, keys, bucket count and properties."""
        self.lake_only = lake_only
        """True if the table was opened with `$lake`."""
        self._lookups: AsyncLookup | None = None

    @property
    def path(self) -> TablePath:
        """The table's path."""
        return self.info.path

    @property
    def schema(self) -> Schema:
        """The table's columns and keys; `schema.arrow` is the Arrow schema."""
        return self.info.schema

    def append(self) -> AsyncAppendWriter:
        """Open a writer that appends rows to a log table.

        Rows may be Arrow, pandas, polars, a dict of columns, one row (a dict, a dataclass or a
        named tuple), or a list or generator of rows. Leaving the block waits until all rows are
        acknowledged.

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
        """Open a writer that upserts and deletes rows of a primary-key table.

        With `columns`, which must contain the primary key, a write changes only these columns and
        keeps the others. `merge_mode` says how rows combine with the stored ones:

        - `"aggregate"`: rows are inputs of the table's merge engine;
        - `"overwrite"`: rows replace the stored ones, bypassing the merge engine, and deletes
          delete, whatever the table's `table.delete.behavior` is;
        - `"retract"`: rows are inputs that are taken back (aggregation tables only);
        - `"merge_state"`: rows are aggregation states (aggregation tables only).

        With `pre_aggregate` the client aggregates the rows of each batch and sends states, which
        saves work if keys repeat.

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
        """Open a writer that counts each row once, even if it is killed and started again.

        `producer_id` names the writer across restarts; without one a random id is used, which
        checkpoints contain. `state` is the last checkpoint that you stored, or its bytes; None
        means the first start.

        When this method returns, earlier writers with the same id can write nothing any more, all
        that they wrote after the checkpoint in `state` is undone, and nobody else can write the
        `columns` (the primary key and the columns to write; None for all). Another writer may take
        the columns over when this one was silent for `ttl` (default: `client.column-lock.ttl`).

        The servers do the undo and call `on_undo` with their progress; `undo="client"` reads the
        changelogs and undoes from the client. `pre_aggregate` is as for `upsert`.

        >>> writer = await table.exactly_once_writer("views", state=state)  # doctest: +SKIP
        >>> await writer.write(rows)  # doctest: +SKIP
        >>> state = await writer.checkpoint()  # doctest: +SKIP
        """
        self._check_live("exactly_once_writer")
        place = (self._connection, self.info, producer_id, columns)
        return await open_exactly_once(*place, state, ttl, pre_aggregate, undo, on_undo)

    def producer_writer(
        self, handle: ProducerHandle, task: int, *, pre_aggregate: bool = False
    ) -> AsyncTaskWriter:
        """Open the writer of task number `task` of a job, for the producer of a `handle`.

        The job's driver gets the handle from `exactly_once_writer` or `append_producer` and sends
        it to its tasks. Under one handle, a task number stands for one stream of rows: a task that
        runs again must write the same rows in the same order, and the server drops those that the
        table has already. `finish` closes the writer and returns the offsets that it reached.

        >>> async with table.producer_writer(handle, task=3) as writer:  # doctest: +SKIP
        ...     await writer.write(rows)
        ...     offsets = await writer.finish()
        """
        self._check_live("producer_writer")
        place = (self._connection, self.info, handle, task)
        return task_writer(*place, pre_aggregate=pre_aggregate)

    async def append_producer(self, producer_id: str | None = None) -> ProducerHandle:
        """Open a producer of a log table, for tasks that may run again; see `producer_writer`.

        The same `producer_id` always gives the same producer; None gives a new one.
        """
        self._check_live("append_producer")
        return await open_append_producer(self._connection, self.info, producer_id)

    def scan(
        self,
        columns: Sequence[str] | None = None,
        filter: Expression | str | None = None,
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
        cursor: str | None = None,
    ) -> AsyncLogScan | AsyncUnionScan | AsyncKvScan:
        """Describe what to read; nothing is read before the scan is used.

        `source` is one of:

        - `"log"`: the rows of a log table (its default);
        - `"live"`: the rows of a primary-key table when the run is opened (its default);
        - `"snapshot"`: the rows in the newest key-value snapshots of a primary-key table;
        - `"union"`: lake and log together, the same rows as the live table has;
        - `"lake"`: the rows in the lake.

        The server prunes by `columns`, `filter` and `limit`, and the client applies the filter
        exactly. A filter is an expression of `col`, or a text such as `"id > 5 AND name IS NULL"`
        (`model/filter_text.py`). A log is read from `start` to `stop`; `stop=None` follows it.
        `with_offsets` adds the columns `__offset`, `__timestamp` and `__bucket`.

        For the rows of a primary-key table, `at` reads the state at offsets of its changelog, as
        far as the server can rebuild it; `prefetch=0` reads no page ahead; `resume=False` raises
        instead of opening a state again that the server lost. `cursor` reads what another run has
        left: see `AsyncKvScanner.cursor` and `AsyncKvScan.split`.

        >>> await table.scan(["id"], col("id") > 5).to_arrow()  # doctest: +SKIP
        >>> await orders.scan(source="union").to_pandas()  # doctest: +SKIP
        """
        choice = self._choice(columns, filter, limit, partitions, buckets)
        for name, offsets in (("start", start), ("stop", stop)):
            check_offsets(name, offsets)
        check_at(at)
        origin = self._source(source)
        if origin == "live" or origin == "snapshot":
            _check_state(self.info, start, stop, with_offsets)
            return AsyncKvScan(*choice, origin, at, prefetch, resume, cursor)
        if cursor is not None:
            raise ValueError(f"a cursor is for the rows of a primary-key table, not for a {origin}")
        if at is not None:
            raise ValueError(f"at is for the rows of a primary-key table, not for a {origin}")
        if origin == "log":
            return AsyncLogScan(*choice, start, stop, with_offsets)
        lake_only = origin == "lake"
        end = _union_end(start, stop)
        return AsyncUnionScan(*choice, end, with_offsets, lake_only)

    def _choice(
        self,
        columns: Sequence[str] | None,
        filter: Expression | str | None,
        limit: int | None,
        partitions: Iterable[Partition] | None,
        buckets: Iterable[int] | None,
    ) -> ScanChoice:
        """The options that all scans share, checked."""
        return (
            self._connection,
            self.info,
            columns_of(columns),
            filter_of(filter, self.info.schema),
            limit_of(limit),
            partitions_of(partitions),
            buckets_of(buckets),
        )

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
                f"{self.path}{LAKE_SUFFIX} has only the rows in the lake and can only be scanned; "
                f"open {self.path} for {what}"
            )

    @overload
    async def lookup(self, keys: SingleKey) -> Row | None: ...

    @overload
    async def lookup(self, keys: Any, *, missing: Missing = "null") -> pa.Table: ...

    async def lookup(self, keys: Any, *, missing: Missing = "null") -> Row | pa.Table | None:
        """Find rows of a primary-key table by key.

        One key is a value, a tuple of values in key order, or a dict; the result is the row as a
        dict, or None. Several keys are a list of those, or columns in any form that writers take;
        the result is an Arrow table in the order of the keys. A key without a row gives a row of
        nulls with `missing="null"`, and no row with `missing="drop"`.

        Keys contain the partition columns. A partition that does not exist has no rows.

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
        """Do what `lookup` does, for batches of the primary key's columns."""
        return await self._lookup.many(keys, missing)

    async def prefix_lookup(self, prefix: Any) -> pa.Table:
        """Find all rows whose primary key begins with a prefix, or with one of several.

        A prefix is the table's bucket key, which must be the first part of the primary key. On a
        partitioned table the partition columns come before the bucket key.

        >>> await orders.prefix_lookup(4711)  # all orders of a customer  # doctest: +SKIP
        """
        form = KeyForm.prefix(self.info)
        key = form.single(prefix)
        batches = form.batches(prefix if key is None else [key])
        return await self.prefix_batches(batches)

    async def prefix_batches(self, prefixes: Iterable[pa.RecordBatch]) -> pa.Table:
        """Do what `prefix_lookup` does, for batches of the prefix columns."""
        return await self._lookup.prefix(prefixes)

    def changelog(
        self,
        columns: Sequence[str] | None = None,
        filter: Expression | str | None = None,
        *,
        start: Start = "earliest",
        stop: Stop = "latest",
        limit: int | None = None,
        partitions: Iterable[Partition] | None = None,
        buckets: Iterable[int] | None = None,
    ) -> AsyncLogScan:
        """Describe a read of the changes of a primary-key table; nothing is read before it is used.

        The columns `_change_type`, `_log_offset` and `_commit_timestamp` come first. A change type
        is `+I` (new row), `-U` and `+U` (a row before and after its change) or `-D` (deleted row).
        `filter` is applied to each change by itself. `stop=None` follows the changelog.

        >>> async for batch in table.changelog(["id"], stop=None):  # doctest: +SKIP
        ...     print(batch["_change_type"])
        """
        self._check_live("changelog")
        for name, offsets in (("start", start), ("stop", stop)):
            check_offsets(name, offsets)
        choice = self._choice(columns, filter, limit, partitions, buckets)
        return AsyncLogScan(*choice, start, stop, changelog=True)

    async def kv_snapshot(
        self,
        bucket: TableBucket,
        snapshot_id: int | None = None,
        columns: Sequence[str] | None = None,
        *,
        after: bytes | None = None,
        lease: AsyncKvSnapshotLease | None = None,
    ) -> AsyncKvSnapshotReader:
        """Open a key-value snapshot: the rows of a bucket at an offset of its changelog.

        `admin.latest_kv_snapshots` lists the snapshots. With a `lease` the reader opens the
        snapshot that the lease holds, and raises if the lease is lost. `after` is the `last_key`
        of an earlier reader of the same snapshot; the rows behind it are read.

        >>> async with await table.kv_snapshot(bucket, lease=lease) as reader:  # doctest: +SKIP
        ...     rows = [batch async for batch in reader]
        """
        self._check_live("kv_snapshot")
        place = (self._connection, self.info, bucket)
        return await open_snapshot(*place, snapshot_id, columns, after, lease)

    async def head(self, count: int = 10) -> pa.Table:
        """Return at most `count` rows: the first ones of a log table, any of a primary-key table.

        >>> await table.head(5)  # doctest: +SKIP
        """
        limit_of(count, "count")
        if self.lake_only or not self.info.has_primary_key:
            return await self.scan(limit=count).to_arrow()
        return await head_of_keys(self._connection, self.info, count)

    async def count(
        self,
        filter: Expression | str | None = None,
        *,
        partitions: Iterable[Partition] | None = None,
        buckets: Iterable[int] | None = None,
        source: Source | None = None,
    ) -> int:
        """Return the exact number of rows that `scan` with the same arguments returns.

        Without a filter this is one request per server and reads no rows: servers know how many
        rows the log of a log table and the live state of a primary-key table have. All other
        counts are scans that read only the columns of the filter, or one small column: those with
        a filter, of a `source` with lake or snapshots, and of primary-key tables with
        `table.changelog.image = WAL`.

        The buckets are not counted at one moment: rows that are written meanwhile may or may not
        be counted.

        >>> await table.count()  # doctest: +SKIP
        >>> await table.count("kind = 'a' AND id > 5", partitions=["2026-01-31"])  # doctest: +SKIP
        """
        parts, numbers = partitions_of(partitions), buckets_of(buckets)
        condition = filter_of(filter, self.info.schema)
        if condition is None and self._source(source) in ("log", "live"):
            rows = await counted_rows(self._connection, self.info, parts, numbers)
            if rows is not None:
                return rows
        columns = [_counted_column(self.info.schema, condition)]
        scan = self.scan(columns, condition, partitions=parts, buckets=numbers, source=source)
        return sum([batch.num_rows async for batch in scan])

    @property
    def _lookup(self) -> AsyncLookup:
        self._check_live("lookup")
        if self._lookups is None:
            self._lookups = AsyncLookup(self._connection, self.info)
        return self._lookups

    def __repr__(self) -> str:
        return f"<AsyncTable {self._title()}: {self.schema}>"

    def _repr_html_(self) -> str:
        return f"<div><b>{escape(self._title())}</b></div>{self.schema._repr_html_()}"

    def _title(self) -> str:
        """The name and the kind of the table, for people."""
        info, suffix = self.info, LAKE_SUFFIX if self.lake_only else ""
        kind = "primary-key table" if info.has_primary_key else "log table"
        buckets = f"{info.bucket_count} bucket{'' if info.bucket_count == 1 else 's'}"
        parts = f", partitioned by {', '.join(info.partition_keys)}" if info.partition_keys else ""
        return f"{self.path}{suffix}, {kind}, {buckets}{parts}"


def _check_state(info: TableInfo, start: Start, stop: Stop, with_offsets: bool) -> None:
    """Raise if options of a log are given for the rows of a primary-key table."""
    if start != "earliest" or stop != "latest" or with_offsets:
        raise InvalidTableError(
            f"table {info.path} has a primary key: a scan reads its rows, which have no offsets, "
            "start or stop; at={bucket: offset} reads the rows as they were at these offsets, "
            "table.changelog(start=…, stop=…) reads the changes"
        )


def _counted_column(schema: Schema, filter: Expression | None) -> str:
    """The column to read for a count: one that the filter reads anyway, else a small one."""

    def width(name: str) -> int:
        try:
            return int(schema.arrow.field(name).type.bit_width)
        except ValueError:  # the type has no fixed width
            return 1_000

    names = schema.names if filter is None else [n for n in schema.names if n in filter.columns]
    return min(names or schema.names, key=width)


def _union_end(start: Start, stop: Stop) -> Literal["latest"] | None:
    if start == "earliest" and (stop is None or stop == "latest"):
        return None if stop is None else "latest"
    raise ValueError(
        "a scan of lake and log reads everything up to 'latest', or follows with stop=None; other "
        'values of start and stop are for source="log"'
    )
