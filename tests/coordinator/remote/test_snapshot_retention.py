"""Snapshots of a bucket under commits, leases, failing deletions, drops and crashes, at random.

Whatever happens, every file of a kept snapshot exists. When the trouble is over, nothing else does.
"""

from __future__ import annotations

import asyncio
import shutil
import tempfile
import time
from collections.abc import Coroutine, Sequence
from pathlib import Path
from typing import Any, TypeVar

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
)

from tests.coordinator.remotes import (
    KEYED,
    files_below,
    keyed_json,
    locations,
    paths_of,
    shared_file,
    snapshot,
    storage,
)
from tests.coordinator.support import DAY_MS, Cluster
from tests.counts import rounds
from zufluss.coordinator.leases.calls import LeaseCalls
from zufluss.model.table import TableBucket
from zufluss.remote.errors import LocationUnavailableError
from zufluss.remote.files import usage
from zufluss.remote.objects import Objects
from zufluss.remote.snapshot import KvSnapshot

LOCATIONS = 3
RETAINED = 2
AWAY_MS = 10 * DAY_MS

PLACES = st.lists(st.integers(1, LOCATIONS), max_size=3)
HOMES = st.integers(1, LOCATIONS)

T = TypeVar("T")


class Retention(RuleBasedStateMachine):
    """The snapshots of a bucket and their model."""

    def __init__(self) -> None:
        super().__init__()
        self.runner = asyncio.Runner()
        self.directory = Path(tempfile.mkdtemp(prefix="zufluss-retention-"))
        self.pinned: set[int] = set()
        self.failing: set[int] = set()
        self.committed: list[KvSnapshot] = []
        self.next_id = 0

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        return self.runner.run(work)

    # What happens

    @initialize()
    def begin(self) -> None:
        conf = locations(self.directory, LOCATIONS) | {
            "kv.snapshot.num-retained": str(RETAINED),
            "zufluss.remote.sweep.interval": "0",
        }
        self.cluster = self.run(Cluster(self.directory / "meta", conf).start())
        self.cluster.clock.now_ms = int(time.time() * 1000) - AWAY_MS
        self.create()
        self.watch()

    def create(self) -> None:
        entry = self.run(self.cluster.catalog.create_table(KEYED, keyed_json()))
        self.bucket = TableBucket(entry.info.table_id, None, 0)

    def watch(self) -> None:
        """Have this process obey the failures."""
        for location_id in range(1, LOCATIONS + 1):
            self.fail_where_told(location_id, storage(self.cluster).objects(location_id))

    def fail_where_told(self, location_id: int, objects: Objects) -> None:
        delete = objects.delete

        async def fails_when_told(paths: Sequence[str]) -> None:
            if location_id in self.failing:
                await delete(paths[: len(paths) // 2])
                raise LocationUnavailableError(f"l{location_id}", "", "unplugged")
            await delete(paths)

        objects.delete = fails_when_told  # type: ignore[method-assign]

    @rule(places=PLACES, compacted=st.integers(0, 2), home=HOMES, again=st.booleans())
    def take(self, places: list[int], compacted: int, home: int, again: bool) -> None:
        """Commit a snapshot, once or twice, and go on at once."""
        made, data = self.run(self.upload(places, compacted, home))
        for _ in range(1 + again):
            self.run(self.cluster.coordinator.remote.commit_snapshot(data, 0))
        self.committed.append(made)
        self.next_id += 1

    @rule(places=PLACES, compacted=st.integers(0, 2), home=HOMES)
    def take_and_settle(self, places: list[int], compacted: int, home: int) -> None:
        """Commit a snapshot, and wait for the deletions."""
        self.take(places, compacted, home, again=False)
        self.run(self.cluster.coordinator.remote.snapshots.deletions.settle())

    @rule(places=PLACES, compacted=st.integers(0, 2), home=HOMES, burned=st.booleans())
    def fail_before_the_commit(
        self, places: list[int], compacted: int, home: int, burned: bool
    ) -> None:
        """Upload a snapshot that is never committed; its number may be used again."""
        self.run(self.upload(places, compacted, home))
        self.next_id += burned

    async def upload(
        self, places: list[int], compacted: int, home: int
    ) -> tuple[KvSnapshot, bytes]:
        """Upload the files that are new since the last snapshot, without its oldest ones."""
        before = self.committed[-1].shared if self.committed else ()
        new = [
            await shared_file(self.cluster, self.bucket, f"{self.next_id}-{i}.sst", place)
            for i, place in enumerate(places)
        ]
        shared = (*before[compacted:], *new)
        return await snapshot(self.cluster, self.bucket, self.next_id, shared, location_id=home)

    @precondition(lambda self: self.committed)
    @rule(data=st.data())
    def pin(self, data: st.DataObject) -> None:
        """Lease all kept snapshots, each with its own lease, which may exist already."""
        snapshot_id = data.draw(st.sampled_from([s.snapshot_id for s in self.kept()]))
        wanted = {self.bucket: snapshot_id}
        got = self.run(self.leases.acquire(f"s{snapshot_id}", DAY_MS, wanted, principal=None))
        assert got.leased[self.bucket].snapshot_id == snapshot_id
        self.pinned.add(snapshot_id)

    @precondition(lambda self: self.pinned)
    @rule(data=st.data())
    def unpin(self, data: st.DataObject) -> None:
        snapshot_id = data.draw(st.sampled_from(sorted(self.pinned)))
        self.run(self.leases.release(f"s{snapshot_id}", [self.bucket], principal=None))
        self.pinned.discard(snapshot_id)

    @rule(location_id=st.integers(1, LOCATIONS))
    def location_fails_or_heals(self, location_id: int) -> None:
        self.failing ^= {location_id}

    @rule()
    def crash(self) -> None:
        """Changes under way end before the store is closed."""
        self.cluster = self.run(self.cluster.restart())
        self.watch()

    @rule()
    def sweep(self) -> None:
        """All files are young: the sweep may look, and must leave everything."""
        self.run(self.cluster.coordinator.remote.sweep.sweep())

    @precondition(lambda self: len(self.committed) > RETAINED + 1)
    @rule()
    def drop(self) -> None:
        self.run(self.cluster.catalog.drop_table(KEYED))
        self.run(self.cluster.coordinator.remote.cleaner.drops.settle())
        there = files_below(self.directory)
        assert all(paths_of(s) <= there for s in self.committed if s.snapshot_id in self.pinned)
        for snapshot_id in self.pinned:
            self.run(self.leases.drop(f"s{snapshot_id}", principal=None))
        self.pinned.clear()
        self.committed, self.next_id = [], 0
        self.create()

    # What must hold

    @property
    def leases(self) -> LeaseCalls:
        return self.cluster.coordinator.leases

    def kept(self) -> list[KvSnapshot]:
        found = self.cluster.coordinator.remotes.get(self.bucket).snapshots
        ids = {handle.snapshot_id for handle in found}
        return [s for s in self.committed if s.snapshot_id in ids]

    @invariant()
    def every_file_of_a_kept_snapshot_exists(self) -> None:
        if not hasattr(self, "cluster"):
            return
        kept = self.kept()
        wanted = {s.snapshot_id for s in self.committed[-RETAINED:]} | self.pinned
        assert {s.snapshot_id for s in kept} >= wanted
        there = files_below(self.directory)
        for each in kept:
            assert paths_of(each) <= there

    def teardown(self) -> None:
        if hasattr(self, "cluster"):
            try:
                self.run(self.everything_else_goes())
            finally:
                self.run(self.cluster.stop())
        self.runner.close()
        shutil.rmtree(self.directory)

    async def everything_else_goes(self) -> None:
        self.failing.clear()
        remote = self.cluster.coordinator.remote
        await remote.snapshots.retentions.settle()
        for works in (remote.snapshots.deletions, remote.cleaner.drops):
            works.hurry()
            await works.settle()
        kept = self.kept()
        newest = {s.snapshot_id for s in self.committed[-RETAINED:]}
        assert {s.snapshot_id for s in kept} == newest | self.pinned
        wanted = {path for each in kept for path in paths_of(each)}
        dropped = {path for each in self.committed for path in paths_of(each)} - wanted
        assert not files_below(self.directory) & dropped  # without the sweep
        self.cluster.clock.now_ms += 2 * AWAY_MS
        await remote.sweep.sweep()
        there = {p for p in files_below(self.directory) if p.startswith("l")}
        assert there == wanted
        counted = usage({file for made in kept for file in made.objects})
        live = remote.remotes.live_usage()
        assert sum(u.files for u in live.values()) == len(there)
        assert sum(u.bytes for u in live.values()) == sum(u.bytes for u in counted.values())
        assert remote.sweep.counts.failures == 0


TestRetention = Retention.TestCase
TestRetention.settings = settings(
    max_examples=rounds(20, 200),
    stateful_step_count=20,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
)
