"""The calls of tablet servers to the coordinator about remote files, and their form on the wire.

Tablet servers write the files; the coordinator knows which documents are valid. `RemoteGateway` is
the coordinator as a tablet server sees it: in one process the coordinator's own object
(`coordinator/remote/keeper.py`), otherwise `tablet/link.py`, which sends the same calls.

| call | on the wire | when |
|---|---|---|
| bucket_remotes | GET_BUCKET_REMOTES (30005) | a server takes buckets over, or does not know how a commit ended |
| commit_manifest | COMMIT_REMOTE_LOG_MANIFEST (1027) | segments were uploaded or expired, their manifest is written |
| commit_snapshot | COMMIT_KV_SNAPSHOT (1022) | a key-value snapshot is uploaded, its `_METADATA` last |
| lake_offset | GET_LAKE_SNAPSHOT (1032) | a log was lost and begins again |
| commit_takeovers | COMMIT_TAKEOVERS (30007) | the session of a leader has the end of buckets, see `wal.py` |
| commit_wal_floor | COMMIT_WAL_FLOOR (30008) | the first objects of a session are not needed any more |
| report_released | REPORT_RELEASED (30062) | a session has released buckets and not heard of them since |
| report_standbys | REPORT_STANDBYS (30009) | standbys have caught up, or no longer keep up |
"""  # noqa: E501 - a table row does not wrap

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from zufluss.cluster.wal import ReleasedBucket, StandbyReport, Takeover, WalSession
from zufluss.model.table import TableBucket, TablePath
from zufluss.remote.files import Usage
from zufluss.remote.layout import METADATA_NAME
from zufluss.remote.locations import Location, Locations
from zufluss.remote.snapshot import KvSnapshot
from zufluss.wire import messages as m
from zufluss.wire.tables import bucket_from_proto, bucket_to_proto


@dataclass(frozen=True, slots=True)
class ManifestCommit:
    """A written manifest that is to become the valid one of its bucket."""

    bucket: TableBucket
    """The bucket whose log it describes."""
    leader_epoch: int
    """The epoch of the leader that wrote it; refused when there is a later one."""
    manifest_location: int
    """The location of the manifest."""
    manifest_path: str
    """Its path below the root of that location."""
    start_offset: int
    """The first offset in remote storage; the same as the end where nothing is left."""
    end_offset: int
    """The offset after the last one."""
    usage: Mapping[int, Usage] = field(default_factory=dict)
    """Files and bytes that the manifest refers to, by location; the manifest itself excluded."""
    base_manifest_path: str | None = None
    """The manifest it is based on, None for the first; refused if that is not the valid one."""
    locations_version: int = 0
    """The version of the registry of locations under which its files were uploaded; refused if a
    location was moved since. 0 from an older server, which does not say it."""


@dataclass(frozen=True, slots=True)
class SnapshotHandle:
    """A key-value snapshot that is retained."""

    snapshot_id: int
    """Its number, per bucket."""
    log_offset: int
    """It contains all changes below this offset of the changelog."""
    metadata_location: int
    """The location of its `_METADATA`."""
    metadata_path: str
    """Its path below the root of that location."""
    size: int = field(default=0, compare=False)
    """Bytes of its files together; 0 where an older version committed it."""
    committed_ms: int = field(default=0, compare=False)
    """When it was committed, epoch milliseconds; 0 where an older version committed it."""


@dataclass(frozen=True, slots=True)
class BucketRemote:
    """The remote side of a bucket, as the coordinator knows it."""

    bucket: TableBucket
    """The bucket."""
    manifest_location: int | None = None
    """The location of the manifest of its log; None without a manifest."""
    manifest_path: str | None = None
    """The path of the manifest below the root of that location; None without a manifest."""
    remote_start_offset: int | None = None
    """The first offset of its log in remote storage; None without a manifest."""
    remote_end_offset: int | None = None
    """The offset after the last one there; None without a manifest."""
    next_snapshot_id: int = 0
    """The number of its next key-value snapshot."""
    snapshots: tuple[SnapshotHandle, ...] = ()
    """The retained snapshots, oldest first."""


class WalCommits(Protocol):
    """What a tablet server has the coordinator note about the shared log."""

    async def commit_takeovers(
        self, session: WalSession, takeovers: Sequence[Takeover]
    ) -> set[TableBucket]:
        """Note that a session of the shared log has the end of buckets; returns which of them.

        Left out are buckets that have another leader, or leader epoch, by now. Raises
        `NotLeaderError` unless the session is live.
        """

    async def commit_wal_floor(self, session: WalSession, floor: int) -> None:
        """Note that objects of a session below a number are not needed any more.

        Raises `NotLeaderError` unless the session is live.
        """

    async def report_released(
        self, session: WalSession, released: Sequence[ReleasedBucket]
    ) -> set[TableBucket]:
        """Buckets that a live session has released; returns those that do not need it any more.

        One that has no other leader yet gets one. Raises `NotLeaderError` unless the session is
        live.
        """

    async def report_standbys(self, session: WalSession, reports: Sequence[StandbyReport]) -> None:
        """Note which standbys of a server with a live session have caught up, and which have not.

        Reports about another leader epoch than the present one count for nothing.
        """


