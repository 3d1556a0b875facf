"""How many rows the buckets of a table have, as their servers count them: GET_TABLE_STATS.

A server knows the number without reading rows: a log table has one row per offset, and a
primary-key table counts its keys as they come and go. Two cases have no such number: a primary-key
table with `table.changelog.image = WAL`, whose writes do not tell whether a key is new, and a
server that does not know the request. Then a scan has to count.
"""

from __future__ import annotations

from collections.abc import Iterable

from zufluss.client.core.catalog import Partition
from zufluss.client.core.cluster import ClusterConnection
from zufluss.client.core.metadata import ServerNode
from zufluss.client.core.offsets import LISTINGS_MAX, BucketPlace, LeaderAnswer, ask_leaders
from zufluss.client.core.partitions import chosen_places
from zufluss.client.core.retry import PASSING
from zufluss.errors import (
    ErrorCode,
    PartitionNotExistError,
    UnknownTableOrBucketError,
    ZuflussError,
    error,
)
from zufluss.model.table import TableBucket, TableInfo
from zufluss.wire import messages as m
from zufluss.wire.api import ApiKey

_UNCOUNTED = frozenset({ErrorCode.INVALID_TABLE_EXCEPTION, ErrorCode.UNSUPPORTED_VERSION})
"""Answers of a server that has no number of rows to tell."""


async def counted_rows(
    connection: ClusterConnection,
    info: TableInfo,
    partitions: Iterable[Partition] | None,
    buckets: Iterable[int] | None,
) -> int | None:
    """The number of rows in the chosen buckets, None for all; None if the servers do not know it.

    Partitions that are dropped meanwhile are left out, unless they were chosen by name.
    """
    listings = LISTINGS_MAX if info.is_partitioned and partitions is None else 1
    while True:
        listings -= 1
        try:
            places = await chosen_places(connection, info, partitions, buckets)
            return await _sum(connection, info, places)
        except (PartitionNotExistError, UnknownTableOrBucketError):
            if not listings:
                raise
        except ZuflussError as e:
            if e.code not in _UNCOUNTED:
                raise
            return None


async def _sum(connection: ClusterConnection, info: TableInfo, places: list[BucketPlace]) -> int:
    async def ask(server: ServerNode, buckets: list[TableBucket]) -> LeaderAnswer:
        return await _ask(connection, server, buckets)

    return sum((await ask_leaders(connection, info, places, ask)).values())


async def _ask(
    connection: ClusterConnection, server: ServerNode, buckets: list[TableBucket]
) -> LeaderAnswer:
    """Ask one server for the row counts of buckets of one partition."""
    request = m.GetTableStatsRequest(table_id=buckets[0].table_id)
    for bucket in buckets:
        request.buckets_req.add(partition_id=bucket.partition_id, bucket_id=bucket.bucket_id)
    counts: dict[TableBucket, int] = {}
    failure: ZuflussError | None = ZuflussError("a bucket is missing in the server's answer")
    try:
        socket = await connection.socket(server.address)
        timeout_ms = connection.options.request_timeout_ms
        response = await socket.call(ApiKey.GET_TABLE_STATS, request, timeout_ms=timeout_ms)
    except ZuflussError as e:
        if e.code not in PASSING:
            raise
        return counts, e
    by_id = {bucket.bucket_id: bucket for bucket in buckets}
    for result in response.buckets_resp:
        if result.error_code:
            failure = error(result.error_code, result.error_message)
            if failure.code not in PASSING:
                raise failure
        elif result.bucket_id in by_id:
            counts[by_id[result.bucket_id]] = result.row_count
    return counts, None if len(counts) == len(buckets) else failure
