"""Key-value snapshots of a real server, in a directory and in an object store."""

from __future__ import annotations

import time
from collections.abc import Iterator

import pyarrow as pa
import pytest

import zufluss
from tests.client.pk import create_table, delete, upsert
from tests.servers import WarmServer
from tests.waiting import WAIT_SECONDS
from zufluss.client.keyed.snapshots import KvSnapshotInfo
from zufluss.client.sync.connection import Connection
from zufluss.client.sync.table import Table
from zufluss.errors import (
    InvalidPartitionError,
    KvSnapshotNotExistError,
    NonPrimaryKeyTableError,
)
from zufluss.model.table import TableBucket
from zufluss.testing.s3 import S3Server

KEYED = "id INT NOT NULL, name STRING, PRIMARY KEY (id)"
FAST = {"kv.snapshot.interval": "20ms", "kv.snapshot.num-retained": "2"}


@pytest.fixture(scope="module", params=["implicit", "s3"])
def snapshotting(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Connection]:
    """A connection to a server that takes snapshots all the time."""
    directory = tmp_path_factory.mktemp("kv")
    if request.param == "implicit":
        with WarmServer(directory, FAST) as server, zufluss.connect(server.bootstrap) as connection:
            yield connection
        return
    with S3Server() as s3:
        places = {"remote.data.dirs": f"{s3.bucket('snapshots')}/cluster", **s3.properties}
        with (
            WarmServer(directory, FAST | places) as server,
            zufluss.connect(server.bootstrap) as connection,
        ):
            yield connection


def newest(connection: Connection, table: Table, partition: str | None = None) -> KvSnapshotInfo:
    """The newest snapshot of the first bucket, once it has everything that is in the log now."""
    admin = connection.admin
    end = admin.list_offsets(table.path, partition=partition)[0]
    deadline = time.monotonic() + WAIT_SECONDS
    while time.monotonic() < deadline:
        for found in admin.latest_kv_snapshots(table.path, partition):
            if found.bucket.bucket_id == 0 and found.log_offset == end:
                return found
        time.sleep(0.01)
    raise AssertionError(f"no snapshot of {table.path} reached {end}")


def rows(table: Table, snapshot: KvSnapshotInfo) -> pa.Table:
    with table.kv_snapshot(snapshot.bucket, snapshot.snapshot_id) as reader:
        assert reader.log_offset == snapshot.log_offset
        return pa.Table.from_batches(reader, reader.schema)


def test_a_snapshot_has_the_rows_that_the_table_had(snapshotting: Connection) -> None:
    table = create_table(snapshotting, KEYED, bucket_count=1)
    upsert(table, {"id": [1, 2, 3], "name": ["a", "b", "c"]})
    first = newest(snapshotting, table)
    assert rows(table, first).to_pydict() == {"id": [1, 2, 3], "name": ["a", "b", "c"]}
    upsert(table, {"id": [2, 4], "name": ["B", None]})
    delete(table, {"id": [1]})
    second = newest(snapshotting, table)
    assert second.snapshot_id > first.snapshot_id
    assert rows(table, second).to_pydict() == {"id": [2, 3, 4], "name": ["B", "c", None]}
    about = snapshotting.admin.kv_snapshot_metadata(second.bucket, second.snapshot_id)
    assert about.row_count == 3
    assert all(file.crc32c is not None and file.size is not None for file in about.files)


def test_retained_snapshots_are_listed_and_others_are_gone(snapshotting: Connection) -> None:
    table = create_table(snapshotting, KEYED, bucket_count=1)
    taken = []
    for number in range(4):
        upsert(table, {"id": [number], "name": ["x"]})
        taken.append(newest(snapshotting, table))
    kept = snapshotting.admin.list_kv_snapshots(table.path)
    assert len(kept) <= 2
    assert kept[-1] == taken[-1]
    with pytest.raises(KvSnapshotNotExistError):
        snapshotting.admin.kv_snapshot_metadata(taken[0].bucket, taken[0].snapshot_id)
    with pytest.raises(KvSnapshotNotExistError):
        table.kv_snapshot(taken[0].bucket, 123_456)


def test_a_bucket_without_rows_has_no_snapshot(snapshotting: Connection) -> None:
    table = create_table(snapshotting, KEYED, bucket_count=1)
    assert snapshotting.admin.latest_kv_snapshots(table.path) == []
    assert snapshotting.admin.list_kv_snapshots(table.path) == []


def test_each_partition_has_its_own_snapshots(snapshotting: Connection) -> None:
    schema = "id INT NOT NULL, day STRING NOT NULL, PRIMARY KEY (id, day)"
    table = create_table(snapshotting, schema, partition_keys=["day"], bucket_count=1)
    upsert(table, {"id": [1, 2, 3], "day": ["a", "b", "b"]})
    for name, ids in (("a", [1]), ("b", [2, 3])):
        found = newest(snapshotting, table, name)
        assert rows(table, found)["id"].to_pylist() == ids
        assert found in snapshotting.admin.list_kv_snapshots(table.path, {"day": name})
    with pytest.raises(InvalidPartitionError, match="is partitioned; name the partition"):
        snapshotting.admin.latest_kv_snapshots(table.path)


def test_a_log_table_has_no_snapshots(snapshotting: Connection) -> None:
    table = create_table(snapshotting, "id INT", bucket_count=1)
    with pytest.raises(NonPrimaryKeyTableError):
        snapshotting.admin.latest_kv_snapshots(table.path)
    with pytest.raises(NonPrimaryKeyTableError):
        snapshotting.admin.list_kv_snapshots(table.path)
    bucket = TableBucket(table.info.table_id, None, 0)
    with pytest.raises(KvSnapshotNotExistError):
        snapshotting.admin.kv_snapshot_metadata(bucket, 0)


def test_snapshots_of_indexed_rows_are_read(snapshotting: Connection) -> None:
    table = create_table(
        snapshotting, KEYED, bucket_count=1, properties={"table.kv.format": "INDEXED"}
    )
    upsert(table, {"id": [1, 2], "name": ["a", None]})
    found = rows(table, newest(snapshotting, table))
    assert found.to_pydict() == {"id": [1, 2], "name": ["a", None]}
