"""The bytes that only leases keep: by table, by owner, and by lease.

A lease costs the files that its snapshots have and that no retained snapshot has: the newest
`kv.snapshot.num-retained` of each bucket are kept without any lease. A file that several snapshots
share is counted once.

| number | files |
|---|---|
| held by a table | those that at least one lease keeps |
| held by an owner, or by a lease | those that it keeps, maybe together with others |
| freed by an owner, or by a lease | those that nobody else keeps: the bytes that a drop frees |

Snapshots of a bucket share files with each other only, so the sums of buckets add up, and a long
count is answered in parts. Of a dropped table or partition all files stay while a lease holds one
snapshot of it (`remote/held_drops.py`). A damaged lease keeps every snapshot that it may hold. The
lists of files are read from remote storage; a snapshot whose list cannot be read is not counted,
and the answer says how many there are.
"""

from __future__ import annotations

import asyncio
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final, NamedTuple, TypeVar

from zufluss.cluster.image import ClusterImage
from zufluss.cluster.remote import SnapshotHandle
from zufluss.coordinator.bucket_remotes import BucketRemotes
from zufluss.coordinator.leases.book import LeaseBook
from zufluss.coordinator.leases.rules import Lease
from zufluss.coordinator.remote.held_drops import HeldDrops
from zufluss.coordinator.remote.kv_snapshots import KvSnapshots
from zufluss.errors import ZuflussError
from zufluss.model.table import TableBucket
from zufluss.remote.files import RemoteFile
from zufluss.wire import messages as m

if TYPE_CHECKING:
    from zufluss.net.services import RequestContext

READ_AT_ONCE: Final = 8
"""Buckets whose lists of files are read concurrently."""
READ_SECONDS: Final = 5.0
"""How long a list of files is waited for."""
ANSWER_SECONDS: Final = 2.0
"""How long a count runs before it answers with its sums so far."""
BUCKETS_AT_ONCE: Final = 2_000
"""Pins that are looked at before other tasks get their turn on the event loop."""

K = TypeVar("K", bound=Hashable)


class HeldBytes(NamedTuple):
    """Bytes that leases keep."""

    held: int = 0
    """Bytes of files that no retained snapshot has."""
    freed: int = 0
    """Bytes of the held files that no other lease keeps: dropping the leases frees them."""
    uncounted: int = 0
    """Snapshots whose files are not counted."""

    def plus(self, other: HeldBytes) -> HeldBytes:
        """Return the sum of both."""
        return HeldBytes(*map(sum, zip(self, other, strict=True)))


@dataclass(slots=True)
class LeaseUsage:
    """Sums over some buckets."""

    tables: dict[int, HeldBytes] = field(default_factory=dict)
    """By table id."""
    owners: dict[tuple[int, str | None], HeldBytes] = field(default_factory=dict)
    """By table id and owner."""
    leases: dict[tuple[int, str], HeldBytes] = field(default_factory=dict)
    """By table id and lease id."""

    def add(self, table_id: int, part: BucketUsage, owner_of: Mapping[str, str | None]) -> None:
        """Add the files of a bucket, or of a dropped table."""
        holders = part.holders
        total = sum(size for size, _ in holders)
        _add(self.tables, table_id, HeldBytes(total, total, part.uncounted))
        for lease_id in part.lease_ids:
            keeps = [size for size, ids in holders if lease_id in ids]
            alone = [size for size, ids in holders if ids == {lease_id}]
            used = HeldBytes(sum(keeps), sum(alone), part.uncounted)
            _add(self.leases, (table_id, lease_id), used)
        for owner in {owner_of[lease_id] for lease_id in part.lease_ids}:
            own = {lease_id for lease_id in part.lease_ids if owner_of[lease_id] == owner}
            keeps = [size for size, ids in holders if ids & own]
            alone = [size for size, ids in holders if ids <= own]
            used = HeldBytes(sum(keeps), sum(alone), part.uncounted)
            _add(self.owners, (table_id, owner), used)


