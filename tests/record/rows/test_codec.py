"""Rows by the batch: the kernels against captured bytes and against their plain-Python twin."""

from __future__ import annotations

import struct
import subprocess
import sys
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.paths import ROOT
from tests.record.record_samples import (
    FIXTURES,
    SCALARS,
    any_types,
    fixture,
    json_row,
    nullable,
    same,
    table_schema,
    types_of,
    values_for,
)
from tests.record.rows import plain_rows as rows
from tests.record.rows.plain_values import batch_of_rows, rows_of_batch
from zufluss.errors import CorruptRecordError
from zufluss.model.ddl import parse_type
from zufluss.model.schema import Column, Schema
from zufluss.model.types import DataType
from zufluss.record.batch import row_body as rowbody
from zufluss.record.batch.kv import parse_kv_batches, parse_value_batch, split_values
from zufluss.record.kernels import row_write
from zufluss.record.keys.encoding import encode_keys
from zufluss.record.rows.codec import RowCodec, RowFormat
from zufluss.record.rows.plan import Plan
from zufluss.record.slices import ABSENT, Slices

FORMATS: list[RowFormat] = ["COMPACTED", "INDEXED"]
PUTS = sorted(p.stem for p in (FIXTURES / "put-kv").glob("*.json"))
ENCODE: dict[str, Any] = {"COMPACTED": rows.encode_compacted, "INDEXED": rows.encode_indexed}
DECODE: dict[str, Any] = {"COMPACTED": rows.decode_compacted, "INDEXED": rows.decode_indexed}


def schema_of(*types: str | DataType) -> Schema:
    parsed = [parse_type(ty) if isinstance(ty, str) else ty for ty in types]
    return Schema(tuple(Column(f"c{i}", ty) for i, ty in enumerate(parsed)))


def format_of(table: str) -> RowFormat:
    return "INDEXED" if "indexed" in table else "COMPACTED"


def json_rows(batch: pa.RecordBatch, schema: Schema) -> list[Any]:
    return [json_row(row, types_of(schema)) for row in rows_of_batch(batch, schema)]


def plain_batch(data: list[bytes], schema: Schema, row_format: str) -> pa.RecordBatch:
    """What the twin makes of rows, NOT NULL included."""
    body = b"".join(struct.pack("<iB", len(row) + 1, 0) + row for row in data)
    return rows.decode_body(body, 0, len(body), len(data), schema, row_format)[0]


def refused(data: str, *types: str, row_format: RowFormat = "COMPACTED") -> str:
    with pytest.raises(CorruptRecordError) as caught:
        RowCodec(schema_of(*types), row_format).locate(Slices.of([bytes.fromhex(data)]))
    return str(caught.value)


@pytest.mark.parametrize("name", PUTS)
def test_captured_kv_rows_decode_and_encode_byte_for_byte(name: str) -> None:
    expected, data = fixture(f"put-kv/{name}")
    schema = table_schema(expected["table"])
    codec = RowCodec(schema, format_of(name))
    (batch,) = parse_kv_batches(np.frombuffer(data, np.uint8), 0, len(data))
    there = batch.rows.take(np.flatnonzero(batch.rows.starts != ABSENT))
    decoded = codec.decode(there)
    decoded.validate(full=True)
    assert json_rows(decoded, schema) == [e["row"] for e in expected["expected"] if not e["delete"]]
    assert codec.encode(decoded).tolist() == there.tolist()
    located = codec.locate(batch.rows)
    key_columns = schema.indexes_of(schema.primary_key)
    assert codec.row_mismatch(located.rows, located.field_counts, key_columns, batch.keys) == -1


@pytest.mark.parametrize("name", ["kv_all-0", "kv_all-1", "kv_indexed-0", "kv_nested-0"])
def test_captured_lookup_values_decode_as_their_json_says(name: str) -> None:
    expected, _ = fixture(f"lookup/{name}")
    schema = table_schema(expected["table"])
    value = bytes.fromhex(expected["response"]["buckets_resp"][0]["values"][0]["values"])
    schema_ids, found = split_values(Slices.of([value]))
    assert schema_ids.tolist() == [1]
    batch = RowCodec(schema, format_of(name)).decode(found)
    assert json_rows(batch, schema) == [expected["expected"]]


