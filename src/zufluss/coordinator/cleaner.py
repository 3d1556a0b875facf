"""Remote files of dropped tables and partitions, deleted in every location.

A drop leaves a note in the same transaction (`records.py`), so no drop is forgotten, whether it was
a table's, a partition's, an expired partition's or that of a whole database. The cleaner lists what
the dropped one has in each location that is not retired, and deletes it. The note goes when all
locations did; until then it is tried again, ever more rarely. Nothing outside the directories of
the dropped one is touched, and nothing is deleted after a listing that failed. Each listing counts
only if the location carries the cluster's marker after it (`remote/marker.py`): one that is not
mounted has nothing to list.

It begins when the drop is over, so tablet servers have given the buckets up. What one of them still
uploads after that belongs to nothing, and is the sweep's (`sweep.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import structlog

from zufluss.cluster.image import ImageChange, PartitionGone, TableGone
from zufluss.coordinator import records
from zufluss.coordinator.catalog import Catalog
from zufluss.coordinator.records import Drop
from zufluss.coordinator.worklist import WorkList
from zufluss.errors import ZuflussError
from zufluss.meta.api import Delete, MetaStore
from zufluss.remote import layout
from zufluss.remote.files import RemoteFile
from zufluss.remote.storage import RemoteStorage

log = structlog.get_logger(__name__)

WORKERS = 4
"""Dropped tables and partitions that are cleaned at once."""
LISTED_AT_ONCE = 100_000
"""Files that are listed before they are deleted; more are deleted in several rounds."""


class Cleaner:
    """Deletes what dropped tables and partitions left in remote storage."""

    def __init__(
        self,
        store: MetaStore,
        catalog: Catalog,
        storage: RemoteStorage,
        reach: Callable[[str], None],
    ) -> None:
        self.deleted_files = 0
        """Files deleted since the start."""
        self.drops = WorkList("remote_cleaning", self._clean, workers=WORKERS)
        """The notes, by path, of what is to be cleaned."""
        self._store = store
        self._catalog = catalog
        self._storage = storage
        self._reach = reach
        catalog.listeners.append(self.changed)

    async def start(self) -> None:
        """Begin, with the drops that were noted before."""
        for note in await self._store.tree(records.DROPS_PATH):
            self.drops.add(note.path)
        self.drops.start()

    async def stop(self) -> None:
        """Stop; what is not done is done after the next start."""
        await self.drops.stop()

    def changed(self, changes: Sequence[ImageChange]) -> None:
        """The catalog changed."""
        for change in changes:
            if isinstance(change, TableGone):
                self.drops.add(records.table_drop(change.table_id))
            elif isinstance(change, PartitionGone):
                self.drops.add(records.partition_drop(change.partition_id))

    async def _clean(self, path: str) -> None:
        await self._catalog.exclusive(_nothing)  # the drop itself is over when it is our turn
        note = await self._store.read(path)
        if note is None:
            return
        drop = records.load_drop(path, note.value)
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
        await self._catalog.ledger.commit([Delete(path)])
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


async def _nothing() -> None:
    """Only wait for the turn."""
