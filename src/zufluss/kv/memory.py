"""The memory of a server's key-value state: which bucket gets some, and which gives some back.

Every bucket allocates here, in the key-value worker, which owns all buckets. Flushed rows are a
cache of the cold tier and give way to writes:

1. Buckets that were not used for a while drop all their rows at once, those used least recently
   first. If that is not enough, the largest of the others drop their oldest rows. A bucket can give
   back everything: its memory follows the work, from bucket to bucket and partition to partition.
2. Rows that are not flushed yet have to be flushed first. A flush begins before memory runs out:
   when half of the budget waits for it, or little is free and nothing can be dropped.
3. Dropped memory is free after the event loop has run once (`on_retired`): its readers hold
   positions for as long as one call takes.

A put that gets no memory waits for a moment, then it is refused before it changed anything, and its
client tries again. While a shortage lasts, further puts are refused without a wait: the worker
continues with work that needs no memory. A shortage ends as soon as a flush has succeeded.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Protocol

import structlog

from zufluss.errors import StorageBackpressureError
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

LOW_SHARE = 16
"""Room is made in advance when less than one byte in this many is free."""

DIRTY_SHARE = 2
"""A flush begins when one byte in this many of the budget waits for one."""

IDLE_SHARE = 4
"""A bucket is idle if it was not used while one byte in this many of the budget was dropped."""

FLUSHES_MAX = 4
"""Buckets that are flushed together to make room."""

PUT_QUARTERS_MAX = 3
"""Quarters of the budget that one put may take. The rest is for what cannot be dropped yet."""

WAIT_SECONDS = 2.0
"""How long a put waits for memory at most: nobody else writes meanwhile."""

REPLAY_WAIT_SECONDS = 10.0
"""How long a replay waits for memory at least. A bucket that cannot be opened is tried again."""

PASS_SECONDS = 1.0
"""How long to wait for the event loop to free what was dropped before more is dropped."""

PAUSE_SECONDS = 0.01
"""How long to wait between two looks at flushes and at what has become durable."""

FLUSH_PAUSE_SECONDS = 1.0
"""How long after a flush that failed no other one is begun to make room."""


class MemoryUser(Protocol):
    """A bucket's store, as far as memory is concerned."""

    directory: Path
    horizon: int
    dirty_bytes: int
    """Bytes that wait for a flush."""
    used: bool
    """Set by every read and write."""
    last_use: int
    """The `evicted_bytes` of the memory when `used` was last seen."""
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

    def flush_end(self) -> bool:
        """Take over the result of a flush that has ended; return whether one succeeded."""

    def evict(self, wanted: int) -> int:
        """Drop rows that the cold tier has, oldest first; return the bytes retired."""


