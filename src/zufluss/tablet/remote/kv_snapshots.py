"""Key-value snapshots: the state of buckets, copied to remote storage at intervals.

    checkpoint (hard links) → new table files → the other files, writers → `_METADATA` → commit

Table files never change, so a file of the last snapshot is not sent again: the new snapshot refers
to the copy in remote storage. A file is the same if name and size are equal; after a start, when
the database may be another one, its checksum is compared as well. A file in a location that is
being drained is sent again, which is how a location drains. Therefore a bucket without writes gets
snapshots, too, until no retained snapshot refers to the location.

A snapshot is valid from its commit on. Files of a failed attempt are used by the next attempt if it
comes soon, and the registry of locations is still the same; the sweep removes the rest. Each
attempt has a number of its own. When the outcome of a commit is unknown, the coordinator is asked
before the next attempt.

The buckets are spread over the interval. A failure is logged and concerns no other bucket.
"""

from __future__ import annotations

import asyncio
import uuid
from collections import deque
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Final, NamedTuple

import structlog
from crc32c import crc32c

from zufluss.cluster.remote import SnapshotHandle
from zufluss.config import options
from zufluss.config.load import Configuration
from zufluss.errors import CorruptRecordError, ZuflussError
from zufluss.kv.cold.checkpoint import Checkpoint
from zufluss.model.table import TableBucket
from zufluss.periodic import repeat
from zufluss.remote.errors import RemoteStorageError
from zufluss.remote.files import RemoteFile
from zufluss.remote.layout import (
    KV,
    METADATA_NAME,
    bucket_directory,
    new_shared_file,
    snapshot_directory,
)
from zufluss.remote.locations import AdminState, UnknownLocationError
from zufluss.remote.placement import Policy, Spread
from zufluss.remote.snapshot import METADATA_BYTES_MAX, IdRange, KvSnapshot, SnapshotFile
from zufluss.remote.storage import NoLocationError, RemoteStorage, Upload
from zufluss.replica.kv_host import KvHost
from zufluss.replica.replica import Replica
from zufluss.tablet.remote.context import RemoteContext
from zufluss.tasks import together

log = structlog.get_logger(__name__)

BUCKETS_AT_ONCE: Final = 4
"""Buckets that are being copied at the same time."""
TICKS: Final = 50
"""How often in an interval the buckets are checked, within `TICK_SECONDS`."""
TICK_SECONDS: Final = (0.01, 5.0)
"""Shortest and longest time between two checks."""
METADATA_TRIES: Final = 2
"""Attempts to send the small files of a snapshot when a location fails."""
FILES_READ_AT_ONCE: Final = 2
"""Table files whose checksums are computed at the same time."""
READ_BYTES: Final = 1 << 20
"""Bytes of a table file that are read at a time."""


class StoredTableFile(NamedTuple):
    """A table file in remote storage."""

    file: RemoteFile
    checked: bool
    """The file was compared with the local file of that name."""
    since: float | None
    """When the file was sent; None once a committed snapshot refers to it."""
    locations_version: int = 0
    """The version of the registry of locations under which the file was sent, until then."""


class BucketSnapshots:
    """The snapshots of one bucket, as far as this server knows them."""

    def __init__(self, bucket: TableBucket, retained: int) -> None:
        self.turn = asyncio.Lock()
        """Held while a snapshot is taken."""
        self.phase = crc32c(repr(bucket).encode()) / 2**32
        """The place of the bucket in the interval."""
        self.period: int | None = None
        """The interval of the last check."""
        self.known = False
        """The coordinator was asked, and every commit since then has a known outcome."""
        self.next_id = 0
        self.log_offset: int | None = None
        """Log offset of the last snapshot, None if there is none that can be read."""
        self.sent: dict[str, StoredTableFile] = {}
        """Table files by name that need not be sent again."""
        self.locations: deque[frozenset[int]] = deque(maxlen=retained)
        """Locations of the files of the retained snapshots."""

    def due(self, seconds: float, interval: float) -> bool:
        """Whether a new interval has begun for this bucket since the last call."""
        period = int(seconds / interval + self.phase)
        begun = self.period is not None and period != self.period
        self.period = period
        return begun

    def committed(self, snapshot: KvSnapshot) -> None:
        """Note that this snapshot was committed."""
        self.next_id = max(self.next_id, snapshot.snapshot_id + 1)
        self.log_offset = snapshot.log_offset
        self.locations.append(locations_of(snapshot))
        self.sent = {f.name: StoredTableFile(f.file, True, None) for f in snapshot.shared}


def locations_of(snapshot: KvSnapshot) -> frozenset[int]:
    """Locations of the files of a snapshot."""
    return frozenset(file.location_id for file in snapshot.objects)


