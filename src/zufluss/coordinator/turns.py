"""Turns: one change at a time for each key, and no change on top of an unknown outcome.

The lease book and the producer book keep memory equal to the metadata store in the same way:

| step | rule |
|---|---|
| begin the turn of a key | everybody who came before has ended theirs |
| settle | if nobody knows how the last write ended, the key is read again from the store |
| check and write | a write that failed with an unknown outcome leaves the key in doubt |
| end the turn | the next one who waits has it |

No lock is common to all keys. A turn is like an `asyncio.Lock` per key, but a free one can be taken
without an `await` and ended from a callback, so that the renewal of a lease needs no task.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Hashable
from contextlib import asynccontextmanager
from typing import Generic, TypeVar

from zufluss.coordinator.ledger import is_without_effect

K = TypeVar("K", bound=Hashable)


class Turns(Generic[K]):
    """The turns of all keys, and the keys that are in doubt.

    `read_again` replaces what is in memory under a key by what the store has.
    """

    def __init__(self, read_again: Callable[[K], Awaitable[None]]) -> None:
        self._read_again = read_again
        self._waiting: dict[K, deque[asyncio.Future[None]]] = {}
        self._doubtful: set[K] = set()

    # Turns

    @asynccontextmanager
    async def turn(self, key: K) -> AsyncIterator[None]:
        """Have the turn of a key in this block; first come, first served."""
        await self.begin(key)
        try:
            yield
        finally:
            self.end(key)

    def take(self, key: K) -> bool:
        """Begin the turn of a key if it is free; returns whether it began."""
        if key in self._waiting:
            return False
        self._waiting[key] = deque()
        return True

    def is_taken(self, key: K) -> bool:
        """Whether somebody has the turn of a key."""
        return key in self._waiting

    async def begin(self, key: K) -> None:
        """Begin the turn of a key as soon as all earlier callers have ended theirs."""
        if self.take(key):
            return
        passed_on = asyncio.get_running_loop().create_future()
        self._waiting[key].append(passed_on)
        try:
            await passed_on
        except asyncio.CancelledError:
            if not passed_on.cancelled():  # the turn was passed on to a task that is cancelled
                self.end(key)
            raise

    def end(self, key: K) -> None:
        """End the turn of a key, and pass it to the first waiting caller."""
        waiting = self._waiting[key]
        while waiting:
            passed_on = waiting.popleft()
            if not passed_on.done():
                passed_on.set_result(None)
                return
        del self._waiting[key]

    @property
    def busy(self) -> list[K]:
        """The keys whose turn somebody has."""
        return list(self._waiting)

    # Outcomes

    def is_doubtful(self, key: K) -> bool:
        """Whether the outcome of the last write of a key is unknown."""
        return key in self._doubtful

    def failed(self, key: K, problem: Exception) -> bool:
        """Note that a write of a key failed; returns whether the key is in doubt now."""
        if is_without_effect(problem):
            return False
        self._doubtful.add(key)
        return True

    async def settle(self, key: K) -> None:
        """Read a key again if it is in doubt; have its turn. Raises if it cannot be read."""
        if key in self._doubtful:
            await self._read_again(key)
            self._doubtful.discard(key)

    def __repr__(self) -> str:
        return f"Turns(busy={len(self._waiting)}, doubtful={len(self._doubtful)})"
