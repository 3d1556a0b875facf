"""The rows of one bucket in memory: versions in segments, found by a hash index.

Writes go out of place. A put first writes whole entries, then makes the slots of the index point to
them, so a reader beside it sees the old version or the new one. Every version carries the log
offset of its batch and a reference to the one before; a reader with a horizon walks to the newest
below it. The layouts and everything done per key are in
`entries.py`, `index.py` and `segments.py`.

Old versions are garbage once a newer one is below the horizon of all readers. When they take more
than half of the memory, each put cleans a piece of the oldest segment in proportion to what it
wrote: what is still seen is appended again, then the segment is retired. The owner decides when no
reader can hold a position in it any more and gives it back (`on_retired`).

One thread writes and cleans; `find` and `answer.answer_lookup` may run beside it in another.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from zufluss.errors import ZuflussError
from zufluss.kv.hot import entries, index, segments, words
from zufluss.kv.hot.arena import BLOCK_BYTES_MIN, Arena
from zufluss.record.slices import Positions, Slices

SEED = int.from_bytes(os.urandom(8), "little", signed=True)
"""Key of the hash, another one in each process: nobody outside can choose keys that collide."""

GARBAGE_SHARE = 2
"""Cleaning begins when one byte in so many is garbage."""

CLEAN_BYTES_MIN = 64 * 1024
"""Garbage below this is left alone."""

CLEAN_BYTES = 32 * 1024
"""What a put looks at when it cleans, besides four times what it wrote."""

FIRST_SEGMENT_BYTES = 16 * 1024
"""The first segment of a bucket; each is as large as all before, up to a whole one."""

NONE = 2**63 - 1
"""Number that no segment has."""

Alloc = Callable[[int], int]
"""Finds memory, whatever it takes; raises if there is none at all."""

Block = tuple[int, int]
"""Position and size in the arena."""


def hash_keys(keys: Slices) -> Positions:
    """The 64-bit hash of every key, for `group_keys` and the store. Of this process only."""
    out = np.empty(keys.count, np.int64)
    done = words.hash_all(keys.data, keys.starts, keys.ends, SEED, out)
    if done != keys.count:
        raise ValueError(f"key {done} leaves its {len(keys.data)} bytes, or is absent")
    return out


def group_keys(keys: Slices, hashes: Positions) -> tuple[Positions, Positions]:
    """Number equal keys alike, in order of first appearance.

    Returns the number of each key's group, and for each group the index of its first key.
    """
    table = np.full(2 << max(keys.count, 1).bit_length(), -1, np.int32)
    group, first = np.empty(keys.count, np.int64), np.empty(keys.count, np.int64)
    count = words.group_all(keys.data, keys.starts, keys.ends, hashes, table, group, first)
    if count < 0:
        raise ValueError(f"a key leaves its {len(keys.data)} bytes, or is absent")
    return group, first[:count]


@dataclass(slots=True)
class Segment:
    """A block that entries are appended to."""

    number: int
    """Counts up; a later segment was begun later."""
    start: int
    """Position in the arena."""
    size: int
    """Bytes of the block."""
    used: int
    """Position behind the last entry."""
    newest: int
    """Highest offset of an entry, −1 if all are clean."""
    cleaned: int
    """Position up to which it was cleaned."""


class Memtable:
    """The versions of a bucket's rows that are in memory."""

    def __init__(self, arena: Arena, alloc: Alloc, retire: Callable[[Block], None]) -> None:
        self.arena = arena
        self._alloc = alloc
        self._retire = retire
        self.bytes = 0
        """Memory taken by segments and index."""
        self.garbage = 0
        """Bytes in segments that a newer version has made useless, about."""
        self.keys = 0
        """Keys in the index."""
        self.segments: deque[Segment] = deque()
        """Oldest first; entries are appended to the last."""
        self._segment_bytes = 0
        self._numbers = 0
        self._unpublished_from = NONE
        block = self._block(BLOCK_BYTES_MIN)
        arena.data[block : block + BLOCK_BYTES_MIN] = 0
        bits = (BLOCK_BYTES_MIN // index.SLOT_BYTES).bit_length() - 1
        self.root = np.array([0, bits, block], np.int64)
        """Where the index lies; replaced or changed in place, always whole for a reader."""

    # ----------------------------------------------------------------------------------- reading

    def find(self, keys: Slices, hashes: Positions, horizon: int) -> tuple[Slices, int]:
        """Values of keys at a horizon, and how many are `UNKNOWN` here."""
        starts, ends = np.empty(keys.count, np.int64), np.empty(keys.count, np.int64)
        unknown = index.find(
            self.arena.data, self.root, keys.data, keys.starts, keys.ends, hashes, horizon,
            starts, ends,
        )  # fmt: skip
        if unknown < 0:
            raise ValueError(f"a key leaves its {len(keys.data)} bytes, or is absent")
        return Slices(self.arena.data, starts, ends), unknown

    # ----------------------------------------------------------------------------------- writing

    def put(
        self, keys: Slices, hashes: Positions, values: Slices, offset: int, horizon: int
    ) -> int:
        """Append versions and make them the newest of their keys; returns the bytes written."""
        if not keys.count:
            return 0
        self._unpublished_from = self.segments[-1].number if self.segments else self._numbers
        try:
            refs, written = self._append(keys, values, offset)
            self._publish(refs, hashes, horizon)
        finally:
            self._unpublished_from = NONE
        return written

    def _publish(self, refs: Positions, hashes: Positions, horizon: int) -> None:
        counts = np.zeros(2, np.int64)
        done = 0
        while True:
            done = index.publish(self.arena.data, self.root, refs, hashes, done, horizon, counts)
            if done < 0:
                raise _damaged("a reference in the index or the index itself")
            if done == len(refs):
                break
            self._grow(int(hashes[done]))
        self.garbage += int(counts[index.SUPERSEDED])
        self.keys += int(counts[index.ADDED])

    def _append(self, keys: Slices, values: Slices, offset: int) -> tuple[Positions, int]:
        refs = np.empty(keys.count, np.int64)
        done, written = 0, 0
        while True:
            segment = self.segments[-1] if self.segments else self._open_segment(0)
            at = segment.used
            done, segment.used = entries.append(
                self.arena.data, at, segment.start + segment.size, *keys, *values,
                offset, done, refs,
            )  # fmt: skip
            if done < 0:
                raise ValueError("a key or value leaves its bytes, or a key is absent")
            if segment.used > at:
                segment.newest = max(segment.newest, offset)
                written += segment.used - at
            if done == keys.count:
                return refs, written
            self._open_segment(_entry_bytes(keys, values, done))

    def _open_segment(self, at_least: int) -> Segment:
        size = min(self.arena.segment_bytes, max(self._segment_bytes, FIRST_SEGMENT_BYTES))
        size = self.arena.size_of(max(size, at_least))
        return self._add_segment(self._alloc(size), size)

    def _add_segment(self, start: int, size: int) -> Segment:
        segment = Segment(self._numbers, start, size, start, -1, start)
        self._numbers += 1
        self.bytes += size
        self._segment_bytes += size
        self.segments.append(segment)
        return segment

    def _block(self, size: int) -> int:
        found = self._alloc(size)
        self.bytes += size
        return found

    def _give(self, start: int, size: int) -> None:
        self.bytes -= size
        self._retire((start, size))

    # ------------------------------------------------------------------------------------- index

    def _grow(self, hash: int) -> None:
        """Make room for a key in its block: rebuild it without dropped slots, or split it."""
        depth, bits = int(self.root[0]), int(self.root[1])
        size = index.SLOT_BYTES << bits
        block = int(self.root[2 + (hash >> 1 >> (63 - depth) & (1 << depth) - 1)])
        local = int(self.arena.data[block + 8 : block + 16].view(np.int64)[0])
        if 4 * index.live_slots(self.arena.data, block, bits) < 1 << bits:
            low = self._block(size)
            self._split(block, low, 0, bits, local)
            self._point(block, low, low, local)
        elif depth == 0 and 2 * size <= self.arena.segment_bytes:
            low = self._block(2 * size)
            self._split(block, low, 0, bits + 1, local)
            self.root = np.array([0, bits + 1, low], np.int64)
        else:
            low, high = self._block(size), self._block(size)
            self._split(block, low, high, bits, local)
            if local == depth:
                head = np.array([depth + 1, bits], np.int64)
                self.root = np.concatenate([head, np.repeat(self.root[2:], 2)])
            self._point(block, low, high, local)
        self._give(block, size)

    def _split(self, block: int, low: int, high: int, new_bits: int, local: int) -> None:
        bits = int(self.root[1])
        if index.split(self.arena.data, block, bits, low, high, new_bits, local) < 0:
            raise _damaged("an index block")

    def _point(self, block: int, low: int, high: int, local: int) -> None:
        """Put new blocks in the place of one; the bit behind the local depth tells them apart."""
        depth = int(self.root[0])
        for number in np.flatnonzero(self.root[2:] == block):
            bit = int(number) >> (depth - local - 1) & 1 if depth > local else 0
            self.root[2 + number] = high if bit else low

    # ---------------------------------------------------------------------------------- cleaning

    def clean_some(self, written: int, horizon: int, flushed: int) -> None:
        """Clean in proportion to what was written, if there is garbage enough."""
        limit = CLEAN_BYTES + 4 * written
        while limit > 0 and len(self.segments) > 1 and self._is_dirty():
            done = self._clean_oldest(limit, horizon, flushed)
            if not done:
                return
            limit -= done

    def _is_dirty(self) -> bool:
        return self.garbage > max(CLEAN_BYTES_MIN, self._segment_bytes // GARBAGE_SHARE)

    def evictable(self, flushed: int) -> bool:
        """Whether `evict` would find something."""
        return any(segment.newest < flushed for segment in list(self.segments)[:-1])

    def evict(self, wanted: int, horizon: int, flushed: int) -> int:
        """Drop segments that the cold tier has all of, oldest first; returns the bytes retired."""
        retired = 0
        for segment in list(self.segments)[:-1]:
            if retired >= wanted or segment.number >= self._unpublished_from:
                break
            if segment.newest < flushed:
                self._clean_piece(segment, segment.used, horizon, flushed, evict=True)
                self._drop(segment)
                retired += segment.size
        return retired

    def _clean_oldest(self, limit: int, horizon: int, flushed: int) -> int:
        """Go on with the oldest segment as far as `limit` bytes; how far it came."""
        victim = self.segments[0]
        begin, stop = victim.cleaned, min(victim.used, victim.cleaned + limit)
        while victim.cleaned < stop:
            self._clean_piece(victim, stop, horizon, flushed, evict=False)
            if victim.cleaned < stop and not self._urgent_segment(victim):
                return 0
        if victim.cleaned >= victim.used:
            self._drop(victim)
        return max(1, victim.cleaned - begin)

    def _drop(self, segment: Segment) -> None:
        self.segments.remove(segment)
        self._segment_bytes -= segment.size
        self._give(segment.start, segment.size)

    def _clean_piece(
        self, victim: Segment, stop: int, horizon: int, flushed: int, *, evict: bool
    ) -> None:
        """Clean up to `stop`, or as far as the last segment has room for what is copied."""
        target = self.segments[-1]
        room = target.start + target.size
        counts = np.zeros(2, np.int64)
        at, used = segments.clean(
            self.arena.data, self.root, SEED, victim.cleaned, stop, target.used, room, horizon,
            flushed, evict, counts,
        )  # fmt: skip
        if at < 0:
            raise _damaged(f"the segment at {victim.start}")
        if used > target.used:
            target.newest = max(target.newest, victim.newest)
        victim.cleaned, target.used = at, used
        self.garbage = max(0, self.garbage - int(counts[segments.USELESS]))
        self.keys -= int(counts[segments.FORGOTTEN])

    def _urgent_segment(self, victim: Segment) -> bool:
        """Begin a segment for what cleaning copies, from the reserve; whether there was one."""
        size = self.arena.size_of(victim.used - victim.cleaned)
        start = self.arena.alloc(size, urgent=True)
        if start is not None:
            self._add_segment(start, size)
        return start is not None

    # ------------------------------------------------------------------------------- other views

    def mark(self) -> tuple[int, int]:
        """Where the next entry goes: the number of the segment and the position."""
        if not self.segments:
            return self._numbers, 0
        last = self.segments[-1]
        return last.number, last.used

    def refs_since(self, number: int, position: int) -> Positions:
        """Every entry appended since a mark, in the order they lie."""
        found = [np.empty(0, np.int64)]
        for segment in self.segments:
            if segment.number >= number:
                start = max(position, segment.start) if segment.number == number else segment.start
                found.append(self._walk(start, segment.used))
        return np.concatenate(found)

    def heads(self) -> Positions:
        """The newest version of every key, in no order."""
        out = np.empty(self.keys, np.int64)
        count = 0
        for block in np.unique(self.root[2:]):
            count = index.heads(self.arena.data, int(block), int(self.root[1]), out, count)
            if count < 0:
                raise _damaged("an index block")
        return out[:count]

    def release(self) -> None:
        """Give back all memory; nobody may read any more."""
        size = index.SLOT_BYTES << int(self.root[1])
        for block in np.unique(self.root[2:]):
            self.arena.free(int(block), size)
        for segment in self.segments:
            self.arena.free(segment.start, segment.size)
        self.segments.clear()
        self.bytes = self._segment_bytes = 0

    def _walk(self, start: int, end: int) -> Positions:
        out = np.empty((end - start) // entries.HEADER_BYTES, np.int64)
        count = entries.walk(self.arena.data, start, end, out)
        if count < 0:
            raise _damaged(f"the segment at {start}")
        return out[:count]


def _entry_bytes(keys: Slices, values: Slices, i: int) -> int:
    value = int(values.ends[i] - values.starts[i]) if values.starts[i] >= 0 else 0
    return entries.HEADER_BYTES + int(keys.ends[i] - keys.starts[i]) + value + 7


def _damaged(what: str) -> ZuflussError:
    return ZuflussError(
        f"key-value memory is damaged: {what} is not whole. The bucket's state is rebuilt from its "
        "log by a restart of the server"
    )
