"""Remote files of what was dropped go everywhere, through failures and restarts."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from pathlib import Path

import pytest
import pytest_asyncio

from tests.coordinator.remotes import (
    BY_DAY,
    KEYED,
    LOGGED,
    files_below,
    keyed_json,
    locations,
    put,
    segment,
    shared_file,
    snapshot,
    storage,
)
from tests.coordinator.support import DAY_MS, Cluster, auto_partitioned, table_json
from zufluss.coordinator import records
from zufluss.coordinator.ledger import Ledger
from zufluss.errors import ErrorCode, ZuflussError
from zufluss.model.table import DatabaseDescriptor, TableBucket, TablePath
from zufluss.remote.errors import LocationUnavailableError
from zufluss.remote.locations import AlterOp


@pytest_asyncio.fixture
async def cluster(tmp_path: Path) -> AsyncIterator[Cluster]:
    """A cluster with three locations."""
    cluster = await Cluster(tmp_path / "meta", locations(tmp_path, 3)).start()
    yield cluster
    await cluster.stop()


async def fill(cluster: Cluster, bucket: TableBucket) -> None:
    """Files of a bucket in every location."""
    for location_id in (1, 2, 3):
        await segment(cluster, bucket, 0, 10, location_id)
        await shared_file(cluster, bucket, "1.sst", location_id)
        await snapshot(cluster, bucket, location_id, location_id=location_id)


async def cleaned(cluster: Cluster) -> None:
    await cluster.coordinator.remote.cleaner.drops.settle()


async def notes(cluster: Cluster) -> list[str]:
    return [note.path for note in await cluster.store.tree(records.DROPS_PATH)]


def remote_files(directory: Path) -> set[str]:
    return {p for p in files_below(directory) if p.startswith("l")}


def tables_below(directory: Path) -> list[str]:
    """Directories of tables that are left anywhere."""
    return sorted(str(p.relative_to(directory)) for p in directory.glob("l?/*/*/*"))


async def test_a_dropped_table_leaves_nothing_in_any_location(
    cluster: Cluster, tmp_path: Path
) -> None:
    keyed = await cluster.catalog.create_table(KEYED, keyed_json())
    other = await cluster.catalog.create_table(LOGGED, table_json())
    await fill(cluster, TableBucket(keyed.info.table_id, None, 0))
    await put(cluster, 2, f"lake/fluss/keyed-{keyed.info.table_id}/metadata/x.offsets")
    await put(cluster, 2, f"log/fluss/keyed-{keyed.info.table_id}0/0/of-another-table")
    await fill(cluster, TableBucket(other.info.table_id, None, 0))
    before = remote_files(tmp_path)
    await cluster.catalog.drop_table(KEYED)
    await cleaned(cluster)
    mine = {p for p in before if f"/keyed-{keyed.info.table_id}/" in p}
    assert len(mine) == 3 * (4 + 1 + 3) + 1
    assert remote_files(tmp_path) == before - mine
    assert cluster.coordinator.remote.cleaner.deleted_files == len(mine)
    assert await notes(cluster) == []


async def test_a_coordinator_that_was_replaced_cleans_nothing(
    cluster: Cluster, tmp_path: Path
) -> None:
    """A note that it reads may belong to a table that its successor is creating."""
    entry = await cluster.catalog.create_table(KEYED, keyed_json())
    await fill(cluster, TableBucket(entry.info.table_id, None, 0))
    before = remote_files(tmp_path)
    cleaner = cluster.coordinator.remote.cleaner
    await Ledger.open(cluster.store)
    await cluster.store.transact(records.drop_table(cluster.image.table(KEYED), ()).all)
    with pytest.raises(ZuflussError) as refused:
        await cleaner._clean(records.table_drop(entry.info.table_id))
    assert refused.value.code is ErrorCode.NOT_COORDINATOR_LEADER_EXCEPTION
    assert remote_files(tmp_path) == before != set()


async def test_a_dropped_partition_leaves_its_neighbours(cluster: Cluster, tmp_path: Path) -> None:
    await cluster.catalog.create_table(BY_DAY, keyed_json(("d",)))
    made = [await cluster.catalog.create_partition(BY_DAY, {"d": d}) for d in ("a", "b")]
    for each in made:
        await fill(cluster, TableBucket(each.table_id, each.partition_id, 0))
    await cluster.catalog.drop_partition(BY_DAY, {"d": "a"})
    await cleaned(cluster)
    left = remote_files(tmp_path)
    assert left
    assert all(f"/b-p{made[1].partition_id}/" in p for p in left)
    assert await notes(cluster) == []


async def test_a_table_with_a_thousand_partitions_leaves_no_directory(
    cluster: Cluster, tmp_path: Path
) -> None:
    await cluster.catalog.create_table(BY_DAY, keyed_json(("d",)))
    made = [
        await cluster.catalog.create_partition(BY_DAY, {"d": str(number)}) for number in range(1000)
    ]
    uploads = (
        shared_file(
            cluster, TableBucket(each.table_id, each.partition_id, 0), "1.sst", 1 + number % 3
        )
        for number, each in enumerate(made)
    )
    await asyncio.gather(*uploads)
    assert len(remote_files(tmp_path)) == 1000
    await cluster.catalog.drop_table(BY_DAY)
    assert await cluster.store.read("/tables/0") is None
    await cleaned(cluster)
    assert await cluster.store.tree("/tables") == []  # what one transaction could not delete, too
    assert remote_files(tmp_path) == set()
    assert tables_below(tmp_path) == []
    assert await notes(cluster) == []


async def test_a_dropped_database_and_an_expired_partition_are_cleaned(
    cluster: Cluster, tmp_path: Path
) -> None:
    await cluster.catalog.create_database("d", DatabaseDescriptor())
    tables = [TablePath("d", name) for name in ("one", "two")]
    for path in tables:
        entry = await cluster.catalog.create_table(path, keyed_json())
        await fill(cluster, TableBucket(entry.info.table_id, None, 0))
    await cluster.catalog.drop_database("d", cascade=True)
    await cleaned(cluster)
    assert remote_files(tmp_path) == set()
    days = TablePath("fluss", "days")
    entry = await cluster.catalog.create_table(days, auto_partitioned(num_retention="2"))
    await cluster.coordinator.partitions.check([entry])
    partitions = cluster.image.partitions(entry.info.table_id).values()
    for each in partitions:
        await shared_file(cluster, TableBucket(entry.info.table_id, each.partition_id, 0), "1.sst")
    cluster.clock.now_ms += 30 * DAY_MS
    await cluster.coordinator.partitions.check([entry])
    await cleaned(cluster)
    assert remote_files(tmp_path) == set()


async def test_a_location_that_fails_is_tried_again_after_a_restart(
    cluster: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    entry = await cluster.catalog.create_table(KEYED, keyed_json())
    await fill(cluster, TableBucket(entry.info.table_id, None, 0))

    async def unavailable(paths: Sequence[str]) -> None:
        raise LocationUnavailableError("l2", "", "unplugged")

    monkeypatch.setattr(storage(cluster).objects(2), "delete", unavailable)
    await cluster.catalog.drop_table(KEYED)
    await cleaned(cluster)
    left = remote_files(tmp_path)
    assert left
    assert all(p.startswith("l2/") for p in left)
    assert cluster.coordinator.remote.cleaner.drops.pending == 1
    assert await notes(cluster) == [records.table_drop(entry.info.table_id)]
    again = await cluster.restart()
    await cleaned(again)
    assert remote_files(tmp_path) == set()
    assert await notes(again) == []
    await again.stop()


async def test_nothing_is_deleted_after_a_listing_that_failed(
    cluster: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    entry = await cluster.catalog.create_table(KEYED, keyed_json())
    bucket = TableBucket(entry.info.table_id, None, 0)
    await fill(cluster, bucket)
    before = {p for p in remote_files(tmp_path) if p.startswith("l3/")}
    there = storage(cluster).objects(3)
    whole = there.list

    async def half(prefix: str) -> AsyncIterator[object]:
        async for page in whole(prefix):
            yield page[:1]
            raise LocationUnavailableError("l3", prefix, "cut")

    monkeypatch.setattr(there, "list", half)
    await cluster.catalog.drop_table(KEYED)
    await cleaned(cluster)
    assert remote_files(tmp_path) == before
    monkeypatch.undo()
    cluster.coordinator.remote.cleaner.drops.hurry()
    await cleaned(cluster)
    assert remote_files(tmp_path) == set()


async def test_a_retired_location_is_left_alone(cluster: Cluster, tmp_path: Path) -> None:
    entry = await cluster.catalog.create_table(KEYED, keyed_json())
    await fill(cluster, TableBucket(entry.info.table_id, None, 0))
    for op in (AlterOp.DRAIN, AlterOp.RETIRE):
        await cluster.coordinator.locations.alter(op, location_id=3)
    await cluster.catalog.drop_table(KEYED)
    await cleaned(cluster)
    left = remote_files(tmp_path)
    assert left
    assert all(p.startswith("l3/") for p in left)
    assert await notes(cluster) == []


async def test_a_drop_that_was_never_cleaned_is_noted_with_the_drop_itself(
    cluster: Cluster, tmp_path: Path
) -> None:
    entry = await cluster.catalog.create_table(KEYED, keyed_json())
    await fill(cluster, TableBucket(entry.info.table_id, None, 0))
    await cluster.coordinator.remote.cleaner.stop()
    await cluster.catalog.drop_table(KEYED)
    assert await notes(cluster) == [records.table_drop(entry.info.table_id)]
    again = await cluster.restart()
    await cleaned(again)
    assert remote_files(tmp_path) == set()
    await again.stop()
