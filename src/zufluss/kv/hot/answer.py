"""Lookups of rows in memory: values found and the answer written by one kernel.

A lookup of one key costs less than the three Python calls around it would, so finding the values
(`index.look_up`) and writing the answer (`record/kernels/lookup.py`) are one call.
"""

from __future__ import annotations

from typing import Any

from zufluss.kv.hot.index import look_up
from zufluss.kv.hot.words import ARENA, I64, NUMBERS, POSITIONS
from zufluss.record.kernels import types
from zufluss.record.kernels.cache import kernel
from zufluss.record.kernels.lookup import write_values
from zufluss.record.kernels.memory import BYTES
from zufluss.record.slices import ABSENT

NOT_HERE = -1
"""The answer does not fit, or the cold tier has to be asked for a key."""


@kernel(
    I64(
        ARENA, POSITIONS, I64, BYTES, NUMBERS, NUMBERS, I64, I64, types.boolean, I64, I64, NUMBERS,
        NUMBERS, ARENA,
    ),
    short=True,
)  # fmt: skip
def answer_lookup(
    arena: Any,
    root: Any,
    seed: Any,
    request: Any,
    starts: Any,
    ends: Any,
    count: Any,
    horizon: Any,
    resident: Any,
    partition: Any,
    bucket: Any,
    value_starts: Any,
    value_ends: Any,
    out: Any,
) -> Any:
    """Write the answer for the first `count` keys of a request; return its size, or `NOT_HERE`.

    `value_starts` and `value_ends` are scratch space. With `resident` a key that is not in memory
    does not exist.
    """
    if count < 0 or count > min(len(starts), len(ends), len(value_starts), len(value_ends)):
        return NOT_HERE
    begins, behinds = value_starts[:count], value_ends[:count]
    unknown = look_up(
        arena, root, seed, request, starts[:count], ends[:count], horizon, begins, behinds
    )
    if unknown < 0 or (unknown and not resident):
        return NOT_HERE
    # The answer has one form for keys without a row, whether deleted or never written.
    for i in range(count):
        begins[i] = max(begins[i], ABSENT)
    size = write_values(arena, begins, behinds, partition, bucket, 0, out)
    return size if size >= 0 else NOT_HERE
