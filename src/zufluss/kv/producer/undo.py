"""What an undo does to rows: they are made what they would be without one producer's changes.

A step has some keys, each once. The stored rows of these keys are read, new ones are put together,
and what differs becomes a put of the leader's own, as if somebody had written the rows past the
merge engine: the changelog tells readers, replicas and recovery of it as of any other put.

| step | the producer's columns | the other columns | the row goes |
|---|---|---|---|
| Restore, the first change was an insert | NULL | stay | if the others are NULL |
| Restore, else | as before the first change | stay | see below |
| Added | less what was added; only of functions that can be inverted | stay | never |

A row that only others had put something into, and whose other columns they have emptied since, goes
too: it would have gone with their delete, had the producer not written. A key that has no row gets
one where there is something to restore. An auto-increment column belongs to the row, not to its
writer.
"""

from __future__ import annotations

from typing import Any, Final, NamedTuple, Protocol

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

STORED_BYTES_MAX: Final = 64 << 20
"""Bytes of the stored rows that a step may meet; a step that meets more is done in parts."""
_DIGITS = 70
"""Of the numbers that sums are undone in: what no column and no number of changes can reach."""


class StepTooLargeError(ZuflussError):
    """A step meets too many bytes: nothing was done, and it has to be done in parts."""


class Made(NamedTuple):
    """Rows as a step wants them."""

    rows: pa.RecordBatch
    """One per key; what stands in one that is not there does not matter."""
    there: Flags
    """Of each key: whether it has a row."""


class Step(Protocol):
    """Some keys and what becomes of them."""

    @property
    def rows(self) -> pa.RecordBatch:
        """A row per key, no key twice; the key is what counts of it."""
        ...

    def part(self, begin: int, end: int) -> Step:
        """The same, of some of its keys."""
        ...

    def made(self, table: KvTable, old: pa.RecordBatch, there: Flags, own: frozenset[int]) -> Made:
        """The rows after it, of the stored ones, where there are any.

        `own` has the ids of the producer's columns.
        """
        ...


class Undone(NamedTuple):
    """What a step does, as a put."""

    rows: pa.RecordBatch
    """The rows of the changelog."""
    kinds: npt.NDArray[np.uint8]
    """Their change types."""
    values: NewValues
    """The values that the keys end up with."""


class Restore(NamedTuple):
    """Put columns back."""

    rows: pa.RecordBatch
    """The rows before the first change, or inserted by it."""
    inserted: Flags
    """Of each: it was inserted by the first change."""

    def part(self, begin: int, end: int) -> Restore:
        """The same, of some of its keys."""
        return Restore(self.rows.slice(begin, end - begin), self.inserted[begin:end])

    def made(self, table: KvTable, old: pa.RecordBatch, there: Flags, own: frozenset[int]) -> Made:
        """The stored rows with the producer's columns as they were."""
        rows = fitted(self.rows, table.schema)
        keys = set(map(table.schema.index_of, table.schema.primary_key))
        mine = {i for i, c in enumerate(table.schema.columns) if c.id in own} - keys
        others = set(range(rows.num_columns)) - keys - mine - {table.auto_increment}
        emptied = _all_null(old, others)
        undoes = self.inserted | (_all_null(rows, mine) & ~_all_null(rows, others))
        gone = undoes & emptied
        stored, nothing = pa.array(there), pa.array(self.inserted)
        columns = []
        for i, column in enumerate(rows.columns):
            if i in keys:
                columns.append(column)
            elif i in mine:
                columns.append(_chosen(nothing, pa.nulls(len(column), column.type), column))
            elif i == table.auto_increment:
                columns.append(_chosen(stored, old.column(i), column))
            else:
                columns.append(old.column(i))
        return Made(pa.RecordBatch.from_arrays(columns, schema=table.schema.arrow), ~gone)


class Added(NamedTuple):
    """Take away what was added to columns."""

    rows: pa.RecordBatch
    """A row per key."""
    sums: dict[int, pa.Array]
    """By column id: what was added to each, as wide decimals; wrapping integers as int64."""

    def part(self, begin: int, end: int) -> Added:
        """The same, of some of its keys."""
        sums = {i: array.slice(begin, end - begin) for i, array in self.sums.items()}
        return Added(self.rows.slice(begin, end - begin), sums)

    def made(self, table: KvTable, old: pa.RecordBatch, there: Flags, own: frozenset[int]) -> Made:
        """The stored rows with less in some columns."""
        rows = fitted(self.rows, table.schema)
        keys = set(map(table.schema.index_of, table.schema.primary_key))
        touched = np.zeros(len(there), np.bool_)
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
                less = self._less(table, column, old.column(i), sums, rows)
                columns.append(_chosen(nonzero, less, old.column(i)))
        batch = pa.RecordBatch.from_arrays(columns, schema=table.schema.arrow)
        return Made(batch, there | touched)

    def _less(
        self, table: KvTable, column: Column, old: pa.Array, sums: pa.Array, rows: pa.RecordBatch
    ) -> pa.Array:
        kept = pc.fill_null(old.cast(sums.type), pa.scalar(0, sums.type))
        if pa.types.is_int64(sums.type):
            wrapped = kept.to_numpy() - sums.to_numpy()
            return pa.array(wrapped.astype(old.type.to_pandas_dtype()))
        left = pc.subtract(kept, sums)
        try:
            return left.cast(old.type)
        except pa.ArrowInvalid:
            raise _overflow(table, column, left, old.type, rows) from None


