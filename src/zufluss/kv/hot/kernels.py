"""Compiled loops of the KV store: keys to hashes and groups, keys to versions, versions to files.

All of them work on one byte array, the arena (`arena.py`), in which entries and the blocks
of the hash index lie side by side, so a reference is a position in it. Little-endian, entries
aligned to 8:

| entry        | type  | at      |                                                              |
|--------------|-------|---------|--------------------------------------------------------------|
| previous     | i64   | 0       | position of the next older version, 0 if there is none here  |
| offset       | i64   | 8       | base log offset of the write; −1: read from the cold tier    |
| key length   | i32   | 16      |                                                              |
| value length | i32   | 20      | −1: the key is deleted                                       |
| key, value   | bytes | 24      | padded to 8                                                  |

| index block  | type  | at      |                                                              |
|--------------|-------|---------|--------------------------------------------------------------|
| used         | i64   | 0       | slots that were ever taken; slot 0 is this header            |
| local depth  | i64   | 8       | leading hash bits that all keys of the block share           |
| hash         | i64   | 16 i    | of slot i                                                    |
| reference    | i64   | 16 i + 8| of the newest version; 0 never taken, −1 dropped: look on    |

| root         | type  | at      | (an int64 array of its own)                                  |
|--------------|-------|---------|--------------------------------------------------------------|
| depth        | i64   | 0       | leading hash bits that choose a block                        |
| slot bits    | i64   | 1       | every block has 2^bits slots                                 |
| blocks       | i64   | 2 …     | position of the block of each of the 2^depth prefixes        |

Blocks are split one at a time (extendible hashing), so an index of any size grows in steps of less
than a millisecond. The trailing bits of the hash choose the slot, probing is linear.

One thread writes; readers may run beside it. What they follow (references in slots, `previous`) is
stored with release and loaded with acquire order, after everything behind it is whole. Every
position taken from the arena is compared with its end before it is used and every chain walk is
bounded: a damaged arena gives wrong answers, never an access outside.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from zufluss.kv.hot.words import (
    ARENA,
    I64,
    NUMBERS,
    POSITIONS,
    hash_key,
    inside,
    observe,
    prefetch,
    release,
    same,
)
from zufluss.record.kernels.cache import kernel
from zufluss.record.kernels.memory import (
    BYTES,
    copy,
    load_i32,
    load_i64,
    store_i32,
    store_i64,
    types,
)

HEADER_BYTES = 24
"""Bytes of an entry before its key."""

SLOT_BYTES = 16
"""Bytes of one slot of the index."""

DROPPED = -1
"""Reference of a slot whose key was given up to the cold tier."""

UNKNOWN = -2
"""Start of a value that is not in memory: the cold tier may have it."""

CHAIN_MAX = 1 << 20
"""Versions of one key that a walk follows."""

AHEAD = 32
"""Keys whose memory is asked for before the first of them is looked at."""

PROBES_AHEAD = 6
"""Slots looked at for that."""

NEWEST = 2**63 - 1
"""Horizon of a reader that sees everything."""

SUPERSEDED, ADDED = range(2)
"""What `publish` counts: bytes of versions that have a newer one now, keys that are new."""

USELESS, FORGOTTEN = range(2)
"""What `clean` counts: bytes of versions nobody sees, keys dropped from the index."""

PAIR = types.UniTuple(types.int64, 2)


# --- entries -----------------------------------------------------------------------------------


@kernel(inline=True)
def entry(arena: Any, ref: Any) -> Any:
    """Key length and value length of an entry; key length −1 if none can lie there."""
    if ref < 8 or ref & 7 or ref + HEADER_BYTES > arena.size:
        return np.int64(-1), np.int64(0)
    key, value = load_i32(arena, ref + 16), load_i32(arena, ref + 20)
    if key < 0 or value < -1 or ref + HEADER_BYTES + key + max(value, 0) > arena.size:
        return np.int64(-1), np.int64(0)
    return key, value


@kernel(inline=True)
def padded(key: Any, value: Any) -> Any:
    """Bytes of an entry with a key and a value of these lengths (−1: none)."""
    return (HEADER_BYTES + key + max(value, 0) + 7) & ~7


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
    starts: Any,
    ends: Any,
    values: Any,
    value_starts: Any,
    value_ends: Any,
    offset: Any,
    begin: Any,
    refs: Any,
) -> Any:
    """Write whole entries from number `begin` on into [at, end), as many as fit.

    Returns the next number, −1 if a key or value lies outside its data, and the next position.
    """
    if at < 8 or at & 7 or end > arena.size:
        return np.int64(-1), at
    n = min(starts.size, ends.size, value_starts.size, value_ends.size, refs.size)
    for i in range(begin, n):
        key, value = ends[i] - starts[i], np.int64(-1)
        if not inside(starts[i], ends[i], keys.size):
            return np.int64(-1), at
        if value_starts[i] >= 0:
            if not inside(value_starts[i], value_ends[i], values.size):
                return np.int64(-1), at
            value = value_ends[i] - value_starts[i]
        size = padded(key, value)
        if at + size > end:
            return np.int64(i), at
        store_i64(arena, at, np.int64(0))
        store_i64(arena, at + 8, offset)
        store_i32(arena, at + 16, key)
        store_i32(arena, at + 20, value)
        copy(arena, at + HEADER_BYTES, keys, starts[i], key)
        if value > 0:
            copy(arena, at + HEADER_BYTES + key, values, value_starts[i], value)
        refs[i] = at
        at += size
    return np.int64(n), at


# --- the index ---------------------------------------------------------------------------------


@kernel(inline=True)
def _block(arena: Any, root: Any, hash: Any) -> Any:
    """Position of the index block of a hash, −1 if the root is damaged."""
    if root.size < 3 or not 0 <= root[0] < 40 or not 2 <= root[1] < 30:
        return np.int64(-1)
    number = 2 + ((hash >> 1 >> (63 - root[0])) & ((np.int64(1) << root[0]) - 1))
    if number >= root.size:
        return np.int64(-1)
    block = root[number]
    if block < 0 or block & 7 or block + (np.int64(SLOT_BYTES) << root[1]) > arena.size:
        return np.int64(-1)
    return block


@kernel(inline=True)
def _find(arena: Any, root: Any, hash: Any, data: Any, start: Any, size: Any) -> Any:
    """Find a key: position of its slot, its reference, position of a slot it could take; or 0."""
    block = _block(arena, root, hash)
    free = np.int64(0)
    if block < 0:
        return np.int64(0), np.int64(0), free
    mask = (np.int64(1) << root[1]) - 1
    i = hash & mask
    for _ in range(mask):
        if i == 0:
            i = np.int64(1)
        at = block + SLOT_BYTES * i
        ref = observe(arena, at + 8)
        if ref == 0:
            return np.int64(0), np.int64(0), free if free else at
        if ref == DROPPED:
            if free == 0:
                free = at
        elif load_i64(arena, at) == hash:
            key, _value = entry(arena, ref)
            if key == size and same(arena, ref + HEADER_BYTES, data, start, size):
                return at, ref, free
        i = (i + 1) & mask
    return np.int64(0), np.int64(0), free


@kernel(inline=True)
def _fetch_ahead(arena: Any, root: Any, hashes: Any, begin: Any, end: Any) -> Any:
    """Bring slots, then entries of some keys near, all at once instead of one after the other."""
    mask = (np.int64(1) << root[1]) - 1
    for i in range(begin, end):
        block = _block(arena, root, hashes[i])
        if block >= 0:
            prefetch(arena, block + SLOT_BYTES * (hashes[i] & mask))
    for i in range(begin, end):
        block = _block(arena, root, hashes[i])
        if block < 0:
            continue
        for step in range(PROBES_AHEAD):
            at = block + SLOT_BYTES * ((hashes[i] + step) & mask)
            ref = load_i64(arena, at + 8)
            if ref == 0:
                break
            if load_i64(arena, at) == hashes[i] and 0 < ref < arena.size:
                prefetch(arena, ref)
                prefetch(arena, min(ref + 64, arena.size - 1))
                break


@kernel(inline=True)
def _visible(arena: Any, ref: Any, horizon: Any) -> Any:
    """The newest version with an offset below the horizon, 0 if the chain has none."""
    for _ in range(CHAIN_MAX):
        key, _value = entry(arena, ref)
        if key < 0:
            return np.int64(0)
        if load_i64(arena, ref + 8) < horizon:
            return ref
        ref = observe(arena, ref)
    return np.int64(0)


@kernel(inline=True)
def _locate(
    arena: Any, root: Any, hash: Any, data: Any, start: Any, size: Any, horizon: Any
) -> Any:
    """Where the value of a key lies: start (`UNKNOWN`, −1 if deleted) and end."""
    slot, ref, _free = _find(arena, root, hash, data, start, size)
    if slot:
        ref = _visible(arena, ref, horizon)
    if ref == 0:
        return np.int64(UNKNOWN), np.int64(UNKNOWN)
    key, value = entry(arena, ref)
    if value < 0:
        return np.int64(-1), np.int64(-1)
    begin = ref + HEADER_BYTES + key
    return begin, begin + value


@kernel(I64(ARENA, POSITIONS, BYTES, POSITIONS, POSITIONS, POSITIONS, I64, NUMBERS, NUMBERS))
def find(
    arena: Any,
    root: Any,
    data: Any,
    starts: Any,
    ends: Any,
    hashes: Any,
    horizon: Any,
    out_starts: Any,
    out_ends: Any,
) -> Any:
    """Find the values of keys; return how many are `UNKNOWN`, −1 if a key lies outside."""
    unknown = 0
    n = min(starts.size, ends.size, hashes.size, out_starts.size, out_ends.size)
    for i in range(n):
        if not inside(starts[i], ends[i], data.size):
            return -1
        if i % AHEAD == 0:
            _fetch_ahead(arena, root, hashes, i, min(i + AHEAD, n))
        begin, end = _locate(arena, root, hashes[i], data, starts[i], ends[i] - starts[i], horizon)
        out_starts[i], out_ends[i] = begin, end
        unknown += begin == UNKNOWN
    return unknown


@kernel(I64(ARENA, POSITIONS, I64, BYTES, POSITIONS, POSITIONS, I64, NUMBERS, NUMBERS), short=True)
def look_up(
    arena: Any,
    root: Any,
    seed: Any,
    data: Any,
    starts: Any,
    ends: Any,
    horizon: Any,
    out_starts: Any,
    out_ends: Any,
) -> Any:
    """`find` with the hashing in the same call."""
    n = min(starts.size, ends.size, out_starts.size, out_ends.size)
    for i in range(n):
        if not inside(starts[i], ends[i], data.size):
            return -1
        out_starts[i] = hash_key(data, starts[i], ends[i] - starts[i], seed)
    unknown = 0
    for i in range(n):
        if i % AHEAD == 0 and n > 1:
            _fetch_ahead(arena, root, out_starts, i, min(i + AHEAD, n))
        size = ends[i] - starts[i]
        begin, end = _locate(arena, root, out_starts[i], data, starts[i], size, horizon)
        out_starts[i], out_ends[i] = begin, end
        unknown += begin == UNKNOWN
    return unknown


@kernel(I64(ARENA, POSITIONS, POSITIONS, POSITIONS, I64, I64, NUMBERS))
def publish(
    arena: Any, root: Any, refs: Any, hashes: Any, begin: Any, horizon: Any, counts: Any
) -> Any:
    """Make entries from number `begin` on the newest versions of their keys.

    Stops at a key whose block is full and returns its number; −1 if a reference is none. A version
    that everybody sees loses its own previous one: nobody will ask for that again.
    """
    n = min(refs.size, hashes.size)
    for i in range(begin, n):
        if i % AHEAD == 0 or i == begin:
            _fetch_ahead(arena, root, hashes, i, min(i + AHEAD, n))
        ref = refs[i]
        key, _value = entry(arena, ref)
        if key < 0:
            return -1
        slot, old, free = _find(arena, root, hashes[i], arena, ref + HEADER_BYTES, key)
        if slot:
            old_key, old_value = entry(arena, old)
            counts[SUPERSEDED] += padded(old_key, old_value)
            if load_i64(arena, old + 8) < horizon:
                release(arena, old, np.int64(0))
            store_i64(arena, ref, old)
        else:
            block = _block(arena, root, hashes[i])
            if block < 0:
                return -1
            if free == 0:
                return i
            if load_i64(arena, free + 8) == 0:
                used = load_i64(arena, block) + 1
                if 10 * used > 6 * (np.int64(1) << root[1]):
                    return i
                store_i64(arena, block, used)
            store_i64(arena, free, hashes[i])
            counts[ADDED] += 1
            slot = free
        release(arena, slot + 8, ref)
    return n


@kernel(I64(ARENA, I64, I64))
def live_slots(arena: Any, block: Any, bits: Any) -> Any:
    """How many slots of a block hold a key, −1 if it is no block."""
    if block < 0 or not 0 <= bits < 30 or block + (np.int64(SLOT_BYTES) << bits) > arena.size:
        return -1
    count = 0
    for i in range(1, np.int64(1) << bits):
        count += load_i64(arena, block + SLOT_BYTES * i + 8) > 0
    return count


@kernel(I64(ARENA, I64, I64, I64, I64, I64, I64))
def split(arena: Any, block: Any, bits: Any, low: Any, high: Any, new_bits: Any, depth: Any) -> Any:
    """Move the keys of a block into new ones of 2^`new_bits` slots; return how many, −1 a fault.

    All go to `low` if `high` is 0; else the hash bit behind the first `depth` decides.
    """
    size = np.int64(SLOT_BYTES) << new_bits
    if (
        block < 0
        or low < 0
        or high < 0
        or max(low, high) + size > arena.size
        or block + (np.int64(SLOT_BYTES) << bits) > arena.size
        or not 0 <= depth < 40
    ):
        return -1
    arena[low : low + size] = 0
    if high:
        arena[high : high + size] = 0
    mask = (np.int64(1) << new_bits) - 1
    moved = 0
    for i in range(1, np.int64(1) << bits):
        ref = load_i64(arena, block + SLOT_BYTES * i + 8)
        if ref <= 0:
            continue
        hash = load_i64(arena, block + SLOT_BYTES * i)
        to = high if high and (hash >> (63 - depth)) & 1 else low
        used = load_i64(arena, to) + 1
        if used > mask:
            return -1
        store_i64(arena, to, used)
        at = max(hash & mask, 1)
        while load_i64(arena, to + SLOT_BYTES * at + 8) != 0:
            at = max((at + 1) & mask, 1)
        store_i64(arena, to + SLOT_BYTES * at, hash)
        store_i64(arena, to + SLOT_BYTES * at + 8, ref)
        moved += 1
    inner = depth + 1 if high else depth
    store_i64(arena, low + 8, inner)
    if high:
        store_i64(arena, high + 8, inner)
    return moved


# --- segments ----------------------------------------------------------------------------------


@kernel(inline=True)
def _newer(arena: Any, head: Any, ref: Any, horizon: Any) -> Any:
    """The version right above `ref` in its chain: 0 if it is the head, −1 if nobody sees `ref`.

    Walks no further than the newest version that everybody sees, and cuts the chain there.
    """
    above = np.int64(0)
    for _ in range(CHAIN_MAX):
        if head == ref:
            return above
        key, _value = entry(arena, head)
        if key < 0:
            return np.int64(-1)
        if load_i64(arena, head + 8) < horizon:
            release(arena, head, np.int64(0))
            return np.int64(-1)
        above = head
        head = observe(arena, head)
    return np.int64(-1)


@kernel(PAIR(ARENA, POSITIONS, I64, I64, I64, I64, I64, I64, I64, types.boolean, NUMBERS))
def clean(
    arena: Any,
    root: Any,
    seed: Any,
    at: Any,
    end: Any,
    to: Any,
    to_end: Any,
    horizon: Any,
    flushed: Any,
    evict: Any,
    counts: Any,
) -> Any:
    """Empty the part [at, end) of a segment: copy what is still seen to [to, to_end).

    An entry below `flushed` is in the cold tier as well; with `evict` it is dropped, and a delete
    is dropped always. Stops when the room is used up; returns the next position (−1 a fault) and
    the next position to copy to.
    """
    if to < 8 or to & 7 or to_end > arena.size or end > arena.size:
        return np.int64(-1), to
    while at < end:
        key, value = entry(arena, at)
        if key < 0:
            return np.int64(-1), to
        size = padded(key, value)
        hash = hash_key(arena, at + HEADER_BYTES, key, seed)
        slot, head, _free = _find(arena, root, hash, arena, at + HEADER_BYTES, key)
        above = _newer(arena, head, at, horizon) if slot else np.int64(-1)
        if above >= 0:
            place = above if above else slot + 8
            offset = load_i64(arena, at + 8)
            if offset < flushed and (evict or value < 0):
                release(arena, place, np.int64(0) if above else np.int64(DROPPED))
                counts[FORGOTTEN] += above == 0
            else:
                if to + size > to_end:
                    break
                copy(arena, to, arena, at, size)
                if offset < horizon:
                    store_i64(arena, to, np.int64(0))
                release(arena, place, to)
                to += size
        else:
            counts[USELESS] += size
        at += size
    return at, to


@kernel(I64(ARENA, POSITIONS, I64, I64, I64, I64, I64, NUMBERS))
def select(
    arena: Any,
    root: Any,
    seed: Any,
    at: Any,
    end: Any,
    flushed: Any,
    horizon: Any,
    out: Any,
) -> Any:
    """The entries of [at, end) that a flush must write: newest below the horizon, not flushed."""
    count = 0
    while at < end and count < out.size:
        key, value = entry(arena, at)
        if key < 0:
            return -1
        if flushed <= load_i64(arena, at + 8) < horizon:
            hash = hash_key(arena, at + HEADER_BYTES, key, seed)
            slot, head, _free = _find(arena, root, hash, arena, at + HEADER_BYTES, key)
            if slot and _visible(arena, head, horizon) == at:
                out[count] = at
                count += 1
        at += padded(key, value)
    return count


@kernel(I64(ARENA, I64, I64, NUMBERS))
def walk(arena: Any, at: Any, end: Any, out: Any) -> Any:
    """Every entry of [at, end); returns how many, −1 a fault."""
    count = 0
    while at < end and count < out.size:
        key, value = entry(arena, at)
        if key < 0:
            return -1
        out[count] = at
        count += 1
        at += padded(key, value)
    return count


@kernel(I64(ARENA, I64, I64, NUMBERS, I64))
def heads(arena: Any, block: Any, bits: Any, out: Any, count: Any) -> Any:
    """Append the references of a block to `out`, which has `count`; returns how many it has."""
    if block < 0 or not 0 <= bits < 30 or block + (np.int64(SLOT_BYTES) << bits) > arena.size:
        return -1
    for i in range(1, np.int64(1) << bits):
        ref = load_i64(arena, block + SLOT_BYTES * i + 8)
        if ref > 0:
            if count >= out.size:
                return -1
            out[count] = ref
            count += 1
    return count
