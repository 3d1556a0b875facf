"""Which tablet server holds a new bucket.

A pure function of the servers that are there and of how many buckets each leads. The buckets of one
table or partition are placed one after the other; each goes to the server that is the least of

1. buckets of the same table or partition at the server, so that they differ by one at most,
2. buckets of the same table or partition in its rack, so that a rack that fails takes few of them,
3. buckets that the server leads, so that a server that joined later gets its share,
4. server ids, so that the same question has the same answer.

A server with a tag, which is about to leave, gets none (`candidates`).

The standbys of a bucket go to other servers than its leader's: other racks first, then those that
hold few buckets.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

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
    bucket_count: int, servers: Iterable[ClusterNode], leaders: Mapping[int, int], factor: int = 1
) -> tuple[BucketState, ...]:
    """The state of each bucket of a new table or partition; `leaders` are buckets by server id.

    Of the `factor` replicas all but the leader are standbys: fewer while there are fewer servers.
    """
    candidates = sorted(servers, key=lambda node: (leaders.get(node.node_id, 0), node.node_id))
    if not candidates:
        raise InvalidReplicationFactorError(
            "Replication factor: 1 larger than available tablet servers: 0. Start one, and try "
            "again"
        )
    if len(candidates) == 1:
        return (_led_by((candidates[0].node_id,)),) * bucket_count
    turn = _one_each(list(candidates))
    led = [(turn[number % len(turn)],) for number in range(bucket_count)]
    if factor == 1:
        return tuple(map(_led_by, led))
    load = Counter(leaders)
    load.update(leader for (leader,) in led)
    return tuple(_led_by(with_standbys(each, factor, candidates, load)) for each in led)


def with_standbys(
    replicas: tuple[int, ...], factor: int, servers: Iterable[ClusterNode], load: Counter[int]
) -> tuple[int, ...]:
    """The replicas of a bucket with standbys added until there are `factor`, or no more servers.

    `load` has the buckets that each server holds; what is added here is counted.
    """
    nodes = {node.node_id: node for node in servers}
    chosen = list(replicas)
    in_rack = Counter(nodes[i].rack for i in chosen if i in nodes)
    while len(chosen) < factor and (free := nodes.keys() - chosen):
        best = min(free, key=lambda i: (in_rack[nodes[i].rack], load[i], i))
        chosen.append(best)
        in_rack[nodes[best].rack] += 1
        load[best] += 1
    return tuple(chosen)


def successors(
    states: Sequence[BucketState], nodes: Sequence[ClusterNode], leaders: Mapping[int, int]
) -> list[int]:
    """The next leader of each bucket of a table or partition: a standby, else by load and rack."""
    load = Counter(leaders)
    next_leaders: list[int | None] = []
    for state in states:
        warm = heir(state, nodes, load)
        next_leaders.append(warm)
        if warm is not None:
            load[warm] += 1
    cold = iter(place(next_leaders.count(None), nodes, load))
    return [next(cold).leader if each is None else each for each in next_leaders]


def heir(
    state: BucketState, nodes: Iterable[ClusterNode], leaders: Mapping[int, int]
) -> int | None:
    """The server that can lead a bucket soonest: a standby that has caught up, else any standby."""
    there = {node.node_id for node in nodes}
    for among in (state.isr, state.replicas):
        candidates = [i for i in among if i in there and i != state.leader]
        if candidates:
            return min(candidates, key=lambda server: (leaders.get(server, 0), server))
    return None


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


def _led_by(replicas: tuple[int, ...]) -> BucketState:
    """Standbys are in sync when they have said so, not at birth."""
    return BucketState(replicas=replicas, leader=replicas[0], isr=replicas[:1])
