"""Entries in the order of their keys, and byte strings copied one behind the other.

Keys sort by unsigned bytes, as RocksDB sorts them: numpy sorts their leading eight bytes as one
number, then a kernel sorts whole keys within each run of equal numbers. Flushes and the sorted keys
of prefix lookups (`order.py`) need that order.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from zufluss.errors import LogStorageError
from zufluss.kv.hot.entries import HEADER_BYTES, entry
from zufluss.kv.hot.words import ARENA, I64, NUMBERS, POSITIONS, inside, short_word, swap
from zufluss.record.kernels.cache import kernel
from zufluss.record.kernels.memory import BYTES, copy, load_u8
from zufluss.record.slices import Bytes, Positions, Slices


def sort_by_key(arena: Bytes, versions: Positions) -> Positions:
    """Return entries in the order of their keys; `LogStorageError` if one is damaged."""
    key_words = np.empty(len(versions), np.int64)
    if prefixes(arena, versions, key_words) < 0:
        raise LogStorageError("key-value memory is damaged: an entry to be sorted is not whole")
    order = np.argsort(key_words, kind="stable")
    versions, key_words = versions[order], key_words[order]
    sort_ties(arena, versions, key_words, np.empty(len(versions), np.int64))
    return versions


def spans_of(arena: Bytes, versions: Positions) -> tuple[Positions, Positions, Positions]:
    """Return where keys start, where values start and where values end (−1: deleted)."""
    out = np.empty(3 * len(versions), np.int64)
    if spans(arena, versions, out) < 0:
        raise LogStorageError("key-value memory is damaged: an entry to be copied is not whole")
    key_starts, value_starts, value_ends = np.ascontiguousarray(out.reshape(-1, 3).T)
    return key_starts, value_starts, value_ends


def packed(slices: Slices) -> Slices:
    """Copy byte strings to a buffer of their own, one behind the other; absent ones stay absent."""
    present = slices.starts >= 0
    sizes = np.where(present, slices.ends - slices.starts, 0)
    ends = np.cumsum(sizes)
    out = np.empty(int(ends[-1]) if len(ends) else 0, np.uint8)
    if copy_out(slices.data, slices.starts, slices.ends, out) < 0:
        raise ValueError(f"a byte string leaves its {len(slices.data)} bytes")
    return Slices(out, np.where(present, ends - sizes, slices.starts), ends)


@kernel(I64(ARENA, POSITIONS, NUMBERS))
def prefixes(arena: Any, versions: Any, out: Any) -> Any:
    """Write the first eight bytes of each key as a number that sorts like them; −1 for a fault."""
    for i in range(min(versions.size, out.size)):
        key_size, _value_size = entry(arena, versions[i])
        if key_size < 0:
            return -1
        # Big-endian, so that the first byte counts most; the flipped sign makes int64 compare as
        # unsigned.
        word = short_word(arena, versions[i] + HEADER_BYTES, key_size)
        out[i] = swap(word) ^ np.int64(-(2**63))
    return versions.size


@kernel()
def _before(arena: Any, left: Any, right: Any) -> Any:
    """Whether the key of one entry sorts before that of another, in unsigned byte order."""
    left_size, _value_size = entry(arena, left)
    right_size, _value_size = entry(arena, right)
    for i in range(min(left_size, right_size)):
        left_byte = load_u8(arena, left + HEADER_BYTES + i)
        right_byte = load_u8(arena, right + HEADER_BYTES + i)
        if left_byte != right_byte:
            return left_byte < right_byte
    return left_size < right_size


@kernel()
def _merge_sort(arena: Any, versions: Any, begin: Any, end: Any, scratch: Any) -> Any:
    """Sort versions[begin:end] by key; equal keys keep their order."""
    width = 1
    while width < end - begin:
        # Merge neighbouring sorted runs of `width` entries into `scratch`, then copy them back.
        for low in range(begin, end, 2 * width):
            middle, high = min(low + width, end), min(low + 2 * width, end)
            left, right = low, middle
            for place in range(low, high):
                if left < middle and (
                    right >= high or not _before(arena, versions[right], versions[left])
                ):
                    scratch[place] = versions[left]
                    left += 1
                else:
                    scratch[place] = versions[right]
                    right += 1
        for place in range(begin, end):
            versions[place] = scratch[place]
        width *= 2


@kernel(I64(ARENA, NUMBERS, POSITIONS, NUMBERS))
def sort_ties(arena: Any, versions: Any, key_words: Any, scratch: Any) -> Any:
    """Sort entries, which are sorted by their first eight bytes (`key_words`), by whole keys."""
    count = min(versions.size, key_words.size, scratch.size)
    begin = 0
    for i in range(1, count + 1):
        if i == count or key_words[i] != key_words[begin]:
            if i - begin > 1:
                _merge_sort(arena, versions, begin, i, scratch)
            begin = i
    return count


@kernel(I64(ARENA, POSITIONS, NUMBERS))
def spans(arena: Any, versions: Any, out: Any) -> Any:
    """Write key start, value start and value end (−1: deleted) of each entry; −1 for a fault."""
    if out.size < 3 * versions.size:
        return -1
    for i in range(versions.size):
        key_size, value_size = entry(arena, versions[i])
        if key_size < 0:
            return -1
        value_start = versions[i] + HEADER_BYTES + key_size
        out[3 * i] = versions[i] + HEADER_BYTES
        out[3 * i + 1] = value_start
        out[3 * i + 2] = value_start + value_size if value_size >= 0 else -1
    return versions.size


@kernel(I64(BYTES, POSITIONS, POSITIONS, ARENA))
def copy_out(data: Any, starts: Any, ends: Any, out: Any) -> Any:
    """Copy byte strings one behind the other, skip absent ones; −1 if one lies outside."""
    at = 0
    for i in range(min(starts.size, ends.size)):
        if starts[i] < 0:
            continue
        size = ends[i] - starts[i]
        if not inside(starts[i], ends[i], data.size) or at + size > out.size:
            return -1
        copy(out, at, data, starts[i], size)
        at += size
    return at
