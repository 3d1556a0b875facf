"""What each call does to a lease of key-value snapshots.

With a lease, readers say which snapshots they read, and how long those must stay. A lease has at
most one snapshot per bucket. It exists as long as it pins a snapshot or has a revocation to report.
It ends when its last bucket is released, when it is dropped, or when its time is over. Nothing
brings it back: renewing an expired lease is an error.

The order of steps, so that a snapshot that was answered is never deleted:

| step | why it is safe |
|---|---|
| find the snapshot and pin it | `leases/selection.py` |
| write the lease | the pin counts already; it is taken back when the write failed |
| answer | what was answered is durable |
| free | after the durable end of a pin; then the snapshot is dropped at once (`remote/kv_snapshots.py`) |

`leases/book.py` keeps memory and store equal. A lease whose record cannot be read holds everything
that it may hold: see `leases/rules.py`. `leases/service.py` checks who may read a table; this
module checks who owns a lease.
"""  # noqa: E501 - a table row does not wrap

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

import structlog

from zufluss.clock import Clock, ClockMs
from zufluss.cluster.image import ClusterImage
from zufluss.config import options
from zufluss.config.load import Configuration
from zufluss.coordinator.bucket_remotes import BucketRemotes
from zufluss.coordinator.leases import records as lease_records
from zufluss.coordinator.leases.book import BUCKETS_AT_ONCE, LeaseBook, all_pins
from zufluss.coordinator.leases.rules import (
    AcquireResult,
    Lease,
    RenewResult,
    SnapshotPin,
    check_count,
    check_duration,
    check_lease_id,
    check_owner_known,
    check_sound,
    not_found,
)
from zufluss.coordinator.leases.selection import Selection, Selector, encoded, pins_of
from zufluss.coordinator.ownership import IsSuper, Ownership
from zufluss.errors import NonPrimaryKeyTableError, UnknownTableOrBucketError
from zufluss.meta.api import Put
from zufluss.model.table import TableBucket, unknown_table

log = structlog.get_logger(__name__)


class _LeaseCall(NamedTuple):
    """A call about a lease, and its caller."""

    lease_id: str
    principal: str | None
    epoch: int | None


