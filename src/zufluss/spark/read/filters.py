"""Filters of a read: checked before Spark plans, and as Spark columns with the same result per row.

A text is read by the client's own parser (`model/filter_text.py`), never by Spark's.

Two differences are evened out: a literal has the type of its column, and NaN matches no "larger
than", while in Spark NaN is larger than everything. In both, NULL matches no comparison.
"""

from __future__ import annotations

import datetime as dt
from collections.abc import Callable
from functools import reduce
from typing import TYPE_CHECKING, Any

from zufluss.client.read.arguments import filter_of
from zufluss.model import types as t
from zufluss.model.expression import ColumnRef, Combination, Comparison, Expression
from zufluss.model.predicate import CompoundFunction, InvalidPredicateError, LeafFunction, canonical
from zufluss.model.predicate import time_micros as micros_of_time
from zufluss.model.schema import Schema
from zufluss.spark.types import quoted

if TYPE_CHECKING:
    from pyspark.sql import Column

_EPOCH = dt.datetime(1970, 1, 1)
_COMPARE: dict[LeafFunction, Callable[[Any, Any], Any]] = {
    LeafFunction.EQUAL: lambda a, b: a == b,
    LeafFunction.NOT_EQUAL: lambda a, b: a != b,
    LeafFunction.LESS_THAN: lambda a, b: a < b,
    LeafFunction.LESS_OR_EQUAL: lambda a, b: a <= b,
    LeafFunction.GREATER_THAN: lambda a, b: a > b,
    LeafFunction.GREATER_OR_EQUAL: lambda a, b: a >= b,
    LeafFunction.STARTS_WITH: lambda a, b: a.startswith(b),
    LeafFunction.CONTAINS: lambda a, b: a.contains(b),
    LeafFunction.END_WITH: lambda a, b: a.endswith(b),
}
_LARGER = (LeafFunction.GREATER_THAN, LeafFunction.GREATER_OR_EQUAL)
_FLOATS = (t.Root.FLOAT, t.Root.DOUBLE)


def checked_filter(filter: Expression | str | None, schema: Schema) -> Expression | None:
    """The filter of a read; `InvalidPredicateError` if it cannot be read or does not fit."""
    expression = filter_of(filter, schema)
    if expression is not None:
        expression.resolve(schema)
    return expression


def to_column(filter: Expression, schema: Schema) -> Column:
    """The condition of a filter; `InvalidPredicateError` if it does not fit the table."""
    filter.resolve(schema)
    return _column(filter, schema)


def _column(filter: Expression, schema: Schema) -> Column:
    if isinstance(filter, ColumnRef):
        return _column(filter == True, schema)  # noqa: E712 - builds a comparison
    if isinstance(filter, Combination):
        parts = [_column(child, schema) for child in filter.children]
        if filter.function is CompoundFunction.AND:
            return reduce(lambda a, b: a & b, parts)
        return reduce(lambda a, b: a | b, parts)
    if isinstance(filter, Comparison):
        return _comparison(filter, schema)
    raise InvalidPredicateError(f"{type(filter).__name__} is not a filter that Spark can apply")


def _comparison(test: Comparison, schema: Schema) -> Column:
    from pyspark.sql import functions as F

    data_type = schema.column(test.name).data_type
    column = F.col(quoted(test.name))
    if test.function is LeafFunction.IS_NULL:
        return column.isNull()
    if test.function is LeafFunction.IS_NOT_NULL:
        return column.isNotNull()
    literals = [_literal(value, data_type, test.name) for value in test.values]
    if test.function in (LeafFunction.IN, LeafFunction.NOT_IN):
        inside = column.isin(literals) if literals else F.lit(False)
        return inside if test.function is LeafFunction.IN else column.isNotNull() & ~inside
    condition: Column = _COMPARE[test.function](column, literals[0])
    if test.function in _LARGER and data_type.root in _FLOATS:
        condition = condition & ~F.isnan(column)
    return ~condition if test.negated else condition


def _literal(value: object, data_type: t.DataType, name: str) -> Column:
    from pyspark.sql import functions as F

    plain = canonical(value, data_type, name)
    root = data_type.root
    if root is t.Root.TIME:
        return F.lit(micros_of_time(value))
    if root is t.Root.DATE:
        return F.lit(_EPOCH.date() + dt.timedelta(days=int(plain)))
    if root is t.Root.TIMESTAMP_LTZ:
        return F.timestamp_micros(F.lit(int(plain) // 1000))
    if root is t.Root.TIMESTAMP:
        text = (_EPOCH + dt.timedelta(microseconds=int(plain) // 1000)).isoformat(" ")
        return F.lit(text).cast("timestamp_ntz")
    if root is t.Root.FLOAT:
        return F.lit(plain).cast("float")
    return F.lit(plain)
