"""Exactly-once writers of primary-key tables: checkpoints, and restarts that undo later writes.

    writer = await table.exactly_once_writer("page-views")
    ...
    state = await writer.checkpoint()     # store it in one step with the position of the source

A writer is an epoch of a *producer*. While it lives, nobody else can write its columns, and from
its beginning on no earlier epoch can. After a crash, the next writer gets the last stored
checkpoint. Before it writes, all writes of earlier epochs behind that checkpoint are undone.

| restart | undone |
|---|---|
| with `state` | all writes behind that checkpoint |
| without, and no checkpoint was stored | all writes since the first start: read the source anew |
| without, although one was stored | nothing: `ProducerStateError`, as rows would count twice |
| aggregate functions for which a replay changes nothing | nothing |

A checkpoint counts as stored when the caller makes the next one, so the coordinator is told of the
checkpoint before. With a `checkpoint_id` a checkpoint counts at once: a restarted caller can ask
which id was reported last and needs no state.

Any batch that fails ends the writer, because later batches would count without it. Open a new
writer with the last checkpoint then. Rows that do not fit the table's columns are refused before
they are taken, and do not end the writer.

In a job of several processes the driver has the writer and sends `handle` to its tasks, which open
`table.producer_writer(handle, task=n)`. Under one handle, a task number stands for one stream of
rows. A task that runs again writes the same rows in the same order, and the server drops those that
it has. Checkpoint when all tasks have ended, or, if no two tasks write the same buckets, with the
offsets that `finish` returned.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence
from typing import Literal, get_args

from zufluss.client.core.catalog import list_partitions
from zufluss.client.core.cluster import ClusterConnection
from zufluss.client.core.durations import Duration
from zufluss.client.core.keys import check_primary_key
from zufluss.client.core.offsets import BucketPlace, list_all_offsets, list_offsets
from zufluss.client.producer.handle import (
    JOB_TASK_MAX,
    OWN_TASK,
    ProducerHandle,
    ProducerSession,
    column_ids_of,
    column_names,
    handle_of,
    init_producer,
    producer_id_of,
    ttl_ms_of,
)
from zufluss.client.producer.state import ProducerState, States, state_of
from zufluss.client.producer.undo import OnUndo, UndoProgress, undo_on_leaders
from zufluss.client.producer.undo_changelog import undo_by_changelog
from zufluss.client.write.append import AsyncAppendWriter
from zufluss.client.write.sender import BucketQueue
from zufluss.client.write.upsert import AsyncUpsertWriter, MergeModeName, put_mode
from zufluss.client.write.writer import BatchWriter, Identity
from zufluss.errors import (
    ConfigError,
    InvalidTableError,
    PartitionNotExistError,
    ProducerStateError,
    UnknownTableOrBucketError,
)
from zufluss.model.producer import check_producer_id
from zufluss.model.table import TableBucket, TableInfo
from zufluss.wire import messages as m

log = logging.getLogger(__name__)

UndoBy = Literal["server", "client"]
"""Where an undo runs: on the leaders of the buckets, or in this client."""
TaskOffsets = Mapping[TableBucket, int]
"""The end offsets of the buckets that a task wrote to."""


class AsyncExactlyOnceWriter(AsyncUpsertWriter):
    """Writes each row once, even after a crash; `await table.exactly_once_writer(…)` opens it.

    >>> writer = await table.exactly_once_writer("views", state=state)  # doctest: +SKIP
    >>> await writer.write({"page": ["/"], "views": [1]})  # doctest: +SKIP
    >>> state = await writer.checkpoint()  # doctest: +SKIP
    """

    def __init__(
        self,
        connection: ClusterConnection,
        info: TableInfo,
        producer: ProducerSession,
        columns: Sequence[str],
        *,
        pre_aggregate: bool,
        state: ProducerState | None,
        undone: UndoProgress | None,
    ) -> None:
        identity = Identity(producer.handle.writer_id(OWN_TASK))
        super().__init__(connection, info, columns, pre_aggregate=pre_aggregate, identity=identity)
        self.state = state
        """The last checkpoint, made by this writer or restored; None before the first one."""
        self.undone = undone
        """What was undone when the writer began; None if nothing was."""
        self._producer = producer
        self._marks: dict[BucketQueue, int] = {}
        producer.on_loss = self._sender.end

    @property
    def handle(self) -> ProducerHandle:
        """The handle that tasks of the job need to write for this producer."""
        return self._producer.handle

    @property
    def producer_id(self) -> str:
        """The producer's id, the same after each restart."""
        return self.handle.producer_id

    @property
    def epoch(self) -> int:
        """The number of this start of the producer."""
        return self.handle.epoch

    @property
    def last_checkpoint_id(self) -> int | None:
        """The last `checkpoint_id` reported before this start; None if there is none."""
        return self.handle.last_checkpoint_id

    @property
    def exclusive(self) -> bool:
        """Whether the producer is the only writer of its columns."""
        return self._producer.exclusive

    async def checkpoint(
        self, *, checkpoint_id: int | None = None, tasks: Iterable[TaskOffsets] | None = None
    ) -> ProducerState:
        """Wait until all rows are acknowledged, and return the state of the table.

        Store the state, in one step with the position of the source, before the next checkpoint:
        the next call tells the cluster that this state is stored. With a `checkpoint_id`, an
        increasing number of your own, the checkpoint counts at once, and `last_checkpoint_id` has
        the number after a restart. Writes wait meanwhile.

        All tasks of the job must have ended. If some still run, give the offsets that the ended
        tasks returned from `finish` as `tasks`; then no two tasks may write the same buckets.
        """
        async with self._order:
            await self._convert_rows()
            self._seal_all()
            await self._acknowledged()
            ended = None if tasks is None else list(tasks)
            offsets = await (self._all_offsets() if ended is None else self._moved_to(ended))
            before = None if self.state is None else self.state.offsets
            await self._producer.report(before if checkpoint_id is None else offsets, checkpoint_id)
            self._marks = {queue: queue.next_sequence for queue in self._queues.values()}
            self.state = self._state_at(offsets)
        return self.state

    def _state_at(self, offsets: TaskOffsets) -> ProducerState:
        return ProducerState(
            self.info.path,
            self.info.table_id,
            self.producer_id,
            self.handle.number,
            self.epoch,
            self.handle.column_ids,
            1 if self.state is None else self.state.checkpoint + 1,
            offsets,
        )

    async def _all_offsets(self) -> TaskOffsets:
        offsets = await list_all_offsets(self._connection, self.info.path, "latest")
        if any(bucket.table_id != self.info.table_id for bucket in offsets):
            raise ProducerStateError(
                f"table {self.info.path} was dropped and created again, with all rows of this "
                "writer; start a new one without a state"
            )
        return offsets

    async def _moved_to(self, tasks: Sequence[TaskOffsets]) -> TaskOffsets:
        """The last checkpoint, advanced by the writes of tasks and of this writer since."""
        moved = [
            BucketPlace(queue.bucket, queue.partition)
            for queue in self._queues.values()
            if queue.next_sequence != self._marks.get(queue, 0)
        ]
        own = await end_offsets(self._connection, self.info, moved)
        offsets = dict(self._producer.baseline if self.state is None else self.state.offsets)
        for reached in (own, *tasks):
            for bucket, offset in reached.items():
                offsets[bucket] = max(offset, offsets.get(bucket, 0))
        partition_ids: set[int | None] = {None}
        if self.info.is_partitioned:
            listed = await list_partitions(self._connection, self.info.path)
            partition_ids = {partition.partition_id for partition in listed}
        return _completed(self.info, offsets, partition_ids)

    async def close(self, *, release: bool = False) -> None:
        """Wait until all rows are acknowledged, and end the writer.

        The producer stays: the next start undoes all writes behind the last stored checkpoint. With
        `release` the producer ends, too: its columns are free, nothing is ever undone, and a start
        under the same id is a new producer.
        """
        async with self._ending:
            if self._ended:
                return
            try:
                if release:
                    self._raise_failure()
                await self._close()
                if release:
                    await self._producer.release()
            finally:
                await self._producer.stop()

    async def release(self) -> None:
        """Close the writer and end its producer for good: `close(release=True)`."""
        await self.close(release=True)

    def for_task(self, task: int, *, pre_aggregate: bool = False) -> AsyncTaskUpsertWriter:
        """Open the writer of a task of this job in this process; elsewhere use `handle`."""
        return AsyncTaskUpsertWriter(
            self._connection, self.info, self.handle, task, pre_aggregate=pre_aggregate
        )

    def __repr__(self) -> str:
        plain = super().__repr__().removesuffix(">")
        return f"{plain}, producer {self.producer_id}, epoch {self.epoch}>"


