"""Options of the source, and filters as text: what they mean and what is refused."""

from __future__ import annotations

import datetime as dt
import pickle
from decimal import Decimal

import pytest

from tests.paths import DOCS
from zufluss import Schema, col
from zufluss.errors import ConfigError, InvalidTimestampError
from zufluss.model.expression import Expression
from zufluss.model.predicate import InvalidPredicateError
from zufluss.spark import source_options as o
from zufluss.spark.docs import with_options
from zufluss.spark.read.filter_text import parse_filter
from zufluss.spark.read.shape import parse_time
from zufluss.spark.source_options import TableView, Use, parse_options

PLACE = {"bootstrap.servers": "localhost:9123", "table": "shop.orders"}


def test_keys_are_matched_in_any_case():
    given = {"BOOTSTRAP.servers": "a:1", "Table": "shop.orders", "scan.maxrecordsperpartition": "7"}
    found = parse_options(given)
    assert found.get(o.MAX_RECORDS_PER_PARTITION) == 7
    assert (str(found.path), found.bootstrap, found.view) == ("shop.orders", "a:1", TableView.ROWS)


@pytest.mark.parametrize(
    ("name", "path", "view"),
    [
        ("shop.orders$lake", "shop.orders", TableView.LAKE),
        ("shop.orders$changelog", "shop.orders", TableView.CHANGELOG),
        ("orders", "fluss.orders", TableView.ROWS),
    ],
)
def test_the_suffix_of_a_table_name_selects_its_lake_or_changelog(name, path, view):
    for given in ({"table": name}, {"path": name}):
        found = parse_options(given, "localhost:9123")
        assert (str(found.path), found.view) == (path, view)


def test_options_of_the_client_are_passed_on():
    found = parse_options({**PLACE, "client.request-timeout": "5s"})
    assert found.client == {"client.request-timeout": "5s"}
    assert pickle.loads(pickle.dumps(found)) == found


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"table": "shop.orders"}, "where is the cluster"),
        ({"bootstrap.servers": "a:1"}, "which table"),
        ({**PLACE, "txnid": "x"}, r"did you mean txn\.id\?"),
        ({**PLACE, "client.request-timeot": "x"}, r"did you mean client\.request-timeout\?"),
        ({**PLACE, "scan.startup.mode": "begin"}, "full, earliest, latest, timestamp"),
        ({**PLACE, "columns": ""}, "columns is empty"),
        ({**PLACE, "partitions": " "}, "partitions is empty"),
        ({**PLACE, "path": "shop.customers"}, r"says 'shop\.orders', the path 'shop\.customers'"),
        ({**PLACE, "path": "shop.orders$lake"}, "give one of them"),
    ],
)
def test_missing_and_wrong_options_are_named(given, message):
    with pytest.raises(ConfigError, match=message):
        parse_options(given)


@pytest.mark.parametrize(
    ("use", "key"),
    [
        (Use.BATCH, "scan.startup.mode"),
        (Use.STREAM, "limit"),
        (Use.STREAM, "txn.id"),
        (Use.WRITE, "filter"),
    ],
)
def test_options_without_meaning_are_refused(use, key):
    found = parse_options({**PLACE, key: {"scan.startup.mode": "full", "limit": "1"}.get(key, "x")})
    with pytest.raises(ConfigError, match=f"option {key} has no meaning for {use.value}"):
        found.check_for(use)


def test_table_and_path_may_say_the_same():
    given = {**PLACE, "table": "fluss.orders", "path": "orders"}
    assert str(parse_options(given).path) == "fluss.orders"
    placed = {**PLACE, "path": "file:/spark-warehouse/v"}
    assert str(parse_options(placed).path) == "shop.orders", "a place that Spark chose"


def test_changes_are_not_in_the_lake():
    options = {**PLACE, "table": "shop.orders$changelog", "read.optimized": "true"}
    with pytest.raises(ConfigError, match=r"is not in the lake: read\.optimized has no meaning"):
        parse_options(options).check_for(Use.BATCH)


def test_only_tables_are_written_to():
    with pytest.raises(ConfigError, match="can only be read"):
        parse_options({**PLACE, "table": "shop.orders$lake"}).check_for(Use.WRITE)


