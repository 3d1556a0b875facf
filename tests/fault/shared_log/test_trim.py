"""Sessions of the shared log stay small under load, and nothing that is still needed is deleted.

A reader beside the servers (`reader.py`) checks all the time that the segments of a bucket and its
session from the floor on have everything that was acknowledged. The cleaner leaves the seals of
sessions that nobody needs.
"""

from __future__ import annotations

import json
import random
import time
from collections.abc import Callable, Iterable
from itertools import cycle
from pathlib import Path

import pytest

from tests.counts import FULL, only_full, rounds
from tests.fault.history import Ack
from tests.fault.load import DATABASE, LOST, Load, Target, Worker, create_target, encode, rows
from tests.fault.shared_log.load import ServersLoad, Traffic
from tests.fault.shared_log.reader import FloorReader, Records, sizes
from tests.fault.shared_log.servers import SERVERS, HastyClient, SharedServers
from tests.waiting import eventually
from zufluss.errors import RETRIABLE, ErrorCode, ZuflussError
from zufluss.model.table import TableBucket
from zufluss.remote.wal import HEADER_BYTES, WalKind, WalName, read_header
from zufluss.testing.server import DevServer

Own = Callable[[DevServer], None]

RETAINED = 1 << 20
SMALL = {
    "zufluss.wal.retained": "1mb",
    "log.segment.file-size": "256kb",
    "remote.log.task-interval-duration": "1s",
}
"""Many rounds of trimming in little time."""
SLOW_BUCKETS = rounds(40, 1000)
SLOW_ROWS = 3
SLOW_SECONDS = 0.05
"""Between two appends to slow buckets, each to the next one."""
LOAD_SECONDS = rounds(0, 3600)
"""The load lasts at least so long, and until sessions were trimmed."""
FLOORS = 60
"""Objects that are trimmed at least."""


class SlowAppender(Worker):
    """Appends a few rows to one bucket after the other, each batch once."""

    load: ServersLoad

    def __init__(self, load: Load, seed: int, target: Target) -> None:
        super().__init__(load, seed)
        self.target = target
        self.lanes = [self.history.lane(gapless=False) for _ in target.all_buckets]

    def work(self) -> None:
        for bucket in cycle(self.target.all_buckets):
            if self.finishing:
                return
            try:
                self.append(bucket)
            except (*LOST, OSError, ZuflussError):
                self.refused()
            self.load.given_up.wait(SLOW_SECONDS)

    def append(self, bucket: TableBucket) -> None:
        """Append to a bucket at its leader, if it has one."""
        number = bucket.bucket_id
        port = self.load.servers.leader_port(DATABASE, self.target.name, number)
        if port is None:
            return
        first = self.lanes[number].take(SLOW_ROWS)
        with HastyClient(port) as client:
            entry = client.produce(self.target.table_id, encode(rows(first, SLOW_ROWS, 20)), number)
        if not entry.error_code:
            self.history.acknowledged(Ack(first, SLOW_ROWS, bucket, entry.base_offset))
        elif ErrorCode(entry.error_code) not in RETRIABLE:
            raise AssertionError(f"{bucket}: {entry.error_code} {entry.error_message}")


@pytest.mark.slow
@pytest.mark.timeout(10_800 if FULL else 400)
def test_sessions_stay_small_with_many_slow_and_few_fast_buckets_and_nothing_needed_goes(
    own_servers: Own, tmp_path: Path, rng: random.Random
) -> None:
    servers = SharedServers(tmp_path, own_servers, SMALL)
    traffic = Traffic(servers, rng, logs=6, keyed=2, clients=(), readers=False, lookers=False)
    slow = create_target(servers.coordinator.port, "slow", SLOW_BUCKETS)
    traffic.add_log(slow).add(SlowAppender, rng.randrange(1 << 32), slow)
    if FULL:  # all rows of an hour are compared in the end
        for load in traffic.loads:
            load.pace_seconds = 0.1
    watch = ServersLoad(servers)
    reader = FloorReader(watch, traffic)
    watch.workers.append(reader)
    began = time.monotonic()
    with traffic, watch:
        traffic.progress()
        before, trimmed = floors(servers), 0
        while trimmed < FLOORS or time.monotonic() < began + LOAD_SECONDS:
            traffic.progress()
            assert watch.history.problems == []
            trimmed = sum(floors(servers).values()) - sum(before.values())
        watch.finish.set()
    reader.read()  # everything that was acknowledged at all
    assert watch.history.problems == []
    assert reader.largest < 2 * RETAINED
    assert reader.readings > 1
    for epoch, floor in floors(servers).items():
        assert holes(sizes(servers, epoch), floor) == [], epoch
    for server_id in SERVERS:  # all disks are lost; what is below the floors is not needed
        servers.lose(server_id)
    for server_id in SERVERS:
        servers.start(server_id)
    traffic.check(remote=True)
    print(
        f"{traffic.acked_rows} rows, {trimmed} objects trimmed, at most {reader.largest} bytes in "
        f"a session; {reader.readings} readings of {reader.entries} entries"
    )


def floors(servers: SharedServers) -> dict[int, int]:
    """The floor of each session, by its epoch."""
    return Records.of(servers).floors


def holes(numbers: Iterable[int], floor: int) -> list[int]:
    """Numbers from the floor on that are missing below a later object."""
    kept = {number for number in numbers if number >= floor}
    return sorted(set(range(floor, max(kept, default=floor))) - kept)


@only_full  # the cleaner comes every half minute; tests/coordinator/wal calls it
@pytest.mark.slow
def test_of_a_session_that_nobody_needs_the_data_goes_and_its_seal_stays(
    own_servers: Own, tmp_path: Path, rng: random.Random
) -> None:
    """The cleaner's coordinator is killed before it deletes; the next one goes on."""
    servers = SharedServers(tmp_path, own_servers)
    traffic = Traffic(servers, rng, logs=1, keyed=1, clients=(), lookers=False)
    with traffic:
        traffic.progress()
        victim = rng.choice(traffic.leading())
        servers.lose(victim)
        traffic.progress()
        servers.restart_coordinator("wal-delete#1")
        assert servers.coordinator.wait() != 0, "the cleaner has come"
        servers.restart_coordinator()

        def cleaned() -> list[int]:
            known = servers.entries("/wal/sessions/").items()
            gone = [p for p, value in known if json.loads(value)["state"] == "released"]
            epochs = [int(path.rsplit("/", 1)[1]) for path in gone]
            left = [n for e in epochs for n in sizes(servers, e).values() if n > HEADER_BYTES]
            return epochs if epochs and not left else []

        released = eventually(cleaned, "its data is deleted")
        traffic.progress()
    for epoch in released:
        assert sizes(servers, epoch), "no seal is left"
        for number in sizes(servers, epoch):
            name = WalName(epoch, number)
            head = (servers.location / name.path).read_bytes()
            assert read_header(head, name, "the location").kind is not WalKind.DATA
    servers.start(victim)
    traffic.check()
