"""Filters: the tree, its wire form, the exact filter, and that pruning never loses a row."""

from __future__ import annotations

import datetime as dt
from collections.abc import Callable
from decimal import Decimal
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from zufluss.model.ddl import parse_type
from zufluss.model.expression import IN_LITERALS_MAX, Expression, col
from zufluss.model.predicate import (
    Compound,
    CompoundFunction,
    InvalidPredicateError,
    Leaf,
    LeafFunction,
    Predicate,
    canonical,
    leaves,
)
from zufluss.model.schema import Schema
from zufluss.wire import messages as m
from zufluss.wire.predicates import predicate_from_proto, predicate_to_proto

SCHEMA = Schema.of(
    "flag BOOLEAN, i8 TINYINT, i32 INT, i64 BIGINT, f32 FLOAT, f64 DOUBLE, s STRING, c CHAR(3), "
    "raw BYTES, bin BINARY(2), d DECIMAL(6, 2), big DECIMAL(30, 4), day DATE, t0 TIME(0), "
    "t6 TIME(6), ts3 TIMESTAMP(3), ts9 TIMESTAMP(9), ltz TIMESTAMP_LTZ(6), arr ARRAY<INT>"
)
MOMENT = dt.datetime(2024, 2, 29, 1, 2, 3, 456_789)

LITERALS: dict[str, list[Any]] = {
    "flag": [False, True],
    "i8": [-128, 0, 127],
    "i32": [-(2**31), 5, 2**31 - 1],
    "i64": [-(2**63), 5, 2**63 - 1],
    "f32": [-1.5, 0.1, 3.0],
    "f64": [-1.5, 0.1, float("inf")],
    "s": ["", "apple", "ärger"],
    "c": ["a", "abc"],
    "raw": [b"", b"\x00\xff"],
    "bin": [b"\x00\x01", b"\xff\x00"],
    "d": [Decimal("-12.50"), Decimal("0"), Decimal("9999.99")],
    "big": [Decimal("-1.0001"), Decimal("12345678901234567890123456.7891")],
    "day": [dt.date(1969, 12, 31), dt.date(2024, 2, 29)],
    "t0": [dt.time(0), dt.time(23, 59, 59)],
    "t6": [dt.time(0, 0, 0, 1500), dt.time(0, 0, 0, 1700), dt.time(12, 0)],
    "ts3": [dt.datetime(1969, 12, 31, 23, 59, 59, 999_000), MOMENT],
    "ts9": [dt.datetime(1970, 1, 1), MOMENT],
    "ltz": [
        MOMENT.replace(tzinfo=dt.UTC),
        MOMENT.replace(tzinfo=dt.timezone(dt.timedelta(hours=5))),
    ],
}

COMPARE: dict[LeafFunction, Callable[[Any, Any], bool]] = {
    LeafFunction.EQUAL: lambda a, b: a == b[0],
    LeafFunction.NOT_EQUAL: lambda a, b: a != b[0],
    LeafFunction.LESS_THAN: lambda a, b: a < b[0],
    LeafFunction.LESS_OR_EQUAL: lambda a, b: a <= b[0],
    LeafFunction.GREATER_THAN: lambda a, b: a > b[0],
    LeafFunction.GREATER_OR_EQUAL: lambda a, b: a >= b[0],
    LeafFunction.STARTS_WITH: lambda a, b: a.startswith(b[0]),
    LeafFunction.CONTAINS: lambda a, b: b[0] in a,
    LeafFunction.END_WITH: lambda a, b: a.endswith(b[0]),
    LeafFunction.IN: lambda a, b: a in b,
    LeafFunction.NOT_IN: lambda a, b: a not in b,
}


def holds(predicate: Predicate, row: dict[int, Any]) -> bool:
    """What a predicate says of one row in canonical form."""
    if isinstance(predicate, Compound):
        join = all if predicate.function is CompoundFunction.AND else any
        return join(holds(child, row) for child in predicate.children)
    value = row[predicate.field_id]
    if predicate.function in (LeafFunction.IS_NULL, LeafFunction.IS_NOT_NULL):
        return (value is None) == (predicate.function is LeafFunction.IS_NULL)
    return value is not None and COMPARE[predicate.function](value, predicate.literals)


