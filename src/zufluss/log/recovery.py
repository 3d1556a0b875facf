"""Opening a log: what is on disk, what of it can be trusted, what has to go.

After a clean stop (`checkpoint.py`) nothing is scanned; only the end of each segment must fit the
start of the next. After any other stop:

1. Segments that lie wholly below the recovery point and are not needed for the writer state are
   trusted in the same way.
2. From the newest good writer snapshot at or below the recovery point on, every header is walked:
   offsets must follow each other. That rebuilds the writer state and the indexes.
3. From the recovery point on, the CRC of every batch is verified too. Here the log may end: at the
   first batch that is cut, zero-filled, damaged or out of sequence the rest is removed, because it
   was never promised to be durable in these files.
4. Damage *below* the recovery point is another matter: those bytes were durable and acknowledged.
   The log refuses to open (`CorruptRecordError`) and leaves the files as they are, so that an
   operator or a replica can repair them; other logs are not concerned.
5. Entries of the commit log (`commit_log.py`) that continue the recovered end are appended. An
   entry that leaves a gap proves a loss and refuses the log as in 4. So does an end, these entries
   included, below the mark of what was durable (`checkpoint.py`).

All decisions are made before the first byte is changed. What was recovered above the recovery
point is synced and checkpointed before anybody reads it (`Log.open`).
"""

from __future__ import annotations

import os
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

import structlog

from zufluss.errors import CorruptRecordError
from zufluss.log.checkpoint import LogCheckpoint, read_checkpoint, read_mark
from zufluss.log.config import LogConfig
from zufluss.log.files import Files, OpenFile
from zufluss.log.segment import (
    DELETED_SUFFIX,
    INDEX_SUFFIX,
    LOG_SUFFIX,
    SNAPSHOT_SUFFIX,
    TIME_INDEX_SUFFIX,
    Segment,
    headers,
)
from zufluss.log.writer_state import WriterState
from zufluss.record.header import BatchHeader, iter_headers, verify_crc

_logger = structlog.get_logger(__name__)


class ReplayEntry(NamedTuple):
    """Stamped batches of one bucket entry that the commit log kept."""

    incarnation: int
    """The log's number of truncations when the entry was appended."""
    batches: memoryview
    """The bytes."""


@dataclass(slots=True)
class RecoveredLog:
    """The state of a log as found on disk."""

    segments: list[Segment]
    """By base offset; the last one is written next."""
    end_offset: int
    """Offset after the last batch."""
    last_timestamp: int
    """Commit timestamp of the last batch, 0 if there is none."""
    writers: WriterState
    """State right before `end_offset`."""
    checkpoint: LogCheckpoint | None
    """The last checkpoint."""
    unsynced: bool
    """The files hold, or lost, something the checkpoint does not know of."""
    snapshots: list[int] = field(default_factory=list)
    """Offsets of the writer snapshots kept."""
    replay: list[memoryview] = field(default_factory=list)
    """Entries of the commit log to be appended at the end."""


@dataclass(slots=True)
class _Inventory:
    """The names in a log's directory."""

    sizes: dict[int, int] = field(default_factory=dict)
    snapshots: list[int] = field(default_factory=list)


def recover(
    directory: Path, config: LogConfig, files: Files, replay: Sequence[ReplayEntry] = ()
) -> RecoveredLog:
    """Establish the state of the log in `directory`; `replay` is what the commit log has for it."""
    inventory = _take_inventory(directory, files)
    checkpoint = read_checkpoint(directory)
    entries = _of_this_incarnation(replay, checkpoint)
    segments = [
        Segment(directory, base, inventory.sizes[base], config.index_interval_bytes)
        for base in sorted(inventory.sizes)
    ]
    if not segments:
        recovered = _new_log(directory, config, checkpoint)
    else:
        clean = _open_clean(directory, config, files, segments, checkpoint, inventory)
        if clean is None:
            scan = _Scan(directory, config, files, segments, checkpoint, inventory)
            scan.run()
            _check_end(directory, checkpoint, _check_replay(directory, entries, scan.end_offset))
            recovered = scan.apply()
        else:
            recovered = clean
    _check_end(directory, checkpoint, _check_replay(directory, entries, recovered.end_offset))
    recovered.replay = entries
    return recovered


