"""What a coordinator that starts goes on with: sessions and registrations of the one before."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from tests.coordinator.support import call
from tests.coordinator.wal.world import SILENCE, Server, World, until
from zufluss.cluster.configs import DynamicConfigs
from zufluss.coordinator.confirmations import Confirmations
from zufluss.coordinator.ledger import Ledger
from zufluss.coordinator.wal.book import State
from zufluss.errors import ErrorCode, NetworkError, ZuflussError
from zufluss.wire import messages as m
from zufluss.wire.api import ApiKey


@pytest.fixture
async def world(tmp_path: Path) -> AsyncIterator[World]:
    world = await World(tmp_path).start()
    yield world
    await world.stop()


async def test_a_session_outlives_its_coordinator(world: World) -> None:
    server = await world.server(1)
    buckets = await world.create_table()
    before, assigned = server.session, server.tablet.assigned
    states = [world.state(bucket) for bucket in buckets]
    await world.restart()
    await server.link.heartbeat()
    assert server.tablet.assigned == assigned + 1, "it learns what it may have missed"
    assert server.session == before
    assert server.link.server_epoch == before.server_epoch
    record = world.wal.book.live(1)
    assert record is not None
    assert record.session == before
    assert [world.state(bucket) for bucket in buckets] == states, "no new leader epoch"
    assert await server.commit(*buckets) == set(buckets)
    later = await world.create_table("later")
    assert set(later) <= server.tablet.buckets.keys(), "orders of the new coordinator are obeyed"


async def test_a_server_learns_of_a_drop_that_it_missed(world: World) -> None:
    server = await world.server(1)
    buckets = await world.create_table()
    await world.restart()
    path = {"database_name": "fluss", "table_name": "events"}
    request = m.DropTableRequest(table_path=path, ignore_if_not_exists=False)
    await call(world.services, ApiKey.DROP_TABLE, request)
    await server.link.heartbeat()
    assert not server.tablet.buckets.keys() & set(buckets)


async def test_a_session_that_was_ended_is_not_gone_on_with(world: World) -> None:
    server = await world.server(1)
    before = server.session
    await world.wal.end(1)
    await world.restart()
    await server.link.heartbeat()
    assert server.session.server_epoch > before.server_epoch
    record = world.wal.book.get(before.server_epoch)
    assert record is None or record.state is not State.LIVE


async def test_a_server_that_was_given_up_begins_anew(world: World) -> None:
    """Its buckets may be others' by now."""
    server = await world.server(1)
    before = server.session
    await world.silent(server)
    await server.link.heartbeat()
    assert server.session.server_epoch > before.server_epoch


async def test_an_answer_that_is_lost_is_asked_for_again(world: World) -> None:
    server = await world.server(1)
    before = server.session
    await world.restart()
    answer = world.call

    async def lose(api_key: ApiKey, request: object, *, timeout_ms: int) -> object:
        await answer(api_key, request, timeout_ms=timeout_ms)
        raise NetworkError("the answer was lost")

    server.world.call = lose  # type: ignore[method-assign]
    with pytest.raises(ZuflussError):
        await server.link.heartbeat()
    world.call = answer  # type: ignore[method-assign]
    assigned = server.tablet.assigned
    await server.link.heartbeat()
    assert server.tablet.assigned == assigned + 1
    assert server.session == before
    buckets = await world.create_table()
    assert server.tablet.buckets.keys() == set(buckets)


async def test_of_two_processes_with_one_id_the_later_goes_on(world: World) -> None:
    """Whichever of them the next coordinator hears first."""
    earlier = await world.server(1, "host-a")
    later = await world.server(1, "host-b")
    await world.restart()
    await earlier.link.heartbeat()
    await later.link.heartbeat()
    await earlier.link.heartbeat()
    assert (earlier.ended, later.ended) == (True, False)


async def test_a_coordinator_that_was_replaced_confirms_nothing(world: World) -> None:
    """A server would answer lookups of buckets that others lead by now."""
    confirmations = Confirmations(world.coordinator.catalog.ledger.confirm)
    await asyncio.gather(*(confirmations.confirmed() for _ in range(10)))
    await Ledger.open(world.store)
    with pytest.raises(ZuflussError) as refusal:
        await confirmations.confirmed()
    assert refusal.value.code is ErrorCode.NOT_COORDINATOR_LEADER_EXCEPTION


async def test_a_server_whose_heartbeat_waits_for_the_store_is_not_silent(world: World) -> None:
    """All servers would be lost at once whenever ZooKeeper is away for a while."""
    server = await world.server(1)
    before = server.session
    registrations = world.coordinator.registrations
    assert registrations is not None
    back = asyncio.Event()
    confirmations = registrations._confirmations = Confirmations(lambda: _passed(back))
    heartbeat = asyncio.create_task(server.link.heartbeat())
    await until(lambda: confirmations._under_way)
    world.seconds.now += SILENCE
    await registrations.expire()
    back.set()
    await heartbeat
    await registrations.expire()
    await server.link.heartbeat()
    assert server.session == before
    await world.silent(server)
    await server.link.heartbeat()
    assert server.session != before, "silence counts again"


async def _passed(event: asyncio.Event) -> None:
    await event.wait()


async def test_what_a_server_took_over_by_halves_it_asks_for_again(world: World) -> None:
    """An order in the answer of a new coordinator would be lost."""
    server = await world.server(1)
    buckets = await world.create_table()
    await world.restart()
    take, problems = server.tablet.update_configs, [OSError("no memory")]

    async def fail(configs: DynamicConfigs) -> None:
        if problems:
            raise problems.pop()
        await take(configs)

    server.tablet.update_configs = fail  # type: ignore[method-assign]
    assigned = server.tablet.assigned
    with pytest.raises(OSError, match="no memory"):
        await server.link.heartbeat()
    await server.link.heartbeat()
    assert server.tablet.assigned == assigned + 1
    assert set(buckets) <= server.tablet.buckets.keys()


async def test_of_two_processes_with_one_id_and_disks_the_later_goes_on(tmp_path: Path) -> None:
    """The earlier one must not register anew and have the later one end."""
    world = World(tmp_path)
    del world.conf["zufluss.log.durability"]
    await world.start()
    earlier, later = (Server(world, 1, name) for name in ("host-a", "host-b"))
    for server in (earlier, later):
        world.servers[server.node.endpoints[0].host] = server
        server.link._session = None
        await server.link.join()
    await world.restart()
    with pytest.raises(ZuflussError):
        await earlier.link._beat()
    await later.link.heartbeat()  # before the earlier one has asked to go on
    if not await earlier.link._go_on():
        await earlier.link.join()
    await later.link.heartbeat()
    assert (earlier.ended, later.ended) == (True, False)
    await world.stop()
