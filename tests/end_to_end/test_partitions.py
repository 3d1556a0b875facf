"""Partitioned tables through pyfluss: specs, writes, scans, drops, automatic partitions."""

from __future__ import annotations

import datetime as dt
from typing import Any
from zoneinfo import ZoneInfo

import fluss
import pyarrow as pa
import pytest

from tests.end_to_end.helpers import EARLIEST, append, create, in_time, poll_records, refused

Code = fluss.ErrorCode
ORDERS = pa.schema([("day", pa.string()), ("region", pa.string()), ("id", pa.int64())])


def orders(day: str, region: str, count: int, start: int = 0) -> pa.RecordBatch:
    numbers = range(start, start + count)
    return pa.record_batch([[day] * count, [region] * count, numbers], schema=ORDERS)


async def names(admin: fluss.FlussAdmin, path: fluss.TablePath, **spec: str) -> list[str]:
    partitions = await in_time(admin.list_partition_infos(path, spec or None))
    return sorted(p.partition_name for p in partitions)


async def partition_ids(admin: fluss.FlussAdmin, path: fluss.TablePath) -> dict[str, int]:
    partitions = await in_time(admin.list_partition_infos(path))
    return {p.partition_name: p.partition_id for p in partitions}


async def read_partitions(
    table: fluss.FlussTable, partitions: list[int], count: int
) -> list[dict[str, Any]]:
    scanner = await in_time(table.new_scan().create_log_scanner())
    buckets = range(table.get_table_info().num_buckets)
    scanner.subscribe_partition_buckets({(p, b): EARLIEST for p in partitions for b in buckets})
    return [dict(r.row) for r in await poll_records(scanner, count)]


async def test_partitions_are_named_by_their_values_in_key_order(
    conn: fluss.FlussConnection, admin: fluss.FlussAdmin, path: fluss.TablePath
) -> None:
    await create(conn, path, ORDERS, partition_keys=["day", "region"])
    assert await names(admin, path) == []
    await in_time(admin.create_partition(path, {"region": "eu", "day": "2026-01-01"}))
    await in_time(admin.create_partition(path, {"day": "2026-01-01", "region": "us"}))
    await in_time(admin.create_partition(path, {"day": "2026-01-02", "region": "us"}))
    assert await names(admin, path) == ["2026-01-01$eu", "2026-01-01$us", "2026-01-02$us"]
    assert await names(admin, path, region="us") == ["2026-01-01$us", "2026-01-02$us"]
    assert await names(admin, path, day="2026-01-01") == ["2026-01-01$eu", "2026-01-01$us"]
    assert await names(admin, path, day="2026-01-02", region="us") == ["2026-01-02$us"]
    assert await names(admin, path, day="1999-01-01") == []
    info = await in_time(admin.get_table_info(path))
    assert info.is_partitioned()
    assert info.get_partition_keys() == ["day", "region"]


async def test_a_partition_is_created_once_unless_ignored(
    conn: fluss.FlussConnection, admin: fluss.FlussAdmin, path: fluss.TablePath
) -> None:
    await create(conn, path, ORDERS, partition_keys=["day"])
    await in_time(admin.create_partition(path, {"day": "a"}))
    with refused(Code.PARTITION_ALREADY_EXISTS):
        await in_time(admin.create_partition(path, {"day": "a"}))
    before = await partition_ids(admin, path)
    await in_time(admin.create_partition(path, {"day": "a"}, ignore_if_exists=True))
    assert await partition_ids(admin, path) == before


async def test_a_dropped_partition_is_gone_and_its_id_is_not_used_again(
    conn: fluss.FlussConnection, admin: fluss.FlussAdmin, path: fluss.TablePath
) -> None:
    table = await create(conn, path, ORDERS, partition_keys=["day"])
    await in_time(admin.create_partition(path, {"day": "a"}))
    await append(table, orders("a", "eu", 5))
    first = (await partition_ids(admin, path))["a"]
    await in_time(admin.drop_partition(path, {"day": "a"}))
    assert await names(admin, path) == []
    with refused(Code.PARTITION_NOT_EXISTS):
        await in_time(admin.drop_partition(path, {"day": "a"}))
    await in_time(admin.drop_partition(path, {"day": "a"}, ignore_if_not_exists=True))
    await in_time(admin.create_partition(path, {"day": "a"}))
    second = (await partition_ids(admin, path))["a"]
    assert second > first
    ends = await in_time(admin.list_partition_offsets(path, "a", [0], fluss.OffsetSpec.latest()))
    assert ends == {0: 0}


BAD_SPECS: dict[str, dict[str, str]] = {
    "no value": {},
    "another key": {"month": "a"},
    "too many keys": {"day": "a", "region": "b"},
    "empty value": {"day": ""},
    "blank inside": {"day": "a b"},
    "separator inside": {"day": "a$b"},
    "dots": {"day": ".."},
    "reserved prefix": {"day": "__a"},
    "too long": {"day": "x" * 201},
}


