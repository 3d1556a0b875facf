"""A coordinator with a real store and a tablet server that remembers what it was told."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from zufluss.cluster.configs import DynamicConfigs
from zufluss.cluster.image import ClusterImage, ClusterNode, ImageChange
from zufluss.cluster.producers import TableProducers
from zufluss.cluster.replicas import (
    KvSnapshotOffset,
    LakeOffsets,
    ReplicaAssignment,
    ReplicaStop,
)
from zufluss.cluster.wal import WalSession
from zufluss.config.load import Configuration
from zufluss.config.values import Endpoint
from zufluss.coordinator.server import Coordinator
from zufluss.meta.api import MetaStore
from zufluss.meta.embedded import EmbeddedStore
from zufluss.model.schema import Schema
from zufluss.model.table import TableBucket, TableDescriptor, TablePath
from zufluss.net.services import RequestContext, Services
from zufluss.remote.locations import Locations
from zufluss.wire.api import APIS, ApiKey

DAY_MS = 86_400_000
NOON = 1_717_243_200_000  # 2024-06-01 12:00 UTC
COORDINATOR = ClusterNode(0, (Endpoint("CLIENT", "co", 1), Endpoint("INTERNAL", "co-in", 2)))
TABLET = ClusterNode(1, (Endpoint("CLIENT", "ts", 3), Endpoint("INTERNAL", "ts-in", 4)), "r1")
EVENTS = TablePath("fluss", "events")
COUNTED = 1
"""The column id of the auto-increment column of a `counted` table."""


class Clock:
    """A wall clock that only a test moves."""

    def __init__(self, now_ms: int = NOON) -> None:
        self.now_ms = now_ms

    def __call__(self) -> int:
        return self.now_ms


class Seconds:
    """A monotonic clock that only a test moves."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


class RecordingTablet:
    """Holds buckets as a tablet server does, without any log; `failure` makes starts fail.

    `deaf` is what every call about producers raises.
    """

    def __init__(self) -> None:
        self.image = ClusterImage()
        self.buckets: dict[TableBucket, ReplicaAssignment] = {}
        self.failure: Exception | None = None
        self.stop_failure: Exception | None = None
        self.gate: asyncio.Event | None = None
        self.waiting = asyncio.Event()
        self.started: asyncio.Queue[str | None] = asyncio.Queue()
        self.assigned = 0
        self.lake_offsets: dict[TableBucket, LakeOffsets] = {}
        self.snapshot_offsets: dict[TableBucket, KvSnapshotOffset] = {}
        self.configs: dict[str, str] = {}
        self.configs_when_assigned: dict[str, str] = {}
        self.locations: Locations | None = None
        self.producers: dict[int, TableProducers] = {}
        self.idle_ms: dict[int, int] = {}
        self.ends: dict[TableBucket, int] = {}
        self.end = 0
        self.deaf: Exception | None = None
        self.prepared: list[ReplicaAssignment] = []
        self.prepare_failure: Exception | None = None
        self.released: list[tuple[TableBucket, int]] = []
        self.release_failure: Exception | None = None
        self.release_gate = asyncio.Event()
        self.release_gate.set()
        self.release_end = 7

    async def assign(
        self,
        image: ClusterImage,
        replicas: Sequence[ReplicaAssignment],
        producers: Sequence[TableProducers] = (),
        session: WalSession | None = None,
        *,
        goes_on: bool = False,
    ) -> None:
        self.image = image
        if not goes_on:
            self.session = session
        self.configs_when_assigned = self.configs
        self.buckets = {r.table_bucket: r for r in replicas}
        self.producers = {t.table_id: t for t in producers}
        self.assigned += 1

    async def update_metadata(self, changes: Sequence[ImageChange]) -> None:
        self.image.apply(changes)

    async def start_replicas(self, replicas: Sequence[ReplicaAssignment]) -> None:
        for replica in replicas:
            assert self.image.table_by_id(replica.table_bucket.table_id), "metadata comes first"
        if self.gate is not None:
            self.waiting.set()
            await self.gate.wait()
        if self.failure is not None:
            raise self.failure
        self.buckets |= {r.table_bucket: r for r in replicas}
        for replica in replicas:
            self.started.put_nowait(replica.physical_path.partition)

    async def stop_replicas(self, replicas: Sequence[ReplicaStop]) -> None:
        if self.stop_failure is not None:
            raise self.stop_failure
        for stop in replicas:
            if stop.delete:
                self.buckets.pop(stop.table_bucket, None)

    async def release_bucket(self, bucket: TableBucket, leader_epoch: int) -> int:
        self.released.append((bucket, leader_epoch))
        if self.release_failure is not None:
            raise self.release_failure
        await self.release_gate.wait()
        return self.release_end

    async def prepare_bucket(self, assignment: ReplicaAssignment) -> None:
        self.prepared.append(assignment)
        if self.prepare_failure is not None:
            raise self.prepare_failure

    async def notify_lake_offsets(self, offsets: Sequence[LakeOffsets]) -> None:
        self.lake_offsets |= {o.table_bucket: o for o in offsets}

    async def notify_kv_snapshot_offset(self, offsets: Sequence[KvSnapshotOffset]) -> None:
        self.snapshot_offsets |= {o.table_bucket: o for o in offsets}

    async def update_configs(self, configs: DynamicConfigs) -> None:
        self.configs = dict(configs.values)

    async def update_locations(self, locations: Locations) -> None:
        self.locations = locations

    async def update_producers(self, tables: Sequence[TableProducers]) -> None:
        if self.deaf is not None:
            raise self.deaf
        for table in tables:
            before = self.producers.get(table.table_id)
            if before is None or before.version < table.version:
                self.producers[table.table_id] = table

    async def producer_idle_ms(self, table_id: int, numbers: Sequence[int]) -> list[int]:
        if self.deaf is not None:
            raise self.deaf
        return [self.idle_ms.get(number, -1) for number in numbers]

    async def end_offsets(self, buckets: Sequence[TableBucket]) -> dict[TableBucket, int]:
        if self.deaf is not None:
            raise self.deaf
        assert set(buckets) <= set(self.buckets), "it is asked for what it leads"
        return {bucket: self.ends.get(bucket, self.end) for bucket in buckets}


