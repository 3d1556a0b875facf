"""Very large leases, very many leases, and leases of dropped tables and partitions."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from tests.coordinator.lease_world import LeaseWorld
from tests.coordinator.remotes import BY_DAY, snapshot
from tests.coordinator.support import DAY_MS
from tests.counts import rounds
from tests.end_to_end.leases.local_coordinator import Inside, inside
from tests.end_to_end.leases.stage import HOUR_MS, KEYED, Stage, exist, rows, stage, unique
from tests.waiting import eventually
from zufluss.coordinator.leases.records import decode_table, encode_table, expiry_path, head_path
from zufluss.coordinator.leases.rules import LeasedTable, SnapshotPin
from zufluss.errors import KvSnapshotNotExistError, KvSnapshotRevokedError
from zufluss.meta.api import Op
from zufluss.model.schema import Schema
from zufluss.model.table import TableBucket, TableDescriptor
from zufluss.wire.api import ApiKey

BUCKETS = 100_000
RECORD_BYTES_MAX = 1_000_000
REVOKE = {"zufluss.kv.snapshot.lease.on-drop": "revoke"}
DAY_SECONDS = 86_400.0


# -- very large leases ---------------------------------------------------------------------------


@pytest.mark.parametrize("partitions", [1, 50])
def test_the_record_of_a_hundred_thousand_buckets_is_small(partitions: int) -> None:
    """Snapshot ids are as different as those of one table can be."""
    rng = random.Random(24)
    each = BUCKETS // partitions
    owners = [None] if partitions == 1 else [1_000_000 + 7 * i for i in range(partitions)]
    pins = {
        TableBucket(9, owner, bucket_id): SnapshotPin(rng.randrange(100_000), rng.randrange(1, 4))
        for owner in owners
        for bucket_id in range(each)
    }
    value = encode_table(LeasedTable(pins))
    assert len(pins) == BUCKETS
    assert len(value) < RECORD_BYTES_MAX
    assert decode_table(9, value).pins == pins


async def test_a_lease_of_very_many_buckets_is_made_at_once_and_renewed_by_a_few_bytes(
    tmp_path: Path,
) -> None:
    world = await LeaseWorld.start(tmp_path, buckets=rounds(5_000, BUCKETS))
    await world.take(world.buckets, 3)
    got = await world.leases.acquire_latest("a", HOUR_MS, world.buckets, principal=None)
    assert len(got.leased) == len(world.buckets)
    stored = await world.stored()
    assert sum(map(len, stored.values())) < RECORD_BYTES_MAX
    written: list[Op] = []
    transact = world.store.transact

    async def seen(ops: Sequence[Op]) -> None:
        written.extend(ops)
        await transact(ops)

    world.store.transact = seen  # type: ignore[method-assign]
    await world.leases.renew("a", HOUR_MS // 2, principal=None)
    check, put = written  # nothing but that the coordinator is the present one, and the time
    assert put.path == expiry_path("a")
    assert len((await world.stored())[put.path]) < 32
    assert check.path != put.path
    await world.close()


# -- very many leases ----------------------------------------------------------------------------


async def test_an_acquire_waits_for_no_renewal_but_those_being_written(tmp_path: Path) -> None:
    """However many renewals wait: at most two transactions precede that of the acquire."""
    world = await LeaseWorld.start(tmp_path)
    await world.take(world.buckets, 0)
    ids = [f"l{i}" for i in range(rounds(2_000, 10_000))]
    for at in range(0, len(ids), 500):
        made = (
            world.leases.acquire_latest(i, HOUR_MS, world.buckets[:1], principal=None)
            for i in ids[at : at + 500]
        )
        await asyncio.gather(*made)
    transact, writing, go_on = world.store.transact, asyncio.Event(), asyncio.Event()
    groups: list[set[str]] = []

    async def slow(ops: Sequence[Op]) -> None:
        groups.append({op.path for op in ops})
        writing.set()
        await go_on.wait()
        await transact(ops)

    world.store.transact = slow  # type: ignore[method-assign]
    renewals = [asyncio.ensure_future(world.leases.renew(i, HOUR_MS, principal=None)) for i in ids]
    await writing.wait()
    bucket = world.buckets[1]
    acquiring = asyncio.ensure_future(
        world.leases.acquire_latest("other", HOUR_MS, [bucket], principal=None)
    )
    while not world.leases.book.pins.pinned(bucket, 0):  # it gets that far beside a write under way
        await asyncio.sleep(0)
    assert len(groups) == 1
    go_on.set()
    assert (await acquiring).leased
    assert any(head_path("other") in group for group in groups[1:3])
    assert sum(renewal.done() for renewal in renewals) < len(renewals)
    await asyncio.gather(*renewals)
    await world.close()


# -- dropped tables ------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def revoking(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stage]:
    """A server whose drops revoke leases at once."""
    with stage(tmp_path_factory.mktemp("revoking"), REVOKE) as it:
        yield it


@pytest.mark.parametrize("ended", ["released", "expired"])
def test_files_of_a_dropped_table_stay_for_its_readers_until_the_lease_ends(
    it: Stage, ended: str
) -> None:
    table, (bucket,) = it.filled(2)
    lease_id = unique("lease")
    held = it.calls.latest(lease_id, [bucket]).leased[bucket].snapshot_id
    files = it.files(bucket, held)
    it.admin.drop_table(table.path)
    assert rows(table, bucket, held) == dict.fromkeys(range(8), "snapshot 1")
    assert exist(files) == files
    if ended == "released":
        it.calls.release(lease_id, [bucket])
    else:
        it.calls.renew(lease_id, 1)
    eventually(lambda: not exist(files), "the files of a dropped table go")
    with pytest.raises(KvSnapshotNotExistError):
        it.files(bucket, held)


def test_with_revoke_the_reader_of_a_dropped_table_is_told_so(revoking: Stage) -> None:
    it = revoking
    table, (bucket,) = it.filled()
    other, (kept,) = it.filled()
    with (
        it.admin.kv_snapshot_lease([table.path, other.path]) as lease,
        table.kv_snapshot(bucket, lease=lease) as reader,
    ):
        files = it.files(bucket, lease.snapshots[bucket].snapshot_id)
        it.admin.drop_table(table.path)
        eventually(lambda: not exist(files), "the files of a dropped table go")
        lease.renew()
        told = f"{table.path} was dropped"
        for call in (
            lambda: next(reader),
            lambda: table.kv_snapshot(bucket, lease=lease),
            lambda: it.files(bucket, lease.snapshots[bucket].snapshot_id),
        ):
            with pytest.raises(KvSnapshotRevokedError, match=told):
                call()
        assert [(each.table_id, each.what) for each in lease.revoked] == [
            (bucket.table_id, str(table.path))
        ]
        held = lease.snapshots[kept].snapshot_id
        assert rows(other, kept, held) == dict.fromkeys(range(8), "snapshot 0")


def test_a_reader_that_did_not_hear_of_it_learns_it_from_the_missing_file(
    revoking: Stage,
) -> None:
    it = revoking
    table, (bucket,) = it.filled()
    with it.admin.kv_snapshot_lease(table.path) as lease:
        files = it.files(bucket, lease.snapshots[bucket].snapshot_id)
        it.admin.drop_table(table.path)
        eventually(lambda: not exist(files), "the files of a dropped table go")
        lease.check()  # it was not renewed yet
        with pytest.raises(KvSnapshotRevokedError, match=f"{table.path} was dropped"):
            table.kv_snapshot(bucket, lease=lease)


# -- expired and dropped partitions --------------------------------------------------------------


@asynccontextmanager
async def of_yesterday(directory: Path) -> AsyncIterator[tuple[Inside, TableBucket]]:
    """A leased partition that expires, of a table that keeps one day."""
    properties = {
        "table.auto-partition.enabled": "true",
        "table.auto-partition.key": "d",
        "table.auto-partition.time-unit": "DAY",
        "table.auto-partition.time-zone": "UTC",
        "table.auto-partition.num-precreate": "0",
        "table.auto-partition.num-retention": "1",
    }
    schema = Schema.of("k INT, d STRING, v STRING", ("k", "d"))
    table = TableDescriptor(schema, bucket_count=1, partition_keys=("d",), properties=properties)
    async with inside(directory) as it:
        await it.cluster.catalog.create_table(BY_DAY, table.to_json())
        entry = await it.cluster.catalog.create_partition(BY_DAY, {"d": "20240601"})
        bucket = TableBucket(entry.table_id, entry.partition_id, 0)
        await it.take(0, bucket=bucket)
        await it.leases.acquire_latest("a", 7 * DAY_MS, [bucket], principal=None)
        it.cluster.clock.now_ms += 2 * DAY_MS
        await it.cluster.coordinator.partitions.check()
        yield it, bucket


async def ask_metadata(it: Inside, bucket: TableBucket) -> list[Path]:
    answer = await it.ask(
        ApiKey.GET_KV_SNAPSHOT_METADATA,
        table_id=bucket.table_id,
        partition_id=bucket.partition_id,
        bucket_id=0,
        snapshot_id=0,
    )
    return [Path(f.remote_path.removeprefix("file://")) for f in answer.snapshot_files]


async def test_an_expired_partition_stays_until_its_reader_lets_go(tmp_path: Path) -> None:
    async with of_yesterday(tmp_path) as (it, bucket):
        files = await ask_metadata(it, bucket)
        assert exist(files) == set(files)
        assert bucket in it.cluster.tablet.buckets  # also written and read as ever
        made, data = await snapshot(it.cluster, bucket, 1)
        await it.cluster.coordinator.remote.commit_snapshot(data, 0)
        assert it.are_there([made])
        gone = asyncio.Event()
        it.cluster.coordinator.changes.subscribe(lambda changes: gone.set())
        await it.ask(ApiKey.DROP_KV_SNAPSHOT_LEASE, lease_id="a")
        await gone.wait()
        await it.cluster.coordinator.remote.cleaner.drops.settle()
        assert it.cluster.image.partitions(bucket.table_id) == {}
        assert not exist(files)


async def test_after_the_longest_hold_the_reader_is_told_which_partition_ended(
    tmp_path: Path,
) -> None:
    async with of_yesterday(tmp_path) as (it, bucket):
        files = await ask_metadata(it, bucket)
        for seconds, there in ((DAY_SECONDS - 1, True), (1.0, False)):
            it.time.now += seconds
            await it.cluster.coordinator.partitions.check()
            await it.cluster.coordinator.remote.cleaner.drops.settle()
            assert (exist(files) == set(files)) is there
        with pytest.raises(KvSnapshotRevokedError, match=r"by_day\(p=20240601\) was dropped"):
            await ask_metadata(it, bucket)
        renewed = await it.ask(
            ApiKey.RENEW_KV_SNAPSHOT_LEASE, lease_id="a", lease_duration_ms=HOUR_MS
        )
        assert [(each.partition_id, each.what) for each in renewed.revoked] == [
            (bucket.partition_id, "fluss.by_day(p=20240601)")
        ]


def test_a_partition_that_is_dropped_while_it_is_read_stays_readable(it: Stage) -> None:
    table = it.create(
        "id INT NOT NULL, day STRING NOT NULL, text STRING, PRIMARY KEY (id, day)",
        partition_keys=["day"],
    )
    with table.upsert() as writer:
        writer.write({"id": [1, 2], "day": ["a", "b"], "text": ["x", "y"]})
    days = {found.name: found.partition_id for found in it.admin.list_partitions(table.path)}
    for day in days:
        eventually(lambda day=day: bool(it.admin.latest_kv_snapshots(table.path, day)))  # type: ignore[misc]
    bucket = TableBucket(table.info.table_id, days["a"], 0)
    with it.admin.kv_snapshot_lease(table.path, partition={"day": "a"}) as lease:
        held = lease.snapshots[bucket].snapshot_id
        files = it.files(bucket, held)
        it.admin.drop_partition(table.path, {"day": "a"})
        assert rows(table, bucket, held) == {1: "x"}
    eventually(lambda: not exist(files), "the files of a dropped partition go")


# -- tables of the same name ---------------------------------------------------------------------


def test_a_table_of_the_same_name_is_not_held_by_the_lease_of_the_old_one(it: Stage) -> None:
    table, (old,) = it.filled()
    lease_id = unique("lease")
    held = it.calls.latest(lease_id, [old]).leased[old].snapshot_id
    files = it.files(old, held)
    it.admin.drop_table(table.path)
    it.admin.create_table(table.path, KEYED, bucket_count=1)
    again = it.conn.table(table.path)
    new = TableBucket(again.info.table_id, None, 0)
    assert new.table_id != old.table_id
    for number in range(3):
        it.take(again, range(4), f"new {number}")
    it.until_kept(again, [1, 2])  # the lease has nothing of it, its snapshot 0 is gone
    assert rows(table, old, held) == dict.fromkeys(range(8), "snapshot 0")
    both = it.calls.latest(lease_id, [new])
    assert {b: s.snapshot_id for b, s in both.leased.items()} == {new: 2}
    assert it.calls.leased(lease_id) == {old: held, new: 2}
    it.calls.release(lease_id, [old])
    eventually(lambda: not exist(files), "the files of the old table go")
    for number in range(3, 5):
        it.take(again, range(4), f"new {number}")
    it.until_kept(again, [2, 3, 4])
    assert rows(again, new, 2) == dict.fromkeys(range(4), "new 2")
    it.calls.drop(lease_id)
