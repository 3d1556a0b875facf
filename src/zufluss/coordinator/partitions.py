"""Auto partitions: create the next ones ahead, drop those that are too old.

`plan` decides, from the image and a time, which partitions the tables with
`table.auto-partition.enabled` lack and which have expired; it is a pure function. `AutoPartitions`
carries a plan out through the catalog, again and again every `auto-partition.check.interval`, and
at once for a table that was just created or altered.

A partition that cannot be created or dropped is logged and tried again with the next check; it
never stops the others. A table that was dropped between plan and action is left alone, even when
another one has taken its name.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass

import structlog

from zufluss.cluster.image import ClusterImage, TableEntry
from zufluss.config import options
from zufluss.config.load import Configuration
from zufluss.coordinator.catalog import Catalog
from zufluss.errors import ZuflussError
from zufluss.model.auto_partition import auto_partitions, expired_partitions
from zufluss.model.partition import spec_of
from zufluss.model.table import TableInfo

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

    def __init__(self, conf: Configuration, catalog: Catalog, clock_ms: Callable[[], int]) -> None:
        self._interval_s = conf.get(options.AUTO_PARTITION_CHECK_INTERVAL) / 1000
        self._catalog = catalog
        self._clock_ms = clock_ms
        self._task: asyncio.Task[None] | None = None

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
        todo = plan(self._catalog.image, self._clock_ms(), tables)
        # Drops first: they make room below max.partition.num.
        for step in todo.drops:
            await self._attempt(step, "drop", self._drop)
        for step in todo.creates:
            await self._attempt(step, "create", self._create)

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
            try:
                await self.check()
            except Exception:
                log.exception("auto_partition_check_failed")
            await asyncio.sleep(self._interval_s)
