"""Empty buckets, sizes, limits, and requests that are refused."""

from __future__ import annotations

from pathlib import Path

import pytest

import zufluss
from tests.client.pk import create_table, upsert
from tests.end_to_end.kv_scans.support import (
    CAP_BYTES,
    DATABASE,
    INVALID,
    close_pins,
    create,
    fresh_name,
    metric,
    open_pins,
    requests_of,
)
from tests.end_to_end.raw import RawClient
from tests.end_to_end.scans import (
    Row,
    all_rows,
    call,
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
    pin_request,
    put_rows,
    rows_of,
)
from tests.tablet.scan.test_service import scanning
from tests.tablet.support import TABLE
from zufluss.client.sync.connection import Connection
from zufluss.errors import AuthorizationError, InvalidTableError, PartitionNotExistError
from zufluss.model.schema import Schema
from zufluss.testing.server import DevServer
from zufluss.wire import messages as m
from zufluss.wire.api import ApiKey

COUNT = 300
INT_MAX, INT_MIN = 2**31 - 1, -(2**31)
UNKNOWN_TABLE, NO_KEY, NOT_ALLOWED, CORRUPT = 21, 20, 48, 3
COLUMNS = "id BIGINT NOT NULL, text STRING, PRIMARY KEY (id)"


@pytest.fixture
def filled(raw: RawClient) -> int:
    """A table with one bucket and rows in it."""
    table_id = create(raw)
    put_rows(raw, table_id, numbered(0, COUNT))
    return table_id


def scan_code(raw: RawClient, request: m.ScanKvSnapshotRequest) -> int:
    return raw.error_code(ApiKey.SCAN_KV_SNAPSHOT, request)


def codes(raw: RawClient, *requests: m.ScanKvRequest) -> list[int]:
    return [call(raw, request).error_code for request in requests]


# -- empty buckets -------------------------------------------------------------------------------


@pytest.mark.parametrize("rows", [0, 3], ids=["never written", "all deleted"])
def test_an_empty_bucket_has_an_offset_and_no_rows_and_leaves_no_session(
    server: DevServer, raw: RawClient, rows: int
) -> None:
    table_id, before = create(raw), open_pins(server)
    if rows:
        put_rows(raw, table_id, numbered(0, rows))
        delete_rows(raw, table_id, numbered(0, rows))
    for _ in range(9):  # more than a bucket may have at once
        answer = good(raw, open_request(table_id))
        assert (answer.has_more_results, answer.log_offset) == (False, 2 * rows)
        assert not answer.HasField("scanner_id")
        assert not answer.HasField("records")
    assert open_pins(server) == before
    (made,) = pin(raw, table_id)
    nothing = page(raw, table_id, made.pin_id)
    assert (made.log_offset, nothing.rows, nothing.done) == (2 * rows, 0, True)
    close_pins(raw, made.pin_id)
    assert open_pins(server) == before


def test_a_scan_of_an_empty_table_knows_where_its_changelog_goes_on(
    server: DevServer, paged: Connection
) -> None:
    table, before = create_table(paged, COLUMNS, bucket_count=3), open_pins(server)
    with table.scan().open() as scanner:
        assert list(scanner) == []
        assert [*scanner.log_offsets.values()] == [0, 0, 0]
    assert open_pins(server) == before
    upsert(table, {"id": [1], "text": ["first"]})
    changes = table.changelog(start=scanner.log_offsets).to_arrow()
    assert changes["id"].to_pylist() == [1]


# -- sizes ---------------------------------------------------------------------------------------


def test_a_row_larger_than_the_batch_size_comes_alone_and_the_scan_goes_on(
    raw: RawClient,
) -> None:
    table_id = create(raw)
    rows = [(i, "x" * (5000 if i % 2 else 10)) for i in range(8)]
    put_rows(raw, table_id, rows)
    first = good(raw, open_request(table_id, size=1))
    assert rows_of(first) == rows[:1]
    answers = [first]
    while answers[-1].has_more_results:
        answers.append(good(raw, next_request(first.scanner_id, len(answers), 100)))
    assert [row for answer in answers for row in rows_of(answer)] == rows
    assert len(answers) > 4, "no two large rows together"
    (made,) = pin(raw, table_id)
    found = pages(raw, table_id, made.pin_id, size=1)
    assert [answer.rows for answer in found if answer.rows] == [1] * 8
    assert all_rows(found) == rows
    close_pins(raw, made.pin_id)


