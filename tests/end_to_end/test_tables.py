"""pyfluss's table calls against a real server: create, describe, list, drop, and every refusal."""

from __future__ import annotations

import time
from typing import Any

import fluss
import pyarrow as pa
import pytest

from tests.conftest import BUCKETS_MAX
from tests.end_to_end.helpers import IDS, append, create, descriptor, in_time, read_arrow, refused
from tests.end_to_end.samples import ALL_TYPES
from tests.end_to_end.test_databases import BAD_NAMES

Code = fluss.ErrorCode


async def test_a_table_is_described_as_it_was_created(
    conn: fluss.FlussConnection, admin: fluss.FlussAdmin, path: fluss.TablePath
) -> None:
    before = int(time.time() * 1000)
    await create(
        conn,
        path,
        comment="Ereignisse",
        bucket_count=3,
        bucket_keys=["id"],
        properties={"table.log.ttl": "3 d", "table.log.arrow.compression.type": "LZ4_FRAME"},
        custom_properties={"team": "ops"},
    )
    info = await in_time(admin.get_table_info(path))
    assert info.table_path == path
    assert (info.schema_id, info.num_buckets, info.comment) == (1, 3, "Ereignisse")
    assert info.get_bucket_keys() == ["id"]
    assert info.get_column_names() == ["id", "text"]
    assert info.get_column_count() == 2
    assert info.get_schema().get_columns() == [("id", "bigint"), ("text", "string")]
    assert not info.has_primary_key()
    assert not info.is_partitioned()
    assert info.get_custom_properties() == {"team": "ops"}
    assert info.get_properties() == {
        "table.log.ttl": "3 d",
        "table.log.arrow.compression.type": "LZ4_FRAME",
        "table.replication.factor": "1",
    }
    assert info.created_time >= before
    assert info.modified_time >= info.created_time


async def test_a_table_without_bucket_count_gets_one_bucket(
    conn: fluss.FlussConnection, path: fluss.TablePath
) -> None:
    info = (await create(conn, path)).get_table_info()
    assert info.num_buckets == 1
    assert info.get_bucket_keys() == []


async def test_a_primary_key_table_gets_the_servers_defaults(
    conn: fluss.FlussConnection, path: fluss.TablePath
) -> None:
    table = await create(conn, path, primary_keys=["id"], bucket_count=2)
    info = table.get_table_info()
    assert table.has_primary_key()
    assert info.get_primary_keys() == ["id"]
    assert info.get_bucket_keys() == ["id"]
    assert info.get_properties()["table.kv.format-version"] == "2"
    assert info.get_properties()["table.replication.factor"] == "1"


async def test_every_type_comes_back_in_the_table_schema(
    conn: fluss.FlussConnection, path: fluss.TablePath
) -> None:
    table = await create(conn, path, ALL_TYPES)
    assert table.arrow_schema.names == ALL_TYPES.names
    for field in ALL_TYPES:
        assert table.arrow_schema.field(field.name).type == field.type


async def test_not_null_columns_stay_not_null(
    conn: fluss.FlussConnection, path: fluss.TablePath
) -> None:
    schema = pa.schema([pa.field("a", pa.int32(), nullable=False), pa.field("b", pa.int32())])
    table = await create(conn, path, schema)
    assert [f.nullable for f in table.arrow_schema] == [False, True]
    await append(table, pa.record_batch([pa.array([1]), pa.array([None])], schema=schema))
    assert (await read_arrow(table)).to_pylist() == [{"a": 1, "b": None}]


async def test_tables_are_listed_by_database(
    conn: fluss.FlussConnection, admin: fluss.FlussAdmin, database: str
) -> None:
    await in_time(admin.create_database(database))
    for name in ("b", "a", "c"):
        await create(conn, fluss.TablePath(database, name))
    await in_time(admin.drop_table(fluss.TablePath(database, "c")))
    assert sorted(await admin.list_tables(database)) == ["a", "b"]


async def test_creating_a_table_twice_is_refused_unless_ignored(
    conn: fluss.FlussConnection, admin: fluss.FlussAdmin, path: fluss.TablePath
) -> None:
    first = (await create(conn, path)).get_table_info()
    with refused(Code.TABLE_ALREADY_EXIST):
        await in_time(admin.create_table(path, descriptor(IDS)))
    other = descriptor(pa.schema([("z", pa.int8())]))
    await in_time(admin.create_table(path, other, ignore_if_exists=True))
    second = await in_time(admin.get_table_info(path))
    assert second.table_id == first.table_id
    assert second.get_column_names() == ["id", "text"]


async def test_a_missing_table_is_refused_unless_ignored(
    conn: fluss.FlussConnection, admin: fluss.FlussAdmin, path: fluss.TablePath
) -> None:
    assert not await admin.table_exists(path)
    with refused(Code.TABLE_NOT_EXIST):
        await in_time(admin.get_table_info(path))
    with refused(Code.TABLE_NOT_EXIST):
        await in_time(conn.get_table(path))
    with refused(Code.TABLE_NOT_EXIST):
        await in_time(admin.drop_table(path))
    await in_time(admin.drop_table(path, ignore_if_not_exists=True))


