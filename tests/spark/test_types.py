"""Every type in every kind of table: written by Spark, pyfluss and our client, read by all three.

One table of each kind has a column of every type. Each writer puts in rows of its own, so a read
shows every writer at once. Two things are narrower than a type says:

* Spark has microseconds: finer times are cut when it reads, and it does not write any.
* Rows of primary-key tables have times of the day in milliseconds, by Fluss's format, and pyfluss
  writes them from Python values, which have microseconds. There all writers are given what these
  can hold (`Sample.rows`). Nothing else is beyond pyfluss.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from decimal import Decimal
from typing import Any

import fluss
import pyarrow as pa
import pytest

import zufluss.spark
from tests.end_to_end.helpers import EARLIEST, append, connected, in_time
from tests.end_to_end.kv import upsert
from tests.end_to_end.samples import SAMPLES, Sample
from zufluss.client.core.convert import ColumnMismatchError
from zufluss.client.sync.connection import Connection
from zufluss.client.sync.table import Table
from zufluss.model.arrow_types import from_arrow
from zufluss.spark.write.sink import check_schema
from zufluss.testing.server import DevServer

pytestmark = pytest.mark.slow

MORE = (
    Sample("char_6", pa.string(), ("", "zuflus", "→ ü", None)),
    Sample("array_time", pa.list_(pa.time32("ms")), ([0, None, 86_399_999], None, [])),
    Sample(
        "row_wide",
        pa.struct(
            [
                ("t", pa.timestamp("us")),
                ("z", pa.timestamp("ms", "UTC")),
                ("d", pa.decimal128(38, 2)),
                ("b", pa.binary()),
            ]
        ),
        ({"t": 1, "z": -1, "d": Decimal("-1.25"), "b": b"\x00"}, None, dict.fromkeys("tzdb")),
    ),
)
COLUMNS = (*SAMPLES, *MORE)
KEYED_COLUMNS = tuple(replace(sample, values=sample.rows or sample.values) for sample in COLUMNS)
ROWS = max(len(sample.values) for sample in COLUMNS) + 1
"""Every value of every type, and a row of nulls."""
SQL = {"char_6": "CHAR(6)"}
MICROS = {"s": 10**6, "ms": 10**3, "us": 1}
KINDS = ["log", "primary key", "partitioned log", "partitioned primary key"]
WRITERS = {"spark": 0, "pyfluss": 100, "zufluss": 200}
"""The first id of each writer."""


@dataclass(frozen=True)
class Kind:
    """A kind of table."""

    keyed: bool
    parted: bool

    @property
    def columns(self) -> tuple[Sample, ...]:
        """A column of every type, with the values that the table can hold."""
        return KEYED_COLUMNS if self.keyed else COLUMNS

    def rows(self, writer: str, values: Callable[[Sample], pa.Array]) -> pa.Table:
        """The rows of a writer, each column running through its values, nulls in the last row."""
        first = WRITERS[writer]
        columns = {
            "id": pa.array(range(first, first + ROWS), pa.int32()),
            "p": pa.array([("a", "b")[i % 2] for i in range(ROWS)]),
        }
        for sample in self.columns:
            found = values(sample)
            at = [*(i % len(found) for i in range(ROWS - 1)), None]
            columns[sample.name] = found.take(pa.array(at, pa.int32()))
        return pa.table(columns)

    def create(self, connection: Connection) -> Table:
        name = f"fluss.types_{secrets.token_hex(4)}"
        columns = [f"{s.name} {SQL.get(s.name, from_arrow(s.type))}" for s in COLUMNS]
        keys = (["id", "p"] if self.parted else ["id"]) if self.keyed else []
        connection.admin.create_table(
            name,
            ", ".join(["id INT NOT NULL", "p STRING NOT NULL", *columns]),
            primary_key=keys,
            partition_keys=["p"] if self.parted else [],
            bucket_count=2,
        )
        for part in ("a", "b") if self.parted else ():
            connection.admin.create_partition(name, {"p": part})
        return connection.table(name)


@pytest.fixture(params=KINDS)
def kind(request: pytest.FixtureRequest) -> Kind:
    return Kind("primary key" in request.param, "partitioned" in request.param)


@pytest.fixture
def table(kind: Kind, connection: Connection) -> Iterator[Table]:
    made = kind.create(connection)
    yield made
    connection.admin.drop_table(made.path)


# -- values in Spark ---------------------------------------------------------------------------


def in_spark(sample: Sample) -> pa.Array:
    """The values as Spark has them."""
    values = [_in_spark(sample.type, value) for value in sample.values]
    return pa.array(values, _spark_arrow(sample.type))


def _in_spark(of: pa.DataType, value: Any) -> Any:
    if value is None:
        return None
    if pa.types.is_list(of):
        return [_in_spark(of.value_type, each) for each in value]
    if pa.types.is_struct(of):
        return {field.name: _in_spark(field.type, value.get(field.name)) for field in of}
    if pa.types.is_time(of) or pa.types.is_timestamp(of):
        return value // 1000 if of.unit == "ns" else value * MICROS[of.unit]
    return value


def _spark_arrow(of: pa.DataType) -> pa.DataType:
    if pa.types.is_list(of):
        return pa.list_(_spark_arrow(of.value_type))
    if pa.types.is_struct(of):
        return pa.struct([(field.name, _spark_arrow(field.type)) for field in of])
    if pa.types.is_timestamp(of):
        return pa.timestamp("us", of.tz)
    if pa.types.is_fixed_size_binary(of):
        return pa.binary()
    return pa.int64() if pa.types.is_time(of) else of


def spark_ddl(of: pa.DataType) -> str:
    """The type that Spark is to have for a column."""
    if pa.types.is_list(of):
        return f"array<{spark_ddl(of.value_type)}>"
    if pa.types.is_map(of):
        return f"map<{spark_ddl(of.key_type)},{spark_ddl(of.item_type)}>"
    if pa.types.is_struct(of):
        return f"struct<{','.join(f'{f.name}:{spark_ddl(f.type)}' for f in of)}>"
    if pa.types.is_timestamp(of):
        return "timestamp_ntz" if of.tz is None else "timestamp"
    if pa.types.is_decimal(of):
        return f"decimal({of.precision},{of.scale})"
    names = {"int8": "tinyint", "int16": "smallint", "int32": "int", "int64": "bigint"}
    names |= {"bool": "boolean", "date32[day]": "date", "time": "bigint"}
    text = str(of)
    return "bigint" if pa.types.is_time(of) else names.get(text, text.split("_size_")[-1])


SPARK_SCHEMA = {s.name: spark_ddl(_spark_arrow(s.type)) for s in COLUMNS}


def cut(sample: Sample) -> pa.Array:
    """The values in the table's types, without what is finer than a microsecond."""
    return _of_micros(sample.type, in_spark(sample))


