"""The layout of the catalog in the metadata store: every path, and its value.

No other code knows this layout. Values are UTF-8 JSON objects unless the table says number (decimal
text). All paths of a table lie below its id, so that a name can be used again while the old table
is being deleted, and a drop deletes one subtree.

| path | value |
|---|---|
| `/catalog/format` | number: version of this layout, 2; format 1 had all bucket states in one value, see `upgrade.py`; `restoring DIGEST` while a dump is put into the store, see `moving.py` |
| `/catalog/cluster` | text: the cluster's id, 32 hex digits, created once |
| `/coordinator/epoch` | number: grows with each start of a coordinator; every change checks it |
| `/counters/table` `/counters/partition` `/counters/writer` `/counters/server-epoch` `/counters/lease-epoch` | number: the next id, never given twice |
| `/databases/NAME` | `descriptor` (as on the wire), `created_time`, `modified_time` |
| `/tables/ID` | `database`, `table`, `schema_id`, `descriptor` (as on the wire), `created_time`, `modified_time`, `remote_location` (id, for its metadata files; absent in tables older than locations) |
| `/tables/ID/schemas/SCHEMA_ID` | the schema, as on the wire |
| `/tables/ID/auto-increment/COLUMN_ID` | number: the last id given to the column, 0 before the first; made and deleted with the table |
| `/tables/ID/lake/epoch` | number: the tiering epoch of the last hand-out, 0 before the first |
| `/tables/ID/lake/snapshots` | `tiered_time` (of the last commit, absent before the first), `fenced` (that commit had epochs), `snapshots`: a list, the newest last, of `id`, `offsets` (the offsets file, from the root of its location on), `location` (its id; absent for the first one), `readable_offsets` and `readable_location` (the same, where known) |
| `/tables/ID/buckets/N` | `buckets`: a list of `[replicas, leader, leader_epoch, isr, bucket_epoch]`, then `wal` and `released` if they are set, of the buckets from 128 N on; absent for a partitioned table |
| `/tables/ID/partitions/PARTITION_ID` | `name`, `created_time`, `remote_location` (as of a table) |
| `/tables/ID/partitions/PARTITION_ID/buckets/N` | as `/tables/ID/buckets/N` |
| `/tables/ID/remote/BUCKET` | the remote side of the bucket, see `bucket_remotes.py`; created and deleted with the table |
| `/tables/ID/partitions/PARTITION_ID/remote/BUCKET` | the same, with the partition |
| `/remote/drops/table-ID` | `database`, `table`, `table_id`: a dropped table whose remote files are to be deleted; made in the transaction of the drop |
| `/remote/drops/table-ID/partitions/N` | `partitions`: the names by id of up to 1,000 partitions that went with a primary-key table, since its leased snapshots lie below them |
| `/remote/drops/partition-ID` | the same as of a table, of a dropped partition, with `partition` (its name) and `partition_id` |
| `/leases/kv-snapshot/ID…` | leases of key-value snapshots, binary, see `leases/records.py` |
| `/producers/tables/TABLE_ID/ID…` | producers, see `producers/records.py`; `/counters/producer` counts them |
| `/producers/offsets/ID…` | offsets that producers registered, see `producers/offsets.py` |
| `/remote/locations` `/remote/placement` `/configs/cluster` | see `remote/locations.py` |
| `/servers/tags` | the names of the tags of tablet servers, by server id, see `rebalance/tags.py`; absent before the first |
| `/rebalance/newest` `/rebalance/moves/ID/N` | the newest rebalance and its moves, see `rebalance/task.py` |
| `/wal/durability` `/wal/sessions/EPOCH` | see `wal/book.py` |

Times are epoch milliseconds. Both `lake` paths are made and deleted with the table. `buckets` are paths of their own because leaders change on their own.

A table exists while `/tables/ID` has a value, a partition while its path and its table's have one. What is too much for
one transaction is created before that value and deleted after it. The note of a drop is there meanwhile, so that the
cleaner (`remote/cleaner.py`) deletes what a drop, or a creation that was not finished, left over.
"""  # noqa: E501 - a table row does not wrap

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple, TypeVar

