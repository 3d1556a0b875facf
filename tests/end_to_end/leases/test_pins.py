"""A leased snapshot stays, with all its files, and is removed after its release."""

from __future__ import annotations

import asyncio
import random
import threading
from pathlib import Path

import pytest

import zufluss
from tests.coordinator.remotes import snapshot
from tests.counts import rounds
from tests.end_to_end.leases.local_coordinator import Inside, inside
from tests.end_to_end.leases.stage import HOUR_MS, Caller, Stage, exist, rows, stage, unique
from tests.waiting import eventually
from zufluss.client.sync.table import Table
from zufluss.errors import KvSnapshotNotExistError
from zufluss.model.lease import Unavailable
from zufluss.model.table import TableBucket

STILL = range(4)
"""Keys whose files no compaction touches: they are written once, each range above the others."""
BUSY = range(100, 110)
"""Keys that are written again and again, so that their files are compacted away."""
LEASED = 5
NEWEST = 15


class Leased:
    """A lease of snapshot 5, and the tables (SST files) of this and of ten newer snapshots."""

    def __init__(self, it: Stage) -> None:
        self.it = it
        self.table = it.create()
        self.bucket = TableBucket(self.table.info.table_id, None, 0)
        self.lease_id = unique("lease")
        self.sst: dict[int, set[Path]] = {}
        for number in STILL:
            self.take(range(number * 5, number * 5 + 5))
        while max(self.sst) < LEASED:
            self.take(BUSY)
        self.files = it.files(self.bucket, LEASED)
        self.metadata = next(
            p.parent / "_METADATA" for p in self.files if p.parent.name == f"snap-{LEASED}"
        )
        self.rows = rows(self.table, self.bucket, LEASED)
        assert it.calls.acquire(self.lease_id, {self.bucket: LEASED}) == {}
        while max(self.sst) < NEWEST:
            self.take(BUSY)

    def take(self, ids: range) -> None:
        found = self.it.take(self.table, ids, f"before {len(self.sst)}")
        self.sst[found.snapshot_id] = self.it.tables_of(self.bucket, found.snapshot_id)

    def release(self) -> None:
        self.it.calls.release(self.lease_id, [self.bucket])


@pytest.fixture
def leased(it: Stage) -> Leased:
    return Leased(it)


def test_a_leased_snapshot_is_readable_with_every_file_after_ten_newer_ones(
    it: Stage, leased: Leased
) -> None:
    assert it.kept(leased.table) == [LEASED, NEWEST - 1, NEWEST]
    assert it.files(leased.bucket, LEASED) == leased.files
    assert exist(leased.files) == leased.files
    assert leased.metadata.is_file()
    assert leased.sst[LEASED] - leased.sst[NEWEST], "it has files that nothing else would keep"
    assert rows(leased.table, leased.bucket, LEASED) == leased.rows
    assert rows(leased.table, leased.bucket, NEWEST) != leased.rows
    with pytest.raises(KvSnapshotNotExistError):
        it.files(leased.bucket, LEASED + 1)


def test_a_released_snapshot_goes_with_its_files_without_another_snapshot(
    it: Stage, leased: Leased
) -> None:
    kept = it.files(leased.bucket, NEWEST - 1) | it.files(leased.bucket, NEWEST)
    alone = leased.files - kept
    assert alone & leased.sst[LEASED]
    assert exist(alone) == alone
    leased.release()
    it.until_kept(leased.table, [NEWEST - 1, NEWEST])
    eventually(lambda: not exist([*alone, leased.metadata]), "its files are deleted")
    assert exist(kept) == kept
    assert it.kept(leased.table) == [NEWEST - 1, NEWEST], "nothing newer made it go"
    with pytest.raises(KvSnapshotNotExistError):
        it.files(leased.bucket, LEASED)


def test_shared_files_survive_the_release_and_those_between_go_before_it(
    it: Stage, leased: Leased
) -> None:
    sst, newest = leased.sst, leased.sst[NEWEST - 1] | leased.sst[NEWEST]
    between = set().union(*(sst[i] for i in range(LEASED + 1, NEWEST - 1))) - sst[LEASED] - newest
    shared = sst[LEASED] & sst[NEWEST]
    assert between
    assert shared
    eventually(lambda: not exist(between), "files of those between are deleted")
    assert exist(sst[LEASED]) == sst[LEASED]
    leased.release()
    eventually(lambda: not exist(sst[LEASED] - newest), "its own files are deleted")
    assert exist(shared) == shared
    assert set(rows(leased.table, leased.bucket, NEWEST)) >= set(range(len(STILL) * 5))


# -- several leases and snapshots ----------------------------------------------------------------


def test_a_snapshot_of_two_leases_goes_when_both_have_released_it(it: Stage) -> None:
    table, (bucket,) = it.filled(1)
    one, other = unique("one"), unique("other")
    for lease_id in (one, other):
        assert it.calls.acquire(lease_id, {bucket: 0}) == {}
    for number in range(1, 4):
        it.take(table, range(8), f"snapshot {number}")
    assert it.kept(table) == [0, 2, 3]
    it.calls.release(one, [bucket])
    assert it.calls.lease(one) is None
    it.take(table, range(8), "snapshot 4")  # a commit that would drop it
    assert it.kept(table) == [0, 3, 4]
    assert rows(table, bucket, 0) == dict.fromkeys(range(8), "snapshot 0")
    it.calls.release(other, [bucket])
    it.until_kept(table, [3, 4])


