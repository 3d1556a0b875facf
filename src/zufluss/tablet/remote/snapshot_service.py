"""TAKE_KV_SNAPSHOT: a snapshot of one bucket now, without waiting for its interval.

A snapshot may take longer than a request. So it is taken in the background: a request waits a
moment for it, and the client asks again until it is finished. The first answer names the high
watermark of the bucket, and the client repeats it. The request is finished when a snapshot reaches
that offset, also one that somebody else asked for.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Final

from zufluss.errors import NotLeaderError, OffsetOutOfRangeError
from zufluss.model.table import TableBucket
from zufluss.remote.snapshot import KvSnapshot
from zufluss.replica.replica import Replica
from zufluss.tablet.buckets import Buckets
from zufluss.tablet.remote.kv_snapshots import KvSnapshotter
from zufluss.wire import messages as m
from zufluss.wire.tables import partition_id_of

if TYPE_CHECKING:
    from zufluss.net.services import RequestContext

WAIT_SECONDS: Final = 2.0
"""How long a request waits for its snapshot."""


class SnapshotService:
    """The handler of TAKE_KV_SNAPSHOT."""

    def __init__(self, buckets: Buckets, snapshots: KvSnapshotter) -> None:
        self._buckets = buckets
        self._snapshots = snapshots
        self._under_way: dict[TableBucket, asyncio.Task[KvSnapshot | None]] = {}

    async def take_kv_snapshot(
        self, request: m.TakeKvSnapshotRequest, context: RequestContext
    ) -> m.TakeKvSnapshotResponse:
        """TAKE_KV_SNAPSHOT (30016): raises why the snapshot could not be taken."""
        self._buckets.check_present()  # the answer says that no row below the offset is missing
        replica = self._buckets.kv_replica(
            request.table_id, partition_id_of(request), request.bucket_id
        )
        end = replica.log.high_watermark
        offset = request.log_offset if request.HasField("log_offset") else None
        if offset is None:
            offset = end
        elif offset > end:
            raise OffsetOutOfRangeError(
                f"{replica.bucket.named(replica.path)} ends at offset {end}, so no snapshot "
                f"reaches {offset}; repeat the offset of the first answer"
            )
        elif self._snapshots.reached(replica, offset):
            return m.TakeKvSnapshotResponse(finished=True, log_offset=offset)
        finished = await self._taken(replica, offset)
        return m.TakeKvSnapshotResponse(finished=finished, log_offset=offset)

    async def _taken(self, replica: Replica, offset: int) -> bool:
        """Wait a moment for a snapshot; returns whether one reaches the offset."""
        task = self._under_way.get(replica.bucket) or self._begin(replica)
        await asyncio.wait([task], timeout=WAIT_SECONDS)
        if not task.done():
            return False
        if task.cancelled():
            raise NotLeaderError(
                f"{replica.bucket.named(replica.path)} stopped while its snapshot was taken; "
                "refresh the metadata and try again"
            )
        snapshot = task.result()
        return snapshot is None or snapshot.log_offset >= offset

    def _begin(self, replica: Replica) -> asyncio.Task[KvSnapshot | None]:
        bucket = replica.bucket
        task = asyncio.ensure_future(self._snapshots.now(replica))
        self._under_way[bucket] = task

        def over(task: asyncio.Task[KvSnapshot | None]) -> None:
            if self._under_way.get(bucket) is task:
                del self._under_way[bucket]
            if not task.cancelled():
                task.exception()  # the clients that wait raise it; there may be none

        task.add_done_callback(over)
        return task

    def closed(self, replica: Replica) -> None:
        """A bucket was closed: end its snapshot."""
        task = self._under_way.get(replica.bucket)
        if task is not None:
            task.cancel()

    async def stop(self) -> None:
        """End the snapshots under way."""
        tasks = list(self._under_way.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
