"""Which tablet servers hold a new bucket.

A pure function. Round robin over the servers: bucket after bucket the next server leads, and the
servers after it follow. Tables start at different servers, so that tables with one bucket do not
all meet on the first one.
"""

from __future__ import annotations

from collections.abc import Iterable

from zufluss.cluster.image import BucketState
from zufluss.errors import InvalidReplicationFactorError


def place(
    bucket_count: int, replication_factor: int, servers: Iterable[int], start: int
) -> tuple[BucketState, ...]:
    """The state of each bucket of a new table or partition; `start` turns the round robin."""
    ring = sorted(servers)
    if replication_factor > len(ring):
        raise InvalidReplicationFactorError(
            f"replication factor {replication_factor} needs as many tablet servers, there are "
            f"{len(ring)}; lower table.replication.factor or start more servers"
        )
    return tuple(
        _state(tuple(ring[(start + i + k) % len(ring)] for k in range(replication_factor)))
        for i in range(bucket_count)
    )


def _state(replicas: tuple[int, ...]) -> BucketState:
    return BucketState(replicas=replicas, leader=replicas[0], isr=replicas)
