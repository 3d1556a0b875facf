"""Commits of remote-log manifests: fencing, retries, restarts, live counts."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from tests.coordinator.remotes import LOGGED, directory, locations, manifest, segment
from tests.coordinator.support import Cluster, table_json
from zufluss.cluster.remote import ManifestCommit, commit_to_proto
from zufluss.coordinator import records
from zufluss.coordinator.ledger import Ledger
from zufluss.errors import (
    ConfigError,
    ErrorCode,
    LeaderNotAvailableError,
    LocationMovedError,
    OffsetOutOfRangeError,
    TableNotExistError,
    UnknownTableOrBucketError,
    ZuflussError,
)
from zufluss.meta.api import Delete
from zufluss.model.table import TableBucket
from zufluss.remote import layout
from zufluss.remote.files import Usage
from zufluss.remote.locations import AlterOp
from zufluss.wire.api import ApiKey


@pytest_asyncio.fixture
async def cluster(tmp_path: Path) -> AsyncIterator[Cluster]:
    """A cluster with two locations and a log table of two buckets."""
    cluster = await Cluster(tmp_path / "meta", locations(tmp_path)).start()
    await cluster.catalog.create_table(LOGGED, table_json(buckets=2))
    yield cluster
    await cluster.stop()


@pytest.fixture
def bucket(cluster: Cluster) -> TableBucket:
    return TableBucket(cluster.image.table(LOGGED).info.table_id, None, 0)


async def committed(cluster: Cluster, bucket: TableBucket) -> ManifestCommit:
    """A first manifest with a segment of ten records."""
    made = await manifest(cluster, bucket, [await segment(cluster, bucket, 0, 10)])
    assert await cluster.coordinator.remote.commit_manifest(made)
    return made


async def known(cluster: Cluster, bucket: TableBucket) -> str | None:
    found = await cluster.coordinator.remote.bucket_remotes([bucket])
    return found[bucket].manifest_path if bucket in found else None


async def test_a_committed_manifest_counts_also_after_a_restart(
    cluster: Cluster, bucket: TableBucket
) -> None:
    made = await committed(cluster, bucket)
    again = await cluster.restart()
    found = (await again.coordinator.remote.bucket_remotes([bucket]))[bucket]
    assert (found.manifest_location, found.manifest_path) == (1, made.manifest_path)
    assert (found.remote_start_offset, found.remote_end_offset) == (0, 10)
    assert again.coordinator.remotes.live_usage() == {1: Usage(5, 40)}
    await again.stop()


async def test_the_same_commit_again_says_yes_again(cluster: Cluster, bucket: TableBucket) -> None:
    made = await committed(cluster, bucket)
    assert await cluster.coordinator.remote.commit_manifest(made)
    assert await known(cluster, bucket) == made.manifest_path


async def test_a_manifest_made_from_a_past_one_is_refused(
    cluster: Cluster, bucket: TableBucket
) -> None:
    first = await committed(cluster, bucket)
    second = await manifest(cluster, bucket, [], base=first.manifest_path)
    assert await cluster.coordinator.remote.commit_manifest(second)
    for base in (first.manifest_path, None):
        late = await manifest(cluster, bucket, [], base=base)
        assert not await cluster.coordinator.remote.commit_manifest(late)
    assert not await cluster.coordinator.remote.commit_manifest(first)
    assert await known(cluster, bucket) == second.manifest_path


@pytest.mark.parametrize("leader_epoch", [-1, 1])
async def test_another_leader_epoch_is_refused(
    cluster: Cluster, bucket: TableBucket, leader_epoch: int
) -> None:
    made = await manifest(cluster, bucket, [], leader_epoch=leader_epoch)
    assert not await cluster.coordinator.remote.commit_manifest(made)
    assert await known(cluster, bucket) is None


@pytest.mark.parametrize("end", [11, 10**15, 2**63 - 1])
async def test_a_manifest_beyond_the_high_watermark_is_refused(
    cluster: Cluster, bucket: TableBucket, end: int
) -> None:
    """A log that was lost would continue at that offset, and everything before it be gone."""
    first = await committed(cluster, bucket)
    more = await manifest(cluster, bucket, [], base=first.manifest_path)
    with pytest.raises(OffsetOutOfRangeError, match=f"ends at offset 10, .* cannot reach {end}"):
        await cluster.coordinator.remote.commit_manifest(replace(more, end_offset=end))
    assert await known(cluster, bucket) == first.manifest_path
    former = replace(more, leader_epoch=-1, end_offset=end)
    assert not await cluster.coordinator.remote.commit_manifest(former), "its epoch says enough"
    cluster.tablet.ends[bucket] = end
    assert await cluster.coordinator.remote.commit_manifest(replace(more, end_offset=end))


async def test_without_its_leader_a_new_end_is_refused_and_a_known_one_is_not(
    cluster: Cluster, bucket: TableBucket
) -> None:
    """The commit that is sent again after a lost answer, and one that only drops segments."""
    first = await committed(cluster, bucket)
    cluster.tablet.deaf = LeaderNotAvailableError("it restarts")
    assert await cluster.coordinator.remote.commit_manifest(first)
    dropped = await manifest(cluster, bucket, [], base=first.manifest_path)
    dropped = replace(dropped, start_offset=10, end_offset=10)
    assert await cluster.coordinator.remote.commit_manifest(dropped)
    more = await manifest(
        cluster, bucket, [await segment(cluster, bucket, 10, 20)], base=dropped.manifest_path
    )
    with pytest.raises(LeaderNotAvailableError, match="try again"):
        await cluster.coordinator.remote.commit_manifest(more)
    assert await known(cluster, bucket) == dropped.manifest_path
    cluster.tablet.deaf = None
    assert await cluster.coordinator.remote.commit_manifest(more)


async def test_another_coordinator_epoch_is_refused_on_the_wire(
    cluster: Cluster, bucket: TableBucket
) -> None:
    made = await manifest(cluster, bucket, [])
    key, epoch = ApiKey.COMMIT_REMOTE_LOG_MANIFEST, cluster.catalog.epoch
    with pytest.raises(ZuflussError) as refused:
        await cluster.call(key, **fields(made, epoch + 1))
    assert refused.value.code is ErrorCode.INVALID_COORDINATOR_EXCEPTION
    assert (await cluster.call(key, **fields(made, epoch))).commitSuccess
    answer = await cluster.call(
        ApiKey.GET_BUCKET_REMOTES,
        buckets=[{"table_id": bucket.table_id, "bucket_id": i} for i in (0, 1, 9)],
    )
    assert [remote.manifest_path for remote in answer.remotes] == [made.manifest_path]


def fields(made: ManifestCommit, epoch: int) -> dict[str, Any]:
    """The fields of the request."""
    return {field.name: value for field, value in commit_to_proto(made, epoch).ListFields()}


async def test_a_coordinator_that_was_replaced_commits_nothing(
    cluster: Cluster, bucket: TableBucket
) -> None:
    made = await manifest(cluster, bucket, [])
    await Ledger.open(cluster.store)  # another coordinator takes over
    with pytest.raises(ZuflussError) as refused:
        await cluster.coordinator.remote.commit_manifest(made)
    assert refused.value.code is ErrorCode.NOT_COORDINATOR_LEADER_EXCEPTION
    assert await known(cluster, bucket) is None


async def test_a_commit_is_finished_when_its_caller_goes_away(
    cluster: Cluster, bucket: TableBucket
) -> None:
    made = await manifest(cluster, bucket, [])
    call = asyncio.ensure_future(cluster.coordinator.remote.commit_manifest(made))
    await asyncio.sleep(0)  # it has begun
    call.cancel()
    await cluster.coordinator.remotes.tasks.settle()
    assert await known(cluster, bucket) == made.manifest_path


async def test_a_manifest_must_be_named_as_one_of_its_bucket(
    cluster: Cluster, bucket: TableBucket
) -> None:
    made = await manifest(cluster, bucket, [])
    other = directory(cluster, layout.LOG, bucket._replace(bucket_id=1))
    a_segment = await segment(cluster, bucket, 0, 1)
    for path in (
        layout.new_manifest(other),
        layout.new_manifest("log/elsewhere/logged-0/0"),
        "log/../../etc/passwd",
        a_segment.log.path,
    ):
        with pytest.raises(ConfigError):
            await cluster.coordinator.remote.commit_manifest(replace(made, manifest_path=path))
    with pytest.raises(ConfigError):
        await cluster.coordinator.remote.commit_manifest(replace(made, start_offset=1))


async def test_negative_counts_are_refused(cluster: Cluster, bucket: TableBucket) -> None:
    made = await manifest(cluster, bucket, [await segment(cluster, bucket, 0, 10)])
    for used in (Usage(-1, 0), Usage(1, -1)):
        with pytest.raises(ConfigError, match="negative"):
            await cluster.coordinator.remote.commit_manifest(replace(made, usage={1: used}))


async def test_files_in_a_retired_or_unknown_location_are_refused(
    cluster: Cluster, bucket: TableBucket
) -> None:
    await cluster.coordinator.locations.alter(AlterOp.DRAIN, location_id=2)
    await cluster.coordinator.locations.alter(AlterOp.RETIRE, location_id=2)
    made = await manifest(cluster, bucket, [])
    for location_id in (2, 3):
        with pytest.raises(ZuflussError) as refused:
            await cluster.coordinator.remote.commit_manifest(
                replace(made, usage={location_id: Usage(4, 40)})
            )
        assert refused.value.code is ErrorCode.STORAGE_EXCEPTION
    assert await known(cluster, bucket) is None


async def test_a_location_with_live_files_is_not_retired_and_the_count_is_named(
    cluster: Cluster, bucket: TableBucket
) -> None:
    first = await manifest(
        cluster, bucket, [await segment(cluster, bucket, 0, 10, location_id=2)], location_id=2
    )
    assert await cluster.coordinator.remote.commit_manifest(first)
    registry = cluster.coordinator.locations
    await registry.alter(AlterOp.DRAIN, location_id=2)
    with pytest.raises(ConfigError, match=r"\b5 files"):
        await registry.alter(AlterOp.RETIRE, location_id=2)
    second = await manifest(cluster, bucket, [], base=first.manifest_path)
    assert await cluster.coordinator.remote.commit_manifest(second)
    await registry.alter(AlterOp.RETIRE, location_id=2)


async def test_files_that_were_uploaded_before_a_move_are_refused_also_after_a_restart(
    cluster: Cluster, bucket: TableBucket, tmp_path: Path
) -> None:
    """They may lie at the former address. Version 0 is that of an older server."""
    registry = cluster.coordinator.locations
    earlier = await committed(cluster, bucket)
    later = await segment(cluster, bucket, 0, 20)
    made = await manifest(cluster, bucket, [later], base=earlier.manifest_path)
    uploaded = registry.locations.version
    shutil.copytree(tmp_path / "l1", tmp_path / "copy")
    await registry.alter(AlterOp.SET_WEIGHT, location_id=1, weight=0)
    await registry.alter(AlterOp.MOVE, location_id=1, uri=str(tmp_path / "copy"))
    moved = registry.locations.version
    await registry.alter(AlterOp.SET_WEIGHT, location_id=1, weight=1)
    again = await cluster.restart()
    for coordinator in (cluster.coordinator, again.coordinator):
        assert coordinator.locations.locations.moved_version == moved
    commit = again.coordinator.remote.commit_manifest
    for version in (0, uploaded, moved - 1):
        with pytest.raises(LocationMovedError, match=f"version {version} .* version {moved} "):
            await commit(replace(made, locations_version=version))
        assert await commit(replace(earlier, locations_version=version)), "it counted before"
    assert await known(again, bucket) == earlier.manifest_path
    assert await commit(replace(made, locations_version=moved))
    assert await commit(made), "the same again counts"
    await again.stop()


async def test_a_dropped_table_has_nothing_and_takes_nothing(
    cluster: Cluster, bucket: TableBucket
) -> None:
    made = await committed(cluster, bucket)
    await cluster.catalog.drop_table(LOGGED)
    assert await known(cluster, bucket) is None
    assert cluster.coordinator.remotes.live_usage() == {}
    with pytest.raises(UnknownTableOrBucketError):
        await cluster.coordinator.remote.commit_manifest(made)
    assert await cluster.store.tree("/tables") == []


async def test_a_table_of_an_older_version_gets_its_values_at_the_start(
    cluster: Cluster, bucket: TableBucket
) -> None:
    other = bucket._replace(bucket_id=1)
    await cluster.store.transact([Delete(records.bucket_remote(b)) for b in (bucket, other)])
    again = await cluster.restart()
    await committed(again, bucket)
    await again.catalog.drop_table(LOGGED)
    assert await again.store.tree("/tables") == []
    await again.stop()


async def test_a_damaged_value_stops_the_start_and_names_its_path(
    cluster: Cluster, bucket: TableBucket
) -> None:
    found = await cluster.store.read(records.bucket_remote(bucket))
    assert found is not None
    await cluster.store.compare_and_set(
        records.bucket_remote(bucket), b'{"manifest":3}', found.version
    )
    await cluster.stop()
    again = Cluster(cluster.directory)
    with pytest.raises(records.CatalogDamagedError, match=records.bucket_remote(bucket)):
        await again.start()
    await again.store.close()


async def test_manifests_are_listed_with_full_addresses(
    cluster: Cluster, bucket: TableBucket, tmp_path: Path
) -> None:
    made = await committed(cluster, bucket)
    key = ApiKey.LIST_REMOTE_LOG_MANIFESTS
    answer = await cluster.call(key, table_id=bucket.table_id)
    (found,) = answer.manifests
    assert found.remote_log_manifest_path == f"file://{tmp_path}/l1/{made.manifest_path}"
    assert found.remote_log_end_offset == 10
    with pytest.raises(TableNotExistError):
        await cluster.call(key, table_id=99)
