"""The cluster image as protobuf, both ways.

Clients get tables, partitions and servers in GET_METADATA. Tablet servers get the same messages in
UPDATE_METADATA, with extension fields (numbers from 1000) for databases, old schemas and drops.
Pure functions; `coordinator/tablets.py` sends the messages.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from zufluss.cluster.image import (
    BucketState,
    Cleared,
    ClusterNode,
    DatabaseEntry,
    DatabaseGone,
    DatabasePut,
    ImageChange,
    NodesPut,
    PartitionEntry,
    PartitionGone,
    PartitionPut,
    TableEntry,
    TableGone,
    TablePut,
    TagsPut,
)
from zufluss.config.values import Endpoint, parse_endpoints
from zufluss.model.rebalance import ServerTag
from zufluss.model.schema import Schema
from zufluss.model.table import (
    DatabaseDescriptor,
    TableDescriptor,
    TableInfo,
)
from zufluss.wire import messages as m
from zufluss.wire.tables import path_from_proto, path_to_proto, spec_from_proto, spec_to_proto


def node_to_proto(node: ClusterNode, endpoint: Endpoint) -> m.PbServerNode:
    """A server as a client on one listener sees it."""
    return m.PbServerNode(
        node_id=node.node_id, host=endpoint.host, port=endpoint.port, rack=node.rack
    )


def listeners_to_text(endpoints: Iterable[Endpoint]) -> str:
    """Endpoints as `NAME://host:port,…`."""
    return ",".join(map(str, endpoints))


def _server_node(node: ClusterNode) -> m.PbServerNode:
    message = node_to_proto(node, node.endpoints[0])
    message.listeners = listeners_to_text(node.endpoints)
    return message


def node_from_proto(message: m.PbServerNode) -> ClusterNode:
    """A server with all its listeners, as the coordinator describes it to tablet servers."""
    rack = message.rack if message.HasField("rack") else None
    return ClusterNode(message.node_id, parse_endpoints(message.listeners), rack)


def _bucket_states(states: Sequence[BucketState]) -> list[m.PbBucketMetadata]:
    return [
        m.PbBucketMetadata(
            bucket_id=i,
            leader_id=state.leader,
            replica_id=state.replicas,
            leader_epoch=state.leader_epoch,
            bucket_epoch=state.bucket_epoch,
            isr=state.isr,
        )
        for i, state in enumerate(states)
    ]


def _bucket_states_from(messages: Iterable[m.PbBucketMetadata]) -> tuple[BucketState, ...]:
    return tuple(
        BucketState(
            replicas=tuple(message.replica_id),
            leader=message.leader_id,
            leader_epoch=message.leader_epoch,
            isr=tuple(message.isr),
            bucket_epoch=message.bucket_epoch,
        )
        for message in sorted(messages, key=lambda message: message.bucket_id)
    )


def table_to_proto(entry: TableEntry) -> m.PbTableMetadata:
    """A table as clients see it."""
    info = entry.info
    return m.PbTableMetadata(
        table_path=path_to_proto(info.path),
        table_id=info.table_id,
        schema_id=info.schema_id,
        table_json=entry.table_json,
        bucket_metadata=_bucket_states(entry.buckets),
        created_time=info.created_time,
        modified_time=info.modified_time,
    )


def _table_from(message: m.PbTableMetadata) -> TableEntry:
    info = TableInfo(
        path=path_from_proto(message.table_path),
        table_id=message.table_id,
        schema_id=message.schema_id,
        descriptor=TableDescriptor.from_json(message.table_json),
        created_time=message.created_time,
        modified_time=message.modified_time,
    )
    schemas = {s.schema_id: Schema.from_json(s.schema_json) for s in message.schemas}
    buckets = _bucket_states_from(message.bucket_metadata)
    return TableEntry(info, schemas, buckets, _remote_location(message))


def partition_to_proto(entry: PartitionEntry) -> m.PbPartitionMetadata:
    """A partition as clients see it."""
    return m.PbPartitionMetadata(
        table_id=entry.table_id,
        partition_name=entry.name,
        partition_id=entry.partition_id,
        bucket_metadata=_bucket_states(entry.buckets),
    )


def _partition_from(message: m.PbPartitionMetadata) -> PartitionEntry:
    return PartitionEntry(
        partition_id=message.partition_id,
        table_id=message.table_id,
        name=message.partition_name,
        spec=spec_from_proto(message.partition_spec),
        created_time=message.created_time,
        buckets=_bucket_states_from(message.bucket_metadata),
        remote_location=_remote_location(message),
    )


def _remote_location(message: m.PbTableMetadata | m.PbPartitionMetadata) -> int | None:
    return message.remote_location if message.HasField("remote_location") else None


def update_request(
    changes: Sequence[ImageChange], coordinator_epoch: int, server_epoch: int
) -> m.UpdateMetadataRequest:
    """Encode changes of the image as UPDATE_METADATA; `Cleared` may only stand first."""
    request = m.UpdateMetadataRequest(
        coordinator_epoch=coordinator_epoch, server_epoch=server_epoch
    )
    for at, change in enumerate(changes):
        match change:
            case Cleared():
                assert at == 0, "Cleared stands first, so that nothing before it is lost"
                request.full = True
            case NodesPut():
                _add_nodes(request, change)
            case TagsPut(tags):
                request.tags = True
                request.server_tags.extend(_tags_to_proto(tags))
            case DatabasePut(entry):
                request.database_metadata.append(_database_to_proto(entry))
            case TablePut(entry):
                request.table_metadata.append(_table_with_schemas(entry))
            case PartitionPut(entry):
                request.partition_metadata.append(_partition_with_spec(entry))
            case DatabaseGone(name):
                request.dropped_databases.append(name)
            case TableGone(table_id):
                request.dropped_tables.append(table_id)
            case PartitionGone(partition_id):
                request.dropped_partitions.append(partition_id)
    return request


def changes_of(request: m.UpdateMetadataRequest) -> list[ImageChange]:
    """Decode the changes of an UPDATE_METADATA: drops first, so that names can be used again."""
    changes: list[ImageChange] = [Cleared()] if request.full else []
    if request.nodes:
        coordinator = request.coordinator_server if request.HasField("coordinator_server") else None
        changes.append(
            NodesPut(
                None if coordinator is None else node_from_proto(coordinator),
                tuple(map(node_from_proto, request.tablet_servers)),
            )
        )
    if request.tags:
        tags = {each.server_id: ServerTag(each.server_tag) for each in request.server_tags}
        changes.append(TagsPut(tags))
    changes += map(PartitionGone, request.dropped_partitions)
    changes += map(TableGone, request.dropped_tables)
    changes += map(DatabaseGone, request.dropped_databases)
    changes += [DatabasePut(_database_from(each)) for each in request.database_metadata]
    changes += [TablePut(_table_from(each)) for each in request.table_metadata]
    changes += [PartitionPut(_partition_from(each)) for each in request.partition_metadata]
    return changes


def _add_nodes(request: m.UpdateMetadataRequest, change: NodesPut) -> None:
    request.nodes = True
    if change.coordinator is not None:
        request.coordinator_server.CopyFrom(_server_node(change.coordinator))
    request.tablet_servers.extend(map(_server_node, change.tablets))


def _tags_to_proto(tags: Mapping[int, ServerTag]) -> list[m.PbServerTag]:
    return [m.PbServerTag(server_id=i, server_tag=tag) for i, tag in sorted(tags.items())]


def _table_with_schemas(entry: TableEntry) -> m.PbTableMetadata:
    message = table_to_proto(entry)
    for schema_id, schema in entry.schemas.items():
        message.schemas.add(schema_id=schema_id, schema_json=schema.to_json_bytes())
    if entry.remote_location is not None:
        message.remote_location = entry.remote_location
    return message


def _partition_with_spec(entry: PartitionEntry) -> m.PbPartitionMetadata:
    message = partition_to_proto(entry)
    message.created_time = entry.created_time
    message.partition_spec.CopyFrom(spec_to_proto(entry.spec))
    if entry.remote_location is not None:
        message.remote_location = entry.remote_location
    return message


def _database_to_proto(entry: DatabaseEntry) -> m.PbDatabaseMetadata:
    return m.PbDatabaseMetadata(
        database_name=entry.name,
        database_json=entry.descriptor.to_json(),
        created_time=entry.created_time,
        modified_time=entry.modified_time,
    )


def _database_from(message: m.PbDatabaseMetadata) -> DatabaseEntry:
    descriptor = DatabaseDescriptor.from_json(message.database_json)
    return DatabaseEntry(
        message.database_name, descriptor, message.created_time, message.modified_time
    )