class _TaskWriter(BatchWriter):
    """The base of the writers of tasks."""

    async def finish(self) -> TaskOffsets:
        """Wait until all rows are acknowledged, close, and return the offsets of the buckets."""
        await self.flush()
        places = [BucketPlace(queue.bucket, queue.partition) for queue in self._queues.values()]
        offsets = await end_offsets(self._connection, self.info, places)
        await self.close()
        return offsets


class AsyncTaskUpsertWriter(_TaskWriter, AsyncUpsertWriter):
    """The writer of a task to a primary-key table; `table.producer_writer(…)` makes it.

    >>> async with table.producer_writer(handle, task=3) as writer:  # doctest: +SKIP
    ...     await writer.write(rows)
    ...     offsets = await writer.finish()
    """

    def __init__(
        self,
        connection: ClusterConnection,
        info: TableInfo,
        handle: ProducerHandle,
        task: int,
        *,
        merge_mode: MergeModeName = "aggregate",
        pre_aggregate: bool = False,
    ) -> None:
        super().__init__(
            connection,
            info,
            handle.columns(info),
            merge_mode,
            pre_aggregate=pre_aggregate,
            identity=_task_identity(handle, task),
        )


class AsyncTaskAppendWriter(_TaskWriter, AsyncAppendWriter):
    """The writer of a task to a log table; `table.producer_writer(…)` makes it."""

    def __init__(
        self, connection: ClusterConnection, info: TableInfo, handle: ProducerHandle, task: int
    ) -> None:
        handle.check(info)
        super().__init__(connection, info, _task_identity(handle, task))


