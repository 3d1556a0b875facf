"""How late the event loop was: the delay of a timer that falls due ten times a second.

Nothing else of a server runs while one callback holds its event loop, so the delay of a timer is
what every client waited meanwhile. It includes the time that the loop waited for the processor and
for the lock of the interpreter. The timer sees the loop ten times a second and nothing in between:
a hold of half a second shows as at least 0.4 s, one below a tenth of a second shows shorter than it
was, or not at all. A long hold is never missed.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator
from typing import Final

from zufluss.obs import metrics
from zufluss.obs.metrics import Sample

PERIOD_SECONDS: Final = 0.1
"""How long the timer sleeps."""
WINDOW_SECONDS: Final = 60.0
"""A delay is shown for this time at least, and for twice as long at most."""


class LoopLag:
    """The longest delay of a timer in the last minute or two. Belongs to the event loop."""

    def __init__(
        self, loop: asyncio.AbstractEventLoop, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._loop = loop
        self._clock = clock
        self._timer: asyncio.TimerHandle | None = None
        self._due = 0.0
        self._window_end = clock() + WINDOW_SECONDS
        self._longest = 0.0
        self._longest_before = 0.0

    def begin(self) -> None:
        """Begin to measure, unless that has begun."""
        if self._timer is None:
            self.start()

    def start(self) -> None:
        """Set the timer."""
        self._due = self._clock() + PERIOD_SECONDS
        self._timer = self._loop.call_later(PERIOD_SECONDS, self._wake)

    def stop(self) -> None:
        """Measure no more."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def samples(self) -> Iterator[Sample]:
        """Returns the longest delay, that of a timer that is late just now included."""
        self._note()
        yield Sample(metrics.LOOP_LAG_SECONDS_MAX, max(self._longest, self._longest_before))

    def _wake(self) -> None:
        self._note()
        self.start()

    def _note(self) -> None:
        now = self._clock()
        if now >= self._window_end:
            self._longest_before, self._longest = self._longest, 0.0
            self._window_end = now + WINDOW_SECONDS
        if self._timer is not None:
            self._longest = max(self._longest, now - self._due)
