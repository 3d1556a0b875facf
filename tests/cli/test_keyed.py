"""The commands of primary-key tables against a real server."""

from __future__ import annotations

import contextlib
import json
import os
import pty
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tests.waiting import WAIT_SECONDS

from .conftest import COMMAND, Result, environment

Zufluss = Callable[..., Result]
UNUSED = {
    *("numba", "pandas", "polars", "duckdb", "rich", "structlog", "yaml", "sqlite3", "rocksdict"),
    *("pyarrow.dataset", "pyarrow.fs", "pyarrow.parquet"),
}
"""What `lookup` and `upsert` of a few rows must not import."""


def rows_of(result: Result) -> list[dict[str, Any]]:
    return [json.loads(line) for line in result.out.splitlines()]


def lines(*rows: dict[str, Any]) -> str:
    return "".join(json.dumps(row) + "\n" for row in rows)


@pytest.fixture
def orders(zufluss: Zufluss, request: pytest.FixtureRequest) -> str:
    """A table of orders, empty, of its own for each test."""
    name = f"orders_{abs(hash(request.node.name))}"
    columns = "id BIGINT, status STRING, total DECIMAL(10, 2), PRIMARY KEY (id)"
    zufluss("table", "create", name, columns, "--buckets", "2")
    return name


@pytest.fixture
def items(zufluss: Zufluss, request: pytest.FixtureRequest) -> str:
    """A table whose key has two columns, the first of them its bucket key."""
    name = f"items_{abs(hash(request.node.name))}"
    columns = "customer INT, name STRING, pieces INT, PRIMARY KEY (customer, name)"
    zufluss("table", "create", name, columns, "--buckets", "2", "--bucket-key", "customer")
    rows = [{"customer": c, "name": n, "pieces": c} for c in (1, 2) for n in ("a", "b, c")]
    zufluss("upsert", name, stdin=lines(*rows))
    return name


@pytest.mark.parametrize("command", ["upsert", "lookup"])
def test_a_single_command_loads_no_library_that_it_does_not_use(
    orders: str, server_address: str, command: str
) -> None:
    # Each of these takes a tenth of a second or more of every call in a shell's loop.
    script = (
        "import sys\nfrom zufluss.cli.main import process_main\n"
        "try: process_main()\n"
        "except SystemExit as end: assert end.code in (0, 4), end.code\n"
        f"print(sorted({UNUSED} & sys.modules.keys()))"
    )
    key = [orders] if command == "upsert" else [orders, "1"]
    done = subprocess.run(
        [sys.executable, "-c", script, command, *key, "--bootstrap", server_address],
        input=lines({"id": 1}),
        capture_output=True,
        text=True,
        env=environment(),
        check=True,
    )
    assert done.stdout.splitlines()[-1] == "[]"


def test_rows_of_every_format_are_upserted_and_looked_up(
    zufluss: Zufluss, orders: str, tmp_path: Path
) -> None:
    pq.write_table(pa.table({"id": [1], "status": ["parquet"]}), tmp_path / "rows.parquet")
    (tmp_path / "rows.csv").write_text("status,id,total\ncsv,2,1.5\n")
    done = zufluss("upsert", orders, str(tmp_path / "rows.parquet"))
    assert done.err.startswith(f"upserted 1 rows into fluss.{orders} in ")
    zufluss("upsert", orders, str(tmp_path / "rows.csv"))
    done = zufluss("upsert", orders, "-o", "json", stdin=lines({"id": 3, "status": "ndjson"}))
    assert json.loads(done.out)["rows"] == 1
    assert rows_of(zufluss("lookup", orders, "3", "id=1", "2", "-o", "json")) == [
        {"id": 3, "status": "ndjson", "total": None},
        {"id": 1, "status": "parquet", "total": None},
        {"id": 2, "status": "csv", "total": "1.50"},
    ]
    assert zufluss("lookup", orders, "2", "--columns", "total,id").out.splitlines() == [
        "total  id",
        "-----  --",
        "1.50   2",
    ]


