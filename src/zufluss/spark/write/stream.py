"""Streaming writes: `df.writeStream.format("fluss")`, each micro-batch once.

For each micro-batch Spark creates a writer in one process, sends it to the tasks, and creates a
second writer in another process to commit or abort. Neither writer is told its query and
micro-batch; tasks can find out both, and `commit` is told the micro-batch.

| what | known to the first writer | to tasks | to the second writer |
|---|---|---|---|
| micro-batch | no | yes | yes |
| query id | in its checkpoint, where that can be read | yes | as the first |
| option `txn.id` | yes | yes | yes |

The query id is created with the checkpoint and stays in it, so it identifies a series of
micro-batches: a new checkpoint, whose numbers begin at 0 again, has another query id. A `txn.id`
alone does not identify them, since micro-batch 0 of a new checkpoint has other rows. So log tables
have a producer per query, and aggregation tables refuse a second query.

Only the first writer is ever pickled. Pickling begins an epoch of the query's producer (primary-key
tables): writers of earlier micro-batches are fenced, also those of a driver that should be gone. In
aggregation tables their uncommitted rows are undone before any task of this micro-batch runs.

| killed | log table | primary-key table | aggregation table |
|---|---|---|---|
| before or during tasks | repeated batches are dropped | keys | undone, written again |
| after the tasks, before `commit` | the same | keys | undone, written again |
| after `commit`, before Spark's log | the same | keys | `last_checkpoint_id`: not written |
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, Final
from urllib.parse import unquote, urlsplit

import pyarrow as pa
import pyarrow.fs
from pyspark import TaskContext
from pyspark.sql.datasource import DataSourceStreamArrowWriter, WriterCommitMessage

from zufluss.client.producer.handle import ProducerHandle
from zufluss.errors import ConfigError, ProducerStateError
from zufluss.model.producer import check_producer_id
from zufluss.spark.source_options import TXN_ID, SourceOptions
from zufluss.spark.write import tasks
from zufluss.spark.write.batch import skip, task_attempt
from zufluss.spark.write.sink import Sink, SinkKind, make_sink
from zufluss.spark.write.tasks import TaskCommit

if TYPE_CHECKING:
    from pyspark.sql.types import StructType

_BATCH_ID: Final = "streaming.sql.batchId"
_QUERY_ID: Final = "sql.streaming.queryId"
_CHECKPOINT: Final = "checkpointlocation"
_BATCH_BITS: Final = 40


def make_stream_writer(
    options: SourceOptions, schema: StructType, overwrite: bool
) -> FlussStreamWriter:
    """The writer of a micro-batch, checked; `outputMode("complete")` is refused."""
    sink = make_sink(options, schema, overwrite)
    txn_id = options.get(TXN_ID)
    if txn_id is None and sink.kind is not SinkKind.LOG:
        txn_id = _checkpoint_txn(sink, options.spark.get(_CHECKPOINT))
    return FlussStreamWriter(sink, txn_id)


class FlussStreamWriter(DataSourceStreamArrowWriter):
    """Writes the rows of one micro-batch. Pickling it begins the epoch."""

    def __init__(self, sink: Sink, txn_id: str | None) -> None:
        self._sink = sink
        self._txn_id = txn_id
        self._handle: ProducerHandle | None = None

    def __getstate__(self) -> dict[str, Any]:
        sink, txn_id = self._sink, self._txn_id
        if txn_id is not None and self._handle is None:
            if sink.kind is SinkKind.AGGREGATE:
                self._handle = tasks.begin(sink, txn_id)
            elif sink.last_wins:  # a merge engine keeps the newer row by itself
                self._handle = tasks.fence(sink, txn_id)
        return self.__dict__

    def write(self, iterator: Iterator[pa.RecordBatch]) -> WriterCommitMessage:
        """Write the rows of a task."""
        sink = self._sink
        task, attempt = task_attempt()
        if sink.kind is SinkKind.UPSERT:
            tasks.write_upserts(sink, iterator, self._handle, task, attempt)
        elif sink.kind is SinkKind.LOG:
            name = txn_of(_property(_QUERY_ID), self._txn_id)
            handle = tasks.log_producer(sink, name, int(_property(_BATCH_ID)))
            tasks.write_log(sink, iterator, handle, task)
        else:
            return self._write_inputs(iterator, int(_property(_BATCH_ID)), task)
        return TaskCommit({}, None)

    def _write_inputs(
        self, iterator: Iterator[pa.RecordBatch], batch_id: int, task: int
    ) -> TaskCommit:
        handle = self._handle
        assert handle is not None
        checkpoint_id = checkpoint_of(_property(_QUERY_ID), batch_id)
        last = handle.last_checkpoint_id
        if last == checkpoint_id:
            skip(iterator)
            return TaskCommit({}, None)
        if last is not None and (
            last > checkpoint_id or last >> _BATCH_BITS != checkpoint_id >> _BATCH_BITS
        ):
            raise ProducerStateError(
                f"micro-batch {batch_id} for table {self._sink.info.path} does not follow on what "
                f"{handle.producer_id!r} has committed: the checkpoint of its query was replaced, "
                f"or another query writes under this name. Give the query another {TXN_ID.key}, or "
                "restore its checkpoint"
            )
        offsets = tasks.write_inputs(self._sink, iterator, handle, task)
        return TaskCommit(offsets, handle, checkpoint_id)

    def commit(self, messages: list[WriterCommitMessage | None], batchId: int) -> None:
        """Commit a micro-batch after all its tasks."""
        if self._sink.kind is SinkKind.AGGREGATE:
            written = [message for message in messages if isinstance(message, TaskCommit)]
            tasks.checkpoint(self._sink, written)

    def abort(self, messages: list[WriterCommitMessage | None], batchId: int) -> None:
        """Undo the rows of a failed micro-batch now rather than at the restart."""
        if self._sink.kind is SinkKind.AGGREGATE:
            tasks.begin(self._sink, self._txn_id)


def txn_of(query_id: str, txn_id: str | None = None) -> str:
    """The producer id of a query; each checkpoint has another one.

    >>> txn_of("d9355506-c9be-4400-853e-699aa3dd7522")
    'spark-d9355506-c9be-4400-853e-699aa3dd7522'
    """
    return f"spark-{query_id}" if txn_id is None else check_producer_id(f"{txn_id}:{query_id}")


def checkpoint_of(query_id: str, batch_id: int) -> int:
    """The checkpoint id of a commit: the query, so that another query is noticed, and micro-batch.

    | bits | 62–40 | 39–0 |
    |---|---|---|
    | value | of the query's id | micro-batch |
    """
    query = int.from_bytes(hashlib.sha256(query_id.encode()).digest()[:3]) >> 1
    return query << _BATCH_BITS | batch_id


def _property(key: str) -> str:
    context = TaskContext.get()
    value = None if context is None else context.getLocalProperty(key)
    if value is None:
        raise ConfigError(
            f"Spark does not tell its task {key}, which exactly-once writes need; this is no "
            "micro-batch of a streaming query"
        )
    return str(value)


def _checkpoint_txn(sink: Sink, location: str | None) -> str | None:
    """The producer id by the checkpoint; None if it cannot be found and is not needed."""
    try:
        return txn_of(_checkpoint_query(sink, location))
    except ConfigError:
        if sink.kind is SinkKind.AGGREGATE:
            raise
        return None


def _checkpoint_query(sink: Sink, location: str | None) -> str:
    """The id of the query that a checkpoint belongs to."""
    if location is None:
        raise ConfigError(
            f"a query that writes to aggregation table {sink.info.path} needs a name: give "
            f"writeStream the option checkpointLocation (a setting of the session is not seen), or "
            f"the option {TXN_ID.key}"
        )
    try:
        files, path = _file_system(location)
        with files.open_input_stream(f"{path.rstrip('/')}/metadata") as file:
            return str(json.loads(file.readall().decode())["id"])
    except (OSError, ValueError, KeyError, pa.ArrowException) as problem:
        raise ConfigError(
            f"the checkpoint {location} of a query that writes to aggregation table "
            f"{sink.info.path} cannot be read from Python ({problem}); give writeStream the option "
            f"{TXN_ID.key}, a name that only this query has"
        ) from problem


def _file_system(location: str) -> tuple[pa.fs.FileSystem, str]:
    """The file system and path of a checkpoint; Spark spells some schemes differently."""
    parts = urlsplit(location)
    if parts.scheme in ("", "file"):
        return pa.fs.LocalFileSystem(), unquote(parts.path) if parts.scheme else location
    file_system: tuple[pa.fs.FileSystem, str] = pa.fs.FileSystem.from_uri(
        location.replace("s3a://", "s3://", 1)
    )
    return file_system
