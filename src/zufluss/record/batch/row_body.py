"""Checks log bodies made of rows, before they are appended to an INDEXED or COMPACTED table.

`rows/formats.py` has the layout of a body, and its `check_body` is the plain-Python twin. One
kernel finds the records, another checks all rows.
"""

from __future__ import annotations

import numpy as np

from zufluss.errors import CorruptRecordError
from zufluss.record.kernels import row_body as k
from zufluss.record.rows.codec import RowCodec
from zufluss.record.slices import Bytes, Slices

_RECORD_MIN = 5
_FAULTS = {
    k.RECORD_CUT: "record {0} of {count}: its length is {1}, the body ends before or within it",
    k.CHANGE_TYPE: "record {0} of {count}: change type {1} is unknown, 0 to 4 are allowed",
    k.LEFT_OVER: "{1} bytes are left over after the {count} records of the body",
}


def check_body(buf: Bytes, start: int, end: int, count: int, codec: RowCodec) -> None:
    """Raise `CorruptRecordError` unless `buf[start:end]` is exactly `count` valid records."""
    if not 0 <= start <= end <= len(buf):
        raise CorruptRecordError(f"bytes {start} to {end} leave the buffer of {len(buf)} bytes")
    most = (end - start) // _RECORD_MIN
    if not 0 <= count <= most:
        raise CorruptRecordError(f"{count} records are claimed, the body has room for {most}")
    table = np.empty((2, count), np.int64)
    fault, record, detail = k.read_body(buf, start, end, table)
    if fault:
        raise CorruptRecordError(_FAULTS[fault].format(record, detail, count=count))
    codec.locate(Slices(buf, table[0], table[1]))
