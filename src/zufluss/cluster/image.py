"""The cluster as it is now, in memory: databases, tables, partitions, servers, leaders.

Both roles keep one. The coordinator's is built from the metadata store at start and changed after
each commit; a tablet server's is built from what the coordinator sends. Requests for metadata are
answered from it without I/O.

The entries are immutable and replaced as a whole. The image changes in one way only, by
`apply(changes)`, on the event-loop thread. The coordinator sends the changes that it applies to its
own image to the tablet servers. Applying a change twice does nothing the second time, so a tablet
server that shares the image of the coordinator (one process, both roles) may apply the changes as
well. An entry that was taken from the image never changes; look it up again after an `await` if the
present matters.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field

from zufluss.config.values import Endpoint
from zufluss.errors import (
    DatabaseNotExistError,
    PartitionNotExistError,
    SchemaNotExistError,
    TableNotExistError,
    TableNotPartitionedError,
)
from zufluss.model.partition import plain
from zufluss.model.rebalance import ServerTag
from zufluss.model.schema import Schema
from zufluss.model.table import (
    DatabaseDescriptor,
    PhysicalTablePath,
    TableBucket,
    TableInfo,
    TablePath,
    unknown_table,
)


@dataclass(frozen=True, slots=True)
class ClusterNode:
    """A server and where clients reach it."""

    node_id: int
    """Its id: of the coordinator or of a tablet server."""
    endpoints: tuple[Endpoint, ...]
    """The advertised address of each of its listeners."""
    rack: str | None = None
    """Its rack, if it named one."""

    def endpoint(self, listener: str) -> Endpoint | None:
        """Its address on a listener, None when it has no such listener."""
        return next((e for e in self.endpoints if e.listener == listener), None)


@dataclass(frozen=True, slots=True)
class BucketState:
    """The replicas and the leader of a bucket."""

    replicas: tuple[int, ...]
    """Ids of the tablet servers that hold it, the preferred leader first."""
    leader: int
    """Id of the tablet server that leads it."""
    leader_epoch: int = 0
    """Grows with each change of the leader."""
    isr: tuple[int, ...] = ()
    """Replicas that have everything acknowledged."""
    bucket_epoch: int = 0
    """Grows with each change of this state."""
    wal: int | None = None
    """The server epoch of the session of the shared log that has what no segment of the bucket has;
    None where the disk of the leader has it. Only the coordinator knows it, and the leader from its
    order."""
    released: int | None = None
    """Set while the bucket is handed over: the number behind the entry with which that session
    released it. Nobody serves the bucket before a leader has adopted it. Only the coordinator knows
    it."""


@dataclass(frozen=True, slots=True)
class DatabaseEntry:
    """A database."""

    name: str
    """Its name."""
    descriptor: DatabaseDescriptor
    """Comment and properties."""
    created_time: int
    """When it was created, epoch milliseconds."""
    modified_time: int
    """When it was last altered, epoch milliseconds."""


@dataclass(frozen=True, slots=True)
class TableEntry:
    """A table with every schema it ever had."""

    info: TableInfo
    """The table as it is now."""
    schemas: Mapping[int, Schema]
    """Its schemas by id, from 1 to `info.schema_id`."""
    buckets: tuple[BucketState, ...] = ()
    """Its buckets by number; empty for a partitioned table."""
    remote_location: int | None = None
    """The id of the remote location of its metadata files; None in tables older than locations."""
    table_json: bytes = field(init=False, repr=False, compare=False)
    """The descriptor as JSON, encoded once."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "table_json", self.info.descriptor.to_json())

    @property
    def physical_path(self) -> PhysicalTablePath:
        """The path of its own buckets."""
        return PhysicalTablePath(*self.info.path)


