"""Batches that the tests of headers, checks, projection and walks share."""

from __future__ import annotations

from datetime import time
from decimal import Decimal
from typing import Any

import numpy as np
import pyarrow as pa
from hypothesis import strategies as st

from tests.record.record_samples import any_types, nullable
from tests.record.rows.plain_values import batch_of_rows
from zufluss.model.schema import Column, Schema
from zufluss.record.header import build_batch

CODECS = (None, "lz4", "zstd")

SMALL = Schema.of("a BIGINT NOT NULL, s STRING, f BOOLEAN, t TIME(3), d DECIMAL(5,2)")
SMALL_ROWS = pa.RecordBatch.from_pylist(
    [
        {"a": 1, "s": "eins", "f": True, "t": time(0, 0, 5), "d": Decimal("1.25")},
        {"a": 2, "s": None, "f": None, "t": None, "d": None},
        {"a": 3, "s": "dreiß €", "f": False, "t": time(23, 59, 59), "d": Decimal("-999.99")},
    ],
    schema=SMALL.arrow,
)

NESTED = Schema.of(
    "l ARRAY<STRING>, m MAP<STRING, INT>, r ROW<x INT NOT NULL, y ARRAY<BOOLEAN>>, b BYTES"
)
NESTED_ROWS = pa.RecordBatch.from_pylist(
    [
        {"l": ["a", None], "m": [("k", 1), ("ö", None)], "r": {"x": 1, "y": [True]}, "b": b"\xff"},
        {"l": None, "m": None, "r": None, "b": None},
        {"l": [], "m": [], "r": {"x": 3, "y": None}, "b": b""},
    ],
    schema=NESTED.arrow,
)


def message(batch: pa.RecordBatch, codec: str | None = None) -> bytes:
    """The encapsulated RecordBatch message that pyarrow writes."""
    sink = pa.BufferOutputStream()
    options = pa.ipc.IpcWriteOptions(compression=codec)
    with pa.ipc.new_stream(sink, batch.schema, options=options) as writer:
        writer.write_batch(batch)
    messages = list(pa.ipc.MessageReader.open_stream(sink.getvalue()))
    return bytes(messages[1].serialize())


def log_batch(batch: pa.RecordBatch, codec: str | None = None, **fields: Any) -> bytearray:
    """A log batch of schema 1 around the message of `batch`."""
    body = message(batch, codec)
    return build_batch(fields.pop("schema_id", 1), body, batch.num_rows, **fields)


def array(data: bytes | bytearray) -> np.ndarray:
    """The bytes as the kernels take them."""
    return np.frombuffer(data, dtype=np.uint8)


def only(schema: Schema) -> Any:
    """A table whose only schema, of id 1, is this."""
    return {1: schema}.get


@st.composite
def tables(draw: st.DrawFn) -> tuple[Schema, pa.RecordBatch]:
    """A schema of any types with some rows."""
    types = draw(st.lists(any_types, min_size=1, max_size=4))
    schema = Schema(tuple(Column(f"c{i}", ty) for i, ty in enumerate(types)))
    rows = draw(st.lists(st.tuples(*map(nullable, types)).map(list), min_size=1, max_size=5))
    return schema, batch_of_rows(rows, schema)
