"""A table is tiered by Fluss's job and by ours, one after the other: no row is lost or doubled."""

from __future__ import annotations

import pytest

from tests.lake.readers import duckdb_rows, pyiceberg_rows
from tests.tiering.fluss_job import FlussJob, MissingSnapshotError
from tests.tiering.support import Driver, append, create_table, delete, lake_rows, upsert
from tests.tiering.test_round import KEYED, Crash, crash_at, rows
from tests.tiering.tiered_cluster import lake_table
from zufluss.errors import ErrorCode
from zufluss.lake.base import CommitterContext, LakeError, LakeTableError, catalog_properties
from zufluss.lake.iceberg import IcebergTiering

FENCED = ErrorCode.FENCED_TIERING_EPOCH_EXCEPTION


@pytest.fixture
def fluss(driver: Driver) -> FlussJob:
    return FlussJob(driver.connection)


def ids(driver: Driver, path: str, source: str) -> list[int]:
    return sorted(driver.connection.table(path).scan(source=source).to_arrow()["id"].to_pylist())


def ids_of_others(driver: Driver, path: str, *, by_key: bool = False) -> list[int]:
    """The ids in the lake as DuckDB reads them, and pyiceberg if there are no deletes by key."""
    location = lake_table(driver.admin.table_info(path)).metadata_location
    duck = sorted(duckdb_rows(location)["id"].to_pylist())
    if not by_key:
        assert sorted(pyiceberg_rows(location)["id"].to_pylist()) == duck
    return duck


def test_rounds_of_both_take_turns_on_a_log_table(driver: Driver, fluss: FlussJob) -> None:
    path = create_table(driver.connection, "log", bucket_count=2)
    for at, tier in enumerate((fluss.round, driver.round, driver.round, fluss.round, driver.round)):
        append(driver.connection, path, rows(10, at * 10))
        tier()
        expected = list(range(at * 10 + 10))
        assert ids(driver, path, "union") == ids(driver, path, "lake") == expected
        assert ids_of_others(driver, path) == expected
    offsets = lake_rows(driver.admin.table_info(path)).select(["__bucket", "__offset"])
    assert offsets.group_by(["__bucket", "__offset"]).aggregate([]).num_rows == 50


def test_rounds_of_both_take_turns_on_a_primary_key_table(driver: Driver, fluss: FlussJob) -> None:
    """Theirs delete by key, ours by position; each sees the rows that the other has replaced."""
    path = create_table(driver.connection, "keyed", KEYED, bucket_count=2)
    tiers = (driver.round, fluss.round, fluss.round, driver.round, fluss.round, driver.round)
    for at, tier in enumerate(tiers):
        upsert(driver.connection, path, rows(10, at * 5))
        delete(driver.connection, path, {"id": [at, at * 5 + 2]})
        upsert(driver.connection, path, {"id": [at * 5 + 3], "name": [f"again {at}"]})
        tier()
        seen = {
            source: sorted(
                map(str, driver.connection.table(path).scan(source=source).to_arrow().to_pylist())
            )
            for source in ("live", "lake", "union")
        }
        assert seen["lake"] == seen["union"] == seen["live"]
        assert ids_of_others(driver, path, by_key=True) == ids(driver, path, "live")


def test_compaction_leaves_deletes_by_key_as_they_are(driver: Driver, fluss: FlussJob) -> None:
    """It merges the files that no such delete concerns, and repeats whose snapshot it was."""
    path = create_table(driver.connection, "compacted", KEYED, bucket_count=1)
    tiers = (driver.round, fluss.round, *[driver.round] * 4, fluss.round)
    for at, tier in enumerate(tiers):
        upsert(driver.connection, path, rows(10, at * 8))
        tier()
    info = driver.admin.table_info(path)
    before = lake_table(info).metadata.current_snapshot_id
    context = CommitterContext(info, catalog_properties(info, "iceberg"))
    for _ in range(2):
        IcebergTiering().create_maintenance(context).compact(before)
        before = lake_table(info).metadata.current_snapshot_id
    assert ids_of_others(driver, path, by_key=True) == list(range(58))
    upsert(driver.connection, path, rows(10, 50))
    driver.round()
    assert ids_of_others(driver, path, by_key=True) == ids(driver, path, "union") == list(range(60))


