"""Batch writes: `df.write.format("fluss").mode("append").save()` and `INSERT INTO` a view.

A job that fails leaves what it leaves:

| table | after a job that failed | when it is run again |
|---|---|---|
| log | rows of tasks that got so far | doubled, unless both had the same `txn.id` |
| primary key | the same | the same rows again: no harm |
| aggregation | nothing: it is undone | right |

An aggregation job whose driver is killed cannot undo anything. With a `txn.id` its next run does.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, cast

import pyarrow as pa
from pyspark import TaskContext
from pyspark.sql.datasource import DataSourceArrowWriter, WriterCommitMessage

from zufluss.client.producer import ProducerHandle
from zufluss.spark import sink_tasks as tasks
from zufluss.spark.sink import Kind, Sink, make_sink
from zufluss.spark.sink_tasks import Written
from zufluss.spark.source_options import TXN_ID, SourceOptions

if TYPE_CHECKING:
    from pyspark.sql.types import StructType


def make_writer(options: SourceOptions, schema: StructType, overwrite: bool) -> FlussWriter:
    """The writer of a job: everything is checked, and its producer has begun."""
    sink = make_sink(options, schema, overwrite)
    txn_id = options.get(TXN_ID)
    handle: ProducerHandle | None = None
    if sink.kind is Kind.LOG:
        handle = tasks.log_producer(sink, txn_id)
    elif sink.kind is Kind.AGGREGATE:
        handle = tasks.begin(sink, txn_id)
    return FlussWriter(sink, handle)


class FlussWriter(DataSourceArrowWriter):
    """Writes the rows of one job. Pickles."""

    def __init__(self, sink: Sink, handle: ProducerHandle | None) -> None:
        self._sink = sink
        self._handle = handle

    def write(self, iterator: Iterator[pa.RecordBatch]) -> WriterCommitMessage:
        """Write the rows of a task."""
        sink, handle = self._sink, self._handle
        if handle is None:
            tasks.write_upserts(sink, iterator)
            return Written({}, None)
        task = partition_id()
        if sink.kind is Kind.LOG:
            tasks.write_log(sink, iterator, handle, task)
            return Written({}, None)
        return Written(tasks.write_inputs(sink, iterator, handle, task), handle)

    def commit(self, messages: list[WriterCommitMessage | None]) -> None:
        """All tasks have ended: nothing is undone any more."""
        if self._sink.kind is Kind.AGGREGATE:
            tasks.release(self._sink, cast(ProducerHandle, self._handle))

    def abort(self, messages: list[WriterCommitMessage | None]) -> None:
        """The job failed, or its commit did: undo what counts now and should not."""
        if self._sink.kind is Kind.AGGREGATE:
            handle = cast(ProducerHandle, self._handle)
            tasks.release(self._sink, tasks.begin(self._sink, handle.producer_id))


def partition_id() -> int:
    """The number of this task in its job, the same when it is run again."""
    context = TaskContext.get()
    assert context is not None
    return int(context.partitionId())