@st.composite
def comparisons(draw: st.DrawFn) -> Expression:
    name = draw(st.sampled_from(sorted(LITERALS)))
    value = st.sampled_from(LITERALS[name])
    ref = col(name)
    makers: list[Callable[[], Expression]] = [
        lambda: ref == draw(value),
        lambda: ref != draw(value),
        lambda: ref < draw(value),
        lambda: ref <= draw(value),
        lambda: ref > draw(value),
        lambda: ref >= draw(value),
        lambda: ref.isin(draw(st.lists(value, max_size=3))),
        ref.is_null,
        ref.is_not_null,
    ]
    if name in ("s", "c"):
        makers += [
            lambda: ref.starts_with(draw(value)),
            lambda: ref.ends_with(draw(value)),
            lambda: ref.contains(draw(value)),
        ]
    return draw(st.sampled_from(makers))()


EXPRESSIONS = st.recursive(
    comparisons(),
    lambda inner: st.one_of(
        st.builds(lambda a, b: a & b, inner, inner),
        st.builds(lambda a, b: a | b, inner, inner),
        st.builds(lambda a: ~a, inner),
    ),
    max_leaves=5,
)


@st.composite
def rows(draw: st.DrawFn) -> dict[str, Any]:
    row = {name: draw(st.none() | st.sampled_from(v)) for name, v in LITERALS.items()}
    return {**row, "arr": None}


def canonical_row(row: dict[str, Any]) -> dict[int, Any]:
    return {
        c.id: None if row[c.name] is None else canonical(row[c.name], c.data_type, c.name)
        for c in SCHEMA.columns
    }


