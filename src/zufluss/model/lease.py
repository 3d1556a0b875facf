"""Leases of key-value snapshots: the nouns that client and server share.

A lease keeps one snapshot of each of its buckets readable until the lease is released or expires.
`coordinator/leases/calls.py` describes leases on the server.
"""

from __future__ import annotations

from enum import IntEnum
from typing import NamedTuple

LOG_OFFSET_UNKNOWN = -1
"""The log offset of a leased snapshot whose table was dropped before a restart."""


class Unavailable(IntEnum):
    """Why a bucket has no snapshot to lease."""

    NO_BUCKET = 1
    """There is no such bucket."""
    NO_SNAPSHOT = 2
    """The bucket has no snapshot yet: read its changelog from the beginning."""
    GONE = 3
    """The bucket has no such snapshot, or no longer: lease the latest one."""


class LeasedSnapshot(NamedTuple):
    """The snapshot of a bucket that a lease has."""

    snapshot_id: int
    """Its number, per bucket."""
    log_offset: int
    """The changelog continues from this offset; -1 when it is no longer known."""


class Revoked(NamedTuple):
    """A table or partition that a lease lost because it was dropped."""

    table_id: int
    """The table's id."""
    partition_id: int | None
    """The partition's id; None for the whole table."""
    what: str
    """The name of the table or partition."""
