"""The lake's part of a union read, and the form in which both parts are handed out.

Lake libraries block, and some of their objects belong to one thread: a run has a thread of its own
in which everything about the lake happens, one batch ahead of the consumer.

Both parts end in the same form (`Shape`): the columns asked for, the filter applied exactly, times
cut to microseconds. A lake has no finer ones, and a row must look the same before and after it was
tiered, also to the filter.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from zufluss.client.read.decode import LogDecoder
from zufluss.client.read.nanos import cut_to_micros, has_nanos
from zufluss.client.read.union_plan import UnionPlan
from zufluss.errors import PartitionNotExistError
from zufluss.lake.base import CommitterContext, LakeReader, catalog_properties, lake_factory
from zufluss.lake.keys import KeySet
from zufluss.model.expression import Expression
from zufluss.model.lake import BUCKET_COLUMN, OFFSET_COLUMN, TIMESTAMP_COLUMN
from zufluss.model.partition import partition_values
from zufluss.model.table import TableInfo

SHADOW_ROWS: Final = 65_536
"""Rows of the lake, at least, that are compared with the keys of the tail at once."""


class Shape:
    """What a union read hands out, and what it reads for that."""

    def __init__(
        self,
        info: TableInfo,
        columns: Sequence[str] | None,
        filter: Expression | None,
        with_offsets: bool,
    ) -> None:
        decoder = LogDecoder(info, columns, filter, with_offsets=with_offsets)
        self.schema: pa.Schema = decoder.schema
        """The Arrow schema of the rows."""
        self.columns = [info.schema.names[i] for i in decoder.projection]
        """The table's columns that are read."""
        self.system = [OFFSET_COLUMN, TIMESTAMP_COLUMN, BUCKET_COLUMN] if with_offsets else []
        """The system columns that are read."""
        self.prune = None if filter is None or _is_fine(filter, info) else filter
        """The filter as servers and lakes may leave rows out by it."""
        self._filter = None if filter is None else filter.to_arrow(info.schema)

    def finish(self, rows: pa.Table, *, filtered: bool = False) -> pa.Table:
        """Rows with at least the columns to read, as they are handed out."""
        rows = cut_to_micros(rows)
        if self._filter is not None and not filtered:
            rows = rows.filter(self._filter)
        rows = rows.select(self.schema.names)
        return rows if rows.schema.equals(self.schema) else rows.cast(self.schema)


def _is_fine(filter: Expression, info: TableInfo) -> bool:
    """It tests a column whose values are cut before the filter sees them."""
    fields = [info.schema.arrow.field(name) for name in filter.columns]
    return any(has_nanos(field.type) for field in fields)


class LakeRows:
    """A run over the rows of a plan's snapshot that are not shadowed; use it on one event loop."""

    def __init__(
        self,
        plan: UnionPlan,
        shape: Shape,
        *,
        buckets: Sequence[int] | None = None,
        shadowed: pa.Table | None = None,
    ) -> None:
        self._plan = plan
        self._shape = shape
        self._buckets = buckets
        self._shadowed = shadowed if shadowed is not None and shadowed.num_rows else None
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="zufluss-lake")
        self._keys: KeySet | None = None
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
        """Wait for what is under way, then let go of the lake."""
        loop = asyncio.get_running_loop()
        closing = loop.run_in_executor(self._thread, self._rows.close)
        await asyncio.gather(*filter(None, [self._next]), return_exceptions=True)
        await closing
        self._thread.shutdown(wait=False)

    # -- in the thread -------------------------------------------------------------------------

    def _read(self) -> Any:
        """A generator of the rows; it opens and closes the reader itself."""
        plan = self._plan
        assert plan.lake is not None
        properties = catalog_properties(plan.info, plan.lake_format)
        factory = lake_factory(plan.lake_format)
        reader = factory.create_reader(CommitterContext(plan.info, properties))
        try:
            self._check_partitions(reader, plan.lake.snapshot_id)
            scan = reader.plan(
                plan.lake.snapshot_id,
                filter=self._shape.prune,
                partitions=plan.partitions,
                without=plan.fresh,
            )
            for rows in self._gathered(reader.read(scan, self._columns())):
                yield from self._finished(rows)
        finally:
            reader.close()

    def _columns(self) -> list[str]:
        """Columns that are handed out or decide whether a row is."""
        wanted = [*self._shape.columns]
        if self._plan.partitions is not None:
            wanted += self._plan.info.partition_keys
        if self._shadowed is not None:
            wanted += self._shadowed.column_names
        if self._buckets is not None:
            wanted.append(BUCKET_COLUMN)
        return list(dict.fromkeys([*wanted, *self._shape.system]))

    def _check_partitions(self, reader: LakeReader, snapshot_id: int) -> None:
        """A partition that was asked for is in the table, or in the lake."""
        known = {part.partition for part in self._plan.tail}
        for name in set(self._plan.partitions or ()) - known:
            if not reader.plan(snapshot_id, partitions=[name]).files:
                raise PartitionNotExistError(
                    f"table {self._plan.info.path} has no partition {name!r}, and the lake has no "
                    "rows of one"
                )

    def _gathered(self, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.Table]:
        """As they come; for the comparison of keys enough of them that it does not cost more."""
        least = 0 if self._shadowed is None else max(SHADOW_ROWS, self._shadowed.num_rows)
        waiting: list[pa.RecordBatch] = []
        for batch in batches:
            waiting.append(batch)
            if sum(b.num_rows for b in waiting) >= least:
                yield pa.Table.from_batches(waiting)
                waiting = []
        if waiting:
            yield pa.Table.from_batches(waiting)

    def _finished(self, rows: pa.Table) -> Iterator[pa.RecordBatch]:
        keep = self._wanted(rows)
        if not keep.all():
            rows = rows.filter(pa.array(keep))
        if rows.num_rows:
            yield from (b for b in self._shape.finish(rows).to_batches() if b.num_rows)

    def _wanted(self, rows: pa.Table) -> npt.NDArray[np.bool_]:
        """Which rows are of the buckets and partitions asked for, and not shadowed."""
        keep = np.ones(rows.num_rows, np.bool_)
        if self._buckets is not None:
            keep &= _is_in(rows[BUCKET_COLUMN], pa.array(self._buckets, pa.int32()))
        if self._plan.partitions is not None:
            keep &= self._in_partitions(rows)
        if self._shadowed is not None:
            self._keys = self._keys or KeySet(self._shadowed)
            keep &= ~self._keys.contains(rows.select(self._shadowed.column_names))
        return keep

    def _in_partitions(self, rows: pa.Table) -> npt.NDArray[np.bool_]:
        info = self._plan.info
        keys = info.partition_keys
        types = {key: info.schema.column(key).data_type for key in keys}
        wanted = pa.array(self._plan.partitions, pa.utf8())
        batches = rows.select(list(keys)).to_batches()
        found = [_is_in(partition_values(batch, keys, types), wanted) for batch in batches]
        return np.concatenate([np.empty(0, np.bool_), *found])


def _is_in(values: Any, wanted: pa.Array) -> npt.NDArray[np.bool_]:
    return np.asarray(pc.is_in(values, value_set=wanted))
