"""The sweep finds and deletes garbage: files in remote storage that no document refers to.

Garbage comes from a crash between an upload and its commit, from a lost answer, or from an upload
that failed over to another location. Every `zufluss.remote.sweep.interval` the sweep lists `log/`
and `kv/` in every location that is not retired, and deletes a file if all of this holds:

| condition | why |
|---|---|
| its name is one of ours (`layout.parse`) | other files belong to somebody else |
| it is older than `zufluss.remote.sweep.grace`, counted from the beginning of the sweep | an upload may be under way |
| its table's and partition's ids were given by this cluster before the sweep | a store restored from a backup, or another cluster, may own it |
| its table, partition or bucket is gone, and no lease holds it; or | dropped |
| the current manifest does not have it, and is not it; or | of `log/` |
| no kept snapshot has it | of `kv/` |

The documents are read after the listing, so they know every file in it. If a document cannot be
read, no file of its bucket is deleted. If a listing fails, or the marker of the cluster cannot be
read (`remote/marker.py`), no file of the location is deleted. The next sweep tries again. Just
before the deletion the sweep checks once more which documents are valid.
"""  # noqa: E501 - a table row does not wrap

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Callable, Collection
from dataclasses import dataclass, field

import structlog

from zufluss.cluster.image import ClusterImage
from zufluss.coordinator import records
from zufluss.coordinator.bucket_remotes import BucketRecord, BucketRemotes
from zufluss.coordinator.remote.checks import bucket_directory
from zufluss.coordinator.remote.kv_snapshots import KvSnapshots
from zufluss.errors import UnknownTableOrBucketError, ZuflussError
from zufluss.meta.api import MetaStore
from zufluss.model.table import TableBucket
from zufluss.periodic import repeat
from zufluss.remote import layout
from zufluss.remote.files import RemoteFile
from zufluss.remote.layout import RemoteName
from zufluss.remote.manifest import MANIFEST_BYTES_MAX, LogManifest
from zufluss.remote.objects import ObjectInfo
from zufluss.remote.storage import RemoteStorage
from zufluss.tasks import end

log = structlog.get_logger(__name__)

GARBAGE_AT_ONCE = 100_000
"""Files of a location that one sweep deletes; the next one goes on."""
BUCKETS_KNOWN_MAX = 256
"""Buckets whose files are kept in memory during a sweep."""

Key = tuple[int, str]
"""Location and path of a file. Paths are compared without their case: a directory of macOS lists
the files of the databases `a` and `A` under one of the two names. Ids and UUIDs make paths differ.
"""


@dataclass(slots=True)
class SweepCounts:
    """Counts of all sweeps since the start of the process."""

    sweeps: int = 0
    """Sweeps that were finished."""
    deleted_files: int = 0
    """Files that nothing referred to."""
    deleted_bytes: int = 0
    """Their size."""
    failures: int = 0
    """Listings, documents and deletions that failed; nothing was deleted there."""
    finished_ms: int = 0
    """When the last sweep was finished, epoch milliseconds; 0 before the first."""


@dataclass(frozen=True, slots=True)
class _Limits:
    """Which files a sweep may delete: fixed when it begins."""

    modified_ms: int
    table_id: int
    partition_id: int


@dataclass(frozen=True, slots=True)
class Garbage:
    """A file that nothing refers to."""

    name: RemoteName
    file: RemoteFile
    modified_ms: int
    """Time of its last change, by the location's clock."""
    reason: str
    """Why nobody needs it."""


@dataclass(frozen=True, slots=True)
class SweepResult:
    """What one sweep found."""

    garbage: list[Garbage] = field(default_factory=list)
    """Files that nothing refers to; they were deleted, unless nothing was to be."""
    failures: list[str] = field(default_factory=list)
    """Listings and documents that could not be read; files there were left alone."""


