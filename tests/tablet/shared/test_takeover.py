"""Buckets whose ends are in the shared log: written, lost with their server, and taken over."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.tablet.shared.cluster import SharedCluster, killed, until, written
from tests.tablet.support import TABLE, Connection, Tablet, batch
from zufluss.cluster.wal import Takeover, WalSession
from zufluss.errors import ErrorCode, NetworkError
from zufluss.log.log import Log
from zufluss.log.shared.objects import ObjectLog
from zufluss.model.table import TableBucket
from zufluss.record.header import build_batch
from zufluss.remote.marked import MarkedObjects
from zufluss.wire import messages as m


def log_of(tablet: Tablet, bucket: int = 0) -> Log:
    return tablet.server.buckets.replica(TABLE, None, bucket).log


def rows_of(tablet: Tablet, bucket: int = 0) -> bytes:
    """All batches of a bucket that readers may see."""
    log = log_of(tablet, bucket)
    data, offset = b"", log.log_start_offset
    while offset < log.high_watermark:
        read = log.read(offset, 1 << 20, at_least_one=True, nowait=False)
        data, offset = data + bytes(read.records), read.end_offset
    return data


async def test_an_acknowledged_append_is_in_the_shared_log(tmp_path: Path) -> None:
    cluster = SharedCluster(tmp_path)
    tablet = await cluster.start()
    await written(tablet, 0, 1)
    assert log_of(tablet).high_watermark == 3
    assert cluster.objects(1), "it was acknowledged before it was there"
    await tablet.server.close()


async def test_a_server_without_a_disk_has_everything_that_was_acknowledged(
    tmp_path: Path,
) -> None:
    cluster = SharedCluster(tmp_path)
    tablet = await cluster.start("one")
    for _ in range(5):
        await written(tablet, 0, 1)
    await written(tablet, 0)
    before = [rows_of(tablet, 0), rows_of(tablet, 1)]
    await killed(tablet)
    shutil.rmtree(tmp_path / "one")
    tablet = await cluster.start("another")
    assert [rows_of(tablet, 0), rows_of(tablet, 1)] == before
    assert [log_of(tablet, i).log_end_offset for i in (0, 1)] == [18, 15]
    await tablet.server.close()


async def test_sources_do_not_chain(tmp_path: Path) -> None:
    """Each server writes what it took over into its own session, so the former ones can go."""
    cluster = SharedCluster(tmp_path)
    for number in range(4):
        tablet = await cluster.start(f"server-{number}")
        await written(tablet, 0)
        await killed(tablet)
        assert {each.server_epoch for each in cluster.gateway.wal.values()} == {number + 1}
        for epoch in range(1, number + 1):
            for path in cluster.objects(epoch):
                path.unlink()
    tablet = await cluster.start("last")
    assert log_of(tablet).log_end_offset == 12
    await tablet.server.close()


async def test_the_disk_of_a_restarted_server_is_a_cache(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    cluster = SharedCluster(tmp_path)
    tablet = await cluster.start("one")
    for _ in range(3):
        await written(tablet, 0)
    before = rows_of(tablet)
    await tablet.server.close()
    cluster.object(1, 0).unlink()  # and the session is not needed for what is on the disk
    capfd.readouterr()
    tablet = await cluster.start("one")
    assert rows_of(tablet) == before
    await tablet.server.close()


async def test_a_longer_local_log_is_cut_before_it_is_served(tmp_path: Path) -> None:
    """What the disk has beyond the session was never acknowledged, and others may differ."""
    cluster = SharedCluster(tmp_path)
    tablet = await cluster.start("one")
    await written(tablet, 0)
    log = log_of(tablet)
    view = memoryview(bytearray(batch()))
    checked = tablet.server.buckets.tables[TABLE].checker
    import numpy as np

    batches = checked.check(np.frombuffer(view, np.uint8), 0, len(view), None)
    log.append_new(view, batches, tablet.now_ms)  # and is killed before the session has it
    await tablet.server.logs.flushed(log)
    assert log.log_end_offset == 6
    await killed(tablet)
    tablet = await cluster.start("one")
    assert (log_of(tablet).log_end_offset, log_of(tablet).high_watermark) == (3, 3)
    await written(tablet, 0)
    assert log_of(tablet).high_watermark == 6
    await tablet.server.close()


async def test_a_stale_cache_never_shows_a_row_that_the_session_does_not_have(
    tmp_path: Path,
) -> None:
    """A directory of an earlier leader comes back with a tail of its own."""
    cluster = SharedCluster(tmp_path)
    tablet = await cluster.start("one")
    await written(tablet, 0)
    await killed(tablet)
    tablet = await cluster.start("two")
    await written(tablet, 0)
    expected = rows_of(tablet)
    await killed(tablet)
    tablet = await cluster.start("one")
    assert rows_of(tablet) == expected
    await tablet.server.close()


async def test_a_retry_of_a_batch_is_known_to_the_next_leader(tmp_path: Path) -> None:
    cluster = SharedCluster(tmp_path)
    tablet = await cluster.start("one")
    one = bytes(build_batch(1, _body(), 3, writer_id=5, sequence=0))
    assert await _produce(tablet, one) == (0, 0)
    await killed(tablet)
    tablet = await cluster.start("two")
    assert await _produce(tablet, one) == (0, 0), "the same offset, and nothing appended"
    assert log_of(tablet).log_end_offset == 3
    two = bytes(build_batch(1, _body(), 3, writer_id=5, sequence=1))
    assert await _produce(tablet, two) == (3, 0)
    await tablet.server.close()


async def test_a_fenced_server_answers_that_it_does_not_lead(tmp_path: Path) -> None:
    cluster = SharedCluster(tmp_path)
    tablet = await cluster.start("one")
    await written(tablet, 0)
    assert cluster.gateway.live is not None
    await cluster.sealed(cluster.gateway.live)
    connection, request = await tablet.produce(0)
    ((_, code),) = await connection.produced(request)
    assert code == ErrorCode.NOT_LEADER_OR_FOLLOWER
    await until(lambda: not tablet.server.buckets.by_log)
    connection, request = await tablet.produce(0)
    ((_, code),) = await connection.produced(request)
    assert code in (ErrorCode.LEADER_NOT_AVAILABLE_EXCEPTION, ErrorCode.NOT_LEADER_OR_FOLLOWER)
    await tablet.server.close()


async def test_a_fenced_server_registers_again(tmp_path: Path) -> None:
    cluster = SharedCluster(tmp_path)
    tablet = await cluster.start("one")
    await written(tablet, 0)
    former = cluster.gateway.live
    assert former is not None

    async def rejoin() -> None:
        source = await cluster.sealed(former)
        cluster.epoch += 1
        cluster.gateway.leader_epoch = cluster.epoch
        session = cluster.gateway.live = former._replace(server_epoch=cluster.epoch)
        tablet.server.confirmed(float("inf"))
        assigned = cluster.assignments({former: source})
        await tablet.server.assign(tablet.image, assigned, (), session)

    tablet.server.rejoin = rejoin
    await cluster.sealed(former)
    connection, request = await tablet.produce(0)
    assert await connection.produced(request) == [(0, ErrorCode.NOT_LEADER_OR_FOLLOWER)]
    await until(lambda: len(tablet.server.buckets.by_log) == 2)
    await written(tablet, 0)
    assert log_of(tablet).high_watermark == 6
    await tablet.server.close()


async def test_a_bucket_that_failed_comes_back_from_the_session(tmp_path: Path) -> None:
    cluster = SharedCluster(tmp_path)
    tablet = await cluster.start("one")
    await written(tablet, 0)
    replica = tablet.server.buckets.replica(TABLE, None, 0)
    replica.fail("the test says so")
    bucket = TableBucket(TABLE, None, 0)
    await until(lambda: tablet.server.buckets.find(*bucket) not in (None, replica))
    assert log_of(tablet).high_watermark == 3
    await written(tablet, 0)
    await tablet.server.close()


async def test_a_damaged_object_refuses_the_buckets_in_it_and_no_others(tmp_path: Path) -> None:
    cluster = SharedCluster(tmp_path)
    tablet = await cluster.start("one")
    await written(tablet, 0)
    await written(tablet, 1)
    await killed(tablet)
    path = cluster.object(1, 0)
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    tablet = await cluster.start("two")
    problem = tablet.server.buckets.why_not(TABLE, None, 0)
    assert "offsets from 0 on" in problem.message
    assert log_of(tablet, 1).high_watermark == 3
    await written(tablet, 1)
    await tablet.server.close()


async def test_a_directory_that_is_not_mounted_while_a_bucket_is_taken_over_is_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its objects are missing then, but they are not lost."""
    monkeypatch.setattr("zufluss.tablet.reopen.FIRST_SECONDS", 0.01)
    cluster = SharedCluster(tmp_path)
    tablet = await cluster.start("one")
    await written(tablet, 0, 1)
    await killed(tablet)
    away, get = tmp_path / "away", ObjectLog.read

    def unmounted(self: ObjectLog, *what: Any) -> Any:
        if not away.exists():
            cluster.location.rename(away)
            cluster.location.mkdir()
        return get(self, *what)

    monkeypatch.setattr(ObjectLog, "read", unmounted)
    tablet = await cluster.start("two")
    problem = tablet.server.buckets.why_not(TABLE, None, 0)
    assert "recovering since" in problem.message
    shutil.rmtree(cluster.location)
    away.rename(cluster.location)
    monkeypatch.undo()
    await until(lambda: len(tablet.server.buckets.by_log) == 2)
    assert [log_of(tablet, i).high_watermark for i in (0, 1)] == [3, 3]
    await tablet.server.close()


