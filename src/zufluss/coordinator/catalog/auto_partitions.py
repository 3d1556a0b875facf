"""Auto partitions: create the next ones ahead, drop those that are too old.

`plan` decides, from the image and a time, which partitions the tables with
`table.auto-partition.enabled` lack and which have expired; it is a pure function. `AutoPartitions`
carries a plan out through the catalog, again and again every `auto-partition.check.interval`, and
at once for a table that was just created or altered.

A partition that cannot be created or dropped is logged and tried again with the next check; it
never stops the others. A table that was dropped between plan and action is left alone, even when
another one has taken its name.

An expired partition of which leases hold snapshots stays, readable and writable, as long as
`leases/holds.py` says. It is dropped as soon as they let go, or when the time for that is over;
then the leases are revoked, by who cleans up after the drop.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Sequence
from contextlib import suppress
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

log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class Step:
    """One partition to create or to drop."""

    table: TableInfo
    """The table it belongs to."""
    partition: str
    """The partition's name."""

    @property
    def spec(self) -> dict[str, str]:
        """The partition's values by key."""
        return spec_of(self.table.partition_keys, self.partition)


@dataclass(frozen=True, slots=True)
class Plan:
    """What is to be done now."""

    creates: tuple[Step, ...]
    """Partitions that should be there and are not."""
    drops: tuple[Step, ...]
    """Partitions that are older than their table keeps."""


def plan(image: ClusterImage, now_ms: int, tables: Iterable[TableEntry] | None = None) -> Plan:
    """The partitions to create and to drop at a time, of some tables or of all."""
    creates: list[Step] = []
    drops: list[Step] = []
    for table in image.tables() if tables is None else tables:
        info = table.info
        if not info.is_partitioned:
            continue
        existing = image.partitions(info.table_id)
        wanted = auto_partitions(info, now_ms)
        creates += [Step(info, name) for name in wanted if name not in existing]
        drops += [Step(info, name) for name in expired_partitions(info, existing, now_ms)]
    return Plan(tuple(creates), tuple(drops))


class AutoPartitions:
    """Carries plans out, now and then."""

    def __init__(
        self,
        conf: Configuration,
        catalog: Catalog,
        holds: LeaseHolds,
        freed: Feed[Sequence[TableBucket]],
        clock_ms: Callable[[], int],
    ) -> None:
        self._interval_s = conf.get(options.AUTO_PARTITION_CHECK_INTERVAL) / 1000
        self._catalog = catalog
        self._holds = holds
        self._clock_ms = clock_ms
        self._held: dict[int, Step] = {}
        self._wake = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        freed.subscribe(self.freed)

    def start(self) -> None:
        """Check now and every interval from now on; nothing when it was started before."""
        if self._task is not None:
            return
        self._task = asyncio.create_task(self._loop(), name="auto-partitions")

    async def stop(self) -> None:
        """Stop checking; a change under way is finished."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait([self._task])
            self._task = None

    async def check(self, tables: Iterable[TableEntry] | None = None) -> None:
        """Create and drop what is due now, for some tables or for all."""
        chosen = None if tables is None else tuple(tables)
        todo = plan(self._catalog.image, self._clock_ms(), chosen)
        self._forget_held(todo, chosen)
        # Drops first: they make room below max.partition.num.
        for step in todo.drops:
            if not self._is_held(step):
                await self._attempt(step, "drop", self._drop)
        for step in todo.creates:
            await self._attempt(step, "create", self._create)

    def freed(self, buckets: Iterable[TableBucket]) -> None:
        """Leases let go of buckets: drop expired partitions that nothing holds any more."""
        if not self._seconds():
            self._wake.set()

    def _is_held(self, step: Step) -> bool:
        """Whether leases keep an expired partition; remembered, to look again in time."""
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

    def _forget_held(self, todo: Plan, tables: tuple[TableEntry, ...] | None) -> None:
        """Forget partitions that waited and are not expired any more, or are gone."""
        checked = None if tables is None else {table.info.table_id for table in tables}
        still = {(step.table.table_id, step.partition) for step in todo.drops}
        for partition_id, step in tuple(self._held.items()):
            table_id = step.table.table_id
            if (checked is None or table_id in checked) and (table_id, step.partition) not in still:
                del self._held[partition_id]
                if self._catalog.image.partition_by_id(partition_id) is not None:
                    self._holds.forget((table_id, partition_id))

    async def _create(self, step: Step) -> None:
        await self._catalog.create_partition(
            step.table.path, step.spec, ignore_if_exists=True, table_id=step.table.table_id
        )

    async def _drop(self, step: Step) -> None:
        await self._catalog.drop_partition(
            step.table.path, step.spec, ignore_if_not_exists=True, table_id=step.table.table_id
        )

    async def _attempt(
        self, step: Step, what: str, action: Callable[[Step], Awaitable[None]]
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
            with suppress(TimeoutError):
                async with asyncio.timeout(seconds):
                    await self._wake.wait()

    def _seconds(self) -> float:
        """Until the next check, sooner if a partition may not wait any longer before that."""
        owners = ((step.table.table_id, i) for i, step in self._held.items())
        left = (self._holds.seconds_left(owner) for owner in owners)
        return min([self._interval_s, *left])
