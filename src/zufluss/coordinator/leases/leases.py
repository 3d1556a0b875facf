"""Leases of key-value snapshots: readers say what they read, and for how long it must stay.

A lease has at most one snapshot per bucket. It exists as long as it pins something or has a
revocation to tell; it ends when the last bucket is released, by a drop, or when its time is over.
Nothing brings it back: who renews a lease that is over is told so.

The order of things, so that a snapshot that was answered is never deleted:

| step | why it is safe |
|---|---|
| find the snapshot and pin it | in one go, without an `await`; a bucket whose change is being committed at that moment is waited for, because that change was decided without the pin |
| write the lease | the pin counts already; it is taken back when the write failed |
| answer | what was answered is durable |
| free | after the durable end of a pin; then the snapshot is dropped at once (`remote/kv_snapshots.py`) |

How memory, store and time are kept the same is the business of `leases/book.py`.

A record that cannot be read fails closed: see `leases/rules.py`. Who may read a table is the
business of who calls (`leases/service.py`); whose lease it is, is checked here.
"""  # noqa: E501 - a table row does not wrap

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import structlog

from zufluss.clock import ClockMs, wall_ms
from zufluss.cluster.image import ClusterImage, PartitionEntry
from zufluss.config import options
from zufluss.config.load import Configuration
from zufluss.coordinator.bucket_remotes import BucketRemotes
from zufluss.coordinator.feed import Feed
from zufluss.coordinator.leases import records as lease_records
from zufluss.coordinator.leases.book import BUCKETS_AT_ONCE, LeaseBook, all_pins
from zufluss.coordinator.leases.rules import (
    Acquired,
    Lease,
    LeaseCounts,
    LeaseInfo,
    Pin,
    Renewed,
    TableLease,
    TableShare,
    check_count,
    check_duration,
    check_epoch,
    check_lease_id,
    check_owner,
    check_size,
    check_sound,
    not_found,
)
from zufluss.errors import NonPrimaryKeyTableError, UnknownTableOrBucketError
from zufluss.meta.api import MetaStore, Put
from zufluss.model.lease import LeasedSnapshot, Unavailable
from zufluss.model.table import TableBucket

log = structlog.get_logger(__name__)

ENCODED_AT_ONCE = 5_000
"""What a lease has of a table is encoded in a thread if it is more."""
Owner = tuple[int, int | None]
"""A table, or a partition of it, by id."""
IsSuper = Callable[[str | None], bool]
"""Whether a principal may use the leases of others."""


def nobody(principal: str | None) -> bool:
    """There are no super users."""
    return False


class _Call(NamedTuple):
    """Who does something to which lease."""

    lease_id: str
    principal: str | None
    epoch: int | None


@dataclass(slots=True)
class _Found:
    """What an acquire got."""

    new: dict[TableBucket, Pin] = field(default_factory=dict)
    leased: dict[TableBucket, LeasedSnapshot] = field(default_factory=dict)
    unavailable: dict[TableBucket, Unavailable] = field(default_factory=dict)

    async def add_all(self, pins: Iterable[tuple[TableBucket, Pin]]) -> None:
        """What a lease has already; others get their turn meanwhile."""
        for at, (bucket, pin) in enumerate(pins, 1):
            self.leased[bucket] = pin.leased
            if at % BUCKETS_AT_ONCE == 0:
                await asyncio.sleep(0)


