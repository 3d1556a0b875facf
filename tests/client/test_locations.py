"""Remote locations and cluster configuration through the client, against real servers."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import pyarrow as pa
import pytest

import zufluss
from tests.servers import WarmServer
from zufluss.client.connection import connect_async
from zufluss.client.sync.table import Table
from zufluss.errors import ConfigError, ErrorCode, ZuflussError
from zufluss.remote.locations import AdminState, Health
from zufluss.testing.server import DevServer

DIRS = "remote.data.dirs"


@pytest.fixture
def server(tmp_path: Path) -> DevServer:
    """Not started: two locations, given by the list alone."""
    return WarmServer(tmp_path / "data", {DIRS: f"{tmp_path}/a,{tmp_path}/b"})


def test_locations_are_listed_changed_and_probed(server: DevServer, tmp_path: Path) -> None:
    with server, zufluss.connect(server.bootstrap) as conn:
        before = conn.admin.locations()
        assert [x.uri for x in before.locations] == [f"file://{tmp_path}/a", f"file://{tmp_path}/b"]
        added = conn.admin.alter_location(
            "add", uri=str(tmp_path / "c"), weight=3, expected_version=before.version
        )
        assert (added.location_id, added.weight, added.state) == (3, 3, AdminState.ACTIVE)
        with pytest.raises(ZuflussError) as conflict:
            conn.admin.alter_location("drain", 1, expected_version=before.version)
        assert conflict.value.code is ErrorCode.INVALID_UPDATE_VERSION_EXCEPTION
        with pytest.raises(ConfigError, match="set-weight"):
            conn.admin.alter_location("explode", 1)
        for weight in (-5, 2**31, 10**30):
            with pytest.raises(ConfigError, match=rf"weight of a location cannot be {weight}; al"):
                conn.admin.alter_location("set-weight", 1, weight=weight)
        assert {p.location_id: p.error for p in conn.admin.probe_locations()} == {
            1: None,
            2: None,
            3: None,
        }
        found = conn.admin.locations().locations
        assert [x.health for x in found] == [Health.ACTIVE] * 3
        assert [(s.server_id, s.errors) for s in found[2].servers] == [(1, 0)]


def test_options_are_changed_at_run_time_and_survive_a_restart(
    server: DevServer, tmp_path: Path
) -> None:
    three = ",".join(str(tmp_path / name) for name in "abc")
    with server:
        with zufluss.connect(server.bootstrap) as conn:
            conn.admin.alter_cluster_configs({DIRS: three})
            with pytest.raises(ConfigError, match="inside the other"):
                conn.admin.alter_cluster_configs({DIRS: f"{three},{tmp_path}/a/x"})
            (tmp_path / "file").write_text("no directory")
            with pytest.raises(ConfigError, match="cannot be used, nothing was changed"):
                conn.admin.alter_cluster_configs({DIRS: f"{three},{tmp_path}/file"})
        server.stop()
        server.start()
        with zufluss.connect(server.bootstrap) as conn:
            shown = {c.key: (c.value, c.source) for c in conn.admin.cluster_configs()}
            assert shown[DIRS] == (three, "DYNAMIC_SERVER_CONFIG")
            assert shown["data.dir"][1] == "INITIAL_SERVER_CONFIG"
            assert len(conn.admin.locations().locations) == 3
            conn.admin.alter_cluster_configs(reset=[DIRS])
            states = [x.state for x in conn.admin.locations().locations]
            assert states == [AdminState.ACTIVE, AdminState.ACTIVE, AdminState.RETIRED]


async def test_the_async_admin_does_the_same(server: DevServer) -> None:
    with server:
        async with await connect_async(server.bootstrap) as conn:
            found = await conn.admin.locations()
            assert (await conn.admin.alter_location("drain", 1)).state is AdminState.DRAINING
            assert (await conn.admin.locations()).version == found.version + 1
            [probe] = await conn.admin.probe_locations(2)
            assert probe.latency_ms is not None


@pytest.mark.parametrize(
    ("properties", "why"),
    [
        ({"remote.data.dir": "/x", DIRS: "/y,/z"}, r"remote\.data\.dir is file:///x"),
        ({DIRS: "/y,/y"}, "twice"),
        ({DIRS: "/y,ftp://host/z"}, "scheme 'ftp'"),
    ],
)
def test_a_server_with_locations_that_are_not_allowed_does_not_start(
    properties: dict[str, str], why: str, tmp_path: Path
) -> None:
    server = WarmServer(tmp_path / "data", properties)
    with pytest.raises(RuntimeError, match=why):
        server.start()


def test_a_location_added_while_a_table_is_written_and_read_gets_files_of_it(
    tmp_path: Path,
) -> None:
    properties = {
        DIRS: f"{tmp_path}/a,{tmp_path}/b",
        "log.segment.file-size": "64kb",
        "remote.log.task-interval-duration": "50ms",
    }
    rows = pa.table({"id": range(500), "text": [f"{i:0100}" for i in range(500)]})
    with (
        WarmServer(tmp_path / "data", properties) as server,
        zufluss.connect(server.bootstrap) as conn,
    ):
        plain = {"table.log.arrow.compression.type": "NONE"}
        conn.admin.create_table("fluss.events", rows.schema, bucket_count=1, properties=plain)
        table = conn.table("fluss.events")
        sent = written_until(table, rows, lambda: has_files(tmp_path / "b"))
        conn.admin.alter_cluster_configs({DIRS: ",".join(f"{tmp_path}/{x}" for x in "abc")})
        sent += written_until(table, rows, lambda: has_files(tmp_path / "c"))
        found = table.scan().to_arrow()
        assert found.num_rows == sent
        assert found["id"].to_pylist() == list(range(500)) * (sent // 500)


def written_until(table: Table, rows: pa.Table, done: Callable[[], bool]) -> int:
    """Append the rows again and again, reading what was written; how many that were."""
    sent = 0
    deadline = time.monotonic() + 60
    while not done():
        assert time.monotonic() < deadline, "no file came"
        with table.append() as writer:
            writer.write(rows)
        sent += rows.num_rows
        assert table.head(1).num_rows == 1
    return sent


def has_files(directory: Path) -> bool:
    return any(directory.rglob("*.log"))
