"""One connection: matching, deadlines, big frames, broken streams, authentication."""

from __future__ import annotations

import asyncio
import struct
from collections.abc import AsyncIterator

import pytest
from google.protobuf.message import Message

from tests.client.fake import FakeServer
from zufluss.errors import (
    AuthenticationError,
    CorruptMessageError,
    DatabaseNotExistError,
    ErrorCode,
    NetworkError,
    RequestTimeoutError,
    UnsupportedVersionError,
    ZuflussError,
    error,
)
from zufluss.net.client import RECEIVE_BYTES, Credentials, RpcConnection, open_connection
from zufluss.wire import messages as m
from zufluss.wire.api import ApiKey
from zufluss.wire.sasl import PlainAuthenticator

TIMEOUT_MS = 2_000


@pytest.fixture
async def server() -> AsyncIterator[FakeServer]:
    async with FakeServer() as fake:
        yield fake


async def opened(server: FakeServer, credentials: Credentials | None = None) -> RpcConnection:
    return await open_connection(
        "127.0.0.1", server.port, credentials=credentials, connect_timeout_ms=TIMEOUT_MS
    )


def list_tables(connection: RpcConnection, database: str, timeout_ms: int = TIMEOUT_MS):  # type: ignore[no-untyped-def]
    request = m.ListTablesRequest(database_name=database)
    return connection.call(ApiKey.LIST_TABLES, request, timeout_ms=timeout_ms)


async def test_answers_that_come_in_another_order_reach_their_callers(server: FakeServer) -> None:
    first_may_go = asyncio.Event()

    async def handler(request: m.ListTablesRequest) -> Message:
        if request.database_name == "first":
            await first_may_go.wait()
        return m.ListTablesResponse(table_name=[request.database_name])

    server.handlers[ApiKey.LIST_TABLES] = handler
    connection = await opened(server)
    first = asyncio.ensure_future(list_tables(connection, "first"))
    second = await list_tables(connection, "second")
    assert not first.done()
    first_may_go.set()
    assert list(second.table_name) == ["second"]
    assert list((await first).table_name) == ["first"]
    connection.close()


@pytest.mark.parametrize("size", [1, RECEIVE_BYTES - 40, RECEIVE_BYTES, RECEIVE_BYTES * 3 + 7])
async def test_answers_of_every_size_arrive_whole_next_to_small_ones(
    server: FakeServer, size: int
) -> None:
    async def handler(request: m.ListTablesRequest) -> Message:
        return m.ListTablesResponse(table_name=[request.database_name * size])

    server.handlers[ApiKey.LIST_TABLES] = handler
    connection = await opened(server)
    names = ["a", "b", "c", "d"]
    answers = await asyncio.gather(*(list_tables(connection, name) for name in names))
    assert [answer.table_name[0] for answer in answers] == [name * size for name in names]
    connection.close()


async def test_a_frame_that_arrives_byte_by_byte_is_put_together(server: FakeServer) -> None:
    async def handler(request: m.ListTablesRequest) -> None:
        body = m.ListTablesResponse(table_name=["x"]).SerializeToString()
        for byte in struct.pack(">ibi", 5 + len(body), 0, 1) + body:
            server.send_raw(bytes([byte]))
            await asyncio.sleep(0)

    server.handlers[ApiKey.LIST_TABLES] = handler
    connection = await opened(server)
    assert list((await list_tables(connection, "db")).table_name) == ["x"]
    connection.close()


async def test_an_error_frame_raises_the_error_of_its_code(server: FakeServer) -> None:
    async def handler(request: m.ListTablesRequest) -> ZuflussError:
        return error(ErrorCode.DATABASE_NOT_EXIST, "no db")

    server.handlers[ApiKey.LIST_TABLES] = handler
    connection = await opened(server)
    with pytest.raises(DatabaseNotExistError, match="no db"):
        await list_tables(connection, "db")
    assert not connection.closed
    connection.close()


async def test_a_call_without_answer_times_out_and_a_silent_server_is_left(
    server: FakeServer,
) -> None:
    async def handler(request: m.ListTablesRequest) -> None:
        return None

    server.handlers[ApiKey.LIST_TABLES] = handler
    connection = await opened(server)
    with pytest.raises(RequestTimeoutError, match="LIST_TABLES"):
        await list_tables(connection, "db", timeout_ms=30)
    assert connection.closed


