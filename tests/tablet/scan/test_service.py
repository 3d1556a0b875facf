"""Scans of a tablet server where time, leaders and files are the test's to change."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from functools import reduce
from operator import or_
from pathlib import Path
from typing import Any

import pytest

from tests.end_to_end.scans import (
    arrow_of,
    close_request,
    next_request,
    open_request,
    page_request,
    pin_request,
    rows_of,
)
from tests.tablet.keyed import KEYED, Keyed, many, serving
from tests.tablet.support import TABLE
from tests.waiting import WAIT_SECONDS
from zufluss.cluster.replicas import assignments
from zufluss.errors import (
    AuthorizationError,
    ErrorCode,
    InvalidScanRequestError,
    KvScanBusyError,
    KvScanExpiredError,
    LogStorageError,
    NotLeaderError,
    UnknownTableOrBucketError,
    ZuflussError,
)
from zufluss.model.expression import col
from zufluss.model.table import TablePath
from zufluss.net.services import RequestContext
from zufluss.obs import metrics
from zufluss.tablet.samples import tablet_samples
from zufluss.tablet.scan.rebuild import Rebuilder
from zufluss.tablet.scan.rows import RowReader
from zufluss.tablet.scan.service import CALLS_MAX
from zufluss.tablet.scan.sessions import ScanSessions
from zufluss.tablet.scan.states import PinnedState
from zufluss.wire import messages as m

IDLE, AGE = 60, 600
LIMITS = {
    "kv.scanner.ttl": f"{IDLE}s",
    "zufluss.kv.scanner.age-max": f"{AGE}s",
    "zufluss.kv.scanner.time-limit": "20s",
}


class Scans:
    """The scan handlers of a server, with a clock of their own."""

    def __init__(self, root: Path, **options: Any) -> None:
        self.now = 0.0
        self.readers = {None, "alice", "bob"}
        self.tablet = Keyed(root, may_read=self._may_read, monotonic=lambda: self.now, **options)
        self.service = self.tablet.server.scans
        self.sessions = ScanSessions(self.service)
        self.pins = self.service.pins

    def _may_read(self, principal: str | None, path: TablePath) -> bool:
        assert path == TablePath("db", "t")
        return principal in self.readers

    async def open(
        self, *buckets: int, who: str | None = None, at: list[int | None] | None = None
    ) -> list[m.PbPin]:
        request = pin_request(TABLE, buckets or (0,), at)
        return list((await self.service.open_kv_snapshot(request, context(who))).pins)

    async def page(
        self, pin: m.PbPin, bucket: int = 0, *, who: str | None = None, **options: Any
    ) -> m.ScanKvSnapshotResponse:
        request = page_request(TABLE, pin.pin_id, bucket, schema=KEYED, **options)
        return await self.service.scan_kv_snapshot(request, context(who))

    async def close(self, *pins: m.PbPin, who: str | None = None) -> None:
        request = m.CloseKvSnapshotRequest(pin_ids=[pin.pin_id for pin in pins])
        await self.service.close_kv_snapshot(request, context(who))

    async def scan(self, request: m.ScanKvRequest, who: str | None = None) -> m.ScanKvResponse:
        return await self.sessions.scan_kv(request, context(who))

    def pin_directories(self, bucket: int = 0) -> list[str]:
        found = self.tablet.kv_directory(bucket) / "pins"
        return sorted(p.name for p in found.iterdir()) if found.is_dir() else []

    async def settled(self, *expected: str) -> None:
        """Wait until these states and no others are on the disk."""
        async with asyncio.timeout(WAIT_SECONDS):
            while self.pin_directories() != [*expected]:
                await asyncio.sleep(0.01)


def context(principal: str | None = None) -> RequestContext:
    return RequestContext(principal, "CLIENT", 0, "test")


@asynccontextmanager
async def scanning(root: Path, **options: Any) -> AsyncIterator[Scans]:
    conf = {**LIMITS, **options.pop("conf", {})}
    scans = Scans(root, conf=conf, **options)
    async with serving(scans.tablet) as tablet:
        await tablet.put(*many(0, 20))
        yield scans


async def code_of(work: Any) -> ErrorCode:
    with pytest.raises(ZuflussError) as caught:
        await work
    return caught.value.code


# -- how long a pin lives -----------------------------------------------------------------------


async def test_a_pin_works_until_its_idle_time_is_over_and_frees_its_files(tmp_path: Path) -> None:
    """The next call after the end fails, though no sweep ran."""
    async with scanning(tmp_path) as scans:
        (pin,) = await scans.open()
        for _ in range(3):
            scans.now += IDLE - 1
            assert (await scans.page(pin)).rows == 20
        scans.now += IDLE + 1
        assert await code_of(scans.page(pin)) is ErrorCode.SCANNER_EXPIRED
        assert len(scans.pins) == 0
        await scans.settled()


async def test_a_scan_of_fluss_works_until_its_idle_time_is_over(tmp_path: Path) -> None:
    async with scanning(tmp_path) as scans:
        first = await scans.scan(open_request(TABLE, size=1))
        scans.now += IDLE - 1
        again = await scans.scan(next_request(first.scanner_id, 0, 1))
        assert again == first, "a repeated call is a use"
        scans.now += IDLE - 1
        assert not (await scans.scan(next_request(first.scanner_id, 1, 1))).error_code
        scans.now += IDLE
        answer = await scans.scan(next_request(first.scanner_id, 2, 1))
        assert answer.error_code == ErrorCode.SCANNER_EXPIRED
        assert f"{IDLE} s" in answer.error_message
        await scans.settled()


@pytest.mark.parametrize(
    "wrong", [{"size": 0}, {"limit": -1}, {"schema_id": 9}, {"projected_columns": [7]}]
)
async def test_a_malformed_request_does_not_keep_a_pin_alive(
    tmp_path: Path, wrong: dict[str, Any]
) -> None:
    async with scanning(tmp_path) as scans:
        (pin,) = await scans.open()
        scans.now += IDLE - 1
        await code_of(scans.page(pin, **wrong))
        scans.now += 1
        assert await code_of(scans.page(pin)) is ErrorCode.SCANNER_EXPIRED


async def test_a_call_out_of_order_does_not_keep_a_scan_alive(tmp_path: Path) -> None:
    async with scanning(tmp_path) as scans:
        first = await scans.scan(open_request(TABLE, size=1))
        scans.now += IDLE - 1
        wrong = [next_request(first.scanner_id, 5), next_request(first.scanner_id, 1, 0)]
        assert [(await scans.scan(w)).error_code for w in wrong] == [68, 68]
        scans.now += 1
        assert (await scans.scan(next_request(first.scanner_id, 1))).error_code == 66


async def test_an_active_scan_ends_at_the_age_that_is_allowed(tmp_path: Path) -> None:
    async with scanning(tmp_path) as scans:
        (pin,) = await scans.open()
        assert (pin.idle_ms, pin.remaining_ms) == (IDLE * 1000, AGE * 1000)
        while scans.now < AGE - 30:
            scans.now += 30
            await scans.page(pin, limit=1)
        scans.now += 30
        with pytest.raises(KvScanExpiredError, match="age-max"):
            await scans.page(pin)


async def test_a_client_that_was_killed_holds_its_state_for_the_idle_time(tmp_path: Path) -> None:
    """The sweep frees it; until then others share it."""
    async with scanning(tmp_path) as scans:
        await scans.open()
        await scans.open()
        await scans.scan(open_request(TABLE, size=1))
        assert scans.pin_directories() == ["20"], "one state for all three"
        scans.now += IDLE
        scans.pins.sweep()
        await scans.settled()


async def test_the_sweep_runs_by_itself(tmp_path: Path) -> None:
    async with scanning(tmp_path, conf={"kv.scanner.expiration-interval": "10ms"}) as scans:
        await scans.open()
        scans.now += IDLE
        await scans.settled()


async def test_closing_frees_the_files_when_the_last_one_has_closed(tmp_path: Path) -> None:
    async with scanning(tmp_path) as scans:
        (a,), (b,) = await scans.open(), await scans.open()
        await scans.tablet.put((1, "changed"))
        (later,) = await scans.open()
        assert (a.log_offset, b.log_offset, later.log_offset) == (20, 20, 22)
        await scans.close(a)
        assert arrow_of(await scans.page(b), KEYED.arrow).column("text")[1].as_py() == "text 1"
        await scans.close(b)
        await scans.settled("22")
        await scans.close(later, a)
        await scans.settled()


async def test_states_are_opened_while_they_are_being_removed(tmp_path: Path) -> None:
    """Several clients open and close the same state again and again; each gets its rows."""
    async with scanning(tmp_path) as scans:

        async def client(turns: int) -> None:
            for _ in range(30):
                (pin,) = await scans.open()
                assert (await scans.page(pin)).rows == 20
                await scans.close(pin)
                for _ in range(turns):
                    await asyncio.sleep(0)

        async with asyncio.timeout(WAIT_SECONDS):
            await asyncio.gather(*map(client, range(5)))
        await scans.settled()


# -- buckets that end ---------------------------------------------------------------------------


async def test_a_new_leader_epoch_ends_the_pins_and_they_do_not_come_back(tmp_path: Path) -> None:
    async with scanning(tmp_path) as scans:
        (pin,) = await scans.open()
        session = await scans.scan(open_request(TABLE, size=1))
        (before,) = assignments(scans.tablet.image, 1)
        later = replace(before.state, leader_epoch=before.leader_epoch + 1)
        moved = [replace(before, state=later)]
        await scans.tablet.server.start_replicas(moved)
        assert await code_of(scans.page(pin)) is ErrorCode.SCANNER_EXPIRED
        answer = await scans.scan(next_request(session.scanner_id, 1))
        assert answer.error_code == ErrorCode.SCANNER_EXPIRED
        (again,) = await scans.open()
        assert again.leader_epoch == moved[0].leader_epoch
        assert (await scans.page(again)).rows == 20


async def test_a_bucket_that_stops_ends_its_pins_and_not_those_of_others(tmp_path: Path) -> None:
    async with scanning(tmp_path, buckets=2) as scans:
        gone, other = await scans.open(0, 1)
        session = await scans.scan(open_request(TABLE, size=1))
        await scans.tablet.drop(0)
        assert await code_of(scans.page(gone)) is ErrorCode.LEADER_NOT_AVAILABLE_EXCEPTION
        answer = await scans.scan(next_request(session.scanner_id, 1))
        assert answer.error_code == ErrorCode.SCANNER_EXPIRED
        assert (await scans.page(other, 1)).done
        assert len(scans.pins) == 1


async def test_a_bucket_that_stops_while_it_is_pinned_is_an_error(tmp_path: Path) -> None:
    async with scanning(tmp_path) as scans:
        opening = asyncio.create_task(scans.open())
        await asyncio.sleep(0)
        await scans.tablet.drop(0)
        with pytest.raises((UnknownTableOrBucketError, NotLeaderError)):
            await opening
        assert len(scans.pins) == 0


# -- rows ---------------------------------------------------------------------------------------


async def test_a_page_that_cannot_be_read_is_an_error_and_not_an_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The next try of the same call gets the rows: pin, session and cursor are where they were."""
    async with scanning(tmp_path) as scans:
        (pin,) = await scans.open()
        session = await scans.scan(open_request(TABLE, size=1))
        whole = PinnedState.page

        async def broken(*_: Any) -> None:
            raise LogStorageError("the disk does not answer")

        monkeypatch.setattr(PinnedState, "page", broken)
        assert await code_of(scans.page(pin)) is ErrorCode.LOG_STORAGE_EXCEPTION
        answer = await scans.scan(next_request(session.scanner_id, 1))
        assert answer.error_code == ErrorCode.LOG_STORAGE_EXCEPTION
        opened = await scans.scan(open_request(TABLE))
        assert opened.error_code == ErrorCode.LOG_STORAGE_EXCEPTION
        monkeypatch.setattr(PinnedState, "page", whole)
        assert (await scans.page(pin)).rows == 20
        answer = await scans.scan(next_request(session.scanner_id, 1))
        assert len(rows_of(answer)) == 19
        assert len(scans.pins) == 1, "the scan that never began holds nothing"