from zufluss.cluster.image import (
    BucketState,
    DatabaseEntry,
    DatabasePut,
    Holder,
    ImageChange,
    PartitionEntry,
    PartitionPut,
    TableEntry,
    TablePut,
)
from zufluss.errors import ErrorCode, ZuflussError
from zufluss.meta.api import Create, Delete, Entry, Op, Put
from zufluss.model.partition import spec_of
from zufluss.model.schema import Schema, dump_object, dump_with
from zufluss.model.table import (
    DatabaseDescriptor,
    PhysicalTablePath,
    TableBucket,
    TableDescriptor,
    TableInfo,
    TablePath,
)

FORMAT = 2
FORMAT_1 = 1
"""The layout before, which is upgraded."""
FORMAT_PATH = "/catalog/format"
_RESTORING = b"restoring "
CLUSTER_PATH = "/catalog/cluster"
EPOCH_PATH = "/coordinator/epoch"
TABLE_COUNTER = "/counters/table"
PARTITION_COUNTER = "/counters/partition"
WRITER_COUNTER = "/counters/writer"
SERVER_EPOCH_COUNTER = "/counters/server-epoch"
LEASE_EPOCH_COUNTER = "/counters/lease-epoch"
DROPS_PATH = "/remote/drops"
LEASES_PATH = "/leases/kv-snapshot"
NAMES_AT_ONCE = 1000
"""Names of dropped partitions in one value."""
BUCKETS_AT_ONCE = 128
"""Bucket states in one value."""

S = TypeVar("S")
T = TypeVar("T")


class OffsetsFile(NamedTuple):
    """An offsets file (`lake/offsets.py`)."""

    path: str
    """Its path below the root of its location."""
    location_id: int | None = None
    """Its location; None in records older than locations, which means the first one."""


@dataclass(frozen=True, slots=True)
class SnapshotRecord:
    """A lake snapshot of a table."""

    snapshot_id: int
    """Its id in the lake."""
    offsets_file: OffsetsFile
    """The offsets file: how far each bucket got."""
    readable_file: OffsetsFile | None = None
    """The offsets file with the offsets that readers may rely on; None if it is unknown."""


@dataclass(frozen=True, slots=True)
class LakeRecord:
    """The lake side of a table."""

    tiered_time: int | None = None
    """When a snapshot was last committed, epoch milliseconds; None before the first."""
    snapshots: tuple[SnapshotRecord, ...] = ()
    """The snapshots that are kept, the newest last."""
    fenced: bool = False
    """Whether the newest commit named epochs."""


@dataclass(frozen=True, slots=True)
class Drop:
    """A dropped table or partition whose remote files are to be deleted."""

    owner: PhysicalTablePath
    """The name of the table, and of the partition."""
    table_id: int
    """The table's id."""
    partition_id: int | None = None
    """The partition's id; None for a whole table."""

    @property
    def owner_id(self) -> tuple[int, int | None]:
        """The ids of the dropped table and partition."""
        return self.table_id, self.partition_id


class CatalogDamagedError(ZuflussError, code=ErrorCode.STORAGE_EXCEPTION):
    """A value in the metadata store cannot be read."""


def restoring(digest: str) -> bytes:
    """The value of the format while the dump with this digest is restored."""
    return _RESTORING + digest.encode()


def restore_of(form: bytes) -> str | None:
    """The digest of the dump whose restore has not finished; None for a number of a format."""
    return form[len(_RESTORING) :].decode() if form.startswith(_RESTORING) else None


def number(value: int) -> bytes:
    """Encode a number as it is stored."""
    return b"%d" % value


# Writing


def put_database(entry: DatabaseEntry, *, new: bool) -> Op:
    """The operation that creates or replaces a database."""
    times = {"created_time": entry.created_time, "modified_time": entry.modified_time}
    value = dump_with({}, "descriptor", entry.descriptor.to_json(), times)
    path = f"/databases/{entry.name}"
    return Create(path, value) if new else Put(path, value)


def drop_database(name: str) -> Op:
    """The operation that deletes a database."""
    return Delete(f"/databases/{name}")


class CatalogChange(NamedTuple):
    """Operations that create or drop a table or partition."""

    decisive: list[Op]
    """Those that decide whether it exists, which belong into one transaction."""
    rest: list[Op]
    """Those before a creation, or after a drop, if there are too many for that transaction."""
    note: Create
    """The note of a drop. While the store has it, the rest may be incomplete."""

    @property
    def all(self) -> list[Op]:
        """Everything, for one transaction."""
        return [*self.decisive, *self.rest]


