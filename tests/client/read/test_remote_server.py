"""Real scans of real tables whose old segments lie in remote storage, in files and in S3."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

import zufluss
from tests.servers import WarmServer
from tests.waiting import eventually
from zufluss.client.sync.connection import Connection
from zufluss.client.sync.table import Table
from zufluss.model.expression import col
from zufluss.remote.objects import LocationUnavailableError
from zufluss.testing.proxy import Fault, FaultProxy
from zufluss.testing.s3 import S3Server
from zufluss.testing.server import DevServer
from zufluss.wire import messages as m
from zufluss.wire.api import ApiKey

BATCHES, ROWS = 40, 50
SERVER = {
    "log.segment.file-size": "8kb",
    "log.index.interval-size": "512b",
    "log.retention.check-interval": "50ms",
    "remote.log.task-interval-duration": "50ms",
    "kv.snapshot.interval": "100ms",
    "datalake.format": "iceberg",
}
TABLE = {"table.log.tiered.local-segments": "1", "table.log.arrow.compression.type": "NONE"}
IN_S3, BEHIND_PROXY = 2, 3
"""Locations by id; 1 is a directory."""


@pytest.fixture(scope="module")
def s3() -> Iterator[S3Server]:
    with S3Server() as server:
        for bucket in ("one", "two", "scoped"):
            server.bucket(bucket)
        yield server


@pytest.fixture(scope="module")
def proxy(s3: S3Server) -> Iterator[FaultProxy]:
    with FaultProxy("127.0.0.1", s3.port) as found:
        yield found


@pytest.fixture(scope="module")
def server(
    s3: S3Server, proxy: FaultProxy, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[DevServer]:
    root = tmp_path_factory.mktemp("remote")
    properties = {
        **SERVER,
        **s3.properties,
        "remote.data.dirs": f"{root / 'files'},s3://one/a,s3://two/b",
        "s3.bucket.two.endpoint": proxy.endpoint,
    }
    with WarmServer(root / "data", properties) as found:
        yield found


@pytest.fixture(scope="module")
def conn(server: DevServer) -> Iterator[Connection]:
    options = {"client.request-timeout": "1s", "client.scanner.log.fetch.wait-max-time": "20ms"}
    with zufluss.connect(server.bootstrap, **options) as connection:
        yield connection


def filled(conn: Connection, server: DevServer, name: str, **changes: Any) -> Table:
    """A table whose server has hardly any of its log left."""
    properties = {**TABLE, **changes.pop("properties", {})}
    conn.admin.create_table(
        name,
        "id BIGINT, text STRING",
        **changes,
        bucket_count=2,
        bucket_keys=["id"],
        properties=properties,
    )
    table = conn.table(name)
    with table.upsert() if table.info.has_primary_key else table.append() as writer:
        for at in range(BATCHES):
            ids = range(at * ROWS, (at + 1) * ROWS)
            writer.write(pa.table({"id": list(ids), "text": [f"row {i}" for i in ids]}))
            writer.flush()
    eventually(lambda: _is_away(server.data_dir, f"{name}-{table.info.table_id}"))
    return table


def _is_away(data_dir: Path, directory: str) -> bool:
    """Every bucket begins after its start."""
    buckets = list(data_dir.glob(f"fluss/{directory}/log-*"))
    return bool(buckets) and all(
        not (bucket / f"{0:020d}.log").exists() and any(bucket.glob("*.log")) for bucket in buckets
    )


def ids(rows: pa.Table) -> list[int]:
    return sorted(rows["id"].to_pylist())


ALL = list(range(BATCHES * ROWS))


def test_rows_in_three_locations_are_read_in_order(conn: Connection, server: DevServer) -> None:
    table = filled(conn, server, "spread")
    rows = table.scan(with_offsets=True).to_arrow()
    assert ids(rows) == ALL
    for bucket in (0, 1):
        offsets = rows.filter(pa.compute.equal(rows["__bucket"], bucket))["__offset"].to_pylist()
        assert offsets == list(range(len(offsets)))
    assert ids(table.scan(filter=col("id") >= 100, columns=["id"]).to_arrow()) == ALL[100:]
    some = table.scan(start={0: 7}, stop={0: 300}, with_offsets=True).to_arrow()
    assert some["__offset"].to_pylist() == list(range(7, 300))


def test_a_changelog_in_remote_storage_has_every_change(
    conn: Connection, server: DevServer
) -> None:
    table = filled(conn, server, "keyed", primary_key=["id"])
    changes = table.changelog().to_arrow()
    assert ids(changes) == ALL
    assert set(changes["_change_type"].to_pylist()) == {"+I"}


def test_a_union_read_has_a_tail_in_remote_storage(conn: Connection, server: DevServer) -> None:
    table = filled(conn, server, "union", properties={"table.datalake.enabled": "true"})
    assert ids(table.scan(source="union").to_arrow()) == ALL


def test_a_scan_that_follows_reads_remote_rows_and_then_new_ones(
    conn: Connection, server: DevServer
) -> None:
    table = filled(conn, server, "followed")
    seen: list[int] = []
    with table.scan(stop=None).open() as scanner:
        while len(seen) < len(ALL):
            batch = scanner.poll(timeout_ms=10_000)
            assert batch is not None
            seen += batch["id"].to_pylist()
        with table.append() as writer:
            writer.write([{"id": -1, "text": "new"}])
        batch = scanner.poll(timeout_ms=10_000)
        assert batch is not None
        assert batch["id"].to_pylist() == [-1]
    assert sorted(seen) == ALL


def test_a_location_that_is_down_fails_its_tables_only(
    conn: Connection, server: DevServer, proxy: FaultProxy
) -> None:
    pinned = "table.zufluss.remote.placement"
    away = filled(conn, server, "away", properties={pinned: f"pinned:{BEHIND_PROXY}"})
    near = filled(conn, server, "near", properties={pinned: f"pinned:{IN_S3}"})
    proxy.set([Fault("reset")])
    try:
        assert ids(near.scan().to_arrow()) == ALL
        with pytest.raises(LocationUnavailableError, match="s3://two/b/log/fluss/away"):
            away.scan().to_arrow()
    finally:
        proxy.set()
    assert ids(away.scan().to_arrow()) == ALL


@pytest.mark.parametrize("kind", ["status_503", "cut_body", "reset"])
def test_single_failures_of_a_location_do_not_show(
    conn: Connection, server: DevServer, proxy: FaultProxy, kind: Any
) -> None:
    placement = {"table.zufluss.remote.placement": f"pinned:{BEHIND_PROXY}"}
    table = filled(conn, server, f"shaky_{kind}", properties=placement)
    proxy.set([Fault(kind, every=3, methods=("GET",), path_contains="shaky")])
    try:
        assert ids(table.scan().to_arrow()) == ALL
    finally:
        proxy.set()


def test_tokens_limited_to_a_table_read_it(s3: S3Server, tmp_path: Path) -> None:
    properties = {
        **SERVER,
        **s3.properties,
        "remote.data.dirs": "s3://scoped/a,s3://scoped/b",
        "s3.assumed.role.arn": "arn:aws:iam::123456789012:role/reader",
    }
    with (
        WarmServer(tmp_path / "data", properties) as server,
        zufluss.connect(server.bootstrap) as conn,
    ):
        table = filled(conn, server, "scoped")
        assert ids(table.scan().to_arrow()) == ALL
        path = m.PbPhysicalTablePath(database_name="fluss", table_name="scoped")
        request = m.GetFileSystemSecurityTokenRequest(tables=[path])
        answer = conn._thread.run(
            conn._twin.call_any(ApiKey.GET_FILESYSTEM_SECURITY_TOKEN, request)
        )
        directory = f"fluss/scoped-{table.info.table_id}"
        assert {token.prefix for token in answer.tokens} == {
            f"s3://scoped/{root}/{kind}/{directory}"
            for root in ("a", "b")
            for kind in ("log", "kv", "lake")
        }
        assert all(token.path_scoped for token in answer.tokens)
