"""Rows that are durable in the shared log (`zufluss.log.durability = remote`), against the disk.

The store is `bench/store.py`, a process beside: its processor time is not counted, its latency is
what a line says. Both sides have it as their remote storage and the default settings otherwise.

The last two lines have a coordinator and tablet servers as processes of their own, because a
supervisor would start a killed server again within a second, and its buckets with it.
"""

from __future__ import annotations

import asyncio
import re
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing
from datetime import datetime
from pathlib import Path
from typing import Self

import obstore
import pyarrow as pa

import zufluss
from bench.keyed import KEY, kv_batches, put_frames, random_keys
from bench.report import Measure, compared
from bench.store import Store
from bench.work import (
    ROWS_1MIB,
    UNCOMPRESSED,
    Load,
    Target,
    alternate,
    check_count,
    encoded,
    new_table,
    produce_frames,
    recycle_pages,
    ten_columns,
)
from zufluss.client.sync.connection import Connection
from zufluss.model.table import TableBucket, TableInfo
from zufluss.remote.stores import UNSIGNED, open_store
from zufluss.remote.uri import parse_location
from zufluss.testing.server import DevServer

REMOTE = {"zufluss.log.durability": "remote"}
AT_ONCE = {"zufluss.wal.interval": "0ms"}
LATENCY_SECONDS = 0.05
SHORT_LATENCY_SECONDS = 0.02
"""For the latency of an append, where the store's own is the smaller part."""
BUCKETS = 4
SMALL_ROWS = 10
SMALL_TEXT_BYTES = 60
"""Of each row, so that a request is 1 KB."""
SMALL_FRAMES = 4096
BUSY = {"connections": 256, "window": 16}
QUIET = {"connections": 16}
LARGE = {"connections": 4, "window": 6, "count": 160}
PUT_ROWS = 500
PUTS = 256
KEYS = 100_000
UPSERTS = {"connections": 16, "window": 2}
BARE_PUTS = 4
"""Puts under way at a time of the bare client: as many as a session's."""
BARE_BYTES = 4096
BARE_SECONDS = 1.0

INTERVAL_SECONDS = 0.1
"""The default of `zufluss.wal.interval`."""
IDLE_SECONDS = 1.0

KILLS = 7
TAKEOVER_BUCKETS = 64
TAKEOVER_BYTES = 75_000_000
WAIT_SECONDS = 60.0


def run(directory: Path, rounds: int, quick: bool) -> Iterator[Measure]:
    """Processor time, latency and rate, then what a lost server costs."""
    seconds = 0.8 if quick else 2.0
    with Store() as store:
        yield from _appends(directory / "small", store, rounds, seconds)
        yield from _latency(directory / "latency", store, rounds)
        yield from _puts(directory / "puts", store, rounds, seconds)
        yield _large(directory / "large", store, rounds)
        yield _upserts(directory / "upserts", store, rounds, seconds)
        yield _kills(directory / "kills", store, 3 if quick else KILLS)
        yield _take_over(directory / "takeover", store, 1 if quick else 3)


class Side:
    """A server with a table."""

    def __init__(self, directory: Path, store: Store, **settings: str) -> None:
        self._stack = ExitStack()
        conf = store.settings(directory.parent.name + directory.name) | settings
        server = self._stack.enter_context(DevServer(directory, conf))
        self.target = Target(server.bootstrap, (server.pid,))
        self.connection = self._stack.enter_context(zufluss.connect(server.bootstrap))
        self.answered = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self._stack.close()

    def load(self, frames: Sequence[bytes], **how: float) -> Load:
        """Put frames on the server."""
        load = self.target.load(frames, **how)
        self.answered += load.answered
        return load


# -- appends and upserts ---------------------------------------------------------------------------


def _small_table(side: Side) -> tuple[TableInfo, list[bytes]]:
    """A table, and requests of ten rows."""
    schema = "id BIGINT, text STRING"
    info = new_table(side.connection, "small", schema, buckets=BUCKETS, properties=UNCOMPRESSED)
    columns = {"id": list(range(SMALL_ROWS)), "text": ["x" * SMALL_TEXT_BYTES] * SMALL_ROWS}
    batch = encoded(info, pa.record_batch(columns, schema=info.schema.arrow))
    return info, produce_frames(info, [batch] * SMALL_FRAMES)


