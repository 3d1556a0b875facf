"""The administrative calls: everything that neither writes nor reads rows.

Paths are `"database.table"` or a `TablePath`; a bare table name means database `fluss`. Calls that
only read are repeated while a server is away for a moment. Calls that change something are
repeated only if they certainly had no effect (see `core/cluster.py`).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from zufluss.client.core import catalog, offsets
from zufluss.client.core.catalog import Partition, PartitionInfo, partition_name_of
from zufluss.client.core.cluster import Path, as_path
from zufluss.client.core.durations import Duration
from zufluss.client.core.offsets import Position, places_of
from zufluss.client.keyed import snapshots
from zufluss.client.keyed.scan_info import KvScanInfo, end_kv_scans, list_kv_scans
from zufluss.client.keyed.snapshots import KvSnapshotInfo, KvSnapshotMetadata
from zufluss.client.lease.info import (
    KvSnapshotLeaseInfo,
    KvSnapshotLeaseUsages,
    leases_of,
    usages_of,
)
from zufluss.client.lease.lease import AsyncKvSnapshotLease, IfLost, open_lease
from zufluss.client.operations import AsyncOperations, config_changes
from zufluss.client.producer.info import ProducerInfo, producers_of
from zufluss.model.lake import LakeSnapshot
from zufluss.model.partition import partition_name, spec_of
from zufluss.model.schema import Column, Schema, dump_object, names_of
from zufluss.model.table import (
    DatabaseDescriptor,
    TableBucket,
    TableDescriptor,
    TableInfo,
)
from zufluss.wire import messages as m
from zufluss.wire.api import ApiKey
from zufluss.wire.tables import path_to_proto, spec_to_proto

_LAST: Final = 0


@dataclass(frozen=True, slots=True)
class DatabaseInfo:
    """A database that exists."""

    name: str
    """The database's name."""
    descriptor: DatabaseDescriptor
    """Comment and properties."""
    created_time: int
    """Epoch milliseconds."""
    modified_time: int
    """Epoch milliseconds."""


