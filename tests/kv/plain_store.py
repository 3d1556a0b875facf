"""The store in plain Python: what `KvStore` must answer, for tests to compare it with.

Every key has the list of all its versions, oldest first. Nothing is flushed, cleaned or evicted,
since none of that may change an answer.
"""

from __future__ import annotations

from collections.abc import Sequence

NEWEST = 2**63 - 1
"""Horizon of a reader that sees everything."""


class PlainStore:
    """One bucket in a dictionary."""

    def __init__(self) -> None:
        self._versions: dict[bytes, list[tuple[int, bytes | None]]] = {}

    def put(self, keys: Sequence[bytes], values: Sequence[bytes | None], offset: int) -> None:
        """Write versions; None deletes."""
        for key, value in zip(keys, values, strict=True):
            self._versions.setdefault(key, []).append((offset, value))

    def get(self, keys: Sequence[bytes], horizon: int = NEWEST) -> list[bytes | None]:
        """The newest values below the horizon."""
        return [self._at(key, horizon) for key in keys]

    def prefix(self, prefix: bytes, horizon: int) -> list[bytes]:
        """The values of all keys that begin so, in the order of their keys."""
        return [value for key, value in self._rows(horizon) if key.startswith(prefix)]

    def scan(
        self, after: bytes | None, limit: int, horizon: int
    ) -> tuple[list[bytes], list[bytes]]:
        """The first rows with a key behind `after`, in order."""
        rows = [row for row in self._rows(horizon) if after is None or row[0] > after][:limit]
        return [key for key, _ in rows], [value for _, value in rows]

    def _rows(self, horizon: int) -> list[tuple[bytes, bytes]]:
        found = ((key, self._at(key, horizon)) for key in sorted(self._versions))
        return [(key, value) for key, value in found if value is not None]

    def _at(self, key: bytes, horizon: int) -> bytes | None:
        versions = self._versions.get(key, ())
        return next((v for offset, v in reversed(versions) if offset < horizon), None)
