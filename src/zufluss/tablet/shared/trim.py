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
there; after a round that did not help the next one waits ever longer, up to a minute. A bucket that
cannot be carried at present, because it is being recovered or remote storage does not take its
segment, holds the floor until it can (`held`); the others are trimmed up to its first object.

Belongs to the event loop.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from math import inf
from typing import Final

import structlog

from zufluss.errors import CorruptRecordError, LogStorageError, ZuflussError, reason_of
from zufluss.log.manager import LogManager
from zufluss.log.reader import LogTail
from zufluss.log.shared.api import SessionFencedError, WrittenObject
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

READS_MAX: Final = 8
"""How often the tail of a bucket is read on while it grows."""
UNREAD_BYTES_MAX: Final = 256 << 10
"""So much is read at once on the event loop, when the rest was read in a thread."""


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
        self._host = host
        self._buckets = buckets
        self._logs = logs
        self._remote_logs = remote_logs
        self.retained = retained
        """Bytes from which on a round is begun at once."""
        self.held: tuple[TableBucket, str] | None = None
        """The bucket that held the floor in the last round, and why; None if none did."""
        self.problem = ""
        """Why the last round failed; empty if it did not."""
        self._clock = clock
        self._next = clock() + TRIM_SECONDS
        self._not_before = -inf
        """When a round that is pressing may begin."""
        self._pause = 0.0
        """How long it waits after one that did not help."""
        self._owed: tuple[ServerSession, int] | None = None
        """A floor to which everything is carried, and which was not recorded yet."""

    async def look_after(self) -> None:
        """Begin a round if one is due; called every second.

        While much is there and a round does not help, the next one waits ever longer.
        """
        self._host.drop_unused()
        session = self._host.live
        if session is None or not session.writer.written:
            return
        now, pressing = self._clock(), self._is_pressing(session)
        if now < self._next and not (pressing and now >= self._not_before):
            return
        floor = session.floor
        self._next = now + TRIM_SECONDS
        self._pause = min(max(1.0, 2 * self._pause), TRIM_SECONDS)
        self._not_before = now + self._pause
        self.problem = ""
        try:
            await self.trim(session)
        except Exception as e:
            self.problem = reason_of(e)
            raise
        if session.floor > floor or not pressing:
            self._pause, self._not_before = 0.0, now

    def _is_pressing(self, session: ServerSession) -> bool:
        written = session.writer.written
        return len(written) > OBJECTS_MAX or retained_bytes(session) > self.retained

    async def trim(self, session: ServerSession) -> int:
        """Trim what the session has; returns how many objects were deleted."""
        if self._owed is not None and self._owed[0] is session:
            return await self._record(*self._owed)
        written = list(session.writer.written)
        plan = await self._plan(session, written)
        try:
            return await self._carry_out(session, plan, written)
        finally:
            self.held = plan.held

    async def _plan(self, session: ServerSession, written: Sequence[WrittenObject]) -> _Plan:
        """Which buckets hold the floor, and which have to be carried."""
        plan, ends = _Plan(written[-1].number + 1), dict[TableBucket, int]()
        async for each in paced(written):
            for bucket, end in each.ends:
                plan.first.setdefault(bucket, each.first_number)
                ends[bucket] = end
        for bucket, end in ends.items():
            if bucket in session.released:
                plan.hold(bucket, "it was released, and nobody has continued it yet")
                continue
            if self._buckets.image.leader(bucket) is None or self._buckets.is_elsewhere(bucket):
                continue  # it was dropped, or given to another server before it continued here
            replica = self._buckets.find(*bucket)
            if replica is None:
                plan.hold(bucket, self._buckets.why_not(*bucket).message)
            elif _remote_end(replica) is None:
                plan.hold(bucket, "what remote storage has of it is not known")
            elif end > (_remote_end(replica) or 0):
                plan.served[bucket] = replica
        return plan

    async def _carry_out(
        self, session: ServerSession, plan: _Plan, written: Sequence[WrittenObject]
    ) -> int:
        if plan.floor <= session.floor:
            return 0
        tails = await self._tails(session, plan)
        freed = sum(each.length for each in written if each.number < plan.floor)
        carried = sum(tail.length for tail in tails.values())
        pressing = self._is_pressing(session)
        if plan.floor <= session.floor or (2 * carried > freed and not pressing):
            return 0
        self._host.reach("wal-trim")
        for bucket in sorted(tails, key=plan.first.__getitem__):
            if plan.first[bucket] < plan.floor:
                await self._carry_or_hold(session, plan, plan.served[bucket], tails[bucket])
        if plan.floor <= session.floor:
            return 0
        await session.writer.drained()
        self._host.reach("wal-trim-carried")
        deleted = await self._record(session, plan.floor)
        log.debug("wal_trimmed", floor=plan.floor, freed=freed, carried=carried, deleted=deleted)
        return deleted

    async def _record(self, session: ServerSession, floor: int) -> int:
        """Have a floor recorded to which everything is carried, and delete what is below.

        If the coordinator does not answer, the next round begins here and carries nothing again.
        """
        self._owed = session, floor
        await session.raise_floor(floor)
        self._owed = None
        self._host.reach("wal-trim-noted")
        deleted = await session.delete_below_floor()
        self._host.reach("wal-trimmed")
        return deleted

    async def _tails(self, session: ServerSession, plan: _Plan) -> dict[TableBucket, LogTail]:
        """What is in no segment of each bucket below the floor, short enough to be carried.

        Buckets whose tail stays long hold the floor.
        """
        served = {b: replica for b, replica in plan.served.items() if plan.first[b] < plan.floor}
        share = self.retained // (CARRIED_SHARE * max(1, len(served)))
        limit = max(CARRIED_BYTES_MIN, min(CARRIED_BYTES_MAX, share))
        tails = dict[TableBucket, LogTail]()
        async for bucket, replica in paced(served.items()):
            if self._buckets.serves(replica):
                tails[bucket] = _tail(replica)
            else:
                plan.hold(bucket, "it was closed while it was trimmed")
        long = [bucket for bucket, tail in tails.items() if tail.length > limit]
        await asyncio.gather(*(self._upload(session, served[bucket]) for bucket in long))
        for bucket in long:
            tails[bucket] = _tail(served[bucket])
            if tails[bucket].length > max(limit, CARRIED_BYTES_MAX):
                length = tails.pop(bucket).length
                log.warning("wal_not_trimmed", bucket=str(bucket), bytes=length)
                plan.hold(bucket, f"{length} bytes of it are not in remote storage yet")
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

    async def _carry_or_hold(
        self, session: ServerSession, plan: _Plan, replica: Replica, tail: LogTail
    ) -> None:
        """Write the tail of a bucket again; if that fails, this bucket holds the floor."""
        bucket = replica.bucket
        try:
            await self._carry(session, replica, tail)
        except SessionFencedError:
            raise
        except Exception as e:  # of whatever kind: other buckets are trimmed as far as possible
            log.warning("wal_tail_not_carried", bucket=str(bucket), reason=reason_of(e))
            plan.hold(bucket, reason_of(e))
            if isinstance(e, CorruptRecordError) and self._buckets.serves(replica):
                self._logs.distrust(bucket)
                replica.fail(f"its log on this disk is damaged ({e.message})")

    async def _carry(self, session: ServerSession, replica: Replica, tail: LogTail) -> None:
        """Write the tail of a bucket again, with what was appended while it was read.

        Reading takes long, so it is done in a thread until only a little is new.
        """
        batches, unread = bytearray(), tail
        for _ in range(READS_MAX):
            batches = await asyncio.to_thread(_with, batches, unread)
            if self._host.live is not session or not self._buckets.serves(replica):
                raise NotTrimmedError(f"{replica.bucket} was closed while it was trimmed")
            unread = replica.log.tail(unread.end_offset)
            if unread.length <= UNREAD_BYTES_MAX:
                break
        else:
            raise NotTrimmedError(f"{replica.bucket} grows faster than its tail is written again")
        whole = bytes(batches) if not unread.length else b"".join((batches, unread.read()))
        if whole:
            (first,) = BASE_OFFSET.unpack_from(whole)
            part = TailPart(first, unread.end_offset, whole)
            session.carry(replica.bucket, replica.leader_epoch, part)


