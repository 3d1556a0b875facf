"""Sessions of the shared log: begun and ended by registrations, kept by the coordinator's store."""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from tests.coordinator.support import DAY_MS, Cluster, table_json
from tests.coordinator.wal.world import LEASE_SECONDS, Server, World
from zufluss.cluster.wal import WalSession, WalSource
from zufluss.coordinator.records import CatalogDamagedError
from zufluss.coordinator.wal.book import State
from zufluss.coordinator.wal.cleaner import SEALS_KEPT_DAYS
from zufluss.errors import (
    ConfigError,
    LeaderNotAvailableError,
    NotLeaderError,
    ZuflussError,
)
from zufluss.meta.api import Put
from zufluss.meta.embedded import EmbeddedStore
from zufluss.model.table import TableBucket
from zufluss.remote.wal import EntryKind
from zufluss.wire import messages as m
from zufluss.wire.api import ApiKey


@pytest_asyncio.fixture
async def world(tmp_path: Path) -> AsyncIterator[World]:
    world = await World(tmp_path).start()
    yield world
    await world.stop()


async def appended(world: World, host: str, *buckets: TableBucket, count: int = 1) -> None:
    """Objects of a server's session, each with an entry of each bucket."""
    writer = await world.servers[host].begun()
    for number in range(count):
        for bucket in buckets:
            writer.append(bucket, 0, number, number + 1, memoryview(b"rows"), EntryKind.BATCHES)
        await writer.drained()
    await writer.stop()


async def test_a_registration_begins_a_session_and_new_buckets_begin_in_it(world: World) -> None:
    one, two = await world.server(1), await world.server(2)
    assert one.session == WalSession(1, one.link.server_epoch, 1)
    for bucket in await world.create_table():
        state = world.state(bucket)
        leader = one if state.leader == 1 else two
        assert state.wal == leader.session.server_epoch
        assert leader.tablet.buckets[bucket].source is None


async def test_a_server_that_registers_again_gets_its_former_session_sealed_and_as_a_source(
    world: World,
) -> None:
    one = await world.server(1)
    (bucket,) = await world.create_table(buckets=1)
    former = one.session
    await appended(world, "host-1", bucket, count=3)
    await one.link.join()
    assert world.wal.book.get(former.server_epoch).state is State.SEALED
    order = one.tablet.buckets[bucket]
    assert order.source == WalSource(former, 0, 3)
    assert order.leader_epoch == 1, "nothing that the former registration has under way counts"
    assert order.lease_ms == 0, "it is the same process"
    assert await one.commit(bucket) == {bucket}
    assert world.state(bucket).wal == one.session.server_epoch


async def test_another_process_with_the_id_waits_for_the_lookups_of_the_one_before(
    world: World,
) -> None:
    earlier = await world.server(1, "earlier")
    (bucket,) = await world.create_table(buckets=1)
    world.seconds.now += 1
    later = await world.server(1, "later")
    assert later.tablet.buckets[bucket].lease_ms == 1000 * (LEASE_SECONDS - 1)
    await earlier.link.rejoin()  # its session was sealed, so it asks at once
    assert earlier.ended, "it does not register again: the two would take turns for ever"
    assert not later.ended


async def test_a_copied_data_directory_does_not_say_that_the_original_has_ended(
    world: World,
) -> None:
    """It names the epoch of a server that still answers lookups."""
    earlier = await world.server(1, "earlier")
    (bucket,) = await world.create_table(buckets=1)
    later = world.servers["later"] = Server(world, 1, "later")
    later.former = earlier.former
    await later.link.join()
    assert later.tablet.buckets[bucket].lease_ms == 1000 * LEASE_SECONDS


async def test_a_new_coordinator_does_not_know_either_which_directory_is_the_copy(
    world: World,
) -> None:
    earlier = await world.server(1, "earlier")
    (bucket,) = await world.create_table(buckets=1)
    await world.restart()
    later = world.servers["later"] = Server(world, 1, "later")
    later.former = earlier.former
    await later.link.join()
    assert later.tablet.buckets[bucket].lease_ms == 1000 * LEASE_SECONDS


