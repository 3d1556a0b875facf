"""Lookups by key and by prefix: against a real server, and one that fails on demand."""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np
import pandas as pd
import polars as pl
import pyarrow as pa
import pytest

import zufluss
from tests.client.conftest import FAST
from tests.client.fake import FakeCluster
from tests.client.pk import create_table, upsert
from zufluss.client import ColumnMismatchError
from zufluss.client.connection import AsyncConnection, connect_async
from zufluss.client.keyed import key_reader
from zufluss.client.sync.connection import Connection
from zufluss.client.sync.table import Table
from zufluss.errors import ErrorCode, InvalidTableError, ZuflussError
from zufluss.model.ddl import parse_type
from zufluss.model.schema import Column
from zufluss.testing.server import DevServer
from zufluss.wire.api import ApiKey

PEOPLE = "id BIGINT, name STRING, PRIMARY KEY (id)"
ORDERS = "customer INT, number INT, total INT, PRIMARY KEY (customer, number)"


@pytest.fixture(scope="module")
def people(conn: Connection) -> Table:
    table = create_table(conn, PEOPLE, bucket_count=3)
    upsert(table, {"id": [1, 2, 3, 300], "name": ["a", "b", None, "d"]})
    return table


@pytest.mark.parametrize("key", [2, (2,), {"id": 2}, np.int64(2), {"id": 2, "name": "not read"}])
def test_one_key_gives_one_row(people: Table, key: Any) -> None:
    assert people.lookup(key) == {"id": 2, "name": "b"}


def test_a_key_that_is_not_there_gives_none(people: Table) -> None:
    assert people.lookup(99) is None


@pytest.mark.parametrize(
    "keys",
    [
        [300, 99, 1, 1],
        [(300,), {"id": 99}, 1, 1],
        {"id": [300, 99, 1, 1]},
        pa.table({"id": [300, 99, 1, 1]}),
        pa.record_batch({"id": pa.array([300, 99, 1, 1], pa.int16())}),
        pa.array([300, 99, 1, 1]),
        np.array([300, 99, 1, 1]),
        pd.DataFrame({"id": [300, 99, 1, 1]}),
        pd.Series([300, 99, 1, 1]),
        pl.DataFrame({"id": [300, 99, 1, 1]}),
        pl.Series([300, 99, 1, 1]),
    ],
    ids=lambda keys: f"{type(keys).__module__.split('.')[0]}.{type(keys).__name__}",
)
def test_many_keys_give_a_table_in_their_order(people: Table, keys: Any) -> None:
    found = people.lookup(keys)
    assert found["name"].to_pylist() == ["d", None, "a", "a"]
    assert found["id"].to_pylist() == [300, None, 1, 1]
    present = people.lookup(keys, missing="drop")
    assert present["id"].to_pylist() == [300, 1, 1]
    assert present.schema == people.schema.arrow


def test_no_keys_give_an_empty_table(people: Table) -> None:
    assert people.lookup([]).num_rows == 0
    assert people.lookup({"id": []}, missing="drop").schema == people.schema.arrow


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ((1, 2), "has 2 values; it must have id"),
        ({"name": "a"}, "lacks 'id'"),
        ([1, (1, 2)], "has 2 values"),
        (None, "column 'id' has 1 nulls"),
        ([1, None], "column 'id' has 1 nulls"),
        ("one", "column 'id'"),
        ({"id": [1], "nme": ["x"]}, "no column 'nme'"),
    ],
)
def test_keys_that_do_not_fit_are_named(people: Table, keys: Any, message: str) -> None:
    with pytest.raises(ColumnMismatchError, match=message):
        people.lookup(keys)
    with pytest.raises(ValueError, match="neither 'null' nor 'drop'"):
        people.lookup([1], missing="keep")  # type: ignore[call-overload]


def test_a_prefix_finds_all_rows_of_a_bucket_key(conn: Connection) -> None:
    table = create_table(conn, ORDERS, bucket_keys=["customer"], bucket_count=3)
    rows = [{"customer": c, "number": n, "total": c * n} for c in (1, 2, 300) for n in range(c % 5)]
    upsert(table, rows)
    for prefix in (300, (300,), {"customer": 300}):
        assert table.prefix_lookup(prefix).to_pylist() == [r for r in rows if r["customer"] == 300]
    assert table.prefix_lookup([2, 7, 1]).to_pylist() == [
        *(r for r in rows if r["customer"] == 2),
        *(r for r in rows if r["customer"] == 1),
    ]
    assert table.prefix_lookup(7).num_rows == 0
    assert table.prefix_lookup([]).schema == table.schema.arrow


