"""The HTTP endpoint of a process: its metrics, and whether it lives and is ready.

| path | answer |
|---|---|
| `/metrics` | the metrics, in a format of Prometheus |
| `/health` | 200 if the process does its work, 503 if it should be restarted |
| `/ready` | 200 if the process takes requests, 503 with the reasons if it does not |

`/health` and `/ready` answer JSON. Other paths are 404, methods other than GET and HEAD are 405.
The endpoint has threads of its own, and the answers to `/health` and `/ready` wait for nobody: a
busy process answers them at once. A scrape of the metrics may wait for the process. At most
`REQUESTS_MAX` requests are served at a time; a client that says nothing for `SILENCE_SECONDS` loses
its connection, so that it keeps nobody waiting.
"""

from __future__ import annotations

import json
import socket
import sys
import threading
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from socketserver import TCPServer, ThreadingMixIn
from typing import TYPE_CHECKING, Any, Final
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer

from zufluss.errors import ConfigError
from zufluss.threads import start

if TYPE_CHECKING:
    from wsgiref.types import StartResponse, WSGIEnvironment

    from prometheus_client import CollectorRegistry

METRICS_PATH: Final = "/metrics"
HEALTH_PATH: Final = "/health"
READY_PATH: Final = "/ready"
PATHS: Final = (METRICS_PATH, HEALTH_PATH, READY_PATH)
METHODS: Final = ("GET", "HEAD")
REQUESTS_MAX: Final = 32
"""Requests, and so threads, at a time; further ones wait."""
SILENCE_SECONDS: Final = 5.0
"""How long a client may take for each part of its request, and to take the answer."""


@dataclass(frozen=True, slots=True)
class ProbeAnswer:
    """The answer to `/health` or `/ready`."""

    ok: bool
    """Whether the status is 200; otherwise 503."""
    status: str
    """One word: `alive`, `stuck`, `ready`, `starting`, `recovering`, `stopping` or `unready`."""
    reasons: tuple[str, ...] = ()
    """Why it is not ok."""
    warnings: tuple[str, ...] = ()
    """Parts that do not work, which is no reason to send requests elsewhere."""
    numbers: Mapping[str, float] = field(default_factory=dict)
    """Further numbers, by name."""

    def document(self) -> dict[str, Any]:
        """The answer as JSON."""
        lists = {"reasons": list(self.reasons), "warnings": list(self.warnings)}
        return {"status": self.status, **lists, **self.numbers}


ReadProbe = Callable[[], ProbeAnswer]
"""Returns an answer at once, in any thread."""


class HttpEndpoint:
    """A registry of metrics and two probes, served over HTTP in threads."""

    def __init__(
        self,
        registry: CollectorRegistry,
        host: str,
        port: int,
        *,
        health: ReadProbe,
        ready: ReadProbe,
        requests_max: int = REQUESTS_MAX,
        silence_seconds: float = SILENCE_SECONDS,
    ) -> None:
        """Raises `ConfigError` if the port is taken, `ThreadShortageError` without a thread."""
        try:
            self._server = _server(host, port, requests_max, silence_seconds)
        except OSError as e:
            raise ConfigError(
                f"zufluss.metrics.port: cannot serve metrics on {host}:{port}: {e.strerror}; "
                "choose another port, 0 takes a free one"
            ) from e
        self._server.set_app(_application(registry, health, ready))
        self.port: int = self._server.server_port
        """The port that the endpoint listens on."""
        self._thread = threading.Thread(
            target=self._server.serve_forever, name="zufluss-http", daemon=True
        )
        try:
            start(self._thread)
        except BaseException:
            self._server.server_close()
            raise

    def close(self) -> None:
        """Stop serving. Not from an event loop that a collector waits for."""
        self._server.stop()
        self._server.server_close()
        self._thread.join()


class _Server(ThreadingMixIn, WSGIServer):
    """A thread for each request, and a limit for their number."""

    daemon_threads = True

    def __init__(self, address: tuple[str, int], requests_max: int, silence_seconds: float) -> None:
        self._slots = threading.Semaphore(requests_max)
        self._silence_seconds = silence_seconds
        self._closing = False
        super().__init__(address, _SilentHandler)

    def stop(self) -> None:
        """Stop to accept requests; one that waits for others is not served."""
        self._closing = True
        self._slots.release()
        self.shutdown()

    def process_request(self, request: Any, client_address: Any) -> None:
        """Serve a request in a thread of its own, as soon as fewer than the limit run."""
        request.settimeout(self._silence_seconds)
        self._slots.acquire()
        if self._closing:
            self.shutdown_request(request)
            return
        try:
            super().process_request(request, client_address)
        except BaseException:  # there was no thread
            self._slots.release()
            raise

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        """Serve a request."""
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._slots.release()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Clients that go away or say nothing are no errors of this process."""
        if not isinstance(sys.exception(), OSError):
            super().handle_error(request, client_address)

    def server_bind(self) -> None:
        """Bind without asking the name service for the name of the host, which may take seconds."""
        TCPServer.server_bind(self)
        self.server_name, self.server_port = str(self.server_address[0]), self.server_address[1]
        self.setup_environ()


def _server(host: str, port: int, requests_max: int, silence_seconds: float) -> _Server:
    """A server on the first address of the host, of IPv4 or IPv6."""
    family, *_ = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
    kind = type("_FamilyServer", (_Server,), {"address_family": family})
    server: _Server = kind((host, port), requests_max, silence_seconds)
    return server


class _SilentHandler(WSGIRequestHandler):
    """Logs no requests: probes come every few seconds."""

    def log_message(self, format: str, *args: Any) -> None:
        """Log nothing."""

    def address_string(self) -> str:
        """The address of the client, without asking the name service."""
        return str(self.client_address[0])


Application = Callable[["WSGIEnvironment", "StartResponse"], Iterable[bytes]]


def _application(registry: CollectorRegistry, health: ReadProbe, ready: ReadProbe) -> Application:
    from prometheus_client import make_wsgi_app

    metrics: Any = make_wsgi_app(registry)
    probes = {HEALTH_PATH: health, READY_PATH: ready}

    def answer(environ: WSGIEnvironment, start_response: StartResponse) -> Iterable[bytes]:
        path, method = environ["PATH_INFO"], environ["REQUEST_METHOD"]
        if path not in PATHS:
            text = f"{path!r:.100} is not served here; there are {', '.join(PATHS)}\n"
            return _reply(start_response, "404 Not Found", text)
        if method not in METHODS:
            text = f"{method:.20} is not allowed; use {' or '.join(METHODS)}\n"
            allowed = [("Allow", ", ".join(METHODS))]
            return _reply(start_response, "405 Method Not Allowed", text, headers=allowed)
        if path in probes:
            probe = probes[path]()
            status = "200 OK" if probe.ok else "503 Service Unavailable"
            text = json.dumps(probe.document()) + "\n"
            body: Iterable[bytes] = _reply(start_response, status, text, "application/json")
            return body if method == "GET" else []
        try:
            body = metrics(environ | {"REQUEST_METHOD": "GET"}, start_response)
        except TimeoutError:
            text = "the process did not read its metrics in time; /health tells whether it lives\n"
            return _reply(start_response, "503 Service Unavailable", text)
        return body if method == "GET" else []

    return answer


def _reply(
    start_response: StartResponse,
    status: str,
    text: str,
    content_type: str = "text/plain; charset=utf-8",
    headers: Iterable[tuple[str, str]] = (),
) -> list[bytes]:
    body = text.encode()
    length = ("Content-Length", str(len(body)))
    start_response(status, [("Content-Type", content_type), length, *headers])
    return [body]
