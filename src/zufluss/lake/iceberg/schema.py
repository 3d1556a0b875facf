"""The lake table that fits a table: types, columns, partition spec, sort order, properties.

| type | Iceberg | note |
|---|---|---|
| BOOLEAN | boolean | |
| TINYINT, SMALLINT, INT | int | |
| BIGINT | long | |
| FLOAT, DOUBLE | float, double | |
| CHAR, STRING | string | |
| BINARY, BYTES | binary | |
| DECIMAL(p, s) | decimal(p, s) | |
| DATE | date | |
| TIME(p) | time | microseconds; more digits are cut |
| TIMESTAMP(p) | timestamp | microseconds; more digits are cut |
| TIMESTAMP_LTZ(p) | timestamptz | microseconds; more digits are cut |
| ARRAY, MAP, ROW | list, map, struct | |

A column that is NOT NULL is required. Field ids count from 1: first the columns and the system
columns, then what is nested in them. A column added later is placed before the system columns and
gets the next free id; nobody may rely on positions.

The partition spec is the partition keys as they are, then `bucket[n]` of the bucket key, or
`__bucket` as it is where there is no bucket key or more than one. The sort order is `__offset`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import count
from typing import Any

import pyarrow as pa
from pyiceberg.io.pyarrow import schema_to_pyarrow
from pyiceberg.partitioning import PartitionField, PartitionSpec
from pyiceberg.schema import Schema
from pyiceberg.table.metadata import TableMetadata
from pyiceberg.table.sorting import NullOrder, SortDirection, SortField, SortOrder
from pyiceberg.transforms import BucketTransform, IdentityTransform, Transform
from pyiceberg.types import (
    BinaryType,
    BooleanType,
    DateType,
    DecimalType,
    DoubleType,
    FloatType,
    IcebergType,
    IntegerType,
    ListType,
    LongType,
    MapType,
    NestedField,
    StringType,
    StructType,
    TimestampType,
    TimestamptzType,
    TimeType,
)

from zufluss.lake.base import LakeTableError, table_identity
from zufluss.lake.iceberg.handle import PartitionValues
from zufluss.lake.iceberg.rules import PARTITION_KEYS
from zufluss.lake_formats import is_place, opens_files
from zufluss.model import types as t
from zufluss.model.lake import BUCKET_COLUMN, OFFSET_COLUMN, SYSTEM_COLUMNS, TIMESTAMP_COLUMN
from zufluss.model.partition import spec_of
from zufluss.model.table import TableInfo

_SCALARS: dict[t.Root, IcebergType] = {
    t.Root.BOOLEAN: BooleanType(),
    t.Root.TINYINT: IntegerType(),
    t.Root.SMALLINT: IntegerType(),
    t.Root.INTEGER: IntegerType(),
    t.Root.BIGINT: LongType(),
    t.Root.FLOAT: FloatType(),
    t.Root.DOUBLE: DoubleType(),
    t.Root.CHAR: StringType(),
    t.Root.STRING: StringType(),
    t.Root.BINARY: BinaryType(),
    t.Root.BYTES: BinaryType(),
    t.Root.DATE: DateType(),
    t.Root.TIME: TimeType(),
    t.Root.TIMESTAMP: TimestampType(),
    t.Root.TIMESTAMP_LTZ: TimestamptzType(),
}
_SYSTEM: dict[str, IcebergType] = {
    BUCKET_COLUMN: IntegerType(),
    OFFSET_COLUMN: LongType(),
    TIMESTAMP_COLUMN: TimestamptzType(),
}
_AFRESH = "drop and re-create the table itself, which is then tiered afresh beside the old one"
"""The remedy that always works."""
_BUCKET_KEYS = frozenset(
    {
        *(t.Root.INTEGER, t.Root.BIGINT, t.Root.DECIMAL, t.Root.DATE, t.Root.TIME),
        *(t.Root.TIMESTAMP, t.Root.CHAR, t.Root.STRING, t.Root.BINARY, t.Root.BYTES),
    }
)
"""Types whose Iceberg bucket is the table's bucket."""

FLUSS_PREFIX = "fluss."
ICEBERG_PREFIX = "iceberg."
_CATALOG_PREFIX = "table.datalake.iceberg."
_RESERVED = ("zufluss.", "format-version")
"""Properties of the lake table that no property of the table sets."""
_DEFAULTS = {
    "write.parquet.compression-codec": "zstd",
    "write.metadata.delete-after-commit.enabled": "true",
    "write.metadata.previous-versions-max": "20",
}
_MERGE_ON_READ = {f"write.{verb}.mode": "merge-on-read" for verb in ("delete", "update", "merge")}