def test_a_client_with_a_tiny_fetch_size_gets_large_rows(server: DevServer) -> None:
    tiny = {"client.scanner.kv.fetch.max-bytes": "100b"}
    with zufluss.connect(server.bootstrap, **tiny) as connection:
        table = create_table(connection, COLUMNS, bucket_count=1)
        upsert(table, {"id": [*range(4)], "text": ["x" * 2 * CAP_BYTES] * 4})
        batches = list(table.scan())
        assert [batch.num_rows for batch in batches] == [1] * 4
        assert {len(batch["text"][0].as_py()) for batch in batches} == {2 * CAP_BYTES}


def test_batch_sizes_that_are_none_are_refused_and_open_nothing(
    server: DevServer, raw: RawClient, filled: int
) -> None:
    missing = open_request(filled)
    missing.ClearField("batch_size_bytes")
    before = open_pins(server)
    wrong = [missing, *(open_request(filled, size=size) for size in (0, -1, INT_MIN))]
    assert codes(raw, *wrong) == [INVALID] * 4
    assert open_pins(server) == before
    (made,) = pin(raw, filled)
    lacking = page_request(filled, made.pin_id)
    lacking.ClearField("batch_size_bytes")
    refused = [page_request(filled, made.pin_id, size=size) for size in (0, -1, INT_MIN)]
    assert [scan_code(raw, request) for request in refused] == [INVALID] * 3
    assert scan_code(raw, lacking) == CORRUPT
    assert page(raw, filled, made.pin_id).rows == COUNT, "the pin is as good as before"
    close_pins(raw, made.pin_id)


