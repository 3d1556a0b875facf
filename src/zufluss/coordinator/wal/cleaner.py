"""Objects of sessions that no bucket needs any more.

A session that has ended is needed while it has the end of some bucket. Once it has none, no bucket
gets it back, because leaders only ever commit their own live session. Then its data is deleted.
Its seals, and a close, stay for `SEALS_KEPT_DAYS`: a server that was paused could take the free
name of one and believe that its session goes on. A server that had no word of the coordinator for
half of that time acknowledges nothing any more (`tablet/shared/lease.py`).

The floor of a live session is its server's affair (`tablet/shared/trim.py`).
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Final

import structlog

from zufluss.coordinator.wal.book import SessionRecord
from zufluss.coordinator.wal.keeper import WalKeeper
from zufluss.errors import ZuflussError
from zufluss.periodic import log_failure, repeat
from zufluss.remote.wal import session_directory
from zufluss.tasks import end

log = structlog.get_logger(__name__)

CLEAN_SECONDS: Final = 30.0
"""Time between two rounds."""
SEALS_KEPT_DAYS: Final = 30
DAY_MS: Final = 24 * 3600 * 1000
EVERYTHING: Final = 1 << 63
"""Above every number of an object."""


class WalCleaner:
    """Deletes what sessions have left."""

    def __init__(
        self,
        keeper: WalKeeper,
        clock_ms: Callable[[], int],
        reach: Callable[[str], None],
        *,
        ends_all: bool = False,
    ) -> None:
        """`clock_ms` is the time by which things expire.

        `ends_all` is for a cluster that has no shared log any more: nobody goes on with a session.
        """
        self._keeper = keeper
        self._ends_all = ends_all
        self._clock_ms = clock_ms
        self._reach = reach
        self._deleted: set[int] = set()
        """Sessions whose data this process has deleted."""
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Clean from now on."""
        work = repeat(CLEAN_SECONDS, self.clean, "wal_not_cleaned")
        self._task = asyncio.create_task(work, name="wal-cleaner")

    async def stop(self) -> None:
        """Stop; the next coordinator goes on."""
        await end(self._task)
        await self._keeper.stop()

    async def clean(self) -> None:
        """Delete what nobody needs."""
        if self._ends_all:
            left = [record.session for record in self._keeper.book if not record.has_ended]
            await self._keeper.end_sessions(left)
        for record in await self._keeper.release_unused():
            try:
                await self._clean(record)
            except ZuflussError as problem:
                log_failure("wal_session_not_cleaned", problem)

    async def _clean(self, record: SessionRecord) -> None:
        session, epoch = record.session, record.session.server_epoch
        self._reach("wal-delete")
        if self._keeper.is_lost(session):
            await self._keeper.forget(session)
            return
        shared = self._keeper.shared_log(session)
        if epoch not in self._deleted:
            count = await shared.trim(self._keeper.name(session), EVERYTHING)
            self._deleted.add(epoch)
            log.info("wal_session_deleted", server_epoch=epoch, objects=count)
        if self._clock_ms() - record.ended_ms > SEALS_KEPT_DAYS * DAY_MS:
            await shared.forget(self._keeper.name(session))
            await self._keeper.forget(session)
            self._deleted.discard(epoch)
            log.info("wal_session_forgotten", directory=session_directory(epoch))
