"""States of a bucket that are kept for scans: what they hold, who shares them, when they go."""

from __future__ import annotations

import asyncio
import random
import tempfile
import threading
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.counts import rounds
from tests.tablet.gateway import Gateway
from tests.tablet.keyed import Keyed, keyed, many
from tests.tablet.support import TABLE
from tests.waiting import WAIT_SECONDS
from zufluss.cluster.replicas import ReplicaStop
from zufluss.errors import InvalidScanRequestError, UnknownTableOrBucketError
from zufluss.kv.rest import Rests
from zufluss.model.table import TableBucket
from zufluss.tablet.scan.states import PAGES_MAX, PinnedState

ALL = 1 << 40
EXAMPLES = rounds(25, 1_000)

PageRows = list[tuple[int, str]]


@pytest.fixture
async def tablet(tmp_path: Path) -> AsyncIterator[Keyed]:
    async with keyed(tmp_path) as tablet:
        yield tablet


async def opened(tablet: Keyed) -> PinnedState:
    return await tablet.server.pin_states.open_state(tablet.replica())


async def rows_of(tablet: Keyed, state: PinnedState, rows: int = ALL, size: int = ALL) -> PageRows:
    """All rows, page by page, in the order they come."""
    found: list[tuple[int, str]] = []
    after = None
    while True:
        page = await state.page(after, None, rows, size)
        assert page is not None
        found += [
            (row[0], row[1]) for v in page.values.tolist() if (row := tablet.codec.value(v or b""))
        ]
        after = page.last_key
        if page.done:
            return found


async def sorted_rows(tablet: Keyed) -> PageRows:
    """What is visible now, in the order of the keys."""
    rows = await tablet.rows()
    return sorted(rows.items(), key=lambda row: tablet.codec.key((row[0],)))


def directories(tablet: Keyed) -> list[str]:
    pins = tablet.kv_directory() / "pins"
    return sorted(p.name for p in pins.iterdir()) if pins.is_dir() else []


async def test_a_state_is_what_was_visible_when_it_was_opened(tablet: Keyed) -> None:
    await tablet.put(*many(0, 300), (7, None))
    before = await sorted_rows(tablet)
    state = await opened(tablet)
    assert state.log_offset == tablet.replica().log.high_watermark
    assert state.rows == 299
    await tablet.put(*many(0, 300, "changed"), (7, "again"), *((i, None) for i in range(100, 200)))
    later = await opened(tablet)
    await tablet.put(*((i, None) for i in range(300)))
    await tablet.server.kv.call(tablet.replica().tablet.store._cold.rewrite)
    assert await rows_of(tablet, state, rows=11) == before
    assert len(before) == 299
    assert len(await rows_of(tablet, later, size=400)) == 200
    assert later.log_offset > state.log_offset
    assert await rows_of(tablet, await opened(tablet)) == []


async def test_an_empty_bucket_has_a_state_too(tablet: Keyed) -> None:
    state = await opened(tablet)
    assert (state.log_offset, state.rows) == (0, 0)
    page = await state.page(None, None, ALL, ALL)
    assert page is not None
    assert (page.values.count, page.last_key, page.done) == (0, None, True)
    await state.release()
    assert directories(tablet) == []


async def test_who_opens_the_same_moment_shares_one_state(tablet: Keyed) -> None:
    await tablet.put(*many(0, 50))
    first, second, third = await asyncio.gather(*(opened(tablet) for _ in range(3)))
    assert first is second is third
    await first.release()
    await second.release()
    assert len(await rows_of(tablet, third)) == 50, "somebody still has it"
    assert directories(tablet) == ["50"]
    await third.release()
    assert directories(tablet) == []
    again = await opened(tablet)
    assert again is not first
    assert len(await rows_of(tablet, again)) == 50


async def test_a_state_that_is_opened_while_it_goes_is_made_anew(tablet: Keyed) -> None:
    await tablet.put(*many(0, 50))
    state = await opened(tablet)
    gone = asyncio.create_task(state.release())
    await asyncio.sleep(0)
    again = await opened(tablet)
    await gone
    assert again is not state
    assert directories(tablet) == ["50"]
    assert len(await rows_of(tablet, again)) == 50


