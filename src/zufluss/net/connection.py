"""One client connection: frames in, answers out.

Every connection is an asyncio `BufferedProtocol` on one event loop. All of them receive into one
shared scratch buffer. A frame that arrived whole is handled there, and an idle connection owns no
buffer at all. A frame that arrives in parts gets memory of its own, which grows with the bytes that
arrived (the declared length reserves nothing); `ReceiveMemory` bounds the sum over all connections.

The requests of one read are begun in turns of the event loop, a few at a time (`pacing.py`): a read
may have thousands of them, and other clients would wait for all.

Answers of one loop turn are gathered and sent with one write per connection. They may leave in
another order than the requests came; clients match them by request id.
"""

from __future__ import annotations

import asyncio
import struct
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import structlog
from google.protobuf.message import Message

from zufluss.errors import (
    AuthenticationError,
    AuthorizationError,
    ErrorCode,
    NetworkError,
    ZuflussError,
    refusal_of,
)
from zufluss.net.listeners import Listener
from zufluss.net.memory import SEND_PROGRESS_BYTES, new_buffer
from zufluss.net.refusals import check_control_size, too_long, unsupported
from zufluss.net.services import EncodedResponse, Handler, RequestContext
from zufluss.pacing import Pace
from zufluss.wire import messages as m
from zufluss.wire.api import APIS, Api, ApiKey
from zufluss.wire.codec import BYTES_AT_ONCE, decode, decode_steps
from zufluss.wire.frame import (
    RESPONSE_HEADER,
    SUCCESS,
    pack_error,
    pack_failure,
    pack_response,
    response_header,
)

if TYPE_CHECKING:
    from zufluss.net.server import NetServer

    Buffer = bytes | bytearray | memoryview

log = structlog.get_logger(__name__)

HEAD_BYTES = 12
"""Length, API key, version and id of a request."""
CARRY_BYTES_MAX = 32 * 1024
"""A half-received frame up to this size is kept as bytes and completed in the scratch buffer."""
WRITE_BUFFER_HIGH = 8 * 1024 * 1024
"""Unsent answers of one connection beyond which we stop reading its requests."""
WRITE_BUFFER_SHORT = 64 * 1024
"""The same while the memory of unread answers is short."""
UNAUTHENTICATED_BYTES_MAX = 64 * 1024
"""Longest request before a required login: strangers get little memory."""
JOIN_BYTES_MAX = 64 * 1024
"""Answers of a turn up to this size are joined into one write."""
REQUESTS_AT_ONCE = 8
"""Requests of a read that are begun between two looks at the clock."""

_unpack_length = struct.Struct(">i").unpack_from
_unpack_header = struct.Struct(">hhi").unpack_from
_pack_header = RESPONSE_HEADER.pack


