"""Helpers for all benchmarks: rows, request frames, processes and their cost."""

from __future__ import annotations

import atexit
import contextlib
import functools
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import pyarrow as pa

import zufluss
from zufluss.client.write.encode import BatchEncoder
from zufluss.model.schema import Schema
from zufluss.model.table import TableBucket, TableInfo
from zufluss.wire import messages as m
from zufluss.wire.api import ApiKey
from zufluss.wire.frame import pack_request
from zufluss.wire.hot.produce import produce_request

T = TypeVar("T")
ROOT = Path(__file__).resolve().parent.parent
MALLOC = {"MALLOC_MMAP_THRESHOLD_": str(64 << 20), "MALLOC_TRIM_THRESHOLD_": str(256 << 20)}
"""The malloc settings the server gives itself, for the bare server."""
UNCOMPRESSED = {"table.log.arrow.compression.type": "NONE"}
TEN_COLUMNS = pa.schema(
    [
        ("id", pa.int64()),
        ("a", pa.int32()),
        ("b", pa.int32()),
        ("c", pa.float64()),
        ("d", pa.float64()),
        ("e", pa.string()),
        ("f", pa.string()),
        ("g", pa.int64()),
        ("h", pa.bool_()),
        ("i", pa.string()),
    ]
)
ROWS_1MIB = 11_880
"""Rows of `ten_columns` that make a batch of 1 MiB."""


def ten_columns(count: int, start: int = 0) -> pa.RecordBatch:
    """Rows of ten columns: counters, measurements, words of twelve letters."""
    rng = np.random.default_rng(start)
    letters = rng.integers(97, 123, (1000, 12), dtype=np.uint8)
    words = pa.array([bytes(word).decode() for word in letters])
    pick = lambda: words.take(pa.array(rng.integers(0, 1000, count)))  # noqa: E731
    return pa.record_batch(
        [
            pa.array(np.arange(start, start + count)),
            pa.array((np.arange(count) % 1000).astype(np.int32)),
            pa.array(rng.integers(0, 1 << 30, count).astype(np.int32)),
            pa.array(rng.random(count)),
            pa.array(rng.random(count)),
            pick(),
            pick(),
            pa.array(rng.integers(0, 1 << 60, count)),
            pa.array(np.arange(count) % 2 == 0),
            pick(),
        ],
        schema=TEN_COLUMNS,
    )


