"""Databases, tables, partitions and offsets: everything that is no data.

Paths are `"database.table"` or a `TablePath`; a bare table name means database `fluss`. Reading
calls are tried again when a server is away for a moment; calls that change something are not,
unless they certainly had no effect (see `connection.py`).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

from zufluss.client.connection import AsyncConnection, as_path
from zufluss.client.core.metadata import ServerNode
from zufluss.client.core.offsets import BucketPlace, Position, list_offsets, places_of
from zufluss.client.lease.info import KvSnapshotLeaseInfo, leases_of
from zufluss.client.lease.lease import AsyncKvSnapshotLease, IfLost, open_lease
from zufluss.client.lease.wire import Duration
from zufluss.client.locations import (
    ClusterConfig,
    LocationProbe,
    RemoteLocation,
    RemoteLocations,
    alter_request,
    altered_location,
    configs_of,
    locations_of,
    probes_of,
)
from zufluss.client.producer.info import ProducerInfo, producers_of
from zufluss.errors import (
    InvalidPartitionError,
    LakeSnapshotNotExistError,
    PartitionNotExistError,
    TableNotPartitionedError,
    UnknownTableOrBucketError,
)
from zufluss.model.lake import LakeSnapshot
from zufluss.model.partition import partition_name, spec_of
from zufluss.model.schema import Column, Schema, dump_object
from zufluss.model.table import (
    DatabaseDescriptor,
    TableBucket,
    TableDescriptor,
    TableInfo,
    TablePath,
)
from zufluss.wire import messages as m
from zufluss.wire.api import ApiKey
from zufluss.wire.tables import partition_id_of, path_to_proto, spec_from_proto, spec_to_proto

_SET: Final = 0
_DELETE: Final = 1
_LAST: Final = 0
_LISTINGS_MAX: Final = 5
"""How often partitions that come and go may make us list them again."""

Path = str | TablePath
Partition = str | Mapping[str, str]
"""A partition by its name (`2024-01-15$EMEA`) or its spec (`{"day": "2024-01-15", …}`)."""


@dataclass(frozen=True, slots=True)
class DatabaseInfo:
    """A database that exists."""

    name: str
    """Its name."""
    descriptor: DatabaseDescriptor
    """Comment and properties."""
    created_time: int
    """Epoch milliseconds."""
    modified_time: int
    """Epoch milliseconds."""


@dataclass(frozen=True, slots=True)
class PartitionInfo:
    """A partition that exists."""

    partition_id: int
    """Its id, never used again after a drop."""
    name: str
    """Its values joined with `$`."""
    spec: Mapping[str, str]
    """Its values by partition key."""


@dataclass(frozen=True, slots=True)
class KvSnapshotInfo:
    """A key-value snapshot that is kept."""

    bucket: TableBucket
    """The bucket."""
    snapshot_id: int
    """Its number in the bucket; later ones have higher numbers."""
    log_offset: int
    """It has everything below this offset of the changelog."""


class KvSnapshotFile(NamedTuple):
    """A file of a key-value snapshot."""

    name: str
    """Its name in RocksDB's directory."""
    remote_path: str
    """Where it lies, in full."""
    size: int | None
    """Its length in bytes; None from an Apache Fluss server."""
    crc32c: int | None
    """The CRC-32C of its bytes; None from an Apache Fluss server."""


@dataclass(frozen=True, slots=True)
class KvSnapshotMetadata:
    """What a key-value snapshot is made of; `table.kv_snapshot` reads it."""

    bucket: TableBucket
    """The bucket."""
    snapshot_id: int
    """Its number in the bucket."""
    log_offset: int
    """The changelog goes on from here."""
    files: tuple[KvSnapshotFile, ...]
    """A RocksDB checkpoint."""
    row_count: int | None
    """Rows in it, None where they are not counted."""


