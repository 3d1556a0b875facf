"""From an append to its acknowledgement: appended → durable → high watermark.

    append (`produce.py`, `put.py`) → `appended` → what makes it durable
      → `Replica.advance` acknowledges the write and wakes readers

| `zufluss.log.durability` | what makes an entry durable |
|---|---|
| `local` | the group commit of this loop turn (`log/manager.py`) syncs it to the disk |
| `remote` | the session of this server writes it to the shared log (`shared/session.py`) |

With `local` and `zufluss.log.flush` = os an entry is acknowledged as soon as it is written. A sync
that fails fails its bucket: writes that wait are refused, and the bucket is opened again
(`assignments.py`).

Belongs to the event loop.
"""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import TYPE_CHECKING

from zufluss.config import options
from zufluss.config.load import Configuration
from zufluss.errors import reason_of
from zufluss.log.config import FlushMode
from zufluss.log.files import Files
from zufluss.log.log import Log
from zufluss.log.manager import LogManager
from zufluss.model.table import TableBucket
from zufluss.replica.replica import Replica
from zufluss.tablet.buckets import Buckets

if TYPE_CHECKING:
    from zufluss.tablet.shared.host import SharedHost


class Durability:
    """Makes appended entries durable and acknowledges them; has the logs of the server."""

    shared: SharedHost | None = None
    """The shared log of this server; None where the disk makes entries durable."""

    def __init__(self, conf: Configuration, files: Files, buckets: Buckets) -> None:
        flush = FlushMode(conf.get(options.ZUFLUSS_LOG_FLUSH))
        if conf.get(options.ZUFLUSS_LOG_DURABILITY) == "remote":
            flush = FlushMode.SHARED
        self.logs = LogManager(
            Path(conf.get(options.DATA_DIR)),
            files=files,
            flush=flush,
            on_durable=self._durable,
            on_failure=self._failed,
            flush_interval_ms=conf.get(options.ZUFLUSS_LOG_FLUSH_INTERVAL),
            checkpoint_interval_ms=conf.get(options.LOG_FLUSH_OFFSET_CHECKPOINT_INTERVAL),
            retention_rolls_active=conf.get(options.LOG_RETENTION_ROLL_ACTIVE_SEGMENT_ENABLED),
        )
        self._buckets = buckets
        self._loop = asyncio.get_running_loop()
        self._acknowledge_written = flush is FlushMode.OS
        self._commit_scheduled = False

    def admit(self) -> None:
        """Raise if nothing may be appended at present; asked before anything is written."""
        if self.shared is not None:
            self.shared.admit()

    def appended(
        self, replica: Replica, end_offset: int, view: memoryview, start: int, end: int
    ) -> None:
        """`view[start:end]` is in the log of the replica: acknowledge it when the mode says so.

        After an exception its caller fails the replica: what is in the log may never be durable.
        """
        if self.shared is not None:
            session, epoch = self.shared.session, replica.leader_epoch
            session.append(replica.bucket, epoch, end_offset, view[start:end])
        elif self._acknowledge_written or self.logs.commit(
            replica.log, end_offset, view[start:end]
        ):
            replica.advance(end_offset)
        elif not self._commit_scheduled:
            self._loop.call_soon(self.commit)
            self._commit_scheduled = True

    def commit(self) -> None:
        """Commit what was appended: at the end of a turn, and now and then in case that failed."""
        self._commit_scheduled = False
        self.logs.schedule()
        if self.shared is not None:
            self.shared.go_on()

    def written(self, ends: list[tuple[TableBucket, int]]) -> None:
        """The shared log has these buckets up to these offsets."""
        for bucket, end_offset in ends:
            replica = self._buckets.find(*bucket)
            if replica is not None:
                self._advance(replica, end_offset)

    def _durable(self, synced: list[tuple[Log, int]]) -> None:
        by_log = self._buckets.by_log
        for log, end_offset in synced:
            replica = by_log.get(log)
            if replica is not None:
                self._advance(replica, end_offset)

    def _advance(self, replica: Replica, end_offset: int) -> None:
        try:
            replica.advance(end_offset)
        except Exception as e:  # of its own waiters, which must not cost other buckets theirs
            replica.fail(f"writes were not acknowledged ({reason_of(e)})")

    def _failed(self, log: Log, error: Exception) -> None:
        replica = self._buckets.by_log.get(log)
        if replica is not None:
            replica.fail(f"its log failed ({error or repr(error)})")
