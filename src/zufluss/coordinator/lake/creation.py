"""Lake tables at CREATE TABLE and ALTER TABLE: what the catalog asks before it commits a change.

The lake comes first, as in Fluss: a table with `table.datalake.enabled` has its lake table when
CREATE TABLE is answered, so that tiering jobs and readers which expect it find it. What happens
when a step fails:

| step that fails | consequence |
|---|---|
| the lake can never hold the table, or has another one of its name | refused, nothing changed |
| the catalog cannot be asked | the change is made; `missing` and the log say what is missing |
| the process dies before the transaction | an empty lake table, which gives way to the next |
| the transaction | the same |

The turn keeps changes of tables with a lake apart while the lake is asked, which is outside of the
catalog's lock: other changes go on, however slow the lake is. A change takes the turn first, then
the lock.

The reasons in `missing` are in memory only. After a restart such a table just has no lake snapshot
yet, and its next ALTER TABLE or round creates the lake table.
"""

from __future__ import annotations

import asyncio

import structlog

from zufluss.config import options
from zufluss.config.load import Configuration
from zufluss.config.table_options import TABLE_DATALAKE_ENABLED, TABLE_DATALAKE_FORMAT
from zufluss.coordinator.tasks import PendingTasks
from zufluss.lake.creation import LakeTableCreator
from zufluss.model.table import TableInfo

log = structlog.get_logger(__name__)


class LakeTableKeeper:
    """Has the lake tables of this cluster created and altered."""

    def __init__(self, conf: Configuration, creator: LakeTableCreator | None) -> None:
        """Without a `creator` no lake is asked."""
        self.turn = asyncio.Lock()
        """Held by a change of a table with a lake, from before the lake is asked to its end."""
        self._conf = conf
        self._creator = creator
        self._missing: dict[int, str] = {}
        self._tasks = PendingTasks("lake_tables")

    def start(self) -> None:
        """Start the process that asks the lake, if the cluster has one."""
        if self._creator is not None and self._conf.get(options.DATALAKE_FORMAT) is not None:
            self._tasks.later(self._creator.warm())

    async def prepare(self, info: TableInfo) -> None:
        """Create the lake table of a table, or alter it to fit.

        Raises `InvalidTableError` or `LakeTableAlreadyExistError` if there can be none. If the lake
        cannot be asked, `missing` has the reason.
        """
        if self._creator is None:
            return
        format = info.property(TABLE_DATALAKE_FORMAT)
        reason = await self._creator.prepare(
            info,
            format,
            self._conf.lake_properties(format),
            self._conf.get(options.ZUFLUSS_LAKE_CATALOG_TIMEOUT),
        )
        if reason is None:
            self._missing.pop(info.table_id, None)
            return
        self._missing[info.table_id] = reason
        log.warning(
            "lake_table_missing",
            table=str(info.path),
            reason=reason,
            remedy="the first round of `zufluss tiering` or the next ALTER TABLE creates it",
        )

    def missing(self, table_id: int) -> str | None:
        """Why a table has no lake table, or one that does not fit; None if that is not known."""
        return self._missing.get(table_id)

    def forget(self, table_id: int) -> None:
        """Forget a table that was dropped, or whose lake table somebody else has prepared."""
        self._missing.pop(table_id, None)

    async def stop(self) -> None:
        """End the process that asks the lake."""
        if self._creator is not None:
            await self._creator.stop()
        await self._tasks.settle()

    def __repr__(self) -> str:
        return f"LakeTableKeeper(missing={len(self._missing)})"


def has_lake_table(info: TableInfo) -> bool:
    """Whether a table is to have a lake table."""
    enabled: bool = info.property(TABLE_DATALAKE_ENABLED)
    return enabled and info.property(TABLE_DATALAKE_FORMAT) is not None
