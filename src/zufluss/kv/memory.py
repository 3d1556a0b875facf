"""The memory of a server's key-value state: which bucket gets some, and which gives some back.

Every bucket allocates here. When no memory is free, the thread that asked for it (the key-value
worker, which owns all buckets) makes room:

1. The largest buckets drop their oldest rows that the cold tier has too.
2. If nothing can be dropped, the bucket with the most unflushed bytes is flushed, and the worker
   waits for the flush.
3. Dropped memory is free after the event loop has run once (`on_retired`): its readers hold
   positions for as long as one call takes.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Protocol

import structlog

from zufluss.errors import ZuflussError
from zufluss.kv.cold.flush import KvFlusher
from zufluss.kv.hot.arena import SEGMENT_BYTES, Arena

log = structlog.get_logger(__name__)

Free = Callable[[], None]
OnRetired = Callable[[Free], None]
"""Takes a function that frees memory, and calls it once no reader can hold a position there."""

SEGMENTS_WANTED = 64
"""Segments that a budget is divided into at least: with fewer, some buckets would take it all."""

SEGMENT_BYTES_MIN = 64 * 1024
"""The smallest segment, however small the budget."""

EVICT_SEGMENTS = 4
"""Segments that are dropped at least once room must be made."""

WAIT_SECONDS = 60.0
"""How long an allocation waits for room before it fails."""

PASS_SECONDS = 1.0
"""How long to wait for the event loop to free what was dropped before more is dropped."""

PAUSE_SECONDS = 0.01
"""How long to wait for others to free memory when this thread can free none."""


class MemoryUser(Protocol):
    """A bucket's store, as far as memory is concerned."""

    directory: Path
    horizon: int
    dirty_bytes: int
    """Bytes written since the last flush."""
    flush_wanted: Callable[[], None]
    """Begins a flush."""

    @property
    def memory_bytes(self) -> int:
        """Bytes of memory that the store has."""

    @property
    def flushed_offset(self) -> int:
        """Every change below this log offset is in the cold tier."""

    @property
    def flushing(self) -> bool:
        """Whether a flush is under way."""

    def flush_wait(self) -> None:
        """Wait for the end of the flush that is under way."""

    def evict(self, wanted: int) -> int:
        """Drop rows that the cold tier has, oldest first; return the bytes retired."""


class KvMemory:
    """The memory of all buckets of a server, and the flusher that they share."""

    def __init__(
        self, budget: int, on_retired: OnRetired, segment_bytes: int | None = None
    ) -> None:
        self.arena = Arena(budget, segment_bytes or _segment_bytes(budget))
        self.flusher = KvFlusher()
        self.stores: set[MemoryUser] = set()
        """The open buckets."""
        self._on_retired = on_retired

    def alloc(self, size: int) -> int:
        """Return the position of a free block; makes room for it if necessary.

        Raises `ZuflussError` if there is no room within `WAIT_SECONDS`.
        """
        position = self.arena.alloc(size)
        return position if position is not None else self._alloc_slowly(size)

    def has_room(self, size: int) -> bool:
        """Whether `size` bytes fit without waiting; if not, drops rows for the next time."""
        if self.arena.free_bytes - size >= self.arena.reserve + self.arena.segment_bytes:
            return True
        self._evict(max(2 * size, EVICT_SEGMENTS * self.arena.segment_bytes))
        return False

    def retire(self, start: int, size: int) -> None:
        """Free a block as soon as no reader can be in it."""
        self._on_retired(partial(self.arena.free, start, size))

    def close(self) -> None:
        """End the flush thread and process, after all buckets were closed. Blocks."""
        self.flusher.stop()

    def _alloc_slowly(self, size: int) -> int:
        deadline = time.monotonic() + WAIT_SECONDS
        wanted = max(2 * size, EVICT_SEGMENTS * self.arena.segment_bytes)
        while (position := self.arena.alloc(size)) is None:
            if self._evict(wanted):
                self.arena.wait(self.arena.reserve + size, PASS_SECONDS)
            elif not self._flush_one():
                self.arena.wait(self.arena.reserve + size, PAUSE_SECONDS)
            if time.monotonic() > deadline:
                raise ZuflussError(
                    f"no {size} bytes of key-value memory in {WAIT_SECONDS:.0f} s: {self.arena} "
                    f"for {len(self.stores)} buckets; raise zufluss.kv.memory"
                )
        return position

    def _evict(self, wanted: int) -> int:
        """Let the largest buckets drop rows that the cold tier has; return the bytes retired."""
        total = 0
        for store in sorted(self.stores, key=lambda s: -s.memory_bytes):
            total += store.evict(wanted - total)
            if total >= wanted:
                break
        return total

    def _flush_one(self) -> bool:
        """Wait for a flush, of the bucket with the most to flush; False if none has anything."""
        flushing = [store for store in self.stores if store.flushing]
        waiting = [
            store
            for store in self.stores
            if store.horizon > store.flushed_offset and store.dirty_bytes
        ]
        if flushing:
            flushing[0].flush_wait()
            return True
        if not waiting:
            return False
        store = max(waiting, key=lambda s: s.dirty_bytes)
        log.info("kv_flush_for_memory", store=str(store.directory), bytes=store.dirty_bytes)
        store.flush_wanted()
        store.flush_wait()
        return True


def _segment_bytes(budget: int) -> int:
    """Return the size of a segment, a power of two, for a budget."""
    share = max(budget // SEGMENTS_WANTED, SEGMENT_BYTES_MIN)
    return min(SEGMENT_BYTES, 1 << (share.bit_length() - 1))