async def test_a_process_that_is_replaced_right_now_ends_instead_of_registering_again(
    world: World,
) -> None:
    """Its session is sealed before the registration of the other process is complete."""
    earlier = await world.server(1, "earlier")
    assert world.coordinator.registrations is not None
    world.coordinator.registrations._sessions[1].replaced = True
    await earlier.link.rejoin()
    assert earlier.ended


async def test_a_process_that_is_replaced_right_now_is_not_told_its_own_address(
    world: World,
) -> None:
    """Where the other one is, nobody knows before it has registered."""
    await world.server(1, "earlier")
    registrations = world.coordinator.registrations
    assert registrations is not None
    session = registrations._sessions[1]
    session.replaced = True
    heartbeat = m.TabletHeartbeatRequest(server_id=1, server_epoch=session.tablet.server_epoch)
    context: Any = None
    with pytest.raises(ZuflussError, match="another process registered") as refusal:
        await registrations.tablet_heartbeat(heartbeat, context)
    assert str(session.node.endpoints[0]) not in str(refusal.value)


async def test_after_a_restart_of_the_coordinator_leaders_wait_a_whole_lease(world: World) -> None:
    """Nobody knows when the one before confirmed a server that does not come back."""
    await world.server(1)
    (bucket,) = await world.create_table(buckets=1)
    await world.restart()
    world.seconds.now += 1
    other = await world.server(1, "elsewhere")
    assert other.tablet.buckets[bucket].lease_ms == 1000 * (LEASE_SECONDS - 1)


async def test_servers_answer_lookups_for_as_long_as_the_coordinator_says(world: World) -> None:
    """With a longer lease of its own, a lost server would answer when another one leads."""
    one = await world.server(1)
    one.lease.seconds = 60.0
    await one.link.join()
    one.lease.begin()
    await one.link.heartbeat()
    world.seconds.now += LEASE_SECONDS
    one.lease.check()
    world.seconds.now += 0.1
    with pytest.raises(NotLeaderError, match="no word from the coordinator for 3 s"):
        one.lease.check()
    assert one.link._interval() == 1, "three heartbeats fit into it"


async def test_a_new_leader_waits_for_the_lease_that_the_former_one_has(world: World) -> None:
    """The option was made smaller, and the former leader has not registered since."""
    await world.server(1)
    (bucket,) = await world.create_table(buckets=1)
    world.conf["zufluss.lookup.lease"] = "1s"
    await world.restart()
    world.seconds.now += 0.5
    other = await world.server(1, "elsewhere")
    assert other.tablet.buckets[bucket].lease_ms == 1000 * (LEASE_SECONDS - 0.5)
    assert other.lease.seconds == 1


async def test_a_session_that_has_ended_gets_no_floor_and_no_bucket(world: World) -> None:
    one = await world.server(1)
    (bucket,) = await world.create_table(buckets=1)
    await world.wal.commit_wal_floor(one.session, 2)
    await world.wal.commit_wal_floor(one.session, 1)
    assert world.wal.book.get(one.session.server_epoch).floor == 2, "a floor never falls"
    former = one.session
    await world.wal.book.begin_to_close(former)
    with pytest.raises(NotLeaderError, match="has ended; register again"):
        await world.wal.commit_wal_floor(former, 3)
    with pytest.raises(NotLeaderError, match="has ended; register again"):
        await one.commit(bucket)
    await one.link.join()
    source = one.tablet.buckets[bucket].source
    assert source is not None
    assert source.floor == 2
    with pytest.raises(NotLeaderError):
        await world.wal.commit_wal_floor(one.session._replace(server_id=7), 3)


async def test_a_leader_of_a_past_epoch_takes_nothing_over(world: World) -> None:
    one = await world.server(1)
    (bucket,) = await world.create_table(buckets=1)
    await one.link.join()
    order = one.tablet.buckets[bucket]
    await one.link.join()
    assert await one.commit(bucket) == {bucket}
    one.tablet.buckets[bucket] = order
    assert await one.commit(bucket) == set()