@pytest.mark.parametrize("case", BAD_SPECS)
async def test_a_bad_partition_spec_is_refused(
    conn: fluss.FlussConnection, admin: fluss.FlussAdmin, path: fluss.TablePath, case: str
) -> None:
    await create(conn, path, ORDERS, partition_keys=["day"])
    with refused(Code.PARTITION_SPEC_INVALID_EXCEPTION):
        await in_time(admin.create_partition(path, BAD_SPECS[case]))
    assert await names(admin, path) == []


async def test_a_filter_by_an_unknown_key_is_refused(
    conn: fluss.FlussConnection, admin: fluss.FlussAdmin, path: fluss.TablePath
) -> None:
    await create(conn, path, ORDERS, partition_keys=["day"])
    with refused(Code.PARTITION_SPEC_INVALID_EXCEPTION):
        await names(admin, path, month="1")


async def test_partition_calls_on_a_plain_table_are_refused(
    conn: fluss.FlussConnection, admin: fluss.FlussAdmin, path: fluss.TablePath
) -> None:
    await create(conn, path)
    with refused(Code.TABLE_NOT_PARTITIONED_EXCEPTION):
        await in_time(admin.create_partition(path, {"day": "a"}))
    with refused(Code.TABLE_NOT_PARTITIONED_EXCEPTION):
        await in_time(admin.drop_partition(path, {"day": "a"}))
    with refused(Code.TABLE_NOT_PARTITIONED_EXCEPTION):
        await in_time(admin.list_partition_infos(path))


async def test_partition_calls_on_a_missing_table_are_refused(
    admin: fluss.FlussAdmin, path: fluss.TablePath
) -> None:
    with refused(Code.TABLE_NOT_EXIST):
        await in_time(admin.create_partition(path, {"day": "a"}))
    with refused(Code.TABLE_NOT_EXIST):
        await in_time(admin.drop_partition(path, {"day": "a"}))
    with refused(Code.TABLE_NOT_EXIST):
        await in_time(admin.list_partition_infos(path))


async def test_rows_go_to_their_partition_and_are_read_from_it(
    conn: fluss.FlussConnection, admin: fluss.FlussAdmin, path: fluss.TablePath
) -> None:
    table = await create(conn, path, ORDERS, partition_keys=["day", "region"], bucket_count=2)
    for region in ("eu", "us"):
        await in_time(admin.create_partition(path, {"day": "d1", "region": region}))
    await append(table, orders("d1", "eu", 20), orders("d1", "us", 30, 100))
    writer = table.new_append().create_writer()
    writer.append(["d1", "eu", 20])
    writer.append({"day": "d1", "region": "us", "id": 130})
    await in_time(writer.flush())
    by_name = await partition_ids(admin, path)
    eu = await read_partitions(table, [by_name["d1$eu"]], 21)
    assert sorted(r["id"] for r in eu) == list(range(21))
    assert {r["region"] for r in eu} == {"eu"}
    both = await read_partitions(table, list(by_name.values()), 52)
    assert sorted(r["id"] for r in both) == [*range(21), *range(100, 131)]


async def test_a_partition_is_read_as_arrow_and_by_limit(
    conn: fluss.FlussConnection, admin: fluss.FlussAdmin, path: fluss.TablePath
) -> None:
    table = await create(conn, path, ORDERS, partition_keys=["day"])
    await in_time(admin.create_partition(path, {"day": "a"}))
    await append(table, orders("a", "eu", 10), orders("a", "us", 10, 10))
    partition = (await partition_ids(admin, path))["a"]
    scanner = await in_time(
        table.new_scan().project_by_name(["id"]).create_record_batch_log_scanner()
    )
    scanner.subscribe_partition(partition, 0, 5)
    assert (await in_time(scanner.to_arrow())).column("id").to_pylist() == list(range(5, 20))
    bucket = fluss.TableBucket.with_partition(table.get_table_info().table_id, partition, 0)
    limited = table.new_scan().limit(3).create_bucket_batch_scanner(bucket)
    assert (await in_time(limited.to_arrow())).column("id").to_pylist() == [17, 18, 19]


async def test_a_write_to_a_missing_partition_waits_until_somebody_creates_it(
    conn: fluss.FlussConnection, admin: fluss.FlussAdmin, path: fluss.TablePath
) -> None:
    """pyfluss asks again and again without a pause; the server slows it down and lives."""
    table = await create(conn, path, ORDERS, partition_keys=["day"])
    writer = table.new_append().create_writer()
    handle = writer.write_arrow_batch(orders("late", "eu", 3))
    assert await names(admin, path) == []
    await in_time(admin.create_partition(path, {"day": "late"}))
    await in_time(writer.flush())
    await in_time(handle.wait())
    partition = (await partition_ids(admin, path))["late"]
    assert len(await read_partitions(table, [partition], 3)) == 3


