"""What the sources of scans of primary-key tables have in common: rows of buckets, in pages."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import NamedTuple

import pyarrow as pa

from zufluss.client.core.offsets import BucketPlace
from zufluss.client.read.decode import LogDecoder
from zufluss.client.read.scan import Offsets
from zufluss.model.expression import Expression
from zufluss.model.table import TableBucket, TableInfo
from zufluss.wire.predicates import predicate_to_proto


class RowPage(NamedTuple):
    """Some rows of a bucket."""

    rows: pa.RecordBatch
    """In the scan's schema; there may be none."""
    done: bool
    """There are no more behind them."""


class KvScanShape:
    """What a scan asks for, and how it is handed out."""

    def __init__(
        self, info: TableInfo, columns: Sequence[str] | None, filter: Expression | None
    ) -> None:
        decoder = LogDecoder(info, columns, filter)
        self.schema: pa.Schema = decoder.schema
        """The Arrow schema of the rows."""
        self.projection = [] if decoder.reads_all else decoder.projection
        """Positions of the columns to read, ascending; none: all."""
        self.read = pa.schema([info.schema.arrow.field(i) for i in decoder.projection])
        """The Arrow schema of what is read."""
        self.predicate: bytes | None = None
        """The filter as the server leaves rows out by it."""
        self._filter = None
        if filter is not None:
            self._filter = filter.to_arrow(info.schema)
            predicate = predicate_to_proto(filter.resolve(info.schema), info.schema)
            self.predicate = predicate.SerializeToString()

    def finish(self, rows: pa.RecordBatch) -> pa.RecordBatch:
        """Rows as they were read, as they are handed out."""
        if self._filter is not None and rows.num_rows:
            found = pa.Table.from_batches([rows]).filter(self._filter).combine_chunks()
            rows = next(iter(found.to_batches()), rows.slice(0, 0))
        return rows if rows.schema.names == self.schema.names else rows.select(self.schema.names)


class BucketRows(ABC):
    """The rows of one bucket, page by page."""

    @abstractmethod
    async def next_page(self, limit: int | None) -> RowPage:
        """The next rows; with a limit at most so many, and none are read ahead."""

    @abstractmethod
    async def close(self) -> None:
        """Let go of what belongs to this bucket alone. Closing twice is fine."""


class RowSource(ABC):
    """The rows of the buckets of a run."""

    @abstractmethod
    async def open(
        self, places: Sequence[BucketPlace], at: Offsets | None
    ) -> dict[TableBucket, int]:
        """Fix what is read; the buckets that are, and where the changelog goes on behind each."""

    @abstractmethod
    def bucket(self, bucket: TableBucket) -> BucketRows:
        """The rows of a bucket that was opened."""

    @abstractmethod
    async def close(self) -> None:
        """Let go of everything. Closing twice is fine."""
