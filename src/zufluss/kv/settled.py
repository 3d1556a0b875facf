"""Row count and writers of a bucket at the offset of a flush or a snapshot.

The key-value worker is ahead of the log: the rows it has counted and the writers it has seen
include batches that a crash may still take back. A flush records both as of its own offset. So
batches wait here until they are durable, and are counted up to the offset of a flush.

A snapshot carries the writers because less of the changelog than of the rows may survive a lost
disk. A writer would then send a batch again that the snapshot's rows contain, and the batch would
be applied twice (`tablet/remote/restore.py`).
"""

from __future__ import annotations

from collections import deque
from typing import Final, NamedTuple

from zufluss.log.writer_state import WriterState

WAITING_MAX: Final = 1024
"""Batches that wait at most before the durable ones among them are counted."""


class SettledBatch(NamedTuple):
    """A batch of an idempotent writer: the arguments of `WriterState.record`."""

    writer_id: int
    sequence: int
    base_offset: int
    end_offset: int
    timestamp: int


class SettledState:
    """Row count and writers of one bucket as of flushes. Belongs to the worker thread."""

    __slots__ = ("_flushed", "_known_from", "_rows", "_waiting", "_writers")

    def __init__(self, rows: int) -> None:
        self._rows = rows
        self._waiting: deque[tuple[int, int, SettledBatch | None]] = deque()
        """Batches that may not be durable yet: end offset, rows after the batch, its writer."""
        self._writers: WriterState | None = None
        """The writers after the last batch that does not wait; None until the log was read."""
        self._known_from = 0
        """The first offset at which `_writers` is known."""
        self._flushed: dict[int, WriterState] = {}
        """The writers at the offset of the last flush and of the one under way."""

    def recovered(self, writers: WriterState, end_offset: int, flushed_offset: int) -> None:
        """Take over the writers at the end of the log, after recovery has read it."""
        self._writers, self._known_from = writers.copy(), end_offset
        if flushed_offset == end_offset:
            self._flushed[end_offset] = writers.copy()

    def add(self, end_offset: int, rows: int, written: SettledBatch | None, horizon: int) -> None:
        """Add a batch; batches that end at or below the horizon are durable."""
        self._waiting.append((end_offset, rows, written))
        if len(self._waiting) > WAITING_MAX:
            self.until(horizon)

    def until(self, horizon: int) -> int:
        """Count batches up to a horizon, which never decreases; return the number of rows there."""
        waiting, writers = self._waiting, self._writers
        while waiting and waiting[0][0] <= horizon:
            _, self._rows, written = waiting.popleft()
            if written is not None and writers is not None:
                writers.record(*written)
        return self._rows

    def flush(self, horizon: int, flushed_offset: int) -> int:
        """Note that a flush up to the horizon begins; return the number of rows there.

        `flushed_offset` is the offset of the last flush.
        """
        rows = self.until(horizon)
        self._flushed = {at: known for at, known in self._flushed.items() if at >= flushed_offset}
        if self._writers is not None and horizon >= self._known_from:
            self._flushed[horizon] = self._writers.copy()
        return rows

    def writers_at(self, flushed_offset: int) -> WriterState | None:
        """Return the writers at the offset of the last flush, None if unknown. Read-only."""
        return self._flushed.get(flushed_offset)

    def forget_expired(self, now_ms: int) -> None:
        """Drop writers that have not written for long."""
        if self._writers is not None:
            self._writers.forget_expired(now_ms)
