"""When to try again, and how long to wait before.

The pauses grow exponentially with jitter and end at a deadline, so that a client never spins and
never hangs: what can pass is tried again, what cannot is raised at once, and when time is up the
last error is raised as it came.
"""

from __future__ import annotations

import asyncio
import random
from typing import Final

from zufluss.errors import ErrorCode, ZuflussError

FIRST_PAUSE_MS: Final = 50
LONGEST_PAUSE_MS: Final = 2_000

PASSING = frozenset(
    {
        ErrorCode.NETWORK_EXCEPTION,
        ErrorCode.REQUEST_TIME_OUT,
        ErrorCode.NOT_LEADER_OR_FOLLOWER,
        ErrorCode.UNKNOWN_TABLE_OR_BUCKET_EXCEPTION,
        ErrorCode.LEADER_NOT_AVAILABLE_EXCEPTION,
        ErrorCode.NOT_COORDINATOR_LEADER_EXCEPTION,
        ErrorCode.LOG_STORAGE_EXCEPTION,
        ErrorCode.KV_STORAGE_EXCEPTION,
        ErrorCode.STORAGE_EXCEPTION,
    }
)
"""Errors of a single call that may be gone in a moment. Codes such as SCHEMA_NOT_EXIST are
retriable for a writer or scanner, but an answer to somebody who asked."""


class Backoff:
    """The pauses of one operation, up to its deadline."""

    def __init__(self, timeout_ms: int) -> None:
        self._deadline = asyncio.get_running_loop().time() + timeout_ms / 1000
        self._pause_ms: float = FIRST_PAUSE_MS

    def pause_seconds(self) -> float:
        """How long to wait before the next try; each time longer."""
        seconds = self._pause_ms * random.uniform(0.8, 1.2) / 1000
        self._pause_ms = min(self._pause_ms * 2, LONGEST_PAUSE_MS)
        return seconds

    async def pause(self, cause: ZuflussError) -> None:
        """Wait; raise `cause` instead when the deadline would pass meanwhile."""
        seconds = self.pause_seconds()
        if asyncio.get_running_loop().time() + seconds >= self._deadline:
            raise cause
        await asyncio.sleep(seconds)
