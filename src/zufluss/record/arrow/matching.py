"""Finds the rows that match a predicate, whole Arrow columns at a time.

A predicate on the wire (`model/predicate.py`) may be weaker than the user's filter, never stronger.
So a row that the user's filter keeps always matches, and if the predicate is exact the rows are the
same. NULL matches nothing but IS_NULL; there are no negations above a leaf, so a NULL result counts
as false from the start.

Literals have canonical units, which may differ from the column's: a TIMESTAMP is compared in the
unit of its column, a TIME finer than a millisecond is rounded down first.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from decimal import Decimal
from functools import reduce
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from zufluss.model.predicate import (
    LIST_TESTS,
    TEXT_TESTS,
    CompoundFunction,
    InvalidPredicateError,
    Leaf,
    LeafFunction,
    Predicate,
    Value,
)

_COMPARE: dict[LeafFunction, Callable[..., Any]] = {
    LeafFunction.EQUAL: pc.equal,
    LeafFunction.NOT_EQUAL: pc.not_equal,
    LeafFunction.LESS_THAN: pc.less,
    LeafFunction.LESS_OR_EQUAL: pc.less_equal,
    LeafFunction.GREATER_THAN: pc.greater,
    LeafFunction.GREATER_OR_EQUAL: pc.greater_equal,
}
_TEXT: dict[LeafFunction, Callable[..., Any]] = {
    LeafFunction.STARTS_WITH: pc.starts_with,
    LeafFunction.CONTAINS: pc.match_substring,
    LeafFunction.END_WITH: pc.ends_with,
}
_LESS = (LeafFunction.LESS_THAN, LeafFunction.LESS_OR_EQUAL)
_GREATER = (LeafFunction.GREATER_THAN, LeafFunction.GREATER_OR_EQUAL)
_NANOS = {"s": 1_000_000_000, "ms": 1_000_000, "us": 1000, "ns": 1}
_LONG_MIN, _LONG_MAX = -(2**63), 2**63 - 1


def matching(predicate: Predicate, columns: Mapping[int, pa.Array]) -> pa.BooleanArray:
    """Return true for each row that matches, without NULLs; `columns` are the columns by id."""
    if isinstance(predicate, Leaf):
        return _leaf(predicate, columns[predicate.field_id]).fill_null(False)
    join = pc.and_ if predicate.function is CompoundFunction.AND else pc.or_
    return reduce(join, (matching(child, columns) for child in predicate.children))


def _leaf(leaf: Leaf, array: pa.Array) -> pa.BooleanArray:
    function = leaf.function
    if function is LeafFunction.IS_NULL:
        return array.is_null()
    if function is LeafFunction.IS_NOT_NULL:
        return array.is_valid()
    if function in TEXT_TESTS:
        return _TEXT[function](array, pattern=str(leaf.literals[0]))
    if pa.types.is_temporal(array.type) and not pa.types.is_date(array.type):
        numbers, step = _moments(array)
        return _moment(function, numbers, [_nanos(v, array.type) for v in leaf.literals], step)
    values = _plain(array)
    if function in LIST_TESTS:
        return _listed(function, values, leaf.literals)
    return _COMPARE[function](values, _scalar(leaf.literals[0], values.type))


def _plain(array: pa.Array) -> pa.Array:
    """Return a column in a type that holds every literal of the wire."""
    kind = array.type
    if pa.types.is_fixed_size_binary(kind):
        return array.cast(pa.binary())
    if pa.types.is_date32(kind):
        return array.cast(pa.int32()).cast(pa.int64())
    if pa.types.is_integer(kind):
        return array.cast(pa.int64())
    if pa.types.is_decimal(kind):
        return array.cast(pa.decimal128(38, kind.scale))
    return array


def _scalar(value: Value, kind: pa.DataType) -> pa.Scalar:
    try:
        return pa.scalar(value, kind)
    except (pa.ArrowInvalid, pa.ArrowTypeError, OverflowError) as e:
        shown = value if isinstance(value, Decimal) else repr(value)
        raise InvalidPredicateError(
            f"a literal of the filter, {shown!s:.80}, is not a value of the column: {e}"
        ) from None


def _listed(function: LeafFunction, values: pa.Array, literals: tuple[Value, ...]) -> Any:
    scalars = [_scalar(value, values.type) for value in literals]
    inside = pc.is_in(values, value_set=pa.array(scalars, values.type))
    return inside if function is LeafFunction.IN else _outside(values, inside)


def _outside(values: pa.Array, inside: pa.BooleanArray) -> pa.BooleanArray:
    return pc.and_(values.is_valid(), pc.invert(inside))


def _moments(array: pa.Array) -> tuple[pa.Array, int]:
    """Return a column of times as numbers, and their unit in nanoseconds."""
    kind = array.type
    wide = array.cast(pa.int32()) if pa.types.is_time32(kind) else array
    numbers, step = wide.cast(pa.int64()), _NANOS[kind.unit]
    if pa.types.is_time(kind) and step < _NANOS["ms"]:
        return pc.divide(numbers, _NANOS["ms"] // step), _NANOS["ms"]
    return numbers, step


def _nanos(value: Value, kind: pa.DataType) -> int:
    assert isinstance(value, int)
    return value * _NANOS["ms"] if pa.types.is_time(kind) else value


def _moment(function: LeafFunction, numbers: pa.Array, nanos: list[int], step: int) -> Any:
    """Compare a column with literals that its unit or its 64 bits may not be able to express."""
    if function in LIST_TESTS:
        there = [n // step for n in nanos if not n % step and _fits(n // step)]
        inside = pc.is_in(numbers, value_set=pa.array(there, pa.int64()))
        return inside if function is LeafFunction.IN else _outside(numbers, inside)
    below, rest = divmod(nanos[0], step)
    if not rest and _fits(below):
        return _COMPARE[function](numbers, below)
    if function in _LESS and below >= _LONG_MIN:
        return pc.less_equal(numbers, min(below, _LONG_MAX))
    if function in _GREATER and below >= _LONG_MIN:
        return pc.greater(numbers, min(below, _LONG_MAX))
    if function is LeafFunction.NOT_EQUAL or function in _GREATER:
        return numbers.is_valid()
    return pc.less(numbers, _LONG_MIN)


def _fits(number: int) -> bool:
    return _LONG_MIN <= number <= _LONG_MAX
