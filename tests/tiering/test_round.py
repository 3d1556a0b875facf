"""Rounds against a real server and a real Iceberg lake; jobs run in this process."""

from __future__ import annotations

import pytest

from tests.tiering.support import (
    Driver,
    InlineRunner,
    append,
    create_table,
    delete,
    lake_rows,
    offsets_in_lake,
    upsert,
)
from zufluss.lake.base import (
    CommitResult,
    LakeCommitRefusedError,
    LakeCommitUnknownError,
    LakeError,
    LakeTableError,
)
from zufluss.lake.iceberg.committer import IcebergCommitter
from zufluss.testing.server import DevServer
from zufluss.tiering.round import STEPS, RoundEndedError, TableGoneError, validate
from zufluss.tiering.splits import TieringPlan
from zufluss.tiering.tasks import TieringJob

KEYED = "id INT NOT NULL, name STRING, PRIMARY KEY (id)"
PARTITIONED = "id INT, day STRING"


class Crash(BaseException):
    """The process ends here."""


def crash_at(step: str):
    def on_step(name: str) -> None:
        if name == step:
            raise Crash

    return on_step


def rows(count: int, start: int = 0) -> dict[str, list]:
    ids = list(range(start, start + count))
    return {"id": ids, "name": [f"n{i}" for i in ids]}


def test_a_log_table_arrives_whole_and_in_order(driver: Driver) -> None:
    path = create_table(driver.connection, "whole", bucket_count=2, bucket_keys=["id"])
    append(driver.connection, path, rows(300))
    steps: list[str] = []
    result = driver.round(steps.append)
    assert steps == list(STEPS)
    assert (result.records, result.remaining, result.committed) == (300, 0, True)
    found = lake_rows(driver.admin.table_info(path))
    assert sorted(found["id"].to_pylist()) == list(range(300))
    assert found.column_names == ["id", "name", "__bucket", "__offset", "__timestamp"]
    known = driver.admin.lake_snapshot(path)
    assert known is not None
    assert known.snapshot_id == result.snapshot_id
    assert dict(known.offsets) == driver.admin.list_all_offsets(path)
    assert driver.admin.lake_snapshot(path, readable=True) == known


def test_a_round_with_nothing_new_runs_no_job_and_makes_no_snapshot(driver: Driver) -> None:
    path = create_table(driver.connection, "idle", bucket_count=1)
    steps: list[str] = []
    first = driver.round(steps.append)
    assert steps == ["received", "recover", "plan", "finish"]
    assert (first.committed, first.snapshot_id) == (False, None)
    append(driver.connection, path, rows(3))
    second = driver.round()
    third = driver.round()
    assert (third.committed, third.snapshot_id) == (False, second.snapshot_id)
    assert isinstance(driver.runner, InlineRunner)
    assert len(driver.runner.jobs) == 1


def test_an_empty_table_has_a_lake_table_after_its_first_round(driver: Driver) -> None:
    path = create_table(driver.connection, "empty", bucket_count=1)
    driver.round()
    assert lake_rows(driver.admin.table_info(path)).num_rows == 0


def test_rounds_join_without_gap_and_overlap(driver: Driver) -> None:
    path = create_table(driver.connection, "joined", bucket_count=2)
    for start in range(0, 50, 10):
        append(driver.connection, path, rows(10, start))
        driver.round()
    found = lake_rows(driver.admin.table_info(path))
    assert sorted(found["id"].to_pylist()) == list(range(50))
    ends = driver.admin.list_all_offsets(path)
    wanted = sorted((b.bucket_id, o) for b, end in ends.items() for o in range(end))
    assert offsets_in_lake(driver.admin.table_info(path)) == wanted


def test_a_primary_key_table_has_its_newest_rows_only(driver: Driver) -> None:
    path = create_table(driver.connection, "keyed", KEYED, bucket_count=2)
    upsert(driver.connection, path, rows(20))
    driver.round()
    upsert(driver.connection, path, {"id": [3, 30], "name": ["new", "later"]})
    delete(driver.connection, path, {"id": [4, 5]})
    driver.round()
    found = lake_rows(driver.admin.table_info(path))
    names = dict(zip(found["id"].to_pylist(), found["name"].to_pylist(), strict=True))
    wanted = {i: f"n{i}" for i in range(20) if i not in (4, 5)} | {3: "new", 30: "later"}
    assert names == wanted
    assert found.num_rows == len(wanted)


