"""Tables and partitions that are dropped or expire while leases hold snapshots of them."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from tests.coordinator.remotes import (
    BY_DAY,
    KEYED,
    files_below,
    keyed_json,
    locations,
    segment,
    shared_file,
    snapshot,
)
from tests.coordinator.support import DAY_MS, Cluster, Seconds
from zufluss.cluster.image import PartitionEntry, PartitionGone
from zufluss.coordinator import records
from zufluss.coordinator.leases import records as lease_records
from zufluss.coordinator.leases.calls import LeaseCalls
from zufluss.errors import (
    ConfigError,
    KvSnapshotNotExistError,
    KvSnapshotRevokedError,
    TableNotExistError,
    UnknownTableOrBucketError,
)
from zufluss.meta.api import Put
from zufluss.model.schema import Schema
from zufluss.model.table import TableBucket, TableDescriptor
from zufluss.obs import metrics
from zufluss.obs.server import lease_samples, remote_files_samples
from zufluss.remote.locations import AlterOp
from zufluss.wire import messages as m
from zufluss.wire.api import ApiKey

HOUR_MS = 3_600_000
DAY_SECONDS = 86_400.0
REVOKE = {"zufluss.kv.snapshot.lease.on-drop": "revoke"}


@pytest_asyncio.fixture
async def cluster(tmp_path: Path, request: pytest.FixtureRequest) -> AsyncIterator[Cluster]:
    """A cluster with two locations, whose leases are counted by a clock that stands still."""
    conf = locations(tmp_path) | getattr(request, "param", {})
    cluster = Cluster(tmp_path / "meta", conf)
    cluster.seconds = Seconds()
    await cluster.start()
    yield cluster
    await cluster.stop()


revoking = pytest.mark.parametrize("cluster", [REVOKE], indirect=True, ids=["revoke"])


def leases(cluster: Cluster) -> LeaseCalls:
    return cluster.coordinator.leases


def pass_seconds(cluster: Cluster, seconds: float) -> None:
    assert isinstance(cluster.seconds, Seconds)
    cluster.seconds.now += seconds


async def fill(cluster: Cluster, bucket: TableBucket) -> None:
    """A committed snapshot, and a log segment beside it."""
    sst = await shared_file(cluster, bucket, "1.sst", 2)
    _, data = await snapshot(cluster, bucket, 0, [sst])
    await cluster.coordinator.remote.commit_snapshot(data, 0)
    await segment(cluster, bucket, 0, 10, 2)


async def keyed(cluster: Cluster) -> TableBucket:
    """The bucket of a new table, with a snapshot."""
    entry = await cluster.catalog.create_table(KEYED, keyed_json())
    bucket = TableBucket(entry.info.table_id, None, 0)
    await fill(cluster, bucket)
    return bucket


async def daily(cluster: Cluster, *days: str) -> list[TableBucket]:
    """The bucket of each partition of a new table, with snapshots."""
    await cluster.catalog.create_table(BY_DAY, keyed_json(("d",)))
    partitions = [await cluster.catalog.create_partition(BY_DAY, {"d": day}) for day in days]
    buckets = [bucket_of(partition) for partition in partitions]
    for bucket in buckets:
        await fill(cluster, bucket)
    return buckets


async def lease(cluster: Cluster, *buckets: TableBucket, duration_ms: int = 7 * DAY_MS) -> None:
    acquired = await leases(cluster).acquire_latest("reader", duration_ms, buckets, principal=None)
    assert set(acquired.leased) == set(buckets)


async def leased(cluster: Cluster) -> TableBucket:
    """The bucket of a new table, with a snapshot that the lease `reader` holds."""
    bucket = await keyed(cluster)
    await lease(cluster, bucket)
    return bucket


async def dropped_while_leased(cluster: Cluster) -> TableBucket:
    """The bucket of a table that was dropped after its snapshot was leased."""
    bucket = await leased(cluster)
    await cluster.catalog.drop_table(KEYED)
    await cleaned(cluster)
    return bucket


async def drop_lease(cluster: Cluster, lease_id: str = "reader") -> None:
    """Drop a lease, and have all files removed that nothing holds any more."""
    await leases(cluster).drop(lease_id, principal=None)
    await cleaned(cluster)


async def metadata(cluster: Cluster, bucket: TableBucket) -> m.GetKvSnapshotMetadataResponse:
    table_id, partition_id, bucket_id = bucket
    response: m.GetKvSnapshotMetadataResponse = await cluster.call(
        ApiKey.GET_KV_SNAPSHOT_METADATA,
        table_id=table_id,
        partition_id=partition_id,
        bucket_id=bucket_id,
        snapshot_id=0,
    )
    return response


async def cleaned(cluster: Cluster) -> None:
    await cluster.coordinator.remote.cleaner.drops.settle()


async def notes(cluster: Cluster) -> list[str]:
    return [note.path for note in await cluster.store.tree(records.DROPS_PATH)]


async def is_readable(cluster: Cluster, bucket: TableBucket) -> bool:
    """Whether every file that the snapshot's metadata names is there."""
    files = (await metadata(cluster, bucket)).snapshot_files
    paths = [Path(file.remote_path.removeprefix("file://")) for file in files]
    return len(paths) == 3 and all(path.is_file() for path in paths)


