"""Compacted and indexed rows: captured bytes, round trips, and every kind of damage."""

from __future__ import annotations

import struct
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.record.record_samples import (
    FIXTURES,
    any_types,
    fixture,
    json_row,
    nullable,
    same,
    table_schema,
    types_of,
)
from tests.record.rows import plain_nested as slots
from tests.record.rows import plain_rows as rows
from tests.record.rows.plain_values import batch_of_rows, rows_of_batch, values_of
from zufluss.errors import CorruptRecordError
from zufluss.model.ddl import parse_type
from zufluss.model.schema import Column, Schema
from zufluss.record.header import iter_headers

CHANGES = ["+A", "+I", "-U", "+U", "-D"]
PUTS = sorted(p.stem for p in (FIXTURES / "put-kv").glob("*.json"))
CODECS = [
    (rows.encode_compacted, rows.decode_compacted),
    (rows.encode_indexed, rows.decode_indexed),
]


def _schema(*types: str) -> Schema:
    return Schema(tuple(Column(f"c{i}", parse_type(text)) for i, text in enumerate(types)))


def _decoder(table: str) -> Any:
    return rows.decode_indexed if "indexed" in table else rows.decode_compacted


def _kv_records(data: bytes) -> list[tuple[bytes, bytes]]:
    """Keys and values of a captured KV batch (28-byte header, keys shorter than 128 bytes)."""
    out, pos = [], 28
    while pos < len(data):
        (size,) = struct.unpack_from("<i", data, pos)
        key_end = pos + 5 + data[pos + 4]
        out.append((data[pos + 5 : key_end], data[key_end : pos + 4 + size]))
        pos += 4 + size
    return out


@pytest.mark.parametrize("direction", ["produce-log", "fetch-log"])
@pytest.mark.parametrize("log_format", ["INDEXED", "COMPACTED"])
def test_captured_log_bodies_decode_as_their_json_says(direction: str, log_format: str) -> None:
    # the only proof that we read what a Java writer writes
    expected, data = fixture(f"{direction}/log_{log_format.lower()}")
    schema = table_schema(expected["table"])
    got: list[Any] = []
    for pos, header in iter_headers(data):
        body = (pos + header.body_offset, pos + header.size, header.record_count)
        rows.check_body(np.frombuffer(data, np.uint8), *body, schema, log_format)
        batch, changes = rows.decode_body(data, *body, schema, log_format)
        values = [json_row(row, types_of(schema)) for row in rows_of_batch(batch, schema)]
        got += zip(changes.tolist(), values, strict=True)
        assert rows.encode_body(batch, schema, log_format) == data[body[0] : body[1]]
    if direction == "produce-log":
        assert [row for _, row in got] == expected["expected"]
    else:
        assert [(CHANGES[c], row) for c, row in got] == [
            (e["change"], e["row"]) for e in expected["expected"]
        ]


@pytest.mark.parametrize("name", PUTS)
def test_captured_kv_rows_decode_and_encode_byte_for_byte(name: str) -> None:
    expected, data = fixture(f"put-kv/{name}")
    types = types_of(table_schema(expected["table"]))
    encode = rows.encode_indexed if "indexed" in name else rows.encode_compacted
    records = _kv_records(data)
    assert len(records) == len(expected["expected"])
    for (_, value), entry in zip(records, expected["expected"], strict=True):
        assert (value == b"") == entry["delete"]
        if value:
            row = _decoder(name)(memoryview(value), 0, len(value), types)
            assert json_row(row, types) == entry["row"]
            assert encode(row, types) == value


@pytest.mark.parametrize("name", ["kv_all-0", "kv_all-1", "kv_indexed-0", "kv_nested-0"])
def test_captured_lookup_values_decode_as_their_json_says(name: str) -> None:
    expected, _ = fixture(f"lookup/{name}")
    types = types_of(table_schema(expected["table"]))
    value = bytes.fromhex(expected["response"]["buckets_resp"][0]["values"][0]["values"])
    row = _decoder(name)(memoryview(value), 2, len(value), types)  # behind the schema id
    assert json_row(row, types) == expected["expected"]


