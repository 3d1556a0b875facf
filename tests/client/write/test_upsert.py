"""Upserts, deletes and partial updates: against a real server, and one that fails on demand."""

from __future__ import annotations

import asyncio
import random
import struct
from typing import Any

import fluss
import pandas as pd
import polars as pl
import pyarrow as pa
import pytest

from tests.client.conftest import FAST
from tests.client.fake import KV_HEADER, FakeCluster
from tests.client.pk import create_table, delete, upsert
from tests.client.test_server import EVERY_TYPE, ROW
from zufluss.client import ColumnMismatchError
from zufluss.client.connection import AsyncConnection, connect_async
from zufluss.client.sync.connection import Connection
from zufluss.client.write.upsert import target_columns
from zufluss.errors import ErrorCode, InvalidTableError, InvalidTargetColumnError, ZuflussError
from zufluss.model.schema import Schema
from zufluss.model.table import TableDescriptor, TableInfo, TablePath
from zufluss.record.keys.encoding import KeyEncoder, bucket_assign
from zufluss.testing.server import DevServer
from zufluss.wire import messages as m
from zufluss.wire.api import ApiKey

PEOPLE = "id BIGINT, name STRING, age INT, PRIMARY KEY (id)"


# -- a real server -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "data",
    [
        pa.table({"id": [1, 2], "name": ["a", None], "age": pa.array([1, 2], pa.int32())}),
        pa.record_batch({"id": [1, 2], "name": ["a", None], "age": [1, 2]}),
        pd.DataFrame({"id": [1, 2], "name": ["a", None], "age": [1, 2]}),
        pl.DataFrame({"id": [1, 2], "name": ["a", None], "age": [1, 2]}),
        {"id": [1, 2], "name": ["a", None], "age": [1, 2]},
        [{"id": 1, "name": "a", "age": 1}, {"id": 2, "age": 2}],
    ],
    ids=lambda data: f"{type(data).__module__.split('.')[0]}.{type(data).__name__}",
)
def test_rows_are_upserted_and_deleted_in_every_form(conn: Connection, data: Any) -> None:
    table = create_table(conn, PEOPLE, bucket_count=3)
    upsert(table, data)
    expected = [{"id": 1, "name": "a", "age": 1}, {"id": 2, "name": None, "age": 2}]
    assert table.lookup([1, 2]).to_pylist() == expected
    delete(table, data)
    assert table.lookup([1, 2], missing="drop").num_rows == 0


@pytest.mark.parametrize(
    "properties",
    [
        {},
        {"table.changelog.image": "wal"},
        {
            "table.merge-engine": "aggregation",
            "table.merge-engine.aggregation.default-function": "last_value",
        },
        {"table.merge-engine": "versioned", "table.merge-engine.versioned.ver-column": "age"},
    ],
    ids=lambda properties: ",".join(properties.values()) or "plain",
)
def test_a_writer_counts_the_rows_that_its_deletes_removed(
    conn: Connection, properties: dict[str, str]
) -> None:
    ignored = properties.get("table.merge-engine") == "versioned"
    table = create_table(
        conn,
        PEOPLE,
        bucket_count=3,
        properties=properties | {"table.delete.behavior": "ignore" if ignored else "allow"},
    )
    with table.upsert() as writer:
        writer.write({"id": [*range(10)], "name": ["a"] * 10, "age": [*range(10)]})
        assert writer.deleted_rows == 0
        writer.delete({"id": [1, 2, 2, 77]})
        writer.delete({"id": 3})
        writer.write({"id": 3, "name": "again", "age": 99})
        writer.flush()
        assert writer.deleted_rows == (0 if ignored else 3)
        writer.delete({"id": [3, 1]})
    assert writer.deleted_rows == (0 if ignored else 4)


def test_a_stream_and_single_rows_are_upserted(conn: Connection) -> None:
    table = create_table(conn, PEOPLE, bucket_count=2)
    batches = [pa.record_batch({"id": [i], "age": [i]}) for i in range(3)]
    upsert(table, pa.RecordBatchReader.from_batches(batches[0].schema, batches), {"id": 7})
    assert sorted(row["id"] for row in table.head(10).to_pylist()) == [0, 1, 2, 7]


