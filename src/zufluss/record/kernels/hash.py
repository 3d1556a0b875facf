"""Bucket hashes over many encoded keys at once, compiled with numba.

Each kernel walks `offsets` (key i is `data[offsets[i]:offsets[i + 1]]`) and fills `out` with bucket
ids. The formulas and their plain-Python twin stand in `zufluss.record.keys.hash`; a property test
holds both equal. A kernel never reads outside `data`: offsets that fall or leave the buffer end it,
and the number of keys done is returned, so `result == len(offsets) - 1` means success.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import types

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
def _rotl(x: Any, r: Any) -> Any:
    return np.uint32((x << r) | (x >> np.uint32(np.uint32(32) - r)))


@kernel(types.uint32(types.uint32))
def _scramble(word: Any) -> Any:
    return np.uint32(_rotl(np.uint32(word * _C1), np.uint32(15)) * _C2)


@kernel(types.uint32(types.uint32, types.uint32))
def _mix(h: Any, k: Any) -> Any:
    return np.uint32(_rotl(np.uint32(h ^ k), np.uint32(13)) * _FIVE + _ADD)


@kernel(types.uint32(types.uint32))
def _final(h: Any) -> Any:
    h = np.uint32(h ^ (h >> np.uint32(16)))
    h = np.uint32(h * _MIX1)
    h = np.uint32(h ^ (h >> np.uint32(13)))
    h = np.uint32(h * _MIX2)
    return np.uint32(h ^ (h >> np.uint32(16)))


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
    """Murmur state after every whole 4-byte word."""
    h = seed
    for pos in range(start, start + (end - start) // 4 * 4, 4):
        h = _mix(h, _scramble(_word(data, pos)))
    return h


@kernel(types.uint32(_BYTES, types.int64, types.int64, types.boolean))
def _fluss_hash(data: Any, start: Any, end: Any, signed: Any) -> Any:
    h = _words(data, start, end, np.uint32(42))
    for pos in range(start + (end - start) // 4 * 4, end):
        tail = np.uint32(data[pos])
        if signed and tail >= np.uint32(0x80):
            tail = np.uint32(tail | np.uint32(0xFFFFFF00))
        h = _mix(h, _scramble(tail))
    return _final(np.uint32(h ^ np.uint32(end - start)))


@kernel(types.uint32(_BYTES, types.int64, types.int64))
def _standard_hash(data: Any, start: Any, end: Any) -> Any:
    h = _words(data, start, end, np.uint32(0))
    tail = start + (end - start) // 4 * 4
    if tail < end:
        k = np.uint32(0)
        for pos in range(tail, end):
            k = np.uint32(k | (np.uint32(data[pos]) << np.uint32(8 * (pos - tail))))
        h = np.uint32(h ^ _scramble(k))
    return _final(np.uint32(h ^ np.uint32(end - start)))


@kernel(types.int64(types.uint32, types.int64))
def _fluss_bucket(h: Any, buckets: Any) -> Any:
    g = np.int64(np.int32(_final(np.uint32(_mix(np.uint32(0), _scramble(h)) ^ np.uint32(4)))))
    if g == -2147483648:
        return np.int64(0)
    return abs(g) % buckets


@kernel(types.int64(_BYTES, _OFFSETS, types.int64, types.boolean, types.boolean, _OUT))
def fluss_buckets(data: Any, offsets: Any, buckets: Any, signed: Any, paimon: Any, out: Any) -> Any:
    """Buckets of Fluss (and, with `paimon`, of Paimon) keys; `signed` = as Java hashes tails."""
    count = min(len(offsets) - 1, len(out))
    for i in range(count):
        start, end = offsets[i], offsets[i + 1]
        if start < 0 or end < start or end > len(data):
            return i
        h = _fluss_hash(data, start, end, signed)
        if paimon:
            out[i] = np.int32(abs(np.int64(np.int32(h))) % buckets)
        else:
            out[i] = np.int32(_fluss_bucket(h, buckets))
    return count


@kernel(types.int64(_BYTES, _OFFSETS, types.int64, _OUT))
def iceberg_buckets(data: Any, offsets: Any, buckets: Any, out: Any) -> Any:
    """Buckets of Iceberg keys."""
    count = min(len(offsets) - 1, len(out))
    for i in range(count):
        start, end = offsets[i], offsets[i + 1]
        if start < 0 or end < start or end > len(data):
            return i
        h = _standard_hash(data, start, end) & np.uint32(0x7FFFFFFF)
        out[i] = np.int32(np.int64(h) % buckets)
    return count
