"""One put batch and the stored rows of its keys: which changes the batch makes.

Rows are candidates by number (`merge/base.py`): record i of the batch is candidate i, the stored
row of group g is candidate `records + g`. Most engines decide by keys alone. Then only the rows of
the changelog are copied together and located, once: that validates them, compares them with their
keys and finds their columns. An engine that reads rows gets all candidates as columns first. An
engine that aggregates gets located rows, or names the candidates it needs first.

The result is rows for the changelog and values for the store (`merge/gather.py`). Whole rows are
stored as they were sent; rows that partial updates and aggregation put together from several are
encoded again under the current schema.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from zufluss.kv.merge.aggregation import Aggregation
from zufluss.kv.merge.base import DELETE, NO_ROW, Candidates, Fold, MergeEngine, Numbers
from zufluss.kv.merge.gather import CandidateRows, NewValues, gather, new_values, number_candidates
from zufluss.kv.merge.partial import Ids, PartialUpdate
from zufluss.kv.table import KvTable
from zufluss.record.batch.kv import KvBatch
from zufluss.record.rows.codec import LocatedRows
from zufluss.record.slices import Slices

_NO_IDS: Numbers = np.empty(0, np.int64)


class Groups(NamedTuple):
    """Which records of a batch have the same key."""

    of: Numbers
    """The group of each record, numbered by first appearance."""
    first: Numbers
    """The first record of each group."""


class PutChange:
    """The changes that a batch makes. The constructor checks all rows of the batch."""

    kinds: npt.NDArray[np.uint8]
    """The change types of the changelog's rows."""
    rows: pa.RecordBatch | LocatedRows
    """The rows of the changelog."""
    ids_used: int = 0
    """How many numbers of the auto-increment column the new rows have, from the first that is left;
    the caller removes them once the change is applied."""

    def __init__(
        self,
        table: KvTable,
        batch: KvBatch,
        groups: Groups,
        old: Slices,
        engine: MergeEngine | PartialUpdate | Aggregation,
        mode: int,
        ids: Ids,
    ) -> None:
        """`old` has the stored value of each group's key; `engine` is that of the `mode`."""
        self._table = table
        self._batch = batch
        self._first = groups.first
        self._old = old
        self._values, self._schema_id = batch.rows, batch.schema_id
        self._merged_values: NewValues | None = None
        new, stored, self._deletes = number_candidates(batch.rows, old)
        self._candidates = Candidates(groups.of, new, stored, None)
        if self._deletes:
            table.check_deletes(batch.keys.take(np.flatnonzero(new == NO_ROW)), mode)
        if isinstance(engine, Aggregation):
            self._aggregate(engine, ids)
        elif isinstance(engine, PartialUpdate):
            self._fold_partial(engine, ids)
        elif engine.needs_rows:
            rows = self._all_columns()
            fold = engine.fold(self._candidates._replace(rows=rows))
            self._take(fold, rows.take(pa.array(fold.rows)))
        else:
            self._fold_by_keys(engine)

    @property
    def merged(self) -> Slices | None:
        """The new values if the engine aggregates: they may be longer than the rows sent."""
        return None if self._merged_values is None else self._merged_values.values

    @property
    def deleted_rows(self) -> int | None:
        """The number of rows that the deletes of the batch removed; None without deletes."""
        return int(np.count_nonzero(self.kinds == DELETE)) if self._deletes else None

    def new_values(self) -> NewValues:
        """Return the groups whose row changes, and their new values."""
        if self._merged_values is not None:
            return self._merged_values
        return new_values(self._values, self._schema_id, self._final, self._candidates.old)

    def _take(self, fold: Fold, rows: pa.RecordBatch | LocatedRows) -> None:
        """Take over the decisions of an engine."""
        self.kinds, self._final, self.rows = fold.kinds, fold.final, rows

    def _fold_by_keys(self, engine: MergeEngine) -> None:
        fold = engine.fold(self._candidates)
        if not engine.logs_every_row:
            self._located(np.setdiff1d(self._candidates.new, [*fold.rows, NO_ROW]))
        self._take(fold, self._table.changelog.rows(self._located(fold.rows)))

    def _fold_partial(self, engine: PartialUpdate, ids: Ids) -> None:
        table = self._table
        candidates = self._candidates._replace(rows=self._all_columns())
        sizes = np.concatenate([self._batch.rows.lengths, self._old.lengths])
        fold, rows, used = engine.fold(candidates, self._free(ids), sizes)
        self.ids_used = used
        self._take(fold, rows)
        self._values, self._schema_id = table.codec.encode(rows), table.info.schema_id

    def _aggregate(self, engine: Aggregation, ids: Ids) -> None:
        table, batch = self._table, self._batch
        new_keys = bool((self._candidates.old == NO_ROW).any())
        if new_keys and engine.divides(batch.schema_id) and table.key.encoding == "compacted":
            divided = engine.divide(self._candidates)
            candidates = self._gather(divided.needed)
            folded, values = engine.fold_divided(divided, batch.rows, candidates)
            table.check_compacted_keys(*candidates)
        else:
            fields = int(table.field_counts[batch.schema_id])
            folded, values = engine.fold(
                self._candidates, batch.rows, self._all_located(), fields, self._free(ids)
            )
        self.rows, self.kinds = table.changelog.rows(folded.rows), folded.kinds
        self._merged_values = values
        if table.auto_increment is not None:
            self.ids_used = folded.inserts

    def _free(self, ids: Ids) -> Numbers:
        """Return an id for every record, should all be new keys; none without such a column."""
        return _NO_IDS if self._table.auto_increment is None else ids.peek(self._batch.count)

    def _all_columns(self) -> pa.RecordBatch:
        """Return all candidates as columns; absent rows are NULL in every column."""
        return self._table.codec.columns(self._all_located())

    def _all_located(self) -> LocatedRows:
        return self._located(np.arange(self._batch.count + self._old.count, dtype=np.int64))

    def _located(self, candidates: Numbers) -> LocatedRows:
        """Locate candidates; raises `CorruptRecordError` for a bad row or a wrong key."""
        rows, counts, keys = self._gather(candidates)
        located = self._table.codec.locate(rows, counts)
        self._table.check_keys(located, keys)
        return located

    def _gather(self, candidates: Numbers) -> CandidateRows:
        batch = self._batch
        return gather(
            batch.rows, batch.schema_id, self._old, candidates, batch.keys, self._first,
            self._table.field_counts,
        )  # fmt: skip
