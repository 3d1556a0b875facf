"""Compaction plans: what is rewritten, how often, and in which order."""

from __future__ import annotations

import itertools
import struct

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from zufluss.lake.base import LakeTableError
from zufluss.lake.iceberg.compaction import (
    SMALL_FILES_MAX,
    CompactionOptions,
    plan_bucket,
)
from zufluss.lake.iceberg.handle import LiveFile

OFFSET_ID = 5
OPTIONS = CompactionOptions(target_bytes=1000)


def live(offset: int, size: int, records: int = 100, deleted: int = 0, files: int = 0) -> LiveFile:
    return LiveFile(
        path=f"{offset:06}-{size}",
        records=records,
        size=size,
        deletes=tuple(f"{offset}-d{i}" for i in range(files or (deleted > 0))),
        deleted=deleted,
        lower_bounds={OFFSET_ID: struct.pack("<q", offset)},
    )


def groups(files: list[LiveFile], options: CompactionOptions = OPTIONS) -> list[list[str]]:
    plan = plan_bucket((0,), files, OFFSET_ID, options)
    return [[file.path for file in group] for group in plan.rewrites]


def test_small_files_of_similar_size_become_one_group_in_offset_order() -> None:
    files = [live(30, 10), live(10, 12), live(20, 9)]
    assert groups(files) == [["000010-12", "000020-9", "000030-10"]]


def test_fewer_small_files_than_worth_it_are_left_alone() -> None:
    assert groups([live(1, 10), live(2, 10)]) == []
    assert groups([live(1, 10), live(2, 10)], CompactionOptions(1000, files_min=2)) != []


def test_a_file_of_the_wanted_size_separates_its_neighbours() -> None:
    files = [live(1, 10), live(2, 10), live(3, 900), live(4, 10), live(5, 10)]
    assert groups(files) == []


def test_a_file_much_larger_than_the_newer_ones_is_not_written_again_for_them() -> None:
    files = [live(1, 700), live(2, 10), live(3, 10), live(4, 10)]
    assert groups(files) == [["000002-10", "000003-10", "000004-10"]]


def test_a_file_of_which_many_rows_are_deleted_is_written_anew() -> None:
    assert groups([live(1, 900, deleted=30)]) == [["000001-900"]]
    assert groups([live(1, 900, deleted=29)]) == []


def test_many_delete_files_of_a_file_that_stays_become_one() -> None:
    plan = plan_bucket((0,), [live(1, 900, deleted=10, files=10)], OFFSET_ID, OPTIONS)
    assert plan.rewrites == ()
    assert [file.path for file in plan.merges] == ["000001-900"]


@settings(max_examples=100)
@given(
    st.lists(st.tuples(st.integers(1, 1200), st.integers(0, 100), st.integers(0, 12)), max_size=40)
)
def test_groups_are_neighbours_and_no_file_is_in_two(
    shapes: list[tuple[int, int, int]],
) -> None:
    files = [live(i, size, 100, deleted, n) for i, (size, deleted, n) in enumerate(shapes)]
    plan = plan_bucket((0,), list(reversed(files)), OFFSET_ID, OPTIONS)
    order = {file.path: i for i, file in enumerate(files)}
    seen = [file.path for group in plan.rewrites for file in group]
    seen += [file.path for file in plan.merges]
    assert len(seen) == len(set(seen))
    for group in plan.rewrites:
        at = [order[file.path] for file in group]
        assert at == list(range(at[0], at[0] + len(at)))
        worn = [file for file in group if OPTIONS.is_worn(file)]
        assert len(group) >= OPTIONS.files_min or len(worn) == len(group) == 1


def test_rows_are_written_a_few_times_and_files_stay_few_over_a_thousand_rounds() -> None:
    """Without the rule of similar sizes each round would write everything small again."""
    options = CompactionOptions(target_bytes=1_000_000)
    numbers = itertools.count()
    files: list[LiveFile] = []
    written = most = 0
    for _ in range(1000):
        files.append(live(next(numbers), 1000))
        for group in plan_bucket((0,), files, OFFSET_ID, options).rewrites:
            size = sum(file.size for file in group)
            written += size
            at = files.index(group[0])
            first = struct.unpack("<q", group[0].lower_bounds[OFFSET_ID])[0]
            files[at : at + len(group)] = [live(first, size)]
        most = max(most, len(files))
    assert most <= SMALL_FILES_MAX
    assert written <= 10 * 1000 * 1000


def test_options_come_from_table_properties() -> None:
    told = CompactionOptions.of(
        {
            "write.target-file-size-bytes": "4096",
            "compaction.min-input-files": "7",
            "compaction.delete-ratio-threshold": "0.5",
            "compaction.delete-file-threshold": "2",
        }
    )
    assert told == CompactionOptions(4096, 7, 0.5, 2)
    assert CompactionOptions.of({}) == CompactionOptions()


@pytest.mark.parametrize(
    ("key", "value"),
    [("compaction.min-input-files", "1"), ("compaction.delete-ratio-threshold", "much")],
)
def test_an_option_that_makes_no_sense_is_named(key: str, value: str) -> None:
    with pytest.raises(LakeTableError, match=f"{key} is '{value}'; give a number from"):
        CompactionOptions.of({key: value})
