"""Tablet servers in other processes: they register, send heartbeats, and leave by silence.

A registration has a server epoch from a durable counter. It ends when the server registers again,
or is silent for too long. A server joins between two changes of the catalog: the answer carries the
whole image, and every later change is sent to the new registration. A registration outlives its
coordinator: the next one goes on with it, under the same epoch. A server that has left is not
in the metadata, but with a shared log as long as it leads buckets (`cluster/metadata_service.py`).
Heartbeats report what the server saw of the remote locations.

| `zufluss.log.durability` | too long | the buckets of a server that has left |
|---|---|---|
| `local` | `SESSION_SECONDS` | have no leader until it is back |
| `remote` | `LEASES_PER_SESSION` leases of lookups, or at once when its address refuses connections | are taken over by others (`wal/takeover.py`) |
"""  # noqa: E501 - a table row does not wrap

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import structlog

from zufluss.cluster import codec
from zufluss.cluster.image import ClusterNode, NodesPut
from zufluss.cluster.replicas import (
    ReplicaAssignment,
    RpcCaller,
    assignments,
    replica_to_proto,
)
from zufluss.cluster.wal import WalSession, session_to_proto
from zufluss.config.values import parse_endpoints
from zufluss.coordinator.catalog.catalog import Catalog
from zufluss.coordinator.confirmations import Confirmations
from zufluss.coordinator.producers.book import ProducerBook
from zufluss.coordinator.remote.locations import LocationRegistry
from zufluss.coordinator.tablets import RemoteTablet, Tablets, producer_messages
from zufluss.coordinator.wal.book import LOCAL, REMOTE
from zufluss.coordinator.wal.keeper import WalKeeper
from zufluss.errors import ConfigError, ErrorCode, NetworkError, ZuflussError, error
from zufluss.periodic import log_failure, pause, repeat
from zufluss.remote.health import HealthReport
from zufluss.tasks import end
from zufluss.wire import messages as m

if TYPE_CHECKING:
    from zufluss.net.services import RequestContext

log = structlog.get_logger(__name__)

SESSION_SECONDS = 15.0
"""A tablet server without a heartbeat for longer than this has left."""
LEASES_PER_SESSION = 2
"""With a shared log: the same, in times of the lease of lookups."""
SUSPECT_LEASES = 0.45
"""With a shared log: a server that missed a heartbeat is looked at after so much of a lease. Three
heartbeats go into one."""
CHECK_SECONDS = 1.0
"""Interval between two checks for silent servers."""
CHECK_SECONDS_SHARED = 0.2
"""The same with a shared log."""
MOVE_SECONDS = 60.0
"""The longest time for which a server that registers again for another location is waited for,
before the next one does."""
HELD_UP_SECONDS = 1.0
"""A check that comes later than this finds a coordinator that was held up, not silent servers."""
REFUSALS = 2
"""Connections that a lost server refuses in a row."""
REFUSAL_SECONDS = 0.1
"""Pause between two of them."""
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
    seen: float
    """When its last heartbeat arrived, on a clock that never jumps."""
    watched: bool = False
    """Whether somebody looks if its address refuses connections."""
    replaced: bool = False
    """Whether a process registers with its id: another one, or itself."""
    answering: int = 0
    """Heartbeats whose answers wait for the metadata store. The server is not silent meanwhile."""

    def goes_on(self, node: ClusterNode, server_epoch: int) -> bool:
        """Whether this is the registration of the process that asks to go on with it."""
        return (self.node, self.tablet.server_epoch) == (node, server_epoch) and not self.replaced

    def is_followed(self, server_epoch: int) -> bool:
        """Whether a process has registered, or does so now, after the one with this epoch."""
        own = self.tablet.server_epoch
        return 0 < server_epoch < own or (self.replaced and server_epoch == own)