def test_nothing_is_written_for_empty_input(conn: Connection) -> None:
    table = create_table(conn, PEOPLE, bucket_count=1)
    upsert(table, [], {"id": []}, pa.table({"id": pa.array([], pa.int64())}))
    delete(table, [])
    assert table.head(10).num_rows == 0
    assert table.changelog().to_arrow().num_rows == 0


def test_the_last_write_of_a_key_wins_whatever_came_before(conn: Connection) -> None:
    table = create_table(conn, PEOPLE, bucket_count=3)
    choose = random.Random(7)
    model: dict[int, int] = {}
    with table.upsert() as writer:
        for step in range(400):
            key = choose.randrange(12)
            if choose.random() < 0.4:
                writer.delete({"id": key} if step % 2 else {"id": [key]})
                model.pop(key, None)
            else:
                writer.write({"id": key, "age": step} if step % 3 else {"id": [key], "age": [step]})
                model[key] = step
    found = table.lookup(list(range(12)), missing="drop").to_pylist()
    assert {row["id"]: row["age"] for row in found} == model


def test_every_type_survives(conn: Connection) -> None:
    table = create_table(conn, f"id INT, {EVERY_TYPE}, PRIMARY KEY (id)", bucket_count=1)
    nothing = {"id": 2, **dict.fromkeys(ROW)}
    upsert(table, {"id": 1, **ROW}, nothing)
    row = table.lookup(1)
    assert row is not None
    assert row == {"id": 1, **ROW}
    assert table.lookup(2) == nothing


def test_keys_of_several_columns_and_types(conn: Connection) -> None:
    schema = "a STRING, v INT, b INT, c DATE, PRIMARY KEY (b, a, c)"
    table = create_table(conn, schema, bucket_count=4)
    days = pd.date_range("2024-01-01", periods=50).date
    rows = [{"a": f"ä{i % 7}", "b": -i, "c": day, "v": i} for i, day in enumerate(days)]
    upsert(table, rows)
    keys = [(row["b"], row["a"], row["c"]) for row in rows]
    assert table.lookup(keys).select(["a", "b", "c", "v"]).to_pylist() == rows
    delete(table, {"b": -3, "a": "ä3", "c": days[3]})
    assert table.lookup(keys[3]) is None


def test_a_partial_update_leaves_the_other_columns_alone(conn: Connection) -> None:
    table = create_table(conn, PEOPLE, bucket_count=1)
    upsert(table, {"id": [1, 2], "name": ["a", "b"], "age": [10, 20]})
    upsert(table, {"id": [1, 3], "age": [11, 33], "name": ["not", "read"]}, columns=["age", "id"])
    assert table.lookup([1, 2, 3]).to_pylist() == [
        {"id": 1, "name": "a", "age": 11},
        {"id": 2, "name": "b", "age": 20},
        {"id": 3, "name": None, "age": 33},
    ]


def test_a_partial_writer_deletes_its_columns_only(conn: Connection) -> None:
    table = create_table(conn, PEOPLE, bucket_count=1)
    upsert(table, {"id": 1, "name": "a", "age": 10}, {"id": 2, "age": 20})
    with table.upsert(["id", "age"]) as writer:
        writer.delete({"id": [1, 2]})
    assert table.lookup(1) == {"id": 1, "name": "a", "age": None}
    assert table.lookup(2) is None


def test_partitions_are_created_for_upserts_and_not_for_deletes(conn: Connection) -> None:
    schema = "day STRING, id INT, v INT, PRIMARY KEY (day, id)"
    table = create_table(conn, schema, partition_keys=["day"], bucket_count=2)
    upsert(table, {"day": ["mon", "tue", "mon"], "id": [1, 1, 2], "v": [1, 2, 3]})
    delete(table, {"day": ["mon", "never"], "id": [2, 2]})
    names = {found.name for found in conn.admin.list_partitions(table.path)}
    assert names == {"mon", "tue"}
    keys = [("mon", 1), ("tue", 1), ("mon", 2), ("never", 2)]
    assert [row["v"] for row in table.lookup(keys).to_pylist()] == [1, 2, None, None]


