"""Zombie drivers, faulty catalogs, foreign writers, and several services at once.

Kills at every step are in `tests/fault/test_tiering_kill.py`. Counts are a
sample; `ZUFLUSS_FAULT=full` has the full ones.
"""

from __future__ import annotations

import random
import signal
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from itertools import count, pairwise
from pathlib import Path
from typing import Any

import pytest
from pyiceberg.catalog import Catalog
from pyiceberg.catalog.sql import SqlCatalog

import zufluss
from tests.counts import rounds
from tests.lake.iceberg.rest_catalog import RestServer, rest_server
from tests.servers import WarmServer
from tests.tiering.faults import (
    KEYED,
    QUICK,
    DriverProcess,
    Load,
    check_lake,
    create_tables,
    foreign_append,
    foreign_numbers,
    is_tiered,
    lake_table,
    live_rows,
    our_snapshots,
    read_journal,
    settle,
    tiering,
    unreferenced,
    wait_until,
    write_some,
)
from tests.tiering.support import LAKE, Driver, InlineRunner, append, create_table, upsert
from tests.tiering.test_round import rows
from zufluss.lake.base import EPOCH_KEY, catalog_properties
from zufluss.lake.iceberg import maintenance
from zufluss.lake.iceberg.commit import commit_snapshot
from zufluss.tiering.options import TieringOptions
from zufluss.tiering.round import STEPS
from zufluss.tiering.service import TieringService

pytestmark = [pytest.mark.slow, pytest.mark.timeout(3600)]

BEFORE_COMMIT = STEPS[: STEPS.index("lake-commit") + 1]
SWEEPING = {"lake.tiering.orphan-age": "1s", "lake.tiering.sweep-interval": "1s"}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[WarmServer]:
    """A server of this module; tests keep apart by the names of their tables."""
    made = WarmServer(tmp_path_factory.mktemp("lake"), {**LAKE, "zufluss.log.flush": "os"})
    with made:
        yield made


@pytest.fixture
def connection(server: WarmServer) -> Iterator[zufluss.Connection]:
    """A connection; its tables are gone after the test."""
    with zufluss.connect(server.bootstrap) as made:
        yield made
        for table in made.admin.list_tables("fluss"):
            made.admin.drop_table(f"fluss.{table}")


# -- the checks themselves -----------------------------------------------------------------------


def test_the_check_of_the_lake_finds_a_row_that_is_there_twice_and_one_that_is_missing(
    server: WarmServer, connection: zufluss.Connection, tmp_path: Path
) -> None:
    path = zombie_table(connection, "planted", keyed=False)
    assert settle(server.bootstrap, connection, tmp_path, [path]) == 20
    lake = lake_table(connection.admin.table_info(path))
    one = lake.scan("id = 7").to_arrow()
    lake.append(one)
    with pytest.raises(AssertionError, match="as pyiceberg_rows sees it"):
        check_lake(connection, path)
    lake.delete("id = 7")
    with pytest.raises(AssertionError, match="as pyiceberg_rows sees it"):
        check_lake(connection, path)
    lake.append(one)
    assert check_lake(connection, path) == 20


# -- zombies -------------------------------------------------------------------------------------


@contextmanager
def zombie(server: WarmServer, directory: Path, step: str) -> Iterator[DriverProcess]:
    """A driver that stopped at a step of its first round and is silent."""
    order: dict[str, Any] = {"step": step, "number": signal.SIGSTOP}
    with DriverProcess(server.bootstrap, directory, **order) as driver:
        wait_until(driver.is_stopped, "for the driver to stop")
        yield driver


def is_over(driver: DriverProcess, epoch: int) -> bool:
    """The driver's round has ended; with nothing to do when it stopped before it had a plan."""
    return any(driver.has_noted(event, epoch) for event in ("ended", "idle", "committed"))


def epochs_in_lake(connection: zufluss.Connection, path: str) -> list[int]:
    return [int(each[EPOCH_KEY]) for each in our_snapshots(connection.admin.table_info(path))]


