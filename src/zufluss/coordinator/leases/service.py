"""Handlers of leases of key-value snapshots: Fluss's three calls, and ours.

| API | answer |
|---|---|
| ACQUIRE_KV_SNAPSHOT_LEASE (1056) | the snapshots that could not be leased, and why |
| RELEASE_KV_SNAPSHOT_LEASE (1057) | nothing |
| DROP_KV_SNAPSHOT_LEASE (1058) | nothing |
| ACQUIRE_LATEST_KV_SNAPSHOT_LEASE (30020) | the latest snapshots of buckets, tables, partitions |
| RENEW_KV_SNAPSHOT_LEASE (30021) | how long the lease lasts, and its revocations |
| LIST_KV_SNAPSHOT_LEASES (30022) | all leases, or one with its snapshots |

`leases/calls.py` says what a call does to a lease. The handlers check that tables exist, have a
primary key, and may be read by the caller: all tables that an acquire names, and all tables of a
lease that is dropped. One table that fails the check fails the whole call. A request may name
100,000 buckets and more, so messages are read and filled in pieces, between which other tasks run.
"""

from __future__ import annotations

from collections.abc import (
    AsyncIterator,
    Callable,
    Iterable,
    Iterator,
    Mapping,
    Sequence,
    Set,
)
from itertools import islice
from typing import TYPE_CHECKING, Final, TypeVar

from zufluss.cluster.authority import Authority
from zufluss.cluster.image import ClusterImage
from zufluss.cluster.token_service import MayRead, everybody
from zufluss.coordinator.leases.calls import LeaseCalls
from zufluss.coordinator.leases.rules import AcquireResult, LeaseInfo, check_lease_id
from zufluss.errors import (
    AuthorizationError,
    ConfigError,
    KvSnapshotLeaseNotFoundError,
)
from zufluss.model.lease import LeasedSnapshot, Revoked, Unavailable
from zufluss.model.table import TableBucket
from zufluss.pacing import Pace, paced
from zufluss.wire import messages as m
from zufluss.wire.tables import bucket_from_proto, bucket_in_table

if TYPE_CHECKING:
    from zufluss.net.services import RequestContext

BUCKETS_MAX: Final = 1_000_000
"""Buckets that one request may name, those of each partition counted."""
BUCKETS_AT_ONCE: Final = 4096
"""Buckets of a message that are handled before other tasks run."""

T = TypeVar("T")


