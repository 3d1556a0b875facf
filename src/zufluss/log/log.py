"""The log of one bucket: append, read, high watermark, roll, truncation, retention.

A `Log` belongs to the event-loop thread and has no locks on its hot paths; what may run elsewhere
is syncing (`sync.py`), reading a `Slice`, and removing retired files. Offsets are dense from
`log_start_offset` to `log_end_offset`; readers see what lies below `high_watermark`, which always
stands at the end of an appended entry and never moves back except by truncation.

Durability is not decided here. `append` writes to the page cache; the owner makes the entry durable
according to the flush mode (`manager.py`, `commit.py`) and then advances the high watermark. When a
sync fails, `fail` closes the log for writes for good: after a failed sync nobody knows what the
disk has, so trying again and acknowledging would be a lie.

Files in `<data.dir>/<database>/<table>-<id>[/<partition>-p<id>]/log-<bucket>`: see `segment.py`,
`index.py`, `writer_state.py` and `checkpoint.py`.
"""

from __future__ import annotations

import os
import threading
from bisect import bisect_left, bisect_right
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import structlog

from zufluss.errors import LogStorageError, OffsetOutOfRangeError
from zufluss.log.checkpoint import Checkpoint, write_checkpoint
from zufluss.log.config import INT32_MAX, LogConfig
from zufluss.log.files import Files
from zufluss.log.recovery import Recovered, ReplayEntry, recover
from zufluss.log.retention import Retired, expired
from zufluss.log.segment import (
    DELETED_SUFFIX,
    SNAPSHOT_SUFFIX,
    Segment,
    Slice,
    read_slice,
)
from zufluss.log.sync import SyncPlan
from zufluss.record.batch import iter_headers, stamp

if TYPE_CHECKING:
    from zufluss.model.table import TableBucket
    from zufluss.record.check import CheckedBatch

CURSORS_MAX = 32
"""Positions of readers that a log remembers."""

_logger = structlog.get_logger(__name__)


class Appended(NamedTuple):
    """The outcome of an append."""

    base_offset: int
    """Offset of the first record."""
    end_offset: int
    """Offset after the last record; acknowledge when the high watermark has reached it."""
    duplicate: bool
    """A retry of an earlier entry: these are its offsets and nothing was written."""


class LogRead(NamedTuple):
    """Whole batches read from a log."""

    records: memoryview
    """The batches; the first one contains the offset asked for."""
    end_offset: int
    """Offset after the last of them, where the next read starts."""


