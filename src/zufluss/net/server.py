"""The listening side: all listeners and connections of one process, and how they end in order."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Any

import structlog

from zufluss.net.connection import ServerConnection
from zufluss.net.listeners import Listener
from zufluss.net.memory import Limits, ReceiveMemory, SendMemory, new_buffer
from zufluss.net.services import Handler, RequestContext, Services
from zufluss.system import watch_peers
from zufluss.wire import messages as m
from zufluss.wire.api import APIS, Api, ApiKey
from zufluss.wire.sasl import PlainAuthenticator

log = structlog.get_logger(__name__)

SCRATCH_BYTES = 256 * 1024
"""Size of the shared receive buffer."""
BURST_FACTOR = 8
"""Requests of one read may exceed the limit in flight by this factor; others wait."""
SOFTWARE_LENGTH_MAX = 64
"""Characters of a client's name that are kept."""


class NetServer:
    """All listeners and connections of one process."""

    def __init__(
        self,
        services: Services,
        listeners: Sequence[Listener],
        *,
        limits: Limits | None = None,
        authenticator: PlainAuthenticator | None = None,
        server_type: int | None = None,
        internal_listener: str | None = None,
    ) -> None:
        self.services = services
        self.internal_listener = internal_listener
        self.listeners = tuple(listeners)
        self.limits = limits or Limits()
        self.burst_max = BURST_FACTOR * self.limits.inflight_max
        self.authenticator = authenticator
        self.memory = ReceiveMemory(self.limits.receive_bytes_max)
        self.sending = SendMemory(self.limits.send_bytes_max)
        self.strangers: dict[ServerConnection, None] = {}
        """Connections whose client is not known yet, the oldest first."""
        self.closed: dict[str, int] = {}
        """Connections that the server closed, by reason."""
        self.connections: set[ServerConnection] = set()
        self.requests: dict[int, int] = dict.fromkeys(APIS, 0)
        """Requests by API key that reached a handler."""
        self.errors: dict[int, int] = {}
        """Count of requests by the error code of their answer."""
        self.received_bytes = self.sent_bytes = 0
        self.loop = asyncio.get_running_loop()
        self.scratch, self.scratch_view = new_buffer(SCRATCH_BYTES)
        self.on_drain: Callable[[], None] = lambda: None
        """Called when the server begins to drain: answer long polls now."""
        self.api_versions = _api_versions(services, server_type, internal_listener)
        self._servers: list[asyncio.Server] = []
        self._tasks: set[asyncio.Task[None]] = set()
        self._with_answers: list[ServerConnection] = []
        self._turn_work: list[Callable[[], None]] = []
        self._turn_ends = False
        self._sweeper: asyncio.Task[None] | None = None

    async def bind(self) -> None:
        """Take the ports, without listening yet; `listeners` then holds the real ones."""
        bound = []
        for listener in self.listeners:
            server = await self.loop.create_server(
                lambda listener=listener: ServerConnection(self, listener),
                listener.bind.host or None,
                listener.bind.port,
                backlog=1024,
                start_serving=False,
            )
            for listening in server.sockets:
                watch_peers(listening.fileno())
            self._servers.append(server)
            bound.append(listener.bound_to(server.sockets[0].getsockname()[1]))
        self.listeners = tuple(bound)

    async def start(self) -> None:
        """Accept connections; starting twice is fine."""
        if self._sweeper is not None:
            return
        if not self._servers:
            await self.bind()
        for server in self._servers:
            await server.start_serving()
        self._sweeper = asyncio.create_task(self._sweep())

    async def stop(self, timeout: float) -> None:
        """Stop listening, let requests in flight finish for `timeout` seconds, close."""
        for server in self._servers:
            server.close()
        self.on_drain()
        for connection in self.connections:
            connection._pause()
        deadline = self.loop.time() + timeout
        while self._busy() and self.loop.time() < deadline:
            await asyncio.sleep(0.01)
        if self._busy():
            log.warning("drain_timed_out", requests=sum(c.inflight for c in self.connections))
        if self._sweeper is not None:
            self._sweeper.cancel()
        for connection in list(self.connections):
            connection.close()
        for task in list(self._tasks):
            task.cancel()

    def _busy(self) -> bool:
        return any(
            c.inflight or c._out or c.transport.get_write_buffer_size() for c in self.connections
        )

    def spawn(self, coroutine: Any, ended: Callable[[asyncio.Task[None]], None]) -> None:
        """Run a handler beside the connection; `ended` gets the task when it has ended."""
        task = self.loop.create_task(coroutine)
        task.add_done_callback(ended)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def admit(self, connection: ServerConnection) -> str | None:
        """Count a new connection; returns why it is refused, None if it is not.

        Where there is no room, the oldest stranger has to go: clients speak as soon as they come.
        """
        limits = self.limits
        full = len(self.connections) >= limits.connections_max
        if self.strangers and (full or len(self.strangers) >= limits.strangers_max):
            oldest = next(iter(self.strangers))
            self._close(oldest, "too many connections that have not logged in")
            self.dismiss(oldest)
        elif full:
            self._count_closed("too many connections")
            log.warning("connection_refused", peer=connection.peer, open=len(self.connections))
            connection.stranger = False
            return (
                f"the server has {limits.connections_max} connections, as many as it may have "
                "(zufluss.net.max-connections, and half of the files that it may open)"
            )
        self.connections.add(connection)
        self.strangers[connection] = None
        return None

    def introduce(self, connection: ServerConnection) -> None:
        """The client has logged in, or begun its first request where no login is due."""
        connection.stranger = False
        self.strangers.pop(connection, None)

    def estrange(self, connection: ServerConnection) -> None:
        """The client logs in once more; until it has, it is not known."""
        if not connection.stranger:
            connection.stranger, connection.stranger_since = True, self.loop.time()
            self.strangers[connection] = None

    def dismiss(self, connection: ServerConnection) -> None:
        """Forget a connection that has ended."""
        self.introduce(connection)
        self.connections.discard(connection)

    def _close(self, connection: ServerConnection, reason: str) -> None:
        log.info("connection_closed", peer=connection.peer, reason=reason)
        self._count_closed(reason)
        connection.abort()

    def _count_closed(self, reason: str) -> None:
        self.closed[reason] = self.closed.get(reason, 0) + 1

    def has_answers(self, connection: ServerConnection) -> None:
        """Have `connection` flushed once, at the end of this loop turn."""
        self._with_answers.append(connection)
        if not self._turn_ends:
            self._turn_ends = True
            self.loop.call_soon(self._end_turn)

    def at_turn_end(self, work: Callable[[], None]) -> None:
        """Call `work` once at the end of this loop turn, right before the answers leave."""
        self._turn_work.append(work)
        if not self._turn_ends:
            self._turn_ends = True
            self.loop.call_soon(self._end_turn)

    def _end_turn(self) -> None:
        """Run the work that requests left for the end of the turn, then send the turn's answers."""
        if self._turn_work:
            gathered, self._turn_work = self._turn_work, []
            for work in gathered:
                try:
                    work()
                except Exception:  # the answers of others are sent anyway
                    log.exception("turn_work_failed")
        self._turn_ends = False
        ready, self._with_answers = self._with_answers, []
        for connection in ready:
            connection.flush()

    async def _sweep(self) -> None:
        """Close connections that are idle or stuck."""
        while True:
            limits = self.limits
            times = (limits.frame_seconds, limits.idle_seconds, limits.login_seconds)
            await asyncio.sleep(min(1.0, *times, limits.send_seconds))
            now = self.loop.time()
            self.sending.refresh()
            for connection in list(self.connections):
                reason = connection.overdue(now)
                if reason is not None:
                    self._close(connection, reason)


def _api_versions(
    services: Services, server_type: int | None, internal_listener: str | None
) -> tuple[Api, Handler]:
    """Return the handler of API_VERSIONS, which lists the APIs registered when it is called."""
    always = [APIS[ApiKey.API_VERSIONS], APIS[ApiKey.AUTHENTICATE]]

    async def api_versions(request: Any, context: RequestContext) -> Any:
        context.reader.software = request.client_software_name[:SOFTWARE_LENGTH_MAX]
        response = m.ApiVersionsResponse()
        internal = context.listener == internal_listener
        for api in sorted([*always, *services.advertised()], key=lambda a: a.key):
            if not api.for_clients and not internal:
                continue
            response.api_versions.add(
                api_key=api.key, min_version=api.min_version, max_version=api.max_version
            )
        if server_type is not None:
            response.server_type = server_type
        return response

    return always[0], api_versions
