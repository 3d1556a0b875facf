"""Rows on their way from Spark into a table, without Spark."""

from __future__ import annotations

import datetime as dt
import random

import pyarrow as pa
import pytest

from tests.client.pk import create_table
from zufluss.client.core.convert import ColumnMismatchError
from zufluss.client.sync.connection import Connection
from zufluss.spark.write.rows import by_change, folded, in_content_order, of_spark

ROWS = [
    {"id": i % 50, "name": None if i % 3 else f"n{i % 11}", "tags": [i % 2]} for i in range(300)
]


def test_rows_in_content_order_are_the_same_whatever_order_they_came_in(
    connection: Connection,
) -> None:
    info = create_table(connection, "id INT, name STRING, tags ARRAY<INT>").info
    orders = []
    for seed in range(3):
        rows = list(ROWS)
        random.Random(seed).shuffle(rows)
        batches = pa.Table.from_pylist(rows, info.schema.arrow).to_batches(max_chunksize=70 + seed)
        orders.append([row for part in in_content_order(batches, info) for row in part.to_pylist()])
    assert orders[0] == orders[1] == orders[2]
    key = repr
    assert sorted(orders[0], key=key) == sorted(ROWS, key=key)


def test_inputs_are_folded_to_one_row_of_each_key_in_one_order(connection: Connection) -> None:
    schema = "id INT, n BIGINT SUM, PRIMARY KEY (id)"
    info = create_table(connection, schema, properties={"table.merge-engine": "aggregation"}).info
    found = []
    for seed in range(2):
        rows = [{"id": i % 20, "n": i} for i in range(200)]
        random.Random(seed).shuffle(rows)
        batches = pa.Table.from_pylist(rows, info.schema.arrow).to_batches(max_chunksize=33)
        found.append([r for part in folded(batches, info, ["id", "n"]) for r in part.to_pylist()])
    assert found[0] == found[1]
    assert sorted(row["id"] for row in found[0]) == list(range(20))
    assert sum(row["n"] for row in found[0]) == sum(range(200))


def test_times_of_the_day_come_as_numbers_at_any_depth() -> None:
    schema = pa.schema({"t": pa.time32("ms"), "s": pa.struct({"u": pa.list_(pa.time64("us"))})})
    rows = pa.record_batch(
        {"s": pa.array([{"u": [1, None]}]), "t": pa.array([3_723_004_000], pa.int64())}
    )
    assert of_spark(rows, schema, ["t", "s"]).to_pylist() == [
        {"t": dt.time(1, 2, 3, 4000), "s": {"u": [dt.time(0, 0, 0, 1), None]}}
    ]
    late = pa.record_batch({"t": pa.array([86_400_000_000], pa.int64())})
    with pytest.raises(ColumnMismatchError, match="'t' is a time of the day, in Spark micros"):
        of_spark(late, schema, ["t"])


def test_changes_are_runs_of_upserts_and_deletes() -> None:
    ops = ["insert", "+U", "-U", "delete", "-D", "update_before", "+A"]
    rows = pa.record_batch({"op": ops, "id": list(range(7))})
    runs = [(delete, part["id"].to_pylist()) for delete, part in by_change(rows, "op")]
    assert runs == [(False, [0, 1]), (True, [3, 4]), (False, [6])]
    for wrong in ("upsert", None):
        with pytest.raises(ColumnMismatchError, match=f"has {wrong!r}; allowed are insert"):
            list(by_change(pa.record_batch({"op": pa.array([wrong], pa.string())}), "op"))


def test_times_finer_than_those_of_the_table_are_cut() -> None:
    micros = dt.datetime(2026, 1, 31, 1, 2, 3, 4567)
    before = dt.datetime(1969, 12, 31, 23, 59, 59, 999_999)
    schema = pa.schema(
        {"a": pa.timestamp("ms"), "b": pa.timestamp("s", "UTC"), "c": pa.time32("s")}
    )
    times = [micros, before, None]
    rows = pa.record_batch(
        {
            "a": pa.array(times, pa.timestamp("us")),
            "b": pa.array(times, pa.timestamp("us", "Etc/UTC")),
            "c": pa.array([3_723_004_567, 0, None], pa.int64()),
        }
    )
    found = of_spark(rows, schema, ["a", "b", "c"]).to_pydict()
    cut = [micros.replace(microsecond=4000), before.replace(microsecond=999_000), None]
    assert found["a"] == cut
    assert found["b"] == [time and time.replace(microsecond=0, tzinfo=dt.UTC) for time in cut]
    assert found["c"] == [dt.time(1, 2, 3), dt.time(0), None]


def test_times_in_parts_of_a_column_have_to_fit() -> None:
    schema = pa.schema({"b": pa.list_(pa.timestamp("ms"))})
    for micros, fits in ((5000, True), (5001, False)):
        rows = pa.record_batch({"b": pa.array([[micros]], pa.list_(pa.timestamp("us")))})
        if fits:
            assert of_spark(rows, schema, ["b"]).num_rows == 1
        else:
            with pytest.raises(ColumnMismatchError, match="column 'b': the rows have"):
                of_spark(rows, schema, ["b"])


@pytest.mark.parametrize(
    ("wanted", "values", "name"),
    [
        (pa.list_(pa.field("element", pa.int32(), False)), [[1], [None]], "c.element"),
        (pa.map_(pa.string(), pa.field("value", pa.int32(), False)), [[("k", None)]], "c.value"),
        (pa.struct([pa.field("x", pa.int32(), False)]), [None, {"x": None}], "c.x"),
        (
            pa.list_(pa.struct([pa.field("x", pa.int32(), False)])),
            [[{"x": 1}, None, {"x": None}]],
            "c.element.x",
        ),
    ],
)
def test_nulls_are_found_in_every_part_of_a_column(
    wanted: pa.DataType, values: list[object], name: str
) -> None:
    loose = changed(wanted)
    rows = pa.record_batch({"c": pa.array(values, loose)})
    with pytest.raises(ColumnMismatchError, match=f"column {name!r} has 1 nulls"):
        of_spark(rows, pa.schema([pa.field("c", wanted)]), ["c"])
    good = rows.slice(0, 1) if name in ("c.element", "c.x") else rows.slice(0, 0)
    assert of_spark(good, pa.schema([pa.field("c", wanted)]), ["c"]).num_rows == good.num_rows


def changed(of: pa.DataType) -> pa.DataType:
    """A type all of whose parts may be null."""
    if pa.types.is_struct(of):
        return pa.struct([pa.field(part.name, changed(part.type)) for part in of])
    if pa.types.is_map(of):
        return pa.map_(of.key_type, pa.field("value", changed(of.item_type)))
    if pa.types.is_list(of):
        return pa.list_(pa.field("element", changed(of.value_type)))
    return of
