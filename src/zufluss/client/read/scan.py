"""The base classes of all scans and their runs, whether they read a log, a lake or rows by key."""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, Self

import pyarrow as pa

from zufluss.client.core.catalog import Partition
from zufluss.client.core.cluster import ClusterConnection
from zufluss.client.core.offsets import Position, check_buckets
from zufluss.client.read.arguments import limit_of
from zufluss.errors import InvalidTableError
from zufluss.model.expression import Expression
from zufluss.model.html import html_table
from zufluss.model.table import TableBucket, TableInfo

if TYPE_CHECKING:
    import duckdb
    import pandas as pd
    import polars as pl

Offsets = Mapping[int, int] | Mapping[TableBucket, int]
"""Offsets by bucket number, or by bucket."""
Start = Position | Offsets
"""Where a scan of a log begins."""
Stop = Position | Offsets | None
"""Where a scan of a log ends; None follows the log."""
Source = Literal["live", "snapshot", "log", "union", "lake"]
"""The source of the rows of a scan; `AsyncTable.scan` describes them."""


@dataclass(frozen=True, slots=True, repr=False)
class AsyncScan(ABC):
    """What to read. Every scan returns its rows as Arrow batches, or all of them at once."""

    connection: ClusterConnection
    """The cluster of the table."""
    info: TableInfo
    """The table."""
    columns: tuple[str, ...] | None = None
    """The columns in the order of the result; None for all."""
    filter: Expression | None = None
    """Only rows that match."""
    limit: int | None = None
    """At most this many rows."""
    partitions: tuple[Partition, ...] | None = None
    """Only these partitions; None for all."""
    buckets: tuple[int, ...] | None = None
    """Only these buckets; None for all."""

    def check_limit(self) -> None:
        """Raise `InvalidScanRequestError` for a limit that is none."""
        limit_of(self.limit)

    def check_choice(self) -> None:
        """Raise `InvalidTableError` for buckets or partitions that the table cannot have."""
        if self.buckets is not None:
            check_buckets(self.buckets, self.info)
        if self.partitions is not None and not self.info.is_partitioned:
            raise InvalidTableError(f"table {self.info.path} is not partitioned")

    def options(self) -> dict[str, str]:
        """What was chosen, by name, for people; subclasses add theirs."""
        chosen = {
            "columns": None if self.columns is None else ", ".join(self.columns),
            "filter": None if self.filter is None else repr(self.filter),
            "limit": self.limit,
            "partitions": None if self.partitions is None else list(self.partitions),
            "buckets": None if self.buckets is None else list(self.buckets),
        }
        return {name: str(value) for name, value in chosen.items() if value is not None}

    def __repr__(self) -> str:
        options = "".join(f", {name} {text}" for name, text in self.options().items())
        return f"<{type(self).__name__} {self.info.path}{options}>"

    def _repr_html_(self) -> str:
        title = f"Scan of {self.info.path}, which is read when it is used"
        fields = [(field.name, str(field.type)) for field in self.schema]
        chosen = html_table(("option", "value"), self.options().items(), title)
        return chosen + html_table(("column", "Arrow type"), fields)

    @property
    @abstractmethod
    def follows(self) -> bool:
        """Whether the scan follows the log and never ends."""

    @property
    @abstractmethod
    def schema(self) -> pa.Schema:
        """The Arrow schema of the rows."""

    @abstractmethod
    async def open(self) -> AsyncScanner:
        """Start a run that can be polled and has positions."""

    async def __aiter__(self) -> AsyncIterator[pa.RecordBatch]:
        async with await self.open() as scanner:
            async for batch in scanner:
                yield batch

    async def to_arrow(self) -> pa.Table:
        """Return all rows as an Arrow table; the scan must end, or have a limit."""
        if self.follows and self.limit is None:
            raise ValueError("a scan that follows never ends; give stop or limit")
        batches = [batch async for batch in self]
        return pa.Table.from_batches(batches, schema=self.schema)

    async def to_pandas(self) -> pd.DataFrame:
        """Return all rows as a pandas frame."""
        return (await self.to_arrow()).to_pandas()

    async def to_polars(self) -> pl.DataFrame:
        """Return all rows as a polars frame."""
        return polars_frame(await self.to_arrow())

    async def to_duckdb(
        self, connection: duckdb.DuckDBPyConnection | None = None
    ) -> duckdb.DuckDBPyRelation:
        """Return all rows as a DuckDB relation, in `connection` or in a new database."""
        return duckdb_relation(await self.to_arrow(), connection)


class AsyncBatches(ABC):
    """Arrow batches to iterate over and to close."""

    schema: pa.Schema
    """The Arrow schema of the rows."""

    def at_hand(self) -> pa.RecordBatch | None:
        """Return the next rows if they need no waiting, else None.

        Any thread may call this, but not during another call of the same run.
        """
        return None

    @abstractmethod
    async def next_batch(self) -> pa.RecordBatch | None:
        """Return the next rows; None at the end. May be cancelled and called again."""

    @abstractmethod
    async def close(self) -> None:
        """Stop reading. Closing twice is no error."""

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> pa.RecordBatch:
        batch = await self.next_batch()
        if batch is None:
            raise StopAsyncIteration
        return batch

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self.close()


class AsyncScanner(AsyncBatches):
    """A run of a scan: iterate it, or `poll` it; `positions` says where it is."""

    @property
    @abstractmethod
    def finished(self) -> bool:
        """True when all rows of a bounded scan were handed out."""

    @abstractmethod
    def positions(self) -> dict[TableBucket, int]:
        """Return the next offset of each bucket: a `start` to continue from."""

    async def poll(self, timeout_ms: int = 1_000) -> pa.RecordBatch | None:
        """Return the next rows; None if none arrive in time, or the scan is finished."""
        try:
            async with asyncio.timeout(timeout_ms / 1000):
                return await self.next_batch()
        except TimeoutError:
            return None


def polars_frame(table: pa.Table) -> pl.DataFrame:
    """Convert an Arrow table to a polars frame."""
    import polars

    frame = polars.from_arrow(table)
    assert isinstance(frame, polars.DataFrame)
    return frame


def duckdb_relation(
    table: pa.Table, connection: duckdb.DuckDBPyConnection | None
) -> duckdb.DuckDBPyRelation:
    """Convert an Arrow table to a DuckDB relation."""
    import duckdb

    return (connection or duckdb.connect()).from_arrow(table)
