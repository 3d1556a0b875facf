"""Prepares rows of Spark for a writer: their types, their change types and their order.

Order matters if a repeated task must send the same batches. Rows that are sorted by their bytes
have the same order whatever order they came in.

| value of the change column | effect |
|---|---|
| `insert`, `+I`, `+A`, `update_after`, `+U` | the row is upserted |
| `delete`, `-D` | the row of its key is deleted |
| `update_before`, `-U` | none: the row after it has the new values |
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from zufluss.client.core.convert import ColumnMismatchError, chosen, conform
from zufluss.model.table import TableInfo
from zufluss.record.slices import Slices
from zufluss.spark.types import changed_type

UPSERTS: Final = ("insert", "+I", "+A", "update_after", "+U")
DELETES: Final = ("delete", "-D")
SKIPPED: Final = ("update_before", "-U")

KEY_BYTES_MAX: Final = 128 << 20
"""The most bytes of keys that are compared; with more, all rows are sent as they came."""
_DAY_MICROS: Final = 86_400_000_000


def of_spark(rows: pa.RecordBatch, schema: pa.Schema, columns: Sequence[str]) -> pa.RecordBatch:
    """These columns of Spark's rows, in the types of the table."""
    target = schema if list(columns) == schema.names else chosen(schema, columns)
    fields = [_of_spark(rows.column(field.name), field) for field in target]
    for column, field in zip(fields, target, strict=True):
        _check_parts(column, field, field.name)
    plain = pa.RecordBatch.from_arrays(fields, names=list(target.names))
    return conform(plain, target)


def _of_spark(column: pa.Array, field: pa.Field) -> pa.Array:
    """A column with its times in the table's precision; a TIME is a number in Spark."""
    if pa.types.is_null(column.type) or not _has_times(field.type):
        return column
    finest = changed_type(field.type, _in_micros)
    try:
        if _has_times(field.type, of_day=True):
            _check_times_of_day(column, field)
            column = column.cast(changed_type(finest, _days_in_micros)).cast(finest)
        return column if finest.equals(field.type) else _cut(column, field.type)
    except pa.ArrowException as problem:
        raise ColumnMismatchError(
            f"column {field.name!r}: the rows have {column.type}, the table {field.type}: {problem}"
        ) from problem


def _cut(column: pa.Array, of: pa.DataType) -> pa.Array:
    """Times in the table's unit, cut if it is coarser; times in nested values have to fit."""
    coarser = {"s": "second", "ms": "millisecond"}
    if (pa.types.is_timestamp(of) or pa.types.is_time(of)) and of.unit in coarser:
        column = pc.floor_temporal(column, unit=coarser[of.unit])
    return column.cast(of)


def _check_times_of_day(column: pa.Array, field: pa.Field) -> None:
    if pa.types.is_int64(column.type):
        low, high = pc.min_max(column).values()
        if low.is_valid and (low.as_py() < 0 or high.as_py() >= _DAY_MICROS):
            raise ColumnMismatchError(
                f"column {field.name!r} is a time of the day, in Spark microseconds from 0 to "
                f"{_DAY_MICROS - 1}; the rows have {low} to {high}"
            )


def _has_times(of: pa.DataType, *, of_day: bool = False) -> bool:
    """Whether a type contains times that Spark has in another form."""
    other = changed_type(of, _days_in_micros if of_day else _in_micros)
    return not other.equals(of) or (not of_day and _has_times(of, of_day=True))


def _in_micros(of: pa.DataType) -> pa.DataType:
    if pa.types.is_timestamp(of) and of.unit in ("s", "ms"):
        return pa.timestamp("us", of.tz)
    return pa.time64("us") if pa.types.is_time(of) else of


def _days_in_micros(of: pa.DataType) -> pa.DataType:
    return pa.int64() if pa.types.is_time(of) else of


def _check_parts(column: pa.Array, field: pa.Field, name: str) -> None:
    """Raise `ColumnMismatchError` for a null in a nested field that is NOT NULL."""
    if pa.types.is_list(column.type) and pa.types.is_list(field.type):
        _check_part(column.flatten(), field.type.value_field, f"{name}.element")
    elif pa.types.is_map(column.type) and pa.types.is_map(field.type):
        start, end = column.offsets[0].as_py(), column.offsets[-1].as_py()
        _check_part(column.items[start:end], field.type.item_field, f"{name}.value")
    elif pa.types.is_struct(column.type) and pa.types.is_struct(field.type):
        there = column.drop_null()
        for number, part in enumerate(field.type):
            _check_part(there.field(number), part, f"{name}.{part.name}")


def _check_part(column: pa.Array, field: pa.Field, name: str) -> None:
    if not field.nullable and column.null_count:
        raise ColumnMismatchError(
            f"column {name!r} has {column.null_count} nulls in the rows, and it is NOT NULL in the "
            "table; fill them (coalesce), or leave these rows out"
        )
    _check_parts(column, field, name)


def by_change(rows: pa.RecordBatch, change_column: str) -> Iterator[tuple[bool, pa.RecordBatch]]:
    """Rows in runs of upserts (False) and deletes (True), in order."""
    rows, actions = _to_do(rows, change_column)
    start = 0
    for end in (*(np.flatnonzero(np.diff(actions)) + 1).tolist(), rows.num_rows):
        if start < end:
            yield bool(actions[start]), rows.slice(start, end - start)
        start = end


