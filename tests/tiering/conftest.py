"""One server with a lake for all tests of tiering; every test leaves it without tables."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

import zufluss
from tests.tiering.support import Driver, lake_server
from tests.tiering.tiered_cluster import Tiered, tiered_cluster
from zufluss.client.sync.admin import Admin
from zufluss.testing.server import DevServer


def drop_tables(admin: Admin) -> None:
    for table in admin.list_tables("fluss"):
        admin.drop_table(f"fluss.{table}")


@pytest.fixture(scope="package")
def shared_lake(tmp_path_factory: pytest.TempPathFactory) -> Iterator[DevServer]:
    with lake_server(tmp_path_factory.mktemp("lake")) as server:
        yield server


@pytest.fixture
def lake(shared_lake: DevServer) -> Iterator[DevServer]:
    """The shared server, with no tables before and after."""
    yield shared_lake
    with zufluss.connect(shared_lake.bootstrap) as connection:
        drop_tables(connection.admin)


@pytest.fixture
def driver(lake: DevServer) -> Iterator[Driver]:
    """A tiering service by hand."""
    made = Driver(lake)
    yield made
    made.close()


@pytest.fixture(scope="package")
def shared_cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Tiered]:
    """A server of its own with the real service beside it, Spark and all."""
    with tiered_cluster(tmp_path_factory.mktemp("cluster")) as made:
        yield made


@pytest.fixture
def cluster(shared_cluster: Tiered) -> Iterator[Tiered]:
    """The shared cluster for one test; without tables before and after."""
    yield shared_cluster
    drop_tables(shared_cluster.admin)
