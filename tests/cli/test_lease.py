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

Zufluss = Callable[..., Result]

COLUMNS = ["id", "owner", "tables", "snapshots", "bytes", "held", "frees", "age", "remaining"]


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
        said = zufluss("lease", "drop", "nightly").err
        assert said == "ended lease nightly: 1 snapshots of fluss.orders\n"
        assert json.loads(zufluss("lease", "list", "-o", "json").out) == []


def test_the_text_for_people_names_the_tables_and_the_snapshots(
    zufluss: Zufluss, conn: Connection, bucket: TableBucket
) -> None:
    with conn.admin.kv_snapshot_lease("orders", duration="1h", lease_id="nightly"):
        head, _, line = zufluss("lease", "list").out.splitlines()
        assert head.split() == [*COLUMNS, "remarks"]
        assert line.split()[:3] == ["nightly", "fluss.orders", "1"]
        text = zufluss("lease", "show", "nightly").out
        assert "fluss.orders: 1 snapshots" in text
        assert "table_id  partition_id  bucket  snapshot  log_offset" in text
        conn.admin.drop_table("orders")
        assert f"dropped table {bucket.table_id}" in zufluss("lease", "list").out


def test_a_lease_that_does_not_exist_can_be_neither_shown_nor_dropped(zufluss: Zufluss) -> None:
    for command in ("show", "drop"):
        assert "there is no lease 'other'" in zufluss("lease", command, "other", code=1).err
        assert "is not the id of a lease" in zufluss("lease", command, "a/b", code=1).err
    assert "anna has no lease" in zufluss("lease", "drop", "--owner", "anna", code=1).err
    unowned = zufluss("lease", "drop", "--owner", "", code=1).err
    assert "no lease without an owner" in unowned
    assert "either ids" in zufluss("lease", "drop", code=2).err
    assert "either ids" in zufluss("lease", "drop", "a", "--owner", "anna", code=2).err
    assert zufluss("lease", "list").out.splitlines()[2:] == []


def test_several_leases_are_dropped_and_each_failure_is_named(
    zufluss: Zufluss, conn: Connection, bucket: TableBucket
) -> None:
    for lease_id in ("one", "two", "three"):
        conn.admin.kv_snapshot_lease("orders", duration="1h", lease_id=lease_id)
    ended, missing = zufluss("lease", "drop", "one", "typo", "one", code=1).err.splitlines()
    assert ended == "ended lease one: 1 snapshots of fluss.orders"
    assert missing.startswith("error: lease typo: ")
    assert "there is no lease 'typo'" in missing
    assert [lease.lease_id for lease in conn.admin.kv_snapshot_leases()] == ["three", "two"]
    said = zufluss("lease", "drop", "--owner", "").err
    assert [line.split(":")[0] for line in said.splitlines()] == [
        "ended lease three",
        "ended lease two",
    ]
    assert conn.admin.kv_snapshot_leases() == []


def test_the_usage_of_leases_is_shown_by_table_and_owner(
    zufluss: Zufluss, conn: Connection, bucket: TableBucket
) -> None:
    with conn.admin.kv_snapshot_lease("orders", duration="1h", lease_id="nightly"):
        for number in range(2, 5):  # the leased snapshot is no longer among the newest ones
            with conn.table("orders").upsert() as writer:
                writer.write({"id": [number]})
            conn.admin.take_kv_snapshots("orders")
        found = json.loads(zufluss("lease", "usage", "-o", "json").out)
        (table,), (owner,), (lease,) = found["tables"], found["owners"], found["leases"]
        assert table["held_bytes"] == table["freed_bytes"] > 0
        assert (owner["owner"], owner["held_bytes"]) == (None, table["held_bytes"])
        assert (lease["lease_id"], lease["freed_bytes"]) == ("nightly", table["freed_bytes"])
        (listed,) = json.loads(zufluss("lease", "list", "-o", "json").out)
        assert listed["held_bytes"] == listed["freed_bytes"] == table["held_bytes"]
        head, _, everybody, nobody = zufluss("lease", "usage").out.splitlines()
        assert head.split() == ["table", "owner", "held", "frees"]
        size = str(table["held_bytes"])
        assert everybody.split() == ["fluss.orders", "(all)", size, size]
        assert nobody.split() == ["fluss.orders", size, size]
        assert f"{size} bytes, if it is dropped" in zufluss("lease", "show", "nightly").out
    assert zufluss("lease", "usage").out.splitlines()[2:] == []
