"""Leases of key-value snapshots: a coordinator with a real store, asked through its handlers.

* `acquire`: the latest snapshots of 100,000 buckets in one call, from the bytes of the request to
  those of the answer, against one bare transaction of the same bytes. `stall` is the longest time
  that the event loop was not to be had meanwhile.
* `record`: what that lease is in the store, and what a renewal of it writes.
* `renew`: renewals of 10,000 leases at once, against the same values put by bare transactions of as
  many operations as the coordinator's have.
* `other`: an acquire of another lease while those 10,000 renew without end: the slowest of a
  hundred, against a bare transaction of the same bytes beside nothing.

The only tablet server does nothing; snapshots exist as records in the store only.
"""

from __future__ import annotations

import asyncio
import gc
import itertools
import random
import statistics
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import structlog
import uvloop

from bench.report import Measure, compared
from zufluss.cluster.configs import DynamicConfigs
from zufluss.cluster.image import ClusterImage, ClusterNode, ImageChange
from zufluss.cluster.producers import TableProducers
from zufluss.cluster.remote import SnapshotHandle
from zufluss.cluster.replicas import KvSnapshotOffset, LakeOffsets, ReplicaAssignment, ReplicaStop
from zufluss.config.load import Configuration
from zufluss.config.values import Endpoint
from zufluss.coordinator.bucket_remotes import BucketRecord
from zufluss.coordinator.leases.records import head_path
from zufluss.coordinator.leases.writer import OPS_MAX
from zufluss.coordinator.server import Coordinator
from zufluss.meta.api import Create, Delete, Entry, Op, Put
from zufluss.meta.embedded import EmbeddedStore
from zufluss.model.schema import Schema
from zufluss.model.table import TableBucket, TableDescriptor, TablePath
from zufluss.net.services import RequestContext, Services
from zufluss.remote.locations import Locations
from zufluss.resources import settle_memory, share_interpreter
from zufluss.wire.api import APIS, ApiKey

PARTITIONS = 100
BUCKETS = 1_000
"""Of each partition."""
LEASES = 10_000
QUICK = 10
"""Divisor of all counts with `--quick`."""
ACQUIRES = 100
"""Acquires beside renewals, in each round."""
ARRIVING = 50
"""Renewals that the event loop learns of in one turn."""
HOUR_MS = 3_600_000
TABLE = TablePath("fluss", "leased")
COORDINATOR = ClusterNode(0, (Endpoint("CLIENT", "localhost", 1),))
TABLET = ClusterNode(1, (Endpoint("CLIENT", "localhost", 2),))


def run(directory: Path, rounds: int, quick: bool) -> Iterator[Measure]:
    """One coordinator, one table of many buckets."""
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(30))
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        yield from runner.run(_measures(directory, rounds, QUICK if quick else 1))


