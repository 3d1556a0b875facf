"""The steps of a union read that Python and Spark share: from rows of lake and tail to its result.

| step | here |
|---|---|
| columns, exact filter, times in microseconds | `UnionShape` |
| rows of the lake that still count | `LakeSelection` |
| the tail of a primary-key bucket, folded | `fold_tail`, `changed_keys` |
| one range of a log, complete or an error | `range_scan`, `open_ranges` |

`client/read/union_scan.py` runs these steps on its event loop, `spark/read/split_read.py` in tasks.

A lake has no times finer than microseconds, and a row must look the same before and after it was
tiered, also to the filter: so times are cut before the filter is applied.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from zufluss.client.core.cluster import ClusterConnection
from zufluss.client.read.decode import LogDecoder
from zufluss.client.read.log_scan import AsyncLogScan, AsyncLogScanner
from zufluss.client.read.nanos import cut_to_micros, has_nanos
from zufluss.client.read.union_plan import TailRange
from zufluss.errors import PartitionNotExistError
from zufluss.lake.fold import FoldedChanges, Folder
from zufluss.lake.keys import KeySet
from zufluss.model.expression import Expression
from zufluss.model.lake import BUCKET_COLUMN, OFFSET_COLUMN, TIMESTAMP_COLUMN
from zufluss.model.partition import partition_values
from zufluss.model.table import TableInfo

COMPARED_ROWS: Final = 65_536
"""Rows of the lake, at least, that are compared with the keys of the tail at once."""


class UnionShape:
    """The columns and the filter of a union read, and what it has to read for them."""

    def __init__(
        self,
        info: TableInfo,
        columns: Sequence[str] | None,
        filter: Expression | None,
        with_offsets: bool,
    ) -> None:
        decoder = LogDecoder(info, columns, filter, with_offsets=with_offsets)
        self.schema: pa.Schema = decoder.schema
        """The Arrow schema of the result."""
        self.columns = [info.schema.names[i] for i in decoder.projection]
        """The table's columns that are read."""
        self.system = [OFFSET_COLUMN, TIMESTAMP_COLUMN, BUCKET_COLUMN] if with_offsets else []
        """The system columns that are read."""
        self.prune = None if filter is None or _tests_nanos(filter, info) else filter
        """The filter for servers and lakes; None if there is none, or it needs times cut first."""
        self._filter = None if filter is None else filter.to_arrow(info.schema)

    def matching(self, rows: pa.Table, *, filtered: bool) -> pa.Table:
        """Rows with times cut, only those that match; `filtered` rows all match already."""
        rows = cut_to_micros(rows)
        return rows if self._filter is None or filtered else rows.filter(self._filter)

    def finish(self, rows: pa.Table, *, filtered: bool = False) -> pa.Table:
        """Matching rows in the columns and types of the result."""
        rows = self.matching(rows, filtered=filtered).select(self.schema.names)
        return rows if rows.schema.equals(self.schema) else rows.cast(self.schema)


def _tests_nanos(filter: Expression, info: TableInfo) -> bool:
    """Whether the filter tests a column whose values are cut before the filter is applied."""
    fields = [info.schema.arrow.field(name) for name in filter.columns]
    return any(has_nanos(field.type) for field in fields)


# -- lake --------------------------------------------------------------------------------------