@pytest.mark.parametrize("step", BEFORE_COMMIT if rounds(0, 1) else ("job", "lake-commit"))
@pytest.mark.parametrize("keyed", [False, True], ids=["log", "keyed"])
def test_a_zombie_driver_commits_nothing_and_its_files_are_swept(
    server: WarmServer, connection: zufluss.Connection, tmp_path: Path, step: str, keyed: bool
) -> None:
    path = zombie_table(connection, step, keyed)
    with zombie(server, tmp_path, step) as stopped:
        [began] = stopped.notes()
        with tiering(server.bootstrap, tmp_path, options=SWEEPING):
            wait_until(lambda: is_tiered(connection, path), "for another driver to take over")
            by_others = connection.admin.lake_snapshot(path)
            stopped.signal(signal.SIGCONT)
            wait_until(lambda: is_over(stopped, began["epoch"]), "for its round to end")
            assert not stopped.has_noted("committed")
            assert connection.admin.lake_snapshot(path) == by_others
            assert began["epoch"] not in epochs_in_lake(connection, path)
            info = connection.admin.table_info(path)
            wait_until(lambda: not unreferenced(info), "for its files to be swept")
    check_lake(connection, path)


def zombie_table(connection: zufluss.Connection, step: str, keyed: bool) -> str:
    """A table with a first batch of rows."""
    name = f"zombie_{step.replace('-', '_')}_{keyed}"
    if keyed:
        path = create_table(connection, name, KEYED, bucket_count=2)
        upsert(connection, path, rows(20))
    else:
        path = create_table(connection, name, bucket_count=2)
        append(connection, path, rows(20))
    return path


def test_a_zombie_between_the_commits_is_completed_by_the_next_and_changes_nothing_more(
    server: WarmServer, connection: zufluss.Connection, tmp_path: Path
) -> None:
    path = zombie_table(connection, "between", keyed=True)
    with zombie(server, tmp_path, "server-commit") as stopped:
        [began] = stopped.notes()
        assert connection.admin.lake_snapshot(path) is None
        with tiering(server.bootstrap, tmp_path):
            wait_until(lambda: is_tiered(connection, path), "for the snapshot to be reported")
            upsert(connection, path, rows(20, 10))
            wait_until(lambda: is_tiered(connection, path), "for the next round")
            by_others = connection.admin.lake_snapshot(path)
            stopped.signal(signal.SIGCONT)
            wait_until(lambda: is_over(stopped, began["epoch"]), "for its round to end")
            assert not stopped.has_noted("committed")
            assert connection.admin.lake_snapshot(path) == by_others
    assert epochs_in_lake(connection, path).count(began["epoch"]) == 1
    check_lake(connection, path)


def test_a_zombie_cannot_report_its_snapshot_while_another_has_the_table(
    server: WarmServer, connection: zufluss.Connection, tmp_path: Path
) -> None:
    path = zombie_table(connection, "reporting", keyed=False)
    with zombie(server, tmp_path, "server-commit") as stopped:
        [began] = stopped.notes()
        other = Driver(server)
        lease = other.receive()
        stopped.signal(signal.SIGCONT)
        wait_until(lambda: is_over(stopped, began["epoch"]), "for its round to end")
        assert not stopped.has_noted("committed")
        assert connection.admin.lake_snapshot(path) is None
        result = other.tier(lease)
        assert (result.recovered, result.committed) == (True, False)
        other.finish(lease)
        other.close()
    assert check_lake(connection, path) == 20


def test_files_of_a_driver_that_never_comes_back_are_swept(
    server: WarmServer, connection: zufluss.Connection, tmp_path: Path
) -> None:
    path = zombie_table(connection, "never", keyed=False)
    with zombie(server, tmp_path, "validate") as stopped:
        stopped.signal(signal.SIGKILL)
    info = connection.admin.table_info(path)
    left = unreferenced(info)
    assert left
    with tiering(server.bootstrap, tmp_path, options=SWEEPING):
        wait_until(lambda: is_tiered(connection, path))
        wait_until(lambda: not unreferenced(info), "for its files to be swept")
    assert not any(Path(file).exists() for file in left)
    check_lake(connection, path)


# -- catalogs and other writers ------------------------------------------------------------------


class Stormy:
    """A catalog in which another writer commits before each of our next commits."""

    def __init__(self, catalog: Catalog) -> None:
        self._catalog = catalog
        self.storms = 0
        self.foreign = lambda: None

    def commit_table(self, table: Any, requirements: Any, updates: Any) -> Any:
        if self.storms and any(update.action == "add-snapshot" for update in updates):
            self.storms -= 1
            self.foreign()
        return self._catalog.commit_table(table, requirements, updates)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._catalog, name)


class RestLake:
    """A REST catalog in front of the embedded one, and a service that uses it."""

    def __init__(self, server: WarmServer, rest: RestServer, stormy: Stormy) -> None:
        self.rest = rest
        self.stormy = stormy
        pairs = {"fluss.bootstrap.servers": server.bootstrap, **QUICK}
        pairs |= {"datalake.iceberg.type": "rest", "datalake.iceberg.uri": rest.uri}
        self.options = TieringOptions.of(pairs)

    @contextmanager
    def service(self, connection: zufluss.Connection) -> Iterator[None]:
        with TieringService(connection, InlineRunner(), self.options):
            yield


