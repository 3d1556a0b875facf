"""The remote side of every bucket, durable: one small record per bucket.

The documents in remote storage (`remote/manifest.py`, `remote/snapshot.py`) say which files belong
together; the record of a bucket says which documents are valid. A file is garbage unless a valid
document refers to it. The record (its path is in `records.py`) is a JSON object, `{}` at first:

| field | value |
|---|---|
| `manifest` | of the remote log: `location`, `path`, `start`, `end`, `usage`; absent before the first |
| `next_snapshot` | the number of the next key-value snapshot; absent for 0 |
| `snapshots` | the kept snapshots, oldest first, each `[id, log_offset, location, path of _METADATA, bytes of its files, time of its commit]`, the last fields absent in older rows |
| `dropped` | in the same form: snapshots no longer kept whose files are not all deleted yet |
| `kv_usage` | the files of the kept snapshots, each file counted once |
| `kv_rough` | true while `kv_usage` may count shared files twice, because lists of files could not be read |

A usage is a list of `[location, files, bytes]`. The usage of all buckets is summed up in memory, so
that the question whether a location is empty needs no I/O. Only files that documents refer to
count: a file that waits to be deleted does not keep a location from being retired.

All changes take turns with each other, and with changes of the registry of locations (`turn`), so
no document comes to refer to a location that was retired meanwhile. While a change is being
committed, `get` still returns the record of before. When a commit fails with an unknown outcome,
its buckets are read again before they change again. Code that must know the record in the store
(`leases/selection.py`, and everything that deletes) asks `is_certain`, and waits for `certain`.
"""  # noqa: E501 - a table row does not wrap

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import structlog

from zufluss.cluster.image import ClusterImage, ImageChange, PartitionGone, TableGone
from zufluss.cluster.remote import BucketRemote, SnapshotHandle
from zufluss.coordinator import records
from zufluss.coordinator.feed import Feed
from zufluss.coordinator.ledger import Ledger, is_without_effect
from zufluss.coordinator.tasks import PendingTasks
from zufluss.errors import UnknownTableOrBucketError, ZuflussError
from zufluss.meta.api import ConflictError, Entry, Op, Put, portions
from zufluss.model.schema import dump_object
from zufluss.model.table import TableBucket
from zufluss.remote.files import Usage

log = structlog.get_logger(__name__)

UsageByLocation = Mapping[int, Usage]


@dataclass(frozen=True, slots=True)
class ManifestRecord:
    """The valid manifest of a bucket's remote log."""

    location_id: int
    """The location of the manifest."""
    path: str
    """Its path below the root of that location."""
    start_offset: int
    """The first offset in remote storage."""
    end_offset: int
    """The offset after the last one."""
    usage: UsageByLocation = field(default_factory=dict)
    """Files and bytes that it refers to, by location."""