class Sweep:
    """Sweeps at an interval."""

    def __init__(
        self,
        store: MetaStore,
        remotes: BucketRemotes,
        snapshots: KvSnapshots,
        storage: RemoteStorage,
        held: Callable[[int, int | None], bool],
        clock_ms: Callable[[], int],
        reach: Callable[[str], None],
        *,
        interval_ms: int,
        grace_ms: int,
    ) -> None:
        """`held` says whether leases hold something of a table or partition that was dropped."""
        self.counts = SweepCounts()
        self._store = store
        self._remotes = remotes
        self._image: ClusterImage = remotes.image
        self._snapshots = snapshots
        self._storage = storage
        self._held = held
        self._clock_ms = clock_ms
        self._reach = reach
        self._interval_ms = interval_ms
        self._grace_ms = grace_ms
        self._known: OrderedDict[tuple[str, TableBucket], tuple[BucketRecord, set[Key]]]
        self._known = OrderedDict()
        self._task: asyncio.Task[None] | None = None
        self._turn = asyncio.Lock()

    def start(self) -> None:
        """Sweep every interval from now on, unless that is 0."""
        if self._interval_ms:
            work = repeat(self._interval_ms / 1000, self.sweep, "sweep_failed")
            self._task = asyncio.create_task(work, name="remote-sweep")

    async def stop(self) -> None:
        """Stop, also in the middle of a sweep."""
        await end(self._task)

    async def sweep(
        self, location_ids: Collection[int] | None = None, *, delete: bool = True
    ) -> SweepResult:
        """Sweep all locations, or only some, once; without `delete` nothing is deleted.

        Two sweeps take turns.
        """
        async with self._turn:
            result = SweepResult()
            limits = _Limits(
                self._clock_ms() - self._grace_ms,
                await self._next_id(records.TABLE_COUNTER),
                await self._next_id(records.PARTITION_COUNTER),
            )
            for location in self._storage.locations.live:
                if location_ids is not None and location.location_id not in location_ids:
                    continue
                for kind in (layout.LOG, layout.KV):
                    try:
                        await self._sweep(location.location_id, kind, limits, result, delete)
                    except ZuflussError as problem:
                        self._failed(str(location), problem)
                        result.failures.append(f"{location}: {problem}")
            self._known.clear()
            if delete:
                self.counts.sweeps += 1
                self.counts.finished_ms = self._clock_ms()
            return result

    async def _sweep(
        self, location_id: int, kind: str, limits: _Limits, result: SweepResult, delete: bool
    ) -> None:
        garbage: list[Garbage] = []
        async for page in self._storage.objects(location_id).list(kind):
            for listed in page:
                name = layout.parse(listed.path)
                is_old = listed.modified_ms <= limits.modified_ms
                if is_old and name is not None and _is_ours(name, limits):
                    garbage += await self._if_unused(location_id, name, listed, result)
            if len(garbage) >= GARBAGE_AT_ONCE:
                break
        still = [each for each in garbage if await self._reason(each.name, each.file, result)]
        if still and delete:
            await self._storage.check(location_id)
            await self._remotes.ledger.confirm()
            self._reach("sweep-delete")
            await self._storage.delete([each.file for each in still])
            self.counts.deleted_files += len(still)
            self.counts.deleted_bytes += sum(each.file.size for each in still)
            log.info("garbage_deleted", location=location_id, kind=kind, files=len(still))
        result.garbage.extend(still)

    async def _if_unused(
        self, location_id: int, name: RemoteName, listed: ObjectInfo, result: SweepResult
    ) -> list[Garbage]:
        file = RemoteFile(location_id, listed.path, listed.size, 0)
        reason = await self._reason(name, file, result)
        return [] if reason is None else [Garbage(name, file, listed.modified_ms, reason)]

    async def _reason(self, name: RemoteName, file: RemoteFile, result: SweepResult) -> str | None:
        """Why nobody needs a file; None if a document refers to it, or may, or a lease holds it."""
        try:
            directory = bucket_directory(self._image, name.kind, name.bucket)
        except UnknownTableOrBucketError:
            held = self._held(name.bucket.table_id, name.bucket.partition_id)
            return None if held else "its table, partition or bucket does not exist any more"
        if not file.path.casefold().startswith(f"{directory}/".casefold()):
            return f"its bucket has the directory {directory}"
        try:
            files = await self._files(name.kind, name.bucket)
            if (file.location_id, file.path.casefold()) in files:
                return None
        except ZuflussError as problem:
            self._failed(str(name.bucket), problem)
            result.failures.append(f"{name.bucket}: {problem}")
            return None
        document = "manifest" if name.kind == layout.LOG else "kept snapshot"
        return f"no {document} refers to it"

    async def _files(self, kind: str, bucket: TableBucket) -> set[Key]:
        """The valid documents of a bucket, and the files that they refer to."""
        await self._remotes.certain(bucket)
        record = self._remotes.get(bucket)
        known = self._known.get((kind, bucket))
        if known is not None and known[0] is record:
            return known[1]
        read = self._log_files if kind == layout.LOG else self._snapshots.files
        files = {(location, path.casefold()) for location, path in await read(bucket, record)}
        self._known[kind, bucket] = record, files
        while len(self._known) > BUCKETS_KNOWN_MAX:
            self._known.popitem(last=False)
        return files

    async def _log_files(self, bucket: TableBucket, record: BucketRecord) -> set[Key]:
        at = record.manifest
        if at is None:
            return set()
        data = await self._storage.read_at(at.location_id, at.path, limit=MANIFEST_BYTES_MAX)
        manifest = await asyncio.to_thread(LogManifest.from_json, data)
        return {(at.location_id, at.path), *((f.location_id, f.path) for f in manifest.files)}

    async def _next_id(self, counter: str) -> int:
        stored = await self._store.read(counter)
        return 0 if stored is None else int(stored.value)

    def _failed(self, where: str, problem: ZuflussError) -> None:
        self.counts.failures += 1
        log.warning("sweep_left_out", where=where, error=str(problem))

    def __repr__(self) -> str:
        return f"Sweep({self.counts})"


def _is_ours(name: RemoteName, limits: _Limits) -> bool:
    """Whether the ids in a name were given by this cluster before the sweep began."""
    partition_id = name.bucket.partition_id
    known = partition_id is None or partition_id < limits.partition_id
    return known and name.bucket.table_id < limits.table_id
