from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from typing import Any

import pytest

import zufluss
from tests.client.fake import FakeCluster
from zufluss.client.connection import AsyncConnection, connect_async
from zufluss.client.sync.connection import Connection
from zufluss.testing.server import DevServer

FAST: dict[str, Any] = {
    "client.request-timeout": "500ms",
    "client.connect-timeout": "2s",
    "client.writer.batch-timeout": "5ms",
    "client.scanner.log.fetch.wait-max-time": "20ms",
}


@pytest.fixture
async def cluster() -> AsyncIterator[FakeCluster]:
    async with FakeCluster() as fake:
        yield fake


@pytest.fixture
async def connection(cluster: FakeCluster) -> AsyncIterator[AsyncConnection]:
    async with await connect_async(cluster.bootstrap, **FAST) as connection:
        yield connection


@pytest.fixture(scope="module")
def conn(dev_server: DevServer) -> Iterator[Connection]:
    with zufluss.connect(dev_server.bootstrap) as connection:
        yield connection
