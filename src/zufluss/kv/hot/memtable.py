"""The rows of one bucket in memory: versions in segments, found by a hash index.

Writes go out of place. A put first writes whole entries, then makes the slots of the index refer to
them, so a reader beside it sees the old version or the new one. Every version carries the log
offset of its batch and a reference to the version before; a reader with a horizon walks to the
newest version below it. Layouts and kernels are in `entries.py`, `index.py` and `segments.py`.

A version is garbage once a newer one is below the horizon of all readers. When garbage takes more
than half of the memory, each put cleans a piece of the oldest segment in proportion to what the put
wrote: versions that readers may see are appended again, then the segment is retired. The owner
frees it when no reader can hold a position in it any more.

A put allocates all its memory before it writes anything, so one that gets none changes nothing.
`evict` drops flushed rows, shrinks the index with them, and can give back all memory: a memtable
without rows has none, its index is a block without room that all memtables share.

One thread writes and cleans; `find` and `answer.answer_lookup` may run beside it in another.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from zufluss.errors import RecordTooLargeError, ZuflussError, refusal_of
from zufluss.kv.hot import entries, index, segments, words
from zufluss.kv.hot.arena import BLOCK_BYTES_MIN, Arena
from zufluss.kv.hot.entries import NEWEST
from zufluss.record.slices import Positions, Slices

SEED = int.from_bytes(os.urandom(8), "little", signed=True)
"""Seed of the hash, random in each process: nobody outside can choose keys that collide."""

GARBAGE_SHARE = 2
"""Cleaning begins when one byte in this many is garbage."""

CLEAN_BYTES_MIN = 64 * 1024
"""Garbage below this is left alone."""

CLEAN_BYTES = 32 * 1024
"""Bytes that a put cleans, besides four times the bytes it wrote."""

FIRST_SEGMENT_BYTES = 16 * 1024
"""Size of the first segment; each further one is as large as all before, up to a whole one."""

NO_BLOCK = 0
"""The index block of a memtable without rows: zeros before the first block of the arena."""

NO_BLOCK_BITS = (BLOCK_BYTES_MIN // index.SLOT_BYTES).bit_length() - 1
"""The size of the smallest index block, as the power of two of its slots."""

SPARSE_SHARE = 8
"""The index shrinks when less than one slot in this many has a key."""

KEY_BYTES = 64
"""Bytes of the index that a key may need, while a block is being split."""

JOINS_MAX = 16
"""Pairs of index blocks that one eviction joins at most; each takes less than a millisecond."""

Alloc = Callable[[int], int]
"""Allocates memory, or raises. May evict rows of any memtable meanwhile."""

Block = tuple[int, int]
"""Position and size in the arena."""


def hash_keys(keys: Slices) -> Positions:
    """Return the 64-bit hash of every key. Hashes of other processes differ."""
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
class MemorySegment:
    """A block of the arena that entries are appended to."""

    number: int
    """Grows with every segment of the bucket."""
    start: int
    """Position of the block in the arena."""
    size: int
    """Bytes of the block."""
    used: int
    """Position behind the last entry."""
    newest: int
    """Highest log offset of an entry, −1 if all came from the cold tier."""
    cleaned: int
    """Position up to which the segment was cleaned."""


class Memtable:
    """The versions of a bucket's rows that are in memory."""

    def __init__(self, arena: Arena, retire: Callable[[Block], None]) -> None:
        self.arena = arena
        self._retire = retire
        self.bytes = 0
        """Bytes of segments and index."""
        self.garbage = 0
        """Bytes of versions that have a newer one, about."""
        self.keys = 0
        """Keys in the index."""
        self.segments: deque[MemorySegment] = deque()
        """Oldest first; entries are appended to the last."""
        self._segment_bytes = 0
        self._numbers = 0
        self._spare: deque[Block] = deque()
        """Segments allocated for the put that is under way."""
        self._slots_left = 0
        """New keys for which every index block has room, or more."""
        self._writing = False
        """A put is under way; it counts on the last segment and on the index."""
        arena.data[NO_BLOCK : NO_BLOCK + 8].view(np.int64)[0] = 1 << NO_BLOCK_BITS
        self.root = _empty_root()
        """Root of the index (`index.py`); whole for a reader at any time."""

    # ----------------------------------------------------------------------------------- reading

    def find(self, keys: Slices, hashes: Positions, horizon: int) -> tuple[Slices, int]:
        """Return the values of keys at a horizon, and how many are `UNKNOWN`."""
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
        self,
        keys: Slices,
        hashes: Positions,
        values: Slices,
        offset: int,
        horizon: int,
        alloc: Alloc,
        bytes_max: int = NEWEST,
    ) -> int:
        """Append versions and make them the newest of their keys; return the bytes written.

        A failure of `alloc` changes nothing, nor does a lack of memory outside of the arena, which
        is a `StorageBackpressureError` too. Raises `RecordTooLargeError` if the versions and their
        part of the index take more than `bytes_max`.
        """
        if not keys.count:
            return 0
        self._writing = True
        try:
            try:
                self._reserve(keys, hashes, values, alloc, bytes_max)
            except MemoryError as e:
                raise refusal_of(e) from e
            versions, written = self._append(keys, values, offset)
            self._publish(versions, hashes, horizon)
        finally:
            self._writing = False
        return written

    def _reserve(
        self, keys: Slices, hashes: Positions, values: Slices, alloc: Alloc, bytes_max: int
    ) -> None:
        """Allocate the segments for these entries, and room for their keys in the index."""
        ends = np.empty(keys.count, np.int64)
        size = entries.measure(*keys, *values, ends)
        if size < 0:
            raise ValueError("a key or value leaves its bytes, or a key is absent")
        if size + KEY_BYTES * keys.count > bytes_max:
            raise RecordTooLargeError(
                f"{keys.count} rows take {size + KEY_BYTES * keys.count} bytes of key-value "
                f"memory; {bytes_max} of {self.arena.budget} are allowed at once. Send smaller "
                "batches, or raise zufluss.kv.memory"
            )
        try:
            self._reserve_segments(ends, alloc)
            self._reserve_slots(hashes, alloc)
        except BaseException:
            while self._spare:
                self.arena.free(*self._spare.pop())
            raise

    def _reserve_segments(self, ends: Positions, alloc: Alloc) -> None:
        """`ends` is the running total of the entries' sizes; `_append` fills the same segments."""
        last = self.segments[-1] if self.segments else None
        room = last.start + last.size - last.used if last else 0
        if ends[-1] <= room:
            return
        total, written = self._segment_bytes, 0
        while (count := int(np.searchsorted(ends, written + room, side="right"))) < len(ends):
            written = int(ends[count - 1]) if count else 0
            room = min(self.arena.segment_bytes, max(total, FIRST_SEGMENT_BYTES))
            room = self.arena.size_of(max(room, int(ends[count]) - written))
            self._spare.append((alloc(room), room))
            total += room

    def _publish(self, versions: Positions, hashes: Positions, horizon: int) -> None:
        counts = np.zeros(2, np.int64)
        done = index.publish(self.arena.data, self.root, versions, hashes, horizon, counts)
        if done != len(versions):
            raise _damaged("a reference in the index or the index itself")
        self.garbage += int(counts[index.SUPERSEDED])
        self.keys += int(counts[index.ADDED])

    def _append(self, keys: Slices, values: Slices, offset: int) -> tuple[Positions, int]:
        versions = np.empty(keys.count, np.int64)
        done, written = 0, 0
        while True:
            segment = (
                self.segments[-1] if self.segments else self._add_segment(*self._spare.popleft())
            )
            at = segment.used
            done, segment.used = entries.append(
                self.arena.data, at, segment.start + segment.size, *keys, *values,
                offset, done, versions,
            )  # fmt: skip
            if done < 0:
                raise ValueError("a key or value leaves its bytes, or a key is absent")
            if segment.used > at:
                segment.newest = max(segment.newest, offset)
                written += segment.used - at
            if done == keys.count:
                return versions, written
            self._add_segment(*self._spare.popleft())

    def _add_segment(self, start: int, size: int) -> MemorySegment:
        segment = MemorySegment(self._numbers, start, size, start, -1, start)
        self._numbers += 1
        self.bytes += size
        self._segment_bytes += size
        self.segments.append(segment)
        return segment

    def _give(self, start: int, size: int) -> None:
        self.bytes -= size
        self._retire((start, size))

    # ------------------------------------------------------------------------------------- index

    def _reserve_slots(self, hashes: Positions, alloc: Alloc) -> None:
        """Grow the index until each block has room for all these keys, should they be new."""
        self._slots_left -= len(hashes)
        if self._slots_left >= 0:
            return
        while True:
            counts = np.zeros(len(self.root), np.int64)
            number = index.without_room(self.arena.data, self.root, hashes, counts)
            if number < 0:
                raise _damaged("an index block")
            if number == len(hashes):
                used = self.arena.data.view(np.int64)[self.root[2:] >> 3].max()
                limit = (index.FULL_TENTHS << int(self.root[1])) // 10
                self._slots_left = limit - int(used) - len(hashes)
                return
            self._grow(int(hashes[number]), counts, alloc)

    def _grow(self, hash: int, counts: Positions, alloc: Alloc) -> None:
        """Make room for keys in a block: rebuild it without dropped slots, or split it."""
        depth, bits = int(self.root[0]), int(self.root[1])
        size = index.SLOT_BYTES << bits
        prefix = hash >> 1 >> (63 - depth) & (1 << depth) - 1
        block = int(self.root[2 + prefix])
        local = int(self.arena.data[block + 8 : block + 16].view(np.int64)[0])
        live = index.live_slots(self.arena.data, block, bits)
        keys = live + int(counts[prefix >> (depth - local) << (depth - local)])
        if 4 * live < 1 << bits and 10 * keys <= index.FULL_TENTHS << bits:
            low = self._block(alloc, size)
            self._split(block, low, 0, bits, local)
            self._point(block, low, low, local)
        elif depth == 0 and 2 * size <= self.arena.segment_bytes:
            low = self._block(alloc, 2 * size)
            self._split(block, low, 0, bits + 1, local)
            self.root = np.array([0, bits + 1, low], np.int64)
        else:
            low = self._block(alloc, size)
            try:
                high = self._block(alloc, size)
            except BaseException:
                self._give(low, size)
                raise
            self._split(block, low, high, bits, local)
            if local == depth:
                head = np.array([depth + 1, bits], np.int64)
                self.root = np.concatenate([head, np.repeat(self.root[2:], 2)])
            self._point(block, low, high, local)
        self._give_block(block, size)

    def _block(self, alloc: Alloc, size: int) -> int:
        """Return a new index block."""
        block = alloc(size)
        self.arena.data[block : block + size] = 0
        self.bytes += size
        return block

    def _give_block(self, block: int, size: int) -> None:
        if block != NO_BLOCK:
            self._give(block, size)

    def _split(self, block: int, low: int, high: int, new_bits: int, local: int) -> None:
        bits = int(self.root[1])
        self._slots_left = 0
        if index.split(self.arena.data, block, bits, low, high, new_bits, local) < 0:
            raise _damaged("an index block")

    def _point(self, block: int, low: int, high: int, local: int) -> None:
        """Replace a block in the root by two; the hash bit behind the local depth chooses."""
        depth = int(self.root[0])
        for number in np.flatnonzero(self.root[2:] == block):
            bit = int(number) >> (depth - local - 1) & 1 if depth > local else 0
            self.root[2 + number] = high if bit else low

    def _shrink(self) -> None:
        """Join index blocks, or replace the only one, while few slots have a key."""
        for _ in range(JOINS_MAX):
            depth, bits = int(self.root[0]), int(self.root[1])
            slots = len(np.unique(self.root[2:])) << bits
            if SPARSE_SHARE * self.keys >= slots:
                return
            if not (self._join() if depth else self._halve(bits)):
                return

    def _halve(self, bits: int) -> bool:
        """Replace the only index block by a smaller one; return whether there was one."""
        size = (index.SLOT_BYTES << bits) // 2
        if bits <= NO_BLOCK_BITS or (low := self._urgent_block(size)) is None:
            return False
        block = int(self.root[2])
        self._split(block, low, 0, bits - 1, 0)
        self.root = np.array([0, bits - 1, low], np.int64)
        self._give_block(block, 2 * size)
        return True

    def _join(self) -> bool:
        """Join the first pair of index blocks that fits well into one; return whether one did."""
        depth, bits = int(self.root[0]), int(self.root[1])
        size = index.SLOT_BYTES << bits
        blocks, firsts, counts = np.unique(self.root[2:], return_index=True, return_counts=True)
        place = {int(f): (int(b), int(c)) for b, f, c in zip(blocks, firsts, counts, strict=True)}
        for first, (block, count) in sorted(place.items()):
            other, other_count = place.get(first + count, (0, 0))
            if first % (2 * count) or other_count != count:
                continue
            live = sum(index.live_slots(self.arena.data, b, bits) for b in (block, other))
            if 4 * live > 1 << bits:
                continue
            if (low := self._urgent_block(size)) is None:
                return False
            local = depth - count.bit_length()
            self._split(block, low, 0, bits, local)
            self._split(other, low, 0, bits, local)
            self.root[2 + first : 2 + first + 2 * count] = low
            others = (c for f, (_, c) in place.items() if f not in (first, first + count))
            if min(others, default=2) > 1:  # no block needs the last bit of the prefix any more
                head = np.array([depth - 1, bits], np.int64)
                self.root = np.concatenate([head, self.root[2::2]])
            self._give(block, size)
            self._give(other, size)
            return True
        return False

    def _urgent_block(self, size: int) -> int | None:
        block = self.arena.alloc(size, urgent=True)
        return None if block is None else self._block(lambda _: block, size)

    # ---------------------------------------------------------------------------------- cleaning

    def clean_some(self, written: int, horizon: int, flushed: int) -> None:
        """Clean in proportion to the bytes written, if there is enough garbage."""
        limit = CLEAN_BYTES + 4 * written
        while limit > 0 and len(self.segments) > 1 and self._is_dirty():
            done = self._clean_oldest(limit, horizon, flushed)
            if not done:
                return
            limit -= done

    def _is_dirty(self) -> bool:
        return self.garbage > max(CLEAN_BYTES_MIN, self._segment_bytes // GARBAGE_SHARE)

    def evictable(self, flushed: int) -> bool:
        """Whether `evict` would drop a segment."""
        return any(segment.newest < flushed for segment in self._idle_segments())

    def evict(self, wanted: int, horizon: int, flushed: int) -> int:
        """Drop segments whose rows are all flushed, oldest first; return the bytes retired.

        `wanted` of all bytes or more drops all rows at once if all are flushed.
        """
        before = self.bytes
        idle = self._idle_segments()
        whole = len(idle) == len(self.segments) and all(s.newest < flushed for s in idle)
        if whole and wanted >= self.bytes:
            self._drop_all()
            return before
        for segment in idle:
            if before - self.bytes >= wanted:
                break
            if segment.newest < flushed:
                self._clean_piece(segment, segment.used, horizon, flushed, evict=True)
                self._drop(segment)
        if not self.segments:
            self._drop_all()
        elif not self._writing:
            self._shrink()
        return before - self.bytes

    def _idle_segments(self) -> list[MemorySegment]:
        """Return the segments that no put under way writes to."""
        idle = list(self.segments)
        return idle[:-1] if self._writing else idle

    def _drop_all(self) -> None:
        """Retire all memory."""
        size = index.SLOT_BYTES << int(self.root[1])
        blocks = np.unique(self.root[2:])
        self.root = _empty_root()
        for block in blocks:
            self._give_block(int(block), size)
        while self.segments:
            self._drop(self.segments[0])
        self.keys = self.garbage = self._slots_left = 0

    def _clean_oldest(self, limit: int, horizon: int, flushed: int) -> int:
        """Clean up to `limit` bytes of the oldest segment; return how many, 0 without room."""
        victim = self.segments[0]
        begin, stop = victim.cleaned, min(victim.used, victim.cleaned + limit)
        while victim.cleaned < stop:
            self._clean_piece(victim, stop, horizon, flushed, evict=False)
            if victim.cleaned < stop and not self._urgent_segment(victim):
                return 0
        if victim.cleaned >= victim.used:
            self._drop(victim)
        return max(1, victim.cleaned - begin)

    def _drop(self, segment: MemorySegment) -> None:
        self.segments.remove(segment)
        self._segment_bytes -= segment.size
        self._give(segment.start, segment.size)

    def _clean_piece(
        self, victim: MemorySegment, stop: int, horizon: int, flushed: int, *, evict: bool
    ) -> None:
        """Clean up to `stop`, or until the last segment is full."""
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

    def _urgent_segment(self, victim: MemorySegment) -> bool:
        """Begin a segment for cleaning, from the reserve; return whether there was memory."""
        size = self.arena.size_of(victim.used - victim.cleaned)
        start = self.arena.alloc(size, urgent=True)
        if start is not None:
            self._add_segment(start, size)
        return start is not None

    # ------------------------------------------------------------------------------- other views

    def mark(self) -> tuple[int, int]:
        """Return where the next entry goes: number of the segment and position."""
        if not self.segments:
            return self._numbers, 0
        last = self.segments[-1]
        return last.number, last.used

    def versions_since(self, number: int, position: int) -> Positions:
        """Return the entries appended since a mark, in order."""
        parts = [np.empty(0, np.int64)]
        for segment in self.segments:
            if segment.number >= number:
                start = max(position, segment.start) if segment.number == number else segment.start
                parts.append(self._walk(start, segment.used))
        return np.concatenate(parts)

    def versions_in(self, number: int, mark: tuple[int, int]) -> Positions:
        """Return the entries of a segment before a mark; none if the segment is gone."""
        for segment in self.segments:
            if segment.number == number:
                end = min(segment.used, mark[1]) if number == mark[0] else segment.used
                return self._walk(segment.start, end)
        return np.empty(0, np.int64)

    def bytes_from(self, offset: int) -> int:
        """Return the bytes of the segments with entries of this log offset or later."""
        return sum(s.used - s.start for s in self.segments if s.newest >= offset)

    def heads(self) -> Positions:
        """Return the newest version of every key, in no order."""
        out = np.empty(self.keys, np.int64)
        count = 0
        for block in np.unique(self.root[2:]):
            count = index.heads(self.arena.data, int(block), int(self.root[1]), out, count)
            if count < 0:
                raise _damaged("an index block")
        return out[:count]

    def release(self) -> None:
        """Free all memory; there must be no more readers."""
        size = index.SLOT_BYTES << int(self.root[1])
        for block in np.unique(self.root[2:]):
            if block != NO_BLOCK:
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


def _empty_root() -> Positions:
    """Return the root of an index without keys and without memory."""
    return np.array([0, NO_BLOCK_BITS, NO_BLOCK], np.int64)


def _damaged(what: str) -> ZuflussError:
    return ZuflussError(
        f"key-value memory is damaged: {what} is not whole. The bucket's state is rebuilt from its "
        "log by a restart of the server"
    )
