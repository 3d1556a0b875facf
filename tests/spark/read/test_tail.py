"""How the tail is cut into tasks, and what a worker makes of its rows."""

from __future__ import annotations

import datetime as dt
import pickle

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from zufluss import col
from zufluss.client.read.union_plan import TailRange
from zufluss.model.schema import Schema
from zufluss.model.table import TableBucket, TableDescriptor, TableInfo, TablePath
from zufluss.spark.read.tail import TASK_ROWS, TailRead, narrowed, pack
from zufluss.spark.types import for_spark


def tail(*sizes: int) -> list[TailRange]:
    return [TailRange(TableBucket(1, None, i), None, 7, 7 + size) for i, size in enumerate(sizes)]


@given(
    st.lists(st.integers(0, 5 * TASK_ROWS), max_size=20),
    st.integers(1, 8),
    st.booleans(),
)
def test_tasks_cover_every_offset_once(sizes, tasks_max, split):
    groups = pack(tail(*sizes), tasks_max, split=split)
    assert len(groups) <= tasks_max
    assert all(groups), "no task without work"
    read = sorted((p.bucket.bucket_id, p.start, p.stop) for group in groups for p in group)
    ends = dict.fromkeys(range(len(sizes)), 7)
    for bucket, start, stop in read:
        assert start == ends[bucket]
        ends[bucket] = stop
    assert ends == {bucket: 7 + size for bucket, size in enumerate(sizes)}


def test_ranges_of_primary_key_tables_stay_whole():
    groups = pack(tail(10 * TASK_ROWS, 1), 4, split=False)
    assert sorted(p.stop - p.start for group in groups for p in group) == [1, 10 * TASK_ROWS]


def test_few_records_are_one_task():
    assert len(pack(tail(*[10] * 100), 8, split=True)) == 1


def test_nothing_is_no_task():
    assert pack(tail(0, 0), 4, split=True) == ()


@pytest.fixture
def info() -> TableInfo:
    schema = Schema.of("id INT, name STRING, at TIME(3)", primary_key=["id"])
    descriptor = TableDescriptor(schema, bucket_keys=("id",), bucket_count=1)
    return TableInfo(TablePath("fluss", "t"), 1, 1, descriptor, 0, 0)


def test_a_read_pickles(info):
    read = TailRead("h:1", {"a": "b"}, info, (tuple(tail(3)),), ("id",), col("id") > 1)
    again = pickle.loads(pickle.dumps(read))
    assert (again.groups, again.info) == (read.groups, info)


def test_a_narrowed_table_keeps_its_key(info):
    assert narrowed(info, ["at"]).schema.names == ("id", "at")


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