def test_a_row_that_came_and_went_in_one_round_leaves_nothing(driver: Driver) -> None:
    path = create_table(driver.connection, "gone", KEYED, bucket_count=1)
    upsert(driver.connection, path, rows(1))
    delete(driver.connection, path, {"id": [0]})
    assert driver.round().committed
    assert lake_rows(driver.admin.table_info(path)).num_rows == 0
    assert not driver.round().committed


def test_a_cap_cuts_a_round_and_the_next_ones_take_the_rest(lake: DevServer) -> None:
    driver = Driver(lake, bucket_records_max="10")
    path = create_table(driver.connection, "capped", bucket_count=1)
    append(driver.connection, path, rows(25))
    results = [driver.round() for _ in range(3)]
    assert [r.records for r in results] == [10, 10, 5]
    assert [r.remaining for r in results] == [15, 5, 0]
    assert offsets_in_lake(driver.admin.table_info(path)) == [(0, o) for o in range(25)]
    driver.close()


def test_partitions_come_and_go_between_rounds(driver: Driver) -> None:
    path = create_table(
        driver.connection, "parted", PARTITIONED, partition_keys=["day"], bucket_count=1
    )
    append(driver.connection, path, {"id": [1, 2], "day": ["a", "b"]})
    driver.round()
    driver.admin.drop_partition(path, "a")
    append(driver.connection, path, {"id": [3, 4], "day": ["b", "c"]})
    driver.round()
    found = lake_rows(driver.admin.table_info(path)).sort_by("id")
    assert found["id"].to_pylist() == [1, 2, 3, 4]
    assert found["day"].to_pylist() == ["a", "b", "b", "c"]


def test_a_column_added_between_rounds_is_there_before_its_rows(driver: Driver) -> None:
    path = create_table(driver.connection, "wider", bucket_count=1)
    append(driver.connection, path, rows(2))
    driver.round()
    driver.admin.alter_table(path, add_columns="extra BIGINT")
    append(driver.connection, path, rows(2, 2) | {"extra": [7, 8]})
    driver.round()
    found = lake_rows(driver.admin.table_info(path)).sort_by("id")
    assert found["extra"].to_pylist() == [None, None, 7, 8]


@pytest.mark.parametrize("step", STEPS)
def test_a_crash_at_any_step_loses_and_doubles_nothing(driver: Driver, step: str) -> None:
    path = create_table(driver.connection, f"crash_{step.replace('-', '_')}", bucket_count=2)
    append(driver.connection, path, rows(20))
    driver.round()
    append(driver.connection, path, rows(20, 20))
    with pytest.raises(Crash):
        driver.round(crash_at(step))
    append(driver.connection, path, rows(20, 40))
    result = driver.round()
    assert result.recovered == (step == "server-commit")
    found = lake_rows(driver.admin.table_info(path))
    assert sorted(found["id"].to_pylist()) == list(range(60))
    ends = driver.admin.list_all_offsets(path)
    known = driver.admin.lake_snapshot(path)
    assert known is not None
    assert dict(known.offsets) == {b: end for b, end in ends.items() if end}
    assert driver.admin.lake_snapshot(path, readable=True) == known


def test_a_primary_key_table_survives_a_crash_between_the_commits(driver: Driver) -> None:
    path = create_table(driver.connection, "crash_keyed", KEYED, bucket_count=1)
    upsert(driver.connection, path, rows(5))
    with pytest.raises(Crash):
        driver.round(crash_at("server-commit"))
    delete(driver.connection, path, {"id": [0]})
    driver.round()
    found = lake_rows(driver.admin.table_info(path))
    assert sorted(found["id"].to_pylist()) == [1, 2, 3, 4]


def test_a_snapshot_whose_offsets_file_is_gone_is_reported_from_its_own_offsets(
    driver: Driver, lake: DevServer
) -> None:
    path = create_table(driver.connection, "file_gone", bucket_count=1)
    append(driver.connection, path, rows(4))
    with pytest.raises(Crash):
        driver.round(crash_at("server-commit"))
    files = list((lake.data_dir / "remote").rglob("*file_gone*/metadata/*.offsets"))
    assert files
    for file in files:
        file.unlink()
    result = driver.round()
    assert (result.recovered, result.committed) == (True, False)
    known = driver.admin.lake_snapshot(path)
    assert known is not None
    assert list(known.offsets.values()) == [4]