@pytest.fixture
def rest_lake(server: WarmServer, connection: zufluss.Connection) -> Iterator[RestLake]:
    probe = connection.admin.table_info(create_table(connection, "probe", bucket_count=1))
    catalog = SqlCatalog("zufluss", **catalog_properties(probe, "iceberg"))
    connection.admin.drop_table(probe.path)
    stormy = Stormy(catalog)
    with rest_server(stormy) as rest:  # type: ignore[arg-type]
        yield RestLake(server, rest, stormy)
    catalog.close()


FAULTS = ["+500", "+502", "+504", "lost-answer", "500", "503", "lost-request", "409", "+409", "400"]


def test_errors_of_the_catalog_applied_or_not_change_no_content(
    connection: zufluss.Connection, rest_lake: RestLake, rng: random.Random
) -> None:
    paths = create_tables(connection, "errors")
    faults = FAULTS * rounds(1, 20)
    rng.shuffle(faults)
    ids = count()
    with rest_lake.service(connection):
        for fault in faults:
            rest_lake.rest.faults.append(fault)
            path = rng.choice(paths)
            write_some(connection.table(path), rng, ids)
            wait_until(lambda path=path: is_tiered(connection, path), f"after {fault}")
    assert not rest_lake.rest.faults
    for path in paths:
        wait_until(lambda path=path: is_tiered(connection, path))
        check_lake(connection, path)


@pytest.mark.parametrize("storms", [3, rounds(8, 30)])
def test_a_storm_of_conflicts_is_survived_and_foreign_rows_are_kept(
    connection: zufluss.Connection, rest_lake: RestLake, storms: int
) -> None:
    path = create_table(connection, f"storm_{storms}", bucket_count=2)
    append(connection, path, rows(10))
    numbers = count()
    with rest_lake.service(connection):
        wait_until(lambda: is_tiered(connection, path))
        info = connection.admin.table_info(path)
        rest_lake.stormy.foreign = lambda: foreign_append(info, next(numbers))
        rest_lake.stormy.storms = storms
        append(connection, path, rows(10, 10))
        wait_until(lambda: is_tiered(connection, path))
    assert rest_lake.stormy.storms == 0
    assert foreign_numbers(info) == list(range(storms))
    assert check_lake(connection, path) == 20


def test_a_storm_that_outlasts_a_round_fails_it_and_the_next_one_succeeds(
    connection: zufluss.Connection, rest_lake: RestLake, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("zufluss.lake.iceberg.commit.ATTEMPTS_MAX", 3)
    path = create_table(connection, "outlasts", bucket_count=2)
    append(connection, path, rows(10))
    numbers = count()
    with rest_lake.service(connection):
        wait_until(lambda: is_tiered(connection, path))
        info = connection.admin.table_info(path)
        rest_lake.stormy.foreign = lambda: foreign_append(info, next(numbers))
        rest_lake.stormy.storms = 4
        append(connection, path, rows(10, 10))
        wait_until(lambda: is_tiered(connection, path))
    assert foreign_numbers(info) == list(range(4))
    assert check_lake(connection, path) == 20
    assert not unreferenced(info)


@pytest.mark.parametrize("keyed", [False, True], ids=["log", "keyed"])
def test_a_foreign_writer_that_commits_all_the_time_loses_no_row_and_hides_none_of_ours(
    server: WarmServer,
    connection: zufluss.Connection,
    rng: random.Random,
    tmp_path: Path,
    keyed: bool,
) -> None:
    schema = KEYED if keyed else "id INT, name STRING"
    room = {"table.datalake.freshness": "200ms"}  # else we leave it none, and it starves
    path = create_table(connection, f"foreign_{keyed}", schema, bucket_count=2, properties=room)
    with tiering(server.bootstrap, tmp_path):
        write_some(connection.table(path), rng, count())
        wait_until(lambda: is_tiered(connection, path))
        info = connection.admin.table_info(path)
        with Foreigner(info) as foreigner, Load(server.bootstrap, rng, [path]):
            wait_until(lambda: foreigner.commits >= rounds(10, 30) or foreigner.failed)
            wait_until(lambda: len(set(epochs_in_lake(connection, path))) >= rounds(10, 30))
        wait_until(lambda: is_tiered(connection, path))
    assert foreign_numbers(info) == list(range(foreigner.commits))
    assert check_lake(connection, path)


class Foreigner:
    """Appends to a lake table until it is told to stop."""

    def __init__(self, info: Any) -> None:
        self._info = info
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="foreign writer")
        self._problem: BaseException | None = None
        self.commits = 0

    @property
    def failed(self) -> bool:
        return self._problem is not None

    def __enter__(self) -> Foreigner:
        self._thread.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self._ended.set()
        self._thread.join()
        if self._problem is not None:
            raise self._problem

    def _run(self) -> None:
        try:
            while not self._ended.wait(0.02):
                foreign_append(self._info, self.commits)
                self.commits += 1
        except BaseException as problem:
            self._problem = problem