class AsyncAdmin(AsyncOperations):
    """The administrative calls; `connection.admin` returns this object.

    >>> await connection.admin.create_table(  # doctest: +SKIP
    ...     "fluss.events", "id BIGINT, name STRING", bucket_count=4
    ... )
    """

    # -- databases -----------------------------------------------------------------------------

    async def create_database(
        self,
        name: str,
        *,
        comment: str | None = None,
        custom_properties: Mapping[str, str] | None = None,
        ignore_if_exists: bool = False,
    ) -> None:
        """Create a database; raises `DatabaseAlreadyExistError` unless `ignore_if_exists`."""
        request = m.CreateDatabaseRequest(database_name=name, ignore_if_exists=ignore_if_exists)
        if comment is not None or custom_properties:
            descriptor = DatabaseDescriptor(comment, dict(custom_properties or {}))
            request.database_json = descriptor.to_json()
        await self._change(ApiKey.CREATE_DATABASE, request)

    async def drop_database(
        self, name: str, *, cascade: bool = False, ignore_if_not_exists: bool = False
    ) -> None:
        """Drop a database; `cascade` drops its tables first, otherwise it must be empty."""
        request = m.DropDatabaseRequest(
            database_name=name, cascade=cascade, ignore_if_not_exists=ignore_if_not_exists
        )
        await self._change(ApiKey.DROP_DATABASE, request)

    async def list_databases(self) -> list[str]:
        """List the names of all databases."""
        response = await self._ask(ApiKey.LIST_DATABASES, m.ListDatabasesRequest())
        return list(response.database_name)

    async def database_exists(self, name: str) -> bool:
        """Whether the database exists."""
        request = m.DatabaseExistsRequest(database_name=name)
        return bool((await self._ask(ApiKey.DATABASE_EXISTS, request)).exists)

    async def database_info(self, name: str) -> DatabaseInfo:
        """Return comment, properties and times of a database; raises `DatabaseNotExistError`."""
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
        """Set or remove (`reset`) custom properties, or change the comment."""
        request = m.AlterDatabaseRequest(
            database_name=name,
            ignore_if_not_exists=ignore_if_not_exists,
            config_changes=config_changes(set, reset),
            comment=comment,
        )
        await self._change(ApiKey.ALTER_DATABASE, request)

    # -- tables --------------------------------------------------------------------------------

    async def create_table(
        self,
        path: Path,
        schema: TableDescriptor | Schema | str | Any,
        *,
        primary_key: str | Sequence[str] | None = (),
        partition_keys: str | Sequence[str] | None = (),
        bucket_keys: str | Sequence[str] | None = (),
        bucket_count: int | None = None,
        comment: str | None = None,
        properties: Mapping[str, str] | None = None,
        custom_properties: Mapping[str, str] | None = None,
        ignore_if_exists: bool = False,
    ) -> str | None:
        """Create a table. Returns why its lake table could not be created; None if it is there, or
        the table is to have none.

        `schema` is a column list such as `"id BIGINT NOT NULL, name STRING"`, a `Schema`, or the
        schema of another library: pyarrow, polars, a polars or pandas `DataFrame` (whose rows are
        not written), or any object that exports an Arrow schema. It may also be a whole
        `TableDescriptor`, which replaces all arguments up to `custom_properties`.

        A table with a `primary_key` takes upserts and deletes, one without is an append-only log.
        Keys are names of columns; a single one needs no list. `properties` are table options
        (`docs/configuration.md`); `custom_properties` are stored and not interpreted.

        >>> await admin.create_table(  # doctest: +SKIP
        ...     "fluss.orders", "id BIGINT NOT NULL, amount DOUBLE", primary_key=["id"]
        ... )
        >>> await admin.create_table(  # doctest: +SKIP
        ...     "fluss.events", polars_frame.schema, bucket_keys="id"
        ... )
        """
        if isinstance(schema, TableDescriptor):
            descriptor = schema
        else:
            descriptor = TableDescriptor(
                schema=Schema.of(schema, primary_key=primary_key),
                comment=comment,
                partition_keys=names_of(partition_keys),
                bucket_keys=names_of(bucket_keys),
                bucket_count=bucket_count,
                properties=dict(properties or {}),
                custom_properties=dict(custom_properties or {}),
            )
        request = m.CreateTableRequest(
            table_path=path_to_proto(as_path(path)),
            table_json=descriptor.to_json(),
            ignore_if_exists=ignore_if_exists,
        )
        answer = await self._change(ApiKey.CREATE_TABLE, request)
        return _lake_table_missing(answer)

    async def drop_table(self, path: Path, *, ignore_if_not_exists: bool = False) -> None:
        """Drop a table with its data; raises `TableNotExistError` unless `ignore_if_not_exists`."""
        name = as_path(path)
        request = m.DropTableRequest(
            table_path=path_to_proto(name), ignore_if_not_exists=ignore_if_not_exists
        )
        await self._change(ApiKey.DROP_TABLE, request)
        self._connection.metadata.forget_table(name)

    async def list_tables(self, database: str) -> list[str]:
        """List the names of the tables of a database."""
        request = m.ListTablesRequest(database_name=database)
        return list((await self._ask(ApiKey.LIST_TABLES, request)).table_name)

    async def table_exists(self, path: Path) -> bool:
        """Whether the table exists."""
        request = m.TableExistsRequest(table_path=path_to_proto(as_path(path)))
        return bool((await self._ask(ApiKey.TABLE_EXISTS, request)).exists)

    async def table_info(self, path: Path) -> TableInfo:
        """Return ids, schema, keys, bucket count, properties and times of a table."""
        return await catalog.table_info(self._connection, as_path(path))

    async def table_schema(self, path: Path, schema_id: int | None = None) -> Schema:
        """Return the current schema of a table, or the one that had `schema_id`."""
        return await catalog.table_schema(self._connection, as_path(path), schema_id)

    async def alter_table(
        self,
        path: Path,
        *,
        set: Mapping[str, str] | None = None,
        reset: Iterable[str] = (),
        add_columns: Sequence[Column] | str = (),
        ignore_if_not_exists: bool = False,
    ) -> str | None:
        """Set properties, `reset` properties to their defaults, or append nullable columns.

        Returns why the lake table could not follow; None if it did, or the table is to have none.

        `add_columns` is a column list such as `"note STRING, weight DOUBLE"`, or `Column`s.
        """
        columns = Schema.of(add_columns).columns if isinstance(add_columns, str) else add_columns
        request = m.AlterTableRequest(
            table_path=path_to_proto(as_path(path)),
            ignore_if_not_exists=ignore_if_not_exists,
            config_changes=config_changes(set, reset),
            add_columns=[_add_column(column) for column in columns],
        )
        return _lake_table_missing(await self._change(ApiKey.ALTER_TABLE, request))

    # -- partitions ----------------------------------------------------------------------------

    async def create_partition(
        self, path: Path, partition: Partition, *, ignore_if_exists: bool = False
    ) -> None:
        """Create a partition, given by its name or its values.

        >>> await admin.create_partition("fluss.events", {"day": "2024-01-15"})  # doctest: +SKIP
        """
        request = m.CreatePartitionRequest(
            table_path=path_to_proto(as_path(path)),
            partition_spec=spec_to_proto(await self._spec(path, partition)),
            ignore_if_not_exists=ignore_if_exists,  # the protocol has this name for the flag
        )
        await self._change(ApiKey.CREATE_PARTITION, request)

    async def drop_partition(
        self, path: Path, partition: Partition, *, ignore_if_not_exists: bool = False
    ) -> None:
        """Drop a partition with its data."""
        name = as_path(path)
        spec = await self._spec(path, partition)
        request = m.DropPartitionRequest(
            table_path=path_to_proto(name),
            partition_spec=spec_to_proto(spec),
            ignore_if_not_exists=ignore_if_not_exists,
        )
        await self._change(ApiKey.DROP_PARTITION, request)
        info = self._connection.metadata.tables.get(name)
        if info is not None:
            dropped = partition_name(info.partition_keys, spec)
            self._connection.metadata.forget_partition(info.table_id, dropped)

    async def list_partitions(
        self, path: Path, partial: Mapping[str, str] | None = None
    ) -> list[PartitionInfo]:
        """List the partitions of a table; with `partial` only those that have these values."""
        return await catalog.list_partitions(self._connection, as_path(path), partial)

    async def _spec(self, path: Path, partition: Partition) -> Mapping[str, str]:
        if not isinstance(partition, str):
            return partition
        info = await self._connection.table_info(as_path(path))
        return spec_of(info.partition_keys, partition)

    # -- offsets and servers -------------------------------------------------------------------

    async def list_offsets(
        self,
        path: Path,
        at: Position = "latest",
        *,
        partition: Partition | None = None,
        buckets: Iterable[int] | None = None,
    ) -> dict[int, int]:
        """Return an offset per bucket: at `"earliest"`, `"unbroken"`, `"latest"`, or at a time.

        `"latest"` is the offset of the next record; `"unbroken"` the first offset from which on no
        record was lost with a disk, mostly the same as `"earliest"`. A time is a datetime (UTC
        unless it has a zone) or epoch milliseconds; its offset is that of the first record of that
        time or later. A partitioned table needs a `partition`.

        >>> await admin.list_offsets("fluss.events", "latest")  # doctest: +SKIP
        {0: 17, 1: 0}
        """
        info = await self._connection.table_info(as_path(path), refresh=True)
        places = await places_of(self._connection, info, [partition_name_of(info, partition)])
        if buckets is not None:
            numbers = {*buckets}
            places = [place for place in places if place.bucket.bucket_id in numbers]
        by_bucket = await offsets.list_offsets(self._connection, info, places, at)
        return {bucket.bucket_id: offset for bucket, offset in sorted(by_bucket.items())}

    async def list_all_offsets(self, path: Path, at: Position = "latest") -> dict[TableBucket, int]:
        """Return an offset per bucket of every partition; `at` as for `list_offsets`.

        Partitions that are dropped meanwhile are left out.
        """
        return await offsets.list_all_offsets(self._connection, as_path(path), at)

    async def lake_snapshot(
        self, path: Path, snapshot_id: int | None = None, *, readable: bool = False
    ) -> LakeSnapshot | None:
        """Return the newest lake snapshot of a table, or one by its id; None if there is none.

        `readable` asks for the newest snapshot whose rows readers of the lake may rely on.
        """
        path = as_path(path)
        return await catalog.lake_snapshot(self._connection, path, snapshot_id, readable=readable)

    async def no_lake_snapshot(self, path: Path) -> str | None:
        """Return why a table has no lake snapshot, in the coordinator's words; None if it has."""
        return await catalog.no_lake_snapshot(self._connection, as_path(path))

    # -- key-value snapshots -------------------------------------------------------------------

    async def latest_kv_snapshots(
        self, path: Path, partition: Partition | None = None
    ) -> list[KvSnapshotInfo]:
        """Return the newest key-value snapshot of each bucket that has one."""
        return await snapshots.latest_kv_snapshots(self._connection, as_path(path), partition)

    async def list_kv_snapshots(
        self, path: Path, partition: Partition | None = None
    ) -> list[KvSnapshotInfo]:
        """List all key-value snapshots that are kept, by bucket and number."""
        return await snapshots.list_kv_snapshots(self._connection, as_path(path), partition)

    async def take_kv_snapshots(
        self, path: Path, partition: Partition | None = None
    ) -> list[KvSnapshotInfo]:
        """Take key-value snapshots now, wait for them, and return the newest of each bucket.

        A bucket that did not change since its last snapshot gets no new one.
        """
        return await snapshots.take_kv_snapshots(self._connection, as_path(path), partition)

    async def kv_snapshot_metadata(
        self, bucket: TableBucket, snapshot_id: int
    ) -> KvSnapshotMetadata:
        """Return the files of a key-value snapshot.

        Raises `KvSnapshotNotExistError` if the snapshot is no longer kept.
        """
        return await snapshots.kv_snapshot_metadata(self._connection, bucket, snapshot_id)

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
        """Lease the latest key-value snapshots of tables, so that they are kept while you read.

        The lease is renewed in the background and dropped at the end of its block. It covers all
        partitions unless `partition` names one, and all buckets unless `buckets` has their
        numbers. To lease single buckets give `TableBucket`s and no tables.

        `resume=True` takes over the snapshots of the lease `lease_id`, which an earlier process
        left behind. If that lease has expired, `if_lost="latest"` leases the latest snapshots
        instead of raising `KvSnapshotLeaseNotFoundError`.

        >>> async with await admin.kv_snapshot_lease("fluss.orders") as lease:  # doctest: +SKIP
        ...     print(lease.snapshots)
        """
        return await open_lease(
            self._connection,
            tables,
            partition=partition,
            buckets=buckets,
            duration=duration,
            lease_id=lease_id,
            resume=resume,
            if_lost=if_lost,
        )

    async def kv_snapshot_leases(self, lease_id: str | None = None) -> list[KvSnapshotLeaseInfo]:
        """List all leases of key-value snapshots, or only `lease_id`, then with its snapshots."""
        request = m.ListKvSnapshotLeasesRequest(lease_id=lease_id)
        return leases_of(await self._ask(ApiKey.LIST_KV_SNAPSHOT_LEASES, request))

    async def kv_snapshot_lease_usage(self) -> KvSnapshotLeaseUsages:
        """Count the bytes that only leases keep, by table, owner and lease.

        Files of the snapshots that are retained anyway are not counted, and shared files once.
        """
        request = m.GetKvSnapshotLeaseUsageRequest()
        answers: list[m.GetKvSnapshotLeaseUsageResponse] = []
        while True:
            answers.append(await self._ask(ApiKey.GET_KV_SNAPSHOT_LEASE_USAGE, request))
            if not answers[-1].HasField("next"):
                return usages_of(answers)
            request.after = answers[-1].next

    async def drop_kv_snapshot_lease(self, lease_id: str) -> None:
        """End a lease, even if somebody uses it. An unknown lease is no error."""
        request = m.DropKvSnapshotLeaseRequest(lease_id=lease_id)
        await self._ask(ApiKey.DROP_KV_SNAPSHOT_LEASE, request)

    async def list_kv_scans(self, path: Path | None = None) -> list[KvScanInfo]:
        """List the running scans of all primary-key tables, or of one, with their clients."""
        table_id = None
        if path is not None:
            table_id = (await self._connection.table_info(as_path(path))).table_id
        return await list_kv_scans(self._connection, table_id)

    async def end_kv_scans(self, scan_ids: str | Iterable[str]) -> list[str]:
        """End scans, whose clients get an error; returns the ids of the scans that existed."""
        ids = [scan_ids] if isinstance(scan_ids, str) else scan_ids
        return await end_kv_scans(self._connection, ids)

    async def list_producers(self, path: Path | None = None) -> list[ProducerInfo]:
        """List the producers of a table with their offsets, or all producers without offsets."""
        table_id = None
        if path is not None:
            table_id = (await self._connection.table_info(as_path(path))).table_id
        request = m.ListProducersRequest(table_id=table_id)
        return producers_of(await self._ask(ApiKey.LIST_PRODUCERS, request))

    async def drop_producer(self, path: Path, producer_id: str) -> None:
        """End a producer, even if somebody writes as it. Its rows stay, its columns are free."""
        info = await self._connection.table_info(as_path(path))
        request = m.ReleaseProducerRequest(table_id=info.table_id, producer_id=producer_id)
        await self._change(ApiKey.RELEASE_PRODUCER, request)


def _lake_table_missing(answer: m.CreateTableResponse | m.AlterTableResponse) -> str | None:
    return answer.lake_table_missing if answer.HasField("lake_table_missing") else None


def _add_column(column: Column) -> m.PbAddColumn:
    message = m.PbAddColumn(
        column_name=column.name,
        data_type_json=dump_object(column.data_type.to_json()),
        comment=column.comment,
        column_position_type=_LAST,
    )
    if column.agg_function is not None:
        message.agg_function_type = column.agg_function.type
        for key, value in column.agg_function.parameters:
            message.agg_function_params.add(key=key, value=value)
    return message
