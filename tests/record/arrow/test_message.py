"""Arrow messages: the plain reader, the compiled reader and pyarrow agree."""

from __future__ import annotations

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.record.arrow_samples import (
    CODECS,
    NESTED,
    NESTED_ROWS,
    SMALL,
    SMALL_ROWS,
    array,
    log_batch,
    message,
    tables,
)
from tests.record.record_samples import FIXTURES, fixture, json_row, same, table_schema, types_of
from tests.record.rows.plain_values import rows_of_batch
from zufluss.errors import CorruptRecordError
from zufluss.model.schema import Schema
from zufluss.record.arrow.layout import Layout
from zufluss.record.arrow.message import ArrowMessage, decode, parse_message
from zufluss.record.fault import BatchFault, RefusedBatchError
from zufluss.record.header import build_batch, iter_headers, read_header
from zufluss.record.kernels.message_read import read_message

CHANGES = {"+A": 0, "+I": 1, "-U": 2, "+U": 3, "-D": 4}
ARROW_FETCHED = sorted(
    path.stem
    for path in (FIXTURES / "fetch-log").glob("*.bin")
    if path.stem not in ("log_indexed", "log_compacted", "empty-batch")
)


def compiled(data: bytes, start: int, end: int) -> ArrowMessage | BatchFault:
    fault, _, _, *fields = read_message(array(data), start, end)
    if fault:
        return BatchFault(fault)
    fields[5] = None if fields[5] < 0 else fields[5]
    return ArrowMessage._make(fields)


def plain(data: bytes, start: int, end: int) -> ArrowMessage | BatchFault:
    try:
        return parse_message(data, start, end)
    except RefusedBatchError as error:
        return error.fault


@pytest.mark.parametrize("codec", CODECS)
def test_a_message_reads_as_pyarrow_wrote_it(codec: str | None) -> None:
    data = b"12345678" + message(NESTED_ROWS, codec)
    found = parse_message(data, 8, len(data))
    layout = Layout.of(NESTED.arrow)
    assert found.length == NESTED_ROWS.num_rows
    assert (found.node_count, found.buffer_count) == (len(layout.nodes), layout.buffer_count)
    assert found.codec == {None: None, "lz4": 0, "zstd": 1}[codec]
    assert found.body_start + found.body_length == len(data)
    assert compiled(data, 8, len(data)) == found


@pytest.mark.parametrize("codec", CODECS)
def test_the_metadata_alone_is_enough_to_read_it(codec: str | None) -> None:
    data = message(SMALL_ROWS, codec)
    whole = parse_message(data, 0, len(data))
    metadata = data[: whole.body_start]
    assert parse_message(metadata, 0, len(data)) == whole
    assert compiled(metadata, 0, len(data)) == whole


@pytest.mark.parametrize("codec", CODECS)
def test_both_readers_judge_every_changed_byte_of_the_metadata_alike(codec: str | None) -> None:
    data = message(SMALL_ROWS, codec)
    body = parse_message(data, 0, len(data)).body_start
    for position in range(body):
        for value in (0, 1, 4, 0x7F, 0x80, 0xFF, data[position] ^ 8):
            changed = bytearray(data)
            changed[position] = value
            assert plain(changed, 0, len(data)) == compiled(changed, 0, len(data))


@pytest.mark.parametrize("codec", CODECS)
def test_both_readers_judge_every_truncation_alike(codec: str | None) -> None:
    data = message(SMALL_ROWS, codec)
    for size in range(len(data)):
        cut = data[:size]
        assert isinstance(plain(cut, 0, size), BatchFault)
        assert plain(cut, 0, size) == compiled(cut, 0, size)
        assert plain(cut, 0, len(data)) == compiled(cut, 0, len(data))


@given(st.binary(max_size=80), st.binary(max_size=60))
def test_both_readers_judge_noise_alike(head: bytes, tail: bytes) -> None:
    framed = b"\xff\xff\xff\xff" + len(head).to_bytes(4, "little") + head + tail
    for data in (head, framed):
        assert plain(data, 0, len(data)) == compiled(data, 0, len(data))


@settings(max_examples=60)
@given(tables())
def test_a_layout_counts_the_nodes_and_buffers_that_pyarrow_writes(
    table: tuple[Schema, pa.RecordBatch],
) -> None:
    schema, rows = table
    data = message(rows)
    found, layout = parse_message(data, 0, len(data)), Layout.of(schema.arrow)
    assert (found.node_count, found.buffer_count) == (len(layout.nodes), layout.buffer_count)
    assert layout.columns[-1][1::2] == (len(layout.nodes), layout.buffer_count)


@settings(max_examples=60)
@given(tables(), st.sampled_from(CODECS))
def test_a_batch_decodes_to_the_rows_it_was_built_from(
    table: tuple[Schema, pa.RecordBatch], codec: str | None
) -> None:
    schema, rows = table
    data = b"..." + bytes(log_batch(rows, codec))
    decoded, changes = decode(data, 3, read_header(data, 3), schema.arrow)
    assert same(rows_of_batch(decoded, schema), rows_of_batch(rows, schema))
    assert changes is None


def test_decoding_copies_nothing_of_an_uncompressed_batch() -> None:
    data = bytearray(log_batch(SMALL_ROWS))
    decoded, _ = decode(data, 0, read_header(data), SMALL.arrow)
    whole = pa.py_buffer(data)
    address = decoded.column(0).buffers()[1].address
    assert whole.address <= address < whole.address + whole.size


def test_a_message_of_another_length_is_refused_when_decoded() -> None:
    data = build_batch(1, message(SMALL_ROWS), 7)
    with pytest.raises(CorruptRecordError, match="has 3 records, its header says 7"):
        decode(data, 0, read_header(data), SMALL.arrow)


def test_bytes_that_are_not_a_message_are_refused_when_decoded() -> None:
    data = build_batch(1, b"no message at all", 7)
    with pytest.raises(CorruptRecordError, match="cannot be read"):
        decode(data, 0, read_header(data), SMALL.arrow)


@pytest.mark.parametrize("name", ARROW_FETCHED)
def test_captured_answers_decode_as_their_json_says(name: str) -> None:
    described, data = fixture(f"fetch-log/{name}")
    schema = table_schema(described["table"])
    if described["projected_fields"] is not None:
        schema = Schema(tuple(schema.columns[i] for i in described["projected_fields"]))
    found = []
    for pos, header in iter_headers(data):
        batch, changes = decode(data, pos, header, schema.arrow)
        rows = [json_row(row, types_of(schema)) for row in rows_of_batch(batch, schema)]
        kinds = [0] * len(rows) if changes is None else changes.tolist()
        found += zip(range(header.base_offset, header.next_offset), kinds, rows, strict=False)
    expected = [(r["offset"], CHANGES[r["change"]], r["row"]) for r in described["expected"]]
    assert found == expected
