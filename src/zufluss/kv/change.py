"""One put batch on its way through a bucket: its rows beside the stored rows they meet.

Rows go by number (`merge/base.py`): record i of the batch is candidate i, the stored row of group g
is candidate `records + g`. Most engines decide by keys alone; then only the rows of the changelog
are brought together, in its order, and taken apart once: that checks them, compares them with their
keys and finds the columns. An engine that looks into rows gets all candidates as columns first.

What comes out is rows for the changelog and values for the store; a value is `schema id i16` +
compacted row. Whole rows are stored as they came; rows of partial updates are put together from
several and encoded again under the current schema.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import pyarrow as pa

from zufluss.kv.gather import Changed, changed_values, gather, number_candidates
from zufluss.kv.merge.base import NO_ROW, Candidates, Fold, MergeEngine, Numbers
from zufluss.kv.merge.partial import Ids, PartialUpdate
from zufluss.kv.table import KvTable
from zufluss.record.kvbatch import KvBatch
from zufluss.record.rowcodec import Located
from zufluss.record.slices import Slices

_NO_IDS: Numbers = np.empty(0, np.int64)


class Groups(NamedTuple):
    """Which records of a batch have the same key."""

    of: Numbers
    """Of each record: the number of its group, by first appearance."""
    first: Numbers
    """Of each group: its first record."""


class Change:
    """What a batch does to its keys; making one checks everything about the batch's rows."""

    fold: Fold
    """The change types, and what each key ends up with."""
    rows: pa.RecordBatch | Located
    """The rows of the changelog."""

    def __init__(
        self,
        table: KvTable,
        batch: KvBatch,
        groups: Groups,
        old: Slices,
        engine: MergeEngine | PartialUpdate,
        ids: Ids,
    ) -> None:
        """`old` has the stored value of each group's key."""
        self._table = table
        self._batch = batch
        self._first = groups.first
        self._old = old
        self._values, self._schema_id = batch.rows, batch.schema_id
        new, stored, deletes = number_candidates(batch.rows, old)
        self._candidates = Candidates(groups.of, new, stored, None)
        if deletes:
            table.check_deletes(batch.keys.take(np.flatnonzero(new == NO_ROW)))
        if isinstance(engine, PartialUpdate):
            self._fold_partial(engine, ids)
        elif engine.needs_rows:
            rows = self._all_columns()
            self.fold = engine.fold(self._candidates._replace(rows=rows))
            self.rows = rows.take(pa.array(self.fold.rows))
        else:
            self._fold_by_keys(engine)

    def changed(self) -> Changed:
        """The groups whose row changes, and their new values."""
        return changed_values(self._values, self._schema_id, self.fold.final, self._candidates.old)

    def _fold_by_keys(self, engine: MergeEngine) -> None:
        fold = self.fold = engine.fold(self._candidates)
        if not engine.logs_every_row:
            self._located(np.setdiff1d(self._candidates.new, [*fold.rows, NO_ROW]))
        self.rows = self._table.changelog.rows(self._located(fold.rows))

    def _fold_partial(self, engine: PartialUpdate, ids: Ids) -> None:
        table = self._table
        free = _NO_IDS if table.auto_increment is None else ids.peek(self._batch.count)
        candidates = self._candidates._replace(rows=self._all_columns())
        self.fold, rows, used = engine.fold(candidates, free)
        ids.use(used)
        self.rows = rows
        self._values, self._schema_id = table.codec.encode(rows), table.info.schema_id

    def _all_columns(self) -> pa.RecordBatch:
        """Every candidate as columns; one that is not there is NULL throughout."""
        numbers = np.arange(self._batch.count + self._old.count, dtype=np.int64)
        return self._table.codec.columns(self._located(numbers))

    def _located(self, candidates: Numbers) -> Located:
        """Take these candidates apart: each is sound and stands under its key."""
        table, batch = self._table, self._batch
        rows, counts, keys = gather(
            batch.rows, batch.schema_id, self._old, candidates, batch.keys, self._first,
            table.field_counts,
        )  # fmt: skip
        located = table.codec.locate(rows, counts)
        table.check_keys(located, keys)
        return located
