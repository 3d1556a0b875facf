"""The pages and the demo do what they say: their code runs against a real server.

Python blocks are run in order. On the page of primary-key tables what stands behind a `print(…)` as
a comment is what it prints. Shell blocks are run line by line, those that touch tables and do not
follow for ever.
"""

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tests.paths import ROOT
from tests.servers import WarmServer
from zufluss.testing.server import DevServer

README = ROOT / "README.md"
KEYED = ROOT / "docs" / "primary-key-tables.md"
DATA_COMMAND = re.compile(
    r"\bzufluss (table|append|scan|offsets|upsert|delete|lookup|changelog) (?!.*--follow)"
)


def blocks(page: Path, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", page.read_text(), re.M | re.S)


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    with WarmServer(tmp_path_factory.mktemp("data"), {"datalake.format": "iceberg"}) as server:
        yield server


def run_python(code: str, server: DevServer) -> str:
    code = code.replace("localhost:9123", server.bootstrap)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    # pyfluss 1.0.0 aborts about one interpreter in ten at its end, when a scan's threads still run.
    harmless = (0, -signal.SIGABRT) if "import asyncio, fluss" in code else (0,)
    assert done.returncode in harmless, done.stderr
    return done.stdout


def test_the_python_blocks_of_the_readme_run_in_order(server):
    code_blocks = blocks(README, "python")
    assert len(code_blocks) >= 4
    printed = [run_python(block, server) for block in code_blocks]
    assert printed[1].startswith("{'id': 1, 'status': 'paid', 'cents': 950}\n")
    assert re.findall("[+-][IUD]", printed[1]) == ["+I", "+I", "-D", "-U", "+U"]
    assert printed[2] == "2\n", "what a union read found"
    assert printed[3] == "[Row(sum(n)=2)]\n", "what Spark counted"
    assert "id: [[1,2,3]]" in printed[-1], "what pyfluss scanned"


@pytest.fixture(scope="module")
def printed_on_keys(server) -> list[str]:
    """What the Python blocks of the page on primary keys print; their tables are there then."""
    return run_python("\n".join(blocks(KEYED, "python")), server).splitlines()


def test_the_python_blocks_on_primary_keys_print_what_they_say(printed_on_keys):
    expected = re.findall(r"^print\(.*\)  # (.*)$", "\n".join(blocks(KEYED, "python")), re.M)
    assert len(expected) >= 10
    assert printed_on_keys == expected


@pytest.mark.parametrize("page", [README, KEYED], ids=lambda page: page.name)
@pytest.mark.usefixtures("printed_on_keys")  # the commands use its tables
def test_the_shell_commands_on_tables_run_in_order(server, tmp_path, page):
    pq.write_table(
        pa.table({"id": [1, 2], "city": ["Ulm", "Bern"], "km": [1.5, 2.5]}),
        tmp_path / "trips.parquet",
    )
    (tmp_path / "stock.csv").write_text("sku,pieces\npen,3\nink,4\n")
    (tmp_path / "counted.csv").write_text("sku,pieces\npen,2\n")
    lines = [x for b in blocks(page, "sh") for x in b.splitlines() if DATA_COMMAND.search(x)]
    assert len(lines) >= 7
    environment = os.environ | {
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
        "ZUFLUSS_BOOTSTRAP": server.bootstrap,
    }
    for line in lines:
        done = subprocess.run(
            ["bash", "-o", "pipefail", "-c", line],
            capture_output=True,
            text=True,
            cwd=tmp_path,
            env=environment,
            stdin=subprocess.DEVNULL,
        )
        assert done.returncode == 0, (line, done.stderr)


@pytest.mark.slow
def test_the_demo_does_what_it_says():
    done = subprocess.run(
        [sys.executable, ROOT / "examples" / "demo.py"],
        capture_output=True,
        text=True,
        env={**os.environ, "COLUMNS": "120"},
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr
    assert "1,000,000 rows scanned back, every id once" in done.stdout
    assert "the changelog, folded, is the table: 360,000 orders, all equal" in done.stdout
    assert done.stdout.count("= live table") == 10  # four times two union reads, two lakes
    assert "4, all equal" in done.stdout
    assert "tiering service and server stopped cleanly" in done.stdout


@pytest.mark.parametrize(
    "page",
    [*sorted(ROOT.glob("*.md")), *sorted((ROOT / "docs").glob("*.md"))],
    ids=lambda p: p.name,
)
def test_links_between_the_pages_lead_somewhere(page):
    for target in re.findall(r"\]\(([^)#\s]+)\)", page.read_text()):
        if "://" not in target:
            assert (page.parent / target).exists(), f"{page.name} links to {target}"
