"""The refusal that ends the scan of an old client which cannot read a remote location.

Clients that use one token for all remote files can read the first location, and locations with the
same credentials. For other locations they need an error, but the batch scanners of pyfluss ignore
every error code of a bucket and fetch again at once, for ever. Every kind of scan ends at a batch
whose schema the client cannot get: the client asks for the schema, and raises the error that it
gets. So such a bucket is answered with an empty batch whose schema id stands for the location, and
GET_TABLE_SCHEMA of that id is answered with the error.

| schema id | meaning |
|---|---|
| from 1 on | a schema of the table |
| −1000 − n | the rows lie in location n |
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from zufluss.errors import AuthorizationError
from zufluss.record.header import build_batch, stamp

_FIRST: Final = -1000
_LAST: Final = -(1 << 15)


class RefusedLocationError(AuthorizationError):
    """A client with the credentials of the first location reads from another location."""

    def __init__(self, location_id: int, uri: str) -> None:
        super().__init__(
            f"these rows lie in remote location {location_id}, {uri}, which has other credentials "
            "than the first one; this client takes those of the first one only. Read with a "
            "zufluss client, or keep the table in the first location with "
            "table.zufluss.remote.placement = pinned:<id>"
        )
        self.location_id = location_id


def refusal_batch(location_id: int, offset: int) -> bytes:
    """A batch at `offset` at which an old client fails, because of location `location_id`."""
    batch = build_batch(max(_FIRST - location_id, _LAST), b"", 1)
    stamp(batch, 0, 0, offset, 0, -1)
    return bytes(batch)


def check_refusal(schema_id: int | None, uri_of: Callable[[int], str]) -> None:
    """`RefusedLocationError` if a schema id stands for a location."""
    if schema_id is not None and _LAST <= schema_id <= _FIRST:
        location_id = _FIRST - schema_id
        raise RefusedLocationError(location_id, uri_of(location_id))
