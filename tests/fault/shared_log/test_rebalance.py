"""A cluster grows from one tablet server to three, and is emptied again, under load.

Promises A1 to A4 while a rebalance moves leaders: nothing acknowledged is lost, doubled or stale,
and the next coordinator goes on with what one that was killed has begun.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest

import zufluss
from tests.counts import rounds
from tests.fault.load import PyflussWriter
from tests.fault.shared_log.load import HastyWriter, Traffic
from tests.fault.shared_log.servers import SharedServers
from tests.waiting import eventually
from zufluss.model.rebalance import RebalanceStatus, ServerTag
from zufluss.testing.server import DevServer

Own = Callable[[DevServer], None]


def rebalanced(servers: SharedServers, *, kill: bool = False) -> None:
    """Rebalance, and perhaps kill the coordinator meanwhile."""
    with zufluss.connect(servers.coordinator.bootstrap) as connection:
        connection.admin.rebalance()
        if kill:
            eventually(lambda: connection.admin.rebalance_progress().ended > 0)
            servers.restart_coordinator()
    with zufluss.connect(servers.coordinator.bootstrap) as connection:
        eventually(lambda: connection.admin.rebalance_progress().has_ended)
        progress = connection.admin.rebalance_progress()
        assert progress.status is RebalanceStatus.COMPLETED, progress
        assert connection.admin.plan_rebalance().moves == []


@pytest.mark.slow
def test_new_servers_get_their_share_under_load_and_a_tagged_one_is_emptied(
    own_servers: Own, tmp_path: Path, rng: random.Random
) -> None:
    servers = SharedServers(tmp_path, own_servers, servers=(1,))
    traffic = Traffic(
        servers, rng, logs=3, keyed=2, clients=(PyflussWriter, HastyWriter), lookers=False
    )
    servers.add(2)
    servers.add(3)
    with traffic:
        for _ in range(rounds(1, 20)):
            traffic.progress()
            servers.await_registered(1, 2, 3)
            rebalanced(servers, kill=True)
            counts = Counter(traffic.leaders().values())
            assert max(counts.values()) - min(counts[i] for i in (1, 2, 3)) <= 1, counts
            traffic.progress()
            with zufluss.connect(servers.coordinator.bootstrap) as connection:
                leaves = rng.choice((1, 2, 3))
                connection.admin.add_server_tag([leaves], ServerTag.PERMANENT_OFFLINE)
                rebalanced(servers)
                assert leaves not in traffic.leaders().values()
                traffic.progress()
                connection.admin.remove_server_tag([leaves], ServerTag.PERMANENT_OFFLINE)
    traffic.check()
