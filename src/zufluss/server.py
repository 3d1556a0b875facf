"""Assembling a process: `zufluss dev` (both roles) and `zufluss server --role …` (one of them).

Start order: data directory locked, kernels loaded (compiled if there are none), HTTP endpoint
opened, ports taken, metadata opened, logs recovered, connections accepted, spare threads started,
ready line printed. Stop order (SIGTERM, SIGINT) is the reverse: connections drained, logs synced
and closed with a clean marker, metadata closed, HTTP endpoint closed. A tablet server of a cluster
with a shared log first hands over its buckets after a SIGTERM; a SIGINT, or a second signal, leaves
that out. The ready line is the only thing on standard output.
"""

from __future__ import annotations

import asyncio
import math
import signal
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from contextlib import (
    AbstractAsyncContextManager,
    AsyncExitStack,
    asynccontextmanager,
    nullcontext,
    suppress,
)
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import structlog

from zufluss import system
from zufluss.clock import process_seconds, wall_ms
from zufluss.clock_file import CLOCK_FILE, COORDINATOR_CLOCK_FILE, expiry_clock
from zufluss.cluster.cluster_service import ClusterService
from zufluss.cluster.examination import Examination, Examine, cluster_findings, net_findings
from zufluss.cluster.image import ClusterNode
from zufluss.cluster.metadata_service import MetadataService
from zufluss.cluster.remote import home
from zufluss.cluster.token_service import TokenService
from zufluss.cluster.unserved import AccessRuleListing
from zufluss.cluster.writer_ids import WriterIds
from zufluss.config import options
from zufluss.config.load import Configuration
from zufluss.coordinator.remote.locations import NO_LOCATIONS
from zufluss.coordinator.server import Coordinator
from zufluss.coordinator.standby import Standby
from zufluss.coordinator.turn import Turn, stop_in_time, turn_of
from zufluss.embedded_lake import with_lake
from zufluss.errors import ConfigError, ZuflussError
from zufluss.expiry import ExpiryClock
from zufluss.lake.creation import LakeTableCreator
from zufluss.log.files import Files, files_from_environment
from zufluss.meta.api import MetaStore
from zufluss.meta.open import open_store
from zufluss.meta.probe import store_probe
from zufluss.net.listeners import resolve_listeners
from zufluss.net.memory import Limits
from zufluss.net.server import NetServer
from zufluss.net.services import Handler, RequestContext, Services
from zufluss.no_pandas import do_without_pandas
from zufluss.obs.lag import LoopLag
from zufluss.obs.metrics import ReadSamples
from zufluss.obs.pulse import Pulse
from zufluss.obs.server import (
    ServerDescription,
    balance_samples,
    disk_samples,
    lease_samples,
    location_samples,
    net_samples,
    producer_samples,
    registry_samples,
    remote_files_samples,
    serve_http,
    session_samples,
    tiering_samples,
    turn_samples,
)
from zufluss.obs.slow_stop import report_slow_stop, reports_end
from zufluss.peers import ServerConnections, coordinator_of
from zufluss.record import kernels
from zufluss.record.kernels.compiler_memory import release_compiler
from zufluss.remote.placement import TABLET_STATE_FILE
from zufluss.remote.storage import RemoteStorage
from zufluss.remote.tokens import Tokens
from zufluss.resources import (
    allow_open_files,
    keep_freed_memory,
    owned,
    settle_memory,
    share_interpreter,
)
from zufluss.tablet.coordinator_client import CoordinatorClient
from zufluss.tablet.findings import tablet_findings
from zufluss.tablet.link import CoordinatorLink
from zufluss.tablet.readiness import buckets_state, coordinator_state
from zufluss.tablet.samples import tablet_samples
from zufluss.tablet.server import TabletServer
from zufluss.tablet_servers import check_one_server
from zufluss.threads import fill_reserve, running_executor
from zufluss.wire.sasl import PlainAuthenticator

log = structlog.get_logger(__name__)

T = TypeVar("T")

CONNECTIONS_SHARE = 2
"""Connections may use one in this many of the files that the process may open."""
BOTH_ROLES, COORDINATOR, STANDBY, TABLET_SERVER = (
    "coordinator and tablet server", "coordinator", "standby coordinator", "tablet server",
)  # fmt: skip
"""Roles of a process, as people read them."""
LOCK_FILE = ".lock"
"""Locked in a data directory by the process that has its logs."""


