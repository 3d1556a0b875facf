"""Key encodings: measured keys, the kernels against the plain twin, buckets of a table."""

from __future__ import annotations

import itertools
import json
from decimal import Decimal
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.record.keys.plain import encode_key
from tests.record.keys.plain_hash import bucket_id
from tests.record.record_samples import FIXTURES, SCALARS, values_for
from tests.record.rows.plain_values import batch_of_rows
from zufluss.errors import InvalidTableError
from zufluss.model.ddl import parse_type
from zufluss.model.schema import Column, Schema
from zufluss.model.table import TableDescriptor, TableInfo, TablePath
from zufluss.model.types import DataType, Root
from zufluss.record.keys.encoding import KeyEncodingError, bucket_assign, encode_keys
from zufluss.record.keys.hudi import java_text, string_hash

VECTORS = json.loads((FIXTURES / "bucket-ids.json").read_text())
ENCODINGS = {"fluss": "compacted"}
ICEBERG = [
    ty
    for ty in SCALARS
    if ty.root not in (Root.BOOLEAN, Root.TINYINT, Root.SMALLINT, Root.TIMESTAMP_LTZ)
]
HUDI = [ty for ty in SCALARS if ty.root not in (Root.BYTES, Root.BINARY)]


def _split(data: np.ndarray, offsets: np.ndarray) -> list[bytes]:
    return [data[a:b].tobytes() for a, b in itertools.pairwise(offsets)]


def _value(raw: Any, data_type: DataType) -> Any:
    if isinstance(raw, dict):
        return bytes.fromhex(raw["hex"]) if "hex" in raw else raw["ms"] * 10**6 + raw["ns"]
    return Decimal(raw) if data_type.root is Root.DECIMAL else raw


def _schema(types: list[DataType]) -> Schema:
    return Schema(tuple(Column(f"k{i}", ty) for i, ty in enumerate(types)))


def _types(text: str) -> list[DataType]:
    """The types of a list such as `INT, DECIMAL(10, 2)`."""
    return [parse_type(part) for part in text.replace(", ", "\0").replace("(10\0", "(10, ")
            .replace("(30\0", "(30, ").split("\0")]  # fmt: skip


@pytest.mark.parametrize("vector", VECTORS, ids=lambda v: f"{v['format']}-{v['types']}-{v['key']}")
def test_every_measured_key_encodes_as_java_wrote_it(vector: Any) -> None:
    # the lake reads these bytes, and the bucket hash hangs on every one of them
    types = _types(vector["types"])
    schema = _schema(types)
    values = [_value(raw, ty) for raw, ty in zip(vector["key"], types, strict=True)]
    batch = batch_of_rows([values, values], schema)
    encoding = ENCODINGS.get(vector["format"], vector["format"])
    expected = bytes.fromhex(vector["encoded"])
    assert _split(*encode_keys(batch, schema.names, encoding)) == [expected, expected]
    assert encode_key(batch, 1, schema.names, encoding) == expected


@st.composite
def _batches(draw: st.DrawFn, types: list[DataType], columns: int) -> tuple[pa.RecordBatch, Schema]:
    chosen = draw(st.lists(st.sampled_from(types), min_size=1, max_size=columns))
    schema = _schema(chosen)
    row = st.tuples(*map(values_for, chosen))
    rows = draw(st.lists(row, max_size=5))
    return batch_of_rows(rows, schema).slice(draw(st.integers(0, 1))), schema


def _check_twin(batch: pa.RecordBatch, schema: Schema, encoding: Any) -> None:
    keys = _split(*encode_keys(batch, schema.names, encoding))
    assert keys == [encode_key(batch, i, schema.names, encoding) for i in range(batch.num_rows)]


@pytest.mark.parametrize("encoding", ["compacted", "paimon"])
@settings(max_examples=120, deadline=None)
@given(drawn=_batches(SCALARS, 4))
def test_the_kernels_equal_the_plain_twin(encoding: str, drawn: Any) -> None:
    _check_twin(*drawn, encoding)


@settings(max_examples=80, deadline=None)
@given(drawn=_batches(ICEBERG, 1))
def test_iceberg_keys_equal_the_plain_twin_or_are_refused_alike(drawn: Any) -> None:
    batch, schema = drawn
    if any(value in ("", b"") for value in batch.column(0).to_pylist()):
        with pytest.raises(KeyEncodingError, match="empty"):
            encode_keys(batch, schema.names, "iceberg")
    else:
        _check_twin(batch, schema, "iceberg")


def test_iceberg_rounds_nanoseconds_before_1970_down() -> None:
    schema = _schema([parse_type("TIMESTAMP(9)")])
    batch = batch_of_rows([[-1], [-1001], [1999]], schema)
    _check_twin(batch, schema, "iceberg")


@settings(max_examples=60, deadline=None)
@given(drawn=_batches(HUDI, 3))
def test_hudi_keys_equal_the_plain_twin_or_are_refused(drawn: Any) -> None:
    batch, schema = drawn
    texts = [v for column in batch for v in column.to_pylist() if isinstance(v, str)]
    if batch.num_columns > 1 and any("," in text for text in texts):
        with pytest.raises(InvalidTableError, match="comma"):
            encode_keys(batch, schema.names, "hudi")
    else:
        _check_twin(batch, schema, "hudi")


def test_a_key_of_60_columns_has_a_longer_paimon_header() -> None:
    schema = _schema([parse_type("INT")] * 60)
    batch = batch_of_rows([list(range(60))], schema)
    _check_twin(batch, schema, "paimon")
    data, _ = encode_keys(batch, schema.names, "paimon")
    assert len(data) == 16 + 8 * 60


