"""Log bodies made of rows: those of INDEXED and COMPACTED tables.

| record of a body | bytes |
|---|---|
| length, bytes after it | i32 |
| attributes: the change type 0 +A, 1 +I, 2 -U, 3 +U, 4 -D | u8 |
| row, see `rows/codec.py` | length − 1 |

One kernel finds the records, others check and convert all rows. `tests/record/rows/plain_rows.py`
is the plain-Python twin.
"""

from __future__ import annotations

from functools import lru_cache
from typing import cast

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from zufluss.errors import CorruptRecordError
from zufluss.model.schema import Schema
from zufluss.record.header import Buffer
from zufluss.record.kernels import row_body as k
from zufluss.record.rows.codec import LocatedRows, RowCodec, RowFormat
from zufluss.record.slices import Bytes, Slices

_HEAD_BYTES = 5
_FAULTS = {
    k.RECORD_CUT: "record {0} of {count}: its length is {1}, the body ends before or within it",
    k.CHANGE_TYPE: "record {0} of {count}: change type {1} is unknown, 0 to 4 are allowed",
    k.LEFT_OVER: "{1} bytes are left over after the {count} records of the body",
}


def check_body(buf: Bytes, start: int, end: int, count: int, codec: RowCodec) -> LocatedRows:
    """Raise `CorruptRecordError` unless `buf[start:end]` is exactly `count` valid records."""
    if not 0 <= start <= end <= len(buf):
        raise CorruptRecordError(f"bytes {start} to {end} leave the buffer of {len(buf)} bytes")
    most = (end - start) // _HEAD_BYTES
    if not 0 <= count <= most:
        raise CorruptRecordError(f"{count} records are claimed, the body has room for {most}")
    table = np.empty((2, count), np.int64)
    fault, record, detail = k.read_body(buf, start, end, table)
    if fault:
        raise CorruptRecordError(_FAULTS[fault].format(record, detail, count=count))
    return codec.locate(Slices(buf, table[0], table[1]))


def decode_body(
    buf: Buffer, start: int, end: int, count: int, schema: Schema, log_format: str
) -> tuple[pa.RecordBatch, npt.NDArray[np.uint8]]:
    """Return the records of a body as an Arrow batch, and their change types."""
    codec = _codec(schema, log_format)
    located = check_body(np.frombuffer(buf, np.uint8), start, end, count, codec)
    return codec.columns(located), located.rows.data[located.rows.starts - 1]


def encode_body(
    batch: pa.RecordBatch,
    schema: Schema,
    log_format: str,
    change_types: npt.NDArray[np.uint8] | None = None,
) -> bytes:
    """Return the body of a batch; all records are appends unless `change_types` are given."""
    rows = _codec(schema, log_format).encode(batch)
    heads = np.zeros((rows.count, _HEAD_BYTES), np.uint8)
    heads[:, :4] = (rows.lengths + 1).astype("<i4").view(np.uint8).reshape(-1, 4)
    if change_types is not None:
        heads[:, 4] = change_types
    places = rows.starts + _HEAD_BYTES * np.arange(rows.count)
    at = places[:, None] + np.arange(_HEAD_BYTES)
    out = np.empty(len(rows.data) + heads.size, np.uint8)
    is_row = np.ones(len(out), np.bool_)
    is_row[at] = False
    out[at], out[is_row] = heads, rows.data
    return out.tobytes()


@lru_cache(maxsize=64)
def _codec(schema: Schema, log_format: str) -> RowCodec:
    return RowCodec(schema, cast(RowFormat, log_format))
