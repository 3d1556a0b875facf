"""The requests that a server answers: handlers by API key.

Two kinds of handler exist. An ordinary handler is a coroutine from request message to response
message. A raw handler, for the hot path, reads the frame in the receive buffer and answers through
the connection itself. The server advertises the registered APIs and answers all others with
UNSUPPORTED_VERSION.
"""

from __future__ import annotations

import inspect
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from zufluss.wire.api import APIS, Api, ApiKey

if TYPE_CHECKING:
    from zufluss.net.connection import ServerConnection


class Reader(Protocol):
    """Tells handlers whether the client reads large answers, and when it is gone."""

    peer: str
    """Address of the client."""
    software: str
    """The name that the client gave itself in API_VERSIONS; empty if it gave none."""

    @property
    def backlogged(self) -> bool:
        """Whether the client has not yet read the answers it was sent."""

    @property
    def short(self) -> bool:
        """Whether clients have left so much unread that answers should be small."""

    @property
    def has_room(self) -> bool:
        """Whether a large answer may be made now."""

    async def has_read(self) -> None:
        """Wait until the client has read its answers; raises `NetworkError` if it is gone."""

    async def room(self) -> None:
        """Wait until there is room for a large answer; raises `NetworkError` if it is gone."""

    def when_gone(self, callback: Callable[[], None]) -> None:
        """Call back once the connection has ended, from either side."""


class _AlwaysReads:
    """The reader of a call within the process, which is never behind."""

    peer = "this process"
    software = ""
    backlogged = short = False
    has_room = True

    async def has_read(self) -> None:
        """Return at once: a caller in this process has no answers to read."""

    async def room(self) -> None:
        """Return at once: the answer stays in this process."""

    def when_gone(self, callback: Callable[[], None]) -> None:
        """Register nothing: a caller in this process never disconnects."""


_ALWAYS_READS = _AlwaysReads()


@dataclass(frozen=True, slots=True)
class RequestContext:
    """The user, the listener and the version of a request."""

    principal: str | None
    """Authenticated user, or None on a plaintext listener."""
    listener: str
    """Name of the listener the request arrived on."""
    api_version: int
    """Version of the API the client chose."""
    peer: str
    """Address of the client, for logs."""
    reader: Reader = _ALWAYS_READS
    """For handlers with large answers, and for those that hold something for the client."""


class EncodedResponse(NamedTuple):
    """A response message that its handler has encoded: large ones are not copied again."""

    buffers: Sequence[bytes | bytearray | memoryview]
    """The bytes of the message, to be sent in turn."""


Handler = Callable[[Any, RequestContext], Awaitable[Any]]
"""Returns a response message, or an `EncodedResponse`."""


class RawHandler(Protocol):
    """A hot-path handler; the body of the request is `view[start:end]`.

    `array` and `view` are the same memory, valid during the call only. The handler answers with
    `connection.respond`, now or later, and then calls `connection.done`. All handlers repeat this
    list of parameters, because an object for them would cost more than the call.
    """

    def __call__(
        self,
        connection: ServerConnection,
        request_id: int,
        version: int,
        array: Any,
        view: memoryview,
        start: int,
        end: int,
    ) -> None:
        """Handle one request."""


class Services:
    """The handlers of one server process."""

    def __init__(self) -> None:
        self.handlers: dict[int, tuple[Api, Handler]] = {}
        self.raw: dict[int, tuple[Api, RawHandler]] = {}

    def register(self, key: int, handler: Handler) -> None:
        """Answer API `key` with a coroutine."""
        self._check_free(key)
        self.handlers[int(key)] = (APIS[int(key)], handler)

    def attach(self, service: object) -> None:
        """Answer with the handlers of `service`: methods that are named like APIs (`create_table`).

        TypeError for a method with such a name that does not take a request and its context, and
        for an object without a handler.
        """
        handlers = {key: getattr(service, key.name.lower(), None) for key in ApiKey}
        attached = {key: handler for key, handler in handlers.items() if handler is not None}
        for key, handler in attached.items():
            if not _is_handler(handler):
                raise TypeError(f"{handler!r} has the name of an API but is not its handler")
            self.register(key, handler)
        if not attached:
            raise TypeError(f"{service!r} has no handler of an API")

    def register_raw(self, key: int, handler: RawHandler) -> None:
        """Answer API `key` from the receive buffer."""
        self._check_free(key)
        self.raw[int(key)] = (APIS[int(key)], handler)

    def _check_free(self, key: int) -> None:
        if int(key) in self.handlers or int(key) in self.raw:
            raise ValueError(f"{APIS[int(key)].name} has a handler already")

    def advertised(self) -> list[Api]:
        """The APIs this server answers, by key."""
        known = [api for api, _ in self.handlers.values()] + [api for api, _ in self.raw.values()]
        return sorted(known, key=lambda api: api.key)


def _is_handler(method: object) -> bool:
    """Whether a method is a coroutine of a request and its context."""
    if not inspect.iscoroutinefunction(method):
        return False
    names = list(inspect.signature(method).parameters)
    return len(names) == 2 and names[0] == "request"
