"""Encoded batches pass the server's checks and decode to the same rows."""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pytest

from tests.record.rows.plain_rows import decode_body
from zufluss.client.write import encode
from zufluss.client.write.encode import BatchEncoder
from zufluss.errors import RecordTooLargeError
from zufluss.model.schema import Schema
from zufluss.model.table import TableDescriptor, TableInfo, TablePath
from zufluss.record.arrow.message import decode
from zufluss.record.batch.check import BatchChecker
from zufluss.record.batch.stats import read_statistics
from zufluss.record.header import read_header, verify_crc

COLUMNS = (
    "id BIGINT, f DOUBLE, s STRING, b BYTES, l ARRAY<STRING>, m MAP<STRING, INT>, "
    "r ROW<x INT, y STRING>, t TIMESTAMP(9), d DECIMAL(20, 3), o BOOLEAN"
)


def table(columns: str = COLUMNS, **properties: str) -> TableInfo:
    named = {f"table.{key.replace('__', '.')}": value for key, value in properties.items()}
    descriptor = TableDescriptor(Schema.of(columns), bucket_count=1, properties=named)
    return TableInfo(TablePath("fluss", "t"), 1, 3, descriptor, 0, 0)


def noise(rows: int) -> pa.RecordBatch:
    """Rows that do not compress, every third value null."""
    random = np.random.default_rng(rows)
    blobs = [bytes(random.bytes(37)) for _ in range(rows)]
    raw = [
        {
            "id": int(random.integers(0, 2**62)),
            "f": float(random.random()),
            "s": blob.hex(),
            "b": blob,
            "l": [blob.hex()[:9]] * (i % 4),
            "m": [(blob.hex()[:5], i)],
            "r": {"x": i, "y": blob.hex()[:3]},
            "o": bool(i % 2),
        }
        for i, blob in enumerate(blobs)
    ]
    rows_with_nulls = [
        {key: None if i % 3 == 0 else value for key, value in row.items()}
        for i, row in enumerate(raw)
    ]
    return pa.RecordBatch.from_pylist(rows_with_nulls, schema=Schema.of(COLUMNS).arrow)


@pytest.mark.parametrize("compression", ["NONE", "LZ4_FRAME", "ZSTD"])
@pytest.mark.parametrize("statistics", ["", "id,f,s"])
@pytest.mark.parametrize("rows", [1, 9, 3000])
def test_a_batch_survives_encoding_and_passes_the_servers_checks(
    compression: str, statistics: str, rows: int
) -> None:
    properties = {"log__arrow__compression__type": compression}
    if statistics:
        properties["statistics__columns"] = statistics
    info = table(**properties)
    batch = noise(rows)
    view = BatchEncoder(info).encode([batch], writer_id=5, sequence=6).view
    header = read_header(view)
    assert (header.writer_id, header.batch_sequence, header.schema_id) == (5, 6, 3)
    assert (header.record_count, header.size) == (rows, len(view))
    assert header.magic == (1 if statistics else 0)
    assert verify_crc(view, 0, header)
    assert decode(view, 0, header, info.schema.arrow)[0].equals(batch)
    if statistics:
        found = read_statistics(view, 52, header.statistics_length, info.schema)
        assert len(found.columns) == 3
    checker = BatchChecker({3: info.schema}.get, "ARROW")
    stored = np.frombuffer(view, dtype=np.uint8)
    assert len(checker.check(stored, 0, len(stored))) == 1


def test_chunks_are_joined_in_order_and_slices_carry_their_rows_only() -> None:
    info = table()
    batch = noise(100)
    chunks = [batch.slice(0, 30), batch.slice(30, 1), batch.slice(31)]
    view = BatchEncoder(info).encode(chunks, -1, -1).view
    assert decode(view, 0, read_header(view), info.schema.arrow)[0].equals(batch)
    part = BatchEncoder(info).encode([batch.slice(10, 2)], -1, -1).view
    assert len(part) < len(view) / 2


@pytest.mark.parametrize("log_format", ["INDEXED", "COMPACTED"])
def test_tables_of_row_formats_get_rows(log_format: str) -> None:
    info = table("id BIGINT, s STRING", log__format=log_format)
    batch = pa.RecordBatch.from_pylist(
        [{"id": 1, "s": "a"}, {"id": None, "s": None}], schema=info.schema.arrow
    )
    view = BatchEncoder(info).encode([batch], 1, 0).view
    header = read_header(view)
    assert verify_crc(view, 0, header)
    rows, _ = decode_body(view, header.body_offset, len(view), 2, info.schema, log_format)
    assert rows.equals(batch)


def test_another_stamp_changes_writer_and_sequence_only() -> None:
    encoded = BatchEncoder(table()).encode([noise(5)], writer_id=1, sequence=9)
    before = read_header(encoded.view)
    encoded.stamp(2, 0)
    after = read_header(encoded.view)
    assert (after.writer_id, after.batch_sequence) == (2, 0)
    assert verify_crc(encoded.view, 0, after)
    assert after._replace(writer_id=1, batch_sequence=9, crc=before.crc) == before


def test_rows_too_large_for_a_batch_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(encode, "BATCH_BYTES_MAX", 1000)
    with pytest.raises(RecordTooLargeError, match="10 rows for table"):
        BatchEncoder(table()).encode([noise(10)], 1, 0)