def _of_this_incarnation(
    replay: Sequence[ReplayEntry], checkpoint: LogCheckpoint | None
) -> list[memoryview]:
    """Entries appended since the last truncation; without a checkpoint, the newest there are."""
    if checkpoint is not None:
        incarnation = checkpoint.incarnation
    else:
        incarnation = max((entry.incarnation for entry in replay), default=0)
    return [entry.batches for entry in replay if entry.incarnation == incarnation]


def _take_inventory(directory: Path, files: Files) -> _Inventory:
    inventory = _Inventory()
    indexes: list[tuple[int, Path]] = []
    for entry in os.scandir(directory):
        stem, dot, suffix = entry.name.rpartition(".")
        suffix = dot + suffix
        if suffix == DELETED_SUFFIX:
            files.unlink_if_there(Path(entry.path))
        elif not stem.isdecimal():
            continue
        elif suffix == LOG_SUFFIX:
            inventory.sizes[int(stem)] = entry.stat().st_size
        elif suffix == SNAPSHOT_SUFFIX:
            inventory.snapshots.append(int(stem))
        elif suffix in (INDEX_SUFFIX, TIME_INDEX_SUFFIX):
            indexes.append((int(stem), Path(entry.path)))
    for base, path in indexes:
        if base not in inventory.sizes:
            files.unlink_if_there(path)
    inventory.snapshots.sort()
    return inventory


def _new_log(directory: Path, config: LogConfig, checkpoint: LogCheckpoint | None) -> RecoveredLog:
    if checkpoint is not None and checkpoint.recovery_point > 0:
        raise _refusal(
            directory, f"no segment is there, the recovery point is {checkpoint.recovery_point}"
        )
    segment = Segment(directory, 0, 0, config.index_interval_bytes)
    return RecoveredLog(
        [segment], 0, 0, WriterState(config.writer_expiry_ms), checkpoint, unsynced=False
    )


def _open_clean(
    directory: Path,
    config: LogConfig,
    files: Files,
    segments: list[Segment],
    checkpoint: LogCheckpoint | None,
    inventory: _Inventory,
) -> RecoveredLog | None:
    """The log if it was stopped cleanly: it ends where the checkpoint and a snapshot say."""
    last = segments[-1]
    if checkpoint is None or (last.base_offset, last.size) != (
        checkpoint.segment_base,
        checkpoint.position,
    ):
        return None
    end = checkpoint.recovery_point
    if end not in inventory.snapshots:
        return None
    writers = read_snapshot(directory, end, config.writer_expiry_ms)
    if writers is None:
        return None
    _check_ends(directory, files, segments)
    last.synced = last.size
    return RecoveredLog(
        segments,
        end,
        checkpoint.last_timestamp,
        writers,
        checkpoint,
        unsynced=False,
        snapshots=inventory.snapshots,
    )


def _check_ends(directory: Path, files: Files, segments: Sequence[Segment]) -> None:
    """Each segment that is trusted must end where the next one starts."""
    for segment, following in pairwise(segments):
        end = following.base_offset
        try:
            position = segment.position_of(files, end - 1)
            ends = [
                h.next_offset for _, h in headers(segment.reader(files), position, segment.size)
            ]
        except CorruptRecordError as e:
            raise _refusal(directory, f"{segment.path.name}: {e.message}") from e
        if ends != [end]:
            raise _refusal(directory, f"{segment.path.name} does not end at offset {end}")
        segment.synced = segment.size


