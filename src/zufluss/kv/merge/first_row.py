"""`first_row`: the first row of a key stays forever.

| record | key exists | key is new |
|---|---|---|
| row | nothing | +I |
| delete | nothing | nothing |
"""

from __future__ import annotations

from typing import Any

from zufluss.kv.merge.base import (
    INSERT,
    KINDS_OUT,
    NO_ROW,
    NUMBERS_IN,
    NUMBERS_OUT,
    Candidates,
    ChangeBuffers,
    Fold,
)
from zufluss.record.kernels import types
from zufluss.record.kernels.cache import kernel


class FirstRow:
    """The engine of `table.merge-engine = first_row`."""

    needs_rows = False
    logs_every_row = False

    def fold(self, candidates: Candidates) -> Fold:
        """Decide about a batch."""
        out = ChangeBuffers.for_records(len(candidates.new))
        current = candidates.old.copy()
        changes = _fold(candidates.group, candidates.new, current, out.kinds, out.rows)
        return out.fold(changes, candidates.old, current)


@kernel(
    types.int64(NUMBERS_IN, NUMBERS_IN, NUMBERS_OUT, KINDS_OUT, NUMBERS_OUT),
    boundscheck=True,
    short=True,
)
def _fold(groups: Any, new: Any, current: Any, kinds: Any, rows: Any) -> Any:
    """Write the changes of all records, update `current`; return the number of changes."""
    count = 0
    for record in range(len(new)):
        group = groups[record]
        if new[record] == NO_ROW or current[group] != NO_ROW:
            continue
        kinds[count] = INSERT
        rows[count] = current[group] = new[record]
        count += 1
    return count
