"""Scans of primary-key tables against a fake server that fails on demand."""

from __future__ import annotations

import asyncio
import gc
import json
import subprocess
import sys
from collections.abc import AsyncIterator, Iterable
from typing import Any

import pyarrow as pa
import pytest

from tests.client.conftest import FAST
from tests.client.fake import FakeServer
from tests.client.fake_pins import PinCluster
from tests.waiting import WAIT_SECONDS
from zufluss import col
from zufluss.client.connection import AsyncConnection, connect_async
from zufluss.client.keyed.pins import REOPENED_MAX
from zufluss.client.keyed.scan import BUCKETS_AT_ONCE, AsyncKvScanner
from zufluss.client.keyed.values import slices_of
from zufluss.client.table import AsyncTable
from zufluss.errors import (
    AuthorizationError,
    CorruptMessageError,
    ErrorCode,
    InvalidColumnProjectionError,
    InvalidTableError,
    KvPinGoneError,
    KvScanBusyError,
    KvScanExpiredError,
    PartitionNotExistError,
    UnsupportedVersionError,
    ZuflussError,
)
from zufluss.model.table import TableBucket
from zufluss.record.batch.kv import build_value_batch
from zufluss.record.rows.codec import RowCodec
from zufluss.wire import messages as m
from zufluss.wire.api import APIS, ApiKey

KEYED = "id BIGINT NOT NULL, name STRING, PRIMARY KEY (id)"


@pytest.fixture
async def cluster() -> AsyncIterator[PinCluster]:
    async with PinCluster() as fake:
        yield fake


async def make(
    cluster: PinCluster, connection: AsyncConnection, rows: int = 20, buckets: int = 2
) -> AsyncTable:
    info = cluster.create("k", KEYED, bucket_count=buckets)
    cluster.fill(info, rows)
    return await connection.table("k")


def ids(batches: Iterable[pa.RecordBatch]) -> list[int]:
    return [value for batch in batches for value in batch["id"].to_pylist()]


async def rest(scanner: AsyncKvScanner) -> list[int]:
    return ids([batch async for batch in scanner])


def overwrite(cluster: PinCluster) -> None:
    """Change every row and add others; open scans must not see these changes."""
    for bucket, rows in cluster.rows.items():
        for key in list(rows):
            rows[key] = {"id": -1, "name": "changed"}
        rows[b"99999999"] = {"id": -2, "name": "new"}
        cluster.offsets[bucket] += 100


# -- what comes -----------------------------------------------------------------------------------


async def test_a_scan_has_every_row_once_and_says_where_the_changelog_goes_on(
    cluster: PinCluster, connection: AsyncConnection
) -> None:
    table = await make(cluster, connection, rows=25, buckets=3)
    async with await table.scan().open() as scanner:
        overwrite(cluster)
        offsets = {TableBucket(table.info.table_id, None, b): n for b, n in enumerate((9, 8, 8))}
        assert scanner.log_offsets == scanner.positions() == offsets
        batches = [batch async for batch in scanner]
    assert sorted(ids(batches)) == list(range(25))
    assert all(batch.schema == table.schema.arrow for batch in batches)
    for bucket in range(3):
        found = [i for i in ids(batches) if i % 3 == bucket]
        assert found == sorted(found)
    assert [request.time_limit_ms for request in cluster.opens] == [250], "before it gives up"
    assert len(cluster.closed) == 3
    assert not cluster.pins


async def test_columns_come_in_the_order_asked_for_and_the_filter_is_exact(
    cluster: PinCluster, connection: AsyncConnection
) -> None:
    table = await make(cluster, connection)
    wide = await table.scan(["name", "id"], col("id") >= 15).to_arrow()
    assert wide.schema.names == ["name", "id"]
    assert sorted(wide["id"].to_pylist()) == [15, 16, 17, 18, 19]
    names = await table.scan(["name"], col("id") == 7).to_arrow()
    assert names.to_pydict() == {"name": ["row 7"]}
    request = cluster.scans[-1]
    assert not request.projected_columns, "the filter's column is read as well"
    assert m.PbPredicate.FromString(request.filter).leaf.literals
    await table.scan(["name"]).to_arrow()
    assert list(cluster.scans[-1].projected_columns) == [1]


async def test_every_form_that_scans_have_works(
    cluster: PinCluster, connection: AsyncConnection
) -> None:
    table = await make(cluster, connection)
    assert len(await table.scan().to_pandas()) == 20
    assert (await table.scan(limit=4).to_polars()).height == 4
    assert (await table.scan().to_duckdb()).aggregate("sum(id)").fetchall() == [(190,)]


