"""The calling side: one connection to one server, many requests on it at a time.

`RpcConnection` is an asyncio `BufferedProtocol`. Small answers are parsed in one receive buffer; an
answer that arrives in parts gets memory of exactly its size, which the socket fills directly, so a
fetch of 16 MiB is never copied. Requests are sent in the order of the calls and without waiting
(`send` is a plain function); this keeps the batches of a writer in order. The caller limits how
many bytes may be under way (the writer's buffer memory).

Answers come in any order and are matched by request id. Every request has a deadline, after which
the call fails. If the server has not sent a single byte by then, the connection is closed, and the
next call opens a new one.

A lost connection stays lost: every call on it fails with `NetworkError`. The caller opens another
connection and decides whether a request may be sent twice.

| limit | what happens at it |
|---|---|
| answer over `RESPONSE_BYTES_MAX`, or a length no frame has | the connection is closed |
| no answer by the deadline | `RequestTimeoutError`; the late answer is dropped |
| connect + handshake over `connect_timeout_ms` | `NetworkError` |
"""

from __future__ import annotations

import asyncio
import logging
import random
import socket
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

import numpy as np
from google.protobuf.message import Message

from zufluss.errors import (
    CorruptMessageError,
    ErrorCode,
    NetworkError,
    RequestTimeoutError,
    UnsupportedVersionError,
    ZuflussError,
)
from zufluss.wire import messages as m
from zufluss.wire.api import APIS, ApiKey
from zufluss.wire.codec import decode
from zufluss.wire.frame import (
    LENGTH,
    REQUEST_HEADER,
    REQUEST_ID_MASK,
    REQUEST_LENGTH_MIN,
    RESPONSE_LENGTH_MIN,
    Buffer,
    unpack_response,
)
from zufluss.wire.sasl import MECHANISM, build_plain

log = logging.getLogger(__name__)

RECEIVE_BYTES: Final = 128 * 1024
"""Size of the buffer that small answers are parsed in."""
RESPONSE_BYTES_MAX: Final = 1 << 30
"""No server sends more than this in one frame; a larger length means a broken stream."""
WRITE_COPY_BYTES_MAX: Final = 64 * 1024
"""Requests up to this size are joined before they are handed to the socket."""
AUTH_BACKOFF_MS: Final = (100, 5_000)
"""First and longest pause when the server asks to try the authentication again."""


@dataclass(frozen=True, slots=True)
class Credentials:
    """User and password that the client sends with SASL/PLAIN."""

    username: str
    """The user; not empty."""
    password: str
    """The password; not empty, and never part of a repr or a log line."""

    def __repr__(self) -> str:
        return f"Credentials(username={self.username!r})"


class _PendingCall(NamedTuple):
    future: asyncio.Future[memoryview]
    timer: asyncio.TimerHandle
    api_key: int
    sent_at: float