async def test_a_server_without_word_from_the_coordinator_answers_no_offsets(
    tmp_path: Path,
) -> None:
    cluster = SharedCluster(tmp_path)
    tablet = await cluster.start("one")
    await written(tablet, 0)
    assert tablet.server.shared is not None
    tablet.server.shared.lease.end()
    with pytest.raises(Exception, match="no session of the shared log") as refused:
        await tablet.server.service.list_offsets(
            m.ListOffsetsRequest(follower_server_id=-1, offset_type=1, table_id=TABLE), None
        )
    assert refused.value.code is ErrorCode.NOT_LEADER_OR_FOLLOWER
    await tablet.server.close()


async def test_commits_of_the_coordinator_that_fail_are_repeated(tmp_path: Path) -> None:
    cluster = SharedCluster(tmp_path)
    tablet = await cluster.start("one")
    await written(tablet, 0, 1)
    await killed(tablet)
    cluster.gateway.lose_answer = 1
    tablet = await cluster.start("two")
    await until(lambda: len(tablet.server.buckets.by_log) == 2)
    assert [log_of(tablet, i).high_watermark for i in (0, 1)] == [3, 3]
    await tablet.server.close()


async def test_a_source_is_not_asked_again_once_its_end_was_written_again(tmp_path: Path) -> None:
    """The coordinator may have noted the commit, and deleted what no bucket needs any more."""
    cluster = SharedCluster(tmp_path)
    tablet = await cluster.start("one")
    await written(tablet, 0)
    before = rows_of(tablet)
    await killed(tablet)
    commit, bucket = cluster.gateway.commit_takeovers, TableBucket(TABLE, None, 0)

    async def lost(session: WalSession, takeovers: Sequence[Takeover]) -> set[TableBucket]:
        done = await commit(session, takeovers)
        if bucket in done and cluster.object(1, 0).exists():
            cluster.object(1, 0).unlink()
            assert cluster.tablet is not None
            assert cluster.tablet.server.shared is not None
            cluster.tablet.server.shared._sources = None
            shutil.rmtree(tmp_path / "two" / "db")
            raise NetworkError("the connection broke before the answer came")
        return done

    cluster.gateway.commit_takeovers = lost  # type: ignore[method-assign]
    tablet = await cluster.start("two")
    await until(lambda: len(tablet.server.buckets.by_log) == 2)
    assert rows_of(tablet) == before
    await written(tablet, 0)
    await tablet.server.close()


