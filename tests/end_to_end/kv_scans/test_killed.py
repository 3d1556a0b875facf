"""The server is killed during a scan; the client continues where it was.

A reader reads page after page, a writer changes rows continuously, and the server is killed and
started at random moments. At the end the reader has the state at the offsets that it got when the
scan was opened: no row twice, none missing, none of a later time.
"""

from __future__ import annotations

import random
import shutil
import threading
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor

import pyarrow as pa
import pytest

import zufluss
from tests.client.pk import create_table, delete, upsert
from tests.conftest import SERVERS
from tests.counts import rounds
from tests.end_to_end.kv_scans.conftest import PAGED
from tests.end_to_end.kv_scans.support import State, applied, by_key
from tests.servers import WarmServer
from zufluss.client.sync.connection import Connection
from zufluss.client.sync.table import Table
from zufluss.errors import ZuflussError
from zufluss.model.table import TableBucket
from zufluss.testing.server import DevServer

KILLS = rounds(2, 20)
ROWS = 10_000 * KILLS
COLUMNS = "id BIGINT NOT NULL, text STRING, PRIMARY KEY (id)"
SNAPSHOTS = {"kv.snapshot.interval": "300ms"}


@pytest.fixture(scope="module")
def server(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[DevServer]:
    """A server to be killed."""
    server = WarmServer(tmp_path_factory.mktemp("killed"), SNAPSHOTS)
    request.config.stash.setdefault(SERVERS, []).append(server)
    with server:
        yield server


def filled(connection: Connection, rows: int) -> tuple[Table, State]:
    table = create_table(connection, COLUMNS, bucket_count=2)
    model = {i: (i, f"row {i}") for i in range(rows)}
    upsert(table, {"id": [*model], "text": [text for _, text in model.values()]})
    return table, model


def rows_of(batches: list[pa.RecordBatch]) -> State:
    return by_key((row["id"], row["text"]) for batch in batches for row in batch.to_pylist())


class Reader:
    """A scan that a thread reads as fast as possible."""

    def __init__(self, table: Table) -> None:
        self._scanner = table.scan().open()
        self._pages: list[pa.RecordBatch] = []
        self._more = threading.Condition()
        self._ended = False
        self.offsets = self._scanner.log_offsets

    def run(self) -> list[pa.RecordBatch]:
        """All pages."""
        try:
            with self._scanner:
                for page in self._scanner:
                    with self._more:
                        self._pages.append(page)
                        self._more.notify_all()
                assert self._scanner.log_offsets == self.offsets
            return self._pages
        finally:
            with self._more:
                self._ended = True
                self._more.notify_all()

    def wait_for(self, pages: int) -> int:
        """Wait for so many more pages; returns their number."""
        with self._more:
            target = len(self._pages) + pages
            assert self._more.wait_for(lambda: self._ended or len(self._pages) >= target, 120)
            assert not self._ended, f"the scan was over after {len(self._pages)} pages"
            return len(self._pages)


def change(table: Table, stop: threading.Event, seed: int) -> None:
    """Overwrite, delete and insert random keys."""
    rng = random.Random(seed)
    while not stop.is_set():
        ids = rng.sample(range(ROWS), 60)
        upsert(table, {"id": ids, "text": [f"changed {i}" for i in ids]})
        delete(table, {"id": ids[:30]})
        upsert(table, {"id": ids[:10], "text": ["again"] * 10})


def kill(server: DevServer, *, lose_pins: bool) -> None:
    """Kill and start the server; the pinned state is still there, or is removed to be rebuilt."""
    server.kill()
    left = [*server.data_dir.glob("**/kv-*/pins")]
    assert left
    for place in left:
        if lose_pins:
            shutil.rmtree(place)
    server.start()


def changes_of(table: Table, offsets: dict[TableBucket, int]) -> list[tuple[int, str, tuple]]:  # type: ignore[type-arg]
    rows = table.changelog(start=offsets).to_arrow().sort_by("_log_offset").to_pylist()
    return [(c["_log_offset"], c["_change_type"], (c["id"], c["text"])) for c in rows]


@pytest.mark.timeout(1200)
def test_a_scan_goes_on_at_the_same_offsets_after_kill_9_without_duplicate_or_gap(
    server: DevServer, rng: random.Random
) -> None:
    stop = threading.Event()
    with (
        zufluss.connect(server.bootstrap, **PAGED) as connection,
        ThreadPoolExecutor(2) as threads,
    ):
        table, model = filled(connection, ROWS)
        reader = Reader(table)
        read: Future[list[pa.RecordBatch]] = threads.submit(reader.run)
        writer = threads.submit(change, table, stop, rng.randrange(1 << 30))
        try:
            for turn in range(KILLS):
                pages = reader.wait_for(rng.randint(1, 30))
                print(f"kill {turn} after {pages} pages")
                kill(server, lose_pins=turn % 2 == 0)
            reader.wait_for(1)
            rows = rows_of(read.result())
        finally:
            stop.set()
        writer.result()
        assert rows == model
        now = rows_of(list(table.scan()))
        assert applied(rows, changes_of(table, reader.offsets)) == now != rows


def test_without_resume_a_killed_server_is_an_error_and_the_offsets_go_on(
    server: DevServer,
) -> None:
    """While the server is away, opening fails with a retriable error, and works afterwards."""
    impatient = {**PAGED, "client.request-timeout": "1s"}
    with (
        zufluss.connect(server.bootstrap, **impatient) as hasty,
        zufluss.connect(server.bootstrap, **PAGED) as patient,
    ):
        table, model = filled(patient, 2_000)
        away = hasty.table(table.path).scan(prefetch=0).open()
        back = table.scan(prefetch=0, resume=False).open()
        next(away), next(back)
        upsert(table, {"id": [*range(1_000)], "text": ["changed"] * 1_000})
        server.kill()
        with pytest.raises(ZuflussError) as caught:
            list(away)
        assert caught.value.retriable, caught.value
        server.start()
        with pytest.raises(zufluss.errors.KvScanExpiredError, match="open it again"):
            list(back)
        assert rows_of(list(table.scan(at=back.log_offsets))) == model
        assert away.log_offsets == back.log_offsets
