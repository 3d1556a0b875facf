"""Options that are changed in a running cluster, with real servers: they act, and they hold."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

import zufluss
from tests.servers import RoleServer, WarmServer
from tests.waiting import eventually
from zufluss.client.sync.connection import Connection
from zufluss.errors import ConfigError

INTERVAL = "kv.snapshot.interval"
SLOW = {INTERVAL: "1h"}
LAKE = {
    "datalake.format": "iceberg",
    "datalake.iceberg.type": "rest",
    "datalake.iceberg.uri": "http://127.0.0.1:9",
}


@pytest.fixture(params=["one process", "roles apart"])
def servers(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[tuple[WarmServer, ...]]:
    """A coordinator and a tablet server, the same process or two of them."""
    with ExitStack() as stack:
        if request.param == "one process":
            both = stack.enter_context(WarmServer(tmp_path / "data", SLOW))
            yield (both,)
        else:
            coordinator = stack.enter_context(RoleServer("coordinator", tmp_path, {}))
            address = {"zufluss.coordinator.address": coordinator.bootstrap}
            yield coordinator, stack.enter_context(RoleServer("tablet", tmp_path, SLOW | address))


def create(conn: Connection, name: str) -> None:
    conn.admin.create_table(name, "id BIGINT NOT NULL", primary_key=["id"], bucket_count=1)
    with conn.table(name).upsert() as writer:
        writer.write({"id": 1})


def snapshots(conn: Connection, name: str) -> int:
    return len(conn.admin.list_kv_snapshots(name))


def sources(conn: Connection) -> dict[str, tuple[str, str]]:
    return {c.key: (c.value, c.source) for c in conn.admin.cluster_configs()}


def test_an_interval_acts_at_once_and_holds_after_a_crash(
    servers: tuple[WarmServer, ...],
) -> None:
    with zufluss.connect(servers[-1].bootstrap) as conn:
        create(conn, "before")
        assert snapshots(conn, "before") == 0
        conn.admin.alter_cluster_configs({INTERVAL: "50ms"})
        for server in servers:
            server.kill()
    for server in servers:
        server.start()
    with zufluss.connect(servers[-1].bootstrap) as conn:
        assert sources(conn)[INTERVAL] == ("50ms", "DYNAMIC_SERVER_CONFIG")
        eventually(lambda: snapshots(conn, "before") == 1)
        create(conn, "after")
        eventually(lambda: snapshots(conn, "after") == 1)


@pytest.mark.parametrize("servers", ["roles apart"], indirect=True)
def test_a_server_that_was_away_during_the_change_learns_it_when_it_is_back(
    servers: tuple[WarmServer, ...],
) -> None:
    coordinator, tablet = servers
    with zufluss.connect(coordinator.bootstrap) as conn:
        create(conn, "events")
        tablet.kill()
        conn.admin.alter_cluster_configs({INTERVAL: "50ms"})
        tablet.start()
        eventually(lambda: snapshots(conn, "events") == 1)


def test_clients_of_every_server_get_the_properties_of_a_lake_that_came_at_run_time(
    servers: tuple[WarmServer, ...],
) -> None:
    with zufluss.connect(servers[0].bootstrap) as conn:
        with pytest.raises(ConfigError, match=r"datalake\.format"):
            conn.admin.alter_cluster_configs(LAKE | {"datalake.format": "delta"})
        assert not LAKE.keys() & sources(conn).keys()
        conn.admin.alter_cluster_configs(LAKE)
        conn.admin.create_table("lake", "id BIGINT")
        servers[0].kill()
    servers[0].start()
    expected = {f"table.{key}": value for key, value in LAKE.items()}
    for server in servers:
        with zufluss.connect(server.bootstrap) as conn:
            properties = conn.admin.table_info("lake").descriptor.properties
            assert properties.items() >= expected.items()
            conn.admin.alter_cluster_configs({"datalake.iceberg.uri": f"http://{server.port}"})
            changed = conn.admin.table_info("lake").descriptor.properties
            assert changed["table.datalake.iceberg.uri"] == f"http://{server.port}"
            conn.admin.alter_cluster_configs(LAKE)
