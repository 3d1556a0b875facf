"""SIGKILL of drivers, servers and Spark workers while tables are tiered.

Promise A5: after every kill the lake has exactly the rows of the live table, as seen by readers
that share no code with zufluss. Meanwhile tables are written to, lake tables are compacted and
their snapshots expire, so kills also hit that work.
"""

from __future__ import annotations

import os
import random
import signal
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import pytest

import zufluss
from tests.counts import rounds
from tests.servers import WarmServer
from tests.spark.cluster import QUICK as QUICK_SPARK
from tests.spark.cluster import SparkCluster, local_cluster
from tests.tiering.fault_driver import KILL_POINTS
from tests.tiering.faults import (
    QUICK,
    DriverProcess,
    Load,
    create_tables,
    read_journal,
    settle,
    spark_driver,
    wait_until,
)
from tests.tiering.support import LAKE, InlineRunner
from tests.waiting import WAIT_SECONDS
from zufluss.testing.tiering import TieringProcess, descendants
from zufluss.tiering.main import FAILED
from zufluss.tiering.options import TieringOptions
from zufluss.tiering.round import STEPS
from zufluss.tiering.service import TieringService

__all__ = ["local_cluster"]

pytestmark = [pytest.mark.slow, pytest.mark.timeout(3600)]

SERVER = {**LAKE, "zufluss.log.flush": "os"}
UPKEEP = {
    "table.datalake.auto-compaction": "true",
    "table.datalake.auto-expire-snapshot": "true",
}
OFTEN = {
    "lake.tiering.snapshot-age": "5s",
    "lake.tiering.orphan-age": "5s",
    "lake.tiering.sweep-interval": "2s",
}
"""Options with frequent housekeeping."""


@pytest.fixture
def server(warm_server: Callable[..., WarmServer]) -> WarmServer:
    return warm_server(SERVER).start()


@contextmanager
def loaded(
    server: WarmServer, rng: random.Random, paths: list[str], directory: Path
) -> Iterator[Load]:
    """Write during the block; afterwards assert that everything is tiered correctly."""
    with Load(server.bootstrap, rng, paths) as load:
        yield load
    with zufluss.connect(server.bootstrap) as connection:
        found = settle(server.bootstrap, connection, directory, paths)
    print(f"{load.rows} writes, {found} rows in the lake")
    assert found


def new_tables(server: WarmServer, **properties: str) -> list[str]:
    with zufluss.connect(server.bootstrap) as connection:
        return create_tables(connection, "killed", **properties)


def kill_at(server: WarmServer, directory: Path, step: str, nth: int) -> None:
    """A driver that is killed when it reaches a step for the nth time."""
    order = {"step": step, "nth": nth, "options": OFTEN}
    with DriverProcess(server.bootstrap, directory, **order) as driver:
        assert driver.wait() == -signal.SIGKILL, driver.log.read_text()[-4000:]


def test_a_driver_killed_at_every_step_leaves_no_gap_and_no_duplicate(
    server: WarmServer, rng: random.Random, tmp_path: Path
) -> None:
    points = list(KILL_POINTS) * rounds(1, 20)
    rng.shuffle(points)
    paths = new_tables(server)
    with loaded(server, rng, paths, tmp_path):
        for step in points:
            kill_at(server, tmp_path, step, rng.randrange(1, 4))


def test_a_driver_killed_at_every_step_amid_compaction_and_expiry(
    server: WarmServer, rng: random.Random, tmp_path: Path
) -> None:
    points = [*KILL_POINTS, "lake-commit+", "server-commit+"] * rounds(0, 10)
    points = points or ["lake-commit+", "server-commit+"]
    rng.shuffle(points)
    paths = new_tables(server, **UPKEEP)
    with loaded(server, rng, paths, tmp_path):
        for step in points:
            kill_at(server, tmp_path, step, rng.randrange(1, 8))


def test_a_driver_killed_at_any_moment_leaves_no_gap_and_no_duplicate(
    server: WarmServer, rng: random.Random, tmp_path: Path
) -> None:
    paths = new_tables(server, **UPKEEP)
    with loaded(server, rng, paths, tmp_path):
        for _ in range(rounds(3, 150)):
            with DriverProcess(server.bootstrap, tmp_path, options=OFTEN) as driver:
                wait_until(lambda driver=driver: driver.has_noted("began"))
                threading.Event().wait(rng.uniform(0, 0.8))
                driver.signal(signal.SIGKILL)
                driver.wait()


class Assassin:
    """Kills the server when the driver reaches a step, and starts it again."""

    def __init__(self, server: WarmServer) -> None:
        self._server = server
        self._lock = threading.Lock()
        self._step = ""
        self._left = 0
        self.back = threading.Event()
        self.starting: threading.Thread | None = None

    def order(self, step: str, nth: int) -> None:
        with self._lock:
            self._step, self._left = step, nth
            self.back.clear()

    def __call__(self, name: str) -> None:
        with self._lock:
            if name != self._step:
                return
            self._left -= 1
            if self._left:
                return
            self._step = ""
        self._server.kill()
        self.starting = threading.Thread(target=self._start)
        self.starting.start()

    def _start(self) -> None:
        self._server.start()
        self.back.set()


