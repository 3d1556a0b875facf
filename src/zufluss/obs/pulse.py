"""Whether a server lives and is ready: noted by its event loop, read by the HTTP endpoint.

Everything a server knows belongs to its event loop. Once a second the loop notes whether the server
is ready; the threads of the endpoint read the last note and wait for nothing, so a server under
load answers its probes at once and does not fall out of service for being busy. A loop that has not
noted anything for `STUCK_SECONDS` is stuck: the server is neither alive nor ready then. While a
server starts or stops, its loop may take longer (`STUCK_SECONDS_APART`).

| state | alive | ready | when |
|---|---|---|---|
| starting | yes | no | the metadata and the catalog are being opened |
| recovering | yes | no | the buckets are being opened: how many of how many |
| ready | yes | yes | requests are accepted; buckets that do not work are warnings |
| unready | yes | no | the metadata store or the coordinator does not answer |
| stopping | yes | no | a signal came: requests under way are answered, logs are closed |
| stuck | no | no | the event loop does not run |

A bucket that does not work is no reason to take a server out of service: all other buckets would be
lost with it.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Final

from zufluss.obs.endpoint import ProbeAnswer

PERIOD_SECONDS: Final = 1.0
"""How often the loop notes the state."""
STUCK_SECONDS: Final = 10.0
"""The loop of a server that serves and has noted nothing for so long does not run."""
STUCK_SECONDS_APART: Final = 600.0
"""The same while a server starts or stops: it opens and closes large files in one go then."""
WARNINGS_MAX: Final = 10
"""Most warnings in an answer."""
STARTING, RECOVERING, READY, UNREADY, STOPPING, STUCK, ALIVE = (
    "starting", "recovering", "ready", "unready", "stopping", "stuck", "alive",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class PartState:
    """The state of one part of a server."""

    status: str = READY
    """`ready`, `recovering` or `unready`."""
    reasons: tuple[str, ...] = ()
    """Why the server is not ready because of this part."""
    warnings: tuple[str, ...] = ()
    """What does not work in this part, although the server is ready."""
    numbers: dict[str, float] = field(default_factory=dict)
    """Numbers to show, by name."""


ReadPart = Callable[[], PartState]
"""Reads the state of a part, on the event loop."""


class Pulse:
    """The notes of an event loop about its server. The loop writes, any thread reads."""

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        stopping: Callable[[], bool],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._loop = loop
        self._stopping = stopping
        self._clock = clock
        self._parts: list[ReadPart] = []
        self._accepting = False
        self._timer: asyncio.TimerHandle | None = None
        self._noted_at = clock()
        self._note = ProbeAnswer(False, STARTING, ("the server starts",))

    def watch(self, part: ReadPart) -> None:
        """Include a part of the server from now on."""
        self._parts.append(part)

    def accepting(self) -> None:
        """Note that the server accepts requests."""
        self._accepting = True
        self.note()

    @property
    def accepts(self) -> bool:
        """Whether the server accepts requests."""
        return self._accepting

    def start(self) -> None:
        """Note the state now and every second."""
        self._timer = self._loop.call_later(PERIOD_SECONDS, self.start)
        self.note()

    def stop(self) -> None:
        """Note nothing more."""
        if self._timer is not None:
            self._timer.cancel()

    def note(self) -> None:
        """Note the present state."""
        self._note = self._state()
        self._noted_at = self._clock()

    def health(self) -> ProbeAnswer:
        """Whether the event loop runs; for any thread."""
        silent = self._clock() - self._noted_at
        serves = self._accepting and not self._stopping()
        if silent < (STUCK_SECONDS if serves else STUCK_SECONDS_APART):
            return ProbeAnswer(True, ALIVE)
        return ProbeAnswer(False, STUCK, (f"the event loop has not run for {silent:.0f} s",))

    def ready(self) -> ProbeAnswer:
        """Whether the server should get requests; for any thread."""
        health = self.health()
        return self._note if health.ok else health

    def _state(self) -> ProbeAnswer:
        parts = [part() for part in self._parts]
        warnings = tuple(text for part in parts for text in part.warnings)
        more = len(warnings) - WARNINGS_MAX
        if more > 0:
            warnings = (*warnings[:WARNINGS_MAX], f"and {more} more")
        numbers = {name: value for part in parts for name, value in part.numbers.items()}
        status, reasons = self._status(parts)
        return ProbeAnswer(status == READY, status, reasons, warnings, numbers)

    def _status(self, parts: Iterable[PartState]) -> tuple[str, tuple[str, ...]]:
        if self._stopping():
            return STOPPING, ("the server stops",)
        bad = [part for part in parts if part.status != READY]
        if bad:
            return bad[0].status, tuple(text for part in bad for text in part.reasons)
        if not self._accepting:
            return STARTING, ("the server starts",)
        return READY, ()
