"""Inside a task: what is read is what was planned, or the task fails."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.tiering.support import Driver, InlineRunner, append, create_table, lake_rows
from tests.tiering.test_round import PARTITIONED, rows
from zufluss.errors import UnknownTableOrBucketError, ZuflussError
from zufluss.lake.base import LakeError
from zufluss.tiering.splits import TieringLogSplit, TieringSplit
from zufluss.tiering.tasks import TieringJob, run_group


@pytest.fixture
def job(driver: Driver) -> TieringJob:
    """The job of a round that was committed: 10 records in one bucket."""
    path = create_table(driver.connection, "task", bucket_count=1)
    append(driver.connection, path, rows(10))
    driver.round()
    assert isinstance(driver.runner, InlineRunner)
    return driver.runner.jobs[0]


def only_split(job: TieringJob) -> TieringLogSplit:
    split = job.groups[0][0]
    assert isinstance(split, TieringLogSplit)
    return split


def with_split(job: TieringJob, split: TieringSplit) -> TieringJob:
    return replace(job, groups=((split,),))


def test_a_part_of_a_batch_is_read_exactly(job: TieringJob) -> None:
    part = replace(only_split(job), starting_offset=3, stopping_offset=7)
    (result,) = run_group(with_split(job, part), 0)
    assert (result.split_id, result.records) == (part.split_id, 4)
    assert result.max_timestamp_ms is not None


def test_a_range_beyond_the_end_is_never_taken_for_whole(job: TieringJob) -> None:
    gone = replace(only_split(job), bucket=only_split(job).bucket._replace(table_id=12345))
    with pytest.raises(LakeError, match="reading ended at offset 0 instead of 10"):
        list(run_group(with_split(job, gone), 0))


def test_a_table_of_another_id_is_not_read(job: TieringJob) -> None:
    other = replace(job, table=replace(job.table, table_id=12345))
    with pytest.raises(UnknownTableOrBucketError, match="was dropped and re-created"):
        list(run_group(other, 0))


def test_a_worker_that_knew_an_older_partition_of_that_name_finds_the_new_one(
    driver: Driver,
) -> None:
    path = create_table(
        driver.connection, "reborn", PARTITIONED, partition_keys=["day"], bucket_count=1
    )
    append(driver.connection, path, {"id": [1], "day": ["a"]})
    driver.round()
    driver.admin.drop_partition(path, "a")
    append(driver.connection, path, {"id": [2], "day": ["a"]})
    for _ in range(2):  # as Spark does, a task that failed is tried again
        try:
            driver.round()
            break
        except ZuflussError:
            continue
    assert lake_rows(driver.admin.table_info(path))["id"].to_pylist() == [2]
