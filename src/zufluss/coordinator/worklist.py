"""A work list: a few keys are worked on at a time, and again, ever more rarely, after failures.

The work itself is durable elsewhere; the list only orders it in memory. A key that is added while
it is being worked on is worked on once more. A key whose work failed waits; adding it again ends
the wait.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Hashable
from functools import partial
from typing import Generic, TypeVar

import structlog

from zufluss.errors import ZuflussError

log = structlog.get_logger(__name__)

K = TypeVar("K", bound=Hashable)

FIRST_SECONDS = 1.0
"""Pause after the first failure; twice as long after each further one."""
MOST_SECONDS = 300.0
"""Longest pause after a failure."""


class WorkList(Generic[K]):
    """Keys that tasks of the event loop work on, once the list is started."""

    def __init__(
        self,
        name: str,
        work: Callable[[K], Awaitable[None]],
        *,
        workers: int,
        first_seconds: float = FIRST_SECONDS,
    ) -> None:
        self.failures = 0
        """Failures since the start of the process."""
        self._name = name
        self._work = work
        self._workers = workers
        self._first_seconds = first_seconds
        self._started = False
        self._due: OrderedDict[K, None] = OrderedDict()
        self._running: dict[K, asyncio.Task[None]] = {}
        self._waiting: dict[K, asyncio.TimerHandle] = {}
        self._tries: dict[K, int] = {}
        self._idle = asyncio.Event()
        self._idle.set()

    @property
    def keys(self) -> set[K]:
        """Keys that are due, are worked on, or wait after a failure."""
        return {*self._due, *self._running, *self._waiting}

    @property
    def pending(self) -> int:
        """The number of `keys`."""
        return len(self.keys)

    def add(self, key: K) -> None:
        """Work on a key as soon as a worker is free."""
        timer = self._waiting.pop(key, None)
        if timer is not None:
            timer.cancel()
        self._due[key] = None
        self._fill()

    def start(self) -> None:
        """Begin to work."""
        self._started = True
        self._fill()

    async def stop(self) -> None:
        """Cancel the work under way, and begin no more."""
        self._started = False
        for timer in self._waiting.values():
            timer.cancel()
        tasks = list(self._running.values())
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)

    async def settle(self) -> None:
        """Wait until every key was tried; keys that failed may still wait for their next try."""
        await self._idle.wait()

    def hurry(self) -> None:
        """Work on the keys that failed without further pause."""
        for key in tuple(self._waiting):
            self.add(key)

    def _fill(self) -> None:
        while self._started and len(self._running) < self._workers:
            key = next((key for key in self._due if key not in self._running), None)
            if key is None:
                break
            del self._due[key]
            task = asyncio.create_task(self._run(key), name=self._name)
            self._running[key] = task
            task.add_done_callback(partial(self._ended, key))
        if self._running or (self._due and self._started):
            self._idle.clear()
        else:
            self._idle.set()

    def _ended(self, key: K, task: asyncio.Task[None]) -> None:
        del self._running[key]
        self._fill()

    async def _run(self, key: K) -> None:
        try:
            await self._work(key)
        except ZuflussError as problem:
            log.warning(f"{self._name}_failed", key=str(key), error=str(problem))
            self._again(key)
        except Exception:
            log.exception(f"{self._name}_failed", key=str(key))
            self._again(key)
        else:
            self._tries.pop(key, None)

    def _again(self, key: K) -> None:
        self.failures += 1
        tries = self._tries[key] = self._tries.get(key, 0) + 1
        if not self._started or key in self._due:
            return
        seconds = min(self._first_seconds * 2 ** min(tries - 1, 30), MOST_SECONDS)
        self._waiting[key] = asyncio.get_running_loop().call_later(seconds, self.add, key)

    def __repr__(self) -> str:
        return f"WorkList({self._name!r}, pending={self.pending})"