def test_such_a_snapshot_is_reported_without_partitions_that_were_dropped_meanwhile(
    driver: Driver, lake: DevServer
) -> None:
    columns = "id INT, name STRING"
    path = create_table(driver.connection, "part_gone", columns, partition_keys=["name"])
    for name in ("a", "b"):
        driver.admin.create_partition(path, {"name": name})
    append(driver.connection, path, {"id": [1, 2], "name": ["a", "b"]})
    driver.round()
    append(driver.connection, path, {"id": [3, 4], "name": ["a", "b"]})
    with pytest.raises(Crash):
        driver.round(crash_at("server-commit"))
    driver.admin.drop_partition(path, {"name": "a"})
    for file in (lake.data_dir / "remote").rglob("*part_gone*/metadata/*.offsets"):
        file.unlink()
    result = driver.round()
    assert (result.recovered, result.committed) == (True, False)
    known = driver.admin.lake_snapshot(path)
    assert known is not None
    assert [known.partition_names[b.partition_id] for b in known.offsets] == ["b"]


def test_a_commit_that_was_applied_although_it_failed_counts(
    driver: Driver, monkeypatch: pytest.MonkeyPatch
) -> None:
    commit = IcebergCommitter.commit

    def applied_but_failed(self: IcebergCommitter, *args: object) -> CommitResult:
        commit(self, *args)  # type: ignore[arg-type]
        raise ConnectionError("the answer was lost")

    path = create_table(driver.connection, "unknown_done", bucket_count=1)
    append(driver.connection, path, rows(4))
    monkeypatch.setattr(IcebergCommitter, "commit", applied_but_failed)
    assert driver.round().committed
    monkeypatch.undo()
    assert not driver.round().committed
    assert offsets_in_lake(driver.admin.table_info(path)) == [(0, o) for o in range(4)]


