"""Reads and writes batches of keys and rows, and batches of values.

| KV record | size | value record | size |
|---|---|---|---|
| bytes that follow | i32 | bytes that follow | i32 |
| length of the key | varint | schema id | i16 |
| key | | row | |
| row, nothing for a delete | | | |

`zufluss.record.batch.kv` has the headers and the plain-Python twin. Every position is compared with
the end of the batch before it is read. A fault is a number above zero; `FAULTS` has its message.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from zufluss.record.kernels import types
from zufluss.record.kernels.cache import kernel
from zufluss.record.kernels.memory import (
    BYTES,
    copy,
    load_i16,
    load_i32,
    store_i32,
)
from zufluss.record.kernels.raw import address_of
from zufluss.record.kernels.varint import CUT, put_varint, read_varint, varint_size

RECORD_CUT, KEY_LENGTH, KEY_EMPTY, KEY_CUT, LEFT_OVER, OUTSIDE, VALUE_SHORT = range(1, 8)
FAULTS = {
    RECORD_CUT: "record {0} has {1} bytes, more or fewer than the batch has room for",
    KEY_LENGTH: "the key length of record {0} is not a number of 32 bits",
    KEY_EMPTY: "the key of record {0} is empty",
    KEY_CUT: "the key of record {0} has {1} bytes and runs past the record",
    LEFT_OVER: "{1} bytes are left over after record {0}, the last",
    OUTSIDE: "the value of record {0} does not lie within its {1} bytes",
    VALUE_SHORT: "record {0} has {1} bytes, too few for a schema id",
}
"""Messages of faults; {0} is the record, {1} the detail."""

_I64 = types.Array(types.int64, 1, "C", readonly=True)
_I16 = types.Array(types.int16, 1, "C")
_TABLE = types.Array(types.int64, 2, "C")
_OUT = types.Array(types.uint8, 1, "C")
_RESULT = types.UniTuple(types.int64, 3)


@kernel(_RESULT(BYTES, types.int64, types.int64, _TABLE), short=True)
def read_records(data: Any, pos: Any, end: Any, table: Any) -> Any:
    """Find keys and rows of as many records as `table` has columns.

    Lines 0 and 1 get starts and ends of keys, lines 2 and 3 those of rows (start −1: a delete).
    Returns fault, record, detail. The caller has compared `pos` and `end` with the data.
    """
    zero, count, of = np.int64(0), table.shape[1], address_of(data)
    for record in range(count):
        left = end - pos - 4
        size = load_i32(data, pos) if left >= 0 else np.int64(0)
        if size < 1 or size > left:
            return np.int64(RECORD_CUT), np.int64(record), size
        last = pos + 4 + size
        length, key = read_varint(of, pos + 4, last, 32)
        if key < 0:
            return np.int64(KEY_CUT if key == CUT else KEY_LENGTH), np.int64(record), size
        if length == 0:
            return np.int64(KEY_EMPTY), np.int64(record), zero
        if length > last - key:
            return np.int64(KEY_CUT), np.int64(record), length
        row = key + length
        table[0, record], table[1, record] = key, row
        table[2, record], table[3, record] = row if row < last else -1, last
        pos = last
    if pos != end:
        return np.int64(LEFT_OVER), np.int64(count - 1), end - pos
    return zero, zero, zero


@kernel()
def _outside(size: Any, start: Any, end: Any) -> Any:
    """Whether [start, end) leaves an array of `size` bytes."""
    return start < 0 or end < start or end > size


@kernel(_RESULT(BYTES, _I64, _I64, BYTES, _I64, _I64))
def records_size(
    keys: Any, key_starts: Any, key_ends: Any, rows: Any, row_starts: Any, row_ends: Any
) -> Any:
    """Measure the records of keys and rows; returns fault, record, and their bytes or a detail."""
    total, zero = np.int64(0), np.int64(0)
    for record in range(len(key_starts)):
        if _outside(len(keys), key_starts[record], key_ends[record]):
            return np.int64(OUTSIDE), np.int64(record), np.int64(len(keys))
        size = key_ends[record] - key_starts[record]
        if size == 0:
            return np.int64(KEY_EMPTY), np.int64(record), zero
        total += 4 + varint_size(size) + size
        if row_starts[record] != -1:
            if _outside(len(rows), row_starts[record], row_ends[record]):
                return np.int64(OUTSIDE), np.int64(record), np.int64(len(rows))
            total += row_ends[record] - row_starts[record]
    return zero, zero, total


@kernel(types.void(BYTES, _I64, _I64, BYTES, _I64, _I64, _OUT, types.int64))
def put_records(
    keys: Any,
    key_starts: Any,
    key_ends: Any,
    rows: Any,
    row_starts: Any,
    row_ends: Any,
    out: Any,
    pos: Any,
) -> Any:
    """Write records that `records_size` measured to `out` from `pos` on."""
    to = address_of(out)
    for record in range(len(key_starts)):
        start = pos + 4
        size = key_ends[record] - key_starts[record]
        at = put_varint(size, to, start)
        copy(out, at, keys, key_starts[record], size)
        at += size
        if row_starts[record] != -1:
            copy(out, at, rows, row_starts[record], row_ends[record] - row_starts[record])
            at += row_ends[record] - row_starts[record]
        store_i32(out, pos, at - start)
        pos = at


@kernel(_RESULT(BYTES, types.int64, types.int64, _TABLE))
def read_values(data: Any, pos: Any, end: Any, table: Any) -> Any:
    """Find the values of a value batch, starts in line 0, ends in line 1 of `table`.

    Returns fault, record, detail.
    """
    zero, count = np.int64(0), table.shape[1]
    for record in range(count):
        left = end - pos - 4
        size = load_i32(data, pos) if left >= 0 else np.int64(0)
        if size < 2 or size > left:
            return np.int64(RECORD_CUT), np.int64(record), size
        table[0, record], table[1, record] = pos + 4, pos + 4 + size
        pos += 4 + size
    if pos != end:
        return np.int64(LEFT_OVER), np.int64(count - 1), end - pos
    return zero, zero, zero


@kernel(_RESULT(BYTES, _I64, _I64))
def values_size(data: Any, starts: Any, ends: Any) -> Any:
    """Measure the records of values, absent ones aside; returns fault, record, bytes or detail."""
    total, zero = np.int64(0), np.int64(0)
    for record in range(len(starts)):
        if starts[record] == -1:
            continue
        if _outside(len(data), starts[record], ends[record]):
            return np.int64(OUTSIDE), np.int64(record), np.int64(len(data))
        if ends[record] - starts[record] < 2:
            return np.int64(VALUE_SHORT), np.int64(record), ends[record] - starts[record]
        total += 4 + ends[record] - starts[record]
    return zero, zero, total


@kernel(types.int64(BYTES, _I64, _I64, _OUT, types.int64))
def put_values(data: Any, starts: Any, ends: Any, out: Any, pos: Any) -> Any:
    """Write values that `values_size` measured from `pos` on; returns how many are not absent."""
    count = np.int64(0)
    for record in range(len(starts)):
        if starts[record] != -1:
            size = ends[record] - starts[record]
            store_i32(out, pos, size)
            copy(out, pos + 4, data, starts[record], size)
            pos += 4 + size
            count += 1
    return count


@kernel(types.void(BYTES, _I64, _I64, _I16, types.Array(types.int64, 1, "C")))
def split_values(data: Any, starts: Any, ends: Any, schema_ids: Any, rows: Any) -> Any:
    """Split values that `values_size` measured into schema ids and starts of rows; −1 = absent."""
    for record in range(len(starts)):
        schema_ids[record], rows[record] = -1, -1
        if starts[record] != -1:
            schema_ids[record] = load_i16(data, starts[record])
            rows[record] = starts[record] + 2
