"""The client against a real server, as users use it."""

from __future__ import annotations

import asyncio
import datetime as dt
import itertools
import threading
import time
from collections.abc import Callable, Iterator
from decimal import Decimal
from typing import Any

import duckdb
import fluss
import numpy as np
import pandas as pd
import polars as pl
import pyarrow as pa
import pytest

import zufluss
from tests.waiting import WAIT_SECONDS
from zufluss import col
from zufluss.client import ColumnMismatchError
from zufluss.client.sync.connection import Connection
from zufluss.client.sync.table import Table
from zufluss.errors import (
    AuthenticationError,
    DatabaseNotEmptyError,
    InvalidTimestampError,
    NetworkError,
    OffsetOutOfRangeError,
    TableNotExistError,
    TableNotPartitionedError,
)
from zufluss.model.ddl import parse_type
from zufluss.model.schema import Column, Schema
from zufluss.testing.server import DevServer

NUMBERS = itertools.count()
EVERY_TYPE = (
    "bo BOOLEAN, ti TINYINT, sm SMALLINT, i INT, bi BIGINT, f FLOAT, d DOUBLE, c CHAR(4), "
    "s STRING, b BYTES, bn BINARY(3), de DECIMAL(10, 2), dl DECIMAL(38, 9), da DATE, "
    "t0 TIME(0), t3 TIME(3), ts0 TIMESTAMP(0), ts3 TIMESTAMP(3), ts6 TIMESTAMP(6), "
    "ts9 TIMESTAMP(9), lz TIMESTAMP_LTZ(6), ar ARRAY<STRING>, ma MAP<STRING, INT>, "
    "ro ROW<x INT, y ARRAY<ROW<z STRING>>>"
)
NOON = dt.datetime(2024, 2, 29, 12, 30, 15)
ROW: dict[str, Any] = {
    "bo": True,
    "ti": -7,
    "sm": 300,
    "i": -70_000,
    "bi": 2**40,
    "f": 1.5,
    "d": 2.25,
    "c": "char",
    "s": "grüße",
    "b": b"\x00\xff",
    "bn": b"abc",
    "de": Decimal("12345678.90"),
    "dl": Decimal("-12345678901234567890.123456789"),
    "da": NOON.date(),
    "t0": dt.time(1, 2, 3),
    "t3": dt.time(1, 2, 3, 4000),
    "ts0": NOON,
    "ts3": NOON.replace(microsecond=123_000),
    "ts6": NOON.replace(microsecond=123_456),
    "ts9": pd.Timestamp(NOON.replace(microsecond=123_456)),
    "lz": NOON.replace(tzinfo=dt.UTC),
    "ar": ["a", None, "c"],
    "ma": [("k", 1), ("l", None)],
    "ro": {"x": 1, "y": [{"z": "deep"}]},
}


@pytest.fixture(scope="module")
def conn(dev_server: DevServer) -> Iterator[Connection]:
    with zufluss.connect(dev_server.bootstrap) as connection:
        yield connection


@pytest.fixture
def new_table(conn: Connection) -> Callable[..., Table]:
    def create(schema: Any, **options: Any) -> Table:
        name = f"fluss.client_{next(NUMBERS)}"
        conn.admin.create_table(name, schema, **options)
        return conn.table(name)

    return create


def append(table: Table, *inputs: Any) -> None:
    with table.append() as writer:
        for data in inputs:
            writer.write(data)


def test_databases_are_created_listed_and_dropped(conn: Connection) -> None:
    admin = conn.admin
    admin.create_database("shop", comment="orders", custom_properties={"team": "retail"})
    admin.create_database("shop", ignore_if_exists=True)
    assert "shop" in admin.list_databases()
    assert admin.database_exists("shop")
    info = admin.database_info("shop")
    assert (info.descriptor.comment, info.descriptor.custom_properties["team"]) == (
        "orders",
        "retail",
    )
    admin.alter_database("shop", set={"owner": "ann"}, reset=["team"], comment="new")
    changed = admin.database_info("shop").descriptor
    assert (changed.comment, dict(changed.custom_properties)) == ("new", {"owner": "ann"})
    admin.create_table("shop.orders", "id INT")
    with pytest.raises(DatabaseNotEmptyError):
        admin.drop_database("shop")
    admin.drop_database("shop", cascade=True)
    assert not admin.database_exists("shop")


