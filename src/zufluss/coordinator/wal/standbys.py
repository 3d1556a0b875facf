"""Which servers follow which buckets, and their orders to do so.

A table with `table.replication.factor` = n has n - 1 standbys for each bucket. They are placed with
the bucket, and again when one is gone for good; here they get their orders. Nothing waits for a
standby: a bucket without one is as safe as a bucket with one, and only its take-over takes longer.

| step | what | if it fails or the coordinator dies here |
|---|---|---|
| complete | servers that are gone leave the in-sync replicas; after `GONE_SECONDS` others take their places, other racks first | the next round does it again |
| order | each standby is told whom it follows, whenever that has changed | sent again each second |
| stop | a server that follows a bucket no longer deletes it | it deletes it when it registers |

There is nothing to do as long as the image does not change.
"""  # noqa: E501 - a table row does not wrap

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from typing import Final

import structlog

from zufluss.cluster.image import BucketState, ClusterNode
from zufluss.cluster.replicas import ReplicaAssignment, ReplicaStop
from zufluss.config import table_options
from zufluss.coordinator.catalog.catalog import Catalog
from zufluss.coordinator.catalog.placement import with_standbys
from zufluss.coordinator.tablets import Tablets
from zufluss.coordinator.wal.keeper import WalKeeper
from zufluss.coordinator.wal.takeover import RETURN_LEASES
from zufluss.model.table import PhysicalTablePath, TableBucket
from zufluss.periodic import log_failure, pause
from zufluss.tasks import end

log = structlog.get_logger(__name__)

LOOK_SECONDS: Final = 1.0
"""Pause between two rounds."""
GONE_SECONDS: Final = 30.0
"""A standby that is away for so long gets a substitute; one that restarts keeps its buckets."""

_Bucket = tuple[PhysicalTablePath, TableBucket, BucketState, int]
"""A bucket with its replication factor."""
_Followed = tuple[int, int]
"""Leader and leader epoch that a standby was told."""


