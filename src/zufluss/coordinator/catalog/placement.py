"""Which tablet server holds a new bucket.

A pure function. Round robin over the servers: bucket after bucket the next server leads. Tables
start at different servers, so that tables with one bucket do not all meet on the first one.
"""

from __future__ import annotations

from collections.abc import Iterable

from zufluss.cluster.image import BucketState
from zufluss.errors import InvalidReplicationFactorError


def place(bucket_count: int, servers: Iterable[int], start: int) -> tuple[BucketState, ...]:
    """The state of each bucket of a new table or partition; `start` turns the round robin."""
    ring = sorted(servers)
    if not ring:
        raise InvalidReplicationFactorError(
            "Replication factor: 1 larger than available tablet servers: 0. Start one, and try "
            "again"
        )
    return tuple(_led_by(ring[(start + number) % len(ring)]) for number in range(bucket_count))


def _led_by(server: int) -> BucketState:
    return BucketState(replicas=(server,), leader=server, isr=(server,))
