"""Telling an old client that it cannot read a remote location, so that its scan ends.

Clients that know one token for all remote files can read the first location, and those with the
same credentials. For the others they need an error, but the batch scanners of pyfluss swallow every
error code of a bucket and fetch again at once, for ever. What does end every kind of scan, with the
server's own words, is a batch written under a schema the client cannot get: it asks for the schema
and raises what it is told. So such a bucket is answered with an empty batch whose schema id says
which location is meant, and GET_TABLE_SCHEMA of that id is answered with the reason.

| schema id | meaning |
|---|---|
| from 1 on | a schema of the table |
| −1000 − n | what is wanted lies in location n |
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from zufluss.errors import AuthorizationError
from zufluss.record.header import build_batch, stamp

_FIRST: Final = -1000
_LAST: Final = -(1 << 15)


class RefusedLocationError(AuthorizationError):
    """A client that has the credentials of the first location wants something of another one."""

    def __init__(self, location_id: int, uri: str) -> None:
        super().__init__(
            f"these rows lie in remote location {location_id}, {uri}, which has other credentials "
            "than the first one; this client takes those of the first one only. Read with a "
            "zufluss client, or keep the table in the first location with "
            "table.zufluss.remote.placement = pinned:<id>"
        )
        self.location_id = location_id


def refusal_batch(location_id: int, offset: int) -> bytes:
    """A batch at `offset` that an old client fails at, because of location `location_id`."""
    batch = build_batch(max(_FIRST - location_id, _LAST), b"", 1)
    stamp(batch, 0, 0, offset, 0, -1)
    return bytes(batch)


def check_refusal(schema_id: int | None, uri_of: Callable[[int], str]) -> None:
    """Raise what a schema id stands for, unless it stands for a schema."""
    if schema_id is not None and _LAST <= schema_id <= _FIRST:
        location_id = _FIRST - schema_id
        raise RefusedLocationError(location_id, uri_of(location_id))