class KvSnapshotter:
    """Takes the snapshots of all buckets of a server. Belongs to the event loop."""

    def __init__(self, conf: Configuration, context: RemoteContext, kv: KvHost) -> None:
        self._context = context
        self._storage = context.storage
        self._kv = kv
        self._loop = asyncio.get_running_loop()
        self._conf = conf
        self._interval = self._configured_interval()
        self._retained = conf.get(options.KV_SNAPSHOT_NUM_RETAINED)
        self._reusable_seconds = conf.get(options.ZUFLUSS_REMOTE_SWEEP_GRACE) / 2000
        self._buckets: dict[TableBucket, BucketSnapshots] = {}
        self._at_once = asyncio.Semaphore(BUCKETS_AT_ONCE)
        self._reading = asyncio.Semaphore(FILES_READ_AT_ONCE)
        self._tasks: dict[TableBucket, asyncio.Task[None]] = {}
        self._timer: asyncio.Task[None] | None = None

    # -- life ---------------------------------------------------------------------------------

    def start(self) -> None:
        """Take snapshots from now on, until `stop`."""
        if self._timer is None:
            low, high = TICK_SECONDS
            tick = min(max(self._interval / TICKS, low), high)
            work = repeat(tick, self._begin_due, "kv_snapshots_not_begun")
            self._timer = self._loop.create_task(work)

    def retime(self) -> None:
        """Follow the interval if it was changed; the buckets are spread over the new one."""
        interval = self._configured_interval()
        if interval == self._interval:
            return
        log.info("kv_snapshots_retimed", seconds=interval, before=self._interval)
        self._interval = interval
        for bucket in self._buckets.values():
            bucket.period = None
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
            self.start()

    def _configured_interval(self) -> float:
        return self._conf.get(options.KV_SNAPSHOT_INTERVAL) / 1000

    async def stop(self) -> None:
        """Cancel the snapshots under way; the next start removes their local files."""
        tasks = [*self._tasks.values(), *([self._timer] if self._timer else ())]
        self._timer = None
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def closed(self, replica: Replica) -> None:
        """A bucket was closed: end its snapshot."""
        self._buckets.pop(replica.bucket, None)
        task = self._tasks.get(replica.bucket)
        if task is not None:
            task.cancel()

    def ask_again(self) -> None:
        """Have the coordinator asked again before the next snapshots."""
        for bucket in self._buckets.values():
            bucket.known = False

    def _begin_due(self) -> None:
        now = self._loop.time()
        for replica in self._context.buckets.replicas():
            if replica.kv is not None and self._bucket(replica).due(now, self._interval):
                self._begin(replica)

    def _bucket(self, replica: Replica) -> BucketSnapshots:
        bucket = self._buckets.get(replica.bucket)
        if bucket is None:
            bucket = BucketSnapshots(replica.bucket, self._retained)
            self._buckets[replica.bucket] = bucket
        return bucket

    def _begin(self, replica: Replica) -> None:
        bucket = replica.bucket
        if bucket not in self._tasks:
            task = self._loop.create_task(self._quietly(replica))
            self._tasks[bucket] = task
            task.add_done_callback(lambda _: self._tasks.pop(bucket, None))

    async def _quietly(self, replica: Replica) -> None:
        """Take a snapshot; a failure is logged and the next interval tries again."""
        try:
            async with self._at_once:
                await self.snapshot(replica)
        except (ZuflussError, OSError) as e:
            log.warning("kv_snapshot_failed", bucket=str(replica.bucket), error=str(e))
        except Exception:
            log.exception("kv_snapshot_failed", bucket=str(replica.bucket))

    # -- one snapshot -------------------------------------------------------------------------

    def reached(self, replica: Replica, offset: int) -> bool:
        """Whether the last snapshot of a bucket has all changes before an offset."""
        last = self._bucket(replica).log_offset
        return last is not None and last >= offset

    async def now(self, replica: Replica) -> KvSnapshot | None:
        """Take a snapshot of a bucket when it is its turn, as `snapshot` does."""
        async with self._at_once:
            return await self.snapshot(replica)

    async def snapshot(self, replica: Replica) -> KvSnapshot | None:
        """Take a snapshot of a bucket now; None if none is needed.

        Raises why it could not be taken; the last snapshot stays valid.
        """
        bucket = self._bucket(replica)
        async with bucket.turn:
            if not bucket.known:
                await self._ask(replica, bucket)
            if not self._needed(replica, bucket):
                return None
            try:
                checkpoint = await self._kv.checkpoint(replica)
                taken = await self._copy(replica, bucket, checkpoint)
            except Exception:
                await self._kv.remove_checkpoint(replica)
                raise
            await self._kv.remove_checkpoint(replica)
            return taken

    def _needed(self, replica: Replica, bucket: BucketSnapshots) -> bool:
        """Whether the state changed since the last snapshot, or a location is being drained."""
        if replica.failure is not None or replica.tablet.failure is not None:
            return False
        end = replica.log.high_watermark
        if bucket.log_offset is None:
            return end > 0
        return end > bucket.log_offset or any(
            map(self._draining, frozenset().union(*bucket.locations))
        )

    def _draining(self, location_id: int) -> bool:
        try:
            location = self._storage.locations.get(location_id)
        except UnknownLocationError:
            return True
        return location.state is not AdminState.ACTIVE

    async def _ask(self, replica: Replica, bucket: BucketSnapshots) -> None:
        """Ask the coordinator for the retained snapshots and read their metadata."""
        remote = await self._context.bucket_remote(replica.bucket)
        snapshots = [await self._read(handle) for handle in remote.snapshots]
        pending = {name: sent for name, sent in bucket.sent.items() if sent.since is not None}
        last = snapshots[-1] if snapshots else None
        bucket.next_id = max(bucket.next_id, remote.next_snapshot_id)
        bucket.log_offset = None if last is None else last.log_offset
        bucket.locations.clear()
        bucket.locations.extend(locations_of(s) for s in snapshots if s is not None)
        bucket.sent = pending
        if last is not None:
            bucket.sent |= {f.name: StoredTableFile(f.file, False, None) for f in last.shared}
        bucket.known = True

    async def _read(self, handle: SnapshotHandle) -> KvSnapshot | None:
        """Read a retained snapshot; None if it cannot be read: the next one sends all files."""
        try:
            return await read_snapshot(self._storage, handle)
        except (RemoteStorageError, CorruptRecordError, UnknownLocationError) as e:
            log.warning("kv_snapshot_not_read", path=handle.metadata_path, error=str(e))
            return None

    async def _copy(
        self, replica: Replica, bucket: BucketSnapshots, checkpoint: Checkpoint
    ) -> KvSnapshot:
        """Send the files that remote storage lacks and commit the snapshot."""
        files = self._context.files
        files.reach("snapshot-checkpoint")
        snapshot_id, bucket.next_id = bucket.next_id, bucket.next_id + 1
        placed = self._placement(replica)
        tables = await asyncio.to_thread(checkpoint.tables)
        shared = await together(self._table_file(placed, bucket, path) for path in tables)
        files.reach("snapshot-uploaded")
        snapshot = KvSnapshot(
            replica.bucket,
            snapshot_id,
            checkpoint.state.flushed_offset,
            tuple(file for file, _ in shared),
            (),
            sum(size for _, size in shared),
            checkpoint.row_count,
            self._id_ranges(replica, checkpoint),
        )
        sent = [file.file.location_id for file, size in shared if size]
        beside = sent[-1] if sent else None
        snapshot, metadata = await self._describe(placed, snapshot, checkpoint, beside)
        files.reach("snapshot-metadata")
        await self._commit(replica, bucket, snapshot, metadata, placed.locations_version)
        files.reach("snapshot-committed")
        log.info(
            "kv_snapshot_taken", bucket=str(replica.bucket), snapshot=snapshot_id,
            log_offset=snapshot.log_offset, files=len(shared), sent=snapshot.incremental_size,
        )  # fmt: skip
        return snapshot

    def _placement(self, replica: Replica) -> Placement:
        bucket, context = replica.bucket, self._context
        directory = bucket_directory(KV, replica.path, bucket)
        version = self._storage.locations.version
        return Placement(context.policy(bucket), context.home(bucket), directory, version)

    def _id_ranges(self, replica: Replica, checkpoint: Checkpoint) -> tuple[IdRange, ...]:
        """Reserved ids in the form of Fluss, whose ranges include their end."""
        table = replica.tablet.table
        if table.auto_increment is None:
            return ()
        column = table.schema.columns[table.auto_increment].id
        return tuple(IdRange(column, start, end - 1) for start, end in checkpoint.ids_left)

    async def _table_file(
        self, placed: Placement, bucket: BucketSnapshots, path: Path
    ) -> tuple[SnapshotFile, int]:
        """A table file in remote storage, sent if needed, and the number of bytes sent."""
        sent, size = bucket.sent.get(path.name), 0
        if sent is None or not await self._is_same(sent, path, placed.locations_version):
            upload = Upload(new_shared_file(placed.directory), path)
            (file,) = await self._storage.upload([upload], placed.policy, placed.home)
            now, version = self._loop.time(), placed.locations_version
            sent, size = StoredTableFile(file, True, now, version), file.size
        bucket.sent[path.name] = sent._replace(checked=True)
        return SnapshotFile(path.name, sent.file), size

    async def _is_same(self, sent: StoredTableFile, path: Path, locations_version: int) -> bool:
        """Whether a sent file equals this one, is safe from the sweep, and is not being drained.

        A file that no snapshot refers to must have been sent under the same registry: if its
        location was moved since, the file may lie at the former address.
        """
        if sent.since is not None and (
            self._loop.time() - sent.since >= self._reusable_seconds
            or sent.locations_version != locations_version
        ):
            return False
        if self._draining(sent.file.location_id) or path.stat().st_size != sent.file.size:
            return False
        return sent.checked or await self._checksum(path) == sent.file.crc32c

    async def _checksum(self, path: Path) -> int:
        async with self._reading:
            return await asyncio.to_thread(_checksum, path)

    async def _describe(
        self, placed: Placement, snapshot: KvSnapshot, checkpoint: Checkpoint, beside: int | None
    ) -> tuple[KvSnapshot, bytes]:
        """Write the small files and `_METADATA`; returns the snapshot with them.

        They lie together, and beside a table file that was just sent: with a turn of their own in
        the round-robin, of two locations one would get all large files and the other all small.
        """
        near = [] if beside is None else [Policy(Spread.PINNED, (beside,))]
        *first, last = [*near, *[placed.policy] * METADATA_TRIES]
        for policy in first:
            try:
                return await self._describe_in(policy, placed, snapshot, checkpoint)
            except NoLocationError as e:
                log.warning("kv_snapshot_elsewhere", bucket=str(snapshot.bucket), error=str(e))
        return await self._describe_in(last, placed, snapshot, checkpoint)

    async def _describe_in(
        self, policy: Policy, placed: Placement, snapshot: KvSnapshot, checkpoint: Checkpoint
    ) -> tuple[KvSnapshot, bytes]:
        storage = self._storage
        directory = snapshot_directory(placed.directory, snapshot.snapshot_id)
        others = checkpoint.others()
        sources: list[Path | bytes] = [*others]
        if checkpoint.writers is not None:
            sources.append(await asyncio.to_thread(checkpoint.writers.to_json))
        units = [Upload(f"{directory}/{uuid.uuid4()}", source) for source in sources]
        files = await storage.upload(units, policy, placed.home)
        whole = _with_private(snapshot, others, files)
        where = files[0].location_id
        full = storage.objects(where).full_path(directory)
        metadata = whole.to_json(full, storage.full_path)
        document = Upload(f"{directory}/{METADATA_NAME}", metadata)
        await storage.upload([document], Policy(Spread.PINNED, (where,)))
        return whole, metadata

    async def _commit(
        self,
        replica: Replica,
        bucket: BucketSnapshots,
        snapshot: KvSnapshot,
        metadata: bytes,
        locations_version: int,
    ) -> None:
        """Commit the snapshot at the coordinator; raises if refused or of unknown outcome."""
        bucket.known = False
        try:
            await self._context.gateway.commit_snapshot(
                metadata, replica.leader_epoch, locations_version
            )
        except ZuflussError:
            remote = await self._context.bucket_remote(replica.bucket)
            if all(h.snapshot_id != snapshot.snapshot_id for h in remote.snapshots):
                raise
        bucket.known = True
        bucket.committed(snapshot)