class BucketUsage(NamedTuple):
    """The files of one bucket, or of a dropped table, that only leases keep."""

    holders: list[tuple[int, set[str]]]
    """Of each file its size and the ids of the leases that keep it."""
    lease_ids: set[str]
    """The leases that keep files of the bucket."""
    uncounted: int = 0
    """Snapshots whose files could not be read."""


def bucket_usage(
    kept: Iterable[RemoteFile],
    leased: Iterable[tuple[Iterable[RemoteFile], set[str]]],
    uncounted: int = 0,
) -> BucketUsage:
    """The files that only leases keep: of leased snapshots, and not of kept ones."""
    names = {(file.location_id, file.path) for file in kept}
    holders: dict[tuple[int, str], tuple[int, set[str]]] = {}
    lease_ids: set[str] = set()
    for files, ids in leased:
        lease_ids |= ids
        for file in files:
            name = file.location_id, file.path
            if name not in names:
                holders.setdefault(name, (file.size, set()))[1].update(ids)
    return BucketUsage(list(holders.values()), lease_ids, uncounted)


class LeaseUsageService:
    """Handler of GET_KV_SNAPSHOT_LEASE_USAGE."""

    def __init__(
        self,
        image: ClusterImage,
        remotes: BucketRemotes,
        snapshots: KvSnapshots,
        book: LeaseBook,
        held: HeldDrops,
    ) -> None:
        self._image = image
        self._remotes = remotes
        self._snapshots = snapshots
        self._book = book
        self._held = held

    async def get_kv_snapshot_lease_usage(
        self, request: m.GetKvSnapshotLeaseUsageRequest, ctx: RequestContext
    ) -> m.GetKvSnapshotLeaseUsageResponse:
        """GET_KV_SNAPSHOT_LEASE_USAGE (30023): as many buckets as fit into a moment."""
        loop = asyncio.get_running_loop()
        end = loop.time() + ANSWER_SECONDS
        usage, after = LeaseUsage(), request.after
        for table_id in sorted(self._leased_tables()):
            if _end_key(table_id) < after:
                continue
            buckets = [b for b in await self._leased(table_id) if _key(b) > after]
            for at in range(0, len(buckets), READ_AT_ONCE):
                some = buckets[at : at + READ_AT_ONCE]
                await self._count(table_id, some, usage)
                after = _key(some[-1])
                if loop.time() >= end:
                    return self._answer(usage, after)
        self._count_drops(usage)
        return self._answer(usage, None)

    # -- counting -----------------------------------------------------------------------------

    def _leased_tables(self) -> set[int]:
        leases = self._book.leases.values()
        if any(lease.holds_all for lease in leases):
            return {entry.info.table_id for entry in self._image.tables()}
        return {i for lease in leases for i in (*lease.tables, *lease.unreadable)}

    async def _leased(self, table_id: int) -> list[TableBucket]:
        """The buckets of a table with snapshots that only leases keep, in order."""
        buckets: list[TableBucket] = []
        records = self._remotes.of_table(table_id)
        for at, (bucket, record) in enumerate(records, 1):
            if self._snapshots.newest(record.snapshots) != record.snapshots:
                buckets.append(bucket)
            if at % BUCKETS_AT_ONCE == 0:
                await asyncio.sleep(0)
        return sorted(buckets, key=_key)

    async def _count(
        self, table_id: int, buckets: Sequence[TableBucket], usage: LeaseUsage
    ) -> None:
        leases = [x for x in self._book.leases.values() if _may_hold(x, table_id)]
        parts = await asyncio.gather(*(self._bucket(bucket, leases) for bucket in buckets))
        owner_of = {lease.lease_id: lease.owner for lease in leases}
        for part in parts:
            if part.lease_ids:
                usage.add(table_id, part, owner_of)

    async def _bucket(self, bucket: TableBucket, leases: Iterable[Lease]) -> BucketUsage:
        handles = self._remotes.get(bucket).snapshots
        newest = self._snapshots.newest(handles)
        held: list[tuple[SnapshotHandle, set[str]]] = []
        for handle in handles[: len(handles) - len(newest)]:
            ids = {x.lease_id for x in leases if _holds(x, bucket, handle.snapshot_id)}
            held += [(handle, ids)] if ids else []
        if not held:
            return BucketUsage([], set())
        kept = [await self._files(bucket, handle) for handle in newest]
        leased = [(await self._files(bucket, handle), ids) for handle, ids in held]
        missing = kept.count(None) + sum(files is None for files, _ in leased)
        return bucket_usage(
            [file for files in kept for file in files or ()],
            [(files or (), ids) for files, ids in leased],
            missing,
        )

    async def _files(
        self, bucket: TableBucket, handle: SnapshotHandle
    ) -> tuple[RemoteFile, ...] | None:
        """The files of a snapshot; None if their list cannot be read."""
        try:
            async with asyncio.timeout(READ_SECONDS):
                return (await self._snapshots.read(bucket, handle)).objects
        except (ZuflussError, TimeoutError):
            return None

    def _count_drops(self, usage: LeaseUsage) -> None:
        leases = list(self._book.leases.values())
        owner_of = {lease.lease_id: lease.owner for lease in leases}
        for note, drop in self._held.drops():
            ids = {lease.lease_id for lease in leases if _holds_drop(lease, *drop.owner_id)}
            used = self._held.usage_of(note)
            size = sum(each.bytes for each in (used or {}).values())
            if ids:
                part = BucketUsage([(size, ids)], ids, uncounted=int(used is None))
                usage.add(drop.table_id, part, owner_of)

    # -- answers ------------------------------------------------------------------------------

    def _answer(self, usage: LeaseUsage, next: str | None) -> m.GetKvSnapshotLeaseUsageResponse:
        owner_of = {lease.lease_id: lease.owner for lease in self._book.leases.values()}
        return m.GetKvSnapshotLeaseUsageResponse(
            tables=[self._row(i, used) for i, used in usage.tables.items()],
            owners=[self._row(i, used, owner=owner) for (i, owner), used in usage.owners.items()],
            leases=[
                self._row(i, used, owner=owner_of.get(lease_id), lease_id=lease_id)
                for (i, lease_id), used in usage.leases.items()
            ],
            next=next,
        )

    def _row(
        self,
        table_id: int,
        used: HeldBytes,
        *,
        owner: str | None = None,
        lease_id: str | None = None,
    ) -> m.PbLeaseUsage:
        entry = self._image.table_by_id(table_id)
        return m.PbLeaseUsage(
            table_id=table_id,
            table=None if entry is None else str(entry.info.path),
            owner=owner,
            lease_id=lease_id,
            held_bytes=used.held,
            freed_bytes=used.freed,
            uncounted_snapshots=used.uncounted,
        )


