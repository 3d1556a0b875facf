"""Two coordinators on one ZooKeeper: one leads, and the other goes on when it is lost."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest

import zufluss
from tests.end_to_end.raw import RawClient
from tests.servers import RoleServer
from tests.waiting import eventually
from zufluss.errors import ErrorCode, ZuflussError
from zufluss.testing.zookeeper import ZooKeeper
from zufluss.wire import messages as m
from zufluss.wire.api import ApiKey

SESSION = "2s"


@pytest.fixture(scope="module")
def ensemble(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ZooKeeper]:
    with ZooKeeper(tmp_path_factory.mktemp("ensemble"), members=3) as zookeeper:
        yield zookeeper


def coordinators(ensemble: ZooKeeper, directory: Path, **more: str) -> list[RoleServer]:
    """Two coordinators of one cluster, not started."""
    keys = {
        "zookeeper.address": ensemble.address,
        "zookeeper.path.root": f"/{directory.name}",
        "zookeeper.client.session-timeout": SESSION,
        **more,
    }
    servers = []
    for number in (1, 2):
        (directory / str(number)).mkdir()
        own = {**keys, "zufluss.coordinator.id": str(number)}
        servers.append(RoleServer("coordinator", directory / str(number), own))
    return servers


def leads(server: RoleServer) -> bool:
    return any("coordinator_leads" in line for line in tuple(server.output))


def databases(server: RoleServer) -> list[str]:
    """The databases that a coordinator itself tells of; raises its error."""
    with RawClient(server.port) as client:
        answer = client.call(ApiKey.LIST_DATABASES, m.ListDatabasesRequest())
    return list(answer.database_name)


def create(server: RoleServer, name: str) -> ErrorCode | None:
    """Create a database at one coordinator; the error that it answers, None for a network error."""
    try:
        with RawClient(server.port) as client:
            request = m.CreateDatabaseRequest(
                database_name=name, ignore_if_exists=True, database_json=b'{"version":1}'
            )
            client.call(ApiKey.CREATE_DATABASE, request)
    except ZuflussError as problem:
        return problem.code
    return ErrorCode.NONE


def test_a_standby_names_the_leader_and_refuses_everything_else(
    ensemble: ZooKeeper, tmp_path: Path
) -> None:
    first, second = coordinators(ensemble, tmp_path)
    with first, second:
        with RawClient(second.port) as client:
            answer = client.call(ApiKey.GET_METADATA, m.MetadataRequest())
            assert (answer.coordinator_server.node_id, answer.coordinator_server.port) == (
                1,
                first.port,
            )
        assert create(second, "a") is ErrorCode.NOT_COORDINATOR_LEADER_EXCEPTION
        with zufluss.connect(second.bootstrap) as connection:
            connection.admin.create_database("a")
            assert "a" in connection.admin.list_databases()


def test_a_standby_leads_when_the_coordinator_is_killed(
    ensemble: ZooKeeper, tmp_path: Path
) -> None:
    first, second = coordinators(ensemble, tmp_path)
    with first, second, zufluss.connect(f"{first.bootstrap},{second.bootstrap}") as connection:
        connection.admin.create_database("a")
        for former, other in [(first, second), (second, first)]:
            former.kill()
            eventually(partial(leads, other))
            connection.admin.create_database(f"after_{other.port}")
            assert "a" in connection.admin.list_databases()
            former.start()
            assert create(former, "b") is ErrorCode.NOT_COORDINATOR_LEADER_EXCEPTION
            other.output.clear()


def test_a_stopped_coordinator_leaves_the_election_at_once(
    ensemble: ZooKeeper, tmp_path: Path
) -> None:
    """Its session would last for a minute: the next one does not wait for that."""
    first, second = coordinators(ensemble, tmp_path, **{"zookeeper.client.session-timeout": "60s"})
    with first, second:
        assert first.stop() == 0
        eventually(partial(leads, second))
        assert create(second, "a") is ErrorCode.NONE


def test_a_coordinator_that_wakes_up_after_its_turn_changes_nothing(
    ensemble: ZooKeeper, tmp_path: Path
) -> None:
    first, second = coordinators(ensemble, tmp_path)
    with first, second:
        assert create(first, "a") is ErrorCode.NONE
        os.kill(first.pid, signal.SIGSTOP)
        eventually(partial(leads, second))
        assert create(second, "b") is ErrorCode.NONE
        os.kill(first.pid, signal.SIGCONT)
        assert create(first, "c") is not ErrorCode.NONE
        assert first.wait() == 1
        assert "coordinator_turn_over" in first.log()
        assert {"a", "b"} <= set(databases(second))
        assert "c" not in databases(second)
        first.start()
        assert create(first, "c") is ErrorCode.NOT_COORDINATOR_LEADER_EXCEPTION