class Leases:
    """All leases. Open it with `Leases.open`, before anything is deleted."""

    def __init__(
        self,
        store: MetaStore,
        remotes: BucketRemotes,
        freed: Feed[Sequence[TableBucket]],
        conf: Configuration,
        is_super: IsSuper,
        clock: Callable[[], float],
        clock_ms: ClockMs,
    ) -> None:
        interval_ms = conf.get(options.KV_SNAPSHOT_LEASE_EXPIRATION_CHECK_INTERVAL)
        self._book = LeaseBook(store, remotes, freed, clock, interval_ms / 1000)
        self.tasks = self._book.tasks
        """Changes of leases under way."""
        self.writer = self._book.writer
        """Makes changes durable."""
        self._remotes = remotes
        self._image: ClusterImage = remotes.image
        self._is_super = is_super
        self._clock = clock
        self._clock_ms = clock_ms
        self._duration_max_ms = conf.get(options.ZUFLUSS_KV_SNAPSHOT_LEASE_DURATION_MAX)
        self._count_max = conf.get(options.ZUFLUSS_KV_SNAPSHOT_LEASE_COUNT_MAX)
        self._bytes_max = conf.get(options.ZUFLUSS_KV_SNAPSHOT_LEASE_BYTES_MAX)

    @classmethod
    async def open(
        cls,
        store: MetaStore,
        remotes: BucketRemotes,
        freed: Feed[Sequence[TableBucket]],
        conf: Configuration,
        *,
        is_super: IsSuper = nobody,
        clock: Callable[[], float] = time.monotonic,
        clock_ms: ClockMs = wall_ms,
    ) -> Leases:
        """Take over what the store knows; each lease has at least its grace from now on."""
        leases = cls(store, remotes, freed, conf, is_super, clock, clock_ms)
        grace_ms = conf.get(options.ZUFLUSS_KV_SNAPSHOT_LEASE_RESTART_GRACE)
        await leases._book.load(grace_ms / 1000)
        log.info("leases_opened", leases=repr(leases))
        return leases

    def start(self) -> None:
        """End leases when their time is over, from now on."""
        self._book.start()

    async def stop(self) -> None:
        """Write how much time each lease has left, and end no more."""
        await self._book.stop()

    async def expire(self) -> None:
        """End every lease whose time is over; the timer does that by itself."""
        await self._book.expire()

    async def checkpoint(self) -> None:
        """Write how much time leases have left; the timer does that by itself."""
        await self._book.checkpoint()

    # Calls

    async def acquire(
        self,
        lease_id: str,
        duration_ms: int,
        wanted: Mapping[TableBucket, int],
        *,
        principal: str | None,
        epoch: int | None = None,
    ) -> Acquired:
        """Lease snapshots by their numbers, and renew; a lease that there is not is made.

        Without any snapshots it only renews.
        """
        self._check(lease_id, duration_ms)
        call = _Call(lease_id, principal, epoch)
        return await self._book.tasks.undisturbed(self._acquire(call, duration_ms, wanted, False))

    async def acquire_latest(
        self,
        lease_id: str,
        duration_ms: int,
        buckets: Sequence[TableBucket],
        *,
        principal: str | None,
        epoch: int | None = None,
    ) -> Acquired:
        """Lease the newest snapshots of buckets; a lease that there is not is made.

        Without an epoch the lease is taken over: who had it before is fenced. Without any buckets
        the answer is what the lease has.
        """
        self._check(lease_id, duration_ms)
        call = _Call(lease_id, principal, epoch)
        wanted = dict.fromkeys(buckets)
        return await self._book.tasks.undisturbed(self._acquire(call, duration_ms, wanted, True))

    async def renew(
        self, lease_id: str, duration_ms: int, *, principal: str | None, epoch: int | None = None
    ) -> Renewed:
        """Let a lease last for a duration from now on."""
        self._check(lease_id, duration_ms)
        call = _Call(lease_id, principal, epoch)
        lease = self._book.idle(lease_id)
        if lease is None:
            return await self._book.tasks.undisturbed(self._renew(call, duration_ms))
        self._check_mine(lease, call)
        check_sound(lease)
        await self._book.renew(lease, duration_ms)
        return Renewed(lease.remaining_ms(self._clock()), lease.revoked)

    async def release(
        self,
        lease_id: str,
        buckets: Iterable[TableBucket],
        *,
        principal: str | None,
        epoch: int | None = None,
    ) -> None:
        """Let go of buckets; of what the lease does not have there is nothing to do."""
        check_lease_id(lease_id)
        call = _Call(lease_id, principal, epoch)
        await self._book.tasks.undisturbed(self._release(call, set(buckets)))

    async def drop(self, lease_id: str, *, principal: str | None, epoch: int | None = None) -> None:
        """End a lease; nothing to do when there is none."""
        check_lease_id(lease_id)
        call = _Call(lease_id, principal, epoch)
        await self._book.tasks.undisturbed(self._drop(call))

    async def revoke(self, table_id: int, partition_id: int | None, what: str) -> None:
        """Take away what leases have of a table or partition, and note its name to tell it.

        A damaged lease gives up what can be read of it; the rest stays held until it is dropped.
        """
        busy = self._book.busy  # may be acquiring it just now
        holding = [i for i, lease in self._book.leases.items() if table_id in lease.tables]
        ids = tuple(dict.fromkeys((*busy, *holding)))
        problem = await self._book.each(
            ids, lambda i: self._revoke(i, table_id, partition_id, what)
        )
        if problem is not None:
            raise problem

    # Answers without I/O

    def pinned(self, bucket: TableBucket, snapshot_id: int) -> bool:
        """Whether a snapshot may not be dropped."""
        return self._book.pins.pinned(bucket, snapshot_id)

    def holds(self, table_id: int, partition_id: int | None = None) -> bool:
        """Whether leases hold something of a partition, or without one of the table."""
        return self._book.pins.holds(table_id, partition_id)

    def holds_dropped(self, but: Collection[Owner] = ()) -> bool:
        """Whether leases hold something that is not in the catalog any more, `but` for these.

        True when a lease is so damaged that it may hold anything.
        """

        def is_dropped(table_id: int, partition_id: int | None) -> bool:
            if partition_id is not None:
                return self._image.partition_by_id(partition_id) is None
            return self._image.table_by_id(table_id) is None

        return self._book.pins.is_all_blocked or any(
            is_dropped(*owner) and owner not in but and (owner[0], None) not in but
            for owner in self._book.pins.owners
        )

    def location(self, bucket: TableBucket, snapshot_id: int) -> int | None:
        """Where the `_METADATA` of a leased snapshot lies; None for one that is not leased."""
        return self._book.pins.location(bucket, snapshot_id)

    def revocation(self, bucket: TableBucket) -> str | None:
        """The name of what was dropped, if leases lost this bucket by that."""
        for lease in self._book.leases.values():
            table = lease.tables.get(bucket.table_id)
            if table is not None:
                for owner in (bucket.partition_id, None):
                    if owner in table.revoked:
                        return table.revoked[owner]
        return None

    def tables(self, lease_id: str) -> list[int]:
        """The tables of which a lease holds something; none where there is no such lease."""
        lease = self._book.leases.get(lease_id)
        return [] if lease is None else [*lease.tables, *lease.unreadable]

    def leases(self, lease_id: str | None = None) -> list[LeaseInfo]:
        """All leases by id, or one of them with its snapshots."""
        now = self._clock()
        ids = sorted(self._book.leases) if lease_id is None else [lease_id]
        found = (self._book.leases.get(i) for i in ids)
        return [
            self._info(lease, now, in_full=lease_id is not None)
            for lease in found
            if lease is not None and not lease.is_over(now)
        ]

    @property
    def counts(self) -> LeaseCounts:
        """All leases in numbers."""
        ages = [self._age_ms(lease) for lease in self._book.leases.values()]
        damaged = sum(lease.damage is not None for lease in self._book.leases.values())
        oldest = max(ages, default=0) / 1000
        return LeaseCounts(
            len(self._book.leases), len(self._book.pins), self._book.pins.bytes, oldest, damaged
        )

    def _info(self, lease: Lease, now: float, *, in_full: bool) -> LeaseInfo:
        shares = {i: TableShare(len(t.pins), t.size) for i, t in lease.tables.items()}
        shares |= dict.fromkeys(lease.unreadable, TableShare(0, 0))
        return LeaseInfo(
            lease.lease_id,
            lease.owner,
            lease.epoch,
            lease.duration_ms,
            lease.remaining_ms(now),
            self._age_ms(lease),
            shares,
            _leased(lease) if in_full else {},
            lease.revoked,
            lease.damage,
        )

    def _age_ms(self, lease: Lease) -> int:
        return max(0, self._clock_ms() - lease.created_ms) if lease.created_ms else 0

    # Calls, one at a time for each lease

    def _check(self, lease_id: str, duration_ms: int) -> None:
        check_lease_id(lease_id)
        check_duration(duration_ms, self._duration_max_ms)

    async def _mine(self, call: _Call) -> Lease | None:
        """The lease of a call, if the caller may use it; None when there is none."""
        lease = await self._book.current(call.lease_id)
        if lease is not None:
            self._check_mine(lease, call)
        return lease

    def _check_mine(self, lease: Lease, call: _Call) -> None:
        check_owner(lease, call.principal, self._is_super(call.principal))
        check_epoch(lease, call.epoch)

    async def _acquire(
        self,
        call: _Call,
        duration_ms: int,
        wanted: Mapping[TableBucket, int | None],
        take_over: bool,
    ) -> Acquired:
        async with self._book.turn(call.lease_id):
            lease = await self._mine(call)
            if lease is None and (call.epoch is not None or not wanted):
                raise not_found(call.lease_id)
            self.check_tables({bucket.table_id for bucket in wanted})
            if lease is None:
                return await self._make(call, duration_ms, wanted)
            check_sound(lease)
            taken_over = take_over and call.epoch is None
            epoch = await self._book.epochs.of_takeover(lease) if taken_over else lease.epoch
            return await self._extend(lease, epoch, duration_ms, wanted)

    async def _make(
        self, call: _Call, duration_ms: int, wanted: Mapping[TableBucket, int | None]
    ) -> Acquired:
        """Make a lease, unless there is nothing to lease."""
        owner, now = call.principal, self._clock()
        check_count(self._book.owned[owner], self._count_max, owner)
        self._book.owned[owner] += 1  # at once: others are being made meanwhile
        try:
            epoch = await self._book.epochs.of_new(call.lease_id)
            found, tables, values = await self._more({}, wanted)
            if not found.new:
                return Acquired(None, 0, {}, found.unavailable)
            deadline = now + duration_ms / 1000
            created_ms = self._clock_ms()
            lease = Lease(
                call.lease_id, owner, epoch, created_ms, duration_ms, deadline, tables, now
            )
            ops = lease_records.create(lease, values)
            await self._book.write(call.lease_id, ops, found.new)
            self._book.add(lease)
        finally:
            self._book.owned[owner] -= 1
        log.info("lease_made", lease=lease.lease_id, owner=owner, snapshots=len(found.new))
        return self._acquired(lease, found)

    async def _extend(
        self,
        lease: Lease,
        epoch: int,
        duration_ms: int,
        wanted: Mapping[TableBucket, int | None],
    ) -> Acquired:
        """Renew a lease, and let it have more, or other snapshots."""
        now = self._clock()
        found, tables, values = await self._more(lease.tables, wanted)
        after = replace(lease, epoch=epoch, tables=lease.tables | tables)
        ops = lease_records.change(lease, after, values)
        ops.append(lease_records.put_expiry(lease.lease_id, duration_ms, duration_ms))
        replaced = await _all_pinned(lease.tables, found.new)
        await self._book.write(lease.lease_id, ops, found.new)
        lease.epoch, lease.tables = epoch, after.tables
        self._book.prolong(lease, now, duration_ms)
        await self._book.unpin(replaced)
        if not wanted:
            await found.add_all(all_pins(lease))
        return self._acquired(lease, found)

    def _acquired(self, lease: Lease, found: _Found) -> Acquired:
        remaining_ms = lease.remaining_ms(self._clock())
        return Acquired(lease.epoch, remaining_ms, found.leased, found.unavailable, lease.revoked)

    async def _renew(self, call: _Call, duration_ms: int) -> Renewed:
        """Renew a lease after what others do with it just now."""
        async with self._book.turn(call.lease_id):
            lease = await self._mine(call)
            if lease is None:
                raise not_found(call.lease_id)
            check_sound(lease)
            now = self._clock()
            op = lease_records.put_expiry(call.lease_id, duration_ms, duration_ms)
            await self._book.write(call.lease_id, [op], {}, renewal=True)
            self._book.prolong(lease, now, duration_ms)
            return Renewed(lease.remaining_ms(self._clock()), lease.revoked)

    async def _release(self, call: _Call, buckets: set[TableBucket]) -> None:
        async with self._book.turn(call.lease_id):
            lease = await self._mine(call)
            if lease is None:
                return
            check_sound(lease)
            let_go = await _all_pinned(lease.tables, buckets)
            if let_go:
                await self._without(lease, let_go)

    async def _without(self, lease: Lease, let_go: Sequence[tuple[TableBucket, Pin]]) -> None:
        """Let a lease go on without some of its pins; it ends when it has nothing left."""
        tables = dict(lease.tables)
        touched = {bucket.table_id for bucket, _ in let_go}
        fewer = {table_id: dict(tables[table_id].pins) for table_id in touched}
        for at, (bucket, _) in enumerate(let_go, 1):
            del fewer[bucket.table_id][bucket]
            if at % BUCKETS_AT_ONCE == 0:
                await asyncio.sleep(0)
        values: dict[int, bytes] = {}
        for table_id, pins in fewer.items():
            table, value = await _encoded(pins, tables.pop(table_id).revoked)
            if not table.is_empty:
                tables[table_id], values[table_id] = table, value
        if not tables:
            await self._book.end(lease, "released")
            return
        after = replace(lease, tables=tables)
        await self._book.write(lease.lease_id, lease_records.change(lease, after, values), {})
        lease.tables = tables
        await self._book.unpin(let_go)

    async def _drop(self, call: _Call) -> None:
        async with self._book.turn(call.lease_id):
            lease = await self._mine(call)
            if lease is not None:
                await self._book.end(lease, "dropped")

    async def _revoke(
        self, lease_id: str, table_id: int, partition_id: int | None, what: str
    ) -> None:
        async with self._book.turn(lease_id):
            lease = await self._book.current(lease_id)
            if lease is None or table_id not in lease.tables:
                return
            before = lease.tables[table_id]
            lost = {b for b in before.pins if partition_id in (None, b.partition_id)}
            if not lost:
                return
            kept = {bucket: pin for bucket, pin in before.pins.items() if bucket not in lost}
            table, value = await _encoded(kept, {**before.revoked, partition_id: what})
            path = lease_records.table_path(lease_id, table_id)
            await self._book.write(lease_id, [Put(path, value)], {})
            lease.tables = lease.tables | {table_id: table}
        log.warning("lease_revoked", lease=lease_id, what=what, snapshots=len(lost))
        await self._book.unpin([(bucket, before.pins[bucket]) for bucket in lost])

    # Pins

    def check_tables(self, table_ids: Iterable[int]) -> None:
        """Refuse tables that there are not, or that have no snapshots."""
        for table_id in table_ids:
            entry = self._image.table_by_id(table_id)
            if entry is None:
                raise UnknownTableOrBucketError(
                    f"there is no table with id {table_id}, or not any more; nothing was leased"
                )
            if not entry.info.has_primary_key:
                raise NonPrimaryKeyTableError(
                    f"table '{entry.info.path}' has no primary key, so it has no key-value "
                    f"snapshots to lease"
                )

    async def _more(
        self, held: Mapping[int, TableLease], wanted: Mapping[TableBucket, int | None]
    ) -> tuple[_Found, dict[int, TableLease], dict[int, bytes]]:
        """Pin what is asked for; also the tables that change by it, and as they are stored.

        When it is refused, or fails, nothing of it stays pinned.
        """
        found = _Found()
        try:
            await self._pin(held, wanted, found)
            self._check_sizes(held, found.new)
            return found, *await self._merged(held, found.new)
        except Exception:
            await self._book.unpin(found.new.items())
            raise

    async def _pin(
        self,
        held: Mapping[int, TableLease],
        wanted: Mapping[TableBucket, int | None],
        found: _Found,
    ) -> None:
        """Pin a snapshot of each bucket that has the one asked for, None for the newest."""
        for at, (bucket, snapshot_id) in enumerate(wanted.items(), 1):
            if at % BUCKETS_AT_ONCE == 0:
                await asyncio.sleep(0)
            if not self._remotes.is_certain(bucket):
                await self._remotes.certain(bucket)
            pin = self._resolve(bucket, snapshot_id)
            if isinstance(pin, Unavailable):
                found.unavailable[bucket] = pin
                continue
            found.leased[bucket] = pin.leased
            table = held.get(bucket.table_id)
            before = None if table is None else table.pins.get(bucket)
            if before is None or before.snapshot_id != pin.snapshot_id:
                self._book.pins.add(bucket, pin)
                found.new[bucket] = pin

    def _resolve(self, bucket: TableBucket, snapshot_id: int | None) -> Pin | Unavailable:
        holder = self._image.holder(bucket)
        foreign = isinstance(holder, PartitionEntry) and holder.table_id != bucket.table_id
        if foreign or self._image.bucket_state(bucket) is None:
            return Unavailable.NO_BUCKET
        record = self._remotes.get(bucket)
        if not record.next_snapshot_id:
            return Unavailable.NO_SNAPSHOT
        for handle in reversed(record.snapshots):
            if snapshot_id in (None, handle.snapshot_id):
                return Pin.of(handle)
        return Unavailable.GONE

    def _check_sizes(self, held: Mapping[int, TableLease], new: Mapping[TableBucket, Pin]) -> None:
        """Refuse new pins that are too much for a table."""
        if self._bytes_max is None:
            return
        more: Counter[int] = Counter()
        less: Counter[int] = Counter()
        for bucket, pin in new.items():
            more[bucket.table_id] += pin.size * self._book.pins.only_once(bucket, pin)
        for bucket, pin in _pinned(held, new):
            less[bucket.table_id] += pin.size * self._book.pins.only_once(bucket, pin)
        for table_id in more:
            size = self._book.pins.bytes_of(table_id)
            before, after = size - more[table_id], size - less[table_id]
            check_size(after, before, self._bytes_max, table_id)

    async def _merged(
        self, held: Mapping[int, TableLease], new: Mapping[TableBucket, Pin]
    ) -> tuple[dict[int, TableLease], dict[int, bytes]]:
        """The tables that change by new pins, also as they are stored."""
        tables: dict[int, TableLease] = {}
        values: dict[int, bytes] = {}
        for table_id, pins in (await _by_table(new)).items():
            before = held.get(table_id, TableLease())
            merged = await _encoded({**before.pins, **pins}, before.revoked)
            tables[table_id], values[table_id] = merged
        return tables, values

    def __repr__(self) -> str:
        damaged = self.counts.damaged
        return f"Leases(damaged={damaged}, {self._book!r})"


