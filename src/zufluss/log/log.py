"""The log of one bucket: append, roll, truncation, retention.

`reader.py` is its readable side; `durable.py` knows what of it is on stable storage.

A `Log` belongs to the event-loop thread and has no locks on its hot paths; what may run elsewhere
is syncing (`sync.py`), reading a `Slice`, and removing retired files. Offsets are dense from
`log_start_offset` to `log_end_offset`; readers see what lies below `high_watermark`, which never
moves back except by truncation.

Durability is not decided here. `append` writes to the page cache; the owner makes the entry durable
according to the flush mode (`manager.py`, `commit.py`) and then advances the high watermark. When a
sync fails, `fail` closes this log for writes for good: after a failed sync the content of the disk
is unknown, so a later sync must not acknowledge anything. Its owner opens it again as after a crash
(`open` with `renew`): what the checkpoint does not cover is read, verified and *written* again,
because the system takes pages whose sync failed for clean, and a new incarnation retires what the
commit log has of the old one.

Files in `<data.dir>/<database>/<table>-<id>[/<partition>-p<id>]/log-<bucket>`: see `segment.py`,
`index.py`, `writer_state.py` and `checkpoint.py`.
"""

from __future__ import annotations

import os
from bisect import bisect_left, insort
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import structlog

from zufluss.errors import LogStorageError, OffsetOutOfRangeError
from zufluss.log.checkpoint import LogCheckpoint, write_checkpoint
from zufluss.log.config import INT32_MAX, LogConfig
from zufluss.log.durable import DurableLog
from zufluss.log.files import Files
from zufluss.log.holds import RECORD_HOLDERS, Holder, Holds
from zufluss.log.recovery import RecoveredLog, ReplayEntry, recover
from zufluss.log.retention import RetiredSegments, expired, surplus
from zufluss.log.segment import (
    DELETED_SUFFIX,
    LOG_SUFFIX,
    SNAPSHOT_SUFFIX,
    Segment,
)
from zufluss.log.writer_state import WriterState
from zufluss.model.table import TableBucket
from zufluss.record.batch.check import CheckedBatch
from zufluss.record.header import iter_headers, stamp

_logger = structlog.get_logger(__name__)


RESERVE_FROM_BYTES = 256 << 10
"""Segments and writes from this size on have blocks reserved ahead of them."""

RESERVE_BYTES_MAX = 16 << 20
"""Most that is reserved ahead."""

WRITERS_INLINE = 200
"""Snapshots of more writers are not written by the event loop: each takes it several µs."""


class OwedSnapshot(NamedTuple):
    """A writer snapshot that is to be written in a thread."""

    offset: int
    """The end of the segment that was closed."""
    incarnation: int
    """The number of truncations then."""
    writers: WriterState
    """The writers there; a copy."""


class AppendResult(NamedTuple):
    """The outcome of an append."""

    base_offset: int
    """Offset of the first record."""
    end_offset: int
    """Offset after the last record; acknowledge when the high watermark has reached it."""
    duplicate: bool
    """A retry of an earlier entry: these are its offsets and nothing was written."""