def create_table(entry: TableEntry) -> CatalogChange:
    """Operations that create a table with its schemas and buckets."""
    base = _table_path(entry.info.table_id)
    decisive: list[Op] = [Create(base, _table_value(entry))]
    decisive += [_create_schema(base, i, schema) for i, schema in entry.schemas.items()]
    decisive += [Create(counter, number(0)) for counter in _id_counters(entry.info)]
    decisive += create_lake(entry.info.table_id)
    rest: list[Op] = [] if entry.info.is_partitioned else create_buckets(base, entry.buckets)
    rest += map(create_bucket_remote, _buckets(entry))
    return CatalogChange(
        decisive, rest, _create_drop(Drop(entry.physical_path, entry.info.table_id))
    )


def alter_table(before: TableEntry, after: TableEntry) -> list[Op]:
    """Operations that replace a table, and add its new schemas."""
    base = _table_path(after.info.table_id)
    ops: list[Op] = [Put(base, _table_value(after))]
    ops += [
        _create_schema(base, i, schema)
        for i, schema in after.schemas.items()
        if i not in before.schemas
    ]
    return ops


def create_buckets(base: str, states: Sequence[BucketState]) -> list[Op]:
    """Operations that create the bucket states of a table or partition with this path."""
    return [
        Create(f"{base}/buckets/{chunk}", _buckets_value(states, chunk))
        for chunk in range(_chunks(states))
    ]


def put_buckets(entry: Holder, chunk: int) -> Op:
    """The operation that replaces the bucket states of a table or partition in one value."""
    return Put(f"{holder_path(entry)}/buckets/{chunk}", _buckets_value(entry.buckets, chunk))


def chunk_of(bucket_id: int) -> int:
    """The number of the value that has the state of a bucket."""
    return bucket_id // BUCKETS_AT_ONCE


def holder_path(entry: Holder) -> str:
    """The path of a table or partition."""
    if isinstance(entry, TableEntry):
        return _table_path(entry.info.table_id)
    return _partition_path(entry)


def drop_table(entry: TableEntry, partitions: Iterable[PartitionEntry]) -> CatalogChange:
    """Operations that delete a table with everything below it, and note its remote files."""
    base = _table_path(entry.info.table_id)
    gone = tuple(partitions)
    note = _create_drop(Drop(entry.physical_path, entry.info.table_id))
    decisive: list[Op] = [Delete(base), note]
    decisive += _create_names(gone) if entry.info.has_primary_key else []
    rest: list[Op] = [Delete(f"{base}/schemas/{i}") for i in entry.schemas]
    rest += [Delete(counter) for counter in _id_counters(entry.info)]
    rest += [Delete(tiering_epoch(entry.info.table_id)), Delete(_snapshots(entry.info.table_id))]
    rest += _delete_buckets(base, entry)
    for partition in gone:
        path = _partition_path(partition)
        rest += [Delete(path), *_delete_buckets(path, partition)]
    return CatalogChange(decisive, rest, note)


def create_partition(table: TablePath, entry: PartitionEntry) -> CatalogChange:
    """Operations that create a partition with its buckets."""
    path = _partition_path(entry)
    value: dict[str, Any] = {"name": entry.name, "created_time": entry.created_time}
    rest = create_buckets(path, entry.buckets)
    rest += map(create_bucket_remote, _buckets(entry))
    return CatalogChange(
        [Create(path, dump_object(value | _location(entry)))],
        rest,
        _create_drop(_partition_drop(table, entry)),
    )


def drop_partition(table: TablePath, entry: PartitionEntry) -> CatalogChange:
    """Operations that delete a partition with its buckets, and note its remote files."""
    path = _partition_path(entry)
    note = _create_drop(_partition_drop(table, entry))
    return CatalogChange([Delete(path), note], _delete_buckets(path, entry), note)


def _partition_drop(table: TablePath, entry: PartitionEntry) -> Drop:
    return Drop(PhysicalTablePath(*table, entry.name), entry.table_id, entry.partition_id)


def _delete_buckets(path: str, entry: TableEntry | PartitionEntry) -> list[Op]:
    """Operations that delete the bucket states, and the remote sides of the buckets."""
    ops: list[Op] = [Delete(f"{path}/buckets/{i}") for i in range(_chunks(entry.buckets))]
    return [*ops, *(Delete(bucket_remote(bucket)) for bucket in _buckets(entry))]


