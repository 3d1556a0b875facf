"""Whoever takes buckets over, or trims a session, is killed at each named step of it.

Promises A1 to A4: the cluster recovers by itself, whether the coordinator dies or the new leader,
even three new leaders one after the other, and nothing acknowledged is lost. A process that died is
started again by whoever looks after it, with an empty disk if it is a tablet server.
"""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.counts import FULL, rounds
from tests.fault.shared_log.load import Traffic
from tests.fault.shared_log.servers import SERVERS, SharedServers
from tests.waiting import eventually
from zufluss.testing.server import DevServer

Own = Callable[[DevServer], None]

OF_THE_COORDINATOR = (
    "wal-close", "wal-seal", "wal-sealed", "wal-assign", "wal-assigned", "wal-takeover",
    "wal-taken-over",
)  # fmt: skip
OF_A_NEW_LEADER = ("wal-recover", "wal-carry", "wal-carried", "wal-adopted")
OF_A_TRIM = ("wal-trim", "wal-trim-carried", "wal-trim-noted", "wal-trimmed")
SHORT = {"zufluss.lookup.lease": "500ms"}
"""A coordinator that was restarted waits ten leases for servers before it gives them up."""


def sampled(steps: tuple[str, ...], count: int, rng: random.Random) -> list[str]:
    """Some of the steps in `make test`, all of them, twenty times, in `make fault`."""
    return list(steps) * 20 if FULL else rng.sample(steps, min(rounds(count, 99), len(steps)))


@pytest.mark.slow
def test_a_coordinator_that_is_killed_at_a_step_of_a_take_over_goes_on_with_it(
    own_servers: Own, tmp_path: Path, rng: random.Random
) -> None:
    servers = SharedServers(tmp_path, own_servers, SHORT)
    traffic = Traffic(servers, rng, logs=2, keyed=2)
    with traffic:
        traffic.progress()
        for step in sampled(OF_THE_COORDINATOR, 2, rng):
            servers.restart_coordinator(f"{step}#1")
            if servers.coordinator.running:  # it may have died while its servers came back
                servers.lose(rng.choice(traffic.leading() or SERVERS))
            assert servers.coordinator.wait() != 0, step
            servers.restart_coordinator()
            traffic.progress()
            start_missing(servers)
            servers.await_registered(*SERVERS)
    traffic.check()


@pytest.mark.slow
def test_a_new_leader_that_is_killed_at_a_step_of_a_take_over_is_replaced(
    own_servers: Own, tmp_path: Path, rng: random.Random
) -> None:
    servers = SharedServers(tmp_path, own_servers, SHORT)
    traffic = Traffic(servers, rng, logs=2, keyed=2)
    with traffic:
        traffic.progress()
        for step in sampled(OF_A_NEW_LEADER, 2, rng):
            victim = rng.choice(traffic.leading())
            following, last = rng.sample([i for i in SERVERS if i != victim], 2)
            servers.lose(following)
            traffic.progress()
            servers.start(following, f"{step}#1")
            servers.await_registered(following)
            servers.lose(victim)
            servers.lose(last)  # so that the other one takes everything over
            assert servers.tablets[following].wait() != 0, step
            servers.lose(following)
            start_missing(servers)
            traffic.progress()
    traffic.check()


@pytest.mark.slow
def test_three_new_leaders_in_a_row_are_killed_and_nothing_is_lost(
    own_servers: Own, tmp_path: Path, rng: random.Random
) -> None:
    """None of them had told the coordinator of what it took over, so sources never chain."""
    everybody = (1, 2, 3, 4, 5)
    servers = SharedServers(tmp_path, own_servers, SHORT, everybody)
    for server_id in everybody[1:]:
        servers.lose(server_id)
        servers.await_gone(server_id)
    traffic = Traffic(servers, rng, logs=1, keyed=1, clients=())
    with traffic:
        for number in range(rounds(1, 20)):
            traffic.progress()
            (leader,) = traffic.leading()
            sources = servers.sources()
            row = [i for i in everybody if i != leader]
            servers.lose(leader)
            for killed in row[:3]:
                step = rng.choice(OF_A_NEW_LEADER[:3])
                servers.start(killed, f"{step}#1")
                assert servers.tablets[killed].wait() != 0, step
                servers.lose(killed)
                assert servers.sources() == sources, f"round {number}: {killed} has changed them"
            servers.start(row[3])
            traffic.progress()
            assert not servers.sources() & sources
    traffic.check()


@pytest.mark.slow
def test_a_server_that_is_killed_at_a_step_of_a_trim_loses_nothing(
    own_servers: Own, tmp_path: Path, rng: random.Random
) -> None:
    """Sessions are short of room, so rounds of trimming follow each other under load."""
    small = {
        **SHORT,
        "zufluss.wal.retained": "1mb",
        "log.segment.file-size": "256kb",
        "remote.log.task-interval-duration": "1s",
    }
    servers = SharedServers(tmp_path, own_servers, small)
    traffic = Traffic(servers, rng, logs=2, keyed=1, clients=(), readers=False)
    with traffic:
        traffic.progress()
        for step in sampled(OF_A_TRIM, 1, rng):
            for server_id in SERVERS:
                servers.lose(server_id, disk=rng.random() < 0.5)
                servers.start(server_id, f"{step}#{rng.randint(1, 2)}")
            died = eventually(
                lambda: [i for i, server in servers.tablets.items() if not server.running],
                f"{step} was reached",
            )
            for server_id in died:
                servers.lose(server_id)
                servers.start(server_id)
            traffic.progress()
    traffic.check(remote=True)


def start_missing(servers: SharedServers) -> None:
    """Start the tablet servers that do not run, all at once."""
    with starting(servers, [i for i, server in servers.tablets.items() if not server.running]):
        pass


@contextmanager
def starting(servers: SharedServers, server_ids: list[int]) -> Iterator[None]:
    """Start servers beside what the block does."""
    threads = [threading.Thread(target=servers.start, args=(i,)) for i in server_ids]
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        for thread in threads:
            thread.join()
