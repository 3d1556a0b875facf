"""Exactly-once writers of primary-key tables: checkpoints, and restarts that undo what came after.

    writer = await table.exactly_once_writer("page-views")
    ...
    state = await writer.checkpoint()     # keep it, in one step with the position of the source

A writer is an epoch of a *producer*. While it lives nobody else can write its columns, and from the
moment it begins no earlier epoch can. After a crash the next one is given the last checkpoint that
was kept; before it writes anything, what earlier epochs wrote behind that checkpoint is undone.

| restart | what is undone |
|---|---|
| with `state` | everything behind that checkpoint |
| without, and no checkpoint was kept | everything since the first start: read the source anew |
| without, although one was kept | nothing: `ProducerStateError`, for it would count twice |
| the functions make no odds of a replay | nothing |

A checkpoint is kept when the caller comes back for the next one, so the coordinator is always told
of the one before. With a `checkpoint_id`, whoever restarts can ask which one was reported last, and
needs no state: then the coordinator is told of this one.

Any batch that fails ends the writer: what follows would be counted without it. Restore the last
checkpoint then, in a new writer. Rows that do not fit the table's columns are refused before they
are taken over, and end nothing.

Jobs of several processes: the writer is the driver's, and `handle` is sent to the tasks, which open
`table.producer_writer(handle, task=n)`. Under one handle the number of a task stands for one stream
of rows. A task that is run again writes the same rows in the same order, and what is there already
is dropped. Checkpoint when all tasks have ended, or, if no two of them write the same buckets, with
the offsets that their `close` gave.
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
"""Who undoes: the leaders of the buckets, or this client, which reads their changelogs."""
TaskOffsets = Mapping[TableBucket, int]
"""Where the buckets that a task wrote to stood when it ended."""


class AsyncExactlyOnceWriter(AsyncUpsertWriter):
    """Writes each row once, whatever crashes; `await table.exactly_once_writer(…)` makes it.

    >>> async with await table.exactly_once_writer("views", state=kept) as writer:  # doctest: +SKIP
    ...     await writer.write({"page": ["/"], "views": [1]})
    ...     kept = (await writer.checkpoint()).to_bytes()
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
        """The last checkpoint: made by this writer, or restored; None before the first."""
        self.undone = undone
        """What was undone before it began; None if nothing had to be."""
        self._producer = producer
        self._marks: dict[BucketQueue, int] = {}
        producer.on_loss = self._sender.end

    @property
    def handle(self) -> ProducerHandle:
        """What tasks of the job need to write as this producer."""
        return self._producer.handle

    @property
    def producer_id(self) -> str:
        """Its id, the same after each restart."""
        return self.handle.producer_id

    @property
    def epoch(self) -> int:
        """Which start of the producer it is."""
        return self.handle.epoch

    @property
    def last_checkpoint_id(self) -> int | None:
        """The number of the last checkpoint that was reported with one, before this start."""
        return self.handle.last_checkpoint_id

    @property
    def exclusive(self) -> bool:
        """Nobody else can write its columns."""
        return self._producer.exclusive

    async def checkpoint(
        self, *, checkpoint_id: int | None = None, tasks: Iterable[TaskOffsets] | None = None
    ) -> ProducerState:
        """Have everything acknowledged, and say where the table stands; writes wait meanwhile.

        Keep the state, in one step with the position of the source, before the next checkpoint: by
        coming back you say that you have it. With a `checkpoint_id`, a number of your own that
        grows, the checkpoint counts at once, and `last_checkpoint_id` tells it after a restart.

        All tasks of the job must have ended. If others go on, `tasks` has the offsets of those that
        ended, from their `finish`, and no two tasks may write to the same buckets.
        """
        async with self._order:
            await self._convert_rows()
            self._seal_all()
            await self._acknowledged()
            given = None if tasks is None else list(tasks)
            offsets = await (self._all_offsets() if given is None else self._moved_to(given))
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
                f"table {self.info.path} was dropped and created again; what this writer wrote is "
                "gone, so start anew without a state"
            )
        return offsets

    async def _moved_to(self, tasks: Sequence[TaskOffsets]) -> TaskOffsets:
        """The last checkpoint, moved on where tasks or this writer have written since."""
        moved = [
            BucketPlace(queue.bucket, queue.partition)
            for queue in self._queues.values()
            if queue.next_sequence != self._marks.get(queue, 0)
        ]
        own = await end_offsets(self._connection, self.info, moved)
        offsets = dict(self._producer.baseline if self.state is None else self.state.offsets)
        for found in (own, *tasks):
            for bucket, offset in found.items():
                offsets[bucket] = max(offset, offsets.get(bucket, 0))
        kept: set[int | None] = {None}
        if self.info.is_partitioned:
            listed = await list_partitions(self._connection, self.info.path)
            kept = {partition.partition_id for partition in listed}
        return _completed(self.info, offsets, kept)

    async def close(self, *, release: bool = False) -> None:
        """Have everything acknowledged, and end; with `release` the producer is over for good.

        Without it the producer stays: the next start is given the last checkpoint, and undoes what
        was written behind it. After a release its columns are free, and a start under the same id
        is a new producer.
        """
        if self._closed:
            return
        try:
            if release:
                self._raise_failure()
            await super().close()
            if release:
                await self._producer.release()
        finally:
            await self._producer.stop()

    async def release(self) -> None:
        """The work is done: close, and let go of the columns; nothing is ever undone."""
        await self.close(release=True)

    def for_task(self, task: int, *, pre_aggregate: bool = False) -> AsyncTaskUpsertWriter:
        """A writer of a task of this job, in this process; elsewhere use `handle`."""
        return AsyncTaskUpsertWriter(
            self._connection, self.info, self.handle, task, pre_aggregate=pre_aggregate
        )

    def __repr__(self) -> str:
        plain = super().__repr__().removesuffix(">")
        return f"{plain}, producer {self.producer_id}, epoch {self.epoch}>"


