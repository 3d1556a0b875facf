"""Nouns without I/O: types, schemas, tables, partitions, predicates.

Everything here is a frozen value or a pure function over such values, so that the server, the
client and the tests share one meaning of a table. Import from the modules; the most used names
are re-exported here.
"""

from zufluss.model.aggregate import AggFunction
from zufluss.model.ddl import parse_type
from zufluss.model.schema import Column, Schema
from zufluss.model.table import (
    DatabaseDescriptor,
    PhysicalTablePath,
    TableBucket,
    TableDescriptor,
    TableInfo,
    TablePath,
)
from zufluss.model.types import DataType, Root

__all__ = [
    "AggFunction",
    "Column",
    "DataType",
    "DatabaseDescriptor",
    "PhysicalTablePath",
    "Root",
    "Schema",
    "TableBucket",
    "TableDescriptor",
    "TableInfo",
    "TablePath",
    "parse_type",
]
