"""Converts record batches so that all values can be printed.

Arrow converts dates, times and timestamps to text, because Python's `datetime` has no nanoseconds
and no far years.
"""

from __future__ import annotations

import pyarrow as pa
import pyarrow.types as pat


def printable(batch: pa.RecordBatch) -> pa.RecordBatch:
    """Convert temporal values to ISO 8601 text, also nested ones."""
    columns = [
        column if (target := _text_type(column.type)) == column.type else column.cast(target)
        for column in batch.columns
    ]
    return pa.RecordBatch.from_arrays(columns, names=batch.schema.names)


def _text_type(data_type: pa.DataType) -> pa.DataType:
    """Replace every temporal type by text."""
    if pat.is_temporal(data_type):
        return pa.string()
    if pat.is_list(data_type):
        return pa.list_(data_type.value_field.with_type(_text_type(data_type.value_type)))
    if pat.is_map(data_type):
        return pa.map_(
            data_type.key_field.with_type(_text_type(data_type.key_type)),
            data_type.item_field.with_type(_text_type(data_type.item_type)),
        )
    if pat.is_struct(data_type):
        return pa.struct([field.with_type(_text_type(field.type)) for field in data_type])
    return data_type