def alternate(rounds: int, pids: Sequence[int], *sides: Callable[[], T]) -> tuple[list[T], ...]:
    """What each side returns in the quieter half of the rounds; they take turns in going first.

    A round is the quieter the less the processes `pids` and the pump waited for a CPU in it: then
    less of the machine went to others. A round before the first warms up and does not count.
    """
    watched = (*pids, _pump_process().pid)
    found: list[tuple[float, tuple[T, ...]]] = []
    for i in range(rounds + 1):
        order = range(len(sides)) if i % 2 else range(len(sides) - 1, -1, -1)
        results: dict[int, T] = {}
        disturbance = 0.0
        for side in order:
            began, waited = time.perf_counter(), run_queue_seconds(watched)
            results[side] = sides[side]()
            waited = run_queue_seconds(watched) - waited
            disturbance = max(disturbance, waited / (time.perf_counter() - began))
        found.append((disturbance, tuple(results[side] for side in range(len(sides)))))
    quiet = sorted(found[1:], key=lambda item: item[0])[: max(3, (rounds + 1) // 2)]
    return tuple(list(series) for series in zip(*(values for _, values in quiet), strict=True))


# -- frames ------------------------------------------------------------------------------------


def encoded(info: TableInfo, rows: pa.RecordBatch) -> memoryview:
    """The log batch of rows, without writer id."""
    return BatchEncoder(info).encode([rows], -1, -1).view


def produce_frames(info: TableInfo, batches: Sequence[memoryview]) -> list[bytes]:
    """A request per batch, buckets in turn."""
    frames = []
    for i in range(max(len(batches), info.bucket_count)):
        bucket = TableBucket(info.table_id, None, i % info.bucket_count)
        body = produce_request(-1, info.table_id, 30_000, [(bucket, batches[i % len(batches)])])
        frames.append(pack_request(ApiKey.PRODUCE_LOG, 0, i, b"".join(body)))
    return frames


def fetch_frames(
    info: TableInfo, offsets: Sequence[int], bytes_max: int, columns: Sequence[int] = ()
) -> list[bytes]:
    """A request per offset, for every bucket of the table."""
    frames = []
    for i, offset in enumerate(offsets):
        buckets = [
            m.PbFetchLogReqForBucket(bucket_id=b, fetch_offset=offset, max_fetch_bytes=bytes_max)
            for b in range(info.bucket_count)
        ]
        table = m.PbFetchLogReqForTable(
            table_id=info.table_id,
            projection_pushdown_enabled=bool(columns),
            projected_fields=columns,
            buckets_req=buckets,
        )
        request = m.FetchLogRequest(
            follower_server_id=-1,
            max_bytes=bytes_max * info.bucket_count,
            min_bytes=1,
            max_wait_ms=500,
            tables_req=[table],
        )
        frames.append(pack_request(ApiKey.FETCH_LOG, 0, i, request.SerializeToString()))
    return frames


# -- processes ---------------------------------------------------------------------------------


def cpu_seconds(pids: Sequence[int]) -> float:
    """User and system time of processes so far, by the CPU clock Linux has for each process."""
    return sum(time.clock_gettime((~pid << 3) | 2) for pid in pids)


def run_queue_seconds(pids: Sequence[int]) -> float:
    """How long the threads of processes have been ready to run without a CPU to run on."""
    files = (task / "schedstat" for pid in pids for task in Path(f"/proc/{pid}/task").iterdir())
    total = 0
    for file in files:
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # a thread that ended
            total += int(file.read_text().split()[1])
    return total / 1e9


def rss_bytes(pids: Sequence[int]) -> int:
    """Resident memory of processes."""
    pages = sum(int(Path(f"/proc/{pid}/statm").read_text().split()[1]) for pid in pids)
    return pages * os.sysconf("SC_PAGE_SIZE")


@dataclass(frozen=True, slots=True)
class Load:
    """What one run of the pump measured."""

    answered: int
    """Requests answered, all of them without error."""
    bytes_in: int
    """Bytes of the answers."""
    seconds: float
    """From the first byte sent to the last received."""
    p50_ms: float
    """Median latency."""
    p99_ms: float
    """99th percentile of the latency."""
    cpu_seconds: float
    """Of the server, meanwhile."""

    @property
    def rps(self) -> float:
        """Requests per second."""
        return self.answered / self.seconds


@functools.cache
def _pump_process(number: int = 0) -> subprocess.Popen[str]:
    """`bench.pump`, each started once."""
    process = subprocess.Popen(
        [sys.executable, "-m", "bench.pump"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        cwd=ROOT,
    )
    atexit.register(process.communicate)
    return process


def pump(
    address: str, pids: Sequence[int], frames: Sequence[bytes], process: int = 0, **options: Any
) -> Load:
    """Put frames on a server; `connections`, `window`, `seconds`, `count` as in `bench.pump`.

    `process` is the number of the pump, for work that is to be done at once.
    """
    return _pump(_pump_process(process), address, pids, frames, options)


def _pump(
    process: subprocess.Popen[str],
    address: str,
    pids: Sequence[int],
    frames: Sequence[bytes],
    options: dict[str, Any],
) -> Load:
    assert process.stdin is not None
    assert process.stdout is not None
    with tempfile.NamedTemporaryFile(prefix="zufluss-bench-") as file:
        for frame in frames:
            file.write(frame)
        file.flush()
        before = cpu_seconds(pids)
        process.stdin.write(json.dumps({"address": address, "frames": file.name, **options}) + "\n")
        process.stdin.flush()
        line = process.stdout.readline()
        cpu = cpu_seconds(pids) - before
    if not line:
        raise RuntimeError(f"the pump ended with {process.wait()}")
    r = json.loads(line)
    if r.pop("errors"):
        raise RuntimeError(f"{address} refused some of {r['answered']} requests")
    return Load(**r, cpu_seconds=cpu)


@dataclass(frozen=True, slots=True)
class Target:
    """A server under load."""

    address: str
    """Where it is."""
    pids: tuple[int, ...]
    """Its processes."""

    def load(self, frames: Sequence[bytes], **options: Any) -> Load:
        """Put frames on it."""
        return pump(self.address, self.pids, frames, **options)


@contextlib.contextmanager
def bare_server(*arguments: str) -> Iterator[Target]:
    """`bench.bare` for the length of a block."""
    process = subprocess.Popen(
        [sys.executable, "-m", "bench.bare", *arguments],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        cwd=ROOT,
        env={**os.environ, **MALLOC},
    )
    assert process.stdout is not None
    try:
        port = process.stdout.readline().strip()
        yield Target(f"127.0.0.1:{port}", (process.pid,))
    finally:
        process.communicate()


def recycle_pages(directory: Path, size: int) -> None:
    """Leave `size` bytes of memory free that were in use a moment ago.

    In a virtual machine the first touch of a page the guest has not used for a while costs several
    times a write to it. Done before each measured append, this gives both sides the same memory.
    """
    path = directory / "recycle"
    chunk = bytes(4 << 20)
    with path.open("wb") as file:
        for _ in range(0, size, len(chunk)):
            file.write(chunk)
    path.unlink()


# -- tables ------------------------------------------------------------------------------------


def new_table(
    connection: zufluss.Connection,
    name: str,
    schema: pa.Schema | Schema | str = TEN_COLUMNS,
    *,
    buckets: int = 1,
    primary_key: Sequence[str] = (),
    bucket_keys: Sequence[str] = (),
    properties: dict[str, str] | None = None,
) -> TableInfo:
    """Create a table that does not exist yet, and wait until its buckets have leaders."""
    path = f"fluss.{name}"
    connection.admin.create_table(
        path,
        schema,
        primary_key=primary_key,
        bucket_count=buckets,
        bucket_keys=bucket_keys,
        properties=properties,
    )
    connection.admin.list_offsets(path, "latest")
    return connection.admin.table_info(path)


def record_count(connection: zufluss.Connection, info: TableInfo) -> int:
    """Records the table has."""
    return sum(connection.admin.list_offsets(info.path, "latest").values())


def check_count(connection: zufluss.Connection, info: TableInfo, wanted: int) -> None:
    """A benchmark that lost rows has measured nothing."""
    count = record_count(connection, info)
    if count != wanted:
        raise RuntimeError(f"{info.path} has {count} records, {wanted} were acknowledged")
