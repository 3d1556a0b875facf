"""The offsets at which the buckets of a table begin, end, or stood at a time.

A position is `"earliest"`, `"unbroken"`, `"latest"`, or a time: epoch milliseconds or a `datetime`,
which is UTC unless it has a time zone. `latest` is the high watermark: the offset of the next
committed record. `unbroken` is the first offset from which on no record was lost with a disk: the
same as `earliest`, unless a log continues behind a loss.
"""

from __future__ import annotations

import asyncio
import datetime as dt
from collections.abc import Awaitable, Callable, Iterable
from typing import Final, Literal, NamedTuple

from zufluss.client.core.catalog import list_partitions
from zufluss.client.core.cluster import ClusterConnection
from zufluss.client.core.metadata import ServerNode
from zufluss.client.core.retry import PASSING, Backoff
from zufluss.errors import (
    InvalidTableError,
    InvalidTimestampError,
    LeaderNotAvailableError,
    PartitionNotExistError,
    UnknownTableOrBucketError,
    ZuflussError,
    error,
)
from zufluss.model.table import TableBucket, TableInfo, TablePath
from zufluss.wire import messages as m
from zufluss.wire.api import ApiKey

Position = Literal["earliest", "unbroken", "latest"] | int | dt.datetime
"""A place in a log that the server translates into offsets."""

LeaderAnswer = tuple[dict[TableBucket, int], ZuflussError | None]
"""The number of each answered bucket, and a passing error if some are unanswered."""
LeaderCall = Callable[[ServerNode, list[TableBucket]], Awaitable[LeaderAnswer]]
"""Asks one server for a number of each of some buckets."""

LISTINGS_MAX: Final = 5
"""Listings of the partitions of a table while partitions are created and dropped."""

_EARLIEST, _LATEST, _TIMESTAMP = 0, 1, 2
_NO_FOLLOWER = -1


class BucketPlace(NamedTuple):
    """A bucket, with the name of its partition, which requests for its leader need."""

    bucket: TableBucket
    """The bucket."""
    partition: str | None
    """The partition's name; None for a table without partitions."""


async def list_offsets(
    connection: ClusterConnection, info: TableInfo, places: Iterable[BucketPlace], at: Position
) -> dict[TableBucket, int]:
    """The offset of each bucket at a position; passing errors are retried."""

    async def ask(server: ServerNode, buckets: list[TableBucket]) -> LeaderAnswer:
        return await _ask(connection, server, buckets, at)

    return await ask_leaders(connection, info, places, ask)


async def ask_leaders(
    connection: ClusterConnection, info: TableInfo, places: Iterable[BucketPlace], ask: LeaderCall
) -> dict[TableBucket, int]:
    """A number of each bucket, asked of the bucket's leader; passing errors are retried.

    A call of `ask` has buckets of one partition.
    """
    open_places = {place.bucket: place for place in places}
    numbers: dict[TableBucket, int] = {}
    backoff = Backoff(connection.options.request_timeout_ms)
    while open_places:
        async with backoff.attempt():
            answers, failure = await _ask_once(connection, open_places, ask)
        numbers |= answers
        for bucket in answers:
            del open_places[bucket]
        if open_places:
            assert failure is not None
            await backoff.pause(failure)
            names = {place.partition for place in open_places.values()}
            await _find_leaders(connection, info, filter(None, names), backoff)
    return numbers


async def list_all_offsets(
    connection: ClusterConnection, path: TablePath, at: Position
) -> dict[TableBucket, int]:
    """The offset of every bucket of every partition; partitions dropped meanwhile are left out."""
    info = await connection.table_info(path, refresh=True)
    places = await _all_places(connection, info)
    for _ in range(LISTINGS_MAX):
        try:
            return await list_offsets(connection, info, places, at)
        except (PartitionNotExistError, UnknownTableOrBucketError):
            before, places = places, await _all_places(connection, info)
            if places == before:
                raise
    return await list_offsets(connection, info, places, at)


async def _all_places(connection: ClusterConnection, info: TableInfo) -> list[BucketPlace]:
    """Every bucket of the partitions that a table has now."""
    if not info.is_partitioned:
        return await places_of(connection, info, [None])
    places = [
        BucketPlace(TableBucket(info.table_id, partition.partition_id, i), partition.name)
        for partition in await list_partitions(connection, info.path)
        for i in range(info.bucket_count)
    ]
    leader = connection.metadata.leader
    unknown = {p.partition for p in places if p.partition and leader(p.bucket) is None}
    if unknown:
        try:
            await connection.refresh_leaders(info, unknown)
        except PartitionNotExistError:
            return places  # the request for offsets reports the dropped partition
    return places


