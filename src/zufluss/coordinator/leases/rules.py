"""Leases of key-value snapshots as plain values, and the checks of calls, without I/O.

| property of a lease | rule |
|---|---|
| id | 1 to 128 characters of `A-Za-z0-9._:-`, not `.` or `..`: it is part of a path |
| duration | from 1 ms to `zufluss.kv.snapshot.lease.duration-max` |
| owner | the principal that created it; only the owner and super users may use it |
| epoch | grows with each takeover, see `leases/epochs.py`; calls of other epochs are fenced |
| deadline | seconds of a monotonic clock: no jump of the wall clock ends or prolongs a lease |

A lease whose record cannot be read is *damaged*. It holds every snapshot that it may hold until it
is dropped.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from zufluss.cluster.remote import SnapshotHandle
from zufluss.errors import (
    AuthorizationError,
    ConfigError,
    CorruptRecordError,
    KvSnapshotLeaseFencedError,
    KvSnapshotLeaseNotFoundError,
)
from zufluss.model.lease import LOG_OFFSET_UNKNOWN, LeasedSnapshot, Revoked, Unavailable
from zufluss.model.table import TableBucket

LEASE_ID_CHARS_MAX = 128
"""Longest id of a lease."""

_LEASE_ID = re.compile(rf"[A-Za-z0-9._:-]{{1,{LEASE_ID_CHARS_MAX}}}")


class SnapshotPin(NamedTuple):
    """A snapshot that a lease holds."""

    snapshot_id: int
    """Its number."""
    location_id: int
    """Where its `_METADATA` lies."""
    log_offset: int = LOG_OFFSET_UNKNOWN
    """The changelog continues from this offset."""
    size: int = 0
    """Bytes of its files; 0 where that is not known."""

    @classmethod
    def of(cls, handle: SnapshotHandle) -> SnapshotPin:
        """The pin of a kept snapshot."""
        return cls(handle.snapshot_id, handle.metadata_location, handle.log_offset, handle.size)

    @property
    def leased(self) -> LeasedSnapshot:
        """The snapshot as clients see it."""
        return LeasedSnapshot(self.snapshot_id, self.log_offset)


@dataclass(frozen=True, slots=True)
class LeasedTable:
    """The part of a lease that belongs to one table. Immutable."""

    pins: Mapping[TableBucket, SnapshotPin] = field(default_factory=dict)
    """One snapshot per bucket."""
    revoked: Mapping[int | None, str] = field(default_factory=dict)
    """Names of the revoked partitions by id; the key None stands for the whole table."""
    size: int = 0
    """Bytes of the snapshots."""

    @classmethod
    def of(
        cls, pins: Mapping[TableBucket, SnapshotPin], revoked: Mapping[int | None, str]
    ) -> LeasedTable:
        """Compute the size from the pins."""
        return cls(pins, revoked, sum(pin.size for pin in pins.values()))

    @property
    def is_empty(self) -> bool:
        """Whether there are neither pins nor revocations."""
        return not self.pins and not self.revoked


@dataclass(slots=True)
class Lease:
    """A lease, in memory."""

    lease_id: str
    """Its id."""
    owner: str | None
    """The principal that made it; None for one without authentication."""
    epoch: int
    """Grows with each takeover."""
    created_ms: int
    """When it was created, epoch milliseconds; for display only."""
    duration_ms: int
    """The duration that the last acquire or renewal asked for."""
    deadline: float
    """When it ends, in seconds of the monotonic clock."""
    tables: dict[int, LeasedTable] = field(default_factory=dict)
    """Its pins and revocations by table id."""
    stored_at: float = float("-inf")
    """When the store last got the time it has left, on the monotonic clock."""
    damage: str | None = None
    """Why its record cannot be read; None for a sound lease."""
    owner_known: bool = True
    """Whether its owner can be read."""
    unreadable: frozenset[int] = frozenset()
    """Tables whose pins cannot be read, so that all of their snapshots are held."""
    holds_all: bool = False
    """Whether its tables cannot be read either, so that all snapshots are held."""
    paths: frozenset[str] = frozenset()
    """The paths of a damaged lease in the metadata store."""

    def remaining_ms(self, now: float) -> int:
        """Milliseconds until its deadline."""
        return max(0, round((self.deadline - now) * 1000))

    def is_over(self, now: float) -> bool:
        """Whether its deadline has passed; never true for a damaged lease."""
        return self.damage is None and now >= self.deadline

    @property
    def title(self) -> str:
        """How messages call the lease."""
        return f"lease {self.lease_id!r}"

    def fenced(self, epoch: int) -> KvSnapshotLeaseFencedError:
        """The error for a call of another epoch."""
        return KvSnapshotLeaseFencedError(
            f"{self.title} was taken over: the call has epoch {epoch}, the lease {self.epoch}; "
            "stop reading with it, or acquire it without an epoch to take it back"
        )

    @property
    def revoked(self) -> list[Revoked]:
        """Everything that was revoked from it."""
        return [
            Revoked(table_id, partition_id, what)
            for table_id, table in self.tables.items()
            for partition_id, what in table.revoked.items()
        ]


@dataclass(frozen=True, slots=True)
class AcquireResult:
    """The answer to an acquire."""

    epoch: int | None
    """The epoch of the lease; None if no lease was created, since nothing was available."""
    remaining_ms: int
    """How long the lease lasts without another call; 0 without a lease."""
    leased: dict[TableBucket, LeasedSnapshot] = field(default_factory=dict)
    """The leased snapshots of the call; all of the lease if the call named no buckets."""
    unavailable: dict[TableBucket, Unavailable] = field(default_factory=dict)
    """Buckets whose snapshot could not be leased, and why."""
    revoked: list[Revoked] = field(default_factory=list)
    """Everything that was revoked from the lease."""


@dataclass(frozen=True, slots=True)
class RenewResult:
    """The answer to a renewal."""

    remaining_ms: int
    """How long the lease lasts without another call."""
    revoked: list[Revoked] = field(default_factory=list)
    """Everything that was revoked from the lease."""


class TableShare(NamedTuple):
    """The size of the part of a lease that belongs to one table."""

    snapshots: int
    """Number of snapshots."""
    bytes: int
    """Bytes of their files."""


@dataclass(frozen=True, slots=True)
class LeaseInfo:
    """A lease as `zufluss lease list` shows it."""

    lease_id: str
    """Its id."""
    owner: str | None
    """The principal that created it; None without authentication."""
    epoch: int
    """Its epoch."""
    duration_ms: int
    """The duration that the last acquire or renewal asked for."""
    remaining_ms: int
    """The time it has left."""
    age_ms: int
    """Time since its creation."""
    tables: dict[int, TableShare]
    """Its size in each table, by table id."""
    leased: dict[TableBucket, LeasedSnapshot] = field(default_factory=dict)
    """Its snapshots; empty in a list of all leases."""
    revoked: list[Revoked] = field(default_factory=list)
    """Everything that was revoked from it."""
    damage: str | None = None
    """Why its record cannot be read; None for a sound lease."""


class LeaseCounts(NamedTuple):
    """All leases in numbers."""

    leases: int
    """Number of leases, the damaged ones included."""
    snapshots: int
    """Leased snapshots, each counted once."""
    bytes: int
    """Bytes of their files, each snapshot counted once."""
    oldest_age_seconds: float
    """Age of the oldest lease; 0 without leases."""
    damaged: int
    """Leases whose records cannot be read."""


def check_lease_id(lease_id: str) -> str:
    """Return the id; `ConfigError` if it is not a valid one."""
    if _LEASE_ID.fullmatch(lease_id) is None or lease_id in (".", ".."):
        raise ConfigError(
            f"{lease_id[:200]!r} is not the id of a lease: 1 to {LEASE_ID_CHARS_MAX} characters of "
            f"A-Z a-z 0-9 . _ : - are allowed, but not '.' or '..'"
        )
    return lease_id


def check_duration(duration_ms: int, most_ms: int) -> int:
    """Return the duration; `ConfigError` if it is not allowed."""
    if not 1 <= duration_ms <= most_ms:
        raise ConfigError(
            f"a lease cannot last {duration_ms} ms: 1 to {most_ms} are allowed "
            f"(zufluss.kv.snapshot.lease.duration-max); renew it to keep it longer"
        )
    return duration_ms


def check_owner_known(lease: Lease) -> None:
    """`AuthorizationError` for a damaged lease whose owner cannot be read."""
    if not lease.owner_known:
        raise AuthorizationError(
            f"nobody knows any more whose lease {lease.lease_id!r} is; a super user may drop it"
        )


def check_sound(lease: Lease) -> None:
    """`CorruptRecordError` for a damaged lease."""
    if lease.damage is not None:
        raise CorruptRecordError(
            f"lease {lease.lease_id!r} is damaged: {lease.damage}; its snapshots are held, but all "
            f"that can be done with it is to drop it; acquire another one"
        )


def check_count(count: int, most: int, owner: str | None) -> None:
    """`ConfigError` when an owner has as many leases as allowed."""
    if count >= most:
        raise ConfigError(
            f"{owner or 'an unknown user'} has {count} leases, at most {most} are allowed "
            f"(zufluss.kv.snapshot.lease.count-max); drop one"
        )


def check_size(size: int, before: int, most: int | None, table: str) -> None:
    """`ConfigError` when the leased snapshots of a table become larger than allowed."""
    if most is not None and size > most and size > before:
        raise ConfigError(
            f"the leased snapshots of {table} would have {size} bytes together, at most {most} are "
            "allowed (zufluss.kv.snapshot.lease.bytes-max); release others, or lease fewer buckets"
        )


def not_found(lease_id: str) -> KvSnapshotLeaseNotFoundError:
    """The error for a lease that does not exist, or has ended."""
    return KvSnapshotLeaseNotFoundError(
        f"there is no lease {lease_id!r}, or it has expired: its snapshots may be gone; acquire "
        f"again, and read from the beginning"
    )