def test_a_captured_limit_scan_decodes_as_its_json_says() -> None:
    expected, _ = fixture("limit-scan/kv_all-0")
    schema = table_schema(expected["table"])
    values = parse_value_batch(bytes.fromhex(expected["response"]["records"]))
    batch = RowCodec(schema).decode(split_values(values)[1])
    assert json_rows(batch, schema) == expected["expected"]


def test_the_measured_row_of_23_fields_reads_and_writes() -> None:
    # bytes that pyfluss wrote, with every nested shape
    schema = schema_of(
        *("INT", "BOOLEAN", "TINYINT", "SMALLINT", "INT", "BIGINT", "FLOAT", "DOUBLE", "STRING"),
        *("DECIMAL(10,2)", "DECIMAL(22,5)", "DATE", "TIME(0)", "TIMESTAMP(3)", "TIMESTAMP(6)"),
        *("BYTES", "BINARY(4)", "ARRAY<INT>", "ARRAY<STRING>", "MAP<STRING, INT>"),
        *("ROW<a INT, b INT>", "ARRAY<TIMESTAMP(6)>", "INT"),
    )
    data = bytes.fromhex(
        "000040 01 01 ff feff ffffffff0f ac02 0000c03f 00000000000004c0 026869"
        "83ffffffffffffffff01 0942ed123b0bd81f0e99 01 e807 e807 e8078827 020102 0461626364"
        "18 03000000 02000000 01000000 00000000 03000000 00000000"
        "28 02000000 00000000 73686f7274000085 0d00000018000000 6c6f6e6765722d7468616e2d37 000000"
        "24 10000000 01000000 00000000 6b00000000000081 01000000 00000000 09000000 00000000"
        "02 02 05 18 01000000 00000000 8813000010000000 e803000000000000"
    )
    codec = RowCodec(schema)
    batch = codec.decode(Slices.of([data]))
    assert json_rows(batch, schema) == [
        [
            *(1, True, -1, -2, -1, 300, 1.5, -2.5, "hi", "-1.25", "12345678901234567.12345"),
            *(1, 1000, {"ms": 1000, "ns": 0}, {"ms": 1000, "ns": 5000}),
            *({"hex": "0102"}, {"hex": "61626364"}, [1, None, 3], ["short", "longer-than-7"]),
            *({"keys": ["k"], "values": [9]}, [5, None], [{"ms": 1000, "ns": 5000}], None),
        ]
    ]
    assert codec.encode(batch).tolist() == [data]


@st.composite
def typed_rows(draw: st.DrawFn) -> tuple[list[DataType], list[tuple[Any, ...]]]:
    types = draw(st.lists(any_types, min_size=1, max_size=5))
    row = st.tuples(*map(nullable, types))
    return types, draw(st.lists(row, max_size=6))


@pytest.mark.parametrize("row_format", FORMATS)
@settings(max_examples=150, deadline=None)
@given(typed=typed_rows())
def test_kernels_read_and_write_the_bytes_of_the_twin(row_format: RowFormat, typed: Any) -> None:
    types, values = typed
    schema, codec = schema_of(*types), RowCodec(schema_of(*types), row_format)
    data = [ENCODE[row_format](row, types) for row in values]
    batch = codec.decode(Slices.of(data))
    batch.validate(full=True)
    assert batch.schema == schema.arrow
    assert same(rows_of_batch(batch, schema), values)
    assert codec.encode(batch).tolist() == data
    assert codec.encode(batch.slice(1, 3)).tolist() == data[1:4]
    assert codec.encode(batch_of_rows(values, schema)).tolist() == data


@pytest.mark.parametrize("row_format", FORMATS)
@settings(max_examples=200, deadline=None)
@given(typed=typed_rows(), damage=st.data())
def test_a_damaged_row_is_read_by_both_or_refused_by_both(
    row_format: RowFormat, typed: Any, damage: Any
) -> None:
    types, values = typed
    schema = schema_of(*types)
    codec = RowCodec(schema, row_format)
    for row in values[:2]:
        data = bytearray(ENCODE[row_format](row, types))
        for pos in damage.draw(st.lists(st.integers(0, max(len(data) - 1, 0)), max_size=2)):
            data[pos : pos + 1] = bytes([damage.draw(st.integers(0, 255))])
        for end in (len(data), damage.draw(st.integers(0, len(data)))):
            _same_verdict(bytes(data[:end]), schema, codec, row_format)


