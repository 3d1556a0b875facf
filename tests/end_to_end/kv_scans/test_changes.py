"""The rows of a scan plus later changes are the table; a scan has no row that may still be lost.

The property test: writers change a few keys again and again, while scans of both kinds are opened,
read a page at a time in any order, and closed. Opening a scan flushes, flushes cause compactions,
and snapshots are taken continuously. The changelog gives the state at every offset, and the writers
know what they wrote last.
"""

from __future__ import annotations

import asyncio
import itertools
import random
import threading
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pyarrow as pa
import pytest

from tests.client.pk import create_table, delete, upsert
from tests.counts import rounds
from tests.end_to_end.kv import kv_batch, put, values_of
from tests.end_to_end.kv_scans.support import (
    Change,
    State,
    applied,
    bucket_directory,
    by_key,
    changes_from,
    close_pins,
    create,
    drop,
    fresh_name,
)
from tests.end_to_end.raw import RawClient
from tests.end_to_end.scans import (
    CODEC,
    Row,
    all_rows,
    arrow_of,
    good,
    in_key_order,
    next_request,
    open_request,
    page,
    pin,
    rows_of,
)
from tests.log.disk import SilentFiles
from tests.tablet.keyed import KEYED, many
from tests.tablet.scan.test_service import Scans, scanning
from tests.tablet.support import TABLE
from zufluss.client.sync.connection import Connection
from zufluss.client.sync.table import Table
from zufluss.errors import InvalidScanRequestError
from zufluss.testing.server import DevServer
from zufluss.wire import messages as m

WRITERS, SCANS, KEYS = 2, 14, 12
RUNS = rounds(8, 1_000)
SIZES = (1, 40, 200, 1 << 20)


class Scan:
    """A scan with raw frames that is read one page at a time."""

    def __init__(self, raw: RawClient, table_id: int, rng: random.Random) -> None:
        self.raw, self.table_id = raw, table_id
        self.size = rng.choice(SIZES)
        self.rows: list[Row] = []
        self.done = False
        earliest = raw.end_offset(table_id)
        self._next = self._open_pin() if rng.random() < 0.5 else self._open_session()
        assert earliest <= self.log_offset <= raw.end_offset(table_id), "exactly what is committed"

    def read(self) -> None:
        """The next page."""
        self._next()

    def _open_pin(self) -> Callable[[], None]:
        (made,) = pin(self.raw, self.table_id)
        self.log_offset, after = int(made.log_offset), None

        def read() -> None:
            nonlocal after
            answer = page(self.raw, self.table_id, made.pin_id, size=self.size, after_key=after)
            self.rows += all_rows([answer])
            after, self.done = answer.last_key, answer.done
            if self.done:
                close_pins(self.raw, made.pin_id)

        return read

    def _open_session(self) -> Callable[[], None]:
        first = good(self.raw, open_request(self.table_id, size=self.size))
        self.log_offset, seq = int(first.log_offset), 0
        self.rows += rows_of(first)
        self.done = not first.has_more_results

        def read() -> None:
            nonlocal seq
            seq += 1
            answer = good(self.raw, next_request(first.scanner_id, seq, self.size))
            self.rows += rows_of(answer)
            self.done = not answer.has_more_results

        return read


class Load:
    """Writers that put and delete keys of their own, as many batches as the test allows."""

    def __init__(self, server: DevServer, table_id: int, rng: random.Random) -> None:
        self._port, self._table_id = server.port, table_id
        self._turns = threading.Semaphore(0)
        self._over = False
        self._threads = ThreadPoolExecutor(WRITERS)
        self._writers = [
            self._threads.submit(self._write, rng.randrange(1 << 30), range(i, i + KEYS))
            for i in range(0, WRITERS * KEYS, KEYS)
        ]

    def let(self, batches: int) -> None:
        """Allow more batches, which are written in the background."""
        if batches:
            self._turns.release(batches)

    def end(self) -> State:
        """The rows at the end."""
        self._over = True
        self._turns.release(WRITERS)
        self._threads.shutdown()
        return {key: row for writer in self._writers for key, row in writer.result().items()}

    def _write(self, seed: int, keys: range) -> State:
        rng, state = random.Random(seed), State()
        with RawClient(self._port) as raw:
            for turn in itertools.count():
                self._turns.acquire()
                if self._over:
                    return state
                records = [_changed(state, rng, turn, key) for key in rng.choices(keys, k=4)]
                entry = put(raw, self._table_id, kv_batch(records))
                assert not entry.error_code, entry.error_message
        raise AssertionError("the end was never told")


def _changed(state: State, rng: random.Random, turn: int, key: int) -> bytes:
    """A record that puts or deletes a key."""
    if rng.random() < 0.4:
        state.pop(key, None)
        return CODEC.delete((key,))
    state[key] = (key, f"turn {turn} " + "x" * rng.choice((0, 0, 100)))
    return CODEC.put(state[key])


def scan_beside(load: Load, raw: RawClient, table_id: int, rng: random.Random) -> list[Scan]:
    """Open scans and read pages of any of them, until enough scans were opened and all are read."""
    scans: list[Scan] = []
    reading: list[Scan] = []
    while len(scans) < SCANS or reading:
        load.let(rng.randint(0, 2))
        if len(scans) < SCANS and len(reading) < 3 and rng.random() < 0.5:
            scans.append(Scan(raw, table_id, rng))
            reading.append(scans[-1])
        elif reading:
            rng.choice(reading).read()
        reading = [scan for scan in reading if not scan.done]
    return scans


