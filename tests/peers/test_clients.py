"""What `python -m scripts.clients` does without tools, and when the rows are not those written."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

import zufluss
from scripts import clients
from tests.paths import ROOT
from zufluss.testing.server import DevServer


def test_clients_whose_tools_are_missing_are_left_out(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "scripts.clients"],
        cwd=ROOT,
        env=os.environ | {"PATH": str(tmp_path)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout == (
        "java was left out: mvn, java, javac not found on the PATH\n"
        "rust was left out: cargo not found on the PATH\n"
    )


def test_a_client_that_does_not_exist_is_refused() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "scripts.clients", "cobol"], cwd=ROOT, capture_output=True, text=True
    )
    assert done.returncode == 1
    assert done.stderr == "no such client: cobol; there are java, rust\n"


def test_rows_that_are_not_those_of_the_program_are_found(tmp_path: Path) -> None:
    rust = clients.CLIENTS["rust"]
    with DevServer(tmp_path) as server, zufluss.connect(server.bootstrap) as connection:
        connection.admin.create_database("rust_client")
        connection.admin.create_table("rust_client.events", "id BIGINT, kind STRING")
        connection.admin.create_table(
            "rust_client.stock", "id INT, name STRING, pieces INT, PRIMARY KEY (id)"
        )
        with pytest.raises(clients.ClientError, match="0 rows of events"):
            clients.read_by_our_client(server.bootstrap, rust)
        with connection.table("rust_client.events").append() as events:
            events.write({"id": list(range(1, 1001)), "kind": ["kind"] * 1000})
        with connection.table("rust_client.stock").upsert() as stock:
            stock.write([clients.stock_row(key, key * 10) for key in range(2, 300)])
        with pytest.raises(clients.ClientError, match=r"the ids \[300\]$"):
            clients.read_by_our_client(server.bootstrap, rust)
        with connection.table("rust_client.stock").upsert() as stock:
            stock.write([clients.stock_row(300, 7)])
        clients.read_by_our_client(server.bootstrap, rust)