def read_snapshot(directory: Path, offset: int, expiry_ms: int) -> WriterState | None:
    """The writer state before `offset`, or None if its snapshot is damaged."""
    path = directory / f"{offset:020d}{SNAPSHOT_SUFFIX}"
    try:
        return WriterState.from_json(path.read_bytes(), expiry_ms)
    except ValueError as e:
        _logger.warning("writer_snapshot_damaged", path=str(path), reason=str(e))
        return None


class _Scan:
    """The scan of a log that was not stopped cleanly."""

    def __init__(
        self,
        directory: Path,
        config: LogConfig,
        files: Files,
        segments: list[Segment],
        checkpoint: LogCheckpoint | None,
        inventory: _Inventory,
    ) -> None:
        self.directory = directory
        self.files = files
        self.segments = segments
        self.checkpoint = checkpoint
        self.snapshots = inventory.snapshots
        start = segments[0].base_offset
        self.recovery_point = max(checkpoint.recovery_point, start) if checkpoint else start
        self.last_timestamp = checkpoint.last_timestamp if checkpoint else 0
        self.kept = len(segments)
        """Segments that stay."""
        self.cut_size = segments[-1].size
        """Size of the last segment that stays."""
        self.writers, self.writers_from = self._newest_snapshot(config.writer_expiry_ms)
        self.end_offset = start

    def _newest_snapshot(self, expiry_ms: int) -> tuple[WriterState, int]:
        start = self.segments[0].base_offset
        for offset in reversed(self.snapshots):
            if start <= offset <= self.recovery_point:
                state = read_snapshot(self.directory, offset, expiry_ms)
                if state is not None:
                    return state, offset
        return WriterState(expiry_ms), start

    def run(self) -> None:
        """Walk the segments; decide what stays."""
        bases = [segment.base_offset for segment in self.segments]
        first = bisect_right(bases, self.writers_from) - 1
        _check_ends(self.directory, self.files, self.segments[: first + 1])
        self.end_offset = bases[first]
        for i in range(first, len(self.segments)):
            segment = self.segments[i]
            if segment.base_offset != self.end_offset:
                self._cut(i, self.segments[i - 1].size, f"segment {segment.base_offset} follows")
                break
            position, damage = self._walk(segment)
            if damage:
                self._cut(i + 1, position, damage)
                break
            self.cut_size = position
        if self.end_offset < self.recovery_point:
            raise _refusal(
                self.directory,
                f"the log ends at offset {self.end_offset}, the recovery point is "
                f"{self.recovery_point}",
            )

    def _walk(self, segment: Segment) -> tuple[int, str]:
        """Add the batches of a segment; return where they end and what is wrong there."""
        index = segment.empty_index(self.files)
        file = segment.reader(self.files)
        end = 0
        try:
            for position, header in headers(file, 0, segment.size):
                damage = self._damage(file, position, header)
                if damage:
                    return end, damage
                segment.note(header, position)
                index.flush(self.files)
                self._take(header)
                end = position + header.size
        except CorruptRecordError as e:
            return end, e.message
        return end, ""

    def _damage(self, file: OpenFile, position: int, header: BatchHeader) -> str:
        if header.base_offset != self.end_offset or header.last_offset_delta < 0:
            return f"byte {position}: batch {header.base_offset}, expected {self.end_offset}"
        if header.base_offset >= self.recovery_point:
            batch = os.pread(file.fd, header.size, position)
            if not verify_crc(batch, 0, header):
                return f"byte {position}: the CRC of batch {header.base_offset} does not fit"
        return ""

    def _take(self, header: BatchHeader) -> None:
        self.end_offset = header.next_offset
        self.last_timestamp = max(self.last_timestamp, header.timestamp)
        if header.writer_id >= 0 and header.base_offset >= self.writers_from:
            self.writers.record(
                header.writer_id,
                header.batch_sequence,
                header.base_offset,
                header.next_offset,
                header.timestamp,
            )

    def _cut(self, count: int, size: int, reason: str) -> None:
        if self.end_offset < self.recovery_point:
            raise _refusal(self.directory, f"{self.segments[count - 1].path.name}, {reason}")
        self.kept, self.cut_size = count, size
        _logger.warning(
            "log_tail_cut",
            directory=str(self.directory),
            log_end_offset=self.end_offset,
            bytes=sum(s.size for s in self.segments[count - 1 :]) - size,
            reason=reason,
        )

    def apply(self) -> RecoveredLog:
        """Remove the segments that do not stay, and return the state of the rest."""
        last = self.segments[self.kept - 1]
        cut = self.kept < len(self.segments) or last.size != self.cut_size
        for segment in reversed(self.segments[self.kept :]):
            for path in segment.paths:
                self.files.unlink_if_there(path)
        del self.segments[self.kept :]
        if last.size != self.cut_size:
            file = self.files.open(last.path)
            self.files.truncate(file.fd, self.cut_size)
            last.size = self.cut_size
        self._mark_synced()
        return RecoveredLog(
            self.segments,
            self.end_offset,
            self.last_timestamp,
            self.writers,
            self.checkpoint,
            unsynced=cut or self.end_offset > self.recovery_point or self.checkpoint is None,
            snapshots=self._keep_snapshots(),
        )

    def _mark_synced(self) -> None:
        """Segments below the recovery point are durable; of its own segment, a part is."""
        for segment, following in pairwise(self.segments):
            if following.base_offset <= self.recovery_point:
                segment.synced = segment.size
        if self.checkpoint is not None:
            for segment in self.segments:
                if segment.base_offset == self.checkpoint.segment_base:
                    segment.synced = max(segment.synced, self.checkpoint.position)

    def _keep_snapshots(self) -> list[int]:
        """Snapshots at segment boundaries stay; others have no further use."""
        bases = {segment.base_offset for segment in self.segments}
        bases.add(self.end_offset)
        for offset in set(self.snapshots) - bases:
            self.files.unlink_if_there(self.directory / f"{offset:020d}{SNAPSHOT_SUFFIX}")
        return [offset for offset in self.snapshots if offset in bases]