async def test_an_empty_table_has_a_schema_offsets_and_no_rows(
    cluster: PinCluster, connection: AsyncConnection
) -> None:
    table = await make(cluster, connection, rows=0)
    async with await table.scan().open() as scanner:
        assert set(scanner.log_offsets.values()) == {0}
        assert await scanner.next_batch() is None
        assert scanner.finished
        assert scanner.progress == 1.0
    assert (await table.scan().to_arrow()).schema == table.schema.arrow


async def test_answers_without_rows_are_followed_by_another_call(
    cluster: PinCluster, connection: AsyncConnection
) -> None:
    table = await make(cluster, connection, rows=4)
    cluster.scan_fault = lambda _, call: "empty" if call % 2 else None
    assert sorted(ids([batch async for batch in table.scan()])) == [0, 1, 2, 3]


# -- how much is asked for ------------------------------------------------------------------------


async def test_a_limit_is_the_most_that_a_bucket_is_asked_for_and_nothing_is_read_ahead(
    cluster: PinCluster, connection: AsyncConnection
) -> None:
    table = await make(cluster, connection, rows=60, buckets=3)
    cluster.page_rows = 100
    assert (await table.scan(limit=10).to_arrow()).num_rows == 10
    assert [request.limit for request in cluster.scans] == [10]
    cluster.scans.clear()
    assert (await table.scan(limit=45).to_arrow()).num_rows == 45
    assert [request.limit for request in cluster.scans] == [45, 25, 5]
    assert (await table.scan(limit=0).to_arrow()).num_rows == 0


async def test_without_prefetch_no_page_is_asked_for_before_it_is_wanted(
    cluster: PinCluster, connection: AsyncConnection
) -> None:
    table = await make(cluster, connection)
    async with await table.scan(prefetch=0).open() as scanner:
        for asked in range(1, 5):
            assert await scanner.next_batch() is not None
            await connection.admin.table_exists("k")
            assert len(cluster.scans) == asked


async def test_each_bucket_is_read_one_page_ahead_and_few_buckets_at_a_time(
    cluster: PinCluster, connection: AsyncConnection
) -> None:
    table = await make(cluster, connection, rows=120, buckets=6)
    async with await table.scan().open() as scanner:
        assert await scanner.next_batch() is not None
        await cluster.until(lambda: len(cluster.scans) == BUCKETS_AT_ONCE + 1)
        await connection.admin.table_exists("k")
        assert len(cluster.scans) == BUCKETS_AT_ONCE + 1
        assert {request.bucket_id for request in cluster.scans} == set(range(BUCKETS_AT_ONCE))
        assert sorted(await rest(scanner))[-1] == 119
        assert scanner.progress == 1.0


# -- what goes wrong ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "fault",
    ["lost", ErrorCode.KV_SCAN_BUSY, ErrorCode.NOT_LEADER_OR_FOLLOWER],
)
async def test_a_call_that_fails_in_passing_is_made_again_with_the_same_pin(
    cluster: PinCluster, connection: AsyncConnection, fault: Any
) -> None:
    table = await make(cluster, connection)
    cluster.scan_fault = lambda bucket, call: fault if call == 2 else None
    assert sorted(ids([batch async for batch in table.scan()])) == list(range(20))
    assert len(cluster.opens) == 1
    again = cluster.calls(0)
    assert again[1].after_key == again[2].after_key


async def test_a_pin_that_is_gone_is_opened_again_at_its_offset_and_read_on_behind_the_last_key(
    cluster: PinCluster, connection: AsyncConnection
) -> None:
    table = await make(cluster, connection)
    async with await table.scan(prefetch=0).open() as scanner:
        first = await scanner.next_batch()
        assert first is not None
        offsets = scanner.log_offsets
        cluster.pins.clear()
        overwrite(cluster)
        assert sorted([*ids([first]), *await rest(scanner)]) == list(range(20))
        assert scanner.log_offsets == offsets
    asked = {b.bucket_id: b.log_offset for opened in cluster.opens[1:] for b in opened.buckets}
    assert asked == {bucket.bucket_id: offset for bucket, offset in offsets.items()}
    assert not cluster.pins


async def test_without_resume_a_pin_that_is_gone_ends_the_scan(
    cluster: PinCluster, connection: AsyncConnection
) -> None:
    table = await make(cluster, connection)
    async with await table.scan(prefetch=0, resume=False).open() as scanner:
        await scanner.next_batch()
        cluster.pins.clear()
        for _ in range(2):
            with pytest.raises(KvScanExpiredError):
                await scanner.next_batch()
    assert len(cluster.opens) == 1


