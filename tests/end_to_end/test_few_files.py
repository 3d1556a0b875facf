"""A server that may open few files: connections leave enough of them for logs and tables."""

from __future__ import annotations

import socket
from contextlib import ExitStack
from pathlib import Path

import zufluss
from tests.end_to_end.raw import RawClient
from zufluss.testing.server import DevServer

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