def _check_replay(directory: Path, replay: Sequence[memoryview], end_offset: int) -> int:
    """Return the end of the log with the entries of the commit log."""
    for entry in replay:
        for _, header in iter_headers(entry):
            if header.base_offset > end_offset:
                raise _refusal(
                    directory,
                    f"the log ends at offset {end_offset}, the commit log goes on at "
                    f"{header.base_offset}",
                )
            end_offset = max(end_offset, header.next_offset)
    return end_offset


def _check_end(directory: Path, checkpoint: LogCheckpoint | None, end_offset: int) -> None:
    """Refuse a log that lacks what was durable, also if that was after the last checkpoint."""
    mark = read_mark(directory)
    incarnation = checkpoint.incarnation if checkpoint else 0
    if mark is not None and mark.incarnation == incarnation and end_offset < mark.end_offset:
        raise _refusal(
            directory,
            f"the log ends at offset {end_offset}, and everything below {mark.end_offset} was "
            "acknowledged",
        )


def continuing(entries: Sequence[ReplayEntry], end_offset: int) -> list[ReplayEntry]:
    """The entries up to the first gap after `end_offset`: for a log that lost its own files."""
    for i, entry in enumerate(entries):
        for _, header in iter_headers(entry.batches):
            if header.base_offset > end_offset:
                _logger.error("commit_log_not_continuing", lost=(end_offset, header.base_offset))
                return list(entries[:i])
            end_offset = max(end_offset, header.next_offset)
    return list(entries)


def _refusal(directory: Path, reason: str) -> CorruptRecordError:
    _logger.error("log_refused", directory=str(directory), reason=reason)
    return CorruptRecordError(
        f"log {directory}: {reason}. Data that was durable is missing or damaged, so the log is "
        "not served and its files are left as they are; restore them from a replica, from remote "
        "storage or from a backup, or drop the table"
    )
