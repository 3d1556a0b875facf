"""Commits of the manifests of remote logs: each bucket has one valid manifest.

A tablet server writes a manifest and commits it here. Two things fence a former leader: the leader
epoch of the bucket, and the manifest that the new one is based on. A commit is one transaction; the
same commit sent again succeeds again. A commit of files that were uploaded before a location was
moved is refused with `LocationMovedError`: they may lie at the former address. One of the present
leader with an end above the high watermark of the log is refused with `OffsetOutOfRangeError`: a
log that was lost would continue there.

A refused commit changes nothing; the server then asks for the valid manifest (`bucket_remotes`).
The server that wrote files deletes them; files that it leaves are garbage for the sweep
(`remote/sweep.py`).
"""

from __future__ import annotations

from dataclasses import replace

import structlog

from zufluss.cluster.remote import ManifestCommit
from zufluss.coordinator.bucket_remotes import BucketRecord, BucketRemotes, ManifestRecord, gone
from zufluss.coordinator.remote.checks import (
    check_locations,
    check_moves,
    check_name,
    check_reached,
)
from zufluss.coordinator.tablets import Tablets
from zufluss.errors import ConfigError
from zufluss.model.table import TableBucket
from zufluss.remote import layout
from zufluss.remote.storage import RemoteStorage

log = structlog.get_logger(__name__)


class LogManifests:
    """The remote logs of all buckets."""

    def __init__(self, remotes: BucketRemotes, storage: RemoteStorage, tablets: Tablets) -> None:
        self._remotes = remotes
        self._storage = storage
        self._tablets = tablets

    async def commit(self, commit: ManifestCommit) -> bool:
        """Commit a manifest; False, without a change, for a former leader or an old base."""
        self._check(commit)
        await self._check_end(commit)
        return await self._remotes.tasks.undisturbed(self._commit(commit))

    async def _commit(self, commit: ManifestCommit) -> bool:
        async with self._remotes.turn:
            await self._remotes.read_again([commit.bucket])
            leader = self._remotes.image.leader(commit.bucket)
            if leader is None:
                raise gone(self._remotes.image.name_of(commit.bucket))
            check_locations(self._storage, (commit.manifest_location, *commit.usage))
            before = self._remotes.get(commit.bucket).manifest
            new = ManifestRecord(
                commit.manifest_location,
                commit.manifest_path,
                commit.start_offset,
                commit.end_offset,
                dict(commit.usage),
            )
            if before == new:
                return True
            if leader[1] != commit.leader_epoch or _path(before) != commit.base_manifest_path:
                _refused(commit, leader[1], before)
                return False
            check_moves(self._storage, commit.locations_version)

            def with_manifest(record: BucketRecord) -> BucketRecord:
                return replace(record, manifest=new)

            await self._remotes.change(commit.bucket, with_manifest)
        return True

    def manifests(
        self, table_id: int, partition_id: int | None
    ) -> list[tuple[TableBucket, ManifestRecord]]:
        """The manifests of a table or partition, by bucket."""
        buckets = self._remotes.of_owner(table_id, partition_id)
        return [(b, record.manifest) for b, record in buckets if record.manifest is not None]

    async def _check_end(self, commit: ManifestCommit) -> None:
        """`OffsetOutOfRangeError` if the present leader has less than the manifest claims.

        A former leader may know of more; its commit is refused for its epoch.
        """
        image, bucket = self._remotes.image, commit.bucket
        leader, known = image.leader(bucket), self._remotes.get(bucket).manifest
        if leader is not None and leader[1] == commit.leader_epoch:
            end = 0 if known is None else known.end_offset
            await check_reached(image, self._tablets, bucket, end, commit.end_offset, "a manifest")

    def _check(self, commit: ManifestCommit) -> None:
        """`ConfigError` unless the commit names a manifest file of its bucket."""
        name = check_name(self._remotes.image, layout.LOG, commit.bucket, commit.manifest_path)
        if name.segment_id is not None:
            raise ConfigError(f"{commit.manifest_path!r:.300} is a segment's file, not a manifest")
        if not 0 <= commit.start_offset <= commit.end_offset:
            raise ConfigError(
                f"a manifest of {commit.bucket} from offset {commit.start_offset} to "
                f"{commit.end_offset} is not allowed; give offsets from 0 on, in order"
            )
        if any(used.files < 0 or used.bytes < 0 for used in commit.usage.values()):
            raise ConfigError(f"a manifest of {commit.bucket} refers to a negative number of files")


def _path(manifest: ManifestRecord | None) -> str | None:
    return None if manifest is None else manifest.path


def _refused(commit: ManifestCommit, leader_epoch: int, before: ManifestRecord | None) -> None:
    log.warning(
        "manifest_refused",
        bucket=str(commit.bucket),
        leader_epoch=commit.leader_epoch,
        current_leader_epoch=leader_epoch,
        base=commit.base_manifest_path,
        current=_path(before),
    )
