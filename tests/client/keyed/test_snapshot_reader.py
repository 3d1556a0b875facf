"""Key-value snapshots as a client reads them: one that Java wrote, and checkpoints of our store."""

from __future__ import annotations

import asyncio
import json
import tempfile
from collections.abc import Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from crc32c import crc32c

from tests.client.fake import FakeCluster
from tests.kv.kv_samples import open_store, put, small_memory
from tests.record.record_samples import FIXTURES, json_row, types_of
from tests.record.rows.plain_values import rows_of_batch
from zufluss.client.connection import AsyncConnection
from zufluss.client.keyed import snapshot_reader
from zufluss.errors import (
    CorruptRecordError,
    InvalidColumnProjectionError,
    InvalidTableError,
    KvSnapshotNotExistError,
)
from zufluss.kv.table import KvTable
from zufluss.model.ddl import parse_type
from zufluss.model.schema import Column, Schema
from zufluss.model.table import TableBucket, TableDescriptor, TableInfo
from zufluss.record.keys.encoding import KeyEncoder
from zufluss.record.rows.codec import RowCodec
from zufluss.remote.errors import ObjectCorruptError, ObjectMissingError
from zufluss.wire import messages as m
from zufluss.wire.api import ApiKey

SNAPSHOT = FIXTURES / "kv-snapshot"
COLUMNS = "id INT NOT NULL, name STRING"
KEYED: dict[str, Any] = {"bucket_count": 1, "bucket_keys": ("id",)}