class ServerConnection(asyncio.BufferedProtocol):
    """The server's side of one client connection."""

    __slots__ = (
        "_array",
        "_buffer",
        "_carry",
        "_drained",
        "_filled",
        "_frame_max",
        "_frame_since",
        "_gone",
        "_handed",
        "_held",
        "_inflight_max",
        "_out",
        "_pace",
        "_paused",
        "_queued",
        "_read",
        "_read_since",
        "_served",
        "_stopped",
        "_total",
        "_unread",
        "_yielding",
        "active",
        "closing",
        "inflight",
        "last_activity",
        "listener",
        "peer",
        "principal",
        "server",
        "software",
        "stranger",
        "stranger_since",
        "transport",
    )

    def __init__(self, server: NetServer, listener: Listener) -> None:
        self.server, self.listener = server, listener
        self.transport: Any = None
        self.peer, self.software = "?", ""
        self.principal: str | None = None
        self.inflight = 0
        self._inflight_max = server.limits.inflight_max
        self.closing = False
        self.active = False
        """Bytes arrived since `overdue` looked last."""
        self.last_activity = self.stranger_since = server.loop.time()
        self.stranger = True
        """The client has not logged in, or on a plaintext listener begun no request."""
        self._serve(listener.protocol == "plaintext")
        self._carry = b""
        self._array: Any = None
        self._buffer: memoryview | None = None
        self._filled = 0
        self._total = 0
        self._frame_since = 0.0
        self._held = self._stopped = False
        self._yielding = False
        """Requests go on in the next turn of the event loop."""
        self._out: list[Buffer] = []
        self._queued = 0
        self._unread = False
        self._handed = self._read = 0
        self._read_since = self.last_activity
        self._drained: list[Callable[[], None]] = []
        self._gone: list[Callable[[], None]] | None = []
        """Called when the connection has ended; None afterwards."""
        self._paused = 0
        self._pace: Pace | None = None

    # -- life -------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Called by asyncio when a client has connected."""
        self.transport = transport
        peer = transport.get_extra_info("peername")
        self.peer = f"{peer[0]}:{peer[1]}" if isinstance(peer, tuple) else str(peer)
        self.transport.set_write_buffer_limits(high=WRITE_BUFFER_HIGH)
        refusal = self.server.admit(self)
        if refusal is not None:
            self.closing = True
            transport.write(pack_failure(ErrorCode.NETWORK_EXCEPTION, refusal))  # type: ignore[attr-defined]
            transport.close()

    def connection_lost(self, exc: BaseException | None) -> None:
        """Called by asyncio when the connection has ended, from either side."""
        self.closing = True
        self._out.clear()
        self._wake_drained()
        self._release()
        self.server.sending.forget(self)
        gone, self._gone = self._gone or (), None
        for callback in gone:
            callback()
        self.server.dismiss(self)

    def close(self) -> None:
        """Send the queued answers, then close."""
        if not self.closing:
            self.closing = True
            self.flush()
            self.transport.close()

    def abort(self) -> None:
        """Close at once and drop the answers that the client has not read."""
        self.closing = True
        self.transport.abort()

    # -- bytes in ---------------------------------------------------------------------------

    def get_buffer(self, sizehint: int) -> memoryview:
        """Returns the memory for the next bytes: the frame's own, or the shared scratch buffer."""
        if self._buffer is not None:
            return self._buffer[self._filled : min(len(self._buffer), self._total)]
        size = len(self._carry)
        scratch = self.server.scratch_view
        if size:
            scratch[:size] = self._carry
            return scratch[size:]
        return scratch

    def buffer_updated(self, nbytes: int) -> None:
        """Called by asyncio after `nbytes` arrived in the memory that `get_buffer` returned."""
        self.active = True
        self.server.received_bytes += nbytes
        if self._buffer is not None:
            self._filled += nbytes
            if self._filled >= self._total:
                self._own_frame_complete()
            elif self._filled == len(self._buffer):
                self._grow()
            return
        if self._carry:
            nbytes += len(self._carry)
            self._carry = b""
            self._frames_in_scratch(nbytes, 0)
        else:
            self._frames_in_scratch(nbytes, -1)
        if nbytes == len(self.server.scratch_view) and not self._held and self.pace.used_up():
            self._yield()  # otherwise the next bytes would be read in the same turn

    def _frames_in_scratch(self, end: int, begun: int) -> None:
        """Handle the frames of the scratch buffer; the one at `begun` began in an earlier read."""
        server = self.server
        view, array = server.scratch_view, server.scratch
        pos, more = 0, REQUESTS_AT_ONCE
        while end - pos >= 4:
            (length,) = _unpack_length(view, pos)
            if not 8 <= length <= self._frame_max:
                self._refuse_length(length, view[pos + 4 : end])
                return
            stop = pos + 4 + length
            if stop > end:
                break
            if self.backlogged and not self._stopped:
                self.stop_requests()
                self.when_drained(self.go_on)
            if self.inflight >= server.burst_max or self._stopped:
                self._held, self._carry = True, bytes(view[pos:end])
                return
            if not more:
                if self.pace.used_up():
                    self._held, self._carry = True, bytes(view[pos:end])
                    self._yield()
                    return
                more = REQUESTS_AT_ONCE
            more -= 1
            self._request(array, view, pos + 4, stop)
            if self.closing:
                return
            pos = stop
        if pos < end:
            if pos != begun:
                self._frame_since = server.loop.time()
            self._keep_rest(view, pos, end)

    def _serve(self, served: bool) -> None:
        """Accept all requests of this client, or only those that lead to its login."""
        limit = self.server.limits.frame_bytes_max
        self._served = served
        self._frame_max = limit if served else min(limit, UNAUTHENTICATED_BYTES_MAX)

    def _yield(self) -> None:
        """Take no further request of this client in this turn of the event loop."""
        self._yielding = True
        self._pause()
        self.server.loop.call_soon(self._go_on_in_turn)

    def _go_on_in_turn(self) -> None:
        """Handle the requests that had to wait for this turn, unless something else holds them."""
        self._yielding = False
        if self._held and not self._stopped and self.inflight < self.server.burst_max:
            self._take_held()
        else:
            self._resume()

    def _take_held(self) -> None:
        """Handle the requests that had to wait."""
        if self.closing:
            return
        if not self._held or self._yielding:
            self._resume()
            return
        held, self._carry, self._held = self._carry, b"", False
        self._resume()
        self.server.scratch_view[: len(held)] = held
        self._frames_in_scratch(len(held), -1)

    def _keep_rest(self, view: memoryview, pos: int, end: int) -> None:
        """Keep the head of a frame that has not arrived whole."""
        arrived = end - pos
        total = 4 + _unpack_length(view, pos)[0] if arrived >= 4 else 4
        if self.stranger and self._served and arrived >= HEAD_BYTES:
            (key, _, _) = _unpack_header(view, pos + 4)
            if key in APIS:  # its first request may be larger and slower than a login
                self.server.introduce(self)
        if total <= CARRY_BYTES_MAX or arrived < HEAD_BYTES:
            self._carry = bytes(view[pos:end])
            return
        self._total = total
        self._begin_own_frame(view[pos:end])

    def _begin_own_frame(self, head: Buffer) -> None:
        size = self._capacity(len(head))
        if not self.server.memory.take(self, size):
            self._carry = bytes(head)  # until memory is granted
            self._pause()
            return
        self._array, self._buffer = new_buffer(size)
        self._filled = len(head)
        self._buffer[: self._filled] = head
        self._carry = b""

    def _capacity(self, arrived: int) -> int:
        """Return the memory for a frame of which `arrived` bytes are here; grows with them."""
        if self._total <= 8 * arrived + 64 * 1024:
            return self._total
        return max(64 * 1024, 4 * arrived)

    def _grow(self) -> None:
        assert self._buffer is not None
        size = self._capacity(self._filled)
        if not self.server.memory.take(self, size - len(self._buffer)):
            self._pause()
            return
        array, view = new_buffer(size)
        view[: self._filled] = self._buffer[: self._filled]
        self._array, self._buffer = array, view

    def resume_receive(self) -> None:
        """Continue to receive: memory that this connection waited for was freed."""
        if self.closing:
            return
        self._resume()
        if self._buffer is None:
            self._begin_own_frame(self._carry)
        else:
            self._grow()

    def _own_frame_complete(self) -> None:
        array, view, total = self._array, self._buffer, self._total
        assert view is not None
        self._array = self._buffer = None
        try:
            self._request(array, view, 4, total)
        finally:
            self.server.memory.give(self, len(view))

    def _release(self) -> None:
        if self._buffer is not None:
            size = len(self._buffer)
            self._array = self._buffer = None
            self.server.memory.give(self, size)
        self.server.memory.forget(self)

    def _refuse_length(self, length: int, rest: memoryview) -> None:
        limit = self._frame_max
        log.warning("frame_refused", peer=self.peer, length=length, limit=limit)
        if length >= 8 and len(rest) >= 8:
            (_, _, request_id) = _unpack_header(rest, 0)
            login_at = None if self._served else self.listener.name
            self.respond_error(request_id, *too_long(length, limit, login_at))
        self.close()

    # -- flow control -----------------------------------------------------------------------

    def _pause(self) -> None:
        self._paused += 1
        if self._paused == 1 and not self.transport.is_closing():
            self.transport.pause_reading()

    def _resume(self) -> None:
        self._paused -= 1
        if self._paused == 0 and not self.transport.is_closing():
            self.transport.resume_reading()

    def pause_writing(self) -> None:
        """The client does not read its answers: take no more of its requests."""
        self._unread = True
        self._pause()

    def resume_writing(self) -> None:
        """The client caught up."""
        self._unread = False
        self._resume()
        self.server.sending.note(self, self.unsent_bytes)
        self._wake_drained()

    @property
    def pace(self) -> Pace:
        """The share of this client's long work in the turns of the event loop."""
        if self._pace is None:
            self._pace = Pace(self.server.loop)
        return self._pace

    @property
    def unsent_bytes(self) -> int:
        """Bytes of answers that the client has not read."""
        size: int = self.transport.get_write_buffer_size()
        return size

    def narrow(self, narrow: bool) -> None:
        """Let the client have few unread bytes before it gets no more, or the usual number."""
        high = WRITE_BUFFER_SHORT if narrow else WRITE_BUFFER_HIGH
        self.transport.set_write_buffer_limits(high=high)

    def hold(self, more: int) -> None:
        """Account for `more` bytes of an answer that is being made; negative gives them back."""
        self.server.sending.hold(more)

    @property
    def short(self) -> bool:
        """Clients have left so much unread that answers should be small."""
        return self.server.sending.short

    @property
    def backlogged(self) -> bool:
        """Whether so many bytes wait to be sent that nothing is begun until `when_drained`."""
        if not self._unread and self._queued <= WRITE_BUFFER_SHORT:  # mostly
            return False
        most = WRITE_BUFFER_SHORT if self.short else WRITE_BUFFER_HIGH
        return (self._unread or self._queued > most) and not self.closing

    @property
    def has_room(self) -> bool:
        """Whether a large answer may be made: neither this client nor others left much unread."""
        return not (self.backlogged or self.short)

    def when_drained(self, callback: Callable[[], None]) -> None:
        """Call back once the client has read all answers, or is gone."""
        self._drained.append(callback)

    def when_gone(self, callback: Callable[[], None]) -> None:
        """Call back once the connection has ended; soon, if it has."""
        if self._gone is None:
            self.server.loop.call_soon(callback)
        else:
            self._gone.append(callback)

    async def has_read(self) -> None:
        """Wait until the client has read all answers; `NetworkError` if it is gone."""
        while self.backlogged:
            drained = asyncio.Event()
            self.when_drained(drained.set)
            await drained.wait()
        if self.closing:
            raise NetworkError(f"{self.peer} is gone; nobody waits for the answer")

    async def room(self) -> None:
        """Wait until a large answer may be made; `NetworkError` if the client is gone."""
        await self.has_read()
        while self.short:
            await self.server.sending.changed()
            await self.has_read()

    def _wake_drained(self) -> None:
        waiting, self._drained = self._drained, []
        for callback in waiting:
            self.server.loop.call_soon(callback)

    def overdue(self, now: float) -> str | None:
        """Returns the reason to close this connection now, None if there is none."""
        limits = self.server.limits
        if self.active:
            self.active, self.last_activity = False, now
        begun = self._buffer is not None or self._carry
        if begun and not self._paused and now - self._frame_since > limits.frame_seconds:
            return "a begun frame did not complete in time"
        if self.stranger and now - self.stranger_since > limits.login_seconds:
            return "no login, or no first request, in time"
        unsent = self.unsent_bytes
        read = self._handed - unsent
        if not unsent or read - self._read >= SEND_PROGRESS_BYTES:
            self._read, self._read_since = read, now
        elif now - self._read_since > (limits.short_seconds if self.short else limits.send_seconds):
            return "the client does not read its answers"
        if not self.inflight and not unsent and now - self.last_activity > limits.idle_seconds:
            return "idle"
        return None

    # -- requests ---------------------------------------------------------------------------

    def _request(self, array: Any, view: memoryview, start: int, end: int) -> None:
        key, version, request_id = _unpack_header(view, start)
        server = self.server
        if self.stranger and self._served:
            server.introduce(self)
        raw = server.services.raw.get(key)
        try:
            if raw is not None and self._served:
                api, raw_handler = raw
                if not api.min_version <= version <= api.max_version:
                    self.respond_error(request_id, *unsupported(key, version, api))
                    return
                server.requests[key] += 1
                self.inflight += 1
                if self.inflight == self._inflight_max:
                    self._pause()
                raw_handler(self, request_id, version, array, view, start + 8, end)
                return
            self._ordinary_request(key, version, request_id, view[start + 8 : end])
        except ZuflussError as e:
            self.respond_error(request_id, e.code, e.message)
            self._end(raw)
        except Exception as e:
            log.exception("request_failed", api=key, peer=self.peer)
            refusal = refusal_of(e)
            self.respond_error(request_id, refusal.code, refusal.message)
            self._end(raw)

    def _ordinary_request(self, key: int, version: int, request_id: int, body: memoryview) -> None:
        if key == ApiKey.API_VERSIONS:
            entry: tuple[Api, Handler] | None = self.server.api_versions
        elif key == ApiKey.AUTHENTICATE:
            self._authenticate(request_id, body)
            return
        elif not self._served:
            raise AuthenticationError(
                f"listener {self.listener.name} requires SASL: authenticate before API {key}"
            )
        else:
            entry = self.server.services.handlers.get(key)
        if entry is None:
            self.respond_error(request_id, *unsupported(key, version, None))
            return
        api, handler = entry
        if not api.for_clients and self.listener.name != self.server.internal_listener:
            raise AuthorizationError(
                f"{api.name} is for servers only, through listener "
                f"{self.server.internal_listener or '(none: one process serves both roles)'}"
            )
        if not api.min_version <= version <= api.max_version:
            self.respond_error(request_id, *unsupported(key, version, api))
            return
        if api.for_clients:
            check_control_size(api, len(body))
        if len(body) <= BYTES_AT_ONCE:
            request: Any = decode(api.request, body)
        else:
            request = decode_steps(api.request, bytes(body))
            handler = partial(self._decode_first, handler)
        self.server.requests[key] += 1
        self.inflight += 1
        if self.inflight == self._inflight_max:
            self._pause()
        context = RequestContext(self.principal, self.listener.name, version, self.peer, self)
        self.server.spawn(self._answer(handler, request, context, request_id), self.task_ended)

    async def _answer(
        self, handler: Handler, request: Any, context: RequestContext, request_id: int
    ) -> None:
        try:
            pace = self.pace
            pace.adopt()
            await pace.pause()  # a client may send hundreds of requests at once
            while self.backlogged:  # by the answers to those
                await self.has_read()
                await pace.pause()  # all of them wait for the same moment
            response = await handler(request, context)
            if isinstance(response, EncodedResponse):
                self.respond(request_id, response.buffers, sum(map(len, response.buffers)))
            else:
                self.respond_small(request_id, response.SerializeToString())
        except ZuflussError as e:
            self.respond_error(request_id, e.code, e.message)
        except Exception as e:
            log.exception("request_failed", handler=getattr(handler, "__name__", "?"))
            refusal = refusal_of(e)
            self.respond_error(request_id, refusal.code, refusal.message)
        finally:
            self.done()

    async def _decode_first(
        self, handler: Handler, steps: Iterator[Message | None], context: RequestContext
    ) -> Any:
        """Decode a long request in turns of the event loop, then handle it."""
        return await handler(await self.pace.result(steps), context)

    def task_ended(self, task: asyncio.Task[None]) -> None:
        """End the connection if the task of a request failed: the client has got no answer."""
        problem = None if task.cancelled() else task.exception()
        if problem is not None:
            log.error("request_lost", peer=self.peer, exc_info=problem)
            self.abort()

    def _authenticate(self, request_id: int, body: memoryview) -> None:
        request = decode(m.AuthenticateRequest, body)
        authenticator = self.server.authenticator
        if self.listener.protocol != "sasl" or authenticator is None:
            raise AuthenticationError(
                f"listener {self.listener.name} is plaintext and takes no authentication; "
                "set client.security.protocol=plaintext or use a sasl listener"
            )
        self.server.requests[ApiKey.AUTHENTICATE] += 1
        self._serve(False)
        self.principal = None
        self.server.estrange(self)
        if request.protocol != "PLAIN":
            raise AuthenticationError(
                f"SASL mechanism {request.protocol[:32]!r} is not enabled; use PLAIN"
            )
        self.principal = authenticator.authenticate(request.token)
        self._serve(True)
        self.server.introduce(self)
        self.respond_small(request_id, m.AuthenticateResponse().SerializeToString())

    # -- answers ----------------------------------------------------------------------------

    def _end(self, raw: Any) -> None:
        if raw is not None and self._served:
            self.done()

    def done(self) -> None:
        """One request is answered: a raw handler calls this once per request."""
        if self.inflight == self._inflight_max:
            self._below_limit()
        self.inflight -= 1

    def stop_requests(self) -> None:
        """Take no further request of this client until `go_on`: one takes long, order counts."""
        self._stopped = True
        self._pause()

    def go_on(self) -> None:
        """Take requests of this client again."""
        self._stopped = False
        if self._held and not self._yielding and self.inflight < self._inflight_max:
            self.server.loop.call_soon(self._take_held)
        else:
            self._resume()

    def _below_limit(self) -> None:
        """Continue to read, because there is room for another request."""
        if self._held and not self._stopped and not self._yielding:
            self.server.loop.call_soon(self._take_held)
        else:
            self._resume()

    def at_turn_end(self, work: Callable[[], None]) -> None:
        """Call `work` once at the end of this loop turn, right before the answers leave."""
        self.server.at_turn_end(work)

    def respond(self, request_id: int, buffers: Sequence[Buffer], size: int) -> None:
        """Queue an answer whose body is `buffers`; it leaves at the end of this loop turn."""
        out = self._out
        if not out:
            self.server.has_answers(self)
        self._queued += size
        if size > WRITE_BUFFER_SHORT and not self.closing:
            self.server.sending.note(self, self.unsent_bytes + self._queued)
        out.append(response_header(request_id, size))
        out.extend(buffers)

    def respond_small(self, request_id: int, body: bytes) -> None:
        """`respond` for one short body."""
        out = self._out
        if not out:
            self.server.has_answers(self)
        self._queued += len(body)
        out.append(pack_response(request_id, body))

    def finish(self, request_id: int, body: bytes) -> None:
        """`respond_small`, then `done`: the usual end of a raw request."""
        out = self._out
        if not out:
            self.server.has_answers(self)
        out.append(_pack_header(5 + len(body), SUCCESS, request_id) + body)
        if self.inflight == self._inflight_max:
            self._below_limit()
        self.inflight -= 1

    def respond_error(self, request_id: int, code: int, message: str) -> None:
        """Queue an error frame."""
        if not self._out:
            self.server.has_answers(self)
        self.server.errors[code] = self.server.errors.get(code, 0) + 1
        self._out.append(pack_error(request_id, code, message))

    def flush(self) -> None:
        """Send the answers that this loop turn gathered."""
        out, self._out = self._out, []
        self._queued = 0
        if not out or self.transport.is_closing():
            return
        if len(out) == 1:
            size = len(out[0])
            self.transport.write(out[0])
        elif (size := sum(map(len, out))) <= JOIN_BYTES_MAX:
            self.transport.write(b"".join(out))
        else:
            self.transport.writelines(out)
        self.server.sent_bytes += size
        self._handed += size
        unsent = self.unsent_bytes
        if unsent > WRITE_BUFFER_SHORT or self._unread:
            self.server.sending.note(self, unsent)
        if self._drained and not self._unread:
            self._wake_drained()
