"""Dropped tables and partitions whose remote files stay because leases hold snapshots of them.

The cleaner (`remote/cleaner.py`) adds and removes them. The registry of locations counts their
files as live, so that no location with such files is retired. Kept apart from the cleaner because
the registry is opened before it.
"""

from __future__ import annotations

from collections.abc import Mapping

from zufluss.coordinator.records import Drop
from zufluss.model.table import TablePath
from zufluss.remote.files import Usage, summed


class HeldDrops:
    """Drops that wait for leases, by the path of their note in the metadata store."""

    def __init__(self) -> None:
        self._drops: dict[str, Drop] = {}
        self._usage: dict[str, Mapping[int, Usage]] = {}

    def add(self, path: str, drop: Drop) -> None:
        """A drop waits; if it waited before, its files stay counted."""
        self._drops[path] = drop

    def remove(self, path: str) -> None:
        """A drop waits no longer."""
        self._drops.pop(path, None)
        self._usage.pop(path, None)

    def set_usage(self, path: str, usage: Mapping[int, Usage]) -> None:
        """The files of a drop were counted; nothing if it waits no longer."""
        if path in self._drops:
            self._usage[path] = usage

    def leave(self, location_id: int) -> None:
        """Forget the files in a location that was destroyed."""
        for path, usage in self._usage.items():
            self._usage[path] = {i: used for i, used in usage.items() if i != location_id}

    def usage_of(self, path: str) -> Mapping[int, Usage] | None:
        """Files and bytes of a drop by location; None before they were counted."""
        return self._usage.get(path)

    def is_counted(self, path: str) -> bool:
        """Whether the files of a drop were counted."""
        return path in self._usage

    def drops(self) -> list[tuple[str, Drop]]:
        """All drops that wait, with the paths of their notes."""
        return list(self._drops.items())

    def live_usage(self) -> dict[int, Usage]:
        """Files and bytes of the counted drops, by location."""
        return summed(self._usage.values())

    @property
    def counted_owners(self) -> set[tuple[int, int | None]]:
        """The ids of the tables and partitions whose files are in `live_usage`."""
        return {self._drops[path].owner_id for path in self._usage}

    def leased_tables(self, path: TablePath) -> list[int]:
        """The ids of dropped tables of a name, or of their partitions, that leases still read."""
        return sorted({d.table_id for d in self._drops.values() if d.owner.path == path})

    def __repr__(self) -> str:
        return f"HeldDrops(drops={len(self._drops)}, counted={len(self._usage)})"
