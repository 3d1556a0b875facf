"""Tablet servers in other processes: they register, send heartbeats, and leave by silence.

A registration has a server epoch from a durable counter. It ends when the server registers again,
or sends no heartbeat for `SESSION_MS`. A server joins between two changes of the catalog: the
answer carries the whole image, and every later change is sent to the new registration. A server
that has left is not in the metadata, and its buckets have no leader until it is back. Heartbeats
report what the server saw of the remote locations.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import structlog

from zufluss.cluster import codec
from zufluss.cluster.image import ClusterNode, NodesPut
from zufluss.cluster.replicas import RpcCaller, assignments, replica_to_proto
from zufluss.config.values import parse_endpoints
from zufluss.coordinator.catalog.catalog import Catalog
from zufluss.coordinator.producers.book import ProducerBook
from zufluss.coordinator.remote.locations import LocationRegistry
from zufluss.coordinator.tablets import RemoteTablet, Tablets, producer_messages
from zufluss.errors import ConfigError, ErrorCode, error
from zufluss.periodic import repeat
from zufluss.remote.health import HealthReport
from zufluss.tasks import end
from zufluss.wire import messages as m

if TYPE_CHECKING:
    from zufluss.net.services import RequestContext

log = structlog.get_logger(__name__)

SESSION_MS = 15_000
"""A tablet server without a heartbeat for longer than this has left."""
CHECK_SECONDS = 1.0
"""Interval between two checks for silent servers."""
TABLET_TIMEOUT_MS = 30_000
"""How long a tablet server may take for one request of the coordinator."""
WRITER_IDS_MAX = 1_000_000
"""Most writer ids a tablet server may take at once."""

Connect = Callable[[ClusterNode], Awaitable[RpcCaller]]
"""Returns a connection to a tablet server, an open one if possible."""


@dataclass(slots=True)
class TabletSession:
    """A registered tablet server."""

    node: ClusterNode
    """Where it is."""
    tablet: RemoteTablet
    """Sends requests to it."""
    seen_ms: int
    """Time of its last heartbeat, epoch milliseconds."""


class Registrations:
    """The tablet servers that registered with this coordinator."""

    def __init__(
        self,
        catalog: Catalog,
        tablets: Tablets,
        locations: LocationRegistry,
        producers: ProducerBook,
        connect: Connect,
        clock_ms: Callable[[], int],
        on_join: Callable[[int], None],
    ) -> None:
        """`on_join` gets the id of every server that registered."""
        self._catalog = catalog
        self._image = catalog.image
        self._tablets = tablets
        self._locations = locations
        self._producers = producers
        self._connect = connect
        self._clock_ms = clock_ms
        self._on_join = on_join
        self._sessions: dict[int, TabletSession] = {}
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Check for silent servers from now on."""
        work = repeat(CHECK_SECONDS, self.expire, "tablet_session_check_failed")
        self._task = asyncio.create_task(work, name="tablet-sessions")

    async def stop(self) -> None:
        """End every registration; requests under way to the servers fail."""
        await end(self._task)
        for session in self._sessions.values():
            session.tablet.end()

    async def register_tablet_server(
        self, request: m.RegisterTabletServerRequest, ctx: RequestContext
    ) -> m.RegisterTabletServerResponse:
        """REGISTER_TABLET_SERVER (30000): the answer carries the image and all replicas."""
        node = _node_of(request)
        before = self._sessions.get(node.node_id)
        if before is not None:
            if before.node != node:
                log.warning(
                    "tablet_replaced",
                    server_id=node.node_id,
                    was=str(before.node.endpoints[0]),
                    now=str(node.endpoints[0]),
                )
            # At once, not in turn: a change that waits for the old process must not hold us up.
            before.tablet.end()
        response = await self._catalog.exclusive(partial(self._join, node))
        log.info("tablet_registered", server_id=node.node_id, epoch=response.server_epoch)
        self._on_join(node.node_id)
        return response

    async def tablet_heartbeat(
        self, request: m.TabletHeartbeatRequest, ctx: RequestContext
    ) -> m.TabletHeartbeatResponse:
        """TABLET_HEARTBEAT (30001): error 58 tells a server to register again.

        Error 24 tells it that another process has registered with its id since. It must not
        register again then: the two would take turns.
        """
        session = self._sessions.get(request.server_id)
        if session is not None and 0 < request.server_epoch < session.tablet.server_epoch:
            raise error(
                ErrorCode.FENCED_LEADER_EPOCH_EXCEPTION,
                f"another process registered as tablet server {request.server_id} after this one, "
                f"at {session.node.endpoints[0]}; give each server a tablet-server.id of its own",
            )
        if session is None or session.tablet.server_epoch != request.server_epoch:
            raise error(
                ErrorCode.SERVER_NOT_EXIST_EXCEPTION,
                f"tablet server {request.server_id} with epoch {request.server_epoch} is not "
                f"registered; register again",
            )
        session.seen_ms = self._clock_ms()
        self._tablets.heard_of(request.server_id)
        self._report(request)
        known, locations = request.locations_version, self._locations.locations
        behind = request.HasField("locations_version") and known < locations.version
        configs = self._locations.configs_for_tablets
        missed = request.configs_version != configs.version
        return m.TabletHeartbeatResponse(
            coordinator_epoch=self._catalog.epoch,
            locations=locations.to_proto() if behind else None,
            configs=configs.to_proto() if missed else None,
        )

    async def allocate_writer_ids(
        self, request: m.AllocateWriterIdsRequest, ctx: RequestContext
    ) -> m.AllocateWriterIdsResponse:
        """ALLOCATE_WRITER_IDS (30002): a range of ids that a tablet server gives to writers."""
        if not 1 <= request.count <= WRITER_IDS_MAX:
            raise ConfigError(f"count {request.count} is not allowed; give 1 to {WRITER_IDS_MAX}")
        ids = await self._catalog.allocate_writer_ids(request.count)
        return m.AllocateWriterIdsResponse(first_writer_id=ids.start, count=len(ids))

    async def allocate_ids(
        self, request: m.AllocateIdsRequest, ctx: RequestContext
    ) -> m.AllocateIdsResponse:
        """ALLOCATE_IDS (30003): ids of an auto-increment column that a bucket gives to rows."""
        start, end = await self._catalog.allocate_ids(
            request.table_id, request.column_id, request.count
        )
        return m.AllocateIdsResponse(start=start, end=end)

    def _report(self, request: m.TabletHeartbeatRequest) -> None:
        reports = list(map(HealthReport.from_proto, request.location_reports))
        self._locations.add_reports(request.server_id, lambda: reports)

    async def expire(self) -> None:
        """Remove the servers that have been silent for too long."""
        for server_id, session in tuple(self._sessions.items()):
            if self._silent(session):
                await self._catalog.exclusive(partial(self._leave, server_id))

    async def _join(self, node: ClusterNode) -> m.RegisterTabletServerResponse:
        epoch, server_epoch = self._catalog.epoch, await self._catalog.next_server_epoch()
        connect = partial(self._connect, node)
        tablet = RemoteTablet(node.node_id, epoch, server_epoch, connect, TABLET_TIMEOUT_MS)
        self._tablets.detach(node.node_id)
        await self._announce(node.node_id, (node,))
        self._sessions[node.node_id] = TabletSession(node, tablet, self._clock_ms())
        self._tablets.attach(node.node_id, tablet)
        producers = self._producers.of_server(node.node_id)
        return m.RegisterTabletServerResponse(
            server_epoch=server_epoch,
            coordinator_epoch=epoch,
            cluster_id=self._catalog.cluster_id,
            metadata=codec.update_request(self._image.snapshot(), epoch, server_epoch),
            replicas=map(replica_to_proto, assignments(self._image, node.node_id)),
            locations=self._locations.locations.to_proto(),
            producers=await producer_messages(producers),
            configs=self._locations.configs_for_tablets.to_proto(),
        )

    async def _leave(self, server_id: int) -> None:
        session = self._sessions.get(server_id)
        if session is None or not self._silent(session):
            return
        log.warning("tablet_silent", server_id=server_id, session=repr(session.tablet))
        del self._sessions[server_id]
        session.tablet.end()
        self._tablets.detach(server_id)
        self._locations.remove_reports(server_id)
        await self._announce(server_id, ())

    async def _announce(self, server_id: int, now: tuple[ClusterNode, ...]) -> None:
        """Replace one server in the image, here and at all other servers."""
        others = tuple(n for n in self._image.tablets.values() if n.node_id != server_id)
        nodes = NodesPut(self._image.coordinator, (*others, *now))
        self._image.apply([nodes])
        await self._tablets.update_metadata([nodes])

    def _silent(self, session: TabletSession) -> bool:
        return self._clock_ms() - session.seen_ms > SESSION_MS


def _node_of(request: m.RegisterTabletServerRequest) -> ClusterNode:
    try:
        endpoints = parse_endpoints(request.listeners)
    except ValueError as problem:
        raise ConfigError(f"listeners {request.listeners!r:.200}: {problem}") from None
    if not endpoints:
        raise ConfigError("listeners is empty; give NAME://host:port of every listener")
    rack = request.rack if request.HasField("rack") else None
    return ClusterNode(request.server_id, endpoints, rack)
