"""Buckets that wait for remote storage are tried again, and by one at a time."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest

from tests.waiting import WAIT_SECONDS
from zufluss.cluster.image import BucketState
from zufluss.cluster.replicas import ReplicaAssignment
from zufluss.errors import CorruptRecordError
from zufluss.model.table import PhysicalTablePath, TableBucket
from zufluss.remote.errors import LocationUnavailableError
from zufluss.tablet import reopen
from zufluss.tablet.reopen import Reopener

BUCKET = TableBucket(1, None, 0)
ASSIGNMENT = ReplicaAssignment(BUCKET, PhysicalTablePath("db", "t"), BucketState((0,), 0, 0))
DOWN = LocationUnavailableError("s3://bucket", "path", "no answer")


@pytest.fixture(autouse=True)
def _at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reopen, "FIRST_SECONDS", 0.0)


class Opening:
    """Opens a bucket as the test says: with one answer after the other, when it may."""

    def __init__(self, *answers: Exception | None) -> None:
        self.answers = list(answers)
        self.may = asyncio.Event()
        self.may.set()
        self.tried = asyncio.Event()
        self.done = 0

    async def open(self, assignment: ReplicaAssignment) -> Exception | None:
        self.tried.set()
        await self.may.wait()
        self.done += 1
        return self.answers.pop(0)


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(WAIT_SECONDS):
        while not condition():
            await asyncio.sleep(0)


async def test_a_bucket_is_tried_until_it_opens() -> None:
    opening = Opening(DOWN, DOWN, None)
    reopener = Reopener(opening.open)
    reopener.add(ASSIGNMENT)
    reopener.begin()
    await until(lambda: not reopener.waiting)
    assert opening.done == 3


async def test_a_bucket_that_turns_out_damaged_is_not_tried_again() -> None:
    opening = Opening(DOWN, CorruptRecordError("damaged"))
    reopener = Reopener(opening.open)
    reopener.add(ASSIGNMENT)
    reopener.begin()
    await until(lambda: not reopener.waiting)
    assert opening.done == 2


async def test_nothing_is_tried_before_everything_else_is_open() -> None:
    opening = Opening(None)
    reopener = Reopener(opening.open)
    reopener.add(ASSIGNMENT)
    for _ in range(10):
        await asyncio.sleep(0)
    assert not opening.tried.is_set()
    reopener.begin()
    await until(lambda: not reopener.waiting)
    assert opening.done == 1


async def test_a_try_under_way_is_waited_for_and_is_the_last() -> None:
    opening = Opening(DOWN, None)
    opening.may.clear()
    reopener = Reopener(opening.open)
    reopener.add(ASSIGNMENT)
    reopener.begin()
    await opening.tried.wait()
    ends = [asyncio.ensure_future(reopener.end([BUCKET])) for _ in range(2)]
    for _ in range(10):
        await asyncio.sleep(0)
    assert not any(end.done() for end in ends)
    opening.may.set()
    await asyncio.gather(*ends)
    assert (opening.done, reopener.waiting) == (1, 0)


async def test_a_bucket_that_waits_for_its_next_try_is_given_up_at_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(reopen, "FIRST_SECONDS", 3600.0)
    opening = Opening()
    reopener = Reopener(opening.open)
    reopener.add(ASSIGNMENT)
    reopener.begin()
    await asyncio.sleep(0)
    await reopener.end([BUCKET])
    assert (opening.done, reopener.waiting) == (0, 0)
