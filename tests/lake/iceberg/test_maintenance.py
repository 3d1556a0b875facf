"""Housekeeping of Iceberg tables: races, crashes, and what every reader sees afterwards."""

from __future__ import annotations

import os
import random
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from pyiceberg.table import Table

from tests.counts import FULL
from tests.lake.iceberg.lake import files_of, load_table, sqlite_properties
from tests.lake.readers import READERS, duckdb_rows
from tests.paths import ROOT
from tests.tiering.fluss_job import delete_by_key
from zufluss.lake.base import LakeCommitRefusedError, LakeTableError
from zufluss.lake.iceberg import IcebergTiering, compaction, maintenance
from zufluss.lake.iceberg.commit import commit_snapshot
from zufluss.lake.iceberg.compaction import Rewriter
from zufluss.lake.iceberg.deletes import DELETE_SCHEMA
from zufluss.lake.iceberg.handle import POSITION_DELETES, FileWritten
from zufluss.lake.iceberg.orphans import remove
from zufluss.lake.iceberg.private import SnapshotChange, partition_of
from zufluss.testing.lake_rounds import LakeRounds, lake_table, plain_rows
from zufluss.testing.lake_samples import (
    ALL_TYPES,
    EDGES,
    FULL_ROW,
    KEYED,
    LOG,
    NULLS,
    key_rows,
    keyed_rows,
    named_rows,
    partition_rows,
    random_changes,
    typed_rows,
)

HOUR_MS = 3_600_000


def rounds(tmp_path: Path, columns: str, **properties: str) -> LakeRounds:
    table = lake_table("iceberg", columns, custom_properties=properties)
    lake = LakeRounds(IcebergTiering(), table, sqlite_properties(tmp_path))
    lake.prepare()
    return lake


@pytest.fixture
def log(tmp_path: Path) -> LakeRounds:
    return rounds(tmp_path, LOG)


@pytest.fixture
def keyed(tmp_path: Path) -> LakeRounds:
    return rounds(tmp_path, KEYED)


def iceberg(lake: LakeRounds) -> Table:
    return load_table(lake.table, lake.properties)


def compact(lake: LakeRounds) -> int | None:
    with lake.maintenance() as housekeeping:
        done = housekeeping.compact(lake.newest_id())
    return None if done is None else done.snapshot_id


def expire(lake: LakeRounds, keep: tuple[int, ...] = ()) -> int:
    with lake.maintenance() as housekeeping:
        return housekeeping.expire(now_ms() + HOUR_MS, keep)


def sweep(lake: LakeRounds) -> int:
    with lake.maintenance() as housekeeping:
        return housekeeping.sweep(now_ms() + HOUR_MS).removed


def now_ms() -> int:
    return time.time_ns() // 1_000_000


def assert_readers_agree(lake: LakeRounds) -> None:
    """DuckDB, pyiceberg and polars see what the model holds."""
    location = iceberg(lake).metadata_location
    for name, read in READERS.items():
        assert plain_rows(read(location)) == lake.contents(), name


def before_commit(monkeypatch: pytest.MonkeyPatch, act: Callable[[], object]) -> None:
    """Do something after the files of a compaction are written and before it commits."""
    finish = Rewriter.finish

    def finish_then_act(self: Rewriter) -> None:
        finish(self)
        monkeypatch.undo()
        act()

    monkeypatch.setattr(Rewriter, "finish", finish_then_act)


# Rows


@pytest.mark.parametrize("seed", [1, 2])
def test_rounds_and_housekeeping_in_any_order_keep_the_rows(tmp_path: Path, seed: int) -> None:
    """Every reader agrees with the model after every step."""
    lake = rounds(tmp_path, KEYED)
    rng = random.Random(seed)
    lake.commit(random_changes(lake, rng, 0))
    for step in range(1, 25):
        kind = rng.choice(["round", "round", "round", "lost", "compact", "expire", "sweep"])
        if kind == "round":
            lake.commit(random_changes(lake, rng, step))
        elif kind == "lost":
            lake.rounds += 1
            random_changes(lake, rng, step)
        else:
            {"compact": compact, "expire": expire, "sweep": sweep}[kind](lake)
        assert_readers_agree(lake)


