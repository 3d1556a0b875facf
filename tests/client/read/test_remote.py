"""Scans of a log that lies in remote storage, in part or in whole."""

from __future__ import annotations

import asyncio
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.client.conftest import FAST
from tests.client.fake import FakeCluster
from tests.client.read.test_log_scan import fill, ids
from tests.client.remotes import RemoteBucket
from tests.paths import FIXTURES
from tests.waiting import WAIT_SECONDS
from zufluss.client.connection import AsyncConnection, connect_async
from zufluss.client.core.budget import MemoryBudget
from zufluss.client.read.log_scan import AsyncLogScanner
from zufluss.client.read.remote import AHEAD, PLANNED, BatchCutter, RemoteReader
from zufluss.errors import CorruptRecordError, ErrorCode, OffsetOutOfRangeError
from zufluss.model.expression import col
from zufluss.model.table import TableBucket, TableInfo, TablePath
from zufluss.record.header import build_batch, stamp
from zufluss.remote.objects import (
    LocationUnavailableError,
    ObjectCorruptError,
    ObjectMissingError,
    Objects,
)
from zufluss.remote.uri import LocationUri, parse_location
from zufluss.wire import messages as m
from zufluss.wire.api import ApiKey
from zufluss.wire.hot.fetch import read_fetch_response

ROWS = list(range(60))