def test_a_coordinator_killed_at_every_step_leaves_no_gap_and_no_duplicate(
    server: WarmServer, rng: random.Random, tmp_path: Path
) -> None:
    points = list(STEPS) * rounds(1, 12)
    rng.shuffle(points)
    paths = new_tables(server)
    assassin = Assassin(server)
    options = TieringOptions.of({"fluss.bootstrap.servers": server.bootstrap, **QUICK})
    with (
        loaded(server, rng, paths, tmp_path),
        zufluss.connect(server.bootstrap) as connection,
        TieringService(connection, InlineRunner(), options, on_step=assassin),
    ):
        for step in points:
            assassin.order(step, rng.randrange(1, 4))
            assert assassin.back.wait(WAIT_SECONDS), f"step {step} never came"


# -- Spark ---------------------------------------------------------------------------------------

PYTHON_WORKER = "-m zufluss.tiering.daemon"
EXECUTOR = "CoarseGrainedExecutorBackend"
JVM = "org.apache.spark.deploy.SparkSubmit"
LOCAL = SparkCluster("local[2,4]", {"spark.driver.memory": "1g"})


def conf_of(cluster: SparkCluster) -> Mapping[str, str]:
    return {"spark.master": cluster.master, **QUICK_SPARK, **cluster.conf}


def command_line(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode()
    except (FileNotFoundError, ProcessLookupError):
        return ""


def kill_one_of(pid: int, rng: random.Random, what: str) -> bool:
    """SIGKILL for one process below `pid` whose command line has `what`."""
    processes = [each for each in descendants(pid) if what in command_line(each)]
    if not processes:
        return False
    victim = rng.choice(sorted(processes))
    try:
        os.kill(victim, signal.SIGKILL)
    except ProcessLookupError:
        return False  # it ended by itself in this moment
    return True


def await_note(driver: TieringProcess, journal: Path) -> None:
    """Wait until the driver notes the beginning or end of a round, or is gone.

    A limit on the time of one note finds a service that hangs. The time until a step is reached for
    the 20th time has no limit: a round whose workers are killed waits for Spark to start Python
    again, which takes 20 s on a busy machine.
    """
    seen = len(read_journal(journal))
    wait_until(
        lambda: len(read_journal(journal)) > seen or not driver.running,
        f"for the next note of a round:\n{driver.log()}",
    )


def kill_in_mid_job(
    driver: TieringProcess, journal: Path, rng: random.Random, what: str, kills: int
) -> None:
    """SIGKILL for processes of the driver a moment after a round began, so many times at most."""
    while kills and driver.running:
        await_note(driver, journal)
        threading.Event().wait(rng.uniform(0, 0.2))
        kills -= kill_one_of(driver.pid, rng, what)


@pytest.mark.parametrize("part", range(rounds(1, len(KILL_POINTS))))
def test_spark_workers_and_then_the_whole_job_killed_leave_no_gap_and_no_duplicate(
    server: WarmServer, rng: random.Random, tmp_path: Path, part: int
) -> None:
    """Spark retries tasks whose Python workers die; then driver and JVM are killed at once."""
    step = KILL_POINTS[part] if rounds(0, 1) else rng.choice(KILL_POINTS[3:])
    journal = tmp_path / "spark.journal"
    order = {"step": step, "nth": rounds(4, 20)}
    paths = new_tables(server)
    with (
        loaded(server, rng, paths, tmp_path),
        spark_driver(server.bootstrap, journal, conf_of(LOCAL), **order) as driver,
    ):
        kill_in_mid_job(driver, journal, rng, PYTHON_WORKER, rounds(1, 4))
        while driver.running:
            await_note(driver, journal)
        assert driver.wait() == -signal.SIGKILL, driver.log()
    print(f"{len(read_journal(journal))} notes of rounds, killed at {step}")


@pytest.mark.skipif(not rounds(0, 1), reason="executor processes: with the full counts only")
def test_executors_killed_in_mid_job_leave_no_gap_and_no_duplicate(
    server: WarmServer, rng: random.Random, tmp_path: Path, local_cluster: SparkCluster
) -> None:
    journal = tmp_path / "spark.journal"
    paths = new_tables(server)
    with (
        loaded(server, rng, paths, tmp_path),
        spark_driver(server.bootstrap, journal, conf_of(local_cluster)) as driver,
    ):
        kill_in_mid_job(driver, journal, rng, EXECUTOR, 10)
        assert driver.stop() == 0, driver.log()


@pytest.mark.skipif(not rounds(0, 1), reason="needs a JVM of its own: with the full counts only")
def test_a_jvm_killed_in_mid_job_ends_the_service_and_leaves_no_gap_and_no_duplicate(
    server: WarmServer, rng: random.Random, tmp_path: Path
) -> None:
    journal = tmp_path / "spark.journal"
    paths = new_tables(server)
    with (
        loaded(server, rng, paths, tmp_path),
        spark_driver(server.bootstrap, journal, conf_of(LOCAL)) as driver,
    ):
        kill_in_mid_job(driver, journal, rng, JVM, 1)
        wait_until(lambda: not driver.running, "for the service to end")
        assert driver.wait() == FAILED, driver.log()
        assert "the Spark session is gone" in driver.log()
