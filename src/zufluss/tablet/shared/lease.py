"""How long this server may answer for the present state of its buckets.

A server that was paused does not know that another one leads its buckets by now. It cannot
acknowledge anything, since its session was sealed, and what it reads from its logs is true, if old.
But a lookup of an old row would be wrong: the new leader may have acknowledged another one. So a
server answers lookups, scans, LIST_OFFSETS and TAKE_KV_SNAPSHOT only for as long as its
registration was confirmed, and a new leader of a primary-key bucket acknowledges nothing before
that time is over for the former one (`ReplicaAssignment.lease_ms`).

Of a log table nobody waits for that time. What a former leader says of its end is old then, but
true: the new leader has these rows at these offsets, and more behind them. That is what a reader
sees who asked a moment earlier, and who goes on from there.

A registration is confirmed before the buckets of the former one are closed, so the lease is held
only from `begin` on. The time counts from when the confirmation was *asked for*, on a clock that
goes on while the machine is suspended. What is assumed of two machines is that their clocks run at
the same rate.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from zufluss.clock import uptime_seconds
from zufluss.errors import NotLeaderError

SILENT_SECONDS_MAX: Final = 15 * 24 * 3600.0
"""A session that was not confirmed for so long acknowledges nothing any more: the seal that may
have ended it is deleted after twice this time."""


class LookupLease:
    """The time until which this server may answer lookups."""

    def __init__(self, seconds: float, clock: Callable[[], float] = uptime_seconds) -> None:
        self.clock = clock
        self.seconds = seconds
        """How long a confirmation holds: what the coordinator says when the server registers."""
        self._confirmed = -float("inf")
        self._held = False

    def begin(self) -> None:
        """From now on a confirmation counts: no bucket of a former session is open."""
        self._held = True

    def confirmed(self, asked: float) -> None:
        """The coordinator confirmed a registration; `asked` is the time before it was asked."""
        self._confirmed = max(self._confirmed, asked)

    def end(self) -> None:
        """Answer nothing more before the next session begins."""
        self._held = False

    @property
    def silent_seconds(self) -> float:
        """Seconds since the registration was confirmed last."""
        return self.clock() - self._confirmed

    def check(self) -> None:
        """Raise `NotLeaderError` unless this server may answer for the present."""
        if not self._held:
            raise NotLeaderError(
                "this tablet server has no session of the shared log at present, so another server "
                "may lead the bucket by now; refresh the metadata and try again"
            )
        if self.silent_seconds > self.seconds:
            raise NotLeaderError(
                "this tablet server has had no word from the coordinator for "
                f"{self.seconds:g} s, so another server may lead the bucket by now; refresh the "
                "metadata and try again"
            )