def test_a_prefix_on_partitions_begins_with_the_partition(conn: Connection) -> None:
    schema = "day STRING, a INT, b STRING, v INT, PRIMARY KEY (day, a, b)"
    table = create_table(conn, schema, partition_keys=["day"], bucket_keys=["a"], bucket_count=2)
    rows = [{"day": d, "a": 1, "b": b, "v": 0} for d in ("mon", "tue") for b in ("x", "y")]
    upsert(table, rows)
    assert table.prefix_lookup(("mon", 1)).to_pylist() == rows[:2]
    assert table.prefix_lookup({"a": 1, "day": "tue"}).to_pylist() == rows[2:]
    assert table.prefix_lookup(("never", 1)).num_rows == 0


def test_tables_without_prefixes_say_why(conn: Connection, people: Table) -> None:
    with pytest.raises(InvalidTableError, match=r"bucket key \(id\) must be the first part"):
        people.prefix_lookup(1)
    table = create_table(conn, ORDERS, bucket_keys=["number"], bucket_count=1)
    with pytest.raises(InvalidTableError, match=r"bucket key \(number\) must be the first part"):
        table.prefix_lookup(1)
    log = create_table(conn, "id INT", bucket_count=1)
    with pytest.raises(InvalidTableError, match=r"no primary key.*use table.scan\(\)"):
        log.lookup(1)


def test_head_returns_some_rows_of_a_table(conn: Connection, people: Table) -> None:
    assert sorted(people.head()["id"].to_pylist()) == [1, 2, 3, 300]
    assert people.head(2).num_rows == 2
    assert people.head(0).num_rows == 0
    with pytest.raises(ValueError, match="count is -1"):
        people.head(-1)
    log = create_table(conn, "id INT", bucket_count=1)
    with log.append() as writer:
        writer.write({"id": [5, 6, 7]})
    assert log.head(2)["id"].to_pylist() == [5, 6]


def test_rows_of_older_and_newer_schemas_are_read_by_column(conn: Connection) -> None:
    table = create_table(conn, PEOPLE, bucket_count=2)
    upsert(table, {"id": [1], "name": ["old"]})
    conn.admin.alter_table(table.path, add_columns=[Column("age", parse_type("INT"))])
    altered = conn.table(table.path)
    upsert(altered, {"id": [2], "name": ["new"], "age": [7]})
    assert altered.lookup([2, 1]).to_pylist() == [
        {"id": 2, "name": "new", "age": 7},
        {"id": 1, "name": "old", "age": None},
    ]
    assert table.lookup([2, 1]).to_pylist() == [
        {"id": 2, "name": "new"},
        {"id": 1, "name": "old"},
    ]
    assert altered.head(5).num_rows == 2


async def test_single_lookups_of_a_task_group_all_succeed(
    people: Table, dev_server: DevServer
) -> None:
    async with await zufluss.connect_async(dev_server.bootstrap) as connection:
        table = await connection.table(people.path)
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(table.lookup(i % 5)) for i in range(2_000)]
    names = [None if (row := task.result()) is None else row["name"] for task in tasks]
    assert names == [None, "a", "b", None, None] * 400


# -- a server that fails on demand ---------------------------------------------------------------


async def filled(cluster: FakeCluster, connection: AsyncConnection, **changes: Any) -> Any:
    cluster.create("t", PEOPLE, **{"bucket_count": 4, "bucket_keys": ("id",), **changes})
    table = await connection.table("t")
    async with table.upsert() as writer:
        await writer.write({"id": list(range(100)), "name": [f"n{i}" for i in range(100)]})
    return table


async def test_lookups_of_one_turn_travel_together(
    cluster: FakeCluster, connection: AsyncConnection
) -> None:
    table = await filled(cluster, connection)
    rows = await asyncio.gather(*(table.lookup(i) for i in range(150)))
    assert [row and row["name"] for row in rows] == [f"n{i}" for i in range(100)] + [None] * 50
    assert len(cluster.lookups) == 1
    assert await table.lookup(1) == {"id": 1, "name": "n1"}
    assert len(cluster.lookups) == 2


async def test_an_invalid_key_fails_no_other_lookup(
    cluster: FakeCluster, connection: AsyncConnection
) -> None:
    table = await filled(cluster, connection)
    found = await asyncio.gather(*map(table.lookup, [1, "x", 2]), return_exceptions=True)
    assert isinstance(found[1], ColumnMismatchError)
    assert [found[0]["name"], found[2]["name"]] == ["n1", "n2"]


async def test_a_cancelled_lookup_leaves_the_others_alone(
    cluster: FakeCluster, connection: AsyncConnection
) -> None:
    table = await filled(cluster, connection)
    tasks = [asyncio.ensure_future(table.lookup(i)) for i in range(3)]
    await asyncio.sleep(0)
    tasks[1].cancel()
    found = await asyncio.gather(*tasks, return_exceptions=True)
    assert isinstance(found[1], asyncio.CancelledError)
    assert [found[0]["id"], found[2]["id"]] == [0, 2]


