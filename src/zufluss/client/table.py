"""One table: where writers and scans begin."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from zufluss.client.admin import Partition
from zufluss.client.append import AsyncAppendWriter
from zufluss.client.connection import AsyncConnection
from zufluss.client.logscan import AsyncLogScan, Start, Stop
from zufluss.model.expression import Expression
from zufluss.model.schema import Schema
from zufluss.model.table import TableInfo, TablePath


class AsyncTable:
    """A table as it was when it was opened; open it again to see later changes of its schema."""

    def __init__(self, connection: AsyncConnection, info: TableInfo) -> None:
        self._connection = connection
        self.info = info
        """Ids, schema, keys, buckets, properties."""

    @property
    def path(self) -> TablePath:
        """Its name."""
        return self.info.path

    @property
    def schema(self) -> Schema:
        """Its columns; `schema.arrow` is the Arrow schema."""
        return self.info.schema

    def append(self) -> AsyncAppendWriter:
        """A writer that appends to a log table.

        >>> async with table.append() as writer:  # doctest: +SKIP
        ...     await writer.write({"id": [1, 2], "name": ["a", "b"]})
        """
        return AsyncAppendWriter(self._connection, self.info)

    def scan(
        self,
        columns: Sequence[str] | None = None,
        filter: Expression | None = None,
        *,
        start: Start = "earliest",
        stop: Stop = "latest",
        limit: int | None = None,
        partitions: Iterable[Partition] | None = None,
        buckets: Iterable[int] | None = None,
        with_offsets: bool = False,
    ) -> AsyncLogScan:
        """What to read of a log table; nothing is read until the scan is used.

        `columns` and `filter` are pushed to the server, and the filter is applied exactly here.
        `stop=None` follows the log. `with_offsets` adds `__offset`, `__timestamp`, `__bucket`.

        >>> await table.scan(["id"], col("id") > 5).to_arrow()  # doctest: +SKIP
        """
        return AsyncLogScan(
            self._connection,
            self.info,
            None if columns is None else tuple(columns),
            filter,
            start,
            stop,
            limit,
            None if partitions is None else tuple(partitions),
            None if buckets is None else tuple(buckets),
            with_offsets,
        )

    def __repr__(self) -> str:
        return (
            f"<AsyncTable {self.path}, id {self.info.table_id}, {self.info.bucket_count} buckets>"
        )
