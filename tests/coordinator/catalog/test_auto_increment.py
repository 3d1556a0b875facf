"""Ids of auto-increment columns: from 1, in ranges, never twice, gone with the table."""

from __future__ import annotations

import asyncio
import json

import pytest

from tests.coordinator.support import COUNTED, EVENTS, Cluster, counted, successor, table_json
from zufluss.coordinator import records
from zufluss.coordinator.ledger import Ledger
from zufluss.errors import (
    ConfigError,
    ErrorCode,
    InvalidTableError,
    UnknownTableOrBucketError,
    ZuflussError,
)
from zufluss.meta.api import Put
from zufluss.model.table import DatabaseDescriptor, TablePath
from zufluss.wire.api import ApiKey


async def counters(cluster: Cluster) -> list[str]:
    return [e.path for e in await cluster.store.tree("/tables") if "auto-increment" in e.path]


async def test_the_first_id_is_1_and_ranges_follow_each_other(cluster: Cluster) -> None:
    """As Fluss: its first bucket gets 1 to 100000, the next one that asks 100001 and more."""
    table = await cluster.catalog.create_table(EVENTS, counted())
    ids = [
        await cluster.catalog.allocate_ids(table.info.table_id, COUNTED, 100_000) for _ in range(2)
    ]
    assert ids == [(1, 100_001), (100_001, 200_001)]


async def test_clients_are_told_which_column_counts(cluster: Cluster) -> None:
    await cluster.catalog.create_table(EVENTS, counted())
    path = {"database_name": "fluss", "table_name": "events"}
    answer = await cluster.call(ApiKey.GET_TABLE_INFO, table_path=path)
    schema = json.loads(answer.table_json)["schema"]
    assert (schema["auto_increment_column"], schema["primary_key"]) == (["n"], ["k"])


async def test_a_refused_table_leaves_nothing_behind(cluster: Cluster) -> None:
    path = {"database_name": "fluss", "table_name": "events"}
    bad = counted().replace(b'"auto_increment_column":["n"]', b'"auto_increment_column":["v"]')
    with pytest.raises(InvalidTableError, match="must be INT or BIGINT"):
        await cluster.call(
            ApiKey.CREATE_TABLE, table_path=path, table_json=bad, ignore_if_exists=False
        )
    assert await cluster.store.tree("/tables") == []
    assert cluster.tablet.buckets == {}


async def test_ids_asked_for_at_once_do_not_overlap(cluster: Cluster) -> None:
    table_id = (await cluster.catalog.create_table(EVENTS, counted())).info.table_id
    found = await asyncio.gather(
        *(cluster.catalog.allocate_ids(table_id, COUNTED, count) for count in range(1, 11))
    )
    assert sorted(i for ids in found for i in range(*ids)) == list(range(1, 56))


async def test_ids_are_not_given_again_after_a_restart(cluster: Cluster) -> None:
    table_id = (await cluster.catalog.create_table(EVENTS, counted())).info.table_id
    await cluster.catalog.allocate_ids(table_id, COUNTED, 7)
    async with successor(cluster) as later:
        assert await later.catalog.allocate_ids(table_id, COUNTED, 1) == (8, 9)


async def test_a_coordinator_that_was_replaced_gives_no_ids(cluster: Cluster) -> None:
    table_id = (await cluster.catalog.create_table(EVENTS, counted())).info.table_id
    await Ledger.open(cluster.store)
    with pytest.raises(ZuflussError) as caught:
        await cluster.catalog.allocate_ids(table_id, COUNTED, 1)
    assert caught.value.code == ErrorCode.NOT_COORDINATOR_LEADER_EXCEPTION


async def test_each_table_counts_for_itself_and_a_new_one_begins_again(cluster: Cluster) -> None:
    first = await cluster.catalog.create_table(EVENTS, counted())
    other = await cluster.catalog.create_table(TablePath("fluss", "other"), counted())
    await cluster.catalog.allocate_ids(first.info.table_id, COUNTED, 5)
    assert await cluster.catalog.allocate_ids(other.info.table_id, COUNTED, 5) == (1, 6)
    await cluster.catalog.drop_table(EVENTS)
    again = await cluster.catalog.create_table(EVENTS, counted())
    assert await cluster.catalog.allocate_ids(again.info.table_id, COUNTED, 5) == (1, 6)


