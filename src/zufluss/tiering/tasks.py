"""The code of tiering that runs in Spark tasks: reads a split and writes files of the lake.

A split is a range of a log, or a key-value snapshot in its place (`splits.py`).

Rows never pass through the JVM: a task gets the splits in its closure, reads Arrow batches from the
cluster, passes them to the lake's writer and returns one small result per split. Spark kills a
Python worker without notice when its task is cancelled, so nothing here relies on cleaning up;
files of failed attempts are swept later as orphans.

Workers are reused between rounds, and so is their connection to the cluster (`spark/cluster.py`).
"""

from __future__ import annotations

import functools
import pickle
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.compute as pc

from zufluss.client.sync.connection import Connection
from zufluss.errors import UnknownTableOrBucketError
from zufluss.lake.base import LakeError, LakeTieringFactory, LakeWriter, WriterContext, lake_factory
from zufluss.lake.fold import Folder, inserted
from zufluss.model.lake import OFFSET_COLUMN, SYSTEM_COLUMNS, TIMESTAMP_COLUMN
from zufluss.model.table import TableBucket, TableInfo
from zufluss.spark.cluster import client, drop_client
from zufluss.tiering.splits import TieringSnapshotSplit, TieringSplit

if TYPE_CHECKING:
    from zufluss.client.sync.scan import LogScanner
    from zufluss.client.sync.table import Table

LOG_OFFSET = "_log_offset"
COMMIT_TIMESTAMP = "_commit_timestamp"
RESULT = pa.schema([pa.field("result", pa.binary())])
"""The rows that a task returns to the driver: one pickled `BucketResult` each."""


@dataclass(frozen=True, slots=True)
class TieringJob:
    """The work of one round, as its tasks receive it. Pickles."""

    bootstrap: str
    """The address of the cluster."""
    client: Mapping[str, str]
    """`client.*` options."""
    format: str
    """The lake format."""
    table: TableInfo
    """The table as planned."""
    handle: bytes
    """The handle that the committer made for the writers."""
    tiering_epoch: int
    """The epoch of the lease."""
    round_id: str
    """Unique per round."""
    groups: tuple[tuple[TieringSplit, ...], ...]
    """The splits of each task."""


@dataclass(frozen=True, slots=True)
class BucketResult:
    """The outcome of one split."""

    split_id: str
    """The split."""
    bucket: TableBucket
    """Its bucket."""
    records: int
    """Records read; rows of a snapshot."""
    size: int
    """Their size in memory, in bytes."""
    max_timestamp_ms: int | None
    """The commit time of the newest record; None without records, or for a snapshot."""
    write_result: bytes
    """The result of the lake's writer, through `write_result_serde`."""


@dataclass(slots=True)
class _ReadProgress:
    """Counts the records of a split and checks that none is missing."""

    split: TieringSplit
    dense: bool
    next_offset: int
    records: int = 0
    size: int = 0
    max_timestamp_ms: int | None = None

    def take(self, batch: pa.RecordBatch, offset: str, timestamp: str) -> None:
        """Count a batch. Raises `LakeError` unless it begins where the last one ended."""
        offsets = batch.column(offset)
        first, last = offsets[0].as_py(), offsets[-1].as_py()
        fits = first == self.next_offset and last - first + 1 == batch.num_rows
        if not (fits if self.dense else first >= self.next_offset):
            raise LakeError(
                f"{self._name}: {batch.num_rows} records at offsets {first} to {last} came where "
                f"offset {self.next_offset} should"
            )
        self.next_offset = last + 1
        self.records += batch.num_rows
        self.size += batch.nbytes
        newest = pc.max(batch.column(timestamp)).cast(pa.int64()).as_py()
        self.max_timestamp_ms = max(newest, self.max_timestamp_ms or newest)

    def check_end(self, position: int) -> None:
        """Raise `LakeError` unless the split was read up to its end."""
        reached = self.next_offset if self.dense else position
        stop = self.split.stopping_offset
        if reached < stop or self.next_offset > stop:
            raise LakeError(
                f"{self._name}: reading ended at offset {reached} instead of {stop}; "
                "the round fails and the next one plans anew"
            )

    @property
    def _name(self) -> str:
        return self.split.bucket.named(self.split.path, self.split.partition)


