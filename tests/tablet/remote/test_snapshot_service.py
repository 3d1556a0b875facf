"""A snapshot that a request asked for ends with its bucket, and answers no later request."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.tablet.gateway import Gateway
from tests.tablet.keyed import Keyed, serving
from tests.tablet.support import TABLE
from zufluss.cluster.remote import BucketRemote
from zufluss.errors import ZuflussError
from zufluss.model.table import TableBucket
from zufluss.tablet.remote import snapshot_service
from zufluss.wire import messages as m


class SlowGateway(Gateway):
    """A coordinator that answers questions about buckets when it may."""

    def __init__(self) -> None:
        super().__init__()
        self.answers = asyncio.Event()
        self.answers.set()

    async def bucket_remotes(
        self, buckets: Sequence[TableBucket]
    ) -> dict[TableBucket, BucketRemote]:
        await self.answers.wait()
        return await super().bucket_remotes(buckets)


def take(tablet: Keyed) -> asyncio.Task[m.TakeKvSnapshotResponse]:
    request = m.TakeKvSnapshotRequest(table_id=TABLE, bucket_id=0)
    context: Any = None
    return asyncio.ensure_future(tablet.server._snapshot_service.take_kv_snapshot(request, context))


async def test_a_snapshot_ends_with_its_bucket_and_its_request_is_answered(tmp_path: Path) -> None:
    """Its files would be replaced by those of the bucket that is opened again."""
    gateway = SlowGateway()
    tablet = Keyed(tmp_path, gateway=gateway)
    async with serving(tablet):
        await tablet.put((1, "one"))
        gateway.answers.clear()
        request = take(tablet)
        await asyncio.sleep(0)
        tablet.replica().fail("a test")
        async with asyncio.timeout(60):
            with pytest.raises(ZuflussError, match="a test") as refused:
                await request
        assert refused.value.retriable
        gateway.answers.set()
        async with asyncio.timeout(60):
            while tablet.server.assignments.retries.waiting:
                await asyncio.sleep(0.01)
        assert gateway.snapshots == []
        assert (await take(tablet)).finished
        assert len(gateway.snapshots) == 1


async def test_an_outcome_that_nobody_asked_for_does_not_answer_a_later_request(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(snapshot_service, "WAIT_SECONDS", 0.0)
    tablet = Keyed(tmp_path)
    async with serving(tablet):
        await tablet.put((1, "one"))
        assert not (await take(tablet)).finished
        async with asyncio.timeout(60):
            while not tablet.gateway.snapshots or tablet.server._snapshot_service._under_way:
                await asyncio.sleep(0.01)
            await tablet.put((2, "two"))
            await take(tablet)
            while len(tablet.gateway.snapshots) < 2:
                await asyncio.sleep(0.01)
