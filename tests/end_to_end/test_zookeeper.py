"""Servers with their metadata in ZooKeeper: tables and rows outlive coordinator and members."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest

import zufluss
from tests.servers import Apart, WarmServer
from tests.waiting import eventually, unless_away
from zufluss.errors import InvalidReplicationFactorError
from zufluss.testing.zookeeper import ZooKeeper


@pytest.fixture(scope="module")
def ensemble(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ZooKeeper]:
    with ZooKeeper(tmp_path_factory.mktemp("ensemble"), members=3) as zookeeper:
        yield zookeeper


def _keys(ensemble: ZooKeeper, root: str) -> dict[str, str]:
    return {"zookeeper.address": ensemble.address, "zookeeper.path.root": root}


def _create(connection: zufluss.Connection, name: str) -> None:
    connection.admin.create_table(f"fluss.{name}", "id BIGINT, n BIGINT", bucket_count=2)


def _created(connection: zufluss.Connection, name: str) -> bool:
    """Create a table if the tablet server is known to the coordinator by now."""
    try:
        _create(connection, name)
    except InvalidReplicationFactorError:
        return False
    return True


def _append(connection: zufluss.Connection, name: str, ids: range) -> None:
    with connection.table(f"fluss.{name}").append() as writer:
        writer.write({"id": list(ids), "n": list(ids)})


def _ids(connection: zufluss.Connection, name: str) -> list[int]:
    rows = connection.table(f"fluss.{name}").scan(stop="latest").to_arrow()
    return sorted(rows["id"].to_pylist())


def test_both_roles_in_one_process(ensemble: ZooKeeper, tmp_path: Path) -> None:
    with WarmServer(tmp_path / "data", _keys(ensemble, "/dev/one")) as server:
        with zufluss.connect(server.bootstrap) as connection:
            _create(connection, "a")
            _append(connection, "a", range(100))
        server.kill()
        server.start()
        with zufluss.connect(server.bootstrap) as connection:
            assert _ids(connection, "a") == list(range(100))
            _append(connection, "a", range(100, 200))
            _create(connection, "b")
        assert server.stop() == 0
        server.start()
        with zufluss.connect(server.bootstrap) as connection:
            assert _ids(connection, "a") == list(range(200))
            assert connection.admin.list_tables("fluss") == ["a", "b"]
    assert not (tmp_path / "data" / "meta").exists()


def test_a_coordinator_comes_back_with_an_empty_directory(
    ensemble: ZooKeeper, tmp_path: Path
) -> None:
    """Its data directory has no metadata: a coordinator may start on any machine."""
    apart = Apart.in_directory(tmp_path, _keys(ensemble, "/apart"))
    with apart.coordinator, apart.tablet, zufluss.connect(apart.tablet.bootstrap) as connection:
        _create(connection, "a")
        _append(connection, "a", range(100))
        for number in range(2):
            apart.coordinator.kill()
            _append(connection, "a", range(100 + number, 101 + number))  # needs no coordinator
            apart.coordinator.data_dir = tmp_path / f"elsewhere-{number}"
            apart.coordinator.start()
            later = partial(_created, connection, f"later_{number}")
            eventually(partial(unless_away, later))
            _append(connection, f"later_{number}", range(10))
            assert _ids(connection, f"later_{number}") == list(range(10))
        assert _ids(connection, "a") == list(range(102))


def test_tables_are_changed_without_any_one_member(ensemble: ZooKeeper, tmp_path: Path) -> None:
    """A member that dies, the leader included, delays a change and never loses it."""
    with WarmServer(tmp_path / "data", _keys(ensemble, "/members")) as server:
        names = [f"without_{number}" for number in range(3)]
        with zufluss.connect(server.bootstrap) as connection:
            for name, member in zip(names, ensemble.members, strict=True):
                member.kill()
                _create(connection, name)
                _append(connection, name, range(10))
                member.start()
        server.kill()
        server.start()
        with zufluss.connect(server.bootstrap) as connection:
            assert connection.admin.list_tables("fluss") == names
            assert [_ids(connection, name) for name in names] == [list(range(10))] * 3
