"""Leases under random calls, snapshots, passing time and crashes, with real files.

Two invariants must hold after every step, once background work is done:

| invariant | what is checked |
|---|---|
| leased ⇒ readable | the answer for the snapshot's metadata, and every file that it names |
| unleased and outside the window ⇒ gone | everything in remote storage: not one file more |

Snapshots share files with the ones before, at random. `tests/coordinator/leases/test_model.py` does
the same without files and with stores that fail, and compares listing and numbers.
"""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import Coroutine
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Any, TypeVar

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from tests.coordinator.remotes import files_below, paths_of, shared_file
from tests.counts import rounds
from tests.end_to_end.leases.local_coordinator import Inside, inside
from tests.end_to_end.leases.stage import exist
from zufluss.errors import KvSnapshotLeaseNotFoundError, KvSnapshotNotExistError
from zufluss.model.table import TableBucket
from zufluss.remote.snapshot import KvSnapshot
from zufluss.wire.api import ApiKey

BUCKETS = 2
RETAINED = 2
GRACE_SECONDS = 600.0
IDS = st.sampled_from("ab")
MINUTES = st.integers(1, 60)
NUMBERS = st.sets(st.integers(0, BUCKETS - 1), min_size=1)

T = TypeVar("T")


class FilesOfLeases(RuleBasedStateMachine):
    """A coordinator with real files, and a model of the files that should exist."""

    def __init__(self) -> None:
        super().__init__()
        self.runner = asyncio.Runner()
        self.directory = tempfile.TemporaryDirectory(prefix="zufluss-leases-")
        self.opened: AbstractAsyncContextManager[Inside] | None = None
        self.made: list[list[KvSnapshot]] = [[] for _ in range(BUCKETS)]
        self.pins: dict[str, dict[int, int]] = {}
        self.over: dict[str, float] = {}
        self.minutes: dict[str, int] = {}

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        return self.runner.run(work)

    @initialize()
    def begin(self) -> None:
        self.opened = inside(Path(self.directory.name), buckets=BUCKETS)
        self.it = self.run(self.opened.__aenter__())  # type: ignore[arg-type]

    def teardown(self) -> None:
        if self.opened is not None:
            self.run(self.opened.__aexit__(None, None, None))  # type: ignore[arg-type]
        self.runner.close()
        self.directory.cleanup()

    # The model

    def forget_what_is_over(self) -> None:
        for lease_id in [i for i, over in self.over.items() if over <= self.it.time.now]:
            self.end(lease_id)

    def end(self, lease_id: str) -> None:
        for part in (self.pins, self.over, self.minutes):
            part.pop(lease_id, None)

    def got(self, lease_id: str, minutes: int, pins: dict[int, int]) -> None:
        if pins or lease_id in self.pins:
            self.pins.setdefault(lease_id, {}).update(pins)
            self.over[lease_id] = self.it.time.now + 60 * minutes
            self.minutes[lease_id] = minutes

    def wanted(self, number: int) -> set[int]:
        """The snapshots of a bucket that should be kept."""
        newest = range(len(self.made[number]))[-RETAINED:]
        return {*newest, *(pins[number] for pins in self.pins.values() if number in pins)}

    # What happens

    @rule(numbers=NUMBERS, count=st.integers(1, RETAINED + 1), inherit=st.sets(st.integers(0, 3)))
    def snapshots(self, numbers: set[int], count: int, inherit: set[int]) -> None:
        """New ones, up to so many that what was there is outside the window."""
        for number in numbers:
            for _ in range(count):
                self.snapshot(number, inherit)

    def snapshot(self, number: int, inherit: set[int]) -> None:
        """A snapshot that shares some files with the one before, and has one of its own."""
        bucket, before = self.it.buckets[number], self.made[number]
        known = before[-1].shared if before else ()
        shared = [file for at, file in enumerate(known) if at in inherit]
        own = self.run(shared_file(self.it.cluster, bucket, f"{len(before)}.sst"))
        before.append(self.run(self.it.take(len(before), (*shared, own), bucket)))

    @rule(lease_id=IDS, minutes=MINUTES, numbers=NUMBERS)
    def acquire_latest(self, lease_id: str, minutes: int, numbers: set[int]) -> None:
        self.forget_what_is_over()
        buckets = [self.it.buckets[i] for i in numbers]
        leases, duration_ms = self.it.leases, 60_000 * minutes
        lease = self.run(leases.acquire_latest(lease_id, duration_ms, buckets, principal=None))
        pins = {i: len(self.made[i]) - 1 for i in numbers if self.made[i]}
        assert {b.bucket_id: s.snapshot_id for b, s in lease.leased.items()} == pins
        self.got(lease_id, minutes, pins)

    @rule(lease_id=IDS, minutes=MINUTES, numbers=NUMBERS, back=st.integers(0, 3))
    def acquire(self, lease_id: str, minutes: int, numbers: set[int], back: int) -> None:
        """Acquire by id, also a snapshot that is no longer kept."""
        self.forget_what_is_over()
        asked = {i: max(len(self.made[i]) - 1 - back, 0) for i in numbers}
        pins = {i: wanted for i, wanted in asked.items() if wanted in self.wanted(i)}
        by_bucket = {self.it.buckets[i]: wanted for i, wanted in asked.items()}
        work = self.it.leases.acquire(lease_id, 60_000 * minutes, by_bucket, principal=None)
        assert {b.bucket_id for b in self.run(work).leased} == pins.keys()
        self.got(lease_id, minutes, pins)

    @rule(lease_id=IDS, minutes=MINUTES)
    def renew(self, lease_id: str, minutes: int) -> None:
        self.forget_what_is_over()
        known = lease_id in self.pins
        try:
            self.run(self.it.leases.renew(lease_id, 60_000 * minutes, principal=None))
        except KvSnapshotLeaseNotFoundError:
            assert not known
        else:
            assert known
            self.got(lease_id, minutes, {})

    @rule(lease_id=IDS, numbers=NUMBERS)
    def release(self, lease_id: str, numbers: set[int]) -> None:
        self.forget_what_is_over()
        buckets = [self.it.buckets[i] for i in numbers]
        self.run(self.it.leases.release(lease_id, buckets, principal=None))
        left = self.pins.get(lease_id, {})
        for number in numbers:
            left.pop(number, None)
        if not left:  # it ends with its last snapshot
            self.end(lease_id)

    @rule(lease_id=IDS)
    def drop(self, lease_id: str) -> None:
        self.run(self.it.leases.drop(lease_id, principal=None))
        self.end(lease_id)

    @precondition(lambda self: self.pins)
    @rule(at=st.integers(0, 5), release=st.booleans())
    def end_one_of_those_there_are(self, at: int, release: bool) -> None:
        lease_id = sorted(self.pins)[at % len(self.pins)]
        if release:
            self.release(lease_id, {min(self.pins[lease_id])})
        else:
            self.drop(lease_id)

    @rule(minutes=st.integers(1, 40))
    def time_passes(self, minutes: int) -> None:
        self.it.time.now += 60 * minutes
        self.run(self.it.timer.expire())
        self.forget_what_is_over()

    @rule(minutes=st.integers(0, 120))
    def crash(self, minutes: int) -> None:
        """An acknowledged lease continues with the time written last, or with the grace."""
        self.run(self.it.timer.expire())
        self.forget_what_is_over()
        self.run(self.it.crash(60 * minutes))
        for lease_id, lasts in self.minutes.items():
            self.over[lease_id] = self.it.time.now + max(GRACE_SECONDS, 60 * lasts)

    @rule()
    def sweep(self) -> None:
        """The sweep looks for files that nothing refers to; there are none."""
        self.it.cluster.clock.now_ms += 2 * 86_400_000
        self.run(self.it.cluster.coordinator.remote.sweep.sweep())

    # What must hold

    @invariant()
    def leased_is_readable(self) -> None:
        if self.opened is not None:
            self.run(self.it.settled())
            for pins in self.pins.values():
                for number, snapshot_id in pins.items():
                    assert self.run(self.is_readable(self.it.buckets[number], snapshot_id))

    @invariant()
    def what_nobody_leases_and_the_window_does_not_have_is_gone(self) -> None:
        if self.opened is None:
            return
        expected: set[str] = set()
        for number, made in enumerate(self.made):
            wanted = self.wanted(number)
            assert set(self.it.kept(self.it.buckets[number])) == wanted
            expected |= {path for i in wanted for path in paths_of(made[i])}
        there = files_below(Path(self.directory.name))
        assert {path for path in there if path.startswith("l")} == expected

    async def is_readable(self, bucket: TableBucket, snapshot_id: int) -> bool:
        try:
            answer = await self.it.ask(
                ApiKey.GET_KV_SNAPSHOT_METADATA,
                table_id=bucket.table_id,
                bucket_id=bucket.bucket_id,
                snapshot_id=snapshot_id,
            )
        except KvSnapshotNotExistError:
            return False
        files = {Path(each.remote_path.removeprefix("file://")) for each in answer.snapshot_files}
        return bool(files) and exist(files) == files


test_leased_is_readable_and_the_rest_is_gone = FilesOfLeases.TestCase
test_leased_is_readable_and_the_rest_is_gone.settings = settings(
    max_examples=rounds(30, 300),
    stateful_step_count=rounds(20, 40),
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
)
