"""`first_row`: the first row of a key stays for ever.

| record | key exists | key is new |
|---|---|---|
| row | nothing | +I |
| delete | nothing | nothing |
"""

from __future__ import annotations

from typing import Any

from numba import types

from zufluss.kv.merge.base import INSERT, NO_ROW, Candidates, Fold, Out
from zufluss.kv.merge.last_row import _GROUPS, _KINDS, _NUMBERS, _OUT
from zufluss.record.kernels.cache import kernel


class FirstRow:
    """The engine of `table.merge-engine = first_row`."""

    needs_rows = False
    logs_every_row = False

    def fold(self, candidates: Candidates) -> Fold:
        """Decide about a batch."""
        out = Out.for_records(len(candidates.new))
        current = candidates.old.copy()
        changes = _fold(candidates.group, candidates.new, current, out.kinds, out.rows)
        return out.folded(changes, candidates.old, current)


@kernel(types.int64(_GROUPS, _NUMBERS, _OUT, _KINDS, _OUT), boundscheck=True, short=True)
def _fold(group: Any, new: Any, current: Any, kinds: Any, rows: Any) -> Any:
    count = 0
    for i in range(len(new)):
        key = group[i]
        if new[i] == NO_ROW or current[key] != NO_ROW:
            continue
        kinds[count] = INSERT
        rows[count] = current[key] = new[i]
        count += 1
    return count
