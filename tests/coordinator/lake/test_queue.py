"""The queue of tables to tier: turns, leases, time. A model says who may hold what."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from tests.coordinator.support import Clock
from zufluss.coordinator.lake.queue import (
    BACKOFF_MS_MAX,
    HEARTBEAT_TIMEOUT_MS,
    HandOut,
    TieringQueue,
    TieringState,
    TieringStatus,
    backoff_ms,
    check_timeout_ms,
)
from zufluss.errors import ConfigError, FencedTieringEpochError
from zufluss.model.schema import Schema
from zufluss.model.table import TableDescriptor, TableInfo, TablePath

MINUTE = 60_000
COORDINATOR = 7


def info(
    table_id: int, freshness: str = "3min", *, enabled: bool = True, born: int = 0
) -> TableInfo:
    properties = {
        "table.datalake.enabled": str(enabled).lower(),
        "table.datalake.freshness": freshness,
    }
    descriptor = TableDescriptor(Schema.of("a INT"), bucket_count=1, properties=properties)
    return TableInfo(TablePath("d", f"t{table_id}"), table_id, 1, descriptor, born, born)


class Cluster:
    """A queue, its clock, and a counter per table as the store has it."""

    def __init__(self) -> None:
        self.clock = Clock(0)
        self.jump_ms = 0
        """How far the wall clock is ahead of the monotonic one."""
        self.queue = TieringQueue(
            lambda: self.clock() + self.jump_ms, COORDINATOR, lambda: self.clock() / 1000
        )
        self.epochs: dict[int, int] = {}

    def take(self, timeout_ms: int = HEARTBEAT_TIMEOUT_MS) -> HandOut | None:
        table = self.queue.next_table()
        if table is None:
            return None
        epoch = self.epochs[table.table_id] = self.epochs.get(table.table_id, 0) + 1
        return self.queue.hand_out(table.table_id, epoch, timeout_ms)

    def taken(self, timeout_ms: int = HEARTBEAT_TIMEOUT_MS) -> HandOut:
        hand_out = self.take(timeout_ms)
        assert hand_out is not None
        return hand_out

    def status(self, table_id: int = 1) -> TieringStatus:
        return next(s for s in self.queue.status() if s.table_id == table_id)


@pytest.fixture
def cluster() -> Cluster:
    """One table with a freshness of three minutes, created at time 0."""
    cluster = Cluster()
    cluster.queue.put_table(info(1), None)
    return cluster


def fenced(call: Callable[[], None]) -> None:
    with pytest.raises(FencedTieringEpochError):
        call()


# -- when it is a table's turn --------------------------------------------------------------------


def test_a_new_table_is_pending_after_its_freshness_and_not_before(cluster: Cluster) -> None:
    cluster.clock.now_ms = 3 * MINUTE - 1
    assert cluster.take() is None
    assert cluster.status().state is TieringState.SCHEDULED
    cluster.clock.now_ms += 1
    assert cluster.status().state is TieringState.PENDING
    assert cluster.taken() == HandOut(1, 1, COORDINATOR)
    assert cluster.status().state is TieringState.TIERING


def test_a_table_known_from_before_counts_from_its_last_tiering() -> None:
    cluster = Cluster()
    cluster.clock.now_ms = 10 * MINUTE
    cluster.queue.put_table(info(1), 9 * MINUTE)
    cluster.queue.put_table(info(2), 6 * MINUTE)
    assert cluster.taken().table_id == 2
    assert cluster.take() is None


def test_tables_are_served_in_the_order_in_which_they_became_due() -> None:
    cluster = Cluster()
    for table_id, freshness in ((1, "30s"), (2, "10s"), (3, "20s"), (4, "20s")):
        cluster.queue.put_table(info(table_id, freshness), None)
    cluster.clock.now_ms = MINUTE
    assert [cluster.taken().table_id for _ in range(4)] == [2, 3, 4, 1]
    assert cluster.take() is None


def test_a_finished_table_waits_for_its_freshness_again(cluster: Cluster) -> None:
    cluster.clock.now_ms = 3 * MINUTE
    hand_out = cluster.taken()
    cluster.clock.now_ms += 5_000
    cluster.queue.finish(hand_out, file_size=100, record_count=7)
    assert cluster.take() is None
    status = cluster.status()
    assert (status.tier_lag_ms, status.last_duration_ms) == (0, 5_000)
    assert (status.file_size, status.record_count) == (100, 7)
    cluster.clock.now_ms += 3 * MINUTE
    assert cluster.taken().tiering_epoch == 2


def test_a_clock_that_jumps_ends_no_round_and_puts_no_table_off(cluster: Cluster) -> None:
    cluster.clock.now_ms = 3 * MINUTE
    hand_out = cluster.taken()
    cluster.jump_ms = 400 * 24 * 60 * MINUTE
    cluster.queue.check(hand_out)
    cluster.queue.finish(hand_out)
    assert cluster.status().last_duration_ms == 0
    cluster.jump_ms = 0
    assert cluster.status().tier_lag_ms == 0
    cluster.clock.now_ms += 3 * MINUTE
    assert cluster.taken().table_id == 1


def test_a_table_that_was_tiered_in_the_future_waits_for_its_freshness_only() -> None:
    cluster = Cluster()
    cluster.queue.put_table(info(1), 400 * 24 * 60 * MINUTE)
    assert cluster.take() is None
    cluster.clock.now_ms = 3 * MINUTE
    assert cluster.taken().table_id == 1


def test_statistics_that_a_round_does_not_know_stay(cluster: Cluster) -> None:
    cluster.clock.now_ms = 3 * MINUTE
    cluster.queue.finish(cluster.taken(), file_size=100, record_count=7)
    cluster.clock.now_ms += 3 * MINUTE
    cluster.queue.finish(cluster.taken(), record_count=9)
    assert (cluster.status().file_size, cluster.status().record_count) == (100, 9)


def test_a_table_finished_by_force_is_pending_at_once_behind_the_others(cluster: Cluster) -> None:
    cluster.queue.put_table(info(2), None)
    cluster.clock.now_ms = 3 * MINUTE
    hand_out = cluster.taken()
    cluster.clock.now_ms += 1
    cluster.queue.finish(hand_out, by_force=True)
    assert cluster.status().state is TieringState.PENDING
    assert [cluster.taken().table_id for _ in range(2)] == [2, 1]


# -- altering -------------------------------------------------------------------------------------


def test_a_shorter_freshness_counts_at_once(cluster: Cluster) -> None:
    cluster.clock.now_ms = MINUTE
    assert cluster.take() is None
    cluster.queue.put_table(info(1, "1min"), None)
    assert cluster.taken().table_id == 1


def test_a_longer_freshness_takes_a_waiting_table_back(cluster: Cluster) -> None:
    cluster.clock.now_ms = 3 * MINUTE
    assert cluster.status().state is TieringState.PENDING
    cluster.queue.put_table(info(1, "5min"), None)
    assert cluster.take() is None
    cluster.clock.now_ms = 5 * MINUTE
    assert cluster.taken().table_id == 1


def test_another_alter_does_not_change_a_tables_place(cluster: Cluster) -> None:
    cluster.queue.put_table(info(2), None)
    cluster.clock.now_ms = 3 * MINUTE
    cluster.queue.advance()
    cluster.queue.put_table(info(1), None)
    assert cluster.taken().table_id == 1


def test_a_freshness_altered_during_a_round_counts_after_it(cluster: Cluster) -> None:
    cluster.clock.now_ms = 3 * MINUTE
    hand_out = cluster.taken()
    cluster.queue.put_table(info(1, "1s"), None)
    cluster.queue.finish(hand_out)
    cluster.clock.now_ms += 1_000
    assert cluster.taken().tiering_epoch == 2


def test_a_disabled_table_leaves_and_whoever_holds_it_is_fenced(cluster: Cluster) -> None:
    cluster.clock.now_ms = 3 * MINUTE
    hand_out = cluster.taken()
    cluster.queue.put_table(info(1, enabled=False), None)
    assert cluster.queue.status() == []
    fenced(lambda: cluster.queue.finish(hand_out))
    cluster.queue.put_table(info(1), 0)
    fenced(lambda: cluster.queue.finish(hand_out))
    assert cluster.taken().tiering_epoch == 2


def test_a_dropped_table_leaves_from_every_state(cluster: Cluster) -> None:
    for time, hold in ((0, False), (3 * MINUTE, False), (3 * MINUTE, True)):
        cluster.clock.now_ms = time
        cluster.queue.put_table(info(1), None)
        if hold:
            assert cluster.take()
        cluster.queue.remove_table(1)
        assert cluster.take() is None
        assert 1 not in cluster.queue
    cluster.queue.remove_table(1)


def test_a_table_that_is_gone_when_its_epoch_is_durable_is_not_handed_out(cluster: Cluster) -> None:
    cluster.clock.now_ms = 3 * MINUTE
    assert cluster.queue.next_table() is not None
    cluster.queue.remove_table(1)
    assert cluster.queue.hand_out(1, 1, MINUTE) is None


# -- leases ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "wrong",
    [
        HandOut(1, 0, COORDINATOR),
        HandOut(1, 2, COORDINATOR),
        HandOut(1, 1, COORDINATOR - 1),
        HandOut(2, 1, 7),
    ],
)
def test_a_wrong_lease_is_fenced_and_changes_nothing(cluster: Cluster, wrong: HandOut) -> None:
    cluster.clock.now_ms = 3 * MINUTE
    hand_out = cluster.taken()
    before = cluster.status()
    for call in (cluster.queue.finish, cluster.queue.fail, cluster.queue.check):
        fenced(partial(call, wrong))
    fenced(lambda: cluster.queue.renew(wrong, MINUTE))
    assert cluster.status() == before
    cluster.queue.check(hand_out)


def test_a_finished_lease_is_over(cluster: Cluster) -> None:
    cluster.clock.now_ms = 3 * MINUTE
    hand_out = cluster.taken()
    cluster.queue.finish(hand_out)
    fenced(lambda: cluster.queue.finish(hand_out))
    fenced(lambda: cluster.queue.check(hand_out))


def test_silence_gives_the_table_to_the_next_with_another_epoch(cluster: Cluster) -> None:
    cluster.clock.now_ms = 3 * MINUTE
    hand_out = cluster.taken()
    cluster.clock.now_ms += HEARTBEAT_TIMEOUT_MS - 1
    cluster.queue.check(hand_out)
    assert cluster.take() is None
    cluster.clock.now_ms += 1
    fenced(lambda: cluster.queue.check(hand_out))
    assert cluster.taken().tiering_epoch == 2
    assert cluster.status().failures == 1


def test_heartbeats_keep_a_table_and_each_declares_the_timeout_anew(cluster: Cluster) -> None:
    cluster.clock.now_ms = 3 * MINUTE
    hand_out = cluster.taken(10_000)
    for _ in range(5):
        cluster.clock.now_ms += 9_999
        cluster.queue.renew(hand_out, 10_000)
    cluster.queue.renew(hand_out, 1_000)
    cluster.clock.now_ms += 1_000
    fenced(lambda: cluster.queue.renew(hand_out, 10_000))


def test_the_timeout_has_bounds_and_a_default() -> None:
    assert check_timeout_ms(None) == HEARTBEAT_TIMEOUT_MS
    assert [check_timeout_ms(t) for t in (1_000, 600_000)] == [1_000, 600_000]
    for wrong in (-1, 0, 999, 600_001):
        with pytest.raises(ConfigError, match="1000 to 600000"):
            check_timeout_ms(wrong)


# -- failures -------------------------------------------------------------------------------------


def test_a_table_that_fails_comes_again_at_once_and_then_later_each_time(cluster: Cluster) -> None:
    cluster.clock.now_ms = 3 * MINUTE
    waits = []
    for _ in range(9):
        cluster.queue.fail(cluster.taken())
        failed = cluster.clock.now_ms
        while cluster.status().state is not TieringState.PENDING:
            cluster.clock.now_ms += 1_000
        waits.append((cluster.clock.now_ms - failed) // 1_000)
    assert waits == [0, 1, 2, 4, 8, 16, 32, 60, 60]
    assert cluster.status().failures == 9
    cluster.queue.finish(cluster.taken())
    cluster.clock.now_ms += 3 * MINUTE
    cluster.queue.fail(cluster.taken())
    assert cluster.status().state is TieringState.PENDING


def test_a_table_whose_services_fall_silent_waits_like_one_that_fails(cluster: Cluster) -> None:
    cluster.clock.now_ms = 3 * MINUTE
    waits = []
    for number in range(5):
        hand_out = cluster.taken(1_000)
        if number == 3:
            cluster.queue.fail(hand_out)  # both count together
        else:
            cluster.clock.now_ms += 1_000
        since = cluster.clock.now_ms
        while cluster.status().state is not TieringState.PENDING:
            cluster.clock.now_ms += 1_000
        waits.append((cluster.clock.now_ms - since) // 1_000)
    assert waits == [0, 1, 2, 4, 8]
    assert cluster.status().failures == 5
    cluster.queue.finish(cluster.taken(1_000), by_force=True)
    cluster.taken(1_000)
    cluster.clock.now_ms += 1_000
    assert cluster.status().state is TieringState.PENDING


def test_the_backoff_never_grows_beyond_its_limit() -> None:
    assert backoff_ms(10_000) == BACKOFF_MS_MAX


def test_an_altered_freshness_does_not_bring_a_failed_table_back_early(cluster: Cluster) -> None:
    cluster.clock.now_ms = 3 * MINUTE
    for _ in range(3):
        cluster.clock.now_ms += 1_000
        cluster.queue.fail(cluster.taken())
    cluster.queue.put_table(info(1, "1s"), None)
    assert cluster.take() is None


def test_the_time_a_table_waits_is_shown(cluster: Cluster) -> None:
    cluster.clock.now_ms = 4 * MINUTE
    assert cluster.status().pending_ms == MINUTE
    assert cluster.status().tier_lag_ms == 4 * MINUTE
    cluster.taken()
    assert cluster.status().pending_ms == 0


# -- everything at once ---------------------------------------------------------------------------

TABLES = st.integers(1, 3)
FRESHNESS = st.sampled_from(["1s", "5s", "30s"])


class QueueAgainstModel(RuleBasedStateMachine):
    """Services that come, work, hang and lie, over tables that come, change and go.

    `held` is what the queue must think: per table the one lease that holds, with its deadline.
    """

    def __init__(self) -> None:
        super().__init__()
        self.cluster = Cluster()
        self.held: dict[int, tuple[HandOut, int]] = {}
        self.leases: list[HandOut] = []

    def _expire(self) -> None:
        now = self.cluster.clock.now_ms
        self.held = {i: held for i, held in self.held.items() if held[1] > now}

    @rule(table=TABLES, freshness=FRESHNESS, enabled=st.booleans())
    def put(self, table: int, freshness: str, enabled: bool) -> None:
        born = self.cluster.clock.now_ms
        self.cluster.queue.put_table(info(table, freshness, enabled=enabled, born=born), None)
        if not enabled:
            self.held.pop(table, None)

    @rule(table=TABLES)
    def drop(self, table: int) -> None:
        self.cluster.queue.remove_table(table)
        self.held.pop(table, None)

    @rule(ms=st.sampled_from([1, 999, 1_000, 5_000, 31_000]))
    def wait(self, ms: int) -> None:
        self.cluster.clock.now_ms += ms
        self._expire()

    @rule(timeout_ms=st.sampled_from([1_000, 10_000]))
    def ask(self, timeout_ms: int) -> None:
        hand_out = self.cluster.take(timeout_ms)
        if hand_out is None:
            return
        assert hand_out.table_id not in self.held, "two services hold one table"
        earlier = [known for known in self.leases if known.table_id == hand_out.table_id]
        assert all(known.tiering_epoch < hand_out.tiering_epoch for known in earlier)
        self.leases.append(hand_out)
        self.held[hand_out.table_id] = (hand_out, self.cluster.clock.now_ms + timeout_ms)

    @precondition(lambda self: bool(self.leases))
    @rule(data=st.data(), what=st.sampled_from(["finish", "force", "fail", "renew", "check"]))
    def report(self, data: st.DataObject, what: str) -> None:
        """All hand-outs so far: only the valid one is accepted."""
        hand_out = data.draw(st.sampled_from(self.leases))
        queue = self.cluster.queue
        valid = self.held.get(hand_out.table_id, (None, 0))[0] == hand_out
        before = queue.status()
        try:
            if what == "renew":
                queue.renew(hand_out, 10_000)
            elif what == "fail":
                queue.fail(hand_out)
            elif what == "check":
                queue.check(hand_out)
            else:
                queue.finish(hand_out, by_force=what == "force")
        except FencedTieringEpochError:
            assert not valid
            assert queue.status() == before
            return
        assert valid
        if what == "renew":
            self.held[hand_out.table_id] = (hand_out, self.cluster.clock.now_ms + 10_000)
        elif what != "check":
            del self.held[hand_out.table_id]

    @invariant()
    def running_tables_are_those_that_somebody_holds(self) -> None:
        running = {
            s.table_id: s.tiering_epoch
            for s in self.cluster.queue.status()
            if s.state is TieringState.TIERING
        }
        assert running == {i: hand_out.tiering_epoch for i, (hand_out, _) in self.held.items()}


QueueAgainstModel.TestCase.settings = settings(
    max_examples=60, stateful_step_count=40, deadline=None
)
TestQueueAgainstModel = QueueAgainstModel.TestCase
