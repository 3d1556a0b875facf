"""What all leases hold together, counted: the answer to "may this snapshot go?" without a search.

Plain memory, kept by `leases/leases.py`. A pin counts from the moment it is added, before the lease
that needs it is durable. A damaged lease may hold more than anybody can read; what it may hold is
blocked as a whole.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from zufluss.coordinator.leases.rules import Pin
from zufluss.model.table import TableBucket


class Pins:
    """The leased snapshots of all buckets, each with the number of leases that have it.

    Most have one; how many more there are is counted apart, so that 100,000 pins are few objects.
    """

    def __init__(self) -> None:
        self._pins: dict[tuple[TableBucket, int], Pin] = {}
        self._again: Counter[tuple[TableBucket, int]] = Counter()
        self._owners: Counter[tuple[int, int | None]] = Counter()
        self._bytes: Counter[int] = Counter()
        self._blocked: Counter[int] = Counter()
        self._blocked_all = 0

    # Changing

    def add(self, bucket: TableBucket, pin: Pin) -> None:
        """One lease more has a snapshot."""
        key = bucket, pin.snapshot_id
        if key in self._pins:
            self._again[key] += 1
            return
        self._pins[key] = pin
        self._count(bucket, pin.size, 1)

    def remove(self, bucket: TableBucket, pin: Pin) -> bool:
        """One lease less has a snapshot; whether it was the last one."""
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
        """Take back what `block` was told."""
        self._blocked -= Counter(table_ids)
        self._blocked_all -= everything

    # Asking

    def __len__(self) -> int:
        """Leased snapshots, each once."""
        return len(self._pins)

    @property
    def bytes(self) -> int:
        """The size of all leased snapshots, each once."""
        return sum(self._bytes.values())

    def bytes_of(self, table_id: int) -> int:
        """The size of a table's leased snapshots, each once."""
        return self._bytes[table_id]

    def pinned(self, bucket: TableBucket, snapshot_id: int) -> bool:
        """Whether a snapshot may not be dropped."""
        return (bucket, snapshot_id) in self._pins or self._is_blocked(bucket.table_id)

    def only_once(self, bucket: TableBucket, pin: Pin) -> bool:
        """Whether one lease alone has a snapshot."""
        return (bucket, pin.snapshot_id) not in self._again

    def holds(self, table_id: int, partition_id: int | None = None) -> bool:
        """Whether something of a partition, or without one of the table, may not be deleted."""
        return (table_id, partition_id) in self._owners or self._is_blocked(table_id)

    @property
    def owners(self) -> list[tuple[int, int | None]]:
        """Tables, and partitions, of which something may not be deleted, as far as is known."""
        return [*self._owners, *((table_id, None) for table_id in self._blocked)]

    @property
    def is_all_blocked(self) -> bool:
        """Whether everything there is may not be deleted."""
        return self._blocked_all > 0

    def location(self, bucket: TableBucket, snapshot_id: int) -> int | None:
        """Where the `_METADATA` of a leased snapshot lies; None for one that is not leased."""
        found = self._pins.get((bucket, snapshot_id))
        return None if found is None else found.location_id

    def _is_blocked(self, table_id: int) -> bool:
        return self.is_all_blocked or table_id in self._blocked

    def __repr__(self) -> str:
        return f"Pins(snapshots={len(self)}, blocked={len(self._blocked)})"