def test_whole_rows_replace_and_named_columns_keep_the_others(
    zufluss: Zufluss, orders: str
) -> None:
    zufluss("upsert", orders, stdin=lines({"id": 1, "status": "new", "total": "5"}))
    part = lines({"id": 1, "status": "paid"}, {"id": 2, "status": "paid"})
    zufluss("upsert", orders, "--columns", "id,status", stdin=part)
    lookup = ("lookup", orders, "1", "2", "-o", "json")
    assert [row["total"] for row in rows_of(zufluss(*lookup))] == ["5.00", None]
    zufluss("upsert", orders, stdin=lines({"id": 1, "status": "paid"}))
    assert [row["total"] for row in rows_of(zufluss(*lookup))] == [None, None]


def test_a_partial_update_refuses_a_file_that_lacks_a_named_column(
    zufluss: Zufluss, orders: str
) -> None:
    update = ("upsert", orders, "--format", "csv", "--columns")
    refused = zufluss(*update, "id,status", stdin="id\n1\n", code=2)
    assert "has no column status, which --columns names" in refused.err
    refused = zufluss(*update, "status", stdin="status\nx\n", code=2)
    assert "lack id of the primary key" in refused.err


def test_keys_are_deleted_from_the_command_line_and_from_a_file(
    zufluss: Zufluss, orders: str, tmp_path: Path
) -> None:
    zufluss("upsert", orders, stdin=lines(*({"id": i} for i in range(6))))
    done = zufluss("delete", orders, "--key", "0", "--key", "id=1", "--key", "77")
    assert done.err.startswith(f"deleted 2 of 3 keys from fluss.{orders} in ")
    again = zufluss("delete", orders, "--key", "0", "-o", "json")
    assert (json.loads(again.out)["rows"], json.loads(again.out)["deleted"]) == (1, 0)
    (tmp_path / "keys.csv").write_text("id\n2\n")
    zufluss("delete", orders, str(tmp_path / "keys.csv"))
    zufluss("delete", orders, "-", stdin=lines({"id": 3, "status": "whatever"}))
    rest = rows_of(zufluss("scan", orders, "--limit", "10", "-o", "json"))
    assert sorted(row["id"] for row in rest) == [4, 5]


def test_a_table_that_ignores_deletes_says_so(zufluss: Zufluss) -> None:
    columns = "id INT, name STRING, PRIMARY KEY (id)"
    engine = ("--property", "table.merge-engine=first_row")
    zufluss("table", "create", "firsts", columns, *engine)
    zufluss("upsert", "firsts", stdin=lines({"id": 1, "name": "a"}))
    assert "ignores deletes" in zufluss("delete", "firsts", "--key", "1").err
    assert len(rows_of(zufluss("lookup", "firsts", "1", "-o", "json"))) == 1


def test_a_key_without_a_row_ends_with_four_and_is_named(zufluss: Zufluss, orders: str) -> None:
    zufluss("upsert", orders, stdin=lines({"id": 1}))
    result = zufluss("lookup", orders, "1", "2", "3", "-o", "json", code=4)
    assert [row["id"] for row in rows_of(result)] == [1]
    assert result.err == f"no row in fluss.{orders} for id=2; id=3\n"
    many = zufluss("lookup", orders, *map(str, range(100, 120)), code=4)
    assert many.out == ""
    assert many.err.endswith("id=109 and 10 more\n")


def test_keys_of_several_columns_are_looked_up_in_every_form(
    zufluss: Zufluss, items: str, tmp_path: Path
) -> None:
    forms = ("1,a", "name=a,customer=2", '2,"b, c"')
    found = rows_of(zufluss("lookup", items, *forms, "-o", "json"))
    assert [(row["customer"], row["name"]) for row in found] == [(1, "a"), (2, "a"), (2, "b, c")]
    (tmp_path / "keys.csv").write_text('name,customer\n"b, c",1\nno,1\n')
    result = zufluss("lookup", items, "--file", str(tmp_path / "keys.csv"), "-o", "json", code=4)
    assert [row["name"] for row in rows_of(result)] == ["b, c"]
    assert "customer=1, name=no" in result.err
    zufluss("delete", items, "--key", "customer=1,name=a")
    zufluss("lookup", items, "1,a", code=4)