@pytest.mark.parametrize("row_format", FORMATS)
@settings(max_examples=150, deadline=None)
@given(data=st.binary(max_size=60), types=st.lists(any_types, min_size=1, max_size=3))
def test_random_bytes_are_read_by_both_or_refused_by_both(
    row_format: RowFormat, data: bytes, types: list[DataType]
) -> None:
    schema = schema_of(*types)
    _same_verdict(data, schema, RowCodec(schema, row_format), row_format)


def _same_verdict(data: bytes, schema: Schema, codec: RowCodec, row_format: str) -> None:
    try:
        expected = plain_batch([data], schema, row_format)
    except CorruptRecordError:
        with pytest.raises(CorruptRecordError):
            codec.decode(Slices.of([data]))
    else:
        got = codec.decode(Slices.of([data]))
        assert same(rows_of_batch(got, schema), rows_of_batch(expected, schema))


@pytest.mark.parametrize("row_format", FORMATS)
@settings(max_examples=80, deadline=None)
@given(typed=typed_rows(), damage=st.data())
def test_a_damaged_body_is_accepted_by_both_or_refused_by_both(
    row_format: RowFormat, typed: Any, damage: Any
) -> None:
    types, values = typed
    schema = schema_of(*types)
    records = [ENCODE[row_format](row, types) for row in values]
    body = bytearray(b"".join(struct.pack("<iB", len(r) + 1, 2) + r for r in records))
    for pos in damage.draw(st.lists(st.integers(0, max(len(body) - 1, 0)), max_size=1)):
        body[pos : pos + 1] = bytes([damage.draw(st.integers(0, 255))])
    span = (0, len(body), damage.draw(st.sampled_from([len(values), len(values), 1])))
    codec, raw = RowCodec(schema, row_format), np.frombuffer(bytes(body), np.uint8)
    try:
        rows.check_body(bytes(body), *span, schema, row_format)
    except CorruptRecordError:
        with pytest.raises(CorruptRecordError):
            rowbody.check_body(raw, *span, codec)
    else:
        rowbody.check_body(raw, *span, codec)


@pytest.mark.parametrize("row_format", FORMATS)
@settings(max_examples=80, deadline=None)
@given(typed=typed_rows(), with_kinds=st.booleans())
def test_a_body_has_the_bytes_of_the_plain_twin_and_reads_back(
    row_format: RowFormat, typed: Any, with_kinds: bool
) -> None:
    types, values = typed
    schema = schema_of(*types)
    batch = batch_of_rows(values, schema)
    kinds = np.arange(len(values), dtype=np.uint8) % 5 if with_kinds else None
    body = rowbody.encode_body(batch, schema, row_format, kinds)
    assert body == rows.encode_body(batch, schema, row_format, kinds)
    found, changes = rowbody.decode_body(body, 0, len(body), batch.num_rows, schema, row_format)
    assert same(rows_of_batch(found, schema), rows_of_batch(batch, schema))
    assert changes.tolist() == ([0] * len(values) if kinds is None else kinds.tolist())


@pytest.mark.parametrize(
    ("body", "count", "reason"),
    [
        ("03000000 00 0001", 0, "left over"),
        ("03000000 00 0001 0000000000", 2, "record 1 of 2"),
        ("03000000 05 0001", 1, "change type 5"),
        ("04000000 00 0001", 1, "record 0 of 1"),
        ("02000000 00 01", 1, "NOT NULL"),
        ("01000000 00", 2**31 - 1, "room for 1"),
        ("01000000 00", -1, "room for 1"),
    ],
)
def test_a_malformed_body_is_refused_with_its_reason(body: str, count: int, reason: str) -> None:
    raw = np.frombuffer(bytes.fromhex(body), np.uint8)
    codec = RowCodec(schema_of("INT NOT NULL"))
    with pytest.raises(CorruptRecordError, match=reason):
        rowbody.check_body(raw, 0, len(raw), count, codec)
    with pytest.raises(CorruptRecordError, match="leave the buffer"):
        rowbody.check_body(raw, 0, len(raw) + 1, 1, codec)


