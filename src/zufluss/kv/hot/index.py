"""The hash index of a bucket: from a key to the newest version of its row.

Blocks of the index lie in the arena beside the entries (`entries.py` says what kernels promise
about it). Little-endian:

| index block  | type  | at       |                                                             |
|--------------|-------|----------|-------------------------------------------------------------|
| used         | i64   | 0        | slots that were ever taken; slot 0 is this header           |
| local depth  | i64   | 8        | leading hash bits that all keys of the block share          |
| hash         | i64   | 16 i     | of the key in slot i                                        |
| reference    | i64   | 16 i + 8 | newest version; 0 never taken, −1 dropped: probe further    |

| root         | type  | at       | (an int64 array outside the arena)                          |
|--------------|-------|----------|-------------------------------------------------------------|
| depth        | i64   | 0        | leading hash bits that choose a block                       |
| slot bits    | i64   | 1        | every block has 2^bits slots                                |
| blocks       | i64   | 2 …      | position of the block of each of the 2^depth hash prefixes  |

Blocks are split, and joined again, one at a time (extendible hashing), so an index of any size
grows and shrinks in steps of less than a millisecond. The trailing bits of the hash choose the
slot, probing is linear.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from zufluss.kv.hot.entries import HEADER_BYTES, OFFSET_AT, entry, padded, visible
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
from zufluss.record.kernels.memory import BYTES, load_i64, store_i64

DEPTH, SLOT_BITS, BLOCKS = range(3)
"""Where the fields of the root lie; the blocks are the rest of it."""

LOCAL_DEPTH_AT = 8
"""Where the local depth lies in a block, behind `used` at 0."""

SLOT_BYTES = 16
"""Bytes of one slot of a block."""

REFERENCE_AT = 8
"""Where the reference lies in a slot, behind the hash at 0."""

DEPTH_MAX, SLOT_BITS_MAX = 40, 30
"""Sizes from which on a root or a block is damaged."""

DROPPED = -1
"""Reference of a slot whose key is in the cold tier only."""

UNKNOWN = -2
"""Start of a value that is not in memory: the cold tier may have it."""

AHEAD = 32
"""Keys whose memory is prefetched together."""

PROBES_AHEAD = 6
"""Slots that prefetching looks at per key."""

FULL_TENTHS = 6
"""Tenths of its slots that a block fills before it is split."""

SUPERSEDED, ADDED = range(2)
"""What `publish` counts: bytes of versions that have a newer one now, keys that are new."""


@kernel(inline=True)
def _block(arena: Any, root: Any, hash: Any) -> Any:
    """Return the position of the index block of a hash, −1 if the root is damaged."""
    if root.size <= BLOCKS:
        return np.int64(-1)
    depth, slot_bits = root[DEPTH], root[SLOT_BITS]
    if not 0 <= depth < DEPTH_MAX or not 2 <= slot_bits < SLOT_BITS_MAX:
        return np.int64(-1)
    # Two shifts, since one by 64 (depth 0) is undefined.
    number = BLOCKS + ((hash >> 1 >> (63 - depth)) & ((np.int64(1) << depth) - 1))
    if number >= root.size:
        return np.int64(-1)
    block = root[number]
    if block < 0 or block & 7 or block + (np.int64(SLOT_BYTES) << slot_bits) > arena.size:
        return np.int64(-1)
    return block


@kernel(inline=True)
def find_slot(arena: Any, root: Any, hash: Any, data: Any, start: Any, size: Any) -> Any:
    """Find the key data[start:start + size].

    Returns the position of its slot, its newest version, and the position of the first slot on the
    way that the key could take. Each of the three is 0 if there is none.
    """
    block = _block(arena, root, hash)
    free = np.int64(0)
    if block < 0:
        return np.int64(0), np.int64(0), free
    mask = (np.int64(1) << root[SLOT_BITS]) - 1
    number = hash & mask
    for _ in range(mask):
        # Slot 0 is the header of the block.
        if number == 0:
            number = np.int64(1)
        slot = block + SLOT_BYTES * number
        version = observe(arena, slot + REFERENCE_AT)
        if version == 0:
            return np.int64(0), np.int64(0), free if free else slot
        if version == DROPPED:
            if free == 0:
                free = slot
        elif load_i64(arena, slot) == hash:
            # Hashes of different keys may be equal: the key of the entry decides.
            key_size, _value_size = entry(arena, version)
            if key_size == size and same(arena, version + HEADER_BYTES, data, start, size):
                return slot, version, free
        number = (number + 1) & mask
    return np.int64(0), np.int64(0), free


@kernel(inline=True)
def _fetch_ahead(arena: Any, root: Any, hashes: Any, begin: Any, end: Any) -> Any:
    """Prefetch the slots, then the entries of some keys: their cache misses overlap."""
    mask = (np.int64(1) << root[SLOT_BITS]) - 1
    for i in range(begin, end):
        block = _block(arena, root, hashes[i])
        if block >= 0:
            prefetch(arena, block + SLOT_BYTES * (hashes[i] & mask))
    # By now the first slots have arrived. Entries are guessed by hash alone: a wrong guess costs a
    # cache line. Two lines hold the header, the key and the beginning of most values.
    for i in range(begin, end):
        block = _block(arena, root, hashes[i])
        if block < 0:
            continue
        for step in range(PROBES_AHEAD):
            slot = block + SLOT_BYTES * ((hashes[i] + step) & mask)
            version = load_i64(arena, slot + REFERENCE_AT)
            if version == 0:
                break
            if load_i64(arena, slot) == hashes[i] and 0 < version < arena.size:
                prefetch(arena, version)
                prefetch(arena, min(version + 64, arena.size - 1))
                break


@kernel(inline=True)
def _locate(
    arena: Any, root: Any, hash: Any, data: Any, start: Any, size: Any, horizon: Any
) -> Any:
    """Return start and end of a key's value; start is `UNKNOWN`, or −1 if the key is deleted."""
    slot, version, _free = find_slot(arena, root, hash, data, start, size)
    if slot:
        version = visible(arena, version, horizon)
    if version == 0:
        return np.int64(UNKNOWN), np.int64(UNKNOWN)
    key_size, value_size = entry(arena, version)
    if value_size < 0:
        return np.int64(-1), np.int64(-1)
    value = version + HEADER_BYTES + key_size
    return value, value + value_size


