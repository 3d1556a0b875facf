"""A driver that streams files into three tables and is killed at a step; run as a program.

Arguments: the server, the directory of the files, the directory of checkpoints, the tables (log,
primary key, aggregation), and where to die: `kind:step`, or `never`. The steps:

| step | the driver dies |
|---|---|
| `written` | in a task that has written its rows |
| `tasks` | when all tasks of a micro-batch have ended, before `commit` |
| `committed` | after `commit`, before Spark writes it down |
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar

import pyarrow as pa

import zufluss.spark
from tests.spark.cluster import QUICK
from tests.spark.sinks import stream
from zufluss.spark.sink import Kind
from zufluss.spark.source import FlussDataSource
from zufluss.spark.stream_writer import FlussStreamWriter


class MortalWriter(FlussStreamWriter):
    """Kills the processes of its driver at a step."""

    pids: tuple[int, ...]
    moment: str

    def write(self, iterator: Iterator[pa.RecordBatch]) -> Any:
        written = super().write(iterator)
        self._perhaps("written")
        return written

    def commit(self, messages: list[Any], batchId: int) -> None:
        self._perhaps("tasks")
        super().commit(messages, batchId)
        self._perhaps("committed")

    def _perhaps(self, step: str) -> None:
        if self.moment == f"{self._sink.kind.value}:{step}":
            for pid in self.pids:
                os.kill(pid, signal.SIGKILL)
            os.kill(os.getpid(), signal.SIGKILL)


class MortalSource(FlussDataSource):
    """`format("mortal")`."""

    pids: ClassVar[tuple[int, ...]] = ()
    moment: ClassVar[str] = "never"

    @classmethod
    def name(cls) -> str:
        return "mortal"

    def streamWriter(self, schema: Any, overwrite: bool) -> Any:
        made = super().streamWriter(schema, overwrite)
        mortal = object.__new__(MortalWriter)
        mortal.__dict__.update(made.__dict__)
        mortal.pids, mortal.moment = self.pids, self.moment
        return mortal


def mortal_source(pids: tuple[int, ...], moment: str) -> type[MortalSource]:
    """A source that goes to Spark's workers with what it has to know."""

    class Source(MortalSource):
        """One driver's."""

    Source.pids, Source.moment = pids, moment
    return Source


def main(server: str, files: str, checkpoints: str, *rest: str) -> None:
    """Write everything that there is, or die."""
    *tables, moment = rest
    spark = zufluss.spark.session("killed", "local[2]", QUICK)
    java = spark.sparkContext._gateway.proc.pid
    spark.dataSource.register(mortal_source((os.getpid(), java), moment))
    rows = stream(spark, Path(files))
    queries = []
    for kind, table in zip(Kind, tables, strict=True):
        frame = rows.selectExpr("k", "1L AS n", "v AS top") if kind is Kind.AGGREGATE else rows
        writer = frame.writeStream.format("mortal").trigger(availableNow=True)
        writer = writer.option("bootstrap.servers", server).option("table", table)
        writer = writer.option("checkpointLocation", str(Path(checkpoints) / kind.value))
        queries.append(writer.start())
    for query in queries:
        query.awaitTermination()
    spark.stop()


if __name__ == "__main__":
    main(*sys.argv[1:])
