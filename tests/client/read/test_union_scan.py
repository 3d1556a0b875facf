"""Union reads, with a real server and real Iceberg files: every row once."""

from __future__ import annotations

import asyncio
import datetime as dt
import itertools
import random
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pyarrow as pa
import pytest

import zufluss
from tests.client.rounds import Rounds, lake_table
from tests.servers import WarmServer
from zufluss import col
from zufluss.client.connection import connect_async
from zufluss.client.core.offsets import BucketPlace
from zufluss.client.read.union_plan import tail_range
from zufluss.client.sync.connection import Connection
from zufluss.client.sync.scan import UnionScanner
from zufluss.client.sync.table import Table
from zufluss.errors import (
    InvalidTableError,
    OffsetOutOfRangeError,
    PartitionNotExistError,
    TableNotExistError,
)
from zufluss.model.table import TableBucket
from zufluss.testing.server import DevServer

pytest.importorskip("pyiceberg")
ICEBERG = {"datalake.format": "iceberg"}
Rows = list[dict[str, Any]]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[DevServer]:
    with WarmServer(tmp_path_factory.mktemp("lake-server"), ICEBERG) as server:
        yield server


@pytest.fixture(scope="module")
def conn(server: DevServer) -> Iterator[Connection]:
    with zufluss.connect(server.bootstrap) as connection:
        yield connection


@pytest.fixture(scope="module")
def rounds(conn: Connection, server: DevServer) -> Rounds:
    return Rounds(conn, server.bootstrap)


def append(table: Table, **columns: list[Any]) -> None:
    with table.append() as writer:
        writer.write(columns)


def upsert(table: Table, **columns: list[Any]) -> None:
    with table.upsert() as writer:
        writer.write(columns)


def delete(table: Table, **columns: list[Any]) -> None:
    with table.upsert() as writer:
        writer.delete(columns)


def read(table: Table, *args: Any, source: Any = "union", **options: Any) -> Rows:
    rows: Rows = table.scan(*args, source=source, **options).to_arrow().to_pylist()
    return sorted(rows, key=lambda row: repr(list(row.values())))


def ids(table: Table, **options: Any) -> list[Any]:
    return sorted(row["id"] for row in read(table, **options))


# -- log tables --------------------------------------------------------------------------------


def test_a_log_table_has_every_row_once_before_between_and_after_rounds(conn, rounds):
    with lake_table(conn, "id INT, name STRING", bucket_count=3) as table:
        for step in range(4):
            assert ids(table) == list(range(20 * step))
            append(table, id=[*range(20 * step, 20 * step + 10)], name=["x"] * 10)
            rounds.tier(table)
            append(table, id=[*range(20 * step + 10, 20 * step + 20)], name=["y"] * 10)
            assert read(table) == read(table, source="log")
            assert ids(table, source="lake") == list(range(20 * step + 10))
            assert table.count(source="lake") == 20 * step + 10
            assert table.count(source="union") == table.count() == 20 * step + 20


def test_a_table_of_which_nothing_was_tiered_is_read_from_its_log(conn):
    with lake_table(conn, "id INT") as table:
        assert ids(table) == []
        assert ids(table, source="lake") == []
        append(table, id=[1, 2])
        assert ids(table) == [1, 2]
        assert ids(table, source="lake") == []


def test_a_table_that_is_not_tiered_is_read_from_its_log_and_has_no_lake(conn):
    with lake_table(conn, "id INT", properties={"table.datalake.enabled": "false"}) as table:
        append(table, id=[1, 2])
        assert ids(table) == [1, 2]
        with pytest.raises(InvalidTableError, match=r"table\.datalake\.enabled=true"):
            table.scan(source="lake").to_arrow()


def test_columns_filter_limit_and_offsets_are_the_same_from_lake_and_log(conn, rounds):
    with lake_table(conn, "id INT, name STRING, n BIGINT", bucket_count=2) as table:
        append(table, id=[1, 2, 3, 4], name=["a", "b", "c", None], n=[1, 2, 3, 4])
        rounds.tier(table)
        append(table, id=[5, 6, 7], name=["a", None, "c"], n=[5, 6, 7])
        assert read(table, ["n", "id"], (col("name") == "c") | (col("n") < 2)) == [
            {"n": 1, "id": 1},
            {"n": 3, "id": 3},
            {"n": 7, "id": 7},
        ]
        assert ids(table, filter=col("name").is_null()) == [4, 6]
        assert len(read(table, limit=3)) == 3
        assert len(read(table, limit=6)) == 6
        scan = table.scan(["id"], with_offsets=True, source="union")
        assert scan.schema == table.scan(["id"], with_offsets=True).schema
        live = read(table, ["id"], with_offsets=True, source="log")
        assert read(table, ["id"], with_offsets=True) == live
        one = [row["id"] for row in live if row["__bucket"] == 1]
        assert ids(table, buckets=[1]) == sorted(one)