def test_a_column_the_server_counts_up_is_filled_on_insert(conn: Connection) -> None:
    schema = Schema.of("id INT, n BIGINT, v INT, PRIMARY KEY (id)", auto_increment_column=["n"])
    table = create_table(conn, schema, bucket_count=1)
    upsert(table, {"id": [1, 2], "v": [5, 6]})
    first = table.lookup([1, 2])["n"].to_pylist()
    assert None not in first
    assert len(set(first)) == 2
    upsert(table, {"id": 1, "v": 7, "n": 99})
    assert table.lookup(1) == {"id": 1, "n": first[0], "v": 7}


def test_rows_may_be_indexed(conn: Connection) -> None:
    properties = {"table.kv.format": "INDEXED"}
    table = create_table(conn, PEOPLE, bucket_count=1, properties=properties)
    rows = [{"id": 1, "name": "a", "age": 1}, {"id": 2, "name": None, "age": None}]
    upsert(table, rows)
    assert table.lookup([1, 2]).to_pylist() == rows
    assert sorted(table.head().to_pylist(), key=lambda row: row["id"]) == rows


def test_a_large_input_arrives_whole(conn: Connection) -> None:
    table = create_table(conn, PEOPLE, bucket_count=4)
    ids = list(range(20_000))
    upsert(table, {"id": ids, "name": [f"n{i}" for i in ids], "age": ids})
    found = table.lookup({"id": ids})
    assert found["age"].to_pylist() == ids
    assert found["name"].to_pylist() == [f"n{i}" for i in ids]


def test_wrong_rows_are_refused_and_the_others_written(conn: Connection) -> None:
    table = create_table(conn, PEOPLE, bucket_count=1)
    with table.upsert() as writer:
        for row in ({"id": 1}, {"id": "no"}, {"id": None}, {"id": 2}):
            writer.write(row)
        with pytest.raises(ColumnMismatchError, match="column 'id'"):
            writer.flush()
        with pytest.raises(ColumnMismatchError, match="1 nulls"):
            writer.delete({"id": [1, None]})
        with pytest.raises(ColumnMismatchError, match="has no column 'nme'"):
            writer.write({"id": [1], "nme": ["x"]})
    assert table.lookup([1, 2])["id"].to_pylist() == [1, 2]


async def test_pyfluss_reads_what_we_write_and_we_what_it_writes(
    conn: Connection, dev_server: DevServer
) -> None:
    schema = "id INT, region STRING, v BIGINT, PRIMARY KEY (id, region)"
    table = create_table(conn, schema, bucket_count=5)
    ours = [{"id": i * 77, "region": f"r{i % 3}", "v": -i} for i in range(40)]
    await asyncio.to_thread(upsert, table, ours)
    theirs = [{"id": -i - 1, "region": "é", "v": i << 40} for i in range(40)]
    connection = await fluss.FlussConnection.create(
        fluss.Config({"bootstrap.servers": dev_server.bootstrap})
    )
    remote = await connection.get_table(fluss.TablePath(*table.path))
    writer = remote.new_upsert().create_writer()
    for row in theirs:
        writer.upsert(row)
    await writer.flush()
    lookuper = remote.new_lookup().create_lookuper()
    found = await asyncio.gather(
        *(lookuper.lookup({k: r[k] for k in ("id", "region")}) for r in ours)
    )
    assert found == ours
    keys = [(row["id"], row["region"]) for row in theirs]
    assert (await asyncio.to_thread(table.lookup, keys)).to_pylist() == theirs
    await connection.close()


# -- a server that fails on demand ---------------------------------------------------------------


def stored(cluster: FakeCluster) -> dict[bytes, bytes]:
    return {key: row for store in cluster.stores.values() for key, row in store.rows.items()}


async def test_target_columns_travel_as_indexes(
    cluster: FakeCluster, connection: AsyncConnection
) -> None:
    cluster.create("t", PEOPLE)
    table = await connection.table("t")
    for columns in (None, ["age", "id"], ["name", "age", "id"]):
        async with table.upsert(columns) as writer:
            await writer.write({"id": [1], "age": [5]})
    assert [list(put.target_columns) for put in cluster.puts] == [[], [0, 2], []]
    assert stored(cluster) == {b"\x01": b"\x01\x00" + b"\x02\x01\x05"}


