"""Changes of buckets that took place although the store said they failed, or nobody knows."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from pathlib import Path

import pytest
import pytest_asyncio

from tests.coordinator.remotes import (
    KEYED,
    files_below,
    keyed_json,
    locations,
    manifest,
    segment,
    shared_file,
    snapshot,
)
from tests.coordinator.support import Cluster
from zufluss.meta.api import MetaStoreError, Op, VersionedValue
from zufluss.model.lease import LeasedSnapshot
from zufluss.model.table import TableBucket

HOUR_MS = 3_600_000
CONF = {"kv.snapshot.num-retained": "1"}


@pytest_asyncio.fixture
async def cluster(tmp_path: Path) -> AsyncIterator[Cluster]:
    """A cluster with one location that keeps one snapshot of each bucket."""
    cluster = await Cluster(tmp_path / "meta", locations(tmp_path, 1) | CONF).start()
    yield cluster
    await cluster.stop()


class Faults:
    """A store that says that transactions failed after they took place, and may not be read."""

    def __init__(self, cluster: Cluster) -> None:
        self._store = cluster.store
        self._transact, self._read = cluster.store.transact, cluster.store.read

    def set(self, *, reads: bool) -> None:
        async def transact(ops: Sequence[Op]) -> None:
            await self._transact(ops)
            raise MetaStoreError("unplugged too late")

        async def read(path: str) -> VersionedValue | None:
            if reads:
                raise MetaStoreError("unplugged for good")
            return await self._read(path)

        self._store.transact = transact  # type: ignore[method-assign]
        self._store.read = read  # type: ignore[method-assign]

    def clear(self) -> None:
        self._store.transact, self._store.read = self._transact, self._read  # type: ignore[method-assign]


async def bucket_of(cluster: Cluster) -> TableBucket:
    await cluster.catalog.create_table(KEYED, keyed_json())
    return TableBucket(cluster.image.table(KEYED).info.table_id, None, 0)


async def uploaded(cluster: Cluster, bucket: TableBucket, snapshot_id: int) -> bytes:
    sst = await shared_file(cluster, bucket, f"{snapshot_id}.sst")
    _, data = await snapshot(cluster, bucket, snapshot_id, [sst])
    return data


async def commit(cluster: Cluster, data: bytes) -> None:
    await cluster.coordinator.remote.commit_snapshot(data, 0)


async def settled(cluster: Cluster) -> None:
    await cluster.coordinator.remote.snapshots.retentions.settle()
    await cluster.coordinator.remote.snapshots.deletions.settle()


@pytest.mark.parametrize("reads", [False, True], ids=["read-at-once", "read-later"])
async def test_a_snapshot_that_is_leased_after_a_commit_in_doubt_outlives_a_crash(
    cluster: Cluster, tmp_path: Path, reads: bool
) -> None:
    """The commit of snapshot 1 drops snapshot 0, durably, and says that it failed."""
    bucket = await bucket_of(cluster)
    await commit(cluster, await uploaded(cluster, bucket, 0))
    second, faults = await uploaded(cluster, bucket, 1), Faults(cluster)
    faults.set(reads=reads)
    with pytest.raises(MetaStoreError, match="too late"):
        await commit(cluster, second)
    leases = cluster.coordinator.leases
    if reads:
        with pytest.raises(MetaStoreError, match="for good"):
            await leases.acquire_latest("a", HOUR_MS, [bucket], principal=None)
        assert leases.book.counts.snapshots == 0
    faults.clear()
    got = await leases.acquire_latest("a", HOUR_MS, [bucket], principal=None)
    assert got.leased == {bucket: LeasedSnapshot(1, 10)}
    again = await cluster.restart()
    await settled(again)
    found = await again.coordinator.remote.snapshots.snapshot(bucket, 1)
    assert {f"l1/{each.file.path}" for each in found.files} <= files_below(tmp_path)
    await again.stop()
    await cluster.start()  # for the fixture to stop


@pytest.mark.parametrize("reads", [False, True], ids=["read-at-once", "read-later"])
async def test_a_snapshot_whose_commit_took_place_counts_when_it_is_committed_again(
    cluster: Cluster, tmp_path: Path, reads: bool
) -> None:
    bucket = await bucket_of(cluster)
    await commit(cluster, await uploaded(cluster, bucket, 0))
    second, faults = await uploaded(cluster, bucket, 1), Faults(cluster)
    faults.set(reads=reads)
    with pytest.raises(MetaStoreError):
        await commit(cluster, second)
    faults.clear()
    await commit(cluster, second)
    await settled(cluster)
    kept = cluster.coordinator.remotes.get(bucket)
    assert ([each.snapshot_id for each in kept.snapshots], kept.dropped) == ([1], ())
    left = files_below(tmp_path / "l1" / "kv")
    assert not [path for path in left if "/snap-0/" in path], "what it dropped is deleted"


async def test_a_server_that_asks_how_its_manifest_fared_is_told_what_the_store_has(
    cluster: Cluster,
) -> None:
    """With another answer it would delete the files of the valid manifest."""
    bucket = await bucket_of(cluster)
    made = await manifest(cluster, bucket, [await segment(cluster, bucket, 0, 10)])
    faults = Faults(cluster)
    faults.set(reads=True)
    with pytest.raises(MetaStoreError, match="too late"):
        await cluster.coordinator.remote.commit_manifest(made)
    with pytest.raises(MetaStoreError, match="for good"):
        await cluster.coordinator.remote.bucket_remotes([bucket])
    faults.clear()
    found = await cluster.coordinator.remote.bucket_remotes([bucket])
    assert found[bucket].manifest_path == made.manifest_path
    assert await cluster.coordinator.remote.commit_manifest(made), "the same again counts"


async def test_a_snapshot_that_a_retention_in_doubt_dropped_is_deleted_when_it_is_tried_again(
    cluster: Cluster, tmp_path: Path
) -> None:
    bucket = await bucket_of(cluster)
    leases = cluster.coordinator.leases
    await commit(cluster, await uploaded(cluster, bucket, 0))
    await leases.acquire_latest("a", HOUR_MS, [bucket], principal=None)
    await commit(cluster, await uploaded(cluster, bucket, 1))
    snapshots = cluster.coordinator.remote.snapshots
    await snapshots.retentions.stop()
    await leases.drop("a", principal=None)
    faults = Faults(cluster)
    faults.set(reads=False)
    with pytest.raises(MetaStoreError, match="too late"):
        await snapshots.retain([bucket])
    faults.clear()
    await snapshots.retain([bucket])
    await snapshots.deletions.settle()
    assert not [p for p in files_below(tmp_path / "l1" / "kv") if "/snap-0/" in p]
