"""The append writer against a cluster that fails on demand."""

from __future__ import annotations

import asyncio
import random
from collections import Counter, defaultdict

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.client.conftest import FAST
from tests.client.fake import FakeCluster
from zufluss.client.connection import AsyncConnection, connect_async
from zufluss.client.core.budget import MemoryBudget
from zufluss.client.core.convert import ColumnMismatchError
from zufluss.errors import (
    ErrorCode,
    InvalidTableError,
    NetworkError,
    OutOfOrderSequenceError,
    PartitionNotExistError,
    RecordTooLargeError,
    TableNotExistError,
    ZuflussError,
)
from zufluss.model.table import TableBucket, TableInfo
from zufluss.record.arrow.message import decode
from zufluss.record.header import read_header
from zufluss.wire import messages as m
from zufluss.wire.api import ApiKey


def stored(cluster: FakeCluster, info: TableInfo) -> dict[TableBucket, list[int]]:
    """The ids in each bucket's log, in order."""
    found: dict[TableBucket, list[int]] = {}
    for bucket, log in sorted(cluster.logs.items()):
        found[bucket] = []
        for _, batch in log.batches:
            rows, _ = decode(batch, 0, read_header(batch), info.schema.arrow)
            found[bucket] += rows["id"].to_pylist()
    return found


def headers(cluster: FakeCluster) -> list[tuple[int, int]]:
    """Writer id and sequence of everything stored."""
    found = [read_header(b) for log in cluster.logs.values() for _, b in log.batches]
    return [(header.writer_id, header.batch_sequence) for header in found]


async def test_rows_are_acknowledged_when_flush_returns(
    cluster: FakeCluster, connection: AsyncConnection
) -> None:
    info = cluster.create("t", "id BIGINT, name STRING", bucket_count=3)
    table = await connection.table("fluss.t")
    async with table.append() as writer:
        await writer.write({"id": [1, 2, 3]})
        await writer.write({"id": 4, "name": "one row"})
        await writer.flush()
        assert sorted(i for ids in stored(cluster, info).values() for i in ids) == [1, 2, 3, 4]


async def test_small_writes_are_sent_together_and_large_ones_cut(cluster: FakeCluster) -> None:
    cluster.create("t", "id BIGINT")
    options = FAST | {"client.writer.batch-size": "8kb", "client.writer.batch-timeout": "1min"}
    async with await connect_async(cluster.bootstrap, **options) as connection:
        async with (await connection.table("t")).append() as writer:
            for i in range(50):
                await writer.write({"id": [i]})
        assert [len(log.batches) for log in cluster.logs.values()] == [1]
        cluster.logs.clear()
        async with (await connection.table("t")).append() as writer:
            await writer.write({"id": list(range(10_000))})
    sizes = [
        read_header(batch).record_count for log in cluster.logs.values() for _, batch in log.batches
    ]
    assert len(sizes) == 10
    assert set(sizes) == {1000}


async def test_a_batch_is_sent_when_it_is_old_enough(
    cluster: FakeCluster, connection: AsyncConnection
) -> None:
    cluster.create("t", "id BIGINT")
    produced = asyncio.Event()
    handler = cluster.handlers[ApiKey.PRODUCE_LOG]

    async def watched(request: m.ProduceLogRequest) -> object:
        produced.set()
        return await handler(request)

    cluster.handlers[ApiKey.PRODUCE_LOG] = watched  # type: ignore[assignment]
    async with (await connection.table("t")).append() as writer:
        await writer.write({"id": [1]})
        await asyncio.wait_for(produced.wait(), 5)
        produced.clear()
        await writer.write({"id": 2})
        await asyncio.wait_for(produced.wait(), 5)


async def test_batches_of_one_bucket_are_pipelined_up_to_the_limit(cluster: FakeCluster) -> None:
    info = cluster.create("t", "id BIGINT")
    under_way = peak = 0
    handler = cluster.handlers[ApiKey.PRODUCE_LOG]
    order = asyncio.Lock()

    async def watched(request: m.ProduceLogRequest) -> object:
        nonlocal under_way, peak
        under_way += 1
        peak = max(peak, under_way)
        async with order:
            await asyncio.sleep(0.002)
            answer = await handler(request)
        under_way -= 1
        return answer

    cluster.handlers[ApiKey.PRODUCE_LOG] = watched  # type: ignore[assignment]
    options = FAST | {"client.writer.batch-size": "1kb"}
    async with (
        await connect_async(cluster.bootstrap, **options) as connection,
        (await connection.table("t")).append() as writer,
    ):
        await writer.write({"id": list(range(5_000))})
    assert peak == 5
    assert list(stored(cluster, info).values()) == [list(range(5_000))]


