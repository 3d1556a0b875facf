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
from zufluss import periodic
from zufluss.cluster.wal import WalSource
from zufluss.coordinator.catalog import bucket_states
from zufluss.coordinator.wal.takeover import UNDELIVERED_SECONDS
from zufluss.errors import LogStorageError, NetworkError
from zufluss.log.shared.api import Session
from zufluss.log.shared.objects import ObjectLog
from zufluss.meta.api import MetaStoreError
from zufluss.model.table import DatabaseDescriptor, TableBucket
from zufluss.wire.api import ApiKey


@pytest_asyncio.fixture
async def world(tmp_path: Path) -> AsyncIterator[World]:
    world = await World(tmp_path).start()
    yield world
    await world.stop()


def ordered(world: World, bucket: TableBucket) -> bool:
    """Whether the leader of a bucket has its order."""
    state = world.state(bucket)
    order = world.servers[f"host-{state.leader}"].tablet.buckets.get(bucket)
    return order is not None and order.leader_epoch == state.leader_epoch


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

    async def slow(*args: Any, **named: Any) -> None:
        await go_on.wait()
        await assign(*args, **named)

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
    await until(lambda: world.led(three, buckets) == buckets)


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
    await until(lambda: world.led(two, buckets) == buckets)


# Orders


async def test_leaders_are_told_although_the_store_takes_only_some_of_the_changes(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The disk of the coordinator is full in between."""
    monkeypatch.setattr(bucket_states, "VALUES_AT_ONCE", 1)
    lost, two = await world.server(1), await world.server(2)
    tables = [await world.create_table(f"t{i}", buckets=2) for i in range(3)]
    ledger = world.coordinator.catalog.ledger
    commit, puts = ledger.commit, 0

    async def short_of_space(ops: Any) -> None:
        nonlocal puts
        puts += any("/buckets/" in op.path for op in ops)
        if puts == 2:
            raise MetaStoreError("the disk is full")
        await commit(ops)

    monkeypatch.setattr(ledger, "commit", short_of_space)
    await world.silent(lost)
    theirs = [bucket for buckets in tables for bucket in buckets]
    await until(lambda: world.led(two, theirs) == theirs)
    async with asyncio.timeout(WAIT_SECONDS):
        await until(lambda: all(ordered(world, bucket) for bucket in theirs))
    for bucket in theirs:
        leader = two.tablet.image.leader(bucket)
        assert leader is not None
        assert leader[0] == 2, "the others know it, too"


async def test_a_server_that_came_and_went_during_its_own_take_over_is_sealed_first(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The session that has its buckets by now goes on, so nobody could take them over from it."""
    lost, two = await world.server(1), await world.server(2)
    buckets = await world.create_table(buckets=2)
    (bucket,) = world.led(lost, buckets)
    keeper, sealed, go_on = world.wal, asyncio.Event(), asyncio.Event()
    end_sessions = keeper.end_sessions

    async def slow(sessions: Any) -> None:
        await end_sessions(sessions)
        if not sealed.is_set():
            sealed.set()
            await go_on.wait()

    monkeypatch.setattr(keeper, "end_sessions", slow)
    await world.silent(lost)
    await sealed.wait()
    await lost.link.join()
    assert await lost.commit(bucket) == {bucket}
    between = lost.session
    await world.silent(lost)
    go_on.set()
    await until(lambda: world.state(bucket).leader == 2 and ordered(world, bucket))
    assert two.tablet.buckets[bucket].source == WalSource(between, 0, 0)


async def test_buckets_do_not_go_round_among_servers_that_take_no_orders(world: World) -> None:
    """Each move is a transaction, and a leader epoch."""
    lost, two, three = [await world.server(i) for i in (1, 2, 3)]
    buckets = await world.create_table(buckets=3)
    (bucket,) = world.led(lost, buckets)
    for server in (two, three):
        server.tablet.failure = LogStorageError("no order is taken here")
    takes = [server.tablet for server in (two, three)]
    await world.silent(lost)
    await until(lambda: world.takeovers._failing)
    for _ in range(2):  # each of them has failed for long once
        before = world.state(bucket).leader_epoch
        world.seconds.now += UNDELIVERED_SECONDS + 0.1
        await until(lambda before=before: world.state(bucket).leader_epoch > before)
        await until(lambda: not world.takeovers._sending)
        await world.takeovers.look()
        await until(lambda: not world.takeovers._sending)
    epoch = world.state(bucket).leader_epoch
    for _ in range(20):
        await world.takeovers.look()
        await until(lambda: not world.takeovers._sending)
    assert world.state(bucket).leader_epoch == epoch
    for tablet in takes:
        tablet.failure = None
    await until(lambda: ordered(world, bucket))


async def test_buckets_are_taken_over_after_a_moment_without_memory(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    lost, two = await world.server(1), await world.server(2)
    buckets = await world.create_table(buckets=2)
    failed = asyncio.Event()

    async def fail() -> None:
        failed.set()
        raise MemoryError

    def log_in_vain(*args: Any, **kwargs: Any) -> None:
        raise MemoryError

    with monkeypatch.context() as patched:
        patched.setattr(world.takeovers, "look", fail)
        patched.setattr(periodic.log, "error", log_in_vain)
        await world.silent(lost)
        await failed.wait()
        await asyncio.sleep(0)
    await until(lambda: world.led(two, buckets) == buckets)


# Locations


async def test_a_location_that_does_not_answer_holds_up_no_session_of_another_one(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    lost, two, three = [await world.server(i) for i in (1, 2, 3)]
    buckets = await world.create_table(buckets=6)
    away, answers, seals, seal = lost.session.server_epoch, asyncio.Event(), 0, ObjectLog.seal

    async def slow(log: ObjectLog, session: Session, floor: int, epoch: int) -> int:
        nonlocal seals
        if session.server_epoch == away:
            seals += 1
            await answers.wait()
        return await seal(log, session, floor, epoch)

    monkeypatch.setattr(ObjectLog, "seal", slow)
    await world.silent(lost)
    again = [asyncio.create_task(lost.link.join()) for _ in range(3)]
    async with asyncio.timeout(WAIT_SECONDS):
        await two.link.join()
        await world.silent(lost, two)
        await until(lambda: not world.led(two, buckets))
        await until(lambda: all(ordered(world, b) for b in world.led(three, buckets)))
    assert seals == 1, "whoever needs the end of a session waits for the same seal"
    answers.set()
    await asyncio.gather(*again)
    await until(lambda: all(ordered(world, b) for b in buckets))
