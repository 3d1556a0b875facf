"""The epochs of leases: no two leases of one id ever have the same epoch.

The store keeps nothing of a lease that ended. Its id may be used again, and a reader that slept
through the end may come back: with an equal epoch it would read snapshots that are not its own, and
drop the lease of somebody else. So the epoch of a new lease is above all earlier ones of its id:

| id of the new lease | its epoch is above |
|---|---|
| had a lease that ended lately | the last epoch of that lease |
| any other | the epochs reserved before this coordinator started, and those forgotten since |

Epochs are reserved in the store before they are used, many at a time.
"""

from __future__ import annotations

from collections import OrderedDict

from zufluss.coordinator.leases.rules import Lease
from zufluss.coordinator.ledger import Ledger
from zufluss.coordinator.records import LEASE_EPOCH_COUNTER

EPOCHS_AT_ONCE = 1_000
"""Epochs that are reserved in one transaction."""
ENDED_KNOWN_MAX = 10_000
"""Ended leases whose last epochs are remembered."""


class Epochs:
    """The epochs of new leases and takeovers. Open it with `Epochs.open`."""

    def __init__(self, ledger: Ledger, reserved: range) -> None:
        self._ledger = ledger
        self._ended: OrderedDict[str, int] = OrderedDict()
        self._above, self._reserved = reserved.start, reserved.stop

    @classmethod
    async def open(cls, ledger: Ledger) -> Epochs:
        """Reserve epochs above all that were reserved before."""
        return cls(ledger, await ledger.take(LEASE_EPOCH_COUNTER, EPOCHS_AT_ONCE))

    async def of_new(self, lease_id: str) -> int:
        """The epoch of a new lease."""
        return await self._after(max(self._above, self._ended.get(lease_id, 0)))

    async def of_takeover(self, lease: Lease) -> int:
        """The next epoch of a lease."""
        return await self._after(lease.epoch)

    async def _after(self, epoch: int) -> int:
        while epoch >= self._reserved:
            more = await self._ledger.take(LEASE_EPOCH_COUNTER, EPOCHS_AT_ONCE)
            self._reserved = max(self._reserved, more.stop)
        return epoch + 1

    def ended(self, lease: Lease) -> None:
        """Remember the epoch of a lease that ended, or the highest one if it cannot be read."""
        self._ended[lease.lease_id] = lease.epoch if lease.owner_known else self._reserved
        self._ended.move_to_end(lease.lease_id)
        while len(self._ended) > ENDED_KNOWN_MAX:
            _, forgotten = self._ended.popitem(last=False)
            self._above = max(self._above, forgotten)

    def __repr__(self) -> str:
        return f"Epochs(above={self._above}, reserved={self._reserved})"
