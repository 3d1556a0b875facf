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

from zufluss.kv.merge.base import (
    INSERT,
    KINDS_OUT,
    NO_ROW,
    NUMBERS_IN,
    NUMBERS_OUT,
    UPDATE_AFTER,
    UPDATE_BEFORE,
    Candidates,
    ChangeBuffers,
    Fold,
    Numbers,
)
from zufluss.record.kernels import types
from zufluss.record.kernels.cache import kernel

_LEAST = np.iinfo(np.int64).min
_LEAST_INT = np.iinfo(np.int32).min


class HighestVersion:
    """The engine of `table.merge-engine = versioned`."""

    needs_rows = True
    logs_every_row = False

    def __init__(self, version_column: str, *, before_images: bool) -> None:
        self._column = version_column
        self._before_images = before_images

    def fold(self, candidates: Candidates) -> Fold:
        """Decide about a batch."""
        assert candidates.rows is not None
        out = ChangeBuffers.for_records(len(candidates.new))
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
        return out.fold(changes, candidates.old, current)


def _numbers(versions: pa.Array) -> Numbers:
    """Return versions as integers with the same order."""
    least = _LEAST_INT if pa.types.is_int32(versions.type) else _LEAST
    integers = versions.cast(pa.int64()).fill_null(int(least))
    return np.ascontiguousarray(integers.to_numpy(zero_copy_only=False), dtype=np.int64)


@kernel(
    types.int64(
        NUMBERS_IN, NUMBERS_IN, NUMBERS_IN, types.boolean, NUMBERS_OUT, KINDS_OUT, NUMBERS_OUT
    ),
    boundscheck=True,
    short=True,
)  # fmt: skip
def _fold(
    groups: Any, new: Any, versions: Any, before_images: Any, current: Any, kinds: Any, rows: Any
) -> Any:
    """Write the changes of all records, update `current`; return the number of changes."""
    count = 0
    for record in range(len(new)):
        group = groups[record]
        before, after = current[group], new[record]
        if after == NO_ROW:
            continue
        if before == NO_ROW:
            kinds[count] = INSERT
        elif versions[after] < versions[before]:
            continue
        else:
            if before_images:
                kinds[count] = UPDATE_BEFORE
                rows[count] = before
                count += 1
            kinds[count] = UPDATE_AFTER
        rows[count] = after
        count += 1
        current[group] = after
    return count
