"""Cuts times to microseconds, because a lake has no finer ones and a union read shows none.

Cutting rounds down, also before 1970, as on the way into the lake. Types stay as they are.
"""

from __future__ import annotations

import pyarrow as pa
import pyarrow.compute as pc


def has_nanos(of: pa.DataType) -> bool:
    """Whether values of a type may be finer than a microsecond, at any depth."""
    if pa.types.is_timestamp(of) or pa.types.is_time64(of):
        return bool(of.unit == "ns")
    return any(has_nanos(of.field(i).type) for i in range(of.num_fields))


def cut_to_micros(rows: pa.Table) -> pa.Table:
    """Cut all times in a table to microseconds."""
    for at, field in enumerate(rows.schema):
        if has_nanos(field.type):
            chunks = [_cut(chunk) for chunk in rows.column(at).chunks]
            rows = rows.set_column(at, field, pa.chunked_array(chunks, field.type))
    return rows


def _cut(array: pa.Array) -> pa.Array:
    of = array.type
    if not has_nanos(of):
        return array
    if pa.types.is_struct(of):
        children = [_cut(array.field(i)) for i in range(of.num_fields)]
        mask = array.is_null() if array.null_count else None
        return pa.StructArray.from_arrays(children, fields=list(of), mask=mask)
    if pa.types.is_map(of):
        entries = [_cut(array.keys), _cut(array.items)]
        fields = [of.key_field, of.item_field]
        return _with_child(array, pa.StructArray.from_arrays(entries, fields=fields))
    if pa.types.is_list(of):
        return _with_child(array, _cut(array.values))
    return pc.floor_temporal(array, unit="microsecond").cast(of)


def _with_child(array: pa.Array, child: pa.Array) -> pa.Array:
    """A list or map with other values and the same validity and offsets."""
    buffers = array.buffers()[:2]
    return pa.Array.from_buffers(array.type, len(array), buffers, -1, array.offset, [child])
