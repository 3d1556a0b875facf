"""docs/leases.md does what it says: its blocks run in order on one server.

Python blocks print what stands behind their `print(…)`. What the page says of options and metrics
is compared with what there is.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import zufluss
from tests.docs.test_readme import ROOT, run_python
from tests.servers import WarmServer
from tests.waiting import eventually
from zufluss.config.options import OPTIONS
from zufluss.obs.metrics import render
from zufluss.testing.server import DevServer

PAGE = ROOT / "docs" / "leases.md"
QUICK = {"kv.snapshot.interval": "50ms"}


def test_the_blocks_of_the_page_do_what_they_say(tmp_path: Path) -> None:
    code_blocks = re.findall(r"^```(sh|python)\n(.*?)^```$", PAGE.read_text(), re.M | re.S)
    with WarmServer(tmp_path, QUICK) as server:
        fill(server)
        for language, code in code_blocks:
            if language == "python":
                expected = re.findall(r"^ *print\(.*\)  # (.*)$", code, re.M)
                assert run_python(code, server).splitlines() == expected
            else:
                run_commands(code.splitlines(), server)
    assert [language for language, _ in code_blocks] == ["python"] * 3 + ["sh"]


def fill(server: DevServer) -> None:
    """A thousand orders, all of them in a snapshot."""
    schema = "id BIGINT NOT NULL, status STRING, PRIMARY KEY (id)"
    with zufluss.connect(server.bootstrap) as connection:
        admin = connection.admin
        admin.create_table("fluss.orders", schema, bucket_count=1)
        with connection.table("fluss.orders").upsert() as writer:
            writer.write({"id": [*range(1000)], "status": ["new"] * 1000})
        ends = admin.list_offsets("fluss.orders")
        latest = admin.latest_kv_snapshots
        eventually(lambda: [each.log_offset for each in latest("fluss.orders")] == [ends[0]])


def run_commands(lines: list[str], server: DevServer) -> None:
    """With a lease of the name that the page uses, which the last command drops."""
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    environment = os.environ | {"PATH": path, "ZUFLUSS_BOOTSTRAP": server.bootstrap}
    with zufluss.connect(server.bootstrap) as connection:
        connection.admin.kv_snapshot_lease("fluss.orders", lease_id="nightly")
        for line in lines:
            done = subprocess.run(
                ["bash", "-c", line], capture_output=True, text=True, env=environment
            )
            assert done.returncode == 0, (line, done.stderr)
            assert "nightly" in done.stdout + done.stderr or " usage" in line
        assert connection.admin.kv_snapshot_leases() == []


def test_the_options_of_the_page_exist() -> None:
    named = set(re.findall(r"`((?:zufluss\.)?kv\.snapshot\.[a-z.-]+)", PAGE.read_text()))
    assert len(named) >= 7
    for key in named:
        assert key in OPTIONS


def test_the_metrics_of_the_page_exist() -> None:
    declared = render()
    named = re.findall(r"`(zufluss_\w+)`", PAGE.read_text())
    assert len(named) == 5
    for name in named:
        assert f"`{name}`" in declared
