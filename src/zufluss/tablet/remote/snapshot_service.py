"""TAKE_KV_SNAPSHOT: a snapshot of one bucket now, without waiting for its interval.

A snapshot may take longer than a request. So it is taken in the background; a request waits a
moment for it, and the client asks again until it is finished. Concurrent requests for a bucket
share one snapshot. It ends with its bucket: a bucket that is opened again makes its files anew.
"""

from __future__ import annotations

import asyncio
from functools import partial
from typing import TYPE_CHECKING, Any, Final

from zufluss.model.table import TableBucket
from zufluss.replica.replica import Replica
from zufluss.tablet.buckets import Buckets
from zufluss.tablet.remote.kv_snapshots import KvSnapshotter
from zufluss.wire import messages as m
from zufluss.wire.tables import partition_id_of

if TYPE_CHECKING:
    from zufluss.net.services import RequestContext

WAIT_SECONDS: Final = 2.0
"""How long a request waits for its snapshot, and an outcome for the next request."""


class SnapshotService:
    """The handler of TAKE_KV_SNAPSHOT."""

    def __init__(self, buckets: Buckets, snapshots: KvSnapshotter) -> None:
        self._buckets = buckets
        self._snapshots = snapshots
        self._under_way: dict[TableBucket, asyncio.Task[Any]] = {}

    async def take_kv_snapshot(
        self, request: m.TakeKvSnapshotRequest, context: RequestContext
    ) -> m.TakeKvSnapshotResponse:
        """TAKE_KV_SNAPSHOT (30016): raises why the snapshot could not be taken."""
        replica = self._buckets.kv_replica(
            request.table_id, partition_id_of(request), request.bucket_id
        )
        task = self._under_way.get(replica.bucket) or self._begin(replica)
        await asyncio.wait([task], timeout=WAIT_SECONDS)
        if task.cancelled():
            raise self._buckets.why_not(*replica.bucket)
        if task.done():
            task.result()
        return m.TakeKvSnapshotResponse(finished=task.done())

    def _begin(self, replica: Replica) -> asyncio.Task[Any]:
        task = asyncio.ensure_future(self._snapshots.now(replica))
        self._under_way[replica.bucket] = task
        task.add_done_callback(partial(self._ended, replica.bucket))
        return task

    def _ended(self, bucket: TableBucket, task: asyncio.Task[Any]) -> None:
        """Keep the outcome until its client has asked again; a later request is for another one."""
        asyncio.get_running_loop().call_later(WAIT_SECONDS, self._forget, bucket, task)

    def _forget(self, bucket: TableBucket, task: asyncio.Task[Any]) -> None:
        if self._under_way.get(bucket) is task:
            del self._under_way[bucket]

    def closed(self, replica: Replica) -> None:
        """A bucket was closed: end its snapshot."""
        task = self._under_way.pop(replica.bucket, None)
        if task is not None:
            task.cancel()

    async def stop(self) -> None:
        """End the snapshots under way."""
        tasks = list(self._under_way.values())
        self._under_way.clear()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
