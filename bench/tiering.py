"""Tiering into Iceberg, against Fluss's own tiering by Flink and against a bare Spark worker.

The figures of Fluss 0.9.1 on Flink 1.20 are constants here: they were measured once on a machine
of two cores with the same table, rows and buckets (`FLINK`). Everything else is measured in the
same run: a bare `mapInArrow` job that reads the same rows from parquet and writes them to parquet.

The server is at rest when a round begins. It is timed from the moment the lake is switched on for
the table until the cluster knows the snapshot that holds the last row, so it has the hand-out,
planning and both commits in it. CPU is that of the whole service (driver, JVM, workers) and of the
server.
"""

from __future__ import annotations

import contextlib
import statistics
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

import zufluss
from bench.report import Measure, number, quantity
from bench.work import cpu_seconds, new_table, ten_columns
from zufluss.obs.metrics import SERVICE_ROUND_SECONDS
from zufluss.testing.server import DevServer
from zufluss.testing.tiering import TieringProcess

BUCKETS = 4
BATCH = 50_000
FLINK = {"log": 515_000.0, "log cpu": 3.55, "first": 178_000.0, "update": 166_000.0}
"""Rows/s, and CPU seconds per million rows with the server's; facts of Fluss 0.9.1, warm."""
FLINK_MEMORY = 2.5e9
FRESHNESS = "50ms"
METRICS_PORT = 29123
IDLE_SECONDS = 10.0
ROUND_SECONDS = SERVICE_ROUND_SECONDS.name
LAKE = {"datalake.format": "iceberg", "zufluss.log.flush": "os"}


def run(directory: Path, rounds: int, quick: bool) -> Iterator[Measure]:
    """Everything about tiering."""
    with ExitStack() as stack:
        server = stack.enter_context(DevServer(directory / "server", LAKE))
        service = stack.enter_context(
            TieringProcess(server.bootstrap, {"zufluss.metrics.port": str(METRICS_PORT)})
        )
        connection = stack.enter_context(zufluss.connect(server.bootstrap))
        lake = Lake(server, service, connection)
        lake.round(lake.log_table("warm_up"), 100_000, lake.append)
        sizes = (200_000,) if quick else (1_000_000, 10_000_000)
        for size in sizes:
            yield from _log_rounds(lake, directory, size, 1 if quick else rounds)
        yield from _key_rounds(lake, 100_000 if quick else 1_000_000, 1 if quick else rounds)
        yield _memory(lake)
        yield from _freshness(lake, 5 if quick else 20)
        yield _idle()
        yield _restart(lake)


class Lake:
    """A server, a tiering service, and tables that are tiered on command."""

    def __init__(
        self, server: DevServer, service: TieringProcess, connection: zufluss.Connection
    ) -> None:
        self.server = server
        self.service = service
        self.connection = connection
        self.numbers = iter(range(1_000_000))

    def log_table(self, name: str, **properties: str) -> str:
        """A log table that is not tiered yet."""
        return self._table(name, (), properties)

    def key_table(self, name: str, **properties: str) -> str:
        """A primary-key table that is not tiered yet."""
        return self._table(name, ("id",), properties)

    def _table(self, name: str, key: tuple[str, ...], properties: dict[str, str]) -> str:
        freshness = {"table.datalake.freshness": FRESHNESS} | properties
        new_table(self.connection, name, buckets=BUCKETS, primary_key=key, properties=freshness)
        return f"fluss.{name}"

    def append(self, path: str, rows: int) -> None:
        """Rows into a log table."""
        with self.connection.table(path).append() as writer:
            for start in range(0, rows, BATCH):
                writer.write(ten_columns(min(BATCH, rows - start), start))

    def upserts(self, keys: int) -> Callable[[str, int], None]:
        """A way to upsert rows of random keys out of so many."""

        def write(path: str, rows: int) -> None:
            rng = np.random.default_rng(next(self.numbers))
            with self.connection.table(path).upsert() as writer:
                for start in range(0, rows, BATCH):
                    count = min(BATCH, rows - start)
                    batch = ten_columns(count, start)
                    ids = pa.array(rng.integers(0, keys, count))
                    writer.write(batch.set_column(0, "id", ids))

        return write

    def round(self, path: str, rows: int, write: Callable[[str, int], None]) -> tuple[float, float]:
        """Seconds and CPU seconds of tiering so many new rows."""
        admin = self.connection.admin
        admin.alter_table(path, set={"table.datalake.enabled": "false"})
        write(path, rows)
        self._server_at_rest()
        ends = admin.list_all_offsets(path)
        before, began = self._cpu(), time.perf_counter()
        admin.alter_table(path, set={"table.datalake.enabled": "true"})
        self.wait_for(path, ends)
        seconds = time.perf_counter() - began
        after = self._cpu()
        return seconds, sum(after.values()) - sum(before.get(pid, 0.0) for pid in after)

    def wait_for(self, path: str, ends: dict[object, int]) -> None:
        """Until the lake has everything below these offsets."""
        while True:
            snapshot = self.connection.admin.lake_snapshot(path)
            if snapshot and all(snapshot.offsets.get(b, 0) >= end for b, end in ends.items()):
                return
            if not self.service.running:
                raise RuntimeError(f"the tiering service ended:\n{self.service.log()}")
            time.sleep(0.005)

    def _server_at_rest(self) -> None:
        """Until the server has flushed what was written: the round is measured, not the writing."""
        while True:
            before = cpu_seconds([self.server.pid])
            time.sleep(0.5)
            if cpu_seconds([self.server.pid]) - before < 0.02:
                return

    def _cpu(self) -> dict[int, float]:
        pids = [self.server.pid, *self.service.pids()]
        return {pid: cpu_seconds([pid]) for pid in pids}