def test_a_prefix_finds_all_rows_that_begin_so(zufluss: Zufluss, items: str) -> None:
    found = rows_of(zufluss("lookup", items, "--prefix", "2", "-o", "json"))
    assert [(row["customer"], row["name"]) for row in found] == [(2, "a"), (2, "b, c")]
    result = zufluss("lookup", items, "--prefix", "1", "9", "-o", "json", code=4)
    assert len(rows_of(result)) == 2
    assert result.err == f"no row in fluss.{items} for customer=9\n"


def test_a_table_without_prefixes_says_why(zufluss: Zufluss, orders: str) -> None:
    assert "has no prefix lookup" in zufluss("lookup", orders, "--prefix", "1", code=2).err


def test_the_changelog_tells_what_happened(zufluss: Zufluss, orders: str) -> None:
    zufluss("upsert", orders, stdin=lines({"id": 1, "status": "new"}))
    zufluss("upsert", orders, stdin=lines({"id": 1, "status": "paid"}))
    zufluss("delete", orders, "--key", "1")
    changes = rows_of(zufluss("changelog", orders, "--columns", "id,status", "-o", "json"))
    assert [(c["_change_type"], c["_log_offset"], c["status"]) for c in changes] == [
        ("+I", 0, "new"),
        ("-U", 1, "new"),
        ("+U", 2, "paid"),
        ("-D", 3, "paid"),
    ]
    assert all(change["_commit_timestamp"].endswith("Z") for change in changes)
    head = zufluss("changelog", orders, "--columns", "id", "--limit", "1").out.splitlines()
    assert head[0].split() == ["_change_type", "_log_offset", "_commit_timestamp", "id"]
    assert len(head) == 3
    late = zufluss("changelog", orders, "--from", "offset:3", "-o", "json")
    assert [change["_change_type"] for change in rows_of(late)] == ["-D"]


def test_a_followed_changelog_prints_changes_as_they_come(
    zufluss: Zufluss, orders: str, server_address: str
) -> None:
    zufluss("upsert", orders, stdin=lines({"id": 1}))
    command = [*COMMAND, "changelog", orders, "-f", "-o", "json", "-b", server_address]
    with subprocess.Popen(command, stdout=subprocess.PIPE, env=environment(), text=True) as process:
        try:
            assert process.stdout is not None
            assert json.loads(process.stdout.readline())["_change_type"] == "+I"
            zufluss("delete", orders, "--key", "1")
            assert json.loads(process.stdout.readline())["_change_type"] == "-D"
            process.send_signal(signal.SIGINT)
            assert process.wait(WAIT_SECONDS) == 0
        finally:
            process.kill()


def test_a_scan_prints_the_rows_there_are_or_some_of_them(zufluss: Zufluss, orders: str) -> None:
    zufluss("upsert", orders, stdin=lines(*({"id": i, "status": "s"} for i in range(9))))
    zufluss("delete", orders, "--key", "4")
    rows = rows_of(zufluss("scan", orders, "-o", "json"))
    assert sorted(row["id"] for row in rows) == [0, 1, 2, 3, 5, 6, 7, 8]
    some = rows_of(zufluss("scan", orders, "--limit", "4", "--columns", "status", "-o", "json"))
    assert some == [{"status": "s"}] * 4
    none = zufluss("scan", orders, "--source", "snapshot", code=1)
    assert "has no key-value snapshot yet" in none.err
    table = zufluss("scan", orders, "--columns", "id").out
    assert len(table.splitlines()) == 2 + 8


