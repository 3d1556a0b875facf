"""Arrow types to column types, for schemas made from Arrow tables.

`DataType.to_arrow` is the other direction. This one loses details on purpose and follows `pyfluss`,
so that both clients make the same table from a pyarrow schema: unsigned integers become the signed
type of equal width, views and large variants their plain type, a zoned timestamp TIMESTAMP_LTZ, a
dictionary the type of its values.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from zufluss.errors import InvalidTableError
from zufluss.model import types as t

if TYPE_CHECKING:
    import pyarrow as pa

_PRECISION = {"s": 0, "ms": 3, "us": 6, "ns": 9}
_BY_NAME = {
    "bool": t.BOOLEAN,
    "int8": t.TINYINT,
    "uint8": t.TINYINT,
    "int16": t.SMALLINT,
    "uint16": t.SMALLINT,
    "int32": t.INTEGER,
    "uint32": t.INTEGER,
    "int64": t.BIGINT,
    "uint64": t.BIGINT,
    "halffloat": t.FLOAT,
    "float": t.FLOAT,
    "double": t.DOUBLE,
    "string": t.STRING,
    "large_string": t.STRING,
    "string_view": t.STRING,
    "binary": t.BYTES,
    "large_binary": t.BYTES,
    "binary_view": t.BYTES,
    "date32[day]": t.DATE,
    "date64[ms]": t.DATE,
}


def from_arrow(arrow: pa.DataType, nullable: bool = True) -> t.DataType:
    """The column type of an Arrow type; raises `InvalidTableError` where there is none."""
    import pyarrow.types as at

    if at.is_dictionary(arrow):
        return from_arrow(arrow.value_type, nullable)
    simple = _BY_NAME.get(str(arrow))
    if simple is not None:
        return simple.as_nullable(nullable)
    if at.is_nested(arrow):
        return _nested(arrow, nullable)
    if at.is_fixed_size_binary(arrow):
        return t.LengthType(root=t.Root.BINARY, length=arrow.byte_width, nullable=nullable)
    if at.is_decimal(arrow):
        return t.DecimalType(precision=arrow.precision, scale=arrow.scale, nullable=nullable)
    if at.is_time(arrow):
        precision = _PRECISION[arrow.unit]
        return t.TemporalType(root=t.Root.TIME, precision=precision, nullable=nullable)
    if at.is_timestamp(arrow):
        root = t.Root.TIMESTAMP if arrow.tz is None else t.Root.TIMESTAMP_LTZ
        return t.TemporalType(root=root, precision=_PRECISION[arrow.unit], nullable=nullable)
    raise _unsupported(arrow)


def _nested(arrow: pa.DataType, nullable: bool) -> t.DataType:
    import pyarrow.types as at

    if at.is_map(arrow):
        value = from_arrow(arrow.item_type, arrow.item_field.nullable)
        return t.MapType(key=from_arrow(arrow.key_type, False), value=value, nullable=nullable)
    if at.is_struct(arrow):
        fields = tuple(t.RowField(f.name, from_arrow(f.type, f.nullable)) for f in arrow)
        return t.RowType(fields=fields, nullable=nullable)
    if at.is_union(arrow) or at.is_run_end_encoded(arrow):
        raise _unsupported(arrow)
    element = from_arrow(arrow.value_type, arrow.value_field.nullable)
    return t.ArrayType(element=element, nullable=nullable)


def _unsupported(arrow: pa.DataType) -> InvalidTableError:
    import pyarrow.types as at

    advice = "cast it first, for instance to string"
    if at.is_duration(arrow):
        advice = "cast it to int64, which counts its units, and say in the name which these are"
    elif at.is_null(arrow):
        advice = "it has only nulls, so cast it to the type that its values will have"
    elif at.is_interval(arrow):
        advice = "cast it to string, or store months, days and seconds as integers"
    return InvalidTableError(f"the Arrow type {arrow} has no column type; {advice}")
