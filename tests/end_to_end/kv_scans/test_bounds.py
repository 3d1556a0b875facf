"""No call takes long, whatever was deleted; no reader costs much memory, however slow."""

from __future__ import annotations

import re
import socket
from collections.abc import Callable
from pathlib import Path

import pyarrow as pa
import pytest

from tests.client.pk import create_table, delete, upsert
from tests.counts import rounds
from tests.end_to_end.kv_scans.support import CAP_BYTES, close_pins, create, metric
from tests.end_to_end.raw import RawClient
from tests.end_to_end.scans import (
    CODEC,
    SCANNED,
    all_rows,
    good,
    next_request,
    open_request,
    page,
    page_request,
    pin,
    put_rows,
    rows_of,
)
from tests.tablet.keyed import many
from tests.tablet.scan.test_service import scanning
from tests.tablet.support import TABLE
from tests.waiting import WAIT_SECONDS
from zufluss.client.sync.connection import Connection
from zufluss.client.sync.table import Table
from zufluss.model.expression import col
from zufluss.testing.server import DevServer
from zufluss.wire import messages as m
from zufluss.wire.api import ApiKey
from zufluss.wire.codec import decode

TOMBSTONES = rounds(30_000, 1_000_000)
COLUMNS = "id BIGINT NOT NULL, text STRING, PRIMARY KEY (id)"


# -- the time of a call --------------------------------------------------------------------------


@pytest.fixture
def graves(raw: RawClient, paged: Connection) -> Table:
    """One row among deleted rows only."""
    table = create_table(paged, COLUMNS, bucket_count=1)
    ids = pa.array(range(TOMBSTONES + 1), pa.int64())
    upsert(table, pa.table({"id": ids, "text": pa.array(["a row"] * len(ids))}))
    flush(raw, table)
    delete(table, {"id": ids.slice(0, TOMBSTONES)})
    flush(raw, table)
    return table


def flush(raw: RawClient, table: Table) -> None:
    """Flush memory to disk, so that rows and their deletes are in different files."""
    (made,) = pin(raw, table.info.table_id)
    close_pins(raw, made.pin_id)


@pytest.mark.timeout(600)
def test_a_page_over_deleted_rows_returns_in_time_with_progress_and_no_rows(
    raw: RawClient, graves: Table
) -> None:
    """A call without time left answers with its position; reading of the page continues."""
    table_id = graves.info.table_id
    (made,) = pin(raw, table_id)
    first_keys = sorted(CODEC.key((i,)) for i in range(TOMBSTONES))[:2]
    for after in (None, *first_keys):
        answers = [page(raw, table_id, made.pin_id, after_key=after, time_limit_ms=0)]
        while not answers[-1].done:
            now = answers[-1].last_key if answers[-1].HasField("last_key") else None
            if not answers[-1].rows:
                assert now == after, "and the page is not begun anew"
            answers.append(page(raw, table_id, made.pin_id, after_key=now, time_limit_ms=1))
        assert all_rows(answers) == [(TOMBSTONES, "a row")]
        assert len(answers) > rounds(1, 5)
    close_pins(raw, made.pin_id)
    assert graves.scan().to_arrow()["id"].to_pylist() == [TOMBSTONES]


async def test_a_scan_of_fluss_over_deleted_rows_says_that_there_is_more(
    tmp_path: Path,
) -> None:
    async with scanning(tmp_path, conf={"zufluss.kv.scanner.time-limit": "1ms"}) as scans:
        await scans.tablet.put(*many(0, 20_000))
        await scans.close(*await scans.open())
        await scans.tablet.put(*((i, None) for i in range(1, 20_000)))
        answer = await scans.scan(open_request(TABLE, size=1))
        scanner_id, seq, rows = answer.scanner_id, 0, rows_of(answer)
        empty = not answer.HasField("records")
        while answer.has_more_results:
            seq += 1
            answer = await scans.scan(next_request(scanner_id, seq))
            assert not answer.error_code
            rows += rows_of(answer)
            empty += not answer.HasField("records")
        assert rows == many(0, 1)
        assert empty, "the run was read within one call"


