"""What travels to a task, and the Arrow types that the task hands to Spark."""

from __future__ import annotations

import datetime as dt
import pickle

import pyarrow as pa

from tests.client.read.test_union_rows import keyed_info
from zufluss import col
from zufluss.spark.read.shape import ReadShape
from zufluss.spark.read.split_read import SplitRead
from zufluss.spark.types import for_spark, spark_schema


def test_a_read_pickles():
    info = keyed_info()
    shape = ReadShape(info, spark_schema(info.schema.columns), col("id") > 1)
    read = SplitRead("h:1", {"a": "b"}, shape, ("p",), 5)
    again = pickle.loads(pickle.dumps(read))
    assert (again.shape.info, again.shape.schema) == (info, shape.schema)
    assert (again.bootstrap, again.options, again.partitions, again.limit) == (
        "h:1",
        {"a": "b"},
        ("p",),
        5,
    )


def test_types_that_spark_refuses_become_ones_that_it_takes():
    clock = pa.array([dt.time(0, 0, 1)], pa.time32("ms"))
    inside = pa.struct([pa.field("b", pa.binary(2)), pa.field("t", pa.time64("ns"))])
    rows = pa.table(
        {
            "t": clock,
            "l": pa.array([[dt.time(0, 0, 1)]], pa.list_(pa.time32("s"))),
            "r": pa.array([{"b": b"ab", "t": dt.time(0, 0, 1)}], inside),
            "m": pa.array([[("k", b"ab")]], pa.map_(pa.string(), pa.binary(2))),
            "ts": pa.array([1], pa.timestamp("s", "UTC")),
        }
    )
    found = for_spark(rows)
    assert found.to_pylist()[0] | {"ts": None} == {
        "t": 1_000_000,
        "l": [1_000_000],
        "r": {"b": b"ab", "t": 1_000_000},
        "m": [("k", b"ab")],
        "ts": None,
    }
    assert found.schema.field("ts").type == pa.timestamp("us", "UTC")
