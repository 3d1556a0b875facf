"""The objects of one location: the one way in which the rest of zufluss touches remote storage.

An object has a path below the location's root, is written once and whole, and is never changed.
Whoever writes one learns its CRC-32C; whoever reads one by a manifest compares it. Failures are
typed (`errors.py`) and name the location and the path. Requests that can help themselves by being
repeated are, a bounded number of times; everything else is the caller's decision.

`Objects` has no loop of its own and may be used from several loops and threads. Files are sent and
received in pieces, so memory is bounded by a few parts per transfer.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Final, NamedTuple

from crc32c import crc32c

from zufluss.remote.errors import (
    LocationUnavailableError,
    ObjectCorruptError,
    ObjectExistsError,
    ObjectForbiddenError,
    ObjectMissingError,
    RemoteStorageError,
)
from zufluss.remote.local import LocalDirectory
from zufluss.remote.stores import store_properties
from zufluss.remote.uri import FILE, LocationUri

if TYPE_CHECKING:
    from zufluss.remote.cloud import CloudDirectory

__all__ = [
    "LocationUnavailableError",
    "ObjectCorruptError",
    "ObjectExistsError",
    "ObjectForbiddenError",
    "ObjectInfo",
    "ObjectMissingError",
    "Objects",
    "RemoteStorageError",
]

TIMEOUT_MS: Final = 30_000
INLINE_CRC_BYTES: Final = 1 << 18
"""Below it the checksum is computed on the event loop, in some ten microseconds."""


_UNSPELLABLE: Final = re.compile("[\x00-\x1f\x7f\ud800-\udfff]")
"""Control characters and halves of characters."""


class ObjectInfo(NamedTuple):
    """What a location says of an object."""

    path: str
    """Below the root."""
    size: int
    """In bytes."""
    modified_ms: int
    """When it was written, by the location's clock."""


async def checksum(data: bytes | memoryview) -> int:
    """The CRC-32C of bytes, without holding up the event loop."""
    if len(data) <= INLINE_CRC_BYTES:
        return crc32c(data)
    return await asyncio.to_thread(crc32c, data)


class Objects:
    """The objects of one location.

    `properties` are cluster keys of object stores, all or those of this location
    (`stores.store_properties`). `timeout_ms` is how long a request with its repetitions may take,
    and how long a transfer may stand still.
    """

    def __init__(
        self,
        uri: LocationUri,
        properties: Mapping[str, str] | None = None,
        *,
        timeout_ms: int = TIMEOUT_MS,
    ) -> None:
        self.uri = uri
        self._directory: LocalDirectory | CloudDirectory
        if uri.scheme == FILE:
            self._directory = LocalDirectory(uri, timeout_ms)
        else:
            from zufluss.remote.cloud import CloudDirectory  # takes long, most clients need it not

            wanted = store_properties(properties or {}, uri)
            self._directory = CloudDirectory(uri, wanted, timeout_ms)

    async def put(self, path: str, data: bytes | memoryview, *, if_absent: bool = False) -> int:
        """Make an object of these bytes; returns their CRC-32C.

        With `if_absent`, an object of this name raises ObjectExistsError, unless it was made by
        a try of this very call whose answer was lost.
        """
        await self._directory.put(self._checked(path), data, if_absent)
        return await checksum(data)

    async def put_file(self, path: str, source: Path) -> tuple[int, int]:
        """Make an object of a file that nobody changes meanwhile; its size and CRC-32C."""
        return await self._directory.put_file(self._checked(path), source)

    async def get(self, path: str, *, limit: int) -> bytes:
        """All bytes of an object; RemoteStorageError if it has more than `limit`."""
        return await self._directory.get(self._checked(path), limit)

    async def get_range(self, path: str, start: int, end: int) -> memoryview:
        """The bytes from `start` up to `end`; ObjectCorruptError if the object ends before."""
        if end <= start:
            return memoryview(b"")
        data = await self._directory.get_range(self._checked(path), start, end)
        if len(data) != end - start:
            raise ObjectCorruptError(
                self.uri.text,
                path,
                f"bytes {start} to {end} were asked for, it ends after {start + len(data)}",
            )
        return data

    async def get_file(self, path: str, target: Path) -> tuple[int, int]:
        """Copy an object to a local file, which appears whole or not at all; size and CRC-32C."""
        return await self._directory.get_file(self._checked(path), target)

    def stream(self, path: str, start: int = 0) -> AsyncIterator[memoryview]:
        """The bytes from `start` on, in pieces of a few MiB."""
        return self._directory.stream(self._checked(path), start)

    async def head(self, path: str) -> ObjectInfo:
        """Size and age of an object."""
        return ObjectInfo(path, *await self._directory.head(self._checked(path)))

    async def delete(self, paths: Sequence[str]) -> None:
        """Remove objects; those that are not there are fine."""
        if paths:
            await self._directory.delete([self._checked(path) for path in paths])

    async def list(self, prefix: str) -> AsyncIterator[list[ObjectInfo]]:
        """The objects below a directory, in pages; `""` lists all of the location."""
        directory = self._checked(prefix.strip("/")) if prefix.strip("/") else ""
        async for page in self._directory.list(directory):
            yield [ObjectInfo(*found) for found in page]

    def full_path(self, path: str) -> str:
        """The address of an object as clients get it."""
        return f"{self.uri.text}/{path}"

    def _checked(self, path: str) -> str:
        """Refuse what would leave the location, or that a store cannot spell."""
        bad = any(segment in ("", ".", "..") for segment in path.split("/"))
        if bad or _UNSPELLABLE.search(path):
            raise RemoteStorageError(self.uri.text, ascii(path), "this is no path below a location")
        return path

    def __repr__(self) -> str:
        return f"Objects({self.uri.text})"
