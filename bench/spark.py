"""`format("fluss")` in Spark, compared with the same work without zufluss in the same session.

* `read`: rows of a log table to the `noop` sink, against a bare Python source (`bench.bare_source`)
  that hands out the very same batches from memory. Time, and CPU of everything: JVM, Python
  workers, server.
* `bytes`: what the server sends for one of ten equal columns, against all of them.
* `batch`: one micro-batch of few rows, against a stream in Python that makes them up.
* `latency`: from the append of a row to the sink that has it, with a trigger each second.
* `upsert`: rows into a primary-key table, against our client alone.
"""

from __future__ import annotations

import os
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

import zufluss
import zufluss.spark
from bench.bare_source import STREAM_ROWS, BareSource, BareStream
from bench.clients import Worker
from bench.keyed import KEY, every_key, keyed_rows
from bench.report import Measure, compared
from bench.work import alternate, cpu_seconds, new_table
from zufluss.obs.metrics import SENT_BYTES
from zufluss.spark.read.batch import FlussReader, source_schema
from zufluss.spark.source_options import parse_options
from zufluss.testing.server import DevServer

ROWS = 5_000_000
BUCKETS = 4
STREAM_TASKS = 2
BATCH_ROWS = 65_536
TRIGGER_SECONDS = 1
APPENDS_PER_SECOND = 20
METRICS_PORT = 29124
COLUMNS = pa.schema(
    [
        ("id", pa.int64()),
        ("a", pa.int32()),
        ("b", pa.float64()),
        ("c", pa.string()),
        ("d", pa.timestamp("us")),
    ]
)


def run(directory: Path, rounds: int, quick: bool) -> Iterator[Measure]:
    """One server, one session."""
    properties = {"zufluss.log.flush": "os", "zufluss.metrics.port": str(METRICS_PORT)}
    with ExitStack() as stack:
        server = stack.enter_context(DevServer(directory / "server", properties))
        connection = stack.enter_context(zufluss.connect(server.bootstrap))
        spark = zufluss.spark.session("bench", "local[2,4]", {"spark.driver.memory": "2g"})
        stack.callback(spark.stop)
        zufluss.spark.register(spark, server.bootstrap)
        spark.dataSource.register(BareSource)
        spark.dataSource.register(BareStream)
        bench = SparkBench(server, connection, spark, directory)
        yield from bench.read(500_000 if quick else ROWS, rounds)
        yield bench.bytes_of_a_column(100_000 if quick else 500_000)
        yield bench.micro_batch(10 if quick else 30)
        yield from bench.latency(8 if quick else 40)
        yield bench.upsert(100_000 if quick else 500_000, rounds)