def _with(batches: bytearray, tail: LogTail) -> bytearray:
    return batches + tail.read()


class _Plan:
    """How far the floor may rise, and who holds it."""

    def __init__(self, floor: int) -> None:
        self.floor = floor
        self.first: dict[TableBucket, int] = {}
        """The first object of each bucket."""
        self.served: dict[TableBucket, Replica] = {}
        """Buckets of which something is in no segment."""
        self.held: tuple[TableBucket, str] | None = None
        """The bucket that holds the floor lowest, and why; None if none does."""

    def hold(self, bucket: TableBucket, reason: str) -> None:
        """Keep the objects of a bucket."""
        if self.first[bucket] < self.floor:
            self.floor = self.first[bucket]
            self.held = bucket, reason


class NotTrimmedError(ZuflussError):
    """A round of trimming was given up; the next one begins anew."""


def retained_bytes(session: ServerSession) -> int:
    """Bytes of a session that whoever takes over would have to read."""
    return sum(each.length for each in session.writer.written)


def _tail(replica: Replica) -> LogTail:
    return replica.log.tail(_remote_end(replica) or 0)


def _remote_end(replica: Replica) -> int | None:
    """The end of the segments in remote storage; None if it is not known."""
    remote = replica.remote
    return None if remote is None or remote.range is None else remote.range[1]
