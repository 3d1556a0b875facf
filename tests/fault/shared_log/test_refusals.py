"""What a cluster with a shared log refuses: locations, durabilities, requests to non-leaders."""

from __future__ import annotations

import http.client
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from tests.end_to_end.kv import PUT_VERSION, kv_batch, put_request
from tests.end_to_end.raw import RawClient
from tests.fault.kv_load import CODEC, create_keyed_target
from tests.fault.load import create_target, encode, rows
from tests.fault.shared_log.load import at_leader
from tests.fault.shared_log.servers import SERVERS, SharedServers
from zufluss.errors import ErrorCode, ZuflussError
from zufluss.testing.s3 import S3Server, properties
from zufluss.testing.server import DevServer
from zufluss.wire import messages as m
from zufluss.wire.api import ApiKey

Own = Callable[[DevServer], None]
LOCAL = {"zufluss.log.durability": "local"}


class Relay(BaseHTTPRequestHandler):
    """Passes requests on to S3, without the condition of puts; `racing` looks before it puts."""

    protocol_version = "HTTP/1.1"
    target = 0
    racing = False

    def relay(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        condition = self.headers.get("If-None-Match")
        if self.racing and condition and self._ask("HEAD", b"", {}) != 404:
            self._answer(412, b"", [])
            return
        headers = {k: v for k, v in self.headers.items() if k.lower() != "if-none-match"}
        connection = http.client.HTTPConnection("127.0.0.1", self.target)
        connection.request(self.command, self.path, body, headers)
        answer = connection.getresponse()
        content = answer.read()
        self._answer(answer.status, content, answer.getheaders())
        connection.close()

    do_GET = do_PUT = do_POST = do_HEAD = do_DELETE = relay

    def _ask(self, method: str, body: bytes, headers: dict[str, str]) -> int:
        connection = http.client.HTTPConnection("127.0.0.1", self.target)
        connection.request(method, self.path, body, headers)
        status = connection.getresponse().status
        connection.close()
        return status

    def _answer(self, status: int, content: bytes, headers: list[tuple[str, str]]) -> None:
        self.send_response_only(status)
        for name, value in headers:
            if name.lower() not in ("content-length", "connection", "transfer-encoding"):
                self.send_header(name, value)
        length = {k.lower(): v for k, v in headers}.get("content-length", "0")
        head = self.command == "HEAD"
        self.send_header("Content-Length", length if head else str(len(content)))
        self.end_headers()
        if not head:
            self.wfile.write(content)

    def log_message(self, *arguments: object) -> None:
        """Say nothing."""


@contextmanager
def relay_to(port: int, *, racing: bool) -> Iterator[str]:
    """The address of a proxy before S3 that does not keep the promise of conditional puts."""
    handler = type("Handler", (Relay,), {"target": port, "racing": racing})
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        server.daemon_threads = True
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_address[1]}"
        finally:
            server.shutdown()
            thread.join()


@pytest.mark.slow
@pytest.mark.parametrize("racing", [False, True], ids=["ignores", "races"])
def test_a_location_without_safe_conditional_puts_is_refused_by_its_name(
    own_servers: Own, tmp_path: Path, racing: bool
) -> None:
    """Always moto: the relay breaks the signatures of requests, which other servers check."""
    with S3Server() as s3, relay_to(s3.port, racing=racing) as endpoint:
        uri = s3.bucket(f"unsafe-{racing}".lower())
        location = {"remote.data.dir": f"{uri}/zufluss", **properties(endpoint)}
        servers = SharedServers(tmp_path, own_servers, location, servers=())
        with pytest.raises(RuntimeError, match="If-None-Match") as caught:
            servers.tablet(1).start()
    assert f"{uri}/zufluss" in str(caught.value)


def test_servers_with_differing_durability_are_refused(own_servers: Own, tmp_path: Path) -> None:
    remote, local = tmp_path / "remote", tmp_path / "local"
    remote.mkdir()
    local.mkdir()
    servers = SharedServers(remote, own_servers, servers=(1,))
    with pytest.raises(RuntimeError, match="durability of tablet server 2 is local, but remote"):
        servers.tablet(2, zufluss__log__durability="local").start()
    others = SharedServers(local, own_servers, LOCAL, servers=(1,))
    with pytest.raises(RuntimeError, match="durability of tablet server 2 is remote, but local"):
        others.tablet(2, zufluss__log__durability="remote").start()


@pytest.mark.parametrize(("first", "then"), [("local", "remote"), ("remote", "local")])
def test_a_cluster_with_tables_keeps_its_durability_when_it_is_started_again(
    own_servers: Own, tmp_path: Path, first: str, then: str
) -> None:
    servers = SharedServers(tmp_path, own_servers, {"zufluss.log.durability": first}, (1,))
    create_target(servers.coordinator.port, "t", 1)
    coordinator = servers.coordinator
    coordinator.kill()
    coordinator.properties["zufluss.log.durability"] = then
    with pytest.raises(RuntimeError, match=f"tables of this cluster were created with {first}"):
        coordinator.start()
    coordinator.properties["zufluss.log.durability"] = first
    coordinator.start()


@pytest.mark.parametrize("durability", ["local", "remote"])
def test_a_replication_factor_above_one_is_refused(
    own_servers: Own, tmp_path: Path, durability: str
) -> None:
    servers = SharedServers(tmp_path, own_servers, {"zufluss.log.durability": durability}, (1,))
    with pytest.raises(ZuflussError, match="replication"):
        create_target(servers.coordinator.port, "t", 1, {"table.replication.factor": "2"})


def test_servers_that_do_not_lead_a_bucket_refuse_everything_with_error_12(
    own_servers: Own, tmp_path: Path
) -> None:
    servers = SharedServers(tmp_path, own_servers)
    port = servers.coordinator.port
    log, keyed = create_target(port, "log", 1), create_keyed_target(port, "keyed", 1)
    codes: dict[str, set[int]] = {}
    for target in (log, keyed):
        leader = servers.leader("crash", target.name)
        for server_id in SERVERS:
            if server_id == leader:
                continue
            with RawClient(servers.tablets[server_id].port) as client:
                requests: dict[str, tuple[int, object, int]] = {}
                if target is log:
                    data = encode(rows(0, 1, 10))
                    codes.setdefault("produce", set()).add(
                        client.produce(log.table_id, data).error_code
                    )
                else:
                    batch = kv_batch([CODEC.put((1, 1, "a"))])
                    put = put_request(keyed.table_id, batch)
                    lookup = m.LookupRequest(table_id=keyed.table_id)
                    lookup.buckets_req.add(bucket_id=0, keys=[CODEC.key((1,))])
                    requests = {
                        "put": (ApiKey.PUT_KV, put, PUT_VERSION),
                        "lookup": (ApiKey.LOOKUP, lookup, 1),
                    }
                for name, (key, request, version) in requests.items():
                    (entry,) = client.call(key, request, version).buckets_resp  # type: ignore[arg-type]
                    codes.setdefault(name, set()).add(entry.error_code)
                codes.setdefault("fetch", set()).add(client.fetch(target.table_id).error_code)
    assert codes.keys() == {"produce", "put", "lookup", "fetch"}
    assert set().union(*codes.values()) == {ErrorCode.NOT_LEADER_OR_FOLLOWER}
    for target in (log, keyed):
        end = at_leader(servers, target.name, 0, lambda c, t=target: c.end_offset(t.table_id))  # type: ignore[misc]
        assert end == 0