AsyncTaskWriter = AsyncTaskUpsertWriter | AsyncTaskAppendWriter
"""The writer of a task."""


def _task_identity(handle: ProducerHandle, task: int) -> Identity:
    if not 0 <= task <= JOB_TASK_MAX:
        raise ConfigError(
            f"task {task} of producer {handle.producer_id!r} is not allowed; allowed are 0 to "
            f"{JOB_TASK_MAX}"
        )
    return Identity(handle.writer_id(task), seed=task)


def task_writer(
    connection: ClusterConnection,
    info: TableInfo,
    handle: ProducerHandle,
    task: int,
    *,
    pre_aggregate: bool = False,
) -> AsyncTaskWriter:
    """Open the writer of a task, for `table.producer_writer`."""
    if info.has_primary_key:
        return AsyncTaskUpsertWriter(connection, info, handle, task, pre_aggregate=pre_aggregate)
    if pre_aggregate:
        raise ConfigError(f"table {info.path} is a log; there is nothing to aggregate in it")
    return AsyncTaskAppendWriter(connection, info, handle, task)


async def open_exactly_once(
    connection: ClusterConnection,
    info: TableInfo,
    producer_id: str | None,
    columns: Sequence[str] | None,
    state: States | None,
    ttl: Duration | None,
    pre_aggregate: bool,
    undo: UndoBy,
    on_undo: OnUndo | None,
) -> AsyncExactlyOnceWriter:
    """Open a writer, for `table.exactly_once_writer`."""
    check_primary_key(info, "exactly-once writer", "table.append(), which writes each batch once")
    put_mode(info, "aggregate", pre_aggregate)
    if undo not in get_args(UndoBy):
        raise ConfigError(f"undo {undo!r} is none of {', '.join(get_args(UndoBy))}")
    restored = None if state is None else state_of(state)
    if restored is not None:
        restored.check(info)
        producer_id = _same_producer(restored, producer_id)
    column_ids = _column_ids(info, columns, restored)
    name = producer_id_of(connection, producer_id)
    producer = ProducerSession(connection, info, name, ttl_ms_of(connection, ttl))
    await producer.begin(column_ids, restored)
    try:
        undone = await _undo(connection, info, producer, undo, on_undo)
        return AsyncExactlyOnceWriter(
            connection,
            info,
            producer,
            producer.handle.columns(info),
            pre_aggregate=pre_aggregate,
            state=restored,
            undone=undone,
        )
    except BaseException:
        await producer.stop()
        raise


