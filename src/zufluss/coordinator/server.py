"""The coordinator role: catalog, auto partitions and the tablet servers it leads.

One active coordinator per cluster. Life of a process with both roles:

    coordinator = Coordinator(conf, store, clock_ms)
    await coordinator.start(node)              # the catalog is there, nobody serves yet
    await coordinator.attach(tablet_node, tablet)   # logs recovered, dropped tables removed
    coordinator.register(services)             # then open the sockets
    …
    await coordinator.stop()                   # the store is the caller's to close

Apart, there is no `attach`: tablet servers come with REGISTER_TABLET_SERVER and are told everything
in the answer, then prove with TABLET_HEARTBEAT that they live. One that was silent for
`SESSION_MS` is taken out of the metadata; its buckets have no leader until it registers again.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import structlog

from zufluss.config.load import Configuration
from zufluss.config.values import parse_endpoints
from zufluss.coordinator import codec
from zufluss.coordinator.catalog import Catalog
from zufluss.coordinator.cluster_service import ClusterService
from zufluss.coordinator.image import ClusterImage, NodesPut, ServerNode
from zufluss.coordinator.metadata_service import MetadataService
from zufluss.coordinator.partitions import AutoPartitions
from zufluss.coordinator.service import CoordinatorService
from zufluss.coordinator.tablets import (
    LocalTablet,
    RemoteTablet,
    RpcCaller,
    Tablets,
    assignments,
    replica_to_proto,
)
from zufluss.coordinator.writer_ids import WriterIds
from zufluss.errors import ConfigError, ErrorCode, error
from zufluss.meta.api import MetaStore
from zufluss.wire import messages as m
from zufluss.wire.api import ApiKey

if TYPE_CHECKING:
    from zufluss.net.services import RequestContext, Services

log = structlog.get_logger(__name__)

SESSION_MS = 15_000
"""A tablet server that is silent for so long is taken for dead."""
SESSION_CHECK_SECONDS = 1.0
"""How often silence is looked for."""
TABLET_TIMEOUT_MS = 30_000
"""How long a tablet server may take for one request of the coordinator."""
WRITER_IDS_MAX = 1_000_000
"""Most writer ids a tablet server may take at once."""

Connect = Callable[[ServerNode], Awaitable[RpcCaller]]


@dataclass(slots=True)
class Session:
    """A registered tablet server."""

    server_epoch: int
    """The epoch of its registration."""
    seen_ms: int
    """When it was last heard of."""


class Coordinator:
    """The coordinator role of a process."""

    def __init__(
        self,
        conf: Configuration,
        store: MetaStore,
        clock_ms: Callable[[], int],
        connect: Connect | None = None,
    ) -> None:
        self.conf = conf
        self.image = ClusterImage()
        self.tablets = Tablets()
        self.catalog: Catalog
        self.partitions: AutoPartitions
        self.writer_ids: WriterIds
        self._store = store
        self._clock_ms = clock_ms
        self._connect = connect
        self._sessions: dict[int, Session] = {}
        self._session_task: asyncio.Task[None] | None = None

    async def start(self, node: ServerNode) -> None:
        """Take over the catalog and begin to care for auto partitions."""
        self.catalog = await Catalog.open(
            self._store, self.conf, self.image, self.tablets, self._clock_ms
        )
        self.image.apply([NodesPut(node, ())])
        self.writer_ids = WriterIds(self.catalog.allocate_writer_ids)
        self.partitions = AutoPartitions(self.conf, self.catalog, self._clock_ms)
        self._session_task = asyncio.create_task(self._expire_sessions(), name="tablet-sessions")

    async def stop(self) -> None:
        """Finish the changes under way and begin no more; the store stays open."""
        if self._session_task is not None:
            self._session_task.cancel()
            await asyncio.wait([self._session_task])
            await self.partitions.stop()
            await self.catalog.close()

    def register(self, services: Services) -> None:
        """Attach every handler of the coordinator role; INIT_WRITER is `writer_ids.register`."""
        MetadataService(self.image).register(services)
        ClusterService(self.conf, self.image).register(services)
        CoordinatorService(self.conf, self.catalog, self.partitions.check).register(services)
        services.register(ApiKey.REGISTER_TABLET_SERVER, self.register_tablet_server)
        services.register(ApiKey.TABLET_HEARTBEAT, self.tablet_heartbeat)
        services.register(ApiKey.ALLOCATE_WRITER_IDS, self.allocate_writer_ids)

    async def attach(self, node: ServerNode, tablet: LocalTablet) -> None:
        """Join a tablet server of this process; its logs are recovered when this returns."""

        async def join() -> None:
            self._set_nodes(node)
            await tablet.assign(self.image, assignments(self.image, node.node_id))
            self.tablets.attach(node.node_id, tablet)

        await self.catalog.exclusive(join)
        self.partitions.start()

    async def register_tablet_server(
        self, request: m.RegisterTabletServerRequest, ctx: RequestContext
    ) -> m.RegisterTabletServerResponse:
        """REGISTER_TABLET_SERVER (30000): join, and learn everything."""
        node = _node_of(request)

        async def join() -> m.RegisterTabletServerResponse:
            epoch = await self.catalog.next_server_epoch()
            self._set_nodes(node)
            self._sessions[node.node_id] = Session(epoch, self._clock_ms())
            self.tablets.detach(node.node_id)
            await self.tablets.update_metadata([self._nodes()])
            self.tablets.attach(node.node_id, self._remote(node))
            return m.RegisterTabletServerResponse(
                server_epoch=epoch,
                coordinator_epoch=self.catalog.epoch,
                metadata=codec.update_request(self.image.snapshot(), self.catalog.epoch),
                replicas=map(replica_to_proto, assignments(self.image, node.node_id)),
            )

        response = await self.catalog.exclusive(join)
        log.info("tablet_registered", server_id=node.node_id, epoch=response.server_epoch)
        if not self.partitions.started:
            self.partitions.start()
        return response

    async def tablet_heartbeat(
        self, request: m.TabletHeartbeatRequest, ctx: RequestContext
    ) -> m.TabletHeartbeatResponse:
        """TABLET_HEARTBEAT (30001): it lives; error 58 tells it to register again."""
        session = self._sessions.get(request.server_id)
        if session is None or session.server_epoch != request.server_epoch:
            raise error(
                ErrorCode.SERVER_NOT_EXIST_EXCEPTION,
                f"tablet server {request.server_id} with epoch {request.server_epoch} is not "
                f"registered; register again",
            )
        session.seen_ms = self._clock_ms()
        return m.TabletHeartbeatResponse(coordinator_epoch=self.catalog.epoch)

    async def allocate_writer_ids(
        self, request: m.AllocateWriterIdsRequest, ctx: RequestContext
    ) -> m.AllocateWriterIdsResponse:
        """ALLOCATE_WRITER_IDS (30002): a range for a tablet server to hand out."""
        if not 1 <= request.count <= WRITER_IDS_MAX:
            raise ConfigError(f"count {request.count} is not allowed; give 1 to {WRITER_IDS_MAX}")
        ids = await self.catalog.allocate_writer_ids(request.count)
        return m.AllocateWriterIdsResponse(first_writer_id=ids.start, count=len(ids))

    async def expire_sessions(self) -> None:
        """Take tablet servers out that have been silent for too long."""
        limit = self._clock_ms() - SESSION_MS
        for server_id in [i for i, s in self._sessions.items() if s.seen_ms < limit]:
            await self.catalog.exclusive(lambda i=server_id: self._expire(i))

    async def _expire(self, server_id: int) -> None:
        session = self._sessions.get(server_id)
        if session is None or session.seen_ms >= self._clock_ms() - SESSION_MS:
            return
        log.warning("tablet_silent", server_id=server_id, epoch=session.server_epoch)
        del self._sessions[server_id]
        self.tablets.detach(server_id)
        nodes = tuple(n for n in self.image.tablets.values() if n.node_id != server_id)
        self.image.apply([NodesPut(self.image.coordinator, nodes)])
        await self.tablets.update_metadata([self._nodes()])

    async def _expire_sessions(self) -> None:
        while True:
            await asyncio.sleep(SESSION_CHECK_SECONDS)
            try:
                await self.expire_sessions()
            except Exception:
                log.exception("tablet_session_check_failed")

    def _set_nodes(self, tablet: ServerNode) -> None:
        others = [n for n in self.image.tablets.values() if n.node_id != tablet.node_id]
        self.image.apply([NodesPut(self.image.coordinator, (*others, tablet))])

    def _nodes(self) -> NodesPut:
        return NodesPut(self.image.coordinator, tuple(self.image.tablets.values()))

    def _remote(self, node: ServerNode) -> RemoteTablet:
        if self._connect is None:
            raise ConfigError("this coordinator serves its own tablet server and takes no other")
        connect = self._connect
        return RemoteTablet(
            node.node_id, self.catalog.epoch, lambda: connect(node), TABLET_TIMEOUT_MS
        )

    def __repr__(self) -> str:
        return f"Coordinator(tablets={sorted(self.image.tablets)}, image={self.image!r})"


def _node_of(request: m.RegisterTabletServerRequest) -> ServerNode:
    try:
        endpoints = parse_endpoints(request.listeners)
    except ValueError as problem:
        raise ConfigError(f"listeners {request.listeners!r:.200}: {problem}") from None
    if not endpoints:
        raise ConfigError("listeners is empty; give NAME://host:port of every listener")
    rack = request.rack if request.HasField("rack") else None
    return ServerNode(request.server_id, endpoints, rack)