def test_the_rows_come_in_every_form(conn, rounds):
    with lake_table(conn, "id INT") as table:
        append(table, id=[1])
        rounds.tier(table)
        append(table, id=[2])
        scan = table.scan(source="union")
        assert sorted(scan.to_pandas()["id"]) == [1, 2]
        assert sorted(scan.to_polars()["id"]) == [1, 2]
        assert sorted(scan.to_duckdb().fetchall()) == [(1,), (2,)]
        assert scan.to_reader().read_all().num_rows == 2
        assert sum(batch.num_rows for batch in scan) == 2
        assert "UnionScan" in repr(scan)


def test_a_run_is_pinned_and_sees_neither_later_rows_nor_later_rounds(conn, rounds):
    with lake_table(conn, "id INT", bucket_count=2) as table:
        append(table, id=[1, 2])
        rounds.tier(table)
        append(table, id=[3, 4])
        with table.scan(source="union").open() as scanner:
            append(table, id=[5])
            rounds.tier(table)
            append(table, id=[6])
            found = sorted(i for batch in scanner for i in batch["id"].to_pylist())
        assert found == [1, 2, 3, 4]
        assert ids(table) == [1, 2, 3, 4, 5, 6]


def test_a_scan_that_follows_reads_the_lake_and_then_the_log_without_gap_or_overlap(conn, rounds):
    with lake_table(conn, "id INT", bucket_count=2) as table:
        append(table, id=[*range(10)])
        rounds.tier(table)
        append(table, id=[*range(10, 20)])
        with table.scan(source="union", stop=None).open() as scanner:
            with pytest.raises(ValueError, match="still to come"):
                scanner.positions()
            found = take(scanner, 20)
            append(table, id=[*range(20, 30)])
            rounds.tier(table)
            found += take(scanner, 10)
            resume = scanner.positions()
        assert found.count(0) == 1
        assert sorted(found) == list(range(30))
        append(table, id=[30])
        assert table.scan(start=resume).to_arrow()["id"].to_pylist() == [30]


def take(scanner: Any, count: int) -> list[int]:
    found: list[int] = []
    while len(found) < count:
        batch = scanner.poll(10_000)
        assert batch is not None, f"{len(found)} of {count} rows came"
        found += batch["id"].to_pylist()
    return found


# -- primary keys ------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(3))
def test_a_primary_key_table_is_what_was_written_whatever_was_tiered_when(conn, rounds, seed):
    rng = random.Random(seed)
    model: dict[tuple[int, str], int | None] = {}
    schema = "a INT, b STRING, n BIGINT, PRIMARY KEY (a, b)"
    with lake_table(conn, schema, bucket_count=2, bucket_keys=["a"]) as table:
        for step in range(12):
            keys = {(rng.randrange(6), rng.choice("xyz")) for _ in range(rng.randrange(1, 8))}
            a, b = [k[0] for k in keys], [k[1] for k in keys]
            if rng.random() < 0.3:
                delete(table, a=a, b=b)
                for key in keys:
                    model.pop(key, None)
            else:
                n = [rng.choice([None, step * 100 + i]) for i in range(len(keys))]
                upsert(table, a=a, b=b, n=n)
                model |= dict(zip(keys, n, strict=True))
            assert read(table) == rows_of(model)
            if rng.random() < 0.4:
                rounds.tier(table)
                assert read(table) == read(table, source="lake") == rows_of(model)


def rows_of(model: dict[tuple[int, str], int | None]) -> Rows:
    rows = [{"a": a, "b": b, "n": n} for (a, b), n in model.items()]
    return sorted(rows, key=lambda row: repr(list(row.values())))