class RpcConnection(asyncio.BufferedProtocol):
    """One authenticated connection; make it with `open_connection`."""

    def __init__(self, peer: str) -> None:
        self.peer = peer
        """`host:port` of the server, for messages."""
        self.server_type: int | None = None
        """1 coordinator, 2 tablet server, None when one process is both."""
        self._loop = asyncio.get_running_loop()
        self._transport: asyncio.Transport | None = None
        self._calls: dict[int, _PendingCall] = {}
        self._next_id = 0
        self._versions: dict[int, int] = {}
        self._lost: ZuflussError | None = None
        self._received_at = self._loop.time()
        self._scratch = memoryview(bytearray(RECEIVE_BYTES))
        self._filled = 0
        self._frame: memoryview | None = None
        self._frame_filled = 0

    def __repr__(self) -> str:
        state = "closed" if self.closed else f"{len(self._calls)} calls under way"
        return f"<RpcConnection {self.peer}, {state}>"

    # -- calls ---------------------------------------------------------------------------------

    @property
    def closed(self) -> bool:
        """Whether requests can no longer be sent."""
        return self._lost is not None or self._transport is None or self._transport.is_closing()

    def version_of(self, api_key: int) -> int:
        """Return the newest version of an API that client and server both know."""
        try:
            return self._versions[api_key]
        except KeyError:
            raise UnsupportedVersionError(
                f"{self.peer} does not offer {_name(api_key)} in a version this client knows"
            ) from None

    async def call(self, api_key: ApiKey, request: Message, *, timeout_ms: int) -> Any:
        """Send a message and return the answer; raise the error if the answer carries one.

        >>> await connection.call(
        ...     ApiKey.LIST_DATABASES, m.ListDatabasesRequest(), timeout_ms=30_000
        ... )  # doctest: +SKIP
        """
        body = await self.send(api_key, [request.SerializeToString()], timeout_ms=timeout_ms)
        return decode(APIS[api_key].response, body)

    def send(
        self, api_key: int, body: Sequence[Buffer], *, timeout_ms: int
    ) -> asyncio.Future[memoryview]:
        """Send a request of several buffers at once; the future gives the body of the answer.

        The buffers must not change until the answer has arrived. The body of a large answer has
        memory of its own and may be kept.
        """
        if self.closed:
            raise self._lost or NetworkError(f"the connection to {self.peer} is closed")
        version = self.version_of(api_key)
        request_id = self._next_id
        self._next_id = (request_id + 1) & REQUEST_ID_MASK
        size = sum(len(piece) for piece in body)
        header = REQUEST_HEADER.pack(size + REQUEST_LENGTH_MIN, api_key, version, request_id)
        future: asyncio.Future[memoryview] = self._loop.create_future()
        timer = self._loop.call_later(timeout_ms / 1000, self._expire, request_id, timeout_ms)
        self._calls[request_id] = _PendingCall(future, timer, api_key, self._loop.time())
        self._write(header, body, size)
        return future

    def close(self, reason: ZuflussError | None = None) -> None:
        """Close the connection and fail the calls under way. Closing twice is fine."""
        self._fail(reason or NetworkError(f"the connection to {self.peer} was closed"))
        if self._transport is not None and not self._transport.is_closing():
            self._transport.abort()

    def _write(self, header: bytes, body: Sequence[Buffer], size: int) -> None:
        assert self._transport is not None
        if size <= WRITE_COPY_BYTES_MAX:
            self._transport.write(b"".join((header, *body)))
        else:
            self._transport.writelines([header, *body])

    def _expire(self, request_id: int, timeout_ms: int) -> None:
        call = self._calls.pop(request_id, None)
        if call is None:
            return
        silent = self._received_at < call.sent_at
        failure = RequestTimeoutError(
            f"{self.peer} did not answer {_name(call.api_key)} within {timeout_ms} ms"
            + (", nor anything else; the connection was closed" if silent else "")
        )
        if not call.future.done():
            call.future.set_exception(failure)
        if silent:
            self.close(NetworkError(f"{self.peer} has been silent for {timeout_ms} ms"))

    def _fail(self, reason: ZuflussError) -> None:
        if self._lost is None:
            self._lost = reason
        calls, self._calls = self._calls, {}
        for call in calls.values():
            call.timer.cancel()
            if not call.future.done():
                call.future.set_exception(type(reason)(reason.message, code=reason.code))

    # -- handshake -----------------------------------------------------------------------------

    async def handshake(
        self, software: tuple[str, str], credentials: Credentials | None, timeout_ms: int
    ) -> None:
        """Agree on versions, then authenticate. Called once, by `open_connection`."""
        self._versions = {ApiKey.API_VERSIONS: 0, ApiKey.AUTHENTICATE: 0}
        request = m.ApiVersionsRequest(
            client_software_name=software[0], client_software_version=software[1]
        )
        response: m.ApiVersionsResponse = await self.call(
            ApiKey.API_VERSIONS, request, timeout_ms=timeout_ms
        )
        self.server_type = response.server_type if response.HasField("server_type") else None
        self._versions = _common_versions(response)
        if credentials is not None:
            self._versions.setdefault(ApiKey.AUTHENTICATE, 0)
            await self._authenticate(credentials, timeout_ms)

    async def _authenticate(self, credentials: Credentials, timeout_ms: int) -> None:
        token = build_plain(credentials.username, credentials.password)
        request = m.AuthenticateRequest(protocol=MECHANISM, token=token)
        pause_ms, pause_max_ms = AUTH_BACKOFF_MS
        while True:
            try:
                answer = await self.call(ApiKey.AUTHENTICATE, request, timeout_ms=timeout_ms)
                break
            except ZuflussError as e:
                if e.code is not ErrorCode.RETRIABLE_AUTHENTICATE_EXCEPTION:
                    raise
            await asyncio.sleep(pause_ms * random.uniform(0.8, 1.2) / 1000)
            pause_ms = min(pause_ms * 2, pause_max_ms)
        if answer.challenge:
            reply = m.AuthenticateRequest(protocol=MECHANISM, token=answer.challenge)
            await self.call(ApiKey.AUTHENTICATE, reply, timeout_ms=timeout_ms)

    # -- asyncio.BufferedProtocol --------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Called by asyncio when the socket is connected."""
        self._transport = transport  # type: ignore[assignment]

    def connection_lost(self, exc: Exception | None) -> None:
        """Called by asyncio when the socket is gone: every call under way fails."""
        detail = f": {exc}" if exc else " by the server"
        self._fail(NetworkError(f"the connection to {self.peer} was closed{detail}"))

    def eof_received(self) -> bool:
        """Called by asyncio when the server closed its side; we close ours."""
        return False

    def get_buffer(self, sizehint: int) -> memoryview:
        """Return the memory for the next bytes: the unfinished frame, else the scratch buffer."""
        if self._frame is not None:
            return self._frame[self._frame_filled :]
        return self._scratch[self._filled :]

    def buffer_updated(self, nbytes: int) -> None:
        """Called by asyncio after `nbytes` arrived in the memory that `get_buffer` returned."""
        self._received_at = self._loop.time()
        try:
            if self._frame is None:
                self._filled += nbytes
                self._take_frames()
            else:
                self._frame_filled += nbytes
                if self._frame_filled == len(self._frame):
                    frame, self._frame = self._frame, None
                    self._answer(frame)
        except ZuflussError as e:
            log.warning("client.stream_broken peer=%s error=%s", self.peer, e)
            self.close(e)

    def _take_frames(self) -> None:
        """Handle every whole frame in the scratch buffer; keep the start of an unfinished one."""
        pos, end = 0, self._filled
        while end - pos >= LENGTH.size:
            size = self._frame_size(pos)
            start = pos + LENGTH.size
            if end - start < size:
                if start + size > RECEIVE_BYTES:
                    self._begin_frame(size, start)
                    return
                break
            self._answer(memoryview(bytes(self._scratch[start : start + size])))
            pos = start + size
        if pos:
            self._scratch[: end - pos] = self._scratch[pos:end]
            self._filled = end - pos

    def _begin_frame(self, size: int, start: int) -> None:
        """Give a frame that is larger than the scratch memory of its own."""
        have = self._filled - start
        frame = np.empty(size, dtype=np.uint8).data
        frame[:have] = self._scratch[start : self._filled]
        self._frame, self._frame_filled, self._filled = frame, have, 0

    def _frame_size(self, pos: int) -> int:
        size: int = LENGTH.unpack_from(self._scratch, pos)[0]
        if not RESPONSE_LENGTH_MIN <= size <= RESPONSE_BYTES_MAX:
            raise CorruptMessageError(
                f"{self.peer} sent a frame length of {size}; {RESPONSE_LENGTH_MIN} to "
                f"{RESPONSE_BYTES_MAX} is possible. Is this a Fluss port?"
            )
        return size

    def _answer(self, frame: memoryview) -> None:
        response = unpack_response(frame)
        if response.request_id is None:
            raise response.error or NetworkError(f"{self.peer} sent an error without a request id")
        call = self._calls.pop(response.request_id, None)
        if call is None:
            log.debug("client.late_answer peer=%s request_id=%d", self.peer, response.request_id)
            return
        call.timer.cancel()
        if call.future.done():
            return
        if response.error is not None:
            call.future.set_exception(response.error)
        else:
            call.future.set_result(response.body)