def test_a_client_loads_what_reads_cloud_stores_only_when_it_meets_one() -> None:
    code = (
        "import sys, zufluss.client.sync.connection\n"
        "heavy = {'obstore', 'rocksdict', 'urllib.request', 'http.client', 'numba'}\n"
        "sys.exit(', '.join(heavy & sys.modules.keys()) or 0)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


async def rest(scanner: AsyncLogScanner) -> list[int]:
    """The ids of all remaining rows of a run."""
    found: list[int] = []
    while (batch := await scanner.next_batch()) is not None:
        found += ids(batch)
    return found


@pytest.fixture
def events(cluster: FakeCluster) -> TableInfo:
    info = cluster.create("t", "id BIGINT, name STRING")
    for start in range(0, 60, 10):
        fill(cluster, info, list(range(start, start + 10)))
    return info


@pytest.fixture
def location(tmp_path: Path) -> Path:
    return tmp_path / "remote"


@pytest.fixture
async def remote(cluster: FakeCluster, events: TableInfo, location: Path) -> RemoteBucket:
    """Four of the six batches, two in each segment."""
    found = RemoteBucket(Objects(parse_location(str(location), "test")))
    await found.upload(cluster.log(TableBucket(events.table_id, None, 0)), 2, leave=2)
    cluster.remote = lambda bucket, offset: found.info(offset)
    return found


async def test_a_scan_reads_remote_segments_and_goes_on_with_the_server(
    connection: AsyncConnection, cluster: FakeCluster, remote: RemoteBucket
) -> None:
    table = await connection.table("t")
    assert ids(await table.scan().to_arrow()) == ROWS
    assert remote.asked[:2] == [0, 40]
    assert all(fetch.any_location for fetch in cluster.fetches)
    assert cluster.token_requests[0].tables[0].table_name == "t"
    assert len(cluster.token_requests) == 1


async def test_each_answer_may_name_another_location(
    connection: AsyncConnection, remote: RemoteBucket
) -> None:
    remote.at_once = 1
    table = await connection.table("t")
    assert ids(await table.scan().to_arrow()) == ROWS
    assert remote.asked[:3] == [0, 20, 40]


@pytest.mark.parametrize("start", [3, 10, 15, 20, 39, 40])
async def test_a_scan_begins_where_it_is_told_within_a_segment(
    connection: AsyncConnection, remote: RemoteBucket, start: int
) -> None:
    table = await connection.table("t")
    assert ids(await table.scan(start={0: start}).to_arrow()) == ROWS[start:]


@pytest.mark.parametrize("stop", [1, 10, 25, 40, 41])
async def test_a_scan_ends_where_it_is_told_within_a_segment(
    connection: AsyncConnection, remote: RemoteBucket, stop: int
) -> None:
    table = await connection.table("t")
    assert ids(await table.scan(stop={0: stop}).to_arrow()) == ROWS[:stop]


async def test_columns_and_filter_are_applied_to_remote_rows_by_the_client(
    connection: AsyncConnection, remote: RemoteBucket
) -> None:
    table = await connection.table("t")
    scan = table.scan(columns=["name"], filter=col("id") > 35)
    assert (await scan.to_arrow()).to_pydict() == {"name": [f"n{i}" for i in range(36, 60)]}


async def test_a_limit_ends_a_scan_of_remote_rows(
    connection: AsyncConnection, remote: RemoteBucket
) -> None:
    table = await connection.table("t")
    scanner = await table.scan(limit=13).open()
    assert await rest(scanner) == ROWS[:13]
    assert list(scanner.positions().values()) == [13]


async def test_a_scan_that_follows_sees_remote_rows_then_new_ones(
    connection: AsyncConnection, cluster: FakeCluster, events: TableInfo, remote: RemoteBucket
) -> None:
    table = await connection.table("t")
    async with await table.scan(stop=None).open() as scanner:
        seen: list[int] = []
        while len(seen) < 60:
            seen += ids(await scanner.poll(timeout_ms=5000))
        fill(cluster, events, [60, 61])
        while len(seen) < 62:
            seen += ids(await scanner.poll(timeout_ms=5000))
    assert seen == [*ROWS, 60, 61]


async def test_ranges_smaller_than_a_batch_are_put_together(
    cluster: FakeCluster, remote: RemoteBucket
) -> None:
    small = {**FAST, "client.scanner.log.fetch.max-bytes": "200b"}
    async with await connect_async(cluster.bootstrap, **small) as connection:
        table = await connection.table("t")
        assert ids(await table.scan().to_arrow()) == ROWS


# -- damage --------------------------------------------------------------------------------------


async def test_a_damaged_remote_batch_is_found_though_checks_are_off(
    cluster: FakeCluster, remote: RemoteBucket
) -> None:
    segment = remote.segments[1]
    remote.checksums = False
    await remote.objects.put(segment.path, segment.data[:-9] + b"\xff" + segment.data[-8:])
    options = {**FAST, "client.scanner.log.check-crc": "false"}
    async with await connect_async(cluster.bootstrap, **options) as connection:
        table = await connection.table("t")
        with pytest.raises(CorruptRecordError, match=segment.segment_id):
            await table.scan().to_arrow()


async def test_damage_outside_of_the_checksums_of_batches_is_found_by_that_of_the_file(
    connection: AsyncConnection, remote: RemoteBucket
) -> None:
    segment = remote.segments[0]
    damaged = bytearray(segment.data)
    damaged[13] ^= 1  # the commit time of the first batch
    await remote.objects.put(segment.path, bytes(damaged))
    table = await connection.table("t")
    with pytest.raises(ObjectCorruptError, match=segment.segment_id):
        await table.scan().to_arrow()


async def test_a_segment_that_ends_too_early_is_noticed(
    connection: AsyncConnection, remote: RemoteBucket
) -> None:
    segment = remote.segments[0]
    await remote.objects.put(segment.path, segment.data[:-3])
    table = await connection.table("t")
    with pytest.raises(ObjectCorruptError, match=segment.segment_id):
        await table.scan().to_arrow()


async def test_a_segment_without_the_last_batch_it_should_have_is_noticed(
    connection: AsyncConnection, remote: RemoteBucket
) -> None:
    remote.segments[0].end = remote.segments[1].start = 25
    table = await connection.table("t")
    with pytest.raises(CorruptRecordError, match="everything before offset 25"):
        await table.scan().to_arrow()


# -- faults --------------------------------------------------------------------------------------


async def test_a_segment_that_expired_meanwhile_is_asked_for_again(
    connection: AsyncConnection, cluster: FakeCluster, events: TableInfo, remote: RemoteBucket
) -> None:
    gone = remote.segments[0]
    await remote.objects.delete([gone.path])

    def info(bucket: TableBucket, offset: int) -> m.PbRemoteLogFetchInfo | None:
        if len(remote.asked) == 2:  # by now it was uploaded anew
            remote.segments[0] = anew.segments[0]
        return remote.info(offset)

    anew = RemoteBucket(remote.objects)
    await anew.upload(cluster.log(TableBucket(events.table_id, None, 0)), 2, leave=4)
    cluster.remote = info
    table = await connection.table("t")
    assert ids(await table.scan().to_arrow()) == ROWS
    assert remote.asked[:3] == [0, 0, 0]


async def test_a_segment_that_expired_for_good_is_out_of_range(
    connection: AsyncConnection, cluster: FakeCluster, remote: RemoteBucket
) -> None:
    await remote.objects.delete([remote.segments[0].path])
    table = await connection.table("t")
    scanner = await table.scan().open()
    while not remote.asked:
        await asyncio.sleep(0)
    remote.segments.clear()

    cluster.fetch_fault = lambda *_: ErrorCode.LOG_OFFSET_OUT_OF_RANGE_EXCEPTION
    with pytest.raises(OffsetOutOfRangeError):
        await scanner.next_batch()
    await scanner.close()


async def test_a_segment_that_stays_missing_fails_the_scan_and_is_named(
    connection: AsyncConnection, remote: RemoteBucket
) -> None:
    await remote.objects.delete([remote.segments[1].path])
    table = await connection.table("t")
    async with await table.scan().open() as scanner:
        seen = ids(await scanner.next_batch())
        assert seen == ROWS[:20]
        with pytest.raises(ObjectMissingError, match=remote.segments[1].segment_id):
            await scanner.next_batch()


@pytest.fixture
async def closed_port() -> int:
    """A port at which nobody answers."""
    server = await asyncio.start_server(lambda r, w: None, "127.0.0.1", 0)
    port: int = server.sockets[0].getsockname()[1]
    server.close()
    await server.wait_closed()
    return port


async def test_a_dead_location_is_named_and_other_buckets_go_on(
    cluster: FakeCluster, connection: AsyncConnection, closed_port: int, location: Path
) -> None:
    info = cluster.create("two", "id BIGINT, name STRING", bucket_count=2)
    for start in range(0, 60, 10):
        fill(cluster, info, list(range(start, start + 10)))
        fill(cluster, info, list(range(100 + start, 110 + start)), bucket=1)
    good = RemoteBucket(Objects(parse_location(str(location), "test")))
    await good.upload(cluster.log(TableBucket(info.table_id, None, 1)), 2, leave=2)
    dead = m.PbRemoteLogFetchInfo(remote_log_tablet_dir="s3://dead/zufluss/log/x")
    dead.remote_log_segments.add(
        remote_log_segment_id="s",
        remote_log_start_offset=0,
        remote_log_end_offset=60,
        segment_size_in_bytes=100,
    )
    cluster.remote = lambda bucket, offset: good.info(offset) if bucket.bucket_id else dead
    store = [
        m.PbKeyValue(key="fs.s3a.endpoint", value=f"http://127.0.0.1:{closed_port}"),
        m.PbKeyValue(key="fs.s3a.endpoint.region", value="us-east-1"),
    ]
    cluster.token.tokens.add(prefix="file://", schema="file", token=b"", path_scoped=False)
    cluster.token.tokens.add(
        prefix="s3://dead",
        schema="s3",
        token=b'{"access_key_id": "a", "access_key_secret": "b"}',
        addition_info=store,
        path_scoped=False,
    )
    table = await connection.table("two")
    seen: list[int] = []
    async with await table.scan().open() as scanner:
        while len(seen) < 60:
            seen += ids(await scanner.next_batch())
        assert seen == list(range(100, 160))
        with pytest.raises(LocationUnavailableError, match="s3://dead/zufluss/log/x") as failure:
            await scanner.next_batch()
    assert failure.value.retriable


async def test_reading_continues_when_a_location_comes_back(
    connection: AsyncConnection, remote: RemoteBucket, location: Path
) -> None:
    away = location.with_name("away")
    shutil.move(location, away)
    table = await connection.table("t")
    async with await table.scan().open() as scanner:
        while len(remote.asked) < 2:  # it was tried, and will be again
            await asyncio.sleep(0.001)
        shutil.move(away, location)
        assert await rest(scanner) == ROWS


async def test_a_cluster_without_a_token_for_the_location_is_a_passing_error(
    cluster: FakeCluster, connection: AsyncConnection, remote: RemoteBucket
) -> None:
    cluster.token.tokens.add(prefix="s3://other", schema="s3", token=b"", path_scoped=False)
    table = await connection.table("t")
    async with await table.scan().open() as scanner:
        while len(cluster.token_requests) < 2:
            await asyncio.sleep(0.001)
        del cluster.token.tokens[:]
        assert await rest(scanner) == ROWS


async def test_a_scan_that_is_closed_stops_reading_remote_files(
    connection: AsyncConnection, cluster: FakeCluster, remote: RemoteBucket
) -> None:
    table = await connection.table("t")
    scanner = await table.scan().open()
    await scanner.next_batch()
    await scanner.close()
    fetches = cluster.received[ApiKey.FETCH_LOG]
    await connection.refresh()
    assert cluster.received[ApiKey.FETCH_LOG] == fetches


# -- memory --------------------------------------------------------------------------------------


class CountingBudget(MemoryBudget):
    """Records the largest number of bytes that was held."""

    most = 0

    def give(self, size: int) -> None:
        super().give(size)
        self.most = max(self.most, self._used)

    def try_take(self, size: int) -> bool:
        taken = super().try_take(size)
        self.most = max(self.most, self._used)
        return taken


async def test_what_is_read_ahead_stays_within_the_budget(
    connection: AsyncConnection, tmp_path: Path
) -> None:
    objects = Objects(parse_location(str(tmp_path / "many"), "test"))
    batches = [build_batch(1, bytes(900), 1) for _ in range(400)]
    for offset, batch in enumerate(batches):
        stamp(batch, 0, 0, offset, 0, -1)
    await objects.put("log/t/s/00000000000000000000.log", b"".join(batches))
    info = m.PbRemoteLogFetchInfo(remote_log_tablet_dir=objects.full_path("log/t"))
    info.remote_log_segments.add(
        remote_log_segment_id="s",
        remote_log_start_offset=0,
        remote_log_end_offset=400,
        segment_size_in_bytes=sum(map(len, batches)),
    )
    budget = CountingBudget(40_000)
    seen = 0
    path = TablePath("fluss", "t")
    async for part in RemoteReader(connection.remote).batches(path, info, None, budget):
        await asyncio.sleep(0)
        seen += len(part.batches)
        budget.give(part.size)
    assert seen == 400
    assert budget.most <= 40_000 + len(batches[0])
    assert budget._used == 0


async def test_a_reader_that_stops_early_gives_everything_back(
    connection: AsyncConnection, remote: RemoteBucket
) -> None:
    info = remote.info(0)
    assert info is not None
    budget = MemoryBudget(500)
    run = RemoteReader(connection.remote).batches(TablePath("fluss", "t"), info, None, budget)
    part = await anext(run)
    budget.give(part.size)
    await run.aclose()
    assert budget._used == 0


async def test_ranges_behind_a_slow_one_are_read_meanwhile_and_handed_out_after_it(
    connection: AsyncConnection, remote: RemoteBucket, monkeypatch: pytest.MonkeyPatch
) -> None:
    info = remote.info(0)
    assert info is not None
    files, budget = connection.remote, MemoryBudget(500)
    read, slow, all_begun = files.read, asyncio.Event(), asyncio.Event()
    begun, under_way, most = 0, 0, 0

    async def held_up(
        table: TablePath, uri: LocationUri, start: int, end: int, *, seconds: float | None = None
    ) -> memoryview:
        nonlocal begun, under_way, most
        begun, under_way = begun + 1, under_way + 1
        most, number = max(most, under_way), begun
        if number == 1 + PLANNED:
            all_begun.set()
        if number == 2:
            await slow.wait()
        data = await read(table, uri, start, end)
        under_way -= 1
        return data

    async def offsets() -> list[int]:
        found = []
        async for part in RemoteReader(connection.remote).batches(
            TablePath("fluss", "t"), info, None, budget
        ):
            found += [header.base_offset for _, header in part.batches]
            budget.give(part.size)
        return found

    monkeypatch.setattr(files, "read", held_up)
    reading = asyncio.create_task(offsets())
    async with asyncio.timeout(WAIT_SECONDS):
        await all_begun.wait()
        assert begun == 1 + PLANNED > 1 + AHEAD
        slow.set()
        assert await reading == [0, 10, 20, 30]
    assert most <= AHEAD
    assert budget._used == 0


@settings(max_examples=100, deadline=None)
@given(
    st.lists(st.integers(0, 200), min_size=1, max_size=20),
    st.lists(st.integers(1, 150), min_size=1, max_size=10),
)
def test_any_cut_gives_the_same_batches(bodies: list[int], cuts: list[int]) -> None:
    batches = [build_batch(1, bytes(size), 1) for size in bodies]
    for offset, batch in enumerate(batches):
        stamp(batch, 0, 0, offset, 0, -1)
    data, cutter, found, at, turn = b"".join(batches), BatchCutter("x"), [], 0, 0
    while at < len(data):
        piece = data[at : at + cuts[turn % len(cuts)]]
        at, turn = at + len(piece), turn + 1
        for part in cutter.cut(memoryview(piece)):
            found += [bytes(part.records[p : p + h.size]) for p, h in part.batches]
    cutter.check_end(len(batches))
    assert found == [bytes(batch) for batch in batches]


def test_a_batch_with_an_impossible_length_is_refused() -> None:
    batch = build_batch(1, b"", 1)
    batch[8:12] = (5).to_bytes(4, "little")
    cutter = BatchCutter("s3://b/f")
    assert list(cutter.cut(memoryview(batch)[:20])) == []
    with pytest.raises(CorruptRecordError, match="s3://b/f"):
        list(cutter.cut(memoryview(batch)[20:]))


# -- another server --------------------------------------------------------------------------------


async def test_segments_that_apache_fluss_uploaded_are_read(
    connection: AsyncConnection, cluster: FakeCluster
) -> None:
    fixture = FIXTURES / "remote-log"
    [found] = read_fetch_response(memoryview((fixture / "fetch-at-25.bin").read_bytes()))
    info = m.PbRemoteLogFetchInfo.FromString(bytes(found.remote))
    del info.remote_log_segments[2:]  # the fixture has two of them
    info.remote_log_tablet_dir = str(fixture / "0")
    properties = {"table.log.arrow.compression.type": "NONE"}
    table_info = cluster.create("java", "a INT, b STRING", properties=properties)
    cluster.log(TableBucket(table_info.table_id, None, 0)).end = 280
    cluster.remote = lambda bucket, offset: info
    table = await connection.table("java")
    rows = await table.scan(start={0: 25}).to_arrow()
    assert rows["a"].to_pylist() == list(range(25, 280))
    assert rows["b"].to_pylist() == [f"{i}-{'x' * 400}" for i in range(25, 280)]
