"""Which tablet server holds a new bucket.

A pure function of the servers that are there and of how many buckets each leads. The buckets of one
table or partition are placed one after the other; each goes to the server that is the least of

1. buckets of the same table or partition at the server, so that they differ by one at most,
2. buckets of the same table or partition in its rack, so that a rack that fails takes few of them,
3. buckets that the server leads, so that a server that joined later gets its share,
4. server ids, so that the same question has the same answer.

A server with a tag, which is about to leave, gets none (`candidates`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping

from zufluss.cluster.image import BucketState, ClusterImage, ClusterNode
from zufluss.errors import InvalidReplicationFactorError


def candidates(image: ClusterImage) -> list[ClusterNode]:
    """The servers that may get buckets; raises if there are servers, and all have tags."""
    nodes = image.untagged(image.tablets.values())
    if image.tablets and not nodes:
        raise InvalidReplicationFactorError(
            f"Replication factor: 1 larger than available tablet servers: 0. All "
            f"{len(image.tablets)} tablet servers have a tag, which keeps buckets away: remove one "
            "(zufluss cluster tag remove), or start another server"
        )
    return nodes


def place(
    bucket_count: int, servers: Iterable[ClusterNode], leaders: Mapping[int, int]
) -> tuple[BucketState, ...]:
    """The state of each bucket of a new table or partition; `leaders` are buckets by server id."""
    candidates = sorted(servers, key=lambda node: (leaders.get(node.node_id, 0), node.node_id))
    if not candidates:
        raise InvalidReplicationFactorError(
            "Replication factor: 1 larger than available tablet servers: 0. Start one, and try "
            "again"
        )
    if len(candidates) == 1:
        return (_led_by(candidates[0].node_id),) * bucket_count
    turn = _one_each(candidates)
    return tuple(_led_by(turn[number % len(turn)]) for number in range(bucket_count))


def _one_each(candidates: list[ClusterNode]) -> list[int]:
    """The ids of all servers in the order of their turns; those with few leaders come first."""
    in_rack: Counter[str | None] = Counter()
    turn: list[int] = []
    while candidates:
        node = min(candidates, key=lambda node: in_rack[node.rack])  # the first of equal ones
        candidates.remove(node)
        in_rack[node.rack] += 1
        turn.append(node.node_id)
    return turn


def _led_by(server: int) -> BucketState:
    return BucketState(replicas=(server,), leader=server, isr=(server,))
