"""Conformance suite of a shared log: a log is right when this class is green for it.

Subclass it in a test module and give a factory of logs over one place that is new for each test;
pytest runs the promises of `zufluss.log.shared.api` against it:

    class TestMyLog(SharedLogConformance):
        @pytest.fixture
        def new_log(self, tmp_path):
            return lambda: MyLog(tmp_path)

Each call of the factory is another server: the logs share the place and nothing else. Sessions
write at once, without an interval. Nothing waits on a clock.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable

import pytest

from zufluss.log.shared.api import (
    LostObject,
    Session,
    SessionFencedError,
    SessionWriter,
    SharedLog,
)
from zufluss.log.shared.tails import SessionTails
from zufluss.model.table import TableBucket
from zufluss.remote.wal import EntryKind, WalName, WalObject

BUCKETS = [TableBucket(1, None, 0), TableBucket(1, None, 1), TableBucket(2, 30, 0)]
OBJECTS = 12


def session(server_epoch: int = 7) -> Session:
    """A session of a server."""
    return Session("0123456789abcdef" * 2, 1, server_epoch)


def rows(bucket: TableBucket, first: int, end: int) -> bytes:
    """Bytes that only this range of this bucket has."""
    return b"".join(f"{bucket}:{offset};".encode() for offset in range(first, end))


class WrittenSession:
    """A session, and what it was told."""

    def __init__(self, log: SharedLog, of: Session) -> None:
        self.of = of
        self.ends = dict.fromkeys(BUCKETS, 0)
        """Ends of what was appended."""
        self.durable = dict.fromkeys(BUCKETS, 0)
        """Ends of what was reported durable."""
        self.fenced: list[SessionFencedError] = []
        self._changed = asyncio.Event()
        self.writer: SessionWriter = log.begin(of, self._on_durable, self._on_fenced)

    def _on_durable(self, ends: list[tuple[TableBucket, int]]) -> None:
        assert not self.fenced, "something was acknowledged after the session was fenced"
        for bucket, end in ends:
            assert end >= self.durable[bucket], "durable ends went back"
            self.durable[bucket] = end
        self._changed.set()

    def _on_fenced(self, error: SessionFencedError) -> None:
        self.fenced.append(error)
        self._changed.set()

    def append(self, bucket: TableBucket, count: int = 3, leader_epoch: int = 1) -> None:
        """Append so many rows."""
        first = self.ends[bucket]
        end = self.ends[bucket] = first + count
        self.writer.append(bucket, leader_epoch, first, end, rows(bucket, first, end))

    async def expect_fence(self) -> None:
        """Wait until the session is fenced; it must be before all it appended is durable."""
        await self.settle()
        assert self.fenced, "an append was acknowledged behind the end of its session"

    async def until(self, condition: Callable[[], bool]) -> None:
        """Wait for something that the session is told."""
        while not condition():
            self._changed.clear()
            await self._changed.wait()

    async def settle(self) -> None:
        """Wait until everything is durable, or the session is fenced."""
        await self.until(lambda: self.durable == self.ends or bool(self.fenced))

    async def fill(self, objects: int = OBJECTS) -> None:
        """Write so many objects, each with entries of all buckets."""
        for _ in range(objects):
            for bucket in BUCKETS:
                self.append(bucket)
            await self.settle()


async def read_back(
    log: SharedLog, of: Session, floor: int, end: int | None, starts: dict[TableBucket, int]
) -> tuple[SessionTails, dict[TableBucket, bytes]]:
    """Read a session; return its buckets and their rows from `starts` on."""
    tails, data = SessionTails(starts), dict.fromkeys(starts, b"")
    reached = dict(starts)
    async for read in log.read(of, floor, end):
        for piece in tails.add(read):
            new = rows(piece.bucket, reached[piece.bucket], piece.end_offset)
            assert bytes(piece.batches).endswith(new), "other bytes than were appended"
            data[piece.bucket] += new
            reached[piece.bucket] = piece.end_offset
    return tails, data


class SharedLogConformance:
    """The promises of `zufluss.log.shared.api` as tests. Subclass and give `new_log`."""

    @pytest.fixture
    def new_log(self) -> Callable[[], SharedLog]:
        """Returns another server's log over the place of this test."""
        raise NotImplementedError("the fixture `new_log` gives a factory of the logs under test")

    @pytest.fixture
    async def log(self, new_log: Callable[[], SharedLog]) -> SharedLog:
        """The log of the server that writes."""
        return new_log()

    @pytest.fixture
    async def other(self, new_log: Callable[[], SharedLog]) -> SharedLog:
        """The log of the coordinator, and of the next leader."""
        return new_log()

    @pytest.fixture
    async def written(self, log: SharedLog) -> AsyncIterator[WrittenSession]:
        """A session that nothing was appended to."""
        written = WrittenSession(log, session())
        yield written
        await written.writer.stop()

    async def test_the_place_can_be_trusted(self, log: SharedLog) -> None:
        """Nothing below is worth anything without this."""
        await log.probe()

    async def test_what_was_reported_durable_is_read_by_others(
        self, written: WrittenSession, other: SharedLog
    ) -> None:
        """An acknowledged row is there, with its bytes, for a server that never met its writer."""
        await written.fill()
        tails, data = await read_back(other, written.of, 0, None, dict.fromkeys(BUCKETS, 0))
        assert tails.end_offsets == written.durable == written.ends
        assert tails.lost == {}
        assert data == {bucket: rows(bucket, 0, written.ends[bucket]) for bucket in BUCKETS}

    async def test_one_object_has_the_entries_of_all_buckets(
        self, written: WrittenSession, other: SharedLog
    ) -> None:
        """Otherwise the number of puts would grow with the number of buckets."""
        for bucket in BUCKETS:
            for _ in range(10):
                written.append(bucket)
        await written.settle()
        objects = [read async for read in other.read(written.of, 0, None)]
        assert len(objects) == 1
        assert isinstance(objects[0], WalObject)
        assert [entry.bucket for entry in objects[0].entries] == BUCKETS

    async def test_a_seal_ends_the_session_behind_what_is_durable(
        self, written: WrittenSession, other: SharedLog
    ) -> None:
        """The new leader must have everything that the old one acknowledged."""
        await written.fill()
        end = await other.seal(written.of, 0, 1)
        tails, _ = await read_back(other, written.of, 0, end, dict.fromkeys(BUCKETS, 0))
        assert (tails.end_offsets, tails.lost) == (written.durable, {})

    async def test_nothing_is_acknowledged_after_the_seal(
        self, written: WrittenSession, other: SharedLog
    ) -> None:
        """A server that was only paused must not acknowledge what its successor does not have."""
        await written.fill(3)
        end = await other.seal(written.of, 0, 1)
        durable = dict(written.durable)
        written.append(BUCKETS[0])
        await written.expect_fence()
        assert written.durable == durable
        with pytest.raises(SessionFencedError):
            written.append(BUCKETS[0])
        tails, _ = await read_back(other, written.of, 0, end, dict.fromkeys(BUCKETS, 0))
        assert tails.end_offsets == durable

    async def test_a_seal_under_load_loses_nothing_that_was_acknowledged(
        self, new_log: Callable[[], SharedLog]
    ) -> None:
        """The seal meets puts at every stage of their way."""
        for epoch in range(20, 30):
            written = WrittenSession(new_log(), session(epoch))

            async def write(written: WrittenSession = written) -> None:
                while not written.fenced:
                    for bucket in BUCKETS:
                        written.append(bucket)
                    await asyncio.sleep(0)

            writing = asyncio.create_task(write())
            await written.until(lambda w=written: w.durable[BUCKETS[0]] > 0)  # type: ignore[misc]
            end = await new_log().seal(written.of, 0, 1)
            await asyncio.wait([writing])
            assert isinstance(writing.exception(), SessionFencedError | None)
            tails, _ = await read_back(new_log(), written.of, 0, end, dict.fromkeys(BUCKETS, 0))
            assert tails.lost == {}
            assert all(tails.end_offsets[b] >= written.durable[b] for b in BUCKETS)
            await written.writer.stop()

    async def test_all_sealers_find_the_same_end(
        self, written: WrittenSession, new_log: Callable[[], SharedLog]
    ) -> None:
        """Two coordinators may seal at once, and one that died half-way is repeated."""
        await written.fill(4)
        ends = await asyncio.gather(*(new_log().seal(written.of, 0, 1) for _ in range(4)))
        ends.append(await new_log().seal(written.of, 0, 2))
        assert len(set(ends)) == 1

    async def test_an_empty_session_is_sealed_at_its_beginning(
        self, written: WrittenSession, other: SharedLog
    ) -> None:
        """A server may die before it writes anything."""
        assert await other.seal(written.of, 0, 1) == 0
        written.append(BUCKETS[0])
        await written.expect_fence()
        assert [read async for read in other.read(written.of, 0, 0)] == []

    async def test_a_closed_session_needs_no_seal(
        self, written: WrittenSession, other: SharedLog
    ) -> None:
        """A controlled shutdown leaves an end that everybody finds."""
        await written.fill(2)
        written.append(BUCKETS[0])
        await written.writer.close()
        assert written.durable == written.ends
        end = await other.seal(written.of, 0, 1)
        tails, _ = await read_back(other, written.of, 0, end, dict.fromkeys(BUCKETS, 0))
        assert tails.end_offsets == written.ends

    async def test_a_session_cannot_be_closed_after_its_seal(
        self, written: WrittenSession, other: SharedLog
    ) -> None:
        """Who closes must know whether somebody else took over."""
        await written.fill(1)
        await other.seal(written.of, 0, 1)
        with pytest.raises(SessionFencedError):
            await written.writer.close()

    async def test_trimming_deletes_below_the_floor_and_nothing_else(
        self, written: WrittenSession, log: SharedLog, other: SharedLog
    ) -> None:
        """A reader needs everything from the floor on."""
        await written.fill()
        starts = dict.fromkeys(BUCKETS, 3 * 5)
        assert await log.trim(written.of, 5) == 5
        assert await log.trim(written.of, 5) == 0
        first = [read async for read in other.read(written.of, 4, 5)]
        assert first == [LostObject(WalName(7, 4), "the object is missing")]
        await written.fill(1)
        end = await other.seal(written.of, 5, 1)
        tails, _ = await read_back(other, written.of, 5, end, starts)
        assert (tails.end_offsets, tails.lost) == (written.durable, {})

    async def test_a_carried_tail_replaces_what_is_trimmed(
        self, written: WrittenSession, log: SharedLog, other: SharedLog
    ) -> None:
        """A slow bucket costs no segment of its own for each trim."""
        await written.fill(4)
        for bucket in BUCKETS:
            end = written.ends[bucket]
            written.writer.append(bucket, 1, 2, end, rows(bucket, 2, end), EntryKind.CARRY)
        await written.fill(2)
        await log.trim(written.of, 4)
        end = await other.seal(written.of, 4, 1)
        tails, _ = await read_back(other, written.of, 4, end, dict.fromkeys(BUCKETS, 2))
        assert (tails.end_offsets, tails.lost) == (written.durable, {})

    async def test_a_seal_survives_every_trim(
        self, written: WrittenSession, other: SharedLog
    ) -> None:
        """A late put that finds the name of the seal free would be acknowledged."""
        await written.fill(3)
        end = await other.seal(written.of, 0, 1)
        await other.trim(written.of, end + 100)
        written.append(BUCKETS[0])
        await written.expect_fence()
        assert written.durable != written.ends
        assert await other.seal(written.of, end, 2) == end

    async def test_sessions_do_not_know_each_other(self, new_log: Callable[[], SharedLog]) -> None:
        """The seal of one must not end another."""
        sessions = [WrittenSession(new_log(), session(epoch)) for epoch in (1, 2, 3)]
        for each in sessions:
            await each.fill(2)
        await new_log().seal(sessions[1].of, 0, 1)
        await sessions[0].fill(1)
        await sessions[2].fill(1)
        assert [bool(each.fenced) for each in sessions] == [False, False, False]
        for each in (sessions[0], sessions[2]):
            tails, _ = await read_back(new_log(), each.of, 0, None, dict.fromkeys(BUCKETS, 0))
            assert tails.end_offsets == each.durable
        for each in sessions:
            await each.writer.stop()

    async def test_a_session_that_stops_may_be_read(
        self, written: WrittenSession, other: SharedLog
    ) -> None:
        """A killed server leaves puts under way; what it acknowledged is there."""
        await written.fill(2)
        durable = dict(written.durable)
        written.append(BUCKETS[0])
        await asyncio.sleep(0)
        await written.writer.stop()
        assert written.durable == durable
        end = await other.seal(written.of, 0, 1)
        tails, _ = await read_back(other, written.of, 0, end, dict.fromkeys(BUCKETS, 0))
        assert tails.lost == {}
        assert all(tails.end_offsets[bucket] >= durable[bucket] for bucket in BUCKETS)
