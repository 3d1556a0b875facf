"""Work of several tasks: what is awaited together, and tasks that end with their owner."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Iterable
from typing import Any, TypeVar

T = TypeVar("T")


async def together(work: Iterable[Coroutine[Any, Any, T]]) -> list[T]:
    """All results; after a failure the others are cancelled and have ended before it is raised."""
    tasks = [asyncio.ensure_future(each) for each in work]
    try:
        return await asyncio.gather(*tasks)
    except BaseException:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        raise


def forgive(task: asyncio.Task[Any]) -> None:
    """Keep asyncio from reporting the failure of a task that ended, if nobody waits any more."""
    if not task.cancelled():
        task.exception()


async def end(task: asyncio.Task[Any] | None) -> None:
    """Cancel a task, if there is one, and wait until it has ended."""
    if task is not None:
        task.cancel()
        await asyncio.wait([task])
