"""Helpers for tests of leases: a fake coordinator, and a clock that is moved by hand."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

from tests.client.fake import FakeCluster
from zufluss.client.connection import AsyncConnection
from zufluss.client.lease.lease import AsyncKvSnapshotLease
from zufluss.errors import KvSnapshotLeaseFencedError, KvSnapshotLeaseNotFoundError, ZuflussError
from zufluss.model.table import TableBucket
from zufluss.wire import messages as m
from zufluss.wire.api import ApiKey

DURATION_MS = 60_000
ANY = 5
"""The number of every snapshot that is leased."""


class Time:
    """Seconds that pass only when a test says so."""

    def __init__(self) -> None:
        self.now = 1_000.0
        self._sleepers: list[tuple[float, asyncio.Future[None]]] = []

    def clock(self) -> float:
        return self.now

    async def sleep(self, seconds: float) -> None:
        woken = asyncio.get_running_loop().create_future()
        self._sleepers.append((self.now + seconds, woken))
        await woken

    async def advance(self, seconds: float, resting: Callable[[], bool]) -> None:
        """Let time pass, in steps from one wake-up to the next; each time until all rest."""
        end = self.now + seconds
        while True:
            while not (self._awaited() or resting()):
                await asyncio.sleep(0.001)
            due = min(self._awaited(), default=None)
            if due is None or due[0] > end:
                self.now = end
                return
            self.now = max(self.now, due[0])
            self._sleepers.remove(due)
            due[1].set_result(None)
            await asyncio.sleep(0)

    def _awaited(self) -> list[tuple[float, asyncio.Future[None]]]:
        self._sleepers = [each for each in self._sleepers if not each[1].done()]
        return self._sleepers


class FakeLeases:
    """The lease calls of a fake cluster; a test sets the leased snapshots."""

    def __init__(self, cluster: FakeCluster) -> None:
        self.epochs: dict[str, int] = {}
        self.asked: list[Any] = []
        """Every request, in order."""
        self.held: dict[TableBucket, int] = {}
        """What an acquire finds, by bucket."""
        self.unavailable: dict[TableBucket, int] = {}
        self.revoked: list[m.PbRevokedSnapshots] = []
        self.problem: ZuflussError | None = None
        """What every call is answered with."""
        self.on_call: Callable[[Any], None] = lambda request: None
        self.silent = False
        """Acquires are done and not answered."""
        self.renewals_unanswered = 0
        """So many renewals are done and not answered."""
        for key, handler in {
            ApiKey.ACQUIRE_LATEST_KV_SNAPSHOT_LEASE: self._acquire,
            ApiKey.RENEW_KV_SNAPSHOT_LEASE: self._renew,
            ApiKey.RELEASE_KV_SNAPSHOT_LEASE: self._release,
            ApiKey.DROP_KV_SNAPSHOT_LEASE: self._drop,
        }.items():
            cluster.handlers[key] = handler

    def of(self, kind: type) -> list[Any]:
        """The requests of one kind."""
        return [request for request in self.asked if isinstance(request, kind)]

    @property
    def renewals(self) -> int:
        return len(self.of(m.RenewKvSnapshotLeaseRequest))

    def _refusal(self, request: Any) -> ZuflussError | None:
        self.asked.append(request)
        self.on_call(request)
        if self.problem is not None:
            return self.problem
        known = self.epochs.get(request.lease_id)
        if isinstance(request, m.DropKvSnapshotLeaseRequest) and known is None:
            return None
        if known is None:
            return KvSnapshotLeaseNotFoundError(f"there is no lease {request.lease_id}")
        if request.HasField("lease_epoch") and request.lease_epoch != known:
            return KvSnapshotLeaseFencedError(f"lease {request.lease_id} has epoch {known}")
        return None

    async def _acquire(self, request: m.AcquireLatestKvSnapshotLeaseRequest) -> Any:
        self.asked.append(request)
        self.on_call(request)
        if self.problem is not None:
            return self.problem
        if not request.targets and request.lease_id not in self.epochs:
            return KvSnapshotLeaseNotFoundError(f"there is no lease {request.lease_id}")
        answer = m.AcquireLatestKvSnapshotLeaseResponse(remaining_ms=request.lease_duration_ms)
        for bucket, number in self.held.items():
            answer.leased.add(
                table_id=bucket.table_id,
                partition_id=bucket.partition_id,
                bucket_ids=[bucket.bucket_id],
                snapshot_ids=[number],
                log_offsets=[14],
            )
        for bucket, reason in self.unavailable.items():
            answer.unavailable.add(
                table_id=bucket.table_id,
                partition_id=bucket.partition_id,
                bucket_ids=[bucket.bucket_id],
                reasons=[reason],
            )
        if self.held:
            answer.lease_epoch = self.epochs.get(request.lease_id, 0) + 1
            self.epochs[request.lease_id] = answer.lease_epoch
        return None if self.silent else answer

    async def _renew(self, request: m.RenewKvSnapshotLeaseRequest) -> Any:
        refusal = self._refusal(request)
        if refusal is not None:
            return refusal
        if self.renewals_unanswered:
            self.renewals_unanswered -= 1
            return None
        return m.RenewKvSnapshotLeaseResponse(
            remaining_ms=request.lease_duration_ms, revoked=self.revoked
        )

    async def _release(self, request: m.ReleaseKvSnapshotLeaseRequest) -> Any:
        return self._refusal(request) or m.ReleaseKvSnapshotLeaseResponse()

    async def _drop(self, request: m.DropKvSnapshotLeaseRequest) -> Any:
        refusal = self._refusal(request)
        if refusal is None:
            self.epochs.pop(request.lease_id, None)
        return refusal or m.DropKvSnapshotLeaseResponse()


class Holder:
    """A lease on the clock of a test."""

    def __init__(self, connection: AsyncConnection, time: Time, lease_id: str = "mine") -> None:
        self.time = time
        self.lease = AsyncKvSnapshotLease(
            connection, lease_id, DURATION_MS, clock=time.clock, sleep=time.sleep
        )

    async def acquire(self, bucket: TableBucket) -> AsyncKvSnapshotLease:
        return await self.lease.acquire([m.PbLeaseTarget(table_id=bucket.table_id)])

    async def advance(self, seconds: float) -> None:
        await self.time.advance(seconds, self._resting)

    def _resting(self) -> bool:
        renewer = self.lease._renewer
        return renewer is None or renewer.done()
