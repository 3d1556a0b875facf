"""SCAN_KV (1061) on a real server, as clients of Fluss send it and as none of them would.

Tests of full scans that need no clock of their own; those that do are in
`tests/tablet/scan/test_service.py`.
"""

from __future__ import annotations

from collections.abc import Callable

import fluss
import pytest

from tests.end_to_end.kv import create_by_hand, drop_by_hand, limit_values
from tests.end_to_end.raw import RawClient
from tests.end_to_end.scans import (
    CODEC,
    SCANNED,
    call,
    close_request,
    create_filled,
    delete_rows,
    go_on,
    good,
    in_key_order,
    next_request,
    numbered,
    open_request,
    put_rows,
    rows_of,
)
from tests.end_to_end.test_kv_fixtures import decoded, fixture, put_all
from zufluss.testing.server import DevServer
from zufluss.wire import messages as m
from zufluss.wire.api import ApiKey

EXPIRED, UNKNOWN_ID, INVALID, TOO_MANY, BUSY = 66, 67, 68, 69, 30004
COUNT = 300


@pytest.fixture
def table_id(raw: RawClient, path: fluss.TablePath) -> int:
    """A table with one bucket and nothing in it."""
    return create_by_hand(raw, path.table_name, SCANNED)


@pytest.fixture
def filled(raw: RawClient, table_id: int) -> int:
    """The same with rows in it, some of them deleted."""
    put_rows(raw, table_id, numbered(0, COUNT + 20))
    delete_rows(raw, table_id, numbered(COUNT, COUNT + 20))
    return table_id


def codes(raw: RawClient, *requests: m.ScanKvRequest) -> list[int]:
    return [call(raw, request).error_code for request in requests]


def test_a_scan_gets_the_answers_of_fluss_byte_for_byte(
    raw: RawClient, path: fluss.TablePath
) -> None:
    table_id = put_all(raw, path, "kv_all")
    cases = [fixture("scan-kv", f"kv_all-{i}") for i in range(2)]
    first = good(raw, open_request(table_id, size=cases[0]["request"]["batch_size_bytes"]))
    second = good(raw, next_request(first.scanner_id, 1, cases[1]["request"]["batch_size_bytes"]))
    values: list[bytes] = []
    for answer, case in zip((first, second), cases, strict=True):
        expected = case["response"]
        assert answer.records == bytes.fromhex(expected["records"])
        assert answer.has_more_results == expected["has_more_results"]
        assert answer.HasField("log_offset") == ("log_offset" in expected)
        assert answer.scanner_id == first.scanner_id
        values += limit_values(answer.records)
    assert first.log_offset == cases[0]["response"]["log_offset"]
    assert decoded(values, "kv_all") == cases[0]["expected"]


@pytest.mark.parametrize("size", [1, 200, 1 << 30])
def test_each_row_comes_once_in_key_order_whatever_the_batch_size(
    raw: RawClient, filled: int, size: int
) -> None:
    first = good(raw, open_request(filled, size=size))
    assert first.log_offset == raw.end_offset(filled)
    assert len(first.scanner_id) == 16
    assert go_on(raw, first, size) == in_key_order(numbered(0, COUNT))
    assert len(rows_of(first)) == {1: 1, 1 << 30: COUNT}.get(size, len(rows_of(first)))


def test_a_row_larger_than_the_batch_size_comes_alone(raw: RawClient, table_id: int) -> None:
    rows = [(i, "x" * 1000) for i in range(3)]
    put_rows(raw, table_id, rows)
    first = good(raw, open_request(table_id, size=100))
    assert rows_of(first) == rows[:1]
    assert go_on(raw, first, 100) == rows


def test_an_empty_bucket_has_an_offset_and_no_session(raw: RawClient, table_id: int) -> None:
    put_rows(raw, table_id, numbered(0, 3))
    delete_rows(raw, table_id, numbered(0, 3))
    answer = good(raw, open_request(table_id))
    assert not answer.has_more_results
    assert not answer.HasField("scanner_id")
    assert not answer.HasField("records")
    assert answer.log_offset == raw.end_offset(table_id) == 6


def test_writes_during_a_scan_do_not_show(raw: RawClient, filled: int) -> None:
    """Everything is overwritten, deleted, put again; the scan is of the state at its opening."""
    first = good(raw, open_request(filled, size=100))
    put_rows(raw, filled, numbered(0, COUNT, "changed"))
    delete_rows(raw, filled, numbered(0, COUNT))
    second = good(raw, open_request(filled, size=100))
    put_rows(raw, filled, numbered(100, 200, "again"))
    third = good(raw, open_request(filled, size=100))
    assert go_on(raw, first, 100) == in_key_order(numbered(0, COUNT))
    assert not second.has_more_results, "there was nothing then"
    assert go_on(raw, third, 100) == in_key_order(numbered(100, 200, "again"))