def run_dev(conf: Configuration) -> int:
    """Serve both roles until a signal; returns the exit code."""
    check_one_server(Path(conf.get(options.DATA_DIR)))
    return _run(conf, _serve_dev, lock=LOCK_FILE)


def run_role(role: str, conf: Configuration, life: int | None = None) -> int:
    """Serve one role until a signal; returns the exit code.

    `life` is a pipe whose end means the same as a signal: the supervisor of the process is gone.
    """
    if role == "coordinator":
        return _run(conf, _serve_coordinator, lock=None, life=life)
    return _run(conf, _serve_tablet, lock=LOCK_FILE, life=life)


class Stop(asyncio.Event):
    """Set when the server is to stop; `at_once` as well if it hands nothing over before."""

    def __init__(self) -> None:
        super().__init__()
        self.at_once = asyncio.Event()

    def now(self) -> None:
        """Stop without handing anything over."""
        self.at_once.set()
        self.set()


Serve = Callable[[Configuration, Stop, "Shown"], Awaitable[None]]


def _run(conf: Configuration, serve: Serve, *, lock: str | None, life: int | None = None) -> int:
    """Run a server. A coordinator needs no `lock` of the data directory, only that of its store."""
    share_interpreter()
    do_without_pandas()
    keep_freed_memory()
    allow_open_files()
    if lacking := system.lacking():
        log.info("slower_on_this_system", system=sys.platform, without=", ".join(lacking))
    data_dir = Path(conf.get(options.DATA_DIR))
    files = Files()
    for parent in files.make_directories(data_dir):
        files.sync_directory(parent)
    locked = nullcontext() if lock is None else owned(data_dir / lock)
    with locked, reports_end():
        kernels.warm()
        runner = asyncio.Runner(loop_factory=_loop_factory())
        try:
            runner.run(_until_signal(conf, serve, life))
        finally:
            _close(runner)
    return 0


def _close(runner: asyncio.Runner) -> None:
    """Close the event loop, for which Python starts one more thread."""
    try:
        runner.close()
    except RuntimeError as e:  # there is nothing left that the thread would have waited for
        log.warning("event_loop_not_closed", reason=str(e))


async def _until_signal(conf: Configuration, serve: Serve, life: int | None = None) -> None:
    stop = Stop()
    loop = asyncio.get_running_loop()

    def begin_to_stop(*, at_once: bool) -> None:
        if at_once or stop.is_set():
            stop.at_once.set()
        if not stop.is_set():
            stop.set()
            report_slow_stop(loop)

    loop.add_signal_handler(signal.SIGTERM, partial(begin_to_stop, at_once=False))
    loop.add_signal_handler(signal.SIGINT, partial(begin_to_stop, at_once=True))
    if life is not None:
        loop.add_reader(life, _supervisor_died, loop, life, partial(begin_to_stop, at_once=True))
    loop.set_default_executor(running_executor())
    with suppress(OSError):  # uvloop starts its threads for names now; this one need not exist
        await loop.getaddrinfo("localhost", 0)
    async with _http(conf, stop) as shown:
        await serve(conf, stop, shown)


def _supervisor_died(
    loop: asyncio.AbstractEventLoop, life: int, begin_to_stop: Callable[[], None]
) -> None:
    loop.remove_reader(life)
    log.warning("supervisor_died")
    begin_to_stop()


def _loop_factory() -> Callable[[], asyncio.AbstractEventLoop] | None:
    try:
        import uvloop
    except ImportError:  # uvloop is not made for every platform; asyncio's own loop serves as well
        return None
    factory: Callable[[], asyncio.AbstractEventLoop] = uvloop.new_event_loop
    return factory


# -- sockets ----------------------------------------------------------------------------------


def _limits(conf: Configuration) -> Limits:
    return Limits(
        connections_max=_connections_max(conf),
        frame_bytes_max=conf.get(options.NETTY_SERVER_MAX_REQUEST_SIZE),
        inflight_max=conf.get(options.ZUFLUSS_NET_MAX_INFLIGHT_REQUESTS),
        receive_bytes_max=conf.get(options.ZUFLUSS_NET_RECEIVE_MEMORY),
        idle_seconds=conf.get(options.NETTY_CONNECTION_MAX_IDLE_TIME) / 1000,
        frame_seconds=conf.get(options.ZUFLUSS_NET_FRAME_TIMEOUT) / 1000,
        login_seconds=conf.get(options.ZUFLUSS_NET_LOGIN_TIMEOUT) / 1000,
        send_bytes_max=conf.get(options.ZUFLUSS_NET_SEND_MEMORY),
        send_seconds=conf.get(options.ZUFLUSS_NET_SEND_TIMEOUT) / 1000,
    )