def check(scan: Scan, changes: list[Change], now: State) -> None:
    """Assert: each key once, in order, as at open; with later changes the live table."""
    assert scan.rows == in_key_order(by_key(scan.rows).values())
    before = [change for change in changes if change[0] < scan.log_offset]
    after = [change for change in changes if change[0] >= scan.log_offset]
    assert by_key(scan.rows) == applied({}, before)
    assert applied(by_key(scan.rows), after) == now


def live_rows(raw: RawClient, table_id: int) -> State:
    """The current rows, looked up key by key."""
    keys = [CODEC.key((key,)) for key in range(WRITERS * KEYS)]
    values = [CODEC.value(value) for value in values_of(raw, table_id, keys)]
    return by_key(row for row in values if row is not None)


def compactions(server: DevServer, table_id: int) -> int:
    log = bucket_directory(server, table_id) / "rocks" / "LOG"
    return log.read_text(errors="replace").count("compaction_finished") if log.exists() else 0


@pytest.mark.timeout(3600)
def test_rows_and_the_changelog_from_their_offset_are_the_live_table_beside_writers(
    server: DevServer, raw: RawClient, rng: random.Random
) -> None:
    compacted = 0
    for _ in range(RUNS):
        name = fresh_name()
        table_id = create(raw, name=name)
        load = Load(server, table_id, rng)
        try:
            scans = scan_beside(load, raw, table_id, rng)
        finally:
            now = load.end()
        assert live_rows(raw, table_id) == now
        changes = changes_from(raw, table_id)
        for scan in scans:
            check(scan, changes, now)
        compacted += compactions(server, table_id)
        drop(raw, name)
    assert compacted, "no state was compacted while it was scanned"


def change_until(table: Table, stop: threading.Event) -> None:
    """Upsert, delete and insert again until stopped."""
    turn = 0
    while not stop.is_set():
        turn += 1
        ids = [(turn * 37 + i) % 300 for i in range(40)]
        upsert(table, {"id": ids, "text": [f"turn {turn}"] * len(ids)})
        delete(table, {"id": ids[:20]})
        upsert(table, {"id": ids[:10], "text": ["again"] * 10})


def arrow_rows(batches: Iterable[pa.RecordBatch]) -> State:
    return by_key((row["id"], row["text"]) for batch in batches for row in batch.to_pylist())


def test_a_client_continues_with_the_changelog_exactly_where_its_scan_was_pinned(
    paged: Connection,
) -> None:
    columns = "id BIGINT NOT NULL, text STRING, PRIMARY KEY (id)"
    table = create_table(paged, columns, bucket_count=3)
    upsert(table, {"id": [*range(300)], "text": ["first"] * 300})
    stop, runs = threading.Event(), []
    with ThreadPoolExecutor(1) as thread:
        writer = thread.submit(change_until, table, stop)
        try:
            for _ in range(5):
                with table.scan().open() as scanner:
                    runs.append((scanner.log_offsets, arrow_rows(scanner)))
        finally:
            stop.set()
        writer.result()
    now = arrow_rows(table.scan())
    for offsets, rows in runs:
        changes = table.changelog(start=offsets).to_arrow().sort_by("_log_offset").to_pylist()
        kinds = [(c["_log_offset"], c["_change_type"], (c["id"], c["text"])) for c in changes]
        assert applied(rows, kinds) == now
    assert any(rows != now for _, rows in runs)


class HeldFiles(SilentFiles):
    """Files that sync the log only when the test allows it."""

    def __init__(self) -> None:
        super().__init__()
        self.synced = threading.Event()
        self.synced.set()

    def fdatasync(self, fd: int) -> None:  # type: ignore[override]
        if "/kv-" not in str(Path(f"/proc/self/fd/{fd}").readlink()):
            self.synced.wait()


async def test_rows_that_are_not_committed_are_in_no_scan(tmp_path: Path) -> None:
    """The rows are in memory and in the log, but not synced: they may still be lost."""
    files, conf = HeldFiles(), {"zufluss.log.flush": "ack"}
    async with scanning(tmp_path, conf=conf, files=files) as scans:
        log = scans.tablet.replica().log
        files.synced.clear()
        try:
            changes = [*many(0, 10, "changed"), *many(20, 25), (15, None)]
            pending = asyncio.create_task(scans.tablet.put(*changes))
            while log.log_end_offset == 20:
                await asyncio.sleep(0)
            assert (log.high_watermark, pending.done()) == (20, False)
            (made,) = await scans.open()
            session = await scans.scan(open_request(TABLE))
            assert await scanned(scans, made) == rows_of(session) == many(0, 20)
            assert made.log_offset == session.log_offset == 20
            for offset in (21, log.log_end_offset):
                with pytest.raises(InvalidScanRequestError, match="allowed: 0 to 20"):
                    await scans.open(at=[offset])
        finally:
            files.synced.set()
        await pending
        assert await scanned(scans, made) == many(0, 20), "a pin does not grow"
        (later,) = await scans.open()
        assert later.log_offset == log.high_watermark == log.log_end_offset
        rows = by_key(await scanned(scans, later))
        assert (len(rows), rows[0][1], 15 in rows) == (24, "changed 0", False)


async def scanned(scans: Scans, made: m.PbPin) -> list[Row]:
    """All rows of a pin."""
    answer = await scans.page(made)
    assert answer.done
    return [tuple(row.values()) for row in arrow_of(answer, KEYED.arrow).to_pylist()]
