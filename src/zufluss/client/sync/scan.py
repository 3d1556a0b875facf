"""Scans, their runs and readers of snapshots for synchronous code, derived from the async ones."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from typing import TYPE_CHECKING, Self, TypeVar

import pyarrow as pa

from zufluss.client.keyed.scan import AsyncKvScan, AsyncKvScanner
from zufluss.client.keyed.snapshot_reader import AsyncKvSnapshotReader
from zufluss.client.read.scan import (
    AsyncBatches,
    AsyncScan,
    AsyncScanner,
    duckdb_relation,
    polars_frame,
)
from zufluss.client.read.union_plan import UnionPlan
from zufluss.client.read.union_scan import AsyncUnionScan, AsyncUnionScanner
from zufluss.client.sync.facade import BlockFacade, Facade, calls, documented_by, waits
from zufluss.client.sync.loop import LoopThread
from zufluss.model.table import TableBucket

if TYPE_CHECKING:
    import duckdb
    import pandas as pd
    import polars as pl

N = TypeVar("N", bound=AsyncBatches, covariant=True)


class _Batches(BlockFacade[N]):
    """Arrow batches to iterate over."""

    @property
    def schema(self) -> pa.Schema:
        """The Arrow schema of the rows."""
        return self._twin.schema

    close = waits(AsyncBatches.close)

    def __iter__(self) -> Iterator[pa.RecordBatch]:
        return self

    def __next__(self) -> pa.RecordBatch:
        batch = self._twin.at_hand()  # a turn of the loop costs as much as decoding some rows
        if batch is None:
            batch = self._thread.run(self._twin.next_batch())
        if batch is None:
            raise StopIteration
        return batch


@documented_by(AsyncKvSnapshotReader)
class KvSnapshotReader(_Batches[AsyncKvSnapshotReader]):
    """The rows of a key-value snapshot; `table.kv_snapshot(…)` opens it. Iterate it, then close it.

    >>> with table.kv_snapshot(bucket, 7) as reader:  # doctest: +SKIP
    ...     for batch in reader:
    ...         print(batch.num_rows)
    """

    @property
    def log_offset(self) -> int:
        return self._twin.log_offset

    @property
    def last_key(self) -> bytes | None:
        """The encoded key of the last row handed out: an `after` to continue from."""
        return self._twin.last_key


@documented_by(AsyncScanner)
class LogScanner(_Batches[AsyncScanner]):
    """A run of a scan: iterate it, or `poll` it; `positions` says where it is.

    >>> with table.scan(stop=None).open() as scanner:  # doctest: +SKIP
    ...     batch = scanner.poll(timeout_ms=1000)
    ...     resume = scanner.positions()
    """

    @property
    def finished(self) -> bool:
        return self._twin.finished

    @property
    def progress(self) -> float | None:
        """The share of the buckets that was read, 0 to 1; None if it is unknown."""
        return None

    positions = calls(AsyncScanner.positions)
    poll = waits(AsyncScanner.poll)


class UnionScanner(LogScanner):
    """A run of a union scan; `plan` is what it reads."""

    _twin: AsyncUnionScanner

    @property
    def plan(self) -> UnionPlan:
        """The lake snapshot and the ranges of the log that are read."""
        return self._twin.plan


@documented_by(AsyncKvScanner)
class KvScanner(LogScanner):
    """A run of a scan of a primary-key table; `log_offsets` is the moment it shows."""

    _twin: AsyncKvScanner

    @property
    def log_offsets(self) -> dict[TableBucket, int]:
        """Where the changelog continues behind the rows: a `start` for `table.changelog`."""
        return self._twin.log_offsets

    @property
    def progress(self) -> float:
        return self._twin.progress

    cursor = waits(AsyncKvScanner.cursor)
    detach = waits(AsyncKvScanner.detach)


R = TypeVar("R", bound=LogScanner)


@documented_by(AsyncScan)
class LogScan(Facade[AsyncScan]):
    """What to read; `table.scan(…)` or `table.changelog(…)` makes it. Iterate it for Arrow batches.

    As a context manager it closes the runs that were begun and not finished.

    >>> table.scan(limit=10).to_polars()  # doctest: +SKIP
    >>> for batch in table.scan(start="latest", stop=None):  # doctest: +SKIP
    ...     print(batch.num_rows)
    """

    def __init__(self, thread: LoopThread, twin: AsyncScan) -> None:
        super().__init__(thread, twin)
        self._runs: weakref.WeakSet[LogScanner] = weakref.WeakSet()

    @property
    def schema(self) -> pa.Schema:
        return self._twin.schema

    def _repr_html_(self) -> str:
        return self._twin._repr_html_()

    def open(self) -> LogScanner:
        return self._opened(LogScanner)

    def _opened(self, kind: type[R]) -> R:
        scanner = kind(self._thread, self._thread.run(self._twin.open()))
        self._runs.add(scanner)
        return scanner

    def __iter__(self) -> Iterator[pa.RecordBatch]:
        with self.open() as scanner:
            yield from scanner

    to_arrow = waits(AsyncScan.to_arrow)

    def to_pandas(self) -> pd.DataFrame:
        return self.to_arrow().to_pandas()

    def to_polars(self) -> pl.DataFrame:
        return polars_frame(self.to_arrow())

    def to_duckdb(
        self, connection: duckdb.DuckDBPyConnection | None = None
    ) -> duckdb.DuckDBPyRelation:
        return duckdb_relation(self.to_arrow(), connection)

    def to_reader(self) -> pa.RecordBatchReader:
        """Return the rows as a stream of Arrow batches."""
        return pa.RecordBatchReader.from_batches(self.schema, iter(self))

    def __arrow_c_stream__(self, requested_schema: object | None = None) -> object:
        return self.to_reader().__arrow_c_stream__(requested_schema)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        for scanner in list(self._runs):
            scanner.close()


@documented_by(AsyncUnionScan)
class UnionScan(LogScan):
    """What to read of lake and log; `table.scan(source="union")` or `"lake"` makes it."""

    _twin: AsyncUnionScan

    def open(self) -> UnionScanner:
        return self._opened(UnionScanner)


@documented_by(AsyncKvScan)
class KvScan(LogScan):
    """What to read of a primary-key table; `table.scan(…)` makes it.

    >>> with orders.scan().open() as scanner:  # doctest: +SKIP
    ...     rows = pa.Table.from_batches(scanner, scanner.schema)
    >>> orders.changelog(start=scanner.log_offsets)  # doctest: +SKIP
    """

    _twin: AsyncKvScan

    split = waits(AsyncKvScan.split)

    def open(self) -> KvScanner:
        return self._opened(KvScanner)


def scan_facade(thread: LoopThread, scan: AsyncScan) -> LogScan:
    """The façade of a scan of any kind."""
    if isinstance(scan, AsyncKvScan):
        return KvScan(thread, scan)
    if isinstance(scan, AsyncUnionScan):
        return UnionScan(thread, scan)
    return LogScan(thread, scan)
