"""Leases of key-value snapshots as an administrator sees them.

`AsyncAdmin.kv_snapshot_leases` returns these. `lease/lease.py` is the view of a reader that holds
a lease.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

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
