"""Predicates on columns: the same rows as a predicate holds for one by one, and never fewer."""

from __future__ import annotations

from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.model.test_predicate import EXPRESSIONS, SCHEMA, canonical_row, holds, rows, stored
from zufluss.model.expression import Expression
from zufluss.model.predicate import InvalidPredicateError, Leaf, LeafFunction
from zufluss.model.schema import Schema
from zufluss.record.arrow.matching import matching

MOMENTS = Schema.of("s TIMESTAMP(0), ms TIMESTAMP(3), us TIMESTAMP(6), ns TIMESTAMP(9)")
UNITS = {"s": 10**9, "ms": 10**6, "us": 10**3, "ns": 1}
COMPARE = {
    LeafFunction.EQUAL: lambda a, b: a == b,
    LeafFunction.NOT_EQUAL: lambda a, b: a != b,
    LeafFunction.LESS_THAN: lambda a, b: a < b,
    LeafFunction.LESS_OR_EQUAL: lambda a, b: a <= b,
    LeafFunction.GREATER_THAN: lambda a, b: a > b,
    LeafFunction.GREATER_OR_EQUAL: lambda a, b: a >= b,
    LeafFunction.IN: lambda a, b: a == b,
    LeafFunction.NOT_IN: lambda a, b: a != b,
}


@given(EXPRESSIONS, st.lists(rows(), min_size=1, max_size=8))
@settings(max_examples=100)
def test_the_rows_that_match_are_those_the_predicate_holds_for(
    expression: Expression, some: list[dict[str, Any]]
) -> None:
    some = [stored(row) for row in some]
    batch = pa.RecordBatch.from_pylist(some, schema=SCHEMA.arrow)
    columns = {c.id: batch.column(c.name) for c in SCHEMA.columns}
    predicate = expression.resolve(SCHEMA)
    found = matching(predicate, columns)
    assert found.null_count == 0
    assert found.to_pylist() == [holds(predicate, canonical_row(row)) for row in some]
    exact = pa.Table.from_batches([batch]).filter(expression.to_arrow(SCHEMA))
    assert (
        exact.to_pylist() == batch.filter(found).filter(expression.to_arrow(SCHEMA)).to_pylist()
    ), "a row that the user's filter keeps was lost"


@given(
    st.sampled_from(sorted(UNITS)),
    st.sampled_from(sorted(COMPARE)),
    st.sampled_from([0, 1, 999, 10**3, 10**6 + 1, 10**9, -1, -(10**9) - 1])
    | st.integers(-(2**84), 2**84),
    st.lists(st.integers(-3, 3) | st.sampled_from([2**63 - 1, -(2**63)]), min_size=1),
)
@settings(max_examples=100)
def test_moments_compare_with_literals_between_and_beyond_their_units(
    name: str, function: LeafFunction, nanos: int, numbers: list[int]
) -> None:
    """A literal of the wire has nanoseconds, and more range than any column."""
    column = MOMENTS.column(name)
    array = pa.array([*numbers, None], pa.int64()).cast(column.data_type.to_arrow())
    found = matching(Leaf(function, column.id, (nanos,)), {column.id: array})
    expected = [COMPARE[function](number * UNITS[name], nanos) for number in numbers]
    assert found.to_pylist() == [*expected, False]


@pytest.mark.parametrize("value", [1000, -(2**40)])
def test_a_number_that_the_type_does_not_hold_compares_as_a_number(value: int) -> None:
    array = pa.array([-128, 0, 127, None], pa.int8())
    found = matching(Leaf(LeafFunction.LESS_THAN, 1, (value,)), {1: array})
    assert found.to_pylist() == [value > 0] * 3 + [False]


def test_a_literal_of_another_kind_is_refused() -> None:
    with pytest.raises(InvalidPredicateError, match="not a value of the column"):
        matching(Leaf(LeafFunction.EQUAL, 1, ("text",)), {1: pa.array([1])})
