"""Some rows of a primary-key table, to look at: LIMIT_SCAN.

The server chooses the rows; they have no order. Buckets are asked a few at a time until there are
enough rows.
"""

from __future__ import annotations

import asyncio
from typing import Final

import pyarrow as pa

from zufluss.client.core.catalog import list_partitions
from zufluss.client.core.cluster import ClusterConnection
from zufluss.client.core.offsets import BucketPlace, places_of
from zufluss.client.core.retry import PASSING, Backoff
from zufluss.client.keyed.values import ValueDecoder
from zufluss.errors import ZuflussError, error
from zufluss.model.table import TableInfo
from zufluss.wire import messages as m
from zufluss.wire.api import ApiKey

BUCKETS_AT_ONCE: Final = 16
"""Buckets that are asked concurrently."""


async def head_of_keys(connection: ClusterConnection, info: TableInfo, count: int) -> pa.Table:
    """Return at most `count` rows of a primary-key table."""
    names: list[str | None] = [None]
    if info.is_partitioned:
        names = [p.name for p in await list_partitions(connection, info.path)]
    places = await places_of(connection, info, names)
    decoder = ValueDecoder(connection, info)
    parts: list[pa.RecordBatch] = []
    for start in range(0, len(places), BUCKETS_AT_ONCE):
        missing = count - sum(part.num_rows for part in parts)
        if missing <= 0:
            break
        wave = places[start : start + BUCKETS_AT_ONCE]
        parts += await asyncio.gather(
            *(_bucket_rows(connection, info, place, missing, decoder) for place in wave)
        )
    return pa.Table.from_batches(parts, schema=info.schema.arrow).slice(0, count)


async def _bucket_rows(
    connection: ClusterConnection,
    info: TableInfo,
    place: BucketPlace,
    limit: int,
    decoder: ValueDecoder,
) -> pa.RecordBatch:
    request = m.LimitScanRequest(
        table_id=info.table_id,
        partition_id=place.bucket.partition_id,
        bucket_id=place.bucket.bucket_id,
        limit=limit,
    )
    backoff = Backoff(connection.options.request_timeout_ms)
    name = connection.metadata.name_of(place.bucket)
    while True:
        try:
            async with backoff.attempt():
                if connection.metadata.leader(place.bucket) is None:
                    await connection.refresh_leaders(info, filter(None, [place.partition]))
                response = await connection.call_leader(place.bucket, ApiKey.LIMIT_SCAN, request)
            if response.error_code:
                raise error(response.error_code, f"{name}: {response.error_message}")
            break
        except ZuflussError as e:
            if e.code not in PASSING:
                raise
            failure = e
        connection.metadata.forget_leader(place.bucket)
        await backoff.pause(failure)
    from zufluss.record.batch.kv import parse_value_batch  # loads the compiled kernels

    return await decoder.decode(parse_value_batch(response.records))
