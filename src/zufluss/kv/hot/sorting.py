"""Kernels that bring entries into the order of their keys and copy them out.

Keys sort by unsigned bytes, as RocksDB sorts them: first by their leading eight bytes as one
number, which numpy does, then whole keys within a run of equal ones.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from zufluss.kv.hot.kernels import HEADER_BYTES, entry
from zufluss.kv.hot.words import ARENA, I64, NUMBERS, POSITIONS, inside, short_word, swap
from zufluss.record.kernels.cache import kernel
from zufluss.record.kernels.memory import BYTES, copy, load_u8

# --- order -------------------------------------------------------------------------------------


@kernel(I64(ARENA, POSITIONS, NUMBERS))
def prefixes(arena: Any, refs: Any, out: Any) -> Any:
    """The first eight bytes of each key as a number that sorts like them; −1 a fault."""
    for i in range(min(refs.size, out.size)):
        key, _value = entry(arena, refs[i])
        if key < 0:
            return -1
        word = short_word(arena, refs[i] + HEADER_BYTES, key)
        out[i] = swap(word) ^ np.int64(-(2**63))
    return refs.size


@kernel()
def _before(arena: Any, one: Any, other: Any) -> Any:
    """Whether the key of an entry sorts before that of another, in unsigned byte order."""
    left, _value = entry(arena, one)
    right, _value = entry(arena, other)
    for i in range(min(left, right)):
        a = load_u8(arena, one + HEADER_BYTES + i)
        b = load_u8(arena, other + HEADER_BYTES + i)
        if a != b:
            return a < b
    return left < right


@kernel()
def _merge_sort(arena: Any, refs: Any, begin: Any, end: Any, scratch: Any) -> Any:
    """Sort refs[begin:end] by key, keeping the order of equal ones."""
    width = 1
    while width < end - begin:
        for low in range(begin, end, 2 * width):
            middle, high = min(low + width, end), min(low + 2 * width, end)
            left, right = low, middle
            for k in range(low, high):
                if left < middle and (right >= high or not _before(arena, refs[right], refs[left])):
                    scratch[k] = refs[left]
                    left += 1
                else:
                    scratch[k] = refs[right]
                    right += 1
        for k in range(begin, end):
            refs[k] = scratch[k]
        width *= 2


@kernel(I64(ARENA, NUMBERS, POSITIONS, NUMBERS))
def sort_ties(arena: Any, refs: Any, keys: Any, scratch: Any) -> Any:
    """Bring entries that are sorted by their prefixes (`keys`) into the order of whole keys."""
    n = min(refs.size, keys.size, scratch.size)
    begin = 0
    for i in range(1, n + 1):
        if i == n or keys[i] != keys[begin]:
            if i - begin > 1:
                _merge_sort(arena, refs, begin, i, scratch)
            begin = i
    return n


@kernel(I64(ARENA, POSITIONS, NUMBERS))
def spans(arena: Any, refs: Any, out: Any) -> Any:
    """Key start, value start and value end (−1: deleted) of each entry; −1 a fault."""
    if out.size < 3 * refs.size:
        return -1
    for i in range(refs.size):
        key, value = entry(arena, refs[i])
        if key < 0:
            return -1
        start = refs[i] + HEADER_BYTES
        out[3 * i] = start
        out[3 * i + 1] = start + key
        out[3 * i + 2] = start + key + value if value >= 0 else -1
    return refs.size


@kernel(I64(BYTES, POSITIONS, POSITIONS, ARENA))
def copy_out(data: Any, starts: Any, ends: Any, out: Any) -> Any:
    """Copy byte strings one behind the other, absent ones as nothing; −1 if one lies outside."""
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