@pytest.mark.parametrize("encoding", ["compacted", "paimon", "iceberg", "hudi"])
def test_a_null_in_a_key_is_refused_by_the_columns_name(encoding: Any) -> None:
    batch = pa.RecordBatch.from_pydict({"id": pa.array([1, None], pa.int32())})
    with pytest.raises(KeyEncodingError, match="'id' has 1 NULL"):
        encode_keys(batch, ["id"], encoding)


def test_columns_that_cannot_be_keys_are_refused_by_name() -> None:
    batch = pa.RecordBatch.from_pydict({"a": [[1]], "b": ["x"], "s": pa.array([1], pa.int16())})
    with pytest.raises(KeyEncodingError, match="'a'"):
        encode_keys(batch, ["a"], "compacted")
    with pytest.raises(KeyEncodingError, match="'z'"):
        encode_keys(batch, ["z"], "compacted")
    with pytest.raises(KeyEncodingError, match="one column"):
        encode_keys(batch, ["a", "b"], "iceberg")
    with pytest.raises(KeyEncodingError, match="SMALLINT"):
        encode_keys(batch, ["s"], "iceberg")
    with pytest.raises(InvalidTableError, match="BYTES"):
        encode_keys(pa.RecordBatch.from_pydict({"x": [b"1"]}), ["x"], "hudi")


@pytest.mark.parametrize("value", ["a,b", "__null__", "__empty__"])
def test_hudi_refuses_what_it_could_not_take_apart_again(value: str) -> None:
    batch = pa.RecordBatch.from_pydict({"a": [value], "b": [1]})
    assert len(_split(*encode_keys(batch, ["a"], "hudi"))) == 1
    with pytest.raises(InvalidTableError, match="several columns"):
        encode_keys(batch, ["a", "b"], "hudi")


@pytest.mark.parametrize(
    ("text", "value", "expected"),
    [
        ("DOUBLE", 1e7, "1.0E7"),
        ("DOUBLE", 9999999.0, "9999999.0"),
        ("DOUBLE", 0.001, "0.001"),
        ("DOUBLE", 0.0009, "9.0E-4"),
        ("DOUBLE", -0.0, "-0.0"),
        ("DOUBLE", float("nan"), "NaN"),
        ("DOUBLE", float("-inf"), "-Infinity"),
        ("FLOAT", 0.1, "0.1"),
        ("FLOAT", 3.4028234663852886e38, "3.4028235E38"),
        ("DECIMAL(30, 10)", Decimal("-1E-10"), "-0.0000000001"),
        ("TIMESTAMP(3)", 0, "1970-01-01T00:00"),
        ("TIMESTAMP(3)", -(10**9), "1969-12-31T23:59:59"),
        ("TIMESTAMP(9)", 1, "1970-01-01T00:00:00.000000001"),
        ("TIMESTAMP(6)", 123_456_000, "1970-01-01T00:00:00.123456"),
        ("TIMESTAMP_LTZ(3)", 0, "1970-01-01T00:00:00Z"),
        ("TIMESTAMP_LTZ(3)", 500_000_000, "1970-01-01T00:00:00.500Z"),
    ],
)
def test_values_are_written_as_java_writes_them(text: str, value: Any, expected: str) -> None:
    assert java_text(value, parse_type(text)) == expected


def test_texts_outside_the_basic_plane_hash_by_their_surrogates() -> None:
    assert string_hash("😀") == 0xD83D * 31 + 0xDE00


def _info(properties: dict[str, str], bucket_keys: tuple[str, ...]) -> TableInfo:
    descriptor = TableDescriptor(
        schema=_schema([parse_type("INT"), parse_type("STRING")]),
        comment=None,
        partition_keys=(),
        bucket_keys=bucket_keys,
        bucket_count=16,
        properties=properties,
        custom_properties={},
    )
    return TableInfo(TablePath("db", "t"), 1, 1, descriptor, 0, 0)


@pytest.mark.parametrize(
    ("lake", "encoding"),
    [(None, "compacted"), ("LANCE", "compacted"), ("paimon", "paimon"), ("iceberg", "iceberg"),
     ("hudi", "hudi")],
)  # fmt: skip
def test_rows_land_in_the_bucket_of_the_tables_lake(lake: str | None, encoding: Any) -> None:
    info = _info({} if lake is None else {"table.datalake.format": lake}, ("k0",))
    batch = batch_of_rows([[1, "a"], [300, "b"], [-7, "c"]], info.schema)
    kind = None if lake is None else lake.lower()
    expected = [bucket_id(encode_key(batch, i, ["k0"], encoding), 16, kind) for i in range(3)]
    assert bucket_assign(batch, info).tolist() == expected


def test_the_java_hash_is_a_choice_and_300_shows_it() -> None:
    info = _info({}, ("k0",))
    batch = batch_of_rows([[300, "b"]], info.schema)
    assert bucket_assign(batch, info).tolist() == [11]
    assert bucket_assign(batch, info, "java").tolist() == [5]


def test_tables_without_a_bucket_key_or_with_an_unknown_lake_are_refused() -> None:
    batch = batch_of_rows([[1, "a"]], _info({}, ()).schema)
    with pytest.raises(KeyEncodingError, match="no bucket key"):
        bucket_assign(batch, _info({}, ()))
    with pytest.raises(KeyEncodingError, match="delta"):
        bucket_assign(batch, _info({"table.datalake.format": "delta"}, ("k0",)))