def remote_files(directory: Path) -> set[str]:
    return {path for path in files_below(directory) if path.startswith("l")}


async def test_files_of_a_dropped_table_stay_until_its_lease_is_released(
    cluster: Cluster, tmp_path: Path
) -> None:
    bucket = await leased(cluster)
    before = remote_files(tmp_path)
    await cluster.catalog.drop_table(KEYED)
    await cleaned(cluster)
    assert remote_files(tmp_path) == before
    assert await is_readable(cluster, bucket)
    await leases(cluster).release("reader", [bucket], principal=None)
    await cleaned(cluster)
    assert remote_files(tmp_path) == set()
    assert await notes(cluster) == []
    with pytest.raises(KvSnapshotNotExistError):
        await metadata(cluster, bucket)


async def test_files_of_a_dropped_table_go_when_its_lease_expires(
    cluster: Cluster, tmp_path: Path
) -> None:
    bucket = await keyed(cluster)
    await lease(cluster, bucket, duration_ms=HOUR_MS)
    await cluster.catalog.drop_table(KEYED)
    await cleaned(cluster)
    pass_seconds(cluster, 3600)
    await cluster.coordinator.lease_timer.expire()
    await cleaned(cluster)
    assert remote_files(tmp_path) == set()


async def test_a_dropped_table_waits_for_the_last_of_its_leases(
    cluster: Cluster, tmp_path: Path
) -> None:
    bucket = await leased(cluster)
    await leases(cluster).acquire_latest("other", HOUR_MS, [bucket], principal=None)
    await cluster.catalog.drop_table(KEYED)
    await drop_lease(cluster)
    assert await is_readable(cluster, bucket)
    await drop_lease(cluster, "other")
    assert remote_files(tmp_path) == set()


async def test_the_name_of_a_dropped_table_is_free_and_the_new_table_is_not_leased(
    cluster: Cluster, tmp_path: Path
) -> None:
    old = await dropped_while_leased(cluster)
    new = await keyed(cluster)
    assert new.table_id != old.table_id
    assert not leases(cluster).book.pins.holds(new.table_id)
    assert await is_readable(cluster, old)
    await drop_lease(cluster)
    assert remote_files(tmp_path)
    assert all(f"/keyed-{new.table_id}/" in path for path in remote_files(tmp_path))


async def test_nothing_of_a_dropped_table_can_be_leased_anew(cluster: Cluster) -> None:
    bucket = await leased(cluster)
    await cluster.catalog.drop_table(KEYED)
    with pytest.raises(UnknownTableOrBucketError):
        await leases(cluster).acquire_latest("other", HOUR_MS, [bucket], principal=None)


async def test_the_lease_of_a_dropped_table_is_revoked_when_its_time_is_over(
    cluster: Cluster, tmp_path: Path
) -> None:
    bucket = await dropped_while_leased(cluster)
    pass_seconds(cluster, DAY_SECONDS - 1)
    cluster.coordinator.remote.cleaner.drops.add(records.table_drop(bucket.table_id))
    await cleaned(cluster)
    assert await is_readable(cluster, bucket)
    pass_seconds(cluster, 1)
    cluster.coordinator.remote.cleaner.drops.add(records.table_drop(bucket.table_id))
    await cleaned(cluster)
    assert remote_files(tmp_path) == set()
    renewed = await leases(cluster).renew("reader", HOUR_MS, principal=None)
    assert [each.what for each in renewed.revoked] == [str(KEYED)]


async def test_nobody_has_to_ask_for_the_end_of_the_wait(tmp_path: Path) -> None:
    conf = locations(tmp_path) | {"zufluss.kv.snapshot.lease.drop-wait-max": "20ms"}
    cluster = await Cluster(tmp_path / "meta", conf).start()
    await leased(cluster)
    revoked = asyncio.Event()
    cluster.coordinator.freed.subscribe(lambda buckets: revoked.set())
    await cluster.catalog.drop_table(KEYED)
    await revoked.wait()
    await cleaned(cluster)
    assert remote_files(tmp_path) == set()
    await cluster.stop()


