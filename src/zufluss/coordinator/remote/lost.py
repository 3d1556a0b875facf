"""Forced retirement: takes a destroyed location out of everything that refers to its files.

An operator declares a location lost (ALTER_LOCATION, RETIRE with `force`). That is durable in the
registry, so after a crash the next start goes on. The steps can be repeated in any order:

| who | what |
|---|---|
| tablet servers, in their rounds | remove lost segments from manifests; what they still have is copied again (`tablet/remote/rounds.py`) |
| tablet servers | take new key-value snapshots, since the last ones are in a location that is not active |
| here | leases of lost snapshots are revoked with the reason, durably, before anything else |
| here | lost snapshots are removed from the records of their buckets |
| here | offsets files of lakes are written anew, from memory (`lake/tables.py`) |
| here | sessions of the shared log end with a loss as their servers register again; buckets that need them are refused (`wal/keeper.py`) |
| here | when nothing refers to the location any more, it is retired |

Nobody reads or lists a lost location: the cleaner and the sweep leave it out.
"""  # noqa: E501 - a table row does not wrap

from __future__ import annotations

from collections.abc import Awaitable, Callable
from functools import partial
from typing import Protocol, TypeVar

import structlog

from zufluss.coordinator.leases.calls import LeaseCalls
from zufluss.coordinator.remote.held_drops import HeldDrops
from zufluss.coordinator.remote.kv_snapshots import KvSnapshots
from zufluss.coordinator.remote.locations import LocationRegistry
from zufluss.coordinator.worklist import WorkList
from zufluss.errors import ErrorCode, error
from zufluss.remote.locations import AdminState, AlterOp

log = structlog.get_logger(__name__)

T = TypeVar("T")


class Exclusive(Protocol):
    """`Catalog.exclusive`: runs work that must not overlap with a change of the catalog."""

    async def __call__(self, work: Callable[[], Awaitable[T]]) -> T:
        """Run the work, and return its result."""


class LostLocations:
    """Removes the references to destroyed locations, until they can be retired."""

    def __init__(
        self,
        registry: LocationRegistry,
        snapshots: KvSnapshots,
        leases: LeaseCalls,
        held: HeldDrops,
        leave_lakes: Callable[[int], Awaitable[None]],
        exclusive: Exclusive,
        reach: Callable[[str], None],
    ) -> None:
        """`leave_lakes` is `LakeTables.leave`."""
        self.work = WorkList("lost_location", self._leave, workers=1)
        """Ids of lost locations that something refers to."""
        self._registry = registry
        self._snapshots = snapshots
        self._leases = leases
        self._held = held
        self._leave_lakes = leave_lakes
        self._exclusive = exclusive
        self._reach = reach

    def start(self) -> None:
        """Go on with the lost locations of before."""
        for location_id in self._registry.locations.lost:
            self.begin(location_id)
        self.work.start()

    async def stop(self) -> None:
        """Stop; the next start goes on."""
        await self.work.stop()

    def begin(self, location_id: int) -> None:
        """Remove the references to a location that was declared lost; again, if it waits."""
        self.work.add(location_id)

    async def _leave(self, location_id: int) -> None:
        location = self._registry.locations.get(location_id)
        if location.state is not AdminState.LOST:
            return
        lost = await self._snapshots.lost(location_id)
        self._reach("lost-revoke")
        await self._leases.revoke_lost(location_id, lost, str(location))
        self._reach("lost-forget")
        await self._snapshots.forget_lost(location_id, lost)
        self._held.leave(location_id)
        self._reach("lost-lake")
        await self._leave_lakes(location_id)
        files = self._registry.live_files().get(location_id, 0)
        if files:
            raise error(
                ErrorCode.STORAGE_EXCEPTION,
                f"{files} files of {location}, which was lost, are still referred to; tablet "
                "servers remove them from their manifests; sessions of the shared log count until "
                "the tables whose last rows were there are dropped",
            )
        self._reach("lost-retire")
        await self._exclusive(
            partial(self._registry.alter, AlterOp.RETIRE, location_id=location_id)
        )
        log.info("lost_location_retired", location=str(location))

    def __repr__(self) -> str:
        return f"LostLocations({self.work!r})"
