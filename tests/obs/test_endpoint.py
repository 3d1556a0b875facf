"""The HTTP endpoint: paths, methods, and what the probes answer."""

from __future__ import annotations

import http.client
import json
import socket
import threading
from collections.abc import Iterator

import pytest
from prometheus_client import CollectorRegistry

from tests.servers import free_port
from tests.waiting import WAIT_SECONDS
from zufluss.obs.endpoint import HttpEndpoint, ProbeAnswer
from zufluss.obs.metrics import Sample, SampleCollector, new_registry
from zufluss.threads import ThreadShortageError


class Probes:
    """Answers that a test chooses."""

    health = ProbeAnswer(True, "alive")
    ready = ProbeAnswer(True, "ready")


@pytest.fixture
def probes() -> Probes:
    return Probes()


@pytest.fixture
def registry() -> CollectorRegistry:
    return new_registry()


def serve(registry: CollectorRegistry, probes: Probes, port: int = 0) -> HttpEndpoint:
    return HttpEndpoint(
        registry, "127.0.0.1", port, health=lambda: probes.health, ready=lambda: probes.ready
    )


@pytest.fixture
def endpoint(probes: Probes, registry: CollectorRegistry) -> Iterator[HttpEndpoint]:
    served = serve(registry, probes)
    yield served
    served.close()


def ask(endpoint: HttpEndpoint, path: str, method: str = "GET") -> http.client.HTTPResponse:
    connection = http.client.HTTPConnection("127.0.0.1", endpoint.port, timeout=WAIT_SECONDS)
    connection.request(method, path)
    return connection.getresponse()


def test_an_endpoint_without_a_thread_is_refused_and_gives_its_port_back(
    registry: CollectorRegistry, probes: Probes, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_thread(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    port = free_port()
    with monkeypatch.context() as patched:
        patched.setattr(threading.Thread, "start", no_thread)
        with pytest.raises(ThreadShortageError):
            serve(registry, probes, port)
    serve(registry, probes, port).close()


def test_each_path_has_its_own_answer(endpoint: HttpEndpoint) -> None:
    assert b"process_resident_memory_bytes" in ask(endpoint, "/metrics").read()
    assert json.loads(ask(endpoint, "/health").read())["status"] == "alive"
    assert json.loads(ask(endpoint, "/ready").read())["status"] == "ready"
    assert ask(endpoint, "/ready?verbose=1").status == 200


@pytest.mark.parametrize("path", ["/", "/metric", "/metrics/x", "/healthz", "/favicon.ico"])
def test_an_unknown_path_is_not_found_and_the_known_ones_are_named(
    endpoint: HttpEndpoint, path: str
) -> None:
    answer = ask(endpoint, path)
    assert answer.status == 404
    assert b"/metrics, /health, /ready" in answer.read()


@pytest.mark.parametrize("path", ["/metrics", "/health", "/ready"])
@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "OPTIONS"])
def test_only_get_and_head_are_allowed(endpoint: HttpEndpoint, path: str, method: str) -> None:
    answer = ask(endpoint, path, method)
    assert (answer.status, answer.headers["Allow"]) == (405, "GET, HEAD")
    head = ask(endpoint, path, "HEAD")
    assert (head.status, head.read()) == (200, b"")


def test_a_process_that_is_not_ready_says_why(endpoint: HttpEndpoint, probes: Probes) -> None:
    probes.ready = ProbeAnswer(
        False, "recovering", ("3 of 12 buckets are recovered",), ("a bucket",), {"buckets": 12}
    )
    answer = ask(endpoint, "/ready")
    assert answer.status == 503
    assert json.loads(answer.read()) == {
        "status": "recovering",
        "reasons": ["3 of 12 buckets are recovered"],
        "warnings": ["a bucket"],
        "buckets": 12,
    }
    assert ask(endpoint, "/health").status == 200, "a process that recovers is not restarted"


def test_a_process_that_cannot_read_its_metrics_still_answers_its_probes(
    endpoint: HttpEndpoint, registry: CollectorRegistry
) -> None:
    late: list[bool] = []

    def samples() -> list[Sample]:
        if late:
            raise TimeoutError
        return []

    registry.register(SampleCollector(samples))
    late.append(True)
    answer = ask(endpoint, "/metrics")
    assert answer.status == 503
    assert b"did not read its metrics in time" in answer.read()
    assert ask(endpoint, "/health").status == 200


def test_requests_wait_for_clients_that_say_nothing_and_not_for_long(
    registry: CollectorRegistry, probes: Probes
) -> None:
    silent: list[socket.socket] = []

    def health() -> ProbeAnswer:
        """Only runs when the thread of every silent client has ended."""
        assert [client.recv(1) for client in silent] == [b""] * len(silent)
        return probes.health

    served = HttpEndpoint(
        registry,
        "127.0.0.1",
        0,
        health=health,
        ready=lambda: probes.ready,
        requests_max=1,
        silence_seconds=0.2,
    )
    try:
        for _ in range(3):
            silent.append(socket.create_connection(("127.0.0.1", served.port), WAIT_SECONDS))
        for client in silent:
            client.setblocking(False)
        assert ask(served, "/health").status == 200
        for client in silent:
            client.close()
    finally:
        served.close()