def stored(row: dict[str, Any]) -> dict[str, Any]:
    """The row as a column of its precision holds it."""
    cut = dict(row)
    if cut["ts3"] is not None:
        cut["ts3"] = cut["ts3"].replace(microsecond=cut["ts3"].microsecond // 1000 * 1000)
    return cut


@given(EXPRESSIONS, rows())
@settings(max_examples=200, deadline=None)
def test_a_row_that_matches_exactly_is_never_pruned(expression: Expression, row: Any) -> None:
    row = stored(row)
    table = pa.Table.from_pylist([row], schema=SCHEMA.arrow)
    exact = table.filter(expression.to_arrow(SCHEMA)).num_rows == 1
    predicate = expression.resolve(SCHEMA)
    assert holds(predicate, canonical_row(row)) or not exact
    weaker = any(leaf.field_id == SCHEMA.column("t6").id for leaf in leaves(predicate))
    texts = expression.columns & {"s", "c"}
    if not weaker and not texts:
        assert holds(predicate, canonical_row(row)) == exact


@given(EXPRESSIONS)
@settings(max_examples=150, deadline=None)
def test_a_predicate_survives_the_wire(expression: Expression) -> None:
    predicate = expression.resolve(SCHEMA)
    message = m.PbPredicate.FromString(predicate_to_proto(predicate, SCHEMA).SerializeToString())
    assert predicate_from_proto(message, SCHEMA) == predicate


def test_a_filter_reads_like_the_condition_it_is() -> None:
    predicate = ((col("i32") > 5) & col("s").is_null() & (col("i8") == 1)).resolve(SCHEMA)
    assert predicate == Compound(
        CompoundFunction.AND,
        (
            Leaf(LeafFunction.GREATER_THAN, 2, (5,)),
            Leaf(LeafFunction.IS_NULL, 6),
            Leaf(LeafFunction.EQUAL, 1, (1,)),
        ),
    )


def test_negation_is_pushed_down_to_the_columns() -> None:
    predicate = (~((col("i32") > 5) | col("i8").isin([1, 2]))).resolve(SCHEMA)
    assert predicate == Compound(
        CompoundFunction.AND,
        (
            Leaf(LeafFunction.LESS_OR_EQUAL, 2, (5,)),
            Leaf(LeafFunction.NOT_IN, 1, (1, 2)),
        ),
    )
    assert (~col("s").starts_with("x")).resolve(SCHEMA) == Leaf(LeafFunction.IS_NOT_NULL, 6)
    assert (~~col("s").starts_with("x")).resolve(SCHEMA) == Leaf(
        LeafFunction.STARTS_WITH, 6, ("x",)
    )


def test_a_boolean_column_is_a_filter_of_its_own() -> None:
    assert (col("flag") & ~col("flag")).resolve(SCHEMA) == Compound(
        CompoundFunction.AND,
        (Leaf(LeafFunction.EQUAL, 0, (True,)), Leaf(LeafFunction.EQUAL, 0, (False,))),
    )


def test_a_long_list_is_pruned_by_its_range_and_filtered_exactly() -> None:
    values = list(range(0, 2 * IN_LITERALS_MAX + 2, 2))
    inside = col("i32").isin(values)
    assert inside.resolve(SCHEMA) == col("i32").between(0, max(values)).resolve(SCHEMA)
    assert (~inside).resolve(SCHEMA) == Leaf(LeafFunction.IS_NOT_NULL, 2)
    table = pa.table({"i32": pa.array([0, 1, 2, None], pa.int32())})
    assert table.filter(inside.to_arrow(SCHEMA))["i32"].to_pylist() == [0, 2]
    assert table.filter((~inside).to_arrow(SCHEMA))["i32"].to_pylist() == [1]


def test_a_time_finer_than_its_statistics_is_compared_loosely() -> None:
    after = (col("t6") > dt.time(0, 0, 0, 1500)).resolve(SCHEMA)
    assert after == Leaf(LeafFunction.GREATER_OR_EQUAL, SCHEMA.column("t6").id, (1,))


def test_timestamps_are_nanoseconds_and_zoned_ones_utc() -> None:
    assert canonical(dt.datetime(1970, 1, 1, 0, 0, 1), parse_type("TIMESTAMP(3)"), "x") == 10**9
    zone = dt.timezone(dt.timedelta(hours=1))
    moment = dt.datetime(1970, 1, 1, 1, tzinfo=zone)
    assert canonical(moment, parse_type("TIMESTAMP_LTZ(3)"), "x") == 0
    old = canonical(dt.datetime(1, 1, 1), parse_type("TIMESTAMP(0)"), "x")
    assert old == -62135596800 * 10**9


@pytest.mark.parametrize(
    ("expression", "message"),
    [
        (col("nope") > 1, "column 'nope' of the filter does not exist; the columns are flag"),
        (col("i8") > 128, "outside the 8 bits"),
        (col("i32") > "5", "give an int, not str"),
        (col("i32") > True, "give an int, not bool"),
        (col("i32") > 1.5, "give an int, not float"),
        (col("f64") > float("nan"), "NaN"),
        (col("f32") > 1e300, "f32"),
        (col("flag") == 1, "True or False"),
        (col("s") == b"x", "give a str"),
        (col("raw") == "x", "give bytes"),
        (col("d") > Decimal("0.001"), "more than 2 digits after the point"),
        (col("d") > Decimal("10000"), "more than 6 digits"),
        (col("d") > Decimal("1e999999"), "more than 6 digits"),
        (col("d") > Decimal("1e-999999"), "more than 2 digits after the point"),
        (col("d") > Decimal("inf"), "not a finite number"),
        (col("day") > dt.datetime(2024, 1, 1), "give a datetime.date"),
        (col("t0") > dt.datetime(2024, 1, 1), "give a datetime.time"),
        (col("ts3") > MOMENT.replace(tzinfo=dt.UTC), "without a time zone"),
        (col("ltz") > MOMENT, "with a time zone"),
        (col("i32").starts_with("x"), "needs a STRING or CHAR column"),
        (col("arr") == 1, "only is_null and is_not_null"),
        (col("i32") == col("i64"), "give an int"),
    ],
)
def test_a_filter_that_does_not_fit_its_column_is_refused(
    expression: Expression, message: str
) -> None:
    with pytest.raises(InvalidPredicateError, match=message):
        expression.resolve(SCHEMA)
    with pytest.raises(InvalidPredicateError, match=message):
        expression.to_arrow(SCHEMA)


def test_python_pitfalls_are_caught_with_the_way_out() -> None:
    with pytest.raises(TypeError, match="is_null"):
        col("i32") == None  # noqa: B015, E711
    with pytest.raises(TypeError, match="no truth value"):
        bool(col("i32") > 1)
    with pytest.raises(TypeError, match="with a filter only"):
        (col("i32") > 1) & 5  # type: ignore[operator]
    with pytest.raises(TypeError, match="name of a column"):
        col(5)  # type: ignore[arg-type]


def test_nested_columns_can_be_tested_for_null() -> None:
    assert col("arr").is_null().resolve(SCHEMA) == Leaf(LeafFunction.IS_NULL, 18)


# ------------------------------------------------------------------------------------ the wire


def leaf(function: int = 0, field_id: int = 2, **literal: Any) -> m.PbPredicate:
    literals = []
    if literal:
        literals = [m.PbLiteralValue(**{"literal_type": 3, "is_null": False, **literal})]
    return m.PbPredicate(
        type=0, leaf=m.PbLeafPredicate(function=function, field_id=field_id, literals=literals)
    )


def compound(function: int, *children: m.PbPredicate) -> m.PbPredicate:
    return m.PbPredicate(
        type=1, compound=m.PbCompoundPredicate(function=function, children=children)
    )


def nested(depth: int) -> m.PbPredicate:
    outer = message = m.PbPredicate()
    for _ in range(depth):
        message.type = 1
        message.compound.function = 0
        message = message.compound.children.add()
    message.CopyFrom(leaf(int_value=1))
    return outer


@pytest.mark.parametrize(
    ("message", "why"),
    [
        (leaf(13, int_value=1), "unknown function"),
        (leaf(-1, int_value=1), "unknown function"),
        (compound(2, leaf(int_value=1)), "unknown function"),
        (compound(0), "no children"),
        (m.PbPredicate(type=2), "predicate type 2"),
        (m.PbPredicate(type=0), "predicate type 0 without its part"),
        (m.PbPredicate(type=1, leaf=leaf(int_value=1).leaf), "without its part"),
        (leaf(0), "EQUAL has 0 literals; it takes 1"),
        (leaf(11), "IN has 0 literals; it takes at least one"),
        (leaf(6, int_value=1), "IS_NULL has 1 literals"),
        (leaf(0, 99, int_value=1), "field id 99"),
        (leaf(0, literal_type=4, bigint_value=1), "cannot be compared with column 'i32'"),
        (leaf(0, literal_type=77, int_value=1), "type 77"),
        (leaf(0, bigint_value=1), "has no int_value"),
        (leaf(8, literal_type=3, int_value=1), "STRING or CHAR"),
        (leaf(0, 18, literal_type=3, int_value=1), "only is_null"),
        (leaf(0, 11, literal_type=9, decimal_bytes=b"\x01" * 17), "at most 16"),
        (nested(41), "nested deeper than 40"),
    ],
)
def test_a_malformed_predicate_is_refused(message: m.PbPredicate, why: str) -> None:
    with pytest.raises(InvalidPredicateError, match=why) as caught:
        predicate_from_proto(message, SCHEMA)
    assert caught.value.code.value == 68
    assert not caught.value.retriable


def test_a_filter_as_deep_as_allowed_survives_the_wire_and_a_deeper_one_is_refused() -> None:
    predicate: Predicate = Leaf(LeafFunction.IS_NULL, 2)
    for _ in range(40):
        predicate = Compound(CompoundFunction.AND, (predicate,))
    message = predicate_to_proto(predicate, SCHEMA)
    request = m.PbFetchLogReqForTable.FromString(
        m.PbFetchLogReqForTable(
            table_id=1, projection_pushdown_enabled=False, filter_predicate=message
        ).SerializeToString()
    )
    assert predicate_from_proto(request.filter_predicate, SCHEMA) == predicate
    with pytest.raises(InvalidPredicateError, match="deeper than 40"):
        predicate_to_proto(Compound(CompoundFunction.AND, (predicate,)), SCHEMA)


def test_too_many_literals_are_refused() -> None:
    literal = m.PbLiteralValue(literal_type=3, is_null=False, int_value=1)
    message = m.PbPredicate(
        type=0, leaf=m.PbLeafPredicate(function=11, field_id=2, literals=[literal] * 10_001)
    )
    with pytest.raises(InvalidPredicateError, match="10001 literals; at most 10000"):
        predicate_from_proto(message, SCHEMA)


def test_null_literals_never_make_a_filter_stronger() -> None:
    some = [
        m.PbLiteralValue(literal_type=3, is_null=True),
        m.PbLiteralValue(literal_type=3, is_null=False, int_value=7),
    ]
    message = m.PbPredicate(type=0, leaf=m.PbLeafPredicate(function=11, field_id=2, literals=some))
    assert predicate_from_proto(message, SCHEMA) == Leaf(LeafFunction.IN, 2, (7,))
    weakened = predicate_from_proto(leaf(0, is_null=True), SCHEMA)
    assert weakened == Leaf(LeafFunction.IS_NOT_NULL, 2)


def test_text_and_binary_literals_of_the_sibling_type_are_accepted() -> None:
    assert predicate_from_proto(leaf(0, 6, literal_type=7, string_value="x"), SCHEMA) == Leaf(
        LeafFunction.EQUAL, 6, ("x",)
    )


@given(st.binary(max_size=60))
@settings(max_examples=100)
def test_no_bytes_break_the_decoder(data: bytes) -> None:
    from google.protobuf.message import DecodeError

    try:
        message = m.PbPredicate.FromString(data)
        predicate_from_proto(message, SCHEMA)
    except (DecodeError, InvalidPredicateError):
        return