class _TaskWriter(BatchWriter):
    """What the writers of tasks have in common."""

    async def finish(self) -> TaskOffsets:
        """Have everything acknowledged, end, and say where the buckets written to stand."""
        await self.flush()
        places = [BucketPlace(queue.bucket, queue.partition) for queue in self._queues.values()]
        offsets = await end_offsets(self._connection, self.info, places)
        await self.close()
        return offsets


class AsyncTaskUpsertWriter(_TaskWriter, AsyncUpsertWriter):
    """A task's writer to a primary-key table; `table.producer_writer(handle, task)` makes it.

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
    """A task's writer to a log table; `table.producer_writer(handle, task)` makes it."""

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
    """What `table.producer_writer` makes."""
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
    """What `table.exactly_once_writer` does."""
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
    """What `table.append_producer` does."""
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
    """The same producer under a new number, from epoch 1 on; its last checkpoint stays.

    For who begins an epoch so often that they run out. Nobody may have written under this one.
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
    """An epoch for tasks that upsert: writers of earlier ones are refused from now on.

    It owns no columns, and nothing is undone. It is over when it is released, or when it was silent
    for the cluster's `zufluss.producer.hold-max`.
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
    """The columns to own: those given, or restored; none: all beside the key."""
    given = column_ids_of(info, columns)
    if restored is None:
        return given
    if columns is not None and given != restored.column_ids:
        raise ProducerStateError(
            f"{restored} has other columns than {', '.join(columns or ())}; leave them out to "
            "go on with those it had, or release the producer and start another one"
        )
    column_names(info, restored.column_ids)
    return restored.column_ids


def _completed(
    info: TableInfo, offsets: TaskOffsets, partitions: Iterable[int | None]
) -> TaskOffsets:
    """The offsets in these partitions; buckets nobody wrote to, in new ones, at their beginning."""
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
    """Where buckets stand; those of partitions that were dropped are left out."""
    try:
        return await list_offsets(connection, info, places, "latest")
    except (PartitionNotExistError, UnknownTableOrBucketError):
        listed = await list_partitions(connection, info.path)
        kept = {partition.partition_id for partition in listed}
        left = [place for place in places if place.bucket.partition_id in kept]
        if len(left) == len(places):
            raise
        return await list_offsets(connection, info, left, "latest")
