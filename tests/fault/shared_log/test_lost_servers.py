"""Tablet servers are killed and lose their disks, over and over, under load of every kind.

Promises A1 to A4 of a cluster whose rows are durable in the shared log: whatever is lost with a
server, every acknowledged row is there once, at its offset; lookups are the result of applying the
changelog, and each of them sees what was acknowledged before.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.counts import rounds
from tests.fault.load import PyflussWriter, ZuflussWriter
from tests.fault.shared_log.load import Traffic
from tests.fault.shared_log.servers import SERVERS, SharedServers
from zufluss.testing.server import DevServer

Own = Callable[[DevServer], None]


@pytest.mark.slow
def test_a_server_and_its_disk_are_lost_and_every_acknowledged_row_stays(
    own_servers: Own, tmp_path: Path, rng: random.Random
) -> None:
    """Sometimes the server comes back at once, empty, sometimes after others took over."""
    servers = SharedServers(tmp_path, own_servers)
    traffic = Traffic(servers, rng)
    with traffic:
        traffic.progress()
        for _ in range(rounds(3, 200)):
            victim = rng.choice(traffic.leading())
            at_once = rng.random() < 0.4
            servers.lose(victim)
            if not at_once:
                traffic.progress()
            servers.start(victim)
            servers.await_registered(*SERVERS)
            traffic.progress()
    traffic.check()
    print(f"{traffic.acked_rows} rows, {sum(x.answers for x in traffic.lookers)} lookups")


@pytest.mark.slow
def test_two_servers_of_three_are_lost_one_after_the_other_and_the_last_has_everything(
    own_servers: Own, tmp_path: Path, rng: random.Random
) -> None:
    servers = SharedServers(tmp_path, own_servers)
    traffic = Traffic(servers, rng, logs=2, keyed=2)
    with traffic:
        traffic.progress()
        for _ in range(rounds(1, 20)):
            order = rng.sample(SERVERS, 3)
            for victim in order[:2]:
                servers.lose(victim)
                if rng.random() < 0.5:
                    traffic.progress()
            traffic.progress()
            assert set(traffic.leaders().values()) == {order[2]}
            for victim in order[:2]:
                servers.start(victim)
            servers.await_registered(*SERVERS)
    traffic.check()


@pytest.mark.slow
def test_pyfluss_goes_on_at_another_server_and_when_one_comes_back_without_its_disk(
    own_servers: Own, tmp_path: Path, rng: random.Random
) -> None:
    servers = SharedServers(tmp_path, own_servers)
    clients = (PyflussWriter, ZuflussWriter)
    traffic = Traffic(servers, rng, logs=1, keyed=0, clients=clients)
    with traffic:
        traffic.progress()
        for number in range(rounds(2, 40)):
            victim = SERVERS[number % 3]
            servers.lose(victim)
            if number % 2 == 0:
                traffic.progress()
            servers.start(victim)
            traffic.progress()
    traffic.check()
