"""Messages that clients compress: Arrow's reader is the judge, our check, and the projection."""

from __future__ import annotations

import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pyarrow as pa
import pytest
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.record.arrow_samples import (
    NESTED,
    NESTED_ROWS,
    SMALL,
    SMALL_ROWS,
    array,
    message,
    only,
    tables,
)
from zufluss.model.schema import Schema
from zufluss.record.arrow import compress, template
from zufluss.record.arrow.compress import REST_BATCHES, SMALL_BYTES, CompressedMessages
from zufluss.record.arrow.message import LZ4_FRAME, ZSTD, decode, parse_message
from zufluss.record.arrow.project import Projector
from zufluss.record.batch.check import BatchChecker
from zufluss.record.header import build_batch, read_header
from zufluss.record.kernels import batch_project as kernel

BEFORE = 11
CODECS = (LZ4_FRAME, ZSTD)


def zstd(schema: pa.Schema, level: int = 3) -> CompressedMessages:
    return CompressedMessages(schema, ZSTD, level)


def read(view: memoryview, schema: pa.Schema) -> pa.RecordBatch:
    batch = pa.ipc.read_record_batch(pa.py_buffer(view[BEFORE:]), schema)
    batch.validate(full=True)
    return batch


def prefixes(view: memoryview) -> list[int]:
    """What stands before each buffer: its size uncompressed, −1 where it is not; 0 if empty."""
    found = parse_message(view[BEFORE:], 0, len(view) - BEFORE)
    data = np.frombuffer(view, np.uint8)[BEFORE:]
    places = data[found.buffers_pos :][: 16 * found.buffer_count].copy().view(np.int64)
    body = data[found.body_start :]
    return [
        int(body[at : at + 8].copy().view(np.int64)[0]) if size else 0
        for at, size in places.reshape(-1, 2).tolist()
    ]


def numbers(rows: int, seed: int = 0) -> pa.RecordBatch:
    """A column that packs well, one that does not, one of few bytes."""
    random = np.random.default_rng(seed)
    columns = [np.arange(rows), random.integers(-(2**63), 2**63 - 1, rows), np.zeros(rows, "b")]
    return pa.record_batch(list(map(pa.array, columns)), names=["good", "bad", "small"])


def repeated(rows: pa.RecordBatch, times: int) -> pa.RecordBatch:
    return pa.Table.from_batches([rows] * times).combine_chunks().to_batches()[0]


# --- what everybody reads ------------------------------------------------------------------------


@given(tables(), st.integers(1, 60), st.sampled_from(CODECS))
@settings(max_examples=100, deadline=None)
def test_arrow_the_check_and_the_projection_take_every_message(
    table: tuple[Schema, pa.RecordBatch], times: int, codec: int
) -> None:
    schema, few = table
    rows = repeated(few, times)
    view = CompressedMessages(schema.arrow, codec, 3).write(rows, BEFORE)
    assert bytes(view[:BEFORE]) == bytes(BEFORE)
    assert read(view, schema.arrow).equals(rows)
    batch = build_batch(1, view[BEFORE:], rows.num_rows)
    checked = BatchChecker(only(schema), "ARROW").check(array(batch), 0, len(batch))
    assert [b.record_count for b in checked] == [rows.num_rows]
    last = len(schema.columns) - 1
    piece = b"".join(Projector(only(schema), schema).project_all(batch, (last,)))
    wanted = rows.select([last])
    assert decode(piece, 0, read_header(piece), wanted.schema)[0].equals(wanted)


@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize(("schema", "rows"), [(SMALL, SMALL_ROWS), (NESTED, NESTED_ROWS)])
def test_a_slice_is_written_without_the_rows_around_it(
    schema: Schema, rows: pa.RecordBatch, codec: int
) -> None:
    messages = CompressedMessages(schema.arrow, codec, 3)
    many = repeated(rows, 100)
    whole = len(messages.write(many, BEFORE))
    for begin, count in ((0, 1), (1, 1), (5, 200), (299, 1)):
        view = messages.write(many.slice(begin, count), BEFORE)
        assert read(view, schema.arrow).equals(many.slice(begin, count))
        assert len(view) <= whole


