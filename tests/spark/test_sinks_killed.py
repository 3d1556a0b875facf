"""Streams whose driver is killed between any two steps: each row arrives once."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("pyspark", reason="needs the extra zufluss[spark]")

import zufluss
from tests.client.pk import create_table
from tests.spark.sinks import doubled, log_rows, state, write_files
from tests.spark.test_sinks import AGGREGATION, COUNTS, expected
from zufluss.testing.server import DevServer

STEPS = ("written", "tasks", "committed")
MOMENTS = [f"{kind}:{step}" for kind in ("aggregate", "log", "upsert") for step in STEPS]
SOME = ["aggregate:tasks", "log:written"]
FULL = os.environ.get("ZUFLUSS_FAULT") == "full"
ROOT = Path(__file__).parents[2]
SECONDS = 170


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_a_stream_whose_driver_is_killed_arrives_once(
    dev_server: DevServer, tmp_path: Path
) -> None:
    rows = "id BIGINT, k BIGINT, v BIGINT"
    moments = [*(2 * MOMENTS + SOME if FULL else SOME), "never"]
    with zufluss.connect(dev_server.bootstrap) as conn:
        log = str(create_table(conn, rows, bucket_count=2).path)
        keyed = str(create_table(conn, f"{rows}, PRIMARY KEY (id)", bucket_count=2).path)
        counts = str(create_table(conn, COUNTS, properties=AGGREGATION).path)
        for number, moment in enumerate(moments):
            files = write_files(tmp_path / "in", files=1, rows=70, first=number)
            arguments = [dev_server.bootstrap, str(files), str(tmp_path / "state"), log, keyed]
            code = run_driver(*arguments, counts, moment)
            assert code == (0 if moment == "never" else -signal.SIGKILL), moment
        total = 70 * len(moments)
        found = log_rows(conn, log)
        assert (len(found), doubled(found)) == (total, [])
        assert state(conn, keyed).keys() == set(range(total))
        assert state(conn, counts, "k") == expected(total)


def run_driver(*arguments: str) -> int:
    """The exit status of a driver; what it printed is in the test's report."""
    command = [sys.executable, "-m", "tests.spark.killed_driver", *arguments]
    return subprocess.run(command, cwd=ROOT, timeout=SECONDS, stdin=subprocess.DEVNULL).returncode