@pytest.mark.parametrize("row_format", FORMATS)
def test_a_row_of_an_older_schema_has_nulls_in_the_columns_added_later(
    row_format: RowFormat,
) -> None:
    # nine columns: the older rows have fewer bytes of null bits and fewer lengths, too
    types = [*["STRING"] * 3, *["INT"] * 5, "STRING", "ARRAY<INT>", "BOOLEAN"]
    schema = schema_of(*types)
    values = ("a", None, "c", 1, 2, 3, 4, 5, "i", [6], True)
    counts = np.array([3, 11, 8, 1], np.int32)
    parsed = types_of(schema)
    data = [ENCODE[row_format](values[:n], parsed[:n]) for n in counts]
    codec = RowCodec(schema, row_format)
    batch = codec.decode(Slices.of(data), counts)
    expected = [values[:n] + (None,) * (11 - n) for n in counts.tolist()]
    assert rows_of_batch(batch, schema) == expected
    with pytest.raises(CorruptRecordError, match="record 0: 12 fields are claimed"):
        codec.locate(Slices.of(data), counts + 9)


def test_an_absent_row_is_all_null_and_has_no_key() -> None:
    schema = schema_of("INT NOT NULL", "STRING", "ROW<a INT NOT NULL>", "BINARY(2)")
    codec = RowCodec(schema)
    row = rows.encode_compacted([7, "x", (1,), b"ab"], types_of(schema))
    located = codec.locate(Slices.of([None, row, None]))
    assert [column.null_count for column in codec.columns(located).columns] == [2, 2, 2, 2]
    assert (
        codec.row_mismatch(
            located.rows, located.field_counts, [0], Slices.of([b"?", b"\x07", b"?"])
        )
        == -1
    )


def test_a_selection_takes_rows_in_its_order() -> None:
    schema = schema_of("INT", "ARRAY<STRING>")
    codec = RowCodec(schema)
    batch = batch_of_rows([(1, ["a"]), (2, None), (3, ["b", None])], schema)
    located = codec.locate(codec.encode(batch))
    chosen = codec.columns(located, np.array([2, 0, 0]))
    assert rows_of_batch(chosen, schema) == [(3, ["b", None]), (1, ["a"]), (1, ["a"])]


def test_rows_may_lie_anywhere_in_a_buffer() -> None:
    codec = RowCodec(schema_of("INT", "STRING"))
    data = np.frombuffer(bytes.fromhex("ffff 00 05 0161 ff 01 0162 ff"), np.uint8)
    slices = Slices(data, np.array([7, 2]), np.array([10, 6]))
    assert codec.decode(slices).to_pylist() == [{"c0": None, "c1": "b"}, {"c0": 5, "c1": "a"}]
    for start, end in ((-2, 3), (3, 2), (2, 99)):
        with pytest.raises(CorruptRecordError, match="record 0: it does not lie within"):
            codec.locate(Slices(data, np.array([start]), np.array([end])))


KEY_TYPES = [ty.as_nullable(False) for ty in SCALARS]


@pytest.mark.parametrize("row_format", FORMATS)
@settings(max_examples=150, deadline=None)
@given(data=st.data(), types=st.lists(st.sampled_from(KEY_TYPES), min_size=1, max_size=4))
def test_a_key_belongs_to_its_row_and_to_no_other(
    row_format: RowFormat, data: Any, types: list[DataType]
) -> None:
    schema, codec = schema_of(*types), RowCodec(schema_of(*types), row_format)
    columns = data.draw(st.permutations(range(len(types))))
    values = data.draw(st.lists(st.tuples(*map(values_for, types)), min_size=1, max_size=4))
    batch = batch_of_rows(values, schema)
    encoded = encode_keys(batch, [f"c{i}" for i in columns], "compacted")
    keys = Slices.contiguous(*encoded)
    located = codec.locate(codec.encode(batch))
    assert codec.row_mismatch(located.rows, located.field_counts, columns, keys) == -1
    foreign = keys.tolist()
    at = data.draw(st.integers(0, len(values) - 1))
    changed = bytearray(foreign[at] or b"")
    changed[data.draw(st.integers(0, len(changed) - 1))] ^= data.draw(st.integers(1, 255))
    for wrong in (bytes(changed), bytes(foreign[at] or b"")[:-1], (foreign[at] or b"") + b"\0"):
        other: list[bytes | None] = [*foreign]
        other[at] = wrong
        assert (
            codec.row_mismatch(located.rows, located.field_counts, columns, Slices.of(other)) == at
        )


