"""Offsets that Fluss's sinks register: the first one wins until it expires."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from typing import Any

import pytest

from tests.coordinator.support import DAY_MS, NOON, Cluster
from zufluss.coordinator.producers import records as producer_records
from zufluss.coordinator.producers.offsets import ALREADY_EXISTS, CREATED, OFFSETS_PATH
from zufluss.errors import ConfigError, ErrorCode, InvalidProducerIdError
from zufluss.meta import api
from zufluss.meta.api import MetaStoreError
from zufluss.wire import messages as m
from zufluss.wire.api import ApiKey


def table(table_id: int, *offsets: int, partition_id: int | None = None) -> Any:
    return m.PbProducerTableOffsets(
        table_id=table_id,
        bucket_offsets=[
            m.PbBucketOffset(partition_id=partition_id, bucket_id=i, log_end_offset=offset)
            for i, offset in enumerate(offsets)
        ],
    )


async def register(cluster: Cluster, *tables: Any, **more: Any) -> int:
    fields = {"producer_id": "job", "table_offsets": tables} | more
    result: int = (await cluster.call(ApiKey.REGISTER_PRODUCER_OFFSETS, **fields)).result
    return result


async def get(cluster: Cluster, producer_id: str = "job") -> Any:
    return await cluster.call(ApiKey.GET_PRODUCER_OFFSETS, producer_id=producer_id)


async def test_the_first_registration_wins(cluster: Cluster) -> None:
    """Every task of a sink may register; they must all undo from the same place."""
    assert await register(cluster, table(1, 5, 6), table(2, 7, partition_id=9)) == CREATED
    assert await register(cluster, table(1, 50, 60)) == ALREADY_EXISTS
    found = await get(cluster)
    assert (found.producer_id, found.expiration_time) == ("job", NOON + DAY_MS)
    assert list(found.table_offsets) == [table(1, 5, 6), table(2, 7, partition_id=9)]


async def test_there_is_nothing_where_nothing_was_registered(cluster: Cluster) -> None:
    found = await get(cluster)
    assert not found.HasField("producer_id")
    assert not found.table_offsets
    await cluster.call(ApiKey.DELETE_PRODUCER_OFFSETS, producer_id="job")


async def test_they_end_when_they_are_deleted(cluster: Cluster) -> None:
    await register(cluster, table(1, 5))
    await cluster.call(ApiKey.DELETE_PRODUCER_OFFSETS, producer_id="job")
    assert not (await get(cluster)).table_offsets
    assert await register(cluster, table(1, 9)) == CREATED


async def test_expired_ones_are_not_there(cluster: Cluster) -> None:
    await register(cluster, table(1, 5), ttl_ms=1000)
    cluster.clock.now_ms += 999
    assert (await get(cluster)).expiration_time == NOON + 1000
    cluster.clock.now_ms += 1
    assert not (await get(cluster)).HasField("producer_id")
    assert await register(cluster, table(2, 8, 9)) == CREATED
    assert list((await get(cluster)).table_offsets) == [table(2, 8, 9)]


async def test_expired_ones_are_deleted_in_time(cluster: Cluster) -> None:
    await register(cluster, table(1, 5), ttl_ms=1000)
    await register(cluster, table(1, 5), producer_id="other")
    cluster.clock.now_ms += 1000
    assert await cluster.coordinator.producer_offsets.delete_expired() == 1
    assert {e.path.split("/")[3] for e in await cluster.store.tree(OFFSETS_PATH)} == {"other"}


async def test_they_expire_by_the_wall_over_a_restart(cluster: Cluster) -> None:
    await register(cluster, table(1, 5), ttl_ms=1000)
    cluster.clock.now_ms += 500
    again = await cluster.restart()
    assert list((await get(again)).table_offsets) == [table(1, 5)]
    again.clock.now_ms += 500
    assert not (await get(again)).table_offsets
    await again.stop()
    await cluster.start()


async def test_many_buckets_are_kept_in_parts(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(producer_records, "BUCKETS_PER_PART", 10)
    await register(cluster, table(1, *range(25)), table(2, *range(5)), table(3))
    assert len(await cluster.store.tree(OFFSETS_PATH)) == 1 + 3 + 1
    found = await get(cluster)
    assert list(found.table_offsets) == [table(1, *range(25)), table(2, *range(5)), table(3)]
    await cluster.call(ApiKey.DELETE_PRODUCER_OFFSETS, producer_id="job")
    assert await cluster.store.tree(OFFSETS_PATH) == []


async def test_an_id_may_be_as_long_as_on_fluss(cluster: Cluster) -> None:
    assert await register(cluster, table(1, 5), producer_id="x" * 200) == CREATED
    assert list((await get(cluster, "x" * 200)).table_offsets) == [table(1, 5)]


@pytest.mark.parametrize("producer_id", ["", "../x", "a/b", "x" * 201])
async def test_an_id_that_is_none_is_refused(cluster: Cluster, producer_id: str) -> None:
    for attempt in (
        register(cluster, producer_id=producer_id),
        get(cluster, producer_id),
        cluster.call(ApiKey.DELETE_PRODUCER_OFFSETS, producer_id=producer_id),
    ):
        with pytest.raises(InvalidProducerIdError) as refused:
            await attempt
        assert refused.value.code == ErrorCode.INVALID_PRODUCER_ID_EXCEPTION == 63


async def test_no_time_at_all_is_refused(cluster: Cluster) -> None:
    with pytest.raises(ConfigError, match="ttl_ms 0"):
        await register(cluster, ttl_ms=0)


async def test_too_many_tables_are_refused(cluster: Cluster) -> None:
    with pytest.raises(ConfigError, match="10001 tables"):
        await register(cluster, *(table(i) for i in range(10_001)))


async def test_a_registration_is_finished_when_its_caller_goes_away(cluster: Cluster) -> None:
    task = asyncio.ensure_future(register(cluster, table(1, 5)))
    await asyncio.sleep(0)
    task.cancel()
    with suppress(asyncio.CancelledError):
        await task
    found = await get(cluster)
    assert list(found.table_offsets) in ([], [table(1, 5)])
    assert await register(cluster, table(1, 5)) == (ALREADY_EXISTS if found.table_offsets else 0)


@pytest.mark.parametrize("killed", [None, 0, 1, 3])
async def test_those_of_very_many_tables_are_there_as_a_whole(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch, killed: int | None
) -> None:
    """They take several transactions; what one that did not finish has left over is deleted."""
    monkeypatch.setattr(api, "PORTION_BYTES", 4_000)
    ledger, count = cluster.coordinator.producer_offsets._ledger, 0
    commit = ledger.commit

    async def commit_or_die(ops: Any) -> None:
        nonlocal count
        if count == killed:
            raise MetaStoreError("away")
        await commit(ops)
        count += 1

    tables = [table(number, number) for number in range(100)]
    with monkeypatch.context() as patch:
        patch.setattr(ledger, "commit", commit_or_die)
        if killed is None:
            assert await register(cluster, *tables) == CREATED
            assert count > 5
            assert list((await get(cluster)).table_offsets) == tables
            count = 0
            await cluster.call(ApiKey.DELETE_PRODUCER_OFFSETS, producer_id="job")
            assert count > 5
        else:
            with pytest.raises(MetaStoreError):
                await register(cluster, *tables)
    assert not (await get(cluster)).table_offsets
    await cluster.coordinator.producer_offsets.delete_expired()
    assert await cluster.store.tree(OFFSETS_PATH) == []
    assert await register(cluster, *tables[:3]) == CREATED
