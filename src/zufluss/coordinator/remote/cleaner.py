"""The cleaner deletes the remote files of dropped tables and partitions in every location.

Every drop leaves a note in its own transaction (`records.py`), so no drop is forgotten. If a table
or partition was too large for that transaction, the cleaner first deletes the rest of its metadata.
It lists the directories of the dropped table or partition in each location that is not retired, and
deletes the files. It deletes the note when all locations are done; until then it tries again, ever
more rarely. It touches nothing outside these directories, and deletes nothing after a listing that
failed. A listing is valid only if the location carries the marker of the cluster after it
(`remote/marker.py`): a directory that is not mounted looks empty.

While leases hold snapshots of a dropped table, all its files stay (`leases/holds.py`). The cleaner
waits until the leases end, or until the time for that is over; then it revokes them, durably before
the first deletion. Meanwhile the files count as live, so that no location with such files is
retired; before the files are counted, no location at all is (`remote/held_drops.py`).

The cleaner begins when the drop is over, so tablet servers have given the buckets up. Files that a
server still uploads after that are garbage for the sweep (`remote/sweep.py`).
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
"""Dropped tables and partitions that are cleaned at the same time."""
WAIT_SECONDS_MAX = 3600.0
"""Longest time after which a drop that waits for leases is looked at again."""
LISTED_AT_ONCE = 100_000
"""Files that are listed before they are deleted; more files need several rounds."""


class Cleaner:
    """Deletes the remote files of dropped tables and partitions."""

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
        """The paths of the notes to work on."""
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
        """Number of drops that are not done yet, including those that wait for leases."""
        return len(self.drops.keys | self._timers.keys())

    async def start(self) -> None:
        """Begin with the drops that the store has."""
        for name in await self._store.children(records.DROPS_PATH):
            self.drops.add(f"{records.DROPS_PATH}/{name}")
        self.drops.start()

    async def stop(self) -> None:
        """Stop; the next start goes on."""
        await self.drops.stop()
        for path in tuple(self._timers):
            self._stop_waiting(path)

    def changed(self, changes: Sequence[ImageChange]) -> None:
        """Clean the tables and partitions that were dropped."""
        for change in changes:
            if isinstance(change, TableGone):
                self.drops.add(records.table_drop(change.table_id))
            elif isinstance(change, PartitionGone):
                self.drops.add(records.partition_drop(change.partition_id))

    def freed(self, buckets: Iterable[TableBucket]) -> None:
        """Go on with the drops that no lease holds any more."""
        for path, drop in self._held.drops():
            if not self._holds.seconds_left(drop.owner_id):
                self.drops.add(path)

    async def dropped(self, bucket: TableBucket) -> Drop | None:
        """The drop of a bucket's table or partition; None if not dropped, or cleaned already."""
        if bucket.partition_id is not None:
            note = records.partition_drop(bucket.partition_id)
            if (stored := await self._store.read(note)) is not None:
                return records.load_drop(note, stored.value)
        note = records.table_drop(bucket.table_id)
        if (stored := await self._store.read(note)) is None:
            return None
        drop = records.load_drop(note, stored.value)
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
        await self._delete_rest(drop)
        await self._ledger.confirm()  # else the note may be a creation of the next coordinator
        owner = drop.owner_id
        if (seconds := self._holds.seconds_left(owner)) > 0:
            self._wait(path, drop, seconds)
            await self._count(path, drop)
            return
        await self._holds.end(owner, str(drop.owner))
        self._stop_waiting(path)
        await self._delete(drop)
        notes = await self._store.tree(path)
        await self._ledger.commit_in_portions(Delete(each.path) for each in reversed(notes))
        self._holds.forget(owner)

    async def _delete_rest(self, drop: Drop) -> None:
        """Delete the metadata that one transaction could not delete together with the drop."""
        above = records.dropped_path(drop)
        rest = await self._store.tree(above)
        if any(entry.path == above for entry in rest):
            raise records.CatalogDamagedError(
                f"{drop.owner} exists, and its drop is noted; restore the metadata store"
            )
        if rest:
            await self._ledger.commit_in_portions(Delete(entry.path) for entry in rest)
            self._reach("clean-metadata")

    async def _delete(self, drop: Drop) -> None:
        """Delete the files of a drop in all locations; raises after all if one failed."""
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
        """Delete all files in a directory, in rounds of listing and deleting."""
        more = True
        while more:
            files: list[RemoteFile] = []
            more = False
            async for page in self._storage.objects(location_id).list(directory):
                files += [RemoteFile(location_id, each.path, each.size, 0) for each in page]
                if len(files) >= LISTED_AT_ONCE:
                    more = True
                    break
            await self._storage.check(location_id)
            self._reach("clean-delete")
            await self._storage.delete(files)
            self.deleted_files += len(files)

    def __repr__(self) -> str:
        return f"Cleaner({self.drops!r})"


def directories(drop: Drop) -> list[str]:
    """The directories of a dropped table or partition: only their files may be deleted."""
    kinds = [layout.LOG, layout.KV]
    if drop.partition_id is None:
        kinds.append(layout.LAKE)
    return [
        layout.owner_directory(kind, drop.owner, drop.table_id, drop.partition_id) for kind in kinds
    ]
