"""Record batches whose values all have a Python form that prints.

Dates, times and timestamps become text in Arrow, where nanoseconds and far years have a form;
Python's `datetime` has none for them.
"""

from __future__ import annotations

import pyarrow as pa
import pyarrow.types as pat


def printable(batch: pa.RecordBatch) -> pa.RecordBatch:
    """The batch with temporal values as ISO 8601 text, nested ones too."""
    columns = [
        column if (target := _text_type(column.type)) == column.type else column.cast(target)
        for column in batch.columns
    ]
    return pa.RecordBatch.from_arrays(columns, names=batch.schema.names)


def _text_type(data_type: pa.DataType) -> pa.DataType:
    """The type with text in place of every temporal type."""
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
