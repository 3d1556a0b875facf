"""The plan of a union read: which rows come from the lake and which from the log.

A plan is made once. The read follows it exactly, however long it takes and whatever tiering does
meanwhile. The steps have this order:

| step | why now |
|---|---|
| the lake snapshot and its offsets | everything below these offsets is in the lake |
| partitions | all that the snapshot has; later ones are not part of the read |
| first and end offsets of the buckets | the tail is [lake offset, end) of every bucket |
| the table | its schema covers every row below the end offsets |

A bucket that the snapshot lacks is read from the log alone. If its log begins after the lake's
offset, rows are in neither; a newer snapshot may have them, and if there is none the plan fails
instead of leaving rows out. The plan also fails for a primary-key table whose changelog does not
begin at its first change, because unchanged rows would be missing, and for rows that left the log
for a snapshot that tiering has not reported as readable.

A partition that was dropped from the table stays in the lake, and a union read returns its rows,
because the lake keeps a table's past. It has no tail. A new partition of the same name is another
partition: from the lake only rows are read that were tiered from it, so none before its first
round. A read of the lake alone returns the old rows until that round.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final

from zufluss.client.core.catalog import Partition, lake_snapshot, list_partitions, table_info
from zufluss.client.core.cluster import ClusterConnection, Path, as_path
from zufluss.client.core.offsets import BucketPlace, Position, list_offsets
from zufluss.config import table_options as t
from zufluss.errors import (
    InvalidTableError,
    OffsetOutOfRangeError,
    PartitionNotExistError,
    TableNotExistError,
    UnknownTableOrBucketError,
)
from zufluss.model.lake import LakeSnapshot
from zufluss.model.partition import check_partitioned, partition_name
from zufluss.model.table import TableBucket, TableInfo, TablePath

PIN_TRIES: Final = 3
"""Tries to make a plan while partitions are dropped or old log is removed."""


@dataclass(frozen=True, slots=True)
class TailRange:
    """The range of a bucket's log that is not in the lake. Small, and can be pickled."""

    bucket: TableBucket
    """The bucket."""
    partition: str | None
    """The partition's name; None without partitions."""
    start: int
    """The first offset that the lake lacks."""
    stop: int
    """The end of the range; equal to `start` if the tail is empty."""


@dataclass(frozen=True, slots=True)
class UnionPlan:
    """A pinned union read."""

    info: TableInfo
    """The table; its schema covers every row of the read."""
    lake: LakeSnapshot | None
    """The snapshot to read; None before the first tiering round."""
    tail: tuple[TailRange, ...]
    """One range per bucket of the existing partitions; empty if only the lake is read."""
    partitions: tuple[str, ...] | None = None
    """Names of the partitions to read; None for all, including dropped ones in the lake."""
    fresh: tuple[str, ...] = ()
    """Names of partitions without tiered rows; rows of that name in the lake are older."""

    @property
    def lake_format(self) -> str:
        """The format of the lake."""
        return lake_format(self.info)


async def plan_union(
    connection: ClusterConnection,
    table: Path | TableInfo,
    partitions: Iterable[Partition] | None = None,
    *,
    read_optimized: bool = False,
) -> UnionPlan:
    """Pin a union read of a table; with `read_optimized` only of its lake snapshot.

    A `TableInfo` names the table by its id; a table that was created again raises
    `TableNotExistError`.
    """
    path = table.path if isinstance(table, TableInfo) else as_path(table)
    table_id = table.table_id if isinstance(table, TableInfo) else None
    chosen = None if partitions is None else tuple(partitions)
    tries = PIN_TRIES
    while True:
        tries -= 1
        try:
            return await _pin(connection, path, table_id, chosen, read_optimized)
        except (PartitionNotExistError, UnknownTableOrBucketError, OffsetOutOfRangeError):
            if not tries:
                raise


def lake_format(info: TableInfo) -> str:
    """The lake format of a table; raises `InvalidTableError` if it has none."""
    lake = info.property(t.TABLE_DATALAKE_FORMAT)
    if lake is None:
        raise InvalidTableError(
            f"table {info.path} has no lake: the cluster had no datalake.format when it was "
            "created; its rows are in its log only"
        )
    return str(lake)


async def _pin(
    connection: ClusterConnection,
    path: TablePath,
    table_id: int | None,
    partitions: tuple[Partition, ...] | None,
    read_optimized: bool,
) -> UnionPlan:
    info = await table_info(connection, path)
    _check_same(info, table_id)
    names = None if partitions is None else _names(info, partitions)
    lake, hidden = await _snapshots(connection, path)
    places = await _places(connection, info, names)
    if names is not None and lake is None:
        _check_partitions(info, names, places)
    if read_optimized:
        _check_lake(info, lake, hidden)
        return UnionPlan(info, lake, (), names)
    tail = await _tail(connection, info, places, lake)
    _check_hidden(info, tail, hidden)
    pinned = await table_info(connection, path)
    _check_same(pinned, info.table_id if lake is None else lake.table_id)
    return UnionPlan(pinned, lake, tail, names, _fresh(places, lake))


async def _snapshots(
    connection: ClusterConnection, path: TablePath
) -> tuple[LakeSnapshot | None, LakeSnapshot | None]:
    """The readable snapshot; if there is none, the newest unreadable one in second place."""
    lake = await lake_snapshot(connection, path, readable=True)
    if lake is not None:
        return lake, None
    newest = await lake_snapshot(connection, path)
    if newest is None:
        return None, None
    lake = await lake_snapshot(
        connection, path, readable=True
    )  # it may have become readable meanwhile
    return lake, newest if lake is None else None


