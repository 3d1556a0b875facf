"""Making a log durable in its own files, and saying so in its checkpoint.

The event loop owns a log; only the syncing itself runs in a thread. So it goes in three steps: the
loop makes a `SyncPlan` (which open files, up to which size, which directories, which checkpoint),
a thread carries it out, and the loop tells the log that the plan was done. Between the first and
the last step the log may grow, roll, be cut or be deleted: a plan holds its files open, says up to
where it is valid, and carries the incarnation it was made for.
"""

from __future__ import annotations

import errno
import threading
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

import structlog

from zufluss.log.checkpoint import LogCheckpoint
from zufluss.log.files import Files, OpenFile
from zufluss.log.segment import Segment

DISK_FULL = (errno.ENOSPC, errno.EDQUOT)
"""Errors that pass when space is freed."""

NOT_OPENED = (errno.EMFILE, errno.ENFILE)
"""Errors of a file that could not be opened, because the process or the system has too many."""

_logger = structlog.get_logger(__name__)


def is_shortage(error: object) -> bool:
    """Whether a plan failed for want of memory or descriptors: no sync failed, try it again."""
    return isinstance(error, MemoryError) or (
        isinstance(error, OSError) and error.errno in NOT_OPENED
    )


class CheckpointedLog(Protocol):
    """A log (`log.Log`) as far as a plan needs it."""

    sync_lock: threading.Lock
    """Held while segments are synced: the system reports an error to one sync only."""
    sync_failure: OSError | None
    """The failed sync after which no other sync of this log proves anything."""

    def write_checkpoint(self, checkpoint: LogCheckpoint) -> None:
        """Record a checkpoint durably."""

    def mark_durable(self, end_offset: int, incarnation: int) -> None:
        """Note that everything below an offset is durable."""


@dataclass(slots=True)
class SyncPlan:
    """What has to be synced for a log to be durable up to `end_offset`."""

    log: CheckpointedLog
    """The log."""
    end_offset: int
    """The end of the log when the plan was made."""
    incarnation: int
    """The number of truncations when the plan was made."""
    segments: list[tuple[Segment, OpenFile, int]]
    """Segments with bytes not yet durable, oldest first, and their size then."""
    directories: dict[Path, int]
    """Directories with new names, each with the number of the change."""
    checkpoint: LogCheckpoint | None = None
    """To be written afterwards, if at all."""
    side_files: list[Path] = field(default_factory=list)
    """Indexes and snapshots that go with the checkpoint."""
    acknowledged: int | None = None
    """Of a log in the shared log: everything below was acknowledged when the plan was made."""

    def run(self, files: Files) -> None:
        """Carry the plan out; `OSError` if anything could not be made durable. For any thread."""
        if self.segments:
            self._sync_segments(files)
        if self.checkpoint is not None:
            for path in self.side_files:
                files.sync_file(path)
        for directory in self.directories:
            files.sync_directory(directory)
        if self.acknowledged is not None:
            self._mark(self.acknowledged)
        if self.checkpoint is not None:
            self._record(self.checkpoint)
        elif self.segments and self.acknowledged is None:
            self._mark(self.end_offset)

    def _mark(self, end_offset: int) -> None:
        """Write the mark; without it, the next recovery cannot tell a lost end from an old one."""
        try:
            self.log.mark_durable(end_offset, self.incarnation)
        except (OSError, MemoryError) as e:
            _logger.warning("log_mark_not_written", log=str(self.log), reason=str(e) or repr(e))

    def _sync_segments(self, files: Files) -> None:
        log = self.log
        with log.sync_lock:
            if log.sync_failure is not None:
                raise OSError(errno.EIO, f"an earlier sync failed: {log.sync_failure}")
            try:
                for _, file, _ in self.segments:
                    files.fdatasync(file.fd)
            except OSError as e:
                log.sync_failure = e
                raise

    def _record(self, checkpoint: LogCheckpoint) -> None:
        """Write the checkpoint; a full disk only makes the next recovery read more."""
        try:
            self.log.write_checkpoint(checkpoint)
        except OSError as e:
            if e.errno not in DISK_FULL:
                raise
            _logger.warning("log_checkpoint_not_written", log=str(self.log), reason=str(e))
