"""Standbys are placed, ordered to follow, replaced, and preferred when their leader is lost."""

from __future__ import annotations

from collections import Counter
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio

from tests.coordinator.wal.world import SILENCE, Server, World, until
from zufluss.cluster.image import BucketState, ClusterNode
from zufluss.cluster.wal import StandbyReport
from zufluss.coordinator.catalog.placement import heir, place, successors, with_standbys
from zufluss.coordinator.wal.keeper import led_by
from zufluss.coordinator.wal.standbys import GONE_SECONDS, StandbyOrders, completed
from zufluss.errors import InvalidReplicationFactorError, NetworkError, NotLeaderError
from zufluss.model.table import TableBucket

TWO = {"table.replication.factor": "2"}


@pytest_asyncio.fixture
async def world(tmp_path: Path) -> AsyncIterator[World]:
    world = await World(tmp_path).start()
    yield world
    await world.stop()


def orders_of(world: World) -> StandbyOrders:
    assert world.coordinator.standbys is not None
    return world.coordinator.standbys


def follows(server: Server, bucket: TableBucket) -> int | None:
    """Whom a server was told to follow."""
    order = server.tablet.buckets.get(bucket)
    return None if order is None or order.state.leader == server.server_id else order.state.leader


async def look_until(world: World, condition: object) -> None:
    """Let the coordinator look after its standbys until something is so."""
    assert callable(condition)
    for _ in range(1000):
        if condition():
            return
        await orders_of(world).look()
        await until(lambda: not orders_of(world)._sending)
    raise AssertionError("it did not come so far")


def host(world: World, server_id: int) -> Server:
    return world.servers[f"host-{server_id}"]


async def report(world: World, server: Server, bucket: TableBucket, caught_up: bool) -> None:
    epoch = world.state(bucket).leader_epoch
    reports = [StandbyReport(bucket, epoch, caught_up)]
    await world.wal.report_standbys(server.session, reports)


def test_standbys_are_on_other_servers_and_other_racks_first() -> None:
    nodes = [ClusterNode(i, (), rack) for i, rack in ((1, "a"), (2, "a"), (3, "b"), (4, "b"))]
    states = place(8, nodes, {}, 2)
    racks = {node.node_id: node.rack for node in nodes}
    for state in states:
        leader, standby = state.replicas
        assert state.leader == leader
        assert racks[leader] != racks[standby]
        assert state.isr == (leader,), "nobody has followed yet"
    assert Counter(state.replicas[1] for state in states) == {1: 2, 2: 2, 3: 2, 4: 2}
    assert {len(set(state.replicas)) for state in place(4, nodes, {}, 4)} == {4}
    assert [state.replicas for state in place(2, nodes[:1], {}, 3)] == [(1,), (1,)]


def test_a_lost_standby_stays_as_long_as_nobody_can_take_its_place() -> None:
    nodes = [ClusterNode(1, ())]
    state = BucketState((1, 2), 1)
    assert completed(state, 2, nodes, {2}, Counter()) == (1, 2)
    assert completed(state, 2, [*nodes, ClusterNode(3, ())], {2}, Counter()) == (1, 3)
    assert completed(state, 2, [*nodes, ClusterNode(3, ())], set(), Counter()) == (1, 2)
    assert with_standbys((1,), 2, [*nodes], Counter()) == (1,)


def test_the_heir_is_a_standby_that_has_caught_up() -> None:
    nodes = [ClusterNode(i, ()) for i in (2, 3, 4)]
    assert heir(BucketState((1, 2, 3), 1, isr=(1, 3)), nodes, {3: 100}) == 3
    assert heir(BucketState((1, 2, 3), 1, isr=(1,)), nodes, {2: 5}) == 3, "it leads fewer"
    assert heir(BucketState((1,), 1, isr=(1,)), nodes, {}) is None
    assert heir(BucketState((1, 9), 1, isr=(1, 9)), nodes, {}) is None, "9 is not there"


def test_buckets_without_a_standby_are_spread_beside_those_with_one() -> None:
    nodes = [ClusterNode(i, ()) for i in (2, 3)]
    states = [BucketState((1, 3), 1), BucketState((1,), 1), BucketState((1, 3), 1)]
    assert successors(states, nodes, {2: 0, 3: 0}) == [3, 2, 3]
    assert successors([], nodes, {}) == []


def test_the_former_leader_may_come_back_as_a_standby() -> None:
    state = BucketState((1, 2, 3), 1, 4, (1, 2), 7)
    assert led_by(state, 2) == BucketState((2, 1, 3), 2, 5, (2,), 8)
    assert led_by(BucketState((1,), 1, 4, (1,), 7), 2) == BucketState((2,), 2, 5, (2,), 8)
    assert led_by(state, 1).isr == (1, 2), "a leader that registers again keeps its standbys"


