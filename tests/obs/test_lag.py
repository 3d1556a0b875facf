"""The delay of the event loop: the longest one is shown for a minute, then forgotten."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any
from unittest.mock import Mock

import pytest

from zufluss.obs import metrics
from zufluss.obs.lag import PERIOD_SECONDS, WINDOW_SECONDS, LoopLag


class Time:
    """A clock and the timers of a loop, which the test moves on."""

    def __init__(self) -> None:
        self.now = 1000.0
        self.timers: list[Callable[[], None]] = []

    def call_later(self, delay: float, call: Callable[[], None]) -> Mock:
        assert delay == PERIOD_SECONDS
        self.timers.append(call)
        return Mock()

    def passes(self, seconds: float) -> None:
        """Let time pass, and let the timer run then."""
        self.now += seconds
        self.timers.pop()()


@pytest.fixture
def time() -> Time:
    return Time()


@pytest.fixture
def lag(time: Time) -> LoopLag:
    loop: Any = time
    made = LoopLag(loop, lambda: time.now)
    made.start()
    return made


def shown(lag: LoopLag) -> float:
    (sample,) = lag.samples()
    assert sample.metric is metrics.LOOP_LAG_SECONDS_MAX
    return round(sample.value, 6)


def test_the_longest_delay_is_shown(time: Time, lag: LoopLag) -> None:
    for late in (0.0, 0.3, 0.2, -0.001):
        time.passes(PERIOD_SECONDS + late)
    assert shown(lag) == 0.3


def test_a_timer_that_is_late_just_now_counts(time: Time, lag: LoopLag) -> None:
    time.now += PERIOD_SECONDS + 5
    assert shown(lag) == 5


def test_a_delay_is_shown_for_one_window_and_forgotten_after_two(time: Time, lag: LoopLag) -> None:
    time.passes(PERIOD_SECONDS + 2)
    ticks = round(WINDOW_SECONDS / PERIOD_SECONDS)
    for _ in range(ticks):
        time.passes(PERIOD_SECONDS)
    assert shown(lag) == 2
    for _ in range(ticks + 1):
        time.passes(PERIOD_SECONDS)
    assert shown(lag) == 0


async def test_a_loop_runs_the_timer_until_it_is_stopped() -> None:
    times: list[float] = []
    done = asyncio.Event()

    def clock() -> float:
        times.append(asyncio.get_running_loop().time())
        if len(times) > 5:
            done.set()
        return times[-1]

    lag = LoopLag(asyncio.get_running_loop(), clock)
    lag.start()
    await done.wait()
    lag.stop()
    assert shown(lag) >= 0
