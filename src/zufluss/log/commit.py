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

A failed sync of a segment is final for its log: the log takes no more writes and is opened again by
its owner. When the commit log itself fails, its file is given up and the group is made durable in
the segment files instead. A file that could not be opened (no descriptors are left) is not a failed
sync: the entries wait, and the next group tries again. A commit file is used again, or removed if
it was given up, once no log needs it: each is durable in its own files, deleted, or opened again
(`forget`).
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import NamedTuple

import structlog

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
from zufluss.log.flush import LogFlusher, is_lost, plan_sync, run_plan
from zufluss.log.log import Log
from zufluss.log.sync import SyncPlan, is_shortage
from zufluss.log.worker import Worker

FILE_BYTES = 32 << 20
"""Size of a commit file."""

FILES_MAX = 3
"""Commit files that may be in use at a time."""

GROUP_BYTES_MAX = 4 << 20
"""A group that has gathered this much takes further entries without a copy."""

RETRY_SECONDS = 0.1
"""How long entries wait for their next sync when a file could not be opened."""

OnDurable = Callable[[list[tuple[Log, int]]], None]
"""Told which logs are durable up to which offset."""

PREPARE_SECONDS = 5.0
"""How long after a commit file could not be made the next try comes."""

Later = Callable[[float, Callable[[], None]], object]
"""Calls a function on the event loop after some seconds."""

_BASE_OFFSET = struct.Struct("<q")

_logger = structlog.get_logger(__name__)


class _Outcome(NamedTuple):
    """What went wrong while a group was made durable."""

    failed: dict[Log, Exception]
    """Logs whose own files could not be synced."""
    file_error: Exception | None = None
    """Why the commit log does not have the group."""


