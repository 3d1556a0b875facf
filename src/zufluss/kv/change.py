"""One put batch on its way through a bucket: its rows beside the stored rows they meet.

Rows go by number (`merge/base.py`): record i of the batch is candidate i, the stored row of group g
is candidate `records + g`. Most engines decide by keys alone; then only the rows of the changelog
are brought together, in its order, and taken apart once: that checks them, compares them with their
keys and makes the columns. An engine that looks into rows gets all candidates as columns first.

What comes out is columns for the changelog and values for the store; a value is `schema id i16` +
compacted row. Whole rows are stored as they came; rows of partial updates are put together from
several and encoded again under the current schema.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from zufluss.kv.gather import gather_rows, prefix_rows
from zufluss.kv.merge.base import NO_ROW, UNCHANGED, Candidates, Fold, MergeEngine, Numbers
from zufluss.kv.merge.partial import Ids, PartialUpdate
from zufluss.kv.table import KvTable
from zufluss.record.kvbatch import KvBatch
from zufluss.record.rowcodec import Located
from zufluss.record.slices import ABSENT, Slices

_NO_IDS: Numbers = np.empty(0, np.int64)


class Change:
    """What a batch does to its keys; making one checks everything about the batch's rows."""

    fold: Fold
    """The change types, and what each key ends up with."""
    columns: pa.RecordBatch
    """The rows of the changelog."""

    def __init__(
        self,
        table: KvTable,
        batch: KvBatch,
        group: Numbers,
        old: Slices,
        engine: MergeEngine | PartialUpdate,
        ids: Ids,
    ) -> None:
        """`group` has the number of each record's key, `old` the stored value of each key."""
        self._table = table
        self._batch = batch
        self._group = group
        self._old = old
        count = batch.count
        upsert, stored = batch.rows.starts != ABSENT, old.starts != ABSENT
        if not upsert.all():
            table.check_deletes(batch.keys.take(np.flatnonzero(~upsert)))
        numbers = np.arange(count + old.count, dtype=np.int64)
        self._candidates = Candidates(
            group,
            np.where(upsert, numbers[:count], NO_ROW),
            np.where(stored, numbers[count:], NO_ROW),
            None,
        )
        if isinstance(engine, PartialUpdate):
            self._fold_partial(engine, ids, numbers)
        elif engine.needs_rows:
            rows = self._all_columns(numbers)
            self.fold = engine.fold(self._candidates._replace(rows=rows))
            self.columns = rows.take(pa.array(self.fold.rows))
        else:
            self._fold_by_keys(engine, upsert)

    @property
    def more_rows(self) -> int:
        """How many rows the bucket has more after it, or less."""
        final, old = self.fold.final, self._candidates.old
        inserted = np.count_nonzero((final >= 0) & (old == NO_ROW))
        deleted = np.count_nonzero((final == NO_ROW) & (old != NO_ROW))
        return int(inserted) - int(deleted)

    def changed(self) -> tuple[npt.NDArray[np.intp], Slices]:
        """The groups whose row changes, and their new values; absent ones are deleted."""
        groups = np.flatnonzero(self.fold.final != UNCHANGED)
        return groups, prefix_rows(self._values, self.fold.final[groups], self._schema_id)

    def _fold_by_keys(self, engine: MergeEngine, upsert: npt.NDArray[np.bool_]) -> None:
        fold = self.fold = engine.fold(self._candidates)
        mentioned = np.zeros(self._batch.count, np.bool_)
        mentioned[fold.rows[fold.rows < self._batch.count]] = True
        unmentioned = np.flatnonzero(upsert & ~mentioned)
        if len(unmentioned):
            self._located(unmentioned)
        self.columns = self._table.codec.columns(self._located(fold.rows))
        self._values, self._schema_id = self._batch.rows, self._batch.schema_id

    def _fold_partial(self, engine: PartialUpdate, ids: Ids, numbers: Numbers) -> None:
        table = self._table
        free = _NO_IDS if table.auto_increment is None else ids.peek(self._batch.count)
        candidates = self._candidates._replace(rows=self._all_columns(numbers))
        self.fold, self.columns, used = engine.fold(candidates, free)
        ids.use(used)
        self._values, self._schema_id = table.codec.encode(self.columns), table.info.schema_id

    def _all_columns(self, numbers: Numbers) -> pa.RecordBatch:
        """Every candidate as columns; one that is not there is NULL throughout."""
        self._values, self._schema_id = self._batch.rows, self._batch.schema_id
        return self._table.codec.columns(self._located(numbers))

    def _located(self, candidates: Numbers) -> Located:
        """Take these candidates apart: each is sound and stands under its key."""
        table, batch = self._table, self._batch
        rows, schema_ids = gather_rows(batch.rows, batch.schema_id, self._old, candidates)
        located = table.codec.locate(rows, table.field_counts(schema_ids))
        table.check_keys(located, self._keys_of(candidates))
        return located

    def _keys_of(self, candidates: Numbers) -> Slices:
        """The key of each candidate: its record's, or that of a record of its group."""
        count = self._batch.count
        record_of = np.empty(count + self._old.count, np.int64)
        record_of[:count] = np.arange(count)
        record_of[count + self._group] = np.arange(count)
        return self._batch.keys.take(record_of[candidates])
