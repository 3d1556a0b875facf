"""Commits and retention of key-value snapshots, over real directories."""

from __future__ import annotations

import asyncio
import gc
import json
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
    paths_of,
    shared_file,
    snapshot,
)
from tests.coordinator.support import EVENTS, TABLET, Cluster, RecordingTablet, table_json
from zufluss.cluster.remote import metadata_file
from zufluss.errors import (
    ConfigError,
    CorruptRecordError,
    ErrorCode,
    KvSnapshotNotExistError,
    NonPrimaryKeyTableError,
    OffsetOutOfRangeError,
    PartitionNotExistError,
    TableNotPartitionedError,
    UnknownTableOrBucketError,
    ZuflussError,
)
from zufluss.model.table import TableBucket
from zufluss.remote.errors import LocationUnavailableError
from zufluss.remote.files import Usage
from zufluss.remote.locations import AlterOp
from zufluss.remote.snapshot import KvSnapshot, SnapshotFile
from zufluss.wire.api import ApiKey


@pytest_asyncio.fixture
async def cluster(tmp_path: Path) -> AsyncIterator[Cluster]:
    """A cluster with two locations and a primary-key table of one bucket."""
    cluster = await Cluster(tmp_path / "meta", locations(tmp_path)).start()
    await cluster.catalog.create_table(KEYED, keyed_json())
    yield cluster
    await cluster.stop()


@pytest.fixture
def bucket(cluster: Cluster) -> TableBucket:
    return TableBucket(cluster.image.table(KEYED).info.table_id, None, 0)


async def commit(cluster: Cluster, data: bytes, leader_epoch: int = 0) -> None:
    """Commit, and wait until the deletion of dropped snapshots was tried."""
    await cluster.coordinator.remote.commit_snapshot(data, leader_epoch)
    await cluster.coordinator.remote.snapshots.deletions.settle()


async def take(
    cluster: Cluster,
    bucket: TableBucket,
    snapshot_id: int,
    shared: tuple[SnapshotFile, ...] = (),
    location_id: int = 1,
) -> KvSnapshot:
    """A committed snapshot with all kinds of files."""
    made, data = await snapshot(
        cluster, bucket, snapshot_id, shared, location_id=location_id, writers=True
    )
    await commit(cluster, data)
    return made


async def kept(cluster: Cluster, bucket: TableBucket) -> list[int]:
    found = await cluster.coordinator.remote.bucket_remotes([bucket])
    return [s.snapshot_id for s in found[bucket].snapshots] if bucket in found else []


async def test_the_newest_snapshots_are_kept_and_the_files_of_others_go(
    cluster: Cluster, bucket: TableBucket, tmp_path: Path
) -> None:
    one, two, three = [await shared_file(cluster, bucket, f"{i}.sst", 1 + i % 2) for i in range(3)]
    first = await take(cluster, bucket, 0, (one, two))
    second = await take(cluster, bucket, 1, (two, three))
    assert files_below(tmp_path) >= paths_of(first) | paths_of(second)
    third = await take(cluster, bucket, 2, (three,))
    assert await kept(cluster, bucket) == [1, 2]
    locations_only = {p for p in files_below(tmp_path) if p.startswith(("l1/", "l2/"))}
    assert locations_only == paths_of(second) | paths_of(third)
    usage = cluster.coordinator.remotes.live_usage()
    assert usage == {1: Usage(9, 130), 2: Usage(1, 100)}


async def test_writers_that_lie_elsewhere_are_refused(
    cluster: Cluster, bucket: TableBucket
) -> None:
    """They would be deleted with this snapshot, although they belong to another one."""
    other = await shared_file(cluster, bucket, "1.sst")
    made, _ = await snapshot(cluster, bucket, 0, writers=True)
    wrong = replace(made, writers=other.file)
    with pytest.raises(ConfigError, match="is not a file of snapshot 0"):
        await commit(cluster, wrong.to_json("snap-0", lambda file: file.path))


