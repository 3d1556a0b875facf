"""`_METADATA` of a snapshot: Fluss's fields and ours; damaged ones are refused."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.paths import FIXTURES
from zufluss.errors import CorruptRecordError
from zufluss.model.table import TableBucket
from zufluss.remote.files import RemoteFile
from zufluss.remote.snapshot import IdRange, KvSnapshot, SnapshotFile

FIXTURE = FIXTURES / "kv-snapshot" / "0" / "snap-0" / "_METADATA"
OURS = ("location_id", "relative_path", "crc32c")
INT64 = st.integers(0, 2**63 - 1)


def full_path(file: RemoteFile) -> str:
    return f"s3://bucket-{file.location_id}/{file.path}"


def snapshot() -> KvSnapshot:
    return KvSnapshot(
        TableBucket(1, 8, 0),
        3,
        140,
        (SnapshotFile("000008.sst", RemoteFile(1, "kv/a", 10, 7)),),
        (SnapshotFile("CURRENT", RemoteFile(2, "kv/b", 16, 8)),),
        26,
        5,
        (IdRange(2, 100, 200),),
        RemoteFile(2, "kv/c", 90, 9),
    )


def written(found: KvSnapshot) -> dict[str, Any]:
    source: dict[str, Any] = json.loads(found.to_json("s3://bucket/snap-3", full_path))
    return source


def test_flusss_fields_are_the_same_as_fluss_writes_them() -> None:
    source = json.loads(FIXTURE.read_bytes())
    root = "/srv/fluss-store/remote/"
    handle = source["kv_snapshot_handle"]

    def files(kind: str) -> tuple[SnapshotFile, ...]:
        return tuple(
            SnapshotFile(
                x["local_path"],
                RemoteFile(
                    1,
                    x["kv_file_handle"]["path"].removeprefix(root),
                    x["kv_file_handle"]["size"],
                    7,
                ),
            )
            for x in handle[kind]
        )

    found = KvSnapshot(
        TableBucket(source["table_id"], None, source["bucket_id"]),
        source["snapshot_id"],
        source["log_offset"],
        files("shared_file_handles"),
        files("private_file_handles"),
        handle["snapshot_incremental_size"],
        source["row_count"],
    )
    ours = json.loads(found.to_json(source["snapshot_location"], lambda x: root + x.path))
    del ours["zufluss_crc32c"]
    for kind in ("shared_file_handles", "private_file_handles"):
        for file in ours["kv_snapshot_handle"][kind]:
            assert [file.pop(key) for key in OURS][0::2] == [1, 7]
    assert ours == source
    assert list(ours) == list(source)


def test_metadata_of_fluss_does_not_say_where_its_files_are() -> None:
    with pytest.raises(CorruptRecordError, match="relative_path"):
        KvSnapshot.from_json(FIXTURE.read_bytes())


FILE = st.builds(RemoteFile, st.integers(1, 9), st.just("kv/a"), INT64, INT64)
NAMES = st.text("abc0.", min_size=3, max_size=9)


@st.composite
def snapshots(draw: st.DrawFn) -> KvSnapshot:
    files = [SnapshotFile(x, draw(FILE)) for x in sorted(draw(st.sets(NAMES, max_size=6)))]
    half = draw(st.integers(0, len(files)))
    return KvSnapshot(
        TableBucket(draw(INT64), draw(st.none() | INT64), draw(INT64)),
        draw(INT64),
        draw(INT64),
        tuple(files[:half]),
        tuple(files[half:]),
        draw(INT64),
        draw(st.none() | INT64),
        tuple(draw(st.lists(st.builds(IdRange, INT64, INT64, INT64), max_size=2))),
        draw(st.none() | FILE),
    )


@given(snapshots())
@settings(max_examples=100)
def test_metadata_comes_back_as_it_was(found: KvSnapshot) -> None:
    assert KvSnapshot.from_json(found.to_json("s3://bucket/snap-3", full_path)) == found


def test_absent_fields_are_not_written() -> None:
    bare = KvSnapshot(TableBucket(1, None, 0), 3, 140, (), (), 0)
    keys = {"partition_id", "row_count", "auto_inc_id_range", "zufluss_writers"}
    assert not written(bare).keys() & keys
    assert written(snapshot()).keys() >= keys


def test_full_paths_are_those_of_each_files_location() -> None:
    handle = written(snapshot())["kv_snapshot_handle"]
    assert handle["shared_file_handles"][0]["kv_file_handle"]["path"] == "s3://bucket-1/kv/a"
    assert handle["private_file_handles"][0]["kv_file_handle"]["path"] == "s3://bucket-2/kv/b"
    assert [x.name for x in snapshot().files] == ["000008.sst", "CURRENT"]


def test_readers_get_the_files_of_rocksdb_and_deletions_all_files() -> None:
    found = snapshot()
    assert found.objects == (*(each.file for each in found.files), found.writers)
    assert found.writers not in [each.file for each in found.files]


def test_a_file_of_writers_outside_its_location_is_refused() -> None:
    source = written(snapshot())
    del source["zufluss_crc32c"]
    source["zufluss_writers"]["path"] = "../elsewhere"
    with pytest.raises(CorruptRecordError, match="does not lie below a location"):
        KvSnapshot.from_json(json.dumps(source).encode())


SHARED = ("kv_snapshot_handle", "shared_file_handles", 0)


@pytest.mark.parametrize(
    ("where", "value"),
    [
        (("version",), 2),
        (("snapshot_id",), -1),
        (("snapshot_id",), 2**63),
        (("log_offset",), None),
        (("log_offset",), True),
        (("table_id",), "1"),
        (("partition_id",), 1.0),
        (("row_count",), -1),
        (("kv_snapshot_handle",), []),
        (("kv_snapshot_handle", "shared_file_handles"), None),
        (("kv_snapshot_handle", "snapshot_incremental_size"), -1),
        ((*SHARED, "local_path"), "../../etc/passwd"),
        ((*SHARED, "local_path"), "a/b"),
        ((*SHARED, "local_path"), ".."),
        ((*SHARED, "local_path"), ""),
        ((*SHARED, "local_path"), "CURRENT"),
        ((*SHARED, "local_path"), None),
        ((*SHARED, "relative_path"), "/etc/passwd"),
        ((*SHARED, "relative_path"), "kv/../../x"),
        ((*SHARED, "location_id"), None),
        ((*SHARED, "crc32c"), "x"),
        ((*SHARED, "kv_file_handle"), {}),
        (("auto_inc_id_range",), [{"column_id": 1}]),
    ],
)
def test_metadata_with_a_mistake_is_refused(where: tuple[str | int, ...], value: Any) -> None:
    source = written(snapshot())
    inner: Any = source
    for key in where[:-1]:
        inner = inner[key]
    inner[where[-1]] = value
    with pytest.raises(CorruptRecordError, match="metadata of a key-value snapshot is damaged"):
        KvSnapshot.from_json(json.dumps(source).encode())


@given(st.data())
@settings(max_examples=100)
def test_metadata_cut_or_changed_anywhere_is_read_or_refused(data: st.DataObject) -> None:
    """The result is a snapshot or the one error, nothing else."""
    source = bytearray(snapshot().to_json("s3://bucket/snap-3", full_path))
    position = data.draw(st.integers(0, len(source) - 1))
    if data.draw(st.booleans()):
        del source[position:]
    else:
        source[position] = data.draw(st.integers(0, 255))
    try:
        KvSnapshot.from_json(bytes(source))
    except CorruptRecordError:
        return


@pytest.mark.parametrize("data", [b"", b"null", b"[]", b"[" * 100_000, b"\xff"])
def test_bytes_that_are_not_metadata_are_refused(data: bytes) -> None:
    with pytest.raises(CorruptRecordError):
        KvSnapshot.from_json(data)
