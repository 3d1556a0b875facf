"""A proxy that makes an HTTP service misbehave on purpose, say an object store.

    with FaultProxy("127.0.0.1", s3.port) as proxy:
        proxy.set([Fault("status_503", every=3), Fault("latency", seconds=0.2, methods=("GET",))])
        conf = Configuration.of({..., **properties(proxy.endpoint)})

| kind | what the client sees | does the service get the request |
|---|---|---|
| `latency` | the answer, after `seconds` | yes |
| `bandwidth` | the answer, at `bytes_per_second` in both directions | yes |
| `reset` | the connection is reset | no |
| `half_open` | nothing, for ever | no |
| `status_403` | 403 ExpiredToken | no |
| `status_409` | 409 ConditionalRequestConflict | no |
| `status_503` | 503 SlowDown | no |
| `error_after_success` | 500, and the service has done it | yes |
| `late` | nothing, for ever | yes, after `seconds` or `deliver_late`, even if the client has gone |
| `cut_body` | half of the answer's body, or of its first line if it has none, then the end | yes |

Each fault decides on its own which of the requests it matches it hits: the first `count`, every
n-th, or each with a probability drawn from `seed`, so a test can be repeated. The first fault of
the list that hits is done; `latency` and `bandwidth` let others follow. It speaks HTTP/1.1 with one
connection to the service for each request.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import socket
import struct
import threading
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final, Literal, NamedTuple, Self

Kind = Literal[
    "latency",
    "bandwidth",
    "reset",
    "half_open",
    "status_403",
    "status_409",
    "status_503",
    "error_after_success",
    "late",
    "cut_body",
]

HEAD_BYTES_MAX: Final = 1 << 16
PIECE_BYTES: Final = 1 << 16
SEEN_MAX: Final = 100_000

_EXPIRED: Final = b"<Error><Code>ExpiredToken</Code><Message>by FaultProxy</Message></Error>"
_CONFLICT: Final = (
    b"<Error><Code>ConditionalRequestConflict</Code><Message>by FaultProxy</Message></Error>"
)
_SLOW_DOWN: Final = b"<Error><Code>SlowDown</Code><Message>by FaultProxy</Message></Error>"
_INTERNAL: Final = b"<Error><Code>InternalError</Code><Message>by FaultProxy</Message></Error>"

_REFUSALS: Final[dict[Kind, tuple[str, bytes]]] = {
    "status_403": ("403 Forbidden", _EXPIRED),
    "status_409": ("409 Conflict", _CONFLICT),
    "status_503": ("503 Slow Down", _SLOW_DOWN),
}


@dataclass(frozen=True, slots=True)
class Fault:
    """A kind of failure, and the requests that it hits."""

    kind: Kind
    """What happens."""
    probability: float = 1.0
    """How likely each request that matches is hit."""
    every: int = 1
    """Only each n-th request that matches can be hit."""
    once: bool = False
    """Requests with the same method and path are hit once: a retry of each request passes."""
    count: int | None = None
    """How many requests are hit at most."""
    seed: int = 0
    """Where the probability is drawn from."""
    methods: tuple[str, ...] = ()
    """Methods that match; all if empty."""
    path_contains: str = ""
    """A piece of the path and query of requests that match."""
    seconds: float = 0.1
    """The delay of `latency` and `late`."""
    bytes_per_second: int = 1 << 20
    """The limit of `bandwidth`."""


class Seen(NamedTuple):
    """A request that came in."""

    method: str
    path: str
    faults: tuple[Kind, ...]
    """The faults that hit the request."""


class _Armed:
    """A fault with its counters."""

    def __init__(self, fault: Fault) -> None:
        self.fault = fault
        self._random = random.Random(fault.seed)
        self._matched = 0
        self._hit = 0
        self._seen: set[tuple[str, str]] = set()

    def hits(self, method: str, path: str) -> bool:
        fault = self.fault
        if (fault.methods and method not in fault.methods) or fault.path_contains not in path:
            return False
        if fault.once and (method, path) in self._seen:
            return False
        self._seen.add((method, path))
        self._matched += 1
        if fault.count is not None and self._hit >= fault.count:
            return False
        if self._matched % fault.every or self._random.random() >= fault.probability:
            return False
        self._hit += 1
        return True


class _Request(NamedTuple):
    method: str
    path: str
    head: bytes
    length: int


class FaultProxy:
    """A proxy on a free port of this host, in a thread of its own; a context manager."""

    def __init__(self, target_host: str, target_port: int) -> None:
        self.port = 0
        self.seen: deque[Seen] = deque(maxlen=SEEN_MAX)
        """The newest requests that came in, oldest first."""
        self.hits = 0
        """How many requests were hit by faults."""
        self._target = target_host, target_port
        self._armed: list[_Armed] = []
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._server: asyncio.Server | None = None
        self._never = asyncio.Event()
        """Half-open connections wait for it; it keeps their tasks from being collected."""
        self._late: set[asyncio.Task[None]] = set()
        """Requests that are held back."""
        self._due = asyncio.Event()
        """Set when those that are held back are to be delivered."""

    @property
    def endpoint(self) -> str:
        """Its address."""
        return f"http://127.0.0.1:{self.port}"

    def set(self, faults: Iterable[Fault] = ()) -> None:
        """From now on do these faults and no others; counters begin anew."""
        self._armed = [_Armed(fault) for fault in faults]

    def __enter__(self) -> Self:
        self._thread.start()
        asyncio.run_coroutine_threadsafe(self._listen(), self._loop).result()
        return self

    def __exit__(self, *exc: object) -> None:
        asyncio.run_coroutine_threadsafe(self._stop(), self._loop).result()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    async def _listen(self) -> None:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0, limit=HEAD_BYTES_MAX)
        self.port = self._server.sockets[0].getsockname()[1]

    async def _stop(self) -> None:
        assert self._server is not None
        self._server.close()
        own = asyncio.current_task()
        tasks = [task for task in asyncio.all_tasks() if task is not own]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while (request := await _read_request(reader)) is not None:
                if not await self._answer(request, reader, writer):
                    return
        except (ConnectionError, asyncio.IncompleteReadError, asyncio.CancelledError):
            return  # one side went away, or the proxy is stopped
        finally:
            writer.close()

    async def _answer(
        self, request: _Request, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> bool:
        """Handle a request; whether the connection can take another one."""
        faults = self._faults(request)
        kinds = {fault.kind: fault for fault in faults}
        self.seen.append(Seen(request.method, request.path, tuple(kinds)))
        self.hits += bool(kinds)
        if "latency" in kinds:
            await asyncio.sleep(kinds["latency"].seconds)
        if "reset" in kinds:
            _reset(writer)
            return False
        if "half_open" in kinds:
            await self._never.wait()
        pace = _Pace(kinds["bandwidth"].bytes_per_second if "bandwidth" in kinds else 0)
        refusal = next((_REFUSALS[kind] for kind in kinds if kind in _REFUSALS), None)
        if refusal is not None:
            await _relay(reader, None, request.length, pace)
            await _error(writer, request, *refusal)
            return True
        if "late" in kinds:
            body = await reader.readexactly(request.length)
            late = self._loop.create_task(self._deliver(request, body, kinds["late"].seconds))
            self._late.add(late)
            late.add_done_callback(self._late.discard)
            await self._never.wait()
        return await self._forward(request, reader, writer, pace, kinds)

    async def _deliver(self, request: _Request, body: bytes, seconds: float) -> None:
        """Send a request that was held back; nobody hears the answer."""
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._due.wait(), seconds)
        source, sink = await asyncio.open_connection(*self._target, limit=HEAD_BYTES_MAX)
        try:
            sink.write(request.head + body)
            await source.read()
        finally:
            sink.close()

    def deliver_late(self) -> None:
        """Deliver what is held back now, in any order; what comes later is held back again."""
        self._loop.call_soon_threadsafe(self._deliver_late)

    def _deliver_late(self) -> None:
        self._due.set()
        self._due = asyncio.Event()

    @property
    def held_back(self) -> int:
        """How many `late` requests the service has not answered yet."""
        return len(self._late)

    def _faults(self, request: _Request) -> list[Fault]:
        faults: list[Fault] = []
        for armed in self._armed:
            if armed.hits(request.method, request.path):
                faults.append(armed.fault)
                if armed.fault.kind not in ("latency", "bandwidth"):
                    break
        return faults

    async def _forward(
        self,
        request: _Request,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        pace: _Pace,
        kinds: dict[Kind, Fault],
    ) -> bool:
        source, sink = await asyncio.open_connection(*self._target, limit=HEAD_BYTES_MAX)
        try:
            sink.write(request.head)
            await _relay(reader, sink, request.length, pace)
            head = await source.readuntil(b"\r\n\r\n")
            length = _answer_length(request.method, head)
            if "error_after_success" in kinds:
                await _relay(source, None, length, pace)
                await _error(writer, request, "500 Internal Server Error", _INTERNAL)
                return True
            if "cut_body" in kinds and length == 0:
                writer.write(head[: head.index(b"\r\n") // 2])
                return False
            writer.write(_without(head, b"connection"))
            if "cut_body" in kinds:
                await _relay(source, writer, 1 if length is None else length // 2, pace)
                return False
            await _relay(source, writer, length, pace)
            return length is not None
        finally:
            sink.close()


class _Pace:
    """Limits the bytes per second; 0 means any number."""

    def __init__(self, bytes_per_second: int) -> None:
        self._rate = bytes_per_second

    async def pass_by(self, size: int) -> None:
        if self._rate:
            await asyncio.sleep(size / self._rate)


async def _read_request(reader: asyncio.StreamReader) -> _Request | None:
    """The next request without its body; None at the end of the connection."""
    try:
        head = await reader.readuntil(b"\r\n\r\n")
    except asyncio.IncompleteReadError:
        return None
    method, path, _ = head.split(b"\r\n", 1)[0].decode("latin-1").split(" ", 2)
    once = _without(head, b"connection")[:-2] + b"Connection: close\r\n\r\n"
    return _Request(method, path, once, int(_header(head, b"content-length") or 0))


async def _relay(
    source: asyncio.StreamReader,
    sink: asyncio.StreamWriter | None,
    length: int | None,
    pace: _Pace,
) -> None:
    """Pass on this many bytes, or all until the end; without a sink they are dropped."""
    left = length
    while left is None or left > 0:
        piece = await source.read(PIECE_BYTES if left is None else min(left, PIECE_BYTES))
        if not piece:
            if left is not None:
                raise ConnectionError("the other side ended too early")
            return
        left = None if left is None else left - len(piece)
        await pace.pass_by(len(piece))
        if sink is not None:
            sink.write(piece)
            await sink.drain()


def _answer_length(method: str, head: bytes) -> int | None:
    """How long the body of an answer is; None if it lasts until the end of the connection."""
    status = head.split(b" ", 2)[1]
    if method == "HEAD" or status in (b"204", b"304"):
        return 0
    length = _header(head, b"content-length")
    return None if length is None else int(length)


async def _error(writer: asyncio.StreamWriter, request: _Request, status: str, body: bytes) -> None:
    head = (
        f"HTTP/1.1 {status}\r\nContent-Length: {len(body)}\r\nContent-Type: application/xml\r\n\r\n"
    )
    writer.write(head.encode() + (b"" if request.method == "HEAD" else body))
    await writer.drain()


def _reset(writer: asyncio.StreamWriter) -> None:
    """Close so that the other side gets a reset."""
    connection = writer.get_extra_info("socket")
    with contextlib.suppress(OSError):
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    writer.transport.abort()


def _header(head: bytes, name: bytes) -> bytes | None:
    for line in head.split(b"\r\n")[1:]:
        key, _, value = line.partition(b":")
        if key.strip().lower() == name:
            return value.strip()
    return None


def _without(head: bytes, name: bytes) -> bytes:
    lines: Sequence[bytes] = head.split(b"\r\n")
    return b"\r\n".join(line for line in lines if line.partition(b":")[0].strip().lower() != name)
