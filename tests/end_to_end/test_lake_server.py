"""pyfluss on a server whose tables are made for Iceberg: other key encoding, other bucket hash.

The server tells every client how to reach the lake, in the properties of its tables. If pyfluss or
our own client stumbled over these, or put a key elsewhere than the lake's partitioning would, no
table of such a server could be used.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import fluss
import pyarrow as pa
import pytest

import zufluss
from tests.end_to_end.helpers import (
    DATABASE,
    append,
    connect,
    create,
    fresh_path,
    ids,
    in_time,
    read_arrow,
    refused,
)
from tests.end_to_end.kv import changelog, create_keyed, delete, limit_scan, lookup, lookups, upsert
from tests.end_to_end.test_bucket_keys import chosen_buckets
from tests.servers import WarmServer
from zufluss.errors import ConfigError
from zufluss.record.keys.encoding import KeyEncoder, bucket_encoding
from zufluss.testing.server import DevServer

SECRET = "geheim-geheim"
LAKE = {
    "datalake.format": "iceberg",
    "datalake.iceberg.type": "rest",
    "datalake.iceberg.uri": "http://catalog.example:8181",
    "datalake.iceberg.s3.secret-access-key": SECRET,
}
TOLD = {
    "table.datalake.format": "iceberg",
    "table.datalake.iceberg.type": "rest",
    "table.datalake.iceberg.uri": "http://catalog.example:8181",
}
KEYED = pa.schema([("id", pa.int64()), ("text", pa.string()), ("n", pa.int32())])
BUCKETS = 4


@pytest.fixture(scope="module")
def lake_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[DevServer]:
    """A server that is configured with a lake, which no test accesses."""
    with WarmServer(tmp_path_factory.mktemp("lake-server"), LAKE) as server:
        yield server


@pytest.fixture(scope="module")
def conn(lake_server: DevServer) -> Iterator[fluss.FlussConnection]:
    connection = asyncio.run(connect(lake_server.bootstrap))
    asyncio.run(_database(connection))
    yield connection
    asyncio.run(_close(connection))


@pytest.fixture
def path(request: pytest.FixtureRequest) -> fluss.TablePath:
    return fresh_path(request.node.name)


async def _database(connection: fluss.FlussConnection) -> None:
    await connection.get_admin().create_database(DATABASE, ignore_if_exists=True)


async def _close(connection: fluss.FlussConnection) -> None:
    await connection.close()


@pytest.mark.parametrize("enabled", [False, True])
async def test_pyfluss_appends_to_and_reads_a_log_table(
    conn: fluss.FlussConnection, path: fluss.TablePath, enabled: bool
) -> None:
    properties = {"table.datalake.enabled": str(enabled).lower()}
    table = await create(conn, path, properties=properties, bucket_count=BUCKETS)
    await append(table, ids(0, 100), ids(100, 200))
    rows = await read_arrow(table)
    assert sorted(rows["id"].to_pylist()) == list(range(200))


async def test_pyfluss_spreads_a_log_table_by_icebergs_hash_of_its_bucket_key(
    conn: fluss.FlussConnection, path: fluss.TablePath
) -> None:
    keys = pa.array([7 * i - 350 for i in range(300)], pa.int64())
    batch = pa.record_batch({"id": keys, "n": pa.array(range(300), pa.int64())})
    table = await create(conn, path, batch.schema, bucket_count=BUCKETS, bucket_keys=["id"])
    await append(table, batch)
    lakes = KeyEncoder(("id",), bucket_encoding("iceberg"), "iceberg").bucket_ids(batch, BUCKETS)
    assert await chosen_buckets(table, 300) == dict(enumerate(lakes.tolist()))
    assert set(lakes.tolist()) == set(range(BUCKETS))


@pytest.mark.parametrize("buckets", [1, BUCKETS])
async def test_pyfluss_upserts_looks_up_and_scans_a_primary_key_table(
    conn: fluss.FlussConnection, path: fluss.TablePath, buckets: int
) -> None:
    properties = {"table.datalake.enabled": "true"}
    table = await create_keyed(conn, path, KEYED, bucket_count=buckets, properties=properties)
    rows = [{"id": 300 * i, "text": f"row {i}", "n": i} for i in range(40)]
    await upsert(table, *rows)
    await upsert(table, {"id": 300, "text": "again", "n": -1})
    await delete(table, {"id": 600})
    found = await lookups(table, [{"id": 300 * i} for i in range(40)])
    assert found[0] == rows[0]
    assert found[1] == {"id": 300, "text": "again", "n": -1}
    assert found[2] is None
    assert found[3:] == rows[3:]
    assert await lookup(table, {"id": 1}) is None
    kinds = [kind for _, kind, _ in await changelog(table, 43)]
    assert sorted(kinds) == sorted(["+I"] * 40 + ["-U", "+U", "-D"])
    scanned = [await limit_scan(table, 100, bucket) for bucket in range(buckets)]
    assert sum(part.num_rows for part in scanned) == 39


async def test_our_client_and_pyfluss_find_each_others_keys(
    conn: fluss.FlussConnection, path: fluss.TablePath, lake_server: DevServer
) -> None:
    table = await create_keyed(conn, path, KEYED, bucket_count=BUCKETS)
    theirs = [{"id": 300 * i, "text": "theirs", "n": i} for i in range(20)]
    ours = [{"id": 300 * i + 1, "text": "ours", "n": i} for i in range(20)]
    await upsert(table, *theirs)

    def use_ours() -> list[dict[str, object] | None]:
        with zufluss.connect(lake_server.bootstrap) as connection:
            mine = connection.table(f"{path.database_name}.{path.table_name}")
            with mine.upsert() as writer:
                writer.write(pa.Table.from_pylist(ours, KEYED))
            return mine.lookup([row["id"] for row in theirs]).to_pylist()

    assert await asyncio.to_thread(use_ours) == theirs
    assert await lookups(table, [{"id": row["id"]} for row in ours]) == ours


async def test_every_client_is_told_where_the_lake_is_and_none_its_secrets(
    conn: fluss.FlussConnection, path: fluss.TablePath, lake_server: DevServer
) -> None:
    await create(conn, path)
    info = await in_time(conn.get_admin().get_table_info(path))
    properties = {k: v for k, v in info.get_properties().items() if "datalake" in k}
    assert properties == TOLD
    with zufluss.connect(lake_server.bootstrap) as connection:
        name = f"{path.database_name}.{path.table_name}"
        ours = connection.admin.table_info(name)
        assert TOLD.items() <= ours.descriptor.properties.items()
        connection.admin.create_table(f"{name}_copy", ours.descriptor)
        copy = connection.admin.table_info(f"{name}_copy")
        assert copy.descriptor == ours.descriptor
        with pytest.raises(ConfigError, match="not the table's to set"):
            connection.admin.create_table(
                f"{name}_mine", "a INT", properties={"table.datalake.iceberg.uri": "http://mine"}
            )
    lake_server.stop()
    for file in lake_server.data_dir.rglob("*"):
        if file.is_file():
            content = file.read_bytes()
            assert b"catalog.example" not in content, f"{file} has what only the cluster knows"
            assert SECRET.encode() not in content
    assert SECRET not in lake_server.log()
    lake_server.start()


async def test_a_key_that_iceberg_cannot_bucket_is_refused_at_create(
    conn: fluss.FlussConnection, path: fluss.TablePath
) -> None:
    with refused(15):
        await create_keyed(conn, path, KEYED, keys=("id", "text"))
