"""When the next object may start, how many may be under way, and when a put counts as slow.

The first object after a pause starts at once, the next not before the interval has passed: a quiet
server answers at the latency of the store, and a busy one pays for as many puts as its operator
allowed. While puts are under way, starts are spread over the time that a put takes. A store that
asks for fewer requests gets half as many under way and twice the interval, again and again down to
a sixteenth; after some successes it gets more again. Pure but for its clock.
"""

from __future__ import annotations

from collections import deque
from math import inf
from statistics import median
from typing import Final

from zufluss.clock import Clock

LEVEL_MAX: Final = 4
"""How often the pace is halved at most."""
RECOVERY_PUTS: Final = 16
"""Successes in a row after which it is doubled again."""
THROTTLED_SECONDS: Final = 0.025
"""The interval that is doubled where a smaller one is configured."""
DURATIONS_MAX: Final = 64
DURATIONS_MIN: Final = 8
"""No put is slow before so many ended."""
SLOW_FACTOR: Final = 3
SLOW_SECONDS_MIN: Final = 0.05
"""No put is slow before this time: a second request would cost more than the wait."""
BACKOFF_SECONDS: Final = 0.1
BACKOFF_SECONDS_MAX: Final = 5.0


class Pace:
    """The pace of a session's puts."""

    def __init__(self, interval_seconds: float, in_flight: int, clock: Clock) -> None:
        self._interval = interval_seconds
        self._in_flight = in_flight
        self._clock = clock
        self._level = 0
        self._level_since = -inf
        self._successes = 0
        self._durations: deque[float] = deque(maxlen=DURATIONS_MAX)
        self._median = 0.0
        """Of the last durations; 0 as long as nobody can tell."""
        self._last_start = -inf

    @property
    def in_flight(self) -> int:
        """How many objects may be under way."""
        return max(1, self._in_flight >> self._level)

    @property
    def interval(self) -> float:
        """Seconds between the starts of two objects."""
        if not self._level:
            return self._interval
        return max(self._interval, THROTTLED_SECONDS) * 2.0**self._level

    def seconds_left(self, under_way: int) -> float:
        """Seconds until an object may start that has not reached its size.

        While puts are under way, starts are spread over the time of one: if all slots were taken
        in one moment, what comes in the next would wait for a whole put.
        """
        spread = self._median / self.in_flight if under_way else 0.0
        return max(0.0, self._last_start + max(self.interval, spread) - self._clock())

    @property
    def slow_seconds(self) -> float | None:
        """After how long a put is sent a second time; None as long as nobody can tell."""
        return max(SLOW_SECONDS_MIN, SLOW_FACTOR * self._median) if self._median else None

    def started(self) -> None:
        """An object was started."""
        self._last_start = self._clock()

    def succeeded(self, seconds: float) -> None:
        """A put succeeded after so many seconds."""
        self._durations.append(seconds)
        if len(self._durations) >= DURATIONS_MIN:
            self._median = median(self._durations)
        self._successes += 1
        if self._level and self._successes >= RECOVERY_PUTS:
            self._level -= 1
            self._successes = 0

    def failed(self, began: float, throttled: bool) -> None:
        """A put that began then failed. Those that began before the last change say nothing new."""
        self._successes = 0
        if throttled and began > self._level_since and self._level < LEVEL_MAX:
            self._level += 1
            self._level_since = self._clock()


def backoff_seconds(failures: int, draw: float) -> float:
    """Return the pause before the next try of a put; `draw` is a random number from 0 to 1."""
    doubled = BACKOFF_SECONDS * 2.0 ** min(failures - 1, 16)
    return min(BACKOFF_SECONDS_MAX, doubled) * (0.5 + draw)
