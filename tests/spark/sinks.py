"""Helpers for tests of sinks: tasks that fail in every way, streams, rows of a table.

`faulty_source` makes a data source whose tasks go wrong at their first attempt, each by its number:

| task | its first attempt |
|---|---|
| 0, 4 … | raises when some of its rows are in the table |
| 1, 5 … | is killed with its process when some of its rows are in the table |
| 2, 6 … | raises when all of its rows are in the table |
| 3, 7 … | runs twice at the same time, both to the end |

It leaves a mark of everything that went wrong.
"""

from __future__ import annotations

import os
import re
import signal
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar
from unittest.mock import patch

import pyarrow as pa
from pyspark import TaskContext
from pyspark.errors import StreamingQueryException
from pyspark.sql.types import LongType, StringType, StructType

from zufluss.client.sync.connection import Connection
from zufluss.spark.source import FlussDataSource
from zufluss.spark.write import batch as writer
from zufluss.spark.write import stream as stream_writer
from zufluss.spark.write import tasks as sink_tasks

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

TRIES = 3
BUSY = "CANNOT_OPEN_SOCKET|failed to connect back"
"""Spark gives a Python process of its own ten seconds to start: too few for a busy machine."""
FAULTS = ("raises", "killed", "late", "twice")


def halfway(happens: Callable[[], None]) -> Any:
    """While this is entered, something happens when tasks have sent a part of their rows."""
    send = sink_tasks._send

    def sent(sink: Any, make: Callable[[], Any], changes: Iterable[Any]) -> Any:
        writers: list[Any] = []

        def kept() -> Any:
            writers.append(make())
            return writers[0]

        def now() -> None:
            thread = sink_tasks.client(sink.bootstrap, sink.options).thread
            thread.run(writers[0]._acknowledged())
            happens()

        def interrupted() -> Iterator[Any]:
            number = -1
            for number, change in enumerate(changes):
                if number == 2:
                    now()
                yield change
            if number < 2:
                now()

        return send(sink, kept, interrupted())

    return patch.object(sink_tasks, "_send", sent)


class _Fault:
    """The fault of a task at its first attempt."""

    marks: str
    reverse: bool

    def write(self, iterator: Iterator[pa.RecordBatch]) -> Any:
        context = TaskContext.get()
        task = int(context.partitionId())
        if context.attemptNumber():
            return super().write(iterator)  # type: ignore[misc]
        fault = FAULTS[task % len(FAULTS)]
        rows = [rows for rows in iterator if rows.num_rows]
        if self.reverse:
            rows = [part.take(list(reversed(range(part.num_rows)))) for part in reversed(rows)]
        Path(self.marks, f"{task}-{fault}").touch()
        return getattr(self, f"_{fault}")(super().write, rows)  # type: ignore[misc]

    def _raises(self, write: Callable[..., Any], rows: Sequence[pa.RecordBatch]) -> Any:
        with halfway(_fail):
            return write(iter(rows))

    def _killed(self, write: Callable[..., Any], rows: Sequence[pa.RecordBatch]) -> Any:
        with halfway(_die):
            return write(iter(rows))

    def _late(self, write: Callable[..., Any], rows: Sequence[pa.RecordBatch]) -> Any:
        write(iter(rows))
        raise RuntimeError("this task fails after it has written")

    def _twice(self, write: Callable[..., Any], rows: Sequence[pa.RecordBatch]) -> Any:
        here = threading.local()
        task, _ = writer.task_attempt()

        def attempt(number: int) -> Any:
            here.attempt = number
            return write(iter(rows))

        numbered = lambda: (task, here.attempt)  # noqa: E731
        with (
            patch.object(writer, "task_attempt", numbered),
            patch.object(stream_writer, "task_attempt", numbered),
            ThreadPoolExecutor(2) as pool,
        ):
            first, _ = pool.map(attempt, range(2))
            return first


def _fail() -> None:
    raise RuntimeError("this task fails halfway")


def _die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


class _Faulty(FlussDataSource):
    """A source whose writers are changed."""

    fault: ClassVar[type]
    about: ClassVar[dict[str, Any]] = {}

    def writer(self, schema: Any, overwrite: bool) -> Any:
        return changed(super().writer(schema, overwrite), self.fault, self.about)

    def streamWriter(self, schema: Any, overwrite: bool) -> Any:
        return changed(super().streamWriter(schema, overwrite), self.fault, self.about)


def changed(made: Any, fault: type, about: Mapping[str, Any]) -> Any:
    """A writer with another class before its own."""
    kind = type(made)
    faulty = object.__new__(type(f"Faulty{kind.__name__}", (fault, kind), {}))
    faulty.__dict__.update(made.__dict__, **about)
    return faulty


