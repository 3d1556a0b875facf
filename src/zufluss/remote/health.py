"""Whether a location works, as one server sees it: pure, its clock is handed in.

| state | left for | when |
|---|---|---|
| ACTIVE | SUSPECT | a request fails |
| SUSPECT | DOWN | `down_after` requests failed in a row |
| ACTIVE, SUSPECT | DOWN | it does not carry the marker of this cluster (`marker.py`) |
| SUSPECT, DOWN | ACTIVE | three probes in a row were good, and the hold is over |

The hold begins when a location stops being ACTIVE. It doubles each time that happens soon after it
came back, up to five minutes: a location that works every other second is left alone instead of
moving files to and fro. Probes are an interval apart, and while they fail twice as far each time,
up to a minute.

Only the location's own failures count: no answer, a server's error, a demand for fewer requests.
That an object is missing or forbidden is an answer of a location that works. Reads count when they
fail, not when they succeed: a location that can be read and not written must not look well.

For adaptive weights each location has averages of its failures and of the time a file takes, with
the size taken into account; `factor` turns them into a share of the configured weight.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

from zufluss.remote.errors import NotOursError, RemoteStorageError
from zufluss.remote.locations import Health
from zufluss.wire import messages as m

GOOD_PROBES: Final = 3
"""Good probes in a row before a location is used again."""

PROBE_INTERVAL_MAX_MS: Final = 60_000
"""Probes of a location that stays away are at most this far apart."""

HOLD_MAX_MS: Final = 300_000
"""The longest hold of a location that comes and goes."""

FORGIVEN: Final = 10
"""A location that worked for so many of its holds starts anew with the shortest one."""

ALPHA: Final = 0.2
"""The weight of the newest request in the averages."""

FACTOR_MIN: Final = 0.05
"""What is left of the weight of the worst location: enough to notice that it got better."""

SLOWER: Final = 1.5
"""A location may be so many times slower than the best one before its weight falls."""

SAMPLES_MIN: Final = 5
"""Files before the time they took says something."""

PACE_BYTES: Final = 1024 * 1024
"""Beside a fixed time per file, each so many bytes count as much again."""


@dataclass(frozen=True, slots=True)
class LocationReport:
    """What one server saw of a location since it started."""

    location_id: int
    """The location."""
    health: Health
    """Whether it works."""
    placed_files: int
    """Files put there."""
    placed_bytes: int
    """Their bytes."""
    errors: int
    """Requests that it failed."""
    latency_ms: float
    """Moving average of what putting a file took, 0 before the first."""
    effective_weight: float
    """Its share of new files at present."""
    last_error: str | None = None
    """The newest failure."""

    def to_proto(self) -> m.PbLocationReport:
        """As it travels in a heartbeat."""
        return m.PbLocationReport(
            location_id=self.location_id,
            health=self.health,
            placed_files=self.placed_files,
            placed_bytes=self.placed_bytes,
            errors=self.errors,
            latency_ms=self.latency_ms,
            effective_weight=self.effective_weight,
            last_error=self.last_error,
        )

    @classmethod
    def from_proto(cls, message: m.PbLocationReport) -> LocationReport:
        """As it came."""
        return cls(
            message.location_id,
            Health(message.health),
            message.placed_files,
            message.placed_bytes,
            message.errors,
            message.latency_ms,
            message.effective_weight,
            message.last_error if message.HasField("last_error") else None,
        )


class LocationHealth:
    """The state of one location; times are in milliseconds of any clock that goes forward."""

    def __init__(self, *, down_after: int, probe_interval_ms: float) -> None:
        self.state = Health.ACTIVE
        self.errors = 0
        self.last_error: str | None = None
        self.latency_ms = 0.0
        self._down_after = down_after
        self._interval = probe_interval_ms
        self._failures = 0
        """Requests that failed in a row."""
        self._good = 0
        """Probes that were good in a row."""
        self._returns = 0
        """How often it came back only to fail again soon."""
        self._back_at: float | None = None
        self._held_until = 0.0
        self._next_probe = 0.0
        self._wait = probe_interval_ms
        self._error_rate = 0.0
        self._pace = 0.0
        self._samples = 0

    def succeeded(self, latency_ms: float, size: int = 0) -> None:
        """A file of `size` bytes was put there."""
        self._failures = 0
        self._error_rate *= 1 - ALPHA
        pace = latency_ms / (1 + size / PACE_BYTES)
        share = ALPHA if self._samples else 1.0
        self.latency_ms += share * (latency_ms - self.latency_ms)
        self._pace += share * (pace - self._pace)
        self._samples += 1

    def failed(self, error: RemoteStorageError, now: float) -> None:
        """The location failed a request; not to be called for missing or forbidden objects."""
        self.errors += 1
        self.last_error = error.message
        self._failures += 1
        self._good = 0
        self._error_rate += ALPHA * (1 - self._error_rate)
        if self.state is Health.ACTIVE:
            self._leave(now)
        if self._failures >= self._down_after or isinstance(error, NotOursError):
            self.state = Health.DOWN

    def probe_due(self, now: float) -> bool:
        """Whether it is time to see if the location works again."""
        return self.state is not Health.ACTIVE and now >= self._next_probe

    def probed(self, ok: bool, now: float) -> None:
        """A small object was written, read and deleted there, or that did not work."""
        if self.state is Health.ACTIVE:
            return
        longest = max(PROBE_INTERVAL_MAX_MS, self._interval)
        self._good = self._good + 1 if ok else 0
        self._wait = self._interval if ok else min(2 * self._wait, longest)
        self._next_probe = now + self._wait
        if ok:
            self._error_rate *= 1 - ALPHA
        if self._good >= GOOD_PROBES and now >= self._held_until:
            self.state = Health.ACTIVE
            self._failures = 0
            self._back_at = now

    @property
    def pace(self) -> float | None:
        """Milliseconds for a file, its size taken into account; None before it says something."""
        return self._pace if self._samples >= SAMPLES_MIN else None

    def factor(self, best_pace: float | None) -> float:
        """What is left of the configured weight beside a location with the best pace, 0.05 to 1."""
        pace = self.pace
        slow = 1.0
        if pace and best_pace is not None:
            slow = min(1.0, SLOWER * best_pace / pace)
        return max(FACTOR_MIN, slow * (1 - self._error_rate) ** 2)

    def _leave(self, now: float) -> None:
        """No longer ACTIVE: hold it back, the longer the sooner that is after its return."""
        hold = self._hold()
        soon = self._back_at is not None and now - self._back_at < FORGIVEN * hold
        self._returns = self._returns + 1 if soon else 0
        self._held_until = now + self._hold()
        self._wait = self._interval
        self._next_probe = now + self._interval
        self.state = Health.SUSPECT

    def _hold(self) -> float:
        longest = max(HOLD_MAX_MS, self._interval)
        return min(longest, self._interval * 2.0 ** min(self._returns, 64))


def best_pace(healths: Iterable[LocationHealth]) -> float | None:
    """The smallest pace of all that have one."""
    return min((x.pace for x in healths if x.pace is not None), default=None)