async def test_what_counts_survives_a_restart_with_its_counts(
    cluster: Cluster, bucket: TableBucket
) -> None:
    await take(cluster, bucket, 0, (await shared_file(cluster, bucket, "1.sst"),))
    before = cluster.coordinator.remotes.live_usage()
    again = await cluster.restart()
    assert await kept(again, bucket) == [0]
    found = await again.coordinator.remote.bucket_remotes([bucket])
    assert found[bucket].next_snapshot_id == 1
    assert again.coordinator.remotes.live_usage() == before
    await again.stop()


async def test_a_shared_file_counts_once_in_the_first_commit_after_a_restart(
    cluster: Cluster, bucket: TableBucket
) -> None:
    """Deletions count again, but a crash may come before them."""
    shared = await shared_file(cluster, bucket, "1.sst")
    first = await take(cluster, bucket, 0, (shared,))
    again = await cluster.restart()
    await again.coordinator.remote.snapshots.deletions.stop()
    second, data = await snapshot(again, bucket, 1, (shared,), writers=True)
    await again.coordinator.remote.commit_snapshot(data, 0)
    (counted,) = again.coordinator.remotes.live_usage().values()
    assert counted.files == len(paths_of(first) | paths_of(second))
    await again.stop()


async def test_a_rough_count_is_made_exact_after_a_crash(
    cluster: Cluster, bucket: TableBucket, tmp_path: Path
) -> None:
    """A list that could not be read made the count too high until some later commit."""
    shared = await shared_file(cluster, bucket, "1.sst")
    first = await take(cluster, bucket, 0, (shared,))
    document = tmp_path / f"l1/{metadata_file(first)[1]}"
    away = document.rename(tmp_path / "away")
    again = await cluster.restart()
    await again.coordinator.remote.snapshots.deletions.stop()
    second, data = await snapshot(again, bucket, 1, (shared,))
    await again.coordinator.remote.commit_snapshot(data, 0)
    files = len(paths_of(first) | paths_of(second))
    (rough,) = again.coordinator.remotes.live_usage().values()
    assert rough.files == files + 1
    away.rename(document)
    after = await again.restart()
    await after.coordinator.remote.snapshots.deletions.settle()
    (exact,) = after.coordinator.remotes.live_usage().values()
    assert exact.files == files
    await after.stop()


async def test_the_same_commit_again_changes_nothing(cluster: Cluster, bucket: TableBucket) -> None:
    _, data = await snapshot(cluster, bucket, 0)
    await commit(cluster, data)
    usage = cluster.coordinator.remotes.live_usage()
    await commit(cluster, data)
    await commit(cluster, data, leader_epoch=7)
    assert await kept(cluster, bucket) == [0]
    assert cluster.coordinator.remotes.live_usage() == usage


async def test_a_snapshot_has_one_set_of_files_for_ever(
    cluster: Cluster, bucket: TableBucket
) -> None:
    await take(cluster, bucket, 0)
    _, other = await snapshot(cluster, bucket, 0)
    with pytest.raises(ZuflussError) as refused:
        await commit(cluster, other)
    assert refused.value.code is ErrorCode.INVALID_UPDATE_VERSION_EXCEPTION


async def test_ids_grow_and_offsets_never_go_back(cluster: Cluster, bucket: TableBucket) -> None:
    await take(cluster, bucket, 3)
    _, data = await snapshot(cluster, bucket, 2, log_offset=100)
    with pytest.raises(ZuflussError) as refused:
        await commit(cluster, data)
    assert refused.value.code is ErrorCode.INVALID_UPDATE_VERSION_EXCEPTION
    _, data = await snapshot(cluster, bucket, 4, log_offset=29)
    with pytest.raises(OffsetOutOfRangeError):
        await commit(cluster, data)
    assert await kept(cluster, bucket) == [3]


async def test_a_past_leader_and_a_past_coordinator_are_refused(
    cluster: Cluster, bucket: TableBucket
) -> None:
    _, data = await snapshot(cluster, bucket, 0)
    with pytest.raises(ZuflussError) as refused:
        await commit(cluster, data, leader_epoch=1)
    assert refused.value.code is ErrorCode.FENCED_LEADER_EPOCH_EXCEPTION
    request: dict[str, Any] = {"completed_snapshot": data, "bucket_leader_epoch": 0}
    epoch = cluster.catalog.epoch
    with pytest.raises(ZuflussError) as refused:
        await cluster.call(ApiKey.COMMIT_KV_SNAPSHOT, coordinator_epoch=epoch - 1, **request)
    assert refused.value.code is ErrorCode.INVALID_COORDINATOR_EXCEPTION
    assert await kept(cluster, bucket) == []
    await cluster.call(ApiKey.COMMIT_KV_SNAPSHOT, coordinator_epoch=epoch, **request)
    assert await kept(cluster, bucket) == [0]


