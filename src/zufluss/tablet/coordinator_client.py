"""What a tablet server that runs on its own asks its coordinator.

The tablet server's `RemoteGateway` (`cluster/remote.py`), and its source of writer ids and of ids
for auto-increment columns. `link.py` registers the server through the same connection and notes the
coordinator's epoch here, which commits carry.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from zufluss.cluster.remote import (
    BucketRemote,
    ManifestCommit,
    commit_to_proto,
    remote_from_proto,
)
from zufluss.cluster.replicas import RpcCaller
from zufluss.cluster.wal import (
    ReleasedBucket,
    StandbyReport,
    Takeover,
    WalSession,
    released_to_proto,
    report_to_proto,
    session_to_proto,
    takeover_to_proto,
)
from zufluss.errors import ErrorCode, LakeSnapshotNotExistError, NetworkError, ZuflussError
from zufluss.model.table import TableBucket, TablePath
from zufluss.wire import messages as m
from zufluss.wire.api import ApiKey
from zufluss.wire.tables import bucket_from_proto, bucket_key, bucket_to_proto, path_to_proto

CALL_TIMEOUT_MS = 30_000
"""How long the coordinator may take for an answer."""
BUCKETS_PER_REQUEST_MAX = 10_000
"""Buckets in one question to the coordinator; more are asked in several."""
NOT_REGISTERED = -1


class CoordinatorClient:
    """Calls the coordinator over the connection that `connect` returns."""

    def __init__(self, connect: Callable[[], Awaitable[RpcCaller]]) -> None:
        self._connect = connect
        self.epoch = NOT_REGISTERED
        """The epoch of the coordinator that this server is registered with."""

    async def call(self, api_key: ApiKey, request: Any) -> Any:
        """Send a request and return the answer.

        `NetworkError`, as if there were no coordinator, while it does not lead yet or any more.
        """
        connection = await self._connect()
        try:
            return await connection.call(api_key, request, timeout_ms=CALL_TIMEOUT_MS)
        except ZuflussError as problem:
            if problem.code is not ErrorCode.NOT_COORDINATOR_LEADER_EXCEPTION:
                raise
            raise NetworkError(problem.message) from problem

    async def allocate_writer_ids(self, count: int) -> range:
        """A range of writer ids from the coordinator."""
        answer = await self.call(
            ApiKey.ALLOCATE_WRITER_IDS, m.AllocateWriterIdsRequest(count=count)
        )
        return range(answer.first_writer_id, answer.first_writer_id + answer.count)

    async def allocate_ids(self, table_id: int, column_id: int, count: int) -> tuple[int, int]:
        """Ids of an auto-increment column from the coordinator: the first, one after the last."""
        answer = await self.call(
            ApiKey.ALLOCATE_IDS,
            m.AllocateIdsRequest(table_id=table_id, column_id=column_id, count=count),
        )
        return answer.start, answer.end

    # -- RemoteGateway --------------------------------------------------------------------------

    async def bucket_remotes(
        self, buckets: Sequence[TableBucket]
    ) -> dict[TableBucket, BucketRemote]:
        """What buckets have in remote storage."""
        remotes: dict[TableBucket, BucketRemote] = {}
        for at in range(0, len(buckets), BUCKETS_PER_REQUEST_MAX):
            some = buckets[at : at + BUCKETS_PER_REQUEST_MAX]
            request = m.GetBucketRemotesRequest(buckets=map(bucket_to_proto, some))
            answer = await self.call(ApiKey.GET_BUCKET_REMOTES, request)
            remotes |= {r.bucket: r for r in map(remote_from_proto, answer.remotes)}
        return remotes

    async def commit_manifest(self, commit: ManifestCommit) -> bool:
        """Make the manifest of a remote log count."""
        request = commit_to_proto(commit, self.epoch)
        answer = await self.call(ApiKey.COMMIT_REMOTE_LOG_MANIFEST, request)
        return bool(answer.commitSuccess)

    async def commit_snapshot(
        self, metadata: bytes, leader_epoch: int, locations_version: int = 0
    ) -> None:
        """Make a key-value snapshot count."""
        request = m.CommitKvSnapshotRequest(
            completed_snapshot=metadata,
            coordinator_epoch=self.epoch,
            bucket_leader_epoch=leader_epoch,
            locations_version=locations_version,
        )
        await self.call(ApiKey.COMMIT_KV_SNAPSHOT, request)

    async def lake_offset(self, path: TablePath, bucket: TableBucket) -> int:
        """Below it the lake has everything of a bucket; 0 where it has nothing."""
        request = m.GetLakeSnapshotRequest(table_path=path_to_proto(path))
        try:
            answer = await self.call(ApiKey.GET_LAKE_SNAPSHOT, request)
        except LakeSnapshotNotExistError:
            return 0
        for entry in answer.bucket_snapshots:
            if bucket_key(entry) == bucket[1:]:
                return int(entry.log_offset)
        return 0

    async def commit_takeovers(
        self, session: WalSession, takeovers: Sequence[Takeover]
    ) -> set[TableBucket]:
        """Note that a session of the shared log has the end of buckets; returns which of them."""
        committed: set[TableBucket] = set()
        for at in range(0, len(takeovers), BUCKETS_PER_REQUEST_MAX):
            request = m.CommitTakeoversRequest(
                coordinator_epoch=self.epoch,
                session=session_to_proto(session),
                takeovers=map(takeover_to_proto, takeovers[at : at + BUCKETS_PER_REQUEST_MAX]),
            )
            answer = await self.call(ApiKey.COMMIT_TAKEOVERS, request)
            committed.update(map(bucket_from_proto, answer.committed))
        return committed

    async def report_standbys(self, session: WalSession, reports: Sequence[StandbyReport]) -> None:
        """Note which standbys of this server have caught up, and which have not."""
        for at in range(0, len(reports), BUCKETS_PER_REQUEST_MAX):
            request = m.ReportStandbysRequest(
                coordinator_epoch=self.epoch,
                session=session_to_proto(session),
                reports=map(report_to_proto, reports[at : at + BUCKETS_PER_REQUEST_MAX]),
            )
            await self.call(ApiKey.REPORT_STANDBYS, request)

    async def commit_wal_floor(self, session: WalSession, floor: int) -> None:
        """Note that objects of a session below a number are not needed any more."""
        request = m.CommitWalFloorRequest(
            coordinator_epoch=self.epoch, session=session_to_proto(session), floor=floor
        )
        await self.call(ApiKey.COMMIT_WAL_FLOOR, request)

    async def report_released(
        self, session: WalSession, released: Sequence[ReleasedBucket]
    ) -> set[TableBucket]:
        """Buckets that a session has released; returns those that do not need it any more."""
        request = m.ReportReleasedRequest(
            coordinator_epoch=self.epoch,
            session=session_to_proto(session),
            buckets=map(released_to_proto, released),
        )
        answer = await self.call(ApiKey.REPORT_RELEASED, request)
        return set(map(bucket_from_proto, answer.adopted))
