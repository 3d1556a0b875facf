"""Lookups in remote segments: by offset, by time, and of their bytes.

Clients read remote segments themselves. The server tells them at which byte of a segment to start
and at which offset a time begins. Both answers are in the indexes beside the segment, in the layout
of `log/index.py`. Indexes are fetched once and cached, the least recently used are dropped. After a
failure every lookup fails until a later attempt succeeds; there is one attempt every few seconds,
not one for every fetch that waits for a dead location.
"""

from __future__ import annotations

import asyncio
import time
from bisect import bisect_right
from collections import OrderedDict
from collections.abc import AsyncIterator
from functools import partial
from typing import Final

from zufluss.clock import Clock
from zufluss.errors import ZuflussError
from zufluss.log.index import OFFSET_ENTRY, TIME_ENTRY
from zufluss.log.segment import verify_batches
from zufluss.record.header import HEADER_SIZES, BatchHeader, read_header
from zufluss.remote.files import RemoteFile
from zufluss.remote.manifest import RemoteSegment
from zufluss.remote.storage import RemoteStorage

CACHED_BYTES_MAX: Final = 64 << 20
"""Bytes of indexes that are kept."""
INDEX_BYTES_MAX: Final = 1 << 30
"""Largest index that is read."""
FAILURE_SECONDS: Final = 2.0
"""How long after a failure a location is not asked again."""
WINDOW_BYTES: Final = 64 << 10
"""Read at a time when batches are looked for."""


def position_in(index: bytes, relative_offset: int) -> int:
    """The position of a batch at or before the one with an offset."""
    i = bisect_right(
        range(len(index) // OFFSET_ENTRY.size),
        relative_offset,
        key=lambda i: OFFSET_ENTRY.unpack_from(index, i * OFFSET_ENTRY.size)[0],
    )
    return OFFSET_ENTRY.unpack_from(index, (i - 1) * OFFSET_ENTRY.size)[1] if i else 0


def offset_before(timeindex: bytes, timestamp: int) -> int:
    """A relative offset before which nothing is as new as `timestamp`."""
    count = len(timeindex) // TIME_ENTRY.size
    i = bisect_right(
        range(count),
        timestamp - 1,
        key=lambda i: TIME_ENTRY.unpack_from(timeindex, i * TIME_ENTRY.size)[0],
    )
    return TIME_ENTRY.unpack_from(timeindex, (i - 1) * TIME_ENTRY.size)[1] if i else 0


class RemoteIndexes:
    """Indexes of remote segments, as far as they are in memory. Belongs to the event loop."""

    def __init__(self, storage: RemoteStorage, clock: Clock = time.monotonic) -> None:
        self._clock = clock
        self.storage = storage
        self._kept: OrderedDict[RemoteFile, bytes] = OrderedDict()
        self._kept_bytes = 0
        self._failed: dict[RemoteFile, tuple[float, ZuflussError]] = {}
        self._loading: dict[RemoteFile, asyncio.Task[bytes]] = {}

    def get(self, file: RemoteFile) -> bytes | None:
        """An index in memory, None if it was not fetched; raises the last failure to fetch it."""
        if not file.size:
            return b""
        index = self._kept.get(file)
        if index is not None:
            self._kept.move_to_end(file)
            return index
        failed = self._failed.get(file)
        if failed is not None:
            if self._clock() - failed[0] >= FAILURE_SECONDS:
                self._begin(file)
            raise failed[1]
        return None

    async def fetch(self, file: RemoteFile) -> bytes:
        """An index, fetched if needed; concurrent callers share one fetch."""
        index = self.get(file)
        if index is not None:
            return index
        return await asyncio.shield(self._begin(file))

    def _begin(self, file: RemoteFile) -> asyncio.Task[bytes]:
        loading = self._loading.get(file)
        if loading is None:
            loading = asyncio.get_running_loop().create_task(self._load(file))
            self._loading[file] = loading
            loading.add_done_callback(partial(self._ended, file))
        return loading

    def _ended(self, file: RemoteFile, task: asyncio.Task[bytes]) -> None:
        del self._loading[file]
        if not task.cancelled():
            task.exception()  # waiting callers and `get` have it

    async def _load(self, file: RemoteFile) -> bytes:
        try:
            data = await self.storage.read(file, limit=INDEX_BYTES_MAX)
        except ZuflussError as e:
            if len(self._failed) >= 1000:
                self._failed.clear()
            self._failed[file] = (self._clock(), e)
            raise
        self._failed.pop(file, None)
        self._kept[file] = data
        self._kept_bytes += len(data)
        while self._kept_bytes > CACHED_BYTES_MAX and len(self._kept) > 1:
            _, dropped = self._kept.popitem(last=False)
            self._kept_bytes -= len(dropped)
        return data

    async def first_at_or_after(self, segment: RemoteSegment, timestamp: int) -> int | None:
        """Base offset of the segment's first batch committed at or after `timestamp`."""
        relative = offset_before(await self.fetch(segment.timeindex), timestamp)
        position = position_in(await self.fetch(segment.index), relative)
        async for header in self._headers(segment, position):
            if header.timestamp >= timestamp:
                return header.base_offset
        return None

    async def _headers(self, segment: RemoteSegment, position: int) -> AsyncIterator[BatchHeader]:
        objects = self.storage.objects(segment.location_id)
        size = segment.log.size
        while position < size:
            end = min(position + WINDOW_BYTES, size)
            window = await objects.get_range(segment.log.path, position, end)
            at, usable = 0, len(window) if end == size else len(window) - HEADER_SIZES[-1] + 1
            while at < usable:
                header = read_header(window, at)
                yield header
                at += header.size
            position += at

    async def batches(self, segment: RemoteSegment, offset: int, bytes_max: int) -> bytes | None:
        """The batches from the one that has `offset` to the end, whole and verified.

        None if they are more than `bytes_max`.
        """
        relative = max(offset - segment.start_offset, 0)
        position = position_in(await self.fetch(segment.index), relative) if relative else 0
        size = segment.log.size
        if size - position > bytes_max:
            return None
        objects = self.storage.objects(segment.location_id)
        data = await objects.get_range(segment.log.path, position, size)
        await asyncio.to_thread(verify_batches, data, position)
        return bytes(data)