def dropped_path(drop: Drop) -> str:
    """The path at and below which a dropped table or partition leaves nothing."""
    base = _table_path(drop.table_id)
    return base if drop.partition_id is None else f"{base}/partitions/{drop.partition_id}"


def bucket_remote(bucket: TableBucket) -> str:
    """The path of the remote side of a bucket."""
    base = _table_path(bucket.table_id)
    if bucket.partition_id is not None:
        base += f"/partitions/{bucket.partition_id}"
    return f"{base}/remote/{bucket.bucket_id}"


def create_bucket_remote(bucket: TableBucket) -> Op:
    """The operation that creates an empty remote side of a bucket."""
    return Create(bucket_remote(bucket), b"{}")


def _buckets(entry: TableEntry | PartitionEntry) -> list[TableBucket]:
    numbers = range(len(entry.buckets))
    if isinstance(entry, TableEntry):
        return [TableBucket(entry.info.table_id, None, i) for i in numbers]
    return [TableBucket(entry.table_id, entry.partition_id, i) for i in numbers]


def _create_drop(drop: Drop) -> Create:
    value = {
        "database": drop.owner.database,
        "table": drop.owner.table,
        "table_id": drop.table_id,
    }
    if drop.partition_id is None:
        return Create(table_drop(drop.table_id), dump_object(value))
    value |= {"partition": drop.owner.partition, "partition_id": drop.partition_id}
    return Create(partition_drop(drop.partition_id), dump_object(value))


def _create_names(partitions: Sequence[PartitionEntry]) -> list[Op]:
    """Operations that note the names of the partitions of a dropped table."""
    return [
        Create(
            f"{dropped_names(some[0].table_id)}/{at // NAMES_AT_ONCE}",
            dump_object({"partitions": {str(each.partition_id): each.name for each in some}}),
        )
        for at in range(0, len(partitions), NAMES_AT_ONCE)
        if (some := partitions[at : at + NAMES_AT_ONCE])
    ]


def table_drop(table_id: int) -> str:
    """The path of a dropped table whose remote files are not all deleted yet."""
    return f"{DROPS_PATH}/table-{table_id}"


def partition_drop(partition_id: int) -> str:
    """The path of a dropped partition whose remote files are not all deleted yet."""
    return f"{DROPS_PATH}/partition-{partition_id}"


def dropped_names(table_id: int) -> str:
    """The path above the partition names of a dropped table."""
    return f"{table_drop(table_id)}/partitions"


def id_counter(table_id: int, column_id: int) -> str:
    """The path of the counter of an auto-increment column."""
    return f"{_table_path(table_id)}/auto-increment/{column_id}"


def create_lake(table_id: int) -> list[Op]:
    """Operations that create the lake side of a table, without hand-out and snapshot."""
    return [
        Create(tiering_epoch(table_id), number(0)),
        Create(_snapshots(table_id), dump_object({"snapshots": []})),
    ]


def put_lake(table_id: int, lake: LakeRecord) -> Op:
    """The operation that replaces the lake snapshots of a table."""
    rows = [
        {"id": s.snapshot_id}
        | _file_value(s.offsets_file, "offsets", "location")
        | _file_value(s.readable_file, "readable_offsets", "readable_location")
        for s in lake.snapshots
    ]
    value = {"tiered_time": lake.tiered_time, "fenced": lake.fenced, "snapshots": rows}
    return Put(_snapshots(table_id), dump_object(value))


def _file_value(file: OffsetsFile | None, path: str, location: str) -> dict[str, Any]:
    if file is None:
        return {}
    where = {} if file.location_id is None else {location: file.location_id}
    return {path: file.path} | where


def tiering_epoch(table_id: int) -> str:
    """The path of the tiering epoch of a table."""
    return f"{_table_path(table_id)}/lake/epoch"


def _snapshots(table_id: int) -> str:
    return f"{_table_path(table_id)}/lake/snapshots"


def _id_counters(info: TableInfo) -> list[str]:
    names = info.schema.auto_increment_column
    return [id_counter(info.table_id, info.schema.column(name).id) for name in names]