def faulty_source(marks: Path, name: str = "faulty", *, reverse: bool = False) -> type[_Faulty]:
    """`format(name)`; with `reverse` the first attempts have their rows in another order."""

    class Source(_Faulty):
        fault = _Fault
        about: ClassVar[dict[str, Any]] = {"marks": str(marks), "reverse": reverse}

    Source.name = classmethod(lambda cls: name)  # type: ignore[assignment, misc]
    return Source


class FailsAlways(_Faulty):
    """`format("fails_always")`: the second task, after it has written."""

    class fault:
        def write(self, iterator: Iterator[pa.RecordBatch]) -> Any:
            written = super().write(iterator)  # type: ignore[misc]
            if TaskContext.get().partitionId() == 1:
                raise RuntimeError("this task always fails")
            return written

    @classmethod
    def name(cls) -> str:
        return "fails_always"


class Overtaken(_Faulty):
    """`format("overtaken")`: before it writes, another driver goes on with its query."""

    class fault:
        def write(self, iterator: Iterator[pa.RecordBatch]) -> Any:
            sink, name = self._sink, self._txn_id  # type: ignore[attr-defined]
            rows = [rows for rows in iterator if rows.num_rows]
            newer = [part.set_column(2, "v", pa.array([-1] * part.num_rows)) for part in rows]
            sink_tasks.write_upserts(sink, newer, sink_tasks.fence(sink, name), 0, 0)
            return super().write(iter(rows))  # type: ignore[misc]

    @classmethod
    def name(cls) -> str:
        return "overtaken"


def append(frame: DataFrame, server: str, table: str, source: str = "fluss", **more: str) -> None:
    """Write a frame to a table."""
    options = {"bootstrap.servers": server, "table": table, **more}
    frame.write.format(source).options(**options).mode("append").save()


def log_rows(connection: Connection, table: str) -> list[dict[str, Any]]:
    """All rows of a log table."""
    return connection.table(table).scan().to_arrow().to_pylist()


def doubled(rows: Sequence[Mapping[str, Any]], column: str = "id") -> list[Any]:
    """Values that occur more than once."""
    return [value for value, n in Counter(row[column] for row in rows).items() if n > 1]


def state(connection: Connection, table: str, key: str = "id") -> dict[Any, dict[str, Any]]:
    """The rows of a primary-key table, by key."""
    return {row[key]: row for row in connection.table(table).scan().to_arrow().to_pylist()}


ROWS = "id BIGINT, k BIGINT, v BIGINT"
COUNTS = "k BIGINT, n BIGINT SUM, top BIGINT MAX, PRIMARY KEY (k)"
AGGREGATION = {"table.merge-engine": "aggregation"}


def inputs(rows: Any) -> Any:
    """Rows as inputs of `COUNTS`."""
    return rows.selectExpr("k", "1L AS n", "v AS top")


def expected(rows: int) -> dict[int, dict[str, int]]:
    """The rows of `COUNTS` after the inputs 0, 1, …."""
    out: dict[int, dict[str, int]] = {}
    for i in range(rows):
        row = out.setdefault(i % 7, {"k": i % 7, "n": 0, "top": 0})
        row["n"] += 1
        row["top"] = i
    return out


def add_rows(connection: Connection, table: str, first: int, count: int) -> None:
    """Append the rows (id, k, v) of these numbers to a log table."""
    ids = list(range(first, first + count))
    with connection.table(table).append() as writer:
        writer.write({"id": ids, "k": [i % 7 for i in ids], "v": ids})


def struct(columns: str) -> StructType:
    """`"id BIGINT, name STRING"` as Spark's schema, without Spark."""
    out = StructType()
    for column in columns.split(", "):
        name, kind = column.split()
        out.add(name, {"BIGINT": LongType(), "STRING": StringType()}[kind])
    return out


def stream(spark: SparkSession, server: str, table: str, **more: str) -> DataFrame:
    """A stream of a table."""
    options = {"bootstrap.servers": server, "table": table, **more}
    return spark.readStream.format("fluss").options(**options).load()


def run(
    frame: DataFrame, server: str, table: str, checkpoint: Path, source: str = "fluss", **more: str
) -> None:
    """Write everything that a stream has now."""
    options = {"bootstrap.servers": server, "table": table, **more}
    options["checkpointLocation"] = str(checkpoint)
    writer = frame.writeStream.format(source).options(**options).trigger(availableNow=True)
    for tries_left in reversed(range(TRIES)):
        try:
            writer.start().awaitTermination()
            return
        except StreamingQueryException as problem:
            if not tries_left or not re.search(BUSY, str(problem)):
                raise
