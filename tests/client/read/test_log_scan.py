"""Log scans against a cluster that fails, cuts and prunes on demand."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from tests.client.fake import FakeCluster
from zufluss.client.connection import AsyncConnection
from zufluss.client.read.decode import FetchedChunk, LogDecoder
from zufluss.client.write.encode import BatchEncoder
from zufluss.errors import (
    CorruptRecordError,
    ErrorCode,
    InvalidColumnProjectionError,
    InvalidTableError,
    LogStorageError,
    OffsetOutOfRangeError,
    PartitionNotExistError,
    SchemaNotExistError,
    ZuflussError,
)
from zufluss.model.ddl import parse_type
from zufluss.model.expression import col
from zufluss.model.table import TableBucket, TableInfo
from zufluss.record.header import iter_headers
from zufluss.wire import messages as m
from zufluss.wire.api import ApiKey


def fill(
    cluster: FakeCluster,
    info: TableInfo,
    ids: list[int],
    bucket: int = 0,
    partition_id: int | None = None,
) -> None:
    """Append one batch with these ids."""
    rows = [{"id": i, "name": f"n{i}"} for i in ids]
    batch = pa.RecordBatch.from_pylist(rows, schema=info.schema.arrow)
    view = BatchEncoder(info).encode([batch], -1, -1).view
    cluster.log(TableBucket(info.table_id, partition_id, bucket)).append(bytes(view))


def ids(table: pa.Table | pa.RecordBatch | None) -> list[int]:
    assert table is not None
    return table["id"].to_pylist()


@pytest.fixture
def events(cluster: FakeCluster) -> TableInfo:
    info = cluster.create("t", "id BIGINT, name STRING", bucket_count=2)
    for start in range(0, 30, 10):
        fill(cluster, info, list(range(start, start + 10)))
        fill(cluster, info, list(range(100 + start, 110 + start)), bucket=1)
    return info


EVERYTHING = [*range(30), *range(100, 130)]


async def test_a_bounded_scan_reads_everything_there_was_when_it_began(
    cluster: FakeCluster, connection: AsyncConnection, events: TableInfo
) -> None:
    table = await connection.table("t")
    async with await table.scan().open() as scanner:
        fill(cluster, events, [999])
        found = [i async for batch in scanner for i in ids(batch)]
    assert sorted(found) == EVERYTHING
    assert scanner.finished


async def test_ranges_are_cut_exactly_within_batches(
    connection: AsyncConnection, events: TableInfo
) -> None:
    table = await connection.table("t")
    found = await table.scan(start={0: 7, 1: 25}, stop={0: 12, 1: 26}).to_arrow()
    assert sorted(ids(found)) == [7, 8, 9, 10, 11, 125]
    found = await table.scan(start={0: 29}).to_arrow()
    assert ids(found) == [29]
    assert ids(await table.scan(start="latest").to_arrow()) == []


async def test_columns_come_in_the_order_asked_for_and_metadata_on_demand(
    cluster: FakeCluster, connection: AsyncConnection, events: TableInfo
) -> None:
    table = await connection.table("t")
    found = await table.scan(["name", "id"], buckets=[1], with_offsets=True).to_arrow()
    assert found.column_names == ["name", "id", "__offset", "__timestamp", "__bucket"]
    assert found["__offset"].to_pylist() == list(range(30))
    assert found["name"][3].as_py() == "n103"
    assert set(found["__bucket"].to_pylist()) == {1}
    assert found["__timestamp"][0].as_py().year == 2023


async def test_a_filter_is_pushed_down_and_applied_exactly(
    cluster: FakeCluster, connection: AsyncConnection, events: TableInfo
) -> None:
    table = await connection.table("t")
    scan = table.scan(["id"], (col("name") == "n7") | (col("id") > 127))
    found = await scan.to_arrow()
    assert sorted(ids(found)) == [7, 128, 129]
    assert found.column_names == ["id"]
    asked = cluster.fetches[0].tables_req[0]
    assert asked.filter_predicate.compound.children
    assert asked.filter_schema_id == 1


async def test_a_limit_ends_the_scan_and_positions_stay_exact(
    connection: AsyncConnection, events: TableInfo
) -> None:
    table = await connection.table("t")
    seen: list[int] = []
    start: Any = "earliest"
    for _ in range(9):
        async with await table.scan(["id"], col("id") != 4, start=start, limit=7).open() as run:
            seen += [i async for batch in run for i in ids(batch)]
            start = run.positions()
    assert sorted(seen) == [i for i in EVERYTHING if i != 4]
    assert len(await table.scan(limit=0).to_arrow()) == 0


async def test_an_unbounded_scan_follows_and_can_be_resumed(
    cluster: FakeCluster, connection: AsyncConnection, events: TableInfo
) -> None:
    table = await connection.table("t")
    async with await table.scan(start="latest", stop=None).open() as scanner:
        assert await scanner.poll(30) is None
        assert not scanner.finished
        fill(cluster, events, [500, 501])
        assert ids(await scanner.poll(5_000)) == [500, 501]
        resume = scanner.positions()
    fill(cluster, events, [502])
    assert ids(await table.scan(start=resume).to_arrow()) == [502]


async def test_a_poll_that_times_out_loses_nothing(
    cluster: FakeCluster, connection: AsyncConnection, events: TableInfo
) -> None:
    table = await connection.table("t")
    found: list[int] = []
    async with await table.scan().open() as scanner:
        while not scanner.finished:
            batch = await scanner.poll(0)
            found += ids(batch) if batch else []
            await asyncio.sleep(0.001)
    assert sorted(found) == EVERYTHING


async def test_a_following_scan_without_end_is_not_collected(
    connection: AsyncConnection, events: TableInfo
) -> None:
    table = await connection.table("t")
    with pytest.raises(ValueError, match="never ends"):
        await table.scan(stop=None).to_arrow()
    assert len(await table.scan(stop=None, limit=5).to_arrow()) == 5


async def test_a_cut_batch_at_the_end_is_fetched_again(
    cluster: FakeCluster, connection: AsyncConnection, events: TableInfo
) -> None:
    batch_size = len(cluster.log(TableBucket(events.table_id, None, 0)).batches[0][1])
    cluster.cut_bytes = batch_size * 3 // 2
    options = replace(connection.options, fetch_bucket_bytes=10)
    connection.options = options
    table = await connection.table("t")
    assert sorted(ids(await table.scan().to_arrow())) == EVERYTHING
    assert cluster.received[ApiKey.FETCH_LOG] >= 3


async def test_a_first_batch_over_the_limit_is_asked_for_in_full(
    cluster: FakeCluster, connection: AsyncConnection, events: TableInfo
) -> None:
    cluster.cut_bytes = 20
    connection.options = replace(connection.options, fetch_bucket_bytes=20)
    table = await connection.table("t")
    assert sorted(ids(await table.scan().to_arrow())) == EVERYTHING


async def test_pruned_batches_move_the_position(
    cluster: FakeCluster, connection: AsyncConnection, events: TableInfo
) -> None:
    cluster.pruned[TableBucket(events.table_id, None, 0)] = 20
    cluster.pruned[TableBucket(events.table_id, None, 1)] = 30
    table = await connection.table("t")
    found = await table.scan(filter=col("id") >= 20, buckets=[0, 1]).to_arrow()
    assert sorted(ids(found)) == list(range(20, 30))


@pytest.mark.parametrize(
    "code",
    [
        ErrorCode.NOT_LEADER_OR_FOLLOWER,
        ErrorCode.UNKNOWN_TABLE_OR_BUCKET_EXCEPTION,
        ErrorCode.LEADER_NOT_AVAILABLE_EXCEPTION,
        ErrorCode.UNKNOWN_SERVER_ERROR,
        ErrorCode.STORAGE_EXCEPTION,
        ErrorCode.FENCED_LEADER_EPOCH_EXCEPTION,
    ],
)
async def test_a_bucket_error_that_passes_is_waited_for(
    cluster: FakeCluster, connection: AsyncConnection, events: TableInfo, code: ErrorCode
) -> None:
    failures = iter([code, code])
    cluster.fetch_fault = lambda bucket, _: next(failures, None) if bucket.bucket_id else None
    table = await connection.table("t")
    assert sorted(ids(await table.scan().to_arrow())) == EVERYTHING


async def test_a_bucket_error_that_stays_ends_the_scan_without_spinning(
    cluster: FakeCluster, connection: AsyncConnection, events: TableInfo
) -> None:
    cluster.fetch_fault = lambda *_: ErrorCode.LOG_STORAGE_EXCEPTION
    connection.options = replace(connection.options, request_timeout_ms=100)
    table = await connection.table("t")
    with pytest.raises(LogStorageError):
        await table.scan().to_arrow()
    assert cluster.received[ApiKey.FETCH_LOG] <= 16


async def test_a_lost_connection_is_opened_again(
    cluster: FakeCluster, connection: AsyncConnection, events: TableInfo
) -> None:
    table = await connection.table("t")
    async with await table.scan(stop=None).open() as scanner:
        found: list[int] = []
        while len(found) < len(EVERYTHING):
            found += ids(await scanner.poll(5_000))
        cluster.drop_connections()
        fill(cluster, events, [1000])
        assert ids(await scanner.poll(5_000)) == [1000]


async def test_a_server_with_nothing_new_is_not_asked_in_a_loop(
    cluster: FakeCluster, connection: AsyncConnection, events: TableInfo
) -> None:
    async def nothing(request: m.FetchLogRequest) -> m.FetchLogResponse:
        return m.FetchLogResponse()

    cluster.handlers[ApiKey.FETCH_LOG] = nothing
    table = await connection.table("t")
    async with await table.scan(stop=None).open() as scanner:
        assert await scanner.poll(300) is None
    assert cluster.received[ApiKey.FETCH_LOG] <= 10


async def test_an_offset_outside_the_log_is_a_clear_error(
    connection: AsyncConnection, events: TableInfo
) -> None:
    table = await connection.table("t")
    with pytest.raises(OffsetOutOfRangeError, match="offset 77 is outside the log"):
        await table.scan(start={0: 77}, stop=None, limit=1).to_arrow()


@pytest.mark.parametrize(
    ("code", "raised"),
    [
        (ErrorCode.AUTHORIZATION_EXCEPTION, ZuflussError),
        (ErrorCode.SCHEMA_NOT_EXIST, SchemaNotExistError),
    ],
)
async def test_other_errors_are_raised_at_once(
    cluster: FakeCluster,
    connection: AsyncConnection,
    events: TableInfo,
    code: ErrorCode,
    raised: type[Exception],
) -> None:
    cluster.fetch_fault = lambda *_: code
    table = await connection.table("t")
    with pytest.raises(raised):
        await table.scan().to_arrow()
    assert cluster.received[ApiKey.FETCH_LOG] == 1


async def test_a_damaged_batch_is_found_by_its_checksum(
    cluster: FakeCluster, connection: AsyncConnection, events: TableInfo
) -> None:
    log = cluster.log(TableBucket(events.table_id, None, 0))
    base, batch = log.batches[1]
    log.batches[1] = (base, batch[:-9] + bytes([batch[-9] ^ 1]) + batch[-8:])
    table = await connection.table("t")
    with pytest.raises(CorruptRecordError, match="offset 10 fails its checksum"):
        await table.scan().to_arrow()


def altered(cluster: FakeCluster, info: TableInfo) -> TableInfo:
    """The table with one more column, schema id 2."""
    schema = info.schema.add_column("extra", parse_type("INT"))
    changed = replace(info, schema_id=2, descriptor=replace(info.descriptor, schema=schema))
    cluster.tables[info.path].info = changed
    cluster.tables[info.path].schemas[2] = schema
    return changed


async def test_batches_of_older_and_newer_schemas_are_aligned_by_column_id(
    cluster: FakeCluster, connection: AsyncConnection, events: TableInfo
) -> None:
    before = await connection.table("t")
    changed = altered(cluster, events)
    fill(cluster, changed, [777])
    after = await connection.table("t")
    found = await after.scan().to_arrow()
    assert sorted(ids(found)) == [*EVERYTHING, 777]
    assert found["extra"].null_count == len(found)
    assert found.schema == changed.schema.arrow
    old = await before.scan(["name", "id"]).to_arrow()
    assert old.column_names == ["name", "id"]
    assert sorted(ids(old)) == [*EVERYTHING, 777]


async def test_a_refused_projection_of_a_new_column_is_done_by_the_client(
    cluster: FakeCluster, connection: AsyncConnection, events: TableInfo
) -> None:
    altered(cluster, events)
    handler = cluster.handlers[ApiKey.FETCH_LOG]

    async def refusing(request: m.FetchLogRequest) -> Any:
        if not request.tables_req[0].projection_pushdown_enabled:
            return await handler(request)
        response = m.FetchLogResponse()
        answer = response.tables_resp.add(table_id=events.table_id)
        for bucket in request.tables_req[0].buckets_req:
            answer.buckets_resp.add(
                bucket_id=bucket.bucket_id, error_code=ErrorCode.INVALID_COLUMN_PROJECTION
            )
        return response

    cluster.handlers[ApiKey.FETCH_LOG] = refusing
    table = await connection.table("t")
    found = await table.scan(["extra", "id"]).to_arrow()
    assert sorted(ids(found)) == EVERYTHING


async def test_partitions_can_be_chosen_and_new_ones_are_found_when_following(
    cluster: FakeCluster, connection: AsyncConnection
) -> None:
    info = cluster.create("p", "id BIGINT, name STRING", partition_keys=("name",))
    partitions = cluster.tables[info.path].partitions
    partitions.update({"a": 50, "b": 51})
    fill(cluster, info, [1], partition_id=50)
    fill(cluster, info, [2], partition_id=51)
    table = await connection.table("p")
    assert sorted(ids(await table.scan().to_arrow())) == [1, 2]
    assert ids(await table.scan(partitions=["b"]).to_arrow()) == [2]
    assert ids(await table.scan(partitions=[{"name": "a"}]).to_arrow()) == [1]
    with pytest.raises(PartitionNotExistError):
        await table.scan(partitions=["c"]).to_arrow()
    async with await table.scan(stop=None).open() as scanner:
        first = [ids(await scanner.poll(5_000)), ids(await scanner.poll(5_000))]
        assert sorted(first) == [[1], [2]]
        partitions["c"] = 52
        del partitions["a"]
        fill(cluster, info, [3], partition_id=52)
        await scanner.refresh_partitions()
        assert ids(await scanner.poll(5_000)) == [3]


async def test_a_partition_dropped_while_following_is_left_alone(
    cluster: FakeCluster, connection: AsyncConnection
) -> None:
    info = cluster.create("p", "id BIGINT, name STRING", partition_keys=("name",))
    partitions = cluster.tables[info.path].partitions
    partitions.update({"a": 50, "b": 51})
    table = await connection.table("p")
    async with await table.scan(stop=None).open() as scanner:
        del partitions["a"]
        cluster.fetch_fault = lambda bucket, _: (
            ErrorCode.UNKNOWN_TABLE_OR_BUCKET_EXCEPTION if bucket.partition_id == 50 else None
        )
        assert await scanner.poll(300) is None
        fill(cluster, info, [3], partition_id=51)
        assert ids(await scanner.poll(5_000)) == [3]


async def test_small_batches_are_joined_and_large_ones_handed_out_as_they_are(
    cluster: FakeCluster, connection: AsyncConnection
) -> None:
    info = cluster.create("t", "id BIGINT, name STRING")
    for i in range(200):
        fill(cluster, info, [i])
    table = await connection.table("t")
    batches = [batch async for batch in table.scan()]
    assert len(batches) == 1
    assert ids(batches[0]) == list(range(200))


@pytest.mark.parametrize("log_format", ["INDEXED", "COMPACTED"])
async def test_row_formats_are_read_without_pushing_the_projection(
    cluster: FakeCluster, connection: AsyncConnection, log_format: str
) -> None:
    properties = {"table.log.format": log_format}
    info = cluster.create("t", "id BIGINT, name STRING", properties=properties)
    fill(cluster, info, [1, 2, 3])
    table = await connection.table("t")
    found = await table.scan(["id"], col("name") != "n2").to_arrow()
    assert ids(found) == [1, 3]
    assert not cluster.fetches[0].tables_req[0].projection_pushdown_enabled


async def test_an_uncompressed_batch_lies_at_an_aligned_address(
    cluster: FakeCluster, connection: AsyncConnection
) -> None:
    properties = {"table.log.arrow.compression.type": "NONE"}
    info = cluster.create("t", "id BIGINT, name STRING", properties=properties)
    fill(cluster, info, list(range(9_000)))
    table = await connection.table("t")
    [batch] = [batch async for batch in table.scan()]
    assert all(b.address % 8 == 0 for c in batch.columns for b in c.buffers() if b)


async def test_the_rest_of_a_chunk_is_at_hand_without_waiting(
    cluster: FakeCluster, connection: AsyncConnection
) -> None:
    info = cluster.create("t", "id BIGINT, name STRING")
    for start in range(0, 30_000, 10_000):
        fill(cluster, info, list(range(start, start + 10_000)))
    table = await connection.table("t")
    bucket = TableBucket(info.table_id, None, 0)
    async with await table.scan(limit=25_000).open() as scanner:
        assert scanner.at_hand() is None
        found = [await scanner.next_batch(), scanner.at_hand()]
        assert scanner.positions() == {bucket: 20_000}
        found.append(scanner.at_hand())
        assert [i for batch in found for i in ids(batch)] == list(range(25_000))
        assert scanner.positions() == {bucket: 25_000}
        assert scanner.at_hand() is None
        assert scanner.finished
    async with await table.scan().open() as scanner:
        await scanner.next_batch()
    assert scanner.at_hand() is None


@pytest.mark.parametrize("statistics", [{}, {"table.statistics.columns": "id"}])
@pytest.mark.parametrize("compression", ["NONE", "ZSTD"])
def test_columns_lie_at_aligned_addresses_wherever_their_batches_were(
    cluster: FakeCluster, compression: str, statistics: dict[str, str]
) -> None:
    properties = {"table.log.arrow.compression.type": compression, **statistics}
    info = cluster.create("t", "id BIGINT, name STRING", properties=properties)
    noise = np.random.default_rng(0).integers(0, 2**63 - 1, 9_000)
    rows = pa.record_batch([noise, pa.array(map(str, noise))], schema=info.schema.arrow)
    batch = BatchEncoder(info).encode([rows], -1, -1).view
    for shift in range(8):
        memory = memoryview(bytes(shift) + bytes(batch) * 2)[shift:]
        chunk = FetchedChunk(
            TableBucket(info.table_id, None, 0), memory, list(iter_headers(memory)), 0, None, False
        )
        for found in LogDecoder(info, None, None).decode(chunk):
            assert found.rows.equals(rows)
            assert all(b.address % 8 == 0 for c in found.rows.columns for b in c.buffers() if b)


async def test_impossible_scans_are_refused_when_they_are_created(
    cluster: FakeCluster, connection: AsyncConnection, events: TableInfo
) -> None:
    cluster.create("k", "id BIGINT, PRIMARY KEY (id)")
    table = await connection.table("t")
    with pytest.raises(InvalidColumnProjectionError, match="name"):
        table.scan(["id", "nope"])
    with pytest.raises(InvalidColumnProjectionError):
        table.scan(["id", "id"])
    with pytest.raises(InvalidColumnProjectionError):
        table.scan([])
    with pytest.raises(InvalidTableError, match="no bucket 5"):
        await table.scan(buckets=[5]).to_arrow()
    with pytest.raises(InvalidTableError, match="not partitioned"):
        await table.scan(partitions=["x"]).to_arrow()
    with pytest.raises(ValueError, match="limit is -"):
        table.scan(limit=-1)
    with pytest.raises(InvalidTableError, match="primary key"):
        (await connection.table("k")).scan(source="log")


def test_a_decoder_reads_the_columns_of_its_filter_too(cluster: FakeCluster) -> None:
    info = cluster.create("t", "a INT, b INT, c INT")
    decoder = LogDecoder(info, ["c"], col("a") > 1)
    assert decoder.projection == [0, 2]
    assert decoder.schema.names == ["c"]
    assert not decoder.reads_all
