"""Sessions of the shared log stay small under load, and nothing that is still needed is deleted.

A reader beside the servers, of the location and of the coordinator's records, checks each session:
from the recorded floor on no number is missing, and together with the segments the session has
every row of its buckets. The cleaner leaves the seals of sessions that nobody needs.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.counts import only_full, rounds
from tests.fault.load import create_target, encode, rows
from tests.fault.shared_log.load import Traffic, at_leader
from tests.fault.shared_log.servers import SERVERS, SharedServers
from tests.waiting import eventually
from zufluss.remote.wal import HEADER_BYTES, WalKind, WalName, read_header, session_directory
from zufluss.testing.server import DevServer

Own = Callable[[DevServer], None]

RETAINED = 1 << 20
SMALL = {
    "zufluss.wal.retained": "1mb",
    "log.segment.file-size": "256kb",
    "remote.log.task-interval-duration": "1s",
}
SLOW_BUCKETS = rounds(40, 1000)


class SessionFiles(NamedTuple):
    """A session as it lies in the location."""

    floor: int
    state: str
    numbers: dict[int, int]
    """The objects, with their lengths."""


def sessions(servers: SharedServers) -> dict[int, SessionFiles]:
    """All sessions that are on record."""
    found = {}
    for path, value in servers.entries("/wal/sessions/").items():
        record, epoch = json.loads(value), int(path.rsplit("/", 1)[1])
        directory = servers.location / session_directory(epoch)
        numbers = {}
        for each in directory.iterdir() if directory.is_dir() else ():
            try:
                numbers[int(each.name, 16)] = each.stat().st_size
            except (FileNotFoundError, ValueError):
                continue  # deleted meanwhile, or not there yet
        found[epoch] = SessionFiles(record["floor"], record["state"], numbers)
    return found


def holes(session: SessionFiles) -> list[int]:
    """Numbers from the floor on that are missing below a later object."""
    kept = [number for number in session.numbers if number >= session.floor]
    return sorted(set(range(session.floor, max(kept, default=session.floor))) - set(kept))


@pytest.mark.slow
def test_sessions_stay_small_with_many_slow_and_few_fast_buckets_and_nothing_needed_goes(
    own_servers: Own, tmp_path: Path, rng: random.Random
) -> None:
    servers = SharedServers(tmp_path, own_servers, SMALL)
    slow = create_target(servers.coordinator.port, "slow", SLOW_BUCKETS)
    for bucket in range(SLOW_BUCKETS):
        append_to(servers, slow.name, slow.table_id, bucket)
    traffic = Traffic(servers, rng, logs=3, keyed=2, clients=(), readers=False, lookers=False)
    largest = 0

    def trimmed(times: int) -> bool:
        nonlocal largest
        live = [each for each in sessions(servers).values() if each.state == "live"]
        largest = max(largest, *(sum(each.numbers.values()) for each in live))
        return all(each.floor > 0 for each in live) and sum(x.floor for x in live) >= times

    with traffic:
        traffic.progress()
        for _ in range(rounds(1, 60)):
            before = sum(each.floor for each in sessions(servers).values())
            eventually(lambda n=before: trimmed(n + 60), "sessions are trimmed")  # type: ignore[misc]
            traffic.progress()
    assert largest < 2 * RETAINED
    for epoch, session in sessions(servers).items():
        assert holes(session) == [], epoch
    for server_id in SERVERS:  # all disks are lost; what is below the floors is not needed
        servers.lose(server_id)
    for server_id in SERVERS:
        servers.start(server_id)
    traffic.check(remote=True)
    for bucket in range(SLOW_BUCKETS):
        append_to(servers, slow.name, slow.table_id, bucket, expected=3)
    print(f"{traffic.acked_rows} rows, at most {largest} bytes in a session")


def append_to(
    servers: SharedServers, table: str, table_id: int, bucket: int, expected: int = 0
) -> None:
    """Append three rows to a bucket that has a number of rows."""

    def write(client: object) -> int:
        entry = client.produce(table_id, encode(rows(0, 3, 20)), bucket)  # type: ignore[attr-defined]
        assert not entry.error_code, entry.error_message
        return int(entry.base_offset)

    assert at_leader(servers, table, bucket, write) == expected


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

        def cleaned() -> dict[int, SessionFiles]:
            known = sessions(servers)
            gone = {e: s for e, s in known.items() if s.state == "released"}
            left = [n for s in gone.values() for n in s.numbers.values() if n > HEADER_BYTES]
            return gone if gone and not left else {}

        released = eventually(cleaned, "its data is deleted")
        traffic.progress()
    for epoch, session in released.items():
        assert session.numbers, "no seal is left"
        for number in session.numbers:
            name = WalName(epoch, number)
            head = (servers.location / name.path).read_bytes()
            assert read_header(head, name, "the location").kind is not WalKind.DATA
    servers.start(victim)
    traffic.check()
