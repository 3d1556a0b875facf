"""The coordinator role: the parts of the coordinator, built from the bottom up.

One active coordinator per cluster. Life of a process with both roles:

    coordinator = await Coordinator.open(conf, store, node, clock_ms)   # nobody serves yet
    await coordinator.attach(tablet_node, tablet)   # logs recovered, dropped tables removed
    coordinator.register(services)                  # then open the sockets
    services.attach(coordinator.writer_ids)
    …
    await coordinator.stop()                        # the caller closes the store

In a process of its own, the coordinator gets `connect` to reach tablet servers. They register by
themselves (`registration.py`), and they serve INIT_WRITER.

Every part gets what it needs when it is made. Two parts that need each other share a smaller one:

| parts | what they share |
|---|---|
| the catalog, and everybody who follows it | the feed of catalog changes (`feed.py`) |
| leases, and everybody who waits for their end | the feed of freed buckets |
| the registry of locations and the cleaner | the held drops (`remote/held_drops.py`) |
| the registry of locations and the lake | the lake book (`lake/book.py`) |
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, NamedTuple

from zufluss.cluster.authority import Authority
from zufluss.cluster.cluster_service import ClusterService
from zufluss.cluster.image import ClusterImage, ClusterNode, ImageChange, NodesPut
from zufluss.cluster.metadata_service import MetadataService
from zufluss.cluster.replicas import LocalTablet, assignments
from zufluss.cluster.token_service import TokenService
from zufluss.cluster.unserved import UnservedProcedures
from zufluss.cluster.writer_ids import WriterIds
from zufluss.config import options, zookeeper_options
from zufluss.config.load import Configuration, LiveConfiguration
from zufluss.coordinator import records
from zufluss.coordinator.bucket_remotes import BucketRemotes
from zufluss.coordinator.catalog.auto_partitions import AutoPartitions
from zufluss.coordinator.catalog.catalog import Catalog
from zufluss.coordinator.catalog.service import CoordinatorService
from zufluss.coordinator.confirmations import Confirmations
from zufluss.coordinator.feed import Feed
from zufluss.coordinator.lake.book import LakeBook
from zufluss.coordinator.lake.creation import LakeTableKeeper
from zufluss.coordinator.lake.offsets import OffsetsFiles
from zufluss.coordinator.lake.service import LakeService
from zufluss.coordinator.lake.tables import LakeTables
from zufluss.coordinator.leases.book import LeaseBook
from zufluss.coordinator.leases.calls import LeaseCalls
from zufluss.coordinator.leases.holds import LeaseHolds
from zufluss.coordinator.leases.service import LeaseService
from zufluss.coordinator.leases.timer import LeaseTimer
from zufluss.coordinator.ledger import Ledger
from zufluss.coordinator.producers.book import ProducerBook
from zufluss.coordinator.producers.calls import ProducerCalls
from zufluss.coordinator.producers.offsets import ProducerOffsets
from zufluss.coordinator.producers.service import ProducerService
from zufluss.coordinator.rebalance.rebalances import Rebalances
from zufluss.coordinator.rebalance.service import RebalanceService
from zufluss.coordinator.rebalance.tags import ServerTags, load_tags
from zufluss.coordinator.rebalance.task import StoredRebalance, load_rebalance
from zufluss.coordinator.registration import Connect, Registrations
from zufluss.coordinator.remote.held_drops import HeldDrops
from zufluss.coordinator.remote.inventory import Inventory
from zufluss.coordinator.remote.keeper import RemoteKeeper
from zufluss.coordinator.remote.lease_usage import LeaseUsageService
from zufluss.coordinator.remote.location_service import LocationService
from zufluss.coordinator.remote.locations import LocationRegistry
from zufluss.coordinator.remote.lost import LostLocations
from zufluss.coordinator.remote.sweep_service import SweepService
from zufluss.coordinator.tablets import Tablets
from zufluss.coordinator.upgrade import upgrade
from zufluss.coordinator.wal.book import REMOTE, SessionBook
from zufluss.coordinator.wal.cleaner import WalCleaner
from zufluss.coordinator.wal.departure import Departures
from zufluss.coordinator.wal.handover import Handovers
from zufluss.coordinator.wal.keeper import WalKeeper
from zufluss.coordinator.wal.service import WalService
from zufluss.coordinator.wal.standbys import StandbyOrders
from zufluss.coordinator.wal.takeover import Takeovers
from zufluss.lake.creation import LakeTableCreator
from zufluss.log.files import Files
from zufluss.meta.api import Entry, MetaStore
from zufluss.model.table import TableBucket
from zufluss.remote.files import Usage, summed
from zufluss.remote.tokens import Tokens

if TYPE_CHECKING:
    from zufluss.net.services import Services


class _Base(NamedTuple):
    """What every part of a coordinator is built on."""

    conf: LiveConfiguration
    store: MetaStore
    ledger: Ledger
    image: ClusterImage
    changes: Feed[Sequence[ImageChange]]
    freed: Feed[Sequence[TableBucket]]
    tablets: Tablets
    authority: Authority
    clock_ms: Callable[[], int]
    clock: Callable[[], float]
    expiry_ms: Callable[[], int]
    lake_tables: LakeTableKeeper


class _State(NamedTuple):
    """The parts that load their state from the metadata store."""

    remotes: BucketRemotes
    lease_book: LeaseBook
    lake_book: LakeBook
    held_drops: HeldDrops
    locations: LocationRegistry
    producer_book: ProducerBook
    sessions: SessionBook
    rebalance: StoredRebalance


class Coordinator:
    """The coordinator role of a process. Open it with `Coordinator.open`."""

    def __init__(
        self,
        base: _Base,
        state: _State,
        node: ClusterNode,
        connect: Connect | None,
        reach: Callable[[str], None],
    ) -> None:
        conf, clock_ms = base.conf, base.clock_ms
        self.conf = conf
        self.image = base.image
        self.changes = base.changes
        """Changes of the catalog."""
        self.freed = base.freed
        """Buckets with snapshots that no lease pins any more."""
        self.tablets = base.tablets
        self.locations = state.locations
        self.remotes = state.remotes
        self.held_drops = state.held_drops
        self.producers = ProducerCalls(
            state.producer_book, base.image, base.tablets, conf, base.authority.is_super
        )
        self.lake_tables = base.lake_tables
        """Creates the lake tables of tables."""
        self.catalog = _catalog(base, state)
        self.tags = ServerTags(base.ledger, base.image, self.catalog.exclusive, self.catalog.tell)
        self.sessions = state.sessions
        """Every session of the shared log that anything is left of."""
        self.wal = _wal(base, state, self.catalog, reach)
        """Begins and ends these sessions; None where the disks of tablet servers have the logs."""
        self.lake = _lake(base, state)
        self.leases = _leases(base, state)
        interval_ms = conf.get(options.KV_SNAPSHOT_LEASE_EXPIRATION_CHECK_INTERVAL)
        self.lease_timer = LeaseTimer(state.lease_book, base.clock, interval_ms / 1000)
        holds = LeaseHolds(conf, self.leases, base.clock)
        self.remote = _remote(base, state, self.catalog, self.lake, holds, reach, self.wal)
        self.wal_cleaner = None
        keeper = self.wal
        if keeper is None and any(state.sessions):  # of the time when the cluster had a shared log
            keeper = _wal_keeper(base, state, self.catalog, reach)
        if keeper is not None:
            self.wal_cleaner = WalCleaner(keeper, base.expiry_ms, reach, ends_all=self.wal is None)
        self._sweeps = SweepService(self.remote.sweep, state.locations)
        self._inventory = _inventory(base, state, self.remote)
        self.lost_locations = LostLocations(
            state.locations,
            self.remote.snapshots,
            self.leases,
            state.held_drops,
            self.lake.leave,
            self.catalog.exclusive,
            reach,
        )
        self.partitions = AutoPartitions(
            conf, self.catalog, holds, base.freed, clock_ms, base.expiry_ms
        )
        self.producer_offsets = ProducerOffsets(
            base.store, base.ledger, conf, clock_ms, base.expiry_ms
        )
        self.writer_ids = WriterIds(self.catalog.allocate_writer_ids)
        self.takeovers: Takeovers | None = None
        """Gives buckets of lost servers to others; None without a shared log, or other servers."""
        self.handovers: Handovers | None = None
        """Moves buckets between live servers; None as for `takeovers`."""
        self.standbys: StandbyOrders | None = None
        """Has servers follow buckets of others; None where there are no take-overs."""
        self.registrations: Registrations | None = None
        """Tablet servers of other processes; None in a process with both roles."""
        if connect is not None:
            self.locations.add_reports(node.node_id, self.locations.storage.reports)
            if self.wal is not None:
                self.takeovers = Takeovers(
                    self.wal, self.catalog, base.tablets, state.producer_book, reach
                )
                self.standbys = StandbyOrders(self.wal, self.catalog, base.tablets)
            self.registrations = self._registrations(base, state, connect)
            if self.wal is not None and self.takeovers is not None:
                self.handovers = Handovers(
                    self.wal,
                    self.catalog,
                    base.tablets,
                    self.takeovers,
                    self.registrations.fence,
                    reach,
                )
        self.rebalances = Rebalances(
            base.ledger, base.image, state.rebalance, base.clock, self.handovers
        )
        """Gives each server its share of the buckets; refuses to without `handovers`."""
        self.authority = base.authority
        self._clock_ms = clock_ms

    def _registrations(self, base: _Base, state: _State, connect: Connect) -> Registrations:
        return Registrations(
            self.catalog,
            base.tablets,
            state.locations,
            state.producer_book,
            connect,
            base.clock,
            self._server_joined,
            self.wal,
            self._server_left,
            _confirmations(base, self.wal),
        )

    @classmethod
    async def open(
        cls,
        conf: Configuration,
        store: MetaStore,
        node: ClusterNode,
        clock_ms: Callable[[], int],
        *,
        connect: Connect | None = None,
        files: Files | None = None,
        clock: Callable[[], float] = time.monotonic,
        expiry_ms: Callable[[], int] | None = None,
        creator: LakeTableCreator | None = None,
        on_fenced: Callable[[], None] = lambda: None,
    ) -> Coordinator:
        """Take over a metadata store, and fence off the coordinator that had it before.

        `node` is the coordinator itself as clients reach it. `connect` reaches tablet servers of
        other processes. `clock` counts the seconds of leases and producers, and never jumps;
        `expiry_ms` is the time by which other things expire, by default the clock's. `creator`
        creates lake tables; without one they appear with the first round of tiering. `on_fenced` is
        called when another coordinator has taken the store over.
        """
        ledger = await Ledger.open(store)
        ledger.on_fenced = on_fenced
        entries = await store.tree("/")
        if await upgrade(ledger, entries):
            entries = await store.tree("/")
        image = ClusterImage()
        image.apply([*records.load(entries), *load_tags(entries), NodesPut(node, ())])
        live = LiveConfiguration(conf)
        base = _Base(
            live,
            store,
            ledger,
            image,
            Feed(),
            Feed(),
            Tablets(),
            Authority(conf),
            clock_ms,
            clock,
            expiry_ms or clock_ms,
            LakeTableKeeper(live, creator),
        )
        state = await _load(base, entries)
        coordinator = cls(base, state, node, connect, (files or Files()).reach)
        if coordinator.wal is not None:
            coordinator.wal.check_locations(state.locations.locations)
        await coordinator._start()
        return coordinator

    async def _start(self) -> None:
        """Begin everything that runs by itself."""
        await self.catalog.create_default_database()
        self.lake_tables.start()
        self.locations.storage.start()
        self.lease_timer.start()
        await self.remote.start()
        self.lost_locations.start()
        self.producers.book.start()
        self.producer_offsets.start()
        if self.wal_cleaner is not None:
            self.wal_cleaner.start()
        if self.takeovers is not None:
            self.takeovers.start()
        if self.standbys is not None:
            self.standbys.start()
        if self.registrations is not None:
            self.registrations.start()
        self.rebalances.start()

    async def attach(self, node: ClusterNode, tablet: LocalTablet) -> None:
        """Join a tablet server of this process; its logs are recovered when this returns."""
        self.locations.add_reports(node.node_id, self.locations.storage.reports)
        if self.wal is not None:
            await self.wal.end(node.node_id)  # not in turn: the location may be slow

        async def join() -> None:
            others = [n for n in self.image.tablets.values() if n.node_id != node.node_id]
            self.image.apply([NodesPut(self.image.coordinator, (*others, node))])
            session, replicas = None, assignments(self.image, node.node_id)
            if self.wal is not None:
                for former in self.wal.book.of(node.node_id):
                    self.wal.process_ended(former.session.server_epoch)
                epoch = await self.catalog.next_server_epoch()
                session = await self.wal.begin(node.node_id, epoch)
                await self.catalog.tell(await self.wal.lead_again(node.node_id))
                replicas = self.wal.assignments(node.node_id)
            producers = self.producers.book.of_server(node.node_id)
            await tablet.update_configs(self.locations.configs_for_tablets)
            await tablet.assign(self.image, replicas, producers, session)
            self.tablets.attach(node.node_id, tablet)

        await self.catalog.exclusive(join)
        self._server_joined(node.node_id)

    def _server_joined(self, server_id: int) -> None:
        self.lake.server_joined(server_id)
        self.remote.snapshots.server_joined(server_id)
        self.producers.book.server_joined(server_id)
        self.partitions.start()
        if self.takeovers is not None:
            self.takeovers.joined(server_id)
        if self.standbys is not None:
            self.standbys.joined(server_id)

    def _server_left(self) -> None:
        if self.takeovers is not None:
            self.takeovers.left()

    def register(self, services: Services) -> None:
        """Attach every handler of the coordinator role; INIT_WRITER is `writer_ids`."""
        tokens = TokenService(
            self.image,
            lambda: self.locations.storage.locations,
            Tokens(self.conf, self._clock_ms),
            dropped=self.held_drops.leased_tables,
        )
        services.attach(tokens)
        services.attach(MetadataService(self.image, self.conf, self.locations.uri))
        services.attach(ClusterService(self.image))
        services.attach(UnservedProcedures())
        services.attach(RebalanceService(self.image, self.tags, self.rebalances, self.authority))
        services.attach(self._sweeps)
        services.attach(
            LocationService(
                self.locations,
                self._inventory,
                self.image,
                self.catalog.exclusive,
                self.lost_locations,
                self.sessions.check_unused,
            )
        )
        services.attach(
            CoordinatorService(self.conf, self.catalog, self.partitions.check, self.lake_tables)
        )
        services.attach(LakeService(self.lake, self.image))
        services.attach(self.remote.service())
        services.attach(LeaseService(self.leases, self.image, self.authority))
        services.attach(
            LeaseUsageService(
                self.image, self.remotes, self.remote.snapshots, self.leases.book, self.held_drops
            )
        )
        services.attach(ProducerService(self.producers, self.image))
        services.attach(self.producer_offsets)
        if self.registrations is not None:
            services.attach(self.registrations)
        if self.wal is not None:
            services.attach(WalService(self.wal, self.catalog.epoch))
            if self.handovers is not None:
                services.attach(self.handovers)
                services.attach(Departures(self.handovers, self.wal, self.tablets))

    async def stop(self) -> None:
        """Finish the changes under way, and begin no more; the caller closes the store."""
        await self.rebalances.stop()
        await self.partitions.stop()
        if self.registrations is not None:
            await self.registrations.stop()
        if self.handovers is not None:
            await self.handovers.stop()
        if self.standbys is not None:
            await self.standbys.stop()
        if self.takeovers is not None:
            await self.takeovers.stop()
        if self.wal_cleaner is not None:
            await self.wal_cleaner.stop()
        await self.producers.book.stop()
        await self.producer_offsets.stop()
        await self._sweeps.stop()
        await self.lost_locations.stop()
        await self.remote.stop()
        await self.lease_timer.stop()
        await self.lake_tables.stop()
        await self.catalog.settle()
        await self.lake.settle()
        await self.locations.storage.stop()

    def __repr__(self) -> str:
        return f"Coordinator(tablets={sorted(self.image.tablets)}, image={self.image!r})"


def _catalog(base: _Base, state: _State) -> Catalog:
    return Catalog(
        base.ledger,
        base.conf,
        base.image,
        base.changes,
        base.tablets,
        state.locations,
        state.producer_book,
        base.lake_tables,
        base.clock_ms,
        state.sessions.wal_of,
    )


def _wal(
    base: _Base, state: _State, catalog: Catalog, reach: Callable[[str], None]
) -> WalKeeper | None:
    if base.conf.get(options.ZUFLUSS_LOG_DURABILITY) != REMOTE:
        return None
    return _wal_keeper(base, state, catalog, reach)


def _wal_keeper(
    base: _Base, state: _State, catalog: Catalog, reach: Callable[[str], None]
) -> WalKeeper:
    storage = state.locations.storage
    return WalKeeper(base.conf, state.sessions, storage, catalog, base.clock, base.expiry_ms, reach)


def _confirmations(base: _Base, wal: WalKeeper | None) -> Confirmations | None:
    """Needed where another coordinator may take over, and its word lets servers answer lookups."""
    if wal is None or not base.conf.get(zookeeper_options.ZOOKEEPER_ADDRESS):
        return None
    return Confirmations(base.ledger.confirm)


def _lake(base: _Base, state: _State) -> LakeTables:
    return LakeTables(
        base.conf,
        base.ledger,
        base.image,
        base.changes,
        base.tablets,
        state.lake_book,
        OffsetsFiles(state.locations),
        base.lake_tables,
        base.clock_ms,
        base.clock,
    )


def _leases(base: _Base, state: _State) -> LeaseCalls:
    return LeaseCalls(
        state.lease_book,
        state.remotes,
        base.conf,
        is_super=base.authority.is_super,
        clock=base.clock,
        clock_ms=base.clock_ms,
    )


def _inventory(base: _Base, state: _State, remote: RemoteKeeper) -> Inventory:
    return Inventory(
        base.image,
        state.remotes,
        remote.snapshots,
        state.lake_book.files,
        state.held_drops,
        state.locations,
    )


def _remote(
    base: _Base,
    state: _State,
    catalog: Catalog,
    lake: LakeTables,
    holds: LeaseHolds,
    reach: Callable[[str], None],
    wal: WalKeeper | None,
) -> RemoteKeeper:
    return RemoteKeeper(
        base.conf,
        base.store,
        base.changes,
        base.freed,
        base.tablets,
        state.remotes,
        state.locations.storage,
        state.lease_book,
        holds,
        state.held_drops,
        drops_over=catalog.unlocked,
        lake_offset=lake.offset,
        clock_ms=base.expiry_ms,
        reach=reach,
        wal=wal,
    )


async def _load(base: _Base, entries: Sequence[Entry]) -> _State:
    """Load the state of every part, and bring the locations up to the configuration.

    `entries` is the whole store: in a large cluster most of it are tables, which are read once.
    """
    remotes = await BucketRemotes.open(entries, base.ledger, base.image, base.changes)
    lease_book = await LeaseBook.open(
        base.store,
        remotes,
        base.freed,
        base.conf,
        clock=base.clock,
        clock_ms=base.clock_ms,
    )
    lake_book = await LakeBook.open(entries, base.ledger, base.image, base.changes)
    held_drops = HeldDrops()
    sessions = await SessionBook.open(base.store, base.ledger)
    has_tables = next(base.image.tables(), None) is not None
    durability = base.conf.get(options.ZUFLUSS_LOG_DURABILITY)
    await sessions.settle_durability(durability, has_tables=has_tables)

    def live_usage(first_location: int | None) -> dict[int, Usage]:
        return summed(
            [
                remotes.live_usage(),
                lake_book.live_usage(first_location),
                held_drops.live_usage(),
                sessions.live_usage(),
            ]
        )

    locations = await LocationRegistry.open(
        base.store,
        base.ledger,
        base.conf,
        live_usage=live_usage,
        has_uncounted=lambda: lease_book.holds_dropped(held_drops.counted_owners),
        on_change=base.tablets.update_locations,
        on_configs=base.tablets.update_configs,
        turn=remotes.turn,
    )
    producer_book = await ProducerBook.open(
        base.store,
        base.ledger,
        base.image,
        base.changes,
        base.tablets,
        base.conf,
        base.clock,
    )
    return _State(
        remotes, lease_book, lake_book, held_drops, locations, producer_book, sessions,
        load_rebalance(entries),
    )  # fmt: skip