def test_an_error_after_a_compaction_was_applied_removes_none_of_its_files(
    server: WarmServer, connection: zufluss.Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    compactions: list[int] = []

    def applied_but_failed(*args: Any) -> Any:
        compactions.append(commit_snapshot(*args).snapshot_id)
        raise RuntimeError("an error that nobody thought of")

    monkeypatch.setattr(maintenance, "commit_snapshot", applied_but_failed)
    properties = {"table.datalake.auto-compaction": "true"}
    path = create_table(connection, "compacted", KEYED, bucket_count=1, properties=properties)
    options = TieringOptions.of({"fluss.bootstrap.servers": server.bootstrap, **QUICK})
    with TieringService(connection, InlineRunner(), options):
        for start in count():
            upsert(connection, path, rows(5, start % 50))
            wait_until(lambda: is_tiered(connection, path))
            if len(compactions) >= 2:
                break
    assert check_lake(connection, path) == len(live_rows(connection.table(path)))


# -- several services ----------------------------------------------------------------------------

TABLES = 10
TWO_SLOTS = {"lake.tiering.parallel-tables": "2", "lake.tiering.heartbeat-timeout": "5s"}
"""And a timeout that a busy machine does not reach, or a table would be worked on by two."""


def check_never_twice_at_once(journals: list[Path]) -> set[int]:
    """Rounds of a table do not overlap, whichever driver ran them; the drivers that had some."""
    notes = sorted((n for j in journals for n in read_journal(j)), key=lambda n: n["at"])
    for path in {note["table"] for note in notes}:
        epochs = [note["epoch"] for note in notes if note["table"] == path]
        assert epochs == sorted(epochs), f"rounds of {path} overlap: {epochs}"
        starts = [n["epoch"] for n in notes if n["table"] == path and n["event"] == "began"]
        assert all(a < b for a, b in pairwise(starts)), f"{path} was handed out twice: {starts}"
    return {note["pid"] for note in notes}


@pytest.mark.parametrize("ending", ["killed", "stopped"][: rounds(1, 2)])
def test_two_services_tier_ten_tables_and_one_that_ends_hands_over(
    server: WarmServer,
    connection: zufluss.Connection,
    rng: random.Random,
    tmp_path: Path,
    ending: str,
) -> None:
    paths = [create_table(connection, f"ten_{n}", bucket_count=1) for n in range(TABLES)]
    journals = []
    with ExitStack() as stack:
        order = {"options": TWO_SLOTS}
        drivers = [DriverProcess(server.bootstrap, tmp_path, **order) for _ in range(2)]
        first, _second = [stack.enter_context(driver) for driver in drivers]
        journals = [driver.journal for driver in drivers]
        stack.enter_context(Load(server.bootstrap, rng, paths))
        wait_until(lambda: all(connection.admin.lake_snapshot(p) for p in paths))
        wait_until(lambda: all(driver.has_noted("committed") for driver in drivers))
        for _ in range(rounds(1, 10)):
            end(first, ending)
            first = DriverProcess(server.bootstrap, tmp_path, **order)
            journals.append(first.journal)
            all_come_again(connection, paths)
            stack.enter_context(first)
            wait_until(lambda first=first: first.has_noted("committed"))
    assert len(check_never_twice_at_once(journals)) == len(journals)
    settle(server.bootstrap, connection, tmp_path, paths)


def end(driver: DriverProcess, how: str) -> None:
    """End a driver gracefully, or by SIGKILL."""
    if how == "stopped":
        assert driver.stop() == 0, driver.log.read_text()[-4000:]
    else:
        driver.signal(signal.SIGKILL)
        assert driver.wait() == -signal.SIGKILL


def all_come_again(connection: zufluss.Connection, paths: list[str]) -> None:
    """Wait until every table has a newer lake snapshot, so no service holds a table for ever."""
    before = {path: connection.admin.lake_snapshot(path) for path in paths}
    for path, known in before.items():
        wait_until(
            lambda path=path, known=known: connection.admin.lake_snapshot(path) != known,
            f"for a round of {path} by the other driver",
        )
