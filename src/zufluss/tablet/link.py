"""The registration of a tablet server with its coordinator, kept alive.

Used by a tablet server that runs on its own. The link registers the server, applies the picture and
the replicas in the answer, sends heartbeats, and registers again when the coordinator does not know
the server any more. Another coordinator goes on with the registration at the former one. The link
also answers the orders of the coordinator (UPDATE_METADATA,
NOTIFY_LEADER_AND_ISR, STOP_REPLICA and others). Orders wait while a registration is
under way. An order of an earlier registration is refused: it would undo what the answer said.

Requests of clients that only the coordinator can answer are passed on to it (`PASSED_ON`).

The image is changed in place and never replaced, so everybody who holds it sees the present.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from functools import partial
from typing import Any, NamedTuple

import structlog

from zufluss.cluster import codec
from zufluss.cluster.configs import DynamicConfigs
from zufluss.cluster.image import ClusterImage, ClusterNode
from zufluss.cluster.producers import TableProducers, producers_from_proto
from zufluss.cluster.replicas import (
    LocalTablet,
    kv_snapshot_offset_from_proto,
    lake_offsets_from_proto,
    replica_from_proto,
    stop_from_proto,
)
from zufluss.cluster.wal import WalSession, session_from_proto
from zufluss.errors import ErrorCode, ZuflussError, error, reason_of
from zufluss.net.services import RequestContext, Services
from zufluss.periodic import pause, repeat
from zufluss.remote.health import HealthReport
from zufluss.remote.locations import Locations
from zufluss.tablet.coordinator_client import NOT_REGISTERED, CoordinatorClient
from zufluss.tablet.shared.lease import LookupLease
from zufluss.tasks import end
from zufluss.wire import messages as m
from zufluss.wire.api import ApiKey
from zufluss.wire.tables import bucket_from_proto

log = structlog.get_logger(__name__)

HEARTBEAT_SECONDS = 3.0
"""Time between heartbeats; five of them fit into a session."""
HEARTBEATS_PER_LEASE = 3
"""Heartbeats in the time for which a server answers lookups after one of them."""
LOST_SECONDS = 5 * HEARTBEAT_SECONDS
"""A coordinator that has not answered for a session is lost, and has given up this server."""
PASSED_ON = (
    ApiKey.GET_LAKE_SNAPSHOT,
    ApiKey.GET_LATEST_KV_SNAPSHOTS,
    ApiKey.GET_KV_SNAPSHOT_METADATA,
    ApiKey.DESCRIBE_CLUSTER_CONFIGS,
)
"""Requests of clients that only the coordinator can answer."""
OFFSETS_AT_ONCE = 4096
"""Most producer offsets that are decoded on the event loop; more are decoded in a thread."""


class SessionTerms(NamedTuple):
    """What a server with the shared log and its coordinator tell each other besides."""

    lease: LookupLease
    """Is told of each confirmation."""
    former_epoch: Callable[[], int | None]
    """The epoch of the last registration from the data directory; its process has ended."""
    note_epoch: Callable[[int], None]
    """Remembers the epoch of this registration."""


class CoordinatorLink:
    """A tablet server's registration with its coordinator, kept alive."""

    def __init__(
        self,
        node: ClusterNode,
        image: ClusterImage,
        tablet: LocalTablet,
        coordinator: CoordinatorClient,
        check_cluster: Callable[[str], None],
        reports: Callable[[], Sequence[HealthReport]] = tuple,
        clock: Callable[[], float] = time.monotonic,
        replaced: Callable[[], None] = lambda: None,
        session: SessionTerms | None = None,
    ) -> None:
        """`check_cluster` gets the cluster's id before anything is deleted, and may refuse.

        `reports` says what this server saw of each remote location, for heartbeats. `replaced` is
        called when another process has registered with this server's id: this one must end.
        `session` is for a server whose logs are in the shared log.
        """
        self._replaced = replaced
        self._session = session
        self.replacement: ZuflussError | None = None
        """The coordinator's word that another process has this server's id."""
        self._clock = clock
        self._answered: float | None = None
        self.server_epoch = NOT_REGISTERED
        self._node = node
        self._image = image
        self._tablet = tablet
        self._coordinator = coordinator
        self._check_cluster = check_cluster
        self._reports = reports
        self._turn = asyncio.Lock()
        self._locations_version = 0
        self._configs_version = 0
        self._task: asyncio.Task[None] | None = None

    def register(self, services: Services) -> None:
        """Attach the handlers of the coordinator's orders and of what only it can answer."""
        services.attach(self)
        for key in PASSED_ON:
            services.register(key, partial(self._pass_on, key))

    async def start(self) -> None:
        """Register, waiting for the coordinator as long as it takes; then stay registered."""
        await self._join()
        work = repeat(self._interval, self.heartbeat, "heartbeat_failed")
        self._task = asyncio.create_task(work, name="coordinator-link")

    async def stop(self) -> None:
        """Send no more heartbeats."""
        await end(self._task)

    def _interval(self) -> float:
        """Seconds between two heartbeats."""
        if self._session is None:
            return HEARTBEAT_SECONDS
        return min(HEARTBEAT_SECONDS, self._session.lease.seconds / HEARTBEATS_PER_LEASE)

    @property
    def silent_seconds(self) -> float | None:
        """Seconds since the coordinator answered last; None before its first answer."""
        return None if self._answered is None else self._clock() - self._answered

    @property
    def lost(self) -> bool:
        """Whether the coordinator has not answered for a session."""
        silent = self.silent_seconds
        return silent is not None and silent > LOST_SECONDS

    async def join(self) -> None:
        """Register once, and take over the picture and the buckets in the answer.

        Nothing is done if another call has registered the server meanwhile.
        """
        before = self.server_epoch
        request = self._registration()
        if self._session is not None:
            former = self._session.former_epoch()
            if former is not None:
                request.former_server_epoch = former
        async with self._turn:
            if self.server_epoch not in (before, NOT_REGISTERED):
                return
            self.server_epoch = NOT_REGISTERED
            if self._session is not None:
                self._session.lease.end()
            asked = self._asked()
            answer = await self._coordinator.call(ApiKey.REGISTER_TABLET_SERVER, request)
            self._check_cluster(answer.cluster_id)
            if self._session is not None:
                self._session.note_epoch(answer.server_epoch)
                if answer.HasField("lookup_lease_ms"):
                    self._session.lease.seconds = answer.lookup_lease_ms / 1000
                self._session.lease.confirmed(asked)
            session = session_from_proto(answer.wal_session)
            live = session if answer.HasField("wal_session") else None
            await self._take_over(answer, live)
        log.info("registered", server_id=self._node.node_id, epoch=self.server_epoch)

    async def _go_on(self) -> bool:
        """Have a coordinator that is new go on with this registration; False if it refuses.

        Nothing ends then: no session of the shared log, no lookup, no bucket.
        """
        living = self.server_epoch
        if living == NOT_REGISTERED:
            return False
        request = self._registration()
        request.living_server_epoch = living
        async with self._turn:
            if self.server_epoch != living:
                return True  # it was registered anew meanwhile
            asked = self._asked()
            try:
                answer = await self._coordinator.call(ApiKey.REGISTER_TABLET_SERVER, request)
            except ZuflussError as problem:
                if problem.code is ErrorCode.FENCED_LEADER_EPOCH_EXCEPTION:
                    self._end_replaced(problem)
                    return True
                if problem.code is not ErrorCode.SERVER_NOT_EXIST_EXCEPTION:
                    raise
                log.info("registration_not_gone_on_with", reason=problem.message)
                return False
            self._check_cluster(answer.cluster_id)
            if self._session is not None:
                self._session.lease.confirmed(asked)
            await self._take_over(answer, None, goes_on=True)
        log.info("registration_goes_on", server_id=self._node.node_id, epoch=living)
        return True

    def _registration(self) -> m.RegisterTabletServerRequest:
        request = m.RegisterTabletServerRequest(
            server_id=self._node.node_id,
            listeners=codec.listeners_to_text(self._node.endpoints),
            rack=self._node.rack,
        )
        if self._session is not None:
            request.remote_durability = True
        return request

    async def _take_over(
        self,
        answer: m.RegisterTabletServerResponse,
        session: WalSession | None,
        *,
        goes_on: bool = False,
    ) -> None:
        """Take over the picture and the buckets of an answer; in turn.

        After a failure the next heartbeat asks for another answer: this one had orders.
        """
        try:
            await self._take(answer, session, goes_on=goes_on)
        except BaseException:
            if goes_on:
                self._coordinator.epoch = NOT_REGISTERED
            else:
                self.server_epoch = NOT_REGISTERED
            raise
        self._answered = self._clock()

    async def _take(
        self,
        answer: m.RegisterTabletServerResponse,
        session: WalSession | None,
        *,
        goes_on: bool,
    ) -> None:
        self._image.apply(codec.changes_of(answer.metadata))
        self._coordinator.epoch = answer.coordinator_epoch
        await self._update_locations(answer.locations)
        await self._update_configs(answer.configs)
        replicas = list(map(replica_from_proto, answer.replicas))
        producers = await _producers(answer.producers)
        self.server_epoch = answer.server_epoch
        work = repeat(self._interval, self._beat, "heartbeat_failed")
        beating = asyncio.create_task(work, name="heartbeats-while-joining")
        try:  # buckets may take longer to come up than a silent server is waited for
            await self._tablet.assign(self._image, replicas, producers, session, goes_on=goes_on)
        finally:
            await end(beating)

    async def heartbeat(self) -> None:
        """Send a heartbeat; register again if the coordinator does not know this server.

        A coordinator that is new goes on with the registration at the former one.
        """
        try:
            await self._beat()
        except ZuflussError as problem:
            if problem.code is not ErrorCode.SERVER_NOT_EXIST_EXCEPTION:
                raise
            if not await self._go_on():
                await self.join()

    async def rejoin(self) -> None:
        """Register again because the session was ended, unless another process has this id now."""
        try:
            await self._beat()
        except ZuflussError as problem:
            if problem.code is not ErrorCode.SERVER_NOT_EXIST_EXCEPTION:
                raise
        if self.replacement is None:
            await self.join()

    async def leave(self, at_once: asyncio.Event, timeout_ms: int) -> None:
        """Hand over all buckets because this server stops; gives up when it is to stop `at_once`.

        What is not handed over then is taken over by others, as from a server that was lost.
        Without a shared log nothing can be handed over.
        """
        if self._session is None or self.server_epoch == NOT_REGISTERED or at_once.is_set():
            return
        asking = asyncio.create_task(self._leave(), name="controlled-shutdown")
        giving_up = asyncio.create_task(at_once.wait())
        await asyncio.wait(
            {asking, giving_up},
            timeout=timeout_ms / 1000,
            return_when=asyncio.FIRST_COMPLETED,
        )
        await end(giving_up)
        if not asking.done():
            log.warning("buckets_not_handed_over", reason="the server is to stop now")
        await end(asking)

    async def _leave(self) -> None:
        request = m.ControlledShutdownRequest(
            tablet_server_id=self._node.node_id, tablet_server_epoch=self.server_epoch
        )
        try:
            answer = await self._coordinator.call(ApiKey.CONTROLLED_SHUTDOWN, request)
        except (ZuflussError, OSError) as problem:
            log.warning("buckets_not_handed_over", reason=reason_of(problem))
            return
        log.info("buckets_handed_over", remaining=len(answer.remaining_leader_buckets))

    def _asked(self) -> float:
        """The time before a confirmation is asked for, by the clock of the lease."""
        return self._session.lease.clock() if self._session is not None else 0.0

    async def _beat(self) -> None:
        request = m.TabletHeartbeatRequest(
            server_id=self._node.node_id,
            server_epoch=self.server_epoch,
            location_reports=[report.to_proto() for report in self._reports()],
            locations_version=self._locations_version,
            configs_version=self._configs_version,
            coordinator_epoch=self._coordinator.epoch,
        )
        asked = self._asked()
        try:
            answer = await self._coordinator.call(ApiKey.TABLET_HEARTBEAT, request)
        except ZuflussError as problem:
            if problem.code is not ErrorCode.FENCED_LEADER_EPOCH_EXCEPTION:
                raise
            if request.server_epoch != self.server_epoch:
                return  # it is this process that registers
            self._end_replaced(problem)
            return
        self._answered = self._clock()
        if self._session is not None:
            self._session.lease.confirmed(asked)
        if answer.HasField("locations"):  # an update was lost
            await self._update_locations(answer.locations)
        if answer.HasField("configs"):
            await self._update_configs(answer.configs)

    def _end_replaced(self, problem: ZuflussError) -> None:
        """Have this process end, because another one has its id."""
        log.error("replaced", server_id=self._node.node_id, reason=problem.message)
        self.replacement = problem
        self._replaced()

    async def _update_configs(self, message: m.PbDynamicConfigs) -> None:
        await self._tablet.update_configs(DynamicConfigs.from_proto(message))
        self._configs_version = message.version

    async def _update_locations(self, message: m.PbLocations) -> None:
        await self._tablet.update_locations(Locations.from_proto(message))
        self._locations_version = max(self._locations_version, message.version)

    async def update_metadata(
        self, request: m.UpdateMetadataRequest, ctx: RequestContext
    ) -> m.UpdateMetadataResponse:
        """UPDATE_METADATA (1013)."""
        async with self._order(request):
            await self._tablet.update_metadata(codec.changes_of(request))
        return m.UpdateMetadataResponse()

    async def notify_leader_and_isr(
        self, request: m.NotifyLeaderAndIsrRequest, ctx: RequestContext
    ) -> m.NotifyLeaderAndIsrResponse:
        """NOTIFY_LEADER_AND_ISR (1018): all buckets or none, so one answer for all."""
        replicas = list(map(replica_from_proto, request.notify_buckets_leader_req))
        async with self._order(request):
            await self._tablet.start_replicas(replicas)
        done = [
            m.PbNotifyLeaderAndIsrRespForBucket(table_bucket=each.table_bucket)
            for each in request.notify_buckets_leader_req
        ]
        return m.NotifyLeaderAndIsrResponse(notify_buckets_leader_resp=done)

    async def stop_replica(
        self, request: m.StopReplicaRequest, ctx: RequestContext
    ) -> m.StopReplicaResponse:
        """STOP_REPLICA (1019)."""
        stops = list(map(stop_from_proto, request.stop_replicas_req))
        async with self._order(request):
            await self._tablet.stop_replicas(stops)
        done = [
            m.PbStopReplicaRespForBucket(table_bucket=each.table_bucket)
            for each in request.stop_replicas_req
        ]
        return m.StopReplicaResponse(stop_replicas_resp=done)

    async def release_bucket(
        self, request: m.ReleaseBucketRequest, ctx: RequestContext
    ) -> m.ReleaseBucketResponse:
        """RELEASE_BUCKET (30060): other orders do not wait for it."""
        async with self._order(request):
            bucket = bucket_from_proto(request.bucket)
        end = await self._tablet.release_bucket(bucket, request.leader_epoch)
        return m.ReleaseBucketResponse(end=end)

    async def prepare_bucket(
        self, request: m.PrepareBucketRequest, ctx: RequestContext
    ) -> m.PrepareBucketResponse:
        """PREPARE_BUCKET (30061): other orders do not wait for it."""
        async with self._order(request):
            assignment = replica_from_proto(request.bucket)
        await self._tablet.prepare_bucket(assignment)
        return m.PrepareBucketResponse()

    async def notify_lake_table_offset(
        self, request: m.NotifyLakeTableOffsetRequest, ctx: RequestContext
    ) -> m.NotifyLakeTableOffsetResponse:
        """NOTIFY_LAKE_TABLE_OFFSET (1031)."""
        offsets = list(map(lake_offsets_from_proto, request.notify_buckets_req))
        async with self._order(request):
            await self._tablet.notify_lake_offsets(offsets)
        return m.NotifyLakeTableOffsetResponse()

    async def notify_kv_snapshot_offset(
        self, request: m.NotifyKvSnapshotOffsetRequest, ctx: RequestContext
    ) -> m.NotifyKvSnapshotOffsetResponse:
        """NOTIFY_KV_SNAPSHOT_OFFSET (1029)."""
        async with self._order(request):
            await self._tablet.notify_kv_snapshot_offset([kv_snapshot_offset_from_proto(request)])
        return m.NotifyKvSnapshotOffsetResponse()

    async def update_locations(
        self, request: m.UpdateLocationsRequest, ctx: RequestContext
    ) -> m.UpdateLocationsResponse:
        """UPDATE_LOCATIONS (30004)."""
        async with self._order(request):
            await self._update_locations(request.locations)
        return m.UpdateLocationsResponse()

    async def update_configs(
        self, request: m.UpdateConfigsRequest, ctx: RequestContext
    ) -> m.UpdateConfigsResponse:
        """UPDATE_CONFIGS (30006)."""
        async with self._order(request):
            await self._update_configs(request.configs)
        return m.UpdateConfigsResponse()

    async def update_producers(
        self, request: m.UpdateProducersRequest, ctx: RequestContext
    ) -> m.UpdateProducersResponse:
        """UPDATE_PRODUCERS (30044)."""
        tables = await _producers(request.tables)
        async with self._order(request):
            await self._tablet.update_producers(tables)
        return m.UpdateProducersResponse()

    async def get_producer_activity(
        self, request: m.GetProducerActivityRequest, ctx: RequestContext
    ) -> m.GetProducerActivityResponse:
        """GET_PRODUCER_ACTIVITY (30045)."""
        idle = await self._tablet.producer_idle_ms(request.table_id, request.producer_numbers)
        return m.GetProducerActivityResponse(idle_ms=idle)

    async def _pass_on(self, key: ApiKey, request: Any, ctx: RequestContext) -> Any:
        return await self._coordinator.call(key, request)

    @asynccontextmanager
    async def _order(self, request: Any) -> AsyncIterator[None]:
        """An order of the present coordinator to this registration, carried out in its turn.

        A coordinator that was replaced and does not know it yet has no effect.
        """
        async with self._turn:
            self._check("coordinator", request.coordinator_epoch, self._coordinator.epoch)
            if "server_epoch" in request.DESCRIPTOR.fields_by_name:
                self._check("server", request.server_epoch, self.server_epoch)
            yield

    def _check(self, whose: str, epoch: int, known: int) -> None:
        if epoch != known:
            raise error(
                ErrorCode.INVALID_COORDINATOR_EXCEPTION,
                f"the order belongs to {whose} epoch {epoch}, tablet server {self._node.node_id} "
                f"is registered with {known}",
            )

    async def _join(self) -> None:
        """Register; try again until the coordinator answers."""
        while True:
            try:
                return await self.join()
            except ZuflussError as problem:
                if not problem.retriable:
                    raise
                log.warning("coordinator_unreachable", error=str(problem))
            await pause(HEARTBEAT_SECONDS)


async def _producers(tables: Sequence[m.PbTableProducers]) -> list[TableProducers]:
    """Decode the producers of a message, in a thread if they have many offsets."""
    parts = [part for table in tables for each in table.producers for part in each.baseline]
    if sum(len(part.bucket_ids) for part in parts) <= OFFSETS_AT_ONCE:
        return list(map(producers_from_proto, tables))
    return await asyncio.to_thread(lambda: list(map(producers_from_proto, tables)))
