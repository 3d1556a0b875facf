"""How long leases hold back the end of a table or partition that was dropped, or has expired.

A lease promises that snapshots can be read. A drop, or an expired partition, would break that, and
a lease that nobody ends would keep dead files for ever. `zufluss.kv.snapshot.lease.on-drop` says
which of the two wins:

| policy | while a lease holds something of it | when `drop-wait-max` is over |
|---|---|---|
| `wait` | the files of what was dropped stay; an expired partition stays as it is | as `revoke` |
| `revoke` | the leases are revoked and told, then it goes on | |

The time counts from when it was first asked for here: at the drop, or when an expired partition
was found, or at the start of the coordinator. So a partition that waited because it had expired
does not wait again when it is dropped. The clock is monotonic. The cleaner (`remote/cleaner.py`)
and the auto partitions (`catalog/auto_partitions.py`) ask; neither ends anything while
`seconds_left` is not 0.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Final

from zufluss.config import options
from zufluss.config.load import Configuration
from zufluss.coordinator.leases.leases import Leases, Owner
from zufluss.errors import ErrorCode, error

_WAIT: Final = "wait"


class LeaseHolds:
    """Answers whether something that should end has to wait for its readers."""

    def __init__(
        self, conf: Configuration, leases: Leases, clock: Callable[[], float] = time.monotonic
    ) -> None:
        waits = conf.get(options.ZUFLUSS_KV_SNAPSHOT_LEASE_ON_DROP) == _WAIT
        wait_ms = conf.get(options.ZUFLUSS_KV_SNAPSHOT_LEASE_DROP_WAIT_MAX) if waits else 0
        self._seconds_max = wait_ms / 1000
        self._leases = leases
        self._clock = clock
        self._since: dict[Owner, float] = {}

    def seconds_left(self, owner: Owner) -> float:
        """How long leases hold it yet, at most; 0 when it may end now."""
        if not self._leases.holds(*owner):
            return 0.0
        since = self._since.setdefault(owner, self._clock())
        return max(since + self._seconds_max - self._clock(), 0.0)

    async def end(self, owner: Owner, what: str) -> None:
        """Take it away from the leases that still hold it; durable when this returns.

        A lease whose record is damaged cannot be told, and holds on: that is an error, and nothing
        may be deleted.
        """
        if self._leases.holds(*owner):
            await self._leases.revoke(*owner, what)
        if self._leases.holds(*owner):
            raise error(
                ErrorCode.STORAGE_EXCEPTION,
                f"a lease of snapshots whose record is damaged may hold {what}, so its remote "
                "files stay; look with `zufluss lease list`, and drop that lease",
            )

    def forget(self, owner: Owner) -> None:
        """It is over, or need not end any more."""
        self._since.pop(owner, None)

    def __repr__(self) -> str:
        return f"LeaseHolds(waiting={len(self._since)}, seconds_max={self._seconds_max})"