@revoking
async def test_with_revoke_a_drop_takes_the_snapshots_away_and_says_so(
    cluster: Cluster, tmp_path: Path
) -> None:
    bucket = await dropped_while_leased(cluster)
    assert remote_files(tmp_path) == set()
    with pytest.raises(KvSnapshotRevokedError, match=r"fluss\.keyed was dropped"):
        await metadata(cluster, bucket)
    taken = await leases(cluster).acquire_latest("reader", HOUR_MS, [], principal=None)
    assert (taken.leased, [each.what for each in taken.revoked]) == ({}, [str(KEYED)])
    again = await cluster.restart()
    with pytest.raises(KvSnapshotRevokedError, match=r"fluss\.keyed was dropped"):
        await metadata(again, bucket)
    await again.stop()
    await cluster.start()


@revoking
async def test_with_revoke_other_tables_of_the_lease_stay(cluster: Cluster, tmp_path: Path) -> None:
    bucket = await keyed(cluster)
    first, second = await daily(cluster, "a", "b")
    await lease(cluster, bucket, first, second)
    await cluster.catalog.drop_partition(BY_DAY, {"d": "a"})
    await cleaned(cluster)
    assert await is_readable(cluster, bucket)
    assert await is_readable(cluster, second)
    with pytest.raises(KvSnapshotRevokedError, match=r"fluss\.by_day\(p=a\) was dropped"):
        await metadata(cluster, first)
    renewed = await leases(cluster).renew("reader", HOUR_MS, principal=None)
    assert [each.partition_id for each in renewed.revoked] == [first.partition_id]


async def test_a_dropped_table_is_kept_for_its_lease_through_a_restart(
    cluster: Cluster, tmp_path: Path
) -> None:
    bucket = await leased(cluster)
    before = remote_files(tmp_path)
    await cluster.catalog.drop_table(KEYED)
    again = await cluster.restart()
    await cleaned(again)
    assert remote_files(tmp_path) == before
    assert await is_readable(again, bucket)
    await drop_lease(again)
    assert remote_files(tmp_path) == set()
    await again.stop()
    await cluster.start()


async def test_a_dropped_partition_is_kept_for_its_lease_and_its_neighbours_are_not_touched(
    cluster: Cluster, tmp_path: Path
) -> None:
    first, second, third = await daily(cluster, "a", "b", "c")
    await lease(cluster, first)
    for day in ("a", "b"):
        await cluster.catalog.drop_partition(BY_DAY, {"d": day})
    await cleaned(cluster)
    assert await is_readable(cluster, first)
    assert not any(f"/b-p{second.partition_id}/" in path for path in remote_files(tmp_path))
    await leases(cluster).release("reader", [first], principal=None)
    await cleaned(cluster)
    assert all(f"/c-p{third.partition_id}/" in path for path in remote_files(tmp_path))
    assert await is_readable(cluster, third)


