"""The changelog batch of one put: the changed rows, as the log stores and clients fetch them.

One put batch makes one log batch with its writer id and sequence, under the table's current schema,
with a change type per row. A put that changed nothing makes a batch without records, which takes
one offset: the log must contain the writer's sequence in any case.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from zufluss.config import table_options as t
from zufluss.model.table import TableInfo
from zufluss.record.arrow.serialize import ArrowSerializer
from zufluss.record.arrow.zstd import ZstdMessages
from zufluss.record.batch.check import CheckedBatch
from zufluss.record.batch.row_body import encode_body
from zufluss.record.header import HEADER_SIZES, write_header
from zufluss.record.rows.codec import LocatedRows, RowCodec

MAGIC = 0
"""Header version of changelog batches, which every client reads."""


class Changes(NamedTuple):
    """The changes of one put, not yet encoded."""

    encoder: ChangelogEncoder
    """Encodes the changes."""
    rows: pa.RecordBatch | LocatedRows
    """The rows, as `ChangelogEncoder.rows` returned them."""
    kinds: npt.NDArray[np.uint8]
    """Their change types."""
    writer_id: int
    """Writer id of the put, −1 for none."""
    sequence: int
    """Batch sequence of the put, −1 for none."""

    @property
    def offsets(self) -> int:
        """How many log offsets the batch takes."""
        return max(len(self.kinds), 1)

    def encode(self) -> ChangelogBatch:
        """Return the batch. Most of the work is compression; any thread may call this."""
        return self.encoder.encode(self.rows, self.kinds, self.writer_id, self.sequence)


class ChangelogBatch(NamedTuple):
    """A log batch that is ready to be appended."""

    view: memoryview
    """The bytes, writable: the log fills in offset and time."""
    checked: CheckedBatch
    """The header fields that the log asks for."""


class ChangelogEncoder:
    """Encodes the changelog batches of one table."""

    def __init__(self, info: TableInfo, codec: RowCodec) -> None:
        """`codec` is the codec of the table's stored rows."""
        self._schema_id = info.schema_id
        self._schema = info.schema
        self._log_format = info.log_format
        self._arrow = ArrowSerializer(info)
        self._codec = codec
        self._zstd = _zstd_messages(info)

    def rows(self, located: LocatedRows) -> pa.RecordBatch | LocatedRows:
        """Return checked rows as `encode` takes them.

        Raises `CorruptRecordError` if Arrow cannot hold a row.
        """
        if self._zstd is None or self._codec.buffers is None:
            return self._codec.columns(located)
        self._codec.buffers.check(located)
        return located

    def encode(
        self,
        rows: pa.RecordBatch | LocatedRows,
        kinds: npt.NDArray[np.uint8],
        writer_id: int,
        sequence: int,
    ) -> ChangelogBatch:
        """Return the batch of these rows and change types."""
        count = len(kinds)
        view = self._body(rows, kinds)
        write_header(
            view,
            self._schema_id,
            count,
            magic=MAGIC,
            writer_id=writer_id,
            sequence=sequence,
            append_only=False,
        )
        delta = max(count - 1, 0)
        checked = CheckedBatch(
            0, len(view), MAGIC, self._schema_id, count, delta, writer_id, sequence
        )
        return ChangelogBatch(view, checked)

    def _body(self, rows: pa.RecordBatch | LocatedRows, kinds: npt.NDArray[np.uint8]) -> memoryview:
        """Return the records, with room for the header in front."""
        header = HEADER_SIZES[MAGIC]
        if not len(kinds):
            return memoryview(bytearray(header))
        if isinstance(rows, LocatedRows):
            assert self._zstd is not None
            assert self._codec.buffers is not None
            view = self._zstd.write(self._codec.buffers.of(rows), header + len(kinds))
        elif self._log_format != "ARROW":
            body = encode_body(rows, self._schema, self._log_format, kinds)
            return memoryview(bytearray(header) + body)
        elif self._zstd is not None:
            view = self._zstd.write(self._zstd.of(rows), header + len(kinds))
        else:
            view = self._arrow.serialize(rows, header + len(kinds))
        view[header : header + len(kinds)] = kinds.data
        return view


def _zstd_messages(info: TableInfo) -> ZstdMessages | None:
    """Return the writer of Arrow logs compressed with Zstandard, None for other logs."""
    kind = info.property(t.TABLE_LOG_ARROW_COMPRESSION_TYPE)
    if info.log_format != "ARROW" or kind != "ZSTD":
        return None
    level = info.property(t.TABLE_LOG_ARROW_COMPRESSION_ZSTD_LEVEL)
    return ZstdMessages(info.schema.arrow, level)
