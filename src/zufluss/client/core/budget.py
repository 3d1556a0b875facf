"""A limit on the bytes that a writer or scan holds, with a queue of waiting tasks."""

from __future__ import annotations

import asyncio
from collections import deque


class MemoryBudget:
    """Counts bytes. A task that needs more than is left waits; tasks are served in order."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        """Bytes that may be taken at the same time."""
        self._used = 0
        self._waiting: deque[tuple[int, asyncio.Future[None]]] = deque()

    def try_take(self, size: int) -> bool:
        """Take `size` bytes if they fit; a piece above the limit fits when it is alone."""
        if self._waiting or (self._used and self._used + size > self.limit):
            return False
        self._used += size
        return True

    async def take(self, size: int) -> None:
        """Wait until `size` bytes fit, then take them."""
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
        """Give back `size` bytes; a negative size takes without waiting."""
        self._used -= size
        while self._waiting:
            next_size, turn = self._waiting[0]
            if self._used and self._used + next_size > self.limit:
                return
            self._waiting.popleft()
            if not turn.cancelled():
                self._used += next_size
                turn.set_result(None)
