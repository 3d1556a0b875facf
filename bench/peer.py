"""An optional comparison with an Apache Fluss that runs somewhere: the same frames on both servers.

    python -m bench.peer --bootstrap-peer 127.0.0.1:9123 --pids 4711,4712

The pids are those of its servers on this machine, for CPU and memory. Ours is started here with
`zufluss.log.flush=os`, because that is what the peer does by default. Both are warmed up first (a
cold JVM serves a third of what a warm one does), then they take turns. Nothing else of zufluss
needs a peer.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import zufluss
from bench.clients import BATCH_ROWS, BUCKETS, Worker
from bench.report import Measure, compared, machine, table
from bench.work import (
    ROWS_1MIB,
    UNCOMPRESSED,
    Load,
    T,
    Target,
    alternate,
    check_count,
    encoded,
    fetch_frames,
    new_table,
    produce_frames,
    recycle_pages,
    rss_bytes,
    ten_columns,
)
from zufluss.model.table import TableInfo
from zufluss.testing.server import DevServer

APPENDS = 64
"""Batches of 1 MiB in a round."""
FETCHED = 256
"""Batches of 1 MiB that are fetched in a round."""
FETCH_BATCHES = 4
"""Batches per bucket and fetch."""
SMALL_ROWS = 10
SMALL_SECONDS = 3.0
CLIENT_BATCHES = 40


class Side:
    """One of the two servers."""

    def __init__(self, bootstrap: str, pids: tuple[int, ...], directory: Path) -> None:
        self.connection = zufluss.connect(bootstrap)
        nodes = self.connection.admin.server_nodes()
        tablet = next(node for node in nodes if node.role == "tablet")
        self.target = Target(f"{tablet.host}:{tablet.port}", pids)
        self.directory = directory
        self.prefix = f"bench_{int(time.time())}"
        self.count = 0
        self.client = Worker("pyfluss", bootstrap)
        self.large = [ten_columns(ROWS_1MIB, i * ROWS_1MIB) for i in range(8)]
        self.small = [ten_columns(SMALL_ROWS, i) for i in range(64)]
        self.log = self.table()
        self.appended = 0
        self.small_log = self.table()
        self.small_appended = 0
        self.client_log = self.log

    def table(self, properties: dict[str, str] | None = UNCOMPRESSED) -> TableInfo:
        """A new table. There are few of them, and they stay: a peer may be slow to make leaders."""
        self.count += 1
        name = f"{self.prefix}_{self.count}"
        return new_table(self.connection, name, buckets=BUCKETS, properties=properties)

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

    def close(self) -> None:
        """Leave nothing behind."""
        for i in range(self.count):
            self.connection.admin.drop_table(f"fluss.{self.prefix}_{i + 1}")
        self.client.close()
        self.connection.close()


def measure(ours: Side, theirs: Side, rounds: int) -> Iterator[Measure]:
    """Everything."""
    pids = [*ours.target.pids, *theirs.target.pids]
    pids += [side.client.process.pid for side in (ours, theirs)]

    def both(work: Callable[[Side], T]) -> tuple[list[T], ...]:
        return alternate(rounds, pids, lambda: work(ours), lambda: work(theirs))

    gigabytes = APPENDS * len(encoded(ours.log, ours.large[0])) / 1e9
    a, b = both(Side.append)
    rate = lambda loads: [gigabytes * 1e3 / x.seconds for x in loads]  # noqa: E731
    cpu = lambda loads: [x.cpu_seconds / gigabytes for x in loads]  # noqa: E731
    yield compared("append", "append 1 MiB", rate(a), rate(b), "MB/s", at_least=1.1)
    yield compared("append.cpu", "append 1 MiB: CPU", cpu(a), cpu(b), "s/GB", at_most=0.7)
    received = lambda loads: [x.bytes_in / 1e6 / x.seconds for x in loads]  # noqa: E731
    a, b = both(Side.fetch)
    yield compared("fetch", "fetch, all columns", received(a), received(b), "MB/s", at_least=1.5)
    a, b = both(lambda side: side.fetch((0, 3)))
    yield compared(
        "fetch.2", "fetch, 2 of 10 columns", received(a), received(b), "MB/s", at_least=1.8
    )
    a, b = both(Side.append_small)
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
    for what, work in (("append", Side.client_append), ("scan", Side.client_scan)):
        a, b = both(work)
        yield compared(f"client.{what}", f"pyfluss {what}", a, b, " rows/s", at_least=1.0)
    memory = [rss_bytes(side.target.pids) / 1e6 for side in (ours, theirs)]
    yield compared("memory", "resident memory", memory[:1], memory[1:], "MB", at_most=0.5)


def warm_up(ours: Side, theirs: Side, seconds: float) -> None:
    """The same work on both until the peer's compiler has seen enough."""
    for side in (ours, theirs):
        for _ in range(FETCHED // APPENDS):
            side.append()
        end = time.perf_counter() + seconds
        while time.perf_counter() < end:
            side.append()
            side.fetch()
            side.fetch((0, 3))
            side.append_small()
        side.client_append()
        side.client_scan()


def main() -> None:
    """Compare and print."""
    parser = argparse.ArgumentParser(
        prog="python -m bench.peer",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--bootstrap-peer", required=True, help="host:port of the other server")
    parser.add_argument("--pids", required=True, help="its processes, separated by commas")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--warm-up", type=float, default=40.0, help="seconds on each side")
    parser.add_argument("--dir", type=Path, help="where our data goes: the peer's file system")
    a = parser.parse_args()
    pids = tuple(int(pid) for pid in a.pids.split(","))
    print(machine(), flush=True)
    with (
        tempfile.TemporaryDirectory(prefix="zufluss-bench-", dir=a.dir) as where,
        DevServer(Path(where) / "data", {"zufluss.log.flush": "os"}) as server,
    ):
        ours = Side(server.bootstrap, (server.pid,), Path(where))
        theirs = Side(a.bootstrap_peer, pids, Path(where))
        warm_up(ours, theirs, a.warm_up)
        measures = list(measure(ours, theirs, a.rounds))
        for side in (ours, theirs):
            side.close()
    print(f"\n{machine()}\n\n{table(measures, {})}")


if __name__ == "__main__":
    main()
