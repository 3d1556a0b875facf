"""The remote copy of one bucket, as `Replica.open` needs it."""

from __future__ import annotations

from zufluss.cluster.remote import BucketRemote
from zufluss.cluster.replicas import ReplicaAssignment
from zufluss.kv.replay import EarlierChangelog
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

    async def restore_log(self) -> None:
        """Create the log if the disk lost it."""
        if self._remote is not None:
            await self._restorer.restore_log(self._assignment.physical_path, self._remote)

    async def restore_state(self, replica: Replica) -> EarlierChangelog | None:
        """Install a snapshot if the disk lost the key-value state."""
        if self._remote is None:
            return None
        return await self._restorer.restore_state(replica, self._remote)

    def attach(self, replica: Replica) -> None:
        """Give an open replica its remote log."""
        self._remote_logs.adopt(replica, self._remote or BucketRemote(replica.bucket))
