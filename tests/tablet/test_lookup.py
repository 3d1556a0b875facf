"""Lookups: answers are bounded, repeated keys are read once, every request is answered."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import pytest_asyncio

from tests.end_to_end.kv import limit_values, lookup_request, prefix_request
from tests.tablet.keyed import Keyed, keyed, many
from tests.tablet.support import TABLE, Connection
from tests.waiting import WAIT_SECONDS
from zufluss.errors import ErrorCode, RecordTooLargeError
from zufluss.kv.hot import order
from zufluss.kv.hot.order import BaseCopy
from zufluss.kv.store import KvStore
from zufluss.net.services import RequestContext
from zufluss.record.slices import Slices
from zufluss.replica.kv_host import KvHost
from zufluss.tablet import answers, lookup
from zufluss.wire import messages as m
from zufluss.wire.codec import decode

SMALL = {"zufluss.kv.lookup.max-answer-size": "64kb"}
CONTEXT = RequestContext(None, "FLUSS", 0, "test")


class SlowSorts:
    """Sorts keys in their thread when the test says so."""

    def __init__(self, loop: asyncio.AbstractEventLoop, plain: Callable[[BaseCopy], None]) -> None:
        self._loop = loop
        self._plain = plain
        self.begun = asyncio.Event()
        self.go = threading.Event()
        self.count = 0

    def sort(self, copy: BaseCopy) -> None:
        self.count += 1
        self._loop.call_soon_threadsafe(self.begun.set)
        assert self.go.wait(WAIT_SECONDS)
        self._plain(copy)


async def looked_up(tablet: Keyed, request: m.LookupRequest) -> list[str | None] | ErrorCode:
    """The texts of the rows of the first bucket, None without a row; or the code of the error."""
    connection = Connection()
    answer = await connection.answer(connection.send(tablet.server.lookup.handle, request))
    if isinstance(answer, ErrorCode):
        return answer
    entry = decode(m.LookupResponse, answer).buckets_resp[0]
    assert not entry.error_code, entry.error_message
    return [text_of(tablet, v.values) if v.HasField("values") else None for v in entry.values]


def text_of(tablet: Keyed, value: bytes) -> str:
    row = tablet.codec.value(value)
    assert row is not None
    return str(row[1])


async def by_prefix(tablet: Keyed, *prefixes: bytes) -> list[list[str]]:
    """The texts of the rows behind each prefix."""
    response = await tablet.server.lookup.prefix_lookup(prefix_request(TABLE, prefixes), CONTEXT)
    (entry,) = decode(m.PrefixLookupResponse, b"".join(response.buffers)).buckets_resp
    assert not entry.error_code, entry.error_message
    return [[text_of(tablet, value) for value in found.values] for found in entry.value_lists]


async def test_a_row_that_cannot_be_read_is_an_error_and_not_silence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise ValueError("a value has 5 bytes, more than the type holds")

    async with keyed(tmp_path) as tablet:
        await tablet.put((1, "a"))
        monkeypatch.setattr(KvStore, "get_at", fail)
        request = lookup_request(TABLE, [tablet.codec.key((1,))])
        request.buckets_req.add(bucket_id=0)
        assert await looked_up(tablet, request) is ErrorCode.UNKNOWN_SERVER_ERROR


async def test_a_key_named_many_times_is_read_once_and_answered_each_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    read: list[int] = []
    plain = KvStore.get_at

    def counted(self: KvStore, keys: Slices, *rest: Any, **options: Any) -> Slices:
        read.append(keys.count)
        return plain(self, keys, *rest, **options)

    async with keyed(tmp_path) as tablet:
        await tablet.put((1, "one"), (2, "two"))
        monkeypatch.setattr(KvStore, "get_at", counted)
        names = [tablet.codec.key((i,)) for i in (1, 2, 3)] * 100
        request = lookup_request(TABLE, names)
        request.buckets_req.add(bucket_id=0)  # a second bucket goes to the worker
        assert await looked_up(tablet, request) == ["one", "two", None] * 100
        assert read == [3]


async def test_rows_that_do_not_fit_into_an_answer_are_refused_with_the_limit(
    tmp_path: Path,
) -> None:
    async with keyed(tmp_path, conf=SMALL) as tablet:
        await tablet.put((1, "x" * 1000))
        key = tablet.codec.key((1,))
        assert await looked_up(tablet, lookup_request(TABLE, [key] * 60)) == ["x" * 1000] * 60
        request = lookup_request(TABLE, [key] * 70)
        request.buckets_req.add(bucket_id=0)
        connection = Connection()
        sent = connection.send(tablet.server.lookup.handle, request)
        assert await connection.answer(sent) is ErrorCode.RECORD_TOO_LARGE_EXCEPTION
        with pytest.raises(RecordTooLargeError, match=r"zufluss\.kv\.lookup\.max-answer-size"):
            await by_prefix(tablet, *[b""] * 70)


async def test_an_answer_that_is_not_small_is_made_again_as_a_large_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(answers, "SMALL_BYTES_MAX", 100)
    monkeypatch.setattr(lookup, "STEP_KEYS", 7)
    async with keyed(tmp_path) as tablet:
        await tablet.put(*many(0, 200))
        names = [tablet.codec.key((i,)) for i in range(200)]
        request = lookup_request(TABLE, names)
        request.buckets_req.add(bucket_id=0)
        assert await looked_up(tablet, request) == [f"text {i}" for i in range(200)]


async def test_a_prefix_has_all_its_rows_however_many_pages_they_take(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("zufluss.kv.store.SCAN_ROWS", 10)
    async with keyed(tmp_path) as tablet:
        await tablet.put(*many(0, 100))
        [everything, again] = await by_prefix(tablet, b"", b"")
        assert everything == again
        assert sorted(everything) == sorted(f"text {i}" for i in range(100))


async def test_many_prefixes_are_looked_for_in_few_steps_and_answered_in_order(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    steps: list[Any] = []
    plain = KvHost.call

    async def counted(self: KvHost, job: Any) -> Any:
        steps.append(job)
        return await plain(self, job)

    async with keyed(tmp_path) as tablet:
        await tablet.put(*many(0, 100))
        names = [tablet.codec.key((i,)) for i in range(1000)]
        monkeypatch.setattr(KvHost, "call", counted)
        found = await by_prefix(tablet, *names, *names)
        assert found == [[f"text {i}"] if i < 100 else [] for i in range(1000)] * 2
        assert len(steps) <= 1000 / lookup.STEP_PREFIXES + 1


@pytest_asyncio.fixture
async def slow_sorts(monkeypatch: pytest.MonkeyPatch) -> SlowSorts:
    """Buckets of more than ten keys are sorted beside the worker, when the test says so."""
    monkeypatch.setattr(order, "SORTED_AT_ONCE", 10)
    sorts = SlowSorts(asyncio.get_running_loop(), BaseCopy.sort)
    monkeypatch.setattr(BaseCopy, "sort", lambda copy: sorts.sort(copy))
    return sorts


async def test_many_keys_are_sorted_once_and_puts_go_on_meanwhile(
    tmp_path: Path, slow_sorts: SlowSorts
) -> None:
    async with keyed(tmp_path) as tablet:
        await tablet.put(*many(0, 100))
        lookups = [asyncio.ensure_future(by_prefix(tablet, b"", b"absent")) for _ in range(3)]
        await slow_sorts.begun.wait()
        await tablet.put(*many(100, 110))
        assert not any(lookup.done() for lookup in lookups)
        slow_sorts.go.set()
        for rows, absent in await asyncio.gather(*lookups):
            assert {f"text {i}" for i in range(100)} <= {*rows} <= {f"text {i}" for i in range(110)}
            assert absent == []
        assert slow_sorts.count == 1
        (everything,) = await by_prefix(tablet, b"")
        assert len(everything) == 110
        values = await tablet.server.lookup.first_rows(tablet.replica(), 5)
        assert len(values) > 1


async def test_a_bucket_that_is_dropped_while_its_keys_are_sorted_is_an_error(
    tmp_path: Path, slow_sorts: SlowSorts
) -> None:
    async with keyed(tmp_path) as tablet:
        await tablet.put(*many(0, 100))
        request = prefix_request(TABLE, [b""])
        asked = asyncio.ensure_future(tablet.server.lookup.prefix_lookup(request, CONTEXT))
        await slow_sorts.begun.wait()
        await tablet.drop(0)
        slow_sorts.go.set()
        (entry,) = decode(m.PrefixLookupResponse, b"".join((await asked).buffers)).buckets_resp
        assert entry.error_code == ErrorCode.LEADER_NOT_AVAILABLE_EXCEPTION


@pytest.mark.parametrize("bound", ["STEP_BYTES", "STEP_PREFIXES", "SCAN_ROWS"])
async def test_a_step_of_a_prefix_lookup_ends_at_each_of_its_bounds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, bound: str
) -> None:
    monkeypatch.setattr(lookup, bound, 3)
    async with keyed(tmp_path) as tablet:
        await tablet.put(*many(0, 20))
        rows = {tablet.codec.key((i,)): f"text {i}" for i in range(20)}
        prefixes = [b"", b"absent", *rows, b""]
        expected = [
            [text for key, text in sorted(rows.items()) if key.startswith(prefix)]
            for prefix in prefixes
        ]
        assert await by_prefix(tablet, *prefixes) == expected


@pytest.mark.parametrize("cold", [False, True])
async def test_a_store_reads_no_more_rows_than_there_is_room_for(
    tmp_path: Path, cold: bool
) -> None:
    async with keyed(tmp_path, conf=SMALL) as tablet:
        await tablet.put(*((i, "x" * 1000) for i in range(100)))
        store = tablet.replica().tablet.store
        if cold:
            await tablet.server.kv.checkpoint(tablet.replica())
            await tablet.server.kv.call(lambda: store.evict(1 << 30))
        names = Slices.of(tablet.codec.key((i,)) for i in range(100))
        with pytest.raises(RecordTooLargeError):
            await tablet.server.kv.call(
                lambda: store.get_at(names, store.horizon, bytes_max=90_000)
            )
        values = await tablet.server.kv.call(
            lambda: store.get_at(names, store.horizon, bytes_max=110_000)
        )
        assert np.all(values.starts >= 0)


async def test_too_many_keys_are_refused_before_any_is_looked_up(tmp_path: Path) -> None:
    async with keyed(tmp_path) as tablet:
        for keys in ([b""] * (lookup.REQUEST_KEYS_MAX + 1), [b"x" * (1 << 20)] * 3):
            answer = await looked_up(tablet, lookup_request(TABLE, keys))
            assert answer is ErrorCode.RECORD_TOO_LARGE_EXCEPTION


async def test_a_limit_scan_returns_the_rows_that_fit_or_says_that_they_do_not(
    tmp_path: Path,
) -> None:
    async with keyed(tmp_path, conf=SMALL) as tablet:
        await tablet.put(*((i, "x" * 1000) for i in range(100)))
        for limit, code in ((5, 0), (60, 0), (100, ErrorCode.RECORD_TOO_LARGE_EXCEPTION)):
            request = m.LimitScanRequest(table_id=TABLE, bucket_id=0, limit=limit)
            response = await tablet.server.service.limit_scan(request, CONTEXT)
            answer = decode(m.LimitScanResponse, b"".join(response.buffers))
            assert (answer.error_code, bool(answer.records)) == (code, not code)
            assert len(limit_values(answer.records) if answer.records else ()) == (
                0 if code else limit
            )


async def test_a_limit_scan_has_all_rows_however_many_pages_they_take(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lookup, "STEP_KEYS", 10)
    async with keyed(tmp_path) as tablet:
        await tablet.put(*many(0, 100))
        for limit in (0, 1, 10, 55, 1000):
            request = m.LimitScanRequest(table_id=TABLE, bucket_id=0, limit=limit)
            response = await tablet.server.service.limit_scan(request, CONTEXT)
            answer = decode(m.LimitScanResponse, b"".join(response.buffers))
            assert not answer.is_log_table
            found = [text_of(tablet, value) for value in limit_values(answer.records)]
            first = sorted(many(0, 100), key=tablet.codec.key)[:limit]
            assert found == [row[1] for row in first]


async def test_a_step_of_a_limit_scan_reads_few_bytes_and_a_row_that_is_larger_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """4,096 rows of 16 KiB were read in one step, and puts of all tables waited for it."""
    monkeypatch.setattr(lookup, "STEP_BYTES", 5_000)
    pages: list[int] = []
    plain = KvStore.page

    def page(self: KvStore, *arguments: Any) -> tuple[Slices, bytes | None]:
        values, following = plain(self, *arguments)
        pages.append(int((values.ends - values.starts).sum()))
        return values, following

    monkeypatch.setattr(KvStore, "page", page)
    async with keyed(tmp_path) as tablet:
        await tablet.put(*((i, "x" * (20_000 if i == 50 else 1000)) for i in range(100)))
        request = m.LimitScanRequest(table_id=TABLE, bucket_id=0, limit=1000)
        response = await tablet.server.service.limit_scan(request, CONTEXT)
        answer = decode(m.LimitScanResponse, b"".join(response.buffers))
        assert len(limit_values(answer.records)) == 100
        assert [size for size in pages if size > 5_000] == [max(pages)]
        assert 25 <= len(pages) <= 60, "four rows in most pages, also behind the large row"
