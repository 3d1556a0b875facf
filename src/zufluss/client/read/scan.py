"""What all scans and their runs have in common, whether they read a log, a lake or both."""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Mapping
from types import TracebackType
from typing import TYPE_CHECKING, Literal, Self

import pyarrow as pa

from zufluss.client.core.offsets import Position
from zufluss.model.table import TableBucket

if TYPE_CHECKING:
    import duckdb
    import pandas as pd
    import polars as pl

Offsets = Mapping[int, int] | Mapping[TableBucket, int]
Start = Position | Offsets
Stop = Position | Offsets | None
Source = Literal["live", "snapshot", "log", "union", "lake"]
"""Where the rows of a scan come from."""


class AsyncScan(ABC):
    """What every scan can do: hand out its rows as Arrow batches, or all of them as one thing."""

    __slots__ = ()

    stop: Stop
    """Where to end; None follows."""
    limit: int | None
    """At most this many rows."""

    @property
    @abstractmethod
    def schema(self) -> pa.Schema:
        """The Arrow schema of the rows."""

    @abstractmethod
    async def open(self) -> AsyncScanner:
        """Start a run."""

    async def __aiter__(self) -> AsyncIterator[pa.RecordBatch]:
        async with await self.open() as scanner:
            async for batch in scanner:
                yield batch

    async def to_arrow(self) -> pa.Table:
        """All rows as an Arrow table; the scan must be bounded."""
        if self.stop is None and self.limit is None:
            raise ValueError("a scan that follows never ends; give stop or limit")
        batches = [batch async for batch in self]
        return pa.Table.from_batches(batches, schema=self.schema)

    async def to_pandas(self) -> pd.DataFrame:
        """All rows as a pandas frame."""
        return (await self.to_arrow()).to_pandas()

    async def to_polars(self) -> pl.DataFrame:
        """All rows as a polars frame."""
        return polars_frame(await self.to_arrow())

    async def to_duckdb(
        self, connection: duckdb.DuckDBPyConnection | None = None
    ) -> duckdb.DuckDBPyRelation:
        """All rows as a DuckDB relation, in a database of its own or in `connection`."""
        return duckdb_relation(await self.to_arrow(), connection)


class AsyncScanner(ABC):
    """A run of a scan: iterate it, or `poll` it; `positions` says where it is."""

    schema: pa.Schema
    """The Arrow schema of the rows."""

    @property
    @abstractmethod
    def finished(self) -> bool:
        """A bounded scan has handed out everything."""

    @abstractmethod
    def positions(self) -> dict[TableBucket, int]:
        """The offset after what was handed out, by bucket: a `start` to go on from."""

    @abstractmethod
    async def next_batch(self) -> pa.RecordBatch | None:
        """The next rows; None when the scan is finished. May be cancelled and called again."""

    def at_hand(self) -> pa.RecordBatch | None:
        """The next rows if nothing has to be waited for, else None; any thread may ask.

        Never beside another call of the same run.
        """
        return None

    @abstractmethod
    async def close(self) -> None:
        """Stop reading. Closing twice is fine."""

    async def poll(self, timeout_ms: int = 1_000) -> pa.RecordBatch | None:
        """The next rows, None if there are none within the time or the scan is finished."""
        try:
            async with asyncio.timeout(timeout_ms / 1000):
                return await self.next_batch()
        except TimeoutError:
            return None

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> pa.RecordBatch:
        batch = await self.next_batch()
        if batch is None:
            raise StopAsyncIteration
        return batch

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        exc: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self.close()


def polars_frame(table: pa.Table) -> pl.DataFrame:
    """An Arrow table as a polars frame."""
    import polars

    frame = polars.from_arrow(table)
    assert isinstance(frame, polars.DataFrame)
    return frame


def duckdb_relation(
    table: pa.Table, connection: duckdb.DuckDBPyConnection | None
) -> duckdb.DuckDBPyRelation:
    """An Arrow table as a DuckDB relation."""
    import duckdb

    return (connection or duckdb.connect()).from_arrow(table)
