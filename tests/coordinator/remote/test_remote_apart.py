"""Remote files with the roles apart: commits and questions go through the tablet server's link."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio

from tests.coordinator.remotes import (
    KEYED,
    LOGGED,
    keyed_json,
    locations,
    manifest,
    segment,
    shared_file,
    snapshot,
)
from tests.coordinator.support import call, table_json
from tests.coordinator.test_registration import Apart
from zufluss.errors import (
    ErrorCode,
    KvSnapshotNotExistError,
    OffsetOutOfRangeError,
    ZuflussError,
)
from zufluss.model.table import TableBucket
from zufluss.wire import messages as m
from zufluss.wire.api import ApiKey


@pytest_asyncio.fixture
async def apart(tmp_path: Path) -> AsyncIterator[Apart]:
    apart = Apart(tmp_path / "meta", locations(tmp_path))
    await apart.start_coordinator()
    await apart.link.join()
    await apart.coordinator.catalog.create_table(KEYED, keyed_json())
    yield apart
    await apart.stop_coordinator()


@pytest.fixture
def bucket(apart: Apart) -> TableBucket:
    return TableBucket(apart.coordinator.image.table(KEYED).info.table_id, None, 0)


async def test_a_tablet_server_asks_how_far_the_lake_is(tmp_path: Path) -> None:
    apart = Apart(tmp_path / "meta", {**locations(tmp_path), "datalake.format": "iceberg"})
    await apart.start_coordinator()
    await apart.link.join()
    coordinator = apart.coordinator
    table = await coordinator.catalog.create_table(
        LOGGED, table_json(buckets=2, properties={"table.datalake.enabled": "true"})
    )
    bucket = TableBucket(table.info.table_id, None, 1)
    for gateway in (apart.client, coordinator.remote):
        assert await gateway.lake_offset(LOGGED, bucket) == 0
    await apart.tiered(LOGGED, 1, {bucket: 7})
    for gateway in (apart.client, coordinator.remote):
        assert await gateway.lake_offset(LOGGED, bucket) == 7
        assert await gateway.lake_offset(LOGGED, bucket._replace(bucket_id=0)) == 0
    await apart.stop_coordinator()


async def test_a_tablet_server_commits_and_asks_what_counts(
    apart: Apart, bucket: TableBucket
) -> None:
    made = await manifest(apart, bucket, [await segment(apart, bucket, 0, 10)])
    assert await apart.client.commit_manifest(made)
    _, data = await snapshot(apart, bucket, 0, (await shared_file(apart, bucket, "1.sst"),))
    await apart.client.commit_snapshot(data, 0)
    found = await apart.client.bucket_remotes([bucket, bucket._replace(bucket_id=3)])
    assert found == await apart.coordinator.remote.bucket_remotes([bucket])
    assert found[bucket].manifest_path == made.manifest_path
    assert [s.snapshot_id for s in found[bucket].snapshots] == [0]


async def test_the_leader_is_asked_how_far_its_log_is(apart: Apart, bucket: TableBucket) -> None:
    made = await manifest(apart, bucket, [await segment(apart, bucket, 0, 10)])
    _, data = await snapshot(apart, bucket, 0, log_offset=10)
    apart.tablet.ends[bucket] = 9
    with pytest.raises(OffsetOutOfRangeError, match="ends at offset 9, a manifest cannot reach 10"):
        await apart.client.commit_manifest(made)
    with pytest.raises(OffsetOutOfRangeError, match="ends at offset 9, a snapshot cannot reach 10"):
        await apart.client.commit_snapshot(data, 0)
    assert await apart.client.bucket_remotes([bucket]) == {}
    apart.tablet.ends[bucket] = 10
    assert await apart.client.commit_manifest(made)
    await apart.client.commit_snapshot(data, 0)


async def test_clients_ask_a_tablet_server_about_snapshots(
    apart: Apart, bucket: TableBucket
) -> None:
    _, data = await snapshot(apart, bucket, 0)
    await apart.client.commit_snapshot(data, 0)
    latest = m.GetLatestKvSnapshotsRequest()
    latest.table_path.database_name, latest.table_path.table_name = KEYED
    answer = await call(apart.tablet_services, ApiKey.GET_LATEST_KV_SNAPSHOTS, latest)
    assert [s.snapshot_id for s in answer.latest_snapshots] == [0]
    asked = m.GetKvSnapshotMetadataRequest(table_id=bucket.table_id, bucket_id=0, snapshot_id=0)
    files = await call(apart.tablet_services, ApiKey.GET_KV_SNAPSHOT_METADATA, asked)
    assert len(files.snapshot_files) == 2
    asked.snapshot_id = 1
    with pytest.raises(KvSnapshotNotExistError):
        await call(apart.tablet_services, ApiKey.GET_KV_SNAPSHOT_METADATA, asked)


async def test_a_server_of_another_coordinators_time_is_refused_until_it_registers_again(
    apart: Apart, bucket: TableBucket
) -> None:
    _, data = await snapshot(apart, bucket, 0)
    await apart.stop_coordinator()
    await apart.start_coordinator()
    with pytest.raises(ZuflussError) as refused:
        await apart.client.commit_snapshot(data, 0)
    assert refused.value.code is ErrorCode.INVALID_COORDINATOR_EXCEPTION
    await apart.link.join()
    await apart.client.commit_snapshot(data, 0)
    assert len((await apart.client.bucket_remotes([bucket]))[bucket].snapshots) == 1


async def test_a_server_that_joins_learns_which_changelog_is_needed(
    apart: Apart, bucket: TableBucket
) -> None:
    _, data = await snapshot(apart, bucket, 0, log_offset=42)
    await apart.client.commit_snapshot(data, 0)
    await apart.stop_coordinator()
    await apart.start_coordinator()
    apart.tablet.snapshot_offsets.clear()
    apart.link = apart.new_link()
    await apart.link.join()
    await apart.coordinator.remote.snapshots.stop()
    assert apart.tablet.snapshot_offsets[bucket].min_retain_offset == 42
