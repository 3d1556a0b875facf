"""Folds batches of records into the rows of their keys, for puts of servers and for clients.

    located rows → script → fold (kernel, then Python functions) → settle, take → result rows
    script → divide → located rows → fold of the other records → settle, take → result rows

`script.py` explains the steps. The second way needs whole rows, and operations that leave the first
row of a key as it came (`Aggregator.divides`): such a row is read straight into its place and never
copied.

Result rows are cells, as source rows are, so the changelog and the stored values are written from
them without another decoding. A batch that cannot be folded is refused as a whole; the error names
the column and the key.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from zufluss.errors import AggregationError
from zufluss.record.aggregate import opcodes as op
from zufluss.record.aggregate.column_fold import fold, take
from zufluss.record.aggregate.python_fold import (
    RESULT_BYTES_MAX,
    TOO_MUCH,
    ByteBudget,
    FoldCells,
    RecordSteps,
    RefusedRecord,
    fold_in_python,
)
from zufluss.record.aggregate.registry import Operations
from zufluss.record.aggregate.script import divide, find_bare, script, settle
from zufluss.record.aggregate.value_write import is_exact, put_values, value_bytes_max
from zufluss.record.kernels.row_read import PLACED
from zufluss.record.kernels.row_write import COLUMN
from zufluss.record.rows.cells import Counts, LocatedRows
from zufluss.record.rows.codec import RowCodec
from zufluss.record.slices import Bytes, Positions, Slices

_NONE: Positions = np.empty(0, np.int64)


class FoldInput(NamedTuple):
    """A batch of records, with the stored rows of their keys."""

    sources: LocatedRows
    """The rows of the records, then the stored rows."""
    group: Positions
    """Per record: the number of its key."""
    new: Positions
    """Per record: its source row, `NO_ROW` for a delete."""
    old: Positions
    """Per group: its stored row among the source rows, `NO_ROW` if the key has none."""
    written: int
    """The number of columns that the records have; their schema may be an older one."""


class Script(NamedTuple):
    """Which result rows the records of a batch write, see the kernel `script`."""

    prev: Positions
    """Per record: the row it starts from."""
    at: Positions
    """Per record: its first result row, negative if it writes none."""
    kinds: npt.NDArray[np.uint8]
    """Per result row: its change type; the array is longer than `results`."""
    keep: npt.NDArray[np.uint8]
    """Per result row: 1 if it is known to stay."""
    results: int
    """Number of result rows."""
    inserts: int
    """Number of result rows of new keys."""


class DividedBatch(NamedTuple):
    """A script whose inserts need no fold, see the kernel `divide`."""

    script: Script
    group: Positions
    """Per record: the number of its key."""
    old: Positions
    """Per group: its stored row."""
    came: Positions
    """Per result row: the record whose row it is, or `NO_ROW`."""
    places: Positions
    """The result rows of inserts."""
    needed: Positions
    """The source rows to locate: those of inserts, then those of the fold."""
    parts: npt.NDArray[np.int64]
    """new, prev and at of the records that go through the fold."""


class FoldedBatch(NamedTuple):
    """The changes of a batch."""

    kinds: npt.NDArray[np.uint8]
    """Per row of the changelog: its change type."""
    rows: LocatedRows
    """The rows of the changelog."""
    final: Positions
    """Per group: its row after the batch, `NO_ROW` if it has none, or `UNCHANGED`."""
    came: Positions
    """Per row of the changelog: the record with the same bytes, `NO_ROW` if there is none."""
    inserts: int
    """How many numbers were assigned to an auto-increment column."""


class Aggregator:
    """Folds batches of one schema that write the same columns in the same mode."""

    def __init__(
        self,
        codec: RowCodec,
        operations: Operations,
        *,
        partial: bool = False,
        ignore_deletes: bool = True,
        before_images: bool = True,
    ) -> None:
        """`partial`: a delete clears the written columns, and removes the row with its last one."""
        self._codec = codec
        self._operations = operations
        self._partial = partial
        self._ignore_deletes = ignore_deletes
        self._before_images = before_images
        self._assigns = bool((operations.lines[:, op.OP] == op.ASSIGN).any())
        self._table = np.empty((len(codec.schema.columns), COLUMN), np.int64)
        self._row_bytes = value_bytes_max(codec.plan.program)
        self._exact = is_exact(codec.plan.program)
        as_came = bool(np.isin(operations.lines[:, op.OP], op.AS_CAME).all())
        self.divides = as_came and not partial and not codec.plan.inner
        """Whether batches of the present schema can be folded by `divide` and `fold_divided`."""

    def fold(self, batch: FoldInput, ids: Positions = _NONE) -> FoldedBatch:
        """Fold a batch; raises `AggregationError` if a value is refused.

        `ids` has the numbers to assign to new keys, where a column is assigned.
        """
        codec, sources = self._codec, batch.sources
        codec.check(sources)
        clears = self._clears(batch)
        plan = self._script(batch.group, batch.new, batch.old, clears, sources.count)
        if self._assigns and plan.inserts > len(ids):
            raise IndexError(f"{plan.inserts} new keys, but {len(ids)} numbers for them")
        results = codec.room(sources.rows.data, plan.results)
        ops = self._operations
        fault, column, record = fold(
            sources.rows.data, codec.plan.program, ops.lines, ops.order, sources.cells,
            sources.count, results.cells, plan.results, results.facts, batch.new, plan.prev,
            plan.at, plan.kinds, batch.written, ids, plan.keep, sources.facts, False,
        )  # fmt: skip
        if fault:
            raise self._refusal(sources, _row_of(batch, record), column, fault)
        if ops.functions:
            results = self._fold_in_python(batch, plan, results)
        came = np.full(plan.results, op.NO_ROW, np.int64)
        return self._settled(plan, batch.group, batch.old, results, came)

    def divide(self, group: Positions, new: Positions, old: Positions) -> DividedBatch:
        """Decide which rows a batch writes and needs, before any row is read.

        The arrays are those of `FoldInput`, with rows numbered as the caller likes.
        """
        sources = len(new) + len(old)
        plan = self._script(group, new, old, np.ones(len(old), np.uint8), sources)
        came, places = np.empty(plan.results, np.int64), np.empty(plan.inserts, np.int64)
        needed = np.empty(sources, np.int64)
        parts = np.empty((3, len(new) - plan.inserts), np.int64)
        left, rows = divide(
            new, plan.prev, plan.at, plan.kinds, sources, plan.inserts, came, places, needed, parts
        )
        needed = needed[: plan.inserts + rows]
        return DividedBatch(plan, group, old, came, places, needed, parts[:, :left])

    def fold_divided(self, divided: DividedBatch, rows: Slices, counts: Counts) -> FoldedBatch:
        """Fold a divided batch; `rows` are its `needed` rows, `counts` their numbers of fields."""
        plan, codec, first = divided.script, self._codec, divided.script.inserts
        data, starts, ends = rows
        if first or not divided.parts.size:
            inserts = Slices(data, starts[:first], ends[:first])
            results = codec.locate_among(inserts, divided.places, plan.results)
            codec.check(results)
        else:
            results = codec.room(data, plan.results)
        if divided.parts.shape[1]:
            sources = codec.locate(Slices(data, starts[first:], ends[first:]), counts[first:])
            codec.check(sources)
            self._fold_parts(divided, sources, results)
        came = divided.came if self._exact else np.full(plan.results, op.NO_ROW, np.int64)
        return self._settled(plan, divided.group, divided.old, results, came)

    def _fold_parts(
        self, divided: DividedBatch, sources: LocatedRows, results: LocatedRows
    ) -> None:
        """Fold the records of a divided batch that are no inserts."""
        codec, ops, plan = self._codec, self._operations, divided.script
        new, prev, at = divided.parts
        fault, column, record = fold(
            sources.rows.data, codec.plan.program, ops.lines, ops.order, sources.cells,
            sources.count, results.cells, plan.results, results.facts, new, prev, at, plan.kinds,
            len(ops.lines), _NONE, plan.keep, sources.facts, plan.inserts > 0,
        )  # fmt: skip
        if fault:
            raise self._refusal(sources, int(new[record]), column, fault)

    def _script(
        self, group: Positions, new: Positions, old: Positions, clears: Bytes, sources: int
    ) -> Script:
        prev, at = np.empty((2, len(new)), np.int64)
        kinds, keep = np.empty((2, 2 * len(new)), np.uint8)
        results, inserts = script(
            group, new, clears, sources, self._ignore_deletes, self._before_images, old.copy(),
            prev, at, kinds, keep,
        )  # fmt: skip
        return Script(prev, at, kinds, keep, results, inserts)

    def _settled(
        self, plan: Script, group: Positions, old: Positions, rows: LocatedRows, came: Positions
    ) -> FoldedBatch:
        """Drop updates that change nothing, but for the last one if no other change is left."""
        final, index = np.empty(len(old), np.int64), np.empty(plan.results, np.int64)
        kinds = plan.kinds
        count = settle(group, plan.at, kinds, plan.keep, old, final, index)
        if plan.results and not count:
            plan.keep[plan.results - 2 : plan.results] = 1
            count = settle(group, plan.at, kinds, plan.keep, old, final, index)
        if count < plan.results:
            index = index[:count]
            rows, kinds, came = self.taken(rows, index), kinds[index], came[index]
        self._check_size(rows)
        return FoldedBatch(kinds[:count], self._codec.completed(rows), final, came, plan.inserts)

    def taken(self, rows: LocatedRows, index: Positions) -> LocatedRows:
        """Return the rows that `index` lists, in its order."""
        out = self._codec.room(rows.rows.data, len(index))
        take(self._codec.plan.program, rows.cells, rows.count, index, out.cells, out.facts)
        return out

    def values(
        self, rows: LocatedRows, index: Positions, schema_id: int, before: int = 0
    ) -> Slices:
        """Return the rows that `index` lists as stored values: schema id and row.

        The first `before` bytes of the buffer are left free.
        """
        if not len(index):
            return Slices(np.empty(before, np.uint8), _NONE, _NONE)
        data, program = rows.rows.data, self._codec.plan.program
        size = len(index) * self._row_bytes + int(rows.facts[:, PLACED].sum())
        out, places = np.empty(before + size, np.uint8), np.empty((2, len(index)), np.int64)
        put_values(
            data, program, rows.cells, rows.count, index, schema_id, self._table, out[before:],
            places,
        )  # fmt: skip
        places += before
        return Slices(out, places[0], places[1])

    def _clears(self, batch: FoldInput) -> Bytes:
        """Per group: 1 if a delete removes its row, 0 if other columns keep the row."""
        clears = np.ones(len(batch.old), np.uint8)
        if self._partial and not self._ignore_deletes:
            sources, program = batch.sources, self._codec.plan.program
            lines = self._operations.lines
            find_bare(sources.cells, program, lines, sources.count, batch.old, clears)
        return clears

    def _fold_in_python(self, batch: FoldInput, plan: Script, results: LocatedRows) -> LocatedRows:
        """Write the columns whose functions are in Python."""
        count = plan.results
        steps = RecordSteps(
            batch.new.tolist(), plan.prev.tolist(), plan.at.tolist(), plan.kinds[:count],
            plan.keep[:count], not self._before_images,
        )  # fmt: skip
        merging, budget = self._operations.merging, ByteBudget(RESULT_BYTES_MAX)
        for column, function in self._operations.functions.items():
            if column >= batch.written:
                continue
            cells = FoldCells(self._codec, batch.sources, results)
            try:
                more = fold_in_python(cells, steps, column, function, merging, budget)
            except RefusedRecord as e:
                row = _row_of(batch, e.record)
                raise self._refusal(batch.sources, row, column, str(e)) from None
            if more is not None:
                data = np.concatenate([results.rows.data, more])
                results = self._codec.moved(results, data)
        return results

    def _check_size(self, rows: LocatedRows) -> None:
        """Refuse a batch whose rows, each with its texts, do not fit into a changelog."""
        placed, most = rows.facts[:, PLACED], 2 * RESULT_BYTES_MAX
        if self._before_images and placed.sum() > most:
            column = self._codec.schema.columns[int(placed.argmax())]
            raise AggregationError(f"column {column.name!r}: {TOO_MUCH.format(most)}")

    def _refusal(
        self, sources: LocatedRows, row: int, column: int, reason: str | int
    ) -> AggregationError:
        """Return the error for a source row; the reason is a text, or a fault of the kernel."""
        schema = self._codec.schema
        if isinstance(reason, int):
            reason = op.FAULTS[reason].format(schema.columns[column].data_type)
        keys = [schema.index_of(name) for name in schema.primary_key]
        values = (array[row].as_py() for array in self._codec.arrays(sources, keys))
        key = ", ".join(f"{n} = {v!r:.80}" for n, v in zip(schema.primary_key, values, strict=True))
        function = schema.columns[column].agg_function
        named = "" if function is None else f" ({function.type})"
        return AggregationError(
            f"column {schema.columns[column].name!r}{named} of key {key}: {reason}"
        )


def _row_of(batch: FoldInput, record: int) -> int:
    """Return a source row that has the key of a record."""
    row = int(batch.new[record])
    return int(batch.old[batch.group[record]]) if row < 0 else row