def _appends(directory: Path, store: Store, rounds: int, seconds: float) -> Iterator[Measure]:
    """Ten rows each from many connections: processor time and rate."""
    store.latency(LATENCY_SECONDS)
    with ExitStack() as stack:
        sides = [
            stack.enter_context(Side(directory / name, store, **settings))
            for name, settings in (
                ("local", {}),
                ("remote", REMOTE),
                ("at-once", REMOTE | AT_ONCE),
            )
        ]
        tables = [_small_table(side) for side in sides]

        def load(number: int) -> Load:
            return sides[number].load(tables[number][1], **BUSY, seconds=seconds)

        pids = [pid for side in sides for pid in side.target.pids]
        local, remote, at_once = alternate(
            rounds, pids, lambda: load(0), lambda: load(1), lambda: load(2)
        )
        for side, (info, _) in zip(sides, tables, strict=True):
            check_count(side.connection, info, SMALL_ROWS * side.answered)
    label = f"append {SMALL_ROWS} rows × 256 × 16, store {LATENCY_SECONDS * 1000:g} ms"
    for name, what, loads in (("remote", "", remote), ("at-once", ", interval 0", at_once)):
        yield compared(
            f"wal.small.cpu.{name}",
            f"{label}{what}: server CPU, against the disk",
            [x.cpu_seconds / x.answered * 1e6 for x in loads],
            [x.cpu_seconds / x.answered * 1e6 for x in local],
            "µs",
            at_most=1.4,
        )
    yield compared(
        "wal.small.rate",
        f"{label}, interval 0, against the disk",
        [x.rps for x in at_once],
        [x.rps for x in local],
        "/s",
        at_least=0.6,
    )


def _latency(directory: Path, store: Store, rounds: int) -> Iterator[Measure]:
    """Appends of few clients that wait, against puts of the same store."""
    store.latency(SHORT_LATENCY_SECONDS)
    with Side(directory, store, **REMOTE, **AT_ONCE) as side:
        info, frames = _small_table(side)
        loads, puts = alternate(
            rounds,
            side.target.pids,
            lambda: side.load(frames, **QUIET, seconds=BARE_SECONDS),
            lambda: asyncio.run(_bare_puts(store)),
        )
        check_count(side.connection, info, SMALL_ROWS * side.answered)
    label = f"append {SMALL_ROWS} rows × 16, store {SHORT_LATENCY_SECONDS * 1000:g} ms, interval 0"
    for name, at, goal in (("p50", 0.5, 1.3), ("p99", 0.99, 2.0)):
        yield compared(
            f"wal.latency.{name}",
            f"{label}: {name}, against obstore.put",
            [getattr(load, f"{name}_ms") for load in loads],
            [statistics.quantiles(put, n=100)[round(at * 100) - 1] for put in puts],
            "ms",
            at_most=goal,
        )


async def _bare_puts(store: Store) -> list[float]:
    """How long puts of small objects take, in milliseconds."""
    properties = store.settings("bare")
    place = parse_location(properties.pop("remote.data.dirs"), "bench")
    target = open_store(place, properties | UNSIGNED, 30_000, retries=0)
    end, found = time.perf_counter() + BARE_SECONDS, []

    async def puts(number: int) -> None:
        while (began := time.perf_counter()) < end:
            path = f"bare/{number}-{time.monotonic_ns()}"
            await obstore.put_async(target, path, bytes(BARE_BYTES), mode="create")
            found.append((time.perf_counter() - began) * 1000)

    await asyncio.gather(*map(puts, range(BARE_PUTS)))
    return found


def _puts(directory: Path, store: Store, rounds: int, seconds: float) -> Iterator[Measure]:
    """Requests that cost money: one per interval under load, none without."""
    store.latency(SHORT_LATENCY_SECONDS)
    with Side(directory, store, **REMOTE) as side:
        info, frames = _small_table(side)
        busy = []
        for _ in range(rounds):
            before = store.wal_puts()
            load = side.load(frames, **QUIET, seconds=seconds)
            puts = store.wal_puts() - before - 1  # the first one after a pause starts at once
            busy.append(puts / load.seconds)
            time.sleep(IDLE_SECONDS)
        before = store.wal_puts()
        time.sleep(IDLE_SECONDS)
        idle = store.wal_puts() - before
        check_count(side.connection, info, SMALL_ROWS * side.answered)
    yield compared(
        "wal.puts",
        f"append {SMALL_ROWS} rows × 16: puts of a server, against one per interval",
        busy,
        [1 / INTERVAL_SECONDS] * rounds,
        "/s",
        at_most=1.0,
    )
    label = f"puts of a server that nobody writes to, in {IDLE_SECONDS:g} s"
    yield Measure("wal.puts.idle", label, str(idle), value=idle, unit="puts", at_most=0)


