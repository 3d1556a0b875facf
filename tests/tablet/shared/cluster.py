"""Tablet servers on one shared log, and a coordinator for them that does only what it must."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from tests.tablet.gateway import Gateway
from tests.tablet.support import SCHEMA, TABLE, Tablet
from tests.waiting import WAIT_SECONDS
from zufluss.cluster.image import BucketState
from zufluss.cluster.replicas import ReplicaAssignment
from zufluss.cluster.wal import StandbyReport, Takeover, WalSession, WalSource
from zufluss.errors import NotLeaderError
from zufluss.log.shared.api import Session
from zufluss.log.shared.objects import ObjectLog
from zufluss.log.shared.store import WalSettings
from zufluss.model.schema import Schema
from zufluss.model.table import PhysicalTablePath, TableBucket
from zufluss.remote import marker
from zufluss.remote.wal import WalName, session_directory

CLUSTER = "ab" * 16
BUCKETS = 2


class SharedGateway(Gateway):
    """The coordinator as tablet servers call it: which session has the end of each bucket."""

    def __init__(self) -> None:
        super().__init__()
        self.wal: dict[TableBucket, WalSession] = {}
        """The session that has the end of each bucket."""
        self.live: WalSession | None = None
        self.reports: list[StandbyReport] = []
        """What servers said of their standbys."""
        self.floors: dict[int, int] = {}
        """The recorded floor of each session, by server epoch."""

    async def commit_takeovers(
        self, session: WalSession, takeovers: Sequence[Takeover]
    ) -> set[TableBucket]:
        self._arrive()
        self._check(session)
        done = {each.bucket for each in takeovers if each.leader_epoch == self.leader_epoch}
        self.wal |= dict.fromkeys(done, session)
        self._answer()
        return done

    async def report_standbys(self, session: WalSession, reports: Sequence[StandbyReport]) -> None:
        self.reports += reports

    async def commit_wal_floor(self, session: WalSession, floor: int) -> None:
        self._arrive()
        self._check(session)
        assert floor >= self.floors.get(session.server_epoch, 0)
        self.floors[session.server_epoch] = floor
        self._answer()

    def _check(self, session: WalSession) -> None:
        if session != self.live:
            raise NotLeaderError("the session has ended")


class SharedCluster:
    """Starts tablet servers one after the other, each as the leader of all buckets."""

    def __init__(self, root: Path, *, schema: Schema = SCHEMA, **conf: str) -> None:
        self.root = root
        self.location = root / "location"
        self.gateway = SharedGateway()
        self.schema = schema
        self.conf = conf
        self.epoch = 0
        self.tablet: Tablet | None = None

    async def start(
        self, name: str = "one", *, seal: bool = True, lease_ms: int = 0, **options: Any
    ) -> Tablet:
        """A server on the directory `name` takes over everything from the one before."""
        former, gateway = self.gateway.live, self.gateway
        gateway.live = None
        self.epoch += 1
        gateway.leader_epoch = self.epoch
        conf: Mapping[str, str] = {
            "zufluss.log.durability": "remote",
            "zufluss.wal.interval": "0ms",
            "zufluss.shutdown-timeout": "1s",
            "remote.data.dir": str(self.location),
            "remote.log.task-interval-duration": "1h",
            **{key.replace("__", "."): value for key, value in self.conf.items()},
        }
        tablet = Tablet(
            self.root / name,
            buckets=BUCKETS,
            conf=conf,
            schema=self.schema,
            gateway=gateway,
            properties={"table.log.tiered.local-segments": "1"},
            **options,
        )
        tablet.server.storage.cluster_id = CLUSTER
        self.tablet = tablet
        await marker.claim(tablet.server.storage.objects(1), CLUSTER)
        sources: dict[WalSession, WalSource] = {}
        if former is not None and seal:
            for session in {former, *gateway.wal.values()}:
                sources[session] = await self.sealed(session)
        gateway.live = session = WalSession(1, self.epoch, 1)
        tablet.server.confirmed(float("inf"))
        orders = [renamed(each, lease_ms=lease_ms) for each in self.assignments(sources)]
        await tablet.server.assign(tablet.image, orders, (), session)
        return tablet

    def assignments(self, sources: Mapping[WalSession, WalSource]) -> list[ReplicaAssignment]:
        assigned = []
        for i in range(BUCKETS):
            bucket = TableBucket(TABLE, None, i)
            if bucket not in self.gateway.wal:
                assert self.gateway.live is not None
                self.gateway.wal[bucket] = self.gateway.live
            source = sources.get(self.gateway.wal[bucket])
            wal = self.gateway.wal[bucket].server_epoch
            state = BucketState((1,), 1, leader_epoch=self.epoch, wal=wal)
            path = PhysicalTablePath("db", "t")
            assigned.append(ReplicaAssignment(bucket, path, state, source))
        return assigned

    async def sealed(self, session: WalSession) -> WalSource:
        floor = self.gateway.floors.get(session.server_epoch, 0)
        name = Session(CLUSTER, session.server_id, session.server_epoch)
        return WalSource(session, floor, await self.log.seal(name, floor, 1))

    @property
    def log(self) -> ObjectLog:
        assert self.tablet is not None
        return ObjectLog(self.tablet.server.storage.objects(1), WalSettings())

    def objects(self, epoch: int) -> list[Path]:
        """The objects of a session, in order."""
        directory = self.location / session_directory(epoch)
        return sorted(directory.iterdir()) if directory.is_dir() else []

    def object(self, epoch: int, number: int) -> Path:
        return self.location / WalName(epoch, number).path


async def written(tablet: Tablet, *buckets: int) -> None:
    """Append a batch of three rows to each bucket; returns when it is acknowledged."""
    connection, request = await tablet.produce(*buckets)
    answers = await connection.produced(request)
    assert [code for _, code in answers] == [0] * len(buckets), answers


async def killed(tablet: Tablet) -> None:
    """Stop a server as if it was killed: nothing is closed, and nothing is acknowledged."""
    assert tablet.server.shared is not None
    tablet.server._tasks.cancel()
    await tablet.server.assignments.stop()
    await tablet.server.shared.end()


async def until(condition: Any) -> None:
    async with asyncio.timeout(WAIT_SECONDS):
        while not condition():
            await asyncio.sleep(0.001)


def renamed(assignment: ReplicaAssignment, **changes: Any) -> ReplicaAssignment:
    return replace(assignment, **changes)