@kernel(I64(ARENA, POSITIONS, BYTES, POSITIONS, POSITIONS, POSITIONS, I64, NUMBERS, NUMBERS))
def find(
    arena: Any,
    root: Any,
    data: Any,
    starts: Any,
    ends: Any,
    hashes: Any,
    horizon: Any,
    value_starts: Any,
    value_ends: Any,
) -> Any:
    """Find the values of keys; return how many are `UNKNOWN`, −1 if a key lies outside."""
    unknown = 0
    count = min(starts.size, ends.size, hashes.size, value_starts.size, value_ends.size)
    for i in range(count):
        if not inside(starts[i], ends[i], data.size):
            return -1
        if i % AHEAD == 0:
            _fetch_ahead(arena, root, hashes, i, min(i + AHEAD, count))
        size = ends[i] - starts[i]
        start, end = _locate(arena, root, hashes[i], data, starts[i], size, horizon)
        value_starts[i], value_ends[i] = start, end
        unknown += start == UNKNOWN
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
    value_starts: Any,
    value_ends: Any,
) -> Any:
    """Do as `find`, and hash the keys in the same call."""
    count = min(starts.size, ends.size, value_starts.size, value_ends.size)
    # The hashes lie where the starts of the values go: each is read before it is overwritten.
    for i in range(count):
        if not inside(starts[i], ends[i], data.size):
            return -1
        value_starts[i] = hash_key(data, starts[i], ends[i] - starts[i], seed)
    unknown = 0
    for i in range(count):
        if i % AHEAD == 0 and count > 1:
            _fetch_ahead(arena, root, value_starts, i, min(i + AHEAD, count))
        size = ends[i] - starts[i]
        start, end = _locate(arena, root, value_starts[i], data, starts[i], size, horizon)
        value_starts[i], value_ends[i] = start, end
        unknown += start == UNKNOWN
    return unknown


@kernel(I64(ARENA, POSITIONS, POSITIONS, NUMBERS))
def without_room(arena: Any, root: Any, hashes: Any, counts: Any) -> Any:
    """Return the number of the first key for which there may be no room, the count if none.

    Assumes that no key is in the index yet. `counts` are zeros, one for each element of the root;
    they get the keys of each block so far. Returns −1 if the index is damaged.
    """
    if counts.size < root.size or root.size <= BLOCKS:
        return -1
    depth = root[DEPTH]
    for i in range(hashes.size):
        block = _block(arena, root, hashes[i])
        if block < 0:
            return -1
        # Prefixes that share a block are counted together, at the first of them.
        shared = depth - load_i64(arena, block + LOCAL_DEPTH_AT)
        if not 0 <= shared <= depth:
            return -1
        prefix = (hashes[i] >> 1 >> (63 - depth)) & ((np.int64(1) << depth) - 1)
        first = prefix >> shared << shared
        counts[first] += 1
        used = load_i64(arena, block) + counts[first]
        if 10 * used > FULL_TENTHS * (np.int64(1) << root[SLOT_BITS]):
            return i
    return hashes.size


