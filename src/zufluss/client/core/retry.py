"""Which errors are worth a retry, and how long to pause before it.

Pauses grow exponentially, with jitter, and end at a deadline. So a client neither spins nor hangs:
passing errors are retried, other errors are raised at once, and at the deadline the last error is
raised unchanged.
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
"""Errors of a single call that may pass within a moment. A writer or scanner also retries codes
such as SCHEMA_NOT_EXIST; for a single call they are the answer."""


class Backoff:
    """The pauses of one operation, up to its deadline."""

    def __init__(self, timeout_ms: int) -> None:
        self._deadline = asyncio.get_running_loop().time() + timeout_ms / 1000
        self._pause_ms: float = FIRST_PAUSE_MS

    def pause_seconds(self) -> float:
        """Seconds to wait before the next try; grows with each call."""
        seconds = self._pause_ms * random.uniform(0.8, 1.2) / 1000
        self._pause_ms = min(self._pause_ms * 2, LONGEST_PAUSE_MS)
        return seconds

    async def pause(self, cause: ZuflussError) -> None:
        """Wait, or raise `cause` if the deadline would pass meanwhile."""
        seconds = self.pause_seconds()
        if asyncio.get_running_loop().time() + seconds >= self._deadline:
            raise cause
        await asyncio.sleep(seconds)
