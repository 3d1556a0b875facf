"""Column types in Spark: the same for rows of the lake's files and rows of the log.

| column | in the lake's parquet files | in Spark |
|---|---|---|
| BOOLEAN, INT, BIGINT, FLOAT, DOUBLE, DATE | the same | the same |
| TINYINT, SMALLINT | INT32 | TINYINT, SMALLINT |
| DECIMAL(p, s) | DECIMAL(p, s) | DECIMAL(p, s) |
| CHAR(n), STRING | STRING | STRING |
| BINARY(n), BYTES | fixed(n), BINARY | BINARY |
| TIME(p) | TIME in microseconds | BIGINT, microseconds of the day |
| TIMESTAMP(p) | microseconds without zone | TIMESTAMP_NTZ |
| TIMESTAMP_LTZ(p) | microseconds in UTC | TIMESTAMP |
| ARRAY, MAP, ROW | the same | ARRAY, MAP, STRUCT |

Spark has a type for TIME, but refuses it unless a setting that is still experimental allows it. All
columns are nullable, as those of every file source are. Times finer than a microsecond are cut.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

import pyarrow as pa

from zufluss.client.read.nanos import cut_to_micros
from zufluss.model import types as t
from zufluss.model.schema import Column

if TYPE_CHECKING:
    from pyspark.sql.types import DataType, StructType

_SAME = {
    t.Root.BOOLEAN: "BooleanType",
    t.Root.TINYINT: "ByteType",
    t.Root.SMALLINT: "ShortType",
    t.Root.INTEGER: "IntegerType",
    t.Root.BIGINT: "LongType",
    t.Root.FLOAT: "FloatType",
    t.Root.DOUBLE: "DoubleType",
    t.Root.CHAR: "StringType",
    t.Root.STRING: "StringType",
    t.Root.BINARY: "BinaryType",
    t.Root.BYTES: "BinaryType",
    t.Root.DATE: "DateType",
    t.Root.TIME: "LongType",
    t.Root.TIMESTAMP: "TimestampNTZType",
    t.Root.TIMESTAMP_LTZ: "TimestampType",
}


def quoted(name: str) -> str:
    """A column or view name in backticks, for Spark's SQL and for `col`."""
    return f"`{name.replace('`', '``')}`"


def spark_schema(columns: Iterable[Column]) -> StructType:
    """Columns of a table as a schema of Spark."""
    from pyspark.sql.types import StructField, StructType

    return StructType([StructField(c.name, spark_type(c.data_type)) for c in columns])


def spark_type(of: t.DataType) -> DataType:
    """The type of a column in Spark."""
    from pyspark.sql import types as s

    if isinstance(of, t.DecimalType):
        return s.DecimalType(of.precision, of.scale)
    if isinstance(of, t.ArrayType):
        return s.ArrayType(spark_type(of.element))
    if isinstance(of, t.MapType):
        return s.MapType(spark_type(of.key), spark_type(of.value))
    if isinstance(of, t.RowType):
        fields = [s.StructField(f.name, spark_type(f.data_type)) for f in of.fields]
        return s.StructType(fields)
    plain: DataType = getattr(s, _SAME[of.root])()
    return plain


def for_spark(rows: pa.Table) -> pa.Table:
    """Rows of the client in Arrow types that Spark accepts."""
    rows = cut_to_micros(rows)
    micros = pa.schema([field.with_type(_in_micros(field.type)) for field in rows.schema])
    if not rows.schema.equals(micros):
        rows = rows.cast(micros)
    plain = pa.schema([field.with_type(_plain(field.type)) for field in micros])
    return rows if micros.equals(plain) else rows.cast(plain)


def changed_type(of: pa.DataType, change: Callable[[pa.DataType], pa.DataType]) -> pa.DataType:
    """A type with `change` applied to all parts except lists, maps and structs."""
    if pa.types.is_nested(of):
        return _nested(of, lambda part: changed_type(part, change))
    return change(of)


def _in_micros(of: pa.DataType) -> pa.DataType:
    """The first step: every time in microseconds."""
    if pa.types.is_timestamp(of):
        return pa.timestamp("us", of.tz)
    if pa.types.is_time(of):
        return pa.time64("us")
    return _nested(of, _in_micros)


def _plain(of: pa.DataType) -> pa.DataType:
    """The second step: types that Spark does not take become ones that it does."""
    if pa.types.is_time(of):
        return pa.int64()
    if pa.types.is_fixed_size_binary(of):
        return pa.binary()
    return _nested(of, _plain)


def _nested(of: pa.DataType, change: Callable[[pa.DataType], pa.DataType]) -> pa.DataType:
    if pa.types.is_struct(of):
        return pa.struct([field.with_type(change(field.type)) for field in of])
    if pa.types.is_map(of):
        item = of.item_field.with_type(change(of.item_type))
        return pa.map_(of.key_field.with_type(change(of.key_type)), item)
    if pa.types.is_list(of):
        return pa.list_(of.value_field.with_type(change(of.value_type)))
    return of
