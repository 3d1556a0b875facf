"""Cleaning, sweeping and dropping snapshots where one location is an object store that fails."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
import pytest_asyncio

from tests.coordinator.remotes import KEYED, keyed_json, segment, shared_file, snapshot, storage
from tests.coordinator.support import DAY_MS, Cluster
from zufluss.coordinator import records
from zufluss.model.table import TableBucket
from zufluss.testing.proxy import Fault, FaultProxy
from zufluss.testing.s3 import S3Server, properties

DIRECTORY, STORE = 1, 2


@pytest.fixture(scope="module")
def s3() -> Iterator[S3Server]:
    with S3Server() as running:
        running.bucket("remote")
        yield running


@pytest.fixture
def proxy(s3: S3Server) -> Iterator[FaultProxy]:
    with FaultProxy("127.0.0.1", s3.port) as running:
        yield running


@pytest_asyncio.fixture
async def cluster(tmp_path: Path, proxy: FaultProxy) -> AsyncIterator[Cluster]:
    """A cluster with a directory and an object store, and a primary-key table."""
    conf = properties(proxy.endpoint) | {
        "remote.data.dirs": f"file://{tmp_path}/l1,s3://remote/{tmp_path.name}",
        "zufluss.remote.request-timeout": "2s",
    }
    cluster = await Cluster(tmp_path / "meta", conf).start()
    cluster.clock.now_ms = int(time.time() * 1000) + 2 * DAY_MS
    await cluster.catalog.create_table(KEYED, keyed_json())
    yield cluster
    await cluster.stop()


@pytest.fixture
def bucket(cluster: Cluster) -> TableBucket:
    return TableBucket(cluster.image.table(KEYED).info.table_id, None, 0)


async def paths(cluster: Cluster, location_id: int) -> set[str]:
    pages = storage(cluster).objects(location_id).list("")
    found = {found.path async for page in pages for found in page}
    return {path for path in found if not path.startswith(".zufluss-")}


async def test_a_dropped_table_is_cleaned_when_the_store_works_again(
    cluster: Cluster, bucket: TableBucket, proxy: FaultProxy
) -> None:
    for location_id in (DIRECTORY, STORE):
        await segment(cluster, bucket, 0, 10, location_id)
        await snapshot(cluster, bucket, 0, location_id=location_id)
    proxy.set([Fault("status_503")])
    await cluster.catalog.drop_table(KEYED)
    drops = cluster.coordinator.remote.cleaner.drops
    await drops.settle()
    assert await paths(cluster, DIRECTORY) == set()
    assert await cluster.store.read(records.table_drop(bucket.table_id)) is not None
    proxy.set([Fault("error_after_success", count=1)])
    drops.hurry()
    await drops.settle()
    assert await paths(cluster, STORE) == set()
    assert await cluster.store.tree(records.DROPS_PATH) == []


async def test_orphans_in_the_store_are_swept_and_a_failed_listing_deletes_nothing(
    cluster: Cluster, bucket: TableBucket, proxy: FaultProxy
) -> None:
    shared = await shared_file(cluster, bucket, "1.sst", STORE)
    made, data = await snapshot(cluster, bucket, 0, (shared,), location_id=STORE)
    await cluster.coordinator.remote.commit_snapshot(data, 0)
    wanted = await paths(cluster, STORE)
    await segment(cluster, bucket, 0, 10, STORE)
    await shared_file(cluster, bucket, "2.sst", STORE)
    proxy.set([Fault("status_503", methods=("GET",))])
    sweep = cluster.coordinator.remote.sweep
    await sweep.sweep()
    assert (sweep.counts.deleted_files, sweep.counts.failures) == (0, 2)
    proxy.set([])
    await sweep.sweep()
    assert sweep.counts.deleted_files == 5
    assert await paths(cluster, STORE) == wanted
    assert {each.file.path for each in made.files} < wanted


async def test_a_snapshot_whose_deletion_failed_goes_later(
    cluster: Cluster, bucket: TableBucket, proxy: FaultProxy
) -> None:
    deletions = cluster.coordinator.remote.snapshots.deletions
    for snapshot_id in range(2):
        _, data = await snapshot(cluster, bucket, snapshot_id, location_id=STORE)
        await cluster.coordinator.remote.commit_snapshot(data, 0)
    before = await paths(cluster, STORE)
    proxy.set([Fault("reset", methods=("POST", "DELETE"))])
    _, data = await snapshot(cluster, bucket, 2, location_id=DIRECTORY)
    await cluster.coordinator.remote.commit_snapshot(data, 0)
    await deletions.settle()
    assert await paths(cluster, STORE) == before
    proxy.set([])
    deletions.hurry()
    await deletions.settle()
    left = await paths(cluster, STORE)
    assert len(left) == 3
    assert all("/snap-1/" in path for path in left)
