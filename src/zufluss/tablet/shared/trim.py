"""Which objects of the session are not needed any more.

Whoever takes a bucket over reads its segments in remote storage, and behind them the session from
its floor on. So the floor may rise above an object when everything in it is in a segment, or was
written again behind the floor. Each round does this for all objects that are there:

1. A bucket with a long tail closes its segment, which is uploaded as any other.
2. What then is in no segment is *carried*: written again into the session, in one object. So a slow
   bucket costs a few kilobytes now and then, and not four small files.
3. When this is durable, the coordinator records the new floor; only then are objects deleted.

A round is begun every minute, and given up if it would write more than half of what it frees. It is
begun at once, and not given up, when more than `zufluss.wal.retained` bytes or many objects are
there. A bucket that cannot be carried at present, because it is being recovered or remote storage
does not take its segment, holds the floor until it can.

Belongs to the event loop.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Final

import structlog

from zufluss.errors import LogStorageError, ZuflussError
from zufluss.log.manager import LogManager
from zufluss.log.reader import LogTail
from zufluss.model.table import TableBucket
from zufluss.pacing import paced
from zufluss.replica.replica import Replica
from zufluss.tablet.buckets import Buckets
from zufluss.tablet.remote.logs import RemoteLogRunner
from zufluss.tablet.shared.host import SharedHost
from zufluss.tablet.shared.session import BASE_OFFSET, ServerSession, TailPart

log = structlog.get_logger(__name__)

TRIM_SECONDS: Final = 60.0
"""Time between two rounds, unless there is much to trim."""
OBJECTS_MAX: Final = 256
"""Objects from which on a round is begun at once: whoever takes over fetches each of them."""
CARRIED_BYTES_MAX: Final = 4 << 20
"""Longest tail that is written again; longer ones are uploaded as a segment."""
CARRIED_BYTES_MIN: Final = 64 << 10
"""No segment is closed for less."""
CARRIED_SHARE: Final = 4
"""The tails of all buckets together take at most one in so many of the retained bytes."""


class Trimmer:
    """Trims the session of this server."""

    def __init__(
        self,
        host: SharedHost,
        buckets: Buckets,
        logs: LogManager,
        remote_logs: RemoteLogRunner,
        retained: int,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`retained` are the bytes from which on a round is begun at once."""
        self._host = host
        self._buckets = buckets
        self._logs = logs
        self._remote_logs = remote_logs
        self._retained = retained
        self._clock = clock
        self._next = clock() + TRIM_SECONDS
        self._not_before = self._next - TRIM_SECONDS
        """When a round that is pressing may begin; after one that failed, not at once: it may have
        written tails again, and would do so each second while the coordinator is away."""

    async def look_after(self) -> None:
        """Begin a round if one is due; called every second."""
        self._host.drop_unused()
        session = self._host.live
        if session is None or not session.writer.written:
            return
        now = self._clock()
        if now >= self._next or (now >= self._not_before and self._is_pressing(session)):
            self._next = self._not_before = now + TRIM_SECONDS
            await self.trim(session)
            self._not_before = now

    def _is_pressing(self, session: ServerSession) -> bool:
        written = session.writer.written
        return len(written) > OBJECTS_MAX or sum(o.length for o in written) > self._retained

    async def trim(self, session: ServerSession) -> int:
        """Trim what the session has; returns how many objects were deleted."""
        written = list(session.writer.written)
        first: dict[TableBucket, int] = {}
        ends: dict[TableBucket, int] = {}
        async for each in paced(written):
            for bucket, end in each.ends:
                first.setdefault(bucket, each.first_number)
                ends[bucket] = end
        floor = written[-1].number + 1
        served: dict[TableBucket, Replica] = {}
        for bucket, end in ends.items():
            if self._buckets.image.leader(bucket) is None:
                continue  # it was dropped
            replica = self._buckets.find(*bucket)
            if replica is None or _remote_end(replica) is None:
                floor = min(floor, first[bucket])
            elif end > (_remote_end(replica) or 0):
                served[bucket] = replica
        tails = await self._tails(session, served)
        floor = min([floor, *(first[bucket] for bucket in served if bucket not in tails)])
        freed = sum(each.length for each in written if each.number < floor)
        carried = sum(tail.length for tail in tails.values())
        pressing = self._is_pressing(session)
        if floor <= session.floor or (2 * carried > freed and not pressing):
            return 0
        self._host.reach("wal-trim")
        for bucket, tail in tails.items():
            if first[bucket] < floor:
                await self._carry(session, served[bucket], tail)
        await session.writer.drained()
        self._host.reach("wal-trim-carried")
        await session.raise_floor(floor)
        self._host.reach("wal-trim-noted")
        deleted = await session.delete_below_floor()
        self._host.reach("wal-trimmed")
        log.debug("wal_trimmed", floor=floor, freed=freed, carried=carried, deleted=deleted)
        return deleted

    async def _tails(
        self, session: ServerSession, served: dict[TableBucket, Replica]
    ) -> dict[TableBucket, LogTail]:
        """What is in no segment of each bucket, short enough to be carried.

        Buckets whose tail stays long are left out.
        """
        share = self._retained // (CARRIED_SHARE * max(1, len(served)))
        limit = max(CARRIED_BYTES_MIN, min(CARRIED_BYTES_MAX, share))
        tails = {bucket: _tail(replica) for bucket, replica in served.items()}
        long = [bucket for bucket, tail in tails.items() if tail.length > limit]
        await asyncio.gather(*(self._upload(session, served[bucket]) for bucket in long))
        for bucket in long:
            tails[bucket] = _tail(served[bucket])
            if tails[bucket].length > max(limit, CARRIED_BYTES_MAX):
                log.warning("wal_not_trimmed", bucket=str(bucket), bytes=tails[bucket].length)
                del tails[bucket]
        return tails

    async def _upload(self, session: ServerSession, replica: Replica) -> None:
        """Close the segment of a bucket and have it uploaded; a failure leaves a long tail."""
        try:
            replica.log.roll()
        except LogStorageError as e:
            log.warning("wal_segment_not_closed", bucket=str(replica.bucket), reason=e.message)
            return
        await session.writer.drained()
        await self._logs.flushed(replica.log)
        await self._remote_logs.copy(replica)

    async def _carry(self, session: ServerSession, replica: Replica, tail: LogTail) -> None:
        """Write the tail of a bucket again, with what was appended while it was read."""
        batches = await asyncio.to_thread(tail.read)
        if self._host.live is not session or not self._buckets.serves(replica):
            raise NotTrimmedError(f"{replica.bucket} was closed while the session was trimmed")
        later = replica.log.tail(tail.end_offset)
        batches += later.read()
        if batches:
            (first,) = BASE_OFFSET.unpack_from(batches)
            part = TailPart(first, later.end_offset, memoryview(batches))
            session.carry(replica.bucket, replica.leader_epoch, [part])


class NotTrimmedError(ZuflussError):
    """A round of trimming was given up; the next one begins anew."""


def _tail(replica: Replica) -> LogTail:
    return replica.log.tail(_remote_end(replica) or 0)


def _remote_end(replica: Replica) -> int | None:
    """The end of the segments in remote storage; None if it is not known."""
    remote = replica.remote
    return None if remote is None or remote.range is None else remote.range[1]
