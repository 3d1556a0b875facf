"""Every call ends: at once if nobody listens, else at the deadline that docs/timeouts.md names.

No test measures time. Timeouts are small where a call must end at them, and endless where it must
not wait for them.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from typing import Any

import pytest

from tests.client.conftest import FAST
from tests.client.fake import FakeCluster
from tests.servers import free_port
from tests.waiting import WAIT_SECONDS
from zufluss.client.connection import AsyncConnection, connect_async
from zufluss.client.core import options
from zufluss.errors import (
    ErrorCode,
    LeaderNotAvailableError,
    NetworkError,
    RecordTooLargeError,
    RequestTimeoutError,
)
from zufluss.wire.api import APIS

ENDLESS = {"client.connect-timeout": "1d", "client.request-timeout": "1d"}
AWAY = (NetworkError, RequestTimeoutError, LeaderNotAvailableError)
"""What a call raises when its server is away."""


@pytest.mark.parametrize("host", ["127.0.0.1", "no-such-host.invalid"])
async def test_a_server_that_cannot_be_reached_is_an_error_at_once(host: str) -> None:
    address = f"{host}:{free_port()}"
    with pytest.raises(NetworkError) as caught:
        await asyncio.wait_for(connect_async(address, **ENDLESS), WAIT_SECONDS)
    assert f"cannot connect to {address}" in caught.value.message
    assert "zufluss dev" in caught.value.message
    assert f"bootstrap.servers={address}" in caught.value.message


@pytest.fixture
def silent_port() -> Iterator[int]:
    """A port that accepts connections and never answers."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield server.getsockname()[1]


async def test_a_server_that_never_answers_is_an_error_at_the_timeout(silent_port: int) -> None:
    connect = connect_async(f"127.0.0.1:{silent_port}", **{"client.connect-timeout": "50ms"})
    with pytest.raises(NetworkError, match=f"127.0.0.1:{silent_port}.*zufluss dev"):
        await asyncio.wait_for(connect, WAIT_SECONDS)


async def test_a_silent_server_leaves_time_for_the_next_one(
    silent_port: int, cluster: FakeCluster
) -> None:
    bootstrap = f"127.0.0.1:{silent_port},{cluster.bootstrap}"
    async with await connect_async(bootstrap, **FAST) as connection:
        assert connection.metadata.tablets


async def never(request: object) -> None:
    """Leave a request without an answer."""


CALLS: dict[str, Callable[[AsyncConnection], Awaitable[Any]]] = {
    "list_databases": lambda c: c.admin.list_databases(),
    "create_table": lambda c: c.admin.create_table("new", "id BIGINT"),
    "server_nodes": lambda c: c.admin.server_nodes(),
    "list_offsets": lambda c: c.admin.list_offsets("log"),
    "list_all_offsets": lambda c: c.admin.list_all_offsets("log"),
    "table": lambda c: c.table("log"),
    "lease": lambda c: c.admin.kv_snapshot_lease("keyed"),
    "list_kv_scans": lambda c: c.admin.list_kv_scans(),
    "lookup": lambda c: TABLES["keyed"].lookup(1),
    "lookup_of_many": lambda c: TABLES["keyed"].lookup([1, 2, 3]),
    "head": lambda c: TABLES["keyed"].head(3),
    "scan_of_a_log": lambda c: TABLES["log"].scan().to_arrow(),
    "scan_from_offsets": lambda c: TABLES["log"].scan(stop={0: 5}).to_arrow(),
    "scan_of_rows": lambda c: TABLES["keyed"].scan().to_arrow(),
    "exactly_once_writer": lambda c: TABLES["keyed"].exactly_once_writer("p"),
}
TABLES: dict[str, Any] = {}


@pytest.fixture
async def used(
    cluster: FakeCluster, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[AsyncConnection]:
    """A connection in use; retries beyond `client.request-timeout` would have no end."""
    monkeypatch.setattr(options, "DELIVERY_TIMEOUTS", 1_000_000)
    for key in APIS:
        cluster.handlers.setdefault(key, never)
    cluster.create("log", "id BIGINT")
    cluster.create("keyed", "id BIGINT, name STRING, PRIMARY KEY (id)", bucket_keys=("id",))
    async with await connect_async(cluster.bootstrap, **FAST) as connection:
        for name in ("log", "keyed"):
            TABLES[name] = await connection.table(name)
        yield connection


@pytest.mark.parametrize("call", CALLS)
async def test_a_call_ends_at_the_request_timeout_when_the_server_dies(
    cluster: FakeCluster, used: AsyncConnection, call: str
) -> None:
    await cluster.__aexit__()
    with pytest.raises(AWAY):
        await asyncio.wait_for(CALLS[call](used), WAIT_SECONDS)


@pytest.mark.parametrize("call", CALLS)
async def test_a_call_ends_at_the_request_timeout_when_the_server_falls_silent(
    cluster: FakeCluster, used: AsyncConnection, call: str
) -> None:
    for key in list(cluster.handlers):
        cluster.handlers[key] = never
    with pytest.raises(AWAY):
        await asyncio.wait_for(CALLS[call](used), WAIT_SECONDS)


async def test_a_writer_gives_up_at_its_deadline_when_the_server_falls_silent(
    cluster: FakeCluster, connection: AsyncConnection
) -> None:
    cluster.create("t", "id BIGINT")
    writer = (await connection.table("t")).append()
    await writer.write({"id": [1]})
    await writer.flush()

    for key in list(cluster.handlers):
        cluster.handlers[key] = never
    await writer.write({"id": [2]})
    with pytest.raises(AWAY):
        await asyncio.wait_for(writer.flush(), WAIT_SECONDS)
    await writer.close()


async def test_errors_name_table_and_bucket(
    cluster: FakeCluster, connection: AsyncConnection
) -> None:
    cluster.create("t", "id BIGINT")
    table = await connection.table("t")
    cluster.produce_fault = lambda *_: ErrorCode.RECORD_TOO_LARGE_EXCEPTION
    writer = table.append()
    await writer.write({"id": [1]})
    with pytest.raises(RecordTooLargeError, match=r"^RECORD.*: fluss\.t, bucket 0: "):
        await writer.flush()
    await writer.close()
    cluster.leaderless = True
    await connection.refresh_table(table.path)
    with pytest.raises(LeaderNotAvailableError, match=r"fluss\.t, bucket 0 has no leader"):
        await connection.admin.list_offsets("t")
