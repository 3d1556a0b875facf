"""Filters as text mean what `col` expressions mean, and texts that cannot be read say where."""

from __future__ import annotations

import datetime as dt
from contextlib import suppress
from decimal import Decimal

import duckdb
import pyarrow as pa
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from zufluss import Schema, col
from zufluss.model.expression import Expression
from zufluss.model.filter_text import DEPTH_MAX, TEXT_CHARACTERS_MAX, parse_filter
from zufluss.model.predicate import InvalidPredicateError

SCHEMA = Schema.of(
    "id BIGINT, name STRING, ok BOOLEAN, day DATE, at TIMESTAMP(3), price DECIMAL(10, 2), "
    "score DOUBLE, raw BYTES, t TIME(3), utc TIMESTAMP_LTZ(3), `odd name` INT"
)
UTC = dt.datetime(2026, 1, 31, 8, tzinfo=dt.UTC)
ID, NAME, OK = col("id"), col("name"), col("ok")


def same(text: str, expected: Expression) -> None:
    filter = parse_filter(text, SCHEMA)
    assert filter.resolve(SCHEMA) == expected.resolve(SCHEMA)
    assert filter.to_arrow(SCHEMA).equals(expected.to_arrow(SCHEMA))


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("id > 5", ID > 5),
        ("  id>=-5  ", ID >= -5),
        ("id = 5 and name <> 'it''s'", (ID == 5) & (NAME != "it's")),
        ("id < 1 OR id > 2 AND ok", (ID < 1) | ((ID > 2) & (OK == True))),  # noqa: E712
        ("(id < 1 OR id > 2) AND NOT ok", ((ID < 1) | (ID > 2)) & (OK != True)),  # noqa: E712
        ("NOT (id = 1 AND name IS NULL)", ~((ID == 1) & NAME.is_null())),
        ("name IS NOT NULL", NAME.is_not_null()),
        ("id IN (1, 2,3)", ID.isin([1, 2, 3])),
        ("id NOT IN (1)", ~ID.isin([1])),
        ("id BETWEEN 1 AND 5 AND ok = TRUE", ID.between(1, 5) & (OK == True)),  # noqa: E712
        ("id NOT BETWEEN 1 AND 5", ~ID.between(1, 5)),
        ("name LIKE 'x%'", NAME.starts_with("x")),
        ("name LIKE '%x'", NAME.ends_with("x")),
        ("name LIKE '%x%'", NAME.contains("x")),
        ("name LIKE 'x'", NAME == "x"),
        ("name NOT LIKE 'x%'", ~NAME.starts_with("x")),
        ("day >= '2026-01-31'", col("day") >= dt.date(2026, 1, 31)),
        ("at < '2026-01-31T08:00:00'", col("at") < dt.datetime(2026, 1, 31, 8)),
        ("price = 1.10", col("price") == Decimal("1.10")),
        ("price = '1.10'", col("price") == Decimal("1.10")),
        ("score > 1e3", col("score") > 1000.0),
        ("raw = '00ff'", col("raw") == b"\x00\xff"),
        ("raw = X'00ff'", col("raw") == b"\x00\xff"),
        ("utc <= '2026-01-31T08:00:00'", col("utc") <= UTC),
        ("utc <= '2026-01-31T09:00:00+01:00'", col("utc") <= UTC),
        ("name like '%it''s%'", NAME.contains("it's")),
        ("`odd name` = 1", col("odd name") == 1),
        ("t < '08:30:00'", col("t") < dt.time(8, 30)),
        ("\"id\" = 1 AND `name` = 'a'", (ID == 1) & (NAME == "a")),
    ],
)
def test_a_text_means_what_the_expression_means(text: str, expected: Expression) -> None:
    same(text, expected)


@pytest.mark.parametrize(
    ("text", "where", "expected"),
    [
        ("", "at its end", "a column"),
        ("id >", "at its end", "a number"),
        ("id > 5 name", "'name'", "AND, OR"),
        ("nothing = 1", "'nothing = 1'", "one of the columns id, name"),
        ("id = 'x", '"\'x"', "a column, a value"),
        ("id ; 1", "'; 1'", "a column, a value"),
        ("day = 'yesterday'", "'yesterday'", "a value of type DATE"),
        ("id IN ()", r"'\)'", "a number"),
        ("id IN (1", "at its end", r"expected \)"),
        ("name LIKE 'a%b'", "a%b", "% at the beginning or the end"),
        ("id NOT 5", "'5'", "IN, BETWEEN or LIKE"),
        ("id IS 5", "'5'", "NULL"),
        ("AND", "'AND'", "the name of a column"),
        ("id = 5x", "'5x'", "a column, a value"),
        ("5 = id", "'5 = id'", "the name of a column"),
        ("raw = X'0af'", "\"X'0af'\"", "X'0aff'"),
        ("_change_type = '+I'", "_change_type", "not one that a changelog adds"),
    ],
)
def test_a_text_that_cannot_be_read_says_where_and_what_is_expected(
    text: str, where: str, expected: str
) -> None:
    with pytest.raises(InvalidPredicateError, match=f"(?s){where}.*{expected}.*like id > 5"):
        parse_filter(text, SCHEMA)


