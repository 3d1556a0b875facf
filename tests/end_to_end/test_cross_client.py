"""Our client and pyfluss on the same tables: what one writes the other reads, every type."""

from __future__ import annotations

from collections.abc import Iterator
from decimal import Decimal

import fluss
import pyarrow as pa
import pytest

import zufluss
from tests.end_to_end.helpers import (
    IDS,
    append,
    arrow_scanner,
    create,
    ids,
    in_time,
    poll_batches,
    read_arrow,
)
from tests.end_to_end.samples import ALL_TYPES, SAMPLES, Sample, all_types_batch
from tests.end_to_end.test_types import COMPRESSIONS
from zufluss.client import Connection
from zufluss.model.ddl import parse_type
from zufluss.model.schema import Column
from zufluss.testing.server import DevServer


@pytest.fixture(scope="module")
def ours(dev_server: DevServer, conn: fluss.FlussConnection) -> Iterator[Connection]:
    """Our own client."""
    with zufluss.connect(dev_server.bootstrap) as connection:
        yield connection


def write(ours: Connection, path: fluss.TablePath, *batches: pa.RecordBatch) -> None:
    with ours.table(str_of(path)).append() as writer:
        for batch in batches:
            writer.write(batch)


def read(ours: Connection, path: fluss.TablePath, **options: object) -> pa.Table:
    return ours.table(str_of(path)).scan(**options).to_arrow()


def str_of(path: fluss.TablePath) -> str:
    return f"{path.database_name}.{path.table_name}"


@pytest.mark.parametrize("sample", SAMPLES, ids=lambda s: s.name)
async def test_a_type_written_by_either_is_read_by_both(
    conn: fluss.FlussConnection, ours: Connection, path: fluss.TablePath, sample: Sample
) -> None:
    batch = pa.record_batch([sample.array()], names=["x"])
    table = await create(conn, path, batch.schema)
    write(ours, path, batch)
    await append(table, batch)
    expected = pa.Table.from_batches([batch, batch])
    assert (await read_arrow(table)).equals(expected)
    assert read(ours, path).equals(expected)


@pytest.mark.parametrize("compression", COMPRESSIONS)
async def test_every_type_at_once_passes_between_the_clients_in_every_compression(
    conn: fluss.FlussConnection, ours: Connection, path: fluss.TablePath, compression: str
) -> None:
    properties = {"table.log.arrow.compression.type": compression}
    table = await create(conn, path, ALL_TYPES, properties=properties)
    batch = all_types_batch(100)
    write(ours, path, batch)
    await append(table, batch)
    expected = pa.Table.from_batches([batch, batch])
    assert (await read_arrow(table)).equals(expected)
    assert read(ours, path).equals(expected)
    columns = ["deep", "string", "boolean"]
    assert read(ours, path, columns=columns).equals(expected.select(columns))


KEYS = {
    "bigint": pa.array(range(500), pa.int64()),
    "string": pa.array([f"key {i} ü" for i in range(500)]),
    "date": pa.array(range(500), pa.date32()),
    "decimal": pa.array([Decimal(i) / 4 for i in range(500)], pa.decimal128(9, 2)),
}


@pytest.mark.parametrize("kind", KEYS)
async def test_both_put_a_key_into_the_same_bucket(
    conn: fluss.FlussConnection, ours: Connection, path: fluss.TablePath, kind: str
) -> None:
    batch = pa.record_batch({"k": KEYS[kind], "n": pa.array(range(500), pa.int64())})
    table = await create(conn, path, batch.schema, bucket_count=8, bucket_keys=["k"])
    write(ours, path, batch)
    await append(table, batch)
    buckets: dict[int, list[int]] = {}
    for found in await poll_batches(await arrow_scanner(table, columns=["n"]), 1000):
        for n in found.batch.column(0).to_pylist():
            buckets.setdefault(n, []).append(found.bucket.bucket_id)
    assert all(len(both) == 2 and both[0] == both[1] for both in buckets.values())
    assert len({both[0] for both in buckets.values()}) == 8


