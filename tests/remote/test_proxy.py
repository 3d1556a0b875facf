"""The fault proxy: each fault has its documented effect on the chosen requests, repeatably."""

import http.client
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread

import pytest

from tests.waiting import WAIT_SECONDS, eventually
from zufluss.testing.proxy import Fault, FaultProxy, Seen

BODY = b"0123456789" * 1000


class Echo(BaseHTTPRequestHandler):
    """Answers with what it got, or with `BODY`."""

    protocol_version = "HTTP/1.1"
    got: list[str]

    def handle_any(self) -> None:
        self.got.append(f"{self.command} {self.path}")
        body = self.rfile.read(int(self.headers.get("Content-Length", 0))) or BODY
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    do_GET = do_PUT = do_HEAD = handle_any

    def log_message(self, format: str, *arguments: object) -> None:
        """Say nothing."""


@pytest.fixture
def got() -> list[str]:
    return []


@pytest.fixture
def proxy(got: list[str]) -> Iterator[FaultProxy]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), type("Handler", (Echo,), {"got": got}))
    thread = Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        with FaultProxy("127.0.0.1", server.server_port) as proxy:
            yield proxy
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def ask(
    proxy: FaultProxy, method: str = "GET", path: str = "/a", body: bytes | None = None
) -> tuple[int, bytes]:
    connection = http.client.HTTPConnection("127.0.0.1", proxy.port, timeout=WAIT_SECONDS)
    try:
        connection.request(method, path, body)
        answer = connection.getresponse()
        return answer.status, answer.read()
    finally:
        connection.close()


def test_without_faults_everything_passes(proxy: FaultProxy) -> None:
    assert ask(proxy) == (200, BODY)
    assert ask(proxy, "HEAD") == (200, b"")
    big = BODY * 200
    assert ask(proxy, "PUT", "/b?c", big) == (200, big)
    assert list(proxy.seen) == [
        Seen("GET", "/a", ()),
        Seen("HEAD", "/a", ()),
        Seen("PUT", "/b?c", ()),
    ]


def test_one_connection_carries_many_requests(proxy: FaultProxy, got: list[str]) -> None:
    connection = http.client.HTTPConnection("127.0.0.1", proxy.port, timeout=WAIT_SECONDS)
    proxy.set([Fault("status_503", every=2)])
    for status in (200, 503, 200, 503):
        connection.request("PUT", "/a", b"x" * 100_000)
        answer = connection.getresponse()
        answer.read()
        assert answer.status == status
    connection.close()
    assert len(got) == 2


def test_a_fault_of_each_request_spares_its_retry(proxy: FaultProxy) -> None:
    proxy.set([Fault("status_503", once=True)])
    statuses = [ask(proxy, method, "/a")[0] for method in ("GET", "GET", "PUT", "GET", "PUT")]
    assert statuses == [503, 200, 503, 200, 200]


def test_a_refused_request_does_not_reach_the_service(proxy: FaultProxy, got: list[str]) -> None:
    proxy.set([Fault("status_503")])
    status, body = ask(proxy, "PUT", "/a", b"x")
    assert status == 503
    assert b"SlowDown" in body
    proxy.set([Fault("status_403")])
    status, body = ask(proxy, "PUT", "/a", b"x")
    assert status == 403
    assert b"ExpiredToken" in body
    proxy.set([Fault("reset")])
    with pytest.raises(ConnectionError):
        ask(proxy)
    assert got == []


def test_an_error_after_success_reaches_the_service(proxy: FaultProxy, got: list[str]) -> None:
    proxy.set([Fault("error_after_success")])
    assert ask(proxy, "PUT", "/a", b"x")[0] == 500
    assert got == ["PUT /a"]


def test_a_late_request_reaches_the_service_after_its_client_has_gone(
    proxy: FaultProxy, got: list[str]
) -> None:
    proxy.set([Fault("late", seconds=0.3, count=1)])
    connection = http.client.HTTPConnection("127.0.0.1", proxy.port, timeout=0.05)
    connection.request("PUT", "/late", b"x" * 100_000)
    with pytest.raises(TimeoutError):
        connection.getresponse()
    connection.close()
    assert ask(proxy, "PUT", "/after", b"x")[0] == 200
    assert proxy.held_back == 1
    eventually(lambda: proxy.held_back == 0, "the late request was delivered")
    assert got == ["PUT /after", "PUT /late"]


def test_a_cut_answer_ends_in_its_middle(proxy: FaultProxy) -> None:
    proxy.set([Fault("cut_body")])
    with pytest.raises(http.client.IncompleteRead) as caught:
        ask(proxy)
    assert caught.value.partial == BODY[: len(BODY) // 2]


def test_an_answer_without_a_body_is_cut_in_its_first_line(
    proxy: FaultProxy, got: list[str]
) -> None:
    """An S3 server answers a put without a body; cut behind its head it would be a whole answer."""
    proxy.set([Fault("cut_body")])
    with pytest.raises(http.client.HTTPException):
        ask(proxy, "HEAD", "/a")
    assert got == ["HEAD /a"]


def test_requests_that_are_held_back_are_delivered_when_the_test_says_so(
    proxy: FaultProxy, got: list[str]
) -> None:
    proxy.set([Fault("late", seconds=3600, count=1)])
    connection = http.client.HTTPConnection("127.0.0.1", proxy.port, timeout=0.05)
    connection.request("PUT", "/late", b"x")
    with pytest.raises(TimeoutError):
        connection.getresponse()
    connection.close()
    assert ask(proxy, "PUT", "/after", b"x")[0] == 200
    assert got == ["PUT /after"]
    proxy.deliver_late()
    eventually(lambda: proxy.held_back == 0, "the late request was delivered")
    assert got == ["PUT /after", "PUT /late"]
    assert proxy.hits == 1


def test_a_half_open_connection_gives_no_answer_and_does_not_hinder_the_end(
    proxy: FaultProxy, got: list[str]
) -> None:
    proxy.set([Fault("half_open")])
    connection = http.client.HTTPConnection("127.0.0.1", proxy.port, timeout=0.05)
    connection.request("GET", "/a")
    with pytest.raises(TimeoutError):
        connection.getresponse()
    connection.close()
    assert got == []


def test_slow_answers_are_whole(proxy: FaultProxy) -> None:
    proxy.set([Fault("latency", seconds=0.01), Fault("bandwidth", bytes_per_second=1_000_000)])
    assert ask(proxy) == (200, BODY)
    assert proxy.seen[-1].faults == ("latency", "bandwidth")


def test_a_fault_hits_the_requests_it_is_told_to(proxy: FaultProxy) -> None:
    proxy.set([Fault("status_503", methods=("PUT",), path_contains="b", count=1)])
    asked = [("GET", "/b"), ("PUT", "/a"), ("PUT", "/b"), ("PUT", "/b")]
    assert [ask(proxy, method, path, b"1")[0] for method, path in asked] == [200, 200, 503, 200]


def test_a_probability_is_drawn_from_the_seed(proxy: FaultProxy) -> None:
    def drawn(seed: int) -> list[int]:
        proxy.set([Fault("status_503", probability=0.5, seed=seed)])
        return [ask(proxy)[0] for _ in range(30)]

    first = drawn(1)
    assert drawn(1) == first
    assert drawn(2) != first
    assert {200, 503} == set(first)