class Slow:
    """Pages of a state that come when the test says so."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.asked = 0
        self.gate = asyncio.Event()
        whole = PinnedState.page

        async def page(
            state: PinnedState, after: Any, until: Any, rows: int, size: int, wait: float
        ) -> Any:
            self.asked += 1
            if not self.gate.is_set() and wait < 1:
                return None
            await self.gate.wait()
            return await whole(state, after, until, rows, size, wait)

        monkeypatch.setattr(PinnedState, "page", page)


async def test_a_call_whose_time_is_over_answers_the_cursor_it_came_with(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with scanning(tmp_path) as scans:
        (pin,) = await scans.open()
        slow = Slow(monkeypatch)
        for after in (None, b"\x05"):
            answer = await scans.page(pin, after_key=after, time_limit_ms=50)
            assert (answer.rows, answer.done) == (0, False)
            assert answer.last_key == (after or b"")
            assert answer.HasField("last_key") == (after is not None)
        slow.gate.set()
        assert (await scans.page(pin, after_key=b"\x05", time_limit_ms=5000)).rows == 14


async def test_a_scan_of_fluss_whose_time_is_over_says_that_there_is_more(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with scanning(tmp_path, conf={"zufluss.kv.scanner.time-limit": "10ms"}) as scans:
        slow = Slow(monkeypatch)
        first = await scans.scan(open_request(TABLE))
        assert (first.error_code, first.has_more_results, first.log_offset) == (0, True, 20)
        assert not first.HasField("records")
        second = await scans.scan(next_request(first.scanner_id, 1))
        assert second.has_more_results
        slow.gate.set()
        answers = [second]
        while answers[-1].has_more_results:
            request = next_request(first.scanner_id, len(answers) + 1)
            answers.append(await scans.scan(request))
        assert [row for answer in answers for row in rows_of(answer)] == many(0, 20)


async def test_a_call_that_waits_for_others_answers_in_its_time_too(tmp_path: Path) -> None:
    """Else a client gives it up and asks again, and there are more of them."""
    async with scanning(tmp_path) as scans:
        (pin,) = await scans.open()
        session = await scans.scan(open_request(TABLE, size=1))
        for _ in range(CALLS_MAX):
            await scans.service.calls.acquire()
        enough, scans.service.seconds_max = scans.service.seconds_max, 0.05
        async with asyncio.timeout(WAIT_SECONDS):
            answer = await scans.page(pin, after_key=b"\x05")
            assert (answer.rows, answer.done, answer.last_key) == (0, False, b"\x05")
            more = await scans.scan(next_request(session.scanner_id, 1))
        assert (more.error_code, more.has_more_results) == (0, True)
        assert not more.HasField("records")
        scans.service.seconds_max = enough
        for _ in range(CALLS_MAX):
            scans.service.calls.release()
        assert (await scans.page(pin)).rows == 20
        assert len(rows_of(await scans.scan(next_request(session.scanner_id, 2)))) == 19


class Unread:
    """A client that sends many calls and reads no answer."""

    peer = "test"
    backlogged = short = False

    @property
    def has_room(self) -> bool:
        return not self.backlogged

    async def has_read(self) -> None:
        while self.backlogged:
            await asyncio.sleep(0.001)

    async def room(self) -> None:
        await self.has_read()

    def when_gone(self, callback: Callable[[], None]) -> None: ...


async def test_calls_of_a_client_that_reads_no_answers_make_few_of_them(tmp_path: Path) -> None:
    """All of them have passed the first look when the first answer is sent."""
    async with scanning(tmp_path) as scans:
        (pin,) = await scans.open()
        reader = Unread()
        request = page_request(TABLE, pin.pin_id, 0, schema=KEYED, time_limit_ms=1000)
        asking = RequestContext(None, "CLIENT", 0, "test", reader)

        async def call() -> m.ScanKvSnapshotResponse:
            answer = await scans.service.scan_kv_snapshot(request, asking)
            reader.backlogged = True
            return answer

        made = 0
        while not made:  # on a busy machine the time of all calls may pass before the first page
            reader.backlogged = False
            answers = await asyncio.gather(*(call() for _ in range(5 * CALLS_MAX)))
            made = sum(answer.rows > 0 for answer in answers)
        assert made <= CALLS_MAX


async def test_a_call_beside_another_one_is_busy_and_a_close_waits_for_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with scanning(tmp_path) as scans:
        first = await scans.scan(open_request(TABLE, size=1))
        slow = Slow(monkeypatch)
        going = asyncio.create_task(scans.scan(next_request(first.scanner_id, 1)))
        while not slow.asked:
            await asyncio.sleep(0)
        for seq in (0, 1, 2):
            answer = await scans.scan(next_request(first.scanner_id, seq))
            assert answer.error_code == ErrorCode.KV_SCAN_BUSY
        assert not (await scans.scan(close_request(first.scanner_id))).error_code
        assert len(scans.pins) == 0
        assert scans.pin_directories() == ["20"], "still in use"
        slow.gate.set()
        answer = await going
        assert (answer.error_code, len(rows_of(answer))) == (0, 19)
        await scans.settled()


async def test_a_pin_that_is_closed_during_a_call_lets_the_call_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with scanning(tmp_path) as scans:
        (pin,) = await scans.open()
        slow = Slow(monkeypatch)
        going = asyncio.create_task(scans.page(pin))
        while not slow.asked:
            await asyncio.sleep(0)
        await scans.close(pin)
        assert await code_of(scans.page(pin)) is ErrorCode.UNKNOWN_SCANNER_ID
        slow.gate.set()
        assert (await going).rows == 20
        await scans.settled()


async def test_rows_that_do_not_match_are_passed_over_until_the_time_is_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each answer without rows says how far it came, so the next call goes on there."""
    async with scanning(tmp_path) as scans:
        (pin,) = await scans.open()
        wanted = (col("id") == 15).resolve(KEYED)
        answer = await scans.page(pin, size=1, filter=wanted)
        assert (answer.rows, answer.done) == (1, False), "one call, fifteen pages"
        after: bytes | None = None
        for passed in range(3):
            answer = await scans.page(pin, size=1, filter=wanted, after_key=after, time_limit_ms=0)
            if answer.HasField("last_key"):
                after = answer.last_key
            assert answer.rows == 0, passed


