"""What the list of leases, the command line and the metrics show."""

from __future__ import annotations

import random
from collections.abc import Iterator

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.counts import rounds
from tests.end_to_end.leases.stage import HOUR_MS, Stage, stage, unique
from tests.end_to_end.locations.inspection import scrape
from tests.servers import free_port
from zufluss.errors import KvSnapshotLeaseNotFoundError
from zufluss.model.table import TableBucket
from zufluss.obs import metrics

IDS = ("a", "b", "c")


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stage]:
    """A server whose leases are all made by these tests."""
    port = {"zufluss.metrics.port": str(free_port())}
    with stage(tmp_path_factory.mktemp("alone"), port) as it:
        yield it


def size_of(it: Stage, bucket: TableBucket, snapshot_id: int) -> int:
    return sum(path.stat().st_size for path in it.objects(bucket, snapshot_id))


def test_a_lease_is_shown_with_owner_tables_buckets_bytes_and_time(alone: Stage) -> None:
    it = alone
    (one, first), (two, second) = it.filled(buckets=2), it.filled()
    lease_id = unique("shown")
    with it.caller("anna") as anna:
        lease = anna.latest(lease_id, [*first, *second])
        shown = anna.lease(lease_id)
        summary = next(each for each in it.calls.leases() if each.lease_id == lease_id)
        assert shown is not None
        assert (shown.owner, shown.epoch, shown.duration_ms) == ("anna", lease.epoch, HOUR_MS)
        assert 0 < shown.remaining_ms <= HOUR_MS
        assert 0 <= shown.age_ms < HOUR_MS
        assert shown.snapshots == lease.leased
        sizes = {
            bucket.table_id: sum(size_of(it, b, lease.leased[b].snapshot_id) for b in buckets)
            for bucket, buckets in ((first[0], first), (second[0], second))
        }
        assert {(t.table_id, t.table, t.snapshots, t.bytes) for t in shown.tables} == {
            (one.info.table_id, str(one.path), 2, sizes[one.info.table_id]),
            (two.info.table_id, str(two.path), 1, sizes[two.info.table_id]),
        }
        assert (summary.owner, summary.tables, summary.snapshots) == ("anna", shown.tables, {})
        anna.drop(lease_id)
        assert it.calls.lease(lease_id) is None


@pytest.fixture(scope="module")
def buckets(alone: Stage) -> list[TableBucket]:
    """Buckets of two tables, each with two snapshots."""
    (_, first), (_, second) = alone.filled(2, buckets=2), alone.filled(2)
    return [*first, *second]


@settings(max_examples=rounds(15, 200))
@given(seed=st.integers(0, 1 << 32), count=st.integers(1, 20))
def test_list_and_metrics_agree_with_what_was_done(
    alone: Stage, buckets: list[TableBucket], seed: int, count: int
) -> None:
    rng, calls = random.Random(seed), alone.calls
    model: dict[str, dict[TableBucket, int]] = {}
    for lease_id in IDS:
        calls.drop(lease_id)
    for _ in range(count):
        do_something(alone, buckets, model, rng)
    assert {i: found for i in IDS if (found := calls.leased(i))} == model
    listed = {each.lease_id: each for each in calls.leases()}
    assert listed.keys() == model.keys()
    pins = {pin for held in model.values() for pin in held.items()}
    sizes = {(bucket, number): size_of(alone, bucket, number) for bucket, number in pins}
    for lease_id, held in model.items():
        tables = listed[lease_id].tables
        assert sum(t.snapshots for t in tables) == len(held)
        assert sum(t.bytes for t in tables) == sum(sizes[pin] for pin in held.items())
    shown = scrape(alone.server)
    assert shown[metrics.KV_SNAPSHOT_LEASES.name] == len(model)
    assert shown[metrics.KV_SNAPSHOT_LEASED_SNAPSHOTS.name] == len(pins)
    assert shown[metrics.KV_SNAPSHOT_LEASED_BYTES.name] == sum(sizes.values())
    assert (shown[metrics.KV_SNAPSHOT_LEASE_OLDEST_AGE_SECONDS.name] == 0) <= (not model)
    assert shown[metrics.KV_SNAPSHOT_LEASES_DAMAGED.name] == 0


def do_something(
    it: Stage,
    buckets: list[TableBucket],
    model: dict[str, dict[TableBucket, int]],
    rng: random.Random,
) -> None:
    """Make a random call, and apply its effect to the model; snapshots 0 and 1 are kept."""
    lease_id, some = rng.choice(IDS), rng.sample(buckets, rng.randint(1, len(buckets)))
    what = rng.choice(("latest", "by number", "renew", "release", "drop"))
    if what == "latest":
        it.calls.latest(lease_id, some)
        model.setdefault(lease_id, {}).update(dict.fromkeys(some, 1))
    elif what == "by number":
        snapshots = {bucket: rng.randint(0, 2) for bucket in some}
        missing = it.calls.acquire(lease_id, snapshots)
        there = {bucket: number for bucket, number in snapshots.items() if number < 2}
        assert missing.keys() == snapshots.keys() - there.keys()
        if there or lease_id in model:
            model.setdefault(lease_id, {}).update(there)
    elif what == "renew" and lease_id not in model:
        with pytest.raises(KvSnapshotLeaseNotFoundError):
            it.calls.renew(lease_id)
    elif what == "renew":
        it.calls.renew(lease_id)
    elif what == "release":
        it.calls.release(lease_id, some)
        held = model.get(lease_id, {})
        for bucket in some:
            held.pop(bucket, None)
        if not held:
            model.pop(lease_id, None)
    else:
        it.calls.drop(lease_id)
        model.pop(lease_id, None)
