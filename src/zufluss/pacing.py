"""Long work on the event loop, in pieces between which other requests run.

A request may name 65,536 buckets, and one pass over them takes longer than other clients should
wait. Such a pass calls `pause` after each item: once paced work has taken 2 ms in this turn of the
event loop, it goes on in the next turn. All connections share the 2 ms, because clients may be many
and each may send hundreds of requests at once. A connection may do one item in every turn whatever
the others do, so nobody waits for them longer than one item of each. Of the requests of a
connection, those that came first go on first; those that wait sleep, and only the first few of them
are woken to try again. Work that belongs to no connection counts as one more.

    pace = Pace.current()
    for bucket in request.buckets:
        ...
        await pace.pause()

One item must be short by itself. Work that takes long in one piece goes `aside`, into a thread.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterable, Iterator
from contextvars import ContextVar
from typing import Final, TypeVar
from weakref import WeakKeyDictionary

T = TypeVar("T")

TURN_SECONDS: Final = 0.002
"""How long the paced work of all connections may take in one turn of the event loop."""
WAKES_AT_ONCE: Final = 16
"""Waiting requests of a connection that are woken in one turn: trying in vain takes time, too."""
ITEMS_AT_ONCE: Final = 64
"""Items that `paced` hands out between two looks at the clock."""
ASIDE_BYTES: Final = 32 * 1024
"""A message that is longer is parsed and checked in a thread."""


class _Turn:
    """What the paced work of all connections has left of the present turn of an event loop."""

    __slots__ = ("__weakref__", "_ends", "_loop", "_paces", "until")

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._paces: dict[Pace, None] = {}
        """The connections that did paced work in this turn, or wait for the next one."""
        self._ends = False
        self.until: float | None = None
        """When the share of this turn is used up; None if no paced work ran in it yet."""

    @staticmethod
    def of(loop: asyncio.AbstractEventLoop) -> _Turn:
        """The turn of an event loop."""
        turn = _turns.get(loop)
        if turn is None:
            turn = _turns[loop] = _Turn(loop)
        return turn

    def join(self, pace: Pace) -> None:
        """Tell `pace` when the turn ends."""
        self._paces[pace] = None
        if not self._ends:
            self._ends = True
            self._loop.call_soon(self._end)  # runs before what waits for the next turn

    def _end(self) -> None:
        self._ends, self.until = False, None
        paces, self._paces = self._paces, {}
        for pace in paces:
            pace.begin_turn()


class Pace:
    """The share that the work of one connection has in the turns of the event loop."""

    __slots__ = ("_back", "_clock", "_loop", "_turn", "_until", "_waiting", "_woken")

    def __init__(
        self, loop: asyncio.AbstractEventLoop, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._loop = loop
        self._clock = clock
        self._turn = _Turn.of(loop)
        self._until: float | None = None
        """When the share of this turn is used up; None if this connection did nothing in it yet."""
        self._waiting: deque[asyncio.Future[None]] = deque()
        """Work that waits for a later turn, in the order in which it goes on."""
        self._back: list[asyncio.Future[None]] = []
        """Work that was woken in this turn and has to wait again: it goes before the other."""
        self._woken: set[asyncio.Task[object] | None] = set()
        """The tasks that were woken in this turn."""

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

    def used_up(self) -> bool:
        """Whether this connection should do nothing more in this turn of the event loop."""
        now = self._clock()
        if self._until is None:  # one item in every turn, whatever the others do
            turn = self._turn
            if turn.until is None:
                turn.until = now + TURN_SECONDS
            self._until = turn.until
            turn.join(self)
            return False
        return now >= self._until

    async def pause(self) -> None:
        """Go on in a later turn of the event loop if the share of this one is used up."""
        while self.used_up():
            await self._next_turn()

    async def _next_turn(self) -> None:
        waiter: asyncio.Future[None] = self._loop.create_future()
        task = asyncio.current_task()
        (self._back if task in self._woken else self._waiting).append(waiter)
        try:
            await waiter
        except asyncio.CancelledError:
            self._turn.join(self)  # the others may have relied on this one to end the turn
            raise
        self._woken.add(task)

    def begin_turn(self) -> None:
        """A turn of the event loop has ended: have the first of those that wait try again."""
        self._until = None
        self._waiting.extendleft(reversed(self._back))
        self._back.clear()
        self._woken.clear()
        left = WAKES_AT_ONCE
        while left and self._waiting:
            waiter = self._waiting.popleft()
            if not waiter.done():  # otherwise it was cancelled
                waiter.set_result(None)
                left -= 1

    async def result(self, steps: Iterator[T | None]) -> T:
        """The first value of `steps` that is not None, with a pause before each step.

        Before the first one, too: many long requests may arrive in one turn.
        """
        await self.pause()
        for value in steps:
            if value is not None:
                return value
            await self.pause()
        raise ValueError("the steps end without a value")


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
_turns: WeakKeyDictionary[asyncio.AbstractEventLoop, _Turn] = WeakKeyDictionary()
