"""Sessions that have ended, as the buckets read them that are taken over from them.

A session is read once, whatever the number of its buckets, and kept in memory for as long as
buckets ask for it: it has at most what its server was allowed to retain (`zufluss.wal.retained`)
and what it had not made durable yet. A copy that nobody asked for lately is dropped.
"""

from __future__ import annotations

import asyncio
import time
from collections import defaultdict
from collections.abc import Callable
from typing import Final, NamedTuple

from zufluss.cluster.wal import WalSource
from zufluss.log.shared.api import LostObject, Session
from zufluss.log.shared.objects import ObjectLog
from zufluss.log.shared.tails import SessionTails
from zufluss.model.table import TableBucket
from zufluss.remote.wal import WalObject

KEEP_SECONDS: Final = 30.0
"""How long a session is kept after the last bucket asked for it."""


class Tail(NamedTuple):
    """What a session has of a bucket from an offset on."""

    pieces: list[memoryview]
    """Stamped batches; the first of them may begin before the offset."""
    end_offset: int
    """The end of the bucket."""


class _Copy:
    """A session in memory, by bucket."""

    def __init__(self) -> None:
        self._objects: dict[TableBucket, list[tuple[int, WalObject]]] = defaultdict(list)
        self._lost: list[tuple[int, LostObject]] = []

    def add(self, number: int, read: WalObject | LostObject) -> None:
        if isinstance(read, LostObject):
            self._lost.append((number, read))
            return
        for entry in read.entries:
            self._objects[entry.bucket].append((number, read.only(entry)))

    def tail(self, bucket: TableBucket, start: int) -> Tail:
        """The batches of a bucket from an offset on; LostOffsetsError if some are missing."""
        tails = SessionTails({bucket: start})
        numbered = [*self._objects.get(bucket, ()), *self._lost]
        numbered.sort(key=lambda pair: pair[0])
        pieces = [piece.batches for _, read in numbered for piece in tails.add(read)]
        if bucket in tails.lost:
            raise tails.lost[bucket]
        return Tail(pieces, tails.end_offsets[bucket])


class Sources:
    """Reads sessions that have ended. Belongs to the event loop."""

    def __init__(
        self,
        cluster_id: str,
        shared_log: Callable[[int], ObjectLog],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`shared_log` returns the shared log of a location."""
        self._cluster_id = cluster_id
        self._shared_log = shared_log
        self._clock = clock
        self._copies: dict[WalSource, asyncio.Task[_Copy]] = {}
        self._asked: dict[WalSource, float] = {}

    async def tail(self, source: WalSource, bucket: TableBucket, start: int) -> Tail:
        """What a session has of a bucket from an offset on; LostOffsetsError if some is missing."""
        self._asked[source] = self._clock()
        copy = self._copies.get(source)
        if copy is None or (copy.done() and (copy.cancelled() or copy.exception() is not None)):
            copy = self._copies[source] = asyncio.create_task(self._read(source))
        return (await asyncio.shield(copy)).tail(bucket, start)

    def drop_unused(self) -> None:
        """Drop the sessions that nobody asked for lately."""
        latest = self._clock() - KEEP_SECONDS
        for source in [s for s, at in self._asked.items() if at < latest]:
            del self._asked[source]
            copy = self._copies.pop(source, None)
            if copy is not None:
                copy.cancel()

    async def stop(self) -> None:
        """Stop reading."""
        copies = list(self._copies.values())
        for copy in copies:
            copy.cancel()
        await asyncio.gather(*copies, return_exceptions=True)

    async def _read(self, source: WalSource) -> _Copy:
        session = Session(self._cluster_id, source.session.server_id, source.session.server_epoch)
        shared = self._shared_log(source.session.location_id)
        copy, number = _Copy(), source.floor
        async for read in shared.read(session, source.floor, source.end):
            copy.add(number, read)
            number += 1
        return copy
