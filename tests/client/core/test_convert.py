"""User input becomes batches of the table's schema, or is refused with a reason."""

from __future__ import annotations

import datetime as dt
from dataclasses import dataclass
from decimal import Decimal
from typing import Any, NamedTuple

import duckdb
import numpy as np
import pandas as pd
import polars as pl
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from zufluss.client.core.convert import (
    ColumnMismatchError,
    is_stream,
    rows_to_batch,
    single_row,
    to_batches,
)
from zufluss.model.schema import Schema

SCHEMA = Schema.of(
    "id BIGINT NOT NULL, n INT, name STRING, at TIMESTAMP(3), price DECIMAL(10, 2), "
    "tags ARRAY<STRING>, counts MAP<STRING, INT>, place ROW<x INT, y INT>, raw BYTES"
).arrow
NIGHT = dt.datetime(2024, 1, 1)


def rows(data: Any) -> list[dict[str, Any]]:
    batches = list(to_batches(data, SCHEMA))
    assert all(batch.schema == SCHEMA for batch in batches)
    for batch in batches:
        batch.validate(full=True)
    return [
        {k: v for k, v in row.items() if v is not None}
        for batch in batches
        for row in batch.to_pylist()
    ]


TWO = [{"id": 1, "name": "a"}, {"id": 2, "name": "b"}]
TABLE = pa.table({"id": [1, 2], "name": ["a", "b"]})


class OnlyStream:
    def __arrow_c_stream__(self, requested_schema: object = None) -> object:
        return TABLE.__arrow_c_stream__(requested_schema)


class OnlyArray:
    def __arrow_c_array__(self, requested_schema: object = None) -> object:
        return TABLE.to_batches()[0].__arrow_c_array__(requested_schema)


@pytest.mark.parametrize(
    "data",
    [
        TABLE,
        TABLE.to_batches()[0],
        TABLE.to_reader(),
        pa.concat_tables([TABLE.slice(0, 1), TABLE.slice(1)]),
        OnlyStream(),
        OnlyArray(),
        pd.DataFrame({"id": [1, 2], "name": ["a", "b"]}),
        pd.DataFrame({"id": np.array([1, 2], np.int16), "name": pd.Categorical(["a", "b"])}),
        pl.DataFrame({"id": [1, 2], "name": ["a", "b"]}),
        pl.DataFrame({"name": ["a", "b"], "id": [1, 2]}, schema_overrides={"id": pl.UInt8}),
        {"id": [1, 2], "name": ["a", "b"]},
        {"name": np.array(["a", "b"]), "id": np.array([1.0, 2.0])},
        {"id": pd.Series([1, 2]), "name": pa.chunked_array([["a"], ["b"]])},
        TWO,
        tuple(TWO),
    ],
    ids=lambda data: type(data).__module__ + "." + type(data).__name__,
)
def test_every_kind_of_input_gives_the_same_rows(data: Any) -> None:
    assert rows(data) == TWO


def test_a_duckdb_relation_is_taken() -> None:
    with duckdb.connect() as connection:
        relation = connection.sql("select * from (values (1, 'a'), (2, 'b')) t(id, name)")
        assert rows(relation) == TWO


def test_nested_values_are_taken_from_rows_columns_and_frames() -> None:
    row = {
        "id": 1,
        "at": NIGHT,
        "price": Decimal("1.50"),
        "tags": ["x", "y"],
        "counts": {"k": 1},
        "place": {"x": 1, "y": 2},
        "raw": b"\x00",
    }
    expected = [row | {"counts": [("k", 1)]}]
    assert rows(row) == expected
    assert rows({key: [value] for key, value in row.items()}) == expected
    assert rows(pd.DataFrame([row])) == expected


def test_a_dict_is_a_row_when_its_lists_belong_to_list_columns() -> None:
    row: dict[str, Any] = {"id": 1, "tags": ["x"]}
    assert single_row(row, SCHEMA) is row
    assert single_row({"tags": ["x"], "counts": [("k", 1)]}, SCHEMA) is not None
    columns: list[dict[str, Any]] = [
        {"tags": [["x"]]},
        {"id": [1], "tags": [["x"]], "place": [{"x": 1, "y": 2}]},
    ]
    assert [single_row(data, SCHEMA) for data in [*columns, TABLE]] == [None, None, None]


@dataclass(slots=True)
class Place:
    x: int
    y: int


@dataclass
class Visit:
    id: int
    place: Place | None = None
    tags: list[str] | None = None


class Name(NamedTuple):
    id: int
    name: str


def test_dataclasses_and_named_tuples_are_rows() -> None:
    visit = Visit(1, Place(2, 3), ["x"])
    expected = [{"id": 1, "place": {"x": 2, "y": 3}, "tags": ["x"]}, {"id": 2, "name": "b"}]
    assert rows([visit, Name(2, "b")]) == expected
    assert single_row(visit, SCHEMA) == expected[0]
    assert single_row(Name(2, "b"), SCHEMA) == expected[1]
    assert single_row(Visit, SCHEMA) is None
    with pytest.raises(TypeError, match="one row"):
        rows([(1, "a")])