def test_rows_that_do_not_match_are_passed_over_with_progress(raw: RawClient) -> None:
    """Every answer without rows has a later key than the one before, or the page being read."""
    table_id = create(raw)
    put_rows(raw, table_id, [(i, f"row {i}") for i in range(5_000)])
    (made,) = pin(raw, table_id)
    predicate = (col("id") == 4_999).resolve(SCANNED)
    after, passed, done, rows = b"", list[bytes](), False, 0
    while not done:
        options = {"after_key": after, "filter": predicate, "size": 2_000, "time_limit_ms": 0}
        answer = page(raw, table_id, made.pin_id, **options)
        assert answer.last_key >= after
        if answer.last_key > after:
            passed.append(answer.last_key)
        after, done, rows = answer.last_key, answer.done, rows + answer.rows
    assert rows == 1
    assert len(passed) > 5
    close_pins(raw, made.pin_id)


# -- the memory of a slow reader -----------------------------------------------------------------

REQUESTS, OTHERS = 2_000, 50
LARGE = CAP_BYTES - 100
"""Bytes of a value: two values make a page."""
BOUND = 60 << 20
"""Memory that a server may need for a client that does not read: far less than requested."""


def peak(server: DevServer) -> int:
    """The most memory that a server has ever had."""
    status = Path(f"/proc/{server.pid}/status").read_text()
    (found,) = re.findall(r"VmHWM:\s+(\d+) kB", status)
    return int(found) << 10


class Lazy(RawClient):
    """A client that sends requests and does not read, with a small socket buffer."""

    def __init__(self, port: int) -> None:
        super().__init__(port)
        self.socket.close()
        self.socket = socket.socket()
        self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 64 << 10)
        self.socket.settimeout(WAIT_SECONDS)
        self.socket.connect(("127.0.0.1", port))


def wait_until_stalled(server: DevServer, busy: Callable[[], None]) -> None:
    """Wait until other clients get many answers and the one that does not read gets none."""
    before = -1.0
    while (now := metric(server, "zufluss_kv_scan_rows_total")) != before:
        for _ in range(OTHERS):
            busy()
        before = now + OTHERS


def test_a_client_that_does_not_read_costs_the_server_no_more_than_a_few_pages(
    server: DevServer, raw: RawClient
) -> None:
    """The client requests 250 MB at once, as pages of one pin."""
    table_id, other = create(raw), create(raw)
    for i in range(2):
        put_rows(raw, table_id, [(i, chr(65 + i) * LARGE)])
    put_rows(raw, other, [(1, "a row")])
    (made,), (little,) = pin(raw, table_id), pin(raw, other)
    whole = page(raw, table_id, made.pin_id)
    assert whole.rows == 2

    def busy() -> None:
        assert page(raw, other, little.pin_id).rows == 1

    busy()
    before, answered = peak(server), metric(server, "zufluss_kv_scan_bytes_total")
    with Lazy(server.port) as lazy:
        request = page_request(table_id, made.pin_id)
        asked = [lazy.begin(ApiKey.SCAN_KV_SNAPSHOT, request) for _ in range(REQUESTS)]
        wait_until_stalled(server, busy)
        made_so_far = metric(server, "zufluss_kv_scan_bytes_total") - answered
        assert made_so_far < BOUND < REQUESTS * len(whole.records) / 4
        assert peak(server) - before < BOUND
        for number in asked[:50]:
            answer = decode(m.ScanKvSnapshotResponse, lazy.answer(number).body)
            assert answer == whole
    wait_until_stalled(server, busy)  # what it had asked for is done with
    close_pins(raw, made.pin_id, little.pin_id)


def test_a_slow_reader_of_a_scan_gets_its_pages_one_by_one(
    server: DevServer, raw: RawClient
) -> None:
    """The server prepares no pages between two calls: it made only those that it answered."""
    table_id = create(raw)
    for i in range(6):
        put_rows(raw, table_id, [(i, chr(65 + i) * LARGE)])
    rows = metric(server, "zufluss_kv_scan_rows_total")
    answer, seq, found = good(raw, open_request(table_id, size=1 << 30)), 0, 0
    scanner_id = answer.scanner_id
    while True:
        found += len(rows_of(answer))
        assert len(answer.records) < CAP_BYTES + LARGE + 1_000, (
            "the cap, and the row that reached it"
        )
        assert metric(server, "zufluss_kv_scan_rows_total") == rows + found
        if not answer.has_more_results:
            break
        seq += 1
        answer = good(raw, next_request(scanner_id, seq, 1 << 30))
    assert found == 6