async def _find_leaders(
    connection: ClusterConnection, info: TableInfo, partitions: Iterable[str], backoff: Backoff
) -> None:
    """Refresh the leaders, retrying passing errors; raises if the table or a partition is gone."""
    names = list(partitions)
    while True:
        try:
            async with backoff.attempt():
                return await connection.refresh_leaders(info, names)
        except ZuflussError as e:
            if e.code not in PASSING:
                raise
            failure = e
        await backoff.pause(failure)


async def _ask_once(
    connection: ClusterConnection, places: dict[TableBucket, BucketPlace], ask: LeaderCall
) -> LeaderAnswer:
    """Ask every leader once; returns the numbers and the last passing error."""
    groups: dict[tuple[ServerNode, int | None], list[TableBucket]] = {}
    failure: ZuflussError | None = None
    for bucket in places:
        leader = connection.metadata.leader(bucket)
        if leader is None:
            name = connection.metadata.name_of(bucket)
            failure = LeaderNotAvailableError(f"{name} has no leader at the moment")
        else:
            groups.setdefault((leader, bucket.partition_id), []).append(bucket)
    results = await asyncio.gather(
        *(ask(server, buckets) for (server, _), buckets in groups.items())
    )
    numbers: dict[TableBucket, int] = {}
    for answers, problem in results:
        numbers |= answers
        failure = problem or failure
    return numbers, failure


async def _ask(
    connection: ClusterConnection, server: ServerNode, buckets: list[TableBucket], at: Position
) -> LeaderAnswer:
    request = _request(buckets, at)
    by_id = {bucket.bucket_id: bucket for bucket in buckets}
    offsets: dict[TableBucket, int] = {}
    failure: ZuflussError | None = ZuflussError("a bucket is missing in the server's answer")
    try:
        socket = await connection.socket(server.address)
        timeout_ms = connection.options.request_timeout_ms
        response: m.ListOffsetsResponse = await socket.call(
            ApiKey.LIST_OFFSETS, request, timeout_ms=timeout_ms
        )
    except ZuflussError as e:
        if e.code not in PASSING:
            raise
        return offsets, e
    for result in response.buckets_resp:
        if result.error_code:
            failure = error(result.error_code, result.error_message)
            if failure.code not in PASSING:
                raise failure
        elif result.bucket_id in by_id:
            offsets[by_id[result.bucket_id]] = result.offset
    return offsets, None if len(offsets) == len(buckets) else failure


def _request(buckets: list[TableBucket], at: Position) -> m.ListOffsetsRequest:
    kind, timestamp = _kind(at)
    return m.ListOffsetsRequest(
        follower_server_id=_NO_FOLLOWER,
        offset_type=kind,
        table_id=buckets[0].table_id,
        partition_id=buckets[0].partition_id,
        bucket_id=[bucket.bucket_id for bucket in buckets],
        startTimestamp=timestamp,
        unbroken=True if at == "unbroken" else None,
    )


def _kind(at: Position) -> tuple[int, int | None]:
    if at in ("earliest", "unbroken"):
        return _EARLIEST, None
    if at == "latest":
        return _LATEST, None
    if isinstance(at, dt.datetime):
        aware = at if at.tzinfo else at.replace(tzinfo=dt.UTC)
        return _TIMESTAMP, int(aware.timestamp() * 1000)
    if isinstance(at, int) and not isinstance(at, bool):
        return _TIMESTAMP, at
    raise InvalidTimestampError(
        f"position {at!r} is none of 'earliest', 'unbroken', 'latest', epoch milliseconds, a "
        "datetime"
    )


async def places_of(
    connection: ClusterConnection, info: TableInfo, partitions: Iterable[str | None]
) -> list[BucketPlace]:
    """The buckets of a table or of some partitions; refreshes the metadata of unknown ones."""
    names = list(partitions)
    parts = [n for n in names if n is not None]
    if parts and any((info.table_id, n) not in connection.metadata.partitions for n in parts):
        backoff = Backoff(connection.options.request_timeout_ms)
        await _find_leaders(connection, info, parts, backoff)
    places = []
    for name in names:
        partition_id = None
        if name is not None:
            partition_id = (await connection.partition(info, name)).partition_id
        places += [
            BucketPlace(TableBucket(info.table_id, partition_id, bucket), name)
            for bucket in range(info.bucket_count)
        ]
    return places


def check_buckets(buckets: Iterable[int], info: TableInfo) -> None:
    """Raise `InvalidTableError` unless the table has all of these buckets."""
    wrong = [b for b in buckets if not 0 <= b < info.bucket_count]
    if wrong:
        raise InvalidTableError(
            f"table {info.path} has no bucket {wrong[0]}; its buckets are 0 to "
            f"{info.bucket_count - 1}"
        )
