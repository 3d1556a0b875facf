"""Log segments in remote storage as whole batches, read ahead of who decodes them.

A fetch of an offset that only remote storage has is answered with the segments to read, consecutive
ones of one location. `RemoteReader.batches` reads these in ranges, several at a time and across the
ends of segments, and hands out whole batches in order; one that lies across two ranges is put
together.

| what | how |
|---|---|
| memory | a range takes its bytes from the budget of the scan before it is asked for |
| copies | none, but for a batch that lies across two ranges |
| the first range of a run | is small and takes none: a dead location holds no memory |
| damage | every batch has a checksum, which the decoder compares; the file has one, too |
| the end | every segment must end with a whole batch, at the offset that was said |
"""

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
"""The first range of a run."""
RANGE_BYTES: Final = 4 * 1024 * 1024
"""The others, unless the budget is too small for some of them."""
AHEAD: Final = 4
"""Ranges of one bucket that are on their way at a time."""
PLANNED: Final = 2 * AHEAD
"""With those that have arrived but wait for an earlier one, which else would hold up the next."""


class RemoteSegment(NamedTuple):
    """A log segment to read."""

    uri: LocationUri
    """The file."""
    start: int
    """The byte to begin at."""
    size: int
    """Of the whole file."""
    end_offset: int
    """The offset after its last record."""
    crc32c: int | None
    """Of the whole file, if it is known."""

    @property
    def is_checked(self) -> bool:
        """All of its bytes are read, and their checksum is known."""
        return self.crc32c is not None and not self.start


class SegmentBatches(NamedTuple):
    """Whole batches of a segment."""

    source: str
    """The file they come from."""
    records: memoryview
    """The bytes they lie in."""
    batches: Sequence[tuple[int, BatchHeader]]
    """Position and header of each."""
    size: int
    """Bytes taken from the budget; whoever is done with them gives them back."""


class _Range(NamedTuple):
    segment: RemoteSegment
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
        """The batches of the segments of an answer that begin before offset `stop`."""
        segments = segments_of(table, info, stop)
        cutter, crc = BatchCutter(""), 0
        async with aclosing(self._ranges(table, segments, budget)) as ranges:
            async for (segment, start, end), data in ranges:
                if start == segment.start:
                    cutter, crc = BatchCutter(segment.uri.text), 0
                if segment.is_checked:
                    crc = crc32c(data, crc)  # a thread would have it wait behind decoding
                    if end == segment.size:
                        _check_crc(segment, crc)
                found = deque(cutter.cut(data))
                budget.give(len(data) - sum(part.size for part in found))
                try:
                    while found:
                        yield found.popleft()
                finally:
                    budget.give(sum(part.size for part in found))
                if end == segment.size:
                    cutter.check_end(segment.end_offset)

    async def _ranges(
        self, table: TablePath, segments: Sequence[RemoteSegment], budget: MemoryBudget
    ) -> AsyncGenerator[tuple[_Range, memoryview], None]:
        """The ranges of segments in order, some of them under way already."""
        plan = _plan(segments, max(1, min(RANGE_BYTES, budget.limit // (2 * AHEAD))))
        first = next(plan, None)
        if first is None:
            return
        data = await self._files.read(table, first.segment.uri, first.start, first.end)
        budget.give(-len(data))
        yield first, data
        slots = asyncio.Semaphore(AHEAD)
        ahead: deque[tuple[_Range, asyncio.Task[memoryview]]] = deque()
        try:
            while True:
                while len(ahead) < PLANNED and (wanted := next(plan, None)) is not None:
                    read = asyncio.ensure_future(self._read(table, wanted, budget, slots))
                    ahead.append((wanted, read))
                if not ahead:
                    return
                wanted, read = ahead[0]
                data = await read
                ahead.popleft()
                yield wanted, data
        finally:
            await _abandon([read for _, read in ahead], budget)

    async def _read(
        self, table: TablePath, wanted: _Range, budget: MemoryBudget, slots: asyncio.Semaphore
    ) -> memoryview:
        size = wanted.end - wanted.start
        async with slots:
            await budget.take(size)
            try:
                return await self._files.read(table, wanted.segment.uri, wanted.start, wanted.end)
            except BaseException:
                budget.give(size)
                raise


def segments_of(
    table: TablePath, info: m.PbRemoteLogFetchInfo, stop: int | None
) -> list[RemoteSegment]:
    """The segments of an answer that begin before offset `stop`."""
    root = parse_location(info.remote_log_tablet_dir, f"the remote log of table {table}")
    return [
        RemoteSegment(
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


def _plan(segments: Sequence[RemoteSegment], range_bytes: int) -> Iterator[_Range]:
    size = min(FIRST_BYTES, range_bytes)
    for segment in segments:
        start = segment.start
        while start < segment.size:
            end = min(start + size, segment.size)
            yield _Range(segment, start, end)
            start, size = end, range_bytes


async def _abandon(reads: Sequence[asyncio.Task[memoryview]], budget: MemoryBudget) -> None:
    """End reads that nobody waits for, and give back what they had taken."""
    for read in reads:
        read.cancel()
    for outcome in await asyncio.gather(*reads, return_exceptions=True):
        if isinstance(outcome, memoryview):
            budget.give(len(outcome))


def _check_crc(segment: RemoteSegment, crc: int) -> None:
    if crc != segment.crc32c:
        raise ObjectCorruptError(
            segment.uri.text,
            "",
            f"its bytes have the checksum {crc:08x}, {segment.crc32c:08x} was written; the store "
            "handed back other bytes",
        )


class BatchCutter:
    """Ranges of a segment, in order, into whole batches."""

    def __init__(self, source: str) -> None:
        self._source = source
        self._rest = bytearray()
        self._next_offset = 0

    def cut(self, data: memoryview) -> Iterator[SegmentBatches]:
        """The batches that end in the next range; the one across its start on its own."""
        position = 0
        if self._rest:
            position = self._complete(data)
            if self._rest_size() == len(self._rest):
                whole, self._rest = self._rest, bytearray()
                yield self._found(memoryview(whole), 0)
        found = self._found(data, position)
        if found.batches:
            last, header = found.batches[-1]
            position = last + header.size
            yield found
        if position < len(data):
            self._rest += data[position:]

    def _complete(self, data: memoryview) -> int:
        """Add to the batch that was cut what it lacks; how many bytes that were."""
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
        """How long the batch that was cut is, None when even its length was cut."""
        if len(self._rest) < LENGTH_OVERHEAD:
            return None
        size = int.from_bytes(self._rest[8:LENGTH_OVERHEAD], "little", signed=True)
        if size + LENGTH_OVERHEAD < MIN_BATCH_SIZE:
            raise CorruptRecordError(f"{self._source}: a batch has the impossible length {size}")
        return size + LENGTH_OVERHEAD

    def _found(self, records: memoryview, position: int) -> SegmentBatches:
        try:
            batches = list(iter_headers(records, position))
        except CorruptRecordError as e:
            raise CorruptRecordError(f"{self._source}: {e.message}") from None
        if batches:
            self._next_offset = batches[-1][1].next_offset
        return SegmentBatches(self._source, records, batches, sum(h.size for _, h in batches))

    def check_end(self, end_offset: int) -> None:
        """The segment is over: nothing may be left, nothing may lack."""
        if self._rest or self._next_offset < end_offset:
            raise CorruptRecordError(
                f"{self._source}: it ends before offset {self._next_offset} with {len(self._rest)} "
                f"bytes of another batch; it should have everything before offset {end_offset}"
            )
