"""Reads log segments in remote storage as whole batches, ahead of the decoder.

A fetch of an offset that only remote storage has is answered with the segments to read: consecutive
ones of one location. `RemoteReader.batches` reads them in ranges, several at a time and across the
ends of segments, and yields whole batches in order. A batch that spans two ranges is joined.

| subject | rule |
|---|---|
| memory | a range takes its bytes from the scan's budget before it is requested |
| copies | none, except for a batch that spans two ranges |
| first range of a run | small, and outside the budget: a dead location holds no memory, and is noticed soon |
| damage | the decoder verifies the checksum of each batch; here the file's checksum is verified |
| end | every segment must end with a whole batch, at the offset that the server named |
"""  # noqa: E501 - a table row does not wrap

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncGenerator, Iterator, Sequence
from contextlib import aclosing
from typing import Final, NamedTuple

from crc32c import crc32c

from zufluss.client.core.budget import MemoryBudget
from zufluss.client.core.remote_access import RemoteAccess
from zufluss.errors import CorruptRecordError
from zufluss.model.table import TablePath
from zufluss.record.header import LENGTH_OVERHEAD, MIN_BATCH_SIZE, BatchHeader, iter_headers
from zufluss.remote.errors import ObjectCorruptError
from zufluss.remote.layout import segment_file
from zufluss.remote.uri import LocationUri, parse_location
from zufluss.wire import messages as m

FIRST_BYTES: Final = 256 * 1024
"""Size of the first range of a run."""
FIRST_SECONDS: Final = 10.0
"""How long the first range may take, before the location counts as unavailable."""
RANGE_BYTES: Final = 4 * 1024 * 1024
"""Size of the other ranges; smaller if the budget is small."""
AHEAD: Final = 4
"""Ranges of one bucket that are read concurrently."""
PLANNED: Final = 2 * AHEAD
"""Ranges of one bucket that are read or wait for an earlier range."""


class SegmentRange(NamedTuple):
    """A log segment to read."""

    uri: LocationUri
    """The file's address."""
    start: int
    """The first byte to read."""
    size: int
    """Bytes of the whole file."""
    end_offset: int
    """The offset after the last record."""
    crc32c: int | None
    """Checksum of the whole file; None if unknown."""

    @property
    def is_checked(self) -> bool:
        """Whether the file's checksum can be verified: all bytes are read, and it is known."""
        return self.crc32c is not None and not self.start


class SegmentBatches(NamedTuple):
    """Whole batches of a segment."""

    source: str
    """The file of the batches."""
    records: memoryview
    """The bytes of the batches."""
    batches: Sequence[tuple[int, BatchHeader]]
    """Position and header of each batch."""
    size: int
    """Bytes taken from the budget; the consumer gives them back."""


class _Range(NamedTuple):
    segment: SegmentRange
    start: int
    end: int