@pytest.fixture(autouse=True)
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The directory of temporary files, which every reader leaves as it found it."""
    place = tmp_path / "temporary"
    place.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(place))
    yield place
    assert list(place.iterdir()) == []


class Snapshots:
    """The answers of the fake cluster about key-value snapshots."""

    def __init__(self, cluster: FakeCluster) -> None:
        self.known: dict[tuple[int, int], m.GetKvSnapshotMetadataResponse] = {}
        cluster.handlers[ApiKey.GET_KV_SNAPSHOT_METADATA] = self._metadata
        cluster.handlers[ApiKey.GET_FILESYSTEM_SECURITY_TOKEN] = self._token

    async def _token(self, request: m.GetFileSystemSecurityTokenRequest) -> Any:
        return m.GetFileSystemSecurityTokenResponse(schema="file", token=b"")

    async def _metadata(self, request: m.GetKvSnapshotMetadataRequest) -> Any:
        found = self.known.get((request.table_id, request.snapshot_id))
        return found or KvSnapshotNotExistError(f"there is no snapshot {request.snapshot_id}")

    def add(self, info: TableInfo, directory: Path, *, checksums: bool = True) -> TableBucket:
        """Snapshot 0 of the only bucket; its files are those of a directory."""
        answer = m.GetKvSnapshotMetadataResponse(log_offset=14)
        for file in sorted(path for path in directory.iterdir() if path.suffix != ".json"):
            added = answer.snapshot_files.add(remote_path=file.as_uri(), local_file_name=file.name)
            if checksums:
                added.size, added.crc32c = file.stat().st_size, crc32c(file.read_bytes())
        self.known[info.table_id, 0] = answer
        return TableBucket(info.table_id, None, 0)


@pytest.fixture
def snapshots(cluster: FakeCluster) -> Snapshots:
    return Snapshots(cluster)


def keyed_table(cluster: FakeCluster, columns: str = COLUMNS, **changes: Any) -> TableInfo:
    schema = Schema.of(columns, primary_key=["id"])
    return cluster.create("keyed", schema, **KEYED | changes)  # type: ignore[arg-type]


def encoded(info: TableInfo, rows: dict[str, list[Any]]) -> tuple[list[bytes], list[bytes]]:
    """Keys and values of rows as a server of ours keeps them."""
    batch = pa.RecordBatch.from_pydict(rows, schema=info.schema.arrow)
    data, ends = KeyEncoder.of_stored_key(info).encode(batch)
    keys = [data[a:b].tobytes() for a, b in pairwise(ends)]
    prefix = info.schema_id.to_bytes(2, "little")
    values = [prefix + (row or b"") for row in RowCodec(info.schema).encode(batch).tolist()]
    return keys, values


def checkpoint(directory: Path, *writes: tuple[Sequence[bytes], Sequence[bytes | None]]) -> Path:
    """A checkpoint of a store that took these writes, a flush after each."""
    store = open_store(directory / "bucket-0", small_memory(400))
    offset = 0
    for keys, values in writes:
        put(store, keys, values, offset)
        offset += len(keys)
        store.horizon = offset
        store.flush_begin(offset, 0)
        store.flush_wait()
    store.checkpoint(directory / "checkpoint")
    store.abandon()
    return directory / "checkpoint"


async def read(connection: AsyncConnection, bucket: TableBucket, **how: Any) -> pa.Table:
    table = await connection.table("keyed")
    async with await table.kv_snapshot(bucket, 0, **how) as reader:
        return pa.Table.from_batches([batch async for batch in reader], reader.schema)


def ids_and_names(count: int, start: int = 0) -> dict[str, list[Any]]:
    return {"id": [*range(start, start + count)], "name": [f"n{i}" for i in range(count)]}


async def test_a_snapshot_that_java_wrote_has_the_rows_it_should(
    cluster: FakeCluster, connection: AsyncConnection, snapshots: Snapshots
) -> None:
    descriptor = TableDescriptor.from_json((FIXTURES / "tables/kv_all.stored.json").read_bytes())
    info = cluster.create("keyed", descriptor.schema, bucket_keys=("k",))  # type: ignore[arg-type]
    expected = json.loads((SNAPSHOT / "expected.json").read_text())
    said = expected["get_kv_snapshot_metadata"]
    here = (SNAPSHOT / "0").as_uri()
    answer = m.GetKvSnapshotMetadataResponse(log_offset=said["log_offset"])
    for file in said["snapshot_files"]:
        path = file["remote_path"].replace(expected["remote_dir"], here)
        answer.snapshot_files.add(remote_path=path, local_file_name=file["local_file_name"])
    snapshots.known[info.table_id, 0] = answer

    found = await read(connection, TableBucket(info.table_id, None, 0))
    types = types_of(info.schema)
    rows = [
        json_row(row, types)
        for batch in found.to_batches()
        for row in rows_of_batch(batch, info.schema)
    ]
    assert rows == expected["expected_rows"]


async def test_the_newest_row_of_each_key_comes_in_the_order_of_keys(
    cluster: FakeCluster, connection: AsyncConnection, snapshots: Snapshots, tmp_path: Path
) -> None:
    info = keyed_table(cluster)
    keys, values = encoded(info, ids_and_names(300))
    changed, newer = encoded(info, {"id": [7, 8], "name": ["new", None]})
    files = checkpoint(tmp_path, (keys, values), (changed, newer), (keys[9:11], [None, None]))
    found = await read(connection, snapshots.add(info, files))
    order = sorted(range(300), key=lambda i: keys[i])
    names = {i: f"n{i}" for i in range(300)} | {7: "new", 8: None}
    assert found.to_pylist() == [{"id": i, "name": names[i]} for i in order if i not in (9, 10)]


async def test_rows_of_an_older_schema_are_read_under_the_present_one(
    cluster: FakeCluster, connection: AsyncConnection, snapshots: Snapshots, tmp_path: Path
) -> None:
    old = keyed_table(cluster)
    note = Column("note", parse_type("STRING"), id=2)
    schema = Schema((*old.schema.columns, note), primary_key=("id",), highest_field_id=2)
    cluster.tables.clear()
    new = cluster.create("keyed", schema, **KEYED)  # type: ignore[arg-type]
    new = TableInfo(new.path, new.table_id, 2, new.descriptor, 0, 0)
    cluster.tables[new.path].info = new
    cluster.tables[new.path].schemas = {1: old.schema, 2: schema}
    rows = {"id": [2, 3], "name": ["b", "c"], "note": ["x", None]}
    files = checkpoint(
        tmp_path, encoded(old, {"id": [1, 2], "name": ["a", "old"]}), encoded(new, rows)
    )
    found = await read(connection, snapshots.add(new, files))
    assert found.to_pydict() == {
        "id": [1, 2, 3],
        "name": ["a", "b", "c"],
        "note": [None, "x", None],
    }


async def test_only_the_wanted_columns_come_in_the_wanted_order(
    cluster: FakeCluster, connection: AsyncConnection, snapshots: Snapshots, tmp_path: Path
) -> None:
    info = keyed_table(cluster)
    bucket = snapshots.add(info, checkpoint(tmp_path, encoded(info, ids_and_names(3))))
    assert (await read(connection, bucket, columns=["name"])).column_names == ["name"]
    assert (await read(connection, bucket, columns=["name", "id"])).column_names == ["name", "id"]
    with pytest.raises(InvalidColumnProjectionError, match="has no column 'nam'; its columns"):
        await read(connection, bucket, columns=["nam"])


async def test_reading_goes_on_behind_the_last_key_that_was_handed_out(
    cluster: FakeCluster,
    connection: AsyncConnection,
    snapshots: Snapshots,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(snapshot_reader, "BATCH_ROWS", 7)
    info = keyed_table(cluster)
    bucket = snapshots.add(info, checkpoint(tmp_path, encoded(info, ids_and_names(20))))
    whole = (await read(connection, bucket))["id"].to_pylist()
    table = await connection.table("keyed")
    found: list[int] = []
    key: bytes | None = None
    for _ in range(4):
        async with await table.kv_snapshot(bucket, 0, after=key) as reader:
            batch = await reader.next_batch()
            found += [] if batch is None else batch["id"].to_pylist()
            key = reader.last_key
    assert (found, len(whole)) == (whole, 20)


async def test_rows_of_an_indexed_table_are_compacted_in_ours_and_indexed_in_others(
    cluster: FakeCluster, connection: AsyncConnection, snapshots: Snapshots, tmp_path: Path
) -> None:
    info = keyed_table(cluster, properties={"table.kv.format": "INDEXED"})
    keys, values = encoded(info, ids_and_names(5))
    ours = checkpoint(tmp_path / "ours", (keys, values))
    indexed = KvTable(info, {1: info.schema}).for_clients(snapshot_reader.slices_of(values))
    others = checkpoint(tmp_path / "others", (keys, indexed))
    assert others != ours
    for files, checksums in ((ours, True), (others, False)):
        bucket = snapshots.add(info, files, checksums=checksums)
        assert (await read(connection, bucket)).to_pydict() == ids_and_names(5)


async def test_an_empty_snapshot_has_no_rows(
    cluster: FakeCluster, connection: AsyncConnection, snapshots: Snapshots, tmp_path: Path
) -> None:
    info = keyed_table(cluster)
    keys, values = encoded(info, ids_and_names(2))
    files = checkpoint(tmp_path, (keys, values), (keys, [None, None]))
    found = await read(connection, snapshots.add(info, files))
    assert (found.num_rows, found.schema) == (0, info.schema.arrow)


@pytest.mark.parametrize("damage", ["cut", "flipped"])
async def test_files_that_are_not_what_was_written_are_refused(
    cluster: FakeCluster,
    connection: AsyncConnection,
    snapshots: Snapshots,
    tmp_path: Path,
    damage: str,
) -> None:
    info = keyed_table(cluster)
    files = checkpoint(tmp_path, encoded(info, ids_and_names(50)))
    bucket = snapshots.add(info, files)
    table_file = next(files.glob("*.sst"))
    data = bytearray(table_file.read_bytes())
    table_file.unlink()  # it is a hard link
    if damage == "cut":
        del data[-1]
    else:
        data[20] ^= 1
    table_file.write_bytes(data)
    with pytest.raises(ObjectCorruptError, match=table_file.name):
        await read(connection, bucket)


async def test_damage_that_no_checksum_told_of_is_noticed_by_rocksdb(
    cluster: FakeCluster, connection: AsyncConnection, snapshots: Snapshots, tmp_path: Path
) -> None:
    info = keyed_table(cluster)
    files = checkpoint(tmp_path, encoded(info, ids_and_names(5_000)))
    table_file = next(files.glob("*.sst"))
    data = bytearray(table_file.read_bytes())
    table_file.unlink()
    data[len(data) // 3] ^= 1
    table_file.write_bytes(data)
    bucket = snapshots.add(info, files, checksums=False)
    with pytest.raises(CorruptRecordError, match="RocksDB cannot read the snapshot"):
        await read(connection, bucket)


async def test_a_snapshot_that_is_gone_says_so(
    cluster: FakeCluster, connection: AsyncConnection, snapshots: Snapshots, tmp_path: Path
) -> None:
    info = keyed_table(cluster)
    files = checkpoint(tmp_path, encoded(info, ids_and_names(5)))
    bucket = snapshots.add(info, files)
    next(files.glob("*.sst")).unlink()
    with pytest.raises(ObjectMissingError):
        await read(connection, bucket)
    snapshots.known.clear()
    with pytest.raises(KvSnapshotNotExistError, match="there is no snapshot 0"):
        await read(connection, bucket)


async def test_a_file_name_that_leaves_the_directory_is_refused(
    cluster: FakeCluster, connection: AsyncConnection, snapshots: Snapshots, tmp_path: Path
) -> None:
    info = keyed_table(cluster)
    bucket = snapshots.add(info, checkpoint(tmp_path, encoded(info, ids_and_names(1))))
    snapshots.known[info.table_id, 0].snapshot_files[0].local_file_name = "../CURRENT"
    with pytest.raises(CorruptRecordError, match=r"'\.\./CURRENT', which is no plain file name"):
        await read(connection, bucket)


async def test_a_reader_that_is_cancelled_leaves_nothing_behind(
    cluster: FakeCluster, connection: AsyncConnection, snapshots: Snapshots, tmp_path: Path
) -> None:
    info = keyed_table(cluster)
    bucket = snapshots.add(info, checkpoint(tmp_path, encoded(info, ids_and_names(1_000))))
    table = await connection.table("keyed")
    for turns in range(0, 60, 3):
        opening = asyncio.ensure_future(table.kv_snapshot(bucket, 0))
        for _ in range(turns):
            await asyncio.sleep(0)
        opening.cancel()
        done = await asyncio.gather(opening, return_exceptions=True)
        if not isinstance(done[0], BaseException):
            await done[0].close()


async def test_a_log_table_has_no_snapshots(
    cluster: FakeCluster, connection: AsyncConnection, snapshots: Snapshots, tmp_path: Path
) -> None:
    info = cluster.create("keyed", "id INT")
    snapshots.known[info.table_id, 0] = m.GetKvSnapshotMetadataResponse(log_offset=0)
    with pytest.raises(InvalidTableError, match="no primary key, so there is no key-value snap"):
        await read(connection, TableBucket(info.table_id, None, 0))
