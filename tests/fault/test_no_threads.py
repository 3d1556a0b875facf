"""A server that can start no thread any more serves all the same.

`threading.Thread.start` may wait for ever for a thread that has no memory, and the threads of
RocksDB and of name lookups end the process if they cannot be started. So all threads run before the
server is ready.
"""

from __future__ import annotations

import random
import resource
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

import zufluss
from tests.conftest import SERVERS
from tests.counts import rounds
from tests.servers import WarmServer, free_port
from zufluss.errors import ZuflussError

BY_ALLOCATOR = "jemalloc_bg_thd"
"""A thread that RocksDB's allocator would like to have, and does without if it gets none."""
TIMER = Counter({"python": 1})
"""RocksDB has a thread for its timer while a database is open; it is not opened without one."""
ROWS = 20_000
WRITES = rounds(30, 100)


@pytest.fixture
def server(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[WarmServer]:
    properties = {
        "remote.data.dirs": f"file://{tmp_path / 'remote'}",
        "zufluss.kv.memory": "8mb",
        "zufluss.kv.flush.log-size": "1mb",
    }
    server = WarmServer(tmp_path / "data", properties, port=free_port())
    request.config.stash.setdefault(SERVERS, []).append(server)
    with server:
        yield server


def threads(server: WarmServer) -> Counter[str]:
    """The threads of a server by the name that the system has for them."""
    tasks = Path(f"/proc/{server.pid}/task")
    names = Counter((task / "comm").read_text().strip() for task in tasks.iterdir())
    del names[BY_ALLOCATOR]
    return names


def use(connection: zufluss.Connection, first: int, count: int) -> None:
    """Write rows to both tables and read them."""
    ids = list(range(first, first + count))
    columns = {"id": ids, "v": ["x" * 200] * count}
    events, rows = connection.table("events"), connection.table("rows")
    with events.append() as appender:
        appender.write(columns)
    with rows.upsert() as upserter:
        upserter.write(columns)
    assert rows.lookup(first) == {"id": first, "v": "x" * 200}


def test_a_server_starts_no_thread_after_its_ready_line(server: WarmServer) -> None:
    at_first = threads(server)
    with zufluss.connect(server.bootstrap) as connection:
        admin = connection.admin
        admin.create_table("events", "id BIGINT, v STRING", bucket_count=2)
        admin.create_table("rows", "id BIGINT, v STRING, PRIMARY KEY (id)", bucket_count=2)
        use(connection, 0, ROWS)  # more than the memory: rows are flushed, evicted and read again
        assert admin.take_kv_snapshots("rows")
        rows = connection.table("rows")
        assert rows.scan(stop="latest").to_arrow().num_rows >= ROWS
        assert connection.table("events").scan(stop="latest").to_arrow().num_rows == ROWS
    assert threads(server) - at_first <= TIMER
    assert at_first["rocksdb:low"] == at_first["rocksdb:high"] == 1


def test_a_server_without_address_space_serves_and_recovers(
    server: WarmServer, rng: random.Random
) -> None:
    with zufluss.connect(server.bootstrap) as connection:
        admin = connection.admin
        admin.create_table("events", "id BIGINT, v STRING", bucket_count=2)
        admin.create_table("rows", "id BIGINT, v STRING, PRIMARY KEY (id)", bucket_count=2)
        use(connection, 0, 10)
        written = 10
        used = int(Path(f"/proc/{server.pid}/statm").read_text().split()[0])
        _, hard = resource.prlimit(server.pid, resource.RLIMIT_AS)
        size = used * resource.getpagesize()
        resource.prlimit(server.pid, resource.RLIMIT_AS, (size, hard))
        for _ in range(WRITES):
            count = rng.choice((1, 10, 100))  # a flush would need a new process
            try:
                use(connection, written, count)
            except ZuflussError as e:
                if not e.retriable:
                    raise
            written += count
        resource.prlimit(server.pid, resource.RLIMIT_AS, (hard, hard))
        use(connection, written, ROWS)
