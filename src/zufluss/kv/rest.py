"""Rests of scans: work that nobody waits for as urgently as writers wait for theirs.

A scan costs a server two things: the flush of what was written since the last one, so that there is
a state to be pinned, and then the pages. Both go on in processes and threads beside the writers,
and keep a processor busy if they can. So they work in stretches, a page or some rows of a flush,
and rest after each during which puts were worked out. Where none come they do not rest at all.

What only waits for a flush does not make it rest: then no put is worked out, and the counter of the
puts stands still.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Final, NamedTuple

YIELD_TO_PUTS: Final = 1.0
"""A scan rests for this share of the time of a stretch of its work during which puts came.

Without rests a second of upserts had a third of its rows less when a scan began with it, on two
processors: nearly all of that went to the flush that pins the state, not to pages. A page takes
some 50 ms and a stretch of a flush 10 to 50, so nobody waits long for a rest; what a scan does
beside writers takes up to twice as long."""

REST_SECONDS_MAX: Final = 0.5
"""The longest rest: who closes a state, reads another one or stops the server waits for it."""


class Stretch(NamedTuple):
    """A piece of work that was begun."""

    began: float
    """When."""
    puts: int
    """How far the puts were."""


class Rests:
    """Tells how long to rest, and rests. Any thread may call it."""

    def __init__(
        self,
        puts: Callable[[], int],
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        """`puts` is a number that changes whenever puts are worked out."""
        self._puts = puts
        self._clock = clock
        self._sleep = sleep

    def begin(self) -> Stretch:
        """A stretch of work begins."""
        return Stretch(self._clock(), self._puts())

    def end(self, stretch: Stretch) -> float:
        """A stretch of work has ended; until when to rest, on the clock of `wait_until`."""
        now = self._clock()
        if self._puts() == stretch.puts:
            return now
        return now + min(YIELD_TO_PUTS * (now - stretch.began), REST_SECONDS_MAX)

    def wait_until(self, when: float) -> None:
        """Rest."""
        seconds = when - self._clock()
        if seconds > 0:
            self._sleep(seconds)

    def between(self, stretch: Stretch) -> Stretch:
        """A stretch has ended; rest, and begin the next one."""
        self.wait_until(self.end(stretch))
        return self.begin()


NO_PUTS: Final = Rests(lambda: 0)
"""Of work beside which nobody writes, or that has to go on all the same: it never rests."""
