"""Leases of key-value snapshots: what each call does, over a real store and a clock we turn."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio

from tests.coordinator.lease_world import DAILY, HOUR_MS, LOGS, TABLE, LeaseWorld
from zufluss.coordinator.leases.epochs import EPOCHS_AT_ONCE
from zufluss.coordinator.leases.rules import AcquireResult, LeaseCounts, TableShare
from zufluss.coordinator.leases.writer import OPS_MAX
from zufluss.errors import (
    AuthorizationError,
    ConfigError,
    KvSnapshotLeaseFencedError,
    KvSnapshotLeaseNotFoundError,
    NonPrimaryKeyTableError,
    UnknownTableOrBucketError,
)
from zufluss.model.lease import LeasedSnapshot, Revoked, Unavailable
from zufluss.model.table import TableBucket


@pytest_asyncio.fixture
async def world(tmp_path: Path) -> AsyncIterator[LeaseWorld]:
    """Every bucket except the last has snapshots 0 and 1."""
    world = await LeaseWorld.start(tmp_path, is_super=lambda name: name == "root")
    for snapshot_id in (0, 1):
        await world.take([*world.buckets[:-1], *world.daily], snapshot_id)
    yield world
    await world.close()


async def latest(world: LeaseWorld, lease_id: str = "a", *buckets: TableBucket) -> AcquireResult:
    return await world.leases.acquire_latest(lease_id, HOUR_MS, buckets, principal=None)


async def unchanged(world: LeaseWorld, before: dict[str, bytes], counts: LeaseCounts) -> None:
    assert await world.stored() == before
    assert world.leases.book.counts == counts


async def test_the_latest_snapshots_are_found_and_pinned_in_one_step(world: LeaseWorld) -> None:
    first, second, _, empty = world.buckets
    got = await latest(world, "a", first, second, empty, world.daily[0])
    assert (got.epoch, got.remaining_ms, got.revoked) == (1, HOUR_MS, [])
    assert got.leased == dict.fromkeys((first, second, world.daily[0]), LeasedSnapshot(1, 10))
    assert got.unavailable == {empty: Unavailable.NO_SNAPSHOT}
    for snapshot_id in range(2, 9):
        await world.take([first], snapshot_id)
    assert world.kept(first) == [1, 7, 8]
    assert world.leases.book.pins.location(first, 1) == 2
    assert world.leases.book.pins.location(first, 7) is None


async def test_snapshots_are_leased_by_number_and_what_cannot_be_had_is_told_with_the_reason(
    world: LeaseWorld,
) -> None:
    await world.take([world.buckets[0]], 2)
    wanted = {
        world.buckets[0]: 1,
        world.buckets[1]: 7,
        world.buckets[3]: 0,
        TableBucket(TABLE, None, 99): 0,
        TableBucket(TABLE, None, -1): 0,
        TableBucket(TABLE, 20, 0): 0,
        TableBucket(DAILY, None, 0): 0,
        TableBucket(DAILY, 99, 0): 0,
    }
    got = await world.leases.acquire("a", HOUR_MS, wanted, principal=None)
    assert got.leased == {world.buckets[0]: LeasedSnapshot(1, 10)}
    none = dict.fromkeys(list(wanted)[3:], Unavailable.NO_BUCKET)
    assert got.unavailable == {
        world.buckets[1]: Unavailable.GONE,
        world.buckets[3]: Unavailable.NO_SNAPSHOT,
        **none,
    }
    gone = await world.leases.acquire("a", HOUR_MS, {world.buckets[0]: 0}, principal=None)
    assert gone.unavailable == {world.buckets[0]: Unavailable.GONE}
    assert world.leases.book.pins.pinned(world.buckets[0], 1)


async def test_an_acquire_that_gets_nothing_makes_no_lease(world: LeaseWorld) -> None:
    got = await latest(world, "a", world.buckets[3])
    assert (got.epoch, got.remaining_ms) == (None, 0)
    assert world.leases.book.infos() == []
    assert await world.stored() == {}


async def test_the_same_acquire_again_changes_nothing_but_the_time(world: LeaseWorld) -> None:
    wanted = {world.buckets[0]: 1, world.buckets[1]: 0}
    first = await world.leases.acquire("a", HOUR_MS, wanted, principal=None)
    counts = world.leases.book.counts
    assert await world.leases.acquire("a", HOUR_MS, wanted, principal=None) == first
    assert world.leases.book.counts == counts
    await world.leases.release("a", wanted, principal=None)
    assert world.leases.book.counts.snapshots == 0


async def test_a_newer_snapshot_of_a_bucket_replaces_the_one_before(world: LeaseWorld) -> None:
    bucket = world.buckets[0]
    await world.leases.acquire("a", HOUR_MS, {bucket: 0}, principal=None)
    await world.leases.acquire("a", HOUR_MS, {bucket: 1}, principal=None)
    assert not world.leases.book.pins.pinned(bucket, 0)
    assert world.leases.book.pins.pinned(bucket, 1)
    assert world.freed == [bucket]
    assert world.leases.book.counts.snapshots == 1


async def test_a_snapshot_that_two_leases_have_is_free_when_both_let_go(world: LeaseWorld) -> None:
    bucket = world.buckets[0]
    await latest(world, "a", bucket)
    await latest(world, "b", bucket)
    await world.leases.release("a", [bucket], principal=None)
    assert (world.leases.book.pins.pinned(bucket, 1), world.freed) == (True, [])
    await world.leases.drop("b", principal=None)
    assert (world.leases.book.pins.pinned(bucket, 1), world.freed) == (False, [bucket])


async def test_releasing_the_last_bucket_ends_the_lease(world: LeaseWorld) -> None:
    await latest(world, "a", *world.buckets, *world.daily)
    await world.leases.release("a", [*world.buckets, world.daily[0]], principal=None)
    assert list(await world.stored()) == [
        "/leases/kv-snapshot/a",
        "/leases/kv-snapshot/a/expiry",
        f"/leases/kv-snapshot/a/tables/{DAILY}",
    ]
    await world.leases.release("a", world.daily, principal=None)
    assert await world.stored() == {}
    with pytest.raises(KvSnapshotLeaseNotFoundError):
        await world.leases.renew("a", HOUR_MS, principal=None)


async def test_releasing_and_dropping_what_is_not_there_changes_nothing(world: LeaseWorld) -> None:
    await latest(world, "a", world.buckets[0])
    before, counts = await world.stored(), world.leases.book.counts
    other = [world.buckets[1], TableBucket(TABLE, None, 10**6), TableBucket(77, 1, -3)]
    await world.leases.release("a", other, principal=None)
    await world.leases.release("unknown", other, principal="bob", epoch=7)
    await world.leases.drop("unknown", principal="bob", epoch=7)
    await unchanged(world, before, counts)
    await world.leases.drop("a", principal=None)
    await world.leases.drop("a", principal=None)
    assert await world.stored() == {}


async def test_a_renewal_lasts_for_the_duration_from_now_on(world: LeaseWorld) -> None:
    await latest(world, "a", world.buckets[0])
    world.seconds.now += 600
    [info] = world.leases.book.infos()
    assert info.remaining_ms == HOUR_MS - 600_000
    renewed = await world.leases.renew("a", 2 * HOUR_MS, principal=None)
    assert (renewed.remaining_ms, renewed.revoked) == (2 * HOUR_MS, [])
    shorter = await world.leases.renew("a", 1, principal=None)
    assert shorter.remaining_ms == 1
    world.seconds.now += 0.001
    await world.timer.expire()
    assert await world.stored() == {}


async def test_an_acquire_without_snapshots_renews_and_never_makes_a_lease(
    world: LeaseWorld,
) -> None:
    for call in (world.leases.acquire, world.leases.acquire_latest):
        with pytest.raises(KvSnapshotLeaseNotFoundError):
            await call("a", HOUR_MS, {}, principal=None)  # type: ignore[operator]
    assert await world.stored() == {}
    await latest(world, "a", world.buckets[0])
    world.seconds.now += 600
    got = await world.leases.acquire("a", 2 * HOUR_MS, {}, principal=None)
    assert (got.epoch, got.remaining_ms) == (1, 2 * HOUR_MS)


@pytest.mark.parametrize("duration_ms", [0, -1, 7 * 24 * HOUR_MS + 1, 2**63 - 1])
async def test_a_duration_that_is_not_allowed_is_refused(
    world: LeaseWorld, duration_ms: int
) -> None:
    await latest(world, "a", world.buckets[0])
    for call in (
        world.leases.renew("a", duration_ms, principal=None),
        world.leases.acquire("b", duration_ms, {world.buckets[0]: 1}, principal=None),
        world.leases.acquire_latest("b", duration_ms, world.buckets, principal=None),
    ):
        with pytest.raises(ConfigError, match="duration-max"):
            await call
    assert [info.lease_id for info in world.leases.book.infos()] == ["a"]


@pytest.mark.parametrize("lease_id", ["", "x" * 129, "a/b", "..", ".", "a\0", "ä", "a b", "\udcff"])
async def test_an_id_that_is_no_plain_name_is_refused_everywhere(
    world: LeaseWorld, lease_id: str
) -> None:
    leases = world.leases
    for call in (
        leases.acquire(lease_id, HOUR_MS, {world.buckets[0]: 1}, principal=None),
        leases.acquire_latest(lease_id, HOUR_MS, world.buckets, principal=None),
        leases.renew(lease_id, HOUR_MS, principal=None),
        leases.release(lease_id, world.buckets, principal=None),
        leases.drop(lease_id, principal=None),
    ):
        with pytest.raises(ConfigError, match="not the id of a lease"):
            await call
    assert await world.stored() == {}


async def test_tables_that_have_no_snapshots_refuse_the_whole_request(world: LeaseWorld) -> None:
    good = world.buckets[0]
    with pytest.raises(UnknownTableOrBucketError):
        await latest(world, "a", good, TableBucket(77, None, 0))
    with pytest.raises(NonPrimaryKeyTableError):
        await latest(world, "a", good, TableBucket(LOGS, None, 0))
    assert not world.leases.book.pins.pinned(good, 1)
    assert await world.stored() == {}


async def test_a_lease_that_is_over_is_gone_for_every_call_before_the_timer_comes(
    world: LeaseWorld,
) -> None:
    bucket = world.buckets[0]
    for lease_id in "abc":
        await latest(world, lease_id, bucket)
    world.seconds.now += 3600
    assert world.leases.book.infos() == []
    assert world.leases.book.pins.pinned(bucket, 1)  # until it is durably gone
    with pytest.raises(KvSnapshotLeaseNotFoundError):
        await world.leases.renew("a", HOUR_MS, principal=None)
    await world.leases.release("b", [bucket], principal="somebody")
    assert world.freed == []
    got = await latest(world, "c", bucket)
    assert got.epoch == 2
    assert world.leases.book.counts.leases == 1
    await world.leases.drop("c", principal=None)
    assert world.freed == [bucket, bucket]  # when the last one expired, and now


async def test_the_timer_ends_leases_in_the_order_of_their_deadlines(world: LeaseWorld) -> None:
    buckets = world.buckets
    for lease_id, minutes in (("a", 30), ("b", 10), ("c", 20)):
        await world.leases.acquire_latest(lease_id, minutes * 60_000, buckets, principal=None)
    await world.leases.renew("b", HOUR_MS, principal=None)
    left = []
    for _ in range(3):
        world.seconds.now += 20 * 60
        await world.timer.expire()
        left.append([info.lease_id for info in world.leases.book.infos()])
    assert left == [["a", "b"], ["b"], []]
    assert sorted(world.freed) == world.buckets[:3]


async def test_a_takeover_fences_who_had_the_lease_before(world: LeaseWorld) -> None:
    first = await latest(world, "a", *world.buckets)
    await world.take([world.buckets[0]], 2)
    second = await latest(world, "a")
    assert (first.epoch, second.epoch) == (1, 2)
    assert second.leased == first.leased
    leases = world.leases
    for call in (
        leases.renew("a", HOUR_MS, principal=None, epoch=1),
        leases.release("a", world.buckets, principal=None, epoch=1),
        leases.drop("a", principal=None, epoch=1),
        leases.acquire("a", HOUR_MS, {world.buckets[0]: 1}, principal=None, epoch=1),
        leases.acquire_latest("a", HOUR_MS, world.buckets, principal=None, epoch=3),
    ):
        with pytest.raises(KvSnapshotLeaseFencedError, match="taken over"):
            await call
    kept = await leases.acquire_latest("a", HOUR_MS, [], principal=None, epoch=2)
    assert kept.epoch == 2
    assert (await leases.renew("a", HOUR_MS, principal=None)).remaining_ms == HOUR_MS


@pytest.mark.parametrize("restarts", [False, True], ids=["", "after-a-restart"])
@pytest.mark.parametrize("ends", ["expires", "is-dropped"])
async def test_a_lease_made_anew_fences_who_had_one_of_that_name_before(
    world: LeaseWorld, ends: str, restarts: bool
) -> None:
    """A reader that slept until its lease ended can neither use nor drop the new one."""
    leases = world.leases
    before = (await latest(world, "a", *world.buckets)).epoch
    if ends == "expires":
        world.seconds.now += 3600
        await world.timer.expire()
    else:
        await leases.drop("a", principal=None)
    if restarts:
        await world.restart()
        leases = world.leases
    await latest(world, "a", *world.buckets)
    for call in (
        leases.renew("a", HOUR_MS, principal=None, epoch=before),
        leases.release("a", world.buckets, principal=None, epoch=before),
        leases.drop("a", principal=None, epoch=before),
    ):
        with pytest.raises(KvSnapshotLeaseFencedError):
            await call
    assert (leases.book.counts.leases, leases.book.counts.snapshots) == (1, 3)


async def test_epochs_go_on_where_they_are_kept_in_the_store(world: LeaseWorld) -> None:
    """More takeovers than epochs that are reserved at once."""
    await latest(world, "a", *world.buckets)
    for _ in range(EPOCHS_AT_ONCE):
        found = await latest(world, "a")
    assert found.epoch == EPOCHS_AT_ONCE + 1
    await world.leases.drop("a", principal=None)
    await world.restart()
    again = await latest(world, "a", *world.buckets)
    assert again.epoch is not None
    assert again.epoch > EPOCHS_AT_ONCE + 1


async def test_a_call_with_an_epoch_never_makes_a_lease(world: LeaseWorld) -> None:
    for call in (world.leases.acquire_latest, world.leases.acquire):
        with pytest.raises(KvSnapshotLeaseNotFoundError):
            await call("a", HOUR_MS, {world.buckets[0]: 1}, principal=None, epoch=1)  # type: ignore[operator]
    assert await world.stored() == {}


async def test_nobody_but_its_owner_and_super_users_may_use_a_lease(world: LeaseWorld) -> None:
    leases, bucket = world.leases, world.buckets[0]
    await leases.acquire_latest("a", HOUR_MS, [bucket], principal="ann")
    before = await world.stored()
    for other in ("bob", None):
        for call in (
            leases.acquire("a", HOUR_MS, {bucket: 1}, principal=other),
            leases.acquire_latest("a", HOUR_MS, [bucket], principal=other),
            leases.renew("a", HOUR_MS, principal=other),
            leases.release("a", [bucket], principal=other),
            leases.drop("a", principal=other),
        ):
            with pytest.raises(AuthorizationError, match="belongs to ann"):
                await call
    assert await world.stored() == before
    await leases.renew("a", HOUR_MS, principal="root")
    assert leases.book.infos("a")[0].owner == "ann"
    await leases.drop("a", principal="root")
    await latest(world, "n", bucket)
    with pytest.raises(AuthorizationError, match="an unknown user"):
        await leases.renew("n", HOUR_MS, principal="ann")


async def test_an_owner_has_so_many_leases_and_no_more(tmp_path: Path) -> None:
    world = await LeaseWorld.start(tmp_path, {"zufluss.kv.snapshot.lease.count-max": "3"})
    await world.take(world.buckets, 0)
    made = await asyncio.gather(
        *(
            world.leases.acquire_latest(f"l{i}", HOUR_MS, world.buckets, principal="ann")
            for i in range(9)
        ),
        return_exceptions=True,
    )
    refused = [each for each in made if isinstance(each, ConfigError)]
    assert len(refused) == 6
    assert "zufluss.kv.snapshot.lease.count-max" in refused[0].message
    assert world.leases.book.counts.leases == 3
    await world.leases.acquire_latest("other", HOUR_MS, world.buckets, principal="bob")
    await world.leases.drop("l0", principal="ann")
    await world.leases.acquire_latest("again", HOUR_MS, world.buckets, principal="ann")
    await world.close()


async def test_leased_snapshots_of_a_table_have_so_many_bytes_and_no_more(tmp_path: Path) -> None:
    world = await LeaseWorld.start(tmp_path, {"zufluss.kv.snapshot.lease.bytes-max": "250b"})
    await world.take([*world.buckets, *world.daily], 0)
    await latest(world, "a", *world.buckets[:2], *world.daily[:2])
    await latest(world, "b", *world.buckets[:2])  # the same snapshots count once
    before, counts = await world.stored(), world.leases.book.counts
    with pytest.raises(ConfigError, match=r"300 bytes .*lease\.bytes-max"):
        await latest(world, "c", world.daily[0], world.buckets[2])
    await unchanged(world, before, counts)
    assert not world.leases.book.pins.pinned(world.buckets[2], 0)
    await world.take(world.buckets, 1)
    await world.leases.drop("b", principal=None)
    got = await latest(world, "a", *world.buckets[:2])  # replaces, so it is not more
    assert {each.snapshot_id for each in got.leased.values()} == {1}
    await world.close()


async def test_what_was_dropped_is_revoked_and_told_until_the_lease_ends(world: LeaseWorld) -> None:
    await latest(world, "a", *world.buckets, *world.daily)
    await latest(world, "b", world.daily[0])
    await latest(world, "c", world.buckets[0])
    assert world.leases.book.pins.holds(DAILY, 20)
    await world.leases.revoke(DAILY, 20, "fluss.daily(d=20)")
    assert not world.leases.book.pins.holds(DAILY, 20)
    assert world.leases.book.pins.holds(DAILY)
    assert sorted(world.freed) == world.daily[:2]
    told = [Revoked(DAILY, 20, "fluss.daily(d=20)")]
    assert (await world.leases.renew("a", HOUR_MS, principal=None)).revoked == told
    assert (await world.leases.renew("b", HOUR_MS, principal=None)).revoked == told
    assert (await world.leases.renew("c", HOUR_MS, principal=None)).revoked == []
    assert world.leases.book.revocation(world.daily[0]) == "fluss.daily(d=20)"
    assert world.leases.book.revocation(world.daily[2]) is None
    await world.leases.revoke(DAILY, None, "fluss.daily")
    assert world.leases.book.revocation(world.daily[2]) == "fluss.daily"
    assert not world.leases.book.pins.holds(DAILY)
    await world.restart()
    assert world.leases.book.revocation(world.daily[0]) == "fluss.daily(d=20)"
    assert (await latest(world, "b")).revoked == told
    await world.leases.drop("b", principal=None)
    await world.leases.release("a", world.buckets, principal=None)
    [kept] = world.leases.book.infos("a")  # it has something to tell
    assert kept.revoked == [*told, Revoked(DAILY, None, "fluss.daily")]


async def test_a_revocation_waits_for_an_acquire_under_way(world: LeaseWorld) -> None:
    acquiring = asyncio.ensure_future(latest(world, "a", *world.buckets))
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    assert world.leases.book.pins.holds(TABLE)  # pinned, not durable yet
    await world.leases.revoke(TABLE, None, "fluss.keyed")
    assert len((await acquiring).leased) == 3
    assert not world.leases.book.pins.holds(TABLE)
    told = (await world.leases.renew("a", HOUR_MS, principal=None)).revoked
    assert told == [Revoked(TABLE, None, "fluss.keyed")]


async def test_leases_are_listed_with_what_they_have(world: LeaseWorld) -> None:
    await world.leases.acquire_latest("b", HOUR_MS, world.daily, principal="ann")
    world.wall.now_ms += 5000
    world.seconds.now += 5
    await latest(world, "a", *world.buckets)
    a, b = world.leases.book.infos()
    assert (a.lease_id, a.owner, a.epoch, a.age_ms, a.remaining_ms) == ("a", None, 1, 0, HOUR_MS)
    assert (b.lease_id, b.owner, b.age_ms, b.duration_ms) == ("b", "ann", 5000, HOUR_MS)
    assert b.remaining_ms == HOUR_MS - 5000
    assert (a.tables, b.tables) == ({TABLE: TableShare(3, 300)}, {DAILY: TableShare(4, 400)})
    assert a.leased == {}
    [full] = world.leases.book.infos("b")
    assert full.leased == dict.fromkeys(world.daily, LeasedSnapshot(1, 10))
    assert world.leases.book.infos("unknown") == []
    assert world.leases.book.counts == LeaseCounts(2, 7, 700, 5.0, 0)


async def test_a_caller_that_goes_away_leaves_memory_and_store_the_same(world: LeaseWorld) -> None:
    task = asyncio.ensure_future(latest(world, "a", *world.buckets))
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    await world.leases.book.tasks.settle()
    counts = world.leases.book.counts
    assert counts.snapshots == 3
    await world.restart()
    assert world.leases.book.counts == counts


async def test_a_renewal_is_finished_even_when_its_caller_goes_away(world: LeaseWorld) -> None:
    await latest(world, "a", *world.buckets)
    world.seconds.now += 60
    task = asyncio.ensure_future(world.leases.renew("a", HOUR_MS, principal=None))
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    await world.leases.release("a", world.buckets[:1], principal=None)  # after the renewal
    assert world.leases.book.infos("a")[0].remaining_ms == HOUR_MS


async def test_calls_of_one_lease_take_turns_with_its_renewals(world: LeaseWorld) -> None:
    await latest(world, "a", *world.buckets)
    renewals = [world.leases.renew("a", HOUR_MS + i, principal=None) for i in range(3)]
    drop = world.leases.drop("a", principal=None)
    late = world.leases.renew("a", HOUR_MS, principal=None)
    *renewed, _, gone = await asyncio.gather(*renewals, drop, late, return_exceptions=True)
    assert [each.remaining_ms for each in renewed] == [HOUR_MS, HOUR_MS + 1, HOUR_MS + 2]
    assert isinstance(gone, KvSnapshotLeaseNotFoundError)
    assert await world.stored() == {}


async def test_thousands_of_renewals_and_expiries_share_transactions(tmp_path: Path) -> None:
    world = await LeaseWorld.start(tmp_path)
    await world.take(world.buckets, 0)
    ids = [f"l{i}" for i in range(3_000)]
    await asyncio.gather(*(latest(world, i, world.buckets[0]) for i in ids))
    before = world.leases.book.writer.transactions
    renewals = [asyncio.ensure_future(world.leases.renew(i, HOUR_MS, principal=None)) for i in ids]
    got = await latest(world, "other", world.buckets[1])
    assert got.epoch == 1
    await asyncio.gather(*renewals)
    assert world.leases.book.writer.transactions - before <= 3_000 // OPS_MAX + 3
    world.seconds.now += 3600
    before = world.leases.book.writer.transactions
    await world.timer.expire()
    assert world.leases.book.counts.leases == 0
    assert world.leases.book.writer.transactions - before <= 3 * 3_000 // OPS_MAX + 6
    assert await world.stored() == {}
    await world.close()


async def test_a_lease_of_many_buckets_leaves_the_event_loop_to_others(tmp_path: Path) -> None:
    """And its renewal writes next to nothing."""
    world = await LeaseWorld.start(tmp_path, buckets=20_000)
    await world.take(world.buckets, 3)
    turns = 0

    async def others() -> None:
        nonlocal turns
        while True:
            turns += 1
            await asyncio.sleep(0)

    beside = asyncio.ensure_future(others())
    got = await latest(world, "a", *world.buckets)
    beside.cancel()
    assert len(got.leased) == 20_000
    assert turns > 10
    before = await world.stored()
    await world.leases.renew("a", HOUR_MS // 2, principal=None)
    after = await world.stored()
    changed = {path for path in after if after[path] != before[path]}
    assert changed == {"/leases/kv-snapshot/a/expiry"}
    await world.open_leases()
    assert world.leases.book.counts.snapshots == 20_000
    await world.leases.release("a", world.buckets[:-1], principal=None)
    assert world.leases.book.counts.snapshots == 1
    await world.leases.drop("a", principal=None)
    assert sorted(world.freed) == world.buckets
    await world.close()


async def test_random_calls_leave_what_a_restart_reads(world: LeaseWorld) -> None:
    """Numbers and listing are the same before and after, whatever was done."""
    for i in range(30):
        lease_id, bucket = f"l{i % 7}", [*world.buckets, *world.daily][i % 8]
        if i % 5 == 4:
            await world.leases.release(lease_id, [bucket], principal=None)
        else:
            await latest(world, lease_id, bucket)
        await world.take([bucket], world.remotes.get(bucket).next_snapshot_id)
    before = [world.leases.book.infos(info.lease_id)[0] for info in world.leases.book.infos()]
    counts = world.leases.book.counts
    await world.restart()
    after = [world.leases.book.infos(info.lease_id)[0] for info in world.leases.book.infos()]
    assert after == before
    assert world.leases.book.counts == counts
