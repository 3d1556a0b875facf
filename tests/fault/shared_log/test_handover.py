"""Leaders move between live servers under load of every kind, and servers leave one by one.

Promises A1 to A4 while buckets change their leader without a fault: every acknowledged row is there
once, at its offset; each lookup sees what was acknowledged before; and clients notice nothing.
"""

from __future__ import annotations

import random
import threading
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, Self

import pytest

import zufluss
from tests.counts import rounds
from tests.end_to_end.raw import ConnectionEndedError
from tests.fault.load import DATABASE, PyflussWriter
from tests.fault.shared_log.load import HastyWriter, Traffic
from tests.fault.shared_log.servers import SERVERS, SharedServers
from tests.fault.shared_log.test_killed_steps import SHORT, sampled, start_missing
from tests.servers import RoleServer
from tests.waiting import eventually
from zufluss.errors import ZuflussError
from zufluss.model.table import TableBucket
from zufluss.testing.server import DevServer

OF_THE_COORDINATOR = (
    "handover-prepare", "handover-release", "handover-assign", "handover-assigned",
    "handover-adopted",
)  # fmt: skip
OF_THE_LEADER = ("handover-hold", "handover-released")
OF_THE_TARGET = ("wal-recover", "wal-carry", "wal-carried", "wal-adopted")
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
    with traffic, ClientLoad(servers) as client:
        traffic.progress()
        for _ in range(rounds(6, 300)):
            for name, bucket in rng.sample(buckets_of(traffic), 3):
                moved(servers, rng, name, bucket)
            traffic.progress()
        assert servers.ended() == [], "a hand-over ended a session"
    traffic.check()
    assert client.rounds > 10
    assert client.problems == []


class ClientLoad:
    """Upserts, lookups and counts of our client in a thread; every error is one too many."""

    def __init__(self, servers: SharedServers) -> None:
        self.bootstrap = servers.coordinator.bootstrap
        self.rounds = 0
        self.problems: list[str] = []
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._work)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._done.set()
        self._thread.join()

    def _work(self) -> None:
        try:
            with zufluss.connect(self.bootstrap) as connection:
                connection.admin.create_table(
                    "mine", "id INT, v INT", primary_key=["id"], bucket_count=3
                )
                table = connection.table("mine")
                with table.upsert() as writer:
                    while not self._done.wait(0.02):
                        self._once(table, writer)
        except Exception as problem:
            self.problems.append(repr(problem))

    def _once(self, table: Any, writer: Any) -> None:
        """Each row that was acknowledged is looked up at once."""
        self.rounds += 1
        keys = range(self.rounds % 7, 50, 7)
        writer.write([{"id": key, "v": self.rounds} for key in keys])
        writer.flush()
        versions = table.lookup(list(keys)).column("v").to_pylist()
        if set(versions) != {self.rounds}:
            self.problems.append(f"round {self.rounds}: {versions}")


@pytest.mark.slow
def test_servers_that_leave_one_after_the_other_hand_over_all_their_buckets(
    own_servers: Own, tmp_path: Path, rng: random.Random
) -> None:
    """No session is ended by a seal: each server that leaves has closed its own."""
    servers = SharedServers(tmp_path, own_servers)
    traffic = Traffic(servers, rng, logs=2, keyed=2, clients=(PyflussWriter, HastyWriter))
    with traffic, ClientLoad(servers) as client:
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
    assert client.rounds > 10
    assert client.problems == []


@pytest.mark.slow
def test_whoever_is_killed_at_a_step_of_a_hand_over_the_bucket_goes_on(
    own_servers: Own, tmp_path: Path, rng: random.Random
) -> None:
    """The one who dies is the coordinator, the former leader or the next one; disks are lost."""
    servers = SharedServers(tmp_path, own_servers, SHORT)
    traffic = Traffic(servers, rng, logs=2, keyed=2)
    steps = (*OF_THE_COORDINATOR, *OF_THE_LEADER, *OF_THE_TARGET)
    with traffic:
        traffic.progress()
        for step in sampled(steps, 4, rng):
            name, bucket = rng.choice(buckets_of(traffic))
            former, following = kill_at(servers, rng, name, bucket, step)
            victim = servers.coordinator
            if step in OF_THE_LEADER:
                victim = servers.tablets[former]
            elif step in OF_THE_TARGET:
                victim = servers.tablets[following]
            eventually(partial(is_dead, servers, victim, bucket, following), step)
            assert victim.wait() != 0, step
            if victim is servers.coordinator:
                servers.restart_coordinator()
            start_missing(servers)
            servers.await_registered(*SERVERS)
            traffic.progress()
    traffic.check()


def is_dead(
    servers: SharedServers, victim: RoleServer, bucket: TableBucket, following: int
) -> bool:
    """Have a bucket move; it may not be ready for that yet, because somebody was just restarted."""
    if victim.running:
        with suppress(ZuflussError, ConnectionEndedError, OSError):
            servers.move(bucket, following)
    return not victim.running


def kill_at(
    servers: SharedServers, rng: random.Random, name: str, bucket: TableBucket, step: str
) -> tuple[int, int]:
    """Have one of those who hand a bucket over die at a step; the leader and who follows it."""
    former = servers.leader(DATABASE, name, bucket.bucket_id)
    assert former is not None
    following = rng.choice([i for i in SERVERS if i != former])
    if step in OF_THE_COORDINATOR:
        servers.restart_coordinator(f"{step}#1")
        if servers.coordinator.running:
            with suppress(AssertionError):  # it may die while its servers come back
                servers.await_registered(*SERVERS)
        return former, following
    victim = former if step in OF_THE_LEADER else following
    servers.lose(victim)
    servers.await_gone(victim)
    servers.start(victim, f"{step}#1")
    servers.await_registered(victim)
    if step in OF_THE_LEADER:  # what it leads is handed to it first
        servers.move(bucket, victim)
        return victim, next(i for i in SERVERS if i != victim)
    return former, following
