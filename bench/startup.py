"""How long from the command to the ready line when everything is in its caches.

Caches are the kernel's page cache, numba's compiled kernels and Python's bytecode; the last one is
kept in a directory of the benchmark, because not every installation writes it. Compared with the
time Python needs to import the libraries a server cannot do without.
"""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import zufluss
from bench.report import Measure, compared
from bench.work import (
    UNCOMPRESSED,
    Target,
    cpu_seconds,
    encoded,
    new_table,
    produce_frames,
    ten_columns,
)
from zufluss.testing.server import DevServer

GOAL_SECONDS = 3.0
BUCKETS = 500
IMPORTS = "import numba, numpy, pyarrow, google.protobuf, sqlite3, structlog, uvloop, yaml"


def run(directory: Path, rounds: int, quick: bool) -> Iterator[Measure]:
    """An empty data directory, and one with many buckets that were written to."""
    data = directory / "startup"
    bytecode = {"PYTHONPYCACHEPREFIX": str(directory / "pyc"), "PYTHONDONTWRITEBYTECODE": ""}
    with DevServer(data, environ=bytecode) as server:
        with zufluss.connect(server.bootstrap) as connection:
            info = new_table(connection, "many", buckets=BUCKETS, properties=UNCOMPRESSED)
            frames = produce_frames(info, [encoded(info, ten_columns(1))])
            Target(server.bootstrap, (server.pid,)).load(frames, count=BUCKETS)
        server.stop()
    empty, many, imports = [], [], []
    for i in range(rounds + 1):
        imports.append(_timed_imports(bytecode))
        empty.append(_timed_start(directory / f"startup-{i}", bytecode))
        many.append(_timed_start(data, bytecode))
    seconds = statistics.median(wall for wall, _ in empty[1:])
    cpu = statistics.median(cpu for _, cpu in empty[1:])
    yield Measure(
        "startup.seconds",
        "start to ready line",
        f"{seconds:.2f} s",
        f"{cpu:.2f} s of CPU",
        seconds,
        "s",
        at_most=GOAL_SECONDS,
    )
    yield compared(
        "startup.imports",
        "start to ready line, against importing the libraries",
        [wall for wall, _ in empty[1:]],
        imports[1:],
        "s",
        less_is_better=True,
    )
    yield compared(
        "startup.buckets",
        f"start with {BUCKETS} buckets, against an empty start",
        [wall for wall, _ in many[1:]],
        [wall for wall, _ in empty[1:]],
        "s",
        less_is_better=True,
    )


def _timed_start(data: Path, environ: dict[str, str]) -> tuple[float, float]:
    """Wall and CPU seconds to the ready line."""
    began = time.perf_counter()
    with DevServer(data, environ=environ) as server:
        seconds = time.perf_counter() - began
        cpu = cpu_seconds([server.pid])
        server.stop()
    return seconds, cpu


def _timed_imports(environ: dict[str, str]) -> float:
    began = time.perf_counter()
    subprocess.run([sys.executable, "-c", IMPORTS], check=True, env={**os.environ, **environ})
    return time.perf_counter() - began
