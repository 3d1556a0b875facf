"""Which key-value snapshots the cluster keeps, and the files of each.

A key-value snapshot holds the rows of one bucket as they were at an offset of its changelog.
`keyed/snapshot_reader.py` downloads and reads one.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import NamedTuple

from zufluss.client.core.catalog import Partition, partition_name_of
from zufluss.client.core.cluster import ClusterConnection
from zufluss.client.core.keys import check_primary_key
from zufluss.client.core.offsets import BucketPlace, places_of
from zufluss.client.core.retry import PASSING, Backoff
from zufluss.errors import ZuflussError
from zufluss.model.table import TableBucket, TableInfo, TablePath
from zufluss.wire import messages as m
from zufluss.wire.api import ApiKey
from zufluss.wire.tables import partition_id_of, path_to_proto


@dataclass(frozen=True, slots=True)
class KvSnapshotInfo:
    """A key-value snapshot that is kept; equal to any other answer about the same snapshot."""

    bucket: TableBucket
    """The bucket."""
    snapshot_id: int
    """The number of the snapshot in its bucket; later snapshots have higher numbers."""
    log_offset: int
    """The snapshot contains all changes below this offset of the changelog."""
    size: int | None = field(default=None, compare=False)
    """Bytes of its files, those that it shares with other snapshots included; None if not told."""
    committed_ms: int | None = field(default=None, compare=False)
    """When it was committed, epoch milliseconds; None if not told."""


class KvSnapshotFile(NamedTuple):
    """A file of a key-value snapshot."""

    name: str
    """The file's name in RocksDB's directory."""
    remote_path: str
    """The file's full address in remote storage."""
    size: int | None
    """Bytes; None from an Apache Fluss server."""
    crc32c: int | None
    """The CRC-32C of the file; None from an Apache Fluss server."""


@dataclass(frozen=True, slots=True)
class KvSnapshotMetadata:
    """The files of a key-value snapshot; `table.kv_snapshot` reads them."""

    bucket: TableBucket
    """The bucket."""
    snapshot_id: int
    """The number of the snapshot in its bucket."""
    log_offset: int
    """The changelog continues from this offset."""
    files: tuple[KvSnapshotFile, ...]
    """The files of a RocksDB checkpoint."""
    row_count: int | None
    """Rows in the snapshot; None if the server does not count them."""


async def latest_kv_snapshots(
    connection: ClusterConnection, path: TablePath, partition: Partition | None = None
) -> list[KvSnapshotInfo]:
    """The newest snapshot of each bucket that has one."""
    info = await connection.table_info(path)
    request = m.GetLatestKvSnapshotsRequest(
        table_path=path_to_proto(path), partition_name=partition_name_of(info, partition)
    )
    answer: m.GetLatestKvSnapshotsResponse = await connection.call_coordinator(
        ApiKey.GET_LATEST_KV_SNAPSHOTS, request
    )
    return _kv_snapshots(answer, answer.latest_snapshots)


async def list_kv_snapshots(
    connection: ClusterConnection, path: TablePath, partition: Partition | None = None
) -> list[KvSnapshotInfo]:
    """Every snapshot that is kept, by bucket and number."""
    info = await connection.table_info(path)
    name = partition_name_of(info, partition)
    partition_id = None
    if name is not None:
        partition_id = (await connection.partition(info, name)).partition_id
    request = m.ListKvSnapshotsRequest(table_id=info.table_id, partition_id=partition_id)
    answer: m.ListKvSnapshotsResponse = await connection.call_coordinator(
        ApiKey.LIST_KV_SNAPSHOTS, request
    )
    return _kv_snapshots(answer, answer.active_snapshots)


async def take_kv_snapshots(
    connection: ClusterConnection, path: TablePath, partition: Partition | None = None
) -> list[KvSnapshotInfo]:
    """Take a snapshot of each bucket that changed since its last one, and wait for all of them."""
    info = await connection.table_info(path, refresh=True)
    check_primary_key(info, "key-value snapshot", "scan")
    places = await places_of(connection, info, [partition_name_of(info, partition)])
    await asyncio.gather(*(_take_kv_snapshot(connection, info, place) for place in places))
    taken = await list_kv_snapshots(connection, path, partition)
    return list({each.bucket: each for each in taken}.values())


async def _take_kv_snapshot(
    connection: ClusterConnection, info: TableInfo, place: BucketPlace
) -> None:
    bucket = place.bucket
    request = m.TakeKvSnapshotRequest(
        table_id=bucket.table_id, partition_id=bucket.partition_id, bucket_id=bucket.bucket_id
    )
    backoff = Backoff(connection.options.request_timeout_ms)
    while True:
        try:
            async with backoff.attempt():
                if connection.metadata.leader(bucket) is None:
                    names = [place.partition] if place.partition else []
                    await connection.refresh_leaders(info, names)
                answer = await connection.call_leader(bucket, ApiKey.TAKE_KV_SNAPSHOT, request)
            if answer.finished:
                return
            request.log_offset = answer.log_offset
            backoff = Backoff(connection.options.request_timeout_ms)
        except ZuflussError as problem:
            if problem.code not in PASSING:
                raise
            connection.metadata.forget_leader(bucket)
            await backoff.pause(problem)


async def kv_snapshot_metadata(
    connection: ClusterConnection, bucket: TableBucket, snapshot_id: int
) -> KvSnapshotMetadata:
    """The files of a snapshot; raises `KvSnapshotNotExistError` if it is no longer kept."""
    request = m.GetKvSnapshotMetadataRequest(
        table_id=bucket.table_id,
        partition_id=bucket.partition_id,
        bucket_id=bucket.bucket_id,
        snapshot_id=snapshot_id,
    )
    answer: m.GetKvSnapshotMetadataResponse = await connection.call_coordinator(
        ApiKey.GET_KV_SNAPSHOT_METADATA, request
    )
    files = tuple(map(_kv_snapshot_file, answer.snapshot_files))
    rows = answer.row_count if answer.HasField("row_count") else None
    return KvSnapshotMetadata(bucket, snapshot_id, answer.log_offset, files, rows)


def _kv_snapshots(
    answer: m.GetLatestKvSnapshotsResponse | m.ListKvSnapshotsResponse,
    snapshots: Iterable[m.PbKvSnapshot],
) -> list[KvSnapshotInfo]:
    """Snapshots by bucket and number. A bucket without a snapshot is listed without a number."""
    partition_id = partition_id_of(answer)
    infos = [
        KvSnapshotInfo(
            TableBucket(answer.table_id, partition_id, message.bucket_id),
            message.snapshot_id,
            message.log_offset,
            message.size if message.HasField("size") else None,
            message.committed_ms if message.HasField("committed_ms") else None,
        )
        for message in snapshots
        if message.HasField("snapshot_id")
    ]
    return sorted(infos, key=lambda info: (info.bucket.bucket_id, info.snapshot_id))


def _kv_snapshot_file(message: m.PbRemotePathAndLocalFile) -> KvSnapshotFile:
    return KvSnapshotFile(
        message.local_file_name,
        message.remote_path,
        message.size if message.HasField("size") else None,
        message.crc32c if message.HasField("crc32c") else None,
    )
