"""Work that is tried until it succeeds."""

from __future__ import annotations

import asyncio

from zufluss.coordinator.worklist import WorkList
from zufluss.errors import NetworkError


async def test_each_key_is_worked_on_once_with_few_at_a_time() -> None:
    running: set[int] = set()
    most = 0
    done: list[int] = []

    async def work(key: int) -> None:
        nonlocal most
        running.add(key)
        most = max(most, len(running))
        await asyncio.sleep(0)
        running.remove(key)
        done.append(key)

    items = WorkList[int]("test", work, workers=3)
    for key in (*range(10), 4, 5):
        items.add(key)
    assert items.pending == 10
    items.start()
    await items.settle()
    assert (sorted(done), most, items.pending) == (list(range(10)), 3, 0)
    await items.stop()


async def test_what_failed_is_tried_again_by_itself() -> None:
    tries = 0
    succeeded = asyncio.Event()

    async def work(key: str) -> None:
        nonlocal tries
        tries += 1
        if tries == 1:
            raise NetworkError("gone")
        if tries == 2:
            raise RuntimeError("a bug")
        succeeded.set()

    items = WorkList[str]("test", work, workers=1, first_seconds=0.001)
    items.start()
    items.add("a")
    await succeeded.wait()
    await items.settle()
    assert (tries, items.failures, items.pending) == (3, 2, 0)
    await items.stop()


async def test_a_key_added_while_it_is_worked_on_is_worked_on_again() -> None:
    begun, go = asyncio.Event(), asyncio.Event()
    done: list[str] = []

    async def work(key: str) -> None:
        begun.set()
        await go.wait()
        done.append(key)

    items = WorkList[str]("test", work, workers=2)
    items.start()
    items.add("a")
    await begun.wait()
    items.add("a")
    go.set()
    await items.settle()
    assert done == ["a", "a"]
    await items.stop()


async def test_stop_ends_what_is_under_way_and_begins_nothing_more() -> None:
    async def work(key: str) -> None:
        await asyncio.Event().wait()

    items = WorkList[str]("test", work, workers=1)
    items.start()
    items.add("a")
    items.add("b")
    await asyncio.sleep(0)
    await items.stop()
    assert items.failures == 0