async def test_standbys_are_ordered_to_follow_and_told_to_clients_when_they_have_caught_up(
    world: World,
) -> None:
    servers = [await world.server(i) for i in (1, 2, 3)]
    buckets = await world.create_table(buckets=3, properties=TWO)
    for bucket in buckets:
        leader, standby = world.state(bucket).replicas
        assert leader != standby
        await look_until(world, lambda b=bucket, s=standby: follows(host(world, s), b) is not None)
        assert follows(host(world, standby), bucket) == leader
        assert world.state(bucket).isr == (leader,)
        await report(world, host(world, standby), bucket, True)
        assert world.state(bucket).isr == (leader, standby)
        for server in servers:
            assert server.tablet.image.bucket_state(bucket).isr == (leader, standby)  # type: ignore[union-attr]
        epoch = world.state(bucket).bucket_epoch
        await report(world, host(world, standby), bucket, True)
        assert world.state(bucket).bucket_epoch == epoch, "nothing is written without a change"
        await report(world, host(world, standby), bucket, False)
        assert world.state(bucket).isr == (leader,)


async def test_what_a_standby_says_counts_only_for_the_present_leader_and_session(
    world: World,
) -> None:
    for i in (1, 2, 3):
        await world.server(i)
    (bucket,) = await world.create_table(buckets=1, properties=TWO)
    leader, standby = world.state(bucket).replicas
    (other,) = {1, 2, 3} - {leader, standby}
    await report(world, host(world, other), bucket, True)
    assert world.state(bucket).isr == (leader,), "it is no replica"
    old = [StandbyReport(bucket, 99, True)]
    await world.wal.report_standbys(host(world, standby).session, old)
    assert world.state(bucket).isr == (leader,)
    session = host(world, standby).session
    host(world, standby).down = True
    await world.silent(host(world, standby))
    await until(lambda: world.wal.book.live(standby) is None)
    with pytest.raises(NotLeaderError):
        await world.wal.report_standbys(session, [StandbyReport(bucket, 0, True)])


async def test_a_standby_that_has_caught_up_takes_over_and_another_one_follows_it(
    world: World,
) -> None:
    for i in (1, 2, 3, 4):
        await world.server(i)
    (bucket,) = await world.create_table(buckets=1, properties={"table.replication.factor": "3"})
    leader, behind, caught_up = world.state(bucket).replicas
    await report(world, host(world, caught_up), bucket, True)
    host(world, leader).down = True
    await world.silent(host(world, leader))
    await until(lambda: world.state(bucket).leader == caught_up)
    state = world.state(bucket)
    assert state.replicas == (caught_up, leader, behind), "it may come back"
    assert state.isr == (caught_up,)
    await look_until(world, lambda: follows(host(world, behind), bucket) == caught_up)
    world.seconds.now += GONE_SECONDS + 1
    for server in world.servers.values():
        if not server.down:
            await server.link.heartbeat()
    (new,) = {1, 2, 3, 4} - {leader, behind, caught_up}
    await look_until(world, lambda: follows(host(world, new), bucket) == caught_up)
    assert set(world.state(bucket).replicas) == {caught_up, behind, new}


async def test_a_standby_that_fails_holds_up_no_creation_and_gets_its_order_later(
    world: World,
) -> None:
    one, two = await world.server(1), await world.server(2)
    two.tablet.failure = NetworkError("no answer")
    buckets = await world.create_table(buckets=1, properties=TWO)
    assert world.state(buckets[0]).leader == 1
    assert buckets[0] in one.tablet.buckets
    await orders_of(world).look()
    assert follows(two, buckets[0]) is None
    two.tablet.failure = None
    await until(lambda: follows(two, buckets[0]) == 1)


async def test_a_standby_that_registers_again_learns_what_it_follows(world: World) -> None:
    one, two = await world.server(1), await world.server(2)
    buckets = await world.create_table(buckets=4, properties=TWO)
    await look_until(world, lambda: all(follows(one, b) or follows(two, b) for b in buckets))
    again = await world.server(2, "host-2")
    for bucket in buckets:
        order = again.tablet.buckets[bucket]
        assert order.state.replicas == world.state(bucket).replicas
        assert (order.state.leader == 2) == (world.state(bucket).leader == 2)


async def test_a_coordinator_that_starts_replaces_no_standby_that_it_has_not_seen_yet(
    world: World,
) -> None:
    for i in (1, 2, 3):
        await world.server(i)
    (bucket,) = await world.create_table(buckets=1, properties=TWO)
    leader, standby = world.state(bucket).replicas
    await report(world, host(world, standby), bucket, True)
    before = world.state(bucket).replicas
    await world.restart()
    await world.server(leader, f"host-{leader}")
    (other,) = {1, 2, 3} - {leader, standby}
    await world.server(other, f"host-{other}")
    world.seconds.now += SILENCE / 2
    await orders_of(world).look()
    assert world.state(bucket).replicas == before
    assert world.state(bucket).isr == (leader, standby)


async def test_more_replicas_than_servers_are_refused(world: World) -> None:
    await world.server(1)
    with pytest.raises(InvalidReplicationFactorError, match="larger than available"):
        await world.create_table(buckets=1, properties=TWO)
