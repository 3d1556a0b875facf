"""Buckets that move between live servers, as the coordinator sees it; servers note their orders."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from tests.coordinator.wal.world import Killed, Server, World, until
from zufluss.cluster.replicas import ReplicaAssignment
from zufluss.cluster.wal import OPEN_END, ReleasedBucket, WalSource
from zufluss.coordinator.wal import handover
from zufluss.coordinator.wal.book import State
from zufluss.coordinator.wal.handover import HandoverError, Handovers
from zufluss.coordinator.wal.takeover import UNDELIVERED_SECONDS
from zufluss.errors import (
    LeaderNotAvailableError,
    LogStorageError,
    NetworkError,
    UnknownTableOrBucketError,
)
from zufluss.model.table import TableBucket


@pytest.fixture
async def world(tmp_path: Path) -> AsyncIterator[World]:
    world = await World(tmp_path).start()
    yield world
    await world.stop()


def handovers(world: World) -> Handovers:
    assert world.coordinator.handovers is not None
    return world.coordinator.handovers


async def led_by_first(world: World) -> tuple[Server, Server, TableBucket]:
    """A bucket that the first of two servers leads."""
    one = await world.server(1)
    (bucket,) = await world.create_table(buckets=1)
    return one, await world.server(2), bucket


async def ordered(server: Server, bucket: TableBucket, epoch: int) -> None:
    await until(lambda: server.tablet.buckets.get(bucket) is not None)
    await until(lambda: server.tablet.buckets[bucket].leader_epoch == epoch)


async def test_the_next_leader_prepares_and_then_reads_up_to_the_release(world: World) -> None:
    one, two, bucket = await led_by_first(world)
    before = world.state(bucket)
    moving = asyncio.create_task(handovers(world).move(bucket, 2))
    await ordered(two, bucket, before.leader_epoch + 1)
    (prepared,) = two.tablet.prepared
    assert prepared.source == WalSource(one.session, 0, OPEN_END)
    assert one.tablet.released == [(bucket, before.leader_epoch)]
    order = two.tablet.buckets[bucket]
    assert (order.source, order.lease_ms) == (WalSource(one.session, 0, 7), 0)
    state = world.state(bucket)
    assert (state.leader, state.wal, state.released) == (2, one.session.server_epoch, 7)
    assert not moving.done()
    assert await two.commit(bucket) == {bucket}
    await moving
    state = world.state(bucket)
    assert (state.leader, state.wal, state.released) == (2, two.session.server_epoch, None)
    assert {record.state for record in world.wal.book} == {State.LIVE}, "nothing was sealed"


async def test_a_standby_that_comes_or_goes_meanwhile_does_not_end_a_hand_over(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The bucket was released, so there is no way back."""
    one, two, bucket = await led_by_first(world)
    release = one.tablet.release_bucket

    async def changed(isr: tuple[int, ...]) -> None:
        state = replace(world.state(bucket), isr=isr)
        await world.coordinator.catalog.states.change(lambda: {bucket: state})

    async def released(bucket: TableBucket, leader_epoch: int) -> int:
        await changed((1, 2))
        return await release(bucket, leader_epoch)

    monkeypatch.setattr(one.tablet, "release_bucket", released)
    moving = asyncio.create_task(handovers(world).move(bucket, 2))
    await ordered(two, bucket, world.state(bucket).leader_epoch + 1)
    await changed((2, 3))
    assert not moving.done()
    await two.commit(bucket)
    await moving
    assert (world.state(bucket).leader, world.state(bucket).released) == (2, None)


async def test_a_bucket_whose_target_cannot_prepare_stays_without_a_pause(world: World) -> None:
    one, two, bucket = await led_by_first(world)
    two.tablet.prepare_failure, before = LogStorageError("no disk"), world.state(bucket)
    with pytest.raises(HandoverError, match=r"stays at tablet server 1.*no disk"):
        await handovers(world).move(bucket, 2)
    assert world.state(bucket) == before
    assert one.tablet.released == []


async def test_a_bucket_that_its_leader_does_not_release_stays(world: World) -> None:
    one, _, bucket = await led_by_first(world)
    one.tablet.release_failure, before = LeaderNotAvailableError("too slow"), world.state(bucket)
    with pytest.raises(HandoverError, match=r"stays at tablet server 1.*too slow"):
        await handovers(world).move(bucket, 2)
    assert world.state(bucket) == before
    assert world.wal.book.live(1) is not None


