"""Waits for effects of other processes that report nothing: the only polling loops of the tests.

A server tells nobody that it has taken a snapshot or deleted a file, so tests ask until it has. The
deadline is far beyond what a loaded machine needs: a slow machine is not a failure.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import Any

from zufluss.errors import NetworkError, RequestTimeoutError

WAIT_SECONDS = 300.0
_PAUSE_SECONDS = 0.01


def eventually(condition: Callable[[], Any], what: str = "") -> Any:
    """Call `condition` until its result is true; returns that result."""
    deadline = time.monotonic() + WAIT_SECONDS
    while not (result := condition()):
        assert time.monotonic() < deadline, f"{what or condition} did not happen"
        time.sleep(_PAUSE_SECONDS)
    return result


async def eventually_async(condition: Callable[[], Awaitable[Any]], what: str = "") -> Any:
    """Await `condition` until its result is true; returns that result."""
    deadline = time.monotonic() + WAIT_SECONDS
    while not (result := await condition()):
        assert time.monotonic() < deadline, f"{what or condition} did not happen"
        await asyncio.sleep(_PAUSE_SECONDS)
    return result


def unless_away(condition: Callable[[], Any]) -> Any:
    """The result of `condition`, or False while the server does not answer."""
    try:
        return condition()
    except (NetworkError, RequestTimeoutError):
        return False
