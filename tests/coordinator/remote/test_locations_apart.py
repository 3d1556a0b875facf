"""Remote locations and remote files with the roles apart: everything goes over messages."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio

from tests.coordinator.remotes import reached
from tests.coordinator.support import COORDINATOR, TABLET, call
from tests.coordinator.test_registration import Apart
from zufluss.cluster.remote import (
    BucketRemote,
    ManifestCommit,
    SnapshotHandle,
    commit_from_proto,
    commit_to_proto,
    home,
    metadata_file,
    remote_from_proto,
    remote_to_proto,
)
from zufluss.cluster.replicas import KvSnapshotOffset
from zufluss.coordinator.registration import SESSION_SECONDS
from zufluss.errors import ErrorCode, ZuflussError
from zufluss.model.table import TableBucket
from zufluss.remote.files import RemoteFile, Usage
from zufluss.remote.health import HealthReport
from zufluss.remote.locations import AlterOp, Health
from zufluss.remote.snapshot import KvSnapshot, SnapshotFile
from zufluss.wire import messages as m
from zufluss.wire.api import ApiKey

BUCKET = TableBucket(0, None, 1)


@pytest_asyncio.fixture
async def apart(tmp_path: Path) -> AsyncIterator[Apart]:
    apart = Apart(tmp_path / "meta", {"remote.data.dirs": f"{tmp_path}/a,{tmp_path}/b"})
    await apart.start_coordinator()
    yield apart
    await apart.stop_coordinator()


async def test_a_server_learns_the_locations_when_it_joins_and_when_they_change(
    apart: Apart, tmp_path: Path
) -> None:
    await apart.link.join()
    assert apart.tablet.locations is not None
    assert [x.uri for x in apart.tablet.locations.locations] == [
        f"file://{tmp_path}/a",
        f"file://{tmp_path}/b",
    ]
    await apart.coordinator.locations.alter(AlterOp.ADD, uri=f"{tmp_path}/c", weight=4)
    assert apart.tablet.locations.get(3).weight == 4
    assert apart.tablet.locations.version == apart.coordinator.locations.locations.version
    await apart.create_table()
    entry = next(apart.image.tables())
    assert entry.remote_location == next(apart.coordinator.image.tables()).remote_location
    assert home(apart.tablet.locations, entry.remote_location).uri in {
        x.uri for x in apart.tablet.locations.locations
    }


async def test_a_change_does_not_wait_for_a_server_that_is_gone(
    apart: Apart, tmp_path: Path
) -> None:
    await apart.link.join()
    apart.to_tablet.down = True
    await apart.coordinator.locations.alter(AlterOp.ADD, uri=f"{tmp_path}/c")
    assert apart.tablet.locations is not None
    assert len(apart.tablet.locations.locations) == 2
    apart.to_tablet.down = False
    await apart.link.join()
    assert len(apart.tablet.locations.locations) == 3


async def test_a_server_that_missed_a_change_of_the_locations_learns_it_with_a_heartbeat(
    apart: Apart, tmp_path: Path
) -> None:
    """It went on with the old address of a location, and its commits were refused for ever."""
    await apart.link.join()
    apart.to_tablet.down = True
    await apart.coordinator.locations.alter(AlterOp.ADD, uri=f"{tmp_path}/c")
    await apart.link.heartbeat()
    assert apart.tablet.locations is not None
    assert apart.tablet.locations.version == apart.coordinator.locations.locations.version
    apart.tablet.locations = None
    await apart.link.heartbeat()
    assert apart.tablet.locations is None, "it is sent once"


async def test_locations_of_another_registration_are_refused(apart: Apart) -> None:
    await apart.link.join()
    request = m.UpdateLocationsRequest(
        coordinator_epoch=apart.coordinator.catalog.epoch,
        server_epoch=apart.link.server_epoch - 1,
        locations=apart.coordinator.locations.locations.to_proto(),
    )
    with pytest.raises(ZuflussError) as refused:
        await call(apart.tablet_services, ApiKey.UPDATE_LOCATIONS, request)
    assert refused.value.code is ErrorCode.INVALID_COORDINATOR_EXCEPTION


async def test_heartbeats_tell_what_a_server_saw_until_it_leaves(apart: Apart) -> None:
    report = HealthReport(2, Health.SUSPECT, 5, 500, 1, 9.5, 0.5, "slow down")
    apart.reports = [report]
    await apart.link.join()
    await apart.link.heartbeat()

    async def seen() -> dict[int, list[HealthReport]]:
        services = apart.to_coordinator.services
        found = await call(services, ApiKey.LIST_LOCATIONS, m.ListLocationsRequest())
        by_server: dict[int, list[HealthReport]] = {}
        for location in found.locations:
            for each in location.servers:
                reports = by_server.setdefault(each.server_id, [])
                reports.append(HealthReport.from_proto(each.report))
        return by_server

    found = await seen()
    assert found[TABLET.node_id] == [report]
    assert [each.location_id for each in found[COORDINATOR.node_id]] == [1, 2]
    apart.seconds.now += SESSION_SECONDS + 1
    assert apart.coordinator.registrations is not None
    await apart.coordinator.registrations.expire()
    assert TABLET.node_id not in await seen()


async def test_the_coordinator_answers_what_the_cluster_is_configured_to_for_a_tablet_server(
    apart: Apart,
) -> None:
    await apart.link.join()
    found = await call(
        apart.tablet_services,
        ApiKey.DESCRIBE_CLUSTER_CONFIGS,
        m.DescribeClusterConfigsRequest(),
    )
    assert "remote.data.dirs" in {each.config_key for each in found.configs}


async def test_from_where_on_a_changelog_is_needed_reaches_its_holder(apart: Apart) -> None:
    await apart.link.join()
    offset = KvSnapshotOffset(BUCKET, 17, (TABLET.node_id,))
    await apart.coordinator.tablets.notify_kv_snapshot_offset([offset])
    assert apart.tablet.snapshot_offsets[BUCKET].min_retain_offset == 17
    request = m.NotifyKvSnapshotOffsetRequest(
        table_id=0, bucket_id=1, coordinator_epoch=999, min_retain_offset=3
    )
    with pytest.raises(ZuflussError) as refused:
        await call(apart.tablet_services, ApiKey.NOTIFY_KV_SNAPSHOT_OFFSET, request)
    assert refused.value.code is ErrorCode.INVALID_COORDINATOR_EXCEPTION
    assert apart.tablet.snapshot_offsets[BUCKET].min_retain_offset == 17


async def test_a_manifest_committed_over_the_wire_counts_and_is_found_again(apart: Apart) -> None:
    await apart.link.join()
    await apart.create_table()
    entry = next(apart.image.tables())
    bucket = TableBucket(entry.info.table_id, None, 1)
    directory = f"log/fluss/events-{entry.info.table_id}/1/metadata"
    first = f"{directory}/{'0' * 8}-0000-0000-0000-{'0' * 12}.manifest"
    second = f"{directory}/{'0' * 8}-0000-0000-0000-{'1' * 12}.manifest"
    epoch = entry.buckets[1].leader_epoch
    usage = {1: Usage(4, 400)}
    reached(apart, bucket, 20)
    commit = ManifestCommit(bucket, epoch, 1, first, 0, 10, usage)
    assert await apart.client.commit_manifest(commit)
    found = await apart.client.bucket_remotes([bucket, TableBucket(99, None, 0)])
    assert found == {bucket: BucketRemote(bucket, 1, first, 0, 10)}
    stale = ManifestCommit(bucket, epoch, 1, second, 0, 20, usage, "another")
    assert not await apart.client.commit_manifest(stale)
    assert apart.coordinator.locations.live_files() == {1: 5}
    with pytest.raises(ZuflussError):
        await apart.client.commit_snapshot(b"{", epoch)


async def test_remote_files_may_be_asked_for_by_many_at_once(apart: Apart) -> None:
    await apart.link.join()
    answers = await asyncio.gather(*(apart.client.bucket_remotes([BUCKET]) for _ in range(20)))
    assert answers == [{}] * 20


@pytest.mark.parametrize("base", [None, "log/x.manifest"])
@pytest.mark.parametrize("partition_id", [None, 7])
def test_a_commit_survives_the_wire(base: str | None, partition_id: int | None) -> None:
    bucket = TableBucket(3, partition_id, 2)
    usage = {1: Usage(4, 400), 5: Usage(8, 1 << 40)}
    commit = ManifestCommit(bucket, 2, 5, "log/y.manifest", 10, 20, usage, base, 17)
    message = commit_to_proto(commit, 4)
    assert message.coordinator_epoch == 4
    assert commit_from_proto(type(message).FromString(message.SerializeToString())) == commit


@pytest.mark.parametrize(
    "remote",
    [
        BucketRemote(BUCKET),
        BucketRemote(BUCKET, 2, "log/y.manifest", 0, 0),
        BucketRemote(
            TableBucket(1, 2, 3), next_snapshot_id=4, snapshots=(SnapshotHandle(3, 17, 1, "kv/z"),)
        ),
    ],
)
def test_what_a_bucket_has_survives_the_wire(remote: BucketRemote) -> None:
    message = remote_to_proto(remote)
    assert remote_from_proto(type(message).FromString(message.SerializeToString())) == remote


def test_the_metadata_of_a_snapshot_lies_with_its_private_files() -> None:
    private = SnapshotFile("CURRENT", RemoteFile(3, "kv/fluss/t-1/0/snap-4/uuid", 16, 1))
    shared = SnapshotFile("7.sst", RemoteFile(1, "kv/fluss/t-1/0/shared/uuid", 16, 1))
    snapshot = KvSnapshot(BUCKET, 4, 17, (shared,), (private,), 32)
    assert metadata_file(snapshot) == (3, "kv/fluss/t-1/0/snap-4/_METADATA")
