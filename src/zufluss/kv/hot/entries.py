"""Entries of the arena: one version of one key each, written once, read by position.

All kernels of this package work on one byte array, the arena (`arena.py`), in which entries and the
blocks of the hash index (`index.py`) lie side by side. A *version* is the position of an entry.
Little-endian, aligned to 8:

| field        | type  | at |                                                                     |
|--------------|-------|----|---------------------------------------------------------------------|
| previous     | i64   | 0  | the next older version of the same key, 0 if memory has none        |
| offset       | i64   | 8  | base log offset of the write; −1: the row came from the cold tier   |
| key length   | i32   | 16 |                                                                     |
| value length | i32   | 20 | −1: the key is deleted                                              |
| key, value   | bytes | 24 | padded to 8                                                         |

One thread writes; readers may run beside it. Readers follow `previous` and the references in index
slots. The writer stores both with release order, after everything behind them is complete; readers
load both with acquire order. Kernels compare every position taken from the arena with its end
before using it, and bound every walk along a chain of versions: a damaged arena gives wrong
answers, never an access outside.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from zufluss.kv.hot.words import ARENA, I64, NUMBERS, POSITIONS, inside, observe
from zufluss.record.kernels import types
from zufluss.record.kernels.cache import kernel
from zufluss.record.kernels.memory import (
    BYTES,
    copy,
    load_i32,
    load_i64,
    store_i32,
    store_i64,
)

OFFSET_AT, KEY_LENGTH_AT, VALUE_LENGTH_AT = 8, 16, 20
"""Where the fields of an entry lie, behind `previous` at 0."""

HEADER_BYTES = 24
"""Bytes of an entry before its key."""

CHAIN_MAX = 1 << 20
"""Versions of one key that a walk follows at most."""

NEWEST = 2**63 - 1
"""Horizon of a reader that sees every version."""

PAIR = types.UniTuple(types.int64, 2)


@kernel(inline=True)
def entry(arena: Any, version: Any) -> Any:
    """Return key length and value length of an entry; key length −1 if none can lie there."""
    if version < 8 or version & 7 or version + HEADER_BYTES > arena.size:
        return np.int64(-1), np.int64(0)
    key_size = load_i32(arena, version + KEY_LENGTH_AT)
    value_size = load_i32(arena, version + VALUE_LENGTH_AT)
    if key_size < 0 or value_size < -1:
        return np.int64(-1), np.int64(0)
    if version + HEADER_BYTES + key_size + max(value_size, 0) > arena.size:
        return np.int64(-1), np.int64(0)
    return key_size, value_size


@kernel(inline=True)
def padded(key_size: Any, value_size: Any) -> Any:
    """Return the bytes of an entry with a key and a value of these lengths (−1: no value)."""
    return (HEADER_BYTES + key_size + max(value_size, 0) + 7) & ~7


@kernel(inline=True)
def visible(arena: Any, version: Any, horizon: Any) -> Any:
    """Return the newest version with an offset below the horizon, 0 if the chain has none."""
    for _ in range(CHAIN_MAX):
        key_size, _value_size = entry(arena, version)
        if key_size < 0:
            return np.int64(0)
        if load_i64(arena, version + OFFSET_AT) < horizon:
            return version
        version = observe(arena, version)
    return np.int64(0)


@kernel(
    PAIR(
        ARENA, I64, I64, BYTES, POSITIONS, POSITIONS, BYTES, POSITIONS, POSITIONS, I64, I64, NUMBERS
    ),
    short=True,
)
def append(
    arena: Any,
    at: Any,
    end: Any,
    keys: Any,
    key_starts: Any,
    key_ends: Any,
    values: Any,
    value_starts: Any,
    value_ends: Any,
    offset: Any,
    begin: Any,
    versions: Any,
) -> Any:
    """Write entries for the keys from number `begin` on into [at, end), as many as fit.

    Returns the number of the next key and the next position. The number is −1 if a key or value
    lies outside its data.
    """
    if at < 8 or at & 7 or end > arena.size:
        return np.int64(-1), at
    count = min(key_starts.size, key_ends.size, value_starts.size, value_ends.size, versions.size)
    for i in range(begin, count):
        # Lengths come from the caller's slices, whose ends nobody has compared with the data yet.
        key_size, value_size = key_ends[i] - key_starts[i], np.int64(-1)
        if not inside(key_starts[i], key_ends[i], keys.size):
            return np.int64(-1), at
        if value_starts[i] >= 0:
            if not inside(value_starts[i], value_ends[i], values.size):
                return np.int64(-1), at
            value_size = value_ends[i] - value_starts[i]
        entry_size = padded(key_size, value_size)
        if at + entry_size > end:
            return np.int64(i), at
        # Header, key, value. Plain stores do: no slot of the index refers to the entry yet.
        store_i64(arena, at, np.int64(0))
        store_i64(arena, at + OFFSET_AT, offset)
        store_i32(arena, at + KEY_LENGTH_AT, key_size)
        store_i32(arena, at + VALUE_LENGTH_AT, value_size)
        copy(arena, at + HEADER_BYTES, keys, key_starts[i], key_size)
        if value_size > 0:
            copy(arena, at + HEADER_BYTES + key_size, values, value_starts[i], value_size)
        versions[i] = at
        at += entry_size
    return np.int64(count), at


@kernel(I64(BYTES, POSITIONS, POSITIONS, BYTES, POSITIONS, POSITIONS, NUMBERS), short=True)
def measure(
    keys: Any,
    key_starts: Any,
    key_ends: Any,
    values: Any,
    value_starts: Any,
    value_ends: Any,
    ends: Any,
) -> Any:
    """Return the bytes of the entries that `append` would write, −1 if a key or value lies outside.

    `ends` gets the running total.
    """
    total = np.int64(0)
    count = min(key_starts.size, key_ends.size, value_starts.size, value_ends.size, ends.size)
    for i in range(count):
        if not inside(key_starts[i], key_ends[i], keys.size):
            return np.int64(-1)
        value_size = np.int64(-1)
        if value_starts[i] >= 0:
            if not inside(value_starts[i], value_ends[i], values.size):
                return np.int64(-1)
            value_size = value_ends[i] - value_starts[i]
        total += padded(key_ends[i] - key_starts[i], value_size)
        ends[i] = total
    return total


@kernel(I64(ARENA, I64, I64, NUMBERS))
def walk(arena: Any, at: Any, end: Any, out: Any) -> Any:
    """List every entry of the segment part [at, end); return how many, −1 if one is damaged."""
    count = 0
    while at < end and count < out.size:
        key_size, value_size = entry(arena, at)
        if key_size < 0:
            return -1
        out[count] = at
        count += 1
        at += padded(key_size, value_size)
    return count
