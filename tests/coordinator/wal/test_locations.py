"""Locations of the shared log that are moved, drained or lost."""

from __future__ import annotations

import shutil
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path

import pytest
import pytest_asyncio

from tests.coordinator.support import call
from tests.coordinator.wal.world import EVENTS, World, until
from zufluss.cluster.wal import WalSource
from zufluss.config.load import Configuration
from zufluss.coordinator.registration import MOVE_SECONDS
from zufluss.coordinator.wal.book import State
from zufluss.errors import ConfigError
from zufluss.log.shared.api import LostObject
from zufluss.log.shared.tails import SessionTails
from zufluss.remote.errors import LocationUnavailableError
from zufluss.remote.health import HealthReport
from zufluss.remote.locations import AdminState, AlterOp, Health, Location, Locations
from zufluss.remote.marked import MarkedObjects
from zufluss.remote.storage import NoLocationError, RemoteStorage
from zufluss.wire import messages as m
from zufluss.wire.api import ApiKey


@pytest_asyncio.fixture
async def world(tmp_path: Path) -> AsyncIterator[World]:
    world = await World(tmp_path).start()
    yield world
    await world.stop()


async def alter(
    world: World, op: AlterOp, location_id: int | None = 1, **values: object
) -> m.AlterLocationResponse:
    request = m.AlterLocationRequest(op=op, location_id=location_id, **values)
    return await call(world.services, ApiKey.ALTER_LOCATION, request)


# Moves


async def test_a_location_with_a_live_session_is_not_moved(world: World) -> None:
    """The server would write at one address, and its seal would lie at the other."""
    await world.server(1)
    await world.server(2)
    there = world.location.with_name("there")
    shutil.copytree(world.location, there)
    with pytest.raises(ConfigError, match="has the shared log of tablet servers 1, 2, and cannot"):
        await alter(world, AlterOp.MOVE, uri=str(there))
    assert world.coordinator.locations.locations.get(1).uri.endswith("location")


async def test_a_location_is_moved_when_no_bucket_needs_its_sessions(world: World) -> None:
    one = await world.server(1)
    (bucket,) = await world.create_table(buckets=1)
    await world.wal.end(1)
    there = world.location.with_name("there")
    shutil.copytree(world.location, there)
    with pytest.raises(ConfigError, match="of tablet servers 1, and cannot"):
        await alter(world, AlterOp.MOVE, uri=str(there))
    await alter(world, AlterOp.ADD, None, uri=str(world.location.with_name("other")))
    await alter(world, AlterOp.DRAIN)
    await one.link.join()
    await one.commit(bucket)
    await world.wal.release_unused()
    await alter(world, AlterOp.MOVE, uri=str(there))
    assert world.coordinator.locations.locations.get(1).uri.endswith("there")


@pytest.fixture
async def objects(tmp_path: Path) -> tuple[RemoteStorage, MarkedObjects]:
    locations = Locations(1, (Location(1, str(tmp_path / "here")),), explicit=True)
    storage = RemoteStorage(Configuration.of({}), locations, state_file=None)
    return storage, MarkedObjects(storage, 1)


async def test_a_session_creates_nothing_at_an_address_it_did_not_begin_at(
    tmp_path: Path, objects: tuple[RemoteStorage, MarkedObjects]
) -> None:
    """Its seals may not have been copied, so that its next name would be free there."""
    storage, session = objects
    await session.create("wal/0", b"rows")
    (tmp_path / "there").mkdir()
    there = Location(1, str(tmp_path / "there"))
    storage.update(replace(storage.locations, version=2, locations=(there,)))
    with pytest.raises(LocationUnavailableError, match="does not go on"):
        await session.create("wal/1", b"rows")
    assert not list((tmp_path / "there").iterdir())
    later = MarkedObjects(storage, 1)
    await later.create("wal/1", b"seal")
    assert await session.get("wal/1", limit=10) == b"seal", "what is read lies at the new address"


async def test_a_session_creates_nothing_in_a_location_that_was_declared_lost(
    objects: tuple[RemoteStorage, MarkedObjects],
) -> None:
    storage, session = objects
    lost = replace(storage.locations.get(1), state=AdminState.LOST)
    storage.update(replace(storage.locations, version=2, locations=(lost,)))
    with pytest.raises(LocationUnavailableError, match="is LOST at"):
        await session.create("wal/0", b"rows")


# Drains