def test_tables_are_described_altered_and_dropped(conn: Connection) -> None:
    admin = conn.admin
    schema = pa.schema([pa.field("id", pa.int64(), nullable=False), ("name", pa.string())])
    admin.create_table(
        "fluss.described", schema, bucket_count=3, comment="c", custom_properties={"a": "b"}
    )
    info = admin.table_info("described")
    assert (info.bucket_count, info.descriptor.comment) == (3, "c")
    assert info.schema.arrow.equals(schema)
    assert "described" in admin.list_tables("fluss")
    admin.alter_table("described", set={"table.log.ttl": "1d"})
    assert admin.table_info("described").descriptor.properties["table.log.ttl"] == "1d"
    admin.alter_table("described", add_columns=[Column("extra", parse_type("INT"))])
    assert admin.table_schema("described").names == ("id", "name", "extra")
    assert admin.table_schema("described", 1).names == ("id", "name")
    admin.drop_table("described")
    admin.drop_table("described", ignore_if_not_exists=True)
    assert not admin.table_exists("described")
    with pytest.raises(TableNotExistError, match=r"fluss\.described"):
        conn.table("described")


def test_the_servers_of_the_cluster_are_listed(conn: Connection) -> None:
    assert {node.role for node in conn.admin.server_nodes()} == {"coordinator", "tablet"}


@pytest.mark.parametrize("compression", ["ZSTD", "LZ4_FRAME", "NONE"])
def test_every_type_survives_the_journey(new_table: Callable[..., Table], compression: str) -> None:
    properties = {"table.log.arrow.compression.type": compression}
    table = new_table(EVERY_TYPE, properties=properties)
    batch = pa.RecordBatch.from_pylist([ROW, {}, ROW], schema=table.schema.arrow)
    append(table, batch, ROW, {})
    found = table.scan().to_arrow()
    assert found.schema == table.schema.arrow
    expected = pa.Table.from_batches(
        [batch, pa.RecordBatch.from_pylist([ROW, {}], schema=table.schema.arrow)]
    )
    assert found.combine_chunks().equals(expected.combine_chunks())


@pytest.mark.parametrize("log_format", ["INDEXED", "COMPACTED"])
def test_row_formats_survive_too(new_table: Callable[..., Table], log_format: str) -> None:
    table = new_table("i INT, s STRING, d DOUBLE", properties={"table.log.format": log_format})
    append(table, {"i": [1, None], "s": ["a", None], "d": [1.5, None]})
    assert table.scan(["d", "i"]).to_arrow().to_pydict() == {"d": [1.5, None], "i": [1, None]}


def test_pandas_and_polars_frames_are_written_and_read(new_table: Callable[..., Table]) -> None:
    table = new_table("id BIGINT, name STRING", bucket_count=3)
    append(
        table,
        pd.DataFrame({"id": [1, 2], "name": ["a", None]}),
        pl.DataFrame({"id": [3], "name": ["c"]}),
        duckdb.connect().sql("select 4::bigint as id, 'd' as name"),
        [{"id": 5}, {"id": 6, "name": "f"}],
        {"id": 7},
    )
    scan = table.scan()
    assert sorted(scan.to_pandas()["id"]) == [1, 2, 3, 4, 5, 6, 7]
    assert scan.to_polars().filter(pl.col("name") == "f")["id"].to_list() == [6]
    assert scan.to_duckdb().aggregate("sum(id)").fetchall() == [(28,)]
    assert pa.table(scan).num_rows == 7
    assert sum(batch.num_rows for batch in scan) == 7
    other = new_table("name STRING, id BIGINT")
    append(other, scan)
    assert other.scan().to_arrow().num_rows == 7


