"""Types keep their meaning through JSON, text and Arrow."""

from __future__ import annotations

import contextlib
import json

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.model.model_strategies import SCALARS, TYPES
from zufluss.errors import InvalidTableError
from zufluss.model import types as t
from zufluss.model.arrow_types import from_arrow
from zufluss.model.ddl import parse_type
from zufluss.model.types import from_json


@given(TYPES)
@settings(max_examples=150)
def test_a_type_survives_json(data_type: t.DataType) -> None:
    assert from_json(json.loads(json.dumps(data_type.to_json()))) == data_type


@given(TYPES)
@settings(max_examples=150)
def test_the_text_of_a_type_parses_back_to_it(data_type: t.DataType) -> None:
    assert parse_type(str(data_type)) == data_type


@given(SCALARS)
@settings(max_examples=100)
def test_a_scalar_comes_back_from_arrow_with_its_unit(data_type: t.DataType) -> None:
    back = from_arrow(data_type.to_arrow(), data_type.nullable)
    assert back.to_arrow() == data_type.to_arrow()
    assert back.nullable == data_type.nullable


@pytest.mark.parametrize(
    ("text", "arrow"),
    [
        ("BOOLEAN", pa.bool_()),
        ("TINYINT", pa.int8()),
        ("SMALLINT", pa.int16()),
        ("INT", pa.int32()),
        ("BIGINT", pa.int64()),
        ("FLOAT", pa.float32()),
        ("DOUBLE", pa.float64()),
        ("CHAR(3)", pa.utf8()),
        ("STRING", pa.utf8()),
        ("BYTES", pa.binary()),
        ("BINARY(4)", pa.binary(4)),
        ("DECIMAL(10, 2)", pa.decimal128(10, 2)),
        ("DATE", pa.date32()),
        ("TIME(0)", pa.time32("s")),
        ("TIME(3)", pa.time32("ms")),
        ("TIME(4)", pa.time64("us")),
        ("TIME(9)", pa.time64("ns")),
        ("TIMESTAMP(0)", pa.timestamp("s")),
        ("TIMESTAMP(1)", pa.timestamp("ms")),
        ("TIMESTAMP(6)", pa.timestamp("us")),
        ("TIMESTAMP_LTZ(7)", pa.timestamp("ns", "UTC")),
        ("ARRAY<INT>", pa.list_(pa.field("item", pa.int32()))),
        ("MAP<STRING, INT>", pa.map_(pa.utf8(), pa.int32())),
        ("ROW<a INT NOT NULL>", pa.struct([pa.field("a", pa.int32(), nullable=False)])),
    ],
)
def test_each_type_has_the_arrow_layout_that_clients_expect(text: str, arrow: pa.DataType) -> None:
    assert parse_type(text).to_arrow() == arrow


@pytest.mark.parametrize(
    ("arrow", "text"),
    [
        (pa.uint8(), "TINYINT"),
        (pa.uint64(), "BIGINT"),
        (pa.large_utf8(), "STRING"),
        (pa.string_view(), "STRING"),
        (pa.large_binary(), "BYTES"),
        (pa.date64(), "DATE"),
        (pa.float16(), "FLOAT"),
        (pa.timestamp("ms", "Europe/Berlin"), "TIMESTAMP_LTZ(3)"),
        (pa.dictionary(pa.int32(), pa.utf8()), "STRING"),
        (pa.large_list(pa.int8()), "ARRAY<TINYINT>"),
        (pa.list_(pa.int8(), 3), "ARRAY<TINYINT>"),
        (pa.decimal256(20, 3), "DECIMAL(20, 3)"),
    ],
)
def test_other_arrow_types_map_to_the_nearest_type(arrow: pa.DataType, text: str) -> None:
    assert str(from_arrow(arrow)) == text


@pytest.mark.parametrize("arrow", [pa.null(), pa.duration("s"), pa.month_day_nano_interval()])
def test_an_arrow_type_without_a_counterpart_is_refused(arrow: pa.DataType) -> None:
    with pytest.raises(InvalidTableError, match=r"has no column type; .*cast it"):
        from_arrow(arrow)


@pytest.mark.parametrize(
    ("obj", "message"),
    [
        ({"type": "INT"}, "not known; allowed are BOOLEAN"),
        ({"type": "DECIMAL", "precision": 39, "scale": 0}, "from 1 to 38"),
        ({"type": "DECIMAL", "precision": 4, "scale": 5}, "from 0 to 4"),
        ({"type": "CHAR", "length": 0}, "length 0 of a CHAR"),
        ({"type": "CHAR", "length": "3"}, "length '3' of a CHAR"),
        ({"type": "TIME_WITHOUT_TIME_ZONE", "precision": 10}, "from 0 to 9"),
        ({"type": "ARRAY"}, "object with a 'type'"),
        ({"type": "ROW"}, "list of 'fields'"),
        ({"type": "ROW", "fields": [{"field_type": {"type": "INTEGER"}}]}, "with a 'name'"),
        ({"type": "STRING", "nullable": "no"}, "true or false"),
        ([], "object with a 'type'"),
        (None, "object with a 'type'"),
    ],
)
def test_a_malformed_type_is_refused_with_what_is_allowed(obj: object, message: str) -> None:
    with pytest.raises(InvalidTableError, match=message):
        from_json(obj)


def test_absent_parameters_take_their_defaults_and_unknown_keys_are_ignored() -> None:
    assert from_json({"type": "TIME_WITHOUT_TIME_ZONE", "x": 1}) == parse_type("TIME(0)")
    assert from_json({"type": "TIMESTAMP_WITHOUT_TIME_ZONE"}) == parse_type("TIMESTAMP(6)")
    assert from_json({"type": "BINARY"}) == parse_type("BINARY(1)")


def test_types_nested_without_end_are_refused_and_do_not_exhaust_the_stack() -> None:
    deep: dict[str, object] = {"type": "INTEGER"}
    for _ in range(200):
        deep = {"type": "ARRAY", "element_type": deep}
    with pytest.raises(InvalidTableError, match="nested deeper than 64"):
        from_json(deep)
    with pytest.raises(InvalidTableError, match="nested deeper than 64"):
        parse_type("ARRAY<" * 200 + "INT" + ">" * 200)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "INT INT",
        "NUMBER",
        "DECIMAL(1,2,3)",
        "ARRAY<INT",
        "MAP<INT>",
        "ROW<>",
        "CHAR(",
        "INT NOT",
        "DECIMAL(99999999999999999999999, 1)",
        "CHAR(0)",
        "`INT`",
        "1",
        "§",
    ],
)
def test_text_that_is_no_type_is_refused(text: str) -> None:
    with pytest.raises(InvalidTableError):
        parse_type(text)


@given(st.text(max_size=40))
@settings(max_examples=100)
def test_no_text_breaks_the_parser(text: str) -> None:
    with contextlib.suppress(InvalidTableError):
        parse_type(text)


def test_words_are_case_insensitive_and_have_aliases() -> None:
    assert parse_type("integer not null") == parse_type("INT NOT NULL")
    assert parse_type("row<`a b` bool, C string null>") == t.RowType(
        fields=(t.RowField("a b", t.BOOLEAN), t.RowField("C", t.STRING))
    )