def test_rows_are_in_offset_order_after_compaction(log: LakeRounds) -> None:
    """The table's sort order stays true, and bounds of `__offset` stay narrow."""
    for number in range(4):
        log.commit(log.write(named_rows(10 * number, 6)))
    compact(log)
    entries = list(iceberg(log).scan().plan_files())
    assert len(entries) == log.table.bucket_count
    for entry in entries:
        offsets = pq.read_table(entry.file.file_path.removeprefix("file://"))["__offset"]
        assert offsets.to_pylist() == list(range(12))


def test_a_bucket_whose_rows_are_all_deleted_has_no_file_left(keyed: LakeRounds) -> None:
    keyed.commit(keyed.change(keyed_rows(range(20), "a")))
    keyed.commit(keyed.change(keyed_rows([], "a"), key_rows(range(20))))
    assert compact(keyed) is not None
    table = iceberg(keyed)
    summary = table.current_snapshot().summary
    assert (summary["total-data-files"], summary["total-delete-files"]) == ("0", "0")
    assert_readers_agree(keyed)


def test_compaction_leaves_no_delete_file_whose_data_file_is_gone(keyed: LakeRounds) -> None:
    for number in range(4):
        keyed.commit(keyed.change(keyed_rows(range(number, 20), f"{number}")))
    compact(keyed)
    summary = iceberg(keyed).current_snapshot().summary
    assert summary.operation.value == "replace"
    assert (summary["total-delete-files"], summary["total-position-deletes"]) == ("0", "0")
    assert int(summary["total-records"]) == len(keyed.contents())


def test_delete_files_of_a_file_that_stays_become_one(tmp_path: Path) -> None:
    """A large file with a few deleted rows is not written again for them."""
    lake = rounds(
        tmp_path,
        KEYED,
        **{
            "iceberg.read.split.target-size": "1",
            "iceberg.compaction.delete-ratio-threshold": "0.9",
            "iceberg.compaction.delete-file-threshold": "3",
        },
    )
    lake.commit(lake.change(keyed_rows(range(100), "a")))
    base = {task.file.file_path for task in iceberg(lake).scan().plan_files()}
    for number in range(3):
        lake.commit(lake.change(keyed_rows([], ""), key_rows(range(10 * number, 10 * number + 8))))
    assert all(len(task.delete_files) == 3 for task in iceberg(lake).scan().plan_files())
    assert compact(lake) is not None
    tasks = list(iceberg(lake).scan().plan_files())
    assert {task.file.file_path for task in tasks} == base
    assert all(len(task.delete_files) == 1 for task in tasks)
    assert_readers_agree(lake)
    lake.commit(lake.change(keyed_rows([1, 50], "b"), key_rows([60])))
    assert_readers_agree(lake)


