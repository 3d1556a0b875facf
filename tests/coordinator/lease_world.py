"""Leases over a real store, with buckets whose snapshots are only rows in it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from tests.coordinator.remotes import KEYED, keyed_json
from tests.coordinator.support import NOON, Clock, Seconds, table_json
from zufluss.cluster.image import (
    BucketState,
    ClusterImage,
    PartitionEntry,
    PartitionPut,
    TableEntry,
    TablePut,
)
from zufluss.cluster.remote import SnapshotHandle
from zufluss.config import options
from zufluss.config.load import Configuration
from zufluss.coordinator import records
from zufluss.coordinator.bucket_remotes import BucketRecord, BucketRemotes
from zufluss.coordinator.feed import Feed
from zufluss.coordinator.leases.book import LeaseBook
from zufluss.coordinator.leases.calls import LeaseCalls
from zufluss.coordinator.leases.timer import LeaseTimer
from zufluss.coordinator.ledger import Ledger
from zufluss.coordinator.ownership import IsSuper
from zufluss.coordinator.remote.kv_snapshots import retained
from zufluss.meta.api import Op
from zufluss.meta.embedded import EmbeddedStore
from zufluss.model.table import TableBucket, TableDescriptor, TableInfo, TablePath

HOUR_MS = 3_600_000
TABLE = 1
DAILY = 2
LOGS = 3
"""Ids of a keyed table, a keyed one with partitions 20 and 21, and a log table."""
RETAINED = 2


def nobody(principal: str | None) -> bool:
    """There are no super users."""
    return False


class LeaseWorld:
    """The leases of one coordinator, and the buckets that they pin."""

    def __init__(
        self, directory: Path, conf: Mapping[str, str], buckets: int, is_super: IsSuper
    ) -> None:
        self.directory = directory
        self.conf = Configuration.of(dict(conf))
        self.buckets = [TableBucket(TABLE, None, i) for i in range(buckets)]
        self.daily = [TableBucket(DAILY, p, i) for p in (20, 21) for i in range(2)]
        self.is_super = is_super
        self.seconds = Seconds()
        self.clock: Callable[[], float] = self.seconds
        self.wall = Clock()
        self.freed: list[TableBucket] = []
        self.freed_feed: Feed[Sequence[TableBucket]] = Feed()
        self.freed_feed.subscribe(self.freed.extend)

    @classmethod
    async def start(
        cls,
        directory: Path,
        conf: Mapping[str, str] | None = None,
        *,
        buckets: int = 4,
        is_super: IsSuper = nobody,
        clock: Callable[[], float] | None = None,
    ) -> LeaseWorld:
        """A new store with tables whose buckets have nothing yet."""
        self = cls(directory, conf or {}, buckets, is_super)
        self.clock = clock or self.seconds
        await self._open()
        made = [records.create_bucket_remote(b) for b in (*self.buckets, *self.daily)]
        await self.commit(made)
        await self.open_leases()
        return self

    async def _open(self) -> None:
        self.store = await EmbeddedStore.open(self.directory)
        self.ledger = await Ledger.open(self.store)
        self.image = ClusterImage()
        self.image.apply(_tables(len(self.buckets)))
        self.remotes = BucketRemotes(self.image, self.ledger)

    async def open_leases(self) -> None:
        """Read the leases from the store."""
        book = await LeaseBook.open(
            self.store,
            self.remotes,
            self.freed_feed,
            self.conf,
            clock=self.clock,
            clock_ms=self.wall,
        )
        self.leases = LeaseCalls(
            book,
            self.remotes,
            self.conf,
            is_super=self.is_super,
            clock=self.clock,
            clock_ms=self.wall,
        )
        interval_ms = self.conf.get(options.KV_SNAPSHOT_LEASE_EXPIRATION_CHECK_INTERVAL)
        self.timer = LeaseTimer(book, self.clock, interval_ms / 1000)

    async def restart(self, *, away_seconds: float = 0) -> None:
        """Close the store without a stop, and start again with another monotonic clock."""
        buckets = dict(self.remotes.items())
        await self.store.close()
        self.wall.now_ms += int(away_seconds * 1000)
        self.seconds.now = 5.0
        await self._open()
        await self.set(buckets)
        await self.open_leases()

    async def close(self) -> None:
        await self.leases.book.tasks.settle()
        await self.remotes.tasks.settle()
        await self.store.close()

    async def commit(self, ops: Sequence[Op]) -> None:
        for at in range(0, len(ops), 10_000):
            await self.ledger.commit(ops[at : at + 10_000])

    async def set(self, wanted: Mapping[TableBucket, BucketRecord]) -> None:
        todo = list(wanted)
        for at in range(0, len(todo), 10_000):
            async with self.remotes.turn:
                some = todo[at : at + 10_000]
                await self.remotes.change_all(some, lambda bucket, _: wanted[bucket])

    async def take(
        self, buckets: Iterable[TableBucket], snapshot_id: int, *, size: int = 100
    ) -> None:
        """Add a snapshot to buckets, and drop the snapshots that are no longer kept."""
        handle = SnapshotHandle(snapshot_id, 10 * snapshot_id, 1 + snapshot_id % 2, "kv", size)
        await self.set({b: self._with(b, handle) for b in buckets})

    def _with(self, bucket: TableBucket, handle: SnapshotHandle) -> BucketRecord:
        record = self.remotes.get(bucket)
        kept, _ = retained(
            (*record.snapshots, handle), RETAINED, lambda i: self.leases.book.pins.pinned(bucket, i)
        )
        return replace(record, next_snapshot_id=handle.snapshot_id + 1, snapshots=kept)

    def kept(self, bucket: TableBucket) -> list[int]:
        """The snapshots of a bucket."""
        return [s.snapshot_id for s in self.remotes.get(bucket).snapshots]

    async def stored(self) -> dict[str, bytes]:
        """Everything of leases in the store."""
        return {entry.path: entry.value for entry in await self.store.tree(records.LEASES_PATH)}


def _tables(buckets: int) -> list[TablePut | PartitionPut]:
    state = BucketState((1,), 1)
    daily = _table(DAILY, TablePath("fluss", "daily"), keyed_json(("d",), 2))
    return [
        TablePut(_table(TABLE, KEYED, keyed_json(buckets=buckets), (state,) * buckets)),
        TablePut(daily),
        *(
            PartitionPut(PartitionEntry(i, DAILY, f"d{i}", {"d": f"d{i}"}, NOON, (state,) * 2))
            for i in (20, 21)
        ),
        TablePut(_table(LOGS, TablePath("fluss", "logs"), table_json(), (state,))),
    ]


def _table(
    table_id: int, path: TablePath, descriptor: bytes, states: tuple[BucketState, ...] = ()
) -> TableEntry:
    made = TableDescriptor.from_json(descriptor)
    return TableEntry(TableInfo(path, table_id, 1, made, NOON, NOON), {1: made.schema}, states)
