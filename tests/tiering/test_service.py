"""Services: many tables, several services, lost leases, restarts of the coordinator, stopping."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import zufluss
from tests.tiering.support import (
    Driver,
    InlineRunner,
    append,
    create_table,
    lake_server,
    offsets_in_lake,
)
from tests.tiering.test_round import rows
from tests.waiting import WAIT_SECONDS, eventually, unless_away
from zufluss.testing.server import DevServer
from zufluss.tiering.options import TieringOptions
from zufluss.tiering.runner import JobRunner
from zufluss.tiering.service import TieringService
from zufluss.tiering.tasks import BucketResult, TieringJob


def tiered(connection: zufluss.Connection, path: str) -> bool:
    """The lake has everything that is in the table now."""
    ends = connection.admin.list_all_offsets(path)
    known = connection.admin.lake_snapshot(path)
    found = {} if known is None else known.offsets
    return all(found.get(bucket, 0) >= end for bucket, end in ends.items())


@contextmanager
def service(server: DevServer, runner: JobRunner, **options: str) -> Iterator[TieringService]:
    pairs = {"fluss.bootstrap.servers": server.bootstrap}
    options = {"poll_interval": "20ms", "heartbeat_interval": "100ms"} | options
    pairs |= {f"lake.tiering.{key.replace('_', '-')}": value for key, value in options.items()}
    with zufluss.connect(server.bootstrap) as connection:
        made = TieringService(connection, runner, TieringOptions.of(pairs))
        with made:
            yield made


class Gate(InlineRunner):
    """Jobs wait until they are let through, or cancelled as Spark would."""

    def __init__(self) -> None:
        super().__init__()
        self.entered = threading.Event()
        self.open = threading.Event()
        self.stopped = threading.Event()

    def run(self, job: TieringJob, tag: str) -> list[BucketResult]:
        self.entered.set()
        while not self.open.wait(0.01):
            if self.stopped.is_set():
                raise RuntimeError("the job was cancelled")
        return super().run(job, tag)

    def cancel(self, tag: str) -> None:
        super().cancel(tag)
        self.stopped.set()


def test_many_tables_are_tiered_with_few_slots(lake: DevServer, driver: Driver) -> None:
    paths = [create_table(driver.connection, f"many_{n}", bucket_count=1) for n in range(10)]
    for path in paths:
        append(driver.connection, path, rows(5))
    with service(lake, InlineRunner(), parallel_tables="2"):
        eventually(lambda: all(tiered(driver.connection, path) for path in paths))
    for path in paths:
        found = offsets_in_lake(driver.admin.table_info(path))
        assert found == [(0, offset) for offset in range(5)]


def test_two_services_share_the_tables_and_never_work_on_the_same(
    lake: DevServer, driver: Driver
) -> None:
    lock, active, twice = threading.Lock(), set[int](), list[int]()

    class Watched(InlineRunner):
        def run(self, job: TieringJob, tag: str) -> list[BucketResult]:
            table_id = job.table.table_id
            with lock:
                twice.extend({table_id} & active)
                active.add(table_id)
            try:
                return super().run(job, tag)
            finally:
                with lock:
                    active.discard(table_id)

    paths = [create_table(driver.connection, f"shared_{n}", bucket_count=1) for n in range(10)]
    first, second = Watched(), Watched()
    with service(lake, first), service(lake, second):
        for start in range(0, 30, 5):
            for path in paths:
                append(driver.connection, path, rows(5, start))
        eventually(lambda: all(tiered(driver.connection, path) for path in paths))
    assert not twice
    for path in paths:
        found = offsets_in_lake(driver.admin.table_info(path))
        assert found == [(0, offset) for offset in range(30)]


def test_a_table_with_more_to_do_comes_again_at_once(lake: DevServer, driver: Driver) -> None:
    path = create_table(
        driver.connection,
        "again_and_again",
        bucket_count=1,
        properties={"table.datalake.enabled": "false", "table.datalake.freshness": "1ms"},
    )
    append(driver.connection, path, rows(50))
    runner = InlineRunner()
    with service(lake, runner, bucket_records_max="10"):
        driver.admin.alter_table(path, set={"table.datalake.enabled": "true"})
        eventually(lambda: runner_jobs(runner) >= 1)
        driver.admin.alter_table(path, set={"table.datalake.freshness": "1h"})
        eventually(lambda: tiered(driver.connection, path))
    assert runner_jobs(runner) == 5


def runner_jobs(runner: InlineRunner) -> int:
    return len(runner.jobs)


def test_stopping_lets_a_running_round_end(lake: DevServer, driver: Driver) -> None:
    path = create_table(driver.connection, "stopped", bucket_count=1)
    append(driver.connection, path, rows(5))
    gate = Gate()
    with service(lake, gate):
        gate.entered.wait(WAIT_SECONDS)
        gate.open.set()
    assert tiered(driver.connection, path)
    assert not gate.cancelled


def test_a_round_that_takes_too_long_to_stop_is_cancelled_and_its_table_free_at_once(
    lake: DevServer, driver: Driver
) -> None:
    path = create_table(driver.connection, "too_long", bucket_count=1)
    append(driver.connection, path, rows(5))
    gate = Gate()
    with service(lake, gate, stop_timeout="10ms", heartbeat_timeout="10min"):
        gate.entered.wait(WAIT_SECONDS)
    assert gate.cancelled
    assert driver.admin.lake_snapshot(path) is None
    assert driver.round().records == 5


def test_a_service_that_loses_its_lease_cancels_the_job(lake: DevServer, driver: Driver) -> None:
    path = create_table(driver.connection, "taken", bucket_count=1)
    append(driver.connection, path, rows(5))
    gate = Gate()
    with service(lake, gate):
        gate.entered.wait(WAIT_SECONDS)
        driver.admin.alter_table(path, set={"table.datalake.enabled": "false"})
        assert gate.stopped.wait(WAIT_SECONDS)
        gate.open.set()
        gate.stopped.clear()
        driver.admin.alter_table(path, set={"table.datalake.enabled": "true"})
        eventually(lambda: tiered(driver.connection, path))
    assert offsets_in_lake(driver.admin.table_info(path)) == [(0, o) for o in range(5)]


def test_a_failing_table_does_not_keep_the_others_from_the_lake(
    lake: DevServer, driver: Driver
) -> None:
    bad = create_table(driver.connection, "bad", bucket_count=1)
    good = create_table(driver.connection, "good", bucket_count=1)

    def refuse(job: TieringJob) -> None:
        if str(job.table.path) == bad:
            raise RuntimeError("this one never works")

    with service(lake, InlineRunner(refuse), parallel_tables="1"):
        append(driver.connection, bad, rows(5))
        for start in range(0, 15, 5):
            append(driver.connection, good, rows(5, start))
            eventually(lambda: tiered(driver.connection, good))
    assert driver.admin.lake_snapshot(bad) is None


def test_a_service_survives_a_restart_of_the_coordinator(tmp_path: Path) -> None:
    with lake_server(tmp_path) as server:
        driver = Driver(server)
        path = create_table(driver.connection, "restart", bucket_count=1)
        append(driver.connection, path, rows(5))
        with service(server, InlineRunner()):
            eventually(lambda: tiered(driver.connection, path))
            server.stop()
            server.start()
            append(driver.connection, path, rows(5, 5))
            eventually(lambda: unless_away(lambda: tiered(driver.connection, path)))
        found = offsets_in_lake(driver.admin.table_info(path))
        assert found == [(0, offset) for offset in range(10)]
        driver.close()


def test_a_service_without_a_usable_session_says_so_once(lake: DevServer, driver: Driver) -> None:
    class Dead(InlineRunner):
        def run(self, job: TieringJob, tag: str) -> list[BucketResult]:
            raise RuntimeError("no gateway")

        def alive(self) -> bool:
            return False

    path = create_table(driver.connection, "dead", bucket_count=1)
    append(driver.connection, path, rows(1))
    said = threading.Event()
    options = TieringOptions.of({"fluss.bootstrap.servers": lake.bootstrap})
    with (
        zufluss.connect(lake.bootstrap) as connection,
        TieringService(connection, Dead(), options, failed=lambda text: said.set()),
    ):
        assert said.wait(WAIT_SECONDS)
    assert driver.admin.lake_snapshot(path) is None
