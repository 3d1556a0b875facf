"""The time by which things are deleted for their age.

A wall clock that is set 400 days ahead for three seconds must not take log segments and partitions
with it. So expiry does not ask the wall clock but an `ExpiryClock`, which compares it with the
monotonic clock, suspended time included: the clock of a laptop that slept has not jumped. Leases
and producers need no such clock: their times are monotonic anyway.

A server remembers the time over its starts (`clock_file.py`). Other processes, such as a tiering
service, know only what happened since their start.
"""

from __future__ import annotations

from typing import Final

import structlog

from zufluss.clock import Clock, ClockMs, uptime_seconds, wall_ms

log = structlog.get_logger(__name__)

TOLERANCE_MS: Final = 60_000
"""A wall clock that differs from the monotonic clock by less was corrected; it did not jump."""
STEADY_SECONDS: Final = 3600.0
"""A wall clock that ran this long without another jump is trusted."""
AWAY_MS: Final = 3_600_000
"""A wall clock that is ahead by more, compared with the last time this server ran, is doubted."""


class ExpiryClock:
    """The wall time by which things may be deleted for their age; it never jumps ahead.

    It follows the wall clock as long as that advances with the monotonic clock. After a jump ahead
    it advances with the monotonic clock alone, so that nothing expires because of the jump, until
    the wall clock has been steady for `STEADY_SECONDS` or an operator confirms it. A jump back is
    followed at once: things then expire later. A start is compared with the last time that the
    server knew: whether the machine was switched off for a month or has a wrong date, nothing that
    was young then expires in the first hour.
    """

    __slots__ = ("_before", "_doubt", "_monotonic", "_offset", "_since", "_wall_ms")

    def __init__(
        self,
        last_ms: int | None = None,
        clock_ms: ClockMs = wall_ms,
        monotonic: Clock = uptime_seconds,
    ) -> None:
        """`last_ms` is the last time that the server knew, None on its first start."""
        self._wall_ms = clock_ms
        self._monotonic = monotonic
        self._doubt: int | None = None
        """The offset that is not believed yet."""
        self._since = 0.0
        """When `_doubt` was first seen."""
        offset = self._difference()
        away = 0 if last_ms is None else clock_ms() - last_ms
        self._offset = offset - away if away > AWAY_MS else offset
        """Wall time minus monotonic time, as far as it is believed."""
        self._before = self._offset
        """The offset that was believed before the last jump back."""
        if away > AWAY_MS:
            self._begin_doubt(offset)

    def now_ms(self) -> int:
        """The time by which things may have expired."""
        offset = self._difference()
        ahead = offset - self._offset
        if ahead > TOLERANCE_MS and abs(offset - self._before) > TOLERANCE_MS:
            if self._doubt is None or abs(offset - self._doubt) > TOLERANCE_MS:
                self._begin_doubt(offset)
            if self._monotonic() - self._since < STEADY_SECONDS:
                return int(self._monotonic() * 1000) + self._offset
            log.warning("clock_believed", reason="steady", ahead_ms=ahead)
        if ahead >= -TOLERANCE_MS:
            self._before = offset
        self._doubt, self._offset = None, offset
        return int(self._monotonic() * 1000) + offset

    @property
    def doubted_ms(self) -> int:
        """How far the wall clock is ahead of what is believed; 0 if it is believed."""
        self.now_ms()
        return 0 if self._doubt is None else self._doubt - self._offset

    def confirm(self) -> None:
        """Believe the wall clock as it is now."""
        if ahead := self.doubted_ms:
            log.warning("clock_believed", reason="confirmed by an operator", ahead_ms=ahead)
            self._doubt, self._offset = None, self._difference()
            self._before = self._offset

    def _difference(self) -> int:
        return self._wall_ms() - int(self._monotonic() * 1000)

    def _begin_doubt(self, offset: int) -> None:
        self._doubt, self._since = offset, self._monotonic()
        log.error(
            "clock_jumped",
            ahead_ms=offset - self._offset,
            consequence="nothing expires for an hour, on a server also until "
            "`zufluss doctor --confirm-clock`",
        )

    def __repr__(self) -> str:
        return f"ExpiryClock({self.now_ms()} ms, doubted {self.doubted_ms} ms)"