async def test_a_slow_call_does_not_close_a_connection_that_is_alive(server: FakeServer) -> None:
    slow_may_go = asyncio.Event()

    async def handler(request: m.ListTablesRequest) -> Message:
        if request.database_name == "slow":
            await slow_may_go.wait()
        return m.ListTablesResponse()

    server.handlers[ApiKey.LIST_TABLES] = handler
    connection = await opened(server)
    slow = asyncio.ensure_future(list_tables(connection, "slow", timeout_ms=100))
    while not slow.done():
        await list_tables(connection, "quick")
    with pytest.raises(RequestTimeoutError):
        await slow
    slow_may_go.set()  # its late answer is dropped
    await list_tables(connection, "quick")
    assert not connection.closed
    connection.close()


async def test_a_lost_connection_fails_every_call_under_way(server: FakeServer) -> None:
    async def handler(request: m.ListTablesRequest) -> None:
        if server.received[ApiKey.LIST_TABLES] == 3:
            server.drop_connections()

    server.handlers[ApiKey.LIST_TABLES] = handler
    connection = await opened(server)
    calls = [list_tables(connection, "db") for _ in range(3)]
    results = await asyncio.gather(*calls, return_exceptions=True)
    assert [type(result) for result in results] == [NetworkError] * 3
    assert connection.closed
    with pytest.raises(NetworkError):
        await list_tables(connection, "db")


@pytest.mark.parametrize("length", [-1, 4, 0x7FFF_FFFF])
async def test_an_impossible_frame_length_closes_the_connection(
    server: FakeServer, length: int
) -> None:
    async def handler(request: m.ListTablesRequest) -> None:
        server.send_raw(struct.pack(">i", length) + b"HTTP/1.1 400")

    server.handlers[ApiKey.LIST_TABLES] = handler
    connection = await opened(server)
    with pytest.raises(CorruptMessageError, match="frame length"):
        await list_tables(connection, "db")
    assert connection.closed


async def test_a_failure_of_the_server_as_a_whole_fails_the_calls(server: FakeServer) -> None:
    async def handler(request: m.ListTablesRequest) -> None:
        body = m.ErrorResponse(error_code=-1, error_message="pipeline").SerializeToString()
        server.send_raw(struct.pack(">ib", 1 + len(body), 2) + body)

    server.handlers[ApiKey.LIST_TABLES] = handler
    connection = await opened(server)
    with pytest.raises(ZuflussError, match="pipeline"):
        await list_tables(connection, "db")
    assert connection.closed


async def test_an_api_the_server_does_not_offer_is_refused_before_it_is_sent(
    server: FakeServer,
) -> None:
    connection = await opened(server)
    with pytest.raises(UnsupportedVersionError, match="LIST_TABLES"):
        await list_tables(connection, "db")
    assert server.received[ApiKey.LIST_TABLES] == 0
    connection.close()


async def test_nobody_listening_is_a_network_error_that_names_the_address() -> None:
    async with FakeServer() as server:
        port = server.port
    with pytest.raises(NetworkError, match=f"127.0.0.1:{port}"):
        await open_connection("127.0.0.1", port, connect_timeout_ms=TIMEOUT_MS)


async def test_a_server_that_never_shakes_hands_is_given_up(server: FakeServer) -> None:
    async def handler(request: m.ApiVersionsRequest) -> None:
        return None

    server.handlers[ApiKey.API_VERSIONS] = handler
    with pytest.raises((NetworkError, RequestTimeoutError)):
        await open_connection("127.0.0.1", server.port, connect_timeout_ms=50)


def authenticating(server: FakeServer, refuse_times: int = 0) -> None:
    users = PlainAuthenticator({"alice": "alice-secret"})

    async def handler(request: m.AuthenticateRequest) -> Message | ZuflussError:
        if server.received[ApiKey.AUTHENTICATE] <= refuse_times:
            return error(ErrorCode.RETRIABLE_AUTHENTICATE_EXCEPTION, "again")
        try:
            users.authenticate(request.token)
        except ZuflussError as e:
            return e
        return m.AuthenticateResponse(challenge=b"")

    server.handlers[ApiKey.AUTHENTICATE] = handler


async def test_right_credentials_are_accepted_also_when_asked_to_try_again(
    server: FakeServer,
) -> None:
    authenticating(server, refuse_times=1)
    connection = await opened(server, Credentials("alice", "alice-secret"))
    assert server.received[ApiKey.AUTHENTICATE] == 2
    connection.close()


async def test_a_wrong_password_is_an_authentication_error_and_closes(server: FakeServer) -> None:
    authenticating(server)
    with pytest.raises(AuthenticationError):
        await opened(server, Credentials("alice", "wrong"))
    assert "wrong" not in repr(Credentials("alice", "wrong"))
