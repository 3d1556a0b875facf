"""Scans rest while puts come, and only then: between pages, and in flushes for a scan."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from itertools import count, repeat
from pathlib import Path

import pytest

from tests.kv.kv_samples import open_store, put, small_memory
from tests.kv.scan.test_scanner import write
from tests.waiting import WAIT_SECONDS
from zufluss.kv.memory import KvMemory
from zufluss.kv.rest import REST_SECONDS_MAX, YIELD_TO_PUTS, Rests
from zufluss.kv.scan.scanner import Scanner
from zufluss.kv.store import KvStore

ALL = 1 << 40


class Resting:
    """Rests on a clock of its own: a stretch of work takes some seconds, and so many puts come."""

    def __init__(self, puts: Iterable[int], seconds: float = 0.25) -> None:
        self.now = 100.0
        self.slept: list[float] = []
        self._seconds = seconds
        self._puts = iter(puts)
        self._begun = False
        self.rests = Rests(self._count, lambda: self.now, self._sleep)

    def _count(self) -> int:
        """Asked for at the begin of a stretch, and at its end."""
        if not self._begun:
            self.now += self._seconds
        self._begun = not self._begun
        return next(self._puts)

    def _sleep(self, seconds: float) -> None:
        self.slept.append(seconds)
        self.now += seconds


@pytest.fixture
def memory() -> Iterator[KvMemory]:
    memory = small_memory()
    yield memory
    memory.close()


@pytest.fixture
def store(tmp_path: Path, memory: KvMemory) -> Iterator[KvStore]:
    store = open_store(tmp_path / "bucket-0", memory)
    yield store
    store.abandon()


@pytest.fixture
def new_scanner() -> Iterator[Callable[[Rests], Scanner]]:
    made: list[Scanner] = []

    def make(rests: Rests) -> Scanner:
        made.append(Scanner(1, rests))
        return made[-1]

    yield make
    for scanner in made:
        scanner.stop()


def pages(scanner: Scanner, state: Path, number: int) -> list[int]:
    """Read the rows of a state in so many pages of two; how many rows each has."""
    found, after = [], None
    for _ in range(number):
        page = scanner.read(state, after, None, 2, ALL).result(timeout=WAIT_SECONDS)
        found.append(page.values.count)
        after = page.last_key
    return found


def test_a_rest_is_a_share_of_the_stretch_during_which_puts_came() -> None:
    work = Resting([1, 2])
    stretch = work.rests.begin()
    work.rests.wait_until(work.rests.end(stretch))
    assert work.slept == [0.25 * YIELD_TO_PUTS]


def test_there_is_no_rest_when_no_puts_came() -> None:
    work = Resting(repeat(7))
    stretch = work.rests.begin()
    for _ in range(5):
        stretch = work.rests.between(stretch)
    assert work.slept == []


def test_a_rest_after_a_long_stretch_is_bounded() -> None:
    work = Resting([1, 2], seconds=3600)
    stretch = work.rests.begin()
    work.rests.wait_until(work.rests.end(stretch))
    assert work.slept == [REST_SECONDS_MAX]


def test_a_scan_that_was_idle_for_the_time_of_a_rest_does_not_rest() -> None:
    work = Resting([1, 2])
    until = work.rests.end(work.rests.begin())
    work.now = until
    work.rests.wait_until(until)
    assert work.slept == []


def test_a_scan_rests_before_its_next_page_if_puts_came_during_the_last(
    tmp_path: Path, new_scanner: Callable[[Rests], Scanner]
) -> None:
    state = write(tmp_path / "rocks", {b"key-%d" % i: b"value" for i in range(8)})
    work = Resting([1, 2, 2, 2, 2, 5, 5, 5])
    assert pages(new_scanner(work.rests), state, 4) == [2, 2, 2, 2]
    assert work.slept == [0.25 * YIELD_TO_PUTS] * 2, "after the first page and the third"


def test_a_scan_without_puts_does_not_rest(
    tmp_path: Path, new_scanner: Callable[[Rests], Scanner]
) -> None:
    state = write(tmp_path / "rocks", {b"key-%d" % i: b"value" for i in range(8)})
    work = Resting(repeat(0))
    assert pages(new_scanner(work.rests), state, 4) == [2, 2, 2, 2]
    assert work.slept == []


@pytest.mark.parametrize(
    ("puts", "rested"),
    [
        pytest.param(count(), [0.25 * YIELD_TO_PUTS] * 2, id="beside puts, sorting and writing"),
        pytest.param(repeat(0), [], id="without puts"),
    ],
)
def test_a_flush_for_a_scan_rests_beside_puts_only(
    store: KvStore, puts: Iterable[int], rested: list[float]
) -> None:
    put(store, [b"key-%d" % i for i in range(100)], [b"value"] * 100, 0)
    store.horizon = 100
    work = Resting(puts)
    store.flush_begin(100, 100, rests=work.rests)
    store.flush_wait()
    assert store.flushed_offset == 100
    assert work.slept == rested
