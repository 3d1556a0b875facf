"""The interface of the sources of a primary-key scan: rows of buckets, in pages."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import pyarrow as pa

from zufluss.client.core.offsets import BucketPlace
from zufluss.client.read.decode import LogDecoder
from zufluss.model.expression import Expression
from zufluss.model.table import TableBucket, TableInfo
from zufluss.wire.predicates import predicate_to_proto


class RowPage(NamedTuple):
    """A page of rows of one bucket."""

    rows: pa.RecordBatch
    """The rows in the scan's schema; may be empty."""
    done: bool
    """True for the last page."""
    last_key: bytes | None = None
    """The page ends behind this key; None if the source does not say."""


class KvScanShape:
    """The columns and the filter of a scan, for the request and for its result."""

    def __init__(
        self, info: TableInfo, columns: Sequence[str] | None, filter: Expression | None
    ) -> None:
        decoder = LogDecoder(info, columns, filter)
        self.schema: pa.Schema = decoder.schema
        """The Arrow schema of the rows."""
        self.projection = [] if decoder.reads_all else decoder.projection
        """Positions of the columns to read, ascending; empty for all."""
        self.read = pa.schema([info.schema.arrow.field(i) for i in decoder.projection])
        """The Arrow schema of the columns to read."""
        self.predicate: bytes | None = None
        """The filter for the server; None without a filter."""
        self._filter = None
        if filter is not None:
            self._filter = filter.to_arrow(info.schema)
            predicate = predicate_to_proto(filter.resolve(info.schema), info.schema)
            self.predicate = predicate.SerializeToString()

    def finish(self, rows: pa.RecordBatch) -> pa.RecordBatch:
        """Apply the filter and select the scan's columns."""
        if self._filter is not None and rows.num_rows:
            matching = pa.Table.from_batches([rows]).filter(self._filter).combine_chunks()
            rows = next(iter(matching.to_batches()), rows.slice(0, 0))
        return rows if rows.schema.names == self.schema.names else rows.select(self.schema.names)


class BucketRows(ABC):
    """The rows of one bucket, page by page."""

    @abstractmethod
    async def next_page(self, limit: int | None) -> RowPage:
        """Read the next page; a limit is the most rows that the scan still needs."""

    @abstractmethod
    async def close(self) -> None:
        """Release what belongs to this bucket alone. Closing twice is no error."""


class RowSource(ABC):
    """The source of the rows of one run."""

    def __init__(self) -> None:
        self.offsets: dict[TableBucket, int] = {}
        """Where the changelog of each opened bucket continues."""

    @abstractmethod
    async def open(
        self, places: Sequence[BucketPlace], at: Mapping[TableBucket, int] | None
    ) -> list[TableBucket]:
        """Open the states of buckets, or of the first ones; returns all, in reading order."""

    @abstractmethod
    def bucket(self, bucket: TableBucket) -> BucketRows:
        """The rows of a bucket; its state is opened by the first page, if it is not open yet."""

    @abstractmethod
    async def close(self) -> None:
        """Release all states. Closing twice is no error."""
