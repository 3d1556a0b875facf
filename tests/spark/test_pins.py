"""Primary-key reads hold the state they read for as long as they need it, and let go of it after.

Spark kills the workers of a query that fails or is cancelled, and runs nothing in them at the end.
What they held ends with its idle time, `kv.scanner.ttl`, which is short here.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

import zufluss
import zufluss.spark
from tests.end_to_end.kv_scans.support import metrics_address, open_pins
from tests.servers import WarmServer
from tests.waiting import eventually
from zufluss.client.sync.connection import Connection
from zufluss.testing.server import DevServer

pytestmark = pytest.mark.slow

ROWS = 1000
SHORT = {
    "zufluss.metrics.port": "0",
    "kv.scanner.ttl": "1s",
    "kv.scanner.expiration-interval": "50ms",
}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[DevServer]:
    with WarmServer(tmp_path_factory.mktemp("pins"), SHORT) as server:
        metrics_address(server, server.pid)
        yield server


@pytest.fixture(scope="module")
def connection(server: DevServer) -> Iterator[Connection]:
    with zufluss.connect(server.bootstrap) as connection:
        connection.admin.create_table("fluss.kept", "id INT, n INT", primary_key=["id"])
        yield connection


@pytest.fixture
def frame(spark: Any, server: DevServer, connection: Connection) -> Any:
    """A table of a thousand rows, planned anew."""
    with connection.table("fluss.kept").upsert() as writer:
        writer.write({"id": list(range(ROWS)), "n": [1] * ROWS})
    reader = spark.read.format("fluss").option("bootstrap.servers", server.bootstrap)
    return reader.load("fluss.kept")


def test_a_read_lets_go_of_what_it_pinned(frame: Any, server: DevServer) -> None:
    assert frame.count() == ROWS
    assert open_pins(server) == 0


def test_a_read_that_came_too_late_has_the_rows_of_its_plan(
    frame: Any, server: DevServer, connection: Connection
) -> None:
    assert frame.limit(1).count() == 1
    with connection.table("fluss.kept").upsert() as writer:
        writer.write({"id": list(range(ROWS)), "n": [2] * ROWS})
    eventually(lambda: open_pins(server) == 0, "pins that nobody reads end")
    assert frame.agg({"n": "sum"}).collect()[0][0] == ROWS


def test_a_read_that_fails_lets_go_of_what_it_pinned(frame: Any, server: DevServer) -> None:
    with pytest.raises(Exception, match="not this row"):
        frame.selectExpr("if(id = 5, raise_error('not this row'), n)").collect()
    eventually(lambda: open_pins(server) == 0, "pins of the failed query end")


def test_a_read_that_is_cancelled_lets_go_of_what_it_pinned(
    spark: Any, frame: Any, server: DevServer, tmp_path: Path
) -> None:
    begun, end = tmp_path / "begun", tmp_path / "end"

    def stand_still(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        import time

        for batch in batches:
            begun.touch()
            while not end.exists():
                time.sleep(0.01)
            yield batch

    problems: list[Exception] = []

    def query() -> None:
        spark.sparkContext.addJobTag("to-be-cancelled")
        try:
            frame.mapInArrow(stand_still, "id INT, n INT").count()
        except Exception as problem:
            problems.append(problem)

    thread = threading.Thread(target=query)
    thread.start()
    try:
        eventually(begun.exists, "the query reads")
        spark.sparkContext.cancelJobsWithTag("to-be-cancelled")
        thread.join()
    finally:
        end.touch()
    assert problems
    eventually(lambda: open_pins(server) == 0, "pins of the cancelled query end")