async def test_both_write_to_the_same_partitions(
    conn: fluss.FlussConnection, ours: Connection, path: fluss.TablePath
) -> None:
    schema = pa.schema([("region", pa.string()), ("id", pa.int64())])
    table = await create(conn, path, schema, partition_keys=["region"])
    ours.admin.create_partition(str_of(path), {"region": "eu"})
    await in_time(conn.get_admin().create_partition(path, {"region": "us"}))
    write(ours, path, pa.record_batch([["eu", "us", "eu"], [1, 2, 3]], schema=schema))
    await append(table, pa.record_batch([["us"], [4]], schema=schema))
    rows = read(ours, path).sort_by("id").to_pylist()
    assert [(r["region"], r["id"]) for r in rows] == [("eu", 1), ("us", 2), ("eu", 3), ("us", 4)]
    partitions = await in_time(conn.get_admin().list_partition_infos(path))
    scanner = await in_time(table.new_scan().create_record_batch_log_scanner())
    scanner.subscribe_partition_buckets({(p.partition_id, 0): -2 for p in partitions})
    assert (await in_time(scanner.to_arrow())).sort_by("id").to_pylist() == rows


async def test_a_column_added_by_our_client_is_used_by_pyfluss(
    conn: fluss.FlussConnection, ours: Connection, path: fluss.TablePath
) -> None:
    await append(await create(conn, path), ids(0, 3))
    ours.admin.alter_table(str_of(path), add_columns=[Column("more", parse_type("ARRAY<INT>"))])
    wider = pa.schema([*IDS, pa.field("more", pa.list_(pa.int32()))])
    table = await in_time(conn.get_table(path))
    await append(table, pa.record_batch([[3], ["x"], [[1, None]]], schema=wider))
    write(ours, path, pa.record_batch([[4], ["y"], [None]], schema=wider))
    expected = [None, None, None, [1, None], None]
    assert read(ours, path).column("more").to_pylist() == expected
    assert (await read_arrow(table, columns=["more"])).column(0).to_pylist() == expected


async def test_statistics_written_by_either_prune_for_both(
    conn: fluss.FlussConnection, ours: Connection, path: fluss.TablePath
) -> None:
    table = await create(conn, path, properties={"table.statistics.columns": "id"})
    write(ours, path, ids(0, 10))
    await append(table, ids(10, 20))
    write(ours, path, ids(20, 30))
    scan = table.new_scan().filter(fluss.col("id") >= 25)
    scanner = await in_time(scan.create_record_batch_log_scanner())
    scanner.subscribe(0, fluss.EARLIEST_OFFSET)
    assert (await in_time(scanner.to_arrow())).column("id").to_pylist() == list(range(20, 30))
    exact = read(ours, path, filter=zufluss.col("id") >= 25)
    assert exact.column("id").to_pylist() == list(range(25, 30))


async def test_both_see_the_same_catalog(
    conn: fluss.FlussConnection, ours: Connection, path: fluss.TablePath
) -> None:
    ours.admin.create_table(
        str_of(path),
        "id BIGINT NOT NULL, label CHAR(3), price DECIMAL(10, 2), tags ARRAY<STRING>",
    )
    info = await in_time(conn.get_admin().get_table_info(path))
    assert info.table_id == ours.admin.table_info(str_of(path)).table_id
    assert info.get_schema().get_columns() == [
        ("id", "bigint NOT NULL"),
        ("label", "char(3)"),
        ("price", "decimal(10,2)"),
        ("tags", "array<string>"),
    ]
    table = await in_time(conn.get_table(path))
    writer = table.new_append().create_writer()
    writer.append([1, "abc", None, ["x"]])
    await in_time(writer.flush())
    assert read(ours, path).to_pylist() == [{"id": 1, "label": "abc", "price": None, "tags": ["x"]}]
    assert ours.admin.list_offsets(str_of(path), "latest") == {0: 1}
    mine = sorted(ours.admin.list_databases())
    assert mine == sorted(await conn.get_admin().list_databases())
