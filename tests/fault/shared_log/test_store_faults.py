"""The location of the shared log fails: S3 behind a proxy that injects faults.

Promises A1 to A4 and A6: no session is fenced by an object of its own, nothing is lost or doubled;
requests that arrive after a session was sealed change nothing. While the location is away writers
wait, reads and lookups go on, and nothing has to be restarted afterwards.
"""

from __future__ import annotations

import json
import random
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.counts import rounds
from tests.end_to_end.raw import RawClient
from tests.fault.load import ZuflussWriter
from tests.fault.shared_log.load import Table, Traffic, at_leader
from tests.fault.shared_log.servers import SERVERS, SharedServers
from tests.waiting import eventually
from zufluss.remote.wal import session_directory
from zufluss.testing.proxy import Fault, FaultProxy
from zufluss.testing.s3 import S3Server, properties
from zufluss.testing.server import DevServer

Own = Callable[[DevServer], None]

HELD_SECONDS = 3600.0
"""Requests are held back until the test has them delivered."""
OUTAGE_SECONDS = rounds(0, 60)
"""An outage lasts at least so long, and until lookups were answered meanwhile."""


def more_answers(traffic: Traffic, count: int) -> None:
    """Wait until so many more lookups were answered."""
    before = sum(looker.answers for looker in traffic.lookers)
    eventually(
        lambda: sum(looker.answers for looker in traffic.lookers) > before + count,
        "lookups are answered",
    )


@pytest.fixture
def location(s3: S3Server, proxy: FaultProxy, rng: random.Random) -> dict[str, str]:
    """The options of a location in S3 behind the proxy."""
    uri = s3.bucket(f"b{rng.randrange(1 << 48):x}")
    return {
        "remote.data.dir": f"{uri}/zufluss",
        "zufluss.remote.request-timeout": "5s",  # some requests are never answered
        **properties(proxy.endpoint),
    }


@pytest.fixture
def servers(own_servers: Own, tmp_path: Path, location: dict[str, str]) -> SharedServers:
    """Three servers with that location."""
    return SharedServers(tmp_path, own_servers, location)


def sessions(servers: SharedServers) -> dict[int, tuple[int, str]]:
    """The server and the state of each session on record, by its epoch."""
    known = servers.entries("/wal/sessions/").items()
    records = {int(path.rsplit("/", 1)[1]): json.loads(value) for path, value in known}
    return {epoch: (each["server_id"], each["state"]) for epoch, each in records.items()}


KINDS = {
    "lost answers": [Fault("error_after_success", probability=0.3, path_contains="/wal/")],
    "resets": [Fault("reset", probability=0.3, path_contains="/wal/")],
    "cut answers": [Fault("cut_body", probability=0.3, path_contains="/wal/")],
    "throttling": [Fault("status_503", probability=0.3, path_contains="/wal/")],
    "conflicts": [Fault("status_409", probability=0.3, path_contains="/wal/")],
    "late requests": [Fault("late", probability=0.05, seconds=2.0, path_contains="/wal/")],
}


@pytest.mark.slow
def test_failing_puts_fence_no_session_and_lose_and_double_nothing(
    own_servers: Own,
    tmp_path: Path,
    location: dict[str, str],
    proxy: FaultProxy,
    rng: random.Random,
) -> None:
    """Nobody is given up here: a session that ends was fenced by an object of its own."""
    servers = SharedServers(tmp_path, own_servers, location | {"zufluss.lookup.lease": "60s"})
    begun = sessions(servers)
    assert sorted(begun.values()) == [(server_id, "live") for server_id in SERVERS]
    traffic = Traffic(servers, rng, logs=1, keyed=1, lookers=False)
    kinds = list(KINDS) * rounds(1, 60)
    with traffic:
        traffic.progress()
        for kind in rng.sample(kinds, len(kinds)):
            enough = proxy.hits + rounds(4, 20)
            proxy.set(KINDS[kind])
            eventually(lambda n=enough: proxy.hits >= n, f"{kind} hit something")  # type: ignore[misc]
            traffic.progress(3)
        proxy.set()
        traffic.progress()
    assert sessions(servers) == begun
    traffic.check()


