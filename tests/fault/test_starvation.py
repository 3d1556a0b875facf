"""Shortage of disk, memory and descriptors, alone and together, while the work moves on.

Every day has a partition in a log table and in a primary-key table; the writers of a day write to
its partitions and to those of an earlier day. Segments and key-value snapshots go to remote storage
on the same disk. For the length of a shortage the disk is full, or the process gets no further
descriptor, or both.

Shortage is no failure: a request gets a retriable error with a reason, `zufluss doctor` and the
metrics show the shortage, and when it is over, every bucket takes writes without a restart. What
was acknowledged is there once and in order, and lookups are the fold of the changelog, also after
a kill.

Memory of the process is different: the kernel kills a container that exceeds its memory. So a
server has to live within it.
"""

from __future__ import annotations

import random
import re
import resource
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import NamedTuple

import pytest

import zufluss
from tests.conftest import SERVERS
from tests.counts import rounds
from tests.end_to_end.raw import RawClient
from tests.fault.ddl import directories, expected_directories, table_names
from tests.fault.history import History, violations
from tests.fault.kv_load import PutWriter, create_keyed_target, kv_violations
from tests.fault.load import (
    DATABASE,
    Load,
    RawWriter,
    Target,
    add_partition,
    create_target,
    read_all,
)
from tests.fault.small_disk import SmallDisk, small_disk
from tests.fault.small_memory import small_memory
from tests.servers import free_port
from tests.waiting import WAIT_SECONDS, eventually
from zufluss.cluster.examination import Severity
from zufluss.errors import ZuflussError
from zufluss.testing.server import DevServer
from zufluss.wire import messages as m
from zufluss.wire.api import ApiKey

DISK = "400m"
"""Three commit files of 32 MB, and room for what all days of a test write."""
BUCKETS = 2
"""Buckets of each partition."""
FILES = 512
"""Descriptors of the server."""
ROWS = 400
"""Rows of each table that are acknowledged before the work moves on."""
REFUSALS = 20
"""Batches of each table that are refused before a shortage ends."""
SHORTAGE_SECONDS = 3.0
"""Most seconds of a shortage: some delay requests and refuse none."""
CONTAINER_BYTES = 576 << 20
"""Memory of a container: a quarter is for rows, and the process takes about 300 MB without any."""
DAY_ROWS = 100_000
"""Rows of a day that take a good part of the memory for rows."""

SETTINGS = {
    "log.segment.file-size": "64kb",
    "log.index.interval-size": "1kb",
    "log.flush.offset.checkpoint-interval": "200ms",
    "log.retention.check-interval": "100ms",
    "remote.log.task-interval-duration": "100ms",
    "kv.snapshot.interval": "500ms",
    "zufluss.kv.memory": "8mb",
    "zufluss.kv.flush.log-size": "1mb",
    "zufluss.remote.probe-interval": "100ms",
}
TABLE = {"table.log.tiered.local-segments": "1000000"}
"""Segments are copied to remote storage, and stay for raw reads."""


class DayUpserter(PutWriter):
    """Fills the buckets of a day with rows of some hundred bytes."""

    keys = 200
    text_bytes = (200, 800)


class Day(NamedTuple):
    """The partitions of a day, and all who ever upserted into them."""

    log: Target
    keyed: Target
    upserters: list[PutWriter]


class Days:
    """The partitions of a log table and of a primary-key table, one of each per day."""

    def __init__(self, server: DevServer, rng: random.Random) -> None:
        self._server = server
        self._rng = rng
        self._log = create_target(server.port, "log", BUCKETS, TABLE, daily=True)
        self._keyed = create_keyed_target(server.port, "keyed", BUCKETS, TABLE, daily=True)
        self.appends, self.upserts = History(), History()
        self.all: list[Day] = []

    @property
    def histories(self) -> tuple[History, History]:
        return self.appends, self.upserts

    def begin(self) -> Day:
        """Create the partitions of the next day."""
        day, port = f"day{len(self.all)}", self._server.port
        log, keyed = (add_partition(port, table, day) for table in (self._log, self._keyed))
        self.all.append(Day(log, keyed, []))
        return self.all[-1]

    @contextmanager
    def written(self, days: Sequence[Day]) -> Iterator[None]:
        """Write to these days; at the end, every batch that was sent is acknowledged."""
        appends, upserts = (Load(self._server.port, history) for history in self.histories)
        for day in days:
            seed = self._rng.randrange(1 << 32)
            appends.add(RawWriter, seed, day.log)
            day.upserters.append(DayUpserter(upserts, seed, day.keyed))
            upserts.workers.append(day.upserters[-1])
        with appends, upserts:
            yield

    def work(self, days: Sequence[Day]) -> None:
        """Write to these days until both tables got on."""
        with self.written(days):
            for history in self.histories:
                assert history.wait_for_acks(ROWS, WAIT_SECONDS), "the server is stuck"
        self.check_histories()

    def check_histories(self) -> None:
        assert [*self.appends.problems, *self.upserts.problems] == []

    def check(self) -> None:
        """Assert that the tables have what was acknowledged, and nothing else."""
        port = self._server.port
        logs = read_all(port, [day.log for day in self.all])
        assert violations(self.appends, logs) == []
        for day in self.all:
            assert kv_violations(port, day.keyed, day.upserters) == []


