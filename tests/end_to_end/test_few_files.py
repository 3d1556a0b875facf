"""A server that may open few files: connections leave enough of them for logs and tables."""

from __future__ import annotations

import resource
import socket
from contextlib import ExitStack
from pathlib import Path

import zufluss
from tests.end_to_end.raw import RawClient
from zufluss.cluster.examination import Severity
from zufluss.testing.server import DevServer
from zufluss.wire import messages as m
from zufluss.wire.api import ApiKey

FILES = 256


class LimitedServer(DevServer):
    """A server whose hard limit of open files is low."""

    def arguments(self) -> list[str]:
        return ["prlimit", f"--nofile={FILES}:{FILES}", *super().arguments()]


def test_idle_connections_take_no_files_from_logs_and_tables(tmp_path: Path) -> None:
    with LimitedServer(tmp_path) as server, zufluss.connect(server.bootstrap) as conn:
        conn.admin.create_table("fluss.keyed", "id BIGINT, PRIMARY KEY (id)", bucket_count=2)
        conn.admin.create_table("fluss.events", "id BIGINT", bucket_count=2)
        keyed, events = conn.table("fluss.keyed"), conn.table("fluss.events")
        with ExitStack() as open_connections:
            for _ in range(FILES + 50):
                address = ("127.0.0.1", server.port)
                open_connections.enter_context(socket.create_connection(address))
            for _ in range(60):
                assert open_connections.enter_context(RawClient(server.port)).alive()
            with events.append() as appender, keyed.upsert() as upserter:
                appender.write({"id": [1, 2]})
                upserter.write({"id": [1, 2]})
            assert keyed.lookup(2) == {"id": 2}
        with events.append() as appender, keyed.upsert() as upserter:
            appender.write({"id": [3]})
            upserter.write({"id": [3]})
        assert events.scan(stop="latest").to_arrow().num_rows == 3
        assert keyed.lookup(3) == {"id": 3}


def test_a_server_without_a_free_descriptor_says_so(tmp_path: Path) -> None:
    with LimitedServer(tmp_path) as server, RawClient(server.port) as client:
        assert client.alive()  # its connection has a descriptor now
        used = len(list(Path(f"/proc/{server.pid}/fd").iterdir()))
        resource.prlimit(server.pid, resource.RLIMIT_NOFILE, (used, FILES))
        answer = client.call(ApiKey.EXAMINE_SERVER, m.ExamineServerRequest())
        (finding,) = [f for f in answer.findings if f.subject == "descriptors"]
        assert finding.severity == Severity.PROBLEM
        assert "raise the limit" in finding.text
