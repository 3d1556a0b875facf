"""Remote files of dropped tables and partitions, deleted in every location.

A drop leaves a note in the same transaction (`records.py`), so no drop is forgotten, whether it was
a table's, a partition's, an expired partition's or that of a whole database. The cleaner lists what
the dropped one has in each location that is not retired, and deletes it. The note goes when all
locations did; until then it is tried again, ever more rarely. Nothing outside the directories of
the dropped one is touched, and nothing is deleted after a listing that failed. Each listing counts
only if the location carries the cluster's marker after it (`remote/marker.py`): one that is not
mounted has nothing to list.

While leases hold snapshots of a dropped one, all its files stay (`leases/holds.py`): it waits until
they let go, or the time for that is over and they are revoked, durable before the first deletion.
Meanwhile its files count as live, so that no location is retired with them; before they were
counted no location at all is.

It begins when the drop is over, so tablet servers have given the buckets up. What one of them still
uploads after that belongs to nothing, and is the sweep's (`remote/sweep.py`).
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Sequence

import structlog

from zufluss.cluster.image import ImageChange, PartitionGone, TableGone
from zufluss.coordinator import records
from zufluss.coordinator.feed import Feed
from zufluss.coordinator.leases.holds import LeaseHolds
from zufluss.coordinator.ledger import Ledger
from zufluss.coordinator.records import Drop
from zufluss.coordinator.remote.held_drops import HeldDrops
from zufluss.coordinator.worklist import WorkList
from zufluss.errors import ZuflussError
from zufluss.meta.api import Delete, MetaStore
from zufluss.model.table import TableBucket
from zufluss.remote import layout
from zufluss.remote.files import RemoteFile, Usage, summed
from zufluss.remote.storage import RemoteStorage

log = structlog.get_logger(__name__)

WORKERS = 4
"""Dropped tables and partitions that are cleaned at once."""
WAIT_SECONDS_MAX = 3600.0
"""How long a drop waits for leases before it looks again, if they do not let go before."""
LISTED_AT_ONCE = 100_000
"""Files that are listed before they are deleted; more are deleted in several rounds."""


class Cleaner:
    """Deletes what dropped tables and partitions left in remote storage."""

    def __init__(
        self,
        store: MetaStore,
        ledger: Ledger,
        changes: Feed[Sequence[ImageChange]],
        freed: Feed[Sequence[TableBucket]],
        storage: RemoteStorage,
        holds: LeaseHolds,
        held: HeldDrops,
        drops_over: Callable[[], Awaitable[None]],
        reach: Callable[[str], None],
    ) -> None:
        """`drops_over` waits until the drops that were begun in the catalog have ended."""
        self.deleted_files = 0
        """Files deleted since the start."""
        self.drops = WorkList("remote_cleaning", self._clean, workers=WORKERS)
        """The notes, by path, of what is to be cleaned."""
        self._store = store
        self._ledger = ledger
        self._storage = storage
        self._holds = holds
        self._held = held
        self._drops_over = drops_over
        self._reach = reach
        self._timers: dict[str, asyncio.TimerHandle] = {}
        changes.subscribe(self.changed)
        freed.subscribe(self.freed)

    @property
    def pending(self) -> int:
        """Drops that are not done yet, those that wait for leases among them."""
        return len(self.drops.keys | self._timers.keys())

    async def start(self) -> None:
        """Begin, with the drops that were noted before."""
        for name in await self._store.children(records.DROPS_PATH):
            self.drops.add(f"{records.DROPS_PATH}/{name}")
        self.drops.start()

    async def stop(self) -> None:
        """Stop; what is not done is done after the next start."""
        await self.drops.stop()
        for path in tuple(self._timers):
            self._stop_waiting(path)

    def changed(self, changes: Sequence[ImageChange]) -> None:
        """The catalog changed."""
        for change in changes:
            if isinstance(change, TableGone):
                self.drops.add(records.table_drop(change.table_id))
            elif isinstance(change, PartitionGone):
                self.drops.add(records.partition_drop(change.partition_id))

    def freed(self, buckets: Iterable[TableBucket]) -> None:
        """Leases let go of buckets: go on with the drops that nothing holds any more."""
        for path, drop in self._held.drops():
            if not self._holds.seconds_left(drop.owner_id):
                self.drops.add(path)

    async def dropped(self, bucket: TableBucket) -> Drop | None:
        """What the owner of a bucket was called; None if it was not dropped, or is cleaned."""
        if bucket.partition_id is not None:
            note = records.partition_drop(bucket.partition_id)
            if (found := await self._store.read(note)) is not None:
                return records.load_drop(note, found.value)
        note = records.table_drop(bucket.table_id)
        if (found := await self._store.read(note)) is None:
            return None
        drop = records.load_drop(note, found.value)
        if bucket.partition_id is None:
            return drop
        name = (await self._names(bucket.table_id)).get(bucket.partition_id)
        if name is None:
            return None
        owner = drop.owner._replace(partition=name)
        return Drop(owner, bucket.table_id, bucket.partition_id)

    async def _names(self, table_id: int) -> dict[int, str]:
        names: dict[int, str] = {}
        for each in await self._store.tree(records.dropped_names(table_id)):
            names |= records.load_names(each.path, each.value)
        return names

    def _wait(self, path: str, drop: Drop, seconds: float) -> None:
        if (before := self._timers.get(path)) is not None:
            before.cancel()
        loop = asyncio.get_running_loop()
        self._timers[path] = loop.call_later(min(seconds, WAIT_SECONDS_MAX), self.drops.add, path)
        self._held.add(path, drop)
        log.info("drop_waits_for_leases", dropped=str(drop.owner), seconds_max=round(seconds))

    def _stop_waiting(self, path: str) -> None:
        if (timer := self._timers.pop(path, None)) is not None:
            timer.cancel()
        self._held.remove(path)

    async def _count(self, path: str, drop: Drop) -> None:
        """Count the files of a held drop, once: they only become fewer."""
        if self._held.is_counted(path):
            return
        usage: dict[int, Usage] = {}
        for location in self._storage.locations.live:
            for directory in directories(drop):
                async for page in self._storage.objects(location.location_id).list(directory):
                    size = sum(each.size for each in page)
                    more = {location.location_id: Usage(len(page), size)}
                    usage = summed([usage, more])
        self._held.set_usage(path, usage)

    async def _clean(self, path: str) -> None:
        await self._drops_over()
        note = await self._store.read(path)
        if note is None:
            return
        drop = records.load_drop(path, note.value)
        owner = drop.owner_id
        if (seconds := self._holds.seconds_left(owner)) > 0:
            self._wait(path, drop, seconds)
            await self._count(path, drop)
            return
        await self._holds.end(owner, str(drop.owner))
        self._stop_waiting(path)
        await self._delete(drop)
        notes = await self._store.tree(path)
        await self._ledger.commit([Delete(each.path) for each in notes])
        self._holds.forget(owner)

    async def _delete(self, drop: Drop) -> None:
        """Delete the files of a drop wherever it has some; a location that fails stops none."""
        deleted = self.deleted_files
        failure: ZuflussError | None = None
        for location in self._storage.locations.live:
            for directory in directories(drop):
                try:
                    await self._delete_below(location.location_id, directory)
                except ZuflussError as problem:
                    failure = problem
        if failure is not None:
            raise failure
        self._reach("clean-deleted")
        log.info("drop_cleaned", dropped=str(drop.owner), files=self.deleted_files - deleted)

    async def _delete_below(self, location_id: int, directory: str) -> None:
        """Delete everything in a directory, each round after a listing without a failure."""
        more = True
        while more:
            found: list[RemoteFile] = []
            more = False
            async for page in self._storage.objects(location_id).list(directory):
                found += [RemoteFile(location_id, each.path, each.size, 0) for each in page]
                if len(found) >= LISTED_AT_ONCE:
                    more = True
                    break
            await self._storage.check(location_id)
            self._reach("clean-delete")
            await self._storage.delete(found)
            self.deleted_files += len(found)

    def __repr__(self) -> str:
        return f"Cleaner({self.drops!r})"


def directories(drop: Drop) -> list[str]:
    """Where the files of a dropped table or partition lie; all that may be deleted."""
    kinds = (
        (layout.LOG, layout.KV, layout.LAKE)
        if drop.partition_id is None
        else (
            layout.LOG,
            layout.KV,
        )
    )
    return [
        layout.owner_directory(kind, drop.owner, drop.table_id, drop.partition_id) for kind in kinds
    ]
