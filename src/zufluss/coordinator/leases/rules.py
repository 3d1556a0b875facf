"""What holds of every lease of key-value snapshots: plain values and checks, without any I/O.

| value | what |
|---|---|
| id | 1 to 128 characters of `A-Za-z0-9._:-`, not `.` or `..`: it is part of a path |
| duration | from 1 ms to `zufluss.kv.snapshot.lease.duration-max` |
| owner | who made it; nobody else may use it, but for super users |
| epoch | one more with each takeover, see `leases/epochs.py`; a call with another one is fenced |
| deadline | seconds of a monotonic clock: no jump of the wall clock ends or prolongs a lease |

A lease whose record cannot be read is *damaged*. It holds what it may hold, for ever: only a drop
ends it.
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


class Pin(NamedTuple):
    """A snapshot that a lease holds."""

    snapshot_id: int
    """Its number."""
    location_id: int
    """Where its `_METADATA` lies."""
    log_offset: int = LOG_OFFSET_UNKNOWN
    """The changelog goes on from here."""
    size: int = 0
    """Bytes of its files; 0 where that is not known."""

    @classmethod
    def of(cls, handle: SnapshotHandle) -> Pin:
        """Of a snapshot that is kept."""
        return cls(handle.snapshot_id, handle.metadata_location, handle.log_offset, handle.size)

    @property
    def leased(self) -> LeasedSnapshot:
        """As clients see it."""
        return LeasedSnapshot(self.snapshot_id, self.log_offset)


@dataclass(frozen=True, slots=True)
class TableLease:
    """What a lease has of one table. Immutable: a change makes another one."""

    pins: Mapping[TableBucket, Pin] = field(default_factory=dict)
    """One snapshot per bucket."""
    revoked: Mapping[int | None, str] = field(default_factory=dict)
    """Names of the partitions that were taken away, by id; under None the whole table's."""
    size: int = 0
    """Bytes of the snapshots."""

    @classmethod
    def of(cls, pins: Mapping[TableBucket, Pin], revoked: Mapping[int | None, str]) -> TableLease:
        """With the size that the pins have."""
        return cls(pins, revoked, sum(pin.size for pin in pins.values()))

    @property
    def is_empty(self) -> bool:
        """Whether there is nothing to hold and nothing to tell."""
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
    """When it was made, epoch milliseconds; only for people."""
    duration_ms: int
    """As asked for last."""
    deadline: float
    """When it is over, in seconds of the monotonic clock."""
    tables: dict[int, TableLease] = field(default_factory=dict)
    """What it holds, by table id."""
    stored_at: float = float("-inf")
    """When the time it has left was last made durable, on the monotonic clock."""
    damage: str | None = None
    """What is wrong with its record; None for a sound one."""
    owner_known: bool = True
    """Whether its owner can be read."""
    unreadable: frozenset[int] = frozenset()
    """Tables whose pins cannot be read, so that everything of them is held."""
    holds_all: bool = False
    """Whether not even its tables are known, so that everything is held."""
    paths: frozenset[str] = frozenset()
    """Of a damaged one: what it has in the metadata store."""

    def remaining_ms(self, now: float) -> int:
        """The time it has left."""
        return max(0, round((self.deadline - now) * 1000))

    def is_over(self, now: float) -> bool:
        """Whether its time is up; never that of a damaged one."""
        return self.damage is None and now >= self.deadline

    @property
    def revoked(self) -> list[Revoked]:
        """What it lost."""
        return [
            Revoked(table_id, partition_id, what)
            for table_id, table in self.tables.items()
            for partition_id, what in table.revoked.items()
        ]


@dataclass(frozen=True, slots=True)
class Acquired:
    """The answer to an acquire."""

    epoch: int | None
    """The lease's; None when there is no lease, because nothing was leased."""
    remaining_ms: int
    """How long the lease lasts without another call; 0 without a lease."""
    leased: dict[TableBucket, LeasedSnapshot] = field(default_factory=dict)
    """What was leased for it; where nothing was asked for, all that the lease has."""
    unavailable: dict[TableBucket, Unavailable] = field(default_factory=dict)
    """Buckets that were asked for in vain."""
    revoked: list[Revoked] = field(default_factory=list)
    """What the lease lost."""


