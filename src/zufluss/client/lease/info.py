"""Leases of key-value snapshots as an administrator sees them.

`AsyncAdmin.kv_snapshot_leases` and `kv_snapshot_lease_usage` return these. `lease/lease.py` is the
view of a reader that holds a lease.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from zufluss.client.lease.wire import leased_of, revoked_of
from zufluss.model.lease import LeasedSnapshot, Revoked
from zufluss.model.table import TableBucket
from zufluss.wire import messages as m


@dataclass(frozen=True, slots=True)
class KvSnapshotLeaseTable:
    """The share of one table in a lease."""

    table_id: int
    """The table's id."""
    table: str | None
    """`database.table`; None after the table was dropped."""
    snapshots: int
    """Number of snapshots."""
    bytes: int
    """Size of these snapshots."""


@dataclass(frozen=True, slots=True)
class KvSnapshotLeaseInfo:
    """A lease of key-value snapshots."""

    lease_id: str
    """The lease's id."""
    owner: str | None
    """The user who created the lease; None without authentication."""
    epoch: int
    """Grows with each take-over."""
    duration_ms: int
    """The duration that the last renewal asked for."""
    remaining_ms: int
    """Time until the lease expires unless it is renewed."""
    age_ms: int
    """Time since the lease was created."""
    tables: tuple[KvSnapshotLeaseTable, ...] = ()
    """The tables of the leased snapshots."""
    snapshots: Mapping[TableBucket, LeasedSnapshot] = field(default_factory=dict)
    """The leased snapshots; empty in a list of all leases."""
    revoked: tuple[Revoked, ...] = ()
    """Tables and partitions that were dropped, with their leased snapshots."""
    damage: str | None = None
    """Why the lease's record is unreadable; then it holds every snapshot until it is dropped."""


@dataclass(frozen=True, slots=True)
class KvSnapshotLeaseUsage:
    """Bytes of files that only leases keep, because no retained snapshot has them."""

    table_id: int
    """The table's id."""
    table: str | None
    """`database.table`; None after the table was dropped."""
    owner: str | None
    """The owner of the leases; None without authentication, and in a sum over all owners."""
    lease_id: str | None
    """The lease; None in a sum over leases."""
    held_bytes: int
    """Bytes of files that these leases keep, maybe together with others; each file once."""
    freed_bytes: int
    """Bytes of the files that no other lease keeps: those that a drop of these leases frees."""
    uncounted_snapshots: int
    """Snapshots whose files are not counted, because their list could not be read."""


@dataclass(frozen=True, slots=True)
class KvSnapshotLeaseUsages:
    """What leases cost, by table, by owner and by lease."""

    tables: tuple[KvSnapshotLeaseUsage, ...]
    """One for each table."""
    owners: tuple[KvSnapshotLeaseUsage, ...]
    """One for each owner in each table."""
    leases: tuple[KvSnapshotLeaseUsage, ...]
    """One for each lease in each table."""

    def of_lease(self, lease_id: str) -> tuple[int, int]:
        """The bytes that a lease keeps, and those that dropping it frees."""
        rows = [row for row in self.leases if row.lease_id == lease_id]
        return sum(row.held_bytes for row in rows), sum(row.freed_bytes for row in rows)


def usages_of(answers: Sequence[m.GetKvSnapshotLeaseUsageResponse]) -> KvSnapshotLeaseUsages:
    """The sums of all answers."""
    return KvSnapshotLeaseUsages(
        _summed(row for answer in answers for row in answer.tables),
        _summed(row for answer in answers for row in answer.owners),
        _summed(row for answer in answers for row in answer.leases),
    )


def _summed(messages: Iterable[m.PbLeaseUsage]) -> tuple[KvSnapshotLeaseUsage, ...]:
    sums: dict[tuple[int, str | None, str | None], KvSnapshotLeaseUsage] = {}
    for message in messages:
        row = _usage(message)
        key = row.table_id, row.owner, row.lease_id
        before = sums.get(key)
        if before is not None:
            row = replace(
                row,
                held_bytes=row.held_bytes + before.held_bytes,
                freed_bytes=row.freed_bytes + before.freed_bytes,
                uncounted_snapshots=row.uncounted_snapshots + before.uncounted_snapshots,
            )
        sums[key] = row
    rows = sums.values()
    return tuple(
        sorted(rows, key=lambda row: (row.table or "", row.owner or "", row.lease_id or ""))
    )


def _usage(message: m.PbLeaseUsage) -> KvSnapshotLeaseUsage:
    return KvSnapshotLeaseUsage(
        message.table_id,
        message.table if message.HasField("table") else None,
        message.owner if message.HasField("owner") else None,
        message.lease_id if message.HasField("lease_id") else None,
        message.held_bytes,
        message.freed_bytes,
        message.uncounted_snapshots,
    )


def leases_of(response: m.ListKvSnapshotLeasesResponse) -> list[KvSnapshotLeaseInfo]:
    """The leases in an answer, by id."""
    return sorted(map(_lease, response.leases), key=lambda lease: lease.lease_id)


def _lease(message: m.PbLease) -> KvSnapshotLeaseInfo:
    return KvSnapshotLeaseInfo(
        message.lease_id,
        message.owner if message.HasField("owner") else None,
        message.lease_epoch,
        message.duration_ms,
        message.remaining_ms,
        message.age_ms,
        tuple(map(_table, message.tables)),
        leased_of(message.leased),
        tuple(revoked_of(message.revoked)),
        message.damage if message.HasField("damage") else None,
    )


def _table(message: m.PbLeaseTable) -> KvSnapshotLeaseTable:
    name = message.table if message.HasField("table") else None
    return KvSnapshotLeaseTable(message.table_id, name, message.snapshots, message.bytes)