class SparkBench:
    """A server, a session, and what is measured with them."""

    def __init__(
        self, server: DevServer, connection: zufluss.Connection, spark: Any, directory: Path
    ) -> None:
        self.server = server
        self.connection = connection
        self.spark = spark
        self.directory = directory

    # -- batches -------------------------------------------------------------------------------

    def read(self, rows: int, rounds: int) -> Iterator[Measure]:
        """Read all rows of a table into the `noop` sink."""
        info = new_table(self.connection, "read", COLUMNS, buckets=BUCKETS)
        with self.connection.table(str(info.path)).append() as writer:
            for start in range(0, rows, BATCH_ROWS):
                writer.write(five_columns(min(BATCH_ROWS, rows - start), start))
        bare = self._same_batches(str(info.path), rows)
        read = self.spark.read
        ours, others = alternate(
            rounds,
            (self.server.pid, os.getpid()),
            lambda: self._cost(lambda: read.format("fluss").load(str(info.path)), rows),
            lambda: self._cost(lambda: read.format("bare").load(str(bare)), rows),
        )
        label = f"{rows / 1e6:g} M rows through Spark to noop, against a bare Python source"
        rates = ([rate for rate, _ in side] for side in (ours, others))
        yield compared("spark.read", label, *rates, " rows/s", at_least=0.7)
        cpu = ([seconds for _, seconds in side] for side in (others, ours))
        others_cpu, ours_cpu = cpu
        yield compared(
            "spark.read.cpu",
            "the same: CPU of JVM, workers and server",
            ours_cpu,
            others_cpu,
            "s",
            less_is_better=True,
        )

    def _same_batches(self, path: str, rows: int) -> Path:
        """Files with what each task of the source hands out."""
        options = parse_options({"bootstrap.servers": self.server.bootstrap, "table": path})
        reader = FlussReader(options, source_schema(options))
        made = self.directory / "bare"
        made.mkdir()
        found = 0
        for number, partition in enumerate(reader.partitions()):
            batches = list(reader.read(partition))
            with pa.ipc.new_stream(str(made / f"{number:03}.arrow"), batches[0].schema) as file:
                for batch in batches:
                    file.write_batch(batch)
            found += sum(batch.num_rows for batch in batches)
        if found != rows:
            raise RuntimeError(f"the source has {found} rows, {rows} were written")
        return made

    def _cost(self, frame: Callable[[], Any], rows: int) -> tuple[float, float]:
        """Rows per second, and CPU seconds of all processes that are ours."""
        before, began = self._cpu(), time.perf_counter()
        frame().write.format("noop").mode("overwrite").save()
        seconds = time.perf_counter() - began
        after = self._cpu()
        return rows / seconds, sum(after.values()) - sum(before.get(pid, 0.0) for pid in after)

    def _cpu(self) -> dict[int, float]:
        found = {}
        for pid in family(os.getpid()):
            try:
                found[pid] = cpu_seconds([pid])
            except OSError:  # it has ended
                continue
        return found

    def bytes_of_a_column(self, rows: int) -> Measure:
        """One column of ten."""
        names = [f"c{i}" for i in range(10)]
        schema = pa.schema([(name, pa.int64()) for name in names])
        info = new_table(self.connection, "equal", schema, buckets=BUCKETS)
        rng = np.random.default_rng(10)
        columns = [pa.array(rng.integers(1 << 62, 1 << 63, rows)) for _ in names]
        with self.connection.table(str(info.path)).append() as writer:
            writer.write(pa.record_batch(columns, schema=schema))
        whole, one = (self._sent(str(info.path), columns) for columns in (names, names[:1]))
        label = "bytes sent for one of ten equal columns, against all"
        return compared("spark.bytes", label, [one], [whole], "B", at_most=0.12)

    def _sent(self, path: str, columns: list[str]) -> float:
        before = metric(SENT_BYTES.name)
        wanted = self.spark.read.format("fluss").option("columns", ",".join(columns))
        wanted.load(path).write.format("noop").mode("overwrite").save()
        return metric(SENT_BYTES.name) - before

    # -- streams -------------------------------------------------------------------------------

    def micro_batch(self, batches: int) -> Measure:
        """Micro-batches of a few rows, as fast as they go."""
        info = new_table(self.connection, "stream", "id BIGINT, at BIGINT", buckets=STREAM_TASKS)
        rows = STREAM_ROWS * STREAM_TASKS
        ids = pa.array(range(rows), pa.int64())
        with self.connection.table(str(info.path)).append() as writer:
            for _ in range(batches + 1):
                writer.write(pa.record_batch({"id": ids, "at": ids}))
        stream = self.spark.readStream
        fluss = stream.format("fluss").option("maxRowsPerTrigger", rows)
        bare = stream.format("bare_stream").option("tasks", STREAM_TASKS)
        ours = self._batch_seconds(fluss.load(str(info.path)), batches, "ours")
        others = self._batch_seconds(bare.load(), batches, "bare")
        label = "a micro-batch of few rows, against a stream made up in Python"
        count = min(len(ours), len(others))
        return compared(
            "spark.batch", label, ours[:count], others[:count], "s", less_is_better=True
        )

    def _batch_seconds(self, frame: Any, batches: int, name: str) -> list[float]:
        """How long each micro-batch took, the first ones left out."""
        query = self._started(frame.writeStream.format("noop"), name, 0)
        try:
            while (query.lastProgress or {"batchId": 0})["batchId"] < batches:
                if not query.isActive:
                    raise RuntimeError(f"the query ended: {query.exception()}")
                time.sleep(0.05)
            took = [p["durationMs"]["triggerExecution"] for p in query.recentProgress]
        finally:
            query.stop()
        return [ms / 1000 for ms in took[2:]]

    def latency(self, seconds: int) -> Iterator[Measure]:
        """Rows that know when they were appended."""
        info = new_table(self.connection, "latency", "id BIGINT, at BIGINT", buckets=STREAM_TASKS)
        found: list[float] = []

        def sink(frame: Any, batch: int) -> None:
            rows = frame.select("at").toArrow()["at"].to_numpy()
            found.extend((time.time_ns() - rows) / 1e9)

        frame = self.spark.readStream.format("fluss").load(str(info.path))
        query = self._started(frame.writeStream.foreachBatch(sink), "latency", TRIGGER_SECONDS)
        ended = threading.Event()
        writer = threading.Thread(target=self._append_times, args=(str(info.path), ended))
        writer.start()
        try:
            time.sleep(seconds)
        finally:
            ended.set()
            writer.join()
            query.processAllAvailable()
            query.stop()
        warm = sorted(found[len(found) // 4 :])
        if not warm:
            raise RuntimeError("no row came through the stream")
        for part in (50, 99):
            value = warm[min(len(warm) - 1, len(warm) * part // 100)]
            yield Measure(
                f"spark.latency.p{part}",
                f"from append to sink, a trigger each {TRIGGER_SECONDS} s, p{part}",
                f"{value:.2f} s",
                value=value,
                unit="s",
                less_is_better=True,
            )

    def _append_times(self, path: str, ended: threading.Event) -> None:
        with self.connection.table(path).append() as writer:
            while not ended.wait(1 / APPENDS_PER_SECOND):
                now = pa.array([time.time_ns()], pa.int64())
                writer.write(pa.record_batch({"id": now, "at": now}))
                writer.flush()

    def _started(self, writer: Any, name: str, seconds: int) -> Any:
        state = str(self.directory / f"checkpoint-{name}")
        kept = writer.option("checkpointLocation", state).queryName(name)
        return kept.trigger(processingTime=f"{seconds} seconds").start()

    # -- writes --------------------------------------------------------------------------------

    def upsert(self, rows: int, rounds: int) -> Measure:
        """The same rows into tables of their own, by Spark and by a client."""
        plain = str(self.directory / "upserts")
        table = pa.Table.from_batches([keyed_rows(every_key(rows))])
        self.spark.createDataFrame(table).repartition(2).write.parquet(plain)
        worker = Worker("zufluss", self.server.bootstrap)
        names = iter(range(1000))

        def made() -> str:
            name = f"upsert_{next(names)}"
            new_table(self.connection, name, buckets=BUCKETS, primary_key=KEY)
            return name

        def by_spark() -> float:
            name = made()
            began = time.perf_counter()
            writer = self.spark.read.parquet(plain).write.format("fluss").mode("append")
            writer.option("table", f"fluss.{name}").save()
            return rows / (time.perf_counter() - began)

        def by_client() -> float:
            work = {"count": rows, "rows": BATCH_ROWS, "ids": "every"}
            return rows / worker.do(do="upsert", table=made(), **work)

        try:
            pids = (self.server.pid, worker.process.pid)
            ours, alone = alternate(rounds, pids, by_spark, by_client)
        finally:
            worker.close()
        label = f"upsert of {rows / 1e6:g} M rows through Spark, against our client alone"
        return compared("spark.upsert", label, ours, alone, " rows/s")


def five_columns(count: int, start: int) -> pa.RecordBatch:
    """Rows with a counter, numbers, a word of twelve letters and a time."""
    rng = np.random.default_rng(start)
    letters = rng.integers(97, 123, (1000, 12), dtype=np.uint8)
    words = pa.array([bytes(word).decode() for word in letters])
    ids = np.arange(start, start + count)
    columns = [
        pa.array(ids),
        pa.array((ids % 1000).astype(np.int32)),
        pa.array(rng.random(count)),
        words.take(pa.array(rng.integers(0, 1000, count))),
        pa.array(ids * 1000).cast(pa.timestamp("us")),
    ]
    return pa.record_batch(columns, schema=COLUMNS)


def metric(name: str) -> float:
    """One of the server's metrics, over all labels."""
    with urllib.request.urlopen(f"http://127.0.0.1:{METRICS_PORT}/metrics", timeout=30) as answer:
        lines = answer.read().decode().splitlines()
    shown = (line.rsplit(" ", 1) for line in lines if not line.startswith("#"))
    return sum(float(value) for key, value in shown if key.partition("{")[0] == name)


def family(pid: int) -> list[int]:
    """A process, those it started, and theirs."""
    found = [pid]
    for file in Path(f"/proc/{pid}/task").glob("*/children"):
        try:
            children = file.read_text().split()
        except OSError:  # a thread that ended
            continue
        found += [one for child in children for one in family(int(child))]
    return found