def task_function(job: TieringJob) -> Callable[[Iterable[pa.RecordBatch]], Iterator[Any]]:
    """The function that `mapInArrow` runs over a range of task numbers."""

    def run_task(numbers: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for batch in numbers:
            for number in batch.column(0).to_pylist():
                results = [pickle.dumps(result) for result in run_group(job, number)]
                yield pa.record_batch([pa.array(results, pa.binary())], schema=RESULT)

    return run_task


def empty_task(numbers: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """A function for `mapInArrow` that only gets the worker started."""
    for _ in numbers:
        yield pa.record_batch([pa.array([], pa.binary())], schema=RESULT)


def run_group(job: TieringJob, number: int) -> Iterator[BucketResult]:
    """Tier the splits of one task, one after the other."""
    attempt = uuid.uuid4().hex[:12]
    try:
        table = _open_table(job)
        for split in job.groups[number]:
            yield run_split(job, split, table, attempt)
    except Exception:
        drop_client(job.bootstrap, job.client)  # its metadata of the cluster may be the reason
        raise


def run_split(job: TieringJob, split: TieringSplit, table: Table, attempt: str) -> BucketResult:
    """Tier one split."""
    factory = cached_factory(job.format)
    writer = factory.create_writer(_writer_context(job, split, attempt))
    keyed = job.table.has_primary_key
    reading = _ReadProgress(split, not keyed, split.starting_offset)
    try:
        if isinstance(split, TieringSnapshotSplit):
            _write_snapshot(job.table, table, writer, reading, split)
        elif keyed:
            _write_changes(job.table, table, writer, reading)
        else:
            _write_log(job.table, table, writer, reading)
        result = writer.complete()
    except BaseException:
        writer.abort()
        raise
    return BucketResult(
        split.split_id,
        split.bucket,
        reading.records,
        reading.size,
        reading.max_timestamp_ms,
        factory.write_result_serde.dumps(result),
    )


@functools.cache
def cached_factory(format: str) -> LakeTieringFactory[Any, Any]:
    """The factory of a format; the search for it takes longer than an idle round."""
    return lake_factory(format)


def _write_log(
    info: TableInfo, table: Table, writer: LakeWriter[Any], reading: _ReadProgress
) -> None:
    names = [*info.schema.names, *SYSTEM_COLUMNS]
    scan = table.scan(info.schema.names, with_offsets=True, **_range(reading.split))
    with scan.open() as scanner:
        for batch in scanner:
            reading.take(batch, OFFSET_COLUMN, TIMESTAMP_COLUMN)
            writer.append(batch.select(names))
        reading.check_end(_position(scanner, reading.split))


def _write_changes(
    info: TableInfo, table: Table, writer: LakeWriter[Any], reading: _ReadProgress
) -> None:
    folder = Folder(info, reading.split.bucket.bucket_id)
    scan = table.changelog(info.schema.names, **_range(reading.split))
    with scan.open() as scanner:
        for batch in scanner:
            reading.take(batch, LOG_OFFSET, COMMIT_TIMESTAMP)
            folder.add(batch)
        reading.check_end(_position(scanner, reading.split))
    folded = folder.finish()
    writer.apply(folded.upserts, folded.deletes)


def _write_snapshot(
    info: TableInfo,
    table: Table,
    writer: LakeWriter[Any],
    reading: _ReadProgress,
    split: TieringSnapshotSplit,
) -> None:
    """Write the rows of a key-value snapshot in place of the changes below its offset."""
    with table.kv_snapshot(split.bucket, split.snapshot_id, info.schema.names) as rows:
        if rows.log_offset != split.log_offset_of_snapshot:
            raise LakeError(
                f"{split.bucket.named(split.path, split.partition)}: key-value snapshot "
                f"{split.snapshot_id} ends at offset {rows.log_offset}, planned was "
                f"{split.log_offset_of_snapshot}"
            )
        folded = inserted(info, split.bucket.bucket_id, list(rows))
    reading.records, reading.size = folded.changes, folded.upserts.nbytes
    writer.apply(folded.upserts, folded.deletes)


def _range(split: TieringSplit) -> dict[str, Any]:
    return {
        "start": {split.bucket: split.starting_offset},
        "stop": {split.bucket: split.stopping_offset},
        "partitions": None if split.partition is None else [split.partition],
        "buckets": [split.bucket.bucket_id],
    }


def _position(scanner: LogScanner, split: TieringSplit) -> int:
    """The offset at which the scan ended; its start if the bucket does not exist."""
    return scanner.positions().get(split.bucket, split.starting_offset)


def _writer_context(job: TieringJob, split: TieringSplit, attempt: str) -> WriterContext:
    return WriterContext(
        table=job.table,
        handle=job.handle,
        bucket=split.bucket,
        partition=split.partition,
        start_offset=split.starting_offset,
        stop_offset=split.stopping_offset,
        tiering_epoch=job.tiering_epoch,
        round_id=job.round_id,
        attempt=attempt,
    )


def _open_table(job: TieringJob) -> Table:
    """The table, by this worker's connection; an error if another table has its name by now."""
    here = client(job.bootstrap, job.client)
    table = Connection(here.thread, here.connection).table(job.table.path)
    if table.info.table_id != job.table.table_id:
        raise UnknownTableOrBucketError(
            f"table {job.table.path} was dropped and re-created: its id is "
            f"{table.info.table_id}, planned was {job.table.table_id}"
        )
    return table
