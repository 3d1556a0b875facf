"""Primary-key tables: upserts and lookups through a real server, memory, restart after a crash.

* `upsert`: random upserts of resident rows with our client, acknowledged, against the same stages
  alone in one process (`bench.keyed.Pipeline`). One bucket, batches of 10,000 rows of ten columns,
  full changelog. `flush=os`, because the disk is not the question; then with our default.
* `random`: random upserts over many keys, against RocksDB alone (`bench.rocks`), which reads the
  old rows of each batch in key order and writes the new ones, and makes no changelog.
* `lookup`: prepared requests, against a bare server whose answers have the same size. Then single
  lookups from 64 tasks at once with our client, against pyfluss.
* `memory`: what the server has more after the keys were loaded.
* `restart`: kill -9, and then the time from the start of the process to the first answer.
"""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pyarrow as pa

import zufluss
from bench.clients import Worker
from bench.keyed import (
    KEY,
    Pipeline,
    every_key,
    kv_batches,
    lookup_frames,
    random_keys,
)
from bench.report import Measure, compared
from bench.rocks import Rocks
from bench.work import (
    UNCOMPRESSED,
    Load,
    Target,
    alternate,
    bare_server,
    check_count,
    new_table,
    rss_bytes,
)
from zufluss.model.table import TableInfo
from zufluss.testing.server import DevServer

KEYS = 1_000_000
BATCH_ROWS = 10_000
RESIDENT_KEYS = 200_000
BUCKETS = 4
CONNECTIONS = (1, 16, 64)
KEYS_EACH = 128
"""Keys of a request of the large kind."""
CLIENT_GOAL = 5_000
"""Single lookups per second of our client."""
TASKS = 64
PYFLUSS_LOOKUPS = 8
"""Few, because pyfluss takes a tenth of a second for each, one after the other."""
RESTART_SECONDS = 5.0
"""The goal for a million keys."""
PIPELINE_BYTES = 1 << 30


def run(directory: Path, rounds: int, quick: bool, keys: int = KEYS) -> Iterator[Measure]:
    """Everything; `keys` is the size of the large table."""
    for policy, properties, goal in (
        ("os", UNCOMPRESSED, 0.5),
        ("os", None, 0.5),
        ("ack", None, None),
    ):
        yield _upserts(directory, policy, properties, goal, rounds, 10 if quick else 30)
    with DevServer(directory / "kv", {"zufluss.log.flush": "os"}) as server:
        large = Large(server, directory, keys)
        try:
            yield large.load()
            yield from large.random_upserts(rounds, 4 if quick else 20)
            yield from large.lookups(rounds, 0.3 if quick else 0.8)
            yield large.client_lookups(rounds)
            yield large.restarts(1 if quick else 3)
        finally:
            large.close()


# -- resident state, against the stages alone ----------------------------------------------------


def _upserts(
    directory: Path,
    policy: str,
    properties: dict[str, str] | None,
    goal: float | None,
    rounds: int,
    batches: int,
) -> Measure:
    kind = "zstd" if properties is None else "plain"
    where = directory / f"kv-{policy}-{kind}"
    with (
        DevServer(where, {"zufluss.log.flush": policy}) as server,
        zufluss.connect(server.bootstrap) as connection,
    ):
        info = new_table(connection, "resident", primary_key=KEY, properties=properties)
        worker = Worker("zufluss", server.bootstrap)
        pipeline = Pipeline(directory / f"pipeline-{policy}-{kind}", info, PIPELINE_BYTES)
        try:
            written = Written(connection, info, worker)
            written.load(RESIDENT_KEYS)
            pipeline.put(_arrays(info, every_key(RESIDENT_KEYS), 0))
            ours, alone = alternate(
                rounds,
                (server.pid, worker.process.pid, os.getpid()),
                lambda: written.upsert(batches),
                lambda: _pipeline_rate(pipeline, info, batches),
            )
        finally:
            pipeline.close()
            worker.close()
    label = f"upsert of resident rows, {kind}, flush={policy}, against the stages alone"
    return compared(f"kv.upsert.{kind}.{policy}", label, ours, alone, " rows/s", at_least=goal)


