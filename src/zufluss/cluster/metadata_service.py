"""Questions about the catalog, answered from the image by either role.

The handlers do no I/O and change nothing. The coordinator answers from its own image, a tablet
server from its copy. Error codes are Fluss's, except where `docs/compatibility.md` says why not.

The properties of tables with a lake format include the cluster's own `datalake.<format>.*`, without
secrets (`config/lake.py`). These are not in the catalog: a change of the configuration changes them
for all tables at once. `remote_data_dir` is not stored either: the catalog has the id of a
location, and clients get its present address.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import TYPE_CHECKING

from zufluss.cluster import codec
from zufluss.cluster.image import ClusterImage, ClusterNode, PartitionEntry, TableEntry
from zufluss.cluster.missing_partitions import MissingPartitions
from zufluss.cluster.refusal import check_refusal
from zufluss.config import options
from zufluss.config.lake import handed_out
from zufluss.config.load import Configuration
from zufluss.config.table_options import TABLE_DATALAKE_FORMAT
from zufluss.errors import PartitionNotExistError
from zufluss.model.partition import check_partial_spec
from zufluss.pacing import paced
from zufluss.wire import messages as m
from zufluss.wire.tables import (
    path_from_proto,
    physical_path_from_proto,
    spec_from_proto,
    spec_to_proto,
)

if TYPE_CHECKING:
    from zufluss.net.services import RequestContext


class MetadataService:
    """Handlers of the read-only metadata APIs."""

    def __init__(
        self, image: ClusterImage, conf: Configuration, remote_uri: Callable[[int | None], str]
    ) -> None:
        """`remote_uri` is the address of a remote location, of the first one for None."""
        self._image = image
        self._conf = conf
        self._missing = MissingPartitions(time.monotonic)
        self._remote_uri = remote_uri

    async def list_databases(
        self, request: m.ListDatabasesRequest, ctx: RequestContext
    ) -> m.ListDatabasesResponse:
        """LIST_DATABASES (1003): names, or summaries instead of them."""
        entries = sorted(self._image.databases.values(), key=lambda entry: entry.name)
        if not request.include_summary:
            return m.ListDatabasesResponse(database_name=[entry.name for entry in entries])
        summaries = [
            m.PbDatabaseSummary(
                database_name=entry.name,
                created_time=entry.created_time,
                table_count=len(self._image.table_names(entry.name)),
            )
            for entry in entries
        ]
        return m.ListDatabasesResponse(database_summary=summaries)

    async def database_exists(
        self, request: m.DatabaseExistsRequest, ctx: RequestContext
    ) -> m.DatabaseExistsResponse:
        """DATABASE_EXISTS (1004)."""
        return m.DatabaseExistsResponse(exists=request.database_name in self._image.databases)

    async def get_database_info(
        self, request: m.GetDatabaseInfoRequest, ctx: RequestContext
    ) -> m.GetDatabaseInfoResponse:
        """GET_DATABASE_INFO (1035)."""
        entry = self._image.database(request.database_name)
        return m.GetDatabaseInfoResponse(
            database_json=entry.descriptor.to_json(),
            created_time=entry.created_time,
            modified_time=entry.modified_time,
        )

    async def list_tables(
        self, request: m.ListTablesRequest, ctx: RequestContext
    ) -> m.ListTablesResponse:
        """LIST_TABLES (1008)."""
        database = self._image.database(request.database_name)
        return m.ListTablesResponse(table_name=self._image.table_names(database.name))

    async def table_exists(
        self, request: m.TableExistsRequest, ctx: RequestContext
    ) -> m.TableExistsResponse:
        """TABLE_EXISTS (1010)."""
        path = path_from_proto(request.table_path)
        return m.TableExistsResponse(exists=self._image.find_table(path) is not None)

    async def get_table_info(
        self, request: m.GetTableInfoRequest, ctx: RequestContext
    ) -> m.GetTableInfoResponse:
        """GET_TABLE_INFO (1007)."""
        entry = self._image.table(path_from_proto(request.table_path))
        return m.GetTableInfoResponse(
            table_id=entry.info.table_id,
            schema_id=entry.info.schema_id,
            table_json=self._table_json(entry),
            created_time=entry.info.created_time,
            modified_time=entry.info.modified_time,
            remote_data_dir=self._remote_uri(entry.remote_location),
        )

    async def get_table_schema(
        self, request: m.GetTableSchemaRequest, ctx: RequestContext
    ) -> m.GetTableSchemaResponse:
        """GET_TABLE_SCHEMA (1011): one by id, or the current one."""
        requested = request.schema_id if request.HasField("schema_id") else None
        check_refusal(requested, self._remote_uri)
        path = path_from_proto(request.table_path)
        schema_id, schema = self._image.schema(path, requested)
        return m.GetTableSchemaResponse(schema_id=schema_id, schema_json=schema.to_json_bytes())

    async def list_partition_infos(
        self, request: m.ListPartitionInfosRequest, ctx: RequestContext
    ) -> m.ListPartitionInfosResponse:
        """LIST_PARTITION_INFOS (1009): all, or those with the given values."""
        path = path_from_proto(request.table_path)
        info = self._image.partitioned_table(path).info
        partial = spec_from_proto(request.partial_partition_spec)
        check_partial_spec(info, partial)
        infos = [
            m.PbPartitionInfo(
                partition_id=entry.partition_id,
                partition_spec=spec_to_proto(entry.spec),
                remote_data_dir=self._remote_uri(entry.remote_location),
            )
            async for name, entry in paced(sorted(self._image.partitions(info.table_id).items()))
            if partial.items() <= entry.spec.items()
        ]
        return m.ListPartitionInfosResponse(partitions_info=infos)

    async def get_metadata(
        self, request: m.MetadataRequest, ctx: RequestContext
    ) -> m.MetadataResponse:
        """GET_METADATA (1012): servers on the caller's own listener, tables, partitions.

        With a shared log the servers have every leader, also one that has left and will be replaced
        in a moment: pyfluss 1.0.0 keeps an old leader for ever once it was told a leader that is
        not among the servers.
        """
        image, listener = self._image, self._listener(request, ctx)
        paths = {path_from_proto(path): None async for path in paced(request.table_path)}
        tables = [image.table(path) for path in paths]
        partitions = await self._partitions(request, ctx.peer)
        response = m.MetadataResponse(
            tablet_servers=_visible(self._servers(), listener),
            table_metadata=[self._table(table) async for table in paced(tables)],
            partition_metadata=[codec.partition_to_proto(p) async for p in paced(partitions)],
        )
        for server in response.tablet_servers:
            if (tag := image.tags.get(server.node_id)) is not None:
                server.server_tag = tag
        for node in _visible(filter(None, [image.coordinator]), listener):
            response.coordinator_server.CopyFrom(node)
        return response

    def _listener(self, request: m.MetadataRequest, ctx: RequestContext) -> str:
        """The listener of the client; a standby coordinator passes requests of clients on."""
        internal = self._conf.get(options.INTERNAL_LISTENER_NAME)
        if request.HasField("listener") and ctx.listener == internal:
            return request.listener
        return ctx.listener

    def _servers(self) -> list[ClusterNode]:
        image = self._image
        servers = list(image.tablets.values())
        if self._conf.get(options.ZUFLUSS_LOG_DURABILITY) == "remote":
            servers += [node for i, node in image.absent.items() if image.leaders[i] > 0]
        return servers

    def _table(self, entry: TableEntry) -> m.PbTableMetadata:
        message = codec.table_to_proto(entry)
        message.table_json = self._table_json(entry)
        message.remote_data_dir = self._remote_uri(entry.remote_location)
        return message

    def _table_json(self, entry: TableEntry) -> bytes:
        """The descriptor as clients see it, with the properties of the lake."""
        format = entry.info.property(TABLE_DATALAKE_FORMAT)
        lake = {} if format is None else handed_out(format, self._conf.lake_properties(format))
        if not lake:
            return entry.table_json
        descriptor = entry.info.descriptor
        return replace(descriptor, properties={**descriptor.properties, **lake}).to_json()

    async def _partitions(self, request: m.MetadataRequest, peer: str) -> Iterable[PartitionEntry]:
        """The partitions that a request names, each once."""
        partitions: dict[int, PartitionEntry] = {}
        async for each in paced(request.partitions_path):
            path = physical_path_from_proto(each)
            try:
                entry = self._image.partition(path.path, path.partition or "")
            except PartitionNotExistError:
                await asyncio.sleep(self._missing.hold_seconds(peer, path))
                raise
            partitions[entry.partition_id] = entry
        async for partition_id in paced(request.partitions_id):
            by_id = self._image.partition_by_id(partition_id)
            if by_id is None:
                await asyncio.sleep(self._missing.hold_seconds(peer, partition_id))
                raise PartitionNotExistError(f"The partition id '{partition_id}' does not exist.")
            partitions[partition_id] = by_id
        return partitions.values()


def _visible(nodes: Iterable[ClusterNode], listener: str) -> list[m.PbServerNode]:
    """The servers that can be reached on a listener, by id."""
    return [
        codec.node_to_proto(node, endpoint)
        for node in sorted(nodes, key=lambda node: node.node_id)
        if (endpoint := node.endpoint(listener)) is not None
    ]
