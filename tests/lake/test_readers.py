"""The readers of the tests are right themselves: on a table that only pyiceberg has touched."""

from __future__ import annotations

from pathlib import Path

import pyarrow as pa
import pytest
from pyiceberg.catalog.sql import SqlCatalog
from pyiceberg.table import Table

from tests.lake.readers import READERS, duckdb_rows, polars_rows

FIRST = pa.table({"a": pa.array([1, 2], pa.int64()), "s": ["x", None]})
SECOND = pa.table({"a": pa.array([3], pa.int64()), "s": ["ü"]})


@pytest.fixture
def table(tmp_path: Path) -> Table:
    catalog = SqlCatalog("c", uri=f"sqlite:///{tmp_path}/c.db", warehouse=f"file://{tmp_path}/w")
    catalog.create_namespace("db")
    table = catalog.create_table("db.t", FIRST.schema)
    table.append(FIRST)
    table.append(SECOND)
    return table


@pytest.mark.parametrize("name", READERS)
def test_every_reader_gives_the_rows_of_the_newest_snapshot(name: str, table: Table) -> None:
    rows = READERS[name](table.metadata_location).sort_by("a").to_pylist()
    assert rows == [{"a": 1, "s": "x"}, {"a": 2, "s": None}, {"a": 3, "s": "ü"}]


@pytest.mark.parametrize("name", READERS)
def test_every_reader_travels_back_to_an_older_snapshot(name: str, table: Table) -> None:
    first = table.history()[0].snapshot_id
    rows = READERS[name](table.metadata_location, snapshot_id=first)
    assert sorted(rows["a"].to_pylist()) == [1, 2]


def test_polars_reads_through_pyiceberg_too(table: Table) -> None:
    rows = polars_rows(table.metadata_location, native=False)
    assert sorted(rows["a"].to_pylist()) == [1, 2, 3]


def test_duckdb_answers_sql_over_the_table(table: Table) -> None:
    rows = duckdb_rows(table.metadata_location, "SELECT max(a) AS top, count(s) AS n FROM lake")
    assert rows.to_pylist() == [{"top": 3, "n": 2}]


def test_a_question_duckdb_cannot_answer_fails_and_the_next_one_works(table: Table) -> None:
    with pytest.raises(AssertionError, match=r"DuckDB on .*nothing_there"):
        duckdb_rows(table.metadata_location, "SELECT nothing_there FROM lake")
    assert duckdb_rows(table.metadata_location).num_rows == 3