class LeaseCalls:
    """Acquire, renew, release, drop and revoke."""

    def __init__(
        self,
        book: LeaseBook,
        remotes: BucketRemotes,
        conf: Configuration,
        *,
        is_super: IsSuper,
        clock: Clock,
        clock_ms: ClockMs,
    ) -> None:
        self.book = book
        """All leases."""
        self._image: ClusterImage = remotes.image
        self._selector = Selector(
            book, remotes, conf.get(options.ZUFLUSS_KV_SNAPSHOT_LEASE_BYTES_MAX)
        )
        self._ownership = Ownership(is_super)
        self._clock = clock
        self._clock_ms = clock_ms
        self._duration_max_ms = conf.get(options.ZUFLUSS_KV_SNAPSHOT_LEASE_DURATION_MAX)
        self._count_max = conf.get(options.ZUFLUSS_KV_SNAPSHOT_LEASE_COUNT_MAX)

    async def acquire(
        self,
        lease_id: str,
        duration_ms: int,
        snapshots: Mapping[TableBucket, int],
        *,
        principal: str | None,
        epoch: int | None = None,
    ) -> AcquireResult:
        """Lease snapshots by their ids, and renew the lease; creates it if it does not exist.

        Without any snapshots the lease is only renewed.
        """
        self._check(lease_id, duration_ms)
        call = _LeaseCall(lease_id, principal, epoch)
        return await self.book.tasks.undisturbed(self._acquire(call, duration_ms, snapshots, False))

    async def acquire_latest(
        self,
        lease_id: str,
        duration_ms: int,
        buckets: Sequence[TableBucket],
        *,
        principal: str | None,
        epoch: int | None = None,
    ) -> AcquireResult:
        """Lease the newest snapshots of buckets; creates the lease if it does not exist.

        Without an epoch the lease is taken over: its former holder is fenced. Without any buckets
        the answer has all snapshots of the lease.
        """
        self._check(lease_id, duration_ms)
        call = _LeaseCall(lease_id, principal, epoch)
        snapshots = dict.fromkeys(buckets)
        return await self.book.tasks.undisturbed(self._acquire(call, duration_ms, snapshots, True))

    async def renew(
        self, lease_id: str, duration_ms: int, *, principal: str | None, epoch: int | None = None
    ) -> RenewResult:
        """Let a lease last for a duration from now on."""
        self._check(lease_id, duration_ms)
        call = _LeaseCall(lease_id, principal, epoch)
        lease = self.book.idle(lease_id)
        if lease is None:
            return await self.book.tasks.undisturbed(self._renew(call, duration_ms))
        self._check_mine(lease, call)
        check_sound(lease)
        await self.book.renew(lease, duration_ms)
        return RenewResult(lease.remaining_ms(self._clock()), lease.revoked)

    async def release(
        self,
        lease_id: str,
        buckets: Iterable[TableBucket],
        *,
        principal: str | None,
        epoch: int | None = None,
    ) -> None:
        """Release buckets; those that the lease does not have are ignored."""
        check_lease_id(lease_id)
        call = _LeaseCall(lease_id, principal, epoch)
        await self.book.tasks.undisturbed(self._release(call, set(buckets)))

    async def drop(self, lease_id: str, *, principal: str | None, epoch: int | None = None) -> None:
        """End a lease; nothing happens when there is none."""
        check_lease_id(lease_id)
        call = _LeaseCall(lease_id, principal, epoch)
        await self.book.tasks.undisturbed(self._drop(call))

    async def revoke(self, table_id: int, partition_id: int | None, what: str) -> None:
        """Take a table or partition away from all leases, and note its name for their holders.

        A damaged lease loses the pins that can be read; it holds the rest until it is dropped.
        """
        busy = self.book.turns.busy  # their calls may be about to acquire the table
        holding = [i for i, lease in self.book.leases.items() if table_id in lease.tables]
        lease_ids = tuple(dict.fromkeys((*busy, *holding)))
        problem = await self.book.each(
            lease_ids, lambda i: self._revoke(i, table_id, partition_id, what)
        )
        if problem is not None:
            raise problem

    async def revoke_lost(
        self, location_id: int, lost: Mapping[TableBucket, frozenset[int]], where: str
    ) -> None:
        """Revoke the tables and partitions of which leases hold snapshots in a lost location.

        `lost` are the lost snapshots of buckets that exist; of dropped ones the location of their
        `_METADATA` decides. A lease without a lost snapshot stays as it is.
        """
        owners: dict[str, set[tuple[int, int | None]]] = {}
        for lease in tuple(self.book.leases.values()):
            for at, (bucket, pin) in enumerate(all_pins(lease), 1):
                if pin.snapshot_id in lost.get(bucket, ()) or pin.location_id == location_id:
                    owner = bucket.table_id, bucket.partition_id
                    owners.setdefault(lease.lease_id, set()).add(owner)
                if at % BUCKETS_AT_ONCE == 0:
                    await asyncio.sleep(0)
        for lease_id, of_lease in owners.items():
            for table_id, partition_id in of_lease:
                entry = self._image.table_by_id(table_id)
                name = unknown_table(table_id) if entry is None else str(entry.info.path)
                what = f"{name} (files of its snapshots were lost with {where})"
                work = self._revoke(lease_id, table_id, partition_id, what)
                await self.book.tasks.undisturbed(work)

    def check_tables(self, table_ids: Iterable[int]) -> None:
        """Raise for tables that do not exist, or that have no key-value snapshots."""
        for table_id in table_ids:
            entry = self._image.table_by_id(table_id)
            if entry is None:
                raise UnknownTableOrBucketError(
                    f"{unknown_table(table_id)} does not exist, or not any more; nothing was leased"
                )
            if not entry.info.has_primary_key:
                raise NonPrimaryKeyTableError(
                    f"table '{entry.info.path}' has no primary key, so it has no key-value "
                    f"snapshots to lease"
                )

    # One call at a time for each lease

    def _check(self, lease_id: str, duration_ms: int) -> None:
        check_lease_id(lease_id)
        check_duration(duration_ms, self._duration_max_ms)

    async def _mine(self, call: _LeaseCall) -> Lease | None:
        """The lease of a call, if the caller may use it; None when there is none."""
        lease = await self.book.current(call.lease_id)
        if lease is not None:
            self._check_mine(lease, call)
        return lease

    def _check_mine(self, lease: Lease, call: _LeaseCall) -> None:
        if not self._ownership.is_owner(lease, call.principal):
            check_owner_known(lease)
        self._ownership.check(lease, call.principal, call.epoch)

    async def _acquire(
        self,
        call: _LeaseCall,
        duration_ms: int,
        snapshots: Mapping[TableBucket, int | None],
        take_over: bool,
    ) -> AcquireResult:
        async with self.book.turns.turn(call.lease_id):
            lease = await self._mine(call)
            if lease is None and (call.epoch is not None or not snapshots):
                raise not_found(call.lease_id)
            self.check_tables({bucket.table_id for bucket in snapshots})
            if lease is None:
                return await self._create(call, duration_ms, snapshots)
            check_sound(lease)
            taken_over = take_over and call.epoch is None
            epoch = await self.book.epochs.of_takeover(lease) if taken_over else lease.epoch
            return await self._extend(lease, epoch, duration_ms, snapshots)

    async def _create(
        self, call: _LeaseCall, duration_ms: int, snapshots: Mapping[TableBucket, int | None]
    ) -> AcquireResult:
        """Create a lease, unless none of the snapshots is available."""
        owner, now = call.principal, self._clock()
        check_count(self.book.owned[owner], self._count_max, owner)
        self.book.owned[owner] += 1  # at once: other calls are creating leases meanwhile
        try:
            epoch = await self.book.epochs.of_new(call.lease_id)
            selection = await self._selector.select({}, snapshots)
            if not selection.new:
                return AcquireResult(None, 0, {}, selection.unavailable)
            lease = Lease(
                call.lease_id,
                owner,
                epoch,
                self._clock_ms(),
                duration_ms,
                now + duration_ms / 1000,
                selection.tables,
                now,
            )
            ops = lease_records.create(lease, selection.values)
            await self.book.write(call.lease_id, ops, selection.new)
            self.book.add(lease)
        finally:
            self.book.owned[owner] -= 1
        log.info("lease_made", lease=lease.lease_id, owner=owner, snapshots=len(selection.new))
        return self._acquired(lease, selection)

    async def _extend(
        self,
        lease: Lease,
        epoch: int,
        duration_ms: int,
        snapshots: Mapping[TableBucket, int | None],
    ) -> AcquireResult:
        """Renew a lease, and give it more snapshots, or others of the same buckets."""
        now = self._clock()
        selection = await self._selector.select(lease.tables, snapshots)
        after = replace(lease, epoch=epoch, tables=lease.tables | selection.tables)
        ops = lease_records.change(lease, after, selection.values)
        ops.append(lease_records.put_expiry(lease.lease_id, duration_ms, duration_ms))
        replaced = await pins_of(lease.tables, selection.new)
        await self.book.write(lease.lease_id, ops, selection.new)
        lease.epoch, lease.tables = epoch, after.tables
        self.book.prolong(lease, now, duration_ms)
        await self.book.unpin(replaced)
        if not snapshots:
            await selection.answer_all(all_pins(lease))
        return self._acquired(lease, selection)

    def _acquired(self, lease: Lease, selection: Selection) -> AcquireResult:
        return AcquireResult(
            lease.epoch,
            lease.remaining_ms(self._clock()),
            selection.leased,
            selection.unavailable,
            lease.revoked,
        )

    async def _renew(self, call: _LeaseCall, duration_ms: int) -> RenewResult:
        """Renew a lease after the calls that came before."""
        async with self.book.turns.turn(call.lease_id):
            lease = await self._mine(call)
            if lease is None:
                raise not_found(call.lease_id)
            check_sound(lease)
            now = self._clock()
            op = lease_records.put_expiry(call.lease_id, duration_ms, duration_ms)
            await self.book.write(call.lease_id, [op], {}, renewal=True)
            self.book.prolong(lease, now, duration_ms)
            return RenewResult(lease.remaining_ms(self._clock()), lease.revoked)

    async def _release(self, call: _LeaseCall, buckets: set[TableBucket]) -> None:
        async with self.book.turns.turn(call.lease_id):
            lease = await self._mine(call)
            if lease is None:
                return
            check_sound(lease)
            released = await pins_of(lease.tables, buckets)
            if released:
                await self._remove_pins(lease, released)

    async def _remove_pins(
        self, lease: Lease, released: Sequence[tuple[TableBucket, SnapshotPin]]
    ) -> None:
        """Take pins out of a lease; it ends when nothing is left in it."""
        tables = dict(lease.tables)
        touched = {bucket.table_id for bucket, _ in released}
        fewer = {table_id: dict(tables[table_id].pins) for table_id in touched}
        for at, (bucket, _) in enumerate(released, 1):
            del fewer[bucket.table_id][bucket]
            if at % BUCKETS_AT_ONCE == 0:
                await asyncio.sleep(0)
        values: dict[int, bytes] = {}
        for table_id, pins in fewer.items():
            table, value = await encoded(pins, tables.pop(table_id).revoked)
            if not table.is_empty:
                tables[table_id], values[table_id] = table, value
        if not tables:
            await self.book.end(lease, "released")
            return
        after = replace(lease, tables=tables)
        await self.book.write(lease.lease_id, lease_records.change(lease, after, values), {})
        lease.tables = tables
        await self.book.unpin(released)

    async def _drop(self, call: _LeaseCall) -> None:
        async with self.book.turns.turn(call.lease_id):
            lease = await self._mine(call)
            if lease is not None:
                await self.book.end(lease, "dropped")

    async def _revoke(
        self, lease_id: str, table_id: int, partition_id: int | None, what: str
    ) -> None:
        async with self.book.turns.turn(lease_id):
            lease = await self.book.current(lease_id)
            if lease is None or table_id not in lease.tables:
                return
            before = lease.tables[table_id]
            lost = {b for b in before.pins if partition_id in (None, b.partition_id)}
            if not lost:
                return
            pins = {bucket: pin for bucket, pin in before.pins.items() if bucket not in lost}
            table, value = await encoded(pins, {**before.revoked, partition_id: what})
            path = lease_records.table_path(lease_id, table_id)
            await self.book.write(lease_id, [Put(path, value)], {})
            lease.tables = lease.tables | {table_id: table}
        log.warning("lease_revoked", lease=lease_id, what=what, snapshots=len(lost))
        await self.book.unpin([(bucket, before.pins[bucket]) for bucket in lost])

    def __repr__(self) -> str:
        return f"LeaseCalls({self.book!r})"
