"""One server with a lake for all tests of tiering; every test leaves it without tables."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.tiering.acceptance import Tiered, tiered_cluster
from tests.tiering.support import Driver, lake_server
from zufluss.testing.server import DevServer


@pytest.fixture(scope="session")
def shared_lake(tmp_path_factory: pytest.TempPathFactory) -> Iterator[DevServer]:
    with lake_server(tmp_path_factory.mktemp("lake")) as server:
        yield server


@pytest.fixture
def lake(shared_lake: DevServer) -> Iterator[DevServer]:
    """The shared server, with no tables before and after."""
    yield shared_lake
    driver = Driver(shared_lake)
    for table in driver.admin.list_tables("fluss"):
        driver.admin.drop_table(f"fluss.{table}")
    driver.close()


@pytest.fixture
def driver(lake: DevServer) -> Iterator[Driver]:
    """A tiering service by hand."""
    made = Driver(lake)
    yield made
    made.close()


@pytest.fixture(scope="package")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Tiered]:
    """A server of its own with the real service beside it, Spark and all; for acceptance tests."""
    with tiered_cluster(tmp_path_factory.mktemp("cluster")) as made:
        yield made