def _large(directory: Path, store: Store, rounds: int) -> Measure:
    """Batches of 1 MiB. No segment is full before the end: the other side uploads nothing."""
    store.latency(LATENCY_SECONDS)
    settings = {"zufluss.wal.retained": "16gb"}
    with (
        Side(directory / "local", store, **settings) as local,
        Side(directory / "remote", store, **REMOTE, **settings) as remote,
    ):

        def loader(side: Side) -> Callable[[], float]:
            info = new_table(side.connection, "large", buckets=BUCKETS, properties=UNCOMPRESSED)
            batches = [encoded(info, ten_columns(ROWS_1MIB, i)) for i in range(8)]
            frames, size = produce_frames(info, batches), len(batches[0])

            def once() -> float:
                recycle_pages(directory, 4 * size * LARGE["count"])
                load = side.load(frames, **LARGE)
                check_count(side.connection, info, ROWS_1MIB * side.answered)
                return load.cpu_seconds / (load.answered * size / 1e9)

            return once

        pids = (*local.target.pids, *remote.target.pids)
        ours, disk = alternate(rounds, pids, loader(remote), loader(local))
    return compared(
        "wal.large.cpu",
        "append 1 MiB: server CPU, against the disk",
        ours,
        disk,
        "s/GB",
        at_most=1.7,
    )


def _upserts(directory: Path, store: Store, rounds: int, seconds: float) -> Measure:
    """Upserts of rows that exist."""
    store.latency(LATENCY_SECONDS)
    with (
        Side(directory / "local", store) as local,
        Side(directory / "remote", store, **REMOTE) as remote,
    ):

        def loader(side: Side) -> Callable[[], float]:
            info = new_table(side.connection, "keyed", primary_key=KEY, buckets=BUCKETS)
            ids = random_keys(PUTS * PUT_ROWS, KEYS, 1)
            frames = put_frames(info, kv_batches(info, ids, PUT_ROWS))
            rows = len(ids) / len(frames)

            def once() -> float:
                load = side.load(frames, **UPSERTS, seconds=seconds)
                return load.cpu_seconds / (load.answered * rows) * 1e6

            return once

        pids = (*local.target.pids, *remote.target.pids)
        ours, disk = alternate(rounds, pids, loader(remote), loader(local))
    return compared(
        "wal.upsert.cpu",
        f"upsert {PUT_ROWS} rows × 16 × 2: server CPU of a row, against the disk",
        ours,
        disk,
        "µs",
        at_most=1.15,
    )


# -- lost servers ----------------------------------------------------------------------------------


class Role(DevServer):
    """A coordinator or a tablet server."""

    def __init__(self, directory: Path, role: str, settings: dict[str, str]) -> None:
        command = (sys.executable, "-m", "zufluss.cli.main", "server", "--role", role)
        super().__init__(directory, settings, command=command)

    def arguments(self) -> list[str]:
        """The command line."""
        settings = {
            "bind.listeners": f"FLUSS://127.0.0.1:{self.port}",
            "data.dir": str(self.data_dir),
            **self.properties,
        }
        return [*self.command, *(part for item in settings.items() for part in _option(*item))]


def _option(key: str, value: str) -> tuple[str, str]:
    return "-D", f"{key}={value}"


class Cluster:
    """A coordinator and tablet servers that nobody starts again."""

    def __init__(self, directory: Path, settings: dict[str, str]) -> None:
        self._stack = ExitStack()
        self._directory = directory
        self._settings = settings
        coordinator = Role(directory / "coordinator", "coordinator", settings)
        self.coordinator = self._stack.enter_context(coordinator)
        self.tablets: dict[int, Role] = {}
        self.connection: Connection | None = None

    def start(self, server_id: int) -> Role:
        """Start another tablet server."""
        own = {
            "tablet-server.id": str(server_id),
            "zufluss.coordinator.address": self.coordinator.bootstrap,
        }
        role = Role(self._directory / f"tablet-{server_id}", "tablet", self._settings | own)
        self.tablets[server_id] = self._stack.enter_context(role)
        return role

    def connect(self) -> Connection:
        """A connection to the cluster."""
        return self._stack.enter_context(zufluss.connect(self.coordinator.bootstrap))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self._stack.close()


