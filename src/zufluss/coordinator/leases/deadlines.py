"""When leases are over: the earliest first, in a heap, without a search through all of them.

A renewal moves a deadline on. It leaves the heap alone: the entry that is there comes up too early
and is put back with the deadline of that time. So the heap has one valid entry per lease, however
often that is renewed; entries of leases that are gone are cleared out when there are many.
"""

from __future__ import annotations

from heapq import heapify, heappop, heappush

STALE_MAX = 1_000
"""Entries of leases that are gone, beyond as many as there are valid ones."""


class Deadlines:
    """The next time at which to look at each lease."""

    def __init__(self) -> None:
        self._heap: list[tuple[float, str]] = []
        self._queued: dict[str, float] = {}

    @property
    def next(self) -> float | None:
        """The earliest deadline, perhaps one that was moved on; None without any."""
        return self._heap[0][0] if self._heap else None

    def add(self, lease_id: str, deadline: float) -> None:
        """Look at a lease at its deadline, or before."""
        if deadline < self._queued.get(lease_id, float("inf")):
            self._queued[lease_id] = deadline
            heappush(self._heap, (deadline, lease_id))

    def put_off(self, lease_id: str, deadline: float) -> None:
        """Look at a lease then, and not before."""
        self.discard(lease_id)
        self.add(lease_id, deadline)

    def discard(self, lease_id: str) -> None:
        """A lease is gone."""
        self._queued.pop(lease_id, None)
        if len(self._heap) > 2 * len(self._queued) + STALE_MAX:
            self._heap = [(deadline, i) for i, deadline in self._queued.items()]
            heapify(self._heap)

    def due(self, now: float) -> list[str]:
        """Leases to look at now, each once; add those again that are not over."""
        found: list[str] = []
        while self._heap and self._heap[0][0] <= now:
            deadline, lease_id = heappop(self._heap)
            if self._queued.get(lease_id) == deadline:
                del self._queued[lease_id]
                found.append(lease_id)
        return found

    def __repr__(self) -> str:
        return f"Deadlines(leases={len(self._queued)})"