def test_only_iterables_without_a_table_in_them_are_streams() -> None:
    frames = [TABLE, TABLE.to_reader(), pd.DataFrame({"id": [1]}), pl.DataFrame({"id": [1]})]
    others: list[Any] = [OnlyStream(), OnlyArray(), TWO, TWO[0], "text", b"bytes", 7, np.arange(3)]
    assert [is_stream(data) for data in [*frames, *others]] == [False] * 12
    assert all(map(is_stream, [iter(TWO), (row for row in TWO), map(dict, TWO), {}.values()]))


def test_the_error_of_a_row_names_the_row_and_the_column() -> None:
    three = [{"id": 1, "n": 1}, {"id": 2, "n": "x"}, {"id": None}]
    with pytest.raises(ColumnMismatchError, match=r"row 1: column 'n'.*in the row {'id': 2, 'n"):
        rows(three)
    with pytest.raises(ColumnMismatchError, match=r"row 1: .*NOT NULL, in the row {'id': None}"):
        rows([three[0], three[2]])
    with pytest.raises(ColumnMismatchError, match=r"row 1: the table has no column 'm'"):
        rows([three[0], {"id": 1, "m": 2}])


@given(st.data())
def test_rows_converted_together_are_those_converted_column_by_column(data: st.DataObject) -> None:
    values = {
        "id": st.integers(-(2**63), 2**63 - 1),
        "n": st.none() | st.integers(-(2**31), 2**31 - 1),
        "name": st.none() | st.text(max_size=5),
        "at": st.none() | st.integers(0, 10**9).map(lambda s: NIGHT + dt.timedelta(seconds=s)),
        "price": st.none() | st.decimals(-99, 99, places=2),
        "tags": st.none() | st.lists(st.none() | st.text(max_size=3), max_size=3),
        "counts": st.none() | st.just([("k", 1), ("l", None)]),
        "place": st.none() | st.fixed_dictionaries({}, optional={"x": st.integers(0, 9)}),
        "raw": st.none() | st.binary(max_size=4),
        "d": st.none() | st.floats(),
    }
    required = {"id": values.pop("id")}
    schema = pa.schema([*SCHEMA, ("d", pa.float64())])
    made = data.draw(st.lists(st.fixed_dictionaries(required, optional=values), max_size=5))
    columns = [
        pa.array([row.get(f.name) for row in made], f.type, from_pandas=True) for f in schema
    ]
    expected = pa.RecordBatch.from_arrays(columns, schema=schema)
    assert rows_to_batch(made, schema).equals(expected)


def test_missing_columns_become_null_and_missing_values_of_pandas_too() -> None:
    frame = pd.DataFrame(
        {"id": [1, 2], "n": [5, np.nan], "at": pd.to_datetime(["2024-01-01", None])}
    )
    assert rows(frame) == [{"id": 1, "n": 5, "at": NIGHT}, {"id": 2}]


def test_a_batch_that_fits_is_passed_on_as_it_is() -> None:
    batch = pa.RecordBatch.from_pylist([{"id": 1}], schema=SCHEMA)
    assert next(to_batches(batch, SCHEMA)) is batch


def test_empty_input_gives_no_batch() -> None:
    assert list(to_batches([], SCHEMA)) == []
    assert list(to_batches(TABLE.slice(0, 0), SCHEMA)) == []


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ({"id": ["x"]}, "column 'id'"),
        ({"id": 1, "n": 2**40}, "column 'n'"),
        (pa.table({"id": [1], "n": [2**40]}), "column 'n': the input has int64, the table int32"),
        (pd.DataFrame({"id": [1], "n": [1.5]}), "column 'n'"),
        (pa.table({"id": [1], "name": [7]}), "column 'name': the input has int64, the table text"),
        (pl.DataFrame({"id": [1], "place": [[1]]}), "column 'place'"),
        ({"id": 1, "price": Decimal("1.234")}, "column 'price'"),
        (pa.table({"name": ["a"]}), "column 'id' is missing, but the table says NOT NULL"),
        (pa.table({"id": [1, None]}), "column 'id' has 1 nulls, but the table says NOT NULL"),
        (pa.RecordBatch.from_pylist([{"n": 1}], schema=SCHEMA), "column 'id' has 1 nulls"),
        ({"id": 1, "nmae": "a"}, "no column 'nmae'; its columns are id, n, name"),
        (pd.DataFrame({"id": [1], 7: [1]}), "no column '7'"),
        ({"id": [1, 2], "n": 5}, "mixes columns \\(id\\) with single values"),
        ([{"id": 1, "n": [5, 6]}], "mixes columns \\(n\\) with single values"),
        ({"id": [1, 2], "n": [5]}, "differ in length: 'id' 2, 'n' 1"),
        (pa.table([[1], [2]], names=["id", "id"]), "occurs twice"),
    ],
)
def test_what_does_not_fit_is_refused_naming_the_column(data: Any, message: str) -> None:
    with pytest.raises(ColumnMismatchError, match=message):
        list(to_batches(data, SCHEMA))


@pytest.mark.parametrize("data", [5, "text", [1, 2], b"bytes", None, object()])
def test_input_that_is_no_table_is_refused_with_what_is_possible(data: Any) -> None:
    with pytest.raises(TypeError, match="pandas or polars"):
        list(to_batches(data, SCHEMA))
