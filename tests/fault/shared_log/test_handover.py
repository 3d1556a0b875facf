"""Leaders move between live servers under load of every kind, and servers leave one by one.

Promises A1 to A4 while buckets change their leader without a fault: every acknowledged row is there
once, at its offset; each lookup sees what was acknowledged before; and clients notice nothing.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.counts import rounds
from tests.fault.load import DATABASE, PyflussWriter
from tests.fault.shared_log.load import HastyWriter, Traffic
from tests.fault.shared_log.servers import SERVERS, SharedServers
from zufluss.model.table import TableBucket
from zufluss.testing.server import DevServer

Own = Callable[[DevServer], None]


def buckets_of(traffic: Traffic) -> list[tuple[str, TableBucket]]:
    """Every bucket under load with the name of its table."""
    tables = [(each.target.name, each.target.bucket(0)) for each in traffic.tables]
    if traffic.clients is None:
        return tables
    return tables + [(traffic.spread.name, bucket) for bucket in traffic.spread.all_buckets]


def moved(
    servers: SharedServers, rng: random.Random, name: str, bucket: TableBucket
) -> tuple[int, int]:
    """Have another server lead a bucket; the former leader and the new one."""
    leader = servers.leader(DATABASE, name, bucket.bucket_id)
    assert leader is not None
    target = rng.choice([i for i in servers.tablets if i != leader])
    servers.move(bucket, target)
    return leader, target


@pytest.mark.slow
def test_leaders_move_under_load_and_no_row_is_lost_doubled_or_stale(
    own_servers: Own, tmp_path: Path, rng: random.Random
) -> None:
    servers = SharedServers(tmp_path, own_servers)
    traffic = Traffic(servers, rng, logs=2, keyed=2, clients=(PyflussWriter, HastyWriter))
    with traffic:
        traffic.progress()
        for _ in range(rounds(6, 300)):
            for name, bucket in rng.sample(buckets_of(traffic), 3):
                moved(servers, rng, name, bucket)
            traffic.progress()
        assert servers.ended() == [], "a hand-over ended a session"
    traffic.check()


@pytest.mark.slow
def test_servers_that_leave_one_after_the_other_hand_over_all_their_buckets(
    own_servers: Own, tmp_path: Path, rng: random.Random
) -> None:
    """No session is ended by a seal: each server that leaves has closed its own."""
    servers = SharedServers(tmp_path, own_servers)
    traffic = Traffic(servers, rng, logs=2, keyed=2, clients=(PyflussWriter, HastyWriter))
    with traffic:
        traffic.progress()
        for _ in range(rounds(1, 30)):
            for server_id in SERVERS:
                servers.tablets[server_id].stop()
                assert server_id not in traffic.leaders().values()
                traffic.progress()
                servers.start(server_id)
                servers.await_registered(server_id)
        assert "buckets_taken_over" not in servers.coordinator.log()
    traffic.check()
