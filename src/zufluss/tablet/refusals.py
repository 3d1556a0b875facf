"""Log lines about refused writes, few enough to read.

In a shortage every write of every client is refused, often for the same reason. The first refusal
of a kind is logged, and then one a second at most, with the number of those that were left out. A
kind is an event, a table and an error code.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, Final

import structlog

from zufluss.errors import ZuflussError

log = structlog.get_logger(__name__)

PAUSE_SECONDS: Final = 1.0
"""Time between two lines about refusals of one kind."""
KINDS_MAX: Final = 1000
"""Kinds that are remembered; beyond that all are forgotten, and may be logged again at once."""


class RefusalLog:
    """Logs refused writes. Belongs to the event loop."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._kinds: dict[tuple[str, int, int], tuple[float, int]] = {}
        """When each kind was last logged, and how many were left out since."""

    def refused(self, event: str, error: ZuflussError, table_id: int, **fields: Any) -> None:
        """Log a refusal that clients may cause."""
        self._log(log.info, event, error, table_id, fields | {"error": str(error)})

    def failed(
        self, event: str, error: ZuflussError, problem: Exception, table_id: int, **fields: Any
    ) -> None:
        """Log a failure of the server, with a traceback if it was unexpected."""
        shown = {"error": str(error)} if problem is error else {"exc_info": problem}
        self._log(log.error, event, error, table_id, fields | shown)

    def _log(
        self,
        write: Callable[..., Any],
        event: str,
        error: ZuflussError,
        table_id: int,
        fields: dict[str, Any],
    ) -> None:
        kind, now = (event, table_id, int(error.code)), self._clock()
        logged_at, left_out = self._kinds.get(kind, (now - PAUSE_SECONDS, 0))
        if now - logged_at < PAUSE_SECONDS:
            self._kinds[kind] = (logged_at, left_out + 1)
            return
        if len(self._kinds) >= KINDS_MAX:
            self._kinds.clear()
        self._kinds[kind] = (now, 0)
        if left_out:
            fields["left_out"] = left_out
        write(event, table_id=table_id, **fields)