@pytest.mark.parametrize("drained", [True, False])
async def test_the_sessions_of_a_drained_location_go_on_elsewhere_one_server_after_the_other(
    world: World, drained: bool
) -> None:
    one, two = await world.server(1), await world.server(2)
    buckets = await world.create_table(buckets=2)
    theirs = {world.state(b).leader: b for b in buckets}
    await alter(world, AlterOp.ADD, None, uri=str(world.location.with_name("other")))
    await one.link.heartbeat()
    assert one.session.location_id == 1, "it still takes files"
    if drained:
        await alter(world, AlterOp.DRAIN)
    else:
        await alter(world, AlterOp.SET_WEIGHT, weight=0)
    await one.link.heartbeat()
    await two.link.heartbeat()
    assert (one.session.location_id, two.session.location_id) == (2, 1)
    assert one.tablet.buckets[theirs[1]].lease_ms == 0
    await one.commit(theirs[1])
    await two.link.heartbeat()
    assert two.session.location_id == 2, "the first one serves its buckets again"
    await two.commit(theirs[2])
    epochs = one.link.server_epoch, two.link.server_epoch
    for server in (one, two):
        await server.link.heartbeat()
    assert (one.link.server_epoch, two.link.server_epoch) == epochs
    await world.wal.release_unused()
    assert world.wal.book.live_usage().keys() == {2}


async def test_a_server_that_does_not_finish_its_move_holds_up_the_others_for_a_minute_only(
    world: World,
) -> None:
    one, two = await world.server(1), await world.server(2)
    await world.create_table(buckets=2)
    await alter(world, AlterOp.ADD, None, uri=str(world.location.with_name("other")))
    await alter(world, AlterOp.DRAIN)
    await one.link.heartbeat()
    await two.link.heartbeat()
    assert two.session.location_id == 1
    world.seconds.now += MOVE_SECONDS + 0.1
    await two.link.heartbeat()
    assert two.session.location_id == 2


async def test_sessions_stay_in_a_drained_location_while_the_other_one_is_down(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They could not go on there, and what was durable so far would be all that is."""
    one = await world.server(1)
    await alter(world, AlterOp.ADD, None, uri=str(world.location.with_name("other")))
    await alter(world, AlterOp.DRAIN)
    down = HealthReport(2, Health.DOWN, 0, 0, 9, 0.0, 0.0)
    with monkeypatch.context() as patched:
        patched.setattr(world.coordinator.locations.storage, "reports", lambda: [down])
        await one.link.heartbeat()
        assert one.session.location_id == 1
    await one.link.heartbeat()
    assert one.session.location_id == 2


async def test_without_a_location_that_takes_files_a_registration_is_to_be_tried_again(
    world: World,
) -> None:
    storage = world.coordinator.locations.storage
    drained = replace(storage.locations.get(1), state=AdminState.DRAINING)
    storage.update(replace(storage.locations, version=2, locations=(drained,)))
    with pytest.raises(NoLocationError, match="no location takes new files; activate") as refused:
        await world.server(1)
    assert refused.value.retriable


# Losses


async def lose(world: World) -> None:
    """The location of the shared log is destroyed, another one is added, and it is given up."""
    shutil.rmtree(world.location)
    await alter(world, AlterOp.ADD, None, uri=str(world.location.with_name("other")))
    await alter(world, AlterOp.RETIRE, force=True)


async def test_the_servers_of_a_lost_location_go_on_in_another_one(world: World) -> None:
    """The loss is declared, so they have not to wait for a seal that nobody can put."""
    one = await world.server(1)
    (bucket,) = await world.create_table(buckets=1)
    former = one.session
    await world.wal.commit_wal_floor(former, 4)
    await lose(world)
    await one.link.join()
    assert one.session.location_id == 2
    record = world.wal.book.get(former.server_epoch)
    assert record is not None
    assert (record.state, record.lost) == (State.SEALED, True)
    assert one.tablet.buckets[bucket].source == WalSource(former, 4, 5), "something is missing"
    (other,) = await world.create_table("other", buckets=1)
    assert one.tablet.buckets[other].source is None
    await world.restart()
    assert world.wal.book.get(former.server_epoch) == record


async def test_what_a_lost_session_had_is_found_missing_and_not_taken_for_nothing(
    world: World,
) -> None:
    one = await world.server(1)
    (bucket,) = await world.create_table(buckets=1)
    await lose(world)
    await one.link.join()
    session, floor, end = one.tablet.buckets[bucket].source
    shared = world.wal.shared_log(session)
    (found,) = [read async for read in shared.read(world.name(session), floor, end)]
    assert isinstance(found, LostObject)
    assert "location 1 was given up as lost" in found.reason
    tails = SessionTails({bucket: 7})
    list(tails.add(found))
    assert "offsets from 7 on" in tails.lost[bucket].message


async def test_a_lost_location_is_retired_when_the_tables_that_ended_there_are_dropped(
    world: World,
) -> None:
    one = await world.server(1)
    await world.create_table(buckets=1)
    await lose(world)
    await one.link.join()
    cleaner = world.coordinator.wal_cleaner
    assert cleaner is not None
    await cleaner.clean()
    assert world.wal.book.live_usage().keys() == {1, 2}
    await world.coordinator.catalog.drop_table(EVENTS)
    await cleaner.clean()
    assert world.wal.book.live_usage().keys() == {2}
    world.coordinator.lost_locations.begin(1)
    locations = world.coordinator.locations
    await until(lambda: locations.locations.get(1).state is AdminState.RETIRED)