def iceberg_type(data_type: t.DataType, next_id: Callable[[], int]) -> IcebergType:
    """The Iceberg type of a type; nested fields get their ids from `next_id`."""
    if isinstance(data_type, t.DecimalType):
        return DecimalType(data_type.precision, data_type.scale)
    if isinstance(data_type, t.ArrayType):
        element_id = next_id()
        element = iceberg_type(data_type.element, next_id)
        return ListType(
            element_id=element_id,
            element_type=element,
            element_required=not data_type.element.nullable,
        )
    if isinstance(data_type, t.MapType):
        key_id, value_id = next_id(), next_id()
        return MapType(
            key_id=key_id,
            key_type=iceberg_type(data_type.key, next_id),
            value_id=value_id,
            value_type=iceberg_type(data_type.value, next_id),
            value_required=not data_type.value.nullable,
        )
    if isinstance(data_type, t.RowType):
        ids = [next_id() for _ in data_type.fields]
        return StructType(
            *(
                _field(i, f.name, f.data_type, f.description, next_id)
                for i, f in zip(ids, data_type.fields, strict=True)
            )
        )
    return _SCALARS[data_type.root]


def _field(
    field_id: int,
    name: str,
    data_type: t.DataType,
    doc: str | None,
    next_id: Callable[[], int],
) -> NestedField:
    return NestedField(
        field_id=field_id,
        name=name,
        field_type=iceberg_type(data_type, next_id),
        required=not data_type.nullable,
        doc=doc,
    )


def iceberg_schema(table: TableInfo) -> Schema:
    """The schema of a new lake table."""
    columns = table.schema.columns
    nested = count(len(columns) + len(SYSTEM_COLUMNS) + 1)
    fields = [
        _field(i, column.name, column.data_type, column.comment, nested.__next__)
        for i, column in enumerate(columns, start=1)
    ]
    for i, (name, data_type) in enumerate(_SYSTEM.items(), start=len(columns) + 1):
        fields.append(NestedField(field_id=i, name=name, field_type=data_type, required=True))
    keys = [table.schema.index_of(name) + 1 for name in table.schema.primary_key]
    return Schema(*fields, schema_id=0, identifier_field_ids=keys)


def arrow_schema(schema: Schema) -> pa.Schema:
    """The Arrow schema of files to write: field ids as `PARQUET:field_id`, required = not null."""
    return schema_to_pyarrow(schema, include_field_ids=True)


def has_bucket_transform(table: TableInfo) -> bool:
    """Whether the bucket is `bucket[n]` of a column, not the column `__bucket`."""
    keys = table.bucket_keys
    return len(keys) == 1 and table.schema.column(keys[0]).data_type.root in _BUCKET_KEYS


def partition_spec(table: TableInfo, schema: Schema) -> PartitionSpec:
    """The partition spec of a lake table with this schema."""
    fields: list[tuple[str, str, Transform[Any, Any]]] = [
        (key, key, IdentityTransform()) for key in table.partition_keys
    ]
    if has_bucket_transform(table):
        key = table.bucket_keys[0]
        fields.append((key, f"{key}_bucket", BucketTransform(table.bucket_count)))
    else:
        fields.append((BUCKET_COLUMN, BUCKET_COLUMN, IdentityTransform()))
    return PartitionSpec(
        *(
            PartitionField(schema.find_field(column).field_id, 1000 + i, transform, name)
            for i, (column, name, transform) in enumerate(fields)
        ),
        spec_id=0,
    )


def sort_order(schema: Schema) -> SortOrder:
    """The sort order of a lake table with this schema."""
    by_offset = SortField(
        source_id=schema.find_field(OFFSET_COLUMN).field_id,
        transform=IdentityTransform(),
        direction=SortDirection.ASC,
        null_order=NullOrder.NULLS_FIRST,
    )
    return SortOrder(by_offset, order_id=1)


def sorted_alike(metadata: TableMetadata, schema: Schema) -> bool:
    """Whether a lake table is sorted as a new one with this schema, or not sorted at all."""
    actual, here = metadata.sort_order().fields, metadata.schema()
    return not actual or [
        (here.find_column_name(f.source_id), f.transform, f.direction, f.null_order) for f in actual
    ] == [
        (schema.find_column_name(f.source_id), f.transform, f.direction, f.null_order)
        for f in sort_order(schema).fields
    ]


def partition_values(table: TableInfo, partition: str | None, bucket: int) -> PartitionValues:
    """The values of the spec's fields for the files of one bucket."""
    spec = spec_of(table.partition_keys, partition) if partition is not None else {}
    values = [
        PARTITION_KEYS[table.schema.column(key).data_type.root](spec[key])
        for key in table.partition_keys
    ]
    return (*values, bucket)


def partitions_values(table: TableInfo, names: Iterable[str]) -> frozenset[PartitionValues]:
    """The values of partitions, by name, without the bucket."""
    return frozenset(partition_values(table, name, 0)[:-1] for name in names)