async def test_files_that_are_not_the_snapshots_own_are_refused(
    cluster: Cluster, bucket: TableBucket
) -> None:
    await cluster.catalog.create_table(BY_DAY, keyed_json(("d",)))
    _, data = await snapshot(cluster, bucket, 0, (await shared_file(cluster, bucket, "1.sst"),))
    with pytest.raises(CorruptRecordError, match="checksum"):
        await commit(cluster, data.replace(b"/shared/", b"/snap-7/"))
    data = data[: data.rindex(b',"zufluss_crc32c"')] + b"}"  # nothing but what it says counts now
    for change in (
        ("/shared/", "/snap-7/"),
        ("kv/fluss/keyed-0/0/shared/", "kv/fluss/keyed-0/1/shared/"),
        ("kv/fluss/keyed-0/0/shared/", "kv/other/keyed-0/0/shared/"),
        ("kv/fluss/keyed-0/0/shared/", "log/fluss/keyed-0/0/shared/"),
    ):
        with pytest.raises(ConfigError):
            await commit(cluster, data.replace(change[0].encode(), change[1].encode()))
    with pytest.raises(CorruptRecordError):
        await commit(cluster, data[:-1])
    value = json.loads(data)
    value["kv_snapshot_handle"]["private_file_handles"] = []
    with pytest.raises(ConfigError, match="no private files"):
        await commit(cluster, json.dumps(value).encode())
    with pytest.raises(UnknownTableOrBucketError):
        await commit(cluster, data.replace(b'"table_id":0', b'"table_id":9'))
    assert await kept(cluster, bucket) == []


async def test_a_pinned_snapshot_stays_until_it_is_let_go(
    cluster: Cluster, bucket: TableBucket, tmp_path: Path
) -> None:
    snapshots, leases = cluster.coordinator.remote.snapshots, cluster.coordinator.leases
    shared = [await shared_file(cluster, bucket, f"{i}.sst") for i in range(5)]
    made = [await take(cluster, bucket, 0, (shared[0],))]
    await leases.acquire("reader", 60_000, {bucket: 0}, principal=None)
    made += [await take(cluster, bucket, i, (shared[i],)) for i in range(1, 5)]
    assert await kept(cluster, bucket) == [0, 3, 4]
    assert files_below(tmp_path) >= paths_of(made[0])
    assert cluster.tablet.snapshot_offsets[bucket].min_retain_offset == 0
    await leases.drop("reader", principal=None)
    await snapshots.retentions.settle()
    await snapshots.deletions.settle()
    assert await kept(cluster, bucket) == [3, 4]
    assert not files_below(tmp_path) & paths_of(made[0])


async def test_holders_learn_from_where_on_the_changelog_is_needed(
    cluster: Cluster, bucket: TableBucket
) -> None:
    for snapshot_id in range(3):
        await take(cluster, bucket, snapshot_id)
    await cluster.coordinator.remote.snapshots.stop()
    assert cluster.tablet.snapshot_offsets[bucket].min_retain_offset == 10
    newcomer = RecordingTablet()
    await cluster.coordinator.attach(TABLET, newcomer)
    await cluster.coordinator.remote.snapshots.stop()
    assert newcomer.snapshot_offsets[bucket].min_retain_offset == 10


