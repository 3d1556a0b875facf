"""pyfluss, connected to the worker's server.

A pyfluss connection does not belong to an event loop, so one per worker serves all tests.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import fluss
import pytest

from tests.end_to_end.helpers import DATABASE, connect, fresh_name, fresh_path
from tests.end_to_end.raw import RawClient
from zufluss.testing.server import DevServer


@pytest.fixture(scope="session")
def conn(dev_server: DevServer) -> Iterator[fluss.FlussConnection]:
    """The worker's pyfluss connection; the database of the tests exists."""
    connection = asyncio.run(connect(dev_server.bootstrap))
    asyncio.run(_create_database(connection))
    yield connection
    asyncio.run(_close(connection))


@pytest.fixture(scope="session")
def admin(conn: fluss.FlussConnection) -> fluss.FlussAdmin:
    """pyfluss's admin client."""
    return conn.get_admin()


@pytest.fixture
def path(request: pytest.FixtureRequest, conn: fluss.FlussConnection) -> fluss.TablePath:
    """The path of a table that does not exist yet, named after the test."""
    return fresh_path(request.node.name)


@pytest.fixture
def database(request: pytest.FixtureRequest, conn: fluss.FlussConnection) -> str:
    """The name of a database that does not exist yet."""
    return fresh_name(request.node.name)


@pytest.fixture
def raw(dev_server: DevServer, conn: fluss.FlussConnection) -> Iterator[RawClient]:
    """A bare connection to the worker's server."""
    with RawClient(dev_server.port) as client:
        yield client


async def _create_database(connection: fluss.FlussConnection) -> None:
    await connection.get_admin().create_database(DATABASE, ignore_if_exists=True)


async def _close(connection: fluss.FlussConnection) -> None:
    await connection.close()
