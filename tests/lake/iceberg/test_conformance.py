"""Iceberg passes the suite that every lake format must pass, as DuckDB and pyiceberg read it."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pyarrow as pa
import pytest

from tests.lake.iceberg.lake import files_of, load_table, sqlite_properties
from tests.lake.readers import duckdb_rows, pyiceberg_rows
from zufluss.lake.iceberg import IcebergTiering
from zufluss.model.table import TableInfo
from zufluss.testing.lake import LakeConformance
from zufluss.testing.lake_rounds import plain_rows

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
