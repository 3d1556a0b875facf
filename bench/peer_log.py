"""Log tables against a peer: appends, fetches, pyfluss, memory."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

from bench.clients import BATCH_ROWS, BUCKETS
from bench.peer_side import Pair, Section, Side
from bench.report import Measure, compared
from bench.work import (
    ROWS_1MIB,
    Load,
    check_count,
    encoded,
    fetch_frames,
    produce_frames,
    recycle_pages,
    rss_bytes,
    ten_columns,
)

APPENDS = 64
"""Batches of 1 MiB in a round."""
FETCHED = 256
"""Batches of 1 MiB that are fetched in a round."""
FETCH_BATCHES = 4
"""Batches per bucket and fetch."""
SMALL_ROWS = 10
SMALL_SECONDS = 3.0
CLIENT_BATCHES = 40


class LogSide(Side):
    """A server with log tables."""

    def __init__(self, bootstrap: str, pids: tuple[int, ...], directory: Path) -> None:
        super().__init__(bootstrap, pids, directory)
        self.large = [ten_columns(ROWS_1MIB, i * ROWS_1MIB) for i in range(8)]
        self.small = [ten_columns(SMALL_ROWS, i) for i in range(64)]
        self.log = self.table()
        self.appended = 0
        self.small_log = self.table()
        self.small_appended = 0
        self.client_log = self.log

    def append(self) -> Load:
        """Large batches."""
        info = self.log
        frames = produce_frames(info, [encoded(info, rows) for rows in self.large])
        recycle_pages(self.directory, APPENDS << 20)
        load = self.target.load(frames, window=4, count=APPENDS)
        self.appended += load.answered * ROWS_1MIB
        check_count(self.connection, info, self.appended)
        return load

    def append_small(self) -> Load:
        """Small batches over sixteen connections."""
        info = self.small_log
        frames = produce_frames(info, [encoded(info, rows) for rows in self.small])
        load = self.target.load(frames, connections=16, seconds=SMALL_SECONDS)
        self.small_appended += load.answered * SMALL_ROWS
        check_count(self.connection, info, self.small_appended)
        return load

    def fetch(self, columns: tuple[int, ...] = ()) -> Load:
        """The begin of what `append` wrote."""
        size = FETCH_BATCHES * len(encoded(self.log, self.large[0]))
        step = FETCH_BATCHES * ROWS_1MIB
        frames = fetch_frames(
            self.log, range(0, FETCHED // BUCKETS * ROWS_1MIB, step), size, columns
        )
        return self.target.load(frames, count=len(frames))

    def client_append(self) -> float:
        """Rows per second through pyfluss."""
        self.client_log = self.table(properties=None)
        name = self.client_log.path.table
        work = {"do": "append", "table": name, "rows": BATCH_ROWS, "batches": CLIENT_BATCHES}
        return BATCH_ROWS * CLIENT_BATCHES / self.client.do(**work)

    def client_scan(self) -> float:
        """Rows per second through pyfluss, of what `client_append` wrote last."""
        name, count = self.client_log.path.table, BATCH_ROWS * CLIENT_BATCHES
        work = {"do": "scan", "table": name, "columns": None, "expect": count}
        return count / self.client.do(**work)

    def warm_up(self, seconds: float) -> None:
        """Everything in turn."""
        for _ in range(FETCHED // APPENDS):
            self.append()
        end = time.perf_counter() + seconds
        while time.perf_counter() < end:
            self.append()
            self.fetch()
            self.fetch((0, 3))
            self.append_small()
        self.client_append()
        self.client_scan()


def _append(pair: Pair[LogSide]) -> Iterator[Measure]:
    gigabytes = APPENDS * len(encoded(pair.ours.log, pair.ours.large[0])) / 1e9
    a, b = pair.both(LogSide.append)
    rate = lambda loads: [gigabytes * 1e3 / x.seconds for x in loads]  # noqa: E731
    cpu = lambda loads: [x.cpu_seconds / gigabytes for x in loads]  # noqa: E731
    yield compared("append", "append 1 MiB", rate(a), rate(b), "MB/s", at_least=1.1)
    yield compared("append.cpu", "append 1 MiB: CPU", cpu(a), cpu(b), "s/GB", at_most=0.7)


def _fetch(pair: Pair[LogSide]) -> Iterator[Measure]:
    received = lambda loads: [x.bytes_in / 1e6 / x.seconds for x in loads]  # noqa: E731
    a, b = pair.both(LogSide.fetch)
    yield compared("fetch", "fetch, all columns", received(a), received(b), "MB/s", at_least=1.5)
    a, b = pair.both(lambda side: side.fetch((0, 3)))
    yield compared(
        "fetch.2", "fetch, 2 of 10 columns", received(a), received(b), "MB/s", at_least=1.8
    )


def _small(pair: Pair[LogSide]) -> Iterator[Measure]:
    a, b = pair.both(LogSide.append_small)
    label = "append 10 rows × 16"
    yield compared("small", label, [x.rps for x in a], [x.rps for x in b], "/s", at_least=1.15)
    yield compared(
        "small.p99",
        f"{label}: p99",
        [x.p99_ms for x in a],
        [x.p99_ms for x in b],
        "ms",
        at_most=1.0,
    )
    micros = lambda loads: [x.cpu_seconds / x.answered * 1e6 for x in loads]  # noqa: E731
    yield compared("small.cpu", f"{label}: CPU", micros(a), micros(b), "µs", less_is_better=True)


def _client(pair: Pair[LogSide]) -> Iterator[Measure]:
    for what, work in (("append", LogSide.client_append), ("scan", LogSide.client_scan)):
        a, b = pair.both(work)
        yield compared(f"client.{what}", f"pyfluss {what}", a, b, " rows/s", at_least=1.0)


def _memory(pair: Pair[LogSide]) -> Iterator[Measure]:
    memory = [rss_bytes(side.target.pids) / 1e6 for side in (pair.ours, pair.theirs)]
    yield compared("memory", "resident memory", memory[:1], memory[1:], "MB", at_most=0.5)


SECTIONS: dict[str, Section[LogSide]] = {
    "append": _append,
    "fetch": _fetch,
    "small": _small,
    "client": _client,
    "memory": _memory,
}
