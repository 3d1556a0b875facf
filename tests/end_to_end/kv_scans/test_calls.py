"""Calls that are repeated, lost, made concurrently, or whose scan is closed meanwhile.

The server has long timeouts, and the tests suspend and continue the processes that read its pages:
a call lasts for exactly as long as a test wants.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest

import zufluss
from tests.client.pk import create_table, upsert
from tests.client.relay import Relay
from tests.conftest import SERVERS
from tests.end_to_end.kv_scans.support import (
    BUSY,
    INVALID,
    UNKNOWN_ID,
    by_key,
    close_pins,
    create,
    no_pages,
    open_pins,
    pinned_offsets,
    scrape,
)
from tests.end_to_end.raw import RawClient
from tests.end_to_end.scans import (
    SCANNED,
    all_rows,
    arrow_of,
    call,
    close_request,
    delete_rows,
    go_on,
    good,
    in_key_order,
    next_request,
    numbered,
    open_request,
    page,
    page_request,
    pages,
    pin,
    put_rows,
    rows_of,
)
from tests.servers import WarmServer
from tests.waiting import eventually
from zufluss.model.expression import col
from zufluss.testing.server import DevServer
from zufluss.wire import messages as m
from zufluss.wire.api import ApiKey

COUNT = 300
SIZE = 500
PROPERTIES = {"zufluss.metrics.port": "0", "zufluss.kv.scanner.time-limit": "50s"}
ROWS = in_key_order(numbered(0, COUNT))


@pytest.fixture(scope="module")
def relay() -> Iterator[Relay]:
    with Relay() as relay:
        yield relay


@pytest.fixture(scope="module")
def server(
    request: pytest.FixtureRequest, relay: Relay, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[DevServer]:
    """A server with long timeouts, whose clients connect through the relay."""
    advertised = {"advertised.listeners": f"FLUSS://{relay.bootstrap}"}
    server = WarmServer(tmp_path_factory.mktemp("patient"), PROPERTIES | advertised)
    request.config.stash.setdefault(SERVERS, []).append(server)
    with server:
        relay.target = server.port
        scrape(server)
        yield server


@pytest.fixture
def filled(raw: RawClient) -> int:
    """A table with one bucket and rows in it."""
    table_id = create(raw)
    put_rows(raw, table_id, ROWS)
    return table_id


def scan_answer(raw: RawClient, request_id: int) -> m.ScanKvResponse:
    return m.ScanKvResponse.FromString(bytes(raw.answer(request_id).body))


def page_answer(raw: RawClient, request_id: int) -> m.ScanKvSnapshotResponse:
    frame = raw.answer(request_id)
    assert frame.error is None, frame.error
    return m.ScanKvSnapshotResponse.FromString(bytes(frame.body))


# -- repeated calls ------------------------------------------------------------------------------


def test_every_call_of_a_scan_again_gets_the_same_bytes_and_the_scan_goes_on(
    raw: RawClient, filled: int
) -> None:
    """Includes the first call, which is repeated by its id, and the last, which ended the scan."""
    first = good(raw, open_request(filled, size=SIZE))
    answer, seq, rows = first, 0, rows_of(first)
    while answer.has_more_results:
        for size in (SIZE, 1 << 20):
            again = call(raw, next_request(first.scanner_id, seq, size))
            assert again.SerializeToString() == answer.SerializeToString()
        put_rows(raw, filled, numbered(0, COUNT, "changed"))
        seq += 1
        answer = good(raw, next_request(first.scanner_id, seq, SIZE))
        rows += rows_of(answer)
    assert call(raw, next_request(first.scanner_id, seq, SIZE)) == answer
    assert (rows, seq > 3) == (ROWS, True)


def test_a_scan_goes_on_though_its_connection_broke_before_the_answer(
    server: DevServer, raw: RawClient, filled: int
) -> None:
    first = good(raw, open_request(filled, size=SIZE))
    with no_pages(server), RawClient(server.port) as lost:
        lost.begin(ApiKey.SCAN_KV, next_request(first.scanner_id, 1, SIZE))
        assert lost.alive(), "the call before this one has begun"
    answers = [first]
    while answers[-1].has_more_results:
        answer = call(raw, next_request(first.scanner_id, len(answers), SIZE))
        assert answer.error_code in (0, BUSY), "the lost call may still be under way"
        if not answer.error_code:
            answers.append(answer)
    assert [row for answer in answers for row in rows_of(answer)] == ROWS


def test_a_page_of_a_pin_again_is_the_same_bytes_whoever_asks(
    server: DevServer, raw: RawClient, filled: int
) -> None:
    (made,) = pin(raw, filled)
    before = pages(raw, filled, made.pin_id, size=SIZE)
    delete_rows(raw, filled, ROWS)
    with RawClient(server.port) as other:
        again = pages(other, filled, made.pin_id, size=SIZE)
    assert [a.SerializeToString() for a in again] == [a.SerializeToString() for a in before]
    assert (all_rows(before), len(before) > 3) == (ROWS, True)
    close_pins(raw, made.pin_id)


def test_a_client_whose_connection_breaks_at_every_page_has_each_row_once(
    server: DevServer, relay: Relay
) -> None:
    options = {"client.scanner.kv.fetch.max-bytes": "2kb", "client.request-timeout": "5s"}
    with zufluss.connect(relay.bootstrap, **options) as connection:
        columns = "id BIGINT NOT NULL, text STRING, PRIMARY KEY (id)"
        table = create_table(connection, columns, bucket_count=2)
        upsert(table, {"id": [*range(2000)], "text": [f"row {i}" for i in range(2000)]})
        opened, batches = scans_opened(server), 0
        with table.scan().open() as scanner:
            rows = []
            for batch in scanner:
                batches += 1
                rows += [(row["id"], row["text"]) for row in batch.to_pylist()]
                if batches <= 5:
                    relay.cut()
                    relay.mend()
    assert by_key(rows) == by_key(numbered(0, 2000))
    assert batches > 8
    assert scans_opened(server) - opened == 1, "the state was there all the time"


def scans_opened(server: DevServer) -> float:
    return scrape(server)['zufluss_requests_total{api="OPEN_KV_SNAPSHOT"}']


# -- concurrent calls ----------------------------------------------------------------------------


def test_a_call_beside_another_one_of_the_same_scan_is_busy_and_the_scan_survives(
    server: DevServer, raw: RawClient, filled: int
) -> None:
    first = good(raw, open_request(filled, size=SIZE))
    with no_pages(server):
        going = raw.begin(ApiKey.SCAN_KV, next_request(first.scanner_id, 1, SIZE))
        for seq in (1, 2, 0):
            refused = call(raw, next_request(first.scanner_id, seq, SIZE))
            assert (refused.error_code, "retry after" in refused.error_message) == (BUSY, True)
    second = scan_answer(raw, going)
    assert not second.error_code
    rest, seq, answer = rows_of(second), 1, second
    while answer.has_more_results:
        seq += 1
        answer = good(raw, next_request(first.scanner_id, seq, SIZE))
        rest += rows_of(answer)
    assert rows_of(first) + rest == ROWS


def test_calls_at_once_on_one_pin_are_all_answered(
    server: DevServer, raw: RawClient, filled: int
) -> None:
    (made,) = pin(raw, filled)
    whole = pages(raw, filled, made.pin_id, size=SIZE)
    cursors = [None, *(answer.last_key for answer in whole[:-1])]
    with no_pages(server):
        sent = [
            raw.begin(
                ApiKey.SCAN_KV_SNAPSHOT,
                page_request(filled, made.pin_id, size=SIZE, after_key=cursor),
            )
            for cursor in [*cursors, *cursors]
        ]
        assert raw.alive()
    assert [page_answer(raw, request_id) for request_id in sent] == whole + whole
    close_pins(raw, made.pin_id)


# -- older cursors -------------------------------------------------------------------------------


def test_a_pin_is_read_again_from_its_start_and_from_any_older_key(
    raw: RawClient, filled: int
) -> None:
    (made,) = pin(raw, filled)
    put_rows(raw, filled, numbered(0, COUNT, "changed"))
    answers = pages(raw, filled, made.pin_id, size=SIZE)
    assert all_rows(answers) == ROWS
    for i, answer in enumerate(answers[:-1]):
        older = page(raw, filled, made.pin_id, size=SIZE, after_key=answer.last_key)
        assert older == answers[i + 1]
    assert pages(raw, filled, made.pin_id, size=SIZE) == answers, "a whole second time"
    after = arrow_of(answers[1]).column("id")[0].as_py()
    assert after == ROWS[answers[0].rows][0]
    close_pins(raw, made.pin_id)


def test_a_scan_of_fluss_repeats_its_last_call_only_and_survives_an_older_one(
    raw: RawClient, filled: int
) -> None:
    first = good(raw, open_request(filled, size=SIZE))
    good(raw, next_request(first.scanner_id, 1, SIZE))
    assert call(raw, next_request(first.scanner_id, 0, SIZE)).error_code == INVALID
    again = good(raw, open_request(filled, size=SIZE))
    assert (again.log_offset, go_on(raw, again, SIZE)) == (first.log_offset, ROWS)
    good(raw, next_request(first.scanner_id, 2, SIZE))
    good(raw, close_request(first.scanner_id))


# -- closing -------------------------------------------------------------------------------------


def test_a_scan_that_is_closed_during_a_call_ends_after_it(
    server: DevServer, raw: RawClient, filled: int
) -> None:
    before = open_pins(server)
    first = good(raw, open_request(filled, size=SIZE))
    assert pinned_offsets(server, filled) == [COUNT]
    with no_pages(server):
        going = raw.begin(ApiKey.SCAN_KV, next_request(first.scanner_id, 1))
        good(raw, close_request(first.scanner_id))
        assert call(raw, next_request(first.scanner_id, 1)).error_code == UNKNOWN_ID
        assert open_pins(server) == before, "it counts no more"
        assert pinned_offsets(server, filled) == [COUNT], "and is still in use"
    answer = scan_answer(raw, going)
    assert (answer.error_code, rows_of(first) + rows_of(answer)) == (0, ROWS)
    eventually(lambda: not pinned_offsets(server, filled), "the end of the state")


def test_a_pin_that_is_closed_during_calls_ends_after_them(
    server: DevServer, raw: RawClient, filled: int
) -> None:
    (made,), (other,) = pin(raw, filled), pin(raw, filled)
    begun = page(raw, filled, made.pin_id, size=SIZE)
    request = page_request(filled, made.pin_id, after_key=begun.last_key)
    with no_pages(server):
        going = [raw.begin(ApiKey.SCAN_KV_SNAPSHOT, request) for _ in range(3)]
        close_pins(raw, made.pin_id, other.pin_id)
        assert raw.error_code(ApiKey.SCAN_KV_SNAPSHOT, request) == UNKNOWN_ID
        assert pinned_offsets(server, filled) == [COUNT]
    for request_id in going:
        assert all_rows([begun, page_answer(raw, request_id)]) == ROWS
    eventually(lambda: not pinned_offsets(server, filled), "the end of the state")
    (again,) = pin(raw, filled)
    assert all_rows(pages(raw, filled, again.pin_id)) == ROWS
    close_pins(raw, again.pin_id)


def test_a_call_that_reads_many_pages_has_them_all_though_its_pin_is_closed(
    server: DevServer, raw: RawClient, filled: int
) -> None:
    """A filter skips row after row, each in a page of its own."""
    (made,) = pin(raw, filled)
    page(raw, filled, made.pin_id, size=SIZE)
    last = (col("id") == ROWS[-1][0]).resolve(SCANNED)
    with no_pages(server):
        request = page_request(filled, made.pin_id, size=1, filter=last)
        going = raw.begin(ApiKey.SCAN_KV_SNAPSHOT, request)
        close_pins(raw, made.pin_id)
    assert all_rows([page_answer(raw, going)]) == ROWS[-1:]
    eventually(lambda: not pinned_offsets(server, filled), "the end of the state")


def test_closes_that_race_with_calls_harm_nothing(
    server: DevServer, raw: RawClient, filled: int
) -> None:
    with RawClient(server.port) as other:
        for _ in range(20):
            (made,) = pin(raw, filled)
            first = good(raw, open_request(filled, size=SIZE))
            request = page_request(filled, made.pin_id, size=SIZE)
            reading = raw.begin(ApiKey.SCAN_KV_SNAPSHOT, request)
            going = raw.begin(ApiKey.SCAN_KV, next_request(first.scanner_id, 1, SIZE))
            close_pins(other, made.pin_id)
            good(other, close_request(first.scanner_id))
            frame, answer = raw.answer(reading), scan_answer(raw, going)
            assert frame.error is None or frame.error.code == UNKNOWN_ID
            assert answer.error_code in (0, UNKNOWN_ID)
    assert raw.alive()
    eventually(lambda: not pinned_offsets(server, filled), "the end of the states")


def test_closing_twice_or_what_never_was_succeeds(
    server: DevServer, raw: RawClient, filled: int
) -> None:
    before = open_pins(server)
    first = good(raw, open_request(filled, size=SIZE))
    (made,) = pin(raw, filled)
    for scanner_id in (first.scanner_id, first.scanner_id, b"x" * 16, b""):
        assert not good(raw, close_request(scanner_id)).has_more_results
    close_pins(raw, made.pin_id, made.pin_id, b"x" * 16, b"")
    close_pins(raw, made.pin_id)
    close_pins(raw)
    assert open_pins(server) == before
    assert call(raw, next_request(first.scanner_id, 1)).error_code == UNKNOWN_ID
