"""Sessions of others, as the buckets read them that are taken over from them.

A session is read once, whatever the number of its buckets, and kept in memory for as long as
buckets ask for it: it has at most what its server was allowed to retain (`zufluss.wal.retained`)
and what it had not made durable yet. A copy that nobody asked for lately is dropped. Of the live
session of this server, whose buckets may fail again and again, it drops what was trimmed since. A
session that goes on at another server is read as far as it goes (`OPEN_END`), and read on when its
server has released the bucket.
"""

from __future__ import annotations

import asyncio
import time
from collections import defaultdict
from collections.abc import Callable
from contextlib import aclosing
from typing import Final, NamedTuple

from zufluss.cluster.wal import OPEN_END, WalSession, WalSource
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
    """What was read of a session so far, by bucket."""

    def __init__(self, floor: int) -> None:
        self._floor = floor
        self.next = floor
        """The number that is to be read next."""
        self.lock = asyncio.Lock()
        """Held by the bucket that reads on."""
        self.users = 0
        """Buckets that wait for it."""
        self.asked = 0.0
        """When a bucket asked last."""
        self._objects: dict[TableBucket, list[tuple[int, WalObject]]] = defaultdict(list)
        self._lost: list[tuple[int, LostObject]] = []

    def add(self, read: WalObject | LostObject) -> None:
        """Take the next number."""
        number, self.next = self.next, self.next + 1
        if isinstance(read, LostObject):
            self._lost.append((number, read))
            return
        for entry in read.entries:
            self._objects[entry.bucket].append((number, read.only(entry)))

    def drop_below(self, floor: int) -> None:
        """Drop what the session does not have any more."""
        if floor <= self._floor:
            return
        self._floor = floor
        self.next = max(self.next, floor)
        self._lost = [each for each in self._lost if each[0] >= floor]
        for bucket, objects in tuple(self._objects.items()):
            self._objects[bucket] = [each for each in objects if each[0] >= floor]
            if not self._objects[bucket]:
                del self._objects[bucket]

    def of(self, bucket: TableBucket, floor: int) -> list[WalObject | LostObject]:
        """The objects that have the bucket or may have had it, in order."""
        lost = [each for each in self._lost if each[0] >= floor]
        numbered = [*self._objects.get(bucket, ()), *lost]
        return [read for _, read in sorted(numbered, key=lambda pair: pair[0])]


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
        self._copies: dict[WalSession, _Copy] = {}

    async def tail(self, source: WalSource, bucket: TableBucket, start: int) -> Tail:
        """What a session has of a bucket from an offset on; LostOffsetsError if some is missing.

        The first bucket reads for all that wait. If it fails or is given up, the next one goes on.
        """
        copy = self._copies.get(source.session)
        if copy is None:
            copy = self._copies[source.session] = _Copy(source.floor)
        copy.users += 1
        try:
            async with copy.lock:
                await self._read_on(copy, source)
            return await asyncio.to_thread(_tail, copy.of(bucket, source.floor), bucket, start)
        finally:
            copy.users -= 1
            copy.asked = self._clock()

    def drop_unused(self) -> None:
        """Drop the sessions that nobody asked for lately."""
        latest = self._clock() - KEEP_SECONDS
        for session, copy in tuple(self._copies.items()):
            if not copy.users and copy.asked < latest:
                del self._copies[session]

    async def _read_on(self, copy: _Copy, source: WalSource) -> None:
        """Read what was not read yet; the session of this server grows between two calls."""
        copy.drop_below(source.floor)
        end = None if source.end == OPEN_END else source.end
        if end is not None and copy.next >= end:
            return
        session = Session(self._cluster_id, source.session.server_id, source.session.server_epoch)
        shared = self._shared_log(source.session.location_id)
        async with aclosing(shared.read(session, copy.next, end)) as objects:
            async for read in objects:
                copy.add(read)


def _tail(objects: list[WalObject | LostObject], bucket: TableBucket, start: int) -> Tail:
    """The batches of a bucket from an offset on; LostOffsetsError if some are missing."""
    tails = SessionTails({bucket: start})
    pieces = [piece.batches for read in objects for piece in tails.add(read)]
    if bucket in tails.lost:
        raise tails.lost[bucket]
    return Tail(pieces, tails.end_offsets[bucket])
