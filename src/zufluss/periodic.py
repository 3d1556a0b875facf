"""Work that a server repeats as long as it runs.

Retention, uploads, heartbeats and retries must not end because memory ran out for an instant: the
server would go on without them until its next start. A timer needs memory, too, so even the pause
between two rounds can fail. Here such a failure lasts no longer than its cause.
"""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Callable
from contextlib import suppress

import structlog

from zufluss.errors import ZuflussError

log = structlog.get_logger(__name__)


async def pause(seconds: float, wake: asyncio.Event | None = None) -> None:
    """Wait some seconds, or until `wake` is set.

    Without memory for a timer this waits until there is some.
    """
    while True:
        try:
            if wake is None:
                await asyncio.sleep(seconds)
            else:
                with suppress(TimeoutError):
                    async with asyncio.timeout(seconds):
                        await wake.wait()
            return
        except MemoryError:
            await asyncio.sleep(0)  # has no timer


async def repeat(
    seconds: float | Callable[[], float], work: Callable[[], object], failed: str
) -> None:
    """Call `work`, and await it if it can be awaited, after each pause of so many seconds.

    A failure is logged as the event `failed`, and the next round comes.
    """
    while True:
        await pause(seconds() if callable(seconds) else seconds)
        try:
            outcome = work()
            if inspect.isawaitable(outcome):
                await outcome
        except Exception as problem:
            log_failure(failed, problem)


def log_failure(event: str, problem: Exception) -> None:
    """Log a failed round: one line for an error that is ours, a traceback for any other."""
    with suppress(MemoryError):  # the log line needs memory, too
        if isinstance(problem, ZuflussError):
            log.warning(event, error=str(problem))
        else:
            log.error(event, exc_info=problem)
