"""The buckets that this server follows, so that it can lead them at once when their leader is lost.

The coordinator orders which they are. They are opened in the background, a few at a time; one that
cannot go on is closed and opened again, ever more rarely. For each leader there is one `Feed`.
Nothing here is served to anybody: requests are answered as by any server that does not lead.

| event | what happens |
|---|---|
| order to follow | the bucket is opened; with another leader it goes on where it is |
| order to lead | reading ends, log and state are brought to the end and served (`promote`) |
| order to stop | closed, files deleted if the order says so |
| the leader has other records | everything here of the bucket is deleted, and begins again |

The coordinator is told when a standby has caught up (`CAUGHT_UP_SECONDS`), and when it does not
keep up any more: changes only. Belongs to the event loop.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import (
    AsyncIterator,
    Awaitable,
    Callable,
    Collection,
    Iterator,
    Mapping,
    Sequence,
)
from contextlib import asynccontextmanager
from functools import partial
from typing import Final

import structlog

from zufluss.cluster.image import ClusterImage
from zufluss.cluster.replicas import ReplicaAssignment
from zufluss.cluster.wal import StandbyReport
from zufluss.errors import (
    CorruptRecordError,
    LogStorageError,
    NetworkError,
    UnknownTableOrBucketError,
    reason_of,
)
from zufluss.log.holds import Holder
from zufluss.model.table import TableBucket
from zufluss.periodic import log_failure, pause, repeat
from zufluss.replica.replica import Replica, ReplicaHost, ReplicaSettings
from zufluss.tablet.remote.context import RemoteContext
from zufluss.tablet.remote.restore import Restorer
from zufluss.tablet.shared.copy import SharedCopy
from zufluss.tablet.shared.host import SharedHost
from zufluss.tablet.standby.feed import Connection, Feed
from zufluss.tablet.standby.standby import RETRY_SECONDS, Standby
from zufluss.tasks import end

log = structlog.get_logger(__name__)

CAUGHT_UP_SECONDS: Final = 10.0
"""A standby that had everything so recently is in sync."""
REPORT_SECONDS: Final = 1.0
"""How often it is looked whether the coordinator has to be told something."""
HOLDS_SECONDS: Final = 60.0
"""How often the coordinator is asked what the segments have: older records can go here, too."""
OPENED_AT_ONCE: Final = 4
"""Buckets that are opened, or get their state, at the same time."""
PAUSE_SECONDS: Final = (0.5, 30.0)
"""First and longest pause before a bucket that could not go on is opened again."""

DROPPED_TRIES: Final = 5
"""A bucket that is still not in the metadata after so many tries was dropped."""

ConnectTo = Callable[[int], Awaitable[Connection]]
"""Connects to a tablet server, for fetches only."""


async def _nowhere(server_id: int) -> Connection:
    raise NetworkError(f"tablet server {server_id} cannot be reached from this process")


class Standbys:
    """Follows buckets."""

    def __init__(
        self,
        server_id: int,
        host: ReplicaHost,
        context: RemoteContext,
        restorer: Restorer,
        shared: SharedHost,
        flush_bytes: int,
    ) -> None:
        self.connect: ConnectTo = _nowhere
        self.promoted = 0
        """Buckets that were led from where their standby was."""
        self._server_id = server_id
        self._host = host
        self._context = context
        self._restorer = restorer
        self._shared = shared
        self._flush_bytes = flush_bytes
        self._loop = asyncio.get_running_loop()
        self._orders: dict[TableBucket, ReplicaAssignment] = {}
        self._open: dict[TableBucket, Standby] = {}
        self._work: dict[TableBucket, asyncio.Task[None]] = {}
        """What is under way for a bucket: it is opened, or its state is brought up."""
        self._failures: dict[TableBucket, int] = {}
        self._feeds: dict[int, tuple[Feed, asyncio.Task[None]]] = {}
        self._turns = asyncio.Semaphore(OPENED_AT_ONCE)
        self._busy: set[TableBucket] = set()
        """Buckets whose files are worked on at the moment."""
        self._reported: dict[TableBucket, StandbyReport] = {}
        self._tasks = [
            asyncio.create_task(repeat(REPORT_SECONDS, self.report, "standbys_not_reported")),
            asyncio.create_task(repeat(HOLDS_SECONDS, self.release_copied, "holds_not_moved")),
        ]

    @property
    def _image(self) -> ClusterImage:
        return self._context.buckets.image

    def __iter__(self) -> Iterator[Standby]:
        return iter(tuple(self._open.values()))

    def __len__(self) -> int:
        return len(self._orders)

    def follows(self, bucket: TableBucket) -> bool:
        """Whether a bucket is followed, or is about to be."""
        return bucket in self._orders or bucket in self._open or bucket in self._work

    def order_of(self, bucket: TableBucket) -> ReplicaAssignment | None:
        """The last order to follow a bucket."""
        return self._orders.get(bucket)

    def get(self, bucket: TableBucket) -> Standby | None:
        """The standby of a bucket, if it is open."""
        return self._open.get(bucket)

    # -- orders ---------------------------------------------------------------------------------

    def follow(self, orders: Sequence[ReplicaAssignment]) -> None:
        """Follow these buckets, in the background."""
        for order in orders:
            bucket = order.table_bucket
            self._orders[bucket] = order
            standby = self._open.get(bucket)
            if standby is not None:
                standby.order = order
                standby.paused = False
                if standby.behind:
                    self._state_needed(standby)
                self._feed(order.state.leader).wake.set()
            elif bucket not in self._work:
                self._begin(bucket, self._bring_up(bucket))

    async def follow_only(
        self, orders: Sequence[ReplicaAssignment], led: Collection[TableBucket]
    ) -> None:
        """Follow these buckets and give up all others, with their files.

        What was followed of buckets that are `led` from now on waits for `promote`.
        """
        kept = {order.table_bucket for order in orders}.union(led)
        for bucket in (self._orders.keys() | self._open.keys()) - kept:
            await self.stop(bucket, delete=True)
        self._reported.clear()  # the coordinator may have changed
        self.follow(orders)

    async def stop(self, bucket: TableBucket, *, delete: bool) -> bool:
        """Follow a bucket no longer; whether it was followed."""
        known = self._orders.pop(bucket, None)
        standby = await self._quiet(bucket)
        if standby is not None:
            async with standby.turn:
                self._close(standby, delete=delete)
        elif known is not None and delete:
            self._host.remove(known.physical_path, bucket)
        self._reported.pop(bucket, None)
        return known is not None

    async def promote(
        self, assignment: ReplicaAssignment, settings: ReplicaSettings, copy: SharedCopy
    ) -> Replica | None:
        """Lead a bucket with what its standby has; None if it has to be opened from the disk.

        An error that may pass leaves the standby as it is, for the next try.
        """
        bucket = assignment.table_bucket
        self._orders.pop(bucket, None)
        standby = await self._quiet(bucket)
        if standby is None:
            return None
        async with standby.turn:
            replica = standby.replica
            if not standby.has_state or not copy.continues(replica.log):
                self._close(standby, delete=False, failed=True)
                return None
            followed = replica.log.log_end_offset
            try:
                await copy.extend(replica.log)
            except (CorruptRecordError, LogStorageError) as problem:
                reason = reason_of(problem)
                log.warning("standby_not_continued", bucket=str(bucket), reason=reason)
                self._close(standby, delete=False, failed=True)
                return None
            self._forget(bucket)
            try:
                await replica.promote(assignment.leader_epoch, settings, copy)
            except BaseException:
                standby.close(delete=False, failed=True)
                raise
        self.promoted += 1
        log.info(
            "standby_promoted", bucket=str(bucket), followed=followed,
            end=replica.log.log_end_offset,
        )  # fmt: skip
        return replica

    async def close(self) -> None:
        """Follow nothing any more, because the server stops; logs and states are closed later."""
        for task in (*self._tasks, *(task for _, task in self._feeds.values())):
            await end(task)
        self._orders.clear()
        for bucket in [*self._work.keys(), *self._open.keys()]:
            await self._quiet(bucket)

    async def _quiet(self, bucket: TableBucket) -> Standby | None:
        """Have nothing read or brought up for a bucket any more; its standby, if it is open.

        What works on its files is waited for, because whoever comes next uses the same files.
        """
        standby = self._open.get(bucket)
        if standby is not None:
            standby.paused = True
        work = self._work.get(bucket)
        if work is not None and bucket not in self._busy:
            work.cancel()
        if work is not None:
            await asyncio.wait([work])
        standby = self._open.get(bucket)
        if standby is not None:
            standby.paused = True
        return standby

    # -- opening --------------------------------------------------------------------------------

    def _begin(self, bucket: TableBucket, work: Awaitable[None]) -> None:
        task = asyncio.ensure_future(work)
        self._work[bucket] = task
        task.add_done_callback(partial(self._ended, bucket))

    def _ended(self, bucket: TableBucket, task: asyncio.Task[None]) -> None:
        if self._work.get(bucket) is task:
            del self._work[bucket]
        if not task.cancelled() and isinstance(problem := task.exception(), Exception):
            log_failure("standby_failed", problem)
        standby = self._open.get(bucket)
        if standby is not None and standby.behind and not standby.paused:
            self._state_needed(standby)  # that was found while the last work ended

    async def _bring_up(self, bucket: TableBucket) -> None:
        """Open a bucket until that works."""
        while (order := self._orders.get(bucket)) is not None:
            try:
                self._check_exists(bucket)
                async with self._working_on(bucket):
                    standby = await Standby.open(
                        order, self._host, self._context, self._restorer, self._flush_bytes
                    )
            except Exception as problem:
                log_failure("standby_not_opened", problem)
                if bucket in self._orders:
                    await self._rest(bucket)
                if self._image.holder(bucket) is None and self._failures[bucket] >= DROPPED_TRIES:
                    self._orders.pop(bucket, None)
                    self._failures.pop(bucket, None)
                continue
            self._open[bucket] = standby
            self._feed(standby.order.state.leader).wake.set()
            return

    def _check_exists(self, bucket: TableBucket) -> None:
        if self._image.holder(bucket) is None:
            raise UnknownTableOrBucketError(f"{bucket} is not in the metadata")

    @asynccontextmanager
    async def _working_on(self, bucket: TableBucket) -> AsyncIterator[None]:
        async with self._turns:
            self._busy.add(bucket)
            try:
                yield
            finally:
                self._busy.discard(bucket)

    async def _rest(self, bucket: TableBucket) -> None:
        failures = self._failures[bucket] = self._failures.get(bucket, 0) + 1
        seconds = min(PAUSE_SECONDS[0] * 2.0 ** min(failures - 1, 10), PAUSE_SECONDS[1])
        await pause(seconds * random.uniform(0.5, 1.0))

    def _state_needed(self, standby: Standby) -> None:
        if standby.bucket not in self._work:
            self._begin(standby.bucket, self._bring_up_state(standby))

    async def _bring_up_state(self, standby: Standby) -> None:
        bucket = standby.bucket
        while self._open.get(bucket) is standby and not standby.paused:
            try:
                async with self._working_on(bucket):
                    await standby.bring_up_state()
                break
            except CorruptRecordError as problem:
                self._begin_again(standby, problem, wrong=True)
                return
            except Exception as problem:
                if standby.replica.kv is None:
                    self._begin_again(standby, problem, wrong=False)
                    return
                log_failure("standby_behind", problem)
                await pause(RETRY_SECONDS)
        self._failures.pop(bucket, None)
        self._feed(standby.order.state.leader).wake.set()

    def _begin_again(self, standby: Standby, problem: Exception, wrong: bool) -> None:
        """Close a standby that cannot go on, and open it again; without its files if `wrong`."""
        bucket = standby.bucket
        if self._open.get(bucket) is not standby or standby.paused:
            return
        log.warning(
            "standby_begins_again", bucket=str(bucket), wrong=wrong, reason=reason_of(problem)
        )
        self._close(standby, delete=wrong, failed=True)

        async def later() -> None:
            await self._rest(bucket)
            await self._bring_up(bucket)

        if bucket in self._orders:
            self._begin(bucket, later())

    def _close(self, standby: Standby, *, delete: bool, failed: bool = False) -> None:
        self._forget(standby.bucket)
        standby.close(delete=delete, failed=failed)
        self._context.buckets.forget_unused(standby.bucket.table_id)

    def _forget(self, bucket: TableBucket) -> None:
        self._open.pop(bucket, None)
        self._failures.pop(bucket, None)

    # -- reading --------------------------------------------------------------------------------

    def _feed(self, leader: int) -> Feed:
        known = self._feeds.get(leader)
        if known is None:
            feed = Feed(
                leader,
                self._server_id,
                lambda server_id: self.connect(server_id),
                self._ready,
                self._begin_again,
                self._state_needed,
            )
            task = asyncio.create_task(feed.run(), name=f"standbys-of-{leader}")
            known = self._feeds[leader] = feed, task
        return known[0]

    def _ready(self, leader: int) -> list[Standby]:
        return [each for each in self if each.reads and self.leader_of(each) == leader]

    def leader_of(self, standby: Standby) -> int:
        """Who leads a bucket: the newer of the last order and the metadata."""
        ordered = standby.order.state
        known = self._image.bucket_state(standby.bucket)
        if known is None or known.leader_epoch <= ordered.leader_epoch:
            return ordered.leader
        self._feed(known.leader)
        return known.leader

    # -- news for the coordinator ---------------------------------------------------------------

    async def report(self) -> None:
        """Tell the coordinator which standbys have caught up, as far as that has changed."""
        session = self._shared.live
        if session is None:
            return
        for standby in self:
            if self._image.holder(standby.bucket) is None:  # dropped before its order came
                await self.stop(standby.bucket, delete=True)
        now = self._loop.time()
        changed: dict[TableBucket, StandbyReport] = {}
        for standby in self:
            caught_up = standby.lag_seconds(now) < CAUGHT_UP_SECONDS
            report = StandbyReport(standby.bucket, standby.order.leader_epoch, caught_up)
            if self._reported.get(standby.bucket) != report:
                changed[standby.bucket] = report
        if changed:
            await self._context.gateway.report_standbys(session.identity, tuple(changed.values()))
            self._reported |= changed

    async def release_copied(self) -> None:
        """Let retention remove what segments have."""
        buckets = [standby.bucket for standby in self]
        if not buckets:
            return
        remotes = await self._context.gateway.bucket_remotes(buckets)
        for standby in self:
            remote = remotes.get(standby.bucket)
            if remote is not None and not standby.paused:
                standby.log.holds.set(Holder.REMOTE_COPY, remote.remote_end_offset or 0)

    @property
    def in_sync(self) -> int:
        """Buckets that have caught up."""
        now = self._loop.time()
        return sum(each.lag_seconds(now) < CAUGHT_UP_SECONDS for each in self)

    def lags(self) -> Mapping[int, float]:
        """The largest lag of the standbys of each leader, in seconds."""
        now, lags = self._loop.time(), dict[int, float]()
        for standby in self:
            leader = standby.order.state.leader
            lags[leader] = max(lags.get(leader, 0.0), standby.lag_seconds(now))
        return lags

    def __repr__(self) -> str:
        return f"Standbys({len(self._open)} of {len(self._orders)} open, promoted={self.promoted})"
