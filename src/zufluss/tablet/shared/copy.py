"""How a bucket comes up whose end is in the shared log, and continues in the session of its server.

| step | what it does |
|---|---|
| `open_log` | the log of this disk as far as it is known to be true, or an empty one at the end of the remote segments; then what the source has of the bucket |
| `restore_state` | key-value state of this disk or a snapshot, as without a shared log |
| `adopt` | what the segments do not have is written again into the session of this server; a primary-key bucket waits until its former leader answers no lookups any more; the coordinator notes that this session has the end of the bucket |

The source is a session that has ended, or one that goes on and has released the bucket (a
hand-over, `release.py`); then nobody answers lookups any more, and nothing is waited for. Where the session of this server has the end of the bucket
already, as for a new bucket or one that failed and is opened again, it is the source itself, and
there is nothing to adopt. If it has the end and nobody knows whether the coordinator noted that,
only the question is repeated: the former source may be deleted by then. What is damaged on this
disk is discarded, and the bucket opened without it. Only after `adopt` is the bucket served:
whoever takes it over from here finds everything in one session. The lookups of the former leader
have ended before that is noted, because the next leader is told of this session's lookups only.
"""  # noqa: E501 - a table row does not wrap

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence

import structlog

from zufluss.cluster.remote import BucketRemote
from zufluss.cluster.replicas import ReplicaAssignment
from zufluss.cluster.wal import Takeover
from zufluss.errors import CorruptRecordError, LeaderNotAvailableError, NotLeaderError
from zufluss.log.config import LogConfig
from zufluss.log.log import Log
from zufluss.log.manager import LogBeginning
from zufluss.log.shared.api import LostOffsetsError
from zufluss.replica.replica import Replica
from zufluss.tablet.remote.copy import BucketCopy
from zufluss.tablet.remote.logs import RemoteLogRunner
from zufluss.tablet.remote.restore import Restorer
from zufluss.tablet.reopen import StaleOrderError
from zufluss.tablet.shared.host import SharedHost
from zufluss.tablet.shared.session import cut

log = structlog.get_logger(__name__)


class SharedCopy(BucketCopy):
    """Implements `replica.RemoteCopy` for one assignment."""

    def __init__(
        self,
        host: SharedHost,
        restorer: Restorer,
        remote_logs: RemoteLogRunner,
        assignment: ReplicaAssignment,
        remote: BucketRemote | None,
        lease_end: float,
    ) -> None:
        """`lease_end` is the time on the loop's clock until which the former leader may answer."""
        super().__init__(restorer, remote_logs, assignment, remote)
        self._host = host
        self._session = host.session
        """The bucket is opened for this session, or not at all."""
        self._lease_end = lease_end
        self._cached = ["log", "state"]
        """What this disk has that was not discarded yet."""

    @property
    def _remote_end(self) -> int:
        return 0 if self._remote is None else self._remote.remote_end_offset or 0

    async def open_log(self, config: LogConfig, now_ms: int) -> Log:
        """Open the log with everything that was acknowledged."""
        assignment = self._assignment
        return await self._restorer.logs.open_shared(
            assignment.physical_path,
            assignment.table_bucket,
            config,
            now_ms,
            remote_end=self._remote_end,
            beginning=self._beginning,
            tail=await self._tail(),
        )

    def continues(self, log: Log) -> bool:
        """Whether a log that follows this bucket has everything that no segment has."""
        return log.log_start_offset <= self._remote_end <= log.log_end_offset

    async def extend(self, log: Log) -> None:
        """Give a log that follows this bucket the rest of what was acknowledged."""
        tail = await self._tail()
        pieces = await tail(log.log_end_offset)
        await asyncio.to_thread(_append, log, pieces)

    async def _tail(self) -> Callable[[int], Awaitable[Sequence[memoryview]]]:
        """Return what reads the end of the bucket from the session that has it."""
        assignment = self._assignment
        bucket, session = assignment.table_bucket, self._session
        if assignment.source is None:
            self._hold()
        mine = session.holds(bucket) or session.has_carried(bucket, assignment.leader_epoch)
        source = await session.own_source() if mine else assignment.source
        assert source is not None

        async def tail(start: int) -> Sequence[memoryview]:
            if mine and session.writer.end_offset(bucket) is None:
                return ()  # a new bucket; the session need not be read
            self._host.reach("wal-recover")
            try:
                found = await self._host.tail(source, bucket, start)
            except LostOffsetsError as e:
                if not mine or session.floor == source.floor:
                    raise
                raise LeaderNotAvailableError(  # the next try asks for segments and floor again
                    f"{session} was trimmed while {bucket} was read from it; try again"
                ) from e
            log.debug(
                "bucket_tail_read", bucket=str(bucket), first=start, end=found.end_offset,
                server_epoch=source.session.server_epoch,
            )  # fmt: skip
            return found.pieces

        return tail

    def _hold(self) -> None:
        """Note that the session has the end of the bucket, as the order says of its session.

        The order may be one of an earlier session: then the bucket may be another server's by now.
        """
        bucket, session = self._assignment.table_bucket, self._session
        if self._assignment.state.wal != session.identity.server_epoch:
            raise StaleOrderError(
                f"the order to lead {bucket} belongs to session {self._assignment.state.wal}, this "
                f"is session {session.identity.server_epoch}"
            )
        session.hold(bucket)

    async def _beginning(self) -> LogBeginning:
        assert self._remote is not None
        writers, timestamp = await self._restorer.writers_at_end(self._remote)
        return LogBeginning(self._remote_end, writers, timestamp)

    async def discard_damaged(self, problem: CorruptRecordError) -> bool:
        """Discard the log of this disk, and its state if that was not enough: they are a cache."""
        assignment = self._assignment
        bucket, path = assignment.table_bucket, assignment.physical_path
        if isinstance(problem, LostOffsetsError) or not self._cached:
            return False  # what is damaged lies elsewhere
        cached = self._cached.pop(0)
        log.warning("cache_discarded", bucket=str(bucket), cache=cached, reason=problem.message)
        if cached == "log":
            self._restorer.logs.distrust(bucket)
        else:
            await self._restorer.discard_state(path, bucket)
        return True

    async def adopt(self, replica: Replica) -> None:
        """Have the session of this server continue the log; returns when the coordinator knows."""
        bucket, epoch, session = replica.bucket, replica.leader_epoch, self._session
        if not session.holds(bucket):
            if not session.has_carried(bucket, epoch):
                self._host.reach("wal-carry")
                start = session.carried_to(bucket, epoch)
                tail = replica.log.tail(self._remote_end if start is None else start)
                parts = await asyncio.to_thread(lambda: cut(memoryview(tail.read())))
                await session.carry_over(bucket, epoch, parts)
            await session.writer.drained(at_once=True)
            self._host.reach("wal-carried")
        if replica.kv is not None:
            await asyncio.sleep(self._lease_end - asyncio.get_running_loop().time())
        if not session.holds(bucket):
            await session.commit(Takeover(bucket, epoch))
            self._host.reach("wal-adopted")
        if self._host.live is not session:
            raise NotLeaderError(f"{session} ended while {bucket} was taken over")


def _append(log: Log, pieces: Sequence[memoryview]) -> None:
    for piece in pieces:
        log.append_stamped(piece)
    log.advance_high_watermark(log.log_end_offset)