def test_a_newer_snapshot_of_the_bucket_takes_the_place_of_the_one_before(it: Stage) -> None:
    table, (bucket,) = it.filled(1)
    lease_id = unique("lease")
    it.calls.acquire(lease_id, {bucket: 0})
    for number in range(1, 4):
        it.take(table, range(8), f"snapshot {number}")
    assert it.kept(table) == [0, 2, 3]
    it.calls.acquire(lease_id, {bucket: 2})
    it.until_kept(table, [2, 3])
    for number in range(4, 6):
        it.take(table, range(8), f"snapshot {number}")
    assert it.kept(table) == [2, 4, 5]
    lease = it.calls.lease(lease_id)
    assert lease is not None
    assert it.calls.leased(lease_id) == {bucket: 2}
    assert [each.snapshots for each in lease.tables] == [1]
    it.calls.release(lease_id, [bucket])
    it.until_kept(table, [4, 5])


# -- snapshots that cannot be leased -------------------------------------------------------------


def test_what_cannot_be_had_is_told_with_its_reason_and_the_rest_is_leased(it: Stage) -> None:
    table, (first, second, third) = it.filled(3, buckets=3)
    lease_id = unique("lease")
    nowhere = TableBucket(table.info.table_id, None, 3)
    snapshots = {first: 0, second: 99, third: 2, nowhere: 0}
    assert it.kept(table) == [1, 2], "snapshot 0 is deleted already"
    assert it.calls.acquire(lease_id, snapshots) == {
        first: Unavailable.GONE,
        second: Unavailable.GONE,
        nowhere: Unavailable.NO_BUCKET,
    }
    assert it.calls.leased(lease_id) == {third: 2}
    for number in range(3, 6):
        it.take(table, range(24), f"snapshot {number}")
    assert it.kept(table, third.bucket_id) == [2, 4, 5]
    assert it.kept(table, second.bucket_id) == [4, 5]


def test_an_acquire_that_gets_nothing_leaves_no_lease(it: Stage) -> None:
    _, (bucket,) = it.filled(1)
    lease_id = unique("lease")
    assert it.calls.acquire(lease_id, {bucket: 7}) == {bucket: Unavailable.GONE}
    assert it.calls.lease(lease_id) is None


# -- races with retention ------------------------------------------------------------------------


def test_the_latest_snapshot_is_readable_however_fast_it_is_replaced(tmp_path: Path) -> None:
    least, replaced_least = rounds(100, 10_000), rounds(15, 1_000)
    conf = {"kv.snapshot.interval": "1ms", "kv.snapshot.num-retained": "1"}
    with stage(tmp_path, conf) as it:
        table, (bucket,) = it.filled(1)
        done = threading.Event()
        writing = threading.Thread(target=_write_until, args=(it, table, done))
        writing.start()
        try:
            seen: set[int] = set()
            loops = 0
            while loops < least or len(seen) < replaced_least:
                seen.add(_lease_latest_and_look(it, it.calls, table, bucket, loops))
                loops += 1
        finally:
            done.set()
            writing.join()


def _write_until(it: Stage, table: Table, done: threading.Event) -> None:
    number = 0
    with (
        zufluss.connect(f"127.0.0.1:{it.ports['OPEN']}") as conn,
        conn.table(table.path).upsert() as writer,
    ):
        while not done.is_set():
            writer.write({"id": [number % 100], "text": [f"{number}"]})
            writer.flush()
            number += 1


def _lease_latest_and_look(
    it: Stage, calls: Caller, table: Table, bucket: TableBucket, number: int
) -> int:
    """Lease the latest snapshot, assert that all its files exist, and release it."""
    got = calls.latest("race", [bucket])
    assert got.unavailable == {}
    snapshot_id = got.leased[bucket].snapshot_id
    files = it.files(bucket, snapshot_id)
    assert exist(files) == files
    if number % 10 == 0:
        assert rows(table, bucket, snapshot_id)
        assert exist(files) == files
    calls.drop("race")
    return snapshot_id


async def test_an_acquire_amid_the_commit_that_drops_a_snapshot_gets_one_that_stays(
    tmp_path: Path,
) -> None:
    rng = random.Random(7)
    async with inside(tmp_path, {"kv.snapshot.num-retained": "1"}) as it:
        made = {0: await it.take(0)}
        met: set[int] = set()
        for number in range(1, rounds(150, 10_000)):
            made[number], data = await snapshot(it.cluster, it.bucket, number)
            commit = asyncio.ensure_future(it.cluster.coordinator.remote.commit_snapshot(data, 0))
            for _ in range(rng.randrange(12)):
                await asyncio.sleep(0)
            got = await _latest(it)
            await commit
            await it.settled()
            assert got in it.kept()
            assert it.are_there([made[got]])
            met.add(number - got)
            await it.leases.drop("a", principal=None)
            await it.settled()
            assert it.kept() == [number]
            del made[number - 1]
        assert met == {0, 1}, "some came before the commit, some after it"


async def _latest(it: Inside) -> int:
    got = await it.leases.acquire_latest("a", HOUR_MS, [it.bucket], principal=None)
    return got.leased[it.bucket].snapshot_id
