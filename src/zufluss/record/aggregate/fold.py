"""Batches of records folded into the rows of their keys; the server's puts and the client's own.

    located rows → script → fold (kernel; then what is called outside) → settle, take → made rows

What comes out is rows that are taken apart as those that went in, so that the changelog is written
from them at once, and the values of the store as well. A batch that cannot be folded is refused as
a whole, with the column and the key.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from zufluss.errors import AggregationError
from zufluss.record.aggregate import kernels as k
from zufluss.record.aggregate.outside import (
    MADE_BYTES_MAX,
    TOO_MUCH,
    Made,
    RefusedRecord,
    Room,
    Steps,
    fold_outside,
)
from zufluss.record.aggregate.put import put_values, value_bytes_max
from zufluss.record.aggregate.registry import Operations
from zufluss.record.kernels.rowput import COLUMN
from zufluss.record.kernels.rows import PLACED
from zufluss.record.rowcells import Located
from zufluss.record.rowcodec import RowCodec
from zufluss.record.slices import Bytes, Positions, Slices

_NONE: Positions = np.empty(0, np.int64)
_NO_BYTES: Bytes = np.empty(0, np.uint8)


class Records(NamedTuple):
    """A batch, with the rows it meets."""

    given: Located
    """The rows of the records, then those stored."""
    group: Positions
    """Of each record: which key."""
    new: Positions
    """Of each record: its given row, `NO_ROW` for a delete."""
    old: Positions
    """Of each group: its given row, `NO_ROW` if there is none."""
    written: int
    """The number of columns that the records have; their schema may be an older one."""


class Folded(NamedTuple):
    """What a batch does."""

    kinds: npt.NDArray[np.uint8]
    """The change type of each row of the changelog."""
    rows: Located
    """The rows of the changelog."""
    final: Positions
    """Of each group: its row after the batch, `NO_ROW` if it has none, or `UNCHANGED`."""
    inserts: int
    """How many numbers were taken for an auto-increment column."""


class Aggregator:
    """Folds batches that write the same columns of one schema in the same way."""

    def __init__(
        self,
        codec: RowCodec,
        operations: Operations,
        *,
        partial: bool = False,
        ignore_deletes: bool = True,
        before_images: bool = True,
    ) -> None:
        """`partial`: a delete clears the columns written, and the row goes with the last one."""
        self._codec = codec
        self._operations = operations
        self._partial = partial
        self._ignore_deletes = ignore_deletes
        self._before_images = before_images
        self._assigns = bool((operations.lines[:, k.OP] == k.ASSIGN).any())
        self._table = np.empty((len(codec.schema.columns), COLUMN), np.int64)
        self._row_bytes = value_bytes_max(codec.plan.program)

    def fold(self, records: Records, ids: Positions = _NONE) -> Folded:
        """Fold a batch; `AggregationError` if that cannot be."""
        codec, plan, given = self._codec, self._codec.plan, records.given
        codec.check(given)
        count, most = len(records.new), 2 * len(records.new)
        prev, at = np.empty((2, count), np.int64)
        kinds, keep = np.empty((2, most), np.uint8)
        made, inserts = k.script(
            records.group, records.new, self._clears(records), given.count, self._ignore_deletes,
            self._before_images, records.old.copy(), prev, at, kinds, keep,
        )  # fmt: skip
        if self._assigns and inserts > len(ids):
            raise IndexError(f"{inserts} new keys, but {len(ids)} numbers for them")
        rows = codec.room(given.rows.data, made)
        ops = self._operations
        fault, column, record = k.fold(
            given.rows.data, plan.program, ops.lines, ops.order, given.cells, given.count,
            rows.cells, made, rows.facts, records.new, prev, at, kinds, given.field_counts,
            records.written, ids, keep, given.facts,
        )  # fmt: skip
        if fault:
            data_type = codec.schema.columns[column].data_type
            raise self._refusal(records, column, record, k.FAULTS[fault].format(data_type))
        if ops.outside:
            steps = Steps(
                records.new.tolist(), prev.tolist(), at.tolist(), kinds[:made], keep[:made],
                not self._before_images,
            )  # fmt: skip
            rows = self._fold_outside(records, steps, rows)
        final, index = np.empty(len(records.old), np.int64), np.empty(made, np.int64)
        kept = k.settle(records.group, at, kinds, keep, records.old, final, index)
        if kept < made:
            index = index[:kept]
            rows, kinds = self.taken(rows, index), kinds[index]
        self._check_size(rows)
        return Folded(kinds[:kept], codec.completed(rows), final, int(inserts))

    def taken(self, rows: Located, index: Positions) -> Located:
        """Some of the rows, in an order."""
        out = self._codec.room(rows.rows.data, len(index))
        k.take(self._codec.plan.program, rows.cells, rows.count, index, out.cells, out.facts)
        return out

    def values(self, rows: Located, index: Positions, schema_id: int) -> Slices:
        """Some of the rows as they are stored: schema id and row."""
        data, program = rows.rows.data, self._codec.plan.program
        size = len(index) * self._row_bytes + int(rows.facts[:, PLACED].sum())
        out, places = np.empty(size, np.uint8), np.empty((2, len(index)), np.int64)
        put_values(
            data, program, rows.cells, rows.count, index, schema_id, self._table, out, places
        )
        return Slices(out, places[0], places[1])

    def _clears(self, records: Records) -> Bytes:
        clears = np.ones(len(records.old), np.uint8)
        if self._partial and not self._ignore_deletes:
            given, program = records.given, self._codec.plan.program
            lines = self._operations.lines
            k.bare(given.cells, program, lines, given.count, records.old, clears)
        return clears

    def _fold_outside(self, records: Records, steps: Steps, rows: Located) -> Located:
        data, room = [records.given.rows.data], Room(MADE_BYTES_MAX)
        for column, function in self._operations.outside.items():
            if column >= records.written:
                continue
            made = Made(self._codec, records.given, rows)
            try:
                more = fold_outside(made, steps, column, function, self._operations.merging, room)
            except RefusedRecord as e:
                raise self._refusal(records, column, e.record, str(e)) from None
            if more is not None:
                data.append(more)
                rows = self._codec.moved(rows, np.concatenate(data))
                data = [rows.rows.data]
        return rows

    def _check_size(self, rows: Located) -> None:
        """Refuse a batch whose rows, each with its texts, are more than a changelog can take."""
        placed, most = rows.facts[:, PLACED], 2 * MADE_BYTES_MAX
        if self._before_images and placed.sum() > most:
            column = self._codec.schema.columns[int(placed.argmax())]
            raise AggregationError(f"column {column.name!r}: {TOO_MUCH.format(most)}")

    def _refusal(self, records: Records, column: int, record: int, reason: str) -> AggregationError:
        schema = self._codec.schema
        keys = [schema.index_of(name) for name in schema.primary_key]
        row = int(records.new[record])
        row = int(records.old[records.group[record]]) if row < 0 else row
        values = (array[row].as_py() for array in self._codec.arrays(records.given, keys))
        key = ", ".join(f"{n} = {v!r:.80}" for n, v in zip(schema.primary_key, values, strict=True))
        function = schema.columns[column].agg_function
        named = "" if function is None else f" ({function.type})"
        return AggregationError(
            f"column {schema.columns[column].name!r}{named} of key {key}: {reason}"
        )