class StandbyOrders:
    """Places standbys and orders them to follow."""

    def __init__(self, keeper: WalKeeper, catalog: Catalog, tablets: Tablets) -> None:
        self._keeper = keeper
        self._image = keeper.image
        self._catalog = catalog
        self._tablets = tablets
        self._seen: set[int] = set()
        """Servers that have registered with this coordinator."""
        self._unseen_until = keeper.clock() + RETURN_LEASES * keeper.lease_seconds
        self._gone_since: dict[int, float] = {}
        self._ordered: dict[int, dict[TableBucket, _Followed]] = {}
        """What each server was told and has confirmed."""
        self._sending: dict[int, asyncio.Task[None]] = {}
        self._looked_at: tuple[int, frozenset[int]] | None = None
        """The image and the servers that were gone for good when everything was done."""
        self._wake = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Look after the standbys from now on."""
        self._task = asyncio.create_task(self._run(), name="standby-orders")

    async def stop(self) -> None:
        """Stop; the next coordinator goes on."""
        await end(self._task)
        for sending in tuple(self._sending.values()):
            await end(sending)

    def joined(self, server_id: int) -> None:
        """A server has registered: what it was told before counts for nothing."""
        self._seen.add(server_id)
        self._gone_since.pop(server_id, None)
        self._ordered.pop(server_id, None)
        self._looked_at = None
        self._wake.set()

    async def _run(self) -> None:
        while True:
            self._wake.clear()
            try:
                await self.look()
            except Exception as problem:
                log_failure("standbys_not_ordered", problem)
            await pause(LOOK_SECONDS, self._wake)

    async def look(self) -> None:
        """Complete the standbys, and begin to send the orders that have not arrived."""
        gone = self._gone()
        now = (self._image.version, frozenset(gone.for_good))
        if now == self._looked_at:
            return
        await self._complete(gone)
        version = self._image.version
        if self._send():
            self._looked_at = version, frozenset(gone.for_good)

    def _gone(self) -> _Gone:
        """The servers that are not there."""
        clock = self._keeper.clock()
        absent = set(self._image.absent) | {
            server for _, _, state, _ in self._buckets() for server in state.replicas
        }
        absent -= self._image.tablets.keys()
        if clock < self._unseen_until:
            absent &= self._seen
        self._gone_since = {i: self._gone_since.get(i, clock) for i in absent}
        since = self._gone_since.items()
        return _Gone(absent, {i for i, at in since if clock - at >= GONE_SECONDS})

    def _buckets(self) -> Iterator[_Bucket]:
        """All buckets that have standbys."""
        factors: dict[int, int] = {}
        for table in self._image.tables():
            factor = table.info.property(table_options.TABLE_REPLICATION_FACTOR)
            if factor is not None and factor > 1:
                factors[table.info.table_id] = factor
        if not factors:
            return
        for path, bucket, state in self._image.buckets():
            if bucket.table_id in factors:
                yield path, bucket, state, factors[bucket.table_id]

    async def _complete(self, gone: _Gone) -> None:
        """Replace standbys that are gone, and place those that are missing."""
        done, changes = await self._catalog.states.change(lambda: self._completed(gone))
        if done:
            log.info("standbys_placed", buckets=len(done))
            await self._catalog.tell(changes)

    def _completed(self, gone: _Gone) -> Mapping[TableBucket, BucketState]:
        untagged = self._image.untagged(self._image.tablets.values())
        nodes = self._tablets.answering(untagged)
        buckets = list(self._buckets())
        load = Counter(self._image.leaders)
        load.update(server for _, _, state, _ in buckets for server in state.replicas[1:])
        states: dict[TableBucket, BucketState] = {}
        for _, bucket, state, factor in buckets:
            if state.leader in gone.absent:
                continue  # a take-over comes first
            replicas = completed(state, factor, nodes, gone.for_good, load)
            isr = tuple(i for i in state.isr if i in replicas and i not in gone.absent)
            if (replicas, isr) != (state.replicas, state.isr):
                states[bucket] = replace(
                    state, replicas=replicas, isr=isr, bucket_epoch=state.bucket_epoch + 1
                )
        return states

    def _send(self) -> bool:
        """Begin to send what servers have not confirmed; whether there was nothing."""
        wanted: dict[int, dict[TableBucket, ReplicaAssignment]] = {}
        states: dict[TableBucket, BucketState] = {}
        for path, bucket, state, _ in self._buckets():
            states[bucket] = state
            for server in state.replicas:
                if server != state.leader:
                    order = ReplicaAssignment(bucket, path, state)
                    wanted.setdefault(server, {})[bucket] = order
        nothing = True
        for server in self._image.tablets:
            known, mine = self._ordered.get(server, {}), wanted.get(server, {})
            orders = [x for b, x in mine.items() if known.get(b) != _followed(x.state)]
            for bucket in known.keys() - states.keys():  # dropped: every holder was told that
                del known[bucket]
            stops = [
                ReplicaStop(bucket, states[bucket].leader_epoch, True, (server,))
                for bucket in known
                if bucket not in mine and states[bucket].leader != server
            ]
            if not orders and not stops:
                continue
            nothing = False
            if server not in self._sending:
                sending = asyncio.create_task(self._send_to(server, orders, stops))
                self._sending[server] = sending
                sending.add_done_callback(partial(self._sent, server))
        return nothing

    def _sent(self, server_id: int, sending: asyncio.Task[None]) -> None:
        del self._sending[server_id]
        self._wake.set()

    async def _send_to(
        self, server_id: int, orders: list[ReplicaAssignment], stops: list[ReplicaStop]
    ) -> None:
        """Send a server its orders once; what fails is sent again."""
        try:
            await self._tablets.order_standbys(server_id, orders, stops)
        except Exception as problem:
            log_failure("standbys_not_ordered", problem)
            await pause(LOOK_SECONDS)
            return
        known = self._ordered.setdefault(server_id, {})
        known.update({x.table_bucket: _followed(x.state) for x in orders})
        for stop in stops:
            known.pop(stop.table_bucket, None)

    def __repr__(self) -> str:
        return f"StandbyOrders({sum(map(len, self._ordered.values()))} told)"


class _Gone:
    """Servers that are not there, and those that were not for long."""

    def __init__(self, absent: set[int], for_good: set[int]) -> None:
        self.absent, self.for_good = absent, for_good


def _followed(state: BucketState) -> _Followed:
    return state.leader, state.leader_epoch


def completed(
    state: BucketState,
    factor: int,
    nodes: Iterable[ClusterNode],
    gone: set[int],
    load: Counter[int],
) -> tuple[int, ...]:
    """The replicas of a bucket; one that is `gone` keeps its place until another can take it."""
    others = [server for server in state.replicas if server != state.leader]
    kept = [server for server in others if server not in gone][: factor - 1]
    replicas = with_standbys((state.leader, *kept), factor, nodes, load)
    missing = factor - len(replicas)
    return (*replicas, *[i for i in others if i not in replicas][: max(missing, 0)])
