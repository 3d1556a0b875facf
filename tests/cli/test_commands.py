"""The commands against a real server: catalog, rows in and out, refusals, a clean stop."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tests.waiting import WAIT_SECONDS
from zufluss.threads import ThreadShortageError

from .conftest import COMMAND, Result, environment, started, stop_cleanly

Zufluss = Callable[..., Result]
LISTENERS = "-Dbind.listeners=FLUSS://localhost:"


def rows_of(result: Result) -> list[dict[str, Any]]:
    return [json.loads(line) for line in result.out.splitlines()]


def test_databases_are_created_described_altered_and_dropped(zufluss: Zufluss) -> None:
    zufluss("db", "create", "shop", "--comment", "orders", "--custom-property", "team=a")
    zufluss("db", "create", "shop", "--if-not-exists")
    names = json.loads(zufluss("db", "list", "-o", "json").out)
    assert {"database": "fluss"} in names
    assert {"database": "shop"} in names
    zufluss("db", "alter", "shop", "--set", "team=b", "--comment", "sales")
    described = json.loads(zufluss("db", "describe", "shop", "--output", "json").out)
    assert described["comment"] == "sales"
    assert described["custom_properties"] == {"team": "b"}
    zufluss("db", "drop", "shop")
    zufluss("db", "drop", "shop", "--if-exists")


def test_a_table_is_created_described_altered_and_dropped(zufluss: Zufluss) -> None:
    zufluss(
        *("table", "create", "catalog_1", "id BIGINT, name STRING COMMENT 'shown'"),
        *("--buckets", "2", "--bucket-key", "id", "--comment", "c"),
        *("--property", "table.log.ttl=1d", "--custom-property", "owner=me"),
    )
    assert "catalog_1" in zufluss("table", "list").out.split()
    zufluss("table", "alter", "catalog_1", "--set", "table.log.ttl=2d")
    zufluss("table", "alter", "catalog_1", "--add-column", "at TIMESTAMP(3)")
    described = json.loads(zufluss("table", "describe", "catalog_1", "-o", "json").out)
    descriptor = described["descriptor"]
    assert descriptor["properties"]["table.log.ttl"] == "2d"
    assert [c["name"] for c in descriptor["schema"]["columns"]] == ["id", "name", "at"]
    assert (descriptor["bucket_count"], descriptor["bucket_key"]) == (2, ["id"])
    text = zufluss("table", "describe", "catalog_1").out
    assert "TIMESTAMP(3)" in text
    assert "shown" in text
    zufluss("table", "drop", "catalog_1")
    zufluss("table", "drop", "catalog_1", "--if-exists")


def test_the_output_of_describe_creates_an_equal_table(zufluss: Zufluss, tmp_path: Path) -> None:
    zufluss("table", "create", "original", "id INT NOT NULL, tags ARRAY<STRING>", "--buckets", "3")
    path = tmp_path / "twin.json"
    path.write_text(zufluss("table", "describe", "original", "--output", "json").out)
    zufluss("table", "create", "twin", "--schema", str(path))
    twin = json.loads(zufluss("table", "describe", "twin", "--output", "json").out)
    assert twin["descriptor"] == json.loads(path.read_text())["descriptor"]


def test_functions_of_columns_are_written_shown_and_added(zufluss: Zufluss, tmp_path: Path) -> None:
    path = tmp_path / "views.yaml"
    path.write_text(
        """
        columns: [page STRING, pv BIGINT SUM, "names STRING LISTAGG(delimiter = ';')"]
        primary_key: [page]
        properties: {table.merge-engine: aggregation}
        """
    )
    zufluss("table", "create", "views", "--schema", str(path))
    zufluss("table", "alter", "views", "--add-column", "seen DATE MAX")
    text = zufluss("table", "describe", "views").out
    for function in ("SUM", "LISTAGG(delimiter = ';')", "MAX"):
        assert function in text
    refused = zufluss("table", "alter", "views", "--add-column", "more INT", code=1)
    assert "column 'more' has no aggregation function" in refused.err


def test_rows_of_every_format_arrive_and_are_scanned_back(zufluss: Zufluss, tmp_path: Path) -> None:
    schema = pa.schema([("id", pa.int64()), ("name", pa.string()), ("day", pa.date32())])
    table = pa.Table.from_pylist([{"id": 1, "name": "parquet"}], schema=schema)
    pq.write_table(table, tmp_path / "rows.parquet")
    (tmp_path / "rows.csv").write_text("name,id\ncsv,2\n")
    zufluss("table", "create", "formats", "--schema", str(tmp_path / "rows.parquet"))
    zufluss("append", "formats", str(tmp_path / "rows.parquet"))
    zufluss("append", "formats", str(tmp_path / "rows.csv"))
    line = '{"id": 3, "name": "ndjson", "day": "2026-01-31"}\n'
    done = zufluss("append", "formats", "-", "--output", "json", stdin=line)
    assert json.loads(done.out)["rows"] == 1
    assert rows_of(zufluss("scan", "formats", "--output", "json")) == [
        {"id": 1, "name": "parquet", "day": None},
        {"id": 2, "name": "csv", "day": None},
        {"id": 3, "name": "ndjson", "day": "2026-01-31"},
    ]
    assert zufluss("scan", "formats", "--limit", "1").out.splitlines() == [
        "id  name     day",
        "--  -------  ----",
        "1   parquet  NULL",
    ]


def test_a_scan_is_cut_by_columns_limit_and_start(zufluss: Zufluss) -> None:
    zufluss("table", "create", "cuts", "id BIGINT, name STRING")
    lines = "".join(f'{{"id": {i}, "name": "n{i}"}}\n' for i in range(5))
    zufluss("append", "cuts", stdin=lines)
    scan = ("scan", "cuts", "-o", "json")
    assert rows_of(zufluss(*scan, "--columns", "name", "--limit", "2")) == [
        {"name": "n0"},
        {"name": "n1"},
    ]
    ids = ("--columns", "id")
    assert rows_of(zufluss(*scan, *ids, "--from", "offset:3")) == [{"id": 3}, {"id": 4}]
    assert rows_of(zufluss(*scan, *ids, "--from", "offset:0=4")) == [{"id": 4}]
    assert rows_of(zufluss(*scan, "--from", "latest")) == []
    assert len(rows_of(zufluss(*scan, "--from", "2001-01-01T00:00:00Z"))) == 5
    zufluss(*scan, "--from", "offset:x", code=2)
    assert "offset:N" in zufluss(*scan, "--from", "0:4", code=2).err


def test_a_followed_scan_prints_rows_that_come_later_and_ends_with_ctrl_c(
    zufluss: Zufluss, server_address: str
) -> None:
    zufluss("table", "create", "followed", "id BIGINT")
    command = [*COMMAND, "scan", "followed", "-f", "-o", "json", "-b", server_address]
    zufluss("append", "followed", stdin='{"id": 1}\n')
    with subprocess.Popen(command, stdout=subprocess.PIPE, env=environment(), text=True) as process:
        assert process.stdout is not None
        assert json.loads(process.stdout.readline()) == {"id": 1}
        zufluss("append", "followed", stdin='{"id": 2}\n')
        assert json.loads(process.stdout.readline()) == {"id": 2}
        process.send_signal(signal.SIGINT)
        assert process.wait(WAIT_SECONDS) == 0


def test_partitions_are_created_listed_written_and_dropped(zufluss: Zufluss) -> None:
    zufluss("table", "create", "parts", "id INT, day STRING", "--partition-by", "day")
    zufluss("partition", "create", "parts", "day=d1")
    zufluss("partition", "create", "parts", "day=d1", "--if-not-exists")
    zufluss("partition", "create", "parts", "day=d2")
    zufluss("append", "parts", stdin='{"id": 1, "day": "d1"}\n{"id": 2, "day": "d2"}\n')
    listed = json.loads(zufluss("partition", "list", "parts", "-o", "json").out)
    assert sorted(row["partition"] for row in listed) == ["d1", "d2"]
    offsets = json.loads(zufluss("offsets", "parts", "-o", "json").out)
    assert sorted((row["partition"], row["latest"]) for row in offsets) == [("d1", 1), ("d2", 1)]
    chosen = json.loads(zufluss("offsets", "parts", "--partition", "d1", "-o", "json").out)
    assert [row["partition"] for row in chosen] == ["d1"]
    zufluss("partition", "drop", "parts", "day=d1")
    assert zufluss("partition", "list", "parts").out.split()[-1] == "d2"


def test_offsets_tell_where_buckets_begin_and_end(zufluss: Zufluss) -> None:
    zufluss("table", "create", "ends", "id INT", "--buckets", "2", "--bucket-key", "id")
    zufluss("append", "ends", stdin="".join(f'{{"id": {i}}}\n' for i in range(20)))
    rows = json.loads(zufluss("offsets", "ends", "--output", "json").out)
    assert [row["bucket"] for row in rows] == [0, 1]
    assert [row["earliest"] for row in rows] == [0, 0]
    assert sum(row["latest"] for row in rows) == 20
    then = json.loads(zufluss("offsets", "ends", "--at", "2001-01-01", "-o", "json").out)
    assert [row["offset"] for row in then] == [0, 0]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("table", "describe", "no_such_table"), "TABLE_NOT_EXIST (7)"),
        (("scan", "no_such_table"), "TABLE_NOT_EXIST (7)"),
        (("db", "drop", "no_such_database"), "DATABASE_NOT_EXIST (4)"),
        (("db", "create", "fluss"), "DATABASE_ALREADY_EXIST (6)"),
        (("table", "create", "bad", "id INT", "--property", "table.x=1"), "INVALID_CONFIG"),
        (("table", "create", "bad", "id INT", "--property", "table.log.ttl=x"), "INVALID_CONFIG"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, tuple) else "",
)
def test_a_refusal_of_the_server_ends_with_one_and_its_message(
    zufluss: Zufluss, arguments: tuple[str, ...], message: str
) -> None:
    result = zufluss(*arguments, code=1)
    assert result.err.startswith(f"error: {message}")
    assert "Traceback" not in result.err


def test_a_row_that_cannot_be_read_is_a_usage_error(zufluss: Zufluss) -> None:
    zufluss("table", "create", "strict", "id BIGINT")
    for form, text in (
        ("ndjson", '{"idd": 1}'),
        ("ndjson", '{"id": "x"}'),
        ("ndjson", "nonsense"),
        ("csv", "idd\n1"),
        ("csv", "id\nx"),
        ("parquet", "nonsense"),
    ):
        result = zufluss("append", "strict", "--format", form, stdin=text + "\n", code=2)
        assert "Traceback" not in result.err
    assert rows_of(zufluss("scan", "strict", "--output", "json")) == []


def test_dev_keeps_its_data_over_a_clean_restart(tmp_path: Path, run: Zufluss) -> None:
    with started("dev", data_dir=tmp_path) as (process, address):
        assert run("table", "create", "kept", "id INT", "-b", address).code == 0
        assert run("append", "kept", "-b", address, stdin='{"id": 7}\n').code == 0
        stop_cleanly(process)
    with started("dev", data_dir=tmp_path) as (process, address):
        assert rows_of(run("scan", "kept", "-o", "json", "-b", address)) == [{"id": 7}]
        stop_cleanly(process)


def test_a_second_server_on_the_same_data_is_refused(tmp_path: Path, run: Zufluss) -> None:
    with started("dev", data_dir=tmp_path):
        result = run("dev", "--port", "0", "--data-dir", str(tmp_path))
    assert result.code == 2
    assert "in use by another server" in result.err


@pytest.mark.parametrize(
    ("command", "option"),
    [
        (("dev", "--port", "{port}", "--data-dir", "{data}"), "--port"),
        (
            ("server", "--role=coordinator", "-Ddata.dir={data}", LISTENERS + "{port}"),
            "-D bind.listeners",
        ),
    ],
)
def test_a_taken_port_is_one_line_before_anything_else(
    tmp_path: Path, server_address: str, command: tuple[str, ...], option: str
) -> None:
    port, data = server_address.rpartition(":")[2], tmp_path / "data"
    done = subprocess.run(
        [*COMMAND, *(part.format(port=port, data=data) for part in command)],
        capture_output=True,
        env=environment(),
        text=True,
    )
    assert done.returncode == 2
    (line,) = done.stderr.splitlines()
    assert f":{port} is taken by another process" in line
    assert option in line
    assert not data.exists()


def test_the_ready_line_tells_the_seconds_since_the_start(tmp_path: Path) -> None:
    began = time.monotonic()
    command = [*COMMAND, "dev", "--port", "0", "--data-dir", str(tmp_path)]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdout=pipe, env=environment(), text=True) as process:
        assert process.stdout is not None
        line = process.stdout.readline()
        waited = time.monotonic() - began
        stop_cleanly(process)
    told = re.fullmatch(r"zufluss ready on localhost:\d+ in (\d+\.\d) s \(.*\)\n", line)
    assert told, line
    assert 0 < float(told[1]) <= waited + 0.1


def test_an_unusable_data_directory_is_a_usage_error(tmp_path: Path, run: Zufluss) -> None:
    (tmp_path / "file").write_text("")
    for data_dir in (tmp_path / "file", tmp_path / "file" / "below"):
        result = run("dev", "--port", "0", "--data-dir", str(data_dir))
        assert result.code == 2
        assert "cannot serve" in result.err


def test_a_server_that_cannot_start_its_threads_says_so(
    tmp_path: Path, run: Zufluss, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_threads() -> None:
        raise ThreadShortageError("a thread cannot be started; allow the process more")

    monkeypatch.setattr("zufluss.server.kernels.warm", int)
    monkeypatch.setattr("zufluss.server.running_executor", no_threads)
    result = run("dev", "--port", "0", "--data-dir", str(tmp_path / "data"))
    assert result.code == 2
    assert "cannot serve: a thread cannot be started" in result.err


def test_the_roles_started_apart_serve_a_table_together(tmp_path: Path, run: Zufluss) -> None:
    for name in ("coordinator", "tablet"):
        (tmp_path / name).mkdir()
    with started("server", "--role", "coordinator", data_dir=tmp_path / "coordinator") as (
        coordinator,
        address,
    ):
        link = ("-D", f"zufluss.coordinator.address={address}")
        with started("server", "--role", "tablet", *link, data_dir=tmp_path / "tablet") as (
            tablet,
            _,
        ):
            assert run("table", "create", "apart", "id INT", "-b", address).code == 0
            assert run("append", "apart", "-b", address, stdin='{"id": 7}\n').code == 0
            assert rows_of(run("scan", "apart", "-o", "json", "-b", address)) == [{"id": 7}]
            stop_cleanly(tablet)
        stop_cleanly(coordinator)


def test_users_and_passwords_reach_the_server(tmp_path: Path, run: Zufluss) -> None:
    users = 'org.apache.fluss.security.auth.sasl.plain.PlainLoginModule required user_a="geheim";'
    server = ("-D", "security.protocol.map=FLUSS:sasl")
    server += ("-D", f"security.sasl.plain.jaas.config={users}")
    with started("dev", *server, data_dir=tmp_path) as (process, address):
        sasl = ("-b", address, "-D", "client.security.protocol=sasl")
        sasl += ("-D", "client.security.sasl.username=a")
        assert run("db", "list", "-b", address).code == 1
        wrong = run("db", "list", *sasl, "-D", "client.security.sasl.password=falsch")
        assert wrong.code == 1
        assert wrong.err.startswith("error: AUTHENTICATE_EXCEPTION (46)")
        assert run("db", "list", *sasl, "-D", "client.security.sasl.password=geheim").code == 0
        stop_cleanly(process)
    assert "geheim" not in (tmp_path / "stderr.log").read_text()
