"""Bucket hashes over many encoded keys at once, compiled with numba.

Each kernel walks `offsets` (key i is `data[offsets[i]:offsets[i + 1]]`) and fills `out` with bucket
ids. The formulas and their plain-Python twin stand in `zufluss.record.hash`; a property test holds
both equal. A kernel never reads outside `data`: offsets that fall or leave the buffer end it, and
the number of keys done is returned, so `result == len(offsets) - 1` means success.
"""

from __future__ import annotations

import numba
import numpy as np
from numba import types

_BYTES = types.Array(types.uint8, 1, "C", readonly=True)
_OFFSETS = types.Array(types.int64, 1, "C", readonly=True)
_OUT = types.Array(types.int32, 1, "C")

_C1 = np.uint32(0xCC9E2D51)
_C2 = np.uint32(0x1B873593)
_FIVE = np.uint32(5)
_ADD = np.uint32(0xE6546B64)
_MIX1 = np.uint32(0x85EBCA6B)
_MIX2 = np.uint32(0xC2B2AE35)


@numba.njit(types.uint32(types.uint32, types.uint32), nogil=True, cache=True)
def _rotl(x, r):  # type: ignore[no-untyped-def]
    return np.uint32((x << r) | (x >> np.uint32(np.uint32(32) - r)))


@numba.njit(types.uint32(types.uint32), nogil=True, cache=True)
def _scramble(word):  # type: ignore[no-untyped-def]
    return np.uint32(_rotl(np.uint32(word * _C1), np.uint32(15)) * _C2)


@numba.njit(types.uint32(types.uint32, types.uint32), nogil=True, cache=True)
def _mix(h, k):  # type: ignore[no-untyped-def]
    return np.uint32(_rotl(np.uint32(h ^ k), np.uint32(13)) * _FIVE + _ADD)


@numba.njit(types.uint32(types.uint32), nogil=True, cache=True)
def _final(h):  # type: ignore[no-untyped-def]
    h = np.uint32(h ^ (h >> np.uint32(16)))
    h = np.uint32(h * _MIX1)
    h = np.uint32(h ^ (h >> np.uint32(13)))
    h = np.uint32(h * _MIX2)
    return np.uint32(h ^ (h >> np.uint32(16)))


@numba.njit(types.uint32(_BYTES, types.int64), nogil=True, cache=True)
def _word(data, pos):  # type: ignore[no-untyped-def]
    return np.uint32(
        np.uint32(data[pos])
        | (np.uint32(data[pos + 1]) << np.uint32(8))
        | (np.uint32(data[pos + 2]) << np.uint32(16))
        | (np.uint32(data[pos + 3]) << np.uint32(24))
    )


@numba.njit(types.uint32(_BYTES, types.int64, types.int64, types.uint32), nogil=True, cache=True)
def _words(data, start, end, seed):  # type: ignore[no-untyped-def]
    """Murmur state after every whole 4-byte word."""
    h = seed
    for pos in range(start, start + (end - start) // 4 * 4, 4):
        h = _mix(h, _scramble(_word(data, pos)))
    return h


@numba.njit(types.uint32(_BYTES, types.int64, types.int64, types.boolean), nogil=True, cache=True)
def _fluss_hash(data, start, end, signed):  # type: ignore[no-untyped-def]
    h = _words(data, start, end, np.uint32(42))
    for pos in range(start + (end - start) // 4 * 4, end):
        tail = np.uint32(data[pos])
        if signed and tail >= np.uint32(0x80):
            tail = np.uint32(tail | np.uint32(0xFFFFFF00))
        h = _mix(h, _scramble(tail))
    return _final(np.uint32(h ^ np.uint32(end - start)))


@numba.njit(types.uint32(_BYTES, types.int64, types.int64), nogil=True, cache=True)
def _standard_hash(data, start, end):  # type: ignore[no-untyped-def]
    h = _words(data, start, end, np.uint32(0))
    tail = start + (end - start) // 4 * 4
    if tail < end:
        k = np.uint32(0)
        for pos in range(tail, end):
            k = np.uint32(k | (np.uint32(data[pos]) << np.uint32(8 * (pos - tail))))
        h = np.uint32(h ^ _scramble(k))
    return _final(np.uint32(h ^ np.uint32(end - start)))


@numba.njit(types.int64(types.uint32, types.int64), nogil=True, cache=True)
def _fluss_bucket(h, buckets):  # type: ignore[no-untyped-def]
    g = np.int64(np.int32(_final(np.uint32(_mix(np.uint32(0), _scramble(h)) ^ np.uint32(4)))))
    if g == -2147483648:
        return np.int64(0)
    return abs(g) % buckets


@numba.njit(
    types.int64(_BYTES, _OFFSETS, types.int64, types.boolean, types.boolean, _OUT),
    nogil=True,
    cache=True,
)
def fluss_buckets(data, offsets, buckets, signed, paimon, out):  # type: ignore[no-untyped-def]
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


@numba.njit(types.int64(_BYTES, _OFFSETS, types.int64, _OUT), nogil=True, cache=True)
def iceberg_buckets(data, offsets, buckets, out):  # type: ignore[no-untyped-def]
    """Buckets of Iceberg keys."""
    count = min(len(offsets) - 1, len(out))
    for i in range(count):
        start, end = offsets[i], offsets[i + 1]
        if start < 0 or end < start or end > len(data):
            return i
        h = _standard_hash(data, start, end) & np.uint32(0x7FFFFFFF)
        out[i] = np.int32(np.int64(h) % buckets)
    return count
