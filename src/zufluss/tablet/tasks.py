"""Background work of a tablet server, beside its requests."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from functools import partial
from typing import Any

from zufluss.net.connection import ServerConnection
from zufluss.periodic import repeat


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

    def answer(
        self,
        connection: ServerConnection,
        work: Coroutine[Any, Any, None],
        release: Callable[[], None],
    ) -> None:
        """Run the coroutine that answers a request, and call `release` when it has ended.

        A coroutine answers its errors itself. If it fails all the same, or cannot even begin for
        lack of memory, the client loses its connection rather than wait in vain.
        """
        try:
            task = self.spawn(work)
        except BaseException:
            work.close()
            release()
            raise
        task.add_done_callback(partial(_answered, connection, release))

    def repeat(self, seconds: float, work: Callable[[], object]) -> None:
        """Call `work` periodically; a failure is logged and the next round comes."""
        self.spawn(repeat(seconds, work, "periodic_work_failed"))

    def cancel(self) -> None:
        """Cancel everything that is under way."""
        for task in tuple(self._tasks):
            task.cancel()


def _answered(
    connection: ServerConnection, release: Callable[[], None], task: asyncio.Task[None]
) -> None:
    release()
    connection.task_ended(task)