@pytest.mark.slow
def test_a_server_is_lost_while_its_puts_are_held_back_and_arrive_later(
    servers: SharedServers, proxy: FaultProxy, rng: random.Random
) -> None:
    """They arrive when others lead its buckets, before or after it wakes up."""
    traffic = Traffic(servers, rng, logs=2, keyed=1, clients=())
    late = 0
    with traffic:
        traffic.progress()
        for _ in range(rounds(1, 50)):
            victim = rng.choice(traffic.leading())
            mine = f"{session_directory(live_session(servers, victim))}/"
            proxy.set([Fault("late", seconds=HELD_SECONDS, methods=("PUT",), path_contains=mine)])
            eventually(lambda: proxy.held_back > 2, "puts are held back")
            servers.freeze(victim)
            proxy.set()
            servers.await_gone(victim)
            traffic.progress()
            late += proxy.held_back
            for step in rng.sample([proxy.deliver_late, lambda v=victim: servers.thaw(v)], 2):  # type: ignore[misc]
                step()
            servers.await_registered(*SERVERS)
            eventually(lambda: proxy.held_back == 0, "they have arrived")
            traffic.progress()
    traffic.check()
    assert late > 2 * rounds(1, 50)
    print(f"{late} puts arrived after the seal of their session")


def live_session(servers: SharedServers, server_id: int) -> int:
    """The epoch of the session of a server."""
    (epoch,) = (e for e, session in sessions(servers).items() if session == (server_id, "live"))
    return epoch


@pytest.mark.slow
def test_a_take_over_gets_through_a_location_that_fails_now_and_then(
    servers: SharedServers, proxy: FaultProxy, rng: random.Random
) -> None:
    traffic = Traffic(servers, rng, logs=2, keyed=2, clients=(), lookers=False)
    every = rng.choice((4, 5))
    faults = [
        Fault("status_503", probability=1 / every, seed=rng.randrange(99), path_contains="/wal/"),
        Fault("error_after_success", probability=1 / every, seed=rng.randrange(99)),
    ]
    with traffic:
        traffic.progress()
        for _ in range(rounds(1, 50)):
            proxy.set(faults)
            victim = rng.choice(traffic.leading())
            servers.lose(victim)
            traffic.progress()
            proxy.set()
            servers.start(victim)
            servers.await_registered(*SERVERS)
    traffic.check()


@pytest.mark.slow
def test_while_the_location_is_away_writers_wait_and_lookups_and_reads_go_on(
    servers: SharedServers, proxy: FaultProxy, rng: random.Random
) -> None:
    traffic = Traffic(servers, rng, logs=2, keyed=2, clients=(ZuflussWriter,))
    processes = [server.pid for server in servers.tablets.values()]
    with traffic:
        traffic.progress()
        for kind in ("reset", "status_503", "half_open")[: rounds(1, 3)]:
            proxy.set([Fault(kind)])  # type: ignore[arg-type]
            began = time.monotonic()
            more_answers(traffic, 100)
            acked = traffic.acked_rows
            more_answers(traffic, 100)
            while time.monotonic() < began + OUTAGE_SECONDS:
                more_answers(traffic, 100)
            for table in traffic.tables:
                if not table.keyed:
                    at_leader(servers, table.target.name, 0, lambda c, t=table: read_rows(c, t))  # type: ignore[misc]
            assert traffic.acked_rows == acked, "acknowledged without the location"
            proxy.set()
            traffic.progress()
    assert [server.pid for server in servers.tablets.values()] == processes
    assert all(server.running for server in servers.tablets.values())
    traffic.check()


def read_rows(client: RawClient, table: Table) -> None:
    """Rows come from the leader, and their end is known."""
    assert client.end_offset(table.target.table_id) > 0
    assert client.fetch(table.target.table_id, 0).records
