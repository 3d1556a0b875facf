"""The names of the package: they exist, load lazily, and mean something to a type checker."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import mypy.api
import pytest

import zufluss
from tests.paths import ROOT

HEAVY = {"pyarrow", "numpy", "numba", "asyncio", "google.protobuf", "zufluss.client"}

RIGHT = """
import zufluss
import zufluss.spark

def ids(connection: zufluss.Connection, path: zufluss.TablePath) -> int:
    table: zufluss.Table = connection.table(path)
    try:
        with table.append() as writer:
            writer.write({"id": 1})
        return table.count("id > 5") + table.count(zufluss.col("id") > 5)
    except (zufluss.TableNotExistError, zufluss.ColumnMismatchError) as e:
        error: zufluss.ZuflussError = e
        raise error

async def schema(bootstrap: str) -> zufluss.Schema:
    async with await zufluss.connect_async(bootstrap) as connection:
        table: zufluss.AsyncTable = await connection.table("fluss.t")
        return table.schema
"""
WRONG = """
import zufluss
import zufluss.spark

zufluss.conect("localhost:9123")
zufluss.Connexion
zufluss.spark.tabel
with zufluss.connect("localhost:9123") as connection:
    connection.tabel("fluss.t")
    connection.table("fluss.t").cuont()
    connection.table("fluss.t").count(5)
"""


def test_every_name_can_be_loaded_and_is_listed() -> None:
    assert {name for name in zufluss.__all__ if getattr(zufluss, name, None) is None} == set()
    assert dir(zufluss) == sorted(zufluss.__all__)
    assert issubclass(zufluss.TableNotExistError, zufluss.ZuflussError)
    assert issubclass(zufluss.UnsentRowsError, zufluss.ZuflussError)
    assert issubclass(zufluss.UnsentRowsWarning, Warning)
    with pytest.raises(AttributeError, match="no attribute 'conect'"):
        zufluss.conect  # type: ignore[attr-defined]  # noqa: B018


def test_type_checkers_see_the_names_that_can_be_loaded() -> None:
    tree = ast.parse(Path(zufluss.__file__).read_text())
    seen = {
        alias.asname
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("zufluss.")
        for alias in node.names
    }
    assert seen | {"__version__"} == set(zufluss.__all__)


def test_importing_the_package_and_its_errors_imports_nothing_heavy() -> None:
    code = f"import sys, zufluss; zufluss.TableNotExistError; print({HEAVY} & sys.modules.keys())"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"


def test_a_type_checker_accepts_right_names_and_refuses_wrong_ones(tmp_path: Path) -> None:
    for name, text in (("right.py", RIGHT), ("wrong.py", WRONG)):
        (tmp_path / name).write_text(text)
    config = [
        "--config-file",
        str(ROOT / "pyproject.toml"),
        "--cache-dir",
        str(ROOT / ".mypy_cache"),
    ]
    files = [str(tmp_path / "right.py"), str(tmp_path / "wrong.py")]
    report, problems, _ = mypy.api.run([*config, "--no-error-summary", *files])
    assert not problems
    lines = [int(line.split(":")[1]) for line in report.splitlines() if "wrong.py" in line]
    assert "right.py" not in report, report
    assert sorted(set(lines)) == [5, 6, 7, 9, 10, 11], report