@pytest.mark.parametrize(
    "fault",
    [
        ErrorCode.STORAGE_BACKPRESSURE_EXCEPTION,
        ErrorCode.NOT_LEADER_OR_FOLLOWER,
        ErrorCode.KV_STORAGE_EXCEPTION,
        "lost",
    ],
)
async def test_a_put_is_sent_again_and_applied_once(
    cluster: FakeCluster, connection: AsyncConnection, fault: ErrorCode | str
) -> None:
    cluster.create("t", PEOPLE)
    faults = iter([fault, fault])
    cluster.produce_fault = lambda *_: next(faults, None)
    async with (await connection.table("t")).upsert() as writer:
        await writer.write({"id": [1, 2]})
    [store] = cluster.stores.values()
    assert len(store.batches) == 1
    assert len(cluster.puts) == 3
    assert sorted(store.rows) == [b"\x01", b"\x02"]


async def test_a_forgotten_writer_goes_on_under_a_new_id(
    cluster: FakeCluster, connection: AsyncConnection
) -> None:
    cluster.create("t", PEOPLE)
    faults = iter([None, ErrorCode.UNKNOWN_WRITER_ID_EXCEPTION])
    cluster.produce_fault = lambda *_: next(faults, None)
    async with (await connection.table("t")).upsert() as writer:
        await writer.write({"id": [1]})
        await writer.flush()
        await writer.write({"id": [2]})
    headers = [KV_HEADER.unpack_from(put.buckets_req[0].records)[5:7] for put in cluster.puts]
    assert headers == [(1, 0), (1, 1), (2, 0)]
    assert sorted(stored(cluster)) == [b"\x01", b"\x02"]


async def test_keys_are_stored_and_placed_as_the_lake_wants_them(
    cluster: FakeCluster, connection: AsyncConnection
) -> None:
    info = cluster.create(
        "t",
        PEOPLE,
        bucket_count=16,
        bucket_keys=("id",),
        properties={"table.datalake.format": "paimon", "table.kv.format-version": "2"},
    )
    async with (await connection.table("t")).upsert() as writer:
        await writer.write({"id": [1, -1]})
        await writer.delete({"id": [-1]})
    rows = {b.bucket_id: list(store.rows) for b, store in cluster.stores.items()}
    key = bytes(8) + b"\x01" + bytes(7)
    places = bucket_assign(pa.record_batch({"id": [1, -1]}), info).tolist()
    assert rows == {places[0]: [key], places[1]: []}
    assert places[0] == 14


async def test_a_refused_put_is_reported(cluster: FakeCluster, connection: AsyncConnection) -> None:
    cluster.create("t", PEOPLE)
    cluster.produce_fault = lambda *_: ErrorCode.INVALID_TARGET_COLUMN
    writer = (await connection.table("t")).upsert()
    await writer.write({"id": [1]})
    with pytest.raises(ZuflussError, match="INVALID_TARGET_COLUMN"):
        await writer.close()


async def test_pressure_lowers_the_number_of_batches_under_way(cluster: FakeCluster) -> None:
    cluster.create("t", PEOPLE)
    cluster.pressure = 0.9
    under_way, peaks = 0, []
    handler = cluster.handlers[ApiKey.PUT_KV]
    order = asyncio.Lock()

    async def watched(request: m.PutKvRequest) -> object:
        nonlocal under_way
        under_way += 1
        peaks.append(under_way)
        async with order:
            await asyncio.sleep(0)
            answer = await handler(request)
        under_way -= 1
        return answer

    cluster.handlers[ApiKey.PUT_KV] = watched  # type: ignore[assignment]
    options = FAST | {"client.writer.batch-size": "1kb"}
    async with (
        await connect_async(cluster.bootstrap, **options) as connection,
        (await connection.table("t")).upsert() as writer,
    ):
        await writer.write({"id": list(range(100))})
        await writer.flush()
        del peaks[:]
        await writer.write({"id": list(range(2_000))})
    assert max(peaks) == 1
    assert len(peaks) > 5
    assert len(stored(cluster)) == 2_000