async def test_nothing_is_deleted_while_a_kept_snapshot_cannot_be_read(
    cluster: Cluster, bucket: TableBucket, tmp_path: Path
) -> None:
    shared = await shared_file(cluster, bucket, "1.sst")
    made = [await take(cluster, bucket, i, (shared,)) for i in range(2)]
    again = await cluster.restart()
    location, path = metadata_file(made[1])
    metadata = tmp_path / f"l{location}" / path
    content = metadata.read_bytes()
    metadata.write_bytes(b"{}")
    made.append(await take(again, bucket, 2, (shared,)))
    assert await kept(again, bucket) == [1, 2]
    assert files_below(tmp_path) >= paths_of(made[0])
    metadata.write_bytes(content)
    deletions = again.coordinator.remote.snapshots.deletions
    deletions.hurry()
    await deletions.settle()
    assert not files_below(tmp_path) & (paths_of(made[0]) - paths_of(made[1]))
    assert files_below(tmp_path) >= paths_of(made[1]) | paths_of(made[2])
    await again.stop()


async def test_a_deletion_that_failed_goes_on_after_a_restart(
    cluster: Cluster, bucket: TableBucket, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    one, two = [await shared_file(cluster, bucket, f"{i}.sst", 1 + i) for i in range(2)]
    made = [await take(cluster, bucket, 0, (one, two)), await take(cluster, bucket, 1)]

    async def unavailable(paths: object) -> None:
        raise LocationUnavailableError("l2", "", "unplugged")

    storage = cluster.coordinator.locations.storage
    monkeypatch.setattr(storage.objects(2), "delete", unavailable)
    made.append(await take(cluster, bucket, 2))
    assert await kept(cluster, bucket) == [1, 2]
    assert f"l2/{two.file.path}" in files_below(tmp_path)
    assert 2 not in cluster.coordinator.remotes.live_usage()
    again = await cluster.restart()
    await again.coordinator.remote.snapshots.deletions.settle()
    assert not files_below(tmp_path) & paths_of(made[0])
    assert again.coordinator.remotes.get(bucket).dropped == ()
    await again.stop()


async def test_a_drained_location_empties_as_snapshots_go(
    cluster: Cluster, bucket: TableBucket
) -> None:
    there = await shared_file(cluster, bucket, "1.sst", location_id=2)
    await take(cluster, bucket, 0, (there,))
    registry = cluster.coordinator.locations
    await registry.alter(AlterOp.DRAIN, location_id=2)
    with pytest.raises(ConfigError, match=r"\b1 files?\b"):
        await registry.alter(AlterOp.RETIRE, location_id=2)
    here = await shared_file(cluster, bucket, "1.sst")
    for snapshot_id in (1, 2):
        await take(cluster, bucket, snapshot_id, (here,))
    await registry.alter(AlterOp.RETIRE, location_id=2)


async def test_clients_get_the_latest_snapshots_and_full_addresses(
    cluster: Cluster, bucket: TableBucket, tmp_path: Path
) -> None:
    shared = await shared_file(cluster, bucket, "000007.sst", location_id=2)
    made = [await take(cluster, bucket, i, (shared,)) for i in range(2)]
    path = {"database_name": "fluss", "table_name": "keyed"}
    latest = await cluster.call(ApiKey.GET_LATEST_KV_SNAPSHOTS, table_path=path)
    (found,) = latest.latest_snapshots
    assert (found.bucket_id, found.snapshot_id, found.log_offset) == (0, 1, 10)
    every = await cluster.call(ApiKey.LIST_KV_SNAPSHOTS, table_id=bucket.table_id)
    assert [s.snapshot_id for s in every.active_snapshots] == [0, 1]
    again = await cluster.restart()
    key = ApiKey.GET_KV_SNAPSHOT_METADATA
    asked: dict[str, Any] = {"table_id": bucket.table_id, "bucket_id": 0}
    answer = await again.call(key, snapshot_id=1, **asked)
    assert (answer.log_offset, answer.row_count) == (10, 7)
    files = {f.local_file_name: f for f in answer.snapshot_files}
    assert set(files) == {"000007.sst", "CURRENT", "MANIFEST-000004"}
    table_file = files["000007.sst"]
    assert table_file.remote_path == f"file://{tmp_path}/l2/{shared.file.path}"
    assert (table_file.size, table_file.crc32c) == (100, shared.file.crc32c)
    assert files["CURRENT"].remote_path == f"file://{tmp_path}/l1/{made[1].private[0].file.path}"
    for unknown in ({"snapshot_id": 2}, {"snapshot_id": 1, "bucket_id": 5}):
        with pytest.raises(KvSnapshotNotExistError):
            await again.call(key, **asked | unknown)
    await again.stop()


async def test_addresses_follow_a_location_that_moved(
    cluster: Cluster, bucket: TableBucket, tmp_path: Path
) -> None:
    await take(cluster, bucket, 0)
    (tmp_path / "l1").rename(tmp_path / "moved")
    await cluster.coordinator.locations.alter(AlterOp.DRAIN, location_id=1)
    await cluster.coordinator.locations.alter(
        AlterOp.MOVE, location_id=1, uri=f"file://{tmp_path}/moved"
    )
    answer = await cluster.call(
        ApiKey.GET_KV_SNAPSHOT_METADATA, table_id=bucket.table_id, bucket_id=0, snapshot_id=0
    )
    for file in answer.snapshot_files:
        assert Path(file.remote_path.removeprefix("file://")).is_file()
        assert "/moved/" in file.remote_path


async def test_questions_about_other_tables_are_refused(cluster: Cluster) -> None:
    await cluster.catalog.create_table(EVENTS, table_json())
    await cluster.catalog.create_table(BY_DAY, keyed_json(("d",)))
    key = ApiKey.GET_LATEST_KV_SNAPSHOTS

    def path(name: str) -> dict[str, str]:
        return {"database_name": "fluss", "table_name": name}

    with pytest.raises(NonPrimaryKeyTableError):
        await cluster.call(key, table_path=path("events"))
    with pytest.raises(TableNotPartitionedError):
        await cluster.call(key, table_path=path("keyed"), partition_name="1")
    for name in ({}, {"partition_name": "2026-01-01"}):
        with pytest.raises(PartitionNotExistError):
            await cluster.call(key, table_path=path("by_day"), **name)
    made = await cluster.catalog.create_partition(BY_DAY, {"d": "a"})
    answer = await cluster.call(key, table_path=path("by_day"), partition_name="a")
    assert answer.partition_id == made.partition_id
    assert [s.HasField("snapshot_id") for s in answer.latest_snapshots] == [False]
    with pytest.raises(PartitionNotExistError):
        await cluster.call(ApiKey.LIST_KV_SNAPSHOTS, table_id=made.table_id, partition_id=77)


@pytest.mark.parametrize("offset", [11, 10**15, 2**63 - 1])
async def test_a_snapshot_beyond_the_high_watermark_is_refused(
    cluster: Cluster, bucket: TableBucket, offset: int
) -> None:
    """The changelog before it would be deleted, and no later snapshot could be committed."""
    _, data = await snapshot(cluster, bucket, 0, log_offset=10)
    await commit(cluster, data)
    _, lie = await snapshot(cluster, bucket, 1, log_offset=offset)
    cluster.tablet.ends[bucket] = 10
    before = cluster.coordinator.remotes.get(bucket)
    with pytest.raises(OffsetOutOfRangeError, match=f"ends at offset 10, .* cannot reach {offset}"):
        await commit(cluster, lie)
    with pytest.raises(ZuflussError) as fenced:
        await commit(cluster, lie, leader_epoch=7)
    assert fenced.value.code is ErrorCode.FENCED_LEADER_EPOCH_EXCEPTION
    assert cluster.coordinator.remotes.get(bucket) is before
    cluster.tablet.ends[bucket] = offset
    await commit(cluster, lie)


async def test_a_commit_for_a_table_that_is_dropped_ends_quietly_without_its_caller(
    cluster: Cluster, bucket: TableBucket
) -> None:
    """The caller is the connection of a tablet server, which may close at any time."""
    reports: list[dict[str, Any]] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, report: reports.append(report))
    _, data = await snapshot(cluster, bucket, 0)
    remotes = cluster.coordinator.remotes
    async with remotes.turn:
        call = asyncio.ensure_future(commit(cluster, data))
        while not remotes.tasks.under_way:
            await asyncio.sleep(0)
        call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await call
        drop = asyncio.ensure_future(cluster.catalog.drop_table(KEYED))
        while cluster.image.leader(bucket) is not None:
            await asyncio.sleep(0)
    await remotes.tasks.settle()
    await drop
    gc.collect()
    assert reports == []
