"""Durability of a log: which bytes are on stable storage, and how that is recorded.

The half of `Log` between reading and appending. It plans the syncs of segments, of indexes and
writer snapshots (the side files) and of directories with new names, records in the checkpoint how
far the log is durable, and fails the log when a sync failed. `sync.py` carries the plans out.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import structlog

from zufluss.errors import LogStorageError
from zufluss.log.checkpoint import DurableMark, LogCheckpoint, write_checkpoint, write_mark
from zufluss.log.reader import LogReader
from zufluss.log.segment import SNAPSHOT_SUFFIX, Segment, headers
from zufluss.log.sync import SyncPlan
from zufluss.record.header import verify_crc

_logger = structlog.get_logger(__name__)


class DurableLog(LogReader):
    """A log that knows which of its bytes and names are durable."""

    __slots__ = (
        "_checkpoint", "_checkpoint_lock", "_deleted", "_names", "_names_changes", "_side_files",
        "_unsynced", "failure", "incarnation", "marked", "on_failure", "shared", "sync_failure",
        "sync_lock",
    )  # fmt: skip

    def __init__(self) -> None:
        self.failure: Exception | None = None
        """Why the log takes no more writes."""
        self.on_failure: Callable[[Any, Exception], None] | None = None
        """Called with the log when it takes no more writes, so that its owner can open it again."""
        self.incarnation = 0
        """Number of truncations in the log's life."""
        self.shared = False
        """The shared log has the end of this log, the files are a cache (`LogManager.open_shared`).
        The mark says then what was acknowledged, which may be less than is here."""
        self.marked = 0
        """Of a shared log: the end offset in the mark."""
        self.sync_lock = threading.Lock()
        self.sync_failure: OSError | None = None
        """See `sync.CheckpointedLog`."""
        self._checkpoint: LogCheckpoint | None = None
        self._checkpoint_lock = threading.Lock()
        self._deleted = False
        self._unsynced: list[Segment] = []
        """Closed segments with bytes that are not durable yet."""
        self._names: dict[Path, int] = {}
        """Directories with names that are not durable yet, each with the number of the change."""
        self._names_changes = 0
        self._side_files: dict[Path, None] = {}
        """Indexes and writer snapshots that the next checkpoint has to make durable."""

    @property
    def recovery_point(self) -> int:
        """Below this offset everything is durable in the segment files and recorded as such."""
        return self._checkpoint.recovery_point if self._checkpoint else self._bases[0]

    @property
    def deleted(self) -> bool:
        """`delete` was called."""
        return self._deleted

    def plan_sync(self, *, checkpoint: bool) -> SyncPlan:
        """Plan to make the log durable as it is now; with `checkpoint` also to record that."""
        segments = [
            (segment, segment.file or self.files.open(segment.path), segment.size)
            for segment in (*self._unsynced, self._active)
            if segment.synced < segment.size
        ]
        plan = SyncPlan(self, self.log_end_offset, self.incarnation, segments, dict(self._names))
        if self.shared:
            plan.acknowledged = self.high_watermark
        if checkpoint:
            plan.side_files = list(self._side_files)
            plan.checkpoint = LogCheckpoint(
                0,
                self.log_end_offset,
                self._active.base_offset,
                self._active.size,
                self.last_timestamp,
                self.incarnation,
            )
        return plan

    def synced(self, plan: SyncPlan) -> None:
        """Record that a plan was carried out."""
        if plan.incarnation != self.incarnation:
            return
        for segment, _, size in plan.segments:
            segment.synced = max(segment.synced, size)
            if segment is not self._active and segment.synced == segment.size:
                segment.file = None
        self._unsynced = [s for s in self._unsynced if s.synced < s.size]
        for directory, change in plan.directories.items():
            if self._names.get(directory) == change:
                del self._names[directory]
        for path in plan.side_files:
            self._side_files.pop(path, None)
        if plan.acknowledged is not None:
            self.marked = max(self.marked, plan.acknowledged)

    @property
    def unmarked(self) -> bool:
        """Whether the disk does not know of all that is here and acknowledged."""
        return self.log_end_offset > self.recovery_point or (
            self.shared and self.marked < self.high_watermark
        )

    def write_checkpoint(self, checkpoint: LogCheckpoint) -> None:
        """Record a checkpoint durably unless a truncation or a later one overtook it.

        May run in any thread.
        """
        with self._checkpoint_lock:
            current = self._checkpoint
            if self._deleted or checkpoint.incarnation != self.incarnation:
                return
            if current is not None and _order(checkpoint) <= _order(current):
                return
            counter = current.counter + 1 if current else 0
            checkpoint = checkpoint._replace(counter=counter)
            write_checkpoint(self.files, self.directory, checkpoint)
            self._checkpoint = checkpoint

    def mark_durable(self, end_offset: int, incarnation: int, *, sync: bool = False) -> None:
        """Note beside the checkpoint that everything below an offset is durable.

        A recovery that finds less refuses the log. Without `sync` the note outlives the process
        only. May run in any thread.
        """
        with self._checkpoint_lock:
            if not self._deleted and incarnation == self.incarnation:
                mark = DurableMark(end_offset, incarnation)
                write_mark(self.files, self.directory, mark, sync=sync)

    def _begin_incarnation(self, end: int, segment: Segment, position: int) -> None:
        """Record durably that the log ends here and that earlier commit-log entries are void."""
        with self._checkpoint_lock:
            self.incarnation += 1
        self.write_checkpoint(
            LogCheckpoint(
                0, end, segment.base_offset, position, self.last_timestamp, self.incarnation
            )
        )

    def fail(self, cause: Exception) -> None:
        """Take no more writes: something that had to be durable may not be."""
        if self.failure is None:
            self.failure = cause
            _logger.error("log_failed", log=str(self), reason=str(cause) or repr(cause))
            if self.on_failure is not None:
                self.on_failure(self, cause)

    def _refusal(self) -> LogStorageError:
        return LogStorageError(
            f"{self} takes no writes since an error ({self.failure or 'closed'!s}); the server "
            "opens it again by itself, send the write again later"
        )

    def _names_changed(self, directory: Path) -> None:
        self._names_changes += 1
        self._names[directory] = self._names_changes

    def _never_synced(self, root: Path) -> None:
        """Without a checkpoint it is unknown whether the names up to `root` are durable."""
        self._names_changed(self.directory)
        for parent in self.directory.parents:
            self._names_changed(parent)
            if parent == root:
                return

    def _suspect_side_files(self) -> None:
        """What an earlier process left beside its segments since the checkpoint may be unsynced."""
        point = self.recovery_point
        for segment, end in zip(self._segments, self._bases[1:], strict=False):
            if end >= point:
                self._side_files.update(
                    dict.fromkeys((*segment.paths[1:], self._snapshot_path(end)))
                )

    def _sync_now(self) -> None:
        plan = self.plan_sync(checkpoint=True)
        plan.run(self.files)
        self.synced(plan)

    def _write_again(self) -> None:
        """Write the batches again that are not known to be durable, so that a sync writes them.

        After a failed sync the system takes its pages for clean, and may read old bytes later.
        """
        for segment in self._segments:
            if segment.synced >= segment.size:
                continue
            file = self.files.open(segment.path)
            for position, header in headers(file, segment.synced, segment.size):
                batch = os.pread(file.fd, header.size, position)
                if not verify_crc(batch, 0, header):
                    raise LogStorageError(
                        f"{segment.path}: the batch at byte {position} changed while it was read"
                    )
                self.files.write_all(file.fd, batch, position)

    def _snapshot_path(self, offset: int) -> Path:
        return self.directory / f"{offset:020d}{SNAPSHOT_SUFFIX}"


def _order(checkpoint: LogCheckpoint) -> tuple[int, int, int]:
    return checkpoint.incarnation, checkpoint.recovery_point, checkpoint.segment_base
