"""Batch writes: `df.write.format("fluss").mode("append").save()` and `INSERT INTO` a view.

The effects of a failed job:

| table | after a failed job | after a second run |
|---|---|---|
| log | rows of some tasks | these rows twice; once if both runs had the same `txn.id` |
| primary key | rows of some tasks | correct: a repeated row is the same |
| aggregation | nothing: its rows are undone | correct |

A task checks all of its rows before it sends the first. An aggregation job whose driver is killed
undoes nothing; with a `txn.id` its next run does.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import TYPE_CHECKING

import pyarrow as pa
from pyspark import TaskContext
from pyspark.sql.datasource import DataSourceArrowWriter, WriterCommitMessage

from zufluss.client.producer.handle import ProducerHandle
from zufluss.errors import ConfigError
from zufluss.spark.source_options import TXN_ID, SourceOptions
from zufluss.spark.write import tasks
from zufluss.spark.write.sink import Sink, SinkKind, make_sink
from zufluss.spark.write.tasks import TaskCommit

if TYPE_CHECKING:
    from pyspark.sql.types import StructType


log = logging.getLogger(__name__)


def make_writer(options: SourceOptions, schema: StructType, overwrite: bool) -> FlussWriter:
    """The writer of a job, after all checks; begins the producer of the job."""
    sink = make_sink(options, schema, overwrite)
    txn_id = options.get(TXN_ID)
    handle: ProducerHandle | None = None
    if sink.kind is SinkKind.LOG:
        handle = tasks.log_producer(sink, txn_id)
        if handle.last_checkpoint_id is not None:
            log.warning(
                "table %s: a job under %s = %s has ended well before, so nothing is appended; "
                "other rows need another name",
                sink.info.path,
                TXN_ID.key,
                txn_id,
            )
    elif sink.kind is SinkKind.AGGREGATE:
        handle = tasks.begin(sink, txn_id)
    elif txn_id is not None:
        raise ConfigError(
            f"option {TXN_ID.key} has no meaning for a batch write to primary-key table "
            f"{sink.info.path}: rows that are written again are the same; leave it out"
        )
    return FlussWriter(sink, handle)


class FlussWriter(DataSourceArrowWriter):
    """Writes the rows of one job. Pickles."""

    def __init__(self, sink: Sink, handle: ProducerHandle | None) -> None:
        self._sink = sink
        self._handle = handle

    def write(self, iterator: Iterator[pa.RecordBatch]) -> WriterCommitMessage:
        """Write the rows of a task."""
        sink, handle = self._sink, self._handle
        task, attempt = task_attempt()
        if sink.kind is SinkKind.UPSERT:
            tasks.write_upserts(sink, iterator, None, task, attempt)
            return TaskCommit({}, None)
        assert handle is not None
        if sink.kind is SinkKind.LOG:
            if handle.last_checkpoint_id is None:
                tasks.write_log(sink, iterator, handle, task)
            else:
                skip(iterator)
            return TaskCommit({}, None)
        return TaskCommit(tasks.write_inputs(sink, iterator, handle, task), handle)

    def commit(self, messages: list[WriterCommitMessage | None]) -> None:
        """Commit the job after all tasks: nothing is undone or written again from here on."""
        if self._sink.kind is SinkKind.LOG:
            assert self._handle is not None
            tasks.log_done(self._sink, self._handle)
            return
        if self._handle is not None:
            tasks.release(self._sink, self._handle)

    def abort(self, messages: list[WriterCommitMessage | None]) -> None:
        """Undo the rows of a failed job, or of a failed commit."""
        sink, handle = self._sink, self._handle
        if sink.kind is SinkKind.LOG or handle is None:
            return
        if sink.kind is SinkKind.AGGREGATE:
            handle = tasks.begin(sink, handle.producer_id)
        tasks.release(sink, handle)


def skip(rows: Iterator[pa.RecordBatch]) -> None:
    """Read and ignore rows: Spark reuses a worker only if it has read all of them."""
    for _ in rows:
        pass


def task_attempt() -> tuple[int, int]:
    """The number of this task in its job, the same in every run, and of its attempt."""
    context = TaskContext.get()
    assert context is not None
    return int(context.partitionId()), int(context.attemptNumber())
