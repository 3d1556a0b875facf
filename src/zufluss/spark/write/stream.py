"""Streaming writes: `df.writeStream.format("fluss")`, each micro-batch once.

Spark makes a writer for each micro-batch in one process, sends it to the tasks, and makes another
one in a second process to commit or to abort. Neither is told which query and which micro-batch it
is for; tasks can find out, and `commit` is told the latter.

| what | known to the first writer | to tasks | to the second writer |
|---|---|---|---|
| micro-batch | no | yes | yes |
| query id | in its checkpoint, where that can be read | yes | as the first |
| option `txn.id` | yes | yes | yes |

A query id is made with the checkpoint and stays in it. So it names the series of micro-batches, and
after a checkpoint was deleted, so that the numbers begin again, it is another one. That is why a
`txn.id` alone does not name them: micro-batch 0 of a new checkpoint has other rows. Log tables have
a producer for each query then, and aggregation tables refuse the second query.

Only the first writer is ever pickled, and that is when it begins an epoch of the query's producer
(primary-key tables): writers of earlier micro-batches are fenced, of this driver or of one that
should be gone. In aggregation tables what they wrote is undone, where no commit followed, before
any task of this one runs.

| killed | log table | primary-key table | aggregation table |
|---|---|---|---|
| before or during tasks | batches that are there are dropped | keys | undone, written again |
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
    """Writes the rows of one micro-batch. Pickles, and begins by that."""

    def __init__(self, sink: Sink, txn_id: str | None) -> None:
        self._sink = sink
        self._txn_id = txn_id
        self._handle: ProducerHandle | None = None

    def __getstate__(self) -> dict[str, Any]:
        sink, txn_id = self._sink, self._txn_id
        if txn_id is not None and self._handle is None:
            if sink.kind is SinkKind.AGGREGATE:
                self._handle = tasks.begin(sink, txn_id)
            elif sink.last_wins:  # with an engine no older row gets over a newer one
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
        """All tasks of a micro-batch have ended: it counts."""
        if self._sink.kind is SinkKind.AGGREGATE:
            written = [message for message in messages if isinstance(message, TaskCommit)]
            tasks.checkpoint(self._sink, written)

    def abort(self, messages: list[WriterCommitMessage | None], batchId: int) -> None:
        """A micro-batch failed: undo what tasks of it wrote, now rather than at the restart."""
        if self._sink.kind is SinkKind.AGGREGATE:
            tasks.begin(self._sink, self._txn_id)


def txn_of(query_id: str, txn_id: str | None = None) -> str:
    """The name that a query writes under; each checkpoint makes another one.

    >>> txn_of("d9355506-c9be-4400-853e-699aa3dd7522")
    'spark-d9355506-c9be-4400-853e-699aa3dd7522'
    """
    return f"spark-{query_id}" if txn_id is None else check_producer_id(f"{txn_id}:{query_id}")


def checkpoint_of(query_id: str, batch_id: int) -> int:
    """What a commit is known by: the query, so that another one is noticed, and the micro-batch.

    | bits | 62–40 | 39–0 |
    |---|---|---|
    | value | of the query's id | micro-batch |
    """
    query = int.from_bytes(hashlib.sha256(query_id.encode()).digest()[:3]) >> 1
    return query << _BATCH_BITS | batch_id


def _property(key: str) -> str:
    context = TaskContext.get()
    found = None if context is None else context.getLocalProperty(key)
    if found is None:
        raise ConfigError(
            f"Spark does not tell its task {key}, which exactly-once writes need; this is no "
            "micro-batch of a streaming query"
        )
    return str(found)


def _checkpoint_txn(sink: Sink, location: str | None) -> str | None:
    """The name of a query by its checkpoint; None where it needs none, and none can be found."""
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
    """Where a checkpoint lies; Spark has other spellings of some addresses."""
    parts = urlsplit(location)
    if parts.scheme in ("", "file"):
        return pa.fs.LocalFileSystem(), unquote(parts.path) if parts.scheme else location
    found: tuple[pa.fs.FileSystem, str] = pa.fs.FileSystem.from_uri(
        location.replace("s3a://", "s3://", 1)
    )
    return found
