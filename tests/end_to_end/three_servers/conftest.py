"""One cluster of three tablet servers for all tests of the directory; no test kills a process."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

import zufluss
from tests.cluster_of import ClusterServer
from tests.conftest import SERVERS
from zufluss.client.sync.connection import Connection

PROPERTIES = {
    "datalake.format": "iceberg",
    "kv.snapshot.interval": "100ms",
    "remote.log.task-interval-duration": "100ms",
}


@pytest.fixture(scope="session")
def cluster(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[ClusterServer]:
    """The worker's cluster."""
    server = ClusterServer(tmp_path_factory.mktemp("three"), 3, PROPERTIES)
    request.config.stash.setdefault(SERVERS, []).append(server)
    with server:
        yield server


@pytest.fixture(scope="session")
def ours(cluster: ClusterServer) -> Iterator[Connection]:
    """Our client's connection to it."""
    with zufluss.connect(cluster.bootstrap) as connection:
        yield connection
