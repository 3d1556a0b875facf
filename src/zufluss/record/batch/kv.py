"""Batches of keys and rows (PUT_KV requests), and batches of values (answers of scans).

Everything is little-endian. A varint is unsigned LEB128.

| KV batch | bytes |
|---|---|
| length, bytes after it | i32 |
| magic, 0 | u8 |
| CRC-32C of everything after it | u32 |
| schema id | i16 |
| attributes, 0 | u8 |
| writer id, −1 = none | i64 |
| batch sequence, −1 = none | i32 |
| number of records | i32 |
| records | below |

| record | bytes |
|---|---|
| length, bytes after it | i32 |
| length of the key, at least 1 | varint |
| key | |
| row, nothing = delete | the rest |

| value batch | bytes |
|---|---|
| length, bytes after it | i32 |
| magic, 0 | u8 |
| number of records | i32 |
| each: length, bytes after it | i32 |
| each: value, which is a schema id i16 and a row | length |

Reading checks every length, the CRC and that the records fill the batch exactly; a batch is
accepted as a whole or refused with a `CorruptRecordError`. Keys and rows are not copied: they are
places in the buffer that was read.
"""

from __future__ import annotations

import struct
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
from crc32c import crc32c

from zufluss.errors import CorruptRecordError
from zufluss.record.kernels import kv_batch as k
from zufluss.record.slices import Bytes, Slices

HEADER = struct.Struct("<iBIhBqii")
"""The header of a KV batch."""
VALUE_HEADER = struct.Struct("<iBi")
"""The header of a value batch."""

_CRC_AT, _COVERED = 5, 9
_RECORD_MIN = 6
_VALUE_MIN = 6
_CRC = struct.Struct("<I")


class KvBatch(NamedTuple):
    """The keys and rows of one batch, as places in the buffer it was read from."""

    schema_id: int
    """Schema of the rows."""
    writer_id: int
    """Idempotent writer, −1 for none."""
    batch_sequence: int
    """Sequence within the writer, −1 for none."""
    count: int  # type: ignore[assignment]  # hides tuple.count, which is not used
    """Number of records."""
    keys: Slices
    """The keys, none of them empty."""
    rows: Slices
    """The rows; absent = delete the key."""
    end: int
    """Position after the batch in the buffer."""


def parse_kv_batches(data: Bytes, start: int, end: int) -> list[KvBatch]:
    """Return the batches that fill `data[start:end]` exactly; raises if there is none."""
    if not 0 <= start <= end <= len(data):
        raise CorruptRecordError(f"bytes {start} to {end} leave the buffer of {len(data)} bytes")
    batches: list[KvBatch] = []
    while start < end or not batches:
        batches.append(_parse(data, start, end, len(batches)))
        start = batches[-1].end
    return batches


def _parse(data: Any, start: int, end: int, index: int) -> KvBatch:
    where = f"KV batch {index} of the bucket entry"
    if end - start < HEADER.size:
        raise CorruptRecordError(
            f"{where}: {end - start} bytes are left, its header has {HEADER.size}"
        )
    fields = HEADER.unpack_from(data, start)
    size, magic, crc, schema_id, attributes, writer_id, sequence, count = fields
    if magic != 0:
        raise CorruptRecordError(f"{where}: magic {magic} is unknown, only 0 is allowed")
    last = start + 4 + size
    if not HEADER.size - 4 <= size <= end - start - 4:
        raise CorruptRecordError(
            f"{where}: its length is {size}, {HEADER.size - 4} to {end - start - 4} are possible"
        )
    computed = crc32c(data[start + _COVERED : last])
    if computed != crc:
        raise CorruptRecordError(f"{where}: its CRC is {crc:08x}, its content has {computed:08x}")
    if attributes != 0:
        raise CorruptRecordError(f"{where}: attributes {attributes} are unknown, 0 is allowed")
    most = (size + 4 - HEADER.size) // _RECORD_MIN
    if not 0 <= count <= most:
        raise CorruptRecordError(f"{where}: {count} records are claimed, there is room for {most}")
    table = np.empty((4, count), np.int64)
    fault, record, detail = k.read_records(data, start + HEADER.size, last, table)
    if fault:
        raise _refusal(where, fault, record, detail)
    keys, rows = Slices(data, table[0], table[1]), Slices(data, table[2], table[3])
    return KvBatch(schema_id, writer_id, sequence, count, keys, rows, last)