async def test_a_page_that_takes_long_is_had_by_asking_again(tablet: Keyed) -> None:
    await tablet.put(*many(0, 50))
    state = await opened(tablet)
    assert await state.page(None, None, 10, ALL, wait=0) is None
    page = await state.page(None, None, 10, ALL, wait=30)
    assert page is not None
    assert page.values.count == 10
    assert await state.page(page.last_key, None, 10, ALL, wait=0) is None
    other = await state.page(None, None, 5, ALL)
    assert other is not None
    assert other.values.count == 5


async def test_a_scan_that_rests_for_puts_keeps_the_time_limit_of_a_call(
    tablet: Keyed, monkeypatch: pytest.MonkeyPatch
) -> None:
    resting, rested = threading.Event(), threading.Event()

    def rest(self: Rests, when: float) -> None:
        resting.set()
        assert rested.wait(WAIT_SECONDS)

    await tablet.put(*many(0, 50))
    state = await opened(tablet)
    monkeypatch.setattr(Rests, "wait_until", rest)
    assert await state.page(None, None, 10, ALL, wait=0) is None
    assert await asyncio.to_thread(resting.wait, 60)
    assert await state.page(None, None, 10, ALL, wait=0.01) is None
    rested.set()
    page = await state.page(None, None, 10, ALL)
    assert page is not None
    assert page.values.count == 10


async def test_scans_see_that_puts_are_worked_out_and_that_none_are(tablet: Keyed) -> None:
    await tablet.put(*many(0, 50))
    state, rests = await opened(tablet), tablet.server.pin_states.rests
    stretch = rests.begin()
    await rows_of(tablet, state, rows=5)
    await (await opened(tablet)).release()
    await tablet.rows()
    assert rests.begin().puts == stretch.puts, "who reads is no reason to rest"
    await tablet.put(*many(0, 50))
    assert rests.begin().puts != stretch.puts


async def test_the_same_question_at_the_same_time_is_read_once(
    tablet: Keyed, monkeypatch: pytest.MonkeyPatch
) -> None:
    await tablet.put(*many(0, 50))
    state, scanner = await opened(tablet), tablet.server.pin_states.scanner
    asked: list[Any] = []
    read = scanner.read

    def noted(*question: Any) -> Any:
        asked.append(question)
        return read(*question)

    monkeypatch.setattr(scanner, "read", noted)
    pages = await asyncio.gather(*(state.page(None, None, 10, ALL) for _ in range(5)))
    assert len(asked) == 1
    assert all(page is not None and page.values.count == 10 for page in pages)


async def test_pages_that_nobody_comes_for_are_bounded(tablet: Keyed) -> None:
    """Who asks and does not wait would have any number of pages read into memory."""
    await tablet.put(*many(0, 50))
    state, pages = await opened(tablet), tablet.server.pin_states.pages
    for count in range(1, 5 * PAGES_MAX):
        assert await state.page(None, None, count, ALL, wait=0) is None
        assert len(pages) <= PAGES_MAX
    page = await state.page(None, None, 7, ALL)
    assert page is not None
    assert page.values.count == 7
    other = asyncio.gather(*(state.page(None, None, n, ALL) for n in range(1, 3 * PAGES_MAX)))
    assert [p and p.values.count for p in await other] == [
        min(n, 50) for n in range(1, 3 * PAGES_MAX)
    ]
    assert len(pages) <= PAGES_MAX


async def test_files_go_after_the_pages_that_are_being_read(tablet: Keyed) -> None:
    await tablet.put(*many(0, 5_000))
    state = await opened(tablet)
    reading = asyncio.create_task(state.page(None, None, ALL, ALL))
    await asyncio.sleep(0)
    await state.release()
    page = await reading
    assert page is not None
    assert page.values.count == 5_000
    assert directories(tablet) == []


async def test_who_gives_up_while_a_state_is_made_leaves_nothing(tablet: Keyed) -> None:
    for turns in range(12):
        await tablet.put((turns, "row"))
        making = asyncio.create_task(opened(tablet))
        for _ in range(turns):
            await asyncio.sleep(0)
        making.cancel()
        await asyncio.gather(making, return_exceptions=True)
    states = tablet.server.pin_states
    while states._making or states._states or states._ending:
        await asyncio.sleep(0.001)
    assert directories(tablet) == []


