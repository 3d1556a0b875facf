"""The driver of streams is killed between any two steps; no row is lost or doubled.

A process streams one table of ours into a log, a primary-key and an aggregation table, and is
killed when each of the three queries stands at a step drawn by lot (`killed_driver.py`). The next
one goes on, and is killed, and the last one is let live. `ZUFLUSS_FAULT=full` kills 20 times.
"""

from __future__ import annotations

import random
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.counts import rounds
from tests.paths import ROOT

pytest.importorskip("pyspark", reason="needs the extra zufluss[spark]")
pytest.importorskip("pyspark.sql.streaming.datasource", reason="needs Spark 4.2: streaming reads")

import zufluss
from tests.client.pk import create_table
from tests.spark.killed_driver import STEPS, Orders
from tests.spark.sinks import (
    AGGREGATION,
    BUSY,
    COUNTS,
    ROWS,
    TRIES,
    add_rows,
    doubled,
    expected,
    inputs,
    log_rows,
    run,
    state,
    stream,
)
from zufluss.spark.source import FlussDataSource
from zufluss.testing.server import DevServer

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

pytestmark = [pytest.mark.timeout(3600), pytest.mark.slow]

KILLS = rounds(1, 20)
SEED = 10
SOME = {"log": ("halfway", 1), "upsert": ("written", 1), "aggregate": ("tasks", 1)}
"""Where the first driver dies, in its second micro-batches."""
OPTIONS = {"maxRowsPerTrigger": "60", "scan.maxRecordsPerPartition": "40"}
ADDED = 120
"""Rows before each start: two micro-batches."""
SECONDS = 600


def test_no_row_is_lost_or_doubled_when_drivers_are_killed(
    spark: SparkSession, dev_server: DevServer, tmp_path: Path
) -> None:
    server = dev_server.bootstrap
    with zufluss.connect(server) as conn:
        source = str(create_table(conn, ROWS, bucket_count=2).path)
        tables = {
            "log": str(create_table(conn, ROWS, bucket_count=2).path),
            "upsert": str(create_table(conn, f"{ROWS}, PRIMARY KEY (id)", bucket_count=2).path),
            "aggregate": str(create_table(conn, COUNTS, properties=AGGREGATION).path),
        }
        lot = random.Random(SEED)
        for number in range(KILLS):
            add_rows(conn, source, number * ADDED, ADDED)
            steps = {kind: (lot.choice(STEPS), lot.randrange(2)) for kind in tables}
            steps = SOME if number == 0 else steps
            marks = tmp_path / f"marks-{number}"
            marks.mkdir()
            checkpoints = str(tmp_path / "state")
            kill_driver(Orders(server, source, tables, checkpoints, steps, str(marks), OPTIONS))
        add_rows(conn, source, KILLS * ADDED, ADDED)
        total = (KILLS + 1) * ADDED
        spark.dataSource.register(FlussDataSource)
        let_live(spark, server, source, tables, tmp_path / "state")
        found = log_rows(conn, tables["log"])
        assert (len(found), doubled(found)) == (total, [])
        assert {i: row["v"] for i, row in state(conn, tables["upsert"]).items()} == {
            i: i for i in range(total)
        }
        assert state(conn, tables["aggregate"], "k") == expected(total)


def kill_driver(orders: Orders) -> None:
    """Run a driver to its death, and see that each query was where it was to be interrupted."""
    command = [sys.executable, "-m", "tests.spark.killed_driver", orders.to_json()]
    for _ in range(TRIES):
        for mark in Path(orders.marks).iterdir():
            mark.unlink()
        done = subprocess.run(
            command,
            cwd=ROOT,
            timeout=SECONDS,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
        )
        if not re.search(BUSY, done.stderr):
            break
    assert done.returncode == -signal.SIGKILL, (orders.steps, done.stderr[-6000:])
    there = {mark.name for mark in Path(orders.marks).glob("at-*")}
    assert there == {f"at-{kind}-{step}" for kind, (step, _) in orders.steps.items()}


def let_live(
    spark: SparkSession, server: str, source: str, tables: dict[str, str], checkpoints: Path
) -> None:
    """Go on with the three queries, as they were, until everything is written."""
    batch = "spark.sql.execution.arrow.maxRecordsPerBatch"
    before = spark.conf.get(batch)
    spark.conf.set(batch, "10")  # as the drivers before had it: it says where batches end
    small = {"client.writer.batch-size": "1kb"}
    try:
        for kind, table in tables.items():
            rows = stream(spark, server, source, **OPTIONS)
            rows = inputs(rows) if kind == "aggregate" else rows
            run(rows, server, table, checkpoints / kind, **small)
    finally:
        spark.conf.set(batch, before)
