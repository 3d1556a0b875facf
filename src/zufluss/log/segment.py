"""One segment of a log: a file of batches with its two indexes.

A segment knows its bytes, not who may read them: bounds (high watermark, log start) are the log's
business. All searches start at an index entry, check the entry against the batch header it points
to, and walk headers from there; an entry that does not fit its batch makes the index be rebuilt.
Only the last segment of a log grows. Files: `<base offset, 20 digits>.log`, `.index`, `.timeindex`.
"""

from __future__ import annotations

import errno
import os
import struct
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np
import structlog

from zufluss.errors import CorruptRecordError
from zufluss.log.files import Files, OpenFile
from zufluss.log.index import SegmentIndex
from zufluss.record.header import HEADER_SIZES, BatchHeader, read_header, verify_crc
from zufluss.system import NOWAIT

LOG_SUFFIX = ".log"
INDEX_SUFFIX = ".index"
TIME_INDEX_SUFFIX = ".timeindex"
SNAPSHOT_SUFFIX = ".writer_snapshot"
DELETED_SUFFIX = ".deleted"

_WINDOW_MIN = 4096
_WINDOW_MAX = 1 << 20
_UNKNOWN = -1
_INDEX_DAMAGE = (CorruptRecordError, FileNotFoundError, struct.error)

_logger = structlog.get_logger(__name__)


class Slice(NamedTuple):
    """Bytes of one segment that hold whole batches."""

    file: OpenFile | None
    """The open file, None if there is nothing to read; holding it keeps the descriptor valid."""
    position: int
    """First byte."""
    length: int
    """Number of bytes, 0 if there is nothing to read."""
    end_offset: int
    """Offset after the last batch of the slice: where the next read starts."""

    @property
    def fd(self) -> int:
        """The descriptor, valid as long as the slice is held, in any thread."""
        if self.file is None:
            raise ValueError("an empty slice has no file")
        return self.file.fd


