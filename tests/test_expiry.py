"""Nothing expires because a wall clock jumped ahead."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from tests.log.disk import SilentFiles
from tests.tablet.keyed import Keyed, serving
from tests.tablet.support import TABLE, Tablet
from zufluss.clock_file import expiry_clock, last_known, remember
from zufluss.errors import ErrorCode
from zufluss.expiry import ExpiryClock

DAY_MS = 24 * 3600 * 1000


class Clocks:
    """A wall clock that can be set, and a monotonic one that cannot."""

    def __init__(self, wall_ms: int = 1000 * DAY_MS) -> None:
        self.wall_ms = wall_ms
        self.monotonic = 50.0

    def expiry(self, last_ms: int | None = None) -> ExpiryClock:
        return ExpiryClock(last_ms, lambda: self.wall_ms, lambda: self.monotonic)

    def go_on(self, seconds: float) -> None:
        self.wall_ms += int(seconds * 1000)
        self.monotonic += seconds


def test_it_follows_the_wall_clock_and_its_small_corrections() -> None:
    clocks = Clocks()
    expiry = clocks.expiry()
    for correction in (0, 5_000, -20_000, 59_000):
        clocks.go_on(300)
        clocks.wall_ms += correction
        assert (expiry.now_ms(), expiry.doubted_ms) == (clocks.wall_ms, 0)


def test_a_machine_that_slept_has_a_clock_that_is_believed(monkeypatch: pytest.MonkeyPatch) -> None:
    """`time.monotonic` stands still while a machine is suspended."""
    clocks = Clocks()
    monkeypatch.setattr(time, "clock_gettime", lambda _: clocks.monotonic)
    expiry = ExpiryClock(None, lambda: clocks.wall_ms)
    clocks.go_on(8 * 3600)
    assert (expiry.now_ms(), expiry.doubted_ms) == (clocks.wall_ms, 0)


def test_a_jump_ahead_that_is_taken_back_is_never_seen() -> None:
    clocks = Clocks()
    expiry = clocks.expiry()
    clocks.go_on(300)
    before = expiry.now_ms()
    clocks.wall_ms += 400 * DAY_MS
    clocks.go_on(3)
    assert expiry.now_ms() == before + 3000
    assert expiry.doubted_ms == 400 * DAY_MS
    clocks.wall_ms -= 400 * DAY_MS
    assert (expiry.now_ms(), expiry.doubted_ms) == (clocks.wall_ms, 0)


def test_a_jump_ahead_is_believed_after_a_steady_hour() -> None:
    clocks = Clocks()
    expiry = clocks.expiry()
    clocks.wall_ms += 400 * DAY_MS
    assert expiry.doubted_ms
    clocks.go_on(1800)
    clocks.wall_ms += 10 * DAY_MS
    assert expiry.doubted_ms == 410 * DAY_MS
    clocks.go_on(3599)
    assert expiry.doubted_ms, "another jump begins another hour"
    clocks.go_on(2)
    assert expiry.now_ms() == clocks.wall_ms


def test_an_operator_confirms_a_jump() -> None:
    clocks = Clocks()
    expiry = clocks.expiry()
    clocks.wall_ms += 400 * DAY_MS
    assert expiry.doubted_ms
    expiry.confirm()
    clocks.go_on(60)
    assert expiry.now_ms() == clocks.wall_ms


def test_a_jump_back_is_followed_and_so_is_its_end() -> None:
    clocks = Clocks()
    expiry = clocks.expiry()
    clocks.wall_ms -= 400 * DAY_MS
    assert expiry.now_ms() == clocks.wall_ms
    clocks.go_on(10)
    clocks.wall_ms += 400 * DAY_MS
    assert (expiry.now_ms(), expiry.doubted_ms) == (clocks.wall_ms, 0)


def test_a_start_with_a_date_far_ahead_expires_nothing_at_first() -> None:
    clocks = Clocks()
    assert clocks.expiry(clocks.wall_ms - 600_000).now_ms() == clocks.wall_ms, "a short restart"
    last_ms = clocks.wall_ms - 400 * DAY_MS
    expiry = clocks.expiry(last_ms)
    assert expiry.now_ms() == last_ms
    clocks.go_on(3601)
    assert expiry.now_ms() == clocks.wall_ms


async def test_the_time_is_remembered_in_the_data_directory(tmp_path: Path) -> None:
    assert last_known(tmp_path) is None
    files = SilentFiles()
    async with expiry_clock(tmp_path, files) as clock:
        began = clock.now_ms()
    known = last_known(tmp_path)
    assert known is not None
    assert known >= began
    (tmp_path / "clock").write_text("nonsense")
    assert last_known(tmp_path) is None
    remember(tmp_path, files, clock)
    assert last_known(tmp_path)


async def test_a_clock_400_days_ahead_deletes_no_segment(tmp_path: Path) -> None:
    clocks = Clocks()
    tablet = Tablet(tmp_path, buckets=1, expiry_ms=clocks.expiry().now_ms)
    await tablet.start()
    tablet.now_ms = clocks.wall_ms
    for _ in range(5):
        connection, sent = await tablet.produce(0)
        assert await connection.produced(sent) == [(0, 0)]
        log = tablet.server.buckets.replica(TABLE, None, 0).log
        log.roll()
    clocks.wall_ms += 400 * DAY_MS
    clocks.go_on(3)
    tablet.server._expire_data()
    assert len(log.segments) == 6
    clocks.wall_ms -= 400 * DAY_MS
    clocks.go_on(8 * DAY_MS / 1000)
    tablet.server._expire_data()
    assert log.log_start_offset == 15, "what is really old goes"
    await tablet.server.close()


async def test_a_clock_400_days_ahead_hides_no_gap_of_a_writer_of_a_log(tmp_path: Path) -> None:
    clocks = Clocks()
    tablet = Tablet(tmp_path, buckets=1, expiry_ms=clocks.expiry().now_ms)
    await tablet.start()

    async def send(sequence: int) -> int:
        tablet.now_ms = clocks.wall_ms
        connection, sent = await tablet.produce(0, writer_id=5, sequence=sequence)
        ((_, code),) = await connection.produced(sent)
        return code

    assert await send(0) == 0
    clocks.wall_ms += 400 * DAY_MS
    assert await send(2) == ErrorCode.OUT_OF_ORDER_SEQUENCE_EXCEPTION
    assert await send(1) == 0
    clocks.wall_ms -= 400 * DAY_MS
    assert await send(3) == ErrorCode.OUT_OF_ORDER_SEQUENCE_EXCEPTION
    await tablet.server.close()


async def test_a_clock_400_days_ahead_hides_no_gap_of_a_writer_of_rows(tmp_path: Path) -> None:
    clocks = Clocks()
    tablet = Keyed(tmp_path, expiry_ms=clocks.expiry().now_ms)
    tablet.now_ms = clocks.wall_ms
    async with serving(tablet):
        await tablet.put((1, "one"), writer_id=5, sequence=0)
        tablet.now_ms = clocks.wall_ms = clocks.wall_ms + 400 * DAY_MS
        with pytest.raises(AssertionError, match="batch sequence 2 of writer 5"):
            await tablet.put((1, "three"), writer_id=5, sequence=2)
        await tablet.put((2, "of another writer"))
        tablet.now_ms = clocks.wall_ms = clocks.wall_ms - 400 * DAY_MS
        with pytest.raises(AssertionError, match="batch sequence 2 of writer 5"):
            await tablet.put((1, "three"), writer_id=5, sequence=2)
        await tablet.put((1, "two"), writer_id=5, sequence=1)
