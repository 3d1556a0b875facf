"""Writes Arrow rows as the body of a log batch, with room for the header in front of it.

Arrow writes a stream: first the schema, then the batch. The schema is not sent, so header,
statistics and change types take its place, and the message need not be copied:

    Arrow writes   [ room ][ schema message           ][ record batch message      ]
    we send                    [ header ][ statistics or change types ][ message   ]

`arrow/compress.py` writes compressed messages.
"""

from __future__ import annotations

import numpy as np
import pyarrow as pa

from zufluss.config import table_options as t
from zufluss.model.table import TableInfo
from zufluss.record.arrow.compress import CompressedMessages
from zufluss.record.arrow.message import LZ4_FRAME, ZSTD

_CODECS = {"LZ4_FRAME": LZ4_FRAME, "ZSTD": ZSTD}


class ArrowSerializer:
    """Serialises the rows of one table; safe to use from several threads."""

    def __init__(self, info: TableInfo) -> None:
        schema = info.schema.arrow
        codec = _CODECS.get(info.property(t.TABLE_LOG_ARROW_COMPRESSION_TYPE))
        level = info.property(t.TABLE_LOG_ARROW_COMPRESSION_ZSTD_LEVEL)
        self._compressed = None if codec is None else CompressedMessages(schema, codec, level)
        self._options = pa.ipc.IpcWriteOptions(use_threads=False)
        self._schema_bytes = schema.serialize().size

    def serialize(self, rows: pa.RecordBatch, before: int) -> memoryview:
        """Return the Arrow message of the rows, with `before` free bytes in front of it."""
        if self._compressed is not None:
            return self._compressed.write(rows, before)
        room = max(0, before - self._schema_bytes)
        total = room + self._schema_bytes + pa.ipc.get_record_batch_size(rows)
        memory = np.empty(total, dtype=np.uint8)
        sink = pa.FixedSizeBufferWriter(pa.py_buffer(memory[room:]))
        with sink:
            writer = pa.ipc.new_stream(sink, rows.schema, options=self._options)
            writer.write_batch(rows)
        return memory.data[room + self._schema_bytes - before :]
