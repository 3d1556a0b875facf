"""Writer ids, handed out one by one from durable ranges.

An idempotent writer asks for an id before its first write (INIT_WRITER). Two writers with one id
would destroy each other's sequence numbers, so an id is never given twice, not even after a crash.
One range from the store serves `RANGE` writers; the rest of a range is lost when the process dies.
The caller says where ranges come from: from the catalog in a process with both roles, from
ALLOCATE_WRITER_IDS otherwise.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator
from typing import TYPE_CHECKING

from zufluss.wire import messages as m

if TYPE_CHECKING:
    from zufluss.net.services import RequestContext

RANGE = 1000
"""Ids taken from the store at once."""


class WriterIds:
    """Hands out writer ids; takes a new range when the last one is used up."""

    def __init__(self, allocate: Callable[[int], Awaitable[range]]) -> None:
        self._allocate = allocate
        self._ids: Iterator[int] = iter(())
        self._lock = asyncio.Lock()

    async def next(self) -> int:
        """An id that no writer has or had."""
        writer_id = next(self._ids, None)
        while writer_id is None:
            async with self._lock:
                writer_id = next(self._ids, None)
                if writer_id is None:
                    self._ids = iter(await self._allocate(RANGE))
                    writer_id = next(self._ids, None)
        return writer_id

    async def init_writer(
        self, request: m.InitWriterRequest, ctx: RequestContext
    ) -> m.InitWriterResponse:
        """INIT_WRITER (1026): the tables in the request only matter to access control."""
        return m.InitWriterResponse(writer_id=await self.next())
