"""How long leases delay the deletion of a dropped table or partition, or of an expired partition.

A lease promises that its snapshots can be read. Deleting their table would break the promise; a
lease that nobody ends would keep dead files for ever. `zufluss.kv.snapshot.lease.on-drop` decides:

| policy | while a lease holds snapshots of the table or partition | when `drop-wait-max` is over |
|---|---|---|
| `wait` | the files of a dropped one stay; an expired partition stays as it is | as `revoke` |
| `revoke` | the leases are revoked, and their holders told; then the deletion goes on | |

The time begins with the first call of `seconds_left`: at the drop, when an expired partition is
found, or at the start of the coordinator. So an expired partition that waited does not wait again
when it is dropped. The cleaner (`remote/cleaner.py`) and the auto partitions
(`catalog/auto_partitions.py`) ask, and delete nothing before `seconds_left` is 0.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Final

from zufluss.config import options
from zufluss.config.load import Configuration
from zufluss.coordinator.leases.calls import LeaseCalls
from zufluss.coordinator.leases.pins import Owner
from zufluss.errors import ErrorCode, error

_WAIT: Final = "wait"


class LeaseHolds:
    """Says how long the deletion of a table or partition has to wait for leases."""

    def __init__(
        self, conf: Configuration, leases: LeaseCalls, clock: Callable[[], float] = time.monotonic
    ) -> None:
        waits = conf.get(options.ZUFLUSS_KV_SNAPSHOT_LEASE_ON_DROP) == _WAIT
        wait_ms = conf.get(options.ZUFLUSS_KV_SNAPSHOT_LEASE_DROP_WAIT_MAX) if waits else 0
        self._seconds_max = wait_ms / 1000
        self._revoke = leases.revoke
        self._holds = leases.book.pins.holds
        self._clock = clock
        self._since: dict[Owner, float] = {}

    def seconds_left(self, owner: Owner) -> float:
        """How long leases may delay the deletion from now on; 0 when it may begin."""
        if not self._holds(*owner):
            return 0.0
        since = self._since.setdefault(owner, self._clock())
        return max(since + self._seconds_max - self._clock(), 0.0)

    async def end(self, owner: Owner, what: str) -> None:
        """Revoke a table or partition called `what` from all leases; durable when this returns.

        Raises if a damaged lease may still hold it: then nothing may be deleted.
        """
        if self._holds(*owner):
            await self._revoke(*owner, what)
        if self._holds(*owner):
            raise error(
                ErrorCode.STORAGE_EXCEPTION,
                f"a lease of snapshots whose record is damaged may hold {what}, so its remote "
                "files stay; look with `zufluss lease list`, and drop that lease",
            )

    def forget(self, owner: Owner) -> None:
        """Forget when the wait began: the deletion is over, or is not needed any more."""
        self._since.pop(owner, None)

    def __repr__(self) -> str:
        return f"LeaseHolds(waiting={len(self._since)}, seconds_max={self._seconds_max})"