async def test_rows_that_become_durable_while_the_server_stops_are_acknowledged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cluster = SharedCluster(tmp_path)
    tablet = await cluster.start("one")
    create, gate, arrived = MarkedObjects.create, asyncio.Event(), asyncio.Event()

    async def slow(self: MarkedObjects, *what: Any) -> None:
        arrived.set()
        await gate.wait()
        await create(self, *what)

    monkeypatch.setattr(MarkedObjects, "create", slow)
    connection, request = await tablet.produce(0)
    await arrived.wait()
    closing = asyncio.create_task(tablet.server.close())
    shared = tablet.server.shared
    assert shared is not None
    await until(lambda: shared._closing)
    late, refused = await tablet.produce(1)
    assert await late.produced(refused) == [(1, ErrorCode.NOT_LEADER_OR_FOLLOWER)]
    gate.set()
    assert await connection.produced(request) == [(0, ErrorCode.NONE)]
    await closing
    monkeypatch.undo()
    tablet = await cluster.start("two")
    assert [log_of(tablet, i).log_end_offset for i in (0, 1)] == [3, 0]
    await tablet.server.close()


async def test_a_bucket_that_has_another_leader_by_now_is_answered_as_such(tmp_path: Path) -> None:
    """Clients ask for the leader again after this code; after an error of the storage they wait."""
    cluster = SharedCluster(tmp_path)
    tablet = await cluster.start("one")
    await written(tablet, 0)
    await killed(tablet)
    cluster.gateway.commit_takeovers = _nothing  # type: ignore[method-assign]
    tablet = await cluster.start("two")
    connection, request = await tablet.produce(0)
    assert await connection.produced(request) == [(0, ErrorCode.NOT_LEADER_OR_FOLLOWER)]
    problem = tablet.server.buckets.why_not(TABLE, None, 0)
    assert "has another leader" in problem.message
    assert "recovering since" in problem.message
    await killed(tablet)


async def _nothing(session: WalSession, takeovers: Sequence[Takeover]) -> set[TableBucket]:
    return set()


def _body() -> bytes:
    import pyarrow as pa

    columns = [pa.array(range(3), pa.int64()), pa.array(["text"] * 3)]
    return pa.RecordBatch.from_arrays(columns, names=["a", "b"]).serialize().to_pybytes()


async def _produce(tablet: Tablet, records: bytes) -> tuple[int, int]:
    """Send a batch; base offset and error code of the answer."""
    from zufluss.wire.codec import decode

    request = m.ProduceLogRequest(acks=-1, table_id=TABLE, timeout_ms=30_000)
    request.buckets_req.add(bucket_id=0, records=records)
    connection = Connection()
    answer = await connection.answer(connection.send(tablet.server.produce.handle, request))
    (entry,) = decode(m.ProduceLogResponse, answer).buckets_resp
    return entry.base_offset, entry.error_code
