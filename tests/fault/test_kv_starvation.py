"""Too little memory and too few descriptors, while the work moves from bucket to bucket.

Every day has a table of its own, like a daily partition: its buckets are filled, then left alone
but for a few late rows. The state of all days is many times the memory for it, and all databases
together would need many times the descriptors. The worst comes in between: for some seconds the
server gets no descriptor at all.

Shortage is no failure: when it is over, every bucket of every day takes writes without a restart,
what was acknowledged is there once and in order, and lookups are the fold of the changelog.
"""

from __future__ import annotations

import random
import resource
import threading
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import pytest

import zufluss
from tests.counts import rounds
from tests.fault.history import History
from tests.fault.kv_load import PutWriter, create_keyed_target, kv_violations
from tests.fault.load import Load, Target
from tests.fault.test_kill import PROGRESS_SECONDS, SMALL
from tests.servers import WarmServer

TIGHT = {"zufluss.kv.memory": "8mb", "zufluss.kv.flush.log-size": "1mb"}
"""The least memory that a server may have, and many flushes."""
BUCKETS = 14
"""Buckets of a day; ten days have the 140 that used up 1024 descriptors."""
FILES = 1024
"""Descriptors of the server."""
ROWS = 4_000
"""Rows that are acknowledged before the work moves on."""
SHORTAGE_SECONDS = 2.0
"""How long the server gets no further descriptor."""


class DayWriter(PutWriter):
    """Fills the buckets of a day with rows of some hundred bytes."""

    keys = 400
    text_bytes = (200, 800)


def open_files(server: WarmServer) -> int:
    return len(list(Path(f"/proc/{server.process.pid}/fd").iterdir()))


def limit_files(server: WarmServer, most: int) -> None:
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.prlimit(server.process.pid, resource.RLIMIT_NOFILE, (most, hard))


class Day(NamedTuple):
    """The table of a day, and all who ever wrote to it."""

    target: Target
    writers: list[PutWriter]


def work(server: WarmServer, history: History, rng: random.Random, days: list[Day]) -> None:
    """Write to the tables of some days until rows are acknowledged, then finish what was begun."""
    load = Load(server.port, history)
    for day in days:
        day.writers.append(DayWriter(load, rng.randrange(1 << 32), day.target))
        load.workers.append(day.writers[-1])
    with load:
        assert history.wait_for_acks(ROWS, PROGRESS_SECONDS), "the server is stuck"


@pytest.mark.slow
def test_a_shortage_of_memory_and_descriptors_passes(
    warm_server: Callable[..., WarmServer], rng: random.Random
) -> None:
    server = warm_server({**SMALL, **TIGHT}).start()
    limit_files(server, FILES)
    history = History()
    days: list[Day] = []
    for number in range(rounds(10, 40)):
        days.append(Day(create_keyed_target(server.port, f"day{number}", BUCKETS), []))
        work(server, history, rng, [days[-1], rng.choice(days)])
        if number % 5 == 3:
            limit_files(server, open_files(server))
            lifted = threading.Timer(SHORTAGE_SECONDS, limit_files, (server, FILES))
            lifted.start()
            work(server, history, rng, [days[-1]])
            lifted.join()
        assert history.problems == []
        assert open_files(server) < FILES
    for day in days:
        work(server, history, rng, [day])
    assert history.problems == []
    for day in days:
        assert kv_violations(server.port, *day) == []
    server.kill()
    server.start()
    for day in days[:: rounds(5, 1)]:
        assert kv_violations(server.port, *day) == []


@pytest.mark.slow
def test_daily_partitions_are_filled_one_after_the_other_for_ever(
    warm_server: Callable[..., WarmServer], rng: random.Random
) -> None:
    """Each partition alone has more rows than memory holds; late rows go to any of them."""
    server = warm_server(TIGHT).start()
    expected: dict[tuple[str, int], str] = {}
    with zufluss.connect(server.bootstrap) as connection:
        connection.admin.create_table(
            "fluss.daily",
            "day STRING, id BIGINT, text STRING, PRIMARY KEY (day, id)",
            partition_keys=["day"],
            bucket_count=4,
        )
        table = connection.table("fluss.daily")
        for number in range(rounds(6, 60)):
            day = f"day{number}"
            connection.admin.create_partition("fluss.daily", {"day": day})
            written = {(day, key): f"{number}" + "." * 300 for key in range(30_000)}
            late = rng.sample(list(expected), min(len(expected), 1_000))
            written |= dict.fromkeys(late, f"late on {day}")
            with table.upsert() as writer:
                writer.write(
                    {
                        "day": [day for day, _ in written],
                        "id": [key for _, key in written],
                        "text": list(written.values()),
                    }
                )
            expected |= written
            for key in rng.sample(list(expected), 100):
                assert table.lookup(key)["text"] == expected[key]