def test_times_are_milliseconds_or_iso_and_utc_unless_said():
    assert parse_time("k", "1500") == 1500
    assert parse_time("k", "1970-01-01T01:00:00+01:00") == 0
    assert parse_time("k", "1970-01-01 00:00:00.250") == 250
    with pytest.raises(InvalidTimestampError, match="k = 'now'"):
        parse_time("k", "now")


def test_the_documentation_lists_the_options_as_they_are():
    page = (DOCS / "spark.md").read_text()
    assert with_options(page) == page, "run `make docs`"


# -- filters -----------------------------------------------------------------------------------

SCHEMA = Schema.of(
    "n INT, x DOUBLE, s STRING, flag BOOLEAN, day DATE, clock TIME(0), at TIMESTAMP(3), "
    "utc TIMESTAMP_LTZ(3), price DECIMAL(5, 2), raw BYTES, `odd name` INT"
)
UTC = dt.datetime(2024, 1, 2, 3, 4, 5, tzinfo=dt.UTC)
FILTERS: list[tuple[str, Expression]] = [
    ("n > 2", col("n") > 2),
    ("n = -2 or n <> 3", (col("n") == -2) | (col("n") != 3)),
    ("NOT n >= 2 AND x < 1.5", ~(col("n") >= 2) & (col("x") < 1.5)),
    ("n = 1 OR n = 2 AND x = 1e3", (col("n") == 1) | ((col("n") == 2) & (col("x") == 1000.0))),
    ("(n = 1 OR n = 2) AND flag", ((col("n") == 1) | (col("n") == 2)) & (col("flag") == True)),  # noqa: E712
    ("n IN (1, 2)", col("n").isin([1, 2])),
    ("n NOT IN (1)", ~col("n").isin([1])),
    ("n BETWEEN 1 AND 5 AND s = 'a'", col("n").between(1, 5) & (col("s") == "a")),
    ("s IS NULL", col("s").is_null()),
    ("s IS NOT NULL", col("s").is_not_null()),
    ("s LIKE 'a%'", col("s").starts_with("a")),
    ("s NOT LIKE '%a'", ~col("s").ends_with("a")),
    ("s like '%it''s%'", col("s").contains("it's")),
    ("s == 'ä''b'", col("s") == "ä'b"),
    ("flag = FALSE", col("flag") == False),  # noqa: E712
    ("day >= '2024-01-02'", col("day") >= dt.date(2024, 1, 2)),
    ("clock < '12:00:00'", col("clock") < dt.time(12)),
    ("at = '2024-01-02 03:04:05'", col("at") == dt.datetime(2024, 1, 2, 3, 4, 5)),
    ("utc <= '2024-01-02T03:04:05'", col("utc") <= UTC),
    ("utc <= '2024-01-02T04:04:05+01:00'", col("utc") <= UTC),
    ("price > 1.10", col("price") > Decimal("1.10")),
    ("raw = X'01ff'", col("raw") == b"\x01\xff"),
    ("`odd name` = 1", col("odd name") == 1),
]


@pytest.mark.parametrize(("text", "expected"), FILTERS, ids=[text for text, _ in FILTERS])
def test_a_text_means_the_same_as_the_expression(text, expected):
    assert parse_filter(text, SCHEMA).resolve(SCHEMA) == expected.resolve(SCHEMA)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "expected a column, found the end"),
        ("n", "cannot be compared"),
        ("n = 1 n = 2", "expected AND, OR or the end, found 'n'"),
        ("n = 1.5", "cannot be compared"),
        ("n = 'a'", "cannot be compared"),
        ("1 = n", "expected a column, found '1'"),
        ("n NOT 1", "expected IN, BETWEEN or LIKE"),
        ("(n = 1", r"expected \), found the end"),
        ("s LIKE 'a%b'", "put it on the DataFrame instead"),
        ("s LIKE 'a_'", "put it on the DataFrame instead"),
        ("day = 'monday'", "is no DATE for column 'day'"),
        ("n = 1 ; drop", "'; drop' is not understood"),
        ("m = 1", "the table has no column 'm'"),
        ("raw = X'0af'", "expected a value for column raw, found 'X'"),
        ("_change_type = '+I'", "put this condition on the DataFrame"),
    ],
)
def test_the_place_that_is_not_understood_is_named(text, message):
    with pytest.raises(InvalidPredicateError, match=message):
        parse_filter(text, SCHEMA)