def test_a_value_that_does_not_fit_the_column_is_refused_like_in_an_expression() -> None:
    with pytest.raises(InvalidPredicateError, match="column 'id'"):
        parse_filter("id = 'seven'", SCHEMA).resolve(SCHEMA)


@pytest.mark.parametrize(
    "text", ["(" * (DEPTH_MAX + 1) + "ok", "NOT " * 10_000 + "ok", "x" * (TEXT_CHARACTERS_MAX + 1)]
)
def test_a_filter_cannot_exhaust_the_stack(text: str) -> None:
    with pytest.raises(InvalidPredicateError):
        parse_filter(text, SCHEMA)


@given(st.text(alphabet="id name()=<>!'\"`%,.0123456789ANDORNTISULKE +-eE", max_size=60))
def test_any_text_is_a_filter_or_a_typed_error(text: str) -> None:
    with suppress(InvalidPredicateError):
        parse_filter(text, SCHEMA)


COLUMNS = {
    "id": ["-1", "0", "2"],
    "name": ["''", "'a'", "'ab'", "'it''s'"],
    "ok": ["TRUE", "false"],
    "day": ["'2026-01-01'", "'2026-01-02'"],
    "price": ["1.10", "-2", "0"],
    "score": ["0", "2.5", "1e3"],
}
"""Columns and literals of random filters."""
SIGNS = ("=", "<>", "!=", "<", "<=", ">", ">=")


@st.composite
def random_tests(draw: st.DrawFn) -> str:
    column = draw(st.sampled_from([*COLUMNS]))
    value = st.sampled_from(COLUMNS[column])
    a, b, negated = draw(value), draw(value), draw(st.sampled_from(["", "NOT "]))
    pattern = draw(st.sampled_from(["a%", "%b", "%a%", "ab", "%", "%%", ""]))
    sign = draw(st.sampled_from(SIGNS))
    return draw(
        st.sampled_from(
            [
                f"{column} {sign} {a}",
                f'"{column}" IS {negated}NULL',
                f"{column} {negated}IN ({a}, {b})",
                f"{column} {negated}BETWEEN {a} AND {b}",
                f"name {negated}LIKE '{pattern}'",
                f"{negated}ok",
            ]
        )
    )


FILTERS = st.recursive(
    random_tests(),
    lambda inner: st.one_of(
        st.builds("NOT {}".format, inner),
        st.builds("({})".format, inner),
        st.builds("{} {} {}".format, inner, st.sampled_from(["AND", "or", "OR"]), inner),
    ),
    max_leaves=8,
)


@pytest.fixture(scope="module")
def rows() -> pa.Table:
    """Every pair of neighbouring columns meets with and without NULL."""
    values: dict[str, list[object]] = {
        "id": [None, -1, 0, 1, 2],
        "name": [None, "", "a", "ab", "b", "it's"],
        "ok": [None, True, False],
        "day": [None, dt.date(2026, 1, 1), dt.date(2026, 1, 3)],
        "price": [None, Decimal("1.10"), Decimal("-2.00")],
        "score": [None, 0.0, 2.5, 1e9],
    }
    count = 4 * 5 * 6 * 7
    return pa.table(
        {
            name: pa.array(
                [these[(i // (j + 1) + i) % len(these)] for i in range(count)],
                SCHEMA.column(name).data_type.to_arrow(),
            )
            for j, (name, these) in enumerate(values.items())
        }
    )


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(text=FILTERS)
def test_a_filter_selects_the_rows_that_sql_selects(text: str, rows: pa.Table) -> None:
    """Precedence, NULL and negation are those of SQL; DuckDB is the referee."""
    expected = duckdb.sql(f"SELECT * FROM rows WHERE {text}").to_arrow_table()
    selected = rows.filter(parse_filter(text, SCHEMA).to_arrow(SCHEMA))
    assert selected.to_pylist() == expected.to_pylist()