def _of_micros(of: pa.DataType, array: pa.Array) -> pa.Array:
    if pa.types.is_time(of):
        return array.cast(pa.time64("us")).cast(of)
    if pa.types.is_list(of) and pa.types.is_time(of.value_type):
        return array.cast(pa.list_(pa.time64("us"))).cast(of)
    return array.cast(of)


# -- who writes and reads ----------------------------------------------------------------------


class BySpark:
    """`format("fluss")`."""

    def __init__(self, spark: Any, table: Table, kind: Kind, bootstrap: str) -> None:
        zufluss.spark.register(spark, bootstrap)
        self.spark = spark
        self.kind = kind
        self.path = str(table.path)

    def write(self) -> pa.Table:
        rows = self.kind.rows("spark", in_spark)
        schema = ["id int", "p string", *(f"{n} {ddl}" for n, ddl in SPARK_SCHEMA.items())]
        frame = self.spark.createDataFrame(rows, ", ".join(schema))
        frame.write.format("fluss").option("table", self.path).mode("append").save()
        return self.kind.rows("spark", cut)

    def read(self) -> pa.Table:
        return self.spark.read.format("fluss").load(self.path).toArrow()


def write_ours(table: Table, kind: Kind) -> pa.Table:
    rows = kind.rows("zufluss", Sample.array)
    with table.upsert() if kind.keyed else table.append() as writer:
        writer.write(rows)
    return rows


