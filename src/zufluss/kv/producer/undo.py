"""Steps of an undo: rows become what they would be without the changes of one producer.

A step has some keys, each once. The stored rows of these keys are read, new rows are computed, and
the rows that differ become a put of the leader, past the merge engine: the changelog tells readers,
replicas and recovery about it like about any other put.

| step | the producer's columns | the other columns | the row is deleted |
|---|---|---|---|
| `RestoreStep`, the first change was an insert | NULL | stay | if the other columns are NULL |
| `RestoreStep`, else | as before the first change | stay | see below |
| `SubtractStep` | minus the sum of the changes; only of functions with an inverse | stay | never |

A row is also deleted if its other columns are NULL now, and before the first change only other
writers had filled columns: their delete would have removed the row, had the producer not written.
A key without row gets one if there is a value to restore. An auto-increment column belongs to the
row, not to its writer.
"""

from __future__ import annotations

from typing import Any, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from zufluss.errors import AggregationError, ZuflussError
from zufluss.kv.hot.sorting import packed
from zufluss.kv.merge.base import DELETE, INSERT, UPDATE_AFTER, UPDATE_BEFORE
from zufluss.kv.merge.gather import SCHEMA_ID_BYTES, NewValues, prefixed
from zufluss.kv.table import KvTable
from zufluss.model.aggregate import FUNCTIONS, OVERFLOW
from zufluss.model.schema import Column, Schema
from zufluss.model.types import Root
from zufluss.record.batch.kv import split_values
from zufluss.record.slices import ABSENT, Positions, Slices

Flags = npt.NDArray[np.bool_]

_DIGITS = 70
"""Digits of the decimals that sums are computed in: more than any number of changes reaches."""


class StepTooLargeError(ZuflussError):
    """The stored rows of a step are too large. Nothing was done; do the step in parts."""


class StepRows(NamedTuple):
    """The rows of a step's keys after the step."""

    rows: pa.RecordBatch
    """A row per key, with any content where the key has no row."""
    present: Flags
    """Whether each key has a row."""


class UndoStep(Protocol):
    """Some keys and a rule for their new rows."""

    @property
    def rows(self) -> pa.RecordBatch:
        """A row per key; no key appears twice."""

    def part(self, begin: int, end: int) -> UndoStep:
        """Return the step for some of its keys."""

    def apply(
        self, table: KvTable, old: pa.RecordBatch, present: Flags, own: frozenset[int]
    ) -> StepRows:
        """Return the rows after the step.

        `old` has the stored rows, `present` which of them exist, `own` the ids of the producer's
        columns.
        """


class UndoChange(NamedTuple):
    """The changes that a step makes, as of a put."""

    rows: pa.RecordBatch
    """The rows of the changelog."""
    kinds: npt.NDArray[np.uint8]
    """Their change types."""
    values: NewValues
    """The values that the keys end up with."""


class RestoreStep(NamedTuple):
    """Sets columns back to their values before the first change."""

    rows: pa.RecordBatch
    """The rows before the first change; the inserted row if the first change was an insert."""
    inserted: Flags
    """Whether the first change of each key was an insert."""

    def part(self, begin: int, end: int) -> RestoreStep:
        """Return the step for some of its keys."""
        return RestoreStep(self.rows.slice(begin, end - begin), self.inserted[begin:end])

    def apply(
        self, table: KvTable, old: pa.RecordBatch, present: Flags, own: frozenset[int]
    ) -> StepRows:
        """Return the stored rows with the producer's columns as they were."""
        rows = extended(self.rows, table.schema)
        keys = set(map(table.schema.index_of, table.schema.primary_key))
        mine = {i for i, c in enumerate(table.schema.columns) if c.id in own} - keys
        others = set(range(rows.num_columns)) - keys - mine - {table.auto_increment}
        of_others = self.inserted | (_all_null(rows, mine) & ~_all_null(rows, others))
        deleted = of_others & _all_null(old, others)
        stored, inserted = pa.array(present), pa.array(self.inserted)
        columns = []
        for i, column in enumerate(rows.columns):
            if i in keys:
                columns.append(column)
            elif i in mine:
                columns.append(_choose(inserted, pa.nulls(len(column), column.type), column))
            elif i == table.auto_increment:
                columns.append(_choose(stored, old.column(i), column))
            else:
                columns.append(old.column(i))
        return StepRows(pa.RecordBatch.from_arrays(columns, schema=table.schema.arrow), ~deleted)