async def test_a_long_filter_is_checked_beside_the_event_loop(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A filter of a few kilobytes takes a tenth of a second to check."""
    threads: list[str] = []
    plain = RowReader.__init__

    def noted(self: RowReader, *rest: Any, **options: Any) -> None:
        threads.append(threading.current_thread().name)
        plain(self, *rest, **options)

    monkeypatch.setattr(RowReader, "__init__", noted)
    async with scanning(tmp_path) as scans:
        (pin,) = await scans.open()
        some = reduce(or_, (col("id") == i for i in range(15, 115)))
        answer = await scans.page(pin, filter=some.resolve(KEYED))
        assert (answer.rows, answer.done) == (5, True)
        assert len(threads) == 1
        assert threads[0].startswith("zufluss-scan")
        await scans.close(pin)
        assert await code_of(scans.page(pin, filter=some.resolve(KEYED)))


# -- whose it is --------------------------------------------------------------------------------


async def test_who_may_not_read_a_table_opens_nothing(tmp_path: Path) -> None:
    async with scanning(tmp_path) as scans:
        with pytest.raises(AuthorizationError, match=r"mallory may not read db\.t"):
            await scans.open(who="mallory")
        answer = await scans.scan(open_request(TABLE), "mallory")
        assert answer.error_code == ErrorCode.AUTHORIZATION_EXCEPTION
        assert len(scans.pins) == 0


async def test_who_may_read_a_table_no_more_reads_no_pin_of_it(tmp_path: Path) -> None:
    async with scanning(tmp_path) as scans:
        (pin,) = await scans.open(who="alice")
        session = await scans.scan(open_request(TABLE, size=1), "alice")
        scans.readers.remove("alice")
        assert await code_of(scans.page(pin, who="alice")) is ErrorCode.AUTHORIZATION_EXCEPTION
        answer = await scans.scan(next_request(session.scanner_id, 1), "alice")
        assert answer.error_code == ErrorCode.AUTHORIZATION_EXCEPTION


async def test_only_its_owner_uses_a_pin(tmp_path: Path) -> None:
    async with scanning(tmp_path) as scans:
        (pin,) = await scans.open(who="alice")
        session = await scans.scan(open_request(TABLE, size=1), "alice")
        for who in ("bob", None):
            assert await code_of(scans.page(pin, who=who)) is ErrorCode.AUTHORIZATION_EXCEPTION
            assert await code_of(scans.close(pin, who=who)) is ErrorCode.AUTHORIZATION_EXCEPTION
            for request in (next_request(session.scanner_id, 1), close_request(session.scanner_id)):
                answer = await scans.scan(request, who)
                assert answer.error_code == ErrorCode.AUTHORIZATION_EXCEPTION
        assert (await scans.page(pin, who="alice")).rows == 20
        assert not (await scans.scan(next_request(session.scanner_id, 1), "alice")).error_code


# -- all or none --------------------------------------------------------------------------------


async def test_buckets_are_pinned_all_or_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with scanning(tmp_path, buckets=3) as scans:
        assert await code_of(scans.open(0, 1, 9)) is ErrorCode.UNKNOWN_TABLE_OR_BUCKET_EXCEPTION
        with pytest.raises(InvalidScanRequestError):
            await scans.open(0, 1, 2, at=[None, None, 1000])
        await scans.settled()
        assert len(scans.pins) == 0
        states = scans.tablet.server.pin_states
        whole = states.open_state

        async def broken(replica: Any) -> PinnedState:
            if replica.bucket.bucket_id == 2:
                raise LogStorageError("the disk is full")
            return await whole(replica)

        monkeypatch.setattr(states, "open_state", broken)
        with pytest.raises(LogStorageError, match="full"):
            await scans.open(0, 1, 2)
        assert len(scans.pins) == 0
        await scans.settled()


async def test_a_pin_that_ends_while_another_is_made_fails_the_opening(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with scanning(tmp_path, buckets=2) as scans:
        states = scans.tablet.server.pin_states
        whole = states.open_state

        made = asyncio.Event()

        async def slow(replica: Any) -> PinnedState:
            if replica.bucket.bucket_id == 1:
                await made.wait()
                scans.now += 2 * AGE
                scans.pins.sweep()
            state = await whole(replica)
            asyncio.get_running_loop().call_soon(made.set)  # after its pin took it
            return state

        monkeypatch.setattr(states, "open_state", slow)
        assert await code_of(scans.open(0, 1)) is ErrorCode.SCANNER_EXPIRED
        assert len(scans.pins) == 0
        await scans.settled()


async def test_buckets_beyond_the_limit_are_pinned_all_or_none(tmp_path: Path) -> None:
    async with scanning(tmp_path, buckets=3, conf={"kv.scanner.max-per-server": "4"}) as scans:
        known = await scans.open(0, 1)
        with pytest.raises(KvScanBusyError, match="max-per-server"):
            await scans.open(0, 1, 2)
        assert len(scans.pins) == 2
        await scans.close(known[0])
        await scans.open(0, 1, 2)


async def test_more_buckets_than_there_may_be_pins_are_refused_for_good(tmp_path: Path) -> None:
    """It makes no sense to try that again."""
    async with scanning(tmp_path, buckets=3, conf={"kv.scanner.max-per-server": "2"}) as scans:
        with pytest.raises(InvalidScanRequestError, match="max-per-server"):
            await scans.open(0, 1, 2)
        with pytest.raises(InvalidScanRequestError, match="max-per-server"):
            await scans.open(99, 99, 99)  # no bucket is looked at
        request = pin_request(TABLE, (0, 99, 99))
        request.partial = True
        answer = await scans.service.open_kv_snapshot(request, context())
        assert len(answer.pins) == len(scans.pins) == 1


async def test_a_state_that_takes_longer_to_rebuild_than_a_client_waits_is_had_by_asking_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each call that a client gave up would hold a pin, and be made for nobody."""
    go, rebuilt = asyncio.Event(), list[int]()
    rebuild = Rebuilder.rebuild

    async def slow(self: Rebuilder, replica: Any, log_offset: int) -> Any:
        rebuilt.append(log_offset)
        await go.wait()
        return await rebuild(self, replica, log_offset)

    monkeypatch.setattr(Rebuilder, "rebuild", slow)
    async with scanning(tmp_path) as scans:
        request = pin_request(TABLE, (0,), [19])
        request.time_limit_ms = 20
        for _ in range(10):
            with pytest.raises(KvScanBusyError, match="being made"):
                await scans.service.open_kv_snapshot(request, context())
            assert len(scans.pins) == 0
        go.set()
        await scans.settled("19")
        request.ClearField("time_limit_ms")
        answer = await scans.service.open_kv_snapshot(request, context())
        assert (await scans.page(answer.pins[0])).rows == 19
        assert rebuilt == [19], "once, for all of them"


async def test_states_that_are_made_for_nobody_are_bounded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No pin counts them any more."""
    go = asyncio.Event()
    rebuild = Rebuilder.rebuild

    async def slow(self: Rebuilder, replica: Any, log_offset: int) -> Any:
        await go.wait()
        return await rebuild(self, replica, log_offset)

    monkeypatch.setattr(Rebuilder, "rebuild", slow)
    async with scanning(tmp_path, conf={"kv.scanner.max-per-server": "3"}) as scans:
        for offset in range(10):
            request = pin_request(TABLE, (0,), [offset])
            request.time_limit_ms = 1
            with pytest.raises(KvScanBusyError):
                await scans.service.open_kv_snapshot(request, context())
        assert len(scans.tablet.server.pin_states._making) == 3
        go.set()
        await scans.settled("0", "1", "2")


async def test_an_opening_that_is_given_up_holds_nothing(tmp_path: Path) -> None:
    async with scanning(tmp_path, buckets=3) as scans:
        for turns in range(6):
            opening = asyncio.create_task(scans.open(0, 1, 2))
            for _ in range(turns):
                await asyncio.sleep(0)
            opening.cancel()
            with pytest.raises(asyncio.CancelledError):
                await opening
            assert len(scans.pins) == 0
        await scans.settled()


# -- numbers ------------------------------------------------------------------------------------


async def test_metrics_show_pins_rows_and_bytes(tmp_path: Path) -> None:
    async with scanning(tmp_path) as scans:
        (pin,) = await scans.open()
        answer = await scans.page(pin, limit=5)
        session = await scans.scan(open_request(TABLE, size=1))
        scans.now += 7
        read = {s.metric: s.value for s in tablet_samples(scans.tablet.server)()}
        assert read[metrics.KV_PINS] == 2
        assert read[metrics.KV_PIN_OLDEST_AGE_SECONDS] == 7
        assert read[metrics.KV_SCAN_ROWS] == 6
        assert read[metrics.KV_SCAN_BYTES] == len(answer.records) + len(session.records)
