"""`zufluss lease` against a real server."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator

import pytest

import zufluss as client
from tests.servers import WarmServer
from zufluss.client.sync.connection import Connection
from zufluss.model.table import TableBucket
from zufluss.testing.server import DevServer

from .conftest import Result

pytestmark = pytest.mark.timeout(120)

Zufluss = Callable[..., Result]

COLUMNS = ["id", "owner", "tables", "snapshots", "bytes", "age", "remaining", "remarks"]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[DevServer]:
    """A server that takes snapshots all the time."""
    properties = {"kv.snapshot.interval": "20ms"}
    with WarmServer(tmp_path_factory.mktemp("leases"), properties) as server:
        yield server


@pytest.fixture
def zufluss(run: Callable[..., Result], server: DevServer) -> Zufluss:
    """Runs a command against that server."""

    def run_against_server(*arguments: str, code: int = 0) -> Result:
        result = run(*arguments, "--bootstrap", server.bootstrap)
        assert result.code == code, result
        return result

    return run_against_server


@pytest.fixture
def conn(server: DevServer) -> Iterator[Connection]:
    with client.connect(server.bootstrap) as connection:
        yield connection


@pytest.fixture
def bucket(conn: Connection) -> Iterator[TableBucket]:
    """The only bucket of `fluss.orders`, which has a snapshot."""
    conn.admin.create_table("orders", "id INT NOT NULL", primary_key=["id"], bucket_count=1)
    with conn.table("orders").upsert() as writer:
        writer.write({"id": [1]})
    while not (found := conn.admin.latest_kv_snapshots("orders")):
        pass
    yield found[0].bucket
    conn.admin.drop_table("orders", ignore_if_not_exists=True)


def test_a_lease_is_listed_shown_and_dropped(
    zufluss: Zufluss, conn: Connection, bucket: TableBucket
) -> None:
    with conn.admin.kv_snapshot_lease("orders", duration="1h", lease_id="nightly") as lease:
        (found,) = json.loads(zufluss("lease", "list", "-o", "json").out)
        assert (found["id"], found["owner"], found["epoch"]) == ("nightly", None, 1)
        assert 0 < found["remaining_ms"] <= found["duration_ms"] == 3_600_000
        (table,) = found["tables"]
        assert (table["table"], table["snapshots"]) == ("fluss.orders", 1)
        assert table["bytes"] > 0
        shown = json.loads(zufluss("lease", "show", "nightly", "-o", "json").out)
        (row,) = shown["buckets"]
        assert row["bucket"] == bucket.bucket_id
        assert row["snapshot_id"] == lease.snapshots[bucket].snapshot_id
        assert "there is no lease nightly any more" in zufluss("lease", "drop", "nightly").err
        assert json.loads(zufluss("lease", "list", "-o", "json").out) == []


def test_the_text_for_people_names_the_tables_and_the_snapshots(
    zufluss: Zufluss, conn: Connection, bucket: TableBucket
) -> None:
    with conn.admin.kv_snapshot_lease("orders", duration="1h", lease_id="nightly"):
        head, _, line = zufluss("lease", "list").out.splitlines()
        assert head.split() == [
            "id",
            "owner",
            "tables",
            "snapshots",
            "bytes",
            "age",
            "remaining",
            "remarks",
        ]
        assert line.split()[:3] == ["nightly", "fluss.orders", "1"]
        text = zufluss("lease", "show", "nightly").out
        assert "fluss.orders: 1 snapshots" in text
        assert "table_id  partition_id  bucket  snapshot  log_offset" in text
        conn.admin.drop_table("orders")
        assert f"dropped table {bucket.table_id}" in zufluss("lease", "list").out


def test_a_lease_that_there_is_not_cannot_be_shown_but_dropped(zufluss: Zufluss) -> None:
    assert "there is no lease 'other'" in zufluss("lease", "show", "other", code=1).err
    zufluss("lease", "drop", "other")
    assert "is not the id of a lease" in zufluss("lease", "drop", "a/b", code=1).err
    assert zufluss("lease", "list").out.splitlines()[2:] == []
