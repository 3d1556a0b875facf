"""Which partitions, and which buckets in them, a scan is about."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from zufluss.client.core.catalog import Partition, list_partitions
from zufluss.client.core.cluster import ClusterConnection
from zufluss.client.core.offsets import BucketPlace, check_buckets, places_of
from zufluss.errors import InvalidTableError, PartitionNotExistError
from zufluss.model.partition import partition_name
from zufluss.model.table import TableBucket, TableInfo


async def partition_names(
    connection: ClusterConnection, info: TableInfo, wanted: Iterable[Partition] | None
) -> list[str | None]:
    """The names of the wanted partitions, None: of all; of a table without partitions one None."""
    if not info.is_partitioned:
        if wanted is not None:
            raise InvalidTableError(f"table {info.path} is not partitioned")
        return [None]
    if wanted is None:
        return [part.name for part in await list_partitions(connection, info.path)]
    return [p if isinstance(p, str) else partition_name(info.partition_keys, p) for p in wanted]


async def chosen_places(
    connection: ClusterConnection,
    info: TableInfo,
    partitions: Iterable[Partition] | None,
    buckets: Iterable[int] | None,
) -> list[BucketPlace]:
    """The wanted buckets of the wanted partitions; their leaders are known afterwards."""
    names = await partition_names(connection, info, partitions)
    for name in names:  # one that was created again since it was last seen has another id now
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
) -> dict[TableBucket, int]:
    """The offset that `at` has for each of its buckets; nothing of other buckets."""
    given: dict[int | TableBucket, int] = dict(at)  # type: ignore[arg-type]
    found = {}
    for place in places:
        for key in (place.bucket, place.bucket.bucket_id):
            if key in given:
                found[place.bucket] = given[key]
                break
    known = {*found, *(bucket.bucket_id for bucket in found)}
    gone = [key for key in given if key not in known]
    if gone:
        raise PartitionNotExistError(
            f"table {info.path}: there is no {gone[0]!r} to scan at offset {given[gone[0]]}, or no "
            "longer; leave it out, or scan what there is now"
        )
    return found
