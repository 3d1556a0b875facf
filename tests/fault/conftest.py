"""Servers whose output stands in the report of a failing test, and S3 behind a faulty proxy."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import SERVERS
from tests.engines import shared_server
from tests.servers import WarmServer
from zufluss.testing.proxy import FaultProxy
from zufluss.testing.s3 import S3Server


@pytest.fixture(scope="module")
def s3(tmp_path_factory: pytest.TempPathFactory) -> Iterator[S3Server]:
    """An S3 server for the tests of one module; their faults do not reach other modules."""
    with shared_server(tmp_path_factory.mktemp("s3")) as server:
        yield server


@pytest.fixture
def proxy(s3: S3Server) -> Iterator[FaultProxy]:
    """A proxy before the S3 server that can delay, cut and refuse requests."""
    with FaultProxy("127.0.0.1", s3.port) as proxy:
        yield proxy


@pytest.fixture
def warm_server(
    request: pytest.FixtureRequest, tmp_path: Path
) -> Iterator[Callable[..., WarmServer]]:
    """Creates servers that belong to one test; the test starts them.

    `warm_server({"key": "value"}, name="a")` has its data in the directory `a`.
    """
    known = request.config.stash.setdefault(SERVERS, [])
    with ExitStack() as stack:

        def make(
            properties: dict[str, str] | None = None, name: str = "data", **options: Any
        ) -> WarmServer:
            server = WarmServer(tmp_path / name, properties, **options)
            known.append(server)
            stack.callback(known.remove, server)
            stack.callback(server.__exit__, None, None, None)
            return server

        yield make
