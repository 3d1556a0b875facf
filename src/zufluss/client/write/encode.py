"""Encodes Arrow batches as log batches, in the threads of a writer.

One call turns the rows of one bucket into the bytes that are sent. The chunks are joined,
serialised as an Arrow message without schema, compressed as the table says, given statistics if the
table has them, and wrapped in a batch header with writer id, sequence and CRC. Arrow releases the
GIL in the costly part, so several encoders run beside each other and beside the sending.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import pyarrow as pa

from zufluss.config import table_options as t
from zufluss.errors import RecordTooLargeError
from zufluss.model.table import TableInfo
from zufluss.record.arrow.serialize import ArrowSerializer
from zufluss.record.batch.stats import build_statistics, parse_statistics_columns
from zufluss.record.header import HEADER_SIZES, write_header

BATCH_BYTES_MAX: Final = 64 * 1024 * 1024
"""Larger batches are refused; a server takes requests up to 100 MiB."""


class EncodedBatch:
    """A log batch ready to send; writer id and sequence can be changed."""

    __slots__ = ("_magic", "_rows", "_schema_id", "_stamped", "_statistics_bytes", "view")

    def __init__(
        self, view: memoryview, schema_id: int, rows: int, magic: int, statistics_bytes: int
    ) -> None:
        self.view = view
        """The bytes of the whole batch."""
        self._schema_id = schema_id
        self._rows = rows
        self._magic = magic
        self._statistics_bytes = statistics_bytes
        self._stamped: tuple[int, int] | None = None

    def __len__(self) -> int:
        return len(self.view)

    def stamp(self, writer_id: int, sequence: int) -> None:
        """Write the header with this writer id and sequence, if they differ."""
        if self._stamped == (writer_id, sequence):
            return
        write_header(
            self.view,
            self._schema_id,
            self._rows,
            magic=self._magic,
            writer_id=writer_id,
            sequence=sequence,
            statistics_length=self._statistics_bytes,
        )
        self._stamped = (writer_id, sequence)


class BatchEncoder:
    """Encodes log batches of one table. Threads may share it."""

    def __init__(self, info: TableInfo) -> None:
        self._path = info.path
        self._schema = info.schema
        self._schema_id = info.schema_id
        self._log_format = info.log_format
        columns = info.property(t.TABLE_STATISTICS_COLUMNS)
        self._statistics = parse_statistics_columns(columns, info.schema)
        self._arrow = ArrowSerializer(info)

    def encode(
        self, chunks: Sequence[pa.RecordBatch], writer_id: int, sequence: int
    ) -> EncodedBatch:
        """Encode the rows of all chunks, in order, as one log batch."""
        rows = join(chunks)
        statistics = build_statistics(rows, self._schema, self._statistics)
        magic = 1 if statistics else 0
        before = HEADER_SIZES[magic] + len(statistics)
        serialize = self._serialize if self._log_format == "ARROW" else self._serialize_rows
        view = serialize(rows, before)
        view[HEADER_SIZES[magic] : before] = statistics
        encoded = EncodedBatch(view, self._schema_id, rows.num_rows, magic, len(statistics))
        encoded.stamp(writer_id, sequence)
        return encoded

    def _serialize_rows(self, rows: pa.RecordBatch, before: int) -> memoryview:
        """Serialise INDEXED or COMPACTED records behind `before` free bytes."""
        from zufluss.record.batch.row_body import encode_body  # loads the compiled kernels

        body = encode_body(rows, self._schema, self._log_format)
        return memoryview(bytearray(before) + body)

    def _serialize(self, rows: pa.RecordBatch, before: int) -> memoryview:
        """Serialise an Arrow message behind `before` free bytes."""
        size = pa.ipc.get_record_batch_size(rows)
        if size > BATCH_BYTES_MAX:
            raise RecordTooLargeError(
                f"{rows.num_rows} rows for table {self._path} take {size} bytes; one batch holds "
                f"at most {BATCH_BYTES_MAX}. Lower client.writer.batch-size or write smaller rows"
            )
        return self._arrow.serialize(rows, before)


def join(chunks: Sequence[pa.RecordBatch]) -> pa.RecordBatch:
    """Join batches into one."""
    if len(chunks) == 1:
        return chunks[0]
    return pa.Table.from_batches(chunks).combine_chunks().to_batches()[0]
