"""How long until a server is ready and a command has answered, warm and right after an install.

Warm means that everything is in its caches: the kernel's page cache and Python's bytecode, which is
kept in a directory of the benchmark, because not every installation writes it. A warm start is
compared with the time Python needs to import the libraries a server cannot do without.

The first uses come from a wheel in a new environment. Their goals are seconds of CPU: whoever
installs has no compiled bytecode yet, and must not wait for kernels to be compiled.
"""

from __future__ import annotations

import os
import resource
import shutil
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
from scripts.newcomer import build, clean_environment
from zufluss.testing.server import DevServer

GOAL_SECONDS = 3.0
CALL_GOAL_SECONDS = 0.6
BUCKETS = 500
IMPORTS = "import numpy, pyarrow, google.protobuf, sqlite3, structlog, uvloop, yaml"
CLI = "from zufluss.cli.main import process_main; process_main()"
TASK = "import zufluss.spark.source"
"""What a Python task of Spark imports first."""


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

    yield from _warm_calls(directory, rounds, bytecode)
    yield from _first_uses(directory / "first")


def _warm_calls(directory: Path, rounds: int, environ: dict[str, str]) -> Iterator[Measure]:
    """Single commands, and the import of the client."""
    environ = {**os.environ, **environ}
    calls = {"lookup": ("fluss.cities", "1"), "upsert": ("fluss.cities", str(_rows(directory)))}
    with DevServer(directory / "calls", environ=environ) as server:
        _create(server)
        for name, arguments in calls.items():
            command = [sys.executable, "-c", CLI, name, *arguments]
            where = {**environ, "ZUFLUSS_BOOTSTRAP": server.bootstrap}
            seconds = _median_wall(command, rounds, where)
            yield _goal(f"startup.{name}", f"zufluss {name}, warm", seconds, CALL_GOAL_SECONDS)
        server.stop()
    seconds = _median_wall([sys.executable, "-c", "import zufluss.client"], rounds, environ)
    yield Measure("startup.client", "import of the client", f"{seconds:.2f} s", "", seconds, "s")


def _first_uses(directory: Path) -> Iterator[Measure]:
    """The first start, lookup and Spark task after an install: CPU seconds."""
    python = str(_installed(directory))
    environ = {**clean_environment(), "HOME": str(directory)}
    with DevServer(directory / "data", command=(python, "-m", "zufluss.cli.main", "dev")) as server:
        first = cpu_seconds([server.pid])
        _create(server)
        call = [python, "-c", CLI, "lookup", "fluss.cities", "1"]
        looked_up = _cpu(call, {**environ, "ZUFLUSS_BOOTSTRAP": server.bootstrap})
        server.stop()
    task = _cpu([python, "-c", TASK], environ)
    for name, label, seconds in (
        ("dev", "first zufluss dev after an install, CPU", first),
        ("lookup", "first zufluss lookup after an install, CPU", looked_up),
        ("task", "first Spark task after an install, CPU", task),
    ):
        yield _goal(f"startup.first-{name}", label, seconds, GOAL_SECONDS)


def _installed(directory: Path) -> Path:
    """Install the wheel of this tree with Spark's extra into a new environment."""
    uv = shutil.which("uv") or str(Path(sys.executable).with_name("uv"))
    wheel = build(directory / "wheel")
    python = directory / "environment" / "bin" / "python"
    commands = (
        [uv, "venv", "--quiet", "--python", sys.executable, str(python.parents[1])],
        [uv, "pip", "install", "--quiet", "--python", str(python), f"{wheel}[spark,iceberg]"],
    )
    for command in commands:
        subprocess.run(command, check=True)
    return python


def _create(server: DevServer) -> None:
    with zufluss.connect(server.bootstrap) as connection:
        connection.admin.create_table("fluss.cities", "id BIGINT, city STRING, PRIMARY KEY (id)")
        with connection.table("fluss.cities").upsert() as writer:
            writer.write({"id": [1], "city": ["Ulm"]})


def _rows(directory: Path) -> Path:
    file = directory / "cities.csv"
    file.write_text("id,city\n2,Bonn\n")
    return file


def _goal(name: str, label: str, seconds: float, goal: float) -> Measure:
    return Measure(name, label, f"{seconds:.2f} s", "", seconds, "s", at_most=goal)


def _median_wall(command: list[str], rounds: int, environ: dict[str, str]) -> float:
    """Median wall seconds of a command; the first call fills the caches."""
    walls = []
    for _ in range(rounds + 1):
        began = time.perf_counter()
        _call(command, environ)
        walls.append(time.perf_counter() - began)
    return statistics.median(walls[1:])


def _cpu(command: list[str], environ: dict[str, str]) -> float:
    """CPU seconds of one call of a command."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    _call(command, environ)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime - before.ru_utime + after.ru_stime - before.ru_stime


def _call(command: list[str], environ: dict[str, str]) -> None:
    subprocess.run(command, check=True, env=environ, stdout=subprocess.DEVNULL)


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