def test_a_row_that_changed_since_is_not_found_by_what_it_was(conn, rounds):
    with lake_table(conn, "id INT, state STRING, n INT, PRIMARY KEY (id)") as table:
        upsert(table, id=[1, 2, 3], state=["new", "new", "new"], n=[1, 2, 3])
        rounds.tier(table)
        upsert(table, id=[1], state=["paid"], n=[1])
        delete(table, id=[2])
        assert ids(table, filter=col("state") == "new") == [3]
        assert read(table, ["n"], col("state") == "paid") == [{"n": 1}]
        assert ids(table, limit=1, filter=col("id") > 1) == [3]


def test_rows_of_a_primary_key_table_have_the_offset_of_their_last_change(conn, rounds):
    with lake_table(conn, "id INT, n INT, PRIMARY KEY (id)", bucket_count=1) as table:
        upsert(table, id=[1, 2], n=[1, 1])
        rounds.tier(table)
        upsert(table, id=[2], n=[2])
        found = read(table, ["id"], with_offsets=True)
        assert [(row["id"], row["__offset"], row["__bucket"]) for row in found] == [
            (1, 0, 0),
            (2, 3, 0),
        ]
        assert [r["id"] for r in read(table, buckets=[0])] == [1, 2]


def test_an_empty_primary_key_table_has_no_rows_also_when_all_were_deleted(conn, rounds):
    with lake_table(conn, "id INT, n INT, PRIMARY KEY (id)") as table:
        assert read(table) == []
        upsert(table, id=[1], n=[1])
        rounds.tier(table)
        delete(table, id=[1])
        assert read(table) == []
        rounds.tier(table)
        assert read(table) == read(table, source="lake") == []


# -- partitions --------------------------------------------------------------------------------


def test_partitions_are_read_one_by_one_or_together(conn, rounds):
    schema = "id INT, day STRING"
    with lake_table(conn, schema, partition_keys=["day"], bucket_count=2) as table:
        for day in ("d1", "d2"):
            conn.admin.create_partition(table.path, day)
        append(table, id=[1, 2], day=["d1", "d2"])
        rounds.tier(table)
        conn.admin.create_partition(table.path, "d3")
        append(table, id=[3, 4, 5], day=["d1", "d2", "d3"])
        assert ids(table) == [1, 2, 3, 4, 5]
        assert ids(table, partitions=["d1"]) == [1, 3]
        assert ids(table, partitions=[{"day": "d2"}, "d3"]) == [2, 4, 5]
        assert ids(table, partitions=["d2"], source="lake") == [2]
        with pytest.raises(PartitionNotExistError, match="d9"):
            read(table, partitions=["d1", "d9"])


@pytest.mark.parametrize("key", ["", ", PRIMARY KEY (id, day)"], ids=["log", "primary key"])
def test_a_dropped_partition_stays_readable_until_there_is_another_of_its_name(conn, rounds, key):
    with lake_table(conn, "id INT, day STRING, n INT" + key, partition_keys=["day"]) as table:
        write = upsert if key else append
        for day in ("d1", "d2"):
            conn.admin.create_partition(table.path, day)
        write(table, id=[1, 2], day=["d1", "d2"], n=[1, 1])
        rounds.tier(table)
        write(table, id=[3, 4], day=["d1", "d2"], n=[1, 1])
        conn.admin.drop_partition(table.path, "d1")
        assert ids(table) == [1, 2, 4]  # 3 was never tiered and went with its partition
        assert ids(table, partitions=["d1"]) == [1]
        rounds.tier(table)
        assert ids(table) == [1, 2, 4]
        conn.admin.create_partition(table.path, "d1")
        assert ids(table) == [2, 4]
        write(table, id=[5], day=["d1"], n=[2])
        assert ids(table) == [2, 4, 5]
        assert ids(table, partitions=["d1"]) == [5]
        assert ids(table, source="lake") == [1, 2, 4]  # as it is until the next round
        rounds.tier(table)
        assert ids(table) == ids(table, source="lake") == [2, 4, 5]


def test_a_scan_that_follows_finds_partitions_created_later(server, rounds, conn):
    with lake_table(conn, "id INT, day STRING", partition_keys=["day"]) as table:
        conn.admin.create_partition(table.path, "d1")
        append(table, id=[1], day=["d1"])
        rounds.tier(table)
        append(table, id=[2], day=["d1"])
        asyncio.run(follow_partitions(server.bootstrap, str(table.path)))


