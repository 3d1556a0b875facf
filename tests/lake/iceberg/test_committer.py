"""Rounds become snapshots exactly once, whatever errors, zombies and foreign writers do."""

from __future__ import annotations

import json
import multiprocessing
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pyiceberg.catalog import Catalog
from pyiceberg.exceptions import CommitFailedException, CommitStateUnknownException, ForbiddenError
from pyiceberg.table import Table
from pyiceberg.table.snapshots import Operation
from sqlalchemy.exc import OperationalError

from tests.lake.iceberg.lake import directory_properties, load_table, sqlite_properties
from tests.lake.iceberg.tables import (
    catalog_properties,
    commit_ids,
    committer,
    ids_in_lake,
    lake_table,
    rows,
    table_info,
    write_data,
    write_deletes,
    write_round,
)
from tests.lake.readers import READERS
from zufluss import system
from zufluss.lake.base import (
    COMMIT_USER,
    CommitterContext,
    LakeCommitRefusedError,
    LakeCommitUnknownError,
    LakeError,
    LakeTableError,
)
from zufluss.lake.iceberg import IcebergTiering
from zufluss.lake.iceberg.catalog import load
from zufluss.lake.iceberg.commit import commit_snapshot
from zufluss.lake.iceberg.committer import IcebergCommitter
from zufluss.lake.iceberg.handle import (
    DATA,
    POSITION_DELETES,
    FileWritten,
    IcebergCommittable,
    IcebergWriteResult,
    LiveFile,
    WriterHandle,
)
from zufluss.lake.iceberg.private import (
    SnapshotBuilder,
    SnapshotChange,
    live_entries,
)

EMPTY = IcebergCommittable()


class FaultyCatalog:
    """A real catalog behind a line that loses requests and answers. Looks remote to a committer."""

    def __init__(self, catalog: Catalog) -> None:
        self.real = catalog
        self.before: list[Exception] = []
        """Errors instead of the next commits."""
        self.after: list[Exception] = []
        """Errors after the next commits were applied."""
        self.load_errors: list[Exception] = []
        """Errors of the next loads."""
        self.on_commit: Callable[[], object] = lambda: None
        """Called once, before the next commit."""

    def load_table(self, identifier: Any) -> Table:
        if self.load_errors:
            raise self.load_errors.pop(0)
        table = self.real.load_table(identifier)
        table.catalog = self  # type: ignore[assignment]
        return table

    def create_table(self, identifier: Any, **options: Any) -> Table:
        self.real.create_table(identifier, **options)
        return self.load_table(identifier)

    def commit_table(self, table: Table, requirements: Any, updates: Any) -> Any:
        self.on_commit, hook = (lambda: None), self.on_commit
        hook()
        if self.before:
            raise self.before.pop(0)
        answer = self.real.commit_table(table, requirements, updates)
        if self.after:
            raise self.after.pop(0)
        return answer

    def __getattr__(self, name: str) -> Any:
        return getattr(self.real, name)