class KvMemory:
    """The memory of all buckets of a server, and the flusher that they share."""

    def __init__(
        self,
        budget: int,
        on_retired: OnRetired,
        segment_bytes: int | None = None,
        wait_seconds: float = WAIT_SECONDS,
    ) -> None:
        """`wait_seconds`: how long a put waits for memory."""
        self.arena = Arena(budget, segment_bytes or _segment_bytes(budget))
        self.flusher = KvFlusher()
        self.stores: set[MemoryUser] = set()
        """The open buckets."""
        self.dirty_bytes = 0
        """Bytes of all buckets that wait for a flush."""
        self.refusals = 0
        """Allocations that were refused because no memory became free."""
        self.evicted_bytes = 0
        """Bytes that buckets were ever asked to drop, and did: the clock of `last_use`."""
        self._on_retired = on_retired
        self._wait_seconds = wait_seconds
        self._retired_bytes = 0
        """Bytes that were ever retired; the worker counts."""
        self._freed_bytes = 0
        """Bytes of these that are free again; the event loop counts, which frees them."""
        self._low = max(
            self.arena.reserve + EVICT_SEGMENTS * self.arena.segment_bytes,
            self.arena.budget // LOW_SHARE,
        )
        self._dirty_max = self.arena.budget // DIRTY_SHARE
        self.put_bytes_max = PUT_QUARTERS_MAX * self.arena.usable_bytes // 4
        """Bytes that the rows of one put may take in memory, with their part of the index."""
        self._flushes: list[MemoryUser] = []
        """The buckets whose flush was begun to make room."""
        self._no_flush_before = 0.0
        self._flushes_ended = 0
        self._dry_at = -1
        """`_flushes_ended` when there was nothing to drop."""
        self._freed_at_refusal = -1
        """`_freed_bytes` when a put was refused."""

    def alloc(self, size: int) -> int:
        """Return the position of a free block; waits a moment for it if necessary.

        Raises `StorageBackpressureError` if no memory becomes free.
        """
        position = self.arena.alloc(size)
        if position is not None:
            return position
        waits = self._freed_bytes != self._freed_at_refusal
        return self._alloc_slowly(size, self._wait_seconds if waits else 0.0)

    def alloc_for_replay(self, size: int) -> int:
        """Do as `alloc`, with the patience of a replay."""
        position = self.arena.alloc(size)
        if position is not None:
            return position
        return self._alloc_slowly(size, max(self._wait_seconds, REPLAY_WAIT_SECONDS))

    def alloc_at_once(self, size: int) -> int:
        """Do as `alloc`, but neither wait nor drop anything."""
        position = self.arena.alloc(size)
        if position is None:
            raise self._shortage(size, 0.0)
        return position

    def has_room(self, size: int) -> bool:
        """Whether `size` bytes fit without waiting; if not, drops rows for the next time."""
        if self.arena.free_bytes - size >= self.arena.reserve + self.arena.segment_bytes:
            return True
        self._evict(max(2 * size, EVICT_SEGMENTS * self.arena.segment_bytes))
        return False

    def make_room_ahead(self) -> None:
        """Drop rows, or begin flushes, before memory runs out; never waits. Called before puts."""
        dirty = self.dirty_bytes > self._dirty_max
        if not dirty and self.arena.free_bytes >= self._low:
            return
        unfreed = self._retired_bytes - self._freed_bytes
        short = self.arena.free_bytes + unfreed < self._low
        if short and self._dry_at != self._flushes_ended:
            if self._evict(EVICT_SEGMENTS * self.arena.segment_bytes):
                return
            self._dry_at = self._flushes_ended
        if short or dirty:
            self._begin_flushes(self.arena.budget // LOW_SHARE)

    def retire(self, start: int, size: int) -> None:
        """Free a block as soon as no reader can be in it."""
        self._retired_bytes += size
        self._on_retired(partial(self._free, start, size))

    def flush_ended(self, *, failed: bool) -> None:
        """Note that the flush of a bucket has ended; after a failure no other begins at once."""
        self._flushes_ended += 1
        if failed:
            self._no_flush_before = time.monotonic() + FLUSH_PAUSE_SECONDS

    def close(self) -> None:
        """End the flush thread and process, after all buckets were closed. Blocks."""
        self.flusher.stop()

    def _free(self, start: int, size: int) -> None:
        self._freed_bytes += size
        self.arena.free(start, size)

    def _alloc_slowly(self, size: int, wait_seconds: float) -> int:
        deadline = time.monotonic() + wait_seconds
        wanted = max(2 * size, EVICT_SEGMENTS * self.arena.segment_bytes)
        while True:
            evicted = self._evict(wanted)
            if evicted:
                self.arena.wait(lambda: self._freed_bytes >= self._retired_bytes, PASS_SECONDS)
            position = self.arena.alloc(size)
            if position is not None:
                return position
            if evicted:
                continue
            if not self._begin_flushes(wanted) or time.monotonic() >= deadline:
                self._freed_at_refusal = self._freed_bytes
                self.refusals += 1
                raise self._shortage(size, wait_seconds)
            time.sleep(PAUSE_SECONDS)

    def _shortage(self, size: int, waited: float) -> StorageBackpressureError:
        return StorageBackpressureError(
            f"no {size} bytes of key-value memory became free in {waited:.0f} s: {self.arena}, "
            f"{self.dirty_bytes} bytes of {len(self.stores)} buckets wait for a flush; try again "
            "after a pause. If it lasts, look for failed flushes in the log, or raise "
            "zufluss.kv.memory"
        )

    def _evict(self, wanted: int) -> int:
        """Let buckets drop rows that the cold tier has; return the bytes retired."""
        idle_before = self.evicted_bytes - self.arena.budget // IDLE_SHARE
        users = [store for store in self.stores if store.memory_bytes]
        for store in users:
            if store.used:
                store.used, store.last_use = False, self.evicted_bytes
        users.sort(key=lambda s: (min(s.last_use, idle_before), -s.memory_bytes))
        total = 0
        for store in users:
            idle = store.last_use < idle_before
            total += store.evict(store.memory_bytes if idle else wanted - total)
            if total >= wanted:
                break
        self.evicted_bytes += total
        return total

    def _begin_flushes(self, wanted: int) -> bool:
        """Flush buckets with so much memory together, unless some are being flushed.

        Returns whether memory may become free without further doing.
        """
        for store in self._flushes:
            store.flush_end()
        self._flushes = [store for store in self._flushes if store.flushing]
        if self._flushes:
            return True
        if time.monotonic() < self._no_flush_before:
            return False
        dirty = [store for store in self.stores if store.dirty_bytes]
        dirty.sort(key=lambda s: -s.memory_bytes)
        for store in dirty:
            if wanted <= 0 or len(self._flushes) == FLUSHES_MAX:
                break
            if not store.flushing and store.horizon > store.flushed_offset:
                log.info("kv_flush_for_memory", store=str(store.directory), bytes=store.dirty_bytes)
                store.flush_wanted()
            if store.flushing:
                self._flushes.append(store)
                wanted -= store.memory_bytes
        return bool(dirty)


def _segment_bytes(budget: int) -> int:
    """Return the size of a segment, a power of two, for a budget."""
    share = max(budget // SEGMENTS_WANTED, SEGMENT_BYTES_MIN)
    return min(SEGMENT_BYTES, 1 << (share.bit_length() - 1))