@kernel(I64(ARENA, POSITIONS, POSITIONS, POSITIONS, I64, NUMBERS))
def publish(arena: Any, root: Any, versions: Any, hashes: Any, horizon: Any, counts: Any) -> Any:
    """Make entries the newest versions of their keys; return how many.

    There must be room for all of them (`without_room`). Returns −1 if an entry or the index is
    damaged. `counts` gets what `SUPERSEDED` and `ADDED` say.
    """
    count = min(versions.size, hashes.size)
    for i in range(count):
        if i % AHEAD == 0:
            _fetch_ahead(arena, root, hashes, i, min(i + AHEAD, count))
        version = versions[i]
        key_size, _value_size = entry(arena, version)
        if key_size < 0:
            return -1
        key = version + HEADER_BYTES
        slot, older, free = find_slot(arena, root, hashes[i], arena, key, key_size)
        if slot:
            # A version below the horizon loses its own previous one: every reader stops at it.
            older_key_size, older_value_size = entry(arena, older)
            counts[SUPERSEDED] += padded(older_key_size, older_value_size)
            if load_i64(arena, older + OFFSET_AT) < horizon:
                release(arena, older, np.int64(0))
            store_i64(arena, version, older)
        else:
            # A slot that was never taken counts against the block; a dropped one counted before.
            block = _block(arena, root, hashes[i])
            if block < 0 or free == 0:
                return -1
            if load_i64(arena, free + REFERENCE_AT) == 0:
                store_i64(arena, block, load_i64(arena, block) + 1)
            store_i64(arena, free, hashes[i])
            counts[ADDED] += 1
            slot = free
        # Last of all: from here on readers meet the entry, which is whole.
        release(arena, slot + REFERENCE_AT, version)
    return count


@kernel(inline=True)
def _is_block(arena: Any, block: Any, slot_bits: Any) -> Any:
    """Whether a block of 2^`slot_bits` slots can lie at this position."""
    if block < 0 or not 0 <= slot_bits < SLOT_BITS_MAX:
        return False
    return block + (np.int64(SLOT_BYTES) << slot_bits) <= arena.size


@kernel(I64(ARENA, I64, I64))
def live_slots(arena: Any, block: Any, slot_bits: Any) -> Any:
    """Return how many slots of a block hold a key, −1 if no block can lie there."""
    if not _is_block(arena, block, slot_bits):
        return -1
    count = 0
    for number in range(1, np.int64(1) << slot_bits):
        count += load_i64(arena, block + SLOT_BYTES * number + REFERENCE_AT) > 0
    return count


@kernel(I64(ARENA, I64, I64, NUMBERS, I64))
def heads(arena: Any, block: Any, slot_bits: Any, out: Any, count: Any) -> Any:
    """Append the newest versions of a block's keys to `out`, which has `count` elements.

    Returns the new number of elements, −1 if no block can lie there or `out` is too short.
    """
    if not _is_block(arena, block, slot_bits):
        return -1
    for number in range(1, np.int64(1) << slot_bits):
        version = load_i64(arena, block + SLOT_BYTES * number + REFERENCE_AT)
        if version > 0:
            if count >= out.size:
                return -1
            out[count] = version
            count += 1
    return count


@kernel(I64(ARENA, I64, I64, I64, I64, I64, I64))
def split(
    arena: Any, block: Any, slot_bits: Any, low: Any, high: Any, new_bits: Any, depth: Any
) -> Any:
    """Copy the keys of a block to others of 2^`new_bits` slots; return how many keys, or −1.

    All go to `low` if `high` is 0. Otherwise the hash bit behind the first `depth` bits chooses
    between `low` and `high`. The others are zeros, or hold keys with the same first `depth` bits.
    Readers use the old block until the root refers to the new ones.
    """
    if not _is_block(arena, block, slot_bits) or not 0 <= depth < DEPTH_MAX:
        return -1
    if not _is_block(arena, low, new_bits) or not _is_block(arena, high, new_bits):
        return -1
    mask = (np.int64(1) << new_bits) - 1
    moved = 0
    for number in range(1, np.int64(1) << slot_bits):
        # Slots that were never taken or were dropped stay behind.
        version = load_i64(arena, block + SLOT_BYTES * number + REFERENCE_AT)
        if version <= 0:
            continue
        hash = load_i64(arena, block + SLOT_BYTES * number)
        target = high if high and (hash >> (63 - depth)) & 1 else low
        used = load_i64(arena, target) + 1
        if used > mask:
            return -1
        store_i64(arena, target, used)
        # Keys of one block differ, so the first empty slot is the right one.
        place = max(hash & mask, 1)
        for _ in range(mask):
            if load_i64(arena, target + SLOT_BYTES * place + REFERENCE_AT) == 0:
                break
            place = max((place + 1) & mask, 1)
        else:
            return -1
        store_i64(arena, target + SLOT_BYTES * place, hash)
        store_i64(arena, target + SLOT_BYTES * place + REFERENCE_AT, version)
        moved += 1
    new_depth = depth + 1 if high else depth
    store_i64(arena, low + LOCAL_DEPTH_AT, new_depth)
    if high:
        store_i64(arena, high + LOCAL_DEPTH_AT, new_depth)
    return moved