async def test_a_table_in_a_missing_database_is_refused(
    admin: fluss.FlussAdmin, database: str
) -> None:
    path = fluss.TablePath(database, "t")
    assert not await admin.table_exists(path)
    with refused(Code.DATABASE_NOT_EXIST):
        await in_time(admin.create_table(path, descriptor(IDS)))


async def test_a_dropped_table_is_gone_and_its_name_free_for_an_empty_one(
    conn: fluss.FlussConnection, admin: fluss.FlussAdmin, path: fluss.TablePath
) -> None:
    table = await create(conn, path)
    await append(table, pa.record_batch([[1], ["x"]], schema=IDS))
    await in_time(admin.drop_table(path))
    assert not await admin.table_exists(path)
    again = await create(conn, path)
    assert again.get_table_info().table_id > table.get_table_info().table_id
    assert (await read_arrow(again)).num_rows == 0


@pytest.mark.parametrize("name", BAD_NAMES)
async def test_a_bad_table_name_is_refused(admin: fluss.FlussAdmin, name: str) -> None:
    with refused(Code.INVALID_TABLE_EXCEPTION):
        await in_time(admin.create_table(fluss.TablePath("wire", name), descriptor(IDS)))


KEYED = pa.schema(
    [
        pa.field("k", pa.int32(), nullable=False),
        pa.field("p", pa.string()),
        pa.field("list", pa.list_(pa.int32())),
        pa.field("amount", pa.decimal128(10, 2)),
        pa.field("raw", pa.binary()),
    ]
)
INVALID: dict[str, tuple[int, pa.Schema, dict[str, Any]]] = {
    "unknown table property": (39, KEYED, {"properties": {"table.nonsense": "1"}}),
    "property without the table prefix": (39, KEYED, {"properties": {"nonsense": "1"}}),
    "bad number": (39, KEYED, {"properties": {"table.replication.factor": "two"}}),
    "bad duration": (39, KEYED, {"properties": {"table.log.ttl": "a while"}}),
    "bad compression": (39, KEYED, {"properties": {"table.log.arrow.compression.type": "GZIP"}}),
    "bad log format": (39, KEYED, {"properties": {"table.log.format": "PARQUET"}}),
    "no replicas": (39, KEYED, {"properties": {"table.replication.factor": "0"}}),
    "more replicas than servers": (17, KEYED, {"properties": {"table.replication.factor": "2"}}),
    "too many buckets": (49, KEYED, {"bucket_count": BUCKETS_MAX + 1}),
    "nested bucket key": (15, KEYED, {"bucket_keys": ["list"], "bucket_count": 1}),
    "reserved column": (15, pa.schema([("__offset", pa.int32())]), {}),
    "another reserved column": (15, pa.schema([("_change_type", pa.int32())]), {}),
    "decimal partition key": (15, KEYED, {"partition_keys": ["amount"]}),
    "merge engine without key": (39, KEYED, {"properties": {"table.merge-engine": "first_row"}}),
    "unknown statistics column": (39, KEYED, {"properties": {"table.statistics.columns": "zz"}}),
    "statistics of bytes": (39, KEYED, {"properties": {"table.statistics.columns": "raw"}}),
    "statistics with a primary key": (
        39,
        KEYED,
        {"primary_keys": ["k"], "properties": {"table.statistics.columns": "k"}},
    ),
    "unknown merge engine": (
        39,
        KEYED,
        {"primary_keys": ["k"], "properties": {"table.merge-engine": "sum"}},
    ),
    "versioned without version column": (
        39,
        KEYED,
        {"primary_keys": ["k"], "properties": {"table.merge-engine": "versioned"}},
    ),
    "auto-partition without partition key": (
        39,
        KEYED,
        {"properties": {"table.auto-partition.enabled": "true"}},
    ),
    "bad auto-partition unit": (
        39,
        KEYED,
        {
            "partition_keys": ["p"],
            "properties": {
                "table.auto-partition.enabled": "true",
                "table.auto-partition.time-unit": "FORTNIGHT",
            },
        },
    ),
    "lake without a lake": (15, KEYED, {"properties": {"table.datalake.enabled": "true"}}),
}


@pytest.mark.parametrize("case", INVALID)
async def test_an_invalid_descriptor_is_refused_and_nothing_is_created(
    admin: fluss.FlussAdmin, path: fluss.TablePath, case: str
) -> None:
    code, schema, options = INVALID[case]
    with refused(code):
        await in_time(admin.create_table(path, descriptor(schema, **options)))
    assert not await admin.table_exists(path)


async def test_a_log_table_has_no_lake_snapshot(
    conn: fluss.FlussConnection, admin: fluss.FlussAdmin, path: fluss.TablePath
) -> None:
    await create(conn, path)
    with pytest.raises(fluss.FlussError):
        await in_time(admin.get_latest_lake_snapshot(path))