def _add(sums: dict[K, HeldBytes], key: K, used: HeldBytes) -> None:
    sums[key] = sums.get(key, HeldBytes()).plus(used)


def _key(bucket: TableBucket) -> str:
    """The position of a bucket in a count."""
    partition = -1 if bucket.partition_id is None else bucket.partition_id
    return f"{bucket.table_id:020d}/{partition:020d}/{bucket.bucket_id:010d}"


def _end_key(table_id: int) -> str:
    """A position behind all buckets of a table."""
    return f"{table_id:020d}~"


def _may_hold(lease: Lease, table_id: int) -> bool:
    return lease.holds_all or table_id in lease.tables or table_id in lease.unreadable


def _holds(lease: Lease, bucket: TableBucket, snapshot_id: int) -> bool:
    if lease.holds_all or bucket.table_id in lease.unreadable:
        return True
    table = lease.tables.get(bucket.table_id)
    pin = None if table is None else table.pins.get(bucket)
    return pin is not None and pin.snapshot_id == snapshot_id


def _holds_drop(lease: Lease, table_id: int, partition_id: int | None) -> bool:
    if lease.holds_all or table_id in lease.unreadable:
        return True
    table = lease.tables.get(table_id)
    return table is not None and any(partition_id in (None, b.partition_id) for b in table.pins)
