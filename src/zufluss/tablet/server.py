"""The tablet server: replicas by bucket, and what keeps them healthy.

The coordinator tells it which tables exist (`update_metadata`), which buckets to serve
(`start_replicas`) and which to stop (`stop_replicas`); clients read and write through the
handlers in `service.py`. In one process with the coordinator these are plain calls; apart they
arrive as RPCs (`member.py`). Either way they run on the event-loop thread, which owns every log.

A bucket whose durable data is damaged is refused, and only that bucket: its requests are answered
with the reason, everything else is served (A7). One that waits for remote storage is tried again
(`reopen.py`).
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import structlog

from zufluss.cluster.image import (
    ClusterImage,
    ImageChange,
    TableEntry,
    TablePut,
)
from zufluss.cluster.producers import TableProducers
from zufluss.cluster.remote import BucketRemote, RemoteGateway
from zufluss.cluster.replicas import (
    KvSnapshotOffset,
    LakeOffsets,
    ReplicaAssignment,
    ReplicaStop,
)
from zufluss.config import options, table_options
from zufluss.config.load import Configuration
from zufluss.errors import (
    InvalidTableError,
    LogStorageError,
    NonPrimaryKeyTableError,
    SchemaNotExistError,
    UnknownTableOrBucketError,
    ZuflussError,
)
from zufluss.kv.table import KvTable
from zufluss.log.config import FlushMode, LogConfig
from zufluss.log.files import Files
from zufluss.log.holds import Holder
from zufluss.log.log import Log
from zufluss.log.manager import LogManager, log_directories, log_directory
from zufluss.log.segment import DELETED_SUFFIX
from zufluss.model.schema import Schema
from zufluss.model.table import PhysicalTablePath, TableBucket, TableInfo
from zufluss.record.arrow.project import Projector
from zufluss.record.batch.check import BatchChecker
from zufluss.remote.locations import Locations
from zufluss.remote.storage import RemoteStorage
from zufluss.replica.replica import Replica
from zufluss.tablet.fetch import Fetcher
from zufluss.tablet.identity import claim
from zufluss.replica.kv_host import KvHost
from zufluss.tablet.lookup import Lookups
from zufluss.tablet.produce import Producer
from zufluss.tablet.producers import Producers
from zufluss.tablet.put import Putter
from zufluss.tablet.remote.kv_snapshots import KvSnapshotter
from zufluss.tablet.remote.logs import RemoteLogs
from zufluss.tablet.remote.restore import Restorer, retained_from
from zufluss.tablet.reopen import Reopener, may_pass
from zufluss.tablet.scan.service import ScanService
from zufluss.tablet.scan.states import PinStates
from zufluss.tablet.undo import Undos

log = structlog.get_logger(__name__)

READER_THREADS = 4
"""Threads that bring cold pages into the page cache."""
BUCKETS_AT_A_TIME = 1000
"""Buckets that are gone through before the event loop gets to do something else."""
TIMEOUT_CHECK_SECONDS = 0.25
"""How often produce timeouts are looked at."""

BucketKey = tuple[int | None, int]
"""Partition id and bucket id inside a table."""
AllocateIds = Callable[[int, int, int], Awaitable[tuple[int, int]]]
"""Of a table id, a column id and a count: fresh ids, the first and the one after the last."""


class Refused(NamedTuple):
    """A bucket that cannot be served."""

    path: PhysicalTablePath
    """Whose bucket it is."""
    reason: ZuflussError
    """What a request for it is answered."""


class TableState:
    """What the hot paths need to know of a table."""

    def __init__(self, entry: TableEntry) -> None:
        self.info: TableInfo
        self.schemas: Mapping[int, Schema]
        self.projector: Projector
        self.kv: KvTable | None
        """What the buckets of a primary-key table need to know."""
        self.replicas: dict[BucketKey, Replica] = {}
        self.refused: dict[BucketKey, Refused] = {}
        """Buckets whose data is damaged, or lost and not restored yet."""
        self.update(entry)
        self.has_primary_key = self.info.has_primary_key
        self.checker = BatchChecker(self.find_schema, self.info.log_format)

    def update(self, entry: TableEntry) -> None:
        """The table is new, or was altered."""
        self.info, self.schemas = entry.info, entry.schemas
        self.tiered: bool = self.info.property(table_options.TABLE_DATALAKE_ENABLED)
        """Its data moves to the lake, and nothing expires before it is there."""
        self.projector = Projector(self.find_schema, self.info.schema)
        self.kv = KvTable(self.info, self.schemas) if self.info.has_primary_key else None

    def find_schema(self, schema_id: int) -> Schema | None:
        """A schema of the table, or None."""
        return self.schemas.get(schema_id)

    def schema(self, schema_id: int | None) -> Schema:
        """A schema of the table, the current one for None; SchemaNotExistError."""
        found = self.schemas.get(self.info.schema_id if schema_id is None else schema_id)
        if found is None:
            raise SchemaNotExistError(
                f"{self.info.path} has no schema {schema_id}; it has 1 to {self.info.schema_id}"
            )
        return found


class TabletServer:
    """Owns the replicas of this server."""

    def __init__(self, conf: Configuration, files: Files, clock_ms: Callable[[], int]) -> None:
        self.conf = conf
        self.files = files
        self.clock_ms = clock_ms
        self.loop = asyncio.get_running_loop()
        self.server_id = conf.get(options.TABLET_SERVER_ID)
        self.data_dir = Path(conf.get(options.DATA_DIR))
        self.image = ClusterImage()
        self.allocate_ids: AllocateIds
        """Asks the coordinator for ids of an auto-increment column; set by who starts the roles."""
        self.remote: RemoteStorage
        """Where remote files lie; set by who starts the roles, before `assign`."""
        self.gateway: RemoteGateway
        """Tells the coordinator of remote files; set by who starts the roles, before `assign`."""
        self.tables: dict[int, TableState] = {}
        self.readers = ThreadPoolExecutor(READER_THREADS, thread_name_prefix="zufluss-read")
        self.producer = Producer(self)
        self.fetcher = Fetcher(self)
        self.kv = KvHost(conf, self.data_dir, files, self.loop)
        self.putter = Putter(self)
        self.lookups = Lookups(self)
        self.remote_logs = RemoteLogs(self)
        self.snapshots = KvSnapshotter(self)
        self.pin_states = PinStates(self)
        self.scans = ScanService(self)
        self.producers = Producers()
        self.undos = Undos(self)
        self._restorer = Restorer(self)
        self._reopener = Reopener(self._open_again)
        flush = FlushMode(conf.get(options.ZUFLUSS_LOG_FLUSH))
        self.logs = LogManager(
            self.data_dir,
            files=files,
            flush=flush,
            on_durable=self._durable,
            on_failure=self._failed,
            flush_interval_ms=conf.get(options.ZUFLUSS_LOG_FLUSH_INTERVAL),
            checkpoint_interval_ms=conf.get(options.LOG_FLUSH_OFFSET_CHECKPOINT_INTERVAL),
        )
        self._acknowledge_written = flush is FlushMode.OS
        self._replica_of: dict[Log, Replica] = {}
        self._commit_scheduled = False
        self._started = False
        self._tasks: set[asyncio.Task[None]] = set()

    def claim(self, cluster_id: str) -> None:
        """Refuse a data directory that belongs to another server or cluster."""
        claim(self.files, self.data_dir, cluster_id, self.server_id)

    # -- what the coordinator says ----------------------------------------------------------

    async def assign(
        self,
        image: ClusterImage,
        replicas: Sequence[ReplicaAssignment],
        producers: Sequence[TableProducers] = (),
    ) -> None:
        """Take over this picture, hold exactly these buckets, delete every other on the disk.

        `producers` are all there are: a table that is not among them has none.
        """
        await self._reopener.end_all()
        self.image = image
        await self._fence(self.producers.replace(producers))
        wanted = {r.table_bucket for r in replicas}
        for replica in [*self._replica_of.values()]:
            if replica.bucket not in wanted:
                self._stop(replica, delete=True)
            replica.tiered_offset = None  # what we knew is from before; we are told again
        for table in [*self.tables.values()]:
            table.refused.clear()
            self._forget_if_empty(table)
        self._remove_others(replicas)
        for entry in image.tables():
            state = self.tables.get(entry.info.table_id)
            if state is not None:
                self._alter(state, entry)
        self.snapshots.ask_again()
        remotes = await self._remotes(replicas)
        for assignment in replicas:
            await self._start(assignment, remotes.get(assignment.table_bucket))
        if not self._started:
            self._started = True
            self.logs.started()
            self.spawn(self._expire_requests())
            self.spawn(self._expire_segments())
            self.spawn(self.remote_logs.run())
            self.spawn(self.scans.expire())
            self.snapshots.start()
            self._reopener.begin()

    async def update_metadata(self, changes: Sequence[ImageChange]) -> None:
        """Apply these changes to the picture of the cluster and to the tables served here."""
        self.image.apply(changes)
        for change in changes:
            if isinstance(change, TablePut):
                state = self.tables.get(change.entry.info.table_id)
                if state is not None:
                    self._alter(state, change.entry)
        self.producers.keep(lambda table_id: self.image.table_by_id(table_id) is not None)

    async def start_replicas(self, replicas: Sequence[ReplicaAssignment]) -> None:
        """Hold these buckets; raises the reason when one of them cannot be served."""
        await self._reopener.end(r.table_bucket for r in replicas)
        remotes = await self._remotes(replicas)
        for assignment in replicas:
            refused = await self._start(assignment, remotes.get(assignment.table_bucket))
            if refused is not None:
                raise refused

    async def stop_replicas(self, replicas: Sequence[ReplicaStop]) -> None:
        """Give these buckets up, and free their disk where it says delete."""
        await self._reopener.end(stop.table_bucket for stop in replicas)
        for stop in replicas:
            replica = self.find_replica(*stop.table_bucket)
            if replica is not None:
                self._stop(replica, delete=stop.delete)
            else:
                self._stop_refused(stop.table_bucket, delete=stop.delete)

    async def notify_lake_offsets(self, offsets: Sequence[LakeOffsets]) -> None:
        """Know how far these buckets got in the lake; buckets that are not here are passed over.

        The last word counts, also when it is a lower offset: that keeps more.
        """
        for each in offsets:
            replica = self.find_replica(*each.table_bucket)
            if replica is not None:
                replica.tiered_offset = each.log_end_offset
                replica.hold_for_lake(self.tables[each.table_bucket.table_id].tiered)

    async def notify_kv_snapshot_offset(self, offsets: Sequence[KvSnapshotOffset]) -> None:
        """Know from where on snapshots of these buckets need the changelog; the last word counts.

        Buckets that are not here are passed over.
        """
        for each in offsets:
            replica = self.find_replica(*each.table_bucket)
            if replica is not None and replica.kv is not None:
                replica.log.holds.set(Holder.SNAPSHOT, each.min_retain_offset)

    async def update_locations(self, locations: Locations) -> None:
        """Know where remote files may lie."""
        self.remote.update(locations)

    async def update_producers(self, tables: Sequence[TableProducers]) -> None:
        """Know the producers of tables; a version that is known already, or a newer one, stays.

        When this returns, no put that these do not allow is applied any more, not even one that
        arrived before.
        """
        await self._fence([each.table_id for each in tables if self.producers.update(each)])

    async def producer_idle_ms(self, table_id: int, numbers: Sequence[int]) -> list[int]:
        """How long ago producers wrote to a table here; -1 for never since the server started."""
        return self.producers.idle_ms(table_id, numbers)

    async def end_offsets(self, buckets: Sequence[TableBucket]) -> dict[TableBucket, int]:
        """Where the logs of buckets end for readers; raises why one is not here."""
        return {bucket: self.replica(*bucket).log.high_watermark for bucket in buckets}

    async def _fence(self, table_ids: Iterable[int]) -> None:
        """Have the buckets of tables know their producers, and the worker as well."""
        changed = [state for i in table_ids if (state := self.tables.get(i)) is not None]
        replicas = [r for state in changed for r in state.replicas.values() if r.kv is not None]
        for replica in replicas:
            replica.tablet.fence = self.producers.fence(replica.bucket.table_id)
        for state in changed:
            self.undos.forget_others(state.info.table_id)
        await self.kv.settled()
        for count, replica in enumerate(replicas, 1):
            self.hold_changelog(replica)
            if count % BUCKETS_AT_A_TIME == 0:
                await asyncio.sleep(0)

    def hold_changelog(self, replica: Replica) -> None:
        """Have retention spare what a producer may have to undo."""
        replica.log.holds.set(Holder.PRODUCER, self.producers.held_from(replica.bucket))

    async def _remotes(
        self, replicas: Sequence[ReplicaAssignment]
    ) -> Mapping[TableBucket, BucketRemote]:
        """What buckets that are to be opened have in remote storage."""
        buckets = [r.table_bucket for r in replicas if self.find_replica(*r.table_bucket) is None]
        return await self.gateway.bucket_remotes(buckets) if buckets else {}

    async def _start(
        self, assignment: ReplicaAssignment, remote: BucketRemote | None
    ) -> ZuflussError | None:
        """Open a bucket and lead it, or note why its data cannot be served.

        `remote` is what it has in remote storage, from where lost files are brought back.
        """
        state = self._state(assignment.table_bucket.table_id)
        problem = await self._open(state, assignment, remote)
        if problem is None:
            return None
        if may_pass(problem):
            self._reopener.add(assignment)
        return self._refuse(state, assignment, problem)

    async def _open(
        self, state: TableState, assignment: ReplicaAssignment, remote: BucketRemote | None
    ) -> Exception | None:
        """Open a bucket, unless it is, and lead it; or return why that is not possible."""
        bucket = assignment.table_bucket
        key = (bucket.partition_id, bucket.bucket_id)
        replica = state.replicas.get(key)
        if replica is None:
            try:
                await self._restorer.restore_log(assignment, remote)
                opened = self.logs.open_log(
                    assignment.physical_path, bucket, self._log_config(state.info), self.clock_ms()
                )
            except (ZuflussError, OSError) as e:
                return e
            replica = Replica(bucket, assignment.physical_path, opened, assignment.leader_epoch)
            replica.hold_for_lake(True)  # nothing expires while it comes up
            self.hold_changelog(replica)
            if state.kv is not None:
                opened.holds.set(Holder.SNAPSHOT, retained_from(remote))
                try:
                    earlier = await self._restorer.restore_state(replica, remote)
                    replica.kv = await self.kv.open(replica, state.kv, earlier)
                except (ZuflussError, OSError) as e:
                    self.logs.let_go(opened)
                    return e
            replica.hold_for_lake(state.tiered)
            if replica.kv is not None:
                replica.kv.fence = self.producers.fence(bucket.table_id)
                self.hold_changelog(replica)
            state.replicas[key] = replica
            self._replica_of[opened] = replica
            self.remote_logs.adopt(replica, remote)
            if replica.kv is not None:
                self.pin_states.adopt(replica)
        if replica.leader_epoch != assignment.leader_epoch:
            self.scans.end_bucket(bucket)
        replica.leader_epoch = replica.log.leader_epoch = assignment.leader_epoch
        return None

    async def _open_again(self, assignment: ReplicaAssignment) -> Exception | None:
        """Try to open a bucket that was refused; what is still wrong, if anything."""
        bucket = assignment.table_bucket
        state = self._state(bucket.table_id)
        key = (bucket.partition_id, bucket.bucket_id)
        try:
            remotes = await self._remotes([assignment])
        except ZuflussError as e:
            return e
        self.logs.allow(bucket)
        problem = await self._open(state, assignment, remotes.get(bucket))
        if problem is not None:
            self._note_refused(state, assignment, problem)
            return problem
        state.refused.pop(key, None)
        self.logs.settle(bucket)
        return None

    def _refuse(
        self, state: TableState, assignment: ReplicaAssignment, error: Exception
    ) -> ZuflussError:
        """Note that a bucket cannot be served, and why."""
        log.error("bucket_refused", bucket=str(assignment.table_bucket), reason=str(error))
        return self._note_refused(state, assignment, error)

    def _note_refused(
        self, state: TableState, assignment: ReplicaAssignment, error: Exception
    ) -> ZuflussError:
        bucket = assignment.table_bucket
        reason = LogStorageError(f"{assignment.physical_path} {bucket}: {error}")
        key = (bucket.partition_id, bucket.bucket_id)
        state.refused[key] = Refused(assignment.physical_path, reason)
        return reason

    def _state(self, table_id: int) -> TableState:
        state = self.tables.get(table_id)
        if state is None:
            entry = self.image.table_by_id(table_id)
            if entry is None:
                raise UnknownTableOrBucketError(f"table {table_id} is not in the metadata")
            state = self.tables[table_id] = TableState(entry)
        return state

    def _alter(self, state: TableState, entry: TableEntry) -> None:
        state.update(entry)
        config = self._log_config(entry.info)
        for replica in state.replicas.values():
            replica.log.config = config
            replica.hold_for_lake(state.tiered)
            if replica.kv is not None and state.kv is not None:
                replica.kv.table = state.kv

    def _stop(self, replica: Replica, *, delete: bool) -> None:
        bucket = replica.bucket
        state = self.tables[bucket.table_id]
        del state.replicas[bucket.partition_id, bucket.bucket_id]
        self._forget_if_empty(state)
        del self._replica_of[replica.log]
        self.remote_logs.forget(replica)
        self.snapshots.forget(bucket)
        self.scans.end_bucket(bucket)
        self.undos.end_bucket(replica)
        self.pin_states.forget(replica)
        try:
            if delete:
                self.logs.drop(replica.log)
            if replica.kv is not None:
                self.kv.stop(replica, delete=delete, then=self.logs.remove_empty_parents)
        except OSError as e:
            # The next start removes what the coordinator does not assign.
            log.error("log_not_removed", bucket=str(bucket), error=str(e))
        replica.release()

    def _stop_refused(self, bucket: TableBucket, *, delete: bool) -> None:
        state = self.tables.get(bucket.table_id)
        key = (bucket.partition_id, bucket.bucket_id)
        refused = None if state is None else state.refused.pop(key, None)
        if state is not None and refused is not None:
            self._forget_if_empty(state)
            if delete:
                self.logs.drop_refused(refused.path, bucket)
                self.kv.remove(refused.path, bucket)

    def _forget_if_empty(self, state: TableState) -> None:
        if not state.replicas and not state.refused:
            del self.tables[state.info.table_id]

    def _remove_others(self, replicas: Sequence[ReplicaAssignment]) -> None:
        """Remove what is left of buckets that were dropped while this server was away or died."""
        data_dir = self.data_dir
        wanted = {log_directory(data_dir, r.physical_path, r.table_bucket) for r in replicas}
        for directory in log_directories(data_dir):
            if directory not in wanted and directory.suffix != DELETED_SUFFIX:
                log.info("dropped_log_removed", directory=str(directory))
                self.files.remove_tree(directory)
                self.logs.remove_empty_parents(directory)
        states = {self.kv.directory(r.physical_path, r.table_bucket) for r in replicas}
        for directory in self.kv.remove_others(states):
            log.info("dropped_state_removed", directory=str(directory))
            self.logs.remove_empty_parents(directory)

    def _log_config(self, info: TableInfo) -> LogConfig:
        conf = self.conf
        ttl_ms = info.property(table_options.TABLE_LOG_TTL)
        local_ttl_ms = info.property(table_options.TABLE_LOG_LOCAL_TTL)
        return LogConfig(
            segment_bytes_max=conf.get(options.LOG_SEGMENT_FILE_SIZE),
            index_interval_bytes=conf.get(options.LOG_INDEX_INTERVAL_SIZE),
            index_bytes_max=conf.get(options.LOG_INDEX_FILE_SIZE),
            retention_rolls_active=conf.get(options.LOG_RETENTION_ROLL_ACTIVE_SEGMENT_ENABLED),
            ttl_ms=ttl_ms,
            local_segments=info.property(table_options.TABLE_LOG_TIERED_LOCAL_SEGMENTS),
            local_ttl_ms=ttl_ms if local_ttl_ms is None else local_ttl_ms,
            writer_expiry_ms=conf.get(options.SERVER_WRITER_ID_EXPIRATION_TIME),
        )

    def remote_home(self, bucket: TableBucket) -> int | None:
        """The id of the location that was chosen for a bucket's table or partition."""
        holder = self.image.holder(bucket)
        return None if holder is None else holder.remote_location

    # -- finding buckets --------------------------------------------------------------------

    def find_replica(
        self, table_id: int, partition_id: int | None, bucket_id: int
    ) -> Replica | None:
        """The replica of a bucket, if it is here."""
        state = self.tables.get(table_id)
        return None if state is None else state.replicas.get((partition_id, bucket_id))

    def replica(self, table_id: int, partition_id: int | None, bucket_id: int) -> Replica:
        """The replica of a bucket, or why there is none."""
        found = self.find_replica(table_id, partition_id, bucket_id)
        if found is None:
            raise self.why_not(table_id, partition_id, bucket_id)
        return found

    def kv_replica(self, table_id: int, partition_id: int | None, bucket_id: int) -> Replica:
        """The replica of a bucket of a primary-key table; a log table is refused."""
        replica = self.replica(table_id, partition_id, bucket_id)
        if replica.kv is None:
            raise NonPrimaryKeyTableError(
                f"{replica.path} has no primary key: append to it and scan its log"
            )
        return replica

    def why_not(self, table_id: int, partition_id: int | None, bucket_id: int) -> ZuflussError:
        """Why a bucket cannot be written as a log, or is not here."""
        bucket = TableBucket(table_id, partition_id, bucket_id)
        state = self.tables.get(table_id)
        if state is not None and (refused := state.refused.get((partition_id, bucket_id))):
            return refused.reason
        if state is None or (partition_id, bucket_id) not in state.replicas:
            return UnknownTableOrBucketError(
                f"{bucket} is not on this server; refresh the metadata"
            )
        return InvalidTableError(
            f"{state.info.path} has a primary key: the server writes its log, the changelog; "
            "write rows with PUT_KV"
        )

    # -- durability -------------------------------------------------------------------------

    def appended(
        self, replica: Replica, end_offset: int, view: memoryview, start: int, end: int
    ) -> None:
        """`view[start:end]` is in the log of the replica: acknowledge it when the mode says so."""
        if self._acknowledge_written:
            replica.advance(end_offset)
            return
        if self.logs.commit(replica.log, end_offset, view[start:end]):
            replica.advance(end_offset)
        elif not self._commit_scheduled:
            self._commit_scheduled = True
            self.loop.call_soon(self._end_of_turn)

    def _end_of_turn(self) -> None:
        self._commit_scheduled = False
        self.logs.schedule()

    def _durable(self, done: list[tuple[Log, int]]) -> None:
        for synced, end_offset in done:
            replica = self._replica_of.get(synced)
            if replica is not None:
                replica.advance(end_offset)

    def _failed(self, broken: Log, error: Exception) -> None:
        replica = self._replica_of.get(broken)
        if replica is not None:
            replica.fail(
                f"the disk refused a sync ({error}); the bucket takes no more writes until the "
                "server is restarted"
            )

    # -- life -------------------------------------------------------------------------------

    def spawn(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """Run something beside the requests."""
        task = self.loop.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def _expire_requests(self) -> None:
        await self._again_and_again(
            TIMEOUT_CHECK_SECONDS, lambda: self._expire_pending(self.loop.time())
        )

    def _expire_pending(self, now: float) -> None:
        self.producer.expire(now)
        self.putter.expire(now)

    async def _expire_segments(self) -> None:
        await self._again_and_again(
            self.conf.get(options.LOG_RETENTION_CHECK_INTERVAL) / 1000,
            self._expire_data,
        )

    def _expire_data(self) -> None:
        now_ms = self.clock_ms()
        self.logs.expire(now_ms)
        self.kv.flush_held_back()
        self.kv.forget_expired_writers(now_ms)

    async def _again_and_again(self, seconds: float, work: Callable[[], object]) -> None:
        """A failure is logged and ends nothing: the next round may well succeed."""
        while True:
            await asyncio.sleep(seconds)
            try:
                work()
            except Exception:
                log.exception("periodic_work_failed")

    async def close(self) -> None:
        """Sync and close every log; the next start needs no recovery."""
        for task in tuple(self._tasks):
            task.cancel()
        await self._reopener.stop()
        await self.snapshots.stop()
        self.scans.stop()
        await self.undos.stop()
        await self.pin_states.stop()
        await self.kv.close()
        await self.logs.close()
        self.readers.shutdown(wait=False)
