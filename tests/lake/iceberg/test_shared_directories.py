"""Directories with two owners, and commits whose outcome shows later: no file of others is lost."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from pyiceberg.exceptions import CommitFailedException
from pyiceberg.table.update import RemoveSnapshotRefUpdate, RemoveSnapshotsUpdate

from tests.lake.iceberg.lake import load_table, sqlite_properties
from tests.lake.iceberg.tables import (
    catalog_properties,
    commit_ids,
    committer,
    ids_in_lake,
    lake_table,
    rows,
    table_info,
    write_round,
)
from tests.lake.iceberg.test_committer import FaultyCatalog
from tests.lake.iceberg.test_maintenance import compact, rounds, sweep
from zufluss.lake.base import CommitterContext, LakeTableError
from zufluss.lake.iceberg import maintenance
from zufluss.lake.iceberg.catalog import load
from zufluss.lake.iceberg.committer import IcebergCommitter
from zufluss.lake.iceberg.maintenance import IcebergMaintenance
from zufluss.testing.lake_rounds import plain_rows
from zufluss.testing.lake_samples import LOG, named_rows

FAR_FUTURE_MS = 1 << 45


def test_a_table_does_not_move_into_the_directory_of_a_renamed_one(tmp_path: Path) -> None:
    """Renaming a lake table away, as an error message advises, leaves its files where they are."""
    table = table_info()
    catalog = load(catalog_properties(tmp_path))
    catalog.create_namespace("shop")
    foreign = catalog.create_table(("shop", "orders"), rows([1]).schema)
    foreign.append(rows([1, 2, 3]))
    catalog.rename_table(("shop", "orders"), ("shop", "old_orders"))
    commit_ids(committer(tmp_path, table), [10])
    kept = IcebergMaintenance(CommitterContext(table, catalog_properties(tmp_path)))
    kept.sweep(FAR_FUTURE_MS)
    old = catalog.load_table(("shop", "old_orders"))
    assert sorted(old.scan().to_arrow()["id"].to_pylist()) == [1, 2, 3]
    assert old.location() != lake_table(tmp_path, table).location()
    assert ids_in_lake(tmp_path, table) == [10]


def test_a_sweep_does_nothing_where_another_catalog_has_a_table(tmp_path: Path) -> None:
    """Two clusters, each with a catalog of its own, that were given one warehouse."""
    first = rounds(tmp_path, LOG)
    first.commit(first.write(named_rows(0, 4)))
    second = replace_catalog(tmp_path, first.properties)
    table = replace(first.table, table_id=99)
    catalog = load(second)
    catalog.create_namespace(table.path.database)
    lake = load_table(first.table, first.properties)
    catalog.create_table(tuple(table.path), lake.schema(), location=lake.location())
    made = IcebergCommitter(CommitterContext(table, second))
    with catalog.load_table(tuple(table.path)).transaction() as change:
        change.set_properties({"zufluss.table-id": "99", "zufluss.table-created": "0"})
    made = IcebergMaintenance(CommitterContext(replace(table, created_time=0), second))
    with pytest.raises(LakeTableError, match="another table"):
        made.sweep(FAR_FUTURE_MS)
    with pytest.raises(LakeTableError, match="another table"):
        sweep(first)
    with first.reader() as reader:
        newest = first.newest_id()
        assert newest is not None
        found = list(reader.read(reader.plan(newest), list(first.table.schema.names)))
    assert sum(batch.num_rows for batch in found) == 4


def replace_catalog(directory: Path, properties: Any) -> dict[str, str]:
    return {**properties, "uri": f"sqlite:///{directory}/second.db"}


class StaleCatalog(FaultyCatalog):
    """A catalog that is read through a replica which lags behind."""

    stale: Any = None
    """What the next load gives."""

    def load_table(self, identifier: Any) -> Any:
        if self.stale is not None:
            found, self.stale = self.stale, None
            return found
        return super().load_table(identifier)


def test_a_commit_whose_answer_was_lost_is_found_by_a_later_look(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was applied, the answer says conflict, and the first look is at an old state."""
    made = StaleCatalog(load(catalog_properties(tmp_path)))
    monkeypatch.setattr("zufluss.lake.iceberg.committer.load", lambda _properties: made)
    table = table_info()
    ours = committer(tmp_path, table)
    first = commit_ids(ours, [1])
    committable = ours.to_committable([write_round(ours, [2])])
    before = made.load_table(tuple(table.path))
    made.after = [CommitFailedException("the answer to a request that was sent twice")]
    made.on_commit = lambda: setattr(made, "stale", before)
    ours.commit(committable, {}, first)
    assert ids_in_lake(tmp_path, table) == [1, 2]


@pytest.mark.parametrize("interruption", [KeyboardInterrupt, SystemExit])
def test_an_interrupted_compaction_leaves_files_that_may_be_committed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, interruption: type[BaseException]
) -> None:
    lake = rounds(tmp_path, LOG)
    for number in range(4):
        lake.commit(lake.write(named_rows(number * 10, 4)))
    commit: Callable[..., Any] = maintenance.commit_snapshot

    def commit_then_die(*args: Any) -> Any:
        commit(*args)
        raise interruption

    monkeypatch.setattr(maintenance, "commit_snapshot", commit_then_die)
    with pytest.raises(interruption):
        compact(lake)
    found = load_table(lake.table, sqlite_properties(tmp_path)).scan().to_arrow()
    assert plain_rows(found) == lake.contents()


def test_a_table_without_a_current_snapshot_has_no_newest_one(tmp_path: Path) -> None:
    """`CREATE OR REPLACE TABLE` keeps the properties, and expiry takes the snapshots away."""
    table = table_info()
    made = committer(tmp_path, table)
    snapshot_id = commit_ids(made, [1])
    lake = lake_table(tmp_path, table)
    lake.catalog.commit_table(
        lake, (), (RemoveSnapshotRefUpdate.model_validate({"ref-name": "main"}),)
    )
    lake = lake_table(tmp_path, table)
    gone = RemoveSnapshotsUpdate.model_validate({"snapshot-ids": [snapshot_id]})
    lake.catalog.commit_table(lake, (), (gone,))
    assert made.newest() is None
