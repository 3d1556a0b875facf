"""A coordinator with a shared log in a directory, and tablet servers that note their orders."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from tests.coordinator.support import (
    COORDINATOR,
    Clock,
    RecordingTablet,
    Seconds,
    call,
    table_json,
)
from tests.waiting import WAIT_SECONDS
from zufluss.cluster.image import BucketState, ClusterImage, ClusterNode
from zufluss.cluster.wal import Takeover, WalSession
from zufluss.config.load import Configuration
from zufluss.config.values import Endpoint
from zufluss.coordinator.server import Coordinator
from zufluss.coordinator.wal.keeper import WalKeeper
from zufluss.coordinator.wal.takeover import Takeovers
from zufluss.errors import NetworkError
from zufluss.log.files import Files
from zufluss.log.shared.api import Session, SessionWriter
from zufluss.meta.embedded import EmbeddedStore
from zufluss.model.table import TableBucket, TablePath
from zufluss.net.services import Services
from zufluss.remote.wal import session_directory
from zufluss.tablet.coordinator_client import CoordinatorClient
from zufluss.tablet.link import CoordinatorLink, SessionTerms
from zufluss.tablet.shared.lease import LookupLease
from zufluss.wire import messages as m
from zufluss.wire.api import ApiKey

LEASE_SECONDS = 3.0
SILENCE = 2 * LEASE_SECONDS + 0.1
"""After so long a server is lost."""
EVENTS = TablePath("fluss", "events")


class Killed(BaseException):
    """The coordinator was killed here."""


class KillingFiles(Files):
    """Files of a coordinator that is killed at a step."""

    def __init__(self, step: str | None) -> None:
        super().__init__()
        self.step = step

    def reach(self, step: str) -> None:
        if step == self.step:
            raise Killed(step)


class Server:
    """A tablet server: its link to the coordinator, and what it was told."""

    def __init__(self, world: World, server_id: int, name: str) -> None:
        self.world = world
        self.server_id = server_id
        listeners = (Endpoint("CLIENT", name, 1), Endpoint("INTERNAL", name, 2))
        self.node = ClusterNode(server_id, listeners)
        self.tablet = RecordingTablet()
        self.lease = LookupLease(LEASE_SECONDS, world.seconds)
        self.down = False
        """Whether its address refuses connections."""
        self.frozen = False
        """Whether it answers nothing."""
        self.former: int | None = None
        self.ended = False
        self.services = Services()
        self.link = CoordinatorLink(
            self.node,
            ClusterImage(),
            self.tablet,
            CoordinatorClient(self._coordinator),
            lambda _: None,
            replaced=self._replaced,
            session=SessionTerms(self.lease, lambda: self.former, self._note),
        )
        self.link.register(self.services)

    @property
    def session(self) -> WalSession:
        assert self.tablet.session is not None
        return self.tablet.session

    async def call(self, api_key: ApiKey, request: Any, *, timeout_ms: int) -> Any:
        if self.frozen:
            raise NetworkError("no answer")
        return await call(self.services, api_key, request, "INTERNAL")

    async def begun(self) -> SessionWriter:
        """Its session, to append to."""
        log = self.world.wal.shared_log(self.session)
        return log.begin(self.world.name(self.session), lambda ends: None, lambda error: None)

    async def commit(self, *buckets: TableBucket) -> set[TableBucket]:
        """Have the coordinator note that this server's session has the end of buckets."""
        takeovers = [Takeover(b, self.tablet.buckets[b].leader_epoch) for b in buckets]
        return await self.world.wal.commit_takeovers(self.session, takeovers)

    async def _coordinator(self) -> World:
        return self.world

    def _note(self, epoch: int) -> None:
        self.former = epoch

    def _replaced(self) -> None:
        self.ended = True


class World:
    """The coordinator, its store and its servers."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.location = root / "location"
        self.conf = {
            "data.dir": str(root / "data"),
            "remote.data.dir": str(self.location),
            "zufluss.log.durability": "remote",
        }
        self.clock, self.seconds = Clock(), Seconds()
        self.servers: dict[str, Server] = {}

    async def start(self, step: str | None = None) -> World:
        """Start the coordinator; it is killed at a step."""
        self.files = KillingFiles(step)
        self.store = await EmbeddedStore.open(self.root / "meta")
        self.coordinator = await Coordinator.open(
            Configuration.of(self.conf),
            self.store,
            COORDINATOR,
            self.clock,
            connect=self._connect,
            files=self.files,
            clock=self.seconds,
        )
        registrations = self.coordinator.registrations
        assert registrations is not None
        await registrations.stop()  # its checks: tests look for silent servers themselves
        self.services = Services()
        self.coordinator.register(self.services)
        return self

    async def stop(self) -> None:
        await self.coordinator.stop()
        await self.store.close()

    async def restart(self, step: str | None = None) -> None:
        await self.stop()
        await self.start(step)

    @property
    def wal(self) -> WalKeeper:
        assert self.coordinator.wal is not None
        return self.coordinator.wal

    @property
    def takeovers(self) -> Takeovers:
        assert self.coordinator.takeovers is not None
        return self.coordinator.takeovers

    def name(self, session: WalSession) -> Session:
        return self.wal.name(session)

    async def server(self, server_id: int, name: str | None = None) -> Server:
        """A server that has registered."""
        name = name or f"host-{server_id}"
        server = self.servers[name] = Server(self, server_id, name)
        await server.link.join()
        return server

    async def call(self, api_key: ApiKey, request: Any, *, timeout_ms: int) -> Any:
        return await call(self.services, api_key, request, "INTERNAL")

    async def _connect(self, node: ClusterNode) -> Server:
        server = self.servers[node.endpoints[0].host]
        if server.down:
            raise NetworkError("refused") from ConnectionRefusedError()
        return server

    async def create_table(
        self,
        name: str = "events",
        buckets: int = 4,
        properties: Mapping[str, str] | None = None,
    ) -> list[TableBucket]:
        await call(
            self.services,
            ApiKey.CREATE_TABLE,
            m.CreateTableRequest(
                table_path={"database_name": "fluss", "table_name": name},
                table_json=table_json(buckets=buckets, properties=properties),
                ignore_if_exists=False,
            ),
        )
        table_id = self.coordinator.image.table(TablePath("fluss", name)).info.table_id
        return [TableBucket(table_id, None, i) for i in range(buckets)]

    def state(self, bucket: TableBucket) -> BucketState:
        state = self.coordinator.image.bucket_state(bucket)
        assert state is not None
        return state

    def led(self, server: Server, buckets: list[TableBucket]) -> list[TableBucket]:
        """Return those of the buckets that a server leads."""
        return [b for b in buckets if self.state(b).leader == server.server_id]

    async def silent(self, *servers: Server) -> None:
        """Time passes, and these servers send no heartbeat."""
        self.seconds.now += SILENCE
        for server in self.servers.values():
            if server not in servers and not server.down:
                await server.link.heartbeat()
        assert self.coordinator.registrations is not None
        await self.coordinator.registrations.expire()

    def objects(self, session: WalSession) -> list[int]:
        """The numbers of the objects of a session."""
        directory = self.location / session_directory(session.server_epoch)
        return sorted(int(p.name, 16) for p in directory.iterdir()) if directory.is_dir() else []


async def until(condition: Callable[[], Any]) -> None:
    async with asyncio.timeout(WAIT_SECONDS):
        while not condition():
            await asyncio.sleep(0.001)