# -- shortages ----------------------------------------------------------------------------------


def limit(server: DevServer, kind: int, most: int) -> None:
    """Set the soft limit of a resource of the server."""
    _, hard = resource.prlimit(server.pid, kind)
    resource.prlimit(server.pid, kind, (most, hard))


@contextmanager
def no_descriptors(server: DevServer, disk: SmallDisk, rng: random.Random) -> Iterator[None]:
    used = len(list(Path(f"/proc/{server.pid}/fd").iterdir()))
    limit(server, resource.RLIMIT_NOFILE, used + rng.choice((0, 3)))
    yield
    limit(server, resource.RLIMIT_NOFILE, FILES)


@contextmanager
def no_space(server: DevServer, disk: SmallDisk, rng: random.Random) -> Iterator[None]:
    disk.fill(leave=rng.choice((0, 4096, 300_000)))
    yield
    disk.free()


SHORTAGES = ((no_space,), (no_descriptors,), (no_space, no_descriptors))


# -- what the server says -----------------------------------------------------------------------


def findings(server: DevServer) -> dict[str, tuple[int, str]]:
    """What `zufluss doctor` shows: severity and text by subject."""
    with RawClient(server.port) as client:
        answer = client.call(ApiKey.EXAMINE_SERVER, m.ExamineServerRequest())
    return {f.subject: (f.severity, f.text) for f in answer.findings}


def problems(server: DevServer) -> dict[str, str]:
    """What `zufluss doctor` shows as a problem."""
    return {s: text for s, (grade, text) in findings(server).items() if grade == Severity.PROBLEM}


def metric(server: DevServer, name: str) -> float:
    """The value of a metric without labels."""
    port = server.properties["zufluss.metrics.port"]
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics") as answer:
        text = answer.read().decode()
    value = re.search(rf"^{name} (\S+)$", text, re.MULTILINE)
    assert value, text
    return float(value[1])


# -- tests --------------------------------------------------------------------------------------


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[SmallDisk]:
    with small_disk(tmp_path / "disk", DISK) as disk:
        yield disk


@pytest.fixture
def server(disk: SmallDisk, request: pytest.FixtureRequest) -> Iterator[DevServer]:
    """A server whose data and remote location are on the small disk."""
    more = {
        "remote.data.dirs": f"file://{disk.path / 'remote'}",
        "zufluss.metrics.port": str(free_port()),
    }
    server = disk.server(SETTINGS | more)
    request.config.stash.setdefault(SERVERS, []).append(server)
    with server:
        limit(server, resource.RLIMIT_NOFILE, FILES)
        yield server


def wait_for_refusals(days: Days) -> None:
    """Wait until enough writes to both tables were refused, or the time of a shortage is up."""
    limits = {history: history.refusals + REFUSALS for history in days.histories}
    for history in limits:
        history.wait(lambda h=history: h.refusals >= limits[h], SHORTAGE_SECONDS)


@pytest.mark.slow
@pytest.mark.parametrize("part", range(rounds(1, 20)))
def test_shortages_pass_and_every_bucket_takes_writes_again(
    server: DevServer, disk: SmallDisk, rng: random.Random, part: int
) -> None:
    days = Days(server, rng)
    days.work([days.begin()])
    for kinds in rng.sample(SHORTAGES, len(SHORTAGES)):
        now = [days.begin(), rng.choice(days.all)]
        with days.written(now), ExitStack() as shortage:
            for kind in kinds:
                shortage.enter_context(kind(server, disk, rng))
            wait_for_refusals(days)
        days.check_histories()
        days.work(days.all)
        eventually(lambda: not problems(server), "nothing is amiss after the shortage")
    days.check()
    server.kill()
    server.start()
    days.check()


