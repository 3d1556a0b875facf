"""A coordinator in the test process, with real files and a clock that the test sets."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from tests.coordinator.remotes import KEYED, files_below, keyed_json, locations, paths_of, snapshot
from tests.coordinator.support import Cluster, Seconds
from zufluss.coordinator.leases.calls import LeaseCalls
from zufluss.coordinator.leases.timer import LeaseTimer
from zufluss.model.table import TableBucket
from zufluss.net.services import RequestContext
from zufluss.remote.snapshot import KvSnapshot, SnapshotFile
from zufluss.wire.api import ApiKey


class Inside:
    """A cluster with one primary-key table, and its clock."""

    def __init__(self, directory: Path, cluster: Cluster, buckets: int) -> None:
        self.directory = directory
        self.cluster = cluster
        self.time = Seconds()
        table_id = cluster.image.table(KEYED).info.table_id
        self.buckets = [TableBucket(table_id, None, i) for i in range(buckets)]
        self.bucket = self.buckets[0]

    @property
    def leases(self) -> LeaseCalls:
        """The leases themselves."""
        return self.cluster.coordinator.leases

    @property
    def timer(self) -> LeaseTimer:
        """What ends leases."""
        return self.cluster.coordinator.lease_timer

    async def ask(self, key: ApiKey, principal: str | None = None, **fields: Any) -> Any:
        """Call a handler with an encoded request, and decode its answer, as the network does."""
        api, handler = self.cluster.services.handlers[key]
        request = api.request.FromString(api.request(**fields).SerializeToString())
        answer = await handler(request, RequestContext(principal, "CLIENT", 0, "test"))
        return api.response.FromString(answer.SerializeToString())

    async def take(
        self,
        snapshot_id: int,
        shared: Sequence[SnapshotFile] = (),
        bucket: TableBucket | None = None,
    ) -> KvSnapshot:
        """Upload a snapshot and commit it."""
        made, data = await snapshot(self.cluster, bucket or self.bucket, snapshot_id, shared)
        await self.cluster.coordinator.remote.commit_snapshot(data, 0)
        return made

    async def settled(self) -> None:
        """Wait until snapshots that are no longer kept were dropped and their files deleted."""
        snapshots = self.cluster.coordinator.remote.snapshots
        await snapshots.retentions.settle()
        await snapshots.deletions.settle()

    def kept(self, bucket: TableBucket | None = None) -> list[int]:
        """The snapshots of a bucket that are kept."""
        found = self.cluster.coordinator.remotes.get(bucket or self.bucket)
        return [handle.snapshot_id for handle in found.snapshots]

    def are_there(self, made: Iterable[KvSnapshot]) -> bool:
        """Whether every file of some snapshots exists, `_METADATA` included."""
        return {path for each in made for path in paths_of(each)} <= files_below(self.directory)

    async def crash(self, away_seconds: float = 0) -> None:
        """Crash, and start again after a time with another monotonic clock."""
        dead = self.cluster
        await dead.store.close()
        await dead.coordinator.stop()
        self.cluster = Cluster(dead.directory)
        self.cluster.conf, self.cluster.clock = dead.conf, dead.clock
        self.cluster.clock.now_ms += round(away_seconds * 1000)
        self.cluster.seconds, self.time.now = self.time, 5.0
        await self.cluster.start()

    async def stored(self) -> dict[str, bytes]:
        """Everything in the metadata store."""
        return {entry.path: entry.value for entry in await self.cluster.store.tree("/")}


@asynccontextmanager
async def inside(
    directory: Path, conf: Mapping[str, str] | None = None, *, buckets: int = 1
) -> AsyncIterator[Inside]:
    """A coordinator of its own."""
    cluster = Cluster(directory / "meta", {**locations(directory), **(conf or {})})
    time = cluster.seconds = Seconds()
    await cluster.start()
    await cluster.catalog.create_table(KEYED, keyed_json(buckets=buckets))
    it = Inside(directory, cluster, buckets)
    it.time = time
    try:
        yield it
    finally:
        await it.cluster.stop()
