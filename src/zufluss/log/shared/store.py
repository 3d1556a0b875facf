"""What the shared log asks of a location, and the settings of a session."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from typing import Protocol

from zufluss.remote.objects import Content, ObjectInfo
from zufluss.remote.uri import LocationUri


class ObjectStore(Protocol):
    """The calls of `remote.objects.Objects` that the shared log uses.

    Creating an absent object is the only one that needs more than any store has: no appending, no
    renaming, no replacing under a condition.
    """

    uri: LocationUri

    async def create(self, path: str, data: Content) -> None:
        """Create an absent object with one request; ObjectExistsError if it exists."""

    async def get(self, path: str, *, limit: int) -> bytes:
        """Return an object."""

    async def get_range(self, path: str, start: int, end: int) -> memoryview:
        """Return a part of an object."""

    def list(self, prefix: str) -> AsyncIterator[list[ObjectInfo]]:
        """Yield the objects of a directory in pages."""

    async def delete(self, paths: Sequence[str]) -> None:
        """Delete objects."""


@dataclass(frozen=True, slots=True)
class WalSettings:
    """How a session writes."""

    interval_seconds: float = 0.1
    """Between the starts of two objects; the first after a pause starts at once."""
    object_bytes: int = 8 << 20
    """An object that has gathered so much starts before the interval is over."""
    in_flight: int = 4
    """Objects under way at a time."""
    gathered_bytes: int = 64 << 20
    """Bytes that wait for an object, at most."""
