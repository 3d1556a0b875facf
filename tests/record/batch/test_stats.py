"""Batch statistics: captured bytes, damage, and the promise that pruning loses no row."""

from __future__ import annotations

import functools
import json
import math
from decimal import Decimal
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.record.record_samples import (
    FIXTURES,
    SCALARS,
    fixture,
    nullable,
    table_schema,
    values_for,
)
from tests.record.rows.plain_values import batch_of_rows
from zufluss.errors import ConfigError, CorruptRecordError
from zufluss.model.ddl import parse_type
from zufluss.model.predicate import Compound, CompoundFunction, Leaf, LeafFunction
from zufluss.model.schema import Column, Schema
from zufluss.model.types import Root
from zufluss.record.batch import stats
from zufluss.record.batch.stats import ColumnStatistics, Statistics, may_match
from zufluss.record.header import read_header

TYPES = [ty for ty in SCALARS if stats.supports(ty)]
F = LeafFunction


def _schema(*types: str) -> Schema:
    return Schema(tuple(Column(f"c{i}", parse_type(text)) for i, text in enumerate(types)))


def check_statistics(
    view: Any, start: int, length: int, schema: Schema, record_count: int | None = None
) -> None:
    """The plain twin of the kernel: the block is valid and fits schema and record count."""
    for column in stats.read_statistics(view, start, length, schema).columns.values():
        if record_count is not None and (column.null_count or 0) > record_count:
            raise CorruptRecordError(f"{column.null_count} NULLs in {record_count} records")


def _captured() -> tuple[bytes, Schema, pa.RecordBatch, tuple[int, ...], bytes]:
    expected, data = fixture("produce-log/log_stats")
    schema = table_schema(expected["table"])
    header = read_header(data)
    body = pa.py_buffer(data[header.body_offset : header.size])
    batch = pa.ipc.read_record_batch(pa.ipc.read_message(body), schema.arrow)
    descriptor = json.loads((FIXTURES / expected["table"]).read_text())
    columns = stats.parse_statistics_columns(
        descriptor["properties"]["table.statistics.columns"], schema
    )
    block = data[header.header_size : header.header_size + header.statistics_length]
    return data, schema, batch, columns, block


def test_our_statistics_equal_those_of_java_byte_for_byte() -> None:
    _, schema, batch, columns, block = _captured()
    assert stats.build_statistics(batch, schema, columns) == block


def test_captured_statistics_say_what_the_batch_holds() -> None:
    data, schema, _, columns, block = _captured()
    start = data.index(block)
    got = stats.read_statistics(data, start, len(block), schema).columns
    check_statistics(data, start, len(block), schema, 3)
    assert list(got) == list(columns)
    by_name = {schema.columns[i].name: s for i, s in got.items()}
    assert {s.null_count for s in by_name.values()} == {1}
    assert (by_name["f_i32"].minimum, by_name["f_i32"].maximum) == (-(2**31), 3)
    assert (by_name["f_str"].minimum, by_name["f_str"].maximum) == ("", "some text")
    assert (by_name["f_char"].minimum, by_name["f_char"].maximum) == (None, None)
    assert by_name["f_bigdec"].maximum == Decimal("12345678901234567890.0123456789")
    assert by_name["f_ntz9"].maximum == 1_700_000_000_123_456_789
    assert by_name["f_time3"].maximum == 86_399_999


@settings(max_examples=100, deadline=None)
@given(damage=st.data())
def test_damaged_statistics_are_refused_or_read_but_never_crash(damage: Any) -> None:
    _, schema, _, _, block = _captured()
    raw = bytearray(block[: damage.draw(st.integers(0, len(block)))])
    for pos in damage.draw(st.lists(st.integers(0, max(len(raw) - 1, 0)), max_size=4)):
        if raw:
            raw[pos] = damage.draw(st.integers(0, 255))
    try:
        stats.read_statistics(raw, 0, len(raw), schema)
    except CorruptRecordError:
        return


