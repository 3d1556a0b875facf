"""Kernels that go through a segment of entries and ask the index about each: cleaning, flushing.

A segment is a run of entries in the order in which they were appended (`entries.py`). An entry is
of use while a reader may see it: it is the newest version of its key below some reader's horizon.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from zufluss.kv.hot.entries import (
    CHAIN_MAX,
    HEADER_BYTES,
    OFFSET_AT,
    PAIR,
    entry,
    padded,
    visible,
)
from zufluss.kv.hot.index import DROPPED, REFERENCE_AT, find_slot
from zufluss.kv.hot.words import ARENA, I64, NUMBERS, POSITIONS, hash_key, observe, release
from zufluss.record.kernels import types
from zufluss.record.kernels.cache import kernel
from zufluss.record.kernels.memory import copy, load_i64, store_i64

USELESS, FORGOTTEN = range(2)
"""What `clean` counts: bytes of versions that no reader sees, keys dropped from the index."""


@kernel(inline=True)
def _newer(arena: Any, head: Any, version: Any, horizon: Any) -> Any:
    """Return the version right above `version` in its chain; 0: it is the head, −1: unseen.

    Walks from the head to the newest version below the horizon and cuts the chain there: no reader
    goes further.
    """
    above = np.int64(0)
    for _ in range(CHAIN_MAX):
        if head == version:
            return above
        key_size, _value_size = entry(arena, head)
        if key_size < 0:
            return np.int64(-1)
        if load_i64(arena, head + OFFSET_AT) < horizon:
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
    target: Any,
    target_end: Any,
    horizon: Any,
    flushed: Any,
    evict: Any,
    counts: Any,
) -> Any:
    """Empty the part [at, end) of a segment: copy entries of use to [target, target_end).

    The cold tier has the entries below offset `flushed` too: with `evict` they are dropped, and
    deletes among them always. Stops when the target is full. Returns the next position (−1 if an
    entry is damaged) and the next position to copy to. `counts` gets what `USELESS` and
    `FORGOTTEN` say.
    """
    if target < 8 or target & 7 or target_end > arena.size or end > arena.size:
        return np.int64(-1), target
    while at < end:
        key_size, value_size = entry(arena, at)
        if key_size < 0:
            return np.int64(-1), target
        size = padded(key_size, value_size)
        key = at + HEADER_BYTES
        hash = hash_key(arena, key, key_size, seed)
        slot, head, _free = find_slot(arena, root, hash, arena, key, key_size)
        above = _newer(arena, head, at, horizon) if slot else np.int64(-1)
        if above >= 0:
            # Whatever refers to the entry, a newer version or the slot, is to refer to its copy.
            place = above if above else slot + REFERENCE_AT
            offset = load_i64(arena, at + OFFSET_AT)
            if offset < flushed and (evict or value_size < 0):
                release(arena, place, np.int64(0) if above else np.int64(DROPPED))
                counts[FORGOTTEN] += above == 0
            else:
                if target + size > target_end:
                    break
                copy(arena, target, arena, at, size)
                if offset < horizon:
                    store_i64(arena, target, np.int64(0))
                release(arena, place, target)
                target += size
        else:
            counts[USELESS] += size
        at += size
    return at, target


@kernel(I64(ARENA, POSITIONS, I64, I64, I64, I64, I64, NUMBERS))
def select(
    arena: Any, root: Any, seed: Any, at: Any, end: Any, flushed: Any, horizon: Any, out: Any
) -> Any:
    """List the entries of [at, end) that a flush up to `horizon` must write.

    These are the newest versions below `horizon` with an offset from `flushed` on. Returns how
    many, −1 if an entry is damaged.
    """
    count = 0
    while at < end and count < out.size:
        key_size, value_size = entry(arena, at)
        if key_size < 0:
            return -1
        if flushed <= load_i64(arena, at + OFFSET_AT) < horizon:
            key = at + HEADER_BYTES
            hash = hash_key(arena, key, key_size, seed)
            slot, head, _free = find_slot(arena, root, hash, arena, key, key_size)
            if slot and visible(arena, head, horizon) == at:
                out[count] = at
                count += 1
        at += padded(key_size, value_size)
    return count
