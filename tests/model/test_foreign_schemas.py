"""Schemas of polars, pandas and Arrow become columns; a type without a column type is named."""

from __future__ import annotations

from typing import Any

import pandas as pd
import polars as pl
import pyarrow as pa
import pytest

from zufluss.errors import InvalidTableError
from zufluss.model.schema import Column, Schema
from zufluss.model.types import BIGINT

ARROW = pa.schema([("id", pa.int64()), ("name", pa.string())])
POLARS = {"id": pl.Int64(), "name": pl.String()}
PANDAS = pd.DataFrame({"id": [1], "name": ["a"]})


class OnlySchema:
    def __arrow_c_schema__(self) -> object:
        return ARROW.__arrow_c_schema__()


class OnlyStream:
    def __arrow_c_stream__(self, requested_schema: object = None) -> object:
        return ARROW.empty_table().__arrow_c_stream__(requested_schema)


@pytest.mark.parametrize(
    "source",
    [
        ARROW,
        ARROW.empty_table(),
        ARROW.empty_table().to_reader(),
        pa.RecordBatch.from_pylist([{"id": 1, "name": "a"}]),
        pl.Schema(POLARS),
        pl.DataFrame(schema=POLARS),
        pl.LazyFrame(schema=POLARS),
        PANDAS,
        PANDAS.convert_dtypes(),
        PANDAS.convert_dtypes().dtypes,
        OnlySchema(),
        OnlyStream(),
    ],
    ids=lambda source: f"{type(source).__module__.split('.')[0]}.{type(source).__name__}",
)
def test_a_schema_is_taken_from_any_library(source: Any) -> None:
    assert str(Schema.of(source)) == "id BIGINT, name STRING"
    keyed = Schema.of(source, primary_key="id")
    assert str(keyed) == "id BIGINT NOT NULL, name STRING, PRIMARY KEY (id)"


def test_types_of_polars_and_pandas_have_their_column_types() -> None:
    polars = pl.Schema(
        {
            "b": pl.Boolean(),
            "u": pl.UInt8(),
            "f": pl.Float32(),
            "d": pl.Decimal(10, 2),
            "day": pl.Date(),
            "at": pl.Datetime("ms"),
            "utc": pl.Datetime("us", "UTC"),
            "tags": pl.List(pl.String()),
            "pair": pl.Array(pl.Int32(), 2),
            "place": pl.Struct({"x": pl.Int16()}),
            "kind": pl.Categorical(),
            "raw": pl.Binary(),
        }
    )
    assert str(Schema.of(polars)) == (
        "b BOOLEAN, u TINYINT, f FLOAT, d DECIMAL(10, 2), `day` DATE, `at` TIMESTAMP(3), "
        "utc TIMESTAMP_LTZ(6), tags ARRAY<STRING>, pair ARRAY<INT>, place ROW<x SMALLINT>, "
        "kind STRING, raw BYTES"
    ).replace("`", "")
    frame = pd.DataFrame(
        {
            "at": pd.to_datetime(["2024-01-01"]).as_unit("ns"),
            "kind": pd.Categorical(["a"]),
            "n": pd.array([1, None], dtype="Int32")[:1],
            "tags": [["x"]],
        }
    )
    assert str(Schema.of(frame)) == "at TIMESTAMP(9), kind STRING, n INT, tags ARRAY<STRING>"


@pytest.mark.parametrize(
    ("source", "message"),
    [
        (
            pa.schema([("took", pa.duration("s"))]),
            r"column 'took'.*duration\[s\].*cast it to int64",
        ),
        (pa.schema([("gap", pa.month_day_nano_interval())]), "column 'gap'.*cast it to string"),
        (pa.schema([("x", pa.null())]), "column 'x'.*only nulls"),
        (pa.schema([("s", pa.struct([("d", pa.duration("ms"))]))]), r"column 's'.*duration"),
        (pl.Schema({"took": pl.Duration("us")}), r"column 'took'.*duration\[us\]"),
        (pl.Schema({"thing": pl.Object()}), "column 'thing'.*Object"),
        (pl.Schema({"x": pl.Null()}), "column 'x'.*only nulls"),
        (pd.DataFrame({"x": [None]}, dtype=object), "column 'x' has the dtype object.*astype"),
        (pd.DataFrame({"mixed": [1, "a"]}), "column 'mixed'.*one type"),
        (pd.DataFrame({"took": pd.to_timedelta([1])}), "column 'took'.*duration"),
        (PANDAS.astype(object).dtypes, "column 'id' has the dtype object"),
    ],
)
def test_a_type_that_fluss_lacks_is_named_with_its_column_and_a_way_out(
    source: Any, message: str
) -> None:
    with pytest.raises(InvalidTableError, match=message):
        Schema.of(source)


@pytest.mark.parametrize("source", [5, {"id": "BIGINT"}, object(), pl.Series([1]), pd.Series([1])])
def test_what_is_no_schema_is_refused_with_what_is_one(source: Any) -> None:
    with pytest.raises(InvalidTableError, match=r"is no schema; give a column list|is no column"):
        Schema.of(source)


def test_a_list_may_mix_columns_and_arrow_fields() -> None:
    assert str(Schema.of([Column("id", BIGINT), ARROW.field("name")])) == "id BIGINT, name STRING"
    with pytest.raises(InvalidTableError, match="'id' is no column"):
        Schema.of(["id"])


def test_a_key_of_none_is_no_key() -> None:
    assert Schema.of("id BIGINT", primary_key=None) == Schema.of("id BIGINT")