def test_the_measured_row_of_23_fields_reads_back() -> None:
    # bytes that pyfluss wrote, with every nested shape
    types = [
        *map(
            parse_type,
            ["INT", "BOOLEAN", "TINYINT", "SMALLINT", "INT", "BIGINT", "FLOAT", "DOUBLE", "STRING"],
        ),
        *map(parse_type, ["DECIMAL(10,2)", "DECIMAL(22,5)", "DATE", "TIME(0)", "TIMESTAMP(3)"]),
        *map(parse_type, ["TIMESTAMP(6)", "BYTES", "BINARY(4)", "ARRAY<INT>", "ARRAY<STRING>"]),
        *map(parse_type, ["MAP<STRING, INT>", "ROW<a INT, b INT>", "ARRAY<TIMESTAMP(6)>", "INT"]),
    ]
    data = bytes.fromhex(
        "000040 01 01 ff feff ffffffff0f ac02 0000c03f 00000000000004c0 026869"
        "83ffffffffffffffff01 0942ed123b0bd81f0e99 01 e807 e807 e8078827 020102 0461626364"
        "18 03000000 02000000 01000000 00000000 03000000 00000000"
        "28 02000000 00000000 73686f7274000085 0d00000018000000 6c6f6e6765722d7468616e2d37 000000"
        "24 10000000 01000000 00000000 6b00000000000081 01000000 00000000 09000000 00000000"
        "02 02 05 18 01000000 00000000 8813000010000000 e803000000000000"
    )
    row = rows.decode_compacted(memoryview(data), 0, len(data), types)
    assert json_row(row, types) == [
        *(1, True, -1, -2, -1, 300, 1.5, -2.5, "hi", "-1.25", "12345678901234567.12345"),
        *(1, 1000, {"ms": 1000, "ns": 0}, {"ms": 1000, "ns": 5000}),
        *({"hex": "0102"}, {"hex": "61626364"}, [1, None, 3], ["short", "longer-than-7"]),
        *({"keys": ["k"], "values": [9]}, [5, None], [{"ms": 1000, "ns": 5000}], None),
    ]
    assert rows.encode_compacted(row, types) == data


@st.composite
def _typed_rows(draw: st.DrawFn) -> tuple[list[Any], list[tuple[Any, ...]]]:
    types = draw(st.lists(any_types, min_size=1, max_size=5))
    row = st.tuples(*map(nullable, types))
    return types, draw(st.lists(row, min_size=1, max_size=4))


@pytest.mark.parametrize(("encode", "decode"), CODECS)
@settings(max_examples=120, deadline=None)
@given(typed=_typed_rows())
def test_every_row_reads_back_as_written(encode: Any, decode: Any, typed: Any) -> None:
    types, values = typed
    for row in values:
        data = encode(row, types)
        assert same(decode(memoryview(data), 0, len(data), types), list(row))


@pytest.mark.parametrize("log_format", ["INDEXED", "COMPACTED"])
@settings(max_examples=60, deadline=None)
@given(typed=_typed_rows())
def test_every_batch_reads_back_through_arrow(log_format: str, typed: Any) -> None:
    types, values = typed
    schema = Schema(tuple(Column(f"c{i}", ty) for i, ty in enumerate(types)))
    batch = batch_of_rows(values, schema)
    batch.validate(full=True)
    assert same(rows_of_batch(batch, schema), values)
    sliced = batch.slice(1)
    assert same(values_of(sliced.column(0), types[0]), [row[0] for row in values[1:]])
    body = rows.encode_body(batch, schema, log_format, [4] * len(values))
    got, changes = rows.decode_body(body, 0, len(body), len(values), schema, log_format)
    assert got.schema == schema.arrow
    assert same(rows_of_batch(got, schema), values)
    assert changes.tolist() == [4] * len(values)


