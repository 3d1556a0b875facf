"""Messages compressed by us are what Arrow reads and what the checker of the server takes."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pyarrow as pa
from hypothesis import given, settings

from tests.record.arrow_samples import NESTED_ROWS, SMALL_ROWS, array, message, only, tables
from zufluss.model.schema import Schema
from zufluss.record.batch import build_batch
from zufluss.record.check import BatchChecker
from zufluss.record.compress import ZstdMessages


@given(tables())
@settings(max_examples=100)
def test_arrow_and_the_checker_read_what_we_compress(table: tuple[Schema, pa.RecordBatch]) -> None:
    schema, rows = table
    compressed = ZstdMessages(3).compress(memoryview(message(rows)), 5)
    assert bytes(compressed[:5]) == bytes(5)
    assert pa.ipc.read_record_batch(pa.py_buffer(compressed[5:]), rows.schema).equals(rows)
    if rows.num_rows:
        batch = build_batch(1, compressed[5:], rows.num_rows)
        BatchChecker(only(schema), "ARROW").check(array(batch), 0, len(batch))


def test_one_compressor_serves_messages_of_all_sizes_and_several_threads() -> None:
    zstd = ZstdMessages(3)
    many = pa.RecordBatch.from_pylist(SMALL_ROWS.to_pylist() * 500, schema=SMALL_ROWS.schema)

    def works(rows: pa.RecordBatch) -> bool:
        compressed = zstd.compress(memoryview(message(rows)), 0)
        return pa.ipc.read_record_batch(pa.py_buffer(compressed), rows.schema).equals(rows)

    batches = [SMALL_ROWS, many, SMALL_ROWS.slice(1, 1), many.slice(3, 700)] * 20
    with ThreadPoolExecutor(4) as threads:
        assert all(threads.map(works, batches))


def test_it_is_as_small_as_what_arrow_compresses() -> None:
    for rows in (SMALL_ROWS, NESTED_ROWS):
        ours = ZstdMessages(3).compress(memoryview(message(rows)), 0)
        assert len(ours) <= len(message(rows, "zstd")) + 64
