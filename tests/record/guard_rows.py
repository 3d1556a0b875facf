"""Runs the row and KV kernels over damaged bytes that lie between two pages nobody may touch.

Started as a process of its own by `test_rowcodec.py`: a read even one byte outside kills it.
"""

from __future__ import annotations

from collections.abc import Iterator
from decimal import Decimal

import numpy as np

from tests.record.guard_pages import Guarded
from tests.record.rows.plain_values import batch_of_rows
from zufluss.errors import CorruptRecordError
from zufluss.model.ddl import parse_type
from zufluss.model.schema import Column, Schema
from zufluss.record.batch.kv import build_kv_batch, build_value_batch
from zufluss.record.batch.row_body import check_body
from zufluss.record.kernels.kv_batch import read_records, read_values
from zufluss.record.rows.codec import RowCodec
from zufluss.record.slices import Slices

TYPES = [
    *("INT", "BIGINT", "STRING", "BOOLEAN", "TIMESTAMP(6)", "DECIMAL(30, 2)", "DOUBLE", "CHAR(3)"),
    *("BINARY(2)", "ARRAY<STRING>", "MAP<INT, TIMESTAMP(6)>", "ROW<a INT, b ARRAY<SMALLINT>>"),
]
VALUES = (
    *(-1, 2**60, "text ä", True, 1_000_000_005_000, Decimal("-12345678901234567890.12"), 2.5),
    *("abc", b"xy", ["short", None, "longer than seven"], [(1, 5_000), (2, None)], (7, [1, None])),
)


def damaged(data: bytes) -> Iterator[bytes]:
    """The data with each byte changed in several ways, and cut everywhere."""
    for position in range(len(data)):
        for value in (0x00, 0x7F, 0x80, 0xFF, data[position] ^ 0x04):
            yield data[:position] + bytes([value]) + data[position + 1 :]
    for size in range(len(data)):
        yield data[:size]


def rows(guarded: Guarded, codec: RowCodec, data: bytes) -> int:
    count = 0
    keys = Slices.of([b"\xff\xff\xff\xff\x0f"])
    for bad in damaged(data):
        for place in guarded.places(bad):
            whole = Slices(place, np.array([0]), np.array([place.size]))
            try:
                located = codec.locate(whole)
                codec.row_mismatch(located.rows, located.field_counts, [0, 2], keys)
                codec.columns(located)
            except CorruptRecordError:
                pass
            count += 1
    return count


def records(guarded: Guarded, codec: RowCodec, row: bytes) -> int:
    count = 0
    keys, values = Slices.of([b"k", b"key"]), Slices.of([row, None])
    batch, scanned = build_kv_batch(1, keys, values), build_value_batch(values)
    body = (len(row) + 1).to_bytes(4, "little") + b"\0" + row
    for bad in damaged(bytes(batch)[28:]):
        for place in guarded.places(bad):
            read_records(place, 0, place.size, np.empty((4, 2), np.int64))
            count += 1
    for bad in damaged(scanned[9:]):
        for place in guarded.places(bad):
            read_values(place, 0, place.size, np.empty((2, 1), np.int64))
            count += 1
    for bad in damaged(body):
        for place in guarded.places(bad):
            try:
                check_body(place, 0, place.size, 1, codec)
            except CorruptRecordError:
                pass
            count += 1
    return count


def main() -> None:
    guarded, count = Guarded(), 0
    schema = Schema(tuple(Column(f"c{i}", parse_type(ty)) for i, ty in enumerate(TYPES)))
    batch = batch_of_rows([VALUES], schema)
    for codec in (RowCodec(schema, "COMPACTED"), RowCodec(schema, "INDEXED")):
        row = codec.encode(batch).item(0) or b""
        count += rows(guarded, codec, row) + records(guarded, codec, row)
    print(count)


if __name__ == "__main__":
    main()