def test_gb_are_cut_to_the_cap_of_the_server(raw: RawClient) -> None:
    table_id, row = create(raw), 1000
    rows = [(i, "x" * row) for i in range(4 * CAP_BYTES // row)]
    put_rows(raw, table_id, rows)
    first = good(raw, open_request(table_id, size=INT_MAX))
    assert CAP_BYTES <= len(first.records) < CAP_BYTES + 2 * row
    assert go_on(raw, first, INT_MAX) == in_key_order(rows)
    (made,) = pin(raw, table_id)
    answers = pages(raw, table_id, made.pin_id, size=INT_MAX)
    assert 4 <= len(answers) <= 5
    assert max(len(answer.records) for answer in answers) < CAP_BYTES * 1.25
    assert all_rows(answers) == in_key_order(rows)
    close_pins(raw, made.pin_id)


# -- limits --------------------------------------------------------------------------------------


@pytest.mark.parametrize(("limit", "expected"), [(0, COUNT), (10, 10), (COUNT + 1, COUNT)])
def test_a_limit_of_0_is_none_and_any_other_is_of_the_whole_scan(
    raw: RawClient, filled: int, limit: int, expected: int
) -> None:
    rows: list[Row] = in_key_order(numbered(0, COUNT))[:expected]
    assert go_on(raw, good(raw, open_request(filled, size=100, limit=limit)), 100) == rows
    (made,) = pin(raw, filled)
    assert all_rows([page(raw, filled, made.pin_id, limit=limit)]) == rows
    close_pins(raw, made.pin_id)
    assert codes(raw, open_request(filled, limit=-1)) == [INVALID]


def test_limit_10_over_3_buckets_fetches_10_rows_of_a_bucket_and_nothing_ahead(
    server: DevServer, paged: Connection
) -> None:
    """The first bucket has enough rows, so the client asks no other; the server counts requests."""
    table = create_table(paged, COLUMNS, bucket_count=3)
    upsert(table, {"id": [*range(3000)], "text": ["x" * 10] * 3000})
    rows, asked = metric(server, "zufluss_kv_scan_rows_total"), scans_of(server)
    assert table.scan(limit=10).to_arrow().num_rows == 10
    assert metric(server, "zufluss_kv_scan_rows_total") - rows == 10
    assert scans_of(server) - asked == 1


def test_a_limit_beyond_a_bucket_takes_from_each_what_is_still_missing(
    server: DevServer, paged: Connection
) -> None:
    table = create_table(paged, COLUMNS, bucket_count=3)
    upsert(table, {"id": [*range(12)], "text": ["x"] * 12})
    sizes = [table.scan(buckets=[bucket]).to_arrow().num_rows for bucket in range(3)]
    assert max(sizes) < 10
    rows, asked = metric(server, "zufluss_kv_scan_rows_total"), scans_of(server)
    assert table.scan(limit=10).to_arrow().num_rows == 10
    assert metric(server, "zufluss_kv_scan_rows_total") - rows == 10
    assert scans_of(server) - asked <= 3
    assert table.scan(limit=0).to_arrow().num_rows == 0
    with pytest.raises(ValueError, match="from 0 to"):
        table.scan(limit=-1)


def scans_of(server: DevServer) -> float:
    return requests_of(server, "SCAN_KV_SNAPSHOT")


# -- malformed requests --------------------------------------------------------------------------


def test_both_ids_neither_or_a_close_that_opens_are_invalid_and_open_nothing(
    server: DevServer, raw: RawClient, filled: int
) -> None:
    before = open_pins(server)
    both, closing = open_request(filled), open_request(filled)
    both.scanner_id = b"x" * 16
    closing.close_scanner = True
    neither = m.ScanKvRequest(call_seq_id=0, batch_size_bytes=100)
    nothing_to_close = m.ScanKvRequest(close_scanner=True)
    wrong = [both, neither, closing, nothing_to_close]
    assert codes(raw, *wrong) == [INVALID] * 4
    assert open_pins(server) == before
    assert raw.error_code(ApiKey.OPEN_KV_SNAPSHOT, pin_request(filled, [])) == INVALID
    assert open_pins(server) == before
    first = good(raw, open_request(filled, size=100))
    both.scanner_id = first.scanner_id
    assert codes(raw, both) == [INVALID]
    assert go_on(raw, first, 100) == in_key_order(numbered(0, COUNT)), "and harms no other scan"


# -- tables that cannot be scanned ---------------------------------------------------------------


def both_codes(raw: RawClient, table_id: int, bucket: int = 0, **options: int) -> tuple[int, int]:
    """The answers to a scan and to a pin of a bucket."""
    opening = m.OpenKvSnapshotRequest(table_id=table_id)
    opening.buckets.add(bucket_id=bucket, **options)
    (scan,) = codes(raw, open_request(table_id, bucket, **options))
    return scan, raw.error_code(ApiKey.OPEN_KV_SNAPSHOT, opening)


def test_tables_buckets_and_partitions_that_are_not_there_are_unknown(
    raw: RawClient, filled: int
) -> None:
    for wrong in ((987_654,), (filled, 1), (filled, -1)):
        assert both_codes(raw, *wrong) == (UNKNOWN_TABLE, UNKNOWN_TABLE)
    assert both_codes(raw, filled, partition_id=5) == (UNKNOWN_TABLE, UNKNOWN_TABLE)
    columns = Schema.of("id BIGINT NOT NULL, day STRING NOT NULL", primary_key=["id", "day"])
    parted = create(raw, columns, partition_keys=("day",))
    assert both_codes(raw, parted) == (UNKNOWN_TABLE, UNKNOWN_TABLE), "it needs a partition"
    assert both_codes(raw, parted, partition_id=77) == (UNKNOWN_TABLE, UNKNOWN_TABLE)
    (made,) = pin(raw, filled)
    elsewhere = [page_request(987_654, made.pin_id), page_request(filled, made.pin_id, 1)]
    assert [scan_code(raw, request) for request in elsewhere] == [UNKNOWN_TABLE] * 2
    close_pins(raw, made.pin_id)


def test_a_table_without_a_primary_key_says_so(raw: RawClient, paged: Connection) -> None:
    name = fresh_name()
    table_id = create(raw, Schema.of("id BIGINT, text STRING"), name=name)
    assert both_codes(raw, table_id) == (NO_KEY, NO_KEY)
    with pytest.raises(InvalidTableError, match="no primary key"):
        paged.table(f"{DATABASE}.{name}").scan(source="live")


def test_a_client_is_told_which_partition_is_not_there(paged: Connection) -> None:
    columns = "id BIGINT NOT NULL, day STRING NOT NULL, PRIMARY KEY (id, day)"
    table = create_table(paged, columns, partition_keys=["day"], bucket_count=1)
    with pytest.raises(PartitionNotExistError, match="monday"):
        table.scan(partitions=["monday"]).to_arrow()


async def test_who_may_not_read_the_table_opens_and_reads_nothing(tmp_path: Path) -> None:
    async with scanning(tmp_path) as scans:
        (made,) = await scans.open(who="alice")
        session = await scans.scan(open_request(TABLE, size=1), "alice")
        scans.readers.remove("alice")
        with pytest.raises(AuthorizationError, match=r"alice may not read db\.t"):
            await scans.open(who="alice")
        with pytest.raises(AuthorizationError, match=r"alice may not read db\.t"):
            await scans.page(made, who="alice")
        for request in (open_request(TABLE), next_request(session.scanner_id, 1)):
            assert (await scans.scan(request, "alice")).error_code == NOT_ALLOWED
        assert len(scans.pins) == 2, "no more than there were"
        scans.readers.add("alice")
        assert (await scans.page(made, who="alice")).rows == 20
