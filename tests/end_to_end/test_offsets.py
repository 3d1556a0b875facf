"""pyfluss's list_offsets: earliest, latest, by commit time; tables, buckets, partitions."""

from __future__ import annotations

import time

import fluss
import pyarrow as pa
import pytest

from tests.end_to_end.helpers import (
    append,
    create,
    end_offsets,
    ids,
    in_time,
    read_records,
    refused,
)
from tests.waiting import eventually_async

Code = fluss.ErrorCode
EARLIEST, LATEST = fluss.OffsetSpec.earliest(), fluss.OffsetSpec.latest()


async def test_an_empty_bucket_starts_and_ends_at_zero(
    conn: fluss.FlussConnection, admin: fluss.FlussAdmin, path: fluss.TablePath
) -> None:
    await create(conn, path, bucket_count=3)
    assert await admin.list_offsets(path, [0, 1, 2], EARLIEST) == {0: 0, 1: 0, 2: 0}
    assert await admin.list_offsets(path, [2, 0], LATEST) == {2: 0, 0: 0}


async def test_latest_counts_the_rows_of_each_bucket(
    conn: fluss.FlussConnection, admin: fluss.FlussAdmin, path: fluss.TablePath
) -> None:
    table = await create(conn, path, bucket_count=3, bucket_keys=["id"])
    await append(table, ids(0, 90))
    ends = await end_offsets(admin, path, range(3))
    assert sum(ends.values()) == 90
    assert min(ends.values()) > 0
    assert await admin.list_offsets(path, [0, 1, 2], EARLIEST) == {0: 0, 1: 0, 2: 0}


async def test_a_timestamp_finds_the_first_batch_committed_at_or_after_it(
    conn: fluss.FlussConnection, admin: fluss.FlussAdmin, path: fluss.TablePath
) -> None:
    table = await create(conn, path)
    await append(table, ids(0, 10))
    await _tick()
    await append(table, ids(10, 20))
    await _tick()
    await append(table, ids(20, 30))
    times = [r.timestamp for r in await read_records(table, 30)]
    first, second, third = times[0], times[10], times[20]

    async def at(timestamp: int) -> int:
        return (await admin.list_offsets(path, [0], fluss.OffsetSpec.timestamp(timestamp)))[0]

    assert await at(0) == 0
    assert await at(first) == 0
    assert await at(first + 1) == 10
    assert await at(second) == 10
    assert await at(second + 1) == 20
    assert await at(third) == 20


async def _tick() -> None:
    """Wait until the clock shows another millisecond."""
    now = int(time.time() * 1000)

    async def passed() -> bool:
        return int(time.time() * 1000) > now + 1

    await eventually_async(passed)


async def test_a_scan_starts_at_a_commit_time(
    conn: fluss.FlussConnection, admin: fluss.FlussAdmin, path: fluss.TablePath
) -> None:
    table = await create(conn, path)
    await append(table, ids(0, 10))
    await _tick()
    await append(table, ids(10, 20))
    second = (await read_records(table, 20))[10].timestamp
    start = await admin.list_offsets(path, [0], fluss.OffsetSpec.timestamp(second))
    assert [r.row["id"] for r in await read_records(table, 10, start)] == list(range(10, 20))


async def test_a_timestamp_after_the_last_batch_is_the_end(
    conn: fluss.FlussConnection, admin: fluss.FlussAdmin, path: fluss.TablePath
) -> None:
    table = await create(conn, path)
    await append(table, ids(0, 10))
    last = (await read_records(table, 10))[-1].timestamp
    await _tick()
    offset = await admin.list_offsets(path, [0], fluss.OffsetSpec.timestamp(last + 1))
    assert offset == {0: 10}


async def test_a_timestamp_in_the_future_is_refused(
    conn: fluss.FlussConnection, admin: fluss.FlussAdmin, path: fluss.TablePath
) -> None:
    await create(conn, path)
    future = fluss.OffsetSpec.timestamp(4_102_444_800_000)
    with refused(Code.INVALID_TIMESTAMP_EXCEPTION):
        await in_time(admin.list_offsets(path, [0], future))


@pytest.mark.parametrize("spec", [EARLIEST, LATEST], ids=["earliest", "latest"])
async def test_the_offsets_of_a_missing_table_are_refused(
    admin: fluss.FlussAdmin, path: fluss.TablePath, spec: fluss.OffsetSpec
) -> None:
    with refused(Code.TABLE_NOT_EXIST):
        await in_time(admin.list_offsets(path, [0], spec))


async def test_the_offsets_of_a_partition_are_its_own(
    conn: fluss.FlussConnection, admin: fluss.FlussAdmin, path: fluss.TablePath
) -> None:
    schema = pa.schema([("region", pa.string()), ("id", pa.int64())])
    table = await create(conn, path, schema, partition_keys=["region"], bucket_count=2)
    for region in ("eu", "us"):
        await in_time(admin.create_partition(path, {"region": region}))
    await append(table, pa.record_batch([["eu"] * 7, range(7)], schema=schema))
    ends = await in_time(admin.list_partition_offsets(path, "eu", [0, 1], LATEST))
    assert sum(ends.values()) == 7
    empty = await in_time(admin.list_partition_offsets(path, "us", [0, 1], LATEST))
    assert empty == {0: 0, 1: 0}
    first = await in_time(admin.list_partition_offsets(path, "eu", [0, 1], EARLIEST))
    assert first == {0: 0, 1: 0}
    with pytest.raises(fluss.FlussError):
        await in_time(admin.list_partition_offsets(path, "mars", [0], LATEST))
