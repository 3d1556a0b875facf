"""Pins on a real server: OPEN_KV_SNAPSHOT, SCAN_KV_SNAPSHOT, CLOSE_KV_SNAPSHOT (30030 to 30032).

A pin holds the state of a bucket; the cursor is in the request. So whatever is repeated, sent twice
at once or begun anew gets the rows it got before.
"""

from __future__ import annotations

from collections.abc import Callable

import fluss
import pyarrow as pa
import pytest

from tests.end_to_end.guarded import guarded_properties, listener_ports, logged_in
from tests.end_to_end.kv import drop_by_hand, raw_changelog
from tests.end_to_end.raw import RawClient
from tests.end_to_end.scans import (
    CODEC,
    SCANNED,
    Row,
    all_rows,
    arrow_of,
    call,
    create_filled,
    delete_rows,
    good,
    in_key_order,
    next_request,
    numbered,
    open_request,
    page,
    page_request,
    pages,
    pin,
    pin_request,
    put_rows,
)
from tests.end_to_end.test_schema_evolution import add_column
from zufluss.errors import ZuflussError
from zufluss.model.expression import col
from zufluss.model.predicate import Leaf, LeafFunction
from zufluss.model.schema import Schema
from zufluss.model.table import TableDescriptor
from zufluss.testing.server import DevServer
from zufluss.wire import messages as m
from zufluss.wire.api import ApiKey

EXPIRED, UNKNOWN_ID, INVALID, BUSY = 66, 67, 68, 30004
COUNT = 300


@pytest.fixture
def table_id(raw: RawClient, path: fluss.TablePath) -> int:
    """A table with one bucket and rows in it."""
    return create_filled(raw, numbered(0, COUNT), path.table_name)


@pytest.fixture
def wide(raw: RawClient, path: fluss.TablePath) -> int:
    """A table with 16 buckets, one row in each."""
    descriptor = TableDescriptor(SCANNED, None, (), ("id",), 16, {"table.replication.factor": "1"})
    request = m.CreateTableRequest(
        table_path=m.PbTablePath(database_name="wire", table_name=path.table_name),
        table_json=descriptor.to_json(),
        ignore_if_exists=False,
    )
    raw.call(ApiKey.CREATE_TABLE, request)
    table_id = raw.table_id("wire", path.table_name)
    for bucket in range(16):
        put_rows(raw, table_id, numbered(bucket, bucket + 1), bucket)
    return table_id


def scan_code(raw: RawClient, request: m.ScanKvSnapshotRequest) -> int:
    return raw.error_code(ApiKey.SCAN_KV_SNAPSHOT, request)


def open_code(raw: RawClient, *args: object) -> int:
    return raw.error_code(ApiKey.OPEN_KV_SNAPSHOT, pin_request(*args))  # type: ignore[arg-type]


def close(raw: RawClient, *pin_ids: bytes) -> None:
    raw.call(ApiKey.CLOSE_KV_SNAPSHOT, m.CloseKvSnapshotRequest(pin_ids=pin_ids))


# -- rows ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [1, 200, 1 << 30])
def test_each_row_comes_once_in_key_order_whatever_the_batch_size(
    raw: RawClient, table_id: int, size: int
) -> None:
    (made,) = pin(raw, table_id)
    assert made.log_offset == raw.end_offset(table_id)
    assert (len(made.pin_id), made.leader_epoch >= 0) == (16, True)
    assert made.idle_ms == 600_000
    assert 3_500_000 < made.remaining_ms <= 3_600_000
    answers = pages(raw, table_id, made.pin_id, size=size)
    assert all_rows(answers) == in_key_order(numbered(0, COUNT))
    assert answers[-1].last_key == CODEC.key(in_key_order(numbered(0, COUNT))[-1])
    assert len(answers) >= {1: COUNT, 200: 10}.get(size, 1)


