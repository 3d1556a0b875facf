"""The memory of all key-value state of a server: one budget, one mapping, one allocator.

The mapping is reserved at once, faulted in as it is used, and asks for huge pages: a store is read
in random order, and with pages of 4 KiB half of the time goes into address translation. Shared
memory gets no huge pages on most machines, so the flush process is sent its rows instead of mapping
them. The first segment is never handed out: an empty index lies there (`memtable.py`).

Faulting in a huge page takes milliseconds on a virtual machine whose host must find the memory, and
every write of the server would wait. So a thread does it some megabytes ahead of the writers.

Memory is handed out in blocks of a power of two, from `BLOCK_BYTES_MIN` to the size of a segment,
which are split and joined again as buddies: a bucket of ten rows does not take a whole segment.
Larger requests get a run of whole segments. A part is held in reserve for cleaning, which copies
the rows that are still needed before it frees a segment.

Any thread may allocate and free. Owners free a block only when no reader can be in it: readers on
the event loop hold positions for as long as one call takes.
"""

from __future__ import annotations

import mmap
import threading
from collections.abc import Callable

import numpy as np
import structlog

from zufluss import system
from zufluss.errors import ConfigError
from zufluss.record.slices import Bytes
from zufluss.threads import Threads

log = structlog.get_logger(__name__)

SEGMENT_BYTES = 1 << 20
"""Size of a segment, the largest block."""

BLOCK_BYTES_MIN = 4096
"""Smallest block."""

RESERVE_SHARE = 64
"""One part in this many is reserved for urgent allocations."""

SEGMENTS_MIN = 8
"""Segments that a budget has at least."""

AHEAD_BYTES = 8 << 20
"""Memory that is faulted in ahead of its use; a server that uses less has no such thread."""

FAULT_BYTES = 2 << 20
"""Bytes that are faulted in at once: a huge page."""


def _reserve(size: int) -> mmap.mmap:
    """Map `size` bytes, which cost nothing until they are touched."""
    memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    try:
        system.use_huge_pages(memory)
    except OSError as e:
        log.debug("kv_no_huge_pages", reason=str(e))
    return memory


def _fault_in(memory: Bytes) -> None:
    """Fault in all pages of this memory."""
    begin = memory.ctypes.data
    for at in range(begin, begin + len(memory), FAULT_BYTES):
        size = min(FAULT_BYTES, begin + len(memory) - at)
        if not system.fault_in(at, size):
            return


class Arena:
    """A budget of memory shared by the buckets of a server."""

    def __init__(self, budget: int, segment_bytes: int = SEGMENT_BYTES) -> None:
        self.segment_bytes = segment_bytes
        """Bytes of a segment."""
        segments = budget // segment_bytes
        if segments < SEGMENTS_MIN:
            raise ConfigError(
                f"a key-value memory budget of {budget} bytes is too small; at least "
                f"{SEGMENTS_MIN * segment_bytes} are needed"
            )
        self.budget = segments * segment_bytes
        """Bytes of the mapping; the first segment is never handed out."""
        self.data: Bytes = np.frombuffer(_reserve(self.budget), np.uint8)
        """The mapping."""
        self.reserve = max(2 * segment_bytes, self.budget // RESERVE_SHARE)
        """Bytes that an ordinary allocation leaves free."""
        self.free_bytes = self.budget - segment_bytes
        """Bytes that are not allocated."""
        self._free: dict[int, set[int]] = {}
        self._segments = np.ones(segments, np.bool_)
        self._segments[0] = False
        self._next = 1
        self._faulted_in = AHEAD_BYTES
        self._changed = threading.Condition()
        self._pages = Threads(1, "zufluss-pages")

    def __repr__(self) -> str:
        return f"Arena({self.free_bytes} of {self.budget} bytes free)"

    def size_of(self, size: int) -> int:
        """Return the bytes of the block that an allocation of `size` gets."""
        if size > self.segment_bytes:
            return -(-size // self.segment_bytes) * self.segment_bytes
        return max(BLOCK_BYTES_MIN, 1 << (size - 1).bit_length())

    def alloc(self, size: int, *, urgent: bool = False) -> int | None:
        """Return the position of a block of `size_of(size)` bytes, None if none is free.

        `urgent` allocations may use the reserve; they are for cleaning, which makes room.
        """
        size = self.size_of(size)
        with self._changed:
            if self.free_bytes - size < (0 if urgent else self.reserve):
                return None
            position = self._run(size) if size > self.segment_bytes else self._take(size)
            if position is not None:
                self.free_bytes -= size
            return position

    def free(self, position: int, size: int) -> None:
        """Free a block."""
        with self._changed:
            self.free_bytes += size
            if size > self.segment_bytes:
                self._mark(position, size, free=True)
            else:
                self._give(position, size)
            self._changed.notify_all()

    @property
    def usable_bytes(self) -> int:
        """Bytes that ordinary allocations can have at most."""
        return self.budget - self.segment_bytes - self.reserve

    def wait(self, until: Callable[[], bool], timeout: float) -> None:
        """Wait until a condition holds that freeing memory may fulfil, or the time is over."""
        with self._changed:
            self._changed.wait_for(until, timeout)

    def _take(self, size: int) -> int | None:
        if size == self.segment_bytes:
            return self._run(size)
        blocks = self._free.get(size)
        if blocks:
            return blocks.pop()
        whole = self._take(2 * size)
        if whole is not None:
            self._free.setdefault(size, set()).add(whole + size)
        return whole

    def _give(self, position: int, size: int) -> None:
        while size < self.segment_bytes:
            blocks = self._free.setdefault(size, set())
            buddy = position ^ size
            if buddy not in blocks:
                blocks.add(position)
                return
            blocks.remove(buddy)
            position, size = min(position, buddy), 2 * size
        self._mark(position, size, free=True)

    def _run(self, size: int) -> int | None:
        """Allocate a run of free segments; the search begins where the last one ended."""
        count = size // self.segment_bytes
        start = self._first(self._next, count)
        if start is None:
            start = self._first(1, count)
        if start is None:
            return None
        self._next = start + count
        self._go_ahead(self._next * self.segment_bytes)
        self._mark(start * self.segment_bytes, size, free=False)
        return start * self.segment_bytes

    def _go_ahead(self, used: int) -> None:
        """Fault in the next part once the first half of the last part is in use."""
        enough = min(self._faulted_in - AHEAD_BYTES // 2, self.budget)
        if not system.FAULTS_IN or used <= enough:
            return
        begin = max(used, self._faulted_in)
        self._faulted_in = begin + AHEAD_BYTES
        memory = self.data[begin : self._faulted_in]
        self._pages.submit(_fault_in, memory)

    def _first(self, begin: int, count: int) -> int | None:
        free = self._segments[begin:]
        if count == 1:
            at = int(free.argmax()) if len(free) else 0
            return begin + at if len(free) and free[at] else None
        if len(free) < count:
            return None
        free_until = np.concatenate([[0], np.cumsum(free)])
        starts = np.flatnonzero(free_until[count:] - free_until[:-count] == count)
        return begin + int(starts[0]) if len(starts) else None

    def _mark(self, position: int, size: int, *, free: bool) -> None:
        first = position // self.segment_bytes
        self._segments[first : first + size // self.segment_bytes] = free
        if free and first < self._next:
            self._next = first
