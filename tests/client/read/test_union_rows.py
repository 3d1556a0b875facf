"""The steps of a union read that Python and Spark share, without a server."""

from __future__ import annotations

import pyarrow as pa
from hypothesis import given
from hypothesis import strategies as st

from zufluss.client.read.union_rows import LakeSelection, changed_keys, gathered, narrowed
from zufluss.lake.fold import Folder
from zufluss.model.schema import Schema
from zufluss.model.table import TableDescriptor, TableInfo, TablePath


def keyed_info() -> TableInfo:
    """A primary-key table partitioned by its column `day`."""
    schema = Schema.of("id INT, day STRING, name STRING, at TIME(3)", primary_key=["id", "day"])
    descriptor = TableDescriptor(
        schema, partition_keys=("day",), bucket_keys=("id",), bucket_count=2
    )
    return TableInfo(TablePath("fluss", "t"), 1, 1, descriptor, 0, 0)


def batches(rows: list[tuple[int, str, int]], size: int) -> list[pa.RecordBatch]:
    types = {"id": pa.int32(), "day": pa.utf8(), "__bucket": pa.int32()}
    columns = [pa.array([row[i] for row in rows], of) for i, of in enumerate(types.values())]
    table = pa.table(columns, names=list(types))
    return table.to_batches(max_chunksize=size)


@given(
    st.lists(st.tuples(st.integers(0, 9), st.sampled_from("ab"), st.integers(0, 1))),
    st.sets(st.tuples(st.integers(0, 9), st.sampled_from("ab"))),
    st.sampled_from([None, ["a"], []]),
    st.sampled_from([None, [0], []]),
    st.integers(1, 5),
)
def test_rows_live_whose_bucket_and_partition_are_chosen_and_whose_key_is_unchanged(
    rows, changed, partitions, buckets, size
):
    keys = pa.table(
        {
            "id": pa.array([key[0] for key in changed], pa.int32()),
            "day": pa.array([key[1] for key in changed], pa.utf8()),
        }
    )
    selection = LakeSelection(keyed_info(), buckets=buckets, partitions=partitions, changed=keys)
    tables = list(selection.select(batches(rows, size)))
    assert all(table.num_rows for table in tables), "no empty tables"
    assert [tuple(row.values()) for table in tables for row in table.to_pylist()] == [
        row
        for row in rows
        if row[:2] not in changed
        and (partitions is None or row[1] in partitions)
        and (buckets is None or row[2] in buckets)
    ]


def test_only_the_columns_that_decide_are_read():
    info = keyed_info()
    no_keys = pa.table({"id": pa.array([], pa.int32()), "day": pa.array([], pa.utf8())})
    assert LakeSelection(info, changed=no_keys).columns == []
    assert LakeSelection(info, partitions=["a"], buckets=[0]).columns == ["day", "__bucket"]


def test_small_batches_are_joined_until_there_are_enough_rows():
    rows = [(i, "a", 0) for i in range(10)]
    assert [table.num_rows for table in gathered(batches(rows, 2), 5)] == [6, 4]
    assert [table.num_rows for table in gathered(batches(rows, 4), 0)] == [4, 4, 2]


def test_a_narrowed_table_keeps_its_key():
    assert narrowed(keyed_info(), ["at"]).schema.names == ("id", "day", "at")


def test_keys_of_upserts_and_of_deletes_are_changed():
    info = narrowed(keyed_info(), ["name"])
    folder = Folder(info, 0)
    changes = pa.record_batch(
        {
            "_change_type": pa.array(["+I", "+I", "-D"]),
            "_log_offset": pa.array([0, 1, 2], pa.int64()),
            "_commit_timestamp": pa.array([0, 0, 0], pa.timestamp("ms", "UTC")),
            "id": pa.array([1, 2, 2], pa.int32()),
            "day": pa.array(["a", "a", "a"]),
            "name": pa.array(["x", "y", "y"]),
        }
    )
    folder.add(changes)
    keys = changed_keys(info, [folder.finish()])
    assert keys is not None
    assert sorted(keys["id"].to_pylist()) == [1, 2]
    assert changed_keys(info, []) is None
