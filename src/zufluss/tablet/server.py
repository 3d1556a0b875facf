"""The tablet server: orders from the coordinator, periodic work, and the wiring of its parts.

The coordinator tells it which tables exist (`update_metadata`), which buckets to serve
(`start_replicas`) and which to stop (`stop_replicas`). In one process with the coordinator these
are plain calls; apart they arrive as RPCs (`link.py`). Either way they run on the event-loop
thread, which owns every log.

Clients read and write through the handlers that `register` attaches. Each of them gets the
directory of buckets (`buckets.py`) and what else it needs; none of them knows the server. The life
of a bucket is that of its `Replica` (`replica/replica.py`). A bucket that waits for remote storage
is tried again (`reopen.py`).
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import structlog

from zufluss.cluster.image import ClusterImage, ImageChange, TablePut
from zufluss.cluster.producers import TableProducers
from zufluss.cluster.remote import BucketRemote, RemoteGateway
from zufluss.cluster.replicas import (
    KvSnapshotOffset,
    LakeOffsets,
    ReplicaAssignment,
    ReplicaStop,
)
from zufluss.cluster.token_service import MayRead, everybody
from zufluss.config import options
from zufluss.config.load import Configuration
from zufluss.errors import ZuflussError
from zufluss.log.files import Files
from zufluss.log.holds import Holder
from zufluss.log.manager import log_directories, log_directory
from zufluss.log.segment import DELETED_SUFFIX
from zufluss.model.table import TableBucket
from zufluss.net.services import Services
from zufluss.remote.locations import Locations
from zufluss.remote.storage import RemoteStorage
from zufluss.replica.kv_host import KvHost
from zufluss.replica.replica import Replica, ReplicaHost, ReplicaSettings
from zufluss.tablet.buckets import Buckets
from zufluss.tablet.changelog_reader import ChangelogReader
from zufluss.tablet.contention import Contention
from zufluss.tablet.durability import Durability
from zufluss.tablet.fetch import FetchHandler
from zufluss.tablet.identity import claim
from zufluss.tablet.lookup import LookupHandler
from zufluss.tablet.produce import ProduceHandler
from zufluss.tablet.producers import Producers
from zufluss.tablet.put import AllocateIds, PutHandler
from zufluss.tablet.remote.context import RemoteContext
from zufluss.tablet.remote.copy import BucketCopy
from zufluss.tablet.remote.kv_snapshots import KvSnapshotter
from zufluss.tablet.remote.logs import RemoteLogs
from zufluss.tablet.remote.restore import Restorer
from zufluss.tablet.reopen import Reopener, may_pass
from zufluss.tablet.scan.rebuild import Rebuilder
from zufluss.tablet.scan.service import ScanService
from zufluss.tablet.scan.sessions import ScanSessions
from zufluss.tablet.scan.states import PinStates
from zufluss.tablet.service import TabletService
from zufluss.tablet.tasks import Tasks
from zufluss.tablet.undo import Undos
from zufluss.wire.api import ApiKey

log = structlog.get_logger(__name__)

READER_THREADS = 4
"""Threads that bring cold pages into the page cache."""
BUCKETS_AT_A_TIME = 1000
"""Buckets that are gone through before the event loop gets to do something else."""
TIMEOUT_CHECK_SECONDS = 0.25
"""How often the timeouts of produce and put requests are checked."""

OpenReplica = Callable[
    [ReplicaHost, ReplicaAssignment, ReplicaSettings, BucketCopy], Awaitable[Replica]
]
"""`Replica.open` or `Replica.reopen`."""


class TabletServer:
    """Carries out the coordinator's orders."""

    def __init__(
        self,
        conf: Configuration,
        files: Files,
        clock_ms: Callable[[], int],
        storage: RemoteStorage,
        gateway: RemoteGateway,
        allocate_ids: AllocateIds,
        *,
        may_read: MayRead = everybody,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        """`gateway` and `allocate_ids` reach the coordinator; `monotonic` is the age of pins."""
        self._conf = conf
        self._files = files
        self._clock_ms = clock_ms
        self.server_id = conf.get(options.TABLET_SERVER_ID)
        self.data_dir = Path(conf.get(options.DATA_DIR))
        self.storage = storage
        self.buckets = buckets = Buckets(conf)
        self.producers = Producers()
        self._tasks = tasks = Tasks()
        self._readers = ThreadPoolExecutor(READER_THREADS, thread_name_prefix="zufluss-read")
        durability = Durability(conf, files, buckets)
        self.logs = durability.logs
        self.kv = KvHost(conf, self.data_dir, files, asyncio.get_running_loop())
        contention = Contention()

        self.produce = ProduceHandler(buckets, durability, clock_ms)
        self.put = PutHandler(
            conf, buckets, durability, self.kv, contention, tasks, clock_ms, allocate_ids
        )
        self.lookup = LookupHandler(buckets, self.kv, self.put, contention, tasks)
        self.service = TabletService(buckets, self.lookup, self._readers, clock_ms)

        self._remote = remote = RemoteContext(buckets, storage, gateway, files)
        self.remote_logs = RemoteLogs(conf, remote, self.logs, tasks, clock_ms)
        self.fetch = FetchHandler(buckets, self.remote_logs, self._readers, tasks)
        self.snapshots = KvSnapshotter(conf, remote, self.kv)
        self._restorer = Restorer(remote, self.logs, self.kv)

        reader = ChangelogReader(buckets, self._restorer, self._readers)
        self.undos = Undos(remote, self.put, self.producers, reader, clock_ms)
        rebuilder = Rebuilder(conf, remote, self._restorer, reader)
        self.pin_states = PinStates(conf, buckets, self.kv, rebuilder, contention, tasks)
        self.scans = ScanService(conf, buckets, self.pin_states, tasks, may_read, monotonic)

        followers = (self.remote_logs, self.snapshots, self.scans, self.undos, self.pin_states)
        self._host = ReplicaHost(
            self.logs,
            self.kv,
            self.producers,
            clock_ms,
            opened=(self.pin_states.opened,),
            closed=tuple(follower.closed for follower in followers),
        )
        self._reopener = Reopener(self._reopen)
        self._started = False

    @property
    def image(self) -> ClusterImage:
        """The cluster as the coordinator described it last."""
        return self.buckets.image

    def claim(self, cluster_id: str) -> None:
        """Refuse a data directory that belongs to another server or cluster."""
        claim(self._files, self.data_dir, cluster_id, self.server_id)

    def register(self, services: Services) -> None:
        """Attach every handler of this role."""
        services.register_raw(ApiKey.PRODUCE_LOG, self.produce.handle)
        services.register_raw(ApiKey.FETCH_LOG, self.fetch.handle)
        services.register_raw(ApiKey.PUT_KV, self.put.handle)
        services.register_raw(ApiKey.LOOKUP, self.lookup.handle)
        services.register(ApiKey.PREFIX_LOOKUP, self.lookup.prefix_lookup)
        self.service.register(services)
        self.scans.register(services)
        ScanSessions(self.scans).register(services)
        self.undos.register(services)

    # -- orders of the coordinator ----------------------------------------------------------

    async def assign(
        self,
        image: ClusterImage,
        replicas: Sequence[ReplicaAssignment],
        producers: Sequence[TableProducers] = (),
    ) -> None:
        """Take over this picture, hold exactly these buckets, delete every other on the disk.

        `producers` are complete: a table without an entry has no producers.
        """
        await self._reopener.end_all()
        self.buckets.image = image
        await self._fence(self.producers.replace(producers))
        assigned = {assignment.table_bucket for assignment in replicas}
        for replica in self.buckets.replicas():
            if replica.bucket not in assigned:
                self._close(replica, delete=True)
            else:
                replica.lake_reached(None)  # the coordinator tells it again
        self.buckets.forget_all_refused()
        self._remove_others(replicas)
        for entry in image.tables():
            self.buckets.alter(entry)
        self.snapshots.ask_again()
        remotes = await self._remotes(replicas)
        for assignment in replicas:
            await self._start(assignment, remotes.get(assignment.table_bucket))
        if not self._started:
            self._started = True
            self._begin_periodic_work()

    async def update_metadata(self, changes: Sequence[ImageChange]) -> None:
        """Apply these changes to the picture of the cluster and to the tables served here."""
        self.image.apply(changes)
        for change in changes:
            if isinstance(change, TablePut):
                self.buckets.alter(change.entry)
        self.producers.keep(lambda table_id: self.image.table_by_id(table_id) is not None)

    async def start_replicas(self, replicas: Sequence[ReplicaAssignment]) -> None:
        """Hold these buckets; raises the reason when one of them cannot be served."""
        await self._reopener.end(assignment.table_bucket for assignment in replicas)
        remotes = await self._remotes(replicas)
        for assignment in replicas:
            refusal = await self._start(assignment, remotes.get(assignment.table_bucket))
            if refusal is not None:
                raise refusal

    async def stop_replicas(self, replicas: Sequence[ReplicaStop]) -> None:
        """Give these buckets up, and free their disk where it says delete."""
        await self._reopener.end(stop.table_bucket for stop in replicas)
        for stop in replicas:
            replica = self.buckets.find(*stop.table_bucket)
            if replica is not None:
                self._close(replica, delete=stop.delete)
                continue
            refused = self.buckets.forget_refused(stop.table_bucket)
            if refused is not None and stop.delete:
                self._host.remove(refused.path, stop.table_bucket)

    async def notify_lake_offsets(self, offsets: Sequence[LakeOffsets]) -> None:
        """Know how far these buckets got in the lake; buckets that are not here are passed over.

        The last offset counts, also when it is lower than the one before: more is kept then.
        """
        for each in offsets:
            replica = self.buckets.find(*each.table_bucket)
            if replica is not None:
                replica.lake_reached(each.log_end_offset)

    async def notify_kv_snapshot_offset(self, offsets: Sequence[KvSnapshotOffset]) -> None:
        """Know from which offset on the snapshots of these buckets need the changelog.

        The last offset counts. Buckets that are not here are passed over.
        """
        for each in offsets:
            replica = self.buckets.find(*each.table_bucket)
            if replica is not None and replica.kv is not None:
                replica.log.holds.set(Holder.SNAPSHOT, each.min_retain_offset)

    async def update_locations(self, locations: Locations) -> None:
        """Know where remote files may lie."""
        self.storage.update(locations)

    async def update_producers(self, tables: Sequence[TableProducers]) -> None:
        """Know the producers of tables, unless the same or a newer version is known already.

        When this returns, no put that these producers do not allow is applied any more, not even
        one that arrived earlier.
        """
        await self._fence([each.table_id for each in tables if self.producers.update(each)])

    async def producer_idle_ms(self, table_id: int, numbers: Sequence[int]) -> list[int]:
        """How long ago producers wrote to a table here; -1 for never since the server started."""
        return self.producers.idle_ms(table_id, numbers)

    async def end_offsets(self, buckets: Sequence[TableBucket]) -> dict[TableBucket, int]:
        """The high watermarks of buckets; raises why one of them is not here."""
        return {bucket: self.buckets.replica(*bucket).log.high_watermark for bucket in buckets}

    async def _fence(self, table_ids: Iterable[int]) -> None:
        """Apply the producers of tables to their buckets, and wait until the worker follows."""
        tables = self.buckets.tables
        changed = [tables[table_id] for table_id in table_ids if table_id in tables]
        replicas = [r for table in changed for r in table.replicas.values() if r.kv is not None]
        for replica in replicas:
            replica.tablet.fence = self.producers.fence(replica.bucket.table_id)
        for table in changed:
            self.undos.forget_others(table.info.table_id)
        await self.kv.settled()
        for count, replica in enumerate(replicas, 1):
            replica.hold_for_producers()
            if count % BUCKETS_AT_A_TIME == 0:
                await asyncio.sleep(0)

    # -- buckets ----------------------------------------------------------------------------

    async def _remotes(
        self, replicas: Sequence[ReplicaAssignment]
    ) -> Mapping[TableBucket, BucketRemote]:
        """What the coordinator knows of the remote files of buckets that are to be opened."""
        buckets = [r.table_bucket for r in replicas if self.buckets.find(*r.table_bucket) is None]
        return await self._remote.gateway.bucket_remotes(buckets) if buckets else {}

    async def _start(
        self, assignment: ReplicaAssignment, remote: BucketRemote | None
    ) -> ZuflussError | None:
        """Open a bucket unless it is open, and lead it; returns why it cannot be served.

        `remote` is what remote storage has of the bucket, from where lost files are brought back.
        """
        try:
            await self._open(assignment, remote, Replica.open)
        except (ZuflussError, OSError) as e:
            bucket = str(assignment.table_bucket)
            log.error("bucket_refused", bucket=bucket, reason=str(e))
            if may_pass(e):
                self._reopener.add(assignment)
            return self.buckets.refuse(assignment, e)
        return None

    async def _reopen(self, assignment: ReplicaAssignment) -> Exception | None:
        """Try to open a bucket that was refused; returns why that is still not possible."""
        try:
            remotes = await self._remotes([assignment])
        except ZuflussError as e:
            return e
        try:
            await self._open(assignment, remotes.get(assignment.table_bucket), Replica.reopen)
        except (ZuflussError, OSError) as e:
            self.buckets.refuse(assignment, e)
            return e
        return None

    async def _open(
        self,
        assignment: ReplicaAssignment,
        remote: BucketRemote | None,
        open_replica: OpenReplica,
    ) -> None:
        replica = self.buckets.find(*assignment.table_bucket)
        if replica is not None:
            if replica.leader_epoch != assignment.leader_epoch:
                self.scans.closed(replica)
            replica.lead(assignment.leader_epoch)
            return
        settings = self.buckets.table(assignment.table_bucket.table_id).settings
        copy = BucketCopy(self._restorer, self.remote_logs, assignment, remote)
        self.buckets.add(await open_replica(self._host, assignment, settings, copy))

    def _close(self, replica: Replica, *, delete: bool) -> None:
        self.buckets.remove(replica)
        replica.close(delete=delete)

    def _remove_others(self, replicas: Sequence[ReplicaAssignment]) -> None:
        """Remove files of buckets that were dropped while this server was away or died."""
        data_dir = self.data_dir
        assigned = {log_directory(data_dir, r.physical_path, r.table_bucket) for r in replicas}
        for directory in log_directories(data_dir):
            if directory not in assigned and directory.suffix != DELETED_SUFFIX:
                log.info("dropped_log_removed", directory=str(directory))
                self._files.remove_tree(directory)
                self.logs.remove_empty_parents(directory)
        states = {self.kv.directory(r.physical_path, r.table_bucket) for r in replicas}
        for directory in self.kv.remove_others(states):
            log.info("dropped_state_removed", directory=str(directory))
            self.logs.remove_empty_parents(directory)

    # -- periodic work ----------------------------------------------------------------------

    def _begin_periodic_work(self) -> None:
        conf, tasks = self._conf, self._tasks
        self.logs.started()
        tasks.repeat(TIMEOUT_CHECK_SECONDS, self._expire_requests)
        retention_seconds = conf.get(options.LOG_RETENTION_CHECK_INTERVAL) / 1000
        tasks.repeat(retention_seconds, self._expire_data)
        scanner_seconds = conf.get(options.KV_SCANNER_EXPIRATION_INTERVAL) / 1000
        tasks.repeat(scanner_seconds, self.scans.pins.sweep)
        tasks.spawn(self.remote_logs.run())
        self.snapshots.start()
        self._reopener.begin()

    def _expire_requests(self) -> None:
        now = asyncio.get_running_loop().time()
        self.produce.expire(now)
        self.put.expire(now)

    def _expire_data(self) -> None:
        now_ms = self._clock_ms()
        self.logs.expire(now_ms)
        self.kv.flush_held_back()
        self.kv.forget_expired_writers(now_ms)

    async def close(self) -> None:
        """Sync and close every log; the next start needs no recovery."""
        self._tasks.cancel()
        await self._reopener.stop()
        await self.snapshots.stop()
        self.scans.stop()
        await self.undos.stop()
        await self.pin_states.stop()
        await self.kv.close()
        await self.logs.close()
        self._readers.shutdown(wait=False)