def test_a_scan_of_keys_names_the_ways_to_what_it_cannot_do(zufluss: Zufluss, orders: str) -> None:
    for more in (("--source", "log"), ("--follow",), ("--from", "latest", "--limit", "2")):
        message = " ".join(zufluss("scan", orders, *more, code=2).err.replace("│", " ").split())
        assert f"zufluss changelog fluss.{orders}" in message
        assert f"zufluss lookup fluss.{orders} KEY" in message
        assert f"zufluss scan fluss.{orders} prints its rows" in message
    zufluss("table", "create", "log_only", "id INT")
    for source in ("live", "snapshot"):
        refused = zufluss("scan", "log_only", "--source", source, code=2)
        assert "has no primary key" in refused.err


def read_terminal(terminal: int) -> str:
    """The output on a terminal until it is closed."""
    shown = b""
    with open(terminal, "rb", buffering=0) as source, contextlib.suppress(OSError):
        while piece := source.read(4096):
            shown += piece
    return shown.decode()


def test_a_scan_into_a_file_says_on_the_terminal_how_far_it_is(
    server_address: str, zufluss: Zufluss, orders: str, tmp_path: Path
) -> None:
    zufluss("upsert", orders, stdin=lines(*({"id": i, "status": "s"} for i in range(2_000))))
    master, slave = pty.openpty()
    with (tmp_path / "rows.ndjson").open("wb") as out:
        command = [*COMMAND, "scan", orders, "-o", "json", "--bootstrap", server_address]
        terminal = environment() | {"TERM": "xterm"}
        process = subprocess.Popen(command, stdout=out, stderr=slave, env=terminal)
    os.close(slave)
    shown = read_terminal(master)
    assert process.wait(WAIT_SECONDS) == 0, shown
    assert f"scan fluss.{orders}" in shown
    assert " rows" in shown
    assert len((tmp_path / "rows.ndjson").read_text().splitlines()) == 2_000


def test_each_kind_of_table_names_the_command_of_the_other(zufluss: Zufluss, orders: str) -> None:
    refused = zufluss("append", orders, stdin=lines({"id": 1}), code=2)
    assert f"zufluss upsert fluss.{orders}" in refused.err
    zufluss("table", "create", "plain_log", "id INT")
    row = lines({"id": 1})
    assert "zufluss append" in zufluss("upsert", "plain_log", stdin=row, code=2).err
    for command in (("lookup", "plain_log", "1"), ("changelog", "plain_log")):
        assert "zufluss scan" in zufluss(*command, code=2).err
    assert "has no primary key" in zufluss("delete", "plain_log", "--key", "1", code=2).err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("lookup", "{}", "seven"), "key column id"),
        (("lookup", "{}", "1", "--columns", "nope"), "has no column nope"),
        (("delete", "{}", "--key", "x"), "key column id"),
        (("upsert", "{}", "--columns", "id,nope"), "must be different columns"),
        (("scan", "{}", "--limit", "1", "--columns", "nope"), "has no column nope"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, tuple) else "",
)
def test_a_mistake_of_the_user_is_a_usage_error(
    zufluss: Zufluss, orders: str, arguments: tuple[str, ...], message: str
) -> None:
    result = zufluss(*(part.format(orders) for part in arguments), code=2)
    assert message in result.err
    assert "Traceback" not in result.err


def test_rows_with_a_null_key_are_refused(zufluss: Zufluss, orders: str) -> None:
    for command in (("upsert", orders), ("delete", orders, "-"), ("lookup", orders, "--file", "-")):
        result = zufluss(*command, stdin=lines({"status": "no key"}), code=2)
        assert "'id'" in result.err
        assert "NOT NULL" in result.err


def test_a_refused_delete_ends_with_one(zufluss: Zufluss) -> None:
    off = ("--property", "table.delete.behavior=disable")
    zufluss("table", "create", "kept_for_good", "id INT, PRIMARY KEY (id)", *off)
    result = zufluss("delete", "kept_for_good", "--key", "1", code=1)
    assert result.err.startswith("error: DELETION_DISABLED_EXCEPTION (57)")
