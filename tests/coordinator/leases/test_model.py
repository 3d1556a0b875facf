"""Leases at random against a model of a few lines: the same pins, listing, numbers and store.

Acquires by number and of the latest, renewals, releases, drops, revocations, new snapshots, time
that passes, writes that fail before or after they took place, and crashes.
"""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import Coroutine, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeVar

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from tests.coordinator.lease_world import DAILY, TABLE, LeaseWorld
from zufluss.errors import KvSnapshotLeaseNotFoundError
from zufluss.meta.api import MetaStoreError, Op
from zufluss.model.lease import LeasedSnapshot, Unavailable
from zufluss.model.table import TableBucket

IDS = st.sampled_from("abc")
MINUTES = st.integers(1, 60)
BUCKETS = st.lists(st.integers(0, 5), min_size=1, max_size=4)
GRACE_SECONDS = 600

T = TypeVar("T")


class LeaseModel(RuleBasedStateMachine):
    """Leases and their model: pins by bucket, deadline, revocations."""

    def __init__(self) -> None:
        super().__init__()
        self.runner = asyncio.Runner()
        self.directory = tempfile.TemporaryDirectory(prefix="zufluss-leases-")
        self.pins: dict[str, dict[TableBucket, int]] = {}
        self.over: dict[str, float] = {}
        self.minutes: dict[str, int] = {}
        self.revoked: dict[str, set[tuple[int, int | None]]] = {}

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        return self.runner.run(work)

    @initialize()
    def begin(self) -> None:
        self.world = self.run(LeaseWorld.start(Path(self.directory.name), buckets=2))
        self.buckets = [*self.world.buckets, *self.world.daily]
        self.run(self.world.take(self.buckets[:-1], 0))

    def teardown(self) -> None:
        self.run(self.world.close())
        self.runner.close()
        self.directory.cleanup()

    # The model

    def end(self, lease_id: str) -> None:
        for part in (self.pins, self.over, self.minutes, self.revoked):
            part.pop(lease_id, None)

    def forget_what_is_over(self) -> None:
        now = self.world.seconds.now
        for lease_id in [i for i, over in self.over.items() if over <= now]:
            self.end(lease_id)

    def prolong(self, lease_id: str, minutes: int) -> None:
        self.over[lease_id] = self.world.seconds.now + 60 * minutes
        self.minutes[lease_id] = minutes

    def acquired(self, lease_id: str, minutes: int, got: dict[TableBucket, int]) -> None:
        if got or lease_id in self.pins:
            self.pins.setdefault(lease_id, {}).update(got)
            self.revoked.setdefault(lease_id, set())
            self.prolong(lease_id, minutes)

    # What happens

    @rule(lease_id=IDS, minutes=MINUTES, numbers=BUCKETS)
    def acquire_latest(self, lease_id: str, minutes: int, numbers: list[int]) -> None:
        self.forget_what_is_over()
        buckets = [self.buckets[i] for i in numbers]
        newest = {b: kept[-1] for b in buckets if (kept := self.world.kept(b))}
        work = self.world.leases.acquire_latest(lease_id, 60_000 * minutes, buckets, principal=None)
        got = self.run(work)
        assert got.leased == {b: LeasedSnapshot(i, 10 * i) for b, i in newest.items()}
        assert set(got.unavailable) == set(buckets) - newest.keys()
        self.acquired(lease_id, minutes, newest)

    @rule(lease_id=IDS, minutes=MINUTES, numbers=BUCKETS, snapshot_id=st.integers(0, 6))
    def acquire(self, lease_id: str, minutes: int, numbers: list[int], snapshot_id: int) -> None:
        self.forget_what_is_over()
        wanted = {self.buckets[i]: snapshot_id for i in numbers}
        there = {b: i for b, i in wanted.items() if i in self.world.kept(b)}
        got = self.run(
            self.world.leases.acquire(lease_id, 60_000 * minutes, wanted, principal=None)
        )
        assert got.leased.keys() == there.keys()
        assert set(got.unavailable.values()) <= {Unavailable.GONE, Unavailable.NO_SNAPSHOT}
        self.acquired(lease_id, minutes, there)

    @rule(lease_id=IDS, minutes=MINUTES)
    def renew(self, lease_id: str, minutes: int) -> None:
        self.forget_what_is_over()
        known = lease_id in self.pins
        try:
            self.run(self.world.leases.renew(lease_id, 60_000 * minutes, principal=None))
            assert known
            self.prolong(lease_id, minutes)
        except KvSnapshotLeaseNotFoundError:
            assert not known

    @rule(lease_id=IDS, numbers=BUCKETS)
    def release(self, lease_id: str, numbers: list[int]) -> None:
        self.forget_what_is_over()
        buckets = [self.buckets[i] for i in numbers]
        self.run(self.world.leases.release(lease_id, buckets, principal=None))
        for bucket in buckets:
            self.pins.get(lease_id, {}).pop(bucket, None)
        if not self.pins.get(lease_id) and not self.revoked.get(lease_id):
            self.end(lease_id)

    @rule(lease_id=IDS)
    def drop(self, lease_id: str) -> None:
        self.run(self.world.leases.drop(lease_id, principal=None))
        self.end(lease_id)

    @rule(owner=st.sampled_from([(TABLE, None), (DAILY, 20), (DAILY, 21), (DAILY, None)]))
    def revoke(self, owner: tuple[int, int | None]) -> None:
        """The buckets stay, so that they can be leased again; only the leases lose them."""
        self.forget_what_is_over()
        self.run(self.world.leases.revoke(*owner, "gone"))
        for lease_id, pins in self.pins.items():
            lost = [b for b in pins if b[0] == owner[0] and owner[1] in (None, b.partition_id)]
            for bucket in lost:
                del pins[bucket]
                self.revoked[lease_id].add(owner)

    @rule(numbers=BUCKETS)
    def snapshot(self, numbers: list[int]) -> None:
        for bucket in {self.buckets[i] for i in numbers}:
            after = self.world.remotes.get(bucket).next_snapshot_id
            self.run(self.world.take([bucket], after))

    @rule(minutes=st.integers(1, 40), timer=st.booleans())
    def time_passes(self, minutes: int, timer: bool) -> None:
        self.world.seconds.now += 60 * minutes
        if timer:
            self.run(self.world.timer.expire())

    @rule(lease_id=IDS, after=st.booleans(), release=st.booleans())
    def a_write_fails(self, lease_id: str, after: bool, release: bool) -> None:
        """Nobody is told that it took place, so only what it pins or frees may differ."""
        self.forget_what_is_over()
        self.run(self.world.timer.expire())
        transact, bucket = self.world.store.transact, self.buckets[0]

        async def fails(ops: Sequence[Op]) -> None:
            if after:
                await transact(ops)
            raise MetaStoreError("unplugged")

        self.world.store.transact = fails  # type: ignore[method-assign]
        with suppress(MetaStoreError):
            if release:
                self.run(self.world.leases.release(lease_id, [bucket], principal=None))
            else:
                self.run(self.world.leases.drop(lease_id, principal=None))
        self.world.store.transact = transact  # type: ignore[method-assign]
        if after and release:
            self.release(lease_id, [0])
        elif after:
            self.drop(lease_id)

    @rule()
    def crash(self) -> None:
        """Acknowledged leases exist, with the time written last, or with the grace."""
        self.forget_what_is_over()
        self.run(self.world.timer.expire())
        self.run(self.world.restart())
        for lease_id, minutes in self.minutes.items():
            self.over[lease_id] = self.world.seconds.now + max(GRACE_SECONDS, 60 * minutes)

    # What must hold

    @invariant()
    def leased_is_readable_and_everything_is_counted(self) -> None:
        self.forget_what_is_over()
        self.run(self.world.timer.expire())
        held = {(b, i) for pins in self.pins.values() for b, i in pins.items()}
        for bucket in self.buckets:
            there = self.world.kept(bucket)
            assert {i for b, i in held if b == bucket} <= set(there)
            assert all(
                self.world.leases.book.pins.pinned(bucket, i) is ((bucket, i) in held)
                for i in there
            )
        counts = self.world.leases.book.counts
        assert (counts.leases, counts.snapshots, counts.bytes) == (
            len(self.pins),
            len(held),
            100 * len(held),
        )
        for owner in ((TABLE, None), (DAILY, 20), (DAILY, 21), (DAILY, None)):
            holds = any(b[0] == owner[0] and owner[1] in (None, b[1]) for b, _ in held)
            assert self.world.leases.book.pins.holds(*owner) is holds

    @invariant()
    def the_listing_is_the_model(self) -> None:
        now = self.world.seconds.now
        ids = [info.lease_id for info in self.world.leases.book.infos()]
        assert ids == sorted(self.pins)
        for lease_id in ids:
            [info] = self.world.leases.book.infos(lease_id)
            assert {b: s.snapshot_id for b, s in info.leased.items()} == self.pins[lease_id]
            assert info.remaining_ms == round(1000 * (self.over[lease_id] - now))
            assert {(r.table_id, r.partition_id) for r in info.revoked} == self.revoked[lease_id]


TestLeaseModel = LeaseModel.TestCase
TestLeaseModel.settings = settings(
    max_examples=40,
    stateful_step_count=25,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
)
