"""The objects of one location: the only way in which the rest of zufluss uses remote storage.

An object has a path below the location's root, is written once and whole, and is never changed. A
writer gets the CRC-32C of an object; a reader with a manifest compares it. Failures are typed
(`errors.py`) and name the location and the path. Requests that failed for the moment are repeated a
bounded number of times; everything else is the caller's decision.

`Objects` has no event loop of its own and may be used from several loops and threads. Files are
sent and received in pieces, so memory is bounded by a few parts per transfer.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Final, NamedTuple, TypeAlias

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
    "Content",
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
"""Up to this size the checksum is computed on the event loop, in some ten microseconds."""


_UNSPELLABLE: Final = re.compile("[\x00-\x1f\x7f\ud800-\udfff]")
"""Control characters and lone surrogates, which stores cannot spell."""


Content: TypeAlias = bytes | list[bytes]
"""The bytes of an object, perhaps in pieces."""


class ObjectInfo(NamedTuple):
    """The description of an object by its location."""

    path: str
    """Path below the root."""
    size: int
    """Length in bytes."""
    modified_ms: int
    """Time of the last change, by the location's clock."""


async def checksum(data: bytes | memoryview) -> int:
    """Return the CRC-32C of bytes without blocking the event loop."""
    if len(data) <= INLINE_CRC_BYTES:
        return crc32c(data)
    return await asyncio.to_thread(crc32c, data)


class Objects:
    """The objects of one location.

    `properties` are cluster keys of object stores, of all or of this location
    (`stores.store_properties`). `timeout_ms` limits a request with its repetitions, and the time
    that a transfer makes no progress. Without `sign_payload`, S3 requests are signed without a
    digest of their bodies.
    """

    def __init__(
        self,
        uri: LocationUri,
        properties: Mapping[str, str] | None = None,
        *,
        timeout_ms: int = TIMEOUT_MS,
        sign_payload: bool = True,
    ) -> None:
        self.uri = uri
        self._directory: LocalDirectory | CloudDirectory
        if uri.scheme == FILE:
            self._directory = LocalDirectory(uri, timeout_ms)
        else:
            from zufluss.remote.cloud import CloudDirectory  # slow, and most clients do not need it

            own = store_properties(properties or {}, uri)
            self._directory = CloudDirectory(uri, own, timeout_ms, sign_payload=sign_payload)

    async def put(self, path: str, data: bytes | memoryview, *, if_absent: bool = False) -> int:
        """Create an object; returns the CRC-32C of its bytes.

        With `if_absent`, raises ObjectExistsError if the object exists, unless an earlier try of
        this call created it and its answer was lost.
        """
        await self._directory.put(self._checked(path), data, if_absent)
        return await checksum(data)

    async def create(self, path: str, data: Content) -> None:
        """Create an object with one request, for callers that repeat it themselves.

        Pieces are sent as they are; who has small ones joins them first.

        Raises ObjectExistsError if the object exists. It may be the caller's own of an earlier
        request, and some stores say so when two requests merely met: look before you believe it.
        After any other error the object may exist, or come into being later.
        """
        await self._directory.create(self._checked(path), data)

    async def put_file(self, path: str, source: Path) -> tuple[int, int]:
        """Create an object from a file that nobody changes; return its size and CRC-32C."""
        return await self._directory.put_file(self._checked(path), source)

    async def get(self, path: str, *, limit: int) -> bytes:
        """Return all bytes of an object; RemoteStorageError if it has more than `limit`."""
        return await self._directory.get(self._checked(path), limit)

    async def get_range(self, path: str, start: int, end: int) -> memoryview:
        """Return the bytes from `start` to before `end`; ObjectCorruptError if some are missing."""
        if end <= start:
            return memoryview(b"")
        data = await self._directory.get_range(self._checked(path), start, end)
        if len(data) != end - start:
            raise ObjectCorruptError(
                self.uri.text,
                path,
                f"bytes {start} to {end} were requested, the object ends after {start + len(data)}",
            )
        return data

    async def get_file(self, path: str, target: Path) -> tuple[int, int]:
        """Copy an object to a local file, whole or not at all; return its size and CRC-32C."""
        return await self._directory.get_file(self._checked(path), target)

    def stream(self, path: str, start: int = 0) -> AsyncIterator[memoryview]:
        """Yield the bytes from `start` on, in pieces of a few MiB."""
        return self._directory.stream(self._checked(path), start)

    async def head(self, path: str) -> ObjectInfo:
        """Return size and time of change of an object."""
        return ObjectInfo(path, *await self._directory.head(self._checked(path)))

    async def delete(self, paths: Sequence[str]) -> None:
        """Delete objects; missing ones are ignored."""
        if paths:
            await self._directory.delete([self._checked(path) for path in paths])

    async def list(self, prefix: str) -> AsyncIterator[list[ObjectInfo]]:
        """Yield the objects below a directory in pages; `""` lists the whole location."""
        directory = self._checked(prefix.strip("/")) if prefix.strip("/") else ""
        async for page in self._directory.list(directory):
            yield [ObjectInfo(*entry) for entry in page]

    def full_path(self, path: str) -> str:
        """Return the address of an object for clients."""
        return f"{self.uri.text}/{path}"

    def _checked(self, path: str) -> str:
        """Return a path; raises RemoteStorageError if it leaves the location or is unspellable."""
        bad = any(segment in ("", ".", "..") for segment in path.split("/"))
        if bad or _UNSPELLABLE.search(path):
            raise RemoteStorageError(
                self.uri.text, ascii(path), "this is not a path below a location"
            )
        return path

    def __repr__(self) -> str:
        return f"Objects({self.uri.text})"
