"""Writes the rows of one Spark task, and manages the producers that drivers begin for tasks.

A task may run twice, and its first run may have written half of its rows. The number of the task,
its partition in the job, identifies it, and it sends the same batches again:

| kind | number of its batches | order of its rows |
|---|---|---|
| `LOG` | producer, micro-batch, task | as they came, or by content |
| `UPSERT` of a stream | producer, epoch, task, attempt | the last of each key, by key |
| `UPSERT` of a job | none: a repeated row is the same | as they came, the last of each key |
| `AGGREGATE` | producer, epoch, task | one row of states for each key, by key |
| `AGGREGATE` with a change column | producer, epoch, task | as they came |

The producer of an upsert fences earlier epochs and drops nothing: each attempt has its own number.
If Spark repeats a whole stage, attempts count from 0 again; then the order by key makes the batches
equal.

Micro-batches of log tables are epochs of a producer, which the server compares by their distance.
To keep the distance small there is a new producer every `BATCHES` micro-batches.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Final

import pyarrow as pa
from pyspark.sql.datasource import WriterCommitMessage

from zufluss.client.producer.exactly_once import (
    AsyncExactlyOnceWriter,
    AsyncTaskUpsertWriter,
    open_append_producer,
    open_exactly_once,
    open_fence,
    renew_producer,
)
from zufluss.client.producer.handle import JOB_TASK_MAX, ProducerHandle, ProducerSession
from zufluss.client.write.append import AsyncAppendWriter
from zufluss.client.write.upsert import AsyncUpsertWriter
from zufluss.client.write.writer import BatchWriter, Identity
from zufluss.errors import ConfigError, UnsupportedVersionError
from zufluss.model.producer import EPOCH_MAX
from zufluss.model.table import TableBucket
from zufluss.spark.cluster import client
from zufluss.spark.write.rows import (
    by_change,
    by_last_change,
    folded,
    in_content_order,
    in_key_order,
    joined,
    of_spark,
)
from zufluss.spark.write.sink import Sink
from zufluss.spark.write.stage import Change, Stage

UPSERT_TASKS: Final = 8191
"""The most tasks of an upsert."""
ATTEMPTS: Final = 8
"""Attempts of a task that have different numbers."""
SIGN_SECONDS: Final = 60.0
"""How often a producer of a log table is renewed, so that the cluster keeps it."""
BATCHES: Final = 1 << 19
"""Micro-batches of one producer of a log table."""
EPOCHS_LEFT: Final = 1024
"""A producer with at most this many epochs left gets a new number."""

Offsets = Mapping[TableBucket, int]


@dataclass
class TaskCommit(WriterCommitMessage):
    """The result of a task, for the commit."""

    offsets: Offsets
    """End offsets of the written buckets; of `AGGREGATE` only."""
    handle: ProducerHandle | None
    """The producer of the task; None if there is nothing to commit."""
    checkpoint_id: int | None = None
    """The checkpoint id of the commit."""


# -- tasks -------------------------------------------------------------------------------------


def write_log(
    sink: Sink, batches: Iterable[pa.RecordBatch], handle: ProducerHandle, task: int
) -> None:
    """Append the rows of a task."""
    _check_task(sink, task)
    handle.check(sink.info)
    seed = task + handle.epoch  # small micro-batches go to one bucket each, not always to the same
    identity = Identity(handle.writer_id(task), seed)
    cluster = client(sink.bootstrap, sink.options)
    make = lambda: AsyncAppendWriter(cluster.connection, sink.info, identity)  # noqa: E731
    rows: Iterable[pa.RecordBatch] = _fitted(sink, batches)
    if sink.canonical:
        rows = in_content_order(rows, sink.info)
    _write(sink, make, ((False, part) for part in rows))


def write_upserts(
    sink: Sink,
    batches: Iterable[pa.RecordBatch],
    handle: ProducerHandle | None,
    task: int,
    attempt: int,
) -> None:
    """Upsert and delete the rows of a task; without a handle earlier writers are not fenced."""
    connection = client(sink.bootstrap, sink.options).connection
    changes = _changes(sink, batches)
    if handle is None:
        _write(sink, lambda: AsyncUpsertWriter(connection, sink.info, sink.partial), changes)
        return
    _check_task(sink, task, UPSERT_TASKS - 1)
    handle.check(sink.info)
    number = task + UPSERT_TASKS * (attempt % ATTEMPTS)
    identity = Identity(handle.writer_id(number), seed=task)
    make = lambda: AsyncUpsertWriter(  # noqa: E731
        connection, sink.info, sink.partial, identity=identity
    )
    _send(sink, make, _by_key(sink, changes))


def _by_key(sink: Sink, changes: Iterable[Change]) -> Iterator[Change]:
    """The last row of each key, by key: first upserts, then deletes."""
    with Stage.of(changes, sink.info, last_wins=True) as stage:
        last = list(stage)
    for delete in (False, True):
        for rows in joined(rows for deleted, rows in last if deleted is delete):
            yield delete, in_key_order(rows, sink.info)


def write_inputs(
    sink: Sink, batches: Iterable[pa.RecordBatch], handle: ProducerHandle, task: int
) -> Offsets:
    """Aggregate the rows of a task into the table; returns the end offsets of its buckets."""
    _check_task(sink, task)
    cluster = client(sink.bootstrap, sink.options)
    states = sink.change_column is None
    make = lambda: AsyncTaskUpsertWriter(  # noqa: E731
        cluster.connection,
        sink.info,
        handle,
        task,
        merge_mode="merge_state" if states else "aggregate",
    )
    return _write(sink, make, _states(sink, batches) if states else _changes(sink, batches))


def _write(sink: Sink, make: Callable[[], BatchWriter], changes: Iterable[Change]) -> Offsets:
    """Check all rows, then write them and wait until the servers have them."""
    with Stage.of(changes, sink.info, last_wins=sink.last_wins) as stage:
        return _send(sink, make, stage)


def _send(sink: Sink, make: Callable[[], BatchWriter], changes: Iterable[Change]) -> Offsets:
    thread = client(sink.bootstrap, sink.options).thread
    writer = thread.call(make)
    try:
        for delete, rows in changes:
            thread.run(writer.write_batches([rows], delete=delete))
        if isinstance(writer, AsyncTaskUpsertWriter):
            return thread.run(writer.finish())
        thread.run(writer.close())
        return {}
    except BaseException as problem:
        thread.run(writer.__aexit__(type(problem), problem, problem.__traceback__))
        raise


def _fitted(sink: Sink, batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    for rows in batches:
        if rows.num_rows:
            yield of_spark(rows, sink.info.schema.arrow, sink.columns)


def _changes(sink: Sink, batches: Iterable[pa.RecordBatch]) -> Iterator[Change]:
    schema, keys = sink.info.schema.arrow, sink.info.schema.primary_key
    if sink.change_column is None:
        yield from ((False, rows) for rows in _fitted(sink, batches))
        return
    for rows in batches:
        if sink.last_wins:  # a key at most once, so that the order of the two parts is any
            runs = by_last_change(rows, sink.change_column, sink.info, sink.ignores_deletes)
        else:
            runs = by_change(rows, sink.change_column)
        for delete, part in runs:
            yield delete, of_spark(part, schema, keys if delete else sink.columns)


def _states(sink: Sink, batches: Iterable[pa.RecordBatch]) -> Iterator[Change]:
    rows: Iterable[pa.RecordBatch] = _fitted(sink, batches)
    if sink.canonical:
        rows = in_content_order(rows, sink.info)
    yield from ((False, part) for part in folded(rows, sink.info, sink.columns))


def _check_task(sink: Sink, task: int, last: int = JOB_TASK_MAX) -> None:
    if task > last:
        raise ConfigError(
            f"a write to table {sink.info.path} has at most {last + 1} tasks, and this is number "
            f"{task}; coalesce the rows first"
        )


# -- producers ---------------------------------------------------------------------------------

_numbers: dict[tuple[str, int, str], tuple[ProducerHandle, float]] = {}
"""Producers of log tables by cluster, table and id, with the time at which each was renewed."""


def log_producer(sink: Sink, txn_id: str | None, batch_id: int | None = None) -> ProducerHandle:
    """The producer of a micro-batch, or of a job, of a log table; a new one without `txn_id`.

    The producer of a job that has ended has a `last_checkpoint_id`.
    """
    cluster = client(sink.bootstrap, sink.options)
    if txn_id is None or batch_id is None:
        return cluster.run(open_append_producer(cluster.connection, sink.info, txn_id))
    generation, epoch = divmod(batch_id, BATCHES)
    name = f"{txn_id}.{generation}" if generation else txn_id
    key = (sink.bootstrap, sink.info.table_id, name)
    handle, at = _numbers.get(key, (None, 0.0))
    if handle is None or time.monotonic() - at > SIGN_SECONDS:
        opening = open_append_producer(cluster.connection, sink.info, name)
        handle = cluster.run(opening)
        _numbers[key] = handle, time.monotonic()
    return replace(handle, epoch=epoch)


def fence(sink: Sink, txn_id: str) -> ProducerHandle | None:
    """Begin an epoch of upserts and fence earlier epochs; None if the cluster cannot fence."""
    cluster = client(sink.bootstrap, sink.options)
    try:
        return cluster.run(open_fence(cluster.connection, sink.info, txn_id))
    except UnsupportedVersionError:
        return None


def begin(sink: Sink, txn_id: str | None) -> ProducerHandle:
    """Begin an epoch: fence earlier epochs, and undo their uncommitted changes."""
    return client(sink.bootstrap, sink.options).run(_begin(sink, txn_id))


async def _begin(sink: Sink, txn_id: str | None) -> ProducerHandle:
    writer = await _open(sink, txn_id)
    try:
        if writer.epoch <= EPOCH_MAX - EPOCHS_LEFT:
            return writer.handle
        connection = client(sink.bootstrap, sink.options).connection
        return await renew_producer(connection, sink.info, writer.handle)
    finally:
        await writer.close()


async def _open(sink: Sink, txn_id: str | None) -> AsyncExactlyOnceWriter:
    connection = client(sink.bootstrap, sink.options).connection
    place = (connection, sink.info, txn_id, sink.partial)
    return await open_exactly_once(
        *place, state=None, ttl=None, pre_aggregate=False, undo="server", on_undo=None
    )


def checkpoint(sink: Sink, written: Iterable[TaskCommit]) -> None:
    """Commit the rows of tasks, if any task has written."""
    tasks = [message for message in written if message.handle is not None]
    if not tasks:
        return
    offsets: dict[TableBucket, int] = {}
    for task in tasks:
        for bucket, offset in task.offsets.items():
            offsets[bucket] = max(offset, offsets.get(bucket, 0))
    handle = tasks[0].handle
    assert handle is not None
    cluster = client(sink.bootstrap, sink.options)
    cluster.run(_producer(sink, handle).report(offsets, tasks[0].checkpoint_id))


def log_done(sink: Sink, handle: ProducerHandle) -> None:
    """Record that a job with a `txn.id` has appended all its rows."""
    if handle.producer_id:
        cluster = client(sink.bootstrap, sink.options)
        cluster.run(_producer(sink, handle).report(None, handle.epoch))


def release(sink: Sink, handle: ProducerHandle) -> None:
    """End a producer; its rows stay."""
    client(sink.bootstrap, sink.options).run(_producer(sink, handle).release())


def _producer(sink: Sink, handle: ProducerHandle) -> ProducerSession:
    """The producer of a handle that another process began."""
    connection = client(sink.bootstrap, sink.options).connection
    ttl_ms = connection.options.producer_ttl_ms
    producer = ProducerSession(connection, sink.info, handle.producer_id, ttl_ms)
    producer.handle = handle
    return producer