async def _measures(directory: Path, rounds: int, less: int) -> list[Measure]:
    async with leased(directory, PARTITIONS // less) as world:
        found = await world.large(rounds)
        found += await world.many(rounds, LEASES // less)
        return found


class IdleTablet:
    """A tablet server that has every bucket and does nothing with it."""

    async def assign(
        self,
        image: ClusterImage,
        replicas: Sequence[ReplicaAssignment],
        producers: Sequence[TableProducers] = (),
    ) -> None:
        """Do nothing."""

    async def update_metadata(self, changes: Sequence[ImageChange]) -> None:
        """Do nothing."""

    async def start_replicas(self, replicas: Sequence[ReplicaAssignment]) -> None:
        """Do nothing."""

    async def stop_replicas(self, replicas: Sequence[ReplicaStop]) -> None:
        """Do nothing."""

    async def notify_lake_offsets(self, offsets: Sequence[LakeOffsets]) -> None:
        """Do nothing."""

    async def notify_kv_snapshot_offset(self, offsets: Sequence[KvSnapshotOffset]) -> None:
        """Do nothing."""

    async def update_locations(self, locations: Locations) -> None:
        """Do nothing."""

    async def update_configs(self, configs: DynamicConfigs) -> None:
        """Do nothing."""

    async def update_producers(self, tables: Sequence[TableProducers]) -> None:
        """Do nothing."""

    async def producer_idle_ms(self, table_id: int, numbers: Sequence[int]) -> list[int]:
        """Answer that no producer ever wrote."""
        return [-1] * len(numbers)

    async def end_offsets(self, buckets: Sequence[TableBucket]) -> dict[TableBucket, int]:
        """Answer that all logs are empty."""
        return dict.fromkeys(buckets, 0)


class Leased:
    """A coordinator, and the buckets that are leased."""

    def __init__(self, store: EmbeddedStore, coordinator: Coordinator) -> None:
        self.store = store
        self.coordinator = coordinator
        self.services = Services()
        coordinator.register(self.services)
        self.buckets: list[TableBucket] = []
        self.numbers = itertools.count()

    async def fill(self, partitions: int) -> None:
        """A table whose buckets have a snapshot each, with numbers as they come about."""
        schema = Schema.of("k INT, d STRING, v STRING", ("k", "d"))
        descriptor = TableDescriptor(schema, bucket_count=BUCKETS, partition_keys=("d",))
        catalog, remotes = self.coordinator.catalog, self.coordinator.remotes
        entry = await catalog.create_table(TABLE, descriptor.to_json())
        rng = random.Random(7)
        for number in range(partitions):
            partition = await catalog.create_partition(TABLE, {"d": f"d{number}"})
            owner = entry.info.table_id, partition.partition_id
            some = [TableBucket(*owner, i) for i in range(BUCKETS)]
            async with remotes.turn:
                await remotes.change_all(some, lambda bucket, _: _record(rng))
            self.buckets += some

    async def call(self, key: ApiKey, **fields: Any) -> Any:
        """Ask an API as the network would: through bytes, both ways."""
        api, handler = self.services.handlers[key]
        request = api.request.FromString(APIS[key].request(**fields).SerializeToString())
        answer = await handler(request, RequestContext(None, "CLIENT", 0, "bench"))
        answer.SerializeToString()
        return answer

    async def acquire(self, lease_id: str, **target: Any) -> Any:
        """Lease the latest snapshots of the table, or of a part of it."""
        return await self.call(
            ApiKey.ACQUIRE_LATEST_KV_SNAPSHOT_LEASE,
            lease_id=lease_id,
            lease_duration_ms=HOUR_MS,
            targets=[{"table_id": self.buckets[0].table_id, **target}],
        )

    async def renew(self, lease_id: str) -> None:
        """Renew a lease."""
        await self.call(
            ApiKey.RENEW_KV_SNAPSHOT_LEASE, lease_id=lease_id, lease_duration_ms=HOUR_MS
        )

    async def drop(self, lease_id: str) -> None:
        """End a lease."""
        await self.call(ApiKey.DROP_KV_SNAPSHOT_LEASE, lease_id=lease_id)

    async def stored(self, lease_id: str) -> list[Entry]:
        """The records of a lease in the store."""
        return await self.store.tree(head_path(lease_id))

    async def bare(self, values: Sequence[bytes]) -> float:
        """Seconds of one transaction that creates these values."""
        paths = [f"/bench/{next(self.numbers)}" for _ in values]
        ops = [Create(path, value) for path, value in zip(paths, values, strict=True)]
        seconds = await timed(lambda: self.store.transact(ops))
        await self.store.transact([Delete(path) for path in paths])
        return seconds

    # One large lease

    async def large(self, rounds: int) -> list[Measure]:
        """A lease of every bucket."""
        seconds: list[float] = []
        stalls: list[float] = []
        bare: list[float] = []
        for number in range(rounds + 1):
            lease_id = f"large-{number}"
            async with stall() as longest:  # apart: who watches takes part of the time
                await self._acquire_all(f"watched-{number}")
            stalls.append(longest[0])
            await self.drop(f"watched-{number}")
            await self.coordinator.remote.snapshots.retentions.settle()
            seconds.append(await timed(lambda i=lease_id: self._acquire_all(i)))
            stored = await self.stored(lease_id)
            bare.append(await self.bare([each.value for each in stored]))
            renewed = await self._renewed_bytes(lease_id, stored)
            await self.drop(lease_id)
            await self.coordinator.remote.snapshots.retentions.settle()
        return [
            *_acquire_measures(len(self.buckets), seconds[1:], stalls[1:], bare[1:]),
            _record_measure(len(self.buckets), sum(len(each.value) for each in stored)),
            Measure(
                "leases.renewal",
                "bytes that a renewal of it writes",
                f"{renewed} B",
                value=renewed / 1024,
                unit="KiB",
                at_most=1,
            ),
        ]

    async def _acquire_all(self, lease_id: str) -> None:
        lease = await self.acquire(lease_id)
        count = sum(len(columns.bucket_ids) for columns in lease.leased)
        if count != len(self.buckets):
            raise RuntimeError(f"{count} buckets were leased, {len(self.buckets)} are there")

    async def _renewed_bytes(self, lease_id: str, before: Sequence[Entry]) -> int:
        """Path and value of everything that a renewal writes."""
        await self.renew(lease_id)
        known = {each.path: each.version for each in before}
        after = await self.stored(lease_id)
        changed = [each for each in after if known[each.path] != each.version]
        return sum(len(each.path) + len(each.value) for each in changed)

    # Many small leases

    async def many(self, rounds: int, count: int) -> list[Measure]:
        """Renewals of many leases at once, and another acquire at the same time."""
        ids = [f"small-{number}" for number in range(count)]
        await asyncio.gather(*(self._acquire_one(i, at) for at, i in enumerate(ids)))
        rates: list[float] = []
        bare: list[float] = []
        stalls: list[float] = []
        beside: list[float] = []
        alone: list[float] = []
        for number in range(rounds + 1):
            async with stall() as longest:
                await self._renew_all(ids)
            rates.append(count / await timed(lambda: self._renew_all(ids)))
            bare.append(count / await self._put_all(ids))
            async with self._renewing(ids):
                slow = [await self._one_more(f"{number}-{i}") for i in range(ACQUIRES)]
            values = [each.value for each in await self.stored(ids[0])]
            fast = [await self.bare(values) for _ in range(ACQUIRES)]
            if number:
                stalls.append(longest[0])
                beside.append(slowest(slow))
                alone.append(slowest(fast))
        return _renew_measures(count, rates[1:], bare[1:], stalls, beside, alone)

    async def _acquire_one(self, lease_id: str, number: int) -> None:
        bucket = self.buckets[number % len(self.buckets)]
        await self.acquire(
            lease_id, partition_id=bucket.partition_id, bucket_ids=[bucket.bucket_id]
        )

    async def _one_more(self, name: str) -> float:
        """Seconds of an acquire; the lease goes again."""
        lease_id = f"more-{name}"
        seconds = await timed(lambda: self._acquire_one(lease_id, 0))
        await self.drop(lease_id)
        return seconds

    async def _renew_all(self, ids: Sequence[str]) -> None:
        """Renew all at once; requests come in a few at a time, as from sockets."""
        tasks: list[asyncio.Future[None]] = []
        for at in range(0, len(ids), ARRIVING):
            tasks += [asyncio.ensure_future(self.renew(i)) for i in ids[at : at + ARRIVING]]
            await asyncio.sleep(0)
        await asyncio.gather(*tasks)

    @asynccontextmanager
    async def _renewing(self, ids: Sequence[str]) -> AsyncIterator[None]:
        """Everybody renews at once, again and again."""
        over = False

        async def without_end() -> None:
            while not over:
                await self._renew_all(ids)

        task = asyncio.ensure_future(without_end())
        try:
            yield
        finally:
            over = True
            await task

    async def _put_all(self, ids: Sequence[str]) -> float:
        """Seconds of putting what renewals put, without any lease."""
        ops: list[Op] = []
        for lease_id in ids:
            path = f"{head_path(lease_id)}/expiry"
            found = await self.store.read(path)
            assert found is not None
            ops.append(Put(path, found.value))
        groups = [ops[at : at + OPS_MAX] for at in range(0, len(ops), OPS_MAX)]

        async def all_groups() -> None:
            for group in groups:
                await self.store.transact(group)

        return await timed(all_groups)


@asynccontextmanager
async def leased(directory: Path, partitions: int) -> AsyncIterator[Leased]:
    """A coordinator with a table of so many partitions, each with many buckets."""
    data = {"data.dir": str(directory / "data"), "zufluss.kv.snapshot.lease.count-max": "1000000"}
    usual, usual_switch = gc.get_threshold(), sys.getswitchinterval()
    store = await EmbeddedStore.open(directory / "meta")
    coordinator = await Coordinator.open(
        Configuration.of(data), store, COORDINATOR, lambda: time.time_ns() // 1_000_000
    )
    await coordinator.attach(TABLET, IdleTablet())
    try:
        world = Leased(store, coordinator)
        await world.fill(partitions)
        settle_memory()
        share_interpreter()
        yield world
    finally:
        gc.unfreeze()
        gc.set_threshold(*usual)
        sys.setswitchinterval(usual_switch)
        await coordinator.stop()
        await store.close()


def _record(rng: random.Random) -> BucketRecord:
    """A bucket with a snapshot, whose number is not that of its neighbours."""
    number = 500 + rng.randrange(100)
    handle = SnapshotHandle(number, rng.randrange(1 << 30), 1, f"kv/{number}/_METADATA", 1 << 20)
    return BucketRecord(next_snapshot_id=number + 1, snapshots=(handle,))


async def timed(work: Callable[[], Awaitable[Any]]) -> float:
    """Seconds that something takes."""
    began = time.perf_counter()
    await work()
    return time.perf_counter() - began


@asynccontextmanager
async def stall() -> AsyncIterator[list[float]]:
    """The longest time, in seconds, that a task that always wants to run had to wait."""
    longest = [0.0]

    async def watch() -> None:
        before = time.perf_counter()
        while True:
            await asyncio.sleep(0)
            now = time.perf_counter()
            longest[0] = max(longest[0], now - before)
            before = now

    task = asyncio.ensure_future(watch())
    await asyncio.sleep(0)
    try:
        yield longest
    finally:
        task.cancel()


def slowest(seconds: Sequence[float]) -> float:
    """What 99 of a hundred do not exceed."""
    return statistics.quantiles(seconds, n=100)[-1]


def _acquire_measures(
    buckets: int, seconds: Sequence[float], stalls: Sequence[float], bare: Sequence[float]
) -> Iterator[Measure]:
    label = f"acquire of the latest snapshots of {buckets} buckets"
    typical = statistics.median(seconds)
    yield Measure("leases.acquire", label, f"{typical:.2f} s", value=typical, unit="s", at_most=1.0)
    yield compared(
        "leases.acquire_bare",
        "the same, against a bare transaction of its bytes",
        [1e3 * each for each in seconds],
        [1e3 * each for each in bare],
        " ms",
        less_is_better=True,
    )
    yield _milliseconds("leases.stall", "the event loop is held up meanwhile, at most", stalls)


def _record_measure(buckets: int, size: int) -> Measure:
    return Measure(
        "leases.record",
        f"record of a lease of {buckets} buckets",
        f"{size / 1000:.0f} kB, {size / buckets:.2f} B per bucket",
        value=size / 1024,
        unit="KiB",
        at_most=1e6 / 1024,
    )


def _renew_measures(
    count: int,
    rates: Sequence[float],
    bare: Sequence[float],
    stalls: Sequence[float],
    beside: Sequence[float],
    alone: Sequence[float],
) -> list[Measure]:
    label = f"renewals of {count} leases at once, against bare transactions"
    name = "acquire of another lease beside them, p99"
    return [
        compared("leases.renew", label, rates, bare, "/s"),
        _milliseconds("leases.renew_stall", "the event loop is held up meanwhile, at most", stalls),
        _milliseconds("leases.other", name, beside),
        compared(
            "leases.other_bare",
            "the same, against a bare transaction alone",
            [1e3 * each for each in beside],
            [1e3 * each for each in alone],
            " ms",
            less_is_better=True,
        ),
    ]


def _milliseconds(name: str, label: str, seconds: Sequence[float]) -> Measure:
    found = [1e3 * each for each in seconds]
    typical = statistics.median(found)
    return Measure(
        name,
        label,
        f"{typical:.1f} ms",
        value=typical,
        unit="ms",
        at_most=50,
        spread=(min(found), max(found)),
    )
