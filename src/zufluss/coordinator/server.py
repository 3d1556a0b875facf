"""The coordinator role: catalog, auto partitions, the lake, and the tablet servers it leads.

One active coordinator per cluster. Life of a process with both roles:

    coordinator = Coordinator(conf, store, clock_ms)
    await coordinator.start(node)                   # the catalog is there, nobody serves yet
    await coordinator.attach(tablet_node, tablet)   # logs recovered, dropped tables removed
    coordinator.register(services)                  # then open the sockets
    coordinator.writer_ids.register(services)
    …
    await coordinator.stop()                        # the store is the caller's to close

Apart, `connect` says how to reach a tablet server, and nobody attaches one: they come by themselves
(`registration.py`), and INIT_WRITER is theirs.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from zufluss.cluster.authority import Authority
from zufluss.cluster.cluster_service import ClusterService
from zufluss.cluster.image import ClusterImage, NodesPut, ServerNode
from zufluss.cluster.metadata_service import MetadataService
from zufluss.cluster.replicas import LocalTablet, assignments
from zufluss.cluster.token_service import TokenService
from zufluss.cluster.writer_ids import WriterIds
from zufluss.config import options
from zufluss.config.load import Configuration
from zufluss.coordinator.bucket_remotes import BucketRemotes
from zufluss.coordinator.catalog.auto_partitions import AutoPartitions
from zufluss.coordinator.catalog.catalog import Catalog
from zufluss.coordinator.catalog.service import CoordinatorService
from zufluss.coordinator.lake.offsets import OffsetsFiles
from zufluss.coordinator.lake.service import LakeService
from zufluss.coordinator.lake.tables import LakeTables
from zufluss.coordinator.leases.leases import Leases
from zufluss.coordinator.leases.service import LeaseService
from zufluss.coordinator.producers.offsets import ProducerOffsets
from zufluss.coordinator.producers.producers import Producers
from zufluss.coordinator.producers.service import ProducerService
from zufluss.coordinator.registration import Connect, Registrations
from zufluss.coordinator.remote.files import RemoteFiles
from zufluss.coordinator.remote.location_service import LocationService
from zufluss.coordinator.remote.locations import LocationRegistry
from zufluss.coordinator.tablets import Tablets
from zufluss.log.files import Files
from zufluss.meta.api import MetaStore
from zufluss.remote.storage import STATE_FILE, RemoteStorage
from zufluss.remote.tokens import Tokens

if TYPE_CHECKING:
    from zufluss.net.services import Services


class Coordinator:
    """The coordinator role of a process."""

    def __init__(
        self,
        conf: Configuration,
        store: MetaStore,
        clock_ms: Callable[[], int],
        connect: Connect | None = None,
        files: Files | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`clock` is what leases and producers are counted by: seconds that never jump."""
        self.conf = conf
        self.authority = Authority(conf)
        self.image = ClusterImage()
        self.tablets = Tablets()
        self.catalog: Catalog
        self.locations: LocationRegistry
        self.remotes: BucketRemotes
        self.remote: RemoteFiles
        self.lake: LakeTables
        self.producers: Producers
        self.producer_offsets: ProducerOffsets
        self.partitions: AutoPartitions
        self.writer_ids: WriterIds
        self.registrations: Registrations | None = None
        self._store = store
        self._clock_ms = clock_ms
        self._clock = clock
        self._connect = connect
        self._files = files or Files()
        self._started = False

    async def start(self, node: ServerNode) -> None:
        """Take over the catalog; `node` is the coordinator itself as clients reach it."""
        self.catalog = await Catalog.open(
            self._store, self.conf, self.image, self.tablets, self._clock_ms
        )
        await self._open_remote()
        await self._open_producers()
        self.image.apply([NodesPut(node, ())])
        self.writer_ids = WriterIds(self.catalog.allocate_writer_ids)
        self.partitions = AutoPartitions(self.conf, self.catalog, self.remote.holds, self._clock_ms)
        self.remote.leases.freed.append(self.partitions.freed)
        if self._connect is not None:
            self.locations.reporters[node.node_id] = self.locations.storage.reports
            self.registrations = Registrations(
                self.catalog, self.tablets, self._connect, self._clock_ms, self._joined
            )
            self.registrations.start()
        self._started = True

    async def _open_remote(self) -> None:
        """Open what knows of remote files, then the registry, which asks how many there are."""
        registry = await LocationRegistry.open(self._store, self.catalog.ledger, self.conf)
        self.remotes = await BucketRemotes.open(self._store, self.catalog)
        self.lake = await LakeTables.open(
            self._store,
            self.conf,
            self.catalog,
            self.tablets,
            OffsetsFiles(registry),
            self._clock_ms,
        )
        leases = await Leases.open(
            self._store,
            self.remotes,
            self.conf,
            is_super=self.authority.is_super,
            clock=self._clock,
            clock_ms=self._clock_ms,
        )
        registry.uses += [self.remotes.live_usage, self.lake.live_usage]
        registry.uncounted = leases.holds_dropped
        registry.turn = self.remotes.turn
        registry.on_change = self.tablets.update_locations
        state_file = Path(self.conf.get(options.DATA_DIR)) / STATE_FILE
        await registry.start(
            lambda conf, locations: RemoteStorage(
                conf,
                locations,
                state_file=state_file,
                cluster_id=self.catalog.cluster_id,
            )
        )
        registry.storage.start()
        self.locations = self.catalog.locations = registry
        self.remote = RemoteFiles(
            self.conf,
            self._store,
            self.catalog,
            self.tablets,
            self.remotes,
            registry.storage,
            self.lake,
            leases,
            self._clock_ms,
            self._clock,
            self._files.reach,
        )
        registry.uses.append(self.remote.cleaner.live_usage)
        registry.uncounted = self.remote.uncounted
        await self.remote.start()

    async def _open_producers(self) -> None:
        self.producers = await Producers.open(
            self._store,
            self.catalog,
            self.tablets,
            self.conf,
            is_super=self.authority.is_super,
            clock=self._clock,
        )
        self.tablets.producers = self.producers.book
        self.producers.book.start()
        self.producer_offsets = ProducerOffsets(
            self._store, self.catalog.ledger, self.conf, self._clock_ms
        )
        self.producer_offsets.start()

    async def attach(self, node: ServerNode, tablet: LocalTablet) -> None:
        """Join a tablet server of this process; its logs are recovered when this returns."""
        self.locations.reporters[node.node_id] = self.locations.storage.reports

        async def join() -> None:
            others = [n for n in self.image.tablets.values() if n.node_id != node.node_id]
            self.image.apply([NodesPut(self.image.coordinator, (*others, node))])
            replicas = assignments(self.image, node.node_id)
            producers = self.tablets.producers_of_server(node.node_id)
            await tablet.assign(self.image, replicas, producers)
            self.tablets.attach(node.node_id, tablet)

        await self.catalog.exclusive(join)
        self._joined(node.node_id)

    def _joined(self, server_id: int) -> None:
        self.lake.server_joined(server_id)
        self.remote.server_joined(server_id)
        self.producers.book.server_joined(server_id)
        self.partitions.start()

    def register(self, services: Services) -> None:
        """Attach every handler of the coordinator role; INIT_WRITER is `writer_ids.register`."""
        MetadataService(self.image, self.conf, self.locations.uri).register(services)
        ClusterService(self.image).register(services)
        TokenService(
            self.image,
            lambda: self.locations.storage.locations,
            Tokens(self.conf, self._clock_ms),
            dropped=self.remote.cleaner.leased_tables,
        ).register(services)
        LocationService(self.locations, self.catalog).register(services)
        CoordinatorService(self.conf, self.catalog, self.partitions.check).register(services)
        LakeService(self.lake, self.image).register(services)
        self.remote.register(services)
        LeaseService(self.remote.leases, self.image, self.authority).register(services)
        ProducerService(self.producers, self.image).register(services)
        self.producer_offsets.register(services)
        if self.registrations is not None:
            self.registrations.register(services)

    async def stop(self) -> None:
        """Finish the changes under way and begin no more; the store stays open."""
        if not self._started:
            return
        self._started = False
        await self.partitions.stop()
        if self.registrations is not None:
            await self.registrations.stop()
        await self.producers.book.stop()
        await self.producer_offsets.stop()
        await self.remote.stop()
        await self.catalog.close()
        await self.lake.settle()
        await self.locations.storage.stop()

    def __repr__(self) -> str:
        return f"Coordinator(tablets={sorted(self.image.tablets)}, image={self.image!r})"
