"""Readers of key-value snapshots under a lease: they raise how the lease was lost."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from tests.client.fake import FakeCluster
from tests.client.keyed.test_snapshot_reader import (
    Snapshots,
    checkpoint,
    encoded,
    ids_and_names,
    keyed_table,
)
from tests.client.leases import FakeLeases
from zufluss.client.connection import AsyncConnection
from zufluss.client.keyed import snapshot_reader
from zufluss.client.lease.lease import AsyncKvSnapshotLease
from zufluss.client.table import AsyncTable
from zufluss.errors import (
    ConfigError,
    KvSnapshotLeaseFencedError,
    KvSnapshotLeaseNotFoundError,
    KvSnapshotNotExistError,
)
from zufluss.model.table import TableBucket
from zufluss.remote.errors import ObjectMissingError

ROWS = 100


class Place(NamedTuple):
    """A snapshot that is leased."""

    table: AsyncTable
    bucket: TableBucket
    directory: Path
    leases: FakeLeases
    lease: AsyncKvSnapshotLease


@pytest.fixture
async def place(
    cluster: FakeCluster,
    connection: AsyncConnection,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> AsyncIterator[Place]:
    monkeypatch.setattr(snapshot_reader, "BATCH_ROWS", ROWS // 4)
    info = keyed_table(cluster)
    directory = checkpoint(tmp_path, encoded(info, ids_and_names(ROWS)))
    bucket = Snapshots(cluster).add(info, directory)
    leases = FakeLeases(cluster)
    leases.held = {bucket: 0}
    async with await connection.admin.kv_snapshot_lease("keyed") as lease:
        yield Place(await connection.table("keyed"), bucket, directory, leases, lease)


async def rows_of(place: Place, **how: Any) -> int:
    async with await place.table.kv_snapshot(place.bucket, lease=place.lease, **how) as reader:
        return sum([batch.num_rows async for batch in reader])


async def test_the_lease_says_which_snapshot_is_read(place: Place) -> None:
    assert await rows_of(place) == ROWS
    assert await rows_of(place, snapshot_id=0, columns=["id"]) == ROWS
    with pytest.raises(ConfigError, match=r"holds snapshot 0 of .*, not 1; leave snapshot_id out"):
        await rows_of(place, snapshot_id=1)
    with pytest.raises(ConfigError, match="Give its snapshot_id, or a lease"):
        await place.table.kv_snapshot(place.bucket)
    other = place.bucket._replace(bucket_id=1)
    with pytest.raises(KvSnapshotNotExistError, match="holds no snapshot of"):
        await place.table.kv_snapshot(other, lease=place.lease)


async def test_a_reader_hands_out_no_batch_after_the_loss(place: Place) -> None:
    async with await place.table.kv_snapshot(place.bucket, lease=place.lease) as reader:
        assert await reader.next_batch() is not None
        place.leases.epochs[place.lease.lease_id] = 2
        with pytest.raises(KvSnapshotLeaseFencedError):
            await place.lease.renew()
        with pytest.raises(KvSnapshotLeaseFencedError):
            await reader.next_batch()
    assert reader.last_key is not None


async def test_a_lost_lease_opens_nothing(place: Place) -> None:
    await place.lease.close()
    with pytest.raises(KvSnapshotLeaseNotFoundError, match="it was closed"):
        await rows_of(place)


async def test_a_file_that_is_missing_is_explained_by_the_lease(place: Place) -> None:
    place.leases.epochs.clear()  # it expired, and the renewer has not noticed yet
    place.lease.check()
    next(place.directory.glob("*.sst")).unlink()
    with pytest.raises(KvSnapshotLeaseNotFoundError, match="there is no lease"):
        await rows_of(place)
    assert place.lease.lost is not None


async def test_a_file_that_is_missing_under_a_good_lease_is_missing(place: Place) -> None:
    next(place.directory.glob("*.sst")).unlink()
    with pytest.raises(ObjectMissingError):
        await rows_of(place)
    place.lease.check()


async def test_a_snapshot_that_is_unknown_is_explained_by_the_lease(
    cluster: FakeCluster, place: Place
) -> None:
    Snapshots(cluster)
    place.leases.epochs.clear()
    with pytest.raises(KvSnapshotLeaseNotFoundError):
        await rows_of(place)


async def test_the_lease_is_asked_before_each_file(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(snapshot_reader, "DOWNLOADS_AT_ONCE", 1)
    files = len([path for path in place.directory.iterdir() if path.suffix != ".json"])
    asked: list[TableBucket | None] = []
    check = place.lease.check

    def counted(bucket: TableBucket | None = None) -> None:
        asked.append(bucket)
        check(bucket)

    monkeypatch.setattr(place.lease, "check", counted)
    async with await place.table.kv_snapshot(place.bucket, lease=place.lease):
        assert asked == [place.bucket] * (files + 1)