async def test_leased_partitions_of_a_dropped_table_are_found_by_their_names(
    cluster: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(records, "NAMES_AT_ONCE", 2)
    buckets = await daily(cluster, "a", "b", "c")
    await lease(cluster, *buckets)
    await cluster.catalog.drop_partition(BY_DAY, {"d": "a"})
    await cluster.catalog.drop_table(BY_DAY)
    again = await cluster.restart()
    await cleaned(again)
    assert all([await is_readable(again, bucket) for bucket in buckets])
    await leases(again).release("reader", buckets[:2], principal=None)
    await cleaned(again)
    assert await is_readable(again, buckets[2])
    await leases(again).release("reader", buckets[2:], principal=None)
    await cleaned(again)
    assert remote_files(tmp_path) == set()
    assert await notes(again) == []
    await again.stop()
    await cluster.start()


async def test_the_sweep_leaves_what_leases_hold_of_a_dropped_table(
    cluster: Cluster, tmp_path: Path
) -> None:
    await dropped_while_leased(cluster)
    before = remote_files(tmp_path)
    cluster.clock.now_ms = int(time.time() * 1000) + 2 * DAY_MS
    await cluster.coordinator.remote.sweep.sweep()
    assert remote_files(tmp_path) == before


async def test_a_location_is_not_retired_with_files_of_a_dropped_table_that_is_leased(
    cluster: Cluster,
) -> None:
    await dropped_while_leased(cluster)
    registry = cluster.coordinator.locations
    assert {i: used.files for i, used in registry.live().items()} == {1: 3, 2: 5}
    assert registry.live()[2].bytes == 100 + 4 * 10
    await registry.alter(AlterOp.DRAIN, location_id=2)
    with pytest.raises(ConfigError, match="5 files"):
        await registry.alter(AlterOp.RETIRE, location_id=2)
    await drop_lease(cluster)
    await registry.alter(AlterOp.RETIRE, location_id=2)


async def test_a_location_is_not_retired_before_the_files_of_a_leased_drop_were_counted(
    cluster: Cluster,
) -> None:
    await leased(cluster)
    registry, cleaner = cluster.coordinator.locations, cluster.coordinator.remote.cleaner
    await registry.alter(AlterOp.DRAIN, location_id=2)
    await cleaner.drops.stop()  # it has other things to do
    await cluster.catalog.drop_table(KEYED)
    with pytest.raises(ConfigError, match="files"):
        await registry.alter(AlterOp.RETIRE, location_id=2)
    cleaner.drops.start()
    await cleaned(cluster)
    assert {i: used.files for i, used in registry.live().items()} == {1: 3, 2: 5}


async def test_a_start_does_not_leave_out_a_location_with_files_of_a_leased_drop(
    cluster: Cluster, tmp_path: Path
) -> None:
    await dropped_while_leased(cluster)
    await cluster.stop()
    fewer = Cluster(cluster.directory, locations(tmp_path, 1))
    fewer.seconds = cluster.seconds
    with pytest.raises(ConfigError, match="files"):
        await fewer.start()
    await fewer.store.close()
    await cluster.start()
    await drop_lease(cluster)
    await cluster.stop()
    await fewer.start()
    await fewer.stop()
    await cluster.start()


@pytest.mark.parametrize("waited", [False, True])
async def test_a_damaged_lease_keeps_a_dropped_table_until_it_is_dropped(
    cluster: Cluster, tmp_path: Path, waited: bool
) -> None:
    bucket = await leased(cluster)
    damaged = Put(lease_records.table_path("reader", bucket.table_id), b"no pins")
    await cluster.catalog.ledger.commit([damaged])
    await cluster.catalog.drop_table(KEYED)
    again = await cluster.restart()
    cleaner = again.coordinator.remote.cleaner
    await cleaned(again)
    assert len(remote_files(tmp_path)) == 8
    if waited:  # not even then: nobody knows what the lease holds
        pass_seconds(again, 2 * DAY_SECONDS)
        cleaner.drops.add(records.table_drop(bucket.table_id))
        await cleaned(again)
        assert len(remote_files(tmp_path)) == 8
        assert cleaner.drops.failures == 1
    assert cleaner.pending == 1
    registry = again.coordinator.locations
    await registry.alter(AlterOp.DRAIN, location_id=2)
    with pytest.raises(ConfigError, match="files"):
        await registry.alter(AlterOp.RETIRE, location_id=2)
    await leases(again).drop("reader", principal=None)
    cleaner.drops.hurry()
    await cleaned(again)
    assert remote_files(tmp_path) == set()
    await again.stop()
    await cluster.start()


async def test_tokens_open_a_dropped_table_as_long_as_a_lease_holds_it(cluster: Cluster) -> None:
    path = m.PbPhysicalTablePath(database_name=KEYED.database, table_name=KEYED.table)
    bucket = await dropped_while_leased(cluster)
    assert cluster.coordinator.held_drops.leased_tables(KEYED) == [bucket.table_id]
    assert await cluster.call(ApiKey.GET_FILESYSTEM_SECURITY_TOKEN, tables=[path])
    await drop_lease(cluster)
    with pytest.raises(TableNotExistError):
        await cluster.call(ApiKey.GET_FILESYSTEM_SECURITY_TOKEN, tables=[path])


async def test_the_metrics_say_what_leases_hold(cluster: Cluster) -> None:
    await leased(cluster)
    cluster.clock.now_ms += 5000
    await cluster.catalog.drop_table(KEYED)
    await cleaned(cluster)
    found = {each.metric: each.value for each in lease_samples(leases(cluster).book)()}
    assert found == {
        metrics.KV_SNAPSHOT_LEASES: 1,
        metrics.KV_SNAPSHOT_LEASED_SNAPSHOTS: 1,
        metrics.KV_SNAPSHOT_LEASED_BYTES: 110,
        metrics.KV_SNAPSHOT_LEASE_OLDEST_AGE_SECONDS: 5,
        metrics.KV_SNAPSHOT_LEASES_DAMAGED: 0,
    }
    found = {e.metric: e.value for e in remote_files_samples(cluster.coordinator.remote)()}
    assert found[metrics.CLEANER_PENDING] == 1


# Partitions that expire


async def expired(cluster: Cluster) -> PartitionEntry:
    """A partition of yesterday in a table that keeps one day, leased before the day ended."""
    properties = {
        "table.auto-partition.enabled": "true",
        "table.auto-partition.key": "d",
        "table.auto-partition.time-unit": "DAY",
        "table.auto-partition.time-zone": "UTC",
        "table.auto-partition.num-precreate": "0",
        "table.auto-partition.num-retention": "1",
    }
    schema = Schema.of("k INT, d STRING, v STRING", ("k", "d"))
    table = TableDescriptor(schema, bucket_count=1, partition_keys=("d",), properties=properties)
    await cluster.catalog.create_table(BY_DAY, table.to_json())
    entry = await cluster.catalog.create_partition(BY_DAY, {"d": "20240601"})
    bucket = bucket_of(entry)
    await fill(cluster, bucket)
    await lease(cluster, bucket)
    cluster.clock.now_ms += 2 * DAY_MS
    return entry


def bucket_of(entry: PartitionEntry) -> TableBucket:
    return TableBucket(entry.table_id, entry.partition_id, 0)


def gone(cluster: Cluster, entry: PartitionEntry) -> asyncio.Event:
    """Set when a partition was dropped."""
    event = asyncio.Event()

    def look(changes: Any) -> None:
        if PartitionGone(entry.partition_id) in changes:
            event.set()

    cluster.coordinator.changes.subscribe(look)
    return event


async def test_an_expired_partition_stays_as_it_is_while_it_is_leased(cluster: Cluster) -> None:
    entry = await expired(cluster)
    await cluster.coordinator.partitions.check()
    assert cluster.image.partition_by_id(entry.partition_id) == entry
    assert bucket_of(entry) in cluster.tablet.buckets
    assert await is_readable(cluster, bucket_of(entry))


async def test_an_expired_partition_goes_as_soon_as_its_lease_does(
    cluster: Cluster, tmp_path: Path
) -> None:
    entry = await expired(cluster)
    await cluster.coordinator.partitions.check()
    event = gone(cluster, entry)
    await leases(cluster).drop("reader", principal=None)
    await event.wait()
    await cleaned(cluster)
    assert remote_files(tmp_path) == set()


async def test_an_expired_partition_is_revoked_when_it_waited_long_enough(
    cluster: Cluster, tmp_path: Path
) -> None:
    entry = await expired(cluster)
    await cluster.coordinator.partitions.check()
    pass_seconds(cluster, DAY_SECONDS)
    await cluster.coordinator.partitions.check()
    await cleaned(cluster)
    assert cluster.image.partition_by_id(entry.partition_id) is None
    assert remote_files(tmp_path) == set()
    with pytest.raises(KvSnapshotRevokedError, match=r"by_day\(p=20240601\) was dropped"):
        await metadata(cluster, bucket_of(entry))


async def test_the_wait_begins_anew_when_a_partition_expires_again(cluster: Cluster) -> None:
    entry = await expired(cluster)
    await cluster.coordinator.partitions.check()
    cluster.clock.now_ms -= 2 * DAY_MS  # as if more days were kept
    pass_seconds(cluster, DAY_SECONDS)
    await cluster.coordinator.partitions.check()
    cluster.clock.now_ms += 2 * DAY_MS
    await cluster.coordinator.partitions.check()
    assert cluster.image.partition_by_id(entry.partition_id) is not None


async def test_the_wait_goes_on_when_the_table_of_an_expired_partition_is_altered(
    cluster: Cluster,
) -> None:
    entry = await expired(cluster)
    await cluster.coordinator.partitions.check()
    await cluster.catalog.alter_table(BY_DAY, lambda info: replace(info.descriptor, comment="c"))
    await cluster.coordinator.partitions.check([cluster.image.table(BY_DAY)])
    pass_seconds(cluster, DAY_SECONDS)
    await cluster.coordinator.partitions.check()
    assert cluster.image.partition_by_id(entry.partition_id) is None


@revoking
async def test_with_revoke_an_expired_partition_does_not_wait(
    cluster: Cluster, tmp_path: Path
) -> None:
    entry = await expired(cluster)
    await cluster.coordinator.partitions.check()
    await cleaned(cluster)
    assert remote_files(tmp_path) == set()
    with pytest.raises(KvSnapshotRevokedError):
        await metadata(cluster, bucket_of(entry))
