"""A server follows buckets of another one, and leads them when that one is lost."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.tablet.shared.cluster import killed, until
from tests.tablet.shared.test_keyed import filled, folded, looked_up, put, row_count
from tests.tablet.shared.test_takeover import rows_of
from tests.tablet.standby.pair import FOLLOWER, Pair
from tests.tablet.support import TABLE
from zufluss.cluster.image import BucketState, TableGone
from zufluss.cluster.replicas import ReplicaStop
from zufluss.cluster.wal import StandbyReport, WalSession, WalSource
from zufluss.errors import NotLeaderError, StorageBackpressureError
from zufluss.kv.tablet import KvTablet
from zufluss.model.table import TableBucket

FIRST = TableBucket(TABLE, None, 0)


def tails(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The offsets from which the follower reads the shared log from now on."""
    shared = pair.follower.server.shared
    assert shared is not None
    read: list[int] = []
    tail = shared.tail

    async def noted(source: Any, bucket: TableBucket, start: int) -> Any:
        read.append(start)
        return await tail(source, bucket, start)

    monkeypatch.setattr(shared, "tail", noted)
    return read


def applied(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """The pieces of changelogs that any state applies from now on: from, to."""
    pieces: list[tuple[int, int]] = []
    apply = KvTablet.apply

    def noted(tablet: KvTablet, piece: Any, *, waits: bool = True) -> None:
        before = tablet.applied_offset
        apply(tablet, piece, waits=waits)
        pieces.append((before, piece.end_offset))

    monkeypatch.setattr(KvTablet, "apply", noted)
    return pieces


async def test_a_standby_has_the_bytes_of_its_leader_and_serves_nobody(tmp_path: Path) -> None:
    pair = Pair(tmp_path)
    leader = await pair.start()
    follower = await pair.follow()
    await filled(leader)
    standby = await pair.caught_up()
    here = standby.log.read(0, 1 << 20, at_least_one=True, nowait=False).records
    assert bytes(here) == rows_of(leader)
    assert not list(follower.server.buckets.replicas())
    pair.follower.image.apply([])
    with pytest.raises(NotLeaderError):
        follower.server.buckets.replica(TABLE, None, 0)
    assert {each.follower_server_id for each in pair.wire.requests} == {FOLLOWER}
    requests = pair.wire.requests  # the other bucket may come up later
    await until(lambda: any(len(x.tables_req[0].buckets_req) == 2 for x in requests))
    await follower.server.close()
    await killed(leader)


async def test_a_take_over_reads_only_what_the_standby_did_not_have(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pair = Pair(tmp_path)
    leader = await pair.start()
    follower = await pair.follow()
    expected = await filled(leader)
    followed = (await pair.caught_up()).log.log_end_offset
    pair.wire.cut()
    assert await put(leader, (50, 5, "unknown to the standby")) == 0
    expected[50] = (50, 5, "unknown to the standby")
    end = leader.server.buckets.replica(TABLE, None, 0).log.high_watermark
    read, pieces = tails(pair, monkeypatch), applied(monkeypatch)
    await pair.lose_leader()
    assert read == [followed], "the rest of the log was here"
    assert pieces == [(followed, end)], "the rest of the state was here"
    assert await looked_up(follower, range(101)) == expected == folded(follower)
    assert row_count(follower) == len(expected)
    assert follower.server.standbys is not None
    assert follower.server.standbys.promoted == 1
    assert await put(follower, (3, 9, "new")) == 0
    assert await looked_up(follower, [3]) == {3: (3, 9, "new")}
    await follower.server.close()


async def test_a_retry_of_a_put_is_known_to_a_standby_that_leads(tmp_path: Path) -> None:
    pair = Pair(tmp_path)
    leader = await pair.start()
    follower = await pair.follow()
    assert await put(leader, (1, 1, "a"), writer_id=5, sequence=0) == 0
    await pair.caught_up()
    await pair.lose_leader()
    before = rows_of(follower)
    assert await put(follower, (1, 1, "a"), writer_id=5, sequence=0) == 0
    assert rows_of(follower) == before, "nothing is appended"
    assert await put(follower, (1, 2, "b"), writer_id=5, sequence=1) == 0
    assert await looked_up(follower, [1]) == {1: (1, 2, "b")}
    await follower.server.close()


async def test_a_standby_that_comes_back_goes_on_with_its_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pair = Pair(tmp_path)
    leader = await pair.start()
    follower = await pair.follow()
    expected = await filled(leader)
    followed = (await pair.caught_up()).log.log_end_offset
    await follower.server.close()
    assert await put(leader, (60, 6, "meanwhile")) == 0
    expected[60] = (60, 6, "meanwhile")
    pieces = applied(monkeypatch)
    pair.wire.requests.clear()
    follower = await pair.follow()
    await pair.caught_up()
    assert {before for before, _ in pieces} == {followed}
    offsets = [
        bucket.fetch_offset
        for request in pair.wire.requests
        for bucket in request.tables_req[0].buckets_req
        if bucket.bucket_id == 0
    ]
    assert min(offsets) == followed - 1, "the last batch is compared"
    await pair.lose_leader()
    assert await looked_up(follower, range(101)) == expected == folded(follower)
    await follower.server.close()


async def test_a_standby_starts_from_a_snapshot_if_there_is_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pair = Pair(tmp_path)
    leader = await pair.start()
    expected = await filled(leader)
    replica = leader.server.buckets.replica(TABLE, None, 0)
    assert await leader.server.snapshots.snapshot(replica) is not None
    offset = replica.log.high_watermark
    assert await put(leader, (70, 7, "behind it")) == 0
    expected[70] = (70, 7, "behind it")
    pieces = applied(monkeypatch)
    follower = await pair.follow()
    await pair.caught_up()
    assert [before for before, _ in pieces] == [offset]
    await pair.lose_leader()
    assert await looked_up(follower, range(101)) == expected == folded(follower)
    assert row_count(follower) == len(expected)
    await follower.server.close()


async def test_rows_that_the_leader_does_not_have_are_deleted_before_anything_is_read(
    tmp_path: Path,
) -> None:
    """An old copy of a disk, of a cluster that was made anew."""
    other = Pair(tmp_path / "other")
    leader = await other.start()
    follower = await other.follow()
    for number in range(5):
        assert await put(leader, (number, 666, "never written here")) == 0
    await other.caught_up()
    await follower.server.close()
    await killed(leader)

    pair = Pair(tmp_path / "new")
    leader = await pair.start()
    expected = await filled(leader)
    shutil.copytree(tmp_path / "other" / "two", tmp_path / "new" / "two")
    follower = await pair.follow()
    standby = await pair.caught_up()
    here = standby.log.read(0, 1 << 20, at_least_one=True, nowait=False).records
    assert bytes(here) == rows_of(leader)
    await pair.lose_leader()
    assert await looked_up(follower, range(101)) == expected == folded(follower)
    await follower.server.close()


async def test_a_standby_without_memory_goes_on_when_there_is_some(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pair = Pair(tmp_path)
    leader = await pair.start()
    follower = await pair.follow()
    assert await put(leader, (1, 1, "a")) == 0
    await pair.caught_up()
    refusals, apply = [3], KvTablet.apply

    def refused(tablet: KvTablet, piece: Any, *, waits: bool = True) -> None:
        assert not waits, "puts of others would wait with it"
        if refusals[0]:
            refusals[0] -= 1
            raise StorageBackpressureError("no memory")
        apply(tablet, piece, waits=waits)

    monkeypatch.setattr(KvTablet, "apply", refused)
    expected = await filled(leader)
    await pair.caught_up()
    assert not refusals[0]
    monkeypatch.setattr(KvTablet, "apply", apply)
    await pair.lose_leader()
    assert (await looked_up(follower, range(20))).items() >= expected.items()
    assert await looked_up(follower, range(20)) == folded(follower)
    await follower.server.close()


async def test_what_a_standby_tells_the_coordinator_is_told_once(tmp_path: Path) -> None:
    pair = Pair(tmp_path)
    leader = await pair.start()
    follower = await pair.follow()
    assert await put(leader, (1, 1, "a")) == 0
    await pair.caught_up()
    standbys = follower.server.standbys
    assert standbys is not None
    await until(lambda: all(x.caught_up_at is not None for x in standbys) and len(standbys) == 2)
    await standbys.report()
    reports = pair.cluster.gateway.reports
    assert set(reports[-2:]) >= {StandbyReport(FIRST, 1, True)}
    count = len(reports)
    await standbys.report()
    assert len(reports) == count
    standby = pair.standby()
    assert standby is not None
    standby.paused = True  # nothing comes any more
    assert standby.caught_up_at is not None
    standby.caught_up_at -= 11
    await standbys.report()
    assert reports[count:] == [StandbyReport(FIRST, 1, False)]
    await follower.server.close()
    await killed(leader)


async def test_a_bucket_that_is_not_followed_any_more_is_deleted(tmp_path: Path) -> None:
    pair = Pair(tmp_path)
    leader = await pair.start()
    follower = await pair.follow()
    await filled(leader)
    standby = await pair.caught_up()
    directory = standby.log.directory
    await follower.server.stop_replicas([ReplicaStop(FIRST, 1, True)])
    assert pair.standby() is None
    await follower.server.kv.settled()
    assert not directory.exists()
    assert not directory.with_name("kv-0").exists()
    await follower.server.close()
    await killed(leader)


async def test_a_table_that_was_dropped_before_the_order_came_is_not_followed(
    tmp_path: Path,
) -> None:
    pair = Pair(tmp_path)
    leader = await pair.start()
    follower = await pair.follow()
    await filled(leader)
    standby = await pair.caught_up()
    follower.image.apply([TableGone(TABLE)])
    standbys = follower.server.standbys
    assert standbys is not None
    await standbys.report()
    assert len(standbys) == 0
    await follower.server.kv.settled()
    assert not standby.log.directory.exists()
    await follower.server.close()
    await killed(leader)


async def test_a_former_leader_follows_from_what_it_has(tmp_path: Path) -> None:
    pair = Pair(tmp_path)
    leader = await pair.start()
    await pair.follow()
    await filled(leader)
    await pair.caught_up()
    order = next(each for each in pair.orders() if each.table_bucket == FIRST)
    standbys = pair.follower.server.standbys
    assert standbys is not None
    before = pair.standby()
    await pair.follower.server.start_replicas([order])
    assert pair.standby() is before, "the order came twice"
    await pair.lose_leader()
    assert pair.standby() is None
    await pair.follower.server.start_replicas([order])  # an old order that came late
    assert pair.follower.server.buckets.find(*FIRST) is not None
    assert pair.standby() is None
    await pair.follower.server.close()


async def test_an_old_order_to_follow_does_not_end_a_take_over(tmp_path: Path) -> None:
    """The bucket would have no leader: the coordinator knows that the order to lead arrived."""
    pair = Pair(tmp_path)
    leader = await pair.start()
    follower = await pair.follow()
    await filled(leader)
    await pair.caught_up()
    old = next(each for each in pair.orders() if each.table_bucket == FIRST)
    order = await pair.lost()
    await follower.server.start_replicas([order])
    assert follower.server.buckets.find(*FIRST) is None, "it is still being opened"
    await follower.server.start_replicas([old])
    await until(lambda: follower.server.buckets.find(*FIRST) is not None)
    assert pair.standby() is None
    await follower.server.close()


async def test_an_old_order_to_lead_does_not_end_a_standby(tmp_path: Path) -> None:
    pair = Pair(tmp_path)
    leader = await pair.start()
    follower = await pair.follow()
    await filled(leader)
    before = await pair.caught_up()
    (order, _) = pair.orders()
    source = WalSource(WalSession(9, 9, 1), 0, 0)
    old = BucketState((FOLLOWER, 1), FOLLOWER, pair.cluster.epoch - 1, (FOLLOWER,), wal=9)
    await follower.server.start_replicas([replace(order, state=old, source=source)])
    assert pair.standby() is before
    assert not follower.server.assignments.retries.waiting
    await follower.server.close()
    await killed(leader)


async def test_an_old_order_to_stop_does_not_end_who_leads_by_now(tmp_path: Path) -> None:
    """The coordinator would take it for the leader for ever, and nobody would serve it."""
    pair = Pair(tmp_path)
    leader = await pair.start()
    follower = await pair.follow()
    await filled(leader)
    await pair.caught_up()
    epoch = pair.cluster.epoch
    await pair.lose_leader()
    await follower.server.stop_replicas([ReplicaStop(FIRST, epoch, True)])
    assert follower.server.buckets.find(*FIRST) is not None
    await follower.server.stop_replicas([ReplicaStop(FIRST, epoch + 1, True)])
    assert follower.server.buckets.find(*FIRST) is None
    await follower.server.close()
