"""Try the wheel as a user gets it: installed into an empty folder and used for its first minute.

The test suite runs on the source tree, where every file is present. A wheel can lack a file, a
dependency or an entry point without any of those tests failing. This script builds the wheel,
installs it with its declared dependencies into a new environment, and runs the installed `zufluss`
command from a directory that holds nothing else: it starts a server, writes and reads a log table
and a primary-key table, and stops the server. Nothing of this may compile a kernel, or need a home
directory. Part of `make test-more`.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
READY = re.compile(r"zufluss ready on (\S+:\d+)")
"""The line that a server prints once it takes requests."""


def main() -> int:
    """Build, install and try the wheel; a non-zero exit code and the output tell what failed."""
    with tempfile.TemporaryDirectory(prefix="zufluss-wheel-") as directory:
        folder = Path(directory)
        python = install(build(folder), folder / "environment")
        work = folder / "work"
        work.mkdir()
        check_kernels(python)
        try_first_minute(python.with_name("zufluss"), work)
        check_nothing_was_compiled(folder)
    print("the wheel works in an empty folder")
    return 0


def build(folder: Path) -> Path:
    """Build the wheel of the source tree and return its path."""
    run(uv(), "build", "--quiet", "--wheel", "--out-dir", str(folder), str(ROOT))
    (wheel,) = folder.glob("zufluss-*.whl")
    return wheel


def install(wheel: Path, environment: Path) -> Path:
    """Install the wheel into a new environment and return the environment's interpreter."""
    python = environment / "bin" / "python"
    run(uv(), "venv", "--quiet", "--python", sys.executable, str(environment))
    run(uv(), "pip", "install", "--quiet", "--python", str(python), str(wheel))
    return python


def check_kernels(python: Path) -> None:
    """Check that the kernels of the installed package come from its compiled library."""
    code = (
        "import sys, zufluss.server; from zufluss.record.kernels import library;"
        "print(len(library.functions() or ()), 'numba' in sys.modules)"
    )
    count, numba = run(str(python), "-c", code, cwd=python.parent).split()
    assert int(count) > 50, "the installed package has no compiled kernels"
    assert numba == "False", "a server imports numba"


def check_nothing_was_compiled(folder: Path) -> None:
    """Check that numba left no compiled function anywhere below the folder."""
    compiled = [*folder.rglob("*.nbi"), *folder.rglob("kernels-*")]
    assert not compiled, f"kernels were compiled: {compiled}"


def try_first_minute(zufluss: Path, work: Path) -> None:
    """Start a server with the installed command and use both kinds of tables through it."""
    (work / "rows.csv").write_text("id,city\n1,Ulm\n2,Bonn\n")
    dev = [str(zufluss), "dev", "--data-dir", "data", "--port", "0"]
    server = subprocess.Popen(
        dev, cwd=work, env=clean_environment(), stdout=subprocess.PIPE, text=True
    )
    try:
        bootstrap = ready_address(server)

        def call(*arguments: str) -> str:
            command = [str(zufluss), *arguments, "--bootstrap", bootstrap]
            return run(*command, cwd=work)

        call("table", "create", "fluss.trips", "id BIGINT, city STRING")
        call("append", "fluss.trips", "rows.csv")
        scanned = call("scan", "fluss.trips", "--output", "json")
        assert rows(scanned) == [{"id": 1, "city": "Ulm"}, {"id": 2, "city": "Bonn"}], scanned
        call("table", "create", "fluss.towns", "id BIGINT, city STRING, PRIMARY KEY (id)")
        call("upsert", "fluss.towns", "rows.csv")
        looked_up = call("lookup", "fluss.towns", "2", "--output", "json")
        assert rows(looked_up) == [{"id": 2, "city": "Bonn"}], looked_up
    finally:
        server.terminate()
        server.wait(timeout=60)
    assert server.returncode == 0, f"the server ended with {server.returncode}"


def ready_address(server: subprocess.Popen[str]) -> str:
    """Return the address in the server's ready line."""
    assert server.stdout is not None
    printed = ""
    for line in server.stdout:
        printed += line
        if match := READY.search(line):
            return match[1]
    raise SystemExit(f"the server ended before it was ready:\n{printed}")


def rows(output: str) -> list[Any]:
    """Parse the JSON output of a command, one object per line."""
    return [json.loads(line) for line in output.splitlines()]


def uv() -> str:
    """Return the path of uv, the machine's or the one in the environment."""
    return shutil.which("uv") or str(ROOT / ".venv" / "bin" / "uv")


def clean_environment() -> dict[str, str]:
    """Return the environment variables without a way to the source tree or to a home directory."""
    hidden = ("PYTHON", "VIRTUAL_ENV", "NUMBA", "HOME", "XDG_")
    return {k: v for k, v in os.environ.items() if not k.startswith(hidden)}


def run(*command: str, cwd: Path = ROOT) -> str:
    """Run a command and return what it printed; its failure ends the script."""
    done = subprocess.run(
        command, cwd=cwd, env=clean_environment(), stdout=subprocess.PIPE, text=True
    )
    if done.returncode != 0:
        raise SystemExit(f"{' '.join(command)} ended with {done.returncode}\n{done.stdout}")
    return done.stdout


if __name__ == "__main__":
    sys.exit(main())
