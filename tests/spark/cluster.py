"""Spark for tests: one session per test process, and clusters of real processes.

A process can have one Spark session at a time. Tests that only need Spark share the fixture
`spark`; a test of a cluster gets a `SparkCluster`, which says how to reach it, and runs its driver
in a process of its own (`SparkCluster.run`, or a tiering service with `--spark.master`).

| fixture | is |
|---|---|
| `spark` | `local[2,4]` in this process |
| `local_cluster` | `local-cluster[2,1,1024]`: two executor processes, started by the driver |
| `standalone` | a master and two workers, running |
| `connect_server` | a Spark Connect server on `local[2,4]`, running |

Other directories of tests import the fixtures in their `conftest.py`.
"""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import socket
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from scripts.spark_classes import options as quick_java
from zufluss.spark.setup.java import use_java
from zufluss.spark.setup.session import missing_for_connect
from zufluss.spark.views import session
from zufluss.testing.process import ReadyProcess

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

QUICK = {
    "spark.executor.extraJavaOptions": quick_java(),  # of drivers: tests/conftest.py
    "spark.sql.shuffle.partitions": "2",
}
SMALL_EXECUTORS = {"spark.executor.memory": "700m", "spark.executor.cores": "1"}
CONNECT_CLASS = "org.apache.spark.sql.connect.service.SparkConnectServer"
DRIVER_SECONDS = 400


@dataclass(frozen=True)
class SparkCluster:
    """Where a driver finds a cluster, and with which settings."""

    master: str
    conf: Mapping[str, str] = field(default_factory=dict)

    def run(self, code: str, *arguments: str) -> str:
        """Run a driver with `spark`, a session on this cluster; what it prints."""
        conf = dict(QUICK | self.conf) if not self.master.startswith("sc://") else {}
        lines = (
            "import sys, zufluss.spark",
            f"spark = zufluss.spark.session('test', {self.master!r}, {conf!r})",
            code,
            "spark.stop()",
        )
        done = subprocess.run(
            [sys.executable, "-c", "\n".join(lines), *arguments],
            capture_output=True,
            text=True,
            timeout=DRIVER_SECONDS,
        )
        assert done.returncode == 0, done.stderr[-6000:]
        return done.stdout


@pytest.fixture(scope="session")
def spark(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SparkSession]:
    """The session of this process; nobody stops it."""
    warehouse = {"spark.sql.warehouse.dir": tmp_path_factory.mktemp("spark").as_uri()}
    made = session("tests", "local[2]", QUICK | warehouse)
    yield made
    made.stop()


@pytest.fixture
def local_cluster() -> Iterator[SparkCluster]:
    """Two executor processes of one core each; they start and end with the driver."""
    work = Path(spark_home()) / "work"
    kept = work.exists()
    yield SparkCluster("local-cluster[2,1,1024]", SMALL_EXECUTORS)
    if not kept:
        shutil.rmtree(work, ignore_errors=True)


@pytest.fixture(scope="session")
def standalone(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SparkCluster]:
    """A master and two workers of one core each, all processes of their own."""
    use_java()
    with ExitStack() as stack:
        master = SparkDaemon(
            "org.apache.spark.deploy.master.Master",
            ["--host", "127.0.0.1", "--port", "0", "--webui-port", "0"],
            re.compile(r"Starting Spark master at (spark://\S+)"),
        )
        stack.enter_context(master)
        for _ in range(2):
            directory = tmp_path_factory.mktemp("spark-worker")
            about = ["--cores", "1", "--memory", "1g", "--work-dir", str(directory)]
            worker = SparkDaemon(
                "org.apache.spark.deploy.worker.Worker",
                ["--host", "127.0.0.1", "--webui-port", "0", *about, master.found],
                re.compile(r"Successfully registered with master (\S+)"),
            )
            stack.enter_context(worker)
        conf = {"spark.driver.host": "127.0.0.1", "spark.driver.bindAddress": "127.0.0.1"}
        yield SparkCluster(master.found, SMALL_EXECUTORS | conf)


@pytest.fixture(scope="session")
def connect_server() -> Iterator[SparkCluster]:
    """A Spark Connect server; skipped where the packages of `pyspark[connect]` are missing."""
    missing = missing_for_connect()
    if missing:
        pytest.skip(f"Spark Connect needs pyspark[connect]; {missing[0]} is not installed")
    use_java()
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    settings = {"spark.connect.grpc.binding.port": str(port), "spark.ui.enabled": "false"}
    settings |= {"spark.python.unix.domain.socket.enabled": "true", **QUICK}
    conf = [word for k, v in settings.items() for word in ("--conf", f"{k}={v}")]
    server = SparkDaemon(
        "org.apache.spark.deploy.SparkSubmit",
        ["--class", CONNECT_CLASS, "--master", "local[2,4]", *conf, "spark-internal"],
        re.compile(r"(Spark Connect server started at: \S+)"),
        memory="1g",
    )
    with server:
        yield SparkCluster(f"sc://127.0.0.1:{port}")


class SparkDaemon(ReadyProcess):
    """A long-lived JVM of Spark, by its class; ready with the line that `ready` finds."""

    def __init__(
        self, name: str, arguments: Sequence[str], ready: re.Pattern[str], memory: str = "256m"
    ) -> None:
        environ = {
            "SPARK_HOME": spark_home(),
            "SPARK_LOCAL_IP": "127.0.0.1",
            "SPARK_MASTER_OPTS": "-Dspark.master.rest.enabled=false",
            "SPARK_DAEMON_JAVA_OPTS": quick_java(),
            "SPARK_DAEMON_MEMORY": memory,
            "PYSPARK_PYTHON": sys.executable,
        }
        super().__init__(ready, environ)
        self._command = [str(Path(spark_home()) / "bin" / "spark-class"), name, *arguments]
        self.found = ""
        """What the ready line said."""

    def arguments(self) -> Sequence[str]:
        return self._command

    def became_ready(self, line: re.Match[str]) -> None:
        self.found = line[1]

    def __exit__(self, *problem: object) -> None:
        if self.running:
            self.stop()


def spark_home() -> str:
    """The directory of the installed pyspark."""
    found = importlib.util.find_spec("pyspark")
    assert found is not None
    assert found.origin is not None
    return os.environ.get("SPARK_HOME") or str(Path(found.origin).parent)
