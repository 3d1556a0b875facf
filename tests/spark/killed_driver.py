"""A driver that streams a table into three others and is killed; run as a program.

Its queries, one for each kind of table, each go to a step of their own and wait there. When the
last one has come, Python, Java and whoever is last are killed. The steps, in the order of a
micro-batch:

| step | where |
|---|---|
| `planned` | the offsets are in Spark's log, the tasks are being planned |
| `begun` | the sink has begun: a producer's epoch, after what was to undo is undone |
| `task` | a task runs and has read nothing |
| `halfway` | a part of the rows of a task is in the table |
| `written` | a task has written its rows |
| `tasks` | all tasks have ended, before `commit` of the sink |
| `committed` | after that, before Spark's log of commits |
| `over` | the source is told that the micro-batch is in that log |

Arguments: a JSON object, see `Orders`.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, ClassVar

import pyarrow as pa

import zufluss.spark
from tests.spark.cluster import QUICK
from tests.spark.sinks import changed, halfway, inputs
from tests.waiting import eventually
from zufluss.spark.source import FlussDataSource
from zufluss.spark.write.sink import SinkKind

STEPS = ("planned", "begun", "task", "halfway", "written", "tasks", "committed", "over")


@dataclass(frozen=True)
class Orders:
    """The orders of a driver."""

    server: str
    """Where the cluster is."""
    source: str
    """The table that is read."""
    tables: dict[str, str]
    """The tables that are written, by kind."""
    checkpoints: str
    """Below it are the checkpoints, by kind."""
    steps: dict[str, tuple[str, int]]
    """Where each kind waits for its death, and for the how-manyth time it is there, from 0 on."""
    marks: str
    """A directory where the queries tell that they are there."""
    options: dict[str, str]
    """Of the stream that is read."""

    def to_json(self) -> str:
        """As an argument."""
        return json.dumps(asdict(self))


class Mortal:
    """Kills the process at the chosen step."""

    def __init__(self, orders: Orders, kind: str, pids: tuple[int, ...]) -> None:
        self.kind = kind
        self.step, self.times = orders.steps[kind]
        self.marks = Path(orders.marks)
        self.kinds = len(orders.steps)
        self.pids = pids

    def at(self, step: str) -> None:
        """Wait for the others and die, if this is the place."""
        if step != self.step:
            return
        if self.times:
            seen = self.marks / f"seen-{self.kind}"
            with seen.open("a") as file:
                file.write(".")
            if seen.stat().st_size <= self.times:
                return
        (self.marks / f"at-{self.kind}-{step}").touch()
        java = os.getppid()
        while len(list(self.marks.glob("at-*"))) < self.kinds and os.getppid() == java:
            signal.sigtimedwait([], 0.1)
        for pid in (*self.pids, os.getpid()):
            with suppress(ProcessLookupError):  # another query has done it
                os.kill(pid, signal.SIGKILL)


class MortalWriter:
    """Dies on the way of a micro-batch into the table."""

    mortal: Mortal

    def __getstate__(self) -> dict[str, Any]:
        state: dict[str, Any] = super().__getstate__()  # type: ignore[assignment]
        self.mortal.at("begun")
        return state

    def write(self, iterator: Iterator[pa.RecordBatch]) -> Any:
        self.mortal.at("task")
        with halfway(lambda: self.mortal.at("halfway")):
            written = super().write(iterator)  # type: ignore[misc]
        self.mortal.at("written")
        return written

    def commit(self, messages: list[Any], batchId: int) -> None:
        self.mortal.at("tasks")
        super().commit(messages, batchId)  # type: ignore[misc]
        self.mortal.at("committed")


class MortalReader:
    """Dies between two micro-batches."""

    mortal: Mortal

    def prepareForTriggerAvailableNow(self) -> None:
        (self.mortal.marks / f"up-{self.mortal.kind}").touch()
        super().prepareForTriggerAvailableNow()  # type: ignore[misc]

    def partitions(self, start: Any, end: Any) -> Any:
        self.mortal.at("planned")
        return super().partitions(start, end)  # type: ignore[misc]

    def commit(self, end: Any) -> None:
        self.mortal.at("over")
        super().commit(end)  # type: ignore[misc]


def mortal_source(mortal: Mortal) -> type[FlussDataSource]:
    """`format("mortal_<kind>")`; goes to Spark's workers with what it has to know."""

    class Source(FlussDataSource):
        about: ClassVar[dict[str, Any]] = {"mortal": mortal}

        @classmethod
        def name(cls) -> str:
            return f"mortal_{cls.about['mortal'].kind}"

        def streamReader(self, schema: Any) -> Any:
            return changed(super().streamReader(schema), MortalReader, self.about)

        def streamWriter(self, schema: Any, overwrite: bool) -> Any:
            return changed(super().streamWriter(schema, overwrite), MortalWriter, self.about)

    return Source


def main(orders: Orders) -> None:
    """Write all rows, or die at the chosen step."""
    spark = zufluss.spark.session("killed", "local[8]", QUICK)
    java = spark.sparkContext._gateway.proc.pid
    spark.conf.set("spark.sql.execution.arrow.maxRecordsPerBatch", "10")
    queries = []
    for kind in map(str, (SinkKind.LOG.value, SinkKind.UPSERT.value, SinkKind.AGGREGATE.value)):
        source = mortal_source(Mortal(orders, kind, (os.getpid(), java)))
        spark.dataSource.register(source)
        reader = spark.readStream.format(source.name()).options(**orders.options)
        reader = reader.options(**{"bootstrap.servers": orders.server, "table": orders.source})
        rows = inputs(reader.load()) if kind == SinkKind.AGGREGATE.value else reader.load()
        writer = rows.writeStream.format(source.name()).trigger(availableNow=True)
        writer = writer.option("bootstrap.servers", orders.server)
        writer = writer.option("table", orders.tables[kind])
        writer = writer.option("client.writer.batch-size", "1kb")
        writer = writer.option("checkpointLocation", str(Path(orders.checkpoints) / kind))
        query = writer.start()
        queries.append(query)
        up = Path(orders.marks) / f"up-{kind}"  # many processes at once would start too slowly
        eventually(lambda: up.exists() or not query.isActive, "the query runs")  # noqa: B023
    for _ in queries:
        spark.streams.awaitAnyTermination()
        spark.streams.resetTerminated()
    spark.stop()


if __name__ == "__main__":
    main(Orders(**json.loads(sys.argv[1])))
