"""The sweep deletes what nothing refers to, and nothing else."""

from __future__ import annotations

import os
import time
import uuid
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio

from tests.coordinator.remotes import (
    KEYED,
    LOGGED,
    directory,
    files_below,
    keyed_json,
    locations,
    manifest,
    paths_of,
    put,
    segment,
    shared_file,
    snapshot,
    storage,
)
from tests.coordinator.support import DAY_MS, Cluster, table_json
from zufluss.cluster.remote import metadata_file
from zufluss.coordinator.ledger import Ledger
from zufluss.model.table import TableBucket
from zufluss.remote import layout
from zufluss.remote.errors import LocationUnavailableError
from zufluss.remote.manifest import RemoteSegment


@pytest_asyncio.fixture
async def cluster(tmp_path: Path) -> AsyncIterator[Cluster]:
    """A cluster with two locations, and a clock two days ahead of the files'."""
    cluster = await Cluster(tmp_path / "meta", locations(tmp_path)).start()
    cluster.clock.now_ms = int(time.time() * 1000) + 2 * DAY_MS
    await cluster.catalog.create_table(LOGGED, table_json())
    await cluster.catalog.create_table(KEYED, keyed_json())
    yield cluster
    await cluster.stop()


@pytest.fixture
def logged(cluster: Cluster) -> TableBucket:
    return TableBucket(cluster.image.table(LOGGED).info.table_id, None, 0)


@pytest.fixture
def keyed(cluster: Cluster) -> TableBucket:
    return TableBucket(cluster.image.table(KEYED).info.table_id, None, 0)


async def sweep(cluster: Cluster) -> int:
    """Sweep once; returns the number of deleted files."""
    before = cluster.coordinator.remote.sweep.counts.deleted_files
    await cluster.coordinator.remote.sweep.sweep()
    return cluster.coordinator.remote.sweep.counts.deleted_files - before


def remote_files(directory: Path) -> set[str]:
    return {p for p in files_below(directory) if p.startswith("l")}


def names(made: RemoteSegment) -> set[str]:
    return {f"l{file.location_id}/{file.path}" for file in made.files}


async def test_uploads_whose_commit_never_came_go_from_every_location(
    cluster: Cluster, logged: TableBucket, keyed: TableBucket, tmp_path: Path
) -> None:
    used = await segment(cluster, logged, 0, 10, location_id=2)
    first = await manifest(cluster, logged, [used])
    assert await cluster.coordinator.remote.commit_manifest(first)
    shared = await shared_file(cluster, keyed, "1.sst", location_id=2)
    made, data = await snapshot(cluster, keyed, 0, (shared,))
    await cluster.coordinator.remote.commit_snapshot(data, 0)
    wanted = names(used) | {f"l1/{first.manifest_path}"} | paths_of(made)
    for location_id in (1, 2):
        await segment(cluster, logged, 10, 20, location_id)
        await manifest(cluster, logged, [], location_id=location_id)
        await shared_file(cluster, keyed, "2.sst", location_id)
        await snapshot(cluster, keyed, 1, location_id=location_id)
        await put(
            cluster, location_id, f"{directory(cluster, layout.KV, keyed)}/snap-0/{uuid.uuid4()}"
        )
    await put(cluster, 1, used.log.path)  # the copy of an upload that failed over
    assert await sweep(cluster) == 2 * (4 + 1 + 1 + 3 + 1) + 1
    assert remote_files(tmp_path) == wanted
    assert await sweep(cluster) == 0


async def test_a_coordinator_that_was_replaced_deletes_nothing(
    cluster: Cluster, logged: TableBucket, tmp_path: Path
) -> None:
    """It does not know what its successor has committed since, such as these files."""
    await segment(cluster, logged, 0, 10)
    before = remote_files(tmp_path)
    await Ledger.open(cluster.store)
    result = await cluster.coordinator.remote.sweep.sweep()
    assert any("another coordinator" in failure for failure in result.failures)
    assert remote_files(tmp_path) == before != set()


async def test_a_young_file_and_a_strange_one_stay(
    cluster: Cluster, keyed: TableBucket, tmp_path: Path
) -> None:
    await shared_file(cluster, keyed, "young.sst")
    young = remote_files(tmp_path)
    cluster.clock.now_ms = int(time.time() * 1000) + DAY_MS - 60_000
    strange = [
        "kv/notes.txt",
        f"{directory(cluster, layout.KV, keyed)}/shared/readme",
        f"{directory(cluster, layout.LOG, keyed)}/{uuid.uuid4()}/1.log",
        "elsewhere/file",
    ]
    for path in strange:
        await put(cluster, 1, path)
        os.utime(tmp_path / "l1" / path, (0, 0))
    assert await sweep(cluster) == 0
    assert remote_files(tmp_path) == young | {f"l1/{path}" for path in strange}
    cluster.clock.now_ms += 2 * DAY_MS
    assert await sweep(cluster) == 1


