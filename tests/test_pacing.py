"""Long work on the event loop leaves turns to others."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator

from tests.waiting import WAIT_SECONDS
from zufluss.pacing import ASIDE_BYTES, TURN_SECONDS, WAKES_AT_ONCE, Pace, aside, paced


class Ticks:
    """A clock that advances by a fixed time with every look at it."""

    def __init__(self, seconds: float) -> None:
        self.now = 0.0
        self._seconds = seconds

    def __call__(self) -> float:
        self.now += self._seconds
        return self.now


async def turns_of(work: asyncio.Task[None]) -> int:
    """The turns of the event loop until a task has ended."""
    turns = 0
    while not work.done():
        turns += 1
        await asyncio.sleep(0)
    return turns


async def pauses(pace: Pace, count: int) -> None:
    for _ in range(count):
        await pace.pause()


def test_paced_work_takes_a_turn_for_every_share_of_its_time() -> None:
    async def run() -> tuple[int, int]:
        long = Pace(asyncio.get_running_loop(), Ticks(TURN_SECONDS / 10))
        short = Pace(asyncio.get_running_loop(), Ticks(TURN_SECONDS / 10_000))
        return (
            await turns_of(asyncio.ensure_future(pauses(long, 1000))),
            await turns_of(asyncio.ensure_future(pauses(short, 1000))),
        )

    long, short = asyncio.run(run())
    assert 50 < long < 300, "about one turn per ten looks at the clock"
    assert short <= 2, "work that is short is not interrupted"


def test_a_hundred_requests_share_the_time_of_one_turn_and_end_in_order() -> None:
    async def run() -> list[int]:
        pace = Pace(asyncio.get_running_loop(), Ticks(TURN_SECONDS / 10))
        ended: list[int] = []
        per_turn: list[int] = []
        steps = 0

        async def request(number: int) -> None:
            nonlocal steps
            for _ in range(20):
                await pace.pause()
                steps += 1
            ended.append(number)

        tasks = [asyncio.ensure_future(request(number)) for number in range(100)]
        before = 0
        while not all(task.done() for task in tasks):
            await asyncio.sleep(0)
            per_turn.append(steps - before)
            before = steps
        assert max(per_turn) <= 12, "the share of a turn does not grow with the requests"
        return ended

    assert asyncio.run(run()) == list(range(100))


def test_the_requests_of_all_connections_share_the_time_of_one_turn() -> None:
    """20 connections of 200 requests held the event loop for seconds: each had its own share."""

    async def run() -> None:
        loop = asyncio.get_running_loop()
        ticks = Ticks(TURN_SECONDS / 10)
        paces = [Pace(loop, ticks) for _ in range(20)]
        steps = [0] * len(paces)

        async def request(number: int) -> None:
            for _ in range(20):
                await paces[number].pause()
                steps[number] += 1

        tasks = [
            asyncio.ensure_future(request(number)) for number in range(len(paces)) for _ in range(5)
        ]
        while not all(task.done() for task in tasks):
            before = list(steps)
            await asyncio.sleep(0)
            done = [now - then for now, then in zip(steps, before, strict=True)]
            assert sum(done) <= 12 + len(paces), "a turn's share, and one item of each"
        assert steps == [100] * len(paces)

    asyncio.run(run())


def test_few_of_the_requests_that_wait_try_again_in_a_turn() -> None:
    """Thousands that try in vain in every turn hold the event loop with that alone."""

    async def run() -> None:
        clock = Ticks(TURN_SECONDS)
        pace = Pace(asyncio.get_running_loop(), clock)
        tasks = [asyncio.ensure_future(pauses(pace, 2)) for _ in range(1000)]
        await asyncio.sleep(0)  # each has looked at the clock once or twice
        while not all(task.done() for task in tasks):
            before = clock.now
            await asyncio.sleep(0)
            assert (clock.now - before) / TURN_SECONDS <= 2 * WAKES_AT_ONCE

    asyncio.run(run())


def test_work_that_is_cancelled_while_it_waits_does_not_keep_the_other_waiting() -> None:
    async def run() -> None:
        pace = Pace(asyncio.get_running_loop(), Ticks(TURN_SECONDS))
        tasks = [asyncio.ensure_future(pauses(pace, 3)) for _ in range(5 * WAKES_AT_ONCE)]
        for number in range(len(tasks) - 1):  # also those that were woken and have not gone on yet
            if number % WAKES_AT_ONCE == 0:
                await asyncio.sleep(0)
            tasks[number].cancel()
        async with asyncio.timeout(WAIT_SECONDS):
            await tasks[-1]

    asyncio.run(run())


def test_every_item_is_handed_out_once() -> None:
    async def run() -> list[int]:
        return [item async for item in paced(range(1000))]

    assert asyncio.run(run()) == list(range(1000))


def test_a_connection_does_not_wait_for_the_paced_work_of_another() -> None:
    async def run() -> list[str]:
        loop = asyncio.get_running_loop()
        ended: list[str] = []

        async def request(pace: Pace, steps: int, name: str) -> None:
            pace.adopt()
            async for _ in paced(range(steps)):
                pass
            assert Pace.current() is pace
            ended.append(name)

        busy = Pace(loop, Ticks(TURN_SECONDS))
        calm = Pace(loop, Ticks(TURN_SECONDS))
        await asyncio.gather(
            *(request(busy, 10_000, "busy") for _ in range(10)), request(calm, 640, "calm")
        )
        return ended

    assert asyncio.run(run())[0] == "calm"


def test_long_messages_are_handled_in_a_thread() -> None:
    async def run() -> tuple[bool, bool]:
        here = threading.get_ident()
        return (
            await aside(ASIDE_BYTES, threading.get_ident) == here,
            await aside(ASIDE_BYTES + 1, threading.get_ident) == here,
        )

    assert asyncio.run(run()) == (True, False)


def test_the_result_of_steps_leaves_turns_between_them() -> None:
    async def run() -> tuple[str, int]:
        pace = Pace(asyncio.get_running_loop(), Ticks(TURN_SECONDS / 10))
        work = asyncio.ensure_future(pace.result(iter([*[None] * 1000, "result", None])))
        turns = await turns_of(work)  # type: ignore[arg-type]
        return work.result(), turns

    result, turns = asyncio.run(run())
    assert result == "result"
    assert turns > 50


def test_long_requests_that_arrive_in_one_turn_are_not_all_begun_in_it() -> None:
    """Each of them is parsed in one piece, which takes as long as a turn may."""
    now = 0.0

    def parsed() -> Iterator[str]:
        nonlocal now
        now += TURN_SECONDS
        yield "request"

    async def run() -> int:
        pace = Pace(asyncio.get_running_loop(), lambda: now)
        requests = [asyncio.ensure_future(pace.result(parsed())) for _ in range(50)]
        turns = 0
        while not all(request.done() for request in requests):
            before, turns = now, turns + 1
            await asyncio.sleep(0)
            assert now - before <= 1.01 * TURN_SECONDS
        return turns

    assert asyncio.run(run()) >= 50
