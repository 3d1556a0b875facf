"""pyfluss's get_latest_lake_snapshot: what tiering committed, with partitions, or error 53."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import fluss
import pyarrow as pa
import pytest

import zufluss
from tests.end_to_end.helpers import connected, create, in_time, refused
from zufluss.client.sync.connection import Connection
from zufluss.client.tiering import TieringClient
from zufluss.model.table import TableBucket
from zufluss.testing.server import DevServer

FRESH = {"table.datalake.enabled": "true", "table.datalake.freshness": "1ms"}
PATH = fluss.TablePath("fluss", "events")


@pytest.fixture
def lake_server(new_server: Callable[..., DevServer]) -> DevServer:
    """A server with a lake."""
    return new_server({"datalake.format": "iceberg"})


def tier(connection: Connection, offsets: dict[tuple[int | None, int], int], snapshot: int) -> int:
    """One round that says it got so far; the table's id."""
    tiering = TieringClient(connection)
    while (lease := tiering.heartbeat(request_table=True).table) is None:
        pass
    buckets = {TableBucket(lease.table_id, p, b): o for (p, b), o in offsets.items()}
    tiering.commit(lease, snapshot, tiering.prepare(lease, buckets))
    return lease.table_id


def write(connection: Connection, rows: dict[str, list[Any]]) -> None:
    with connection.table("fluss.events").append() as writer:
        writer.write(rows)


async def test_pyfluss_finds_the_snapshot_that_was_committed(lake_server: DevServer) -> None:
    async with connected(lake_server.bootstrap) as conn:
        await create(conn, PATH, bucket_count=2, bucket_keys=["id"], properties=FRESH)
        with zufluss.connect(lake_server.bootstrap) as connection:
            write(connection, {"id": list(range(200)), "text": ["x"] * 200})
            table_id = tier(connection, {(None, 0): 10, (None, 1): 20}, 4711)
        snapshot = await in_time(conn.get_admin().get_latest_lake_snapshot(PATH))
        assert snapshot.snapshot_id == 4711
        offsets = {(b.table_id, b.bucket_id): o for b, o in snapshot.table_buckets_offset.items()}
        assert offsets == {(table_id, 0): 10, (table_id, 1): 20}


async def test_pyfluss_finds_the_offsets_of_partitions(lake_server: DevServer) -> None:
    schema = pa.schema([pa.field("id", pa.int64()), pa.field("day", pa.string())])
    async with connected(lake_server.bootstrap) as conn:
        await create(conn, PATH, schema, partition_keys=["day"], bucket_count=1, properties=FRESH)
        await in_time(conn.get_admin().create_partition(PATH, {"day": "x"}))
        with zufluss.connect(lake_server.bootstrap) as connection:
            (partition,) = connection.admin.list_partitions("fluss.events")
            write(connection, {"id": [1, 2, 3], "day": ["x"] * 3})
            tier(connection, {(partition.partition_id, 0): 3}, 1)
        snapshot = await in_time(conn.get_admin().get_latest_lake_snapshot(PATH))
        offsets = {
            (b.partition_id, b.bucket_id): o for b, o in snapshot.table_buckets_offset.items()
        }
        assert offsets == {(partition.partition_id, 0): 3}


async def test_pyfluss_is_told_that_there_is_no_snapshot(
    conn: fluss.FlussConnection, admin: fluss.FlussAdmin, path: fluss.TablePath
) -> None:
    await create(conn, path)
    with refused(fluss.ErrorCode.LAKE_SNAPSHOT_NOT_EXIST):
        await in_time(admin.get_latest_lake_snapshot(path))
