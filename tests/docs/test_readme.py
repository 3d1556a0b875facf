"""The README and the demo do what they say: their code runs against a real server."""

import re
import shlex
import subprocess
import sys
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from zufluss.testing.server import DevServer

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text()


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", README, re.M | re.S)


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    with DevServer(tmp_path_factory.mktemp("data")) as server:
        yield server


def test_the_python_blocks_run_in_order(server):
    found = blocks("python")
    assert len(found) >= 2
    for block in found:
        code = block.replace("localhost:9123", server.bootstrap)
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
        assert done.returncode == 0, done.stderr


def test_the_shell_commands_on_tables_run_in_order(server, tmp_path):
    pq.write_table(
        pa.table({"id": [1, 2], "city": ["Ulm", "Bern"], "km": [1.5, 2.5]}),
        tmp_path / "trips.parquet",
    )
    lines = [x for b in blocks("sh") for x in b.splitlines() if x.startswith("zufluss ")]
    commands = [
        shlex.split(x, comments=True)[1:]
        for x in lines
        if x.split()[1] in ("table", "append", "scan", "offsets") and "--follow" not in x
    ]
    assert len(commands) >= 3
    for arguments in commands:
        done = subprocess.run(
            [sys.executable, "-m", "zufluss", *arguments, "--bootstrap", server.bootstrap],
            capture_output=True,
            text=True,
            cwd=tmp_path,
        )
        assert done.returncode == 0, (arguments, done.stderr)


@pytest.mark.slow
def test_the_demo_appends_and_scans_a_million_rows():
    done = subprocess.run(
        [sys.executable, ROOT / "examples" / "demo.py"], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert "1,000,000 rows scanned back, every id once" in done.stdout


@pytest.mark.parametrize(
    "page",
    [*sorted(ROOT.glob("*.md")), *sorted((ROOT / "docs").glob("*.md"))],
    ids=lambda p: p.name,
)
def test_links_between_the_pages_lead_somewhere(page):
    for target in re.findall(r"\]\(([^)#\s]+)\)", page.read_text()):
        if "://" not in target:
            assert (page.parent / target).exists(), f"{page.name} links to {target}"
