"""Leases of key-value snapshots for synchronous code, derived from `AsyncKvSnapshotLease`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from zufluss.client.lease.lease import AsyncKvSnapshotLease
from zufluss.client.sync.facade import BlockFacade, calls, documented_by, waits
from zufluss.errors import ZuflussError
from zufluss.model.lease import LeasedSnapshot, Revoked, Unavailable
from zufluss.model.table import TableBucket


@documented_by(AsyncKvSnapshotLease)
class KvSnapshotLease(BlockFacade[AsyncKvSnapshotLease]):
    """A lease of key-value snapshots; `admin.kv_snapshot_lease(…)` opens it.

    Leaving its block drops the lease. It is renewed in the background, whatever the caller's
    thread does.

    >>> with admin.kv_snapshot_lease("fluss.orders") as lease:  # doctest: +SKIP
    ...     for bucket in lease.snapshots:
    ...         with table.kv_snapshot(bucket, lease=lease) as reader:
    ...             print(sum(batch.num_rows for batch in reader))
    """

    @property
    def lease(self) -> AsyncKvSnapshotLease:
        """The lease on the connection's own loop."""
        return self._twin

    @property
    def lease_id(self) -> str:
        """The lease's id; another process can take the lease over with it."""
        return self._twin.lease_id

    @property
    def epoch(self) -> int | None:
        """Grows with each take-over; None while the lease holds nothing."""
        return self._twin.epoch

    @property
    def snapshots(self) -> Mapping[TableBucket, LeasedSnapshot]:
        """The leased snapshot of each bucket, revoked ones included."""
        return self._twin.snapshots

    @property
    def unavailable(self) -> Mapping[TableBucket, Unavailable]:
        """Requested buckets that had no snapshot, with the reason."""
        return self._twin.unavailable

    @property
    def revoked(self) -> Sequence[Revoked]:
        """Tables and partitions that were dropped, with their leased snapshots."""
        return self._twin.revoked

    @property
    def resumed(self) -> bool:
        """True if the snapshots were taken over from an earlier process."""
        return self._twin.resumed

    @property
    def remaining_ms(self) -> int:
        return self._twin.remaining_ms

    @property
    def lost(self) -> ZuflussError | None:
        return self._twin.lost

    check = calls(AsyncKvSnapshotLease.check)
    renew = waits(AsyncKvSnapshotLease.renew)
    verify = waits(AsyncKvSnapshotLease.verify)
    release = waits(AsyncKvSnapshotLease.release)
    detach = waits(AsyncKvSnapshotLease.detach)
    close = waits(AsyncKvSnapshotLease.close)
