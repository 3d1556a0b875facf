"""The tablet server: orders from the coordinator, periodic work, and the wiring of its parts.

The coordinator tells the server which tables exist (`update_metadata`), which buckets to serve
(`start_replicas`) and which to stop (`stop_replicas`). In one process with the coordinator these
are plain calls; apart they arrive as RPCs (`link.py`). Either way they run on the event-loop
thread, which owns every log.

Clients read and write through the handlers that `register` attaches. Each of them gets the
directory of buckets (`buckets.py`) and what else it needs; none of them knows the server. Buckets
are opened and closed by `assignments.py`; the life of one bucket is that of its `Replica`
(`replica/replica.py`).
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterable, Sequence
from functools import partial
from pathlib import Path

import structlog

from zufluss.cluster.configs import DynamicConfigs
from zufluss.cluster.image import ClusterImage, ClusterNode, ImageChange, TablePut
from zufluss.cluster.producers import TableProducers
from zufluss.cluster.remote import RemoteGateway
from zufluss.cluster.replicas import (
    KvSnapshotOffset,
    LakeOffsets,
    ReplicaAssignment,
    ReplicaStop,
)
from zufluss.cluster.token_service import MayRead, everybody
from zufluss.cluster.wal import WalSession
from zufluss.config import options
from zufluss.config.load import Configuration, LiveConfiguration
from zufluss.errors import ConfigError, NetworkError, NotLeaderError, ZuflussError, reason_of
from zufluss.log.files import Files
from zufluss.log.holds import Holder
from zufluss.model.table import TableBucket
from zufluss.net.services import Services
from zufluss.periodic import log_failure, pause
from zufluss.remote.locations import Locations
from zufluss.remote.storage import RemoteStorage
from zufluss.replica.kv_host import KvHost
from zufluss.replica.replica import ReplicaHost
from zufluss.tablet.answers import Answers
from zufluss.tablet.assignments import Assignments
from zufluss.tablet.buckets import Buckets
from zufluss.tablet.changelog_reader import ChangelogReader
from zufluss.tablet.contention import Contention
from zufluss.tablet.durability import Durability
from zufluss.tablet.fetch import FetchHandler
from zufluss.tablet.forwarding import Connect, Forwarding
from zufluss.tablet.identity import claim, read_epoch, write_epoch
from zufluss.tablet.link import SessionTerms
from zufluss.tablet.lookup import LookupHandler
from zufluss.tablet.produce import ProduceHandler
from zufluss.tablet.producers import KnownProducers
from zufluss.tablet.put import AllocateIds, PutHandler
from zufluss.tablet.rates import NOTE_SECONDS, TableRates
from zufluss.tablet.remote.context import RemoteContext
from zufluss.tablet.remote.kv_snapshots import KvSnapshotter
from zufluss.tablet.remote.logs import RemoteLogRunner
from zufluss.tablet.remote.restore import Restorer
from zufluss.tablet.remote.snapshot_service import SnapshotService
from zufluss.tablet.scan.listing import ScanListing
from zufluss.tablet.scan.rebuild import Rebuilder
from zufluss.tablet.scan.service import ScanService
from zufluss.tablet.scan.sessions import ScanSessions
from zufluss.tablet.scan.states import PinStates
from zufluss.tablet.service import TabletService
from zufluss.tablet.shared.held import HeldRequests
from zufluss.tablet.shared.host import SharedHost
from zufluss.tablet.shared.release import Releases
from zufluss.tablet.shared.trim import Trimmer
from zufluss.tablet.standby.feed import Connection
from zufluss.tablet.standby.standbys import Standbys
from zufluss.tablet.tasks import BackgroundTasks
from zufluss.tablet.undo import UndoHandler
from zufluss.threads import Threads
from zufluss.wire.api import ApiKey

log = structlog.get_logger(__name__)

READER_THREADS = 4
"""Threads that bring cold pages into the page cache."""
BUCKETS_AT_A_TIME = 1000
"""Buckets that are gone through before the event loop gets to do something else."""
TIMEOUT_CHECK_SECONDS = 0.25
"""How often the timeouts of produce and put requests are checked."""
LOOK_AFTER_SECONDS = 1.0
"""How often commits and recoveries are looked for that a shortage has interrupted."""


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
        expiry_ms: Callable[[], int] | None = None,
        connect: Connect | None = None,
    ) -> None:
        """`gateway` and `allocate_ids` reach the coordinator; `monotonic` is the age of pins.

        `expiry_ms` is the time by which data expires (`clock.ExpiryClock`); by default the clock's.
        `connect` reaches other tablet servers.
        """
        expiry_ms = expiry_ms or clock_ms
        self.conf = conf = LiveConfiguration(conf)
        """The configuration in force, with what was changed while the cluster ran."""
        self._files = files
        self._expiry_ms = expiry_ms
        self.server_id = conf.get(options.TABLET_SERVER_ID)
        self.data_dir = Path(conf.get(options.DATA_DIR))
        self.storage = storage
        self.buckets = buckets = Buckets(conf)
        self.producers = KnownProducers()
        self._tasks = tasks = BackgroundTasks()
        self._readers = Threads(READER_THREADS, "zufluss-read")
        self._durability = durability = Durability(conf, files, buckets)
        self.logs = durability.logs
        self.kv = KvHost(conf, self.data_dir, files, asyncio.get_running_loop())
        contention = Contention()

        self.produce = ProduceHandler(buckets, durability, tasks, clock_ms, expiry_ms)
        self.put = PutHandler(
            conf,
            buckets,
            durability,
            self.kv,
            contention,
            tasks,
            clock_ms,
            allocate_ids,
            expiry_ms,
        )
        self.forwarding = Forwarding(buckets, connect)
        self.lookup = LookupHandler(
            buckets, self.kv, self.put, contention, tasks, Answers(conf), self.forwarding
        )
        self.service = TabletService(buckets, self.lookup, self._readers, clock_ms)

        self.shared: SharedHost | None = None
        """The shared log, None where logs are durable on the disk."""
        if conf.get(options.ZUFLUSS_LOG_DURABILITY) == "remote":
            self.shared = SharedHost(
                conf, storage, gateway, durability.written, self._fenced, files.reach
            )
            durability.shared = self.shared
            buckets.lease = self.shared.lease
        self.rejoin: Callable[[], Awaitable[None]] | None = None
        """Registers this server again, after somebody ended its session."""
        self.waits_for = ""
        """Why this server has no session of the shared log, if it tries to get one in vain."""

        remote = RemoteContext(buckets, storage, gateway, files)
        self.remote_logs = RemoteLogRunner(conf, remote, self.logs, tasks, expiry_ms)
        self.fetch = FetchHandler(buckets, self.remote_logs, self._readers, tasks)
        self.snapshots = KvSnapshotter(conf, remote, self.kv)
        self._snapshot_service = SnapshotService(buckets, self.snapshots)
        restorer = Restorer(remote, self.logs, self.kv)

        reader = ChangelogReader(buckets, restorer, self._readers)
        self.undos = UndoHandler(remote, self.put, self.producers, reader, clock_ms)
        rebuilder = Rebuilder(conf, remote, restorer, reader)
        self.pin_states = PinStates(conf, buckets, self.kv, rebuilder, contention, tasks)
        self.scans = ScanService(conf, buckets, self.pin_states, tasks, may_read, monotonic)

        self.rates = TableRates(buckets, monotonic)
        self.trimmer: Trimmer | None = None
        """Deletes what the session does not need any more; None without a shared log."""
        if self.shared is not None:
            retained = conf.get(options.ZUFLUSS_WAL_RETAINED)
            self.trimmer = Trimmer(self.shared, buckets, self.logs, self.remote_logs, retained)
        self.held = HeldRequests()
        """Requests for buckets that are changing their leader."""
        self.standbys: Standbys | None = None
        """The buckets of other leaders that this server follows; None without a shared log."""
        self.assignments = self._assignments(remote, restorer)
        self.releases: Releases | None = None
        """Releases buckets for other servers; None without a shared log."""
        if self.shared is not None:
            self.releases = Releases(
                self.shared,
                gateway,
                buckets,
                self.kv,
                self.held,
                self.assignments.release,
                self.assignments.preparations.remove,
            )
        self.started = False
        """Whether every bucket of the first assignment was opened or refused."""

    def _assignments(self, remote: RemoteContext, restorer: Restorer) -> Assignments:
        """The buckets of this server, and the parts that follow their opening and closing."""
        followers = (
            self.remote_logs,
            self.snapshots,
            self._snapshot_service,
            self.scans,
            self.undos,
            self.pin_states,
        )
        host = ReplicaHost(
            self.logs,
            self.kv,
            self.producers,
            self._expiry_ms,
            opened=(self.pin_states.opened,),
            closed=tuple(follower.closed for follower in followers),
            failed=lambda replica: self.assignments.recover(replica),
        )
        assignments = Assignments(
            self.data_dir,
            host,
            remote,
            restorer,
            self.remote_logs,
            self.scans.closed,
            self.shared,
            self.held,
        )
        if self.shared is not None:
            flush_bytes = self.conf.get(options.ZUFLUSS_KV_FLUSH_LOG_SIZE)
            self.standbys = assignments.standbys = Standbys(
                self.server_id, host, remote, restorer, self.shared, flush_bytes
            )
            self.buckets.is_followed = self.standbys.follows
        return assignments

    def follow_through(self, connect: Callable[[ClusterNode], Awaitable[Connection]]) -> None:
        """Reach the leaders of followed buckets in this way."""

        async def connect_to(server_id: int) -> Connection:
            node = self.image.tablets.get(server_id)
            if node is None:
                raise NetworkError(f"tablet server {server_id} is not there")
            return await connect(node)

        if self.standbys is not None:
            self.standbys.connect = connect_to

    @property
    def image(self) -> ClusterImage:
        """The cluster as the coordinator described it last."""
        return self.buckets.image

    def claim(self, cluster_id: str) -> None:
        """Refuse a data directory that belongs to another server or cluster."""
        claim(self._files, self.data_dir, cluster_id, self.server_id)

    def register(self, services: Services) -> None:
        """Attach every handler of this role."""
        services.register_raw(ApiKey.FETCH_LOG, self.fetch.handle)
        for key, handler in (
            (ApiKey.PRODUCE_LOG, self.produce.handle),
            (ApiKey.PUT_KV, self.put.handle),
            (ApiKey.LOOKUP, self.lookup.handle),
        ):
            held = self.shared is not None
            services.register_raw(key, self.held.before(key, handler) if held else handler)
        services.register(ApiKey.PREFIX_LOOKUP, self.lookup.prefix_lookup)
        scans = (self.scans, ScanSessions(self.scans), ScanListing(self.conf, self.scans))
        for service in (self.service, *scans, self.undos):
            services.attach(service)
        services.attach(self._snapshot_service)

    # -- orders of the coordinator ----------------------------------------------------------

    async def assign(
        self,
        image: ClusterImage,
        replicas: Sequence[ReplicaAssignment],
        producers: Sequence[TableProducers] = (),
        session: WalSession | None = None,
        *,
        goes_on: bool = False,
    ) -> None:
        """Take over this picture, hold exactly these buckets, delete every other on the disk.

        `producers` are complete: a table without an entry has no producers. All buckets are opened
        anew when a `session` begins: what they have may be more than the former one had. If the
        present session `goes_on`, buckets that are open stay so.
        """
        async with self.assignments.order():
            if self.shared is not None and not goes_on:
                await self._begin(session)
            self.buckets.image = image
            await self._fence(self.producers.replace(producers))
            led, followed = self._led_and_followed(replicas)
            if self.standbys is not None:
                await self.standbys.follow_only(followed, {each.table_bucket for each in led})
            self.assignments.close_others(replicas)
            for replica in self.buckets.replicas():
                replica.lake_reached(None)  # the coordinator tells it again
            for entry in [*image.tables()]:  # it may change meanwhile
                await self.buckets.alter(entry)
            self.snapshots.ask_again()
            await self.assignments.open_all([each for each in led if not self._released(each)])
        if not self.started:
            self.started = True
            self._begin_periodic_work()

    def _released(self, assignment: ReplicaAssignment) -> bool:
        """Whether the live session has released a bucket in the epoch that it is to be led in.

        A coordinator that is new does not know. It is told, and names a leader in the next epoch.
        One that asked for it may have sent its order to lead once more before.
        """
        live = None if self.shared is None else self.shared.live
        released = None if live is None else live.released.get(assignment.table_bucket)
        return released is not None and released >= assignment.leader_epoch

    async def _begin(self, session: WalSession | None) -> None:
        """Begin a session of the shared log."""
        assert self.shared is not None
        if session is None:
            raise ConfigError(
                f"{options.ZUFLUSS_LOG_DURABILITY.key} is remote here, but not at the coordinator; "
                "give all servers of the cluster the same value"
            )
        await self.shared.end()
        await self.assignments.give_up(NotLeaderError("the server registers again; try again"))
        await self.shared.begin(session)

    def _fenced(self, reason: NotLeaderError) -> None:
        """Lead nothing any more, and register again, because somebody ended the session."""
        self.join_later(reason)

    def join_later(self, reason: ZuflussError) -> None:
        """Lead nothing, and register again and again until this server has a session."""

        async def begin_again() -> None:
            await self.assignments.give_up(reason)
            while self.shared is not None and self.shared.live is None:
                try:
                    if self.rejoin is not None:
                        await self.rejoin()
                    self.waits_for = ""
                except Exception as problem:
                    self.waits_for = reason_of(problem)
                    log_failure("not_registered_again", problem)
                await pause(LOOK_AFTER_SECONDS)

        self._tasks.spawn(begin_again())

    def session_terms(self) -> SessionTerms | None:
        """What a server with the shared log tells its coordinator besides; None for another."""
        if self.shared is None:
            return None
        return SessionTerms(
            self.shared.lease,
            partial(read_epoch, self.data_dir),
            partial(write_epoch, self._files, self.data_dir),
        )

    def confirmed(self, asked: float) -> None:
        """The coordinator confirmed the registration; `asked` is `clock` before it was asked."""
        if self.shared is not None:
            self.shared.lease.confirmed(asked)

    async def update_metadata(self, changes: Sequence[ImageChange]) -> None:
        """Apply these changes to the picture of the cluster and to the tables served here."""
        self.image.apply(changes)
        for change in changes:
            if isinstance(change, TablePut):
                await self.buckets.alter(change.entry)
        if self.releases is not None:
            self.releases.look()
        self.producers.keep(lambda table_id: self.image.table_by_id(table_id) is not None)

    async def start_replicas(self, replicas: Sequence[ReplicaAssignment]) -> None:
        """Hold these buckets; raises the reason when one of them cannot be served.

        Buckets whose ends are in the shared log are opened in the background: other orders do not
        wait for that.
        """
        led, followed = self._led_and_followed(replicas)
        async with self.assignments.order(each.table_bucket for each in replicas):
            if self.standbys is not None:
                self.standbys.follow(list(filter(self.assignments.give_up_one, followed)))
            led = [x for x in led if not self._released(x) and not self.assignments.is_old(x)]
            self.assignments.take_over([each for each in led if each.source is not None])
            await self.assignments.open([each for each in led if each.source is None])

    def _led_and_followed(
        self, replicas: Sequence[ReplicaAssignment]
    ) -> tuple[list[ReplicaAssignment], list[ReplicaAssignment]]:
        """The buckets that this server leads, and those of which it is a standby."""
        led = [each for each in replicas if each.state.leader == self.server_id]
        return led, [each for each in replicas if each.state.leader != self.server_id]

    async def stop_replicas(self, replicas: Sequence[ReplicaStop]) -> None:
        """Give these buckets up, and free their disk where it says delete."""
        async with self.assignments.order(stop.table_bucket for stop in replicas):
            for stop in replicas:
                if self.assignments.is_old(stop):
                    continue  # a later order gave the bucket to this server again
                if self.standbys is not None:
                    await self.standbys.stop(stop.table_bucket, delete=stop.delete)
                self.assignments.close(stop)
                await asyncio.sleep(0)  # closing takes a millisecond, and a table has thousands

    async def release_bucket(self, bucket: TableBucket, leader_epoch: int) -> int:
        """Write nothing to a bucket any more, so that another server leads it (`Releases`)."""
        if self.releases is None:
            raise _not_shared()
        return await self.releases.release(bucket, leader_epoch)

    async def prepare_bucket(self, assignment: ReplicaAssignment) -> None:
        """Make ready to lead a bucket that another server leads (`Preparations`)."""
        if self.releases is None:
            raise _not_shared()
        if self.buckets.is_followed(assignment.table_bucket):
            return  # a standby is ready
        await self.assignments.preparations.prepare(assignment)

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

    async def update_configs(self, configs: DynamicConfigs) -> None:
        """Put these options over those of the start; what has begun goes on as it was."""
        self.conf.change(configs.values)
        rolls_active = self.conf.get(options.LOG_RETENTION_ROLL_ACTIVE_SEGMENT_ENABLED)
        self.logs.retention_rolls_active = rolls_active
        self.snapshots.retime()

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

    # -- periodic work ----------------------------------------------------------------------

    def _begin_periodic_work(self) -> None:
        conf, tasks = self.conf, self._tasks
        self.logs.started()
        tasks.repeat(TIMEOUT_CHECK_SECONDS, self._expire_requests)
        tasks.repeat(LOOK_AFTER_SECONDS, self._durability.commit)
        tasks.repeat(LOOK_AFTER_SECONDS, self.assignments.look_after)
        if self.trimmer is not None:
            tasks.repeat(LOOK_AFTER_SECONDS, self.trimmer.look_after)
        if self.releases is not None:
            tasks.repeat(LOOK_AFTER_SECONDS, self.releases.report)
            tasks.repeat(LOOK_AFTER_SECONDS, self.assignments.preparations.look_after)
        tasks.repeat(NOTE_SECONDS, self.rates.note)
        retention_seconds = conf.get(options.LOG_RETENTION_CHECK_INTERVAL) / 1000
        tasks.repeat(retention_seconds, self._expire_data)
        scanner_seconds = conf.get(options.KV_SCANNER_EXPIRATION_INTERVAL) / 1000
        tasks.repeat(scanner_seconds, self.scans.pins.sweep)
        tasks.spawn(self.remote_logs.run())
        self.snapshots.start()
        self.assignments.retries.begin()

    def _expire_requests(self) -> None:
        now = asyncio.get_running_loop().time()
        self.produce.expire(now)
        self.put.expire(now)

    def _expire_data(self) -> None:
        now_ms = self._expiry_ms()
        self.logs.expire(now_ms)
        self.kv.flush_held_back()
        self.kv.forget_expired_writers(now_ms)

    async def close(self) -> None:
        """Sync and close every log; the next start needs no recovery."""
        self._tasks.cancel()
        self.held.stop()
        if self.standbys is not None:
            await self.standbys.close()
        await self.assignments.stop()
        await self._snapshot_service.stop()
        await self.snapshots.stop()
        self.scans.stop()
        await self.undos.stop()
        await self.pin_states.stop()
        await self.kv.close()
        if self.shared is not None:
            await self.shared.close()
        await self.logs.close()
        self._readers.shutdown(wait=False)


def _not_shared() -> ConfigError:
    return ConfigError(
        f"buckets are handed over with {options.ZUFLUSS_LOG_DURABILITY.key} = remote only: with "
        "local, the disk of this server has their rows"
    )
