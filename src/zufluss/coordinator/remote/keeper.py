"""The remote files of the cluster: the parts of the coordinator that handle them.

| part | what |
|---|---|
| `bucket_remotes.py` | which documents of a bucket are valid, durable |
| `remote/manifests.py` | commits of manifests |
| `remote/kv_snapshots.py` | commits of key-value snapshots, retention |
| `remote/cleaner.py` | deletes the files of dropped tables and partitions |
| `remote/sweep.py` | deletes files that no document refers to |
| `remote/service.py`, `leases/service.py` | the handlers |

In one process with both roles this is the tablet server's `RemoteGateway`.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence

from zufluss.cluster.image import ImageChange
from zufluss.cluster.remote import BucketRemote, ManifestCommit, WalCommits
from zufluss.cluster.wal import ReleasedBucket, StandbyReport, Takeover, WalSession
from zufluss.config import options
from zufluss.config.load import Configuration
from zufluss.coordinator.bucket_remotes import BucketRemotes
from zufluss.coordinator.feed import Feed
from zufluss.coordinator.leases.book import LeaseBook
from zufluss.coordinator.leases.holds import LeaseHolds
from zufluss.coordinator.remote.cleaner import Cleaner
from zufluss.coordinator.remote.held_drops import HeldDrops
from zufluss.coordinator.remote.kv_snapshots import KvSnapshots
from zufluss.coordinator.remote.manifests import LogManifests
from zufluss.coordinator.remote.service import RemoteService
from zufluss.coordinator.remote.sweep import Sweep
from zufluss.coordinator.tablets import Tablets
from zufluss.errors import ConfigError
from zufluss.meta.api import MetaStore
from zufluss.model.table import TableBucket, TablePath
from zufluss.remote.storage import RemoteStorage


class RemoteKeeper:
    """Remote logs and snapshots of all buckets, and the deletion of unneeded files."""

    def __init__(
        self,
        conf: Configuration,
        store: MetaStore,
        changes: Feed[Sequence[ImageChange]],
        freed: Feed[Sequence[TableBucket]],
        tablets: Tablets,
        remotes: BucketRemotes,
        storage: RemoteStorage,
        leases: LeaseBook,
        holds: LeaseHolds,
        held: HeldDrops,
        *,
        drops_over: Callable[[], Awaitable[None]],
        lake_offset: Callable[[TablePath, TableBucket], Awaitable[int]],
        clock_ms: Callable[[], int],
        reach: Callable[[str], None],
        wal: WalCommits | None = None,
    ) -> None:
        """`drops_over` waits for drops of the catalog; `lake_offset` is `LakeTables.offset`."""
        self.remotes = remotes
        self.logs = LogManifests(remotes, storage, tablets)
        self.snapshots = KvSnapshots(
            remotes,
            storage,
            tablets,
            freed,
            conf.get(options.KV_SNAPSHOT_NUM_RETAINED),
            leases.pins.pinned,
            clock_ms,
            reach,
        )
        self.cleaner = Cleaner(
            store, remotes.ledger, changes, freed, storage, holds, held, drops_over, reach
        )
        self.sweep = Sweep(
            store,
            remotes,
            self.snapshots,
            storage,
            leases.pins.holds,
            clock_ms,
            reach,
            interval_ms=conf.get(options.ZUFLUSS_REMOTE_SWEEP_INTERVAL),
            grace_ms=conf.get(options.ZUFLUSS_REMOTE_SWEEP_GRACE),
        )
        self._leases = leases
        self._storage = storage
        self._lake_offset = lake_offset
        self._wal = wal

    async def start(self) -> None:
        """Go on with deletions of before, and sweep from now on."""
        self.snapshots.start()
        await self.cleaner.start()
        self.sweep.start()

    async def stop(self) -> None:
        """Stop deleting; the next start goes on."""
        await self.sweep.stop()
        await self.cleaner.stop()
        await self.snapshots.stop()
        await self.remotes.tasks.settle()

    def service(self) -> RemoteService:
        """The handlers of the APIs about remote files."""
        return RemoteService(
            self.remotes, self.logs, self.snapshots, self._leases, self.cleaner, self._storage
        )

    # RemoteGateway

    async def bucket_remotes(
        self, buckets: Sequence[TableBucket]
    ) -> dict[TableBucket, BucketRemote]:
        """The remote side of buckets, without those that never had any remote files."""
        return await self.remotes.bucket_remotes(buckets)

    async def commit_manifest(self, commit: ManifestCommit) -> bool:
        """Commit a manifest; False, without a change, for a former leader or an old base."""
        return await self.logs.commit(commit)

    async def commit_snapshot(
        self, metadata: bytes, leader_epoch: int, locations_version: int = 0
    ) -> None:
        """Commit a snapshot, given as the bytes of its `_METADATA`."""
        await self.snapshots.commit(metadata, leader_epoch, locations_version)

    async def lake_offset(self, path: TablePath, bucket: TableBucket) -> int:
        """The offset up to which the lake has all rows of a bucket; 0 where it has none."""
        return await self._lake_offset(path, bucket)

    async def commit_takeovers(
        self, session: WalSession, takeovers: Sequence[Takeover]
    ) -> set[TableBucket]:
        """Note that a session of the shared log has the end of buckets; returns which of them."""
        return await self._shared_log().commit_takeovers(session, takeovers)

    async def report_standbys(self, session: WalSession, reports: Sequence[StandbyReport]) -> None:
        """Note which standbys of a server have caught up, and which have not."""
        await self._shared_log().report_standbys(session, reports)

    async def commit_wal_floor(self, session: WalSession, floor: int) -> None:
        """Note that objects of a session below a number are not needed any more."""
        await self._shared_log().commit_wal_floor(session, floor)

    async def report_released(
        self, session: WalSession, released: Sequence[ReleasedBucket]
    ) -> set[TableBucket]:
        """Buckets that a session has released; returns those that do not need it any more."""
        return await self._shared_log().report_released(session, released)

    def _shared_log(self) -> WalCommits:
        if self._wal is None:
            raise ConfigError(
                f"{options.ZUFLUSS_LOG_DURABILITY.key} of this cluster is local, so it has no "
                "shared log"
            )
        return self._wal
