"""Primary-key tables against a peer: upserts, lookups, both, little memory, pyfluss, kill -9.

Ten columns, batches of 500 rows, four buckets, full changelog, four requests in flight on one
connection; each key goes to the bucket its hash says. The tables have the servers' default
compression of the changelog.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

import pyarrow as pa

from bench import kv
from bench.aggregate import aggregated
from bench.keyed import KEY, Batch, every_key, kv_batches, lookup_frames, put_frames, random_keys
from bench.peer_side import Pair, Section, Side
from bench.report import Measure, compared
from bench.work import Load, check_count
from zufluss.model.table import TableInfo
from zufluss.testing.server import DevServer

BATCH_ROWS = 500
WINDOW = 4
SECONDS = 3.0
"""How long requests that change nothing are sent in a round."""
KEYS_EACH = 128
CLIENT_ROWS = 50_000
KEY_BYTES = 125
"""What a key and its row take in our memory, about."""
MEMORY_MIN = 8 << 20
PROBES = 64
"""Keys that are looked up in a new table: so many that every bucket has some of them."""


class Upserts(NamedTuple):
    """New keys, then new rows for the same keys."""

    new: Load
    """Each key for the first time."""
    update: Load
    """Each key again, in another order."""


class Mixed(NamedTuple):
    """Upserts and lookups at once."""

    upserts: Load
    """Random ones."""
    lookups: Load
    """Of single keys."""


class KvSide(Side):
    """A server with primary-key tables."""

    def __init__(self, bootstrap: str, pids: tuple[int, ...], directory: Path, keys: int) -> None:
        super().__init__(bootstrap, pids, directory)
        self.keys = keys
        self.info = self.keyed_table()
        self.new = kv_batches(self.info, every_key(keys), BATCH_ROWS)
        self.updates = kv_batches(self.info, every_key(keys)[::-1], BATCH_ROWS, seed=keys)
        self.merged: TableInfo | None = None
        """A table that aggregates."""
        self.changes: int | None = 0
        """Records the changelog must have, None when that is not known."""
        self.one = random_keys(40_000, keys, 1)
        self.many = random_keys(4_000 * KEYS_EACH, keys, 2)

    def keyed_table(self) -> TableInfo:
        """A new table whose buckets answer; leaders of a peer may refuse the first requests."""
        info = self.table(None, KEY)
        self.connection.table(str(info.path)).lookup(pa.table({KEY[0]: range(PROBES)}))
        return info

    def upsert(self) -> Upserts:
        """A new table with every key, then an update of every row."""
        self.drop(self.info)
        self.info = self.keyed_table()
        self.changes = 0
        return Upserts(self.put(self.new, self.keys), self.update())

    def fill(self) -> None:
        """See to it that the table has rows."""
        if self.changes == 0:
            self.put(self.new, self.keys)

    def update(self) -> Load:
        """New rows for all keys."""
        self.fill()
        return self.put(self.updates, 2 * self.keys)

    def put(self, batches: list[Batch], changes: int) -> Load:
        """Batches once each, and see whether they made as many changes as they should."""
        load = self._send(self.info, batches)
        if self.changes is not None:
            self.changes += changes
            check_count(self.connection, self.info, self.changes)
        return load

    def aggregate(self) -> Upserts:
        """A new table with every key, then a row for each that is merged into the one there is."""
        if self.merged is not None:
            self.drop(self.merged)
        merged = self.merged = self.table({"table.merge-engine": "aggregation"}, KEY, aggregated())
        self.connection.table(str(merged.path)).lookup(pa.table({KEY[0]: range(PROBES)}))
        return Upserts(self._send(merged, self.new), self._send(merged, self.updates))

    def _send(self, info: TableInfo, batches: list[Batch]) -> Load:
        return self.target.load(put_frames(info, batches), window=WINDOW, count=len(batches))

    def lookup(self) -> Load:
        """Single keys over sixteen connections."""
        self.fill()
        frames = lookup_frames(self.info, self.one, 1)
        return self.target.load(frames, connections=16, seconds=SECONDS)

    def lookup_many(self) -> Load:
        """Many keys per request over two connections."""
        self.fill()
        frames = lookup_frames(self.info, self.many, KEYS_EACH)
        return self.target.load(frames, connections=2, window=2, seconds=SECONDS)

    def mixed(self) -> Mixed:
        """Updates by one pump while another one looks up."""
        self.fill()
        self.changes = None
        puts, lookups = put_frames(self.info, self.updates), lookup_frames(self.info, self.one, 1)
        with ThreadPoolExecutor() as pool:
            writing = pool.submit(self.target.load, puts, window=WINDOW, seconds=SECONDS)
            reading = pool.submit(
                self.target.load, lookups, process=1, connections=16, seconds=SECONDS
            )
            return Mixed(writing.result(), reading.result())

    def client_upsert(self) -> float:
        """Rows per second through pyfluss."""
        info = self.keyed_table()
        work = {"do": "upsert_rows", "table": info.path.table, "rows": CLIENT_ROWS}
        seconds = self.client.do(**work)
        check_count(self.connection, info, CLIENT_ROWS)
        self.drop(info)
        return CLIENT_ROWS / seconds

    def warm_up(self, seconds: float) -> None:
        """Everything in turn."""
        end = time.perf_counter() + seconds
        while time.perf_counter() < end:
            self.upsert()
            self.lookup()
            self.lookup_many()


def _upsert(pair: Pair[KvSide]) -> Iterator[Measure]:
    rows = pair.ours.keys
    a, b = pair.both(KvSide.upsert)
    for i, what in enumerate(("new keys", "updates")):
        mine, other = [x[i] for x in a], [x[i] for x in b]
        name, label = f"upsert.{Upserts._fields[i]}", f"upsert, {what}"
        rate = lambda loads: [rows / x.seconds for x in loads]  # noqa: E731
        cpu = lambda loads: [x.cpu_seconds / rows * 1e6 for x in loads]  # noqa: E731
        yield compared(name, label, rate(mine), rate(other), " rows/s", at_least=4.0)
        yield compared(f"{name}.cpu", f"{label}: CPU", cpu(mine), cpu(other), "µs", at_most=0.3)
        yield _p99(name, label, mine, other, None)


def _p99(
    name: str, label: str, ours: list[Load], others: list[Load], at_most: float | None
) -> Measure:
    return compared(
        f"{name}.p99",
        f"{label}: p99",
        [x.p99_ms for x in ours],
        [x.p99_ms for x in others],
        "ms",
        at_most=at_most,
        less_is_better=True,
    )


def _lookup(pair: Pair[KvSide]) -> Iterator[Measure]:
    a, b = pair.both(KvSide.lookup)
    label = "lookup of 1 key × 16"
    yield compared("lookup", label, [x.rps for x in a], [x.rps for x in b], "/s", at_least=1.5)
    yield _p99("lookup", label, a, b, 1.0)
    micros = lambda loads: [x.cpu_seconds / x.answered * 1e6 for x in loads]  # noqa: E731
    yield compared("lookup.cpu", f"{label}: CPU", micros(a), micros(b), "µs", less_is_better=True)
    a, b = pair.both(KvSide.lookup_many)
    rate = lambda loads: [x.rps * KEYS_EACH for x in loads]  # noqa: E731
    label = f"lookup of {KEYS_EACH} keys"
    yield compared("lookup.many", label, rate(a), rate(b), " keys/s", at_least=6.0)


def _mixed(pair: Pair[KvSide]) -> Iterator[Measure]:
    a, b = pair.both(KvSide.mixed)
    upserts = lambda loads: [x.upserts.rps * BATCH_ROWS for x in loads]  # noqa: E731
    lookups = lambda loads: [x.lookups.rps for x in loads]  # noqa: E731
    label = "upserts and lookups at once"
    yield compared(
        "mixed.upsert", f"{label}: upserts", upserts(a), upserts(b), " rows/s", at_least=3.0
    )
    yield compared("mixed.lookup", f"{label}: lookups", lookups(a), lookups(b), "/s", at_least=1.2)
    reads = [[x.lookups for x in side] for side in (a, b)]
    yield _p99("mixed.lookup", f"{label}: lookups", reads[0], reads[1], None)


def _aggregate(pair: Pair[KvSide]) -> Iterator[Measure]:
    a, b = pair.both(KvSide.aggregate)
    rate = lambda loads: [pair.ours.keys / x.seconds for x in loads]  # noqa: E731
    for i, (name, what) in enumerate((("agg.new", "new keys"), ("agg", "a row for every key"))):
        label = f"aggregation: {what}, sums, a maximum and last values"
        mine, other = [x[i] for x in a], [x[i] for x in b]
        yield compared(name, label, rate(mine), rate(other), " rows/s", at_least=4.0)


def _cold(pair: Pair[KvSide]) -> Iterator[Measure]:
    """Ours is another server here, with memory for a tenth of the rows."""
    keys = pair.ours.keys
    properties = {
        "zufluss.log.flush": "os",
        "zufluss.kv.memory": str(max(MEMORY_MIN, keys * KEY_BYTES // 10)),
    }
    with DevServer(pair.ours.directory / "cold", properties) as server:
        side = KvSide(server.bootstrap, (server.pid,), pair.ours.directory, keys)
        a, b = Pair(side, pair.theirs, pair.rounds).both(KvSide.update)
        side.close()
    rate = lambda loads: [keys / x.seconds for x in loads]  # noqa: E731
    label = "updates with memory for a tenth of the rows"
    yield compared("upsert.cold", label, rate(a), rate(b), " rows/s", at_least=1.0)


def _client(pair: Pair[KvSide]) -> Iterator[Measure]:
    a, b = pair.both(KvSide.client_upsert)
    yield compared("client.upsert", "pyfluss upsert", a, b, " rows/s", at_least=1.0)


def _restart(pair: Pair[KvSide]) -> Iterator[Measure]:
    """Ours alone, on a server that may be killed."""
    keys = pair.ours.keys
    with DevServer(pair.ours.directory / "killed", {"zufluss.log.flush": "os"}) as server:
        side = KvSide(server.bootstrap, (server.pid,), pair.ours.directory, keys)
        side.update()
        yield kv.restart_line(keys, [kv.restart(server, side.info, keys) for _ in range(3)])
        side.close()


SECTIONS: dict[str, Section[KvSide]] = {
    "upsert": _upsert,
    "lookup": _lookup,
    "mixed": _mixed,
    "agg": _aggregate,
    "cold": _cold,
    "kv_client": _client,
    "restart": _restart,
}