def test_a_pin_is_the_state_at_its_opening(raw: RawClient, table_id: int) -> None:
    (first,) = pin(raw, table_id)
    put_rows(raw, table_id, numbered(0, COUNT, "changed"))
    (second,) = pin(raw, table_id)
    delete_rows(raw, table_id, numbered(0, COUNT))
    (third,) = pin(raw, table_id)
    assert all_rows(pages(raw, table_id, first.pin_id)) == in_key_order(numbered(0, COUNT))
    changed = in_key_order(numbered(0, COUNT, "changed"))
    assert all_rows(pages(raw, table_id, second.pin_id)) == changed
    answer = page(raw, table_id, third.pin_id)
    assert (answer.rows, answer.done, answer.HasField("last_key")) == (0, True, False)
    close(raw, first.pin_id, second.pin_id, third.pin_id)


def test_rows_and_the_changelog_behind_them_are_the_live_table(
    raw: RawClient, table_id: int
) -> None:
    (made,) = pin(raw, table_id)
    put_rows(raw, table_id, numbered(100, 400, "later"))
    delete_rows(raw, table_id, numbered(0, 50))
    state = {row[0]: row for row in all_rows(pages(raw, table_id, made.pin_id))}
    for _, kind, row in raw_changelog(raw, table_id, SCANNED, start=made.log_offset):
        if kind in ("+I", "+U"):
            state[row[0]] = row
        elif kind == "-D":
            del state[row[0]]
    (now,) = pin(raw, table_id)
    assert in_key_order(state.values()) == all_rows(pages(raw, table_id, now.pin_id))


