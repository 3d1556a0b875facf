"""The time by which things are deleted for their age, and how a server remembers it.

A wall clock that is set 400 days ahead for three seconds must not take log segments and partitions
with it. So expiry does not ask the wall clock but an `ExpiryClock`, which compares it with the
monotonic clock, suspended time included: the clock of a laptop that slept has not jumped. Leases
and producers need no such clock: their times are monotonic anyway.

The file `clock` in the data directory has the last believed time, in epoch milliseconds as text. It
is written every minute and at a stop; without it, nothing would tell a start with a wrong date from
a start after a holiday.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Final

import structlog

from zufluss.clock import Clock, ClockMs, uptime_seconds, wall_ms
from zufluss.log.files import Files
from zufluss.periodic import repeat

log = structlog.get_logger(__name__)

TOLERANCE_MS: Final = 60_000
"""A wall clock that differs from the monotonic clock by less was corrected; it did not jump."""
STEADY_SECONDS: Final = 3600.0
"""A wall clock that ran this long without another jump is trusted."""
AWAY_MS: Final = 3_600_000
"""A wall clock that is ahead by more, compared with the last time this server ran, is doubted."""
REMEMBER_SECONDS: Final = 60.0
"""How often the time is written to the disk."""
CLOCK_FILE: Final = "clock"
COORDINATOR_CLOCK_FILE: Final = "coordinator-clock"


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
            consequence="nothing expires for an hour, or until `zufluss doctor --confirm-clock`",
        )

    def __repr__(self) -> str:
        return f"ExpiryClock({self.now_ms()} ms, doubted {self.doubted_ms} ms)"


@asynccontextmanager
async def expiry_clock(
    data_dir: Path, files: Files, name: str = CLOCK_FILE
) -> AsyncIterator[ExpiryClock]:
    """The expiry clock of a server, which goes on from the last time that the directory knows.

    `name` is the file of a coordinator that shares its directory with a tablet server. At first it
    goes on from the time of the process that had both roles.
    """
    known = last_known(data_dir, name)
    clock = ExpiryClock(last_known(data_dir) if known is None else known)
    remember(data_dir, files, clock, name)
    again = partial(remember, data_dir, files, clock, name)
    work = repeat(REMEMBER_SECONDS, again, "clock_not_remembered")
    task = asyncio.create_task(work, name="expiry-clock")
    try:
        yield clock
    finally:
        task.cancel()
        remember(data_dir, files, clock, name)


def last_known(data_dir: Path, name: str = CLOCK_FILE) -> int | None:
    """The last time that a server in this directory knew, None if there is none."""
    try:
        return int((data_dir / name).read_text())
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as e:
        log.warning("clock_file_unreadable", reason=str(e))
        return None


def remember(data_dir: Path, files: Files, clock: ExpiryClock, name: str = CLOCK_FILE) -> None:
    """Write the believed time; if that fails, the next start knows an older time."""
    target = data_dir / name
    try:
        files.put(target.with_suffix(".new"), str(clock.now_ms()).encode())
        files.rename(target.with_suffix(".new"), target)
    except OSError as e:
        log.warning("clock_not_remembered", reason=str(e))