@pytest.mark.parametrize(
    ("block", "reason"),
    [
        ("", "1 bytes are needed"),
        ("02 0100 0000 00000000 00000000 00000000", "version 2"),
        ("01 0000 00000000 00000000", "0 columns"),
        ("01 0300 0000 0100 0200", "3 columns"),
        ("01 0200 0000 0000 00000000 00000000 00000000 00000000", "twice"),
        ("01 0100 0200 00000000 00000000 00000000", "column 2"),
        ("01 0100 ffff 00000000 00000000 00000000", "column -1"),
        ("01 0100 0100 00000000 00000000 00000000", "no statistics"),
        ("01 0100 0000 feffffff 00000000 00000000", "-2 NULLs"),
        ("01 0100 0000 00000000 00000000 00000000 00", "left over"),
        ("01 0100 0000 00000000 ffffffff 00000000", "-1 bytes"),
        ("01 0100 0000 00000000 08000000 0000000000000000 00000000", "8 bytes are needed"),
        ("01 0100 0000 00000000 10000000 0000000000000000 0200000000000000"
         "10000000 0000000000000000 0100000000000000", "minimum above"),
    ],
)  # fmt: skip
def test_malformed_statistics_are_refused(block: str, reason: str) -> None:
    raw = bytes.fromhex(block)
    with pytest.raises(CorruptRecordError, match=reason):
        check_statistics(raw, 0, len(raw), _schema("INT", "BYTES"))


def test_more_nulls_than_records_are_refused() -> None:
    raw = bytes.fromhex("01 0100 0000 02000000 00000000 00000000")
    check_statistics(raw, 0, len(raw), _schema("INT"), 2)
    with pytest.raises(CorruptRecordError, match="2 NULLs"):
        check_statistics(raw, 0, len(raw), _schema("INT"), 1)


def test_the_property_names_columns_or_all_that_have_statistics() -> None:
    schema = _schema("INT", "BYTES", "STRING", "ARRAY<INT>")
    parse = functools.partial(stats.parse_statistics_columns, schema=schema)
    assert parse(None) == ()
    assert parse(" * ") == (0, 2)
    assert parse("c2, c0,") == (2, 0)
    for bad, reason in (("c9", "c9"), ("c1", "BYTES"), ("c3", "ARRAY"), (" , ", "no column")):
        with pytest.raises(ConfigError, match=reason):
            parse(bad)


def test_unsafe_bounds_are_left_out() -> None:
    schema = _schema("TIME(6)", "STRING", "CHAR(3)")
    batch = pa.RecordBatch.from_arrays(
        [
            pa.array([1_500, 2_000], pa.time64("us")),
            pa.array(["a", "x" * 2000]),
            pa.array(["abc", "d"]),
        ],
        schema=schema.arrow,
    )
    block = stats.build_statistics(batch, schema, (0, 1, 2))
    for column in stats.read_statistics(block, 0, len(block), schema).columns.values():
        assert (column.null_count, column.minimum, column.maximum) == (0, None, None)


def test_a_batch_without_rows_or_columns_has_no_statistics() -> None:
    schema = _schema("INT")
    batch = pa.RecordBatch.from_pydict({"c0": [1]}, schema=schema.arrow)
    assert stats.build_statistics(batch.slice(1), schema, (0,)) == b""
    assert stats.build_statistics(batch, schema, ()) == b""


def _filter(column: pa.Array, leaf: Leaf, schema: Schema) -> pa.Array:
    """Which rows match, by pyarrow."""
    literals = batch_of_rows([[v] for v in leaf.literals], schema).column(0)
    first = literals[0] if len(literals) else None
    match leaf.function:
        case F.IS_NULL:
            return column.is_null()
        case F.IS_NOT_NULL:
            return column.is_valid()
        case F.IN | F.NOT_IN:
            tests = [pc.equal(column, literal) for literal in literals]
            found = functools.reduce(pc.or_, tests)
            return found if leaf.function is F.IN else pc.invert(found)
        case F.STARTS_WITH:
            return pc.starts_with(column, first.as_py())
        case F.CONTAINS:
            return pc.match_substring(column, first.as_py())
        case F.END_WITH:
            return pc.ends_with(column, first.as_py())
    names = ["equal", "not_equal", "less", "less_equal", "greater", "greater_equal"]
    return pc.call_function(names[leaf.function], [column, first])