class LakeSelection:
    """Selects the rows of a lake snapshot that belong to a union read.

    A row belongs to it if its bucket and partition are chosen, and the tail has no change of its
    key.
    """

    def __init__(
        self,
        info: TableInfo,
        *,
        buckets: Sequence[int] | None = None,
        partitions: Sequence[str] | None = None,
        changed: pa.Table | None = None,
    ) -> None:
        """Choose `buckets` and `partitions`, None for all; `changed` are the keys of the tail."""
        self._info = info
        self._buckets = None if buckets is None else pa.array(buckets, pa.int32())
        self._partitions = None if partitions is None else pa.array(partitions, pa.utf8())
        self._changed = changed if changed is not None and changed.num_rows else None
        self._keys: KeySet | None = None

    @property
    def columns(self) -> list[str]:
        """The columns that `select` looks at."""
        partition_keys = () if self._partitions is None else self._info.partition_keys
        primary_key = () if self._changed is None else self._changed.column_names
        bucket = () if self._buckets is None else (BUCKET_COLUMN,)
        return [*partition_keys, *primary_key, *bucket]

    def select(self, batches: Iterable[pa.RecordBatch]) -> Iterator[pa.Table]:
        """The rows that belong to the read; batches are joined where keys are compared."""
        changed = self._changed
        least = 0 if changed is None else max(COMPARED_ROWS, changed.num_rows)
        for rows in gathered(batches, least):
            keep = self._belongs(rows)
            live = rows if keep.all() else rows.filter(pa.array(keep))
            if live.num_rows:
                yield live

    def _belongs(self, rows: pa.Table) -> npt.NDArray[np.bool_]:
        keep = np.ones(rows.num_rows, np.bool_)
        if self._buckets is not None:
            keep &= _is_in(rows[BUCKET_COLUMN], self._buckets)
        if self._partitions is not None:
            keep &= self._in_partitions(rows, self._partitions)
        if self._changed is not None:
            self._keys = self._keys or KeySet(self._changed)
            keep &= ~self._keys.contains(rows.select(self._changed.column_names))
        return keep

    def _in_partitions(self, rows: pa.Table, names: pa.Array) -> npt.NDArray[np.bool_]:
        keys = self._info.partition_keys
        types = {key: self._info.schema.column(key).data_type for key in keys}
        batches = rows.select(list(keys)).to_batches()
        chosen = [_is_in(partition_values(batch, keys, types), names) for batch in batches]
        return np.concatenate([np.empty(0, np.bool_), *chosen])


def _is_in(values: Any, chosen: pa.Array) -> npt.NDArray[np.bool_]:
    return np.asarray(pc.is_in(values, value_set=chosen))


def gathered(batches: Iterable[pa.RecordBatch], least: int) -> Iterator[pa.Table]:
    """Batches joined to tables of at least `least` rows; the last table may have fewer."""
    waiting: list[pa.RecordBatch] = []
    rows = 0
    for batch in batches:
        waiting.append(batch)
        rows += batch.num_rows
        if rows >= least:
            yield pa.Table.from_batches(waiting)
            waiting, rows = [], 0
    if waiting:
        yield pa.Table.from_batches(waiting)


# -- tail --------------------------------------------------------------------------------------


def range_scan(
    connection: ClusterConnection,
    info: TableInfo,
    part: TailRange,
    columns: Sequence[str],
    filter: Expression | None = None,
    *,
    with_offsets: bool = False,
) -> AsyncLogScan:
    """The scan of one range of a log; of a primary-key table it reads changes."""
    return AsyncLogScan(
        connection,
        info,
        tuple(columns),
        filter,
        start={part.bucket: part.start},
        stop={part.bucket: part.stop},
        partitions=None if part.partition is None else (part.partition,),
        buckets=(part.bucket.bucket_id,),
        with_offsets=with_offsets,
        changelog=info.has_primary_key,
    )


async def open_ranges(scan: AsyncLogScan, ranges: Sequence[TailRange]) -> AsyncLogScanner:
    """Start a scan that covers these ranges; `PartitionNotExistError` if a bucket is gone."""
    scanner = await scan.open()
    missing = {part.bucket for part in ranges} - scanner.positions().keys()
    if missing:
        await scanner.close()
        raise PartitionNotExistError(
            f"table {scan.info.path}: a partition was dropped while it was read; scan it again"
        )
    return scanner


async def fold_tail(
    connection: ClusterConnection, info: TableInfo, part: TailRange, columns: Sequence[str]
) -> FoldedChanges:
    """The last change of each key in one range of a changelog: these columns, and the key's."""
    loop = asyncio.get_running_loop()
    narrow = narrowed(info, columns)
    folder = Folder(narrow, part.bucket.bucket_id)
    scan = range_scan(connection, info, part, narrow.schema.names)
    async with await open_ranges(scan, [part]) as scanner:
        async for batch in scanner:
            await loop.run_in_executor(connection.executor, folder.add, batch)
        return await loop.run_in_executor(connection.executor, folder.finish)


def changed_keys(info: TableInfo, tails: Sequence[FoldedChanges]) -> pa.Table | None:
    """The primary keys that folded tails upsert or delete; None without tails."""
    keys = list(info.schema.primary_key)
    tables = [table.select(keys) for tail in tails for table in (tail.upserts, tail.deletes)]
    return cut_to_micros(pa.concat_tables(tables)) if tables else None


def narrowed(info: TableInfo, columns: Sequence[str]) -> TableInfo:
    """The table with these columns and its primary key only, for folding."""
    names = {*columns, *info.schema.primary_key}
    narrow = tuple(column for column in info.schema.columns if column.name in names)
    schema = replace(info.schema, columns=narrow)
    return replace(info, descriptor=replace(info.descriptor, schema=schema))