async def test_sessions_outlive_the_coordinator(world: World) -> None:
    one = await world.server(1)
    (bucket,) = await world.create_table(buckets=1)
    await appended(world, "host-1", bucket, count=2)
    await world.wal.commit_wal_floor(one.session, 1)
    former = one.session
    await world.restart()
    await one.link.join()
    assert one.tablet.buckets[bucket].source == WalSource(former, 1, 2)


async def test_data_of_a_session_goes_when_no_bucket_needs_it_and_its_seals_30_days_later(
    world: World,
) -> None:
    one = await world.server(1)
    buckets = await world.create_table(buckets=2)
    former = one.session
    await appended(world, "host-1", *buckets, count=3)
    await one.link.join()
    cleaner = world.coordinator.wal_cleaner
    assert cleaner is not None
    await one.commit(buckets[0])
    await cleaner.clean()
    assert world.objects(former)[:3] == [0, 1, 2], "one bucket still needs them"
    await one.commit(buckets[1])
    await cleaner.clean()
    seals = world.objects(former)
    assert min(seals) == 3, "a seal keeps its name taken"
    world.clock.now_ms += SEALS_KEPT_DAYS * DAY_MS
    await cleaner.clean()
    assert world.objects(former) == seals
    world.clock.now_ms += 1
    await cleaner.clean()
    assert world.objects(former) == []
    assert world.wal.book.get(former.server_epoch) is None
    live = world.wal.book.live(1)
    assert live is not None
    assert live.session == one.session


async def test_seals_stay_although_the_clock_was_behind_when_they_were_put(world: World) -> None:
    """They would look old as soon as it is right, and free a name that a paused server may take."""
    one = await world.server(1)
    await one.link.join()
    world.clock.now_ms -= 400 * DAY_MS
    former = one.session
    await one.link.join()
    world.clock.now_ms += 400 * DAY_MS
    cleaner = world.coordinator.wal_cleaner
    assert cleaner is not None
    await cleaner.clean()
    assert world.objects(former)
    world.clock.now_ms += SEALS_KEPT_DAYS * DAY_MS + 1
    await cleaner.clean()
    assert not world.objects(former)


async def test_the_sweep_of_orphans_leaves_sessions_alone(world: World) -> None:
    """Only the cleaner, and the server of a session below its floor, delete any of it."""
    one = await world.server(1)
    (bucket,) = await world.create_table(buckets=1)
    sealed = one.session
    await appended(world, "host-1", bucket, count=3)
    await one.link.join()
    await appended(world, "host-1", bucket, count=2)
    orphan = world.location / f"log/fluss/events-{bucket.table_id}/0/{uuid.uuid4()}/{0:020d}.log"
    orphan.parent.mkdir(parents=True)
    orphan.write_bytes(b"its commit never came")
    sessions = {each: world.objects(each) for each in (sealed, one.session)}
    assert [len(numbers) > 1 for numbers in sessions.values()] == [True, True]
    world.clock.now_ms = int(time.time() * 1000) + (SEALS_KEPT_DAYS + 1) * DAY_MS
    await world.coordinator.remote.sweep.sweep()
    assert not orphan.exists()
    assert {each: world.objects(each) for each in sessions} == sessions


async def test_tables_are_created_while_a_server_registers(world: World) -> None:
    """Its former session is sealed, which can take long, before it has the next one."""
    one, two = await world.server(1), await world.server(2)
    await world.wal.end(1)
    buckets = await world.create_table(buckets=4)
    assert {world.state(b).leader for b in buckets} == {2}
    await world.wal.end(2)
    with pytest.raises(LeaderNotAvailableError, match="has no session of the shared log"):
        await world.create_table("more")
    await one.link.join()
    await two.link.join()
    assert {world.state(b).leader for b in await world.create_table("more")} == {1, 2}


async def test_the_live_session_of_a_server_is_known_whatever_sessions_it_had(
    world: World,
) -> None:
    one, two = await world.server(1), await world.server(2)
    for _ in range(3):
        await one.link.join()
    assert world.wal.book.live(1).session == one.session
    await world.wal.end(2)
    assert world.wal.book.live(2) is None
    await world.restart()
    assert world.wal.book.live(1).session == one.session
    assert world.wal.book.live(2) is None
    assert world.wal.book.live(3) is None
    await two.link.join()
    assert world.wal.book.live(2).session == two.session