async def open_connection(
    host: str,
    port: int,
    *,
    credentials: Credentials | None = None,
    connect_timeout_ms: int,
    software: tuple[str, str] = ("zufluss", "0"),
) -> RpcConnection:
    """Connect, agree on API versions, authenticate; raises `NetworkError` if a step fails.

    >>> connection = await open_connection(
    ...     "localhost", 9123, connect_timeout_ms=5_000
    ... )  # doctest: +SKIP
    """
    peer = f"{host}:{port}"
    loop = asyncio.get_running_loop()
    connection: RpcConnection | None = None
    try:
        async with asyncio.timeout(connect_timeout_ms / 1000):
            _, connection = await loop.create_connection(lambda: RpcConnection(peer), host, port)
            await connection.handshake(software, credentials, connect_timeout_ms)
            return connection
    except BaseException as e:
        if connection is not None:
            connection.close()
        if isinstance(e, ZuflussError) or not isinstance(e, OSError):
            raise
        if isinstance(e, TimeoutError):
            raise NetworkError(f"no connection to {peer} within {connect_timeout_ms} ms") from e
        raise NetworkError(f"cannot connect to {peer}: {_problem(host, e)}") from e


def _problem(host: str, failure: OSError) -> str:
    if isinstance(failure, socket.gaierror):
        return f"the host name {host!r} is unknown ({failure.strerror})"
    if isinstance(failure, ConnectionRefusedError):
        return "connection refused, nobody listens there"
    return str(failure)


def _common_versions(response: m.ApiVersionsResponse) -> dict[int, int]:
    versions = {}
    for offered in response.api_versions:
        api = APIS.get(offered.api_key)
        if api is None:
            continue
        best = min(offered.max_version, api.max_version)
        if best >= max(offered.min_version, api.min_version):
            versions[offered.api_key] = best
    return versions


def _name(api_key: int) -> str:
    return APIS[api_key].name if api_key in APIS else f"API {api_key}"
