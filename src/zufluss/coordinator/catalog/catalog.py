"""The catalog: the only writer of databases, tables, schemas, partitions and ids.

Every change has the same steps, under one lock: check against the image, commit one transaction to
the metadata store, apply the change to the image, tell the tablet servers, answer. So when a caller
has its answer, the change is durable, in the image, and carried out: a created table has leaders
that serve, and a dropped table has freed its disk. `records.py` has the layout of the store.

What happens when a step fails:

| step that fails | consequence |
|---|---|
| check, commit | nothing changed; the caller gets the error |
| the lake table of a table with tiering | see `lake/creation.py`: refused, or made without it |
| a leader of a new table or partition does not start | it is dropped again; the caller gets the error |
| a leader of a new table or partition is gone | it is dropped again, and created at the other servers |
| a database has more tables than one transaction takes | those already dropped stay dropped; the same drop again goes on |
| the rest of a large table or partition | the cleaner deletes it, `remote/cleaner.py` |
| a tablet server cannot be told of a drop | logged; it deletes the data when it registers again |
| the process dies after the commit | the next start loads the image and assigns from it |
| the caller is cancelled | the change is finished regardless |

Ids come from counters in the same transactions and are never given twice, not after a drop and
not after a crash. Of two coordinators on one store only the later one can change anything
(`ledger.py`).
"""  # noqa: E501 - a table row does not wrap

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import TypeVar

import structlog

from zufluss.cluster.image import (
    BucketState,
    ClusterImage,
    DatabaseEntry,
    DatabaseGone,
    DatabasePut,
    ImageChange,
    PartitionEntry,
    PartitionGone,
    PartitionPut,
    TableEntry,
    TableGone,
    TablePut,
    partition_buckets,
)
from zufluss.cluster.replicas import ReplicaAssignment, ReplicaStop
from zufluss.config import options, table_options
from zufluss.config.load import Configuration
from zufluss.coordinator import records
from zufluss.coordinator.catalog import auto_increment, portions
from zufluss.coordinator.catalog.bucket_states import BucketStates
from zufluss.coordinator.catalog.placement import candidates, place
from zufluss.coordinator.feed import Feed
from zufluss.coordinator.lake.creation import LakeTableKeeper, has_lake_table
from zufluss.coordinator.ledger import Ledger
from zufluss.coordinator.producers.book import ProducerBook
from zufluss.coordinator.remote.locations import LocationRegistry
from zufluss.coordinator.tablets import Tablets
from zufluss.coordinator.tasks import PendingTasks
from zufluss.errors import (
    DatabaseAlreadyExistError,
    DatabaseNotEmptyError,
    InvalidAlterTableError,
    InvalidDatabaseError,
    InvalidTableError,
    LeaderNotAvailableError,
    NetworkError,
    PartitionAlreadyExistError,
    PartitionMaxNumError,
    PartitionNotExistError,
    TableAlreadyExistError,
    TableNotExistError,
)
from zufluss.meta.api import VALUE_BYTES_MAX, Op, fits_a_transaction
from zufluss.model import validation
from zufluss.model.auto_partition import check_create_partition
from zufluss.model.partition import check_spec, qualified_name, spec_of
from zufluss.model.table import (
    DatabaseDescriptor,
    TableBucket,
    TableDescriptor,
    TableInfo,
    TablePath,
)
from zufluss.pacing import aside

log = structlog.get_logger(__name__)

DEFAULT_DATABASE = "fluss"
"""The database every cluster has."""
DESCRIPTOR_BYTES_MAX = VALUE_BYTES_MAX - 10_000
"""Largest descriptor of a table or database: it fits one value together with the other fields."""

T = TypeVar("T")


class _LakeFirst(Exception):
    """The table has a lake table, which has to be altered before the table is."""


