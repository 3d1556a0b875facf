"""Parquet files for Iceberg: Arrow schemas with field ids, and columns in lake types.

The Arrow schema comes straight from the Iceberg schema's JSON, so that a task that writes local
files loads no Iceberg library.

| Iceberg | Arrow | from the table's |
|---|---|---|
| boolean, float, double, date, string, binary, decimal | the same | the same |
| int | int32 | TINYINT, SMALLINT, INT |
| long | int64 | BIGINT |
| time | time64(us) | TIME of any precision; digits below micros are cut |
| timestamp(tz) | timestamp(us[, UTC]) | TIMESTAMP(_LTZ) of any precision; cut likewise |
| fixed[n] | fixed_size_binary(n) | BINARY(n) |
| struct, list, map | the same | ROW, ARRAY, MAP |

`convert` works in both directions. Digits are cut towards the past, also before 1970. Fields are
found in files by id, in foreign files without ids by name.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from typing import Any, Final

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from zufluss.lake.base import LakeTableError

FIELD_ID: Final = b"PARQUET:field_id"
_PRIMITIVE: Final = {
    "boolean": pa.bool_(),
    "int": pa.int32(),
    "long": pa.int64(),
    "float": pa.float32(),
    "double": pa.float64(),
    "date": pa.date32(),
    "time": pa.time64("us"),
    "timestamp": pa.timestamp("us"),
    "timestamptz": pa.timestamp("us", "UTC"),
    "string": pa.string(),
    "binary": pa.binary(),
    "uuid": pa.binary(16),
}
_FIXED = re.compile(r"fixed\[(\d+)\]")
_DECIMAL = re.compile(r"decimal\((\d+),\s*(\d+)\)")


def arrow_schema(schema_json: str) -> pa.Schema:
    """The Arrow schema of an Iceberg schema, with field ids in the metadata of fields."""
    return pa.schema([_struct_field(field) for field in json.loads(schema_json)["fields"]])


def field_id(field: pa.Field) -> int | None:
    """The id of a field, None if it has none."""
    text = (field.metadata or {}).get(FIELD_ID)
    return None if text is None else int(text)


def _struct_field(obj: Mapping[str, Any]) -> pa.Field:
    return _field(obj["name"], obj["type"], obj["id"], obj["required"])


def _field(name: str, kind: Any, id: int, required: bool) -> pa.Field:
    return pa.field(name, _type(kind), not required, {FIELD_ID: str(id).encode()})


def _type(kind: Any) -> pa.DataType:
    if isinstance(kind, str):
        return _primitive(kind)
    if kind["type"] == "struct":
        return pa.struct([_struct_field(field) for field in kind["fields"]])
    if kind["type"] == "list":
        required = kind["element-required"]
        return pa.list_(_field("element", kind["element"], kind["element-id"], required))
    key = _field("key", kind["key"], kind["key-id"], True)
    return pa.map_(key, _field("value", kind["value"], kind["value-id"], kind["value-required"]))


def _primitive(kind: str) -> pa.DataType:
    if kind in _PRIMITIVE:
        return _PRIMITIVE[kind]
    if match := _FIXED.fullmatch(kind):
        return pa.binary(int(match[1]))
    if match := _DECIMAL.fullmatch(kind):
        return pa.decimal128(int(match[1]), int(match[2]))
    raise LakeTableError(
        f"the lake table has a column of Iceberg type {kind!r}, which is not known here; "
        f"known are {', '.join(_PRIMITIVE)}, fixed[n] and decimal(p, s)"
    )


def leaves(schema: pa.Schema) -> Iterator[tuple[pa.Field, bool]]:
    """The columns a Parquet file of this schema has, in order, and whether they are repeated."""
    for field in schema:
        yield from _leaves(field, False)


def _leaves(field: pa.Field, repeated: bool) -> Iterator[tuple[pa.Field, bool]]:
    kind = field.type
    if pa.types.is_struct(kind):
        for child in kind:
            yield from _leaves(child, repeated)
    elif pa.types.is_map(kind):
        yield from _leaves(kind.key_field, True)
        yield from _leaves(kind.item_field, True)
    elif pa.types.is_list(kind):
        yield from _leaves(kind.value_field, True)
    else:
        yield field, repeated


def convert(column: pa.ChunkedArray, kind: pa.DataType) -> pa.ChunkedArray:
    """A column in another type: from the table's to the lake's, or back."""
    if column.type.equals(kind, check_metadata=True):
        return column
    return pa.chunked_array([convert_array(chunk, kind) for chunk in column.chunks], kind)


def convert_array(array: pa.Array, kind: pa.DataType) -> pa.Array:
    """`convert` for an array."""
    if array.type.equals(kind, check_metadata=True):
        return array
    if pa.types.is_struct(kind):
        return _convert_struct(array, kind)
    if pa.types.is_map(kind):
        fields = [kind.key_field, kind.item_field]
        children = [
            convert_array(array.keys, kind.key_type),
            convert_array(array.items, kind.item_type),
        ]
        return _with_child(array, kind, pa.StructArray.from_arrays(children, fields=fields))
    if pa.types.is_list(kind):
        return _with_child(array, kind, convert_array(array.values, kind.value_type))
    if _is_cut(array.type, kind):
        array = pc.floor_temporal(array, unit="microsecond")
    return array.cast(kind, safe=not pa.types.is_time(kind))


def _convert_struct(array: pa.StructArray, kind: pa.StructType) -> pa.Array:
    """By field names; fields the array lacks are null."""
    children = []
    for field in kind:
        at = array.type.get_field_index(field.name)
        if at < 0:
            children.append(pa.nulls(len(array), field.type))
        else:
            child = convert_array(array.field(at), field.type)
            children.append(child if field.nullable else _without_nulls(child, array))
    mask = array.is_null() if array.null_count else None
    return pa.StructArray.from_arrays(children, fields=list(kind), mask=mask)


def _without_nulls(child: pa.Array, parent: pa.Array) -> pa.Array:
    """A required field without the nulls it has where the whole struct is null.

    Parquet refuses these nulls. Other nulls stay, and Parquet refuses them.
    """
    if not child.null_count or pc.any(pc.and_(child.is_null(), parent.is_valid())).as_py():
        return child
    if pa.types.is_struct(child.type):
        fields = list(child.type)
        return pa.StructArray.from_arrays([child.field(f.name) for f in fields], fields=fields)
    if pa.types.is_nested(child.type):
        offsets = child.buffers()[1]
        return pa.Array.from_buffers(
            child.type, len(child), [None, offsets], 0, child.offset, [_values(child)]
        )
    buffers = [None, *child.buffers()[1:]]
    return pa.Array.from_buffers(child.type, len(child), buffers, 0, child.offset)


def _values(array: pa.Array) -> pa.Array:
    """The values of a list or a map."""
    if not pa.types.is_map(array.type):
        return array.values
    fields = [array.type.key_field, array.type.item_field]
    return pa.StructArray.from_arrays([array.keys, array.items], fields=fields)


def _with_child(array: pa.Array, kind: pa.DataType, child: pa.Array) -> pa.Array:
    """A list or map with other values, its validity and offsets shared."""
    buffers = array.buffers()[:2]
    return pa.Array.from_buffers(kind, len(array), buffers, -1, array.offset, [child])


def _is_cut(old: pa.DataType, new: pa.DataType) -> bool:
    return bool(pa.types.is_timestamp(old) and old.unit == "ns" and new.unit != "ns")


def convert_table(table: pa.Table, schema: pa.Schema) -> pa.Table:
    """The columns of a schema by name, in its types; columns the table lacks are null."""
    columns = []
    for field in schema:
        at = table.schema.get_field_index(field.name)
        if at < 0:
            columns.append(pa.nulls(table.num_rows, field.type))
        else:
            columns.append(convert(table.column(at), field.type))
    return pa.Table.from_arrays(columns, schema=schema)


def columns_in_file(file: pa.Schema, schema: pa.Schema) -> dict[str, str]:
    """The names that fields of `wanted` have in a file; those it lacks are left out."""
    by_id = {field_id(field): field.name for field in file}
    if set(by_id) == {None}:
        names = set(file.names)
        return {field.name: field.name for field in schema if field.name in names}
    ids = {field.name: field_id(field) for field in schema}
    return {name: by_id[id] for name, id in ids.items() if id is not None and id in by_id}


def writer_options(schema: pa.Schema, properties: Mapping[str, str]) -> dict[str, Any]:
    """Parquet options: table properties, and dictionaries where they pay.

    Numbers rarely repeat enough for a dictionary to beat zstd; texts and bytes often do, and of the
    system columns all but the offset are nearly constant.
    """
    codec = properties.get("write.parquet.compression-codec", "zstd").lower()
    level = properties.get("write.parquet.compression-level")
    texts = [
        field.name
        for field in schema
        if field.type in (pa.string(), pa.binary()) or field.name in ("__bucket", "__timestamp")
    ]
    return {
        "compression": "none" if codec == "uncompressed" else codec,
        "compression_level": None if level is None else int(level),
        "use_dictionary": texts,
        "store_decimal_as_integer": True,
        "store_schema": False,
    }


def open_writer(sink: Any, schema: pa.Schema, properties: Mapping[str, str]) -> pq.ParquetWriter:
    """A writer with these properties."""
    return pq.ParquetWriter(sink, schema, **writer_options(schema, properties))