class RemoteReader:
    """Reads log segments for the scans of one connection."""

    def __init__(self, files: RemoteAccess) -> None:
        self._files = files

    async def batches(
        self,
        table: TablePath,
        info: m.PbRemoteLogFetchInfo,
        stop: int | None,
        budget: MemoryBudget,
    ) -> AsyncGenerator[SegmentBatches, None]:
        """Yield the batches of all segments that begin before offset `stop`."""
        segments = segments_of(table, info, stop)
        cutter, crc = BatchCutter(""), 0
        async with aclosing(self._ranges(table, segments, budget)) as ranges:
            async for (segment, start, end), data in ranges:
                if start == segment.start:
                    cutter, crc = BatchCutter(segment.uri.text), 0
                if segment.is_checked:
                    crc = crc32c(data, crc)  # in a thread it would wait behind decoding
                    if end == segment.size:
                        _check_crc(segment, crc)
                parts = deque(cutter.cut(data))
                budget.give(len(data) - sum(part.size for part in parts))
                try:
                    while parts:
                        yield parts.popleft()
                finally:
                    budget.give(sum(part.size for part in parts))
                if end == segment.size:
                    cutter.check_end(segment.end_offset)

    async def _ranges(
        self, table: TablePath, segments: Sequence[SegmentRange], budget: MemoryBudget
    ) -> AsyncGenerator[tuple[_Range, memoryview], None]:
        """Yield the ranges of segments in order, reading ahead."""
        plan = _plan(segments, max(1, min(RANGE_BYTES, budget.limit // (2 * AHEAD))))
        first = next(plan, None)
        if first is None:
            return
        data = await self._files.read(
            table, first.segment.uri, first.start, first.end, seconds=FIRST_SECONDS
        )
        budget.give(-len(data))
        yield first, data
        slots = asyncio.Semaphore(AHEAD)
        ahead: deque[tuple[_Range, asyncio.Task[memoryview]]] = deque()
        try:
            while True:
                while len(ahead) < PLANNED and (next_range := next(plan, None)) is not None:
                    read = asyncio.ensure_future(self._read(table, next_range, budget, slots))
                    ahead.append((next_range, read))
                if not ahead:
                    return
                next_range, read = ahead[0]
                data = await read
                ahead.popleft()
                yield next_range, data
        finally:
            await _abandon([read for _, read in ahead], budget)

    async def _read(
        self, table: TablePath, range_: _Range, budget: MemoryBudget, slots: asyncio.Semaphore
    ) -> memoryview:
        size = range_.end - range_.start
        async with slots:
            await budget.take(size)
            try:
                return await self._files.read(table, range_.segment.uri, range_.start, range_.end)
            except BaseException:
                budget.give(size)
                raise


def segments_of(
    table: TablePath, info: m.PbRemoteLogFetchInfo, stop: int | None
) -> list[SegmentRange]:
    """The segments of an answer that begin before offset `stop`; None for all."""
    root = parse_location(info.remote_log_tablet_dir, f"the remote log of table {table}")
    return [
        SegmentRange(
            parse_location(
                segment_file(
                    root.text,
                    segment.remote_log_segment_id,
                    segment.remote_log_start_offset,
                    ".log",
                ),
                f"the remote log of table {table}",
            ),
            info.first_start_pos if index == 0 else 0,
            segment.segment_size_in_bytes,
            segment.remote_log_end_offset,
            segment.crc32c if segment.HasField("crc32c") else None,
        )
        for index, segment in enumerate(info.remote_log_segments)
        if stop is None or segment.remote_log_start_offset < stop
    ]


def _plan(segments: Sequence[SegmentRange], range_bytes: int) -> Iterator[_Range]:
    size = min(FIRST_BYTES, range_bytes)
    for segment in segments:
        start = segment.start
        while start < segment.size:
            end = min(start + size, segment.size)
            yield _Range(segment, start, end)
            start, size = end, range_bytes


async def _abandon(reads: Sequence[asyncio.Task[memoryview]], budget: MemoryBudget) -> None:
    """Cancel reads and give their bytes back to the budget."""
    for read in reads:
        read.cancel()
    for outcome in await asyncio.gather(*reads, return_exceptions=True):
        if isinstance(outcome, memoryview):
            budget.give(len(outcome))


def _check_crc(segment: SegmentRange, crc: int) -> None:
    if crc != segment.crc32c:
        raise ObjectCorruptError(
            segment.uri.text,
            "",
            f"its checksum is {crc:08x}, but {segment.crc32c:08x} was written; the store returned "
            "other bytes",
        )


class BatchCutter:
    """Cuts the ranges of one segment, in order, into whole batches."""

    def __init__(self, source: str) -> None:
        self._source = source
        self._rest = bytearray()
        self._next_offset = 0

    def cut(self, data: memoryview) -> Iterator[SegmentBatches]:
        """Yield the batches that end in the next range; first the one that began before it."""
        position = 0
        if self._rest:
            position = self._complete(data)
            if self._rest_size() == len(self._rest):
                whole, self._rest = self._rest, bytearray()
                yield self._batches(memoryview(whole), 0)
        part = self._batches(data, position)
        if part.batches:
            last, header = part.batches[-1]
            position = last + header.size
            yield part
        if position < len(data):
            self._rest += data[position:]

    def _complete(self, data: memoryview) -> int:
        """Complete the cut batch as far as `data` reaches; returns the bytes used."""
        position = 0
        if len(self._rest) < LENGTH_OVERHEAD:
            position = LENGTH_OVERHEAD - len(self._rest)
            self._rest += data[:position]
        if (size := self._rest_size()) is not None:
            end = position + size - len(self._rest)
            self._rest += data[position:end]
            position = end
        return min(position, len(data))

    def _rest_size(self) -> int | None:
        """The size of the cut batch; None if even its length field is cut."""
        if len(self._rest) < LENGTH_OVERHEAD:
            return None
        size = int.from_bytes(self._rest[8:LENGTH_OVERHEAD], "little", signed=True)
        if size + LENGTH_OVERHEAD < MIN_BATCH_SIZE:
            raise CorruptRecordError(f"{self._source}: a batch has the impossible length {size}")
        return size + LENGTH_OVERHEAD

    def _batches(self, records: memoryview, position: int) -> SegmentBatches:
        try:
            batches = list(iter_headers(records, position))
        except CorruptRecordError as e:
            raise CorruptRecordError(f"{self._source}: {e.message}") from None
        if batches:
            self._next_offset = batches[-1][1].next_offset
        return SegmentBatches(self._source, records, batches, sum(h.size for _, h in batches))

    def check_end(self, end_offset: int) -> None:
        """Raise `CorruptRecordError` unless the segment ended with its last batch."""
        if self._rest or self._next_offset < end_offset:
            raise CorruptRecordError(
                f"{self._source}: it ends before offset {self._next_offset} with {len(self._rest)} "
                f"bytes of another batch; it should have everything before offset {end_offset}"
            )
