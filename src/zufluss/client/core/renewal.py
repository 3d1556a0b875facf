"""When to renew a lease, and when it may be over: arithmetic over a clock, no I/O.

| moment | counted from |
|---|---|
| the end of the lease | the sending of the last renewal that succeeded, never its answer |
| the next renewal | the same, after a little less than a third of the time |
| the next try after one that failed | the failure, with pauses that grow up to a part of the time |

So the client takes a lease for expired before the server does, whatever the network delays. A
server that cannot be reached for two thirds of the time, from whatever moment on, is tried again in
what is left; one that hangs instead of refusing, too, where the lease lasts a minute or more. Tries
go on behind the end: a coordinator that was away gives every lease some time when it comes back,
and only its answer tells.

The default clock goes on while the machine sleeps, where the system has such a clock.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final

RENEW_AT: Final = 0.3
"""The part of the time after which a lease is renewed, at the latest."""
JITTER: Final = 0.1
"""So much earlier at most, so that clients that began together do not renew together."""
FIRST_PAUSE_SECONDS: Final = 0.05
"""Before the second try of a renewal; each pause is twice the one before."""
LONGEST_PAUSE_SECONDS: Final = 30.0
LONGEST_PAUSE_PART: Final = 1 / 60
"""The longest pause between two tries, also as a part of the lease's time."""
SHORTEST_PAUSE_SECONDS: Final = 0.01
"""However short the lease is."""
TRY_PART: Final = 1 / 60
TRY_SECONDS_MIN: Final = 1.0
"""How long one try may take; at least this long, unless that is a third of the lease's time."""

Clock = Callable[[], float]
"""Seconds that only grow."""


def lasting_clock() -> float:
    """Seconds since some moment, those in which the machine slept included."""
    boot = getattr(time, "CLOCK_BOOTTIME", None)
    return time.monotonic() if boot is None else time.clock_gettime(boot)


@dataclass(slots=True)
class Renewals:
    """The renewals of one lease."""

    duration: float
    """Seconds that are asked for."""
    chance: Callable[[], float] = field(default=random.random)
    """Numbers from 0 to 1."""
    deadline: float = 0.0
    """When the lease may be over."""
    next_at: float = 0.0
    """When to renew, or to try again."""
    problem: Exception | None = None
    """Why the last try failed, None if it did not."""
    _failures: int = 0

    def succeeded(self, sent_at: float, remaining: float) -> None:
        """The lease has `remaining` seconds, counted from when it was asked for."""
        self.deadline = sent_at + remaining
        early = 1 - JITTER * self.chance()
        self.next_at = sent_at + max(remaining * RENEW_AT * early, SHORTEST_PAUSE_SECONDS)
        self.problem = None
        self._failures = 0

    def failed(self, now: float, problem: Exception) -> None:
        """A try failed; there is another one."""
        grown = FIRST_PAUSE_SECONDS * 2.0 ** min(self._failures, 16)
        longest = min(LONGEST_PAUSE_SECONDS, self.duration * LONGEST_PAUSE_PART)
        pause = min(grown, longest) * (1 - JITTER * self.chance())
        self.next_at = now + max(pause, SHORTEST_PAUSE_SECONDS)
        self.problem = problem
        self._failures += 1

    @property
    def try_seconds(self) -> float:
        """How long a try may take, so that there is time for another one."""
        return max(self.duration * TRY_PART, min(TRY_SECONDS_MIN, self.duration / 3))

    def pause(self, now: float) -> float:
        """Seconds until the next renewal or try."""
        return max(self.next_at - now, 0.0)

    def expired(self, now: float) -> bool:
        """Whether the lease may be over."""
        return now >= self.deadline
