"""Keys as users write them on the command line."""

from __future__ import annotations

import datetime as dt
from decimal import Decimal

import pyarrow as pa
import pytest

from zufluss.cli.keys import key_text, keys_batch

ONE = pa.schema([pa.field("id", pa.int64(), nullable=False)])
TEXT = pa.schema([pa.field("name", pa.string(), nullable=False)])
TWO = pa.schema([("customer", pa.int32()), ("name", pa.string())])


def keys(schema: pa.Schema, *texts: str) -> list[tuple[object, ...]]:
    return [tuple(row.values()) for row in keys_batch(texts, schema).to_pylist()]


def test_a_key_of_one_column_is_its_value_with_or_without_the_name() -> None:
    assert keys(ONE, "7", "id=8", "-9") == [(7,), (8,), (-9,)]


def test_a_text_key_of_one_column_is_taken_as_it_stands() -> None:
    assert keys(TEXT, 'a,"b"', "name=a=b", "x=y", "") == [('a,"b"',), ("a=b",), ("x=y",), ("",)]


def test_a_key_of_several_columns_goes_by_order_or_by_name() -> None:
    assert keys(TWO, "1,a", "name=b, customer=2", '3,"x, y"', '"name=x, y",customer=4') == [
        (1, "a"),
        (2, "b"),
        (3, "x, y"),
        (4, "x, y"),
    ]


def test_values_have_the_forms_of_json_output() -> None:
    schema = pa.schema(
        [
            ("flag", pa.bool_()),
            ("day", pa.date32()),
            ("at", pa.timestamp("ms")),
            ("price", pa.decimal128(10, 2)),
            ("raw", pa.binary()),
        ]
    )
    (row,) = keys(schema, "true,2026-01-31,2026-01-31T08:00:00.125,-1.25,AAE=")
    assert row == (
        True,
        dt.date(2026, 1, 31),
        dt.datetime(2026, 1, 31, 8, 0, 0, 125_000),
        Decimal("-1.25"),
        b"\0\1",
    )


@pytest.mark.parametrize(
    ("schema", "text", "message"),
    [
        (ONE, "seven", "key column id .int64.*seven"),
        (ONE, "99999999999999999999", "key column id"),
        (TWO, "7", "has 1 values; the key is customer, name: write customer=…,name=…"),
        (TWO, "1,2,3", "has 3 values"),
        (TWO, "", "has 0 values"),
        (pa.schema([("raw", pa.binary())]), "no base64", "key column raw"),
    ],
)
def test_an_invalid_key_is_refused_with_the_reason(
    schema: pa.Schema, text: str, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        keys_batch([text], schema)


def test_messages_name_keys_by_column() -> None:
    assert key_text({"customer": 7, "name": "a"}) == "customer=7, name=a"