@pytest.fixture
def faulty(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FaultyCatalog:
    """The catalog that committers of the test get."""
    made = FaultyCatalog(load(catalog_properties(tmp_path)))
    monkeypatch.setattr("zufluss.lake.iceberg.committer.load", lambda _properties: made)
    return made


def files_below(directory: Path) -> set[str]:
    """Every file of the warehouse."""
    return {str(p) for p in (directory / "lake/warehouse").rglob("*") if p.is_file()}


def foreign_append(directory: Path, table: Any, ids: list[int]) -> None:
    """Somebody else appends with pyiceberg."""
    lake = lake_table(directory, table)
    lake.append(rows(ids).cast(lake.schema().as_arrow()))


def test_a_round_becomes_one_snapshot_that_says_whose_it_is(tmp_path: Path) -> None:
    table = table_info()
    made = committer(tmp_path, table)
    assert made.newest() is None
    results = [write_round(made, [1, 2], 0), write_round(made, [3], 1)]
    done = made.commit(made.to_committable(results), {"zufluss.round": "r1"}, None)
    newest = made.newest()
    assert newest is not None
    assert newest.snapshot_id == done.snapshot_id
    assert newest.properties == {
        "zufluss.round": "r1",
        "commit-user": COMMIT_USER,
        "zufluss.table-id": "7",
        "zufluss.table-created": "1000",
    }
    summary = lake_table(tmp_path, table).current_snapshot().summary  # type: ignore[union-attr]
    assert summary is not None
    assert (summary["total-records"], summary["added-data-files"]) == ("3", "2")
    assert ids_in_lake(tmp_path, table) == [1, 2, 3]


@pytest.mark.parametrize("properties_of", [sqlite_properties, directory_properties])
def test_a_commit_names_no_file_that_a_power_failure_can_take(
    properties_of: Callable[[Path], dict[str, str]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    synced: set[int] = set()
    for name in ("sync_data", "sync_names"):
        sync = getattr(system, name)

        def recorded(fd: int, sync: Callable[[int], None] = sync) -> None:
            synced.add(os.fstat(fd).st_ino)
            sync(fd)

        monkeypatch.setattr(system, name, recorded)
    properties = properties_of(tmp_path)
    made = IcebergCommitter(CommitterContext(table_info(), properties))
    made.prepare_table()
    for number in range(3):
        commit_ids(made, [number])
    metadata = Path(load_table(table_info(), properties).metadata_location[7:]).parent
    files = [path for path in metadata.iterdir() if path.name != "version-hint.text"]
    assert len(files) == 3 * 2 + 4
    assert [path for path in (metadata, *files) if path.stat().st_ino not in synced] == []
    synced.clear()
    other = IcebergCommitter(CommitterContext(table_info(), properties))
    newest = other.newest()
    assert newest is not None
    assert metadata.stat().st_ino in synced, "its writer may have been killed before it synced"


def test_files_are_pruned_by_partition_and_bounds(tmp_path: Path) -> None:
    table = table_info()
    made = committer(tmp_path, table)
    results = [write_round(made, [bucket * 10, bucket * 10 + 1], bucket) for bucket in range(4)]
    made.commit(made.to_committable(results), {}, None)
    lake = lake_table(tmp_path, table)
    assert len(list(lake.scan("__bucket = 2").plan_files())) == 1
    assert len(list(lake.scan("id = 31").plan_files())) == 1


def test_an_empty_commit_only_carries_properties(tmp_path: Path) -> None:
    table = table_info()
    made = committer(tmp_path, table)
    first = made.commit(EMPTY, {"fluss-offsets": "/a"}, None)
    second = made.commit(EMPTY, {"fluss-offsets": "/b"}, first.snapshot_id)
    newest = made.newest()
    assert newest is not None
    assert (newest.snapshot_id, newest.properties["fluss-offsets"]) == (second.snapshot_id, "/b")
    assert ids_in_lake(tmp_path, table) == []


@pytest.mark.parametrize("stale", [None, 12345])
def test_a_zombie_with_a_stale_expectation_is_refused(tmp_path: Path, stale: int | None) -> None:
    table = table_info()
    zombie, other = committer(tmp_path, table), committer(tmp_path, table)
    committable = zombie.to_committable([write_round(zombie, [1])])
    commit_ids(other, [2])
    before = files_below(tmp_path)
    with pytest.raises(LakeCommitRefusedError, match="another tiering service committed"):
        zombie.commit(committable, {}, stale)
    assert ids_in_lake(tmp_path, table) == [2]
    assert files_below(tmp_path) == before, "manifests of the refused commit were left behind"


def test_a_foreign_append_in_between_does_not_matter(tmp_path: Path) -> None:
    table = table_info()
    made = committer(tmp_path, table)
    first = commit_ids(made, [1])
    committable = made.to_committable([write_round(made, [3])])
    foreign_append(tmp_path, table, [2])
    second = made.commit(committable, {}, first)
    foreign_append(tmp_path, table, [4])
    newest = made.newest()
    assert newest is not None
    assert newest.snapshot_id == second.snapshot_id
    assert ids_in_lake(tmp_path, table) == [1, 2, 3, 4]


def test_a_committer_that_loaded_the_table_long_ago_is_not_refused_for_that(
    tmp_path: Path,
) -> None:
    table = table_info()
    early = committer(tmp_path, table)
    first = commit_ids(committer(tmp_path, table), [1])
    early.commit(early.to_committable([write_round(early, [2])]), {}, first)
    assert ids_in_lake(tmp_path, table) == [1, 2]


def test_a_commit_of_ours_between_two_attempts_is_seen(
    tmp_path: Path, faulty: FaultyCatalog
) -> None:
    table = table_info()
    made, other = committer(tmp_path, table), committer(tmp_path, table)
    committable = made.to_committable([write_round(made, [1])])
    faulty.on_commit = lambda: commit_ids(other, [2])
    with pytest.raises(LakeCommitRefusedError, match="another tiering service committed"):
        made.commit(committable, {}, None)
    assert ids_in_lake(tmp_path, table) == [2]


@pytest.mark.parametrize(
    "problem",
    [CommitStateUnknownException("502"), ConnectionError("reset"), CommitFailedException("409")],
)
def test_a_commit_whose_answer_is_lost_is_found(
    tmp_path: Path, faulty: FaultyCatalog, problem: Exception
) -> None:
    table = table_info()
    made = committer(tmp_path, table)
    committable = made.to_committable([write_round(made, [1])])
    faulty.after = [problem]
    done = made.commit(committable, {}, None)
    newest = made.newest()
    assert newest is not None
    assert newest.snapshot_id == done.snapshot_id
    assert ids_in_lake(tmp_path, table) == [1]
    assert len(lake_table(tmp_path, table).snapshots()) == 1


def test_a_commit_whose_request_is_lost_is_unknown_and_deletes_nothing(
    tmp_path: Path, faulty: FaultyCatalog
) -> None:
    table = table_info()
    made = committer(tmp_path, table)
    committable = made.to_committable([write_round(made, [1])])
    before = files_below(tmp_path)
    faulty.before = [TimeoutError("no answer")]
    with pytest.raises(LakeCommitUnknownError, match="not known, look for the snapshot"):
        made.commit(committable, {}, None)
    assert before < files_below(tmp_path)
    assert made.newest() is None


def test_a_commit_is_unknown_when_the_catalog_cannot_be_asked(
    tmp_path: Path, faulty: FaultyCatalog
) -> None:
    table = table_info()
    made = committer(tmp_path, table)
    committable = made.to_committable([write_round(made, [1])])
    faulty.after = [ConnectionError("reset")]
    faulty.load_errors = [ConnectionError("down")] * 3
    with pytest.raises(LakeCommitUnknownError):
        made.commit(committable, {}, None)
    assert made.newest() is not None, "it was applied, and is found by asking again"
    assert ids_in_lake(tmp_path, table) == [1]


def test_a_commit_is_unknown_when_the_table_vanished_after_it(
    tmp_path: Path, faulty: FaultyCatalog
) -> None:
    """It was applied, and renamed by whoever created a table of its name: its manifests live."""
    table = table_info()
    made = committer(tmp_path, table)
    committable = made.to_committable([write_round(made, [1])])
    faulty.after = [ConnectionError("lost")]
    commit, real = faulty.commit_table, faulty.real

    def commit_and_rename(*asked: Any) -> Any:
        try:
            return commit(*asked)
        finally:
            real.rename_table(tuple(table.path), ("shop", "renamed"))

    faulty.commit_table = commit_and_rename  # type: ignore[method-assign]
    with pytest.raises(LakeCommitUnknownError):
        made.commit(committable, {}, None)
    found = real.load_table(("shop", "renamed")).scan(selected_fields=("id",)).to_arrow()
    assert found["id"].to_pylist() == [1]


def test_a_lost_request_is_tried_again_once_the_head_has_moved(
    tmp_path: Path, faulty: FaultyCatalog
) -> None:
    table = table_info()
    made = committer(tmp_path, table)
    committable = made.to_committable([write_round(made, [1])])
    faulty.on_commit = lambda: foreign_append(tmp_path, table, [2])
    faulty.before = [ConnectionError("reset")]
    made.commit(committable, {}, None)
    assert ids_in_lake(tmp_path, table) == [1, 2]


def test_a_storm_of_conflicts_ends_with_one_snapshot(tmp_path: Path, faulty: FaultyCatalog) -> None:
    table = table_info()
    made = committer(tmp_path, table)
    committable = made.to_committable([write_round(made, [1])])
    faulty.before = [CommitFailedException("409")] * 6
    made.commit(committable, {}, None)
    assert ids_in_lake(tmp_path, table) == [1]
    lists = [path for path in files_below(tmp_path) if "/snap-" in path]
    assert len(lists) == 1, "manifest lists of failed attempts were left behind"


def test_a_catalog_that_refuses_outright_is_a_definite_error(
    tmp_path: Path, faulty: FaultyCatalog
) -> None:
    made = committer(tmp_path, table_info())
    committable = made.to_committable([write_round(made, [1])])
    before = files_below(tmp_path)
    faulty.before = [ForbiddenError("no")]
    with pytest.raises(LakeError, match="was not applied: ForbiddenError") as caught:
        made.commit(committable, {}, None)
    assert not isinstance(caught.value, LakeCommitUnknownError)
    assert files_below(tmp_path) == before


def test_a_locked_sqlite_database_is_tried_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    table = table_info()
    made = committer(tmp_path, table)
    committable = made.to_committable([write_round(made, [1])])
    catalog = load(catalog_properties(tmp_path))
    real, errors = catalog.commit_table, [OperationalError("UPDATE", {}, Exception("locked"))]

    def commit_table(*args: Any) -> Any:
        if errors:
            raise errors.pop()
        return real(*args)

    monkeypatch.setattr(catalog, "commit_table", commit_table)
    made.commit(committable, {}, None)
    assert ids_in_lake(tmp_path, table) == [1]


def test_a_commit_to_another_branch_in_between_is_tried_again(tmp_path: Path) -> None:
    table = table_info()
    made = committer(tmp_path, table)
    first = commit_ids(made, [1])
    lake_table(tmp_path, table).manage_snapshots().create_branch(first, "side").commit()
    made.prepare_table()
    committable = made.to_committable([write_round(made, [2])])
    lake = lake_table(tmp_path, table)
    lake.append(rows([9]).cast(lake.schema().as_arrow()), branch="side")
    made.commit(committable, {}, first)
    assert ids_in_lake(tmp_path, table) == [1, 2]


def test_history_never_goes_back_in_time(tmp_path: Path) -> None:
    made = committer(tmp_path, table_info())
    commit_ids(made, [1])
    lake = lake_table(tmp_path, table_info())
    later = lake.metadata.last_updated_ms + 3_600_000
    lake.metadata = lake.metadata.model_copy(update={"last_updated_ms": later})
    staged = SnapshotBuilder(SnapshotChange("append"), 5).stage(lake)
    assert staged.snapshot.timestamp_ms == later


def test_a_table_dropped_in_mid_round_is_a_clear_error(tmp_path: Path) -> None:
    table = table_info()
    made = committer(tmp_path, table)
    committable = made.to_committable([write_round(made, [1])])
    load(catalog_properties(tmp_path)).drop_table(tuple(table.path))
    with pytest.raises(LakeError, match=r"shop\.orders was dropped"):
        made.commit(committable, {}, None)
    with pytest.raises(LakeError, match=r"shop\.orders was dropped"):
        made.commit(committable, {}, 5)
    assert load(catalog_properties(tmp_path)).list_tables("shop") == []


def _commit_many(directory: str, first: int) -> None:
    table = table_info()
    for number in range(first, first + 5):
        made = committer(Path(directory), table)
        committed = False
        while not committed:
            try:
                commit_ids(made, [number])
                committed = True
            except LakeCommitRefusedError:
                continue


def test_two_processes_that_commit_at_once_lose_and_double_nothing(tmp_path: Path) -> None:
    context = multiprocessing.get_context("spawn")
    workers = [
        context.Process(target=_commit_many, args=(str(tmp_path), first)) for first in (0, 100)
    ]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert [worker.exitcode for worker in workers] == [0, 0]
    table = table_info()
    assert ids_in_lake(tmp_path, table) == [*range(5), *range(100, 105)]
    assert len(lake_table(tmp_path, table).snapshots()) == 10


KEYED = table_info(primary_key=["id"])


def upsert(made: IcebergCommitter, new: list[int], gone: list[int], first_offset: int) -> int:
    """A round on one bucket that deletes ids (by their row in the live files) and adds others."""
    made.prepare_table()
    handle = WriterHandle.from_bytes(made.writer_handle())
    files = [write_data(handle, rows(new, 0, first_offset), (0,))] if new else []
    for live in handle.live((0,)):
        found = pa.parquet.read_table(live.path.removeprefix("file://"))["id"].to_pylist()
        positions = [at for at, number in enumerate(found) if number in gone]
        if positions:
            files.append(write_deletes(handle, live.path, positions, (0,)))
    result = IcebergWriteResult(tuple(files), handle.base_snapshot_id)
    newest = made.newest()
    expected = newest.snapshot_id if newest else None
    return made.commit(made.to_committable([result]), {}, expected).snapshot_id


def test_deletes_apply_to_older_files_and_older_snapshots_stay(tmp_path: Path) -> None:
    made = committer(tmp_path, KEYED)
    first = upsert(made, [1, 2, 3], [], 0)
    upsert(made, [2, 4], [2, 3], 3)
    assert ids_in_lake(tmp_path, KEYED) == [1, 2, 4]
    assert ids_in_lake(tmp_path, KEYED, first) == [1, 2, 3]
    summary = lake_table(tmp_path, KEYED).current_snapshot().summary  # type: ignore[union-attr]
    assert summary is not None
    assert summary.operation is Operation.OVERWRITE
    assert (summary["total-position-deletes"], summary["added-delete-files"]) == ("2", "1")


def test_the_handle_names_live_files_with_their_deletes_and_key_bounds(tmp_path: Path) -> None:
    made = committer(tmp_path, KEYED)
    upsert(made, [1, 2, 3], [], 0)
    upsert(made, [4], [2], 3)
    handle = WriterHandle.from_bytes(made.writer_handle())
    old, new = sorted(handle.live((0,)), key=lambda file: -file.records)
    assert (old.records, len(old.deletes), old.deleted) == (3, 1, 1)
    assert (new.records, new.deletes) == (1, ())
    assert old.lower_bounds == {1: (1).to_bytes(8, "little")}
    assert old.upper_bounds == {1: (3).to_bytes(8, "little")}
    assert handle.narrowed([(3,)]).files == {}
    assert "uri" not in handle.io
    assert not any(key.startswith("zufluss.") for key in handle.io)


def test_a_log_tables_handle_names_no_files(tmp_path: Path) -> None:
    made = committer(tmp_path, table_info())
    commit_ids(made, [1])
    assert WriterHandle.from_bytes(made.writer_handle()).files == {}


def test_a_fresh_partition_is_emptied_of_what_is_there_at_each_attempt(
    tmp_path: Path, faulty: FaultyCatalog
) -> None:
    """Another writer adds to the old partition, and the commit is tried again on top of that."""
    columns = "day STRING NOT NULL, id BIGINT, name STRING"
    table = table_info(columns, partition_keys=["day"], buckets=1)
    made = committer(tmp_path, table)

    def data(day: str, ids: list[int]) -> pa.Table:
        return rows(ids).add_column(0, "day", pa.array([day] * len(ids)))

    def written(day: str, ids: list[int]) -> IcebergCommittable:
        handle = WriterHandle.from_bytes(made.writer_handle())
        file = write_data(handle, data(day, ids), (day, 0))
        return IcebergCommittable((file,), handle.base_snapshot_id)

    first = made.commit(written("mon", [1, 2]), {}, None).snapshot_id
    second = made.commit(written("tue", [3]), {}, first, ["tue"]).snapshot_id
    fresh = written("mon", [9])

    def foreign() -> None:
        lake = lake_table(tmp_path, table)
        for day, ids in (("mon", [4]), ("tue", [5])):
            lake.append(data(day, ids).cast(lake.schema().as_arrow()))

    faulty.on_commit = foreign
    third = made.commit(fresh, {}, second, ["mon"]).snapshot_id
    assert ids_in_lake(tmp_path, table) == [3, 5, 9]
    assert ids_in_lake(tmp_path, table, second) == [1, 2, 3]
    metadata = lake_table(tmp_path, table).metadata
    summaries = [metadata.snapshot_by_id(i).summary for i in (first, second, third)]  # type: ignore[union-attr]
    assert [s.operation for s in summaries if s] == [
        Operation.APPEND,
        Operation.APPEND,
        Operation.OVERWRITE,
    ]
    assert summaries[-1] is not None
    assert summaries[-1]["total-records"] == "3"


def test_deletes_of_a_file_that_a_foreign_writer_replaced_are_refused(tmp_path: Path) -> None:
    made = committer(tmp_path, KEYED)
    first = upsert(made, [1, 2], [], 0)
    handle = WriterHandle.from_bytes(made.writer_handle())
    (live,) = handle.live((0,))
    deletes = write_deletes(handle, live.path, [0], (0,))
    lake = lake_table(tmp_path, KEYED)
    rewritten = write_data(handle, rows([1, 2]), (0,))
    change = SnapshotChange("replace", [rewritten], frozenset({live.path}))
    commit_snapshot(lake, change, lambda _table: None)
    with pytest.raises(LakeCommitRefusedError, match="replaced by another writer"):
        made.commit(IcebergCommittable((deletes,), handle.base_snapshot_id), {}, first)
    assert ids_in_lake(tmp_path, KEYED) == [1, 2]


def test_replacing_files_keeps_rows_and_counts(tmp_path: Path) -> None:
    made = committer(tmp_path, KEYED)
    upsert(made, [1, 2, 3], [], 0)
    upsert(made, [4], [2], 3)
    lake = lake_table(tmp_path, KEYED)
    gone = frozenset(e.data_file.file_path for e in live_entries(lake.io, lake.current_snapshot()))
    handle = WriterHandle.from_bytes(made.writer_handle())
    change = SnapshotChange("replace", [write_data(handle, rows([1, 3, 4]), (0,))], gone)
    commit_snapshot(lake, change, lambda _table: None)
    assert ids_in_lake(tmp_path, KEYED) == [1, 3, 4]
    summary = lake_table(tmp_path, KEYED).current_snapshot().summary  # type: ignore[union-attr]
    assert summary is not None
    assert summary.operation is Operation.REPLACE
    assert [summary[f"total-{n}"] for n in ("data-files", "delete-files", "records")] == [
        *("1", "0", "3")
    ]
    with pytest.raises(LakeCommitRefusedError, match="another writer replaced them"):
        commit_snapshot(lake_table(tmp_path, KEYED), change, lambda _table: None)
    upsert(made, [5], [3], 4)
    assert ids_in_lake(tmp_path, KEYED) == [1, 4, 5]


def test_many_commits_make_few_manifests_and_deletes_still_apply(tmp_path: Path) -> None:
    table = table_info(
        primary_key=["id"], custom={"iceberg.commit.manifest.min-count-to-merge": "4"}
    )
    made = committer(tmp_path, table)
    for number in range(24):
        upsert(made, [number, 1000], [number - 3, 1000], number * 2)
    lake = lake_table(tmp_path, table)
    for name, read in READERS.items():
        found = sorted(read(lake.metadata_location)["id"].to_pylist())
        assert (name, found) == (name, [21, 22, 23, 1000])
    snapshot = lake.current_snapshot()
    assert snapshot is not None
    manifests = snapshot.manifests(lake.io)
    assert len(manifests) < 20
    sequence = [entry.sequence_number for entry in live_entries(lake.io, snapshot)]
    assert len(set(sequence)) == 24, "entries keep their sequence numbers through merges"
    for manifest in manifests:
        numbers = [e.sequence_number or 0 for e in manifest.fetch_manifest_entry(lake.io)]
        assert manifest.min_sequence_number == min(numbers)


def test_old_metadata_files_do_not_pile_up(tmp_path: Path) -> None:
    table = table_info(custom={"iceberg.write.metadata.previous-versions-max": "3"})
    made = committer(tmp_path, table)
    expected = None
    for _ in range(10):
        expected = made.commit(EMPTY, {}, expected).snapshot_id
    assert len([path for path in files_below(tmp_path) if path.endswith("metadata.json")]) == 4


def test_abort_removes_files_of_a_round_but_none_that_the_lake_uses(tmp_path: Path) -> None:
    table = table_info()
    made = committer(tmp_path, table)
    used = made.to_committable([write_round(made, [1])])
    made.commit(used, {}, None)
    lost = made.to_committable([write_round(made, [2])])
    made.abort(IcebergCommittable(used.files + lost.files))
    assert ids_in_lake(tmp_path, table) == [1]
    assert not Path(lost.files[0].path.removeprefix("file://")).exists()


def test_results_of_different_bases_or_with_a_file_twice_are_no_committable(tmp_path: Path) -> None:
    made = committer(tmp_path, table_info())
    result = write_round(made, [1])
    with pytest.raises(LakeError, match="a file twice"):
        made.to_committable([result, result])
    with pytest.raises(LakeError, match="base snapshots"):
        made.to_committable([result, replace(result, base_snapshot_id=5)])


def test_the_newest_snapshot_is_known_even_after_it_was_expired(tmp_path: Path) -> None:
    table = table_info()
    made = committer(tmp_path, table)
    ours = commit_ids(made, [1], **{"zufluss.round": "r1"})
    foreign_append(tmp_path, table, [2])
    lake_table(tmp_path, table).maintenance.expire_snapshots().by_id(ours).commit()
    newest = made.newest()
    assert newest is not None
    assert (newest.snapshot_id, newest.properties["zufluss.round"]) == (ours, "r1")
    made.commit(made.to_committable([write_round(made, [3])]), {}, ours)
    assert ids_in_lake(tmp_path, table) == [1, 2, 3]


def test_a_rollback_from_outside_makes_the_older_snapshot_the_newest(tmp_path: Path) -> None:
    table = table_info()
    made = committer(tmp_path, table)
    first = commit_ids(made, [1])
    commit_ids(made, [2])
    lake_table(tmp_path, table).manage_snapshots().rollback_to_snapshot(first).commit()
    newest = made.newest()
    assert newest is not None
    assert newest.snapshot_id == first


def test_a_table_created_anew_gets_a_lake_table_of_its_own(tmp_path: Path) -> None:
    old, new = table_info(), table_info(table_id=8, created=2000)
    former = committer(tmp_path, old)
    commit_ids(former, [1])
    pending = former.to_committable([write_round(former, [9])])
    made = committer(tmp_path, new)
    assert made.newest() is None
    commit_ids(made, [2])
    assert ids_in_lake(tmp_path, new) == [2]
    renamed = load(catalog_properties(tmp_path)).load_table(("shop", "orders__7_1000"))
    assert renamed.scan().to_arrow()["id"].to_pylist() == [1]
    assert renamed.location() != lake_table(tmp_path, new).location()
    assert former.newest() is None
    with pytest.raises(LakeCommitRefusedError):
        former.commit(pending, {}, None)
    with pytest.raises(LakeTableError, match="belongs to the newer table 8"):
        former.prepare_table()
    assert ids_in_lake(tmp_path, new) == [2]


def test_a_location_is_not_shared_with_an_earlier_table_of_the_name(tmp_path: Path) -> None:
    commit_ids(committer(tmp_path, table_info(table_id=7, created=7)), [1])
    committer(tmp_path, table_info(table_id=8, created=8))
    catalog = load(catalog_properties(tmp_path))
    catalog.drop_table(("shop", "orders"))
    committer(tmp_path, table_info(table_id=9, created=9))
    names = ("orders", "orders__7_7")
    locations = {catalog.load_table(("shop", name)).location() for name in names}
    assert len(locations) == 2


def test_a_lake_table_of_somebody_else_is_left_alone(tmp_path: Path) -> None:
    catalog = load(catalog_properties(tmp_path))
    catalog.create_namespace("shop")
    catalog.create_table(("shop", "orders"), pa.schema([("x", pa.int32())]))
    with pytest.raises(
        LakeTableError, match="was not made by zufluss, and cannot be taken over: its columns are x"
    ):
        committer(tmp_path, table_info())


def test_writers_handle_of_a_table_that_is_not_there_says_so(tmp_path: Path) -> None:
    made = IcebergCommitter(CommitterContext(table_info(), catalog_properties(tmp_path)))
    assert made.newest() is None
    with pytest.raises(LakeTableError, match="prepare it first"):
        made.writer_handle()


values = st.one_of(st.none(), st.booleans(), st.integers(-(2**62), 2**62), st.text(max_size=9))
partitions = st.lists(values, max_size=3).map(tuple)
counts = st.dictionaries(st.integers(1, 99), st.integers(0, 2**40), max_size=3)
bounds = st.dictionaries(st.integers(1, 99), st.binary(max_size=9), max_size=3)
written = st.builds(
    FileWritten,
    kind=st.sampled_from([DATA, POSITION_DELETES]),
    path=st.text(max_size=20),
    size=st.integers(0, 2**40),
    records=st.integers(0, 2**40),
    partition=partitions,
    column_sizes=counts,
    value_counts=counts,
    null_counts=counts,
    nan_counts=counts,
    lower_bounds=bounds,
    upper_bounds=bounds,
    split_offsets=st.lists(st.integers(0, 2**40), max_size=3).map(tuple),
    referenced_data_file=st.none() | st.text(max_size=9),
)
live = st.builds(
    LiveFile,
    path=st.text(max_size=9),
    records=st.integers(0, 9),
    size=st.integers(0, 9),
    deletes=st.lists(st.text(max_size=5), max_size=2).map(tuple),
    deleted=st.integers(0, 9),
    lower_bounds=bounds,
    upper_bounds=bounds,
)


@settings(max_examples=50)
@given(st.lists(written, max_size=3).map(tuple), st.none() | st.integers(0, 2**62))
def test_what_tasks_wrote_survives_the_way_to_the_driver(
    files: tuple[FileWritten, ...], base: int | None
) -> None:
    tiering = IcebergTiering()
    result = IcebergWriteResult(files, base)
    assert tiering.write_result_serde.loads(tiering.write_result_serde.dumps(result)) == result
    committable = IcebergCommittable(files, base)
    kept = tiering.committable_serde.loads(tiering.committable_serde.dumps(committable))
    assert (kept, type(kept)) == (committable, IcebergCommittable)


@settings(max_examples=50)
@given(st.dictionaries(partitions, st.lists(live, max_size=2).map(tuple), max_size=3))
def test_a_handle_survives_the_way_to_the_tasks(files: dict[Any, tuple[LiveFile, ...]]) -> None:
    handle = WriterHandle("{}", "[]", "file:///t", "file:///t/data", {"a": "b"}, {}, 5, files)
    assert WriterHandle.from_bytes(handle.to_bytes()) == handle


def test_the_newest_snapshot_stands_in_the_table_properties_too(tmp_path: Path) -> None:
    table = table_info()
    made = committer(tmp_path, table)
    done = commit_ids(made, [1])
    found = json.loads(lake_table(tmp_path, table).properties["zufluss.newest"])
    assert found["snapshot"] == done
