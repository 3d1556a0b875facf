"""Leases of key-value snapshots, as an administrator sees them.

What `AsyncAdmin.kv_snapshot_leases` gives, and how it is read from the wire. Whoever reads with a
lease has another view of it, `lease/lease.py`.
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
    """How much a lease holds of a table."""

    table_id: int
    """The table's id."""
    table: str | None
    """`database.table`; None if it was dropped."""
    snapshots: int
    """How many snapshots."""
    bytes: int
    """The size of these snapshots."""


@dataclass(frozen=True, slots=True)
class KvSnapshotLeaseInfo:
    """A lease of key-value snapshots."""

    lease_id: str
    """Its id."""
    owner: str | None
    """Who made it; None without authentication."""
    epoch: int
    """Each take-over has a higher one."""
    duration_ms: int
    """For how long it was asked for last."""
    remaining_ms: int
    """How long it lasts if nobody renews it."""
    age_ms: int
    """How long ago it was made."""
    tables: tuple[KvSnapshotLeaseTable, ...] = ()
    """What it holds."""
    snapshots: Mapping[TableBucket, LeasedSnapshot] = field(default_factory=dict)
    """Its snapshots, if one lease was asked for."""
    revoked: tuple[Revoked, ...] = ()
    """What it held and lost, because that was dropped."""
    damage: str | None = None
    """What is wrong with its record, so that it holds everything until it is dropped."""


def leases_of(response: m.ListKvSnapshotLeasesResponse) -> list[KvSnapshotLeaseInfo]:
    """The leases of an answer, by id."""
    return sorted(map(_lease, response.leases), key=lambda lease: lease.lease_id)


def _lease(found: m.PbLease) -> KvSnapshotLeaseInfo:
    return KvSnapshotLeaseInfo(
        found.lease_id,
        found.owner if found.HasField("owner") else None,
        found.lease_epoch,
        found.duration_ms,
        found.remaining_ms,
        found.age_ms,
        tuple(map(_table, found.tables)),
        leased_of(found.leased),
        tuple(revoked_of(found.revoked)),
        found.damage if found.HasField("damage") else None,
    )


def _table(found: m.PbLeaseTable) -> KvSnapshotLeaseTable:
    name = found.table if found.HasField("table") else None
    return KvSnapshotLeaseTable(found.table_id, name, found.snapshots, found.bytes)
