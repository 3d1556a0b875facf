"""Paths of remote files below the root of a location: those of Fluss, so that its clients find them.

| path | content |
|---|---|
| `log/DATABASE/TABLE-ID[/PARTITION-pID]/BUCKET/` | a bucket's log |
| … `SEGMENT/START.log` `.index` `.timeindex` | a closed segment and its indexes; SEGMENT is a UUID, START 20 digits |
| … `SEGMENT/END.writer_snapshot` | the idempotent writers at its end |
| … `metadata/UUID.manifest` | the list of segments (`manifest.py`) |
| `kv/DATABASE/TABLE-ID[/PARTITION-pID]/BUCKET/` | a bucket's key-value snapshots |
| … `shared/UUID` | a RocksDB table file, shared by snapshots |
| … `snap-N/UUID` | the other files of snapshot N |
| … `snap-N/_METADATA` | the list of the snapshot's files (`snapshot.py`) |
| `lake/DATABASE/TABLE-ID/metadata/UUID.offsets` | log offsets of a table in a lake snapshot |
| `wal/EPOCH/NUMBER` | objects of the shared log (`wal.py`) |
| `.zufluss-cluster` | the cluster that owns the location (`marker.py`) |
| `.zufluss-probe/UUID` | written and deleted by a health probe |

The sweep deletes only files whose path `parse` understands; others do not belong to zufluss.
"""  # noqa: E501 - a table row does not wrap

from __future__ import annotations

import re
import uuid
from typing import Final, NamedTuple

from zufluss.model.table import PhysicalTablePath, TableBucket, TablePath

LOG: Final = "log"
KV: Final = "kv"
LAKE: Final = "lake"
CLUSTER: Final = ".zufluss-cluster"
PROBE: Final = ".zufluss-probe"
METADATA_NAME: Final = "_METADATA"

_UUID = "[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}"
_ID = "(?:0|[1-9][0-9]{0,18})"
_OWNER = (
    rf"(?P<database>[A-Za-z0-9_-]+)/(?P<table>[A-Za-z0-9_-]+)-(?P<table_id>{_ID})"
    rf"(?:/(?P<partition>[A-Za-z0-9_$-]+)-p(?P<partition_id>{_ID}))?/(?P<bucket>{_ID})"
)
_LOG_FILE = re.compile(
    rf"log/{_OWNER}/(?:(?P<segment>{_UUID})/[0-9]{{20}}\.(?:log|index|timeindex|writer_snapshot)"
    rf"|metadata/(?P<manifest>{_UUID})\.manifest)"
)
_KV_FILE = re.compile(
    rf"kv/{_OWNER}/(?:shared/(?P<shared>{_UUID})|snap-(?P<snapshot>{_ID})/(?:{_UUID}|_METADATA))"
)

_IN_LOCATION = re.compile(
    rf"(?P<root>.+)/(?:log|kv|lake)/[A-Za-z0-9_-]+/[A-Za-z0-9_-]+-{_ID}(?:/.*)?"
)


class RemoteName(NamedTuple):
    """The parts of a remote file's path."""

    kind: str
    """`log` or `kv`."""
    database: str
    table: str
    partition: str | None
    bucket: TableBucket
    """The bucket that the file belongs to."""
    segment_id: str | None = None
    """The log segment; None for other files."""
    snapshot_id: int | None = None
    """The key-value snapshot of a private file; None for other files."""


def table_directory(kind: str, path: TablePath, table_id: int) -> str:
    """Return the directory of a table."""
    return f"{kind}/{path.database}/{path.table}-{table_id}"


def owner_directory(
    kind: str, path: PhysicalTablePath, table_id: int, partition_id: int | None
) -> str:
    """Return the directory of a table or of one of its partitions."""
    base = f"{kind}/{path.database}/{path.table}-{table_id}"
    return base if partition_id is None else f"{base}/{path.partition}-p{partition_id}"


def bucket_directory(kind: str, path: PhysicalTablePath, bucket: TableBucket) -> str:
    """Return the directory of a bucket."""
    owner = owner_directory(kind, path, bucket.table_id, bucket.partition_id)
    return f"{owner}/{bucket.bucket_id}"


def segment_file(directory: str, segment_id: str, offset: int, suffix: str) -> str:
    """Return the path of a segment's file; `suffix` has a dot.

    `offset` is the start of the segment, or the end for the writer snapshot.
    """
    return f"{directory}/{segment_id}/{offset:020d}{suffix}"


def new_manifest(directory: str) -> str:
    """Return a path for a new manifest."""
    return f"{directory}/metadata/{uuid.uuid4()}.manifest"


def new_shared_file(directory: str) -> str:
    """Return a path for a new table file."""
    return f"{directory}/shared/{uuid.uuid4()}"


def snapshot_directory(directory: str, snapshot_id: int) -> str:
    """Return the directory of the private files of a snapshot."""
    return f"{directory}/snap-{snapshot_id}"


def root_of(path: str) -> str | None:
    """Return the location's root in the full path of a table's file, None for other paths."""
    match = _IN_LOCATION.fullmatch(path)
    return None if match is None else match["root"]


def parse(path: str) -> RemoteName | None:
    """Return the parts of a path below a root, None if it is not a file of `log/` or `kv/`."""
    match = _LOG_FILE.fullmatch(path) or _KV_FILE.fullmatch(path)
    if match is None:
        return None
    parts = match.groupdict()
    partition_id = parts["partition_id"]
    bucket = TableBucket(
        int(parts["table_id"]),
        None if partition_id is None else int(partition_id),
        int(parts["bucket"]),
    )
    snapshot_id = parts.get("snapshot")
    return RemoteName(
        path.partition("/")[0],
        parts["database"],
        parts["table"],
        parts["partition"],
        bucket,
        parts.get("segment"),
        None if snapshot_id is None else int(snapshot_id),
    )
