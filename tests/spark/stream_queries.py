"""Reads as Spark makes them, step by step and without Spark, so that things can happen in between.

A `BatchRead` has planned its tasks. A `StreamRead` goes from batch to batch; the batch that is
planned can be read later, and again.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pyarrow as pa

from zufluss.client.sync.table import Table
from zufluss.spark.read.batch import FlussReader, source_schema
from zufluss.spark.source_options import Use, parse_options

Rows = list[tuple[Any, ...]]


def batch_reader(bootstrap: str, table: Table, suffix: str = "", **options: str) -> FlussReader:
    """The reader of a batch query."""
    said = {"bootstrap.servers": bootstrap, "table": f"{table.path}{suffix}", **options}
    parsed = parse_options(said)
    parsed.check_for(Use.BATCH)
    return FlussReader(parsed, source_schema(parsed))


def stream_reader(bootstrap: str, table: Table, suffix: str = "", **options: str) -> Any:
    """The reader of a streaming query."""
    from zufluss.spark.read.stream import FlussStreamReader

    said = {"bootstrap.servers": bootstrap, "table": f"{table.path}{suffix}", **options}
    parsed = parse_options(said)
    parsed.check_for(Use.STREAM)
    return FlussStreamReader(parsed, source_schema(parsed))


def batches(reader: Any, groups: list[Any]) -> Iterator[pa.RecordBatch]:
    """What tasks read, one task after the other."""
    for group in groups:
        yield from reader.read(group)


def sorted_rows(found: Iterator[pa.RecordBatch]) -> Rows:
    """Rows in an order of their own."""
    rows = [tuple(row.values()) for batch in found for row in batch.to_pylist()]
    return sorted(rows, key=repr)


def everything() -> Any:
    """The limit of a query that has none, as far as a reader looks at it."""
    return object()


class BatchRead:
    """A batch query whose tasks are planned and not yet run."""

    def __init__(self, bootstrap: str, table: Table, suffix: str = "", **options: str) -> None:
        self.reader = batch_reader(bootstrap, table, suffix, **options)
        self.groups = self.reader.partitions()

    def batches(self) -> Iterator[pa.RecordBatch]:
        """Run the tasks."""
        return batches(self.reader, self.groups)

    def rows(self) -> Rows:
        """All that the tasks read."""
        return sorted_rows(self.batches())


class StreamRead:
    """A streaming query; `plan` is what Spark does before a batch, `rows` is the batch."""

    def __init__(self, bootstrap: str, table: Table, suffix: str = "", **options: str) -> None:
        self.reader = stream_reader(bootstrap, table, suffix, **options)
        self.start = self.end = self.reader.initialOffset()
        self.groups: list[Any] = []

    def plan(self, limit: Any = None) -> StreamRead:
        """The batch behind the last one."""
        self.start, self.end = self.end, self.reader.latestOffset(self.end, limit or everything())
        self.groups = self.reader.partitions(self.start, self.end)
        return self

    def batches(self) -> Iterator[pa.RecordBatch]:
        """Run the tasks of the planned batch."""
        return batches(self.reader, self.groups)

    def rows(self) -> Rows:
        """All that the tasks of the planned batch read."""
        return sorted_rows(self.batches())

    def all_rows(self) -> Rows:
        """Batch after batch, until there is nothing more."""
        found: Rows = []
        while self.plan().start != self.end:
            found += self.rows()
        return sorted(found, key=repr)
