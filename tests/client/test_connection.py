"""Finding the cluster, routing calls, and retrying only where a retry is safe."""

from __future__ import annotations

import asyncio
import gc
import threading

import pytest
from google.protobuf.message import Message

import zufluss
from tests.client.conftest import FAST
from tests.client.fake import FakeCluster, FakeServer
from zufluss.client.connection import AsyncConnection, connect_async
from zufluss.client.core.retry import LONGEST_PAUSE_MS, Backoff
from zufluss.errors import (
    ErrorCode,
    InvalidTableError,
    LeaderNotAvailableError,
    NetworkError,
    TableAlreadyExistError,
    TableNotExistError,
    ZuflussError,
    error,
)
from zufluss.wire import messages as m
from zufluss.wire.api import ApiKey


async def test_the_second_bootstrap_server_is_used_when_the_first_is_away(
    cluster: FakeCluster,
) -> None:
    async with FakeServer() as gone:
        port = gone.port
    async with await connect_async(f"127.0.0.1:{port},{cluster.bootstrap}", **FAST) as connection:
        assert connection.metadata.tablets


async def test_a_cluster_that_cannot_be_reached_is_a_network_error() -> None:
    async with FakeServer() as gone:
        port = gone.port
    with pytest.raises(NetworkError, match=f"{port}"):
        await connect_async(f"127.0.0.1:{port}", **FAST | {"client.connect-timeout": "200ms"})


async def test_a_question_about_a_table_that_fails_after_its_caller_left_is_not_reported(
    cluster: FakeCluster, connection: AsyncConnection
) -> None:
    asked, answers = asyncio.Event(), asyncio.Event()

    async def answer(request: m.MetadataRequest) -> ZuflussError:
        asked.set()
        await answers.wait()
        return error(ErrorCode.PARTITION_NOT_EXISTS, "it was dropped")

    reports: list[object] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: reports.append(context))
    cluster.handlers[ApiKey.GET_METADATA] = answer
    caller = asyncio.ensure_future(connection.refresh())
    await asked.wait()
    caller.cancel()
    (question,) = connection._refreshes.values()
    answers.set()
    await asyncio.wait([question])
    del caller, question
    gc.collect()
    assert not reports


async def test_both_roles_on_one_port_share_one_socket(
    cluster: FakeCluster, connection: AsyncConnection
) -> None:
    cluster.create("t", "id BIGINT")
    table = await connection.table("t")
    async with table.append() as writer:
        await writer.write({"id": [1]})
    await table.scan().to_arrow()
    await connection.admin.table_exists("t")
    assert cluster.connections == 1


async def test_a_reading_call_is_repeated_after_a_lost_connection(
    cluster: FakeCluster, connection: AsyncConnection
) -> None:
    async def handler(request: m.ListDatabasesRequest) -> Message | None:
        if cluster.received[ApiKey.LIST_DATABASES] == 1:
            cluster.drop_connections()
            return None
        return m.ListDatabasesResponse(database_name=["fluss"])

    cluster.handlers[ApiKey.LIST_DATABASES] = handler
    assert await connection.admin.list_databases() == ["fluss"]
    assert cluster.received[ApiKey.LIST_DATABASES] == 2


async def test_a_changing_call_that_may_have_been_done_is_not_repeated(
    cluster: FakeCluster, connection: AsyncConnection
) -> None:
    async def handler(request: m.CreateTableRequest) -> None:
        cluster.drop_connections()

    cluster.handlers[ApiKey.CREATE_TABLE] = handler  # type: ignore[assignment]
    with pytest.raises(NetworkError):
        await connection.admin.create_table("t", "id BIGINT")
    assert cluster.received[ApiKey.CREATE_TABLE] == 1


async def test_a_changing_call_refused_by_a_standby_coordinator_is_repeated(
    cluster: FakeCluster, connection: AsyncConnection
) -> None:
    async def handler(request: m.CreateTableRequest) -> Message | ZuflussError:
        if cluster.received[ApiKey.CREATE_TABLE] == 1:
            return error(ErrorCode.NOT_COORDINATOR_LEADER_EXCEPTION, "standby")
        return m.CreateTableResponse()

    cluster.handlers[ApiKey.CREATE_TABLE] = handler
    await connection.admin.create_table("t", "id BIGINT")
    assert cluster.received[ApiKey.CREATE_TABLE] == 2


async def test_an_error_that_does_not_pass_is_raised_at_once(
    cluster: FakeCluster, connection: AsyncConnection
) -> None:
    async def handler(request: m.CreateTableRequest) -> ZuflussError:
        return error(ErrorCode.TABLE_ALREADY_EXIST, "taken")

    cluster.handlers[ApiKey.CREATE_TABLE] = handler
    with pytest.raises(TableAlreadyExistError):
        await connection.admin.create_table("t", "id BIGINT")


async def test_a_missing_table_is_named_also_where_the_server_gives_an_unknown_error(
    cluster: FakeCluster, connection: AsyncConnection
) -> None:
    metadata = cluster.handlers[ApiKey.GET_METADATA]

    async def like_apache_fluss(
        request: m.MetadataRequest,
    ) -> Message | bytes | ZuflussError | None:
        answer = await metadata(request)
        unknown = error(ErrorCode.UNKNOWN_SERVER_ERROR, "null")
        return unknown if isinstance(answer, ZuflussError) else answer

    cluster.handlers[ApiKey.GET_METADATA] = like_apache_fluss
    with pytest.raises(TableNotExistError, match=r"table fluss\.nope does not exist"):
        await connection.table("nope")


async def test_buckets_without_leader_are_waited_for_until_the_deadline(
    cluster: FakeCluster, connection: AsyncConnection
) -> None:
    cluster.create("t", "id BIGINT")
    cluster.leaderless = True
    with pytest.raises(LeaderNotAvailableError):
        await connection.admin.list_offsets("t")
    assert cluster.received[ApiKey.GET_METADATA] <= 12


async def test_concurrent_requests_for_the_same_metadata_share_one_call(
    cluster: FakeCluster, connection: AsyncConnection
) -> None:
    cluster.create("t", "id BIGINT")
    before = cluster.received[ApiKey.GET_METADATA]
    await asyncio.gather(*(connection.table("t") for _ in range(20)))
    assert cluster.received[ApiKey.GET_METADATA] == before + 1


async def test_a_bad_table_path_is_refused(connection: AsyncConnection) -> None:
    with pytest.raises(InvalidTableError):
        await connection.table("a.b.c")


async def test_pauses_grow_to_a_limit_and_end_at_the_deadline() -> None:
    backoff = Backoff(timeout_ms=100)
    pauses = [backoff.pause_seconds() for _ in range(12)]
    assert pauses[0] < 0.1
    assert max(pauses) <= LONGEST_PAUSE_MS * 1.2 / 1000
    cause = NetworkError("away")
    with pytest.raises(NetworkError, match="away"):
        await backoff.pause(cause)


async def test_the_facade_leaves_no_thread_behind(cluster: FakeCluster) -> None:
    def use() -> None:
        connection = zufluss.connect(cluster.bootstrap, **FAST)
        connection.table("t").append().write({"id": 1})  # neither flushed nor closed
        connection.close()

    cluster.create("t", "id BIGINT")
    before = set(threading.enumerate())  # other tests of this process may keep a connection
    await asyncio.to_thread(use)
    gc.collect()
    later = set(threading.enumerate()) - before
    assert not [t for t in later if t.name == "zufluss-client"]
