"""Standbys are killed, paused, and led from, under load; no leader waits for one.

A1 to A4 as in `test_lost_servers.py`, for tables whose buckets have standbys: the rows are in the
shared log whatever a standby has, and a take-over goes on in its log and state.
"""

from __future__ import annotations

import random
import re
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.counts import rounds
from tests.fault.load import DATABASE
from tests.fault.shared_log.load import Traffic
from tests.fault.shared_log.servers import SERVERS, SharedServers
from tests.waiting import eventually
from zufluss.testing.server import DevServer

Own = Callable[[DevServer], None]
TWO = {"table.replication.factor": "2"}


def in_sync(servers: SharedServers, table: str) -> set[int]:
    """The in-sync replicas of the only bucket of a table, as clients are told."""
    answer = servers.metadata((DATABASE, table))
    if answer is None:
        return set()
    (bucket,) = answer.table_metadata[0].bucket_metadata
    return set(bucket.isr)


def await_standbys(servers: SharedServers, traffic: Traffic) -> None:
    for each in traffic.tables:
        name = each.target.name
        eventually(lambda n=name: len(in_sync(servers, n)) == 2, f"{name} has a standby in sync")


def promotions(servers: SharedServers) -> list[tuple[int, int]]:
    """How far each bucket that was led from a standby had been followed, and its end."""
    found = []
    for tablet in servers.tablets.values():
        for line in tablet.log().splitlines():
            if "standby_promoted" in line:
                followed, end = (re.search(rf"{key}\W+(\d+)", line) for key in ("followed", "end"))
                assert followed, line
                assert end, line
                found.append((int(followed[1]), int(end[1])))
    return found


@pytest.mark.slow
def test_a_leader_and_its_disk_are_lost_and_a_standby_goes_on_with_what_it_has(
    own_servers: Own, tmp_path: Path, rng: random.Random
) -> None:
    servers = SharedServers(tmp_path, own_servers)
    traffic = Traffic(servers, rng, logs=1, keyed=2, clients=(), properties=TWO)
    with traffic:
        traffic.progress()
        for _ in range(rounds(2, 60)):
            await_standbys(servers, traffic)
            traffic.progress()
            before = {t: in_sync(servers, t) for t in traffic.leaders()}
            victim = rng.choice(traffic.leading())
            led = [table for table, leader in traffic.leaders().items() if leader == victim]
            count = len(promotions(servers))
            servers.lose(victim)
            traffic.progress()
            for table in led:
                assert servers.leader(DATABASE, table) in before[table] - {victim}
            assert len(promotions(servers)) >= count + len(led), "opened from the disk instead"
            servers.start(victim)
            servers.await_registered(*SERVERS)
    traffic.check()
    print(f"{traffic.acked_rows} rows, {promotions(servers)}")


@pytest.mark.slow
def test_standbys_are_killed_and_paused_and_their_leaders_go_on(
    own_servers: Own, tmp_path: Path, rng: random.Random
) -> None:
    servers = SharedServers(tmp_path, own_servers)
    traffic = Traffic(servers, rng, logs=1, keyed=1, clients=(), properties=TWO)
    with traffic:
        traffic.progress()
        for _ in range(rounds(1, 40)):
            await_standbys(servers, traffic)
            leaders = traffic.leaders()
            (keyed,) = [each.target.name for each in traffic.tables if each.keyed]
            (victim,) = in_sync(servers, keyed) - {leaders[keyed]}
            if rng.random() < 0.5:
                servers.lose(victim)
                traffic.progress()
                servers.start(victim)
            else:
                servers.freeze(victim)
                try:
                    traffic.progress()
                finally:
                    servers.thaw(victim)
            servers.await_registered(*SERVERS)
            assert servers.leader(DATABASE, keyed) == leaders[keyed]
            traffic.progress()
    traffic.check()


@pytest.mark.slow
def test_buckets_with_standbys_are_handed_over_and_their_former_leaders_follow(
    own_servers: Own, tmp_path: Path, rng: random.Random
) -> None:
    servers = SharedServers(tmp_path, own_servers)
    traffic = Traffic(servers, rng, logs=1, keyed=2, clients=(), properties=TWO)
    with traffic:
        traffic.progress()
        for _ in range(rounds(2, 40)):
            await_standbys(servers, traffic)
            victim = rng.choice(traffic.leading())
            servers.tablets[victim].stop()
            traffic.progress()
            servers.start(victim)
            servers.await_registered(*SERVERS)
            traffic.progress()
        await_standbys(servers, traffic)
    traffic.check()
