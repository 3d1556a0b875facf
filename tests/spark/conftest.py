"""Spark, and a server with a lake whose rounds a test runs when it wants them."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

import zufluss
from tests.client.rounds import Rounds
from tests.end_to_end.kv_scans.support import metrics_address
from tests.servers import WarmServer
from tests.spark.cluster import connect_server, local_cluster, spark, standalone
from zufluss.client.sync.connection import Connection
from zufluss.testing.server import DevServer

__all__ = ["connect_server", "local_cluster", "spark", "standalone"]


@pytest.fixture(scope="package")
def lake_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[DevServer]:
    """A server whose lake lies in a directory with a difficult name."""
    directory = tmp_path_factory.mktemp("lake") / "a b+[1]{x}"
    properties = {"datalake.format": "iceberg", "zufluss.metrics.port": "0"}
    with WarmServer(directory, properties) as server:
        metrics_address(server, server.pid)
        yield server


@pytest.fixture(scope="package")
def connection(lake_server: DevServer) -> Iterator[Connection]:
    with zufluss.connect(lake_server.bootstrap) as connection:
        yield connection


@pytest.fixture(scope="package")
def rounds(connection: Connection, lake_server: DevServer) -> Rounds:
    return Rounds(connection, lake_server.bootstrap)
