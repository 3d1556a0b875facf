"""Three tablet servers under load, of which one is frozen and killed, over and over.

The rows of the others go on meanwhile; when the server is back, so are its buckets, with every row
that was acknowledged.
"""

from __future__ import annotations

import os
import random
import signal
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import NamedTuple

import pytest

import zufluss
from tests.cluster_of import ClusterServer
from tests.counts import rounds
from tests.end_to_end.raw import RawClient
from tests.fault.history import History, violations
from tests.fault.kv_load import Looker, PutWriter, create_keyed_target, kv_violations
from tests.fault.load import (
    DATABASE,
    DEADLINE_SECONDS,
    Load,
    PyflussWriter,
    RawWriter,
    Reader,
    Target,
    ZuflussWriter,
    create_target,
    read_all,
    read_bucket,
)
from tests.waiting import eventually, unless_away
from zufluss.errors import LeaderNotAvailableError, RequestTimeoutError
from zufluss.testing.server import DevServer

SMALL = {"log.segment.file-size": "256kb"}
SERVERS = (1, 2, 3)


class LoadedServer(NamedTuple):
    """A tablet server with a log table and a primary-key table of one bucket each."""

    port: int
    log: Target
    keyed: Target
    log_load: Load
    keyed_load: Load

    def progresses(self) -> bool:
        """Whether more writes to both tables are acknowledged."""
        loads = (self.log_load, self.keyed_load)
        return all(load.history.wait_for_acks(20, DEADLINE_SECONDS) for load in loads)


@pytest.mark.slow
def test_one_of_three_servers_is_killed_and_the_others_go_on(
    own_servers: Callable[[DevServer], None], tmp_path: Path, rng: random.Random
) -> None:
    cluster = ClusterServer(tmp_path, 3, SMALL)
    own_servers(cluster)
    servers = loaded_servers(cluster, rng)
    spread = create_target(cluster.port, "spread", 6)
    clients = History()
    load = Load(cluster.port, clients)
    for make in (PyflussWriter, ZuflussWriter):
        load.add(make, rng.randrange(1 << 32), spread)
    with ExitStack() as loads:
        loads.enter_context(load)
        for server in servers.values():
            loads.enter_context(server.log_load)
            loads.enter_context(server.keyed_load)
        assert clients.wait_for_acks(20, DEADLINE_SECONDS), "pyfluss begins while all is well"
        for number in range(rounds(2, 20)):
            victim = SERVERS[number % 3]
            name = f"tablet server {victim}"
            started, frozen = len(cluster.starts(name)), cluster.child(name)
            os.kill(frozen, signal.SIGSTOP)
            for i in SERVERS:
                assert i == victim or servers[i].progresses(), f"{i} stands while {victim} does"
            os.kill(frozen, signal.SIGKILL)
            cluster.await_start(name, started + 1)
            assert servers[victim].progresses(), f"the buckets of {victim} did not come back"
            assert clients.wait_for_acks(20, DEADLINE_SECONDS), "clients did not recover"
    for server in servers.values():
        keyed = server.keyed_load
        writers = [worker for worker in keyed.workers if isinstance(worker, PutWriter)]
        assert keyed.history.problems == []
        assert violations(server.log_load.history, read_all(server.port, [server.log])) == []
        assert kv_violations(server.port, server.keyed, writers) == []
    leaders = cluster.leaders(DATABASE, "spread")
    contents = {}
    for bucket in spread.all_buckets:
        with RawClient(servers[leaders[bucket.bucket_id]].port) as client:
            contents[bucket] = read_bucket(client, bucket)
    assert set(leaders.values()) == set(SERVERS)
    assert violations(clients, contents) == []


def loaded_servers(cluster: ClusterServer, rng: random.Random) -> dict[int, LoadedServer]:
    """Create a log table and a primary-key table at each server, and a load of them."""
    logs = {led(cluster, t): t for t in (create_target(cluster.port, f"l{i}", 1) for i in SERVERS)}
    keyed = {
        led(cluster, t): t for t in (create_keyed_target(cluster.port, f"k{i}", 1) for i in SERVERS)
    }
    servers = {}
    for server_id, port in cluster.ports().items():
        log, keys = logs[server_id], keyed[server_id]
        servers[server_id] = LoadedServer(
            port, log, keys, Load(port, History()), Load(port, History())
        )
        for make in (RawWriter, Reader):
            servers[server_id].log_load.add(make, rng.randrange(1 << 32), log)
        for make in (PutWriter, Looker):
            servers[server_id].keyed_load.add(make, rng.randrange(1 << 32), keys)
    return servers


def led(cluster: ClusterServer, target: Target) -> int:
    """The server that leads a table of one bucket."""
    (leader,) = cluster.leaders(DATABASE, target.name).values()
    return leader


def test_the_buckets_of_a_lost_server_are_named_and_come_back(
    own_servers: Callable[[DevServer], None], tmp_path: Path
) -> None:
    """A frozen server is lost to the coordinator, and is not restarted by the supervisor."""
    cluster = ClusterServer(tmp_path, 2)
    own_servers(cluster)
    settings = {"client.request-timeout": "2s"}
    with zufluss.connect(cluster.bootstrap, **settings) as connection:
        admin = connection.admin
        admin.create_table("kept", "id INT, v INT", primary_key=["id"], bucket_count=2)
        with connection.table("kept").upsert() as writer:
            writer.write({"id": list(range(20)), "v": [1] * 20})
        frozen = cluster.child("tablet server 2")
        os.kill(frozen, signal.SIGSTOP)

        def missed() -> list[str]:
            return [
                each.text
                for each in admin.examine_servers()
                if each.subject == "tablet server 2" and "not there" in each.text
            ]

        (finding,) = eventually(lambda: unless_away(missed), "the end of the session")
        assert "1 buckets of fluss.kept are not served" in finding
        with pytest.raises((LeaderNotAvailableError, RequestTimeoutError)) as failure:
            connection.table("kept").scan().to_arrow()
        assert failure.value.retriable
        admin.create_table("elsewhere", "id INT", bucket_count=4)
        assert set(cluster.leaders("fluss", "elsewhere").values()) == {1}
        os.kill(frozen, signal.SIGCONT)
        eventually(lambda: not unless_away(missed), "the return of the server")
        count = eventually(lambda: unless_away(connection.table("kept").count))
        assert count == 20
        admin.create_table("later", "id INT")
        assert set(cluster.leaders("fluss", "later").values()) == {2}, "it leads least"