def _names(info: TableInfo, partitions: Sequence[Partition]) -> tuple[str, ...]:
    check_partitioned(info)
    keys = info.partition_keys
    return tuple(p if isinstance(p, str) else partition_name(keys, p) for p in partitions)


async def _places(
    connection: ClusterConnection, info: TableInfo, names: tuple[str, ...] | None
) -> list[BucketPlace]:
    """The existing buckets of all partitions, or of the named ones."""
    parts: list[tuple[int | None, str | None]] = [(None, None)]
    if info.is_partitioned:
        listed = await list_partitions(connection, info.path)
        parts = [(p.partition_id, p.name) for p in listed if names is None or p.name in names]
    return [
        BucketPlace(TableBucket(info.table_id, partition_id, bucket), name)
        for partition_id, name in parts
        for bucket in range(info.bucket_count)
    ]


def _fresh(places: Sequence[BucketPlace], lake: LakeSnapshot | None) -> tuple[str, ...]:
    there = {p.bucket.partition_id: p.partition for p in places}
    named = {id_: name for id_, name in there.items() if id_ is not None and name is not None}
    return () if lake is None else tuple(sorted(lake.fresh(named)))


async def _tail(
    connection: ClusterConnection,
    info: TableInfo,
    places: list[BucketPlace],
    lake: LakeSnapshot | None,
) -> tuple[TailRange, ...]:
    leaderless = [p for p in places if connection.metadata.leader(p.bucket) is None]
    if leaderless:
        names = {place.partition for place in leaderless}
        await connection.refresh_leaders(info, filter(None, names))
    begin: Position = "unbroken" if info.has_primary_key else "earliest"
    first, end = await asyncio.gather(
        list_offsets(connection, info, places, begin),
        list_offsets(connection, info, places, "latest"),
    )
    offsets = {} if lake is None else lake.offsets
    return tuple(
        tail_range(info, place, offsets.get(place.bucket), first[place.bucket], end[place.bucket])
        for place in places
    )


def tail_range(
    info: TableInfo, place: BucketPlace, tiered: int | None, first: int, end: int
) -> TailRange:
    """The tail of one bucket; raises `OffsetOutOfRangeError` if rows are missing."""
    if tiered is not None and first > tiered:
        raise OffsetOutOfRangeError(
            f"table {info.path}, {_text(place)}: the log begins at offset {first}, the lake ends "
            f"at {tiered}; what lay between was removed by table.log.ttl before it was tiered, or "
            "lost with a disk. "
            'scan(source="lake") and scan(source="log") read what is left'
        )
    if tiered is not None and tiered > end:
        raise OffsetOutOfRangeError(
            f"table {info.path}, {_text(place)}: the lake has rows up to offset {tiered - 1}, but "
            f"the log ends at {end}; the cluster lost acknowledged rows, or stands on an older "
            'copy of its data. Restore the log; scan(source="lake") reads what was tiered'
        )
    if tiered is None and first > 0 and info.has_primary_key:
        raise OffsetOutOfRangeError(
            f"table {info.path}, {_text(place)}: its changelog begins at offset {first}, older "
            "changes were removed by table.log.ttl or lost with a disk, and nothing of the bucket "
            "is in the lake yet; a union read works once it has been tiered"
        )
    start = first if tiered is None else tiered
    return TailRange(place.bucket, place.partition, start, max(start, end))


def _text(place: BucketPlace) -> str:
    where = "" if place.partition is None else f"partition {place.partition} "
    return f"{where}bucket {place.bucket.bucket_id}"


def _check_same(info: TableInfo, table_id: int | None) -> None:
    if table_id is not None and info.table_id != table_id:
        raise TableNotExistError(f"table {info.path} was dropped and created again; open it anew")


def _check_partitions(
    info: TableInfo, names: tuple[str, ...], places: Sequence[BucketPlace]
) -> None:
    missing = set(names) - {place.partition for place in places}
    if missing:
        raise PartitionNotExistError(
            f"table {info.path} has no partition {min(missing)!r}, and nothing in the lake"
        )


def _check_hidden(info: TableInfo, tail: Sequence[TailRange], hidden: LakeSnapshot | None) -> None:
    """Raise if rows left the log for a snapshot that is not readable yet."""
    tiered = {} if hidden is None else hidden.offsets
    if hidden is not None and any(part.start and tiered.get(part.bucket) for part in tail):
        raise OffsetOutOfRangeError(
            f"table {info.path}: lake snapshot {hidden.snapshot_id} has rows that the log lacks by "
            "now, and cannot be read yet; it can when tiering reports a readable snapshot"
        )


def _check_lake(info: TableInfo, lake: LakeSnapshot | None, hidden: LakeSnapshot | None) -> None:
    """Raise if a read of the lake alone is impossible; an empty lake of a tiered table is not."""
    if hidden is not None:
        raise InvalidTableError(
            f"table {info.path}: lake snapshot {hidden.snapshot_id} cannot be read yet; "
            'scan(source="union") reads the table'
        )
    if lake is None and not info.property(t.TABLE_DATALAKE_ENABLED):
        raise InvalidTableError(
            f"table {info.path} has nothing in a lake and is not tiered; set "
            "table.datalake.enabled=true, or read its log"
        )
