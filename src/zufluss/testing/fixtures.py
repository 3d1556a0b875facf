"""Fixtures for the tests of users: a server for the whole test run, and a connection to it.

    # conftest.py at the root of the tests
    pytest_plugins = ["zufluss.testing.fixtures"]

| fixture | scope | what it is |
|---|---|---|
| `zufluss_server` | session | a `DevServer`, a process of its own on a temporary directory |
| `zufluss_connection` | session | a `Connection` to it |
| `zufluss_database` | function | a new database, dropped with its tables after the test |

pytest-xdist workers have a server each. Override `zufluss_properties` to configure the server.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import pytest

import zufluss
from zufluss.testing.server import DevServer

_NUMBERS = itertools.count()


@pytest.fixture(scope="session")
def zufluss_properties() -> dict[str, str]:
    """The options of the server; override this fixture to give some."""
    return {}


@pytest.fixture(scope="session")
def zufluss_server(
    tmp_path_factory: pytest.TempPathFactory, zufluss_properties: dict[str, str]
) -> Iterator[DevServer]:
    """A server on a temporary directory, which ends with the test run."""
    with DevServer(tmp_path_factory.mktemp("zufluss"), zufluss_properties) as server:
        yield server


@pytest.fixture(scope="session")
def zufluss_connection(zufluss_server: DevServer) -> Iterator[zufluss.Connection]:
    """A connection to the server."""
    with zufluss.connect(zufluss_server.bootstrap) as connection:
        yield connection


@pytest.fixture
def zufluss_database(zufluss_connection: zufluss.Connection) -> Iterator[str]:
    """The name of a database that only this test has."""
    name = f"test_{next(_NUMBERS)}"
    zufluss_connection.admin.create_database(name)
    yield name
    zufluss_connection.admin.drop_database(name, cascade=True)
