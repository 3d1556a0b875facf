"""Servers, locations and changes that fail or do not answer hold up nobody else."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from tests.coordinator.wal.world import SILENCE, Server, World, until
from tests.waiting import WAIT_SECONDS
from zufluss.errors import NetworkError
from zufluss.model.table import DatabaseDescriptor, TableBucket
from zufluss.wire.api import ApiKey


@pytest_asyncio.fixture
async def world(tmp_path: Path) -> AsyncIterator[World]:
    world = await World(tmp_path).start()
    yield world
    await world.stop()


def led(world: World, server: Server, buckets: list[TableBucket]) -> list[TableBucket]:
    return [b for b in buckets if world.state(b).leader == server.server_id]


def mute(server: Server) -> None:
    """Have the machine of a server vanish: requests to it are never answered."""

    async def never(api_key: ApiKey, request: Any, *, timeout_ms: int) -> Any:
        await asyncio.Event().wait()

    server.call = never  # type: ignore[method-assign]


# Servers


async def test_a_server_that_opens_its_buckets_holds_up_no_other_registration(
    world: World,
) -> None:
    """It takes orders when they are open. A cluster that starts would start one by one."""
    one, go_on = await world.server(1), asyncio.Event()
    assign = one.tablet.assign

    async def slow(*args: Any) -> None:
        await go_on.wait()
        await assign(*args)

    one.tablet.assign = slow  # type: ignore[method-assign]
    epoch = one.link.server_epoch
    joining = asyncio.create_task(one.link.join())
    await until(lambda: one.link.server_epoch > epoch)
    async with asyncio.timeout(WAIT_SECONDS):
        await world.server(2)
        await world.server(3)
        await world.coordinator.catalog.create_database("meanwhile", DatabaseDescriptor())
    go_on.set()
    await joining
    await until(lambda: "meanwhile" in one.tablet.image.databases)
    assert set(one.tablet.image.tablets) == {1, 2, 3}


async def test_two_machines_that_vanish_together_are_lost_together(world: World) -> None:
    """Nobody waits for the one to hear that the other is gone."""
    lost, too, three = [await world.server(i) for i in (1, 2, 3)]
    buckets = await world.create_table(buckets=6)
    mute(lost)
    mute(too)
    registrations = world.coordinator.registrations
    assert registrations is not None
    await registrations.check()
    for _ in range(20):
        world.seconds.now += SILENCE / 20
        await three.link.heartbeat()
        async with asyncio.timeout(WAIT_SECONDS):
            await registrations.check()
    await until(lambda: led(world, three, buckets) == buckets)


async def test_a_change_that_waits_for_a_lost_server_does_not_hide_that_it_is_lost(
    world: World,
) -> None:
    """The end of its registration ends the wait, so nobody must wait for the change before."""
    lost, too, three = [await world.server(i) for i in (1, 2, 3)]
    mute(lost)
    mute(too)
    catalog, asked = world.coordinator.catalog, asyncio.Event()

    async def change() -> None:
        asked.set()
        with pytest.raises(NetworkError, match="tablet server 2 left"):
            await world.coordinator.tablets._there(2).update_producers([])

    changing = asyncio.create_task(catalog.exclusive(change))
    await asked.wait()
    async with asyncio.timeout(WAIT_SECONDS):
        await world.silent(lost, too)
        await changing
    assert set(world.coordinator.image.tablets) == {three.server_id}


async def test_a_lost_server_whose_removal_failed_is_removed_by_the_next_check(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It would be in the metadata for ever, and its buckets would have no leader."""
    lost, two = await world.server(1), await world.server(2)
    buckets = await world.create_table(buckets=2)
    registrations = world.coordinator.registrations
    assert registrations is not None

    async def fail(server_id: int, now: Any) -> None:
        raise MemoryError

    with monkeypatch.context() as patched:
        patched.setattr(registrations, "_announce", fail)
        with pytest.raises(MemoryError):
            await world.silent(lost)
    await registrations.check()
    await until(lambda: led(world, two, buckets) == buckets)
