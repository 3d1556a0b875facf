"""examples/flink without Maven, and how it reads the output of Flink; see `make demo-flink`."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from examples.flink import run, sql_client
from tests.paths import ROOT

PRINTED = """\
Flink SQL> -- Comments, and a statement with an ec[INFO] Execute statement succeeded.

Flink SQL> SELECT COUNT(*)+--------+
| orders |
+--------+
|      6 |
+--------+
1 row in set (4.58 seconds)

Flink SQL> Empty set (0.21 seconds)

Flink SQL>
Shutting down the session...
"""


def test_without_maven_nothing_is_run_and_one_line_says_so(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "examples.flink.run"],
        cwd=ROOT,
        env=os.environ | {"PATH": str(tmp_path), "XDG_CACHE_HOME": str(tmp_path)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == run.NOT_RUN, done.stderr
    line = "nothing was run: Maven (mvn), which fetches the jars, is not on the PATH\n"
    assert done.stdout == line


def test_results_are_found_behind_the_echo_of_the_client() -> None:
    answers = PRINTED.split("Flink SQL> ")[1:]
    results = [sql_client.RESULT.search(answer) for answer in answers]
    assert [result[0].splitlines() if result else None for result in results] == [
        None,
        ["+--------+", "| orders |", "+--------+", "|      6 |", "+--------+", "1 row in set"],
        ["Empty set"],
    ]


def test_both_scripts_use_the_address_that_the_example_replaces_and_its_database() -> None:
    for script in (run.ORDERS, run.REPORT):
        statements = sql_client.statements(script)
        assert statements[0].startswith("CREATE CATALOG fluss WITH")
        assert "'localhost:9123'" in statements[0]
        assert f"USE fluss.{run.DATABASE};" in statements


def test_a_statement_that_fails_is_an_error_although_the_client_ends_with_0(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    java = tmp_path / "bin" / "java"
    java.parent.mkdir()
    java.write_text("""#!/bin/sh
[ "$1" = -version ] && echo 'openjdk version "17"' && exit
echo 'Flink SQL> [ERROR] Could not execute SQL statement. Reason: no table'
""")
    java.chmod(0o755)
    monkeypatch.setenv("JAVA_HOME", str(tmp_path))
    monkeypatch.setattr(sql_client, "fetched_jars", lambda pom, environ: tmp_path)
    with pytest.raises(sql_client.SqlError, match=r"(?s)report\.sql failed.*no table"):
        sql_client.SqlClient(tmp_path).results(run.REPORT, "localhost:9123")
