"""The directory of the buckets on this server: tables, open replicas, and refused buckets.

Every request handler finds its bucket here. `TabletServer` adds and removes buckets as the
coordinator orders; nobody else changes the directory.

A bucket whose durable data is damaged is refused, and only that bucket: its requests are answered
with the reason, everything else is served (A7). A bucket that failed for a reason that may pass is
refused while the server opens it again (`reopen.py`): the answer is retriable and tells since when,
how often it was tried, and why. A bucket that another server leads is answered with
NOT_LEADER_OR_FOLLOWER and the leader, as Fluss does: the client has old metadata. One that this
server leads and has not opened yet is answered with LEADER_NOT_AVAILABLE.

Belongs to the event loop.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from datetime import UTC, datetime
from functools import partial
from typing import NamedTuple

from zufluss.cluster.image import ClusterImage, PartitionEntry, TableEntry
from zufluss.cluster.replicas import ReplicaAssignment
from zufluss.config import options, table_options
from zufluss.config.load import Configuration
from zufluss.errors import (
    InvalidTableError,
    LeaderNotAvailableError,
    LogStorageError,
    NonPrimaryKeyTableError,
    NotLeaderError,
    SchemaNotExistError,
    UnknownTableOrBucketError,
    ZuflussError,
    reason_of,
)
from zufluss.kv.table import KvTable
from zufluss.log.config import LogConfig
from zufluss.log.log import Log
from zufluss.model.schema import Schema
from zufluss.model.table import PhysicalTablePath, TableBucket, TableInfo, unknown_table
from zufluss.pacing import aside
from zufluss.record.arrow.project import Projector
from zufluss.record.batch.check import BatchChecker
from zufluss.replica.replica import Replica, ReplicaSettings
from zufluss.tablet.reopen import may_pass
from zufluss.tablet.shared.lease import LookupLease

BucketKey = tuple[int | None, int]
"""Partition id and bucket id inside a table."""


class RefusedBucket(NamedTuple):
    """A bucket that cannot be served."""

    bucket: TableBucket
    """The bucket."""
    path: PhysicalTablePath
    """The table or partition that the bucket belongs to."""
    problem: Exception
    """Why it could not be opened the last time."""
    recovering: bool
    """Whether the server tries to open it again by itself."""
    since_ms: int
    """When it was refused first."""
    attempts: int = 0
    """How often the server tried to open it since."""

    @property
    def reason(self) -> ZuflussError:
        """The answer to every request for the bucket."""
        if isinstance(self.problem, LeaderNotAvailableError):
            return self.problem
        text = f"{self.bucket.named(self.path)}: {reason_of(self.problem)}"
        if self.recovering:
            since = datetime.fromtimestamp(self.since_ms / 1000, UTC).isoformat(" ", "seconds")
            text += f" [recovering since {since}, tried {self.attempts} times; try again later]"
        if isinstance(self.problem, NotLeaderError):
            return NotLeaderError(text)  # clients ask who leads it
        return LogStorageError(text)


class TableState:
    """What the hot paths need to know of a table."""

    def __init__(self, entry: TableEntry, conf: Configuration) -> None:
        self._conf = conf
        self.info: TableInfo
        self.schemas: Mapping[int, Schema]
        self.projector: Projector
        self.settings: ReplicaSettings
        self.replicas: dict[BucketKey, Replica] = {}
        self.refused: dict[BucketKey, RefusedBucket] = {}
        """Buckets whose data is damaged, or lost and not restored yet."""
        self.update(entry, self.settings_of(entry))
        self.has_primary_key = self.info.has_primary_key
        self.checker = BatchChecker(self.find_schema, self.info.log_format)

    def update(self, entry: TableEntry, settings: ReplicaSettings) -> None:
        """The table is new, or was altered; `settings` are those of the entry."""
        self.info, self.schemas, self.settings = entry.info, entry.schemas, settings
        self.projector = Projector(self.find_schema, entry.info.schema)

    def settings_of(self, entry: TableEntry) -> ReplicaSettings:
        """The settings of the table's buckets under an entry; takes long for many columns."""
        info = entry.info
        return ReplicaSettings(
            LogConfig.of(self._conf, info),
            info.property(table_options.TABLE_DATALAKE_ENABLED),
            KvTable(info, entry.schemas) if info.has_primary_key else None,
        )

    def find_schema(self, schema_id: int) -> Schema | None:
        """A schema of the table, or None."""
        return self.schemas.get(schema_id)

    def schema(self, schema_id: int | None) -> Schema:
        """A schema of the table, the current one for None; `SchemaNotExistError`."""
        schema = self.schemas.get(self.info.schema_id if schema_id is None else schema_id)
        if schema is None:
            raise SchemaNotExistError(
                f"{self.info.path} has no schema {schema_id}; it has 1 to {self.info.schema_id}"
            )
        return schema