def test_a_snapshot_of_theirs_that_was_not_reported_is_reported_by_our_round(
    driver: Driver, fluss: FlussJob
) -> None:
    """Their job died between its two commits."""
    path = create_table(driver.connection, "died", bucket_count=1)
    append(driver.connection, path, rows(10))
    taken = fluss.take()
    fluss.commit_to_lake(taken, fluss.prepare(taken))
    fluss.fail(taken)
    append(driver.connection, path, rows(10, 10))
    result = driver.round()
    assert (result.recovered, result.records) == (True, 10)
    assert ids_of_others(driver, path) == ids(driver, path, "union") == list(range(20))


def test_a_snapshot_of_ours_that_was_not_reported_is_reported_by_their_round(
    driver: Driver, fluss: FlussJob
) -> None:
    """Our service died between its two commits; their job reports, gives up, and tries again."""
    path = create_table(driver.connection, "ours_died", bucket_count=1)
    append(driver.connection, path, rows(10))
    with pytest.raises(Crash):
        driver.round(crash_at("server-commit"))
    append(driver.connection, path, rows(10, 10))
    taken = fluss.take()
    with pytest.raises(MissingSnapshotError):
        fluss.prepare(taken)
    fluss.fail(taken)
    fluss.round()
    assert ids_of_others(driver, path) == ids(driver, path, "union") == list(range(20))


def test_a_round_of_ours_is_refused_when_theirs_committed_in_between(
    driver: Driver, fluss: FlussJob
) -> None:
    path = create_table(driver.connection, "between", bucket_count=1)
    append(driver.connection, path, rows(10))
    taken = fluss.take()
    offsets_path = fluss.prepare(taken)
    fluss.fail(taken)  # the coordinator believes it gone
    lease = driver.receive()

    def interfere(step: str) -> None:
        if step == "lake-commit":
            fluss.commit_to_lake(taken, offsets_path)

    with pytest.raises(LakeError, match="another tiering service committed"):
        driver.tier(lease, interfere)
    driver.fail(lease)
    assert driver.round().recovered
    assert ids_of_others(driver, path) == list(range(10))


def test_a_job_that_lost_the_table_prepares_and_commits_nothing(
    driver: Driver, fluss: FlussJob
) -> None:
    """It has no epochs; the offsets tell that its round was overtaken by one of ours."""
    path = create_table(driver.connection, "lost", bucket_count=1)
    append(driver.connection, path, rows(10))
    stale = fluss.take()
    fluss.fail(stale)
    lease = driver.receive()
    with pytest.raises(AssertionError, match="no epochs"):
        fluss.prepare(stale)
    assert fluss.beat(stale) == FENCED
    driver.tier(lease)
    driver.finish(lease)
    append(driver.connection, path, rows(1, 10))
    again = fluss.take()
    with pytest.raises(AssertionError, match="another round was faster"):
        fluss.prepare(stale)
    fluss.commit_to_lake(again, fluss.prepare(again))
    assert ids_of_others(driver, path) == list(range(11))


def test_a_commit_of_theirs_behind_our_back_is_named_and_not_counted(
    driver: Driver, fluss: FlussJob
) -> None:
    """Their commit to the lake is not fenced: one that was prepared in time may come too late."""
    path = create_table(driver.connection, "late", bucket_count=1)
    append(driver.connection, path, rows(10))
    taken = fluss.take()
    offsets_path = fluss.prepare(taken)
    fluss.fail(taken)
    known = driver.round().snapshot_id
    fluss.commit_to_lake(taken, offsets_path)
    append(driver.connection, path, rows(10, 10))
    with pytest.raises(LakeTableError, match=f"Roll the lake table back to snapshot {known}"):
        driver.round()
    lake = lake_table(driver.admin.table_info(path))
    assert known is not None
    lake.manage_snapshots().rollback_to_snapshot(known).commit()
    driver.round()
    assert ids_of_others(driver, path) == ids(driver, path, "union") == list(range(20))


@pytest.mark.parametrize("summary", [{}, {"fluss-offsets": '{"0": 10}'}])
def test_a_snapshot_of_an_old_job_of_theirs_is_named(
    driver: Driver, fluss: FlussJob, summary: dict[str, str]
) -> None:
    path = create_table(driver.connection, "old", bucket_count=1)
    append(driver.connection, path, rows(10))
    lake = lake_table(driver.admin.table_info(path))
    empty = lake.schema().as_arrow().empty_table()
    lake.append(empty, snapshot_properties={"commit-user": "__fluss_lake_tiering", **summary})
    with pytest.raises(LakeTableError, match="a tiering job of Fluss before"):
        driver.round()
