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

from zufluss.kv.merge.base import (
    DELETE,
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
)
from zufluss.record.kernels import types
from zufluss.record.kernels.cache import kernel


class LastRow:
    """The engine of tables without a merge engine."""

    needs_rows = False
    logs_every_row = True

    def __init__(self, *, before_images: bool, ignore_deletes: bool) -> None:
        self._before_images = before_images
        self._ignore_deletes = ignore_deletes

    def fold(self, candidates: Candidates) -> Fold:
        """Decide about a batch."""
        out = ChangeBuffers.for_records(len(candidates.new))
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
        return out.fold(changes, candidates.old, current)


@kernel(
    types.int64(
        NUMBERS_IN, NUMBERS_IN, types.boolean, types.boolean, NUMBERS_OUT, KINDS_OUT, NUMBERS_OUT
    ),
    boundscheck=True,
    short=True,
)
def _fold(
    groups: Any,
    new: Any,
    before_images: Any,
    ignore_deletes: Any,
    current: Any,
    kinds: Any,
    rows: Any,
) -> Any:
    """Write the changes of all records, update `current`; return the number of changes.

    `current` has the row of each group: at first the stored one, in the end the final one.
    """
    count = 0
    for record in range(len(new)):
        group = groups[record]
        before, after = current[group], new[record]
        if after == NO_ROW:
            if before == NO_ROW or ignore_deletes:
                continue
            kinds[count] = DELETE
            rows[count] = before
            count += 1
        else:
            # Without before images the changelog does not tell inserts from updates.
            if before_images and before != NO_ROW:
                kinds[count] = UPDATE_BEFORE
                rows[count] = before
                count += 1
            kinds[count] = INSERT if before_images and before == NO_ROW else UPDATE_AFTER
            rows[count] = after
            count += 1
        current[group] = after
    return count
