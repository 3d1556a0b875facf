"""What is known of a bucket at the offsets that a flush or a snapshot may end at.

The worker is ahead of the log: the rows it has counted and the writers it has seen include batches
that may still be lost. Who keeps the state at an offset needs both as they were there. So batches
wait here until they are durable, and a flush takes what they come to up to its own offset.

A snapshot carries the writers, because the changelog may be lost from an earlier offset on than the
rows are: a batch that is among the rows and is sent again would otherwise be taken for a new one,
and be added to them twice (`tablet/remote/restore.py`).
"""

from __future__ import annotations

from collections import deque
from typing import Final, NamedTuple

from zufluss.log.writer_state import WriterState

WAITING_MAX: Final = 1024
"""Batches that wait until somebody looks which of them are settled."""


class Written(NamedTuple):
    """A batch of an idempotent writer, in the words of `WriterState.record`."""

    writer_id: int
    sequence: int
    base_offset: int
    end_offset: int
    timestamp: int


class Settled:
    """Rows and writers of one bucket at the offsets that count. Belongs to the worker thread."""

    __slots__ = ("_flushed", "_known_from", "_rows", "_waiting", "_writers")

    def __init__(self, rows: int) -> None:
        self._rows = rows
        self._waiting: deque[tuple[int, int, Written | None]] = deque()
        """Batches that may not be durable yet: end offset, rows after it, its writer."""
        self._writers: WriterState | None = None
        """As they are after the last batch that does not wait; None until the log was read."""
        self._known_from = 0
        """The first offset at which that is so."""
        self._flushed: dict[int, WriterState] = {}
        """The writers at the offset of the last flush, and of one that is under way."""

    def recovered(self, writers: WriterState, end_offset: int, flushed_offset: int) -> None:
        """The log was read to its end, and has these writers there."""
        self._writers, self._known_from = writers.copy(), end_offset
        if flushed_offset == end_offset:
            self._flushed[end_offset] = writers.copy()

    def add(self, end_offset: int, rows: int, written: Written | None, horizon: int) -> None:
        """One more batch ends here; what is below the horizon is durable."""
        self._waiting.append((end_offset, rows, written))
        if len(self._waiting) > WAITING_MAX:
            self.until(horizon)

    def until(self, horizon: int) -> int:
        """The number of rows at a horizon, which never goes back."""
        waiting, writers = self._waiting, self._writers
        while waiting and waiting[0][0] <= horizon:
            _, self._rows, written = waiting.popleft()
            if written is not None and writers is not None:
                writers.record(*written)
        return self._rows

    def flush(self, horizon: int, flushed_offset: int) -> int:
        """A flush of everything below the horizon begins; the number of rows there.

        `flushed_offset` is where the last one ended.
        """
        rows = self.until(horizon)
        self._flushed = {at: known for at, known in self._flushed.items() if at >= flushed_offset}
        if self._writers is not None and horizon >= self._known_from:
            self._flushed[horizon] = self._writers.copy()
        return rows

    def writers_at(self, flushed_offset: int) -> WriterState | None:
        """The writers at the offset of the last flush; None if nobody knows. Not to be changed."""
        return self._flushed.get(flushed_offset)

    def forget_expired(self, now_ms: int) -> None:
        """Drop writers that have not written for long."""
        if self._writers is not None:
            self._writers.forget_expired(now_ms)
