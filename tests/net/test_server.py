"""The network layer over real sockets: framing, limits, authentication, draining."""

import asyncio
import errno
import random
import socket
import struct
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, nullcontext

import pytest

from tests.test_pacing import Ticks
from tests.waiting import WAIT_SECONDS
from zufluss.config.load import Configuration
from zufluss.errors import ErrorCode, NetworkError
from zufluss.net.connection import (
    REQUESTS_AT_ONCE,
    WRITE_BUFFER_HIGH,
    WRITE_BUFFER_SHORT,
    ServerConnection,
)
from zufluss.net.listeners import resolve_listeners
from zufluss.net.memory import Limits
from zufluss.net.server import BURST_FACTOR, NetServer
from zufluss.net.services import Services
from zufluss.pacing import TURN_SECONDS, Pace
from zufluss.system import PEER_ASKED_TIMES
from zufluss.wire import messages as m
from zufluss.wire.api import ApiKey
from zufluss.wire.codec import BYTES_AT_ONCE
from zufluss.wire.frame import pack_request, unpack_response
from zufluss.wire.sasl import PlainAuthenticator

JAAS = (
    "org.apache.fluss.security.auth.sasl.plain.PlainLoginModule required "
    'user_admin="admin-secret" user_alice="alice-secret";'
)


