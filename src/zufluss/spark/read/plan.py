"""Plans a batch read: its splits, with everything in them pinned.

| table | splits |
|---|---|
| log table | files of the lake, a group per task; the log behind them, a range per bucket |
| primary-key table, tiered | a bucket's files of the lake with its tail |
| primary-key table, not tiered | the state of a bucket, pinned |
| `$lake`, or `read.optimized` | files of the lake |
| `$changelog` | the log that is there, a range per bucket |

Empty buckets have no split. A range is cut if a task may have only a number of records.

The states of some buckets are pinned for a short time (`read/plan_pins.py`); a task whose bucket is
not pinned asks for the state at the offset of the plan.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Final, TypeVar

from zufluss.client.connection import AsyncConnection
from zufluss.client.core.offsets import BucketPlace, list_offsets
from zufluss.client.core.partition_filter import possible_partitions
from zufluss.client.core.partitions import chosen_places
from zufluss.client.read.lake_rows import open_lake, plan_lake
from zufluss.client.read.union_plan import TailRange, UnionPlan, plan_union
from zufluss.config import table_options as t
from zufluss.errors import InvalidTableError, InvalidTimestampError
from zufluss.lake.base import LakeError, LakeFile
from zufluss.model.expression import Expression
from zufluss.model.table import TableBucket, TableInfo
from zufluss.spark.read.packing import pieces
from zufluss.spark.read.plan_pins import pin_states
from zufluss.spark.read.shape import ALWAYS, TimeRange
from zufluss.spark.read.splits import KeyedLakeSplit, LakeSplit, LogSplit, Split, StateSplit
from zufluss.spark.source_options import INCREMENTAL_END, TableView

P = TypeVar("P", BucketPlace, TailRange)

LAKE_SPLIT_BYTES: Final = 128 * 1024 * 1024
"""The approximate size of the lake files that one task reads."""


@dataclass(frozen=True, slots=True)
class PlanRequest:
    """The table and the part of it that a plan covers."""

    info: TableInfo
    """The table."""
    view: TableView
    """Its rows, its lake or its changelog."""
    partitions: tuple[str, ...] | None = None
    """Only these partitions."""
    prune: Expression | None = None
    """A filter: partitions and files without matching rows may be left out."""
    times: TimeRange = ALWAYS
    """Only log records of these times."""
    records_max: int | None = None
    """The most log records of a split; None for no limit."""
    share: tuple[int, int] | None = None
    """Only buckets whose number has this remainder for this divisor; None for all."""

    def has(self, bucket: int) -> bool:
        """Whether the bucket is to be read."""
        return self.share is None or bucket % self.share[1] == self.share[0]

    async def places(self, connection: AsyncConnection) -> list[BucketPlace]:
        """The buckets whose log or state is to be read, of existing partitions."""
        places = await chosen_places(connection, self.info, self.partitions, None)
        return self.possible(places)

    def possible(self, parts: Sequence[P]) -> list[P]:
        """The parts whose bucket is to be read and whose partition may have matching rows."""
        names: set[str] = {part.partition for part in parts if part.partition is not None}
        left: set[str | None] = {None, *possible_partitions(self.info, self.prune, names)}
        return [p for p in parts if p.partition in left and self.has(p.bucket.bucket_id)]


async def plan_splits(connection: AsyncConnection, request: PlanRequest) -> list[Split]:
    """The splits of a read."""
    info = request.info
    if request.view is TableView.LAKE:
        plan = await plan_union(connection, info, request.partitions, read_optimized=True)
        return planned_lake_splits(request, plan)
    if request.view is TableView.CHANGELOG:
        return _log_splits(request, await log_ranges(connection, request))
    if info.has_primary_key:
        return await _keyed(connection, request)
    if not has_lake(info):
        return _log_splits(request, await log_ranges(connection, request))
    plan = await plan_union(connection, info, request.partitions)
    tail = await _within(connection, request, request.possible(plan.tail))
    return [*planned_lake_splits(request, plan), *_log_splits(request, tail)]


def has_lake(info: TableInfo) -> bool:
    """Whether the table has a lake format."""
    return info.property(t.TABLE_DATALAKE_FORMAT) is not None


async def in_lake(connection: AsyncConnection, info: TableInfo) -> bool:
    """Whether the table has a readable lake snapshot."""
    if not has_lake(info):
        return False
    return await connection.admin.lake_snapshot(info.path, readable=True) is not None


# -- logs --------------------------------------------------------------------------------------


async def log_ranges(connection: AsyncConnection, request: PlanRequest) -> Sequence[TailRange]:
    """The range that the log of every bucket has now."""
    places = await request.places(connection)
    first = await list_offsets(connection, request.info, places, "earliest")
    end = await list_offsets(connection, request.info, places, "latest")
    parts = [TailRange(p.bucket, p.partition, first[p.bucket], end[p.bucket]) for p in places]
    return await _within(connection, request, parts)


async def _within(
    connection: AsyncConnection, request: PlanRequest, parts: Sequence[TailRange]
) -> Sequence[TailRange]:
    """The ranges without records that are certainly of other times; some others may be left."""
    times = request.times
    if times.end is not None:
        offsets = await _before(connection, request.info, parts, times.end)
        parts = [replace(p, stop=min(p.stop, offsets[p.bucket])) for p in parts]
    if times.start is not None:
        offsets = await _from(connection, request.info, parts, times.start)
        parts = [replace(p, start=max(p.start, offsets.get(p.bucket, p.stop))) for p in parts]
    return parts


async def _before(
    connection: AsyncConnection, info: TableInfo, parts: Sequence[TailRange], end: int
) -> dict[TableBucket, int]:
    """The offset at which the log of each bucket reaches a time in the past."""
    try:
        return await list_offsets(connection, info, _places(parts), end)
    except InvalidTimestampError as future:
        raise InvalidTimestampError(
            f"table {info.path}: {INCREMENTAL_END.key} = {end} is not over yet, and rows may still "
            f"be written before it: {future.message}. Let it lie some seconds back, or leave it out"
        ) from future


async def _from(
    connection: AsyncConnection, info: TableInfo, parts: Sequence[TailRange], start: int
) -> dict[TableBucket, int]:
    """The offset at which the log of each bucket reaches a time; without buckets that have not yet.

    A server may see the time as its future. Clocks differ, so then each bucket is asked by itself.
    """
    places = _places(parts)
    try:
        return await list_offsets(connection, info, places, start)
    except InvalidTimestampError:
        offsets: dict[TableBucket, int] = {}
        for place in places:
            with suppress(InvalidTimestampError):
                offsets |= await list_offsets(connection, info, [place], start)
        return offsets


def _places(parts: Sequence[TailRange]) -> list[BucketPlace]:
    return [BucketPlace(part.bucket, part.partition) for part in parts]


def _log_splits(request: PlanRequest, parts: Sequence[TailRange]) -> list[Split]:
    return [LogSplit(piece) for part in parts for piece in pieces(part, request.records_max)]


# -- lakes -------------------------------------------------------------------------------------


def planned_lake_splits(request: PlanRequest, plan: UnionPlan) -> list[Split]:
    """The files of a plan's snapshot, some for each task."""
    if plan.lake is None:
        return []
    return [*lake_splits(plan.lake.snapshot_id, _files(request, plan))]


