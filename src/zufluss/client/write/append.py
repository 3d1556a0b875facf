"""The writer of log tables; `write/writer.py` does everything but the encoding."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from zufluss.client.core.cluster import ClusterConnection
from zufluss.client.write.encode import BatchEncoder
from zufluss.client.write.rows import RowChunk
from zufluss.client.write.sender import SendableBatch, WriteCall
from zufluss.client.write.writer import BatchWriter, Identity
from zufluss.errors import InvalidTableError
from zufluss.model.table import TableInfo
from zufluss.wire import messages as m
from zufluss.wire.api import ApiKey
from zufluss.wire.hot.produce import produce_request

_PRODUCE: Final = WriteCall(ApiKey.PRODUCE_LOG, m.ProduceLogResponse, produce_request)


class AsyncAppendWriter(BatchWriter):
    """Appends rows to a log table; `table.append()` makes it.

    >>> async with table.append() as writer:  # doctest: +SKIP
    ...     await writer.write({"id": [1, 2], "name": ["a", "b"]})
    ...     await writer.flush()
    """

    def __init__(
        self, connection: ClusterConnection, info: TableInfo, identity: Identity | None = None
    ) -> None:
        if info.has_primary_key:
            raise InvalidTableError(
                f"table {info.path} has a primary key; rows are upserted into it, not appended: "
                "use table.upsert()"
            )
        super().__init__(connection, info, _PRODUCE, identity)
        self._encoder = BatchEncoder(info)

    def columns_of(self, *, delete: bool) -> None:
        """None: every column is written."""

    def encode(self, chunks: Sequence[RowChunk], writer_id: int, sequence: int) -> SendableBatch:
        """Encode the rows of the chunks as one log batch."""
        return self._encoder.encode([chunk.rows for chunk in chunks], writer_id, sequence)
