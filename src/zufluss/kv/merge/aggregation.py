"""`aggregation`: every column is merged by its own function (`model/aggregate.py`).

| record | key exists | key is new |
|---|---|---|
| row | -U old, +U merged; nothing if they are the same, see below | +I |
| delete, behaviour ALLOW | -D old | nothing |
| delete, behaviour IGNORE | nothing | nothing |
| partial delete, all other columns are NULL | -D old | nothing |
| partial delete, some are not | -U old, +U with the target columns NULL | |

The value of a column is the state of its function: nothing is stored beside the rows. The first row
of a new key is stored as it was sent, except for functions that turn an input into a state; inputs
are checked in any case.

Updates that change nothing are left out of the changelog. If nothing else is left of a put, its
last update stays: Flink's sinks of Fluss 0.9.1 read the changelog up to an offset that they know,
and wait for a *record* there, so a bucket that ends without one would hold them up for an hour.
Only a put that updates no row, such as ignored deletes, is an empty batch of one offset, for the
sequence of its writer.

The fold itself works on located rows and is in `record/aggregate`, since clients aggregate too.
"""

from __future__ import annotations

from typing import NamedTuple

from zufluss.kv.merge.base import Candidates, Numbers
from zufluss.kv.merge.gather import CandidateRows, NewValues, merged_values
from zufluss.record.aggregate.fold import Aggregator, DividedBatch, FoldedBatch, FoldInput
from zufluss.record.aggregate.registry import Operations
from zufluss.record.rows.codec import LocatedRows, RowCodec
from zufluss.record.slices import Slices


class AggregateFold(NamedTuple):
    """What a batch does to the changelog and to the store."""

    folded: FoldedBatch
    """The changes and the rows of the changelog."""
    values: NewValues
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
        self, candidates: Candidates, rows: Slices, located: LocatedRows, fields: int, ids: Numbers
    ) -> AggregateFold:
        """Decide about a batch whose rows have `fields` fields; `located` has all candidates."""
        records = FoldInput(located, candidates.group, candidates.new, candidates.old, fields)
        return self._outcome(self._aggregator.fold(records, ids), rows, candidates.old)

    def divides(self, schema_id: int) -> bool:
        """Whether `divide` and `fold_divided` can decide about rows of a schema."""
        return self._aggregator.divides and schema_id == self._schema_id

    def divide(self, candidates: Candidates) -> DividedBatch:
        """Decide as far as keys tell; the result names the candidates that the rest needs."""
        return self._aggregator.divide(candidates.group, candidates.new, candidates.old)

    def fold_divided(
        self, divided: DividedBatch, rows: Slices, candidates: CandidateRows
    ) -> AggregateFold:
        """Decide about the rest; `rows` are those of the batch, `candidates` those of `divide`."""
        folded = self._aggregator.fold_divided(divided, candidates.rows, candidates.field_counts)
        return self._outcome(folded, rows, divided.old)

    def _outcome(self, folded: FoldedBatch, rows: Slices, old: Numbers) -> AggregateFold:
        def encode(merged: Numbers, free_bytes: int) -> Slices:
            return self._aggregator.values(folded.rows, merged, self._schema_id, free_bytes)

        values = merged_values(rows, self._schema_id, folded.final, folded.came, old, encode)
        return AggregateFold(folded, values)
