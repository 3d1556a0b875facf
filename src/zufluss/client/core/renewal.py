"""When to renew a lease, and when it may have expired: arithmetic over a clock, no I/O.

| moment | counted from |
|---|---|
| end of the lease | the sending of the last successful renewal, never its answer |
| next renewal | the same moment, plus a little less than a third of the duration |
| next try after a failure | the failure; pauses grow up to a fraction of the duration |

So the client considers a lease expired before the server does, whatever the network delays. A
server may be unreachable for two thirds of the duration, and is still asked in time. The same holds
for a server that hangs, if the lease lasts a minute or more. Tries continue after the end: a
coordinator that was away extends every lease when it returns, and only its answer tells.

The clock of its callers, `clock.uptime_seconds`, counts while the machine sleeps.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final

RENEW_AT: Final = 0.3
"""A lease is renewed at the latest after this fraction of its duration."""
JITTER: Final = 0.1
"""Renewals are up to this fraction earlier, so that clients do not renew together."""
FIRST_PAUSE_SECONDS: Final = 0.05
"""The pause before the second try; each pause is twice the one before."""
LONGEST_PAUSE_SECONDS: Final = 30.0
LONGEST_PAUSE_PART: Final = 1 / 60
"""The longest pause between two tries, in seconds and as a fraction of the duration."""
SHORTEST_PAUSE_SECONDS: Final = 0.01
"""The shortest pause, however short the lease is."""
TRY_PART: Final = 1 / 60
TRY_SECONDS_MIN: Final = 1.0
"""Limit for one try, as a fraction of the duration; never below a second or a third of it."""

Clock = Callable[[], float]
"""Seconds that only grow."""


@dataclass(slots=True)
class Renewals:
    """The renewals of one lease."""

    duration: float
    """The requested duration, in seconds."""
    chance: Callable[[], float] = field(default=random.random)
    """Returns random numbers from 0 to 1."""
    deadline: float = 0.0
    """The clock's time from which on the lease may have expired."""
    next_at: float = 0.0
    """The clock's time of the next renewal or try."""
    problem: Exception | None = None
    """The error of the last try; None if it succeeded."""
    _failures: int = 0

    def succeeded(self, sent_at: float, remaining: float) -> None:
        """Note a renewal: the lease lasts `remaining` seconds from `sent_at` on."""
        self.deadline = sent_at + remaining
        early = 1 - JITTER * self.chance()
        self.next_at = sent_at + max(remaining * RENEW_AT * early, SHORTEST_PAUSE_SECONDS)
        self.problem = None
        self._failures = 0

    def failed(self, now: float, problem: Exception) -> None:
        """Note a failed try and schedule the next one."""
        grown = FIRST_PAUSE_SECONDS * 2.0 ** min(self._failures, 16)
        longest = min(LONGEST_PAUSE_SECONDS, self.duration * LONGEST_PAUSE_PART)
        pause = min(grown, longest) * (1 - JITTER * self.chance())
        self.next_at = now + max(pause, SHORTEST_PAUSE_SECONDS)
        self.problem = problem
        self._failures += 1

    @property
    def try_seconds(self) -> float:
        """Limit for one try that leaves time for another."""
        return max(self.duration * TRY_PART, min(TRY_SECONDS_MIN, self.duration / 3))

    def pause(self, now: float) -> float:
        """Seconds until the next renewal or try."""
        return max(self.next_at - now, 0.0)

    def expired(self, now: float) -> bool:
        """Whether the lease may have expired."""
        return now >= self.deadline