def test_the_same_page_again_is_the_same_bytes(raw: RawClient, table_id: int) -> None:
    (made,) = pin(raw, table_id)
    answers = pages(raw, table_id, made.pin_id, size=500)
    again = pages(raw, table_id, made.pin_id, size=500)
    assert [a.SerializeToString() for a in again] == [a.SerializeToString() for a in answers]
    middle = answers[len(answers) // 2]
    old = page(raw, table_id, made.pin_id, size=500, after_key=middle.last_key)
    assert old == answers[len(answers) // 2 + 1], "an older cursor"


def test_readers_at_once_all_get_their_rows(raw: RawClient, table_id: int) -> None:
    (made,) = pin(raw, table_id)
    requests = [page_request(table_id, made.pin_id, size=500) for _ in range(20)]
    sent = [raw.begin(ApiKey.SCAN_KV_SNAPSHOT, request) for request in requests]
    answers = {bytes(raw.answer(i).body) for i in sent}
    assert len(answers) == 1


def test_ranges_of_keys_can_be_read_in_parallel(raw: RawClient, table_id: int) -> None:
    (made,) = pin(raw, table_id)
    rows = in_key_order(numbered(0, COUNT))
    keys = [CODEC.key(rows[i]) for i in (99, 199)]
    parts = [
        pages(raw, table_id, made.pin_id, size=700, until_key=keys[0]),
        pages(raw, table_id, made.pin_id, size=700, after_key=keys[0], until_key=keys[1]),
        pages(raw, table_id, made.pin_id, size=700, after_key=keys[1]),
    ]
    assert [all_rows(part) for part in parts] == [rows[:100], rows[100:200], rows[200:]]
    nothing = page(raw, table_id, made.pin_id, after_key=keys[1], until_key=keys[0])
    assert (nothing.rows, nothing.done) == (0, True)


@pytest.mark.parametrize("limit", [1, 7, 1000])
def test_a_limit_is_of_one_answer(raw: RawClient, table_id: int, limit: int) -> None:
    (made,) = pin(raw, table_id)
    answers = pages(raw, table_id, made.pin_id, limit=limit)
    assert max(a.rows for a in answers) == min(limit, COUNT)
    assert all_rows(answers) == in_key_order(numbered(0, COUNT))


def test_projected_columns_come_in_their_order(raw: RawClient, table_id: int) -> None:
    (made,) = pin(raw, table_id)
    fields = [SCANNED.arrow.field(1), SCANNED.arrow.field(0)]
    answer = page(raw, table_id, made.pin_id, projected_columns=[1, 0])
    expected = [{"text": text, "id": i} for i, text in in_key_order(numbered(0, COUNT))]
    assert arrow_of(answer, pa.schema(fields)).to_pylist() == expected
    narrow = page(raw, table_id, made.pin_id, projected_columns=[0])
    assert len(narrow.records) < len(answer.records)


@pytest.mark.parametrize("limit", [0, 1, 3])
def test_a_filter_on_the_server_gets_the_rows_it_gets_on_the_client(
    raw: RawClient, table_id: int, limit: int
) -> None:
    (made,) = pin(raw, table_id)
    predicate = (col("text").ends_with("7") | (col("id") < 3)).resolve(SCANNED)
    expected = [r for r in in_key_order(numbered(0, COUNT)) if r[1].endswith("7") or r[0] < 3]
    for size in (100, 1 << 20):
        answers = pages(raw, table_id, made.pin_id, size=size, filter=predicate, limit=limit)
        assert all_rows(answers) == expected
        assert all(not limit or a.rows <= limit for a in answers)


def test_a_filter_that_nothing_matches_is_done_in_one_call(raw: RawClient, table_id: int) -> None:
    """The server continues while it has time; the client need not request each page."""
    (made,) = pin(raw, table_id)
    nothing = (col("id") < 0).resolve(SCANNED)
    answer = page(raw, table_id, made.pin_id, size=100, filter=nothing)
    assert (answer.rows, answer.done, answer.HasField("records")) == (0, True, False)


def test_a_call_without_time_answers_how_far_it_came(raw: RawClient, table_id: int) -> None:
    """The answer has no rows, is not done, and has the same cursor; later calls continue there."""
    (made,) = pin(raw, table_id)
    after = CODEC.key(in_key_order(numbered(0, COUNT))[10])
    rows: list[Row] = []
    done = False
    while not done:
        answer = page(raw, table_id, made.pin_id, size=1000, after_key=after, time_limit_ms=0)
        assert answer.rows or answer.last_key == after
        rows += all_rows([answer])
        after, done = answer.last_key, answer.done
    assert rows == in_key_order(numbered(0, COUNT))[11:]


def test_a_column_added_later_is_null_in_old_rows_and_unknown_to_old_readers(
    raw: RawClient, table_id: int, path: fluss.TablePath
) -> None:
    (before,) = pin(raw, table_id)
    raw.call(ApiKey.ALTER_TABLE, add_column(path, "score", {"type": "DOUBLE"}))
    evolved = Schema.of("id BIGINT NOT NULL, text STRING, score DOUBLE", primary_key=["id"])
    answer = page(raw, table_id, before.pin_id, schema_id=2, limit=2)
    rows = arrow_of(answer, evolved.arrow).to_pylist()
    assert [row["score"] for row in rows] == [None, None]
    old = page(raw, table_id, before.pin_id, schema_id=1, limit=2)
    assert all_rows([old]) == in_key_order(numbered(0, COUNT))[:2]
    missing = Leaf(LeafFunction.IS_NOT_NULL, evolved.columns[2].id)
    none = page(raw, table_id, before.pin_id, schema_id=2, filter=missing, schema=evolved)
    assert (none.rows, none.done) == (0, True)
    assert scan_code(raw, page_request(table_id, before.pin_id, schema_id=3)) == 9


# -- pins ---------------------------------------------------------------------------------------


def test_a_whole_table_is_pinned_in_one_call(raw: RawClient, wide: int) -> None:
    pins = pin(raw, wide, *range(16))
    assert [p.log_offset for p in pins] == [1] * 16
    assert len({p.pin_id for p in pins}) == 16
    for bucket, each in enumerate(pins):
        assert all_rows([page(raw, wide, each.pin_id, bucket)]) == numbered(bucket, bucket + 1)


def test_one_bucket_that_cannot_be_pinned_releases_the_others(raw: RawClient, wide: int) -> None:
    for _ in range(10):  # more often than a bucket may have pins
        assert open_code(raw, wide, [*range(16), 16]) == 21
        assert open_code(raw, wide, [*range(4)], [None, None, 1000, None]) == INVALID
    full = [pin(raw, wide, 3) for _ in range(8)]
    for _ in range(10):
        assert open_code(raw, wide, range(16)) == BUSY
    close(raw, full[0][0].pin_id)
    pin(raw, wide, *range(16))


def test_too_many_pins_say_when_to_come_again(raw: RawClient, table_id: int) -> None:
    for _ in range(8):
        pin(raw, table_id)
    with pytest.raises(ZuflussError, match="retry after 500 ms") as caught:
        pin(raw, table_id)
    assert caught.value.retriable
    assert caught.value.code == BUSY


def test_the_state_at_an_offset_can_be_pinned_again(raw: RawClient, table_id: int) -> None:
    (first,) = pin(raw, table_id)
    put_rows(raw, table_id, numbered(0, COUNT, "changed"))
    request = pin_request(table_id, [0], [first.log_offset])
    (again,) = raw.call(ApiKey.OPEN_KV_SNAPSHOT, request).pins
    assert again.log_offset == first.log_offset
    assert again.pin_id != first.pin_id
    close(raw, first.pin_id)
    assert all_rows(pages(raw, table_id, again.pin_id)) == in_key_order(numbered(0, COUNT))


def test_a_pin_goes_on_at_the_same_offset_after_a_kill(
    new_server: Callable[..., DevServer],
) -> None:
    server = new_server()
    with RawClient(server.port) as raw:
        table_id = create_filled(raw, numbered(0, 100))
        (before,) = pin(raw, table_id)
        first = page(raw, table_id, before.pin_id, limit=30)
        put_rows(raw, table_id, numbered(0, 100, "changed"))
    server.kill()
    server.start()
    with RawClient(server.port) as raw:
        assert scan_code(raw, page_request(table_id, before.pin_id)) == UNKNOWN_ID
        request = pin_request(table_id, [0], [before.log_offset])
        (again,) = raw.call(ApiKey.OPEN_KV_SNAPSHOT, request).pins
        rest = pages(raw, table_id, again.pin_id, after_key=first.last_key)
        assert all_rows([first, *rest]) == in_key_order(numbered(0, 100))


@pytest.mark.parametrize("offset", [-1, 1_000_000])
def test_an_offset_that_no_state_has_is_refused(raw: RawClient, table_id: int, offset: int) -> None:
    assert open_code(raw, table_id, [0], [offset]) == INVALID


def test_a_closed_pin_is_unknown_and_may_be_closed_again(raw: RawClient, table_id: int) -> None:
    (made,) = pin(raw, table_id)
    close(raw, made.pin_id, b"never was")
    close(raw, made.pin_id)
    assert scan_code(raw, page_request(table_id, made.pin_id)) == UNKNOWN_ID
    assert scan_code(raw, page_request(table_id, b"x" * 16)) == UNKNOWN_ID


def test_a_pin_of_another_bucket_or_of_a_scan_is_unknown(raw: RawClient, wide: int) -> None:
    (made,) = pin(raw, wide, 3)
    assert scan_code(raw, page_request(wide, made.pin_id, 4)) == UNKNOWN_ID
    assert call(raw, next_request(made.pin_id, 0)).error_code == UNKNOWN_ID
    assert page(raw, wide, made.pin_id, 3).rows == 1


def test_a_close_beside_a_call_lets_the_call_end(raw: RawClient, table_id: int) -> None:
    for _ in range(20):
        (made,) = pin(raw, table_id)
        going = raw.begin(ApiKey.SCAN_KV_SNAPSHOT, page_request(table_id, made.pin_id, size=500))
        close(raw, made.pin_id)
        frame = raw.answer(going)
        assert frame.error is None or frame.error.code == UNKNOWN_ID
    assert raw.alive()


def test_requests_that_make_no_sense_are_refused_and_the_pin_stays(
    raw: RawClient, table_id: int
) -> None:
    (made,) = pin(raw, table_id)

    def code(**options: object) -> int:
        return scan_code(raw, page_request(table_id, made.pin_id, **options))  # type: ignore[arg-type]

    assert [code(size=size) for size in (0, -1, -(2**31))] == [INVALID] * 3
    assert [code(limit=-1), code(time_limit_ms=-1)] == [INVALID] * 2
    assert [code(projected_columns=c) for c in ([2], [-1], [0, 0])] == [34] * 3
    assert [code(schema_id=i) for i in (0, -1, 2)] == [9] * 3
    unknown = page_request(table_id, made.pin_id)
    unknown.filter = m.PbPredicate(type=7).SerializeToString()
    assert scan_code(raw, unknown) == INVALID
    unknown.filter = b"\xff\xff\xff"
    assert scan_code(raw, unknown) == 3
    assert page(raw, table_id, made.pin_id).rows == COUNT


def test_tables_and_buckets_that_cannot_be_pinned_say_why(raw: RawClient, table_id: int) -> None:
    assert open_code(raw, 987_654) == 21
    assert open_code(raw, table_id, [1]) == 21
    assert open_code(raw, table_id, []) == INVALID
    (made,) = pin(raw, table_id)
    assert scan_code(raw, page_request(987_654, made.pin_id)) == 21


def test_a_table_dropped_during_a_scan_ends_its_pins(
    raw: RawClient, table_id: int, path: fluss.TablePath
) -> None:
    (made,) = pin(raw, table_id)
    page(raw, table_id, made.pin_id, size=100)
    drop_by_hand(raw, path.table_name)
    assert scan_code(raw, page_request(table_id, made.pin_id)) == 21
    close(raw, made.pin_id)


def test_a_server_that_stops_does_not_wait_for_its_pins(
    new_server: Callable[..., DevServer],
) -> None:
    server = new_server()
    with RawClient(server.port) as raw:
        table_id = create_filled(raw, numbered(0, 100))
        pin(raw, table_id)
        good(raw, open_request(table_id, size=10))
        assert server.stop() == 0


# -- whose pin it is ----------------------------------------------------------------------------


@pytest.fixture
def guarded(new_server: Callable[..., DevServer]) -> int:
    """The port of a listener that requires a password."""
    ports = listener_ports()
    new_server(guarded_properties(ports, "alice", "bob"))
    return ports["SECURE"]


def test_another_user_gets_nothing_of_a_pin_or_scan(guarded: int) -> None:
    with logged_in(guarded, "alice") as alice, logged_in(guarded, "bob") as bob:
        table_id = create_filled(alice, numbered(0, 100))
        (made,) = pin(alice, table_id)
        session = good(alice, open_request(table_id, size=100))
        assert scan_code(bob, page_request(table_id, made.pin_id)) == 48
        request = m.CloseKvSnapshotRequest(pin_ids=[made.pin_id])
        assert bob.error_code(ApiKey.CLOSE_KV_SNAPSHOT, request) == 48
        assert call(bob, next_request(session.scanner_id, 1)).error_code == 48
        closing = m.ScanKvRequest(scanner_id=session.scanner_id, close_scanner=True)
        assert call(bob, closing).error_code == 48
        assert page(alice, table_id, made.pin_id).rows == 100
        last = good(alice, next_request(session.scanner_id, 1))
        assert not last.has_more_results
        assert call(bob, next_request(session.scanner_id, 1)).error_code == 48, "its last answer"