def _arrays(info: TableInfo, ids: np.ndarray, seed: int) -> list[np.ndarray]:
    return [np.frombuffer(b, np.uint8) for _, b in kv_batches(info, ids, BATCH_ROWS, seed)]


def _pipeline_rate(pipeline: Pipeline, info: TableInfo, batches: int) -> float:
    seed = pipeline.tablet.row_count + batches
    arrays = _arrays(info, random_keys(batches * BATCH_ROWS, RESIDENT_KEYS, seed), seed)
    began = time.perf_counter()
    pipeline.put(arrays)
    return batches * BATCH_ROWS / (time.perf_counter() - began)


class Written:
    """A table that one client process writes to, and what must be in it."""

    def __init__(self, connection: zufluss.Connection, info: TableInfo, worker: Worker) -> None:
        self.connection = connection
        self.info = info
        self.worker = worker
        self.keys = 0
        self.changes = 0
        """Records the changelog must have."""

    def load(self, keys: int) -> float:
        """Write each key once; rows per second."""
        self.keys = self.changes = keys
        return self._write(keys, ids="every")

    def upsert(self, batches: int) -> float:
        """Random upserts, each an old and a new row in the changelog; rows per second."""
        self.changes += 2 * batches * BATCH_ROWS
        return self._write(batches * BATCH_ROWS, ids="random", seed=self.changes)

    def _write(self, count: int, **how: object) -> float:
        seconds = self.worker.do(
            do="upsert",
            table=self.info.path.table,
            rows=BATCH_ROWS,
            count=count,
            keys=self.keys,
            **how,
        )
        check_count(self.connection, self.info, self.changes)
        return count / seconds


# -- a large table -------------------------------------------------------------------------------


