"""Reads lake and log of a table together: the same rows as the live table has.

A scan is a description. A run pins a plan (`read/union_plan.py`) when it is opened, and reads
exactly that plan.

| table | rows of a run |
|---|---|
| log table | the rows in the lake, then the log up to its end at the pinning |
| log table, `stop=None` | the rows in the lake, then the log without an end |
| primary-key table | the rows in the lake without a later change, then the changed rows |

A run of a log table holds a few batches in memory. A run of a primary-key table holds the keys and
rows that changed since the last tiering; it reads them when it is opened.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, Literal, Protocol

import pyarrow as pa

from zufluss.client.core.partition_filter import possible_partitions
from zufluss.client.read.lake_rows import LakeRows
from zufluss.client.read.log_scan import AsyncLogScan, AsyncLogScanner
from zufluss.client.read.scan import AsyncScan, AsyncScanner
from zufluss.client.read.union_plan import TailRange, UnionPlan, plan_union
from zufluss.client.read.union_rows import (
    UnionShape,
    changed_keys,
    fold_tail,
    narrowed,
    open_ranges,
)
from zufluss.errors import InvalidTableError
from zufluss.lake.fold import FoldedChanges, Folder
from zufluss.model.table import TableBucket
from zufluss.tasks import together

FOLDED_AT_ONCE: Final = 4
"""Buckets of a primary-key table whose changes are read concurrently."""


@dataclass(frozen=True, slots=True, repr=False)
class AsyncUnionScan(AsyncScan):
    """What to read of lake and log; `table.scan(source="union")` or `"lake"` makes it.

    >>> await table.scan(source="union").to_pandas()  # doctest: +SKIP
    >>> async for batch in table.scan(source="union", stop=None):  # doctest: +SKIP
    ...     print(batch.num_rows)
    """

    stop: Literal["latest"] | None = "latest"
    """`"latest"` ends where the log ends when the run is opened; None follows the log."""
    with_offsets: bool = False
    """Add `__offset`, `__timestamp` and `__bucket` of the record or of the last change."""
    lake_only: bool = False
    """Read the lake only."""

    def __post_init__(self) -> None:
        self.check_limit()
        if self.stop is None and self.lake_only:
            raise ValueError('only a log can be followed; use source="union" for lake, then log')
        if self.stop is None and self.info.has_primary_key:
            raise InvalidTableError(
                f"table {self.info.path} has a primary key; its rows change, so a scan of them has "
                "an end. table.changelog(stop=None) follows the changes"
            )
        self.check_choice()
        self.shape()

    @property
    def follows(self) -> bool:
        """Whether the scan has no stop."""
        return self.stop is None

    @property
    def schema(self) -> pa.Schema:
        """The Arrow schema of the rows."""
        return self.shape().schema

    def shape(self) -> UnionShape:
        """The columns and the filter of the scan."""
        return UnionShape(self.info, self.columns, self.filter, self.with_offsets)

    async def plan(self) -> UnionPlan:
        """Pin a plan, as a run that is opened now would."""
        return await plan_union(
            self.connection, self.info, self.partitions, read_optimized=self.lake_only
        )

    async def open(self) -> AsyncUnionScanner:
        """Pin a plan and start a run."""
        scanner = AsyncUnionScanner(self, await self.plan())
        try:
            await scanner.start()
        except BaseException:
            await scanner.close()
            raise
        return scanner

    def options(self) -> dict[str, str]:
        """What was chosen, by name, for people."""
        what = {"reads": "lake" if self.lake_only else "lake and log"}
        return what | super(AsyncUnionScan, self).options()


class _Part(Protocol):
    """A part of the read that returns batches until None."""

    async def next_batch(self) -> pa.RecordBatch | None: ...

    async def close(self) -> None: ...


class AsyncUnionScanner(AsyncScanner):
    """A run of a union scan: iterate it, or `poll` it.

    >>> async with await table.scan(source="union", stop=None).open() as scanner:  # doctest: +SKIP
    ...     batch = await scanner.poll(timeout_ms=1000)
    """

    def __init__(self, scan: AsyncUnionScan, plan: UnionPlan) -> None:
        self.scan = scan
        """The scan of this run."""
        self.plan = plan
        """The lake snapshot and the ranges of the log that are read."""
        self.schema = scan.schema
        """The Arrow schema of the rows."""
        self._shape = scan.shape()
        self._left = scan.limit
        self._parts: list[_Part] = []
        self._open: list[_Part] = []
        self._tail: AsyncLogScanner | None = None

    # -- start ---------------------------------------------------------------------------------

    async def start(self) -> None:
        """Open the lake and the tail; reads the whole tail of a primary-key table."""
        if self.plan.info.has_primary_key:
            changed, rows = await self._fold()
            self._add_lake(changed)
            self._add(_TableRows(rows))
            return
        self._add_lake(None)
        self._tail = await self._open_tail()
        if self._tail is not None:
            self._add(_Tail(self._tail, self._shape))

    def _add(self, part: _Part) -> None:
        self._parts.append(part)
        self._open.append(part)

    def _add_lake(self, changed: pa.Table | None) -> None:
        if self.plan.lake is not None:
            buckets = self.scan.buckets
            self._add(LakeRows(self.plan, self._shape, buckets=buckets, changed=changed))

    def _ranges(self) -> list[TailRange]:
        """The ranges of the chosen buckets, without partitions in which no row can match."""
        chosen, tail = self.scan.buckets, self.plan.tail
        names = {part.partition for part in tail if part.partition is not None}
        left = {None, *possible_partitions(self.plan.info, self._shape.prune, names)}
        return [
            part
            for part in tail
            if part.partition in left and (chosen is None or part.bucket.bucket_id in chosen)
        ]

    async def _open_tail(self) -> AsyncLogScanner | None:
        """Open the log behind the lake; None if there is none and none can come."""
        ranges, follows = self._ranges(), self.scan.stop is None
        names = tuple(dict.fromkeys(part.partition for part in ranges if part.partition))
        every = not self.plan.info.is_partitioned or (follows and self.scan.partitions is None)
        if self.scan.lake_only or not (every or names):
            return None
        scan = AsyncLogScan(
            self.scan.connection,
            self.plan.info,
            tuple(self._shape.columns),
            self._shape.prune,
            start={part.bucket: part.start for part in ranges},
            stop=None if follows else {part.bucket: part.stop for part in ranges},
            partitions=None if every else names,
            buckets=self.scan.buckets,
            with_offsets=self.scan.with_offsets,
        )
        return await open_ranges(scan, ranges)

    # -- primary keys --------------------------------------------------------------------------

    async def _fold(self) -> tuple[pa.Table | None, pa.Table]:
        """The keys that the tail changes, and the rows that it leaves as they are handed out."""
        info = narrowed(self.plan.info, self._shape.columns)
        slots = asyncio.Semaphore(FOLDED_AT_ONCE)
        parts = [part for part in self._ranges() if part.start < part.stop]
        tails = await together(self._fold_one(part, slots) for part in parts)
        folded = [Folder(info, 0).finish(), *tails]
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self.scan.connection.executor, self._joined, folded)

    def _joined(self, folded: Sequence[FoldedChanges]) -> tuple[pa.Table | None, pa.Table]:
        rows = pa.concat_tables([tail.upserts for tail in folded])
        return changed_keys(self.plan.info, folded), self._shape.finish(rows)

    async def _fold_one(self, part: TailRange, slots: asyncio.Semaphore) -> FoldedChanges:
        async with slots:
            return await fold_tail(self.scan.connection, self.plan.info, part, self._shape.columns)

    # -- reading -------------------------------------------------------------------------------

    @property
    def finished(self) -> bool:
        """True when all rows of a bounded scan were handed out."""
        return not self._parts or self._left == 0

    def positions(self) -> dict[TableBucket, int]:
        """Return the next offset of each bucket; raises while the lake is read."""
        if self.plan.info.has_primary_key or self.scan.lake_only:
            raise InvalidTableError(
                f"a scan of {self.plan.info.path} has positions only where it follows a log"
            )
        if self._parts and isinstance(self._parts[0], LakeRows):
            raise ValueError("rows of the lake, which have no position, are still to come")
        return {} if self._tail is None else self._tail.positions()

    async def next_batch(self) -> pa.RecordBatch | None:
        """Return the next rows; None at the end. May be cancelled and called again."""
        while not self.finished:
            batch = await self._parts[0].next_batch()
            if batch is None:
                self._parts.pop(0)
            elif batch.num_rows:
                return self._limited(batch)
        return None

    def _limited(self, batch: pa.RecordBatch) -> pa.RecordBatch:
        if self._left is not None:
            batch = batch.slice(0, self._left)
            self._left -= batch.num_rows
        return batch

    async def close(self) -> None:
        """Stop reading. Closing twice is no error."""
        self._parts = []
        while self._open:
            await self._open.pop().close()

    def __repr__(self) -> str:
        lake = "no lake" if self.plan.lake is None else f"lake {self.plan.lake.snapshot_id}"
        return f"<AsyncUnionScanner {self.plan.info.path}, {lake}, {len(self.plan.tail)} tails>"


class _Tail:
    """The log behind the lake, in the columns of the union read."""

    def __init__(self, scanner: AsyncLogScanner, shape: UnionShape) -> None:
        self._scanner = scanner
        self._shape = shape

    async def next_batch(self) -> pa.RecordBatch | None:
        batch = await self._scanner.next_batch()
        if batch is None:
            return None
        filtered = self._shape.prune is not None
        return _single(self._shape.finish(pa.Table.from_batches([batch]), filtered=filtered))

    async def close(self) -> None:
        await self._scanner.close()


class _TableRows:
    """Rows in memory."""

    def __init__(self, rows: pa.Table) -> None:
        self._batches = rows.to_batches()

    async def next_batch(self) -> pa.RecordBatch | None:
        return self._batches.pop(0) if self._batches else None

    async def close(self) -> None:
        self._batches = []


def _single(rows: pa.Table) -> pa.RecordBatch:
    batches = rows.combine_chunks().to_batches()
    return batches[0] if batches else pa.RecordBatch.from_pylist([], schema=rows.schema)
