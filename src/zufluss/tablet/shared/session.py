"""The session of this tablet server in the shared log.

A session begins with each registration, and ends with the next one, or when somebody else seals it
(`log/shared/ending.py`). Entries are given to it right after they were appended to the local log;
they are acknowledged when the session has them. So the local log of a bucket never ends before the
entries of the session do, and what it has behind them was never acknowledged.

Belongs to the event loop.
"""

from __future__ import annotations

import asyncio
import struct
from collections.abc import Sequence
from typing import Final, NamedTuple

from zufluss.cluster.remote import RemoteGateway
from zufluss.cluster.wal import Takeover, WalSession, WalSource
from zufluss.errors import NotLeaderError
from zufluss.log.shared.api import OnDurable, OnFenced, Session, SessionWriter, SharedLog
from zufluss.model.table import TableBucket
from zufluss.record.header import iter_headers
from zufluss.remote.wal import EntryKind

BASE_OFFSET: Final = struct.Struct("<q")
"""The first field of a stamped batch."""
PART_BYTES: Final = 8 << 20
"""Size of the parts of a long tail, unless one batch is larger; about that of an object."""

AHEAD_BYTES: Final = 2 * PART_BYTES
"""So much of what is carried is under way at most: writes of other buckets wait behind it."""


class TailPart(NamedTuple):
    """Some of the last batches of a bucket, stamped."""

    first_offset: int
    end_offset: int
    batches: bytes | memoryview


