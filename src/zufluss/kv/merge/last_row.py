"""The default: the last row of a key wins.

| record | key exists | key is new |
|---|---|---|
| row | -U old, +U new, even if they are equal | +I new |
| row, changelog image WAL | +U new | +U new |
| delete | -D old | nothing |

With `table.delete.behavior = IGNORE` deletes do nothing at all.
"""

from __future__ import annotations

from typing import Any

from numba import types

from zufluss.kv.merge.base import (
    DELETE,
    INSERT,
    NO_ROW,
    UPDATE_AFTER,
    UPDATE_BEFORE,
    Candidates,
    Fold,
    Out,
)
from zufluss.record.kernels.cache import kernel

_GROUPS = types.Array(types.int64, 1, "C", readonly=True)
_NUMBERS = types.Array(types.int64, 1, "C", readonly=True)
_OUT = types.Array(types.int64, 1, "C")
_KINDS = types.Array(types.uint8, 1, "C")


class LastRow:
    """The engine of tables without a merge engine."""

    needs_rows = False
    logs_every_row = True

    def __init__(self, *, before_images: bool, ignore_deletes: bool) -> None:
        self._before_images = before_images
        self._ignore_deletes = ignore_deletes

    def fold(self, candidates: Candidates) -> Fold:
        """Decide about a batch."""
        out = Out.for_records(len(candidates.new))
        current = candidates.old.copy()
        changes = _fold(
            candidates.group,
            candidates.new,
            self._before_images,
            self._ignore_deletes,
            current,
            out.kinds,
            out.rows,
        )
        return out.folded(changes, candidates.old, current)


@kernel(
    types.int64(_GROUPS, _NUMBERS, types.boolean, types.boolean, _OUT, _KINDS, _OUT),
    boundscheck=True,
    short=True,
)
def _fold(
    group: Any,
    new: Any,
    before_images: Any,
    ignore_deletes: Any,
    current: Any,
    kinds: Any,
    rows: Any,
) -> Any:
    """Go through the records; `current` has the row of each group and ends as the final one."""
    count = 0
    for i in range(len(new)):
        key = group[i]
        old = current[key]
        row = new[i]
        if row == NO_ROW:
            if old == NO_ROW or ignore_deletes:
                continue
            kinds[count] = DELETE
            rows[count] = old
            count += 1
        else:
            if before_images and old != NO_ROW:
                kinds[count] = UPDATE_BEFORE
                rows[count] = old
                count += 1
            kinds[count] = INSERT if before_images and old == NO_ROW else UPDATE_AFTER
            rows[count] = row
            count += 1
        current[key] = row
    return count
