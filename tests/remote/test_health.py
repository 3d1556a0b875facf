"""The health and the effective weight of a location, from its failures and its speed."""

from __future__ import annotations

from collections import Counter
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from zufluss.remote.errors import LocationUnavailableError
from zufluss.remote.health import (
    FACTOR_MIN,
    HOLD_MAX_MS,
    HealthReport,
    LocationHealth,
    best_pace,
)
from zufluss.remote.locations import Health
from zufluss.remote.placement import SmoothRoundRobin

INTERVAL = 5000
ERROR = LocationUnavailableError("s3://a/x", "log/1", "no answer")
THROTTLED = LocationUnavailableError("s3://a/x", "log/1", "slow down", throttled=True)


def new(down_after: int = 3) -> LocationHealth:
    return LocationHealth(down_after=down_after, probe_interval_ms=INTERVAL)


def brought_down(now: float = 0) -> LocationHealth:
    health = new()
    for _ in range(3):
        health.failed(ERROR, now)
    return health


def probed_until_back(health: LocationHealth, now: float, works_at: float = 0) -> float:
    """Probe whenever it is due; the time when it is ACTIVE again."""
    while health.state is not Health.ACTIVE:
        now += 100
        if health.probe_due(now):
            health.probed(now >= works_at, now)
    return now


def test_one_failure_makes_it_suspect_and_three_in_a_row_bring_it_down() -> None:
    health = new()
    states = []
    for _ in range(3):
        health.failed(ERROR, 0)
        states.append(health.state)
    assert states == [Health.SUSPECT, Health.SUSPECT, Health.DOWN]
    assert health.errors == 3
    assert health.last_error == "s3://a/x/log/1: no answer"


def test_throttling_counts_like_any_failure() -> None:
    health = new(down_after=1)
    health.failed(THROTTLED, 0)
    assert health.state is Health.DOWN


def test_a_success_in_between_begins_the_count_anew() -> None:
    health = new()
    for _ in range(5):
        health.failed(ERROR, 0)
        health.failed(ERROR, 0)
        health.succeeded(1)
    assert health.state is Health.SUSPECT


def test_successes_alone_do_not_bring_it_back() -> None:
    """Small files that get through while large ones fail must not move placement to and fro."""
    health = brought_down()
    for _ in range(100):
        health.succeeded(1)
    assert health.state is Health.DOWN


def test_three_good_probes_in_a_row_bring_it_back() -> None:
    health = brought_down()
    for now, ok in ((10, True), (20, True), (30, False), (40, True), (50, True)):
        health.probed(ok, now * INTERVAL)
        assert health.state is Health.DOWN
    health.probed(True, 60 * INTERVAL)
    assert health.state is Health.ACTIVE


def test_a_failed_upload_between_probes_begins_their_count_anew() -> None:
    health = brought_down()
    for now in (10, 20):
        health.probed(True, now * INTERVAL)
    health.failed(ERROR, 25 * INTERVAL)
    health.probed(True, 30 * INTERVAL)
    assert health.state is Health.DOWN


def test_it_is_not_back_before_its_hold_is_over() -> None:
    health = brought_down()
    for _ in range(5):
        health.probed(True, INTERVAL - 1)
    assert health.state is Health.DOWN
    health.probed(True, INTERVAL)
    assert health.state is Health.ACTIVE


def test_a_location_that_works_is_not_probed() -> None:
    health = new()
    assert not health.probe_due(10**9)
    health.probed(False, 0)
    assert health.state is Health.ACTIVE


def test_probes_that_fail_are_further_and_further_apart_up_to_a_minute() -> None:
    health = brought_down()
    times = []
    for now in range(0, 400_000, 100):
        if health.probe_due(now):
            times.append(now)
            health.probed(False, now)
    gaps = [b - a for a, b in pairwise(times)]
    assert times[0] == INTERVAL
    assert gaps[:5] == [10_000, 20_000, 40_000, 60_000, 60_000]


def test_a_good_probe_is_soon_followed_by_the_next() -> None:
    health = brought_down()
    for _ in range(9):
        health.probed(False, 0)
    health.probed(True, 100_000)
    assert health.probe_due(100_000 + INTERVAL)


def test_each_relapse_soon_after_its_return_doubles_the_hold_up_to_a_limit() -> None:
    health, now, holds = new(), 0.0, []
    for _ in range(12):
        health.failed(ERROR, now)
        back = probed_until_back(health, now)
        holds.append(back - now)
        now = back + 1000
    assert holds[:2] == [15_000, 15_000]
    assert holds[2:6] == [20_000, 40_000, 80_000, 160_000]
    assert all(x <= HOLD_MAX_MS + INTERVAL for x in holds)
    assert holds[-1] >= HOLD_MAX_MS


