"""Scans of primary-key tables: against bare RocksDB, beside writers, in memory and in bytes.

* `full`: all rows of a table of four buckets into one Arrow table by our client, against going
  through the very same files with bare `rocksdict`, and decoding with the same kernel, in one
  process. The files are the pinned state of a scan that stays open meanwhile.
* `columns`: the same scan, two of the ten columns, against the whole rows.
* `memory`: what the server and its processes have more while several scans stand still after their
  first page, per scan.
* `writers`: random upserts while another client scans without end, against upserts alone.
* `top`: all bytes between client and server for ten rows.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from itertools import islice
from pathlib import Path

import numpy as np
import pyarrow as pa
from rocksdict import AccessType, Options, Rdict

import zufluss
from bench.clients import Worker
from bench.keyed import KEY
from bench.kv import Written
from bench.report import Measure, compared
from bench.work import alternate, new_table, rss_bytes
from zufluss.client.keyed.values import slices_of
from zufluss.config import client_options as o
from zufluss.model.table import TableInfo
from zufluss.net.client import RpcConnection
from zufluss.record.batch.kv import split_values
from zufluss.record.rows.codec import RowCodec
from zufluss.testing.server import DevServer

KEYS = 5_000_000
QUICK_KEYS = 300_000
BUCKETS = 4
PAGE_ROWS = 65_536
"""Rows that the bare side decodes at once."""
STANDING = 6
"""Paused scans; a bucket may have eight."""
TOP_ROWS = 10
TOP_KIB = 64
COLUMNS = ["id", "c"]


def run(directory: Path, rounds: int, quick: bool, keys: int = KEYS) -> Iterator[Measure]:
    """One server, one table."""
    with DevServer(directory / "kvscan", {"zufluss.log.flush": "os"}) as server:
        scanned = Scanned(server, QUICK_KEYS if quick and keys == KEYS else keys)
        try:
            yield from scanned.full(rounds)
            yield scanned.memory()
            yield scanned.writers(rounds, 30 if quick else 100)
            yield scanned.top()
        finally:
            scanned.close()


class Scanned:
    """A table of many keys, and the clients that read and write it."""

    def __init__(self, server: DevServer, keys: int) -> None:
        self.server = server
        self.keys = keys
        self.connection = zufluss.connect(server.bootstrap)
        self.info = new_table(self.connection, "scanned", primary_key=KEY, buckets=BUCKETS)
        self.table = self.connection.table(str(self.info.path))
        self.workers = [Worker("zufluss", server.bootstrap) for _ in range(2)]
        self.writer, self.reader = self.workers
        self.written = Written(self.connection, self.info, self.writer)
        self.written.load(keys)

    @property
    def pids(self) -> list[int]:
        """The processes to watch."""
        return [self.server.pid, *(worker.process.pid for worker in self.workers)]

    def full(self, rounds: int) -> Iterator[Measure]:
        """The whole table, and two columns of it."""
        with self.table.scan(prefetch=0).open():
            places = sorted(self.server.data_dir.glob("**/pins/*/rocks"))
            if len(places) != BUCKETS:
                raise RuntimeError(f"{len(places)} pinned buckets, {BUCKETS} are there")
            ours, few, bare = alternate(
                rounds,
                self.pids,
                self.scan,
                lambda: self.scan(COLUMNS),
                lambda: bare_rate(self.info, places, self.keys),
            )
        label = f"scan of {self.keys / 1e6:g} M rows to Arrow"
        unit = " rows/s"
        yield compared(
            "kvscan.full", f"{label}, against bare rocksdict", ours, bare, unit, at_least=0.5
        )
        yield compared("kvscan.columns", f"{label}, two columns, against all ten", few, ours, unit)

    def scan(self, columns: list[str] | None = None) -> float:
        """Rows per second of one scan by a client of its own."""
        name = self.info.path.table
        return self.keys / self.reader.do(do="scan", table=name, columns=columns, expect=self.keys)

    def memory(self) -> Measure:
        """Memory per scan that is paused."""
        page = o.CLIENT_SCANNER_KV_FETCH_MAX_BYTES.default
        before = rss_bytes(family(self.server.pid))
        with ExitStack() as stack:
            for _ in range(STANDING):
                scanner = stack.enter_context(self.table.scan(prefetch=0).open())
                next(scanner)
            each = (rss_bytes(family(self.server.pid)) - before) / STANDING
        return Measure(
            "kvscan.memory",
            f"server memory per open scan, pages of {page >> 20} MiB",
            f"{each / 1024:.0f} KiB",
            value=max(each, 0) / 1024,
            unit="KiB",
            at_most=page / 1024,
        )

    def writers(self, rounds: int, batches: int) -> Measure:
        """Upserts with and without a concurrent scan."""
        with_scan, alone = alternate(
            rounds,
            self.pids,
            lambda: self._beside_scan(batches),
            lambda: self.written.upsert(batches),
        )
        label = "random upserts beside a scan without end, against alone"
        return compared("kvscan.writers", label, with_scan, alone, " rows/s", at_least=0.8)

    def _beside_scan(self, batches: int) -> float:
        ended = threading.Event()

        def scan_on() -> None:
            while not ended.is_set():
                self.scan()

        thread = threading.Thread(target=scan_on)
        thread.start()
        try:
            return self.written.upsert(batches)
        finally:
            ended.set()
            thread.join()

    def top(self) -> Measure:
        """A few rows, as a dashboard asks for them."""
        with counted() as size, zufluss.connect(self.server.bootstrap) as connection:
            table = connection.table(str(self.info.path))
            size[0] = 0
            rows = table.scan(limit=TOP_ROWS).to_arrow()
        if rows.num_rows != TOP_ROWS:
            raise RuntimeError(f"{rows.num_rows} rows, {TOP_ROWS} were asked for")
        return Measure(
            "kvscan.top",
            f"bytes to and from the server for {TOP_ROWS} rows",
            f"{size[0] / 1024:.1f} KiB",
            value=size[0] / 1024,
            unit="KiB",
            at_most=TOP_KIB,
        )

    def close(self) -> None:
        """End the clients."""
        for worker in self.workers:
            worker.close()
        self.connection.close()


def bare_rate(info: TableInfo, places: list[Path], expect: int) -> float:
    """Rows per second of going through databases and decoding what is in them."""
    began = time.perf_counter()
    codec = RowCodec(info.schema, "COMPACTED")
    batches = [batch for place in places for batch in bare_rows(place, codec)]
    found = pa.Table.from_batches(batches).num_rows
    seconds = time.perf_counter() - began
    if found != expect:
        raise RuntimeError(f"the files have {found} rows, {expect} were written")
    return found / seconds


def bare_rows(place: Path, codec: RowCodec) -> Iterator[pa.RecordBatch]:
    """The rows of one database."""
    database = Rdict(str(place), Options(raw_mode=True), access_type=AccessType.read_only())
    values = database.values()
    while page := list(islice(values, PAGE_ROWS)):
        _, rows = split_values(slices_of(page))
        yield codec.decode(rows)
    del values
    database.close()


def family(pid: int) -> list[int]:
    """A process and those it started."""
    children = Path(f"/proc/{pid}/task").glob("*/children")
    return [pid, *(int(child) for file in children for child in file.read_text().split())]


@contextmanager
def counted() -> Iterator[np.ndarray]:
    """Count the bytes of the connections that clients of this process make meanwhile."""
    size = np.zeros(1, np.int64)
    updated, write = RpcConnection.buffer_updated, RpcConnection._write

    def count_updated(self: RpcConnection, nbytes: int) -> None:
        size[0] += nbytes
        updated(self, nbytes)

    def count_write(self: RpcConnection, header: bytes, body: list[bytes], length: int) -> None:
        size[0] += len(header) + length
        write(self, header, body, length)

    RpcConnection.buffer_updated = count_updated  # type: ignore[method-assign]
    RpcConnection._write = count_write  # type: ignore[method-assign,assignment]
    try:
        yield size
    finally:
        RpcConnection.buffer_updated = updated  # type: ignore[method-assign]
        RpcConnection._write = write  # type: ignore[method-assign]