@dataclass(frozen=True, slots=True)
class Renewed:
    """The answer to a renewal."""

    remaining_ms: int
    """How long the lease lasts without another call."""
    revoked: list[Revoked] = field(default_factory=list)
    """What the lease lost."""


class TableShare(NamedTuple):
    """How much a lease holds of a table."""

    snapshots: int
    """Number of snapshots."""
    bytes: int
    """The size of their files."""


@dataclass(frozen=True, slots=True)
class LeaseInfo:
    """A lease, for people."""

    lease_id: str
    """Its id."""
    owner: str | None
    """Who made it; None without authentication."""
    epoch: int
    """Its epoch."""
    duration_ms: int
    """As asked for last."""
    remaining_ms: int
    """The time it has left."""
    age_ms: int
    """How long ago it was made."""
    tables: dict[int, TableShare]
    """What it holds, by table id."""
    leased: dict[TableBucket, LeasedSnapshot] = field(default_factory=dict)
    """Its snapshots, when one lease was asked for."""
    revoked: list[Revoked] = field(default_factory=list)
    """What it lost."""
    damage: str | None = None
    """What is wrong with its record; None for a sound one."""


class LeaseCounts(NamedTuple):
    """All leases in numbers."""

    leases: int
    """How many there are, the damaged ones included."""
    snapshots: int
    """Leased snapshots, each once."""
    bytes: int
    """The size of their files, each snapshot once."""
    oldest_age_seconds: float
    """How long ago the oldest lease was made; 0 where there is none."""
    damaged: int
    """Leases whose records cannot be read."""


def check_lease_id(lease_id: str) -> str:
    """The id itself; `ConfigError` when it cannot be one."""
    if _LEASE_ID.fullmatch(lease_id) is None or lease_id in (".", ".."):
        raise ConfigError(
            f"{lease_id[:200]!r} is not the id of a lease: 1 to {LEASE_ID_CHARS_MAX} characters of "
            f"A-Z a-z 0-9 . _ : - are allowed, but not '.' or '..'"
        )
    return lease_id


def check_duration(duration_ms: int, most_ms: int) -> int:
    """The duration itself; `ConfigError` when it is not allowed."""
    if not 1 <= duration_ms <= most_ms:
        raise ConfigError(
            f"a lease cannot last {duration_ms} ms: 1 to {most_ms} are allowed "
            f"(zufluss.kv.snapshot.lease.duration-max); renew it to keep it longer"
        )
    return duration_ms


def check_owner(lease: Lease, principal: str | None, is_super: bool) -> None:
    """`AuthorizationError` unless a principal may use a lease."""
    if is_super:
        return
    if not lease.owner_known:
        if principal is not None:
            raise AuthorizationError(
                f"nobody knows any more whose lease {lease.lease_id!r} is; a super user may drop it"
            )
    elif principal != lease.owner:
        raise AuthorizationError(
            f"lease {lease.lease_id!r} belongs to {lease.owner or 'an unknown user'}, not to "
            f"{principal or 'an unknown user'}; take an id of your own"
        )


def check_epoch(lease: Lease, epoch: int | None) -> None:
    """`KvSnapshotLeaseFencedError` when a call was made for another epoch; None is for any."""
    if epoch is not None and epoch != lease.epoch:
        raise KvSnapshotLeaseFencedError(
            f"lease {lease.lease_id!r} was taken over: the call has epoch {epoch}, the lease "
            f"{lease.epoch}; stop reading with it, or acquire it without an epoch to take it back"
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


def check_size(size: int, before: int, most: int | None, table_id: int) -> None:
    """`ConfigError` when the leased snapshots of a table become larger than allowed."""
    if most is not None and size > most and size > before:
        raise ConfigError(
            f"the leased snapshots of table {table_id} would have {size} bytes together, at most "
            f"{most} are allowed (zufluss.kv.snapshot.lease.bytes-max); release others, or lease "
            f"fewer buckets"
        )


def not_found(lease_id: str) -> KvSnapshotLeaseNotFoundError:
    """The error for a lease that there is not, or not any more."""
    return KvSnapshotLeaseNotFoundError(
        f"there is no lease {lease_id!r}, or it has expired: its snapshots may be gone; acquire "
        f"again, and read from the beginning"
    )
