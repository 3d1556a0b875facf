"""Tails that are much longer than an object, beside the writes of other buckets."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from tests.tablet.shared.cluster import SharedCluster, killed, written
from tests.tablet.shared.test_takeover import log_of, rows_of
from tests.tablet.shared.test_trim import trimmer_of
from tests.tablet.support import TABLE
from zufluss.log.reader import LogTail
from zufluss.model.table import TableBucket
from zufluss.remote.marked import MarkedObjects
from zufluss.tablet.shared import session as session_module
from zufluss.tablet.shared import trim as trim_module
from zufluss.tablet.shared.session import TailPart

PART = 1000


async def test_a_long_tail_leaves_room_for_what_other_buckets_append(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Their acknowledgements would wait behind all of it, and be refused while it is written."""
    monkeypatch.setattr(session_module, "AHEAD_BYTES", 3 * PART)
    cluster = SharedCluster(tmp_path)
    tablet = await cluster.start()
    shared = tablet.server.shared
    assert shared is not None
    session, gate, arrived = shared.session, asyncio.Event(), asyncio.Event()
    create = MarkedObjects.create

    async def slow(self: MarkedObjects, path: str, data: bytes) -> None:
        arrived.set()
        await gate.wait()
        await create(self, path, data)

    monkeypatch.setattr(MarkedObjects, "create", slow)
    taken = [TableBucket(TABLE + 1, None, i) for i in range(4)]
    tail = [TailPart(i, i + 1, bytes(PART)) for i in range(20)]
    carries = [asyncio.create_task(session.carry_over(b, 2, tail)) for b in taken]
    await arrived.wait()
    for _ in range(100):
        await asyncio.sleep(0)
    appended = sum(session.writer.end_offset(bucket) or 0 for bucket in taken)
    assert appended == 3, "so much of all tails is under way"
    gate.set()
    for _ in range(5):
        await written(tablet, 0)
    await asyncio.gather(*carries)
    await session.writer.drained()
    assert all(session.writer.end_offset(bucket) == 20 for bucket in taken)
    sizes = [path.stat().st_size for path in cluster.objects(1)]
    assert max(sizes) < 5 * PART
    assert sum(sizes) > 80 * PART
    await killed(tablet)


async def test_a_tail_that_grows_while_it_is_read_is_carried_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(trim_module, "UNREAD_BYTES_MAX", 0)
    cluster = SharedCluster(tmp_path)
    tablet = await cluster.start("one")
    await written(tablet, 0)
    loop, read, reads = asyncio.get_running_loop(), LogTail.read, [0]

    def growing(self: LogTail) -> bytearray:
        reads[0] += 1
        if reads[0] <= 3:
            asyncio.run_coroutine_threadsafe(written(tablet, 0), loop).result()
        return read(self)

    monkeypatch.setattr(LogTail, "read", growing)
    assert tablet.server.shared is not None
    session = tablet.server.shared.session
    assert await trimmer_of(tablet, retained=1).trim(session) == 1
    assert reads[0] == 4
    monkeypatch.undo()
    for number in range(1, 4):
        cluster.object(1, number).unlink()
    expected = rows_of(tablet)
    await killed(tablet)
    tablet = await cluster.start("two")
    assert rows_of(tablet) == expected
    assert log_of(tablet).log_end_offset == 12
    await tablet.server.close()


async def test_a_tail_that_grows_faster_than_it_is_read_is_left_to_the_next_round(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(trim_module, "UNREAD_BYTES_MAX", 0)
    cluster = SharedCluster(tmp_path)
    tablet = await cluster.start("one")
    await written(tablet, 0)
    loop, read = asyncio.get_running_loop(), LogTail.read

    def growing(self: LogTail) -> bytearray:
        asyncio.run_coroutine_threadsafe(written(tablet, 0), loop).result()
        return read(self)

    monkeypatch.setattr(LogTail, "read", growing)
    assert tablet.server.shared is not None
    trimmer = trimmer_of(tablet, retained=1)
    assert await trimmer.trim(tablet.server.shared.session) == 0
    assert trimmer.held is not None
    assert "grows faster" in trimmer.held[1]
    monkeypatch.undo()
    assert await trimmer.trim(tablet.server.shared.session) == 9
    await tablet.server.close()
