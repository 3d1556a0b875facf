"""Sweeps that an operator asks for: one at a time, in the background; clients ask for the result.

A sweep lists whole locations, which may take longer than a request. So the first request begins
it and gets its id; the client asks again with that id until it is finished. The result of the last
sweep is kept for a client whose answer was lost.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from zufluss.coordinator.remote.locations import LocationRegistry
from zufluss.coordinator.remote.sweep import Sweep, SweepResult
from zufluss.errors import ConfigError
from zufluss.wire import messages as m

if TYPE_CHECKING:
    from zufluss.net.services import RequestContext

WAIT_SECONDS: Final = 2.0
"""How long a request waits for the end of its sweep."""
SHOWN_MAX: Final = 1000
"""Files and failures in an answer at most."""


@dataclass(frozen=True, slots=True)
class _StartedSweep:
    sweep_id: int
    task: asyncio.Task[SweepResult]


class SweepService:
    """The handler of SWEEP_LOCATIONS."""

    def __init__(self, sweep: Sweep, registry: LocationRegistry) -> None:
        self._sweep = sweep
        self._registry = registry
        self._last: _StartedSweep | None = None

    async def sweep_locations(
        self, request: m.SweepLocationsRequest, ctx: RequestContext
    ) -> m.SweepLocationsResponse:
        """SWEEP_LOCATIONS (30014)."""
        started = self._started(request) if request.HasField("sweep_id") else self._start(request)
        await asyncio.wait([started.task], timeout=WAIT_SECONDS)
        if not started.task.done():
            return m.SweepLocationsResponse(
                sweep_id=started.sweep_id, finished=False, files=0, bytes=0
            )
        result = started.task.result()
        return m.SweepLocationsResponse(
            sweep_id=started.sweep_id,
            finished=True,
            files=len(result.garbage),
            bytes=sum(each.file.size for each in result.garbage),
            garbage=[
                m.PbGarbage(
                    location_id=each.file.location_id,
                    path=each.file.path,
                    size=each.file.size,
                    modified_ms=each.modified_ms,
                    reason=each.reason,
                )
                for each in result.garbage[:SHOWN_MAX]
            ],
            failures=result.failures[:SHOWN_MAX],
        )

    def _start(self, request: m.SweepLocationsRequest) -> _StartedSweep:
        ids: list[int] | None = None
        if request.HasField("location_id"):
            ids = [self._registry.get(request.location_id).location_id]
        last = self._last
        if last is not None and not last.task.done():
            raise ConfigError(f"sweep {last.sweep_id} is under way; try again when it is over")
        work = self._sweep.sweep(ids, delete=not request.dry_run)
        task = asyncio.get_running_loop().create_task(work, name="location-sweep")
        self._last = _StartedSweep(1 if last is None else last.sweep_id + 1, task)
        return self._last

    def _started(self, request: m.SweepLocationsRequest) -> _StartedSweep:
        if self._last is None or self._last.sweep_id != request.sweep_id:
            raise ConfigError(
                f"sweep {request.sweep_id} is not known, because the coordinator was restarted or "
                "another sweep began; begin again"
            )
        return self._last

    async def stop(self) -> None:
        """End a sweep that is under way."""
        if self._last is not None:
            self._last.task.cancel()
            await asyncio.wait([self._last.task])
