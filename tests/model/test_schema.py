"""Schemas: ids, keys, JSON, text, Arrow, evolution."""

from __future__ import annotations

import json

import pyarrow as pa
import pytest
from hypothesis import given, settings

from tests.model.model_strategies import schemas
from zufluss.errors import InvalidTableError
from zufluss.model import types as t
from zufluss.model.aggregate import AggFunction
from zufluss.model.ddl import parse_type
from zufluss.model.schema import Column, Schema, dump_object, dump_with
from zufluss.model.table import TableDescriptor


@given(schemas())
@settings(max_examples=100)
def test_a_schema_survives_json(schema: Schema) -> None:
    assert Schema.from_json(json.loads(schema.to_json_bytes())) == schema
    assert Schema.from_json(schema.to_json_bytes()) == schema


@given(schemas())
@settings(max_examples=100)
def test_the_text_of_a_schema_gives_the_same_schema(schema: Schema) -> None:
    assert Schema.of(str(schema)) == schema


@given(schemas())
@settings(max_examples=50)
def test_ids_are_unique_and_dense_when_the_schema_gives_them(schema: Schema) -> None:
    ids = [
        i
        for c in schema.columns
        for i in (
            c.id,
            *(
                f.field_id
                for x in t.walk(c.data_type)
                if isinstance(x, t.RowType)
                for f in x.fields
            ),
        )
    ]
    assert sorted(ids) == list(range(schema.highest_field_id + 1))


def test_row_fields_are_numbered_depth_first_before_the_next_column() -> None:
    schema = Schema.of(
        "a INT, r ROW<x ROW<y INT>, z ARRAY<ROW<w INT>>>, b MAP<INT, ROW<v INT>>, c INT"
    )
    assert schema.ids == (0, 1, 6, 8)
    row = schema.column("r").data_type
    assert isinstance(row, t.RowType)
    assert [field.field_id for field in row.fields] == [2, 4]
    assert schema.highest_field_id == 8


def test_ids_are_given_to_all_columns_or_to_none() -> None:
    with pytest.raises(InvalidTableError, match="column 'b' has no id while others have one"):
        Schema((Column("a", t.INTEGER, id=0), Column("b", t.INTEGER)))


def test_row_fields_without_ids_get_the_next_free_ones_when_columns_have_theirs() -> None:
    row = parse_type("ROW<x INT, y INT>")
    schema = Schema((Column("a", row, id=4), Column("b", t.INTEGER, id=2)), highest_field_id=9)
    assert schema.ids == (4, 2)
    made = schema.column("a").data_type
    assert isinstance(made, t.RowType)
    assert [field.field_id for field in made.fields] == [10, 11]
    assert schema.highest_field_id == 11


@pytest.mark.parametrize(
    ("columns", "message"),
    [
        (
            (Column("a", t.INTEGER, id=1), Column("b", t.INTEGER, id=1)),
            r"ids \[1\] are given twice",
        ),
        ((Column("a", t.INTEGER, id=-5),), "negative"),
        ((Column("a", t.INTEGER), Column("a", t.STRING)), "column a is given twice"),
        ((Column("", t.INTEGER),), "empty name"),
    ],
)
def test_bad_columns_are_refused(columns: tuple[Column, ...], message: str) -> None:
    with pytest.raises(InvalidTableError, match=message):
        Schema(columns)


def test_the_highest_id_is_kept_and_cannot_be_below_an_id_in_use() -> None:
    obj = Schema.of("a INT, b INT").to_json()
    assert Schema.from_json({**obj, "highest_field_id": 7}).highest_field_id == 7
    with pytest.raises(InvalidTableError, match="highest_field_id 0 is below the id 1"):
        Schema.from_json({**obj, "highest_field_id": 0})


def test_primary_key_columns_become_not_null() -> None:
    schema = Schema.of("a INT, b STRING", primary_key=["b"])
    assert [c.data_type.nullable for c in schema.columns] == [True, False]
    assert schema.arrow.field("b").nullable is False


@pytest.mark.parametrize(
    ("key", "auto", "message"),
    [
        (["x"], [], "primary key column 'x' does not exist; the columns are a, b, c"),
        (["a", "a"], [], "primary key column a is given twice"),
        (["a"], ["x"], "auto-increment column 'x' does not exist"),
        ([], ["b"], "needs a primary key"),
        (["a"], ["a"], "cannot be in the primary key"),
        (["a"], ["c"], "must be INT or BIGINT"),
        (["a"], ["b", "a"], "at most one"),
    ],
)
def test_bad_keys_are_refused(key: list[str], auto: list[str], message: str) -> None:
    with pytest.raises(InvalidTableError, match=message):
        Schema.of("a INT, b BIGINT, c STRING", key, auto)


