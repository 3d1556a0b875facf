"""The wall clock: the only module that reads it (ruff rule TID251 holds the others to that).

An object that depends on the time of day takes a `ClockMs` in its constructor, and a function takes
the time itself, so that tests set the clock instead of waiting. Durations and deadlines come from
`time.monotonic`, which needs no such rule; an object that keeps a deadline beyond one call takes a
`Clock` as well.
"""

from __future__ import annotations

import time
from collections.abc import Callable

Clock = Callable[[], float]
"""Seconds that never jump: `time.monotonic`, `uptime_seconds`, or a test's own."""
ClockMs = Callable[[], int]
"""Wall time in epoch milliseconds: `wall_ms`, or a test's own."""


def wall_ms() -> int:
    """Returns the wall time in epoch milliseconds."""
    return time.time_ns() // 1_000_000


def uptime_seconds() -> float:
    """Returns the seconds since the machine started, with those in which it was suspended.

    `time.monotonic` leaves these out on Linux.
    """
    boot_time = getattr(time, "CLOCK_BOOTTIME", None)
    return time.monotonic() if boot_time is None else time.clock_gettime(boot_time)
