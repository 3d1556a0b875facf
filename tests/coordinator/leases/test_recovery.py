"""Leases over restarts, clocks that jump, stores that fail and records that are damaged."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Sequence
from pathlib import Path

import pytest
import pytest_asyncio

from tests.coordinator.lease_world import DAILY, HOUR_MS, TABLE, LeaseWorld
from tests.coordinator.support import DAY_MS
from tests.waiting import WAIT_SECONDS
from zufluss.coordinator.ledger import Ledger
from zufluss.errors import (
    AuthorizationError,
    CorruptRecordError,
    ErrorCode,
    KvSnapshotLeaseNotFoundError,
    ZuflussError,
)
from zufluss.meta.api import Delete, Entry, MetaStoreError, Op, Put
from zufluss.model.lease import Unavailable
from zufluss.model.table import TableBucket

MINUTE_MS = 60_000
HEAD = "/leases/kv-snapshot/a"


@pytest_asyncio.fixture
async def world(tmp_path: Path) -> AsyncIterator[LeaseWorld]:
    """Every bucket has snapshots 0 and 1."""
    world = await LeaseWorld.start(tmp_path, is_super=lambda name: name == "root")
    for snapshot_id in (0, 1):
        await world.take([*world.buckets, *world.daily], snapshot_id)
    yield world
    await world.close()


async def lease(
    world: LeaseWorld,
    lease_id: str = "a",
    minutes: int = 60,
    principal: str | None = None,
    buckets: Sequence[TableBucket] | None = None,
) -> None:
    wanted = world.buckets if buckets is None else buckets
    await world.leases.acquire_latest(lease_id, minutes * MINUTE_MS, wanted, principal=principal)


def left_ms(world: LeaseWorld, lease_id: str = "a") -> int:
    return world.leases.book.infos(lease_id)[0].remaining_ms


class Faults:
    """Failures that a test injects into a store."""

    def __init__(self, world: LeaseWorld) -> None:
        self.store = world.store
        self.transact, self.tree = world.store.transact, world.store.tree
        self.gate = asyncio.Event()
        self.waiting = asyncio.Event()

    def set(self, *, before: bool = False, after: bool = False, reads: bool = False) -> None:
        """Fail before a transaction or after it, and when reading."""

        async def transact(ops: Sequence[Op]) -> None:
            if before:
                raise MetaStoreError("unplugged")
            await self.transact(ops)
            if after:
                raise MetaStoreError("unplugged too late")

        async def tree(path: str) -> list[Entry]:
            if reads:
                raise MetaStoreError("unplugged for good")
            return await self.tree(path)

        self.store.transact = transact  # type: ignore[method-assign]
        self.store.tree = tree  # type: ignore[method-assign]

    def hold(self) -> None:
        """Let transactions wait until the gate opens."""

        async def transact(ops: Sequence[Op]) -> None:
            self.waiting.set()
            await self.gate.wait()
            await self.transact(ops)

        self.store.transact = transact  # type: ignore[method-assign]


# Time


async def test_after_a_start_a_lease_has_what_it_had_left_and_at_least_its_grace(
    world: LeaseWorld,
) -> None:
    await lease(world, "short", 2)
    await lease(world, "long", 60)
    world.seconds.now += 60
    await world.restart(away_seconds=30 * 60)
    assert left_ms(world, "short") == 10 * MINUTE_MS
    assert left_ms(world, "long") == 60 * MINUTE_MS
    await world.leases.renew("short", 2 * MINUTE_MS, principal=None)
    world.seconds.now += 2 * 60
    await world.timer.expire()
    assert [info.lease_id for info in world.leases.book.infos()] == ["long"]


async def test_the_time_left_is_written_now_and_then_and_goes_on_from_there(
    world: LeaseWorld,
) -> None:
    await lease(world)
    await world.timer.checkpoint()
    world.seconds.now += 20 * 60
    await world.timer.checkpoint()
    world.seconds.now += 5 * 60
    await world.restart(away_seconds=86_400)
    assert left_ms(world) == 40 * MINUTE_MS


async def test_what_was_written_since_the_last_time_is_not_written_again(world: LeaseWorld) -> None:
    await lease(world, "a")
    await lease(world, "b")
    world.seconds.now += 60
    await world.timer.checkpoint()
    world.seconds.now += 60
    await world.leases.renew("b", HOUR_MS, principal=None)
    before = await world.stored()
    await world.timer.checkpoint()
    after = await world.stored()
    assert [path for path in after if after[path] != before[path]] == [f"{HEAD}/expiry"]


async def test_a_stop_writes_the_time_left(world: LeaseWorld) -> None:
    await lease(world)
    world.seconds.now += 15 * 60
    world.timer.start()
    await world.timer.stop()
    await world.restart()
    assert left_ms(world) == 45 * MINUTE_MS


@pytest.mark.parametrize("jump_ms", [DAY_MS, -DAY_MS])
async def test_a_jump_of_the_wall_clock_ends_no_lease_and_prolongs_none(
    world: LeaseWorld, jump_ms: int
) -> None:
    await lease(world)
    world.wall.now_ms += jump_ms
    await world.timer.expire()
    assert left_ms(world) == HOUR_MS
    assert world.leases.book.infos()[0].age_ms == max(0, jump_ms)
    await world.restart()
    assert left_ms(world) == HOUR_MS
    world.wall.now_ms -= 2 * jump_ms
    world.seconds.now += 3600
    await world.timer.expire()
    assert world.leases.book.infos() == []


async def test_the_timer_ends_a_lease_by_itself(tmp_path: Path) -> None:
    """Uses the real clock; a callback reports the end of the lease."""
    world = await LeaseWorld.start(tmp_path, clock=time.monotonic)
    await world.take(world.buckets, 0)
    ended = asyncio.Event()
    world.freed_feed.subscribe(lambda _: ended.set())
    world.timer.start()
    await lease(world, "long", buckets=world.buckets[1:])
    await world.leases.acquire_latest("short", 5, world.buckets[:1], principal=None)
    await asyncio.wait_for(ended.wait(), WAIT_SECONDS)
    await world.timer.stop()
    assert [info.lease_id for info in world.leases.book.infos()] == ["long"]
    await world.close()


async def test_a_renewal_that_came_in_time_is_not_overtaken_by_the_timer(world: LeaseWorld) -> None:
    await lease(world)
    faults = Faults(world)
    faults.hold()
    world.seconds.now += 3599
    renewal = asyncio.ensure_future(world.leases.renew("a", HOUR_MS, principal=None))
    await faults.waiting.wait()
    world.seconds.now += 2
    timer = asyncio.ensure_future(world.timer.expire())
    await asyncio.sleep(0)
    faults.gate.set()
    assert (await renewal).remaining_ms == HOUR_MS - 2000
    await timer
    assert left_ms(world) == HOUR_MS - 2000


# Stores that fail


async def test_an_acquire_whose_write_failed_leaves_no_pin(world: LeaseWorld) -> None:
    faults = Faults(world)
    faults.set(before=True)
    with pytest.raises(MetaStoreError, match="unplugged"):
        await lease(world)
    faults.set()
    assert world.leases.book.counts.snapshots == 0
    assert not world.leases.book.pins.holds(TABLE)
    assert sorted(world.freed) == world.buckets
    with pytest.raises(KvSnapshotLeaseNotFoundError):
        await world.leases.renew("a", HOUR_MS, principal=None)
    await lease(world)
    assert world.leases.book.counts.snapshots == 4


async def test_a_write_that_took_place_although_it_failed_counts(world: LeaseWorld) -> None:
    faults = Faults(world)
    faults.set(after=True)
    with pytest.raises(MetaStoreError, match="too late"):
        await lease(world)
    assert world.leases.book.counts.snapshots == 4
    with pytest.raises(MetaStoreError):
        await world.leases.release("a", world.buckets[:3], principal=None)
    assert world.leases.book.counts.snapshots == 1
    with pytest.raises(MetaStoreError):
        await world.leases.drop("a", principal=None)
    faults.set()
    assert world.leases.book.counts.snapshots == 0
    assert await world.stored() == {}


async def test_while_nobody_knows_how_a_write_ended_all_its_pins_hold(world: LeaseWorld) -> None:
    bucket = world.buckets[0]
    await world.leases.acquire("a", HOUR_MS, {bucket: 0}, principal=None)
    faults = Faults(world)
    for after in (False, True):
        faults.set(before=not after, after=after, reads=True)
        with pytest.raises(MetaStoreError):
            await world.leases.acquire("a", HOUR_MS, {bucket: 1}, principal=None)
        assert world.leases.book.pins.pinned(bucket, 0)
        assert world.leases.book.pins.pinned(bucket, 1)
        with pytest.raises(MetaStoreError, match="for good"):
            await world.leases.renew("a", HOUR_MS, principal=None)
        faults.set()
        await world.leases.renew("a", HOUR_MS, principal=None)
        assert world.leases.book.pins.pinned(bucket, 0) is not after
        assert world.leases.book.pins.pinned(bucket, 1) is after


@pytest.mark.parametrize("after", [False, True])
async def test_a_renewal_that_failed_prolongs_nothing_and_the_next_one_may(
    world: LeaseWorld, after: bool
) -> None:
    await lease(world)
    world.seconds.now += 60
    faults = Faults(world)
    faults.set(before=not after, after=after)
    with pytest.raises(MetaStoreError, match="unplugged"):
        await world.leases.renew("a", HOUR_MS, principal=None)
    faults.set()
    assert left_ms(world) == 59 * MINUTE_MS
    await world.leases.renew("a", HOUR_MS, principal=None)
    assert left_ms(world) == HOUR_MS
    assert world.leases.book.counts.snapshots == 4


async def test_a_lease_in_doubt_that_nobody_asks_for_is_looked_at_by_the_timer(
    world: LeaseWorld,
) -> None:
    faults = Faults(world)
    faults.set(before=True, reads=True)
    with pytest.raises(MetaStoreError):
        await lease(world)
    assert world.leases.book.pins.holds(TABLE)
    faults.set()
    world.seconds.now += 5
    await world.timer.expire()
    assert not world.leases.book.pins.holds(TABLE)


async def test_an_end_that_cannot_be_written_frees_nothing_and_is_tried_again(
    world: LeaseWorld,
) -> None:
    await lease(world)
    faults = Faults(world)
    faults.set(before=True)
    world.seconds.now += 3600
    await world.timer.expire()
    assert world.leases.book.pins.pinned(world.buckets[0], 1)
    assert world.freed == []
    faults.set()
    world.seconds.now += 5
    await world.timer.expire()
    assert sorted(world.freed) == world.buckets


async def test_an_end_that_cannot_be_written_is_not_tried_again_at_once(world: LeaseWorld) -> None:
    """A full disk can be read all the same; the timer must not hammer it."""
    await lease(world)
    faults, tries = Faults(world), 0

    async def transact(ops: Sequence[Op]) -> None:
        nonlocal tries
        tries += 1
        raise MetaStoreError("the disk is full")

    world.store.transact = transact  # type: ignore[method-assign]
    world.seconds.now += 3600
    for _ in range(3):
        await world.timer.expire()
    assert tries == 1
    faults.set()
    world.seconds.now += 5
    await world.timer.expire()
    assert sorted(world.freed) == world.buckets


async def test_a_damaged_lease_holds_its_tables_also_while_it_is_read_again(
    tmp_path: Path,
) -> None:
    """More pins than one piece, so that other tasks run in between."""
    world = await LeaseWorld.start(tmp_path, buckets=4_500)
    for snapshot_id in (0, 1):
        await world.take([*world.buckets, *world.daily], snapshot_id)
    await lease(world, buckets=[*world.buckets, *world.daily])
    await damage(world, f"{HEAD}/tables/{DAILY}")
    Faults(world).set(before=True)
    held: list[bool] = []
    revoking = asyncio.ensure_future(world.leases.revoke(TABLE, None, "fluss.keyed"))
    while not revoking.done():
        await asyncio.sleep(0)
        held.append(world.leases.book.pins.pinned(world.daily[0], 0))
    with pytest.raises(MetaStoreError):
        await revoking
    assert all(held)
    await world.close()


async def test_a_coordinator_that_was_replaced_ends_no_lease(world: LeaseWorld) -> None:
    await lease(world)
    before = await world.stored()
    await Ledger.open(world.store)
    world.seconds.now += 3600
    await world.timer.expire()
    for call in (
        world.leases.renew("a", HOUR_MS, principal=None),
        world.leases.drop("a", principal=None),
        world.leases.acquire_latest("b", HOUR_MS, world.daily, principal=None),
    ):
        with pytest.raises(ZuflussError) as refused:
            await call
        assert refused.value.code is ErrorCode.NOT_COORDINATOR_LEADER_EXCEPTION
    assert await world.stored() == before
    assert world.leases.book.pins.pinned(world.buckets[0], 1)
    assert not world.leases.book.pins.holds(DAILY)


async def test_a_crash_before_the_write_leaves_nothing(world: LeaseWorld) -> None:
    faults = Faults(world)
    faults.hold()
    acquiring = asyncio.ensure_future(lease(world))
    await faults.waiting.wait()
    assert world.leases.book.pins.pinned(world.buckets[0], 1)
    faults.set()
    await world.restart()
    assert world.leases.book.counts.snapshots == 0
    faults.gate.set()  # what the dead process still had to do goes nowhere
    with pytest.raises(ZuflussError):
        await acquiring
    assert await world.stored() == {}


# Commits of snapshots under way


async def test_a_snapshot_that_a_commit_under_way_drops_is_not_leased(world: LeaseWorld) -> None:
    bucket = world.buckets[0]
    faults = Faults(world)
    faults.hold()
    commit = asyncio.ensure_future(world.take([bucket], 2))
    await faults.waiting.wait()
    by_number = asyncio.ensure_future(
        world.leases.acquire("a", HOUR_MS, {bucket: 0}, principal=None)
    )
    newest = asyncio.ensure_future(
        world.leases.acquire_latest("b", HOUR_MS, [bucket], principal=None)
    )
    await asyncio.sleep(0)
    faults.gate.set()
    await commit
    assert (await by_number).unavailable == {bucket: Unavailable.GONE}
    assert (await newest).leased[bucket].snapshot_id == 2


async def test_a_snapshot_that_was_answered_is_there_whatever_is_committed_beside(
    world: LeaseWorld,
) -> None:
    bucket = world.buckets[0]

    async def commits() -> None:
        for snapshot_id in range(2, 120):
            await world.take([bucket], snapshot_id)

    committing = asyncio.ensure_future(commits())
    rounds = 0
    while not committing.done():
        got = await world.leases.acquire_latest("a", HOUR_MS, [bucket], principal=None)
        assert got.leased[bucket].snapshot_id in world.kept(bucket)
        for _ in range(rounds % 7):
            await asyncio.sleep(0)
        assert got.leased[bucket].snapshot_id in world.kept(bucket)
        rounds += 1
    assert rounds > 10


async def test_of_many_buckets_changed_at_once_those_dropped_meanwhile_are_left_out(
    world: LeaseWorld,
) -> None:
    gone = world.buckets[1]
    await world.ledger.commit([Delete(f"/tables/{TABLE}/remote/{gone.bucket_id}")])
    await world.take([gone, world.buckets[0]], 2)
    assert world.kept(world.buckets[0]) == [1, 2]
    assert world.kept(gone) == [0, 1]
    assert all(map(world.remotes.is_certain, world.buckets))


# Damaged records


async def damage(world: LeaseWorld, path: str, *, missing: bool = False) -> None:
    value = (await world.stored())[path]
    await world.ledger.commit([Delete(path) if missing else Put(path, value[:-1] + b"?")])
    await world.restart()


@pytest.mark.parametrize("missing", [False, True])
async def test_of_a_table_whose_pins_cannot_be_read_every_snapshot_is_held(
    world: LeaseWorld, missing: bool
) -> None:
    await lease(world, principal="ann", buckets=[*world.buckets, world.daily[0]])
    await lease(world, "sound", principal="ann")
    await damage(world, f"{HEAD}/tables/{TABLE}", missing=missing)
    assert world.leases.book.counts.damaged == 1
    assert all(world.leases.book.pins.pinned(world.buckets[0], i) for i in range(5))
    assert world.leases.book.pins.pinned(world.daily[0], 1)
    assert not world.leases.book.pins.pinned(world.daily[1], 1)
    assert world.leases.book.pins.holds(TABLE)
    [info] = world.leases.book.infos("a")
    assert info.damage is not None
    assert f"{HEAD}/tables/{TABLE}" in info.damage
    world.seconds.now += 3600
    await world.timer.expire()
    assert [each.lease_id for each in world.leases.book.infos()] == ["a"]
    await world.leases.drop("a", principal="ann")
    assert not world.leases.book.pins.holds(TABLE)
    assert set(world.freed) == {*world.buckets, world.daily[0]}
    assert await world.stored() == {}


async def test_a_damaged_lease_can_only_be_dropped(world: LeaseWorld) -> None:
    await lease(world)
    await damage(world, f"{HEAD}/expiry")
    for call in (
        world.leases.renew("a", HOUR_MS, principal=None),
        world.leases.acquire("a", HOUR_MS, {world.buckets[0]: 1}, principal=None),
        world.leases.acquire_latest("a", HOUR_MS, world.buckets, principal=None),
        world.leases.release("a", world.buckets, principal=None),
    ):
        with pytest.raises(CorruptRecordError, match="damaged"):
            await call
    await world.leases.revoke(TABLE, None, "fluss.keyed")
    assert not world.leases.book.pins.holds(TABLE)
    await world.leases.drop("a", principal=None)
    assert await world.stored() == {}


async def test_a_lease_whose_owner_is_lost_is_dropped_by_super_users_or_without_authentication(
    world: LeaseWorld,
) -> None:
    for dropper in ("root", None):
        await lease(world, principal="ann")
        await damage(world, HEAD)
        assert world.leases.book.pins.pinned(world.buckets[0], 1)
        assert not world.leases.book.pins.pinned(world.buckets[0], 0)
        with pytest.raises(AuthorizationError, match="super user"):
            await world.leases.drop("a", principal="ann")
        await world.leases.drop("a", principal=dropper)
        assert await world.stored() == {}


async def test_when_not_even_its_tables_are_known_everything_is_held(world: LeaseWorld) -> None:
    await lease(world)
    for path in (HEAD, f"{HEAD}/tables/{TABLE}"):
        await damage(world, path, missing=True)
    assert world.leases.book.pins.pinned(world.daily[3], 0)
    assert world.leases.book.pins.holds(DAILY, 21)
    await world.leases.drop("a", principal=None)
    assert not world.leases.book.pins.holds(DAILY, 21)
    assert set(world.freed) >= {*world.buckets, *world.daily}
