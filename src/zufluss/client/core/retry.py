"""Which errors are worth a retry, and how long to pause before it.

Pauses grow exponentially, with jitter, and end at a deadline. So a client neither spins nor hangs:
passing errors are retried, other errors are raised at once, and at the deadline the last error is
raised unchanged. The deadline counts for all of an operation: connecting, requests that get no
answer, refreshes of metadata, and pauses.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Final

from zufluss.errors import ErrorCode, RequestTimeoutError, ZuflussError

FIRST_PAUSE_MS: Final = 50
LONGEST_PAUSE_MS: Final = 2_000
GRACE_MS: Final = 250
"""How long a block waits beyond its deadline for the timeouts of its own requests."""

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
    """The attempts of one operation and the pauses between them, all before one deadline."""

    def __init__(self, timeout_ms: float, *, since: float | None = None) -> None:
        self._timeout_ms = timeout_ms
        begun = asyncio.get_running_loop().time() if since is None else since
        self._deadline = begun + timeout_ms / 1000
        self._pause_ms: float = FIRST_PAUSE_MS
        self._cause: ZuflussError | None = None

    @property
    def left_ms(self) -> int:
        """Milliseconds until the deadline, at least 1: the timeout of a request."""
        return max(1, round((self._deadline - asyncio.get_running_loop().time()) * 1000))

    @asynccontextmanager
    async def attempt(self) -> AsyncIterator[None]:
        """End the block at the deadline: raises the last failure, or `RequestTimeoutError`.

        Requests in the block have the same deadline, and their error names the server; so the
        block has `GRACE_MS` more.
        """
        limit = asyncio.timeout_at(self._deadline + GRACE_MS / 1000)
        try:
            async with limit:
                yield
        except TimeoutError as e:
            if isinstance(e, ZuflussError) or not limit.expired():
                raise
            late = RequestTimeoutError(f"the cluster did not answer within {self._timeout_ms} ms")
            raise self._cause or late from None

    def pause_seconds(self) -> float:
        """Seconds to wait before the next try; grows with each call."""
        seconds = self._pause_ms * random.uniform(0.8, 1.2) / 1000
        self._pause_ms = min(self._pause_ms * 2, LONGEST_PAUSE_MS)
        return seconds

    async def pause(self, cause: ZuflussError) -> None:
        """Wait, or raise `cause` if the deadline would pass meanwhile."""
        self._cause = cause
        seconds = self.pause_seconds()
        if asyncio.get_running_loop().time() + seconds >= self._deadline:
            raise cause
        await asyncio.sleep(seconds)
