"""Rows on their way from Spark to a writer: types, what to do with each, and their order.

Order matters where a task that is run again must send the same batches. Rows sorted by their bytes
have one order, whatever order they came in: equal rows cannot be told apart.

| value of the change column | what is done |
|---|---|
| `insert`, `+I`, `+A`, `update_after`, `+U` | the row is upserted |
| `delete`, `-D` | the row of its key is deleted |
| `update_before`, `-U` | nothing: what comes after says it |
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from zufluss.client.convert import ColumnMismatchError, chosen, conform
from zufluss.client.kvkeys import stored_key_encoder
from zufluss.model.table import TableInfo
from zufluss.record.slices import Slices
from zufluss.spark.types import changed_type

UPSERTS: Final = ("insert", "+I", "+A", "update_after", "+U")
DELETES: Final = ("delete", "-D")
SKIPPED: Final = ("update_before", "-U")

_DAY_MICROS: Final = 86_400_000_000


def of_spark(rows: pa.RecordBatch, schema: pa.Schema, columns: Sequence[str]) -> pa.RecordBatch:
    """Rows of Spark in the types of these columns of a table; others are left out."""
    wanted = schema if list(columns) == schema.names else chosen(schema, columns)
    fields = [_of_spark(rows.column(field.name), field) for field in wanted]
    plain = pa.RecordBatch.from_arrays(fields, names=list(wanted.names))
    return conform(plain, wanted)


def _of_spark(column: pa.Array, field: pa.Field) -> pa.Array:
    """A column with its times of the day as such, which are numbers in Spark."""
    micros = changed_type(field.type, _time_in_micros)
    if pa.types.is_null(column.type) or micros.equals(changed_type(field.type, _without_time)):
        return column
    if pa.types.is_int64(column.type):
        low, high = pc.min_max(column).values()
        if low.is_valid and (low.as_py() < 0 or high.as_py() >= _DAY_MICROS):
            raise ColumnMismatchError(
                f"column {field.name!r} is a time of the day, in Spark microseconds from 0 to "
                f"{_DAY_MICROS - 1}; the rows have {low} to {high}"
            )
    try:
        return column.cast(micros)
    except pa.ArrowException as problem:
        raise ColumnMismatchError(
            f"column {field.name!r}: the rows have {column.type}, the table {field.type}: {problem}"
        ) from problem


def _time_in_micros(of: pa.DataType) -> pa.DataType:
    return pa.time64("us") if pa.types.is_time(of) else of


def _without_time(of: pa.DataType) -> pa.DataType:
    return pa.int64() if pa.types.is_time(of) else of


def by_change(rows: pa.RecordBatch, change_column: str) -> Iterator[tuple[bool, pa.RecordBatch]]:
    """Rows in runs of upserts (False) and deletes (True), in order."""
    actions = _actions(rows.column(change_column), change_column)
    ends = [*(np.flatnonzero(np.diff(actions)) + 1).tolist(), rows.num_rows]
    start = 0
    for end in ends:
        if start < end and actions[start] >= 0:
            yield bool(actions[start]), rows.slice(start, end - start)
        start = end


def _actions(changes: pa.Array, name: str) -> np.ndarray[tuple[int], np.dtype[np.int8]]:
    """0 for an upsert, 1 for a delete, -1 for nothing."""
    out = np.full(len(changes), 2, np.int8)
    for action, names in ((0, UPSERTS), (1, DELETES), (-1, SKIPPED)):
        found = pc.is_in(changes, value_set=pa.array(names))
        out[found.to_numpy(zero_copy_only=False)] = action
    unknown = np.flatnonzero(out == 2)
    if len(unknown):
        raise ColumnMismatchError(
            f"column {name!r} has {changes[int(unknown[0])].as_py()!r}; allowed are "
            f"{', '.join((*UPSERTS, *DELETES, *SKIPPED))}"
        )
    return out


def in_content_order(batches: Iterable[pa.RecordBatch], info: TableInfo) -> list[pa.RecordBatch]:
    """All rows, sorted by their bytes; in a few batches, or in none."""
    from zufluss.record.rowcodec import RowCodec  # loads the compiled kernels

    codec = RowCodec(info.schema)
    whole = info.schema.arrow
    return [_sorted(rows, codec.encode(_whole(rows, whole))) for rows in joined(batches)]


def in_key_order(rows: pa.RecordBatch, info: TableInfo) -> pa.RecordBatch:
    """Rows sorted by the bytes of their keys."""
    return _sorted(rows, Slices.contiguous(*stored_key_encoder(info).encode(rows)))


def joined(batches: Iterable[pa.RecordBatch]) -> list[pa.RecordBatch]:
    """All rows in one batch, if there are any; in more where a text column has over 2 GB."""
    found = list(batches)
    if not found:
        return []
    together: list[pa.RecordBatch] = pa.Table.from_batches(found).combine_chunks().to_batches()
    return together


def _sorted(rows: pa.RecordBatch, by: Slices) -> pa.RecordBatch:
    """Rows in the order of byte strings that lie one after the other."""
    offsets = np.append(by.starts, by.ends[-1:])
    buffers = [None, pa.py_buffer(offsets.astype(np.int64)), pa.py_buffer(by.data)]
    keys = pa.Array.from_buffers(pa.large_binary(), len(rows), buffers)
    return rows.take(pc.sort_indices(keys))


def folded(
    batches: Iterable[pa.RecordBatch], info: TableInfo, columns: Sequence[str]
) -> Iterator[pa.RecordBatch]:
    """All rows as one row of states for each key, sorted by key; of the columns written."""
    from zufluss.record.aggregate.local import pre_aggregate  # loads the compiled kernels

    schema = info.schema
    targets = None if len(columns) == len(schema) else tuple(columns)
    for rows in joined(batches):
        states = pre_aggregate(_whole(rows, schema.arrow), schema, schema.primary_key, targets)
        yield in_key_order(states, info).select(list(columns))


def _whole(rows: pa.RecordBatch, schema: pa.Schema) -> pa.RecordBatch:
    """Rows with every column of the table, null where they have none."""
    arrays = [
        rows.column(field.name)
        if field.name in rows.schema.names
        else pa.nulls(rows.num_rows, field.type)
        for field in schema
    ]
    return pa.RecordBatch.from_arrays(arrays, schema=schema)
