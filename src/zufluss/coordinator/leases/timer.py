"""The timer of leases: ends those whose time is over, and writes how much time the others have.

A lease that a client renews stores its time by that. The time of all others is written every
`kv.snapshot.lease.expiration-check-interval`, so that after a crash a lease lasts at most that much
longer than it should.
"""

from __future__ import annotations

import asyncio

import structlog

from zufluss.clock import Clock
from zufluss.coordinator.leases.book import RETRY_SECONDS, LeaseBook
from zufluss.coordinator.leases.records import put_expiry
from zufluss.periodic import pause
from zufluss.tasks import end

log = structlog.get_logger(__name__)


class LeaseTimer:
    """Ends leases, and stores their times."""

    def __init__(self, book: LeaseBook, clock: Clock, checkpoint_seconds: float) -> None:
        self._book = book
        self._clock = clock
        self._checkpoint_seconds = checkpoint_seconds
        self._checkpointed = clock()
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        """End leases when their time is over, from now on."""
        self._task = asyncio.create_task(self._run(), name="leases")

    async def stop(self) -> None:
        """Write how much time each lease has left, and end no more."""
        await end(self._task)
        await self._book.each(tuple(self._book.leases), self._write_time)
        await self._book.tasks.settle()

    async def expire(self) -> None:
        """End every lease whose time is over; the timer does that by itself."""
        due = self._book.deadlines.due(self._clock())
        if due:
            await self._book.each(due, self._look_at)

    async def _look_at(self, lease_id: str) -> None:
        """End a lease whose time is over, or look at it again at its deadline."""
        async with self._book.turns.turn(lease_id):
            try:
                lease = await self._book.current(lease_id)
            except Exception:
                self._book.deadlines.put_off(lease_id, self._clock() + RETRY_SECONDS)
                raise
            if lease is not None:
                self._book.watch(lease)

    async def checkpoint(self) -> None:
        """Write the time left of all leases whose time was not written since the last call."""
        since, self._checkpointed = self._checkpointed, self._clock()
        old = [i for i, lease in self._book.leases.items() if lease.stored_at <= since]
        await self._book.each(old, self._write_time)

    async def _write_time(self, lease_id: str) -> None:
        async with self._book.turns.turn(lease_id):
            lease, now = self._book.leases.get(lease_id), self._clock()
            doubtful = self._book.turns.is_doubtful(lease_id)
            if lease is None or doubtful or lease.damage is not None or lease.is_over(now):
                return
            op = put_expiry(lease_id, lease.remaining_ms(now), lease.duration_ms)
            await self._book.write(lease_id, [op], {}, renewal=True)
            lease.stored_at = now

    async def _run(self) -> None:
        moved = self._book.deadlines.moved
        while True:
            moved.clear()
            await pause(self._seconds(), moved)
            try:
                await self.expire()
                if self._clock() >= self._checkpointed + self._checkpoint_seconds:
                    await self.checkpoint()
            except Exception:
                log.exception("lease_timer_failed")

    def _seconds(self) -> float:
        """Seconds until the next deadline or checkpoint."""
        checkpoint = self._checkpointed + self._checkpoint_seconds
        first = self._book.deadlines.next
        return max(0.0, min(checkpoint, checkpoint if first is None else first) - self._clock())

    def __repr__(self) -> str:
        return f"LeaseTimer({self._book.deadlines!r})"
