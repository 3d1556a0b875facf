"""Files of a lake: local ones are durable, others go through pyiceberg's FileIO."""

from __future__ import annotations

import os
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from pyarrow.fs import FileSystem, LocalFileSystem, SubTreeFileSystem
from pyiceberg.io.pyarrow import PyArrowFileIO

from zufluss.lake.iceberg import files as module
from zufluss.lake.iceberg.files import LakeFiles, local_path


class BucketIO(PyArrowFileIO):
    """A FileIO whose buckets are directories."""

    def _initialize_fs(self, scheme: str, netloc: str | None = None) -> FileSystem:
        assert scheme == "bucket"
        return SubTreeFileSystem(self.properties["root"], LocalFileSystem())


@pytest.mark.parametrize(
    ("location", "path"),
    [
        ("file:///a/b", "/a/b"),
        ("file:/a/b", "/a/b"),
        ("/a/b%20c", "/a/b%20c"),
        ("file:///a/b=1/c%3A", "/a/b=1/c%3A"),
    ],
)
def test_local_locations_are_paths(location: str, path: str) -> None:
    assert local_path(location) == Path(path)


@pytest.mark.parametrize("location", ["s3://bucket/a", "file://host/a", "abfss://c@h/a"])
def test_other_locations_are_not(location: str) -> None:
    assert local_path(location) is None


def test_files_elsewhere_go_through_the_file_io_of_the_catalog(tmp_path: Path) -> None:
    io = {"py-io-impl": f"{__name__}.BucketIO", "root": str(tmp_path)}
    (tmp_path / "b").mkdir()
    files = LakeFiles(io, "bucket://b/t")
    table = pa.table({"a": [1, 2]})
    with files.create("bucket://b/t.parquet") as sink:
        pq.write_table(table, sink)
    files.sync_all(["bucket://b/t.parquet"])
    assert (tmp_path / "b" / "t.parquet").exists()
    with files.open("bucket://b/t.parquet") as source:
        assert pq.read_table(source) == table
    files.remove("bucket://b/t.parquet")
    files.remove("bucket://b/t.parquet")
    assert not (tmp_path / "b" / "t.parquet").exists()


def test_a_file_and_its_directories_up_to_the_table_are_synced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced: list[Path] = []
    real = os.fsync

    def fsync(fd: int) -> None:
        synced.append(Path(f"/proc/self/fd/{fd}").readlink())
        real(fd)

    monkeypatch.setattr(module.system, "sync_names", fsync)
    root = tmp_path / "t"
    files = LakeFiles({}, f"file://{root}")
    paths = [f"file://{root}/data/b={i}/f" for i in range(2)]
    for path in paths:
        files.create(path).close()
    files.sync_all(paths)
    below = [root, root / "data", *(root / "data" / f"b={i}" for i in range(2))]
    assert sorted(synced) == sorted([*below, *(root / "data" / f"b={i}" / "f" for i in range(2))])
