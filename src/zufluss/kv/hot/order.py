"""The keys of a bucket in order, for prefix lookups and scans; built when somebody asks.

Memory finds rows by hash and says nothing about order, and writers should not pay for questions
that most tables never get. So the sorted keys are copied out at the first question. After that only
what was appended since is looked at: a sorted tail beside the sorted base, until the tail is large
enough that a new base is worth it. Keys that were deleted or dropped since may still be listed;
every key found here is looked up again anyway.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right

from zufluss.kv.hot.memtable import Memtable
from zufluss.kv.hot.sorting import packed, sort_by_key, spans_of
from zufluss.record.slices import Positions, Slices

TAIL_MIN = 4096
"""Entries that the tail may always have."""

TAIL_SHARE = 8
"""Beyond that, one part in so many of the base."""


def successor(prefix: bytes) -> bytes | None:
    """The first byte string behind all that begin with `prefix`, None if there is none."""
    kept = prefix.rstrip(b"\xff")
    return kept[:-1] + bytes([kept[-1] + 1]) if kept else None


class KeyOrder:
    """Sorted copies of the keys in memory. Belongs to the thread that writes."""

    def __init__(self, memtable: Memtable) -> None:
        self._memtable = memtable
        self._base: Slices | None = None
        self._base_mark = (0, 0)
        self._tail: Slices = Slices.of(())
        self._tail_mark = (0, 0)

    def keys_from(self, low: bytes, high: bytes | None, limit: int) -> list[bytes]:
        """The first keys in [low, high), in order; a key may be gone by now."""
        self._refresh()
        assert self._base is not None
        found = _range(self._base, low, high, limit) + _range(self._tail, low, high, limit)
        return sorted(set(found))[:limit]

    def _refresh(self) -> None:
        mark = self._memtable.mark()
        if self._base is not None and mark == self._tail_mark:
            return
        recent = self._memtable.refs_since(*self._base_mark)
        room = TAIL_MIN if self._base is None else max(TAIL_MIN, self._base.count // TAIL_SHARE)
        if self._base is None or len(recent) > room:
            self._base = self._sorted(self._memtable.heads())
            self._base_mark = mark
            recent = recent[:0]
        self._tail = self._sorted(recent)
        self._tail_mark = mark

    def _sorted(self, refs: Positions) -> Slices:
        arena = self._memtable.arena.data
        refs = sort_by_key(arena, refs)
        starts, ends, _ = spans_of(arena, refs)
        return packed(Slices(arena, starts, ends))


def _range(keys: Slices, low: bytes, high: bytes | None, limit: int) -> list[bytes]:
    """Keys in [low, high) out of sorted ones, at most `limit` different ones."""

    def key_at(i: int) -> bytes:
        return keys.data[keys.starts[i] : keys.ends[i]].tobytes()

    begin = bisect_left(range(keys.count), low, key=key_at)
    end = keys.count if high is None else bisect_left(range(keys.count), high, key=key_at)
    found: list[bytes] = []
    while begin < end and len(found) < limit:
        found.append(key_at(begin))
        begin += 1
        if begin < end and key_at(begin) == found[-1]:
            begin = bisect_right(range(end), found[-1], lo=begin, key=key_at)
    return found