def test_a_wrong_column_is_refused_before_anything_is_sent(
    new_table: Callable[..., Table],
) -> None:
    table = new_table("id BIGINT")
    with table.append() as writer, pytest.raises(ColumnMismatchError, match="'nmae'"):
        writer.write({"id": [1], "nmae": ["x"]})
    assert table.scan().to_arrow().num_rows == 0


def test_a_million_rows_by_key_come_back_once_each(new_table: Callable[..., Table]) -> None:
    table = new_table("id BIGINT, a DOUBLE", bucket_count=4, bucket_keys=["id"])
    rows = pa.table({"id": np.arange(1_000_000), "a": np.random.default_rng(1).random(1_000_000)})
    append(table, rows)
    found = table.scan(["id"], with_offsets=True).to_arrow()
    assert np.array_equal(np.sort(found["id"].to_numpy()), np.arange(1_000_000))
    per_bucket = found.group_by("__bucket").aggregate([("__offset", "max"), ("id", "count")])
    assert per_bucket.num_rows == 4
    assert all(row["__offset_max"] == row["id_count"] - 1 for row in per_bucket.to_pylist())
    for bucket in range(4):
        ids = table.scan(["id"], buckets=[bucket]).to_arrow()["id"].to_numpy()
        assert (np.diff(ids) > 0).all()


def test_filters_are_exact_with_and_without_statistics(new_table: Callable[..., Table]) -> None:
    for properties in ({}, {"table.statistics.columns": "*"}):
        table = new_table("id BIGINT, s STRING, x DOUBLE", properties=properties)
        with table.append() as writer:
            for start in range(0, 5000, 500):
                ids = list(range(start, start + 500))
                writer.write({"id": ids, "s": [f"k{i:05}" for i in ids], "x": [i / 2 for i in ids]})
                writer.flush()
        assert table.scan(["x"], col("id") == 1234).to_arrow().to_pydict() == {"x": [617.0]}
        assert len(table.scan(filter=col("s").starts_with("k012")).to_arrow()) == 100
        assert len(table.scan(filter=(col("id") < 10) | (col("x") > 2490)).to_arrow()) == 29
        assert len(table.scan(filter=col("id").isin([5, 4999, 7000])).to_arrow()) == 2
        assert len(table.scan(filter=col("s").is_null()).to_arrow()) == 0


def test_scans_start_and_stop_where_told(conn: Connection, new_table: Callable[..., Table]) -> None:
    table = new_table("id BIGINT")
    append(table, {"id": [1, 2, 3]})
    committed = table.scan(with_offsets=True).to_arrow()["__timestamp"][-1].cast(pa.int64()).as_py()
    between = committed + 1
    while time.time() * 1000 <= between:
        pass  # the next batch gets a later commit time
    append(table, {"id": [4, 5]})

    def ids(**options: Any) -> list[int]:
        return table.scan(**options).to_arrow()["id"].to_pylist()

    assert ids(start=between) == [4, 5]
    assert ids(start=dt.datetime.fromtimestamp(between / 1000, dt.UTC)) == [4, 5]
    assert ids(stop=between) == [1, 2, 3]
    assert ids(start={0: 2}, stop={0: 4}) == [3, 4]
    assert ids(start="latest") == []
    assert ids(limit=2) == [1, 2]
    path = str(table.path)
    assert conn.admin.list_offsets(path, "earliest") == {0: 0}
    assert conn.admin.list_offsets(path) == {0: 5}
    assert conn.admin.list_offsets(path, between, buckets=[0]) == {0: 3}
    with pytest.raises(InvalidTimestampError):
        ids(start=between + 10**9)
    with pytest.raises(OffsetOutOfRangeError, match="offset 99"):
        ids(start={0: 99}, stop=None, limit=1)


