"""Remote files made by hand, as a tablet server would make them, in real directories."""

from __future__ import annotations

import os
import uuid
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Protocol

from tests.coordinator.support import RecordingTablet
from zufluss.cluster.remote import ManifestCommit, metadata_file
from zufluss.coordinator.remote.checks import bucket_directory
from zufluss.coordinator.server import Coordinator
from zufluss.model.schema import Schema
from zufluss.model.table import PhysicalTablePath, TableBucket, TableDescriptor, TablePath
from zufluss.remote import layout
from zufluss.remote.files import RemoteFile, usage
from zufluss.remote.manifest import LogManifest, RemoteSegment
from zufluss.remote.snapshot import KvSnapshot, SnapshotFile
from zufluss.remote.storage import RemoteStorage

KEYED = TablePath("fluss", "keyed")
BY_DAY = TablePath("fluss", "by_day")
LOGGED = TablePath("fluss", "logged")


class Coordinated(Protocol):
    """Anything with a coordinator and a tablet server."""

    @property
    def coordinator(self) -> Coordinator: ...
    @property
    def tablet(self) -> RecordingTablet: ...


def keyed_json(partitions: tuple[str, ...] = (), buckets: int = 1) -> bytes:
    """A primary-key table, by day where `partitions` says so."""
    schema = Schema.of("k INT, d STRING, v STRING", ("k", *partitions))
    return TableDescriptor(schema, bucket_count=buckets, partition_keys=partitions).to_json()


def locations(directory: Path, count: int = 2) -> dict[str, str]:
    """The configuration of some locations in directories."""
    return {"remote.data.dirs": ",".join(f"file://{directory}/l{i + 1}" for i in range(count))}


def storage(cluster: Coordinated) -> RemoteStorage:
    return cluster.coordinator.locations.storage


def files_below(directory: Path) -> set[str]:
    """Every file of the locations, as `l1/log/…`."""
    found = (Path(at) / name for at, _, names in os.walk(directory) for name in names)
    return {str(p.relative_to(directory)) for p in found if ".zufluss" not in str(p)}


async def put(cluster: Coordinated, location_id: int, path: str, size: int = 10) -> RemoteFile:
    """Put random bytes; returns the file."""
    checksum = await storage(cluster).objects(location_id).put(path, os.urandom(size))
    return RemoteFile(location_id, path, size, checksum)


def directory(cluster: Coordinated, kind: str, bucket: TableBucket) -> str:
    """The directory of the files of a bucket."""
    return bucket_directory(cluster.coordinator.image, kind, bucket)


def reached(cluster: Coordinated, bucket: TableBucket, offset: int) -> None:
    """Have the tablet server's log of a bucket reach an offset, if it does not yet."""
    ends = cluster.tablet.ends
    ends[bucket] = max(offset, ends.get(bucket, 0))


async def segment(
    cluster: Coordinated, bucket: TableBucket, start: int, end: int, location_id: int = 1
) -> RemoteSegment:
    """Upload a segment."""
    where, segment_id = directory(cluster, layout.LOG, bucket), str(uuid.uuid4())
    named = [(start, ".log"), (start, ".index"), (start, ".timeindex"), (end, ".writer_snapshot")]
    files = [
        await put(cluster, location_id, layout.segment_file(where, segment_id, offset, suffix))
        for offset, suffix in named
    ]
    return RemoteSegment(segment_id, start, end, 0, *files)


async def manifest(
    cluster: Coordinated,
    bucket: TableBucket,
    segments: Sequence[RemoteSegment],
    *,
    base: str | None = None,
    location_id: int = 1,
    leader_epoch: int = 0,
) -> ManifestCommit:
    """Write a manifest, and the commit that it needs."""
    where = directory(cluster, layout.LOG, bucket)
    path = layout.new_manifest(where)
    table = cluster.coordinator.image.table_by_id(bucket.table_id)
    assert table is not None
    document = LogManifest(PhysicalTablePath(*table.info.path), bucket, tuple(segments))
    reached(cluster, bucket, document.end_offset or 0)
    await storage(cluster).objects(location_id).put(path, document.to_json())
    return ManifestCommit(
        bucket,
        leader_epoch,
        location_id,
        path,
        document.start_offset or 0,
        document.end_offset or 0,
        usage(document.files),
        base,
    )


async def shared_file(
    cluster: Coordinated, bucket: TableBucket, name: str, location_id: int = 1
) -> SnapshotFile:
    """Upload a RocksDB table file."""
    where = layout.new_shared_file(directory(cluster, layout.KV, bucket))
    return SnapshotFile(name, await put(cluster, location_id, where, 100))


async def snapshot(
    cluster: Coordinated,
    bucket: TableBucket,
    snapshot_id: int,
    shared: Iterable[SnapshotFile] = (),
    *,
    log_offset: int | None = None,
    location_id: int = 1,
    writers: bool = False,
) -> tuple[KvSnapshot, bytes]:
    """Upload the private files and `_METADATA` of a snapshot, and a file of writers if wanted."""
    where = layout.snapshot_directory(directory(cluster, layout.KV, bucket), snapshot_id)
    private = [
        SnapshotFile(name, await put(cluster, location_id, f"{where}/{uuid.uuid4()}", 5))
        for name in ("CURRENT", "MANIFEST-000004")
    ]
    made = KvSnapshot(
        bucket,
        snapshot_id,
        10 * snapshot_id if log_offset is None else log_offset,
        tuple(shared),
        tuple(private),
        100,
        row_count=7,
        writers=await put(cluster, location_id, f"{where}/{uuid.uuid4()}", 5) if writers else None,
    )
    reached(cluster, bucket, made.log_offset)
    objects = storage(cluster).objects(location_id)
    data = made.to_json(objects.full_path(where), storage(cluster).full_path)
    await objects.put(metadata_file(made)[1], data)
    return made, data


def paths_of(made: KvSnapshot) -> set[str]:
    """Its files as `files_below` names them, `_METADATA` included."""
    where, path = metadata_file(made)
    files = {f"l{each.location_id}/{each.path}" for each in made.objects}
    return {f"l{where}/{path}", *files}