async def test_a_dropped_partition_does_not_disturb_a_scan_of_the_others(
    conn: fluss.FlussConnection, admin: fluss.FlussAdmin, path: fluss.TablePath
) -> None:
    table = await create(conn, path, ORDERS, partition_keys=["day"])
    for day in ("a", "b"):
        await in_time(admin.create_partition(path, {"day": day}))
    await append(table, orders("a", "eu", 5), orders("b", "eu", 5))
    by_name = await partition_ids(admin, path)
    scanner = await in_time(table.new_scan().create_log_scanner())
    scanner.subscribe_partition_buckets({(p, 0): EARLIEST for p in by_name.values()})
    await poll_records(scanner, 10)
    await in_time(admin.drop_partition(path, {"day": "a"}))
    scanner.unsubscribe_partition(by_name["a"], 0)
    await append(table, orders("b", "eu", 5, 5))
    assert [r.row["id"] for r in await poll_records(scanner, 5)] == list(range(5, 10))


PARTITION_VALUES: list[tuple[pa.DataType, Any, str]] = [
    (pa.string(), "eu-west_1", "eu-west_1"),
    (pa.int32(), -7, "-7"),
    (pa.int64(), 2**62, str(2**62)),
    (pa.bool_(), True, "true"),
    (pa.date32(), dt.date(2026, 2, 28), "2026-02-28"),
    (pa.binary(), b"\x01\xab", "01ab"),
    (pa.time32("s"), dt.time(23, 59, 1), "23-59-01_000"),
    (pa.timestamp("ms"), dt.datetime(2026, 1, 2, 3, 4, 5, 6000), "2026-01-02-03-04-05_006"),
    (pa.float32(), 1.5, "1_5"),
]


@pytest.mark.parametrize(("kind", "value", "text"), PARTITION_VALUES, ids=lambda v: str(v)[:20])
async def test_a_partition_key_of_any_scalar_type_takes_rows(
    conn: fluss.FlussConnection,
    admin: fluss.FlussAdmin,
    path: fluss.TablePath,
    kind: pa.DataType,
    value: Any,
    text: str,
) -> None:
    schema = pa.schema([("p", kind), ("id", pa.int64())])
    table = await create(conn, path, schema, partition_keys=["p"])
    await in_time(admin.create_partition(path, {"p": text}))
    await append(table, pa.record_batch([pa.array([value, value], kind), [1, 2]], schema=schema))
    partition = (await partition_ids(admin, path))[text]
    rows = await read_partitions(table, [partition], 2)
    assert rows == [{"p": value, "id": 1}, {"p": value, "id": 2}]


UNITS = {
    "HOUR": ("%Y%m%d%H", dt.timedelta(hours=1)),
    "DAY": ("%Y%m%d", dt.timedelta(days=1)),
    "YEAR": ("%Y", dt.timedelta(days=366)),
}


@pytest.mark.parametrize("unit", UNITS)
async def test_automatic_partitions_are_there_when_the_table_is(
    conn: fluss.FlussConnection, admin: fluss.FlussAdmin, path: fluss.TablePath, unit: str
) -> None:
    text, step = UNITS[unit]
    before = dt.datetime.now(ZoneInfo("Asia/Tokyo"))
    await create(
        conn,
        path,
        ORDERS,
        partition_keys=["day"],
        properties={
            "table.auto-partition.enabled": "true",
            "table.auto-partition.time-unit": unit,
            "table.auto-partition.time-zone": "Asia/Tokyo",
            "table.auto-partition.num-precreate": "2",
        },
    )
    after = dt.datetime.now(ZoneInfo("Asia/Tokyo"))
    expected = [[at.strftime(text), (at + step).strftime(text)] for at in (before, after)]
    assert await names(admin, path) in expected


async def test_rows_go_to_an_automatic_partition(
    conn: fluss.FlussConnection, admin: fluss.FlussAdmin, path: fluss.TablePath
) -> None:
    table = await create(
        conn,
        path,
        ORDERS,
        partition_keys=["day"],
        properties={
            "table.auto-partition.enabled": "true",
            "table.auto-partition.time-unit": "YEAR",
            "table.auto-partition.time-zone": "UTC",
            "table.auto-partition.num-precreate": "3",
        },
    )
    by_name = await partition_ids(admin, path)
    last = max(by_name)
    await append(table, orders(last, "eu", 4))
    rows = await read_partitions(table, [by_name[last]], 4)
    assert [r["id"] for r in rows] == [0, 1, 2, 3]


async def test_a_partition_older_than_the_retention_cannot_be_made(
    conn: fluss.FlussConnection, admin: fluss.FlussAdmin, path: fluss.TablePath
) -> None:
    await create(
        conn,
        path,
        ORDERS,
        partition_keys=["day"],
        properties={
            "table.auto-partition.enabled": "true",
            "table.auto-partition.time-unit": "YEAR",
            "table.auto-partition.num-retention": "2",
        },
    )
    with refused(Code.PARTITION_SPEC_INVALID_EXCEPTION):
        await in_time(admin.create_partition(path, {"day": "1990"}))
