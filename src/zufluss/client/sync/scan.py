"""Scans for synchronous code: thin façades over the async ones, on the loop of the connection."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from typing import TYPE_CHECKING, Self

import pyarrow as pa

from zufluss.client.keyed.scan import AsyncKvScan, AsyncKvScanner
from zufluss.client.read.scan import AsyncScan, AsyncScanner, duckdb_relation, polars_frame
from zufluss.client.read.union_scan import AsyncUnionScan, AsyncUnionScanner
from zufluss.model.table import TableBucket

if TYPE_CHECKING:
    import duckdb
    import pandas as pd
    import polars as pl

    from zufluss.client.sync.connection import LoopThread


class LogScan:
    """What to read of a log; `table.scan(…)` or `table.changelog(…)` makes it.

    Iterate it for Arrow batches.

    As a context manager it closes the runs that were begun and not finished.

    >>> table.scan(limit=10).to_polars()  # doctest: +SKIP
    >>> for batch in table.scan(start="latest", stop=None):  # doctest: +SKIP
    ...     print(batch.num_rows)
    """

    def __init__(self, thread: LoopThread, scan: AsyncScan) -> None:
        self._thread = thread
        self._scan = scan
        self._runs: weakref.WeakSet[LogScanner] = weakref.WeakSet()

    @property
    def schema(self) -> pa.Schema:
        """The Arrow schema of the rows."""
        return self._scan.schema

    def open(self) -> LogScanner:
        """Start a run that can be polled and asked for its positions."""
        scanner = LogScanner(self._thread, self._thread.run(self._scan.open()))
        self._runs.add(scanner)
        return scanner

    def __iter__(self) -> Iterator[pa.RecordBatch]:
        with self.open() as scanner:
            yield from scanner

    def to_arrow(self) -> pa.Table:
        """All rows as an Arrow table; the scan must be bounded."""
        return self._thread.run(self._scan.to_arrow())

    def to_pandas(self) -> pd.DataFrame:
        """All rows as a pandas frame."""
        return self.to_arrow().to_pandas()

    def to_polars(self) -> pl.DataFrame:
        """All rows as a polars frame."""
        return polars_frame(self.to_arrow())

    def to_duckdb(
        self, connection: duckdb.DuckDBPyConnection | None = None
    ) -> duckdb.DuckDBPyRelation:
        """All rows as a DuckDB relation, in a database of its own or in `connection`."""
        return duckdb_relation(self.to_arrow(), connection)

    def to_reader(self) -> pa.RecordBatchReader:
        """The rows as a stream of Arrow batches."""
        return pa.RecordBatchReader.from_batches(self.schema, iter(self))

    def __arrow_c_stream__(self, requested_schema: object | None = None) -> object:
        return self.to_reader().__arrow_c_stream__(requested_schema)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        for scanner in list(self._runs):
            scanner.close()

    def __repr__(self) -> str:
        return repr(self._scan).replace("Async", "", 1)


class UnionScan(LogScan):
    """What to read of lake and log; `table.scan(source="union")` or `"lake"` makes it."""

    def __init__(self, thread: LoopThread, scan: AsyncUnionScan) -> None:
        super().__init__(thread, scan)
        self._union = scan

    def open(self) -> UnionScanner:
        """Pin a plan and start a run of it."""
        scanner = UnionScanner(self._thread, self._thread.run(self._union.open()))
        self._runs.add(scanner)
        return scanner


class KvScan(LogScan):
    """What to read of a primary-key table; `table.scan(…)` makes it.

    >>> with orders.scan().open() as scanner:  # doctest: +SKIP
    ...     rows = pa.Table.from_batches(scanner, scanner.schema)
    >>> orders.changelog(start=scanner.log_offsets)  # doctest: +SKIP
    """

    def __init__(self, thread: LoopThread, scan: AsyncKvScan) -> None:
        super().__init__(thread, scan)
        self._kv = scan

    def open(self) -> KvScanner:
        """Fix what is read, in every bucket, and start a run of it."""
        scanner = KvScanner(self._thread, self._thread.run(self._kv.open()))
        self._runs.add(scanner)
        return scanner


class LogScanner:
    """A run of a scan: iterate it, or `poll` it; `positions` says where it is.

    >>> with table.scan(stop=None).open() as scanner:  # doctest: +SKIP
    ...     batch = scanner.poll(timeout_ms=1000)
    ...     resume = scanner.positions()
    """

    def __init__(self, thread: LoopThread, scanner: AsyncScanner) -> None:
        self._thread = thread
        self._scanner = scanner
        self.schema: pa.Schema = scanner.schema
        """The Arrow schema of the rows."""

    @property
    def finished(self) -> bool:
        """A bounded scan has handed out everything."""
        return self._scanner.finished

    @property
    def progress(self) -> float | None:
        """The part that was read, 0 to 1; None where that is not known."""
        return None

    def positions(self) -> dict[TableBucket, int]:
        """The offset after what was handed out, by bucket: a `start` to go on from."""
        return self._scanner.positions()

    def poll(self, timeout_ms: int = 1_000) -> pa.RecordBatch | None:
        """The next rows, None if there are none within the time or the scan is finished."""
        return self._thread.run(self._scanner.poll(timeout_ms))

    def close(self) -> None:
        """Stop fetching. Closing twice is fine."""
        self._thread.run(self._scanner.close())

    def __iter__(self) -> Iterator[pa.RecordBatch]:
        return self

    def __next__(self) -> pa.RecordBatch:
        batch = self._scanner.at_hand()  # a turn of the loop costs as much as decoding some rows
        if batch is None:
            batch = self._thread.run(self._scanner.next_batch())
        if batch is None:
            raise StopIteration
        return batch

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return repr(self._scanner).replace("Async", "", 1)


class UnionScanner(LogScanner):
    """A run of a union scan; `plan` says what it is pinned to."""

    def __init__(self, thread: LoopThread, scanner: AsyncUnionScanner) -> None:
        super().__init__(thread, scanner)
        self.plan = scanner.plan
        """The lake snapshot and the ranges of the log that are read."""


class KvScanner(LogScanner):
    """A run of a scan of a primary-key table; `log_offsets` says what it is the state of."""

    def __init__(self, thread: LoopThread, scanner: AsyncKvScanner) -> None:
        super().__init__(thread, scanner)
        self._kv = scanner
        self.log_offsets = scanner.log_offsets
        """The changelog from here on has what is not in the rows: a `start` for `changelog`."""

    @property
    def progress(self) -> float:
        """The part of the buckets that was read, 0 to 1."""
        return self._kv.progress
