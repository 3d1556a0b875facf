"""Producers over a real store, with a tablet server that remembers what it was told."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from tests.coordinator.support import Cluster, Seconds
from zufluss.cluster.producers import Baseline, ProducerEntry
from zufluss.coordinator.producers.calls import ProducerCalls
from zufluss.coordinator.producers.records import PRODUCERS_PATH
from zufluss.coordinator.producers.rules import InitCall, InitResult
from zufluss.meta.api import Op
from zufluss.model.schema import Schema
from zufluss.model.table import TableBucket, TableDescriptor, TablePath

VIEWS = TablePath("fluss", "views")
DAILY = TablePath("fluss", "daily_views")
TTL_MS = 60_000
K, PV, SEEN, NAMES = range(4)
"""Ids of the columns of `views`."""
COLUMNS = "k INT NOT NULL, pv BIGINT SUM, seen BIGINT MAX, names STRING LISTAGG"


def views_json(
    *,
    buckets: int = 2,
    columns: str = COLUMNS,
    key: tuple[str, ...] = ("k",),
    partitions: tuple[str, ...] = (),
    properties: Mapping[str, str] | None = None,
) -> bytes:
    """A table that aggregates."""
    engine = {"table.merge-engine": "aggregation"}
    return TableDescriptor(
        Schema.of(columns, key),
        bucket_count=buckets,
        partition_keys=partitions,
        properties=engine | dict(properties or {}),
    ).to_json()


class StoreBrokenError(Exception):
    """The error of a broken store: the outcome of the change is unknown."""


class ProducerCluster(Cluster):
    """A cluster whose time stands still, with `views` in it."""

    def __init__(self, directory: Path, conf: Mapping[str, str] | None = None) -> None:
        super().__init__(directory, conf)
        self.time = Seconds()
        self.seconds = self.time
        self.table_id = -1

    async def begin(self, table: bytes | None = None) -> ProducerCluster:
        """Start with the table."""
        await self.start()
        made = await self.catalog.create_table(VIEWS, table or views_json(), ignore_if_exists=True)
        self.table_id = made.info.table_id
        return self

    async def again(self) -> ProducerCluster:
        """Stop, and start again with another tablet server and another monotonic clock."""
        await self.stop()
        back = ProducerCluster(self.directory)
        back.conf, back.clock = self.conf, self.clock
        back.time.now = 5.0
        back.tablet.ends = self.tablet.ends
        return await back.begin()

    @property
    def producers(self) -> ProducerCalls:
        return self.coordinator.producers

    async def init(self, producer_id: str = "job", *columns: int, **more: Any) -> InitResult:
        call = InitCall(producer_id, self.table_id, TTL_MS, columns)
        self._write_up_to(more.get("restored") or {})
        return await self.producers.init(replace(call, **more))

    async def checkpoint(
        self,
        epoch: int,
        *offsets: int,
        producer_id: str = "job",
        checkpoint_id: int | None = None,
        principal: str | None = None,
    ) -> int:
        """Write up to these offsets of the buckets 0, 1, …, and report them."""
        self._write_up_to(at(*offsets))
        return await self.producers.checkpoint(
            self.table_id,
            producer_id,
            epoch,
            at(*offsets),
            checkpoint_id=checkpoint_id,
            principal=principal,
        )

    async def release(
        self, epoch: int | None = None, *, producer_id: str = "job", principal: str | None = None
    ) -> None:
        await self.producers.release(self.table_id, producer_id, epoch, principal=principal)

    def told(self, producer_id: str = "job") -> ProducerEntry:
        """What the leader knows of a producer."""
        return next(e for e in self.all_told() if e.producer_id == producer_id)

    def all_told(self) -> tuple[ProducerEntry, ...]:
        found = self.tablet.producers.get(self.table_id)
        return () if found is None else found.producers

    def _write_up_to(self, offsets: Baseline) -> None:
        for (partition_id, bucket_id), offset in offsets.items():
            bucket = TableBucket(self.table_id, partition_id, bucket_id)
            self.tablet.ends[bucket] = max(offset, self.tablet.ends.get(bucket, 0))

    def end_at(self, *ends: int) -> None:
        """Set the end offsets of the logs of the buckets."""
        for bucket_id, end in enumerate(ends):
            self.tablet.ends[TableBucket(self.table_id, None, bucket_id)] = end

    async def stored(self) -> list[str]:
        """Paths of producers in the store."""
        return [entry.path for entry in await self.store.tree(PRODUCERS_PATH)]

    def break_store(
        self, at_commit: int, *, applied: bool, kind: Callable[[], Exception] = StoreBrokenError
    ) -> None:
        """Fail one commit from now on, before it took place or after."""
        transact, count = self.store.transact, iter(range(1_000_000))

        async def broken(ops: Sequence[Op]) -> None:
            last = next(count) == at_commit
            if applied or not last:
                await transact(ops)
            if last:
                raise kind()

        self.store.transact = broken  # type: ignore[method-assign]


def at(*offsets: int) -> dict[tuple[int | None, int], int]:
    """Offsets of the buckets 0, 1, … of a table without partitions."""
    return {(None, bucket_id): offset for bucket_id, offset in enumerate(offsets)}