def _log_rounds(lake: Lake, directory: Path, size: int, rounds: int) -> Iterator[Measure]:
    path = lake.log_table(f"log_{size}")
    bare = Bare(directory / f"bare-{size}", size)
    try:
        ours, cpu, others = [], [], []
        for _ in range(rounds + 1):
            seconds, used = lake.round(path, size, lake.append)
            ours.append(size / seconds)
            cpu.append(used / size * 1e6)
            others.append(bare.rate())
    finally:
        bare.close()
    ours, cpu, others = ours[1:], cpu[1:], others[1:]
    rate, name = statistics.median(ours), _count(size)
    yield _against(
        f"tiering.log.{size}",
        f"log table, {name} new rows, against Flink",
        rate,
        FLINK["log"],
        " rows/s",
        at_least=2.0,
    )
    yield _against(
        f"tiering.log.cpu.{size}",
        f"the same: CPU per million rows, {name}",
        statistics.median(cpu),
        FLINK["log cpu"],
        "s",
        at_most=0.6,
    )
    yield _against(
        f"tiering.bare.{size}",
        f"the same against a bare mapInArrow worker, {name}",
        rate,
        statistics.median(others),
        " rows/s",
        at_least=0.5,
    )


def _key_rounds(lake: Lake, keys: int, rounds: int) -> Iterator[Measure]:
    path = lake.key_table("keyed")
    write = lake.upserts(keys)
    seconds, _ = lake.round(path, 2 * keys, write)
    yield _against(
        "tiering.keys.first",
        f"primary-key table, {_count(2 * keys)} upserts over {_count(keys)} keys, first round",
        2 * keys / seconds,
        FLINK["first"],
        " rows/s",
        at_least=3.0,
    )
    rates = []
    for _ in range(rounds + 1):
        seconds, _ = lake.round(path, keys // 2, write)
        rates.append(keys // 2 / seconds)
    yield _against(
        "tiering.keys.update",
        f"the same, {_count(keys // 2)} updates",
        statistics.median(rates[1:]),
        FLINK["update"],
        " rows/s",
        at_least=3.0,
    )


def _memory(lake: Lake) -> Measure:
    used = sum(_own_memory(pid) for pid in lake.service.pids())
    return Measure(
        "tiering.memory",
        "memory of driver and workers after all of that",
        f"{used / 1e9:.2f} GB",
        f"{FLINK_MEMORY / 1e9:.1f} GB",
        used / FLINK_MEMORY,
        at_most=1.0,
    )


def _own_memory(pid: int) -> int:
    """Resident memory, pages shared between processes divided among them."""
    with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # a process that ended
        for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
            if line.startswith("Pss:"):
                return int(line.split()[1]) * 1024
    return 0


def _freshness(lake: Lake, samples: int) -> Iterator[Measure]:
    """Seconds from a row's acknowledgement to the snapshot that has it, at freshness 1 s."""
    enabled = {"table.datalake.enabled": "true", "table.datalake.freshness": "1s"}
    tables: list[str] = []
    for wanted in (1, 20):
        while len(tables) < wanted:
            path = lake.log_table(f"fresh_{len(tables)}", **enabled)
            tables.append(path)
            lake.append(path, 100)
        for path in tables:
            lake.wait_for(path, lake.connection.admin.list_all_offsets(path))
        waits = [_visible_after(lake, tables[i % wanted]) for i in range(samples)]
        yield Measure(
            f"tiering.fresh.{wanted}",
            f"a row visible in the lake, {wanted} tables at freshness 1 s (median, worst)",
            f"{statistics.median(waits):.2f} s, {max(waits):.2f} s",
            value=max(waits),
            unit="s",
            at_most=2.0,
        )


def _idle() -> Measure:
    """Mean seconds of the rounds while nobody writes; all of them find nothing new."""
    before = _rounds()
    time.sleep(IDLE_SECONDS)
    count, seconds = (after - old for after, old in zip(_rounds(), before, strict=True))
    return Measure(
        "tiering.idle",
        f"a round that finds nothing new ({count / IDLE_SECONDS:.0f} of them a second)",
        f"{seconds / count * 1000:.1f} ms",
        value=seconds / count,
        unit="s",
        at_most=0.5,
    )


def _rounds() -> tuple[float, float]:
    """How many rounds the service has run, and how long they took together."""
    with urllib.request.urlopen(f"http://localhost:{METRICS_PORT}/metrics") as answer:
        lines = answer.read().decode().splitlines()
    found = dict(line.rsplit(" ", 1) for line in lines if line.startswith(ROUND_SECONDS))
    return float(found[f"{ROUND_SECONDS}_count"]), float(found[f"{ROUND_SECONDS}_sum"])


def _visible_after(lake: Lake, path: str) -> float:
    lake.append(path, 1)
    ends = lake.connection.admin.list_all_offsets(path)
    began = time.perf_counter()
    lake.wait_for(path, ends)
    return time.perf_counter() - began


def _restart(lake: Lake) -> Measure:
    """Seconds from the restart of a job killed in mid-round to its next commit."""
    path = lake.log_table("restart", **{"table.datalake.enabled": "true"})
    lake.append(path, 2_000_000)
    lake.service.kill()
    ends = lake.connection.admin.list_all_offsets(path)
    began = time.perf_counter()
    lake.service.start()
    lake.wait_for(path, ends)
    return Measure(
        "tiering.restart",
        "kill -9 of the whole job in mid-round: restart to the next commit",
        f"{time.perf_counter() - began:.1f} s",
        value=time.perf_counter() - began,
        unit="s",
        at_most=20.0,
    )


class Bare:
    """A Spark job whose workers read rows from parquet and write them to parquet, nothing else."""

    def __init__(self, directory: Path, rows: int) -> None:
        import zufluss.spark

        self.rows = rows
        self.directory = directory
        directory.mkdir(parents=True)
        part = rows // BUCKETS
        for bucket in range(BUCKETS):
            with pq.ParquetWriter(
                directory / f"in-{bucket}.parquet", ten_columns(1).schema, compression="zstd"
            ) as writer:
                for start in range(0, part, BATCH):
                    count = min(BATCH, part - start)
                    writer.write_batch(ten_columns(count, bucket * part + start))
        self.session = zufluss.spark.session("bench", master="local[2,4]")

    def rate(self) -> float:
        """Rows per second."""
        where = str(self.directory)

        def copy(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
            for batch in batches:
                for bucket in batch.column("id").to_pylist():
                    yield _copy(where, bucket)

        began = time.perf_counter()
        job = self.session.range(0, BUCKETS, 1, BUCKETS).mapInArrow(copy, "rows long")
        assert sum(row.rows for row in job.collect()) == self.rows // BUCKETS * BUCKETS
        return self.rows / (time.perf_counter() - began)

    def close(self) -> None:
        """Stop the session; the next one starts anew."""
        self.session.stop()


def _copy(where: str, bucket: int) -> pa.RecordBatch:
    source = pq.ParquetFile(f"{where}/in-{bucket}.parquet")
    rows = 0
    with pq.ParquetWriter(
        f"{where}/out-{bucket}.parquet", source.schema_arrow, compression="zstd"
    ) as writer:
        for batch in source.iter_batches(batch_size=65_536):
            writer.write_batch(batch)
            rows += batch.num_rows
    return pa.record_batch({"rows": pa.array([rows], pa.int64())})


def _against(
    name: str,
    label: str,
    ours: float,
    other: float,
    unit: str,
    *,
    at_least: float | None = None,
    at_most: float | None = None,
) -> Measure:
    return Measure(
        name,
        label,
        quantity(ours, unit),
        quantity(other, unit),
        ours / other,
        at_least=at_least,
        at_most=at_most,
    )


def _count(rows: int) -> str:
    return f"{number(rows / 1e6)} M" if rows >= 1_000_000 else f"{rows // 1000} k"
