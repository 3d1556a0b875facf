"""Leases and the files of snapshots: what is leased stays, and goes as soon as it is not."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from pathlib import Path

import pytest_asyncio

from tests.coordinator.remotes import (
    KEYED,
    files_below,
    keyed_json,
    locations,
    paths_of,
    shared_file,
    snapshot,
)
from tests.coordinator.support import Cluster, Seconds
from zufluss.cluster.remote import BucketRemote, SnapshotHandle, remote_from_proto, remote_to_proto
from zufluss.coordinator.bucket_remotes import BucketRecord
from zufluss.coordinator.leases.calls import LeaseCalls
from zufluss.meta.api import Op
from zufluss.model.table import TableBucket
from zufluss.remote.snapshot import KvSnapshot, SnapshotFile

HOUR_MS = 3_600_000


@pytest_asyncio.fixture
async def cluster(tmp_path: Path) -> AsyncIterator[Cluster]:
    """A cluster with a primary-key table of 50 buckets, and a clock for leases."""
    cluster = Cluster(tmp_path / "meta", locations(tmp_path))
    cluster.seconds = Seconds()
    await cluster.start()
    await cluster.catalog.create_table(KEYED, keyed_json(buckets=50))
    yield cluster
    await cluster.stop()


def bucket_of(cluster: Cluster, number: int = 0) -> TableBucket:
    return TableBucket(cluster.image.table(KEYED).info.table_id, None, number)


def leases_of(cluster: Cluster) -> LeaseCalls:
    return cluster.coordinator.leases


async def settled(cluster: Cluster) -> None:
    """Wait until unneeded snapshots were dropped and their files deleted."""
    snapshots = cluster.coordinator.remote.snapshots
    await snapshots.retentions.settle()
    await snapshots.deletions.settle()


async def take(
    cluster: Cluster,
    snapshot_id: int,
    shared: Sequence[SnapshotFile] = (),
    bucket: TableBucket | None = None,
) -> KvSnapshot:
    where = bucket_of(cluster) if bucket is None else bucket
    made, data = await snapshot(cluster, where, snapshot_id, shared)
    await cluster.coordinator.remote.commit_snapshot(data, 0)
    await settled(cluster)
    return made


def kept(cluster: Cluster, bucket: TableBucket | None = None) -> list[int]:
    where = bucket_of(cluster) if bucket is None else bucket
    return [s.snapshot_id for s in cluster.coordinator.remotes.get(where).snapshots]


async def test_a_leased_snapshot_stays_with_all_its_files_and_goes_when_it_is_released(
    cluster: Cluster, tmp_path: Path
) -> None:
    bucket = bucket_of(cluster)
    own, common, between = [await shared_file(cluster, bucket, f"{i}.sst") for i in range(3)]
    five = await take(cluster, 5, (own, common))
    wanted = {bucket: 5}
    await leases_of(cluster).acquire("a", HOUR_MS, wanted, principal=None)
    for snapshot_id in range(6, 16):
        shared = (common, between) if snapshot_id < 12 else (common,)
        newest = await take(cluster, snapshot_id, shared)
    assert kept(cluster) == [5, 14, 15]
    there = files_below(tmp_path)
    assert there >= paths_of(five) | paths_of(newest)
    assert f"l1/{between.file.path}" not in there
    await leases_of(cluster).release("a", [bucket], principal=None)
    await settled(cluster)
    assert kept(cluster) == [14, 15]
    there = files_below(tmp_path)
    assert there >= paths_of(newest)
    assert not there & (paths_of(five) - {f"l1/{common.file.path}"})


async def test_an_expired_lease_frees_without_another_snapshot(cluster: Cluster) -> None:
    await take(cluster, 0)
    await leases_of(cluster).acquire_latest("a", HOUR_MS, [bucket_of(cluster)], principal=None)
    for snapshot_id in range(1, 4):
        await take(cluster, snapshot_id)
    assert kept(cluster) == [0, 2, 3]
    assert cluster.tablet.snapshot_offsets[bucket_of(cluster)].min_retain_offset == 0
    assert isinstance(cluster.seconds, Seconds)
    cluster.seconds.now += 3600
    await cluster.coordinator.lease_timer.expire()
    await settled(cluster)
    assert kept(cluster) == [2, 3]
    await cluster.coordinator.remote.snapshots.stop()
    assert cluster.tablet.snapshot_offsets[bucket_of(cluster)].min_retain_offset == 20


async def test_leases_are_known_before_anything_is_deleted_after_a_start(
    cluster: Cluster, tmp_path: Path
) -> None:
    leased = await take(cluster, 0)
    await leases_of(cluster).acquire_latest("a", HOUR_MS, [bucket_of(cluster)], principal=None)
    for snapshot_id in range(1, 4):
        await take(cluster, snapshot_id)
    again = await cluster.restart()
    await settled(again)
    assert kept(again) == [0, 2, 3]
    assert files_below(tmp_path) >= paths_of(leased)
    await again.stop()


async def test_a_start_drops_what_lost_its_lease_just_before(cluster: Cluster) -> None:
    await take(cluster, 0)
    await leases_of(cluster).acquire_latest("a", HOUR_MS, [bucket_of(cluster)], principal=None)
    for snapshot_id in range(1, 4):
        await take(cluster, snapshot_id)
    await cluster.coordinator.remote.snapshots.retentions.stop()
    await leases_of(cluster).drop("a", principal=None)
    assert kept(cluster) == [0, 2, 3]
    again = await cluster.restart()
    await settled(again)
    assert kept(again) == [2, 3]
    await again.stop()


async def test_many_freed_buckets_are_dropped_from_in_one_transaction(cluster: Cluster) -> None:
    buckets = [bucket_of(cluster, i) for i in range(50)]
    for bucket in buckets:
        await take(cluster, 0, bucket=bucket)
    await leases_of(cluster).acquire_latest("a", HOUR_MS, buckets, principal=None)
    for bucket in buckets:
        for snapshot_id in (1, 2):
            await take(cluster, snapshot_id, bucket=bucket)
    groups: list[int] = []
    transact = cluster.store.transact

    async def counted(ops: Sequence[Op]) -> None:
        groups.append(sum("/remote/" in op.path for op in ops))
        await transact(ops)

    cluster.store.transact = counted  # type: ignore[method-assign]
    await leases_of(cluster).drop("a", principal=None)
    await cluster.coordinator.remote.snapshots.retentions.settle()
    assert 50 in groups
    await settled(cluster)
    assert {tuple(kept(cluster, bucket)) for bucket in buckets} == {(1, 2)}


async def test_a_bucket_that_is_freed_while_it_is_looked_at_is_looked_at_again(
    cluster: Cluster,
) -> None:
    bucket, snapshots = bucket_of(cluster), cluster.coordinator.remote.snapshots
    for snapshot_id in range(2):
        await take(cluster, snapshot_id)
        lease_id = f"l{snapshot_id}"
        await leases_of(cluster).acquire_latest(lease_id, HOUR_MS, [bucket], principal=None)
    for snapshot_id in range(2, 4):
        await take(cluster, snapshot_id)
    gate, waiting = asyncio.Event(), asyncio.Event()
    retain = snapshots.retain

    async def slow(buckets: Sequence[TableBucket]) -> None:
        await retain(buckets)
        waiting.set()
        await gate.wait()

    snapshots.retain = slow  # type: ignore[method-assign]
    await leases_of(cluster).drop("l0", principal=None)
    await waiting.wait()
    await leases_of(cluster).drop("l1", principal=None)
    gate.set()
    await settled(cluster)
    assert kept(cluster) == [2, 3]


async def test_the_size_of_a_snapshot_is_known_and_travels(cluster: Cluster) -> None:
    shared = await shared_file(cluster, bucket_of(cluster), "1.sst")
    await take(cluster, 0, (shared,))
    [handle] = cluster.coordinator.remotes.get(bucket_of(cluster)).snapshots
    assert handle.size == 100 + 2 * 5
    again = await cluster.restart()
    [read] = again.coordinator.remotes.get(bucket_of(again)).snapshots
    assert read.size == 110
    remote = BucketRemote(bucket_of(again), snapshots=(read,))
    assert remote_from_proto(remote_to_proto(remote)).snapshots[0].size == 110
    await again.stop()


def test_a_snapshot_of_an_older_version_has_no_size() -> None:
    value = b'{"next_snapshot":4,"snapshots":[[3,17,1,"kv/z"]],"dropped":[],"kv_usage":[]}'
    [handle] = BucketRecord.from_json(value).snapshots
    assert handle == SnapshotHandle(3, 17, 1, "kv/z", 55)  # what it is does not depend on it
    assert handle.size == 0