def _leader(connection: Connection, info: TableInfo) -> int:
    node = connection._twin.metadata.leader(TableBucket(info.table_id, None, 0))
    assert node is not None
    return node.id


def _kills(directory: Path, store: Store, count: int) -> Measure:
    """From the end of a server to the first acknowledgement on a bucket that was its own."""
    store.latency(SHORT_LATENCY_SECONDS)
    conf = store.settings("kills") | REMOTE
    found = []
    with Cluster(directory, conf) as cluster:
        for server_id in (1, 2, 3):
            cluster.start(server_id)
        rows, written = {"id": list(range(SMALL_ROWS))}, 0
        with closing(cluster.connect()) as connection:
            for number in range(count):
                info = new_table(connection, f"kill{number}", "id BIGINT")
                with connection.table(f"fluss.kill{number}").append() as writer:
                    writer.write(rows)
                    writer.flush()
                    victim = cluster.tablets[_leader(connection, info)]
                    began = time.perf_counter()
                    victim.kill()
                    writer.write(rows)
                    writer.flush()
                    found.append(time.perf_counter() - began)
                check_count(connection, info, 2 * SMALL_ROWS)
                written += 2
                victim.start()
    return _seconds(
        "wal.kill", "kill -9 of one of three servers: to the first ack on its bucket", found, 2.0
    )


def _take_over(directory: Path, store: Store, count: int) -> Measure:
    """From the order of the coordinator until all buckets of a lost server are served."""
    found = [_taken_over(directory / str(number), store) for number in range(count)]
    label = (
        f"take-over of {TAKEOVER_BUCKETS} buckets with {TAKEOVER_BYTES / 1e6:g} MB behind the "
        f"order, store {LATENCY_SECONDS * 1000:g} ms"
    )
    return _seconds("wal.takeover", label, found, 1.0)


def _taken_over(directory: Path, store: Store) -> float:
    store.latency(0)
    conf = store.settings(f"takeover-{directory.name}") | REMOTE
    with Cluster(directory, conf) as cluster:
        lost = cluster.start(1)
        with closing(cluster.connect()) as connection:
            properties = UNCOMPRESSED
            info = new_table(connection, "taken", buckets=TAKEOVER_BUCKETS, properties=properties)
            rows = ROWS_1MIB // 8
            frames = produce_frames(info, [encoded(info, ten_columns(rows, i)) for i in range(64)])
            wanted = -(-TAKEOVER_BYTES // len(frames[0]))
            load = Target(lost.bootstrap, (lost.pid,)).load(frames, connections=8, count=wanted)
        heir = cluster.start(2)
        store.latency(LATENCY_SECONDS)
        lost.kill()
        end = time.monotonic() + WAIT_SECONDS
        while len(_times(heir, "bucket_opened_later")) < TAKEOVER_BUCKETS:
            if time.monotonic() > end:
                raise RuntimeError(f"buckets were not taken over:\n{heir.log()}")
            time.sleep(0.05)
        (ordered,) = _times(cluster.coordinator, "buckets_taken_over")
        with closing(cluster.connect()) as connection:
            check_count(connection, info, rows * load.answered)
        return max(_times(heir, "bucket_opened_later")) - ordered


_LOGGED = re.compile(r"(\S+Z) \[\w+ *\] (\w+)")


def _times(server: Role, event: str) -> list[float]:
    """When a server logged an event."""
    lines = map(_LOGGED.match, list(server.output))
    return [datetime.fromisoformat(x[1]).timestamp() for x in lines if x and x[2] == event]


def _seconds(name: str, label: str, found: Sequence[float], at_most: float) -> Measure:
    value = statistics.median(found)
    return Measure(
        name,
        label,
        f"{value:.2f} s",
        value=value,
        unit="s",
        at_most=at_most,
        spread=(min(found), max(found)),
    )
