"""Rows that are in memory, found and written as the answer to a lookup in one call.

A lookup of one key costs less than three Python calls around it would, so finding the values
(`kernels.look_up`) and writing the answer (`record.kernels.lookup.write_values`) are one kernel.
"""

from __future__ import annotations

from typing import Any

from numba import types

from zufluss.kv.hot.kernels import look_up
from zufluss.kv.hot.words import ARENA, I64, NUMBERS, POSITIONS
from zufluss.record.kernels.cache import kernel
from zufluss.record.kernels.lookup import write_values
from zufluss.record.kernels.memory import BYTES
from zufluss.record.slices import ABSENT

NOT_HERE = -1
"""The answer does not fit, or some key has to be looked for in the cold tier."""

_OUT = types.Array(types.uint8, 1, "C")


@kernel(
    I64(
        ARENA, POSITIONS, I64, BYTES, NUMBERS, NUMBERS, I64, I64, types.boolean, I64, I64, NUMBERS,
        NUMBERS, _OUT,
    ),
    short=True,
)  # fmt: skip
def answer_lookup(
    arena: Any,
    root: Any,
    seed: Any,
    buf: Any,
    starts: Any,
    ends: Any,
    count: Any,
    horizon: Any,
    resident: Any,
    partition: Any,
    bucket: Any,
    begins: Any,
    behinds: Any,
    out: Any,
) -> Any:
    """Write the answer for the first `count` keys; its size, or `NOT_HERE`.

    `begins` and `behinds` are for the places of the values. With `resident` a key that is not in
    memory does not exist.
    """
    if count < 0 or count > min(len(starts), len(ends), len(begins), len(behinds)):
        return NOT_HERE
    found, after = begins[:count], behinds[:count]
    unknown = look_up(arena, root, seed, buf, starts[:count], ends[:count], horizon, found, after)
    if unknown < 0 or (unknown and not resident):
        return NOT_HERE
    for i in range(count):
        found[i] = max(found[i], ABSENT)
    size = write_values(arena, found, after, partition, bucket, 0, out)
    return size if size >= 0 else NOT_HERE
