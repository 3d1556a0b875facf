"""Entries in the order of their keys, and byte strings copied one behind the other.

Keys sort by unsigned bytes, as RocksDB sorts them: numpy sorts their first eight bytes as one
number; keys that are equal so far are sorted by their next eight bytes, and so on. Flushes and the
sorted keys of prefix lookups (`order.py`) need that order.
"""

from __future__ import annotations

from typing import Any, Final

import numpy as np

from zufluss.errors import LogStorageError
from zufluss.kv.hot.entries import HEADER_BYTES, entry
from zufluss.kv.hot.words import ARENA, I64, NUMBERS, POSITIONS, inside, short_word, swap
from zufluss.record.kernels.cache import kernel
from zufluss.record.kernels.memory import BYTES, copy
from zufluss.record.slices import Bytes, Positions, Slices

WORD_BYTES: Final = 8
"""Bytes by which keys are sorted in a round."""
ALIKE_BYTES: Final = 256
"""Keys that are equal for so many bytes are compared as a whole."""


def sort_by_key(arena: Bytes, versions: Positions) -> Positions:
    """Return entries in the order of their keys; `LogStorageError` if one is damaged."""
    starts, ends, _ = spans_of(arena, versions)
    return versions[key_order(Slices(arena, starts, ends))]


def key_order(keys: Slices) -> Positions:
    """Return the numbers of byte strings in their order; equal ones keep theirs."""
    order = np.arange(keys.count)
    # The places in `order` of strings that are equal to others so far, and the numbers of their
    # groups: strings of one group are equal so far, and the groups are in order.
    places, group = order.copy(), np.zeros(keys.count, np.int64)
    for at in range(0, ALIKE_BYTES, WORD_BYTES):
        if not len(places):
            return order
        some = keys.take(order[places])
        numbers = np.empty(some.count, np.int64)
        if words_at(some.data, some.starts, some.ends, at, numbers) < 0:
            raise ValueError(f"a byte string leaves its {len(some.data)} bytes")
        if int(some.lengths.max()) <= at + WORD_BYTES:
            # Zeros stand for missing bytes, so in the end lengths decide.
            order[places] = order[places][np.lexsort((some.lengths, numbers, group))]
            return order
        sorting = np.lexsort((numbers, group))  # by group first
        order[places] = order[places][sorting]
        numbers, group = numbers[sorting], group[sorting]
        begins = np.ones(len(places) + 1, np.bool_)
        begins[1:-1] = np.logical_or(numbers[1:] != numbers[:-1], group[1:] != group[:-1])
        tied = np.logical_not(begins[:-1] & begins[1:])
        places, group = places[tied], np.cumsum(begins[:-1], dtype=np.int64)[tied]
    names = keys.take(order[places]).tolist()
    order[places] = order[places][sorted(range(len(names)), key=lambda i: (group[i], names[i]))]
    return order


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


@kernel(I64(BYTES, POSITIONS, POSITIONS, I64, NUMBERS))
def words_at(data: Any, starts: Any, ends: Any, at: Any, out: Any) -> Any:
    """Write eight bytes of each byte string, from byte `at` on, as a number that sorts like them.

    Missing bytes count as zeros. Returns −1 if a byte string lies outside.
    """
    for i in range(min(starts.size, ends.size, out.size)):
        if not inside(starts[i], ends[i], data.size):
            return -1
        word = short_word(data, starts[i] + at, max(ends[i] - starts[i] - at, 0))
        # Big-endian, so that the first byte counts most; the flipped sign makes int64 compare as
        # unsigned.
        out[i] = swap(word) ^ np.int64(-(2**63))
    return out.size


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
