"""The lifetime of a scan. The test sets the clock, and runs the expiry sweep itself.

Tests with several servers, and tests of client errors, use real servers.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import zufluss
from tests.client.pk import create_table, upsert
from tests.conftest import SERVERS
from tests.end_to_end.kv_scans.support import EXPIRED, INVALID, UNKNOWN_ID, create, open_pins
from tests.end_to_end.raw import RawClient
from tests.end_to_end.scans import (
    all_rows,
    call,
    good,
    next_request,
    numbered,
    open_request,
    page_request,
    pages,
    pin,
    put_rows,
    rows_of,
)
from tests.servers import WarmServer
from tests.tablet.scan.test_service import AGE, IDLE, Scans, context, scanning
from tests.tablet.support import TABLE
from tests.waiting import eventually
from zufluss.client.sync.connection import Connection
from zufluss.client.sync.table import Table
from zufluss.errors import KvScanExpiredError, ZuflussError
from zufluss.testing.server import DevServer
from zufluss.wire import messages as m
from zufluss.wire.api import ApiKey

ROWS = 20
"""Of a table."""
SHORT = {
    "zufluss.metrics.port": "0",
    "zufluss.kv.scanner.age-max": "100ms",
    "kv.scanner.expiration-interval": "10ms",
}


@pytest.fixture(scope="module")
def short(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[DevServer]:
    """A server whose scans do not expire; tests may kill it."""
    server = WarmServer(tmp_path_factory.mktemp("short"), SHORT)
    request.config.stash.setdefault(SERVERS, []).append(server)
    with server:
        yield server


def filled(connection: Connection) -> Table:
    table = create_table(connection, "id INT NOT NULL, PRIMARY KEY (id)", bucket_count=1)
    upsert(table, {"id": [*range(ROWS)]})
    return table


async def expiry(work: Any) -> str:
    """The message of the error that a call must raise."""
    with pytest.raises(KvScanExpiredError) as caught:
        await work
    assert caught.value.code == EXPIRED
    return caught.value.message


# -- idle time -----------------------------------------------------------------------------------


async def test_a_pin_works_until_just_before_its_idle_time_and_each_call_begins_it_anew(
    tmp_path: Path,
) -> None:
    async with scanning(tmp_path) as scans:
        (made,) = await scans.open()
        assert made.idle_ms == IDLE * 1000
        for _ in range(4):
            scans.now += IDLE - 1
            assert (await scans.page(made, limit=1)).rows == 1
        scans.now += IDLE + 1
        assert len(scans.pins) == 1, "nobody has looked yet"
        assert f"nobody used it for {IDLE} s" in await expiry(scans.page(made))
        assert len(scans.pins) == 0
        assert "kv.scanner.ttl" in await expiry(scans.page(made)), "and it stays so"
        await scans.settled()


async def test_a_scan_of_fluss_works_until_just_before_its_idle_time(tmp_path: Path) -> None:
    async with scanning(tmp_path) as scans:
        first = await scans.scan(open_request(TABLE, size=1))
        for seq in range(1, 5):
            scans.now += IDLE - 1
            assert len(rows_of(await scans.scan(next_request(first.scanner_id, seq, 1)))) == 1
        scans.now += IDLE + 1
        for seq in (4, 5):
            late = await scans.scan(next_request(first.scanner_id, seq, 1))
            assert late.error_code == EXPIRED, "neither the next nor the last call again"
        assert len(scans.pins) == 0
        await scans.settled()


# -- one error for expired, unknown and closed scans ---------------------------------------------


async def test_expired_unknown_and_closed_are_one_error_whose_text_tells_which(
    tmp_path: Path,
) -> None:
    async with scanning(tmp_path) as scans:
        (expired,), (closed,) = await scans.open(), await scans.open()
        session = await scans.scan(open_request(TABLE, size=1))
        await scans.close(closed)
        scans.now += IDLE
        texts = {expired.pin_id: "nobody used it", closed.pin_id: "is not known here"}
        texts |= {session.scanner_id: "nobody used it", b"x" * 16: "is not known here"}
        for pin_id, text in texts.items():
            with pytest.raises(KvScanExpiredError, match=text):
                await scans.page(m.PbPin(pin_id=pin_id))
            answer = await scans.scan(next_request(pin_id, 1))
            assert answer.error_code in (EXPIRED, UNKNOWN_ID)
            assert text in answer.error_message


def test_an_id_of_another_server_is_unknown_like_one_that_never_was(
    raw: RawClient, short: DevServer
) -> None:
    table_id = create(raw)
    put_rows(raw, table_id, numbered(0, 30))
    (made,) = pin(raw, table_id)
    session = good(raw, open_request(table_id, size=1))
    with RawClient(short.port) as elsewhere:
        theirs = create(elsewhere)
        put_rows(elsewhere, theirs, numbered(0, 30, "theirs"))
        for pin_id in (made.pin_id, session.scanner_id, b"never was"):
            request = page_request(theirs, pin_id)
            assert elsewhere.error_code(ApiKey.SCAN_KV_SNAPSHOT, request) == UNKNOWN_ID
            answer = call(elsewhere, next_request(pin_id, 1))
            assert (answer.error_code, answer.HasField("records")) == (UNKNOWN_ID, False)
            assert "none of this server's" in answer.error_message
        assert open_pins(short) == 0
    assert all_rows(pages(raw, table_id, made.pin_id)) == numbered(0, 30)


def test_a_client_raises_the_same_error_for_a_scan_that_is_unknown(short: DevServer) -> None:
    """The server was killed and does not know the scan any more."""
    with zufluss.connect(short.bootstrap) as connection:
        table = filled(connection)
        with table.scan(resume=False).open() as scanner:
            short.kill()
            short.start()
            with pytest.raises(KvScanExpiredError, match="not known here") as caught:
                list(scanner)
    assert caught.value.code == UNKNOWN_ID
    assert not caught.value.retriable


# -- malformed calls -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    "wrong",
    [
        {"size": 0},
        {"size": -1},
        {"limit": -1},
        {"time_limit_ms": -1},
        {"schema_id": 9},
        {"projected_columns": [7]},
        {"bucket": 5},
        {"bucket": 1},
        {"who": "bob"},
    ],
    ids=str,
)
async def test_a_malformed_call_does_not_keep_a_pin_alive(
    tmp_path: Path, wrong: dict[str, Any]
) -> None:
    async with scanning(tmp_path, buckets=2) as scans:
        (made,) = await scans.open(0, who="alice")
        for _ in range(3):
            scans.now += (IDLE - 1) / 3
            with pytest.raises(ZuflussError):
                await scans.page(made, **{"who": "alice", **wrong})
        scans.now += 1
        await expiry(scans.page(made, who="alice"))


async def test_a_filter_that_cannot_be_read_does_not_keep_a_pin_alive(tmp_path: Path) -> None:
    async with scanning(tmp_path) as scans:
        (made,) = await scans.open()
        request = page_request(TABLE, made.pin_id)
        request.filter = b"\xff\xff"
        scans.now += IDLE - 1
        with pytest.raises(ZuflussError):
            await scans.service.scan_kv_snapshot(request, context())
        scans.now += 1
        await expiry(scans.page(made))


async def test_malformed_calls_do_not_keep_a_scan_of_fluss_alive(tmp_path: Path) -> None:
    async with scanning(tmp_path) as scans:
        first = await scans.scan(open_request(TABLE, size=1))
        scans.now += IDLE - 1
        both = open_request(TABLE)
        both.scanner_id = first.scanner_id
        lacking = [next_request(first.scanner_id, 1), next_request(first.scanner_id, 1)]
        lacking[0].ClearField("call_seq_id")
        lacking[1].ClearField("batch_size_bytes")
        order = [next_request(first.scanner_id, seq) for seq in (-1, 2, 99)]
        size = [next_request(first.scanner_id, 1, size) for size in (0, -1)]
        for request in [both, *lacking, *order, *size]:
            assert (await scans.scan(request)).error_code == INVALID
        scans.now += 1
        assert (await scans.scan(next_request(first.scanner_id, 1))).error_code == EXPIRED


# -- age -----------------------------------------------------------------------------------------


async def active_until(scans: Scans, end: float, made: m.PbPin, scanner_id: bytes) -> int:
    """Use both kinds of scan repeatedly; returns the last call of the session."""
    seq = 0
    while scans.now < end:
        scans.now += IDLE - 1
        if scans.now >= end:
            scans.now = end
        seq += 1
        assert (await scans.page(made, limit=1)).rows == 1
        assert not (await scans.scan(next_request(scanner_id, seq, 1))).error_code
    return seq


async def test_an_active_but_slow_scan_is_ended_at_the_age_cap(tmp_path: Path) -> None:
    async with scanning(tmp_path) as scans:
        (made,) = await scans.open()
        session = await scans.scan(open_request(TABLE, size=1))
        assert made.remaining_ms == AGE * 1000
        seq = await active_until(scans, AGE - 1, made, session.scanner_id)
        scans.now += 1
        reason = f"open for {AGE} s, the limit of zufluss.kv.scanner.age-max"
        assert reason in await expiry(scans.page(made))
        answer = await scans.scan(next_request(session.scanner_id, seq + 1, 1))
        assert answer.error_code == EXPIRED
        assert reason in answer.error_message
        assert len(scans.pins) == 0
        await scans.settled()
        (again,) = await scans.open(at=[made.log_offset])
        assert (await scans.page(again)).rows == ROWS, "who still wants it opens it again"


def test_a_client_is_told_that_its_scan_was_too_old(short: DevServer) -> None:
    """With `resume=False`; otherwise the client would open the state again at its offset."""
    with zufluss.connect(short.bootstrap) as connection:
        table = filled(connection)
        with table.scan(resume=False).open() as scanner:
            eventually(lambda: not open_pins(short), "the end of the pin")
            with pytest.raises(
                KvScanExpiredError, match=r"zufluss\.kv\.scanner\.age-max"
            ) as caught:
                list(scanner)
    assert caught.value.code == EXPIRED
    assert not caught.value.retriable
