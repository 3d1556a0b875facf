"""Buckets of lost tablet servers get other leaders.

A server is lost when it leads buckets, or has a session that has not ended, and is not registered.
Nothing of this is noted anywhere else, so a coordinator that starts goes on where the one before
stopped; servers that it has not seen yet have `RETURN_LEASES` to come back by themselves.

| step | what | if it fails or the coordinator dies here |
|---|---|---|
| 1 | its session is closed and sealed (`keeper.py`) | the next round does it again |
| 2 | its buckets get new leaders, in transactions by table and partition; the session stays their source | those that have none yet get one in the next round |
| 3 | the new leaders get orders, each on its own | an order is sent again until it arrives, or its leader registers anew; after `UNDELIVERED_SECONDS` another server gets the bucket |

The new leaders read the session, continue it in their own, and commit that. With no other server
there, the buckets wait for the first that registers.

Lost servers are looked after side by side: the location of one may not answer for long.

Orders are not sent in the turn of the catalog: a leader that hangs would hold up every change. So
a bucket may be dropped, or given to another server, while its order is under way; then the leader
is told to stop it.
"""  # noqa: E501 - a table row does not wrap

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from itertools import chain
from typing import Final

import structlog

from zufluss.cluster.examination import Finding, Severity
from zufluss.cluster.image import BucketState, ClusterNode
from zufluss.cluster.replicas import ReplicaAssignment, ReplicaStop
from zufluss.cluster.wal import WalSession
from zufluss.coordinator.catalog.bucket_states import StatesKey, states_key
from zufluss.coordinator.catalog.catalog import Catalog
from zufluss.coordinator.catalog.placement import successors
from zufluss.coordinator.producers.book import ProducerBook
from zufluss.coordinator.tablets import Tablets
from zufluss.coordinator.wal.keeper import WalKeeper, is_same_lead, led_by
from zufluss.errors import reason_of
from zufluss.model.table import PhysicalTablePath, TableBucket
from zufluss.periodic import log_failure, pause
from zufluss.tasks import end

log = structlog.get_logger(__name__)

RETURN_LEASES: Final = 10
"""So many leases of lookups (half a minute) after the start of the coordinator its servers may come
back by themselves."""
RETRY_SECONDS: Final = 1.0
"""Pause between two rounds while something is left to do."""
UNDELIVERED_SECONDS: Final = 30.0
"""A server that takes no orders for so long does not get the buckets. It is not given up for that:
one that opens many buckets after its registration takes orders only when they are open."""

_Bucket = tuple[PhysicalTablePath, TableBucket]


