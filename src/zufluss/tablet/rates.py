"""How many records per second were written to each table in the last minute.

Every few seconds the number of records of each table is noted; a rate is the difference to the
oldest note. The paths of requests do no work for it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Final

from zufluss.tablet.buckets import Buckets, TableState

NOTE_SECONDS: Final = 5.0
"""Time between two notes."""
NOTES: Final = 12
"""Notes that are kept; together they are as old as a rate looks back."""


def records(table: TableState) -> int:
    """Records that were ever written to the logs of a table on this server."""
    return sum(replica.log.high_watermark for replica in table.replicas.values())


class TableRates:
    """The rates of all tables. Belongs to the event loop."""

    def __init__(self, buckets: Buckets, clock: Callable[[], float]) -> None:
        self._buckets = buckets
        self._clock = clock
        self._notes: deque[tuple[float, dict[int, int]]] = deque(maxlen=NOTES)

    def note(self) -> None:
        """Note the records of each table."""
        tables = self._buckets.tables.items()
        self._notes.append((self._clock(), {number: records(table) for number, table in tables}))

    def of(self, table_id: int) -> float:
        """Records per second since the oldest note that has the table; 0 without one."""
        table, now = self._buckets.tables.get(table_id), self._clock()
        if table is None:
            return 0.0
        for at, counts in self._notes:
            if table_id in counts and now > at:
                return max(records(table) - counts[table_id], 0) / (now - at)
        return 0.0
