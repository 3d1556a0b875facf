"""A union read in Spark, against Spark reading the same rows as plain parquet files.

The table has all but its last hundredth in the lake; the rest is the fresh tail. Both sides read
every column of every row into Spark's `noop` sink, in the same session, in turns.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import zufluss
import zufluss.spark
from bench.report import Measure, compared
from bench.tiering import LAKE, Lake, _count
from bench.work import alternate
from zufluss.testing.server import DevServer
from zufluss.testing.tiering import TieringProcess


def run(directory: Path, rounds: int, quick: bool) -> Iterator[Measure]:
    """Log tables of two sizes, so that growth shows."""
    with ExitStack() as stack:
        server = stack.enter_context(DevServer(directory / "server", LAKE))
        connection = stack.enter_context(zufluss.connect(server.bootstrap))
        sizes = (200_000,) if quick else (1_000_000, 10_000_000)
        with TieringProcess(server.bootstrap) as service:
            lake = Lake(server, service, connection)
            for size in sizes:
                path = lake.log_table(f"union_{size}")
                lake.round(path, size - size // 100, lake.append)
                connection.admin.alter_table(path, set={"table.datalake.enabled": "false"})
                lake.append(path, size // 100)
            service.stop()
        spark = zufluss.spark.session("bench", master="local[2,4]")
        stack.callback(spark.stop)
        for size in sizes:
            yield _union(spark, server, size, directory, rounds)


def _union(spark: Any, server: DevServer, size: int, directory: Path, rounds: int) -> Measure:
    def table() -> Any:
        return zufluss.spark.table(spark, f"fluss.union_{size}", bootstrap=server.bootstrap)

    plain = str(directory / f"plain-{size}")
    table().coalesce(4).write.option("compression", "zstd").parquet(plain)
    ours, others = alternate(
        rounds,
        (server.pid,),
        lambda: _rate(table, size),
        lambda: _rate(lambda: spark.read.parquet(plain), size),
    )
    label = f"union read of a log table in Spark, {_count(size)} rows, against plain parquet"
    return compared(f"union.{size}", label, ours, others, " rows/s", at_least=0.7)


def _rate(frame: Callable[[], Any], rows: int) -> float:
    began = time.perf_counter()
    frame().write.format("noop").mode("overwrite").save()
    return rows / (time.perf_counter() - began)
