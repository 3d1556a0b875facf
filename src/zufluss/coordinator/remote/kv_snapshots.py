"""Key-value snapshots of buckets: their commits, their retention, and their deletion.

A tablet server uploads a snapshot, `_METADATA` last, and commits it here. Its id must be new, its
leader the present one, and its offset neither below that of the snapshot before nor above the high
watermark of the changelog; no location may have been moved since its files were uploaded. The same
transaction says which snapshots are kept: the newest `kv.snapshot.num-retained`, and those that
leases pin (`leases/pins.py`). The others are dropped:

| step | durable afterwards |
|---|---|
| commit | the snapshot is kept; others are `dropped`, their files are still there |
| delete | the files of each dropped snapshot that no kept one has, `_METADATA` last |
| forget | the dropped snapshots are removed from the record of the bucket |

After a crash the remaining steps are repeated. Only its `_METADATA` lists the files of a snapshot:
if that of a kept snapshot cannot be read, no file of the bucket is deleted. A dropped snapshot
whose `_METADATA` is missing was deleted before; one with a damaged `_METADATA` is left to the sweep
(`remote/sweep.py`).

A snapshot whose last pin ended is dropped at once, without waiting for the next commit: `free`
takes the buckets, and drops their snapshots many at a time.

After a commit the servers that hold the bucket learn the offset of the oldest kept snapshot,
because the changelog from there on is needed to restore the bucket. A server that joins learns the
offsets of all its buckets.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import islice

import structlog

from zufluss.cluster.image import ClusterImage
from zufluss.cluster.remote import SnapshotHandle, metadata_file
from zufluss.cluster.replicas import KvSnapshotOffset
from zufluss.coordinator.bucket_remotes import BucketRecord, BucketRemotes, gone
from zufluss.coordinator.feed import Feed
from zufluss.coordinator.remote.checks import (
    check_locations,
    check_moves,
    check_name,
    check_reached,
)
from zufluss.coordinator.tablets import Tablets
from zufluss.coordinator.tasks import PendingTasks
from zufluss.coordinator.worklist import WorkList
from zufluss.errors import (
    ConfigError,
    CorruptRecordError,
    ErrorCode,
    KvSnapshotNotExistError,
    NonPrimaryKeyTableError,
    OffsetOutOfRangeError,
    ZuflussError,
    error,
)
from zufluss.model.table import TableBucket
from zufluss.remote import layout
from zufluss.remote.errors import ObjectMissingError
from zufluss.remote.files import RemoteFile, summed, usage
from zufluss.remote.snapshot import METADATA_BYTES_MAX, KvSnapshot
from zufluss.remote.storage import RemoteStorage

log = structlog.get_logger(__name__)

WORKERS = 4
"""Buckets whose dropped snapshots are deleted at the same time."""
FILES_KNOWN_MAX = 50_000
"""Files of snapshots that are remembered; the `_METADATA` of others is read again."""
DROPPED_MAX = 1_000
"""Dropped snapshots of a bucket that may wait for deletion; older ones are left to the sweep."""
RETAINED_AT_ONCE = 500
"""Buckets whose snapshots are dropped in one transaction."""
COUNTING_SECONDS = 5.0
"""How long a commit waits for the file lists of earlier snapshots."""
PARSED_AT_ONCE = 256 * 1024
"""A larger `_METADATA` is parsed in a thread."""

Pinned = Callable[[TableBucket, int], bool]
"""Whether a lease pins a snapshot, so that it is kept."""


class KvSnapshots:
    """The key-value snapshots of all buckets."""

    def __init__(
        self,
        remotes: BucketRemotes,
        storage: RemoteStorage,
        tablets: Tablets,
        freed: Feed[Sequence[TableBucket]],
        retained: int,
        pinned: Pinned,
        clock_ms: Callable[[], int],
        reach: Callable[[str], None],
    ) -> None:
        self.deletions = WorkList("kv_snapshot_deletion", self._delete_dropped, workers=WORKERS)
        """Buckets whose dropped snapshots are being deleted."""
        self.retentions = WorkList("kv_snapshot_retention", self._retain_freed, workers=1)
        """Tables with buckets that leases freed."""
        self._freed: dict[int, set[TableBucket]] = {}
        self._remotes = remotes
        self._image: ClusterImage = remotes.image
        self._storage = storage
        self._tablets = tablets
        self._retained = retained
        self._pinned = pinned
        self._clock_ms = clock_ms
        self._reach = reach
        self._known: OrderedDict[tuple[TableBucket, int], KvSnapshot] = OrderedDict()
        self._files_known = 0
        self._tasks = PendingTasks("kv_snapshot")
        freed.subscribe(self.free)

    def start(self) -> None:
        """Go on with deletions, and drop the snapshots that nobody pins any more."""
        for bucket, record in self._remotes.items():
            if record.dropped or record.kv_rough:
                self.deletions.add(bucket)
            if len(record.snapshots) > self._retained:
                self.free([bucket])
        self.deletions.start()
        self.retentions.start()

    async def stop(self) -> None:
        """Stop deleting, and finish the calls to tablet servers under way."""
        await self.retentions.stop()
        await self.deletions.stop()
        await self._tasks.settle()

    # Commits

    async def commit(self, metadata: bytes, leader_epoch: int, locations_version: int) -> None:
        """Commit a snapshot, given as the bytes of its `_METADATA`; it may be committed again.

        `locations_version` is the registry of locations under which its files were uploaded.
        """
        snapshot = await _parsed(metadata)
        handle = self._checked(snapshot)
        await self._check_end(snapshot, leader_epoch)
        await self._read_kept(snapshot.bucket)
        await self._remotes.tasks.undisturbed(
            self._commit(snapshot, handle, leader_epoch, locations_version)
        )

    async def _read_kept(self, bucket: TableBucket) -> None:
        """Read the files of the kept snapshots, so that the commit counts a shared file once.

        After a start no snapshot is remembered. A location that does not answer holds up no commit:
        the count is then too high, and noted as rough, until `_delete_dropped` counts again.
        """
        try:
            async with asyncio.timeout(COUNTING_SECONDS):
                for handle in self._remotes.get(bucket).snapshots:
                    await self.read(bucket, handle)
        except (ZuflussError, TimeoutError) as problem:
            log.warning("kv_snapshot_files_not_counted", bucket=str(bucket), error=str(problem))

    async def _commit(
        self,
        snapshot: KvSnapshot,
        handle: SnapshotHandle,
        leader_epoch: int,
        locations_version: int,
    ) -> None:
        bucket = snapshot.bucket
        async with self._remotes.turn:
            await self._remotes.read_again([bucket])
            if not self._is_known(snapshot, handle):
                self._check_fence(bucket, leader_epoch)
                check_locations(self._storage, [f.location_id for f in snapshot.objects])
                check_moves(self._storage, locations_version)
                await self._remotes.change(
                    bucket, lambda r: self._with_snapshot(r, snapshot, handle)
                )
                self._remember(snapshot)
        log.info("kv_snapshot_committed", bucket=str(bucket), snapshot_id=snapshot.snapshot_id)
        self._after_change([bucket])  # a known snapshot may have been in doubt until now

    def free(self, buckets: Iterable[TableBucket]) -> None:
        """Drop soon the snapshots of buckets that are no longer pinned."""
        for bucket in buckets:
            self._freed.setdefault(bucket.table_id, set()).add(bucket)
        for table_id in tuple(self._freed):
            self.retentions.add(table_id)

    async def _retain_freed(self, table_id: int) -> None:
        while waiting := self._freed.get(table_id):
            some = set(islice(waiting, RETAINED_AT_ONCE))
            waiting -= some  # before the work: a bucket that is freed meanwhile comes up again
            try:
                await self.retain(some)
            except BaseException:
                waiting |= some
                raise
        self._freed.pop(table_id, None)

    async def retain(self, buckets: Iterable[TableBucket]) -> None:
        """Drop the snapshots of buckets that are neither newest nor pinned."""
        await self._remotes.tasks.undisturbed(self._retain(list(buckets)))

    async def _retain(self, buckets: Sequence[TableBucket]) -> None:
        async with self._remotes.turn:
            there = [b for b in buckets if self._image.leader(b) is not None]
            changed = set(await self._remotes.change_all(there, self._retained_of))
        # Snapshots that were dropped before may have been in doubt until now.
        todo = [b for b in there if b in changed or self._remotes.get(b).dropped]
        if todo:
            self._after_change(todo)

    def _after_change(self, buckets: Sequence[TableBucket]) -> None:
        for bucket in buckets:
            self.deletions.add(bucket)
        self._tasks.later(self._tablets.notify_kv_snapshot_offset(self._offsets(buckets)))

    async def _check_end(self, snapshot: KvSnapshot, leader_epoch: int) -> None:
        """`OffsetOutOfRangeError` if the present leader has less than the snapshot claims."""
        bucket = snapshot.bucket
        leader, record = self._image.leader(bucket), self._remotes.get(bucket)
        if leader is not None and leader[1] == leader_epoch:
            known = record.snapshots[-1].log_offset if record.snapshots else 0
            await check_reached(
                self._image, self._tablets, bucket, known, snapshot.log_offset, "a snapshot"
            )

    def _checked(self, snapshot: KvSnapshot) -> SnapshotHandle:
        """The handle of a snapshot; `ConfigError` unless its files belong to its bucket."""
        bucket = snapshot.bucket
        table = self._image.table_by_id(bucket.table_id)
        if table is None:
            raise gone(self._image.name_of(bucket))
        if not table.info.has_primary_key:
            raise NonPrimaryKeyTableError(f"table '{table.info.path}' has no primary key")
        if not snapshot.private:
            raise ConfigError(
                f"snapshot {snapshot.snapshot_id} of {self._image.name_of(bucket)} has no private "
                "files"
            )
        shared = {each.file for each in snapshot.shared}
        for file in snapshot.objects:
            name = check_name(self._image, layout.KV, bucket, file.path)
            if name.snapshot_id != (None if file in shared else snapshot.snapshot_id):
                raise ConfigError(
                    f"{file.path!r:.300} is not a file of snapshot {snapshot.snapshot_id}"
                )
        where = metadata_file(snapshot)
        size = sum(each.size for each in snapshot.objects)
        return SnapshotHandle(
            snapshot.snapshot_id, snapshot.log_offset, *where, size, self._clock_ms()
        )

    def _is_known(self, snapshot: KvSnapshot, handle: SnapshotHandle) -> bool:
        record = self._remotes.get(snapshot.bucket)
        known = self._known.get((snapshot.bucket, snapshot.snapshot_id), snapshot)
        return known == snapshot and handle in (*record.snapshots, *record.dropped)

    def _check_fence(self, bucket: TableBucket, leader_epoch: int) -> None:
        leader = self._image.leader(bucket)
        if leader is None:
            raise gone(self._image.name_of(bucket))
        if leader[1] != leader_epoch:
            raise error(
                ErrorCode.FENCED_LEADER_EPOCH_EXCEPTION,
                f"the snapshot was made by the leader of {self._image.name_of(bucket)} with epoch "
                f"{leader_epoch}, the present one has {leader[1]}",
            )

    def _with_snapshot(
        self, record: BucketRecord, snapshot: KvSnapshot, handle: SnapshotHandle
    ) -> BucketRecord:
        bucket = snapshot.bucket
        if handle.snapshot_id < record.next_snapshot_id:
            raise error(
                ErrorCode.INVALID_UPDATE_VERSION_EXCEPTION,
                f"{self._image.name_of(bucket)} had a snapshot {handle.snapshot_id} before; the "
                f"next one is {record.next_snapshot_id}",
            )
        if record.snapshots and handle.log_offset < record.snapshots[-1].log_offset:
            raise OffsetOutOfRangeError(
                f"snapshot {handle.snapshot_id} of {self._image.name_of(bucket)} reaches offset "
                f"{handle.log_offset}, the one before {record.snapshots[-1].log_offset}; a "
                "snapshot never goes back"
            )
        cached = self._cached(bucket, record.snapshots)
        known = {f for s in cached for f in s.objects}
        added = usage(f for f in snapshot.objects if f not in known)
        after = replace(
            record,
            next_snapshot_id=handle.snapshot_id + 1,
            snapshots=(*record.snapshots, handle),
            kv_usage=summed([record.kv_usage, added]),
            kv_rough=record.kv_rough or len(cached) < len(record.snapshots),
        )
        return self._retained_of(bucket, after)

    def _retained_of(self, bucket: TableBucket, record: BucketRecord) -> BucketRecord:
        keep, drop = retained(record.snapshots, self._retained, lambda i: self._pinned(bucket, i))
        if not drop:
            return record
        dropped = (*record.dropped, *drop)[-DROPPED_MAX:]
        return replace(record, snapshots=keep, dropped=dropped)

    # Lost locations

    async def lost(self, location_id: int) -> dict[TableBucket, frozenset[int]]:
        """The snapshots with files in a location that was destroyed, by bucket.

        Raises if the list of files of a snapshot that may be one of them cannot be read now.
        """
        lost: dict[TableBucket, frozenset[int]] = {}
        for at, (bucket, record) in enumerate(self._remotes.items(), 1):
            if at % RETAINED_AT_ONCE == 0:
                await asyncio.sleep(0)
            everywhere = (*record.snapshots, *record.dropped)
            there = any(h.metadata_location == location_id for h in everywhere)
            if not there and location_id not in record.kv_usage:
                continue
            ids = set()
            for handle in record.snapshots:
                if handle.metadata_location == location_id or any(
                    file.location_id == location_id
                    for file in (await self.read(bucket, handle)).objects
                ):
                    ids.add(handle.snapshot_id)
            lost[bucket] = frozenset(ids)
        return lost

    async def forget_lost(
        self, location_id: int, lost: Mapping[TableBucket, frozenset[int]]
    ) -> None:
        """Remove lost snapshots from the records of their buckets.

        Their files in other locations are garbage for the sweep. The files that are left are
        counted again by `_delete_dropped`.
        """

        def without(bucket: TableBucket, record: BucketRecord) -> BucketRecord:
            return replace(
                record,
                snapshots=tuple(h for h in record.snapshots if h.snapshot_id not in lost[bucket]),
                dropped=tuple(h for h in record.dropped if h.metadata_location != location_id),
                kv_usage={i: used for i, used in record.kv_usage.items() if i != location_id},
                kv_rough=True,
            )

        await self._remotes.tasks.undisturbed(self._change_all(list(lost), without))
        for bucket, ids in lost.items():
            for snapshot_id in ids:
                self._forget(bucket, snapshot_id)
            log.error("kv_snapshots_lost", bucket=str(bucket), snapshots=sorted(ids))

    async def _change_all(
        self,
        buckets: Sequence[TableBucket],
        make: Callable[[TableBucket, BucketRecord], BucketRecord],
    ) -> None:
        for at in range(0, len(buckets), RETAINED_AT_ONCE):
            async with self._remotes.turn:
                some = buckets[at : at + RETAINED_AT_ONCE]
                there = [b for b in some if self._image.leader(b) is not None]
                changed = await self._remotes.change_all(there, make)
            if changed:
                self._after_change(changed)

    # Deleting

    async def _delete_dropped(self, bucket: TableBucket) -> None:
        """Delete the files of dropped snapshots, and count the files of the kept ones."""
        await self._remotes.certain(bucket)
        record = self._remotes.get(bucket)
        snapshots = [await self.read(bucket, handle) for handle in record.snapshots]
        in_use = {file for snapshot in snapshots for file in snapshot.objects}
        names = {(file.location_id, file.path) for file in in_use}
        deleted: list[SnapshotHandle] = []
        failure: ZuflussError | None = None
        for handle in record.dropped:
            try:
                await self._delete(bucket, handle, names)
                deleted.append(handle)
            except ZuflussError as problem:
                failure = problem
        exact = usage(in_use)

        def without(now: BucketRecord) -> BucketRecord:
            left = tuple(h for h in now.dropped if h not in deleted)
            counted = now.snapshots == record.snapshots
            used = exact if counted else now.kv_usage
            rough = now.kv_rough and not counted
            after = replace(now, dropped=left, kv_usage=used, kv_rough=rough)
            return now if after == now else after

        if deleted:
            self._reach("retain-deleted")
        await self._remotes.tasks.undisturbed(self._finish(bucket, without))
        for handle in deleted:
            self._forget(bucket, handle.snapshot_id)
        if failure is not None:
            raise failure

    async def _finish(
        self, bucket: TableBucket, without: Callable[[BucketRecord], BucketRecord]
    ) -> None:
        async with self._remotes.turn:
            if self._image.leader(bucket) is not None:
                await self._remotes.change(bucket, without)

    async def _delete(
        self, bucket: TableBucket, handle: SnapshotHandle, in_use: set[tuple[int, str]]
    ) -> None:
        try:
            snapshot = await self.read(bucket, handle)
        except ObjectMissingError:
            return
        except CorruptRecordError as problem:
            log.error("kv_snapshot_damaged", bucket=str(bucket), error=str(problem))
            return
        unused = [f for f in snapshot.objects if (f.location_id, f.path) not in in_use]
        self._reach("retain-delete")
        await self._delete_files(unused)
        await self._delete_files([RemoteFile(handle.metadata_location, handle.metadata_path, 0, 0)])

    async def _delete_files(self, files: Iterable[RemoteFile]) -> None:
        """Delete files, except those in retired locations, which nobody reads or cleans."""
        there = {x.location_id for x in self._storage.locations.live}
        await self._storage.delete(file for file in files if file.location_id in there)

    # Reading

    async def snapshot(self, bucket: TableBucket, snapshot_id: int) -> KvSnapshot:
        """The files of a snapshot; `KvSnapshotNotExistError` if it is not kept."""
        for handle in self._remotes.get(bucket).snapshots:
            if handle.snapshot_id == snapshot_id:
                return await self.read(bucket, handle)
        raise KvSnapshotNotExistError(
            f"{self._image.name_of(bucket)} has no snapshot {snapshot_id}, or no longer; ask for "
            "the latest one"
        )

    def snapshots(
        self, table_id: int, partition_id: int | None
    ) -> dict[int, tuple[SnapshotHandle, ...]]:
        """The kept snapshots of a table's or partition's buckets, oldest first."""
        buckets = self._remotes.of_owner(table_id, partition_id)
        return {b.bucket_id: record.snapshots for b, record in buckets if record.snapshots}

    def newest(self, handles: Sequence[SnapshotHandle]) -> Sequence[SnapshotHandle]:
        """Those of a bucket's snapshots that are kept without any lease."""
        return handles[-self._retained :]

    async def files(self, bucket: TableBucket, record: BucketRecord) -> set[tuple[int, str]]:
        """Location and path of every file of the kept snapshots of a record."""
        files = {(h.metadata_location, h.metadata_path) for h in record.snapshots}
        for handle in record.snapshots:
            files |= {(f.location_id, f.path) for f in (await self.read(bucket, handle)).objects}
        return files

    async def read(self, bucket: TableBucket, handle: SnapshotHandle) -> KvSnapshot:
        """The files of a snapshot, remembered or read from its `_METADATA`."""
        known = self._known.get((bucket, handle.snapshot_id))
        if known is not None:
            self._known.move_to_end((bucket, handle.snapshot_id))
            return known
        data = await self._storage.read_at(
            handle.metadata_location, handle.metadata_path, limit=METADATA_BYTES_MAX
        )
        snapshot = await _parsed(data)
        if (snapshot.bucket, snapshot.snapshot_id) != (bucket, handle.snapshot_id):
            raise CorruptRecordError(
                f"{handle.metadata_path} is of {snapshot.bucket}, snapshot {snapshot.snapshot_id}, "
                f"not of {bucket}, snapshot {handle.snapshot_id}"
            )
        self._remember(snapshot)
        return snapshot

    def _cached(self, bucket: TableBucket, handles: Iterable[SnapshotHandle]) -> list[KvSnapshot]:
        known = (self._known.get((bucket, handle.snapshot_id)) for handle in handles)
        return [snapshot for snapshot in known if snapshot is not None]

    def _remember(self, snapshot: KvSnapshot) -> None:
        self._forget(snapshot.bucket, snapshot.snapshot_id)
        self._known[snapshot.bucket, snapshot.snapshot_id] = snapshot
        self._files_known += len(snapshot.files)
        while self._files_known > FILES_KNOWN_MAX and len(self._known) > 1:
            _, oldest = self._known.popitem(last=False)
            self._files_known -= len(oldest.files)

    def _forget(self, bucket: TableBucket, snapshot_id: int) -> None:
        known = self._known.pop((bucket, snapshot_id), None)
        self._files_known -= 0 if known is None else len(known.files)

    # Telling tablet servers

    def server_joined(self, server_id: int) -> None:
        """Send a tablet server the offsets from which the changelogs of its buckets are needed."""
        buckets = [bucket for bucket, record in self._remotes.items() if record.snapshots]
        offsets = [
            replace(offset, replicas=(server_id,))
            for offset in self._offsets(buckets)
            if server_id in offset.replicas
        ]
        if offsets:
            self._tasks.later(self._tablets.notify_kv_snapshot_offset(offsets))

    def _offsets(self, buckets: Iterable[TableBucket]) -> list[KvSnapshotOffset]:
        return [
            KvSnapshotOffset(bucket, snapshots[0].log_offset, state.replicas)
            for bucket in buckets
            if (snapshots := self._remotes.get(bucket).snapshots)
            and (state := self._image.bucket_state(bucket)) is not None
        ]

    def __repr__(self) -> str:
        return f"KvSnapshots({self.deletions!r})"


def retained(
    snapshots: Sequence[SnapshotHandle], count: int, pinned: Callable[[int], bool]
) -> tuple[tuple[SnapshotHandle, ...], tuple[SnapshotHandle, ...]]:
    """The snapshots to keep, oldest first, and those to drop."""
    newest = snapshots[-count:]
    keep = tuple(s for s in snapshots if s in newest or pinned(s.snapshot_id))
    return keep, tuple(s for s in snapshots if s not in keep)


async def _parsed(metadata: bytes) -> KvSnapshot:
    if len(metadata) > METADATA_BYTES_MAX:
        raise ConfigError(
            f"the metadata of a snapshot has {len(metadata)} bytes, at most {METADATA_BYTES_MAX} "
            f"are allowed"
        )
    if len(metadata) > PARSED_AT_ONCE:
        return await asyncio.to_thread(KvSnapshot.from_json, metadata)
    return KvSnapshot.from_json(metadata)
