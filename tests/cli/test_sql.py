"""`zufluss sql`: DuckDB over tables, with columns and simple filters pushed down."""

from __future__ import annotations

import builtins
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet
import pytest

from zufluss.cli.sql import simple_filter
from zufluss.client.sync.table import Table

from .conftest import Result

Zufluss = Callable[..., Result]


@pytest.fixture(scope="module")
def made() -> set[str]:
    return set()


@pytest.fixture
def tables(zufluss: Zufluss, made: set[str]) -> Zufluss:
    """The command, after the tables `visits` and `sqls.users` were created once."""
    if not made:
        made.add("visits")
        zufluss("db", "create", "sqls")
        zufluss("table", "create", "visits", "id INT, page STRING, ms BIGINT")
        zufluss("table", "create", "sqls.users", "id INT, name STRING, PRIMARY KEY (id)")
        lines = [json.dumps({"id": n, "page": "ab"[n % 2], "ms": n * 10}) for n in range(100)]
        zufluss("append", "visits", "-", stdin="\n".join(lines))
        zufluss("upsert", "sqls.users", "-", stdin='{"id": 1, "name": "Ada"}\n{"id": 2}\n')
    return zufluss


def test_a_query_joins_and_aggregates_tables(tables: Zufluss, tmp_path: Path) -> None:
    result = tables("sql", "SELECT page, count(*) AS n, sum(ms) AS ms FROM visits GROUP BY page "
                    "ORDER BY page", "-o", "json")  # fmt: skip
    rows = [json.loads(line) for line in result.out.splitlines()]
    assert [(row["page"], row["n"]) for row in rows] == [("a", 50), ("b", 50)]
    joined = tables(
        "sql", "SELECT u.name, v.ms FROM visits v JOIN sqls.users u USING (id) ORDER BY v.ms"
    )
    assert [line.split() for line in joined.out.splitlines()[2:]] == [["Ada", "10"], ["NULL", "20"]]
    file = tmp_path / "prices.parquet"
    pyarrow.parquet.write_table(pa.table({"id": [1], "price": [7]}), file)
    priced = tables("sql", f"SELECT price FROM visits JOIN '{file}' USING (id)", "-o", "json")
    assert priced.out == '{"price":7}\n'


def test_columns_and_simple_filters_are_read_by_the_servers(
    tables: Zufluss, monkeypatch: pytest.MonkeyPatch
) -> None:
    scans: list[tuple[Any, ...]] = []
    scan = Table.scan

    def noted(self: Table, columns: Any = None, filter: Any = None, **options: Any) -> Any:
        scans.append((columns, filter))
        return scan(self, columns, filter, **options)

    monkeypatch.setattr(Table, "scan", noted)
    query = "SELECT ms FROM visits WHERE id > 95 AND page = 'b' AND ms / 3 < 1e9"
    result = tables("sql", query, "-o", "json")
    assert result.out.splitlines() == ['{"ms":970}', '{"ms":990}']
    ((columns, filter),) = scans
    assert sorted(columns) == ["id", "ms", "page"]
    assert sorted(filter.split(" AND ")) == ["id > 95", "page = 'b'"]


@pytest.mark.parametrize(
    ("arrow", "ours"),
    [
        ("(id > 5)", "id > 5"),
        ('((id >= 5) and (page == "a"))', "id >= 5 AND page = 'a'"),
        ('((id != -5) and is_valid(id))', ""),
        ("((id > 5) or (id < 2))", ""),
        ("(day > 2024-01-01)", ""),
        ('(page == "it\'s")', ""),
        ("(km > 1.5)", ""),
        ("(flag == true)", ""),
        ("None", ""),
        ("(a b > 1)", ""),
    ],
)  # fmt: skip
def test_only_comparisons_that_servers_surely_understand_are_pushed_down(
    arrow: str, ours: str
) -> None:
    assert simple_filter(arrow) == ours


@pytest.mark.parametrize(
    ("query", "says"),
    [
        ("SELEC 1", "syntax error"),
        ("DROP TABLE visits", "allowed: one SELECT"),
        ("EXPLAIN SELECT * FROM visits", "allowed: one SELECT"),
        ("SELECT 1; SELECT 2", "allowed: one SELECT"),
        ("", "allowed: one SELECT"),
        ("SELECT * FROM no_such", "no_such does not exist"),
        ("SELECT nix FROM visits", "nix"),
        ("COPY visits TO '/tmp/x.csv'", "allowed: one SELECT"),
    ],
)
def test_a_wrong_query_is_a_usage_error_of_one_line(tables: Zufluss, query: str, says: str) -> None:
    result = tables("sql", query, code=2)
    assert result.err.startswith("error: ")
    assert says in result.err
    assert len(result.err.splitlines()) == 1


def test_without_duckdb_the_command_says_how_to_install_it(
    run: Callable[..., Result], monkeypatch: pytest.MonkeyPatch
) -> None:
    imported = builtins.__import__

    def refuse(name: str, *args: Any, **options: Any) -> Any:
        if name == "duckdb":
            raise ModuleNotFoundError("No module named 'duckdb'", name="duckdb")
        return imported(name, *args, **options)

    monkeypatch.setattr(builtins, "__import__", refuse)
    result = run("sql", "SELECT 1")
    assert result.code == 2
    assert "pip install duckdb" in result.err