@pytest.mark.parametrize(
    "fault", [ErrorCode.NOT_LEADER_OR_FOLLOWER, ErrorCode.STORAGE_BACKPRESSURE_EXCEPTION]
)
async def test_passing_errors_are_retried_and_the_other_rows_delivered(
    cluster: FakeCluster, fault: ErrorCode
) -> None:
    patient = FAST | {"client.request-timeout": "5min"}
    async with await connect_async(cluster.bootstrap, **patient) as connection:
        table = await filled(cluster, connection)
        faults = iter([fault] * 5)
        cluster.lookup_fault = lambda bucket: next(faults, None) if bucket.bucket_id == 1 else None
        found = await table.lookup(list(range(100)))
    assert found["name"].to_pylist() == [f"n{i}" for i in range(100)]
    assert len(cluster.lookups) == 6
    assert [entry.bucket_id for entry in cluster.lookups[-1].buckets_req] == [1]


async def test_a_lost_connection_is_opened_again(
    cluster: FakeCluster, connection: AsyncConnection
) -> None:
    table = await filled(cluster, connection)
    handler, lost = cluster.handlers[ApiKey.LOOKUP], iter([True])

    async def flaky(request: Any) -> Any:
        if next(lost, False):
            cluster.drop_connections()
            return None
        return await handler(request)

    cluster.handlers[ApiKey.LOOKUP] = flaky
    assert (await table.lookup(7))["name"] == "n7"


async def test_errors_that_do_not_pass_are_raised(
    cluster: FakeCluster, connection: AsyncConnection
) -> None:
    table = await filled(cluster, connection)
    cluster.lookup_fault = lambda _: ErrorCode.AUTHORIZATION_EXCEPTION
    for keys in (1, [1, 2]):
        with pytest.raises(ZuflussError, match="AUTHORIZATION"):
            await table.lookup(keys)


async def test_large_inputs_are_cut_into_requests(
    cluster: FakeCluster, connection: AsyncConnection, monkeypatch: pytest.MonkeyPatch
) -> None:
    table = await filled(cluster, connection)
    monkeypatch.setattr(key_reader, "REQUEST_KEYS_MAX", 8)
    found = await table.lookup(list(range(100)))
    assert found["id"].to_pylist() == list(range(100))
    sizes = [sum(len(e.keys) for e in request.buckets_req) for request in cluster.lookups]
    assert sum(sizes) == 100
    assert max(sizes) <= 8


async def test_a_partition_that_does_not_exist_has_no_row(
    cluster: FakeCluster, connection: AsyncConnection
) -> None:
    cluster.create(
        "t",
        "day STRING, id INT, PRIMARY KEY (day, id)",
        partition_keys=("day",),
        bucket_keys=("id",),
        bucket_count=3,
    )
    table = await connection.table("t")
    async with table.upsert() as writer:
        await writer.write({"day": ["mon"], "id": [1]})
    assert await table.lookup(("mon", 1)) == {"day": "mon", "id": 1}
    assert await table.lookup(("tue", 1)) is None
    asked = cluster.received[ApiKey.GET_METADATA]
    found = await table.lookup([("tue", i) for i in range(50)])
    assert found["id"].null_count == 50
    assert cluster.received[ApiKey.GET_METADATA] == asked + 1
    found = await table.lookup([("tue", 1), ("wed", 1), ("mon", 1)], missing="drop")
    assert found.to_pylist() == [{"day": "mon", "id": 1}]


async def test_prefixes_are_asked_for_by_bucket(
    cluster: FakeCluster, connection: AsyncConnection
) -> None:
    cluster.create("t", ORDERS, bucket_keys=("customer",), bucket_count=4)
    table = await connection.table("t")
    async with table.upsert() as writer:
        await writer.write({"customer": [1, 2, 1, 3], "number": [2, 1, 1, 1]})
    found = await table.prefix_lookup([3, 9, 1])
    assert [(row["customer"], row["number"]) for row in found.to_pylist()] == [
        (3, 1),
        (1, 1),
        (1, 2),
    ]


async def test_a_lake_may_rule_prefixes_out(
    cluster: FakeCluster, connection: AsyncConnection
) -> None:
    properties = {"table.datalake.format": "paimon"}
    cluster.create("t", ORDERS, bucket_keys=("customer",), properties=properties)
    with pytest.raises(InvalidTableError, match=r"paimon and table.kv.format-version 1"):
        await (await connection.table("t")).prefix_lookup(1)


def test_rows_larger_than_an_answer_are_asked_for_in_parts(conn: Connection) -> None:
    table = create_table(conn, PEOPLE, bucket_count=2)
    long = "x" * 2_000_000
    with table.upsert() as writer:
        for i in range(40):
            writer.write({"id": i, "name": long})
    rows = table.lookup({"id": list(range(40))})
    assert rows["name"].to_pylist() == [long] * 40