@pytest.mark.parametrize(("encode", "decode"), CODECS)
@settings(max_examples=150, deadline=None)
@given(typed=_typed_rows(), damage=st.data())
def test_damaged_rows_are_refused_or_read_but_never_crash(
    encode: Any, decode: Any, typed: Any, damage: Any
) -> None:
    types, values = typed
    data = bytearray(encode(values[0], types))
    cut = damage.draw(st.integers(0, len(data)))
    for pos in damage.draw(st.lists(st.integers(0, max(len(data) - 1, 0)), max_size=3)):
        if data:
            data[pos] = damage.draw(st.integers(0, 255))
    view = memoryview(bytes(data))
    for end in (cut, len(data)):
        try:
            decode(view, 0, end, types)
        except CorruptRecordError:
            continue


@pytest.mark.parametrize("decode", [rows.decode_compacted, rows.decode_indexed])
@settings(max_examples=100, deadline=None)
@given(data=st.binary(max_size=80), types=st.lists(any_types, max_size=4))
def test_random_bytes_are_refused_or_read_but_never_crash(
    decode: Any, data: bytes, types: Any
) -> None:
    try:
        decode(memoryview(data), 0, len(data), types)
    except CorruptRecordError:
        return


@pytest.mark.parametrize(
    ("text", "data", "reason"),
    [
        ("INT", "00", "ends within a number"),
        ("INT", "00 0100", "1 bytes are left over"),
        ("INT", "00 808080808001", "more than 5 bytes"),
        ("INT", "00 ffffffff1f", "does not fit 32 bits"),
        ("BIGINT", "00 8080808080808080808001", "more than 10 bytes"),
        ("BIGINT", "00 ffffffffffffffffff02", "does not fit 64 bits"),
        ("BOOLEAN", "00 02", "neither 0 nor 1"),
        ("STRING", "00 02c328", "not UTF-8"),
        ("STRING", "00 ffffffff0f61", "4294967295 bytes are needed"),
        ("BINARY(2)", "00 03616161", "too many"),
        ("TIME(3)", "00 80b89929", "outside the day"),
        ("TIMESTAMP(6)", "00 00 c0843d", "0 to 999999"),
        ("DECIMAL(2, 0)", "00 64", "too many digits"),
        ("DECIMAL(30, 0)", "00 00", "1 to 16"),
        ("ARRAY<INT>", "00 04 ffffffff", "-1 elements"),
        ("ARRAY<INT>", "00 04 ffffff7f", "are needed"),
        ("ARRAY<INT>", "00 10 00000000 00000000 00000000 00000000", "left over"),
        ("ARRAY<STRING>", "00 10 01000000 00000000 61616161616161 88", "holds 7"),
        ("ARRAY<STRING>", "00 10 01000000 00000000 08000000 10000000", "variable part"),
        ("ARRAY<STRING>", "00 10 01000000 00000000 08000000 00000000", "variable part"),
        ("MAP<INT, INT>", "00 14 08000000 0000000000000000 0100000000000000", "are needed"),
        ("MAP<INT, INT>", "00 08 7fffffff 00000000", "are needed"),
        ("MAP<INT, INT>", "00 24 10000000 01000000 01000000 00000000 00000000"
         "01000000 00000000 00000000 00000000", "NULL key"),
        ("ROW<a INT>", "00 03 00 0101", "left over"),
    ],
)  # fmt: skip
def test_a_malformed_compacted_field_is_refused(text: str, data: str, reason: str) -> None:
    raw = bytes.fromhex(data)
    with pytest.raises(CorruptRecordError, match=reason) as caught:
        rows.decode_compacted(memoryview(raw), 0, len(raw), [parse_type(text)])
    assert "field 0" in str(caught.value) or "left over" in str(caught.value)