class Buckets:
    """The buckets on this server."""

    def __init__(self, conf: Configuration) -> None:
        self._conf = conf
        self._server_id = conf.get(options.TABLET_SERVER_ID)
        self.image = ClusterImage()
        """The cluster as the coordinator described it last."""
        self.tables: dict[int, TableState] = {}
        """Tables that have a bucket here, open or refused."""
        self.by_log: dict[Log, Replica] = {}
        """The open replicas."""
        self.is_followed: Callable[[TableBucket], bool] = lambda bucket: False
        """Whether this server is a standby of a bucket, which has its files open."""
        self.lease: LookupLease | None = None
        """Until when the present state may be read here; None where no other server can lead."""

    # -- finding ----------------------------------------------------------------------------

    def find(self, table_id: int, partition_id: int | None, bucket_id: int) -> Replica | None:
        """The replica of a bucket, None if it is not open here."""
        table = self.tables.get(table_id)
        return None if table is None else table.replicas.get((partition_id, bucket_id))

    def replica(self, table_id: int, partition_id: int | None, bucket_id: int) -> Replica:
        """The replica of a bucket; raises the reason if there is none."""
        replica = self.find(table_id, partition_id, bucket_id)
        if replica is None:
            raise self.why_not(table_id, partition_id, bucket_id)
        return replica

    def kv_replica(self, table_id: int, partition_id: int | None, bucket_id: int) -> Replica:
        """The replica of a bucket of a primary-key table; a log table is refused."""
        replica = self.replica(table_id, partition_id, bucket_id)
        if replica.kv is None:
            raise NonPrimaryKeyTableError(
                f"{replica.path} has no primary key: append to it and scan its log"
            )
        return replica

    def check_present(self) -> None:
        """Raise unless what is here is the present state, and no other server can lead by now."""
        if self.lease is not None:
            self.lease.check()

    def serves(self, replica: Replica) -> bool:
        """Whether this replica is still the one of its bucket."""
        return self.find(*replica.bucket) is replica

    def why_not(self, table_id: int, partition_id: int | None, bucket_id: int) -> ZuflussError:
        """Why a bucket cannot be written as a log, or is not here."""
        bucket = TableBucket(table_id, partition_id, bucket_id)
        table = self.tables.get(table_id)
        if table is not None and (refused := table.refused.get((partition_id, bucket_id))):
            return refused.reason
        if table is None or (partition_id, bucket_id) not in table.replicas:
            leader = self._leader(bucket)
            if leader == self._server_id:
                return LeaderNotAvailableError(
                    f"{self.name_of(bucket)} is not open yet, or not any more; try again"
                )
            if leader is not None:
                return NotLeaderError(
                    f"{self.name_of(bucket)} is led by tablet server {leader}, this is tablet "
                    f"server {self._server_id}; refresh the metadata"
                )
            return UnknownTableOrBucketError(
                f"{self.name_of(bucket)} is not on this server; refresh the metadata"
            )
        return InvalidTableError(
            f"{table.info.path} has a primary key: the server writes its log, the changelog; "
            "write rows with PUT_KV"
        )

    def is_elsewhere(self, bucket: TableBucket) -> bool:
        """Whether another server leads a bucket, which is neither open nor being opened here."""
        table = self.tables.get(bucket.table_id)
        key = (bucket.partition_id, bucket.bucket_id)
        if table is not None and (key in table.replicas or key in table.refused):
            return False
        return self._leader(bucket) not in (None, self._server_id)

    def is_away(self, bucket: TableBucket) -> bool:
        """Whether this server neither leads nor follows a bucket, and has no file of it open."""
        if self.is_followed(bucket):
            return False
        return self.is_elsewhere(bucket) or self._leader(bucket) is None

    def forget_unused(self, table_id: int) -> None:
        """Forget the state of a table that has no bucket here."""
        table = self.tables.get(table_id)
        if table is not None:
            self._forget_if_empty(table)

    def _leader(self, bucket: TableBucket) -> int | None:
        """The server that leads a bucket; None if there is no such bucket."""
        holder = self.image.holder(bucket)
        if isinstance(holder, PartitionEntry) and holder.table_id != bucket.table_id:
            return None
        leader = self.image.leader(bucket)
        return None if leader is None else leader[0]

    def name_of(self, bucket: TableBucket) -> str:
        """The bucket for messages: `fluss.orders, bucket 2`; ids where a name is unknown."""
        return self.image.name_of(bucket)

    def replicas(self) -> Iterator[Replica]:
        """Every open replica."""
        return iter([*self.by_log.values()])

    # -- changing ---------------------------------------------------------------------------

    async def prepare(self, table_id: int) -> None:
        """Make the state that `table` will ask for, in a thread if the table has many columns."""
        entry = self.image.table_by_id(table_id)
        if table_id in self.tables or entry is None:
            return
        state = await aside(len(entry.table_json), lambda: TableState(entry, self._conf))
        if table_id not in self.tables and self.image.table_by_id(table_id) is entry:
            self.tables[table_id] = state

    def table(self, table_id: int) -> TableState:
        """The state of a table that gets a bucket here, new if it has none yet."""
        table = self.tables.get(table_id)
        if table is None:
            entry = self.image.table_by_id(table_id)
            if entry is None:
                raise UnknownTableOrBucketError(f"{unknown_table(table_id)} is not in the metadata")
            table = self.tables[table_id] = TableState(entry, self._conf)
        return table

    async def alter(self, entry: TableEntry) -> None:
        """Apply new properties or a new schema of a table; passed over if no bucket is here.

        What takes long for many columns is done in a thread. An entry that the image has replaced
        meanwhile is passed over, too: the change that replaced it is applied by its own call.
        """
        table_id = entry.info.table_id
        table = self.tables.get(table_id)
        if table is None:
            return
        settings = await aside(len(entry.table_json), partial(table.settings_of, entry))
        if self.tables.get(table_id) is table and self.image.table_by_id(table_id) is entry:
            table.update(entry, settings)
            for replica in table.replicas.values():
                replica.alter(table.settings)

    def add(self, replica: Replica) -> None:
        """A replica was opened; a refusal of its bucket is over."""
        bucket = replica.bucket
        table = self.table(bucket.table_id)
        key = (bucket.partition_id, bucket.bucket_id)
        replica.alter(table.settings)  # the table may have changed while the bucket came up
        self.by_log[replica.log] = replica
        table.replicas[key] = replica
        table.refused.pop(key, None)

    def remove(self, replica: Replica) -> None:
        """A replica is about to be closed."""
        bucket = replica.bucket
        table = self.tables[bucket.table_id]
        del table.replicas[bucket.partition_id, bucket.bucket_id]
        del self.by_log[replica.log]
        self._forget_if_empty(table)

    def refuse(
        self, assignment: ReplicaAssignment, problem: Exception, now_ms: int
    ) -> ZuflussError:
        """Note why a bucket cannot be served; returns the answer to its requests."""
        bucket, path = assignment.table_bucket, assignment.physical_path
        refused = self.table(bucket.table_id).refused
        key = (bucket.partition_id, bucket.bucket_id)
        entry = RefusedBucket(bucket, path, problem, may_pass(problem), now_ms)
        if (earlier := refused.get(key)) is not None:
            entry = entry._replace(since_ms=earlier.since_ms, attempts=earlier.attempts + 1)
        refused[key] = entry
        return entry.reason

    def refused(self) -> Iterator[RefusedBucket]:
        """Every bucket that is refused."""
        return (refused for table in self.tables.values() for refused in table.refused.values())

    def forget_refused(self, bucket: TableBucket) -> RefusedBucket | None:
        """Forget that a bucket was refused; returns what was known of it."""
        table = self.tables.get(bucket.table_id)
        if table is None:
            return None
        refused = table.refused.pop((bucket.partition_id, bucket.bucket_id), None)
        self._forget_if_empty(table)
        return refused

    def forget_all_refused(self) -> None:
        """Forget every refusal: all buckets are assigned anew."""
        for table in [*self.tables.values()]:
            table.refused.clear()
            self._forget_if_empty(table)

    def _forget_if_empty(self, table: TableState) -> None:
        if not table.replicas and not table.refused:
            del self.tables[table.info.table_id]