class Cluster:
    """Both roles in one process, over a store in a directory."""

    def __init__(self, directory: Path, conf: Mapping[str, str] | None = None) -> None:
        self.directory = directory
        data = {"data.dir": str(directory.parent / "data")}
        self.conf = Configuration.of(data | dict(conf or {}))
        self.clock = Clock()
        self.seconds: Callable[[], float] = time.monotonic
        self.tablet = RecordingTablet()
        self.services = Services()
        self.open_store: Callable[[Path], Awaitable[MetaStore]] = EmbeddedStore.open

    async def start(self) -> Cluster:
        self.store = await self.open_store(self.directory)
        self.coordinator = await Coordinator.open(
            self.conf, self.store, COORDINATOR, self.clock, clock=self.seconds
        )
        await self.coordinator.attach(TABLET, self.tablet)
        self.catalog = self.coordinator.catalog
        self.image = self.coordinator.image
        self.services = Services()
        self.coordinator.register(self.services)
        self.services.attach(self.coordinator.writer_ids)
        return self

    async def stop(self) -> None:
        await self.coordinator.stop()
        await self.store.close()

    async def restart(self) -> Cluster:
        await self.stop()
        again = Cluster(self.directory)
        again.conf, again.clock, again.seconds = self.conf, self.clock, self.seconds
        again.open_store = self.open_store
        again.tablet.end, again.tablet.ends = self.tablet.end, self.tablet.ends
        return await again.start()

    async def call(self, key: ApiKey, listener: str = "CLIENT", **fields: Any) -> Any:
        """Ask an API as the network would: through its message, both ways."""
        return await call(self.services, key, APIS[key].request(**fields), listener)


@asynccontextmanager
async def successor(cluster: Cluster) -> AsyncIterator[Coordinator]:
    """A coordinator that takes the store over from another one that still runs."""
    later = await Coordinator.open(cluster.conf, cluster.store, COORDINATOR, cluster.clock)
    try:
        yield later
    finally:
        await later.stop()


async def call(services: Services, key: ApiKey, request: Any, listener: str = "CLIENT") -> Any:
    api, handler = services.handlers[key]
    request = api.request.FromString(request.SerializeToString())
    response = await handler(request, RequestContext(None, listener, 0, "test"))
    assert isinstance(response, api.response)
    return api.response.FromString(response.SerializeToString())


def table_json(
    columns: str = "a INT, b STRING",
    *,
    partitions: tuple[str, ...] = (),
    buckets: int | None = 1,
    properties: Mapping[str, str] | None = None,
) -> bytes:
    return TableDescriptor(
        schema=Schema.of(columns),
        partition_keys=partitions,
        bucket_count=buckets,
        properties=dict(properties or {}),
    ).to_json()


def counted(type_text: str = "BIGINT", partitions: tuple[str, ...] = ()) -> bytes:
    """A primary-key table whose second column counts."""
    schema = Schema.of(f"k INT, n {type_text}, v STRING", ("k", *partitions), ("n",))
    return TableDescriptor(schema, bucket_count=2, partition_keys=partitions).to_json()


def auto_partitioned(**properties: str) -> bytes:
    """A table by day `d`, with auto-partition properties given with `_` for `-`."""
    given = {f"table.auto-partition.{k.replace('_', '-')}": v for k, v in properties.items()}
    defaults = {
        "table.auto-partition.enabled": "true",
        "table.auto-partition.time-zone": "UTC",
    }
    return table_json("a INT, d STRING", partitions=("d",), properties={**defaults, **given})


def picture(image: ClusterImage) -> list[ImageChange]:
    """All entries of an image in a fixed order, to compare two images."""
    return sorted(image.snapshot(), key=repr)