def test_a_following_scan_sees_what_is_written_meanwhile(new_table: Callable[..., Table]) -> None:
    table = new_table("id BIGINT", bucket_count=2)
    seen: list[int] = []

    def follow() -> None:
        for batch in table.scan(start="earliest", stop=None, limit=100):
            seen.extend(batch["id"].to_pylist())

    thread = threading.Thread(target=follow)
    thread.start()
    with table.append() as writer:
        for i in range(100):
            writer.write({"id": i})
            if i % 10 == 0:
                writer.flush()
    thread.join(WAIT_SECONDS)
    assert not thread.is_alive()
    assert sorted(seen) == list(range(100))


def test_positions_resume_a_scan(new_table: Callable[..., Table]) -> None:
    table = new_table("id BIGINT", bucket_count=3)
    append(table, *({"id": list(range(i, i + 10))} for i in range(0, 100, 10)))
    with table.scan(limit=37).open() as scanner:
        first = [i for batch in scanner for i in batch["id"].to_pylist()]
        positions = scanner.positions()
    rest = table.scan(start=positions).to_arrow()["id"].to_pylist()
    assert sorted(first + rest) == list(range(100))
    assert len(first) == 37


def test_old_batches_are_read_with_the_new_schema(
    conn: Connection, new_table: Callable[..., Table]
) -> None:
    table = new_table("id BIGINT, name STRING")
    append(table, {"id": [1], "name": ["old"]})
    path = str(table.path)
    conn.admin.alter_table(path, add_columns=[Column("n", parse_type("INT"))])
    append(table, {"id": [2], "name": ["by the old writer"]})
    newer = conn.table(path)
    append(newer, {"id": [3], "name": ["new"], "n": [7]})
    assert newer.scan().to_arrow()["n"].to_pylist() == [None, None, 7]
    assert newer.scan(["n"]).to_arrow()["n"].to_pylist() == [None, None, 7]
    assert newer.scan(["id"], col("n") == 7).to_arrow()["id"].to_pylist() == [3]
    assert table.scan().to_arrow()["id"].to_pylist() == [1, 2, 3]
    assert table.scan(["name"]).to_arrow()["name"][2].as_py() == "new"


def test_partitions_are_created_written_listed_and_dropped(
    conn: Connection, new_table: Callable[..., Table]
) -> None:
    table = new_table(
        "id BIGINT, day DATE, region STRING", partition_keys=["day", "region"], bucket_count=2
    )
    path = str(table.path)
    conn.admin.create_partition(path, {"day": "2024-01-01", "region": "EMEA"})
    conn.admin.create_partition(path, "2024-01-01$EMEA", ignore_if_exists=True)
    days = [dt.date(2024, 1, 1), dt.date(2024, 1, 2)]
    append(
        table,
        {
            "id": list(range(100)),
            "day": [days[i % 2] for i in range(100)],
            "region": ["EMEA" if i % 4 < 2 else "APAC" for i in range(100)],
        },
    )
    names = {found.name for found in conn.admin.list_partitions(path)}
    assert names == {f"2024-01-0{d}${r}" for d in (1, 2) for r in ("EMEA", "APAC")}
    partial = conn.admin.list_partitions(path, {"region": "APAC"})
    assert {found.spec["day"] for found in partial} == {"2024-01-01", "2024-01-02"}
    assert sorted(table.scan(["id"]).to_arrow()["id"].to_pylist()) == list(range(100))
    one = table.scan(["id"], partitions=["2024-01-01$EMEA"]).to_arrow()["id"].to_pylist()
    assert sorted(one) == [i for i in range(100) if i % 4 == 0]
    assert sum(conn.admin.list_offsets(path, partition="2024-01-01$EMEA").values()) == 25
    conn.admin.drop_partition(path, {"day": "2024-01-01", "region": "EMEA"})
    assert table.scan().to_arrow().num_rows == 75
    append(table, {"id": 0, "day": days[0], "region": "EMEA"})
    assert table.scan().to_arrow().num_rows == 76
    with pytest.raises(TableNotPartitionedError):
        conn.admin.list_partitions(str(new_table("id INT").path))


