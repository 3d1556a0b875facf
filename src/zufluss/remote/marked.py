"""A location as the shared log writes to it: only while it is known to be this cluster's.

A directory can be unmounted while the server runs. Objects would then be created below the mount
point, acknowledged, and gone when the directory is mounted again. So the marker of the cluster is
read before each object is created there; of other stores it is read once (`remote/storage.py`).
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence

from zufluss.remote.objects import Content, ObjectInfo
from zufluss.remote.storage import RemoteStorage


class MarkedObjects:
    """The objects of a location; a `log.shared.store.ObjectStore`."""

    def __init__(self, storage: RemoteStorage, location_id: int) -> None:
        self._storage = storage
        self._location_id = location_id
        self._objects = storage.wal_objects(location_id)
        self.uri = self._objects.uri

    async def create(self, path: str, data: Content) -> None:
        """Create an absent object with one request; ObjectExistsError if it exists."""
        await self._storage.ensure_marked(self._location_id)
        await self._objects.create(path, data)

    async def get(self, path: str, *, limit: int) -> bytes:
        """Return an object."""
        return await self._objects.get(path, limit=limit)

    async def get_range(self, path: str, start: int, end: int) -> memoryview:
        """Return a part of an object."""
        return await self._objects.get_range(path, start, end)

    def list(self, prefix: str) -> AsyncIterator[list[ObjectInfo]]:
        """Yield the objects of a directory in pages."""
        return self._objects.list(prefix)

    async def delete(self, paths: Sequence[str]) -> None:
        """Delete objects."""
        await self._storage.ensure_marked(self._location_id)
        await self._objects.delete(paths)