class Placement(NamedTuple):
    """Placement of the files of a bucket."""

    policy: Policy
    home: int | None
    """The location that was chosen for its table or partition."""
    directory: str
    """Directory of the bucket below the root of each location."""
    locations_version: int
    """The version of the registry of locations when the snapshot was begun."""


async def read_snapshot(storage: RemoteStorage, handle: SnapshotHandle) -> KvSnapshot:
    """Read the `_METADATA` of a snapshot."""
    data = await storage.read_at(
        handle.metadata_location, handle.metadata_path, limit=METADATA_BYTES_MAX
    )
    snapshot = KvSnapshot.from_json(data)
    if (snapshot.snapshot_id, snapshot.log_offset) != (handle.snapshot_id, handle.log_offset):
        raise CorruptRecordError(
            f"{handle.metadata_path} describes snapshot {snapshot.snapshot_id} at offset "
            f"{snapshot.log_offset}, not {handle.snapshot_id} at {handle.log_offset}"
        )
    return snapshot


def _with_private(
    snapshot: KvSnapshot, others: Sequence[Path], files: Sequence[RemoteFile]
) -> KvSnapshot:
    """The snapshot with its private files: those of RocksDB and, if sent, the writers."""
    private = (SnapshotFile(path.name, file) for path, file in zip(others, files, strict=False))
    return replace(
        snapshot,
        private=tuple(private),
        incremental_size=snapshot.incremental_size + sum(file.size for file in files),
        writers=files[-1] if len(files) > len(others) else None,
    )


def _checksum(path: Path) -> int:
    crc = 0
    with path.open("rb", buffering=0) as file:
        while data := file.read(READ_BYTES):
            crc = crc32c(data, crc)
    return crc
