"""The roles in two processes: either can be killed, clients continue and nothing is lost.

While the coordinator is away, reads and writes continue and tables cannot be changed. While the
tablet server is away, tables are known but not served. The restarted process finds the other one.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from pathlib import Path

import fluss
import pytest

from tests.counts import rounds
from tests.end_to_end.helpers import append, connected, create, ids, read_arrow
from tests.fault.history import History, violations
from tests.fault.load import (
    DEADLINE_SECONDS,
    Load,
    PyflussWriter,
    RawWriter,
    Reader,
    Target,
    ZuflussWriter,
    create_target,
    read_all,
)
from tests.servers import Apart, RoleServer
from zufluss.errors import ZuflussError
from zufluss.testing.server import DevServer

SMALL = {"log.segment.file-size": "256kb"}


async def test_pyfluss_works_with_the_roles_in_two_processes(
    new_apart: Callable[..., Apart],
) -> None:
    apart = new_apart()
    for bootstrap in (apart.coordinator.bootstrap, apart.tablet.bootstrap):
        async with connected(bootstrap) as conn:
            path = fluss.TablePath("fluss", f"t{bootstrap[-5:]}")
            table = await create(conn, path, bucket_count=2)
            await append(table, ids(0, 50), ids(50, 100))
            rows = await read_arrow(table, {0: fluss.EARLIEST_OFFSET, 1: fluss.EARLIEST_OFFSET})
            assert sorted(rows.column("id").to_pylist()) == list(range(100))


@pytest.mark.slow
def test_either_process_may_be_killed_and_clients_go_on(
    new_apart: Callable[..., Apart], rng: random.Random
) -> None:
    coordinator, tablet = new_apart(SMALL)
    targets = [create_target(coordinator.port, "t", 2)]
    history = History()
    load = Load(tablet.port, history)
    for make in (RawWriter, Reader, PyflussWriter, ZuflussWriter):
        load.add(make, rng.randrange(1 << 32), targets[0])
    with load:
        assert history.wait_for_acks(100, DEADLINE_SECONDS)
        for number in range(rounds(2, 20)):
            coordinator.kill()
            assert history.wait_for_acks(100, DEADLINE_SECONDS), "the data path stopped"
            if rng.random() < 0.5:
                tablet.kill()
                coordinator.start()
                tablet.start()
            else:
                coordinator.start()
            targets.append(create_when_possible(coordinator.port, f"t{number}"))
            tablet.kill()
            tablet.start()
            assert history.wait_for_acks(100, DEADLINE_SECONDS), "no progress after a restart"
            if history.problems:
                break
    assert violations(history, read_all(tablet.port, targets)) == []


def test_a_second_server_with_the_same_id_ends_the_first(
    new_apart: Callable[..., Apart], own_servers: Callable[[DevServer], None], tmp_path: Path
) -> None:
    coordinator, first = new_apart()
    address = {"zufluss.coordinator.address": coordinator.bootstrap}
    second = RoleServer("tablet", tmp_path, address)
    own_servers(second)
    assert first.wait() == 2
    assert "give each server a tablet-server.id of its own" in first.log()
    assert "tablet_replaced" in coordinator.log()
    create_target(coordinator.port, "t", 1)


def create_when_possible(port: int, name: str) -> Target:
    """Create a table; the tablet server may take a while to report to a new coordinator."""
    deadline = time.monotonic() + DEADLINE_SECONDS
    while True:
        try:
            return create_target(port, name, 1)
        except ZuflussError:
            if time.monotonic() > deadline:
                raise
        time.sleep(0.05)
