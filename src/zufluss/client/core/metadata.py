"""The client's knowledge of the cluster: servers, tables, partitions, leaders of buckets.

`Metadata` is a cache without I/O. An answer to GET_METADATA replaces the servers and is merged into
tables and partitions; the `forget_…` methods drop entries that turned out stale. `core/cluster.py`
asks the cluster.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final, NamedTuple

from zufluss.model.rebalance import ServerTag
from zufluss.model.table import TableBucket, TableDescriptor, TableInfo, TablePath
from zufluss.wire import messages as m
from zufluss.wire.tables import path_from_proto

PROBLEM: Final = 2
"""The severity of a finding about something that does not work."""


class ServerFinding(NamedTuple):
    """One observation of a server about itself, or of the client about a server."""

    server: str
    """The server's address, host:port."""
    severity: int
    """0: fine, 1: worth a look, 2: something does not work."""
    subject: str
    """The bucket, the resource or the server that it is about."""
    text: str
    """The state of the subject, and what to do if it is bad."""


@dataclass(frozen=True, slots=True)
class ServerNode:
    """A server of the cluster, with the address of the listener that this client uses."""

    id: int
    """The server's id, unique among the servers of its role."""
    host: str
    """The host to connect to."""
    port: int
    """The port to connect to."""
    role: str
    """`coordinator` or `tablet`."""
    tag: ServerTag | None = None
    """The tag of a tablet server, which keeps buckets away; Fluss does not tell it."""

    @property
    def address(self) -> tuple[str, int]:
        """Host and port."""
        return self.host, self.port

    def __str__(self) -> str:
        return f"{self.role} {self.id} at {self.host}:{self.port}"


@dataclass(frozen=True, slots=True)
class PartitionMetadata:
    """A partition of a table."""

    table_id: int
    """The table's id."""
    name: str
    """The partition's values joined with `$`."""
    partition_id: int
    """The partition's id."""


class Metadata:
    """The servers, tables, partitions and leaders that the client knows."""

    def __init__(self) -> None:
        self.coordinator: ServerNode | None = None
        self.tablets: dict[int, ServerNode] = {}
        self.tables: dict[TablePath, TableInfo] = {}
        self.partitions: dict[tuple[int, str], PartitionMetadata] = {}
        self._leaders: dict[TableBucket, int] = {}

    def merge(self, response: m.MetadataResponse) -> None:
        """Merge an answer to GET_METADATA."""
        if response.HasField("coordinator_server"):
            self.coordinator = _node(response.coordinator_server, "coordinator")
        self.tablets = {n.node_id: _node(n, "tablet") for n in response.tablet_servers}
        for table in response.table_metadata:
            info = table_info(table)
            self.tables[info.path] = info
            self._set_leaders(info.table_id, None, table.bucket_metadata)
        for part in response.partition_metadata:
            partition = PartitionMetadata(part.table_id, part.partition_name, part.partition_id)
            self.partitions[part.table_id, part.partition_name] = partition
            self._set_leaders(part.table_id, part.partition_id, part.bucket_metadata)

    def leader(self, bucket: TableBucket) -> ServerNode | None:
        """The server that leads a bucket; None if no known server does."""
        return self.tablets.get(self._leaders.get(bucket, -1))

    def name_of(self, bucket: TableBucket) -> str:
        """The bucket for messages: `fluss.orders, bucket 2`; ids where a name is unknown."""
        path = next((p for p, t in self.tables.items() if t.table_id == bucket.table_id), None)
        names = (p.name for p in self.partitions.values() if p.partition_id == bucket.partition_id)
        return bucket.named(path, next(names, None))

    def forget_leader(self, bucket: TableBucket) -> None:
        """Forget the leader of a bucket, because it leads the bucket no longer."""
        self._leaders.pop(bucket, None)

    def forget_table(self, path: TablePath) -> None:
        """Forget a table with its partitions; it may have been dropped or created again."""
        info = self.tables.pop(path, None)
        if info is None:
            return
        for key in [k for k in self.partitions if k[0] == info.table_id]:
            del self.partitions[key]
        for bucket in [b for b in self._leaders if b.table_id == info.table_id]:
            del self._leaders[bucket]

    def forget_partition(self, table_id: int, name: str) -> None:
        """Forget a partition; it may have been dropped or created again."""
        self.partitions.pop((table_id, name), None)

    def _set_leaders(
        self, table_id: int, partition_id: int | None, buckets: Iterable[m.PbBucketMetadata]
    ) -> None:
        for bucket in buckets:
            key = TableBucket(table_id, partition_id, bucket.bucket_id)
            if bucket.HasField("leader_id") and bucket.leader_id >= 0:
                self._leaders[key] = bucket.leader_id
            else:
                self._leaders.pop(key, None)


def table_info(table: m.PbTableMetadata) -> TableInfo:
    """The table in a metadata answer."""
    return TableInfo(
        path_from_proto(table.table_path),
        table.table_id,
        table.schema_id,
        TableDescriptor.from_json(table.table_json),
        table.created_time,
        table.modified_time,
    )


def _node(node: m.PbServerNode, role: str) -> ServerNode:
    tag = ServerTag(node.server_tag) if node.HasField("server_tag") else None
    return ServerNode(node.node_id, node.host, node.port, role, tag)