@pytest.mark.slow
def test_a_full_disk_is_shown_and_tables_are_created_wholly_or_not_at_all(
    server: DevServer, disk: SmallDisk, rng: random.Random
) -> None:
    """The coordinator's store is on the full disk, too."""
    create_target(server.port, "first")
    kinds = {"log": create_target, "keyed": create_keyed_target}
    wanted = [f"{rng.choice(list(kinds))}{number}" for number in range(rounds(20, 200))]
    refused = []
    for name in wanted:
        disk.fill(leave=rng.choice((0, 4096, 20_000, 100_000)))
        severity, text = findings(server)["disk"]
        assert severity >= Severity.WARNING
        assert "free space" in text
        assert metric(server, "zufluss_disk_free_bytes") < 10 << 20
        assert metric(server, "zufluss_loop_lag_seconds_max") >= 0
        try:
            kinds[name.rstrip("0123456789")](server.port, name, BUCKETS)
        except ZuflussError as e:
            refused.append((name, e))
    assert refused
    assert [str(e) for _, e in refused if not e.retriable] == []
    disk.free()
    for name, _ in refused:
        if name not in tables(server):  # it was refused before it existed
            kinds[name.rstrip("0123456789")](server.port, name, BUCKETS)
    check_tables(server, disk, wanted)
    eventually(lambda: not problems(server), "all buckets are served")
    server.kill()
    server.start()
    check_tables(server, disk, wanted)


def tables(server: DevServer) -> set[str]:
    with RawClient(server.port) as client:
        return set(table_names(client, DATABASE))


def check_tables(server: DevServer, disk: SmallDisk, names: Sequence[str]) -> None:
    """Assert that these tables exist and take rows, and that the disk has their logs only."""
    assert tables(server) == {"first", *names}
    with zufluss.connect(server.bootstrap) as connection:
        for name in names:
            table = connection.table(f"{DATABASE}.{name}")
            if name.startswith("log"):
                with table.append() as appender:
                    appender.write({"key": [1], "payload": ["a"]})
            else:
                with table.upsert() as upserter:
                    upserter.write({"id": [1], "batch": [1], "text": ["a"]})
                assert table.lookup(1) == {"id": 1, "batch": 1, "text": "a"}
    with RawClient(server.port) as client:
        expected = expected_directories(client)
    there = directories(disk.outside / "data")
    assert {path for path in there if "/kv-" not in path} == expected


@pytest.mark.slow
def test_rows_on_disk_are_read_and_the_server_stops_while_the_disk_is_full(
    server: DevServer, disk: SmallDisk
) -> None:
    rows = {"id": list(range(1000)), "text": ["x" * 100] * 1000}
    with zufluss.connect(server.bootstrap) as connection:
        connection.admin.create_table("fluss.t", "id BIGINT, text STRING, PRIMARY KEY (id)")
        with connection.table("fluss.t").upsert() as writer:
            writer.write(rows)
    assert server.stop() == 0
    server.start()  # no row is in memory, and no database is open
    disk.fill(leave=0)
    with zufluss.connect(server.bootstrap) as connection:
        table = connection.table("fluss.t")
        assert table.lookup(7) == {"id": 7, "text": "x" * 100}
        disk.free()
        with table.upsert() as writer:
            writer.write({"id": [7], "text": ["new"]})
        disk.fill(leave=0)
        assert table.lookup(7) == {"id": 7, "text": "new"}
    assert server.stop() == 0
    disk.free()
    server.start()
    with zufluss.connect(server.bootstrap) as connection:
        assert connection.table("fluss.t").lookup(7) == {"id": 7, "text": "new"}


# -- memory of the process ----------------------------------------------------------------------


@pytest.mark.slow
def test_a_server_lives_within_the_memory_of_its_container(
    tmp_path: Path, rng: random.Random, request: pytest.FixtureRequest
) -> None:
    """Days are filled one after the other; together they have several times the memory."""
    with small_memory(CONTAINER_BYTES) as memory:
        server = memory.server(tmp_path / "data", {"zufluss.kv.flush.log-size": "8mb"})
        request.config.stash.setdefault(SERVERS, []).append(server)
        with server, zufluss.connect(server.bootstrap) as connection:
            pid = server.pid
            connection.admin.create_table(
                "fluss.daily",
                "day STRING, id BIGINT, text STRING, PRIMARY KEY (day, id)",
                partition_keys=["day"],
                bucket_count=2,
            )
            table = connection.table("fluss.daily")
            days = [f"day{number}" for number in range(rounds(4, 40))]
            for day in days:
                connection.admin.create_partition("fluss.daily", {"day": day})
                with table.upsert() as writer:
                    for first in range(0, DAY_ROWS, 10_000):
                        ids = range(first, first + 10_000)
                        texts = [f"{day} {key}".ljust(1000, ".") for key in ids]
                        writer.write({"day": [day] * len(ids), "id": list(ids), "text": texts})
            for day in days:
                key = rng.randrange(DAY_ROWS)
                assert table.lookup((day, key))["text"].startswith(f"{day} {key}")
            assert server.running
            assert server.pid == pid
