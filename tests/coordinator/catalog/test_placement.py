"""Placement: servers, racks and load in, a leader for every bucket out."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from zufluss.cluster.image import ClusterNode
from zufluss.coordinator.catalog.placement import place
from zufluss.errors import InvalidReplicationFactorError

SERVERS = st.dictionaries(
    st.integers(0, 50), st.sampled_from([None, "a", "b", "c"]), min_size=1, max_size=9
).map(lambda racks: [ClusterNode(i, (), rack) for i, rack in racks.items()])
LEADERS = st.dictionaries(st.integers(0, 50), st.integers(0, 100))


def leaders_of(count: int, nodes: list[ClusterNode], leaders: dict[int, int]) -> list[int]:
    states = place(count, nodes, leaders)
    assert all(state.replicas == state.isr == (state.leader,) for state in states)
    return [state.leader for state in states]


@given(st.integers(1, 40), SERVERS, LEADERS)
def test_the_buckets_of_a_table_are_spread_evenly_over_the_servers_that_are_there(
    count: int, nodes: list[ClusterNode], leaders: dict[int, int]
) -> None:
    ids = [node.node_id for node in nodes]
    led = Counter(leaders_of(count, nodes, leaders))
    assert led.keys() <= set(ids)
    assert max(led.values()) - min(led[i] for i in ids) <= 1
    assert leaders_of(count, nodes[::-1], leaders) == leaders_of(count, nodes, leaders)


@given(st.integers(1, 8), SERVERS, LEADERS)
def test_no_rack_gets_two_buckets_before_every_rack_has_one(
    count: int, nodes: list[ClusterNode], leaders: dict[int, int]
) -> None:
    racks = {node.node_id: node.rack for node in nodes}
    count = min(count, len(nodes))
    in_rack = Counter(racks[i] for i in leaders_of(count, nodes, leaders))
    assert len(in_rack) == min(count, len(set(racks.values())))


@given(SERVERS, LEADERS)
def test_a_single_bucket_goes_to_the_server_that_leads_least(
    nodes: list[ClusterNode], leaders: dict[int, int]
) -> None:
    (chosen,) = leaders_of(1, nodes, leaders)
    fewest = min(leaders.get(node.node_id, 0) for node in nodes)
    expected = min(n.node_id for n in nodes if leaders.get(n.node_id, 0) == fewest)
    assert chosen == expected


def test_a_server_that_joins_gets_new_buckets() -> None:
    nodes = [ClusterNode(1, ()), ClusterNode(2, ())]
    leaders = Counter(leaders_of(12, nodes, {}))
    nodes.append(ClusterNode(3, ()))
    for _ in range(6):
        leaders.update(leaders_of(1, nodes, leaders))
    assert leaders == {1: 6, 2: 6, 3: 6}


def test_without_a_tablet_server_nothing_can_be_placed() -> None:
    with pytest.raises(InvalidReplicationFactorError, match="available tablet servers: 0"):
        place(1, [], {})