class Log:
    """The log of one bucket."""

    __slots__ = (
        "__weakref__", "_active", "_bases", "_boundaries", "_checkpoint", "_checkpoint_lock",
        "_cursors", "_deleted", "_hw_position", "_hw_segment", "_names", "_names_changes",
        "_pwrite", "_roll_above", "_segments", "_side_files", "_snapshots", "_unsynced", "bucket",
        "config", "directory", "failure", "files", "high_watermark", "incarnation",
        "last_timestamp", "leader_epoch", "log_end_offset", "on_roll", "writers",
    )  # fmt: skip

    def __init__(
        self,
        directory: Path,
        config: LogConfig,
        files: Files,
        found: Recovered,
        bucket: TableBucket | None,
    ) -> None:
        self.directory = directory
        self.config = config
        """May be replaced when the table's properties change."""
        self.files = files
        self.bucket = bucket
        """Which bucket it is; the commit log files its entries under it."""
        self.leader_epoch = 0
        """Stamped into batches that have room for it."""
        self.failure: Exception | None = None
        """Why the log takes no more writes."""
        self.on_roll: Callable[[Log], None] | None = None
        """Called when a segment was closed, so that its owner can have it synced."""
        self._pwrite = files.pwrite
        self._checkpoint_lock = threading.Lock()
        self._deleted = False
        self._names: dict[Path, int] = {}
        self._names_changes = 0
        self._side_files: dict[Path, None] = {}
        self._adopt(found)

    def _adopt(self, found: Recovered) -> None:
        self._segments = found.segments
        self._bases = [segment.base_offset for segment in found.segments]
        self._active = found.segments[-1]
        self._unsynced = [s for s in found.segments[:-1] if s.synced < s.size]
        self._roll_above = self.config.segment_bytes_max
        self._snapshots = found.snapshots
        self._checkpoint = found.checkpoint
        self.incarnation = found.checkpoint.incarnation if found.checkpoint else 0
        """Number of truncations in the log's life."""
        self.writers = found.writers
        """Last batches of the idempotent writers."""
        self.last_timestamp = found.last_timestamp
        """Commit timestamp of the last batch; the next one is not less."""
        self.log_end_offset = found.end_offset
        """Offset the next record gets."""
        self.high_watermark = found.end_offset
        """Readers see offsets below it."""
        self._hw_segment, self._hw_position = self._active, self._active.size
        self._boundaries: deque[tuple[int, Segment, int]] = deque()
        self._cursors: dict[int, tuple[Segment, int]] = {}

    @classmethod
    def open(
        cls,
        directory: Path,
        config: LogConfig,
        *,
        files: Files,
        now_ms: int,
        bucket: TableBucket | None = None,
        replay: Sequence[ReplayEntry] = (),
        root: Path | None = None,
    ) -> Log:
        """Open the log in `directory`, made if it is missing; recover it if it was not closed.

        `replay` are the entries the commit log has for it. `root` is the directory above that is
        known to be durable; by default the parent. `CorruptRecordError` if durable data is missing
        or damaged: the files are left as they are, and the log must not be served.
        """
        files.make_directories(directory)
        found = recover(directory, config, files, replay)
        log = cls(directory, config, files, found, bucket)
        if found.checkpoint is None:
            log._never_synced(root or directory.parent)
        for batches in found.replay:
            log.append_stamped(batches)
        log.writers.forget_expired(now_ms)
        if found.unsynced or log.log_end_offset > found.end_offset:
            log._names_changed(directory)
            log._suspect_side_files()
            log._sync_now()
        log.advance_high_watermark(log.log_end_offset)
        return log

    @property
    def log_start_offset(self) -> int:
        """First offset that can be read."""
        return self._bases[0]

    @property
    def recovery_point(self) -> int:
        """Below this offset everything is durable in the segment files and recorded as such."""
        return self._checkpoint.recovery_point if self._checkpoint else self._bases[0]

    @property
    def size(self) -> int:
        """Bytes of all batches."""
        return sum(segment.size for segment in self._segments)

    @property
    def deleted(self) -> bool:
        """`delete` was called."""
        return self._deleted

    @property
    def segments(self) -> Sequence[Segment]:
        """The segments, oldest first."""
        return self._segments

    # ------------------------------------------------------------------------------------ append

    def append(self, view: memoryview, batches: Sequence[CheckedBatch], now_ms: int) -> Appended:
        """Append the checked batches of one bucket entry, all or none.

        Their positions are absolute in `view`, the receive buffer, and they follow each other in
        it. Offsets and the commit time are stamped in place. `OutOfOrderSequenceError` refuses a
        gap in a writer's sequence, `LogStorageError` reports a write that did not happen; the log
        is then as before.
        """
        if self.failure is not None:
            raise self._refusal()
        copy = self.writers.check(batches, now_ms)
        if copy is not None:
            return Appended(copy[0], copy[1], True)
        base = offset = self.log_end_offset
        timestamp = self.last_timestamp
        if now_ms > timestamp:
            timestamp = now_ms
        epoch = self.leader_epoch
        for batch in batches:
            stamp(view, batch.start, batch.magic, offset, timestamp, epoch)
            offset += batch.last_offset_delta + 1
        start = batches[0].start
        size = batches[-1].end - start
        segment = self._active
        position = segment.size
        if (
            segment.file is None
            or position + size > self._roll_above
            or offset - segment.base_offset > INT32_MAX
        ):
            segment = self._room_for(size, offset)
            position = segment.size
        self._write(segment, view[start : start + size], position)
        index = segment.index
        assert index is not None
        if timestamp > segment.max_timestamp:
            segment.max_timestamp = timestamp
            segment.max_timestamp_offset = base - segment.base_offset
        segment.size = position + size
        self.last_timestamp = timestamp
        self.log_end_offset = offset
        self._boundaries.append((offset, segment, segment.size))
        if len(batches) == 1 and index.unindexed <= segment.interval_bytes:
            index.unindexed += size
            if batch.writer_id >= 0:
                self.writers.record(batch.writer_id, batch.batch_sequence, base, offset, timestamp)
        else:
            self._note(batches, segment, position - start, base, timestamp)
        return Appended(base, offset, False)

    def _note(
        self,
        batches: Sequence[CheckedBatch],
        segment: Segment,
        shift: int,
        offset: int,
        timestamp: int,
    ) -> None:
        """Take batches just written into index and writer state; `shift` maps view to file."""
        index = segment.loaded_index()
        for batch in batches:
            end_offset = offset + batch.last_offset_delta + 1
            if index.unindexed > segment.interval_bytes:
                index.add(end_offset - 1 - segment.base_offset, batch.start + shift)
                index.add_time(segment.max_timestamp, segment.max_timestamp_offset)
                index.unindexed = 0
            index.unindexed += batch.end - batch.start
            if batch.writer_id >= 0:
                self.writers.record(
                    batch.writer_id, batch.batch_sequence, offset, end_offset, timestamp
                )
            offset = end_offset
        index.flush(self.files)
        if index.size >= self.config.index_bytes_max:
            self._roll_above = 0

    def append_stamped(self, view: memoryview) -> None:
        """Append batches that carry their offsets and times already: replay of the commit log.

        Batches the log has are skipped. The first new one must continue it, or it is a
        `LogStorageError`.
        """
        if self.failure is not None:
            raise self._refusal()
        for at, header in iter_headers(view):
            if header.next_offset <= self.log_end_offset:
                continue
            if header.base_offset != self.log_end_offset:
                raise LogStorageError(
                    f"{self}: a batch at offset {header.base_offset} does not continue the log"
                )
            segment = self._room_for(header.size, header.next_offset)
            position = segment.size
            self._write(segment, view[at : at + header.size], position)
            segment.size = position + header.size
            segment.note(header, position)
            segment.loaded_index().flush(self.files)
            if header.writer_id >= 0:
                self.writers.record(
                    header.writer_id, header.batch_sequence, header.base_offset,
                    header.next_offset, header.timestamp,
                )  # fmt: skip
            self.last_timestamp = max(self.last_timestamp, header.timestamp)
            self.log_end_offset = header.next_offset
            self._boundaries.append((self.log_end_offset, segment, segment.size))

    def _write(self, segment: Segment, data: memoryview, position: int) -> None:
        assert segment.file is not None
        try:
            written = self._pwrite(segment.file.fd, data, position)
        except OSError as e:
            self._undo_write(segment, position, str(e))
            raise LogStorageError(f"{self}: writing {len(data)} bytes failed: {e}") from e
        if written != len(data):
            self._undo_write(segment, position, "short write")
            raise LogStorageError(
                f"{self}: only {written} of {len(data)} bytes could be written; is the disk full?"
            )

    def _undo_write(self, segment: Segment, position: int, reason: str) -> None:
        assert segment.file is not None
        _logger.error("log_write_failed", log=str(self), reason=reason)
        try:
            self.files.truncate(segment.file.fd, position)
        except OSError as e:
            self.fail(e)

    def _room_for(self, size: int, end_offset: int) -> Segment:
        """The segment that takes `size` more bytes, opened; a full one is closed first."""
        segment = self._active
        too_large = segment.size + size > self._roll_above
        if segment.size and (too_large or end_offset - segment.base_offset > INT32_MAX):
            self.roll()
            segment = self._active
        if segment.file is None:
            try:
                self._open_active()
            except OSError as e:
                raise LogStorageError(f"{self}: opening {segment.path} failed: {e}") from e
        return segment

    def _open_active(self) -> None:
        segment = self._active
        new = segment.size == 0
        segment.file = self.files.open(segment.path, create=True)
        if new:
            if os.fstat(segment.file.fd).st_size:
                self.files.truncate(segment.file.fd, 0)
            self._names_changed(self.directory)
        self.files.forget(segment.path)
        segment.resume_index(self.files)

    def roll(self) -> None:
        """Close the segment being written and start the next one; an empty one stays."""
        closed = self._active
        if not closed.size:
            return
        base = self.log_end_offset
        segment = Segment(self.directory, base, 0, self.config.index_interval_bytes)
        try:
            snapshot = self._write_snapshot()
            segment.file = self.files.open(segment.path, create=True)
        except OSError as e:
            raise LogStorageError(f"{self}: starting a segment at {base} failed: {e}") from e
        closed.complete_index(self.files)
        if closed.synced < closed.size:
            self._unsynced.append(closed)
        else:
            closed.file = None
        self._side_files.update(dict.fromkeys((*closed.loaded_index().paths, snapshot)))
        closed.index = None
        segment.loaded_index()
        self._segments.append(segment)
        self._bases.append(base)
        self._active = segment
        self._roll_above = self.config.segment_bytes_max
        self._names_changed(self.directory)
        if self.on_roll is not None:
            self.on_roll(self)

    def _write_snapshot(self) -> Path:
        path = self._snapshot_path(self.log_end_offset)
        self.files.put(path, self.writers.to_json())
        if self.log_end_offset not in self._snapshots:
            self._snapshots.append(self.log_end_offset)
        return path

    # -------------------------------------------------------------------------------------- read

    def advance_high_watermark(self, offset: int) -> None:
        """Let readers see what lies below `offset`, as far as whole entries go."""
        boundaries = self._boundaries
        if offset >= self.log_end_offset:
            self.high_watermark = self.log_end_offset
            self._hw_segment = self._active
            self._hw_position = self._active.size
            boundaries.clear()
            return
        while boundaries and boundaries[0][0] <= offset:
            self.high_watermark, self._hw_segment, self._hw_position = boundaries.popleft()

    def locate(
        self, offset: int, max_bytes: int, *, at_least_one: bool = False, nowait: bool = True
    ) -> Slice:
        """Find the whole batches from `offset` on that readers may see, at most `max_bytes`.

        The slice starts with the batch that contains `offset` and ends within its segment;
        `at_least_one` grants a first batch that is larger than `max_bytes`.
        `OffsetOutOfRangeError` for an offset outside of the log; `PagesNotCachedError` with
        `nowait` when headers have to be read from the disk.
        """
        end = self.high_watermark
        if offset == end:
            return Slice(None, 0, 0, offset)
        if not self._bases[0] <= offset < end:
            raise OffsetOutOfRangeError(
                f"offset {offset} of {self} is outside of {self._bases[0]} to {end}"
            )
        segment, position = self._start_of(offset, nowait)
        if segment is self._hw_segment:
            limit = self._hw_position
        else:
            limit = segment.size
            end = self._bases[bisect_right(self._bases, offset)]
        if limit - position > max_bytes:
            start, start_offset, after = segment.boundary(
                self.files, position, position + max_bytes, nowait=nowait
            )
            if start > position:
                limit, end = start, start_offset
            elif at_least_one:
                limit = after
                end = self._offset_at(segment, after, end, nowait)
            else:
                return Slice(None, position, 0, offset)
        self._remember(end, segment, limit)
        return Slice(segment.reader(self.files), position, limit - position, end)

    def _start_of(self, offset: int, nowait: bool) -> tuple[Segment, int]:
        """Segment and position of the batch that contains `offset`."""
        cursor = self._cursors.get(offset)
        if cursor is not None:
            segment, position = cursor
            if position < segment.size:
                return cursor
        segment = self._segments[bisect_right(self._bases, offset) - 1]
        if offset == segment.base_offset:
            return segment, 0
        return segment, segment.position_of(self.files, offset, nowait=nowait)

    def _offset_at(self, segment: Segment, position: int, end: int, nowait: bool) -> int:
        """Offset of the batch at `position`, or `end` if the readable part ends there."""
        limit = self._hw_position if segment is self._hw_segment else segment.size
        if position >= limit:
            return end
        return segment.boundary(self.files, position, position, nowait=nowait)[1]

    def _remember(self, offset: int, segment: Segment, position: int) -> None:
        """Keep where a reader left off, so that its next read needs no search."""
        cursors = self._cursors
        if len(cursors) >= CURSORS_MAX and offset not in cursors:
            del cursors[next(iter(cursors))]
        cursors[offset] = (segment, position)

    def read(
        self, offset: int, max_bytes: int, at_least_one: bool = False, nowait: bool = True
    ) -> LogRead:
        """Read what `locate` finds.

        With `nowait` the disk is never waited for: `PagesNotCachedError` (a `BlockingIOError`)
        says that the bytes are not in memory; call its `load` in a thread and read again. Bytes
        that come from the disk are verified before they are served.
        """
        part = self.locate(offset, max_bytes, at_least_one=at_least_one, nowait=nowait)
        return LogRead(read_slice(part, nowait=nowait), part.end_offset)

    def offset_for_timestamp(self, timestamp: int) -> int:
        """Base offset of the first batch committed at or after `timestamp`.

        The high watermark if there is none that readers may see.
        """
        if timestamp > self.last_timestamp:
            return self.high_watermark
        filled = self._segments if self._active.size else self._segments[:-1]
        i = bisect_left(filled, timestamp, key=lambda s: s.newest_timestamp(self.files))
        found = filled[i].first_at_or_after(self.files, timestamp) if i < len(filled) else None
        return self.high_watermark if found is None else min(found, self.high_watermark)

    # -------------------------------------------------------------------------------- durability

    def plan_sync(self, *, checkpoint: bool) -> SyncPlan:
        """Plan to make the log durable as it is now; with `checkpoint` also to record that."""
        segments = [
            (segment, segment.file or self.files.open(segment.path), segment.size)
            for segment in (*self._unsynced, self._active)
            if segment.synced < segment.size
        ]
        plan = SyncPlan(self, self.log_end_offset, self.incarnation, segments, dict(self._names))
        if checkpoint:
            plan.side_files = list(self._side_files)
            plan.checkpoint = Checkpoint(
                0,
                self.log_end_offset,
                self._active.base_offset,
                self._active.size,
                self.last_timestamp,
                self.incarnation,
            )
        return plan

    def synced(self, plan: SyncPlan) -> None:
        """Take note that a plan was carried out."""
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

    def write_checkpoint(self, checkpoint: Checkpoint) -> None:
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

    def fail(self, cause: Exception) -> None:
        """Take no more writes: something that had to be durable may not be."""
        if self.failure is None:
            self.failure = cause
            _logger.error("log_failed", log=str(self), reason=str(cause))

    def _refusal(self) -> LogStorageError:
        return LogStorageError(
            f"{self} takes no writes since a disk error ({self.failure}); check the disk, then "
            "restart the server"
        )

    def _names_changed(self, directory: Path) -> None:
        self._names_changes += 1
        self._names[directory] = self._names_changes

    def _never_synced(self, root: Path) -> None:
        """Without a checkpoint nobody knows whether the names up to `root` are durable."""
        self._names_changed(self.directory)
        for parent in self.directory.parents:
            self._names_changed(parent)
            if parent == root:
                return

    def _suspect_side_files(self) -> None:
        """What an earlier process wrote beside the segments since the checkpoint may be unsynced."""
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

    # ---------------------------------------------------------------------- truncation, retention

    def truncate_to(self, offset: int) -> None:
        """Remove every batch that reaches to `offset` or beyond. Blocks; for replica repair.

        What stays is made durable first, then the checkpoint says so under a new incarnation,
        which retires the log's entries in the commit log, and only then the files are cut.
        """
        if not self.log_start_offset <= offset <= self.log_end_offset:
            raise OffsetOutOfRangeError(
                f"cannot truncate {self} to {offset}: it holds {self.log_start_offset} to "
                f"{self.log_end_offset}"
            )
        if offset == self.log_end_offset:
            return
        high_watermark = self.high_watermark
        segment, position = self._start_of(offset, nowait=False)
        end = segment.boundary(self.files, position, position)[1]
        self._sync_now()
        with self._checkpoint_lock:
            self.incarnation += 1
        self.write_checkpoint(
            Checkpoint(0, end, segment.base_offset, position, self.last_timestamp, self.incarnation)
        )
        self._cut_files(segment, position, end)
        self._adopt(recover(self.directory, self.config, self.files))
        self._active.rebuild_index(self.files)
        if high_watermark < end:
            self._boundaries.append((end, self._active, position))
            self.high_watermark = high_watermark
            self._hw_segment, self._hw_position = self._start_of(high_watermark, nowait=False)

    def _cut_files(self, segment: Segment, position: int, end: int) -> None:
        files = self.files
        for later in reversed(self._segments[self._segments.index(segment) + 1 :]):
            for path in later.paths:
                files.unlink_if_there(path)
        for offset in self._snapshots:
            if offset > end:
                files.unlink_if_there(self._snapshot_path(offset))
        files.forget(segment.path)
        file = files.open(segment.path)
        files.truncate(file.fd, position)
        files.fdatasync(file.fd)
        files.sync_directory(self.directory)

    def expire(self, now_ms: int) -> Retired | None:
        """Let go of the segments older than the time to live; the caller has them removed.

        Only what every reader may see is let go of. The segment being written goes too when all of
        it has expired and `retention_rolls_active` is set: it is closed first, so that the log
        keeps its end.
        """
        old = expired(self._segments, self.files, now_ms, self.config.ttl_ms)
        if old and old[-1] is self._active:
            if self.config.retention_rolls_active and self.failure is None:
                self.roll()
            else:
                old.pop()
        old = [
            segment
            for segment, end in zip(old, self._bases[1:], strict=False)
            if end <= self.high_watermark
        ]
        if not old:
            return None
        del self._segments[: len(old)], self._bases[: len(old)]
        self._unsynced = [s for s in self._unsynced if s not in old]
        self._cursors.clear()
        if self._hw_segment in old:
            self._hw_segment, self._hw_position = self._segments[0], 0
        start = self.log_start_offset
        ends = (*(segment.base_offset for segment in old[1:]), start)
        paths = [path for segment in old for path in segment.paths]
        paths += [self._snapshot_path(offset) for offset in self._snapshots if offset < start]
        self._snapshots = [offset for offset in self._snapshots if offset >= start]
        for path in paths:
            self.files.forget(path)
            self._side_files.pop(path, None)
        return Retired(
            self.directory, tuple(old), tuple(map(self._snapshot_path, ends)), tuple(paths)
        )

    def _snapshot_path(self, offset: int) -> Path:
        return self.directory / f"{offset:020d}{SNAPSHOT_SUFFIX}"

    def delete(self) -> Path:
        """Give the directory a name that means deleted; return it for `remove_deleted`."""
        with self._checkpoint_lock:
            self._deleted = True
        self.fail(LogStorageError(f"{self} was deleted"))
        self._release()
        target = self.directory.with_name(self.directory.name + DELETED_SUFFIX)
        self.files.rename(self.directory, target)
        return target

    def close(self, *, clean: bool) -> None:
        """Let go of the files; a clean close leaves the log so that opening it needs no scan.

        The caller has seen to it that no sync of this log is under way.
        """
        if clean and self.failure is None and not self._is_clean():
            self._active.complete_index(self.files)
            snapshot = self._write_snapshot()
            self._names_changed(self.directory)
            self._side_files.update(dict.fromkeys((*self._active.loaded_index().paths, snapshot)))
            self._sync_now()
        self._release()

    def _is_clean(self) -> bool:
        if self._checkpoint is None:
            return self.log_end_offset == 0
        return self.recovery_point == self.log_end_offset and (
            self.log_end_offset in self._snapshots and not self._side_files
        )

    def _release(self) -> None:
        for segment in self._segments:
            segment.file = None
            for path in segment.paths:
                self.files.forget(path)

    def __str__(self) -> str:
        return f"log of {self.bucket}" if self.bucket is not None else f"log {self.directory}"

    def __repr__(self) -> str:
        return (
            f"Log({self.directory}, offsets {self.log_start_offset}..{self.log_end_offset}, "
            f"high watermark {self.high_watermark}, {len(self._segments)} segments)"
        )


def _order(checkpoint: Checkpoint) -> tuple[int, int, int]:
    return checkpoint.incarnation, checkpoint.recovery_point, checkpoint.segment_base
