"""The lease book: all leases in memory and in the metadata store, and the same in both.

`leases/calls.py` decides what a call does to a lease; the book carries the decision out. The calls
of one lease take turns (`turns.py`), from the check to the end of the write. No lock is common to
all leases, and writes of many leases share transactions (`leases/writer.py`).

Thousands of clients renew while others wait. So a renewal needs no task if nothing else is being
done with the lease: it begins at once, and the writer reports its end to a callback.

When a write fails with an unknown outcome, the lease is read again before anything else happens to
it. Until then the pins of before and after hold.

Times are those of a monotonic clock. The store has the time that is left, written by acquire and
renew, and for all leases now and then (`leases/timer.py`). After a start every lease has at least a
grace, because nobody could renew it meanwhile. A lease whose time is over does not exist for any
call, even before the timer deletes it. It is deleted durably first; then its pins end, once.

The store keeps nothing of a lease that ended, but its id may come back, and so may its former
holder: a new lease never gets an epoch that a lease of the same id had (`leases/epochs.py`).
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Collection, Coroutine, Iterable, Mapping, Sequence
from typing import Any

import structlog

from zufluss.clock import Clock, ClockMs
from zufluss.config import options
from zufluss.config.load import Configuration
from zufluss.coordinator.bucket_remotes import BucketRemotes
from zufluss.coordinator.feed import Feed
from zufluss.coordinator.leases import records as lease_records
from zufluss.coordinator.leases.deadlines import Deadlines
from zufluss.coordinator.leases.epochs import Epochs
from zufluss.coordinator.leases.pins import Owner, SnapshotPins
from zufluss.coordinator.leases.rules import (
    Lease,
    LeaseCounts,
    LeasedTable,
    LeaseInfo,
    SnapshotPin,
    TableShare,
)
from zufluss.coordinator.leases.writer import LeaseWriter
from zufluss.coordinator.records import LEASES_PATH
from zufluss.coordinator.tasks import PendingTasks
from zufluss.coordinator.turns import Turns
from zufluss.errors import ZuflussError
from zufluss.meta.api import MetaStore, Op
from zufluss.model.table import TableBucket

log = structlog.get_logger(__name__)

BUCKETS_AT_ONCE = 2_000
"""Buckets that are handled before other tasks get their turn on the event loop."""
LEASES_AT_ONCE = 2_000
"""Leases that are expired, or whose time is written, at once."""
RETRY_SECONDS = 5.0
"""Pause before a lease is read or deleted again after that failed."""


class LeaseBook:
    """All leases, durable. Open it with `LeaseBook.open`, before anything is deleted."""

    def __init__(
        self,
        store: MetaStore,
        remotes: BucketRemotes,
        epochs: Epochs,
        freed: Feed[Sequence[TableBucket]],
        clock: Clock,
        clock_ms: ClockMs,
    ) -> None:
        """`freed` gets buckets with snapshots that no lease pins any more, durably."""
        self.tasks = PendingTasks("leases")
        """Changes of leases under way."""
        self.leases: dict[str, Lease] = {}
        """Every lease by id, including those whose time is over and that are not deleted yet."""
        self.owned: Counter[str | None] = Counter()
        """How many leases each principal has, or is about to have."""
        self.epochs = epochs
        """The epochs of new leases and takeovers."""
        self.pins = SnapshotPins()
        """The snapshots that all leases hold together."""
        self.writer = LeaseWriter(remotes.ledger)
        """Makes changes durable."""
        self.deadlines = Deadlines()
        """When to look at each lease."""
        self.turns = Turns(self._read_again)
        """One change at a time for each lease."""
        self._store = store
        self._remotes = remotes
        self._freed = freed
        self._clock = clock
        self._clock_ms = clock_ms
        self._unsettled: dict[str, Mapping[TableBucket, SnapshotPin]] = {}
        """New pins of leases in doubt."""

    @classmethod
    async def open(
        cls,
        store: MetaStore,
        remotes: BucketRemotes,
        freed: Feed[Sequence[TableBucket]],
        conf: Configuration,
        *,
        clock: Clock,
        clock_ms: ClockMs,
    ) -> LeaseBook:
        """Load all leases; each one has at least its grace from now on."""
        entries = await store.tree(LEASES_PATH)
        book = cls(store, remotes, await Epochs.open(remotes.ledger), freed, clock, clock_ms)
        grace_ms = conf.get(options.ZUFLUSS_KV_SNAPSHOT_LEASE_RESTART_GRACE)
        for stored in await asyncio.to_thread(lease_records.load, entries):
            await book._hold(stored.lease)
            stored.lease.deadline = clock() + max(stored.remaining_ms, grace_ms) / 1000
            book.add(stored.lease)
        log.info("leases_opened", leases=repr(book))
        return book

    # Leases, while their turn is held

    async def current(self, lease_id: str) -> Lease | None:
        """The lease as the store has it; None when there is none, or it has just ended."""
        await self.turns.settle(lease_id)
        lease = self.leases.get(lease_id)
        if lease is not None and lease.is_over(self._clock()):
            await self.end(lease, "expired")
            return None
        return lease

    def idle(self, lease_id: str) -> Lease | None:
        """The lease, if `current` would find it at once and its turn is free."""
        lease = self.leases.get(lease_id)
        if lease is None or self.turns.is_doubtful(lease_id) or lease.is_over(self._clock()):
            return None
        return None if self.turns.is_taken(lease_id) else lease

    async def write(
        self,
        lease_id: str,
        ops: Sequence[Op],
        new: Mapping[TableBucket, SnapshotPin],
        *,
        renewal: bool = False,
    ) -> None:
        """Make a change of a lease durable; the new pins are taken back if it failed."""
        try:
            await self.writer.write(ops, renewal=renewal)
        except Exception as problem:
            if self.turns.failed(lease_id, problem):
                await self._clear_up(lease_id, new)
            else:
                await self.unpin(new.items())
            raise

    def renew(self, lease: Lease, duration_ms: int) -> asyncio.Future[None]:
        """Prolong an idle lease from now on; durable when the future is done.

        The renewal begins at once, and is finished even when nobody waits for it any more.
        """
        renewed = asyncio.get_running_loop().create_future()
        now = self._clock()

        def ended(problem: Exception | None) -> None:
            if problem is None:
                self.prolong(lease, now, duration_ms)
                self.turns.end(lease.lease_id)
                if not renewed.done():
                    renewed.set_result(None)
            else:
                self.tasks.begin(self._not_renewed(lease, problem, renewed))

        op = lease_records.put_expiry(lease.lease_id, duration_ms, duration_ms)
        self.turns.take(lease.lease_id)
        self.writer.begin([op], ended, renewal=True)
        return renewed

    async def _not_renewed(
        self, lease: Lease, problem: Exception, renewed: asyncio.Future[None]
    ) -> None:
        try:
            if self.turns.failed(lease.lease_id, problem):
                await self._clear_up(lease.lease_id, {})
        finally:
            self.turns.end(lease.lease_id)
            if not renewed.done():
                renewed.set_exception(problem)

    async def _clear_up(self, lease_id: str, new: Mapping[TableBucket, SnapshotPin]) -> None:
        """Read a lease in doubt again; if that fails, the next turn or the timer does it."""
        self._unsettled[lease_id] = new
        try:
            await self.turns.settle(lease_id)
        except Exception as problem:
            log.warning("lease_in_doubt", lease=lease_id, error=str(problem))
            self.deadlines.add(lease_id, self._clock() + RETRY_SECONDS)

    async def _read_again(self, lease_id: str) -> None:
        """Replace a lease by what the store has; its pins of before end after that."""
        entries = await self._store.tree(lease_records.head_path(lease_id))
        leases = await asyncio.to_thread(lease_records.load, entries)
        for stored in leases:
            await self._hold(stored.lease)
        before = self.leases.get(lease_id)
        loose = list(self._unsettled.pop(lease_id).items())
        if before is not None:
            self._remove(before)
            loose += all_pins(before)
        for stored in leases:
            # An unanswered renewal does not prolong the lease.
            deadline = self._clock() + stored.remaining_ms / 1000
            stored.lease.deadline = deadline if before is None else before.deadline
            self.add(stored.lease)
        await self.unpin(loose)

    async def _hold(self, lease: Lease) -> None:
        """Pin the snapshots of a lease that was read, with the sizes and offsets they have."""
        self.pins.block(lease.unreadable, lease.holds_all)
        for table_id, table in tuple(lease.tables.items()):
            pins: dict[TableBucket, SnapshotPin] = {}
            for at, (bucket, pin) in enumerate(table.pins.items(), 1):
                pins[bucket] = self._known(bucket, pin)
                self.pins.add(bucket, pins[bucket])
                if at % BUCKETS_AT_ONCE == 0:
                    await asyncio.sleep(0)
            lease.tables[table_id] = LeasedTable.of(pins, table.revoked)
        if lease.damage is not None:
            log.error(
                "lease_damaged",
                lease=lease.lease_id,
                damage=lease.damage,
                held_tables="all" if lease.holds_all else sorted(lease.unreadable),
            )

    def _known(self, bucket: TableBucket, pin: SnapshotPin) -> SnapshotPin:
        handles = self._remotes.get(bucket).snapshots
        return next((SnapshotPin.of(h) for h in handles if h.snapshot_id == pin.snapshot_id), pin)

    def add(self, lease: Lease) -> None:
        """Add a durable lease whose snapshots are pinned already."""
        self.leases[lease.lease_id] = lease
        if lease.owner_known:
            self.owned[lease.owner] += 1
        self.watch(lease)

    def _remove(self, lease: Lease) -> None:
        del self.leases[lease.lease_id]
        self.deadlines.discard(lease.lease_id)
        if lease.owner_known:
            self.owned[lease.owner] -= 1
        self.epochs.ended(lease)
        self.pins.unblock(lease.unreadable, lease.holds_all)

    def prolong(self, lease: Lease, now: float, duration_ms: int) -> None:
        """Let a lease last for a duration from `now` on; that is durable already."""
        lease.duration_ms, lease.stored_at = duration_ms, now
        lease.deadline = now + duration_ms / 1000
        self.watch(lease)

    def watch(self, lease: Lease) -> None:
        """Have the timer look at a lease at its deadline; a damaged one never ends by time."""
        if lease.damage is None:
            self.deadlines.add(lease.lease_id, lease.deadline)

    async def end(self, lease: Lease, why: str) -> None:
        """Delete a lease, durably first, then unpin all of its snapshots."""
        await self.write(lease.lease_id, lease_records.delete(lease), {})
        self._remove(lease)
        log.info("lease_ended", lease=lease.lease_id, owner=lease.owner, why=why)
        await self.unpin(all_pins(lease))
        if lease.unreadable or lease.holds_all:
            all_buckets = (bucket for bucket, _ in self._remotes.items())
            held = [b for b in all_buckets if lease.holds_all or b.table_id in lease.unreadable]
            self._freed.publish(held)  # even none: files of a dropped table may wait for the end

    async def unpin(self, pins: Iterable[tuple[TableBucket, SnapshotPin]]) -> None:
        """Remove pins, and publish the buckets whose last pin of a snapshot that was."""
        todo = list(pins)
        for at in range(0, len(todo), BUCKETS_AT_ONCE):
            some = todo[at : at + BUCKETS_AT_ONCE]
            unpinned = [bucket for bucket, pin in some if self.pins.remove(bucket, pin)]
            if unpinned:
                self._freed.publish(unpinned)
            if len(todo) > BUCKETS_AT_ONCE:
                await asyncio.sleep(0)

    async def each(
        self, lease_ids: Sequence[str], work: Callable[[str], Coroutine[Any, Any, None]]
    ) -> ZuflussError | None:
        """Do the work for many leases; a failure stops none of the others. Returns the first."""
        failures: list[ZuflussError] = []

        async def attempt(lease_id: str) -> None:
            try:
                await self.tasks.undisturbed(work(lease_id))
            except ZuflussError as problem:
                failures.append(problem)

        for at in range(0, len(lease_ids), LEASES_AT_ONCE):
            await asyncio.gather(*map(attempt, lease_ids[at : at + LEASES_AT_ONCE]))
        if not failures:
            return None
        log.warning("leases_not_written", leases=len(failures), error=str(failures[0]))
        return failures[0]

    # Answers without I/O

    def tables(self, lease_id: str) -> list[int]:
        """The ids of the tables of which a lease holds snapshots; none without such a lease."""
        lease = self.leases.get(lease_id)
        return [] if lease is None else [*lease.tables, *lease.unreadable]

    def revocation(self, bucket: TableBucket) -> str | None:
        """The name of the dropped table or partition, if leases lost this bucket by the drop."""
        for lease in self.leases.values():
            table = lease.tables.get(bucket.table_id)
            if table is not None:
                for owner in (bucket.partition_id, None):
                    if owner in table.revoked:
                        return table.revoked[owner]
        return None

    def holds_dropped(self, but: Collection[Owner] = ()) -> bool:
        """Whether leases hold snapshots of dropped tables or partitions, apart from `but`.

        True when a lease is so damaged that it may hold anything.
        """
        image = self._remotes.image

        def is_dropped(table_id: int, partition_id: int | None) -> bool:
            if partition_id is not None:
                return image.partition_by_id(partition_id) is None
            return image.table_by_id(table_id) is None

        return self.pins.is_all_blocked or any(
            is_dropped(*owner) and owner not in but and (owner[0], None) not in but
            for owner in self.pins.owners
        )

    def infos(self, lease_id: str | None = None) -> list[LeaseInfo]:
        """All leases by id, or one of them with its snapshots; none that is over."""
        now = self._clock()
        ids = sorted(self.leases) if lease_id is None else [lease_id]
        return [
            self._info(lease, now, with_snapshots=lease_id is not None)
            for lease in map(self.leases.get, ids)
            if lease is not None and not lease.is_over(now)
        ]

    def _info(self, lease: Lease, now: float, *, with_snapshots: bool) -> LeaseInfo:
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
            {bucket: pin.leased for bucket, pin in all_pins(lease)} if with_snapshots else {},
            lease.revoked,
            lease.damage,
        )

    @property
    def counts(self) -> LeaseCounts:
        """All leases in numbers."""
        ages = [self._age_ms(lease) for lease in self.leases.values()]
        damaged = sum(lease.damage is not None for lease in self.leases.values())
        oldest = max(ages, default=0) / 1000
        return LeaseCounts(len(self.leases), len(self.pins), self.pins.bytes, oldest, damaged)

    def _age_ms(self, lease: Lease) -> int:
        return max(0, self._clock_ms() - lease.created_ms) if lease.created_ms else 0

    def __repr__(self) -> str:
        damaged = self.counts.damaged
        return f"LeaseBook(leases={len(self.leases)}, damaged={damaged}, {self.pins!r})"


def all_pins(lease: Lease) -> list[tuple[TableBucket, SnapshotPin]]:
    """Every snapshot that a lease holds."""
    return [pair for table in lease.tables.values() for pair in table.pins.items()]