async def _by_table(pins: Mapping[TableBucket, Pin]) -> dict[int, dict[TableBucket, Pin]]:
    """The pins of each table; others get their turn meanwhile."""
    found: dict[int, dict[TableBucket, Pin]] = {}
    for at, (bucket, pin) in enumerate(pins.items(), 1):
        found.setdefault(bucket.table_id, {})[bucket] = pin
        if at % BUCKETS_AT_ONCE == 0:
            await asyncio.sleep(0)
    return found


async def _encoded(
    pins: Mapping[TableBucket, Pin], revoked: Mapping[int | None, str]
) -> tuple[TableLease, bytes]:
    """What a lease has of a table, also as it is stored."""

    def work() -> tuple[TableLease, bytes]:
        table = TableLease.of(pins, revoked)
        return table, lease_records.encode_table(table)

    return await asyncio.to_thread(work) if len(pins) > ENCODED_AT_ONCE else work()


async def _all_pinned(
    tables: Mapping[int, TableLease], buckets: Iterable[TableBucket]
) -> list[tuple[TableBucket, Pin]]:
    """As `_pinned`, of many buckets; others get their turn meanwhile."""
    todo = list(buckets)
    found: list[tuple[TableBucket, Pin]] = []
    for at in range(0, len(todo), BUCKETS_AT_ONCE):
        if at:
            await asyncio.sleep(0)
        found += _pinned(tables, todo[at : at + BUCKETS_AT_ONCE])
    return found


def _pinned(
    tables: Mapping[int, TableLease], buckets: Iterable[TableBucket]
) -> list[tuple[TableBucket, Pin]]:
    """The pins that a lease has of some buckets."""
    return [
        (bucket, pin)
        for bucket in buckets
        if (table := tables.get(bucket.table_id)) is not None
        and (pin := table.pins.get(bucket)) is not None
    ]


def _leased(lease: Lease) -> dict[TableBucket, LeasedSnapshot]:
    return {bucket: pin.leased for bucket, pin in all_pins(lease)}
