"""Group commit: entries of all buckets become durable together, before they are acknowledged.

`add` gathers an appended entry, `schedule` (once per turn of the event loop) hands what has
gathered to a thread unless it is still syncing; the next group gathers meanwhile. Small entries
are copied into the commit log (`commit_log.py`) and share one write and one fdatasync. Large
entries are not copied: their segment files are synced in the same group, before the commit log is
written, so the commit log never continues something that is lost. The outcome comes back to the
loop as one call of `on_durable` with the logs and the offsets they are durable up to.

When the file in use is full, the next free one takes over and the flusher makes the logs with
entries in the full one durable in their own files; then it is free again. If none is free, groups
go without the commit log and sync the segment files: slower, never wrong.

A failed sync is final. The logs whose entries were in the group take no more writes; if it was the
commit log itself that failed, that goes for every log that commits afterwards. A full file whose
logs could not all be synced is never used again: it may hold their only durable copy.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from pathlib import Path

import structlog

from zufluss.errors import LogStorageError
from zufluss.log.commit_log import (
    ENTRY_LENGTH,
    GROUP_HEADER,
    CommitFile,
    entry_prefix,
    leave_out,
    seal_group,
    write_group,
)
from zufluss.log.files import Files
from zufluss.log.flush import LogFlusher, OnFailure, fail_log, plan_sync, run_plan
from zufluss.log.log import Log
from zufluss.log.sync import SyncPlan
from zufluss.log.worker import Worker

FILE_BYTES = 32 << 20
"""Size of a commit file."""

FILES_MAX = 3
"""Commit files that may be in use at a time."""

GROUP_BYTES_MAX = 4 << 20
"""A group that has gathered this much takes further entries without a copy."""

OnDurable = Callable[[list[tuple[Log, int]]], None]
"""Told which logs are durable up to which offset."""

_BASE_OFFSET = struct.Struct("<q")

_logger = structlog.get_logger(__name__)


class _Group:
    """Entries that become durable together."""

    __slots__ = ("buffer", "copied", "file", "plans", "position", "waiting")

    def __init__(self) -> None:
        self.buffer = bytearray(GROUP_HEADER.size)
        self.waiting: dict[Log, tuple[int, int]] = {}
        """End offset and incarnation by log."""
        self.copied: dict[Log, None] = {}
        """Logs with entries in the buffer."""
        self.plans: dict[Log, SyncPlan | None] = {}
        """Logs whose segment files are synced in this group."""
        self.file: CommitFile | None = None
        self.position = 0

    def run(self, files: Files) -> dict[Log, Exception]:
        """Make the group durable; return the logs whose own files could not be synced."""
        failed = {}
        for log, plan in self.plans.items():
            if plan is not None and (error := run_plan(plan, files)) is not None:
                failed[log] = error
        if self.file is not None:
            holes = self.copied.keys() & failed
            if holes:  # behind what a log just lost nothing must follow
                leave_out(self.buffer, {entry_prefix(log) for log in holes})
            write_group(files, self.file, self.position, self.buffer)
        return failed


class _Position:
    """How far a log has been added to groups, and the key of its entries."""

    __slots__ = ("end_offset", "incarnation", "prefix")

    def __init__(self, log: Log) -> None:
        self.incarnation = log.incarnation
        self.end_offset = log.recovery_point
        self.prefix = entry_prefix(log)


class GroupCommit:
    """The commit log of a server and the groups that go into it."""

    def __init__(
        self,
        directory: Path,
        *,
        files: Files,
        worker: Worker,
        flusher: LogFlusher,
        on_durable: OnDurable,
        on_failure: OnFailure,
        generation: int = 0,
        file_bytes: int = FILE_BYTES,
    ) -> None:
        self._directory = directory
        self._files = files
        self._worker = worker
        self._flusher = flusher
        self._on_durable = on_durable
        self._on_failure = on_failure
        self._generation = generation
        self._file_bytes = file_bytes
        self._positions: dict[Log, _Position] = {}
        self._gathering = _Group()
        self._in_flight = False
        self._number = 0
        self._current: CommitFile | None = None
        self._free: list[CommitFile] = []
        self._count = 0
        self._preparing = False
        self._failure: Exception | None = None

    def start(self) -> None:
        """Create the first commit file; until it exists, groups sync the segment files."""
        self._prepare()

    def add(self, log: Log, end_offset: int, view: memoryview | None) -> None:
        """Have an appended entry made durable: by its bytes, or, with None, in its segment.

        Entries that were appended to the log but never added here are made durable with it.
        """
        group = self._gathering
        group.waiting[log] = (end_offset, log.incarnation)
        position = self._positions.get(log)
        if position is None or position.incarnation != log.incarnation:
            position = self._positions[log] = _Position(log)
        if (
            view is None
            or len(group.buffer) > GROUP_BYTES_MAX
            or position.end_offset != _BASE_OFFSET.unpack_from(view)[0]
        ):
            group.plans[log] = None
        else:
            buffer = group.buffer
            buffer += position.prefix
            buffer += ENTRY_LENGTH.pack(len(view))
            buffer += view
            group.copied[log] = None
        position.end_offset = end_offset

    def schedule(self) -> None:
        """Start a group with the entries that wait, unless a group is under way."""
        if not self._in_flight and self._gathering.waiting:
            self._start()

    def forget(self, log: Log) -> None:
        """Forget a log that was closed or deleted."""
        self._positions.pop(log, None)

    @property
    def idle(self) -> bool:
        """Whether no entry waits to become durable."""
        return not self._in_flight and not self._gathering.waiting

    def _start(self) -> None:
        group, self._gathering = self._gathering, _Group()
        if self._failure is not None:
            self._fail(group.waiting, self._failure)
            return
        if group.copied:
            self._place(group)
        self._plan_syncs(group)
        self._in_flight = True
        files = self._files
        self._worker.submit(lambda: group.run(files), lambda outcome: self._finish(group, outcome))

    def _place(self, group: _Group) -> None:
        """Give the group its place in the commit log, or fall back to the segment files."""
        length = len(group.buffer)
        if self._current is None or not self._current.room_for(length):
            self._switch()
        if self._current is None or not self._current.room_for(length):
            group.plans.update(dict.fromkeys(group.copied))
            return
        group.file = self._current
        group.position = self._current.reserve(length)
        seal_group(group.buffer, self._current.generation, self._number)
        self._number += 1
        self._current.logs.update(group.copied)

    def _plan_syncs(self, group: _Group) -> None:
        """Plan the segment files' syncs; a log without a plan must not cost others their group."""
        for log in list(group.plans):
            plan = plan_sync(log, self._on_failure, checkpoint=False)
            if plan is not None:
                group.plans[log] = plan
            else:
                del group.plans[log], group.waiting[log]

    def _finish(self, group: _Group, outcome: object) -> None:
        self._in_flight = False
        if isinstance(outcome, Exception):
            self._failure = outcome
            _logger.error("commit_log_failed", reason=str(outcome))
            self._fail(group.waiting, outcome)
            self.schedule()
            return
        failed: dict[Log, Exception] = outcome  # type: ignore[assignment]
        self.schedule()
        for log, error in failed.items():
            fail_log(log, error, self._on_failure)
        # The flusher may have met an error that our sync of the same file was not told of.
        lost = {log for log in group.plans if log in failed or log.failure is not None}
        for log, plan in group.plans.items():
            if plan is not None and log not in lost:
                log.synced(plan)
        self._on_durable(
            [
                (log, end_offset)
                for log, (end_offset, incarnation) in group.waiting.items()
                if log not in lost and log.incarnation == incarnation
            ]
        )

    def _fail(self, logs: dict[Log, tuple[int, int]], cause: Exception) -> None:
        error = LogStorageError(f"the commit log failed: {cause}")
        error.__cause__ = cause
        for log in logs:
            fail_log(log, error, self._on_failure)

    def _switch(self) -> None:
        """Hand the full file to the flusher and continue in a free one."""
        full = self._current
        self._current = self._free.pop() if self._free else None
        if self._current is not None:
            self._generation += 1
            self._current.begin(self._generation)
        self._prepare()
        if full is not None:
            self._flusher.flush(full.logs, lambda durable: self._release(full, durable))

    def _release(self, full: CommitFile, durable: bool) -> None:
        if durable:
            full.logs = {}
            self._free.append(full)
        else:
            _logger.error("commit_file_kept", path=str(full.path))

    def _prepare(self) -> None:
        """Create another file in the background if no file is free and the limit allows one."""
        if self._free or self._preparing or self._count >= FILES_MAX:
            return
        path = self._directory / f"commit-{self._count}.log"
        self._preparing = True

        def made(outcome: object) -> None:
            self._preparing = False
            if isinstance(outcome, CommitFile):
                self._count += 1
                self._free.append(outcome)
            else:
                _logger.error("commit_file_not_made", path=str(path), reason=str(outcome))

        self._flusher.submit(lambda: CommitFile.prepare(self._files, path, self._file_bytes), made)