class Log(DurableLog):
    """The log of one bucket."""

    __slots__ = (
        "__weakref__", "_owed", "_pwrite", "_roll_above", "_snapshots", "config", "held_back",
        "holds", "leader_epoch", "on_roll", "writers",
    )  # fmt: skip

    def __init__(
        self,
        directory: Path,
        config: LogConfig,
        files: Files,
        recovered: RecoveredLog,
        bucket: TableBucket | None,
    ) -> None:
        super().__init__()
        self.directory = directory
        self.config = config
        """May be replaced when the table's properties change."""
        self.files = files
        self.bucket = bucket
        """The bucket of the log, and the key of its entries in the commit log."""
        self.leader_epoch = 0
        """Stamped into batches that have room for it."""
        self.on_roll: Callable[[Log], None] | None = None
        """Called when a segment was closed, so that its owner can have it synced."""
        self.holds = Holds()
        """The records that retention keeps, however old they are."""
        self.held_back = False
        """The last `expire` spared something for `Holder.KV_STATE` alone: a flush would free it."""
        self._pwrite = files.pwrite
        self._owed: OwedSnapshot | None = None
        self._adopt(recovered)

    def _adopt(self, recovered: RecoveredLog) -> None:
        self._show(recovered.segments, recovered.end_offset)
        self._unsynced = [s for s in recovered.segments[:-1] if s.synced < s.size]
        self._roll_above = self.config.segment_bytes_max
        self._snapshots = recovered.snapshots
        self._checkpoint = recovered.checkpoint
        self.incarnation = recovered.checkpoint.incarnation if recovered.checkpoint else 0
        self.writers = recovered.writers
        """Last batches of the idempotent writers."""
        self.writers.writers_max = self.config.writers_max
        self.writers.forget_oldest()
        self.last_timestamp = recovered.last_timestamp
        """Commit timestamp of the last batch; the next one is not less."""

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
        renew: bool = False,
    ) -> Log:
        """Open the log in `directory`, made if it is missing; recover it if it was not closed.

        `replay` are the entries the commit log has for it. `root` is the directory above that is
        known to be durable; by default the parent. `renew` is for a log that failed, or could not
        be opened, earlier in this process: a sync of what is there already would prove nothing.
        `CorruptRecordError` if durable data is missing or damaged: the files are left as they are,
        and the log must not be served.
        """
        files.make_directories(directory)
        recovered = recover(directory, config, files, replay)
        log = cls(directory, config, files, recovered, bucket)
        if recovered.checkpoint is None:
            log._never_synced(root or directory.parent)
        for batches in recovered.replay:
            log.append_stamped(batches)
        log.writers.forget_expired(now_ms)
        if renew:
            log._write_again()
        if renew or recovered.unsynced or log.log_end_offset > recovered.end_offset:
            log._names_changed(directory)
            log._suspect_side_files()
            log._sync_now()
        if renew:
            log._begin_incarnation(log.log_end_offset, log._active, log._active.size)
        log.advance_high_watermark(log.log_end_offset)
        return log

    @staticmethod
    def create_at(
        directory: Path,
        offset: int,
        writers: bytes,
        last_timestamp: int,
        files: Files,
        incarnation: int = 0,
    ) -> None:
        """Create an empty log that continues at `offset`; then `open` it.

        `writers` is the writer snapshot of that offset. What the commit log has of an earlier
        incarnation is not this log's. For a log whose disk was lost and whose
        beginning is in remote storage. It is there whole or not at all: until it is, it has a name
        that means deleted. Blocks.
        """
        target = directory.with_name(directory.name + DELETED_SUFFIX)
        named = files.make_directories(target)
        stem = f"{offset:020d}"
        files.put(target / f"{stem}{SNAPSHOT_SUFFIX}", writers, sync=True)
        files.put(target / f"{stem}{LOG_SUFFIX}", b"", sync=True)
        write_checkpoint(
            files, target, LogCheckpoint(0, offset, offset, 0, last_timestamp, incarnation)
        )
        files.sync_directory(target)
        files.rename(target, directory)
        for parent in {directory.parent: None, **dict.fromkeys(named)}:
            files.sync_directory(parent)

    # ------------------------------------------------------------------------------------ append

    def append(
        self,
        view: memoryview,
        batches: Sequence[CheckedBatch],
        now_ms: int,
        expiry_ms: int | None = None,
    ) -> AppendResult:
        """Append the checked batches of one bucket entry, all or none.

        `expiry_ms` is the time by which writers have expired, by default `now_ms`.

        Their positions are absolute in `view`, the receive buffer, and they follow each other in
        it. Offsets and the commit time are stamped in place. `OutOfOrderSequenceError` refuses a
        gap in a writer's sequence, `LogStorageError` reports a write that did not happen; the log
        is then as before.
        """
        if self.failure is not None:
            raise self._refusal()
        copy = self.writers.check(batches, now_ms if expiry_ms is None else expiry_ms)
        if copy is not None:
            return AppendResult(copy[0], copy[1], True)
        return self.append_new(view, batches, now_ms)

    def append_new(
        self, view: memoryview, batches: Sequence[CheckedBatch], now_ms: int
    ) -> AppendResult:
        """`append` for batches of which the writer state says that they come next."""
        if self.failure is not None:
            raise self._refusal()
        base = offset = self.log_end_offset
        timestamp = self.last_timestamp
        if now_ms > timestamp:
            timestamp = now_ms
        epoch = self.leader_epoch
        for at, _, magic, _, _, delta, _, _ in batches:
            stamp(view, at, magic, offset, timestamp, epoch)
            offset += delta + 1
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
        if position + size > segment.reserved and (position | size) >= RESERVE_FROM_BYTES:
            self._reserve(segment, size)
        self._write(segment, view[start : start + size], position)
        try:
            if timestamp > segment.max_timestamp:
                segment.max_timestamp = timestamp
                segment.max_timestamp_offset = base - segment.base_offset
            segment.size = position + size
            self.last_timestamp = timestamp
            self.log_end_offset = offset
            self._boundaries.append((offset, segment, segment.size))
            self._note(batches, segment, position - start, base, timestamp)
        except Exception as e:  # written, but not noted in full: only the files have the truth
            self.fail(e)
            raise self._refusal() from e
        return AppendResult(base, offset, False)

    def _note(
        self,
        batches: Sequence[CheckedBatch],
        segment: Segment,
        shift: int,
        offset: int,
        timestamp: int,
    ) -> None:
        """Add batches just written to index and writer state; `shift` maps view to file."""
        index = segment.loaded_index()
        unindexed, interval = index.unindexed, segment.interval_bytes
        due = False
        for start, end, _, _, _, delta, writer_id, sequence in batches:
            end_offset = offset + delta + 1
            if unindexed > interval:
                index.add(end_offset - 1 - segment.base_offset, start + shift)
                index.add_time(segment.max_timestamp, segment.max_timestamp_offset)
                unindexed, due = 0, True
            unindexed += end - start
            if writer_id >= 0:
                self.writers.record(writer_id, sequence, offset, end_offset, timestamp)
            offset = end_offset
        index.unindexed = unindexed
        if not due:
            return
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

    def _reserve(self, segment: Segment, size: int) -> None:
        """Ask for the blocks of this write and of as much again as the segment has, in one go.

        Reserving them one page at a time is a quarter of what a large write costs.
        """
        assert segment.file is not None
        length = size + min(segment.size, RESERVE_BYTES_MAX, self._roll_above - segment.size - size)
        if self.files.reserve(segment.file.fd, segment.size, max(length, size)):
            segment.reserved = segment.size + max(length, size)

    def _give_back(self, segment: Segment) -> None:
        """Free the blocks reserved beyond the end of a segment that was closed."""
        if segment.reserved <= segment.size or segment.file is None:
            return
        segment.reserved = 0
        try:
            self.files.truncate(segment.file.fd, segment.size)
        except OSError as e:
            _logger.warning("log_reserve_kept", segment=str(segment.path), reason=str(e))

    def _undo_write(self, segment: Segment, position: int, reason: str) -> None:
        assert segment.file is not None
        _logger.error("log_write_failed", log=str(self), reason=reason)
        segment.reserved = 0
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
        try:
            if new:
                if os.fstat(segment.file.fd).st_size:
                    self.files.truncate(segment.file.fd, 0)
                self._names_changed(self.directory)
            else:  # a process that was killed may have left a reserve behind the end
                segment.reserved = segment.size + 1
                self._give_back(segment)
            self.files.forget(segment.path)
            segment.resume_index(self.files)
        except BaseException:
            segment.file = None  # the next append does all of this again
            raise

    def roll(self) -> None:
        """Close the segment being written and start the next one; an empty one stays."""
        closed = self._active
        if not closed.size:
            return
        base = self.log_end_offset
        segment = Segment(self.directory, base, 0, self.config.index_interval_bytes)
        try:
            deferred = len(self.writers) > WRITERS_INLINE and self.on_roll is not None
            snapshot = None if deferred else self._write_snapshot()
            segment.file = self.files.open(segment.path, create=True)
        except OSError as e:
            raise LogStorageError(f"{self}: starting a segment at {base} failed: {e}") from e
        self._give_back(closed)
        closed.complete_index(self.files)
        try:
            self._begin_segment(closed, segment, snapshot)
        except Exception as e:  # half done
            self.fail(e)
            raise self._refusal() from e
        if self.on_roll is not None:
            self.on_roll(self)

    def take_owed_snapshot(self) -> OwedSnapshot | None:
        """The writer snapshot that a roll left to be written with `write_owed_snapshot`."""
        owed, self._owed = self._owed, None
        return owed

    def write_owed_snapshot(self, owed: OwedSnapshot) -> None:
        """Write a snapshot; then call `snapshot_written` on the event loop. For any thread."""
        self.files.put(self._snapshot_path(owed.offset), owed.writers.to_json())

    def snapshot_written(self, owed: OwedSnapshot) -> None:
        """Use a snapshot that was written; the next checkpoint makes it durable."""
        if self.failure is None and owed.incarnation == self.incarnation:
            insort(self._snapshots, owed.offset)
            self._side_files[self._snapshot_path(owed.offset)] = None
            self._names_changed(self.directory)

    def _begin_segment(self, closed: Segment, segment: Segment, snapshot: Path | None) -> None:
        if closed.synced < closed.size:
            self._unsynced.append(closed)
        else:
            closed.file = None
        self._side_files.update(dict.fromkeys(closed.loaded_index().paths))
        if snapshot is None:
            writers = self.writers.copy()
            self._owed = OwedSnapshot(segment.base_offset, self.incarnation, writers)
        else:
            self._side_files[snapshot] = None
        closed.index = None
        segment.loaded_index()
        self._segments.append(segment)
        self._bases.append(segment.base_offset)
        self._active = segment
        self._roll_above = self.config.segment_bytes_max
        self._names_changed(self.directory)

    def _write_snapshot(self) -> Path:
        path = self._snapshot_path(self.log_end_offset)
        self.files.put(path, self.writers.to_json())
        if self.log_end_offset not in self._snapshots:
            self._snapshots.append(self.log_end_offset)
        return path

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
        self._begin_incarnation(end, segment, position)
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

    def expire(self, now_ms: int, *, rolls_active: bool = True) -> RetiredSegments | None:
        """Let go of the segments older than the time to live; the caller has them removed.

        Only records below the high watermark that nobody holds (`holds.py`) are let go of. The
        segment being written goes too when all of it has expired and `rolls_active` is set:
        it is closed first, so that the log keeps its end. Of a log with a copy in remote
        storage, the copied segments go, as far as they are `surplus` here.
        """
        holds, visible_end = self.holds, self.high_watermark
        if holds.offset(Holder.REMOTE_COPY) is None:
            free = roll_until = holds.floor(visible_end, *RECORD_HOLDERS)
            old = expired(self._segments, self.files, now_ms, self.config.ttl_ms)
        else:
            free, roll_until = holds.floor(visible_end, Holder.REMOTE_COPY), visible_end
            old = surplus(self._segments, self.files, now_ms, self.config)
        to_roll = bool(old) and old[-1] is self._active
        if to_roll and not (rolls_active and self._rolled_to_expire(roll_until)):
            old.pop()
        limit = holds.floor(free, Holder.KV_STATE)
        until = self._bases[1 : len(old) + 1]
        self.held_back = any(limit < end <= free for end in until)
        limit = min(limit, max(self._snapshots, default=0))  # the writers of what goes are there
        old = [segment for segment, end in zip(old, until, strict=False) if end <= limit]
        if not old:
            return None
        del self._segments[: len(old)], self._bases[: len(old)]
        self._unsynced = [s for s in self._unsynced if s not in old]
        self._cursors.clear()
        if self._hw_segment in old:
            self._hw_segment, self._hw_position = self._segments[0], 0
        start = self.log_start_offset
        kept = min(offset for offset in self._snapshots if offset >= start)
        ends = (*(segment.base_offset for segment in old[1:]), start, kept)
        paths = [path for segment in old for path in segment.paths]
        paths += [self._snapshot_path(offset) for offset in self._snapshots if offset < start]
        self._snapshots = [offset for offset in self._snapshots if offset >= start]
        for path in paths:
            self.files.forget(path)
            self._side_files.pop(path, None)
        return RetiredSegments(
            self.directory, tuple(old), tuple(map(self._snapshot_path, ends)), tuple(paths)
        )

    def closed_from(self, offset: int) -> list[tuple[Segment, int]]:
        """Segments from `offset` on that will not change any more and are durable, each with its
        end: what can be copied to remote storage."""
        segments = []
        first = bisect_left(self._bases, offset)
        for segment, end in zip(self._segments[first:], self._bases[first + 1 :], strict=False):
            if end > self.high_watermark or segment.synced < segment.size:
                break
            segments.append((segment, end))
        return segments

    def _rolled_to_expire(self, until: int) -> bool:
        """Close the segment being written, if that frees it and the disk has room for it."""
        if self.failure is not None or self.log_end_offset > until:
            return False
        try:
            self.roll()
        except LogStorageError as e:
            _logger.warning("log_not_rolled_to_expire", log=str(self), reason=str(e))
            return False
        return True

    def delete(self) -> Path:
        """Give the directory a name that means deleted; return it for `remove_deleted`."""
        with self._checkpoint_lock:
            self._deleted = True
        self.failure = self.failure or LogStorageError(f"{self} was deleted")
        self._release()
        target = self.directory.with_name(self.directory.name + DELETED_SUFFIX)
        self.files.rename(self.directory, target)
        return target

    def give_up(self, reason: Exception) -> None:
        """Take no more writes and close the files; syncs under way end by themselves."""
        self.on_failure = None
        self.failure = self.failure or reason
        self._release()

    def close(self, *, clean: bool) -> None:
        """Let go of the files; a clean close leaves the log so that opening it needs no scan.

        The caller has seen to it that no sync of this log is under way.
        """
        if clean and self.failure is None and not self._is_clean():
            self._give_back(self._active)
            self._active.complete_index(self.files)
            snapshot = self._write_snapshot()
            self._names_changed(self.directory)
            self._side_files.update(dict.fromkeys((*self._active.loaded_index().paths, snapshot)))
            self._sync_now()
        self._release()

    def _is_clean(self) -> bool:
        if self._checkpoint is None:
            return self.log_end_offset == 0
        return not self.unmarked and (
            self.log_end_offset in self._snapshots and not self._side_files
        )

    def _release(self) -> None:
        for segment in self._segments:
            segment.file = None
            for path in segment.paths:
                self.files.forget(path)
