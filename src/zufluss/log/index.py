"""The sparse indexes of a segment: offset to position, timestamp to offset.

An index only shortens a search. Every entry is checked against the batch header it points to
before it is used (`segment.py`), so a lost, stale or damaged index costs time, never a wrong
answer, and it is rebuilt from the batches.

| file               | entry, big-endian                  | meaning                                |
|--------------------|------------------------------------|----------------------------------------|
| `<base>.index`     | relative offset i32, position i32  | *last* offset of the batch at position |
| `<base>.timeindex` | timestamp i64, relative offset i32 | *base* offset of the segment's first   |
|                    |                                    | batch with that commit timestamp       |

The entry of a batch is due when more than `index_interval_bytes` were appended since the last one;
the time entry of the newest timestamp so far joins it unless that timestamp has one already. Remote
readers get these files as they are, so the layout is part of the protocol.

Entries of the segment being written gather in memory and go to the file a hundred at a time. When
the disk refuses them (it may be full although the batch itself fitted) they stay in memory for the
next try; past a bound they are dropped, which only makes the index sparser.
"""

from __future__ import annotations

import os
import struct
from bisect import bisect_left, bisect_right
from collections.abc import Callable
from pathlib import Path

import structlog

from zufluss.log.files import Files

OFFSET_ENTRY = struct.Struct(">ii")
"""Relative last offset, position."""

TIME_ENTRY = struct.Struct(">qi")
"""Timestamp, relative base offset."""

_PENDING_BYTES = 100 * OFFSET_ENTRY.size
_PENDING_BYTES_MAX = 100 * _PENDING_BYTES
_NEVER = -(1 << 63)

_logger = structlog.get_logger(__name__)


class EntryFile:
    """Fixed-size entries in a file, the youngest of them still in memory."""

    __slots__ = ("_entry", "count", "path", "pending")

    def __init__(self, path: Path, entry: struct.Struct, count: int = 0) -> None:
        self.path = path
        self._entry = entry
        self.count = count
        self.pending = bytearray()

    @classmethod
    def load(cls, path: Path, entry: struct.Struct) -> EntryFile:
        """The entries of an existing file; a missing one has none."""
        try:
            size = path.stat().st_size
        except FileNotFoundError:
            size = 0
        return cls(path, entry, size // entry.size)

    def __len__(self) -> int:
        return self.count + len(self.pending) // self._entry.size

    def add(self, first: int, second: int) -> None:
        """Append an entry in memory."""
        if len(self.pending) < _PENDING_BYTES_MAX:
            self.pending += self._entry.pack(first, second)

    def flush(self, files: Files) -> None:
        """Write the entries in memory to the file; `OSError` leaves them in memory."""
        if self.pending:
            file = files.open(self.path, create=True)
            files.write_all(file.fd, self.pending, self.count * self._entry.size)
            self.count = len(self)
            self.pending = bytearray()

    def replace(self, files: Files, entries: bytes) -> None:
        """Replace all entries, in memory and in the file."""
        files.put(self.path, entries)
        self.count = len(entries) // self._entry.size
        self.pending = bytearray()

    def reader(self, files: Files) -> Callable[[int], tuple[int, int]]:
        """A function that returns the i-th entry."""
        entry, size, count, pending = self._entry, self._entry.size, self.count, self.pending
        fd = files.cached(self.path).fd if count else -1

        def read(i: int) -> tuple[int, int]:
            if i >= count:
                first, second = entry.unpack_from(pending, (i - count) * size)
            else:
                first, second = entry.unpack(os.pread(fd, size, i * size))
            return first, second

        return read


class SegmentIndex:
    """Both indexes of one segment."""

    __slots__ = ("last_time", "offsets", "times", "unindexed")

    def __init__(self, offsets: EntryFile, times: EntryFile) -> None:
        self.offsets = offsets
        self.times = times
        self.unindexed = 0
        """Bytes appended since the last entry."""
        self.last_time = _NEVER
        """Timestamp of the last time entry, to write each once."""

    @classmethod
    def load(cls, directory: Path, base_offset: int) -> SegmentIndex:
        """The indexes of a segment on disk."""
        stem = f"{base_offset:020d}"
        return cls(
            EntryFile.load(directory / f"{stem}.index", OFFSET_ENTRY),
            EntryFile.load(directory / f"{stem}.timeindex", TIME_ENTRY),
        )

    @property
    def paths(self) -> tuple[Path, Path]:
        """The two files."""
        return self.offsets.path, self.times.path

    @property
    def size(self) -> int:
        """Bytes of the larger index."""
        return max(len(self.offsets) * OFFSET_ENTRY.size, len(self.times) * TIME_ENTRY.size)

    def add(self, last_offset: int, position: int) -> None:
        """Add the offset entry of a batch; offsets are relative to the segment."""
        self.offsets.add(last_offset, position)

    def add_time(self, timestamp: int, base_offset: int) -> None:
        """Add the time entry unless the timestamp has one."""
        if timestamp > self.last_time:
            self.times.add(timestamp, base_offset)
            self.last_time = timestamp

    def flush(self, files: Files, *, all_entries: bool = False) -> None:
        """Write the entries in memory to the files if they are many; never raises."""
        if all_entries or len(self.offsets.pending) >= _PENDING_BYTES:
            try:
                self.offsets.flush(files)
                self.times.flush(files)
            except OSError as e:
                _logger.warning("log_index_not_written", path=str(e.filename), reason=str(e))

    def entry_at_or_below(self, files: Files, offset: int) -> tuple[int, int] | None:
        """The entry with the greatest last offset not above `offset`."""
        read = self.offsets.reader(files)
        i = bisect_right(range(len(self.offsets)), offset, key=lambda i: read(i)[0])
        return read(i - 1) if i else None

    def entry_before(self, files: Files, position: int) -> tuple[int, int] | None:
        """The entry with the greatest position not above `position`."""
        read = self.offsets.reader(files)
        i = bisect_right(range(len(self.offsets)), position, key=lambda i: read(i)[1])
        return read(i - 1) if i else None

    def time_before(self, files: Files, timestamp: int) -> tuple[int, int] | None:
        """The last time entry strictly before `timestamp`: nothing older can be at or after it."""
        read = self.times.reader(files)
        i = bisect_left(range(len(self.times)), timestamp, key=lambda i: read(i)[0])
        return read(i - 1) if i else None

    def last_time_entry(self, files: Files) -> tuple[int, int] | None:
        """The last time entry."""
        return self.times.reader(files)(len(self.times) - 1) if len(self.times) else None
