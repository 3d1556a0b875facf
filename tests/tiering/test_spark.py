"""Rounds as Spark jobs, and the service as users start it."""

from __future__ import annotations

import re
import time
import urllib.request
from collections.abc import Iterator
from typing import TYPE_CHECKING

import pyarrow as pa
import pytest

from tests.tiering.support import (
    Driver,
    append,
    create_table,
    delete,
    lake_rows,
    offsets_in_lake,
    upsert,
)
from tests.tiering.test_round import KEYED, rows
from tests.tiering.test_service import tiered
from tests.waiting import eventually
from zufluss.testing.server import DevServer
from zufluss.testing.tiering import TieringProcess
from zufluss.tiering.runner import SparkRunner
from zufluss.tiering.tasks import TieringJob

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def spark() -> Iterator[SparkSession]:
    from zufluss.spark.setup.session import bare_session

    made = bare_session("tests", "local[2,4]")
    yield made
    made.stop()


@pytest.fixture
def driver(lake: DevServer, spark: SparkSession) -> Iterator[Driver]:
    made = Driver(lake, SparkRunner(spark))
    yield made
    made.close()


def test_a_log_table_arrives_whole(driver: Driver) -> None:
    path = create_table(driver.connection, "spark_log", bucket_count=4)
    for start in range(0, 400_000, 100_000):
        ids = pa.array(range(start, start + 100_000), pa.int32())
        append(driver.connection, path, pa.table({"id": ids, "name": ids.cast(pa.string())}))
    assert driver.round().records == 400_000
    info = driver.admin.table_info(path)
    ends = driver.admin.list_all_offsets(path)
    wanted = sorted((b.bucket_id, o) for b, end in ends.items() for o in range(end))
    assert offsets_in_lake(info) == wanted
    assert sorted(lake_rows(info)["id"].to_pylist()) == list(range(400_000))


def test_a_primary_key_table_has_its_newest_rows_only(driver: Driver) -> None:
    path = create_table(driver.connection, "spark_keyed", KEYED, bucket_count=3)
    upsert(driver.connection, path, rows(1000))
    driver.round()
    upsert(driver.connection, path, {"id": [3, 3000], "name": ["new", "later"]})
    delete(driver.connection, path, {"id": [4, 5]})
    driver.round()
    found = lake_rows(driver.admin.table_info(path))
    names = dict(zip(found["id"].to_pylist(), found["name"].to_pylist(), strict=True))
    wanted = {i: f"n{i}" for i in range(1000) if i not in (4, 5)} | {3: "new", 3000: "later"}
    assert names == wanted
    assert found.num_rows == len(wanted)


def test_a_task_that_fails_is_tried_again_and_counts_once(
    driver: Driver, spark: SparkSession, tmp_path_factory: pytest.TempPathFactory
) -> None:
    import zufluss.tiering.runner as module

    marker = tmp_path_factory.mktemp("attempts") / "failed"
    real = module.task_function

    def failing_once(job: TieringJob):
        inner = real(job)

        def run(numbers):
            found = list(inner(numbers))
            if not marker.exists():
                marker.touch()
                raise OSError("the executor dies with its files written")
            yield from found

        return run

    path = create_table(driver.connection, "spark_retry", bucket_count=1)
    append(driver.connection, path, rows(10))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "task_function", failing_once)
        assert driver.round().records == 10
    assert marker.exists()
    assert offsets_in_lake(driver.admin.table_info(path)) == [(0, o) for o in range(10)]


def test_a_job_is_cancelled_by_its_tag(driver: Driver, spark: SparkSession) -> None:
    import zufluss.tiering.runner as module

    def forever(job: TieringJob):
        def run(numbers):
            time.sleep(600)
            yield from numbers

        return run

    runner = SparkRunner(spark)
    ended: list[Exception] = []

    def work() -> None:
        job = TieringJob("", {}, "iceberg", driver.admin.table_info(path), b"", 1, "r", ((),))
        try:
            runner.run(job, "tag-1")
        except Exception as problem:
            ended.append(problem)

    path = create_table(driver.connection, "spark_cancel", bucket_count=1)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "task_function", forever)
        thread = runner.thread(work, "cancelled")
        thread.start()
        while thread.is_alive():
            runner.cancel("tag-1")
            thread.join(0.2)
    assert len(ended) == 1
    assert runner.alive()


def test_the_command_tiers_tables_until_it_is_told_to_stop(lake: DevServer) -> None:
    driver = Driver(lake)
    path = create_table(driver.connection, "command", bucket_count=2)
    options = {"spark.master": "local[2,4]", "zufluss.metrics.port": "0"}
    with TieringProcess(lake.bootstrap, options) as process:
        append(driver.connection, path, rows(100))
        eventually(lambda: tiered(driver.connection, path))
        port = re.search(r"metrics_served .*port=(\d+)", process.log())
        assert port is not None
        for probe in ("health", "ready"):
            with urllib.request.urlopen(f"http://localhost:{port[1]}/{probe}") as answer:
                assert answer.status == 200
        assert process.stop() == 0
        assert "round_finished" in process.log()
    assert sorted(lake_rows(driver.admin.table_info(path))["id"].to_pylist()) == list(range(100))
    driver.close()