class AsyncAdmin:
    """The administrative calls; get it from `connection.admin`.

    >>> await connection.admin.create_table(  # doctest: +SKIP
    ...     "fluss.events", "id BIGINT, name STRING", bucket_count=4
    ... )
    """

    def __init__(self, connection: AsyncConnection) -> None:
        self._connection = connection

    # -- databases -----------------------------------------------------------------------------

    async def create_database(
        self,
        name: str,
        *,
        comment: str | None = None,
        custom_properties: Mapping[str, str] | None = None,
        ignore_if_exists: bool = False,
    ) -> None:
        """Create a database."""
        request = m.CreateDatabaseRequest(database_name=name, ignore_if_exists=ignore_if_exists)
        if comment is not None or custom_properties:
            descriptor = DatabaseDescriptor(comment, dict(custom_properties or {}))
            request.database_json = descriptor.to_json()
        await self._change(ApiKey.CREATE_DATABASE, request)

    async def drop_database(
        self, name: str, *, cascade: bool = False, ignore_if_not_exists: bool = False
    ) -> None:
        """Drop a database; `cascade` drops its tables too."""
        request = m.DropDatabaseRequest(
            database_name=name, cascade=cascade, ignore_if_not_exists=ignore_if_not_exists
        )
        await self._change(ApiKey.DROP_DATABASE, request)

    async def list_databases(self) -> list[str]:
        """The names of all databases."""
        response = await self._ask(ApiKey.LIST_DATABASES, m.ListDatabasesRequest())
        return list(response.database_name)

    async def database_exists(self, name: str) -> bool:
        """Whether there is such a database."""
        request = m.DatabaseExistsRequest(database_name=name)
        return bool((await self._ask(ApiKey.DATABASE_EXISTS, request)).exists)

    async def database_info(self, name: str) -> DatabaseInfo:
        """Comment, properties and times of a database."""
        request = m.GetDatabaseInfoRequest(database_name=name)
        r: m.GetDatabaseInfoResponse = await self._ask(ApiKey.GET_DATABASE_INFO, request)
        descriptor = DatabaseDescriptor.from_json(r.database_json)
        return DatabaseInfo(name, descriptor, r.created_time, r.modified_time)

    async def alter_database(
        self,
        name: str,
        *,
        set: Mapping[str, str] | None = None,
        reset: Iterable[str] = (),
        comment: str | None = None,
        ignore_if_not_exists: bool = False,
    ) -> None:
        """Set and remove custom properties, change the comment."""
        request = m.AlterDatabaseRequest(
            database_name=name,
            ignore_if_not_exists=ignore_if_not_exists,
            config_changes=_config_changes(set, reset),
            comment=comment,
        )
        await self._change(ApiKey.ALTER_DATABASE, request)

    # -- tables --------------------------------------------------------------------------------

    async def create_table(
        self,
        path: Path,
        schema: TableDescriptor | Schema | str | Any,
        *,
        primary_key: Sequence[str] = (),
        partition_keys: Sequence[str] = (),
        bucket_keys: Sequence[str] = (),
        bucket_count: int | None = None,
        comment: str | None = None,
        properties: Mapping[str, str] | None = None,
        custom_properties: Mapping[str, str] | None = None,
        ignore_if_exists: bool = False,
    ) -> None:
        """Create a table.

        `schema` is a whole `TableDescriptor` (the other arguments are then not used), or a schema:
        a pyarrow schema, a column list such as `"id BIGINT NOT NULL, name STRING"`, a `Schema`.
        """
        if isinstance(schema, TableDescriptor):
            descriptor = schema
        else:
            descriptor = TableDescriptor(
                schema=Schema.of(schema, primary_key=primary_key),
                comment=comment,
                partition_keys=tuple(partition_keys),
                bucket_keys=tuple(bucket_keys),
                bucket_count=bucket_count,
                properties=dict(properties or {}),
                custom_properties=dict(custom_properties or {}),
            )
        request = m.CreateTableRequest(
            table_path=path_to_proto(as_path(path)),
            table_json=descriptor.to_json(),
            ignore_if_exists=ignore_if_exists,
        )
        await self._change(ApiKey.CREATE_TABLE, request)

    async def drop_table(self, path: Path, *, ignore_if_not_exists: bool = False) -> None:
        """Drop a table and its data."""
        name = as_path(path)
        request = m.DropTableRequest(
            table_path=path_to_proto(name), ignore_if_not_exists=ignore_if_not_exists
        )
        await self._change(ApiKey.DROP_TABLE, request)
        self._connection.metadata.forget_table(name)

    async def list_tables(self, database: str) -> list[str]:
        """The names of the tables of a database."""
        request = m.ListTablesRequest(database_name=database)
        return list((await self._ask(ApiKey.LIST_TABLES, request)).table_name)

    async def table_exists(self, path: Path) -> bool:
        """Whether there is such a table."""
        request = m.TableExistsRequest(table_path=path_to_proto(as_path(path)))
        return bool((await self._ask(ApiKey.TABLE_EXISTS, request)).exists)

    async def table_info(self, path: Path) -> TableInfo:
        """The table: ids, schema, keys, buckets, properties, times."""
        name = as_path(path)
        request = m.GetTableInfoRequest(table_path=path_to_proto(name))
        r: m.GetTableInfoResponse = await self._ask(ApiKey.GET_TABLE_INFO, request)
        descriptor = TableDescriptor.from_json(r.table_json)
        times = (r.created_time, r.modified_time)
        return TableInfo(name, r.table_id, r.schema_id, descriptor, *times)

    async def table_schema(self, path: Path, schema_id: int | None = None) -> Schema:
        """A schema the table has or had; the current one without an id."""
        request = m.GetTableSchemaRequest(
            table_path=path_to_proto(as_path(path)), schema_id=schema_id
        )
        response: m.GetTableSchemaResponse = await self._ask(ApiKey.GET_TABLE_SCHEMA, request)
        return Schema.from_json(response.schema_json)

    async def alter_table(
        self,
        path: Path,
        *,
        set: Mapping[str, str] | None = None,
        reset: Iterable[str] = (),
        add_columns: Sequence[Column] | str = (),
        ignore_if_not_exists: bool = False,
    ) -> None:
        """Set properties, set some back to their default, or add nullable columns at the end.

        `add_columns` are columns, or a column list such as `"note STRING, weight DOUBLE"`.
        """
        added = Schema.of(add_columns).columns if isinstance(add_columns, str) else add_columns
        request = m.AlterTableRequest(
            table_path=path_to_proto(as_path(path)),
            ignore_if_not_exists=ignore_if_not_exists,
            config_changes=_config_changes(set, reset),
            add_columns=[_add_column(column) for column in added],
        )
        await self._change(ApiKey.ALTER_TABLE, request)

    # -- partitions ----------------------------------------------------------------------------

    async def create_partition(
        self, path: Path, partition: Partition, *, ignore_if_exists: bool = False
    ) -> None:
        """Create a partition.

        >>> await admin.create_partition("fluss.events", {"day": "2024-01-15"})  # doctest: +SKIP
        """
        request = m.CreatePartitionRequest(
            table_path=path_to_proto(as_path(path)),
            partition_spec=await self._spec(path, partition),
            ignore_if_not_exists=ignore_if_exists,  # the protocol's name for it
        )
        await self._change(ApiKey.CREATE_PARTITION, request)

    async def drop_partition(
        self, path: Path, partition: Partition, *, ignore_if_not_exists: bool = False
    ) -> None:
        """Drop a partition and its data."""
        name = as_path(path)
        spec = await self._spec(path, partition)
        request = m.DropPartitionRequest(
            table_path=path_to_proto(name),
            partition_spec=spec,
            ignore_if_not_exists=ignore_if_not_exists,
        )
        await self._change(ApiKey.DROP_PARTITION, request)
        info = self._connection.metadata.tables.get(name)
        if info is not None:
            values = spec_from_proto(spec)
            dropped = partition_name(info.partition_keys, values)
            self._connection.metadata.forget_partition(info.table_id, dropped)

    async def list_partitions(
        self, path: Path, partial: Mapping[str, str] | None = None
    ) -> list[PartitionInfo]:
        """The partitions of a table, or those with the given values."""
        request = m.ListPartitionInfosRequest(table_path=path_to_proto(as_path(path)))
        if partial:
            request.partial_partition_spec.CopyFrom(spec_to_proto(partial))
        response: m.ListPartitionInfosResponse = await self._ask(
            ApiKey.LIST_PARTITION_INFOS, request
        )
        return [_partition_info(found) for found in response.partitions_info]

    async def _spec(self, path: Path, partition: Partition) -> m.PbPartitionSpec:
        if not isinstance(partition, str):
            return spec_to_proto(partition)
        info = await self._connection.table_info(as_path(path))
        return spec_to_proto(spec_of(info.partition_keys, partition))

    # -- offsets and servers -------------------------------------------------------------------

    async def list_offsets(
        self,
        path: Path,
        at: Position = "latest",
        *,
        partition: Partition | None = None,
        buckets: Iterable[int] | None = None,
    ) -> dict[int, int]:
        """The offset of each bucket at `"earliest"`, `"latest"`, or a time.

        >>> await admin.list_offsets("fluss.events", "latest")  # doctest: +SKIP
        {0: 17, 1: 0}
        """
        info = await self._connection.table_info(as_path(path), refresh=True)
        name = _partition_name(info, partition)
        places = await places_of(self._connection, info, [name])
        wanted = None if buckets is None else {*buckets}
        chosen = [p for p in places if wanted is None or p.bucket.bucket_id in wanted]
        found = await list_offsets(self._connection, info, chosen, at)
        return {bucket.bucket_id: offset for bucket, offset in sorted(found.items())}

    async def list_all_offsets(self, path: Path, at: Position = "latest") -> dict[TableBucket, int]:
        """The offset of each bucket of each partition at `"earliest"`, `"latest"`, or a time.

        Partitions that are dropped meanwhile are left out.
        """
        info = await self._connection.table_info(as_path(path), refresh=True)
        places = await self._places(info)
        for _ in range(_LISTINGS_MAX):
            try:
                return await list_offsets(self._connection, info, places, at)
            except (PartitionNotExistError, UnknownTableOrBucketError):
                before, places = places, await self._places(info)
                if places == before:
                    raise
        return await list_offsets(self._connection, info, places, at)

    async def _places(self, info: TableInfo) -> list[BucketPlace]:
        """Every bucket of a table, with the partitions that it has now."""
        if not info.is_partitioned:
            return await places_of(self._connection, info, [None])
        places = [
            BucketPlace(TableBucket(info.table_id, partition.partition_id, i), partition.name)
            for partition in await self.list_partitions(info.path)
            for i in range(info.bucket_count)
        ]
        leader = self._connection.metadata.leader
        unknown = {p.partition for p in places if p.partition and leader(p.bucket) is None}
        if unknown:
            try:
                await self._connection.refresh_leaders(info, unknown)
            except PartitionNotExistError:
                return places  # asking for the offsets tells the same
        return places

    async def lake_snapshot(
        self, path: Path, snapshot_id: int | None = None, *, readable: bool = False
    ) -> LakeSnapshot | None:
        """The newest snapshot of a table in the lake, or one by its id; None if there is none.

        `readable` asks for the newest one whose rows readers of the lake may rely on.
        """
        request = m.GetLakeSnapshotRequest(
            table_path=path_to_proto(as_path(path)), snapshot_id=snapshot_id
        )
        if readable:
            request.readable = True
        try:
            found: m.GetLakeSnapshotResponse = await self._ask(ApiKey.GET_LAKE_SNAPSHOT, request)
        except LakeSnapshotNotExistError:
            return None
        return _lake_snapshot(found)

    # -- key-value snapshots -------------------------------------------------------------------

    async def latest_kv_snapshots(
        self, path: Path, partition: Partition | None = None
    ) -> list[KvSnapshotInfo]:
        """The newest snapshot of each bucket of a primary-key table that has one."""
        info = await self._connection.table_info(as_path(path))
        request = m.GetLatestKvSnapshotsRequest(
            table_path=path_to_proto(info.path), partition_name=_partition_name(info, partition)
        )
        found: m.GetLatestKvSnapshotsResponse = await self._ask(
            ApiKey.GET_LATEST_KV_SNAPSHOTS, request
        )
        return _kv_snapshots(found, found.latest_snapshots)

    async def list_kv_snapshots(
        self, path: Path, partition: Partition | None = None
    ) -> list[KvSnapshotInfo]:
        """Every snapshot of a primary-key table that is kept, by bucket and number."""
        info = await self._connection.table_info(as_path(path))
        name = _partition_name(info, partition)
        partition_id = None
        if name is not None:
            partition_id = (await self._connection.partition(info, name)).partition_id
        request = m.ListKvSnapshotsRequest(table_id=info.table_id, partition_id=partition_id)
        found: m.ListKvSnapshotsResponse = await self._ask(ApiKey.LIST_KV_SNAPSHOTS, request)
        return _kv_snapshots(found, found.active_snapshots)

    async def kv_snapshot_metadata(
        self, bucket: TableBucket, snapshot_id: int
    ) -> KvSnapshotMetadata:
        """The files of a snapshot; `KvSnapshotNotExistError` if it is not kept any more."""
        request = m.GetKvSnapshotMetadataRequest(
            table_id=bucket.table_id,
            partition_id=bucket.partition_id,
            bucket_id=bucket.bucket_id,
            snapshot_id=snapshot_id,
        )
        found: m.GetKvSnapshotMetadataResponse = await self._ask(
            ApiKey.GET_KV_SNAPSHOT_METADATA, request
        )
        files = tuple(map(_kv_snapshot_file, found.snapshot_files))
        rows = found.row_count if found.HasField("row_count") else None
        return KvSnapshotMetadata(bucket, snapshot_id, found.log_offset, files, rows)

    async def kv_snapshot_lease(
        self,
        tables: Path | Iterable[Path] = (),
        *,
        buckets: Iterable[int | TableBucket] | None = None,
        partition: Partition | None = None,
        duration: Duration = "1d",
        lease_id: str | None = None,
        resume: bool = False,
        if_lost: IfLost = "error",
    ) -> AsyncKvSnapshotLease:
        """Lease the latest snapshots of primary-key tables; they stay until the lease is closed.

        It is renewed in the background, and dropped at the end of its block. Without `partition`
        all partitions are leased; `buckets` are numbers, or `TableBucket`s without tables.

        With `resume` the snapshots are those that the lease `lease_id` has already, left there by
        a process that ended; if it has expired, `if_lost="latest"` leases the latest ones instead.

        >>> async with await admin.kv_snapshot_lease("fluss.orders") as lease:  # doctest: +SKIP
        ...     print(lease.snapshots)
        """
        named = [tables] if isinstance(tables, (str, TablePath)) else tables
        paths = [as_path(each) for each in named]
        return await open_lease(
            self._connection, paths, partition, buckets, duration, lease_id, resume, if_lost
        )

    async def kv_snapshot_leases(self, lease_id: str | None = None) -> list[KvSnapshotLeaseInfo]:
        """All leases of key-value snapshots, or one with its snapshots; none if there is none."""
        request = m.ListKvSnapshotLeasesRequest(lease_id=lease_id)
        return leases_of(await self._ask(ApiKey.LIST_KV_SNAPSHOT_LEASES, request))

    async def drop_kv_snapshot_lease(self, lease_id: str) -> None:
        """End a lease, whoever uses it; its snapshots may go. One that there is not is fine."""
        request = m.DropKvSnapshotLeaseRequest(lease_id=lease_id)
        await self._ask(ApiKey.DROP_KV_SNAPSHOT_LEASE, request)

    async def list_producers(self, path: Path | None = None) -> list[ProducerInfo]:
        """The producers of a table with their offsets, or all producers without."""
        table_id = None
        if path is not None:
            table_id = (await self._connection.table_info(as_path(path))).table_id
        request = m.ListProducersRequest(table_id=table_id)
        return producers_of(await self._ask(ApiKey.LIST_PRODUCERS, request))

    async def drop_producer(self, path: Path, producer_id: str) -> None:
        """End a producer, whoever writes as it: what it wrote stays, its columns are free."""
        info = await self._connection.table_info(as_path(path))
        request = m.ReleaseProducerRequest(table_id=info.table_id, producer_id=producer_id)
        await self._change(ApiKey.RELEASE_PRODUCER, request)

    async def server_nodes(self) -> list[ServerNode]:
        """The servers of the cluster, as they are reached from here."""
        await self._connection.refresh()
        metadata = self._connection.metadata
        coordinator = [metadata.coordinator] if metadata.coordinator else []
        return [*coordinator, *metadata.tablets.values()]

    # -- remote locations and configuration ----------------------------------------------------

    async def locations(self) -> RemoteLocations:
        """Where remote files lie: what is wanted of each location, and what servers saw of it."""
        return locations_of(await self._ask(ApiKey.LIST_LOCATIONS, m.ListLocationsRequest()))

    async def alter_location(
        self,
        operation: str,
        location_id: int | None = None,
        *,
        uri: str | None = None,
        weight: int | None = None,
        expected_version: int | None = None,
    ) -> RemoteLocation:
        """Change a remote location: add, drain, activate, retire, set-weight or move.

        With `expected_version` only if the registry still has that version.

        >>> await admin.alter_location("add", uri="s3://bucket/b", weight=2)  # doctest: +SKIP
        >>> await admin.alter_location("drain", 1)  # doctest: +SKIP
        """
        request = alter_request(operation, location_id, uri, weight, expected_version)
        return altered_location(
            await self._connection.call_coordinator(
                ApiKey.ALTER_LOCATION, request, repeatable=False
            )
        )

    async def probe_locations(self, location_id: int | None = None) -> list[LocationProbe]:
        """Have the coordinator try one location, or all, by a small object."""
        request = m.ProbeLocationRequest(location_id=location_id)
        return probes_of(await self._ask(ApiKey.PROBE_LOCATION, request))

    async def cluster_configs(self) -> list[ClusterConfig]:
        """The options of the cluster that somebody set, secrets hidden."""
        request = m.DescribeClusterConfigsRequest()
        return configs_of(await self._ask(ApiKey.DESCRIBE_CLUSTER_CONFIGS, request))

    async def alter_cluster_configs(
        self, set: Mapping[str, str] | None = None, *, reset: Iterable[str] = ()
    ) -> None:
        """Set options of the running cluster, or take such changes back; all of them or none.

        >>> await admin.alter_cluster_configs(  # doctest: +SKIP
        ...     {"remote.data.dirs": "s3://one/a,s3://two/b"}
        ... )
        """
        request = m.AlterClusterConfigsRequest(alter_configs=_config_changes(set, reset))
        await self._change(ApiKey.ALTER_CLUSTER_CONFIGS, request)

    # -- calls ---------------------------------------------------------------------------------

    async def _ask(self, api_key: ApiKey, request: Any) -> Any:
        return await self._connection.call_coordinator(api_key, request)

    async def _change(self, api_key: ApiKey, request: Any) -> None:
        await self._connection.call_coordinator(api_key, request, repeatable=False)


