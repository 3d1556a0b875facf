"""Turns: for each lease one at a time may do something with it; no lock is common to all.

As an `asyncio.Lock` per lease, but a turn that is free can be taken without an `await`, and ended
from a callback. So a renewal needs no task of its own.
"""

from __future__ import annotations

import asyncio
from collections import deque


class Turns:
    """Who is busy with what, and who waits for it; first come, first served."""

    def __init__(self) -> None:
        self._waiting: dict[str, deque[asyncio.Future[None]]] = {}

    def take(self, key: str) -> bool:
        """Begin a turn if nobody has it; whether that is so."""
        if key in self._waiting:
            return False
        self._waiting[key] = deque()
        return True

    def is_taken(self, key: str) -> bool:
        """Whether somebody has the turn."""
        return key in self._waiting

    async def begin(self, key: str) -> None:
        """Begin a turn as soon as all who came before have ended theirs."""
        if self.take(key):
            return
        given = asyncio.get_running_loop().create_future()
        self._waiting[key].append(given)
        try:
            await given
        except asyncio.CancelledError:
            if not given.cancelled():  # it was given while we were told to stop
                self.end(key)
            raise

    def end(self, key: str) -> None:
        """End a turn; the next one who still waits has it now."""
        waiting = self._waiting[key]
        while waiting:
            given = waiting.popleft()
            if not given.done():
                given.set_result(None)
                return
        del self._waiting[key]

    @property
    def busy(self) -> list[str]:
        """Everything that somebody is busy with."""
        return list(self._waiting)

    def __repr__(self) -> str:
        return f"Turns(busy={len(self._waiting)})"