class ServerSession:
    """The live session of this server."""

    def __init__(
        self,
        identity: WalSession,
        cluster_id: str,
        shared: SharedLog,
        gateway: RemoteGateway,
        on_durable: OnDurable,
        on_fenced: OnFenced,
    ) -> None:
        self.identity = identity
        self.shared = shared
        self.name = Session(cluster_id, identity.server_id, identity.server_epoch)
        """As the shared log knows it."""
        self.writer: SessionWriter = shared.begin(self.name, on_durable, on_fenced)
        self.floor = 0
        """The recorded floor."""
        self._gateway = gateway
        self._holds: set[TableBucket] = set()
        """Buckets of which this session has the end, as the coordinator knows."""
        self.released: dict[TableBucket, int] = {}
        """Buckets that this session has released and no other one has continued yet, as far as this
        server knows, with the leader epoch."""
        self._carried: dict[TableBucket, int] = {}
        """Buckets of which this session has the end, with the leader epoch of their entries."""
        self._carrying: dict[TableBucket, int] = {}
        """Buckets of which some parts were carried and not all, with the leader epoch."""
        self._turn = asyncio.Lock()
        """Held while a part of a tail is carried."""
        self._ahead = 0
        """Bytes that were carried since all of them were known to be durable."""
        self._waiting: list[tuple[Takeover, asyncio.Future[bool]]] = []
        self._committing: asyncio.Task[None] | None = None

    def append(self, bucket: TableBucket, leader_epoch: int, end: int, view: memoryview) -> None:
        """Have stamped batches made durable that were appended to the local log of a bucket."""
        first: int = BASE_OFFSET.unpack_from(view)[0]
        self.writer.append(bucket, leader_epoch, first, end, view)

    def carry(self, bucket: TableBucket, leader_epoch: int, tail: TailPart) -> None:
        """Have the last batches of a bucket of this session written again: older objects can go.

        They end where the entries of the bucket end.
        """
        self.writer.append(bucket, leader_epoch, *tail, EntryKind.CARRY)

    async def carry_over(
        self, bucket: TableBucket, leader_epoch: int, tail: Sequence[TailPart]
    ) -> None:
        """Have this session continue a bucket, whose last batches lie elsewhere.

        They end where the local log ends. They are written part by part, so that what other
        buckets append meanwhile is taken and acknowledged; they are durable when all is `drained`.
        If a part is not taken (memory runs out), the next call goes on behind those that were.
        """
        written = self.carried_to(bucket, leader_epoch)
        kind = EntryKind.CARRY if written is None else EntryKind.BATCHES
        for part in tail:
            async with self._turn:
                await self._carry_part(bucket, leader_epoch, part, kind)
            kind = EntryKind.BATCHES
        self._carrying.pop(bucket, None)
        self._carried[bucket] = leader_epoch

    async def _carry_part(
        self, bucket: TableBucket, leader_epoch: int, part: TailPart, kind: EntryKind
    ) -> None:
        """Carry a part, once not much of what was carried is under way; for one at a time."""
        length = len(part.batches)
        if self._ahead and self._ahead + length > AHEAD_BYTES:
            await self.writer.drained()
            self._ahead = 0
        await self.writer.room()
        self.writer.append(bucket, leader_epoch, *part, kind)
        self._carrying[bucket] = leader_epoch
        self._ahead += length
        await asyncio.sleep(0)  # its checksum has taken a while

    def carried_to(self, bucket: TableBucket, leader_epoch: int) -> int | None:
        """The end of what was carried of a bucket whose carry failed half-way; None if none did."""
        if self._carrying.get(bucket) != leader_epoch:
            return None
        return self.writer.end_offset(bucket)

    def has_carried(self, bucket: TableBucket, leader_epoch: int) -> bool:
        """Whether the end of a bucket was written into this session in a leader epoch."""
        return self._carried.get(bucket) == leader_epoch

    def release(self, bucket: TableBucket, leader_epoch: int, end_offset: int) -> None:
        """Write that nothing of a bucket follows in this leader epoch.

        The objects that have the bucket stay until it is `adopted`.
        """
        self.writer.append(bucket, leader_epoch, end_offset, end_offset, b"", EntryKind.RELEASE)
        self._holds.discard(bucket)
        self.released[bucket] = leader_epoch

    def adopted(self, bucket: TableBucket, leader_epoch: int) -> None:
        """Note that the objects with a bucket that was released are not needed for it any more.

        They are if it came back and was released again since.
        """
        if self.released.get(bucket) == leader_epoch:
            del self.released[bucket]

    def holds(self, bucket: TableBucket) -> bool:
        """Whether this session has the end of a bucket, as the coordinator knows."""
        return bucket in self._holds

    def hold(self, bucket: TableBucket) -> None:
        """Note that the coordinator knows that this session has the end of a bucket."""
        self._holds.add(bucket)

    async def own_source(self) -> WalSource:
        """This session so far, with everything that was appended before the call."""
        return WalSource(self.identity, self.floor, await self.writer.drained())

    async def commit(self, takeover: Takeover) -> None:
        """Have the coordinator note that this session has the end of a bucket.

        Calls that come while another is under way share the next one. `NotLeaderError` if the
        bucket has another leader by now, or the session has ended.
        """
        committed: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
        self._waiting.append((takeover, committed))
        if self._committing is None:
            self._committing = asyncio.create_task(self._commit_waiting())
        if not await committed:
            raise NotLeaderError(
                f"{takeover.bucket} has another leader than this server in epoch "
                f"{takeover.leader_epoch} by now"
            )
        self.hold(takeover.bucket)

    async def _commit_waiting(self) -> None:
        try:
            while self._waiting:
                waiting, self._waiting = self._waiting, []
                try:
                    takeovers = [takeover for takeover, _ in waiting]
                    done = await self._gateway.commit_takeovers(self.identity, takeovers)
                except Exception as problem:
                    for _, future in waiting:
                        if not future.done():
                            future.set_exception(problem)
                else:
                    for takeover, future in waiting:
                        if not future.done():
                            future.set_result(takeover.bucket in done)
        finally:
            self._committing = None

    async def raise_floor(self, floor: int) -> None:
        """Have the coordinator note that nobody needs the objects below a number."""
        await self._gateway.commit_wal_floor(self.identity, floor)
        self.floor = floor
        self.writer.trimmed(floor)

    async def delete_below_floor(self) -> int:
        """Delete the objects below the recorded floor; returns how many went."""
        return await self.shared.trim(self.name, self.floor)

    async def close(self) -> None:
        """Make everything durable, and say that the session ended."""
        await self.writer.close()

    async def stop(self) -> None:
        """Give up: nothing is acknowledged any more."""
        await self.writer.stop()

    def __repr__(self) -> str:
        return f"ServerSession({self.identity}, floor={self.floor}, {self.writer!r})"


def cut(batches: memoryview) -> list[TailPart]:
    """Cut batches into parts of some MiB; for any thread.

    The parts are copies, so the event loop copies nothing when they are carried.
    """
    parts: list[TailPart] = []
    begin = first = end = stop = 0
    for at, header in iter_headers(batches):
        if stop > begin and at + header.size - begin > PART_BYTES:
            parts.append(TailPart(first, end, bytes(batches[begin:stop])))
            begin = stop
        if stop == begin:
            first = header.base_offset
        end, stop = header.next_offset, at + header.size
    return [*parts, TailPart(first, end, bytes(batches[begin:stop]))] if stop else []