def test_a_key_in_a_longer_form_is_not_the_key_of_its_row() -> None:
    # the row may have it, but then one row would have two keys
    codec = RowCodec(schema_of("INT NOT NULL", "DECIMAL(20, 0) NOT NULL"))
    located = codec.locate(Slices.of([bytes.fromhex("00 8700 020005")]))
    assert (
        codec.row_mismatch(
            located.rows, located.field_counts, [0, 1], Slices.of([bytes.fromhex("07 0105")])
        )
        == -1
    )
    assert (
        codec.row_mismatch(
            located.rows, located.field_counts, [0, 1], Slices.of([bytes.fromhex("8700 0105")])
        )
        == 0
    )
    assert (
        codec.row_mismatch(
            located.rows, located.field_counts, [0, 1], Slices.of([bytes.fromhex("07 020005")])
        )
        == 0
    )
    assert codec.row_mismatch(located.rows, located.field_counts, [0, 1], Slices.of([None])) == 0
    with pytest.raises(ValueError, match="2 keys do not belong to 1 rows"):
        codec.row_mismatch(located.rows, located.field_counts, [0], Slices.of([b"a", b"b"]))


def test_a_fault_names_the_record_and_the_field_at_every_depth() -> None:
    assert "record 0: field 1 (INT NOT NULL)" in refused("02 05", "INT", "INT NOT NULL")
    nested = "ARRAY<ROW<a INT, b STRING>>"
    codec = RowCodec(schema_of("INT", nested))
    bad = rows.encode_compacted([1, [(1, "fine"), (2, "damaged")]], types_of(codec.schema))
    good = rows.encode_compacted([1, [(1, "fine")]], types_of(codec.schema))
    with pytest.raises(CorruptRecordError) as caught:
        codec.locate(Slices.of([good, bad.replace(b"damaged", b"\xffamaged"), good]))
    text = str(caught.value)
    assert f"record 1: field 1 ({nested}): field 0 (ROW" in text
    assert "field 1 (STRING): text is not UTF-8 at its byte 0" in text


@pytest.mark.parametrize(
    ("text", "data"),
    [
        ("ARRAY<INT NOT NULL>", "00 0c 01000000 01000000 00000000"),
        ("ROW<a INT NOT NULL>", "00 01 01"),
        ("MAP<INT, INT NOT NULL>", "00 24 10000000 01000000 00000000 00000000 00000000"
         "01000000 01000000 00000000 00000000"),
    ],
)  # fmt: skip
def test_not_null_holds_inside_nested_values(text: str, data: str) -> None:
    raw = bytes.fromhex(data)
    assert "NOT NULL" in refused(data, text)
    with pytest.raises(CorruptRecordError, match="NOT NULL"):
        rows.decode_compacted(memoryview(raw), 0, len(raw), [parse_type(text)])


def test_a_map_of_unequal_arrays_is_refused() -> None:
    data = "00 1c 08000000 0000000000000000 01000000 00000000 0000000000000000"
    assert "0 keys" in refused(data, "MAP<INT, INT>")


@pytest.mark.parametrize(("text", "unit"), [("TIMESTAMP(6)", 1000), ("TIMESTAMP(9)", 1)])
def test_the_last_timestamps_of_arrow_are_read_and_their_neighbours_refused(
    text: str, unit: int
) -> None:
    schema = schema_of(text)
    for number, fits in (
        (2**63 - 1, True),
        (-(2**63), True),
        (2**63, False),
        (-(2**63) - 1, False),
    ):
        data = rows.encode_compacted([number * unit], types_of(schema))
        _same_verdict(data, schema, RowCodec(schema), "COMPACTED")
        if fits:
            got = RowCodec(schema).decode(Slices.of([data])).column(0)
            assert got.cast(pa.int64()).to_pylist() == [number]


@pytest.mark.parametrize("text", ["TIMESTAMP(9)", "ARRAY<TIMESTAMP(9)>"])
def test_a_timestamp_beyond_arrow_is_sound_but_has_no_column(text: str) -> None:
    # other clients may keep it in rows; only the Arrow form cannot be had
    codec = RowCodec(schema_of(text))
    year_9999 = 253_402_300_799_000 * 10**6
    value = [year_9999] if "ARRAY" in text else year_9999
    located = codec.locate(Slices.of([rows.encode_compacted([value], types_of(codec.schema))]))
    with pytest.raises(CorruptRecordError, match="beyond what Arrow holds"):
        codec.columns(located)


