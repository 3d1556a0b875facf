"""`table.count()`: the same number as a scan returns, by row counts of the servers or by a scan."""

from __future__ import annotations

import pytest

from tests.client.pk import create_table, delete, upsert
from zufluss import col
from zufluss.client.connection import connect_async
from zufluss.client.sync.connection import Connection
from zufluss.client.table import AsyncTable
from zufluss.errors import InvalidScanRequestError, InvalidTableError, PartitionNotExistError
from zufluss.model.predicate import InvalidPredicateError
from zufluss.testing.server import DevServer

LOG = "id BIGINT, kind STRING"
KEYED = "id INT, kind STRING, PRIMARY KEY (id)"


def rows(count: int) -> dict[str, list[object]]:
    return {"id": list(range(count)), "kind": ["ab"[i % 2] for i in range(count)]}


def test_a_log_table_counts_its_rows_over_all_buckets(conn: Connection) -> None:
    table = create_table(conn, LOG, bucket_count=3, bucket_keys=["id"])
    assert table.count() == 0
    with table.append() as writer:
        writer.write(rows(500))
    assert table.count() == 500
    assert table.count(buckets=[0]) == table.scan(buckets=[0]).to_arrow().num_rows


def test_a_primary_key_table_counts_each_key_once_and_no_deleted_one(conn: Connection) -> None:
    table = create_table(conn, KEYED, bucket_count=2)
    upsert(table, rows(100), rows(50))
    delete(table, {"id": [1, 2, 1000]})
    assert table.count() == 98


def test_a_count_without_filter_reads_no_rows(
    conn: Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    table = create_table(conn, LOG)
    with table.append() as writer:
        writer.write(rows(10))
    monkeypatch.setattr(AsyncTable, "scan", None)
    assert table.count() == 10


def test_rows_that_a_server_does_not_count_are_counted_by_a_scan(conn: Connection) -> None:
    table = create_table(conn, KEYED, properties={"table.changelog.image": "WAL"})
    upsert(table, rows(30), rows(10))
    delete(table, {"id": [0]})
    assert table.count() == 29


@pytest.mark.parametrize("schema", [LOG, KEYED])
def test_a_filter_is_a_text_or_an_expression(conn: Connection, schema: str) -> None:
    table = create_table(conn, schema, bucket_count=2)
    with table.upsert() if table.info.has_primary_key else table.append() as writer:
        writer.write(rows(101))
    assert table.count("kind = 'a'") == 51
    assert table.count(col("id") < 7) == 7
    assert table.count("id < 10 AND kind = 'b'", buckets=[0, 1]) == 5
    with pytest.raises(InvalidPredicateError, match=r"character 4"):
        table.count("id ~ 5")


@pytest.mark.parametrize("schema", [LOG, "id INT, kind STRING, PRIMARY KEY (id, kind)"])
def test_partitions_are_counted_alone_and_together(conn: Connection, schema: str) -> None:
    table = create_table(conn, schema, partition_keys=["kind"], bucket_count=2)
    with table.upsert() if table.info.has_primary_key else table.append() as writer:
        writer.write(rows(21))
    assert table.count() == 21
    assert table.count(partitions=["a"]) == 11
    assert table.count(partitions=[{"kind": "b"}], filter="id < 4") == 2
    assert table.count("kind = 'b'") == 10
    with pytest.raises(PartitionNotExistError):
        table.count(partitions=["c"])


def test_wrong_arguments_are_refused_before_anything_is_asked(conn: Connection) -> None:
    table = create_table(conn, LOG)
    with pytest.raises(InvalidTableError, match="not partitioned"):
        table.count(partitions=["a"])
    with pytest.raises(InvalidTableError, match="has no bucket 7"):
        table.count(buckets=[7])
    with pytest.raises(InvalidScanRequestError):
        table.count(buckets="0")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="source 'disk' is none of"):
        table.count(source="disk")  # type: ignore[arg-type]


def test_a_table_without_a_fixed_width_column_is_counted_too(conn: Connection) -> None:
    table = create_table(conn, "name STRING, tags ARRAY<STRING>")
    with table.append() as writer:
        writer.write([{"name": "a", "tags": ["x"]}, {"name": None, "tags": None}])
    assert (table.count(), table.count("name IS NULL")) == (2, 1)


async def test_the_async_table_counts_as_well(dev_server: DevServer, conn: Connection) -> None:
    table = create_table(conn, LOG)
    with table.append() as writer:
        writer.write(rows(3))
    async with await connect_async(dev_server.bootstrap) as connection:
        asynchronous = await connection.table(table.path)
        assert await asynchronous.count() == 3
        assert await asynchronous.count("id = 1") == 1
