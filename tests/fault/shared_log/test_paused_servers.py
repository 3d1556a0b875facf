"""A tablet server is stopped for longer than its session, and wakes when others lead its buckets.

Promises A2, A4 and A6: what it has under way is acknowledged to nobody, no offset has two contents,
and lookups that reached it meanwhile give no row that is older than what others acknowledged.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.counts import rounds
from tests.fault.shared_log.load import Traffic
from tests.fault.shared_log.servers import SERVERS, SharedServers
from tests.waiting import eventually
from zufluss.testing.server import DevServer

Own = Callable[[DevServer], None]

FROZEN_SECONDS = 4.0
"""Twice the silence after which these servers are given up; the length of the pause is the fault.
"""


@pytest.mark.slow
def test_a_stopped_server_wakes_up_and_nothing_is_lost_doubled_or_stale(
    own_servers: Own, tmp_path: Path, rng: random.Random
) -> None:
    servers = SharedServers(tmp_path, own_servers)
    traffic = Traffic(servers, rng)
    refusals = 0
    with traffic:
        traffic.progress()
        for _ in range(rounds(2, 200)):
            victim = rng.choice(traffic.leading())
            servers.freeze(victim)
            frozen = time.monotonic()
            servers.await_gone(victim)
            traffic.progress()
            while time.monotonic() < frozen + FROZEN_SECONDS:
                traffic.progress()
            asked = [x for x in traffic.lookers if x.server_id == victim]
            before = [x.refusals_seen for x in asked]
            servers.thaw(victim)
            eventually(
                lambda a=asked, b=before: all(  # type: ignore[misc]
                    x.refusals_seen > seen for x, seen in zip(a, b, strict=True)
                ),
                "the woken server refuses the lookups that came meanwhile",
            )
            refusals += sum(x.refusals_seen for x in asked) - sum(before)
            servers.await_registered(*SERVERS)
            traffic.progress()
    traffic.check()
    answers = sum(looker.answers for looker in traffic.lookers)
    print(f"{traffic.acked_rows} rows, {answers} lookups answered, {refusals} refused on waking")


@pytest.mark.slow
def test_short_pauses_of_servers_and_coordinator_lose_nothing(
    own_servers: Own, tmp_path: Path, rng: random.Random
) -> None:
    """Some end before the lease, some behind it, some when the session is nearly over."""
    servers = SharedServers(tmp_path, own_servers)
    traffic = Traffic(servers, rng, logs=2, keyed=2)
    with traffic:
        traffic.progress()
        for _ in range(rounds(3, 400)):
            process = rng.choice([servers.coordinator, *servers.tablets.values()])
            servers.pause(process, rng.uniform(0.2, 2.5))
            if rng.random() < 0.5:
                traffic.progress(3)
        servers.await_registered(*SERVERS)
        traffic.progress()
    traffic.check()