def test_a_value_that_its_type_cannot_hold_is_refused_when_written() -> None:
    wide = pa.array([10**5], pa.int32()).cast(pa.decimal128(10, 0)).view(pa.decimal128(3, 0))
    big = pa.array([10**5], pa.int32()).cast(pa.decimal128(10, 0)).view(pa.decimal128(20, 0))
    for text, array, row_format in (
        ("DECIMAL(3, 0)", wide, "COMPACTED"),
        ("ARRAY<DECIMAL(3, 0)>", pa.ListArray.from_arrays([0, 1], wide), "COMPACTED"),
        ("CHAR(4)", pa.array(["ääää"]), "INDEXED"),
    ):
        batch = pa.RecordBatch.from_arrays([array], names=["c0"])
        with pytest.raises(ValueError, match=r"column 0 \((DECIMAL|CHAR)"):
            RowCodec(schema_of(text), row_format).encode(batch)  # type: ignore[arg-type]
    fine = pa.RecordBatch.from_arrays([big], names=["c0"])
    assert RowCodec(schema_of("DECIMAL(20, 0)")).encode(fine).count == 1


def test_a_batch_of_other_columns_is_refused_and_other_types_are_cast() -> None:
    codec = RowCodec(schema_of("BIGINT", "STRING"))
    with pytest.raises(ValueError, match="columns x, c1 are not the schema's c0, c1"):
        codec.encode(pa.RecordBatch.from_pydict({"x": [1], "c1": ["a"]}))
    cast = pa.RecordBatch.from_pydict({"c0": pa.array([1], pa.int32()), "c1": ["a"]})
    assert codec.encode(cast).tolist() == [bytes.fromhex("00 01 0161")]


def test_arrow_offsets_that_leave_their_bytes_are_refused() -> None:
    codec = RowCodec(schema_of("STRING"))
    offsets = pa.py_buffer(struct.pack("<3i", 0, 9, 2))  # pyarrow looks at the last one only
    array = pa.Array.from_buffers(pa.utf8(), 2, [None, offsets, pa.py_buffer(b"12345678")], 0)
    with pytest.raises(ValueError, match="leave its bytes"):
        codec.encode(pa.RecordBatch.from_arrays([array], names=["c0"]))


@pytest.mark.parametrize(
    ("text", "column", "value"),
    [
        ("BIGINT", row_write.VALUES_SIZE, 15),
        ("BIGINT", row_write.VALID_SIZE, 0),
        ("STRING", row_write.VALUES_SIZE, 11),
        ("STRING", row_write.BODY_SIZE, 1),
        ("DECIMAL(9, 2)", row_write.VALUES_SIZE, 31),
        ("BINARY(3)", row_write.VALUES_SIZE, 5),
    ],
)
def test_arrow_buffers_that_are_too_small_are_refused(text: str, column: int, value: int) -> None:
    # pyarrow validates most arrays when it makes them, the kernel relies on none
    offsets = np.array([0, 1, 2], np.int32)
    table = np.zeros((2, row_write.COLUMN), np.int64)
    table[0, :6] = (offsets.ctypes.data, 1, offsets.ctypes.data, 32, 0, 2)
    program = Plan([parse_type(text)], "COMPACTED").program
    assert row_write.measure(program, table, 2)[0] == 0
    table[0, column] = value
    assert row_write.measure(program, table, 2)[0] in (row_write.BAD_BUFFER, row_write.BAD_OFFSETS)


def test_an_unknown_row_format_is_refused() -> None:
    with pytest.raises(ValueError, match="'ARROW' is none of INDEXED, COMPACTED"):
        RowCodec(schema_of("INT"), "ARROW")  # type: ignore[arg-type]


@pytest.mark.slow
def test_no_kernel_leaves_the_bytes_of_damaged_rows() -> None:
    command = [sys.executable, "-m", "tests.record.guard_rows"]
    root = ROOT
    done = subprocess.run(command, cwd=root, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    assert int(done.stdout) > 1000