class LeaseService:
    """Handlers of the APIs of leases."""

    def __init__(
        self,
        leases: LeaseCalls,
        image: ClusterImage,
        authority: Authority,
        may_read: MayRead = everybody,
    ) -> None:
        self._leases = leases
        self._image = image
        self._authority = authority
        self._may_read = may_read

    async def acquire_kv_snapshot_lease(
        self, request: m.AcquireKvSnapshotLeaseRequest, ctx: RequestContext
    ) -> m.AcquireKvSnapshotLeaseResponse:
        """ACQUIRE_KV_SNAPSHOT_LEASE (1056): a call without snapshots renews the lease."""
        check_lease_id(request.lease_id)
        table_ids = {each.table_id async for each in paced(request.snapshots_to_lease)}
        self._check_tables(table_ids, ctx.principal)
        snapshot_ids = await _snapshot_ids(request.snapshots_to_lease, self._image.name_of)
        acquired = await self._leases.acquire(
            request.lease_id,
            request.lease_duration_ms,
            snapshot_ids,
            principal=ctx.principal,
            epoch=_epoch(request),
        )
        return m.AcquireKvSnapshotLeaseResponse(
            lease_epoch=acquired.epoch,
            unavailable_snapshots=await _not_leased(acquired.unavailable, snapshot_ids),
        )

    async def acquire_latest_kv_snapshot_lease(
        self, request: m.AcquireLatestKvSnapshotLeaseRequest, ctx: RequestContext
    ) -> m.AcquireLatestKvSnapshotLeaseResponse:
        """ACQUIRE_LATEST_KV_SNAPSHOT_LEASE (30020): without targets, take over and renew."""
        check_lease_id(request.lease_id)
        table_ids = {target.table_id async for target in paced(request.targets)}
        self._check_tables(table_ids, ctx.principal)
        buckets: dict[TableBucket, None] = {}
        named = 0  # a bucket that is named twice is work, too
        async for target in paced(request.targets):
            async for some in _in_pieces(self._buckets(target)):
                buckets |= dict.fromkeys(some)
                named += len(some)
                if named > BUCKETS_MAX:
                    raise ConfigError(
                        f"the request names more than {BUCKETS_MAX} buckets; lease some tables or "
                        "partitions at a time"
                    )
        acquired = await self._latest(request, list(buckets), ctx.principal)
        return m.AcquireLatestKvSnapshotLeaseResponse(
            lease_epoch=acquired.epoch,
            remaining_ms=acquired.remaining_ms,
            leased=await _leased(acquired.leased),
            unavailable=await _unavailable(acquired.unavailable),
            revoked=_revoked(acquired.revoked),
        )

    async def _latest(
        self,
        request: m.AcquireLatestKvSnapshotLeaseRequest,
        buckets: Sequence[TableBucket],
        principal: str | None,
    ) -> AcquireResult:
        try:
            acquired = await self._leases.acquire_latest(
                request.lease_id,
                request.lease_duration_ms,
                buckets,
                principal=principal,
                epoch=_epoch(request),
            )
        except KvSnapshotLeaseNotFoundError:
            if buckets or not request.targets:
                raise
            return AcquireResult(None, 0)  # tables without a partition: there is nothing to lease
        if request.targets and not buckets:
            return AcquireResult(acquired.epoch, acquired.remaining_ms, revoked=acquired.revoked)
        return acquired

    async def renew_kv_snapshot_lease(
        self, request: m.RenewKvSnapshotLeaseRequest, ctx: RequestContext
    ) -> m.RenewKvSnapshotLeaseResponse:
        """RENEW_KV_SNAPSHOT_LEASE (30021)."""
        renewed = await self._leases.renew(
            request.lease_id,
            request.lease_duration_ms,
            principal=ctx.principal,
            epoch=_epoch(request),
        )
        return m.RenewKvSnapshotLeaseResponse(
            remaining_ms=renewed.remaining_ms, revoked=_revoked(renewed.revoked)
        )

    async def release_kv_snapshot_lease(
        self, request: m.ReleaseKvSnapshotLeaseRequest, ctx: RequestContext
    ) -> m.ReleaseKvSnapshotLeaseResponse:
        """RELEASE_KV_SNAPSHOT_LEASE (1057): buckets that the lease does not have are ignored."""
        buckets: list[TableBucket] = []
        async for some in _in_pieces(request.buckets_to_release):
            buckets += map(bucket_from_proto, some)
        await self._leases.release(
            request.lease_id, buckets, principal=ctx.principal, epoch=_epoch(request)
        )
        return m.ReleaseKvSnapshotLeaseResponse()

    async def drop_kv_snapshot_lease(
        self, request: m.DropKvSnapshotLeaseRequest, ctx: RequestContext
    ) -> m.DropKvSnapshotLeaseResponse:
        """DROP_KV_SNAPSHOT_LEASE (1058): a lease that does not exist is ignored."""
        check_lease_id(request.lease_id)
        self._check_readable(self._leases.book.tables(request.lease_id), ctx.principal)
        await self._leases.drop(request.lease_id, principal=ctx.principal, epoch=_epoch(request))
        return m.DropKvSnapshotLeaseResponse()

    async def list_kv_snapshot_leases(
        self, request: m.ListKvSnapshotLeasesRequest, ctx: RequestContext
    ) -> m.ListKvSnapshotLeasesResponse:
        """LIST_KV_SNAPSHOT_LEASES (30022): an empty list for an unknown id."""
        one = check_lease_id(request.lease_id) if request.HasField("lease_id") else None
        response = m.ListKvSnapshotLeasesResponse()
        async for some in _in_pieces(self._leases.book.infos(one)):
            for lease in some:
                response.leases.append(await self._lease(lease))
        return response

    async def _lease(self, lease: LeaseInfo) -> m.PbLease:
        tables = [
            m.PbLeaseTable(
                table_id=table_id,
                table=self._name(table_id),
                snapshots=share.snapshots,
                bytes=share.bytes,
            )
            for table_id, share in lease.tables.items()
        ]
        return m.PbLease(
            lease_id=lease.lease_id,
            owner=lease.owner,
            lease_epoch=lease.epoch,
            duration_ms=lease.duration_ms,
            remaining_ms=lease.remaining_ms,
            age_ms=lease.age_ms,
            tables=tables,
            leased=await _leased(lease.leased),
            revoked=_revoked(lease.revoked),
            damage=lease.damage,
        )

    # Tables

    def _name(self, table_id: int) -> str | None:
        entry = self._image.table_by_id(table_id)
        return None if entry is None else str(entry.info.path)

    def _check_tables(self, table_ids: Set[int], principal: str | None) -> None:
        """Raise for tables without snapshots, or that the principal may not read."""
        self._leases.check_tables(table_ids)
        self._check_readable(table_ids, principal)

    def _check_readable(self, table_ids: Iterable[int], principal: str | None) -> None:
        if self._authority.is_super(principal):
            return
        for entry in filter(None, map(self._image.table_by_id, table_ids)):
            if not self._may_read(principal, entry.info.path):
                raise AuthorizationError(
                    f"{principal or 'an unknown user'} may not read table {entry.info.path}"
                )

    def _buckets(self, target: m.PbLeaseTarget) -> Iterator[TableBucket]:
        """The buckets that a target names, whether they exist or not."""
        entry = self._image.table_by_id(target.table_id)
        if entry is None:  # the table was dropped while other tasks ran
            return
        partitions: list[int | None] = [None]
        if target.HasField("partition_id"):
            partitions = [target.partition_id]
        elif entry.info.is_partitioned:
            known = self._image.partitions(target.table_id).values()
            partitions = [partition.partition_id for partition in known]
        for partition_id in partitions:
            for bucket_id in target.bucket_ids or range(entry.info.bucket_count):
                yield TableBucket(target.table_id, partition_id, bucket_id)


