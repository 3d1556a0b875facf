"""Handlers of remote files: commits of tablet servers, and questions of servers and clients.

The rules stand in `remote/manifests.py` and `remote/kv_snapshots.py`. Clients get full addresses
from the present registry, so that a location can be moved. A leased snapshot can be read after its
table or partition was dropped, until it is released or revoked.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from zufluss.cluster.image import ClusterImage
from zufluss.cluster.remote import SnapshotHandle, commit_from_proto, remote_to_proto
from zufluss.coordinator.bucket_remotes import BucketRemotes
from zufluss.coordinator.leases.book import LeaseBook
from zufluss.coordinator.remote.checks import check_epoch
from zufluss.coordinator.remote.cleaner import Cleaner
from zufluss.coordinator.remote.kv_snapshots import KvSnapshots
from zufluss.coordinator.remote.manifests import LogManifests
from zufluss.errors import (
    KvSnapshotRevokedError,
    NonPrimaryKeyTableError,
    PartitionNotExistError,
    TableNotExistError,
    TableNotPartitionedError,
)
from zufluss.model.lease import LOG_OFFSET_UNKNOWN
from zufluss.model.table import TableBucket, TableInfo, unknown_table
from zufluss.remote import layout
from zufluss.remote.files import RemoteFile
from zufluss.remote.snapshot import KvSnapshot
from zufluss.remote.storage import RemoteStorage
from zufluss.wire import messages as m
from zufluss.wire.tables import bucket_from_proto, bucket_to_proto, partition_id_of, path_from_proto

if TYPE_CHECKING:
    from zufluss.net.services import RequestContext


class RemoteService:
    """Handlers of the APIs of remote logs and key-value snapshots."""

    def __init__(
        self,
        remotes: BucketRemotes,
        logs: LogManifests,
        snapshots: KvSnapshots,
        leases: LeaseBook,
        cleaner: Cleaner,
        storage: RemoteStorage,
    ) -> None:
        self._remotes = remotes
        self._logs = logs
        self._snapshots = snapshots
        self._leases = leases
        self._cleaner = cleaner
        self._storage = storage
        self._image: ClusterImage = remotes.image

    # Tablet servers

    async def get_bucket_remotes(
        self, request: m.GetBucketRemotesRequest, ctx: RequestContext
    ) -> m.GetBucketRemotesResponse:
        """GET_BUCKET_REMOTES (30005): the remote side of the buckets that have one."""
        buckets = list(map(bucket_from_proto, request.buckets))
        remotes = await self._remotes.bucket_remotes(buckets)
        return m.GetBucketRemotesResponse(remotes=map(remote_to_proto, remotes.values()))

    async def commit_remote_log_manifest(
        self, request: m.CommitRemoteLogManifestRequest, ctx: RequestContext
    ) -> m.CommitRemoteLogManifestResponse:
        """COMMIT_REMOTE_LOG_MANIFEST (1027)."""
        check_epoch(request.coordinator_epoch, self._remotes.epoch)
        done = await self._logs.commit(commit_from_proto(request))
        return m.CommitRemoteLogManifestResponse(commitSuccess=done)

    async def commit_kv_snapshot(
        self, request: m.CommitKvSnapshotRequest, ctx: RequestContext
    ) -> m.CommitKvSnapshotResponse:
        """COMMIT_KV_SNAPSHOT (1022)."""
        check_epoch(request.coordinator_epoch, self._remotes.epoch)
        await self._snapshots.commit(
            request.completed_snapshot, request.bucket_leader_epoch, request.locations_version
        )
        return m.CommitKvSnapshotResponse()

    # Clients

    async def list_remote_log_manifests(
        self, request: m.ListRemoteLogManifestsRequest, ctx: RequestContext
    ) -> m.ListRemoteLogManifestsResponse:
        """LIST_REMOTE_LOG_MANIFESTS (1063): the manifests of the buckets that have one."""
        partition_id = partition_id_of(request)
        self._check_owner(request.table_id, partition_id)
        response = m.ListRemoteLogManifestsResponse()
        for bucket, manifest in self._logs.manifests(request.table_id, partition_id):
            where = RemoteFile(manifest.location_id, manifest.path, 0, 0)
            response.manifests.add(
                table_bucket=bucket_to_proto(bucket),
                remote_log_manifest_path=self._storage.full_path(where),
                remote_log_end_offset=manifest.end_offset,
            )
        return response

    async def get_latest_kv_snapshots(
        self, request: m.GetLatestKvSnapshotsRequest, ctx: RequestContext
    ) -> m.GetLatestKvSnapshotsResponse:
        """GET_LATEST_KV_SNAPSHOTS (1023): every bucket, without an id if it has no snapshot."""
        name = request.partition_name if request.HasField("partition_name") else None
        entry = self._image.table(path_from_proto(request.table_path))
        table_id, partition_id = entry.info.table_id, None
        _check_keyed(entry.info)
        if name is not None:
            self._image.partitioned_table(entry.info.path)
            partition_id = self._image.partition(entry.info.path, name).partition_id
        self._check_owner(table_id, partition_id)
        response = m.GetLatestKvSnapshotsResponse(table_id=table_id, partition_id=partition_id)
        snapshots = self._snapshots.snapshots(table_id, partition_id)
        for bucket_id in range(entry.info.bucket_count):
            answer = response.latest_snapshots.add(bucket_id=bucket_id)
            if bucket_id in snapshots:
                newest = snapshots[bucket_id][-1]
                answer.snapshot_id, answer.log_offset = newest.snapshot_id, newest.log_offset
        return response

    async def list_kv_snapshots(
        self, request: m.ListKvSnapshotsRequest, ctx: RequestContext
    ) -> m.ListKvSnapshotsResponse:
        """LIST_KV_SNAPSHOTS (1064): all kept snapshots, bucket by bucket, oldest first."""
        partition_id = partition_id_of(request)
        _check_keyed(self._check_owner(request.table_id, partition_id))
        snapshots = self._snapshots.snapshots(request.table_id, partition_id)
        return m.ListKvSnapshotsResponse(
            table_id=request.table_id,
            partition_id=partition_id,
            active_snapshots=[
                m.PbKvSnapshot(
                    bucket_id=bucket_id,
                    snapshot_id=each.snapshot_id,
                    log_offset=each.log_offset,
                    size=each.size or None,
                    committed_ms=each.committed_ms or None,
                )
                for bucket_id, handles in snapshots.items()
                for each in handles
            ],
        )

    async def get_kv_snapshot_metadata(
        self, request: m.GetKvSnapshotMetadataRequest, ctx: RequestContext
    ) -> m.GetKvSnapshotMetadataResponse:
        """GET_KV_SNAPSHOT_METADATA (1024): the files of a snapshot; error 41 for an unknown one."""
        bucket = bucket_from_proto(request)
        if self._image.leader(bucket) is None:
            snapshot = await self._dropped_snapshot(bucket, request.snapshot_id)
        else:
            snapshot = await self._snapshots.snapshot(bucket, request.snapshot_id)
        return m.GetKvSnapshotMetadataResponse(
            log_offset=snapshot.log_offset,
            row_count=snapshot.row_count,
            snapshot_files=[
                m.PbRemotePathAndLocalFile(
                    remote_path=self._storage.full_path(each.file),
                    local_file_name=each.name,
                    size=each.file.size,
                    crc32c=each.file.crc32c,
                )
                for each in snapshot.files
            ],
        )

    async def _dropped_snapshot(self, bucket: TableBucket, snapshot_id: int) -> KvSnapshot:
        """The files of a leased snapshot whose bucket was dropped."""
        what = self._leases.revocation(bucket)
        if what is not None:
            raise KvSnapshotRevokedError(
                f"snapshot {snapshot_id} of {self._image.name_of(bucket)} was taken away from its "
                f"leases, because {what} was dropped; what was read of it before is whole, the "
                "rest is gone"
            )
        location_id = self._leases.pins.location(bucket, snapshot_id)
        drop = None if location_id is None else await self._cleaner.dropped(bucket)
        if location_id is None or drop is None:
            return await self._snapshots.snapshot(bucket, snapshot_id)
        directory = layout.bucket_directory(layout.KV, drop.owner, bucket)
        path = f"{layout.snapshot_directory(directory, snapshot_id)}/{layout.METADATA_NAME}"
        return await self._snapshots.read(
            bucket, SnapshotHandle(snapshot_id, LOG_OFFSET_UNKNOWN, location_id, path)
        )

    def _check_owner(self, table_id: int, partition_id: int | None) -> TableInfo:
        """The table with an id; raises unless the partition id fits the table."""
        table = self._image.table_by_id(table_id)
        if table is None:
            raise TableNotExistError(f"{unknown_table(table_id)} does not exist")
        info = table.info
        if partition_id is None:
            if info.is_partitioned:
                raise PartitionNotExistError(
                    f"table '{info.path}' is partitioned; name the partition"
                )
            return info
        partition = self._image.partition_by_id(partition_id)
        if not info.is_partitioned:
            raise TableNotPartitionedError(f"table '{info.path}' is not partitioned")
        if partition is None or partition.table_id != table_id:
            raise PartitionNotExistError(
                f"table '{info.path}' has no partition with id {partition_id}"
            )
        return info


def _check_keyed(info: TableInfo) -> None:
    if not info.has_primary_key:
        raise NonPrimaryKeyTableError(
            f"table '{info.path}' has no primary key, so it has no key-value snapshots"
        )
