"""Memory runs out at each call of a session: nothing is lost, damaged, or waited for in vain."""

from __future__ import annotations

from collections import Counter

import pytest

from tests.fault.injection import Injector, Point
from tests.log.shared.test_writer import BUCKET, OTHER, SESSION, Writer
from tests.log.shared.virtual import VirtualLoop
from zufluss.log.shared.api import LostObject
from zufluss.log.shared.tails import SessionTails
from zufluss.remote.wal import EntryKind, WalObject

BUCKETS = (BUCKET, OTHER)
SIZE = 10
ROUNDS = 6


class Scene:
    """Two buckets, objects of different sizes, a carry, and a put that fails."""

    def __init__(self) -> None:
        self.loop = VirtualLoop()
        self.loop.set_exception_handler(lambda loop, context: None)
        self.writer = Writer(self.loop, interval_seconds=0.01, object_bytes=5 * SIZE)
        self.session = self.writer.session
        self.ends = dict.fromkeys(BUCKETS, 0)

    def run(self) -> None:
        for number in range(ROUNDS):
            for bucket in BUCKETS:
                for count in (1, 2, 1):
                    self.append(bucket, self.ends[bucket], self.ends[bucket] + count)
            if number == 3:
                self.append(BUCKET, 0, self.ends[BUCKET], EntryKind.CARRY)
            self.writer.settle(0.02)
            if number == 2:
                for request in self.writer.network.sent[:]:
                    self.writer.network.sent.remove(request)
                    request.fail()
                self.writer.settle(0.5)
            self.deliver()

    def append(
        self, bucket: object, first: int, end: int, kind: EntryKind = EntryKind.BATCHES
    ) -> None:
        batches = b"x" * SIZE * (end - first)
        try:
            self.session.append(bucket, 1, first, end, batches, kind)  # type: ignore[arg-type]
        except MemoryError:  # the bucket is opened again with what the session has
            end = self.session.end_offset(bucket) or 0  # type: ignore[arg-type]
        self.ends[bucket] = end  # type: ignore[index]

    def deliver(self) -> None:
        for request in self.writer.network.sent[:]:
            self.writer.network.deliver(request)
        self.writer.settle()

    def go_on(self) -> None:
        """What is called each second, once there is memory again."""
        for _ in range(2 * ROUNDS):
            self.session.go_on()
            self.writer.settle(1)
            self.deliver()

    async def check(self) -> None:
        session, read = self.session, list[WalObject | LostObject]()
        end = await session.drained()
        async for each in self.writer.log.read(SESSION, 0, end):
            read.append(each)
        tails = SessionTails(dict.fromkeys(BUCKETS, 0))
        for each in read:
            assert isinstance(each, WalObject)
            for entry in each.entries:
                assert entry.length == SIZE * (entry.end_offset - entry.first_offset)
            list(tails.add(each))
        assert (tails.end_offsets, tails.lost) == (self.ends, {})
        acknowledged = dict.fromkeys(BUCKETS, 0) | dict(self.writer.durable)
        assert acknowledged == self.ends, "all of it was acknowledged"
        assert {each.number for each in session.written} == set(range(end))
        assert session.waiting[:2] == (0, 0.0)
        assert not self.writer.fenced


def run(point: Point | None) -> Counter[tuple[str, str]]:
    """Run the scene with one call that fails; returns the calls that were seen."""
    injector, scene = Injector(), Scene()
    with injector.arming(point):
        scene.run()
    assert point is None or injector.raised is not None, "it was not reached"
    scene.go_on()
    scene.loop.finish(scene.check())
    scene.loop.end()
    return injector.counts


def test_a_session_goes_on_after_each_call_that_memory_ran_out_for() -> None:
    counts = run(None)
    points = [
        Point(error, name, hit + 1)
        for (error, name), hits in counts.items()
        if name.startswith("log.shared.")
        for hit in range(hits)
    ]
    assert len(points) > 100
    for point in points:
        try:
            run(point)
        except BaseException as problem:
            pytest.fail(f"{point}: {problem!r}")


def test_who_had_no_memory_to_hear_of_durable_rows_is_told_again() -> None:
    scene, heard = Scene(), list[object]()

    def deaf(ends: list[object]) -> None:
        heard.append(ends)
        if len(heard) == 1:
            raise MemoryError
        scene.writer.durable.extend(ends)  # type: ignore[arg-type]

    scene.session._on_durable = deaf
    scene.append(BUCKET, 0, 1)
    scene.writer.settle(1)
    scene.deliver()
    assert not scene.writer.durable
    scene.go_on()
    assert heard == [[(BUCKET, 1)]] * 2
    scene.loop.finish(scene.check())
    scene.loop.end()
