"""The deadlines of leases in a heap, so that the earliest is found without a search.

A renewal moves a deadline later, and leaves the heap alone: the entry in the heap comes up too
early, and is put back with the deadline of that time. So the heap has one valid entry per lease,
however often the lease is renewed. Entries of ended leases are removed when there are many.
"""

from __future__ import annotations

import asyncio
from heapq import heapify, heappop, heappush

STALE_MAX = 1_000
"""Entries of ended leases in the heap, in addition to as many as there are valid ones."""


class Deadlines:
    """The next time at which to look at each lease."""

    def __init__(self) -> None:
        self.moved = asyncio.Event()
        """Set when the earliest deadline moves."""
        self._heap: list[tuple[float, str]] = []
        self._queued: dict[str, float] = {}

    @property
    def next(self) -> float | None:
        """The earliest deadline in the heap, perhaps too early; None without any."""
        return self._heap[0][0] if self._heap else None

    def add(self, lease_id: str, deadline: float) -> None:
        """Look at a lease at a deadline, or before."""
        if deadline < self._queued.get(lease_id, float("inf")):
            self._queued[lease_id] = deadline
            if not self._heap or deadline < self._heap[0][0]:
                self.moved.set()
            heappush(self._heap, (deadline, lease_id))

    def put_off(self, lease_id: str, deadline: float) -> None:
        """Look at a lease at a deadline, and not before."""
        self.discard(lease_id)
        self.add(lease_id, deadline)

    def discard(self, lease_id: str) -> None:
        """Forget a lease that has ended."""
        self._queued.pop(lease_id, None)
        if len(self._heap) > 2 * len(self._queued) + STALE_MAX:
            self._heap = [(deadline, i) for i, deadline in self._queued.items()]
            heapify(self._heap)

    def due(self, now: float) -> list[str]:
        """Remove and return the leases to look at now; add those again that are not over."""
        lease_ids: list[str] = []
        while self._heap and self._heap[0][0] <= now:
            deadline, lease_id = heappop(self._heap)
            if self._queued.get(lease_id) == deadline:
                del self._queued[lease_id]
                lease_ids.append(lease_id)
        return lease_ids

    def __repr__(self) -> str:
        return f"Deadlines(leases={len(self._queued)})"
