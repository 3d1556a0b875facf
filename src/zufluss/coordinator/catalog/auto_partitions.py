"""Auto partitions: the next ones are created ahead, and the expired ones dropped.

`plan` is a pure function: it decides, from the image and a time, which partitions tables with
`table.auto-partition.enabled` lack, and which have expired. `AutoPartitions` carries plans out
through the catalog, every `auto-partition.check.interval`, and at once for a table that was just
created or altered.

A partition that cannot be created or dropped is logged and tried again with the next check; it
never stops the others. A table that was dropped between plan and action is left alone, even when
another table has its name by now.

An expired partition with leased snapshots stays, readable and writable, as long as
`leases/holds.py` says. It is dropped as soon as the leases end, or when the time for that is over;
then the cleaner (`remote/cleaner.py`) revokes the leases.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass

import structlog

from zufluss.cluster.image import ClusterImage, TableEntry
from zufluss.config import options
from zufluss.config.load import Configuration
from zufluss.coordinator.catalog.catalog import Catalog
from zufluss.coordinator.feed import Feed
from zufluss.coordinator.leases.holds import LeaseHolds
from zufluss.errors import ZuflussError
from zufluss.model.auto_partition import auto_partitions, expired_partitions
from zufluss.model.partition import spec_of
from zufluss.model.table import TableBucket, TableInfo
from zufluss.periodic import pause
from zufluss.tasks import end

log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class PartitionStep:
    """One partition to create or to drop."""

    table: TableInfo
    """The table of the partition."""
    partition: str
    """The name of the partition."""

    @property
    def spec(self) -> dict[str, str]:
        """The partition's values by key."""
        return spec_of(self.table.partition_keys, self.partition)


@dataclass(frozen=True, slots=True)
class PartitionPlan:
    """The partitions to create and to drop now."""

    creates: tuple[PartitionStep, ...]
    """Partitions that should exist and do not."""
    drops: tuple[PartitionStep, ...]
    """Partitions that are older than their table keeps them."""


def plan(
    image: ClusterImage,
    now_ms: int,
    tables: Iterable[TableEntry] | None = None,
    *,
    expiry_ms: int | None = None,
) -> PartitionPlan:
    """The partitions to create and to drop at a time, of some tables or of all.

    `expiry_ms` is the time by which partitions expire, by default the same.
    """
    expiry_ms = now_ms if expiry_ms is None else expiry_ms
    creates: list[PartitionStep] = []
    drops: list[PartitionStep] = []
    for table in image.tables() if tables is None else tables:
        info = table.info
        if not info.is_partitioned:
            continue
        existing = image.partitions(info.table_id)
        due = auto_partitions(info, now_ms)
        creates += [PartitionStep(info, name) for name in due if name not in existing]
        old = expired_partitions(info, existing, expiry_ms)
        drops += [PartitionStep(info, name) for name in old]
    return PartitionPlan(tuple(creates), tuple(drops))


class AutoPartitions:
    """Carries plans out at an interval."""

    def __init__(
        self,
        conf: Configuration,
        catalog: Catalog,
        holds: LeaseHolds,
        freed: Feed[Sequence[TableBucket]],
        clock_ms: Callable[[], int],
        expiry_ms: Callable[[], int] | None = None,
    ) -> None:
        """`expiry_ms` is the time by which partitions expire; by default the clock's."""
        self._interval_s = conf.get(options.AUTO_PARTITION_CHECK_INTERVAL) / 1000
        self._catalog = catalog
        self._holds = holds
        self._clock_ms = clock_ms
        self._expiry_ms = expiry_ms or clock_ms
        self._held: dict[int, PartitionStep] = {}
        self._wake = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        freed.subscribe(self.freed)

    def start(self) -> None:
        """Check now and at every interval; does nothing if it was started before."""
        if self._task is not None:
            return
        self._task = asyncio.create_task(self._loop(), name="auto-partitions")

    async def stop(self) -> None:
        """Check no more; a change under way is finished."""
        await end(self._task)
        self._task = None

    async def check(self, tables: Iterable[TableEntry] | None = None) -> None:
        """Create and drop the partitions that are due now, of some tables or of all."""
        chosen = None if tables is None else tuple(tables)
        now_ms, expiry_ms = self._clock_ms(), self._expiry_ms()
        todo = plan(self._catalog.image, now_ms, chosen, expiry_ms=expiry_ms)
        self._forget_held(todo, chosen)
        # Drops first: they make room below max.partition.num.
        for step in todo.drops:
            if not self._is_held(step):
                await self._attempt(step, "drop", self._drop)
        for step in todo.creates:
            await self._attempt(step, "create", self._create)

    def freed(self, buckets: Iterable[TableBucket]) -> None:
        """Check at once if leases no longer hold an expired partition."""
        if not self._seconds():
            self._wake.set()

    def _is_held(self, step: PartitionStep) -> bool:
        """Whether leases hold an expired partition; remembers it for the next check."""
        entry = self._catalog.image.partitions(step.table.table_id).get(step.partition)
        if entry is None:
            return False
        if self._holds.seconds_left((entry.table_id, entry.partition_id)) <= 0:
            self._held.pop(entry.partition_id, None)
            return False
        if entry.partition_id not in self._held:
            log.info(
                "expired_partition_waits_for_leases",
                table=str(step.table.path),
                partition=step.partition,
            )
        self._held[entry.partition_id] = step
        return True

    def _forget_held(self, todo: PartitionPlan, tables: tuple[TableEntry, ...] | None) -> None:
        """Forget held partitions that were dropped or are no longer expired."""
        checked = None if tables is None else {table.info.table_id for table in tables}
        still = {(step.table.table_id, step.partition) for step in todo.drops}
        for partition_id, step in tuple(self._held.items()):
            table_id = step.table.table_id
            if (checked is None or table_id in checked) and (table_id, step.partition) not in still:
                del self._held[partition_id]
                if self._catalog.image.partition_by_id(partition_id) is not None:
                    self._holds.forget((table_id, partition_id))

    async def _create(self, step: PartitionStep) -> None:
        await self._catalog.create_partition(
            step.table.path, step.spec, ignore_if_exists=True, table_id=step.table.table_id
        )

    async def _drop(self, step: PartitionStep) -> None:
        await self._catalog.drop_partition(
            step.table.path, step.spec, ignore_if_not_exists=True, table_id=step.table.table_id
        )

    async def _attempt(
        self, step: PartitionStep, what: str, action: Callable[[PartitionStep], Awaitable[None]]
    ) -> None:
        try:
            await action(step)
        except ZuflussError as problem:
            log.warning(
                "auto_partition_failed",
                action=what,
                table=str(step.table.path),
                partition=step.partition,
                error=str(problem),
            )

    async def _loop(self) -> None:
        while True:
            self._wake.clear()
            seconds = self._interval_s
            try:
                await self.check()
                seconds = self._seconds()
            except Exception:
                log.exception("auto_partition_check_failed")
            await pause(seconds, self._wake)

    def _seconds(self) -> float:
        """Seconds until the next check, or until leases may no longer hold a partition."""
        owners = ((step.table.table_id, i) for i, step in self._held.items())
        left = (self._holds.seconds_left(owner) for owner in owners)
        return min([self._interval_s, *left])
