"""Row values (the Python forms of `zufluss.record.rows.binary`) as Arrow columns, and back.

The plain row codecs work on one value at a time, everything else on Arrow batches. A value is
rounded down to the unit of its Arrow type, as other clients do when they write Arrow.
"""

from __future__ import annotations

from collections.abc import Sequence

import pyarrow as pa

from zufluss.errors import CorruptRecordError
from zufluss.model.schema import Schema
from zufluss.model.types import (
    ArrayType,
    DataType,
    LengthType,
    MapType,
    Root,
    RowType,
    TemporalType,
)
from zufluss.record.rows import values as scalars
from zufluss.record.rows.binary import MILLI_NS, Value
from zufluss.record.rows.values import UNIT_NS


def batch_of_rows(rows: Sequence[Sequence[Value]], schema: Schema) -> pa.RecordBatch:
    """Return an Arrow batch of row values; raises `CorruptRecordError` if Arrow cannot hold one."""
    arrays = []
    for i, column in enumerate(schema.columns):
        values = [_arrow_form(row[i], column.data_type) for row in rows]
        try:
            arrays.append(pa.array(values, column.data_type.to_arrow()))
        except (pa.ArrowException, OverflowError) as e:
            raise CorruptRecordError(
                f"column {column.name!r} ({column.data_type}) has a value beyond Arrow: {e}"
            ) from None
    return pa.RecordBatch.from_arrays(arrays, schema=schema.arrow)


def rows_of_batch(batch: pa.RecordBatch, schema: Schema) -> list[tuple[Value, ...]]:
    """Return the row values of an Arrow batch that has the schema's Arrow types."""
    columns = [
        values_of(batch.column(i), column.data_type) for i, column in enumerate(schema.columns)
    ]
    return list(zip(*columns, strict=True)) if columns else [()] * batch.num_rows


def values_of(array: pa.Array, data_type: DataType) -> list[Value]:
    """Return the row values of an Arrow array, nested ones too."""
    if isinstance(data_type, ArrayType):
        items = values_of(array.values, data_type.element)
        return _slices(array, items)
    if isinstance(data_type, MapType):
        keys = values_of(array.keys, data_type.key)
        values = values_of(array.items, data_type.value)
        return _slices(array, list(zip(keys, values, strict=True)))
    if isinstance(data_type, RowType):
        children = [
            values_of(child, field.data_type)
            for child, field in zip(array.flatten(), data_type.fields, strict=True)
        ]
        rows = list(zip(*children, strict=True)) if children else [()] * len(array)
        valid = array.is_valid().to_pylist()
        return [row if ok else None for row, ok in zip(rows, valid, strict=True)]
    return scalars.values_of(array, data_type)


def _slices(array: pa.Array, items: list[Value]) -> list[Value]:
    offsets = array.offsets.to_pylist()
    valid = array.is_valid().to_pylist()
    return [items[offsets[i] : offsets[i + 1]] if valid[i] else None for i in range(len(array))]


def _arrow_form(value: Value, data_type: DataType) -> Value:
    """Return a row value in the form that `pa.array` takes for the type's Arrow type."""
    if value is None:
        return None
    if isinstance(data_type, TemporalType):
        nanoseconds = value * MILLI_NS if data_type.root is Root.TIME else value
        return nanoseconds // UNIT_NS[data_type.unit]
    if isinstance(data_type, ArrayType):
        return [_arrow_form(item, data_type.element) for item in value]
    if isinstance(data_type, MapType):
        return [(_arrow_form(k, data_type.key), _arrow_form(v, data_type.value)) for k, v in value]
    if isinstance(data_type, RowType):
        return {
            field.name: _arrow_form(v, field.data_type)
            for field, v in zip(data_type.fields, value, strict=True)
        }
    if isinstance(data_type, LengthType) and data_type.root is Root.BINARY:
        return value.ljust(data_type.length, b"\0")
    return value
