"""Opening and closing the buckets that the coordinator assigns to this server.

A bucket whose data cannot be served is refused, and tried again in the background if that may help
(`reopen.py`). A bucket that fails while it is served is closed and goes the same way. The orders
come from `server.py`, one at a time. The retries of a bucket are ended before an order for it is
carried out: two tries at once would open the same files.

Belongs to the event loop.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

import structlog

from zufluss.cluster.remote import BucketRemote
from zufluss.cluster.replicas import ReplicaAssignment, ReplicaStop
from zufluss.errors import (
    CorruptRecordError,
    LeaderNotAvailableError,
    NotLeaderError,
    ZuflussError,
    reason_of,
)
from zufluss.log.manager import caseless, log_directories, log_directory
from zufluss.log.segment import DELETED_SUFFIX
from zufluss.model.table import TableBucket
from zufluss.replica.replica import Replica, ReplicaHost, ReplicaSettings
from zufluss.tablet.remote.context import RemoteContext
from zufluss.tablet.remote.copy import BucketCopy
from zufluss.tablet.remote.logs import RemoteLogRunner
from zufluss.tablet.remote.restore import Restorer
from zufluss.tablet.reopen import Reopener, StaleOrderError, may_pass
from zufluss.tablet.shared.copy import SharedCopy
from zufluss.tablet.shared.held import EVERYTHING, HeldRequests
from zufluss.tablet.shared.host import SharedHost
from zufluss.tablet.shared.prepare import Preparations, RehearsedCopy
from zufluss.tablet.standby.standbys import Standbys

log = structlog.get_logger(__name__)

OpenReplica = Callable[
    [ReplicaHost, ReplicaAssignment, ReplicaSettings, BucketCopy], Awaitable[Replica]
]
"""`Replica.open` or `Replica.reopen`."""

OPENED_AT_ONCE = 64
"""Buckets that come up from the shared log at the same time: most of it is waiting."""


class Assignments:
    """Opens, refuses, reopens and closes the buckets of a server."""

    def __init__(
        self,
        data_dir: Path,
        host: ReplicaHost,
        context: RemoteContext,
        restorer: Restorer,
        remote_logs: RemoteLogRunner,
        epoch_ended: Callable[[Replica], None],
        shared: SharedHost | None,
        held: HeldRequests,
    ) -> None:
        """`epoch_ended` is called with a replica that gets another leader epoch.

        `shared` has the ends of the logs, None where the disk has them. `held` holds the requests
        of buckets that are taken over.
        """
        self._data_dir = data_dir
        self.host = self._host = host
        self._context = context
        self._buckets = context.buckets
        self._restorer = restorer
        self._remote_logs = remote_logs
        self._epoch_ended = epoch_ended
        self._shared = shared
        self._held = held
        self.preparations = Preparations(host, self._buckets, self._rehearsed)
        """Buckets that are made ready to be led here."""
        self._opening = asyncio.Semaphore(OPENED_AT_ONCE)
        self._orders: dict[TableBucket, ReplicaAssignment] = {}
        """The last order for each bucket that was opened here."""
        self._lease_ends: dict[TableBucket, float] = {}
        """Until when the former leaders of buckets may answer lookups, by the loop's clock."""
        self.progress = (0, 0)
        """Buckets of the last whole assignment that were opened or refused, and all of them."""
        self._stopped = False
        self._orders_under_way = 0
        self._closing: dict[Replica, bool] = {}
        """Buckets that are being closed, and whether their files go: not all steps are done yet."""
        self.retries = Reopener(self._reopen)
        self.standbys: Standbys | None = None
        """What this server follows of others' buckets; None without a shared log."""

    async def stop(self) -> None:
        """Open nothing any more, because the server stops: end the tries under way."""
        self._stopped = True
        await self.preparations.end()
        await self.retries.stop()

    async def open(self, assignments: Sequence[ReplicaAssignment]) -> None:
        """Open these buckets and lead them; raises why one of them cannot be served."""
        remotes = await self._remotes(assignments)
        for assignment in assignments:
            refusal = await self._open_or_refuse(assignment, remotes)
            if refusal is not None:
                raise refusal

    async def open_all(self, assignments: Sequence[ReplicaAssignment]) -> None:
        """Open these buckets and lead them; the others are served when some are refused."""
        self.progress = (0, len(assignments))
        remotes = await self._remotes(assignments)

        async def open_one(assignment: ReplicaAssignment) -> None:
            await self._open_or_refuse(assignment, remotes)
            done, total = self.progress
            self.progress = (done + 1, total)

        if self._shared is None:
            for assignment in assignments:
                await open_one(assignment)
        else:
            opening = map(open_one, assignments)
            outcomes = await asyncio.gather(*opening, return_exceptions=True)
            for outcome in outcomes:  # only now: the next registration opens the same files
                if isinstance(outcome, BaseException):
                    raise outcome

    def take_over(self, assignments: Sequence[ReplicaAssignment]) -> None:
        """Open buckets in the background whose ends former leaders left in the shared log.

        Until then their requests are answered with LEADER_NOT_AVAILABLE.
        """
        for assignment in assignments:
            bucket = assignment.table_bucket
            self._note(assignment)
            if self._buckets.find(*bucket) is not None:
                continue  # the order came twice
            name = bucket.named(assignment.physical_path)
            opening = LeaderNotAvailableError(
                f"{name} is being taken over by this server; try again after a pause"
            )
            self._buckets.refuse(assignment, opening, self._host.clock_ms())
            self._held.hold(bucket, EVERYTHING)
            self.retries.add(assignment, at_once=True)

    def _note(self, assignment: ReplicaAssignment) -> None:
        """Remember an order, and until when the former leader may answer lookups."""
        bucket = assignment.table_bucket
        self._orders[bucket] = assignment
        lease_end = asyncio.get_running_loop().time() + assignment.lease_ms / 1000
        self._lease_ends[bucket] = max(self._lease_ends.get(bucket, 0.0), lease_end)

    async def _open_or_refuse(
        self, assignment: ReplicaAssignment, remotes: Mapping[TableBucket, BucketRemote | None]
    ) -> ZuflussError | None:
        await asyncio.sleep(0)  # a table has thousands of buckets; other requests run in between
        await self.retries.end([assignment.table_bucket])  # it may have failed since the order came
        self._note(assignment)
        try:
            async with self._opening:
                await self._open(assignment, remotes, Replica.open)
        except Exception as e:
            log.error("bucket_refused", bucket=str(assignment.table_bucket), reason=reason_of(e))
            if may_pass(e):
                self.retries.add(assignment)
            return self._buckets.refuse(assignment, e, self._host.clock_ms())
        return None

    def recover(self, replica: Replica) -> None:
        """Close a bucket that failed, and open it again from its log until that works."""
        asyncio.get_running_loop().call_soon(self._recover, replica)  # not inside of its caller

    def _recover(self, replica: Replica) -> None:
        if self._stopped or not self._buckets.serves(replica):
            return
        failure = replica.failure
        assert failure is not None
        assignment = self._orders.get(replica.bucket)
        if assignment is None:
            return  # the server gives all its buckets up, and closes this one, too
        log.error("bucket_failed", bucket=str(replica.bucket), reason=failure.message)
        self._buckets.refuse(assignment, failure, self._host.clock_ms())
        self._close(replica, delete=False)
        self.retries.add(assignment)

    def look_after(self) -> None:
        """Take up what a shortage has interrupted; called periodically.

        Memory may run out while a bucket is being failed, closed or retried. No bucket is left
        alone in between: closing continues, what failed is closed, what is closed is retried.
        """
        for replica, delete in list(self._closing.items()):
            self._finish_closing(replica, delete=delete)
        for replica in self._buckets.replicas():
            if (failure := replica.found_failure()) is not None:
                replica.fail(reason_of(failure))
                self._recover(replica)
        if not self._orders_under_way and not self._stopped:
            for refused in self._buckets.refused():
                if refused.recovering and refused.bucket in self._orders:
                    self.retries.add(self._orders[refused.bucket])

    @asynccontextmanager
    async def order(self, buckets: Iterable[TableBucket] | None = None) -> AsyncIterator[None]:
        """End the retries of buckets, of all for None, while an order about them is carried out."""
        buckets = None if buckets is None else tuple(buckets)
        self._orders_under_way += 1
        try:
            await self.preparations.end(buckets)
            await (self.retries.end_all() if buckets is None else self.retries.end(buckets))
            yield
        finally:
            self._orders_under_way -= 1

    async def _reopen(self, assignment: ReplicaAssignment) -> Exception | None:
        """Try to open a bucket that was refused; returns why that is still not possible."""
        bucket = assignment.table_bucket
        if self._orders.get(bucket) is not assignment:
            return StaleOrderError(f"{bucket} is not this server's, or by a later order")
        try:
            remotes = await self._remotes([assignment])
        except ZuflussError as e:
            return e
        try:
            async with self._opening:
                await self._open(assignment, remotes, Replica.reopen)
        except Exception as e:
            self._buckets.refuse(assignment, e, self._host.clock_ms())
            return e
        self._held.go_on(bucket)
        await self._ask_the_lake(assignment)
        return None

    async def _ask_the_lake(self, assignment: ReplicaAssignment) -> None:
        """Tell a bucket that was opened later how far the lake got; others are told at a start."""
        bucket, path = assignment.table_bucket, assignment.physical_path.path
        replica = self._buckets.find(*bucket)
        if replica is None or not self._buckets.table(bucket.table_id).settings.tiered:
            return
        try:
            replica.lake_reached(await self._context.gateway.lake_offset(path, bucket))
        except ZuflussError as e:  # nothing expires before the next commit of a lake snapshot
            log.warning("lake_offset_unknown", bucket=str(bucket), reason=e.message)

    async def _remotes(
        self, assignments: Sequence[ReplicaAssignment]
    ) -> Mapping[TableBucket, BucketRemote | None]:
        """What the coordinator knows of the remote files of the buckets that are not open."""
        buckets = [assignment.table_bucket for assignment in assignments]
        closed = [bucket for bucket in buckets if self._buckets.find(*bucket) is None]
        remotes = await self._context.gateway.bucket_remotes(closed) if closed else {}
        return {bucket: remotes.get(bucket) for bucket in closed}

    async def _open(
        self,
        assignment: ReplicaAssignment,
        remotes: Mapping[TableBucket, BucketRemote | None],
        open_replica: OpenReplica,
    ) -> None:
        """Open a bucket, or lead it in another epoch if it is open; raises why it cannot be."""
        bucket = assignment.table_bucket
        replica = self._buckets.find(*bucket)
        if replica is not None:
            if replica.leader_epoch != assignment.leader_epoch:
                self._epoch_ended(replica)
            replica.lead(assignment.leader_epoch)
            return
        if bucket not in remotes:  # it was open when the coordinator was asked, and failed since
            remotes = await self._remotes([assignment])
        await self._buckets.prepare(bucket.table_id)
        settings = self._buckets.table(bucket.table_id).settings
        copy = self._copy(assignment, remotes[bucket])
        if self.standbys is not None and isinstance(copy, SharedCopy):
            replica = await self.standbys.promote(assignment, settings, copy)
        while replica is None:
            try:
                replica = await open_replica(self._host, assignment, settings, copy)
            except CorruptRecordError as e:
                if not await copy.discard_damaged(e):
                    raise
        try:
            self._buckets.add(replica)
        except BaseException:  # the next try opens its files again
            self._closing[replica] = False
            self._finish_closing(replica, delete=False)
            raise

    def _copy(self, assignment: ReplicaAssignment, remote: BucketRemote | None) -> BucketCopy:
        if self._shared is None:
            return BucketCopy(self._restorer, self._remote_logs, assignment, remote)
        lease_end = self._lease_ends.get(assignment.table_bucket, 0.0)
        return SharedCopy(
            self._shared, self._restorer, self._remote_logs, assignment, remote, lease_end
        )

    async def _rehearsed(self, assignment: ReplicaAssignment) -> RehearsedCopy:
        """The copy of a bucket that is made ready."""
        assert self._shared is not None
        remotes = await self._context.gateway.bucket_remotes([assignment.table_bucket])
        remote = remotes.get(assignment.table_bucket)
        return RehearsedCopy(
            self._shared, self._restorer, self._remote_logs, assignment, remote, 0.0
        )

    def release(self, replica: Replica, reason: ZuflussError) -> None:
        """Close a bucket that another server is about to lead; its files stay."""
        self._close(replica, delete=False, reason=reason)
        self._forget(replica.bucket)

    def close(self, stop: ReplicaStop) -> None:
        """Give a bucket up, open or refused; its files go if the order says delete."""
        bucket = stop.table_bucket
        replica = self._buckets.find(*bucket)
        if replica is not None:
            self._close(replica, delete=stop.delete)
            return
        self._forget(bucket)
        refused = self._buckets.forget_refused(bucket)
        if refused is not None and stop.delete:
            self._host.remove(refused.path, bucket)

    def is_old(self, order: ReplicaAssignment | ReplicaStop) -> bool:
        """Whether a later order for the bucket was carried out here: this one is late."""
        bucket = order.table_bucket
        followed = None if self.standbys is None else self.standbys.order_of(bucket)
        known = (self._buckets.find(*bucket), self._orders.get(bucket), followed)
        return any(each is not None and each.leader_epoch > order.leader_epoch for each in known)

    def give_up_one(self, assignment: ReplicaAssignment) -> bool:
        """Lead a bucket no longer, because another server does; whether it is given up.

        It is not if it is led or being opened here in that epoch or a later one: the order is an
        old one.
        """
        bucket = assignment.table_bucket
        replica, led = self._buckets.find(*bucket), self._orders.get(bucket)
        for known in (replica, led):
            if known is not None and known.leader_epoch >= assignment.leader_epoch:
                return False
        if replica is not None:
            reason = NotLeaderError(f"{bucket.named(replica.path)} has another leader now")
            self._close(replica, delete=False, reason=reason)
        self._forget(bucket)
        self._buckets.forget_refused(bucket)
        return True

    def close_others(self, assignments: Sequence[ReplicaAssignment]) -> None:
        """Close every bucket that is not assigned, and delete its files."""
        assigned = {assignment.table_bucket for assignment in assignments}
        for replica in self._buckets.replicas():
            if replica.bucket not in assigned:
                self._close(replica, delete=True)
        self._buckets.forget_all_refused()
        self._remove_others(assignments)

    def _close(self, replica: Replica, *, delete: bool, reason: ZuflussError | None = None) -> None:
        self._closing[replica] = delete
        self._buckets.remove(replica)
        if delete:
            self._forget(replica.bucket)
        self._finish_closing(replica, delete=delete, reason=reason)

    def _forget(self, bucket: TableBucket) -> None:
        self._orders.pop(bucket, None)
        self._lease_ends.pop(bucket, None)

    def _finish_closing(
        self, replica: Replica, *, delete: bool, reason: ZuflussError | None = None
    ) -> None:
        replica.close(delete=delete, reason=reason)
        del self._closing[replica]

    async def give_up(self, reason: ZuflussError) -> None:
        """Close every bucket because this server leads nothing any more; the files stay.

        Nothing is opened by an order that came before: the buckets may be other servers' by now.
        """
        self._orders.clear()
        self._lease_ends.clear()
        for replica in self._buckets.replicas():
            if self._buckets.serves(replica):
                self._close(replica, delete=False, reason=reason)
            await asyncio.sleep(0)  # closing takes a millisecond
        await self.retries.end_all()  # a bucket may have failed since the last ones were ended

    def _remove_others(self, assignments: Sequence[ReplicaAssignment]) -> None:
        """Remove files of buckets that were dropped while this server was away or died.

        The case of names does not count: file systems of macOS list one directory for the databases
        `a` and `A`. Ids make the directories of tables differ.
        """
        logs, kv, data_dir = self._host.logs, self._host.kv, self._data_dir
        places = [(a.physical_path, a.table_bucket) for a in assignments]
        assigned = {caseless(log_directory(data_dir, *place)) for place in places}
        for directory in log_directories(data_dir):
            if caseless(directory) not in assigned and directory.suffix != DELETED_SUFFIX:
                log.info("dropped_log_removed", directory=str(directory))
                self._context.files.remove_tree(directory)
                logs.remove_empty_parents(directory)
        for directory in kv.remove_others({kv.directory(*place) for place in places}):
            log.info("dropped_state_removed", directory=str(directory))
            logs.remove_empty_parents(directory)
