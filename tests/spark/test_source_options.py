"""Options of the source, and filters as text: what they mean and what is refused."""

from __future__ import annotations

import pickle

import pytest

from tests.paths import DOCS
from zufluss.errors import ConfigError, InvalidTimestampError
from zufluss.spark import source_options as o
from zufluss.spark.docs import with_options
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
