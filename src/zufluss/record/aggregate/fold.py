"""Batches of records folded into the rows of their keys; the server's puts and the client's own.

    located rows → script → fold (kernel; then what is called outside) → settle, take → made rows
    script → divide → located rows → fold of what is left → settle, take → made rows

The second way is for whole rows whose columns begin with what came (`Aggregator.divides`): the
first row of a key is taken apart where it goes, and never copied.

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
from zufluss.record.aggregate.registry import Operations
from zufluss.record.aggregate.value_write import is_exact, put_values, value_bytes_max
from zufluss.record.kernels.row_read import PLACED
from zufluss.record.kernels.row_write import COLUMN
from zufluss.record.rows.cells import Counts, Located
from zufluss.record.rows.codec import RowCodec
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


class Script(NamedTuple):
    """Which rows the records of a batch make, see `kernels.script`."""

    prev: Positions
    """Of each record: the row it starts from."""
    at: Positions
    """Of each record: its first made row, negative if it makes none."""
    kinds: npt.NDArray[np.uint8]
    """The change types of the made rows, with room behind them."""
    keep: npt.NDArray[np.uint8]
    """Whether they stay, as far as it is known."""
    made: int
    """How many there are."""
    inserts: int
    """How many of them are of new keys."""


class Divided(NamedTuple):
    """A script, and what of it is left to be folded, see `kernels.divide`."""

    script: Script
    group: Positions
    """Of each record: which key."""
    old: Positions
    """Of each group: its stored row."""
    came: Positions
    """Of each made row: the record whose row it is, or `NO_ROW`."""
    places: Positions
    """The made rows that are rows as they came."""
    wanted: Positions
    """The rows to be located: those, then those of the fold."""
    parts: npt.NDArray[np.int64]
    """Of the records that are folded: new, prev and at."""


class Folded(NamedTuple):
    """What a batch does."""

    kinds: npt.NDArray[np.uint8]
    """The change type of each row of the changelog."""
    rows: Located
    """The rows of the changelog."""
    final: Positions
    """Of each group: its row after the batch, `NO_ROW` if it has none, or `UNCHANGED`."""
    came: Positions
    """Of each row of the changelog: the record whose row it is to the byte, `NO_ROW` if none."""
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
        self._exact = is_exact(codec.plan.program)
        as_came = bool(np.isin(operations.lines[:, k.OP], k.AS_CAME).all())
        self.divides = as_came and not partial and not codec.plan.inner
        """Batches of the present schema can be folded by `divide` and `fold_divided`."""

    def fold(self, records: Records, ids: Positions = _NONE) -> Folded:
        """Fold a batch; `AggregationError` if that cannot be."""
        codec, given = self._codec, records.given
        codec.check(given)
        clears = self._clears(records)
        script = self._script(records.group, records.new, records.old, clears, given.count)
        if self._assigns and script.inserts > len(ids):
            raise IndexError(f"{script.inserts} new keys, but {len(ids)} numbers for them")
        rows = codec.room(given.rows.data, script.made)
        ops = self._operations
        fault, column, record = k.fold(
            given.rows.data, codec.plan.program, ops.lines, ops.order, given.cells, given.count,
            rows.cells, script.made, rows.facts, records.new, script.prev, script.at, script.kinds,
            given.field_counts, records.written, ids, script.keep, given.facts, False,
        )  # fmt: skip
        if fault:
            raise self._refusal(given, _row_of(records, record), column, fault)
        if ops.outside:
            rows = self._fold_outside(records, script, rows)
        came = np.full(script.made, k.NO_ROW, np.int64)
        return self._settled(script, records.group, records.old, rows, came)

    def divide(self, group: Positions, new: Positions, old: Positions) -> Divided:
        """What a batch does and which rows that takes, before any is read.

        The arrays are those of `Records`, with rows numbered as the caller likes.
        """
        given = len(new) + len(old)
        script = self._script(group, new, old, np.ones(len(old), np.uint8), given)
        came, places = np.empty(script.made, np.int64), np.empty(script.inserts, np.int64)
        wanted = np.empty(given, np.int64)
        parts = np.empty((3, len(new) - script.inserts), np.int64)
        left, rows = k.divide(
            new, script.prev, script.at, script.kinds, given, script.inserts, came, places, wanted,
            parts,
        )  # fmt: skip
        wanted = wanted[: script.inserts + rows]
        return Divided(script, group, old, came, places, wanted, parts[:, :left])

    def fold_divided(self, divided: Divided, rows: Slices, counts: Counts) -> Folded:
        """Fold a batch whose `wanted` rows are these, with so many fields each."""
        script, codec, first = divided.script, self._codec, divided.script.inserts
        data, starts, ends = rows
        if first or not divided.parts.size:
            came = Slices(data, starts[:first], ends[:first])
            made = codec.locate_among(came, divided.places, script.made)
            codec.check(made)
        else:
            made = codec.room(data, script.made)
        if divided.parts.shape[1]:
            given = codec.locate(Slices(data, starts[first:], ends[first:]), counts[first:])
            codec.check(given)
            self._fold_left(divided, given, made)
        kept = divided.came if self._exact else np.full(script.made, k.NO_ROW, np.int64)
        return self._settled(script, divided.group, divided.old, made, kept)

    def _fold_left(self, divided: Divided, given: Located, made: Located) -> None:
        codec, ops, script = self._codec, self._operations, divided.script
        new, prev, at = divided.parts
        fault, column, record = k.fold(
            given.rows.data, codec.plan.program, ops.lines, ops.order, given.cells, given.count,
            made.cells, script.made, made.facts, new, prev, at, script.kinds, given.field_counts,
            len(ops.lines), _NONE, script.keep, given.facts, script.inserts > 0,
        )  # fmt: skip
        if fault:
            raise self._refusal(given, int(new[record]), column, fault)

    def _script(
        self, group: Positions, new: Positions, old: Positions, clears: Bytes, given: int
    ) -> Script:
        prev, at = np.empty((2, len(new)), np.int64)
        kinds, keep = np.empty((2, 2 * len(new)), np.uint8)
        made, inserts = k.script(
            group, new, clears, given, self._ignore_deletes, self._before_images, old.copy(), prev,
            at, kinds, keep,
        )  # fmt: skip
        return Script(prev, at, kinds, keep, made, inserts)

    def _settled(
        self, script: Script, group: Positions, old: Positions, rows: Located, came: Positions
    ) -> Folded:
        """The outcome, without updates that change nothing."""
        final, index = np.empty(len(old), np.int64), np.empty(script.made, np.int64)
        kinds = script.kinds
        kept = k.settle(group, script.at, kinds, script.keep, old, final, index)
        if kept < script.made:
            index = index[:kept]
            rows, kinds, came = self.taken(rows, index), kinds[index], came[index]
        self._check_size(rows)
        return Folded(kinds[:kept], self._codec.completed(rows), final, came, script.inserts)

    def taken(self, rows: Located, index: Positions) -> Located:
        """Some of the rows, in an order."""
        out = self._codec.room(rows.rows.data, len(index))
        k.take(self._codec.plan.program, rows.cells, rows.count, index, out.cells, out.facts)
        return out

    def values(self, rows: Located, index: Positions, schema_id: int, before: int = 0) -> Slices:
        """Some of the rows as they are stored: schema id and row. `before` bytes are left free."""
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

    def _clears(self, records: Records) -> Bytes:
        clears = np.ones(len(records.old), np.uint8)
        if self._partial and not self._ignore_deletes:
            given, program = records.given, self._codec.plan.program
            lines = self._operations.lines
            k.bare(given.cells, program, lines, given.count, records.old, clears)
        return clears

    def _fold_outside(self, records: Records, script: Script, rows: Located) -> Located:
        count = script.made
        steps = Steps(
            records.new.tolist(), script.prev.tolist(), script.at.tolist(), script.kinds[:count],
            script.keep[:count], not self._before_images,
        )  # fmt: skip
        data, room = [records.given.rows.data], Room(MADE_BYTES_MAX)
        for column, function in self._operations.outside.items():
            if column >= records.written:
                continue
            made = Made(self._codec, records.given, rows)
            try:
                more = fold_outside(made, steps, column, function, self._operations.merging, room)
            except RefusedRecord as e:
                row = _row_of(records, e.record)
                raise self._refusal(records.given, row, column, str(e)) from None
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

    def _refusal(
        self, given: Located, row: int, column: int, reason: str | int
    ) -> AggregationError:
        """What to raise for a row; the reason is a text, or a fault of the kernel."""
        schema = self._codec.schema
        if isinstance(reason, int):
            reason = k.FAULTS[reason].format(schema.columns[column].data_type)
        keys = [schema.index_of(name) for name in schema.primary_key]
        values = (array[row].as_py() for array in self._codec.arrays(given, keys))
        key = ", ".join(f"{n} = {v!r:.80}" for n, v in zip(schema.primary_key, values, strict=True))
        function = schema.columns[column].agg_function
        named = "" if function is None else f" ({function.type})"
        return AggregationError(
            f"column {schema.columns[column].name!r}{named} of key {key}: {reason}"
        )


def _row_of(records: Records, record: int) -> int:
    """A given row that has the key of a record."""
    row = int(records.new[record])
    return int(records.old[records.group[record]]) if row < 0 else row
