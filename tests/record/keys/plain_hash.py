"""The bucket of one key in plain Python: the oracle of the kernels that hash keys.

The names of the formulas are those of the table in `zufluss.record.keys.hash`.
"""

from __future__ import annotations

from zufluss.record.keys.hash import HashKind

_MASK = 0xFFFFFFFF


def bucket_id(key: bytes, buckets: int, lake: str | None = None, hash: HashKind = "pyfluss") -> int:
    """Return the bucket of one encoded key, in plain Python."""
    if lake == "hudi":
        return int.from_bytes(key, "big") % 2**31 % buckets
    if lake == "iceberg":
        return (murmur3_32(key) & 0x7FFFFFFF) % buckets
    code = key_hash(key, hash)
    if lake == "paimon":
        return abs(code) % buckets
    return spread(code) % buckets


def key_hash(key: bytes, hash: HashKind = "pyfluss") -> int:
    """Return H of the module's table, as a signed 32-bit number."""
    whole = len(key) // 4 * 4
    h = _words(key, 42)
    for byte in key[whole:]:
        tail = byte - 256 if hash == "java" and byte > 127 else byte
        h = _mix(h, _scramble(tail & _MASK))
    return _signed(_final(h ^ len(key)))


def spread(value: int) -> int:
    """Return G of the module's table: a second hash of a hash, never negative."""
    g = _signed(_final(_mix(0, _scramble(value & _MASK)) ^ 4))
    return 0 if g == -(2**31) else abs(g)


def murmur3_32(key: bytes) -> int:
    """Return the standard murmur3 hash (x86, 32 bits, seed 0), unsigned."""
    h = _words(key, 0)
    tail = key[len(key) // 4 * 4 :]
    if tail:
        h ^= _scramble(int.from_bytes(tail, "little"))
    return _final(h ^ len(key))


def _words(key: bytes, seed: int) -> int:
    h = seed
    for pos in range(0, len(key) // 4 * 4, 4):
        h = _mix(h, _scramble(int.from_bytes(key[pos : pos + 4], "little")))
    return h


def _rotl(x: int, r: int) -> int:
    return (x << r | x >> (32 - r)) & _MASK


def _scramble(word: int) -> int:
    return _rotl(word * 0xCC9E2D51 & _MASK, 15) * 0x1B873593 & _MASK


def _mix(h: int, k: int) -> int:
    return (_rotl(h ^ k, 13) * 5 + 0xE6546B64) & _MASK


def _final(h: int) -> int:
    h = (h ^ h >> 16) * 0x85EBCA6B & _MASK
    h = (h ^ h >> 13) * 0xC2B2AE35 & _MASK
    return h ^ h >> 16


def _signed(h: int) -> int:
    return h - 2**32 if h >= 2**31 else h
