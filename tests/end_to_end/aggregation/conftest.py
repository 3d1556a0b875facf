"""The server of a worker that tests of aggregation share, unless they need one of their own."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

import zufluss
from tests.conftest import SERVERS
from tests.end_to_end.raw import RawClient
from tests.servers import WarmServer, free_port
from zufluss.client.sync.connection import Connection
from zufluss.testing.server import DevServer

QUICK = {"client.writer.batch-timeout": "0ms"}
"""Tests flush their writes, so waiting for more rows to batch gains nothing."""


@pytest.fixture(scope="package")
def server(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[DevServer]:
    """The worker's server for aggregation; no test stops it."""
    properties = {"zufluss.metrics.port": str(free_port())}
    server = WarmServer(tmp_path_factory.mktemp("aggregation"), properties)
    request.config.stash.setdefault(SERVERS, []).append(server)
    with server:
        yield server


@pytest.fixture(scope="module")
def conn(server: DevServer) -> Iterator[Connection]:
    """A client."""
    with zufluss.connect(server.bootstrap, **QUICK) as connection:
        yield connection


@pytest.fixture
def raw(server: DevServer) -> Iterator[RawClient]:
    """A bare connection."""
    with RawClient(server.port) as client:
        yield client
