"""How the ranges of a tail are cut and packed into tasks."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from zufluss.client.read.union_plan import TailRange
from zufluss.model.table import TableBucket
from zufluss.spark.read.packing import TASK_ROWS, pack


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


def test_empty_ranges_make_no_task():
    assert pack(tail(0, 0), 4, split=True) == ()
