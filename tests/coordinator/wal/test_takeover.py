"""Buckets of lost tablet servers get other leaders, whoever dies in between."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from tests.coordinator.support import call
from tests.coordinator.wal.world import EVENTS, LEASE_SECONDS, SILENCE, Server, World, until
from zufluss.cluster.examination import Severity
from zufluss.cluster.replicas import replica_from_proto
from zufluss.cluster.wal import Takeover, WalSource
from zufluss.coordinator.wal.book import State
from zufluss.coordinator.wal.takeover import RETURN_LEASES, UNDELIVERED_SECONDS
from zufluss.errors import NetworkError
from zufluss.model.table import DatabaseDescriptor, TableBucket
from zufluss.wire import messages as m
from zufluss.wire.api import ApiKey

STEPS = ("wal-close", "wal-seal", "wal-sealed", "wal-assign", "wal-assigned")


@pytest_asyncio.fixture
async def world(tmp_path: Path) -> AsyncIterator[World]:
    world = await World(tmp_path).start()
    yield world
    await world.stop()


async def ordered(world: World, buckets: list[TableBucket]) -> None:
    """Wait until the new leaders of these buckets have their orders."""

    def has(bucket: TableBucket) -> bool:
        state = world.state(bucket)
        order = world.servers[f"host-{state.leader}"].tablet.buckets.get(bucket)
        return order is not None and order.leader_epoch == state.leader_epoch

    await until(lambda: all(map(has, buckets)))


async def test_the_buckets_of_a_silent_server_are_spread_over_the_others(world: World) -> None:
    lost, two, three = [await world.server(i) for i in (1, 2, 3)]
    buckets = await world.create_table(buckets=12)
    theirs = world.led(lost, buckets)
    former = lost.session
    lost.frozen = True
    await world.silent(lost)
    await until(lambda: not world.led(lost, buckets))
    await ordered(world, theirs)
    assert Counter(world.state(b).leader for b in buckets) == {2: 6, 3: 6}
    for bucket in theirs:
        state = world.state(bucket)
        order = (two if state.leader == 2 else three).tablet.buckets[bucket]
        assert state.wal == former.server_epoch, "the source stays until its end is written again"
        assert order.source == WalSource(former, 0, 0)
        assert (state.leader_epoch, state.replicas, state.isr) == (
            1,
            (state.leader,),
        ) * 1 + ((state.leader,),)
        assert order.lease_ms == 0, "it was silent for two leases"
    assert world.takeovers.count == 4
    assert set(world.coordinator.image.tablets) == {2, 3}


async def test_a_server_whose_address_refuses_connections_is_lost_before_the_lease_is_over(
    world: World,
) -> None:
    lost, two = await world.server(1), await world.server(2)
    buckets = await world.create_table(buckets=2)
    (bucket,) = world.led(lost, buckets)
    lost.down = True
    world.seconds.now += LEASE_SECONDS / 2
    await two.link.heartbeat()
    registrations = world.coordinator.registrations
    assert registrations is not None
    await registrations.expire()
    await until(lambda: world.state(bucket).leader == 2)
    await ordered(world, [bucket])
    assert two.tablet.buckets[bucket].lease_ms == 1000 * LEASE_SECONDS / 2, "the rest of its lease"


async def test_a_slow_server_that_accepts_connections_keeps_its_buckets(world: World) -> None:
    slow = await world.server(1)
    buckets = await world.create_table(buckets=2)
    world.seconds.now += LEASE_SECONDS
    registrations = world.coordinator.registrations
    assert registrations is not None
    await registrations.expire()
    await asyncio.gather(*registrations._watches)
    await slow.link.heartbeat()
    assert world.led(slow, buckets) == buckets
    assert all(world.state(b).leader_epoch == 0 for b in buckets)


async def test_a_coordinator_that_was_held_up_gives_nobody_up_for_that(world: World) -> None:
    """Its servers sent heartbeats, which wait in its sockets."""
    lost, two = await world.server(1), await world.server(2)
    buckets = await world.create_table(buckets=2)
    registrations = world.coordinator.registrations
    assert registrations is not None
    await registrations.check()
    world.seconds.now += 10 * SILENCE
    await registrations.check()
    assert set(world.coordinator.image.tablets) == {1, 2}
    for _ in range(20):  # now it is really silent
        world.seconds.now += SILENCE / 10
        await two.link.heartbeat()
        await registrations.check()
    await until(lambda: world.led(two, buckets) == buckets)
    assert set(world.coordinator.image.tablets) == {2}
    assert lost.session != world.wal.book.live(1)


async def test_the_servers_in_the_metadata_have_every_leader(world: World) -> None:
    """pyfluss never looks for another leader once it was told one that is not among them."""
    lost = await world.server(1)
    buckets = await world.create_table(buckets=2)
    lost.frozen = True
    await world.silent(lost)

    async def listed() -> set[int]:
        answer = await call(world.services, ApiKey.GET_METADATA, m.MetadataRequest(), "CLIENT")
        return {node.node_id for node in answer.tablet_servers}

    assert world.coordinator.image.tablets == {}
    assert await listed() == {1}, "it leads, until another one does"
    two = await world.server(2)
    await until(lambda: world.led(two, buckets) == buckets)
    assert await listed() == {2}


async def test_without_another_server_buckets_wait_for_the_first_that_registers(
    world: World,
) -> None:
    lost = await world.server(1)
    buckets = await world.create_table(buckets=3)
    lost.frozen = True
    await world.silent(lost)
    assert world.led(lost, buckets) == buckets
    await until(lambda: world.takeovers.problems)
    (finding,) = world.takeovers.findings()
    assert (finding.severity, finding.subject) == (Severity.PROBLEM, "tablet server 1")
    assert "no other tablet server answers" in finding.text
    two = await world.server(2)
    await until(lambda: world.led(two, buckets) == buckets)
    await ordered(world, buckets)
    await until(lambda: not world.takeovers.problems)


async def test_buckets_of_a_session_whose_location_is_away_are_taken_over_when_it_is_back(
    world: World,
) -> None:
    lost, two = await world.server(1), await world.server(2)
    buckets = await world.create_table(buckets=2)
    (bucket,) = world.led(lost, buckets)
    away = world.location.rename(world.location.with_name("away"))
    world.location.write_text("no directory")
    lost.frozen = True
    await world.silent(lost)
    await until(lambda: world.takeovers.problems)
    (finding,) = world.takeovers.findings()
    assert "could not be given to others yet" in finding.text
    assert world.wal.book.counts["closing"] == 1, "its session is granted nothing any more"
    world.location.unlink()
    away.rename(world.location)
    await until(lambda: world.state(bucket).leader == two.server_id)
    await until(lambda: not world.takeovers.problems)
    assert world.wal.book.counts == {"live": 1, "closing": 0, "sealed": 1, "released": 0}


async def test_a_lost_server_that_comes_back_gets_no_bucket_twice(world: World) -> None:
    lost, two = await world.server(1), await world.server(2)
    buckets = await world.create_table(buckets=4)
    await world.silent(lost)
    await until(lambda: world.led(two, buckets) == buckets)
    await lost.link.heartbeat()
    assert lost.tablet.buckets == {}
    assert world.wal.book.live(1) is not None
    assert world.led(two, buckets) == buckets
    more = await world.create_table("more", buckets=1)
    assert world.led(lost, more) == more, "it leads least"


async def test_an_order_that_does_not_arrive_is_sent_again(world: World) -> None:
    lost, two = await world.server(1), await world.server(2)
    buckets = await world.create_table(buckets=2)
    two.frozen = True
    await world.silent(lost)
    await until(lambda: world.led(two, buckets) == buckets)
    two.frozen = False
    await ordered(world, buckets)


def hang(server: Server) -> asyncio.Future[None]:
    """Have orders to lead buckets reach a server only when the outcome is set, or never."""
    outcome: asyncio.Future[None] = asyncio.get_running_loop().create_future()
    call = server.call

    async def late(api_key: ApiKey, request: Any, *, timeout_ms: int) -> Any:
        if api_key is not ApiKey.NOTIFY_LEADER_AND_ISR:
            return await call(api_key, request, timeout_ms=timeout_ms)
        await asyncio.shield(outcome)
        orders = map(replica_from_proto, request.notify_buckets_leader_req)
        server.tablet.buckets |= {order.table_bucket: order for order in orders}
        return m.NotifyLeaderAndIsrResponse()

    server.call = late  # type: ignore[method-assign]
    return outcome


async def test_a_new_leader_that_hangs_holds_up_nobody_else(world: World) -> None:
    lost, two, three = [await world.server(i) for i in (1, 2, 3)]
    buckets = await world.create_table(buckets=6)
    outcome = hang(two)
    await world.silent(lost)
    await until(lambda: not world.led(lost, buckets))
    await ordered(world, world.led(three, buckets))
    await world.coordinator.catalog.create_database("meanwhile", DatabaseDescriptor())
    await world.silent(lost, three)
    await until(lambda: world.led(two, buckets) == buckets)
    outcome.set_result(None)
    await ordered(world, buckets)


async def test_a_bucket_that_is_dropped_while_its_order_is_under_way_is_stopped(
    world: World,
) -> None:
    lost, two = await world.server(1), await world.server(2)
    await world.create_table(buckets=2)
    outcome = hang(two)
    await world.silent(lost)
    await until(lambda: world.takeovers._sending)
    await world.coordinator.catalog.drop_table(EVENTS)
    outcome.set_result(None)
    await until(lambda: not world.takeovers._sending)
    assert not two.tablet.buckets


async def test_buckets_of_a_server_that_takes_no_orders_go_to_another_one(world: World) -> None:
    lost, two, three = [await world.server(i) for i in (1, 2, 3)]
    buckets = await world.create_table(buckets=3)
    (bucket,) = world.led(lost, buckets)
    former = lost.session
    outcome = hang(two)
    await world.silent(lost)
    await until(lambda: world.state(bucket).leader == two.server_id)
    outcome.set_exception(NetworkError("no answer in time"))
    await until(lambda: world.takeovers._failing)
    world.seconds.now += UNDELIVERED_SECONDS + 0.1
    await until(lambda: world.state(bucket).leader == three.server_id)
    await ordered(world, [bucket])
    order = three.tablet.buckets[bucket]
    assert (order.source, order.leader_epoch) == (WalSource(former, 0, 0), 2)
    late = [Takeover(bucket, 1)]
    assert await world.wal.commit_takeovers(two.session, late) == set(), "it came too late"
    assert set(world.coordinator.image.tablets) == {2, 3}


@pytest.mark.parametrize("step", STEPS)
async def test_a_coordinator_that_dies_at_any_step_is_continued_by_the_next(
    tmp_path: Path, step: str
) -> None:
    world = await World(tmp_path).start(step)
    lost, two = await world.server(1), await world.server(2)
    buckets = await world.create_table(buckets=4)
    theirs, former = world.led(lost, buckets), lost.session
    lost.frozen = True
    await world.silent(lost)
    await until(lambda: world.takeovers._task is not None and world.takeovers._task.done())
    await world.restart()
    await two.link.heartbeat()
    assert set(theirs) == set(world.led(lost, buckets)) or step == "wal-assigned"
    world.seconds.now += RETURN_LEASES * LEASE_SECONDS
    await two.link.heartbeat()
    await until(lambda: world.led(two, buckets) == buckets)
    await ordered(world, buckets)
    record = world.wal.book.get(former.server_epoch)
    assert record is not None
    assert record.state is State.SEALED
    for bucket in theirs:
        assert two.tablet.buckets[bucket].source == WalSource(former, 0, 0)
    await world.stop()


async def test_the_servers_of_a_restarted_coordinator_have_time_to_come_back(world: World) -> None:
    one, two = await world.server(1), await world.server(2)
    buckets = await world.create_table(buckets=4)
    before = {b: world.state(b).leader for b in buckets}
    await world.restart()
    await one.link.heartbeat()
    world.seconds.now += LEASE_SECONDS
    await two.link.heartbeat()
    await world.takeovers.look()
    assert world.takeovers.count == 0
    assert {b: world.state(b).leader for b in buckets} == before


async def test_a_new_leader_that_is_lost_before_it_wrote_anything_again_leaves_the_source(
    world: World,
) -> None:
    """Sources never chain: three leaders in a row die, and the fourth reads the first session."""
    first = await world.server(1)
    (bucket,) = await world.create_table(buckets=1)
    former = first.session
    for number in (2, 3, 4):
        following = await world.server(number)
        leader = world.servers[f"host-{number - 1}"]
        leader.frozen = True
        await world.silent(*(s for s in world.servers.values() if s is not following))
        await until(lambda number=number: world.state(bucket).leader == number)
        await ordered(world, [bucket])
        assert following.tablet.buckets[bucket].source == WalSource(former, 0, 0)
    cleaner = world.coordinator.wal_cleaner
    assert cleaner is not None
    await cleaner.clean()
    record = world.wal.book.get(former.server_epoch)
    assert record is not None
    assert record.state is State.SEALED, "it is needed"
    last = world.servers["host-4"]
    assert await last.commit(bucket) == {bucket}
    assert world.state(bucket).wal == last.session.server_epoch


async def test_a_table_that_is_dropped_meanwhile_is_not_taken_over(world: World) -> None:
    lost, two = await world.server(1), await world.server(2)
    await world.create_table(buckets=2)
    kept = await world.create_table("kept", buckets=2)
    two.frozen = True
    await world.silent(lost)
    await until(lambda: world.led(two, kept) == kept)
    two.frozen = False
    await world.coordinator.catalog.drop_table(EVENTS)
    await ordered(world, kept)
    assert {b.table_id for b in two.tablet.buckets} == {kept[0].table_id}
