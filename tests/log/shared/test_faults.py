"""Sessions over an S3 server whose requests fail, get lost, or arrive after everybody gave up."""

from __future__ import annotations

import asyncio
import random
import uuid
from collections.abc import Iterator
from contextlib import suppress

import pytest

from tests.counts import rounds
from tests.waiting import eventually_async
from zufluss.log.shared.api import SharedLog
from zufluss.log.shared.objects import ObjectLog
from zufluss.log.shared.store import WalSettings
from zufluss.remote.objects import LocationUnavailableError, Objects
from zufluss.remote.uri import parse_location
from zufluss.testing.proxy import Fault, FaultProxy
from zufluss.testing.s3 import S3Server, properties
from zufluss.testing.shared_log import BUCKETS, WrittenSession, read_back, session

TIMEOUT_MS = 500
"""Of the requests of writers, some of which are never answered."""
HELD_SECONDS = 3600.0
"""Puts are held back until the test has them delivered."""


@pytest.fixture
def proxy(s3_server: S3Server) -> Iterator[FaultProxy]:
    s3_server.bucket("wal-faults")
    with FaultProxy("127.0.0.1", s3_server.port) as proxy:
        yield proxy


@pytest.fixture
def address() -> str:
    return f"s3://wal-faults/{uuid.uuid4()}"


def log_at(address: str, endpoint: str, timeout_ms: int = 60_000) -> SharedLog:
    uri = parse_location(address, "test")
    objects = Objects(uri, properties(endpoint), timeout_ms=timeout_ms, sign_payload=False)
    return ObjectLog(objects, WalSettings(interval_seconds=0))


async def read_whole(log: SharedLog, written: WrittenSession, end: int) -> None:
    """Everything that was acknowledged is there, once, and nothing is damaged."""
    starts = dict.fromkeys(BUCKETS, 0)
    tails, _ = await read_back(log, written.of, 0, end, starts)
    assert tails.lost == {}
    assert all(tails.end_offsets[bucket] >= written.durable[bucket] for bucket in BUCKETS)


@pytest.mark.parametrize(
    "faults",
    [
        [Fault("error_after_success", probability=0.3, methods=("PUT",), seed=1)],
        [Fault("reset", probability=0.3, seed=2)],
        [Fault("status_503", probability=0.3, seed=3)],
        [Fault("cut_body", probability=0.3, seed=4)],
        [
            Fault("error_after_success", probability=0.1, seed=5),
            Fault("reset", probability=0.1, seed=6),
            Fault("late", probability=0.05, seconds=0.3, methods=("PUT",), seed=7),
            Fault("half_open", probability=0.02, seed=8),
        ],
    ],
    ids=["lost answers", "resets", "throttling", "cut answers", "everything"],
)
async def test_failing_puts_lose_and_double_nothing_and_fence_nobody(
    faults: list[Fault], proxy: FaultProxy, address: str, s3_server: S3Server
) -> None:
    written = WrittenSession(log_at(address, proxy.endpoint, TIMEOUT_MS), session())
    proxy.set(faults)
    while proxy.hits < rounds(10, 2_000):
        for bucket in BUCKETS:
            written.append(bucket)
        await asyncio.sleep(0.002)  # so that there are several objects
        await written.writer.room()
    await written.settle()
    assert written.fenced == []
    assert written.durable == written.ends
    assert {kind for seen in proxy.seen for kind in seen.faults} >= {faults[0].kind}
    proxy.set()
    other = log_at(address, s3_server.endpoint)
    await read_whole(other, written, await other.seal(written.of, 0, 1))
    await written.writer.stop()


async def test_puts_that_arrive_after_the_seal_are_acknowledged_to_nobody(
    proxy: FaultProxy, address: str, s3_server: S3Server
) -> None:
    """The server was cut off, gave up, and its requests arrive when another one leads."""
    draw = random.Random(1)
    other = log_at(address, s3_server.endpoint)
    epoch = late = 0
    while late < rounds(20, 5_000):
        epoch += 1
        written = WrittenSession(log_at(address, proxy.endpoint, TIMEOUT_MS), session(epoch))
        await written.fill(draw.randrange(3))
        held = draw.randrange(1, 8)
        proxy.set([Fault("late", seconds=HELD_SECONDS, methods=("PUT",), count=held)])
        for _ in range(8):
            written.append(BUCKETS[draw.randrange(len(BUCKETS))])
            await asyncio.sleep(0)
        await eventually_async(lambda: _held_back(proxy), "puts are held back")
        end = await other.seal(written.of, 0, 1)
        if draw.random() < 0.5:  # the server has given them up, and has sent them again
            await written.settle()
        proxy.set()
        late += proxy.held_back
        proxy.deliver_late()
        await eventually_async(lambda: _none_held_back(proxy), "late requests arrived")
        await written.settle()
        if not written.fenced:  # all that it had sent was there before the seal
            written.append(BUCKETS[0])
            await written.until(lambda w=written: bool(w.fenced))  # type: ignore[misc]
        await read_whole(other, written, end)
        assert await other.seal(written.of, 0, 2) == end
        await written.writer.stop()


async def _held_back(proxy: FaultProxy) -> bool:
    return proxy.held_back > 0


async def _none_held_back(proxy: FaultProxy) -> bool:
    return proxy.held_back == 0


async def test_a_store_that_comes_back_gets_everything(
    proxy: FaultProxy, address: str, s3_server: S3Server
) -> None:
    written = WrittenSession(log_at(address, proxy.endpoint, TIMEOUT_MS), session())
    await written.fill(1)
    durable = dict(written.durable)
    proxy.set([Fault("reset")])
    for _ in range(5):
        for bucket in BUCKETS:
            written.append(bucket)
        await asyncio.sleep(0)
    before = len(proxy.seen)
    await eventually_async(lambda: _seen(proxy, before + 8), "puts were tried again")
    assert written.durable == durable
    proxy.set()
    await written.settle()
    assert written.durable == written.ends
    other = log_at(address, s3_server.endpoint)
    await read_whole(other, written, await other.seal(written.of, 0, 1))
    await written.writer.stop()


async def _seen(proxy: FaultProxy, count: int) -> bool:
    return len(proxy.seen) >= count


async def test_a_seal_gets_through_a_store_that_fails(
    proxy: FaultProxy, address: str, s3_server: S3Server
) -> None:
    written = WrittenSession(log_at(address, s3_server.endpoint), session())
    await written.fill(2)
    proxy.set([Fault("error_after_success", probability=0.5, methods=("PUT",), seed=3)])
    ends: list[int] = []
    while len(ends) < 3:
        with suppress(LocationUnavailableError):  # its caller seals again
            ends.append(await log_at(address, proxy.endpoint).seal(written.of, 0, len(ends)))
    assert ends == [2, 2, 2]
    await read_whole(log_at(address, s3_server.endpoint), written, 2)
    await written.writer.stop()
