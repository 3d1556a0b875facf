"""Writes that cannot be, as the driver refuses them before anything is written; without Spark."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

pytest.importorskip("pyspark", reason="needs the extra zufluss[spark]")

from pyspark.sql.types import (
    DataType,
    DecimalType,
    DoubleType,
    IntegerType,
    LongType,
    NullType,
    StringType,
    StructType,
)

import zufluss
from zufluss.client.sync.connection import Connection
from zufluss.errors import ZuflussError
from zufluss.spark.source_options import Use, parse_options
from zufluss.spark.write.sink import make_sink
from zufluss.testing.server import DevServer

TYPES: dict[str, DataType] = {
    "int": IntegerType(),
    "long": LongType(),
    "text": StringType(),
    "double": DoubleType(),
    "decimal": DecimalType(10, 2),
    "null": NullType(),
}
TABLES = {
    "fluss.refused_log": "id BIGINT NOT NULL, name STRING, price DECIMAL(8, 2)",
    "fluss.refused_keys": "id BIGINT, name STRING, price DECIMAL(8, 2), PRIMARY KEY (id)",
}
GOOD = "id long, name text, price null"


@pytest.fixture(scope="module")
def conn(dev_server: DevServer) -> Iterator[Connection]:
    with zufluss.connect(dev_server.bootstrap) as connection:
        for table, columns in TABLES.items():
            connection.admin.create_table(table, columns, ignore_if_exists=True)
        yield connection


def rows_of(text: str) -> StructType:
    """`"id long, name text"` as Spark's schema."""
    out = StructType()
    for column in text.split(", "):
        name, kind = column.split()
        out.add(name, TYPES[kind])
    return out


@pytest.mark.parametrize(
    ("table", "rows", "options", "message"),
    [
        (
            "log",
            "id long, name text",
            {},
            r"column 'price' .* is missing in the rows; add it, with",
        ),
        ("log", "name text, price null", {}, r"column 'id' .* missing .*, and it is NOT NULL; add"),
        ("keys", "id long, name text", {}, r"'price' .* or name the columns .* in write.columns"),
        ("log", f"{GOOD}, nam text", {}, r"column 'nam' .* not in the table .did you mean name"),
        ("log", f"{GOOD}, id long", {}, r"a column name occurs twice"),
        ("log", "id text, name text, price null", {}, r"'id' .* is BIGINT.*have string. Cast it"),
        ("log", "id double, name text, price null", {}, r"'id' .* the rows have double"),
        ("log", "id long, name text, price decimal", {}, r"'price' .* the rows have decimal\(10,2"),
        ("log", "id null, name text, price null", {}, r"column 'id' of table .* is NOT NULL"),
        ("keys", "name text", {"write.columns": "name"}, r"lack id of the primary key"),
        ("keys", "id long", {"write.columns": "id,nmae"}, r"nmae"),
        (
            "keys",
            GOOD,
            {"write.columns": "id,name"},
            r"'price' .* is not among those to be written",
        ),
        ("keys", GOOD, {"write.change-type-column": "op"}, r"column 'op'.* is missing in the rows"),
        ("keys", f"{GOOD}, op int", {"write.change-type-column": "op"}, r"'op'.* is int, not str"),
        ("keys", GOOD, {"write.change-type-column": "name"}, r"= name is a column of table"),
        ("log", GOOD, {"write.change-type-column": "name"}, r"is for primary-key tables"),
        ("log", "id long", {"write.columns": "id"}, r"write.columns is for primary-key tables"),
        ("keys", GOOD, {"write.order": "canonical"}, r"is for log and aggregation tables"),
        (
            "keys",
            f"{GOOD}, op text",
            {"write.order": "canonical", "write.change-type-column": "op"},
            r"write.order = canonical does not go with write.change-type-column",
        ),
        ("log", GOOD, {"write.order": "random"}, r"write.order.*arrival.*canonical"),
        ("log", GOOD, {"write.orders": "canonical"}, r"write.orders is not an option.*write.order"),
        ("log", GOOD, {"columns": "id"}, r"option columns has no meaning for a write"),
        ("log", GOOD, {"txn.id": "a b"}, r"txn.id .*Invalid producer ID 'a b': allowed are"),
        ("log", GOOD, {"client.writer.bath-size": "1kb"}, r"did you mean client.writer.batch-size"),
        ("log$lake", GOOD, {}, r"\$lake can only be read; write to table fluss.refused_log"),
        ("none", GOOD, {}, r"refused_none"),
    ],
)
def test_an_impossible_write_is_refused_with_the_reason(
    conn: Connection,
    dev_server: DevServer,
    table: str,
    rows: str,
    options: dict[str, str],
    message: str,
) -> None:
    given = {"bootstrap.servers": dev_server.bootstrap, "table": f"fluss.refused_{table}"}

    def write() -> None:
        parsed = parse_options(given | options)
        parsed.check_for(Use.WRITE)
        make_sink(parsed, rows_of(rows), False)

    with pytest.raises(ZuflussError, match=message):
        write()
    for name in TABLES:
        assert conn.table(name).scan().to_arrow().num_rows == 0


def test_overwriting_is_refused(conn: Connection, dev_server: DevServer) -> None:
    given = {"bootstrap.servers": dev_server.bootstrap, "table": "fluss.refused_log"}
    with pytest.raises(ZuflussError, match="cannot be overwritten by Spark; write with mode app"):
        make_sink(parse_options(given), rows_of(GOOD), True)


def test_narrower_numbers_and_nulls_fit_into_wider_ones(
    conn: Connection, dev_server: DevServer
) -> None:
    given = {"bootstrap.servers": dev_server.bootstrap, "table": "fluss.refused_log"}
    sink = make_sink(parse_options(given), rows_of("price null, id int, name text"), False)
    assert sink.columns == ("id", "name", "price")