@dataclass(frozen=True, slots=True)
class BucketRecord:
    """The remote side of one bucket."""

    manifest: ManifestRecord | None = None
    """The manifest of its log; None before the first."""
    next_snapshot_id: int = 0
    """The number of its next key-value snapshot."""
    snapshots: tuple[SnapshotHandle, ...] = ()
    """The kept snapshots, oldest first."""
    dropped: tuple[SnapshotHandle, ...] = ()
    """Snapshots whose files are to be deleted."""
    kv_usage: UsageByLocation = field(default_factory=dict)
    """Files and bytes of the kept snapshots, by location."""
    kv_rough: bool = False
    """Shared files may be counted twice; they are counted again when their lists can be read."""

    def live(self) -> Iterator[tuple[int, Usage]]:
        """Files and bytes in use, location by location, the documents themselves included."""
        if self.manifest is not None:
            yield self.manifest.location_id, Usage(1, 0)
            yield from self.manifest.usage.items()
        yield from self.kv_usage.items()
        for snapshot in self.snapshots:
            yield snapshot.metadata_location, Usage(1, 0)

    def to_json(self) -> bytes:
        """Encode the record as it is stored."""
        value: dict[str, Any] = {}
        if self.manifest is not None:
            value["manifest"] = {
                "location": self.manifest.location_id,
                "path": self.manifest.path,
                "start": self.manifest.start_offset,
                "end": self.manifest.end_offset,
                "usage": _usage_rows(self.manifest.usage),
            }
        if self.next_snapshot_id:
            value["next_snapshot"] = self.next_snapshot_id
            value["snapshots"] = [_snapshot_row(s) for s in self.snapshots]
            value["dropped"] = [_snapshot_row(s) for s in self.dropped]
            value["kv_usage"] = _usage_rows(self.kv_usage)
            if self.kv_rough:
                value["kv_rough"] = True
        return dump_object(value)

    @classmethod
    def from_json(cls, data: bytes) -> BucketRecord:
        """Decode a stored record; ValueError, KeyError or TypeError if it is malformed."""
        value = json.loads(data)
        manifest = value.get("manifest")
        return cls(
            manifest=None
            if manifest is None
            else ManifestRecord(
                manifest["location"],
                manifest["path"],
                manifest["start"],
                manifest["end"],
                _usage(manifest["usage"]),
            ),
            next_snapshot_id=value.get("next_snapshot", 0),
            snapshots=tuple(SnapshotHandle(*row) for row in value.get("snapshots", ())),
            dropped=tuple(SnapshotHandle(*row) for row in value.get("dropped", ())),
            kv_usage=_usage(value.get("kv_usage", ())),
            kv_rough=bool(value.get("kv_rough", False)),
        )


NOTHING = BucketRecord()


