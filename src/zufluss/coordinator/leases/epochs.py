"""The epochs of leases: no two leases of one id have the same, not even one after the other.

Nothing durable is left of a lease that ended. Its id may come back, and so may a reader that slept
through the end: were the epochs the same, it would go on with snapshots that are not its own, and
drop the lease of somebody else. So a new lease begins above what one of its id had before:

| its id | begins above |
|---|---|
| had a lease that ended lately | the last epoch of that one |
| any other | what was reserved when this coordinator started, and what was forgotten since |

Every epoch that is given was reserved in the store before, many at a time. A start begins above all
that were.
"""

from __future__ import annotations

from collections import OrderedDict

from zufluss.coordinator.leases.rules import Lease
from zufluss.coordinator.ledger import Ledger
from zufluss.coordinator.records import LEASE_EPOCH_COUNTER

EPOCHS_AT_ONCE = 1_000
"""Epochs that are reserved in one transaction."""
ENDED_KNOWN_MAX = 10_000
"""Leases that ended whose epochs are remembered."""


class Epochs:
    """What new leases and takeovers get. Open it before."""

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger
        self._ended: OrderedDict[str, int] = OrderedDict()
        self._above = self._reserved = 0

    async def open(self) -> None:
        """Begin above everything that was given before."""
        given = await self._ledger.take(LEASE_EPOCH_COUNTER, EPOCHS_AT_ONCE)
        self._above, self._reserved = given.start, given.stop

    async def of_new(self, lease_id: str) -> int:
        """The epoch of a new lease."""
        return await self._after(max(self._above, self._ended.get(lease_id, 0)))

    async def of_takeover(self, lease: Lease) -> int:
        """The next epoch of a lease."""
        return await self._after(lease.epoch)

    async def _after(self, epoch: int) -> int:
        while epoch >= self._reserved:
            given = await self._ledger.take(LEASE_EPOCH_COUNTER, EPOCHS_AT_ONCE)
            self._reserved = max(self._reserved, given.stop)
        return epoch + 1

    def ended(self, lease: Lease) -> None:
        """A lease is gone, maybe one whose epoch cannot be read."""
        self._ended[lease.lease_id] = lease.epoch if lease.owner_known else self._reserved
        self._ended.move_to_end(lease.lease_id)
        while len(self._ended) > ENDED_KNOWN_MAX:
            _, forgotten = self._ended.popitem(last=False)
            self._above = max(self._above, forgotten)

    def __repr__(self) -> str:
        return f"Epochs(above={self._above}, reserved={self._reserved})"