class Takeovers:
    """Gives the buckets of lost servers to others."""

    def __init__(
        self,
        keeper: WalKeeper,
        catalog: Catalog,
        tablets: Tablets,
        producers: ProducerBook,
        reach: Callable[[str], None],
    ) -> None:
        self.count = 0
        """Buckets that got another leader."""
        self.problems: dict[int, str] = {}
        """Lost servers whose buckets no other server could take over yet, with the reasons."""
        self._keeper = keeper
        self._image = keeper.image
        self._catalog = catalog
        self._tablets = tablets
        self._producers = producers
        self._reach = reach
        self._seen: set[int] = set()
        """Servers that have registered with this coordinator."""
        self._unseen_until = keeper.clock() + RETURN_LEASES * keeper.lease_seconds
        self._orders: dict[TableBucket, ReplicaAssignment] = {}
        """Orders that have not arrived yet."""
        self._sending: dict[int, asyncio.Task[None]] = {}
        """Orders under way, by server."""
        self._failing: dict[int, float] = {}
        """Since when servers take no orders."""
        self._taking_over: dict[int, asyncio.Task[None]] = {}
        """Take-overs under way, by lost server: the location of one may not answer."""
        self._wake = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Take over from now on."""
        self._task = asyncio.create_task(self._run(), name="takeovers")

    async def stop(self) -> None:
        """Stop; the next coordinator goes on."""
        await end(self._task)
        for task in (*self._taking_over.values(), *self._sending.values()):
            await end(task)

    def joined(self, server_id: int) -> None:
        """A server has registered: it has its orders, and may get buckets of others."""
        self._seen.add(server_id)
        self._failing.pop(server_id, None)
        for bucket in [b for b, order in self._orders.items() if order.state.leader == server_id]:
            del self._orders[bucket]
        self._wake.set()

    def left(self) -> None:
        """A server was lost."""
        self._wake.set()

    def hand_over(self, order: ReplicaAssignment) -> None:
        """Send the order to lead a bucket that was released, until it arrives."""
        self._orders[order.table_bucket] = order
        self._send()

    async def give_up(self, order: ReplicaAssignment) -> None:
        """Give a bucket to another server than the one that was to lead it by this order."""
        await self._give_to_others(order.state.leader, [order])
        self._send()

    async def _run(self) -> None:
        while True:
            self._wake.clear()
            try:
                await self.look()
            except Exception as problem:
                log_failure("take_over_failed", problem)
            await pause(RETRY_SECONDS, self._wake)

    async def look(self) -> None:
        """Look for lost servers once, and begin to send the orders that have not arrived.

        Take-overs that last longer than a moment go on meanwhile.
        """
        lost = self._lost()
        self.problems = {i: reason for i, reason in self.problems.items() if i in lost}
        for server_id, sessions in lost.items():
            if server_id not in self._taking_over:
                work = asyncio.create_task(self._take_over(server_id, sessions))
                self._taking_over[server_id] = work
        if self._taking_over:
            await asyncio.wait(self._taking_over.values(), timeout=RETRY_SECONDS)
        for server_id, work in tuple(self._taking_over.items()):
            if work.done():
                del self._taking_over[server_id]
                self._note_outcome(server_id, work.exception())
        self._send()

    def _note_outcome(self, server_id: int, problem: BaseException | None) -> None:
        if isinstance(problem, Exception):
            log_failure("take_over_failed", problem)
            self.problems[server_id] = reason_of(problem)
        elif problem is not None:
            raise problem

    def _lost(self) -> dict[int, list[WalSession]]:
        """The servers whose buckets or sessions nobody looks after, with these sessions."""
        sessions: dict[int, list[WalSession]] = {}
        for server_id, count in self._image.leaders.items():
            if count > 0:
                sessions[server_id] = []
        for record in self._keeper.book:
            if not record.has_ended:
                sessions.setdefault(record.session.server_id, []).append(record.session)
        there = set(self._image.tablets)
        if self._keeper.clock() < self._unseen_until:
            there |= sessions.keys() - self._seen
        return {i: sessions[i] for i in sorted(sessions.keys() - there)}

    async def _take_over(self, server_id: int, sessions: Sequence[WalSession]) -> None:
        await self._keeper.end_sessions(sessions)
        if self._image.leaders[server_id]:
            await self._catalog.exclusive(lambda: self._assign_lost(server_id))
            self._send()

    async def _assign_lost(self, server_id: int) -> None:
        """Give the buckets of a lost server to those that are there."""
        book = self._keeper.book
        if server_id in self._image.tablets or not all(x.has_ended for x in book.of(server_id)):
            return  # it has come back; if it was lost again, its next session is ended first
        taken = await self._assign(server_id, lambda bucket, state: True)
        if taken is None:
            which = "without a tag " if self._image.tags else ""
            self.problems[server_id] = f"no other tablet server {which}answers"
        else:
            log.warning("buckets_taken_over", lost_server=server_id, buckets=taken)

    async def _assign(
        self, server_id: int, which: Callable[[TableBucket, BucketState], bool]
    ) -> int | None:
        """Give buckets that a server leads to others; how many, None if no other is there."""
        nodes = [
            node
            for node in self._image.untagged(self._tablets.answering(self._image.tablets.values()))
            if node.node_id != server_id
        ]
        if not nodes:
            return None
        leaders: Counter[int] = Counter(self._image.leaders)
        owned: dict[StatesKey, list[_Bucket]] = {}
        for path, bucket, _ in self._keeper.led(server_id):
            owned.setdefault(states_key(bucket), []).append((path, bucket))
        taken = 0
        for keys in self._catalog.states.in_portions(list(owned)):
            some = [owned[key] for key in keys]
            taken += await self._assign_some(some, nodes, leaders, which)
        return taken

    async def _assign_some(
        self,
        owned: Sequence[Sequence[_Bucket]],
        nodes: Sequence[ClusterNode],
        leaders: Counter[int],
        which: Callable[[TableBucket, BucketState], bool],
    ) -> int:
        """Give the buckets of some tables and partitions to others, in one transaction.

        What it changed is ordered before the next one, which may fail: nobody would send the orders
        later, because the buckets have a leader that is there.
        """
        states: dict[TableBucket, BucketState] = {}

        def other_leaders() -> Mapping[TableBucket, BucketState]:
            for some in owned:
                present = [(b, s) for _, b in some if (s := self._image.bucket_state(b))]
                mine = [(bucket, state) for bucket, state in present if which(bucket, state)]
                chosen = successors([state for _, state in mine], nodes, leaders)
                for (bucket, state), leader in zip(mine, chosen, strict=True):
                    states[bucket] = led_by(state, leader)
                    leaders[leader] += 1
            return states

        self._reach("wal-assign")
        done, changes = await self._catalog.states.change(other_leaders)
        taken = set(done)
        for path, bucket in chain.from_iterable(owned):
            if bucket in taken:
                self._orders[bucket] = self._keeper.order(path, bucket, states[bucket])
        self.count += len(taken)
        self._reach("wal-assigned")
        await self._catalog.tell(changes)
        return len(taken)

    def _send(self) -> None:
        """Send the orders that have not arrived, to all their servers at once."""
        for bucket, order in list(self._orders.items()):
            if not _is_current(order, self._image.bucket_state(bucket)):
                del self._orders[bucket]  # dropped, continued, or another server leads it by now
        servers = {order.state.leader for order in self._orders.values()}
        self._failing = {i: since for i, since in self._failing.items() if i in servers}
        for server_id in servers - self._sending.keys():
            sending = asyncio.create_task(self._send_to(server_id), name=f"orders-{server_id}")
            self._sending[server_id] = sending
            sending.add_done_callback(partial(self._sent, server_id))

    def _sent(self, server_id: int, sending: asyncio.Task[None]) -> None:
        del self._sending[server_id]

    async def _send_to(self, server_id: int) -> None:
        """Send a server its orders once."""
        orders = [x for x in self._orders.values() if x.state.leader == server_id]
        began = self._keeper.clock()
        try:
            tables = {order.table_bucket.table_id for order in orders}
            producers = filter(None, map(self._producers.of_table, tables))
            await self._tablets.start_replicas(orders, tuple(producers))
        except Exception as problem:
            log_failure("take_over_not_ordered", problem)
            since = self._failing.setdefault(server_id, began)
            late = self._keeper.clock() - since >= UNDELIVERED_SECONDS
        else:
            self._failing.pop(server_id, None)
            late = False
            for order in orders:
                if self._orders.get(order.table_bucket) is order:
                    del self._orders[order.table_bucket]
        try:
            if late:
                await self._give_to_others(server_id, orders)
            await self._stop_others(server_id, orders)
        except Exception as problem:
            log_failure("take_over_not_ordered", problem)

    async def _give_to_others(self, server_id: int, orders: Sequence[ReplicaAssignment]) -> None:
        """Give buckets to other servers whose leader takes no orders; their source is the same."""
        states = {order.table_bucket: order.state for order in orders}
        taken = await self._catalog.exclusive(
            lambda: self._assign(
                server_id,
                lambda bucket, state: bucket in states and _is_waiting(states[bucket], state),
            )
        )
        if taken:
            log.warning("orders_given_to_others", not_ordered=server_id, buckets=taken)
            self._failing.pop(server_id, None)  # it has as long with the next ones
            self._wake.set()

    async def _stop_others(self, server_id: int, orders: Sequence[ReplicaAssignment]) -> None:
        """Stop buckets that the server should not lead any more: its order came too late.

        If it is to follow one by now, it gets or has an order for that, and keeps its files.
        """
        stops: list[ReplicaStop] = []
        for order in orders:
            state = self._image.bucket_state(order.table_bucket)
            if state is None or server_id not in (state.leader, *state.replicas):
                epoch = order.leader_epoch if state is None else state.leader_epoch
                stops.append(ReplicaStop(order.table_bucket, epoch, True, (server_id,)))
        if stops:
            await self._tablets.stop_replicas(stops)

    def findings(self) -> Iterable[Finding]:
        """Lost servers whose buckets nobody has taken over yet."""
        for server_id, reason in self.problems.items():
            yield Finding(
                Severity.PROBLEM,
                f"tablet server {server_id}",
                f"it is lost, and its buckets could not be given to others yet: {reason}; "
                "this is tried every second",
            )

    def __repr__(self) -> str:
        return f"Takeovers({self.count} buckets, {len(self._orders)} orders to send)"


def _is_current(order: ReplicaAssignment, state: BucketState | None) -> bool:
    return state is not None and _is_waiting(order.state, state)


def _is_waiting(ordered: BucketState, state: BucketState) -> bool:
    """Whether a leader that got this order has not continued the bucket in its session yet.

    It may have, although the answer to its order was lost. Then no other server could: its session
    goes on.
    """
    unchanged = (ordered.wal, ordered.released) == (state.wal, state.released)
    return unchanged and is_same_lead(ordered, state)