async def write_theirs(theirs: fluss.FlussTable, kind: Kind) -> pa.Table:
    rows = kind.rows("pyfluss", Sample.array)
    if kind.keyed:
        await upsert(theirs, *rows.to_pylist())
    else:
        await append(theirs, *rows.combine_chunks().to_batches())
    return rows


async def read_theirs(conn: fluss.FlussConnection, path: fluss.TablePath, kind: Kind) -> pa.Table:
    theirs = await in_time(conn.get_table(path))
    parts: list[int | None] = [None]
    if kind.parted:
        found = await in_time(conn.get_admin().list_partition_infos(path))
        parts = [part.partition_id for part in found]
    if kind.keyed:
        return pa.concat_tables([await _limit_scan(theirs, p, b) for p in parts for b in (0, 1)])
    scanner = await in_time(theirs.new_scan().create_record_batch_log_scanner())
    if kind.parted:
        scanner.subscribe_partition_buckets({(p, b): EARLIEST for p in parts for b in (0, 1)})
    else:
        scanner.subscribe_buckets({0: EARLIEST, 1: EARLIEST})
    return await in_time(scanner.to_arrow())


async def _limit_scan(theirs: fluss.FlussTable, part: int | None, bucket: int) -> pa.Table:
    table_id = theirs.get_table_info().table_id
    where = fluss.TableBucket(table_id, bucket)
    if part is not None:
        where = fluss.TableBucket.with_partition(table_id, part, bucket)
    return await in_time(
        theirs.new_scan().limit(1000).create_bucket_batch_scanner(where).to_arrow()
    )


def assert_same(reader: str, found: pa.Table, expected: pa.Table) -> None:
    found = found.sort_by("id").combine_chunks()
    assert found.column_names == expected.column_names
    assert found["id"].to_pylist() == expected["id"].to_pylist(), reader
    for name in expected.column_names:
        got, wanted = found[name].combine_chunks(), expected[name].combine_chunks()
        assert got.cast(wanted.type).equals(wanted), f"{reader}, column {name}: {got} {wanted}"


async def test_every_type_passes_between_spark_pyfluss_and_our_client(
    spark: Any, lake_server: DevServer, table: Table, kind: Kind
) -> None:
    by_spark = BySpark(spark, table, kind, lake_server.bootstrap)
    path = fluss.TablePath(table.path.database, table.path.table)
    async with connected(lake_server.bootstrap) as conn:
        theirs = await write_theirs(await in_time(conn.get_table(path)), kind)
        written = pa.concat_tables([by_spark.write(), theirs, write_ours(table, kind)])
        assert_same("our client", table.scan().to_arrow(), written)
        assert_same("pyfluss", await read_theirs(conn, path, kind), written)
    seen = pa.concat_tables([kind.rows(writer, in_spark) for writer in WRITERS])
    assert_same("Spark", by_spark.read(), seen)


def test_types_in_spark_are_as_documented(
    spark: Any, lake_server: DevServer, connection: Connection
) -> None:
    made = Kind(keyed=False, parted=False).create(connection)
    zufluss.spark.register(spark, lake_server.bootstrap)
    try:
        frame = spark.read.format("fluss").load(str(made.path))
        assert dict(frame.dtypes[2:]) == SPARK_SCHEMA
    finally:
        connection.admin.drop_table(made.path)


@pytest.mark.parametrize("given", ["interval day to second", "variant", "array<interval year>"])
def test_a_type_that_no_table_has_is_refused_by_the_name_of_its_column(
    spark: Any, connection: Connection, given: str
) -> None:
    made = Kind(keyed=False, parted=False).create(connection)
    try:
        rows = spark.createDataFrame([], f"bigint {given}")
        with pytest.raises(ColumnMismatchError, match=r"'bigint' .* is BIGINT, in Spark"):
            check_schema(made.info, ["bigint"], rows.schema, None)
    finally:
        connection.admin.drop_table(made.path)