async def test_a_writer_waits_while_its_memory_is_full(cluster: FakeCluster) -> None:
    cluster.create("t", "id BIGINT")
    gate = asyncio.Event()
    handler = cluster.handlers[ApiKey.PRODUCE_LOG]

    async def gated(request: m.ProduceLogRequest) -> object:
        await gate.wait()
        return await handler(request)

    cluster.handlers[ApiKey.PRODUCE_LOG] = gated  # type: ignore[assignment]
    options = FAST | {
        "client.request-timeout": "10s",
        "client.writer.batch-size": "1kb",
        "client.writer.buffer.memory-size": "8kb",
    }
    async with (
        await connect_async(cluster.bootstrap, **options) as connection,
        (await connection.table("t")).append() as writer,
    ):
        writing = asyncio.ensure_future(writer.write({"id": list(range(10_000))}))
        done, _ = await asyncio.wait([writing], timeout=0.2)
        assert not done
        gate.set()
        await writing


PASSING = [
    ErrorCode.NOT_LEADER_OR_FOLLOWER,
    ErrorCode.UNKNOWN_TABLE_OR_BUCKET_EXCEPTION,
    ErrorCode.LEADER_NOT_AVAILABLE_EXCEPTION,
    ErrorCode.LOG_STORAGE_EXCEPTION,
    ErrorCode.REQUEST_TIME_OUT,
    ErrorCode.NOT_ENOUGH_REPLICAS_EXCEPTION,
    ErrorCode.CORRUPT_RECORD_EXCEPTION,
    "drop",
    "lost",
]


@pytest.mark.parametrize("fault", PASSING, ids=str)
async def test_a_failure_that_passes_is_retried_without_loss_or_duplicate(
    cluster: FakeCluster, connection: AsyncConnection, fault: ErrorCode | str
) -> None:
    info = cluster.create("t", "id BIGINT")
    seen: Counter[int] = Counter()

    def once(bucket: TableBucket, sequence: int) -> ErrorCode | str | None:
        seen[sequence] += 1
        return fault if sequence == 1 and seen[1] == 1 else None

    cluster.produce_fault = once
    async with (await connection.table("t")).append() as writer:
        for i in range(6):
            await writer.write({"id": [i]})
            await writer.flush()
    assert list(stored(cluster, info).values()) == [[0, 1, 2, 3, 4, 5]]
    assert seen[1] == 2


@settings(max_examples=25, deadline=None)
@given(st.integers(0, 2**32))
async def test_nothing_is_lost_doubled_or_reordered_whatever_fails(seed: int) -> None:
    chance = random.Random(seed)
    faults = [
        ErrorCode.NOT_LEADER_OR_FOLLOWER,
        ErrorCode.LOG_STORAGE_EXCEPTION,
        "drop",
        "lost",
    ]
    async with FakeCluster() as cluster:
        info = cluster.create("t", "id BIGINT", bucket_keys=("id",), bucket_count=2)
        cluster.produce_fault = lambda *_: chance.choice(faults) if chance.random() < 0.15 else None
        options = FAST | {"client.writer.batch-size": "1kb", "client.request-timeout": "3s"}
        async with (
            await connect_async(cluster.bootstrap, **options) as connection,
            (await connection.table("t")).append() as writer,
        ):
            for start in range(0, 3000, 100):
                await writer.write({"id": list(range(start, start + 100))})
                if chance.random() < 0.1:
                    await writer.flush()
        found = stored(cluster, info)
    assert sorted(i for ids in found.values() for i in ids) == list(range(3000))
    assert all(ids == sorted(ids) for ids in found.values())


async def test_a_forgotten_writer_gets_a_new_id_and_goes_on(
    cluster: FakeCluster, connection: AsyncConnection
) -> None:
    info = cluster.create("t", "id BIGINT")
    async with (await connection.table("t")).append() as writer:
        await writer.write({"id": [1]})
        await writer.flush()
        for log in cluster.logs.values():
            log.sequences.clear()
        await writer.write({"id": [2]})
        await writer.flush()
        await writer.write({"id": [3]})
    assert list(stored(cluster, info).values()) == [[1, 2, 3]]
    assert headers(cluster) == [(1, 0), (2, 0), (2, 1)]


