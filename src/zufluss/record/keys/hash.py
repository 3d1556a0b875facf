"""The bucket of a key.

Clients choose the bucket of a row, and the server trusts them. So all clients of a table must hash
alike, and a tiered table must hash as its lake does. This module has the four hashes. `bucket_ids`
takes encoded keys (`keys/encoding.py`) as one buffer and an offsets array and returns all buckets
at once. `tests/record/keys/plain_hash.py` is the plain-Python twin for one key.

All arithmetic is 32-bit and wraps.

| name | definition |
|---|---|
| k(x) | rotl(x * 0xCC9E2D51, 15) * 0x1B873593 |
| m(h, k) | rotl(h ^ k, 13) * 5 + 0xE6546B64 |
| f | the final mix of murmur3 |
| H(bytes) | h = 42; m over each little-endian 4-byte word, then each tail byte; f(h ^ length) |
| G(i) | abs(f(m(0, k(i)) ^ 4)), the most negative number becoming 0 |

| lake | bucket of n |
|---|---|
| none, lance | G(H(key)) mod n |
| paimon | abs(H(key)) mod n |
| iceberg | (standard murmur3_32 with seed 0, sign bit cleared) mod n |
| hudi | (the key's 4 bytes as a big-endian number, sign bit cleared) mod n |

The two client families disagree on one detail: Java extends the sign of a tail byte over 0x7f,
`pyfluss` does not. `hash="pyfluss"` is our default; `hash="java"` is for tables that Java writers
share. Paimon, Iceberg and Hudi keys come out the same either way.
"""

from __future__ import annotations

from typing import Literal

import numpy as np
import numpy.typing as npt

from zufluss.lake_formats import LAKE_FORMATS
from zufluss.record.kernels import hash as kernels

HashKind = Literal["pyfluss", "java"]


def bucket_ids(
    data: npt.NDArray[np.uint8],
    offsets: npt.NDArray[np.signedinteger],
    buckets: int,
    lake: str | None = None,
    hash: HashKind = "pyfluss",
) -> npt.NDArray[np.int32]:
    """Return the bucket of every key; key i is `data[offsets[i]:offsets[i + 1]]`."""
    _check_arguments(buckets, lake, hash)
    positions = np.ascontiguousarray(offsets, dtype=np.int64)
    keys = np.ascontiguousarray(data)
    out = np.empty(max(len(positions) - 1, 0), dtype=np.int32)
    if lake == "hudi":
        return _hudi_buckets(keys, positions, buckets)
    if lake == "iceberg":
        done = kernels.iceberg_buckets(keys, positions, buckets, out)
    else:
        done = kernels.fluss_buckets(
            keys, positions, buckets, hash == "java", lake == "paimon", out
        )
    if done != len(out):
        raise ValueError(f"key {done}: offsets leave the {len(keys)} bytes of key data")
    return out


def _check_arguments(buckets: int, lake: str | None, hash: str) -> None:
    if buckets < 1:
        raise ValueError(f"bucket count {buckets} is not positive")
    if lake is not None and lake not in LAKE_FORMATS:
        raise ValueError(f"lake format {lake!r} is none of {', '.join(LAKE_FORMATS)}")
    if hash not in ("pyfluss", "java"):
        raise ValueError(f"client.bucket.hash {hash!r} is neither pyfluss nor java")


def _hudi_buckets(
    data: npt.NDArray[np.uint8], offsets: npt.NDArray[np.int64], buckets: int
) -> npt.NDArray[np.int32]:
    count = max(len(offsets) - 1, 0)
    start = int(offsets[0]) if count else 0
    inside = start >= 0 and start + 4 * count <= len(data)
    if not inside or (np.diff(offsets) != 4).any():
        raise ValueError("a hudi key is not the 4 bytes of its hash")
    codes = data[start : start + 4 * count].view(">u4")
    return ((codes & 0x7FFFFFFF) % buckets).astype(np.int32)