class SubtractStep(NamedTuple):
    """Subtracts from columns what the producer added to them."""

    rows: pa.RecordBatch
    """A row per key."""
    sums: dict[int, pa.Array]
    """The sums to subtract by column id, as wide decimals; of wrapping integers as int64."""

    def part(self, begin: int, end: int) -> SubtractStep:
        """Return the step for some of its keys."""
        sums = {i: array.slice(begin, end - begin) for i, array in self.sums.items()}
        return SubtractStep(self.rows.slice(begin, end - begin), sums)

    def apply(
        self, table: KvTable, old: pa.RecordBatch, present: Flags, own: frozenset[int]
    ) -> StepRows:
        """Return the stored rows minus the sums."""
        rows = extended(self.rows, table.schema)
        keys = set(map(table.schema.index_of, table.schema.primary_key))
        touched = np.zeros(len(present), np.bool_)
        columns = []
        for i, column in enumerate(table.schema.columns):
            sums = self.sums.get(column.id)
            if i in keys:
                columns.append(rows.column(i))
            elif sums is None or column.id not in own:
                columns.append(old.column(i))
            else:
                nonzero = pc.not_equal(sums, pa.scalar(0, sums.type))
                touched |= nonzero.to_numpy(zero_copy_only=False)
                remainder = _subtract(table, column, old.column(i), sums, rows)
                columns.append(_choose(nonzero, remainder, old.column(i)))
        batch = pa.RecordBatch.from_arrays(columns, schema=table.schema.arrow)
        return StepRows(batch, present | touched)


def _subtract(
    table: KvTable, column: Column, old: pa.Array, sums: pa.Array, rows: pa.RecordBatch
) -> pa.Array:
    minuend = pc.fill_null(old.cast(sums.type), pa.scalar(0, sums.type))
    if pa.types.is_int64(sums.type):
        wrapped = minuend.to_numpy() - sums.to_numpy()
        return pa.array(wrapped.astype(old.type.to_pandas_dtype()))
    remainder = pc.subtract(minuend, sums)
    try:
        return remainder.cast(old.type)
    except pa.ArrowInvalid:
        raise _overflow(table, column, remainder, old.type, rows) from None


def undo_change(table: KvTable, step: UndoStep, stored: Slices, own: frozenset[int]) -> UndoChange:
    """Work out a step; `stored` has the stored value of each of its keys."""
    present = stored.starts != ABSENT
    old = _stored_rows(table, stored)
    new, stays = step.apply(table, old, present, own)
    encoded = table.codec.encode(new.take(pa.array(np.flatnonzero(stays))))
    values = _spread(encoded, stays)
    changed = present != stays
    both = np.flatnonzero(present & stays)
    before = table.codec.encode(old.take(pa.array(both)))
    changed[both] = ~_equal(before, values.take(both))
    groups = np.flatnonzero(changed)
    rows, kinds = _changelog(old, new, groups, present[groups], stays[groups])
    put = prefixed(values.take(groups), table.info.schema_id, SCHEMA_ID_BYTES)
    more = int(np.count_nonzero(stays[groups])) - int(np.count_nonzero(present[groups]))
    return UndoChange(rows, kinds, NewValues(groups, put, more))


def extended(rows: pa.RecordBatch, schema: Schema) -> pa.RecordBatch:
    """Return rows of an earlier schema with the columns added since, which are the last ones."""
    missing = [pa.nulls(rows.num_rows, f.type) for f in list(schema.arrow)[rows.num_columns :]]
    return pa.RecordBatch.from_arrays([*rows.columns, *missing], schema=schema.arrow)


def invertible(column: Column) -> bool:
    """Whether the changes of one writer to a column can be subtracted after those of others."""
    function = column.agg_function
    known = None if function is None else FUNCTIONS.get(function.type)
    return known is not None and known.invertible