def test_an_aggregation_function_on_a_key_column_is_refused() -> None:
    with pytest.raises(InvalidTableError, match="cannot have an aggregation function"):
        Schema((Column("a", t.INTEGER, agg_function=AggFunction("sum")),), ("a",))


def test_aggregation_functions_are_read_in_any_spelling_and_unknown_ones_kept() -> None:
    column = {"name": "a", "data_type": {"type": "STRING"}}
    read = Column.from_json(
        {**column, "agg_function": {"type": "LAST-VALUE", "parameters": {"delimiter": ";"}}}
    )
    assert read.agg_function == AggFunction("last_value", (("delimiter", ";"),))
    unknown = Column.from_json({**column, "agg_function": {"type": "median"}})
    assert unknown.agg_function == AggFunction("median")


@pytest.mark.parametrize(
    "function", ["sum", {}, {"type": 1}, {"type": "sum", "parameters": ["overflow"]}, []]
)
def test_what_is_no_aggregation_function_is_refused_by_column(function: object) -> None:
    """It used to be dropped, and the column then merged in another way than was asked for."""
    with pytest.raises(InvalidTableError, match="of column 'a' must be an object with a 'type'"):
        Column.from_json({"name": "a", "data_type": {"type": "STRING"}, "agg_function": function})


def test_a_pyarrow_schema_becomes_a_schema_with_its_nullability() -> None:
    arrow = pa.schema(
        [pa.field("a", pa.int32(), nullable=False), pa.field("b", pa.list_(pa.utf8()))]
    )
    schema = Schema.of(arrow)
    assert str(schema) == "a INT NOT NULL, b ARRAY<STRING>"
    assert schema.arrow == arrow
    assert schema.arrow is schema.arrow


def test_an_added_column_gets_ids_that_were_never_used() -> None:
    schema = Schema.from_json({**Schema.of("a INT").to_json(), "highest_field_id": 5})
    grown = schema.add_column("r", parse_type("ROW<x INT>"), "note").add_column("z", t.STRING)
    assert grown.ids == (0, 6, 8)
    assert grown.highest_field_id == 8
    assert grown.column("r").comment == "note"
    assert schema.names == ("a",)


def test_columns_are_found_by_name_and_by_id() -> None:
    schema = Schema.of("a INT, b STRING")
    assert (schema.index_of("b"), schema.indexes_of(["b", "a"]), "b" in schema) == (1, (1, 0), True)
    assert schema.column_of_id(1) == schema.column("b")
    assert schema.column_of_id(9) is None
    with pytest.raises(InvalidTableError, match="column 'x' does not exist; the columns are a, b"):
        schema.index_of("x")


@pytest.mark.parametrize(
    "source", [b"[]", b"{", b"{}", b'{"columns": 1}', b"\xff", b'{"columns":[1]}']
)
def test_json_that_is_no_schema_is_refused(source: bytes) -> None:
    with pytest.raises(InvalidTableError):
        Schema.from_json(source)


def test_a_primary_key_can_be_part_of_the_text() -> None:
    schema = Schema.of("`my key` INT, v STRING COMMENT 'it''s', PRIMARY KEY (`my key`)")
    assert schema.primary_key == ("my key",)
    assert schema.column("v").comment == "it's"
    with pytest.raises(InvalidTableError, match="two PRIMARY KEY"):
        Schema.of("a INT, PRIMARY KEY (a), PRIMARY KEY (a)")


def test_a_descriptor_is_put_together_as_json_would_write_it() -> None:
    schema = Schema.of("a BIGINT NOT NULL, b STRING", primary_key=["a"])
    for comment in (None, 'ü, a "comment"'):
        descriptor = TableDescriptor(schema, comment, bucket_keys=("a",), bucket_count=3)
        written = descriptor.to_json()
        assert TableDescriptor.from_json(written) == descriptor
        assert dump_object(json.loads(written)) == written
    assert dump_with({}, "key", b"[1]", {}) == b'{"key":[1]}'
    assert dump_with({"a": 1}, "key", b"{}", {}) == b'{"a":1,"key":{}}'
    assert dump_with({}, "key", b"2", {"b": 3, "c": 4}) == b'{"key":2,"b":3,"c":4}'
