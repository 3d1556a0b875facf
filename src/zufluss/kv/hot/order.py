"""The keys in memory in order, for prefix lookups and scans; sorted at the first request.

The hash index has no order, and writers should not pay for requests that most tables never get. So
the sorted keys are copied out at the first request: the base. Later requests sort only the keys
appended since, the tail, until the tail is so large that a new base is worth it. Keys that were
deleted or dropped since may still be listed: callers look up every key.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right

from zufluss.kv.hot.memtable import Memtable
from zufluss.kv.hot.sorting import packed, sort_by_key, spans_of
from zufluss.record.slices import Positions, Slices

TAIL_MIN = 4096
"""Entries that the tail may have in any case."""

TAIL_SHARE = 8
"""The tail may have one entry for this many of the base."""


def successor(prefix: bytes) -> bytes | None:
    """Return the first byte string behind all that begin with `prefix`, None if there is none."""
    head = prefix.rstrip(b"\xff")
    return head[:-1] + bytes([head[-1] + 1]) if head else None


class KeyOrder:
    """Sorted copies of the keys in memory. Belongs to the worker thread."""

    def __init__(self, memtable: Memtable) -> None:
        self._memtable = memtable
        self._base: Slices | None = None
        self._base_mark = (0, 0)
        self._tail: Slices = Slices.of(())
        self._tail_mark = (0, 0)

    def keys_from(self, low: bytes, high: bytes | None, limit: int) -> list[bytes]:
        """Return the first keys in [low, high), in order; some may have no row any more."""
        self._refresh()
        assert self._base is not None
        keys = _range(self._base, low, high, limit) + _range(self._tail, low, high, limit)
        return sorted(set(keys))[:limit]

    def forget(self) -> None:
        """Give up the copies; the next request sorts the keys again."""
        self._base, self._tail = None, Slices.of(())

    def _refresh(self) -> None:
        mark = self._memtable.mark()
        if self._base is not None and mark == self._tail_mark:
            return
        recent = self._memtable.versions_since(*self._base_mark)
        room = TAIL_MIN if self._base is None else max(TAIL_MIN, self._base.count // TAIL_SHARE)
        if self._base is None or len(recent) > room:
            self._base = self._sorted(self._memtable.heads())
            self._base_mark = mark
            recent = recent[:0]
        self._tail = self._sorted(recent)
        self._tail_mark = mark

    def _sorted(self, versions: Positions) -> Slices:
        arena = self._memtable.arena.data
        starts, ends, _ = spans_of(arena, sort_by_key(arena, versions))
        return packed(Slices(arena, starts, ends))


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