def _table_path(table_id: int) -> str:
    return f"/tables/{table_id}"


def _partition_path(entry: PartitionEntry) -> str:
    return f"/tables/{entry.table_id}/partitions/{entry.partition_id}"


def _create_schema(base: str, schema_id: int, schema: Schema) -> Op:
    return Create(f"{base}/schemas/{schema_id}", schema.to_json_bytes())


def _table_value(entry: TableEntry) -> bytes:
    info = entry.info
    head = {
        "database": info.path.database,
        "table": info.path.table,
        "schema_id": info.schema_id,
    }
    tail = {"created_time": info.created_time, "modified_time": info.modified_time}
    return dump_with(head, "descriptor", entry.table_json, tail | _location(entry))


def _location(entry: TableEntry | PartitionEntry) -> dict[str, Any]:
    known = entry.remote_location is not None
    return {"remote_location": entry.remote_location} if known else {}


def _chunks(states: Sequence[BucketState]) -> int:
    """How many values the states of buckets take."""
    return -(-len(states) // BUCKETS_AT_ONCE)


def _buckets_value(states: Sequence[BucketState], chunk: int) -> bytes:
    some = states[chunk * BUCKETS_AT_ONCE : (chunk + 1) * BUCKETS_AT_ONCE]
    return dump_object({"buckets": list(map(_bucket_row, some))})


def _bucket_row(state: BucketState) -> list[Any]:
    row = [state.replicas, state.leader, state.leader_epoch, state.isr, state.bucket_epoch]
    if state.released is not None:
        return [*row, state.wal, state.released]
    return row if state.wal is None else [*row, state.wal]


# Reading


def load(entries: Iterable[Entry]) -> Iterator[ImageChange]:
    """Decode the catalog, tables before their partitions; `CatalogDamagedError` if it fails."""
    tree = _Tree({entry.path: entry.value for entry in entries})
    databases = tree.names("/databases")
    for name in databases:
        yield DatabasePut(_guarded(f"/databases/{name}", partial(_database, tree, name)))
    taken: set[TablePath] = set()
    for table_id in tree.names("/tables"):
        base = f"/tables/{table_id}"
        if not tree.has(base, table_drop(int(table_id))):
            continue
        table = _guarded(base, partial(_table, tree, base))
        if table.info.path in taken or table.info.path.database not in databases:
            raise _damaged(base, f"table '{table.info.path}' is there twice or has no database")
        taken.add(table.info.path)
        yield TablePut(table)
        for partition_id in tree.names(f"{base}/partitions"):
            path = f"{base}/partitions/{partition_id}"
            if not tree.has(path, partition_drop(int(partition_id))):
                continue
            yield PartitionPut(_guarded(path, partial(_partition, tree, path, table)))


def load_lake(entries: Iterable[Entry], table_ids: Iterable[int]) -> dict[int, LakeRecord | None]:
    """Decode the lake side of tables; None for a table that was created without one."""
    tree = _Tree({entry.path: entry.value for entry in entries})
    return {i: _guarded(_snapshots(i), partial(_lake, tree, i)) for i in table_ids}


def load_drop(path: str, value: bytes) -> Drop:
    """Decode the note of a drop."""
    return guarded(path, _drop, value)


def _drop(value: bytes) -> Drop:
    note = json.loads(value)
    owner = PhysicalTablePath(note["database"], note["table"], note.get("partition"))
    return Drop(owner, note["table_id"], note.get("partition_id"))


def load_names(path: str, value: bytes) -> dict[int, str]:
    """Decode partition names of a dropped table, by id."""
    return guarded(path, _names, value)


def _names(value: bytes) -> dict[int, str]:
    return {int(i): name for i, name in json.loads(value)["partitions"].items()}


class _Tree:
    """The values of a store, with an index of the names below each path."""

    def __init__(self, values: Mapping[str, bytes]) -> None:
        self.values = values
        self._names: dict[str, dict[str, None]] = {}
        for path in values:
            parts = path.split("/")
            for depth in range(2, len(parts) + 1):
                parent = "/".join(parts[: depth - 1])
                self._names.setdefault(parent, {})[parts[depth - 1]] = None

    def names(self, path: str) -> list[str]:
        return list(self._names.get(path, ()))

    def has(self, path: str, note: str) -> bool:
        """Whether a table or partition exists, and is not only left over from a noted drop."""
        if path not in self.values and note not in self.values:
            raise _damaged(path, "something is below it, and no drop of it is noted")
        return path in self.values

    def object(self, path: str) -> Any:
        return json.loads(self.values[path])


def guarded(path: str, read: Callable[[S], T], source: S) -> T:
    """Return `read(source)`; `CatalogDamagedError` with the path if it raises."""
    return _guarded(path, partial(read, source))


def _guarded(path: str, read: Callable[[], T]) -> T:
    try:
        return read()
    except (KeyError, ValueError, TypeError, AttributeError, ZuflussError) as problem:
        raise _damaged(path, repr(problem)) from problem


def _damaged(path: str, why: str) -> CatalogDamagedError:
    return CatalogDamagedError(
        f"the metadata at {path} cannot be read: {why}; restore the metadata store from a backup"
    )


def _database(tree: _Tree, name: str) -> DatabaseEntry:
    value = tree.object(f"/databases/{name}")
    descriptor = DatabaseDescriptor.from_json(dump_object(value["descriptor"]))
    return DatabaseEntry(name, descriptor, value["created_time"], value["modified_time"])


def _table(tree: _Tree, base: str) -> TableEntry:
    value = tree.object(base)
    info = TableInfo(
        path=TablePath(value["database"], value["table"]),
        table_id=int(base.rsplit("/", 1)[1]),
        schema_id=value["schema_id"],
        descriptor=TableDescriptor.from_json(dump_object(value["descriptor"])),
        created_time=value["created_time"],
        modified_time=value["modified_time"],
    )
    schemas = {
        schema_id: Schema.from_json(tree.values[f"{base}/schemas/{schema_id}"])
        for schema_id in sorted(map(int, tree.names(f"{base}/schemas")))
    }
    if list(schemas) != list(range(1, info.schema_id + 1)):
        raise ValueError(f"schemas {list(schemas)}, expected 1 to {info.schema_id}")
    buckets = () if info.is_partitioned else _bucket_states(tree, base)
    return TableEntry(info, schemas, buckets, value.get("remote_location"))


def _partition(tree: _Tree, path: str, table: TableEntry) -> PartitionEntry:
    value = tree.object(path)
    return PartitionEntry(
        partition_id=int(path.rsplit("/", 1)[1]),
        table_id=table.info.table_id,
        name=value["name"],
        spec=spec_of(table.info.partition_keys, value["name"]),
        created_time=value["created_time"],
        buckets=_bucket_states(tree, path),
        remote_location=value.get("remote_location"),
    )


def _lake(tree: _Tree, table_id: int) -> LakeRecord | None:
    if tiering_epoch(table_id) not in tree.values:
        return None
    value = tree.object(_snapshots(table_id))
    return LakeRecord(
        tiered_time=value.get("tiered_time"),
        snapshots=tuple(
            SnapshotRecord(
                s["id"],
                OffsetsFile(s["offsets"], s.get("location")),
                OffsetsFile(s["readable_offsets"], s.get("readable_location"))
                if "readable_offsets" in s
                else None,
            )
            for s in value["snapshots"]
        ),
        fenced=value.get("fenced", False),
    )


def _bucket_states(tree: _Tree, path: str) -> tuple[BucketState, ...]:
    chunks = sorted(map(int, tree.names(f"{path}/buckets")))
    if chunks != list(range(len(chunks))):
        raise ValueError(f"bucket states {chunks}, expected 0 to {len(chunks) - 1}")
    rows = [row for i in chunks for row in tree.object(f"{path}/buckets/{i}")["buckets"]]
    return tuple(map(_bucket_state, rows))


def _bucket_state(row: Sequence[Any]) -> BucketState:
    replicas, leader, leader_epoch, isr, bucket_epoch, *wal = row
    return BucketState(tuple(replicas), leader, leader_epoch, tuple(isr), bucket_epoch, *wal)


# Upgrading


def upgrade_buckets(path: str, value: bytes) -> list[Op]:
    """Operations that split the bucket states of format 1, which were one value at a path."""

    def rows(value: bytes) -> list[BucketState]:
        return [_bucket_state(row) for row in json.loads(value)["buckets"]]

    base = path.removesuffix("/buckets")
    return [Delete(path), *create_buckets(base, guarded(path, rows, value))]