async def test_a_dropped_bucket_takes_its_states_with_it(tablet: Keyed) -> None:
    await tablet.put(*many(0, 5_000))
    state = await opened(tablet)
    first = await state.page(None, None, 1, ALL)
    assert first is not None
    reading = asyncio.create_task(state.page(first.last_key, None, ALL, ALL))
    await asyncio.sleep(0)
    directory = tablet.kv_directory()
    await tablet.drop(0)
    page = await reading
    assert page is not None
    assert page.values.count == 4_999, "what was under way finishes"
    with pytest.raises(UnknownTableOrBucketError, match="stopped"):
        await state.page(None, None, ALL, ALL)
    await state.release()
    await tablet.server.kv.call(lambda: None)
    assert not directory.exists()


async def test_a_bucket_that_stops_ends_what_is_being_made_of_it(tablet: Keyed) -> None:
    await tablet.put(*many(0, 100))
    making = asyncio.create_task(opened(tablet))
    await asyncio.sleep(0)
    await tablet.server.stop_replicas([ReplicaStop(TableBucket(TABLE, None, 0), 0, False)])
    with pytest.raises(UnknownTableOrBucketError):
        await making


async def test_a_server_that_stops_ends_pages_and_leaves_states(tmp_path: Path) -> None:
    gateway = Gateway()
    async with keyed(tmp_path, gateway=gateway) as tablet:
        await tablet.put(*many(0, 5_000))
        state = await opened(tablet)
        reading = [asyncio.create_task(state.page(None, None, n, ALL)) for n in range(1, 30)]
        await asyncio.sleep(0)
    for outcome in await asyncio.gather(*reading, return_exceptions=True):
        assert not isinstance(outcome, asyncio.CancelledError)
    with pytest.raises(UnknownTableOrBucketError):
        await state.page(None, None, ALL, ALL)
    assert directories(tablet) == ["5000"]


async def test_a_state_is_found_again_after_a_restart_and_goes_when_nobody_asks(
    tmp_path: Path,
) -> None:
    conf = {"kv.scanner.ttl": "1h"}
    async with keyed(tmp_path, conf=conf) as tablet:
        await tablet.put(*many(0, 100))
        await opened(tablet)
        await tablet.put(*many(0, 100, "changed"))
        (tablet.kv_directory() / "pins" / "9.new").mkdir()
    async with keyed(tmp_path, conf=conf) as tablet:
        assert directories(tablet) == ["100"]
        states = tablet.server.pin_states
        found = await states.rebuild_state(tablet.replica(), 100)
        assert [row[1] for row in await rows_of(tablet, found)] == [f"text {i}" for i in range(100)]
        assert found.rows == 100
        await found.release()
        assert directories(tablet) == []
        await opened(tablet)
        assert directories(tablet) == ["300"]
    async with keyed(tmp_path, conf=conf) as tablet:
        states, replica = tablet.server.pin_states, tablet.replica()
        used = await states.open_state(replica)
        assert directories(tablet) == ["300"], "what is there is used"
        await tablet.put((1, "new"))
        await states.open_state(replica)
    async with keyed(tmp_path, conf={"kv.scanner.ttl": "1ms"}) as tablet:
        states, replica = tablet.server.pin_states, tablet.replica()
        while replica in states._timers or directories(tablet):
            await asyncio.sleep(0.001)
    assert used.log_offset == 300


async def test_a_left_state_that_the_log_does_not_reach_is_removed(tmp_path: Path) -> None:
    """Other changes get its offsets: whoever asks for them must not get these rows."""
    async with keyed(tmp_path) as tablet:
        await tablet.put(*many(0, 100))
        await opened(tablet)
    (tablet.kv_directory() / "pins" / "100").rename(tablet.kv_directory() / "pins" / "101")
    async with keyed(tmp_path) as tablet:
        while directories(tablet):
            await asyncio.sleep(0.001)
        with pytest.raises(InvalidScanRequestError, match="no state at offset 101"):
            await tablet.server.pin_states.rebuild_state(tablet.replica(), 101)


