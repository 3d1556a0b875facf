"""The health of locations, as one server sees it.

| state | left for | when |
|---|---|---|
| ACTIVE | SUSPECT | a request fails |
| SUSPECT | DOWN | `down_after` requests failed in a row |
| ACTIVE, SUSPECT | DOWN | the location lacks the marker of this cluster (`marker.py`) |
| SUSPECT, DOWN | ACTIVE | three probes in a row succeeded, and the hold is over |

The hold begins when a location stops being ACTIVE. It doubles each time this happens soon after a
return, up to five minutes: a location that works every other second is not used, instead of moving
files to and fro. Probes are one interval apart; after each failed probe the distance doubles, up to
a minute.

Only failures of the location count: no answer, a server error, a demand for fewer requests. A
missing or forbidden object is an answer of a location that works. Reads count when they fail, not
when they succeed: a location that can be read but not written must not look healthy.

For adaptive weights each location has averages of its failures and of the time per file, adjusted
for size; `factor` turns them into a share of the configured weight.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Final

import structlog

from zufluss.config import Configuration
from zufluss.config import options as o
from zufluss.remote.errors import LocationUnavailableError, NotOursError, RemoteStorageError
from zufluss.remote.locations import Health
from zufluss.wire import messages as m

log = structlog.get_logger("zufluss.remote")

GOOD_PROBES: Final = 3
"""Probes that must succeed in a row before a location is used again."""

PROBE_INTERVAL_MAX_MS: Final = 60_000
"""The longest time between two probes."""

HOLD_MAX_MS: Final = 300_000
"""The longest hold of a location that fails again and again."""

FORGIVEN: Final = 10
"""A location that worked for this many times its hold starts again with the shortest one."""

ALPHA: Final = 0.2
"""The weight of the newest request in the averages."""

FACTOR_MIN: Final = 0.05
"""The smallest factor of a weight: large enough to notice that a location got better."""

SLOWER: Final = 1.5
"""How many times slower than the best location one may be before its weight falls."""

SAMPLES_MIN: Final = 5
"""Files that must be measured before their time counts."""

PACE_BYTES: Final = 1024 * 1024
"""Bytes that count as much time as a file without content."""


@dataclass(frozen=True, slots=True)
class HealthReport:
    """What one server saw of a location since the server started."""

    location_id: int
    """Id of the location."""
    health: Health
    """State of the location."""
    placed_files: int
    """Files uploaded."""
    placed_bytes: int
    """Bytes uploaded."""
    errors: int
    """Failed requests."""
    latency_ms: float
    """Moving average of the time of an upload, 0 before the first."""
    effective_weight: float
    """Present weight for new files."""
    last_error: str | None = None
    """Message of the newest failure."""

    def to_proto(self) -> m.PbLocationReport:
        """Return the message for a heartbeat."""
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
    def from_proto(cls, message: m.PbLocationReport) -> HealthReport:
        """Return the report of a message."""
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
    """The state of one location; times are in milliseconds of a monotonic clock."""

    def __init__(self, *, down_after: int, probe_interval_ms: float) -> None:
        self.state = Health.ACTIVE
        self.errors = 0
        self.last_error: str | None = None
        self.latency_ms = 0.0
        self._down_after = down_after
        self._interval = probe_interval_ms
        self._failures = 0
        """Failed requests in a row."""
        self._good = 0
        """Successful probes in a row."""
        self._returns = 0
        """How often the location failed again soon after its return."""
        self._back_at: float | None = None
        self._held_until = 0.0
        self._next_probe = 0.0
        self._wait = probe_interval_ms
        self._error_rate = 0.0
        self._pace = 0.0
        self._samples = 0

    def succeeded(self, latency_ms: float, size: int = 0) -> None:
        """Count an upload of `size` bytes."""
        self._failures = 0
        self._error_rate *= 1 - ALPHA
        pace = latency_ms / (1 + size / PACE_BYTES)
        share = ALPHA if self._samples else 1.0
        self.latency_ms += share * (latency_ms - self.latency_ms)
        self._pace += share * (pace - self._pace)
        self._samples += 1

    def failed(self, error: RemoteStorageError, now: float) -> None:
        """Count a failed request; not for missing or forbidden objects."""
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
        """Whether it is time for a probe."""
        return self.state is not Health.ACTIVE and now >= self._next_probe

    def probed(self, ok: bool, now: float) -> None:
        """Count a probe, which wrote, read and deleted a small object, or failed."""
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
        """Milliseconds per file, adjusted for size; None before enough files were measured."""
        return self._pace if self._samples >= SAMPLES_MIN else None

    def factor(self, best_pace: float | None) -> float:
        """Return the factor of the configured weight, 0.05 to 1, beside the best pace."""
        pace = self.pace
        slow = 1.0
        if pace and best_pace is not None:
            slow = min(1.0, SLOWER * best_pace / pace)
        return max(FACTOR_MIN, slow * (1 - self._error_rate) ** 2)

    def _leave(self, now: float) -> None:
        """Become SUSPECT and begin a hold, which is longer soon after a return."""
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


class LocationHealths:
    """The health of all locations, by id; a location without failures is ACTIVE."""

    def __init__(self, conf: Configuration, clock: Callable[[], float]) -> None:
        """`clock` returns monotonic seconds."""
        self._conf = conf
        self._clock = clock
        self._healths: dict[int, LocationHealth] = {}

    def of(self, location_id: int) -> LocationHealth:
        """Return the health of a location."""
        health = self._healths.get(location_id)
        if health is None:
            health = self._healths[location_id] = LocationHealth(
                down_after=self._conf[o.ZUFLUSS_REMOTE_DOWN_AFTER],
                probe_interval_ms=self._conf[o.ZUFLUSS_REMOTE_PROBE_INTERVAL],
            )
        return health

    def forget(self, location_id: int) -> None:
        """Start again as ACTIVE: the location has another address."""
        self._healths.pop(location_id, None)

    def failed(self, location_id: int, error: LocationUnavailableError) -> None:
        """Count a failure of a location."""
        health = self.of(location_id)
        before = health.state
        health.failed(error, self._now_ms())
        _log_change(location_id, before, health.state, error.message)

    def probed(self, location_id: int, ok: bool) -> None:
        """Count a probe of a location."""
        health = self.of(location_id)
        before = health.state
        health.probed(ok, self._now_ms())
        _log_change(location_id, before, health.state, None)

    def probe_due(self, location_id: int) -> bool:
        """Whether it is time for a probe of a location."""
        return self.of(location_id).probe_due(self._now_ms())

    @contextmanager
    def observed(self, location_id: int) -> Iterator[None]:
        """Count a failure of the location within the block, and raise it again."""
        try:
            yield
        except LocationUnavailableError as error:
            self.failed(location_id, error)
            raise

    def _now_ms(self) -> float:
        return 1000 * self._clock()


def _log_change(location_id: int, before: Health, after: Health, reason: str | None) -> None:
    if after is not before:
        log.warning("location_health", location=location_id, state=after.name, error=reason)


def best_pace(healths: Iterable[LocationHealth]) -> float | None:
    """Return the smallest pace, None if no location has one."""
    return min((x.pace for x in healths if x.pace is not None), default=None)
