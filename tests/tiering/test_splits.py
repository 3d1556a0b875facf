"""Planning: rounds join without gap and overlap, whatever the logs look like."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from zufluss.lake.base import LakeError
from zufluss.model.lake import LakeSnapshot
from zufluss.model.table import TableBucket, TablePath
from zufluss.tiering.splits import (
    CHANGES_MIN,
    CHANGES_PER_ROW,
    BucketSnapshot,
    Hole,
    TieringInput,
    TieringLogSplit,
    TieringSnapshotSplit,
    asks_for_rows,
    asks_for_snapshot,
    cost,
    known_offsets,
    pack,
    plan_splits,
)

PATH = TablePath("db", "t")


def bucket(number: int, partition: int | None = None) -> TableBucket:
    return TableBucket(7, partition, number)


def state(
    ends: Mapping[TableBucket, int],
    *,
    lake: Mapping[TableBucket, int] | None = None,
    begins: Mapping[TableBucket, int] | None = None,
    keyed: bool = False,
    kv: Mapping[TableBucket, BucketSnapshot] | None = None,
) -> TieringInput:
    return TieringInput(
        PATH,
        keyed,
        {5: "2024", 6: "2025"},
        None if lake is None else LakeSnapshot(7, 1, lake),
        ends,
        dict.fromkeys(ends, 0) | dict(begins or {}),
        kv or {},
    )


def log_split(number: int, start: int, stop: int, partition: int | None = None) -> TieringLogSplit:
    name = None if partition is None else {5: "2024", 6: "2025"}[partition]
    return TieringLogSplit(PATH, bucket(number, partition), name, start, stop)


def test_an_empty_table_has_no_splits() -> None:
    plan = plan_splits(state({bucket(0): 0, bucket(1): 0}), 10)
    assert (plan.splits, plan.remaining, plan.offsets) == ((), 0, {})


def test_a_first_round_reads_from_the_beginning() -> None:
    plan = plan_splits(state({bucket(0): 4, bucket(1): 0}), 10)
    assert plan.splits == (log_split(0, 0, 4),)


def test_a_later_round_goes_on_where_the_lake_ends() -> None:
    lake = {bucket(0): 4, bucket(1): 3}
    plan = plan_splits(state({bucket(0): 9, bucket(1): 3}, lake=lake), 10)
    assert plan.splits == (log_split(0, 4, 9),)
    assert plan.offsets == {bucket(0): 9}


def test_a_round_takes_no_more_than_its_cap_and_says_what_is_left() -> None:
    plan = plan_splits(state({bucket(0): 25, bucket(1): 5}), 10)
    assert plan.splits == (log_split(0, 0, 10), log_split(1, 0, 5))
    assert (plan.remaining, plan.records) == (15, 15)


def test_buckets_of_partitions_carry_their_names() -> None:
    plan = plan_splits(state({bucket(0, 6): 2, bucket(0, 5): 1}), 10)
    assert plan.splits == (log_split(0, 0, 1, 5), log_split(0, 0, 2, 6))


def test_a_log_table_that_lost_its_beginning_before_it_was_tiered_starts_late() -> None:
    plan = plan_splits(state({bucket(0): 9}, begins={bucket(0): 4}), 10)
    assert plan.splits == (log_split(0, 4, 9),)


def test_a_changelog_that_lost_its_beginning_is_refused_without_a_snapshot() -> None:
    with pytest.raises(LakeError, match="records 0 to 3 are neither in the lake nor in the log"):
        plan_splits(state({bucket(0): 9}, begins={bucket(0): 4}, keyed=True), 10)


def test_a_key_value_snapshot_stands_for_the_beginning_of_a_changelog() -> None:
    kv = {bucket(0): BucketSnapshot(3, 6)}
    plan = plan_splits(state({bucket(0): 9}, begins={bucket(0): 4}, keyed=True, kv=kv), 10)
    assert plan.splits == (TieringSnapshotSplit(PATH, bucket(0), None, 3, 6),)
    assert (plan.offsets, plan.remaining) == ({bucket(0): 6}, 3)


def test_a_snapshot_that_ends_before_the_log_begins_does_not_stand_for_it() -> None:
    kv = {bucket(0): BucketSnapshot(3, 6)}
    with pytest.raises(LakeError, match="records 0 to 6 are neither in the lake nor in the log"):
        plan_splits(state({bucket(0): 9}, begins={bucket(0): 7}, keyed=True, kv=kv), 10)


@pytest.mark.parametrize(
    ("changes", "rows", "taken"),
    [
        (CHANGES_MIN, CHANGES_MIN // CHANGES_PER_ROW, True),
        (CHANGES_MIN, CHANGES_MIN // CHANGES_PER_ROW + 1, False),
        (CHANGES_MIN - 1, 1, False),
        (CHANGES_MIN, None, False),
        (CHANGES_MIN, 0, True),
    ],
)
def test_of_a_whole_changelog_a_snapshot_is_read_when_it_is_much_shorter(
    changes: int, rows: int | None, taken: bool
) -> None:
    kv = {bucket(0): BucketSnapshot(3, changes, rows)}
    plan = plan_splits(state({bucket(0): changes + 5}, keyed=True, kv=kv), 10 * CHANGES_MIN)
    snapshot = TieringSnapshotSplit(PATH, bucket(0), None, 3, changes)
    assert plan.splits == (snapshot if taken else log_split(0, 0, changes + 5),)


def test_snapshots_are_asked_for_only_where_they_matter() -> None:
    begins, ends = {bucket(1): 4, bucket(3): 4}, {0: CHANGES_MIN, 1: 9, 2: 9, 3: 9}
    known = state(
        {bucket(i): end for i, end in ends.items()}, begins=begins, keyed=True, lake={bucket(3): 5}
    )
    assert [i for i in ends if asks_for_snapshot(known, bucket(i))] == [0, 1]
    assert not any(asks_for_snapshot(replace(known, has_primary_key=False), b) for b in known.ends)
    assert asks_for_rows(known, bucket(0), BucketSnapshot(3, CHANGES_MIN))
    assert not asks_for_rows(known, bucket(0), BucketSnapshot(3, CHANGES_MIN - 1))
    assert not asks_for_rows(known, bucket(1), BucketSnapshot(3, 9)), "it is needed in any case"


def test_a_snapshot_is_of_no_use_once_the_bucket_is_in_the_lake() -> None:
    kv = {bucket(0): BucketSnapshot(3, 6)}
    plan = plan_splits(state({bucket(0): 9}, lake={bucket(0): 2}, keyed=True, kv=kv), 10)
    assert plan.splits == (log_split(0, 2, 9),)


def test_a_log_that_begins_behind_the_lake_is_tiered_from_there_and_leaves_a_hole() -> None:
    lake = {bucket(0): 4, bucket(1): 9}
    plan = plan_splits(
        state({bucket(0): 9, bucket(1): 9}, lake=lake, begins={bucket(0): 7, bucket(1): 9}), 10
    )
    assert plan.splits == (log_split(0, 7, 9),)
    assert plan.holes == (Hole(bucket(0), 4, 7),)


def test_a_log_of_which_nothing_is_left_behind_the_lake_still_moves_the_offset() -> None:
    plan = plan_splits(state({bucket(0): 9}, lake={bucket(0): 4}, begins={bucket(0): 9}), 10)
    assert plan.splits == (log_split(0, 9, 9),)
    assert (plan.holes, plan.offsets) == ((Hole(bucket(0), 4, 9),), {bucket(0): 9})
    after = plan_splits(state({bucket(0): 9}, lake=plan.offsets, begins={bucket(0): 9}), 10)
    assert (after.splits, after.holes) == ((), ())


def test_a_gap_in_a_changelog_is_an_error_that_names_what_is_lost() -> None:
    gap = state({bucket(0): 9}, lake={bucket(0): 4}, begins={bucket(0): 7}, keyed=True)
    with pytest.raises(LakeError, match=r"db\.t, bucket 0: records 4 to 6 are neither"):
        plan_splits(gap, 10)


def test_a_partition_that_the_lake_has_no_offset_of_is_fresh_when_it_is_written() -> None:
    ends = {bucket(0, 5): 2, bucket(0, 6): 1}
    assert plan_splits(state(ends), 10).fresh == frozenset(), "nothing was tiered yet"
    plan = plan_splits(state(ends, lake={bucket(0, 5): 2, bucket(0, 4): 7}), 10)
    assert plan.fresh == {"2025"}
    empty = {bucket(0, 5): 2, bucket(0, 6): 0}
    assert plan_splits(state(empty, lake={bucket(0, 5): 1}), 10).fresh == frozenset()
    assert plan_splits(state(ends, lake={bucket(1, 5): 2, bucket(0, 6): 0}), 10).fresh == set()


def test_a_log_that_ends_before_the_lake_does_is_an_error() -> None:
    with pytest.raises(LakeError, match="up to 11, but the log ends at 9"):
        plan_splits(state({bucket(0): 9}, lake={bucket(0): 12}), 10)


def test_offsets_of_dropped_partitions_are_left_out() -> None:
    offsets = {bucket(0): 1, bucket(0, 5): 2, bucket(0, 9): 3}
    assert known_offsets([5], offsets) == {bucket(0): 1, bucket(0, 5): 2}


@given(
    ends=st.lists(st.integers(0, 100), min_size=1, max_size=6),
    grows=st.lists(st.lists(st.integers(0, 60), min_size=6, max_size=6), max_size=5),
    cap=st.integers(1, 40),
)
@settings(max_examples=100)
def test_rounds_cover_every_offset_exactly_once(
    ends: list[int], grows: list[list[int]], cap: int
) -> None:
    now = {bucket(i): end for i, end in enumerate(ends)}
    lake: dict[TableBucket, int] = {}
    covered: dict[TableBucket, list[int]] = {b: [] for b in now}
    for growth in [*grows, *([[0] * 6] * 500)]:
        now = {b: end + growth[b.bucket_id] for b, end in now.items()}
        plan = plan_splits(state(now, lake=lake or None), cap)
        assert len({split.bucket for split in plan.splits}) == len(plan.splits)
        assert all(0 < split.records <= cap for split in plan.splits)
        for split in plan.splits:
            covered[split.bucket] += range(split.starting_offset, split.stopping_offset)
        lake |= plan.offsets
        left = sum(end - lake.get(b, 0) for b, end in now.items())
        assert plan.remaining == left
        if not plan.splits and growth == [0] * 6:
            break
    assert covered == {b: list(range(end)) for b, end in now.items()}


@given(
    sizes=st.lists(st.integers(1, 200_000), max_size=40),
    tasks=st.integers(1, 12),
)
@settings(max_examples=100)
def test_packing_keeps_every_split_once_and_balances_tasks(sizes: list[int], tasks: int) -> None:
    splits = [log_split(i, 0, size) for i, size in enumerate(sizes)]
    groups = pack(splits, tasks)
    assert sorted(s.split_id for g in groups for s in g) == sorted(s.split_id for s in splits)
    assert len(groups) <= tasks
    assert all(groups)
    loads = [sum(map(cost, group)) for group in groups]
    if loads:
        # Taking the last split out of the fullest group leaves no more than the emptiest one has.
        fullest = max(groups, key=lambda group: sum(map(cost, group)))
        assert max(loads) - min(map(cost, fullest)) <= min(loads)


def test_little_work_goes_into_few_tasks_and_much_into_as_many_as_allowed() -> None:
    assert len(pack([log_split(0, 0, 10)], 8)) == 1
    assert len(pack([log_split(i, 0, 10) for i in range(2)], 8)) == 1
    assert len(pack([log_split(i, 0, 1_000_000) for i in range(6)], 8)) == 6
    assert len(pack([log_split(i, 0, 10) for i in range(100)], 8)) == 8