async def test_a_snapshot_and_a_state_are_taken_at_the_same_time(tmp_path: Path) -> None:
    gateway = Gateway()
    async with keyed(tmp_path, gateway=gateway) as tablet:
        await tablet.put(*many(0, 500))
        _, state, taken = await asyncio.gather(
            tablet.snapshot(), opened(tablet), tablet.put(*many(500, 600))
        )
        rows = len(await rows_of(tablet, state))
        assert rows == state.rows == state.log_offset
        assert taken is None
        assert directories(tablet) == [str(state.log_offset)]


STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("put"), st.lists(st.integers(0, 30), min_size=1, max_size=8)),
        st.tuples(st.just("delete"), st.lists(st.integers(0, 30), min_size=1, max_size=8)),
        st.tuples(st.just("open"), st.just([])),
        st.tuples(st.just("close"), st.lists(st.integers(0, 9), min_size=1, max_size=1)),
        st.tuples(st.just("page"), st.lists(st.integers(0, 9), min_size=1, max_size=1)),
        st.tuples(st.sampled_from(["flush", "evict", "compact", "snapshot"]), st.just([])),
    ),
    max_size=30,
)


class Scans:
    """Scans of a bucket that go on while it changes."""

    def __init__(self, tablet: Keyed, rng: random.Random) -> None:
        self.tablet = tablet
        self.rng = rng
        self.states: list[PinnedState] = []
        self.wanted: list[PageRows] = []
        self.got: list[PageRows] = []
        self.cursors: list[bytes | None] = []
        self.done: list[bool] = []
        self.count = 0

    async def step(self, name: str, numbers: list[int]) -> None:
        tablet, store = self.tablet, self.tablet.replica().tablet.store
        if name == "put":
            self.count += 1
            await tablet.put(*((n, f"{n} of {self.count}") for n in numbers))
        elif name == "delete":
            await tablet.put(*((n, None) for n in numbers))
        elif name == "open":
            await self.open()
        elif name in ("close", "page") and self.states:
            await (self.close if name == "close" else self.page)(numbers[0] % len(self.states))
        elif name == "flush":
            await tablet.server.kv.call(tablet.replica().tablet.flush)
        elif name == "evict":
            await tablet.server.kv.call(lambda: store.evict(1 << 30))
        elif name == "compact" and not store._cold.empty:
            await tablet.server.kv.call(store._cold.rewrite)
        elif name == "snapshot":
            await tablet.snapshot()

    async def open(self) -> None:
        self.wanted.append(await sorted_rows(self.tablet))
        self.states.append(await opened(self.tablet))
        assert self.states[-1].log_offset == self.tablet.replica().log.high_watermark
        self.got.append([])
        self.cursors.append(None)
        self.done.append(False)

    async def page(self, i: int) -> None:
        if self.done[i]:
            return
        rows, size = self.rng.choice([(1, ALL), (3, ALL), (ALL, 40), (ALL, ALL)])
        page = await self.states[i].page(self.cursors[i], None, rows, size)
        assert page is not None
        codec = self.tablet.codec
        self.got[i] += [(r[0], r[1]) for v in page.values.tolist() if (r := codec.value(v or b""))]
        self.cursors[i], self.done[i] = page.last_key, page.done

    async def close(self, i: int) -> None:
        """Read to the end and let go."""
        while not self.done[i]:
            await self.page(i)
        assert self.got[i] == self.wanted[i]
        await self.states[i].release()
        for part in (self.states, self.wanted, self.got, self.cursors, self.done):
            del part[i]


@settings(
    max_examples=EXAMPLES,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)
@given(STEPS, st.integers(0, 1 << 30))
def test_scans_have_each_key_once_as_it_was_at_their_open(
    steps: list[tuple[str, list[int]]], seed: int
) -> None:
    async def run(root: Path) -> None:
        async with keyed(root) as tablet:
            scans = Scans(tablet, random.Random(seed))
            for name, numbers in steps:
                await scans.step(name, numbers)
            while scans.states:
                await scans.close(0)
            assert directories(tablet) == []

    with tempfile.TemporaryDirectory() as root:
        asyncio.run(run(Path(root)))
