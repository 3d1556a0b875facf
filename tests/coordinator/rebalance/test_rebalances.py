"""A rebalance makes its moves a few at a time, is cancelled and resumed, and says how it went."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Mapping
from dataclasses import replace
from pathlib import Path

import pytest
import pytest_asyncio

from tests.coordinator.support import call
from tests.coordinator.wal.world import World, until
from zufluss.cluster.authority import Authority
from zufluss.cluster.image import BucketState
from zufluss.coordinator.rebalance import rebalances as module
from zufluss.coordinator.rebalance.planner import Move
from zufluss.coordinator.rebalance.rebalances import (
    MOVES_AT_ONCE,
    RETURN_SECONDS,
    Rebalances,
    outcome_without_move,
)
from zufluss.coordinator.rebalance.service import RebalanceService
from zufluss.coordinator.rebalance.task import MOVES_PER_VALUE, NEWEST_PATH, load_rebalance
from zufluss.errors import (
    LeaderNotAvailableError,
    NoRebalanceError,
    ProducerFencedError,
    RebalanceFailureError,
    ZuflussError,
)
from zufluss.meta.api import Create, Put
from zufluss.model.rebalance import RebalanceStatus as Status
from zufluss.model.rebalance import ServerTag
from zufluss.model.table import TableBucket, TablePath
from zufluss.net.services import Services
from zufluss.wire import messages as m
from zufluss.wire.api import ApiKey


class RecordingMover:
    """Moves buckets in the catalog alone, when `gate` lets it; `failures` are raised instead."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.gate = asyncio.Semaphore(10_000)
        self.moves: list[tuple[TableBucket, int]] = []
        self.failures: dict[TableBucket, Exception] = {}
        self.refusals = 0
        self.under_way: set[TableBucket] = set()
        self.most = 0

    async def move(self, bucket: TableBucket, target: int) -> None:
        self.under_way.add(bucket)
        self.most = max(self.most, len(self.under_way))
        try:
            await self.gate.acquire()
            if bucket in self.failures:
                self.refusals += 1
                raise self.failures[bucket]
            await lead(self.world, bucket, target)
            self.moves.append((bucket, target))
        finally:
            self.under_way.discard(bucket)


async def lead(
    world: World, bucket: TableBucket, server_id: int, released: int | None = None
) -> None:
    def states() -> Mapping[TableBucket, BucketState]:
        state = world.state(bucket)
        epoch = state.leader_epoch + 1
        new = replace(state, replicas=(server_id,), leader=server_id, leader_epoch=epoch)
        return {bucket: replace(new, isr=(server_id,), released=released)}

    await world.coordinator.catalog.states.change(states)