def _rows_that_match(batch: pa.RecordBatch, predicate: Any, schema: Schema) -> pa.Array:
    if isinstance(predicate, Leaf):
        at = schema.ids.index(predicate.field_id)
        one = Schema((schema.columns[at],))
        return pc.fill_null(_filter(batch.column(at), predicate, one), False)
    join = pc.and_ if predicate.function is CompoundFunction.AND else pc.or_
    return functools.reduce(join, [_rows_that_match(batch, c, schema) for c in predicate.children])


@st.composite
def _cases(draw: st.DrawFn) -> tuple[Schema, list[tuple[Any, ...]], Any]:
    types = draw(st.lists(st.sampled_from(TYPES), min_size=1, max_size=3))
    schema = Schema(tuple(Column(f"c{i}", ty) for i, ty in enumerate(types)))
    rows = draw(st.lists(st.tuples(*map(nullable, types)), min_size=1, max_size=4))

    def leaf(at: int) -> st.SearchStrategy[Leaf]:
        ty = types[at]
        # text tests only where they apply; literals often taken from the rows themselves
        functions = [f for f in F if ty.root in (Root.STRING, Root.CHAR) or f not in (8, 9, 10)]
        present = [row[at] for row in rows if row[at] is not None and row[at] == row[at]]
        value = values_for(ty).filter(lambda v: v == v)
        if present:
            value = value | st.sampled_from(present)
        if ty.root in (Root.STRING, Root.CHAR):
            value = value | value.map(lambda v: v[:1])

        def build(function: LeafFunction) -> st.SearchStrategy[Leaf]:
            low, high = (0, 0) if function in (6, 7) else (1, 3 if function in (11, 12) else 1)
            literals = st.lists(value, min_size=low, max_size=high).map(tuple)
            return st.builds(Leaf, st.just(function), st.just(schema.columns[at].id), literals)

        return st.sampled_from(functions).flatmap(build)

    leaves = st.integers(0, len(types) - 1).flatmap(leaf)
    predicates = st.recursive(
        leaves,
        lambda c: st.builds(
            Compound,
            st.sampled_from(CompoundFunction),
            st.lists(c, min_size=1, max_size=3).map(tuple),
        ),
        max_leaves=4,
    )
    return schema, rows, draw(predicates)


@settings(max_examples=200, deadline=None)
@given(_cases())
def test_a_batch_with_a_matching_row_is_never_pruned(case: Any) -> None:
    # pruning one batch too many is silent data loss for every filtered scan
    schema, rows, predicate = case
    batch = batch_of_rows(rows, schema)
    block = stats.build_statistics(batch, schema, range(len(schema.columns)))
    check_statistics(block, 0, len(block), schema, len(rows))
    statistics = stats.read_statistics(block, 0, len(block), schema)
    if pc.any(_rows_that_match(batch, predicate, schema)).as_py():
        assert may_match(predicate, statistics, len(rows))


def _column(low: Any, high: Any, nulls: int | None = 0, ty: str = "INT") -> Statistics:
    return Statistics({7: ColumnStatistics(parse_type(ty), nulls, low, high)})


@pytest.mark.parametrize(
    ("function", "literals", "expected"),
    [
        (F.EQUAL, (4,), False), (F.EQUAL, (5,), True), (F.EQUAL, (10,), False),
        (F.NOT_EQUAL, (5,), True),
        (F.LESS_THAN, (5,), False), (F.LESS_THAN, (6,), True),
        (F.LESS_OR_EQUAL, (4,), False), (F.LESS_OR_EQUAL, (5,), True),
        (F.GREATER_THAN, (9,), False), (F.GREATER_THAN, (8,), True),
        (F.GREATER_OR_EQUAL, (10,), False), (F.GREATER_OR_EQUAL, (9,), True),
        (F.IS_NULL, (), False), (F.IS_NOT_NULL, (), True),
        (F.IN, (1, 10), False), (F.IN, (1, 7), True),
        (F.NOT_IN, (5, 9), True),
    ],
)  # fmt: skip
def test_a_range_of_5_to_9_prunes_what_it_excludes(
    function: LeafFunction, literals: tuple[int, ...], expected: bool
) -> None:
    assert may_match(Leaf(function, 7, literals), _column(5, 9), 3) is expected


