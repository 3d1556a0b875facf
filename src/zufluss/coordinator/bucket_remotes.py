"""What every bucket has in remote storage, durable: one small value per bucket.

The documents in remote storage (`remote/manifest.py`, `remote/snapshot.py`) say which files belong
together; the value here says which documents count. A file that no document named here refers to is
garbage. The value of a bucket (its path is in `records.py`) is a JSON object, `{}` at first:

| field | value |
|---|---|
| `manifest` | of the remote log: `location`, `path`, `start`, `end`, `usage`; absent before the first |
| `next_snapshot` | the number of the next key-value snapshot; absent for 0 |
| `snapshots` | those that are kept, oldest first, each `[id, log_offset, location, path of _METADATA, bytes of its files]`, the last one absent in older rows |
| `dropped` | in the same form: no longer kept, their files not all deleted yet |
| `kv_usage` | what the kept snapshots refer to, each file once |

A usage is a list of `[location, files, bytes]`. How much lies in each location is summed up in
memory, so that the question whether a location is empty needs no I/O. It counts what is referred
to: a file that waits to be deleted does not hold a location.

All changes take turns, with each other and with whoever holds `turn` to change the registry of
locations, so no document comes to refer to a location that was retired meanwhile. While a change is
being committed it was decided what its buckets will have, and that is not yet what `get` says. When
a commit fails and nobody knows whether it took place, its buckets are read again before anything
else happens to them. Who relies on what `get` says (`leases/leases.py`, and whoever deletes) asks
`is_certain`, and waits for `certain`.
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
from zufluss.coordinator.tasks import Tasks
from zufluss.errors import UnknownTableOrBucketError, ZuflussError
from zufluss.meta.api import ConflictError, MetaStore, Op, Put
from zufluss.model.schema import dump_object
from zufluss.model.table import TableBucket
from zufluss.remote.files import Usage

log = structlog.get_logger(__name__)

CREATED_AT_ONCE = 10_000
"""Most values that are made in one transaction for tables of an older version."""

UsageByLocation = Mapping[int, Usage]


@dataclass(frozen=True, slots=True)
class ManifestRecord:
    """The manifest of a bucket's remote log that counts."""

    location_id: int
    """Where it lies."""
    path: str
    """Its path there."""
    start_offset: int
    """The first offset in remote storage."""
    end_offset: int
    """The offset after the last one."""
    usage: UsageByLocation = field(default_factory=dict)
    """What it refers to."""


