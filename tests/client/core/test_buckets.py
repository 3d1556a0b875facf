"""Rows are assigned to buckets: by key, in turn, or all to one."""

from __future__ import annotations

import numpy as np
import pyarrow as pa
from hypothesis import given
from hypothesis import strategies as st

from tests.record.keys.plain import encode_key
from tests.record.keys.plain_hash import bucket_id
from zufluss.client.core.buckets import HashAssigner, RoundRobinAssigner, StickyAssigner, split
from zufluss.model.schema import Schema
from zufluss.model.table import TableDescriptor, TableInfo, TablePath


@given(st.lists(st.integers(0, 70_000) | st.integers(0, 3)))
def test_a_split_keeps_every_row_once_and_the_order_within_groups(groups: list[int]) -> None:
    batch = pa.record_batch({"row": pa.array(range(len(groups)), pa.int64())})
    parts = list(split(batch, np.array(groups, dtype=np.int64)))
    assert [group for group, _ in parts] == sorted(set(groups))
    for group, rows in parts:
        assert rows["row"].to_pylist() == [i for i, g in enumerate(groups) if g == group]


def keyed_table(columns: str, *keys: str, buckets: int = 16) -> TableInfo:
    descriptor = TableDescriptor(Schema.of(columns), bucket_keys=keys, bucket_count=buckets)
    return TableInfo(TablePath("fluss", "t"), 1, 1, descriptor, 0, 0)


@given(st.lists(st.tuples(st.integers(-(2**31), 2**31 - 1), st.text(max_size=8)), min_size=1))
def test_every_row_goes_to_the_bucket_of_its_key(keys: list[tuple[int, str]]) -> None:
    info = keyed_table("a INT, b STRING, other STRING", "b", "a")
    batch = pa.RecordBatch.from_pylist(
        [{"a": a, "b": b, "other": None} for a, b in keys], schema=info.schema.arrow
    )
    for bucket, rows in HashAssigner(info, "pyfluss").assign(batch):
        for row in range(rows.num_rows):
            key = encode_key(rows, row, ["b", "a"], "compacted")
            assert bucket_id(key, 16) == bucket


def test_the_hash_of_java_clients_can_be_chosen() -> None:
    info = keyed_table("a INT", "a")
    batch = pa.RecordBatch.from_pylist([{"a": 300}], schema=info.schema.arrow)
    assert [b for b, _ in HashAssigner(info, "pyfluss").assign(batch)] == [11]
    assert [b for b, _ in HashAssigner(info, "java").assign(batch)] == [5]


def test_sticky_moves_on_when_a_batch_is_full_and_round_robin_always() -> None:
    batch = pa.record_batch({"a": [1]})
    sticky = StickyAssigner(3)
    [(first, _)] = sticky.assign(batch)
    assert [b for b, _ in sticky.assign(batch)] == [first]
    sticky.batch_full(first)
    sticky.batch_full(first)  # late news of an old batch changes nothing
    assert [b for b, _ in sticky.assign(batch)] == [(first + 1) % 3]
    robin = RoundRobinAssigner(3)
    seen = [b for _ in range(6) for b, _ in robin.assign(batch)]
    assert sorted(seen[:3]) == [0, 1, 2]
    assert seen[:3] == seen[3:]