async def test_upserts_and_deletes_share_a_batch_in_their_order(
    cluster: FakeCluster, connection: AsyncConnection
) -> None:
    cluster.create("t", PEOPLE)
    async with (await connection.table("t")).upsert() as writer:
        await writer.write({"id": [1, 2]})
        await writer.delete({"id": [2, 1]})
        await writer.write({"id": [1], "age": [7]})
    [put] = cluster.puts
    records = put.buckets_req[0].records
    (count,) = struct.unpack_from("<i", records, 24)
    keys, position = [], 28
    for _ in range(count):
        (size,) = struct.unpack_from("<i", records, position)
        keys.append((records[position + 5], size > 2))
        position += 4 + size
    assert keys == [(1, True), (2, True), (2, False), (1, False), (1, True)]
    assert stored(cluster) == {b"\x01": b"\x01\x00" + b"\x02\x01\x07"}


# -- what is refused before anything is sent -----------------------------------------------------


def info_of(columns: str, **changes: Any) -> TableInfo:
    schema = Schema.of(columns, auto_increment_column=changes.pop("auto_increment_column", ()))
    keys = tuple(k for k in schema.primary_key if k not in changes.get("partition_keys", ()))
    descriptor = TableDescriptor(schema, **{"bucket_count": 1, "bucket_keys": keys, **changes})
    return TableInfo(TablePath("fluss", "t"), 1, 1, descriptor, 0, 0)


@pytest.mark.parametrize(
    ("columns", "message"),
    [
        (["id", "nme"], "'nme' must be different columns of table fluss.t; it has id, name, age"),
        (["id", "id"], "must be different columns"),
        (["name"], "lack id of the primary key"),
        ([], "lack id of the primary key"),
    ],
)
def test_wrong_target_columns_are_named(columns: list[str], message: str) -> None:
    with pytest.raises(InvalidTargetColumnError, match=message):
        target_columns(info_of(PEOPLE), columns)


def test_partial_updates_need_columns_that_may_be_null() -> None:
    info = info_of("id INT, a STRING NOT NULL, b INT, PRIMARY KEY (id)")
    with pytest.raises(InvalidTargetColumnError, match="column 'a' is NOT NULL"):
        target_columns(info, ["id", "b"])
    assert target_columns(info, ["b", "a", "id"]) == ("id", "a", "b")


def test_a_column_the_server_counts_up_is_never_written() -> None:
    info = info_of("id INT, n BIGINT, v INT, PRIMARY KEY (id)", auto_increment_column=["n"])
    assert target_columns(info, None) == ("id", "v")
    with pytest.raises(InvalidTargetColumnError, match=r"'n' of table .* is counted up"):
        target_columns(info, ["id", "n"])


async def test_a_log_table_has_no_upsert(cluster: FakeCluster, connection: AsyncConnection) -> None:
    cluster.create("t", "id BIGINT")
    table = await connection.table("t")
    with pytest.raises(InvalidTableError, match=r"no primary key.*use table.append\(\)"):
        table.upsert()


@pytest.mark.parametrize(
    ("properties", "bucket_keys", "encoding"),
    [
        ({}, ("a", "b"), "compacted"),
        ({"table.datalake.format": "lance"}, ("a", "b"), "compacted"),
        ({"table.datalake.format": "hudi"}, ("a", "b"), "compacted"),
        ({"table.datalake.format": "paimon"}, ("a",), "paimon"),
        ({"table.datalake.format": "PAIMON"}, ("a", "b"), "paimon"),
        ({"table.datalake.format": "paimon", "table.kv.format-version": "1"}, ("a",), "paimon"),
        ({"table.datalake.format": "paimon", "table.kv.format-version": "2"}, ("a",), "compacted"),
        ({"table.datalake.format": "paimon", "table.kv.format-version": "2"}, ("a", "b"), "paimon"),
        ({"table.datalake.format": "iceberg", "table.kv.format-version": "2"}, ("a",), "compacted"),
        ({"table.datalake.format": "iceberg"}, ("a",), "iceberg"),
    ],
)
def test_the_encoding_of_a_key_follows_lake_and_version(
    properties: dict[str, str], bucket_keys: tuple[str, ...], encoding: str
) -> None:
    columns = "p STRING, a INT, b STRING, PRIMARY KEY (a, p, b)"
    info = info_of(columns, partition_keys=("p",), bucket_keys=bucket_keys, properties=properties)
    encoder = KeyEncoder.of_stored_key(info)
    assert (encoder.columns, encoder.encoding) == (("a", "b"), encoding)