class Balancer:
    """Rebalances with a mover, over the store of a world, and their handlers."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.mover = RecordingMover(world)

    async def open(self, *, moves: bool = True) -> Balancer:
        coordinator = self.world.coordinator
        stored = load_rebalance(await self.world.store.tree("/"))
        self.rebalances = Rebalances(
            coordinator.catalog.ledger,
            coordinator.image,
            stored,
            self.world.seconds,
            self.mover if moves else None,
        )
        self.rebalances.start()
        self.services = Services()
        authority = Authority(coordinator.conf)
        self.services.attach(
            RebalanceService(coordinator.image, coordinator.tags, self.rebalances, authority)
        )
        return self

    async def again(self) -> Balancer:
        """The coordinator is killed, and another one begins."""
        await self.rebalances.stop()
        await self.world.restart()
        return await Balancer(self.world).open()

    async def begin(self) -> str:
        answer = await call(self.services, ApiKey.REBALANCE, m.RebalanceRequest(goals=[1]))
        assert isinstance(answer.rebalance_id, str)
        return answer.rebalance_id

    async def progress(self, **fields: str) -> m.ListRebalanceProgressResponse:
        request = m.ListRebalanceProgressRequest(**fields)
        return await call(self.services, ApiKey.LIST_REBALANCE_PROGRESS, request)  # type: ignore[no-any-return]

    async def cancel(self, **fields: str) -> None:
        await call(self.services, ApiKey.CANCEL_REBALANCE, m.CancelRebalanceRequest(**fields))

    @property
    def statuses(self) -> Counter[Status]:
        newest = self.rebalances.newest
        assert newest is not None
        return Counter(state.status for state in newest.moves)

    async def ended(self) -> Status:
        runner = self.rebalances._runner
        assert runner is not None
        await asyncio.wait([runner])
        newest = self.rebalances.newest
        assert newest is not None
        return newest.status


@pytest_asyncio.fixture
async def world(tmp_path: Path) -> AsyncIterator[World]:
    """One server with twelve buckets, and two that joined later."""
    world = await World(tmp_path).start()
    await world.server(1)
    await world.create_table(buckets=12)
    await world.server(2)
    await world.server(3)
    yield world
    await world.stop()


@pytest_asyncio.fixture
async def balancer(world: World) -> AsyncIterator[Balancer]:
    balancer = await Balancer(world).open()
    yield balancer
    await balancer.rebalances.stop()


async def test_servers_that_joined_get_their_share_a_few_moves_at_a_time(
    world: World, balancer: Balancer
) -> None:
    begun = await balancer.begin()
    assert await balancer.ended() is Status.COMPLETED
    assert world.coordinator.image.leaders == {1: 4, 2: 4, 3: 4}
    assert balancer.mover.most == MOVES_AT_ONCE
    answer = await balancer.progress(rebalance_id=begun)
    (table,) = answer.table_progress
    assert (answer.rebalance_id, answer.rebalance_status) == (begun, Status.COMPLETED)
    assert len(table.buckets_progress) == 8
    first = table.buckets_progress[0]
    assert first.rebalance_status == Status.COMPLETED
    plan = first.rebalance_plan
    assert (plan.original_leader, list(plan.original_replicas)) == (1, [1])
    assert [plan.new_leader] == list(plan.new_replicas)


async def test_an_even_cluster_is_rebalanced_at_once(balancer: Balancer) -> None:
    await balancer.begin()
    await balancer.ended()
    second = await balancer.begin()
    assert await balancer.ended() is Status.COMPLETED
    answer = await balancer.progress()
    assert (answer.rebalance_id, list(answer.table_progress)) == (second, [])


async def test_a_tagged_server_is_emptied(world: World, balancer: Balancer) -> None:
    await world.coordinator.tags.add([1], ServerTag.PERMANENT_OFFLINE)
    await balancer.begin()
    await balancer.ended()
    assert +world.coordinator.image.leaders == {2: 6, 3: 6}


async def test_a_second_rebalance_is_refused_while_one_is_under_way(balancer: Balancer) -> None:
    balancer.mover.gate = asyncio.Semaphore(0)
    begun = await balancer.begin()
    with pytest.raises(RebalanceFailureError, match=begun):
        await balancer.begin()
    await until(lambda: len(balancer.mover.under_way) == MOVES_AT_ONCE)
    assert balancer.statuses == {Status.REBALANCING: 5, Status.NOT_STARTED: 3}
    await balancer.cancel()
    with pytest.raises(RebalanceFailureError, match="under way are finished"):
        await balancer.begin()
    for _ in range(MOVES_AT_ONCE):
        balancer.mover.gate.release()
    await balancer.ended()
    await balancer.begin()


async def test_a_cancelled_rebalance_finishes_the_moves_under_way_and_begins_no_more(
    world: World, balancer: Balancer
) -> None:
    balancer.mover.gate = asyncio.Semaphore(0)
    begun = await balancer.begin()
    await until(lambda: len(balancer.mover.under_way) == MOVES_AT_ONCE)
    await balancer.cancel(rebalance_id=begun)
    for _ in range(MOVES_AT_ONCE):
        balancer.mover.gate.release()
    assert await balancer.ended() is Status.CANCELED
    expected = {Status.COMPLETED: 5, Status.CANCELED: 3}
    assert balancer.statuses == expected
    assert len(balancer.mover.moves) == 5
    later = await balancer.again()
    assert later.statuses == expected
    assert later.rebalances._runner is None, "nothing is resumed"
    await later.rebalances.stop()


async def test_another_coordinator_goes_on_with_the_rebalance(
    world: World, balancer: Balancer
) -> None:
    """Planted bug: states of moves that were stored late are believed."""
    balancer.mover.gate = asyncio.Semaphore(3)
    begun = await balancer.begin()
    await until(lambda: len(balancer.mover.moves) == 3)
    later = await balancer.again()
    assert later.statuses == {Status.NOT_STARTED: 8}, "nothing of the three was stored"
    for server_id in (1, 2, 3):
        await world.server(server_id)
    assert await later.ended() is Status.COMPLETED
    assert world.coordinator.image.leaders == {1: 4, 2: 4, 3: 4}
    assert len(later.mover.moves) == 5
    assert later.statuses == {Status.COMPLETED: 8}
    assert (await later.progress()).rebalance_id == begun
    await later.rebalances.stop()


async def test_the_next_coordinator_waits_for_servers_only_for_a_while(
    world: World, balancer: Balancer
) -> None:
    balancer.mover.gate = asyncio.Semaphore(0)
    await balancer.begin()
    later = await balancer.again()
    for server_id in (1, 2):
        await world.server(server_id)
    world.seconds.now += RETURN_SECONDS
    assert await later.ended() is Status.COMPLETED
    assert later.statuses == {Status.COMPLETED: 4, Status.CANCELED: 4}
    answer = await later.progress()
    reasons = {b.reason for t in answer.table_progress for b in t.buckets_progress}
    assert reasons == {"", "tablet server 3 is not there"}
    await later.rebalances.stop()


async def test_moves_to_a_server_that_gets_a_tag_meanwhile_are_skipped(
    world: World, balancer: Balancer
) -> None:
    balancer.mover.gate = asyncio.Semaphore(0)
    await balancer.begin()
    await until(lambda: len(balancer.mover.under_way) == MOVES_AT_ONCE)
    newest = balancer.rebalances.newest
    assert newest is not None
    waiting = [s for s in newest.moves if s.status is Status.NOT_STARTED]
    await world.coordinator.tags.add([3], ServerTag.PERMANENT_OFFLINE)
    for _ in range(8):
        balancer.mover.gate.release()
    assert await balancer.ended() is Status.COMPLETED
    for state in waiting:
        skipped = state.move.target == 3
        reason = "tablet server 3 has the tag PERMANENT_OFFLINE" if skipped else ""
        assert (state.status, state.reason) == (
            Status.CANCELED if skipped else Status.COMPLETED,
            reason,
        )


async def test_a_move_that_became_pointless_or_impossible_has_an_outcome_without_the_mover(
    world: World,
) -> None:
    image = world.coordinator.image
    table_id = image.table(TablePath("fluss", "events")).info.table_id
    bucket = TableBucket(table_id, None, 0)
    move = Move(bucket, 1, 2)
    assert outcome_without_move(image, move) is None
    skipped = Status.CANCELED
    absent = Move(bucket, 1, 7)
    assert outcome_without_move(image, absent) == (skipped, "tablet server 7 is not there")
    await world.coordinator.tags.add([2], ServerTag.TEMPORARY_OFFLINE)
    reason = "tablet server 2 has the tag TEMPORARY_OFFLINE"
    assert outcome_without_move(image, move) == (skipped, reason)
    await lead(world, bucket, 2, released=7)
    assert outcome_without_move(image, move) is None, "the next leader does not serve it yet"
    await lead(world, bucket, 2)
    assert outcome_without_move(image, move) == (Status.COMPLETED, "")
    await lead(world, bucket, 3)
    reason = "tablet server 3 leads the bucket by now"
    assert outcome_without_move(image, move) == (skipped, reason)
    await world.coordinator.catalog.drop_table(TablePath("fluss", "events"))
    assert outcome_without_move(image, move) == (skipped, "the bucket was dropped")


async def test_a_move_that_fails_does_not_stop_the_others(balancer: Balancer) -> None:
    bucket = (await balancer.rebalances.plan())[0].bucket
    balancer.mover.failures[bucket] = LeaderNotAvailableError("it was busy")
    await balancer.begin()
    await until(lambda: balancer.statuses[Status.COMPLETED] == 7)
    balancer.world.seconds.now += module.RETURN_SECONDS
    assert await balancer.ended() is Status.FAILED
    assert balancer.statuses == {Status.COMPLETED: 7, Status.FAILED: 1}
    answer = await balancer.progress()
    reasons = {b.reason for t in answer.table_progress for b in t.buckets_progress if b.reason}
    assert reasons == {"it was busy"}
    balancer.mover.failures.clear()
    await balancer.begin()
    assert await balancer.ended() is Status.COMPLETED
    assert balancer.statuses == {Status.COMPLETED: 1}


async def test_a_move_that_is_refused_for_the_moment_is_tried_again(
    balancer: Balancer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After a restart of the coordinator, servers take over their own buckets first."""
    monkeypatch.setattr(module, "TRY_AGAIN_SECONDS", 0.0)
    bucket = (await balancer.rebalances.plan())[0].bucket
    balancer.mover.failures[bucket] = LeaderNotAvailableError("it was busy")
    await balancer.begin()
    await until(lambda: balancer.mover.refusals > 2)
    balancer.mover.failures.clear()
    assert await balancer.ended() is Status.COMPLETED
    assert balancer.statuses == {Status.COMPLETED: 8}