async def test_a_state_that_cannot_be_rebuilt_is_an_error(
    cluster: PinCluster, connection: AsyncConnection
) -> None:
    table = await make(cluster, connection)
    async with await table.scan(prefetch=0).open() as scanner:
        await scanner.next_batch()
        cluster.pins.clear()
        cluster.history.clear()
        with pytest.raises(KvPinGoneError, match="nothing is left of offset 10"):
            await scanner.next_batch()


async def test_a_pin_that_is_gone_again_and_again_ends_the_scan(
    cluster: PinCluster, connection: AsyncConnection
) -> None:
    table = await make(cluster, connection, buckets=1)
    cluster.scan_fault = lambda *_: ErrorCode.SCANNER_EXPIRED
    with pytest.raises(KvScanExpiredError):
        await table.scan().to_arrow()
    assert len(cluster.opens) == 1 + REOPENED_MAX


async def test_a_final_error_is_raised_again_by_the_next_call_and_all_pins_are_closed(
    cluster: PinCluster, connection: AsyncConnection
) -> None:
    table = await make(cluster, connection)
    cluster.scan_fault = lambda *_: ErrorCode.AUTHORIZATION_EXCEPTION
    async with await table.scan().open() as scanner:
        for _ in range(2):
            with pytest.raises(AuthorizationError):
                await scanner.next_batch()
        assert not cluster.pins


async def test_an_answer_that_says_another_number_of_rows_is_refused(
    cluster: PinCluster, connection: AsyncConnection
) -> None:
    table = await make(cluster, connection)

    async def liar(_: Any) -> m.ScanKvSnapshotResponse:
        batch = pa.RecordBatch.from_pylist([{"id": 1, "name": "a"}], schema=table.schema.arrow)
        records = bytes(batch.serialize())
        return m.ScanKvSnapshotResponse(records=records, rows=2, done=True)

    cluster.handlers[ApiKey.SCAN_KV_SNAPSHOT] = liar
    with pytest.raises(CorruptMessageError, match="has 1 rows and says 2"):
        await table.scan().to_arrow()


async def test_rows_that_lead_nowhere_are_refused(
    cluster: PinCluster, connection: AsyncConnection
) -> None:
    table = await make(cluster, connection)
    scan = cluster.handlers[ApiKey.SCAN_KV_SNAPSHOT]

    async def stuck(request: Any) -> Any:
        answer = await scan(request)
        assert isinstance(answer, m.ScanKvSnapshotResponse)
        answer.ClearField("last_key")
        return answer

    cluster.handlers[ApiKey.SCAN_KV_SNAPSHOT] = stuck
    async with await table.scan().open() as scanner:
        with pytest.raises(CorruptMessageError, match=r"3 rows behind the key \(none\)"):
            await scanner.next_batch()
        assert not scanner.finished


# -- opening --------------------------------------------------------------------------------------


async def test_a_busy_server_is_asked_again(
    cluster: PinCluster, connection: AsyncConnection
) -> None:
    table = await make(cluster, connection)
    cluster.open_fault = lambda _: ErrorCode.KV_SCAN_BUSY if len(cluster.opens) < 3 else None
    assert (await table.scan().to_arrow()).num_rows == 20
    cluster.open_fault = lambda _: ErrorCode.KV_SCAN_BUSY
    with pytest.raises(KvScanBusyError):
        await table.scan().to_arrow()


class OtherServer(FakeServer):
    """A second tablet server, which leads bucket 1 and refuses to pin it."""

    async def _refuse(self, request: Any) -> ZuflussError:
        return AuthorizationError("not this one")


async def test_when_one_server_refuses_the_pins_of_the_others_are_let_go(
    cluster: PinCluster, connection: AsyncConnection
) -> None:
    await make(cluster, connection)
    async with OtherServer() as other:
        other.handlers[ApiKey.OPEN_KV_SNAPSHOT] = other._refuse
        ask = cluster.handlers[ApiKey.GET_METADATA]

        async def with_other(request: m.MetadataRequest) -> Any:
            response: Any = await ask(request)
            response.tablet_servers.add(node_id=5, host="127.0.0.1", port=other.port)
            for found in response.table_metadata:
                found.bucket_metadata[1].leader_id = 5
            return response

        cluster.handlers[ApiKey.GET_METADATA] = with_other
        table = await connection.table("k")
        with pytest.raises(AuthorizationError, match="not this one"):
            await table.scan().to_arrow()
        assert len(cluster.opens) == len(cluster.closed) == 1
        assert not cluster.pins
        assert other.received[ApiKey.OPEN_KV_SNAPSHOT] == 1


