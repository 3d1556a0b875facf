"""Which tables Iceberg can hold; `validate` needs no library of Iceberg.

The coordinator has these rules checked in CREATE TABLE, also where pyiceberg is not installed, so
that a table that can never be tiered is refused before it has rows.
"""

from __future__ import annotations

import datetime as dt
from collections.abc import Callable
from typing import Final

from zufluss.lake.base import LakeTableError
from zufluss.lake.iceberg.handle import PartitionValue
from zufluss.model import types as t
from zufluss.model.lake import SYSTEM_COLUMNS
from zufluss.model.table import TableInfo

_DIGITS_MAX: Final = 6
"""The most fractional digits of a time in Iceberg."""
_EPOCH: Final = dt.date(1970, 1, 1)
PARTITION_KEYS: Final[dict[t.Root, Callable[[str], PartitionValue]]] = {
    t.Root.CHAR: str,
    t.Root.STRING: str,
    t.Root.BOOLEAN: lambda text: text == "true",
    t.Root.TINYINT: int,
    t.Root.SMALLINT: int,
    t.Root.INTEGER: int,
    t.Root.BIGINT: int,
    t.Root.DATE: lambda text: (dt.date.fromisoformat(text) - _EPOCH).days,
}
"""The types of partition keys, each with the way from a partition's name to Iceberg's value."""


def validate(table: TableInfo) -> None:
    """Raise `LakeTableError` if Iceberg cannot hold such a table."""
    for name in SYSTEM_COLUMNS:
        if name in table.schema:
            raise LakeTableError(
                f"column {name!r} of table {table.path} has the name of a system column of the "
                "lake; a table with it cannot be tiered, name the column differently"
            )
    for key in table.partition_keys:
        data_type = table.schema.column(key).data_type
        if data_type.root not in PARTITION_KEYS:
            raise LakeTableError(
                f"partition key {key!r} of table {table.path} is {data_type}; Iceberg tables are "
                "partitioned by STRING, CHAR, BOOLEAN, integers or DATE"
            )
    for key in table.schema.primary_key:
        problem = _no_identifier(table.schema.column(key).data_type)
        if problem is not None:
            raise LakeTableError(
                f"primary key column {key!r} of table {table.path} is "
                f"{table.schema.column(key).data_type}; {problem}, or do not tier the table"
            )


def _no_identifier(data_type: t.DataType) -> str | None:
    """The reason why a primary key cannot have this type in Iceberg, and the remedy."""
    if data_type.root in (t.Root.FLOAT, t.Root.DOUBLE):
        return "Iceberg has no identifier fields of these: take DECIMAL or another type"
    if isinstance(data_type, t.TemporalType) and data_type.precision > _DIGITS_MAX:
        return (
            "Iceberg has microseconds, so two keys could become one: take a precision of "
            f"{_DIGITS_MAX} or less"
        )
    return None
