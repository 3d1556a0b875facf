"""Scans of primary-key tables on a real server: exact, resumed after kill -9, from snapshots."""

from __future__ import annotations

import re
import shutil
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import polars as pl
import pyarrow as pa
import pyarrow.compute as pc
import pytest

import zufluss
from tests.client.pk import create_table, delete, upsert
from tests.servers import WarmServer
from tests.waiting import WAIT_SECONDS
from zufluss import col
from zufluss.client.sync.connection import Connection
from zufluss.client.sync.scan import KvScanner
from zufluss.client.sync.table import Table
from zufluss.errors import (
    ConfigError,
    InvalidScanRequestError,
    KvScanBusyError,
    KvSnapshotNotExistError,
    PartitionNotExistError,
    TableNotExistError,
)
from zufluss.model.expression import Expression
from zufluss.model.table import TableBucket
from zufluss.testing.server import DevServer

KEYED = "id INT NOT NULL, name STRING, PRIMARY KEY (id)"
SMALL = {"client.scanner.kv.fetch.max-bytes": "2kb"}
ROWS = 4_000

Model = dict[int, str | None]


@pytest.fixture(scope="module")
def paged(dev_server: DevServer) -> Iterator[Connection]:
    """A connection that reads in small pages."""
    with zufluss.connect(dev_server.bootstrap, **SMALL) as connection:
        yield connection


def filled(connection: Connection, rows: int = ROWS, buckets: int = 3) -> tuple[Table, Model]:
    table = create_table(connection, KEYED, bucket_count=buckets)
    model: Model = {number: f"row {number}" for number in range(rows)}
    upsert(table, {"id": list(model), "name": list(model.values())})
    return table, model


def change_everything(table: Table, model: Model) -> Model:
    """Delete, overwrite and insert again; the table's rows afterwards."""
    delete(table, {"id": [number for number in model if number % 3 == 0]})
    others = [number for number in model if number % 3]
    upsert(table, {"id": others, "name": ["changed"] * len(others)})
    again = [number for number in model if number % 6 == 0]
    upsert(table, {"id": again, "name": ["again"] * len(again)})
    added = [number + 1_000_000 for number in model]
    upsert(table, {"id": added, "name": ["added"] * len(added)})
    now: Model = {**dict.fromkeys(others, "changed"), **dict.fromkeys(again, "again")}
    return now | dict.fromkeys(added, "added")


def write_on(table: Table, stop: threading.Event) -> None:
    """Upsert and delete until told to stop."""
    turn = 0
    while not stop.is_set():
        turn += 1
        ids = [(turn * 37 + i) % 700 for i in range(50)]
        upsert(table, {"id": ids, "name": [f"turn {turn}"] * 50})
        delete(table, {"id": ids[:10]})


def rows_of(batches: Any) -> Model:
    """Rows by key; a key that comes twice is a failure."""
    found: Model = {}
    for batch in batches:
        for row in batch.to_pylist():
            assert row["id"] not in found, f"{row} came twice"
            found[row["id"]] = row["name"]
    return found


def applied(rows: Model, changes: pa.Table) -> Model:
    """The rows after changes."""
    now = dict(rows)
    for change in changes.to_pylist():
        if change["_change_type"] in ("+I", "+U"):
            now[change["id"]] = change["name"]
        else:
            del now[change["id"]]
    return now


# -- what comes -----------------------------------------------------------------------------------


def test_a_scan_is_the_state_at_open_whatever_is_written_meanwhile(paged: Connection) -> None:
    table, model = filled(paged)
    with table.scan(prefetch=0).open() as scanner:
        first = next(scanner)
        assert 0 < first.num_rows < ROWS / 3
        now = change_everything(table, model)
        assert rows_of([first, *scanner]) == model
        assert scanner.progress == 1.0
    assert rows_of(table.scan()) == now


def test_rows_and_the_changes_from_its_offsets_are_the_table_beside_writers(
    paged: Connection,
) -> None:
    table, _ = filled(paged, rows=500)
    stop = threading.Event()
    thread = threading.Thread(target=write_on, args=(table, stop))
    thread.start()
    try:
        runs = []
        for _ in range(8):
            with table.scan().open() as scanner:
                runs.append((scanner.log_offsets, rows_of(scanner)))
    finally:
        stop.set()
        thread.join()
    now = rows_of(table.scan())
    for offsets, rows in runs:
        changes = table.changelog(start=offsets).to_arrow()
        assert applied(rows, changes.sort_by("_log_offset")) == now
    assert any(rows != now for _, rows in runs)


