"""A bucket that another server leads, made ready so that this one can lead it soon.

A hand-over begins with a rehearsal of the take-over: the bucket is opened from the live session of
its leader as far as that goes, and closed again. What stays is a cache on this disk, the log and
the key-value state, and in memory what was read of the session (`sources.py`). When the leader has
released the bucket only its last few entries are missing here. Nothing is served and nothing is
written to a session; whether the cache is used, and from where on, is decided when the bucket is
opened for good, as after a restart.

The files of a bucket that did not come go after `KEEP_SECONDS`.

Belongs to the event loop.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import replace
from typing import Final

import structlog

from zufluss.cluster.replicas import ReplicaAssignment
from zufluss.errors import CorruptRecordError, LeaderNotAvailableError
from zufluss.model.table import PhysicalTablePath, TableBucket
from zufluss.replica.replica import Replica, ReplicaHost
from zufluss.tablet.buckets import Buckets
from zufluss.tablet.shared.copy import SharedCopy
from zufluss.tasks import end, forgive

log = structlog.get_logger(__name__)

KEEP_SECONDS: Final = 600.0
"""How long a prepared bucket may take to come."""

CopyOf = Callable[[ReplicaAssignment], Awaitable[SharedCopy]]
"""Makes the copy of a bucket by an order, with what remote storage has of it."""


class RehearsedCopy(SharedCopy):
    """A `SharedCopy` of a bucket that is opened and closed, and not served in between."""

    async def adopt(self, replica: Replica) -> None:
        """Nothing: another session goes on."""

    def attach(self, replica: Replica) -> None:
        """Nothing: the bucket is closed again."""


class Preparations:
    """Makes buckets ready. The tries for a bucket are ended before its files are used otherwise."""

    def __init__(self, host: ReplicaHost, buckets: Buckets, copy_of: CopyOf) -> None:
        self._host = replace(host, opened=(), closed=())
        self._buckets = buckets
        self._copy_of = copy_of
        self._loop = asyncio.get_running_loop()
        self._under_way: dict[TableBucket, asyncio.Task[None]] = {}
        self._prepared: dict[TableBucket, tuple[PhysicalTablePath, float]] = {}
        """When buckets were prepared, by the loop's clock."""

    async def prepare(self, assignment: ReplicaAssignment) -> None:
        """Make a bucket ready; raises why that is not possible."""
        bucket = assignment.table_bucket
        if not self._buckets.is_elsewhere(bucket):
            raise LeaderNotAvailableError(
                f"{self._buckets.name_of(bucket)} is this server's already, or was dropped"
            )
        work = self._under_way.get(bucket)
        if work is None:
            work = self._under_way[bucket] = asyncio.create_task(self._prepare(assignment))
            work.add_done_callback(forgive)
            work.add_done_callback(lambda _: self._under_way.pop(bucket, None))
        try:
            await asyncio.shield(work)
        except asyncio.CancelledError:
            if not work.cancelled():
                raise
            raise LeaderNotAvailableError(
                f"{self._buckets.name_of(bucket)} was not prepared: another order came for it"
            ) from None

    def remove(self, path: PhysicalTablePath, bucket: TableBucket) -> None:
        """Remove the files of a bucket that left, unless it is being made ready to come back."""
        if bucket not in self._prepared and bucket not in self._under_way:
            self._host.remove(path, bucket)

    async def end(self, buckets: Iterable[TableBucket] | None = None) -> None:
        """Give up what is under way for buckets, for all by default; their files are closed then.

        Whoever calls this opens or deletes them.
        """
        for bucket in tuple(self._prepared if buckets is None else buckets):
            self._prepared.pop(bucket, None)
        for bucket in tuple(self._under_way if buckets is None else buckets):
            await end(self._under_way.get(bucket))

    def look_after(self) -> None:
        """Remove files of buckets that did not come."""
        latest = self._loop.time() - KEEP_SECONDS
        for bucket, (path, at) in tuple(self._prepared.items()):
            if at < latest and bucket not in self._under_way:
                del self._prepared[bucket]
                if self._buckets.is_away(bucket):
                    self._host.remove(path, bucket)

    async def _prepare(self, assignment: ReplicaAssignment) -> None:
        bucket, path = assignment.table_bucket, assignment.physical_path
        self._prepared[bucket] = path, self._loop.time()
        copy = await self._copy_of(assignment)
        await self._buckets.prepare(bucket.table_id)
        settings = self._buckets.table(bucket.table_id).settings
        replica: Replica | None = None
        while replica is None:
            try:
                replica = await Replica.open(self._host, assignment, settings, copy)
            except CorruptRecordError as e:
                if not await copy.discard_damaged(e):
                    raise
        try:
            await self._host.logs.flushed(replica.log)
        finally:
            replica.close(delete=False)
            self._buckets.forget_unused(bucket.table_id)
            await self._host.kv.settled()
        log.info("bucket_prepared", bucket=str(bucket), end_offset=replica.log.high_watermark)