def _connections_max(conf: Configuration) -> int:
    """The configured limit of connections, or what leaves enough files for logs and tables."""
    configured = conf.get(options.ZUFLUSS_NET_MAX_CONNECTIONS)
    files = system.open_files_limit()
    if files // CONNECTIONS_SHARE >= configured:
        return configured
    log.warning("connections_limited", open_files=files, connections=files // CONNECTIONS_SHARE)
    return max(1, files // CONNECTIONS_SHARE)


def _authenticator(conf: Configuration, needed: bool) -> PlainAuthenticator | None:
    jaas = conf.get(options.SECURITY_SASL_PLAIN_JAAS_CONFIG)
    if jaas is not None:
        return PlainAuthenticator.from_jaas(jaas)
    if needed:
        raise ConfigError(
            "security.protocol.map asks for sasl, but security.sasl.plain.jaas.config names no "
            "users; set it, or make the listener plaintext"
        )
    return None


async def _bound(
    conf: Configuration, services: Services, server_type: int | None = None
) -> NetServer:
    """A network server with its ports taken, which does not accept yet."""
    listeners = resolve_listeners(conf)
    needed = any(listener.protocol == "sasl" for listener in listeners)
    apart = server_type is not None
    server = NetServer(
        services,
        listeners,
        limits=_limits(conf),
        authenticator=_authenticator(conf, needed),
        server_type=server_type,
        internal_listener=conf.get(options.INTERNAL_LISTENER_NAME) if apart else None,
    )
    try:
        await server.bind()
    except OSError as e:
        raise ConfigError(
            f"bind.listeners: cannot listen on {', '.join(str(x.bind) for x in listeners)}: {e}"
        ) from None
    return server


def _node(node_id: int, server: NetServer, rack: str | None = None) -> ClusterNode:
    return ClusterNode(node_id, tuple(listener.advertised for listener in server.listeners), rack)


def _ready(server: NetServer, role: str) -> None:
    """Print the ready line, with the seconds since the process started."""
    where = server.listeners[0].bind
    rest = "".join(f", {listener.bind}" for listener in server.listeners[1:])
    seconds = process_seconds()
    sys.stdout.write(
        f"zufluss ready on {where.host}:{where.port}{rest} in {seconds:.1f} s ({role})\n"
    )
    sys.stdout.flush()


# -- roles ------------------------------------------------------------------------------------


async def _serve_dev(conf: Configuration, stop: Stop, shown: Shown) -> None:
    """Both roles in one process, on the same ports."""
    conf = with_lake(conf)
    services = Services()
    net = await _bound(conf, services)
    files = files_from_environment()
    async with AsyncExitStack() as closing:
        expiry = await closing.enter_async_context(_expiry_clock(conf, files))
        node = _node(conf.get(options.ZUFLUSS_COORDINATOR_ID), net)
        turn = await closing.enter_async_context(turn_of(conf, node, stop.now))
        if not await _turn_has_come(turn, stop):
            return
        store = await _opened_store(conf, closing, shown)
        coordinator = await Coordinator.open(
            conf,
            store,
            node,
            wall_ms,
            files=files,
            expiry_ms=expiry.now_ms,
            creator=LakeTableCreator(),
            on_fenced=_nothing if turn is None else turn.fenced,
        )
        orders = AsyncExitStack()
        orders.push_async_callback(stop_in_time, coordinator, store, _stop_seconds(conf))
        async with orders:  # until the tablet server can be stopped after the coordinator
            tablet = TabletServer(
                conf,
                files,
                wall_ms,
                coordinator.locations.storage,
                coordinator.remote,
                coordinator.catalog.allocate_ids,
                expiry_ms=expiry.now_ms,
            )
            closing.push_async_callback(tablet.close)
            await closing.enter_async_context(orders.pop_all())
        tablet.claim(coordinator.catalog.cluster_id)
        shown.pulse.watch(buckets_state(tablet))
        node = _node(tablet.server_id, net, conf.get(options.TABLET_SERVER_RACK))

        async def attach() -> None:
            tablet.confirmed(math.inf)  # nobody else can lead
            await coordinator.attach(node, tablet)

        away: ZuflussError | None = None
        try:
            await attach()
        except ZuflussError as problem:
            if tablet.shared is None or not problem.retriable:
                raise
            away = problem  # its location; what needs no log is served meanwhile
        tablet.rejoin = attach
        if away is not None:
            log.warning("shared_log_away", reason=away.message)
            tablet.waits_for = away.message
            tablet.join_later(away)
        coordinator.register(services)
        services.attach(coordinator.writer_ids)
        tablet.register(services)
        parts = [tablet_findings(tablet), net_findings(net)]
        parts += [coordinator.tags.findings, coordinator.rebalances.findings]
        services.attach(Examination(conf, expiry, parts))
        services.attach(shown.describe(BOTH_ROLES))
        shown.samples.append(turn_samples(turn))
        net.on_drain = tablet.fetch.drain
        shown.samples.extend([tablet_samples(tablet), *_coordinator_samples(coordinator)])
        if turn is not None:
            turn.leads = True
        await _accept(net, conf, stop, BOTH_ROLES, shown)
    if turn is not None and turn.over is not None:
        raise turn.over


def _expiry_clock(
    conf: Configuration, files: Files, name: str = CLOCK_FILE
) -> AbstractAsyncContextManager[ExpiryClock]:
    return expiry_clock(Path(conf.get(options.DATA_DIR)), files, name)


def _coordinator_samples(coordinator: Coordinator) -> list[ReadSamples]:
    shared = (
        []
        if coordinator.wal is None
        else [session_samples(coordinator.wal.book, coordinator.takeovers)]
    )
    return [
        *shared,
        tiering_samples(coordinator.lake.queue.status),
        registry_samples(coordinator.locations),
        location_samples(coordinator.locations.storage),
        remote_files_samples(coordinator.remote),
        lease_samples(coordinator.leases.book),
        producer_samples(coordinator.producers),
        balance_samples(coordinator.image, coordinator.rebalances),
    ]


async def _serve_coordinator(conf: Configuration, stop: Stop, shown: Shown) -> None:
    services = Services()
    net = await _bound(conf, services, server_type=1)
    tablets = ServerConnections()
    connect = partial(tablets.to_server, conf.get(options.INTERNAL_LISTENER_NAME))

    files = files_from_environment()
    node = _node(conf.get(options.ZUFLUSS_COORDINATOR_ID), net)
    async with AsyncExitStack() as closing:
        expiry = await closing.enter_async_context(
            _expiry_clock(conf, files, COORDINATOR_CLOCK_FILE)
        )
        closing.callback(tablets.close)
        turn = await closing.enter_async_context(turn_of(conf, node, stop.now))
        parts: list[Examine] = [net_findings(net)]
        shown.samples.append(turn_samples(turn))
        if turn is not None:
            parts.append(turn.findings)
            shown.pulse.watch(turn.state)
            if not turn.has_come:
                services.attach(Examination(conf, expiry, parts))
                services.attach(shown.describe(STANDBY))
                Standby(node, turn.leader, connect).register(services)
                await _begin_to_accept(net, conf, STANDBY, shown)
        coordinator = None
        if await _turn_has_come(turn, stop):
            store = await _opened_store(conf, closing, shown)
            opening = Coordinator.open(
                conf,
                store,
                node,
                wall_ms,
                connect=connect,
                files=files,
                expiry_ms=expiry.now_ms,
                creator=LakeTableCreator(),
                on_fenced=_nothing if turn is None else turn.fenced,
            )
            coordinator = await _unless_stopped(stop, opening)
        if coordinator is not None:
            closing.push_async_callback(stop_in_time, coordinator, store, _stop_seconds(conf))
            parts += _cluster_parts(coordinator)
            services.handlers.clear()  # of the standby
            coordinator.register(services)
            services.attach(Examination(conf, expiry, parts))
            services.attach(shown.describe(COORDINATOR))
            shown.samples.extend(_coordinator_samples(coordinator))
            if turn is not None:
                turn.leads = True
                log.info("coordinator_leads", epoch=coordinator.catalog.epoch)
            if not shown.accepting:
                await _begin_to_accept(net, conf, COORDINATOR, shown)
        await stop.wait()
        if turn is not None:
            turn.leave()
        await _drain(net, conf, COORDINATOR, shown)
    if turn is not None and turn.over is not None:
        raise turn.over


async def _turn_has_come(turn: Turn | None, stop: asyncio.Event) -> bool:
    """Wait until this process is elected; False if the server is to stop before that."""
    if turn is not None:
        await _unless_stopped(stop, turn.come())
    return turn is None or (turn.has_come and not stop.is_set())


async def _opened_store(conf: Configuration, closing: AsyncExitStack, shown: Shown) -> MetaStore:
    """The metadata store, which is read only after the turn has come: it is not behind then."""
    store = await open_store(conf)
    closing.push_async_callback(store.close)
    shown.pulse.watch(await closing.enter_async_context(store_probe(store)))
    return store


def _cluster_parts(coordinator: Coordinator) -> list[Examine]:
    """What the coordinator that leads knows of the cluster."""
    parts = [cluster_findings(coordinator.image)]
    parts += [coordinator.tags.findings, coordinator.rebalances.findings]
    return parts if coordinator.takeovers is None else [*parts, coordinator.takeovers.findings]


def _stop_seconds(conf: Configuration) -> float:
    return conf.get(options.ZUFLUSS_SHUTDOWN_TIMEOUT) / 1000


def _nothing() -> None:
    pass


async def _unless_stopped(stop: asyncio.Event, opening: Coroutine[Any, Any, T]) -> T | None:
    """The result of some work, which may last for long; None if the server is to stop meanwhile."""
    work = asyncio.ensure_future(opening)
    await _first(work, stop.wait())
    await asyncio.wait({work})  # it was cancelled if the server is to stop
    return None if work.cancelled() else work.result()


async def _serve_tablet(conf: Configuration, stop: Stop, shown: Shown) -> None:
    files = files_from_environment()
    async with _expiry_clock(conf, files) as expiry:
        await _serve_tablet_until(conf, stop, files, expiry, shown)


async def _serve_tablet_until(
    conf: Configuration, stop: Stop, files: Files, expiry: ExpiryClock, shown: Shown
) -> None:
    services = Services()
    connections = ServerConnections()
    leading, connect = coordinator_of(conf, connections)
    net = await _bound(conf, services, server_type=2)
    coordinator = CoordinatorClient(connect)
    state_file = Path(conf.get(options.DATA_DIR)) / TABLET_STATE_FILE
    storage = RemoteStorage(conf, NO_LOCATIONS, state_file=state_file)
    tablet = TabletServer(
        conf,
        files,
        wall_ms,
        storage,
        coordinator,
        coordinator.allocate_ids,
        expiry_ms=expiry.now_ms,
        connect=partial(connections.to_server, conf.get(options.INTERNAL_LISTENER_NAME)),
    )

    def claim(cluster_id: str) -> None:
        tablet.claim(cluster_id)
        storage.cluster_id = cluster_id

    def home_uri(location_id: int | None) -> str:
        return home(storage.locations, location_id).uri

    node = _node(tablet.server_id, net, conf.get(options.TABLET_SERVER_RACK))
    link = CoordinatorLink(
        node,
        tablet.image,
        tablet,
        coordinator,
        claim,
        storage.reports,
        replaced=stop.now,
        session=tablet.session_terms(),
    )
    tablet.rejoin = link.rejoin
    leaders = ServerConnections()
    tablet.follow_through(partial(leaders.to_server, conf.get(options.INTERNAL_LISTENER_NAME)))
    link.register(services)
    shown.pulse.watch(coordinator_state(link))
    shown.pulse.watch(buckets_state(tablet))
    joined = asyncio.Event()
    after = AfterJoining(services, joined)
    after.attach(MetadataService(tablet.image, tablet.conf, home_uri))
    after.attach(ClusterService(tablet.image))
    after.attach(AccessRuleListing())
    after.attach(TokenService(tablet.image, lambda: storage.locations, Tokens(conf, wall_ms)))
    after.attach(WriterIds(coordinator.allocate_writer_ids))
    tablet.register(after)
    after.attach(Examination(conf, expiry, [tablet_findings(tablet), net_findings(net)]))
    after.attach(shown.describe(f"{TABLET_SERVER} {tablet.server_id}"))
    net.on_drain = tablet.fetch.drain
    try:
        if leading is not None:
            leading.start()
        await net.start()  # first: the coordinator calls back as soon as it knows us
        storage.start()
        joining = asyncio.create_task(link.start())
        await _first(joining, stop.wait())
        if joining.done():
            joining.result()
            joined.set()
            shown.samples.extend([tablet_samples(tablet), location_samples(storage)])
            leave = partial(link.leave, stop.at_once, conf.get(options.ZUFLUSS_SHUTDOWN_TIMEOUT))
            await _accept(net, conf, stop, TABLET_SERVER, shown, leave)
            if link.replacement is not None:
                raise ConfigError(link.replacement.message)
    finally:
        await link.stop()
        await tablet.close()
        await storage.stop()
        connections.close()
        leaders.close()
        if leading is not None:
            await leading.stop()


class AfterJoining(Services):
    """Handlers that answer when the tablet server knows the cluster.

    It listens before that, because the coordinator calls it. A client that came meanwhile would be
    told that its table does not exist.
    """

    def __init__(self, services: Services, joined: asyncio.Event) -> None:
        self.handlers, self.raw = services.handlers, services.raw
        self._joined = joined

    def register(self, key: int, handler: Handler) -> None:
        """Answer API `key` with a coroutine, once the server has joined."""

        async def wait_and_answer(request: Any, context: RequestContext) -> Any:
            await self._joined.wait()
            return await handler(request, context)

        super().register(key, wait_and_answer)


async def _accept(
    net: NetServer,
    conf: Configuration,
    stop: Stop,
    role: str,
    shown: Shown,
    leave: Callable[[], Awaitable[None]] | None = None,
) -> None:
    """Serve until `stop`, then drain; before that, `leave` the cluster."""
    await _begin_to_accept(net, conf, role, shown)
    await stop.wait()
    await _drain(net, conf, role, shown, leave)


async def _begin_to_accept(net: NetServer, conf: Configuration, role: str, shown: Shown) -> None:
    await net.start()
    disk = disk_samples(Path(conf.get(options.DATA_DIR)))
    shown.samples.extend([net_samples(net, role), disk])
    release_compiler()
    settle_memory()
    fill_reserve()
    shown.pulse.accepting()
    _ready(net, role)


async def _drain(
    net: NetServer,
    conf: Configuration,
    role: str,
    shown: Shown,
    leave: Callable[[], Awaitable[None]] | None = None,
) -> None:
    log.info("stopping", role=role)
    shown.pulse.note()
    if leave is not None:
        await leave()
    await net.stop(_stop_seconds(conf))
    shown.samples.clear()  # of parts that are closed next


@dataclass(frozen=True, slots=True)
class Shown:
    """What a process shows of itself over HTTP; the roles add their parts."""

    pulse: Pulse
    """Whether the process lives and is ready."""
    lag: LoopLag
    """How late the event loop was."""
    samples: list[ReadSamples]
    """The metrics."""

    @property
    def accepting(self) -> bool:
        """Whether the server accepts requests."""
        return self.pulse.accepts

    def describe(self, role: str) -> ServerDescription:
        """The handler that answers the metrics to clients."""
        return ServerDescription(role, self.samples, self.lag)


@asynccontextmanager
async def _http(conf: Configuration, stop: Stop) -> AsyncIterator[Shown]:
    """Serve metrics and probes for the length of a block, if that is configured.

    The endpoint is there before the metadata is opened and until all logs are closed, so that an
    orchestrator can tell a long recovery from a hang.
    """
    loop = asyncio.get_running_loop()
    lag = LoopLag(loop)
    shown = Shown(Pulse(loop, stop.is_set), lag, [])
    shown.samples.append(lag.samples)
    endpoint = serve_http(conf, shown.samples, shown.pulse)
    if endpoint is not None:
        lag.begin()
        shown.pulse.start()
    try:
        yield shown
    finally:
        lag.stop()
        shown.pulse.stop()
        if endpoint is not None:
            await asyncio.to_thread(endpoint.close)  # a scrape under way waits for this loop


async def _first(*waits: Awaitable[object]) -> None:
    tasks = [asyncio.ensure_future(wait) for wait in waits]
    await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    for task in tasks:
        if not task.done():
            task.cancel()
