"""Background work of a tablet server, beside its requests."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

import structlog

log = structlog.get_logger(__name__)


class BackgroundTasks:
    """The tasks of a server: referenced while they run, cancelled when the server stops."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._tasks: set[asyncio.Task[None]] = set()

    def spawn(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """Run a coroutine beside the requests."""
        task = self._loop.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    def repeat(self, seconds: float, work: Callable[[], object]) -> None:
        """Call `work` periodically; a failure is logged and the next round comes."""
        self.spawn(_repeat(seconds, work))

    def cancel(self) -> None:
        """Cancel everything that is under way."""
        for task in tuple(self._tasks):
            task.cancel()


async def _repeat(seconds: float, work: Callable[[], object]) -> None:
    while True:
        await asyncio.sleep(seconds)
        try:
            work()
        except Exception:
            log.exception("periodic_work_failed")