@pytest.mark.parametrize(
    "filter",
    [
        col("id") >= 3_990,
        col("id").isin([1, 17, 3_999]),
        col("name").starts_with("row 39") & (col("id") != 39),
        col("name").is_null() | (col("id") < 3),
    ],
    ids=["range", "list", "text", "null"],
)
def test_columns_and_filter_give_what_they_give_on_the_client(
    paged: Connection, filter: Expression
) -> None:
    table, _ = filled(paged)
    upsert(table, {"id": [4_001, 4_002], "name": [None, "row 39 last"]})
    everything = table.scan().to_arrow()
    wanted = everything.filter(filter.to_arrow(table.schema)).sort_by("id")
    assert wanted.num_rows
    assert table.scan(filter=filter).to_arrow().sort_by("id") == wanted
    names = table.scan(["name"], filter).to_arrow()["name"].to_pylist()
    assert sorted(map(str, names)) == sorted(map(str, wanted["name"].to_pylist()))
    limited = table.scan(filter=filter, limit=2).to_arrow()
    assert limited.num_rows == 2
    assert pc.all(pc.is_in(limited["id"], wanted["id"])).as_py()


def test_a_scan_is_an_arrow_stream(paged: Connection) -> None:
    table, model = filled(paged)
    assert pl.DataFrame(table.scan(["id"])).height == len(model)
    assert pa.table(table.scan()).num_rows == len(model)
    total = table.scan().to_duckdb().aggregate("count(*), sum(id)").fetchall()
    assert total == [(len(model), sum(model))]
    assert len(table.scan(limit=11).to_pandas()) == 11


def test_rows_of_older_schemas_come_under_the_one_the_table_was_opened_with(
    conn: Connection,
) -> None:
    table = create_table(conn, KEYED, bucket_count=1)
    upsert(table, {"id": [1], "name": ["a"]})
    conn.admin.alter_table(table.path, add_columns="extra INT")
    wide = conn.table(table.path)
    upsert(wide, {"id": [2], "name": ["b"], "extra": [5]})
    assert table.scan().to_arrow().to_pylist() == [{"id": 1, "name": "a"}, {"id": 2, "name": "b"}]
    found = wide.scan(filter=col("id") > 0).to_arrow().to_pydict()
    assert found == {"id": [1, 2], "name": ["a", "b"], "extra": [None, 5]}
    assert wide.scan(["extra"], col("extra") == 5).to_arrow().to_pylist() == [{"extra": 5}]


def test_partitions_and_buckets_can_be_chosen(conn: Connection) -> None:
    columns = "id INT NOT NULL, name STRING NOT NULL, PRIMARY KEY (id, name)"
    table = create_table(conn, columns, partition_keys=["name"], bucket_count=2)
    for name in ("a", "b"):
        conn.admin.create_partition(table.path, {"name": name})
        upsert(table, {"id": list(range(10)), "name": [name] * 10})
    assert table.scan().to_arrow().num_rows == 20
    assert set(table.scan(partitions=["b"]).to_arrow()["name"].to_pylist()) == {"b"}
    parts = [table.scan(buckets=[bucket]).to_arrow().num_rows for bucket in (0, 1)]
    assert sum(parts) == 20
    assert all(parts)
    with table.scan().open() as scanner:
        assert len(scanner.log_offsets) == 4


def test_some_buckets_and_partitions_are_read_at_the_offsets_of_the_whole_table(
    conn: Connection,
) -> None:
    conn.admin.create_table(
        "fluss.parts_at",
        "id BIGINT, day STRING, n INT, PRIMARY KEY (id, day)",
        partition_keys=["day"],
        bucket_count=2,
    )
    table = conn.table("fluss.parts_at")

    def write(n: int) -> None:
        with table.upsert() as writer:
            for day in ("1", "2"):
                writer.write({"id": [*range(20)], "day": [day] * 20, "n": [n] * 20})

    write(1)
    with table.scan().open() as scanner:
        assert sum(batch.num_rows for batch in scanner) == 40
        at = scanner.log_offsets
    write(2)

    def rows(**chosen: Any) -> list[tuple[int, str]]:
        found = table.scan(at=at, **chosen).to_arrow().to_pylist()
        assert {row["n"] for row in found} == {1}
        return sorted((row["id"], row["day"]) for row in found)

    everything = [(id, day) for id in range(20) for day in ("1", "2")]
    assert sorted(rows(buckets=[0]) + rows(buckets=[1])) == everything
    assert rows(partitions=["2"]) == [(id, "2") for id in range(20)]
    both = [rows(partitions=["1"], buckets=[bucket]) for bucket in (0, 1)]
    assert sorted(both[0] + both[1]) == rows(partitions=["1"])
    with pytest.raises(PartitionNotExistError, match="has no 2 to scan"):
        table.scan(at={2: 0}, buckets=[0]).to_arrow()
    conn.admin.drop_partition("fluss.parts_at", {"day": "1"})
    assert rows(partitions=["2"]) == [(id, "2") for id in range(20)]
    with pytest.raises(PartitionNotExistError):
        rows()


