"""The producers of tables, as the coordinator told this server.

All buckets of a table share one fence (`kv/producer/fence.py`), which is built here whenever the
producers of the table change. For each bucket the first offset that an undo may need is known, too.
Tables without a bucket here are remembered as well: a bucket that comes later is fenced from its
first put on.

Belongs to the event loop.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

from zufluss.cluster.producers import ProducerEntry, TableProducers
from zufluss.kv.producer.fence import OPEN, Activity, Fence, Owner
from zufluss.model.table import TableBucket


class TableFence(NamedTuple):
    """The producers of one table, and its fence."""

    producers: TableProducers
    """The producers, as the coordinator reported them."""
    fence: Fence
    """Shared by all buckets of the table."""


class KnownProducers:
    """The producers of all tables that the coordinator announced to this server."""

    def __init__(self) -> None:
        self._tables: dict[int, TableFence] = {}
        self._activity: dict[int, Activity] = {}

    def update(self, table: TableProducers) -> bool:
        """Take over the producers of a table; False if the same or newer ones are known."""
        known = self._tables.get(table.table_id)
        if known is not None and known.producers.version >= table.version:
            return False
        self._take(table)
        return True

    def replace(self, tables: Sequence[TableProducers]) -> set[int]:
        """Replace everything that is known; returns the tables that may have changed."""
        before = {*self._tables}
        self._tables.clear()
        for table in tables:
            self._take(table)
        return before | {*self._tables}

    def keep(self, exists: Callable[[int], bool]) -> None:
        """Forget tables that do not exist any more."""
        for table_id in [each for each in self._tables if not exists(each)]:
            del self._tables[table_id]
            self._activity.pop(table_id, None)

    def fence(self, table_id: int) -> Fence:
        """The fence that checks the puts of a table."""
        known = self._tables.get(table_id)
        return OPEN if known is None else known.fence

    def held_from(self, bucket: TableBucket) -> int | None:
        """The first offset of a changelog that a producer may have to undo; None without one."""
        known = self._tables.get(bucket.table_id)
        if known is None:
            return None
        key = (bucket.partition_id, bucket.bucket_id)
        held = [e.baseline.get(key, 0) for e in known.producers.producers if e.holds]
        return min(held, default=None)

    def baseline(self, bucket: TableBucket, number: int) -> int:
        """The first offset of a bucket at which changes of a producer may have to be undone."""
        known = self._tables.get(bucket.table_id)
        key = (bucket.partition_id, bucket.bucket_id)
        entries = () if known is None else known.producers.producers
        return next((e.baseline.get(key, 0) for e in entries if e.number == number), 0)

    def idle_ms(self, table_id: int, numbers: Iterable[int]) -> list[int]:
        """Milliseconds since each producer wrote to a table here; −1 for never."""
        activity = self._activity.get(table_id, Activity())
        return [activity.idle_ms(number) for number in numbers]

    def _take(self, table: TableProducers) -> None:
        table_id = table.table_id
        if not table.producers:
            self._tables[table_id] = TableFence(table, OPEN)
            self._activity.pop(table_id, None)
            return
        activity = self._activity.setdefault(table_id, Activity())
        fence = Fence(map(_owner, table.producers), activity)
        self._tables[table_id] = TableFence(table, fence)


def _owner(entry: ProducerEntry) -> Owner:
    return Owner(
        entry.producer_id,
        entry.number,
        entry.epoch,
        entry.column_ids,
        entry.exclusive,
        entry.lost,
    )
