"""The remote copy of one bucket, as `Replica.open` needs it."""

from __future__ import annotations

from zufluss.cluster.remote import BucketRemote
from zufluss.cluster.replicas import ReplicaAssignment
from zufluss.errors import CorruptRecordError
from zufluss.kv.replay import EarlierChangelog
from zufluss.log.config import LogConfig
from zufluss.log.log import Log
from zufluss.replica.replica import Replica
from zufluss.tablet.remote.logs import RemoteLogRunner
from zufluss.tablet.remote.restore import Restorer


class BucketCopy:
    """Implements `replica.RemoteCopy` for one assignment."""

    def __init__(
        self,
        restorer: Restorer,
        remote_logs: RemoteLogRunner,
        assignment: ReplicaAssignment,
        remote: BucketRemote | None,
    ) -> None:
        """`remote` is None for a bucket that never had anything in remote storage."""
        self._restorer = restorer
        self._remote_logs = remote_logs
        self._assignment = assignment
        self._remote = remote

    @property
    def snapshot_offset(self) -> int:
        """The changelog from here on continues the oldest snapshot; 0 without a snapshot."""
        if self._remote is None or not self._remote.snapshots:
            return 0
        return self._remote.snapshots[0].log_offset

    async def open_log(self, config: LogConfig, now_ms: int) -> Log:
        """Open the log, created at the end of its remote part if the disk lost it."""
        path, bucket = self._assignment.physical_path, self._assignment.table_bucket
        logs = self._restorer.logs
        if self._remote is not None:
            await self._restorer.restore_log(path, self._remote)
        if logs.is_closed(bucket):
            return await logs.reopen_log(path, bucket, config, now_ms)
        return logs.open_log(path, bucket, config, now_ms)

    async def restore_state(self, replica: Replica) -> EarlierChangelog | None:
        """Install a snapshot if the disk lost the key-value state."""
        if self._remote is None:
            return None
        return await self._restorer.restore_state(replica, self._remote)

    async def adopt(self, replica: Replica) -> None:
        """Nothing: the disk of this server has the log."""

    async def discard_damaged(self, problem: CorruptRecordError) -> bool:
        """Discard what the disk has, if the bucket can be opened without it; nothing is open.

        Never where the disk is the only one that has it.
        """
        return False

    def attach(self, replica: Replica) -> None:
        """Give an open replica its remote log."""
        self._remote_logs.adopt(replica, self._remote or BucketRemote(replica.bucket))
