"""The end of this server's turn with a bucket that is handed over to another live server.

| step | what is true |
|---|---|
| writes wait (`held.py`) | nothing new is appended; lookups and fetches go on |
| what was appended is durable | within `QUIET_SECONDS`, or the bucket goes on here |
| the release is written and the bucket closed, in one turn of the event loop | nothing of it follows in this session, and no lookup is answered any more: whoever leads next need not wait for a lease |
| the release is durable | the coordinator may name another leader |

From the release on there is no way back: the coordinator names a leader, which may be this server.
If it does not, because it was replaced meanwhile, it hears of the bucket again by `report`, until
another session, or this one, has continued it. So long the objects with the bucket stay
(`trim.py`), and so do its files here: this server might get it back.

Belongs to the event loop.
"""  # noqa: E501 - a table row does not wrap

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Final, NamedTuple

import structlog

from zufluss.cluster.remote import WalCommits
from zufluss.cluster.wal import ReleasedBucket
from zufluss.errors import LeaderNotAvailableError, NotLeaderError, ZuflussError
from zufluss.model.table import PhysicalTablePath, TableBucket
from zufluss.periodic import log_failure
from zufluss.replica.kv_host import KvHost
from zufluss.replica.replica import Replica
from zufluss.tablet.buckets import Buckets
from zufluss.tablet.shared.held import WRITES, HeldRequests
from zufluss.tablet.shared.host import SharedHost
from zufluss.tablet.shared.session import ServerSession

log = structlog.get_logger(__name__)

QUIET_SECONDS: Final = 2.0
"""How long the last writes of a bucket may take to become durable."""
REPORT_SECONDS: Final = 2.0
"""After so long without news of a released bucket the coordinator is asked."""


class _Released(NamedTuple):
    """A bucket that this server has released."""

    session: ServerSession
    leader_epoch: int
    path: PhysicalTablePath
    end: int
    """The number behind the release."""
    since: float


class Releases:
    """Releases buckets, and remembers them until another session has continued them."""

    def __init__(
        self,
        host: SharedHost,
        gateway: WalCommits,
        buckets: Buckets,
        kv: KvHost,
        held: HeldRequests,
        close: Callable[[Replica, ZuflussError], None],
        remove: Callable[[PhysicalTablePath, TableBucket], None],
    ) -> None:
        """`close` gives a bucket up and keeps its files; `remove` deletes files of a closed one."""
        self._host = host
        self._gateway = gateway
        self._buckets = buckets
        self._kv = kv
        self._held = held
        self._close = close
        self._remove = remove
        self._loop = asyncio.get_running_loop()
        self._under_way: set[TableBucket] = set()
        self._released: dict[TableBucket, _Released] = {}
        self.count = 0
        """Buckets that this server has released since it started."""

    async def release(self, bucket: TableBucket, leader_epoch: int) -> int:
        """Write nothing to a bucket any more; returns the number behind its release.

        Raises a retriable error if the bucket goes on here.
        """
        before = self._released.get(bucket)
        if before is not None and before.leader_epoch == leader_epoch:
            return before.end  # the coordinator did not hear the answer
        session, replica = self._host.session, self._buckets.replica(*bucket)
        if replica.leader_epoch != leader_epoch:
            raise NotLeaderError(
                f"{bucket.named(replica.path)} is to be released in leader epoch {leader_epoch}, "
                f"this server leads it in {replica.leader_epoch}"
            )
        if bucket in self._under_way:
            raise LeaderNotAvailableError(
                f"{bucket.named(replica.path)} is being released already; try again"
            )
        self._under_way.add(bucket)
        try:
            return await self._release(session, replica)
        finally:
            self._under_way.discard(bucket)

    async def _release(self, session: ServerSession, replica: Replica) -> int:
        bucket, epoch = replica.bucket, replica.leader_epoch
        self._host.reach("handover-hold")
        self._held.hold(bucket, WRITES)
        try:
            await self._quiet(session, replica)
            session.release(bucket, epoch, replica.log.log_end_offset)
        except BaseException:
            self._held.go_on(bucket)
            raise
        name = bucket.named(replica.path)
        self._close(
            replica, NotLeaderError(f"{name} is handed over to another server; ask who leads it")
        )
        end = await session.writer.drained(at_once=True)
        self._released[bucket] = _Released(session, epoch, replica.path, end, self._loop.time())
        self.count += 1
        self._host.reach("handover-released")
        log.info("bucket_released", bucket=str(bucket), leader_epoch=epoch, number=end)
        return end

    async def _quiet(self, session: ServerSession, replica: Replica) -> None:
        """Wait until everything that was appended to a bucket is durable, and nothing follows.

        Whoever was told that the worker has their write gets it appended; what arrives behind that
        is refused when the bucket is closed.
        """
        try:
            async with asyncio.timeout(QUIET_SECONDS):
                while True:
                    await asyncio.sleep(0)  # what gathers in a turn is appended at its end
                    if replica.kv is not None:
                        await self._kv.settled()
                    await session.writer.drained(at_once=True)
                    if not self._buckets.serves(replica) or self._host.live is not session:
                        raise self._buckets.why_not(*replica.bucket)
                    if replica.log.log_end_offset == replica.log.high_watermark:
                        return
        except TimeoutError:
            raise LeaderNotAvailableError(
                f"{replica.bucket.named(replica.path)} is not handed over: what was written last "
                f"did not become durable within {QUIET_SECONDS:g} s; try again when the shared log "
                "answers faster"
            ) from None

    def look(self) -> None:
        """Let requests go on whose bucket has another leader, as the metadata says by now."""
        for bucket in self._held.buckets:
            if self._buckets.is_elsewhere(bucket):
                self._held.go_on(bucket)

    async def report(self) -> None:
        """Tell the coordinator which buckets were released, and forget those that go on elsewhere.

        Called every second.
        """
        session, now = self._host.live, self._loop.time()
        for bucket, each in tuple(self._released.items()):
            if each.session is not session:
                del self._released[bucket]  # the session has ended, so everybody knows its end
        asked = [b for b, each in self._released.items() if now - each.since >= REPORT_SECONDS]
        if session is None or not asked:
            return
        known = [(bucket, self._released[bucket]) for bucket in asked]
        released = [ReleasedBucket(bucket, x.leader_epoch, x.end) for bucket, x in known]
        try:
            adopted = await self._gateway.report_released(session.identity, released)
        except ZuflussError as problem:
            log_failure("release_not_reported", problem)
            return
        await self._kv.settled()  # the states of buckets that were closed are closed
        for bucket, each in known:
            if bucket in adopted:
                self._forget(bucket, each)

    def _forget(self, bucket: TableBucket, released: _Released) -> None:
        """Keep nothing of a bucket that another session has continued, or that was dropped.

        It may have come back and been released again while the coordinator was asked.
        """
        released.session.adopted(bucket, released.leader_epoch)
        if self._released.get(bucket) is released:
            del self._released[bucket]
            if self._buckets.is_away(bucket):
                self._remove(released.path, bucket)
