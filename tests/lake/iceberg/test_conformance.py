"""Iceberg passes the suite that every lake format must pass, as DuckDB and pyiceberg read it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import pyarrow as pa
import pytest

from tests.lake.iceberg.lake import directory_properties, files_of, load_table, sqlite_properties
from tests.lake.readers import duckdb_rows, pyiceberg_rows
from zufluss.lake.base import LakeTableError
from zufluss.lake.iceberg import IcebergTiering
from zufluss.lake.iceberg.catalog import load
from zufluss.model.table import TableInfo
from zufluss.testing.lake import LakeConformance
from zufluss.testing.lake_rounds import LakeRounds, plain_rows
from zufluss.testing.lake_samples import named_rows

MISREAD_BY_PYICEBERG = ("deep",)
"""Columns of the suite in which pyiceberg reads a NULL array of rows as an empty one."""


class TestIceberg(LakeConformance):
    @pytest.fixture
    def factory(self) -> IcebergTiering:
        return IcebergTiering()

    @pytest.fixture
    def properties(self, tmp_path: Path) -> dict[str, str]:
        return sqlite_properties(tmp_path)

    def read_rows(
        self, table: TableInfo, properties: Mapping[str, str], snapshot_id: int | None = None
    ) -> pa.Table:
        found = load_table(table, properties)
        rows = pyiceberg_rows(found.metadata_location, snapshot_id=snapshot_id)
        if found.current_snapshot() is None:
            return rows
        duck = duckdb_rows(found.metadata_location, snapshot_id=snapshot_id)
        same = [name for name in rows.column_names if name not in MISREAD_BY_PYICEBERG]
        assert plain_rows(duck.select(same)) == plain_rows(rows.select(same))
        return duck

    def list_files(self, table: TableInfo, properties: Mapping[str, str]) -> set[str]:
        return files_of(load_table(table, properties))

    def foreign_commit(self, table: TableInfo, properties: Mapping[str, str]) -> None:
        found = load_table(table, properties)
        found.append(found.schema().as_arrow().empty_table())


class TestIcebergInADirectory(TestIceberg):
    """The same in a catalog of type hadoop."""

    @pytest.fixture
    def properties(self, tmp_path: Path) -> dict[str, str]:
        return directory_properties(tmp_path)

    def test_a_table_of_the_same_name_starts_afresh_and_the_old_one_keeps_its_rows(
        self, log: LakeRounds
    ) -> None:
        """Such a catalog cannot rename the old table: the new one waits until it is dropped."""
        log.commit(log.write(named_rows(0, 4)))
        table = replace(log.table, table_id=2, created_time=log.table.created_time + 1)
        self._refused_until_dropped(log, table)

    def test_a_table_with_the_same_id_of_another_cluster_is_another_table(
        self, log: LakeRounds
    ) -> None:
        """The id is the same, and yet the rows of the other cluster's table are kept."""
        log.commit(log.write(named_rows(0, 2)))
        self._refused_until_dropped(
            log, replace(log.table, created_time=log.table.created_time + 5)
        )

    def _refused_until_dropped(self, log: LakeRounds, table: TableInfo) -> None:
        with pytest.raises(LakeTableError, match="hadoop cannot rename it; drop the lake table"):
            self._prepared(log.factory, table, log.properties)
        assert self._rows(log) == log.contents()
        load(log.properties).drop_table(tuple(table.path))
        new = self._prepared(log.factory, table, log.properties)
        assert (new.newest(), self._rows(new)) == (None, [])