@dataclass(frozen=True, slots=True)
class BucketRecord:
    """What one bucket has in remote storage."""

    manifest: ManifestRecord | None = None
    """Of its log, None before the first."""
    next_snapshot_id: int = 0
    """The number of its next key-value snapshot."""
    snapshots: tuple[SnapshotHandle, ...] = ()
    """Those that are kept, oldest first."""
    dropped: tuple[SnapshotHandle, ...] = ()
    """Those whose files are to be deleted."""
    kv_usage: UsageByLocation = field(default_factory=dict)
    """What the kept snapshots refer to."""

    def live(self) -> Iterator[tuple[int, Usage]]:
        """Everything that is referred to, location by location, the documents included."""
        if self.manifest is not None:
            yield self.manifest.location_id, Usage(1, 0)
            yield from self.manifest.usage.items()
        yield from self.kv_usage.items()
        for snapshot in self.snapshots:
            yield snapshot.metadata_location, Usage(1, 0)

    def to_json(self) -> bytes:
        """As it is stored."""
        found: dict[str, Any] = {}
        if self.manifest is not None:
            found["manifest"] = {
                "location": self.manifest.location_id,
                "path": self.manifest.path,
                "start": self.manifest.start_offset,
                "end": self.manifest.end_offset,
                "usage": _usage_rows(self.manifest.usage),
            }
        if self.next_snapshot_id:
            found["next_snapshot"] = self.next_snapshot_id
            found["snapshots"] = [_snapshot_row(s) for s in self.snapshots]
            found["dropped"] = [_snapshot_row(s) for s in self.dropped]
            found["kv_usage"] = _usage_rows(self.kv_usage)
        return dump_object(found)

    @classmethod
    def from_json(cls, data: bytes) -> BucketRecord:
        """What a value says; ValueError and its like when it is none."""
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
        """Held by whoever changes a bucket, or the registry of locations."""
        self.tasks = Tasks("bucket_remotes")
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
        store: MetaStore,
        ledger: Ledger,
        image: ClusterImage,
        changes: Feed[Sequence[ImageChange]],
    ) -> BucketRemotes:
        """Load the records of all buckets, and follow the catalog from now on."""
        remotes = cls(image, ledger)
        buckets = [bucket for _, bucket, _ in image.buckets()]
        values = {entry.path: entry.value for entry in await store.tree("/tables")}
        missing: list[Op] = []
        for bucket in buckets:
            path = records.bucket_remote(bucket)
            if path in values:
                remotes._set(bucket, records.guarded(path, BucketRecord.from_json, values[path]))
            else:
                missing.append(records.create_bucket_remote(bucket))
        for at in range(0, len(missing), CREATED_AT_ONCE):
            await ledger.commit(missing[at : at + CREATED_AT_ONCE])
        changes.subscribe(remotes.changed)
        return remotes

    def changed(self, changes: Sequence[ImageChange]) -> None:
        """The catalog changed: forget what is gone."""
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
        """What a bucket has."""
        return self._tables.get(bucket.table_id, {}).get(bucket, NOTHING)

    def items(self) -> Iterator[tuple[TableBucket, BucketRecord]]:
        """Every bucket that has something."""
        for buckets in tuple(self._tables.values()):
            yield from tuple(buckets.items())

    def of_owner(
        self, table_id: int, partition_id: int | None
    ) -> list[tuple[TableBucket, BucketRecord]]:
        """The buckets of a table or partition that have something, by number."""
        found = self._tables.get(table_id, {}).items()
        return sorted(
            ((b, r) for b, r in found if b.partition_id == partition_id),
            key=lambda item: item[0].bucket_id,
        )

    def live_usage(self) -> dict[int, Usage]:
        """What manifests and kept snapshots refer to, with these themselves, by location."""
        return {i: used for i, used in self._live.items() if used != (0, 0)}

    async def bucket_remotes(
        self, buckets: Sequence[TableBucket]
    ) -> dict[TableBucket, BucketRemote]:
        """What these buckets have for certain, those left out that never had anything."""
        found: dict[TableBucket, BucketRemote] = {}
        for bucket in buckets:
            await self.certain(bucket)
            record = self.get(bucket)
            if record is NOTHING:
                continue
            manifest = record.manifest
            found[bucket] = BucketRemote(
                bucket,
                None if manifest is None else manifest.location_id,
                None if manifest is None else manifest.path,
                None if manifest is None else manifest.start_offset,
                None if manifest is None else manifest.end_offset,
                record.next_snapshot_id,
                record.snapshots,
            )
        return found

    # Changing

    async def change(
        self, bucket: TableBucket, make: Callable[[BucketRecord], BucketRecord]
    ) -> BucketRecord:
        """Replace what a bucket has by what `make` makes of it; durable when this returns.

        Hold `turn`, in a task of `tasks`. Nothing changes if `make` returns the same record, or
        raises.
        """
        await self.read_again([bucket])
        before = self.get(bucket)
        after = make(before)
        if after is before:
            return before
        if not await self._commit({bucket: after}):
            raise gone(bucket)
        return after

    async def change_all(
        self,
        buckets: Iterable[TableBucket],
        make: Callable[[TableBucket, BucketRecord], BucketRecord],
    ) -> list[TableBucket]:
        """Change many buckets in one transaction, as `change` does; those that were changed.

        A bucket that is dropped meanwhile is left out.
        """
        chosen = list(buckets)
        await self.read_again(chosen)
        made = {bucket: make(bucket, self.get(bucket)) for bucket in chosen}
        wanted = {bucket: after for bucket, after in made.items() if after is not self.get(bucket)}
        return await self._commit(wanted)

    def is_certain(self, bucket: TableBucket) -> bool:
        """Whether `get` says of a bucket what the store has, and will have."""
        return bucket not in self._changing and bucket not in self._doubtful

    async def certain(self, bucket: TableBucket) -> None:
        """Wait until `get` says of a bucket what the store has; do not hold `turn`."""
        while not self.is_certain(bucket):
            if bucket in self._changing:
                await self._change_over()
            else:
                async with self.turn:
                    await self.read_again([bucket])

    async def _change_over(self) -> None:
        """Wait until the change that is being committed now is over."""
        self._waiting += 1
        try:
            await self._over.wait()
        finally:
            self._waiting -= 1

    async def read_again(self, buckets: Iterable[TableBucket]) -> None:
        """Take over what the store has of those buckets that are in doubt; hold `turn`."""
        for bucket in self._doubtful.intersection(buckets):
            path = records.bucket_remote(bucket)
            found = await self.ledger.read(path)
            if found is not None and self.image.leader(bucket) is not None:
                self._set(bucket, records.guarded(path, BucketRecord.from_json, found.value))
            self._doubtful.discard(bucket)

    async def _doubt(self, buckets: Sequence[TableBucket]) -> None:
        """Nobody knows how a change ended: find out, now or before the next one."""
        self._doubtful.update(buckets)
        try:
            await self.read_again(buckets)
        except ZuflussError as problem:
            log.warning("buckets_in_doubt", buckets=len(self._doubtful), error=str(problem))

    async def _commit(self, wanted: dict[TableBucket, BucketRecord]) -> list[TableBucket]:
        """Make new records durable, then known; those of the buckets that are still there."""
        assert self.turn.locked(), "changes take turns"
        puts = {
            bucket: Put(records.bucket_remote(bucket), after.to_json())
            for bucket, after in wanted.items()
        }
        left = {put.path: bucket for bucket, put in puts.items()}
        self._changing = frozenset(wanted)
        self._over.clear()
        try:
            while left:
                try:
                    await self.ledger.commit([puts[bucket] for bucket in left.values()])
                    break
                except ConflictError as conflict:  # it was dropped: nothing lies there any more
                    del left[conflict.op.path]
            for bucket in left.values():
                if self.image.leader(bucket) is not None:  # or it was dropped just now
                    self._set(bucket, wanted[bucket])
        except Exception as problem:
            if not is_without_effect(problem):
                await self._doubt(list(left.values()))
            raise
        finally:
            self._changing = frozenset()
            self._over.set()
        if self._waiting:
            await asyncio.sleep(0)  # who waited comes before the next change
        return list(left.values())

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


def gone(bucket: TableBucket) -> UnknownTableOrBucketError:
    """The error for a bucket that there is not."""
    return UnknownTableOrBucketError(f"{bucket} does not exist, or not any more")


def _usage_rows(usage: UsageByLocation) -> list[tuple[int, int, int]]:
    return [(i, used.files, used.bytes) for i, used in sorted(usage.items())]


def _usage(rows: Iterable[Sequence[int]]) -> dict[int, Usage]:
    return {i: Usage(files, size) for i, files, size in rows}


def _snapshot_row(snapshot: SnapshotHandle) -> tuple[int, int, int, str, int]:
    return (
        snapshot.snapshot_id,
        snapshot.log_offset,
        snapshot.metadata_location,
        snapshot.metadata_path,
        snapshot.size,
    )
