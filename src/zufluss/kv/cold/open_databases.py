"""The open databases of a process: as many as their share of the descriptors allows.

An open RocksDB holds a descriptor for each of its table files and some of its own, whether it is
used or not. A server may have thousands of buckets. So databases that are in nobody's hands are
closed again, those used least recently first, and opened when they are next needed, which takes
some 20 ms.

The flush process imports this module too, so it must not import numba or pyarrow.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from typing import Final, Protocol

from zufluss.system import open_files_limit

DESCRIPTORS_SHARE: Final = 4
"""One part in this many of the process's descriptors is for databases."""

DESCRIPTORS_MIN: Final = 32
"""Descriptors for databases, however few the process may have."""

OF_DATABASE: Final = 8
"""Descriptors of an open database besides those of its table files."""


class Database(Protocol):
    """A database that can be opened again at any time."""

    def close_if_idle(self) -> bool:
        """Close the database unless somebody uses it; return whether it is closed."""


def descriptors_max() -> int:
    """Return how many descriptors open databases may have together."""
    return max(DESCRIPTORS_MIN, open_files_limit() // DESCRIPTORS_SHARE)


class OpenDatabases:
    """Which databases are open, and in which order they were used. Any thread may call it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._open: OrderedDict[Database, int] = OrderedDict()
        self._total = 0

    @property
    def descriptors(self) -> int:
        """Descriptors of all open databases, about."""
        return self._total

    def used(self, database: Database, tables: int) -> None:
        """A database with so many table files was used; closes others if there are too many."""
        with self._lock:
            self._forget(database)
            self._open[database] = OF_DATABASE + tables
            self._total += OF_DATABASE + tables
            if self._total > (most := descriptors_max()):
                self._close_idle(most)

    def closed(self, database: Database) -> None:
        """A database was closed by its owner."""
        with self._lock:
            self._forget(database)

    def close_all_idle(self) -> None:
        """Close every database that nobody uses: the process has no descriptor left."""
        with self._lock:
            self._close_idle(0)

    def _close_idle(self, most: int) -> None:
        for database in list(self._open):
            if self._total <= most:
                return
            if database.close_if_idle():
                self._forget(database)

    def _forget(self, database: Database) -> None:
        self._total -= self._open.pop(database, 0)


OPEN: Final = OpenDatabases()
"""The databases of this process: the limit of descriptors is the process's too."""