class RemoteGateway(WalCommits, Protocol):
    """The coordinator as a tablet server calls it about remote files."""

    async def bucket_remotes(
        self, buckets: Sequence[TableBucket]
    ) -> dict[TableBucket, BucketRemote]:
        """The remote side of buckets, without those that never had any remote files."""

    async def commit_manifest(self, commit: ManifestCommit) -> bool:
        """Commit a manifest; False, without a change, for a former leader or an old base."""

    async def commit_snapshot(
        self, metadata: bytes, leader_epoch: int, locations_version: int = 0
    ) -> None:
        """Commit a snapshot, given as the bytes of its `_METADATA` (see `metadata_file`).

        Its files were uploaded under `locations_version`, see `ManifestCommit`.
        """

    async def lake_offset(self, path: TablePath, bucket: TableBucket) -> int:
        """The offset up to which the lake has all rows of a bucket; 0 where it has none."""


def home(locations: Locations, location_id: int | None) -> Location:
    """The location of a table or partition.

    The first one if the table is older than locations, or if its own was retired or lost.
    """
    location = locations.first if location_id is None else locations.get(location_id)
    return locations.first if location.is_gone else location


def metadata_file(snapshot: KvSnapshot) -> tuple[int, str]:
    """Location and path of a snapshot's `_METADATA`: it always lies with its private files."""
    beside = snapshot.private[0].file
    return beside.location_id, f"{beside.path.rpartition('/')[0]}/{METADATA_NAME}"


# -- on the wire ------------------------------------------------------------------------------


def commit_to_proto(
    commit: ManifestCommit, coordinator_epoch: int
) -> m.CommitRemoteLogManifestRequest:
    """Encode the commit of a manifest."""
    bucket = commit.bucket
    return m.CommitRemoteLogManifestRequest(
        table_id=bucket.table_id,
        partition_id=bucket.partition_id,
        bucket_id=bucket.bucket_id,
        remote_log_manifest_path=commit.manifest_path,
        remote_log_start_offset=commit.start_offset,
        remote_log_end_offset=commit.end_offset,
        coordinator_epoch=coordinator_epoch,
        bucket_leader_epoch=commit.leader_epoch,
        manifest_location=commit.manifest_location,
        usage=[
            m.PbLocationUsage(location_id=i, files=used.files, bytes=used.bytes)
            for i, used in commit.usage.items()
        ],
        base_manifest_path=commit.base_manifest_path,
        locations_version=commit.locations_version,
    )


def commit_from_proto(message: m.CommitRemoteLogManifestRequest) -> ManifestCommit:
    """Decode the commit of a manifest."""
    base = message.base_manifest_path if message.HasField("base_manifest_path") else None
    return ManifestCommit(
        bucket_from_proto(message),
        message.bucket_leader_epoch,
        message.manifest_location,
        message.remote_log_manifest_path,
        message.remote_log_start_offset,
        message.remote_log_end_offset,
        {used.location_id: Usage(used.files, used.bytes) for used in message.usage},
        base,
        message.locations_version,
    )


def remote_to_proto(remote: BucketRemote) -> m.PbBucketRemote:
    """Encode the remote side of a bucket."""
    return m.PbBucketRemote(
        bucket=bucket_to_proto(remote.bucket),
        manifest_location=remote.manifest_location,
        manifest_path=remote.manifest_path,
        remote_start_offset=remote.remote_start_offset,
        remote_end_offset=remote.remote_end_offset,
        next_snapshot_id=remote.next_snapshot_id,
        snapshots=map(snapshot_to_proto, remote.snapshots),
    )


def remote_from_proto(message: m.PbBucketRemote) -> BucketRemote:
    """Decode the remote side of a bucket."""
    has_manifest = message.HasField("manifest_path")
    return BucketRemote(
        bucket_from_proto(message.bucket),
        message.manifest_location if has_manifest else None,
        message.manifest_path if has_manifest else None,
        message.remote_start_offset if has_manifest else None,
        message.remote_end_offset if has_manifest else None,
        message.next_snapshot_id,
        tuple(map(snapshot_from_proto, message.snapshots)),
    )


def snapshot_to_proto(handle: SnapshotHandle) -> m.PbSnapshotHandle:
    """Encode a retained snapshot."""
    return m.PbSnapshotHandle(
        snapshot_id=handle.snapshot_id,
        log_offset=handle.log_offset,
        metadata_location=handle.metadata_location,
        metadata_path=handle.metadata_path,
        size=handle.size,
    )


def snapshot_from_proto(message: m.PbSnapshotHandle) -> SnapshotHandle:
    """Decode a retained snapshot."""
    return SnapshotHandle(
        message.snapshot_id,
        message.log_offset,
        message.metadata_location,
        message.metadata_path,
        message.size,
    )
