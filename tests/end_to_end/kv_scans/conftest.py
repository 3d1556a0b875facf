"""A server with metrics and small pages, shared by all tests that need no server of their own."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

import zufluss
from tests.conftest import SERVERS
from tests.end_to_end.kv_scans.support import CAP_BYTES, scrape
from tests.end_to_end.raw import RawClient
from tests.servers import WarmServer
from zufluss.client.sync.connection import Connection
from zufluss.testing.server import DevServer

PROPERTIES = {
    "zufluss.metrics.port": "0",
    "kv.scanner.max-batch-size": str(CAP_BYTES),
    "kv.snapshot.interval": "200ms",
}
PAGED = {"client.scanner.kv.fetch.max-bytes": "2kb"}


@pytest.fixture(scope="package")
def server(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[DevServer]:
    """The worker's server for scans; no test stops it."""
    server = WarmServer(tmp_path_factory.mktemp("kvscan"), PROPERTIES)
    request.config.stash.setdefault(SERVERS, []).append(server)
    with server:
        scrape(server)
        yield server


@pytest.fixture
def raw(server: DevServer) -> Iterator[RawClient]:
    """A bare connection."""
    with RawClient(server.port) as client:
        yield client


@pytest.fixture(scope="module")
def paged(server: DevServer) -> Iterator[Connection]:
    """A client that reads in small pages."""
    with zufluss.connect(server.bootstrap, **PAGED) as connection:
        yield connection
