"""Snapshots that an operator asks for, on a real tablet server."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.tablet.gateway import Gateway
from tests.tablet.keyed import Keyed, keyed, many
from tests.tablet.support import TABLE
from zufluss.errors import NotLeaderError, OffsetOutOfRangeError
from zufluss.net.services import RequestContext
from zufluss.tablet.remote import snapshot_service
from zufluss.wire import messages as m

CONTEXT = RequestContext(None, "CLIENT", 0, "test")


class SlowGateway(Gateway):
    """Commits a snapshot when the gate opens."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = asyncio.Event()
        self.commits = asyncio.Semaphore(0)

    async def commit_snapshot(
        self, metadata: bytes, leader_epoch: int, locations_version: int = 0
    ) -> None:
        self.commits.release()
        await self.gate.wait()
        await super().commit_snapshot(metadata, leader_epoch, locations_version)


@asynccontextmanager
async def slow_snapshots(root: Path) -> AsyncIterator[tuple[Keyed, SlowGateway]]:
    gateway = SlowGateway()
    async with keyed(root, gateway=gateway) as tablet:
        await tablet.put(*many(0, 10))
        yield tablet, gateway
        gateway.gate.set()


async def take(tablet: Keyed, offset: int | None = None) -> Any:
    request = m.TakeKvSnapshotRequest(table_id=TABLE, bucket_id=0, log_offset=offset)
    return await tablet.server._snapshot_service.take_kv_snapshot(request, CONTEXT)


async def test_a_client_asks_again_until_its_snapshot_is_taken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(snapshot_service, "WAIT_SECONDS", 0.0)
    async with slow_snapshots(tmp_path) as (tablet, gateway):
        answer = await take(tablet)
        assert (answer.finished, answer.log_offset) == (False, 10)
        await tablet.put(*many(10, 20))
        await gateway.commits.acquire()
        assert not (await take(tablet, 10)).finished
        gateway.gate.set()
        while not (await take(tablet, 10)).finished:
            await asyncio.sleep(0)
        assert [snapshot.log_offset for snapshot in gateway.snapshots] == [10]


async def test_a_snapshot_that_nobody_came_back_for_is_no_answer_to_a_later_request(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A killed client left a finished task, and the next operator was told that all is done."""
    monkeypatch.setattr(snapshot_service, "WAIT_SECONDS", 0.0)
    async with slow_snapshots(tmp_path) as (tablet, gateway):
        assert not (await take(tablet)).finished
        gateway.gate.set()
        while not gateway.snapshots:
            await asyncio.sleep(0)
        await tablet.put(*many(10, 20))
        monkeypatch.setattr(snapshot_service, "WAIT_SECONDS", 60.0)
        answer = await take(tablet)
        while not answer.finished:
            answer = await take(tablet, answer.log_offset)
        assert gateway.snapshots[-1].log_offset == 20


async def test_a_snapshot_ends_with_its_bucket_and_the_client_learns_why(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(snapshot_service, "WAIT_SECONDS", 60.0)
    async with slow_snapshots(tmp_path) as (tablet, gateway):
        taking = asyncio.ensure_future(take(tablet))
        await gateway.commits.acquire()
        await tablet.drop(0)
        with pytest.raises(NotLeaderError, match="stopped"):
            await taking


async def test_an_offset_beyond_the_end_of_the_changelog_is_refused(tmp_path: Path) -> None:
    async with keyed(tmp_path) as tablet:
        await tablet.put(*many(0, 10))
        with pytest.raises(OffsetOutOfRangeError, match="ends at offset 10"):
            await take(tablet, 11)
