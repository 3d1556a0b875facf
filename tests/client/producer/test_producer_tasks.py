"""Tasks that write as a producer, and the merge modes of writers, against a fake cluster."""

from __future__ import annotations

import asyncio
import pickle
from collections.abc import AsyncIterator
from typing import Any

import pyarrow as pa
import pytest

from tests.client.conftest import FAST
from tests.client.fake import FakeCluster
from tests.client.producers import MANY, NUMBER, VIEWS, FakeProducers, at, create_views, writers
from tests.waiting import WAIT_SECONDS
from zufluss.client.connection import AsyncConnection, connect_async
from zufluss.client.producer.exactly_once import AsyncExactlyOnceWriter, AsyncTaskWriter
from zufluss.client.producer.handle import JOB_TASK_MAX, ProducerHandle
from zufluss.client.table import AsyncTable
from zufluss.errors import (
    ConfigError,
    InvalidProducerIdError,
    InvalidTableError,
    ProducerStateError,
)
from zufluss.model.table import TableBucket

AGGREGATED = {"table.merge-engine": "aggregation"}


@pytest.fixture
def producers(cluster: FakeCluster) -> FakeProducers:
    return FakeProducers(cluster)


@pytest.fixture
async def table(
    cluster: FakeCluster, producers: FakeProducers, connection: AsyncConnection
) -> AsyncTable:
    return await create_views(cluster, connection)


@pytest.fixture
async def driver(table: AsyncTable) -> AsyncIterator[AsyncExactlyOnceWriter]:
    async with await table.exactly_once_writer("job", ["page", "views"]) as made:
        yield made


# -- tasks ---------------------------------------------------------------------------------------


async def test_a_task_writes_as_the_producer_of_a_handle_that_was_sent(
    cluster: FakeCluster, table: AsyncTable, driver: AsyncExactlyOnceWriter
) -> None:
    handle = pickle.loads(pickle.dumps(driver.handle))
    async with table.producer_writer(handle, 3) as writer:
        await writer.write(MANY)
        assert await writer.finish() == at(table, 1, 1)
    async with driver.for_task(4) as writer:
        await writer.write({"page": 1, "views": 1})
    tasks = {found.task for found in writers(cluster) if found is not None}
    assert tasks == {3, 4}
    assert all(list(put.target_columns) == [0, 1] for put in cluster.puts)


@pytest.mark.parametrize("task", [-1, JOB_TASK_MAX + 1])
async def test_a_task_has_a_number_within_bounds(
    table: AsyncTable, driver: AsyncExactlyOnceWriter, task: int
) -> None:
    with pytest.raises(ConfigError, match=f"task {task} of producer 'job' is not allowed"):
        table.producer_writer(driver.handle, task)


async def test_a_handle_of_another_table_is_refused(table: AsyncTable) -> None:
    handle = ProducerHandle(99, "job", 1, 1, (1,))
    with pytest.raises(ProducerStateError, match=r"table id 99, but fluss\.views has id 7"):
        table.producer_writer(handle, 0)


async def failing_task(writer: AsyncTaskWriter) -> None:
    async with writer:
        await writer.write(MANY)
        await writer.write({"page": 1, "views": 1})
        raise RuntimeError("the task failed")


async def test_a_task_that_fails_sends_no_batch_that_ends_early(
    cluster: FakeCluster, driver: AsyncExactlyOnceWriter
) -> None:
    with pytest.raises(RuntimeError, match="the task failed"):
        await failing_task(driver.for_task(3))
    assert cluster.puts == []


async def run_task(table: AsyncTable, handle: ProducerHandle, pauses: bool) -> None:
    async with table.producer_writer(handle, 2) as writer:
        for start in range(0, 3000, 100):
            pages = list(range(start, start + 100))
            await writer.write(pa.record_batch({"page": pages, "views": pages}))
            await writer.write({"page": start, "views": 1})
            if pauses:
                await asyncio.sleep(0.002)


async def test_a_task_that_is_run_again_sends_the_same_batches(
    cluster: FakeCluster, table: AsyncTable, producers: FakeProducers
) -> None:
    options = FAST | {
        "client.writer.batch-size": "4kb",
        "client.writer.batch-timeout": "1ms",
        "client.writer.buffer.memory-size": "64kb",
    }
    runs = []
    async with await connect_async(cluster.bootstrap, **options) as connection:
        plain = await connection.table("fluss.views")
        handle = ProducerHandle(plain.info.table_id, "job", NUMBER, 1, (1, 2))
        for pauses in (False, True):
            cluster.stores.clear()
            await run_task(plain, handle, pauses)
            runs.append({b: [r for _, r in s.batches] for b, s in cluster.stores.items()})
    assert runs[0] == runs[1]
    assert sum(map(len, runs[0].values())) > 10


async def test_a_task_with_little_memory_does_not_wait_for_itself(
    cluster: FakeCluster, table: AsyncTable, producers: FakeProducers
) -> None:
    options = FAST | {"client.writer.buffer.memory-size": "4kb"}
    async with await connect_async(cluster.bootstrap, **options) as connection:
        plain = await connection.table("fluss.views")
        handle = ProducerHandle(plain.info.table_id, "job", NUMBER, 1, (1, 2))
        async with asyncio.timeout(WAIT_SECONDS):
            await run_task(plain, handle, pauses=False)


async def test_tasks_append_to_log_tables_and_always_to_the_same_buckets(
    cluster: FakeCluster, producers: FakeProducers, connection: AsyncConnection
) -> None:
    info = cluster.create("log", "id BIGINT", bucket_count=5)
    table = await connection.table("fluss.log")
    handle = await table.append_producer()
    assert (handle.producer_id, handle.number, handle.column_ids) == ("", NUMBER, ())
    for _ in range(2):
        async with table.producer_writer(handle, 7) as writer:
            await writer.write({"id": [1, 2, 3]})
            assert await writer.finish() == {TableBucket(info.table_id, None, 2): 3}
    with pytest.raises(ConfigError, match="nothing to aggregate"):
        table.producer_writer(handle, 7, pre_aggregate=True)


async def test_a_producer_of_a_log_is_not_for_keys(
    table: AsyncTable, cluster: FakeCluster, connection: AsyncConnection
) -> None:
    with pytest.raises(InvalidTableError, match=r"use table.exactly_once_writer\(\)"):
        await table.append_producer()
    cluster.create("log", "id BIGINT")
    with pytest.raises(InvalidProducerIdError):
        await (await connection.table("fluss.log")).append_producer("")


# -- merge modes ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "number"), [("aggregate", 0), ("overwrite", 1), ("merge_state", 2), ("retract", 100)]
)
async def test_a_merge_mode_travels_by_its_number(
    cluster: FakeCluster, connection: AsyncConnection, name: Any, number: int
) -> None:
    cluster.create("counts", VIEWS, properties=AGGREGATED)
    table = await connection.table("fluss.counts")
    async with table.upsert(merge_mode=name) as writer:
        await writer.write({"page": 1, "views": 1})
    [put] = cluster.puts
    assert put.agg_mode == number
    assert put.HasField("agg_mode") == bool(number)


async def test_modes_of_aggregation_are_for_its_tables(table: AsyncTable) -> None:
    with pytest.raises(InvalidTableError, match="merge_mode 'retract' is for tables whose columns"):
        table.upsert(merge_mode="retract")
    with pytest.raises(ConfigError, match="merge_mode 'add' is none of aggregate, overwrite"):
        table.upsert(merge_mode="add")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="leave one of them out"):
        table.upsert(merge_mode="overwrite", pre_aggregate=True)