def undone(table: KvTable, step: Step, stored: Slices, own: frozenset[int]) -> Undone:
    """Work out a step; `stored` has the value of each of its keys, as the store gave them."""
    there = stored.starts != ABSENT
    old = _stored_rows(table, stored)
    new, stays = step.made(table, old, there, own)
    encoded = table.codec.encode(new.take(pa.array(np.flatnonzero(stays))))
    values = _spread(encoded, stays)
    changed = there != stays
    both = np.flatnonzero(there & stays)
    before = table.codec.encode(old.take(pa.array(both)))
    changed[both] = ~_equal(before, values.take(both))
    groups = np.flatnonzero(changed)
    rows, kinds = _changelog(old, new, groups, there[groups], stays[groups])
    put = prefixed(values.take(groups), table.info.schema_id, SCHEMA_ID_BYTES)
    more = int(np.count_nonzero(stays[groups])) - int(np.count_nonzero(there[groups]))
    return Undone(rows, kinds, NewValues(groups, put, more))


def fitted(rows: pa.RecordBatch, schema: Schema) -> pa.RecordBatch:
    """Rows of the schema, or of an earlier one: columns are only ever added, at the end."""
    missing = [pa.nulls(rows.num_rows, f.type) for f in list(schema.arrow)[rows.num_columns :]]
    return pa.RecordBatch.from_arrays([*rows.columns, *missing], schema=schema.arrow)


def invertible(column: Column) -> bool:
    """Whether what one writer added to a column can be taken away although others added since."""
    function = column.agg_function
    known = None if function is None else FUNCTIONS.get(function.type)
    return known is not None and known.invertible


def signed(column: Column, values: pa.Array, gone: Flags) -> pa.Array:
    """What changes added, as numbers that can be summed; values before changes are negative."""
    function, decimal = column.agg_function, column.data_type.root is Root.DECIMAL
    if function is not None and not decimal and function.parameter(OVERFLOW) == "wrap":
        numbers = pc.fill_null(values.cast(pa.int64()), 0).to_numpy()
        return pa.array(np.where(gone, -numbers, numbers))
    wide = pa.decimal256(_DIGITS, values.type.scale if decimal else 0)
    numbers = pc.fill_null(values.cast(wide), pa.scalar(0, wide))
    return _chosen(pa.array(gone), pc.negate(numbers), numbers)


def _stored_rows(table: KvTable, stored: Slices) -> pa.RecordBatch:
    """Stored values as columns; NULL throughout where there is none."""
    schema_ids, rows = split_values(packed(stored))
    return table.codec.decode(rows, table.field_counts[schema_ids])


def _changelog(
    old: pa.RecordBatch, new: pa.RecordBatch, groups: Positions, there: Flags, stays: Flags
) -> tuple[pa.RecordBatch, npt.NDArray[np.uint8]]:
    """The changes of keys in their order: old rows before new ones."""
    kinds = np.zeros((len(groups), 2), np.uint8)
    kinds[:, 0] = np.where(there, np.where(stays, UPDATE_BEFORE, DELETE), 0)
    kinds[:, 1] = np.where(stays, np.where(there, UPDATE_AFTER, INSERT), 0)
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


def _chosen(condition: pa.Array, yes: pa.Array, no: pa.Array) -> pa.Array:
    """One value or the other, of any type."""
    mask = condition.to_numpy(zero_copy_only=False)
    indexes = np.arange(len(mask)) + np.where(mask, 0, len(mask))
    return pa.concat_arrays([yes, no]).take(pa.array(indexes))


def _spread(encoded: Slices, where: Flags) -> Slices:
    """Byte strings at the places that are set, absent ones elsewhere."""
    starts = np.full(len(where), ABSENT, np.int64)
    ends = starts.copy()
    starts[where], ends[where] = encoded.starts, encoded.ends
    return Slices(encoded.data, starts, ends)


def _equal(one: Slices, other: Slices) -> Flags:
    """Which byte strings are the same."""
    if not one.count:
        return np.empty(0, np.bool_)
    same: Any = pc.equal(_binary(one), _binary(other))
    flags: Flags = same.to_numpy(zero_copy_only=False)
    return flags


def _binary(slices: Slices) -> pa.Array:
    compact = packed(slices)
    offsets = np.append(compact.starts, compact.ends[-1:])
    buffers = [None, pa.py_buffer(offsets), pa.py_buffer(compact.data)]
    return pa.Array.from_buffers(pa.large_binary(), slices.count, buffers)


def _overflow(
    table: KvTable, column: Column, left: pa.Array, type_: pa.DataType, rows: pa.RecordBatch
) -> AggregationError:
    """Name the first key whose value does not fit."""
    at = 0
    for i in range(len(left)):
        try:
            left.slice(i, 1).cast(type_)
        except pa.ArrowInvalid:
            at = i
            break
    key = {name: rows.column(name)[at].as_py() for name in table.schema.primary_key}
    return AggregationError(
        f"{table.info.path}: what the producer added to column {column.name} cannot be taken away "
        f"from key {key}: {left[at].as_py()} does not fit into {column.data_type}"
    )
