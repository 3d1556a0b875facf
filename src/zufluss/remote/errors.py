"""Failures of requests to remote storage, by how a caller reacts.

Only `LocationUnavailableError` is a failure of the location: it counts for its health, and an
upload goes elsewhere. A missing or forbidden object is an answer of a location that works.
"""

from __future__ import annotations

from zufluss.errors import ErrorCode, ZuflussError


class RemoteStorageError(ZuflussError, code=ErrorCode.STORAGE_EXCEPTION):
    """A request to remote storage failed. A retry does not help unless a subclass says so."""

    def __init__(self, uri: str, path: str, reason: str) -> None:
        super().__init__(f"{uri}/{path}: {reason}" if path else f"{uri}: {reason}")
        self.uri = uri
        self.path = path

    @property
    def retriable(self) -> bool:
        """The same request may succeed later."""
        return False


class LocationUnavailableError(RemoteStorageError):
    """The location did not answer, or answered that it cannot at present."""

    def __init__(self, uri: str, path: str, reason: str, *, throttled: bool = False) -> None:
        super().__init__(uri, path, reason)
        self.throttled = throttled
        """The location asked for fewer requests (429, 503)."""

    @property
    def retriable(self) -> bool:
        """The same request may succeed later."""
        return True


class NotOursError(LocationUnavailableError):
    """The location has no readable marker of this cluster, so nothing is written or deleted there.

    It is down until it has one.
    """


class ForeignLocationError(NotOursError):
    """The location belongs to another cluster."""


class ObjectMissingError(RemoteStorageError, LookupError):
    """The location has no such object."""


class ObjectForbiddenError(RemoteStorageError):
    """The location refused the credentials, or they do not cover this object."""


class ObjectExistsError(RemoteStorageError):
    """An object was to be created, and another one has its path."""


class ObjectCorruptError(RemoteStorageError, ValueError):
    """The object does not have the bytes that were written: size or checksum differ."""


def check_limit(uri: str, path: str, size: int, limit: int) -> None:
    """Refuse an object that is larger than its reader allows."""
    if size > limit:
        raise RemoteStorageError(
            uri, path, f"the object has {size} bytes; at most {limit} are read"
        )