@dataclass(frozen=True, slots=True)
class PartitionEntry:
    """A partition of a table."""

    partition_id: int
    """Its id, never used again."""
    table_id: int
    """The table it belongs to."""
    name: str
    """Its values joined with `$`, in the order of the partition keys."""
    spec: Mapping[str, str]
    """Its value of each partition key, in the order of the keys."""
    created_time: int
    """When it was created, epoch milliseconds."""
    buckets: tuple[BucketState, ...] = ()
    """Its buckets by number."""
    remote_location: int | None = None
    """The id of its remote location; None in partitions older than locations."""


Holder = TableEntry | PartitionEntry
"""What has buckets."""


@dataclass(frozen=True, slots=True)
class DatabasePut:
    """A database was created or altered."""

    entry: DatabaseEntry
    """The database as it is now."""


@dataclass(frozen=True, slots=True)
class DatabaseGone:
    """A database was dropped; its tables went before it."""

    name: str
    """Its name."""


@dataclass(frozen=True, slots=True)
class TablePut:
    """A table was created or altered."""

    entry: TableEntry
    """The table as it is now."""


@dataclass(frozen=True, slots=True)
class TableGone:
    """A table was dropped, with all its partitions."""

    table_id: int
    """Its id."""


@dataclass(frozen=True, slots=True)
class PartitionPut:
    """A partition was created, or its buckets changed hands."""

    entry: PartitionEntry
    """The partition as it is now."""


@dataclass(frozen=True, slots=True)
class PartitionGone:
    """A partition was dropped."""

    partition_id: int
    """Its id."""


@dataclass(frozen=True, slots=True)
class NodesPut:
    """The servers of the cluster changed."""

    coordinator: ClusterNode | None
    """The coordinator."""
    tablets: tuple[ClusterNode, ...]
    """The tablet servers that are alive."""


@dataclass(frozen=True, slots=True)
class TagsPut:
    """The tags of tablet servers changed."""

    tags: Mapping[int, ServerTag]
    """The tags that there are now, by server id."""


@dataclass(frozen=True, slots=True)
class Cleared:
    """Forget everything: the changes that follow are the whole image."""


ImageChange = (
    DatabasePut
    | DatabaseGone
    | TablePut
    | TableGone
    | PartitionPut
    | PartitionGone
    | NodesPut
    | TagsPut
    | Cleared
)