def test_a_location_that_worked_for_long_is_forgiven() -> None:
    health, now = new(), 0.0
    for _ in range(5):
        health.failed(ERROR, now)
        now = probed_until_back(health, now) + 1000
    now += 11 * HOLD_MAX_MS
    health.failed(ERROR, now)
    assert probed_until_back(health, now) - now == 15_000


def test_flapping_every_second_does_not_flap_placement() -> None:
    """An hour of flapping moves files at most a few times."""
    health, changes, before = new(), 0, Health.ACTIVE
    for second in range(3600):
        now, works = second * 1000, second % 2 == 0
        if health.probe_due(now):
            health.probed(works, now)
            if not works:
                health.failed(ERROR, now)
        elif health.state is Health.ACTIVE and not works:
            health.failed(ERROR, now)
        changes += (health.state is Health.ACTIVE) != (before is Health.ACTIVE)
        before = health.state
    assert changes <= 20


EVENTS = st.lists(
    st.tuples(st.sampled_from(["ok", "fail", "good", "bad"]), st.integers(0, 20_000)), max_size=80
)


@given(EVENTS, st.integers(1, 5))
@settings(max_examples=100)
def test_whatever_happens_it_is_only_left_by_failures_and_only_comes_back_by_probes(
    events: list[tuple[str, int]], down_after: int
) -> None:
    health, now = new(down_after), 0.0
    for kind, pause in events:
        before, now = health.state, now + pause
        if kind == "ok":
            health.succeeded(pause)
        elif kind == "fail":
            health.failed(ERROR, now)
        else:
            health.probed(kind == "good", now)
        if health.state > before:
            assert kind == "fail"
        if health.state < before:
            assert kind == "good"
            assert health.state is Health.ACTIVE
        assert FACTOR_MIN <= health.factor(1.0) <= 1
    probed_until_back(health, now)


def test_the_average_follows_the_newest_requests() -> None:
    health = new()
    health.succeeded(100)
    assert health.latency_ms == 100
    for _ in range(50):
        health.succeeded(10)
    assert health.latency_ms == pytest.approx(10, rel=0.01)


def test_a_location_as_good_as_the_best_keeps_its_whole_weight() -> None:
    health = new()
    assert health.factor(None) == 1
    for _ in range(10):
        health.succeeded(12)
    assert health.factor(10) == 1


def test_a_few_files_say_nothing_about_speed() -> None:
    health = new()
    for _ in range(4):
        health.succeeded(1000)
    assert health.pace is None
    assert health.factor(1) == 1


def test_a_slow_location_gets_less_and_more_again_when_it_is_fast() -> None:
    health = new()
    for _ in range(10):
        health.succeeded(100)
    assert health.factor(10) == pytest.approx(0.15)
    for _ in range(60):
        health.succeeded(10)
    assert health.factor(10) == 1


def test_a_location_that_got_large_files_is_not_slow() -> None:
    small, large = new(), new()
    for _ in range(20):
        small.succeeded(10, 0)
        large.succeeded(640, 64 * 1024 * 1024)
    best = best_pace([small, large, new()])
    assert small.factor(best) == large.factor(best) == 1


def test_failures_lower_the_weight_never_below_the_least_and_successes_raise_it() -> None:
    health = new()
    health.failed(ERROR, 0)
    assert health.factor(None) == pytest.approx(0.64)
    for _ in range(100):
        health.failed(ERROR, 0)
    assert health.factor(None) == FACTOR_MIN
    for _ in range(40):
        health.succeeded(1)
    assert health.factor(None) == pytest.approx(1, abs=0.01)


def test_with_one_location_ten_times_slower_most_files_go_elsewhere() -> None:
    """The time per file stays near that of the fast locations."""
    healths = {1: new(), 2: new(), 3: new()}
    latency, picker, found, spent = {1: 100, 2: 10, 3: 10}, SmoothRoundRobin(), Counter[int](), 0
    for _ in range(1000):
        best = best_pace(healths.values())
        weights = {k: round(1000 * h.factor(best)) for k, h in healths.items()}
        location = picker.pick(weights)
        healths[location].succeeded(latency[location])
        found[location] += 1
        spent += latency[location]
    assert found[1] < 100
    assert abs(found[2] - found[3]) <= 2
    assert spent < 2 * 10 * 1000


@pytest.mark.parametrize("last_error", [None, "s3://a/x: no answer"])
def test_a_report_comes_back_from_the_wire(last_error: str | None) -> None:
    report = HealthReport(2, Health.DOWN, 3, 2**40, 5, 1.5, 0.25, last_error)
    assert HealthReport.from_proto(report.to_proto()) == report