class _Group:
    """Entries that become durable together."""

    __slots__ = ("buffer", "copied", "file", "holes", "plans", "position", "waiting")

    def __init__(self) -> None:
        self.buffer = bytearray(GROUP_HEADER.size)
        self.waiting: dict[Log, tuple[int, int]] = {}
        """End offset and incarnation by log."""
        self.copied: dict[Log, None] = {}
        """Logs with entries in the buffer."""
        self.plans: dict[Log, SyncPlan | None] = {}
        """Logs whose segment files are synced in this group."""
        self.holes: set[Log] = set()
        """Logs that failed or have no plan: nothing of them goes into the commit log."""
        self.file: CommitFile | None = None
        self.position = 0

    def run(self, files: Files) -> _Outcome:
        """Make the group durable; return what could not be."""
        failed = {}
        for log, plan in self.plans.items():
            if plan is not None and (error := run_plan(plan, files)) is not None:
                failed[log] = error
        if self.file is None:
            return _Outcome(failed)
        try:
            holes = self.holes | failed.keys()
            if holes:  # behind what a log just lost nothing must follow
                leave_out(self.buffer, {entry_prefix(log) for log in holes})
            write_group(files, self.file, self.position, self.buffer)
        except (OSError, MemoryError) as e:
            return _Outcome(failed, e)
        return _Outcome(failed)

    def leave_out_failed(self) -> None:
        """Drop the logs that failed since their entries gathered: an entry before may be lost."""
        for log in [log for log in self.copied if log.failure is not None]:
            self.holes.add(log)
            del self.copied[log]
            self.waiting.pop(log, None)

    def again(self, log: Log, end_offset: int, incarnation: int) -> None:
        """Take over a log of an earlier group, whose segment files are to be synced."""
        self.waiting.setdefault(log, (end_offset, incarnation))
        self.plans[log] = None


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
        later: Later,
        generation: int = 0,
        file_bytes: int = FILE_BYTES,
    ) -> None:
        self._directory = directory
        self._files = files
        self._worker = worker
        self._flusher = flusher
        self._on_durable = on_durable
        self._later = later
        self._generation = generation
        self._file_bytes = file_bytes
        self._positions: dict[Log, _Position] = {}
        self._gathering = _Group()
        self._in_flight = False
        self._number = 0
        self._current: CommitFile | None = None
        self._free: list[CommitFile] = []
        self._kept: list[CommitFile] = []
        """Files that were full or given up, and that a log may still need."""
        self._names: set[Path] = set()
        """The files that exist."""
        self._preparing = False
        self._started = False
        self.closing = False
        """No more time to wait for descriptors: a log that cannot be synced now is failed."""

    def start(self) -> None:
        """Create the first commit file; until it exists, groups sync the segment files.

        Call it when all logs have taken what the commit log of the last run has for them. Entries
        come before that: a log that is open is served while others are still being opened. They
        must not go into those files.
        """
        self._started = True
        self._prepare()

    def add(self, log: Log, end_offset: int, view: memoryview | None) -> None:
        """Make an appended entry durable: by its bytes, or, with None, in its segment.

        Entries that were appended to the log but never added here are made durable with it.
        """
        group = self._gathering
        position = self._positions.get(log)
        if position is None or position.incarnation != log.incarnation:
            position = self._positions[log] = _Position(log)
        group.waiting[log] = (end_offset, log.incarnation)
        if (
            view is None
            or len(group.buffer) > GROUP_BYTES_MAX
            or position.end_offset != _BASE_OFFSET.unpack_from(view)[0]
        ):
            group.plans[log] = None
        else:
            buffer, at = group.buffer, len(group.buffer)
            try:
                buffer += position.prefix
                buffer += ENTRY_LENGTH.pack(len(view))
                buffer += view
                group.copied[log] = None
            except BaseException:  # half an entry would spoil those of others
                del buffer[at:]
                group.plans[log] = None
                raise
        position.end_offset = end_offset

    def schedule(self) -> None:
        """Start a group with the entries that wait, unless a group is under way."""
        if self._in_flight or not self._gathering.waiting:
            return
        group, self._gathering = self._gathering, _Group()
        try:
            self._start(group)
        except Exception as e:
            self._lose(group, e)

    def forget(self, log: Log) -> None:
        """Forget a log that was deleted, or that was opened again and needs no commit file."""
        self._positions.pop(log, None)
        if self._current is not None:
            self._current.logs.pop(log, None)
        for file in self._kept:
            file.logs.pop(log, None)
        self._settle_kept()

    @property
    def idle(self) -> bool:
        """Whether no entry waits to become durable."""
        return not self._in_flight and not self._gathering.waiting

    def _start(self, group: _Group) -> None:
        group.leave_out_failed()
        if group.copied:
            self._place(group)
        self._plan_syncs(group)
        files = self._files
        self._worker.submit(lambda: group.run(files), lambda outcome: self._ended(group, outcome))
        self._in_flight = True

    def _lose(self, group: _Group, error: Exception) -> None:
        """Fail the logs of a group whose outcome is unknown: their owner opens them again."""
        _logger.error("group_lost", logs=len(group.waiting), reason=str(error) or repr(error))
        for log in group.waiting:
            log.fail(error)

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
            try:
                plan = plan_sync(log, checkpoint=False)
            except (OSError, MemoryError) as e:
                self._postpone(group, log, e)
                plan = None
            if plan is not None:
                group.plans[log] = plan
            else:
                group.holes.add(log)
                del group.plans[log]
                group.waiting.pop(log, None)

    def _postpone(self, group: _Group, log: Log, error: Exception) -> None:
        """Have a log whose files could not be opened synced by a later group."""
        if self.closing:
            log.fail(error)
            return
        _logger.warning("log_sync_postponed", log=str(log), reason=str(error) or repr(error))
        self._gathering.again(log, *group.waiting[log])
        self._later(RETRY_SECONDS, self.schedule)

    def _ended(self, group: _Group, outcome: _Outcome | Exception) -> None:
        self._in_flight = False
        try:
            self._finish(group, outcome)
        except Exception as e:
            self._lose(group, e)
            self.schedule()

    def _finish(self, group: _Group, outcome: _Outcome | Exception) -> None:
        if isinstance(outcome, Exception):
            outcome = _Outcome(dict.fromkeys(group.plans, outcome), outcome)
        failed = outcome.failed
        postponed = {log for log, error in failed.items() if is_shortage(error)}
        for log, error in failed.items():  # before the next group, which leaves failed logs out
            if log in postponed:
                self._postpone(group, log, error)
            else:
                log.fail(error)
        if outcome.file_error is not None:
            self._give_up(group, outcome.file_error)
        if not postponed:
            self.schedule()
        # The flusher may have met an error that our sync of the same file did not report.
        lost = {log for log in group.plans if log in failed or log.failure is not None}
        if outcome.file_error is not None:
            lost.update(group.copied.keys() - group.plans.keys())
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

    def _give_up(self, group: _Group, error: Exception) -> None:
        """Use a commit file no more that could not be written or synced.

        The entries of its earlier groups are durable in it. Those of this group, which may or may
        not be, become durable in their segment files with the next group.
        """
        file = group.file
        if file is not None:
            _logger.error("commit_file_given_up", path=str(file.path), reason=str(error))
            file.given_up = True
            if self._current is file:
                self._current = None
            self._retire(file)
        for log in group.copied.keys() - group.plans.keys():
            if log in group.waiting:
                self._gathering.again(log, *group.waiting[log])

    def _switch(self) -> None:
        """Hand the full file to the flusher and continue in a free one."""
        full = self._current
        self._current = self._free.pop() if self._free else None
        if self._current is not None:
            self._generation += 1
            self._current.begin(self._generation)
        self._prepare()
        if full is not None:
            self._retire(full)
        self.flush_kept()

    def _retire(self, file: CommitFile) -> None:
        """Make the logs of a file durable in their segments, so that the file can be reused."""
        self._kept.append(file)
        file.flushing = True
        self._flusher.flush(file.logs, partial(self._release, file))

    def flush_kept(self) -> None:
        """Try again to make the logs durable that commit files are kept for."""
        for file in self._kept:
            if (logs := [log for log in file.logs if not is_lost(log)]) and not file.flushing:
                file.flushing = True
                self._flusher.flush(logs, partial(self._release, file))

    def _release(self, file: CommitFile, undone: set[Log]) -> None:
        file.flushing = False
        file.logs = {log: None for log in file.logs if log in undone or is_lost(log)}
        if file.logs:
            _logger.error("commit_file_kept", path=str(file.path), logs=len(file.logs))
        self._settle_kept()

    def _settle_kept(self) -> None:
        """Use the kept files again that no log needs; remove those that were given up."""
        done = [file for file in self._kept if not file.logs and not file.flushing]
        self._kept = [file for file in self._kept if file not in done]
        for file in done:
            if file.given_up:
                self._remove(file)
            else:
                self._free.append(file)

    def _remove(self, file: CommitFile) -> None:
        def removed(outcome: object) -> None:
            self._names.discard(file.path)
            if isinstance(outcome, Exception):
                _logger.error("commit_file_not_removed", path=str(file.path), reason=str(outcome))

        self._flusher.submit(partial(self._files.unlink_if_there, file.path), removed)

    def _prepare(self) -> None:
        """Create another file in the background if no file is free and the limit allows one."""
        if not self._started or self._free or self._preparing or len(self._names) >= FILES_MAX:
            return
        paths = (self._directory / f"commit-{number}.log" for number in range(FILES_MAX))
        path = next(path for path in paths if path not in self._names)
        self._preparing = True

        def ready() -> None:
            self._preparing = False

        def made(outcome: object) -> None:
            if isinstance(outcome, CommitFile):
                ready()
                self._names.add(path)
                self._free.append(outcome)
            else:
                _logger.error("commit_file_not_made", path=str(path), reason=str(outcome))
                self._later(PREPARE_SECONDS, ready)

        self._flusher.submit(lambda: CommitFile.prepare(self._files, path, self._file_bytes), made)
