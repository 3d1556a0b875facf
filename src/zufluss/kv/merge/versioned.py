"""`versioned`: the row with the highest version wins, the later one of equals.

| record | its version is at least the stored one | it is less | key is new |
|---|---|---|---|
| row | -U old, +U new | nothing | +I new |
| row, changelog image WAL | +U new | nothing | +I new |
| delete | nothing | | nothing |

A NULL version counts as the least number of its type.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pyarrow as pa
from numba import types

from zufluss.kv.merge.base import (
    INSERT,
    NO_ROW,
    UPDATE_AFTER,
    UPDATE_BEFORE,
    Candidates,
    Fold,
    Numbers,
    Out,
)
from zufluss.kv.merge.last_row import _GROUPS, _KINDS, _NUMBERS, _OUT
from zufluss.record.kernels.cache import kernel

_LEAST = np.iinfo(np.int64).min
_LEAST_INT = np.iinfo(np.int32).min


class Versioned:
    """The engine of `table.merge-engine = versioned`."""

    needs_rows = True
    logs_every_row = False

    def __init__(self, version_column: str, *, before_images: bool) -> None:
        self._column = version_column
        self._before_images = before_images

    def fold(self, candidates: Candidates) -> Fold:
        """Decide about a batch."""
        assert candidates.rows is not None
        out = Out.for_records(len(candidates.new))
        current = candidates.old.copy()
        changes = _fold(
            candidates.group,
            candidates.new,
            _numbers(candidates.rows.column(self._column)),
            self._before_images,
            current,
            out.kinds,
            out.rows,
        )
        return out.folded(changes, candidates.old, current)


def _numbers(versions: pa.Array) -> Numbers:
    """Versions as integers that compare as they do."""
    least = _LEAST_INT if pa.types.is_int32(versions.type) else _LEAST
    integers = versions.cast(pa.int64()).fill_null(int(least))
    return np.ascontiguousarray(integers.to_numpy(zero_copy_only=False), dtype=np.int64)


@kernel(
    types.int64(_GROUPS, _NUMBERS, _NUMBERS, types.boolean, _OUT, _KINDS, _OUT),
    boundscheck=True,
    short=True,
)
def _fold(
    group: Any, new: Any, version: Any, before_images: Any, current: Any, kinds: Any, rows: Any
) -> Any:
    count = 0
    for i in range(len(new)):
        key = group[i]
        row = new[i]
        if row == NO_ROW:
            continue
        old = current[key]
        if old == NO_ROW:
            kinds[count] = INSERT
        elif version[row] < version[old]:
            continue
        else:
            if before_images:
                kinds[count] = UPDATE_BEFORE
                rows[count] = old
                count += 1
            kinds[count] = UPDATE_AFTER
        rows[count] = row
        count += 1
        current[key] = row
    return count
