"""`zufluss status`, `top`, `table list`, `count`: numbers of a real cluster."""

from __future__ import annotations

import json
import os
import pty
import signal
import subprocess
from collections.abc import Callable
from pathlib import Path

import zufluss
from tests.servers import WarmServer
from tests.waiting import WAIT_SECONDS, eventually
from zufluss.cli import top
from zufluss.client.core.servers import ServerInfo

from .conftest import COMMAND, Result, environment

Zufluss = Callable[..., Result]


def with_rows(zufluss: Zufluss, table: str, rows: int, columns: str = "id INT") -> None:
    """Create a table with some rows."""
    zufluss("table", "create", table, columns)
    verb = "upsert" if "PRIMARY KEY" in columns else "append"
    zufluss(verb, table, "-", stdin="".join(f'{{"id": {n}}}\n' for n in range(rows)))


def test_a_list_of_tables_has_rows_and_bytes(zufluss: Zufluss) -> None:
    zufluss("db", "create", "listed")
    with_rows(zufluss, "listed.log", 7)
    with_rows(zufluss, "listed.keyed", 5, "id INT, PRIMARY KEY (id)")
    zufluss("upsert", "listed.keyed", "-", stdin='{"id": 1}\n')
    shown = json.loads(zufluss("table", "list", "listed", "-o", "json").out)
    by_name = {row["table"]: row for row in shown}
    assert by_name["log"]["rows"] == 7
    assert by_name["keyed"]["rows"] == 5, "keys, not changes"
    assert all(row["buckets"] == 1 and row["log_bytes"] > 0 for row in shown)
    assert all(row["rows_per_second"] >= 0 for row in shown)
    lines = zufluss("table", "list", "listed").out.splitlines()
    assert lines[0].split() == ["table", "buckets", "rows", "log", "bytes", "written"]
    assert any(line.split()[:3] == ["log", "1", "7"] for line in lines)


def test_a_table_is_described_with_its_numbers_and_properties(zufluss: Zufluss) -> None:
    with_rows(zufluss, "described", 3, "id INT COMMENT 'the number', PRIMARY KEY (id)")
    text = zufluss("table", "describe", "described").out
    assert "rows         3" in text
    assert "primary key  the number" in text
    assert "\nproperties\n" in text
    document = json.loads(zufluss("table", "describe", "described", "-o", "json").out)
    assert (document["rows"], document["table"]) == (3, "fluss.described")


def test_rows_are_counted_with_a_filter_and_in_partitions(zufluss: Zufluss) -> None:
    with_rows(zufluss, "counted", 12)
    assert zufluss("count", "counted").out == "12\n"
    assert zufluss("count", "counted", "--where", "id >= 10").out == "2\n"
    document = json.loads(zufluss("count", "counted", "-o", "json").out)
    assert document == {"table": "fluss.counted", "rows": 12}
    zufluss("table", "create", "counted_days", "id INT, day STRING", "--partition-by", "day")
    for day in ("1", "2"):
        zufluss("partition", "create", "counted_days", f"day={day}")
    lines = '{"id": 1, "day": "1"}\n{"id": 2, "day": "2"}\n{"id": 3, "day": "2"}\n'
    zufluss("append", "counted_days", "-", stdin=lines)
    assert zufluss("count", "counted_days", "--partition", "2").out == "2\n"
    assert zufluss("count", "counted", "--where", "nix = 1", code=2).err.startswith("error: ")
    assert "no_such_table" in zufluss("count", "no_such_table", code=1).err


def test_a_status_shows_the_cluster_and_ends_with_success(zufluss: Zufluss) -> None:
    with_rows(zufluss, "status_table", 3)
    document = json.loads(zufluss("status", "-o", "json").out)
    assert document["problems"] == []
    (server,) = document["servers"]
    assert server["role"] == "coordinator and tablet server"
    assert server["version"].startswith("0.")
    assert server["connections"] >= 1
    assert 0 < server["disk_free_bytes"] <= server["disk_size_bytes"]
    assert document["tables"] >= 1
    assert document["locations"][0]["health"] == "active"
    assert "everything works" in zufluss("status").out


def test_a_status_with_a_sick_bucket_fails_and_says_why(
    run: Callable[..., Result], tmp_path: Path
) -> None:
    with WarmServer(tmp_path) as server:
        with zufluss.connect(server.bootstrap) as connection:
            connection.admin.create_table("sick", "id INT", bucket_count=1)
        server.stop()
        (directory,) = tmp_path.glob("**/sick-*/*-0")
        for file in directory.iterdir():
            file.unlink()
        directory.rmdir()
        directory.write_text("a file where a directory should be")
        server.start()
        result = run("status", "--bootstrap", server.bootstrap)
        assert result.code == 5
        assert "bucket fluss.sick 0" in result.out
        assert "1 problems" in result.out


def test_top_prints_one_sample_into_a_pipe(zufluss: Zufluss) -> None:
    with_rows(zufluss, "topped", 3)
    document = json.loads(zufluss("top", "--interval", "0.1", "-o", "json").out)
    (server,) = document["servers"]
    assert server["requests_per_second"] > 0, "the two questions themselves"
    assert {"table", "rows_in_per_second"} <= document["tables"][0].keys()
    assert "hottest" not in zufluss("top", "--once", "--interval", "0.1").out


def test_a_frame_has_the_rates_between_two_samples_and_the_hottest_table_first() -> None:
    def info(requests: int, records: dict[str, int]) -> ServerInfo:
        samples = {("zufluss_requests_total", "FETCH_LOG"): requests}
        for name, count in records.items():
            samples[("zufluss_table_buckets", "fluss", name)] = 1
            samples[("zufluss_table_records", "fluss", name)] = count
        return ServerInfo("here:1", "1", "both", 1, samples)

    before, after = info(10, {"a": 5, "b": 5}), info(30, {"a": 7, "b": 105, "new": 3})
    frame = top.frame([before], [after], 2.0)
    assert frame["servers"][0]["requests_per_second"] == 10
    assert frame["servers"][0]["rows_in_per_second"] == 52.5
    rates = {row["table"]: row["rows_in_per_second"] for row in frame["tables"]}
    assert [*rates.items()] == [("fluss.b", 50), ("fluss.a", 1), ("fluss.new", 0)]


def test_a_live_view_ends_cleanly_with_ctrl_c(server_address: str) -> None:
    ours, theirs = pty.openpty()
    command = [*COMMAND, "top", "--interval", "0.1", "--bootstrap", server_address]
    terminal = environment() | {"TERM": "xterm", "COLUMNS": "120", "LINES": "40"}
    with subprocess.Popen(command, stdout=theirs, stderr=subprocess.PIPE, env=terminal) as process:
        os.close(theirs)
        seen = b""

        def shows_servers() -> bool:
            nonlocal seen
            seen += os.read(ours, 65536)
            return b"hottest tables" in seen

        eventually(shows_servers)
        process.send_signal(signal.SIGINT)
        while True:
            try:
                if not os.read(ours, 65536):
                    break
            except OSError:  # the terminal is gone with the process
                break
        assert process.stderr is not None
        errors = process.stderr.read()
        assert process.wait(WAIT_SECONDS) in (0, 130)
    assert b"Traceback" not in errors, errors
    os.close(ours)
