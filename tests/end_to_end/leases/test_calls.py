"""Buckets without snapshots, durations, expiry, drops, releases, and repeated calls."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from tests.end_to_end.leases.local_coordinator import Inside, inside
from tests.end_to_end.leases.stage import (
    DAY_MS,
    HOUR_MS,
    Stage,
    acquire_request,
    rows,
    stage,
    unique,
)
from tests.waiting import eventually
from zufluss.errors import (
    ConfigError,
    KvSnapshotLeaseNotFoundError,
    KvSnapshotNotExistError,
)
from zufluss.model.lease import Unavailable
from zufluss.model.table import TableBucket
from zufluss.wire.api import ApiKey

INT64_MAX = 2**63 - 1
RENEW = ApiKey.RENEW_KV_SNAPSHOT_LEASE
ACQUIRE = ApiKey.ACQUIRE_KV_SNAPSHOT_LEASE
LATEST = ApiKey.ACQUIRE_LATEST_KV_SNAPSHOT_LEASE
LIST = ApiKey.LIST_KV_SNAPSHOT_LEASES
RELEASE = ApiKey.RELEASE_KV_SNAPSHOT_LEASE


@pytest_asyncio.fixture
async def within(tmp_path: Path) -> AsyncIterator[Inside]:
    """A coordinator with a clock that the test sets, and snapshots 0 and 1 of its bucket."""
    async with inside(tmp_path) as it:
        for snapshot_id in (0, 1):
            await it.take(snapshot_id)
        yield it


# -- buckets without a snapshot ------------------------------------------------------------------


def test_a_bucket_without_a_snapshot_is_told_and_read_from_the_beginning(
    tmp_path: Path,
) -> None:
    with stage(tmp_path, {"kv.snapshot.interval": "1h"}) as it:
        table = it.create()
        bucket = TableBucket(table.info.table_id, None, 0)
        with table.upsert() as writer:
            writer.write({"id": [1, 2, 3], "text": ["a", "b", "c"]})
        got = it.calls.latest("none", [bucket])
        assert (got.epoch, got.leased) == (None, {})
        assert got.unavailable == {bucket: Unavailable.NO_SNAPSHOT}
        assert it.calls.acquire("none", {bucket: 0}) == {bucket: Unavailable.NO_SNAPSHOT}
        assert it.calls.leases() == []
        with it.admin.kv_snapshot_lease(table.path) as lease:
            assert lease.unavailable == {bucket: Unavailable.NO_SNAPSHOT}
            lease.check()
            with pytest.raises(KvSnapshotNotExistError, match="read its changelog"):
                table.kv_snapshot(bucket, lease=lease)
            changes = table.changelog(buckets=[bucket.bucket_id]).to_arrow()
            assert changes["_log_offset"].to_pylist() == [0, 1, 2]
            assert changes["text"].to_pylist() == ["a", "b", "c"]


def test_buckets_that_have_snapshots_are_leased_beside_one_without(it: Stage) -> None:
    table, buckets = it.filled(1, buckets=2)
    empty = it.create()
    nothing = TableBucket(empty.info.table_id, None, 0)
    with it.admin.kv_snapshot_lease([table.path, empty.path]) as lease:
        assert set(lease.snapshots) == set(buckets)
        assert lease.unavailable == {nothing: Unavailable.NO_SNAPSHOT}


# -- durations -----------------------------------------------------------------------------------


async def test_a_renewal_lasts_exactly_its_duration_from_now_on(within: Inside) -> None:
    await within.leases.acquire_latest("a", HOUR_MS, [within.bucket], principal=None)
    for away_seconds, duration_ms in ((600, HOUR_MS), (3599, 60_000), (59.5, DAY_MS), (0, 1)):
        within.time.now += away_seconds
        answer = await within.ask(RENEW, lease_id="a", lease_duration_ms=duration_ms)
        assert answer.remaining_ms == duration_ms
        (lease,) = (await within.ask(LIST, lease_id="a")).leases
        assert (lease.remaining_ms, lease.duration_ms) == (duration_ms, duration_ms)
    await within.ask(ACQUIRE, lease_id="a", lease_duration_ms=HOUR_MS)  # Fluss's renewal
    within.time.now += HOUR_MS / 1000 - 0.001
    assert [each.remaining_ms for each in within.leases.book.infos("a")] == [1]
    within.time.now += 0.001
    assert within.leases.book.infos("a") == []


@pytest.mark.parametrize("duration_ms", [0, -1, -INT64_MAX - 1, 7 * DAY_MS + 1, INT64_MAX])
def test_a_duration_of_nothing_or_too_much_is_refused(it: Stage, duration_ms: int) -> None:
    _, (bucket,) = it.filled(1)
    lease_id, other = unique("lease"), unique("other")
    it.calls.latest(lease_id, [bucket], DAY_MS)
    before = it.calls.lease(lease_id)
    assert before is not None
    for refused in (
        lambda: it.calls.renew(lease_id, duration_ms),
        lambda: it.calls.acquire(lease_id, {}, duration_ms),
        lambda: it.calls.acquire(other, {bucket: 0}, duration_ms),
        lambda: it.calls.latest(other, [bucket], duration_ms),
    ):
        with pytest.raises(ConfigError, match="duration"):
            refused()
    after = it.calls.lease(lease_id)
    assert after is not None
    assert (after.duration_ms, after.epoch) == (DAY_MS, before.epoch)
    assert 0 < after.remaining_ms <= before.remaining_ms
    assert it.calls.lease(other) is None


# -- leases that are over ------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["expired", "dropped", "released", "never made"])
def test_a_lease_that_is_over_is_not_renewed_and_not_made_again(it: Stage, how: str) -> None:
    _, (bucket,) = it.filled(1)
    lease_id = unique("lease")
    epoch = None
    if how != "never made":
        epoch = it.calls.latest(lease_id, [bucket], 1 if how == "expired" else HOUR_MS).epoch
    if how == "expired":
        eventually(lambda: it.calls.lease(lease_id) is None, "it is over")
    if how == "dropped":
        it.calls.drop(lease_id)
    if how == "released":
        it.calls.release(lease_id, [bucket])
    for renewal in (
        lambda: it.calls.renew(lease_id),
        lambda: it.calls.renew(lease_id, epoch=epoch or 1),
        lambda: it.calls.acquire(lease_id, {}),  # how Fluss's clients renew
        lambda: it.calls.latest(lease_id),
        lambda: it.calls.latest(lease_id, [bucket], epoch=epoch or 1),
    ):
        with pytest.raises(KvSnapshotLeaseNotFoundError):
            renewal()
        assert it.calls.lease(lease_id) is None


# -- the moment of expiry ------------------------------------------------------------------------


@pytest.mark.parametrize("call", ["renew", "acquire", "take over", "release", "drop", "timer"])
async def test_a_lease_past_its_time_is_gone_for_a_call_and_its_snapshot_only_after_it(
    within: Inside, call: str
) -> None:
    freed: list[TableBucket] = []
    within.cluster.coordinator.freed.subscribe(freed.extend)
    made = await within.take(2)
    got = await within.leases.acquire_latest("a", HOUR_MS, [within.bucket], principal=None)
    assert got.leased[within.bucket].snapshot_id == 2
    within.time.now += HOUR_MS / 1000
    for snapshot_id in (3, 4, 5):
        await within.take(snapshot_id)
    await within.settled()
    assert within.leases.book.infos() == []
    assert within.kept() == [2, 4, 5], "nobody has decided yet"
    assert within.are_there([made])
    assert freed == []
    if call == "timer":
        await within.timer.expire()
    elif call in ("release", "drop"):
        await _end(within, call)
    else:
        with pytest.raises(KvSnapshotLeaseNotFoundError):
            await _go_on(within, call)
    await within.timer.expire()
    await _end(within, "release")
    await within.settled()
    assert freed == [within.bucket], "once, whoever comes first"
    assert within.kept() == [4, 5]
    assert not within.are_there([made])
    assert await within.cluster.store.tree("/leases") == []


async def _go_on(within: Inside, call: str) -> None:
    """Use the lease as if it still existed."""
    timed: dict[str, Any] = {"lease_id": "a", "lease_duration_ms": HOUR_MS}
    if call == "renew":
        await within.ask(RENEW, **timed)
    elif call == "acquire":
        await within.ask(ACQUIRE, **timed)
    else:
        await within.ask(LATEST, **timed)


async def _end(within: Inside, call: str) -> None:
    """End the lease, or the rest of it."""
    if call == "drop":
        await within.leases.drop("a", principal=None)
    else:
        await within.leases.release("a", [within.bucket], principal=None)


async def test_calls_and_timer_at_the_same_moment_end_a_lease_once(within: Inside) -> None:
    freed: list[TableBucket] = []
    within.cluster.coordinator.freed.subscribe(freed.extend)
    await within.leases.acquire_latest("a", HOUR_MS, [within.bucket], principal=None)
    within.time.now += HOUR_MS / 1000
    ends = [_end(within, "release"), _end(within, "drop"), within.timer.expire()]
    renewals = [_go_on(within, "renew"), _go_on(within, "take over")]
    answers = await asyncio.gather(*ends, *renewals, within.timer.expire(), return_exceptions=True)
    kinds = [type(answer) for answer in answers]
    gone = KvSnapshotLeaseNotFoundError
    assert kinds == [*[type(None)] * 3, gone, gone, type(None)]
    assert freed == [within.bucket]


async def test_the_same_id_makes_a_new_lease_once_the_old_one_is_over(within: Inside) -> None:
    await within.leases.acquire("a", HOUR_MS, {within.bucket: 1}, principal="anna")
    for snapshot_id in (2, 3):
        await within.take(snapshot_id)
    within.time.now += HOUR_MS / 1000
    got = await within.leases.acquire_latest("a", HOUR_MS, [within.bucket], principal="bert")
    assert got.leased[within.bucket].snapshot_id == 3
    (lease,) = within.leases.book.infos("a")
    assert lease.owner == "bert"
    await within.settled()
    assert within.kept() == [2, 3]


# -- drops and releases --------------------------------------------------------------------------


def test_a_drop_frees_all_buckets_of_all_tables_and_again_is_no_failure(it: Stage) -> None:
    tables = [it.filled(1, buckets=2) for _ in range(2)]
    buckets = [bucket for _, some in tables for bucket in some]
    lease_id = unique("lease")
    assert set(it.calls.latest(lease_id, buckets).leased) == set(buckets)
    for table, _ in tables:
        for number in range(1, 4):
            it.take(table, range(16), f"snapshot {number}")
    for table, some in tables:
        assert [it.kept(table, bucket.bucket_id) for bucket in some] == [[0, 2, 3]] * 2
    it.calls.drop(lease_id)
    assert it.calls.lease(lease_id) is None
    for table, some in tables:
        for bucket in some:
            it.until_kept(table, [2, 3], bucket.bucket_id)
    for _ in range(2):
        it.calls.drop(lease_id)
        it.calls.release(lease_id, buckets)
    assert it.calls.lease(lease_id) is None


def test_a_repeated_release_is_no_failure_and_frees_nothing_else(it: Stage) -> None:
    table, buckets = it.filled(1, buckets=2)
    lease_id = unique("lease")
    it.calls.latest(lease_id, buckets)
    for number in range(1, 4):
        it.take(table, range(16), f"snapshot {number}")
    for _ in range(3):
        it.calls.release(lease_id, buckets[:1])
        assert it.calls.leased(lease_id) == {buckets[1]: 0}
    it.until_kept(table, [2, 3], 0)
    assert it.kept(table, 1) == [0, 2, 3]


# -- repeated acquires ---------------------------------------------------------------------------


def test_an_acquire_whose_answer_was_lost_gets_the_same_again_and_counts_once(
    it: Stage,
) -> None:
    table, (bucket, missing) = it.filled(1, buckets=2)
    lease_id = unique("lease")
    snapshots = {bucket: 0, missing: 9}
    with it.caller() as lost:
        lost.raw.begin(ApiKey.ACQUIRE_KV_SNAPSHOT_LEASE, acquire_request(lease_id, snapshots))
        eventually(lambda: it.calls.lease(lease_id) is not None, "it is done, nobody was told")
    first = it.calls.lease(lease_id)
    assert first is not None
    for _ in range(2):
        assert it.calls.acquire(lease_id, snapshots) == {missing: Unavailable.GONE}
        again = it.calls.lease(lease_id)
        assert again is not None
        assert (again.epoch, again.tables, again.snapshots) == (
            first.epoch,
            first.tables,
            first.snapshots,
        )
    for number in range(1, 4):
        it.take(table, range(16), f"snapshot {number}")
    assert it.kept(table) == [0, 2, 3]
    assert rows(table, bucket, 0)
    it.calls.release(lease_id, [bucket])
    it.until_kept(table, [2, 3])


def test_the_latest_acquired_twice_is_the_same_and_counts_once(it: Stage) -> None:
    table, (bucket,) = it.filled(1)
    lease_id = unique("lease")
    answers = [it.calls.latest(lease_id, [bucket]) for _ in range(3)]
    assert [answer.leased for answer in answers] == [answers[0].leased] * 3
    epochs = [answer.epoch or 0 for answer in answers]
    assert epochs == sorted(set(epochs)), "each without an epoch takes it over"
    assert it.calls.latest(lease_id, [bucket], epoch=epochs[-1]).epoch == epochs[-1]
    for number in range(1, 4):
        it.take(table, range(8), f"snapshot {number}")
    assert it.kept(table) == [0, 2, 3]
    it.calls.release(lease_id, [bucket], epoch=epochs[-1])
    it.until_kept(table, [2, 3])


# -- releases of buckets that are not leased -----------------------------------------------------


def test_releasing_what_a_lease_does_not_have_changes_nothing(it: Stage) -> None:
    table, (held, never) = it.filled(1, buckets=2)
    _, (elsewhere,) = it.filled(1)
    lease_id, other = unique("lease"), unique("other")
    it.calls.latest(lease_id, [held])
    it.calls.latest(other, [never, elsewhere])
    before = it.calls.lease(lease_id)
    assert before is not None
    table_id = table.info.table_id
    for released in (
        never,
        elsewhere,
        TableBucket(table_id, None, 99),
        TableBucket(table_id, None, -1),
        TableBucket(table_id, None, 2**31 - 1),
        TableBucket(table_id, 7, 0),
        TableBucket(2**62, None, 0),
    ):
        it.calls.release(lease_id, [released])
        after = it.calls.lease(lease_id)
        assert after is not None
        assert (after.epoch, after.tables, after.snapshots) == (
            before.epoch,
            before.tables,
            before.snapshots,
        )
    assert set(it.calls.leased(other)) == {never, elsewhere}
    for number in range(1, 4):
        it.take(table, range(16), f"snapshot {number}")
    assert [it.kept(table, i) for i in (0, 1)] == [[0, 2, 3]] * 2
    it.calls.release(lease_id, [TableBucket(table_id, None, 99), held])
    it.until_kept(table, [2, 3], 0)
    assert it.kept(table, 1) == [0, 2, 3]