async def test_a_leader_that_does_not_answer_is_fenced_with_all_its_buckets(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody knows whether it released the bucket; its sealed session says."""
    monkeypatch.setattr(handover, "RELEASE_SECONDS", 0.05)
    one, two, bucket = await led_by_first(world)
    one.tablet.release_gate.clear()
    session = one.session
    with pytest.raises(HandoverError, match="did not answer within"):
        await handovers(world).move(bucket, 2)
    await ordered(two, bucket, 1)
    record = world.wal.book.get(session.server_epoch)
    assert record is not None
    assert record.state is State.SEALED
    assert world.state(bucket).released is None
    source = two.tablet.buckets[bucket].source
    assert source is not None
    assert source.session == session
    await one.link.heartbeat()
    assert one.session != session, "it registers again"


async def test_a_target_that_does_not_adopt_loses_the_bucket_to_another(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(handover, "ADOPT_SECONDS", 0.05)
    one, _, bucket = await led_by_first(world)
    epoch = world.state(bucket).leader_epoch
    with pytest.raises(HandoverError, match="tablet server 1 leads it"):
        await handovers(world).move(bucket, 2)
    await ordered(one, bucket, epoch + 2)
    assert one.tablet.buckets[bucket].source == WalSource(one.session, 0, 7), "as any other leader"
    assert await one.commit(bucket) == {bucket}
    assert world.state(bucket).released is None


async def test_a_target_that_is_lost_is_followed_by_another_server(world: World) -> None:
    one, two, bucket = await led_by_first(world)
    three = await world.server(3)
    moving = asyncio.create_task(handovers(world).move(bucket, 2))
    await ordered(two, bucket, world.state(bucket).leader_epoch + 1)
    two.down = True
    await world.silent(two)
    await until(lambda: world.state(bucket).leader != 2)
    leader = {1: one, 3: three}[world.state(bucket).leader]
    await ordered(leader, bucket, world.state(bucket).leader_epoch)
    assert leader.tablet.buckets[bucket].source == WalSource(one.session, 0, 7)
    assert await leader.commit(bucket) == {bucket}
    with pytest.raises(HandoverError, match=f"tablet server {leader.server_id} leads it"):
        await moving


@pytest.mark.parametrize("step", ["handover-assign", "handover-assigned"])
async def test_a_coordinator_that_is_killed_between_release_and_order_loses_nothing(
    world: World, step: str
) -> None:
    """Its servers register again; the source is the session that has released the bucket."""
    one, two, bucket = await led_by_first(world)
    session = one.session
    world.files.step = step
    with pytest.raises(Killed):
        await handovers(world).move(bucket, 2)
    await world.restart()
    for server in (two, one):
        await server.link.join()
    leader = one if step == "handover-assign" else two
    assert world.state(bucket).leader == leader.server_id
    source = leader.tablet.buckets[bucket].source
    assert source is not None
    assert source.session == session
    assert await leader.commit(bucket) == {bucket}
    state = world.state(bucket)
    assert (state.wal, state.released) == (leader.session.server_epoch, None)


async def test_a_released_bucket_that_nobody_leads_goes_back_when_it_is_reported(
    world: World,
) -> None:
    one, _, bucket = await led_by_first(world)
    epoch = world.state(bucket).leader_epoch
    reported = [ReleasedBucket(bucket, epoch, 9)]
    assert await world.wal.report_released(one.session, reported) == set()
    await ordered(one, bucket, epoch + 1)
    assert one.tablet.buckets[bucket].source == WalSource(one.session, 0, 9)
    assert await world.wal.report_released(one.session, reported) == set()
    assert await one.commit(bucket) == {bucket}
    assert await world.wal.report_released(one.session, reported) == {bucket}
    assert world.state(bucket).leader_epoch == epoch + 1


async def test_a_leader_that_was_not_told_by_the_coordinator_before_is_told(world: World) -> None:
    """As after a change of the coordinator that ends no registration."""
    one, two, bucket = await led_by_first(world)
    epoch = world.state(bucket).leader_epoch
    moving = asyncio.create_task(handovers(world).move(bucket, 2))
    await ordered(two, bucket, epoch + 1)
    moving.cancel()
    await asyncio.wait([moving])
    two.tablet.buckets.clear()
    reported = [ReleasedBucket(bucket, epoch, 7)]
    assert await world.wal.report_released(one.session, reported) == set()
    assert two.tablet.buckets == {}, "this one has told it"
    handovers(world)._ordered.clear()
    assert await world.wal.report_released(one.session, reported) == set()
    await ordered(two, bucket, epoch + 1)
    assert two.tablet.buckets[bucket].source == WalSource(one.session, 0, 7)


async def test_a_report_is_answered_when_the_session_is_not_needed_any_more(world: World) -> None:
    one, two, bucket = await led_by_first(world)
    epoch = world.state(bucket).leader_epoch
    moving = asyncio.create_task(handovers(world).move(bucket, 2))
    await ordered(two, bucket, epoch + 1)
    reported = [ReleasedBucket(bucket, epoch, 7)]
    assert await world.wal.report_released(one.session, reported) == set()
    await two.commit(bucket)
    await moving
    assert await world.wal.report_released(one.session, reported) == {bucket}


async def test_what_cannot_be_moved_is_refused_before_anybody_is_asked(world: World) -> None:
    one, two, bucket = await led_by_first(world)
    with pytest.raises(HandoverError, match="leads it already"):
        await handovers(world).move(bucket, 1)
    with pytest.raises(HandoverError, match="server 9 is not there"):
        await handovers(world).move(bucket, 9)
    with pytest.raises(UnknownTableOrBucketError, match="does not exist"):
        await handovers(world).move(bucket._replace(bucket_id=5), 2)
    moving = asyncio.create_task(handovers(world).move(bucket, 2))
    await ordered(two, bucket, world.state(bucket).leader_epoch + 1)
    with pytest.raises(HandoverError, match=r"has not taken it over itself yet|moved already"):
        await handovers(world).move(bucket, 1)
    await two.commit(bucket)
    await moving
    assert one.tablet.released == [(bucket, 0)]


async def test_a_bucket_that_was_continued_is_not_taken_from_a_leader_that_takes_no_orders(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its session has the end and goes on: no other server could continue the bucket."""
    one, two, bucket = await led_by_first(world)
    start = two.tablet.start_replicas

    async def unanswered(replicas: Sequence[ReplicaAssignment]) -> None:
        await start(replicas)
        raise NetworkError("the answer was lost")

    monkeypatch.setattr(two.tablet, "start_replicas", unanswered)
    moving = asyncio.create_task(handovers(world).move(bucket, 2))
    await until(lambda: world.takeovers._failing)
    await two.commit(bucket)
    await moving
    world.seconds.now += UNDELIVERED_SECONDS + 0.1
    await one.link.heartbeat()
    await two.link.heartbeat()
    await world.takeovers.look()
    await until(lambda: not world.takeovers._sending)
    assert world.state(bucket).leader == 2
    assert not world.takeovers._failing
