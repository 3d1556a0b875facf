"""SIGKILL under upserts, deletes and partial updates: the state is the fold of the changelog.

Promises A1, A2 and A4 for primary-key tables: what was acknowledged is there, once and in order,
and whoever follows the changelog has what lookups say. Little memory makes flushes and evictions
happen between the kills; with `zufluss.log.flush=os` an acknowledgement does not wait for the disk,
which a killed process does not need either.
"""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest

from tests.counts import rounds
from tests.fault.history import History
from tests.fault.kv_load import (
    BigPutWriter,
    Looker,
    PutWriter,
    create_keyed_target,
    kv_violations,
)
from tests.fault.load import Load, Target
from tests.fault.test_kill import PROGRESS_SECONDS, SMALL, kill_once
from tests.servers import WarmServer
from zufluss.testing.server import DevServer

OFTEN = {"zufluss.kv.flush.log-size": "1mb"}
"""The state goes to disk every megabyte of changelog."""
TIGHT = {"zufluss.kv.memory": "16mb"}
"""Less than the state, so that rows are evicted and read from disk."""


def check(server: DevServer, history: History, target: Target, writers: list[PutWriter]) -> None:
    """Assert the promises, also after one more kill and a clean restart."""
    assert history.problems == []
    assert kv_violations(server.port, target, writers) == []
    server.kill()
    server.start()
    assert kv_violations(server.port, target, writers) == []
    server.stop()
    server.start()
    assert kv_violations(server.port, target, writers) == []
    print(f"{history.acked_rows} records acknowledged, {len(history.acks)} batches")


def run(
    server: DevServer,
    rng: random.Random,
    kills: int,
    kind: type[PutWriter] = PutWriter,
    properties: dict[str, str] | None = None,
) -> None:
    history = History()
    target = create_keyed_target(server.port, "kv", 2, properties)
    load = Load(server.port, history)
    writers = [kind(load, rng.randrange(1 << 32), target) for _ in range(3)]
    load.workers += [*writers, Looker(load, rng.randrange(1 << 32), target)]
    with load:
        assert history.wait_for_acks(100, PROGRESS_SECONDS)
        for _ in range(kills):
            kill_once(server, history, rng)
            if history.problems:
                break
    check(server, history, target, writers)


@pytest.mark.slow
@pytest.mark.parametrize("part", range(rounds(1, 10)))
def test_the_state_is_the_fold_of_the_changelog_after_kills_at_random_moments(
    warm_server: Callable[..., WarmServer], rng: random.Random, part: int
) -> None:
    run(warm_server({**SMALL, **OFTEN}).start(), rng, rounds(8, 60))


@pytest.mark.slow
def test_kills_while_little_memory_is_flushed_and_evicted(
    warm_server: Callable[..., WarmServer], rng: random.Random
) -> None:
    run(warm_server({**OFTEN, **TIGHT}).start(), rng, rounds(4, 100), BigPutWriter)


@pytest.mark.slow
def test_kills_with_acknowledgements_that_do_not_wait_for_the_disk(
    warm_server: Callable[..., WarmServer], rng: random.Random
) -> None:
    server = warm_server({**SMALL, **OFTEN, "zufluss.log.flush": "os"}).start()
    run(server, rng, rounds(4, 100))


@pytest.mark.slow
def test_kills_of_a_server_started_from_the_command_line(
    new_server: Callable[..., DevServer], rng: random.Random
) -> None:
    run(new_server({**SMALL, **OFTEN}), rng, rounds(2, 20))
