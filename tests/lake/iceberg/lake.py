"""Iceberg for tests: a catalog on SQLite in a directory, and the table as pyiceberg sees it."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from pyiceberg.catalog.sql import SqlCatalog
from pyiceberg.table import Table

from zufluss.lake.iceberg.files import local_path
from zufluss.lake.iceberg.hadoop import HadoopCatalog
from zufluss.model.table import TableInfo


def sqlite_properties(directory: Path) -> dict[str, str]:
    """Properties of a catalog and warehouse below a directory."""
    return {
        "type": "sql",
        "uri": f"sqlite:///{directory}/catalog.db",
        "warehouse": f"file://{directory}/warehouse",
    }


def directory_properties(directory: Path) -> dict[str, str]:
    """Properties of a catalog that is a directory."""
    return {"type": "hadoop", "warehouse": f"file://{directory}/warehouse"}


def load_table(table: TableInfo, properties: Mapping[str, str]) -> Table:
    """The lake table as it is now, through a catalog that shares nothing with ours."""
    kind = HadoopCatalog if properties["type"] == "hadoop" else SqlCatalog
    catalog = kind("zufluss", **properties)
    try:
        return catalog.load_table(tuple(table.path))
    finally:
        catalog.close()


def files_of(table: Table) -> set[str]:
    """Every file in the table's directory."""
    root = local_path(table.location())
    assert root is not None
    return {str(path) for path in root.rglob("*") if path.is_file()}
