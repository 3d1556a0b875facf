"""Clients run on Windows, servers do not: shown with processes that lack what Windows lacks.

Nobody has run these tests on Windows. `windows/sitecustomize.py` says what such a process sees.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from tests.end_to_end.helpers import fresh_name
from zufluss.testing.server import DevServer

WINDOWS = Path(__file__).parent / "windows"

SESSION = """
import sys
import zufluss
from zufluss.client.keyed.scratch import Scratch

bootstrap, name = sys.argv[1:]
rows = {"id": [1, 2, 3], "name": ["a", "b", "c"]}
with zufluss.connect(bootstrap) as connection:
    admin = connection.admin
    admin.create_database(name)
    admin.create_table(f"{name}.events", "id INT, name STRING", bucket_count=1)
    admin.create_table(f"{name}.users", "id INT, name STRING, PRIMARY KEY (id)", bucket_count=1)
    events, users = connection.table(f"{name}.events"), connection.table(f"{name}.users")
    with events.append() as writer:
        writer.write(rows)
    with users.upsert() as writer:
        writer.write(rows)
    assert events.scan(stop="latest").to_arrow().to_pydict() == rows
    assert users.lookup(2) == {"id": 2, "name": "b"}
    assert users.scan().to_arrow().sort_by("id").to_pydict() == rows
scratch = Scratch("zufluss-windows-test-")
assert scratch.path.is_dir()
scratch.close()
assert not scratch.path.exists()
print("done")
"""

IMPORTS = """
import importlib, pkgutil
import zufluss

for package in ("client", "cli", "config", "lake", "model", "net", "record", "remote", "wire"):
    parent = importlib.import_module(f"zufluss.{package}")
    for module in pkgutil.walk_packages(parent.__path__, f"zufluss.{package}."):
        if not module.name.endswith("__main__"):
            importlib.import_module(module.name)
print("done")
"""


def windows(*arguments: str) -> subprocess.CompletedProcess[str]:
    """Run Python as on Windows."""
    path = os.pathsep.join([str(WINDOWS), os.environ.get("PYTHONPATH", "")])
    return subprocess.run(
        [sys.executable, *arguments],
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        check=False,
    )


def test_a_client_writes_reads_and_looks_up(dev_server: DevServer) -> None:
    result = windows("-c", SESSION, dev_server.bootstrap, fresh_name("windows"))
    assert (result.stdout, result.returncode) == ("done\n", 0), result.stderr


def test_every_module_of_the_client_and_the_command_line_can_be_imported() -> None:
    result = windows("-c", IMPORTS)
    assert (result.stdout, result.returncode) == ("done\n", 0), result.stderr


def test_a_server_says_in_one_sentence_that_it_does_not_run_here(tmp_path: Path) -> None:
    for command in (("dev",), ("server", "--role", "tablet")):
        result = windows("-m", "zufluss.cli.main", *command, "-D", f"data.dir={tmp_path / 'data'}")
        assert result.returncode == 2
        assert "Traceback" not in result.stderr
        assert "servers run on Linux and macOS" in " ".join(result.stderr.split())
        assert not (tmp_path / "data").exists()