class Registrations:
    """The tablet servers that registered with this coordinator."""

    def __init__(
        self,
        catalog: Catalog,
        tablets: Tablets,
        locations: LocationRegistry,
        producers: ProducerBook,
        connect: Connect,
        clock: Callable[[], float],
        on_join: Callable[[int], None],
        wal: WalKeeper | None = None,
        on_leave: Callable[[], None] = lambda: None,
        confirmations: Confirmations | None = None,
    ) -> None:
        """`on_join` gets the id of every server that registered; `clock` never jumps.

        `wal` has the sessions of the shared log, None where disks have the logs. `on_leave` is
        called after a server was given up. `confirmations` says whether another coordinator has
        taken over; None where that cannot be, or does not matter to lookups.
        """
        self._catalog = catalog
        self._image = catalog.image
        self._tablets = tablets
        self._locations = locations
        self._producers = producers
        self._connect = connect
        self._clock = clock
        self._on_join = on_join
        self._on_leave = on_leave
        self._wal = wal
        self._confirmations = confirmations
        self._known: set[int] = set()
        """Servers that have registered with this coordinator, or gone on under it."""
        self._sessions: dict[int, TabletSession] = {}
        self._check_seconds = CHECK_SECONDS if wal is None else CHECK_SECONDS_SHARED
        self._checked = clock()
        """When the last check ended."""
        self._task: asyncio.Task[None] | None = None
        self._watches: set[asyncio.Task[None]] = set()
        self._leaving: dict[int, asyncio.Task[None]] = {}
        """Servers that are about to be removed from the image."""
        self._moving: tuple[int, float] | None = None
        """The server that was told to begin a session in another location, and when."""

    def start(self) -> None:
        """Check for silent servers from now on."""
        self._checked = self._clock()
        work = repeat(self._check_seconds, self.check, "tablet_session_check_failed")
        self._task = asyncio.create_task(work, name="tablet-sessions")

    async def stop(self) -> None:
        """End every registration; requests under way to the servers fail."""
        await end(self._task)
        for task in (*self._watches, *self._leaving.values()):
            await end(task)
        for session in self._sessions.values():
            session.tablet.end()

    async def register_tablet_server(
        self, request: m.RegisterTabletServerRequest, ctx: RequestContext
    ) -> m.RegisterTabletServerResponse:
        """REGISTER_TABLET_SERVER (30000): the answer carries the image and all replicas."""
        node = _node_of(request)
        self._check_durability(request)
        if request.HasField("living_server_epoch"):
            return await self._go_on(node, request.living_server_epoch)
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
            before.replaced = True
        if self._wal is not None:
            self._note_former(self._wal, request, node)
            await self._wal.end(node.node_id)  # not in turn: the location may be slow
        response = await self._catalog.exclusive(partial(self._join, node))
        log.info("tablet_registered", server_id=node.node_id, epoch=response.server_epoch)
        self._on_join(node.node_id)
        return response

    async def _go_on(self, node: ClusterNode, living: int) -> m.RegisterTabletServerResponse:
        """Go on with a registration at a former coordinator; error 58 if it has to begin anew."""
        response = await self._catalog.exclusive(partial(self._join_living, node, living))
        await self._confirm()
        log.info("tablet_goes_on", server_id=node.node_id, epoch=living)
        self._on_join(node.node_id)
        return response

    async def _confirm(self) -> None:
        """Raise error 65 if another coordinator has taken over, and its word counts."""
        if self._confirmations is not None:
            await self._confirmations.confirmed()

    async def tablet_heartbeat(
        self, request: m.TabletHeartbeatRequest, ctx: RequestContext
    ) -> m.TabletHeartbeatResponse:
        """TABLET_HEARTBEAT (30001): error 58 tells a server to register again.

        It also gets it if its session of the shared log is to go on in another location.
        Error 24 tells it that another process has registered with its id since. It must not
        register again then: the two would take turns.
        """
        session = self._sessions.get(request.server_id)
        if session is not None and session.is_followed(request.server_epoch):
            # While the other one still registers, only the address of the earlier one is known.
            where = "" if session.replaced else f", at {session.node.endpoints[0]}"
            raise _followed(request.server_id, where)
        other = request.HasField("coordinator_epoch") and (
            request.coordinator_epoch != self._catalog.epoch
        )
        if session is None or other or session.tablet.server_epoch != request.server_epoch:
            raise _unknown(request.server_id, request.server_epoch)
        session.seen = self._clock()
        self._tablets.heard_of(request.server_id)
        self._report(request)
        self._check_location(request.server_id)
        session.answering += 1
        try:
            await self._confirm()
        finally:
            session.answering -= 1
            session.seen = self._clock()
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

    def _check_durability(self, request: m.RegisterTabletServerRequest) -> None:
        """Raise `ConfigError` for a server that makes rows durable elsewhere than the others."""
        if request.remote_durability != (self._wal is not None):
            here, there = (REMOTE, LOCAL) if self._wal is not None else (LOCAL, REMOTE)
            raise ConfigError(
                f"zufluss.log.durability of tablet server {request.server_id} is {there}, but "
                f"{here} at the coordinator; all servers of a cluster have the same value"
            )

    def _check_location(self, server_id: int) -> None:
        """Error 58 if the session of a server is in a location that takes no new files any more.

        One server after the other: the buckets of a server that registers wait for a moment.
        """
        wal = self._wal
        if wal is None or not wal.is_displaced(server_id):
            return
        now = self._clock()
        if self._moving is not None and self._moving[0] != server_id:
            other, since = self._moving
            if now - since < MOVE_SECONDS and not wal.is_settled(other):
                return
        self._moving = (server_id, now)
        raise error(
            ErrorCode.SERVER_NOT_EXIST_EXCEPTION,
            f"the location of the session of tablet server {server_id} takes no new files; "
            "register again, to begin one in another location",
        )

    def _note_former(
        self, wal: WalKeeper, request: m.RegisterTabletServerRequest, node: ClusterNode
    ) -> None:
        """Note until when the former process of a server may answer lookups.

        That the process of its data directory has ended is believed only at the address where it
        was registered: the directory may be a copy. A coordinator that has just begun does not
        know the address.
        """
        before = self._sessions.get(request.server_id)
        if before is not None:
            wal.confirmed(before.tablet.server_epoch, before.seen)
        returned = before is not None and before.node.endpoints == node.endpoints
        if request.HasField("former_server_epoch") and returned:
            wal.process_ended(request.former_server_epoch)

    async def check(self) -> None:
        """Look for silent servers, after a pause.

        If this process was held up meanwhile (stopped, swapped out, suspended), heartbeats wait in
        its sockets: that time is not counted as silence of its servers.
        """
        now = self._clock()
        late = now - self._checked - self._check_seconds
        if late > HELD_UP_SECONDS:
            log.warning("coordinator_held_up", seconds=round(late, 1))
            for session in self._sessions.values():
                session.seen = min(now, session.seen + late)
        self._expire()
        self._checked = self._clock()

    async def expire(self) -> None:
        """Give up the servers that have been silent for too long, and wait until they have left."""
        self._expire()
        await asyncio.gather(*self._leaving.values())

    def _expire(self) -> None:
        """Begin to give up the servers that have been silent for too long.

        That is not waited for: a change of the catalog that waits for one of several lost servers
        would hide that the others are lost, too.
        """
        for server_id, session in tuple(self._sessions.items()):
            silent = self._clock() - session.seen
            if silent > self._session_seconds and not session.answering:
                self._give_up(server_id, session)
            elif self._wal is not None and silent > SUSPECT_LEASES * self._wal.lease_seconds:
                self._watch(server_id, session)
        self._take_leave()

    @property
    def _session_seconds(self) -> float:
        """How long a server may be silent."""
        wal = self._wal
        return SESSION_SECONDS if wal is None else LEASES_PER_SESSION * wal.lease_seconds

    def _watch(self, server_id: int, session: TabletSession) -> None:
        """Look whether a server that missed a heartbeat has ended."""
        if session.watched:
            return
        session.watched = True
        watch = asyncio.create_task(self._give_up_if_refused(server_id, session))
        self._watches.add(watch)
        watch.add_done_callback(self._watches.discard)

    async def _give_up_if_refused(self, server_id: int, session: TabletSession) -> None:
        try:
            for _ in range(REFUSALS):
                if not await self._refuses(session.node):
                    return
                await pause(REFUSAL_SECONDS)
            self._give_up(server_id, session)
            self._take_leave()
        except Exception as problem:
            log_failure("tablet_not_watched", problem)
        finally:
            session.watched = False

    async def _refuses(self, node: ClusterNode) -> bool:
        """Whether nobody listens at the address of a server."""
        try:
            await self._connect(node)
        except NetworkError as problem:
            return isinstance(problem.__cause__, ConnectionRefusedError)
        return False

    def fence(self, server_id: int, server_epoch: int) -> None:
        """Give a registration up that does not do what it is told: others take its buckets over.

        The server registers again with its next heartbeat.
        """
        session = self._sessions.get(server_id)
        if session is not None and session.tablet.server_epoch == server_epoch:
            self._give_up(server_id, session)
            self._take_leave()

    async def _join(self, node: ClusterNode) -> m.RegisterTabletServerResponse:
        server_epoch = await self._catalog.next_server_epoch()
        self._tablets.detach(node.node_id)
        await self._announce(node.node_id, (node,))
        session, replicas = await self._begin(node.node_id, server_epoch)
        return await self._joined(node, server_epoch, session, replicas)

    async def _join_living(self, node: ClusterNode, living: int) -> m.RegisterTabletServerResponse:
        """Continue a registration, unless another process has registered with this id here.

        The same process may ask twice, because an answer was lost.
        """
        before = self._sessions.get(node.node_id)
        live = None if self._wal is None else self._wal.book.live(node.node_id)
        if live is not None and live.session.server_epoch > living:
            raise _followed(node.node_id, "")
        if before is not None and before.tablet.server_epoch > living:
            raise _followed(node.node_id, f", at {before.node.endpoints[0]}")
        again = before is not None and before.goes_on(node, living)
        if again and self._wal is not None and self._wal.is_displaced(node.node_id):
            raise _unknown(node.node_id, living)  # it was told to begin one in another location
        if not again and node.node_id in self._known:
            raise _unknown(node.node_id, living)
        replicas = assignments(self._image, node.node_id)
        if self._wal is not None:
            if not self._wal.is_live(node.node_id, living):
                raise _unknown(node.node_id, living)
            replicas = self._wal.assignments(node.node_id)
        if before is not None:
            before.tablet.end()
        self._tablets.detach(node.node_id)
        await self._announce(node.node_id, (node,))
        return await self._joined(node, living, None, replicas)

    async def _joined(
        self,
        node: ClusterNode,
        server_epoch: int,
        session: WalSession | None,
        replicas: Sequence[ReplicaAssignment],
    ) -> m.RegisterTabletServerResponse:
        """Send a server its orders from now on; the answer to its registration."""
        epoch, connect = self._catalog.epoch, partial(self._connect, node)
        tablet = RemoteTablet(node.node_id, epoch, server_epoch, connect, TABLET_TIMEOUT_MS)
        self._known.add(node.node_id)
        self._sessions[node.node_id] = TabletSession(node, tablet, self._clock())
        self._tablets.attach(node.node_id, tablet)
        producers = self._producers.of_server(node.node_id)
        return m.RegisterTabletServerResponse(
            server_epoch=server_epoch,
            coordinator_epoch=epoch,
            cluster_id=self._catalog.cluster_id,
            metadata=codec.update_request(self._image.snapshot(), epoch, server_epoch),
            replicas=map(replica_to_proto, replicas),
            locations=self._locations.locations.to_proto(),
            producers=await producer_messages(producers),
            configs=self._locations.configs_for_tablets.to_proto(),
            wal_session=None if session is None else session_to_proto(session),
            lookup_lease_ms=None if self._wal is None else self._wal.lease_ms,
        )

    async def _begin(
        self, server_id: int, server_epoch: int
    ) -> tuple[WalSession | None, list[ReplicaAssignment]]:
        """Begin the session of a registration; the buckets that the server leads in it."""
        if self._wal is None:
            return None, assignments(self._image, server_id)
        try:
            session = await self._wal.begin(server_id, server_epoch)
            changes = await self._wal.lead_again(server_id)
        except BaseException:
            await self._announce(server_id, ())
            raise
        await self._catalog.tell(changes)
        return session, self._wal.assignments(server_id)

    def _give_up(self, server_id: int, session: TabletSession) -> None:
        """End the registration of a server, unless it has registered again."""
        if self._sessions.get(server_id) is not session:
            return
        silent = self._clock() - session.seen
        log.warning(
            "tablet_silent", server_id=server_id, session=repr(session.tablet), seconds=silent
        )
        del self._sessions[server_id]
        session.tablet.end()  # at once: a change of the catalog may wait for it
        self._tablets.detach(server_id)
        self._locations.remove_reports(server_id)
        if self._wal is not None:
            self._wal.confirmed(session.tablet.server_epoch, session.seen)

    def _take_leave(self) -> None:
        """Begin to remove the servers from the image that are not registered any more.

        Called with every check, so a removal that failed is tried again.
        """
        for server_id in self._image.tablets.keys() - self._sessions.keys() - self._leaving.keys():
            work = self._catalog.exclusive(partial(self._leave, server_id))
            self._leaving[server_id] = leaving = asyncio.create_task(work)
            leaving.add_done_callback(partial(self._left, server_id))

    def _left(self, server_id: int, leaving: asyncio.Task[None]) -> None:
        del self._leaving[server_id]
        if not leaving.cancelled() and isinstance(problem := leaving.exception(), Exception):
            log_failure("tablet_not_removed", problem)

    async def _leave(self, server_id: int) -> None:
        if server_id in self._image.tablets and server_id not in self._sessions:
            await self._announce(server_id, ())
            self._on_leave()

    async def _announce(self, server_id: int, now: tuple[ClusterNode, ...]) -> None:
        """Replace one server in the image, here and at all other servers."""
        others = tuple(n for n in self._image.tablets.values() if n.node_id != server_id)
        nodes = NodesPut(self._image.coordinator, (*others, *now))
        self._image.apply([nodes])
        await self._tablets.update_metadata([nodes])


def _unknown(server_id: int, server_epoch: int) -> ZuflussError:
    return error(
        ErrorCode.SERVER_NOT_EXIST_EXCEPTION,
        f"tablet server {server_id} with epoch {server_epoch} is not registered; register again",
    )


def _followed(server_id: int, where: str) -> ZuflussError:
    return error(
        ErrorCode.FENCED_LEADER_EPOCH_EXCEPTION,
        f"another process registered as tablet server {server_id} after this one{where}; give each "
        "server a tablet-server.id of its own",
    )


def _node_of(request: m.RegisterTabletServerRequest) -> ClusterNode:
    try:
        endpoints = parse_endpoints(request.listeners)
    except ValueError as problem:
        raise ConfigError(f"listeners {request.listeners!r:.200}: {problem}") from None
    if not endpoints:
        raise ConfigError("listeners is empty; give NAME://host:port of every listener")
    rack = request.rack if request.HasField("rack") else None
    return ClusterNode(request.server_id, endpoints, rack)