def test_a_single_value_prunes_what_excludes_it() -> None:
    assert not may_match(Leaf(F.NOT_EQUAL, 7, (5,)), _column(5, 5), 3)
    assert not may_match(Leaf(F.NOT_IN, 7, (1, 5)), _column(5, 5), 3)


def test_text_prunes_by_prefix() -> None:
    column = _column("banana", "cherry", ty="STRING")
    for prefix, expected in (
        ("a", False),
        ("b", True),
        ("bananas", True),
        ("c", True),
        ("d", False),
    ):
        assert may_match(Leaf(F.STARTS_WITH, 7, (prefix,)), column, 3) is expected
    assert may_match(Leaf(F.CONTAINS, 7, ("zzz",)), column, 3)
    assert may_match(Leaf(F.END_WITH, 7, ("zzz",)), column, 3)


def test_a_batch_of_nulls_matches_only_is_null() -> None:
    column = _column(None, None, 3)
    assert may_match(Leaf(F.IS_NULL, 7), column, 3)
    for function in set(F) - {F.IS_NULL}:
        literals = () if function is F.IS_NOT_NULL else (1,)
        assert not may_match(Leaf(function, 7, literals), column, 3)


@pytest.mark.parametrize(
    "column",
    [
        _column(None, None, 1),
        _column(None, None, None),
        _column(5, None, 0),
        _column(math.nan, math.nan, 0, "DOUBLE"),
        _column("a", "b", 0, "STRING"),
        Statistics({}),
    ],
)
def test_unknown_bounds_never_prune(column: Statistics) -> None:
    for function in set(F) - {F.IS_NULL, F.IS_NOT_NULL}:
        assert may_match(Leaf(function, 7, (99,)), column, 3)
    assert may_match(Leaf(F.IS_NULL, 7), Statistics({}), 3)
    assert may_match(Leaf(F.IS_NULL, 7), _column(1, 2, None), 3)


def test_floats_are_pruned_with_care_for_nan_and_signed_zero() -> None:
    # other writers order -0.0 below 0.0 and may keep a NaN out of both bounds
    zero = _column(0.0, 0.0, ty="DOUBLE")
    assert may_match(Leaf(F.LESS_THAN, 7, (0.0,)), zero, 1)
    assert may_match(Leaf(F.GREATER_THAN, 7, (-0.0,)), zero, 1)
    assert may_match(Leaf(F.NOT_EQUAL, 7, (0.0,)), zero, 1)
    assert may_match(Leaf(F.NOT_IN, 7, (0.0,)), zero, 1)
    assert not may_match(Leaf(F.GREATER_THAN, 7, (1.0,)), zero, 1)
    schema = _schema("DOUBLE")
    batch = pa.RecordBatch.from_pydict({"c0": [1.0, math.nan]}, schema=schema.arrow)
    block = stats.build_statistics(batch, schema, (0,))
    got = stats.read_statistics(block, 0, len(block), schema)
    assert math.isnan(got.columns[0].maximum)
    assert may_match(Leaf(F.GREATER_THAN, 0, (5.0,)), got, 2)


def test_and_needs_every_child_and_or_needs_one() -> None:
    yes, no = Leaf(F.EQUAL, 7, (5,)), Leaf(F.EQUAL, 7, (50,))
    column = _column(5, 9)
    assert not may_match(Compound(CompoundFunction.AND, (yes, no)), column, 3)
    assert may_match(Compound(CompoundFunction.OR, (no, yes)), column, 3)
    assert not may_match(Compound(CompoundFunction.OR, (no, no)), column, 3)