async def test_a_batch_that_may_be_there_already_is_not_sent_under_a_new_id(
    cluster: FakeCluster, connection: AsyncConnection
) -> None:
    info = cluster.create("t", "id BIGINT")
    forgotten = False

    def lose_then_forget(bucket: TableBucket, sequence: int) -> ErrorCode | str | None:
        nonlocal forgotten
        if sequence != 1:
            return None
        if not forgotten:
            forgotten = True
            return "lost"
        return ErrorCode.UNKNOWN_WRITER_ID_EXCEPTION

    cluster.produce_fault = lose_then_forget
    async with (await connection.table("t")).append() as writer:
        await writer.write({"id": [1]})
        await writer.flush()
        await writer.write({"id": [2]})
        with pytest.raises(OutOfOrderSequenceError, match="may or may not be written"):
            await writer.flush()
        await writer.write({"id": [3]})
        await writer.flush()
    assert list(stored(cluster, info).values()) == [[1, 2, 3]]


async def test_a_refused_batch_is_reported_once_and_the_next_ones_are_written(
    cluster: FakeCluster, connection: AsyncConnection
) -> None:
    info = cluster.create("t", "id BIGINT")
    cluster.produce_fault = lambda _, sequence: (
        ErrorCode.RECORD_TOO_LARGE_EXCEPTION if cluster.writer_ids == 1 and sequence == 1 else None
    )
    async with (await connection.table("t")).append() as writer:
        await writer.write({"id": [1]})
        await writer.flush()
        await writer.write({"id": [2]})
        with pytest.raises(RecordTooLargeError):
            await writer.flush()
        await writer.write({"id": [3]})
        await writer.flush()
    assert list(stored(cluster, info).values()) == [[1, 3]]


@pytest.mark.parametrize("fault", ["omit", ErrorCode.UNKNOWN_SERVER_ERROR])
async def test_a_bucket_missing_in_the_answer_is_an_error(
    cluster: FakeCluster, connection: AsyncConnection, fault: ErrorCode | str
) -> None:
    cluster.create("t", "id BIGINT")
    cluster.produce_fault = lambda *_: fault
    writer = (await connection.table("t")).append()
    await writer.write({"id": [1]})
    with pytest.raises(ZuflussError):
        await writer.close()


async def test_a_corrupt_batch_is_not_retried_for_ever(
    cluster: FakeCluster, connection: AsyncConnection
) -> None:
    cluster.create("t", "id BIGINT")
    cluster.produce_fault = lambda *_: ErrorCode.CORRUPT_RECORD_EXCEPTION
    writer = (await connection.table("t")).append()
    await writer.write({"id": [1]})
    with pytest.raises(ZuflussError, match="CORRUPT_RECORD"):
        await writer.close()
    assert cluster.received[ApiKey.PRODUCE_LOG] == 3


async def test_a_failure_that_does_not_pass_ends_at_the_deadline_without_spinning(
    cluster: FakeCluster,
) -> None:
    cluster.create("t", "id BIGINT")
    cluster.produce_fault = lambda *_: ErrorCode.NOT_LEADER_OR_FOLLOWER
    options = FAST | {"client.request-timeout": "150ms"}
    async with await connect_async(cluster.bootstrap, **options) as connection:
        writer = (await connection.table("t")).append()
        await writer.write({"id": [1]})
        with pytest.raises(ZuflussError, match="NOT_LEADER"):
            await writer.close()
    assert 2 <= cluster.received[ApiKey.PRODUCE_LOG] <= 8
    assert cluster.received[ApiKey.GET_METADATA] <= 12


async def test_a_cluster_that_is_gone_fails_the_batch_at_the_deadline(
    cluster: FakeCluster,
) -> None:
    cluster.create("t", "id BIGINT")
    options = FAST | {"client.request-timeout": "100ms"}
    async with await connect_async(cluster.bootstrap, **options) as connection:
        writer = (await connection.table("t")).append()
        await writer.write({"id": [1]})
        await writer.flush()
        await cluster.__aexit__()
        await writer.write({"id": [2]})
        with pytest.raises(NetworkError):
            await writer.close()


async def test_a_table_dropped_and_created_again_is_an_error(
    cluster: FakeCluster, connection: AsyncConnection
) -> None:
    info = cluster.create("t", "id BIGINT")
    async with (await connection.table("t")).append() as writer:
        await writer.write({"id": [1]})
        await writer.flush()
        cluster.create("other", "id BIGINT")
        cluster.create("t", "id BIGINT")
        cluster.produce_fault = lambda *_: ErrorCode.UNKNOWN_TABLE_OR_BUCKET_EXCEPTION
        await writer.write({"id": [2]})
        with pytest.raises(TableNotExistError, match="created again"):
            await writer.flush()
    assert list(stored(cluster, info).values()) == [[1]]


