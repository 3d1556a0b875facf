"""The pace of answers about missing partitions: the first at once, repetitions in turn."""

from __future__ import annotations

import pytest

from zufluss.cluster.missing_partitions import (
    INTERVAL_SECONDS,
    LONGEST_HOLD_SECONDS,
    REMEMBERED,
    MissingPartitions,
)


class Clock:
    now = 1000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


def test_one_question_for_each_row_is_answered_at_once(clock: Clock) -> None:
    missing = MissingPartitions(clock)
    assert [missing.hold_seconds("a:1", i) for i in range(40)] == [0] * 40


def test_a_client_that_asks_as_soon_as_it_is_answered_is_answered_at_the_interval(
    clock: Clock,
) -> None:
    missing = MissingPartitions(clock)
    held = []
    for _ in range(50):
        held.append(missing.hold_seconds("a:1", "p"))
        clock.now += held[-1]
    assert held == pytest.approx([0] + [INTERVAL_SECONDS] * 49)


def test_a_client_that_asks_seldom_never_waits(clock: Clock) -> None:
    missing = MissingPartitions(clock)
    for _ in range(50):
        assert missing.hold_seconds("a:1", "p") == 0
        clock.now += 1.5 * INTERVAL_SECONDS


def test_questions_that_are_sent_together_are_answered_in_turn_and_none_waits_for_ever(
    clock: Clock,
) -> None:
    missing = MissingPartitions(clock)
    held = [missing.hold_seconds("a:1", "p") for _ in range(100)]
    assert held == sorted(held)
    assert held[1] == pytest.approx(INTERVAL_SECONDS)
    assert held[-1] == pytest.approx(LONGEST_HOLD_SECONDS)


def test_connections_do_not_slow_each_other_down(clock: Clock) -> None:
    missing = MissingPartitions(clock)
    assert [missing.hold_seconds("a:1", "p") for _ in range(3)][-1] > 0
    assert missing.hold_seconds("a:2", "p") == 0


def test_what_is_remembered_is_bounded(clock: Clock) -> None:
    missing = MissingPartitions(clock)
    for i in range(REMEMBERED + 1):
        missing.hold_seconds("a:1", i)
    assert missing.hold_seconds("a:1", REMEMBERED) > 0
    assert missing.hold_seconds("a:1", 0) == 0