def _partition_name(info: TableInfo, partition: Partition | None) -> str | None:
    if partition is None:
        if info.is_partitioned:
            raise InvalidPartitionError(f"table {info.path} is partitioned; name the partition")
        return None
    if not info.is_partitioned:
        raise TableNotPartitionedError(f"table {info.path} is not partitioned; name no partition")
    if isinstance(partition, str):
        return partition
    return partition_name(info.partition_keys, partition)


def _config_changes(
    changed: Mapping[str, str] | None, removed: Iterable[str]
) -> list[m.PbAlterConfig]:
    changes = [
        m.PbAlterConfig(config_key=key, config_value=str(value), op_type=_SET)
        for key, value in (changed or {}).items()
    ]
    return changes + [m.PbAlterConfig(config_key=key, op_type=_DELETE) for key in removed]


def _add_column(column: Column) -> m.PbAddColumn:
    added = m.PbAddColumn(
        column_name=column.name,
        data_type_json=dump_object(column.data_type.to_json()),
        comment=column.comment,
        column_position_type=_LAST,
    )
    if column.agg_function is not None:
        added.agg_function_type = column.agg_function.type
        for key, value in column.agg_function.parameters:
            added.agg_function_params.add(key=key, value=value)
    return added


def _partition_info(found: m.PbPartitionInfo) -> PartitionInfo:
    spec = spec_from_proto(found.partition_spec)
    return PartitionInfo(found.partition_id, partition_name(list(spec), spec), spec)


