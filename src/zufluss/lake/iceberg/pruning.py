"""Filters as pyiceberg expressions, to leave out files that cannot match.

Only what is certain is handed on: a test that Iceberg might see differently becomes "true", so the
expression may be weaker than the filter, never stronger. That are tests of FLOAT, DOUBLE, TIME,
BYTES and of timestamps finer than a microsecond, texts other than by their start, negations, and
columns the lake does not have yet.
"""

from __future__ import annotations

from collections.abc import Callable
from decimal import Decimal
from functools import reduce
from typing import Any, Final

from pyiceberg import expressions as e

from zufluss.model import types as t
from zufluss.model.expression import Expression
from zufluss.model.predicate import (
    Compound,
    CompoundFunction,
    Leaf,
    LeafFunction,
    Predicate,
    Value,
)
from zufluss.model.schema import Column, Schema

IN_LITERALS_MAX: Final = 200
"""Iceberg does not prune by longer lists."""

_PLAIN: Final = frozenset(
    {t.Root.BOOLEAN, t.Root.TINYINT, t.Root.SMALLINT, t.Root.INTEGER, t.Root.BIGINT}
    | {t.Root.CHAR, t.Root.STRING, t.Root.DATE}
)
_COMPARE: Final[dict[LeafFunction, Callable[..., e.BooleanExpression]]] = {
    LeafFunction.EQUAL: e.EqualTo,
    LeafFunction.LESS_THAN: e.LessThan,
    LeafFunction.LESS_OR_EQUAL: e.LessThanOrEqual,
    LeafFunction.GREATER_THAN: e.GreaterThan,
    LeafFunction.GREATER_OR_EQUAL: e.GreaterThanOrEqual,
    LeafFunction.STARTS_WITH: e.StartsWith,
}
_NULL_TESTS: Final[dict[LeafFunction, Callable[..., e.BooleanExpression]]] = {
    LeafFunction.IS_NULL: e.IsNull,
    LeafFunction.IS_NOT_NULL: e.NotNull,
}
_IN: Final[Callable[..., e.BooleanExpression]] = e.In


def pruning_expression(
    filter: Expression, schema: Schema, known: frozenset[str]
) -> e.BooleanExpression:
    """The expression to plan files by; `known` are the columns of the lake's snapshot."""
    columns = {column.id: column for column in schema.columns if column.name in known}
    return _convert(filter.resolve(schema), columns)


def _convert(predicate: Predicate, columns: dict[int, Column]) -> e.BooleanExpression:
    if isinstance(predicate, Compound):
        parts = [_convert(child, columns) for child in predicate.children]
        join = e.And if predicate.function is CompoundFunction.AND else e.Or
        return reduce(join, parts)
    column = columns.get(predicate.field_id)
    return e.AlwaysTrue() if column is None else _leaf(predicate, column)


def _leaf(leaf: Leaf, column: Column) -> e.BooleanExpression:
    if leaf.function in _NULL_TESTS:
        return _NULL_TESTS[leaf.function](column.name)
    literals = [_literal(value, column.data_type) for value in leaf.literals]
    if any(literal is None for literal in literals):
        return e.AlwaysTrue()
    if leaf.function in _COMPARE:
        return _COMPARE[leaf.function](column.name, literals[0])
    if leaf.function is LeafFunction.IN and len(literals) <= IN_LITERALS_MAX:
        return _IN(column.name, literals)
    return e.AlwaysTrue()


def _literal(value: Value, data_type: t.DataType) -> Any:
    """The value as pyiceberg takes it for such a column, None where it cannot be exact."""
    if data_type.root in _PLAIN:
        return value
    if isinstance(data_type, t.DecimalType) and isinstance(value, Decimal):
        return value.quantize(Decimal(1).scaleb(-data_type.scale))
    if data_type.root in (t.Root.TIMESTAMP, t.Root.TIMESTAMP_LTZ) and isinstance(value, int):
        assert isinstance(data_type, t.TemporalType)
        micros, rest = divmod(value, 1000)
        if data_type.precision <= 6 and not rest and -(2**63) <= micros < 2**63:
            return micros
    return None
