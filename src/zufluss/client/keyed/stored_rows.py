"""The rows of primary-key buckets in their key-value snapshots in remote storage.

Without `at` the newest snapshot of each bucket is read, under a lease that keeps it for the time of
the scan. With `at` the snapshot at exactly that offset is read; it is not leased, and a scan that
loses it fails. Files are downloaded when their bucket is read, and removed afterwards.

A bucket that was written to and has no snapshot yet cannot be read: leaving it out would look like
a table without these rows. A bucket that was never written to needs no snapshot.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Final

import pyarrow as pa

from zufluss.client.core.cluster import ClusterConnection
from zufluss.client.core.offsets import BucketPlace, list_offsets
from zufluss.client.keyed.rows import BucketRows, KvScanShape, RowPage, RowSource
from zufluss.client.keyed.snapshot_reader import AsyncKvSnapshotReader, open_snapshot
from zufluss.client.keyed.snapshots import KvSnapshotInfo, list_kv_snapshots
from zufluss.client.lease.lease import AsyncKvSnapshotLease, open_lease
from zufluss.errors import KvSnapshotNotExistError, PartitionNotExistError
from zufluss.model.lease import Unavailable
from zufluss.model.table import TableBucket, TableInfo

NAMED_MAX: Final = 5
"""Buckets without a snapshot that an error names."""


class StoredRows(RowSource):
    """Rows from key-value snapshots."""

    def __init__(self, connection: ClusterConnection, info: TableInfo, shape: KvScanShape) -> None:
        super().__init__()
        self._connection = connection
        self._info = info
        self._shape = shape
        self._chosen: dict[TableBucket, int] = {}
        self._lease: AsyncKvSnapshotLease | None = None

    async def open(
        self, places: Sequence[BucketPlace], at: Mapping[TableBucket, int] | None
    ) -> list[TableBucket]:
        """Choose a snapshot of each bucket."""
        if at is None:
            self.offsets = await self._open_latest(places)
        else:
            self.offsets = dict(at)
            snapshots = await self._snapshots({place.partition for place in places})
            self._chosen = _chosen(snapshots, self.offsets, self._connection.metadata.name_of)
        return [*self.offsets]

    async def _open_latest(self, places: Sequence[BucketPlace]) -> dict[TableBucket, int]:
        """Lease the newest snapshots; returns the offset of each."""
        if not places:
            return {}
        buckets = [place.bucket for place in places]
        lease = await open_lease(self._connection, buckets=buckets)
        self._lease = lease
        gone = [p for p in places if lease.unavailable.get(p.bucket) is Unavailable.NO_BUCKET]
        if gone:
            raise PartitionNotExistError(
                f"partition {gone[0].partition!r} of table {self._info.path} was just dropped"
            )
        await self._check_empty([p for p in places if p.bucket not in lease.snapshots])
        self._chosen = {bucket: held.snapshot_id for bucket, held in lease.snapshots.items()}
        offsets = {bucket: held.log_offset for bucket, held in lease.snapshots.items()}
        return dict.fromkeys(buckets, 0) | offsets

    async def _check_empty(self, places: Sequence[BucketPlace]) -> None:
        """Raise `KvSnapshotNotExistError` if one of these buckets was written to."""
        if not places:
            return
        ends = await list_offsets(self._connection, self._info, places, "latest")
        written = [place for place in places if ends[place.bucket]]
        if written:
            names = ", ".join(map(_name, written[:NAMED_MAX]))
            more = f" and {len(written) - NAMED_MAX} more" if len(written) > NAMED_MAX else ""
            raise KvSnapshotNotExistError(
                f"table {self._info.path}: {names}{more} has no key-value snapshot yet, so a scan "
                'of snapshots would leave its rows out; scan with source="live", or wait for '
                "the next snapshot (kv.snapshot.interval)"
            )

    async def _snapshots(self, partitions: set[str | None]) -> list[KvSnapshotInfo]:
        snapshots: list[KvSnapshotInfo] = []
        for partition in partitions:
            snapshots += await list_kv_snapshots(self._connection, self._info.path, partition)
        return snapshots

    def bucket(self, bucket: TableBucket) -> BucketRows:
        """The rows of an opened bucket."""
        return SnapshotPages(self, bucket, self._shape)

    async def reader(self, bucket: TableBucket) -> AsyncKvSnapshotReader | None:
        """Download the snapshot of a bucket; None if it has none."""
        number = self._chosen.get(bucket)
        if number is None:
            return None
        snapshot_id = None if self._lease is not None else number
        columns = self._shape.read.names
        return await open_snapshot(
            self._connection, self._info, bucket, snapshot_id, columns, None, self._lease
        )

    async def close(self) -> None:
        """Drop the lease."""
        lease, self._lease = self._lease, None
        if lease is not None:
            await lease.close()


class SnapshotPages(BucketRows):
    """The rows of one snapshot."""

    def __init__(self, rows: StoredRows, bucket: TableBucket, shape: KvScanShape) -> None:
        self._rows = rows
        self._bucket = bucket
        self._shape = shape
        self._reader: AsyncKvSnapshotReader | None = None
        self._begun = False

    async def next_page(self, limit: int | None) -> RowPage:
        """Read the next page; the first call downloads the snapshot."""
        if not self._begun:
            self._reader = await self._rows.reader(self._bucket)
            self._begun = True
        batch = None if self._reader is None else await self._reader.next_batch()
        if batch is None:
            return RowPage(pa.RecordBatch.from_pylist([], schema=self._shape.schema), True)
        return RowPage(self._shape.finish(batch), False)

    async def close(self) -> None:
        """Remove the downloaded files."""
        reader, self._reader = self._reader, None
        if reader is not None:
            await reader.close()


def _name(place: BucketPlace) -> str:
    bucket = f"bucket {place.bucket.bucket_id}"
    return bucket if place.partition is None else f"{bucket} of partition {place.partition}"


def _chosen(
    snapshots: Sequence[KvSnapshotInfo],
    offsets: Mapping[TableBucket, int],
    name_of: Callable[[TableBucket], str],
) -> dict[TableBucket, int]:
    """The newest snapshot of each bucket at its offset; offset 0 needs none.

    Raises `KvSnapshotNotExistError` if a bucket has no snapshot at its offset.
    """
    chosen = {
        snapshot.bucket: snapshot.snapshot_id
        for snapshot in sorted(snapshots, key=lambda snapshot: snapshot.snapshot_id)
        if offsets.get(snapshot.bucket) == snapshot.log_offset
    }
    for bucket, offset in offsets.items():
        if offset and bucket not in chosen:
            others = sorted(
                snapshot.log_offset for snapshot in snapshots if snapshot.bucket == bucket
            )
            raise KvSnapshotNotExistError(
                f"{name_of(bucket)} has no key-value snapshot at offset {offset}; kept are those "
                f'at {", ".join(map(str, others)) or "none"}. source="live" rebuilds the state at '
                "any offset that snapshots and changelog reach"
            )
    return chosen
