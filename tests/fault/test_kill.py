"""SIGKILL at random moments under load: nothing acknowledged is lost, doubled, moved or reordered.

Promises A1, A2 and A3. The server is killed while it serves, and a part of the times while it is
still starting, that is, in the middle of recovery. Every round must make progress: a server that
comes back and does not serve is a failure too.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable

import pytest

from tests.counts import rounds
from tests.fault.history import History, violations
from tests.fault.load import (
    Load,
    OnceWriter,
    PyflussWriter,
    RawWriter,
    Reader,
    Target,
    ZuflussWriter,
    create_target,
    read_all,
)
from tests.servers import WarmServer
from tests.waiting import WAIT_SECONDS
from zufluss.testing.server import DevServer

PROGRESS_SECONDS = WAIT_SECONDS
START_KILLED = 0.3
"""Part of the kills that hit a server before it is ready."""

SMALL = {
    "log.segment.file-size": "256kb",
    "log.index.interval-size": "1kb",
    "log.flush.offset.checkpoint-interval": "200ms",
}
"""Small files with frequent checkpoints, so that kills hit all operations."""


def kill_once(server: DevServer, history: History, rng: random.Random) -> None:
    """Kill at a random moment, restart, and assert that writers make progress."""
    time.sleep(rng.random() * 0.3)
    server.kill()
    if isinstance(server, WarmServer) and rng.random() < START_KILLED:
        server.launch()
        time.sleep(rng.random() * 0.1)
        server.kill()
    server.start()
    rows = rng.choice((1, 100, 1000))
    assert history.wait_for_acks(rows, PROGRESS_SECONDS), "no progress after a restart"


def check(server: DevServer, history: History, targets: list[Target]) -> None:
    """Assert the promises, before and after a clean restart."""
    contents = read_all(server.port, targets)
    assert violations(history, contents) == []
    server.stop()
    server.start()
    again = read_all(server.port, targets)
    assert {b: c.batches for b, c in again.items()} == {b: c.batches for b, c in contents.items()}
    print(f"{history.acked_rows} rows acknowledged, {len(history.acks)} batches")


def run(
    server: DevServer, rng: random.Random, kills: int, writers: list[Callable[..., object]]
) -> None:
    history = History()
    targets = [create_target(server.port, "a", 3), create_target(server.port, "b", 2)]
    load = Load(server.port, history)
    for target in targets:
        for make in (*writers, Reader):
            load.add(make, rng.randrange(1 << 32), target)  # type: ignore[arg-type]
    with load:
        assert history.wait_for_acks(100, PROGRESS_SECONDS)
        for _ in range(kills):
            kill_once(server, history, rng)
            if history.problems:
                break
    check(server, history, targets)


@pytest.mark.slow
@pytest.mark.parametrize("part", range(rounds(1, 10)))
def test_what_is_acknowledged_survives_kills_at_random_moments(
    warm_server: Callable[..., WarmServer], rng: random.Random, part: int
) -> None:
    server = warm_server(SMALL).start()
    run(server, rng, rounds(12, 60), [RawWriter, RawWriter, OnceWriter])


@pytest.mark.slow
def test_pyfluss_and_our_client_live_through_kills(
    warm_server: Callable[..., WarmServer], rng: random.Random
) -> None:
    server = warm_server(SMALL).start()
    run(server, rng, rounds(4, 100), [PyflussWriter, ZuflussWriter])


@pytest.mark.slow
def test_a_server_started_from_the_command_line_is_killed_too(
    new_server: Callable[..., DevServer], rng: random.Random
) -> None:
    run(new_server(SMALL), rng, rounds(2, 20), [RawWriter])