def test_refusals_name_the_table_and_the_partition(conn: Connection) -> None:
    columns = "id INT NOT NULL, name STRING NOT NULL, PRIMARY KEY (id, name)"
    table = create_table(conn, columns, partition_keys=["name"], bucket_count=1)
    conn.admin.create_partition(table.path, {"name": "a"})
    upsert(table, {"id": [1], "name": ["a"]})
    with table.scan().open() as scanner:
        [bucket] = scanner.log_offsets
    name = re.escape(f"{table.path}, partition a, bucket 0")
    with pytest.raises(InvalidScanRequestError, match=f"{name} has no state at offset 99"):
        table.scan(at={bucket: 99}).to_arrow()
    with pytest.raises(KvSnapshotNotExistError, match=f"{name} has no snapshot 77"):
        table.kv_snapshot(bucket, 77)
    with pytest.raises(KvSnapshotNotExistError, match=f"{name} has no key-value snapshot at"):
        table.scan(at={bucket: 1}, source="snapshot").to_arrow()
    with pytest.raises(ConfigError, match=f"which snapshot of {name}"):
        table.kv_snapshot(bucket)


def test_one_scan_too_many_is_refused_until_another_one_ends(dev_server: DevServer) -> None:
    quick = {"client.request-timeout": "2s"}
    with (
        zufluss.connect(dev_server.bootstrap) as connection,
        zufluss.connect(dev_server.bootstrap, **quick) as impatient,
        ExitStack() as stack,
    ):
        table, model = filled(connection, buckets=1)
        runs = [stack.enter_context(table.scan().open()) for _ in range(8)]
        with pytest.raises(KvScanBusyError, match=r"kv\.scanner\.max-per-bucket"):
            impatient.table(str(table.path)).scan().open()
        runs[3].close()
        assert rows_of(table.scan()) == model


def test_a_table_that_is_dropped_ends_its_scans(paged: Connection) -> None:
    table, _ = filled(paged)
    with table.scan(prefetch=0).open() as scanner:
        next(scanner)
        paged.admin.drop_table(table.path)
        with pytest.raises(TableNotExistError):
            list(scanner)


# -- other moments --------------------------------------------------------------------------------


def test_the_state_at_earlier_offsets_can_be_read_again(paged: Connection) -> None:
    table, model = filled(paged)
    with table.scan().open() as scanner:
        before = scanner.log_offsets
    now = change_everything(table, model)
    assert rows_of(table.scan(at=before)) == model
    one = table.scan(at={1: 0}).to_arrow()
    assert one.num_rows == 0
    assert rows_of(table.scan()) == now


@pytest.fixture(scope="module")
def snapshotting(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Connection]:
    """A connection to a server that takes snapshots all the time."""
    fast = {"kv.snapshot.interval": "50ms", "kv.snapshot.num-retained": "2"}
    with (
        WarmServer(tmp_path_factory.mktemp("kv"), fast) as server,
        zufluss.connect(server.bootstrap) as connection,
    ):
        yield connection


def until_snapshots(connection: Connection, table: Table) -> dict[TableBucket, int]:
    """The offsets of the newest snapshots, once they have everything that is in the log now."""
    ends = connection.admin.list_offsets(table.path)
    deadline = time.monotonic() + WAIT_SECONDS
    while time.monotonic() < deadline:
        found = connection.admin.latest_kv_snapshots(table.path)
        if {each.bucket.bucket_id: each.log_offset for each in found} == ends:
            return {each.bucket: each.log_offset for each in found}
        time.sleep(0.01)
    raise AssertionError(f"no snapshots of {table.path} reached {ends}")