async def open_append_producer(
    connection: ClusterConnection, info: TableInfo, producer_id: str | None
) -> ProducerHandle:
    """Open a producer of a log table, for `table.append_producer`."""
    if info.has_primary_key:
        raise InvalidTableError(
            f"table {info.path} has a primary key; its producers are exactly-once writers: use "
            "table.exactly_once_writer()"
        )
    name = "" if producer_id is None else check_producer_id(producer_id)
    ttl_ms = connection.options.producer_ttl_ms
    request = m.InitProducerRequest(producer_id=name, table_id=info.table_id, ttl_ms=ttl_ms)
    return handle_of(request, await init_producer(connection, info, request))


async def renew_producer(
    connection: ClusterConnection, info: TableInfo, handle: ProducerHandle
) -> ProducerHandle:
    """Give a producer a new number, with epochs from 1 on; its last checkpoint stays.

    For producers that have used up nearly all epoch numbers. Nobody may have written under the
    present epoch.
    """
    request = m.InitProducerRequest(
        producer_id=handle.producer_id,
        table_id=info.table_id,
        column_ids=handle.column_ids,
        ttl_ms=connection.options.producer_ttl_ms,
        renew=True,
    )
    return handle_of(request, await init_producer(connection, info, request))


async def open_fence(
    connection: ClusterConnection, info: TableInfo, producer_id: str
) -> ProducerHandle:
    """Begin an epoch for tasks that upsert: the server refuses writers of earlier epochs.

    The epoch owns no columns, and nothing is undone. It ends when it is released, or silent for the
    cluster's `zufluss.producer.hold-max`.
    """
    check_primary_key(info, "fence", "table.append_producer()")
    request = m.InitProducerRequest(
        producer_id=check_producer_id(producer_id),
        table_id=info.table_id,
        ttl_ms=connection.options.producer_ttl_ms,
        fence_only=True,
    )
    return handle_of(request, await init_producer(connection, info, request))


async def _undo(
    connection: ClusterConnection,
    info: TableInfo,
    producer: ProducerSession,
    undo: UndoBy,
    on_undo: OnUndo | None,
) -> UndoProgress | None:
    if producer.undo_from is None:
        return None
    if undo == "server":
        work = undo_on_leaders(connection, info, producer.handle, producer.undo_from, on_undo)
    else:
        work = undo_by_changelog(connection, info, producer, producer.undo_from, on_undo)
    undone = await work
    log.info(
        "producer %s epoch %d of %s: %d keys undone in %d buckets",
        producer.producer_id,
        producer.handle.epoch,
        info.path,
        undone.keys,
        undone.buckets,
    )
    return undone


def _same_producer(restored: ProducerState, producer_id: str | None) -> str:
    if producer_id not in (None, restored.producer_id):
        raise ProducerStateError(
            f"{restored} cannot be restored by producer {producer_id!r}; leave the id out, or give "
            "the state of that producer"
        )
    return restored.producer_id


def _column_ids(
    info: TableInfo, columns: Sequence[str] | None, restored: ProducerState | None
) -> Sequence[int]:
    """The ids of the columns to own, given or restored; empty for all beside the key."""
    ids = column_ids_of(info, columns)
    if restored is None:
        return ids
    if columns is not None and ids != restored.column_ids:
        raise ProducerStateError(
            f"{restored} has other columns than {', '.join(columns or ())}; leave them out to "
            "go on with those it had, or release the producer and start another one"
        )
    column_names(info, restored.column_ids)
    return restored.column_ids


def _completed(
    info: TableInfo, offsets: TaskOffsets, partitions: Iterable[int | None]
) -> TaskOffsets:
    """The offsets of every bucket in these partitions; 0 for a bucket without writes."""
    known = {bucket.partition_id for bucket in offsets} & set(partitions)
    places = [
        TableBucket(info.table_id, partition_id, bucket_id)
        for partition_id in known
        for bucket_id in range(info.bucket_count)
    ]
    return {bucket: offsets.get(bucket, 0) for bucket in places}


async def end_offsets(
    connection: ClusterConnection, info: TableInfo, places: Sequence[BucketPlace]
) -> TaskOffsets:
    """The end offsets of buckets; buckets of dropped partitions are left out."""
    try:
        return await list_offsets(connection, info, places, "latest")
    except (PartitionNotExistError, UnknownTableOrBucketError):
        listed = await list_partitions(connection, info.path)
        existing = {partition.partition_id for partition in listed}
        left = [place for place in places if place.bucket.partition_id in existing]
        if len(left) == len(places):
            raise
        return await list_offsets(connection, info, left, "latest")