@pytest.mark.parametrize("codec", CODECS)
def test_columns_without_any_bytes_are_read_back(codec: int) -> None:
    schema = Schema.of("s STRING, l ARRAY<INT>, b BYTES, n BINARY(3), r ROW<x STRING>").arrow
    messages = CompressedMessages(schema, codec, 3)
    blank = {"s": "", "l": [], "b": b"", "r": {"x": ""}}
    for row in ({}, blank):
        rows = pa.RecordBatch.from_pylist([row] * 300, schema=schema)
        assert read(messages.write(rows, BEFORE), schema).equals(rows)
    none = pa.RecordBatch.from_pylist([], schema=schema)
    assert read(messages.write(none, BEFORE), schema).equals(none)


def test_the_templates_positions_are_those_of_the_kernels() -> None:
    for name in ("BODY_LENGTH_AT", "LENGTH_AT", "CODEC_AT", "NODES_AT", "CODED_NODES_AT"):
        assert getattr(template, name) == getattr(kernel, name)


# --- what is packed ------------------------------------------------------------------------------


@pytest.mark.parametrize("codec", CODECS)
def test_only_buffers_that_gain_are_packed(codec: int) -> None:
    rows = numbers(100)
    view = CompressedMessages(rows.schema, codec, 3).write(rows, BEFORE)
    good = 800 if codec == ZSTD else prefixes(view)[1]
    assert prefixes(view) == [0, good, 0, -1, 0, -1]
    assert read(view, rows.schema).equals(rows)


@pytest.mark.parametrize(("random", "packed"), [(60, False), (48, True)])
def test_a_buffer_is_compressed_only_if_a_tenth_is_gained(random: int, packed: bool) -> None:
    """Of 64 random bits some are zero: 60 leave a sixteenth to gain, 48 a quarter."""
    values = np.random.default_rng(0).integers(0, 1 << random, 5000)
    rows = pa.record_batch([pa.array(values)], names=["n"])
    view = zstd(rows.schema).write(rows, BEFORE)
    assert prefixes(view) == [0, rows.nbytes if packed else -1]


def test_rows_that_do_not_pack_take_eight_bytes_a_buffer_more_than_without() -> None:
    values = np.random.default_rng(0).integers(-(2**63), 2**63 - 1, (4, 5000))
    rows = pa.record_batch(list(map(pa.array, values)), names=list("abcd"))
    metadata = len(template.message_template(4, 8, coded=True))
    assert len(zstd(rows.schema).write(rows, 0)) == metadata + 4 * 8 + rows.nbytes
    assert len(message(rows, "zstd")) > metadata + 4 * 8 + rows.nbytes


def test_a_buffer_that_gained_nothing_is_tried_again_after_some_batches() -> None:
    rows, better = numbers(100), numbers(100).set_column(1, "bad", pa.array(range(100)))
    messages = zstd(rows.schema)
    assert prefixes(messages.write(rows, BEFORE))[3] == -1
    seen = [prefixes(messages.write(better, BEFORE))[3] for _ in range(REST_BATCHES + 1)]
    assert seen == [-1] * REST_BATCHES + [800]


def test_a_buffer_below_the_limit_is_not_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = pa.record_batch([pa.array(np.zeros(SMALL_BYTES - 1, "b"))], names=["z"])
    messages = zstd(rows.schema)
    assert prefixes(messages.write(rows, BEFORE)) == [0, -1]
    monkeypatch.setattr(compress, "SMALL_BYTES", SMALL_BYTES - 1)
    assert prefixes(messages.write(rows, BEFORE)) == [0, SMALL_BYTES - 1]


@pytest.mark.parametrize("level", [1, 3, 22])
def test_the_requested_compression_level_is_used(level: int) -> None:
    text = "".join(f"{i * 7919 % 1000} and {i % 13}, " for i in range(5000))
    rows = pa.record_batch([pa.array([text])], names=["s"])
    view = zstd(rows.schema, level).write(rows, BEFORE)
    assert zstandard.ZstdCompressor(level=level).compress(text.encode()) in bytes(view)


def test_threads_write_concurrently() -> None:
    messages = zstd(numbers(1).schema)
    batches = [numbers(50 + 37 * i, i) for i in range(40)]
    with ThreadPoolExecutor(4) as pool:
        views = list(pool.map(lambda rows: messages.write(rows, BEFORE), batches))
    for rows, view in zip(batches, views, strict=True):
        assert read(view, rows.schema).equals(rows)


def test_a_client_that_compresses_loads_no_kernels() -> None:
    code = (
        "import sys, pyarrow as pa, zufluss.client.sync.connection\n"
        "from zufluss.record.arrow.compress import CompressedMessages\n"
        "rows = pa.record_batch({'a': list(range(1000))})\n"
        "CompressedMessages(rows.schema, 1, 3).write(rows, 0)\n"
        "sys.exit('numba' in sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
