"""The wall clock: the only module that reads it (ruff rule TID251 holds the others to that).

An object that depends on the time of day takes a `ClockMs` in its constructor, and a function takes
the time itself, so that tests set the clock instead of waiting. Durations and deadlines come from
`time.monotonic`, which needs no such rule; an object that keeps a deadline beyond one call takes a
`Clock` as well.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path

from zufluss.system import UPTIME_CLOCK

Clock = Callable[[], float]
"""Seconds that never jump: `time.monotonic`, `uptime_seconds`, or a test's own."""
ClockMs = Callable[[], int]
"""Wall time in epoch milliseconds: `wall_ms`, or a test's own."""


def wall_ms() -> int:
    """Returns the wall time in epoch milliseconds."""
    return time.time_ns() // 1_000_000


def uptime_seconds() -> float:
    """Returns the seconds since the machine started, with those in which it was suspended.

    `time.monotonic` leaves these out on Linux and macOS.
    """
    return time.monotonic() if UPTIME_CLOCK is None else time.clock_gettime(UPTIME_CLOCK)


_loaded = time.monotonic()


def process_seconds() -> float:
    """Returns the seconds since this process started, the imports included.

    Where the system does not say when that was, they count from the import of this module.
    """
    try:
        after_name = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
        started = int(after_name[19]) / os.sysconf("SC_CLK_TCK")
    except (OSError, ValueError, IndexError):
        return time.monotonic() - _loaded
    return uptime_seconds() - started