def test_the_facade_works_inside_a_running_event_loop(
    dev_server: DevServer, new_table: Callable[..., Table]
) -> None:
    table = new_table("id BIGINT")

    async def notebook_cell() -> int:
        with zufluss.connect(dev_server.bootstrap) as connection:
            mine = connection.table(str(table.path))
            append(mine, {"id": [1, 2]})
            return int(mine.scan().to_arrow().num_rows)

    assert asyncio.run(notebook_cell()) == 2


async def test_the_async_client_does_the_same(dev_server: DevServer) -> None:
    async with await zufluss.connect_async(dev_server.bootstrap) as connection:
        name = f"fluss.async_{next(NUMBERS)}"
        await connection.admin.create_table(name, "id BIGINT", bucket_count=2)
        table = await connection.table(name)
        async with table.append() as writer:
            await asyncio.gather(*(writer.write({"id": [i]}) for i in range(50)))
        found = [i async for batch in table.scan() for i in batch["id"].to_pylist()]
        assert sorted(found) == list(range(50))
        assert len(await table.scan().to_pandas()) == 50
        assert len(await table.scan().to_polars()) == 50
        assert (await table.scan().to_duckdb()).count("id").fetchall() == [(50,)]


def test_many_threads_may_write_through_one_writer(new_table: Callable[..., Table]) -> None:
    table = new_table("id BIGINT", bucket_count=3)
    with table.append() as writer:
        threads = [
            threading.Thread(
                target=lambda k=k: [writer.write({"id": k * 100 + i}) for i in range(100)]
            )  # type: ignore[misc]
            for k in range(4)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert sorted(table.scan().to_arrow()["id"].to_pylist()) == list(range(400))


def test_a_closed_connection_says_so(dev_server: DevServer) -> None:
    connection = zufluss.connect(dev_server.bootstrap)
    connection.close()
    connection.close()
    with pytest.raises(NetworkError):
        connection.admin.list_databases()


JAAS = (
    "org.apache.fluss.security.auth.sasl.plain.PlainLoginModule required "
    'user_admin="admin-secret" user_alice="alice-secret";'
)


def test_sasl_accepts_only_the_right_password(new_server: Callable[..., DevServer]) -> None:
    server = new_server(
        {
            "security.protocol.map": "FLUSS:sasl",
            "security.sasl.plain.jaas.config": JAAS,
        }
    )
    login = {"client.security.protocol": "sasl", "client.security.sasl.username": "alice"}
    right = login | {"client.security.sasl.password": "alice-secret"}
    with zufluss.connect(server.bootstrap, **right) as connection:
        connection.admin.create_table("fluss.t", "id BIGINT")
        table = connection.table("t")
        append(table, {"id": [1]})
        assert table.scan().to_arrow().num_rows == 1
    with pytest.raises(AuthenticationError):
        zufluss.connect(server.bootstrap, **login, **{"client.security.sasl.password": "no"})
    with pytest.raises(AuthenticationError):
        zufluss.connect(server.bootstrap)


def test_writers_and_scans_live_through_restarts_of_the_server(
    new_server: Callable[..., DevServer],
) -> None:
    server = new_server()
    written = 0
    with zufluss.connect(server.bootstrap) as connection:
        connection.admin.create_table("fluss.t", "id BIGINT", bucket_count=2)
        table = connection.table("t")
        with table.scan(stop=None).open() as scanner, table.append() as writer:
            for restart in (server.kill, server.stop, server.kill):
                for _ in range(20):
                    writer.write({"id": list(range(written, written + 50))})
                    written += 50
                restart()
                writer.write({"id": list(range(written, written + 50))})
                written += 50
                server.start()
                writer.flush()
            seen: list[int] = []
            while len(seen) < written:
                batch = scanner.poll(30_000)
                assert batch is not None
                seen += batch["id"].to_pylist()
        assert sorted(seen) == list(range(written))
        assert sorted(table.scan().to_arrow()["id"].to_pylist()) == list(range(written))


KEY_TYPES = [
    "BOOLEAN",
    "TINYINT",
    "SMALLINT",
    "INT",
    "BIGINT",
    "FLOAT",
    "DOUBLE",
    "STRING",
    "BYTES",
    "DECIMAL(10, 2)",
    "DECIMAL(30, 2)",
    "DATE",
    "TIME",
    "TIMESTAMP(3)",
    "TIMESTAMP(6)",
    "TIMESTAMP_LTZ(6)",
]


def keys_of(text: str) -> pa.Array:
    kind = Schema.of(f"k {text}").arrow.field("k").type
    numbers = pa.array([0, 1, -1, 42, 127, -128, 100, 5], pa.int64())
    if pa.types.is_boolean(kind):
        return pa.array([i % 2 == 0 for i in range(8)])
    if pa.types.is_string(kind):
        return pa.array(["", "a", "grüße", "x" * 40, "abcd", "€", "z", "0"])
    if pa.types.is_binary(kind):
        return pa.array([bytes([200 + i]) * i for i in range(8)], pa.binary())
    if pa.types.is_decimal(kind):
        return pa.array([Decimal(i.as_py()) / 4 for i in numbers]).cast(kind)
    if pa.types.is_time(kind):
        return pa.array([abs(i.as_py()) * 300 for i in numbers], pa.int32()).cast(kind)
    if pa.types.is_timestamp(kind) and kind.unit == "us":
        numbers = pa.array([abs(i.as_py()) for i in numbers])  # pyfluss refuses those before 1970
    if pa.types.is_date(kind):
        return numbers.cast(pa.int32()).cast(kind)
    return numbers.cast(kind)


@pytest.mark.parametrize("key_type", KEY_TYPES)
def test_pyfluss_puts_every_key_into_the_same_bucket(
    dev_server: DevServer, new_table: Callable[..., Table], key_type: str
) -> None:
    columns = f"k {key_type}, who STRING"
    keys = keys_of(key_type)
    ours = new_table(columns, bucket_keys=["k"], bucket_count=16)
    theirs = new_table(columns, bucket_keys=["k"], bucket_count=16)
    rows = pa.RecordBatch.from_arrays(
        [keys, pa.array([str(i) for i in range(8)])], schema=ours.schema.arrow
    )
    append(ours, rows)

    async def append_with_pyfluss() -> None:
        config = fluss.Config({"bootstrap.servers": dev_server.bootstrap})
        connection = await fluss.FlussConnection.create(config)
        table = await connection.get_table(fluss.TablePath(*theirs.path))
        writer = table.new_append().create_writer()
        for row in rows.to_pylist():
            writer.append(row)
        await writer.flush()
        connection.close()

    asyncio.run(append_with_pyfluss())

    def buckets(table: Table) -> list[tuple[str, int]]:
        found = table.scan(["who"], with_offsets=True).to_arrow().to_pylist()
        return sorted((row["who"], row["__bucket"]) for row in found)

    assert buckets(ours) == buckets(theirs)


async def test_pyfluss_reads_what_we_write(dev_server: DevServer) -> None:
    async with await zufluss.connect_async(dev_server.bootstrap) as connection:
        name = f"pyreads_{next(NUMBERS)}"
        await connection.admin.create_table(name, EVERY_TYPE, bucket_count=2)
        table = await connection.table(name)
        batch = pa.RecordBatch.from_pylist([ROW, {}] * 50, schema=table.schema.arrow)
        async with table.append() as writer:
            await writer.write(batch)
    config = fluss.Config({"bootstrap.servers": dev_server.bootstrap})
    theirs = await fluss.FlussConnection.create(config)
    opened = await theirs.get_table(fluss.TablePath("fluss", name))
    scanner = await opened.new_scan().create_record_batch_log_scanner()
    scanner.subscribe_buckets({0: 0, 1: 0})
    found = await scanner.to_arrow()
    assert found.cast(batch.schema).combine_chunks().to_batches()[0].equals(batch)
    theirs.close()