@pytest.mark.parametrize(
    ("text", "data", "reason"),
    [
        ("STRING", "00 ffffffff", "-1 bytes are needed"),
        ("STRING", "00 02000000 61", "2 bytes are needed"),
        ("STRING", "00 01000000 6161", "left over"),
        ("CHAR(2)", "00 61", "2 bytes are needed"),
        ("TIMESTAMP(9)", "00 0000000000000000 ffffffff", "0 to 999999"),
    ],
)
def test_a_malformed_indexed_field_is_refused(text: str, data: str, reason: str) -> None:
    raw = bytes.fromhex(data)
    with pytest.raises(CorruptRecordError, match=reason):
        rows.decode_indexed(memoryview(raw), 0, len(raw), [parse_type(text)])


def test_slots_that_share_bytes_are_refused() -> None:
    # else a small array could name one large value a thousand times
    shared = bytearray(
        slots.write_array(["eight by", "eight by"], parse_type("STRING"), rows.encode_compacted)
    )
    shared[16:24] = shared[8:16]
    with pytest.raises(CorruptRecordError, match="variable part"):
        slots.read_array(
            memoryview(shared), 0, len(shared), parse_type("STRING"), rows.decode_compacted
        )


@pytest.mark.parametrize(
    ("body", "count", "reason"),
    [
        ("", 1, "record 0 of 1"),
        ("03000000 00 0001", 0, "left over"),
        ("03000000 00 0001", 2, "record 1 of 2"),
        ("03000000 05 0001", 1, "change type 5"),
        ("00000000", 1, "1 bytes are needed"),
        ("ffffffff", 1, "-1 bytes"),
        ("04000000 00 0001", 1, "4 bytes are needed, 3 are left"),
        ("02000000 00 01", 1, "'c0' is NOT NULL"),
        ("01000000 00", 2**31 - 1, "record 0"),
    ],
)
def test_a_malformed_body_is_refused_with_the_record_named(
    body: str, count: int, reason: str
) -> None:
    raw = bytes.fromhex(body)
    with pytest.raises(CorruptRecordError, match=reason):
        rows.check_body(raw, 0, len(raw), count, _schema("INT NOT NULL"), "COMPACTED")


def test_a_body_that_leaves_its_buffer_is_refused() -> None:
    with pytest.raises(CorruptRecordError, match="leave the buffer"):
        rows.check_body(b"abc", 0, 9, 1, _schema("INT"), "COMPACTED")


def test_a_timestamp_beyond_arrow_is_named_when_decoded() -> None:
    schema = _schema("TIMESTAMP(9)")
    row = rows.encode_compacted([253_402_300_799_000 * 10**6], types_of(schema))
    body = struct.pack("<iB", len(row) + 1, 0) + row
    rows.check_body(body, 0, len(body), 1, schema, "COMPACTED")
    with pytest.raises(CorruptRecordError, match="column 'c0'"):
        rows.decode_body(body, 0, len(body), 1, schema, "COMPACTED")


def test_arrow_bodies_have_no_rows() -> None:
    with pytest.raises(ValueError, match="ARROW"):
        rows.check_body(b"", 0, 0, 0, _schema("INT"), "ARROW")


def test_text_that_does_not_fit_a_fixed_field_is_refused_when_written() -> None:
    with pytest.raises(ValueError, match="CHAR"):
        rows.encode_indexed(["ääää"], [parse_type("CHAR(4)")])


def test_an_empty_batch_is_an_empty_body() -> None:
    schema = _schema("INT", "ARRAY<STRING>")
    batch = pa.RecordBatch.from_pylist([], schema=schema.arrow)
    assert rows.encode_body(batch, schema, "COMPACTED") == b""
    got, changes = rows.decode_body(b"", 0, 0, 0, schema, "COMPACTED")
    assert got == batch
    assert len(changes) == 0
