"""Objects of a session that nobody needs any more, and everything that somebody may need."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.tablet.shared.cluster import SharedCluster, killed, until, written
from tests.tablet.shared.test_takeover import log_of, rows_of
from tests.tablet.support import TABLE, Tablet
from zufluss.cluster.wal import WalSource
from zufluss.errors import NetworkError
from zufluss.model.table import TableBucket
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
    await written(tablet, 1)
    await written(tablet, 0)
    replica = tablet.server.buckets.replica(TABLE, None, 1)
    tablet.server.assignments.retries._sleep = lambda _: _never()
    replica.fail("the test says so")
    await until(lambda: tablet.server.buckets.find(TABLE, None, 1) is None)
    await trimmed(tablet)
    assert cluster.object(1, 1).exists()
    await killed(tablet)
    tablet = await cluster.start("two")
    assert [log_of(tablet, i).log_end_offset for i in (0, 1)] == [6, 3]
    await tablet.server.close()


async def test_a_round_that_failed_is_not_repeated_at_once(tmp_path: Path) -> None:
    """It has written tails again: without a coordinator they would be written each second."""
    cluster = SharedCluster(tmp_path)
    tablet = await cluster.start("one")
    for _ in range(3):
        await written(tablet, 0)
    now = [0.0]
    trimmer = trimmer_of(tablet, retained=100, clock=now)
    cluster.gateway.lose_request = 1
    with pytest.raises(NetworkError):
        await trimmer.look_after()
    assert len(cluster.objects(1)) == 4, "the tail was carried"
    now[0] = TRIM_SECONDS - 1
    await trimmer.look_after()
    assert len(cluster.objects(1)) == 4
    now[0] = TRIM_SECONDS
    await trimmer.look_after()
    assert len(cluster.objects(1)) == 1
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


async def _never() -> None:
    import asyncio

    await asyncio.Event().wait()