class Large:
    """A table of many keys on a server of its own."""

    def __init__(self, server: DevServer, directory: Path, keys: int) -> None:
        self.server = server
        self.directory = directory
        self.keys = keys
        self.connection = zufluss.connect(server.bootstrap)
        self.info = new_table(self.connection, "large", primary_key=KEY, buckets=BUCKETS)
        self.workers = [Worker(library, server.bootstrap) for library in ("zufluss", "pyfluss")]
        self.written = Written(self.connection, self.info, self.workers[0])

    @property
    def pids(self) -> list[int]:
        """The processes to watch."""
        clients = [worker.process.pid for worker in self.workers]
        return [self.server.pid, os.getpid(), *clients]

    def load(self) -> Measure:
        """Fill it: the memory this takes, beyond what the first rows of any table take."""
        first = new_table(self.connection, "first", primary_key=KEY, buckets=BUCKETS)
        Written(self.connection, first, self.workers[0]).load(BATCH_ROWS)
        before = rss_bytes([self.server.pid])
        rate = self.written.load(self.keys)
        per_million = (rss_bytes([self.server.pid]) - before) / self.keys * 1e6
        return Measure(
            "kv.memory",
            "server memory per million keys",
            f"{per_million / 1e6:.0f} MB",
            f"(loaded at {rate / 1e3:.0f} k rows/s)",
            per_million / 1024,
            "KiB",
            less_is_better=True,
        )

    def random_upserts(self, rounds: int, batches: int) -> Iterator[Measure]:
        """Against RocksDB alone."""
        rocks = Rocks(self.directory / "rocks", self.info, BATCH_ROWS)
        try:
            rocks.load(self.keys)
            ours, alone = alternate(
                rounds,
                self.pids,
                lambda: self.written.upsert(batches),
                lambda: rocks.upsert(batches, self.keys),
            )
        finally:
            rocks.close()
        yield compared(
            "kv.random",
            f"random upserts over {_count(self.keys)} keys, against RocksDB alone",
            ours,
            alone,
            " rows/s",
            at_least=2.0 if self.keys == KEYS else None,
        )

    def lookups(self, rounds: int, seconds: float) -> Iterator[Measure]:
        """Prepared requests of one key and of many."""
        target = Target(self.server.bootstrap, (self.server.pid,))
        one = lookup_frames(self.info, random_keys(40_000, self.keys, 1), 1)
        many = lookup_frames(self.info, random_keys(4_000 * KEYS_EACH, self.keys, 2), KEYS_EACH)
        for connections in CONNECTIONS:
            loads = self._against_bare(
                target, one, rounds, connections=connections, seconds=seconds
            )
            yield from _lookup_lines(connections, *loads)
        ours, bare = self._against_bare(
            target, many, rounds, connections=2, window=2, seconds=seconds
        )
        label = f"lookup of {KEYS_EACH} keys"
        per_second = lambda loads: [x.rps * KEYS_EACH for x in loads]  # noqa: E731
        yield compared("kv.lookup.many", label, per_second(ours), per_second(bare), " keys/s")

    def _against_bare(
        self, target: Target, frames: list[bytes], rounds: int, **how: object
    ) -> tuple[list[Load], ...]:
        """The same requests on ours and on a server that answers with as many bytes."""
        probe = target.load(frames, count=len(frames) // 8)
        size = probe.bytes_in // probe.answered
        with bare_server("answer", "--size", str(size)) as bare:
            return alternate(
                rounds,
                (*self.pids, *bare.pids),
                lambda: target.load(frames, **how),
                lambda: bare.load(frames, **how),
            )

    def client_lookups(self, rounds: int) -> Measure:
        """One key at a time from many tasks, with both clients."""

        def rate(worker: Worker, count: int) -> float:
            work = {"do": "lookup", "table": self.info.path.table, "keys": self.keys}
            return count / worker.do(**work, count=count, tasks=TASKS)

        ours, theirs = alternate(
            rounds,
            self.pids,
            lambda: rate(self.workers[0], 100 * TASKS),
            lambda: rate(self.workers[1], PYFLUSS_LOOKUPS),
        )
        found = statistics.median(ours)
        return Measure(
            "kv.lookup.client",
            f"client, single lookups from {TASKS} tasks, against pyfluss",
            f"{found:.0f} /s",
            f"{statistics.median(theirs):.0f} /s",
            found,
            "/s",
            at_least=CLIENT_GOAL,
        )

    def restarts(self, rounds: int) -> Measure:
        """kill -9 to the first answer."""
        seconds = [restart(self.server, self.info, self.keys) for _ in range(rounds)]
        return restart_line(self.keys, seconds)

    def close(self) -> None:
        """End the clients."""
        for worker in self.workers:
            worker.close()
        self.connection.close()


def restart(server: DevServer, info: TableInfo, keys: int) -> float:
    """Seconds from the start of a killed server to its first answer to a lookup."""
    server.kill()
    began = time.perf_counter()
    server.start()
    with zufluss.connect(server.bootstrap) as connection:
        table = connection.table(str(info.path))
        first = table.lookup(keys // 2)
        seconds = time.perf_counter() - began
        wanted = pa.table({KEY[0]: random_keys(10_000, keys, 3)})
        missing = len(wanted) - table.lookup(wanted, missing="drop").num_rows
    if first is None or missing:
        raise RuntimeError(f"{missing} of {len(wanted)} rows are gone after kill -9")
    return seconds


def restart_line(keys: int, seconds: list[float]) -> Measure:
    """The line of some restarts."""
    return Measure(
        "kv.restart",
        f"kill -9 with {_count(keys)} keys: start to first lookup",
        f"{statistics.median(seconds):.2f} s",
        value=statistics.median(seconds),
        unit="s",
        at_most=RESTART_SECONDS if keys <= KEYS else None,
        less_is_better=True,
        spread=(min(seconds), max(seconds)),
    )


def _lookup_lines(connections: int, ours: list[Load], bare: list[Load]) -> Iterator[Measure]:
    name, label = f"kv.lookup.{connections}", f"lookup of 1 key × {connections}"
    yield compared(name, label, [x.rps for x in ours], [x.rps for x in bare], "/s")
    figures: dict[str, tuple[str, Callable[[Load], float]]] = {
        "p99": ("ms", lambda x: x.p99_ms),
        "cpu": ("µs", lambda x: x.cpu_seconds / x.answered * 1e6),
    }
    for what, (unit, figure) in figures.items():
        a, b = [figure(x) for x in ours], [figure(x) for x in bare]
        text = f"{label}: {'server CPU' if what == 'cpu' else what}"
        yield compared(f"{name}.{what}", text, a, b, unit, less_is_better=True)


def _count(keys: int) -> str:
    return f"{keys / 1e6:g} M"
