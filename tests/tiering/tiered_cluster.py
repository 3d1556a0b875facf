"""A cluster with a running tiering service, and readers that share no code with zufluss.

The service is the real command with its JVM and its Python workers. Whether it did its work is
asked of DuckDB, pyiceberg and polars, which share no code with `zufluss.lake`.
"""

from __future__ import annotations

import datetime as dt
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
from pyiceberg.catalog import Catalog, load_catalog
from pyiceberg.table import Table as LakeTable

import zufluss
from tests.lake.readers import READERS
from tests.tiering.support import lake_server
from tests.tiering.test_service import tiered
from tests.waiting import eventually
from zufluss.lake.base import catalog_properties
from zufluss.model.lake import SYSTEM_COLUMNS
from zufluss.model.table import TableInfo
from zufluss.testing.server import DevServer
from zufluss.testing.tiering import TieringProcess

SPARK = {"spark.master": "local[2,4]", "spark.driver.memory": "1g"}


class Tiered:
    """A server, a tiering service beside it, and a connection of the test."""

    def __init__(
        self, server: DevServer, process: TieringProcess, connection: zufluss.Connection
    ) -> None:
        self.server = server
        self.process = process
        self.connection = connection
        self.admin = connection.admin

    def caught_up(self, *paths: str) -> None:
        """Wait until the lake has everything that is in these tables now."""
        try:
            for path in paths:
                eventually(lambda path=path: tiered(self.connection, path))
        except AssertionError:
            raise AssertionError(f"not tiered:\n{self.process.log()[-6000:]}") from None

    def lake(self, path: str) -> LakeTable:
        """The lake table of a table, as pyiceberg opens it."""
        return lake_table(self.admin.table_info(path))


@contextmanager
def tiered_cluster(directory: Path) -> Iterator[Tiered]:
    """A cluster of its own, with a service that tiers what there is."""
    with (
        lake_server(directory) as server,
        zufluss.connect(server.bootstrap) as connection,
        TieringProcess(server.bootstrap, SPARK) as process,
    ):
        yield Tiered(server, process, connection)


def catalog_of(info: TableInfo) -> Catalog:
    """The catalog that a table's lake side is in."""
    return load_catalog("zufluss", **catalog_properties(info, "iceberg"))


def lake_table(info: TableInfo, name: str | None = None) -> LakeTable:
    """The lake table of a table, or another one of the same catalog."""
    return catalog_of(info).load_table((info.path.database, name or info.path.table))


def seen_by_all(
    lake: LakeTable,
    columns: Iterable[str],
    *,
    snapshot_id: int | None = None,
    readers: Iterable[str] = READERS,
) -> list[tuple[str, ...]]:
    """The rows of these columns, on which all readers agree; sorted, values as plain text."""
    names = list(columns)
    location = lake.metadata_location
    tables = {name: READERS[name](location, snapshot_id=snapshot_id) for name in readers}
    found = {name: rows_of(table, names) for name, table in tables.items()}
    first = found.popitem()[1]
    for name, rows in found.items():
        odd = [pair for pair in zip(rows, first, strict=False) if pair[0] != pair[1]]
        assert rows == first, f"{name} reads other rows of {location}, such as {odd[:1]}"
    return first


def rows_of(table: pa.Table, columns: Iterable[str]) -> list[tuple[str, ...]]:
    """Rows in a form that is the same for all readers, and tells NULL, NaN and -0.0 apart."""
    values = [[repr(plain(v)) for v in table[name].to_pylist()] for name in columns]
    return sorted(zip(*values, strict=True))


def plain(value: Any) -> Any:
    """A value without what readers differ in: time zones by another name, maps as lists."""
    if isinstance(value, dt.datetime) and value.tzinfo is not None:
        return ("utc", value.astimezone(dt.UTC).replace(tzinfo=None))
    if isinstance(value, dict) and set(value) == {"key", "value"}:
        return (plain(value["key"]), plain(value["value"]))
    if isinstance(value, dict):
        return {name: plain(inner) for name, inner in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(map(plain, value))
    return value


def cut(table: pa.Table, primary_key: bool = False) -> pa.Table:
    """What the lake keeps of rows: times to the microsecond, digits below it are cut off.

    Rows of a primary-key table carry a TIME to the millisecond before they come to the lake.
    """
    columns = []
    for column in table.columns:
        kind = column.type
        if pa.types.is_timestamp(kind):
            column = pc.floor_temporal(column, unit="microsecond") if kind.unit == "ns" else column
            column = column.cast(pa.timestamp("us", kind.tz))
        elif pa.types.is_time(kind):
            column = column.cast(pa.time32("ms"), safe=False) if primary_key else column
            column = column.cast(pa.time64("us"), safe=False)
        columns.append(column)
    return pa.table(columns, names=table.column_names)


def own_columns(lake: LakeTable) -> list[str]:
    """The columns of a lake table that are not tiering's."""
    return [f.name for f in lake.schema().fields if f.name not in SYSTEM_COLUMNS]