def by_last_change(
    rows: pa.RecordBatch, change_column: str, info: TableInfo, ignore_deletes: bool = False
) -> Iterator[tuple[bool, pa.RecordBatch]]:
    """The last row of each key: those to be upserted (False), and those to be deleted (True)."""
    rows, actions = _to_do(rows, change_column)
    if ignore_deletes:
        rows, actions = rows.filter(pa.array(actions == 0)), actions[actions == 0]
    keys = LastOfKeys(info)
    keys.add(of_spark(rows, info.schema.arrow, info.schema.primary_key))
    last = keys.mask()
    for delete in (False, True):
        chosen_rows = actions == delete if last is None else last & (actions == delete)
        if chosen_rows.any():
            yield delete, rows.filter(pa.array(chosen_rows))


def _to_do(
    rows: pa.RecordBatch, change_column: str
) -> tuple[pa.RecordBatch, np.ndarray[tuple[int], np.dtype[np.int8]]]:
    """The rows with an effect, and the action of each."""
    actions = _actions(rows.column(change_column), change_column)
    if (actions >= 0).all():
        return rows, actions
    return rows.filter(pa.array(actions >= 0)), actions[actions >= 0]


def _actions(changes: pa.Array, name: str) -> np.ndarray[tuple[int], np.dtype[np.int8]]:
    """0 for an upsert, 1 for a delete, -1 for nothing."""
    out = np.full(len(changes), 2, np.int8)
    for action, names in ((0, UPSERTS), (1, DELETES), (-1, SKIPPED)):
        matches = pc.is_in(changes, value_set=pa.array(names))
        out[matches.to_numpy(zero_copy_only=False)] = action
    unknown = np.flatnonzero(out == 2)
    if len(unknown):
        raise ColumnMismatchError(
            f"column {name!r} has {changes[int(unknown[0])].as_py()!r}; allowed are "
            f"{', '.join((*UPSERTS, *DELETES, *SKIPPED))}"
        )
    return out


def in_content_order(batches: Iterable[pa.RecordBatch], info: TableInfo) -> list[pa.RecordBatch]:
    """All rows, sorted by their bytes; in a few batches, or in none."""
    from zufluss.record.rows.codec import RowCodec  # loads the compiled kernels

    codec = RowCodec(info.schema)
    whole = info.schema.arrow
    return [_sorted(rows, codec.encode(_whole(rows, whole))) for rows in joined(batches)]


def in_key_order(rows: pa.RecordBatch, info: TableInfo) -> pa.RecordBatch:
    """Rows sorted by the bytes of their keys."""
    from zufluss.record.keys.encoding import KeyEncoder  # loads the compiled kernels

    return _sorted(rows, Slices.contiguous(*KeyEncoder.of_stored_key(info).encode(rows)))


def joined(batches: Iterable[pa.RecordBatch]) -> list[pa.RecordBatch]:
    """All rows in one batch; none without rows, several if a text column has over 2 GB."""
    parts = list(batches)
    if not parts:
        return []
    together: list[pa.RecordBatch] = pa.Table.from_batches(parts).combine_chunks().to_batches()
    return together


def _sorted(rows: pa.RecordBatch, by: Slices) -> pa.RecordBatch:
    return rows.take(pc.sort_indices(as_binary(by)))


def as_binary(strings: Slices) -> pa.Array:
    """Contiguous byte strings as a binary array."""
    offsets = np.append(strings.starts, strings.ends[-1:])
    buffers = [None, pa.py_buffer(offsets.astype(np.int64)), pa.py_buffer(strings.data)]
    return pa.Array.from_buffers(pa.large_binary(), strings.count, buffers)


def folded(
    batches: Iterable[pa.RecordBatch], info: TableInfo, columns: Sequence[str]
) -> Iterator[pa.RecordBatch]:
    """All rows folded to one row of states per key, sorted by key; only the written columns."""
    from zufluss.record.aggregate.local import pre_aggregate  # loads the compiled kernels

    schema = info.schema
    targets = None if len(columns) == len(schema) else tuple(columns)
    for rows in joined(batches):
        states = pre_aggregate(_whole(rows, schema.arrow), schema, schema.primary_key, targets)
        yield in_key_order(states, info).select(list(columns))


def _whole(rows: pa.RecordBatch, schema: pa.Schema) -> pa.RecordBatch:
    """Rows with every column of the table; columns that the rows lack are null."""
    arrays = [
        rows.column(field.name)
        if field.name in rows.schema.names
        else pa.nulls(rows.num_rows, field.type)
        for field in schema
    ]
    return pa.RecordBatch.from_arrays(arrays, schema=schema)


class LastOfKeys:
    """Finds the last row of each key."""

    def __init__(self, info: TableInfo) -> None:
        from zufluss.record.keys.encoding import KeyEncoder  # loads the compiled kernels

        self._encoder = KeyEncoder(info.schema.primary_key, "compacted", None)
        self._keys: list[pa.Array] = []
        self._bytes = 0

    def add(self, rows: pa.RecordBatch) -> None:
        """Add the next rows."""
        if self._bytes <= KEY_BYTES_MAX:
            keys = as_binary(Slices.contiguous(*self._encoder.encode(rows)))
            self._bytes += keys.nbytes
            self._keys.append(keys)

    def mask(self) -> np.ndarray[tuple[int], np.dtype[np.bool_]] | None:
        """A mask of the last row of each key; None if all rows are last, or keys are too many."""
        if not self._keys or self._bytes > KEY_BYTES_MAX:
            return None
        keys = pa.chunked_array(self._keys).combine_chunks().dictionary_encode()
        numbers = keys.indices.to_numpy()
        last = np.empty(len(keys.dictionary), np.intp)
        last[numbers] = np.arange(len(numbers))  # for equal keys the last assignment wins
        if len(last) == len(numbers):
            return None
        out = np.zeros(len(numbers), np.bool_)
        out[last] = True
        return out
