"""A session that buckets are taken over from is read once, whoever asks and whoever gives up."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator

import pytest

from tests.log.shared.network import Network
from zufluss.cluster.wal import WalSession, WalSource
from zufluss.log.shared.api import LostObject, LostOffsetsError, Session
from zufluss.log.shared.objects import ObjectLog
from zufluss.log.shared.store import WalSettings
from zufluss.remote.wal import WalName, WalObject
from zufluss.tablet.shared.sources import KEEP_SECONDS, Sources
from zufluss.testing.shared_log import BUCKETS, WrittenSession, session

OF = session()
IDENTITY = WalSession(OF.server_id, OF.server_epoch, 1)
FAST, SLOW, _ = BUCKETS


class CountingLog(ObjectLog):
    """Counts the objects that are read; `turn` lets each one pass."""

    def __init__(self, network: Network) -> None:
        super().__init__(network, WalSettings(interval_seconds=0))
        self.numbers: list[int] = []
        self.turn = asyncio.Semaphore(1000)

    def let_pass(self) -> None:
        for _ in range(1000):
            self.turn.release()

    async def read(
        self, session: Session, floor: int, end: int | None
    ) -> AsyncGenerator[WalObject | LostObject, None]:
        number = floor
        async for each in super().read(session, floor, end):
            await self.turn.acquire()
            self.numbers.append(number)
            number += 1
            yield each


class Scene:
    """A session of eight objects, and a server that takes its buckets over."""

    def __init__(self) -> None:
        self.network = Network()
        self.network.at_once = True
        self.log = CountingLog(self.network)
        self.now = 0.0
        self.sources = Sources(OF.cluster_id, lambda location: self.log, lambda: self.now)
        self.written = WrittenSession(self.log, OF)

    async def write(self, objects: int = 8) -> None:
        for _ in range(objects):
            self.written.append(FAST)
            self.written.append(SLOW)
            await self.written.settle()

    async def tail(self, bucket: object, end: int, floor: int = 0, start: int = 0) -> int:
        found = await self.sources.tail(WalSource(IDENTITY, floor, end), bucket, start)  # type: ignore[arg-type]
        return found.end_offset


async def test_all_buckets_share_one_read_of_a_session_and_a_session_that_grows_is_read_on() -> (
    None
):
    scene = Scene()
    await scene.write()
    ends = await asyncio.gather(scene.tail(FAST, 8), scene.tail(SLOW, 8), scene.tail(FAST, 8))
    assert ends == [24, 24, 24]
    assert scene.log.numbers == [*range(8)]
    await scene.write(2)
    assert await scene.tail(SLOW, 10) == 30
    assert scene.log.numbers == [*range(10)], "the first eight are known"
    await scene.written.writer.stop()


async def test_a_bucket_that_gives_up_leaves_the_rest_of_the_read_to_the_next() -> None:
    scene = Scene()
    await scene.write()
    scene.log.turn = asyncio.Semaphore(3)
    first = asyncio.create_task(scene.tail(FAST, 8))
    second = asyncio.create_task(scene.tail(SLOW, 8))
    while len(scene.log.numbers) < 3:
        await asyncio.sleep(0)
    first.cancel()
    with pytest.raises(asyncio.CancelledError):
        await first
    scene.log.let_pass()
    assert await second == 24
    assert sorted(set(scene.log.numbers)) == [*range(8)]
    await scene.written.writer.stop()


async def test_a_read_that_takes_long_is_not_dropped_while_buckets_wait_for_it() -> None:
    scene = Scene()
    await scene.write()
    scene.log.turn = asyncio.Semaphore(3)
    waiting = asyncio.create_task(scene.tail(FAST, 8))
    while len(scene.log.numbers) < 3:
        await asyncio.sleep(0)
    scene.now += 10 * KEEP_SECONDS
    scene.sources.drop_unused()
    scene.log.let_pass()
    assert await waiting == 24
    scene.now += KEEP_SECONDS + 1
    scene.sources.drop_unused()
    assert await scene.tail(FAST, 8) == 24
    assert len(scene.log.numbers) == 16, "nobody asked for long, so it is read again"
    await scene.written.writer.stop()


async def test_what_was_trimmed_while_it_was_read_is_not_lost() -> None:
    scene = Scene()
    await scene.write()
    for number in range(4):
        del scene.network.objects[WalName(OF.server_epoch, number).path]
    with pytest.raises(LostOffsetsError):
        await scene.tail(FAST, 8, floor=0, start=0)
    assert await scene.tail(FAST, 8, floor=4, start=12) == 24
    await scene.written.writer.stop()


async def test_what_was_trimmed_is_not_kept_for_buckets_that_fail_again_and_again() -> None:
    scene = Scene()
    await scene.write()
    await scene.tail(FAST, 8)
    for floor in range(1, 20):
        await scene.write(1)
        scene.now += KEEP_SECONDS / 2
        scene.sources.drop_unused()
        start = 3 * floor
        assert await scene.tail(FAST, 8 + floor, floor, start) == 3 * (8 + floor)
        (copy,) = scene.sources._copies.values()
        kept = {number for objects in copy._objects.values() for number, _ in objects}
        assert kept == set(range(floor, 8 + floor))
    assert scene.log.numbers == [*range(27)], "and nothing is read twice"
    await scene.written.writer.stop()
