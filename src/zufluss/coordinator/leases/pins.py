"""The snapshots that all leases hold together, to answer "may this snapshot be deleted?" at once.

Plain memory, kept by `leases/book.py`. A pin holds from the moment it is added, before its lease is
durable. Tables of a damaged lease whose pins cannot be read are blocked as a whole.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from zufluss.coordinator.leases.rules import SnapshotPin
from zufluss.model.table import TableBucket

Owner = tuple[int, int | None]
"""A table, or a partition of it, by id."""


class SnapshotPins:
    """The leased snapshots of all buckets, each with the number of leases that hold it.

    Most are held by one lease. Further holders are counted apart, which saves memory.
    """

    def __init__(self) -> None:
        self._pins: dict[tuple[TableBucket, int], SnapshotPin] = {}
        self._again: Counter[tuple[TableBucket, int]] = Counter()
        self._owners: Counter[tuple[int, int | None]] = Counter()
        self._bytes: Counter[int] = Counter()
        self._blocked: Counter[int] = Counter()
        self._blocked_all = 0

    # Changing

    def add(self, bucket: TableBucket, pin: SnapshotPin) -> None:
        """Count one more lease that holds a snapshot."""
        key = bucket, pin.snapshot_id
        if key in self._pins:
            self._again[key] += 1
            return
        self._pins[key] = pin
        self._count(bucket, pin.size, 1)

    def remove(self, bucket: TableBucket, pin: SnapshotPin) -> bool:
        """Count one lease less that holds a snapshot; returns whether it was the last one."""
        key = bucket, pin.snapshot_id
        if key in self._again:
            self._again[key] -= 1
            if not self._again[key]:
                del self._again[key]
            return False
        known = self._pins.pop(key)
        self._count(bucket, -known.size, -1)
        return True

    def _count(self, bucket: TableBucket, size: int, by: int) -> None:
        self._bytes[bucket.table_id] += size
        self._owners[bucket.table_id, None] += by
        if bucket.partition_id is not None:
            self._owners[bucket.table_id, bucket.partition_id] += by
            if not self._owners[bucket.table_id, bucket.partition_id]:
                del self._owners[bucket.table_id, bucket.partition_id]
        if not self._owners[bucket.table_id, None]:
            del self._owners[bucket.table_id, None], self._bytes[bucket.table_id]

    def block(self, table_ids: Iterable[int], everything: bool) -> None:
        """Hold all snapshots of some tables, or of every table."""
        self._blocked.update(table_ids)
        self._blocked_all += everything

    def unblock(self, table_ids: Iterable[int], everything: bool) -> None:
        """Undo a `block`."""
        self._blocked -= Counter(table_ids)
        self._blocked_all -= everything

    # Asking

    def __len__(self) -> int:
        """The number of leased snapshots, each counted once."""
        return len(self._pins)

    @property
    def bytes(self) -> int:
        """Bytes of all leased snapshots, each counted once."""
        return sum(self._bytes.values())

    def bytes_of(self, table_id: int) -> int:
        """Bytes of the leased snapshots of a table, each counted once."""
        return self._bytes[table_id]

    def pinned(self, bucket: TableBucket, snapshot_id: int) -> bool:
        """Whether a snapshot must be kept."""
        return (bucket, snapshot_id) in self._pins or self._is_blocked(bucket.table_id)

    def only_once(self, bucket: TableBucket, pin: SnapshotPin) -> bool:
        """Whether a snapshot is held by one lease only."""
        return (bucket, pin.snapshot_id) not in self._again

    def holds(self, table_id: int, partition_id: int | None = None) -> bool:
        """Whether leases hold snapshots of a partition, or of a table if no partition is given."""
        return (table_id, partition_id) in self._owners or self._is_blocked(table_id)

    @property
    def owners(self) -> list[Owner]:
        """The tables and partitions with leased snapshots, as far as they are known."""
        return [*self._owners, *((table_id, None) for table_id in self._blocked)]

    @property
    def is_all_blocked(self) -> bool:
        """Whether a damaged lease may hold any snapshot at all."""
        return self._blocked_all > 0

    def location(self, bucket: TableBucket, snapshot_id: int) -> int | None:
        """The location of the `_METADATA` of a leased snapshot; None if it is not leased."""
        pin = self._pins.get((bucket, snapshot_id))
        return None if pin is None else pin.location_id

    def _is_blocked(self, table_id: int) -> bool:
        return self.is_all_blocked or table_id in self._blocked

    def __repr__(self) -> str:
        return f"SnapshotPins(snapshots={len(self)}, blocked={len(self._blocked)})"