class Segment:
    """A file of batches with consecutive offsets."""

    __slots__ = (
        "base_offset", "directory", "doubtful", "file", "index", "interval_bytes", "max_timestamp",
        "max_timestamp_offset", "proven", "reserved", "size", "synced",
    )  # fmt: skip

    def __init__(
        self, directory: Path, base_offset: int, size: int = 0, interval_bytes: int = 4096
    ) -> None:
        self.directory = directory
        self.base_offset = base_offset
        self.size = size
        self.interval_bytes = interval_bytes
        """More bytes than this since the last index entry make the next one due."""
        self.synced = 0
        """Bytes known to be durable in this file."""
        self.doubtful = size
        """Batches below this byte came from the disk: they are verified before they are served."""
        self.proven = 0
        """Batches below this byte have been verified since."""
        self.reserved = 0
        """Blocks for the bytes below this were asked for ahead of their writes."""
        self.file: OpenFile | None = None
        """Held open while the segment is written or not yet synced."""
        self.index: SegmentIndex | None = None
        self.max_timestamp = _UNKNOWN
        self.max_timestamp_offset = 0
        """Relative base offset of the first batch with the newest timestamp."""

    @property
    def path(self) -> Path:
        """The file of batches."""
        return self.directory / f"{self.base_offset:020d}{LOG_SUFFIX}"

    @property
    def paths(self) -> tuple[Path, Path, Path]:
        """All files of the segment, the batches first."""
        stem = f"{self.base_offset:020d}"
        return (
            self.directory / f"{stem}{LOG_SUFFIX}",
            self.directory / f"{stem}{INDEX_SUFFIX}",
            self.directory / f"{stem}{TIME_INDEX_SUFFIX}",
        )

    def reader(self, files: Files) -> OpenFile:
        """An open file to read from."""
        return self.file if self.file is not None else files.cached(self.path)

    def loaded_index(self) -> SegmentIndex:
        """The indexes, looked up on disk at first use."""
        if self.index is None:
            self.index = SegmentIndex.load(self.directory, self.base_offset)
        return self.index

    def empty_index(self, files: Files) -> SegmentIndex:
        """Start the indexes over."""
        for path in self.paths[1:]:
            files.unlink_if_there(path)
        self.max_timestamp = _UNKNOWN
        self.index = SegmentIndex.load(self.directory, self.base_offset)
        return self.index

    def note(self, header: BatchHeader, position: int) -> None:
        """Take a batch of this segment into the indexes, if its entry is due."""
        index = self.loaded_index()
        self._note_time(header)
        if index.unindexed > self.interval_bytes:
            index.add(header.last_offset - self.base_offset, position)
            index.add_time(self.max_timestamp, self.max_timestamp_offset)
            index.unindexed = 0
        index.unindexed += header.size

    def _note_time(self, header: BatchHeader) -> None:
        if header.timestamp > self.max_timestamp:
            self.max_timestamp = header.timestamp
            self.max_timestamp_offset = header.base_offset - self.base_offset

    def resume_index(self, files: Files) -> SegmentIndex:
        """The indexes, ready to be continued where an earlier process left off."""
        index = self.loaded_index()
        try:
            entry = index.entry_before(files, self.size)
            time_entry = index.last_time_entry(files)
        except _INDEX_DAMAGE as e:
            _logger.warning("log_index_damaged", segment=str(self.path), reason=str(e))
            self.rebuild_index(files)
            return self.loaded_index()
        index.unindexed = self.size - (entry[1] if entry else 0)
        if time_entry is not None:
            index.last_time = time_entry[0]
        return index

    def complete_index(self, files: Files) -> None:
        """Write all index entries, with the newest timestamp as the last time entry."""
        index = self.loaded_index()
        if self.size:
            index.add_time(self.max_timestamp, self.max_timestamp_offset)
        index.flush(files, all_entries=True)

    def newest_timestamp(self, files: Files, *, nowait: bool = False) -> int:
        """The commit timestamp of the last batch; the segment must not be empty."""
        if self.max_timestamp == _UNKNOWN:
            start = self._anchor(
                files, lambda index: index.entry_before(files, self.size), nowait=nowait
            )
            for header in [h for _, h in self._headers(files, start, nowait)]:
                self._note_time(header)
        return self.max_timestamp

    def position_of(self, files: Files, offset: int, *, nowait: bool = False) -> int:
        """Position of the batch that contains `offset`."""
        relative = offset - self.base_offset
        start = self._anchor(files, lambda i: i.entry_at_or_below(files, relative), nowait=nowait)
        for position, header in headers(self.reader(files), start, self.size, nowait=nowait):
            if header.next_offset > offset:
                return position
        raise CorruptRecordError(
            f"{self.path}: no batch contains offset {offset} although the segment should; "
            "the file was damaged, restore it from a replica or from remote storage"
        )

    def boundary(
        self, files: Files, start: int, limit: int, *, nowait: bool = False
    ) -> tuple[int, int, int]:
        """Where the batch that crosses byte `limit` starts, its base offset, and where it ends.

        `start` is the start of some batch, `start <= limit < size`.
        """
        anchor = self._anchor(files, lambda index: index.entry_before(files, limit), nowait=nowait)
        file = self.reader(files)
        for position, header in headers(file, max(anchor, start), self.size, nowait=nowait):
            if position + header.size > limit:
                return position, header.base_offset, position + header.size
        raise CorruptRecordError(f"{self.path}: the batches end before byte {limit}")

    def first_at_or_after(
        self, files: Files, timestamp: int, *, nowait: bool = False
    ) -> int | None:
        """Base offset of the first batch with a commit timestamp at or after `timestamp`."""
        start = self._time_anchor(files, timestamp, nowait)
        for _, header in self._headers(files, start, nowait):
            if header.timestamp >= timestamp:
                return header.base_offset
        return None

    def _anchor(
        self,
        files: Files,
        look_up: Callable[[SegmentIndex], tuple[int, int] | None],
        *,
        nowait: bool = False,
    ) -> int:
        """The start of a batch from which to walk, by an index entry that its header proves."""
        try:
            entry = look_up(self.loaded_index())
            if entry is None:
                return 0
            if self._header_at(files, entry[1], nowait).last_offset == self.base_offset + entry[0]:
                return entry[1]
        except _INDEX_DAMAGE as e:
            _logger.warning("log_index_damaged", segment=str(self.path), reason=str(e))
        self.rebuild_index(files)
        return 0

    def _time_anchor(self, files: Files, timestamp: int, nowait: bool) -> int:
        try:
            entry = self.loaded_index().time_before(files, timestamp)
            if entry is None:
                return 0
            position = self.position_of(files, self.base_offset + entry[1], nowait=nowait)
            header = self._header_at(files, position, nowait)
            if (header.timestamp, header.base_offset - self.base_offset) == entry:
                return position
        except _INDEX_DAMAGE as e:
            _logger.warning("log_index_damaged", segment=str(self.path), reason=str(e))
        self.rebuild_index(files)
        return 0

    def _headers(
        self, files: Files, position: int, nowait: bool
    ) -> Iterator[tuple[int, BatchHeader]]:
        return headers(self.reader(files), position, self.size, nowait=nowait)

    def _header_at(self, files: Files, position: int, nowait: bool) -> BatchHeader:
        if not 0 <= position < self.size:
            raise CorruptRecordError(f"index entry for byte {position} of {self.size}")
        _, header = next(self._headers(files, position, nowait))
        return header

    def distrust(self) -> None:
        """Mark batches as read from the disk again; read-ahead brings more than was asked for."""
        self.doubtful, self.proven = self.size, 0

    def doubts(self, position: int) -> bool:
        """Whether a batch that begins at `position` must be verified before it is served."""
        return self.proven <= position < self.doubtful

    def prove(self, batches: memoryview, position: int, offset: int, end_offset: int) -> None:
        """Verify batches that were read at `position`, unless nothing about them is in doubt.

        The first must contain `offset`, the last must end at `end_offset`.
        """
        end = position + len(batches)
        if position >= self.doubtful or end <= self.proven:
            return
        base, ends_at = verify_batches(batches, position)
        if not base <= offset < ends_at == end_offset:
            raise CorruptRecordError(
                f"{self.path}: bytes {position} to {end} hold offsets {base} to {ends_at}, not "
                f"{offset} to {end_offset}: the file was damaged, restore it from a replica"
            )
        if position <= self.proven:
            self.proven = end

    def rebuild_index(self, files: Files) -> None:
        """Make the indexes anew from the batches."""
        self.index = self.empty_index(files)
        expected = self.base_offset
        for position, header in headers(self.reader(files), 0, self.size):
            if header.base_offset != expected:
                raise CorruptRecordError(
                    f"{self.path}: batch {header.base_offset} at byte {position}, expected "
                    f"{expected}: the file was damaged, restore it from a replica"
                )
            expected = header.next_offset
            self.note(header, position)
            self.index.flush(files)
        self.complete_index(files)

    def __repr__(self) -> str:
        return f"Segment({self.base_offset}, size={self.size}, synced={self.synced})"