async def test_a_bucket_that_somebody_else_moved_to_the_target_meanwhile_has_arrived(
    world: World, balancer: Balancer
) -> None:
    first = (await balancer.rebalances.plan())[0]
    balancer.mover.failures[first.bucket] = ProducerFencedError("it leads it already")
    balancer.mover.gate = asyncio.Semaphore(0)
    await balancer.begin()
    await until(lambda: first.bucket in balancer.mover.under_way)
    await lead(world, first.bucket, first.target)
    for _ in range(8):
        balancer.mover.gate.release()
    assert await balancer.ended() is Status.COMPLETED


async def test_a_coordinator_that_was_replaced_begins_no_more_moves(
    world: World, balancer: Balancer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "SAVE_SECONDS", 0.0)
    balancer.mover.gate = asyncio.Semaphore(0)
    await balancer.begin()
    await until(lambda: len(balancer.mover.under_way) == MOVES_AT_ONCE)
    await world.store.transact([Put("/coordinator/epoch", b"9")])
    balancer.mover.gate.release()
    with pytest.raises(ZuflussError):
        await balancer.begin()
    assert await balancer.ended() is Status.REBALANCING
    assert balancer.mover.under_way == set()
    assert balancer.statuses[Status.NOT_STARTED] >= 2


async def test_without_a_mover_a_rebalance_is_refused_and_can_be_looked_at(world: World) -> None:
    services = (await Balancer(world).open(moves=False)).services
    with pytest.raises(RebalanceFailureError, match="without the shared log"):
        await call(services, ApiKey.REBALANCE, m.RebalanceRequest(goals=[0]))
    answer = await call(services, ApiKey.PLAN_REBALANCE, m.PlanRebalanceRequest(goals=[0]))
    assert [len(table.buckets_plan) for table in answer.table_plan] == [8]
    shares = [(s.server_id, s.leaders, s.leaders_after) for s in answer.servers]
    assert shares == [(1, 12, 4), (2, 0, 4), (3, 0, 4)]
    progress = await call(
        services, ApiKey.LIST_REBALANCE_PROGRESS, m.ListRebalanceProgressRequest()
    )
    assert not progress.HasField("rebalance_id")
    await call(services, ApiKey.CANCEL_REBALANCE, m.CancelRebalanceRequest(rebalance_id="none"))
    assert await world.store.read(NEWEST_PATH) is None