async def test_a_session_into_which_a_bucket_is_taken_over_right_now_is_not_released(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It ends between the transaction and the image; its data would be deleted."""
    one = await world.server(1)
    (bucket,) = await world.create_table(buckets=1)
    await one.link.join()
    session, states = one.session, world.coordinator.catalog.states
    stored, go_on, put = asyncio.Event(), asyncio.Event(), states._put

    async def slow(portion: Any) -> Any:
        done = await put(portion)
        stored.set()
        await go_on.wait()
        return done

    monkeypatch.setattr(states, "_put", slow)
    taken_over = asyncio.create_task(one.commit(bucket))
    await stored.wait()
    await world.wal.end(1)
    released = asyncio.create_task(world.wal.release_unused())
    await asyncio.wait([released], timeout=0.2)
    go_on.set()
    assert await taken_over == {bucket}
    assert session.server_epoch not in [x.session.server_epoch for x in await released]
    assert world.wal.book.get(session.server_epoch).state is State.SEALED


async def test_a_location_with_a_session_is_in_use(world: World) -> None:
    one = await world.server(1)
    usage = world.wal.book.live_usage()
    assert list(usage) == [one.session.location_id]


# Refusals


async def test_servers_with_another_durability_are_refused(world: World) -> None:
    request = m.RegisterTabletServerRequest(server_id=5, listeners="CLIENT://host:1")
    with pytest.raises(ConfigError) as refused:
        await world.call(ApiKey.REGISTER_TABLET_SERVER, request, timeout_ms=1000)
    assert refused.value.message == (
        "zufluss.log.durability of tablet server 5 is local, but remote at the coordinator; all "
        "servers of a cluster have the same value"
    )
    assert 5 not in world.coordinator.image.tablets


async def test_a_cluster_with_tables_keeps_its_durability(tmp_path: Path) -> None:
    cluster = await Cluster(tmp_path / "meta").start()
    await cluster.call(
        ApiKey.CREATE_TABLE,
        table_path={"database_name": "fluss", "table_name": "t"},
        table_json=table_json(),
        ignore_if_exists=False,
    )
    await cluster.stop()
    world = World(tmp_path)
    with pytest.raises(ConfigError, match="created with local; set it to local, or begin a new"):
        await world.start()
    await world.store.close()


async def test_a_cluster_without_tables_may_change_its_durability(tmp_path: Path) -> None:
    cluster = await Cluster(tmp_path / "meta").start()
    await cluster.stop()
    world = await World(tmp_path).start()
    await world.server(1)
    await world.stop()


async def test_sessions_of_a_cluster_that_has_no_shared_log_any_more_are_cleaned(
    world: World,
) -> None:
    """Their location could never be retired."""
    one = await world.server(1)
    await appended(world, "host-1", TableBucket(1, None, 0), count=2)
    world.conf["zufluss.log.durability"] = "local"
    await world.restart()
    coordinator = world.coordinator
    assert coordinator.wal is None
    assert coordinator.wal_cleaner is not None
    assert coordinator.sessions.live_usage()
    await coordinator.wal_cleaner.clean()
    assert not coordinator.sessions.live_usage()
    assert min(world.objects(one.session)) == 2, "its seals stay for a while"


async def test_without_a_location_there_is_no_shared_log(tmp_path: Path) -> None:
    world = World(tmp_path)
    del world.conf["remote.data.dir"]
    with pytest.raises(ConfigError, match=r"set remote\.data\.dir to an object store"):
        await world.start()
    await world.store.close()


async def test_a_session_that_cannot_be_read_stops_the_start(tmp_path: Path) -> None:
    world = await World(tmp_path).start()
    one = await world.server(1)
    epoch = one.session.server_epoch
    await world.stop()
    store = await EmbeddedStore.open(tmp_path / "meta")
    await store.transact([Put(f"/wal/sessions/{epoch}", b"{}")])
    await store.close()
    with pytest.raises(CatalogDamagedError, match=f"/wal/sessions/{epoch}"):
        await world.start()
    await world.store.close()
