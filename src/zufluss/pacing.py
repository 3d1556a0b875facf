"""Long work on the event loop, in pieces between which other requests run.

A request may name 65,536 buckets, and one pass over them takes longer than other clients should
wait. Such a pass calls `pause` after each item: once the paced work of a client has taken 5 ms in
this turn of the event loop, it goes on in the next turn. All requests of a connection share the
5 ms, because a client may send hundreds of them at once; those that came first go on first. Work
that belongs to no connection has a share of its own.

    pace = Pace.current()
    for bucket in request.buckets:
        ...
        await pace.pause()

One item must be short by itself. Work that takes long in one piece goes `aside`, into a thread.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Iterable, Iterator
from contextvars import ContextVar
from typing import Final, TypeVar
from weakref import WeakKeyDictionary

T = TypeVar("T")

TURN_SECONDS: Final = 0.005
"""How long the paced work of one connection may take in one turn of the event loop."""
ITEMS_AT_ONCE: Final = 64
"""Items that `paced` hands out between two looks at the clock."""
ASIDE_BYTES: Final = 32 * 1024
"""A message that is longer is parsed and checked in a thread."""


class Pace:
    """The share that the work of one connection has in the turns of the event loop."""

    __slots__ = ("_clock", "_loop", "_until")

    def __init__(
        self, loop: asyncio.AbstractEventLoop, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._loop = loop
        self._clock = clock
        self._until: float | None = None
        """When the share of this turn is used up; None if no paced work ran in it yet."""

    @staticmethod
    def current() -> Pace:
        """The pace of the connection that the running task works for."""
        pace = _of_task.get()
        if pace is None:
            loop = asyncio.get_running_loop()
            pace = _of_loop.get(loop)
            if pace is None:
                pace = _of_loop[loop] = Pace(loop)
        return pace

    def adopt(self) -> None:
        """Let this be the pace of the running task, and of the tasks that it begins."""
        _of_task.set(self)

    async def pause(self) -> None:
        """Go on in a later turn of the event loop if the share of this one is used up."""
        while True:
            now = self._clock()
            if self._until is None:
                self._until = now + TURN_SECONDS
                self._loop.call_soon(self._end_turn)  # runs before what waits for the next turn
            if now < self._until:
                return
            await asyncio.sleep(0)

    async def result(self, steps: Iterator[T | None]) -> T:
        """The first value of `steps` that is not None, with a pause after each None."""
        for value in steps:
            if value is not None:
                return value
            await self.pause()
        raise ValueError("the steps end without a value")

    def _end_turn(self) -> None:
        self._until = None


async def paced(items: Iterable[T]) -> AsyncIterator[T]:
    """Yield the items, and let other requests run in between."""
    pace = Pace.current()
    for number, item in enumerate(items):
        if number % ITEMS_AT_ONCE == 0:
            await pace.pause()
        yield item


async def aside(size: int, work: Callable[[], T]) -> T:
    """Do work on a message of `size` bytes, in a thread if it is long."""
    return await asyncio.to_thread(work) if size > ASIDE_BYTES else work()


_of_task: ContextVar[Pace | None] = ContextVar("pace", default=None)
_of_loop: WeakKeyDictionary[asyncio.AbstractEventLoop, Pace] = WeakKeyDictionary()