@pytest.mark.parametrize(("limit", "expected"), [(0, COUNT), (1, 1), (10, 10), (1 << 40, COUNT)])
def test_a_limit_is_of_the_whole_scan_and_0_is_none(
    raw: RawClient, filled: int, limit: int, expected: int
) -> None:
    first = good(raw, open_request(filled, size=50, limit=limit))
    rows = go_on(raw, first, 50)
    assert rows == in_key_order(numbered(0, COUNT))[:expected]


def test_a_negative_limit_is_refused(raw: RawClient, filled: int) -> None:
    assert codes(raw, open_request(filled, limit=-1)) == [INVALID]


def test_a_scan_ends_by_itself_with_the_last_row(raw: RawClient, filled: int) -> None:
    answer = good(raw, open_request(filled))
    assert not answer.has_more_results
    assert answer.scanner_id
    assert codes(raw, next_request(answer.scanner_id, 1)) == [UNKNOWN_ID]


def test_the_last_call_again_gets_the_same_bytes(raw: RawClient, filled: int) -> None:
    """Also the very last one, which ended the scan: its answer may have got lost."""
    first = good(raw, open_request(filled, size=1000))
    seq, answer = 0, first
    while answer.has_more_results:
        again = call(raw, next_request(first.scanner_id, seq, 1000))
        assert again.SerializeToString() == answer.SerializeToString()
        seq += 1
        answer = good(raw, next_request(first.scanner_id, seq, 1000))
    assert seq > 1
    assert call(raw, next_request(first.scanner_id, seq)) == answer
    assert codes(raw, next_request(first.scanner_id, seq + 1)) == [UNKNOWN_ID]


@pytest.mark.parametrize("wrong", [-1, 0, 3, 100])
def test_a_call_out_of_order_is_refused_and_the_scan_goes_on(
    raw: RawClient, filled: int, wrong: int
) -> None:
    first = good(raw, open_request(filled, size=100))
    good(raw, next_request(first.scanner_id, 1, 100))
    refused = call(raw, next_request(first.scanner_id, wrong, 100))
    assert refused.error_code == INVALID
    assert "2 is next" in refused.error_message
    good(raw, next_request(first.scanner_id, 2, 100))


def test_calls_at_once_are_answered_or_busy_and_the_scan_survives(
    raw: RawClient, filled: int
) -> None:
    first = good(raw, open_request(filled, size=100))
    request = next_request(first.scanner_id, 1, 100)
    sent = [raw.begin(ApiKey.SCAN_KV, request) for _ in range(20)]
    answers = [m.ScanKvResponse.FromString(bytes(raw.answer(i).body)) for i in sent]
    found = [a for a in answers if not a.error_code]
    assert {a.error_code for a in answers} <= {0, BUSY}
    assert len({a.SerializeToString() for a in found}) == 1
    rest = []
    seq, answer = 1, found[0]
    while answer.has_more_results:
        seq += 1
        answer = good(raw, next_request(first.scanner_id, seq, 1 << 20))
        rest += rows_of(answer)
    assert rows_of(first) + rows_of(found[0]) + rest == in_key_order(numbered(0, COUNT))


def test_a_close_beside_a_call_lets_the_call_end(raw: RawClient, filled: int) -> None:
    for _ in range(20):
        first = good(raw, open_request(filled, size=100))
        going = raw.begin(ApiKey.SCAN_KV, next_request(first.scanner_id, 1, 100))
        closing = raw.begin(ApiKey.SCAN_KV, close_request(first.scanner_id))
        answer = m.ScanKvResponse.FromString(bytes(raw.answer(going).body))
        assert answer.error_code in (0, UNKNOWN_ID)
        assert not m.ScanKvResponse.FromString(bytes(raw.answer(closing).body)).error_code
    assert raw.alive()


def test_closing_twice_or_an_unknown_scan_is_fine(raw: RawClient, filled: int) -> None:
    first = good(raw, open_request(filled, size=100))
    for scanner_id in (first.scanner_id, first.scanner_id, b"never was", b""):
        answer = good(raw, close_request(scanner_id))
        assert (answer.scanner_id, answer.has_more_results) == (scanner_id, False)
    assert codes(raw, next_request(first.scanner_id, 1)) == [UNKNOWN_ID]


