"""`zufluss scan --source …` and `zufluss table lake`, with a real lake behind the server."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator

import pytest

import zufluss as client
from tests.cli.conftest import Result
from tests.client.rounds import Rounds, lake_table
from tests.servers import WarmServer
from zufluss.client.sync.table import Table
from zufluss.testing.server import DevServer

pytest.importorskip("pyiceberg")
Run = Callable[..., Result]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[DevServer]:
    directory = tmp_path_factory.mktemp("cli-lake")
    with WarmServer(directory, {"datalake.format": "iceberg"}) as server:
        yield server


@pytest.fixture(scope="module")
def orders(server: DevServer) -> Iterator[Table]:
    """Order 1 was tiered as new and paid since, order 2 is in the lake, order 3 is not."""
    with (
        client.connect(server.bootstrap) as connection,
        lake_table(connection, "id INT, state STRING, PRIMARY KEY (id)", bucket_count=1) as table,
    ):
        with table.upsert() as writer:
            writer.write({"id": [1, 2], "state": ["new", "new"]})
        Rounds(connection, server.bootstrap).tier(table)
        with table.upsert() as writer:
            writer.write({"id": [1, 3], "state": ["paid", "new"]})
        yield table


@pytest.fixture
def zufluss(run: Run, server: DevServer) -> Run:
    def run_against_server(*arguments: str, code: int = 0) -> Result:
        result = run(*arguments, "--bootstrap", server.bootstrap)
        assert result.code == code, result
        return result

    return run_against_server


def rows(result: Result) -> list[tuple[int, str]]:
    found = [json.loads(line) for line in result.out.splitlines()]
    return sorted((row["id"], row["state"]) for row in found)


def test_scan_prints_lake_and_log_together_or_the_lake_alone(zufluss: Run, orders: Table) -> None:
    scan = ("scan", str(orders.path), "--output", "json")
    assert rows(zufluss(*scan, "--source", "union")) == [(1, "paid"), (2, "new"), (3, "new")]
    assert rows(zufluss(*scan, "--source", "lake")) == [(1, "new"), (2, "new")]
    lake = ("scan", f"{orders.path}$lake", "--output", "json")
    assert rows(zufluss(*lake)) == [(1, "new"), (2, "new")]
    limited = zufluss(*scan, "--source", "union", "--limit", "2", "--columns", "id")
    assert len(limited.out.splitlines()) == 2


def test_scan_says_what_a_lake_cannot_do(zufluss: Run, orders: Table) -> None:
    scan = ("scan", str(orders.path))
    assert (
        "is for --source log" in zufluss(*scan, "--source", "union", "--from", "latest", code=2).err
    )
    assert "changelog" in zufluss(*scan, "--source", "union", "--follow", code=2).err


def test_a_lake_cannot_be_followed(zufluss: Run, server: DevServer) -> None:
    with (
        client.connect(server.bootstrap) as connection,
        lake_table(connection, "id INT") as table,
    ):
        refused = zufluss("scan", str(table.path), "--source", "lake", "--follow", code=2)
        assert "cannot be followed" in refused.err


def test_table_lake_shows_snapshot_offsets_and_lag(zufluss: Run, orders: Table) -> None:
    shown = json.loads(zufluss("table", "lake", str(orders.path), "--output", "json").out)
    assert shown["format"] == "iceberg"
    assert isinstance(shown["snapshot"], int)
    assert shown["lag"] == 3
    assert shown["buckets"] == [{"partition": None, "bucket": 0, "tiered": 2, "end": 5, "lag": 3}]
    text = zufluss("table", "lake", str(orders.path)).out
    assert str(shown["snapshot"]) in text
    assert "partition" not in text


def test_table_lake_of_a_table_that_was_never_tiered_says_so(
    zufluss: Run, server: DevServer
) -> None:
    with (
        client.connect(server.bootstrap) as connection,
        lake_table(connection, "id INT") as table,
    ):
        assert "none yet" in zufluss("table", "lake", str(table.path)).out