def table_properties(table: TableInfo) -> dict[str, str]:
    """Properties of the lake table: defaults, the table's own, its identity.

    Catalog properties of the cluster may hold secrets and are left out.
    """
    out = _DEFAULTS | (_MERGE_ON_READ if table.has_primary_key else {})
    return out | followed_properties(table) | table_identity(table)


def followed_properties(table: TableInfo) -> dict[str, str]:
    """Properties that follow the table's: `iceberg.x` as `x`, every other one as `fluss.x`.

    Tables from before places were refused may have one; their files go to their own directory now.
    """
    descriptor = table.descriptor
    out = {}
    for key, value in {**descriptor.properties, **descriptor.custom_properties}.items():
        plain = key.startswith(ICEBERG_PREFIX)
        name = key.removeprefix(ICEBERG_PREFIX) if plain else FLUSS_PREFIX + key
        ours = key.startswith(_CATALOG_PREFIX) or name.startswith(_RESERVED)
        ours = ours or is_place(key) or opens_files(key)
        if not ours:
            out[name] = value
    return out


def missing_columns(table: TableInfo, metadata: TableMetadata) -> list[str]:
    """Columns to add to the lake table; `LakeTableError` if it was changed and does not fit."""
    lake_fields = {field.name: field for field in metadata.schema().fields}
    fields = {field.name: field for field in iceberg_schema(table).fields}
    earlier = {field.name for schema in metadata.schemas for field in schema.fields}
    missing = []
    for name, field in fields.items():
        if name in lake_fields:
            _check_field(table, lake_fields[name], field)
        elif name in earlier or name in SYSTEM_COLUMNS:
            raise _changed(table, name, "was dropped or renamed", "rename it back")
        else:
            missing.append(name)
    for name, field in lake_fields.items():
        if name not in fields and field.required:
            raise _changed(table, name, "was added as required", "make it optional")
    _check_spec(table, metadata)
    return missing


def _check_field(table: TableInfo, lake_field: NestedField, expected: NestedField) -> None:
    if not same_type(lake_field.field_type, expected.field_type):
        how = f"is {lake_field.field_type} instead of {expected.field_type}"
        raise _changed(table, lake_field.name, how, "change the type back")
    if lake_field.required and not expected.required:
        raise _changed(table, lake_field.name, "was made required", "make it optional again")


def _check_spec(table: TableInfo, metadata: TableMetadata) -> None:
    if metadata.format_version != 2:
        raise LakeTableError(
            f"lake table {table.path} has format version {metadata.format_version}; version 2 is "
            f"what can be written: restore it from an older metadata file, or {_AFRESH}"
        )
    schema = metadata.schema()
    expected = partition_spec(table, schema)
    if not expected.compatible_with(metadata.spec()):
        raise LakeTableError(
            f"lake table {table.path} is partitioned by {metadata.spec()}, not by {expected}; its "
            f"partition spec was changed from outside: change it back, or {_AFRESH}"
        )


def _changed(table: TableInfo, column: str, how: str, way_out: str) -> LakeTableError:
    return LakeTableError(
        f"column {column!r} of lake table {table.path} {how}; the lake table was changed from "
        f"outside and does not fit the table: {way_out}, or {_AFRESH}"
    )


def same_type(a: IcebergType, b: IcebergType) -> bool:
    """Whether two types hold the same values, whatever their field ids and comments."""
    if type(a) is not type(b):
        return False
    inner_a, inner_b = list(_inner(a)), list(_inner(b))
    if not inner_a and not inner_b:
        return bool(a == b)
    return len(inner_a) == len(inner_b) and all(
        x[:2] == y[:2] and same_type(x[2], y[2]) for x, y in zip(inner_a, inner_b, strict=True)
    )


def _inner(iceberg: IcebergType) -> Iterator[tuple[str, bool, IcebergType]]:
    """Name, required flag and type of each direct child of a type."""
    if isinstance(iceberg, StructType):
        yield from ((f.name, f.required, f.field_type) for f in iceberg.fields)
    elif isinstance(iceberg, ListType):
        yield "element", iceberg.element_required, iceberg.element_type
    elif isinstance(iceberg, MapType):
        yield "key", True, iceberg.key_type
        yield "value", iceberg.value_required, iceberg.value_type


def changed_properties(table: TableInfo, now: Mapping[str, str]) -> tuple[dict[str, str], set[str]]:
    """The properties to set and to remove, so that the lake table follows the table."""
    followed = followed_properties(table)
    updates = {key: value for key, value in followed.items() if now.get(key) != value}
    removals = {key for key in now if key.startswith(FLUSS_PREFIX) and key not in followed}
    return updates, removals
