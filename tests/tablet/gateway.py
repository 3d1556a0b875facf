"""The coordinator's side of remote storage for tests of a tablet server: what counts, in memory."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from zufluss.cluster.remote import BucketRemote, ManifestCommit, SnapshotHandle, metadata_file
from zufluss.cluster.wal import ReleasedBucket, WalSession
from zufluss.errors import NetworkError
from zufluss.model.table import TableBucket, TablePath
from zufluss.remote.snapshot import KvSnapshot


class Gateway:
    """A `RemoteGateway` that outlives the tablet servers of a test, and can fail in each way."""

    def __init__(self, retained: int = 2) -> None:
        self.retained = retained
        """Snapshots that are kept of a bucket."""
        self.remotes: dict[TableBucket, BucketRemote] = {}
        """What counts."""
        self.commits: list[ManifestCommit] = []
        """Manifests that came to count."""
        self.snapshots: list[KvSnapshot] = []
        """Snapshots that came to count."""
        self.leader_epoch = 0
        """Commits of earlier leaders are refused."""
        self.lose_request = 0
        """So many commits do not arrive."""
        self.lose_answer = 0
        """So many commits count, and nobody hears of it."""
        self.silent = False
        """Questions are not answered."""
        self.lake_offsets: dict[TableBucket, int] = {}
        """Below these the lake has everything."""
        self.before_commit: Callable[[], object] = lambda: None
        """Called when a commit arrives."""

    async def bucket_remotes(
        self, buckets: Sequence[TableBucket]
    ) -> dict[TableBucket, BucketRemote]:
        if self.silent:
            raise NetworkError("the coordinator does not answer")
        return {b: self.remotes[b] for b in buckets if b in self.remotes}

    async def commit_manifest(self, commit: ManifestCommit) -> bool:
        self._arrive()
        before = self._remote(commit.bucket)
        if commit.leader_epoch < self.leader_epoch:
            return False
        if before.manifest_path != commit.base_manifest_path:
            return False
        self.remotes[commit.bucket] = replace(
            before,
            manifest_location=commit.manifest_location,
            manifest_path=commit.manifest_path,
            remote_start_offset=commit.start_offset,
            remote_end_offset=commit.end_offset,
        )
        self.commits.append(commit)
        self._answer()
        return True

    async def commit_snapshot(
        self, metadata: bytes, leader_epoch: int, locations_version: int = 0
    ) -> None:
        self._arrive()
        snapshot = KvSnapshot.from_json(metadata)
        before = self._remote(snapshot.bucket)
        assert snapshot.snapshot_id >= before.next_snapshot_id
        handle = SnapshotHandle(snapshot.snapshot_id, snapshot.log_offset, *metadata_file(snapshot))
        self.remotes[snapshot.bucket] = replace(
            before,
            next_snapshot_id=snapshot.snapshot_id + 1,
            snapshots=(*before.snapshots, handle)[-self.retained :],
        )
        self.snapshots.append(snapshot)
        self._answer()

    async def lake_offset(self, path: TablePath, bucket: TableBucket) -> int:
        return self.lake_offsets.get(bucket, 0)

    def _remote(self, bucket: TableBucket) -> BucketRemote:
        return self.remotes.get(bucket, BucketRemote(bucket))

    async def report_released(
        self, session: WalSession, released: Sequence[ReleasedBucket]
    ) -> set[TableBucket]:
        return set()

    def _arrive(self) -> None:
        self.before_commit()
        if self.lose_request:
            self.lose_request -= 1
            raise NetworkError("the connection broke before the request was sent")

    def _answer(self) -> None:
        if self.lose_answer:
            self.lose_answer -= 1
            raise NetworkError("the connection broke before the answer came")