class Peer:
    """A bare socket that speaks frames."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader, self.writer = reader, writer
        self.next_id = 0

    def send(self, key: int, message: object, version: int = 0) -> int:
        self.next_id += 1
        body = message if isinstance(message, bytes) else message.SerializeToString()
        self.writer.write(pack_request(key, version, self.next_id, body))
        return self.next_id

    async def receive(self):
        (length,) = struct.unpack(">i", await self.reader.readexactly(4))
        return unpack_response(memoryview(await self.reader.readexactly(length)))

    async def call(self, key: int, message: object, version: int = 0):
        request_id = self.send(key, message, version)
        frame = await self.receive()
        assert frame.request_id == request_id
        return frame

    async def closed(self) -> bool:
        try:
            return await self.reader.read(1) == b""
        except ConnectionResetError:  # closed while bytes of ours were under way
            return True


@asynccontextmanager
async def serving(services: Services, conf: dict[str, str] | None = None, **kw) -> AsyncIterator:
    listeners = resolve_listeners(
        Configuration.of({"bind.listeners": "A://127.0.0.1:0", **(conf or {})})
    )
    server = NetServer(services, listeners, **kw)
    await server.start()
    peers: list[Peer] = []

    async def connect(index: int = 0) -> Peer:
        port = server.listeners[index].bind.port
        peers.append(Peer(*await asyncio.open_connection("127.0.0.1", port)))
        return peers[-1]

    try:
        yield server, connect
    finally:
        await server.stop(1)
        for p in peers:
            p.writer.close()


def exists_service(gate: asyncio.Event | None = None) -> Services:
    """DATABASE_EXISTS answers whether the name is 'yes'; 'slow' waits for the gate."""
    services = Services()

    async def database_exists(request, context):
        if request.database_name == "slow":
            assert gate is not None
            await gate.wait()
        return m.DatabaseExistsResponse(exists=request.database_name == "yes")

    services.register(ApiKey.DATABASE_EXISTS, database_exists)
    return services


def ask(name: str) -> m.DatabaseExistsRequest:
    return m.DatabaseExistsRequest(database_name=name)


async def test_a_long_request_is_decoded_in_turns_and_refused_like_a_short_one() -> None:
    """100,000 paths held the event loop for 40 ms before their handler even began."""
    seen: list[int] = []

    async def get_metadata(request, context):
        seen.append(len(request.table_path))
        return m.MetadataResponse()

    services = exists_service()
    services.register(ApiKey.GET_METADATA, get_metadata)
    path = m.PbTablePath(database_name="db", table_name="abc")
    body = m.MetadataRequest(table_path=[path] * 5_000).SerializeToString()
    assert len(body) > BYTES_AT_ONCE
    async with serving(services) as (_, connect):
        peer = await connect()
        with pytest.MonkeyPatch.context() as patch:
            result = Pace.result
            waited: list[object] = []

            async def counted(self, steps):
                waited.append(steps)
                return await result(self, steps)

            patch.setattr(Pace, "result", counted)
            assert not (await peer.call(ApiKey.GET_METADATA, body)).error
            assert seen == [5_000]
            refused = await peer.call(ApiKey.GET_METADATA, body[:-3] + b"\xffbc")
            assert refused.error.code is ErrorCode.CORRUPT_MESSAGE
            assert not (await peer.call(ApiKey.DATABASE_EXISTS, ask("yes"))).error
            assert len(waited) == 2


async def test_requests_that_waited_for_their_client_to_read_pause_before_they_go_on(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """All of them wait for the same moment, and made their answers in one turn then."""
    events: list[str] = []

    async def pause(self: Pace) -> None:
        events.append("pause")

    async def has_read(self: ServerConnection) -> None:
        events.append("read")

    monkeypatch.setattr(Pace, "pause", pause)
    monkeypatch.setattr(ServerConnection, "has_read", has_read)
    unread = property(lambda self: events == ["pause"])
    monkeypatch.setattr(ServerConnection, "backlogged", unread)
    async with serving(exists_service()) as (_, connect):
        peer = await connect()
        assert not (await peer.call(ApiKey.DATABASE_EXISTS, ask("yes"))).error
    assert events == ["pause", "read", "pause"]


@pytest.mark.parametrize(
    ("problem", "code"),
    [
        (MemoryError(), ErrorCode.STORAGE_BACKPRESSURE_EXCEPTION),
        (OSError(errno.ENOSPC, "No space left on device"), ErrorCode.STORAGE_EXCEPTION),
        (RuntimeError("a defect"), ErrorCode.UNKNOWN_SERVER_ERROR),
    ],
)
@pytest.mark.parametrize("raw", [False, True])
async def test_a_request_that_a_shortage_ends_is_refused_for_now(
    problem: Exception, code: ErrorCode, raw: bool
) -> None:
    def fail(*_: object) -> None:
        raise problem

    async def fail_later(*_: object) -> None:
        raise problem

    services = Services()
    if raw:
        services.register_raw(ApiKey.PRODUCE_LOG, fail)
    else:
        services.register(ApiKey.DATABASE_EXISTS, fail_later)
    async with serving(services) as (_, connect):
        peer = await connect()
        sent = b"" if raw else ask("a").SerializeToString()
        peer.send(ApiKey.PRODUCE_LOG if raw else ApiKey.DATABASE_EXISTS, sent)
        answer = await peer.receive()
        assert answer.error is not None
        assert answer.error.code is code


async def test_frames_are_answered_however_the_bytes_are_cut():
    async with serving(exists_service()) as (_, connect):
        peer = await connect()
        frames = b"".join(
            pack_request(ApiKey.DATABASE_EXISTS, 0, i, ask("yes").SerializeToString())
            for i in range(20)
        )
        for i in range(0, len(frames), 7):
            peer.writer.write(frames[i : i + 7])
            await peer.writer.drain()
            await asyncio.sleep(0)
        answered = [(await peer.receive()).request_id for _ in range(20)]
        assert sorted(answered) == list(range(20))


@pytest.mark.parametrize("size", [10, 40_000, 300_000, 2_000_000])
async def test_a_request_of_any_size_arrives_whole(size):
    async with serving(exists_service()) as (server, connect):
        peer = await connect()
        frame = await peer.call(ApiKey.DATABASE_EXISTS, ask("x" * size))
        assert frame.error is None
        assert server.memory.used == 0


async def test_answers_leave_in_the_order_they_are_ready_not_the_order_asked():
    gate = asyncio.Event()
    async with serving(exists_service(gate)) as (_, connect):
        peer = await connect()
        slow = peer.send(ApiKey.DATABASE_EXISTS, ask("slow"))
        fast = peer.send(ApiKey.DATABASE_EXISTS, ask("yes"))
        assert (await peer.receive()).request_id == fast
        gate.set()
        assert (await peer.receive()).request_id == slow


async def test_an_unknown_api_and_a_version_out_of_range_get_error_2_and_the_connection_lives():
    async with serving(exists_service()) as (_, connect):
        peer = await connect()
        for key, version in ((4242, 0), (ApiKey.CREATE_TABLE, 0), (ApiKey.DATABASE_EXISTS, 1)):
            frame = await peer.call(key, ask("yes"), version)
            assert frame.error.code is ErrorCode.UNSUPPORTED_VERSION
        assert (await peer.call(ApiKey.DATABASE_EXISTS, ask("yes"))).error is None


async def test_a_body_that_is_no_message_gets_error_3_and_the_connection_lives():
    async with serving(exists_service()) as (_, connect):
        peer = await connect()
        frame = await peer.call(ApiKey.DATABASE_EXISTS, b"\xff\xff\xff\xff\xff")
        assert frame.error.code is ErrorCode.CORRUPT_MESSAGE
        assert (await peer.call(ApiKey.DATABASE_EXISTS, ask("yes"))).error is None


async def test_only_registered_apis_are_advertised():
    async with serving(exists_service()) as (_, connect):
        peer = await connect()
        frame = await peer.call(
            ApiKey.API_VERSIONS,
            m.ApiVersionsRequest(client_software_name="t", client_software_version="1"),
        )
        response = m.ApiVersionsResponse.FromString(bytes(frame.body))
        assert [v.api_key for v in response.api_versions] == [1000, 1004, 1038]
        assert not response.HasField("server_type")


async def test_an_oversized_frame_is_answered_and_closed_while_others_go_on():
    async with serving(exists_service(), limits=Limits(frame_bytes_max=1000)) as (_, connect):
        bad, good = await connect(), await connect()
        bad.writer.write(struct.pack(">ihhi", 1001, ApiKey.DATABASE_EXISTS, 0, 77))
        frame = await bad.receive()
        assert frame.request_id == 77
        assert frame.error.code is ErrorCode.RECORD_TOO_LARGE_EXCEPTION
        assert await bad.closed()
        assert (await good.call(ApiKey.DATABASE_EXISTS, ask("yes"))).error is None


@pytest.mark.parametrize("length", [-1, 0, 7, -(2**31)])
async def test_a_length_no_frame_can_have_closes_the_connection(length):
    async with serving(exists_service()) as (_, connect):
        peer = await connect()
        peer.writer.write(struct.pack(">ihhi", length, ApiKey.DATABASE_EXISTS, 0, 1))
        assert await peer.closed()


async def test_a_declared_length_reserves_no_memory_before_its_bytes_arrive():
    async with serving(exists_service()) as (server, connect):
        peers = [await connect() for _ in range(50)]
        for peer in peers:
            peer.writer.write(struct.pack(">ihhi", 90_000_000, ApiKey.DATABASE_EXISTS, 0, 1))
            peer.writer.write(b"\x0a" + b"x" * 1000)
            await peer.writer.drain()
        while sum(c._buffer is not None for c in server.connections) < 50:
            await asyncio.sleep(0)
        assert server.memory.used <= 50 * 64 * 1024


async def test_half_received_frames_share_a_bound_and_still_all_arrive():
    limits = Limits(receive_bytes_max=1_000_000)
    async with serving(exists_service(), limits=limits) as (server, connect):
        peers = [await connect() for _ in range(8)]
        for p in peers:
            assert (await p.call(ApiKey.DATABASE_EXISTS, ask("yes"))).error is None
        ids = [p.send(ApiKey.DATABASE_EXISTS, ask("x" * 2_000_000)) for p in peers]
        frames = await asyncio.gather(*(p.receive() for p in peers))
        assert [f.request_id for f in frames] == ids
        assert server.memory.used == 0


async def test_a_frame_that_never_completes_is_closed():
    async with serving(exists_service(), limits=Limits(frame_seconds=0.05)) as (_, connect):
        slow, good = await connect(), await connect()
        slow.writer.write(struct.pack(">ih", 500, 1004))
        assert await slow.closed()
        assert (await good.call(ApiKey.DATABASE_EXISTS, ask("yes"))).error is None


async def test_a_frame_that_trickles_in_is_closed_as_well():
    """Each byte is activity, but the time of a frame runs from its first one."""
    async with serving(exists_service(), limits=Limits(frame_seconds=0.1)) as (_, connect):
        slow = await connect()
        slow.writer.write(struct.pack(">ih", 20_000, 1004))
        closed = asyncio.ensure_future(slow.closed())
        async with asyncio.timeout(WAIT_SECONDS):
            while not closed.done():
                slow.writer.write(b"x")
                await asyncio.sleep(0.02)
        assert closed.result()


async def test_an_idle_connection_is_closed():
    async with serving(exists_service(), limits=Limits(idle_seconds=0.05)) as (_, connect):
        assert await (await connect()).closed()


async def test_the_system_asks_silent_clients_whether_their_machine_is_still_there():
    """Whoever lost power or network sends no end; it would keep its pins for ten minutes."""
    async with serving(exists_service()) as (server, connect):
        peer = await connect()
        assert (await peer.call(ApiKey.DATABASE_EXISTS, ask("yes"))).error is None
        (connection,) = server.connections
        accepted = connection.transport.get_extra_info("socket")
        assert accepted.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
        count = accepted.getsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT)
        assert count == PEER_ASKED_TIMES


async def test_a_connection_over_the_limit_is_closed_and_the_others_stay():
    async with serving(exists_service(), limits=Limits(connections_max=2)) as (_, connect):
        peers = [await connect() for _ in range(2)]
        for p in peers:
            assert (await p.call(ApiKey.DATABASE_EXISTS, ask("yes"))).error is None
        extra = await connect()
        refusal = await extra.receive()
        assert refusal.request_id is None
        assert "zufluss.net.max-connections" in refusal.error.message
        assert await extra.closed()
        assert (await peers[0].call(ApiKey.DATABASE_EXISTS, ask("yes"))).error is None


async def test_requests_in_flight_are_bounded_and_none_is_lost():
    gate = asyncio.Event()
    async with serving(exists_service(gate), limits=Limits(inflight_max=4)) as (server, connect):
        peer = await connect()
        for _ in range(4):
            peer.send(ApiKey.DATABASE_EXISTS, ask("slow"))
        await peer.writer.drain()
        while max(c.inflight for c in server.connections) < 4:
            await asyncio.sleep(0)
        for _ in range(30):
            peer.send(ApiKey.DATABASE_EXISTS, ask("yes"))
        await peer.writer.drain()
        gate.set()
        answered = {(await peer.receive()).request_id for _ in range(34)}
        assert answered == set(range(1, 35))


async def test_a_burst_in_one_read_is_bounded_too_and_none_is_lost():
    gate = asyncio.Event()
    async with serving(exists_service(gate), limits=Limits(inflight_max=4)) as (server, connect):
        peer = await connect()
        frames = b"".join(
            pack_request(ApiKey.DATABASE_EXISTS, 0, i, ask("slow").SerializeToString())
            for i in range(5000)
        )
        peer.writer.write(frames)
        (connection,) = server.connections
        for _ in range(20):
            await asyncio.sleep(0.005)
        assert 4 <= connection.inflight <= 4 * BURST_FACTOR
        gate.set()
        answered = [(await peer.receive()).request_id for _ in range(5000)]
        assert sorted(answered) == list(range(5000))
        assert connection.inflight == 0
        peer.next_id = 5000
        assert (await peer.call(ApiKey.DATABASE_EXISTS, ask("yes"))).error is None


def large_answers(size: int = 20_000_000) -> Services:
    """FETCH_LOG answers with `size` bytes."""
    services = Services()

    def answer(connection, request_id):
        if connection.backlogged:
            connection.when_drained(lambda: answer(connection, request_id))
            return
        connection.respond(request_id, [bytes(size)], size)
        connection.done()

    def fetch(connection, request_id, version, array, view, start, end):
        answer(connection, request_id)

    services.register_raw(ApiKey.FETCH_LOG, fetch)
    return services


async def test_a_client_that_does_not_read_its_answers_is_closed():
    """What it does not read stays in memory, also while another request of it is in flight."""
    services, gate = large_answers(), asyncio.Event()
    services.handlers.update(exists_service(gate).handlers)
    async with serving(services, limits=Limits(send_seconds=0.1)) as (server, connect):
        peer = await connect()
        peer.writer.transport.pause_reading()
        peer.send(ApiKey.DATABASE_EXISTS, ask("slow"))
        peer.send(ApiKey.FETCH_LOG, b"")
        async with asyncio.timeout(WAIT_SECONDS):
            while not server.connections:
                await asyncio.sleep(0.01)
            while server.connections:
                await asyncio.sleep(0.02)


async def test_clients_that_do_not_read_have_a_bounded_share_and_others_go_on():
    """Beyond the bound they get no more; when they are gone, everything is as before."""
    services = large_answers(4_000_000)
    services.handlers.update(exists_service().handlers)
    limits = Limits(send_bytes_max=20_000_000, send_seconds=1.0)
    async with serving(services, limits=limits) as (server, connect):
        peers = [await connect() for _ in range(8)]
        async with asyncio.timeout(WAIT_SECONDS):
            for peer in peers:
                peer.writer.transport.pause_reading()
                for _ in range(20):
                    peer.send(ApiKey.FETCH_LOG, b"")
                await peer.writer.drain()
            while not server.sending.short:
                await asyncio.sleep(0.01)
            good = await connect()
            for _ in range(100):
                assert (await good.call(ApiKey.DATABASE_EXISTS, ask("yes"))).error is None
                assert server.sending.used <= 20_000_000 + 8 * 8_000_000
            while len(server.connections) > 1:
                await asyncio.sleep(0.02)
            assert server.closed == {"the client does not read its answers": 8}
            assert not server.sending.short
            assert server.sending.used == 0
            assert len((await good.call(ApiKey.FETCH_LOG, b"")).body) == 4_000_000


async def test_a_stranger_that_says_nothing_is_closed_and_others_stay():
    async with serving(exists_service(), limits=Limits(login_seconds=0.1)) as (server, connect):
        known, silent = await connect(), await connect()
        assert (await known.call(ApiKey.DATABASE_EXISTS, ask("yes"))).error is None
        assert await silent.closed()
        assert (await known.call(ApiKey.DATABASE_EXISTS, ask("yes"))).error is None
        assert (len(server.strangers), len(server.connections)) == (0, 1)
        assert server.closed == {"no login, or no first request, in time": 1}


async def test_strangers_have_a_share_of_the_connections_and_the_oldest_one_goes():
    async with serving(exists_service(), limits=Limits(connections_max=80)) as (server, connect):
        strangers = [await connect() for _ in range(20)]
        while len(server.strangers) < 20:
            await asyncio.sleep(0)
        other = await connect()
        assert (await other.call(ApiKey.DATABASE_EXISTS, ask("yes"))).error is None
        assert await strangers[0].closed()
        for stranger in strangers[1:]:
            assert (await stranger.call(ApiKey.DATABASE_EXISTS, ask("yes"))).error is None
        assert len(server.connections) == 20


async def test_strangers_have_a_share_of_the_receive_memory(authenticator):
    """The frames of known clients arrive though strangers have sent as much as they may."""
    limits = Limits(receive_bytes_max=1_000_000)
    guarded = serving(exists_service(), SASL, limits=limits, authenticator=authenticator)
    async with guarded as (server, connect):
        known = await connect()
        assert (await known.call(ApiKey.AUTHENTICATE, token("alice", "alice-secret"))).error is None
        for _ in range(8):
            stranger = await connect()
            stranger.writer.write(struct.pack(">ihhi", 60_000, ApiKey.AUTHENTICATE, 0, 1))
            stranger.writer.write(b"x" * 40_000)
            await stranger.writer.drain()
        while len(waiting := server.memory._strangers_waiting) < 6:
            await asyncio.sleep(0.01)
        assert server.memory.used <= 1_000_000 // 8
        assert (await known.call(ApiKey.DATABASE_EXISTS, ask("x" * 800_000))).error is None
        assert server.memory._strangers_waiting is waiting, "a known client's frame woke strangers"
        assert len(waiting) == 6


async def test_a_first_request_may_be_larger_and_slower_than_a_login():
    """A plaintext client that began a request is known: else it could never send this one."""
    limits = Limits(receive_bytes_max=1_000_000)
    async with serving(exists_service(), limits=limits) as (server, connect):
        peer = await connect()
        frame = pack_request(ApiKey.DATABASE_EXISTS, 0, 1, ask("x" * 400_000).SerializeToString())
        peer.writer.write(frame[:7])
        while not any(c._carry for c in server.connections):
            await asyncio.sleep(0)
        (connection,) = server.connections
        late = server.loop.time() + limits.login_seconds + 1
        assert connection.overdue(late) == "no login, or no first request, in time"
        peer.writer.write(frame[7:300_000])
        while connection._filled < 300_000:
            await asyncio.sleep(0)
        assert connection.overdue(late) is None
        peer.writer.write(frame[300_000:])
        assert (await peer.receive()).error is None


async def test_a_client_that_caught_up_during_a_shortage_is_as_before_when_it_is_over():
    """It was allowed few unread bytes meanwhile, and would be slow for ever."""
    services = large_answers(16_000_000)
    limits = Limits(send_bytes_max=30_000_000)
    async with serving(services, limits=limits) as (server, connect):
        good, *stuck = [await connect() for _ in range(5)]
        async with asyncio.timeout(WAIT_SECONDS):
            good.writer.transport.pause_reading()
            good.send(ApiKey.FETCH_LOG, b"")
            while not server.sending._behind:
                await asyncio.sleep(0.01)
            (connection,) = server.sending._behind
            for peer in stuck:
                peer.writer.transport.pause_reading()
                peer.send(ApiKey.FETCH_LOG, b"")
            while not server.sending.short:
                await asyncio.sleep(0.01)
            assert connection.transport.get_write_buffer_limits()[1] == WRITE_BUFFER_SHORT
            good.writer.transport.resume_reading()
            assert len((await good.receive()).body) == 16_000_000
            while connection in server.sending._behind:
                await asyncio.sleep(0.01)
            assert server.sending.short
            for peer in stuck:
                peer.writer.transport.abort()
            while server.sending.short:
                await asyncio.sleep(0.01)
            assert connection.transport.get_write_buffer_limits()[1] == WRITE_BUFFER_HIGH


@pytest.mark.parametrize("leaves", [False, True])
async def test_a_large_answer_waits_for_the_client_to_read_and_ends_when_it_goes(
    leaves,
):
    services = Services()
    waited, went_on = asyncio.Event(), asyncio.Event()

    def fetch(connection, request_id, version, array, view, start, end):
        async def answer() -> None:
            await begun.wait()
            connection.respond(request_id, [bytes(20_000_000)], 20_000_000)
            connection.done()

        connection.server.spawn(answer(), connection.task_ended)

    services.register_raw(ApiKey.FETCH_LOG, fetch)
    begun = asyncio.Event()

    async def limit_scan(request, context):
        begun.set()
        while not context.reader.backlogged:
            await asyncio.sleep(0)
        waited.set()
        with pytest.raises(NetworkError) if leaves else nullcontext():
            await context.reader.has_read()
        assert not context.reader.backlogged
        went_on.set()
        return m.LimitScanResponse()

    services.register(ApiKey.LIMIT_SCAN, limit_scan)
    async with serving(services) as (_, connect):
        peer = await connect()
        peer.writer.transport.pause_reading()
        peer.send(ApiKey.FETCH_LOG, b"")
        peer.send(ApiKey.LIMIT_SCAN, m.LimitScanRequest(table_id=1, bucket_id=0, limit=1))
        async with asyncio.timeout(WAIT_SECONDS):
            await waited.wait()
            if leaves:
                peer.writer.transport.abort()
            else:
                peer.writer.transport.resume_reading()
                assert len((await peer.receive()).body) == 20_000_000
            await went_on.wait()


async def test_stop_lets_answers_under_way_arrive():
    async with serving(large_answers()) as (server, connect):
        peer = await connect()
        peer.send(ApiKey.FETCH_LOG, b"")
        while not any(c._unread for c in server.connections):
            await asyncio.sleep(0)
        stopping = asyncio.create_task(server.stop(10))
        assert len((await peer.receive()).body) == 20_000_000
        await stopping
        assert await peer.closed()


async def test_stop_lets_requests_in_flight_finish():
    gate = asyncio.Event()
    services = exists_service(gate)
    async with serving(services) as (server, connect):
        peer = await connect()
        peer.send(ApiKey.DATABASE_EXISTS, ask("slow"))
        while not any(c.inflight for c in server.connections):
            await asyncio.sleep(0)
        stopping = asyncio.create_task(server.stop(10))
        await asyncio.sleep(0)
        gate.set()
        assert (await peer.receive()).error is None
        await stopping
        assert await peer.closed()


# -- authentication ---------------------------------------------------------------------------

SASL = {"security.protocol.map": "A:sasl"}


def token(user: str, password: str, authorize: str = "") -> m.AuthenticateRequest:
    return m.AuthenticateRequest(
        protocol="PLAIN", token=f"{authorize}\0{user}\0{password}".encode()
    )


@pytest.fixture
def authenticator():
    return PlainAuthenticator.from_jaas(JAAS)


async def test_before_authentication_everything_but_the_handshake_is_refused(authenticator):
    async with serving(exists_service(), SASL, authenticator=authenticator) as (_, connect):
        peer = await connect()
        for key in (*range(1001, 1038), *range(1039, 1065), 4242):
            frame = await peer.call(key, ask("yes"))
            assert frame.error.code is ErrorCode.AUTHENTICATE_EXCEPTION
        hello = m.ApiVersionsRequest(client_software_name="t", client_software_version="1")
        assert (await peer.call(ApiKey.API_VERSIONS, hello)).error is None
        assert (await peer.call(ApiKey.AUTHENTICATE, token("alice", "alice-secret"))).error is None
        assert (await peer.call(ApiKey.DATABASE_EXISTS, ask("yes"))).error is None


async def test_a_stranger_gets_no_memory_for_a_large_request(authenticator):
    async with serving(exists_service(), SASL, authenticator=authenticator) as (server, connect):
        stranger, user = await connect(), await connect()
        stranger.send(ApiKey.PRODUCE_LOG, bytes(1_000_000))
        assert (await stranger.receive()).error.code is ErrorCode.AUTHENTICATE_EXCEPTION
        assert server.memory.used == 0
        user.send(ApiKey.AUTHENTICATE, token("alice", "alice-secret"))
        user.send(ApiKey.DATABASE_EXISTS, ask("x" * 1_000_000))
        assert (await user.receive()).error is None
        assert (await user.receive()).error is None


async def test_a_failed_login_can_be_tried_again_and_takes_back_an_earlier_one(authenticator):
    async with serving(exists_service(), SASL, authenticator=authenticator) as (_, connect):
        peer = await connect()
        for bad in (
            token("alice", "wrong"),
            token("nobody", "x"),
            token("alice", "alice-secret", "admin"),
            m.AuthenticateRequest(protocol="GSSAPI", token=b"x"),
            m.AuthenticateRequest(protocol="PLAIN", token=b"no separators"),
        ):
            frame = await peer.call(ApiKey.AUTHENTICATE, bad)
            assert frame.error.code is ErrorCode.AUTHENTICATE_EXCEPTION
            assert "secret" not in frame.error.message
        assert (await peer.call(ApiKey.AUTHENTICATE, token("admin", "admin-secret"))).error is None
        assert (await peer.call(ApiKey.DATABASE_EXISTS, ask("yes"))).error is None
        assert (await peer.call(ApiKey.AUTHENTICATE, token("admin", "wrong"))).error is not None
        assert (await peer.call(ApiKey.DATABASE_EXISTS, ask("yes"))).error is not None


async def test_authenticating_on_a_plaintext_listener_is_an_error_and_it_stays_usable(
    authenticator,
):
    async with serving(exists_service(), authenticator=authenticator) as (_, connect):
        peer = await connect()
        frame = await peer.call(ApiKey.AUTHENTICATE, token("alice", "alice-secret"))
        assert frame.error.code is ErrorCode.AUTHENTICATE_EXCEPTION
        assert (await peer.call(ApiKey.DATABASE_EXISTS, ask("yes"))).error is None


async def test_apis_between_servers_are_refused_outside_the_internal_listener():
    services = exists_service()

    async def stop_replica(request, context):
        return m.StopReplicaResponse()

    services.register(ApiKey.STOP_REPLICA, stop_replica)
    conf = {"bind.listeners": "A://127.0.0.1:0,INTERNAL://127.0.0.1:0"}
    async with serving(services, conf, internal_listener="INTERNAL") as (_, connect):
        request = m.StopReplicaRequest(coordinator_epoch=0)
        outside = await (await connect(0)).call(ApiKey.STOP_REPLICA, request)
        assert outside.error.code is ErrorCode.AUTHORIZATION_EXCEPTION
        assert (await (await connect(1)).call(ApiKey.STOP_REPLICA, request)).error is None


async def test_a_large_answer_waits_until_the_client_has_read_the_one_before():
    services = Services()
    made_at_once: list[int] = []

    def fetch(connection, request_id, version, array, view, start, end):
        connection.respond(request_id, [bytes(10_000_000)], 10_000_000)
        made_at_once.append((connection.unsent_bytes + connection._queued) // 10_000_000)
        connection.done()

    services.register_raw(ApiKey.FETCH_LOG, fetch)
    async with serving(services) as (_, connect):
        peer = await connect()
        for _ in range(5):
            peer.send(ApiKey.FETCH_LOG, b"")
        await peer.writer.drain()
        sizes = [len((await peer.receive()).body) for _ in range(5)]
        assert sizes == [10_000_000] * 5
        assert made_at_once == [1] * 5


async def test_what_gathers_in_a_turn_is_done_before_its_answers_leave():
    """And what fails there costs nobody else an answer."""
    gathered: list[tuple[object, int]] = []

    def at_end() -> None:
        for connection, request_id in gathered:
            connection.finish(request_id, b"")
        raise RuntimeError("a fault of the server")

    def handle(connection, request_id, version, array, view, start, end) -> None:
        if not gathered:
            connection.at_turn_end(at_end)
        gathered.append((connection, request_id))

    services = Services()
    services.register_raw(ApiKey.PRODUCE_LOG, handle)
    async with serving(services) as (_, connect):
        peer = await connect()
        sent = [peer.send(ApiKey.PRODUCE_LOG, b"") for _ in range(3)]
        assert [(await peer.receive()).request_id for _ in sent] == sent
        again = peer.send(ApiKey.PRODUCE_LOG, b"", version=99)
        assert (await peer.receive()).request_id == again, "the next turn is as good as any"


async def test_requests_behind_one_that_takes_long_wait_and_stay_in_order():
    """A batch that is checked in a thread must not be overtaken by the next one of its writer."""
    services, gate, order = Services(), asyncio.Event(), []

    def produce(connection, request_id, version, array, view, start, end):
        if request_id not in (1, 3):
            order.append(request_id)
            connection.finish(request_id, b"")
            return
        connection.stop_requests()

        async def later():
            await gate.wait()
            connection.go_on()
            order.append(request_id)
            connection.finish(request_id, b"")

        connection.server.spawn(later(), connection.task_ended)

    services.register_raw(ApiKey.PRODUCE_LOG, produce)
    async with serving(services, limits=Limits(inflight_max=2)) as (_, connect):
        peer = await connect()
        for size in (10, 10, 50_000, 10, 50_000, 10):
            peer.send(ApiKey.PRODUCE_LOG, bytes(size))
        await peer.writer.drain()
        await asyncio.sleep(0.05)
        assert order == []
        gate.set()
        for _ in range(6):
            await peer.receive()
        assert order == [1, 2, 3, 4, 5, 6]


async def test_many_requests_of_one_read_are_begun_in_several_turns_and_in_order():
    """5,000 fetches that arrived together kept all others waiting for 0.2 s."""
    turn, order, begun = 0, [], Counter()

    def produce(connection, request_id, version, array, view, start, end):
        order.append(request_id)
        begun[turn] += 1
        connection.finish(request_id, b"")

    async def count_turns():
        nonlocal turn
        while True:
            await asyncio.sleep(0)
            turn += 1

    services = Services()
    services.register_raw(ApiKey.PRODUCE_LOG, produce)
    async with serving(services) as (server, connect):
        peer = await connect()
        peer.send(ApiKey.PRODUCE_LOG, b"")
        await peer.receive()
        (connection,) = server.connections
        connection._pace = Pace(server.loop, Ticks(TURN_SECONDS))  # each look ends the turn
        counting = asyncio.create_task(count_turns())
        for _ in range(1000):
            peer.send(ApiKey.PRODUCE_LOG, b"")
        for _ in range(1000):
            await peer.receive()
        counting.cancel()
        assert order == list(range(1, 1002))
        assert max(begun.values()) <= 2 * REQUESTS_AT_ONCE


async def test_requests_that_wait_for_turns_and_answers_and_long_requests_are_all_begun_in_order(
    rng: random.Random,
):
    """Whichever of the three reasons to wait ends first, each request is begun once."""
    begun = []

    def produce(connection, request_id, version, array, view, start, end):
        begun.append(request_id)
        kind = rng.randrange(6)
        if kind > 1:
            connection.finish(request_id, b"")
            return
        if kind == 1:
            connection.stop_requests()

        async def later():
            for _ in range(rng.randrange(4)):
                await asyncio.sleep(0)
            if kind == 1:
                connection.go_on()
            connection.finish(request_id, b"")

        connection.server.spawn(later(), connection.task_ended)

    services = Services()
    services.register_raw(ApiKey.PRODUCE_LOG, produce)
    async with serving(services, limits=Limits(inflight_max=2)) as (server, connect):
        peer = await connect()
        peer.send(ApiKey.PRODUCE_LOG, b"")
        await peer.receive()
        (connection,) = server.connections
        connection._pace = Pace(server.loop, Ticks(TURN_SECONDS))
        sizes = [rng.choice([0, 10, 3_000, 50_000, 200_000]) for _ in range(500)]

        async def send():
            for size in sizes:
                peer.send(ApiKey.PRODUCE_LOG, bytes(size))
                await peer.writer.drain()

        sending = asyncio.create_task(send())
        async with asyncio.timeout(WAIT_SECONDS):
            answered = [(await peer.receive()).request_id for _ in sizes]
            await sending
        assert begun == list(range(1, 502))
        assert sorted(answered) == begun[1:]
        while connection._paused:  # the last of the reasons to wait ends in the next turn
            await asyncio.sleep(0)
        assert connection.inflight == 0