async def follow_partitions(bootstrap: str, path: str) -> None:
    async with await connect_async(bootstrap) as connection:
        table = await connection.table(path)
        async with await table.scan(source="union", stop=None).open() as scanner:
            found = await take_async(scanner, 2)
            await connection.admin.create_partition(path, "d2")
            async with table.append() as writer:
                await writer.write({"id": [3], "day": ["d2"]})
            await scanner._tail.refresh_partitions()
            found += await take_async(scanner, 1)
    assert found == [1, 2, 3]


async def take_async(scanner: Any, count: int) -> list[int]:
    found: list[int] = []
    while len(found) < count:
        batch = await scanner.poll(10_000)
        assert batch is not None, f"{len(found)} of {count} rows came"
        found += batch["id"].to_pylist()
    return found


# -- tables that change ------------------------------------------------------------------------


@pytest.mark.parametrize("key", ["", ", PRIMARY KEY (id)"], ids=["log", "primary key"])
def test_a_column_that_was_added_is_null_in_older_rows_wherever_they_are(conn, rounds, key):
    with lake_table(conn, "id INT, n INT" + key) as old:
        write = upsert if key else append
        write(old, id=[1], n=[1])
        rounds.tier(old)
        write(old, id=[2], n=[2])
        conn.admin.alter_table(old.path, add_columns="note STRING")
        new = conn.table(old.path)
        assert [row["note"] for row in read(new)] == [None, None]
        write(new, id=[3], n=[3], note=["x"])
        for _ in range(2):
            assert [(r["id"], r["note"]) for r in read(new)] == [(1, None), (2, None), (3, "x")]
            assert read(old) == [{"id": i, "n": i} for i in (1, 2, 3)]
            assert [r["id"] for r in read(new, filter=col("note") == "x")] == [3]
            rounds.tier(new)


def test_a_table_that_was_created_again_is_another_one(conn, rounds):
    with lake_table(conn, "id INT") as table:
        append(table, id=[1])
        rounds.tier(table)
        descriptor = table.info.descriptor
        conn.admin.drop_table(table.path)
        conn.admin.create_table(table.path, descriptor)
        with pytest.raises(TableNotExistError, match="created again"):
            read(table)
        again = conn.table(table.path)
        assert read(again) == []
        append(again, id=[2])
        rounds.tier(again)
        append(again, id=[3])
        assert ids(again) == [2, 3]


def test_times_are_cut_to_microseconds_on_both_sides(conn, rounds):
    nanos = [-1, 1_001, 1_999, None]
    times = pa.array(nanos, pa.timestamp("ns"))
    with lake_table(conn, "id INT, at TIMESTAMP(9), many ARRAY<TIMESTAMP_LTZ(9)>") as table:
        many = pa.array([[n] for n in nanos], pa.list_(pa.timestamp("ns", "UTC")))
        batch = pa.table({"id": [1, 2, 3, 4], "at": times, "many": many})
        with table.append() as writer:
            writer.write(batch)
        before = cut(table)
        assert before == [
            (1, -1_000, [-1_000]),
            (2, 1_000, [1_000]),
            (3, 1_000, [1_000]),
            (4, None, [None]),
        ]
        moment = dt.datetime(1970, 1, 1, 0, 0, 0, 1)
        assert ids(table, filter=col("at") == moment) == [2, 3]
        rounds.tier(table)
        assert cut(table) == before
        assert ids(table, filter=col("at") == moment) == [2, 3]


def cut(table: Table) -> list[Any]:
    rows = table.scan(source="union").to_arrow().sort_by("id")
    assert rows.schema == table.schema.arrow
    numbers = rows["at"].cast(pa.int64()).to_pylist()
    many = rows["many"].cast(pa.list_(pa.int64())).to_pylist()
    return list(zip(rows["id"].to_pylist(), numbers, many, strict=True))


# -- retention ---------------------------------------------------------------------------------

RETENTION = {
    "log.retention.check-interval": "50ms",
    "log.retention.roll-active-segment.enabled": "true",
    "kv.snapshot.interval": "100ms",  # a changelog stays from its oldest snapshot on
    "kv.snapshot.num-retained": "1",
}


