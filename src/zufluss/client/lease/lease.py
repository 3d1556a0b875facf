"""Leases of key-value snapshots: what a reader holds while it reads, so that it stays.

    async with await admin.kv_snapshot_lease("fluss.orders") as lease:
        for bucket in lease.snapshots:
            async with await table.kv_snapshot(bucket, lease=lease) as rows:
                ...

The coordinator finds the latest snapshot of each bucket and pins it in one step. A task on the
connection's loop renews the lease (`core/renewal.py`) until it is closed, which drops it; a
process that is killed leaves it to expire. Losing it is told as what happened, by `check` and by
every reader that has it, before they touch another file:

| what happened | error |
|---|---|
| it expired, or somebody dropped it | `KvSnapshotLeaseNotFoundError` |
| it was not renewed in time, and nobody knows | the same; it may still turn out to be there |
| another client took it over | `KvSnapshotLeaseFencedError` |
| a table or partition in it was dropped | `KvSnapshotRevokedError`, for its buckets |

Whoever calls with the id of a lease takes it over, and fences who had it before. Ids are fresh
unless given, so two readers never share one by accident.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final, Literal, Self, get_args
from uuid import uuid4

from zufluss.client.core.renewal import Clock, Renewals, lasting_clock
from zufluss.client.core.retry import PASSING
from zufluss.client.lease.wire import (
    Duration,
    acquire_request,
    duration_ms_of,
    leased_of,
    release_request,
    revoked_of,
    targets_of,
    unavailable_of,
)
from zufluss.config.values import format_duration
from zufluss.errors import (
    ConfigError,
    KvSnapshotLeaseFencedError,
    KvSnapshotLeaseNotFoundError,
    KvSnapshotNotExistError,
    KvSnapshotRevokedError,
    ZuflussError,
)
from zufluss.model.lease import LeasedSnapshot, Revoked, Unavailable
from zufluss.model.table import TableBucket, TablePath
from zufluss.wire import messages as m
from zufluss.wire.api import ApiKey

if TYPE_CHECKING:
    from zufluss.client.connection import AsyncConnection
    from zufluss.client.sync.connection import LoopThread

log = logging.getLogger(__name__)

LOSSES: Final = (KvSnapshotLeaseNotFoundError, KvSnapshotLeaseFencedError)
"""Answers after which a lease is not ours any more, whatever is tried."""
ABANDON_SECONDS: Final = 1.0
"""How long an acquire that was given up tries to undo what it may have done."""

Sleep = Callable[[float], Awaitable[None]]
IfLost = Literal["error", "latest"]
"""What to do when a lease that is resumed has expired."""


class AsyncKvSnapshotLease:
    """A lease; `await admin.kv_snapshot_lease(…)` makes it. Leaving its block drops it.

    >>> async with await admin.kv_snapshot_lease("fluss.orders") as lease:  # doctest: +SKIP
    ...     print(lease.snapshots)
    """

    def __init__(
        self,
        connection: AsyncConnection,
        lease_id: str,
        duration_ms: int,
        *,
        clock: Clock = lasting_clock,
        sleep: Sleep = asyncio.sleep,
    ) -> None:
        self.lease_id = lease_id
        """Its id; with it another process goes on."""
        self.epoch: int | None = None
        """Each take-over has a higher one; None while it holds nothing."""
        self.snapshots: dict[TableBucket, LeasedSnapshot] = {}
        """What it holds of each bucket; what was revoked is still named here."""
        self.unavailable: dict[TableBucket, Unavailable] = {}
        """Buckets that were asked for and had nothing to lease."""
        self.revoked: list[Revoked] = []
        """What it lost because it was dropped."""
        self.resumed = False
        """Its snapshots are those of an earlier process, not the latest ones."""
        self._connection = connection
        self._duration_ms = duration_ms
        self._clock = clock
        self._sleep = sleep
        self._renewals = Renewals(duration_ms / 1000)
        self._loss: ZuflussError | None = None
        self._calls = asyncio.Lock()
        self._renewer: asyncio.Task[None] | None = None

    # -- getting it ----------------------------------------------------------------------------

    async def acquire(self, targets: Sequence[m.PbLeaseTarget], *, fresh: bool = False) -> Self:
        """Lease the latest snapshots; without targets take over those that the lease has.

        `fresh` says that nobody else knows the id: what an attempt without an answer may have left
        behind is dropped.
        """
        sent_at = self._clock()
        request = acquire_request(self.lease_id, self._duration_ms, targets)
        try:
            answer: m.AcquireLatestKvSnapshotLeaseResponse = await self._call(
                ApiKey.ACQUIRE_LATEST_KV_SNAPSHOT_LEASE, request
            )
        except (ZuflussError, asyncio.CancelledError) as problem:
            if fresh and (not isinstance(problem, ZuflussError) or problem.code in PASSING):
                await self._abandon()
            raise
        self.epoch = answer.lease_epoch if answer.HasField("lease_epoch") else None
        self.snapshots = leased_of(answer.leased)
        self.unavailable = unavailable_of(answer.unavailable)
        self.revoked = revoked_of(answer.revoked)
        self.resumed = not targets
        if self.snapshots:
            self._renewals.succeeded(sent_at, answer.remaining_ms / 1000)
            self._renewer = asyncio.create_task(self._keep())
            self._connection.tasks.add(self._renewer)
            self._renewer.add_done_callback(self._connection.tasks.discard)
        return self

    async def _abandon(self) -> None:
        request = m.DropKvSnapshotLeaseRequest(lease_id=self.lease_id)
        try:
            async with asyncio.timeout(ABANDON_SECONDS):
                await self._call(ApiKey.DROP_KV_SNAPSHOT_LEASE, request)
        except (ZuflussError, TimeoutError) as problem:
            self._tell_left_behind(problem)

    # -- keeping it ----------------------------------------------------------------------------

    @property
    def remaining_ms(self) -> int:
        """How long it lasts at least unless it is renewed; 0 when it may be over."""
        if self._loss is not None or not self.snapshots:
            return 0
        return max(round((self._renewals.deadline - self._clock()) * 1000), 0)

    @property
    def lost(self) -> ZuflussError | None:
        """Why nothing of it can be relied on, None while all is well."""
        if self._loss is not None:
            return type(self._loss)(self._loss.message)
        if self.snapshots and self._renewals.expired(self._clock()):
            return KvSnapshotLeaseNotFoundError(self._expired_text())
        return None

    def check(self, bucket: TableBucket | None = None) -> None:
        """Raise why the lease, or its snapshot of one bucket, cannot be relied on any more."""
        for lost in self.revoked:
            if bucket is None or _covers(lost, bucket):
                raise KvSnapshotRevokedError(
                    f"lease {self.lease_id}: {lost.what} was dropped, and its snapshots with it; "
                    "there is nothing to go on with"
                )
        if (problem := self.lost) is not None:
            raise problem
        if bucket is not None and bucket not in self.snapshots:
            reason = self.unavailable.get(bucket)
            raise KvSnapshotNotExistError(
                f"lease {self.lease_id} holds no snapshot of {bucket}: "
                + ("it was not leased, or released" if reason is None else _REASONS[reason])
            )

    async def renew(self) -> None:
        """Renew it now; raise what keeps it from being renewed."""
        if self._loss is not None:
            raise type(self._loss)(self._loss.message)
        if self.epoch is None:  # it holds nothing
            return
        async with self._calls:
            await self._renew()

    async def verify(self, bucket: TableBucket | None = None) -> None:
        """Ask the coordinator for it, as far as it answers, and `check` what is known then."""
        try:
            await self.renew()
        except ZuflussError as problem:
            log.info("lease %s could not be asked for: %s", self.lease_id, problem)
        self.check(bucket)

    async def release(self, buckets: TableBucket | Iterable[TableBucket]) -> None:
        """Let go of the snapshots of buckets; with the last one the lease is over."""
        gone = {buckets} if isinstance(buckets, TableBucket) else {*buckets}
        if self.epoch is None or not gone:
            return
        async with self._calls:
            request = release_request(self.lease_id, self.epoch, gone)
            await self._tracked(ApiKey.RELEASE_KV_SNAPSHOT_LEASE, request)
            self.snapshots = {b: found for b, found in self.snapshots.items() if b not in gone}
        if not self.snapshots:
            await self._stop()

    async def detach(self) -> None:
        """Renew it once more and leave it to whoever goes on with its id, or to expire."""
        await self.renew()
        await self._stop()
        self._end("it was detached")

    async def close(self) -> None:
        """Drop it. Closing twice is fine, and closing a lease that was lost."""
        await self._stop()
        if self._loss is None and self.epoch is not None:
            request = m.DropKvSnapshotLeaseRequest(lease_id=self.lease_id, lease_epoch=self.epoch)
            with contextlib.suppress(KvSnapshotLeaseFencedError):  # then it is not ours to drop
                await self._call(ApiKey.DROP_KV_SNAPSHOT_LEASE, request)
        self._end("it was closed")

    def _end(self, how: str) -> None:
        if self._loss is None:
            self._loss = KvSnapshotLeaseNotFoundError(
                f"lease {self.lease_id} is not held here any more: {how}"
            )

    # -- the renewer ---------------------------------------------------------------------------

    async def _keep(self) -> None:
        """Renew until it is lost or closed."""
        renewals = self._renewals
        while self._loss is None:
            await self._sleep(renewals.pause(self._clock()))
            try:
                async with asyncio.timeout(renewals.try_seconds), self._calls:
                    if renewals.pause(self._clock()) == 0:  # it was not renewed meanwhile
                        await self._renew()
            except (ZuflussError, TimeoutError) as problem:
                if renewals.problem is None:
                    log.warning("lease %s was not renewed: %s", self.lease_id, problem)
                renewals.failed(self._clock(), problem)

    async def _renew(self) -> None:
        sent_at = self._clock()
        request = m.RenewKvSnapshotLeaseRequest(
            lease_id=self.lease_id, lease_duration_ms=self._duration_ms, lease_epoch=self.epoch
        )
        answer: m.RenewKvSnapshotLeaseResponse = await self._tracked(
            ApiKey.RENEW_KV_SNAPSHOT_LEASE, request
        )
        self.revoked = list(dict.fromkeys([*self.revoked, *revoked_of(answer.revoked)]))
        self._renewals.succeeded(sent_at, answer.remaining_ms / 1000)

    async def _stop(self) -> None:
        renewer, self._renewer = self._renewer, None
        if renewer is not None:
            renewer.cancel()
            await asyncio.gather(renewer, return_exceptions=True)

    # -- calls ---------------------------------------------------------------------------------

    async def _tracked(self, api_key: ApiKey, request: Any) -> Any:
        """A call as the holder of the lease; it may tell that we are not."""
        try:
            return await self._call(api_key, request)
        except LOSSES as loss:
            self._loss = loss
            raise

    async def _call(self, api_key: ApiKey, request: Any) -> Any:
        return await self._connection.call_coordinator(api_key, request)

    def _expired_text(self) -> str:
        duration = format_duration(self._duration_ms)
        why = self._renewals.problem
        return (
            f"lease {self.lease_id} was not renewed for {duration} and may have expired, so its "
            "snapshots may be gone; begin again with the latest ones, or take a longer duration"
            + ("" if why is None else f". The last try failed: {why or type(why).__name__}")
        )

    def _tell_left_behind(self, problem: Exception) -> None:
        log.warning(
            "lease %s was not dropped and is left to expire after %s: %s",
            self.lease_id,
            format_duration(self._duration_ms),
            problem or type(problem).__name__,
        )

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exc: object) -> None:
        """Drop it; where that fails it expires, which is no failure of what the block did."""
        try:
            await self.close()
        except ZuflussError as problem:
            self._tell_left_behind(problem)

    def __repr__(self) -> str:
        state = "lost" if self.lost else f"{len(self.snapshots)} snapshots"
        return f"<AsyncKvSnapshotLease {self.lease_id}, epoch {self.epoch}, {state}>"


async def open_lease(
    connection: AsyncConnection,
    tables: Sequence[TablePath],
    partition: str | Mapping[str, str] | None,
    buckets: Iterable[int | TableBucket] | None,
    duration: Duration,
    lease_id: str | None,
    resume: bool,
    if_lost: IfLost,
) -> AsyncKvSnapshotLease:
    """What `admin.kv_snapshot_lease` does."""
    if if_lost not in get_args(IfLost):
        raise ConfigError(f"if_lost {if_lost!r} is none of {', '.join(get_args(IfLost))}")
    if lease_id is None and (resume or if_lost != "error"):
        raise ConfigError("resume and if_lost are about a lease that is there: name its lease_id")
    name = str(uuid4()) if lease_id is None else lease_id
    lease = AsyncKvSnapshotLease(connection, name, duration_ms_of(duration))
    if resume:
        try:
            return await lease.acquire([])
        except KvSnapshotLeaseNotFoundError:
            if if_lost == "error":
                raise
    targets = await targets_of(connection, tables, partition, buckets)
    return await lease.acquire(targets, fresh=lease_id is None)


class KvSnapshotLease:
    """A lease; `admin.kv_snapshot_lease(…)` makes it. Leaving its block drops it.

    Each method does what the method of the same name of `AsyncKvSnapshotLease` does, and waits for
    it. The lease is renewed in the background whatever the caller's thread does.

    >>> with admin.kv_snapshot_lease("fluss.orders") as lease:  # doctest: +SKIP
    ...     for bucket in lease.snapshots:
    ...         with table.kv_snapshot(bucket, lease=lease) as reader:
    ...             print(sum(batch.num_rows for batch in reader))
    """

    def __init__(self, thread: LoopThread, lease: AsyncKvSnapshotLease) -> None:
        self._thread = thread
        self.lease = lease
        """The lease on the connection's own loop."""
        self.lease_id = lease.lease_id
        """Its id; with it another process goes on."""
        self.resumed = lease.resumed
        """Its snapshots are those of an earlier process, not the latest ones."""

    @property
    def epoch(self) -> int | None:
        """Each take-over has a higher one; None while it holds nothing."""
        return self.lease.epoch

    @property
    def snapshots(self) -> Mapping[TableBucket, LeasedSnapshot]:
        """What it holds of each bucket; what was revoked is still named here."""
        return self.lease.snapshots

    @property
    def unavailable(self) -> Mapping[TableBucket, Unavailable]:
        """Buckets that were asked for and had nothing to lease."""
        return self.lease.unavailable

    @property
    def revoked(self) -> Sequence[Revoked]:
        """What it lost because it was dropped."""
        return self.lease.revoked

    @property
    def remaining_ms(self) -> int:
        """How long it lasts at least unless it is renewed; 0 when it may be over."""
        return self.lease.remaining_ms

    @property
    def lost(self) -> ZuflussError | None:
        """Why nothing of it can be relied on, None while all is well."""
        return self.lease.lost

    def check(self, bucket: TableBucket | None = None) -> None:
        """Raise why the lease, or its snapshot of one bucket, cannot be relied on any more."""
        self.lease.check(bucket)

    def renew(self) -> None:
        """Renew it now; raise what keeps it from being renewed."""
        self._thread.run(self.lease.renew())

    def verify(self, bucket: TableBucket | None = None) -> None:
        """Ask the coordinator for it, as far as it answers, and `check` what is known then."""
        self._thread.run(self.lease.verify(bucket))

    def release(self, buckets: TableBucket | Iterable[TableBucket]) -> None:
        """Let go of the snapshots of buckets; with the last one the lease is over."""
        self._thread.run(self.lease.release(buckets))

    def detach(self) -> None:
        """Renew it once more and leave it to whoever goes on with its id, or to expire."""
        self._thread.run(self.lease.detach())

    def close(self) -> None:
        """Drop it. Closing twice is fine, and closing a lease that was lost."""
        self._thread.run(self.lease.close())

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self._thread.run(self.lease.__aexit__(*exc))

    def __repr__(self) -> str:
        return repr(self.lease).replace("Async", "", 1)


_REASONS: Final = {
    Unavailable.NO_BUCKET: "there is no such bucket or partition",
    Unavailable.NO_SNAPSHOT: "it has none yet; its changelog has everything, from the beginning",
    Unavailable.GONE: "it is not kept any more",
}


def _covers(lost: Revoked, bucket: TableBucket) -> bool:
    return lost.table_id == bucket.table_id and lost.partition_id in (None, bucket.partition_id)
