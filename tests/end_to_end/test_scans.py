"""Every way pyfluss reads a log table: records, Arrow, bounded, from anywhere, some columns."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Sequence

import fluss
import pyarrow as pa
import pytest

from tests.end_to_end.helpers import (
    EARLIEST,
    IDS,
    append,
    arrow_scanner,
    connected,
    create,
    end_offsets,
    fresh_path,
    ids,
    in_time,
    poll_batches,
    poll_records,
    read_arrow,
    read_records,
    record_scanner,
)
from zufluss.testing.server import DevServer

WIDE = pa.schema(
    [("a", pa.int32()), ("b", pa.string()), ("c", pa.list_(pa.int64())), ("d", pa.float64())]
)


def wide(rows: int) -> pa.RecordBatch:
    return pa.RecordBatch.from_pylist(
        [
            {"a": i, "b": None if i % 5 == 0 else f"b{i}", "c": [i, None], "d": i / 2}
            for i in range(rows)
        ],
        schema=WIDE,
    )


async def test_records_carry_offsets_timestamps_and_values(
    conn: fluss.FlussConnection, path: fluss.TablePath
) -> None:
    table = await create(conn, path)
    await append(table, ids(0, 5), ids(5, 8))
    records = await read_records(table, 8)
    assert [r.offset for r in records] == list(range(8))
    assert [r.row["id"] for r in records] == list(range(8))
    times = [r.timestamp for r in records]
    assert times == sorted(times)
    assert min(times) > 1_600_000_000_000
    assert len(set(times[:5])) == 1, "one batch has one commit time"


async def test_records_are_grouped_by_bucket(
    conn: fluss.FlussConnection, path: fluss.TablePath
) -> None:
    table = await create(conn, path, bucket_count=4, bucket_keys=["id"])
    await append(table, ids(0, 200))
    scanner = await record_scanner(table)
    seen: dict[int, list[int]] = {}
    while sum(map(len, seen.values())) < 200:
        found = await in_time(scanner.poll(500))
        assert found.count() == len(found) == len(list(found))
        for bucket, records in found.items():
            assert bucket in found
            assert bucket.table_id == table.get_table_info().table_id
            seen.setdefault(bucket.bucket_id, []).extend(r.row["id"] for r in records)
    assert sorted(seen) == [0, 1, 2, 3]
    assert all(numbers == sorted(numbers) for numbers in seen.values())
    assert sorted(itertools.chain(*seen.values())) == list(range(200))


async def test_arrow_batches_carry_their_offsets(
    conn: fluss.FlussConnection, path: fluss.TablePath
) -> None:
    table = await create(conn, path)
    await append(table, ids(0, 10), ids(10, 15), ids(15, 16))
    batches = await poll_batches(await arrow_scanner(table), 16)
    assert [(b.base_offset, b.last_offset) for b in batches] == [(0, 9), (10, 14), (15, 15)]
    assert [b.batch.num_rows for b in batches] == [10, 5, 1]
    assert {b.bucket.bucket_id for b in batches} == {0}
    assert batches[1].batch.column(0).to_pylist() == list(range(10, 15))


async def test_poll_arrow_gives_tables_with_the_schema_even_when_there_is_nothing(
    conn: fluss.FlussConnection, path: fluss.TablePath
) -> None:
    table = await create(conn, path)
    scanner = await arrow_scanner(table)
    empty = await in_time(scanner.poll_arrow(50))
    assert (empty.num_rows, empty.schema) == (0, IDS)
    await append(table, ids(0, 4))
    got = empty
    while got.num_rows == 0:
        got = await in_time(scanner.poll_arrow(500))
    assert got.equals(pa.Table.from_batches([ids(0, 4)]))


async def test_an_arrow_reader_streams_to_the_end_of_now(
    conn: fluss.FlussConnection, path: fluss.TablePath
) -> None:
    table = await create(conn, path, bucket_count=3)
    await append(table, ids(0, 100), ids(100, 150))
    reader = (await arrow_scanner(table)).to_arrow_batch_reader()
    assert reader.schema == IDS
    assert sorted(reader.read_all().column("id").to_pylist()) == list(range(150))


async def test_a_scanner_is_an_async_iterator(
    conn: fluss.FlussConnection, path: fluss.TablePath
) -> None:
    table = await create(conn, path)
    await append(table, ids(0, 3))
    found = []
    async for record in await record_scanner(table):
        found.append(record.row["id"])
        if len(found) == 3:
            break
    assert found == [0, 1, 2]


async def test_a_follower_sees_rows_as_they_are_appended(
    conn: fluss.FlussConnection, path: fluss.TablePath
) -> None:
    table = await create(conn, path)
    scanner = await record_scanner(table)
    for i in range(5):
        await append(table, ids(i, i + 1))
        (record,) = await poll_records(scanner, 1)
        assert record.row["id"] == i


@pytest.mark.parametrize("start", [0, 1, 9, 10, 11, 24, 29])
async def test_a_scan_starts_at_its_offset_inside_or_between_batches(
    filled: fluss.FlussTable, start: int
) -> None:
    records = await read_records(filled, 30 - start, {0: start})
    assert [r.offset for r in records] == list(range(start, 30))
    assert [r.row["id"] for r in records] == list(range(start, 30))


@pytest.fixture(scope="module")
def filled(conn: fluss.FlussConnection) -> fluss.FlussTable:
    """Rows 0 to 30 in batches of ten, ten and ten."""

    async def fill() -> fluss.FlussTable:
        table = await create(conn, fresh_path("filled"))
        await append(table, ids(0, 10), ids(10, 20), ids(20, 30))
        return table

    return asyncio.run(fill())


async def test_a_scan_from_the_end_sees_only_what_comes_later(
    conn: fluss.FlussConnection, admin: fluss.FlussAdmin, path: fluss.TablePath
) -> None:
    table = await create(conn, path)
    await append(table, ids(0, 5))
    scanner = await record_scanner(table, await end_offsets(admin, path))
    await append(table, ids(5, 7))
    assert [r.row["id"] for r in await poll_records(scanner, 2)] == [5, 6]


@pytest.mark.parametrize("offset", [31, 10**15, -1, -3])
async def test_a_scan_outside_the_log_is_refused(filled: fluss.FlussTable, offset: int) -> None:
    scanner = await record_scanner(filled, {0: offset})
    with pytest.raises(fluss.FlussError, match="out of range"):
        await poll_records(scanner, 1)


async def test_only_the_subscribed_buckets_are_read(
    conn: fluss.FlussConnection, admin: fluss.FlussAdmin, path: fluss.TablePath
) -> None:
    table = await create(conn, path, bucket_count=4, bucket_keys=["id"])
    await append(table, ids(0, 100))
    ends = await end_offsets(admin, path, range(4))
    assert sum(ends.values()) == 100
    some = await read_arrow(table, {1: EARLIEST, 3: EARLIEST})
    assert some.num_rows == ends[1] + ends[3]


async def test_an_unsubscribed_bucket_is_no_longer_read(
    conn: fluss.FlussConnection, admin: fluss.FlussAdmin, path: fluss.TablePath
) -> None:
    table = await create(conn, path, bucket_count=2, bucket_keys=["id"])
    await append(table, ids(0, 50))
    scanner = await record_scanner(table)
    await poll_records(scanner, 50)
    scanner.unsubscribe(0)
    before = await end_offsets(admin, path, [1])
    await append(table, ids(50, 150))
    after = await end_offsets(admin, path, [1])
    expected = await read_arrow(table, before)
    records = await poll_records(scanner, after[1] - before[1])
    assert [r.row["id"] for r in records] == expected.column("id").to_pylist()


PROJECTIONS: list[Sequence[int | str]] = [
    [0],
    [1],
    [2],
    [3],
    [0, 3],
    [3, 0],
    [2, 1],
    ["a"],
    ["c", "b"],
    ["d", "c", "b", "a"],
]


@pytest.mark.parametrize("columns", PROJECTIONS, ids=str)
async def test_a_projection_returns_the_columns_in_the_order_asked(
    projected: fluss.FlussTable, columns: Sequence[int | str]
) -> None:
    names = [WIDE.names[c] if isinstance(c, int) else c for c in columns]
    expected = pa.Table.from_batches([wide(40)]).select(names)
    assert (await read_arrow(projected, columns=columns)).equals(expected)
    records = await poll_records(await record_scanner(projected, columns=columns), 40)
    assert [r.row for r in records] == expected.to_pylist()


@pytest.fixture(scope="module")
def projected(conn: fluss.FlussConnection) -> fluss.FlussTable:
    """Forty rows of four columns in one batch."""

    async def fill() -> fluss.FlussTable:
        table = await create(conn, fresh_path("projected"), WIDE)
        await append(table, wide(40))
        return table

    return asyncio.run(fill())


@pytest.mark.parametrize("columns", [[4], [0, 9], ["nope"]], ids=str)
async def test_a_projection_of_a_missing_column_is_refused(
    projected: fluss.FlussTable, columns: Sequence[int | str]
) -> None:
    with pytest.raises((fluss.FlussError, ValueError)):
        await read_arrow(projected, columns=columns)


@pytest.mark.parametrize(("limit", "expected"), [(1, 1), (9, 9), (10, 10), (25, 25), (1000, 30)])
async def test_a_limit_scan_returns_the_newest_rows(
    filled: fluss.FlussTable, limit: int, expected: int
) -> None:
    bucket = fluss.TableBucket(filled.get_table_info().table_id, 0)
    scanner = filled.new_scan().limit(limit).create_bucket_batch_scanner(bucket)
    got = await in_time(scanner.to_arrow())
    assert got.column("id").to_pylist() == list(range(30 - expected, 30))
    assert await scanner.next_batch() is None


async def test_a_limit_scan_projects(projected: fluss.FlussTable) -> None:
    bucket = fluss.TableBucket(projected.get_table_info().table_id, 0)
    scan = projected.new_scan().project_by_name(["d", "a"]).limit(3)
    got = await in_time(scan.create_bucket_batch_scanner(bucket).to_arrow())
    assert got.to_pylist() == [{"d": i / 2, "a": i} for i in (37, 38, 39)]


async def test_a_limit_scan_of_an_empty_table_is_empty(
    conn: fluss.FlussConnection, path: fluss.TablePath
) -> None:
    table = await create(conn, path)
    bucket = fluss.TableBucket(table.get_table_info().table_id, 0)
    scanner = table.new_scan().limit(5).create_bucket_batch_scanner(bucket)
    assert (await in_time(scanner.to_arrow())).num_rows == 0


async def test_an_empty_table_reads_as_empty(
    conn: fluss.FlussConnection, path: fluss.TablePath
) -> None:
    table = await create(conn, path, bucket_count=3)
    got = await read_arrow(table)
    assert (got.num_rows, got.schema) == (0, IDS)


async def test_a_scan_of_many_batches_returns_all_of_them_in_order(
    conn: fluss.FlussConnection, path: fluss.TablePath
) -> None:
    table = await create(conn, path)
    writer = table.new_append().create_writer()
    for i in range(300):
        writer.write_arrow_batch(ids(i * 100, i * 100 + 100))
    await in_time(writer.flush())
    assert (await read_arrow(table)).column("id").to_pylist() == list(range(30_000))
    records = await read_records(table, 30_000)
    assert [r.offset for r in records] == list(range(30_000))


async def test_batches_of_megabytes_pass_the_clients_fetch_limits(
    conn: fluss.FlussConnection, path: fluss.TablePath, dev_server: DevServer
) -> None:
    """One bucket's limit is 1 MiB, the batches are larger: each still comes, one at a time."""
    properties = {"table.log.arrow.compression.type": "NONE"}
    schema = pa.schema([("id", pa.int64()), ("blob", pa.binary())])
    table = await create(conn, path, schema, properties=properties, bucket_count=2)
    batches = [
        pa.record_batch([pa.array([i]), pa.array([bytes([i]) * (3 << 20)])], schema=schema)
        for i in range(6)
    ]
    async with connected(dev_server.bootstrap, writer_bucket_no_key_assigner="round_robin") as own:
        await append(await in_time(own.get_table(path)), *batches)
    got = (await read_arrow(table)).sort_by("id")
    assert got.equals(pa.Table.from_batches(batches))


async def test_small_fetch_limits_still_return_everything(
    filled: fluss.FlussTable, dev_server: DevServer
) -> None:
    limits = {
        "scanner_log_fetch_max_bytes": 1,
        "scanner_log_fetch_max_bytes_for_bucket": 1,
        "scanner_log_max_poll_records": 1,
    }
    async with connected(dev_server.bootstrap, **limits) as own:
        table = await in_time(own.get_table(filled.get_table_path()))
        records = await read_records(table, 30)
    assert [r.row["id"] for r in records] == list(range(30))


@pytest.mark.parametrize("acks", ["all", "1", "0"])
async def test_rows_are_stored_with_every_kind_of_acknowledgement(
    conn: fluss.FlussConnection, path: fluss.TablePath, dev_server: DevServer, acks: str
) -> None:
    await create(conn, path)
    idempotence = acks == "all"
    async with connected(
        dev_server.bootstrap, writer_acks=acks, writer_enable_idempotence=idempotence
    ) as own:
        table = await in_time(own.get_table(path))
        await append(table, ids(0, 10), ids(10, 20))
        records = await read_records(table, 20)
    assert [r.row["id"] for r in records] == list(range(20))
