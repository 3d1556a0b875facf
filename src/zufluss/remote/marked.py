"""A location as the shared log writes to it: only while it is known to be this cluster's.

A directory can be unmounted while the server runs. Objects would then be created below the mount
point, acknowledged, and gone when the directory is mounted again. So the marker of the cluster is
read before each object is created there; of other stores it is read once (`remote/storage.py`). It
is also read before an object there counts as missing: whoever takes over would find all lost.

A location can also be moved or declared lost. The seal that ends a session is put where the
location is by then, so a session creates objects only where it began: at another address its next
name would be free again. The coordinator moves no location that has a session somebody needs.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence

from zufluss.remote.errors import LocationUnavailableError, ObjectCorruptError
from zufluss.remote.objects import Content, ObjectInfo, Objects
from zufluss.remote.storage import RemoteStorage


class MarkedObjects:
    """The objects of a location; a `log.shared.store.ObjectStore`."""

    def __init__(self, storage: RemoteStorage, location_id: int) -> None:
        self._storage = storage
        self._location_id = location_id
        self.uri = storage.wal_objects(location_id).uri
        """The address at which objects are created, as long as the location has it."""

    async def create(self, path: str, data: Content) -> None:
        """Create an absent object with one request; ObjectExistsError if it exists."""
        await self._storage.ensure_marked(self._location_id)
        self._check_unmoved(path)
        try:
            await self._objects.create(path, data)
        finally:
            self._check_unmoved(path)

    async def get(self, path: str, *, limit: int) -> bytes:
        """Return an object; ObjectCorruptError if the location was lost."""
        self._check_not_lost(path)
        return await self._storage.sure(
            self._location_id, lambda: self._objects.get(path, limit=limit)
        )

    async def get_range(self, path: str, start: int, end: int) -> memoryview:
        """Return a part of an object; ObjectCorruptError if the location was lost."""
        self._check_not_lost(path)
        return await self._storage.sure(
            self._location_id, lambda: self._objects.get_range(path, start, end)
        )

    def list(self, prefix: str) -> AsyncIterator[list[ObjectInfo]]:
        """Yield the objects of a directory in pages."""
        return self._objects.list(prefix)

    async def delete(self, paths: Sequence[str]) -> None:
        """Delete objects."""
        await self._storage.ensure_marked(self._location_id)
        await self._objects.delete(paths)

    @property
    def _objects(self) -> Objects:
        return self._storage.wal_objects(self._location_id)

    def _check_not_lost(self, path: str) -> None:
        if self._storage.locations.get(self._location_id).is_gone:
            raise ObjectCorruptError(
                self.uri.text, path, f"location {self._location_id} was given up as lost"
            )

    def _check_unmoved(self, path: str) -> None:
        """Raise `LocationUnavailableError` if the location was moved or given up meanwhile."""
        location = self._storage.locations.get(self._location_id)
        if self._objects.uri != self.uri or location.is_gone:
            raise LocationUnavailableError(
                self.uri.text,
                path,
                f"location {self._location_id} is {location.state.name} at {location.uri} by now, "
                "so a session that began here does not go on; its server must register again",
            )