def _lake_snapshot(found: m.GetLakeSnapshotResponse) -> LakeSnapshot:
    offsets: dict[TableBucket, int] = {}
    names: dict[int, str] = {}
    for each in found.bucket_snapshots:
        partition_id = partition_id_of(each)
        if each.HasField("log_offset"):
            offsets[TableBucket(found.table_id, partition_id, each.bucket_id)] = each.log_offset
        if partition_id is not None and each.HasField("partition_name"):
            names[partition_id] = each.partition_name
    return LakeSnapshot(found.table_id, found.snapshotId, offsets, names)


def _kv_snapshots(
    found: m.GetLatestKvSnapshotsResponse | m.ListKvSnapshotsResponse,
    snapshots: Iterable[m.PbKvSnapshot],
) -> list[KvSnapshotInfo]:
    """By bucket and number; a bucket without a snapshot may be listed without a number."""
    partition_id = partition_id_of(found)
    there = [
        KvSnapshotInfo(
            TableBucket(found.table_id, partition_id, each.bucket_id),
            each.snapshot_id,
            each.log_offset,
        )
        for each in snapshots
        if each.HasField("snapshot_id")
    ]
    return sorted(there, key=lambda each: (each.bucket.bucket_id, each.snapshot_id))


def _kv_snapshot_file(found: m.PbRemotePathAndLocalFile) -> KvSnapshotFile:
    return KvSnapshotFile(
        found.local_file_name,
        found.remote_path,
        found.size if found.HasField("size") else None,
        found.crc32c if found.HasField("crc32c") else None,
    )