async def test_the_counter_is_removed_with_the_table_or_its_database(cluster: Cluster) -> None:
    await cluster.catalog.create_database("d", DatabaseDescriptor())
    for path in (EVENTS, TablePath("d", "t")):
        await cluster.catalog.create_table(path, counted())
    assert len(await counters(cluster)) == 2
    await cluster.catalog.drop_table(EVENTS)
    await cluster.catalog.drop_database("d", cascade=True)
    assert await counters(cluster) == []


async def test_the_partitions_of_a_table_share_its_counter(cluster: Cluster) -> None:
    table = await cluster.catalog.create_table(EVENTS, counted(partitions=("v",)))
    for day in ("a", "b"):
        await cluster.catalog.create_partition(EVENTS, {"v": day})
    await cluster.catalog.drop_partition(EVENTS, {"v": "a"})
    assert await counters(cluster) == [records.id_counter(table.info.table_id, COUNTED)]
    assert await cluster.catalog.allocate_ids(table.info.table_id, COUNTED, 2) == (1, 3)


async def test_a_table_dropped_meanwhile_leaves_no_counter_behind(cluster: Cluster) -> None:
    """A counter without its table would make the catalog unreadable at the next start."""
    table_id = (await cluster.catalog.create_table(EVENTS, counted())).info.table_id
    asked = [cluster.catalog.allocate_ids(table_id, COUNTED, 1) for _ in range(20)]
    dropping = cluster.catalog.drop_table(EVENTS)
    answers = await asyncio.gather(*asked[:10], dropping, *asked[10:], return_exceptions=True)
    problems = [answer for answer in answers if isinstance(answer, Exception)]
    assert all(isinstance(problem, UnknownTableOrBucketError) for problem in problems), problems
    assert await counters(cluster) == []
    with pytest.raises(
        UnknownTableOrBucketError, match=rf"table id {table_id} \(unknown here\) does not exist"
    ):
        await cluster.catalog.allocate_ids(table_id, COUNTED, 1)


async def test_a_counter_deleted_between_reading_and_writing_is_no_table(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    table_id = (await cluster.catalog.create_table(EVENTS, counted())).info.table_id
    read = cluster.store.read

    async def read_then_drop(path: str) -> object:
        found = await read(path)
        monkeypatch.setattr(cluster.store, "read", read)
        await cluster.catalog.drop_table(EVENTS)
        return found

    monkeypatch.setattr(cluster.store, "read", read_then_drop)
    with pytest.raises(UnknownTableOrBucketError):
        await cluster.catalog.allocate_ids(table_id, COUNTED, 1)
    assert await counters(cluster) == []


@pytest.mark.parametrize(("type_text", "last"), [("INT", 2**31 - 1), ("BIGINT", 2**63 - 2)])
async def test_ids_end_where_the_type_of_the_column_ends(
    cluster: Cluster, type_text: str, last: int
) -> None:
    table_id = (await cluster.catalog.create_table(EVENTS, counted(type_text))).info.table_id
    counter = records.id_counter(table_id, COUNTED)
    await cluster.store.transact([Put(counter, records.number(last - 3))])
    assert await cluster.catalog.allocate_ids(table_id, COUNTED, 2**63 - 1) == (last - 2, last + 1)
    for _ in range(2):
        with pytest.raises(ZuflussError, match=f"'n' .* no ids left: {last} was the last"):
            await cluster.catalog.allocate_ids(table_id, COUNTED, 1)


@pytest.mark.parametrize("column_id", [0, 2, 9, -1])
async def test_only_the_auto_increment_column_gets_ids(cluster: Cluster, column_id: int) -> None:
    table_id = (await cluster.catalog.create_table(EVENTS, counted())).info.table_id
    with pytest.raises(InvalidTableError, match="auto-increment columns: n"):
        await cluster.catalog.allocate_ids(table_id, column_id, 1)


async def test_a_log_table_has_no_ids_to_give(cluster: Cluster) -> None:
    table_id = (await cluster.catalog.create_table(EVENTS, table_json())).info.table_id
    with pytest.raises(InvalidTableError, match="auto-increment columns: none"):
        await cluster.catalog.allocate_ids(table_id, 0, 1)


@pytest.mark.parametrize("count", [0, -1])
async def test_a_range_has_at_least_one_id(cluster: Cluster, count: int) -> None:
    table_id = (await cluster.catalog.create_table(EVENTS, counted())).info.table_id
    with pytest.raises(ConfigError, match=f"count {count} is not allowed"):
        await cluster.catalog.allocate_ids(table_id, COUNTED, count)