class Catalog:
    """Databases, tables and partitions, durable."""

    def __init__(
        self,
        ledger: Ledger,
        conf: Configuration,
        image: ClusterImage,
        changes: Feed[Sequence[ImageChange]],
        tablets: Tablets,
        locations: LocationRegistry,
        producers: ProducerBook,
        lake_tables: LakeTableKeeper,
        clock_ms: Callable[[], int],
        wal_of: Callable[[int], int | None] = lambda server_id: None,
    ) -> None:
        """`image` is loaded from the store already; `changes` gets every change of the catalog.

        `wal_of` returns the session of the shared log that new buckets of a server begin in, None
        without a shared log.
        """
        self.image = image
        self.cluster_id = ledger.cluster_id
        """The id of the cluster, created with its store."""
        self.epoch = ledger.epoch
        """The coordinator epoch of this catalog."""
        self.ledger = ledger
        """The metadata store, fenced by the epoch of this coordinator."""
        self._conf = conf
        self._changes = changes
        self._tablets = tablets
        self._locations = locations
        self._producers = producers
        self._lake_tables = lake_tables
        self._clock_ms = clock_ms
        self._wal_of = wal_of
        self._lock = asyncio.Lock()
        self.states = BucketStates(ledger, image)
        """Changes who leads buckets."""
        self._tasks = PendingTasks("catalog")

    async def create_default_database(self) -> None:
        """Create the database that every cluster has, if it is not there."""
        await self.create_database(DEFAULT_DATABASE, DatabaseDescriptor(), ignore_if_exists=True)
        log.info("catalog_opened", epoch=self.epoch, image=repr(self.image))

    async def settle(self) -> None:
        """Wait for the changes under way."""
        await self._tasks.settle()

    async def unlocked(self) -> None:
        """Wait until the changes that were begun before have ended."""
        async with self._lock:
            pass

    def __repr__(self) -> str:
        return f"Catalog(epoch={self.epoch}, {self.image!r})"

    # Databases

    async def create_database(
        self, name: str, descriptor: DatabaseDescriptor, *, ignore_if_exists: bool = False
    ) -> None:
        """Create a database."""
        validation.check_database_name(name)
        _check_database_size(name, descriptor)

        async def change() -> None:
            if name in self.image.databases:
                if ignore_if_exists:
                    return
                raise DatabaseAlreadyExistError(f"Database {name} already exists.")
            now = self._clock_ms()
            entry = DatabaseEntry(name, descriptor, now, now)
            await self.ledger.commit([records.put_database(entry, new=True)])
            await self._publish([DatabasePut(entry)])

        await self.exclusive(change)

    async def alter_database(
        self,
        name: str,
        *,
        set_properties: Mapping[str, str],
        reset_properties: Iterable[str],
        comment: str | None = None,
        ignore_if_not_exists: bool = False,
    ) -> None:
        """Change a database's properties and comment; an empty comment removes it."""

        async def change() -> None:
            if ignore_if_not_exists and name not in self.image.databases:
                return
            before = self.image.database(name)
            properties = {**before.descriptor.custom_properties, **set_properties}
            for key in reset_properties:
                properties.pop(key, None)
            text = before.descriptor.comment if comment is None else comment or None
            descriptor = DatabaseDescriptor(text, properties)
            if descriptor == before.descriptor:
                return
            _check_database_size(name, descriptor)
            entry = replace(before, descriptor=descriptor, modified_time=self._clock_ms())
            await self.ledger.commit([records.put_database(entry, new=False)])
            await self._publish([DatabasePut(entry)])

        await self.exclusive(change)

    async def drop_database(
        self, name: str, *, ignore_if_not_exists: bool = False, cascade: bool = False
    ) -> None:
        """Drop a database; with `cascade`, all its tables with it."""
        if name == DEFAULT_DATABASE:
            raise InvalidDatabaseError(
                f"database {name!r} cannot be dropped: every cluster has it; drop its tables"
            )

        async def change() -> None:
            if ignore_if_not_exists and name not in self.image.databases:
                return
            self.image.database(name)
            tables = [self.image.table(TablePath(name, t)) for t in self.image.table_names(name)]
            if tables and not cascade:
                raise DatabaseNotEmptyError(
                    f"Database {name} is not empty. Drop its {len(tables)} tables, or drop it "
                    "with cascade"
                )
            drops = portions.drops([(table, self._table_drop(table)) for table in tables])
            for number, (ops, some) in enumerate(drops, 1):
                stops = [stop for table in some for stop in self._stops(table)]
                changes: list[ImageChange] = [TableGone(table.info.table_id) for table in some]
                if number == len(drops):
                    ops.append(records.drop_database(name))
                    changes.append(DatabaseGone(name))
                await self.ledger.commit(ops)
                await self._publish(changes)
                await self._tablets.stop_replicas(stops)

        await self.exclusive(change)

    # Tables

    async def create_table(
        self, path: TablePath, table_json: bytes, *, ignore_if_exists: bool = False
    ) -> TableEntry:
        """Create a table from a descriptor; its leaders serve when this returns."""
        validation.check_table_path(path)
        if len(table_json) > DESCRIPTOR_BYTES_MAX:
            raise _too_large(path, len(table_json))
        nodes = self.image.tablets.values()
        live_servers = len(self.image.untagged(nodes)) or len(nodes)  # placement refuses none

        def checked() -> TableDescriptor:
            descriptor = validation.complete(TableDescriptor.from_json(table_json), self._conf)
            validation.check_table(descriptor, self._conf, live_servers)
            _check_size(path, descriptor)  # encodes the schema, for later uses, too
            return descriptor

        descriptor = await aside(len(table_json), checked)

        def existing_table() -> TableEntry | None:
            existing = self.image.find_table(path)
            if existing is not None and ignore_if_exists:
                return existing
            self.image.database(path.database)
            if existing is not None:
                raise TableAlreadyExistError(f"Table {path} already exists.")
            self._locations.check_placement(descriptor)
            return None

        async def create(info: TableInfo | None = None) -> TableEntry:
            return existing_table() or await self._create_table(path, descriptor, info)

        async def existing_or_new() -> TableEntry | TableInfo:
            """The table that is there by now, or the new one with its id and time.

            A table of this name that is created without a lake meanwhile is newer by both.
            Otherwise it could never have a lake table, in the place of one that looks newer.
            """
            if (existing := existing_table()) is not None:
                return existing
            [table_id] = await self.ledger.take(records.TABLE_COUNTER, 1)
            return self._new_table(path, descriptor, table_id)

        async def create_with_lake() -> TableEntry:
            async with self._lake_tables.turn:
                info = await self.exclusive(existing_or_new)
                if isinstance(info, TableEntry):
                    return info
                await self._lake_tables.prepare(info)
                try:
                    return await self.exclusive(lambda: create(info))
                finally:
                    if self.image.table_by_id(info.table_id) is None:
                        self._lake_tables.forget(info.table_id)

        if has_lake_table(self._new_table(path, descriptor, 0)):
            if (existing := existing_table()) is not None:
                return existing
            return await self._tasks.undisturbed(self._somewhere(create_with_lake))
        return await self.exclusive(lambda: self._somewhere(create))

    def _new_table(self, path: TablePath, descriptor: TableDescriptor, table_id: int) -> TableInfo:
        now = self._clock_ms()
        return TableInfo(path, table_id, 1, descriptor, now, now)

    async def _create_table(
        self, path: TablePath, descriptor: TableDescriptor, info: TableInfo | None
    ) -> TableEntry:
        """Create a table; `info` if its id was taken before, for its lake table."""
        ops: list[Op] = []
        if info is None:
            table_id, take_id = await self.ledger.next_id(records.TABLE_COUNTER)
            info, ops = self._new_table(path, descriptor, table_id), [take_id]
        table_id = info.table_id
        buckets = () if info.is_partitioned else self._place(info)
        home = self._locations.choose(info)
        entry = TableEntry(info, {1: descriptor.schema}, buckets, home.location_id)
        gone = TableGone(entry.info.table_id)
        await self._create(ops, home.ops, records.create_table(entry), gone)
        home.take()
        await self._publish([TablePut(entry)])
        replicas = [
            ReplicaAssignment(TableBucket(table_id, None, i), entry.physical_path, state)
            for i, state in enumerate(buckets)
        ]
        await self._start(replicas, undo=lambda: self._drop_table(entry))
        log.info("table_created", table=str(path), table_id=table_id, buckets=len(buckets))
        return entry

    async def drop_table(self, path: TablePath, *, ignore_if_not_exists: bool = False) -> None:
        """Drop a table with its partitions; the disk is free when this returns."""

        async def change() -> None:
            if ignore_if_not_exists and self.image.find_table(path) is None:
                return
            entry = self.image.find_table(path)
            if entry is None:
                raise TableNotExistError(f"Table {path} does not exist.")
            await self._drop_table(entry)

        await self.exclusive(change)

    async def _drop_table(self, entry: TableEntry) -> None:
        stops = self._stops(entry)
        await portions.drop(self.ledger, self._table_drop(entry))
        await self._publish([TableGone(entry.info.table_id)])
        await self._tablets.stop_replicas(stops)
        log.info("table_dropped", table=str(entry.info.path), table_id=entry.info.table_id)

    async def alter_table(
        self,
        path: TablePath,
        alter: Callable[[TableInfo], TableDescriptor],
        *,
        ignore_if_not_exists: bool = False,
        request_bytes: int = 0,
    ) -> TableEntry | None:
        """Replace the descriptor of a table by what `alter` returns.

        A new schema gets the next schema id. The lake table follows first, also if nothing changes,
        so that this creates one that could not be created before. Returns None for a missing table
        that is ignored.
        `request_bytes` is the length of the request, which tells how long `alter` takes.
        """

        async def altered() -> tuple[TableEntry, TableEntry] | None:
            """The table before and after; None for a missing table that is ignored."""
            if ignore_if_not_exists and self.image.find_table(path) is None:
                return None
            before = self.image.table(path)

            def new_descriptor() -> TableDescriptor:
                descriptor = alter(before.info)
                if descriptor != before.info.descriptor:
                    _check_size(path, descriptor)  # encodes the schema, for later uses, too
                return descriptor

            descriptor = await aside(request_bytes + len(before.table_json), new_descriptor)
            if descriptor == before.info.descriptor:
                return before, before
            self._locations.check_placement(descriptor, before.info.descriptor)
            return before, self._altered(before, descriptor)

        async def change(lake_follows: bool) -> TableEntry | None:
            """Commit the change, once the lake table has followed; before that, raise."""
            both = await altered()
            if both is None:
                return None
            before, after = both
            if has_lake_table(after.info) and not lake_follows:
                raise _LakeFirst
            if after is before:
                return before
            await self.ledger.commit(records.alter_table(before, after))
            present = self.image.table(path).buckets  # their states change at any time
            after = replace(after, buckets=present)
            await self._publish([TablePut(after)])
            log.info("table_altered", table=str(path), schema_id=after.info.schema_id)
            return after

        async def change_with_lake() -> TableEntry | None:
            async with self._lake_tables.turn:
                both = await altered()
                if both is not None and has_lake_table(both[1].info):
                    try:
                        await self._lake_tables.prepare(both[1].info)
                    except InvalidTableError as problem:
                        raise InvalidAlterTableError(problem.message) from problem
                return await self.exclusive(lambda: change(True))

        try:
            return await self.exclusive(lambda: change(False))
        except _LakeFirst:
            return await self._tasks.undisturbed(change_with_lake())

    def _altered(self, before: TableEntry, descriptor: TableDescriptor) -> TableEntry:
        schema_id, schemas = before.info.schema_id, before.schemas
        if descriptor.schema != before.info.schema:
            schema_id += 1
            schemas = {**schemas, schema_id: descriptor.schema}
        info = replace(
            before.info,
            descriptor=descriptor,
            schema_id=schema_id,
            modified_time=self._clock_ms(),
        )
        return replace(before, info=info, schemas=schemas)

    # Partitions

    async def create_partition(
        self,
        path: TablePath,
        spec: Mapping[str, str],
        *,
        ignore_if_exists: bool = False,
        table_id: int | None = None,
    ) -> PartitionEntry:
        """Create a partition; its leaders serve when this returns.

        `TableNotExistError` if `table_id` is given and the path belongs to another table by now.
        """

        async def change() -> PartitionEntry:
            table = self._table_still(path, table_id)
            name = check_create_partition(table.info, spec, self._clock_ms())
            existing = self.image.partitions(table.info.table_id)
            if name in existing:
                if ignore_if_exists:
                    return existing[name]
                raise PartitionAlreadyExistError(
                    f"Partition '{qualified_name(spec)}' already exists for table {path}"
                )
            limit = self._conf.get(options.MAX_PARTITION_NUM)
            if len(existing) >= limit:
                raise PartitionMaxNumError(
                    f"Exceed the maximum number of partitions for table {path}, only allow {limit} "
                    f"partitions. Drop some first, or raise {options.MAX_PARTITION_NUM.key}"
                )
            return await self._somewhere(lambda: self._create_partition(table, name))

        return await self.exclusive(change)

    async def _create_partition(self, table: TableEntry, name: str) -> PartitionEntry:
        partition_id, take_id = await self.ledger.next_id(records.PARTITION_COUNTER)
        home = self._locations.choose(table.info)
        entry = PartitionEntry(
            partition_id=partition_id,
            table_id=table.info.table_id,
            name=name,
            spec=spec_of(table.info.partition_keys, name),
            created_time=self._clock_ms(),
            buckets=self._place(table.info),
            remote_location=home.location_id,
        )
        creation = records.create_partition(table.info.path, entry)
        await self._create([take_id], home.ops, creation, PartitionGone(entry.partition_id))
        home.take()
        await self._publish([PartitionPut(entry)])
        replicas = [
            ReplicaAssignment(bucket, path, state)
            for path, bucket, state in partition_buckets(table, entry)
        ]
        await self._start(replicas, undo=lambda: self._drop_partition(table, entry))
        log.info("partition_created", table=str(table.info.path), partition=name, id=partition_id)
        return entry

    async def drop_partition(
        self,
        path: TablePath,
        spec: Mapping[str, str],
        *,
        ignore_if_not_exists: bool = False,
        table_id: int | None = None,
    ) -> None:
        """Drop a partition; the disk is free when this returns.

        `TableNotExistError` if `table_id` is given and the path belongs to another table by now.
        """

        async def change() -> None:
            table = self._table_still(path, table_id)
            name = check_spec(table.info, spec, create=False)
            entry = self.image.partitions(table.info.table_id).get(name)
            if entry is not None:
                await self._drop_partition(table, entry)
            elif not ignore_if_not_exists:
                raise PartitionNotExistError(
                    f"Partition '{qualified_name(spec_of(table.info.partition_keys, name))}' does "
                    f"not exist for table {path}"
                )

        await self.exclusive(change)

    async def _drop_partition(self, table: TableEntry, entry: PartitionEntry) -> None:
        await portions.drop(self.ledger, records.drop_partition(table.info.path, entry))
        await self._publish([PartitionGone(entry.partition_id)])
        await self._tablets.stop_replicas(
            [_stop(bucket, state) for _, bucket, state in partition_buckets(table, entry)]
        )
        log.info("partition_dropped", table=str(table.info.path), partition=entry.name)

    # Ids

    async def allocate_writer_ids(self, count: int) -> range:
        """Take writer ids that were never given before."""
        return await self.ledger.take(records.WRITER_COUNTER, count)

    async def allocate_ids(self, table_id: int, column_id: int, count: int) -> tuple[int, int]:
        """Take ids of an auto-increment column; returns the first id and the one after the last.

        Ids are never given twice, and begin with 1. Fewer than `count` near the end of the type.
        """
        ids = await auto_increment.allocate_ids(self.ledger, self.image, table_id, column_id, count)
        return ids.start, ids.stop

    async def next_server_epoch(self) -> int:
        """An epoch for the registration of a tablet server, larger than every one before.

        The first is 1: a request without an epoch reads as 0, and belongs to no registration.
        """
        return (await self.ledger.take(records.SERVER_EPOCH_COUNTER, 1))[0] + 1

    # Buckets

    async def tell(self, changes: Sequence[ImageChange]) -> None:
        """Tell all who follow the catalog of changes that were applied."""
        self._changes.publish(changes)
        await self._tablets.update_metadata(changes)

    # Steps of a change

    async def exclusive(self, work: Callable[[], Awaitable[T]]) -> T:
        """Run work that must not overlap with a change of the catalog, such as a registration.

        The work is finished even when the caller is cancelled.
        """

        async def locked() -> T:
            async with self._lock:
                return await work()

        return await self._tasks.undisturbed(locked())

    async def _publish(self, changes: Sequence[ImageChange]) -> None:
        self.image.apply(changes)
        await self.tell(changes)

    async def _start(
        self, replicas: Sequence[ReplicaAssignment], undo: Callable[[], Awaitable[None]]
    ) -> None:
        table_ids = {replica.table_bucket.table_id for replica in replicas}
        producers = filter(None, map(self._producers.of_table, table_ids))
        try:
            await self._tablets.start_replicas(replicas, tuple(producers))
        except Exception:
            await undo()
            raise

    def _place(self, info: TableInfo) -> tuple[BucketState, ...]:
        nodes = candidates(self.image)
        answering = self._tablets.answering(nodes) or nodes
        # A server that registers at the moment has no session that a bucket could begin in.
        ready = [node for node in answering if self._has_session(node.node_id)] or answering
        factor = info.property(table_options.TABLE_REPLICATION_FACTOR) or 1
        states = place(info.bucket_count, ready, self.image.leaders, factor)
        wals = {server: self._wal_of(server) for server in {state.leader for state in states}}
        return tuple(replace(state, wal=wals[state.leader]) for state in states)

    def _has_session(self, server_id: int) -> bool:
        try:
            self._wal_of(server_id)
        except LeaderNotAvailableError:
            return False
        return True

    async def _somewhere(self, create: Callable[[], Awaitable[T]]) -> T:
        """Create buckets, again at the other servers if one of those chosen turns out to be gone.

        The failed try has been undone. Each try leaves out one server more, so this ends.
        """
        while True:
            before = len(self._tablets.answering(self.image.tablets.values()))
            try:
                return await create()
            except NetworkError as e:
                left = len(self._tablets.answering(self.image.tablets.values()))
                if not 0 < left < before:
                    raise
                log.warning("created_elsewhere", reason=e.message, servers_left=left)

    def _table_drop(self, entry: TableEntry) -> records.CatalogChange:
        return records.drop_table(entry, self.image.partitions(entry.info.table_id).values())

    async def _create(
        self,
        take_id: Sequence[Op],
        home: Sequence[Op],
        creation: records.CatalogChange,
        gone: ImageChange,
    ) -> None:
        """Commit the creation of a table or partition.

        `gone` tells the cleaner of a large one that failed, which may have left something.
        """
        everything = [*take_id, *home, *creation.all]
        if fits_a_transaction(everything):
            await self.ledger.commit(everything)
            return
        try:
            await portions.create(self.ledger, take_id, home, creation)
        except Exception:
            self._changes.publish([gone])
            raise

    def _stops(self, entry: TableEntry) -> list[ReplicaStop]:
        """Stops for all buckets of a table and its partitions, while they are in the image."""
        table_id = entry.info.table_id
        stops = [
            _stop(TableBucket(table_id, None, i), state) for i, state in enumerate(entry.buckets)
        ]
        for partition in self.image.partitions(table_id).values():
            stops += [_stop(b, state) for _, b, state in partition_buckets(entry, partition)]
        return stops

    def _table_still(self, path: TablePath, table_id: int | None) -> TableEntry:
        table = self.image.partitioned_table(path)
        if table_id is not None and table.info.table_id != table_id:
            raise TableNotExistError(f"table '{path}' with id {table_id} does not exist any more")
        return table


def _stop(bucket: TableBucket, state: BucketState) -> ReplicaStop:
    return ReplicaStop(bucket, state.leader_epoch, True, state.replicas)


def _check_size(path: TablePath, descriptor: TableDescriptor) -> None:
    size = len(descriptor.to_json())
    if size > DESCRIPTOR_BYTES_MAX:
        raise _too_large(path, size)


def _too_large(path: TablePath, size: int) -> InvalidTableError:
    return InvalidTableError(
        f"the descriptor of table '{path}' has {size} bytes, at most {DESCRIPTOR_BYTES_MAX} "
        f"are allowed; use fewer columns or shorter comments and properties"
    )


def _check_database_size(name: str, descriptor: DatabaseDescriptor) -> None:
    size = len(descriptor.to_json())
    if size > DESCRIPTOR_BYTES_MAX:
        raise InvalidDatabaseError(
            f"the descriptor of database {name!r} has {size} bytes, at most "
            f"{DESCRIPTOR_BYTES_MAX} are allowed; use fewer or shorter properties"
        )