def test_files_that_are_read_in_many_batches_keep_their_values(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nested columns of a part of a row group, with rows taken out."""
    monkeypatch.setattr(compaction, "BATCH_ROWS", 3)
    lake = rounds(tmp_path, f"{ALL_TYPES}, PRIMARY KEY (id)")
    rows = [{**(FULL_ROW, EDGES, NULLS)[i % 3], "id": i} for i in range(40)]
    for start in range(4):
        lake.commit(lake.change(typed_rows(lake.table, rows[start::4] + rows[:start])))
    assert compact(lake) is not None
    found = READERS["duckdb"](iceberg(lake).metadata_location)
    assert plain_rows(found) == lake.contents()
    assert compact(lake) is None


def test_partitions_and_buckets_are_compacted_apart(tmp_path: Path) -> None:
    columns = "region STRING, id BIGINT, v STRING, PRIMARY KEY (region, id)"
    table = lake_table("iceberg", columns, partition_keys=["region"])
    lake = LakeRounds(IcebergTiering(), table, sqlite_properties(tmp_path))
    for number in range(3):
        eu, us = (partition_rows(lake, r, range(number, 9), f"v{number}") for r in ("eu", "us"))
        lake.commit(eu + us)
    assert compact(lake) is not None
    tasks = list(iceberg(lake).scan().plan_files())
    assert len({tuple(task.file.partition[i] for i in range(2)) for task in tasks}) == 4
    assert len(tasks) == 4
    assert_readers_agree(lake)


def test_files_of_a_foreign_engine_are_compacted_with_ours(log: LakeRounds) -> None:
    for number in range(2):
        log.commit(log.write(named_rows(10 * number, 4)))
    foreign = pa.table({"id": pa.array([900], pa.int32()), "name": ["foreign"]})
    rows = log.with_system_columns(foreign, 0, 1_000_000)
    iceberg(log).append(rows.cast(iceberg(log).schema().as_arrow()))
    assert compact(log) is not None
    found = plain_rows(READERS["duckdb"](iceberg(log).metadata_location))
    assert found == sorted(
        [*log.contents(), *plain_rows(rows)], key=lambda r: repr(sorted(r.items()))
    )


# Races


def test_a_round_that_commits_during_a_compaction_wins(
    keyed: LakeRounds, monkeypatch: pytest.MonkeyPatch
) -> None:
    for number in range(4):
        keyed.commit(keyed.change(keyed_rows(range(number, 12), f"{number}")))
    late = keyed.change(keyed_rows([3], "round"), key_rows([5]))
    before_commit(monkeypatch, lambda: keyed.commit(late))
    with pytest.raises(LakeCommitRefusedError):
        compact(keyed)
    assert not [path for path in files_of(iceberg(keyed)) if "compacted-" in path]
    assert_readers_agree(keyed)
    assert compact(keyed) is not None
    assert_readers_agree(keyed)


def test_a_round_that_only_appends_during_a_compaction_wins_as_well(
    log: LakeRounds, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Files do not conflict, but the compaction would put older offsets on top of newer ones."""
    for number in range(4):
        log.commit(log.write(named_rows(10 * number, 4)))
    late = log.write(named_rows(100, 4))
    before_commit(monkeypatch, lambda: log.commit(late))
    with pytest.raises(LakeCommitRefusedError):
        compact(log)
    newest = log.newest()
    assert newest is not None
    assert newest.properties["zufluss.round"] == "round-4"
    assert_readers_agree(log)


def test_rows_that_a_foreign_engine_deletes_by_position_during_a_compaction_stay_deleted(
    log: LakeRounds, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Their file is live all the same, only the delete file is new."""
    for number in range(4):
        log.commit(log.write(named_rows(10 * number, 4)))
    before_commit(monkeypatch, lambda: delete_first_row(iceberg(log)))
    with pytest.raises(LakeCommitRefusedError):
        compact(log)
    assert compact(log) is not None
    for read in READERS.values():
        assert read(iceberg(log).metadata_location).num_rows == 15


def test_rows_that_a_foreign_engine_deletes_by_key_during_a_compaction_stay_deleted(
    keyed: LakeRounds, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The compacted file would be newer than the deletes, which then have no effect."""
    for number in range(4):
        keyed.commit(keyed.change(keyed_rows(range(10 * number, 10 * number + 4), "a")))
    before_commit(monkeypatch, lambda: delete_by_key(iceberg(keyed), 1, [{"id": 11}, {"id": 20}]))
    with pytest.raises(LakeCommitRefusedError, match="another writer changed"):
        compact(keyed)
    compact(keyed)
    left = duckdb_rows(iceberg(keyed).metadata_location)["id"].to_pylist()
    assert len(left) == 14
    assert not {11, 20} & {*left}


def delete_first_row(table: Table) -> None:
    """A position delete as other engines write it, in a snapshot that is not of ours."""
    file = next(iter(table.scan().plan_files())).file
    path = f"{table.location()}/data/foreign-delete.parquet"
    local = path.removeprefix("file://")
    rows = {"file_path": [file.file_path], "pos": [0]}
    pq.write_table(pa.table(rows).cast(DELETE_SCHEMA), local)
    written = FileWritten(
        kind=POSITION_DELETES,
        path=path,
        size=Path(local).stat().st_size,
        records=1,
        partition=partition_of(file),
        referenced_data_file=file.file_path,
    )
    commit_snapshot(table, SnapshotChange("delete", added=[written]), lambda _: None)


def test_a_foreign_append_during_a_compaction_does_not_stop_it(
    log: LakeRounds, monkeypatch: pytest.MonkeyPatch
) -> None:
    for number in range(4):
        log.commit(log.write(named_rows(10 * number, 4)))
    table = iceberg(log)
    before_commit(monkeypatch, lambda: table.append(table.schema().as_arrow().empty_table()))
    assert compact(log) == log.newest_id()
    assert_readers_agree(log)


def test_a_foreign_delete_of_a_row_that_is_being_compacted_is_not_undone(
    log: LakeRounds, monkeypatch: pytest.MonkeyPatch
) -> None:
    for number in range(4):
        log.commit(log.write(named_rows(10 * number, 4)))
    before_commit(monkeypatch, lambda: iceberg(log).delete("id = 11"))
    with pytest.raises(LakeCommitRefusedError):
        compact(log)
    for read in READERS.values():
        assert 11 not in read(iceberg(log).metadata_location)["id"].to_pylist()


def test_a_snapshot_that_is_committed_while_others_expire_stays(
    log: LakeRounds, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Expiry looks again when its first look is out of date."""
    for number in range(3):
        log.commit(log.write(named_rows(10 * number, 4)))
    late = log.write(named_rows(100, 4))
    expirable = maintenance.IcebergMaintenance._expirable

    def expirable_then_commit(self: maintenance.IcebergMaintenance, *args: object) -> object:
        found = expirable(self, *args)
        monkeypatch.undo()
        log.commit(late)
        return found

    monkeypatch.setattr(maintenance.IcebergMaintenance, "_expirable", expirable_then_commit)
    assert expire(log) == 3
    assert_readers_agree(log)


# Crashes

CRASH = """
import os, sys
from pathlib import Path
from tests.lake.iceberg.test_maintenance import KEYED, IcebergTiering, LakeRounds
from tests.lake.iceberg.test_maintenance import Rewriter, lake_table, sqlite_properties
from zufluss.lake.iceberg import maintenance

moment = sys.argv[2]
table = lake_table("iceberg", KEYED)
lake = LakeRounds(IcebergTiering(), table, sqlite_properties(Path(sys.argv[1])))
die = lambda *args, **kwargs: os._exit(9)
if moment == "written":
    maintenance.commit_snapshot = die
elif moment == "expired":
    maintenance.remove = die
else:
    removed = maintenance.remove
    maintenance.remove = lambda io, paths: (removed(io, sorted(paths)[:3]), die())
with lake.maintenance() as housekeeping:
    if moment == "written":
        housekeeping.compact(lake.newest_id())
    else:
        housekeeping.expire(2**60, [])
"""


@pytest.mark.parametrize("moment", ["written", "expired", "removing"][0 if FULL else 2 :])
def test_what_a_killed_housekeeping_leaves_behind_is_swept(
    tmp_path: Path, keyed: LakeRounds, moment: str
) -> None:
    """Killed after writing, after the expiry was committed, and in the middle of removing."""
    for number in range(4):
        keyed.commit(keyed.change(keyed_rows(range(number, 12), f"{number}")))
    compact(keyed)
    keyed.commit(keyed.change(keyed_rows([1], "b")))
    keyed.commit(keyed.change(keyed_rows([1], "c")))
    root = ROOT
    command = [sys.executable, "-c", CRASH, str(tmp_path), moment]
    ended = subprocess.run(command, cwd=root, env={**os.environ, "PYTHONPATH": str(root)})
    assert ended.returncode == 9
    assert_readers_agree(keyed)
    assert sweep(keyed) > 0
    assert sweep(keyed) == 0
    assert_readers_agree(keyed)
    keyed.commit(keyed.change(keyed_rows([2], "d"), key_rows([3])))
    assert_readers_agree(keyed)


# Expiry and sweeping


def test_expiry_removes_the_files_that_only_expired_snapshots_used(keyed: LakeRounds) -> None:
    """Nothing is left for the sweep but what expiry does not look at: old metadata files."""
    for number in range(5):
        keyed.commit(keyed.change(keyed_rows(range(number, 20), f"{number}")))
    compact(keyed)
    assert expire(keyed) == 5
    table = iceberg(keyed)
    live = {task.file.file_path.removeprefix("file://") for task in table.scan().plan_files()}
    assert {path for path in files_of(table) if path.endswith(".parquet")} == live
    assert sweep(keyed) == 0
    assert_readers_agree(keyed)


def test_expiry_leaves_files_that_moved_to_another_manifest(tmp_path: Path) -> None:
    """Commits merge manifests: those of an expired snapshot may be gone, their files live on."""
    lake = rounds(tmp_path, KEYED, **{"iceberg.commit.manifest.min-count-to-merge": "2"})
    rng = random.Random(3)
    for number in range(8):
        lake.commit(random_changes(lake, rng, number))
    assert expire(lake) == 7
    assert_readers_agree(lake)


def test_tags_branches_and_the_configured_number_of_snapshots_survive_expiry(
    log: LakeRounds,
) -> None:
    ids = [log.commit(log.write(named_rows(10 * n, 4))).snapshot_id for n in range(6)]
    with iceberg(log).transaction() as transaction:
        transaction.set_properties({"history.expire.min-snapshots-to-keep": "2"})
    iceberg(log).manage_snapshots().create_tag(ids[1], "audited").commit()
    assert expire(log, keep=(ids[2],)) == 2
    assert {s.snapshot_id for s in iceberg(log).snapshots()} == {*ids[1:3], *ids[4:]}
    assert READERS["duckdb"](iceberg(log).metadata_location, snapshot_id=ids[1]).num_rows == 8


def test_nothing_is_removed_from_a_table_that_shares_its_files(log: LakeRounds) -> None:
    """`gc.enabled=false` is how Iceberg says so."""
    for number in range(3):
        log.commit(log.write(named_rows(10 * number, 4)))
    log.write(named_rows(100, 4), attempt="lost")
    with iceberg(log).transaction() as transaction:
        transaction.set_properties({"gc.enabled": "false"})
    before = files_of(iceberg(log))
    assert (expire(log), sweep(log)) == (0, 0)
    assert files_of(iceberg(log)) == before


def test_a_sweep_leaves_everything_that_is_not_a_file_of_the_table(log: LakeRounds) -> None:
    """Notes of people, tables inside the directory, places that tables share."""
    log.commit(log.write(named_rows(0, 4)))
    root = Path(iceberg(log).location().removeprefix("file://"))
    strangers = [
        root / "README.parquet",
        root / "data" / "notes.txt",
        root / "metadata" / "version-hint.text",
        root / "other_table" / "data" / "rows.parquet",
        root.with_name("t-neighbour") / "data" / "rows.parquet",
    ]
    for path in strangers:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(b"x")
    orphan = root / "data" / "deep" / "er" / "orphan.parquet"
    orphan.parent.mkdir(parents=True)
    orphan.write_bytes(b"x")
    stale = root / "metadata" / "00099-stale.metadata.json"
    stale.write_bytes(b"x")
    assert sweep(log) == 2
    assert all(path.exists() for path in strangers)
    assert not orphan.exists()
    assert not stale.exists()


@pytest.mark.parametrize("way_out", ["..", "./..", "data/../.."])
def test_no_name_for_it_leads_a_sweep_into_another_tables_directory(
    log: LakeRounds, way_out: str
) -> None:
    log.commit(log.write(named_rows(0, 4)))
    own = iceberg(log).location()
    neighbour = Path(own.removeprefix("file://")).with_name("neighbour")
    neighbour.mkdir()
    file = neighbour / "rows.parquet"
    file.write_bytes(b"x")
    for option in ("write.data.path", "write.metadata.path"):
        with iceberg(log).transaction() as change:
            change.set_properties({option: f"{own}/{way_out}/neighbour"})
        assert sweep(log) == 0
        assert file.exists()


def test_a_sweep_follows_no_link_out_of_the_tables_directory(
    log: LakeRounds, tmp_path: Path
) -> None:
    log.commit(log.write(named_rows(0, 4)))
    root = Path(iceberg(log).location().removeprefix("file://"))
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / "rows.parquet").write_bytes(b"x")
    (root / "data" / "link").symlink_to(elsewhere)
    assert sweep(log) == 0
    with iceberg(log).transaction() as change:
        change.set_properties({"write.data.path": f"file://{root}/data/link"})
    assert sweep(log) == 0
    assert (elsewhere / "rows.parquet").exists()


def test_expiry_removes_no_file_outside_of_the_tables_directory(
    log: LakeRounds, tmp_path: Path
) -> None:
    """Another engine has added a file from elsewhere to the table, and overwritten it later."""
    log.commit(log.write(named_rows(0, 4)))
    lake = iceberg(log)
    own = Path(next(path for path in files_of(lake) if path.endswith(".parquet")))
    imported = tmp_path / "imported.parquet"
    inside = own.with_name("imported.parquet")
    for copy in (imported, inside):
        copy.write_bytes(own.read_bytes())
    assert remove(lake, [f"file://{imported}", str(imported), f"file://{inside}"]) == 1
    assert imported.exists()
    assert not inside.exists()


def test_a_table_cannot_send_its_files_to_another_place(tmp_path: Path) -> None:
    """Tables from before such properties were refused may have one."""
    place = f"file://{tmp_path}/elsewhere"
    lake = rounds(tmp_path, LOG, **{"iceberg.write.data.path": place})
    lake.commit(lake.write(named_rows(0, 4)))
    assert not (tmp_path / "elsewhere").exists()
    assert "write.data.path" not in iceberg(lake).metadata.properties


def test_a_table_does_not_say_how_its_files_are_opened(tmp_path: Path) -> None:
    """Tables from before such properties were refused may have one."""
    keys = ("py-io-impl", "write.py-location-provider.impl", "s3.endpoint")
    lake = rounds(tmp_path, LOG, **{f"iceberg.{key}": "antigravity.Class" for key in keys})
    lake.commit(lake.write(named_rows(0, 4)))
    assert not iceberg(lake).metadata.properties.keys() & set(keys)
    assert "antigravity" not in sys.modules


def test_a_sweep_of_a_new_table_leaves_the_files_of_its_predecessor(log: LakeRounds) -> None:
    """Dropped and re-created under the same name: both have their own directories."""
    log.commit(log.write(named_rows(0, 4)))
    new = LakeRounds(log.factory, replace(log.table, table_id=2), log.properties)
    new.prepare()
    new.commit(new.write(named_rows(10, 4)))
    sweep(new)
    old = f"{log.table.path.table}__{log.table.table_id}_{log.table.created_time}"
    renamed = replace(log.table, path=log.table.path._replace(table=old))
    location = load_table(renamed, log.properties).metadata_location
    assert plain_rows(READERS["duckdb"](location)) == log.contents()
    assert_readers_agree(new)


def test_only_files_older_than_the_bound_are_swept(log: LakeRounds) -> None:
    log.commit(log.write(named_rows(0, 4)))
    kept = files_of(iceberg(log))
    log.write(named_rows(10, 4), attempt="old")
    old = files_of(iceberg(log)) - kept
    for path in old:
        os.utime(path, (1_000_000, 1_000_000))
    log.write(named_rows(10, 4), attempt="young")
    young = files_of(iceberg(log)) - kept - old
    assert young
    with log.maintenance() as housekeeping:
        report = housekeeping.sweep(2_000_000_000)
    assert report.removed == len(old)
    assert report.removed_bytes > 0
    assert files_of(iceberg(log)) == kept | young


def test_there_is_no_housekeeping_before_the_first_round(tmp_path: Path) -> None:
    table = lake_table("iceberg", LOG, name="never")
    lake = LakeRounds(IcebergTiering(), table, sqlite_properties(tmp_path))
    with lake.maintenance() as housekeeping:
        for act in (lambda: housekeeping.compact(None), lambda: housekeeping.sweep(0)):
            with pytest.raises(LakeTableError, match="no lake table of its own yet"):
                act()