async def test_rows_find_their_partition_which_is_created_when_missing(
    cluster: FakeCluster, connection: AsyncConnection
) -> None:
    info = cluster.create("t", "id BIGINT, day STRING, n INT", partition_keys=("day", "n"))
    async with (await connection.table("t")).append() as writer:
        await writer.write({"id": [1, 2, 3, 4], "day": ["a", "b", "a", "b"], "n": [1, 1, 1, 2]})
    names = cluster.tables[info.path].partitions
    found = {
        name: stored(cluster, info)[TableBucket(info.table_id, partition_id, 0)]
        for name, partition_id in names.items()
    }
    assert found == {"a$1": [1, 3], "b$1": [2], "b$2": [4]}


async def test_a_missing_partition_is_an_error_when_it_may_not_be_created(
    cluster: FakeCluster,
) -> None:
    cluster.create("t", "id BIGINT, day STRING", partition_keys=("day",))
    options = FAST | {"client.writer.dynamic-create-partition.enabled": "false"}
    async with await connect_async(cluster.bootstrap, **options) as connection:
        writer = (await connection.table("t")).append()
        with pytest.raises(PartitionNotExistError, match="no partition 'a'"):
            await writer.write({"id": [1], "day": ["a"]})
        await writer.close()


async def test_a_bad_row_does_not_fail_the_rows_gathered_with_it(
    cluster: FakeCluster, connection: AsyncConnection
) -> None:
    info = cluster.create("t", "id BIGINT, n INT")
    async with (await connection.table("t")).append() as writer:
        for i in range(5):
            await writer.write({"id": i, "n": 2**40 if i == 2 else i})
        with pytest.raises(ColumnMismatchError, match="column 'n'"):
            await writer.flush()
    assert sorted(i for ids in stored(cluster, info).values() for i in ids) == [0, 1, 3, 4]


async def test_without_idempotence_batches_carry_no_writer(cluster: FakeCluster) -> None:
    cluster.create("t", "id BIGINT")
    options = FAST | {"client.writer.enable-idempotence": "false"}
    async with (
        await connect_async(cluster.bootstrap, **options) as connection,
        (await connection.table("t")).append() as writer,
    ):
        await writer.write({"id": [1]})
    assert headers(cluster) == [(-1, -1)]
    assert cluster.received[ApiKey.INIT_WRITER] == 0


async def test_a_table_with_a_primary_key_is_not_appended_to(
    cluster: FakeCluster, connection: AsyncConnection
) -> None:
    cluster.create("t", "id BIGINT, PRIMARY KEY (id)")
    table = await connection.table("t")
    with pytest.raises(InvalidTableError, match="primary key"):
        table.append()


async def test_an_exception_in_the_body_is_not_hidden_by_a_failing_writer(
    cluster: FakeCluster, connection: AsyncConnection
) -> None:
    cluster.create("t", "id BIGINT")
    cluster.produce_fault = lambda *_: ErrorCode.RECORD_TOO_LARGE_EXCEPTION
    writer = (await connection.table("t")).append()

    async def body() -> None:
        async with writer:
            await writer.write({"id": [1]})
            raise KeyError("mine")

    with pytest.raises(KeyError) as caught:
        await body()
    assert "RECORD_TOO_LARGE" in caught.value.__notes__[0]
    with pytest.raises(ZuflussError, match="closed"):
        await writer.write({"id": [1]})


async def test_a_memory_budget_serves_in_order_and_lets_one_oversized_piece_through() -> None:
    budget = MemoryBudget(10)
    await budget.take(25)
    order: list[int] = []

    async def taker(size: int) -> None:
        await budget.take(size)
        order.append(size)

    tasks = [asyncio.ensure_future(taker(size)) for size in (8, 3, 7)]
    await asyncio.sleep(0)
    assert order == []
    tasks[1].cancel()
    budget.give(25)
    await tasks[0]
    budget.give(8)
    await asyncio.gather(*tasks, return_exceptions=True)
    assert order == [8, 7]


async def test_input_of_many_rows_is_hashed_and_spread_over_buckets(
    cluster: FakeCluster, connection: AsyncConnection
) -> None:
    info = cluster.create("t", "id BIGINT", bucket_keys=("id",), bucket_count=4)
    rows = pa.table({"id": pa.array(range(20_000), pa.int64())})
    async with (await connection.table("t")).append() as writer:
        await writer.write(rows)
    found = stored(cluster, info)
    assert len(found) == 4
    assert sorted(i for ids in found.values() for i in ids) == list(range(20_000))
    by_bucket: defaultdict[int, int] = defaultdict(int)
    for bucket, ids in found.items():
        by_bucket[bucket.bucket_id] += len(ids)
    assert min(by_bucket.values()) > 4_000