def headers(
    file: OpenFile, position: int, end: int, *, nowait: bool = False
) -> Iterator[tuple[int, BatchHeader]]:
    """Yield position and header of each batch in [position, end) of a file.

    `CorruptRecordError` at the first header that cannot be one, or that reaches past `end`;
    `BlockingIOError` with `nowait` when a header is not in the page cache.
    """
    window = _WINDOW_MIN
    while position < end:
        chunk = pread(file, min(window, end - position), position, nowait=nowait)
        at, usable = 0, len(chunk)
        if position + usable < end:
            usable -= HEADER_SIZES[-1] - 1
        while at < usable:
            header = read_header(chunk, at)
            following = at + header.size
            if position + following > end:
                raise CorruptRecordError(
                    f"batch at byte {position + at} has {header.size} bytes, past the end at {end}"
                )
            yield position + at, header
            at = following
        if at == 0:
            raise CorruptRecordError(f"the file ends at byte {position}, expected {end}")
        window = min(window * 2, _WINDOW_MAX) if at <= len(chunk) else _WINDOW_MIN
        position += at


class PagesNotCachedError(BlockingIOError):
    """A read that would have to wait for the disk.

    Call `load` in a thread, then try again.
    """

    def __init__(self, file: OpenFile, position: int, length: int) -> None:
        super().__init__(errno.EAGAIN, "not in the page cache")
        self._file = file
        self._position = position
        self._length = length

    def load(self) -> None:
        """Bring the bytes into the page cache."""
        os.pread(self._file.fd, self._length, self._position)


def verify_batches(data: bytes | memoryview, position: int) -> tuple[int, int]:
    """Check that batches are whole and follow each other; return the offsets they span.

    `CorruptRecordError` names the first bad one.
    """
    at = 0
    first = expected = timestamp = -1
    while at < len(data):
        header = read_header(data, at)
        if header.size > len(data) - at or not verify_crc(data, at, header):
            reason = "its CRC does not fit"
        elif at and header.base_offset != expected:
            reason = f"offset {expected} was expected"
        elif header.timestamp < timestamp:
            reason = f"it is older than the batch before, {header.timestamp} after {timestamp}"
        else:
            first = first if at else header.base_offset
            expected, timestamp = header.next_offset, header.timestamp
            at += header.size
            continue
        raise CorruptRecordError(
            f"the batch of offset {header.base_offset} at byte {position + at} of its segment: "
            f"{reason}. The file was damaged, restore it from a replica"
        )
    return first, expected


def pread(file: OpenFile, length: int, position: int, *, nowait: bool) -> bytes | bytearray:
    """Read up to `length` bytes; with `nowait` only what the page cache has, at least a header."""
    if not nowait:
        return os.pread(file.fd, length, position)
    buffer = bytearray(length)
    try:
        count = read_into(file.fd, buffer, position, nowait=True)
    except BlockingIOError:
        count = 0
    if count < min(length, HEADER_SIZES[-1]):
        raise PagesNotCachedError(file, position, length)
    del buffer[count:]
    return buffer


def read_slice(part: Slice, *, nowait: bool) -> memoryview:
    """The bytes of a slice. Safe in a thread with `nowait=False`."""
    if part.file is None:
        return memoryview(b"")
    if nowait:
        return read_exactly(part.file, part.length, part.position)
    buffer = np.empty(part.length, np.uint8).data
    return buffer[: read_into(part.fd, buffer, part.position, nowait=False)]


def read_exactly(file: OpenFile, length: int, position: int) -> memoryview:
    """Bytes that are in the page cache; `PagesNotCachedError` if some are not."""
    buffer = np.empty(length, np.uint8).data
    try:
        count = read_into(file.fd, buffer, position, nowait=True)
    except BlockingIOError:
        count = 0
    if count < length:
        raise PagesNotCachedError(file, position, length)
    return buffer


def read_into(fd: int, buffer: bytearray | memoryview, position: int, *, nowait: bool) -> int:
    """Read into a buffer; with `nowait` never wait for the disk, which may cut the read short.

    A file system, or a system, that cannot promise not to wait is read as usual.
    """
    if nowait:
        try:
            return os.preadv(fd, [buffer], position, NOWAIT)
        except OSError as e:
            if e.errno != errno.EOPNOTSUPP:
                raise
    return os.preadv(fd, [buffer], position)