class BucketRemotes:
    """The remote side of every bucket. Open it with `BucketRemotes.open`."""

    def __init__(self, image: ClusterImage, ledger: Ledger) -> None:
        self.image = image
        self.epoch = ledger.epoch
        """The coordinator epoch."""
        self.ledger = ledger
        """The store in the hands of this coordinator."""
        self.turn = asyncio.Lock()
        """Held while a bucket or the registry of locations is changed."""
        self.tasks = PendingTasks("bucket_remotes")
        """Changes of buckets under way."""
        self._changing: frozenset[TableBucket] = frozenset()
        self._doubtful: set[TableBucket] = set()
        self._over = asyncio.Event()
        self._over.set()
        self._waiting = 0
        self._tables: dict[int, dict[TableBucket, BucketRecord]] = {}
        self._live: dict[int, Usage] = {}

    @classmethod
    async def open(
        cls,
        entries: Iterable[Entry],
        ledger: Ledger,
        image: ClusterImage,
        changes: Feed[Sequence[ImageChange]],
    ) -> BucketRemotes:
        """Load the records of all buckets from the store's entries, and follow the catalog.

        Buckets that an older version created without a record get one.
        """
        remotes = cls(image, ledger)
        buckets = [bucket for _, bucket, _ in image.buckets()]
        values = {entry.path: entry.value for entry in entries}
        missing: list[Op] = []
        for bucket in buckets:
            path = records.bucket_remote(bucket)
            if path in values:
                remotes._set(bucket, records.guarded(path, BucketRecord.from_json, values[path]))
            else:
                missing.append(records.create_bucket_remote(bucket))
        await ledger.commit_in_portions(missing)
        changes.subscribe(remotes.changed)
        return remotes

    def changed(self, changes: Sequence[ImageChange]) -> None:
        """Forget the buckets of dropped tables and partitions."""
        for change in changes:
            if isinstance(change, TableGone):
                self._forget(self._tables.get(change.table_id, ()))
            elif isinstance(change, PartitionGone):
                gone = change.partition_id
                self._forget(
                    bucket
                    for buckets in self._tables.values()
                    for bucket in buckets
                    if bucket.partition_id == gone
                )

    def _forget(self, buckets: Iterable[TableBucket]) -> None:
        for bucket in tuple(buckets):
            self._set(bucket, NOTHING)

    # Reading

    def get(self, bucket: TableBucket) -> BucketRecord:
        """The record of a bucket; an empty one if it has nothing in remote storage."""
        return self._tables.get(bucket.table_id, {}).get(bucket, NOTHING)

    def items(self) -> Iterator[tuple[TableBucket, BucketRecord]]:
        """Every bucket with a record that is not empty."""
        for buckets in tuple(self._tables.values()):
            yield from tuple(buckets.items())

    def of_table(self, table_id: int) -> list[tuple[TableBucket, BucketRecord]]:
        """The buckets of a table, of all partitions, with records that are not empty."""
        return list(self._tables.get(table_id, {}).items())

    def of_owner(
        self, table_id: int, partition_id: int | None
    ) -> list[tuple[TableBucket, BucketRecord]]:
        """The buckets of a table or partition with records that are not empty, by number."""
        buckets = self._tables.get(table_id, {}).items()
        return sorted(
            ((b, r) for b, r in buckets if b.partition_id == partition_id),
            key=lambda item: item[0].bucket_id,
        )

    def live_usage(self) -> dict[int, Usage]:
        """Files and bytes of manifests and kept snapshots, these included, by location."""
        return {i: used for i, used in self._live.items() if used != (0, 0)}

    async def bucket_remotes(
        self, buckets: Sequence[TableBucket]
    ) -> dict[TableBucket, BucketRemote]:
        """The records of buckets as the store has them, without those that are empty."""
        remotes: dict[TableBucket, BucketRemote] = {}
        for bucket in buckets:
            await self.certain(bucket)
            record = self.get(bucket)
            if record is NOTHING:
                continue
            manifest = record.manifest
            remotes[bucket] = BucketRemote(
                bucket,
                None if manifest is None else manifest.location_id,
                None if manifest is None else manifest.path,
                None if manifest is None else manifest.start_offset,
                None if manifest is None else manifest.end_offset,
                record.next_snapshot_id,
                record.snapshots,
            )
        return remotes

    # Changing

    async def change(
        self, bucket: TableBucket, make: Callable[[BucketRecord], BucketRecord]
    ) -> BucketRecord:
        """Replace the record of a bucket by what `make` returns for it, durably.

        Hold `turn`, in a task of `tasks`. Nothing changes if `make` returns the same record, or
        raises.
        """
        await self.read_again([bucket])
        before = self.get(bucket)
        after = make(before)
        if after is before:
            return before
        if not await self._commit({bucket: after}):
            raise gone(self.image.name_of(bucket))
        return after

    async def change_all(
        self,
        buckets: Iterable[TableBucket],
        make: Callable[[TableBucket, BucketRecord], BucketRecord],
    ) -> list[TableBucket]:
        """Change many buckets, as `change` does; returns the changed ones.

        A bucket that is dropped meanwhile is left out. What is too much for one transaction takes
        several: if one fails, the buckets before it have changed.
        """
        chosen = list(buckets)
        await self.read_again(chosen)
        after = {bucket: make(bucket, self.get(bucket)) for bucket in chosen}
        return await self._commit(
            {bucket: record for bucket, record in after.items() if record is not self.get(bucket)}
        )

    def is_certain(self, bucket: TableBucket) -> bool:
        """Whether `get` returns the record in the store, and no change of it is under way."""
        return bucket not in self._changing and bucket not in self._doubtful

    async def certain(self, bucket: TableBucket) -> None:
        """Wait until `is_certain` holds for a bucket; do not hold `turn`."""
        while not self.is_certain(bucket):
            if bucket in self._changing:
                await self._change_over()
            else:
                async with self.turn:
                    await self.read_again([bucket])

    async def _change_over(self) -> None:
        """Wait for the end of the change that is being committed."""
        self._waiting += 1
        try:
            await self._over.wait()
        finally:
            self._waiting -= 1

    async def read_again(self, buckets: Iterable[TableBucket]) -> None:
        """Read those of the buckets from the store that are in doubt; hold `turn`."""
        for bucket in self._doubtful.intersection(buckets):
            path = records.bucket_remote(bucket)
            stored = await self.ledger.read(path)
            if stored is not None and self.image.leader(bucket) is not None:
                self._set(bucket, records.guarded(path, BucketRecord.from_json, stored.value))
            self._doubtful.discard(bucket)

    async def _doubt(self, buckets: Sequence[TableBucket]) -> None:
        """Read buckets again whose last change has an unknown outcome, now or before the next."""
        self._doubtful.update(buckets)
        try:
            await self.read_again(buckets)
        except ZuflussError as problem:
            log.warning("buckets_in_doubt", buckets=len(self._doubtful), error=str(problem))

    async def _commit(self, after: dict[TableBucket, BucketRecord]) -> list[TableBucket]:
        """Store new records, then put them into memory; returns the buckets that still exist."""
        assert self.turn.locked(), "changes take turns"
        buckets = {records.bucket_remote(bucket): bucket for bucket in after}
        puts = (Put(path, after[bucket].to_json()) for path, bucket in buckets.items())
        changed: list[TableBucket] = []
        for portion in portions(puts):
            self._changing = frozenset(buckets[put.path] for put in portion)
            self._over.clear()
            try:
                for path in await self._put(portion):
                    bucket = buckets[path]
                    if self.image.leader(bucket) is not None:  # it may have been dropped meanwhile
                        self._set(bucket, after[bucket])
                    changed.append(bucket)
            except Exception as problem:
                if not is_without_effect(problem):
                    await self._doubt([buckets[put.path] for put in portion])
                raise
            finally:
                self._changing = frozenset()
                self._over.set()
            if self._waiting:
                await asyncio.sleep(0)  # tasks that waited for the end run before the next change
        return changed

    async def _put(self, puts: Iterable[Put]) -> list[str]:
        """Store records in one transaction; returns the paths of those that still exist."""
        left = {put.path: put for put in puts}
        while left:
            try:
                await self.ledger.commit(list(left.values()))
                break
            except ConflictError as conflict:  # the bucket was dropped, its record is gone
                del left[conflict.op.path]
        return list(left)

    def _set(self, bucket: TableBucket, record: BucketRecord) -> None:
        for sign, each in ((-1, self.get(bucket)), (1, record)):
            for location_id, used in each.live():
                total = self._live.get(location_id, Usage(0, 0))
                self._live[location_id] = Usage(
                    total.files + sign * used.files, total.bytes + sign * used.bytes
                )
        buckets = self._tables.setdefault(bucket.table_id, {})
        if record == NOTHING:
            buckets.pop(bucket, None)
        else:
            buckets[bucket] = record
        if not buckets:
            del self._tables[bucket.table_id]

    def __repr__(self) -> str:
        return f"BucketRemotes(buckets={sum(map(len, self._tables.values()))})"


def gone(bucket: str) -> UnknownTableOrBucketError:
    """The error for a bucket that does not exist."""
    return UnknownTableOrBucketError(f"{bucket} does not exist, or not any more")


def _usage_rows(usage: UsageByLocation) -> list[tuple[int, int, int]]:
    return [(i, used.files, used.bytes) for i, used in sorted(usage.items())]


def _usage(rows: Iterable[Sequence[int]]) -> dict[int, Usage]:
    return {i: Usage(files, size) for i, files, size in rows}


def _snapshot_row(snapshot: SnapshotHandle) -> tuple[int, int, int, str, int, int]:
    return (
        snapshot.snapshot_id,
        snapshot.log_offset,
        snapshot.metadata_location,
        snapshot.metadata_path,
        snapshot.size,
        snapshot.committed_ms,
    )