def test_live_is_snapshot_and_changelog_at_the_same_offsets(snapshotting: Connection) -> None:
    table, model = filled(snapshotting)
    offsets = until_snapshots(snapshotting, table)
    with table.scan(source="snapshot").open() as scanner:
        assert scanner.log_offsets == offsets
        stored = rows_of(scanner)
    assert stored == model
    now = change_everything(table, model)
    assert rows_of(table.scan(source="live", at=offsets)) == stored
    changes = table.changelog(start=offsets).to_arrow()
    assert applied(stored, changes.sort_by("_log_offset")) == rows_of(table.scan()) == now


def test_a_scan_of_snapshots_projects_filters_and_takes_the_offset_it_is_given(
    snapshotting: Connection,
) -> None:
    table, model = filled(snapshotting)
    offsets = until_snapshots(snapshotting, table)
    few = table.scan(["name"], col("id") >= 3_998, source="snapshot").to_arrow()
    assert sorted(few["name"].to_pylist()) == ["row 3998", "row 3999"]
    assert table.scan(source="snapshot", limit=7).to_arrow().num_rows == 7
    assert rows_of(table.scan(source="snapshot", at=offsets)) == model
    with pytest.raises(KvSnapshotNotExistError, match='source="live" rebuilds'):
        table.scan(source="snapshot", at={0: 1}).to_arrow()


def test_a_bucket_without_a_snapshot_is_named_and_not_left_out(conn: Connection) -> None:
    table, model = filled(conn)
    with pytest.raises(KvSnapshotNotExistError, match=r"bucket 0, .* source=\"live\""):
        table.scan(source="snapshot").open()
    assert rows_of(table.scan()) == model


def test_a_table_that_was_never_written_to_has_no_rows_in_snapshots(conn: Connection) -> None:
    table = create_table(conn, KEYED, bucket_count=2)
    with table.scan(source="snapshot").open() as scanner:
        assert list(scanner) == []
        assert set(scanner.log_offsets.values()) == {0}


# -- kill -9 --------------------------------------------------------------------------------------


def pins(server: DevServer) -> list[Path]:
    """The directories of pinned states on the server."""
    return [place for place in server.data_dir.glob("**/pins") if place.is_dir()]


def test_a_scan_goes_on_from_a_snapshot_and_the_log_after_kill_9(tmp_path: Path) -> None:
    with (
        WarmServer(tmp_path, {"kv.snapshot.interval": "50ms"}) as server,
        zufluss.connect(server.bootstrap, **SMALL) as connection,
    ):
        table, model = filled(connection)
        until_snapshots(connection, table)
        model[-1] = "behind the snapshot"
        upsert(table, {"id": [-1], "name": [model[-1]]})
        with table.scan().open() as scanner:
            taken = [next(scanner) for _ in range(5)]
            offsets = scanner.log_offsets
            kill_and_start_without_pins(server)
            now = change_everything(table, model)
            assert rows_of([*taken, *scanner]) == model
            assert scanner.log_offsets == offsets
        changes = table.changelog(start=offsets).to_arrow().sort_by("_log_offset")
        assert applied(model, changes) == now == rows_of(table.scan())


def kill_and_start_without_pins(server: DevServer) -> None:
    server.kill()
    assert pins(server)
    for place in pins(server):
        shutil.rmtree(place)
    server.start()


def test_state_expires_and_is_made_again_while_a_consumer_is_slow(tmp_path: Path) -> None:
    """The state expires before every page."""
    short = {"zufluss.kv.scanner.age-max": "1500ms", "kv.scanner.expiration-interval": "20ms"}
    with (
        WarmServer(tmp_path, short) as server,
        zufluss.connect(server.bootstrap, **SMALL) as connection,
    ):
        table, model = filled(connection, rows=500, buckets=1)
        with table.scan(prefetch=0).open() as scanner:
            taken = [next(scanner)]
            change_everything(table, model)
            while (batch := after_expiry(server, scanner)) is not None:
                taken.append(batch)
            assert len(taken) > 2
            assert rows_of(taken) == model


def after_expiry(server: DevServer, scanner: KvScanner) -> pa.RecordBatch | None:
    """The next rows, once the server has let go of all state."""
    deadline = time.monotonic() + WAIT_SECONDS
    while [each for place in pins(server) for each in place.iterdir()]:
        assert time.monotonic() < deadline, "state was never let go"
        time.sleep(0.01)
    return next(scanner, None)


def test_an_offset_that_never_was_is_refused(conn: Connection) -> None:
    table, _ = filled(conn, rows=10, buckets=1)
    with pytest.raises(InvalidScanRequestError):
        table.scan(at={0: 1_000_000}).to_arrow()
