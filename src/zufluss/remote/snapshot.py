"""`_METADATA` of a key-value snapshot: the files of a RocksDB checkpoint and its log offset.

JSON in Fluss's form, so that its clients read it, with fields of our own beside it. Full paths are
those of the time of the snapshot. We use the location's id and the path below its root instead,
because a location may have moved since.

| field | value |
|---|---|
| `version` | 1 |
| `table_id`, `partition_id`, `bucket_id`, `snapshot_id` | the bucket and the snapshot; the partition only if there is one |
| `snapshot_location` | the full path of `snap-N` |
| `kv_snapshot_handle` | `shared_file_handles` (table files), `private_file_handles` (the rest), `snapshot_incremental_size` (bytes uploaded for it) |
| … of each file | `kv_file_handle` (`path`, in full, and `size`), `local_path` (its name in RocksDB), and ours: `location_id`, `relative_path`, `crc32c` |
| `log_offset` | the changelog continues from this offset |
| `row_count` | number of rows; absent if they are not counted |
| `auto_inc_id_range` | a list of `column_id`, `start`, `end`; absent without such a column |
| `zufluss_writers` | ours: the file with the writers of the changelog at `log_offset`, as a writer snapshot of the log (`log/writer_state.py`): `path` below the root, `size`, `location_id`, `crc32c`; absent if unknown |
| `zufluss_crc32c` | ours: the checksum of the rest (`seal.py`) |
"""  # noqa: E501 - a table row does not wrap

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from zufluss.errors import CorruptRecordError
from zufluss.model.schema import dump_object
from zufluss.model.table import TableBucket
from zufluss.remote.files import RemoteFile, file_of, number, text
from zufluss.remote.seal import check_seal, sealed

VERSION = 1
METADATA_BYTES_MAX = 256 * 1024 * 1024
"""Size of the largest `_METADATA` that is read."""


class SnapshotFile(NamedTuple):
    """A file of a checkpoint."""

    name: str
    """Name in RocksDB's directory."""
    file: RemoteFile
    """The file in remote storage."""


class IdRange(NamedTuple):
    """Ids of an auto-increment column that a server had reserved."""

    column_id: int
    start: int
    end: int


@dataclass(frozen=True, slots=True)
class KvSnapshot:
    """A snapshot of a bucket's rows in remote storage."""

    bucket: TableBucket
    snapshot_id: int
    log_offset: int
    """The snapshot has all changes below this offset of the changelog."""
    shared: tuple[SnapshotFile, ...]
    """Table files, which other snapshots may share."""
    private: tuple[SnapshotFile, ...]
    """Files of this snapshot alone."""
    incremental_size: int
    """Bytes that were uploaded for this snapshot."""
    row_count: int | None = None
    """Number of rows, None if they are not counted."""
    id_ranges: tuple[IdRange, ...] = ()
    """Reserved ids of auto-increment columns."""
    writers: RemoteFile | None = None
    """The writers at the offset, for a leader that is restored; readers do not need it."""

    @property
    def files(self) -> tuple[SnapshotFile, ...]:
        """All files that RocksDB needs to open the snapshot."""
        return (*self.shared, *self.private)

    @property
    def objects(self) -> tuple[RemoteFile, ...]:
        """All objects that are kept and deleted with the snapshot."""
        files = tuple(each.file for each in self.files)
        return files if self.writers is None else (*files, self.writers)

    def to_json(self, directory: str, full_path: Callable[[RemoteFile], str]) -> bytes:
        """Return the bytes of `_METADATA`; `directory` is the full path of `snap-N`."""
        document: dict[str, Any] = {"version": VERSION, "table_id": self.bucket.table_id}
        if self.bucket.partition_id is not None:
            document["partition_id"] = self.bucket.partition_id
        document |= {
            "bucket_id": self.bucket.bucket_id,
            "snapshot_id": self.snapshot_id,
            "snapshot_location": directory,
            "kv_snapshot_handle": {
                "shared_file_handles": [_file_object(f, full_path) for f in self.shared],
                "private_file_handles": [_file_object(f, full_path) for f in self.private],
                "snapshot_incremental_size": self.incremental_size,
            },
            "log_offset": self.log_offset,
        }
        if self.row_count is not None:
            document["row_count"] = self.row_count
        if self.id_ranges:
            document["auto_inc_id_range"] = [r._asdict() for r in self.id_ranges]
        if self.writers is not None:
            document["zufluss_writers"] = self.writers._asdict()
        return sealed(dump_object(document))

    @classmethod
    def from_json(cls, data: bytes) -> KvSnapshot:
        """Parse the bytes of `_METADATA`; raises `CorruptRecordError` if they are damaged."""
        try:
            check_seal(data)
            return _snapshot(json.loads(data))
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as e:
            raise CorruptRecordError(
                f"the metadata of a key-value snapshot is damaged: {e!r:.300}"
            ) from e


def _file_object(
    snapshot_file: SnapshotFile, full_path: Callable[[RemoteFile], str]
) -> dict[str, Any]:
    file = snapshot_file.file
    return {
        "kv_file_handle": {"path": full_path(file), "size": file.size},
        "local_path": snapshot_file.name,
        "location_id": file.location_id,
        "relative_path": file.path,
        "crc32c": file.crc32c,
    }


def _snapshot(source: Mapping[str, Any]) -> KvSnapshot:
    if source["version"] != VERSION:
        raise ValueError(f"version {source['version']!r}, this server reads {VERSION}")
    partition_id = source.get("partition_id")
    handle = source["kv_snapshot_handle"]
    row_count, writers = source.get("row_count"), source.get("zufluss_writers")
    snapshot = KvSnapshot(
        TableBucket(
            number(source["table_id"]),
            None if partition_id is None else number(partition_id),
            number(source["bucket_id"]),
        ),
        number(source["snapshot_id"]),
        number(source["log_offset"]),
        tuple(map(_file, handle["shared_file_handles"])),
        tuple(map(_file, handle["private_file_handles"])),
        number(handle["snapshot_incremental_size"]),
        None if row_count is None else number(row_count),
        tuple(
            IdRange(number(r["column_id"]), number(r["start"]), number(r["end"]))
            for r in source.get("auto_inc_id_range", ())
        ),
        None if writers is None else file_of(writers),
    )
    names = {file.name for file in snapshot.files}
    if len(names) != len(snapshot.files):
        raise ValueError("a file name appears twice")
    return snapshot


def _file(source: Mapping[str, Any]) -> SnapshotFile:
    name = text(source["local_path"])
    if not name or "/" in name or name in (".", ".."):
        raise ValueError(f"{name!r:.200} is not a file name")
    file = file_of(
        {
            "path": source["relative_path"],
            "size": source["kv_file_handle"]["size"],
            "crc32c": source["crc32c"],
            "location_id": source["location_id"],
        }
    )
    return SnapshotFile(name, file)
