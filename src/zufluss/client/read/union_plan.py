"""The plan of a union read: what is taken from the lake, what from the log, without gap or overlap.

A plan is made once, by whoever drives the read, and everything after it reads exactly what it
names, however long that takes and whatever tiering does meanwhile:

| step | why in this order |
|---|---|
| the lake snapshot and its offsets | everything below these offsets is in the lake |
| partitions | all that the snapshot has; what is created later is not part of the read |
| first and end offsets of the buckets | the tail: [lake offset, end) of every bucket |
| the table | its schema covers every row below the end offsets |

A bucket that the snapshot does not have is read from the log alone. When its log begins after the
lake's offset, rows lie in neither; a newer snapshot may have them by then, and if there is none the
plan fails rather than to leave rows out. The same goes for a primary-key table whose changelog no
longer begins at its first change: rows that were not changed since would be missing. And for rows
that left the log for a snapshot which tiering has not reported as readable.

A partition that was dropped from the table stays in the lake, and a union read has its rows: the
lake is where a table's past is kept. It has no tail any more. When a partition of the same name was
created since, it is another one: of the lake only rows are read that were tiered from it, so before
its first round none. A read of the lake alone has the old rows until that round.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final

from zufluss.client.core.catalog import Partition, lake_snapshot, list_partitions, table_info
from zufluss.client.core.cluster import ClusterConnection, Path, as_path
from zufluss.client.core.offsets import BucketPlace, list_offsets
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
"""How often a plan starts anew because a partition or old log went away while it was made."""


@dataclass(frozen=True, slots=True)
class TailRange:
    """The part of a bucket's log that is not in the lake. Pickles; small."""

    bucket: TableBucket
    """The bucket."""
    partition: str | None
    """The name of its partition."""
    start: int
    """The first offset that the lake does not have."""
    stop: int
    """The offset after the last one; equal to `start` where there is no tail."""


@dataclass(frozen=True, slots=True)
class UnionPlan:
    """A union read, pinned."""

    info: TableInfo
    """The table; its schema covers every row of the read."""
    lake: LakeSnapshot | None
    """The snapshot to read, None when nothing was tiered yet."""
    tail: tuple[TailRange, ...]
    """One range for every bucket of the partitions that exist; none when only the lake is read."""
    partitions: tuple[str, ...] | None = None
    """Names of the partitions to read, None for all; the lake may have more than the table."""
    fresh: tuple[str, ...] = ()
    """Names of partitions of which nothing was tiered: what the lake has under them is older."""

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
    """Pin a union read of a table; with `read_optimized` of what the lake has of it, no more.

    A `TableInfo` says which table is meant should another one of its name exist by now.
    """
    path = table.path if isinstance(table, TableInfo) else as_path(table)
    table_id = table.table_id if isinstance(table, TableInfo) else None
    wanted = None if partitions is None else tuple(partitions)
    tries = PIN_TRIES
    while True:
        tries -= 1
        try:
            return await _pin(connection, path, table_id, wanted, read_optimized)
        except (PartitionNotExistError, UnknownTableOrBucketError, OffsetOutOfRangeError):
            if not tries:
                raise


def lake_format(info: TableInfo) -> str:
    """The lake format of a table; `InvalidTableError` when it has none."""
    found = info.property(t.TABLE_DATALAKE_FORMAT)
    if found is None:
        raise InvalidTableError(
            f"table {info.path} has no lake: the cluster had no datalake.format when it was "
            "created; its rows are in its log only"
        )
    return str(found)


async def _pin(
    connection: ClusterConnection,
    path: TablePath,
    table_id: int | None,
    wanted: tuple[Partition, ...] | None,
    read_optimized: bool,
) -> UnionPlan:
    info = await table_info(connection, path)
    _check_same(info, table_id)
    names = None if wanted is None else _names(info, wanted)
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
    """The snapshot to read; or none, and the one that cannot be read yet, if there is one."""
    lake = await lake_snapshot(connection, path, readable=True)
    if lake is not None:
        return lake, None
    newest = await lake_snapshot(connection, path)
    if newest is None:
        return None, None
    lake = await lake_snapshot(connection, path, readable=True)  # it may have come in between
    return lake, newest if lake is None else None


def _names(info: TableInfo, wanted: Sequence[Partition]) -> tuple[str, ...]:
    check_partitioned(info)
    keys = info.partition_keys
    return tuple(p if isinstance(p, str) else partition_name(keys, p) for p in wanted)


async def _places(
    connection: ClusterConnection, info: TableInfo, names: tuple[str, ...] | None
) -> list[BucketPlace]:
    """The buckets that exist, of all partitions or of those named."""
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
    homeless = [p for p in places if connection.metadata.leader(p.bucket) is None]
    if homeless:
        names = {place.partition for place in homeless}
        await connection.refresh_leaders(info, filter(None, names))
    first, end = await asyncio.gather(
        list_offsets(connection, info, places, "earliest"),
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
    """The tail of one bucket; an error when lake and log do not fit together."""
    if tiered is not None and first > tiered:
        raise OffsetOutOfRangeError(
            f"table {info.path}, {_text(place)}: the log begins at offset {first}, the lake ends "
            f"at {tiered}; what lay between was removed by table.log.ttl before it was tiered. "
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
            "changes were removed by table.log.ttl, and nothing of the bucket is in the lake yet; "
            "a union read works once it has been tiered"
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
    """Rows that left the log for a snapshot that cannot be read yet must not be left out."""
    tiered = {} if hidden is None else hidden.offsets
    if hidden is not None and any(part.start and tiered.get(part.bucket) for part in tail):
        raise OffsetOutOfRangeError(
            f"table {info.path}: lake snapshot {hidden.snapshot_id} has rows that the log lacks by "
            "now, and cannot be read yet; it can when tiering reports a readable snapshot"
        )


def _check_lake(info: TableInfo, lake: LakeSnapshot | None, hidden: LakeSnapshot | None) -> None:
    """Nothing in the lake yet is an empty read; a table that is not tiered at all is a mistake."""
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
