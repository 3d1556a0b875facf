"""The partitions and buckets that a scan reads."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from zufluss.client.core.catalog import Partition, list_partitions
from zufluss.client.core.cluster import ClusterConnection
from zufluss.client.core.offsets import BucketPlace, check_buckets, places_of
from zufluss.client.core.partition_filter import possible_partitions
from zufluss.errors import InvalidTableError, PartitionNotExistError
from zufluss.model.expression import Expression
from zufluss.model.partition import partition_name
from zufluss.model.table import TableBucket, TableInfo


async def partition_names(
    connection: ClusterConnection,
    info: TableInfo,
    partitions: Iterable[Partition] | None,
    filter: Expression | None = None,
) -> list[str | None]:
    """The names of some partitions, or of all; `[None]` for a table without partitions.

    Partitions in which no row can match the filter are left out.
    """
    if not info.is_partitioned:
        if partitions is not None:
            raise InvalidTableError(f"table {info.path} is not partitioned")
        return [None]
    if partitions is None:
        names = [part.name for part in await list_partitions(connection, info.path)]
    else:
        keys = info.partition_keys
        names = [p if isinstance(p, str) else partition_name(keys, p) for p in partitions]
    left = possible_partitions(info, filter, names)
    return [name for name in names if name in left]


async def chosen_places(
    connection: ClusterConnection,
    info: TableInfo,
    partitions: Iterable[Partition] | None,
    buckets: Iterable[int] | None,
    filter: Expression | None = None,
) -> list[BucketPlace]:
    """The chosen buckets of the chosen partitions, None for all; their leaders are known then.

    Partitions in which no row can match the filter are left out.
    """
    names = await partition_names(connection, info, partitions, filter)
    for name in names:  # a partition that was created again has another id now
        connection.metadata.forget_partition(info.table_id, name or "")
    places = await places_of(connection, info, names)
    if buckets is None:
        return places
    chosen = set(buckets)
    check_buckets(chosen, info)
    return [place for place in places if place.bucket.bucket_id in chosen]


def offsets_at(
    info: TableInfo,
    places: Iterable[BucketPlace],
    at: Mapping[int, int] | Mapping[TableBucket, int],
    partitions: Iterable[Partition] | None = None,
    buckets: Iterable[int] | None = None,
) -> dict[TableBucket, int]:
    """The offsets in `at` of these places, by bucket.

    `at` may name buckets and partitions that were not chosen. Raises `PartitionNotExistError` for
    an unknown bucket, such as one of a partition that was dropped.
    """
    by_key: dict[int | TableBucket, int] = dict(at)  # type: ignore[arg-type]
    places = tuple(places)
    offsets = {}
    for place in places:
        for key in (place.bucket, place.bucket.bucket_id):
            if key in by_key:
                offsets[place.bucket] = by_key[key]
                break
    known = {*offsets, *(bucket.bucket_id for bucket in offsets)}
    chosen = None if buckets is None else set(buckets)
    parts = None if partitions is None else {place.bucket.partition_id for place in places}

    def is_left_out(key: int | TableBucket) -> bool:
        number = key if isinstance(key, int) else key.bucket_id
        if chosen is not None and number in range(info.bucket_count) and number not in chosen:
            return True
        return parts is not None and isinstance(key, TableBucket) and key.partition_id not in parts

    gone = [key for key in by_key if key not in known and not is_left_out(key)]
    if gone:
        raise PartitionNotExistError(
            f"table {info.path} has no {gone[0]!r} to scan at offset {by_key[gone[0]]}, or no "
            "longer; leave it out, or scan the table as it is now"
        )
    return offsets
