"""Tablet servers under two coordinators: a change of the one that leads ends nothing."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from threading import Event

import pytest

import zufluss
from tests.end_to_end.test_coordinators import coordinators, leads
from tests.servers import RoleServer
from tests.waiting import eventually, unless_away
from zufluss.testing.zookeeper import ZooKeeper

LOST = {"kill": signal.SIGKILL, "freeze": signal.SIGSTOP}


@pytest.fixture(scope="module")
def ensemble(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ZooKeeper]:
    with ZooKeeper(tmp_path_factory.mktemp("ensemble"), members=3) as zookeeper:
        yield zookeeper


def tablets(first: RoleServer, directory: Path, count: int) -> list[RoleServer]:
    """Tablet servers of the cluster of a coordinator, not started; ZooKeeper says where it is."""
    servers = []
    for number in range(1, count + 1):
        own = directory / f"tablet-{number}"
        own.mkdir()
        servers.append(
            RoleServer("tablet", own, {**first.properties, "tablet-server.id": str(number)})
        )
    return servers


def sessions_begun(server: RoleServer) -> int:
    return sum("wal_session_begun" in line for line in tuple(server.output))


def goes_on(server: RoleServer) -> bool:
    return any("registration_goes_on" in line for line in tuple(server.output))


def created(connection: zufluss.Connection, name: str) -> bool:
    connection.admin.create_table(
        f"fluss.{name}",
        "id BIGINT NOT NULL, n BIGINT",
        primary_key=["id"],
        bucket_count=4,
        ignore_if_exists=True,
    )
    return True


def upsert_until(stop: Event, connection: zufluss.Connection) -> int:
    """Upsert rows, and look each up once it is acknowledged; how many."""
    table = connection.table("fluss.a")
    number = 0
    with table.upsert() as writer:
        while not stop.is_set():
            number += 1
            writer.write({"id": [number % 20], "n": [number]})
            writer.flush()
            row = table.lookup({"id": number % 20})
            assert row is not None
            assert row["n"] == number, "a lookup sees what was acknowledged before"
    return number


@pytest.mark.parametrize("lost", LOST)
@pytest.mark.parametrize("durability", ["local", "remote"])
def test_rows_are_written_and_looked_up_while_coordinators_change(
    ensemble: ZooKeeper, tmp_path: Path, durability: str, lost: str
) -> None:
    """No session of the shared log ends, no server registers anew, and tables can be created."""
    more = {"zufluss.log.durability": durability, "remote.data.dir": str(tmp_path / "remote")}
    first, second = coordinators(ensemble, tmp_path, **more)
    with ExitStack() as servers, ThreadPoolExecutor() as threads:
        for server in (first, second):
            servers.enter_context(server)
        three = [servers.enter_context(tablet) for tablet in tablets(first, tmp_path, 3)]
        with zufluss.connect(three[0].bootstrap) as connection:
            created(connection, "a")
            stop = Event()
            writing = threads.submit(upsert_until, stop, connection)
            try:
                os.kill(first.pid, LOST[lost])
                eventually(partial(leads, second))
                eventually(lambda: all(map(goes_on, three)))
                eventually(partial(unless_away, partial(created, connection, "b")))
            finally:
                stop.set()
            assert writing.result() > 0
            if lost == "freeze":
                os.kill(first.pid, signal.SIGCONT)
                assert first.wait() == 1
            assert created(connection, "c")
            assert connection.admin.list_tables("fluss") == ["a", "b", "c"]
        assert [sessions_begun(tablet) for tablet in three] == [int(durability == "remote")] * 3