def test_a_commit_of_unknown_outcome_fails_the_round_and_keeps_its_files(
    driver: Driver, lake: DevServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    def not_applied(self: IcebergCommitter, *args: object) -> CommitResult:
        raise LakeCommitUnknownError("no answer")

    path = create_table(driver.connection, "unknown_lost", bucket_count=1)
    append(driver.connection, path, rows(4))
    monkeypatch.setattr(IcebergCommitter, "commit", not_applied)
    with pytest.raises(LakeCommitUnknownError, match="its files stay"):
        driver.round()
    monkeypatch.undo()
    assert len(list((lake.data_dir / "lake").rglob("*unknown_lost*/**/*.parquet"))) == 1
    driver.round()
    assert offsets_in_lake(driver.admin.table_info(path)) == [(0, o) for o in range(4)]


def test_a_zombie_commits_nothing_and_takes_its_files_with_it(
    driver: Driver, lake: DevServer
) -> None:
    path = create_table(driver.connection, "zombie", bucket_count=1)
    append(driver.connection, path, rows(4))
    stopped = driver.receive()

    def overtaken(name: str) -> None:
        if name == "lake-commit":
            driver.fail(stopped)
            driver.round()

    with pytest.raises((LakeCommitRefusedError, RoundEndedError)):
        driver.tier(stopped, overtaken)
    assert offsets_in_lake(driver.admin.table_info(path)) == [(0, o) for o in range(4)]
    assert len(list((lake.data_dir / "lake").rglob("*zombie*/**/*.parquet"))) == 1


def test_a_lease_that_is_lost_ends_the_round_at_its_next_step(driver: Driver) -> None:
    path = create_table(driver.connection, "lost", bucket_count=1)
    append(driver.connection, path, rows(4))
    lease = driver.receive()
    lease.end("gone to somebody else", lost=True)
    with pytest.raises(RoundEndedError, match="gone to somebody else"):
        driver.tier(lease)
    assert driver.admin.lake_snapshot(path) is None


def test_a_fenced_lease_cannot_prepare(driver: Driver) -> None:
    path = create_table(driver.connection, "fenced", bucket_count=1)
    append(driver.connection, path, rows(4))
    old = driver.receive()
    driver.fail(old)
    driver.receive()
    with pytest.raises(RoundEndedError, match="another tiering service has the table"):
        driver.tier(old)
    assert old.lost
    assert driver.admin.lake_snapshot(path) is None


@pytest.mark.parametrize("step", ["recover", "plan", "job", "validate", "prepare"])
def test_a_table_dropped_in_mid_round_ends_it_quietly(driver: Driver, step: str) -> None:
    path = create_table(driver.connection, f"dropped_{step}", bucket_count=1)
    append(driver.connection, path, rows(4))

    def drop(name: str) -> None:
        if name == step:
            driver.admin.drop_table(path)

    with pytest.raises(TableGoneError, match="was dropped"):
        driver.round(drop)


def test_a_table_created_again_starts_afresh(driver: Driver) -> None:
    path = create_table(driver.connection, "again", bucket_count=1)
    append(driver.connection, path, rows(4))
    driver.round()
    driver.admin.drop_table(path)
    create_table(driver.connection, "again", bucket_count=1)
    append(driver.connection, path, rows(2, 100))
    driver.round()
    found = lake_rows(driver.admin.table_info(path))
    assert sorted(found["id"].to_pylist()) == [100, 101]


def test_a_table_created_again_in_mid_round_gets_nothing_of_the_old_one(driver: Driver) -> None:
    path = create_table(driver.connection, "replaced", bucket_count=1)
    append(driver.connection, path, rows(4))

    def replace(name: str) -> None:
        if name == "validate":
            driver.admin.drop_table(path)
            create_table(driver.connection, "replaced", bucket_count=1)

    with pytest.raises(TableGoneError, match="dropped and re-created"):
        driver.round(replace)
    append(driver.connection, path, rows(1, 9))
    driver.round()
    assert lake_rows(driver.admin.table_info(path))["id"].to_pylist() == [9]


def test_a_partition_dropped_in_mid_round_is_left_out_by_the_next(driver: Driver) -> None:
    path = create_table(
        driver.connection, "part_gone", PARTITIONED, partition_keys=["day"], bucket_count=1
    )
    append(driver.connection, path, {"id": [1, 2], "day": ["a", "b"]})

    def drop(name: str) -> None:
        if name == "job":
            driver.admin.drop_partition(path, "a")

    with pytest.raises(RoundEndedError, match="partition a was dropped"):
        driver.round(drop)
    driver.round()
    assert lake_rows(driver.admin.table_info(path))["id"].to_pylist() == [2]


def test_a_lake_table_dropped_from_outside_is_an_error_with_a_way_out(driver: Driver) -> None:
    from pyiceberg.catalog import load_catalog

    from zufluss.lake.base import catalog_properties

    path = create_table(driver.connection, "stolen", bucket_count=1)
    append(driver.connection, path, rows(4))
    driver.round()
    info = driver.admin.table_info(path)
    catalog = load_catalog("zufluss", **catalog_properties(info, "iceberg"))
    catalog.drop_table(("fluss", "stolen"))
    with pytest.raises(LakeTableError, match=r"no longer has snapshot .* drop and re-create"):
        driver.round()
    driver.admin.drop_table(path)
    create_table(driver.connection, "stolen", bucket_count=1)
    append(driver.connection, path, rows(3, 7))
    driver.round()
    assert lake_rows(driver.admin.table_info(path))["id"].to_pylist() == [7, 8, 9]


def test_a_job_that_forgets_a_split_is_not_committed(lake: DevServer) -> None:
    class Forgetful(InlineRunner):
        def run(self, job: TieringJob, tag: str) -> list:
            return super().run(job, tag)[1:]

    driver = Driver(lake, Forgetful())
    path = create_table(driver.connection, "forgotten", bucket_count=1)
    append(driver.connection, path, rows(4))
    with pytest.raises(LakeError, match="0 results for 1 splits"):
        driver.round()
    assert driver.admin.lake_snapshot(path) is None
    driver.close()


def test_a_split_that_was_done_twice_is_refused() -> None:
    from tests.tiering.test_splits import log_split
    from zufluss.tiering.tasks import BucketResult

    split = log_split(0, 0, 5)
    result = BucketResult(split.split_id, split.bucket, 5, 1, 1, b"")
    validate(TieringPlan((split,), 0), [result])
    with pytest.raises(LakeError, match="some of them twice"):
        validate(TieringPlan((split,), 0), [result, result])
