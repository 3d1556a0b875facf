"""Servers that leave by their own will, as the coordinator sees it; servers note their orders."""

from __future__ import annotations

import asyncio

import pytest

from tests.coordinator.support import call
from tests.coordinator.wal.test_handover import ordered, world
from tests.coordinator.wal.world import Server, World
from tests.waiting import WAIT_SECONDS
from zufluss.wire import messages as m
from zufluss.wire.api import ApiKey

__all__ = ["world"]


async def leaves(world: World, server: Server) -> asyncio.Task[m.ControlledShutdownResponse]:
    request = m.ControlledShutdownRequest(
        tablet_server_id=server.server_id, tablet_server_epoch=server.session.server_epoch
    )
    work = call(world.services, ApiKey.CONTROLLED_SHUTDOWN, request, "INTERNAL")
    return asyncio.create_task(work)


async def test_a_server_that_leaves_hands_over_everything_and_gets_nothing_new(
    world: World,
) -> None:
    one = await world.server(1)
    buckets = await world.create_table(buckets=4)
    two = await world.server(2)
    leaving = await leaves(world, one)
    for bucket in buckets:
        await ordered(two, bucket, 1)
    assert await two.commit(*buckets) == set(buckets)
    assert list((await leaving).remaining_leader_buckets) == []
    new = await world.create_table("later", buckets=2)
    assert world.led(two, new) == new
    await one.link.join()
    assert world.led(one, await world.create_table("back", buckets=2)) != []


async def test_the_last_server_that_leaves_keeps_its_buckets(world: World) -> None:
    one = await world.server(1)
    buckets = await world.create_table(buckets=2)
    answer = await (await leaves(world, one))
    assert len(answer.remaining_leader_buckets) == len(buckets)


async def test_a_server_with_a_tag_gets_nothing_from_one_that_leaves(world: World) -> None:
    one = await world.server(1)
    (bucket,) = await world.create_table(buckets=1)
    await world.server(2)
    tag = m.AddServerTagRequest(server_ids=[2], server_tag=0)
    await call(world.services, ApiKey.ADD_SERVER_TAG, tag, "INTERNAL")
    answer = await (await leaves(world, one))
    assert [each.bucket_id for each in answer.remaining_leader_buckets] == [bucket.bucket_id]


@pytest.mark.parametrize("told_again", [True, False])
async def test_a_server_that_leaves_waits_for_so_long_or_until_it_is_told_again(
    world: World, told_again: bool
) -> None:
    """A second signal; what is under way goes on without it."""
    one = await world.server(1)
    (bucket,) = await world.create_table(buckets=1)
    two = await world.server(2)
    at_once = asyncio.Event()
    leaving = asyncio.create_task(one.link.leave(at_once, 600_000 if told_again else 500))
    await ordered(two, bucket, 1)
    if told_again:
        assert not leaving.done()
        at_once.set()
    async with asyncio.timeout(WAIT_SECONDS):
        await leaving
    assert await two.commit(bucket) == {bucket}
    assert world.state(bucket).wal == two.session.server_epoch