def wait_for(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < deadline, "it did not come to that"
        time.sleep(0.02)


@pytest.mark.parametrize("key", ["", ", PRIMARY KEY (id)"], ids=["log", "primary key"])
def test_rows_that_left_the_log_are_read_from_the_lake(tmp_path, key):
    write = upsert if key else append
    with (
        WarmServer(tmp_path, {**ICEBERG, **RETENTION}) as server,
        zufluss.connect(server.bootstrap) as conn,
        lake_table(conn, "id INT, n INT" + key, properties={"table.log.ttl": "1ms"}) as table,
    ):
        write(table, id=[1, 2], n=[1, 2])
        Rounds(conn, server.bootstrap).tier(table)
        wait_for(lambda: conn.admin.list_offsets(table.path, "earliest") == {0: 2})
        assert ids(table) == [1, 2]
        write(table, id=[3], n=[3])
        assert ids(table) == [1, 2, 3]


def test_rows_in_neither_lake_nor_log_are_an_error(tmp_path):
    with (
        WarmServer(tmp_path, {**ICEBERG, **RETENTION}) as server,
        zufluss.connect(server.bootstrap) as conn,
        lake_table(conn, "id INT", properties={"table.log.ttl": "1ms"}) as table,
    ):
        append(table, id=[1, 2])
        Rounds(conn, server.bootstrap).tier(table)
        conn.admin.alter_table(table.path, set={"table.datalake.enabled": "false"})
        append(table, id=[3, 4])
        wait_for(lambda: conn.admin.list_offsets(table.path, "earliest") == {0: 4})
        with pytest.raises(OffsetOutOfRangeError, match=r"begins at offset 4, the lake ends at 2"):
            read(table)
        assert ids(table, source="lake") == [1, 2]


def test_an_unreadable_snapshot_is_not_treated_as_missing(tmp_path):
    with (
        WarmServer(tmp_path, {**ICEBERG, **RETENTION}) as server,
        zufluss.connect(server.bootstrap) as conn,
        lake_table(conn, "id INT") as table,
    ):
        append(table, id=[1, 2])
        Rounds(conn, server.bootstrap, readable=False).tier(table)
        assert ids(table) == [1, 2]
        with pytest.raises(InvalidTableError, match="cannot be read yet"):
            read(table, source="lake")
        conn.admin.alter_table(table.path, set={"table.log.ttl": "1ms"})
        wait_for(lambda: conn.admin.list_offsets(table.path, "earliest") == {0: 2})
        with pytest.raises(OffsetOutOfRangeError, match="cannot be read yet"):
            read(table)


def test_a_bucket_of_a_primary_key_table_whose_changes_are_gone_is_an_error(conn):
    with lake_table(conn, "id INT, n INT, PRIMARY KEY (id)") as table:
        place = BucketPlace(TableBucket(table.info.table_id, None, 0), None)
        with pytest.raises(OffsetOutOfRangeError, match="changelog begins at offset 5"):
            tail_range(table.info, place, None, 5, 9)
        assert tail_range(table.info, place, 5, 5, 9).start == 5


def test_a_lake_that_is_ahead_of_the_log_fails_the_read_and_says_why(conn):
    with lake_table(conn, "id INT") as table:
        place = BucketPlace(TableBucket(table.info.table_id, None, 0), None)
        with pytest.raises(OffsetOutOfRangeError, match="up to offset 9, but the log ends at 8"):
            tail_range(table.info, place, 10, 0, 8)
        assert tail_range(table.info, place, 8, 0, 8).stop == 8


# -- beside writers and rounds -----------------------------------------------------------------


@pytest.mark.parametrize("key", ["", ", PRIMARY KEY (id)"], ids=["log", "primary key"])
def test_reads_beside_writers_and_rounds_have_the_rows_at_their_offsets(conn, rounds, key):
    with lake_table(conn, "id INT, n INT" + key, bucket_count=2) as table:
        ended = threading.Event()
        with ThreadPoolExecutor(2) as pool:
            writing = pool.submit(write_on, table, ended)
            tiering = pool.submit(tier_on, rounds, table, ended)
            try:
                for _ in range(12):
                    compare_at_offsets(table)
            finally:
                ended.set()
            assert writing.result() > 0
            assert tiering.result() > 0
        compare_at_offsets(table)


def write_on(table: Table, ended: threading.Event) -> int:
    rng = random.Random(5)
    for step in itertools.count(1):
        values = rng.sample(range(300), 40)
        if not table.info.has_primary_key:
            append(table, id=values, n=[step] * 40)
        elif step % 3:
            upsert(table, id=values, n=[step] * 40)
        else:
            delete(table, id=values)
        if ended.is_set():
            return step
    raise AssertionError


def tier_on(rounds: Rounds, table: Table, ended: threading.Event) -> int:
    for count in itertools.count(1):
        rounds.tier(table)
        if ended.is_set():
            return count
    raise AssertionError


def compare_at_offsets(table: Table) -> None:
    """A union read against the log alone, up to the offsets that the read was pinned to."""
    with table.scan(source="union").open() as scanner:
        assert isinstance(scanner, UnionScanner)
        found = [row for batch in scanner for row in batch.to_pylist()]
        stops = {part.bucket: part.stop for part in scanner.plan.tail}
    if table.info.has_primary_key:
        live: dict[int, dict[str, int]] = {}
        for change in table.changelog(stop=stops).to_arrow().to_pylist():
            live.pop(change["id"], None)
            if change["_change_type"] in ("+I", "+U"):
                live[change["id"]] = {"id": change["id"], "n": change["n"]}
        expected = list(live.values())
    else:
        expected = table.scan(stop=stops).to_arrow().to_pylist()
    assert sorted(found, key=repr) == sorted(expected, key=repr)


# -- the lake alone, and what is refused -------------------------------------------------------


def test_a_table_opened_as_lake_shows_tiered_rows_and_refuses_writes(conn, rounds):
    with lake_table(conn, "id INT, n INT, PRIMARY KEY (id)") as table:
        upsert(table, id=[1], n=[1])
        rounds.tier(table)
        upsert(table, id=[2], n=[2])
        lake = conn.table(f"{table.path}$lake")
        assert lake.scan().to_arrow().to_pylist() == [{"id": 1, "n": 1}]
        assert lake.head().to_pylist() == [{"id": 1, "n": 1}]
        assert "$lake" in repr(lake)
        refused: list[Callable[[], Any]] = [
            lake.upsert,
            lake.append,
            lake.changelog,
            lambda: lake.lookup(1),
            lambda: lake.scan(source="log"),
            lambda: lake.scan(source="union"),
        ]
        for call in refused:
            with pytest.raises(InvalidTableError, match="can only be scanned"):
                call()


def test_impossible_union_scans_are_refused_when_they_are_created(conn):
    with lake_table(conn, "id INT, n INT, PRIMARY KEY (id)") as table:
        with pytest.raises(InvalidTableError, match=r"changelog\(stop=None\)"):
            table.scan(source="union", stop=None)
        with pytest.raises(ValueError, match="reads everything"):
            table.scan(source="union", start="latest")
        with pytest.raises(ValueError, match="only a log can be followed"):
            table.scan(source="lake", stop=None)
        with pytest.raises(ValueError, match="none of live, snapshot, log, union, lake"):
            table.scan(source="delta")
        with pytest.raises(ValueError, match="limit is -"):
            table.scan(source="union", limit=-1)
        with pytest.raises(InvalidTableError, match="no bucket 7"):
            table.scan(source="union", buckets=[7])
        with pytest.raises(InvalidTableError, match="not partitioned"):
            table.scan(source="union", partitions=["p"])


def test_a_plan_has_the_lake_snapshot_and_the_tail_of_every_bucket(conn, rounds):
    with lake_table(conn, "id INT", bucket_count=2) as table:
        append(table, id=[1, 2, 3, 4])
        done = rounds.tier(table)
        append(table, id=[5])
        plan = conn.plan_union(str(table.path))
        assert plan.info == table.info
        assert plan.lake is not None
        assert plan.lake.snapshot_id == done.snapshot_id
        assert [part.bucket.bucket_id for part in plan.tail] == [0, 1]
        tiered = [plan.lake.offsets.get(part.bucket, 0) for part in plan.tail]
        assert [part.start for part in plan.tail] == tiered
        assert sum(tiered) == 4
        assert sum(part.stop - part.start for part in plan.tail) == 1
        assert conn.plan_union(table.path, read_optimized=True).tail == ()
        with table.scan(source="union").open() as scanner:
            assert isinstance(scanner, UnionScanner)
            assert scanner.plan == plan
