"""`aggregation`: every column is merged by its own function, see `zufluss.model.aggregate`.

| record | key exists | key is new |
|---|---|---|
| row | -U old, +U merged; nothing if they are the same | +I |
| delete, behaviour ALLOW | -D old | nothing |
| delete, behaviour IGNORE | nothing | nothing |
| partial delete, all other columns are NULL | -D old | nothing |
| partial delete, some are not | -U old, +U with the target columns NULL | |

The value of a column is the state of its function: nothing is kept beside the rows. Of a new key
the row is stored as it came, but for functions that make a state of an input; inputs are checked
all the same. A put that changes nothing takes one offset, for the sequence of its writer.

The fold itself works on rows that are taken apart, and stands in `zufluss.record.aggregate`, since
clients aggregate as well.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from zufluss.kv.gather import Changed
from zufluss.kv.merge.base import NO_ROW, UNCHANGED, Candidates, Numbers
from zufluss.record.aggregate.fold import Aggregator, Folded, Records
from zufluss.record.aggregate.registry import Operations
from zufluss.record.rowcodec import Located, RowCodec
from zufluss.record.slices import ABSENT, Slices


class Aggregated(NamedTuple):
    """What a batch does."""

    folded: Folded
    """The rows of the changelog."""
    changed: Changed
    """The values for the store."""


class Aggregation:
    """Decides about puts that write the same columns of one table, in one mode."""

    def __init__(
        self,
        codec: RowCodec,
        operations: Operations,
        *,
        schema_id: int,
        partial: bool,
        ignore_deletes: bool,
    ) -> None:
        self._schema_id = schema_id
        self._aggregator = Aggregator(
            codec, operations, partial=partial, ignore_deletes=ignore_deletes
        )

    def fold(
        self, candidates: Candidates, given: Located, written: int, ids: Numbers
    ) -> Aggregated:
        """Decide about a batch; `given` has all candidates, `written` the number of its columns."""
        records = Records(given, candidates.group, candidates.new, candidates.old, written)
        folded = self._aggregator.fold(records, ids)
        return Aggregated(folded, self._changed(folded, candidates.old))

    def _changed(self, folded: Folded, old: Numbers) -> Changed:
        """The values that the groups end up with."""
        groups = np.flatnonzero(folded.final != UNCHANGED)
        final, before = folded.final[groups], old[groups]
        there = final != NO_ROW
        more = int(np.count_nonzero(before == NO_ROW)) - int(len(there) - np.count_nonzero(there))
        if there.all():
            values = self._aggregator.values(folded.rows, final, self._schema_id)
            return Changed(groups, values, more)
        values = self._aggregator.values(folded.rows, final[there], self._schema_id)
        starts, ends = np.full((2, len(groups)), ABSENT, np.int64)
        starts[there], ends[there] = values.starts, values.ends
        return Changed(groups, Slices(values.data, starts, ends), more)
