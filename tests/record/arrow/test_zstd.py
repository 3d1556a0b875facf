"""Messages that we compress ourselves: Arrow's reader is the judge, and our own check."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pyarrow as pa
import pytest
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.record.arrow_samples import NESTED, NESTED_ROWS, SMALL, SMALL_ROWS, array, only, tables
from tests.record.record_samples import types_of
from tests.record.rows.plain_rows import encode_compacted
from zufluss.errors import CorruptRecordError
from zufluss.model.schema import Schema
from zufluss.record.arrow.message import ArrowMessage, parse_message
from zufluss.record.arrow.zstd import Buffers, ZstdMessages
from zufluss.record.batch.check import BatchChecker
from zufluss.record.header import build_batch
from zufluss.record.kernels import message_write
from zufluss.record.rows.codec import RowCodec
from zufluss.record.slices import Slices

BEFORE = 11
FLAT = Schema.of("a BIGINT, s STRING, f BOOLEAN, c CHAR(3), b BYTES, n BINARY(5), d DECIMAL(30,2)")


def read(view: memoryview, schema: pa.Schema) -> pa.RecordBatch:
    batch = pa.ipc.read_record_batch(pa.py_buffer(view[BEFORE:]), schema)
    batch.validate(full=True)
    return batch


def written(messages: ZstdMessages, rows: pa.RecordBatch) -> memoryview:
    return messages.write(messages.of(rows), BEFORE)


def prefixes(view: memoryview) -> list[int]:
    """What stands before each buffer: its size uncompressed, −1 where it is not; 0 if empty."""
    message: ArrowMessage = parse_message(view[BEFORE:], 0, len(view) - BEFORE)
    data = np.frombuffer(view, np.uint8)[BEFORE:]
    places = data[message.buffers_pos :][: 16 * message.buffer_count].copy().view(np.int64)
    body = data[message.body_start :]
    return [
        int(body[at : at + 8].copy().view(np.int64)[0]) if size else 0
        for at, size in places.reshape(-1, 2).tolist()
    ]


def numbers(rows: int, seed: int = 0) -> pa.RecordBatch:
    """A column that packs well, one that does not, one of few bytes."""
    random = np.random.default_rng(seed)
    columns = [np.arange(rows), random.integers(-(2**63), 2**63 - 1, rows), np.zeros(rows, "b")]
    return pa.record_batch(list(map(pa.array, columns)), names=["good", "bad", "small"])


@given(tables(), st.integers(1, 60))
@settings(max_examples=100, deadline=None)
def test_arrow_and_our_own_check_accept_every_message(
    table: tuple[Schema, pa.RecordBatch], times: int
) -> None:
    schema, few = table
    rows = pa.Table.from_batches([few] * times).combine_chunks().to_batches()[0]
    view = written(ZstdMessages(schema.arrow, 3), rows)
    assert read(view, schema.arrow).equals(rows)
    batch = build_batch(1, view[BEFORE:], rows.num_rows)
    checked = BatchChecker(only(schema), "ARROW").check(array(batch), 0, len(batch))
    assert [b.record_count for b in checked] == [rows.num_rows]


@pytest.mark.parametrize(("schema", "rows"), [(SMALL, SMALL_ROWS), (NESTED, NESTED_ROWS)])
def test_a_slice_is_written_without_the_rows_around_it(
    schema: Schema, rows: pa.RecordBatch
) -> None:
    messages = ZstdMessages(schema.arrow, 3)
    many = pa.Table.from_batches([rows] * 100).combine_chunks().to_batches()[0]
    for begin, count in ((0, 1), (1, 1), (5, 200), (299, 1)):
        piece = many.slice(begin, count)
        assert read(written(messages, piece), schema.arrow).equals(piece)


@given(tables(), st.integers(1, 60))
@settings(max_examples=100, deadline=None)
def test_rows_have_the_message_that_their_columns_have(
    table: tuple[Schema, pa.RecordBatch], times: int
) -> None:
    schema, few = table
    codec = RowCodec(schema)
    rows = pa.Table.from_batches([few] * times).combine_chunks().to_batches()[0]
    located = codec.locate(codec.encode(rows))
    if codec.buffers is None:
        assert any(pa.types.is_nested(field.type) for field in schema.arrow)
        return
    try:
        columns = codec.columns(located)
    except CorruptRecordError as e:
        with pytest.raises(CorruptRecordError, match=str(e.message)[:20]):
            codec.buffers.check(located)
        return
    codec.buffers.check(located)
    view = ZstdMessages(schema.arrow, 3).write(codec.buffers.of(located), BEFORE)
    assert read(view, schema.arrow).equals(columns)


def test_absent_rows_and_values_of_no_bytes_are_written() -> None:
    codec, messages = RowCodec(FLAT), ZstdMessages(FLAT.arrow, 3)
    assert codec.buffers is not None
    full = {"a": 1, "s": "", "f": True, "c": "abc", "b": b"", "n": b"12345", "d": None}
    rows = codec.encode(pa.RecordBatch.from_pylist([full, {}] * 200, schema=FLAT.arrow))
    starts = rows.starts.copy()
    starts[::3] = -1
    located = codec.locate(rows._replace(starts=starts))
    view = messages.write(codec.buffers.of(located), BEFORE)
    assert read(view, FLAT.arrow).equals(codec.columns(located))


def test_a_timestamp_beyond_arrow_is_refused_before_it_is_written() -> None:
    schema = Schema.of("t TIMESTAMP(9)")
    codec = RowCodec(schema)
    assert codec.buffers is not None
    year_9999 = 253_402_300_799_000 * 10**6
    located = codec.locate(Slices.of([encode_compacted([year_9999], types_of(schema))]))
    with pytest.raises(CorruptRecordError, match=r"record 0: field 0 .* beyond what Arrow holds"):
        codec.buffers.check(located)


# --- what is packed ------------------------------------------------------------------------------


def test_only_buffers_that_gain_are_packed() -> None:
    rows = numbers(100)
    view = written(ZstdMessages(rows.schema, 3), rows)
    assert prefixes(view) == [0, 800, 0, -1, 0, -1]
    assert read(view, rows.schema).equals(rows)


def test_a_buffer_that_gained_nothing_is_tried_again_after_some_batches() -> None:
    rows, better = numbers(100), numbers(100).set_column(1, "bad", pa.array(range(100)))
    messages = ZstdMessages(rows.schema, 3)
    assert prefixes(written(messages, rows))[3] == -1
    seen = [prefixes(written(messages, better))[3] for _ in range(message_write.REST_BATCHES + 1)]
    assert seen == [-1] * message_write.REST_BATCHES + [800]


def test_a_single_row_is_not_compressed() -> None:
    rows = numbers(1)
    assert prefixes(written(ZstdMessages(rows.schema, 3), rows)) == [0, -1, 0, -1, 0, -1]


@pytest.mark.parametrize("level", [1, 3, 22])
def test_the_requested_compression_level_is_used(level: int) -> None:
    text = "".join(f"{i * 7919 % 1000} and {i % 13}, " for i in range(5000))
    rows = pa.record_batch([pa.array([text])], names=["s"])
    view = written(ZstdMessages(rows.schema, level), rows)
    assert zstandard.ZstdCompressor(level=level).compress(text.encode()) in bytes(view)


def test_threads_write_concurrently() -> None:
    messages = ZstdMessages(numbers(1).schema, 3)
    batches = [numbers(50 + 37 * i, i) for i in range(40)]
    with ThreadPoolExecutor(4) as pool:
        views = list(pool.map(lambda rows: written(messages, rows), batches))
    for rows, view in zip(batches, views, strict=True):
        assert read(view, rows.schema).equals(rows)


# --- numbers that are wrong ----------------------------------------------------------------------


@given(st.lists(st.integers(-(2**63), 2**63 - 1) | st.integers(-9, 900), min_size=18, max_size=18))
@settings(max_examples=100, deadline=None)
def test_numbers_that_leave_the_body_are_refused_not_followed(wrong: list[int]) -> None:
    messages, size = ZstdMessages(numbers(1).schema, 3), 808
    body = np.arange(size).astype(np.uint8)
    places = np.array(wrong, np.int64)[6:].reshape(-1, 2)
    low, high = places[:, 0], places[:, 1]
    sound = bool(np.all((low >= 0) & (high >= 0) & (high <= size) & (low <= size - high)))
    buffers = Buffers(1, np.array(wrong, np.int64), body)
    if sound:
        return
    with pytest.raises((IndexError, ValueError, zstandard.ZstdError)):
        messages.write(buffers, BEFORE)


def test_rows_that_are_not_what_was_located_are_refused() -> None:
    codec = RowCodec(FLAT)
    assert codec.buffers is not None
    rows = pa.RecordBatch.from_pylist([{"a": 1, "s": "x" * 40, "b": b"y" * 40}], schema=FLAT.arrow)
    located = codec.locate(codec.encode(rows))
    starts, ends = located.places(codec._plan, 1)
    for start, end in ((10**9, 10**9 + 5), (0, 10**9)):
        starts[:], ends[:] = start, end
        with pytest.raises(IndexError):
            codec.buffers.of(located)
