"""Whatever is killed, and whenever, the table has the same rows as without a crash.

Jobs and servers are processes that get a real SIGKILL. Every function is in the table.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

import zufluss
from tests.conftest import SERVERS
from tests.coordinator.producer_cluster import ProducerCluster, at
from tests.counts import rounds
from tests.end_to_end.aggregation.job import Work, job
from tests.end_to_end.aggregation.producers import Epoch
from tests.end_to_end.aggregation.recovery import (
    DELETES,
    EVERY_FUNCTION,
    SUM,
    bucket_of,
    column_of,
    create,
    rows_of,
    undo_records,
    without_crash,
)
from tests.end_to_end.raw import ConnectionEndedError, RawClient
from tests.servers import WarmServer
from tests.waiting import eventually
from zufluss.client.sync.connection import Connection
from zufluss.client.sync.table import Table
from zufluss.errors import ProducerFencedError, ProducerStateError
from zufluss.kv.producer.own_changes import STEP_ROWS
from zufluss.log.files import KILL_AT_VARIABLE
from zufluss.model.aggregate import FUNCTIONS
from zufluss.testing.server import DevServer

EVENTS = rounds(60, 300)
POINTS_MAX = 40
"""Upper bound of the file writes of a server from its start to the end of its undo."""
YEAR_SECONDS = 365 * 86_400
UNDONE_AT_LEAST = 3
"""Undos that wrote something: two that were killed, and one that completed."""


def work_on(
    conn: Connection, server: DevServer, kept: Path, rng: random.Random, **properties: str
) -> Work:
    table = create(conn, EVERY_FUNCTION, buckets=6, properties=properties)
    return Work(server.bootstrap, str(table.path), kept, rng.randrange(1 << 30), EVENTS)


def killed_after(work: Work, lines: int, rng: random.Random) -> None:
    """Run a job until it has written some lines, and kill it."""
    with job(work, rng.randrange(1 << 30)) as running:
        for _ in range(lines):
            line = running.next_line()
            assert not line.startswith("failed"), line
            if line == "done":
                break


def finished(work: Work) -> None:
    """Run a job to its end."""
    with job(work) as running:
        assert running.until("done") == "done"


def check(conn: Connection, work: Work) -> None:
    """Assert that the table has the same rows as without a crash."""
    assert work.position == work.count
    assert rows_of(conn.table(work.table)) == without_crash(conn, work.seed, work.count)


@pytest.fixture
def mortal(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[WarmServer]:
    """A server that starts quickly and will be killed."""
    server = WarmServer(tmp_path / "server")
    request.config.stash.setdefault(SERVERS, []).append(server)
    with server:
        yield server
    request.config.stash[SERVERS].remove(server)


# -- kills at random points ----------------------------------------------------------------------


def test_the_table_has_every_function(conn: Connection) -> None:
    schema = create(conn, EVERY_FUNCTION).info.schema
    there = {c.agg_function.type for c in schema.columns if c.agg_function is not None}
    assert there == set(FUNCTIONS)


@pytest.mark.parametrize("undo", ["server", "client"])
def test_killed_at_random_points_and_replayed_it_equals_a_run_without_crash(
    conn: Connection, server: DevServer, tmp_path: Path, rng: random.Random, undo: str
) -> None:
    for number in range(rounds(1, 12)):
        work = work_on(conn, server, tmp_path / str(number), rng, **DELETES)
        work = replace(work, undo=undo)  # type: ignore[arg-type]
        while work.position < work.count:
            killed_after(work, rng.randrange(2, 24), rng)
        check(conn, work)


def test_servers_and_jobs_killed_at_random_points_change_nothing(
    mortal: WarmServer, tmp_path: Path, rng: random.Random
) -> None:
    with zufluss.connect(mortal.bootstrap) as conn:
        work = work_on(conn, mortal, tmp_path / "kept", rng)
        for _ in range(rounds(3, 40)):
            with job(work, rng.randrange(1 << 30)) as running:
                for _ in range(rng.randrange(1, 12)):
                    if running.next_line() == "done":
                        break
                mortal.kill()
                mortal.start()
                if rng.random() < 0.5 and running.lines[-1] != "done":
                    running.until("wrote", "done")  # it goes on by itself
        finished(work)
        check(conn, work)


# -- restarts before the first checkpoint, and after the ttl -------------------------------------


def test_killed_before_the_first_checkpoint_it_begins_anew_and_is_right(
    conn: Connection, server: DevServer, tmp_path: Path, rng: random.Random
) -> None:
    for number in range(rounds(1, 8)):
        work = work_on(conn, server, tmp_path / str(number), rng)
        before = replace(work, checkpoints=0.0)
        for _ in range(rounds(3, 6)):
            killed_after(before, rng.randrange(2, 12), rng)
        assert work.position == 0
        finished(before)
        check(conn, work)


def silent(conn: Connection, work: Work) -> None:
    """Wait until the producer of a job was silent for longer than its time."""

    def over() -> bool:
        (found,) = conn.admin.list_producers(work.table)
        return found.idle_ms > found.ttl_ms

    eventually(over, "the end of the producer's time")


def test_restarted_after_its_time_and_before_the_first_checkpoint_it_is_right(
    conn: Connection, server: DevServer, tmp_path: Path, rng: random.Random
) -> None:
    work = replace(work_on(conn, server, tmp_path / "kept", rng), checkpoints=0.0, ttl="20ms")
    killed_after(work, 6, rng)
    silent(conn, work)
    finished(work)
    check(conn, work)


def test_restarted_after_its_time_when_others_have_its_columns_it_is_refused(
    conn: Connection, server: DevServer, tmp_path: Path, rng: random.Random
) -> None:
    work = replace(work_on(conn, server, tmp_path / "kept", rng), checkpoints=0.0, ttl="20ms")
    killed_after(work, 6, rng)
    silent(conn, work)
    table = conn.table(work.table)
    before = rows_of(table)
    with table.exactly_once_writer("other", ["k", "sum_long", "first"]):
        with job(work) as running:
            assert running.until("begun") == "failed ProducerFencedError"
        assert rows_of(table) == before


async def test_a_producer_is_remembered_for_years_and_over_restarts(tmp_path: Path) -> None:
    world = await ProducerCluster(tmp_path / "meta").begin()
    world.end_at(3, 4)
    first = await world.init()
    for _ in range(2):
        world.time.now += YEAR_SECONDS
        world.end_at(50, 60)
        late = await world.init()
        assert (late.created, late.undo_needed) == (False, True)
        assert late.producer.baseline == at(3, 4), "what was written since is undone"
        assert late.producer.number == first.producer.number
        world = await world.again()
    epoch = (await world.init()).producer.epoch
    await world.checkpoint(epoch, 50, 60)
    world.time.now += YEAR_SECONDS
    with pytest.raises(ProducerStateError, match="restore its latest"):
        await world.init()
    await world.init("other")
    with pytest.raises(ProducerFencedError, match="cannot come back"):
        await world.init(restored=at(50, 60))
    await world.stop()


# -- kills during an undo ------------------------------------------------------------------------


def leave_behind(work: Work) -> None:
    """Take a checkpoint, then write to all keys and never resume."""
    with job(replace(work, checkpoints=1.0)) as running:
        running.until("kept")
    with job(replace(work, checkpoints=0.0, flushes=1.0)) as running:
        for _ in range(8):
            running.until("wrote")


def undone_before_death(server: WarmServer, table: Table, from_offset: int) -> bool:
    """Begin an epoch and its undo; returns whether the server survived the undo."""
    try:
        server.start()
        with RawClient(server.port) as raw:
            epoch = Epoch.begin(raw, table, restored={bucket_of(table): from_offset})
            while not epoch.undo(from_offset).done:
                pass
    except (ConnectionEndedError, OSError, RuntimeError):
        return False
    return True


def test_a_server_that_dies_at_every_write_of_its_undos_in_turn_gets_there(
    mortal: WarmServer,
) -> None:
    pages = [*range(4 * STEP_ROWS)]
    with zufluss.connect(mortal.bootstrap) as conn:
        table = create(conn, SUM, buckets=1)
        bucket = bucket_of(table)
        with table.exactly_once_writer("job") as writer:
            writer.write({"page": pages, "views": [1] * len(pages)})
            kept = writer.checkpoint().offsets[bucket]
            for first in [*range(0, len(pages), STEP_ROWS)] * 2:  # each is a step of the undo
                part = pages[first : first + STEP_ROWS]
                writer.write({"page": part, "views": [10] * len(part)})
                writer.flush()
    died = 0
    for point in range(1, POINTS_MAX):
        mortal.kill()
        mortal.environ = {KILL_AT_VARIABLE: f"write#{point}"}
        if undone_before_death(mortal, table, kept):
            break
        died += 1
    assert died < POINTS_MAX - 1, "an undo that is done again has less to write"
    mortal.kill()
    mortal.environ = {}
    mortal.start()
    with zufluss.connect(mortal.bootstrap) as conn, RawClient(mortal.port) as raw:
        wrote = undo_records(raw, table)
        assert len(wrote) >= UNDONE_AT_LEAST, f"{died} died, each got a little further"
        assert sum(wrote.values()) == 2 * len(pages), "no key was put back twice"
        assert column_of(conn.table(table.path)) == dict.fromkeys(pages, 1)


def test_a_client_that_dies_in_its_undo_again_and_again_gets_there(
    conn: Connection, server: DevServer, tmp_path: Path, rng: random.Random
) -> None:
    work = replace(work_on(conn, server, tmp_path / "kept", rng, **DELETES), undo="client")
    leave_behind(work)
    for _ in range(3):
        with job(replace(work, halts=True)) as running:
            while running.until("undo") == "undo 0":
                pass
    finished(work)
    check(conn, work)
