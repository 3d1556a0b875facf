"""Rests of scans: a scan pauses while puts arrive, since writers are more urgent.

A scan costs a server a flush, so that the present state can be pinned, and then its pages. Both run
in processes and threads beside the writers and would keep a processor busy. So they work in
stretches (one page, or some rows of a flush) and rest after every stretch during which puts were
worked out. Without puts they never rest.

Puts that wait for the flush itself cause no rest: no put is worked out then, and the counter of
puts stands still.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Final, NamedTuple

YIELD_TO_PUTS: Final = 1.0
"""How long a scan rests after a stretch during which puts came, as a share of its duration.

Without rests, a scan that began together with a second of upserts cost a third of their rows on two
processors, nearly all of it by the flush that pins the state. A page takes some 50 ms and a stretch
of a flush 10 to 50 ms, so nobody waits long for a rest; a scan beside writers takes up to twice as
long."""

REST_SECONDS_MAX: Final = 0.5
"""The longest rest: closing a state, reading another one or a server stop waits for it."""


class Stretch(NamedTuple):
    """A piece of work between two rests."""

    began: float
    """When the work began, on the clock of `Rests`."""
    puts: int
    """The counter of puts at that time."""


class Rests:
    """Decides how long to rest, and rests. Any thread may call it."""

    def __init__(
        self,
        puts: Callable[[], int],
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        """`puts` returns a counter that changes whenever puts are worked out."""
        self._puts = puts
        self._clock = clock
        self._sleep = sleep

    def begin(self) -> Stretch:
        """Begin a stretch of work."""
        return Stretch(self._clock(), self._puts())

    def end(self, stretch: Stretch) -> float:
        """End a stretch of work; return until when to rest, for `wait_until`."""
        now = self._clock()
        if self._puts() == stretch.puts:
            return now
        return now + min(YIELD_TO_PUTS * (now - stretch.began), REST_SECONDS_MAX)

    def wait_until(self, when: float) -> None:
        """Rest until this time."""
        seconds = when - self._clock()
        if seconds > 0:
            self._sleep(seconds)

    def between(self, stretch: Stretch) -> Stretch:
        """End a stretch, rest, and begin the next one."""
        self.wait_until(self.end(stretch))
        return self.begin()


NO_PUTS: Final = Rests(lambda: 0)
"""Never rests: for work beside which nobody writes, or that must not wait."""
