"""The lake's part of a union read.

Lake libraries block, and some of their objects belong to one thread. So every `LakeRows` has a
thread of its own, in which it opens, reads and closes the lake, one batch ahead of its consumer.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pyarrow as pa

from zufluss.client.read.union_plan import UnionPlan, lake_format
from zufluss.client.read.union_rows import LakeSelection, UnionShape
from zufluss.errors import PartitionNotExistError
from zufluss.lake.base import (
    CommitterContext,
    LakeReader,
    LakeScan,
    catalog_properties,
    lake_factory,
)
from zufluss.model.expression import Expression
from zufluss.model.table import TableInfo


def open_lake(info: TableInfo) -> LakeReader:
    """A reader of the lake of a table; `InvalidTableError` if the table has none."""
    format = lake_format(info)
    properties = catalog_properties(info, format)
    return lake_factory(format).create_reader(CommitterContext(info, properties))


def plan_lake(reader: LakeReader, plan: UnionPlan, prune: Expression | None) -> LakeScan:
    """The files of a plan's snapshot, without those that certainly have no matching row.

    `PartitionNotExistError` if a chosen partition is neither in the table nor in the lake.
    """
    assert plan.lake is not None
    snapshot_id = plan.lake.snapshot_id
    known = {part.partition for part in plan.tail}
    for name in set(plan.partitions or ()) - known:
        if not reader.plan(snapshot_id, partitions=[name]).files:
            raise PartitionNotExistError(
                f"table {plan.info.path} has no partition {name!r}, and the lake has no rows of one"
            )
    return reader.plan(snapshot_id, filter=prune, partitions=plan.partitions, without=plan.fresh)


class LakeRows:
    """The live rows of a plan's snapshot, batch by batch; use it on one event loop."""

    def __init__(
        self,
        plan: UnionPlan,
        shape: UnionShape,
        *,
        buckets: Sequence[int] | None = None,
        changed: pa.Table | None = None,
    ) -> None:
        """Read `buckets`, None for all, without rows whose keys are in `changed`."""
        self._plan = plan
        self._shape = shape
        self._selection = LakeSelection(
            plan.info, buckets=buckets, partitions=plan.partitions, changed=changed
        )
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="zufluss-lake")
        self._rows = self._read()
        self._next: asyncio.Future[pa.RecordBatch | None] | None = None
        self._ended = False

    async def next_batch(self) -> pa.RecordBatch | None:
        """The next rows, None at the end. May be cancelled and called again."""
        if self._ended:
            return None
        loop = asyncio.get_running_loop()
        if self._next is None:
            self._next = loop.run_in_executor(self._thread, next, self._rows, None)
        batch = await asyncio.shield(self._next)
        self._next = None
        self._ended = batch is None
        if not self._ended:
            self._next = loop.run_in_executor(self._thread, next, self._rows, None)
        return batch

    async def close(self) -> None:
        """Wait for the read that is under way, then close the lake."""
        loop = asyncio.get_running_loop()
        closing = loop.run_in_executor(self._thread, self._rows.close)
        await asyncio.gather(*filter(None, [self._next]), return_exceptions=True)
        await closing
        self._thread.shutdown(wait=False)

    def _read(self) -> Any:
        """A generator of the rows, for the thread; it opens and closes the reader itself."""
        reader = open_lake(self._plan.info)
        try:
            scan = plan_lake(reader, self._plan, self._shape.prune)
            columns = [*self._shape.columns, *self._selection.columns, *self._shape.system]
            for rows in self._selection.select(reader.read(scan, list(dict.fromkeys(columns)))):
                yield from (b for b in self._shape.finish(rows).to_batches() if b.num_rows)
        finally:
            reader.close()
