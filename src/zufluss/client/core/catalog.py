"""Questions about tables that several parts of the client ask the coordinator.

`AsyncAdmin` offers the same calls to users. Writers, scans and lookups use these functions, so
that they do not depend on the admin calls above them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from zufluss.client.core.cluster import ClusterConnection
from zufluss.errors import (
    InvalidPartitionError,
    LakeSnapshotNotExistError,
    TableNotPartitionedError,
)
from zufluss.model.lake import LakeSnapshot
from zufluss.model.partition import partition_name
from zufluss.model.schema import Schema
from zufluss.model.table import TableBucket, TableDescriptor, TableInfo, TablePath
from zufluss.wire import messages as m
from zufluss.wire.api import ApiKey
from zufluss.wire.tables import bucket_in_table, path_to_proto, spec_from_proto, spec_to_proto

Partition = str | Mapping[str, str]
"""A partition by its name (`2024-01-15$EMEA`) or its spec (`{"day": "2024-01-15", …}`)."""


@dataclass(frozen=True, slots=True)
class PartitionInfo:
    """A partition that exists."""

    partition_id: int
    """The id; it is not used again after the partition was dropped."""
    name: str
    """The values joined with `$`."""
    spec: Mapping[str, str]
    """The values by partition key."""


async def table_info(connection: ClusterConnection, path: TablePath) -> TableInfo:
    """The table as the coordinator knows it; raises `TableNotExistError`."""
    request = m.GetTableInfoRequest(table_path=path_to_proto(path))
    answer: m.GetTableInfoResponse = await connection.call_coordinator(
        ApiKey.GET_TABLE_INFO, request
    )
    descriptor = TableDescriptor.from_json(answer.table_json)
    times = (answer.created_time, answer.modified_time)
    return TableInfo(path, answer.table_id, answer.schema_id, descriptor, *times)


async def table_schema(
    connection: ClusterConnection, path: TablePath, schema_id: int | None = None
) -> Schema:
    """A schema that the table has or had; the current one if `schema_id` is None."""
    request = m.GetTableSchemaRequest(table_path=path_to_proto(path), schema_id=schema_id)
    answer: m.GetTableSchemaResponse = await connection.call_coordinator(
        ApiKey.GET_TABLE_SCHEMA, request
    )
    return Schema.from_json(answer.schema_json)


async def list_partitions(
    connection: ClusterConnection, path: TablePath, partial: Mapping[str, str] | None = None
) -> list[PartitionInfo]:
    """The partitions of a table; with `partial` only those that have these values."""
    request = m.ListPartitionInfosRequest(table_path=path_to_proto(path))
    if partial:
        request.partial_partition_spec.CopyFrom(spec_to_proto(partial))
    answer: m.ListPartitionInfosResponse = await connection.call_coordinator(
        ApiKey.LIST_PARTITION_INFOS, request
    )
    return [_partition_info(message) for message in answer.partitions_info]


async def lake_snapshot(
    connection: ClusterConnection,
    path: TablePath,
    snapshot_id: int | None = None,
    *,
    readable: bool = False,
) -> LakeSnapshot | None:
    """The newest lake snapshot of a table, or the one with an id; None if there is none.

    `readable` asks for the newest snapshot whose rows readers of the lake may rely on.
    """
    request = m.GetLakeSnapshotRequest(table_path=path_to_proto(path), snapshot_id=snapshot_id)
    if readable:
        request.readable = True
    try:
        answer: m.GetLakeSnapshotResponse = await connection.call_coordinator(
            ApiKey.GET_LAKE_SNAPSHOT, request
        )
    except LakeSnapshotNotExistError:
        return None
    return _lake_snapshot(answer)


async def no_lake_snapshot(connection: ClusterConnection, path: TablePath) -> str | None:
    """Why a table has no lake snapshot; None if it has one."""
    request = m.GetLakeSnapshotRequest(table_path=path_to_proto(path))
    try:
        await connection.call_coordinator(ApiKey.GET_LAKE_SNAPSHOT, request)
    except LakeSnapshotNotExistError as problem:
        return problem.message
    return None


def partition_name_of(info: TableInfo, partition: Partition | None) -> str | None:
    """The name of a partition; None for a table without partitions.

    Raises `InvalidPartitionError` if a partitioned table is given no partition, and
    `TableNotPartitionedError` if another table is given one.
    """
    if partition is None:
        if info.is_partitioned:
            raise InvalidPartitionError(f"table {info.path} is partitioned; name the partition")
        return None
    if not info.is_partitioned:
        raise TableNotPartitionedError(f"table {info.path} is not partitioned; name no partition")
    if isinstance(partition, str):
        return partition
    return partition_name(info.partition_keys, partition)


def _partition_info(message: m.PbPartitionInfo) -> PartitionInfo:
    spec = spec_from_proto(message.partition_spec)
    return PartitionInfo(message.partition_id, partition_name(list(spec), spec), spec)


def _lake_snapshot(answer: m.GetLakeSnapshotResponse) -> LakeSnapshot:
    offsets: dict[TableBucket, int] = {}
    names: dict[int, str] = {}
    for message in answer.bucket_snapshots:
        bucket = bucket_in_table(answer.table_id, message)
        if message.HasField("log_offset"):
            offsets[bucket] = message.log_offset
        if bucket.partition_id is not None and message.HasField("partition_name"):
            names[bucket.partition_id] = message.partition_name
    return LakeSnapshot(answer.table_id, answer.snapshotId, offsets, names)
