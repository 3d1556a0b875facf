"""Buckets of many encoded keys at once.

Key i is `data[offsets[i]:offsets[i + 1]]`, and its bucket goes to `out[i]`. The formulas stand
in `zufluss.record.keys.hash`, the plain-Python twin is `tests/record/keys/plain_hash.py`. A kernel
never reads outside `data`: it ends at offsets that fall or leave the buffer, and returns the number
of keys done, so `result == len(offsets) - 1` means success.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from zufluss.record.kernels import types
from zufluss.record.kernels.cache import kernel

_BYTES = types.Array(types.uint8, 1, "C", readonly=True)
_OFFSETS = types.Array(types.int64, 1, "C", readonly=True)
_OUT = types.Array(types.int32, 1, "C")

_C1 = np.uint32(0xCC9E2D51)
_C2 = np.uint32(0x1B873593)
_FIVE = np.uint32(5)
_ADD = np.uint32(0xE6546B64)
_MIX1 = np.uint32(0x85EBCA6B)
_MIX2 = np.uint32(0xC2B2AE35)


@kernel(types.uint32(types.uint32, types.uint32))
def _rotate_left(word: Any, bits: Any) -> Any:
    return np.uint32((word << bits) | (word >> np.uint32(np.uint32(32) - bits)))


@kernel(types.uint32(types.uint32))
def _scramble(word: Any) -> Any:
    return np.uint32(_rotate_left(np.uint32(word * _C1), np.uint32(15)) * _C2)


@kernel(types.uint32(types.uint32, types.uint32))
def _mix(state: Any, word: Any) -> Any:
    return np.uint32(_rotate_left(np.uint32(state ^ word), np.uint32(13)) * _FIVE + _ADD)


@kernel(types.uint32(types.uint32))
def _final(state: Any) -> Any:
    state = np.uint32(state ^ (state >> np.uint32(16)))
    state = np.uint32(state * _MIX1)
    state = np.uint32(state ^ (state >> np.uint32(13)))
    state = np.uint32(state * _MIX2)
    return np.uint32(state ^ (state >> np.uint32(16)))


@kernel(types.uint32(_BYTES, types.int64))
def _word(data: Any, pos: Any) -> Any:
    return np.uint32(
        np.uint32(data[pos])
        | (np.uint32(data[pos + 1]) << np.uint32(8))
        | (np.uint32(data[pos + 2]) << np.uint32(16))
        | (np.uint32(data[pos + 3]) << np.uint32(24))
    )


@kernel(types.uint32(_BYTES, types.int64, types.int64, types.uint32))
def _words(data: Any, start: Any, end: Any, seed: Any) -> Any:
    """Murmur state after all whole 4-byte words."""
    state = seed
    for pos in range(start, start + (end - start) // 4 * 4, 4):
        state = _mix(state, _scramble(_word(data, pos)))
    return state


@kernel(types.uint32(_BYTES, types.int64, types.int64, types.boolean))
def _fluss_hash(data: Any, start: Any, end: Any, signed: Any) -> Any:
    """Fluss's variant: every tail byte is mixed as a word, with or without its sign."""
    state = _words(data, start, end, np.uint32(42))
    for pos in range(start + (end - start) // 4 * 4, end):
        tail = np.uint32(data[pos])
        if signed and tail >= np.uint32(0x80):
            tail = np.uint32(tail | np.uint32(0xFFFFFF00))
        state = _mix(state, _scramble(tail))
    return _final(np.uint32(state ^ np.uint32(end - start)))


@kernel(types.uint32(_BYTES, types.int64, types.int64))
def _standard_hash(data: Any, start: Any, end: Any) -> Any:
    """Standard Murmur3: the tail bytes are one short word, which is not mixed."""
    state = _words(data, start, end, np.uint32(0))
    tail = start + (end - start) // 4 * 4
    if tail < end:
        word = np.uint32(0)
        for pos in range(tail, end):
            word = np.uint32(word | (np.uint32(data[pos]) << np.uint32(8 * (pos - tail))))
        state = np.uint32(state ^ _scramble(word))
    return _final(np.uint32(state ^ np.uint32(end - start)))


@kernel(types.int64(types.uint32, types.int64))
def _fluss_bucket(hash_code: Any, buckets: Any) -> Any:
    """Fluss hashes the hash code once more; the least integer has no magnitude in Java."""
    mixed = _mix(np.uint32(0), _scramble(hash_code))
    second = np.int64(np.int32(_final(np.uint32(mixed ^ np.uint32(4)))))
    if second == -2147483648:
        return np.int64(0)
    return abs(second) % buckets


@kernel(types.int64(_BYTES, _OFFSETS, types.int64, types.boolean, types.boolean, _OUT))
def fluss_buckets(data: Any, offsets: Any, buckets: Any, signed: Any, paimon: Any, out: Any) -> Any:
    """Write the buckets of Fluss keys, or with `paimon` of Paimon keys; returns the keys done.

    `signed`: tail bytes have a sign, as in Java clients.
    """
    count = min(len(offsets) - 1, len(out))
    for key in range(count):
        start, end = offsets[key], offsets[key + 1]
        if start < 0 or end < start or end > len(data):
            return key
        hash_code = _fluss_hash(data, start, end, signed)
        if paimon:
            out[key] = np.int32(abs(np.int64(np.int32(hash_code))) % buckets)
        else:
            out[key] = np.int32(_fluss_bucket(hash_code, buckets))
    return count


@kernel(types.int64(_BYTES, _OFFSETS, types.int64, _OUT))
def iceberg_buckets(data: Any, offsets: Any, buckets: Any, out: Any) -> Any:
    """Write the buckets of Iceberg keys; returns the keys done."""
    count = min(len(offsets) - 1, len(out))
    for key in range(count):
        start, end = offsets[key], offsets[key + 1]
        if start < 0 or end < start or end > len(data):
            return key
        hash_code = _standard_hash(data, start, end) & np.uint32(0x7FFFFFFF)
        out[key] = np.int32(np.int64(hash_code) % buckets)
    return count
