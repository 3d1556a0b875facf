"""The lake snapshots of every table, in memory and in the metadata store.

`lake/tables.py` decides which snapshots are kept; `LakeBook` stores the decision and answers
without I/O. It knows no remote location, so the registry of locations can ask it at its start how
many files there are (`live_usage`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence

from zufluss.cluster.image import ClusterImage, ImageChange, TableGone
from zufluss.coordinator import records
from zufluss.coordinator.feed import Feed
from zufluss.coordinator.ledger import Ledger
from zufluss.coordinator.records import LakeRecord, OffsetsFile, SnapshotRecord
from zufluss.meta.api import Entry
from zufluss.model.table import TableInfo
from zufluss.remote.files import Usage

_NO_SNAPSHOTS = LakeRecord()


class LakeBook:
    """The lake records of all tables. Open it with `LakeBook.open`."""

    def __init__(self, ledger: Ledger, image: ClusterImage, lakes: dict[int, LakeRecord]) -> None:
        self._ledger = ledger
        self._image = image
        self._lakes = lakes

    @classmethod
    async def open(
        cls,
        entries: Iterable[Entry],
        ledger: Ledger,
        image: ClusterImage,
        changes: Feed[Sequence[ImageChange]],
    ) -> LakeBook:
        """Load the records of all tables from the store's entries, and follow the catalog.

        Tables that an older version created without a record get one.
        """
        table_ids = [table.info.table_id for table in image.tables()]
        stored = records.load_lake(entries, table_ids)
        for table_id, lake in stored.items():
            if lake is None:
                await ledger.commit(records.create_lake(table_id))
        book = cls(ledger, image, {i: lake for i, lake in stored.items() if lake is not None})
        changes.subscribe(book.changed)
        return book

    def changed(self, changes: Sequence[ImageChange]) -> None:
        """Forget the tables that were dropped."""
        for change in changes:
            if isinstance(change, TableGone):
                self._lakes.pop(change.table_id, None)

    def get(self, table_id: int) -> LakeRecord:
        """The record of a table; one without snapshots if there is none."""
        return self._lakes.get(table_id, _NO_SNAPSHOTS)

    def newest(self) -> Iterator[tuple[TableInfo, SnapshotRecord]]:
        """The newest snapshot of every table that has one."""
        for table_id, lake in tuple(self._lakes.items()):
            entry = self._image.table_by_id(table_id)
            if entry is not None and lake.snapshots:
                yield entry.info, lake.snapshots[-1]

    async def put(self, table_id: int, lake: LakeRecord) -> None:
        """Replace a record, durably first; `ConflictError` when the table was dropped."""
        await self._ledger.commit([records.put_lake(table_id, lake)])
        if self._image.table_by_id(table_id) is not None:  # it may have been dropped meanwhile
            self._lakes[table_id] = lake

    def files(self, table_id: int) -> set[OffsetsFile]:
        """The offsets files of the kept snapshots of a table."""
        return offsets_files(self.get(table_id).snapshots)

    def live_usage(self, first_location: int | None) -> dict[int, Usage]:
        """The offsets files of kept snapshots by location; their sizes are unknown, and small.

        Files that are older than the registry of locations lie in `first_location`.
        """
        files = {file for lake in self._lakes.values() for file in offsets_files(lake.snapshots)}
        places = (first_location if f.location_id is None else f.location_id for f in files)
        counted = Counter(place for place in places if place is not None)
        return {location_id: Usage(count, 0) for location_id, count in counted.items()}

    def __repr__(self) -> str:
        return f"LakeBook(tables={len(self._lakes)})"


def offsets_files(snapshots: Iterable[SnapshotRecord]) -> set[OffsetsFile]:
    """The offsets files of some snapshots, each once."""
    both = ((s.offsets_file, s.readable_file) for s in snapshots)
    return {file for files in both for file in files if file is not None}
