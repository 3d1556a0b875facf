"""Reading a log: what is visible, where a batch is, when it was committed.

The half of `Log` that changes nothing on disk. Readers see what lies below `high_watermark`, which
always stands at the end of an appended entry: a log remembers those ends until the high watermark
has passed them. It also remembers where recent readers left off, so a reader that follows the log
never searches. Finding the bytes (`locate`) is apart from reading them, because a caller may want
only some of them, or read them in a thread.
"""

from __future__ import annotations

import struct
from bisect import bisect_left, bisect_right
from collections import deque
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from zufluss.errors import CorruptRecordError, OffsetOutOfRangeError
from zufluss.log.files import Files, OpenFile
from zufluss.log.segment import (
    PagesNotCachedError,
    Segment,
    Slice,
    read_exactly,
    read_into,
    read_slice,
)
from zufluss.model.table import TableBucket
from zufluss.record.header import BatchHeader, iter_headers, read_header, verify_crc

CURSORS_MAX = 32
"""Positions of readers that a log remembers."""


LARGE_BYTES = 64 * 1024
"""Batches from this size on can be read in parts."""

HEAD_BYTES = 4096
"""Read of a batch to find its metadata, which is rarely longer."""

_METADATA_SIZE = struct.Struct("<i")


class LargeBatch(NamedTuple):
    """A batch of which parts can be read."""

    file: OpenFile
    """Its segment."""
    position: int
    """Where it begins."""
    header: BatchHeader
    """Its header."""
    head: memoryview
    """Its bytes up to the end of the Arrow metadata, or more."""


class LogRead(NamedTuple):
    """Whole batches read from a log."""

    records: memoryview
    """The batches; the first one contains the offset asked for."""
    end_offset: int
    """Offset after the last of them, where the next read starts."""


class LogTail(NamedTuple):
    """The last batches of a log."""

    log: str
    """The name of the log."""
    parts: list[tuple[OpenFile, int, int]]
    """Files, each with the position of the first byte and the one behind the last."""
    end_offset: int
    """The offset after the last batch."""

    @property
    def length(self) -> int:
        """Bytes of the batches."""
        return sum(end - begin for _, begin, end in self.parts)

    def read(self) -> bytearray:
        """Read the batches from the disk, in any thread; `CorruptRecordError` if one is damaged."""
        batches = bytearray(self.length)
        view, at = memoryview(batches), 0
        for file, begin, end in self.parts:
            part = view[at : at + end - begin]
            if read_into(file.fd, part, begin, nowait=False) < len(part):
                raise CorruptRecordError(f"{self.log} ends before byte {end} of a segment")
            at += len(part)
        for position, header in iter_headers(batches):
            if not verify_crc(batches, position, header):
                raise CorruptRecordError(f"{self.log}: batch {header.base_offset} is damaged")
        return batches


