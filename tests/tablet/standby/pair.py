"""A leader and a server that follows it, on one shared log, without sockets."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tests.tablet.shared.cluster import BUCKETS, CLUSTER, SharedCluster, killed, until
from tests.tablet.shared.test_keyed import SCHEMA
from tests.tablet.support import TABLE, Connection, Tablet
from zufluss.cluster.image import BucketState
from zufluss.cluster.replicas import ReplicaAssignment
from zufluss.cluster.wal import WalSession
from zufluss.errors import ErrorCode, NetworkError
from zufluss.model.table import PhysicalTablePath, TableBucket
from zufluss.tablet.standby.standby import Standby
from zufluss.wire import messages as m
from zufluss.wire.codec import decode

PATH = PhysicalTablePath("db", "t")
FOLLOWER = 2


class Wire:
    """The connection of a follower to a leader; `cut` breaks it."""

    def __init__(self) -> None:
        self.leader: Tablet | None = None
        self.requests: list[m.FetchLogRequest] = []

    async def connect(self, server_id: int) -> Wire:
        assert server_id == 1
        return self

    async def send(self, api_key: int, body: Sequence[Any], *, timeout_ms: int) -> memoryview:
        if self.leader is None:
            raise NetworkError("the leader does not answer")
        request = decode(m.FetchLogRequest, memoryview(body[0]))
        self.requests.append(request)
        connection = Connection()
        answer = await connection.answer(connection.send(self.leader.server.fetch.handle, request))
        assert not isinstance(answer, ErrorCode)
        if self.leader is None:
            raise NetworkError("the connection was cut before the answer came")
        return memoryview(answer)

    def cut(self) -> None:
        self.leader = None


class Pair:
    """Server 1 leads all buckets, server 2 follows them."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.cluster = SharedCluster(root, schema=SCHEMA)
        self.wire = Wire()
        self.sessions = 100

    async def start(self) -> Tablet:
        """Start the leader."""
        self.leader = self.wire.leader = await self.cluster.start("one")
        return self.leader

    def orders(self) -> list[ReplicaAssignment]:
        """To follow each bucket."""
        state = BucketState((1, FOLLOWER), 1, self.cluster.epoch, (1,))
        return [ReplicaAssignment(TableBucket(TABLE, None, i), PATH, state) for i in range(BUCKETS)]

    async def follow(self, name: str = "two", conf: Mapping[str, str] | None = None) -> Tablet:
        """Start a follower on the directory `name`."""
        conf = {
            "tablet-server.id": str(FOLLOWER),
            "zufluss.log.durability": "remote",
            "zufluss.wal.interval": "0ms",
            "zufluss.shutdown-timeout": "1s",
            "remote.data.dir": str(self.cluster.location),
            "remote.log.task-interval-duration": "1h",
            **(conf or {}),
        }
        self.follower = Tablet(
            self.root / name,
            buckets=BUCKETS,
            conf=conf,
            schema=SCHEMA,
            gateway=self.cluster.gateway,
            properties={"table.log.tiered.local-segments": "1"},
        )
        server = self.follower.server
        server.storage.cluster_id = CLUSTER
        server.confirmed(float("inf"))
        assert server.standbys is not None
        server.standbys.connect = self.wire.connect
        self.sessions += 1
        self.session = WalSession(FOLLOWER, self.sessions, 1)
        await server.assign(self.follower.image, self.orders(), (), self.session)
        return self.follower

    def standby(self, bucket: int = 0) -> Standby | None:
        standbys = self.follower.server.standbys
        assert standbys is not None
        return standbys.get(TableBucket(TABLE, None, bucket))

    def has_caught_up(self) -> bool:
        """Whether the follower has what the leader shows of bucket 0, log and state."""
        standby, leading = self.standby(), self.leader.server.buckets.replica(TABLE, None, 0)
        if standby is None or standby.replica.kv is None or standby.behind:
            return False
        ends = (standby.log.high_watermark, standby.replica.kv.applied_offset)
        return ends == (leading.log.high_watermark,) * 2

    async def caught_up(self) -> Standby:
        await until(self.has_caught_up)
        standby = self.standby()
        assert standby is not None
        return standby

    async def lose_leader(self) -> None:
        """The leader dies, and the follower leads bucket 0."""
        order = await self.lost()
        await self.follower.server.start_replicas([order])
        await until(lambda: self.follower.server.buckets.find(*order.table_bucket) is not None)

    async def lost(self) -> ReplicaAssignment:
        """The leader dies; returns the order to the follower to lead bucket 0."""
        self.wire.cut()
        gateway = self.cluster.gateway
        former = gateway.live
        assert former is not None
        await killed(self.leader)
        source = await self.cluster.sealed(former)
        gateway.live = self.session
        epoch = gateway.leader_epoch = self.cluster.epoch = self.cluster.epoch + 1
        state = BucketState((FOLLOWER, 1), FOLLOWER, epoch, (FOLLOWER,), wal=former.server_epoch)
        bucket = TableBucket(TABLE, None, 0)
        return ReplicaAssignment(bucket, PATH, state, source)
