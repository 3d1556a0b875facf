"""Partitioned primary-key tables through pyfluss."""

from __future__ import annotations

from typing import Any

import fluss
import pyarrow as pa
import pytest

from tests.end_to_end.helpers import connected, in_time, poll_records
from tests.end_to_end.kv import create_keyed, delete, described, lookup, lookups, upsert
from zufluss.testing.server import DevServer

DAILY = pa.schema([("day", pa.string()), ("id", pa.int64()), ("v", pa.string())])
DAYS = ("mon", "tue")


@pytest.fixture
async def table(conn: fluss.FlussConnection, path: fluss.TablePath) -> fluss.FlussTable:
    table = await create_keyed(conn, path, DAILY, ["day", "id"], partition_keys=["day"])
    for day in DAYS:
        await in_time(conn.get_admin().create_partition(path, {"day": day}))
    return table


def row(day: str, key: int, v: Any) -> dict[str, Any]:
    return {"day": day, "id": key, "v": v}


async def partition_ids(conn: fluss.FlussConnection, path: fluss.TablePath) -> dict[str, int]:
    infos = await in_time(conn.get_admin().list_partition_infos(path))
    return {info.partition_name: info.partition_id for info in infos}


async def test_the_same_key_is_another_row_in_another_partition(table: fluss.FlussTable) -> None:
    await upsert(table, *([day, key, f"{day}{key}"] for day in DAYS for key in range(5)))
    for day in DAYS:
        assert await lookups(table, [[day, key] for key in range(6)]) == [
            *(row(day, key, f"{day}{key}") for key in range(5)),
            None,
        ]


async def test_updates_and_deletes_stay_in_their_partition(table: fluss.FlussTable) -> None:
    await upsert(table, *([day, 1, day] for day in DAYS))
    await upsert(table, ["mon", 1, "new"])
    await delete(table, {"day": "tue", "id": 1})
    assert await lookup(table, {"day": "mon", "id": 1}) == row("mon", 1, "new")
    assert await lookup(table, ["tue", 1]) is None


async def test_each_partition_has_a_changelog_of_its_own(
    conn: fluss.FlussConnection, table: fluss.FlussTable, path: fluss.TablePath
) -> None:
    await upsert(table, ["mon", 1, "a"], ["tue", 1, "b"])
    await upsert(table, ["mon", 1, "c"])
    await delete(table, ["tue", 1])
    expected = {
        "mon": [(0, "+I", "a"), (1, "-U", "a"), (2, "+U", "c")],
        "tue": [(0, "+I", "b"), (1, "-D", "b")],
    }
    for day, partition_id in (await partition_ids(conn, path)).items():
        scanner = await in_time(table.new_scan().create_log_scanner())
        scanner.subscribe_partition(partition_id, 0, fluss.EARLIEST_OFFSET)
        records = [described(r) for r in await poll_records(scanner, len(expected[day]))]
        assert [(offset, kind, r["v"]) for offset, kind, r in records] == expected[day]
        assert {r["day"] for _, _, r in records} == {day}


async def test_a_limit_scan_reads_one_partition(
    conn: fluss.FlussConnection, table: fluss.FlussTable, path: fluss.TablePath
) -> None:
    await upsert(table, *([day, key, day] for day in DAYS for key in range(5)))
    ids = await partition_ids(conn, path)
    for day in DAYS:
        bucket = fluss.TableBucket.with_partition(table.get_table_info().table_id, ids[day], 0)
        scanner = table.new_scan().limit(3).create_bucket_batch_scanner(bucket)
        assert (await in_time(scanner.to_arrow())).to_pylist() == [
            row(day, k, day) for k in range(3)
        ]


async def test_a_partition_that_comes_again_is_empty(
    dev_server: DevServer,
    conn: fluss.FlussConnection,
    table: fluss.FlussTable,
    path: fluss.TablePath,
) -> None:
    """A connection keeps the ids of partitions, so the second half has one of its own."""
    await upsert(table, ["mon", 1, "old"], ["tue", 1, "stays"])
    await in_time(conn.get_admin().drop_partition(path, {"day": "mon"}))
    await in_time(conn.get_admin().create_partition(path, {"day": "mon"}))
    async with connected(dev_server.bootstrap) as other:
        again = await in_time(other.get_table(path))
        assert await lookup(again, ["tue", 1]) == row("tue", 1, "stays")
        await upsert(again, ["mon", 2, "new"])
        assert await lookups(again, [["mon", 1], ["mon", 2]]) == [None, row("mon", 2, "new")]


async def test_a_lookup_in_a_partition_that_does_not_exist_finds_nothing(
    table: fluss.FlussTable,
) -> None:
    assert await lookup(table, ["sun", 1]) is None


async def test_a_partition_key_that_is_the_last_key_column_works_as_well(
    conn: fluss.FlussConnection, path: fluss.TablePath
) -> None:
    schema = pa.schema([("v", pa.string()), ("id", pa.int64()), ("region", pa.int32())])
    table = await create_keyed(
        conn, path, schema, ["id", "region"], partition_keys=["region"], bucket_count=2
    )
    await in_time(conn.get_admin().create_partition(path, {"region": "7"}))
    await upsert(table, *([f"v{i}", i, 7] for i in range(10)))
    expected = [{"v": f"v{i}", "id": i, "region": 7} for i in range(10)]
    assert await lookups(table, [{"id": i, "region": 7} for i in range(10)]) == expected