def _refusal(where: str, fault: int, record: int, detail: int) -> CorruptRecordError:
    return CorruptRecordError(f"{where}: {k.FAULTS[fault].format(record, detail)}")


def build_kv_batch(
    schema_id: int, keys: Slices, rows: Slices, writer_id: int = -1, sequence: int = -1
) -> bytearray:
    """Return the bytes of a batch; an absent row deletes its key."""
    if keys.count != rows.count:
        raise ValueError(f"{keys.count} keys do not belong to {rows.count} rows")
    fault, record, size = k.records_size(*keys, *rows)
    if fault:
        raise ValueError(k.FAULTS[fault].format(record, size))
    out = bytearray(HEADER.size + size)
    k.put_records(*keys, *rows, np.frombuffer(out, np.uint8), HEADER.size)
    head = (len(out) - 4, 0, 0, schema_id, 0, writer_id, sequence, keys.count)
    HEADER.pack_into(out, 0, *head)
    _CRC.pack_into(out, _CRC_AT, crc32c(memoryview(out)[_COVERED:]))
    return out


def build_value_batch(values: Slices) -> bytes:
    """Return the value batch of values (schema id and row); absent ones are left out."""
    records, count = value_records(values)
    return value_header(len(records), count) + records


def value_records(values: Slices) -> tuple[memoryview, int]:
    """Return the records of a value batch without its header, and their number."""
    fault, record, size = k.values_size(*values)
    if fault:
        raise ValueError(k.FAULTS[fault].format(record, size))
    out = np.empty(size, np.uint8)
    count = k.put_values(*values, out, 0)
    return out.data, count


def value_header(size: int, count: int) -> bytes:
    """Return the header of a value batch whose records take `size` bytes."""
    return VALUE_HEADER.pack(VALUE_HEADER.size - 4 + size, 0, count)


def parse_value_batch(data: Bytes | bytes | memoryview) -> Slices:
    """Return the values (schema id and row) of a value batch; empty bytes are no values."""
    buf: Any = np.frombuffer(data, np.uint8)
    where = "value batch"
    if len(buf) == 0:
        return Slices(buf, np.empty(0, np.int64), np.empty(0, np.int64))
    if len(buf) < VALUE_HEADER.size:
        raise CorruptRecordError(f"{where}: {len(buf)} bytes, its header has {VALUE_HEADER.size}")
    size, magic, count = VALUE_HEADER.unpack_from(buf, 0)
    if magic != 0:
        raise CorruptRecordError(f"{where}: magic {magic} is unknown, only 0 is allowed")
    if size != len(buf) - 4:
        raise CorruptRecordError(f"{where}: its length is {size}, {len(buf) - 4} bytes follow")
    most = (len(buf) - VALUE_HEADER.size) // _VALUE_MIN
    if not 0 <= count <= most:
        raise CorruptRecordError(f"{where}: {count} records are claimed, there is room for {most}")
    table = np.empty((2, count), np.int64)
    fault, record, detail = k.read_values(buf, VALUE_HEADER.size, len(buf), table)
    if fault:
        raise _refusal(where, fault, record, detail)
    return Slices(buf, table[0], table[1])


def split_values(values: Slices) -> tuple[npt.NDArray[np.int16], Slices]:
    """Return schema ids and rows of stored values; −1 and absent for absent values."""
    fault, record, detail = k.values_size(*values)
    if fault:
        raise _refusal("values", fault, record, detail)
    schema_ids, starts = np.empty(values.count, np.int16), np.empty(values.count, np.int64)
    k.split_values(*values, schema_ids, starts)
    return schema_ids, Slices(values.data, starts, values.ends)
