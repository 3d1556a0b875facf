"""How much a writer may hold: bytes that are counted, and a queue of those who wait for them."""

from __future__ import annotations

import asyncio
from collections import deque


class MemoryBudget:
    """Counts bytes; whoever wants more than is left waits, first come first served."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        """How much may be held."""
        self._used = 0
        self._waiting: deque[tuple[int, asyncio.Future[None]]] = deque()

    def try_take(self, size: int) -> bool:
        """Take now, unless it is too much; a single piece over the limit passes when alone."""
        if self._waiting or (self._used and self._used + size > self.limit):
            return False
        self._used += size
        return True

    async def take(self, size: int) -> None:
        """Wait until there is room, then take."""
        if self.try_take(size):
            return
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.append((size, turn))
        try:
            await turn
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled():
                self.give(size)
            else:
                self._waiting = deque(w for w in self._waiting if w[1] is not turn)
            raise

    def give(self, size: int) -> None:
        """Give back; a negative size takes without waiting."""
        self._used -= size
        while self._waiting:
            wanted, turn = self._waiting[0]
            if self._used and self._used + wanted > self.limit:
                return
            self._waiting.popleft()
            if not turn.cancelled():
                self._used += wanted
                turn.set_result(None)
