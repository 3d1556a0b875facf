"""Tasks that must end before their owner stops.

A change of the metadata store is followed by a change in memory. Were the task of a change
cancelled in between because its caller went away, memory would differ from the store. So every
change runs in a task of its own, which the owner waits for when it stops.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

import structlog

from zufluss.errors import ZuflussError

log = structlog.get_logger(__name__)

T = TypeVar("T")


class PendingTasks:
    """The tasks under way of one owner; `name` is the first word of what is logged."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._tasks: set[asyncio.Task[Any]] = set()

    @property
    def under_way(self) -> int:
        """Number of tasks that have not ended."""
        return len(self._tasks)

    def begin(self, work: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        """Run the work in a task; the caller looks at its outcome."""
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def undisturbed(self, work: Coroutine[Any, Any, T]) -> T:
        """Return the result of the work; it is finished even if the caller is cancelled.

        If it fails after its caller went away, the failure is logged.
        """
        task = self.begin(work)
        try:
            return await asyncio.shield(task)
        except asyncio.CancelledError:
            task.add_done_callback(self._log_failure)
            raise

    def later(self, work: Coroutine[Any, Any, None]) -> None:
        """Run the work in a task that nobody waits for; a failure is logged."""
        self.begin(work).add_done_callback(self._log_failure)

    def _log_failure(self, task: asyncio.Task[Any]) -> None:
        if task.cancelled() or (problem := task.exception()) is None:
            return
        if isinstance(problem, ZuflussError):  # refused, such as a change of a dropped table
            log.warning(f"{self._name}_task_refused", error=str(problem))
        else:
            log.error(f"{self._name}_task_failed", exc_info=problem)

    async def settle(self) -> None:
        """Wait until no task is under way, the tasks that others begin meanwhile included."""
        while self._tasks:
            await asyncio.wait(self._tasks)

    def __repr__(self) -> str:
        return f"PendingTasks({self._name!r}, under_way={len(self._tasks)})"