@pytest.mark.parametrize("goals", [[], [3], [0, -1]])
async def test_goals_that_do_not_exist_are_refused_with_those_that_do(
    balancer: Balancer, goals: list[int]
) -> None:
    with pytest.raises(RebalanceFailureError, match=r"0 \(REPLICA_DISTRIBUTION\)"):
        await call(balancer.services, ApiKey.REBALANCE, m.RebalanceRequest(goals=goals))


async def test_only_the_newest_rebalance_is_known(balancer: Balancer) -> None:
    first = await balancer.begin()
    await balancer.ended()
    await balancer.begin()
    with pytest.raises(NoRebalanceError, match="Only the newest"):
        await balancer.progress(rebalance_id=first)
    with pytest.raises(NoRebalanceError):
        await balancer.cancel(rebalance_id=first)


async def test_a_plan_of_many_values_is_stored_and_the_one_before_deleted(
    world: World, balancer: Balancer
) -> None:
    first = await balancer.begin()
    await balancer.ended()
    await world.coordinator.tags.add([2, 3], ServerTag.PERMANENT_OFFLINE)
    await world.create_table("large", buckets=2 * MOVES_PER_VALUE)
    await world.coordinator.tags.remove([2, 3], ServerTag.PERMANENT_OFFLINE)
    second = await balancer.begin()
    await balancer.ended()
    assert balancer.statuses.keys() == {Status.COMPLETED}
    await balancer.rebalances._changes.settle()
    paths = [entry.path for entry in await world.store.tree("/rebalance")]
    assert not [path for path in paths if first in path]
    assert len([path for path in paths if second in path]) == 2
    stored = load_rebalance(await world.store.tree("/")).newest
    assert stored is not None
    assert Counter(s.status for s in stored.moves) == balancer.statuses


async def test_moves_left_over_from_a_crash_are_deleted(world: World, balancer: Balancer) -> None:
    await balancer.begin()
    await balancer.ended()
    (path,) = [e.path for e in await world.store.tree("/rebalance/moves")]
    await world.store.transact([Create("/rebalance/moves/gone/0", b"{}")])
    later = await balancer.again()
    await later.rebalances._changes.settle()
    assert [e.path for e in await world.store.tree("/rebalance/moves")] == [path]
    await later.rebalances.stop()