async def test_state_is_read_at_the_offsets_that_are_given_and_nothing_of_other_buckets(
    cluster: PinCluster, connection: AsyncConnection
) -> None:
    table = await make(cluster, connection)
    before = await table.scan().open()
    await before.close()
    overwrite(cluster)
    assert (await table.scan(at=before.log_offsets).to_arrow()).num_rows == 20
    half = await table.scan(at={1: 10}).to_arrow()
    assert half["id"].to_pylist() == list(range(1, 20, 2))
    with pytest.raises(KvPinGoneError):
        await table.scan(at={1: 11}).to_arrow()
    with pytest.raises(PartitionNotExistError, match="to scan at offset 3"):
        await table.scan(at={TableBucket(table.info.table_id, 4711, 0): 3}).to_arrow()


class PlainCluster(PinCluster):
    """A server of Apache Fluss: it has LIMIT_SCAN, but no pins."""

    def __init__(self) -> None:
        super().__init__()
        self.handlers[ApiKey.LIMIT_SCAN] = self._limit_scan

    def advertised(self) -> Iterable[int]:
        return APIS.keys() - {ApiKey.OPEN_KV_SNAPSHOT}

    async def _limit_scan(self, request: m.LimitScanRequest) -> m.LimitScanResponse:
        info = next(iter(self.tables.values())).info
        rows = list(self.rows[TableBucket(info.table_id, None, request.bucket_id)].values())
        batch = pa.RecordBatch.from_pylist(rows[: request.limit], schema=info.schema.arrow)
        values = RowCodec(info.schema, "COMPACTED").encode(batch).tolist()
        records = build_value_batch(slices_of(b"\x01\x00" + (value or b"") for value in values))
        return m.LimitScanResponse(is_log_table=False, records=bytes(records))


async def test_a_server_without_scans_is_an_error_that_names_the_alternatives() -> None:
    async with PlainCluster() as plain, await connect_async(plain.bootstrap, **FAST) as connection:
        table = await make(plain, connection)
        with pytest.raises(UnsupportedVersionError, match=r"table\.head"):
            await table.scan().to_arrow()


async def test_the_command_shows_some_rows_where_a_server_has_no_scans() -> None:
    async with PlainCluster() as plain:
        plain.fill(plain.create("k", KEYED, bucket_count=2), 20)
        command = [sys.executable, "-m", "zufluss.cli.main", "scan", "k", "-o", "json"]
        process = await asyncio.create_subprocess_exec(
            *command, "--limit", "3", "--bootstrap", plain.bootstrap, stdout=subprocess.PIPE
        )
        out, _ = await process.communicate()
        assert process.returncode == 0
        assert [json.loads(line)["id"] for line in out.splitlines()] == [0, 2, 4]


# -- a run in use ---------------------------------------------------------------------------------


async def test_a_poll_that_runs_out_of_time_loses_nothing(
    cluster: PinCluster, connection: AsyncConnection
) -> None:
    table = await make(cluster, connection)
    go = asyncio.Event()
    scan = cluster.handlers[ApiKey.SCAN_KV_SNAPSHOT]

    async def slow(request: Any) -> Any:
        await go.wait()
        return await scan(request)

    cluster.handlers[ApiKey.SCAN_KV_SNAPSHOT] = slow
    async with await table.scan().open() as scanner:
        assert await scanner.poll(timeout_ms=1) is None
        assert not scanner.finished
        go.set()
        assert sorted(await rest(scanner)) == list(range(20))


async def test_a_run_that_is_closed_while_somebody_waits_ends(
    cluster: PinCluster, connection: AsyncConnection
) -> None:
    table = await make(cluster, connection)
    cluster.scan_fault = lambda *_: "hang"
    scanner = await table.scan().open()
    waiting = asyncio.ensure_future(scanner.next_batch())
    await cluster.until(lambda: len(cluster.scans) == 2)
    await scanner.close()
    assert await waiting is None
    await scanner.close()
    assert not cluster.pins


async def test_an_open_that_is_given_up_leaves_no_pins(
    cluster: PinCluster, connection: AsyncConnection
) -> None:
    """The server opens the pins anyway, and it allows only a few."""
    table = await make(cluster, connection)
    asked, go = asyncio.Event(), asyncio.Event()
    pin = cluster.handlers[ApiKey.OPEN_KV_SNAPSHOT]

    async def slow(request: Any) -> Any:
        asked.set()
        await go.wait()
        return await pin(request)

    cluster.handlers[ApiKey.OPEN_KV_SNAPSHOT] = slow
    opening = asyncio.ensure_future(table.scan().open())
    await asked.wait()
    opening.cancel()
    with pytest.raises(asyncio.CancelledError):
        await opening
    go.set()
    await cluster.until(lambda: len(cluster.closed) == 2)
    assert not cluster.pins


