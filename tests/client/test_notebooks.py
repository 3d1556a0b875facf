"""What notebooks and terminals show of tables, schemas, scans and rows."""

from __future__ import annotations

from html.parser import HTMLParser
from types import SimpleNamespace
from typing import Any

import pyarrow as pa
import pytest

from tests.client.pk import create_table, upsert
from zufluss import Schema, col
from zufluss.client.keyed.lookup import Row
from zufluss.client.sync.connection import Connection
from zufluss.model.html import CELL_CHARACTERS_MAX, ROWS_MAX, html_table
from zufluss.notebook import (
    arrow_html,
    load_ipython_extension,
    unload_ipython_extension,
)

KEYED = "id INT, name STRING COMMENT '<b>bold</b>', day STRING, PRIMARY KEY (id, day)"


class Tags(HTMLParser):
    """Checks that tags are closed in order, and collects the text of each cell."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.cells: list[str] = []
        self.feed(html)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: Any) -> None:
        assert tag in {"div", "b", "table", "thead", "tbody", "tr", "th", "td"}
        assert {name for name, _ in attrs} <= {"style", "colspan"}
        self.open.append(tag)
        if tag in {"th", "td"}:
            self.cells.append("")

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.open and self.open[-1] in {"th", "td"}:
            self.cells[-1] += data


def cells(shown: Any) -> list[str]:
    return Tags(shown._repr_html_()).cells


def test_a_schema_is_shown_as_a_column_list() -> None:
    schema = Schema.of("id INT, name STRING", primary_key="id")
    assert repr(schema) == "Schema(id INT NOT NULL, name STRING, PRIMARY KEY (id))"
    wide = Schema.of(", ".join(f"column_{i} STRING" for i in range(10)))
    assert repr(wide).splitlines()[:2] == ["Schema(", "  column_0 STRING,"]
    assert Schema.of(str(wide)) == wide


def test_values_are_escaped_and_empty_columns_left_out() -> None:
    assert cells(Schema.of(KEYED)) == [
        *("column", "type", "null", "role", "comment"),
        *("id", "INT", "NOT NULL", "primary key", ""),
        *("name", "STRING", "", "", "<b>bold</b>"),
        *("day", "STRING", "NOT NULL", "primary key", ""),
    ]
    assert cells(Schema.of("id INT")) == ["column", "type", "id", "INT"]


def test_long_values_and_many_rows_are_cut() -> None:
    shown = Tags(html_table(("n",), [("x" * 1000,)] * (ROWS_MAX + 5), "<title>")).cells
    assert len(shown) == 1 + ROWS_MAX + 1
    assert len(shown[1]) == CELL_CHARACTERS_MAX
    assert shown[-1] == "… and 5 more"


def test_a_table_shows_its_kind_and_its_columns(conn: Connection) -> None:
    table = create_table(conn, KEYED, partition_keys="day", bucket_count=2)
    title = f"{table.path}, primary-key table, 2 buckets, partitioned by day"
    assert repr(table).startswith(f"<Table {title}: id INT NOT NULL, ")
    assert title in table._repr_html_()
    assert cells(table) == cells(table.schema)
    log = create_table(conn, "id INT")
    assert repr(log) == f"<Table {log.path}, log table, 1 bucket: id INT>"


def test_a_scan_shows_what_it_will_read(conn: Connection) -> None:
    log = create_table(conn, "id INT, name STRING")
    scan = log.scan(["id"], (col("id") > 5) & (col("name") == "<a>"), limit=3, stop=None)
    chosen = "columns id, filter id > 5 AND name = '<a>', limit 3, start earliest"
    assert repr(scan).startswith(f"<LogScan {log.path}, reads log, {chosen}, stop never")
    assert "id > 5 AND name = '<a>'" in cells(scan)
    assert cells(scan)[-4:] == ["column", "Arrow type", "id", "int32"]
    keyed = create_table(conn, "id INT, PRIMARY KEY (id)")
    assert repr(keyed.scan()) == f"<KvScan {keyed.path}, reads live rows>"
    assert cells(keyed.scan(at={0: 7}))[:6] == [
        "option",
        "value",
        "reads",
        "live rows",
        "at",
        "{0: 7}",
    ]
    assert "reads changelog" in repr(keyed.changelog())
    assert "reads lake and log" in repr(keyed.scan(source="union"))


def test_the_row_of_a_lookup_is_a_dict_that_notebooks_show_as_a_table(conn: Connection) -> None:
    table = create_table(conn, "id INT, name STRING, n INT, PRIMARY KEY (id)")
    upsert(table, {"id": 1, "name": "<i>"})
    row = table.lookup(1)
    assert row == {"id": 1, "name": "<i>", "n": None}
    assert repr(row) == "{'id': 1, 'name': '<i>', 'n': None}"
    assert isinstance(row, Row)
    assert cells(row) == ["column", "value", "id", "1", "name", "<i>", "n", "None"]


class Shell:
    """What the extension uses of IPython's shell."""

    def __init__(self) -> None:
        self.html: dict[str, Any] = {}
        self.display_formatter = SimpleNamespace(formatters={"text/html": self})

    def for_type_by_name(self, module: str, name: str, show: Any) -> None:
        self.html[f"{module}.{name}"] = show

    def pop(self, name: str, default: Any) -> Any:
        return self.html.pop(name, default)


def test_with_the_extension_a_lookup_of_several_keys_is_shown_as_a_table(conn: Connection) -> None:
    table = create_table(conn, "id INT, name STRING, PRIMARY KEY (id)")
    upsert(table, {"id": 1, "name": "<i>"})
    shell = Shell()
    load_ipython_extension(shell)
    rows = table.lookup([1, 2])
    assert type(rows) is pa.Table
    shown = Tags(shell.html[f"{pa.Table.__module__}.{pa.Table.__qualname__}"](rows))
    assert shown.cells == ["id", "name", "1", "<i>", "NULL", "NULL"]
    unload_ipython_extension(shell)
    assert not shell.html


def test_a_large_arrow_table_is_cut_and_an_empty_one_says_so() -> None:
    large = arrow_html(pa.table({"n": range(ROWS_MAX + 5)}))
    assert len(Tags(large).cells) == 1 + ROWS_MAX
    assert f"{ROWS_MAX + 5} rows, the first {ROWS_MAX} are shown" in large
    assert "0 rows" in arrow_html(pa.table({"n": pa.array([], pa.int64())}))


@pytest.mark.parametrize(
    "filter",
    [
        col("id") > 5,
        ~(col("name").starts_with("it's") | col("ok")),
        (col("id").isin([1, 2]) & col("name").is_null()) | ~col("id").between(3, 4),
        ~col("id").isin([7]) & ~col("name").contains("x") & col("name").ends_with("y"),
    ],
    ids=repr,
)
def test_a_filter_is_shown_as_the_text_that_means_it(filter: Any) -> None:
    from zufluss.model.filter_text import parse_filter

    schema = Schema.of("id INT, name STRING, ok BOOLEAN")
    assert repr(parse_filter(repr(filter), schema)) == repr(filter)