def lake_splits(snapshot_id: int, files: Sequence[LakeFile]) -> Iterator[LakeSplit]:
    """Files in the order of the lake, about `LAKE_SPLIT_BYTES` at a time."""
    waiting: list[LakeFile] = []
    size = 0
    for file in files:
        if waiting and size + file.size > LAKE_SPLIT_BYTES:
            yield LakeSplit(snapshot_id, tuple(waiting))
            waiting, size = [], 0
        waiting.append(file)
        size += file.size
    if waiting:
        yield LakeSplit(snapshot_id, tuple(waiting))


def lake_files(plan: UnionPlan, prune: Expression | None) -> Sequence[LakeFile]:
    """The files of a plan's snapshot that may have rows that match."""
    if plan.lake is None:
        return ()
    reader = open_lake(plan.info)
    try:
        return plan_lake(reader, plan, prune).files
    except FileNotFoundError as gone:
        raise LakeError(
            f"table {plan.info.path}: a file of lake snapshot {plan.lake.snapshot_id} is gone: "
            f"{gone}"
        ) from gone
    finally:
        reader.close()


def _files(request: PlanRequest, plan: UnionPlan) -> Sequence[LakeFile]:
    files = lake_files(plan, request.prune)
    if request.share is None:
        return files
    if any(file.bucket is None for file in files):
        raise InvalidTableError(
            f"table {request.info.path}: its lake has files of several buckets, which cannot be "
            "read with read.fresh; leave the option out"
        )
    return [file for file in files if file.bucket is not None and request.has(file.bucket)]


# -- primary keys ------------------------------------------------------------------------------


async def _keyed(connection: AsyncConnection, request: PlanRequest) -> list[Split]:
    if await in_lake(connection, request.info):
        plan = await plan_union(connection, request.info, request.partitions)
        if plan.lake is not None:
            return _merged(request, plan, plan.lake.snapshot_id)
    return [*await state_splits(connection, request)]


def _merged(request: PlanRequest, plan: UnionPlan, snapshot_id: int) -> list[Split]:
    """Files and tails by bucket; one split of all if the bucket of a file is not known."""
    files = _files(request, plan)
    tails = [part for part in request.possible(plan.tail) if part.start < part.stop]
    if any(file.bucket is None for file in files):
        return [KeyedLakeSplit(LakeSplit(snapshot_id, tuple(files)), tuple(tails))]
    splits: list[Split] = []
    for bucket in range(plan.info.bucket_count):
        here = tuple(file for file in files if file.bucket == bucket)
        changed = tuple(part for part in tails if part.bucket.bucket_id == bucket)
        if changed:
            lake = LakeSplit(snapshot_id, here) if here else None
            splits.append(KeyedLakeSplit(lake, changed))
        else:
            splits += lake_splits(snapshot_id, here)
    return splits


async def state_splits(connection: AsyncConnection, request: PlanRequest) -> list[StateSplit]:
    """The state that every bucket has now."""
    places = await request.places(connection)
    return [StateSplit(pin) for pin in await pin_states(connection, request.info, places)]