class LogReader:
    """The readable side of a log."""

    __slots__ = (
        "_active", "_bases", "_boundaries", "_cursors", "_hw_position", "_hw_segment", "_segments",
        "bucket", "directory", "files", "high_watermark", "last_timestamp", "log_end_offset",
    )  # fmt: skip

    directory: Path
    bucket: TableBucket | None
    files: Files
    log_end_offset: int
    high_watermark: int
    last_timestamp: int

    def _show(self, segments: list[Segment], end_offset: int) -> None:
        """Set the segments of the log; all of their batches become visible."""
        self._segments = segments
        self._bases = [segment.base_offset for segment in segments]
        self._active = segments[-1]
        self.log_end_offset = end_offset
        self.high_watermark = end_offset
        self._hw_segment, self._hw_position = self._active, self._active.size
        self._boundaries: deque[tuple[int, Segment, int]] = deque()
        self._cursors: dict[int, tuple[Segment, int]] = {}

    @property
    def log_start_offset(self) -> int:
        """First offset that can be read."""
        return self._bases[0]

    @property
    def size(self) -> int:
        """Bytes of all batches."""
        return sum(segment.size for segment in self._segments)

    @property
    def segments(self) -> Sequence[Segment]:
        """The segments, oldest first."""
        return self._segments

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
                f"The fetching offset {offset} is out of range: {self} has {self._bases[0]} to "
                f"{end}"
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
        segment = self._segment_of(offset)
        if offset == segment.base_offset:
            return segment, 0
        return segment, segment.position_of(self.files, offset, nowait=nowait)

    def _segment_of(self, offset: int) -> Segment:
        return self._segments[bisect_right(self._bases, offset) - 1]

    def _offset_at(self, segment: Segment, position: int, end: int, nowait: bool) -> int:
        """Offset of the batch at `position`, or `end` if the readable part ends there."""
        limit = self._hw_position if segment is self._hw_segment else segment.size
        if position >= limit:
            return end
        return segment.boundary(self.files, position, position, nowait=nowait)[1]

    def _remember(self, offset: int, segment: Segment, position: int) -> None:
        """Remember where a read ended, so that the reader's next read needs no search."""
        cursors = self._cursors
        if len(cursors) >= CURSORS_MAX and offset not in cursors:
            del cursors[next(iter(cursors))]
        cursors[offset] = (segment, position)

    def read(
        self, offset: int, max_bytes: int, at_least_one: bool = False, nowait: bool = True
    ) -> LogRead:
        """Read what `locate` finds.

        With `nowait` the disk is never waited for: `PagesNotCachedError` (a `BlockingIOError`)
        says that the bytes are not in memory; call its `load` in a thread and read again. Batches
        that come from the disk are verified before they are served: `CorruptRecordError`.
        """
        try:
            part = self.locate(offset, max_bytes, at_least_one=at_least_one, nowait=nowait)
            records = read_slice(part, nowait=nowait)
        except PagesNotCachedError:
            self._segment_of(offset).distrust()
            raise
        if len(records):
            segment = self._segment_of(offset)
            if not nowait:
                segment.distrust()
            segment.prove(records, part.position, offset, part.end_offset)
        return LogRead(records, part.end_offset)

    def tail(self, offset: int) -> LogTail:
        """All batches from the one with `offset` on as they are now, readable or not."""
        parts: list[tuple[OpenFile, int, int]] = []
        if offset < self.log_end_offset:
            first, position = self._start_of(offset, nowait=False)
            for each in self._segments[self._segments.index(first) :]:
                parts.append((each.reader(self.files), position, each.size))
                position = 0
        return LogTail(str(self), parts, self.log_end_offset)

    def large_batch(self, offset: int) -> LargeBatch | None:
        """The Arrow batch that contains a readable `offset`, if it may be read in parts.

        That is: if it is large, and nothing about it is in doubt, since only whole batches can be
        verified. `PagesNotCachedError` when its head has to be read from the disk.
        """
        if not self._bases[0] <= offset < self.high_watermark:
            return None
        try:
            segment, position = self._start_of(offset, nowait=True)
            if segment.doubts(position):
                return None
            file = segment.reader(self.files)
            if segment.size - position < LARGE_BYTES:
                return None
            head = read_exactly(file, HEAD_BYTES, position)
            header = read_header(head)
            body = header.body_offset
            if not LARGE_BYTES <= header.size <= segment.size - position:
                return None
            if header.record_count <= 0 or not 0 <= body <= header.size - 8:
                return None
            if body + 8 > len(head):
                head = read_exactly(file, body + 8, position)
            (size,) = _METADATA_SIZE.unpack_from(head, body + 4)
            if len(head) - body - 8 < size <= header.size - body - 8:
                head = read_exactly(file, body + 8 + size, position)
        except PagesNotCachedError:
            self._segment_of(offset).distrust()
            raise
        self._remember(header.next_offset, segment, position + header.size)
        return LargeBatch(file, position, header, head)

    def read_range(self, batch: LargeBatch, begin: int, buffer: memoryview) -> None:
        """Fill `buffer` with the bytes from byte `begin` of a batch on; errors as of `read`."""
        position = batch.position + begin
        try:
            count = read_into(batch.file.fd, buffer, position, nowait=True)
        except BlockingIOError:
            count = 0
        if count < len(buffer):
            self._segment_of(batch.header.base_offset).distrust()
            raise PagesNotCachedError(batch.file, batch.position, batch.header.size)

    def offset_for_timestamp(self, timestamp: int, *, nowait: bool = False) -> int:
        """Base offset of the first batch committed at or after `timestamp`.

        The high watermark if there is none that readers may see. `PagesNotCachedError` with
        `nowait` when batches have to be read from the disk.
        """
        if timestamp > self.last_timestamp:
            return self.high_watermark
        filled = self._segments if self._active.size else self._segments[:-1]
        files = self.files
        i = bisect_left(filled, timestamp, key=lambda s: s.newest_timestamp(files, nowait=nowait))
        if i == len(filled):
            return self.high_watermark
        offset = filled[i].first_at_or_after(files, timestamp, nowait=nowait)
        return self.high_watermark if offset is None else min(offset, self.high_watermark)

    def __str__(self) -> str:
        return f"log of {self.bucket}" if self.bucket is not None else f"log {self.directory}"

    def __repr__(self) -> str:
        return (
            f"{type(self).__name__}({self.directory}, "
            f"offsets {self.log_start_offset}..{self.log_end_offset}, high watermark "
            f"{self.high_watermark}, {len(self._segments)} segments)"
        )
