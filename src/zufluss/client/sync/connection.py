"""The client for synchronous code: a thin façade over the async one.

Each `Connection` has one background thread with an event loop on which everything happens; a call
hands a coroutine to it and waits. So it works in scripts, threads and notebooks (which have a loop
of their own running), and Ctrl-C cancels the call that is waiting. Input is converted to Arrow in
the caller's thread, so reading one table while writing another needs no care.
"""

from __future__ import annotations

import asyncio
import functools
import threading
from collections.abc import Callable, Coroutine, Iterable, Sequence
from typing import Any, Concatenate, ParamSpec, Self, TypeVar, overload

import pyarrow as pa
from google.protobuf.message import Message

from zufluss.client.admin import AsyncAdmin, Partition
from zufluss.client.connection import AsyncConnection, connect_async
from zufluss.client.keyed.lookup import KeyForm, Missing, Row, SingleKey
from zufluss.client.keyed.scan import AsyncKvScan
from zufluss.client.keyed.snapshot_reader import KvSnapshotReader
from zufluss.client.lease.lease import AsyncKvSnapshotLease, KvSnapshotLease
from zufluss.client.lease.wire import Duration
from zufluss.client.producer.exactly_once import UndoBy
from zufluss.client.producer.handle import ProducerHandle
from zufluss.client.producer.state import States
from zufluss.client.producer.undo import OnUndo
from zufluss.client.read.scan import Offsets, Source, Start, Stop
from zufluss.client.read.union_plan import UnionPlan, plan_union
from zufluss.client.read.union_scan import AsyncUnionScan
from zufluss.client.sync.scan import KvScan, LogScan, UnionScan
from zufluss.client.sync.write import AppendWriter, ExactlyOnceWriter, TaskWriter, UpsertWriter
from zufluss.client.table import AsyncTable
from zufluss.client.write.upsert import MergeModeName
from zufluss.errors import NetworkError
from zufluss.model.expression import Expression
from zufluss.model.schema import Schema
from zufluss.model.table import TableBucket, TableInfo, TablePath
from zufluss.wire.api import ApiKey

P = ParamSpec("P")
R = TypeVar("R")

INTERRUPT_SECONDS = 0.5
"""How long a caller may wait without listening for an interrupt."""