def test_requests_that_make_no_sense_open_nothing(raw: RawClient, filled: int) -> None:
    opening = open_request(filled)
    both = m.ScanKvRequest()
    both.CopyFrom(opening)
    both.scanner_id = b"x"
    closing = m.ScanKvRequest()
    closing.CopyFrom(opening)
    closing.close_scanner = True
    wrong: list[m.ScanKvRequest] = [both, closing, m.ScanKvRequest(call_seq_id=0)]
    wrong += [open_request(filled, size=size) for size in (0, -1, -(2**31))]
    wrong += [open_request(filled, seq=1), open_request(filled, seq=-1)]
    for field in ("call_seq_id", "batch_size_bytes"):
        lacking = m.ScanKvRequest()
        lacking.CopyFrom(opening)
        lacking.ClearField(field)
        wrong.append(lacking)
    for _ in range(10):  # more than a bucket may have, if each of them left one behind
        assert codes(raw, *wrong) == [INVALID] * len(wrong)
    good(raw, opening)


def test_tables_and_buckets_that_cannot_be_scanned_say_why(raw: RawClient, filled: int) -> None:
    wrong = [open_request(987_654), open_request(filled, 9), open_request(filled, partition_id=5)]
    assert codes(raw, *wrong) == [21, 21, 21]


def test_too_many_scans_of_a_bucket_are_refused_until_one_ends(raw: RawClient, filled: int) -> None:
    known = [good(raw, open_request(filled, size=1)) for _ in range(8)]
    refused = call(raw, open_request(filled, size=1))
    assert refused.error_code == TOO_MANY
    assert "retry after" in refused.error_message
    good(raw, close_request(known[2].scanner_id))
    known.append(good(raw, open_request(filled, size=1)))
    assert codes(raw, open_request(filled, size=1)) == [TOO_MANY]
    rows = go_on(raw, known[0])
    assert rows == in_key_order(numbered(0, COUNT))
    good(raw, open_request(filled, size=1))


def test_a_server_has_a_limit_of_its_own(new_server: Callable[..., DevServer]) -> None:
    server = new_server({"kv.scanner.max-per-server": "3"})
    with RawClient(server.port) as raw:
        tables = [create_by_hand(raw, f"t{i}", SCANNED) for i in range(2)]
        for table_id in tables:
            put_rows(raw, table_id, numbered(0, 3))
        known = [good(raw, open_request(tables[i % 2], size=1)) for i in range(3)]
        assert codes(raw, open_request(tables[0], size=1)) == [TOO_MANY]
        good(raw, close_request(known[0].scanner_id))
        good(raw, open_request(tables[0], size=1))


def test_a_scan_goes_on_over_another_connection(
    raw: RawClient, filled: int, dev_server: DevServer
) -> None:
    first = good(raw, open_request(filled, size=100))
    with RawClient(dev_server.port) as other:
        assert go_on(other, first, 100) == in_key_order(numbered(0, COUNT))


def test_a_table_dropped_during_a_scan_ends_it(
    raw: RawClient, filled: int, path: fluss.TablePath
) -> None:
    first = good(raw, open_request(filled, size=100))
    drop_by_hand(raw, path.table_name)
    refused = call(raw, next_request(first.scanner_id, 1, 100))
    assert refused.error_code == EXPIRED
    assert "stopped" in refused.error_message
    assert codes(raw, open_request(filled)) == [21]


def test_a_server_that_was_restarted_does_not_know_its_scans(
    new_server: Callable[..., DevServer],
) -> None:
    server = new_server()
    with RawClient(server.port) as raw:
        table_id = create_filled(raw, numbered(0, 30))
        first = good(raw, open_request(table_id, size=10))
    server.stop()
    server.start()
    with RawClient(server.port) as raw:
        assert codes(raw, next_request(first.scanner_id, 1)) == [UNKNOWN_ID]
        again = good(raw, open_request(table_id, size=10))
        assert again.log_offset == first.log_offset
        assert go_on(raw, again, 10) == in_key_order(numbered(0, 30))


def test_rows_of_an_indexed_table_come_as_it_has_them(
    raw: RawClient, path: fluss.TablePath
) -> None:
    table_id = put_all(raw, path, "kv_indexed")
    answer = good(raw, open_request(table_id))
    rows = decoded(limit_values(answer.records), "kv_indexed")
    assert len(rows) == len({CODEC.key((row[0],)) for row in rows}) > 0