def _epoch(
    request: m.AcquireKvSnapshotLeaseRequest
    | m.AcquireLatestKvSnapshotLeaseRequest
    | m.RenewKvSnapshotLeaseRequest
    | m.ReleaseKvSnapshotLeaseRequest
    | m.DropKvSnapshotLeaseRequest,
) -> int | None:
    return request.lease_epoch if request.HasField("lease_epoch") else None


async def _in_pieces(items: Iterable[T]) -> AsyncIterator[tuple[T, ...]]:
    """Yield the items in pieces, and let other tasks run in between."""
    pace, rest = Pace.current(), iter(items)
    while piece := tuple(islice(rest, BUCKETS_AT_ONCE)):
        yield piece
        await pace.pause()


async def _snapshot_ids(
    tables: Iterable[m.PbKvSnapshotLeaseForTable], name_of: Callable[[TableBucket], str]
) -> dict[TableBucket, int]:
    """The snapshot id that a request names for each bucket."""
    snapshot_ids: dict[TableBucket, int] = {}
    async for table in paced(tables):
        async for some in _in_pieces(table.bucket_snapshots):
            for each in some:
                bucket = bucket_in_table(table.table_id, each)
                if snapshot_ids.setdefault(bucket, each.snapshot_id) != each.snapshot_id:
                    raise ConfigError(
                        f"snapshots {snapshot_ids[bucket]} and {each.snapshot_id} of "
                        f"{name_of(bucket)} are asked for; a lease has one snapshot of a bucket, "
                        "take another lease"
                    )
    return snapshot_ids


async def _not_leased(
    unavailable: Mapping[TableBucket, Unavailable], snapshot_ids: Mapping[TableBucket, int]
) -> list[m.PbKvSnapshotLeaseForTable]:
    tables: dict[int, m.PbKvSnapshotLeaseForTable] = {}
    async for some in _in_pieces(tuple(unavailable.items())):
        for bucket, reason in some:
            table = tables.get(bucket.table_id)
            if table is None:
                table = m.PbKvSnapshotLeaseForTable(table_id=bucket.table_id)
                tables[bucket.table_id] = table
            table.bucket_snapshots.add(
                partition_id=bucket.partition_id,
                bucket_id=bucket.bucket_id,
                snapshot_id=snapshot_ids[bucket],
                unavailable=reason,
            )
    return list(tables.values())


async def _leased(leased: Mapping[TableBucket, LeasedSnapshot]) -> list[m.PbLeasedSnapshots]:
    owners: dict[tuple[int, int | None], m.PbLeasedSnapshots] = {}
    async for some in _in_pieces(tuple(leased.items())):
        for (table_id, partition_id, bucket_id), snapshot in some:
            columns = owners.get((table_id, partition_id))
            if columns is None:
                columns = m.PbLeasedSnapshots(table_id=table_id, partition_id=partition_id)
                owners[table_id, partition_id] = columns
            columns.bucket_ids.append(bucket_id)
            columns.snapshot_ids.append(snapshot.snapshot_id)
            columns.log_offsets.append(snapshot.log_offset)
    return list(owners.values())


async def _unavailable(
    unavailable: Mapping[TableBucket, Unavailable],
) -> list[m.PbUnavailableSnapshots]:
    owners: dict[tuple[int, int | None], m.PbUnavailableSnapshots] = {}
    async for some in _in_pieces(tuple(unavailable.items())):
        for (table_id, partition_id, bucket_id), reason in some:
            columns = owners.get((table_id, partition_id))
            if columns is None:
                columns = m.PbUnavailableSnapshots(table_id=table_id, partition_id=partition_id)
                owners[table_id, partition_id] = columns
            columns.bucket_ids.append(bucket_id)
            columns.reasons.append(reason)
    return list(owners.values())


def _revoked(revoked: Iterable[Revoked]) -> list[m.PbRevokedSnapshots]:
    return [
        m.PbRevokedSnapshots(table_id=each.table_id, partition_id=each.partition_id, what=each.what)
        for each in revoked
    ]
