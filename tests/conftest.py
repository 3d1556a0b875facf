"""Fixtures every part of the test suite may use: one real server per worker, shared.

Almost no test needs a server of its own: tests use tables with different names. A test that stops,
kills or reconfigures a server takes `new_server`. The report of a failed test contains the output
of its servers.
"""

from __future__ import annotations

import inspect
import os
import random
import signal
from collections.abc import Callable, Generator, Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path

import pytest
from hypothesis import settings

from scripts.spark_classes import options as quick_java
from tests.counts import FULL
from tests.engines import shared_server
from tests.servers import Apart, WarmServer
from zufluss.remote import cloud
from zufluss.testing.s3 import S3Server
from zufluss.testing.server import DevServer

# Every Spark that a test starts, in whatever process, starts quickly.
os.environ.setdefault("SPARK_SUBMIT_OPTS", quick_java())

# The same examples on every run, and no time limits: a loaded machine is not a failure.
# `make fault` looks for new ones.
settings.register_profile("test", deadline=None, derandomize=True, max_examples=50)
settings.register_profile("fault", deadline=None)
settings.load_profile("fault" if FULL else "test")

# In the background of a shell the suite, and every process that it starts, would ignore SIGINT.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

SERVERS = pytest.StashKey[list[DevServer]]()
"""Servers whose output belongs into the report of a failing test."""

SERVERS_WANTED = os.environ.get("TEST_TABLET_SERVERS", "")
"""The shared server is `zufluss dev --tablet-servers` with this number, if it is set. Tests that
send frames to one address, whoever leads a bucket, are left out then."""

DURABILITY = os.environ.get("TEST_DURABILITY", "local")
"""`zufluss.log.durability` of the shared server."""

BUCKETS_MAX = 128
"""`max.bucket.num` of the shared server: low, so that fuzzed requests cannot cost much."""


@pytest.fixture(scope="session")
def dev_server(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[DevServer]:
    """The worker's server; no test stops it."""
    directory = tmp_path_factory.mktemp("server")
    properties = {"max.bucket.num": str(BUCKETS_MAX)}
    if DURABILITY == "remote":
        properties |= {
            "zufluss.log.durability": DURABILITY,
            "remote.data.dir": str(directory / "location"),
            "zufluss.wal.interval": "5ms",
        }
    command = ("dev", "--tablet-servers", SERVERS_WANTED) if SERVERS_WANTED else ("dev",)
    server = WarmServer(directory / "data", properties, command=command)
    request.config.stash.setdefault(SERVERS, []).append(server)
    with server:
        yield server


@pytest.fixture
def own_servers(request: pytest.FixtureRequest) -> Iterator[Callable[[DevServer], None]]:
    """Starts a server, which ends with the test and whose output belongs into its report."""
    known = request.config.stash.setdefault(SERVERS, [])
    with ExitStack() as stack:

        def start(server: DevServer) -> None:
            known.append(server)
            stack.callback(known.remove, server)
            stack.enter_context(server)

        yield start


@pytest.fixture
def new_server(
    own_servers: Callable[[DevServer], None], tmp_path_factory: pytest.TempPathFactory
) -> Callable[..., DevServer]:
    """Starts servers that belong to one test: `new_server({"key": "value"})`."""

    def start(
        properties: Mapping[str, str] | None = None, data_dir: Path | None = None
    ) -> DevServer:
        server = WarmServer(data_dir or tmp_path_factory.mktemp("server"), properties)
        own_servers(server)
        return server

    return start


@pytest.fixture
def new_apart(
    own_servers: Callable[[DevServer], None], tmp_path_factory: pytest.TempPathFactory
) -> Callable[..., Apart]:
    """Starts the roles in two processes that belong to one test: `new_apart({"key": "value"})`."""

    def start(properties: Mapping[str, str] | None = None) -> Apart:
        servers = Apart.in_directory(tmp_path_factory.mktemp("apart"), properties)
        for server in servers:
            own_servers(server)
        return servers

    return start


@pytest.fixture(scope="session")
def s3_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[S3Server]:
    """The worker's S3 server; every test uses a bucket of its own."""
    with shared_server(tmp_path_factory.mktemp("s3")) as server:
        yield server


@pytest.fixture
def no_backoff(monkeypatch: pytest.MonkeyPatch) -> None:
    """Retry requests to object storage without a pause."""
    monkeypatch.setattr(cloud, "BACKOFF_SECONDS", 0.001)


@pytest.fixture
def rng(request: pytest.FixtureRequest) -> random.Random:
    """Source of a test's random decisions.

    The seed is printed; `ZUFLUSS_SEED=<seed>` repeats the decisions. Threads, processes and the
    disk still take their own time.
    """
    text = os.environ.get("ZUFLUSS_SEED")
    seed = int(text) if text else random.SystemRandom().randrange(1 << 32)
    print(f"ZUFLUSS_SEED={seed} repeats {request.node.nodeid}")
    return random.Random(f"{seed} {request.node.name}")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Modules that share a Spark session come first: one worker gets them, and one starts Spark."""
    shared = {item.path for item in items if "spark" in getattr(item, "fixturenames", ())}
    if SERVERS_WANTED:
        items[:] = [item for item in items if "raw" not in getattr(item, "fixturenames", ())]
    items.sort(key=lambda item: item.path not in shared)


@pytest.hookimpl(wrapper=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> Generator[None, object, object]:
    """Repeat a test once whose Python process connected to Spark too late.

    Spark gives the process of a streaming source ten seconds to import pyspark and connect, which
    no setting changes. On a machine under heavy load that is too short, now and then.
    """
    try:
        return (yield)
    except Exception as e:
        if "Python worker failed to connect back" not in str(e):
            raise
    names = inspect.signature(pyfuncitem.obj).parameters
    pyfuncitem.obj(**{name: pyfuncitem.funcargs[name] for name in names})
    return True


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Add the output of its servers to the report of a failed test."""
    report = yield
    if report.failed:
        for server in item.config.stash.get(SERVERS, []):
            report.sections.append((f"server {server.bootstrap}", server.log()[-4000:]))
    return report