async def test_a_close_that_is_given_up_leaves_no_pins(
    cluster: PinCluster, connection: AsyncConnection
) -> None:
    table = await make(cluster, connection)
    for turns in range(20):
        scanner = await table.scan().open()
        await scanner.next_batch()
        closing = asyncio.ensure_future(scanner.close())
        for _ in range(turns):
            await asyncio.sleep(0)
        closing.cancel()
        await asyncio.gather(closing, return_exceptions=True)
        await scanner.close()
        await cluster.until(lambda: not cluster.pins)


async def test_pins_that_nobody_reads_from_are_kept(
    cluster: PinCluster, connection: AsyncConnection
) -> None:
    table = await make(cluster, connection)
    cluster.idle_ms = 30
    async with await table.scan(prefetch=0).open() as scanner:
        first = await scanner.next_batch()
        assert first is not None
        kept = lambda: [r for r in cluster.scans if r.batch_size_bytes == 1]  # noqa: E731
        await cluster.until(lambda: {r.bucket_id for r in kept()} == {0, 1})
        assert sorted([*ids([first]), *await rest(scanner)]) == list(range(20))


async def test_pins_of_a_run_that_was_forgotten_are_not_kept(
    cluster: PinCluster, connection: AsyncConnection
) -> None:
    table = await make(cluster, connection)
    cluster.idle_ms = 30
    tasks = asyncio.all_tasks()
    scanner = await table.scan(prefetch=0).open()
    [keeper] = [task for task in asyncio.all_tasks() - tasks if "_keep" in repr(task.get_coro())]
    del scanner
    gc.collect()
    await asyncio.wait_for(keeper, WAIT_SECONDS)


async def test_a_partition_that_is_dropped_is_told_once_and_the_others_are_read_on(
    cluster: PinCluster, connection: AsyncConnection
) -> None:
    info = cluster.create(
        "p",
        "id BIGINT NOT NULL, name STRING NOT NULL, PRIMARY KEY (id, name)",
        partition_keys=("name",),
        bucket_count=2,
    )
    [table] = [t for t in cluster.tables.values() if t.info is info]
    table.partitions = {"a": 100, "b": 101}
    for number in table.partitions.values():
        cluster.fill(info, 20, number)
    gone: set[int | None] = set()
    unknown = ErrorCode.UNKNOWN_TABLE_OR_BUCKET_EXCEPTION
    cluster.scan_fault = lambda bucket, _: unknown if bucket.partition_id in gone else None
    opened = await connection.table("p")
    async with await opened.scan(prefetch=0).open() as scanner:
        await scanner.next_batch()
        gone.add(100)
        del table.partitions["a"]
        with pytest.raises(PartitionNotExistError):
            await scanner.next_batch()
        assert sorted(await rest(scanner)) == list(range(20))
    with pytest.raises(PartitionNotExistError):
        await opened.scan(partitions=["a"]).to_arrow()
    assert (await opened.scan(partitions=["b"], buckets=[1]).to_arrow()).num_rows == 10


async def test_impossible_scans_are_refused_when_they_are_created(
    cluster: PinCluster, connection: AsyncConnection
) -> None:
    table = await make(cluster, connection)
    cluster.create("log", "id BIGINT")
    events = await connection.table("log")
    for options in ({"start": "latest"}, {"stop": None}, {"with_offsets": True}):
        with pytest.raises(InvalidTableError, match="changelog"):
            table.scan(**options)  # type: ignore[arg-type]
    with pytest.raises(InvalidTableError, match="changelog"):
        table.scan(source="log")
    with pytest.raises(InvalidTableError, match="no bucket 2"):
        table.scan(buckets=[2])
    with pytest.raises(InvalidTableError, match="not partitioned"):
        table.scan(partitions=["x"])
    with pytest.raises(InvalidColumnProjectionError):
        table.scan(["nope"])
    with pytest.raises(ValueError, match="limit is -1"):
        table.scan(limit=-1)
    with pytest.raises(ValueError, match="neither 0 nor 1"):
        table.scan(prefetch=2)
    with pytest.raises(InvalidTableError, match="no primary key"):
        events.scan(source="live")
    with pytest.raises(ValueError, match="not for a log"):
        events.scan(at={0: 3})
