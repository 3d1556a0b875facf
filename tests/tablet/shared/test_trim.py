"""Objects of a session that nobody needs any more, and everything that somebody may need."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from tests.tablet.shared.cluster import SharedCluster, killed, until, written
from tests.tablet.shared.test_damage import damage
from tests.tablet.shared.test_takeover import log_of, rows_of
from tests.tablet.support import TABLE, Tablet
from zufluss.cluster.image import TablePut
from zufluss.cluster.replicas import ReplicaStop
from zufluss.cluster.wal import Takeover, WalSession, WalSource
from zufluss.errors import ConfigError, NetworkError
from zufluss.log.reader import LogTail
from zufluss.model.table import TableBucket
from zufluss.tablet.shared.session import ServerSession
from zufluss.tablet.shared.sources import Tail
from zufluss.tablet.shared.trim import TRIM_SECONDS, Trimmer

MIB = 1 << 20


def trimmer_of(
    tablet: Tablet, retained: int = 256 * MIB, clock: list[float] | None = None
) -> Trimmer:
    server, now = tablet.server, clock or [0.0]
    assert server.shared is not None
    return Trimmer(
        server.shared, server.buckets, server.logs, server.remote_logs, retained, lambda: now[0]
    )


async def trimmed(tablet: Tablet, retained: int = 1) -> int:
    assert tablet.server.shared is not None
    return await trimmer_of(tablet, retained).trim(tablet.server.shared.session)


async def test_what_is_carried_replaces_what_is_trimmed(tmp_path: Path) -> None:
    cluster = SharedCluster(tmp_path)
    tablet = await cluster.start("one")
    for _ in range(20):
        await written(tablet, 0, 1)
    await written(tablet, 1)
    before = [rows_of(tablet, 0), rows_of(tablet, 1)]
    objects = len(cluster.objects(1))
    assert await trimmed(tablet) == objects
    assert cluster.gateway.floors == {1: objects}
    assert 1 <= len(cluster.objects(1)) <= 2, "they have the tails of both buckets"
    await written(tablet, 0)
    await killed(tablet)
    tablet = await cluster.start("two")
    assert rows_of(tablet, 0).startswith(before[0])
    assert rows_of(tablet, 1) == before[1]
    assert log_of(tablet).log_end_offset == 63
    await tablet.server.close()


async def test_a_tail_that_costs_more_than_it_frees_is_left(tmp_path: Path) -> None:
    """Otherwise a quiet server would write the same rows again every minute."""
    cluster = SharedCluster(tmp_path)
    tablet = await cluster.start("one")
    for _ in range(3):
        await written(tablet, 0)
    assert await trimmed(tablet, retained=MIB) == 0, "the same rows would be written again"
    tablet.server.buckets.replica(TABLE, None, 0).remote.range = (0, 6)
    assert await trimmed(tablet, retained=MIB) == 3, "two batches of three are in a segment"
    await tablet.server.close()


async def test_a_long_tail_is_uploaded_and_not_carried(tmp_path: Path) -> None:
    cluster = SharedCluster(tmp_path)
    tablet = await cluster.start("one")
    for _ in range(150):
        await written(tablet, *[0] * 10)
    await written(tablet, 1)
    before = [rows_of(tablet, 0), rows_of(tablet, 1)]
    assert len(before[0]) > MIB // 8 > len(before[1])
    assert await trimmed(tablet, retained=MIB) > 0
    remote = cluster.gateway.remotes[TableBucket(TABLE, None, 0)]
    assert remote.remote_end_offset == log_of(tablet).log_end_offset
    assert sum(path.stat().st_size for path in cluster.objects(1)) < 2048
    await written(tablet, 0)
    await killed(tablet)
    tablet = await cluster.start("two")
    assert log_of(tablet).log_end_offset == remote.remote_end_offset + 3
    assert rows_of(tablet, 1) == before[1]
    await tablet.server.close()


async def test_rounds_begin_every_minute_and_when_much_is_there(tmp_path: Path) -> None:
    cluster = SharedCluster(tmp_path)
    tablet = await cluster.start("one")
    await written(tablet, 0)
    await written(tablet, 0)
    now = [0.0]
    trimmer = trimmer_of(tablet, clock=now)
    await trimmer.look_after()
    assert len(cluster.objects(1)) == 2
    now[0] = TRIM_SECONDS
    tablet.server.buckets.replica(TABLE, None, 0).remote.range = (0, 6)
    await trimmer.look_after()
    assert len(cluster.objects(1)) == 0
    await written(tablet, 0)
    await written(tablet, 0)
    await trimmer_of(tablet, retained=100).look_after()
    assert len(cluster.objects(1)) == 1, "more than the retained bytes were there"
    await tablet.server.close()


async def test_a_bucket_that_is_being_recovered_holds_the_floor(tmp_path: Path) -> None:
    cluster = SharedCluster(tmp_path)
    tablet = await cluster.start("one")
    await written(tablet, 0)
    await _refused_for_good(tablet, 1)
    await written(tablet, 0)
    await trimmed(tablet)
    assert cluster.object(1, 1).exists()
    await killed(tablet)
    tablet = await cluster.start("two")
    assert [log_of(tablet, i).log_end_offset for i in (0, 1)] == [6, 3]
    await tablet.server.close()


async def test_a_bucket_that_another_server_got_before_it_continued_here_does_not_hold_the_floor(
    tmp_path: Path,
) -> None:
    """It was carried, and its order came too late. Nobody needs it here, and it never comes up."""
    cluster = SharedCluster(tmp_path)
    tablet = await cluster.start("one")
    await written(tablet, 0, 1)
    await killed(tablet)
    taken_over, late = cluster.gateway.commit_takeovers, TableBucket(TABLE, None, 1)

    async def all_but_one(session: WalSession, takeovers: Sequence[Takeover]) -> set[TableBucket]:
        return await taken_over(session, [each for each in takeovers if each.bucket != late])

    cluster.gateway.commit_takeovers = all_but_one  # type: ignore[method-assign]
    tablet = await cluster.start("two")
    for _ in range(3):
        await written(tablet, 0)
    table = tablet.image.table_by_id(TABLE)
    assert table is not None
    mine, other = table.buckets
    other = replace(other, replicas=(2,), leader=2, leader_epoch=3)
    tablet.image.apply([TablePut(replace(table, buckets=(mine, other)))])
    trimmer = trimmer_of(tablet, retained=1)
    assert tablet.server.shared is not None
    session = tablet.server.shared.session
    await trimmer.trim(session)
    assert trimmer.held is not None, "it is still being opened, and may be committed"
    assert trimmer.held[0] == late
    await tablet.server.stop_replicas([ReplicaStop(late, 2, True, (1,))])
    end = session.writer.written[-1].number + 1
    assert await trimmer.trim(session) > 0
    assert (trimmer.held, session.floor) == (None, end)
    await tablet.server.close()


async def test_what_was_carried_is_not_written_again_while_the_coordinator_is_away(
    tmp_path: Path,
) -> None:
    """Otherwise what is pressing would grow with every round."""
    cluster = SharedCluster(tmp_path)
    tablet = await cluster.start("one")
    for _ in range(3):
        await written(tablet, 0, 1)
    now = [0.0]
    trimmer = trimmer_of(tablet, retained=100, clock=now)
    cluster.gateway.lose_request = 3
    for _ in range(3):
        with pytest.raises(NetworkError):
            await trimmer.look_after()
        carried = len(cluster.objects(1)) - 3
        assert 1 <= carried <= 2, "the tails of both buckets, once"
        assert "connection broke" in trimmer.problem
        now[0] += TRIM_SECONDS
    await trimmer.look_after()
    assert len(cluster.objects(1)) == carried
    assert (cluster.gateway.floors, trimmer.problem) == ({1: 3}, "")
    await written(tablet, 0)
    await killed(tablet)
    tablet = await cluster.start("two")
    assert [log_of(tablet, i).log_end_offset for i in (0, 1)] == [12, 9]
    await tablet.server.close()


async def test_rounds_that_do_not_help_wait_ever_longer(tmp_path: Path) -> None:
    cluster = SharedCluster(tmp_path)
    tablet = await cluster.start("one")
    await written(tablet, 0)
    now, began = [0.0], list[float]()
    trimmer = trimmer_of(tablet, retained=0, clock=now)

    async def in_vain(session: ServerSession) -> int:
        began.append(now[0])
        return 0

    trimmer.trim = in_vain  # type: ignore[method-assign]
    for _ in range(200):
        await trimmer.look_after()
        now[0] += 1
    assert began == [0, 1, 3, 7, 15, 31, 63, 123, 183]
    del trimmer.trim  # type: ignore[method-assign]
    now[0] += TRIM_SECONDS
    await trimmer.look_after()
    await written(tablet, 0)
    await trimmer.look_after()
    assert len(cluster.objects(1)) == 1, "and after one that helped they begin at once"
    await tablet.server.close()


async def test_nothing_is_closed_or_written_for_a_floor_that_cannot_rise(tmp_path: Path) -> None:
    """A segment would be closed and uploaded each second for a bucket that holds the floor."""
    cluster = SharedCluster(tmp_path)
    tablet = await cluster.start("one")
    await _refused_for_good(tablet, 1)
    for _ in range(100):
        await written(tablet, *[0] * 10)
    log, objects = log_of(tablet), len(cluster.objects(1))
    assert log.tail(0).length > 64 << 10
    trimmer = trimmer_of(tablet, retained=100)
    await trimmer.look_after()
    assert len(log._segments) == 1
    assert len(cluster.objects(1)) == objects
    assert not cluster.gateway.commits
    assert trimmer.held is not None
    bucket, why = trimmer.held
    assert bucket == TableBucket(TABLE, None, 1)
    assert "the test says so" in why
    await killed(tablet)


async def test_a_bucket_that_cannot_be_carried_holds_its_own_objects_and_no_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cluster = SharedCluster(tmp_path)
    tablet = await cluster.start("one")
    for _ in range(5):
        await written(tablet, 0)
    await written(tablet, 1)
    await written(tablet, 0)
    read, name = LogTail.read, log_of(tablet, 1).tail(0).log

    def refused(self: LogTail) -> bytearray:
        if self.log == name:
            raise OSError("the disk says no")
        return read(self)

    monkeypatch.setattr(LogTail, "read", refused)
    trimmer = trimmer_of(tablet, retained=1)
    assert tablet.server.shared is not None
    assert await trimmer.trim(tablet.server.shared.session) == 5
    assert cluster.gateway.floors == {1: 5}
    assert trimmer.held == (TableBucket(TABLE, None, 1), "the disk says no")
    monkeypatch.undo()
    await killed(tablet)
    tablet = await cluster.start("two")
    assert [log_of(tablet, i).log_end_offset for i in (0, 1)] == [18, 3]
    await tablet.server.close()


async def test_a_log_that_is_damaged_is_made_anew_and_trimmed_by_the_next_round(
    tmp_path: Path,
) -> None:
    """It held the floor of the whole server for as long as it was served."""
    cluster = SharedCluster(tmp_path)
    tablet = await cluster.start("one")
    for _ in range(5):
        await written(tablet, 0, 1)
    replica = tablet.server.buckets.replica(TABLE, None, 1)
    before = rows_of(tablet, 1)
    damage(tmp_path / "one", 1)
    trimmer = trimmer_of(tablet, retained=100)
    await trimmer.look_after()
    await until(lambda: tablet.server.buckets.find(*replica.bucket) not in (None, replica))
    assert rows_of(tablet, 1) == before
    assert await trimmed(tablet) >= 5
    await killed(tablet)
    tablet = await cluster.start("two")
    assert rows_of(tablet, 1) == before
    assert log_of(tablet, 0).log_end_offset == 15
    await tablet.server.close()


async def test_nothing_is_deleted_before_the_floor_is_recorded(tmp_path: Path) -> None:
    cluster = SharedCluster(tmp_path)
    tablet = await cluster.start("one")
    for _ in range(3):
        await written(tablet, 0)
    cluster.gateway.lose_request = 1
    with pytest.raises(NetworkError):
        await trimmed(tablet)
    assert all(cluster.object(1, number).exists() for number in range(3))
    cluster.gateway.lose_answer = 1
    with pytest.raises(NetworkError):
        await trimmed(tablet)
    await killed(tablet)
    tablet = await cluster.start("two")
    assert log_of(tablet).log_end_offset == 9
    await tablet.server.close()


async def test_rows_that_come_while_a_tail_is_carried_follow_it(tmp_path: Path) -> None:
    cluster = SharedCluster(tmp_path)
    tablet = await cluster.start("one")
    for _ in range(5):
        await written(tablet, 0)
    assert tablet.server.shared is not None
    session = tablet.server.shared.session
    replica = tablet.server.buckets.replica(TABLE, None, 0)
    trimmer = trimmer_of(tablet)
    tail = replica.log.tail(0)
    await written(tablet, 0)  # between the plan and the carry
    await trimmer._carry(session, replica, tail)
    await written(tablet, 0)
    await session.writer.drained()
    for number in range(6):
        cluster.object(1, number).unlink()
    cluster.gateway.floors[1] = 6
    expected = rows_of(tablet)
    await killed(tablet)
    tablet = await cluster.start("two")
    assert rows_of(tablet) == expected
    await tablet.server.close()


async def test_a_bucket_that_is_read_from_the_session_while_it_is_trimmed_comes_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its rows are in segments; a round that began before the bucket failed deletes the objects."""
    cluster = SharedCluster(tmp_path)
    tablet = await cluster.start("one")
    for _ in range(6):
        await written(tablet, 0)
    assert tablet.server.shared is not None
    session = tablet.server.shared.session
    replica = tablet.server.buckets.replica(TABLE, None, 0)
    tail, reads = tablet.server.shared.tail, [0]
    remotes = dict(cluster.gateway.remotes)
    replica.log.roll()
    await tablet.server.logs.flushed(replica.log)
    await tablet.server.remote_logs.copy(replica)
    remotes, cluster.gateway.remotes = cluster.gateway.remotes, remotes

    async def trimmed_meanwhile(source: WalSource, bucket: TableBucket, start: int) -> Tail:
        reads[0] += 1
        if reads[0] == 1:
            cluster.gateway.remotes = remotes
            await session.raise_floor(6)
            await session.delete_below_floor()
        return await tail(source, bucket, start)

    monkeypatch.setattr(tablet.server.shared, "tail", trimmed_meanwhile)
    tablet.server.logs.distrust(replica.bucket)  # so that it reads the session from the beginning
    replica.fail("the test says so")
    await until(lambda: tablet.server.buckets.find(*replica.bucket) not in (None, replica))
    assert reads[0] == 2
    assert log_of(tablet).high_watermark == 18
    await written(tablet, 0)
    await killed(tablet)
    tablet = await cluster.start("two")
    assert log_of(tablet).log_end_offset == 21
    await tablet.server.close()


async def test_a_server_that_copies_no_segments_is_refused(tmp_path: Path) -> None:
    """Nothing could be trimmed: the shared log would grow for ever."""
    cluster = SharedCluster(tmp_path)
    cluster.conf = {"remote.log.task-interval-duration": "0s"}
    with pytest.raises(ConfigError, match=r"remote.log.task-interval-duration = 0 copies no seg"):
        await cluster.start()


async def _refused_for_good(tablet: Tablet, bucket: int) -> None:
    """A bucket with one batch, which holds the floor from then on."""
    await written(tablet, bucket)
    replica = tablet.server.buckets.replica(TABLE, None, bucket)
    tablet.server.assignments.retries._sleep = lambda _: _never()
    replica.fail("the test says so")
    await until(lambda: tablet.server.buckets.find(TABLE, None, bucket) is None)


async def _never() -> None:
    await asyncio.Event().wait()
