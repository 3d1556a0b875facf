"""Leases of key-value snapshots in a client: renewed in time, and lost with the right error.

The clock is moved by hand; the coordinator is a fake whose answers each test chooses.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from datetime import timedelta
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.client.conftest import FAST
from tests.client.fake import FakeCluster
from tests.client.leases import ANY, DURATION_MS, FakeLeases, Holder, Time
from tests.waiting import WAIT_SECONDS
from zufluss.client.connection import AsyncConnection, connect_async
from zufluss.client.core.renewal import Renewals
from zufluss.client.lease.lease import AsyncKvSnapshotLease
from zufluss.clock import uptime_seconds
from zufluss.errors import (
    ConfigError,
    KvSnapshotLeaseFencedError,
    KvSnapshotLeaseNotFoundError,
    KvSnapshotNotExistError,
    KvSnapshotRevokedError,
    TableNotPartitionedError,
    ZuflussError,
)
from zufluss.model.lease import LeasedSnapshot, Revoked, Unavailable
from zufluss.model.schema import Schema
from zufluss.model.table import TableBucket
from zufluss.wire import messages as m

DURATION = DURATION_MS / 1000
FIRST, SECOND = TableBucket(7, None, 0), TableBucket(8, 3, 1)


@pytest.fixture
def leases(cluster: FakeCluster) -> FakeLeases:
    found = FakeLeases(cluster)
    found.held = {FIRST: ANY, SECOND: ANY}
    return found


@pytest.fixture
async def holder(connection: AsyncConnection, leases: FakeLeases) -> AsyncIterator[Holder]:
    """A lease of two buckets on a clock of its own."""
    made = Holder(connection, Time())
    await made.acquire(FIRST)
    yield made
    await made.lease._stop()


# -- arithmetic ----------------------------------------------------------------------------------


@given(duration=st.floats(1, 7 * 86_400), chance=st.floats(0, 1), hanging=st.booleans())
def test_two_thirds_of_the_time_without_a_server_leave_time_for_another_try(
    duration: float, chance: float, hanging: bool
) -> None:
    hanging = hanging and duration >= 60
    renewals = Renewals(duration, lambda: chance)
    renewals.succeeded(0.0, duration)
    now = renewals.next_at
    assert duration / 4 < now < duration / 3
    away_until = now + duration * 2 / 3 - 0.001  # it is away from just before the renewal on
    while now < away_until:
        now += renewals.try_seconds if hanging else 0.0
        renewals.failed(now, ZuflussError("away"))
        now = renewals.next_at
    assert not renewals.expired(now)


def test_pauses_grow_and_end_growing() -> None:
    renewals = Renewals(86_400.0, lambda: 0.0)
    renewals.succeeded(0.0, 86_400.0)
    pauses = []
    for _ in range(100):
        renewals.failed(0.0, ZuflussError("away"))
        pauses.append(renewals.pause(0.0))
    assert pauses == sorted(pauses)
    assert (pauses[0], pauses[-1]) == (0.05, 30.0)
    renewals.succeeded(0.0, 86_400.0)
    assert renewals.problem is None
    renewals.failed(0.0, ZuflussError("away"))
    assert renewals.pause(0.0) == 0.05


def test_the_clock_only_grows() -> None:
    assert uptime_seconds() <= uptime_seconds()


# -- what is leased ------------------------------------------------------------------------------


async def test_an_answer_has_the_held_and_the_unavailable_buckets(
    connection: AsyncConnection, leases: FakeLeases
) -> None:
    other = TableBucket(7, None, 1)
    leases.unavailable = {other: 2}
    async with await connection.admin.kv_snapshot_lease(buckets=[FIRST, other]) as lease:
        assert lease.snapshots == {FIRST: LeasedSnapshot(ANY, 14), SECOND: LeasedSnapshot(ANY, 14)}
        assert lease.unavailable == {other: Unavailable.NO_SNAPSHOT}
        assert (lease.epoch, lease.resumed, lease.lost, lease.revoked) == (1, False, None, [])
        assert 0 < lease.remaining_ms <= 86_400_000
        lease.check()
        lease.check(FIRST)
        with pytest.raises(KvSnapshotNotExistError, match="none yet; read its changelog"):
            lease.check(other)
        with pytest.raises(KvSnapshotNotExistError, match="was not leased, or released"):
            lease.check(TableBucket(9, None, 0))
    (asked,) = leases.of(m.AcquireLatestKvSnapshotLeaseRequest)
    assert asked.lease_duration_ms == 86_400_000
    assert [tuple(target.bucket_ids) for target in asked.targets] == [(0, 1)]
    assert leases.epochs == {}


async def test_two_leases_without_ids_have_different_ones(
    connection: AsyncConnection, leases: FakeLeases
) -> None:
    admin = connection.admin
    async with (
        await admin.kv_snapshot_lease(buckets=[FIRST]) as one,
        await admin.kv_snapshot_lease(buckets=[FIRST]) as other,
    ):
        assert one.lease_id != other.lease_id
        assert len(leases.epochs) == 2


async def test_a_lease_without_snapshots_is_neither_created_nor_lost(
    connection: AsyncConnection, leases: FakeLeases
) -> None:
    leases.held, leases.unavailable = {}, {FIRST: 2}
    async with await connection.admin.kv_snapshot_lease(buckets=[FIRST]) as lease:
        assert (lease.epoch, lease.snapshots, lease.lost) == (None, {}, None)
        assert lease.remaining_ms == 0
        lease.check()
    assert [type(request) for request in leases.asked] == [m.AcquireLatestKvSnapshotLeaseRequest]


async def test_tables_are_leased_by_their_ids(
    cluster: FakeCluster, connection: AsyncConnection, leases: FakeLeases
) -> None:
    infos = [
        cluster.create(name, Schema.of("id INT NOT NULL", primary_key=["id"]))
        for name in ("one", "two")
    ]
    admin = connection.admin
    for tables in ("one", infos[0].path, ["fluss.one"], ["one", infos[1].path]):
        async with await admin.kv_snapshot_lease(tables, buckets=[1, 0], duration="6h"):
            asked = leases.of(m.AcquireLatestKvSnapshotLeaseRequest)[-1]
        count = 2 if tables == ["one", infos[1].path] else 1
        assert [t.table_id for t in asked.targets] == [i.table_id for i in infos[:count]]
        assert [*asked.targets[0].bucket_ids] == [0, 1]
        assert asked.lease_duration_ms == 6 * 3_600_000
    with pytest.raises(TableNotPartitionedError):
        await admin.kv_snapshot_lease("one", partition="a")


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        ({}, "needs tables"),
        ({"tables": "one", "buckets": [FIRST]}, "needs tables"),
        ({"tables": "one", "buckets": []}, "needs tables"),
        ({"buckets": [FIRST, 1]}, "needs tables"),
        ({"buckets": [1]}, "needs tables"),
        ({"buckets": [FIRST], "duration": "soon"}, "'soon' is not allowed; allowed: a whole"),
        ({"buckets": [FIRST], "resume": True}, "name its lease_id"),
        ({"buckets": [FIRST], "if_lost": "latest"}, "name its lease_id"),
        ({"buckets": [FIRST], "lease_id": "x", "if_lost": "never"}, "none of error, latest"),
    ],
)
async def test_contradictory_arguments_are_refused(
    connection: AsyncConnection, leases: FakeLeases, arguments: Any, problem: str
) -> None:
    with pytest.raises(ConfigError, match=problem):
        await connection.admin.kv_snapshot_lease(**arguments)
    assert leases.asked == []


@pytest.mark.parametrize("duration", ["2min", 120_000, timedelta(minutes=2)])
async def test_a_duration_is_text_milliseconds_or_a_timedelta(
    connection: AsyncConnection, leases: FakeLeases, duration: Any
) -> None:
    async with await connection.admin.kv_snapshot_lease(buckets=[FIRST], duration=duration):
        assert leases.asked[0].lease_duration_ms == 120_000


# -- renewals ------------------------------------------------------------------------------------


async def test_a_lease_is_renewed_every_third_of_its_time(
    holder: Holder, leases: FakeLeases
) -> None:
    for _ in range(30):
        await holder.advance(DURATION / 3)
        holder.lease.check()
        assert holder.lease.remaining_ms > DURATION_MS / 2
    assert 30 <= leases.renewals <= 38
    asked = leases.of(m.RenewKvSnapshotLeaseRequest)
    assert {(r.lease_id, r.lease_epoch, r.lease_duration_ms) for r in asked} == {
        ("mine", 1, DURATION_MS)
    }


async def test_a_server_that_is_away_for_two_thirds_of_the_time_loses_nothing(
    holder: Holder, leases: FakeLeases
) -> None:
    leases.problem = ZuflussError("away")
    await holder.advance(DURATION * 2 / 3)
    holder.lease.check()
    leases.problem = None
    await holder.advance(DURATION / 10)
    assert holder.lease.remaining_ms > DURATION_MS * 0.8
    for _ in range(10):
        await holder.advance(DURATION / 3)
        holder.lease.check()


async def test_a_server_that_is_away_for_longer_is_a_loss_before_the_lease_is_over(
    holder: Holder, leases: FakeLeases, caplog: pytest.LogCaptureFixture
) -> None:
    granted = holder.time.now
    leases.problem = ZuflussError("nobody home")
    await holder.advance(DURATION - 0.001)
    holder.lease.check()
    await holder.advance(0.001)
    assert holder.time.now <= granted + DURATION
    with pytest.raises(KvSnapshotLeaseNotFoundError, match=r"not renewed for 1min.*nobody home"):
        holder.lease.check(FIRST)
    assert isinstance(holder.lease.lost, KvSnapshotLeaseNotFoundError)
    assert holder.lease.remaining_ms == 0
    assert len([r for r in caplog.records if "was not renewed" in r.message]) == 1


async def test_a_coordinator_that_comes_back_late_and_knows_the_lease_keeps_it(
    holder: Holder, leases: FakeLeases
) -> None:
    leases.problem = ZuflussError("away")
    await holder.advance(DURATION * 5)
    assert holder.lease.lost is not None
    leases.problem = None
    await holder.advance(DURATION / 10)
    holder.lease.check()
    assert holder.lease.epoch == 1


async def test_a_coordinator_that_comes_back_without_the_lease_ends_it(
    holder: Holder, leases: FakeLeases
) -> None:
    leases.problem = ZuflussError("away")
    await holder.advance(DURATION * 5)
    leases.problem = None
    leases.epochs.clear()
    await holder.advance(DURATION)
    with pytest.raises(KvSnapshotLeaseNotFoundError, match="there is no lease mine"):
        holder.lease.check()
    asked = leases.renewals
    await holder.advance(DURATION * 5)
    assert leases.renewals == asked, "what is gone is not asked for again"
    with pytest.raises(KvSnapshotLeaseNotFoundError):
        await holder.lease.renew()


async def test_a_renewal_without_an_answer_is_tried_again(
    holder: Holder, leases: FakeLeases
) -> None:
    leases.renewals_unanswered = 2
    await holder.advance(DURATION / 2)
    holder.lease.check()
    assert leases.renewals >= 3
    assert holder.lease.remaining_ms > DURATION_MS / 2


async def test_the_time_counts_from_the_sending_of_a_renewal(
    holder: Holder, leases: FakeLeases
) -> None:
    def slow(request: Any) -> None:
        holder.time.now += DURATION / 4

    leases.on_call = slow
    sent_at = holder.time.now
    await holder.lease.renew()
    assert holder.lease.remaining_ms == DURATION_MS * 3 / 4
    holder.time.now = sent_at + DURATION
    assert holder.lease.lost is not None


async def test_a_lease_that_was_taken_over_is_fenced(holder: Holder, leases: FakeLeases) -> None:
    leases.epochs["mine"] = 2
    await holder.advance(DURATION / 3)
    with pytest.raises(KvSnapshotLeaseFencedError, match="has epoch 2"):
        holder.lease.check(SECOND)
    with pytest.raises(KvSnapshotLeaseFencedError):
        await holder.lease.renew()
    await holder.lease.close()
    assert leases.of(m.DropKvSnapshotLeaseRequest) == [], "it belongs to somebody else"


async def test_a_fenced_close_leaves_the_lease_to_its_new_holder(
    holder: Holder, leases: FakeLeases
) -> None:
    leases.epochs["mine"] = 2
    await holder.lease.close()
    assert leases.epochs == {"mine": 2}


async def test_a_dropped_table_is_lost_and_the_other_tables_of_the_lease_stay(
    holder: Holder, leases: FakeLeases
) -> None:
    leases.revoked = [m.PbRevokedSnapshots(table_id=8, partition_id=3, what="fluss.orders (p=a)")]
    await holder.advance(DURATION)
    lease = holder.lease
    assert lease.revoked == [Revoked(8, 3, "fluss.orders (p=a)")]
    lease.check(FIRST)
    assert lease.lost is None
    for bucket in (SECOND, None):
        with pytest.raises(KvSnapshotRevokedError, match=r"fluss.orders \(p=a\) was dropped"):
            lease.check(bucket)
    leases.revoked.append(m.PbRevokedSnapshots(table_id=7, what="fluss.all"))
    await lease.renew()
    with pytest.raises(KvSnapshotRevokedError, match=r"fluss.all was dropped"):
        lease.check(FIRST)


async def test_a_closed_connection_ends_the_renewer(
    cluster: FakeCluster, leases: FakeLeases
) -> None:
    async with await connect_async(cluster.bootstrap, **FAST) as connection:
        holder = Holder(connection, Time())
        await holder.acquire(FIRST)
    await holder.advance(DURATION)
    assert isinstance(holder.lease.lost, KvSnapshotLeaseNotFoundError)
    assert leases.epochs == {"mine": 1}, "it is left to expire"


# -- ends ----------------------------------------------------------------------------------------


async def test_a_released_snapshot_is_not_held(holder: Holder, leases: FakeLeases) -> None:
    lease = holder.lease
    await lease.release(FIRST)
    (asked,) = leases.of(m.ReleaseKvSnapshotLeaseRequest)
    assert (asked.lease_epoch, len(asked.buckets_to_release)) == (1, 1)
    assert set(lease.snapshots) == {SECOND}
    with pytest.raises(KvSnapshotNotExistError, match="was not leased, or released"):
        lease.check(FIRST)
    await holder.advance(DURATION)
    assert leases.renewals > 0
    renewed = leases.renewals
    await lease.release([SECOND])
    await holder.advance(DURATION * 5)
    assert leases.renewals == renewed, "nothing is left to renew"
    lease.check()
    await lease.release([])
    assert len(leases.of(m.ReleaseKvSnapshotLeaseRequest)) == 2


async def test_close_drops_the_lease_once_and_ends_its_readers(
    holder: Holder, leases: FakeLeases
) -> None:
    await holder.lease.close()
    await holder.lease.close()
    (dropped,) = leases.of(m.DropKvSnapshotLeaseRequest)
    assert dropped.lease_epoch == 1
    with pytest.raises(KvSnapshotLeaseNotFoundError, match="not held here any more: it was closed"):
        holder.lease.check(FIRST)
    assert "lost" in repr(holder.lease)


async def test_a_block_that_cannot_drop_its_lease_leaves_it_and_says_so(
    connection: AsyncConnection, leases: FakeLeases, caplog: pytest.LogCaptureFixture
) -> None:
    async with await connection.admin.kv_snapshot_lease(buckets=[FIRST]) as lease:
        leases.problem = ZuflussError("nobody home")
    (record,) = [r for r in caplog.records if r.levelno == logging.WARNING]
    assert lease.lease_id in record.message
    assert "left to expire after 1d" in record.message
    with pytest.raises(ZuflussError, match="nobody home"):
        await lease.close()
    leases.problem = None
    await lease.close()
    assert leases.epochs == {}


async def test_a_detached_lease_is_renewed_once_more_and_left(
    connection: AsyncConnection, holder: Holder, leases: FakeLeases
) -> None:
    async with holder.lease as lease:
        await lease.detach()
    assert leases.epochs == {"mine": 1}
    assert leases.renewals == 1
    with pytest.raises(KvSnapshotLeaseNotFoundError, match="it was detached"):
        lease.check()
    admin = connection.admin
    async with await admin.kv_snapshot_lease(lease_id="mine", resume=True) as again:
        assert (again.epoch, again.resumed, again.snapshots) == (2, True, lease.snapshots)


async def test_an_expired_lease_is_resumed_only_as_asked(
    connection: AsyncConnection, leases: FakeLeases
) -> None:
    admin = connection.admin
    with pytest.raises(KvSnapshotLeaseNotFoundError):
        await admin.kv_snapshot_lease(buckets=[FIRST], lease_id="job", resume=True)
    async with await admin.kv_snapshot_lease(
        buckets=[FIRST], lease_id="job", resume=True, if_lost="latest"
    ) as lease:
        assert (lease.resumed, lease.lease_id, lease.epoch) == (False, "job", 1)


@pytest.mark.parametrize("lease_id", [None, "shared"])
async def test_an_acquire_that_is_cancelled_leaves_no_lease_that_nobody_knows(
    connection: AsyncConnection, leases: FakeLeases, lease_id: str | None
) -> None:
    leases.silent = True
    acquired = asyncio.Event()
    leases.on_call = lambda request: acquired.set()
    lease = connection.admin.kv_snapshot_lease(buckets=[FIRST], lease_id=lease_id)
    task = asyncio.ensure_future(lease)
    await acquired.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert [*leases.epochs] == ([] if lease_id is None else ["shared"])


async def test_what_was_left_behind_is_told(
    connection: AsyncConnection, leases: FakeLeases, caplog: pytest.LogCaptureFixture
) -> None:
    leases.silent = True

    def break_down(request: Any) -> None:
        leases.problem = ZuflussError("nobody home")

    leases.on_call = break_down
    lease = AsyncKvSnapshotLease(connection, "fresh", DURATION_MS)
    task = asyncio.ensure_future(lease.acquire([m.PbLeaseTarget(table_id=7)], fresh=True))
    while not leases.asked:
        await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert "lease fresh was not dropped and is left to expire after 1min" in caplog.text


async def test_verify_finds_a_lost_lease_and_tolerates_a_silent_coordinator(
    holder: Holder, leases: FakeLeases
) -> None:
    await holder.lease.verify(FIRST)
    leases.problem = ZuflussError("nobody home")
    await holder.lease.verify(FIRST)
    leases.problem = None
    leases.epochs.clear()
    with pytest.raises(KvSnapshotLeaseNotFoundError):
        await holder.lease.verify(FIRST)


async def test_a_lease_of_nothing_has_nothing_to_renew_and_nothing_to_lose(
    connection: AsyncConnection, leases: FakeLeases
) -> None:
    leases.held, leases.unavailable = {}, {FIRST: 2}
    async with await connection.admin.kv_snapshot_lease(buckets=[FIRST]) as lease:
        await lease.renew()
        await lease.verify()
        assert (lease.epoch, lease.lost) == (None, None)


async def test_the_renewer_ends_with_its_connection(
    connection: AsyncConnection, leases: FakeLeases
) -> None:
    before = asyncio.all_tasks()
    await connection.admin.kv_snapshot_lease(buckets=[FIRST])
    renewers = [task for task in asyncio.all_tasks() - before if "_keep" in repr(task)]
    assert len(renewers) == 1
    await connection.close()
    done, _ = await asyncio.wait(renewers, timeout=WAIT_SECONDS)
    assert done == set(renewers)
