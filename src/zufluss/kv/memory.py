"""Who gets the memory of the server's key-value state, and who has to give some back.

Every bucket allocates here. As long as there is room that is all; when there is none, somebody
makes it, in the thread that asked (the key-value worker, which owns all buckets):

1. The largest buckets drop the oldest rows that the cold tier has as well.
2. If that frees nothing, the bucket with the most unflushed bytes is flushed, and waited for.
3. Dropped memory is free when the event loop has passed (`on_retired`): its readers hold positions
   for as long as one call takes.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

import structlog

from zufluss.errors import ZuflussError
from zufluss.kv.cold.flush import Flusher
from zufluss.kv.hot.arena import SEGMENT_BYTES, Arena

if TYPE_CHECKING:
    from zufluss.kv.store import KvStore

log = structlog.get_logger(__name__)

Free = Callable[[], None]
OnRetired = Callable[[Free], None]
"""Gets a function that frees memory; is to call it when no reader can hold a position in it."""

SEGMENTS_WANTED = 64
"""A small budget has small segments: so many at least, or a few buckets would hold all of it."""

SEGMENT_BYTES_MIN = 64 * 1024
"""But not smaller than this."""

EVICT_SEGMENTS = 4
"""Once room must be made, so much of it is made at least."""

WAIT_SECONDS = 60.0
"""How long a write waits for room before it is given up."""

PASS_SECONDS = 1.0
"""How long to wait for the event loop to pass before more is dropped."""

PAUSE_SECONDS = 0.01
"""How long to wait for others to free memory before looking again."""


class KvMemory:
    """The memory of all buckets of a server, and what it takes to flush them."""

    def __init__(
        self, budget: int, on_retired: OnRetired, segment_bytes: int | None = None
    ) -> None:
        self.arena = Arena(budget, segment_bytes or _segment_bytes(budget))
        self.flusher = Flusher()
        self.stores: set[KvStore] = set()
        """The open buckets."""
        self._on_retired = on_retired

    def alloc(self, size: int) -> int:
        """Position of a block, making room for it if need be."""
        found = self.arena.alloc(size)
        return found if found is not None else self._alloc_slowly(size)

    def has_room(self, size: int) -> bool:
        """Whether so much fits without waiting; if not, somebody drops rows for the next time."""
        if self.arena.free_bytes - size >= self.arena.reserve + self.arena.segment_bytes:
            return True
        self._evict(max(2 * size, EVICT_SEGMENTS * self.arena.segment_bytes))
        return False

    def retire(self, start: int, size: int) -> None:
        """Free a block as soon as no reader can be in it."""
        self._on_retired(partial(self.arena.free, start, size))

    def close(self) -> None:
        """End the flush thread and process. Blocks; the buckets are closed before."""
        self.flusher.stop()

    def _alloc_slowly(self, size: int) -> int:
        deadline = time.monotonic() + WAIT_SECONDS
        wanted = max(2 * size, EVICT_SEGMENTS * self.arena.segment_bytes)
        while (found := self.arena.alloc(size)) is None:
            if self._evict(wanted):
                self.arena.wait(self.arena.reserve + size, PASS_SECONDS)
            elif not self._flush_one():
                self.arena.wait(self.arena.reserve + size, PAUSE_SECONDS)
            if time.monotonic() > deadline:
                raise ZuflussError(
                    f"no {size} bytes of key-value memory in {WAIT_SECONDS:.0f} s: {self.arena} "
                    f"for {len(self.stores)} buckets; raise zufluss.kv.memory"
                )
        return found

    def _evict(self, wanted: int) -> int:
        """Have the largest buckets drop what the cold tier has as well; bytes retired."""
        total = 0
        for store in sorted(self.stores, key=lambda s: -s.memory_bytes):
            total += store.evict(wanted - total)
            if total >= wanted:
                break
        return total

    def _flush_one(self) -> bool:
        """Flush the bucket with the most to flush and wait for it; whether there was one."""
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
    """A power of two."""
    share = max(budget // SEGMENTS_WANTED, SEGMENT_BYTES_MIN)
    return min(SEGMENT_BYTES, 1 << (share.bit_length() - 1))