class LoopThread:
    """An event loop in a thread of its own."""

    def __init__(self) -> None:
        self._loop = _new_loop()
        self._thread = threading.Thread(target=self._run, name="zufluss-client", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        self._loop.run_forever()
        self._loop.close()

    def run(self, work: Coroutine[Any, Any, R]) -> R:
        """Run a coroutine on the loop and wait for its result; an interrupt cancels it.

        It waits in steps: an interrupt that arrives just before a wait without end is heard after.
        """
        if not self._thread.is_alive() or threading.current_thread() is self._thread:
            work.close()
            raise NetworkError("the connection is closed, or used from its own event loop")
        future = asyncio.run_coroutine_threadsafe(work, self._loop)
        try:
            while True:
                try:
                    return future.result(INTERRUPT_SECONDS)
                except TimeoutError:
                    if future.done():  # the timeout is its own, or it was just in time
                        return future.result()
        except BaseException:
            future.cancel()
            raise

    def call(self, function: Callable[[], R]) -> R:
        """Run a function on the loop's thread and wait for its result."""

        async def work() -> R:
            return function()

        return self.run(work())

    def close(self) -> None:
        """End what still runs on the loop, stop it, and wait for the thread."""
        if self._thread.is_alive():
            self.run(_cancel_others())
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join()


async def _cancel_others() -> None:
    others = asyncio.all_tasks() - {asyncio.current_task()}
    for task in others:
        task.cancel()
    await asyncio.gather(*others, return_exceptions=True)


def _new_loop() -> asyncio.AbstractEventLoop:
    try:
        import uvloop
    except ImportError:
        return asyncio.new_event_loop()
    loop: asyncio.AbstractEventLoop = uvloop.new_event_loop()
    return loop


def connect(bootstrap: str, **options: Any) -> Connection:
    """Connect to a cluster.

    `bootstrap` is `host:port`, several separated by commas; options have the keys of
    `docs/configuration.md`.

    >>> with connect("localhost:9123", **{"client.request-timeout": "10s"}) as connection:
    ...     connection.admin.list_databases()  # doctest: +SKIP
    """
    thread = LoopThread()
    try:
        return Connection(thread, thread.run(connect_async(bootstrap, **options)))
    except BaseException:
        thread.close()
        raise


class Connection:
    """A connection to a cluster; `zufluss.connect` makes it."""

    def __init__(self, thread: LoopThread, connection: AsyncConnection) -> None:
        self._thread = thread
        self._connection = connection
        self._closed = False

    @property
    def admin(self) -> Admin:
        """Databases, tables, partitions, offsets."""
        return Admin(self._thread, self._connection.admin)

    def table(self, path: str | TablePath) -> Table:
        """Open a table to write to it or read it; with `$lake` behind its name only the lake's.

        >>> connection.table("fluss.events")  # doctest: +SKIP
        """
        return Table(self._thread, self._thread.run(self._connection.table(path)))

    def plan_union(
        self,
        table: str | TablePath | TableInfo,
        partitions: Iterable[Partition] | None = None,
        *,
        read_optimized: bool = False,
    ) -> UnionPlan:
        """Pin a union read, for an engine that reads lake and log itself; see `plan_union`."""
        plan = plan_union(self._connection, table, partitions, read_optimized=read_optimized)
        return self._thread.run(plan)

    def call_coordinator(
        self, api_key: ApiKey, request: Message, *, repeatable: bool = True
    ) -> Any:
        """One request to the coordinator, for tools of the cluster such as tiering services.

        `repeatable` says that doing it twice does no harm: then it is tried again while the
        coordinator is away.
        """
        call = self._connection.call_coordinator(api_key, request, repeatable=repeatable)
        return self._thread.run(call)

    def close(self) -> None:
        """Close the connection; writers and scanners must be closed before."""
        if not self._closed:
            self._closed = True
            self._thread.run(self._connection.close())
            self._thread.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return repr(self._connection).replace("AsyncConnection", "Connection")


def _admin_call(
    method: Callable[Concatenate[AsyncAdmin, P], Coroutine[Any, Any, R]],
) -> Callable[Concatenate[Admin, P], R]:
    @functools.wraps(method)
    def call(self: Admin, /, *args: P.args, **kwargs: P.kwargs) -> R:
        return self._thread.run(method(self._admin, *args, **kwargs))

    return call


def _lease_call(
    method: Callable[Concatenate[AsyncAdmin, P], Coroutine[Any, Any, AsyncKvSnapshotLease]],
) -> Callable[Concatenate[Admin, P], KvSnapshotLease]:
    @functools.wraps(method)
    def call(self: Admin, /, *args: P.args, **kwargs: P.kwargs) -> KvSnapshotLease:
        lease = self._thread.run(method(self._admin, *args, **kwargs))
        return KvSnapshotLease(self._thread, lease)

    return call


class Admin:
    """The administrative calls; get it from `connection.admin`.

    Each method does what the method of the same name of `AsyncAdmin` does, and waits for it.

    >>> connection.admin.create_table("fluss.events", "id BIGINT, name STRING")  # doctest: +SKIP
    """

    def __init__(self, thread: LoopThread, admin: AsyncAdmin) -> None:
        self._thread = thread
        self._admin = admin

    create_database = _admin_call(AsyncAdmin.create_database)
    drop_database = _admin_call(AsyncAdmin.drop_database)
    list_databases = _admin_call(AsyncAdmin.list_databases)
    database_exists = _admin_call(AsyncAdmin.database_exists)
    database_info = _admin_call(AsyncAdmin.database_info)
    alter_database = _admin_call(AsyncAdmin.alter_database)
    create_table = _admin_call(AsyncAdmin.create_table)
    drop_table = _admin_call(AsyncAdmin.drop_table)
    list_tables = _admin_call(AsyncAdmin.list_tables)
    table_exists = _admin_call(AsyncAdmin.table_exists)
    table_info = _admin_call(AsyncAdmin.table_info)
    table_schema = _admin_call(AsyncAdmin.table_schema)
    alter_table = _admin_call(AsyncAdmin.alter_table)
    create_partition = _admin_call(AsyncAdmin.create_partition)
    drop_partition = _admin_call(AsyncAdmin.drop_partition)
    list_partitions = _admin_call(AsyncAdmin.list_partitions)
    list_offsets = _admin_call(AsyncAdmin.list_offsets)
    list_all_offsets = _admin_call(AsyncAdmin.list_all_offsets)
    lake_snapshot = _admin_call(AsyncAdmin.lake_snapshot)
    latest_kv_snapshots = _admin_call(AsyncAdmin.latest_kv_snapshots)
    list_kv_snapshots = _admin_call(AsyncAdmin.list_kv_snapshots)
    kv_snapshot_metadata = _admin_call(AsyncAdmin.kv_snapshot_metadata)
    kv_snapshot_lease = _lease_call(AsyncAdmin.kv_snapshot_lease)
    kv_snapshot_leases = _admin_call(AsyncAdmin.kv_snapshot_leases)
    drop_kv_snapshot_lease = _admin_call(AsyncAdmin.drop_kv_snapshot_lease)
    list_producers = _admin_call(AsyncAdmin.list_producers)
    drop_producer = _admin_call(AsyncAdmin.drop_producer)
    server_nodes = _admin_call(AsyncAdmin.server_nodes)
    locations = _admin_call(AsyncAdmin.locations)
    alter_location = _admin_call(AsyncAdmin.alter_location)
    probe_locations = _admin_call(AsyncAdmin.probe_locations)
    cluster_configs = _admin_call(AsyncAdmin.cluster_configs)
    alter_cluster_configs = _admin_call(AsyncAdmin.alter_cluster_configs)


class Table:
    """A table as it was when it was opened; open it again to see later changes of its schema."""

    def __init__(self, thread: LoopThread, table: AsyncTable) -> None:
        self._thread = thread
        self._table = table

    @property
    def info(self) -> TableInfo:
        """Ids, schema, keys, buckets, properties."""
        return self._table.info

    @property
    def path(self) -> TablePath:
        """Its name."""
        return self._table.path

    @property
    def schema(self) -> Schema:
        """Its columns; `schema.arrow` is the Arrow schema."""
        return self._table.schema

    @property
    def lake_only(self) -> bool:
        """It was opened as `$lake`."""
        return self._table.lake_only

    def append(self) -> AppendWriter:
        """A writer that appends to a log table.

        >>> with table.append() as writer:  # doctest: +SKIP
        ...     writer.write({"id": [1, 2], "name": ["a", "b"]})
        """
        return AppendWriter(self._thread, self._thread.call(self._table.append))

    def upsert(
        self,
        columns: Sequence[str] | None = None,
        *,
        merge_mode: MergeModeName = "aggregate",
        pre_aggregate: bool = False,
    ) -> UpsertWriter:
        """A writer for a primary-key table: upserts and deletes.

        With `columns`, which must have the primary key, only these are changed. `merge_mode` says
        what the rows are to the stored ones: `"aggregate"`, inputs for the table's merge engine;
        `"overwrite"`, rows as they are to be, past the engine; and of aggregation tables
        `"retract"`, inputs that are taken back, and `"merge_state"`, states. With `pre_aggregate`
        inputs are aggregated here, batch by batch, and sent as states: fewer rows where keys
        repeat.

        >>> with table.upsert() as writer:  # doctest: +SKIP
        ...     writer.write(pandas_frame)
        ...     writer.delete({"id": [2]})
        >>> with table.upsert(["id", "name"]) as writer:  # doctest: +SKIP
        ...     writer.write({"id": 1, "name": "new"})
        """
        make = functools.partial(
            self._table.upsert, columns, merge_mode=merge_mode, pre_aggregate=pre_aggregate
        )
        return UpsertWriter(self._thread, self._thread.call(make))

    def exactly_once_writer(
        self,
        producer_id: str | None = None,
        columns: Sequence[str] | None = None,
        *,
        state: States | None = None,
        ttl: Duration | None = None,
        pre_aggregate: bool = False,
        undo: UndoBy = "server",
        on_undo: OnUndo | None = None,
    ) -> ExactlyOnceWriter:
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

        >>> with table.exactly_once_writer("views", state=kept) as writer:  # doctest: +SKIP
        ...     writer.write(rows)
        ...     kept = writer.checkpoint()
        """
        work = self._table.exactly_once_writer(
            producer_id,
            columns,
            state=state,
            ttl=ttl,
            pre_aggregate=pre_aggregate,
            undo=undo,
            on_undo=on_undo,
        )
        return ExactlyOnceWriter(self._thread, self._thread.run(work))

    def producer_writer(
        self, handle: ProducerHandle, task: int, *, pre_aggregate: bool = False
    ) -> TaskWriter:
        """A writer of task number `task` of a job, as the producer of a `handle`.

        The handle comes from the `exactly_once_writer` of the job's driver, or from
        `append_producer`, and may have been sent here. Under one handle a number stands for one
        stream of rows: a task that is run again writes the same rows in the same order, and what
        the table has of them already is dropped. `finish` ends it and says where its buckets stand.

        >>> with table.producer_writer(handle, task=3) as writer:  # doctest: +SKIP
        ...     writer.write(rows)
        ...     offsets = writer.finish()
        """
        make = functools.partial(
            self._table.producer_writer, handle, task, pre_aggregate=pre_aggregate
        )
        return TaskWriter(self._thread, self._thread.call(make))

    def append_producer(self, producer_id: str | None = None) -> ProducerHandle:
        """A producer of a log table, for tasks that may be run again: see `producer_writer`.

        A `producer_id` has the same number whenever it is asked for; without one it is a new one.
        """
        return self._thread.run(self._table.append_producer(producer_id))

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
    ) -> LogScan:
        """What to read of a table; nothing is read until the scan is used.

        `source` says where from. Of a log table `"log"`, unless told otherwise. Of a primary-key
        table `"live"`, its rows at the moment the run is opened, or `"snapshot"`, its newest
        key-value snapshots. Of both `"union"`, lake and log together, and `"lake"`.

        `columns`, `filter` and `limit` are pushed to the server, and the filter is applied exactly
        here. `stop=None` follows a log. `with_offsets` adds `__offset`, `__timestamp`, `__bucket`.
        Rows of a primary-key table can be read as they were at offsets of its changelog (`at`, as
        far as the server can make them again), without reading ahead (`prefetch=0`), and without
        opening the state again where the server lost it (`resume=False`).

        >>> table.scan(["id"], col("id") > 5).to_pandas()  # doctest: +SKIP
        >>> orders.scan(source="union").to_pandas()  # doctest: +SKIP
        """
        scan = self._table.scan(
            columns,
            filter,
            start=start,
            stop=stop,
            limit=limit,
            partitions=partitions,
            buckets=buckets,
            with_offsets=with_offsets,
            source=source,
            at=at,
            prefetch=prefetch,
            resume=resume,
        )
        if isinstance(scan, AsyncKvScan):
            return KvScan(self._thread, scan)
        if isinstance(scan, AsyncUnionScan):
            return UnionScan(self._thread, scan)
        return LogScan(self._thread, scan)

    @overload
    def lookup(self, keys: SingleKey) -> Row | None: ...

    @overload
    def lookup(self, keys: Any, *, missing: Missing = "null") -> pa.Table: ...

    def lookup(self, keys: Any, *, missing: Missing = "null") -> Row | pa.Table | None:
        """Rows of a primary-key table by key: one as a dict, several as an Arrow table.

        One key is a value, a tuple of values in key order, or a dict. Several are a list of those,
        or columns in any form that writers take. With `missing="null"` the result has one row per
        key, all null where the key is not there; with `missing="drop"` only the rows there are.
        Keys have the partition columns too; in a partition that does not exist there is no row.

        >>> table.lookup(7)  # doctest: +SKIP
        {'id': 7, 'name': 'seven'}
        >>> table.lookup(pandas_frame[["id"]], missing="drop").to_pandas()  # doctest: +SKIP
        """
        form = KeyForm.whole(self.info)
        key = form.single(keys)
        if key is not None:
            return self._thread.run(self._table.lookup(key))
        batches = list(form.batches(keys))
        return self._thread.run(self._table.lookup_batches(batches, missing=missing))

    def prefix_lookup(self, prefix: Any) -> pa.Table:
        """The rows whose primary key begins with the bucket key `prefix`, or with one of several.

        The table's bucket key must be the first part of its primary key. On a partitioned table
        the partition columns come first: `prefix` has these, then the bucket key.

        >>> orders.prefix_lookup(4711)  # all orders of a customer  # doctest: +SKIP
        """
        form = KeyForm.prefix(self.info)
        key = form.single(prefix)
        batches = list(form.batches(prefix if key is None else [key]))
        return self._thread.run(self._table.prefix_batches(batches))

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
    ) -> LogScan:
        """The changes of a primary-key table; nothing is read until the scan is used.

        Before the columns stand `_change_type` (`+I`, `-U`, `+U`, `-D`), `_log_offset` and
        `_commit_timestamp`. `filter` is applied to each change by itself. `stop=None` follows.

        >>> table.changelog(["id"]).to_pandas()  # doctest: +SKIP
        """
        scan = self._table.changelog(
            columns,
            filter,
            start=start,
            stop=stop,
            limit=limit,
            partitions=partitions,
            buckets=buckets,
        )
        return LogScan(self._thread, scan)

    def kv_snapshot(
        self,
        bucket: TableBucket,
        snapshot_id: int | None = None,
        columns: Sequence[str] | None = None,
        *,
        after: bytes | None = None,
        lease: KvSnapshotLease | None = None,
    ) -> KvSnapshotReader:
        """Open a key-value snapshot: the rows of a bucket as they were at an offset.

        `admin.latest_kv_snapshots` says which there are. With a `lease` it is the one that the
        lease holds, and losing the lease is what the reader raises. `after` goes on behind the
        `last_key` of an earlier reader of the same snapshot.

        >>> with table.kv_snapshot(bucket, columns=["id"], lease=lease) as reader:  # doctest: +SKIP
        ...     rows = pa.Table.from_batches(reader, reader.schema)
        """
        held = None if lease is None else lease.lease
        opened = self._table.kv_snapshot(bucket, snapshot_id, columns, after=after, lease=held)
        return KvSnapshotReader(self._thread, self._thread.run(opened))

    def head(self, count: int = 10) -> pa.Table:
        """Some rows, at most `count`: of a log table the first, of a primary-key table any.

        >>> table.head(5)  # doctest: +SKIP
        """
        return self._thread.run(self._table.head(count))

    def __repr__(self) -> str:
        return repr(self._table).replace("AsyncTable", "Table")
