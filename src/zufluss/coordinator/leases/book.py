"""The leases there are: in memory, in the store and in time, and the same in all three.

`leases/leases.py` decides what a call does to a lease; this keeps what came of it. One at a time
does something with a lease (`turns.py`), from the check to the end of the write. No lock is
common to all, and writes of many leases share transactions (`leases/writer.py`).

Thousands of clients renew, and others wait meanwhile, so a renewal of a lease with which nothing
else is being done needs no task: it begins at once, and the writer tells how it ended.

When a write fails and nobody knows whether it took place, the lease is read again before anything
else happens to it. Until then its pins of before and after hold.

Time is that of a monotonic clock. What is durable is the time left, written by acquire and renew,
and of all leases now and then. After a start every lease has at least a grace, because nobody could
renew it. A lease that is over is gone for every call, even before the timer comes to it; either way
it is deleted durably first, and its pins end after that, once.

Nothing durable is left of a lease that ended, yet its id may come back, and so may who held it: a
new lease never gets an epoch that one of its id had before (`leases/epochs.py`).
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from typing import Any

import structlog

from zufluss.coordinator.bucket_remotes import BucketRemotes
from zufluss.coordinator.feed import Feed
from zufluss.coordinator.leases import records as lease_records
from zufluss.coordinator.leases.deadlines import Deadlines
from zufluss.coordinator.leases.epochs import Epochs
from zufluss.coordinator.leases.pins import Pins
from zufluss.coordinator.leases.rules import Lease, Pin, TableLease
from zufluss.coordinator.leases.writer import LeaseWriter
from zufluss.coordinator.ledger import is_without_effect
from zufluss.coordinator.records import LEASES_PATH
from zufluss.coordinator.tasks import Tasks
from zufluss.coordinator.turns import Turns
from zufluss.errors import ZuflussError
from zufluss.meta.api import MetaStore, Op
from zufluss.model.table import TableBucket

log = structlog.get_logger(__name__)

BUCKETS_AT_ONCE = 2_000
"""Buckets that are looked at before others get their turn on the event loop."""
LEASES_AT_ONCE = 2_000
"""Leases that are expired, or whose time is written, at once."""
RETRY_SECONDS = 5.0
"""How long the end of a lease waits after it could not be written."""


class LeaseBook:
    """All leases, durable."""

    def __init__(
        self,
        store: MetaStore,
        remotes: BucketRemotes,
        freed: Feed[Sequence[TableBucket]],
        clock: Callable[[], float],
        checkpoint_seconds: float,
    ) -> None:
        """`freed` gets buckets with snapshots that no lease pins any more, durably."""
        self.tasks = Tasks("leases")
        """Changes of leases under way."""
        self.leases: dict[str, Lease] = {}
        """Every lease by id, those too whose time is over and that are not deleted yet."""
        self.owned: Counter[str | None] = Counter()
        """How many leases each principal has, or is about to have."""
        self.epochs = Epochs(remotes.ledger)
        """What new leases and takeovers get."""
        self.pins = Pins()
        """What they hold together."""
        self.writer = LeaseWriter(remotes.ledger)
        """Makes changes durable."""
        self._store = store
        self._remotes = remotes
        self._freed = freed
        self._clock = clock
        self._checkpoint_seconds = checkpoint_seconds
        self._deadlines = Deadlines()
        self._unsettled: dict[str, dict[TableBucket, Pin]] = {}
        self._turns = Turns()
        self._checkpointed = clock()
        self._wake = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    async def load(self, grace_seconds: float) -> None:
        """Take over what the store knows; each lease has at least its grace from now on."""
        entries = await self._store.tree(LEASES_PATH)
        await self.epochs.open()
        for stored in await asyncio.to_thread(lease_records.load, entries):
            await self._hold(stored.lease)
            seconds = max(stored.remaining_ms / 1000, grace_seconds)
            stored.lease.deadline = self._clock() + seconds
            self.add(stored.lease)

    def start(self) -> None:
        """End leases when their time is over, from now on."""
        self._task = asyncio.create_task(self._run(), name="leases")

    async def stop(self) -> None:
        """Write how much time each lease has left, and end no more."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait([self._task])
            self._task = None
        await self.each(tuple(self.leases), self._write_time)
        await self.tasks.settle()

    # One lease at a time

    @asynccontextmanager
    async def turn(self, lease_id: str) -> AsyncIterator[None]:
        """Be the only one who does something with a lease, from the check to the write."""
        await self._turns.begin(lease_id)
        try:
            yield
        finally:
            self._turns.end(lease_id)

    async def current(self, lease_id: str) -> Lease | None:
        """A lease as the store has it; None when there is none, or it has just ended."""
        if lease_id in self._unsettled:
            await self._settle(lease_id)
        lease = self.leases.get(lease_id)
        if lease is not None and lease.is_over(self._clock()):
            await self.end(lease, "expired")
            return None
        return lease

    @property
    def busy(self) -> list[str]:
        """Leases with which something is being done."""
        return self._turns.busy

    def idle(self, lease_id: str) -> Lease | None:
        """A lease that `current` would find at once, and with which nothing is being done."""
        lease = self.leases.get(lease_id)
        if lease is None or lease_id in self._unsettled or lease.is_over(self._clock()):
            return None
        return None if self._turns.is_taken(lease_id) else lease

    # Memory and store

    async def write(
        self,
        lease_id: str,
        ops: Sequence[Op],
        new: Mapping[TableBucket, Pin],
        *,
        renewal: bool = False,
    ) -> None:
        """Make a change of a lease durable; the pins it needs are taken back when it failed."""
        try:
            await self.writer.write(ops, renewal=renewal)
        except Exception as problem:
            if is_without_effect(problem):
                await self.unpin(new.items())
            else:
                await self._doubt(lease_id, new)
            raise

    def renew(self, lease: Lease, duration_ms: int) -> asyncio.Future[None]:
        """Prolong an idle lease from now on; durable when the future is done.

        Begun at once, and finished even when nobody waits for it any more.
        """
        renewed = asyncio.get_running_loop().create_future()
        now = self._clock()

        def ended(problem: Exception | None) -> None:
            if problem is None:
                self.prolong(lease, now, duration_ms)
                self._turns.end(lease.lease_id)
                if not renewed.done():
                    renewed.set_result(None)
            else:
                self.tasks.begin(self._not_renewed(lease, problem, renewed))

        op = lease_records.put_expiry(lease.lease_id, duration_ms, duration_ms)
        self._turns.take(lease.lease_id)
        self.writer.begin([op], ended, renewal=True)
        return renewed

    async def _not_renewed(
        self, lease: Lease, problem: Exception, renewed: asyncio.Future[None]
    ) -> None:
        try:
            if not is_without_effect(problem):
                await self._doubt(lease.lease_id, {})
        finally:
            self._turns.end(lease.lease_id)
            if not renewed.done():
                renewed.set_exception(problem)

    async def _doubt(self, lease_id: str, new: Mapping[TableBucket, Pin]) -> None:
        """Nobody knows how a change ended: find out, now or before the next one."""
        self._unsettled[lease_id] = dict(new)
        try:
            await self._settle(lease_id)
        except Exception as problem:
            log.warning("lease_in_doubt", lease=lease_id, error=str(problem))
            self._deadlines.add(lease_id, self._clock() + RETRY_SECONDS)

    async def _settle(self, lease_id: str) -> None:
        """Take over what the store has of a lease; only then let go of what it had."""
        entries = await self._store.tree(lease_records.head_path(lease_id))
        found = await asyncio.to_thread(lease_records.load, entries)
        for stored in found:
            await self._hold(stored.lease)
        before = self.leases.get(lease_id)
        loose = list(self._unsettled.pop(lease_id).items())
        if before is not None:
            self._remove(before)
            loose += all_pins(before)
        for stored in found:
            # A renewal that nobody was told of prolongs nothing.
            deadline = self._clock() + stored.remaining_ms / 1000
            stored.lease.deadline = deadline if before is None else before.deadline
            self.add(stored.lease)
        await self.unpin(loose)

    async def _hold(self, lease: Lease) -> None:
        """Pin what a lease has that was read, with what is known of its snapshots."""
        self.pins.block(lease.unreadable, lease.holds_all)
        for table_id, table in tuple(lease.tables.items()):
            pins: dict[TableBucket, Pin] = {}
            for at, (bucket, pin) in enumerate(table.pins.items(), 1):
                pins[bucket] = self._known(bucket, pin)
                self.pins.add(bucket, pins[bucket])
                if at % BUCKETS_AT_ONCE == 0:
                    await asyncio.sleep(0)
            lease.tables[table_id] = TableLease.of(pins, table.revoked)
        if lease.damage is not None:
            log.error(
                "lease_damaged",
                lease=lease.lease_id,
                damage=lease.damage,
                held_tables="all" if lease.holds_all else sorted(lease.unreadable),
            )

    def _known(self, bucket: TableBucket, pin: Pin) -> Pin:
        handles = self._remotes.get(bucket).snapshots
        return next((Pin.of(h) for h in handles if h.snapshot_id == pin.snapshot_id), pin)

    def add(self, lease: Lease) -> None:
        """A lease that is durable; its pins are there already."""
        self.leases[lease.lease_id] = lease
        if lease.owner_known:
            self.owned[lease.owner] += 1
        self._watch(lease)

    def _remove(self, lease: Lease) -> None:
        del self.leases[lease.lease_id]
        self._deadlines.discard(lease.lease_id)
        if lease.owner_known:
            self.owned[lease.owner] -= 1
        self.epochs.ended(lease)
        self.pins.unblock(lease.unreadable, lease.holds_all)

    def prolong(self, lease: Lease, now: float, duration_ms: int) -> None:
        """A lease lasts for a duration from `now` on; that is durable."""
        lease.duration_ms, lease.stored_at = duration_ms, now
        lease.deadline = now + duration_ms / 1000
        self._watch(lease)

    async def end(self, lease: Lease, why: str) -> None:
        """Delete a lease, then let go of everything it has."""
        await self.write(lease.lease_id, lease_records.delete(lease), {})
        self._remove(lease)
        log.info("lease_ended", lease=lease.lease_id, owner=lease.owner, why=why)
        await self.unpin(all_pins(lease))
        if lease.unreadable or lease.holds_all:
            all_buckets = (bucket for bucket, _ in self._remotes.items())
            held = [b for b in all_buckets if lease.holds_all or b.table_id in lease.unreadable]
            self._freed.publish(held)  # even none: files of a dropped table may wait for the end

    async def unpin(self, pins: Iterable[tuple[TableBucket, Pin]]) -> None:
        """Let go of pins, and have what nobody pins any more dropped."""
        todo = list(pins)
        for at in range(0, len(todo), BUCKETS_AT_ONCE):
            some = todo[at : at + BUCKETS_AT_ONCE]
            unpinned = [bucket for bucket, pin in some if self.pins.remove(bucket, pin)]
            if unpinned:
                self._freed.publish(unpinned)
            if len(todo) > BUCKETS_AT_ONCE:
                await asyncio.sleep(0)

    # Time

    def _watch(self, lease: Lease) -> None:
        if lease.damage is None:
            before = self._deadlines.next
            self._deadlines.add(lease.lease_id, lease.deadline)
            if self._deadlines.next != before:
                self._wake.set()

    async def expire(self) -> None:
        """End every lease whose time is over; the timer does that by itself."""
        now = self._clock()
        due = self._deadlines.due(now)
        if due:
            await self.each(due, self._look_at)

    async def _look_at(self, lease_id: str) -> None:
        """End a lease whose time is over, or come back to it when that is so."""
        async with self.turn(lease_id):
            try:
                lease = await self.current(lease_id)
            except Exception:
                self._deadlines.put_off(lease_id, self._clock() + RETRY_SECONDS)
                raise
            if lease is not None:
                self._watch(lease)

    async def checkpoint(self) -> None:
        """Write the time left of the leases whose time was not written since the last one."""
        since, self._checkpointed = self._checkpointed, self._clock()
        old = [i for i, lease in self.leases.items() if lease.stored_at <= since]
        await self.each(old, self._write_time)

    async def _write_time(self, lease_id: str) -> None:
        async with self.turn(lease_id):
            lease, now = self.leases.get(lease_id), self._clock()
            doubtful = lease_id in self._unsettled
            if lease is None or doubtful or lease.damage is not None or lease.is_over(now):
                return
            op = lease_records.put_expiry(lease_id, lease.remaining_ms(now), lease.duration_ms)
            await self.write(lease_id, [op], {}, renewal=True)
            lease.stored_at = now

    async def each(
        self, lease_ids: Sequence[str], work: Callable[[str], Coroutine[Any, Any, None]]
    ) -> ZuflussError | None:
        """Do something with many leases; the first failure stops none of the others."""
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

    async def _run(self) -> None:
        while True:
            self._wake.clear()
            with suppress(TimeoutError):
                async with asyncio.timeout(self._seconds()):
                    await self._wake.wait()
            try:
                await self.expire()
                if self._clock() >= self._checkpointed + self._checkpoint_seconds:
                    await self.checkpoint()
            except Exception:
                log.exception("lease_timer_failed")

    def _seconds(self) -> float:
        """Until there is something to do."""
        checkpoint = self._checkpointed + self._checkpoint_seconds
        first = self._deadlines.next
        return max(0.0, min(checkpoint, checkpoint if first is None else first) - self._clock())

    def __repr__(self) -> str:
        return f"LeaseBook(leases={len(self.leases)}, {self.pins!r})"


def all_pins(lease: Lease) -> list[tuple[TableBucket, Pin]]:
    """Every snapshot a lease has."""
    return [pair for table in lease.tables.values() for pair in table.pins.items()]
