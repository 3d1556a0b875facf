"""The keys in memory in order, for prefix lookups and limit scans; sorted at the first request.

The hash index has no order, and writers should not pay for requests that most tables never get. So
the sorted keys are copied out at the first request: the base. Later requests sort only the keys
appended since, the tail, until the tail is so large that a new base is worth it. Keys that were
deleted or dropped since may still be listed: callers look up every key.

Millions of keys take seconds to sort, and the worker has the puts of all tables to do. So a large
base is made beside it: `begin_base` in the worker, `BaseCopy.copy_some` in many short steps of the
worker, `BaseCopy.sort` in another thread, `take_base` in the worker. Until then requests get
`KeysNotSortedError`. A segment may vanish between two steps: what it had is then in the cold tier,
or was appended again and is in the tail.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from typing import Final

import numpy as np

from zufluss.kv.hot.memtable import Memtable
from zufluss.kv.hot.sorting import key_order, packed, spans_of
from zufluss.record.slices import Positions, Slices

TAIL_MIN: Final = 4096
"""Entries that the tail may have in any case."""

TAIL_SHARE: Final = 8
"""The tail may have one entry for this many of the base."""

SORTED_AT_ONCE: Final = 65_536
"""Keys that the worker sorts itself, and the most that the tail may have."""

SEGMENTS_AT_ONCE: Final = 4
"""Segments whose keys are copied in one step of the worker."""


class KeysNotSortedError(Exception):
    """The keys have to be sorted beside the worker first; then the request can be repeated."""


def successor(prefix: bytes) -> bytes | None:
    """Return the first byte string behind all that begin with `prefix`, None if there is none."""
    head = prefix.rstrip(b"\xff")
    return head[:-1] + bytes([head[-1] + 1]) if head else None


class BaseCopy:
    """The keys of a base that is being made."""

    def __init__(self, memtable: Memtable) -> None:
        self._memtable = memtable
        self.mark = memtable.mark()
        """What is appended from here on is not in the base."""
        self._left = [segment.number for segment in reversed(memtable.segments)]
        self._parts: list[Slices] = []
        self.keys = Slices.of(())
        """The sorted keys; a key may be there several times."""

    def copy_some(self) -> bool:
        """Copy the keys of the next segments, in the worker; returns whether there are more."""
        arena = self._memtable.arena.data
        for _ in range(min(SEGMENTS_AT_ONCE, len(self._left))):
            versions = self._memtable.versions_in(self._left.pop(), self.mark)
            starts, ends, _ = spans_of(arena, versions)
            self._parts.append(packed(Slices(arena, starts, ends)))
        return bool(self._left)

    def sort(self) -> None:
        """Sort the copied keys; any thread may do this."""
        sizes = [len(part.data) for part in self._parts]
        offsets = np.cumsum([0, *sizes])
        data = np.concatenate([np.empty(0, np.uint8), *(part.data for part in self._parts)])
        moved = list(zip(self._parts, offsets[:-1], strict=True))
        starts = np.concatenate([np.empty(0, np.int64), *(p.starts + at for p, at in moved)])
        ends = np.concatenate([np.empty(0, np.int64), *(p.ends + at for p, at in moved)])
        self._parts.clear()
        keys = Slices(data, starts, ends)
        self.keys = packed(keys.take(key_order(keys)))


class KeyOrder:
    """Sorted copies of the keys in memory. Belongs to the worker thread."""

    def __init__(self, memtable: Memtable) -> None:
        self._memtable = memtable
        self._base: Slices | None = None
        self._base_mark = (0, 0)
        self._tail: Slices = Slices.of(())
        self._tail_mark = (0, 0)
        self._room = 0
        """Entries that the tail may have before a new base is made."""

    def keys_from(self, low: bytes, high: bytes | None, limit: int) -> list[bytes]:
        """Return the first keys in [low, high), in order; some may have no row any more.

        Raises `KeysNotSortedError` if there are many to be sorted.
        """
        self._refresh()
        assert self._base is not None
        keys = _range(self._base, low, high, limit) + _range(self._tail, low, high, limit)
        return sorted(set(keys))[:limit]

    def forget(self) -> None:
        """Give up the copies; the next request sorts the keys again."""
        self._base, self._tail = None, Slices.of(())

    def begin_base(self) -> BaseCopy:
        """Begin to make a base of all keys."""
        return BaseCopy(self._memtable)

    def take_base(self, copy: BaseCopy) -> None:
        """Use a base that was copied and sorted."""
        self._base, self._base_mark = copy.keys, copy.mark
        self._tail, self._tail_mark = Slices.of(()), copy.mark
        # Keys appended while the base was made are sorted here in any case, or busy writers would
        # have it made again and again.
        appended = len(self._memtable.versions_since(*copy.mark))
        self._room = appended + self._share(copy.keys)

    def _share(self, base: Slices) -> int:
        return min(max(TAIL_MIN, base.count // TAIL_SHARE), SORTED_AT_ONCE)

    def _refresh(self) -> None:
        mark = self._memtable.mark()
        if self._base is not None and mark == self._tail_mark:
            return
        recent = self._memtable.versions_since(*self._base_mark)
        if self._base is None or len(recent) > self._room:
            if self._memtable.keys > SORTED_AT_ONCE:
                raise KeysNotSortedError
            self._base = self._sorted(self._memtable.heads())
            self._base_mark, self._room = mark, self._share(self._base)
            recent = recent[:0]
        self._tail = self._sorted(recent)
        self._tail_mark = mark

    def _sorted(self, versions: Positions) -> Slices:
        arena = self._memtable.arena.data
        starts, ends, _ = spans_of(arena, versions)
        keys = Slices(arena, starts, ends)
        return packed(keys.take(key_order(keys)))


def _range(keys: Slices, low: bytes, high: bytes | None, limit: int) -> list[bytes]:
    """Return the first keys in [low, high) of sorted ones, at most `limit` different ones."""

    def key_at(i: int) -> bytes:
        return keys.data[keys.starts[i] : keys.ends[i]].tobytes()

    places = range(keys.count)
    at = bisect_left(places, low, key=key_at)
    chosen: list[bytes] = []
    while at < keys.count and len(chosen) < limit:
        key = key_at(at)
        if high is not None and key >= high:
            break
        if chosen and key == chosen[-1]:
            at = bisect_right(places, key, lo=at, key=key_at)
        else:
            chosen.append(key)
            at += 1
    return chosen
