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

from zufluss.kv.merge.base import Candidates, Numbers
from zufluss.kv.merge.gather import Changed, Gathered, merged_values
from zufluss.record.aggregate.fold import Aggregator, Divided, Folded, Records
from zufluss.record.aggregate.registry import Operations
from zufluss.record.rows.codec import Located, RowCodec
from zufluss.record.slices import Slices


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
        self, candidates: Candidates, rows: Slices, given: Located, written: int, ids: Numbers
    ) -> Aggregated:
        """Decide about a batch; `given` has all candidates, `written` the number of its columns."""
        records = Records(given, candidates.group, candidates.new, candidates.old, written)
        return self._outcome(self._aggregator.fold(records, ids), rows, candidates.old)

    def divides(self, schema_id: int) -> bool:
        """Whether rows of a schema can be decided about by `divide` and `fold_divided`."""
        return self._aggregator.divides and schema_id == self._schema_id

    def divide(self, candidates: Candidates) -> Divided:
        """Decide about a batch as far as keys tell; which candidates it takes to go on."""
        return self._aggregator.divide(candidates.group, candidates.new, candidates.old)

    def fold_divided(self, divided: Divided, rows: Slices, wanted: Gathered) -> Aggregated:
        """Decide about the rest; `rows` are those of the batch, `wanted` what `divide` told."""
        folded = self._aggregator.fold_divided(divided, wanted.rows, wanted.field_counts)
        return self._outcome(folded, rows, divided.old)

    def _outcome(self, folded: Folded, rows: Slices, old: Numbers) -> Aggregated:
        def values(made: Numbers, before: int) -> Slices:
            return self._aggregator.values(folded.rows, made, self._schema_id, before)

        changed = merged_values(rows, self._schema_id, folded.final, folded.came, old, values)
        return Aggregated(folded, changed)