class ClusterImage:
    """Databases, tables, partitions and servers, found by name and by id."""

    def __init__(self) -> None:
        self.version = 0
        """Grows with each change."""
        self._clear()

    def _clear(self) -> None:
        self.databases: dict[str, DatabaseEntry] = {}
        self.coordinator: ClusterNode | None = None
        self.tablets: dict[int, ClusterNode] = {}
        self.absent: dict[int, ClusterNode] = {}
        """Tablet servers that have left, as they were known last."""
        self.tags: dict[int, ServerTag] = {}
        """Tags of tablet servers, also of those that are not there."""
        self.leaders: Counter[int] = Counter()
        """The number of buckets that each tablet server leads, whether it is there or not."""
        self._tables: dict[int, TableEntry] = {}
        self._table_ids: dict[str, dict[str, int]] = {}
        self._partitions: dict[int, PartitionEntry] = {}
        self._table_partitions: dict[int, dict[str, PartitionEntry]] = {}

    def __repr__(self) -> str:
        return (
            f"ClusterImage(databases={len(self.databases)}, tables={len(self._tables)}, "
            f"partitions={len(self._partitions)}, tablets={sorted(self.tablets)})"
        )

    # Looking things up

    def database(self, name: str) -> DatabaseEntry:
        """The database of a name; DatabaseNotExistError when there is none."""
        entry = self.databases.get(name)
        if entry is None:
            raise DatabaseNotExistError(f"Database {plain(name)} does not exist.")
        return entry

    def table_names(self, database: str) -> list[str]:
        """The names of a database's tables, sorted."""
        return sorted(self._table_ids.get(database, ()))

    def tables(self) -> Iterator[TableEntry]:
        """Every table."""
        return iter(tuple(self._tables.values()))

    def find_table(self, path: TablePath) -> TableEntry | None:
        """The table of a path, or None."""
        table_id = self._table_ids.get(path.database, {}).get(path.table)
        return None if table_id is None else self._tables[table_id]

    def table(self, path: TablePath) -> TableEntry:
        """The table of a path; TableNotExistError when there is none."""
        entry = self.find_table(path)
        if entry is None:
            raise TableNotExistError(f"Table '{path}' does not exist.")
        return entry

    def table_by_id(self, table_id: int) -> TableEntry | None:
        """The table of an id, or None."""
        return self._tables.get(table_id)

    def partitioned_table(self, path: TablePath) -> TableEntry:
        """The table of a path; TableNotPartitionedError when it has no partitions."""
        entry = self.table(path)
        if not entry.info.is_partitioned:
            raise TableNotPartitionedError(f"Table '{path}' is not a partitioned table.")
        return entry

    def schema(self, path: TablePath, schema_id: int | None) -> tuple[int, Schema]:
        """A schema of a table by id, or the current one; SchemaNotExistError for a wrong id."""
        entry = self.find_table(path)
        if entry is None:
            raise SchemaNotExistError(
                f"Schema for table {path} with schema id {schema_id or 0} does not exist. There is "
                "no such table"
            )
        requested = entry.info.schema_id if schema_id is None else schema_id
        schema = entry.schemas.get(requested)
        if schema is None:
            raise SchemaNotExistError(
                f"Schema for table {path} with schema id {requested} does not exist. The table has "
                f"the schemas 1 to {entry.info.schema_id}"
            )
        return requested, schema

    def partitions(self, table_id: int) -> Mapping[str, PartitionEntry]:
        """The partitions of a table by name."""
        return self._table_partitions.get(table_id, {})

    def partition(self, path: TablePath, name: str) -> PartitionEntry:
        """A partition by name; PartitionNotExistError also when the table has no partitions."""
        entry = self.partitions(self.table(path).info.table_id).get(name)
        if entry is None:
            raise PartitionNotExistError(
                f"Table partition '{path}(p={plain(name)})' does not exist."
            )
        return entry

    def partition_by_id(self, partition_id: int) -> PartitionEntry | None:
        """The partition of an id, or None."""
        return self._partitions.get(partition_id)

    def table_name(self, table_id: int) -> str:
        """A table for messages: its path, or its id if there is no such table."""
        entry = self._tables.get(table_id)
        return unknown_table(table_id) if entry is None else str(entry.info.path)

    def name_of(self, bucket: TableBucket) -> str:
        """The bucket for messages: `fluss.orders, bucket 2`; ids where a name is unknown."""
        table = self._tables.get(bucket.table_id)
        holder = self.holder(bucket)
        named = isinstance(holder, PartitionEntry) and holder.table_id == bucket.table_id
        return bucket.named(
            None if table is None else table.info.path,
            holder.name if isinstance(holder, PartitionEntry) and named else None,
        )

    def leader(self, bucket: TableBucket) -> tuple[int, int] | None:
        """Leader id and leader epoch of a bucket, None when there is no such bucket."""
        state = self.bucket_state(bucket)
        return None if state is None else (state.leader, state.leader_epoch)

    def bucket_state(self, bucket: TableBucket) -> BucketState | None:
        """The leader and the leader epoch of a bucket; None when there is no such bucket."""
        holder = self.holder(bucket)
        known = holder is not None and 0 <= bucket.bucket_id < len(holder.buckets)
        return holder.buckets[bucket.bucket_id] if holder is not None and known else None

    def untagged(self, nodes: Iterable[ClusterNode]) -> list[ClusterNode]:
        """Those of some tablet servers that may get leaders of buckets."""
        return [node for node in nodes if node.node_id not in self.tags]

    def holder(self, bucket: TableBucket) -> Holder | None:
        """The table or partition of a bucket, None when there is none."""
        if bucket.partition_id is None:
            return self._tables.get(bucket.table_id)
        return self._partitions.get(bucket.partition_id)

    def buckets(self) -> Iterator[tuple[PhysicalTablePath, TableBucket, BucketState]]:
        """Every bucket of the cluster with its path and state."""
        for table in self.tables():
            table_id = table.info.table_id
            for i, state in enumerate(table.buckets):
                yield table.physical_path, TableBucket(table_id, None, i), state
            for partition in tuple(self.partitions(table_id).values()):
                yield from partition_buckets(table, partition)

    # Changing

    def apply(self, changes: Iterable[ImageChange]) -> None:
        """Apply changes, one after the other."""
        self.version += 1
        for change in changes:
            self._apply(change)

    def snapshot(self) -> list[ImageChange]:
        """The changes that make any other image equal to this one."""
        changes: list[ImageChange] = [
            Cleared(),
            NodesPut(self.coordinator, tuple(self.tablets.values())),
        ]
        changes += [TagsPut(dict(self.tags))] if self.tags else []
        changes += [DatabasePut(entry) for entry in self.databases.values()]
        changes += [TablePut(entry) for entry in self._tables.values()]
        changes += [PartitionPut(entry) for entry in self._partitions.values()]
        return changes

    def _apply(self, change: ImageChange) -> None:
        match change:
            case DatabasePut(entry):
                self.databases[entry.name] = entry
            case DatabaseGone(name):
                self.databases.pop(name, None)
            case TablePut(entry):
                self._put_table(entry)
            case TableGone(table_id):
                self._drop_table(table_id)
            case PartitionPut(entry):
                self._count(self._partitions.get(entry.partition_id), entry)
                self._partitions[entry.partition_id] = entry
                self._table_partitions.setdefault(entry.table_id, {})[entry.name] = entry
            case PartitionGone(partition_id):
                self._drop_partition(partition_id)
            case NodesPut(coordinator, tablets):
                self.coordinator = coordinator
                known = self.absent | self.tablets
                self.tablets = {node.node_id: node for node in tablets}
                self.absent = {i: n for i, n in known.items() if i not in self.tablets}
            case TagsPut(tags):
                self.tags = dict(tags)
            case Cleared():
                self._clear()

    def _put_table(self, entry: TableEntry) -> None:
        path, table_id = entry.info.path, entry.info.table_id
        names = self._table_ids.setdefault(path.database, {})
        before = names.get(path.table)
        if before is not None and before != table_id:
            self._drop_table(before)
            names = self._table_ids.setdefault(path.database, {})
        names[path.table] = table_id
        self._count(self._tables.get(table_id), entry)
        self._tables[table_id] = entry

    def _drop_table(self, table_id: int) -> None:
        entry = self._tables.pop(table_id, None)
        if entry is None:
            return
        self._count(entry, None)
        path = entry.info.path
        names = self._table_ids[path.database]
        if names.get(path.table) == table_id:
            del names[path.table]
        if not names:
            del self._table_ids[path.database]
        for partition in self._table_partitions.pop(table_id, {}).values():
            self._count(self._partitions.pop(partition.partition_id, None), None)

    def _drop_partition(self, partition_id: int) -> None:
        entry = self._partitions.pop(partition_id, None)
        if entry is None:
            return
        self._count(entry, None)
        names = self._table_partitions.get(entry.table_id, {})
        named = names.get(entry.name)
        if named is not None and named.partition_id == partition_id:
            del names[entry.name]

    def _count(self, before: Holder | None, after: Holder | None) -> None:
        """Note in `leaders` that the buckets of one entry replace those of another."""
        if before is not None:
            self.leaders.subtract(state.leader for state in before.buckets)
        if after is not None:
            self.leaders.update(state.leader for state in after.buckets)


def partition_buckets(
    table: TableEntry, partition: PartitionEntry
) -> Iterator[tuple[PhysicalTablePath, TableBucket, BucketState]]:
    """The buckets of one partition with their paths and states."""
    path = PhysicalTablePath(*table.info.path, partition.name)
    for i, state in enumerate(partition.buckets):
        yield path, TableBucket(partition.table_id, partition.partition_id, i), state
