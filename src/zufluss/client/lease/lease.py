"""Leases of key-value snapshots: a lease keeps snapshots from being deleted while they are read.

    async with await admin.kv_snapshot_lease("fluss.orders") as lease:
        for bucket in lease.snapshots:
            async with await table.kv_snapshot(bucket, lease=lease) as rows:
                ...

The coordinator finds the latest snapshot of each bucket and pins it in one step. A task on the
connection's loop renews the lease (`core/renewal.py`) until `close` drops it. The lease of a killed
process expires. `check`, and every reader that uses the lease, raise how it was lost before they
touch another file:

| event | error |
|---|---|
| the lease expired, or somebody dropped it | `KvSnapshotLeaseNotFoundError` |
| it was not renewed in time | the same; a later renewal may still succeed |
| another client took it over | `KvSnapshotLeaseFencedError` |
| a table or partition in it was dropped | `KvSnapshotRevokedError`, for its buckets |

A client that acquires an existing lease id takes the lease over and fences its previous holder.
Ids are random unless given, so two readers never share one by accident.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable, Iterable, Sequence
from typing import Any, Final, Literal, Self, get_args
from uuid import uuid4

from zufluss.client.core.catalog import Partition
from zufluss.client.core.cluster import ClusterConnection, Path, as_path
from zufluss.client.core.durations import Duration, duration_ms_of
from zufluss.client.core.renewal import Clock, Renewals
from zufluss.client.core.retry import PASSING
from zufluss.client.lease.wire import (
    acquire_request,
    leased_of,
    release_request,
    revoked_of,
    targets_of,
    unavailable_of,
)
from zufluss.clock import uptime_seconds
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

log = logging.getLogger(__name__)

LOSSES: Final = (KvSnapshotLeaseNotFoundError, KvSnapshotLeaseFencedError)
"""Answers that say that this client does not hold the lease any more."""
ABANDON_SECONDS: Final = 1.0
"""How long a cancelled or failed acquire tries to drop the lease it may have created."""

Sleep = Callable[[float], Awaitable[None]]
IfLost = Literal["error", "latest"]
"""What to do if a lease to be resumed has expired: raise, or lease the latest snapshots."""


class AsyncKvSnapshotLease:
    """A lease of key-value snapshots; `await admin.kv_snapshot_lease(…)` opens it.

    Leaving its block drops the lease.

    >>> async with await admin.kv_snapshot_lease("fluss.orders") as lease:  # doctest: +SKIP
    ...     print(lease.snapshots)
    """

    def __init__(
        self,
        connection: ClusterConnection,
        lease_id: str,
        duration_ms: int,
        *,
        clock: Clock = uptime_seconds,
        sleep: Sleep = asyncio.sleep,
    ) -> None:
        self.lease_id = lease_id
        """The lease's id; another process can take the lease over with it."""
        self.epoch: int | None = None
        """Grows with each take-over; None while the lease holds nothing."""
        self.snapshots: dict[TableBucket, LeasedSnapshot] = {}
        """The leased snapshot of each bucket, revoked ones included."""
        self.unavailable: dict[TableBucket, Unavailable] = {}
        """Requested buckets that had no snapshot, with the reason."""
        self.revoked: list[Revoked] = []
        """Tables and partitions that were dropped, with their leased snapshots."""
        self.resumed = False
        """True if the snapshots were taken over from an earlier process."""
        self._connection = connection
        self._duration_ms = duration_ms
        self._clock = clock
        self._sleep = sleep
        self._renewals = Renewals(duration_ms / 1000)
        self._loss: ZuflussError | None = None
        self._calls = asyncio.Lock()
        self._renewer: asyncio.Task[None] | None = None

    # -- acquiring ----------------------------------------------------------------------------

    async def acquire(self, targets: Sequence[m.PbLeaseTarget], *, fresh: bool = False) -> Self:
        """Lease the latest snapshots of the targets; without targets take the lease over.

        `fresh` says that nobody else knows the id, so a lease that may have been created by an
        unanswered request is dropped.
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

    # -- holding ------------------------------------------------------------------------------

    @property
    def remaining_ms(self) -> int:
        """Milliseconds until the lease may expire unless it is renewed; 0 when it may have."""
        if self._loss is not None or not self.snapshots:
            return 0
        return max(round((self._renewals.deadline - self._clock()) * 1000), 0)

    @property
    def lost(self) -> ZuflussError | None:
        """The error that tells how the lease was lost; None while it is held."""
        if self._loss is not None:
            return type(self._loss)(self._loss.message)
        if self.snapshots and self._renewals.expired(self._clock()):
            return KvSnapshotLeaseNotFoundError(self._expired_text())
        return None

    def check(self, bucket: TableBucket | None = None) -> None:
        """Raise if the lease was lost, or does not hold a snapshot of `bucket`."""
        for lost in self.revoked:
            if bucket is None or _covers(lost, bucket):
                raise KvSnapshotRevokedError(
                    f"lease {self.lease_id}: {lost.what} was dropped or lost, and its snapshots "
                    "with it; they cannot be read any more"
                )
        if (problem := self.lost) is not None:
            raise problem
        if bucket is not None and bucket not in self.snapshots:
            reason = self.unavailable.get(bucket)
            raise KvSnapshotNotExistError(
                f"lease {self.lease_id} holds no snapshot of "
                f"{self._connection.metadata.name_of(bucket)}: "
                + ("it was not leased, or released" if reason is None else _REASONS[reason])
            )

    async def renew(self) -> None:
        """Renew the lease now; raises why it cannot be renewed."""
        if self._loss is not None:
            raise type(self._loss)(self._loss.message)
        if self.epoch is None:  # the lease holds nothing
            return
        async with self._calls:
            await self._renew()

    async def verify(self, bucket: TableBucket | None = None) -> None:
        """Renew the lease if the coordinator answers, then `check` it."""
        try:
            await self.renew()
        except ZuflussError as problem:
            log.info("lease %s could not be verified: %s", self.lease_id, problem)
        self.check(bucket)

    async def release(self, buckets: TableBucket | Iterable[TableBucket]) -> None:
        """Release the snapshots of some buckets; releasing the last one ends the lease."""
        released = {buckets} if isinstance(buckets, TableBucket) else {*buckets}
        if self.epoch is None or not released:
            return
        async with self._calls:
            request = release_request(self.lease_id, self.epoch, released)
            await self._tracked(ApiKey.RELEASE_KV_SNAPSHOT_LEASE, request)
            self.snapshots = {
                bucket: snapshot
                for bucket, snapshot in self.snapshots.items()
                if bucket not in released
            }
        if not self.snapshots:
            await self._stop()

    async def detach(self) -> None:
        """Renew the lease once more, then stop: a process that has the id can resume it."""
        await self.renew()
        await self._stop()
        self._end("it was detached")

    async def close(self) -> None:
        """Drop the lease. Closing twice, or after a loss, is no error."""
        await self._stop()
        if self._loss is None and self.epoch is not None:
            request = m.DropKvSnapshotLeaseRequest(lease_id=self.lease_id, lease_epoch=self.epoch)
            with contextlib.suppress(KvSnapshotLeaseFencedError):  # another client holds it now
                await self._call(ApiKey.DROP_KV_SNAPSHOT_LEASE, request)
        self._end("it was closed")

    def _end(self, how: str) -> None:
        if self._loss is None:
            self._loss = KvSnapshotLeaseNotFoundError(
                f"lease {self.lease_id} is not held here any more: {how}"
            )

    # -- the renewer ---------------------------------------------------------------------------

    async def _keep(self) -> None:
        """Renew the lease until it is lost or closed."""
        renewals = self._renewals
        while self._loss is None:
            await self._sleep(renewals.pause(self._clock()))
            try:
                async with asyncio.timeout(renewals.try_seconds), self._calls:
                    if renewals.pause(self._clock()) == 0:  # nobody renewed it meanwhile
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
        """Call as the holder of the lease; remember the answer that we do not hold it."""
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
        """Drop the lease. If that fails it expires, which is no failure of the block."""
        try:
            await self.close()
        except ZuflussError as problem:
            self._tell_left_behind(problem)

    def __repr__(self) -> str:
        state = "lost" if self.lost else f"{len(self.snapshots)} snapshots"
        return f"<AsyncKvSnapshotLease {self.lease_id}, epoch {self.epoch}, {state}>"


async def open_lease(
    connection: ClusterConnection,
    tables: Path | Iterable[Path] = (),
    *,
    partition: Partition | None = None,
    buckets: Iterable[int | TableBucket] | None = None,
    duration: Duration = "1d",
    lease_id: str | None = None,
    resume: bool = False,
    if_lost: IfLost = "error",
) -> AsyncKvSnapshotLease:
    """Open a lease; see `AsyncAdmin.kv_snapshot_lease` for the arguments."""
    if if_lost not in get_args(IfLost):
        raise ConfigError(f"if_lost {if_lost!r} is none of {', '.join(get_args(IfLost))}")
    if lease_id is None and (resume or if_lost != "error"):
        raise ConfigError("resume and if_lost are for an existing lease: name its lease_id")
    name = str(uuid4()) if lease_id is None else lease_id
    lease = AsyncKvSnapshotLease(connection, name, duration_ms_of(duration))
    if resume:
        try:
            return await lease.acquire([])
        except KvSnapshotLeaseNotFoundError:
            if if_lost == "error":
                raise
    paths = [tables] if isinstance(tables, (str, TablePath)) else tables
    targets = await targets_of(connection, [as_path(path) for path in paths], partition, buckets)
    return await lease.acquire(targets, fresh=lease_id is None)


_REASONS: Final = {
    Unavailable.NO_BUCKET: "the bucket or partition does not exist",
    Unavailable.NO_SNAPSHOT: "it has none yet; read its changelog from the beginning",
    Unavailable.GONE: "its snapshot is not kept any more",
}


def _covers(lost: Revoked, bucket: TableBucket) -> bool:
    return lost.table_id == bucket.table_id and lost.partition_id in (None, bucket.partition_id)