async def test_files_of_dropped_tables_go_and_of_unborn_ones_stay(
    cluster: Cluster, keyed: TableBucket, tmp_path: Path
) -> None:
    await shared_file(cluster, keyed, "1.sst")
    await cluster.catalog.drop_table(KEYED)
    await cluster.coordinator.remote.cleaner.drops.settle()
    late = f"kv/fluss/keyed-{keyed.table_id}/0/shared/{uuid.uuid4()}"
    unborn = f"kv/fluss/keyed-{keyed.table_id + 1}/0/shared/{uuid.uuid4()}"
    partition = f"kv/fluss/keyed-{keyed.table_id}/a-p5/0/shared/{uuid.uuid4()}"
    elsewhere = f"log/other/logged-0/0/{uuid.uuid4()}/{0:020d}.log"
    for path in (late, unborn, partition, elsewhere):
        await put(cluster, 2, path)
    assert await sweep(cluster) == 2
    assert remote_files(tmp_path) == {f"l2/{unborn}", f"l2/{partition}"}


async def test_files_stay_that_a_location_lists_with_other_letters_of_their_database(
    cluster: Cluster, logged: TableBucket, tmp_path: Path
) -> None:
    """A directory of macOS has one name for `fluss` and `Fluss`: that of the first."""
    used = await segment(cluster, logged, 0, 10)
    first = await manifest(cluster, logged, [used])
    assert await cluster.coordinator.remote.commit_manifest(first)
    database = tmp_path / "l1" / "log" / "fluss"
    database.rename(database.with_name("Fluss"))
    database.symlink_to("Fluss")  # opened by both names, listed by one, as there
    assert await sweep(cluster) == 0


async def test_nothing_of_a_bucket_goes_while_its_documents_cannot_be_read(
    cluster: Cluster, logged: TableBucket, keyed: TableBucket, tmp_path: Path
) -> None:
    first = await manifest(cluster, logged, [await segment(cluster, logged, 0, 10)])
    assert await cluster.coordinator.remote.commit_manifest(first)
    made, data = await snapshot(cluster, keyed, 0)
    await cluster.coordinator.remote.commit_snapshot(data, 0)
    await segment(cluster, logged, 10, 20, 2)
    await shared_file(cluster, keyed, "2.sst", 2)
    again = await cluster.restart()
    for path in (first.manifest_path, metadata_file(made)[1]):
        (tmp_path / "l1" / path).write_bytes(b"{}")
    before = remote_files(tmp_path)
    assert await sweep(again) == 0
    assert again.coordinator.remote.sweep.counts.failures > 0
    assert remote_files(tmp_path) == before
    await again.stop()


async def test_nothing_goes_where_the_listing_failed(
    cluster: Cluster, keyed: TableBucket, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for location_id in (1, 2):
        for number in range(3):
            await shared_file(cluster, keyed, f"{number}.sst", location_id)
    whole = storage(cluster).objects(1).list

    async def half(prefix: str) -> AsyncIterator[object]:
        async for page in whole(prefix):
            yield page[:2]
            raise LocationUnavailableError("l1", prefix, "cut")

    monkeypatch.setattr(storage(cluster).objects(1), "list", half)
    assert await sweep(cluster) == 3
    left = remote_files(tmp_path)
    assert len(left) == 3
    assert all(p.startswith("l1/") for p in left)
    assert cluster.coordinator.remote.sweep.counts.failures == 1


async def test_a_snapshot_that_is_committed_during_the_sweep_keeps_its_files(
    cluster: Cluster, keyed: TableBucket, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shared = await shared_file(cluster, keyed, "1.sst")
    made, data = await snapshot(cluster, keyed, 0, (shared,))
    whole = storage(cluster).objects(1).list

    async def and_commit(prefix: str) -> AsyncIterator[object]:
        async for page in whole(prefix):
            yield page
        if prefix == layout.KV:
            await cluster.coordinator.remote.commit_snapshot(data, 0)

    monkeypatch.setattr(storage(cluster).objects(1), "list", and_commit)
    assert await sweep(cluster) == 0
    assert remote_files(tmp_path) == paths_of(made)