def signed(column: Column, values: pa.Array, before: Flags) -> pa.Array:
    """Return values as numbers to be summed up: negative for rows before a change."""
    function, decimal = column.agg_function, column.data_type.root is Root.DECIMAL
    if function is not None and not decimal and function.parameter(OVERFLOW) == "wrap":
        numbers = pc.fill_null(values.cast(pa.int64()), 0).to_numpy()
        return pa.array(np.where(before, -numbers, numbers))
    wide = pa.decimal256(_DIGITS, values.type.scale if decimal else 0)
    numbers = pc.fill_null(values.cast(wide), pa.scalar(0, wide))
    return _choose(pa.array(before), pc.negate(numbers), numbers)


def _stored_rows(table: KvTable, stored: Slices) -> pa.RecordBatch:
    """Return stored values as columns; absent rows are NULL in every column."""
    schema_ids, rows = split_values(packed(stored))
    return table.codec.decode(rows, table.field_counts[schema_ids])


def _changelog(
    old: pa.RecordBatch, new: pa.RecordBatch, groups: Positions, present: Flags, stays: Flags
) -> tuple[pa.RecordBatch, npt.NDArray[np.uint8]]:
    """Return rows and change types of keys in their order: old rows before new ones."""
    kinds = np.zeros((len(groups), 2), np.uint8)
    kinds[:, 0] = np.where(present, np.where(stays, UPDATE_BEFORE, DELETE), 0)
    kinds[:, 1] = np.where(stays, np.where(present, UPDATE_AFTER, INSERT), 0)
    rows = np.stack([groups, groups + old.num_rows], axis=1)
    flat = kinds.reshape(-1)
    taken = rows.reshape(-1)[flat != 0]
    both = pa.Table.from_batches([old, new]).take(pa.array(taken)).combine_chunks().to_batches()
    return (both[0] if both else new.slice(0, 0)), flat[flat != 0]


def _all_null(rows: pa.RecordBatch, columns: set[int]) -> Flags:
    null = np.ones(rows.num_rows, np.bool_)
    for i in columns:
        null &= rows.column(i).is_null().to_numpy(zero_copy_only=False)
    return null


def _choose(condition: pa.Array, yes: pa.Array, no: pa.Array) -> pa.Array:
    """Return values of `yes` where the condition holds, else of `no`; of any type."""
    mask = condition.to_numpy(zero_copy_only=False)
    indexes = np.arange(len(mask)) + np.where(mask, 0, len(mask))
    return pa.concat_arrays([yes, no]).take(pa.array(indexes))


def _spread(encoded: Slices, where: Flags) -> Slices:
    """Return byte strings at the places that are set, absent ones elsewhere."""
    starts = np.full(len(where), ABSENT, np.int64)
    ends = starts.copy()
    starts[where], ends[where] = encoded.starts, encoded.ends
    return Slices(encoded.data, starts, ends)


def _equal(one: Slices, other: Slices) -> Flags:
    """Return which byte strings are equal."""
    if not one.count:
        return np.empty(0, np.bool_)
    equal: Any = pc.equal(_binary(one), _binary(other))
    flags: Flags = equal.to_numpy(zero_copy_only=False)
    return flags


def _binary(slices: Slices) -> pa.Array:
    compact = packed(slices)
    offsets = np.append(compact.starts, compact.ends[-1:])
    buffers = [None, pa.py_buffer(offsets), pa.py_buffer(compact.data)]
    return pa.Array.from_buffers(pa.large_binary(), slices.count, buffers)


def _overflow(
    table: KvTable, column: Column, values: pa.Array, type_: pa.DataType, rows: pa.RecordBatch
) -> AggregationError:
    """Return an error that names the first key whose value does not fit."""
    at = 0
    for i in range(len(values)):
        try:
            values.slice(i, 1).cast(type_)
        except pa.ArrowInvalid:
            at = i
            break
    key = {name: rows.column(name)[at].as_py() for name in table.schema.primary_key}
    return AggregationError(
        f"{table.info.path}: the producer's changes to column {column.name} cannot be subtracted "
        f"from key {key}: {values[at].as_py()} does not fit into {column.data_type}"
    )
