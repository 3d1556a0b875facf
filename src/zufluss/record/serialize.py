"""Arrow rows into the body of a log batch, with room for what stands before it.

Arrow writes a stream: first the schema, then the batch. The schema does not travel, so its place
is used for what stands before the message on the wire, and nothing is copied afterwards:

    Arrow writes   [ room ][ schema message           ][ record batch message      ]
    we send                    [ header ][ statistics or change types ][ message   ]

Arrow releases the GIL in the costly part, the compression.
"""

from __future__ import annotations

from typing import Final

import numpy as np
import pyarrow as pa

from zufluss.config import table_options as t
from zufluss.model.table import TableInfo

BUFFER_SLACK_BYTES: Final = 192
"""What compression and padding may add to one Arrow buffer that does not compress."""


class ArrowSerializer:
    """Serialises the rows of one table; safe to use from several threads."""

    def __init__(self, info: TableInfo) -> None:
        self._options = pa.ipc.IpcWriteOptions(compression=_codec(info), use_threads=False)
        schema = info.schema.arrow
        self._schema_bytes = schema.serialize().size
        self._slack = BUFFER_SLACK_BYTES * (1 + 3 * sum(_nodes(field.type) for field in schema))

    def serialize(self, rows: pa.RecordBatch, before: int) -> memoryview:
        """The Arrow message of the rows, with `before` bytes left free in front of it."""
        room = max(0, before - self._schema_bytes)
        size = pa.ipc.get_record_batch_size(rows)
        total = room + self._schema_bytes + size + size // 128 + self._slack
        memory = np.empty(total, dtype=np.uint8)
        sink = pa.FixedSizeBufferWriter(pa.py_buffer(memory[room:]))
        with sink:
            writer = pa.ipc.new_stream(sink, rows.schema, options=self._options)
            writer.write_batch(rows)
            end = room + sink.tell()
        return memory.data[room + self._schema_bytes - before : end]


def _codec(info: TableInfo) -> pa.Codec | None:
    kind = info.property(t.TABLE_LOG_ARROW_COMPRESSION_TYPE)
    if kind == "NONE":
        return None
    if kind == "LZ4_FRAME":
        return pa.Codec("lz4")
    return pa.Codec("zstd", info.property(t.TABLE_LOG_ARROW_COMPRESSION_ZSTD_LEVEL))


def _nodes(data_type: pa.DataType) -> int:
    """Fields of a type, itself included: each has at most three buffers."""
    return 1 + sum(
        _nodes(data_type.field(i).type)
        for i in range(data_type.num_fields if pa.types.is_nested(data_type) else 0)
    )
