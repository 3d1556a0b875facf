"""The log's part of a union read, inside Spark's Python workers.

A `TailRead` is what `mapInArrow` runs: it pickles, knows which ranges of which buckets each task
reads, and hands out Arrow batches in Spark's types. A range never changes, so a task that runs
again, or a DataFrame that is used twice, gives the same rows.

| what | rows |
|---|---|
| `ROWS` of a log table | its rows, filtered by the server and exactly here |
| `ROWS` of a primary-key table | what the changes leave, folded; all columns, no filter |
| `KEYS` of a primary-key table | the keys that were changed at all: rows of the lake they hide |

Workers live on from task to task, and so does their connection.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from typing import TYPE_CHECKING, Any, Final

import pyarrow as pa

from zufluss.client.connection import AsyncConnection, connect_async
from zufluss.client.read.log_scan import AsyncLogScan
from zufluss.client.read.union_plan import TailRange
from zufluss.client.sync.connection import LoopThread
from zufluss.config.client_options import CLIENT_SCANNER_LOG_FETCH_MAX_BYTES_FOR_BUCKET
from zufluss.errors import OffsetOutOfRangeError, PartitionNotExistError
from zufluss.lake.fold import Folded, Folder
from zufluss.model.expression import Expression
from zufluss.model.table import TableInfo
from zufluss.spark.types import for_spark

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

BATCH_ROWS: Final = 65_536
"""Rows of a batch for Spark; smaller ones cost it more than they are worth."""
TASK_ROWS: Final = 100_000
"""Records below which a task of its own does not pay."""

FETCH: Final = {CLIENT_SCANNER_LOG_FETCH_MAX_BYTES_FOR_BUCKET.key: "8mb"}
"""A task reads one bucket after the other, so a fetch may be as large as one over many buckets."""

TASKS_PER_CORE: Final = 2
"""Tasks for a tail, at most."""
CONNECT_TASKS: Final = 8
"""The same where the cores are not known, through Spark Connect."""


class What(Enum):
    """What a tail is read for."""

    ROWS = "rows"
    """Rows of the result."""
    KEYS = "keys"
    """Keys that hide rows of the lake."""


@dataclass(frozen=True, slots=True)
class TailRead:
    """One read of the tail; called by Spark with the numbers of the tasks' groups."""

    bootstrap: str
    """Where the cluster is."""
    options: Mapping[str, Any]
    """Options of the client."""
    info: TableInfo
    """The table, pinned."""
    groups: tuple[tuple[TailRange, ...], ...]
    """The ranges of each task."""
    columns: tuple[str, ...]
    """The columns of the batches, in order."""
    filter: Expression | None = None
    """Only rows that match; of log tables only."""
    what: What = What.ROWS
    """What for."""

    def __call__(self, tasks: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        """The batches of the groups whose numbers come in."""
        for task in tasks:
            for number in task.column(0).to_pylist():
                yield from self.read(self.groups[number])

    def read(self, ranges: Sequence[TailRange]) -> Iterator[pa.RecordBatch]:
        """The batches of some ranges."""
        for part in ranges:
            for rows in self._tables(part):
                rows = for_spark(rows.select(list(self.columns)))
                yield from rows.combine_chunks().to_batches(max_chunksize=BATCH_ROWS)

    def _tables(self, part: TailRange) -> Iterator[pa.Table]:
        here = client(self.bootstrap, self.options)
        if not self.info.has_primary_key:
            return gathered(log_batches(here, self.info, part, self.columns, self.filter))
        if self.what is What.KEYS:
            return self._keys(here, part)
        return iter([folded(here, self.info, part, self.columns).upserts])

    def _keys(self, here: Client, part: TailRange) -> Iterator[pa.Table]:
        changes = log_batches(here, self.info, part, self.columns)
        for rows in gathered(changes, BATCH_ROWS * 16):
            keys = rows.select(list(self.columns))
            yield keys.group_by(list(self.columns), use_threads=False).aggregate([])


def pack(
    tail: Sequence[TailRange], tasks_max: int, *, split: bool
) -> tuple[tuple[TailRange, ...], ...]:
    """Ranges as the work of at most so many tasks of about equal size; empty ones are left out.

    With `split` a range may be cut, which only ranges of log tables may be: changes of a key stand
    in one bucket, and who applies them needs their order.
    """
    parts = [part for part in tail if part.start < part.stop]
    total = sum(part.stop - part.start for part in parts)
    tasks = max(1, min(tasks_max, -(-total // TASK_ROWS)))
    if split:
        parts = [piece for part in parts for piece in _cut(part, -(-total // tasks))]
    groups: list[list[TailRange]] = [[] for _ in range(min(tasks, len(parts)))]
    sizes = [0] * len(groups)
    for part in sorted(parts, key=lambda part: part.start - part.stop):
        smallest = sizes.index(min(sizes))
        groups[smallest].append(part)
        sizes[smallest] += part.stop - part.start
    return tuple(tuple(group) for group in groups)


def tasks_max(spark: SparkSession) -> int:
    """How many tasks the tail of a read may have."""
    if type(spark).__module__.startswith("pyspark.sql.connect"):
        return CONNECT_TASKS
    return TASKS_PER_CORE * int(spark.sparkContext.defaultParallelism)


def _cut(part: TailRange, rows: int) -> Iterator[TailRange]:
    for start in range(part.start, part.stop, rows):
        yield replace(part, start=start, stop=min(part.stop, start + rows))


def narrowed(info: TableInfo, columns: Sequence[str]) -> TableInfo:
    """The table with these columns and its primary key alone, as far as folding is concerned."""
    wanted = {*columns, *info.schema.primary_key}
    kept = tuple(column for column in info.schema.columns if column.name in wanted)
    schema = replace(info.schema, columns=kept)
    return replace(info, descriptor=replace(info.descriptor, schema=schema))


@dataclass(frozen=True, slots=True)
class Client:
    """A connection, and the thread of its event loop."""

    thread: LoopThread
    """Where it lives."""
    connection: AsyncConnection
    """The connection."""


_clients: dict[tuple[Any, ...], Client] = {}
"""By process, cluster and options; a forked process never uses its parent's."""


def client(bootstrap: str, options: Mapping[str, Any]) -> Client:
    """This process's client of a cluster, made at first use and kept."""
    key = (os.getpid(), bootstrap, *sorted(options.items()))
    found = _clients.get(key)
    if found is None:
        thread = LoopThread()
        try:
            connected = connect_async(bootstrap, **{**FETCH, **options})
            found = Client(thread, thread.run(connected))
        except BaseException:
            thread.close()
            raise
        _clients[key] = found
    return found


def log_batches(
    client: Client,
    info: TableInfo,
    part: TailRange,
    columns: Sequence[str],
    filter: Expression | None = None,
    *,
    with_offsets: bool = False,
) -> Iterator[pa.RecordBatch]:
    """The batches of one range, changes of a primary-key table; an error where it is gone."""
    scan = AsyncLogScan(
        client.connection,
        info,
        tuple(columns),
        filter,
        start={part.bucket: part.start},
        stop={part.bucket: part.stop},
        partitions=None if part.partition is None else (part.partition,),
        buckets=(part.bucket.bucket_id,),
        with_offsets=with_offsets,
        changelog=info.has_primary_key,
    )
    try:
        yield from _batches(client, scan, part)
    except (OffsetOutOfRangeError, PartitionNotExistError) as gone:
        raise type(gone)(
            f"table {info.path}: records {part.start} to {part.stop} of {part.bucket} were planned "
            "for this read and are gone now, by table.log.ttl or because the partition was "
            f"dropped; make the DataFrame anew ({gone.message})"
        ) from gone


def _batches(client: Client, scan: AsyncLogScan, part: TailRange) -> Iterator[pa.RecordBatch]:
    scanner = client.thread.run(scan.open())
    try:
        if part.bucket not in scanner.positions():
            raise PartitionNotExistError(f"partition {part.partition} was dropped")
        while (batch := client.thread.run(scanner.next_batch())) is not None:
            yield batch
    finally:
        client.thread.run(scanner.close())


def folded(client: Client, info: TableInfo, part: TailRange, columns: Sequence[str]) -> Folded:
    """What the changes of a range leave of each key: these columns, and the key's."""
    narrow = narrowed(info, columns)
    folder = Folder(narrow, part.bucket.bucket_id)
    for batch in log_batches(client, info, part, narrow.schema.names):
        folder.add(batch)
    return folder.finish()


def gathered(batches: Iterator[pa.RecordBatch], least: int = BATCH_ROWS) -> Iterator[pa.Table]:
    """Several batches as one table, where they are small."""
    waiting: list[pa.RecordBatch] = []
    rows = 0
    for batch in batches:
        waiting.append(batch)
        rows += batch.num_rows
        if rows >= least:
            yield pa.Table.from_batches(waiting)
            waiting, rows = [], 0
    if waiting:
        yield pa.Table.from_batches(waiting)
