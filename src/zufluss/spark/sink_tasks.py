"""What writes rows: one task of a Spark job, and the producer that its driver begins for it.

A task may run twice, and its first run may have got half of its rows into the table. It is told
apart by its number, the partition of the job, and sends the same batches again:

| kind | number of its batches | order of its rows |
|---|---|---|
| `LOG` | producer, micro-batch, task | as they came, or by content |
| `UPSERT` | none: keys make it the same | as they came |
| `AGGREGATE` | producer, epoch, task | one row of states for each key, by key |
| `AGGREGATE` with a change column | producer, epoch, task | as they came |

Micro-batches of log tables are epochs of a producer, which the server compares by their distance:
so that it never gets too large, every `BATCHES` of them there is another producer.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Final

import pyarrow as pa
from pyspark.sql.datasource import WriterCommitMessage

from zufluss.client.append import AsyncAppendWriter
from zufluss.client.exactly_once import (
    AsyncExactlyOnceWriter,
    AsyncTaskUpsertWriter,
    open_append_producer,
    open_exactly_once,
)
from zufluss.client.producer import JOB_TASK_MAX, Producer, ProducerHandle
from zufluss.client.upsert import AsyncUpsertWriter
from zufluss.client.writer import BatchWriter, Identity
from zufluss.errors import ConfigError
from zufluss.model.producer import EPOCH_MAX
from zufluss.model.table import TableBucket
from zufluss.spark.sink import Sink
from zufluss.spark.sink_rows import by_change, folded, in_content_order, of_spark
from zufluss.spark.tail import client

BATCHES: Final = 1 << 19
"""Micro-batches of one producer of a log table."""
EPOCHS_LEFT: Final = 1024
"""A producer that has no more epochs than these is replaced by a new one."""

Offsets = Mapping[TableBucket, int]


@dataclass
class Written(WriterCommitMessage):
    """What a task has done."""

    offsets: Offsets
    """Where the buckets stood when it ended; of `AGGREGATE` only."""
    handle: ProducerHandle | None
    """As whom it wrote; None if it is not a producer's, or wrote nothing."""


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
    _write(sink, cluster.thread.call(make), ((False, part) for part in rows))


def write_upserts(sink: Sink, batches: Iterable[pa.RecordBatch]) -> None:
    """Upsert and delete the rows of a task."""
    cluster = client(sink.bootstrap, sink.options)
    make = lambda: AsyncUpsertWriter(cluster.connection, sink.info, sink.partial)  # noqa: E731
    _write(sink, cluster.thread.call(make), _changes(sink, batches))


def write_inputs(
    sink: Sink, batches: Iterable[pa.RecordBatch], handle: ProducerHandle, task: int
) -> Offsets:
    """Aggregate the rows of a task into the table; where the buckets stood then."""
    _check_task(sink, task)
    cluster = client(sink.bootstrap, sink.options)
    states = sink.change_column is None
    writer = cluster.thread.call(
        lambda: AsyncTaskUpsertWriter(
            cluster.connection,
            sink.info,
            handle,
            task,
            merge_mode="merge_state" if states else "aggregate",
        )
    )
    changes = _states(sink, batches) if states else _changes(sink, batches)
    return _write(sink, writer, changes)


def _write(
    sink: Sink, writer: BatchWriter, changes: Iterable[tuple[bool, pa.RecordBatch]]
) -> Offsets:
    """Write what is to be deleted (True) or not, and wait until the servers have it."""
    thread = client(sink.bootstrap, sink.options).thread
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


def _changes(
    sink: Sink, batches: Iterable[pa.RecordBatch]
) -> Iterator[tuple[bool, pa.RecordBatch]]:
    schema, keys = sink.info.schema.arrow, sink.info.schema.primary_key
    if sink.change_column is None:
        yield from ((False, rows) for rows in _fitted(sink, batches))
        return
    for rows in batches:
        for delete, part in by_change(rows, sink.change_column):
            yield delete, of_spark(part, schema, keys if delete else sink.columns)


def _states(sink: Sink, batches: Iterable[pa.RecordBatch]) -> Iterator[tuple[bool, pa.RecordBatch]]:
    rows: Iterable[pa.RecordBatch] = _fitted(sink, batches)
    if sink.canonical:
        rows = in_content_order(rows, sink.info)
    yield from ((False, part) for part in folded(rows, sink.info, sink.columns))


def _check_task(sink: Sink, task: int) -> None:
    if task > JOB_TASK_MAX:
        raise ConfigError(
            f"a write to table {sink.info.path} has at most {JOB_TASK_MAX + 1} tasks, and this is "
            f"number {task}; coalesce the rows first"
        )


# -- producers ---------------------------------------------------------------------------------

_numbers: dict[tuple[str, int, str], ProducerHandle] = {}
"""Producers of log tables that this process has asked for, by cluster, table and id."""


def log_producer(sink: Sink, txn_id: str | None, batch_id: int = 1) -> ProducerHandle:
    """The producer of a micro-batch, or of a job, of a log table; without an id a new one."""
    cluster = client(sink.bootstrap, sink.options)
    if txn_id is None:
        return cluster.thread.run(open_append_producer(cluster.connection, sink.info, None))
    generation, epoch = divmod(batch_id, BATCHES)
    name = f"{txn_id}.{generation}" if generation else txn_id
    key = (sink.bootstrap, sink.info.table_id, name)
    if key not in _numbers:
        opening = open_append_producer(cluster.connection, sink.info, name)
        _numbers[key] = cluster.thread.run(opening)
    return replace(_numbers[key], epoch=epoch)


def begin(sink: Sink, txn_id: str | None) -> ProducerHandle:
    """Begin an epoch: nobody writes as an earlier one, and what no commit followed is undone."""
    return client(sink.bootstrap, sink.options).thread.run(_begin(sink, txn_id))


async def _begin(sink: Sink, txn_id: str | None) -> ProducerHandle:
    writer = await _open(sink, txn_id)
    try:
        if writer.epoch <= EPOCH_MAX - EPOCHS_LEFT:
            return writer.handle
        last = writer.last_checkpoint_id
        await writer.release()
        writer = await _open(sink, txn_id)
        if last is not None:
            await writer.checkpoint(checkpoint_id=last)
        return replace(writer.handle, last_checkpoint_id=last)
    finally:
        await writer.close()


async def _open(sink: Sink, txn_id: str | None) -> AsyncExactlyOnceWriter:
    connection = client(sink.bootstrap, sink.options).connection
    place = (connection, sink.info, txn_id, sink.partial)
    return await open_exactly_once(
        *place, state=None, ttl=None, pre_aggregate=False, undo="server", on_undo=None
    )


def checkpoint(sink: Sink, written: Iterable[Written], batch_id: int) -> None:
    """Make what tasks wrote count; nothing if none of them has written."""
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
    cluster.thread.run(_producer(sink, handle).report(offsets, batch_id))


def release(sink: Sink, handle: ProducerHandle) -> None:
    """End a producer; what it wrote stays."""
    client(sink.bootstrap, sink.options).thread.run(_producer(sink, handle).release())


def _producer(sink: Sink, handle: ProducerHandle) -> Producer:
    """A producer that another process has begun."""
    connection = client(sink.bootstrap, sink.options).connection
    ttl_ms = connection.options.producer_ttl_ms
    producer = Producer(connection, sink.info, handle.producer_id, ttl_ms)
    producer.handle = handle
    return producer
