"""When an append counts: the three flush policies of `zufluss.log.flush`.

| policy | acknowledged when | survives a killed process | survives power loss |
|---|---|---|---|
| `ack` (default) | fdatasync returned, shared by all appends in flight (group commit) | yes | yes |
| `interval` | written; fdatasync every `zufluss.log.flush-interval` | yes | up to the last interval |
| `os` | written; the operating system syncs when it likes | yes | no promise |

The policy is the only thing that decides when a replica's high watermark moves after an append,
so readers never see what a crash could take back from an `ack` server.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import TYPE_CHECKING

import structlog

from zufluss.log.commit import GroupCommit

if TYPE_CHECKING:
    from zufluss.log.log import Appended, Log
    from zufluss.replica.replica import Replica

log = structlog.get_logger(__name__)


class Durability:
    """Routes appends to the flush policy and its verdicts back to the replicas."""

    def __init__(self, commit: GroupCommit | None, loop: asyncio.AbstractEventLoop) -> None:
        self.commit = commit
        self.replicas: dict[Log, Replica] = {}
        self._loop = loop
        self._scheduled = False

    def appended(
        self, replica: Replica, appended: Appended, view: memoryview, start: int, end: int
    ) -> None:
        """`view[start:end]` was written to the replica's log."""
        if self.commit is None:
            replica.advance(appended.end_offset)
            return
        self.commit.add(replica.log, appended.end_offset, view[start:end])
        if not self._scheduled:
            self._scheduled = True
            self._loop.call_soon(self._end_of_turn)

    def _end_of_turn(self) -> None:
        self._scheduled = False
        assert self.commit is not None
        self.commit.schedule()

    def durable(self, done: Sequence[tuple[Log, int]]) -> None:
        """The group commit synced these logs up to these offsets."""
        for synced, end_offset in done:
            replica = self.replicas.get(synced)
            if replica is not None and replica.failure is None:
                replica.advance(end_offset)

    def failed(self, logs: Sequence[Log], error: OSError) -> None:
        """A sync failed: what these logs hold beyond the high watermark may be lost."""
        for broken in logs:
            replica = self.replicas.get(broken)
            if replica is not None and replica.failure is None:
                log.error("sync_failed", replica=repr(replica), error=str(error))
                replica.fail(
                    f"the disk refused a sync ({error}); the bucket takes no more writes until "
                    "the server is restarted"
                )
